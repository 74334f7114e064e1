"""Writing a data set (bins.py has the format): it appears under its name complete or not at all."""

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np

from data import DataError
from data.bins import DTYPE, SHARD_TOKENS, Meta, Shard, Split, partial_folder, read_meta
from data.tokenizer import RANKS_FILE, Tokenizer, identity
from data.units import BEGUN_FILE, UNITS_NAME, has_units, remove_units
from runtime.output import sync_folder, write_atomic

OURS = re.compile(rf"(train|val)-\d{{5,}}\.bin|({BEGUN_FILE}|meta.json|{RANKS_FILE})(\.\d+\.tmp)?|lock|{UNITS_NAME}")
OLD_FILES = {"progress.json", "progress.json.tmp"}  # of the format before units


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
        for path in (self.folder, self.partial):
            refuse_foreign_files(path)
        self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_folder(self.partial)  # held until it is closed, by a kill at the latest
        if _is_set(self.partial):
            self._lock.close()
            raise DataError(f"{self.partial}: another process has just finished this set: start again")
        self._finished = False
        _remove_files(self.partial)  # a kill may have left shards
        self.splits = {split: _SplitWriter(self.partial, split, shard_tokens) for split in ("train", "val")}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for split in self.splits.values():
            split.abandon()
        # A complete set stays, see `recover`; and after `finish` the folder may be another process's new one.
        if not self._finished and self.partial.is_dir() and not (self.partial / "meta.json").exists():
            _remove_files(self.partial)
            if not has_units(self.partial):
                shutil.rmtree(self.partial)
        self._lock.close()

    def write(self, split: str, ids: np.ndarray, documents: int = 1) -> None:
        """Append whole documents: their ids, (n,), with an end-of-text token after each."""
        self.splits[split].write(ids.astype("<u2", copy=False), documents)

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Close the shards, write meta.json, and give the set its name; an older set of that name is replaced."""
        splits = {split: writer.finish() for split, writer in self.splits.items()}
        meta = Meta(name, identity(self.tokenizer), DTYPE, splits, source, prepare)
        for file, content in self.tokenizer.files.items():
            write_atomic(self.partial / file, content, durable=True)
        write_atomic(self.partial / "meta.json", json.dumps(asdict(meta), indent=1), durable=True)
        self._finished = True
        _put_in_place(self.folder)
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


def recover(folder: Path) -> None:
    """Put a complete set in its place if a kill left it beside. Raises DataError if its preparation still runs."""
    partial = partial_folder(folder)
    if _is_set(partial):
        refuse_foreign_files(partial)
        with _lock_folder(partial):
            _put_in_place(folder)
    elif _is_set(folder) and not _foreign_files(folder):
        _remove_leftovers(folder)


def remove_old_format(folder: Path, force: bool) -> None:
    """Remove an unfinished set of the format before units. Raises DataError unless `force` is set."""
    partial = partial_folder(folder)
    if "progress.json" not in (foreign := _foreign_files(partial)) or not set(foreign) <= OLD_FILES:
        return
    if not force:
        raise DataError(
            f"{partial} holds an unfinished set of an older version: remove it with rm -r {shlex.quote(str(partial))}, "
            f"or with --force"
        )
    with _lock_folder(partial):
        shutil.rmtree(partial)


def refuse_foreign_files(folder: Path) -> None:
    """Raises DataError if `folder`, about to be replaced, holds files that belong to no data set."""
    if foreign := _foreign_files(folder):
        raise DataError(
            f"{folder} holds {foreign[0]!r}, which is no part of a data set: move it, or choose another --name"
        )


def _foreign_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if not OURS.fullmatch(name)]


def _is_set(folder: Path) -> bool:
    """Whether `folder` has a meta.json of this format."""
    try:
        read_meta(folder)
    except DataError:
        return False
    return True


def _remove_files(partial: Path) -> None:
    """Remove what a `Writer` writes, meta.json first: without it the rest is not a set."""
    (partial / "meta.json").unlink(missing_ok=True)
    for path in partial.iterdir():
        if path.suffix in (".bin", ".tmp") or path.name == RANKS_FILE:
            path.unlink()


def _put_in_place(folder: Path) -> None:
    refuse_foreign_files(folder)  # again: preparing takes hours
    (folder / "meta.json").unlink(missing_ok=True)  # of the set that is replaced, which is none from here on
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(partial_folder(folder), folder)
    sync_folder(folder.parent)
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    remove_units(folder)
    if (folder / "lock").exists():  # on a read-only file system even unlinking nothing fails
        (folder / "lock").unlink(missing_ok=True)


def _lock_folder(folder: Path) -> IO[str]:
    """An open file that excludes other processes. Raises DataError if one is preparing this set."""
    path = folder / "lock"
    with suppress(FileNotFoundError):  # the other process renamed or removed the folder just now
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError as error:
            file.close()
            raise DataError(f"{folder}: another process is preparing this set: wait for it, or stop it") from error
        file.close()
    raise DataError(f"{folder}: another process has just finished or stopped preparing this set: start again")
