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
    read_record,
    task_of,
    write_record,
)

TRAINING_CODE = ["kernels", "runtime", "configure", "data", "common"]  # and the files at the top


def start_record(
    protocol: Protocol, path: Path, name: str, router: str, options: dict[str, Any]
) -> Record:
    """A new record, or the one to be resumed.

    Raises ValueError if that is of another protocol or router.
    """
    fresh = new_record(protocol, name, router, options)
    if not path.exists():
        return fresh
    record = {"options": {}, **read_record(path)}  # older records lack options
    for key, value in fresh.items():
        if key not in ("runs", "made") and record[key] != value:
            raise ValueError(
                f"{path} has {key} {str(record[key]):.60}, this entry {str(value):.60}; "
                "remove the record to begin again, or enter under another name"
            )
    return record


def check_committed() -> None:
    """Raise ValueError if code that trains differs from its commit: a record names the commit."""
    places = [":(glob)*.py", *TRAINING_CODE, "config/track", "track/text"]
    command = ["git", "-C", str(REPO_ROOT), "status", "--porcelain", "--", *places]
    status = subprocess.run(command, capture_output=True, text=True, check=False)
    if status.returncode:
        raise ValueError(
            f"{REPO_ROOT} is no git checkout, so a record could name no commit; clone it, or add --draft"
        )
    if changed := status.stdout.split("\n")[0].strip():
        raise ValueError(
            f"{changed[2:].strip()} is not committed, and a record names a commit; commit it, or --draft"
        )


def prepare_data(protocol: Protocol) -> None:
    """Prepare the track's set if it is missing.

    Raises ValueError if it, or the text, is not the protocol's.
    """
    (folder,) = configure.load(protocol.file).data.folders
    if not (folder / "meta.json").exists():
        source, val_source = protocol.text
        command = [
            "-m",
            "data.prepare",
            "text",
            "--source",
            source,
            "--val-source",
            val_source,
            "--tokenizer",
            "bytes",
        ]
        subprocess.run(
            [sys.executable, *command, "--name", folder.name, "--out", str(folder.parent)],
            check=True,
        )
    if (found := identify([read_meta(folder)], [1.0])["data"]) != protocol.data_sha256:
        raise ValueError(
            f"{folder} has sha256 {found:.12}, the protocol {protocol.data_sha256:.12}, so the set or its text was "
            f"changed: git checkout -- track/text; rm -r {folder}"
        )


