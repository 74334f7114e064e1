"""Enter a router: train the runs that the protocol asks for, and record each result at once."""

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import configure
from common.text import format_bytes, plural
from configure.schema import KEYS
from data.bins import read_meta, sha256_of
from data.mixture import identify
from runtime.distributed import device_name, pick_device
from runtime.memory import estimate_memory, parameter_shapes
from runtime.runs import Run
from runtime.signals import EXIT_CODE, Stop
from scripts.sweep import TRAIN, Point, train_points
from track.contest import Losses, Protocol, Task, list_tasks, make_overrides
from track.record import (
    TRAINING_CODE,
    Record,
    digest_code,
    losses_of,
    new_record,
    read_code,
    read_record,
    run_git,
    write_record,
)

TIMED_ROUNDS = 40  # alternations of the two routers that `time_steps` measures (not measured)


# ---- before the first run
def check_committed() -> None:
    """Raise ValueError if code that trains differs from its commit: a record names the commit."""
    paths = [":(glob)*.py", *TRAINING_CODE, "config/track", "track/text"]
    status = run_git("status", "--porcelain", "--", *paths)
    if status.returncode:
        raise ValueError(
            "this is no git checkout, so a record could name no commit; clone it, or add --draft"
        )
    if status.stdout:
        changed = status.stdout.decode().split("\n")[0]  # such as "M router.py"
        raise ValueError(
            f"{changed[2:].strip()} is not committed, and a record names a commit; "
            f"commit it, or --draft"
        )


def check_memory(protocol: Protocol, options: Mapping[str, Any], parallel: int) -> None:
    """Raise ValueError if a rung's runs do not fit into the memory that is free."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts caches as free, too
        (line,) = [line for line in meminfo.read_text().splitlines() if "MemAvailable" in line]
        free = 1024 * int(line.split()[1])
    for rung in range(len(protocol.rungs)):
        config = protocol.load(rung, [f"{key}={value}" for key, value in options.items()])
        if pick_device(config.train.device).type != "cpu":
            continue  # train.py compares a GPU's memory
        needed = sum(estimate_memory(config, parameter_shapes(config.model), "ddp", 1))
        if needed * parallel > free:
            raise ValueError(
                f"rung {rung + 1} needs about {format_bytes(needed)} a run, {parallel} at a time, "
                f"and {format_bytes(free)} are free: a smaller --parallel, or another machine; "
                "nothing was started"
            )


def prepare_data(protocol: Protocol) -> None:
    """Prepare the track's set if it is missing, or wait for another process that does.

    Raises ValueError if that fails, or if the set, or its text, differs from the protocol's.
    """
    (folder,) = configure.load(protocol.file).data.folders
    protocol.runs.mkdir(parents=True, exist_ok=True)
    with (protocol.runs / "data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # entries may start at once on a fresh clone
        if not (folder / "meta.json").exists():
            source, val_source = protocol.text
            command = [sys.executable, "-m", "data.prepare", "text", "--tokenizer", "bytes"]
            command += ["--source", source, "--val-source", val_source]
            command += ["--name", folder.name, "--out", str(folder.parent)]
            code = subprocess.run(command).returncode
            if code:
                raise ValueError(f"{folder}: preparing the track's text ended with {code}")
    sha256 = identify([read_meta(folder)], [1.0])["data"]
    if sha256 != protocol.data_sha256:
        raise ValueError(
            f"{folder} has sha256 {sha256:.12}, the protocol {protocol.data_sha256:.12}, so the "
            f"set or its text was changed: git checkout -- track/text; rm -r {folder}"
        )


def start_record(protocol: Protocol, path: Path, name: str, options: Mapping[str, Any]) -> Record:
    """Make a new record, or read the one to resume.

    Raises ValueError if the record is of another protocol or router.
    """
    fresh = new_record(protocol, name, options)
    if not path.exists():
        return fresh
    record = read_record(path)
    for key, value in fresh.items():
        if key not in ("runs", "made") and record[key] != value:
            raise ValueError(
                f"{path} has {key} {str(record[key]):.60}, this entry {str(value):.60}; "
                "move the record away to begin again, or take another name"
            )
    return record


# ---- the runs
def enter(
    protocol: Protocol, name: str, options: Mapping[str, Any], parallel: int, stop: Stop
) -> tuple[int, Path]:
    """Train the runs that the entry's record lacks, and time its steps.

    Args:
        protocol: of the contest, or as a draft.
        name: of the entry.
        options: `model.router` and what else the entry sets.
        parallel: runs at a time, one thread each.
        stop: asked between runs.

    Returns:
        The exit status and the path of the record.

    Raises:
        ValueError: another process trains the entry, its record is of another protocol or router,
            a rung does not fit into memory, or code that trains was changed meanwhile.
    """
    list_required = partial(list_tasks, protocol, name)
    with open_record(protocol, name, options, parallel) as (record, path, runs):
        code = train_missing(protocol, record, path, runs, list_required, parallel, stop)
        if code == 0 and "step_ms" not in record and name != protocol.reference:
            record["step_ms"] = [
                time_steps(protocol, options, r) for r in range(len(protocol.rungs))
            ]
            write_record(path, record)
    return code, path


@contextmanager
def open_record(
    protocol: Protocol, name: str, options: Mapping[str, Any], parallel: int
) -> Iterator[tuple[Record, Path, Path]]:
    """A record to add runs to, its path, and the folder of the runs, which no other process has."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a run must not depend on how many others run
    check_memory(protocol, options, parallel)
    # Code and options are in the folder's name: runs of other code are not this entry's.
    kind = "drafts" if protocol.draft else "entries"
    code_sha256 = describe_machine(protocol)["code_sha256"]
    identity = sha256_of([code_sha256, options, protocol.sha256])
    runs = protocol.runs / kind / f"{name}-{identity[:8]}"
    path = runs.with_suffix(".json") if protocol.draft else protocol.records / f"{name}.json"
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{runs}: another process trains this entry; wait for it") from None
        yield start_record(protocol, path, name, options), path, runs


