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
from data.bins import (
    CLOSED,
    SHARD_TOKENS,
    Count,
    Meta,
    Shard,
    Split,
    is_large,
    list_shards,
    partial_folder,
)
from data.checked import CHECKED_FILE, INPUTS_FILE, describe_shards, write_record
from data.encode import Encoded
from data.tokenizer import RANKS_FILE, TOKENIZER_FILE, Tokenizer, identity

PROGRESS_FILE = "progress.json"  # its folder is data/<name>.partial/, next to the shards
LOCK_FILE = "lock"
SHARD_NAME = re.compile(r"(train|val)-\d{5,}\.bin")
TEMPORARY_END = re.compile(r"\.\d+\.tmp$")  # end of a name that `write_atomic` uses
OTHER_NAMES = {PROGRESS_FILE, LOCK_FILE, "meta.json", CHECKED_FILE, INPUTS_FILE}
OTHER_NAMES |= {RANKS_FILE, TOKENIZER_FILE}


class Writer(AbstractContextManager["Writer"]):
    """Writes a set in <folder>.partial, which replaces <folder> at the end.

    with Writer(folder, tokenizer) as writer:
        writer.write("train", ids, documents)  # once or more
        writer.finish(name, source, prepare)

    Without `finish`, the partial folder is removed at the end, unless it has a record of progress.

    Raises:
        DataError: ids do not fit uint16, another process writes this set, or a folder contains
            files that do not belong to a set.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        if tokenizer.vocab_size > 2**16:
            raise DataError(
                f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids; "
                f"uint16 shards hold 65536"
            )
        self.folder = folder
        self.partial = partial_folder(folder)
        self.tokenizer = tokenizer
        refuse_foreign_files(self.folder)
        refuse_foreign_files(self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)
        # The lock is held until the file is closed, at the latest when the process ends.
        self._lock = (self.partial / LOCK_FILE).open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise DataError(
                f"{self.partial}: another process is preparing this set: wait for it"
            ) from error
        self._finished = False
        # A kill between writing meta.json and the renaming leaves meta.json here.
        (self.partial / "meta.json").unlink(missing_ok=True)
        self.splits = {
            "train": _SplitWriter(self.partial, "train", shard_tokens),
            "val": _SplitWriter(self.partial, "val", shard_tokens),
        }

    def __exit__(self, *_: object) -> None:
        for split in self.splits.values():
            split.close()
        if not self._finished and not (self.partial / PROGRESS_FILE).exists():
            shutil.rmtree(self.partial)  # not after `finish`: another process may have made it
        self._lock.close()

    def write(self, split: str, ids: np.ndarray, documents: int = 1) -> None:
        """Append complete documents: ids (n,), with an end-of-text token after each document."""
        self.splits[split].write(ids.astype("<u2", copy=False), documents)

    def save(self) -> dict[str, Split]:
        """Wait until everything is on the disk. Returns what `resume` needs."""
        return {name: split.save() for name, split in self.splits.items()}

    def resume(self, splits: dict[str, Split]) -> None:
        """Continue from what `save` returned; whatever was written later is cut off.

        Raises DataError if a shard is missing or too short.
        """
        for name, split in splits.items():
            self.splits[name].resume(split)

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Close the shards, write meta.json, and rename the folder; an older set is replaced."""
        splits = {split: writer.finish() for split, writer in self.splits.items()}
        self._remove_strays(splits)
        meta = Meta(name, identity(self.tokenizer), "uint16", splits, source, prepare)
        for file, content in self.tokenizer.files.items():
            write_atomic(self.partial / file, content, durable=True)
        shards = list_shards(meta)
        if is_large(shards):
            hashes = {shard.name: shard.sha256 for shard in shards}
            write_record(self.partial, describe_shards(self.partial, hashes))
        write_atomic(self.partial / "meta.json", json.dumps(asdict(meta), indent=1), durable=True)
        self._finished = True
        refuse_foreign_files(self.folder)  # a second time: preparing can last hours
        (self.folder / "meta.json").unlink(missing_ok=True)  # the old set is incomplete from here
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.rename(self.partial, self.folder)
        sync_folder(self.folder.parent)
        remove_leftovers(self.folder)
        return meta

    def _remove_strays(self, splits: dict[str, Split]) -> None:
        """Remove files of an earlier preparation with other arguments."""
        keep = {PROGRESS_FILE, LOCK_FILE, INPUTS_FILE}
        for split in splits.values():
            keep.update(shard.name for shard in split.files)
        for path in self.partial.iterdir():
            if path.name not in keep:
                path.unlink()


