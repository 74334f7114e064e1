"""Turn a corpus into a data set.

    python -m data.prepare --list
    python -m data.prepare fineweb-edu --config sample-10BT
    python -m data.prepare text --source FILES --name NAME

Worker processes tokenize batches of documents (workers.py). This process writes the ids, in the
order of the documents, into the shards of data/<name>.partial/ (writer.py) and records now and then
how far it is; at the end the folder is renamed to data/<name>/. Killed at any moment, the same
command resumes. The set is identical to the byte, however often that happens and however many
workers there are.
"""

import argparse
import errno
import hashlib
import os
import re
import shlex
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from common.command import build_parser, command, run_command
from common.cores import count_cores
from common.progress import progress_bar
from common.text import format_bytes, plural
from data import DataError
from data.bins import (
    DATA_DIR,
    HASHED_BYTES,
    SHARD_TOKENS,
    Meta,
    check_dataset,
    describe_set,
    partial_folder,
    read_meta,
)
from data.encode import Encoder, choose_split, explain_empty_split, validation_inputs
from data.mixture import describe_sets
from data.readers import Input
from data.sources import SOURCES, describe_sources, hub_inputs, local_inputs, stdlib_inputs
from data.tokenizer import load_tokenizer
from data.workers import Position, encode_inputs
from data.writer import (
    PROGRESS_FILE,
    Writer,
    describe_changes,
    find_revision,
    remove_leftovers,
    resume_progress,
)

LEFT_OUT = ("empty", "bad", "links")  # keys of meta.json's `source`: numbers of documents
END_BYTES = 2**20  # of each end of a large input that are hashed
WORKER_BYTES = 2**25  # of input that are worth starting one more worker for
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a set
SAVE_BYTES = 2**26  # of input after which progress is recorded


@command
def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.list:
        print(f"{describe_sources()}\n\n{describe_sets(args.out)}")
        return 0
    try:
        prepare_dataset(
            args, shlex.join(["python", "-m", "data.prepare", *(a for a in argv if a != "--force")])
        )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{error}. What is done is kept: make room and start again to resume"
        ) from error
    except KeyboardInterrupt:
        print("stopped; start again to resume", file=sys.stderr)
        return 130
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The arguments, with the corpus' own defaults filled in. Raises DataError."""
    parser = build_parser("data.prepare", __doc__)
    add = parser.add_argument
    add(
        "corpus",
        nargs="?",
        choices=SOURCES,
        help="; ".join(f"{k}: {v.about}" for k, v in SOURCES.items()),
    )
    add(
        "--list",
        action="store_true",
        help="print the corpora with sources, sizes and licences; the sets in --out",
    )
    add("--config", help="variant of a corpus (see --list; default: the first)")
    add(
        "--revision",
        help="commit, branch or tag of the hub's data set (default: newest, or that begun with)",
    )
    add(
        "--source",
        nargs="+",
        default=[],
        metavar="PATH",
        help="read local files and folders instead of the hub",
    )
    add(
        "--val-source",
        nargs="+",
        default=[],
        metavar="PATH",
        help="validation files; all of --source is for training",
    )
    add(
        "--roots",
        nargs="+",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="for stdlib: Python sources there instead",
    )
    add(
        "--text-field",
        default="text",
        metavar="FIELD",
        help="field of JSON rows or parquet (default: %(default)s)",
    )
    add("--name", help="name of the data set (default: that of the file or corpus)")
    add(
        "--tokenizer",
        metavar="NAME",
        help="bytes, gpt2, or a folder with tokenizer.json (default: see --list)",
    )
    add(
        "--bpe-ranks",
        metavar="FILE",
        help="GPT-2's BPE file (default: tiktoken's cache, then its download)",
    )
    add(
        "--out",
        type=Path,
        default=DATA_DIR,
        metavar="FOLDER",
        help="folder of data sets (default: data)",
    )
    add(
        "--val-fraction",
        type=float,
        metavar="F",
        help="share of the documents for validation (default: see --list)",
    )
    add(
        "--shard-tokens",
        type=int,
        default=SHARD_TOKENS,
        metavar="N",
        help="tokens per file (default: %(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=count_cores(),
        metavar="N",
        help="processes (default: one per core)",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="leave out documents that cannot be read, and count them",
    )
    add(
        "--force",
        action="store_true",
        help="replace an existing set, or an unfinished one of other arguments",
    )
    args = parser.parse_args(argv)
    if args.list:
        return args
    if args.corpus is None:
        raise DataError(f"which corpus? One of {', '.join(SOURCES)}; --list describes them")
    source = SOURCES[args.corpus]
    if source.hub and not args.source:
        args.config = args.config or next(iter(source.hub))
    # as its file or folder, where a set can be
    if not args.name and args.corpus == "text" and len(args.source) == 1:
        name = Path(args.source[0]).resolve().name.partition(".")[0]
        args.name = name if re.fullmatch(NAME, name) and name not in SOURCES else None
    args.name = args.name or args.corpus
    args.tokenizer = args.tokenizer or source.tokenizer
    if args.val_fraction is None:
        args.val_fraction = 0.0 if args.val_source else source.val_fraction
    args.skip_bad |= args.corpus == "stdlib"
    _check_source(args)
    _check_output(args)
    return args


