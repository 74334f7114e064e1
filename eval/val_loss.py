"""Measure loss, perplexity and bits per byte of runs' models on data sets and text files.

    python -m eval.val_loss runs/A                               the run's validation windows
    python -m eval.val_loss runs/A --windows all --split train   all windows of a split
    python -m eval.val_loss runs/A stdlib notes.txt              another set, a text file
    python -m eval.val_loss runs/A notes.txt --stride 64         overlapping windows
    python -m eval.val_loss runs/A runs/B notes.txt              two runs and their difference

A data set is one row of tokens, as in training, cut into windows of block_size. In a text file each
document is scored alone: it follows an end-of-text token, which is not scored, and all of its own
tokens are. With --stride N windows overlap: every token is predicted from at least block_size - N
tokens before it, except near the start of a row or document.

loss: mean of -log p(token) over the scored tokens, in nats. ± is its standard error over documents,
which are taken as independent; windows of one document are not. With a single document it is the
standard error over windows and says nothing about other documents.
perplexity: e^loss.
bits per byte: total nats / ln 2 / UTF-8 bytes of the scored text. An end-of-text token has no
bytes, but its nats count. Only this measure compares across tokenizers. The bytes of a text file
are its own; a prepared set's are those that its tokens decode to.

minus …: with several runs, the loss minus that of the first on the same windows, and the 95%
interval of this difference by Student's t, paired by document. It says nothing of other seeds.

Prints a table, and appends one line of JSON per row to runs/NAME/eval/step_…/val_loss.json.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.command import build_parser, command, run_command
from common.progress import progress_bar
from common.text import text_table
from data import DataError
from data.bins import Tokens, read_meta
from data.encode import Encoder, read_texts
from data.loader import fixed_windows, number_documents, spread_evenly
from data.mixture import identify, list_sets, split_windows
from data.sources import local_inputs
from data.tokenizer import FileTokenizer, Tokenizer, token_bytes
from eval.scoring import Scorer, scoring_dtype
from eval.trained import (
    Trained,
    add_device_argument,
    add_run_arguments,
    load_run,
    open_set,
    set_up_device,
)
from report.comparisons import Difference

TEXT_FIELD = "text"  # the field of JSON and parquet rows that holds the document
MAX_LOSS = 20  # nats per token; guessing among 2^16 tokens is 11: beyond, perplexity is "inf"
WINDOWS = 1024  # scored in one call of the scorer; bounds memory
HEAD = ("data", "windows", "tokens", "bytes", "loss, nats per token", "perplexity", "bits per byte")
DIFFERENCE = "minus the first's, 95%"


class Corpus(NamedTuple):
    """Tokens to score, and the windows to score them in.

    Attributes:
        windows: (W, 3) int64, rows (start, stop, first). The model reads tokens start to stop - 1;
            its predictions of tokens first + 1 to stop are scored.
        documents: (W,) equal numbers for windows of one document.
        sizes: (n,) int64, UTF-8 bytes of the text of each token, if the text is at hand.
    """

    name: str
    tokens: Tokens
    windows: np.ndarray
    documents: np.ndarray
    split: str | None = None  # None: a text file
    sizes: np.ndarray | None = None

    @property
    def counts(self) -> np.ndarray:
        """(W,) the number of scored tokens of each window."""
        return self.windows[:, 1] - self.windows[:, 2]


class Result(NamedTuple):
    """The loss of a Corpus."""

    windows: int
    tokens: int  # scored
    bytes: int  # UTF-8 bytes of the scored tokens
    loss: float  # nats per token
    stderr: float  # of `loss`; NaN for a single window
    perplexity: float
    bits_per_byte: float  # NaN if there are no bytes


class Scored(NamedTuple):
    """A Corpus that was scored."""

    corpus: Corpus
    nats: np.ndarray  # (W,) total loss of each window
    result: Result


def open_own(trained: Trained, args: argparse.Namespace) -> list[Corpus]:
    """Open the run's own set, or each set of its mixture with its part of the windows.

    Prints a note if the data has changed since training. Raises as `open_prepared`.
    """
    config = trained.config
    folders = config.data.folders
    weights = list(config.data.sets.values())
    count = config.eval.windows
    shares = split_windows(count, weights, [count] * len(folders))
    parts = zip(folders, shares, strict=True)
    corpora = [open_prepared(folder, trained, args, share) for folder, share in parts]
    hashes = identify([read_meta(folder) for folder in folders], weights)
    if not hashes.items() <= trained.metadata.items():
        names = ", ".join(corpus.name for corpus in corpora)
        print(f"note: {names} is no longer the data that {config.run.name} was trained on")
    return corpora


def open_prepared(
    folder: Path, trained: Trained, args: argparse.Namespace, default_windows: int
) -> Corpus:
    """Open a prepared data set.

    Args:
        folder: of the set.
        trained: the model to score it with.
        args: --split, --windows, --stride.
        default_windows: number of windows without --windows and --stride.

    Raises:
        DataError: the set is damaged, too short, or has another tokenizer.
    """
    tokens = open_set(trained, folder, args.split)
    block = trained.config.model.block_size
    if args.stride is None:
        count = min(args.windows or default_windows, len(tokens))  # args.windows may be infinite
        start = block * fixed_windows(tokens, block, count, trained.config.eval.spread)
        windows = np.stack([start, start + block, start], 1)
    else:
        windows = make_windows(len(tokens), block, args.stride)
        windows = windows[: min(args.windows or math.inf, len(windows))]
    middle = (windows[:, 2] + windows[:, 1] + 1) // 2  # of the scored tokens
    documents = number_documents(tokens, middle)
    return Corpus(str(folder), tokens, windows, documents, args.split)


def open_text(
    path: Path, trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace
) -> Corpus:
    """Tokenize a text file.

    Raises DataError if it cannot be read, or holds fewer than two tokens.
    """
    documents = []
    sizes = []
    for ids, sizes_of_document in tokenize_documents(path, tokenizer):
        documents.append(ids)
        sizes.append(sizes_of_document)
    count = sum(len(document) - 1 for document in documents)
    if count < 2:
        raise DataError(f"{path}: {count} token(s), expected at least 2; give more text")
    block = trained.config.model.block_size
    rows = []
    numbers = []
    start = 0
    for number, document in enumerate(documents):
        windows = start + make_windows(len(document), block, args.stride or block)
        rows.append(windows)
        numbers.append(np.full(len(windows), number))
        start += len(document)
    windows = np.concatenate(rows)
    count = int(min(args.windows or math.inf, len(windows)))
    chosen = np.arange(count) if args.stride else spread_evenly(len(windows), count)
    tokens = Tokens([np.concatenate(documents)], str(path), vocab_size=tokenizer.vocab_size)
    numbers_of_windows = np.concatenate(numbers)[chosen]
    return Corpus(
        str(path), tokens, windows[chosen], numbers_of_windows, sizes=np.concatenate(sizes)
    )


def tokenize_documents(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids of each document of a text file after an end-of-text token, and their bytes.

    Empty documents are left out, as in preparation. Raises DataError.
    """
    encoder = Encoder(tokenizer, 0, TEXT_FIELD)
    counter = ByteCounter(tokenizer)
    inputs, _ = local_inputs([path], "--data", any_text=True)
    for text in read_texts(inputs[:1], encoder):
        ids, sizes = counter.measure_text(text)
        yield np.append(np.uint16(tokenizer.eot), ids), np.append(0, sizes)


