"""A data set on disk: raw token shards, and `meta.json`, which is written last and makes the set whole.

data/<name>/train-00000.bin train-00001.bin … val-00000.bin: little-endian uint16 ids, nothing else
data/<name>/meta.json: what they are, see Meta
data/<name>/gpt2.tiktoken: what the tokenizer, if it is gpt2, needs to decode them
"""

import hashlib
import json
import mmap
import os
import resource
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from data import DataError
from data.sources import SOURCES
from data.tokenizer import RANKS_FILE, Tokenizer, load_tokenizer

DATA_DIR = Path(__file__).parent  # where prepared sets go unless told otherwise
DTYPE = "uint16"
SHARD_TOKENS = 100_000_000  # 200 MB
HASHED_BYTES = 2**30  # sets up to 1 GiB are hashed at each check
RELEASE_BYTES = 2**28  # mapped memory a reader may hold
FAULT_BYTES = 2**16  # that Linux maps around a byte that is read


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
    """Shards of uint16 ids as one logical array. Of shards mapped into memory nothing is loaded before it is read, and
    what is read does not stay in the process: beyond RELEASE_BYTES it is left to the page cache."""

    def __init__(self, shards: Sequence[np.ndarray], name: str = "these tokens", maps: Sequence[mmap.mmap] = ()):
        self.name = name
        self._shards, self._maps = shards, maps
        self._starts = [0, *accumulate(map(len, shards))]  # of each shard, and the end
        self._touched = 0  # bytes since the last release

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), shape (count,): a view where they lie in one shard, else a copy."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens [{start}, {start + count}) of {len(self)}")
        self._touched += FAULT_BYTES + 2 * count
        if self._touched > RELEASE_BYTES:
            self._touched = 0
            for shard in self._maps:
                shard.madvise(mmap.MADV_DONTNEED)
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
        if partial_folder(folder).is_dir():
            raise DataError(f"{folder}: half-prepared. Go on by the command that began it: {_prepare_command(folder)}")
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
        sizes = [meta.splits[name].tokens for name in ("train", "val")] + [
            meta.tokenizer["vocab_size"],
            meta.tokenizer["eot"],
        ]
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a map keeps its file open
    if soft != resource.RLIM_INFINITY and soft < len(files) + 1024:
        limit = len(files) + 1024 if hard == resource.RLIM_INFINITY else min(hard, len(files) + 1024)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    maps = []
    for file in files:
        with Path(folder, file.name).open("rb") as opened:
            maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    return Tokens([np.frombuffer(shard, "<u2") for shard in maps], f"the {split} split of {folder}", maps)


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
    if meta.tokenizer["vocab_size"] > vocab_size:
        name, needed = meta.tokenizer["name"], meta.tokenizer["vocab_size"]
        raise DataError(
            f"{folder}: tokenizer {name!r} has {needed} ids, the model's vocab_size is {vocab_size}. "
            f"Set model.vocab_size to at least {needed}, or prepare the set with another --tokenizer"
        )
    check_lengths(folder, meta)
    shards = [shard for split in meta.splits.values() for shard in split.files]
    if sum(2 * shard.tokens for shard in shards) <= HASHED_BYTES:
        for shard in shards:
            with (folder / shard.name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise DataError(
                    f"{folder / shard.name}: expected sha256 {shard.sha256}, found {found}. "
                    f"Prepare it again: {meta.prepare} --force"
                )
    return meta


def check_lengths(folder: Path, meta: Meta) -> None:
    """Raises DataError if a shard is missing or not of the length that `meta` states."""
    remedy = f"Prepare it again: {meta.prepare} --force"
    if meta.dtype != DTYPE:
        raise DataError(f"{folder}/meta.json: dtype {meta.dtype!r}, expected {DTYPE!r}. {remedy}")
    for split in meta.splits.values():
        for shard in split.files:
            path = folder / shard.name
            if not path.is_file():
                raise DataError(f"{path}: missing, expected {shard.tokens} tokens. {remedy}")
            size = path.stat().st_size
            if size != 2 * shard.tokens:
                expected = f"{2 * shard.tokens} bytes ({shard.tokens} tokens)"
                raise DataError(f"{path}: expected {expected}, found {size}. {remedy}")


def summary(meta: Meta, folder: Path) -> str:
    train, val = meta.splits["train"], meta.splits["val"]
    return (
        f"{train.tokens:,} train and {val.tokens:,} val tokens of {train.documents:,} and {val.documents:,} documents "
        f"in {os.path.relpath(folder)}"
    )


def partial_folder(folder: str | Path) -> Path:
    """Where the set in `folder` is written before it is whole."""
    return Path(f"{folder}.partial")


def _prepare_command(folder: Path) -> str:
    """The command that makes `folder`, as far as its name tells."""
    command = ["python", "-m", "data.prepare"]
    corpus = folder.name if folder.name in SOURCES else "text"
    command += [corpus]
    if corpus in ("text", "books3"):  # there is nothing to download
        command += ["--source", "FILES"]
    if corpus != folder.name:
        command += ["--name", folder.name]
    if folder.parent.resolve() != DATA_DIR.resolve():
        command += ["--out", str(folder.parent)]
    return shlex.join(command)
