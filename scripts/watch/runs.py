"""What the files of a run say while it trains. Reads only; imports no torch, so that a table is there at once."""

import json
import math
import os
import platform
import re
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from runtime import RunError
from runtime.metrics import list_arrays, load_arrays

DEPTH = 3  # folders below the one named that are searched for runs
SILENT = 300  # seconds without a line of metrics before a run in progress is called silent
SERIES = ("train/loss", "val/loss", "router/gate_norm", "router/gate_sum", "router/load_imbalance")
SERIES += ("perf/tokens_per_sec",)
OF_SET = re.compile(r"val/([^/]+)/loss")  # series as well: of each set of a mixture, of the weights' mean, of tasks
MORE = re.compile(rf"{OF_SET.pattern}|val_ema/loss|tasks/[^/]+/(acc|bits_per_byte)")


class Status(NamedTuple):
    """A run at a moment."""

    name: str  # its folder
    state: str  # running, silent, finished, failed, stopped or waiting
    step: int
    max_steps: int
    loss: float | None  # nats per token
    val_loss: float | None
    by_set: str  # validation loss of each set of a mixture
    tokens_per_sec: float | None
    mfu: float | None  # model FLOPs utilisation, 0 to 1
    seconds_left: float | None  # at the speed of the last lines; None where nothing is running
    trouble: str  # the last thing that went wrong, in one line