class ByteCounter:
    """Counts the UTF-8 bytes of the text that tokens stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # bytes by id, (vocab_size + 1,); None if they depend on the tokens around
        self.lengths: np.ndarray | None = None
        if not isinstance(tokenizer, FileTokenizer) or tokenizer.byte_level:
            lengths = [len(token) for token in token_bytes(tokenizer)]
            self.lengths = np.array([*lengths, 0])  # the last token, end-of-text, has no bytes
        # some tokenizers put a space before each document
        self.adds_space = tokenizer.decode(tokenizer.encode("a")).startswith(" ")

    def measure_text(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text, and the bytes of the text that each stands for, (n,) both."""
        if isinstance(self.tokenizer, FileTokenizer):
            return self.tokenizer.measure_tokens(text)
        assert self.lengths is not None
        ids = self.tokenizer.encode_batch([text])[0]
        return ids, self.lengths[ids]

    def count(self, ids: np.ndarray, first: int) -> int:
        """Bytes of ids[first:] of a set, (n,), where first >= 1: after the tokens before them."""
        eot = self.tokenizer.eot
        starts = first + np.flatnonzero((ids[first - 1 : -1] == eot) & (ids[first:] != eot))
        if self.lengths is not None:
            return int(self.lengths[ids[first:]].sum()) - self.adds_space * len(starts)
        size = 0
        ends = first + np.flatnonzero(ids[first:] == eot)
        start = first
        for end in [*ends.tolist(), len(ids)]:
            before = ids[start - 1 : start]
            if before[0] == eot:
                size += self._decoded_size(ids[start:end], is_start=True)
            else:
                both = self._decoded_size(np.append(before, ids[start:end]))
                size += both - self._decoded_size(before)
            start = end + 1
        return size

    def _decoded_size(self, ids: np.ndarray, is_start: bool = False) -> int:
        unk = self.tokenizer.unk if isinstance(self.tokenizer, FileTokenizer) else None
        text = self.tokenizer.decode(i for i in ids.tolist() if i != unk)
        if is_start and self.adds_space:
            text = text.removeprefix(" ")
        broken = text.count("\ufffd")  # each is a byte of a character that is cut
        return len(text.encode()) - 2 * broken


