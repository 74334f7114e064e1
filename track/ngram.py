"""A count table as a row of the contest: the loss of an n-gram model on the contest's windows.

    python -m track.ngram                     write track/records/edition-2/ngram.tsv

Counted from the windows that a run of each rung trains on, judged on the same validation windows:
a byte by the 5 before it, with interpolated absolute discounting. A model that does not beat it may
have learned no more than local statistics.

Source: Ney, Essen and Kneser, On Structuring Probabilistic Dependences in Stochastic Language
Modelling, 1994.
"""

from collections.abc import Sequence

import numpy as np

import configure
from common.command import build_parser, command, run_command
from common.files import write_atomic
from data.loader import windows
from runtime.preflight import open_data
from track.__main__ import FILE
from track.contest import Protocol, derive_seed, load_protocol
from track.entry import prepare_data

# The best of 4 to 6 and of 0.5, 0.75 and 0.9 on edition 1's validation windows: 1.556 nats per byte
CONTEXT = 5  # bytes
DISCOUNT = 0.9


def encode_grams(texts: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Number the n-grams of each window: texts (W, T) -> (W, T - order + 1) int64."""
    length = texts.shape[1] - order + 1
    codes = np.zeros((len(texts), length), np.int64)
    for offset in range(order):
        codes = codes * vocab_size + texts[:, offset : offset + length]
    return codes


def look_up(codes: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of each code's key, 0 for codes that are not among the sorted keys."""
    positions = np.searchsorted(keys, codes).clip(max=len(keys) - 1)
    return np.where(keys[positions] == codes, values[positions], 0)


def score_ngrams(
    train: np.ndarray, val: np.ndarray, vocab_size: int, context: int = CONTEXT
) -> np.ndarray:
    """The loss of each token of `val` but a window's first, by the n-grams of `train`.

    Args:
        train: (W, T + 1) int64, windows.
        val: (V, T + 1) int64, windows.
        vocab_size: number of token ids.
        context: tokens before the predicted one that the longest n-grams have.

    Returns:
        (V, T) nats per token. Contexts do not reach beyond a window, as for the models.
    """
    probability = np.full(val[:, 1:].shape, 1 / vocab_size)  # (V, T)
    for n in range(1, context + 2):
        grams, counts = np.unique(encode_grams(train, n, vocab_size), return_counts=True)
        contexts, first = np.unique(grams // vocab_size, return_index=True)
        totals = np.add.reduceat(counts, first)  # of each context
        kinds = np.diff([*first, len(grams)])  # different tokens after each context
        codes = encode_grams(val, n, vocab_size)
        if n == 1:
            codes = codes[:, 1:]  # a window's first token is not predicted
        reached = probability[:, probability.shape[1] - codes.shape[1] :]
        total = look_up(codes // vocab_size, contexts, totals)
        kept = (look_up(codes, grams, counts) - DISCOUNT).clip(min=0)
        shared = DISCOUNT * look_up(codes // vocab_size, contexts, kinds)
        interpolated = (kept + shared * reached) / np.maximum(total, 1)
        reached[:] = np.where(total > 0, interpolated, reached)
    return -np.log(probability)


def score_config(config: configure.Config) -> float:
    """The mean loss of n-grams that read what a run of `config` reads, nats per token."""
    data = open_data(config)
    size = config.model.block_size
    texts = []
    for step in range(config.train.max_steps):
        x, y = data.loader.batch(step)
        texts.append(np.hstack([x, y[:, -1:]]))
    x, y = windows(data.validation.tokens, data.validation.windows, size)
    losses = score_ngrams(np.concatenate(texts), np.hstack([x, y[:, -1:]]), config.model.vocab_size)
    return float(losses.mean())


def score_rungs(protocol: Protocol) -> list[float]:
    """The loss on each rung, of the windows of a fixed seed."""
    losses = []
    for rung in range(len(protocol.rungs)):
        seed = derive_seed("n-gram", rung)
        losses.append(score_config(protocol.load(rung, [f"run.seed={seed}"])))
    return losses


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the row."""
    parser = build_parser("track.ngram", __doc__)
    parser.add_argument(
        "--track", default=FILE, metavar="FILE", help=f"the rules (default: {FILE})"
    )
    protocol = load_protocol(parser.parse_args(argv).track)
    prepare_data(protocol)
    lines = ["rung\tloss"]
    for number, loss in enumerate(score_rungs(protocol), 1):
        lines.append(f"{number}\t{loss:.4f}")
        print(lines[-1], flush=True)
    protocol.records.mkdir(parents=True, exist_ok=True)
    write_atomic(protocol.records / "ngram.tsv", "\n".join(lines) + "\n")


if __name__ == "__main__":
    run_command(main)
