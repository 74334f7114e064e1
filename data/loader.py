"""The windows of each training step and of validation.

The windows of a step are a pure function of (seed, step), so there is nothing to save or replay.
Window w of a split is tokens [w*T, w*T + T + 1): T inputs and their T targets. An epoch is a
pseudo-random permutation of all windows. Row r of step s is number s * batch_size + r in the
sequence of epochs.

A mixture is several prepared sets as one. Each row is first assigned to a set deterministically
(error diffusion): after n rows each set has weight * n rows, give or take two. A set's rows read
its windows in the order of a run on that set alone, so each set has its own epochs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data import DataError
from data.bins import Meta, Tokens, check_dataset, fingerprint, read_meta, sha256_of

ROUNDS = 6  # rounds of the Feistel network; another number changes the order of every run
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of SplitMix64
CANDIDATES = 2**16  # windows from which validation is chosen; bounds the work on a long split
STRETCH = 2**14  # tokens searched per step for the end of a document
FIXED_POINT = 2**20  # 1.0 in integer arithmetic: every machine chooses the same windows
SHARE_SUM = 2**30  # the sum of all shares; the product of two shares fits an int64
T = TypeVar("T")


def count_windows(tokens: Tokens, block_size: int) -> int:
    """The number of windows in `tokens`. Raises DataError if there is none."""
    if len(tokens) <= block_size:
        raise DataError(
            f"{tokens.name}: {len(tokens)} tokens, but one window of block_size {block_size} "
            f"needs {block_size + 1}. Prepare more text, or lower model.block_size"
        )
    return (len(tokens) - 1) // block_size


class Windows:
    """The windows of the same split of several sets: those of the first set, then of the second.

    Raises DataError if a part has no window.
    """

    def __init__(self, parts: Sequence[Tokens], block_size: int) -> None:
        self.parts = parts
        self.block_size = block_size  # T, tokens per window
        counts = (count_windows(part, block_size) for part in parts)
        self.starts = [0, *accumulate(counts)]  # first window of each part, and the end

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read windows `indices` (B,) int64: inputs and targets, (B, T) int64 each.

        Raises DataError, see `Tokens.read`.
        """
        ids = np.empty((len(indices), self.block_size + 1), np.uint16)
        for row, index in enumerate(indices.tolist()):
            part = bisect_right(self.starts, index) - 1
            start = (index - self.starts[part]) * self.block_size
            ids[row] = self.parts[part].read(start, self.block_size + 1)
        return ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)