def train_missing(
    protocol: Protocol,
    record: Record,
    path: Path,
    runs: Path,
    list_required: Callable[[Losses], list[Task]],
    parallel: int,
    stop: Stop,
) -> int:
    """Train the runs that a record lacks, and add each as it ends; return the exit status.

    `list_required` lists an entry's runs as far as the losses so far decide them.
    """
    made = describe_machine(protocol)
    clock = Clock(protocol, list_required)
    while missing := find_missing(list_required, losses_of(record)):
        failed = False
        points = [make_point(protocol, record["options"], task, runs) for task in missing]
        by_name = {task.name: task for task in missing}
        for point, code in train(protocol, points, parallel, stop):
            task = by_name[point.number]
            run = read_result(point.folder, task)
            if run is None:
                failed = True
                text = f"{task.name} failed with exit code {code}: {point.folder}/train.log"
                print(text, file=sys.stderr, flush=True)
                continue
            add_run(protocol, record, run, made, path)
            shutil.rmtree(point.folder / "checkpoints", ignore_errors=True)
            clock.print_progress(record, task)
        if stop.asked:
            return EXIT_CODE
        if failed:
            return 1
    return 0


def find_missing(list_required: Callable[[Losses], list[Task]], losses: Losses) -> list[Task]:
    """The required runs that have no loss."""
    return [task for task in list_required(losses) if task not in losses]


def train(
    protocol: Protocol,
    points: Sequence[Point],
    parallel: int,
    stop: Stop,
    code: Path | None = None,
) -> Iterator[tuple[Point, int]]:
    """Train runs, by the code in a folder or of this checkout.

    Yields each that ended, not stopped, with its exit code.
    """
    train_file = code / "train.py" if code else TRAIN
    shares: list[list[str]] = [[] for _ in range(parallel)]
    for point, exit_code in train_points(
        protocol.file, list(points), shares, stop, train=train_file
    ):
        # SIGTERM kills a run that does not listen yet; later it ends with EXIT_CODE.
        if exit_code not in (EXIT_CODE, -signal.SIGTERM):
            yield point, exit_code


class Clock:
    """Estimates the time to the end of an entry by the protocol's minutes of each run."""

    def __init__(self, protocol: Protocol, list_required: Callable[[Losses], list[Task]]) -> None:
        self.protocol = protocol
        self.list_required = list_required
        self.start = time.monotonic()
        self.minutes_done = 0.0  # of the protocol

    def minutes(self, tasks: Sequence[Task]) -> float:
        """The protocol's minutes of runs on one thread."""
        return sum(self.protocol.rungs[task.rung].minutes * task.length for task in tasks)

    def print_progress(self, record: Record, task: Task) -> None:
        """Print a run that has just been recorded, and the time that is left."""
        losses = losses_of(record)
        self.minutes_done += self.minutes([task])
        # while the draws are tried, any of them stand for those that will be judged
        as_if = {**dict.fromkeys(self.list_required({}), 0.0), **losses}
        missing = [task for task in self.list_required(as_if) if task not in losses]
        pace = (time.monotonic() - self.start) / 60 / self.minutes_done
        left = pace * self.minutes(missing)
        loss = losses[task]
        text = f"{loss:.4f}" if np.isfinite(loss) else "diverged"
        remaining = f"{plural(len(missing), 'run')}, about {left:.0f} min left"
        print(f"{record['name']}: {task.name} {text}; {remaining}", flush=True)


