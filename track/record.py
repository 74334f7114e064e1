"""Read and write records, and tell the code of a commit; track/records/README.md lists fields."""

import hashlib
import io
import json
import math
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from common.files import check_regular, write_atomic
from configure.schema import Section
from data.bins import describe_faults, sha256_of
from track.contest import Losses, Protocol, Task, draw_settings, list_tasks

REPO_ROOT = Path(__file__).parents[1]
# code that trains, besides the files at the top
TRAINING_CODE = ("kernels", "runtime", "configure", "data", "common")
FORMAT = 2
NAME = r"[a-z0-9][a-z0-9.-]*"  # of an entry
Record = dict[str, Any]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


# ---- the fields that are checked; track/records/README.md explains all
class Run(Section, extra="ignore"):
    """A run; the first five are its task."""

    round: Literal["draw", "judge", "curve"]
    rung: int = Field(ge=0)
    draw: int
    seed: int
    length: float
    loss: float | None
    made: int
    # of judged runs; measures of gates are absent if the router has none
    documents: list[Pair] = []
    gate_norm: Pair = []
    load_imbalance: float = 0
    dead_experts: float = 0
    zero_gates: float = 0


class Made(Section, extra="ignore"):
    """The code and machine that runs were made with."""

    commit: str
    code_sha256: str
    machine: str


class Options(Section, extra="allow"):
    """The router, and what `--set` gave."""

    router: str = Field(alias="model.router")


class StepTimes(Section):
    """Milliseconds of a training step."""

    reference: float
    entry: float


class RecordFields(Section, extra="ignore"):
    """A record."""

    edition: int
    protocol_sha256: str
    data_sha256: str
    name: str
    options: Options
    draft: bool
    settings: list[dict[str, float | None]]
    runs: list[Run]
    made: list[Made]
    step_ms: list[StepTimes] = []


# ---- read and write


def new_record(protocol: Protocol, name: str, options: Mapping[str, Any]) -> Record:
    """Make a record without runs."""
    return {
        "format": FORMAT,
        "edition": protocol.edition,
        "protocol_sha256": protocol.sha256,
        "data_sha256": protocol.data_sha256,
        "name": name,
        "options": dict(options),
        "draft": protocol.draft,
        "settings": draw_settings(protocol),
        "runs": [],
        "made": [],
    }


def task_of(run: Mapping[str, Any]) -> Task:
    """Return the task of a record's run."""
    return Task(*(run[field] for field in Task._fields))


def losses_of(record: Record) -> Losses:
    """Return {task: validation loss, nats per byte}; infinite where the run diverged."""
    losses = {}
    for run in record["runs"]:
        losses[task_of(run)] = math.inf if run["loss"] is None else run["loss"]
    return losses


def missing_tasks(protocol: Protocol, record: Record) -> list[Task]:
    """List the runs that the record still lacks, as far as they are decided."""
    losses = losses_of(record)
    return [task for task in list_tasks(protocol, record["name"], losses) if task not in losses]


def write_record(path: Path, record: Record) -> None:
    """Write a record with the digest of its content, one run a line."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    frame = json.dumps({**content, "runs": [], "sha256": sha256_of(content)}, indent=1)
    runs = ",\n".join(f"  {json.dumps(run)}" for run in record["runs"])
    text = frame.replace('"runs": []', f'"runs": [\n{runs}\n ]', 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text + "\n", durable=True)


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python reads though they are not JSON."""
    raise ValueError(f"{name} is no number of JSON")


def read_json(path: Path) -> Record:
    """Read a file that may be a record. Raises ValueError if it is no JSON object."""
    try:
        check_regular(path)
        record = json.loads(path.read_text(), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}; take it from its commit again") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: not a record; python -m scripts.track enter writes them")
    return record


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        ValueError: the file is no record of this edition, was changed, or lacks a field.
    """
    record = read_json(path)
    if record.get("format") == 1:
        raise ValueError(f"{path}: a record of edition 1, which is closed; it enters no table")
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{path}: not a record of format {FORMAT}; python -m scripts.track enter writes them"
        )
    content = {key: value for key, value in record.items() if key != "sha256"}
    if record.get("sha256") != sha256_of(content):
        raise ValueError(
            f"{path}: its digest is not that of its content: it was changed by hand; "
            "take it from its commit again"
        )
    try:
        RecordFields.model_validate(record)
    except ValidationError as error:
        raise ValueError(
            f"{path}: {describe_faults(error)}; take it from its commit again"
        ) from None
    return record


# ---- code
def run_git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in the repository; the caller checks the exit code."""
    return subprocess.run(["git", "-C", str(REPO_ROOT), *arguments], capture_output=True)


def is_training_code(path: str) -> bool:
    """Return True for a file that decides a run's loss."""
    folder, slash, _ = path.partition("/")
    if not slash:
        return path.endswith(".py")
    return folder in TRAINING_CODE and path.endswith((".py", ".toml"))


def read_code() -> dict[str, bytes]:
    """{path: content} of the code that trains, in this checkout."""
    files = {}
    for pattern in ("*.py", *(f"{folder}/**/*" for folder in TRAINING_CODE)):
        for file in REPO_ROOT.glob(pattern):
            path = file.relative_to(REPO_ROOT).as_posix()
            if is_training_code(path):
                files[path] = file.read_bytes()
    return files


def read_commit(commit: str) -> dict[str, bytes]:
    """{path: content} of the code that trains, in a commit.

    Raises:
        ValueError: `commit` is no full digest of a commit in this repository.
    """
    if not re.fullmatch("[0-9a-f]{40}", commit):  # git would take a branch, or an option
        raise ValueError(f"commit {commit!r}: expected 40 hexadecimal digits")
    # as it is committed, whatever this machine makes of line ends
    archive = run_git("-c", "core.autocrlf=false", "archive", "--format=tar", commit)
    if archive.returncode:
        raise ValueError(
            f"commit {commit:.12} is not in this repository: git fetch --unshallow, or the record "
            "is not from it"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        files = {}
        for member in tar:
            if is_training_code(member.name):  # others may be links that lead out of the archive
                content = tar.extractfile(member)
                if content:  # no folder
                    files[member.name] = content.read()
        return files


def digest_code(files: Mapping[str, bytes]) -> str:
    """The sha256 of code, as records have it."""
    return sha256_of({path: hashlib.sha256(text).hexdigest() for path, text in files.items()})
