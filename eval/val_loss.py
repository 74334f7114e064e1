"""Measure loss, perplexity and bits per byte of runs' models on data sets and text files.

    python -m eval.val_loss runs/A                               the run's validation windows
    python -m eval.val_loss runs/A --windows all --split train   all windows of a split
    python -m eval.val_loss runs/A --data stdlib notes.txt       another set, a text file
    python -m eval.val_loss runs/A --data notes.txt --stride 64  overlapping windows
    python -m eval.val_loss runs/A runs/B --data notes.txt       two runs and their difference

A data set is one row of tokens, as in training, cut into windows of block_size. A text file is
scored whole: each of its documents follows an end-of-text token, which is not scored. With --stride
N windows overlap: every token is predicted from at least block_size - N tokens before it, except
near the start of a row or document.

loss: mean of -log p(token) over the scored tokens, in nats, and its 95% interval by Student's t
over documents, which are taken as independent; windows of one document are not. With a single
document it is over windows and says nothing about other documents.
perplexity: e^loss.
bits per byte: total nats / ln 2 / UTF-8 bytes of the scored text. An end-of-text token has no
bytes, but its nats count. Only this measure compares across tokenizers. The bytes of a text file
are its own. A prepared set's are those of its tokens, with the space that some tokenizers put
before a document; nan: tokens of this tokenizer have none of their own (WordPiece), so score the
text itself.

minus …: several runs are scored on the windows of the first; this is the loss minus the first's,
paired by document. It says nothing of other seeds.

Prints a table, and appends one line of JSON per row to runs/NAME/eval/step_…/val_loss.json.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m eval.val_loss")

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.command import build_parser, command, run_command
from common.files import exists, is_file, write_atomic
from common.text import text_table
from data import DataError
from data.bins import read_meta
from data.encode import Encoder, read_texts
from data.loader import fixed_windows, identify, list_sets, number_documents, split_windows
from data.sources import local_inputs
from data.tokenizer import FileTokenizer, Tokenizer, token_bytes
from eval.scoring import Scorer, scoring_dtype
from eval.trained import (
    Trained,
    add_device_argument,
    add_run_arguments,
    check_comparable,
    find_set,
    load_run,
    open_set,
)
from report.compare import Difference, clustered
from runtime import distributed

TEXT_FIELD = "text"  # the field of JSON and parquet rows that holds the document
MAX_LOSS = 99.0  # nats per token; guessing among 2^16 tokens is 11, and e^710 overflows
# {key in val_loss.json: its column and format}
COLUMNS = {
    "data": ("data", ""),
    "split": ("split", ""),
    "windows": ("windows", ","),
    "tokens": ("tokens", ","),
    "bytes": ("bytes", ","),
    "loss": ("loss, nats per token", ".4f"),
    "low": ("95% from", ".4f"),
    "high": ("to", ".4f"),
    "perplexity": ("perplexity", ",.3f"),
    "bits_per_byte": ("bits per byte", ".4f"),
}
DIFFERENCE = "minus the first's, 95%"


class Corpus(NamedTuple):
    """Windows of text to score.

    Attributes:
        pairs: of each of W windows the context, and the tokens that are scored after it.
        documents: (W,) equal numbers for windows of one document.
        bytes: UTF-8 bytes of the scored tokens.
        split: of a set; empty: a text file.
    """

    name: str
    pairs: list[tuple[np.ndarray, np.ndarray]]
    documents: np.ndarray
    bytes: int
    split: str = ""

    def estimate(self, nats: np.ndarray) -> Difference:
        """The mean over tokens, with its interval over documents, of `nats` (W,) of windows."""
        counts = np.array([len(scored) for _, scored in self.pairs])
        documents = self.documents
        if len(np.unique(documents)) == 1:
            documents = np.arange(len(documents))
        return clustered(nats / counts, documents, counts)

    def describe(self, nats: np.ndarray) -> dict[str, Any]:
        """The values of COLUMNS, of the total losses `nats` (W,) of windows."""
        loss = self.estimate(nats)
        bits = nats.sum() / math.log(2)
        return {
            "data": self.name,
            "split": self.split,
            "windows": len(nats),
            "tokens": sum(len(scored) for _, scored in self.pairs),
            "bytes": self.bytes,
            "loss": loss.mean,
            "low": loss.low,
            "high": loss.high,
            "perplexity": math.exp(min(loss.mean, MAX_LOSS)),
            "bits_per_byte": bits / self.bytes if self.bytes else math.nan,
        }


def cut_windows(count: int, block: int, stride: int) -> list[tuple[int, int, int]]:
    """Cut a row of `count` tokens into windows, one every `stride`; the last one may be shorter.

    Each token but the first is scored once, in the first window that contains it, so from at least
    `block - stride` tokens of that window.

    Returns:
        (start, split, stop) of each window: it is tokens start to stop - 1, and those from `split`
        on are scored.
    """
    windows = []
    split = 1
    for start in range(0, max(1, count - 1 - block + stride), stride):
        stop = min(start + block + 1, count)
        windows.append((start, split, stop))
        split = stop
    return windows


def open_corpora(trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Corpus]:
    """Open the data to score models on: that of --data, or the run's own.

    Of a mixture each set has its part of the windows. Prints a note if the run's own data has
    changed since training. Raises DataError.
    """
    config = trained.config
    block = config.model.block_size
    if args.stride is not None and not 1 <= args.stride <= block:
        raise ValueError(f"--stride {args.stride}: expected 1 to {block} (the run's block_size)")
    count = config.eval.windows
    if args.data:
        return [open_corpus(name, trained, tokenizer, args, count) for name in args.data]
    folders = config.data.folders
    weights = list(config.data.sets.values())
    hashes = identify([read_meta(folder) for folder in folders], weights)
    if not hashes.items() <= trained.metadata.items():
        print(f"note: {config.data.label} is no longer what {config.run.name} was trained on")
    corpora = []
    for folder, share in zip(
        folders, split_windows(count, weights, [count] * len(folders)), strict=True
    ):
        corpora.append(open_corpus(str(folder), trained, tokenizer, args, share))
    return corpora


def open_corpus(
    name: str, trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace, count: int
) -> Corpus:
    """Open a prepared folder, a set in data.dir, or a text file.

    Args:
        name: of it.
        trained: the model to score it with.
        tokenizer: the model's.
        args: --split, --windows, --stride.
        count: windows of a set without --windows and --stride.

    Raises:
        DataError: `name` is none of them; it is damaged, too short, or has another tokenizer.
    """
    config = trained.config
    block = config.model.block_size
    folder = find_set(trained, name)
    if folder is None:
        if is_file(Path(name)):
            return open_text(Path(name), tokenizer, block, args.stride or block)
        sets = ", ".join(list_sets(Path(config.data.dir))) or "none"
        raise DataError(
            f"--data {name}: no such file, and no prepared set here or in {config.data.dir}, "
            f"which holds {sets}; name one of these or a text file, or prepare it "
            f"(python -m data.prepare --help)"
        )
    tokens = open_set(trained, folder, args.split)
    if args.stride:
        windows = cut_windows(len(tokens), block, args.stride)[: args.windows]
    else:
        starts = block * fixed_windows(tokens, block, args.windows or count)
        windows = [(start, start + 1, start + block + 1) for start in starts.tolist()]
    bytes_of_ids = list_byte_counts(tokenizer)
    pairs = []
    size = 0
    for start, split, stop in windows:
        ids = tokens.read(start, stop - start)
        pair = ids[: split - start], ids[split - start :]
        pairs.append(pair)
        size += int(bytes_of_ids[pair[1]].sum())
    middles = np.array([(split + stop - 1) // 2 for _, split, stop in windows])  # of scored tokens
    documents = number_documents(tokens, middles)
    return Corpus(str(folder), pairs, documents, size, args.split)


def open_text(path: Path, tokenizer: Tokenizer, block: int, stride: int) -> Corpus:
    """Tokenize a text file; each document has windows of its own.

    Raises DataError if it cannot be read, or holds fewer than two tokens.
    """
    pairs = []
    documents = []
    size = 0
    inputs, _ = local_inputs([path], "--data", any_text=True)
    texts = read_texts(inputs[:1], Encoder(tokenizer, 0, TEXT_FIELD))
    for number, text in enumerate(texts):
        ids = np.append(np.uint16(tokenizer.eot), tokenizer.encode_array(text))
        if len(ids) == 1:  # no token stands for its characters
            continue
        for start, split, stop in cut_windows(len(ids), block, stride):
            pairs.append((ids[start:split], ids[split:stop]))
            documents.append(number)
        size += len(text.encode("utf-8", "replace"))
    count = sum(len(scored) for _, scored in pairs)
    if count < 2:
        raise DataError(f"{path}: {count} token(s), expected at least 2; give more text")
    return Corpus(str(path), pairs, np.array(documents), size)


def list_byte_counts(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes by id; 0 for end-of-text, and for all if they depend on the tokens around."""
    counts = np.array([*map(len, token_bytes(tokenizer)), 0])
    if isinstance(tokenizer, FileTokenizer) and not tokenizer.tokens_have_bytes:
        counts[:] = 0
    return counts


