"""A data set on disk: raw token shards, and `meta.json`, which is written last and makes the set whole.

data/<name>/train-00000.bin train-00001.bin … val-00000.bin: little-endian uint16 ids, nothing else
data/<name>/meta.json: what they are, see Meta
data/<name>/gpt2.tiktoken: what the tokenizer, if it is gpt2, needs to decode them
"""

import hashlib
import json
import os
import re
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data import DataError
from data.sources import SOURCES
from data.tokenizer import RANKS_FILE, Tokenizer, load_tokenizer

DATA_DIR = Path(__file__).parent  # where prepared sets go unless told otherwise
DTYPE = "uint16"
SHARD_TOKENS = 100_000_000  # 200 MB
HASHED_BYTES = 2**30  # sets up to 1 GiB are hashed at each check
SHARD_NAME = re.compile(r"(train|val)-\d{5,}\.bin(\.tmp)?")


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    tokens: int
    documents: int
    files: list[Shard]


@dataclass(frozen=True)
class Meta:
    name: str
    tokenizer: dict  # name, hash, vocab_size, eot
    dtype: str
    splits: dict[str, Split]  # train, val
    source: dict  # the arguments that decide what is in the set
    prepare: str  # the command line that made it


class Tokens:
    """Shards of uint16 ids as one logical array. Nothing is loaded before it is read."""

    def __init__(self, shards: Sequence[np.ndarray], name: str = "these tokens"):
        self.name = name
        self._shards = shards
        self._starts = [0, *accumulate(map(len, shards))]  # of each shard, and the end

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), shape (count,): a view where they lie in one shard, else a copy."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens [{start}, {start + count}) of {len(self)}")
        parts = []
        shard = bisect_right(self._starts, start) - 1
        while count > 0:
            part = self._shards[shard][start - self._starts[shard] :][:count]
            parts.append(part)
            shard, start, count = shard + 1, start + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])


def read_meta(folder: str | Path) -> Meta:
    """What `folder` holds. Raises DataError where it is missing, half-prepared or not of this format."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such data set. Prepare it: {_prepare_command(folder)}")
    path = folder / "meta.json"
    if not path.is_file():
        raise DataError(f"{folder}: half-prepared, it has no meta.json. Prepare it again: {_prepare_command(folder)}")
    try:
        raw = json.loads(path.read_bytes())
        raw["splits"] = {
            name: Split(**split | {"files": [Shard(**file) for file in split["files"]]})
            for name, split in raw["splits"].items()
        }
        meta = Meta(**raw)
        sizes = [meta.splits[name].tokens for name in ("train", "val")] + [meta.tokenizer["vocab_size"]]
        sizes += [file.tokens for split in meta.splits.values() for file in split.files]
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError("a size is not a whole number")
        return meta
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}: {error}). Prepare the set again: "
            f"{_prepare_command(folder)} --force"
        ) from error


def open_tokens(folder: str | Path, split: str) -> Tokens:
    """The tokens of `split` ("train" or "val"), memory-mapped. Run `check` first."""
    files = read_meta(folder).splits[split].files
    shards = [np.asarray(np.memmap(Path(folder, file.name), "<u2", "r")) for file in files]
    return Tokens(shards, f"the {split} split of {folder}")


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that made this set, from the set's own files: no network is needed."""
    ranks = Path(folder, RANKS_FILE)
    return load_tokenizer(read_meta(folder).tokenizer["name"], ranks if ranks.is_file() else None)


