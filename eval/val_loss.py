"""Loss, perplexity and bits per byte of a run's model on prepared sets and on text files.

    python -m eval.val_loss runs/NAME                                        the run's own set, on training's windows
    python -m eval.val_loss runs/NAME --windows all --split train            all windows of a split
    python -m eval.val_loss runs/NAME --data stdlib notes.txt books.jsonl    another set of data.dir, and text
    python -m eval.val_loss runs/NAME --data notes.txt --stride 64           windows that overlap

A set is one row of tokens, as in training, cut into windows of block_size. In a text file each document stands alone:
it begins after an end-of-text token, which is not scored, and all of its own tokens are.
With --stride N windows overlap, so that a token is predicted from block_size - N tokens before it at least, but for
those that begin a row or a document.

loss: the mean of -log p(token) over all tokens scored, in nats. Behind ± is its standard error over windows, as if they
were independent: neighbours are alike, so of windows side by side, and the more of overlapping ones, it is too small.
perplexity: e^loss.
bits per byte: all nats / ln 2 / UTF-8 bytes that the scored tokens decode to. An end-of-text token has no bytes, though
its nats count. This one compares between tokenizers too.

The table goes to the terminal, and a line of JSON a row into runs/NAME/eval/step_…/val_loss.json, in place of an
earlier one of the same data, split, stride and windows.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from data import DataError, readers
from data.bins import Tokens, check, fingerprint, open_tokens, partial_folder, read_meta
from data.encode import Encoder
from data.loader import fixed_windows, prefetch
from data.sources import local_inputs
from data.tokenizer import ByteTokenizer, identity
from eval.scoring import TOKENS
from eval.trained import add_arguments, load_run
from kernels.cross_entropy import linear_cross_entropy
from runtime import RunError, distributed
from runtime.metrics import read as read_metrics

OF_LINE = ("data", "split", "stride", "windows")  # what tells one line of val_loss.json from another


class Corpus(NamedTuple):
    """What is scored. A window is a row (start, stop, first) of `windows` (W, 3) int64: the model reads tokens start to
    stop - 1, and what it says after each of them from `first` on about the next one is scored."""

    name: str
    tokens: Tokens
    windows: np.ndarray
    split: str | None = None  # None: a text file
    own: bool = False  # the very data that the run was trained and evaluated on


class Result(NamedTuple):
    windows: int
    tokens: int  # scored
    bytes: int  # that they decode to
    loss: float  # nats a token
    stderr: float  # of it; nan for a single window
    perplexity: float
    bits_per_byte: float  # nan if there is no byte


# ---- what to read


def open_set(folder, trained, tokenizer, args):
    """The Corpus of a prepared set. Raises DataError if it is damaged, too short, or made by another tokenizer."""
    meta, block = read_meta(folder), trained.config.model.block_size
    if meta.tokenizer != identity(tokenizer):
        theirs, ours = (f"{of['name']!r} (hash {of['hash'][:8]})" for of in (meta.tokenizer, identity(tokenizer)))
        raise DataError(
            f"{folder}: its tokenizer is {theirs}, that of {trained.config.run.name} is {ours}; prepare the text again "
            f"with --tokenizer {tokenizer.name}, or give the text itself"
        )
    check(folder, trained.config.model.vocab_size)
    tokens = open_tokens(folder, args.split)
    if args.stride is None:
        count = min(args.windows or trained.config.eval.windows, len(tokens))  # it may be infinite
        start = block * fixed_windows(tokens, block, count)
        windows = np.stack([start, start + block, start], 1)
    else:
        at_least_two(tokens.name, len(tokens))
        windows = overlapping(len(tokens), block, args.stride)
        windows = windows[: min(args.windows or math.inf, len(windows))]
    own = all(trained.facts.get(what) == sha256 for what, sha256 in fingerprint(meta).items())
    return Corpus(str(folder), tokens, windows, args.split, own)


def open_text(path, trained, tokenizer, args):
    """The Corpus of a text file. Raises DataError if it cannot be read, or holds less than two tokens."""
    encoder = Encoder(tokenizer, 0, args.text_field)
    (file,), parts = local_inputs([path]), []
    for raw in readers.read(file, args.text_field):
        try:
            text = encoder.text(raw) or ""
        except ValueError as error:
            raise DataError(f"{raw.where} {error}") from error
        if text.strip():  # as in preparation
            parts.append(np.append(np.uint16(tokenizer.eot), tokenizer.encode_batch([text])[0]))
    at_least_two(path, sum(map(len, parts)) - len(parts))
    block, start, rows = trained.config.model.block_size, 0, []
    for part in parts:
        rows.append(start + overlapping(len(part), block, args.stride or block))
        start += len(part)
    windows = np.concatenate(rows)
    count = min(args.windows or math.inf, len(windows))
    windows = windows[:count] if args.stride else windows[np.arange(count) * len(windows) // count]  # spread evenly
    return Corpus(str(path), Tokens([np.concatenate(parts)], str(path), vocab_size=tokenizer.vocab_size), windows)


def at_least_two(name, count):
    """Raises DataError."""
    if count < 2:
        raise DataError(f"{name}: {count} token(s), expected at least 2; give more text")


def overlapping(count, block, stride):
    """Windows (W, 3) over a row of `count` tokens, `stride` apart, the last one shorter maybe: each token but the first
    is scored once, in the first window that has it, so after block - stride tokens of that window at least."""
    start = stride * np.arange(1 + max(0, -(-(count - 1 - block) // stride)))
    stop = np.minimum(start + block, count - 1)
    return np.stack([start, stop, np.append(0, stop[:-1])], 1)


def find(name, trained, tokenizer, args):
    """The Corpus called `name`: a prepared folder, a set in data.dir, or a text file. Raises DataError."""
    folders = [Path(name), Path(trained.config.data.dir, name)]
    for folder in folders:
        if (folder / "meta.json").is_file():
            return open_set(folder, trained, tokenizer, args)
    if Path(name).is_file():
        return open_text(Path(name), trained, tokenizer, args)
    for folder in folders:
        if folder.is_dir() or partial_folder(folder).is_dir():
            read_meta(folder)  # raises: it is half-prepared
    there = ", ".join(sorted(path.parent.name for path in Path(trained.config.data.dir).glob("*/meta.json")))
    raise DataError(
        f"--data {name}: no such file, and no prepared set here or in {trained.config.data.dir}, which holds "
        f"{there or 'none'}; name one of these or a text file, or prepare it (python -m data.prepare --help)"
    )


# ---- what the model says of it


def batches(windows):
    """Indices of windows, longest first: lists of rows that come to no more than TOKENS tokens, filling included."""
    lengths = windows[:, 1] - windows[:, 0]
    order, at = np.argsort(-lengths, kind="stable"), 0
    while at < len(order):
        yield (batch := order[at : at + max(1, TOKENS // lengths[order[at]])])
        at += len(batch)


def read(tokens, windows):
    """Inputs and targets (B, T) int64, filled up with 0 on the right, and which targets are scored, (B, T) bool."""
    ids = np.zeros((len(windows), np.max(windows[:, 1] - windows[:, 0]) + 1), np.int64)
    scored = np.zeros((len(ids), ids.shape[1] - 1), bool)
    for row, which, (start, stop, first) in zip(ids, scored, windows, strict=True):
        row[: stop - start + 1] = tokens.read(int(start), int(stop - start + 1))
        which[first - start : stop - start] = True
        if row.max() >= tokens.vocab_size:  # of a set beyond 1 GiB: `check` has read the others
            tokens.check_ids(int(start), int(stop - start + 1))
    return ids[:, :-1], ids[:, 1:], scored


def bytes_of(tokenizer):
    """(vocab_size,) int64: how many bytes each token stands for; end-of-text for none."""
    if isinstance(tokenizer, ByteTokenizer):
        lengths = np.ones(tokenizer.vocab_size, np.int64)
    else:
        tokens = map(tokenizer.bpe.decode_single_token_bytes, range(tokenizer.vocab_size))
        lengths = np.fromiter(map(len, tokens), np.int64, tokenizer.vocab_size)
    lengths[tokenizer.eot] = 0
    return lengths


@torch.no_grad()
def measure(model, corpus, lengths, dtype=torch.float32):
    """The Result of a GPT in evaluation mode on a Corpus; `lengths` are bytes of tokens, `dtype` is autocast's."""
    device, windows = model.head.device, corpus.windows
    nats, total = np.zeros(len(windows)), 0
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    work = prefetch((index, read(corpus.tokens, windows[index])) for index in batches(windows))
    with autocast, tqdm(total=len(windows), desc=corpus.name, disable=None, leave=False) as bar:
        for index, (x, y, scored) in work:
            total += int(lengths[y[scored]].sum())
            x, y, which = (torch.from_numpy(part).to(device) for part in (x, y, scored))
            hidden = model.ln_f(model.hidden(x)[0])[which]  # (tokens, C): the head sees no position but these
            losses = linear_cross_entropy(hidden, model.head, y[which], model.config.backend)[1].double().cpu()
            nats[index] = [part.sum().item() for part in losses.split(scored.sum(1).tolist())]
            bar.update(len(index))
    return summary(nats, windows[:, 1] - windows[:, 2], total)