def enter(
    protocol: Protocol, name: str, router: str, options: dict[str, Any], parallel: int, stop: Stop
) -> tuple[int, Path]:
    """Train what the entry's record lacks, `parallel` runs at a time, one thread each; the exit status and the record.

    Raises:
        ValueError: another process trains the entry, its record is of another protocol or router,
            or code that trains was changed meanwhile.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # so that a run does not depend on how many go on at once
    made = describe_machine(protocol)
    # Runs of other code are no runs of this entry.
    code = sha256_of([made["code_sha256"], repr(find_spec(router)), options])[:8]
    runs = protocol.runs / ("drafts" if protocol.draft else "entries") / f"{name}-{code}"
    path = runs.with_suffix(".json") if protocol.draft else protocol.records / f"{name}.json"
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{runs}: another process trains this entry; wait for it") from None
        record, began, trained, failed = (
            start_record(protocol, path, name, router, options),
            time.monotonic(),
            0,
            False,
        )
        while missing := missing_tasks(protocol, record):
            print(f"{name}: {missing[0].round} round, {plural(len(missing), 'run')}", flush=True)
            tasks = {task.name: task for task in missing}
            points = [make_point(protocol, record, task, runs) for task in missing]
            for point, code in train_points(protocol.file, points, [[]] * parallel, stop):
                # asked to stop, after it began to listen and before
                if code in (EXIT_CODE, -signal.SIGTERM):
                    continue
                run = read_result(point.folder, tasks[point.number])
                if run is None:
                    failed = True
                    text = f"{point.number} failed with exit code {code}: {point.folder}/train.log"
                    print(text, file=sys.stderr, flush=True)
                    continue
                add_run(protocol, record, run, made, path)
                trained += 1
                done, total = len(record["runs"]), protocol.count_tasks(name)
                minutes = (time.monotonic() - began) / trained * (total - done) / 60
                loss = "diverged" if run["loss"] is None else f"{run['loss']:.4f}"
                progress = f"{done} of {plural(total, 'run')}, about {minutes:.0f} min left"
                print(f"{point.number}: {loss}; {progress}", flush=True)
            if stop.asked or failed:
                return EXIT_CODE if stop.asked else 1, path
        if "step_ms" not in record and name != protocol.reference:
            record["step_ms"] = time_steps(protocol, record)
            write_record(path, record)
    return 0, path


def add_run(
    protocol: Protocol, record: Record, run: dict[str, Any], made: dict[str, str], path: Path
) -> None:
    """Add a run to the record and write it.

    Raises ValueError if the code that trained may not be that of `made`.
    """
    if describe_machine(protocol)["code_sha256"] != made["code_sha256"]:
        name = task_of(run).name
        raise ValueError(
            f"{name}: code that trains was changed meanwhile; {path} has the runs before"
        )
    if made not in record["made"]:
        record["made"].append(made)
    record["runs"].append(run | {"made": record["made"].index(made)})
    write_record(path, record)


def make_point(protocol: Protocol, record: Record, task: Task, folder: Path) -> Point:
    """The run of a task of an entry, in `folder`."""
    settings = protocol.overrides(record["router"], task, record.get("options", {}))
    overrides = [*settings, f"--run.dir={folder}", f"--run.name={task.name}"]
    return Point(task.name, overrides, configure.load(protocol.file, overrides))


def read_result(folder: Path, task: Task) -> dict[str, Any] | None:
    """A run's part of the record; its loss is None if it diverged.

    None: it ended for another reason.
    """
    result: dict[str, Any] = {**task._asdict(), "loss": None}
    if not (folder / "config.toml").exists():
        return None
    run = read_run(folder)
    if not run.ended:
        log = (folder / "train.log").read_text(errors="replace")
        # by runtime/guard.py
        dumped = any(folder.glob("crash-*.json")) or "steps in a row skipped" in log
        return result if dumped or run.diverged is not None else None
    first, last = run.evaluations[min(run.evaluations)], run.evaluations[run.max_steps]
    result["loss"] = round(last["val/loss"], 7)
    result["tokens_per_second"] = round(
        float(np.median([*run.series("perf/tokens_per_sec").values()]))
    )
    if task.round == "judge":
        losses, documents = (
            np.array(last["val/window_losses"], np.float64),
            np.array(last["val/window_documents"]),
        )
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
        command = [
            sys.executable,
            "-m",
            "tools.bench",
            "step",
            protocol.file,
            *models,
            f"--rounds={rounds}",
        ]
        done = subprocess.run(
            [*command, "--json", file], check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(
                f"{' '.join(command[1:])}: exit code {done.returncode}: {done.stdout[-300:]}{done.stderr}"
            )
        rows = json.loads(file.read_text())["rows"]
    return {"reference": round(rows[0]["ms"], 3), "entry": round(rows[-1]["ms"], 3)}


def describe_machine(protocol: Protocol) -> dict[str, str]:
    """Where runs are made: commit and digests of the code that trains, processor, versions, day."""
    head = subprocess.run(
        ["git", "-C", REPO_ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    files = [
        *REPO_ROOT.glob("*.py"),
        *(file for part in TRAINING_CODE for file in (REPO_ROOT / part).rglob("*.py")),
    ]
    code = {
        str(file.relative_to(REPO_ROOT)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
    return {
        "commit": head.stdout.strip(),
        "router_sha256": code["router.py"],
        "code_sha256": sha256_of(code),
        "machine": device_name(pick_device(configure.load(protocol.file).train.device)),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