def check(folder: str | Path, vocab_size: int) -> Meta:
    """Whether training may trust this set: every shard there, of the length and (up to 1 GiB in all) the sha256 that
    meta.json states; above 1 GiB lengths only. `vocab_size` is the model's.

    Raises DataError naming the file, what was expected, what was found and the command that mends it.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    remedy = f"Prepare it again: {meta.prepare} --force"
    if meta.dtype != DTYPE:
        raise DataError(f"{folder}/meta.json: dtype {meta.dtype!r}, expected {DTYPE!r}. {remedy}")
    if meta.tokenizer["vocab_size"] > vocab_size:
        name, needed = meta.tokenizer["name"], meta.tokenizer["vocab_size"]
        raise DataError(
            f"{folder}: tokenizer {name!r} has {needed} ids, the model's vocab_size is {vocab_size}. "
            f"Set model.vocab_size to at least {needed}, or prepare the set with another --tokenizer"
        )
    shards = [shard for split in meta.splits.values() for shard in split.files]
    hashed = sum(2 * shard.tokens for shard in shards) <= HASHED_BYTES
    for shard in shards:
        path = folder / shard.name
        if not path.is_file():
            raise DataError(f"{path}: missing, expected {shard.tokens} tokens. {remedy}")
        size = path.stat().st_size
        if size != 2 * shard.tokens:
            expected = f"{2 * shard.tokens} bytes ({shard.tokens} tokens)"
            raise DataError(f"{path}: expected {expected}, found {size}. {remedy}")
        if hashed:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise DataError(f"{path}: expected sha256 {shard.sha256}, found {found}. {remedy}")
    return meta


def _prepare_command(folder: Path) -> str:
    """The command that makes `folder`, as far as its name tells."""
    command = ["python", "-m", "data.prepare"]
    if folder.name in SOURCES and not SOURCES[folder.name].takes_paths:
        command += [folder.name]
    else:
        command += ["text", "--source", "FILES", "--name", folder.name]
    if folder.parent.resolve() != DATA_DIR.resolve():
        command += ["--out", str(folder.parent)]
    return shlex.join(command)


class Writer:
    """Writes one set: documents go to shards, each synced to disk before it takes its name; meta.json comes last.

    with Writer(folder, tokenizer) as writer:
        writer.add("train", ids)  # as often as there are documents
        writer.finish(name, source, prepare)

    Whatever an earlier preparation left in `folder` is removed first. Raises DataError if ids may not fit uint16.
    """

    def __init__(self, folder: str | Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS):
        if tokenizer.vocab_size > 2**16:
            raise DataError(f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids; uint16 shards hold 65536")
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "meta.json").unlink(missing_ok=True)
        _sync_folder(self._folder)
        for path in self._folder.iterdir():
            if SHARD_NAME.fullmatch(path.name):
                path.unlink()
        self._tokenizer = tokenizer
        self._splits = {name: _SplitWriter(self._folder, name, shard_tokens) for name in ("train", "val")}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        for split in self._splits.values():
            split.abandon()

    def add(self, split: str, ids: np.ndarray) -> None:
        """One document: its ids, shape (n,), without the end-of-text that is written after them."""
        self._splits[split].write(np.append(ids, self._tokenizer.eot).astype("<u2"))

    def tokens(self, split: str) -> int:
        """Tokens added so far."""
        return self._splits[split].tokens

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Closes the shards and makes the set whole by writing meta.json."""
        splits = {split: writer.finish() for split, writer in self._splits.items()}
        for file_name, data in self._tokenizer.files.items():
            _write_file(self._folder / file_name, data)
        tokenizer = {key: getattr(self._tokenizer, key) for key in ("name", "hash", "vocab_size", "eot")}
        meta = Meta(name, tokenizer, DTYPE, splits, source, prepare)
        _write_file(self._folder / "meta.json", json.dumps(asdict(meta), indent=2).encode() + b"\n")
        return meta


class _SplitWriter:
    """The shards of one split, one after another."""

    def __init__(self, folder: Path, split: str, shard_tokens: int):
        self.tokens = 0
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._documents = 0
        self._shards: list[Shard] = []
        self._open: _ShardWriter | None = None

    def write(self, ids: np.ndarray) -> None:
        self.tokens += len(ids)
        self._documents += 1
        while len(ids):
            if self._open is None:
                self._open = _ShardWriter(self._folder / f"{self._split}-{len(self._shards):05d}.bin")
            room = self._shard_tokens - self._open.tokens
            self._open.write(ids[:room])
            ids = ids[room:]
            if self._open.tokens == self._shard_tokens:
                self._close()

    def finish(self) -> Split:
        if self._open is not None:
            self._close()
        return Split(self.tokens, self._documents, self._shards)

    def abandon(self) -> None:
        if self._open is not None:
            self._open.file.close()

    def _close(self) -> None:
        self._shards.append(self._open.finish())
        self._open = None


class _ShardWriter:
    """One shard under its temporary name."""

    def __init__(self, path: Path):
        self.tokens = 0
        self.file = open(f"{path}.tmp", "wb")  # noqa: SIM115 (closed by finish, or by abandon of the split)
        self._path = path
        self._sha256 = hashlib.sha256()

    def write(self, ids: np.ndarray) -> None:
        data = ids.tobytes()
        self.file.write(data)
        self._sha256.update(data)
        self.tokens += len(ids)

    def finish(self) -> Shard:
        _publish(self.file, self._path)
        return Shard(self._path.name, self.tokens, self._sha256.hexdigest())


def _write_file(path: Path, data: bytes) -> None:
    with open(f"{path}.tmp", "wb") as file:
        file.write(data)
        _publish(file, path)


def _publish(file: BinaryIO, path: Path) -> None:
    """Give a written temporary file its name, once its bytes are safely on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
