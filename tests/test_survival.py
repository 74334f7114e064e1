"""Crashes and resuming: signals, damaged checkpoints, full disks, changed data and configs, a
second process.

This file is the program of torchrun's ranks, too.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import runs
import torch.distributed as dist
from conftest import write_tiny
from runs import ALONE, checkpoints, column, content, end, flip, metrics, run, steps

import configure
import train
from data.bins import check_dataset, fingerprint
from eval import val_loss
from eval.trained import load_model
from hf.export import export
from model import GPT
from report import __main__ as report
from runtime import RunError, checkpoint, folder
from runtime import state as train_state
from runtime.folder import RunFolder
from runtime.launch import EXIT_CODE, Stop
from scripts import sample

RATE = train.learning_rate
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# The most state to resume: dropout, masks, selection biases, a log interval that is cut.
HARD = [
    "model.dropout=0.1",
    "model.n_layer=1",
    "data.document_mask=true",
    "train.bias_update=quantile",
    "train.ema_decay=0.9",
    "train.micro_batch_size=4",
    "train.max_steps=7",
    "train.checkpoint_interval=3",
    "train.keep_checkpoints=9",
    "eval.interval=2",
    "eval.windows=20",
    "log.interval=4",
]


@pytest.fixture(scope="module")
def module_file(tmp_path_factory, corpus):
    return write_tiny(tmp_path_factory.mktemp("survival"), corpus)


@pytest.fixture(scope="module")
def undisturbed(module_file):
    config = configure.load(module_file, [*HARD, "run.name=undisturbed"])
    train.train(config)
    return end(config)


# ---- being asked to stop: one process
@pytest.fixture
def main(tiny_file, monkeypatch):
    """`main(*overrides)`: train.py's exit code.

    A signal for which it sets no handler fails the test.
    """

    def fail(number, frame):
        raise AssertionError(f"signal {number} is not listened to")

    before = {number: signal.signal(number, fail) for number in STOPPING}
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("os.isatty", lambda number: False)  # SIGHUP must not silence pytest
    yield lambda *keys, fresh=(): train.main(
        [str(tiny_file), *(f"--{key}" for key in keys), *fresh], Stop().listen()
    )
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_rank_ends_where_torchrun_is_killed_while_torch_is_imported(tiny, tiny_file):
    """It would look for torchrun's store for train.timeout_minutes, 10."""
    rank = [sys.executable, "train.py", str(tiny_file), "--train.micro_batch_size=4"]
    job = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
    job += " MASTER_PORT=9 TORCHELASTIC_RUN_ID=1 TORCHELASTIC_USE_AGENT_STORE=True"
    launcher = subprocess.Popen(
        ["sh", "-c", f'{job} "$@" & echo $!; wait', "sh", *rank],
        cwd=runs.REPO_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pid = int(launcher.stdout.readline())
    maps = Path(f"/proc/{pid}/maps")
    # the command line is checked, once signals are listened to, before torch is imported
    runs.wait_until(lambda: "pydantic_core" in maps.read_text())
    early = "libtorch" not in maps.read_text()
    launcher.kill()
    try:
        output, _ = launcher.communicate(timeout=300)  # until the rank ends, too
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    assert early and re.search("(?m)^torchrun was killed before its ranks met", output), output
    assert not folder.path_of(tiny()).exists()


def test_a_backend_that_cannot_run_leaves_no_folder(tiny, monkeypatch):
    monkeypatch.setattr("kernels.triton", None)
    monkeypatch.setitem(sys.modules, "kernels.triton_kernels", None)
    with pytest.raises(RunError, match="model.backend: .* needs Triton"):
        train.train(tiny("model.backend=triton"))
    assert not folder.path_of(tiny()).exists()


PLACES = {  # what is called there, and which of its calls count
    "start-up": (train_state, "build_optimizer", lambda *_: True),
    "step": (train, "seed_step", lambda *_: True),
    "save": (checkpoint.Saver, "_save", lambda *_: True),
    # 5 micro-batches each, then 5 with the mean of the weights
    "evaluation": (GPT, "forward", lambda model, *_: not model.training),
}


@pytest.fixture
def at(monkeypatch):
    """`at(place, action, after=n)`: call `action` the (n + 1)th time that training is there; the
    list of all times.
    """

    def at(place, action, after=0):
        owner, name, counts = PLACES[place]
        call, calls = getattr(owner, name), []

        def calling(*args):
            if counts(*args):
                calls.append(place)
                if len(calls) == after + 1:
                    action()
            return call(*args)

        monkeypatch.setattr(owner, name, calling)
        return calls

    return at


def kill(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "place, after, saved",
    # a save cut short would not be intact
    [("start-up", 0, []), ("step", 4, [3, 5]), ("save", 0, [3, 4])]
    # before the first step, where no save is due, after the last
    + [("evaluation", 2, []), ("evaluation", 17, [2]), ("evaluation", 42, [3, 6, 7])],
)
def test_signal_ends_the_run_at_a_checkpoint(
    main, tiny, at, undisturbed, saves_end_first, capsys, place, after, saved
):
    """At once, though a step that has begun is completed.

    The same command then ends like an undisturbed run.
    """
    saves_end_first()
    calls = at(place, kill(signal.SIGTERM), after)
    assert main(*HARD) == EXIT_CODE == 75
    step = saved[-1] if saved else 0
    said = f"asked to stop, saved at step {step}. The same command resumes it\n"
    assert capsys.readouterr().out.endswith(said)
    assert len(calls) == after + 1 + (place == "save") and steps(tiny(*HARD)) == saved
    assert not any(line["step"] == step for line in metrics(tiny(*HARD)) if "val/loss" in line)
    assert main(*HARD) == 0
    assert end(tiny(*HARD)) == undisturbed


@pytest.mark.parametrize(
    "numbers",
    # the last: one Ctrl-C after another signal ends nothing at once
    [[signal.SIGUSR1], [signal.SIGINT], [signal.SIGHUP], [signal.SIGTERM, signal.SIGINT]],
)
def test_other_signals_that_ask_to_stop(main, tiny, at, numbers):
    at("step", lambda: [kill(number)() for number in numbers], after=1)
    assert main(*HARD) == EXIT_CODE
    assert steps(tiny(*HARD)) == [2]


def test_second_interrupt_ends_at_once(main, tiny, at, saves_end_first):
    saves_end_first()
    at("step", kill(signal.SIGINT), after=4)
    at("step", kill(signal.SIGINT), after=4)
    with pytest.raises(KeyboardInterrupt):
        main(*HARD)
    assert steps(tiny(*HARD)) == [3]


def test_signals_that_nohup_ignores_stay_ignored(main, tiny, at):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at("step", kill(signal.SIGHUP), after=1)
    assert main(*HARD) == 0


# ---- being asked to stop: two ranks
LAUNCHER = ("SIGUSR1", "SIGKILL")  # what torchrun is sent
TWO = [*HARD, "train.micro_batch_size=2", "train.timeout_minutes=5"]


def config_of(file, name, *overrides):
    return configure.load(file, [*TWO, f"run.dir={(file.parent / name).as_posix()}", *overrides], 2)


def signal_launcher(file, name):
    """A rank of torchrun, to which rank 0 sends the signal `name` in step 4.

    Writes and ends with train.py's exit code.
    """
    stop, rank = Stop().listen(), os.environ["RANK"]

    def learning_rate(optim, max_steps, step):
        if step == 4 and rank == "0":
            os.kill(os.getppid(), getattr(signal, name))
            runs.wait_until(lambda: stop.asked)  # it has come back to here
        return RATE(optim, max_steps, step)

    train.learning_rate = learning_rate
    keys = [f"--{key}" for key in (*TWO, f"run.dir={file.parent / name}")]
    code = train.main([str(file), *keys], stop)
    (file.parent / f"{name}.{rank}.code").write_text(str(code))
    sys.exit(code)


def be_a_rank(file):
    """Resume the runs whose launcher was sent a signal, and do what else takes two ranks.

    Writes errors.
    """
    rank = int(os.environ["RANK"])
    stop = Stop()
    evaluate, forward = train.evaluate, GPT.forward

    def case(name, *overrides):
        runs.meet_in(file.parent / f"{name}.{len(cases)}.store")
        cases.append(name)
        try:
            train.train(config_of(file, name, *overrides), stop)
        except Exception as error:
            (file.parent / f"{name}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
            if dist.is_initialized():
                dist.destroy_process_group()

    def ask(state, step, *args):
        stop.asked = rank == 1 and step == 2
        return evaluate(state, step, *args)

    def poison(model, *args):
        out = forward(model, *args)
        bad = rank == 1 and model.training
        return out._replace(loss=out.loss * math.nan, losses=out.losses * math.nan) if bad else out

    cases = []
    for name in ("undisturbed", *LAUNCHER):
        case(name)
    with mock.patch.object(train, "evaluate", ask):
        case("evaluation")
    stop.asked = False
    case("evaluation")
    with mock.patch.object(GPT, "forward", poison):
        case("nan")
    claimed = RunFolder(folder.path_of(config_of(file, "locked"))).claim(ALONE)
    with claimed if rank == 0 else nullcontext():
        case("locked", "train.parallel=fsdp")


@pytest.fixture(scope="module")
def jobs(module_file):
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    arguments = ["--standalone", "--nproc_per_node=2", signals, __file__, module_file]
    return runs.run_torchrun({name: [*arguments, name] for name in LAUNCHER})


@pytest.fixture(scope="module")
def resumed(jobs, module_file):
    """What the first of two ranks prints that resume the runs of `jobs`, among other things."""
    output, _ = runs.wait_for_ranks(runs.start_ranks(2, be_a_rank, module_file), 600)
    return output


def assert_resumed(module_file, name, saved):
    config = config_of(module_file, name)
    assert end(config) == end(config_of(module_file, "undisturbed"))
    assert steps(config) == saved


@pytest.mark.integration
@pytest.mark.parametrize("name", LAUNCHER)
def test_all_ranks_stop_when_their_launcher_is_told_to(jobs, resumed, module_file, name):
    code, output = jobs[name]
    codes = [(module_file.parent / f"{name}.{rank}.code").read_text() for rank in range(2)]
    assert codes == ["75", "75"] and "saved at step 5" in output, output
    assert code == -signal.SIGKILL if name == "SIGKILL" else code not in (0, 2)
    assert not list(module_file.parent.glob(f"{name}.*.error"))
    assert f"{name}/tiny: kern" in resumed and "from step 5" in resumed
    assert_resumed(module_file, name, [3, 5, 6, 7])


ERRORS = {
    "evaluation": "Stopped: .*saved at step 2",
    "nan": "RunError: .*train loss nan in step 1",
    "locked": "RunError: .*another process trains this run",  # alone on rank 0
}


@pytest.mark.integration
@pytest.mark.parametrize("name", ERRORS)
def test_all_ranks_end_for_the_same_reason(resumed, module_file, name):
    for rank in range(2):
        assert re.match(ERRORS[name], (module_file.parent / f"{name}.{rank}.error").read_text())
    if name == "evaluation":
        assert_resumed(module_file, name, [2, 3, 6, 7])
    if name == "nan":
        (file,) = folder.path_of(config_of(module_file, name)).glob("crash-*.json")
        first, second = json.loads(file.read_text())["ranks"]
        assert all(math.isfinite(loss) for loss in first["losses"]) and "nan" in second["losses"]
        assert not {*first["windows"]} & {*second["windows"]}


# ---- checkpoints that are damaged, and not written


def test_run_whose_checkpoints_are_all_damaged_is_left_alone(main, tiny, capsys):
    assert main("train.checkpoint_interval=2") == 0
    for step in (2, 4):
        flip(checkpoint.folder_of(checkpoints(tiny()), step) / "manifest.json", 999)
    before = sorted(content(folder.path_of(tiny())).values())
    for _ in range(2):
        assert main("train.max_steps=8") == 2
        assert "--fresh" in capsys.readouterr().err
        assert sorted(content(folder.path_of(tiny())).values()) == before  # under other names


def test_output_that_nobody_reads_ends_no_training(tiny_file, corpus):
    """`| tee` that died, a closed terminal, one without umlauts."""
    place = tiny_file.parent / "größe"
    reader, writer = os.pipe()
    os.close(reader)
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh"]
    command = [*closed, sys.executable, "train.py", str(tiny_file), f"--run.dir={place}"]
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, cwd=runs.REPO_ROOT, stdout=writer, env=variables, timeout=300)
    os.close(writer)
    assert ended.returncode == 0
    assert checkpoint.steps(place / "tiny/checkpoints") == [4]
    (line,) = (place / "tiny/output.log").read_text().splitlines()
    assert line.endswith(" stdout cannot be written (Broken pipe); the run goes on")


def test_a_finished_run_is_closed_by_its_newest_intact_checkpoint(tiny, main, capsys):
    own = ["eval.interval=1", "train.checkpoint_interval=1", "train.keep_steps=1"]
    assert main(*own) == 0 and steps(tiny()) == [1, 3, 4]
    assert main(*own, "train.max_steps=3") == 2
    assert "is at step 4, after train.max_steps = 3" in capsys.readouterr().err
    flip(checkpoints(tiny()) / "step_00000004/__0_0.distcp", 99)
    assert main(*own, "train.max_steps=3") == 0
    said = capsys.readouterr().out
    assert "step_00000004/__0_0.distcp: damaged" in said
    loss = column(metrics(tiny()), "val/loss")[3]
    assert f"finished already, 3 steps, val loss {loss:.4f}, " in said


@pytest.mark.parametrize("step, left", [(6, [3]), (7, [3, 6])])
def test_full_disk_stops_the_run(
    main, tiny, undisturbed, monkeypatch, saves_end_first, capsys, step, left
):
    """With room the same command finishes."""
    save = checkpoint.Saver._save

    def save_without_room(saver, number, *args):
        with runs.largest_file(20_000) if number == step else nullcontext():
            save(saver, number, *args)

    saves_end_first()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Saver, "_save", save_without_room)
        assert main(*HARD) == 2
    assert metrics(tiny(*HARD))[-1]["step"] == step  # none after it
    said = rf"error.*step_{step:08d}.*checkpoint could not be written.*Older ones are intact"
    last = re.findall(f".*{said}.*", capsys.readouterr().err)[-1]
    assert last.startswith("error") and "enforce fail" not in last
    assert [path.name for path in sorted(checkpoints(tiny()).iterdir())] == [
        f"step_{done:08d}" for done in left
    ]
    assert main(*HARD) == 0
    assert end(tiny(*HARD)) == undisturbed


