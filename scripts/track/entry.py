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
from router import find_spec
from runtime.distributed import device_name, pick_device
from runtime.signals import EXIT_CODE, Stop
from scripts.report.runs import load_run
from scripts.sweep import Point, Pool
from scripts.track.clean import read_sources, text_digest
from scripts.track.protocol import REPO_ROOT, Protocol, Task, digest
from scripts.track.record import Record, missing_tasks, new_record, read_record, write_record

TRAINING_CODE = ["kernels", "runtime", "configure", "data", "common"]  # and the files at the top


def start_record(protocol: Protocol, path: Path, name: str, router: str, options: dict[str, Any]) -> Record:
    """A new record, or the one to be resumed. Raises ValueError if that is of another protocol or router."""
    fresh = new_record(protocol, name, router, options)
    if not path.exists():
        return fresh
    record = read_record(path)
    record.setdefault("options", {})
    for key in ("version", "fixed_sha256", "data_sha256", "router", "formula", "options", "draft", "settings"):
        if record[key] != fresh[key]:
            raise ValueError(
                f"{path} has {key} {str(record[key]):.60}, this entry {str(fresh[key]):.60}; "
                "remove the record to begin again, or enter under another name"
            )
    return record


def check_committed() -> None:
    """Raise ValueError if code that trains differs from its commit: a record names the commit."""
    places = [":(glob)*.py", *TRAINING_CODE, "config/track", "track/text"]
    command = ["git", "-C", str(REPO_ROOT), "status", "--porcelain", "--", *places]
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


def enter(
    protocol: Protocol, name: str, router: str, options: dict[str, Any], parallel: int, stop: Stop
) -> tuple[int, Path]:
    """Train what the entry's record lacks, `parallel` runs at a time, one thread each; the exit status and the record.

    Raises:
        ValueError: another process trains the entry, its record is of another protocol or router, or code that trains
            was changed meanwhile.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # so that a run does not depend on how many go on at once
    made = describe_machine(protocol)
    # Runs of other code are no runs of this entry.
    code = digest([made["code_sha256"], repr(find_spec(router)), options])[:8]
    runs = protocol.runs / ("drafts" if protocol.draft else "entries") / f"{name}-{code}"
    path = runs.with_suffix(".json") if protocol.draft else protocol.records / f"{name}.json"
    with only_one(runs):
        record = start_record(protocol, path, name, router, options)
        status = Training(protocol, record, made, path, runs).train(parallel, stop)
        if status:
            return status, path
        if "step_ms" not in record and name != protocol.reference:
            record["step_ms"] = time_steps(protocol, record)
            write_record(path, record)
    return 0, path


class Training:
    """The runs of an entry, round by round."""

    def __init__(self, protocol: Protocol, record: Record, made: dict[str, str], path: Path, runs: Path) -> None:
        self.protocol, self.record, self.made, self.path, self.runs = protocol, record, made, path, runs
        self.tasks: dict[str, Task] = {}  # those of this round, by name
        self.began, self.trained, self.failed = time.monotonic(), 0, 0

    def train(self, parallel: int, stop: Stop) -> int:
        """Train the missing runs; returns the exit status: 1 if one failed, EXIT_CODE if asked to stop."""
        while missing := missing_tasks(self.protocol, self.record):
            print(f"{self.record['name']}: {missing[0].round} round, {plural(len(missing), 'run')}", flush=True)
            self.tasks = {task.name: task for task in missing}
            points = [make_point(self.protocol, self.record, task, self.runs) for task in missing]
            status = Pool(self.protocol.file, points, [[] for _ in range(parallel)], self.collect).run(stop)
            if status == EXIT_CODE or self.failed:  # a run that diverged has failed for train.py, but not here
                return status
        return 0

    def collect(self, point: Point, code: int) -> None:
        """Add a run that has ended to the record. Raises ValueError if its code may have been another one."""
        if code in (EXIT_CODE, -signal.SIGTERM):  # asked to stop, after it began to listen and before
            return
        task = self.tasks[point.config.run.name]
        run = read_result(point.folder, task)
        if run is None:
            self.failed += 1
            print(f"{task.name} failed with exit code {code}: {point.folder}/train.log", file=sys.stderr, flush=True)
            return
        if describe_machine(self.protocol)["code_sha256"] != self.made["code_sha256"]:
            raise ValueError(f"{task.name}: code that trains was changed meanwhile; {self.path} has the runs before")
        if self.made not in self.record["made"]:
            self.record["made"].append(self.made)
        self.record["runs"].append(run | {"made": self.record["made"].index(self.made)})
        write_record(self.path, self.record)
        self.trained += 1
        done, total = len(self.record["runs"]), self.protocol.count_tasks(self.record["name"])
        minutes = (time.monotonic() - self.began) / self.trained * (total - done) / 60
        loss = "diverged" if run["loss"] is None else f"{run['loss']:.4f}"
        print(f"{task.name}: {loss}; {done} of {plural(total, 'run')}, about {minutes:.0f} min left", flush=True)


def make_point(protocol: Protocol, record: Record, task: Task, folder: Path) -> Point:
    """The run of a task of an entry, in `folder`."""
    settings = protocol.overrides(record["router"], task, record.get("options", {}))
    overrides = [*settings, f"--run.dir={folder}", f"--run.name={task.name}"]
    return Point(task.name, overrides, configure.load(protocol.file, overrides))


def read_result(folder: Path, task: Task) -> dict[str, Any] | None:
    """A run's part of the record; its loss is None if it diverged. None: it ended for another reason."""
    result: dict[str, Any] = {**task._asdict(), "loss": None}
    if not (folder / "config.toml").exists():
        return None
    run = load_run(folder)
    if not run.ended:
        log = (folder / "train.log").read_text(errors="replace")
        dumped = any(folder.glob("crash-*.json")) or "steps in a row skipped" in log  # by runtime/guard.py
        return result if dumped or run.diverged is not None else None
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


def time_steps(protocol: Protocol, record: Record, rounds: int = 40) -> dict[str, float]:
    """Milliseconds of a training step of the reference and of the entry, measured in turn in one process.

    Without what balances loads. Raises ValueError if a step fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        models = [f"--model.router={name}" for name in (protocol.reference, record["router"])]
        # The first alternative is without hash layers, the last with.
        if hashed := record.get("options", {}).get("model.n_hash_layer"):
            models += ["--model.n_hash_layer=0", f"--model.n_hash_layer={hashed}"]
        command = [sys.executable, "-m", "scripts.bench", "step", protocol.file, *models, f"--rounds={rounds}"]
        done = subprocess.run([*command, "--json", file], check=False, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command[1:])}: exit code {done.returncode}: {done.stdout[-300:]}{done.stderr}")
        rows = json.loads(file.read_text())["rows"]
    return {"reference": round(rows[0]["ms"], 3), "entry": round(rows[-1]["ms"], 3)}


def describe_machine(protocol: Protocol) -> dict[str, str]:
    """Where runs are made: commit and digests of the code that trains, processor, versions, day."""
    head = subprocess.run(["git", "-C", REPO_ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    files = [*REPO_ROOT.glob("*.py"), *(file for part in TRAINING_CODE for file in (REPO_ROOT / part).rglob("*.py"))]
    code = {str(file.relative_to(REPO_ROOT)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {
        "commit": head.stdout.strip(),
        "router_sha256": code["router.py"],
        "code_sha256": digest(code),
        "machine": device_name(pick_device(configure.load(protocol.file).train.device)),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
