"""Writing a data set (bins.py tells what it looks like) so that a kill costs little and breaks nothing."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic's need below Python 3.12

from data import DataError
from data.bins import CLOSED, DTYPE, SHARD_TOKENS, Count, Meta, Shard, Split, partial_folder
from data.tokenizer import RANKS_FILE, Tokenizer, identity

REPLACED = "replaced"  # the set that was there before, within the one that takes its place
OURS = re.compile(rf"(train|val)-\d{{5,}}\.bin|(meta|progress)\.json(\.tmp)?|lock|{REPLACED}|{RANKS_FILE}(\.tmp)?")


@with_config(CLOSED)
class Committed(TypedDict):
    documents: Count
    shards: list[Shard]
    open_tokens: Count  # in the shard after those


@with_config(CLOSED)
class Progress(TypedDict):
    """What progress.json says of an unfinished preparation."""

    made_from: dict
    splits: dict[Literal["train", "val"], Committed]
    state: Any


class Writer:
    """Writes one set in <folder>.partial, which takes the place of <folder> when it is whole.

    with Writer(folder, tokenizer, made_from=what) as writer:
        writer.state  # as committed last by an earlier Writer that did not finish; None if there was none
        writer.write("train", ids, documents)  # as often as there is text
        writer.commit(state)  # all that is written is safe on disk now, and with it `state`, anything JSON can hold
        writer.finish(name, source, prepare)

    What comes after the last commit is cut off again: where the block is left early, or at the next start. Raises
    DataError if ids may not fit uint16, if another process is at work here, or if the unfinished set here was made from
    something else; with `force` that one is removed.
    """

    def __init__(
        self,
        folder: str | Path,
        tokenizer: Tokenizer,
        shard_tokens: int = SHARD_TOKENS,
        made_from: dict | None = None,
        force: bool = False,
    ):
        if tokenizer.vocab_size > 2**16:
            raise DataError(f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids; uint16 shards hold 65536")
        self._folder, self._partial = Path(folder), partial_folder(folder)
        self._tokenizer, self._made_from = tokenizer, made_from or {}
        for path in (self._folder, self._partial):
            refuse_foreign(path)
        self._partial.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self._partial)
        try:
            if force and self._unfinished_faults():
                self.discard()
            if faults := self._unfinished_faults():
                raise DataError(f"{self._partial}: {faults}: start over by --force, or choose another --name")
            progress = read_progress(self._folder)
            self.state = progress["state"] if progress else None
            committed = self._cut_back()
            self._splits = {
                split: _SplitWriter(self._partial, split, shard_tokens, **committed.get(split, {}))
                for split in ("train", "val")
            }
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        for split in self._splits.values():
            split.abandon()
        if self._partial.exists() and not self._cut_back():  # not finished, nothing to go on with
            shutil.rmtree(self._partial)
        os.close(self._lock)

    def write(self, split: str, ids: np.ndarray, documents: int = 1) -> bool:
        """Appends whole documents: their ids, shape (n,), with an end-of-text after each. Returns whether that filled
        a shard."""
        return self._splits[split].write(ids.astype("<u2", copy=False), documents)

    def tokens(self, split: str) -> int:
        """Tokens written so far."""
        return self._splits[split].tokens

    def documents(self, split: str) -> int:
        return self._splits[split].documents

    def commit(self, state: object) -> None:
        splits = {name: split.commit() for name, split in self._splits.items()}
        progress = {"made_from": self._made_from, "splits": splits, "state": state}
        _write_file(self._partial / "progress.json", json.dumps(progress).encode())
        self.state = state

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Closes the shards, writes meta.json, and gives the set its name; a set that has it already is replaced."""
        splits = {split: writer.finish() for split, writer in self._splits.items()}
        meta = Meta(name, identity(self._tokenizer), DTYPE, splits, source, prepare)
        publish(self._folder, meta, self._tokenizer)
        return meta

    def discard(self) -> None:
        """Gives up what is written, committed or not."""
        (self._partial / "progress.json").unlink(missing_ok=True)

    def _unfinished_faults(self) -> str:
        """Why the unfinished set here, if there is one, cannot be gone on with; empty if it can."""
        try:
            progress = read_progress(self._folder)
        except DataError:
            return "progress.json cannot be read"
        if changes := differences(progress["made_from"], self._made_from) if progress else "":
            return f"an unfinished set made with other arguments ({changes}); go on with those"
        for name, size in _committed_sizes(progress).items():
            path = self._partial / name
            if not path.is_file() or path.stat().st_size < size:
                return f"part of {name} is lost"
        return ""

    def _cut_back(self) -> dict[str, Committed]:
        """Leaves in the folder what is committed, nothing else, and returns it by split."""
        progress = read_progress(self._folder)
        sizes = _committed_sizes(progress)
        for path in self._partial.iterdir():
            if path.name not in (*sizes, "progress.json", "lock"):
                path.unlink()
        for name, size in sizes.items():
            os.truncate(self._partial / name, size)
        return progress["splits"] if progress else {}


