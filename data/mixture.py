"""Several prepared sets as one: which rows of the batches are of which set, and their splits under one numbering.

Rows are dealt out like leap days, with no chance in it: the set of a row follows from its number
alone, and of any number of rows since the first each set has its part, to a row or so. A set's own
rows read its windows in the order in which a run on that set alone would, so each set has epochs of
its own.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.files import short_path
from data import DataError
from data.bins import Meta, Tokens, check_dataset, describe_set, fingerprint, read_meta, sha256_of

UNIT = 2**30  # of weights: products of two parts fit an int64


def count_windows(tokens: Tokens, block_size: int) -> int:
    """The number of windows in `tokens`. Raises DataError if there is none."""
    if len(tokens) <= block_size:
        raise DataError(
            f"{tokens.name}: {len(tokens)} tokens, but one window of block_size {block_size} needs {block_size + 1}. "
            f"Prepare more text, or lower model.block_size"
        )
    return (len(tokens) - 1) // block_size


class JoinedTokens:
    """A split of several sets as one: windows of the first set come first, then those of the second, and so on.

    `parts` has the tokens of each set, and a window T = `block_size` of them. Raises DataError as
    `count_windows`.
    """

    def __init__(self, parts: Sequence[Tokens], block_size: int) -> None:
        self.parts, self.block_size = parts, block_size
        counts = (count_windows(part, block_size) for part in parts)
        # the first window of each set, and the end
        self.starts = [0, *itertools.accumulate(counts)]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of one window, (count,) uint16; window w begins at w * T.

        See `Tokens.read`.
        """
        part = bisect_right(self.starts, start // self.block_size) - 1
        return self.parts[part].read(start - self.starts[part] * self.block_size, count)


def check_sets(folders: Sequence[Path], vocab_size: int) -> list[Meta]:
    """Check every set with `check_dataset`, which see for errors, and that all have one tokenizer."""
    metas = [read_meta(folder) for folder in folders]
    for folder, meta in zip(folders, metas, strict=True):
        if meta.tokenizer != metas[0].tokenizer:
            name, first = meta.tokenizer["name"], metas[0].tokenizer["name"]
            raise DataError(
                f"{folder}: its tokenizer {name!r} is not that of {folders[0]}, {first!r}, and a mixture has one. "
                f"Leave one of the sets out, or prepare it again with the other's --tokenizer"
            )
    return [check_dataset(folder, vocab_size) for folder in folders]


def check_documents(folders: Sequence[Path], metas: Sequence[Meta]) -> None:
    """Raise DataError if a set's training split is one text without an end of a document in it."""
    for folder, meta in zip(folders, metas, strict=True):
        if meta.splits["train"].documents < 2:
            raise DataError(
                f"{folder}: its training split is one document, so data.document_mask changes nothing. Leave it out, "
                f"or prepare the text again as documents, one to a file or to a row of .jsonl"
            )


def identify(metas: Sequence[Meta], weights: Sequence[float]) -> dict[str, str]:
    """Two sha256 as `fingerprint` has them: `data` of one set is its own, of several that of all and their weights."""
    prints = [fingerprint(meta) for meta in metas]
    if len(metas) == 1:
        return prints[0]
    parts = [
        [share, one["data"]] for share, one in zip(to_shares(weights).tolist(), prints, strict=True)
    ]
    return {"data": sha256_of(parts), "tokenizer": prints[0]["tokenizer"]}


def to_shares(weights: Sequence[float]) -> np.ndarray:
    """Weights as whole numbers, one at least, that sum to UNIT: (S,) int64."""
    exact = np.array(weights, np.float64) / np.sum(weights) * UNIT
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    shares[np.argmax(shares)] += UNIT - shares.sum()
    return shares


def assign_rows(rows: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The set of each row, and the row's number among the rows of that set.

    Rows are split between two groups of sets, each group's again, and so on; of the first n rows of
    a group, those of one side are n times its part, rounded. So a set's number of rows is off by
    half a row for each split at most, and by less for splits further up.

    Args:
        rows: (B,) int64, counted from the first row of the first step.
        shares: (S,) int64, see `to_shares`.

    Returns:
        (B,) int64 each.
    """
    # the heaviest first: halves of a group are as equal as can be
    order = np.argsort(-shares, kind="stable")
    starts = np.append(0, np.cumsum(shares[order]))
    sets, places = np.empty(len(rows), np.int64), rows.astype(np.int64)
    groups = [(np.arange(len(rows)), 0, len(shares))]  # (which rows, first set, end)
    while groups:
        at, first, stop = groups.pop()
        if stop - first == 1:
            sets[at] = order[first]
            continue
        middle = (
            first
            + 1
            + int(np.argmin(np.abs(2 * starts[first + 1 : stop] - starts[first] - starts[stop])))
        )
        part, whole = starts[middle] - starts[first], starts[stop] - starts[first]
        before = _round_part(places[at], part, whole)
        left = _round_part(places[at] + 1, part, whole) > before
        places[at] = np.where(left, before, places[at] - before)
        groups += [(at[left], first, middle), (at[~left], middle, stop)]
    return sets, places


def _round_part(n: np.ndarray, part: int, whole: int) -> np.ndarray:
    """The rounded n * part / whole, without error of its own: (B,) int64."""
    times, rest = np.divmod(n, whole)  # n * part may be beyond an int64
    return times * part + (rest * part + whole // 2) // whole


def split_windows(count: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """`count` windows in proportion to weights: one at least of each set, and no more than it has."""
    shares = np.array(weights) / np.sum(weights) * count
    numbers = np.floor(shares).astype(np.int64)
    for most in np.argsort(numbers - shares, kind="stable")[: count - numbers.sum()]:
        numbers[most] += 1
    return [min(max(1, int(n)), limit) for n, limit in zip(numbers, limits, strict=True)]


def list_sets(folder: Path) -> list[str]:
    """Names of the complete sets in a folder."""
    return sorted(meta.parent.name for meta in folder.glob("*/meta.json"))


def describe_sets(folder: Path) -> str:
    """Which sets are in a folder, a line each with tokenizer and tokens: those of one tokenizer may be mixed."""
    lines = [f"prepared sets in {short_path(folder)}:"]
    for name in list_sets(folder):
        try:
            meta = read_meta(folder / name)
            lines.append(
                f"    {name}: tokenizer {meta.tokenizer['name']}, {describe_set(meta, folder / name)}"
            )
        except DataError as error:
            lines.append(f"    {name}: {error}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "    none"])
