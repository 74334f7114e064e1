"""Which windows a training step reads: a pure function of (seed, step), so there is nothing to save or replay.

Window w of a split is tokens [w*T, w*T + T + 1): T inputs and the T tokens that follow them. An
epoch is a pseudo-random permutation of all windows; row r of step s is number s * batch_size + r in
the sequence of epochs. With several sets (mixture.py) that number is dealt to a set first, which
has epochs of its own.
"""

from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data.bins import Tokens
from data.mixture import JoinedTokens, assign_rows, count_windows, split_windows, to_shares

ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# windows among which those for validation are chosen, at most, however long the split is
CANDIDATES = 2**16
STRETCH = 2**14  # tokens that are searched at once for the end of a document
# of the length of a document where windows are chosen: integers, so every machine chooses the same
UNIT = 2**20
T = TypeVar("T")


class Loader:
    """Training batches. The batch of a step is the same however ranks and micro-batches slice it.

    Args:
        tokens: of the training split; of each set of a mixture.
        block_size: T, tokens per window.
        batch_size: windows per step, over all ranks.
        seed: decides the order of the windows.
        weights: of the sets.
    """

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        block_size: int,
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        self._tokens = JoinedTokens([tokens] if isinstance(tokens, Tokens) else tokens, block_size)
        self._counts, self._shares = np.diff(self._tokens.starts), to_shares(weights)
        self._block_size, self._batch_size, self._seed = block_size, batch_size, seed

    def locate(self, step: int, start: int = 0, count: int | None = None) -> list[Any]:
        """Where those rows are from: each one's window, of a mixture the folder of its split and the window there."""
        indices = self.indices(step, start, count)
        if len(self._counts) == 1:
            return indices.tolist()
        sets = np.searchsorted(self._tokens.starts, indices, side="right") - 1
        pairs = zip(sets, indices, strict=True)
        return [
            [self._tokens.parts[part].name, int(index) - self._tokens.starts[part]]
            for part, index in pairs
        ]

    def count_epochs(self, steps: int) -> np.ndarray:
        """How often each set is read in that many steps, (S,)."""
        return steps * self._batch_size * (self._shares / self._shares.sum()) / self._counts

    def batch(
        self, step: int, start: int = 0, count: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows [start, start + count) of the batch of `step`, which counts from 0; by default all rows from `start`.

        Inputs and targets, (count, T) int64 each.
        """
        return windows(self._tokens, self.indices(step, start, count), self._block_size)

    def indices(self, step: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """The windows of those rows, (count,) int64; those of a mixture's later sets follow those of the earlier."""
        count = self._batch_size - start if count is None else count
        assert step >= 0 and 0 <= start <= start + count <= self._batch_size
        first = step * self._batch_size + start
        sets, places = assign_rows(first + np.arange(count), self._shares)
        n = self._counts[sets]
        epochs, indices = np.divmod(places, n)
        return np.array(self._tokens.starts)[sets] + permute(indices, n, self._seed, epochs)


def fixed_windows(
    tokens: Tokens, block_size: int, count: int, spread: str = "documents"
) -> np.ndarray:
    """Choose the windows of every evaluation.

    Evenly over tokens, a document has windows in proportion to its length, so a few books may hold
    most of them, and windows of one document are alike: their mean varies more than their number
    says. Spread over documents, none has more than c windows, c being the least number that
    suffices for `count`; documents below c keep their proportion to each other. So long documents
    weigh less in the mean loss than they do in the split; where there are many more documents than
    windows, c is 1 and few reach it.

    Args:
        tokens: of a split; without ends of documents its windows are spread evenly.
        block_size: T.
        count: how many; all windows if there are fewer.
        spread: over "documents" or "tokens".

    Returns:
        (W,) int64, indices of windows in ascending order, the same for the same arguments.

    Source: systematic sampling with probability proportional to size, sizes capped (Cochran,
    Sampling Techniques).
    """
    n = count_windows(tokens, block_size)
    count = min(count, n)
    candidates = spread_evenly(n, min(n, max(count, CANDIDATES)))
    if spread == "tokens" or count == len(candidates):
        return spread_evenly(n, count)
    documents = window_documents(tokens, block_size, candidates)
    # (D,): first candidate, how many
    _, first, sizes = np.unique(documents, return_index=True, return_counts=True)
    if len(sizes) == 1:
        return spread_evenly(n, count)
    most = 1 + bisect_left(range(1, count + 1), count, key=lambda c: np.minimum(sizes, c).sum())
    # Lay the documents end to end, `unit` per candidate but most * UNIT at most, and take `count`
    # points UNIT apart.
    unit = bisect_left(
        range(UNIT + 1), count * UNIT, key=lambda unit: np.minimum(most * UNIT, sizes * unit).sum()
    )
    lengths = np.minimum(most * UNIT, sizes * unit)
    stops = np.cumsum(lengths)
    points = (2 * np.arange(count) + 1) * stops[-1] // (2 * count)
    owners = np.searchsorted(stops, points, side="right")  # (count,) documents
    return candidates[
        first[owners] + (points - (stops - lengths)[owners]) * sizes[owners] // lengths[owners]
    ]


class Validation(NamedTuple):
    """What every evaluation reads."""

    tokens: Tokens | JoinedTokens
    windows: np.ndarray  # (W,) int64, indices of windows
    documents: np.ndarray  # (W,) int64, equal where they are of one document
    sets: np.ndarray  # (W,) int64, the set of each
    # (W,) of each window in the mean, 1 on average: a set's sum to its weight times W
    weights: np.ndarray


def choose_validation(
    parts: Sequence[Tokens],
    block_size: int,
    count: int,
    spread: str = "documents",
    weights: Sequence[float] = (1.0,),
) -> Validation:
    """Choose the windows of every evaluation: `fixed_windows` of the validation split of each set.

    Each set has its part of `count` by its weight, or as many as there are. T = `block_size`.
    """
    joined = JoinedTokens(parts, block_size)
    numbers = split_windows(count, weights, np.diff(joined.starts).tolist())
    chosen = [
        fixed_windows(part, block_size, n, spread) for part, n in zip(parts, numbers, strict=True)
    ]
    windows, documents = [], []
    for part, first, indices in zip(parts, joined.starts, chosen, strict=False):
        labels, after = (
            window_documents(part, block_size, indices),
            documents[-1][-1] + 1 if documents else 0,
        )
        windows.append(first + indices)
        documents.append(after + labels)
    sizes, W = np.array([len(indices) for indices in chosen]), sum(map(len, chosen))
    factors = np.array(weights) / np.sum(weights) * W / sizes if len(parts) > 1 else np.ones(1)
    return Validation(
        tokens=joined,
        windows=np.concatenate(windows),
        documents=np.concatenate(documents),
        sets=np.repeat(np.arange(len(parts)), sizes),
        weights=np.repeat(factors, sizes),
    )


def spread_evenly(n: int, count: int) -> np.ndarray:
    """`count` of the numbers below n, (count,) int64, ascending."""
    return np.arange(count) * n // count


def window_documents(tokens: Tokens, block_size: int, indices: np.ndarray) -> np.ndarray:
    """The documents of windows `indices` (W,) int64, ascending, as `number_documents` has them: (W,) int64.

    A window is of its middle target's document, so of that which has more than half of its targets,
    if one has.
    """
    return number_documents(tokens, indices * block_size + (block_size + 1) // 2)


def number_documents(tokens: Tokens, places: np.ndarray) -> np.ndarray:
    """Which tokens are of one document.

    Reads the split from the first of `places`, (n,) int64, ascending, to the last, in constant
    memory, and skips what lies between the end of a place's document and the next place.

    Returns:
        (n,) int64, ascending numbers, equal for tokens of one document; all 0 where `tokens.eot` is
        None.
    """
    numbers = np.zeros(len(places), np.int64)
    # token to read from; documents that ended before it; places whose document is known
    start = number = done = 0
    while done < len(places) and tokens.eot is not None:
        start = max(start, int(places[done])) if not done or number > numbers[done - 1] else start
        ids = tokens.read(start, min(STRETCH, len(tokens) - start))
        ends = start + np.flatnonzero(ids == tokens.eot)
        stop = int(np.searchsorted(places, start + len(ids)))
        numbers[done:stop] = number + np.searchsorted(ends, places[done:stop])
        start, number, done = start + len(ids), number + len(ends), stop
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
    """The same items, each made by another thread while the previous one is in use."""
    with ThreadPoolExecutor(1) as thread:
        source = iter(items)
        end: Any = object()
        following = thread.submit(next, source, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, source, end)
            yield item


def permute(indices: np.ndarray, n: int | np.ndarray, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Apply a pseudo-random permutation of [0, n), another one for each seed and epoch, in O(B) memory.

    Args:
        indices: (B,) int64 in [0, n).
        n: the size of what is permuted; (B,) int64 if that differs.
        seed: any integer.
        epochs: (B,) int64, of each index.

    Returns:
        (B,) int64, where the indices go.

    Source: a Feistel network (Luby and Rackoff 1988) permutes the next power of four; what leaves
    [0, n) passes it again until it is back (cycle walking, Black and Rogaway 2002).
    """
    sizes = np.broadcast_to(n, len(indices))
    bits = np.frexp(sizes - 1.0)[1]  # int.bit_length
    # bits per side; below 64 places it mixes badly
    half = np.maximum(3, (bits + 1) // 2).astype(np.uint64)
    seeds = np.full(len(indices), seed % 2**64, np.uint64)
    keys = _mix(_mix(seeds) + epochs.astype(np.uint64) * GOLDEN)
    out = indices.astype(np.uint64)
    outside = np.arange(len(out))
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
    """A permutation of [0, 4^half), each (B,), a different one for each of `keys`."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for round_ in range(1, ROUNDS + 1):
        left, right = right, left ^ (_mix(right ^ _mix(keys + np.uint64(round_))) & mask)
    return left << half | right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood 2014): every bit of x, (B,) uint64, affects every bit of the result."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
