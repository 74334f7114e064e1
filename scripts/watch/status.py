"""The state of a run by its files: how far it is, whether its process lives, what went wrong. Imports no torch."""

import math
import os
import platform
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

from scripts.report.runs import Run

COLUMNS = {"train/loss": ".4f", "val/loss": ".4f", "perf/tokens_per_sec": ",.0f", "perf/mfu": ".1%"}
SILENT = 300  # seconds without a line of metrics before a run in progress is called silent
HEAD = ("run", "state", "step", "train loss", "val loss", "tokens/s", "MFU", "left", "trouble")


def describe_run(run: Run, now: float | None = None) -> list[str]:
    """Cells under HEAD of a run at the time `now`, in seconds since 1970, by default this moment; empty if unknown.

    Its state is running, silent, finished, failed or stopped. The time left is at the median speed of the last lines.
    """
    now = time.time() if now is None else now
    last = newest_values(run)
    step, trouble = int(last.get("step", 0)), find_trouble(run, last)
    alive = is_alive(run.folder / "lock", now)
    quiet = now - last_modified(run.folder / "metrics.jsonl", run.folder / "lock")
    if alive and quiet > SILENT:
        state, trouble = "silent", trouble or f"no metrics for {timedelta(seconds=round(quiet))}"
    elif alive:
        state = "running"
    elif step >= run.max_steps and run.ended:
        state = "finished"
    elif trouble and not trouble.startswith("warning"):
        state = "failed"
    else:
        state = "stopped"
    left, speeds = "", list(run.series("perf/tokens_per_sec").values())[-5:]
    if alive and speeds and median(speeds) > 0:
        tokens = (run.max_steps - step) * run.config.train.batch_size * run.config.model.block_size
        left = str(timedelta(seconds=round(tokens / median(speeds))))
    progress = f"{step:,} of {run.max_steps:,} {step / run.max_steps:>4.0%}"
    values = [f"{last[name]:{form}}" if name in last else "" for name, form in COLUMNS.items()]
    return [str(run.folder), state, progress, *values, left, trouble]


def build_table(rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table, without the columns that are empty for every run."""
    head, *cells = zip(*(column for column in zip(HEAD, *rows, strict=True) if any(column[1:])), strict=True)
    return list(head), [list(row) for row in cells]


def newest_values(run: Run) -> dict[str, float]:
    """The newest value of each name in the run's metrics; of `val/loss` the one that was not finite, if it was last."""
    values = {}
    for line in sorted([*run.evaluations.values(), *run.logs], key=lambda line: line["step"]):
        values |= {name: value for name, value in line.items() if isinstance(value, int | float)}
    if run.diverged is not None and run.diverged >= max(run.evaluations, default=0):
        values |= {"val/loss": math.nan, "step": max(run.diverged, values.get("step", 0))}
    return values


def find_trouble(run: Run, last: dict[str, float]) -> str:
    """The gravest thing that the run's files tell of, or nothing."""
    for name in ("val/loss", "train/loss"):
        if not math.isfinite(last.get(name, 0.0)):
            return f"{name} is {last[name]}"
    if dumps := sorted(run.folder.glob("crash-step_*.json")):
        return f"crash dump {dumps[-1].name}"
    log = run.folder / "train.log"  # of a sweep's point
    lines = re.findall(r"^(?:error|warning): .*", log.read_text(errors="replace") if log.exists() else "", re.M)
    return lines[-1] if lines else ""


def is_alive(lock: Path, now: float) -> bool:
    """Whether the process that wrote the lock file of a run's folder lives.

    A process on this machine is looked up, without touching its lock. Of one on another machine nothing can be known
    but the run's last line of metrics: it counts as alive while that is fresh.
    """
    owner = re.fullmatch(r"process (\d+) on (.*)\n?", lock.read_text() if lock.exists() else "")
    if not owner:
        return False
    if owner[2] != platform.node():
        return now - last_modified(lock.with_name("metrics.jsonl"), lock) < SILENT
    try:
        os.kill(int(owner[1]), 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process lives
    return True


def last_modified(*files: Path) -> float:
    """When the newest of `files` was written, in seconds since 1970; 0 if none is there."""
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
