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
    examples: list[str] = Field(default_factory=list)  # the first three of bad documents and links

    def add(self, encoded: Encoded) -> None:
        """Count what was left out."""
        self.empty, self.bad, self.links = (
            self.empty + encoded.empty,
            self.bad + encoded.bad,
            self.links + encoded.links,
        )
        self.examples = (self.examples + encoded.examples)[:3]

    def save(self, folder: Path) -> None:
        """Write the file, after the shards of `splits` are on the disk: a power cut leaves this state or the last."""
        write_atomic(folder / PROGRESS_FILE, json.dumps(asdict(self)), durable=True)


def read_progress(folder: Path) -> Progress | None:
    """The progress recorded in `folder`; None if there is none, or its file is damaged."""
    try:
        return TypeAdapter(Progress).validate_python(json.loads((folder / PROGRESS_FILE).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def resume_progress(partial: Path, made_from: dict, force: bool) -> Progress:
    """The progress to go on from: what is recorded in `partial`, else none.

    Raises:
        DataError: it belongs to other arguments or is damaged, and `force`, which starts over, is not set.
    """
    was = read_progress(partial)
    if was and was.made_from == made_from:
        return was
    if (partial / PROGRESS_FILE).exists() and not force:
        fault = f"whose {PROGRESS_FILE} cannot be read: "
        if was:
            fault = f"made with other arguments ({describe_changes(was.made_from, made_from)}): resume with those, "
        raise DataError(f"{partial} holds an unfinished set {fault}start over with --force, or choose another --name")
    (partial / PROGRESS_FILE).unlink(missing_ok=True)
    return Progress(made_from)


def find_revision(partial: Path, made_from: dict) -> str | None:
    """The revision of the hub's files that the unfinished set in `partial` was begun with; None if there is none."""
    was = read_progress(partial)
    return was.made_from["revision"] if was and made_from.items() <= was.made_from.items() else None


def describe_changes(was: dict, now: dict) -> str:
    """The keys whose values differ, in words; empty if none."""
    changed = [key for key in sorted(was | now) if was.get(key) != now.get(key)]
    return "; ".join(CHANGES.get(key, f"{key} {was.get(key)!r}, now {now.get(key)!r}") for key in changed)
