"""An entry: run what the protocol asks for, and write every result to the record as soon as it is there."""

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
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import configure
from common.text import plural
from data.bins import read_meta
from data.mixture import identify
from runtime.distributed import device_name, pick_device
from runtime.signals import EXIT_CODE, Stop
from scripts.report.runs import load_run
from scripts.sweep import Point, Pool
from scripts.track.clean import read_sources, text_digest
from scripts.track.protocol import REPO_ROOT, Protocol, Task
from scripts.track.record import Record, missing_tasks, new_record, read_record, write_record

TRAINING_CODE = [":(glob)*.py", "kernels", "runtime", "configure", "data", "common", "config/track", "track/text"]


def start_record(protocol: Protocol, path: Path, name: str, router: str) -> Record:
    """A new record, or the one to be resumed. Raises ValueError if that is of another protocol or router."""
    fresh = new_record(protocol, name, router)
    if not path.exists():
        return fresh
    record = read_record(path)
    for key in ("version", "fixed_sha256", "data_sha256", "router", "formula", "draft", "settings"):
        if record[key] != fresh[key]:
            raise ValueError(
                f"{path} has {key} {str(record[key]):.60}, this entry {str(fresh[key]):.60}; "
                "remove the record to begin again, or enter under another name"
            )
    return record


def check_committed() -> None:
    """Raise ValueError if code that trains differs from its commit: a record names the commit."""
    command = ["git", "-C", str(REPO_ROOT), "status", "--porcelain", "--", *TRAINING_CODE]
    status = subprocess.run(command, capture_output=True, text=True, check=False)
    if status.returncode:
        raise ValueError(f"{REPO_ROOT} is no git checkout, so a record could name no commit; clone it, or add --draft")
    if changed := status.stdout.split("\n")[0].strip():
        raise ValueError(f"{changed[2:].strip()} is not committed, and a record names a commit; commit it, or --draft")


def prepare_data(protocol: Protocol) -> None:
    """Prepare the track's set if it is missing. Raises ValueError if it, or the text, is not the protocol's."""
    config = configure.load(protocol.file)
    (folder,) = config.data.folders
    if not (folder / "meta.json").exists():
        for row in read_sources():
            if text_digest(row["file"]) != row["sha256"]:
                raise ValueError(f"track/text/{row['file']} is not the protocol's; git checkout -- track/text")
        source, val_source = protocol.text
        command = ["-m", "data.prepare", "text", "--source", source, "--val-source", val_source, "--tokenizer", "bytes"]
        subprocess.run([sys.executable, *command, "--name", folder.name, "--out", str(folder.parent)], check=True)
    if (found := identify([read_meta(folder)], [1.0])["data"]) != protocol.data_sha256:
        raise ValueError(f"{folder} has sha256 {found:.12}, the protocol {protocol.data_sha256:.12}; rm -r {folder}")


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of an entry's folder. Raises ValueError if another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process trains this entry; wait for it") from None
        yield


def enter(protocol: Protocol, record: Record, path: Path, runs: Path, parallel: int, stop: Stop) -> int:
    """Train what the record lacks, `parallel` runs at a time in `runs`, one thread each; returns the exit status."""
    os.environ["OMP_NUM_THREADS"] = "1"  # so that a run does not depend on how many go on at once
    made = describe_machine(protocol)
    if made not in record["made"]:
        record["made"].append(made)
    began, done = time.monotonic(), 0

    def collect(point: Point, code: int) -> None:
        nonlocal done
        task = tasks[point.config.run.name]
        if code in (EXIT_CODE, -signal.SIGTERM):  # asked to stop, after it began to listen and before
            return
        run = read_result(point.folder, task)
        if run is None:
            print(f"{task.name} failed with exit code {code}: {point.folder}/train.log", file=sys.stderr, flush=True)
            return
        record["runs"].append(run)
        write_record(path, record)
        done += 1
        loss = "diverged" if run["loss"] is None else f"{run['loss']:.4f}"
        left = sum(1 for _ in missing_tasks(protocol, record))
        minutes = (time.monotonic() - began) / done * left / 60
        print(f"{task.name}: {loss}, {left} left of this round, about {minutes:.0f} min", flush=True)

    with only_one(runs):
        while missing := missing_tasks(protocol, record):
            print(f"{record['name']}: {missing[0].round} round, {plural(len(missing), 'run')}", flush=True)
            tasks = {task.name: task for task in missing}
            points = [make_point(protocol, record["router"], task, runs) for task in missing]
            code = Pool(protocol.file, points, [[] for _ in range(parallel)], collect).run(stop)
            if code:
                return code
        if "step_ms" not in record and record["name"] != protocol.reference:
            record["step_ms"] = time_steps(protocol, record["router"])
    write_record(path, record)
    return 0


def make_point(protocol: Protocol, router: str, task: Task, folder: Path) -> Point:
    """The run of a task, in `folder`."""
    overrides = [*protocol.overrides(router, task), f"--run.dir={folder}", f"--run.name={task.name}"]
    return Point(task.name, overrides, configure.load(protocol.file, overrides))


def read_result(folder: Path, task: Task) -> dict[str, Any] | None:
    """A run's part of the record; its loss is None if it diverged. None: it ended for another reason."""
    result: dict[str, Any] = {**task._asdict(), "loss": None}
    if not (folder / "config.toml").exists():
        return None
    run = load_run(folder)
    if not run.ended:
        diverged = run.diverged is not None or any(folder.glob("crash-*.json"))
        return result if diverged else None
    first, last = run.evaluations[min(run.evaluations)], run.evaluations[run.max_steps]
    result["loss"] = round(last["val/loss"], 7)
    result["tokens_per_second"] = round(float(np.median([*run.series("perf/tokens_per_sec").values()])))
    if task.round == "judge":
        losses, documents = np.array(last["val/window_losses"], np.float64), np.array(last["val/window_documents"])
        groups = [losses[documents == document] for document in np.unique(documents)]
        result["documents"] = [[round(float(group.mean()), 7), len(group)] for group in groups]
        if "val/gate_norm" in last:
            result["gate_norm"] = [round(line["val/gate_norm"], 4) for line in (first, last)]
        for name in ("load_imbalance", "dead_experts"):
            if f"val/{name}" in last:
                result[name] = round(last[f"val/{name}"], 3)
    return result


def time_steps(protocol: Protocol, router: str, rounds: int = 40) -> dict[str, float]:
    """Milliseconds of a training step of the reference and of the router, measured in turn in one process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        routers = [f"--model.router={name}" for name in (protocol.reference, router)]
        command = ["-m", "scripts.bench", "step", protocol.file, *routers, f"--rounds={rounds}"]
        subprocess.run([sys.executable, *command, "--json", file], check=True, stdout=subprocess.DEVNULL)
        reference, entry = json.loads(file.read_text())["rows"]
    return {"reference": round(reference["ms"], 3), "entry": round(entry["ms"], 3)}


def describe_machine(protocol: Protocol) -> dict[str, str]:
    """Where runs are made: commit, processor, versions, day."""
    head = subprocess.run(["git", "-C", REPO_ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    router = (REPO_ROOT / "router.py").read_bytes()
    return {
        "commit": head.stdout.strip(),
        "router_sha256": hashlib.sha256(router).hexdigest(),
        "machine": device_name(pick_device(configure.load(protocol.file).train.device)),
        "torch": version("torch"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