# ---- the data set, changed
@pytest.mark.parametrize("what", ["data", "tokenizer"])
def test_changed_data_set_is_refused_before_a_model_is_built(
    tiny, tmp_path, corpus, monkeypatch, what
):
    path = shutil.copytree(corpus / "tiny", tmp_path / "data/tiny")
    where = f"data.dir={path.parent}"
    run(tiny(where, "train.max_steps=2"))
    then = fingerprint(check_dataset(path, 257))[what]
    before = content(folder.path_of(tiny()))
    meta = json.loads((path / "meta.json").read_text())
    if what == "data":
        flip(path / "train-00000.bin", 0)
        digest = hashlib.sha256((path / "train-00000.bin").read_bytes()).hexdigest()
        meta["splits"]["train"]["files"][0]["sha256"] = digest
    else:
        meta["tokenizer"]["hash"] = "0" * 64
    (path / "meta.json").write_text(json.dumps(meta))
    now = fingerprint(check_dataset(path, 257))[what]
    monkeypatch.setattr(train_state, "GPT", None)
    change = f"the {what} has changed since step 2: sha256 {then} then, {now} now.*--fresh"
    with pytest.raises(RunError, match=change):
        train.train(tiny(where))
    assert now != then and content(folder.path_of(tiny())) == before