def summary(nats, counts, size):
    """The Result of windows with so many nats and tokens, (W,) each, and `size` bytes in all. The standard error is
    that of a ratio of two sums over windows, of a mean if all have equally many tokens."""
    W, tokens, loss = len(nats), int(counts.sum()), float(nats.sum() / counts.sum())
    stderr = math.sqrt(((nats - loss * counts) ** 2).sum() * W / (W - 1)) / tokens if W > 1 else math.nan
    bits = float(nats.sum() / math.log(2) / size) if size else math.nan
    return Result(W, tokens, size, loss, stderr, math.exp(min(loss, 700)), bits)


# ---- what to tell of it


def logged(run, step):
    """(loss, windows) that the run's metrics.jsonl has of its own validation at `step`, None if it has none."""
    for line in read_metrics(run / "metrics.jsonl"):
        if line["step"] == step and "val/loss" in line:
            return line["val/loss"], len(line.get("val/window_losses", ()))
    return None


def earlier(path):
    """The lines of a val_loss.json, none if it is not there. Raises RunError of anything else."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return {tuple(line[key] for key in OF_LINE): line for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: not what eval.val_loss writes; move it away") from error


def save(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(temporary, path)


def aligned(rows):
    """Rows of text, a head first: the first column to the left, the others to the right, a line under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table(results):
    """Text of [(Corpus, Result)]."""
    rows = [("data", "windows", "tokens", "bytes", "loss, nats a token", "perplexity", "bits per byte")]
    for corpus, result in results:
        name = corpus.name + (f" ({corpus.split})" if corpus.split else "")
        counts = [f"{count:,}" for count in result[:3]]
        error = "" if math.isnan(result.stderr) else f" ± {result.stderr:.4f}"
        bits = "-" if math.isnan(result.bits_per_byte) else f"{result.bits_per_byte:.4f}"
        rows.append((name, *counts, f"{result.loss:.4f}{error}", f"{result.perplexity:,.3f}", bits))
    return aligned(rows)