def make_windows(count: int, block: int, stride: int) -> np.ndarray:
    """Make windows over a row of `count` tokens, one every `stride`; the last one may be shorter.

    Each token but the first is scored once, in the first window that contains it, so from at least
    `block - stride` tokens of that window.

    Returns:
        (W, 3) int64, see Corpus.
    """
    after_first = max(0, math.ceil((count - 1 - block) / stride))
    start = stride * np.arange(1 + after_first)
    stop = np.minimum(start + block, count - 1)
    first = np.append(0, stop[:-1])
    return np.stack([start, stop, first], 1)


def find_corpus(
    name: str, trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace
) -> Corpus:
    """Open a prepared folder, a set in data.dir, or a text file.

    Raises DataError if `name` is none of them.
    """
    data_dir = Path(trained.config.data.dir)
    for folder in (Path(name), data_dir / name):
        if (folder / "meta.json").is_file():
            return open_prepared(folder, trained, args, trained.config.eval.windows)
    if Path(name).is_file():
        return open_text(Path(name), trained, tokenizer, args)
    sets = ", ".join(list_sets(data_dir)) or "none"
    raise DataError(
        f"--data {name}: no such file, and no prepared set here or in {trained.config.data.dir}, "
        f"which holds {sets}; name one of these or a text file, or prepare it "
        f"(python -m data.prepare --help)"
    )


def score_corpus(scorer: Scorer, corpus: Corpus, counter: ByteCounter) -> Scored:
    """Score a corpus; `counter` knows the bytes of tokens."""
    nats = []
    size = 0
    windows = corpus.windows
    with progress_bar(total=len(windows), desc=corpus.name, leave=False) as bar:
        for part in np.array_split(windows, math.ceil(len(windows) / WINDOWS)):
            pairs = []
            for start, stop, first in part.tolist():
                ids = corpus.tokens.read(start, stop - start + 1)
                split = first - start + 1
                if corpus.sizes is None:
                    size += counter.count(ids, split)
                else:
                    size += int(corpus.sizes[first + 1 : stop + 1].sum())
                pairs.append((ids[:split].tolist(), ids[split:].tolist()))
            nats += [-score.loglikelihood for score in scorer.score(pairs)]
            bar.update(len(part))
    result = summarize_losses(np.array(nats), corpus.counts, size, corpus.documents)
    return Scored(corpus, np.array(nats), result)


