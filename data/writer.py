"""Writing a data set (bins.py has the format): it appears under its name complete or not at all."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np

from common.files import sync_folder, write_atomic
from data import DataError
from data.bins import SHARD_TOKENS, Meta, Shard, Split, list_shards, partial_folder
from data.tokenizer import RANKS_FILE, TOKENIZER_FILE, Tokenizer, identity

PROGRESS_FILE = "progress.json"  # its folder is data/<name>.partial/, next to the shards
LOCK_FILE = "lock"
OWN_FILES = re.compile(  # all that a set or an unfinished set may hold
    r"((train|val)-\d{5,}\.bin|progress\.json|lock|meta\.json|checked\.json|inputs\.json"
    rf"|{re.escape(RANKS_FILE)}|{re.escape(TOKENIZER_FILE)})(\.\d+\.tmp)?"
)


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
            split: _SplitWriter(self.partial, split, shard_tokens) for split in ("train", "val")
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

    def save(self) -> dict[str, tuple[int, int]]:
        """Wait until everything is on the disk. Returns what `resume` needs."""
        for split in self.splits.values():
            split.sync()
        return {name: (split.tokens, split.documents) for name, split in self.splits.items()}

    def resume(self, saved: dict[str, tuple[int, int]]) -> None:
        """Continue from what `save` returned; whatever was written later is cut off.

        Raises DataError if a shard is missing or too short.
        """
        for name, split in self.splits.items():
            split.resume(*saved.get(name, (0, 0)))

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Write meta.json, and rename the folder; an older set is replaced."""
        self.save()
        splits = {split: writer.describe() for split, writer in self.splits.items()}
        meta = Meta(name, identity(self.tokenizer), "uint16", splits, source, prepare)
        shards = list_shards(meta)
        keep = {PROGRESS_FILE, LOCK_FILE, *(shard.name for shard in shards)}
        for path in self.partial.iterdir():
            if path.name not in keep:
                path.unlink()  # of an earlier preparation with other arguments
        for file, content in self.tokenizer.files.items():
            write_atomic(self.partial / file, content, durable=True)
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


class _SplitWriter:
    """The shards of one split, one after another."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self.tokens = self.documents = 0
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._file: IO[bytes] | None = None  # the last shard

    def write(self, ids: np.ndarray, documents: int) -> None:
        self.documents += documents
        while len(ids):
            number, start = divmod(self.tokens, self._shard_tokens)
            if self._file is None or start == 0:
                self.sync()
                self.close()
                self._file = self._path(number).open("ab" if start else "wb")
            part = ids[: self._shard_tokens - start]
            self._file.write(part.tobytes())
            self.tokens += len(part)
            ids = ids[len(part) :]

    def resume(self, tokens: int, documents: int) -> None:
        """Cut the shards to `tokens` in all."""
        self.tokens = tokens
        self.documents = documents
        sizes = self._sizes()
        for path, size in sizes.items():
            if not path.is_file() or path.stat().st_size < 2 * size:
                raise DataError(
                    f"{path}: missing or shorter than {PROGRESS_FILE} says: start over with --force"
                )
            os.truncate(path, 2 * size)
        for path in set(self._folder.glob(f"{self._split}-*.bin")) - sizes.keys():
            path.unlink()

    def describe(self) -> Split:
        """The split as meta.json has it."""

        def describe_shard(path: Path, tokens: int) -> Shard:
            with path.open("rb") as file:
                return Shard(path.name, tokens, hashlib.file_digest(file, "sha256").hexdigest())

        sizes = self._sizes()
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
            shards = list(pool.map(describe_shard, sizes.keys(), sizes.values()))
        return Split(self.tokens, self.documents, shards)

    def sync(self) -> None:
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # closing writes, which fails on a full disk
                self._file.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._split}-{number:05d}.bin"

    def _sizes(self) -> dict[Path, int]:
        """The tokens of each shard by its path."""
        starts = range(0, self.tokens, self._shard_tokens)
        return {
            self._path(number): min(self._shard_tokens, self.tokens - start)
            for number, start in enumerate(starts)
        }


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
        if not OWN_FILES.fullmatch(path.name):
            raise DataError(
                f"{folder} holds {path.name!r}, which does not belong to a data set: move it, "
                f"or choose another --name"
            )
