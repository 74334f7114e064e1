"""Mixtures: several prepared sets as one.

Rows of the batches are assigned to sets deterministically (error diffusion): after n rows each set
has weight * n rows, give or take two. A set's rows read its windows in the order of a run on that
set alone, so each set has its own epochs.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data import DataError
from data.bins import Meta, Tokens, check_dataset, fingerprint, read_meta, sha256_of

SHARE_SUM = 2**30  # the sum of all shares; the product of two shares fits an int64


def count_windows(tokens: Tokens, block_size: int) -> int:
    """The number of windows in `tokens`. Raises DataError if there is none."""
    if len(tokens) <= block_size:
        raise DataError(
            f"{tokens.name}: {len(tokens)} tokens, but one window of block_size {block_size} "
            f"needs {block_size + 1}. Prepare more text, or lower model.block_size"
        )
    return (len(tokens) - 1) // block_size


class JoinedTokens:
    """The same split of several sets as one: the windows of the first set, then of the second.

    Raises DataError if a part has no window.
    """

    def __init__(self, parts: Sequence[Tokens], block_size: int) -> None:
        self.parts = parts
        self.block_size = block_size  # T, tokens per window
        counts = (count_windows(part, block_size) for part in parts)
        self.starts = [0, *itertools.accumulate(counts)]  # first window of each part, and the end

    def find_part(self, window: int) -> tuple[Tokens, int]:
        """The part that has `window`, and the number of the window there."""
        number = bisect_right(self.starts, window) - 1
        return self.parts[number], window - self.starts[number]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of one window, (count,) uint16; window w starts at w * T.

        See `Tokens.read`.
        """
        part, window = self.find_part(start // self.block_size)
        return part.read(window * self.block_size + start % self.block_size, count)


def check_sets(folders: Sequence[Path], vocab_size: int, reads_large: bool = True) -> list[Meta]:
    """Check every set with `check_dataset`, and that all sets have the same tokenizer.

    Raises DataError if one of these checks fails.
    """
    metas = [read_meta(folder) for folder in folders]
    first = metas[0].tokenizer
    for folder, meta in zip(folders, metas, strict=True):
        if meta.tokenizer != first:
            raise DataError(
                f"{folder}: its tokenizer {meta.tokenizer['name']!r} is not that of {folders[0]}, "
                f"{first['name']!r}, and a mixture has one. Leave one of the sets out, or prepare "
                f"it again with the other's --tokenizer"
            )
    return [check_dataset(folder, vocab_size, reads_large) for folder in folders]


def check_documents(folders: Sequence[Path], metas: Sequence[Meta]) -> None:
    """Raise DataError if the training split of a set is a single document."""
    for folder, meta in zip(folders, metas, strict=True):
        if meta.splits["train"].documents < 2:
            raise DataError(
                f"{folder}: its training split is one document, so data.document_mask changes "
                f"nothing. Leave it out, or prepare the text again as documents, one to a file or "
                f"to a row of .jsonl"
            )


def identify(metas: Sequence[Meta], weights: Sequence[float]) -> dict[str, str]:
    """The fingerprint of a set or a mixture.

    That of one set is `bins.fingerprint`; `data` of a mixture hashes all its sets and weights.
    """
    prints = [fingerprint(meta) for meta in metas]
    if len(metas) == 1:
        return prints[0]
    weighted = []
    for share, set_print in zip(to_shares(weights).tolist(), prints, strict=True):
        weighted.append([share, set_print["data"]])
    return {"data": sha256_of(weighted), "tokenizer": prints[0]["tokenizer"]}


def to_shares(weights: Sequence[float]) -> np.ndarray:
    """Convert weights to integers that sum to SHARE_SUM, each at least 1: (S,) int64."""
    exact = np.array(weights, np.float64) / np.sum(weights) * SHARE_SUM
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    shares[np.argmax(shares)] += SHARE_SUM - shares.sum()
    return shares


def assign_rows(rows: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Assign rows to sets.

    Rows are split between two groups of sets, then within each group, and so on. Of the first n
    rows of a group, its left side has n * (share of the left side), rounded. So each split adds at
    most half a row to the error of a set, and splits further up add less.

    Args:
        rows: (B,) int64, counted from the first row of the first step.
        shares: (S,) int64, see `to_shares`.

    Returns:
        (B,) int64 each: the set of each row, and the row's number among the rows of that set.
    """
    largest_first = np.argsort(-shares, kind="stable")  # so a group halves more evenly
    return _divide(rows.astype(np.int64), largest_first, shares)


def _divide(
    numbers: np.ndarray, group: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Assign rows of a group of sets, as `assign_rows` does.

    Args:
        numbers: (B,) int64, the rows' numbers among all rows of the group.
        group: (G,) int64, the sets.
        shares: (S,) int64, of all sets.

    Returns:
        As `assign_rows`.
    """
    if len(group) == 1:
        return np.full(len(numbers), group[0]), numbers
    sums = np.cumsum(shares[group])
    total = sums[-1]
    middle = 1 + np.argmin(np.abs(2 * sums[:-1] - total))  # the most even halves
    left_share = sums[middle - 1]
    # rows of the left side before this row, and before the next
    before = _scale_rounded(numbers, left_share, total)
    before_next = _scale_rounded(numbers + 1, left_share, total)
    in_left = before_next > before
    sets = np.empty_like(numbers)
    places = np.empty_like(numbers)
    sets[in_left], places[in_left] = _divide(before[in_left], group[:middle], shares)
    in_right = ~in_left
    after = (numbers - before)[in_right]
    sets[in_right], places[in_right] = _divide(after, group[middle:], shares)
    return sets, places


def _scale_rounded(n: np.ndarray, part: int, total: int) -> np.ndarray:
    """Compute n * part / total, rounded, in integers: (B,) int64."""
    quotient, remainder = np.divmod(n, total)  # n * part could overflow an int64
    return quotient * part + (remainder * part + total // 2) // total


def split_windows(count: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Split `count` windows in proportion to weights: at least 1 per set, at most its limit."""
    exact = np.array(weights) / np.sum(weights) * count
    numbers = np.floor(exact).astype(np.int64)
    missing = count - numbers.sum()
    largest_remainders = np.argsort(numbers - exact, kind="stable")[:missing]
    numbers[largest_remainders] += 1
    return np.minimum(np.maximum(1, numbers), limits).tolist()


def list_sets(folder: Path) -> list[str]:
    """Names of the complete sets in a folder."""
    return sorted(meta.parent.name for meta in folder.glob("*/meta.json"))