def _check_source(args: argparse.Namespace) -> None:
    """Raise DataError where options of input contradict the corpus or each other."""
    corpus, source = args.corpus, SOURCES[args.corpus]
    if args.source and not source.local:
        raise DataError(f"{corpus} takes no --source: leave it out, or prepare the corpus `text`")
    if not args.source and source.local and not source.hub:
        notes = f" ({source.notes})" if source.notes else ""
        raise DataError(f"{corpus} needs files: add --source with {source.local}{notes}")
    if args.roots and corpus != "stdlib":
        raise DataError(f"--roots belongs to the corpus stdlib: {corpus} takes --source")
    if args.config and args.config not in source.hub:
        raise DataError(
            f"{corpus} has no --config {args.config}: choose one of {', '.join(source.hub) or 'none'}"
        )
    if args.revision and (args.source or not source.hub):
        raise DataError(
            "--revision belongs to a data set on the hub, and these files are local: leave it out"
        )


def _check_output(args: argparse.Namespace) -> None:
    """Raise DataError where the split, the name or a number cannot be."""
    if args.val_source and not args.source:
        raise DataError("--val-source needs --source, the files for training")
    if args.val_source and args.val_fraction:
        raise DataError("--val-source replaces --val-fraction: leave one of them out")
    if not args.val_source and not 0 < args.val_fraction < 1:
        raise DataError(f"--val-fraction {args.val_fraction}: expected a number between 0 and 1")
    if not re.fullmatch(NAME, args.name) or args.name.endswith(".partial"):
        raise DataError(
            f"--name {args.name!r}: use only letters, digits and . _ -, and no .partial at the end"
        )
    if args.name != args.corpus and args.name in SOURCES:
        raise DataError(f"--name {args.name} is the name of a corpus: choose another")
    for option, value in (("--shard-tokens", args.shard_tokens), ("--workers", args.workers)):
        if value < 1:
            raise DataError(f"{option} {value}: expected at least 1")


def prepare_dataset(args: argparse.Namespace, command_line: str) -> None:
    """Make the set that `args` describe unless it exists.

    `command_line`, what the user typed, goes into meta.json.
    """
    folder = (args.out / args.name).resolve()
    made_from = {
        key: getattr(args, key) for key in ("corpus", "text_field", "val_fraction", "shard_tokens")
    }
    made_from |= {"config": args.config} if args.config else {}
    if (folder / "meta.json").exists() and not args.force:
        print(f"already there: {describe_set(_check_existing(folder, made_from, args), folder)}")
        remove_leftovers(folder)
        return
    made_from, inputs, encoder = _open_inputs(args, made_from, partial_folder(folder))
    with Writer(folder, encoder.tokenizer, args.shard_tokens) as writer:
        left_out = _tokenize(writer, inputs, encoder, made_from, args)
        train, val = writer.splits["train"], writer.splits["val"]
        if min(train.tokens, val.tokens) < 2:
            (writer.partial / PROGRESS_FILE).unlink(missing_ok=True)  # other arguments are needed
            if train.documents and val.documents:
                raise DataError(
                    f"train has {train.tokens} and val {val.tokens} token(s), both need 2; give more text"
                )
            # the hub's
            raise DataError(explain_empty_split(train.documents, val.documents, args.val_fraction))
        meta = writer.finish(args.name, made_from | left_out, command_line)
    print(f"prepared: {describe_set(meta, folder)}")