class WatchedRun:
    """A run's folder. `refresh` reads the lines of metrics that came since the last time."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, ValueError or KeyError if the folder's config.toml is not one of a run."""
        self.folder = folder
        config = tomllib.loads((folder / "config.toml").read_text())
        self.router, self.max_steps = config["model"]["router"], config["train"]["max_steps"]
        self.tokens_per_step = config["train"]["batch_size"] * config["model"]["block_size"]
        self.group = f"{folder.parent}/{config['log']['group']}".rstrip("/")
        self._forget()

    def _forget(self) -> None:
        self.file, self.offset = (0, 0), 0
        self.series: dict[str, list[tuple[int, float]]] = {}
        self.last: dict[str, Any] = {"step": 0}  # the newest value of each name
        self.loads: list[list[float]] = []  # of the newest evaluation, by layer and expert
        self.loads_from: tuple[Path, int] | None = None  # the file that has them, and when it was written

    def refresh(self) -> None:
        """Read new whole lines of metrics.jsonl; all of them if the file was written anew, as a resumed run does."""
        path = self.folder / "metrics.jsonl"
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self.file or found.st_size < self.offset:
                    self._forget()
                    self.file = (found.st_dev, found.st_ino)
                file.seek(self.offset)
                new = file.read()
        except FileNotFoundError:
            return self._forget()
        new = new[: new.rfind(b"\n") + 1]
        self.offset += len(new)
        for text in new.splitlines():
            try:
                line = json.loads(text)
                self._add(int(line["step"]), line)
            except (ValueError, KeyError, TypeError):  # not a line of metrics
                continue

    def read_loads(self) -> list[list[float]]:
        """Tokens of the newest evaluation by layer and expert; empty for a dense model."""
        for file in list_arrays(self.folder / "metrics.jsonl", "val")[-1:]:
            with suppress(OSError, RunError):  # another process may remove it, or have damaged it
                found = (file, file.stat().st_mtime_ns)
                if found != self.loads_from:
                    *_, last = load_arrays(file, ["val/loads"]).values()
                    self.loads, self.loads_from = last["val/loads"].tolist() if last else [], found
        return self.loads

    def _add(self, step: int, line: dict[str, Any]) -> None:
        self.last |= line
        self.loads = line.get("val/loads", self.loads)  # of a run from before there was a folder of arrays
        for name in (*SERIES, *filter(MORE.fullmatch, line)):
            if isinstance(value := line.get(name), int | float):
                self.series.setdefault(name, []).append((step, value))

    def status(self) -> Status:
        """The state of the run, as its files show it now."""
        step, max_steps = self.last["step"], self.max_steps
        trouble, alive = self._find_trouble(), is_alive(self.folder / "lock")
        quiet = time.time() - _modified(self.folder / "metrics.jsonl", self.folder / "lock")
        of_sets = [(found[1], loss) for name, loss in self.last.items() if (found := OF_SET.fullmatch(name))]
        speeds = [value for _, value in self.series.get("perf/tokens_per_sec", [])[-5:]]
        if alive:
            state = "silent" if quiet > SILENT else "running"
        elif step >= max_steps and "val/loss" in self.last:
            state = "finished"
        elif trouble and not trouble.startswith("warning"):
            state = "failed"
        else:
            state = "stopped" if step else "waiting"
        if state == "silent":
            trouble = trouble or f"no metrics for {format_seconds(quiet)}"
        return Status(
            name=str(self.folder),
            state=state,
            step=step,
            max_steps=max_steps,
            loss=self.last.get("train/loss"),
            val_loss=self.last.get("val/loss"),
            by_set=", ".join(f"{name} {loss:.4f}" for name, loss in of_sets),
            tokens_per_sec=self.last.get("perf/tokens_per_sec"),
            mfu=self.last.get("perf/mfu"),
            seconds_left=(max_steps - step) * self.tokens_per_step / median(speeds) if alive and speeds else None,
            trouble=trouble,
        )

    def _find_trouble(self) -> str:
        """The gravest thing that the run's files tell of, or nothing."""
        for name in ("val/loss", "train/loss"):
            if not math.isfinite(self.last.get(name, 0.0)):
                return f"{name} is {self.last[name]}"
        if dumps := sorted(self.folder.glob("crash-step_*.json")):
            return f"crash dump {dumps[-1].name}"
        log = self.folder / "train.log"  # of a sweep that runs several points at once
        words = re.findall(r"^(?:error|warning): .*", _tail(log), re.M)
        if words:
            return words[-1]
        counts = {"skipped steps": "optim/skipped_steps", "loss spikes": "optim/loss_spikes"}
        found = [f"{self.last[key]:.0f} {what}" for what, key in counts.items() if self.last.get(key)]
        return f"warning: {', '.join(found)}" if found else ""

    def as_json(self, points: int = 400) -> dict[str, Any]:
        """What the page shows of it: `status`, its place in a sweep, its curves with at most `points` points each."""
        status = self.status()._asdict()
        return {
            **{
                key: None if value in (math.inf, -math.inf) or value != value else value
                for key, value in status.items()
            },
            "router": self.router,
            "group": self.group,
            "series": {name: thin(series, points) for name, series in self.series.items()},
            "loads": [[load * len(row) / (sum(row) or 1) for load in row] for row in self.read_loads()],
        }


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The folders with a config.toml at `places` and up to DEPTH folders below, in order of their names."""
    found = set()
    for place in places:
        found |= {file.parent for depth in range(DEPTH + 1) for file in place.glob("*/" * depth + "config.toml")}
    return sorted(found)


def is_alive(lock: Path) -> bool:
    """Whether the process that wrote the lock file of a run's folder lives.

    A process on this machine is looked up, without touching its lock. Of one on another machine nothing can be known
    but the run's last line of metrics: it counts as alive while that is fresh.
    """
    try:
        owner = re.fullmatch(r"process (\d+) on (.*)\n?", lock.read_text())
        written = lock.stat().st_mtime
    except OSError:
        return False
    if not owner:
        return False
    if owner[2] != platform.node():
        return time.time() - _modified(lock.with_name("metrics.jsonl"), lock) < SILENT
    try:
        os.kill(int(owner[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        started = os.stat(f"/proc/{owner[1]}").st_ctime
    except OSError:  # no /proc
        return True
    return started <= written + 1  # a younger process has been given a dead one's number


def thin(series: Sequence[tuple[int, float]], points: int) -> list[tuple[int, float | None]]:
    """At most `points` points: means over equal numbers of neighbours, at the last one's step. None for NaN and Inf."""
    size = -(-len(series) // points) or 1
    parts = [series[first : first + size] for first in range(0, len(series), size)]
    means = [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
    return [(step, value if math.isfinite(value) else None) for step, value in means]


def format_seconds(seconds: float) -> str:
    """`3 d 4 h`, `2 h 05 min`, `3 min` or `12 s`."""
    minutes = round(seconds / 60)
    if minutes >= 48 * 60:
        return f"{minutes // 1440} d {minutes % 1440 // 60} h"
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if seconds >= 60 else f"{seconds:.0f} s"


def _modified(*files: Path) -> float:
    """When the newest of `files` was written, in seconds since 1970; 0 if none is there."""
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _tail(file: Path, size: int = 4096) -> str:
    """The last `size` bytes of a text file; empty if it is not there."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
