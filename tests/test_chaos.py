"""scripts/chaos.py: its faults, and its verdict on runs that are equal and runs that differ."""

import json
import random
import shutil
import signal
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from conftest import write_tiny

import configure
import train
from runtime import RunError, checkpoint, folder
from runtime.checkpoint import DamagedError
from runtime.metrics import read_metrics
from scripts import chaos

FAULTS = [chaos.Fault("SIGKILL to a rank", "in a step", 1), chaos.Fault("SIGKILL to a rank", "in a save", 2)]


def run_in(path):
    return chaos.Run(Path(path), [], ranks=1, max_steps=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus):
    """A folder with two equal runs of 4 steps, undisturbed and disturbed, with checkpoints of steps 2 and 4."""
    file = write_tiny(tmp_path_factory.mktemp("chaos"), corpus)
    for name in ("undisturbed", "disturbed"):
        settings = [f"run.name={name}", "train.checkpoint_interval=2", "train.keep_checkpoints=2"]
        train.train(configure.load(file, settings))
    return file.parent / "runs"


@pytest.fixture
def calm(runs):
    return run_in(runs / "undisturbed")


@pytest.fixture
def torn(runs, tmp_path):
    return run_in(shutil.copytree(runs / "disturbed", tmp_path / "disturbed"))


def change_last_line(run, **changes):
    *lines, last = read_metrics(run.folder / "metrics.jsonl")
    text = "".join(json.dumps(line) + "\n" for line in [*lines, last | changes])
    (run.folder / "metrics.jsonl").write_text(text)


def test_equal_runs_succeed(calm, torn, capsys):
    change_last_line(torn, **{"perf/step_ms": 1e6})  # times are not compared
    assert chaos.print_report(calm, torn, FAULTS) == 0
    printed = capsys.readouterr().out
    assert "2 faults survived: 2 SIGKILL to a rank\n1 in a step, 1 in a save\n" in printed
    assert "steps lost: 3 in all, 2 at most, of 4\n" in printed
    assert "weights and AdamW's state at step 4: equal\nmetrics.jsonl, 7 lines without times: equal\n" in printed


def test_another_loss_fails(calm, torn, capsys):
    change_last_line(torn, **{"val/loss": 1.0})
    assert chaos.print_report(calm, torn, FAULTS) == 1
    printed = capsys.readouterr().out
    assert "step 4: equal\n" in printed and "times: DIFFERENT\n" in printed


def test_other_weights_fail(calm, torn, tiny, capsys):
    other = tiny("run.name=other", "run.seed=1")
    train.train(other)
    shutil.rmtree(torn.checkpoints)
    shutil.copytree(folder.path_of(other) / "checkpoints", torn.checkpoints)
    assert chaos.print_report(calm, torn, FAULTS) == 1
    printed = capsys.readouterr().out
    assert "step 4: DIFFERENT\n" in printed and "times: equal\n" in printed


def test_a_run_without_its_last_checkpoint_is_an_error(calm, torn):
    shutil.rmtree(torn.checkpoints / "step_00000004")
    with pytest.raises(DamagedError):
        chaos.print_report(calm, torn, FAULTS)