def window_count(text):
    """A number above 0; infinite for "all"."""
    if text != "all" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more, or all")
    return math.inf if text == "all" else int(text)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m eval.val_loss", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="SET_OR_FILE",
        help="prepared folders, names in data.dir, text files of data.prepare's kinds (default: the run's own set)",
    )
    parser.add_argument("--split", choices=("val", "train"), default="val", help="of sets (default: %(default)s)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens from one window to the next, up to block_size")
    parser.add_argument(
        "--windows",
        type=window_count,
        metavar="N",
        help="so many, spread evenly, with --stride the first; or all (default: all, of a set without --stride the\n"
        "run's eval.windows)",
    )
    parser.add_argument("--text-field", default="text", help="of rows of JSON and parquet (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args):
    trained, tokenizer = load_run(args.run, args.step, args.average)
    config = trained.config
    if args.stride is not None and not 1 <= args.stride <= config.model.block_size:
        raise ValueError(f"--stride {args.stride}: expected 1 to {config.model.block_size} (the run's block_size)")
    file = args.run / "eval" / trained.label / "val_loss.json"
    lines = earlier(file)
    if args.data:
        corpora = [find(name, trained, tokenizer, args) for name in args.data]
    else:
        corpora = [open_set(Path(config.data.dir, config.data.name), trained, tokenizer, args)]
    device = distributed.pick_device(args.device)
    dtype = distributed.pick_dtype(config.train.dtype, device) if device.type == "cuda" else torch.float32
    model, lengths = trained.model.to(device), bytes_of(tokenizer)
    results = [(corpus, measure(model, corpus, lengths, dtype)) for corpus in corpora]
    mean = f", mean of {trained.average} checkpoints" if trained.average > 1 else ""
    stride = f"stride {args.stride}" if args.stride else "windows without overlap"
    print(f"{args.run}, step {trained.step:,}{mean}; {stride}\n{table(results)}")
    before = logged(args.run, trained.step) if any(c.own and c.split == "val" for c in corpora) else None
    if before:
        print(f"logged in training at step {trained.step:,}: {before[0]:.4f} ({before[1] or '?'} windows, no overlap)")
    if not args.data and not corpora[0].own:
        print(f"note: {corpora[0].name} is no longer the data that {config.run.name} was trained on")
    for corpus, result in results:
        values = {key: value if math.isfinite(value) else None for key, value in result._asdict().items()}
        line = {"run": config.run.name, "step": trained.step, "average": trained.average, "data": corpus.name}
        line |= {"split": corpus.split, "stride": args.stride, **values}
        line |= {"logged": before[0] if before and corpus.own and corpus.split == "val" else None}
        lines[tuple(line[key] for key in OF_LINE)] = line
    save(file, lines.values())
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
