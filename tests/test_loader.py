"""data/loader.py: which windows training and evaluation read, against counting in plain Python."""

import queue
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError, loader
from data.bins import Tokens
from data.loader import (
    Loader,
    fixed_windows,
    permute,
    prefetch,
    sample_documents,
    stream_seed,
    window_documents,
)


def counting(n: int) -> Tokens:
    """Tokens 0, 1, 2, … in two shards, so that a window's first token is its position."""
    ids = np.arange(n, dtype=np.uint16)
    return Tokens([ids[: n // 3], ids[n // 3 :]])


@given(
    n_windows=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    block_size=st.integers(1, 5),
    seed=st.integers(),
    cut=st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_every_window_once_an_epoch_however_batches_are_sliced(
    n_windows, batch_size, block_size, seed, cut
):
    read = Loader([counting(n_windows * block_size + 1)], block_size, batch_size, seed)
    cut = min(cut, batch_size)
    seen = []
    for step in range(-(-3 * n_windows // batch_size)):
        parts = (step, 0, cut), (step, cut)
        located = np.concatenate([read.indices(*part) for part in parts])
        x = block_size * located[:, None] + np.arange(block_size)
        whole = np.array(read.batch(step))
        assert np.array_equal(whole, [x, x + 1]) and whole.dtype == np.int64
        assert np.array_equal(whole, np.concatenate([read.batch(*p) for p in parts], axis=1))
        seen += located.tolist()
    for epoch in range(3):
        mine = seen[epoch * n_windows : (epoch + 1) * n_windows]
        assert sorted(mine) == list(range(n_windows))


def test_order_is_frozen():
    """A changed order would silently unpair new runs from old ones."""
    assert permute(np.arange(8), 8, 0, np.zeros(8, np.int64)).tolist() == [1, 6, 2, 0, 4, 3, 7, 5]
    assert permute(np.array([10**9]), 10**10, 1337, np.array([3])).tolist() == [5094186605]
    epoch, first = divmod(10 * 10**9, 25)  # a far step of 10 of 25 windows
    order = permute(np.arange(25), 25, 1, np.full(25, epoch)).tolist()
    assert (
        Loader([counting(101)], 4, 10, seed=1).indices(10**9, 2, 5).tolist()
        == order[first + 2 : first + 7]
    )
    # and validation: the example of `sample_documents`, whose points are at 1/2, 5/4, 3/2 and 9/2
    # windows of the documents 0, 1, 2 and 2
    assert sample_documents(np.array([1, 2, 6]), 4).tolist() == [0, 1 + 1, 3 + 1, 3 + 4]
    # and the seeds of streams, on which dropout of a resumed run depends
    assert stream_seed(0) == 8147104208329303767
    seeds = {(0, 0): 3269731276231068113, (0, 1): 7635188740105049934, (1, 0): 8663415526776124837}
    assert {place: stream_seed(1337, *place) for place in seeds} == seeds
    assert stream_seed(-1, 2**64 + 3) == stream_seed(2**64 - 1, 3)


def test_fixed_windows_are_spread_over_the_split():
    """Evenly over tokens without known ends, in one document, and where all are asked for."""
    even = [i * 1099 // 10 for i in range(10)]
    for tokens, count, wanted in (
        (counting(101), 5, [0, 5, 10, 15, 20]),
        (counting(101), 25, list(range(25))),
        (counting(101), 26, list(range(25))),
        (counting(4400), 10, even),
        (documents_of(4400), 10, even),
    ):
        assert fixed_windows(tokens, 4, count).tolist() == wanted
    assert fixed_windows(documents_of(*[40] * 10, 4000), 4, 10).tolist() != even
    assert window_documents(counting(4400), 4, np.arange(9)).tolist() == [0] * 9


# tokens of documents
LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=30)


def documents_of(*lengths: int) -> Tokens:
    """Documents of that many tokens, the last of each end-of-text (7), in two shards."""
    ids = np.zeros(sum(lengths), np.uint16)
    ids[np.cumsum(lengths) - 1] = 7
    return Tokens([ids[: len(ids) // 3], ids[len(ids) // 3 :]], eot=7)


def label_windows(tokens: Tokens, block_size: int) -> list[int]:
    """The document of each window's middle target, by counting."""
    ids = tokens.read(0, len(tokens)).tolist()
    middles = [
        window * block_size + (block_size + 1) // 2
        for window in range((len(ids) - 1) // block_size)
    ]
    return [ids[:middle].count(7) for middle in middles]


@given(
    lengths=LENGTHS,
    block_size=st.integers(1, 9),
    count=st.integers(1, 60),
    size=st.sampled_from([16, 2**16]),
    data=st.data(),
    stretch=st.sampled_from([1, 2, 5, 64, 2**14]),
)
@settings(deadline=None, max_examples=150)
def test_validation_takes_no_more_of_a_document_than_it_needs(
    lengths, block_size, count, size, data, stretch
):
    """Windows of one document have equal numbers, whichever are asked for and lie between them."""
    tokens = documents_of(*lengths, block_size)
    labels = label_windows(tokens, block_size)
    n = len(labels)
    asked = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "CANDIDATES", size)
        patch.setattr(loader, "STRETCH", stretch)
        chosen = fixed_windows(tokens, block_size, count).tolist()
        numbers = window_documents(tokens, block_size, asked)
    assert np.array_equal(np.sign(np.diff(numbers)), np.sign(np.diff(np.array(labels)[asked])))
    assert len(chosen) == min(count, n) and chosen == sorted(set(chosen)) and 0 <= chosen[0]
    size = min(n, max(len(chosen), size))
    sizes = Counter(labels[i * n // size] for i in range(size)).values()
    least = 1
    while sum(min(least, windows) for windows in sizes) < len(chosen):
        least += 1
    if len(chosen) < size and len(sizes) > 1:
        assert max(Counter(labels[window] for window in chosen).values()) == least


def test_too_few_tokens_for_a_window():
    for chosen in (Loader([counting(9)], 8, 1, 0).indices(0), fixed_windows(counting(9), 8, 1)):
        assert chosen.tolist() == [0]
    for read in (lambda: Loader([counting(8)], 8, 1, 0), lambda: fixed_windows(counting(8), 8, 1)):
        with pytest.raises(DataError, match="8 tokens, but one .* needs 9.*model.block_size"):
            read()


def test_prefetch_makes_one_item_ahead_and_raises_errors_at_their_item():
    made = queue.Queue()

    def items():
        for i in range(4):
            made.put(i)
            yield i
        raise DataError("broken")

    source = prefetch(items())
    first = next(source), made.get(timeout=120), made.get(timeout=120)  # the next is made by now
    assert first == (0, 0, 1) and made.empty()
    assert [next(source) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(DataError, match="broken"):
        next(source)
    assert list(prefetch(range(3))) == [0, 1, 2]
