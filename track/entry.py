"""Enter a router: train the runs that the protocol asks for, and record each result at once."""

import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import configure
from common.text import plural
from data.bins import read_meta, sha256_of
from data.mixture import identify
from report.runs import read_run
from router import find_spec
from runtime.distributed import device_name, pick_device
from runtime.signals import EXIT_CODE, Stop
from scripts.sweep import Point, train_points
from track.protocol import REPO_ROOT, Protocol, Task
from track.record import (
    Record,
    missing_tasks,
    new_record,
    options_of,
    read_record,
    task_of,
    write_record,
)

# folders that train, besides the files at the top
TRAINING_CODE = ["kernels", "runtime", "configure", "data", "common"]
TIMED_ROUNDS = 40  # alternations of the two routers that `time_steps` measures (not measured)


def start_record(
    protocol: Protocol, path: Path, name: str, router: str, options: dict[str, Any]
) -> Record:
    """Make a new record, or read the one to resume.

    Raises ValueError if the record is of another protocol or router.
    """
    fresh = new_record(protocol, name, router, options)
    if not path.exists():
        return fresh
    record = read_record(path)
    record["options"] = options_of(record)
    for key, value in fresh.items():
        if key not in ("runs", "made") and record[key] != value:
            raise ValueError(
                f"{path} has {key} {str(record[key]):.60}, this entry {str(value):.60}; "
                "remove the record to begin again, or enter under another name"
            )
    return record


def check_committed() -> None:
    """Raise ValueError if code that trains differs from its commit: a record names the commit."""
    paths = [":(glob)*.py", *TRAINING_CODE, "config/track", "track/text"]
    status = run_git("status", "--porcelain", "--", *paths)
    if status.returncode:
        raise ValueError(
            f"{REPO_ROOT} is no git checkout, so a record could name no commit; "
            f"clone it, or add --draft"
        )
    changed = status.stdout.split("\n")[0].strip()  # such as "M router.py"
    if changed:
        raise ValueError(
            f"{changed[2:].strip()} is not committed, and a record names a commit; "
            f"commit it, or --draft"
        )


def run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in the repository; the caller checks the exit code."""
    command = ["git", "-C", str(REPO_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def prepare_data(protocol: Protocol) -> None:
    """Prepare the track's set if it is missing.

    Raises ValueError if the set, or its text, differs from the protocol's.
    """
    (folder,) = configure.load(protocol.file).data.folders
    if not (folder / "meta.json").exists():
        source, val_source = protocol.text
        command = [sys.executable, "-m", "data.prepare", "text", "--tokenizer", "bytes"]
        command += ["--source", source, "--val-source", val_source]
        command += ["--name", folder.name, "--out", str(folder.parent)]
        subprocess.run(command, check=True)
    sha256 = identify([read_meta(folder)], [1.0])["data"]
    if sha256 != protocol.data_sha256:
        raise ValueError(
            f"{folder} has sha256 {sha256:.12}, the protocol {protocol.data_sha256:.12}, so the "
            f"set or its text was changed: git checkout -- track/text; rm -r {folder}"
        )


def enter(
    protocol: Protocol, name: str, router: str, options: dict[str, Any], parallel: int, stop: Stop
) -> tuple[int, Path]:
    """Train the runs that the entry's record lacks, and time its steps.

    Args:
        protocol: of the contest, or as a draft.
        name: of the entry.
        router: `model.router`.
        options: other settings of the entry.
        parallel: runs at a time, one thread each.
        stop: asked between runs.

    Returns:
        The exit status and the path of the record.

    Raises:
        ValueError: another process trains the entry, its record is of another protocol or router,
            or code that trains was changed meanwhile.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # a run must not depend on how many others run
    provenance = describe_machine(protocol)
    # Code, formula and options are in the name: runs of other code are not this entry's.
    identity = [provenance["code_sha256"], repr(find_spec(router)), options]
    folder_name = f"{name}-{sha256_of(identity)[:8]}"
    if protocol.draft:
        runs = protocol.runs / "drafts" / folder_name
        path = runs.with_suffix(".json")
    else:
        runs = protocol.runs / "entries" / folder_name
        path = protocol.records / f"{name}.json"
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{runs}: another process trains this entry; wait for it") from None
        record = start_record(protocol, path, name, router, options)
        start = time.monotonic()
        runs_before = len(record["runs"])
        while missing := missing_tasks(protocol, record):
            print(f"{name}: {missing[0].round} round, {plural(len(missing), 'run')}", flush=True)
            failed = False
            for point, task, code in train_tasks(protocol, record, missing, runs, parallel, stop):
                run = read_result(point.folder, task)
                if run is None:
                    failed = True
                    text = f"{task.name} failed with exit code {code}: {point.folder}/train.log"
                    print(text, file=sys.stderr, flush=True)
                    continue
                add_run(protocol, record, run, provenance, path)
                done = len(record["runs"])
                seconds_per_run = (time.monotonic() - start) / (done - runs_before)
                print_progress(run, done, protocol.count_tasks(name), seconds_per_run)
            if stop.asked:
                return EXIT_CODE, path
            if failed:
                return 1, path
        if "step_ms" not in record and name != protocol.reference:
            record["step_ms"] = time_steps(protocol, record)
            write_record(path, record)
    return 0, path


