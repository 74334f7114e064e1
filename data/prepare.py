"""Turn a corpus into a data set.

    python -m data.prepare --list
    python -m data.prepare fineweb-edu --config sample-10BT
    python -m data.prepare text --source FILES --name NAME

Worker processes tokenize batches of documents (workers.py). This process writes the ids, in the
order of the documents, into the shards of data/<name>.partial/ (writer.py) and records its
progress. At the end the folder is renamed to data/<name>/. After a kill the same command resumes.
The set is the same to the byte, with any number of kills and of workers.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m data.prepare")

import argparse
import errno
import hashlib
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.command import build_parser, command, run_command
from common.cores import count_cores
from common.files import DamagedFile, exists, is_file, read_json, write_atomic
from common.progress import progress_bar
from common.text import format_bytes, plural
from data import DataError
from data.bins import (
    CLOSED,
    DATA_DIR,
    HASHED_BYTES,
    SHARD_TOKENS,
    Meta,
    Split,
    check_dataset,
    describe_set,
    partial_folder,
    read_meta,
    sha256_of,
)
from data.encode import Encoded, Encoder, choose_split, read_texts, split_position
from data.readers import Input
from data.round_trip import check_loss, describe_loss
from data.sources import LIST, SOURCES, hub_inputs, local_inputs, stdlib_inputs
from data.tokenizer import END_OF_TEXT, TOKENIZER_FILE, identity, load_tokenizer
from data.workers import Position, encode_inputs
from data.writer import PROGRESS_FILE, Writer, refuse_foreign_files, remove_leftovers

WORKER_BYTES = 2**25  # input per worker; less is not worth its start (not measured)
SAVE_BYTES = 2**26  # input between two records of progress (not measured)
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # what a set may be called
# on which the tokens depend, for meta.json
ARGUMENTS = ("corpus", "config", "text_field", "tokenizer", "val_fraction")


@command
def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.list:
        print(LIST)
        return 0
    recorded = [argument for argument in argv if argument != "--force"]
    try:
        prepare_dataset(args, shlex.join(["python", "-m", "data.prepare", *recorded]))
    except OSError as error:
        error.filename = error.filename or str(partial_folder(args.out / args.name))
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
    """The arguments, completed by the defaults of the corpus. Raises DataError."""
    parser = build_parser("data.prepare", __doc__)
    add = parser.add_argument
    add("corpus", nargs="?", choices=SOURCES, help="see --list")
    add("--config", help="variant of a corpus (see --list; default: the first)")
    add(
        "--revision",
        help="commit, branch or tag of the hub's data set (default: the newest)",
    )
    paths: dict[str, Any] = {"nargs": "+", "default": [], "type": Path, "metavar": "PATH"}
    add("--source", **paths, help="read local files and folders instead of the hub")
    add("--val-source", **paths, help="validation files; all of --source is for training")
    add(
        "--text-field",
        default="text",
        help="field of JSON rows, column of parquet (default: %(default)s)",
    )
    add("--name", help="name of the data set (default: the file's or the corpus')")
    add(
        "--tokenizer",
        help="bytes, gpt2, or a folder with tokenizer.json (default: see --list)",
    )
    add("--bpe-ranks", help="GPT-2's BPE file (default: tiktoken's cache, then its download)")
    add("--out", type=Path, default=DATA_DIR, help="folder of data sets (default: data)")
    add(
        "--val-fraction",
        type=float,
        help="share of the documents for validation (default: see --list)",
    )
    add("--workers", type=int, default=count_cores(), help="processes (default: one per core)")
    flags = {
        "--list": "print the corpora with sources, sizes and licences",
        "--skip-bad": "leave out documents that cannot be read, and count them",
        "--allow-loss": "accept a tokenizer that does not give the text back",
        "--force": "replace an existing set, or an unfinished one of other arguments",
    }
    for flag, meaning in flags.items():
        add(flag, action="store_true", help=meaning)
    args = parser.parse_args(argv)
    if args.list:
        return args
    if args.corpus is None:
        raise DataError(f"which corpus? One of {', '.join(SOURCES)}; --list describes them")
    source = SOURCES[args.corpus]
    if source.hub and not args.source:
        args.config = args.config or next(iter(source.hub))
    if args.corpus == "text" and len(args.source) == 1:  # its file or folder, to the first dot
        args.name = args.name or args.source[0].resolve().name.partition(".")[0]
    args.name = args.name or args.corpus
    args.tokenizer = args.tokenizer or source.tokenizer
    if args.val_fraction is None:
        args.val_fraction = 0.0 if args.val_source else source.val_fraction
    if args.corpus == "stdlib":  # a Python source may declare another encoding than UTF-8
        args.skip_bad = True
    check_source(args)
    check_output(args)
    return args


def check_source(args: argparse.Namespace) -> None:
    """Raise DataError if options of input contradict the corpus or each other."""
    corpus = args.corpus
    source = SOURCES[corpus]
    if args.source and not source.local:
        raise DataError(f"{corpus} takes no --source: leave it out, or prepare the corpus `text`")
    if not args.source and source.local and not source.hub:
        notes = f" ({source.notes})" if source.notes else ""
        raise DataError(f"{corpus} needs files: add --source with {source.local}{notes}")
    if args.config and args.config not in source.hub:
        known = ", ".join(source.hub) or "none"
        raise DataError(f"{corpus} has no --config {args.config}: choose one of {known}")
    if args.revision and not is_remote(args):
        raise DataError(
            "--revision belongs to a data set on the hub, and these files are local: leave it out"
        )
    if args.val_source and not args.source:
        raise DataError("--val-source needs --source, the files for training")
    if args.val_source and args.val_fraction:
        raise DataError("--val-source replaces --val-fraction: leave one of them out")


def check_output(args: argparse.Namespace) -> None:
    """Raise DataError for an invalid split, name or number."""
    if not args.val_source and not 0 < args.val_fraction < 1:
        raise DataError(f"--val-fraction {args.val_fraction}: expected a number between 0 and 1")
    if not re.fullmatch(NAME, args.name) or args.name.endswith(".partial"):
        raise DataError(
            f"--name {args.name!r}: use only letters, digits and . _ -, and no .partial at the end"
        )
    if args.name != args.corpus and args.name in SOURCES:
        raise DataError(f"--name {args.name} is the name of a corpus: choose another")
    if args.workers < 1:
        raise DataError(f"--workers {args.workers}: expected at least 1")


def prepare_dataset(args: argparse.Namespace, command_line: str) -> None:
    """Make the set that `args` describe unless it exists.

    `command_line`, which the user typed, goes into meta.json.
    """
    folder = (args.out / args.name).resolve()
    partial = partial_folder(folder)
    provenance = {key: getattr(args, key) for key in ARGUMENTS if getattr(args, key) is not None}
    if exists(folder / "meta.json") and not args.force:
        meta = check_existing(folder, provenance, args)
        print(f"already there: {describe_set(meta, folder)}")
        remove_leftovers(folder)
        return
    for place in (folder, partial):  # before much is read
        refuse_foreign_files(place)
    inputs, notes = list_files(args)
    times = read_times(inputs)
    print(*notes, sep="\n", end="\n" if notes else "")
    tokenizer = load_tokenizer(args.tokenizer, args.bpe_ranks)
    encoder = Encoder(tokenizer, args.val_fraction, args.text_field, args.skip_bad)
    split = "documents"
    if is_remote(args):
        hub = SOURCES[args.corpus].hub[args.config]
        revision = args.revision or find_revision(args, partial)
        provenance["revision"], inputs = hub_inputs(hub, revision)
        if args.revision != provenance["revision"]:  # the same set again, whatever the hub has
            command_line += f" --revision {provenance['revision']}"
    elif args.val_source:
        texts = read_texts([file for file in inputs if file.split == "val"], encoder)
        encoder = encoder._replace(held_out=frozenset(map(split_position, texts)))
    else:
        split = choose_split(inputs, encoder)
        inputs = [file._replace(split=split) for file in inputs]
    provenance |= hash_inputs(inputs)
    if split != "documents":
        provenance["split"] = split
    with Writer(folder, tokenizer, SHARD_TOKENS) as writer:
        progress = tokenize(writer, inputs, encoder, provenance, args)
        fault = find_fault(args, times, writer.tokens)
        if fault:
            (partial / PROGRESS_FILE).unlink(missing_ok=True)  # the next try starts over
            raise DataError(fault)
        provenance |= {key: progress.counts.get(key, 0) for key in ("empty", "bad", "shared")}
        loss = describe_loss(progress.counts, progress.example)
        if loss:
            print(f"warning: tokenizer {tokenizer.name}: {loss}")
            provenance["losses"] = [loss]
        meta = writer.finish(args.name, provenance, command_line)
    print(f"prepared: {describe_set(meta, folder)}")


def find_fault(
    args: argparse.Namespace, times: list[tuple[Input, int]], tokens: dict[str, int]
) -> str:
    """Say why a set of so many `tokens` is of no use; empty if it may be used.

    `times` of its files are from before they were read.
    """
    if read_times(list_files(args)[0]) != times:
        return (
            f"{args.name}: input files changed while they were read, so the set would be of "
            "neither state: prepare it again when nothing writes to them"
        )
    if min(tokens.values()) >= 2:
        return ""
    other = f"--val-fraction than {args.val_fraction}"
    if args.val_source:
        other = "--val-source: its documents are left out of training"
    return (
        f"train has {tokens['train']} and val {tokens['val']} token(s), both need 2: give more "
        f"text, or another {other}"
    )


def list_files(args: argparse.Namespace) -> tuple[list[Input], list[str]]:
    """The local files, none if the hub is read, and lines that say which of them are read.

    Raises DataError as `local_inputs` does.
    """
    if args.corpus == "stdlib":
        return stdlib_inputs(), []
    any_text = args.corpus == "text"
    inputs, notes = local_inputs(args.source, "--source", any_text)
    val_inputs, val_notes = local_inputs(args.val_source, "--val-source", any_text)
    inputs += [file._replace(split="val") for file in val_inputs]
    return inputs, notes + val_notes


def is_remote(args: argparse.Namespace) -> bool:
    """True if the hub is read."""
    return bool(SOURCES[args.corpus].hub) and not args.source


def read_times(inputs: Sequence[Input]) -> list[tuple[Input, int]]:
    """Local files with the times of their last changes."""
    return [(file, os.stat(file.url).st_mtime_ns) for file in inputs]


def hash_inputs(inputs: Sequence[Input]) -> dict[str, str]:
    """Hash the names and sizes of files and, of local files, their contents.

    Returns:
        `inputs`, and `val_inputs` if there are files for validation alone, as meta.json has them.
    """

    def hash_file(file: Input) -> bytes:
        if "://" in file.url:
            return b""
        with open(file.url, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()

    local_bytes = sum(file.size for file in inputs if "://" not in file.url)
    if local_bytes > HASHED_BYTES:
        print(f"hashing {format_bytes(local_bytes)} of input", flush=True)
    digests = {"inputs": hashlib.sha256()}
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        for file, content in zip(inputs, pool.map(hash_file, inputs), strict=True):
            key = "val_inputs" if file.split == "val" else "inputs"
            digest = digests.setdefault(key, hashlib.sha256())
            digest.update(f"{file.name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
            digest.update(content)
    return {key: digest.hexdigest() for key, digest in digests.items()}


@dataclass
class Progress:
    """The content of progress.json."""

    __pydantic_config__ = CLOSED
    made_from: dict[str, Any]  # only the same arguments and inputs resume the set
    position: Position = (0, 0)  # in the inputs
    splits: dict[str, Split] = field(default_factory=dict)  # see `Writer.save`
    counts: dict[str, int] = field(default_factory=dict)  # see `Encoded`
    example: str = ""  # the first text that does not come back
    sha256: str = ""  # of all else in the file

    def compute_sha256(self) -> str:
        """What `sha256` must be."""
        return sha256_of(asdict(replace(self, sha256="")))


def read_progress(path: Path) -> Progress:
    """The record at `path`. Raises DataError if it is damaged."""
    try:
        progress = read_json(path, Progress)
    except DamagedFile as error:
        raise DataError(f"{error}: start over with --force") from None
    if progress.sha256 != progress.compute_sha256():
        raise DataError(f"{path}: damaged, its sha256 is another: start over with --force")
    return progress


def find_revision(args: argparse.Namespace, partial: Path) -> str | None:
    """The commit of the hub that an unfinished set is made from; None: the newest is to be read."""
    path = partial / PROGRESS_FILE
    if args.force or not exists(path):
        return None
    made_from = read_progress(path).made_from
    if (made_from["corpus"], made_from.get("config")) != (args.corpus, args.config):
        return None  # the set will be refused
    return made_from.get("revision")


def resume_progress(partial: Path, made_from: dict, force: bool) -> Progress:
    """The progress recorded in `partial`, or a new one.

    Raises DataError if the record has another provenance or is damaged; `force` starts over.
    """
    path = partial / PROGRESS_FILE
    if exists(path) and not force:
        progress = read_progress(path)
        refuse_changes(progress.made_from, made_from, f"{partial} holds an unfinished set made")
        return progress
    path.unlink(missing_ok=True)
    return Progress(made_from)


def refuse_changes(recorded: dict, now: dict, made: str) -> None:
    """Raise DataError, which begins with `made`, if two records of arguments and files differ."""
    changes = []
    for key in sorted(recorded | now):
        before, value = recorded.get(key), now.get(key)
        if before != value:
            changes.append(f"{key} was {before!r:.42}, is {value!r:.42}")
    if changes:
        raise DataError(
            f"{made} with other arguments or files ({'; '.join(changes)}): use those, start over "
            "with --force, or choose another --name"
        )


def tokenize(
    writer: Writer,
    inputs: list[Input],
    encoder: Encoder,
    provenance: dict,
    args: argparse.Namespace,
) -> Progress:
    """Write the documents of `inputs`, from where an earlier process stopped; returns the end."""
    made_from = provenance | {"tokenizer_files": identity(encoder.tokenizer)}
    progress = resume_progress(writer.partial, made_from, args.force)
    writer.resume(progress.splits)
    total_bytes = sum(file.size for file in inputs)
    workers = min(args.workers, 1 + total_bytes // WORKER_BYTES)
    size = f"{plural(len(inputs), 'file')}, {format_bytes(total_bytes)}"
    start = f"{args.name}: {size}, {args.tokenizer}, {plural(workers, 'worker')}"
    tokens = sum(writer.tokens.values())
    if tokens:
        start += f", resuming after {tokens:,} tokens"
    print(start)
    bar = progress_bar(every=30, desc=args.name, total=total_bytes, unit="B", unit_scale=True)
    batches = encode_inputs(inputs, encoder, workers, progress.position)
    saved_bytes = 0
    with bar, closing(batches):
        for encoded, batch in batches:
            write_batch(writer, encoded, cuts_documents="split" in provenance)
            progress.counts = dict(Counter(progress.counts) + Counter(encoded.counts))
            progress.example = progress.example or encoded.example
            bar.update(batch.read_bytes - bar.n)
            is_end = batch.position == (len(inputs), 0)
            if is_end or batch.read_bytes - saved_bytes >= SAVE_BYTES:
                if not args.allow_loss:
                    check_loss(encoder.tokenizer, progress.counts, progress.example)
                progress.position = batch.position
                progress.splits = writer.save()
                progress.sha256 = progress.compute_sha256()
                content = json.dumps(asdict(progress))
                write_atomic(writer.partial / PROGRESS_FILE, content, durable=True)
                saved_bytes = batch.read_bytes
    print_counts(progress.counts)
    return progress


def write_batch(writer: Writer, encoded: Encoded, cuts_documents: bool) -> None:
    """Write the ids of documents, which are cut in two if there are few."""
    for split, ids in encoded.ids.items():
        documents = int(np.count_nonzero(ids == writer.tokenizer.eot))
        if cuts_documents and not writer.tokens[split]:
            # an end-of-text precedes each part of a cut document, but a split starts without one
            ids = ids[1:]
        writer.write(split, ids, documents)


def print_counts(counts: dict[str, int]) -> None:
    """Say what is left out, and that text files may hold several documents."""
    empty, bad, shared, marks = (counts.get(key, 0) for key in ("empty", "bad", "shared", "marks"))
    if empty or bad or shared:
        print(
            f"left out: {plural(empty, 'empty document')}, {bad:,} that cannot be read, "
            f"{shared:,} for training that are in --val-source, too"
        )
    if marks:
        print(
            f"warning: found {END_OF_TEXT} {plural(marks, 'time')} in text files, each of which is "
            "one document: write what stands between the marks into lines of a .jsonl",
            file=sys.stderr,
        )


def check_existing(folder: Path, provenance: dict, args: argparse.Namespace) -> Meta:
    """Check the set in `folder`.

    Raises DataError if it is damaged, or was made with other arguments or from other files. Files
    that no longer exist are not compared.
    """
    meta = read_meta(folder)
    now: dict[str, Any] = dict.fromkeys(ARGUMENTS) | provenance
    # the hub's files are recorded by their commit, which for a branch or tag is not known here
    if re.fullmatch("[0-9a-f]{40}", args.revision or ""):
        now["revision"] = args.revision
    if not is_remote(args) and all(exists(path) for path in args.source + args.val_source):
        now |= hash_inputs(list_files(args)[0])
    recorded = {key: meta.source.get(key) for key in now}
    if is_file(Path(args.tokenizer, TOKENIZER_FILE)):
        now["tokenizer_files"] = identity(load_tokenizer(args.tokenizer))
        recorded["tokenizer_files"] = meta.tokenizer
    refuse_changes(recorded, now, f"{folder} was made")
    return check_dataset(folder, meta.tokenizer["vocab_size"])


if __name__ == "__main__":
    run_command(main)
