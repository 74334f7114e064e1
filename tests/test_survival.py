"""Crashes and resuming: signals, damaged checkpoints, full disks, changed data and configs, a second process."""

import hashlib
import json
import os
import shutil
import signal
from contextlib import nullcontext

import pytest
import runs
import torch
from conftest import write_tiny
from runs import checkpoints, content, end, flip, metrics, run, steps

import configure
import train
from data.bins import check_dataset, fingerprint
from model import GPT
from runtime import RunError, checkpoint, distributed, folder
from runtime import state as train_state
from runtime.folder import RunFolder
from runtime.signals import EXIT_CODE, Stop

RATE, ALONE = train.learning_rate, distributed.Ranks(0, 1, torch.device("cpu"))
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# The most state to resume: dropout, selection biases, a log interval that is cut, the history of losses.
HARD = ["model.dropout=0.1", "train.bias_update_rate=0.01", "train.loss_spike=skip", "log.interval=4"]
HARD += ["train.max_steps=7", "train.checkpoint_interval=3", "train.keep_checkpoints=9", "eval.interval=3"]
HARD += ["eval.windows=20", "train.micro_batch_size=4", "model.n_layer=1", "train.ema_decay=0.9"]


def forget_the_last_evaluation(config):
    metrics = folder.path_of(config) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))


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
    """`main(*overrides)`: train.py's exit code. A signal that it does not take raises here."""

    def unheard(number, frame):
        raise AssertionError(f"signal {number} is not listened to")

    before = {number: signal.signal(number, unheard) for number in STOPPING}
    monkeypatch.setattr("os.isatty", lambda number: False)  # SIGHUP must not silence pytest
    yield lambda *keys, fresh=(): train.main([str(tiny_file), *(f"--{key}" for key in keys), *fresh], Stop().listen())
    for number, handler in before.items():
        signal.signal(number, handler)


PLACES = {  # what is called there, and which of its calls count
    "start-up": (train_state, "build_optimizer", lambda *_: True),
    "step": (train, "learning_rate", lambda *_: True),
    "save": (checkpoint.Saver, "_write", lambda *_: True),
    # 5 micro-batches each, then 5 with the mean of the weights
    "evaluation": (GPT, "forward", lambda model, *_: not model.training),
}


