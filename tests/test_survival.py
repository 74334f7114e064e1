"""Runs that survive: signals at any moment, damaged checkpoints, full disks, changed data and configs, one process per
folder, and --fresh.

This file is the program of torchrun's ranks, too.
"""

import fcntl
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import TINY
from runs import (
    Forked,
    assert_same_columns,
    checkpoints,
    column,
    end,
    meet_in,
    run,
    run_with_margin,
    start_ranks,
    steps,
)

import configure
import train
from configure.schema import KEYS
from data.bins import check_dataset, fingerprint
from data.tokenizer import ByteTokenizer
from data.writer import Writer
from model import GPT
from runtime import RunError, checkpoint, distributed, folder
from runtime import state as train_state
from runtime.metrics import read_metrics
from runtime.signals import EXIT_CODE, Stop

REPO_ROOT = Path(__file__).parents[1]
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# The most state to resume: dropout, selection biases, a log interval that is cut, the history of losses.
HARD = ["model.dropout=0.1", "train.bias_update_rate=0.01", "train.loss_spike=skip", "log.interval=4"]
HARD += ["train.max_steps=7", "train.checkpoint_interval=3", "train.keep_checkpoints=9", "eval.interval=3"]
HARD += ["eval.windows=40", "train.micro_batch_size=2"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def forget_the_last_evaluation(config):
    """Without it a run is not finished."""
    metrics = folder.path_of(config) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))


def content(path):
    """{path: sha256} of all files below `folder`."""
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def module_file(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("survival")
    file = folder / "tiny.toml"
    file.write_text(TINY.format(runs=(folder / "runs").as_posix(), data=corpus.as_posix()))
    return file


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
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield lambda *keys, fresh=(): train.main([str(tiny_file), *(f"--{key}" for key in keys), *fresh], Stop().listen())
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def at(monkeypatch):
    """`at(place, action, after=n)`: call `action` at a place of training, when it has been there n times before."""
    places = {
        "start-up": (train_state, "build_optimizer"),
        "step": (train, "learning_rate"),
        "save": (checkpoint.Saver, "_write"),
    }

    def at(place, action, after=0):
        owner, name = places[place]
        call, calls = getattr(owner, name), []

        def calling(*args, **options):
            calls.append(name)
            if len(calls) == after + 1:
                action()
            return call(*args, **options)

        monkeypatch.setattr(owner, name, calling)

    return at


@pytest.fixture
def during_evaluation(monkeypatch):
    """`during_evaluation(number, action)`: in the third of 20 micro-batches of the evaluation of that number. Returns a
    list of all micro-batches of evaluations."""

    def during_evaluation(number, action):
        forward, passes = GPT.forward, []

        def watched(model, *args):
            if not model.training:
                passes.append(1)
                if len(passes) == 20 * number + 3:
                    action()
            return forward(model, *args)

        monkeypatch.setattr(GPT, "forward", watched)
        return passes

    return during_evaluation


def kill(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING, ids=[number.name for number in STOPPING])
def test_signal_in_a_step_saves_after_it(main, tiny, at, undisturbed, capsys, number):
    at("step", kill(number), after=4)
    assert main(*HARD) == EXIT_CODE == 75
    assert capsys.readouterr().out.strip().endswith("asked to stop, saved at step 5. The same command resumes it")
    assert steps(tiny(*HARD)) == [3, 5]
    if number == signal.SIGTERM:  # the others differ in their handler alone
        assert main(*HARD) == 0
        assert "from step 5" in capsys.readouterr().out
        assert end(tiny(*HARD)) == undisturbed


def test_signal_at_start_up_ends_before_the_first_step(main, tiny, at, undisturbed):
    at("start-up", kill(signal.SIGTERM))
    assert main(*HARD) == EXIT_CODE
    assert steps(tiny(*HARD)) == [] and read_metrics(folder.path_of(tiny(*HARD)) / "metrics.jsonl") == []
    assert main(*HARD) == 0
    assert end(tiny(*HARD)) == undisturbed


@pytest.mark.parametrize("evaluation, step", [(0, 0), (1, 3), (3, 7)])  # before the first step, between, after the last
def test_signal_in_an_evaluation_ends_it(main, tiny, during_evaluation, undisturbed, evaluation, step):
    passes = during_evaluation(evaluation, kill(signal.SIGTERM))
    assert main(*HARD) == EXIT_CODE
    assert len(passes) == 20 * evaluation + 3  # it did not wait for the other 17
    assert steps(tiny(*HARD)) == [s for s in (3, 6, 7) if s <= step]
    assert column(read_metrics(folder.path_of(tiny(*HARD)) / "metrics.jsonl"), "step").count(step) < 2
    assert main(*HARD) == 0
    assert end(tiny(*HARD)) == undisturbed


def test_signal_in_a_save_saves_the_next_step_too(main, tiny, at, undisturbed):
    at("save", kill(signal.SIGTERM))
    assert main(*HARD) == EXIT_CODE
    first, last = steps(tiny(*HARD))
    assert first == 3 < last  # both intact
    assert main(*HARD) == 0
    assert end(tiny(*HARD)) == undisturbed


def test_second_interrupt_ends_at_once(main, tiny, at, saves_end_first):
    saves_end_first()
    at("step", kill(signal.SIGINT), after=4)
    at("step", kill(signal.SIGINT), after=4)
    with pytest.raises(KeyboardInterrupt):
        main(*HARD)
    assert steps(tiny(*HARD)) == [3]


@pytest.mark.integration
def test_train_py_ends_with_the_code_that_asks_for_another_start(tiny_file, tiny, main):
    """The real program and a signal from outside, at any moment of a run that is too long to end by itself."""
    command = [sys.executable, "train.py", tiny_file, "--train.max_steps=1000000", "--eval.interval=1000000"]
    process = subprocess.Popen(command, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    metrics = folder.path_of(tiny()) / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and column(read_metrics(metrics), "train/loss")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 75, output
    (saved,) = steps(tiny())
    assert f"saved at step {saved}" in output
    assert main(f"train.max_steps={saved + 2}", "eval.interval=1000000") == 0
    lines = read_metrics(metrics)
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, saved + 3))


