"""A data set on disk: raw token shards, and `meta.json`, which is written last and makes the set complete.

data/<name>/train-00000.bin train-00001.bin … val-00000.bin: little-endian uint16 ids, nothing else
data/<name>/meta.json: what they are, see Meta
data/<name>/gpt2.tiktoken: GPT-2's BPE file, which decodes them, if that is the tokenizer
"""

import hashlib
import json
import mmap
import resource
import shlex
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic's need below Python 3.12

from common.files import short_path
from data import DataError
from data.sources import SOURCES
from data.tokenizer import RANKS_FILE, TOKENIZER_FILE, FileTokenizer, Tokenizer, load_tokenizer

DATA_DIR = Path(__file__).parent  # where prepared sets go by default
SHARD_TOKENS = 100_000_000  # 200 MB
HASHED_BYTES = 2**30  # sets up to 1 GiB are read completely at each check
CHUNK_BYTES = 2**22
RELEASE_BYTES = 2**28  # mapped memory that the reader of a split may hold
FAULT_BYTES = 2**16  # what Linux maps around a byte that is read


# meta.json is checked strictly, whoever wrote it: no key missing or added, no number written as
# true, 7.0 or "7".
CLOSED = ConfigDict(extra="forbid")
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True, config=CLOSED)
class Shard:
    """One file of tokens."""

    name: str
    tokens: Annotated[Count, Field(ge=1)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, config=CLOSED)
class Split:
    """Training or validation."""

    tokens: Count
    documents: Count
    files: list[Shard]


class TokenizerInfo(TypedDict):
    """What identifies a tokenizer."""

    name: str
    hash: str
    vocab_size: Annotated[Count, Field(ge=1, le=2**16)]
    eot: Count


@dataclass(frozen=True, config=CLOSED)
class Meta:
    """The content of meta.json."""

    name: str
    tokenizer: TokenizerInfo
    dtype: Literal["uint16"]
    splits: dict[str, Split]  # train, val
    source: dict  # the arguments that decide what is in the set
    prepare: str  # the command line that made it

    def __post_init__(self) -> None:
        if set(self.splits) != {"train", "val"}:
            raise ValueError(f"splits {', '.join(self.splits) or 'none'}, expected train, val")
        for name, split in self.splits.items():
            for i, shard in enumerate(split.files):  # no other name, so none outside the folder
                if shard.name != f"{name}-{i:05d}.bin":
                    raise ValueError(
                        f"{name} file {i} is {shard.name!r}, expected '{name}-{i:05d}.bin'"
                    )
            total = sum(shard.tokens for shard in split.files)
            if split.tokens != total:
                raise ValueError(f"{name} has {split.tokens} tokens, its files {total}")


class Tokens:
    """Shards of uint16 ids as one logical array.

    Mapped shards are loaded as they are read. Beyond RELEASE_BYTES their pages go back to the page
    cache, so that the process does not grow.

    Args:
        shards: uint16 arrays, (n,) each, in memory or np.memmap.
        name: of these tokens, for messages.
        vocab_size: ids must be below.
        eot: the id between documents; None: it is not known where they end.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        name: str = "these tokens",
        vocab_size: int = 2**16,
        eot: int | None = None,
    ) -> None:
        self.name, self.vocab_size, self.eot, self._shards = name, vocab_size, eot, shards
        self._starts = [0, *accumulate(map(len, shards))]  # of each shard, and the end
        self._touched = 0  # bytes since the last release

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), (count,) uint16: a view if they are in one shard, else a copy.

        Raises:
            DataError: an id is beyond the vocabulary; on a GPU it would be an anonymous assertion.
        """
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens [{start}, {start + count}) of {len(self)}")
        self._touched += FAULT_BYTES + 2 * count
        if self._touched > RELEASE_BYTES:
            self._touched = 0
            for shard in self._shards:
                if isinstance(shard.base, mmap.mmap):
                    shard.base.madvise(mmap.MADV_DONTNEED)
        stop = start + count
        shards = range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop))
        parts = [
            self._shards[i][max(0, start - self._starts[i]) : stop - self._starts[i]]
            for i in shards
        ]
        ids = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])
        if fault := _find_bad_id(ids, self.vocab_size, start):
            raise DataError(
                f"{self.name}: {fault}. Find the damaged file with python -m data.verify"
            )
        return ids


def read_meta(folder: str | Path) -> Meta:
    """The checked meta.json of a set.

    Raises DataError if it is missing, half-prepared or of another format.
    """
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.is_file():
        begun = folder.is_dir() or partial_folder(folder).is_dir()
        state = (
            "half-prepared. Resume with the command that began it"
            if begun
            else "no such data set. Prepare it"
        )
        raise DataError(f"{folder}: {state}: {_prepare_command(folder)}")
    try:
        return TypeAdapter(Meta).validate_python(json.loads(path.read_bytes()))
    except ValidationError as error:
        first, *more = (
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
        )
        reason = first.removeprefix(": ") + (f", and {len(more)} more" if more else "")
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deep
        reason = f"{type(error).__name__}: {error}"
    raise DataError(
        f"{path}: cannot be read ({reason}). Prepare the set again: {_prepare_command(folder)} --force"
    )


