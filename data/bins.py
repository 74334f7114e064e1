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
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic's need below Python 3.12

from data import DataError
from data.sources import SOURCES
from data.tokenizer import RANKS_FILE, Tokenizer, load_tokenizer

DATA_DIR = Path(__file__).parent  # where prepared sets go unless told otherwise
DTYPE = "uint16"
SHARD_TOKENS = 100_000_000  # 200 MB
HASHED_BYTES = 2**30  # sets up to 1 GiB are read whole at each check
SAMPLE_BYTES = 2**16  # of each shard of a larger set
CHUNK_BYTES = 2**22
RELEASE_BYTES = 2**28  # mapped memory a reader may hold
FAULT_BYTES = 2**16  # that Linux maps around a byte that is read


# The form of meta.json, whoever wrote it: nothing missing, nothing added, numbers neither true nor 7.0 nor "7".
CLOSED = ConfigDict(extra="forbid")
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True, config=CLOSED)
class Shard:
    name: str
    tokens: Annotated[Count, Field(ge=1)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, config=CLOSED)
class Split:
    tokens: Count
    documents: Count
    files: list[Shard]


class MadeBy(TypedDict):
    """A tokenizer, as far as its ids go."""

    name: str
    hash: str
    vocab_size: Annotated[Count, Field(ge=1, le=2**16)]
    eot: Count


@dataclass(frozen=True, config=CLOSED)
class Meta:
    name: str
    tokenizer: MadeBy
    dtype: str
    splits: dict[str, Split]  # train, val
    source: dict  # the arguments that decide what is in the set
    prepare: str  # the command line that made it

    def __post_init__(self):
        if set(self.splits) != {"train", "val"}:
            raise ValueError(f"splits {', '.join(self.splits) or 'none'}, expected train, val")
        for name, split in self.splits.items():
            for i, shard in enumerate(split.files):  # no other name, so none that leads out of the folder
                if shard.name != f"{name}-{i:05d}.bin":
                    raise ValueError(f"{name} file {i} is {shard.name!r}, expected '{name}-{i:05d}.bin'")
            total = sum(shard.tokens for shard in split.files)
            if split.tokens != total:
                raise ValueError(f"{name} has {split.tokens} tokens, its files {total}")


class Tokens:
    """Shards of uint16 ids as one logical array. Of shards mapped into memory nothing is loaded before it is read, and
    what is read does not stay in the process: beyond RELEASE_BYTES it is left to the page cache.

    `vocab_size` is where ids end; `files` names the shards, and `remedy` what mends them, for `check_ids`."""

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        name: str = "these tokens",
        maps: Sequence[mmap.mmap] = (),
        vocab_size: int = 2**16,
        files: Sequence[Path] = (),
        remedy: str = "",
    ):
        self.name, self.vocab_size = name, vocab_size
        self._shards, self._maps, self._files, self._remedy = shards, maps, files, remedy
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

    def check_ids(self, start: int, count: int) -> None:
        """Raises DataError if a shard with one of the tokens [start, start + count) holds ids beyond the vocabulary."""
        first, last = (bisect_right(self._starts, place) - 1 for place in (start, start + count - 1))
        for path, shard in zip(self._files[first : last + 1], self._shards[first : last + 1], strict=True):
            _check_ids(path, shard, self.vocab_size, self._remedy)


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
        return TypeAdapter(Meta).validate_python(json.loads(path.read_bytes()))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Make it readable: chmod u+r {path}") from error
    except ValidationError as error:
        first, *more = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        reason = first.removeprefix(": ") + (f", and {len(more)} more" if more else "")
    except (ValueError, RecursionError) as error:  # no JSON, or nested without end
        reason = f"{type(error).__name__}: {error}"
    raise DataError(f"{path}: cannot be read ({reason}). Prepare the set again: {_prepare_command(folder)} --force")


def open_tokens(folder: str | Path, split: str) -> Tokens:
    """The tokens of `split` ("train" or "val"), memory-mapped. Run `check` first."""
    meta = read_meta(folder)
    files = [Path(folder, shard.name) for shard in meta.splits[split].files]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a map keeps its file open
    if soft != resource.RLIM_INFINITY and soft < len(files) + 1024:
        limit = len(files) + 1024 if hard == resource.RLIM_INFINITY else min(hard, len(files) + 1024)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    maps = []
    for file in files:
        with file.open("rb") as opened:
            maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    shards = [np.frombuffer(shard, "<u2") for shard in maps]
    vocab_size = meta.tokenizer["vocab_size"]
    return Tokens(shards, f"the {split} split of {folder}", maps, vocab_size, files, _remedy(meta))


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that made this set, from the set's own files: no network is needed."""
    ranks = Path(folder, RANKS_FILE)
    return load_tokenizer(read_meta(folder).tokenizer["name"], ranks if ranks.is_file() else None)


