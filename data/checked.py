"""The record of a large set's last complete check, so that a start need not read the set again.

data/<name>/checked.json: for each shard the sha256 that was checked, the time of the file's last
change, and the sha256 of a sample of it. data.prepare and data.verify write it.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from common.files import write_atomic

CHECKED_FILE = "checked.json"
SAMPLE_BLOCKS = 16  # spread evenly over a file, both ends among them; not measured
SAMPLE_BYTES = 4096  # per block: a page, which a disk reads in any case

# sha256 of the file, time of its last change in ns since 1970, sha256 of its sample
Entry = tuple[str, int, Annotated[str, Field(min_length=64)]]
Record = dict[str, Entry]  # by the name of a shard


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


def read_record(folder: Path) -> Record:
    """The record of the set in `folder`; empty if there is none or it is damaged."""
    try:
        content: Any = json.loads((folder / CHECKED_FILE).read_bytes())
        return TypeAdapter(Record).validate_python(content)
    except (OSError, ValueError, RecursionError):
        return {}


def write_record(folder: Path, record: Record) -> None:
    """Write the record of the set in `folder`. Raises OSError."""
    write_atomic(folder / CHECKED_FILE, json.dumps(record, indent=1) + "\n")
