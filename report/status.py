"""The state of a run, by its files and its lock. Imports no torch."""

import math
import platform
import re
import time
from pathlib import Path

from common.files import is_locked
from report.run import Run, Status
from runtime import FAILURE_FILE

LOCK_CHARACTERS = 300  # of a lock that are read: a number and the name of a computer
SILENT = 300  # seconds without a line of metrics that are trouble of a running run; not measured


def find_status(run: Run, now: float | None = None) -> Status:
    """The status of a run that was read from its folder.

    Args:
        run: all but its status is read.
        now: seconds since 1970; by default this moment.
    """
    if now is None:
        now = time.time()
    step = int(run.newest.get("step", 0))
    trouble = find_trouble(run)
    lock = run.folder / "lock"
    trains = is_training(lock)
    last_written = last_modified(run.folder / "metrics.jsonl", lock)
    if trains:
        if now - last_written > SILENT:
            # a time, not a duration: the page is built again if a row changed
            trouble = trouble or f"no metrics since {format_time(last_written)}"
        return Status("running", step, trouble)
    failure = read_failure(run.folder)
    if failure:
        return Status("failed", step, failure)
    if run.ended:
        return Status("finished", step, trouble)
    if trouble and not trouble.startswith("warning"):
        return Status("failed", step, trouble)
    if trains is None:
        known = describe_unknown_lock(lock, last_written)
        return Status("unknown", step, f"{trouble}; {known}" if trouble else known)
    return Status("stopped", step, trouble)


def read_failure(folder: Path) -> str:
    """The error that ended the last start of the run in `folder`; "" without one.

    It is the first sentence, which names the error. The others explain it.
    """
    file = folder / FAILURE_FILE
    if not file.is_file():
        return ""
    return file.read_text(errors="replace").partition(". ")[0].strip() or "unknown error"


def find_trouble(run: Run) -> str:
    """The gravest problem that the run's files show; "" without one."""
    for name in ("val/loss", "train/loss"):
        loss = run.newest.get(name, 0.0)
        if not math.isfinite(loss):
            return f"{name} is {loss}"
    dumps = sorted(run.folder.glob("crash-step_*.json"))
    if dumps:
        return f"crash dump {dumps[-1].name}"
    messages = [f"warning: {'; '.join(run.faults)}"] if run.faults else []
    log = run.folder / "train.log"  # which scripts.sweep writes
    if log.is_file():
        text = log.read_text(errors="replace")
        messages += re.findall(r"^(?:error|warning): .*", text, re.M)
    elif log.exists():  # opening a FIFO would wait for a process that writes to it
        messages.append(f"warning: {log.name} is not a regular file")
    return messages[-1] if messages else ""


def is_training(lock: Path) -> bool | None:
    """True if a process trains the run with this lock file; None if that cannot be known from here.

    The lock decides, not the number of the process: the kernel gives that to another process, and
    containers have numbers of their own.
    """
    if lock.exists() and not lock.is_file():
        return None
    locked = is_locked(lock)
    if locked is False and read_host(lock) != platform.node():
        return None  # it trains on another computer, or did
    return locked


def read_host(lock: Path) -> str:
    """The name of the computer that wrote the lock file; this one's if there is none."""
    try:
        with lock.open(errors="replace") as file:
            owner = re.fullmatch(r"process \d+ on (.*)\n?", file.read(LOCK_CHARACTERS))
    except OSError:
        return platform.node()
    return owner[1] if owner else platform.node()


def describe_unknown_lock(lock: Path, last_written: float) -> str:
    """The reason why `is_training` is None."""
    if lock.exists() and not lock.is_file():
        return "its lock is not a regular file; remove it"
    host = read_host(lock)
    return f"its lock on {host} is not visible here; last written {format_time(last_written)}"


def last_modified(*files: Path) -> float:
    """The time at which the newest of `files` was written, in seconds since 1970; 0 without any."""
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def format_time(seconds: float) -> str:
    """A time in seconds since 1970, such as 2026-11-26 09:30:00."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