def summarize_losses(
    nats: np.ndarray, counts: np.ndarray, size: int, documents: np.ndarray
) -> Result:
    """Compute the loss over all windows and its standard error.

    The loss is a ratio of two sums over documents: nats over tokens.

    Args:
        nats: (W,) total loss of each window.
        counts: (W,) scored tokens of each window.
        size: bytes in total.
        documents: (W,) see Corpus. If all windows are of one document, each counts as a document.
    """
    W = len(nats)
    tokens = int(counts.sum())
    loss = float(nats.sum() / tokens)
    labels = label_documents(documents)
    stderr = math.nan
    if W > 1:
        residuals = np.bincount(labels, nats - loss * counts)  # (documents,) nats
        weights = np.bincount(labels, counts) / tokens  # (documents,) shares of the tokens
        # A document pulls the mean towards itself: 1 - weight corrects its residual.
        stderr = math.sqrt((residuals**2 / (1 - weights)).sum()) / tokens
    bits_per_byte = math.nan
    if size:
        bits_per_byte = float(nats.sum() / math.log(2) / size)
    perplexity = math.exp(loss) if loss < MAX_LOSS else math.inf
    return Result(W, tokens, size, loss, stderr, perplexity, bits_per_byte)


def label_documents(documents: np.ndarray) -> np.ndarray:
    """The document of each window as a number from 0, (W,); windows of a single one count each."""
    labels = np.unique(documents, return_inverse=True)[1]
    return labels if labels.any() else np.arange(len(documents))


def compare_scored(scored: Scored, first: Scored) -> Difference:
    """The loss minus that of another model on the same windows, paired by document.

    Degrees of freedom are Satterthwaite's, as in report/comparisons.py `cluster_error`: where a few
    documents hold most tokens, those few count.
    """
    counts = scored.corpus.counts
    documents = scored.corpus.documents
    result = summarize_losses(scored.nats - first.nats, counts, 0, documents)
    squares = np.bincount(label_documents(documents), counts) ** 2.0
    freedom = max(1.0, float(squares.sum() ** 2 / (squares**2).sum() - 1))
    return Difference(result.loss, 1, result.stderr, freedom, "documents")


def format_result(corpus: Corpus, result: Result) -> list[str]:
    """Format one row under HEAD."""
    name = f"{corpus.name} ({corpus.split})" if corpus.split else corpus.name
    loss = f"{result.loss:.4f}"
    if not math.isnan(result.stderr):
        loss += f" ± {result.stderr:.4f}"
    bits = "-" if math.isnan(result.bits_per_byte) else f"{result.bits_per_byte:.4f}"
    counts = [f"{result.windows:,}", f"{result.tokens:,}", f"{result.bytes:,}"]
    return [name, *counts, loss, f"{result.perplexity:,.3f}", bits]