class _SplitWriter:
    """The shards of one split, one after another."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self.tokens = self.documents = 0
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []  # complete shards
        self._file: BufferedRandom | None = None  # the next shard

    def write(self, ids: np.ndarray, documents: int) -> None:
        self.tokens += len(ids)
        self.documents += documents
        while len(ids):
            if self._file is None:
                self._file = self._next_path.open("w+b")
            room = self._shard_tokens - self._file.tell() // 2  # tokens
            self._file.write(ids[:room].tobytes())
            ids = ids[room:]
            if self._file.tell() == 2 * self._shard_tokens:
                self._close_shard()

    def save(self) -> Split:
        self._sync()
        return Split(self.tokens, self.documents, list(self._shards))

    def resume(self, done: Split) -> None:
        """Keep the complete shards; cut the next one to the tokens that it had."""
        self.tokens = done.tokens
        self.documents = done.documents
        self._shards = list(done.files)
        sizes = {self._folder / shard.name: 2 * shard.tokens for shard in self._shards}
        next_size = 2 * self.tokens - sum(sizes.values())  # bytes
        if next_size:
            sizes[self._next_path] = next_size
        for path, size in sizes.items():
            if not path.is_file() or path.stat().st_size < size:
                raise DataError(
                    f"{path}: missing or shorter than {PROGRESS_FILE} says: start over with --force"
                )
        if next_size:
            self._file = self._next_path.open("r+b")
            self._file.truncate(next_size)
            self._file.seek(next_size)

    def finish(self) -> Split:
        self._close_shard()
        return self.save()

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # closing writes, which fails on a full disk
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
    """Remove the record of progress and the lock from a complete set."""
    for path in (folder / PROGRESS_FILE, folder / LOCK_FILE):
        if path.exists():  # a read-only file system refuses to unlink even a missing file
            path.unlink(missing_ok=True)


def refuse_foreign_files(folder: Path) -> None:
    """Raise DataError if `folder`, which will be replaced, contains files of no data set."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        name = TEMPORARY_END.sub("", path.name)
        if name not in OTHER_NAMES and not SHARD_NAME.fullmatch(name):
            raise DataError(
                f"{folder} holds {path.name!r}, which does not belong to a data set: move it, "
                f"or choose another --name"
            )


@dataclass(config=CLOSED)
class Progress:
    """The content of progress.json."""

    made_from: dict  # the set's provenance: only the same arguments and inputs resume it
    files: Count = 0  # inputs that are tokenized completely
    documents: Count = 0  # documents of the next input that are tokenized
    splits: dict[str, Split] = Field(default_factory=dict)  # `files` lists complete shards only
    empty: Count = 0  # documents of white space only
    bad: Count = 0  # documents that could not be read
    links: Count = 0  # links in archives, which have no content
    # marks between documents in text files that are one document each
    separators: dict[str, Count] = Field(default_factory=dict)
    left: dict[str, Count] = Field(default_factory=dict)  # members of archives, by ending

    def add(self, encoded: Encoded) -> None:
        self.empty += encoded.empty
        self.bad += encoded.bad
        self.links += encoded.links
        for mark, count in encoded.separators.items():
            self.separators[mark] = self.separators.get(mark, 0) + count
        for ending, count in encoded.left.items():
            self.left[ending] = self.left.get(ending, 0) + count

    def count_left_out(self) -> dict[str, int]:
        """Numbers of documents that are not in the set, as meta.json has them."""
        return {"empty": self.empty, "bad": self.bad, "links": self.links}

    def save(self, folder: Path) -> None:
        """Write the file. The shards of `splits` must be on the disk."""
        write_atomic(folder / PROGRESS_FILE, json.dumps(asdict(self)), durable=True)


def read_progress(partial: Path) -> Progress | None:
    """The record of progress in `partial`; None if there is none or it is damaged."""
    try:
        content = json.loads((partial / PROGRESS_FILE).read_bytes())
        return TypeAdapter(Progress).validate_python(content)
    except (OSError, ValueError, RecursionError):
        return None


def find_revision(partial: Path, provenance: dict) -> str | None:
    """The hub's revision that the unfinished set in `partial` is made from; None if there is none.

    A set with another `provenance` does not count.
    """
    progress = read_progress(partial)
    if progress is None or not provenance.items() <= progress.made_from.items():
        return None
    return progress.made_from.get("revision")


def resume_progress(partial: Path, provenance: dict, force: bool) -> Progress:
    """The progress recorded in `partial`, or a new one.

    Raises DataError if the record has another provenance or is damaged; `force` starts over.
    """
    progress = read_progress(partial)
    if progress:  # an older record lacks it
        progress.made_from.setdefault("tokenizer_files", provenance.get("tokenizer_files"))
    if progress and progress.made_from == provenance:
        return progress
    if (partial / PROGRESS_FILE).exists() and not force:
        remedy = "start over with --force, or choose another --name"
        if progress is None:
            raise DataError(
                f"{partial} holds an unfinished set whose {PROGRESS_FILE} cannot be read: {remedy}"
            )
        changes = describe_changes(progress.made_from, provenance)
        raise DataError(
            f"{partial} holds an unfinished set made with other arguments ({changes}): "
            f"resume with those, {remedy}"
        )
    (partial / PROGRESS_FILE).unlink(missing_ok=True)
    return Progress(provenance)


def describe_changes(before: dict, now: dict) -> str:
    """Describe the keys whose values differ; empty if none does."""
    texts = []
    for key in sorted(before | now):
        if before.get(key) == now.get(key):
            continue
        if key == "inputs":
            texts.append("the input files differ")
        elif key == "val_inputs":
            texts.append("the files of --val-source differ")
        elif key == "tokenizer_files":
            texts.append("the files of --tokenizer differ")
        else:
            texts.append(f"{key} {before.get(key)!r}, now {now.get(key)!r}")
    return "; ".join(texts)