def train_tasks(
    protocol: Protocol, record: Record, tasks: list[Task], folder: Path, parallel: int, stop: Stop
) -> Iterator[tuple[Point, Task, int]]:
    """Train tasks in `folder`; yield each run that ended, not stopped, with its exit code."""
    by_name = {task.name: task for task in tasks}
    points = [make_point(protocol, record, task, folder) for task in tasks]
    for point, code in train_points(protocol.file, points, [[]] * parallel, stop):
        # SIGTERM kills a run that does not listen yet; later it ends with EXIT_CODE.
        if code not in (EXIT_CODE, -signal.SIGTERM):
            yield point, by_name[point.number], code


def print_progress(run: dict[str, Any], done: int, total: int, seconds_per_run: float) -> None:
    """Print a finished run and the time to the end of the entry."""
    loss = "diverged" if run["loss"] is None else f"{run['loss']:.4f}"
    minutes = seconds_per_run * (total - done) / 60
    progress = f"{done} of {plural(total, 'run')}, about {minutes:.0f} min left"
    print(f"{task_of(run).name}: {loss}; {progress}", flush=True)


def add_run(
    protocol: Protocol, record: Record, run: dict[str, Any], provenance: dict[str, str], path: Path
) -> None:
    """Add a run to the record and write it.

    Raises ValueError if the code that trains differs from that of `provenance`.
    """
    if describe_machine(protocol)["code_sha256"] != provenance["code_sha256"]:
        raise ValueError(
            f"{task_of(run).name}: code that trains was changed meanwhile; "
            f"{path} has the runs before"
        )
    if provenance not in record["made"]:
        record["made"].append(provenance)
    record["runs"].append({**run, "made": record["made"].index(provenance)})
    write_record(path, record)


def make_point(protocol: Protocol, record: Record, task: Task, folder: Path) -> Point:
    """Make the run of a task of an entry, in `folder`."""
    settings = protocol.overrides(record["router"], task, options_of(record))
    overrides = [*settings, f"--run.dir={folder}", f"--run.name={task.name}"]
    return Point(task.name, overrides, configure.load(protocol.file, overrides))


def read_result(folder: Path, task: Task) -> dict[str, Any] | None:
    """Read a run's part of the record.

    Returns:
        The run, whose loss is None if it diverged; None if it ended early for another reason.
    """
    result: dict[str, Any] = {**task._asdict(), "loss": None}
    if not (folder / "config.toml").exists():
        return None
    run = read_run(folder)
    if not run.ended:
        log = (folder / "train.log").read_text(errors="replace")
        # runtime/guard.py leaves these when it stops a run
        stopped = any(folder.glob("crash-*.json")) or "steps in a row skipped" in log
        return result if stopped or run.diverged is not None else None
    first = run.evaluations[min(run.evaluations)]
    last = run.evaluations[run.max_steps]
    speeds = list(run.series("perf/tokens_per_sec").values())
    result["loss"] = round(last["val/loss"], 7)
    result["tokens_per_second"] = round(float(np.median(speeds)))
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
    for name in ("load_imbalance", "dead_experts"):
        if f"val/{name}" in last:
            result[name] = round(last[f"val/{name}"], 3)


def time_steps(protocol: Protocol, record: Record) -> dict[str, float]:
    """Time a training step of the reference and of the entry, in turn in one process, unbalanced.

    Returns:
        {"reference": milliseconds, "entry": milliseconds}.

    Raises:
        ValueError: a step failed.
    """
    command = [sys.executable, "-m", "tools.bench", "step", protocol.file]
    command += [f"--model.router={name}" for name in (protocol.reference, record["router"])]
    hash_layers = options_of(record).get("model.n_hash_layer")
    if hash_layers:  # only of the entry
        command += ["--model.n_hash_layer=0", f"--model.n_hash_layer={hash_layers}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        command += [f"--rounds={TIMED_ROUNDS}", "--json", str(file)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                f"{' '.join(command[1:])}: exit code {done.returncode}: "
                f"{done.stdout[-300:]}{done.stderr}"
            )
        rows = json.loads(file.read_text())["rows"]
    # With hash layers the bench times four combinations: the first is the reference without them,
    # the last the entry with them.
    return {"reference": round(rows[0]["ms"], 3), "entry": round(rows[-1]["ms"], 3)}


def describe_machine(protocol: Protocol) -> dict[str, str]:
    """Describe where runs are made: commit and digests of the code, processor, versions, day."""
    files = list(REPO_ROOT.glob("*.py"))
    for folder in TRAINING_CODE:
        files += (REPO_ROOT / folder).rglob("*.py")
    code = {}
    for file in files:
        name = str(file.relative_to(REPO_ROOT))
        code[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return {
        "commit": run_git("rev-parse", "HEAD").stdout.strip(),
        "router_sha256": code["router.py"],
        "code_sha256": sha256_of(code),
        "machine": device_name(pick_device(configure.load(protocol.file).train.device)),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