@pytest.fixture
def job(request):
    """A process that ends as train.py does when it is asked to stop: with exit code 75, or another as parameter."""
    code = getattr(request, "param", 75)
    command = ["sh", "-c", f"trap 'exit {code}' TERM; echo ready; while :; do sleep 0.05; done"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("kind", chaos.FAULTS)
def test_faults(torn, job, kind):
    before = (torn.folder / "metrics.jsonl").read_bytes()
    assert chaos.inject_fault(kind, torn, job, random.Random(0))
    assert job.returncode == (75 if "SIGTERM" in kind else -signal.SIGKILL)
    assert torn.find_intact_step() == (2 if "checkpoint" in kind else 4)
    added = (torn.folder / "metrics.jsonl").read_bytes().removeprefix(before)
    assert added == (b'{"step": 1' if "line" in kind else b"") and torn.read_last_step() == 4


def test_the_only_checkpoint_is_not_damaged(torn, job):
    shutil.rmtree(torn.checkpoints / "step_00000002")
    assert chaos.inject_fault("latest checkpoint cut short", torn, job, random.Random(0))
    assert torn.find_intact_step() == 4
    shutil.rmtree(torn.checkpoints)
    assert torn.find_intact_step() == 0


@pytest.mark.parametrize("job", [1], indirect=True)
def test_wrong_exit_code_after_sigterm_is_an_error(torn, job):
    with pytest.raises(RunError, match="exit code 1 after SIGTERM, expected 75"):
        chaos.inject_fault("SIGTERM to a rank", torn, job, random.Random(0))


@pytest.mark.parametrize("job", [0], indirect=True)
def test_a_job_that_ends_before_its_fault_suffers_none(torn, job):
    assert not chaos.inject_fault("SIGTERM to a rank", torn, job, random.Random(0))
    assert torn.find_intact_step() == 4


@pytest.fixture
def fault_by_fault(monkeypatch):
    """`fault_by_fault((before, after), …)`: call one while the job runs, the other in place of the fault."""

    def fault_by_fault(*actions):
        moments, faults = iter([before for before, _ in actions]), iter([after for _, after in actions])
        monkeypatch.setattr(chaos.Run, "start", lambda run: nullcontext())
        monkeypatch.setattr(chaos, "wait_for_moment", lambda *_: next(moments)())
        monkeypatch.setattr(chaos, "inject_fault", lambda *_: next(faults)() is None)
        monkeypatch.setattr(chaos, "train_to_the_end", lambda run: None)

    return fault_by_fault


def test_place_and_steps_lost_of_a_fault(torn, fault_by_fault):
    saving, newest = torn.checkpoints / "step_00000006.tmp", torn.checkpoints / "step_00000004"
    fault_by_fault(
        (saving.mkdir, saving.rmdir),
        (lambda: change_last_line(torn, step=6), lambda: shutil.rmtree(newest)),
        ((torn.folder / "metrics.jsonl").unlink, lambda: None),
    )
    survived = chaos.train_under_faults(torn, 3, random.Random(0))
    assert [fault[1:] for fault in survived] == [("in a save", 0), ("in a step", 4), ("at the start", 0)]
    assert {fault.kind for fault in survived} <= chaos.FAULTS.keys()


def test_a_job_that_ends_before_its_fault_is_put_back(torn, fault_by_fault):
    found, newest = [], torn.checkpoints / "step_00000004"
    fault_by_fault(
        (lambda: shutil.rmtree(newest) or 0, lambda: False),  # over before the moment; the next, before the signal
        (lambda: shutil.rmtree(newest), lambda: None),
        (lambda: found.append(torn.find_intact_step()), None),
    )
    assert len(chaos.train_under_faults(torn, 1, random.Random(0))) == 1
    assert found == [4] and not torn.folder.with_name("disturbed.before").exists()


def test_a_job_that_ends_before_its_first_fault_starts_anew(torn, fault_by_fault):
    shutil.move(torn.folder, torn.folder.with_name("later"))
    begin = partial(shutil.copytree, torn.folder.with_name("later"), torn.folder)
    fault_by_fault((lambda: begin() and 0, lambda: None), (lambda: begin() and None, None))
    assert len(chaos.train_under_faults(torn, 1, random.Random(0))) == 1


def test_a_job_that_always_ends_before_its_fault_is_an_error(torn, fault_by_fault):
    fault_by_fault(*[(lambda: 0, None)] * chaos.TRIES)
    with pytest.raises(RunError, match="ended before a fault 20 times, .*set a larger --train.max_steps"):
        chaos.train_under_faults(torn, 1, random.Random(0))


def test_a_job_that_fails_by_itself_is_an_error(torn, fault_by_fault):
    fault_by_fault((lambda: 1, None))
    with pytest.raises(RunError, match="ended by itself with exit code 1"):
        chaos.train_under_faults(torn, 1, random.Random(0))


@pytest.mark.integration
def test_a_run_survives_faults(tiny_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process's handlers stay
    words = [str(tiny_file), "--faults", "3", "--out", str(tmp_path / "out"), "--train.max_steps=30"]
    assert chaos.main(words) == 0, [path.read_text() for path in (tmp_path / "out").glob("*.log")]
    assert "3 faults survived" in capsys.readouterr().out
    steps = checkpoint.steps(tmp_path / "out/disturbed/checkpoints")
    assert steps[-1] == 30
    assert chaos.main([*words[:-1], "--train.max_steps=0"]) == 2  # a wrong config
