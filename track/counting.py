"""A count table as a row of the contest: bytes predicted by modified Kneser-Ney smoothing.

    python -m track.counting            write track/records/edition-3/counting.json, minutes

It counts the windows that setting 0's runs of a rung train on, and predicts the same validation
windows. A model that is not clearly ahead of it may have learned no more than local statistics, so
it says little about routers.

Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling, 1998.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.command import build_parser, command, run_command
from common.files import write_atomic
from configure import Config
from runtime.preflight import open_data
from track.contest import COUNTING, FILE, RECORDS, load_protocol
from track.runner import Runner, prepare_data

# bytes before the predicted one; on the main rung 6 to 8 have 1.3464, 1.3348 and 1.3332
CONTEXT = 8


class Grams:
    """The n-grams of the training windows, numbered by rank.

    A gram's code is the number of its prefix, the first n - 1 tokens, times the vocabulary, plus
    its last token.
    """

    def __init__(self, codes: np.ndarray) -> None:
        """Number and count grams: codes (W, T - n + 1) int64."""
        found = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
        self.codes, self.first, numbers, self.counts = found  # (G,) each, but numbers
        self.numbers = numbers.reshape(codes.shape)

    def find(self, codes: np.ndarray) -> np.ndarray:
        """The numbers of codes; -1 for those that are not there."""
        places = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return np.where(self.codes[places] == codes, places, -1)


def predict(train: np.ndarray, val: np.ndarray, vocab_size: int, context: int) -> np.ndarray:
    """The probability of each token of `val`.

    Args:
        train: (W, T) int64, windows.
        val: (V, T) int64, windows.
        vocab_size: number of token ids.
        context: tokens before the predicted one that the longest grams have.

    Returns:
        (V, T). Contexts do not reach beyond a window, as for the models. These predict no window's
        first token.
    """
    probability = np.full(val.shape, 1 / vocab_size)
    grams = Grams(train)
    codes = val
    prefixes = np.zeros_like(val)  # of grams of one token: the empty context
    for length in range(1, context + 2):
        numbers = grams.find(codes)  # (V, T - length + 1)
        owners = grams.codes // vocab_size
        if length == 1:
            owners = np.zeros_like(owners)
        reached = probability[:, length - 1 :]
        if length > context:
            reached[:] = interpolate(grams.counts, owners, numbers, prefixes, reached)
            break
        # A shorter gram counts once for each different token before it: how often it comes is what
        # longer grams have predicted already.
        longer = Grams(join(grams.numbers, train[:, length:], vocab_size))
        row, column = np.divmod(longer.first, longer.numbers.shape[1])
        counts = np.bincount(grams.numbers[row, column + 1], minlength=len(grams.codes))
        reached[:] = interpolate(counts, owners, numbers, prefixes, reached)
        prefixes = numbers[:, :-1]
        codes = join(numbers, val[:, length:], vocab_size)
        grams = longer
    return probability


def join(numbers: np.ndarray, following: np.ndarray, vocab_size: int) -> np.ndarray:
    """Codes of grams with the token that follows; negative for grams that are not there."""
    before = numbers[:, :-1]
    return np.where(before < 0, -1, before * vocab_size + following)


def interpolate(
    counts: np.ndarray,
    owners: np.ndarray,
    numbers: np.ndarray,
    prefixes: np.ndarray,
    lower: np.ndarray,
) -> np.ndarray:
    """Probabilities by grams of one length, what discounts free given to the shorter ones.

    Args:
        counts: (G,) of each gram.
        owners: (G,) number of each gram's prefix.
        numbers: (V, T) grams that end in the predicted tokens; -1: not there.
        prefixes: (V, T) their prefixes; -1: not there.
        lower: (V, T) probabilities by shorter grams.
    """
    discounts = estimate_discounts(counts)[counts.clip(max=3)]  # (G,)
    totals = np.bincount(owners, counts)
    freed = np.bincount(owners, discounts)
    # number -1 reads the appended zero
    kept = np.append(counts - discounts, 0.0)[numbers]
    total = np.append(totals, 0.0)[prefixes]
    share = np.append(freed, 0.0)[prefixes]
    return np.where(total > 0, (kept + share * lower) / np.maximum(total, 1), lower)


def estimate_discounts(counts: np.ndarray) -> np.ndarray:
    """(4,) what is taken from counts of 0, 1, 2, and 3 or more; Chen and Goodman's estimate."""
    n = np.bincount(counts, minlength=5).clip(min=1)  # n[c] grams have a count of c
    y = n[1] / (n[1] + 2 * n[2])
    discounts = [0.0]
    for count in (1, 2, 3):
        discount = count - (count + 1) * y * n[count + 1] / n[count]
        discounts.append(max(0.0, discount))  # below zero only in texts of a few bytes
    return np.array(discounts)


def read_windows(config: Config) -> list[np.ndarray]:
    """The windows that a run of `config` trains on, and its validation windows: (W, T + 1)."""
    data = open_data(config)
    train = [data.loader.batch(step) for step in range(config.train.max_steps)]
    val = data.validation.source.read(data.validation.windows)
    texts = []
    for batches in (train, [val]):
        inputs, targets = (np.concatenate(part) for part in zip(*batches, strict=True))
        texts.append(np.hstack([inputs, targets[:, -1:]]))
    return texts


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the losses of all rungs."""
    build_parser("track.counting", __doc__).parse_args(argv)
    protocol = load_protocol(FILE)
    losses = {}
    for rung in protocol.rungs:
        config = Runner(FILE, protocol, rung, Path()).make_point(("dense", 0)).config
        prepare_data(config, protocol)
        train, val = read_windows(config)
        # discounts are for text that does not repeat
        probability = predict(np.unique(train, axis=0), val, config.model.vocab_size, CONTEXT)
        losses[rung] = round(float(-np.log(probability[:, 1:]).mean()), 4)
    write_atomic(RECORDS / COUNTING, json.dumps(losses) + "\n")


if __name__ == "__main__":
    run_command(main)
