"""scripts.watch and runtime.runs: what a run's files say of it, and the table in the terminal."""

import errno
import fcntl
import io
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import fake_runs
import pytest
from runs import ALONE, REPO_ROOT

from common.files import is_locked
from common.text import escape_controls
from report.overview import describe_run
from runtime import FAILURE_FILE, RunError
from runtime.folder import RunFolder
from runtime.runs import Run, read_runs
from scripts import watch

TRAINING = {"train/loss": 2.5, "perf/tokens_per_sec": 80.0}
LOG = [(10, TRAINING)]
END = [(90, TRAINING), (100, TRAINING | {"val/loss": 2.0})]
BAD, GOOD = {"val/loss": float("nan")}, {"val/loss": 2.0}
HERE = platform.node()


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run's folder with some lines of metrics: 100 steps of 40 tokens."""

    def make(name="one", lines=()):
        folder = tmp_path / "runs" / name
        shape = "train.max_steps=100 train.batch_size=4 train.micro_batch_size=2"
        shape += " model.block_size=10 optim.warmup_steps=1"
        fake_runs.make_run(folder, *shape.split(), until=0)
        text = ""
        for step, values in lines:
            text += json.dumps({"step": step, "tokens": 40 * step, **values}) + "\n"
        (folder / "metrics.jsonl").write_text(text)
        return folder

    return make


@contextmanager
def locked(folder):
    """Within this context the lock is held, as by a process that trains the run."""
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


# ---- the state of a run
WRITTEN = "2096-10-02 21:06:40"  # 4e9 seconds after 1970, 14 hours ahead
QUIET = f"no metrics since {WRITTEN}"
UNSEEN = f"its lock on elsewhere is not visible here; last written {WRITTEN}"


@pytest.mark.parametrize("lines, held, host, quiet, state, trouble", [
    ([], True, HERE, 1, "running", ""), (END, True, HERE, 300, "running", ""),
    (LOG, True, HERE, 301, "running", QUIET),
    ([], False, HERE, 1, "stopped", ""), (LOG, False, HERE, 301, "stopped", ""),
    (END, False, HERE, 1, "finished", ""),
    # without its last evaluation
    (END[:1], False, HERE, 1, "stopped", ""), ([(100, TRAINING)], False, HERE, 1, "stopped", ""),
    # a lock over the network; a copy, or a network without locks
    (LOG, True, "elsewhere", 299, "running", ""), (LOG, False, "elsewhere", 299, "unknown", UNSEEN),
    (END, False, "elsewhere", 299, "finished", ""),
])  # fmt: skip
def test_state(make_run, lines, held, host, quiet, state, trouble, monkeypatch):
    folder = make_run("one", lines)
    (folder / "lock").write_text(f"process 1 on {host}\n")  # the number decides nothing
    monkeypatch.setenv("TZ", "XYZ-14")
    time.tzset()
    with locked(folder) if held else nullcontext():
        # a run that has no line yet has just taken its lock
        newest, other = ("metrics.jsonl", "lock") if lines else ("lock", "metrics.jsonl")
        os.utime(folder / newest, (0, 4e9))
        os.utime(folder / other, (0, 3e9))
        monkeypatch.setattr(time, "time", lambda: 4e9 + quiet)
        status = Run(folder).find_status()
    monkeypatch.undo()
    time.tzset()
    assert (status.state, status.trouble) == (state, trouble)


@pytest.mark.parametrize("lines, failure, state, trouble", [
    ([(10, TRAINING | {"train/loss": float("nan")})], "", "failed", "train/loss is nan"),
    ([(9, GOOD), (10, {"val/loss": float("inf")})], "", "failed", "val/loss is inf"),
    ([(9, GOOD), (10, BAD), (12, TRAINING)], "", "failed", "val/loss is nan"),
    ([(8, BAD), (9, BAD), (10, GOOD)], "", "stopped", ""),
    (LOG, "lr 0.5: 20 steps in a row skipped. Start again\n",
     "failed", "lr 0.5: 20 steps in a row skipped"),
    (END, "no space left\n", "failed", "no space left"),
])  # fmt: skip
def test_trouble(make_run, lines, failure, state, trouble):
    folder = make_run("one", lines)
    if failure:
        (folder / FAILURE_FILE).write_text(failure)
    assert Run(folder).find_status() == (state, lines[-1][0], trouble)
    assert all(math.isfinite(loss) for loss in Run(folder).series("val/loss").values())


