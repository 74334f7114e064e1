"""How far an unfinished set is: progress.json in data/<name>.partial/, beside the shards that are written so far."""

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from common.files import write_atomic
from data import DataError
from data.bins import CLOSED, Count, Split
from data.encode import Encoded

PROGRESS_FILE = "progress.json"
CHANGES = {"inputs": "the input files differ", "val_inputs": "the files of --val-source differ"}  # else key and values


@dataclass(config=CLOSED)
class Progress:
    """The content of progress.json."""

    made_from: dict  # the arguments that decide what is in the set; other ones do not resume it
    files: Count = 0  # of the inputs that are tokenized completely
    documents: Count = 0  # of the next file
    complete: bool = False
    splits: dict[str, Split] = Field(default_factory=dict)  # written so far; `files` are the complete shards only
    empty: Count = 0  # documents of white space only
    bad: Count = 0  # documents that could not be read
    links: Count = 0  # in archives, which have no content of their own

    def add(self, encoded: Encoded) -> None:
        """Count what was left out."""
        self.empty += encoded.empty
        self.bad += encoded.bad
        self.links += encoded.links

    def save(self, folder: Path) -> None:
        """Write the file, after the shards of `splits` are on the disk: a power cut leaves this state or the last."""
        write_atomic(folder / PROGRESS_FILE, json.dumps(asdict(self)), durable=True)


def resume_progress(partial: Path, made_from: dict, force: bool) -> Progress:
    """The progress to go on from: what is recorded in `partial`, else none.

    Raises:
        DataError: it belongs to other arguments or is damaged, and `force`, which starts over, is not set.
    """
    try:
        was = TypeAdapter(Progress).validate_python(json.loads((partial / PROGRESS_FILE).read_bytes()))
    except (OSError, ValueError, RecursionError):  # there is none, or it is damaged
        was = None
    if was and was.made_from == made_from:
        return was
    if (partial / PROGRESS_FILE).exists() and not force:
        fault = f"whose {PROGRESS_FILE} cannot be read: "
        if was:
            fault = f"made with other arguments ({describe_changes(was.made_from, made_from)}): resume with those, "
        raise DataError(f"{partial} holds an unfinished set {fault}start over with --force, or choose another --name")
    (partial / PROGRESS_FILE).unlink(missing_ok=True)
    return Progress(made_from)


def describe_changes(was: dict, now: dict) -> str:
    """The keys whose values differ, in words; empty if none."""
    changed = [key for key in sorted(was | now) if was.get(key) != now.get(key)]
    return "; ".join(CHANGES.get(key, f"{key} {was.get(key)!r}, now {now.get(key)!r}") for key in changed)