class Loader:
    """Training batches. The batch of a step is the same for any number of ranks or micro-batches.

    Args:
        parts: the training split of each of S sets.
        block_size: T, tokens per window.
        batch_size: windows per step, over all ranks.
        seed: decides the order of the windows.
        weights: (S,) weight of each set in a mixture.
    """

    def __init__(
        self,
        parts: Sequence[Tokens],
        block_size: int,
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        self._windows = Windows(parts, block_size)
        self._counts = np.diff(self._windows.starts)  # (S,) windows of each set
        self._shares = to_shares(weights)
        self._batch_size = batch_size
        self._seed = seed

    def count_epochs(self, steps: int) -> np.ndarray:
        """The number of times that each set is read in `steps` steps, (S,)."""
        weights = self._shares / self._shares.sum()
        return steps * self._batch_size * weights / self._counts

    def batch(
        self, step: int, start: int = 0, count: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows [start, start + count) of the batch of `step`; by default all rows from `start`.

        Steps count from 0. Returns inputs and targets, (count, T) int64 each.
        """
        return self._windows.read(self.indices(step, start, count))

    def indices(self, step: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """The windows of rows [start, start + count), (count,) int64, numbered over all sets."""
        if count is None:
            count = self._batch_size - start
        assert step >= 0 and 0 <= start <= start + count <= self._batch_size
        first = step * self._batch_size + start
        sets, numbers = assign_rows(first + np.arange(count), self._shares)
        sizes = self._counts[sets]
        epochs, positions = np.divmod(numbers, sizes)
        first_windows = np.array(self._windows.starts)[sets]
        return first_windows + permute(positions, sizes, self._seed, epochs)


def fixed_windows(tokens: Tokens, block_size: int, count: int) -> np.ndarray:
    """Choose the windows of every evaluation.

    Windows spread evenly over tokens come mostly from a few long documents. They are correlated,
    so their mean has a higher variance. So a cap limits the windows per document, see
    `sample_documents`. Long documents therefore weigh less in the mean loss than in the split. If
    there are many more documents than windows, the cap is 1 and few documents reach it.

    Args:
        tokens: a split. If the ends of its documents are unknown, windows are spread evenly.
        block_size: T, tokens per window.
        count: the number of windows to choose; all windows if there are fewer.

    Returns:
        (W,) int64, indices of windows in ascending order, the same for the same arguments.

    Source: systematic sampling with probability proportional to size, sizes capped (Cochran,
    Sampling Techniques).
    """
    n = count_windows(tokens, block_size)
    count = min(count, n)
    candidates = spread_evenly(n, min(n, max(count, CANDIDATES)))
    if count == len(candidates):
        return candidates
    documents = window_documents(tokens, block_size, candidates)
    _, sizes = np.unique(documents, return_counts=True)  # (D,) candidates of each document
    if len(sizes) == 1:
        return spread_evenly(n, count)
    return candidates[sample_documents(sizes, count)]


def measure(sizes: np.ndarray, cap: int, scale: int) -> np.ndarray:
    """Lengths (D,) int64 of documents of `sizes` windows, in units of 1 / FIXED_POINT."""
    return np.minimum(sizes * scale, cap * FIXED_POINT)


def sample_documents(sizes: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` windows of D documents so that no document has more than it must.

    The documents are laid end to end on a line. Each has a length in proportion to its windows,
    but at most the cap, and all lengths sum to `count`. The windows are at `count` points at equal
    distances.

    Example: documents of 1, 2 and 6 windows, count 4. With a cap of 1 there would be 3 windows, so
    the cap is 2. A scale of 2/3 gives lengths min(1 * 2/3, 2), min(2 * 2/3, 2), min(6 * 2/3, 2),
    which sum to 4. The points 0.5, 1.5, 2.5 and 3.5 give the documents 1, 1 and 2 windows.

    Args:
        sizes: (D,) int64, windows of each document, more than `count` in all.
        count: the number of windows to choose.

    Returns:
        (count,) int64, ascending indices among all windows in the order of the documents.
    """
    unit = FIXED_POINT
    # the least of each that is enough for `count` windows
    cap = bisect_left(range(count), count, key=lambda n: np.minimum(sizes, n).sum())
    scale = bisect_left(range(unit), count * unit, key=lambda n: measure(sizes, cap, n).sum())
    lengths = measure(sizes, cap, scale)
    ends = np.cumsum(lengths)
    points = (2 * np.arange(count) + 1) * ends[-1] // (2 * count)
    owners = np.searchsorted(ends, points, side="right")  # (count,) the document at each point
    distances = points - ends[owners] + lengths[owners]  # distance from the start of that document
    windows_of_owner = distances * sizes[owners] // lengths[owners]
    first_windows = np.cumsum(sizes) - sizes
    return first_windows[owners] + windows_of_owner


class Validation(NamedTuple):
    """The windows of every evaluation."""

    source: Windows
    windows: np.ndarray  # (W,) int64, indices of windows
    documents: np.ndarray  # (W,) int64, a number for each document
    sets: np.ndarray  # (W,) int64, index of the window's set
    weights: np.ndarray  # (W,) weight in the mean, 1 on average; a set has W times its own weight


def choose_validation(
    parts: Sequence[Tokens],
    block_size: int,
    count: int,
    weights: Sequence[float] = (1.0,),
) -> Validation:
    """Choose the windows of every evaluation: `fixed_windows` of each set's validation split.

    `count` is split between the sets by weight; a set that is too short gives all its windows.
    """
    source = Windows(parts, block_size)
    counts = split_windows(count, weights, np.diff(source.starts).tolist())
    windows = []
    documents = []
    next_document = 0
    for part, first_window, part_count in zip(parts, source.starts[:-1], counts, strict=True):
        indices = fixed_windows(part, block_size, part_count)
        part_documents = next_document + window_documents(part, block_size, indices)
        next_document = part_documents[-1] + 1
        windows.append(first_window + indices)
        documents.append(part_documents)
    sizes = np.array([len(indices) for indices in windows])
    factors = np.array(weights) / np.sum(weights) * sizes.sum() / sizes  # exactly 1 for one set
    return Validation(
        source=source,
        windows=np.concatenate(windows),
        documents=np.concatenate(documents),
        sets=np.repeat(np.arange(len(parts)), sizes),
        weights=np.repeat(factors, sizes),
    )


def spread_evenly(n: int, count: int) -> np.ndarray:
    """`count` numbers below n at equal distances, (count,) int64, ascending."""
    return np.arange(count) * n // count


def window_documents(tokens: Tokens, block_size: int, indices: np.ndarray) -> np.ndarray:
    """Number the documents of windows `indices` (W,) int64, ascending: (W,) int64.

    A window belongs to the document of its middle target. Numbers are as in `number_documents`.
    """
    middle_targets = indices * block_size + (block_size + 1) // 2
    return number_documents(tokens, middle_targets)


def number_documents(tokens: Tokens, positions: np.ndarray) -> np.ndarray:
    """Number the documents of the tokens at `positions`, (n,) int64, ascending.

    Returns:
        (n,) int64, ascending numbers, equal for tokens of one document; all 0 if `tokens.eot` is
        None.
    """
    is_next = [False]  # another document than the last position's
    for start, stop in pairwise(positions.tolist()):
        is_next.append(_has_end(tokens, start, stop))
    return np.cumsum(is_next)


def _has_end(tokens: Tokens, start: int, stop: int) -> bool:
    """True if a document ends in tokens [start, stop); reads no further than its end."""
    for first in range(start, stop, STRETCH):
        if (tokens.read(first, min(STRETCH, stop - first)) == tokens.eot).any():
            return True
    return False


def prefetch(items: Iterable[T]) -> Generator[T, None, None]:
    """Yield the items; a thread makes the next one while one is in use."""
    with ThreadPoolExecutor(1) as thread:
        source = iter(items)
        end: Any = object()
        following = thread.submit(next, source, end)
        while True:
            item = following.result()
            if item is end:
                return
            following = thread.submit(next, source, end)
            yield item


def permute(indices: np.ndarray, n: int | np.ndarray, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Apply a pseudo-random permutation of [0, n), different for each seed and epoch.

    It needs O(B) memory.

    Args:
        indices: (B,) int64 in [0, n).
        n: the size of the permutation; (B,) int64 if it differs between indices.
        seed: any integer.
        epochs: (B,) int64, the epoch of each index.

    Returns:
        (B,) int64, the permuted indices.

    Source: a Feistel network (Luby and Rackoff 1988) permutes the next power of four. Indices
    outside [0, n) are permuted again until they are inside (cycle walking, Black and Rogaway 2002).
    """
    sizes = np.broadcast_to(n, len(indices))
    bits = np.frexp(sizes - 1.0)[1]  # int.bit_length of the largest index
    half = (bits + 1) // 2  # bits in each half of the network
    half = np.maximum(3, half).astype(np.uint64)  # fewer than 64 values are mixed badly
    seeds = np.full(len(indices), seed % 2**64, np.uint64)
    keys = _mix(_mix(seeds) + epochs.astype(np.uint64) * GOLDEN)
    out = indices.astype(np.uint64)
    outside = np.arange(len(out))  # positions in `out` that need another pass
    while len(outside):
        out[outside] = _feistel(out[outside], keys[outside], half[outside])
        outside = outside[out[outside] >= sizes[outside]]
    return out.astype(np.int64)


def stream_seed(seed: int, *numbers: int) -> int:
    """A seed in [0, 2^63) for the random stream of `seed` and `numbers`, for instance (step, rank).

    The same on every platform and Python version, unlike `hash`. The order of `numbers` matters.
    """
    state = np.zeros(1, np.uint64)
    for number in (seed, *numbers):
        state = _mix(state + np.uint64(number % 2**64))
    return int(state[0] >> np.uint64(1))


def _feistel(x: np.ndarray, keys: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Permute [0, 4^half) by a Feistel network with `keys`. All arguments are (B,) uint64."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left = x >> half
    right = x & mask
    for number in range(1, ROUNDS + 1):
        round_keys = _mix(keys + np.uint64(number))
        scrambled = _mix(right ^ round_keys) & mask
        left, right = right, left ^ scrambled
    return left << half | right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood 2014): every bit of x affects every bit of the result.

    x and the result are (B,) uint64.
    """
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def check_sets(folders: Sequence[Path], vocab_size: int) -> list[Meta]:
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
    return [check_dataset(folder, vocab_size) for folder in folders]


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
    """Convert weights to integers that sum to SHARE_SUM: (S,) int64."""
    exact = np.array(weights, np.float64) / np.sum(weights) * SHARE_SUM
    shares = np.floor(exact).astype(np.int64)
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