# ---- the config, changed
# the loss depends on the size of micro-batches, which else may change
MICRO = ["train.balance_loss_coef=0.1", "train.balance_loss_scope=micro_batch"]


CHANGES = [  # override, and what is said of it
    ("model.norm_eps=0.1", "1e-05 -> 0.1"),
    ("optim.lr=0.03", "0.003 -> 0.03"),
    ("run.seed=3", "0 -> 3"),
    ("data.document_mask=true", "False -> True"),
    ("train.micro_batch_size=4", "8 -> 4"),
    ("data.name=other", "'tiny' -> 'other'"),
]


def test_weights_are_refused_under_a_config_that_is_not_theirs(tiny, tmp_path, main, capsys):
    """By all commands."""
    run(tiny(*MICRO))
    place = folder.path_of(tiny())
    commands = {
        "train": lambda change: main(*MICRO, change),
        "resume": lambda change: main(*MICRO, change, "train.max_steps=5"),
        "eval": lambda _: val_loss.main([str(place)]),
        "sample": lambda _: sample.main([str(place), "--prompt", "a"]),
        "export": lambda _: export.main([str(place), str(tmp_path / "out")]),
        "report": lambda _: report.main([str(place), "--out", str(tmp_path / "report")]),
    }
    for change, words in CHANGES:
        RunFolder(place).write_config(tiny(*MICRO, change))
        before = content(place)
        for command, call in commands.items():
            capsys.readouterr()
            assert call(change) == 2, command
            said = f"{change.partition('=')[0]}: {words}"
            if (command, change) == ("resume", "data.name=other"):
                said = "other: no such data set"
            assert said in capsys.readouterr().err, command
        assert content(place) == before
    assert not (tmp_path / "out").exists()
    RunFolder(place).write_config(tiny(*MICRO, "log.interval=3"))
    load_model(place)


