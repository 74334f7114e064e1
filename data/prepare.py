"""Turn a corpus into a data set.

    python -m data.prepare --list
    python -m data.prepare fineweb-edu --config sample-10BT
    python -m data.prepare text --source FILES --name NAME

Worker processes tokenize the corpus unit by unit (see units.py); then the units are joined into the shards of
data/<name>/ (see bins.py). Killed at any moment, the same command resumes. The set is identical to the byte, however
often that happens and however many workers and machines there are.
"""

import argparse
import errno
import hashlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np

from common.command import run_command
from common.progress import progress_bar
from common.text import format_size, plural
from data import DataError
from data.bins import DATA_DIR, HASHED_BYTES, SHARD_TOKENS, Meta, check_dataset, describe_set, partial_folder, read_meta
from data.encode import Encoder
from data.mixture import describe_sets
from data.readers import Input
from data.sources import SHAKESPEARE, SOURCES, describe_sources, hub_inputs, local_inputs, stdlib_inputs
from data.split import choose_split, explain_empty_split, validation_inputs, warn_of_weak_validation
from data.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from data.units import describe_changes, open_units, read_begun, read_units, remove_units, unit_files, write_units
from data.writer import Writer, open_partial, remove_leftovers

FULL = (errno.ENOSPC, errno.EDQUOT)
END_BYTES = 2**20  # of each end of a large input that are hashed
WORKER_BYTES = 2**25  # of input that are worth starting one more worker for


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    try:
        args = parse_arguments(argv)
        if args.list:
            print(f"{describe_sources()}\n\n{describe_sets(args.out)}")
        else:
            prepare_dataset(args, shlex.join(["python", "-m", "data.prepare", *(a for a in argv if a != "--force")]))
    except BrokenPipeError:  # an OSError that is for run_command
        raise
    except (DataError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in FULL
        remedy = ". Finished units are kept: make room and start again to resume" if full else ""
        print(f"error: {error}{remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; start again to resume", file=sys.stderr)
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        remedy = "; files and folders follow --source" if re.match("unrecognized arguments: [^-]", message) else ""
        raise DataError(f"{message}{remedy} (python -m data.prepare --help)")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The arguments, with the corpus' own defaults filled in. Raises DataError."""
    parser = _Parser(prog="python -m data.prepare", description="Turn a corpus into token shards for training.")
    add = parser.add_argument
    add("corpus", nargs="?", choices=SOURCES, help="; ".join(f"{k}: {v.about}" for k, v in SOURCES.items()))
    add("--list", action="store_true", help="print the corpora with sources, sizes and licences; the sets in --out")
    add("--config", help="variant of a corpus (see --list; default: the first)")
    add("--revision", help="commit, branch or tag of the hub's data set (default: newest)")
    add("--source", nargs="+", default=[], metavar="PATH", help="read local files and folders instead of the hub")
    add("--val-source", nargs="+", default=[], metavar="PATH", help="validation files; all of --source is for training")
    add("--roots", nargs="+", default=[], type=Path, metavar="FOLDER", help="for stdlib: Python sources there instead")
    add("--text-field", default="text", metavar="FIELD", help="field of JSON rows or parquet (default: %(default)s)")
    add("--name", help="name of the data set (default: the corpus')")
    add("--tokenizer", metavar="NAME", help="bytes, gpt2, or a folder with tokenizer.json (default: see --list)")
    add("--bpe-ranks", metavar="FILE", help="GPT-2's BPE file (default: tiktoken's cache, then its download)")
    add("--out", type=Path, default=DATA_DIR, metavar="FOLDER", help="folder of data sets (default: data)")
    add("--val-fraction", type=float, metavar="F", help="share of the documents for validation (default: see --list)")
    add("--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="tokens per file (default: %(default)s)")
    add("--workers", type=int, default=cores(), metavar="N", help="processes (default: one per core)")
    add("--skip-bad", action="store_true", help="leave out documents that cannot be read, and count them")
    add("--shard", metavar="I/N", help="tokenize the I-th of N parts only; then join all without --shard")
    add("--force", action="store_true", help="replace an existing set, or an unfinished one of other arguments")
    args = parser.parse_args(argv)
    if args.list:
        return args
    if args.corpus is None:
        raise DataError(f"which corpus? One of {', '.join(SOURCES)}; --list describes them")
    source = SOURCES[args.corpus]
    if source.hub and not args.source:
        args.config = args.config or next(iter(source.hub))
    args.name = args.name or args.corpus
    args.tokenizer = args.tokenizer or source.tokenizer
    if args.val_fraction is None:
        args.val_fraction = 0.0 if args.val_source else source.val_fraction
    args.skip_bad |= args.corpus == "stdlib"
    _check_arguments(args)
    args.shard = tuple(map(int, args.shard.split("/"))) if args.shard else None
    return args


def _check_arguments(args: argparse.Namespace) -> None:
    """Raises DataError where arguments contradict each other or the corpus."""
    corpus, source = args.corpus, SOURCES[args.corpus]
    shard = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", args.shard or "1/1")
    variants = f"choose one of {', '.join(source.hub)}" if source.hub else "leave it out"
    faults = {
        f"books3 was withdrawn from the hub for copyright: name your own copy with --source ({source.local}), or "
        f"prepare pg19, books in the public domain, instead": corpus == "books3" and not args.source,
        "text needs files: add --source PATH ...": corpus == "text" and not args.source,
        f"shakespeare needs its text: download {SHAKESPEARE} and add --source input.txt": (
            corpus == "shakespeare" and not args.source
        ),
        f"--roots belongs to the corpus stdlib: {corpus} takes --source": args.roots and corpus != "stdlib",
        "--val-source needs --source, the files for training": args.val_source and not args.source,
        "--val-source replaces --val-fraction: leave one of them out": args.val_source and args.val_fraction,
        f"{corpus} takes no --source: leave it out, or prepare the corpus `text`": args.source and not source.local,
        f"{corpus} has no --config {args.config}: {variants}": args.config and args.config not in source.hub,
        "--revision belongs to a data set on the hub, and these files are local: leave it out": args.revision
        and (args.source or not source.hub),
        f"--name {args.name!r}: use only letters, digits and . _ -, and no .partial at the end": (
            not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.name) or args.name.endswith(".partial")
        ),
        f"--name {args.name} is the name of a corpus: choose another": args.name != corpus and args.name in SOURCES,
        f"--val-fraction {args.val_fraction}: expected a number between 0 and 1": not (
            args.val_source or 0 < args.val_fraction < 1
        ),
        f"--shard-tokens {args.shard_tokens}: expected at least 1": args.shard_tokens < 1,
        f"--workers {args.workers}: expected at least 1": args.workers < 1,
        f"--shard {args.shard}: expected I/N with I from 1 to N, for instance 1/4": not shard
        or int(shard[1]) > int(shard[2]),
    }
    for message, applies in faults.items():
        if applies:
            raise DataError(message)


def cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_dataset(args: argparse.Namespace, command: str) -> None:
    """Make the set that `args` describe unless it exists. `command`, what the user typed, is kept in meta.json."""
    folder = (args.out / args.name).resolve()
    made_from = {key: getattr(args, key) for key in ("corpus", "text_field", "val_fraction", "shard_tokens")}
    made_from |= {"config": args.config} if args.config else {}
    if (folder / "meta.json").exists() and not args.force:
        print(f"already there: {describe_set(_check_existing(folder, made_from, args), folder)}")
        remove_leftovers(folder)
        return

    hub = SOURCES[args.corpus].hub.get(args.config)
    streamed = hub if not args.source else None
    inputs = [] if streamed else _local_files(args)
    val_inputs = validation_inputs(args.val_source, inputs)
    tokenizer = _load_tokenizer(args)
    if streamed:
        begun = read_begun(partial_folder(folder))
        resumed = begun.get("revision") if made_from.items() <= begun.items() else None
        made_from["revision"], inputs = hub_inputs(streamed, args.revision or resumed)
    made_from |= {"inputs": hash_inputs(inputs), "tokenizer": args.tokenizer}
    made_from |= {"val_inputs": hash_inputs(val_inputs)} if val_inputs else {}
    encoder = Encoder(tokenizer, args.val_fraction, args.text_field, hub.only if hub else None, args.skip_bad)
    if not streamed:
        split = choose_split(inputs, val_inputs, encoder)
        made_from |= {"split": split} if split != "documents" else {}
        inputs = [file._replace(split=split) for file in inputs] + val_inputs
    if args.shard:
        with open_partial(folder, shared=True):
            units = open_units(partial_folder(folder), made_from, args.force)
            _tokenize(units, inputs, encoder, args)
        i, n = args.shard
        print(f"part {i} of {n} is tokenized: when all are, the same command without --shard joins them")
        return
    with Writer(folder, tokenizer, args.shard_tokens) as writer:
        if (folder / "meta.json").exists() and not args.force:
            raise DataError(f"{folder}: another process has just finished this set: start again")
        units = open_units(writer.partial, made_from, args.force)
        _tokenize(units, inputs, encoder, args)
        with _state_space(writer.partial, lambda: _size_of(units)):
            left_out = _join_units(units, writer, inputs, args)
            meta = writer.finish(args.name, made_from | left_out, command)
    print(f"prepared: {describe_set(meta, folder)}")


def _tokenize(folder: Path, inputs: list[Input], encoder: Encoder, args: argparse.Namespace) -> None:
    """Write the units of `inputs` that are missing in `folder`, with a progress bar."""
    total = sum(file.size for file in inputs)
    workers = min(args.workers, 1 + total // WORKER_BYTES)
    done = len(unit_files(folder))
    resuming = f", resuming after {plural(done, 'unit')}" if done else ""
    size = f"{plural(len(inputs), 'file')}, {format_size(total)}"
    print(f"{args.name}: {size}, {args.tokenizer}, {plural(workers, 'worker')}{resuming}")
    bar = progress_bar(every=30, desc=args.name, total=total, unit="B", unit_scale=True)

    def space_needed() -> float:
        written = _size_of(folder)
        rest = written * (total - bar.n) / bar.n if bar.n else total
        return 2 * rest + written  # the other units, and then the shards

    units = write_units(folder, inputs, encoder, workers, args.shard or (1, 1))
    with bar, closing(units), _state_space(folder.parent, space_needed):
        for read_bytes in units:
            bar.update(read_bytes - bar.n)
        bar.update(total - bar.n)  # what existed already is not read


def _size_of(units: Path) -> int:
    """Bytes of all units in a folder, and so of the shards that they make."""
    return sum(path.stat().st_size for path in unit_files(units))


@contextmanager
def _state_space(folder: Path, needed: Callable[[], float]) -> Iterator[None]:
    """Where the disk is full within this context, the error names `folder` and how many bytes it still needs."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        amount = f"about {needed() / 1e9:.2g} GB of free space are needed"
        raise OSError(error.errno, f"{error.strerror}: {amount}", str(folder)) from error


def _join_units(folder: Path, writer: Writer, inputs: list[Input], args: argparse.Namespace) -> dict[str, int]:
    """All units of `folder` into the shards of `writer`; returns the number of each kind of documents left out."""
    needed, free = _size_of(folder), shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({free / 1e9:.2g} GB are free)")
    empty, bad, links, examples, val_sources = 0, 0, 0, [], set()
    for unit in read_units(folder):
        for split, ids in (("train", unit.train), ("val", unit.val)):
            documents = int(np.count_nonzero(ids == writer.tokenizer.eot))
            between = inputs[0].split == "ends" and not writer.splits[split].tokens  # end-of-text only between parts
            writer.write(split, ids[1:] if between else ids, documents)
        empty, bad, links = empty + unit.empty, bad + unit.bad, links + unit.links
        examples = (examples + unit.examples)[:3]
        val_sources |= set(unit.val_sources)
    if empty or bad or links:
        counts = f"{plural(empty, 'empty document')}, {bad:,} that cannot be read"
        counts += f", {plural(links, 'link')} in archives" if links else ""
        print("\n  ".join([f"left out: {counts}", *examples]))
    if bad and not args.skip_bad:
        raise DataError(
            f"{folder} was begun with --skip-bad and lacks {plural(bad, 'bad document')}: add --skip-bad, or remove it"
        )
    train, val = (writer.splits[split].documents for split in ("train", "val"))
    if not (train and val):  # of the hub's files; local ones were looked through before
        remove_units(writer.partial)  # other arguments are needed
        if not train and not val:
            raise DataError(f"no documents to read ({empty:,} empty, {bad:,} bad): name other files")
        raise DataError(explain_empty_split(train, val, args.val_fraction))
    warn_of_weak_validation(inputs, val, val_sources)
    return {"empty": empty, "bad": bad, "links": links}


def _load_tokenizer(args: argparse.Namespace) -> Tokenizer:
    try:
        return load_tokenizer(args.tokenizer, args.bpe_ranks)
    except TokenizerError as error:
        remedy = "" if args.bpe_ranks else "\nor do without it: --tokenizer bytes makes a token of each byte"
        raise DataError(f"{error}{remedy}") from error


def _local_files(args: argparse.Namespace) -> list[Input]:
    return stdlib_inputs(args.roots) if args.corpus == "stdlib" else local_inputs(map(Path, args.source))


def hash_inputs(inputs: list[Input]) -> str:
    """A hash of names and sizes and, of local files, of contents.

    Beyond 1 GiB in all only the first and last MiB of each file are read: a change between them goes unnoticed if the
    size stays.
    """
    complete = sum(file.size for file in inputs) <= HASHED_BYTES
    digest = hashlib.sha256()
    for file in inputs:
        digest.update(f"{file.name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        if "://" not in file.url:
            with open(file.url, "rb") as opened:
                if complete:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
                else:
                    digest.update(opened.read(END_BYTES))
                    opened.seek(max(0, file.size - END_BYTES))
                    digest.update(opened.read(END_BYTES))
    return digest.hexdigest()


def _check_existing(folder: Path, made_from: dict, args: argparse.Namespace) -> Meta:
    """The set in `folder`. Raises DataError if it is damaged, or its arguments or files differ from these."""
    meta = read_meta(folder)
    now = made_from | {"tokenizer": args.tokenizer}
    now |= {"revision": args.revision} if args.revision else {}
    if (args.source or not args.config) and all(map(os.path.exists, args.source)):
        now["inputs"] = hash_inputs(_local_files(args))
    if args.val_source and all(map(os.path.exists, args.val_source)):
        now["val_inputs"] = hash_inputs(local_inputs(map(Path, args.val_source)))
    follow = {"empty", "bad", "links", "split", "inputs", "revision"} | ({"val_inputs"} if args.val_source else set())
    not_asked = follow - set(now)  # what follows from the rest, and what is not known now
    changes = describe_changes({key: value for key, value in meta.source.items() if key not in not_asked}, now)
    if changes:
        raise DataError(
            f"{folder} was made with other arguments, or its files have changed ({changes}): replace it with --force, "
            f"or choose another --name"
        )
    return check_dataset(folder, meta.tokenizer["vocab_size"])


if __name__ == "__main__":
    run_command(main)
