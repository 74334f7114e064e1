"""Writing a data set (bins.py has the format): it appears under its name complete or not at all."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np

from common.files import sync_folder, write_atomic
from data import DataError
from data.bins import DTYPE, SHARD_TOKENS, Meta, Shard, Split, partial_folder
from data.tokenizer import RANKS_FILE, TOKENIZER_FILE, Tokenizer, identity
from data.units import BEGUN_FILE, UNITS_NAME, has_units, remove_units

NAMES = f"{BEGUN_FILE}|meta.json|{RANKS_FILE}|{TOKENIZER_FILE}"
OURS = re.compile(rf"(train|val)-\d{{5,}}\.bin|({NAMES})(\.\d+\.tmp)?|lock|{UNITS_NAME}")


class Writer:
    """Writes a set in <folder>.partial, which takes the place of <folder> at the end.

    with Writer(folder, tokenizer) as writer:
        writer.write("train", ids, documents)  # as often as there is text
        writer.finish(name, source, prepare)

    Left without `finish`, it removes what it wrote; units of a preparation in the folder `partial` stay.

    Raises:
        DataError: ids may not fit uint16, another process writes this set, or a folder holds files of others.
    """

    def __init__(self, folder: str | Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> None:
        if tokenizer.vocab_size > 2**16:
            raise DataError(f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids; uint16 shards hold 65536")
        self.folder, self.partial, self.tokenizer = Path(folder), partial_folder(folder), tokenizer
        self._lock = open_partial(self.folder)  # held until it is closed, by a kill at the latest
        self._finished = False
        _remove_files(self.partial)  # a kill may have left shards
        self.splits = {split: _SplitWriter(self.partial, split, shard_tokens) for split in ("train", "val")}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for split in self.splits.values():
            split.abandon()
        if not self._finished:  # after `finish` the folder may be another process's new one
            _remove_files(self.partial)
            if not has_units(self.partial):
                shutil.rmtree(self.partial)
        self._lock.close()

    def write(self, split: str, ids: np.ndarray, documents: int = 1) -> None:
        """Append complete documents: their ids, (n,), with an end-of-text token after each."""
        self.splits[split].write(ids.astype("<u2", copy=False), documents)

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Close the shards, write meta.json, and give the set its name; an older set of that name is replaced."""
        splits = {split: writer.finish() for split, writer in self.splits.items()}
        meta = Meta(name, identity(self.tokenizer), DTYPE, splits, source, prepare)
        for file, content in self.tokenizer.files.items():
            write_atomic(self.partial / file, content, durable=True)
        write_atomic(self.partial / "meta.json", json.dumps(asdict(meta), indent=1), durable=True)
        self._finished = True
        refuse_foreign_files(self.folder)  # again: preparing takes hours
        (self.folder / "meta.json").unlink(missing_ok=True)  # of the set that is replaced, which is none from here on
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
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._shards: list[Shard] = []
        self._file: IO[bytes] | None = None
        self._sha256 = hashlib.sha256()
        self._filled = 0  # tokens in the open shard

    def write(self, ids: np.ndarray, documents: int) -> None:
        self.tokens += len(ids)
        self.documents += documents
        while len(ids):
            if self._file is None:
                path = self._folder / f"{self._split}-{len(self._shards):05d}.bin"
                self._file, self._sha256, self._filled = path.open("wb"), hashlib.sha256(), 0
            part, ids = np.split(ids, [self._shard_tokens - self._filled])
            data = part.tobytes()
            self._file.write(data)
            self._sha256.update(data)
            self._filled += len(part)
            if self._filled == self._shard_tokens:
                self._close_shard()

    def finish(self) -> Split:
        self._close_shard()
        return Split(self.tokens, self.documents, self._shards)

    def abandon(self) -> None:
        if self._file:
            with suppress(OSError):  # a full disk
                self._file.close()

    def _close_shard(self) -> None:
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._shards.append(Shard(Path(self._file.name).name, self._filled, self._sha256.hexdigest()))
            self._file = None


def open_partial(folder: Path, shared: bool = False) -> IO[str]:
    """Make the folder in which the set `folder` is written before it is complete, and lock it.

    Args:
        folder: of the set.
        shared: admit other processes that open it so, to write units; without, the caller is alone.

    Returns:
        The lock: an open file, which excludes other processes until it is closed.

    Raises:
        DataError: another process writes this set, or a file or files of others are in the way.
    """
    partial = partial_folder(folder)
    for path in (partial, folder, *folder.parents):
        if path.is_file():
            raise DataError(f"{path} is a file where a folder is needed: move it, or choose another --out or --name")
    for path in (folder, partial):
        refuse_foreign_files(path)
    partial.mkdir(parents=True, exist_ok=True)
    path, kind = partial / "lock", fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with suppress(FileNotFoundError):  # the other process renamed or removed the folder just now
        file = path.open("a+")  # on NFS a shared lock needs a file open for reading
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError as error:
            file.close()
            raise DataError(f"{partial}: another process is preparing this set: wait for it, or stop it") from error
        file.close()
    raise DataError(f"{partial}: another process has just finished or stopped preparing this set: start again")


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill may have left in a complete set: the units and the lock of its preparation."""
    remove_units(folder)
    if (folder / "lock").exists():  # on a read-only file system even unlinking nothing fails
        (folder / "lock").unlink(missing_ok=True)


def refuse_foreign_files(folder: Path) -> None:
    """Raises DataError if `folder`, about to be replaced, holds files that belong to no data set."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if not OURS.fullmatch(name):
            raise DataError(
                f"{folder} holds {name!r}, which does not belong to a data set: move it, or choose another --name"
            )


def _remove_files(partial: Path) -> None:
    """Remove what a `Writer` writes, meta.json first: without it the rest is not a set."""
    (partial / "meta.json").unlink(missing_ok=True)
    for path in partial.iterdir():
        if path.suffix in (".bin", ".tmp") or path.name in (RANKS_FILE, TOKENIZER_FILE):
            path.unlink()
