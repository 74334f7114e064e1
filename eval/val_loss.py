"""Loss, perplexity and bits per byte of a run's model on prepared data sets and text files.

    python -m eval.val_loss runs/NAME                                        the run's validation windows, by set
    python -m eval.val_loss runs/NAME --windows all --split train            all windows of a split
    python -m eval.val_loss runs/NAME --data stdlib notes.txt books.jsonl    another set in data.dir, and text files
    python -m eval.val_loss runs/NAME --data notes.txt --stride 64           overlapping windows

A data set is one row of tokens, as in training, cut into windows of block_size. In a text file each
document is scored alone: it follows an end-of-text token, which is not scored, and all of its own
tokens are. With --stride N windows overlap: every token is predicted from at least block_size - N
tokens before it, except near the start of a row or document.

loss: mean of -log p(token) over the scored tokens, in nats. ± is its standard error over documents,
taken as independent; windows of one document are not. Of a single document it is that over windows,
and says nothing of others.
perplexity: e^loss.
bits per byte: total nats / ln 2 / UTF-8 bytes of the scored tokens. An end-of-text token has no
bytes, but its nats count. Only this one compares across tokenizers.

Prints a table, and appends one line of JSON per row to runs/NAME/eval/step_…/val_loss.json.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.command import build_parser, command, run_command
from common.progress import progress_bar
from common.text import text_table
from data import DataError
from data.bins import Tokens, read_meta
from data.encode import Encoder
from data.loader import fixed_windows, number_documents, spread_evenly
from data.mixture import identify, list_sets, split_windows
from data.readers import read_documents
from data.sources import local_inputs
from data.tokenizer import Tokenizer, token_bytes
from eval.scoring import Scorer, scoring_dtype
from eval.trained import (
    Trained,
    add_device_argument,
    add_run_arguments,
    load_run,
    open_set,
    pick_device,
)

TEXT_FIELD = "text"  # of rows of JSON and parquet
WINDOWS = 1024  # in memory at once
HEAD = ("data", "windows", "tokens", "bytes", "loss, nats per token", "perplexity", "bits per byte")


class Corpus(NamedTuple):
    """Tokens to score, and the windows to score them in.

    Attributes:
        windows: (W, 3) int64, rows (start, stop, first): the model reads tokens start to stop - 1,
            and its predictions after each of them from `first` on are scored.
        documents: (W,) equal numbers for windows of one document.
    """

    name: str
    tokens: Tokens
    windows: np.ndarray
    documents: np.ndarray
    split: str | None = None  # None: a text file


class Result(NamedTuple):
    """The losses of a Corpus."""

    windows: int
    tokens: int  # scored
    bytes: int  # of the scored tokens' text
    loss: float  # nats per token
    stderr: float  # of `loss`; NaN for a single window
    perplexity: float
    bits_per_byte: float  # NaN if there are no bytes


def open_own(trained: Trained, args: argparse.Namespace) -> list[Corpus]:
    """Open the run's own set, or each set of its mixture with its part of the windows.

    Raises as `open_prepared`.

    Prints a note if the data is not that of training any more.
    """
    config = trained.config
    folders, weights, count = config.data.folders, [*config.data.sets.values()], config.eval.windows
    shares = split_windows(count, weights, [count] * len(folders))
    corpora = [
        open_prepared(folder, trained, args, share)
        for folder, share in zip(folders, shares, strict=True)
    ]
    identity = identify([read_meta(folder) for folder in folders], weights)
    if any(trained.metadata.get(key) != sha256 for key, sha256 in identity.items()):
        names = ", ".join(corpus.name for corpus in corpora)
        print(f"note: {names} is no longer the data that {config.run.name} was trained on")
    return corpora


def open_prepared(
    folder: Path, trained: Trained, args: argparse.Namespace, by_default: int
) -> Corpus:
    """Open a prepared data set, of which `by_default` windows are scored without --windows and --stride.

    Raises DataError if it is damaged, too short, or of another tokenizer.
    """
    tokens, block = open_set(trained, folder, args.split), trained.config.model.block_size
    if args.stride is None:
        count = min(args.windows or by_default, len(tokens))  # args.windows may be infinite
        start = block * fixed_windows(tokens, block, count, trained.config.eval.spread)
        windows = np.stack([start, start + block, start], 1)
    else:
        windows = make_windows(len(tokens), block, args.stride)
        windows = windows[: min(args.windows or math.inf, len(windows))]
    documents = number_documents(tokens, (windows[:, 2] + windows[:, 1] + 1) // 2)
    return Corpus(str(folder), tokens, windows, documents, args.split)


def open_text(
    path: Path, trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace
) -> Corpus:
    """Tokenize a text file.

    Raises DataError if it cannot be read, or holds fewer than two tokens.
    """
    encoder = Encoder(tokenizer, 0, TEXT_FIELD)
    block, documents, rows, start = trained.config.model.block_size, [], [], 0
    for raw in read_documents(local_inputs([path])[0], TEXT_FIELD):
        try:
            text = encoder.text(raw) or ""
        except ValueError as error:
            raise DataError(f"{raw.where} {error}") from error
        if text.strip():  # empty documents are left out, as in preparation
            documents.append(np.append(np.uint16(tokenizer.eot), tokenizer.encode_batch([text])[0]))
    if (count := sum(map(len, documents)) - len(documents)) < 2:
        raise DataError(f"{path}: {count} token(s), expected at least 2; give more text")
    for document in documents:
        rows.append(start + make_windows(len(document), block, args.stride or block))
        start += len(document)
    windows, numbers = np.concatenate(rows), np.repeat(np.arange(len(rows)), [*map(len, rows)])
    count = min(args.windows or math.inf, len(windows))
    chosen = np.arange(count) if args.stride else spread_evenly(len(windows), int(count))
    tokens = Tokens([np.concatenate(documents)], str(path), vocab_size=tokenizer.vocab_size)
    return Corpus(str(path), tokens, windows[chosen], numbers[chosen])


def make_windows(count: int, block: int, stride: int) -> np.ndarray:
    """Windows over a row of `count` tokens, `stride` apart; the last one may be shorter.

    Each token but the first is scored once, in the first window that contains it, so from at least
    `block - stride` tokens of that window. Returns (W, 3) int64, see Corpus.
    """
    start = stride * np.arange(1 + max(0, -(-(count - 1 - block) // stride)))
    stop = np.minimum(start + block, count - 1)
    return np.stack([start, stop, np.append(0, stop[:-1])], 1)


def find_corpus(
    name: str, trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace
) -> Corpus:
    """Open a prepared folder, a set in data.dir, or a text file.

    Raises DataError if `name` is none of them.
    """
    for folder in (Path(name), Path(trained.config.data.dir, name)):
        if (folder / "meta.json").is_file():
            return open_prepared(folder, trained, args, trained.config.eval.windows)
    if Path(name).is_file():
        return open_text(Path(name), trained, tokenizer, args)
    known = ", ".join(list_sets(Path(trained.config.data.dir)))
    raise DataError(
        f"--data {name}: no such file, and no prepared set here or in {trained.config.data.dir}, which holds "
        f"{known or 'none'}; name one of these or a text file, or prepare it (python -m data.prepare --help)"
    )


def measure_loss(scorer: Scorer, corpus: Corpus, lengths: np.ndarray) -> Result:
    """Score a corpus; `lengths` (vocab_size,) int64 are the bytes of each token."""
    nats, size, windows = [], 0, corpus.windows
    with progress_bar(total=len(windows), desc=corpus.name, leave=False) as bar:
        for part in np.array_split(windows, -(-len(windows) // WINDOWS)):
            pairs = []
            for start, stop, first in part.tolist():
                ids = corpus.tokens.read(start, stop - start + 1)
                size += int(lengths[ids[first - start + 1 :]].sum())
                pairs.append((ids[: first - start + 1].tolist(), ids[first - start + 1 :].tolist()))
            nats += [-score.loglikelihood for score in scorer.score(pairs)]
            bar.update(len(part))
    return summarize_losses(np.array(nats), windows[:, 1] - windows[:, 2], size, corpus.documents)


def summarize_losses(
    nats: np.ndarray, counts: np.ndarray, size: int, documents: np.ndarray
) -> Result:
    """Loss over all windows, with the standard error of a ratio of two sums over documents.

    Args:
        nats: (W,) total loss of each window.
        counts: (W,) scored tokens of each window.
        size: bytes in total.
        documents: (W,) see Corpus; of a single one each window counts as one.
    """
    W, tokens, loss = len(nats), int(counts.sum()), float(nats.sum() / counts.sum())
    labels = np.unique(documents, return_inverse=True)[1]
    if not labels.any():
        labels = np.arange(W)
    rest, parts = np.bincount(labels, nats - loss * counts), np.bincount(labels, counts) / tokens
    stderr = math.sqrt((rest**2 / (1 - parts)).sum()) / tokens if W > 1 else math.nan
    bits = float(nats.sum() / math.log(2) / size) if size else math.nan
    return Result(W, tokens, size, loss, stderr, math.exp(min(loss, 700)), bits)


def format_row(corpus: Corpus, result: Result) -> list[str]:
    """One row under HEAD."""
    name = corpus.name + (f" ({corpus.split})" if corpus.split else "")
    error = "" if math.isnan(result.stderr) else f" ± {result.stderr:.4f}"
    bits = "-" if math.isnan(result.bits_per_byte) else f"{result.bits_per_byte:.4f}"
    counts = [f"{count:,}" for count in result[:3]]
    return [name, *counts, f"{result.loss:.4f}{error}", f"{result.perplexity:,.3f}", bits]


def window_count(text: str) -> float:
    """Parse --windows: a number above 0, or "all" as infinity."""
    if text != "all" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more, or all")
    return math.inf if text == "all" else int(text)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Open all data, score it, print the table and write val_loss.json."""
    parser = build_parser("eval.val_loss", __doc__)
    add_run_arguments(parser)
    add, data = (
        parser.add_argument,
        "prepared folders, names in data.dir, text files that data.prepare reads",
    )
    add("--data", nargs="+", metavar="SET_OR_FILE", help=f"{data} (default: the run's own set)")
    add("--split", choices=("val", "train"), default="val", help="of sets (default: %(default)s)")
    add("--stride", type=int, metavar="N", help="tokens between window starts, up to block_size")
    windows = "number, spread evenly, with --stride the first N; or all"
    by_default = "(default: all; of a set without --stride\nthe run's eval.windows)"
    add("--windows", type=window_count, metavar="N", help=f"{windows} {by_default}")
    add_device_argument(parser)
    args = parser.parse_args(argv)
    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
    config, file = trained.config, args.run / "eval" / trained.label / "val_loss.json"
    if args.stride is not None and not 1 <= args.stride <= config.model.block_size:
        raise ValueError(
            f"--stride {args.stride}: expected 1 to {config.model.block_size} (the run's block_size)"
        )
    if args.data:
        corpora = [find_corpus(name, trained, tokenizer, args) for name in args.data]
    else:
        corpora = open_own(trained, args)
    device = pick_device(args)
    scorer = Scorer(trained.model.to(device), scoring_dtype(config, device))
    # in bytes; end-of-text, the last, has none
    lengths = np.array([*map(len, token_bytes(tokenizer)), 0])
    results = [measure_loss(scorer, corpus, lengths) for corpus in corpora]
    mean = f", {trained.mean}" if trained.mean else ""
    print(
        f"{args.run}, step {trained.step:,}{mean}; {f'stride {args.stride}' if args.stride else 'no overlap'}"
    )
    print(text_table(HEAD, [*map(format_row, corpora, results)]))
    if not args.data and len(corpora) > 1:
        weighted = sum(
            part * result.loss
            for part, result in zip(config.data.sets.values(), results, strict=True)
        )
        print(f"mean by the weights of the mixture: {weighted:.4f}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as output:
        for corpus, result in zip(corpora, results, strict=True):
            line = {
                "run": config.run.name,
                "step": trained.step,
                "average": trained.average,
                "ema": trained.ema,
            }
            line |= {"data": corpus.name, "split": corpus.split, "stride": args.stride}
            line |= {
                key: value if math.isfinite(value) else None
                for key, value in result._asdict().items()
            }
            output.write(json.dumps(line) + "\n")
    print(file)


if __name__ == "__main__":
    run_command(main)
