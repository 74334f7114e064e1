"""A data set on disk: raw token shards and `meta.json`, which is written last.

data/<name>/train-00000.bin train-00001.bin … val-00000.bin: little-endian uint16 ids, no header
data/<name>/meta.json: describes them, see Meta
data/<name>/gpt2.tiktoken or tokenizer.json: decodes them, unless the ids are bytes
"""

import hashlib
import json
import mmap
import resource
import shlex
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic's need below Python 3.12

from common.files import DamagedFile, is_file, is_folder, naming, read_json
from data import BARE_TOKENS, DataError

DATA_DIR = Path(__file__).parent  # where prepared sets go by default
SHARD_TOKENS = 100_000_000  # 200 MB
HASHED_BYTES = 2**30  # sets up to 1 GiB are read completely at each check; not measured
CHUNK_BYTES = 2**22  # bytes per read of a shard
RELEASE_BYTES = 2**28  # mapped memory that the reader of a split may hold
FAULT_BYTES = 2**16  # Linux maps about this much around a byte that is read
OTHER_FILES = 1024  # files that a process may open besides shards


# meta.json is checked strictly: no key may be missing or unknown, no number written as true, 7.0
# or "7".
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
    """The identity of a tokenizer."""

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
    source: dict  # its provenance: arguments and hashes of the inputs
    prepare: str  # the command line that made it

    def __post_init__(self) -> None:
        if list(self.splits) != ["train", "val"]:
            raise ValueError(f"splits {', '.join(self.splits) or 'none'}, expected train, val")
        for name, split in self.splits.items():
            names = [shard.name for shard in split.files]
            expected = [f"{name}-{i:05d}.bin" for i in range(len(names))]
            if names != expected:  # another name could lead out of the folder
                raise ValueError(f"{name} has files {names}, expected {expected}")
            total = sum(shard.tokens for shard in split.files)
            if split.tokens != total:
                raise ValueError(f"{name} has {split.tokens} tokens, its files {total}")


class Tokens:
    """Shards of uint16 ids as one logical array.

    Mapped shards are loaded as they are read. After RELEASE_BYTES their pages are released to the
    page cache, so that the process does not grow.

    Args:
        shards: uint16 arrays, (n,) each, in memory or np.memmap.
        name: the name of these tokens, for messages.
        vocab_size: all ids must be below it.
        eot: the id after each document; None if the ends of documents are unknown.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        name: str = "these tokens",
        vocab_size: int = 2**16,
        eot: int | None = None,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.eot = eot
        self._shards = shards
        self._starts = [0, *accumulate(map(len, shards))]  # first token of each shard, and the end
        self._touched = 0  # bytes since the last release

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), (count,) uint16.

        Raises:
            DataError: an id is not in the vocabulary. A GPU would stop with a nameless assertion.
        """
        assert 0 <= start <= start + count <= len(self)
        self._touched += FAULT_BYTES + 2 * count
        if self._touched > RELEASE_BYTES:
            self._release_pages()
        stop = start + count
        first_shard = bisect_right(self._starts, start) - 1
        end_shard = bisect_left(self._starts, stop)
        slices = []
        for i in range(first_shard, end_shard):
            shard_start = self._starts[i]
            slices.append(self._shards[i][max(0, start - shard_start) : stop - shard_start])
        ids = np.concatenate([np.empty(0, np.uint16), *slices])
        fault = _find_bad_id(ids, self.vocab_size, start)
        if fault:
            raise DataError(
                f"{self.name}: {fault}. Find the damaged file with python -m data.verify"
            )
        return ids

    def _release_pages(self) -> None:
        self._touched = 0
        for shard in self._shards:
            if isinstance(shard.base, mmap.mmap):
                shard.base.madvise(mmap.MADV_DONTNEED)


def read_meta(folder: Path) -> Meta:
    """Read and check the meta.json of a set.

    Raises DataError if it is missing, half-prepared or of another format.
    """
    path = folder / "meta.json"
    if not is_file(path):
        if is_file(folder / "train.bin"):
            raise DataError(f"{folder / 'train.bin'}: {BARE_TOKENS}: {_guess_command(folder)}")
        if is_folder(folder) or is_folder(partial_folder(folder)):
            state = "half-prepared. Resume with the command that started it"
        else:
            state = "no such data set. Prepare it"
        raise DataError(f"{folder}: {state}: {_guess_command(folder)}")
    try:
        return read_json(path, Meta)
    except DamagedFile as error:
        raise DataError(
            f"{error}. Prepare the set again: {_guess_command(folder)} --force"
        ) from None


