"""Read, write and check records: every setting an entry tried, every loss by seed and document.

track/records/README.md lists the fields.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import write_atomic
from data.bins import sha256_of
from router import ROUTERS, find_spec
from track.protocol import Protocol, Task, read_options

FORMAT = 1
LARGEST = 150_000  # bytes of a record's file
TOLERANCE = 1e-6  # nats per byte: losses by document are rounded to 1e-7

Record = dict[str, Any]


def new_record(
    protocol: Protocol, name: str, router: str, options: Mapping[str, Any] | None = None
) -> Record:
    """Make a record without runs."""
    return {
        "format": FORMAT,
        "track": protocol.name,
        "version": protocol.version,
        "fixed_sha256": protocol.fixed_sha256,
        "data_sha256": protocol.data_sha256,
        "name": name,
        "router": router,
        "formula": repr(find_spec(router)),
        "options": dict(options or {}),
        "draft": protocol.draft,
        "settings": protocol.draw_settings(),
        "runs": [],
        "made": [],
    }


def task_of(run: Mapping[str, Any]) -> Task:
    """Return the task of a record's run."""
    return Task(run["round"], run["draw"], run["seed"], run["length"])


def options_of(record: Record) -> dict[str, Any]:
    """Return what an entry sets besides its router; the ten oldest records lack the field."""
    return record.get("options", {})


def losses_of(record: Record) -> dict[Task, float]:
    """Return {task: validation loss, nats per byte}; infinite where the run diverged."""
    losses = {}
    for run in record["runs"]:
        losses[task_of(run)] = math.inf if run["loss"] is None else run["loss"]
    return losses


def judged_runs(record: Record) -> dict[int, Mapping[str, Any]]:
    """Return {seed: run} of the runs that count."""
    return {run["seed"]: run for run in record["runs"] if run["round"] == "judge"}


def missing_tasks(protocol: Protocol, record: Record) -> list[Task]:
    """List the runs that the record still lacks, as far as they are decided."""
    losses = losses_of(record)
    return [task for task in protocol.list_tasks(record["name"], losses) if task not in losses]


def summarize(record: Record) -> dict[str, Any]:
    """Summarize the judged runs.

    Returns:
        The judged settings, their mean loss (None if a judged run diverged), and how many of all
        runs diverged.
    """
    judged = list(judged_runs(record).values())
    losses = [run["loss"] for run in judged]
    diverged = sum(run["loss"] is None for run in record["runs"])
    if not judged:
        return {"diverged": diverged}
    mean = None
    if None not in losses:
        mean = round(sum(losses) / len(losses), 6)
    settings = record["settings"][judged[0]["draw"]]
    return {"settings": settings, "loss": mean, "diverged": diverged}


def write_record(path: Path, record: Record) -> None:
    """Write a record with its summary and the digest of its content, one run a line."""
    content = without_digest(record)
    content["summary"] = summarize(record)
    frame = json.dumps({**content, "runs": [], "sha256": sha256_of(content)}, indent=1)
    runs = ",\n".join(f"  {json.dumps(run)}" for run in record["runs"])
    text = frame.replace('"runs": []', f'"runs": [\n{runs}\n ]', 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text + "\n")


def without_digest(record: Record) -> Record:
    """Return the content of a record that its digest covers."""
    return {key: value for key, value in record.items() if key != "sha256"}


def read_record(path: Path) -> Record:
    """Read a record. Raises ValueError if the file is not a record of this format."""
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}; take it from its commit again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(
            f"{path}: not a record of format {FORMAT}; python -m scripts.track enter writes them"
        )
    return record


def find_record_faults(protocol: Protocol, record: Record, file_name: str) -> list[str]:
    """List the faults of a record, each with its remedy; none for an intact, complete record.

    Raises LookupError, TypeError, AttributeError or ValueError if a field is missing or wrong.
    """
    again = f"enter it again: python -m scripts.track enter {record['name']}"
    if record["version"] != protocol.version:
        return [
            f"it is of version {record['version']} of the protocol, the track is at "
            f"{protocol.version}; {again}"
        ]
    faults = find_identity_faults(protocol, record, file_name, again)
    faults += find_router_faults(protocol, record, again)
    if record.get("summary") != summarize(record):
        faults.append(f"its summary is not that of its losses, which give {summarize(record)}")
    if "step_ms" not in record and record["name"] != protocol.reference:
        faults.append(f"it lacks the times of a step; {again}")
    return faults + find_run_faults(protocol, record, again)


def find_identity_faults(
    protocol: Protocol, record: Record, file_name: str, again: str
) -> list[str]:
    """List the faults of a record's digest, name, and protocol."""
    faults = []
    if record.get("sha256") != sha256_of(without_digest(record)):
        faults.append(
            "its digest is not that of its content: it was changed by hand; "
            "take it from its commit again"
        )
    if record["name"] != Path(file_name).stem or record["draft"]:
        kind = "a draft" if record["draft"] else record["name"]
        faults.append(f"it is {kind}: one entry a name, in NAME.json")
    for key in ("fixed_sha256", "data_sha256"):
        expected = getattr(protocol, key)
        if record[key] != expected:
            faults.append(f"{key} is {record[key]:.12}, of the protocol {expected:.12}; {again}")
    if record["settings"] != protocol.draw_settings():
        faults.append(f"its settings are not the protocol's draws; {again}")
    return faults


def find_router_faults(protocol: Protocol, record: Record, again: str) -> list[str]:
    """List the faults of a record's router and options."""
    faults = []
    router = record["router"]
    options = options_of(record)
    if router in ROUTERS or "," in router:  # else a router that was removed: nothing to compare
        formula = repr(find_spec(router))
        if record["formula"] != formula:
            faults.append(
                f"its formula is {record['formula']}, and router.py has {formula}; {again}"
            )
    if record["name"] in ROUTERS and (record["name"] != router or options):
        faults.append(
            f"it is of the router {router} {options or ''}, not of {record['name']}; {again}"
        )
    texts = [f"{key}={value}" for key, value in options.items()]
    if options != read_options(protocol.file, texts):
        faults.append(f"its options {options} are not as `enter` writes them; {again}")
    return faults


def find_run_faults(protocol: Protocol, record: Record, again: str) -> list[str]:
    """List the faults of a record's runs."""
    faults = []
    losses = losses_of(record)
    required = protocol.list_tasks(record["name"], losses)
    missing = [task.name for task in required if task not in losses]
    if missing:
        faults.append(
            f"{len(missing)} of {len(required)} runs are missing, such as {missing[0]}; {again}"
        )
    for task in losses:
        if task not in required:
            faults.append(f"{task.name} is not in the protocol; {again}")
    if len(losses) != len(record["runs"]):
        faults.append(f"a run is in it more than once; {again}")
    for seed, run in judged_runs(record).items():
        if run["loss"] is None:
            continue
        if sum(count for _, count in run["documents"]) != protocol.windows:
            faults.append(f"the documents of seed {seed} do not have {protocol.windows} windows")
        mean = sum(loss * count for loss, count in run["documents"]) / protocol.windows
        if not abs(mean - run["loss"]) < TOLERANCE:  # a NaN is a fault, too
            faults.append(
                f"the loss of seed {seed} is {run['loss']}, the mean of its documents {mean:.6f}"
            )
    return faults