def open_tokens(folder: str | Path, split: str) -> Tokens:
    """The tokens of `split` ("train" or "val"), memory-mapped. Run `check_dataset` first."""
    meta = read_meta(folder)
    files = [Path(folder, shard.name) for shard in meta.splits[split].files]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a map keeps its file open
    if soft != resource.RLIM_INFINITY and soft < len(files) + 1024:
        limit = (
            len(files) + 1024 if hard == resource.RLIM_INFINITY else min(hard, len(files) + 1024)
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    shards = [np.memmap(file, "<u2", "r") for file in files]
    name, tokenizer = f"the {split} split of {folder}", meta.tokenizer
    return Tokens(shards, name, tokenizer["vocab_size"], tokenizer["eot"])


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that made this set, from the set's own files; needs no network."""
    info, ranks, file = (
        read_meta(folder).tokenizer,
        Path(folder, RANKS_FILE),
        Path(folder, TOKENIZER_FILE),
    )
    if file.is_file():
        return FileTokenizer(info["name"], file.read_bytes(), info["eot"])
    return load_tokenizer(info["name"], ranks if ranks.is_file() else None)


def check_dataset(folder: str | Path, vocab_size: int) -> Meta:
    """Check that training may use a set.

    Lengths of all shards always; every id and sha256 up to 1 GiB in all; above, `Tokens.read`
    checks the ids as training reads them. `vocab_size` is the model's; the tokenizer's may be
    smaller.

    Raises:
        DataError: names the file, what was expected, what was found and the command that repairs
            it.
        OSError: a file may not be read.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    if (limit := meta.tokenizer["vocab_size"]) > vocab_size:
        raise DataError(
            f"{folder}: tokenizer {meta.tokenizer['name']!r} has {limit} ids, the model's vocab_size is {vocab_size}. "
            f"Set model.vocab_size to at least {limit}, or prepare the set with another --tokenizer"
        )
    check_lengths(folder, meta)
    shards = [shard for split in meta.splits.values() for shard in split.files]
    if sum(2 * shard.tokens for shard in shards) > HASHED_BYTES:
        return meta
    for shard in shards:
        _, faults = scan_shard(folder / shard.name, shard.sha256, meta.tokenizer)
        if faults:
            raise DataError(f"{folder / shard.name}: {faults[0]}. {_remedy(meta)}")
    return meta


def check_lengths(folder: Path, meta: Meta) -> None:
    """Raises DataError if a shard is missing or its length is not what `meta` states."""
    for split in meta.splits.values():
        for shard in split.files:
            path = folder / shard.name
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file, expected {shard.tokens} tokens. {_remedy(meta)}"
                )
            if (size := path.stat().st_size) != 2 * shard.tokens:
                expected = f"{2 * shard.tokens} bytes ({shard.tokens} tokens)"
                raise DataError(f"{path}: expected {expected}, found {size}. {_remedy(meta)}")


def scan_shard(
    path: Path,
    sha256: str,
    tokenizer: TokenizerInfo,
    progress: Callable[[int], object] = lambda tokens: None,
) -> tuple[int, list[str]]:
    """Read a shard completely, once; `progress` is called with the number of tokens read since the last call.

    Returns (end-of-text tokens, what differs from `sha256` and from the ids of `tokenizer`, in
    words).
    """
    digest, ends, position, faults = hashlib.sha256(), 0, 0, []
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
            ids = np.frombuffer(data, "<u2")
            ends += int(np.count_nonzero(ids == tokenizer["eot"]))
            if not faults and (fault := _find_bad_id(ids, tokenizer["vocab_size"], position)):
                faults.append(fault)
            position += len(ids)
            progress(len(ids))
    if digest.hexdigest() != sha256:
        faults.append(f"expected sha256 {sha256}, found {digest.hexdigest()}")
    return ends, faults


def fingerprint(meta: Meta) -> dict[str, str]:
    """Two sha256 that identify a set whatever its name, place and history.

    `data` is that of the shards in their order, `tokenizer` that of what decodes them.
    """
    shards = [
        (split, shard.tokens, shard.sha256)
        for split in ("train", "val")
        for shard in meta.splits[split].files
    ]
    return {"data": sha256_of(shards), "tokenizer": sha256_of(meta.tokenizer)}


def sha256_of(value: Any) -> str:
    """The sha256 of a value's JSON, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _find_bad_id(ids: np.ndarray, vocab_size: int, position: int = 0) -> str:
    """The first of `ids`, (n,) from token `position` of a shard on, beyond the vocabulary, in words; empty if none."""
    if not len(ids) or ids.max() < vocab_size:
        return ""
    first = int(np.argmax(ids >= vocab_size))
    return f"id {ids[first]} at token {position + first:,}, expected below {vocab_size}"


def _remedy(meta: Meta) -> str:
    return f"Prepare it again: {meta.prepare} --force"


def describe_set(meta: Meta, folder: Path) -> str:
    """Tokens, documents and place of a set, in a line."""
    train, val = meta.splits["train"], meta.splits["val"]
    documents = f"{train.documents:,} and {val.documents:,} documents"
    return f"{train.tokens:,} train and {val.tokens:,} val tokens of {documents} in {short_path(folder)}"


def partial_folder(folder: str | Path) -> Path:
    """Where the set in `folder` is written before it is complete."""
    return Path(f"{folder}.partial")


def _prepare_command(folder: Path) -> str:
    """The command that makes `folder`, guessed from its name."""
    corpus = folder.name if folder.name in SOURCES else "text"
    command = ["python", "-m", "data.prepare", corpus]
    # nothing to stream
    command += [] if SOURCES[corpus].hub or corpus == "stdlib" else ["--source", "FILES"]
    command += ["--name", folder.name] if corpus != folder.name else []
    command += (
        ["--out", str(folder.parent)] if folder.parent.resolve() != DATA_DIR.resolve() else []
    )
    return shlex.join(command)