def _open_inputs(
    args: argparse.Namespace, made_from: dict, partial: Path
) -> tuple[dict, list[Input], Encoder]:
    """The files to read, what turns them into ids, and `made_from` with what identifies both."""
    streamed = None if args.source else SOURCES[args.corpus].hub.get(args.config)
    inputs = [] if streamed else _local_files(args)
    val_inputs = validation_inputs(args.val_source, inputs)
    tokenizer = load_tokenizer(args.tokenizer, args.bpe_ranks)
    if streamed:
        revision, inputs = hub_inputs(streamed, args.revision or find_revision(partial, made_from))
        made_from = made_from | {"revision": revision}
    made_from = made_from | {"inputs": hash_inputs(inputs), "tokenizer": args.tokenizer}
    made_from |= {"val_inputs": hash_inputs(val_inputs)} if val_inputs else {}
    encoder = Encoder(tokenizer, args.val_fraction, args.text_field, args.skip_bad)
    if not streamed:
        split = choose_split(inputs, val_inputs, encoder)
        made_from |= {"split": split} if split != "documents" else {}
        inputs = [file._replace(split=split) for file in inputs] + val_inputs
    return made_from, inputs, encoder


def _tokenize(
    writer: Writer, inputs: list[Input], encoder: Encoder, made_from: dict, args: argparse.Namespace
) -> dict[str, int]:
    """Write the documents of `inputs` from where an earlier process stopped.

    Returns the numbers of those left out.
    """
    progress = resume_progress(writer.partial, made_from, args.force)
    if progress.bad and not args.skip_bad:
        begun = f"was begun with --skip-bad and lacks {plural(progress.bad, 'bad document')}"
        raise DataError(f"{writer.partial} {begun}: add --skip-bad, or remove it")
    writer.resume(progress.splits)
    total, saved = sum(file.size for file in inputs), 0  # bytes
    workers = min(args.workers, 1 + total // WORKER_BYTES)
    done = sum(split.tokens for split in progress.splits.values())
    resuming = f", resuming after {done:,} tokens" if done else ""
    size = f"{plural(len(inputs), 'file')}, {format_bytes(total)}"
    print(f"{args.name}: {size}, {args.tokenizer}, {plural(workers, 'worker')}{resuming}")
    bar = progress_bar(every=30, desc=args.name, total=total, unit="B", unit_scale=True)
    batches = encode_inputs(inputs, encoder, workers, Position(progress.files, progress.documents))
    cut = any(file.split == "ends" for file in inputs)
    with bar, closing(batches):
        for encoded, position, read_bytes in batches:
            for split, ids in (("train", encoded.train), ("val", encoded.val)):
                # Where documents are cut, end-of-text stands between their parts only, so not
                # before the first.
                first = cut and not writer.splits[split].tokens
                documents = int(np.count_nonzero(ids == writer.tokenizer.eot))
                writer.write(split, ids[1:] if first else ids, documents)
            progress.add(encoded)
            progress.files, progress.documents = position
            bar.update(read_bytes - bar.n)
            if position.files == len(inputs) or read_bytes - saved >= SAVE_BYTES:
                progress.splits, saved = writer.save(), read_bytes
                progress.save(writer.partial)
    if progress.empty or progress.bad or progress.links:
        counts = f"{plural(progress.empty, 'empty document')}, {progress.bad:,} that cannot be read"
        counts += (
            f", {plural(progress.links, 'link')} or paths out of archives" if progress.links else ""
        )
        print(f"left out: {counts}")
    return {key: getattr(progress, key) for key in LEFT_OUT}


def _local_files(args: argparse.Namespace) -> list[Input]:
    return (
        stdlib_inputs(args.roots)
        if args.corpus == "stdlib"
        else local_inputs(map(Path, args.source))
    )


def hash_inputs(inputs: list[Input]) -> str:
    """A hash of names and sizes and, of local files, of contents.

    Beyond 1 GiB in all only the first and last MiB of each file are read: a change between them
    goes unnoticed if the size stays.
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
    """The set in `folder`.

    Raises DataError if it is damaged, or its arguments or files differ from these.
    """
    meta = read_meta(folder)
    now = made_from | {"tokenizer": args.tokenizer}
    now |= {"revision": args.revision} if args.revision else {}
    if (args.source or not args.config) and all(map(os.path.exists, args.source)):
        now["inputs"] = hash_inputs(_local_files(args))
    if args.val_source and all(map(os.path.exists, args.val_source)):
        now["val_inputs"] = hash_inputs(local_inputs(map(Path, args.val_source)))
    follow = {*LEFT_OUT, "split", "inputs", "revision"} | (
        {"val_inputs"} if args.val_source else set()
    )
    not_asked = follow - set(now)  # what follows from the rest, and what is not known now
    changes = describe_changes(
        {key: value for key, value in meta.source.items() if key not in not_asked}, now
    )
    if changes:
        raise DataError(
            f"{folder} was made with other arguments, or its files have changed ({changes}): replace it with --force, "
            f"or choose another --name"
        )
    return check_dataset(folder, meta.tokenizer["vocab_size"])


if __name__ == "__main__":
    run_command(main)