# ---- being asked to stop: two ranks


class Way(NamedTuple):
    number: int
    sender: int  # the rank that sends it, in step 4
    to_launcher: bool


WAYS = {
    "SIGTERM to a rank": Way(signal.SIGTERM, 1, False),
    "SIGUSR1 to the launcher": Way(signal.SIGUSR1, 0, True),
    "SIGKILL to the launcher": Way(signal.SIGKILL, 0, True),
}
LAUNCHED = [name for name, way in WAYS.items() if way.to_launcher]  # by torchrun; the other needs none
TWO = [*HARD, "train.timeout_minutes=1"]


def config_of(file, name, *overrides):
    return configure.load(file, [*TWO, f"run.dir={(file.parent / name).as_posix()}", *overrides], 2)


def be_signalled(file, name):
    """A rank whose run is asked to stop in step 4. Writes and ends with train.py's exit code."""
    way, stop, rate, rank = WAYS[name], Stop().listen(), train.learning_rate, os.environ["RANK"]

    def learning_rate(optim, max_steps, step):
        if step == 4 and int(rank) == way.sender:
            os.kill(os.getppid() if way.to_launcher else os.getpid(), way.number)
            hung = time.monotonic() + 300
            while not stop.asked and time.monotonic() < hung:  # until it has come back to here
                time.sleep(0.01)
        return rate(optim, max_steps, step)

    overrides = [f"--{key}" for key in [*TWO, f"run.dir={(file.parent / name).as_posix()}"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "learning_rate", learning_rate)
        code = train.main([str(file), *overrides], stop)
    Path(file.parent, f"{name}.{rank}.json").write_text(json.dumps(code))
    sys.exit(code)


def be_a_rank(file):
    """Be asked to stop, resume all runs that were, and what else takes two ranks. Writes errors."""
    rank, forward, meetings = int(os.environ["RANK"]), GPT.forward, count()

    def case(name, config, stop=None):
        """Ranks meet in a file of their own for each."""
        meet_in(file.parent / f"{next(meetings)}.store")
        try:
            train.train(config, stop)
        except Exception as error:
            (file.parent / f"{name}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
            if dist.is_initialized():
                dist.destroy_process_group()

    meet_in(file.parent / "asked.store")
    with pytest.raises(SystemExit):
        be_signalled(file, "SIGTERM to a rank")
    case("undisturbed", config_of(file, "undisturbed"))
    for name in WAYS:
        case(name, config_of(file, name))
    damaged = config_of(file, "damaged")
    if rank == 0:
        shutil.copytree(file.parent / "SIGTERM to a rank", file.parent / "damaged")
        forget_the_last_evaluation(damaged)
        flip(checkpoints(damaged) / "step_00000007/.metadata")
        flip(checkpoints(damaged) / "step_00000006/__0_0.distcp")
        (file.parent / "damaged.ready").touch()
    while not (file.parent / "damaged.ready").exists():
        time.sleep(0.01)
    case("damaged", damaged)
    stop, passes = Stop(), []

    def asked(model, *args):
        passes.extend([] if model.training else [1])
        stop.asked = rank == 1 and len(passes) == 10 + 3
        return forward(model, *args)

    GPT.forward = asked
    case("evaluation", config_of(file, "evaluation"), stop)
    (file.parent / f"evaluation.{rank}.json").write_text(json.dumps(len(passes)))
    GPT.forward = forward
    case("evaluation", config_of(file, "evaluation"))

    def poisoned(model, *args):
        out = forward(model, *args)
        bad = rank == 1 and model.training and torch.is_grad_enabled()
        return out._replace(loss=out.loss * math.nan) if bad else out

    GPT.forward = poisoned
    case("nan", config_of(file, "nan"))
    GPT.forward = forward
    locked = config_of(file, "locked", "train.parallel=fsdp")
    if rank == 0:
        folder.path_of(locked).mkdir(parents=True)
        held = (folder.path_of(locked) / "lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
    case("locked", locked)


@pytest.fixture(scope="module")
def jobs(module_file):
    """{way: (exit code of the launcher, its output)}. All start together, since they wait for most of their time."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    torchrun.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    processes = {
        name: subprocess.Popen(
            [*torchrun, __file__, module_file, name],
            env=os.environ | {"PYTHONPATH": str(REPO_ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for name in LAUNCHED
    }
    outputs = {name: process.communicate(timeout=600)[0] for name, process in processes.items()}  # of all its ranks
    return {name: (process.returncode, outputs[name]) for name, process in processes.items()}


@pytest.fixture(scope="module")
def resumed(jobs, module_file):
    """What the first of two ranks prints that resume the runs of `jobs`, among other things."""
    (code, output), (other_code, _) = (rank.wait(600) for rank in start_ranks(2, be_a_rank, module_file))
    assert (code, other_code) == (0, 0), output
    return output


@pytest.mark.integration
@pytest.mark.parametrize("name", WAYS)
def test_all_ranks_stop_at_the_same_step_and_resume(jobs, resumed, module_file, name):
    code, output = jobs.get(name, (75, resumed))
    assert [json.loads((module_file.parent / f"{name}.{rank}.json").read_text()) for rank in range(2)] == [75, 75], (
        output
    )
    assert "saved at step 5" in output
    assert code == -signal.SIGKILL if WAYS[name].number == signal.SIGKILL else code not in (0, 2)
    assert not list(module_file.parent.glob(f"{name}.*.error"))
    assert f"{name}/tiny: kern" in resumed and "from step 5" in resumed
    config = config_of(module_file, name)
    assert end(config) == end(config_of(module_file, "undisturbed"))
    assert steps(config) == [3, 5, 6, 7]


@pytest.mark.integration
def test_one_rank_asked_in_an_evaluation_ends_it_on_all(resumed, module_file):
    for rank in range(2):
        error = (module_file.parent / f"evaluation.{rank}.error").read_text()
        assert error.startswith("Stopped") and "saved at step 3" in error
        assert json.loads((module_file.parent / f"evaluation.{rank}.json").read_text()) == 10 + 3  # of 10 each
    assert end(config_of(module_file, "evaluation")) == end(config_of(module_file, "undisturbed"))


@pytest.mark.integration
def test_ranks_take_the_newest_intact_checkpoint(resumed, module_file):
    assert not list(module_file.parent.glob("damaged.*.error"))
    for step, name in ((7, ".metadata"), (6, "__0_0.distcp")):
        assert resumed.count(f"/damaged/tiny/checkpoints/step_{step:08d}/{name}: damaged") == 1
    config = config_of(module_file, "damaged")
    assert end(config) == end(config_of(module_file, "undisturbed"))
    assert (checkpoints(config) / "step_00000007.damaged").is_dir() and steps(config) == [3, 5, 6, 7]


@pytest.mark.integration
def test_loss_of_one_rank_that_is_not_finite_stops_all(resumed, module_file):
    for rank in range(2):
        error = (module_file.parent / f"nan.{rank}.error").read_text()
        assert error.startswith("RunError") and "train loss nan in step 1" in error
    (file,) = folder.path_of(config_of(module_file, "nan")).glob("crash-*.json")
    report = json.loads(file.read_text())
    losses = [[micro["loss"] for micro in rank["micro_batches"]] for rank in report["ranks"]]
    assert len(losses) == 2 and losses[1] == ["nan"] * 2 and all(math.isfinite(loss) for loss in losses[0])


@pytest.mark.integration
def test_error_of_the_first_rank_alone_ends_all_at_once(resumed, module_file):
    """Otherwise the others would wait for it where they next meet."""
    for rank in range(2):
        error = (module_file.parent / f"locked.{rank}.error").read_text()
        assert error.startswith("RunError") and "another process trains this run" in error


# ---- checkpoints by the clock, damaged, and not written


def test_minutes_between_checkpoints(tiny):
    run(tiny("train.checkpoint_minutes=1e-9", "train.checkpoint_interval=0", "train.keep_checkpoints=9"))
    assert steps(tiny()) == [1, 2, 3, 4]
    run(tiny("run.name=never", "train.checkpoint_minutes=0", "train.checkpoint_interval=0"))
    assert steps(tiny("run.name=never")) == [4]


def test_run_with_a_damaged_newest_checkpoint_ends_like_an_undisturbed_one(main, tiny, undisturbed, capsys):
    assert main(*HARD) == 0
    flip(checkpoints(tiny()) / "step_00000007/__0_0.distcp")
    shutil.rmtree(checkpoints(tiny()) / "step_00000006")
    forget_the_last_evaluation(tiny())
    capsys.readouterr()
    assert main(*HARD) == 0
    output = capsys.readouterr().out
    assert "step_00000007/__0_0.distcp: damaged" in output and "from step 3" in output
    assert end(tiny(*HARD)) == undisturbed


def test_run_whose_checkpoints_are_all_damaged_is_left_alone(main, tiny, capsys):
    often = ["train.checkpoint_interval=2", "train.max_steps=6"]
    assert main(*often) == 0
    for step in (4, 6):
        flip(checkpoint.folder_of(checkpoints(tiny()), step) / "manifest.json")
    before = sorted(digest for path, digest in content(folder.path_of(tiny())).items() if path.name != "lock")
    for _ in range(2):
        assert main(*often, "train.max_steps=8") == 2
        assert "--fresh" in capsys.readouterr().err
        after = sorted(digest for path, digest in content(folder.path_of(tiny())).items() if path.name != "lock")
        assert after == before


@pytest.fixture
def full_disk(monkeypatch):
    """A set of steps: while their checkpoints are written no file grows beyond 20 kB."""
    steps, write, limits = set(), checkpoint.Saver._write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def writing(saver, step, *args):
        if step in steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            write(saver, step, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(checkpoint.Saver, "_write", writing)
    return steps


OFTEN = ["train.checkpoint_interval=2", "train.max_steps=6"]


def test_full_disk_stops_the_run_until_there_is_room(main, tiny, full_disk, saves_end_first, capsys):
    assert main(*OFTEN, "run.name=undisturbed") == 0
    saves_end_first()
    full_disk.add(4)
    capsys.readouterr()
    assert main(*OFTEN) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "step_00000004: the checkpoint could not be written" in line and "That of step 2 is intact" in line
    assert [path.name for path in checkpoints(tiny()).iterdir()] == ["step_00000002"]
    full_disk.clear()
    assert main(*OFTEN) == 0
    assert end(tiny(*OFTEN)) == end(tiny(*OFTEN, "run.name=undisturbed"))


def test_full_disk_is_a_warning_where_the_config_says_so(main, tiny, full_disk, saves_end_first, capsys):
    full_disk.add(2)
    saves_end_first()
    assert main(*OFTEN, "train.on_save_error=warn") == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and "step_00000002" in warnings[0] and "There is none yet" in warnings[0]
    assert steps(tiny()) == [4, 6]


def test_run_whose_last_save_fails_is_a_failure(main, tiny, full_disk, capsys):
    full_disk.add(6)
    assert main(*OFTEN, "train.on_save_error=warn") == 2
    assert "step_00000006: the checkpoint could not be written" in capsys.readouterr().err
    assert steps(tiny()) == [2, 4]


# ---- one process per folder


def hold(path):
    """Lock the run in `path`, say so, and wait to be killed."""
    with folder.claim(path, distributed.Ranks(0, 1, torch.device("cpu"))):
        print("locked", flush=True)
        while True:
            time.sleep(1)


@pytest.mark.integration
def test_second_process_on_a_run_is_refused_until_the_first_is_dead(tiny, main, capsys):
    run(tiny("train.max_steps=2"))
    before = content(folder.path_of(tiny()))
    holder = Forked(hold, folder.path_of(tiny()))
    while holder.process.is_alive() and "locked" not in Path(holder.printed).read_text():
        time.sleep(0.01)
    assert main() == 2
    error = capsys.readouterr().err
    assert f"process {holder.process.pid} on {os.uname().nodename}" in error and "--fresh" in error
    after = content(folder.path_of(tiny()))
    assert after.keys() == before.keys() and {p.name for p in before if before[p] != after[p]} == {"lock"}
    assert holder.wait(0)[0] == -signal.SIGKILL
    assert main() == 0  # the file is there still, the lock is not
    assert steps(tiny())[-1] == 4


def test_run_holds_a_lock_and_removes_what_was_cut_off(tiny):
    path = folder.path_of(tiny())
    (path / "checkpoints/step_00000002.tmp").mkdir(parents=True)
    with folder.claim(path, distributed.Ranks(0, 1, torch.device("cpu"))):
        assert not list((path / "checkpoints").iterdir())
        with pytest.raises(RunError, match=f"another process trains this run .process {os.getpid()} on"):
            folder.claim(path, distributed.Ranks(0, 1, torch.device("cpu"))).__enter__()
    with (path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- --fresh


def test_fresh_starts_over_in_a_new_folder(tiny, main, monkeypatch, capsys):
    for path in ("tiny", "tiny-2", "tiny-3"):
        before = content(Path(tiny().run.dir))
        assert main("train.max_steps=2", fresh=["--fresh"]) == 0
        assert f"{path}: kern" in capsys.readouterr().out
        assert steps(tiny(f"run.name={path}")) == [2]
        assert before.items() <= content(Path(tiny().run.dir)).items()
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):  # a second try is not a fourth run
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert main("train.max_steps=2", fresh=["--fresh"]) == 2
            assert "--run.name=NAME" in capsys.readouterr().err
    assert sorted(path.name for path in Path(tiny().run.dir).iterdir()) == ["tiny", "tiny-2", "tiny-3"]


# ---- the data set, changed


def prepare(path, text):
    tokenizer = ByteTokenizer()
    with Writer(path, tokenizer) as writer:
        for split in ("train", "val"):
            for _ in range(60):
                writer.write(split, np.append(tokenizer.encode_batch([text])[0], np.uint16(tokenizer.eot)))
        writer.finish("tiny", {}, "python -m data.prepare text --source FILES --name tiny --tokenizer bytes")


@pytest.fixture
def own_data(tmp_path, corpus):
    """A copy of the corpus, and the override that names it."""
    shutil.copytree(corpus / "tiny", tmp_path / "data/tiny")
    return tmp_path / "data/tiny", f"data.dir={(tmp_path / 'data').as_posix()}"


def rewrite(path, **changed):
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | changed))
    return meta


@pytest.mark.parametrize("what", ["data", "tokenizer"])
def test_changed_data_set_is_refused_before_a_model_is_built(tiny, own_data, monkeypatch, what):
    path, where = own_data
    run(tiny(where, "train.max_steps=2"))
    then = checkpoint.verify(checkpoints(tiny()) / "step_00000002")["facts"]
    before = content(folder.path_of(tiny()))
    if what == "data":
        shutil.rmtree(path)
        prepare(path, "another text entirely " * 20)
    else:
        tokenizer = json.loads((path / "meta.json").read_text())["tokenizer"]
        rewrite(path, tokenizer=tokenizer | {"hash": "0" * 64})
    monkeypatch.setattr(train_state, "GPT", None)
    with pytest.raises(RunError, match=f"the {what} has changed since step 2") as caught:
        train.train(tiny(where))
    now = fingerprint(check_dataset(path, 257))
    assert then[what] in str(caught.value) and now[what] in str(caught.value) and then[what] != now[what]
    assert "--fresh" in str(caught.value)
    after = content(folder.path_of(tiny()))
    assert {p.name for p in after if before[p] != after[p]} <= {"lock"}


def test_same_data_in_another_place_with_another_history_is_the_same(tiny, own_data):
    path, where = own_data
    assert run(tiny())[-1]["step"] == 4
    rewrite(path, name="other", source={"of": "elsewhere"}, prepare="python -m data.prepare other")
    assert run(tiny(where, "train.max_steps=5"))[-1]["step"] == 5


# ---- the config, changed

MAY_CHANGE = {
    *("run.dir", "data.dir", "eval.interval", "log.interval", "log.wandb", "log.project", "log.group"),
    *("train.max_steps", "train.micro_batch_size", "train.parallel", "train.compile", "train.activation_checkpointing"),
    *("train.device", "train.deterministic", "train.timeout_minutes", "train.checkpoint_interval"),
    *("train.checkpoint_minutes", "train.keep_checkpoints", "train.on_save_error"),
}


def with_other(config, key):
    """`config` with another valid value of `key`."""
    section, name = key.split(".")
    part, schema = getattr(config, section), KEYS[key]
    now = getattr(part, name)
    if "enum" in schema:
        other = next(value for value in schema["enum"] if value != now)
    else:
        other = {"boolean": lambda: not now, "string": lambda: f"{now}-other"}.get(schema["type"], lambda: now / 2)()
        other = int(other) if schema["type"] == "integer" else other
        other = other if other != now else now + 1
    return config.model_copy(update={section: part.model_copy(update={name: other})})


@pytest.mark.parametrize("key", sorted(KEYS.keys() - {"run.name"}))
def test_changed_key_is_refused_unless_it_cannot_change_what_is_trained(tiny, key):
    config = tiny()
    changed = with_other(config, key)
    folder.path_of(config).mkdir(parents=True)
    folder.write_config(folder.path_of(config), config)
    if key == "run.dir":
        folder.path_of(config).parent.rename(changed.run.dir)
    section, name = key.split(".")
    line = f"{key}: {getattr(getattr(config, section), name)!r} -> {getattr(getattr(changed, section), name)!r}"
    if key in MAY_CHANGE:
        assert folder.changes(changed) == [line]
    else:
        with pytest.raises(RunError, match="another config") as caught:
            folder.changes(changed)
        assert f"\n  {line}\n" in str(caught.value) and "--run.name=NAME" in str(caught.value)


def test_all_refused_keys_are_named_and_no_other(tiny):
    run(tiny("train.max_steps=2"))
    with pytest.raises(RunError) as caught:
        train.train(tiny("train.max_steps=3", "model.router=tanh", "optim.lr=0.1", "log.interval=7"))
    named = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert named == ["model.router: 'kern' -> 'tanh'", "optim.lr: 0.003 -> 0.1"]


def test_changed_config_resumes_and_is_saved(tiny, capsys):
    run(tiny())
    more = ["train.max_steps=6", "log.interval=2", "train.micro_batch_size=4", "train.activation_checkpointing=true"]
    lines = run(tiny(*more))
    output = capsys.readouterr().out
    assert "changed: train.micro_batch_size: 8 -> 4; train.max_steps: 4 -> 6; " in output and "from step 4" in output
    assert column(lines, "step") == [0, 1, 2, 2, 3, 4, 4, 6, 6]
    assert configure.load(folder.path_of(tiny()) / "config.toml") == tiny(*more)


def test_fewer_steps_than_are_done_is_finished(tiny, capsys):
    run(tiny())
    before = content(folder.path_of(tiny()))
    capsys.readouterr()
    run(tiny("train.max_steps=3"))
    assert "finished already, 4 steps" in capsys.readouterr().out
    assert content(folder.path_of(tiny())) == before


@pytest.mark.numerics
def test_changed_micro_batches_in_the_middle_of_a_log_interval_leave_its_means_right(tiny):
    """Sums of one micro-batch a step, then of four."""
    own = ["log.interval=4", "train.checkpoint_interval=2", "model.router=kern-norelu"]
    seed, at_once = run_with_margin(tiny, *own)
    own += [seed, "run.name=parts"]
    run(tiny(*own))
    shutil.rmtree(checkpoints(tiny(*own)) / "step_00000004")
    parts = run(tiny(*own, "train.micro_batch_size=2"))
    assert_same_columns(parts, at_once, "train/loss", "router/entropy", "router/load_imbalance")


# ---- the same bits


@pytest.fixture
def determinism(monkeypatch):
    """Leaves torch as it was."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend, router", [("auto", "kern"), ("torch", "softmax"), ("reference", "dense")])
def test_deterministic_asks_torch_for_it(tiny, determinism, backend, router):
    own = [f"model.backend={backend}", f"model.router={router}", "model.dropout=0.1", "train.max_steps=2"]
    run(tiny("run.name=first", *own))
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    runs = [tiny(f"run.name={name}", "train.deterministic=true", *own) for name in ("second", "third")]
    for config in runs:
        run(config)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert end(runs[0]) == end(runs[1])


if __name__ == "__main__":
    be_signalled(Path(sys.argv[1]), sys.argv[2])