class _SplitWriter:
    """The shards of one split, one after another; those in `shards` and `open_tokens` of the next are there already."""

    def __init__(
        self,
        folder: Path,
        split: str,
        shard_tokens: int,
        documents: int = 0,
        shards: Sequence = (),
        open_tokens: int = 0,
    ):
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self.documents = documents
        self._shards = list(shards)
        self._open = self._next(open_tokens) if open_tokens else None
        self.tokens = sum(shard.tokens for shard in self._shards) + open_tokens

    def write(self, ids: np.ndarray, documents: int) -> bool:
        self.tokens += len(ids)
        self.documents += documents
        before = len(self._shards)
        while len(ids):
            self._open = self._open or self._next()
            room = self._shard_tokens - self._open.tokens
            self._open.write(ids[:room])
            ids = ids[room:]
            if self._open.tokens == self._shard_tokens:
                self._close()
        return len(self._shards) > before

    def commit(self) -> dict:
        if self._open:
            self._open.sync()
        open_tokens = self._open.tokens if self._open else 0
        return {"documents": self.documents, "shards": list(map(asdict, self._shards)), "open_tokens": open_tokens}

    def finish(self) -> Split:
        if self._open:
            self._close()
        return Split(self.tokens, self.documents, self._shards)

    def abandon(self) -> None:
        if self._open:
            with suppress(OSError):  # a full disk
                self._open.file.close()

    def _next(self, tokens: int = 0) -> "_ShardWriter":
        return _ShardWriter(self._folder / _shard_name(self._split, len(self._shards)), tokens)

    def _close(self) -> None:
        self._open.sync()
        self._open.file.close()
        self._shards.append(self._open.shard())
        self._open = None


class _ShardWriter:
    """One shard, of which the first `tokens` are there already."""

    def __init__(self, path: Path, tokens: int):
        self.tokens = tokens
        self.file = open(path, "r+b" if tokens else "xb")  # noqa: SIM115 (closed by the split)
        self._sha256 = hashlib.file_digest(self.file, "sha256") if tokens else hashlib.sha256()  # leaves it at the end

    def write(self, ids: np.ndarray) -> None:
        data = ids.tobytes()
        self.file.write(data)
        self._sha256.update(data)
        self.tokens += len(ids)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def shard(self) -> Shard:
        return Shard(Path(self.file.name).name, self.tokens, self._sha256.hexdigest())


def read_progress(folder: str | Path) -> Progress | None:
    """What the last commit of an unfinished preparation of `folder` says; None if there is none. Raises DataError if it
    is damaged."""
    path = partial_folder(folder) / "progress.json"
    try:
        progress = TypeAdapter(Progress).validate_python(json.loads(path.read_bytes()))
        for split, state in progress["splits"].items():
            for i, shard in enumerate(state["shards"]):  # these are cut to length: no other file may be
                if shard.name != _shard_name(split, i):
                    raise ValueError(f"{split} file {i} is {shard.name!r}")
        return progress
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}): start over by --force") from error


def differences(was: dict, now: dict) -> str:
    """The keys whose values differ, in words; empty if none."""
    changed = [key for key in sorted(was | now) if was.get(key) != now.get(key)]
    return "; ".join(f"{key} {was.get(key)!r}, now {now.get(key)!r}" for key in changed)


def publish(folder: Path, meta: Meta, tokenizer: Tokenizer) -> None:
    """Makes the unfinished set of `folder`, its shards complete, the set in `folder`."""
    partial = partial_folder(folder)
    for name, content in tokenizer.files.items():
        _write_file(partial / name, content)
    _write_file(partial / "meta.json", json.dumps(asdict(meta), indent=1).encode())
    _put_in_place(folder)


def recover(folder: Path) -> None:
    """Puts a whole set into its place, wherever its preparation was killed in doing so."""
    if (partial_folder(folder) / "meta.json").is_file():
        os.close(lock(partial_folder(folder)))  # none is at it still
        _put_in_place(folder)
    _tidy(folder)


def _put_in_place(folder: Path) -> None:
    partial = partial_folder(folder)
    if folder.exists():
        os.rename(folder, partial / REPLACED)  # so that it goes where it cannot be taken for the set
    os.rename(partial, folder)
    _sync_folder(folder.parent)
    _tidy(folder)


def _tidy(folder: Path) -> None:
    for name in ("progress.json", "lock"):
        (folder / name).unlink(missing_ok=True)
    if (folder / REPLACED).is_dir():
        shutil.rmtree(folder / REPLACED)


def refuse_foreign(folder: Path) -> None:
    """Raises DataError if `folder` holds files that are no data set's: it is about to be replaced."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not OURS.fullmatch(name)]
    if foreign:
        raise DataError(
            f"{folder} holds {foreign[0]!r}, which is no part of a data set: move it, or choose another --name"
        )


def _committed_sizes(progress: Progress | None) -> dict[str, int]:
    """Bytes of each shard that a commit covers."""
    sizes = {}
    for split, state in progress["splits"].items() if progress else ():
        sizes |= {shard.name: 2 * shard.tokens for shard in state["shards"]}
        if state["open_tokens"]:
            sizes[_shard_name(split, len(state["shards"]))] = 2 * state["open_tokens"]
    return sizes


def _shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def lock(folder: Path) -> int:
    """A descriptor that keeps other processes out until it is closed, be it by a kill."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise DataError(f"{folder}: another process is preparing this set: wait for it, or stop it") from error
    return descriptor


def _write_file(path: Path, data: bytes) -> None:
    """The whole file or none of it, safe on disk."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