def score_corpora(
    trained: Trained, corpora: Sequence[Corpus], device: torch.device
) -> list[np.ndarray]:
    """The total losses of each corpus' windows, (W,) nats. The model ends on the CPU."""
    scorer = Scorer(trained.model.to(device), scoring_dtype(trained.config, device))
    nats = []
    for corpus in corpora:
        scores = scorer.score(corpus.pairs, corpus.name)
        nats.append(np.array([-score.loglikelihood for score in scores]))
    trained.model.cpu()  # the device has one model at a time
    return nats


def append_results(trained: Trained, stride: int | None, lines: list[dict[str, Any]]) -> Path:
    """Append lines of JSON to val_loss.json; what is not finite is null."""
    file = trained.folder / "eval" / trained.label / "val_loss.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    run = {"run": trained.config.run.name, "step": trained.step, "stride": stride}
    content = file.read_text() if exists(file) else ""
    for line in lines:
        text = json.dumps(run | line)
        finite = json.loads(text, parse_constant=lambda name: None)  # JSON has no NaN
        content += json.dumps(finite) + "\n"
    write_atomic(file, content)
    return file


def parse_windows(text: str) -> int:
    """Parse --windows: a number above 0, or "all" as one above any."""
    if text == "all":
        return sys.maxsize
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more, or all")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = build_parser("eval.val_loss", __doc__)
    add_run_arguments(parser, several=True)
    add = parser.add_argument
    data = "prepared folders, names in data.dir, text files that data.prepare reads"
    add("--data", nargs="+", metavar="SET_OR_FILE", help=f"{data} (default: the run's own set)")
    add("--split", choices=("val", "train"), default="val", help="of sets (default: %(default)s)")
    add("--stride", type=int, metavar="N", help="tokens between window starts, up to block_size")
    windows = "of sets: number, spread evenly, with --stride the first N; or all"
    default = "(default: the\nrun's eval.windows; with --stride all)"
    add("--windows", type=parse_windows, metavar="N", help=f"{windows} {default}")
    add_device_argument(parser)
    return parser.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Open all data, score it, print a table and write val_loss.json."""
    args = parse_arguments(argv)
    runs = [load_run(run, args.step, args.ema) for run in args.runs]
    models = [trained for trained, _ in runs]
    corpora = open_corpora(*runs[0], args)
    same = ["tokenizer"] if args.data else ["tokenizer", "data"]
    for other in models[1:]:
        check_comparable(models[0], other, same)
    device = distributed.pick_device(args.device)
    results = [score_corpora(trained, corpora, device) for trained in models]
    rows = []
    notes = []
    for trained, nats in zip(models, results, strict=True):
        lines = [*map(Corpus.describe, corpora, nats)]
        for line, corpus, own, of_first in zip(lines, corpora, nats, results[0], strict=True):
            row = [format(line[key], form) or "-" for key, (_, form) in COLUMNS.items()]
            difference = "-" if trained is models[0] else str(corpus.estimate(own - of_first))
            rows.append([str(trained.folder), *row, difference])
        notes.append(f"{append_results(trained, args.stride, lines)}")
        if trained.mean:
            notes[-1] += f": {trained.mean}"
        if not args.data and len(lines) > 1:
            weights = list(trained.config.data.sets.values())
            mean = np.dot(weights, [line["loss"] for line in lines])
            notes[-1] += f": mean by the weights of the mixture {mean:.4f}"
    head = ["run", *(column for column, _ in COLUMNS.values()), DIFFERENCE]
    important = ["run", DIFFERENCE, "loss, nats per token", "data", "bits per byte"]
    if len(models) == 1:
        head.remove(DIFFERENCE)
        important.remove(DIFFERENCE)
    rows = [row[: len(head)] for row in rows]
    print("\n".join([text_table(head, rows, 2, important), *notes]))


if __name__ == "__main__":
    run_command(main)
