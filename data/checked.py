"""The record of a large set's last complete check, so that a start need not read the set again.

data/<name>/checked.json: for each shard the sha256 that was checked, the time of the file's last
change, and the sha256 of a sample of it. data.prepare and data.verify write it. inputs.json is the
same of the files that a set was made from, if they are above 1 GiB in all.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from common.files import write_atomic

CHECKED_FILE = "checked.json"
INPUTS_FILE = "inputs.json"
SAMPLE_BLOCKS = 16  # spread evenly over a file, both ends among them; not measured
SAMPLE_BYTES = 4096  # per block: a page, which a disk reads in any case

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# sha256 of the file, time of its last change in ns since 1970, sha256 of its sample
Entry = tuple[Sha256, int, Sha256]
Record = dict[str, Entry]  # by the name of a shard, or the path of an input


def sample_file(path: Path) -> str:
    """The sha256 of SAMPLE_BLOCKS blocks of a file. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        last_block = max(0, path.stat().st_size - SAMPLE_BYTES)
        for number in range(SAMPLE_BLOCKS):
            file.seek(last_block * number // (SAMPLE_BLOCKS - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def describe_shards(folder: Path, hashes: Mapping[str, str]) -> Record:
    """The record of shards as they are now; `hashes` has the sha256 of each. Raises OSError."""
    paths = [folder / name for name in hashes]
    with ThreadPoolExecutor() as pool:
        samples = list(pool.map(sample_file, paths))
    record: Record = {}
    for path, sha256, sample in zip(paths, hashes.values(), samples, strict=True):
        record[path.name] = (sha256, path.stat().st_mtime_ns, sample)
    return record


def hash_files(paths: Sequence[str], record: Record) -> Record:
    """The record of files as they are now, by their paths. Raises OSError.

    Files whose time and sample are as in `record` keep its sha256; others are read completely.
    """

    def describe(path: str) -> Entry:
        changed = Path(path).stat().st_mtime_ns  # before it is read: a later change is noticed
        sample = sample_file(Path(path))
        entry = record.get(path)
        if entry and entry[1:] == (changed, sample):
            return entry
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return sha256, changed, sample

    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        return dict(zip(paths, pool.map(describe, paths), strict=True))


def read_record(folder: Path, name: str = CHECKED_FILE) -> Record:
    """The record `name` in `folder`; empty if there is none or it is damaged."""
    try:
        content: Any = json.loads((folder / name).read_bytes())
        return TypeAdapter(Record).validate_python(content)
    except (OSError, ValueError, RecursionError):
        return {}


def write_record(folder: Path, record: Record, name: str = CHECKED_FILE) -> None:
    """Write the record `name` in `folder`. Raises OSError."""
    write_atomic(folder / name, json.dumps(record, indent=1) + "\n")