def add_run(
    protocol: Protocol, record: Record, run: dict[str, Any], made: Mapping[str, str], path: Path
) -> None:
    """Add a run to the record and write it.

    Raises ValueError if the code that trains differs from that of `made`.
    """
    if describe_machine(protocol)["code_sha256"] != made["code_sha256"]:
        raise ValueError(
            f"{record['name']}: code that trains was changed meanwhile; {path} has the runs before"
        )
    if made not in record["made"]:
        record["made"].append(made)
    record["runs"].append({**run, "made": record["made"].index(made)})
    write_record(path, record)


def make_point(protocol: Protocol, options: Mapping[str, Any], task: Task, folder: Path) -> Point:
    """Make the run of a task, in `folder`."""
    overrides = make_overrides(protocol, options, task)
    overrides += [f"--run.dir={folder}", f"--run.name={task.name}"]
    return Point(task.name, overrides, configure.load(protocol.file, overrides))


def read_result(folder: Path, task: Task) -> dict[str, Any] | None:
    """Read a run's part of the record.

    Returns:
        The run, whose loss is None if it diverged; None if it ended early for another reason.
    """
    result: dict[str, Any] = {**task._asdict(), "loss": None}
    if not (folder / "config.toml").exists():
        return None
    run = Run(folder)
    if not run.ended:
        log = (folder / "train.log").read_text(errors="replace")
        # runtime/guard.py leaves these when it stops a run
        stopped = any(folder.glob("crash-*.json")) or "steps in a row skipped" in log
        return result if stopped or run.diverged is not None else None
    first = run.evaluations[min(run.evaluations)]
    last = run.evaluations[run.max_steps]
    result["loss"] = round(last["val/loss"], 7)
    if task.round == "judge":
        add_measures(result, first, last)
    return result


def add_measures(result: dict[str, Any], first: dict[str, Any], last: dict[str, Any]) -> None:
    """Add to a judged run its losses by document, and its measures of gates and loads."""
    losses = np.array(last["val/window_losses"], np.float64)  # (W,)
    documents = np.array(last["val/window_documents"])  # (W,)
    result["documents"] = []
    for document in np.unique(documents):
        of_document = losses[documents == document]
        result["documents"].append([round(float(of_document.mean()), 7), len(of_document)])
    if "val/gate_norm" in last:
        result["gate_norm"] = [round(line["val/gate_norm"], 4) for line in (first, last)]
    for name in ("load_imbalance", "dead_experts", "zero_gates"):
        if f"val/{name}" in last:
            result[name] = round(last[f"val/{name}"], 3)


def time_steps(protocol: Protocol, options: Mapping[str, Any], rung: int) -> dict[str, float]:
    """Time a training step of the reference and of the entry, in turn on one thread.

    The entry's steps have the balancing that it brings, not what tuning draws. Always on the CPU:
    wherever the runs were made, entries are compared by one clock.

    Returns:
        {"reference": milliseconds, "entry": milliseconds}.

    Raises:
        ValueError: a step failed.
    """
    command = [sys.executable, "-m", "tools.bench", "step", protocol.file]
    command += [f"--{override}" for override in protocol.rungs[rung].overrides]
    command += ["--train.device=cpu"]
    command += [f"--model.router={name}" for name in (protocol.reference, options["model.router"])]
    for key in options.keys() - {"model.router"}:
        command += [f"--{key}={value}" for value in (KEYS[key]["default"], options[key])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        command += [f"--rounds={TIMED_ROUNDS}", "--json", str(file)]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
        if done.returncode:
            raise ValueError(
                f"{' '.join(command[1:])}: exit code {done.returncode}: "
                f"{done.stdout[-300:]}{done.stderr}"
            )
        rows = json.loads(file.read_text())["rows"]
    # The bench times every combination of values: the first is the reference, the last the entry.
    return {"reference": round(rows[0]["ms"], 3), "entry": round(rows[-1]["ms"], 3)}


def describe_machine(protocol: Protocol) -> dict[str, str]:
    """Describe where runs are made: commit and digest of the code, processor, versions, day."""
    return {
        "commit": run_git("rev-parse", "HEAD").stdout.decode().strip(),
        "code_sha256": digest_code(read_code()),
        "machine": device_name(pick_device(configure.load(protocol.file).train.device)),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
