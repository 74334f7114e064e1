"""Writing a data set (bins.py has the format): it appears under its name complete or not at all."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from io import BufferedRandom
from pathlib import Path

import numpy as np
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from common.files import sync_folder, write_atomic
from data import DataError
from data.bins import CLOSED, SHARD_TOKENS, Count, Meta, Shard, Split, partial_folder
from data.encode import Encoded
from data.tokenizer import RANKS_FILE, TOKENIZER_FILE, Tokenizer, identity

# in data/<name>.partial/, beside the shards that are written so far
PROGRESS_FILE = "progress.json"
# else key and values
CHANGES = {"inputs": "the input files differ", "val_inputs": "the files of --val-source differ"}
NAMES = "|".join(map(re.escape, (PROGRESS_FILE, "meta.json", RANKS_FILE, TOKENIZER_FILE)))
# what commit 11388ef leaves of a preparation that is killed
OF_UNITS = "begun.json|units-[0-9a-f]{12}"
OURS = re.compile(rf"(train|val)-\d{{5,}}\.bin|({NAMES})(\.\d+\.tmp)?|lock|{OF_UNITS}")


class Writer(AbstractContextManager["Writer"]):
    """Writes a set in <folder>.partial, which takes the place of <folder> at the end.

    with Writer(folder, tokenizer) as writer:
        writer.write("train", ids, documents)  # as often as there is text
        writer.finish(name, source, prepare)

    Left without `finish`, it removes what it wrote, unless the folder `partial` has a record of
    progress.

    Raises:
        DataError: ids may not fit uint16, another process writes this set, or a folder holds files
            of others.
    """

    def __init__(
        self, folder: str | Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        if tokenizer.vocab_size > 2**16:
            raise DataError(
                f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids; uint16 shards hold 65536"
            )
        self.folder, self.partial, self.tokenizer = Path(folder), partial_folder(folder), tokenizer
        for place in (self.folder, self.partial):
            refuse_foreign_files(place)
        self.partial.mkdir(parents=True, exist_ok=True)
        # held until it is closed, by a kill at the latest
        self._lock = (self.partial / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise DataError(
                f"{self.partial}: another process is preparing this set: wait for it"
            ) from error
        self._finished = False
        # a kill may have left a set without its name
        (self.partial / "meta.json").unlink(missing_ok=True)
        self.splits = {
            name: _SplitWriter(self.partial, name, shard_tokens) for name in ("train", "val")
        }

    def __exit__(self, *_: object) -> None:
        for split in self.splits.values():
            split.close()
        if not self._finished and not (self.partial / PROGRESS_FILE).exists():
            # after `finish` the folder may be another process's new one
            shutil.rmtree(self.partial)
        self._lock.close()

    def write(self, split: str, ids: np.ndarray, documents: int = 1) -> None:
        """Append complete documents: their ids, (n,), with an end-of-text token after each."""
        self.splits[split].write(ids.astype("<u2", copy=False), documents)

    def save(self) -> dict[str, Split]:
        """Wait until all is on the disk. Returns what `resume` needs to go on from here."""
        return {name: split.save() for name, split in self.splits.items()}

    def resume(self, splits: dict[str, Split]) -> None:
        """Go on from what `save` returned; cut off what was written later.

        Raises DataError if files lack something.
        """
        for name, split in splits.items():
            self.splits[name].resume(split)

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Close the shards, write meta.json, and give the set its name; an older set of that name is replaced."""
        splits = {split: writer.finish() for split, writer in self.splits.items()}
        self._remove_strays({shard.name for split in splits.values() for shard in split.files})
        meta = Meta(name, identity(self.tokenizer), "uint16", splits, source, prepare)
        for file, content in self.tokenizer.files.items():
            write_atomic(self.partial / file, content, durable=True)
        write_atomic(self.partial / "meta.json", json.dumps(asdict(meta), indent=1), durable=True)
        self._finished = True
        refuse_foreign_files(self.folder)  # again: preparing takes hours
        # of the set that is replaced, which is none from here on
        (self.folder / "meta.json").unlink(missing_ok=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.rename(self.partial, self.folder)
        sync_folder(self.folder.parent)
        remove_leftovers(self.folder)
        return meta

    def _remove_strays(self, shards: set[str]) -> None:
        """Remove what earlier processes with other arguments may have left, all but these shards."""
        for path in self.partial.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in shards | {PROGRESS_FILE, "lock"}:
                path.unlink()


class _SplitWriter:
    """The shards of one split, one after another."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self.tokens = self.documents = 0
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._shards: list[Shard] = []  # complete
        self._file: BufferedRandom | None = None  # the next one

    def write(self, ids: np.ndarray, documents: int) -> None:
        self.tokens += len(ids)
        self.documents += documents
        while len(ids):
            self._file = self._file or self._next_path.open("w+b")
            part, ids = np.split(ids, [self._shard_tokens - self._file.tell() // 2])
            self._file.write(part.tobytes())
            if self._file.tell() == 2 * self._shard_tokens:
                self._close_shard()

    def save(self) -> Split:
        self._sync()
        return Split(self.tokens, self.documents, list(self._shards))

    def resume(self, done: Split) -> None:
        """Take the complete shards as they are; cut the next one to the tokens that it had."""
        self.tokens, self.documents, self._shards = done.tokens, done.documents, list(done.files)
        sizes = {self._folder / shard.name: 2 * shard.tokens for shard in self._shards}
        if rest := 2 * self.tokens - sum(sizes.values()):
            sizes[self._next_path] = rest
        for path, size in sizes.items():
            if not path.is_file() or path.stat().st_size < size:
                raise DataError(
                    f"{path}: missing or shorter than {PROGRESS_FILE} says: start over with --force"
                )
        if rest:
            self._file = self._next_path.open("r+b")
            self._file.truncate(rest)
            self._file.seek(rest)

    def finish(self) -> Split:
        self._close_shard()
        return self.save()

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # a full disk
                self._file.close()

    @property
    def _next_path(self) -> Path:
        return self._folder / f"{self._split}-{len(self._shards):05d}.bin"

    def _close_shard(self) -> None:
        if self._file:
            self._sync()
            tokens = self._file.tell() // 2
            self._file.seek(0)
            sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
            self._file.close()
            self._shards.append(Shard(self._next_path.name, tokens, sha256))
            self._file = None

    def _sync(self) -> None:
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill may have left in a complete set: the record and the lock of its preparation."""
    for path in (folder / PROGRESS_FILE, folder / "lock"):
        if path.exists():  # on a read-only file system even unlinking nothing fails
            path.unlink(missing_ok=True)


def refuse_foreign_files(folder: Path) -> None:
    """Raises DataError if `folder`, about to be replaced, holds files that belong to no data set."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if not OURS.fullmatch(name):
            raise DataError(
                f"{folder} holds {name!r}, which does not belong to a data set: move it, or choose another --name"
            )


@dataclass(config=CLOSED)
class Progress:
    """The content of progress.json."""

    made_from: dict  # the arguments that decide what is in the set; other ones do not resume it
    files: Count = 0  # of the inputs that are tokenized completely
    documents: Count = 0  # of the next file
    # written so far; `files` are the complete shards only
    splits: dict[str, Split] = Field(default_factory=dict)
    empty: Count = 0  # documents of white space only
    bad: Count = 0  # documents that could not be read
    links: Count = 0  # in archives, which have no content of their own

    def add(self, encoded: Encoded) -> None:
        self.empty += encoded.empty
        self.bad += encoded.bad
        self.links += encoded.links

    def save(self, folder: Path) -> None:
        """Write the file, after the shards of `splits` are on the disk: a power cut leaves this state or the last."""
        write_atomic(folder / PROGRESS_FILE, json.dumps(asdict(self)), durable=True)


def read_progress(partial: Path) -> Progress | None:
    """What is recorded in `partial`; None if nothing is, or it is damaged."""
    try:
        return TypeAdapter(Progress).validate_python(
            json.loads((partial / PROGRESS_FILE).read_bytes())
        )
    except (OSError, ValueError, RecursionError):
        return None


def find_revision(partial: Path, made_from: dict) -> str | None:
    """The revision of the hub's files that the set in `partial` was begun with; None if it was not."""
    begun = read_progress(partial)
    return (
        begun.made_from.get("revision")
        if begun and made_from.items() <= begun.made_from.items()
        else None
    )


def resume_progress(partial: Path, made_from: dict, force: bool) -> Progress:
    """The progress to go on from: what is recorded in `partial`, else none.

    Raises DataError if it belongs to other arguments or is damaged, and `force`, which starts over,
    is not set.
    """
    was = read_progress(partial)
    if was and was.made_from == made_from:
        return was
    if (partial / PROGRESS_FILE).exists() and not force:
        fault = f"whose {PROGRESS_FILE} cannot be read: "
        if was:
            fault = f"made with other arguments ({describe_changes(was.made_from, made_from)}): resume with those, "
        raise DataError(
            f"{partial} holds an unfinished set {fault}start over with --force, or choose another --name"
        )
    (partial / PROGRESS_FILE).unlink(missing_ok=True)
    return Progress(made_from)


def describe_changes(was: dict, now: dict) -> str:
    """The keys whose values differ, in words; empty if none."""
    changed = [key for key in sorted(was | now) if was.get(key) != now.get(key)]
    return "; ".join(
        CHANGES.get(key, f"{key} {was.get(key)!r}, now {now.get(key)!r}") for key in changed
    )