def parse_windows(text: str) -> float:
    """Parse --windows: a number above 0, or "all" as infinity."""
    if text == "all":
        return math.inf
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more, or all")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = build_parser("eval.val_loss", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    data = "prepared folders, names in data.dir, text files that data.prepare reads"
    texts = f"more runs to compare; {data} (default: the run's own set)"
    add("texts", nargs="*", metavar="RUN_SET_OR_FILE", help=texts)
    add("--data", nargs="+", default=[], metavar="SET_OR_FILE", help="more of them")
    add("--split", choices=("val", "train"), default="val", help="of sets (default: %(default)s)")
    add("--stride", type=int, metavar="N", help="tokens between window starts, up to block_size")
    windows = "number, spread evenly, with --stride the first N; or all"
    default = "(default: all; of a set without --stride\nthe run's eval.windows)"
    add("--windows", type=parse_windows, metavar="N", help=f"{windows} {default}")
    add_device_argument(parser)
    args = parser.parse_intermixed_args(argv)  # options may stand between run and texts
    args.runs = [args.run]
    for name in reversed(args.texts):
        if (Path(name) / "config.toml").is_file():
            args.runs.insert(1, Path(name))
        else:
            args.data.insert(0, name)
    return args


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Open all data, score it, print the table and write val_loss.json."""
    args = parse_arguments(argv)
    models = []
    corpora_of_runs = []
    for run in args.runs:
        trained, tokenizer = load_run(run, args.step, args.average, args.ema)
        models.append((trained, tokenizer))
        corpora_of_runs.append(open_corpora(trained, tokenizer, args))
    check_paired(models, corpora_of_runs)
    device = set_up_device(args)
    scored_of_runs = []
    for (trained, tokenizer), corpora in zip(models, corpora_of_runs, strict=True):
        scorer = Scorer(trained.model.to(device), scoring_dtype(trained.config, device))
        counter = ByteCounter(tokenizer)
        scored_of_runs.append([score_corpus(scorer, corpus, counter) for corpus in corpora])
        trained.model.cpu()  # the device has one model at a time
    print_results([trained for trained, _ in models], args, scored_of_runs)
    for (trained, _), scored in zip(models, scored_of_runs, strict=True):
        print(append_results(trained, args, scored))


def open_corpora(trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Corpus]:
    """Open the data to score a model on."""
    block = trained.config.model.block_size
    if args.stride is not None and not 1 <= args.stride <= block:
        raise ValueError(f"--stride {args.stride}: expected 1 to {block} (the run's block_size)")
    if not args.data:
        return open_own(trained, args)
    return [find_corpus(name, trained, tokenizer, args) for name in args.data]


def check_paired(
    models: Sequence[tuple[Trained, Tokenizer]], corpora_of_runs: Sequence[list[Corpus]]
) -> None:
    """Raise DataError unless all models are scored on the same windows of the same tokens."""
    first, _ = models[0]
    for (trained, _), corpora in zip(models, corpora_of_runs, strict=True):
        fault = ""
        names = [corpus.name for corpus in corpora]
        first_names = [corpus.name for corpus in corpora_of_runs[0]]
        if trained.metadata.get("tokenizer") != first.metadata.get("tokenizer"):
            fault = "have other tokenizers: score them one by one, and compare bits per byte"
        elif names != first_names:
            fault = (
                f"have the sets {', '.join(names)} and {', '.join(first_names)}: "
                "name one set or text for both"
            )
        else:
            for corpus, other in zip(corpora, corpora_of_runs[0], strict=True):
                if not np.array_equal(corpus.windows, other.windows):
                    fault = f"have other windows of {corpus.name}: name their number (--windows)"
        if fault:
            raise DataError(f"{trained.folder} and {first.folder} {fault}")


def print_results(
    models: Sequence[Trained], args: argparse.Namespace, scored_of_runs: Sequence[list[Scored]]
) -> None:
    """Print one table and, of a mixture, the weighted means."""
    windows = f"stride {args.stride}" if args.stride else "no overlap"
    rows = []
    means = []
    for trained, all_scored in zip(models, scored_of_runs, strict=True):
        title = f"{trained.folder}, step {trained.step:,}"
        if trained.mean:
            title += f", {trained.mean}"
        print(f"{title}; {windows}")
        for scored, first in zip(all_scored, scored_of_runs[0], strict=True):
            row = format_result(scored.corpus, scored.result)
            if len(models) > 1:
                difference = "" if scored is first else str(compare_scored(scored, first))
                row = [str(trained.folder), *row, difference]
            rows.append(row)
        if not args.data and len(all_scored) > 1:
            losses = [scored.result.loss for scored in all_scored]
            weighted = np.dot(list(trained.config.data.sets.values()), losses)
            mean = f"mean by the weights of the mixture: {weighted:.4f}"
            means.append(f"{trained.folder}: {mean}" if len(models) > 1 else mean)
    head = list(HEAD)
    important = ["data", "loss, nats per token", "bits per byte"]
    if len(models) > 1:
        head = ["run", *HEAD, DIFFERENCE]
        if len(rows) == len(models):  # one set of data: its name tells no rows apart
            important.remove("data")
        important = ["run", DIFFERENCE, *important]
    print(text_table(head, rows, 1 if len(models) == 1 else 2, important))
    print("\n".join(means), end="\n" if means else "")


def append_results(
    trained: Trained, args: argparse.Namespace, scored_corpora: Sequence[Scored]
) -> Path:
    """Append a line of JSON per corpus to val_loss.json; what is not finite is null."""
    file = trained.folder / "eval" / trained.label / "val_loss.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as output:
        for corpus, _, result in scored_corpora:
            line = {
                "run": trained.config.run.name,
                "step": trained.step,
                "average": trained.average,
                "ema": trained.ema,
                "data": corpus.name,
                "split": corpus.split,
                "stride": args.stride,
            }
            for key, value in result._asdict().items():
                line[key] = value if math.isfinite(value) else None
            output.write(json.dumps(line) + "\n")
    return file


if __name__ == "__main__":
    run_command(main)
