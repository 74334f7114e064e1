"""The windows of each training step and of validation.

The windows of a step are a pure function of (seed, step), so there is nothing to save or replay.
Window w of a split is tokens [w*T, w*T + T + 1): T inputs and their T targets. An epoch is a
pseudo-random permutation of all windows. Row r of step s is number s * batch_size + r in the
sequence of epochs. In a mixture (mixture.py) each row is first assigned to a set, and each set has
its own sequence of epochs.
"""

from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data.bins import Tokens
from data.mixture import JoinedTokens, assign_rows, count_windows, split_windows, to_shares

ROUNDS = 6  # rounds of the Feistel network; another number changes the order of every run
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of SplitMix64
CANDIDATES = 2**16  # windows from which validation is chosen; bounds the work on a long split
STRETCH = 2**14  # tokens searched per step for the end of a document
FIXED_POINT = 2**20  # 1.0 in integer arithmetic: every machine chooses the same windows
T = TypeVar("T")


class Loader:
    """Training batches. The batch of a step is the same for any number of ranks or micro-batches.

    Args:
        tokens: the training split, or the training split of each of S sets.
        block_size: T, tokens per window.
        batch_size: windows per step, over all ranks.
        seed: decides the order of the windows.
        weights: (S,) weight of each set in a mixture.
    """

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        block_size: int,
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        parts = [tokens] if isinstance(tokens, Tokens) else tokens
        self._tokens = JoinedTokens(parts, block_size)
        self._counts = np.diff(self._tokens.starts)  # (S,) windows of each set
        self._shares = to_shares(weights)
        self._block_size = block_size
        self._batch_size = batch_size
        self._seed = seed

    def locate(self, step: int, start: int = 0, count: int | None = None) -> list[Any]:
        """The sources of a step's rows, for messages.

        For one set the index of each window, for a mixture [name of the split, index there].
        """
        indices = self._indices(step, start, count).tolist()
        if len(self._counts) == 1:
            return indices
        sources = [self._tokens.find_part(index) for index in indices]
        return [[part.name, window] for part, window in sources]

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
        return windows(self._tokens, self._indices(step, start, count), self._block_size)

    def _indices(self, step: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """The windows of rows [start, start + count), (count,) int64, numbered over all sets."""
        if count is None:
            count = self._batch_size - start
        assert step >= 0 and 0 <= start <= start + count <= self._batch_size
        first = step * self._batch_size + start
        sets, numbers = assign_rows(first + np.arange(count), self._shares)
        sizes = self._counts[sets]
        epochs, positions = np.divmod(numbers, sizes)
        first_windows = np.array(self._tokens.starts)[sets]
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
    cap = find_cap(sizes, count)
    scale = find_scale(sizes, cap, count)
    lengths = np.minimum(sizes * scale, cap * FIXED_POINT)  # (D,)
    ends = np.cumsum(lengths)
    points = (2 * np.arange(count) + 1) * ends[-1] // (2 * count)
    owners = np.searchsorted(ends, points, side="right")  # (count,) the document at each point
    distances = points - ends[owners] + lengths[owners]  # distance from the start of that document
    windows_of_owner = distances * sizes[owners] // lengths[owners]
    first_windows = np.cumsum(sizes) - sizes
    return first_windows[owners] + windows_of_owner


def find_cap(sizes: np.ndarray, count: int) -> int:
    """The least cap on the windows per document that leaves at least `count` windows."""

    def count_capped(cap: int) -> int:
        return np.minimum(sizes, cap).sum()

    return bisect_left(range(count + 1), count, key=count_capped)


def find_scale(sizes: np.ndarray, cap: int, count: int) -> int:
    """The least length per window with which capped documents have a total length of `count`.

    Lengths are in units of 1 / FIXED_POINT.
    """

    def total_length(scale: int) -> int:
        return np.minimum(sizes * scale, cap * FIXED_POINT).sum()

    return bisect_left(range(FIXED_POINT + 1), count * FIXED_POINT, key=total_length)


class Validation(NamedTuple):
    """The windows of every evaluation."""

    tokens: Tokens | JoinedTokens
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
    joined = JoinedTokens(parts, block_size)
    counts = split_windows(count, weights, np.diff(joined.starts).tolist())
    windows = []
    documents = []
    next_document = 0
    for part, first_window, part_count in zip(parts, joined.starts[:-1], counts, strict=True):
        indices = fixed_windows(part, block_size, part_count)
        part_documents = next_document + window_documents(part, block_size, indices)
        next_document = part_documents[-1] + 1
        windows.append(first_window + indices)
        documents.append(part_documents)
    sizes = np.array([len(indices) for indices in windows])
    if len(parts) == 1:
        factors = np.ones(1)
    else:
        factors = np.array(weights) / np.sum(weights) * sizes.sum() / sizes
    return Validation(
        tokens=joined,
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

    Reads the split from the first position to the last, in constant memory. Tokens between the end
    of a position's document and the next position are skipped.

    Returns:
        (n,) int64, ascending numbers, equal for tokens of one document; all 0 if `tokens.eot` is
        None.
    """
    numbers = np.zeros(len(positions), np.int64)
    if tokens.eot is None:
        return numbers
    start = 0  # the next token to read
    ended = 0  # documents whose end was read so far
    known = 0  # positions whose document is known
    while known < len(positions):
        if known == 0 or numbers[known - 1] < ended:  # the last position's document has ended
            start = max(start, int(positions[known]))
        ids = tokens.read(start, min(STRETCH, len(tokens) - start))
        ends = start + np.flatnonzero(ids == tokens.eot)
        start += len(ids)
        stop = int(np.searchsorted(positions, start))
        numbers[known:stop] = ended + np.searchsorted(ends, positions[known:stop])
        ended += len(ends)
        known = stop
    return numbers


def windows(
    tokens: Tokens | JoinedTokens, indices: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read windows `indices` (B,) int64: inputs and targets, (B, T) int64 each.

    Raises DataError, see `Tokens.read`.
    """
    ids = np.empty((len(indices), block_size + 1), np.uint16)
    for row, index in enumerate(indices):
        ids[row] = tokens.read(int(index) * block_size, block_size + 1)
    return ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)


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
