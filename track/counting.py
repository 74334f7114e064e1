"""A count table as a row of the contest: bytes predicted by modified Kneser-Ney smoothing.

    python -m track.counting            write track/records/edition-3/counting.json, 5 minutes

It counts the windows that setting 0's runs of a rung train on, and predicts the same validation
windows. A model that is not clearly ahead of it may have learned no more than local statistics, so
it says little about routers.

Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling, 1998.
"""

import json
from collections.abc import Sequence

import numpy as np

from common.command import build_parser, command, run_command
from common.files import write_atomic
from configure import Config
from data.loader import windows
from runtime.preflight import open_data
from track.contest import COUNTING, FILE, RECORDS, load_protocol, load_rung
from track.runner import prepare_data

CONTEXTS = (6, 7, 8, 9)  # bytes before the predicted one; the best on the validation windows counts


class Grams:
    """The n-grams of the training windows, numbered by rank.

    A gram's code is the number of its prefix, the first n - 1 tokens, times the vocabulary, plus
    its last token.
    """

    def __init__(self, codes: np.ndarray) -> None:
        """Count grams: codes (W, T - n + 1) int64."""
        found = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
        self.codes, self.first, numbers, self.counts = found  # (G,) each, but numbers
        self.numbers = numbers.reshape(codes.shape)

    def find(self, codes: np.ndarray) -> np.ndarray:
        """The numbers of codes; -1 for those that are not there."""
        places = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return np.where(self.codes[places] == codes, places, -1)


def predict(train: np.ndarray, val: np.ndarray, vocab_size: int, context: int) -> np.ndarray:
    """The probability of each token of `val` but a window's first.

    Args:
        train: (W, T) int64, windows.
        val: (V, T) int64, windows.
        vocab_size: number of token ids.
        context: tokens before the predicted one that the longest grams have.

    Returns:
        (V, T - 1). Contexts do not reach beyond a window, as for the models.
    """
    probability = np.full((len(val), val.shape[1] - 1), 1 / vocab_size)
    grams = Grams(train)
    codes = val
    prefixes = np.zeros_like(val)  # of grams of one token: the empty context
    for length in range(1, context + 2):
        numbers = grams.find(codes)  # (V, T - length + 1)
        longer = None
        counts = grams.counts
        if length <= context:
            # A shorter gram counts once for each different token before it: its frequency is
            # what longer grams have already predicted.
            longer = Grams(join(grams.numbers, train[:, length:], vocab_size))
            row, column = np.divmod(longer.first, longer.numbers.shape[1])
            suffixes = grams.numbers[row, column + 1]
            counts = np.bincount(suffixes, minlength=len(counts))
        tail = slice(1, None) if length == 1 else slice(None)  # a window's first is not predicted
        lower = probability[:, max(0, length - 2) :]
        owners = np.zeros_like(grams.codes) if length == 1 else grams.codes // vocab_size
        lower[:] = interpolate(counts, owners, numbers[:, tail], prefixes[:, tail], lower)
        if longer is not None:
            prefixes = numbers[:, :-1]
            codes = join(numbers, val[:, length:], vocab_size)
            grams = longer
    return probability


def join(numbers: np.ndarray, following: np.ndarray, vocab_size: int) -> np.ndarray:
    """Codes of grams with the token that follows; negative for grams that are not there."""
    return numbers[:, :-1] * vocab_size + np.where(numbers[:, :-1] < 0, 0, following)


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
    n1, n2, n3, n4 = np.maximum(np.bincount(counts, minlength=5)[1:5], 1)
    y = n1 / (n1 + 2 * n2)
    discounts = [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
    return np.clip(discounts, 0, [0, 1, 2, 3])


def score(config: Config) -> float:
    """The lowest mean loss over CONTEXTS of the windows that a run of `config` reads, nats."""
    data = open_data(config)
    texts = []
    for step in range(config.train.max_steps):
        x, y = data.loader.batch(step)
        texts.append(np.hstack([x, y[:, -1:]]))
    train = np.concatenate(texts).astype(np.int64)
    x, y = windows(data.validation.tokens, data.validation.windows, config.model.block_size)
    val = np.hstack([x, y[:, -1:]]).astype(np.int64)
    losses = []
    for context in CONTEXTS:
        probability = predict(train, val, config.model.vocab_size, context)
        losses.append(float(-np.log(probability).mean()))
        print(f"{config.train.max_steps} steps, {context} bytes: {losses[-1]:.4f}", flush=True)
    return min(losses)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the losses of all rungs."""
    build_parser("track.counting", __doc__).parse_args(argv)
    protocol = load_protocol(FILE)
    losses = {}
    for rung in protocol.rungs:
        config = load_rung(FILE, protocol, rung, [f"run.seed={protocol.first_seed}"])
        prepare_data(config, protocol)
        losses[rung] = round(score(config), 4)
    RECORDS.mkdir(parents=True, exist_ok=True)
    write_atomic(RECORDS / COUNTING, json.dumps(losses) + "\n")


if __name__ == "__main__":
    run_command(main)