def test_a_lock_that_cannot_be_asked_for_is_unknown(make_run, monkeypatch):
    folder = make_run("one", LOG)
    (folder / "lock").write_text(f"process 1 on {HERE}\n")
    refuse = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Run(folder).status.state == "unknown"


def test_watching_keeps_no_run_from_its_lock(make_run):
    """A watcher asks for it for a moment; the run takes its lock, and another process does not."""
    folder = make_run("one")
    run = RunFolder(folder)
    lock = folder / "lock"
    assert is_locked(lock) is False
    lock.touch()
    watcher = lock.open()
    fcntl.flock(watcher, fcntl.LOCK_SH)  # as is_locked does
    threading.Timer(0.2, watcher.close).start()
    with run.claim(ALONE):
        assert is_locked(lock) is True
        with pytest.raises(RunError, match="another process trains this run"):
            run.claim(ALONE).__enter__()
    assert is_locked(lock) is False


# ---- the table
def test_numbers_and_the_time_left(make_run):
    """88 steps of 40 tokens at the median speed of the last five lines: 40 tokens per second."""
    lines = []
    for i, speed in enumerate([1000, 1000, 40, 30, 50, 40, 9000]):
        lines.append((i + 4, {"train/loss": 3 - i / 10, "perf/tokens_per_sec": speed}))
    folder = make_run("one", [*lines, (12, {"val/loss": 2.25, "perf/mfu": 0.123})])
    row = [str(folder), "running", "12 of 100  12%", "2.4000", "2.2500", "12.3%", "40", "0:01:28"]
    with locked(folder):
        assert [*describe_run(Run(folder)).values()] == [*row, ""]
    for saved, step in ((7, 12), (18, 18)):  # after its last log the run is at the checkpoint
        fake_runs.add_checkpoint(folder, saved)
        line = describe_run(Run(folder))
        assert line["step"].startswith(f"{step} of 100 ") and line["left"] == ""
    young = make_run("two", [(10, {"train/loss": 3.0})])  # no speed yet
    row = [str(young), "running", "10 of 100  10%", "3.0000"]
    with locked(young):
        assert [*describe_run(Run(young)).values()] == [*row, "", "", "", "", ""]


def test_the_table(make_run, tmp_path, call, monkeypatch):
    """Columns that are empty everywhere are left out; an unreadable folder is named below."""
    monkeypatch.chdir(tmp_path)
    assert call(watch.main) == "no runs in runs yet\n"
    make_run("a", [(0, {"val/loss": 5.0}), (50, TRAINING | {"val/loss": 3.0})])
    (make_run("c") / "config.toml").write_text("[model\n")
    head, _, a, left_out = call(watch.main).splitlines()
    assert head.split()[0] == "run" and not {"MFU", "left", "trouble"} & {*head.split()}
    assert a.split() == ["runs/a", "stopped", "50", "of", "100", "50%", "2.5000", "3.0000", "80"]
    assert left_out.startswith("left out: runs/c: ")

    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 3:
            raise KeyboardInterrupt
        make_run(f"new{len(sleeps)}", LOG)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch.main(["--every", "30"])
    assert sleeps == [30, 30, 30]