def test_full_disk_at_the_claim_names_the_folder(main, tiny, capsys):
    with runs.largest_file(0):
        assert main() == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert f"{folder.path_of(tiny())} cannot be written" in line and "Make room" in line


# ---- another process, between plan and claim
@pytest.mark.parametrize(
    "changed, change",
    [
        (["train.max_steps=3"], "step 2 and now at step 3"),
        (["train.max_steps=2", "optim.lr=1e-3"], "this run"),
    ],
)
def test_a_run_that_changed_since_it_was_planned_is_left_alone(tiny, monkeypatch, changed, change):
    """It would be trained from a checkpoint, or with settings, that are no longer its own."""
    run(tiny("train.max_steps=2"))
    plan_run, place = train.plan_run, folder.path_of(tiny())

    def plan_slowly(*args):
        plan = plan_run(*args)
        monkeypatch.setattr(train, "plan_run", plan_run)
        if len(changed) == 2:
            shutil.rmtree(place)
        train.train(tiny(*changed))
        return plan

    monkeypatch.setattr(train, "plan_run", plan_slowly)
    said = f"{place}.* another process changed .*{change}.*again"
    with pytest.raises(RunError, match=said):
        train.train(tiny("train.max_steps=4"))
    config = tiny(*changed)
    assert steps(config)[-1] == config.train.max_steps
    assert configure.load(place / "config.toml") == config
    train.train(tiny(*changed[1:]))


if __name__ == "__main__":
    signal_launcher(Path(sys.argv[1]), sys.argv[2])