def open_tokens(folder: Path, split: str) -> Tokens:
    """The tokens of `split` ("train" or "val"), memory-mapped. Run `check_dataset` first."""
    meta = read_meta(folder)
    files = [folder / shard.name for shard in meta.splits[split].files]
    _allow_open_files(len(files))
    shards = [np.memmap(file, "<u2", "r") for file in files]
    name = f"the {split} split of {folder}"
    return Tokens(shards, name, meta.tokenizer["vocab_size"], meta.tokenizer["eot"])


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files: a mapped shard keeps its file open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count + OTHER_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_dataset(folder: Path, vocab_size: int) -> Meta:
    """Check that training may use a set.

    The lengths of all shards are checked. Up to 1 GiB in all, so are every id and sha256; those of
    a larger set by data.verify. `Tokens.read` checks the ids as training reads them.

    Args:
        folder: of the set.
        vocab_size: the model's; the tokenizer's may be smaller.

    Raises:
        DataError: names the file, the expected and the actual value, and the command that repairs
            it.
        OSError: a file may not be read.
    """
    meta = read_meta(folder)
    n_ids = meta.tokenizer["vocab_size"]
    if n_ids > vocab_size:
        raise DataError(
            f"{folder}: tokenizer {meta.tokenizer['name']!r} has {n_ids} ids, the model's "
            f"vocab_size is {vocab_size}. Set model.vocab_size to at least {n_ids}, or prepare the "
            f"set with another --tokenizer"
        )
    check_lengths(folder, meta)
    if sum(2 * shard.tokens for shard in list_shards(meta)) <= HASHED_BYTES:
        for shard, faults in scan_shards(folder, meta):
            if faults:
                raise DataError(f"{folder / shard.name}: {faults[0]}. {name_remedy(meta, folder)}")
    return meta


def check_lengths(folder: Path, meta: Meta) -> None:
    """Raise DataError if a shard is missing or its length differs from `meta`."""
    for shard in list_shards(meta):
        path = folder / shard.name
        size = path.stat().st_size if is_file(path) else None
        if size != 2 * shard.tokens:
            found = "no such file" if size is None else f"found {size}"
            raise DataError(
                f"{path}: expected {2 * shard.tokens} bytes ({shard.tokens} tokens), {found}. "
                f"{name_remedy(meta, folder)}"
            )


def list_shards(meta: Meta) -> list[Shard]:
    """The shards of both splits."""
    return meta.splits["train"].files + meta.splits["val"].files


def scan_shards(
    folder: Path,
    meta: Meta,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Iterator[tuple[Shard, list[str]]]:
    """Read the shards of both splits completely, several at once, and check them.

    Args:
        folder: of the set.
        meta: its description.
        progress: called with the number of tokens read since the last call.

    Yields:
        (the shard, descriptions of the faults).
    """

    def scan(shard: Shard) -> list[str]:
        digest = hashlib.sha256()
        position = 0
        bad_id = ""
        path = folder / shard.name
        with naming(path), path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                digest.update(data)
                ids = np.frombuffer(data, "<u2")
                bad_id = bad_id or _find_bad_id(ids, meta.tokenizer["vocab_size"], position)
                position += len(ids)
                progress(len(ids))
        faults = [bad_id] if bad_id else []
        if digest.hexdigest() != shard.sha256:
            faults.append(f"expected sha256 {shard.sha256}, found {digest.hexdigest()}")
        return faults

    shards = list_shards(meta)
    with ThreadPoolExecutor() as pool:  # hashing and numpy release the interpreter lock
        yield from zip(shards, pool.map(scan, shards), strict=True)


def fingerprint(meta: Meta) -> dict[str, str]:
    """Content hashes of the shards (`data`) and of the tokenizer (`tokenizer`).

    The name of the set, its folder and its provenance do not matter.
    """
    shards = []
    for split in ("train", "val"):
        for shard in meta.splits[split].files:
            shards.append((split, shard.tokens, shard.sha256))
    return {"data": sha256_of(shards), "tokenizer": sha256_of(meta.tokenizer)}


def sha256_of(value: Any) -> str:
    """The sha256 of a value's JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _find_bad_id(ids: np.ndarray, vocab_size: int, position: int = 0) -> str:
    """Describe the first of `ids` (n,) that is not in the vocabulary; empty if all are.

    `position` is the number of the first id, for the message.
    """
    if not len(ids) or ids.max() < vocab_size:
        return ""
    first = int(np.argmax(ids >= vocab_size))
    return f"id {ids[first]} at token {position + first:,}, expected below {vocab_size}"


def name_remedy(meta: Meta, folder: Path) -> str:
    """What to do about a damaged set, which may have another name than its command gave it."""
    command = f"{meta.prepare} --force"
    if folder.name != meta.name:
        command += f" --name {shlex.quote(folder.name)}"
    return f"Prepare it again: {command}{_name_parent(folder)}"


def _name_parent(folder: Path) -> str:
    """The option that puts a set where `folder` is; none for the folder of data sets."""
    if folder.parent.resolve() == DATA_DIR.resolve():
        return ""
    return f" --out {shlex.quote(str(folder.parent))}"


def describe_set(meta: Meta, folder: Path) -> str:
    """Tokens, documents and folder of a set, in one line."""
    train = meta.splits["train"]
    val = meta.splits["val"]
    tokens = f"{train.tokens:,} train and {val.tokens:,} val tokens"
    documents = f"{train.documents:,} and {val.documents:,} documents"
    return f"{tokens} of {documents} in {folder}"


def partial_folder(folder: Path) -> Path:
    """The folder in which the set in `folder` is written before it is complete."""
    return Path(f"{folder}.partial")


def _guess_command(folder: Path) -> str:
    """The command that makes the set in `folder`, guessed from its name."""
    from data.sources import SOURCES  # training does not need it

    corpus = folder.name
    if corpus not in SOURCES:
        corpus = f"text --source FILES --name {shlex.quote(folder.name)}"
    return f"python -m data.prepare {corpus}{_name_parent(folder)}"