@pytest.mark.parametrize("arguments, says", [
    ("runs/a x y", "runs/a, x, y: no such folder; name folders of runs"),
    ("a b --serve 6061", "python -m scripts.report a b --follow"),
    ("--every 0", "--every 0: expected 1 to 86400 seconds"),
    ("--every nan", "--every nan: expected"),
])  # fmt: skip
def test_what_cannot_be_watched_is_one_line(call, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (line,) = call(watch.main, *arguments.split(), code=2).splitlines()
    assert line.startswith("error: ") and says in line


def test_watching_imports_no_torch(make_run, tmp_path):
    make_run("a", [(50, TRAINING)])
    code = f"import sys; from scripts.watch import main; main([{str(tmp_path)!r}]); "
    code += "assert not {'torch', 'matplotlib', 'scipy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True, capture_output=True)


# ---- reading again, and damaged folders
def test_files_that_change_are_read_again(tmp_path):
    """And no others; a folder of scripts.report among `runs/*` is no run."""
    folder = fake_runs.make_run(tmp_path / "a", end=2.0)
    (tmp_path / "report").mkdir()
    (tmp_path / "report/report.html").touch()
    ((run,), left_out) = read_runs(tmp_path.glob("*"))
    assert left_out == [] and run.status.state == "finished"
    with locked(folder):  # which changes none of its files
        ((again,), _) = read_runs([tmp_path])
        assert again is run and run.status.state == "running"
    manifest = fake_runs.add_checkpoint(folder, 5) / "manifest.json"
    manifest.write_text("damaged")
    ((run,), _) = read_runs([tmp_path])
    assert run is not again and run.status.trouble.startswith(f"warning: {manifest}: damaged")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("\nseed = 0\n", "\nseed = 7\n"))
    assert [run.seed for run in read_runs([tmp_path])[0]] == [7]


def test_the_newest_intact_manifest_is_read(make_run, monkeypatch):
    folder = make_run("one")
    newest = fake_runs.add_checkpoint(folder, 5, data="of step 5")
    shutil.copytree(newest, newest.with_name("step_00000007"))  # of another step than its name says
    run = Run(folder)
    (fault,) = run.faults
    assert run.metadata == {"data": "of step 5"} and "step_00000007/manifest.json: damaged" in fault
    monkeypatch.setattr("runtime.runs.steps", lambda folder: [5, 10])  # 10 is removed meanwhile
    run = Run(folder)
    assert (run.metadata, run.faults) == ({"data": "of step 5"}, [])


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def make_lock_folder(folder):
    (folder / "lock").unlink(missing_ok=True)
    (folder / "lock").mkdir()


# name of a folder: what is done to it, what its line says. "\\x1b" is an escape that is shown.
DAMAGES = {
    "line": (
        write("metrics.jsonl", b'{"step": 1, "tokens": 1%s}\n' % (b"0" * 5000)),
        "line 1 is not a JSON",
    ),
    "slow": (
        write("metrics.jsonl", b'{"step": 10, "tokens": 1, "perf/tokens_per_sec": 1e-300}\n'),
        "10 of 100",
    ),
    "lock-folder": (make_lock_folder, "is not visible here"),
    "lock-binary": (write("lock", bytes(range(256)) * 99), "stopped"),
    "lock-escape": (write("lock", b"process 1 on \x1b[2Jhost\n"), r"its lock on \x1b[2Jhost"),
    "new\nline": (write("config.toml", b"[model"), "is not TOML"),
    os.fsdecode(b"byte\xff"): (write("metrics.jsonl", b""), r"byte\udcff"),
    "closed": (write("metrics.jsonl", b""), "Permission denied"),
}


def take_rights(monkeypatch, folder):
    """Let the system refuse to list `folder`, and to open or look at what is in it.

    Root, who may run this test, has the right to all.
    """

    def refuse(owner, name, refused):
        def guarded(path, *args, **options):
            if refused in str(path):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *args, **options)

        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, guarded)

    refuse(os, "scandir", folder)
    refuse(os, "stat", f"{folder}/")
    refuse(io, "open", f"{folder}/")


def test_a_damaged_folder_is_a_line_and_the_others_are_shown(make_run, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    make_run("good", END)
    (tmp_path / "runs/loop").symlink_to("loop")
    for name, (damage, _) in DAMAGES.items():
        damage(make_run(name, LOG))
    take_rights(monkeypatch, "runs/closed")
    good = call(watch.main, "runs/good").splitlines()[-1]
    text = call(watch.main, *sorted(Path("runs").glob("*")))
    assert all(character.isprintable() for character in text.replace("\n", ""))
    names = {escape_controls(name): says for name, (_, says) in DAMAGES.items()}
    for name, says in (names | {"loop": "no such folder"}).items():
        (line,) = re.findall(rf".*runs/{re.escape(name)}[:/ ].*", text)
        assert says in line
    (among_others,) = re.findall(".*runs/good .*", text)
    assert among_others.split() == good.split()
    # head and rule, good, the damaged ones, loop
    assert text.count("\n") == 2 + 1 + len(names) + 1