def check(folder: str | Path, vocab_size: int) -> Meta:
    """Whether training may trust this set: every shard there, of the length and (up to 1 GiB in all) the sha256 that
    meta.json states, its ids the tokenizer's. Above 1 GiB the first ids of each shard alone are looked at: the others
    are when training reads them, by `data.loader.windows`. `vocab_size` is the model's.

    Raises DataError naming the file, what was expected, what was found and the command that mends it.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    limit = meta.tokenizer["vocab_size"]
    if limit > vocab_size:
        raise DataError(
            f"{folder}: tokenizer {meta.tokenizer['name']!r} has {limit} ids, the model's vocab_size is {vocab_size}. "
            f"Set model.vocab_size to at least {limit}, or prepare the set with another --tokenizer"
        )
    check_lengths(folder, meta)
    shards = [shard for split in meta.splits.values() for shard in split.files]
    whole = sum(2 * shard.tokens for shard in shards) <= HASHED_BYTES
    for shard in shards:
        path = folder / shard.name
        try:
            _check_sample(path, limit, _remedy(meta))
            if whole:
                _check_whole(path, limit, shard.sha256, _remedy(meta))
        except OSError as error:
            found = f"cannot be read ({error.strerror})"
            raise DataError(f"{path}: {found}. Make it readable: chmod u+r {path}; or: {_remedy(meta)}") from error
    return meta


def check_lengths(folder: Path, meta: Meta) -> None:
    """Raises DataError if a shard is missing or not of the length that `meta` states."""
    if meta.dtype != DTYPE:
        raise DataError(f"{folder}/meta.json: dtype {meta.dtype!r}, expected {DTYPE!r}. {_remedy(meta)}")
    for split in meta.splits.values():
        for shard in split.files:
            path = folder / shard.name
            if not path.is_file():
                found = "not a file" if path.exists() else "a link to nothing" if path.is_symlink() else "missing"
                raise DataError(f"{path}: {found}, expected {shard.tokens} tokens. {_remedy(meta)}")
            size = path.stat().st_size
            if size != 2 * shard.tokens:
                expected = f"{2 * shard.tokens} bytes ({shard.tokens} tokens)"
                raise DataError(f"{path}: expected {expected}, found {size}. {_remedy(meta)}")


def fingerprint(meta: Meta) -> dict[str, str]:
    """Two sha256 by which to know the tokens again and what they mean, whatever the set's name, place and history:
    `data` of the shards in their order, `tokenizer` of what decodes them."""
    shards = [(split, shard.tokens, shard.sha256) for split in ("train", "val") for shard in meta.splits[split].files]
    parts = {"data": shards, "tokenizer": meta.tokenizer}
    return {key: sha256_of(part) for key, part in parts.items()}


def sha256_of(value) -> str:
    """Of its JSON, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_sample(path: Path, vocab_size: int, remedy: str) -> None:
    """Raises DataError if the first ids of a shard give away that it holds something else."""
    ids = np.fromfile(path, "<u2", SAMPLE_BYTES // 2)
    _check_ids(path, ids, vocab_size, remedy)
    if len(ids) >= 64 and not ids[1::2].any():
        what = "as wider integers have it, or a file of which a part was never written"
        raise DataError(f"{path}: expected {DTYPE}, found every second of the first {len(ids)} ids 0, {what}. {remedy}")


def _check_whole(path: Path, vocab_size: int, sha256: str, remedy: str) -> None:
    """Raises DataError of ids beyond the vocabulary, and of another sha256; reads each byte once."""
    digest, largest = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
            largest = max(largest, np.frombuffer(data, "<u2").max())
    if largest >= vocab_size:
        _check_ids(path, np.fromfile(path, "<u2"), vocab_size, remedy)
    if digest.hexdigest() != sha256:
        raise DataError(f"{path}: expected sha256 {sha256}, found {digest.hexdigest()}. {remedy}")


def _check_ids(path: Path, ids: np.ndarray, vocab_size: int, remedy: str) -> None:
    """Raises DataError if some of `ids`, (n,), the first of a shard, are beyond the vocabulary."""
    beyond = np.flatnonzero(ids >= vocab_size)
    if len(beyond):
        found = f"id {ids[beyond[0]]} at token {beyond[0]:,}"
        more = f"{len(beyond):,} such among {len(ids):,}"
        raise DataError(f"{path}: {found}, expected below {vocab_size} ({more}). {remedy}")


def _remedy(meta: Meta) -> str:
    return f"Prepare it again: {meta.prepare} --force"


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