@pytest.fixture
def at(monkeypatch):
    """`at(place, action, after=n)`: call `action` at a place of training, when it has been there n times before.

    Returns a list that grows each time.
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
    [("start-up", 0, []), ("step", 4, [3, 5]), ("save", 0, [3, 4])]  # a save cut short would not be intact
    # before the first step, between steps, after the last
    + [("evaluation", 2, []), ("evaluation", 17, [3]), ("evaluation", 32, [3, 6, 7])],
)
def test_signal_ends_the_run_at_a_checkpoint(main, tiny, at, undisturbed, saves_end_first, capsys, place, after, saved):
    """At once, but for a step, which is completed; the same command ends like an undisturbed run."""
    saves_end_first()
    calls = at(place, kill(signal.SIGTERM), after)
    assert main(*HARD) == EXIT_CODE == 75
    step = saved[-1] if saved else 0
    assert capsys.readouterr().out.strip().endswith(f"asked to stop, saved at step {step}. The same command resumes it")
    assert len(calls) == after + 1 + (place == "save") and steps(tiny(*HARD)) == saved
    lines = metrics(tiny(*HARD))
    assert not any(line["step"] == step and "val/loss" in line for line in lines)
    assert main(*HARD) == 0
    assert end(tiny(*HARD)) == undisturbed


def test_other_signals_stop_too_and_a_second_interrupt_at_once(main, tiny, at, saves_end_first):
    saves_end_first()
    for saved, number in enumerate((signal.SIGUSR1, signal.SIGHUP, signal.SIGINT), 1):
        at("step", kill(number))
        assert main(*HARD) == EXIT_CODE
        assert steps(tiny(*HARD))[-1] == saved
    for _ in range(2):
        at("step", kill(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        main(*HARD)
    assert steps(tiny(*HARD))[-1] == 3
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
    at("step", kill(signal.SIGHUP))
    assert main(*HARD) == 0


# ---- checkpoints that are damaged, and not written
@pytest.mark.parametrize("finished", [True, False])
def test_run_with_a_damaged_newest_checkpoint_ends_like_an_undisturbed_one(main, tiny, undisturbed, capsys, finished):
    """Also one that had finished: its last checkpoint is trained again."""
    assert main(*HARD) == 0
    flip(checkpoints(tiny()) / "step_00000007/__0_0.distcp", 999)
    shutil.rmtree(checkpoints(tiny()) / "step_00000006")
    if not finished:
        forget_the_last_evaluation(tiny())
    capsys.readouterr()
    assert main(*HARD) == 0
    output = capsys.readouterr().out
    assert "step_00000007/__0_0.distcp: damaged" in output and "from step 3" in output
    assert end(tiny(*HARD)) == undisturbed
    assert main(*HARD) == 0 and "finished already, 7 steps" in capsys.readouterr().out


def test_run_whose_checkpoints_are_all_damaged_is_left_alone(main, tiny, capsys):
    assert main("train.checkpoint_interval=2") == 0
    for step in (2, 4):
        flip(checkpoint.folder_of(checkpoints(tiny()), step) / "manifest.json", 999)
    before = sorted(content(folder.path_of(tiny())).values())
    for _ in range(2):
        assert main("train.max_steps=8") == 2
        assert "--fresh" in capsys.readouterr().err
        assert sorted(content(folder.path_of(tiny())).values()) == before  # under other names


@pytest.fixture
def full_disk(monkeypatch):
    """A set of steps: while their checkpoints are written no file grows beyond 20 kB."""
    steps, write = set(), checkpoint.Saver._write

    def writing(saver, step, *args):
        with runs.largest_file(20_000) if step in steps else nullcontext():
            write(saver, step, *args)

    monkeypatch.setattr(checkpoint.Saver, "_write", writing)
    return steps


@pytest.mark.parametrize(
    "step, on_error, code, left", [(6, "stop", 2, [3]), (3, "warn", 0, [6, 7]), (7, "warn", 2, [3, 6])]
)
def test_full_disk_stops_the_run_or_is_a_warning(
    main, tiny, undisturbed, full_disk, saves_end_first, capsys, step, on_error, code, left
):
    """As the config says; but a last save that fails is always an error. With room the same command finishes."""
    saves_end_first()
    full_disk.add(step)
    assert main(*HARD, f"train.on_save_error={on_error}") == code
    said = capsys.readouterr()
    *_, line = [line for line in (said.out + said.err).splitlines() if "the checkpoint could not be written" in line]
    assert line.startswith("error" if code else "warning") and f"step_{step:08d}" in line
    assert sorted(path.name for path in checkpoints(tiny()).iterdir()) == [f"step_{done:08d}" for done in left]
    full_disk.clear()
    assert main(*HARD) == 0
    assert end(tiny(*HARD)) == undisturbed


# ---- one process per folder
def test_second_process_on_a_run_is_refused_until_the_first_is_dead(tiny, main, capsys):
    run(tiny("train.max_steps=2"))
    path = folder.path_of(tiny())
    before, (read, write) = content(path), os.pipe()
    if not (holder := os.fork()):
        with RunFolder(path).claim(ALONE):
            signal.alarm(600)
            os.write(write, b"locked")
            signal.pause()
    os.read(read, 6)
    try:
        assert main() == 2
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    error = capsys.readouterr().err
    assert f"another process trains this run (process {holder} on {os.uname().nodename}" in error and "--fresh" in error
    assert content(path) == before
    assert main() == 0 and steps(tiny())[-1] == 4  # the file is there still, the lock is not


# ---- the data set, changed
@pytest.mark.parametrize("what", ["data", "tokenizer"])
def test_changed_data_set_is_refused_before_a_model_is_built(tiny, tmp_path, corpus, monkeypatch, what):
    path, where = tmp_path / "data/tiny", f"data.dir={(tmp_path / 'data').as_posix()}"
    shutil.copytree(corpus / "tiny", path)
    run(tiny(where, "train.max_steps=2"))
    then = checkpoint.verify(checkpoints(tiny()) / "step_00000002")["facts"]
    before = content(folder.path_of(tiny()))
    meta = json.loads((path / "meta.json").read_text())
    if what == "data":
        flip(path / "train-00000.bin", 0)
        digest = hashlib.sha256((path / "train-00000.bin").read_bytes()).hexdigest()
        meta["splits"]["train"]["files"][0]["sha256"] = digest
    else:
        meta["tokenizer"]["hash"] = "0" * 64
    (path / "meta.json").write_text(json.dumps(meta))
    monkeypatch.setattr(train_state, "GPT", None)
    with pytest.raises(RunError, match=f"the {what} has changed since step 2.*--fresh") as caught:
        train.train(tiny(where))
    now = fingerprint(check_dataset(path, 257))
    assert then[what] in str(caught.value) and now[what] in str(caught.value) and then[what] != now[what]
    assert content(folder.path_of(tiny())) == before


# ---- micro-batches, changed


# ---- the same bits
def test_deterministic_asks_torch_for_it(tiny, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    own = ["model.dropout=0.1", "train.max_steps=2"]
    try:
        run(tiny("run.name=without", *own))
        assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        configs = [tiny(f"run.name={name}", "train.deterministic=true", *own) for name in ("first", "second")]
        for config in configs:
            run(config)
            assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
    assert end(configs[0]) == end(configs[1])
