"""Turn a corpus into a data set.

    python -m data.prepare --list
    python -m data.prepare fineweb-edu --config sample-10BT
    python -m data.prepare text --source FILES --name NAME

Worker processes tokenize batches of documents (workers.py). This process writes the ids, in the
order of the documents, into the shards of data/<name>.partial/ (writer.py) and records its
progress. At the end the folder is renamed to data/<name>/. After a kill the same command resumes.
The set is the same to the byte, with any number of kills and of workers.
"""

import argparse
import errno
import hashlib
import re
import shlex
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

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
from data.checked import INPUTS_FILE, Record, hash_files, read_record, write_record
from data.encode import Encoded, Encoder, choose_split, explain_empty_split, validation_inputs
from data.readers import Input
from data.round_trip import measure_losses
from data.sources import (
    SOURCES,
    count_names,
    describe_sources,
    hub_inputs,
    local_inputs,
    stdlib_inputs,
)
from data.tokenizer import TOKENIZER_FILE, TOKENIZERS, identity, load_tokenizer
from data.workers import Position, encode_inputs
from data.writer import (
    PROGRESS_FILE,
    Progress,
    Writer,
    describe_changes,
    find_revision,
    refuse_foreign_files,
    remove_leftovers,
    resume_progress,
)

WORKER_BYTES = 2**25  # input per worker; less is not worth its start (not measured)
SAVE_BYTES = 2**26  # input between two records of progress (not measured)
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # what a set may be called


@command
def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.list:
        print(describe_sources())
        return 0
    recorded = [argument for argument in argv if argument != "--force"]
    try:
        prepare_dataset(args, shlex.join(["python", "-m", "data.prepare", *recorded]))
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
    """The arguments, completed by the defaults of the corpus. Raises DataError."""
    parser = build_parser("data.prepare", __doc__)
    add = parser.add_argument
    add("corpus", nargs="?", choices=SOURCES, help="see --list")
    add(
        "--list",
        action="store_true",
        help="print the corpora with sources, sizes and licences",
    )
    add("--config", help="variant of a corpus (see --list; default: the first)")
    add(
        "--revision",
        help="commit, branch or tag of the hub's data set (default: the newest, or the one that an "
        "unfinished set started with)",
    )
    add(
        "--source",
        nargs="+",
        default=[],
        type=Path,
        metavar="PATH",
        help="read local files and folders instead of the hub",
    )
    add(
        "--val-source",
        nargs="+",
        default=[],
        type=Path,
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
    add("--name", help="name of the data set (default: the file's or the corpus')")
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
        "--separator",
        default="",
        metavar="TEXT",
        help="text between documents in text files, such as '<|endoftext|>' (default: a file is "
        "one document)",
    )
    add(
        "--allow-loss",
        action="store_true",
        help="accept a tokenizer that does not give the text back",
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
    args.name = args.name or choose_name(args.corpus, args.source)
    args.tokenizer = args.tokenizer or source.tokenizer
    if args.val_fraction is None:
        args.val_fraction = 0.0 if args.val_source else source.val_fraction
    if args.corpus == "stdlib":  # a Python source may declare another encoding than UTF-8
        args.skip_bad = True
    _check_source(args)
    _check_output(args)
    return args


def choose_name(corpus: str, sources: list[Path]) -> str:
    """The default name of a set: the corpus, or for own text its only file or folder.

    The file's name is used up to its first dot, if a set may be called that.
    """
    if corpus == "text" and len(sources) == 1:
        name = sources[0].resolve().name.partition(".")[0]
        if re.fullmatch(NAME, name) and name not in SOURCES:
            return name
    return corpus


def _check_source(args: argparse.Namespace) -> None:
    """Raise DataError if options of input contradict the corpus or each other."""
    corpus = args.corpus
    source = SOURCES[corpus]
    if args.source and not source.local:
        raise DataError(f"{corpus} takes no --source: leave it out, or prepare the corpus `text`")
    if not args.source and source.local and not source.hub:
        notes = f" ({source.notes})" if source.notes else ""
        raise DataError(f"{corpus} needs files: add --source with {source.local}{notes}")
    if args.roots and corpus != "stdlib":
        raise DataError(f"--roots belongs to the corpus stdlib: {corpus} takes --source")
    if args.config and args.config not in source.hub:
        known = ", ".join(source.hub) or "none"
        raise DataError(f"{corpus} has no --config {args.config}: choose one of {known}")
    if args.revision and (args.source or not source.hub):
        raise DataError(
            "--revision belongs to a data set on the hub, and these files are local: leave it out"
        )


def _check_output(args: argparse.Namespace) -> None:
    """Raise DataError for an invalid split, name or number."""
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

    `command_line`, which the user typed, goes into meta.json.
    """
    folder = (args.out / args.name).resolve()
    provenance = {}
    for key in ("corpus", "text_field", "val_fraction", "shard_tokens"):
        provenance[key] = getattr(args, key)
    if args.config:
        provenance["config"] = args.config
    if args.separator:
        provenance["separator"] = args.separator
    if (folder / "meta.json").exists() and not args.force:
        meta = _check_existing(folder, provenance, args)
        print(f"already there: {describe_set(meta, folder)}")
        remove_leftovers(folder)
        return
    refuse_foreign_files(folder)
    refuse_foreign_files(partial_folder(folder))
    hashes: Record = read_record(partial_folder(folder), INPUTS_FILE)
    inputs, encoder, provenance = _open_inputs(args, provenance, partial_folder(folder), hashes)
    recorded: dict[str, Any] = {}  # what the preparation finds
    with Writer(folder, encoder.tokenizer, args.shard_tokens) as writer:
        named = args.tokenizer in TOKENIZERS  # else it is a folder
        tokenizer_folder = None if named else Path(args.tokenizer)
        losses = measure_losses(inputs, encoder, args.allow_loss, tokenizer_folder)
        if losses:
            recorded["losses"] = losses
        if hashes:
            write_record(writer.partial, hashes, INPUTS_FILE)
        progress = _tokenize(writer, inputs, encoder, provenance, args)
        _check_unchanged(writer.partial, provenance, args, hashes)
        _check_splits(writer, args.val_fraction)
        recorded |= progress.count_left_out()
        meta = writer.finish(args.name, provenance | recorded, command_line)
    print(f"prepared: {describe_set(meta, folder)}")


def _open_inputs(
    args: argparse.Namespace, provenance: dict, partial: Path, hashes: Record
) -> tuple[list[Input], Encoder, dict]:
    """List the files to read, and make the encoder that turns them into ids.

    Returns both, and `provenance` with what identifies both. `hashes`: see `hash_inputs`.
    """
    provenance = dict(provenance)
    from_hub = _reads_hub(args)
    notes: list[str] = []
    inputs = [] if from_hub else _list_local_inputs(args, notes)
    val_inputs = validation_inputs(args.val_source, inputs, notes, args.corpus == "text")
    val_inputs = [file._replace(separator=args.separator) for file in val_inputs]
    empty = [file.name for file in inputs + val_inputs if not file.size]
    if empty:
        notes.append(f"{plural(len(empty), 'file')} without content, such as {empty[0]}")
    for note in notes:
        print(note)
    tokenizer = load_tokenizer(args.tokenizer, args.bpe_ranks)
    if from_hub:
        revision = args.revision or find_revision(partial, provenance)
        hub = SOURCES[args.corpus].hub[args.config]
        provenance["revision"], inputs = hub_inputs(hub, revision)
    provenance["inputs"] = hash_inputs(inputs, hashes)
    provenance["tokenizer"] = args.tokenizer
    if val_inputs:
        provenance["val_inputs"] = hash_inputs(val_inputs, hashes)
    encoder = Encoder(tokenizer, args.val_fraction, args.text_field, args.skip_bad)
    if not from_hub:
        split = choose_split(inputs, val_inputs, encoder)
        if split != "documents":
            provenance["split"] = split
        inputs = [file._replace(split=split) for file in inputs] + val_inputs
    return inputs, encoder, provenance


def _reads_hub(args: argparse.Namespace) -> bool:
    return bool(SOURCES[args.corpus].hub) and not args.source


def _list_local_inputs(args: argparse.Namespace, notes: list[str] | None = None) -> list[Input]:
    if args.corpus == "stdlib":
        return stdlib_inputs(args.roots)
    inputs = local_inputs(args.source, notes=notes, any_text=args.corpus == "text")
    return [file._replace(separator=args.separator) for file in inputs]


def _tokenize(
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
    tokens = sum(split.tokens for split in progress.splits.values())
    if tokens:
        start += f", resuming after {tokens:,} tokens"
    print(start)
    bar = progress_bar(every=30, desc=args.name, total=total_bytes, unit="B", unit_scale=True)
    position = Position(progress.files, progress.documents)
    batches = encode_inputs(inputs, encoder, workers, position)
    cuts_documents = any(file.split == "ends" for file in inputs)
    saved_bytes = 0
    with bar, closing(batches):
        for encoded, position, read_bytes in batches:
            _write_batch(writer, encoded, cuts_documents)
            progress.add(encoded)
            progress.files, progress.documents = position
            bar.update(read_bytes - bar.n)
            if position.files == len(inputs) or read_bytes - saved_bytes >= SAVE_BYTES:
                progress.splits = writer.save()
                progress.save(writer.partial)
                saved_bytes = read_bytes
    _print_left_out(progress)
    _print_separators(progress)
    return progress


def _write_batch(writer: Writer, encoded: Encoded, cuts_documents: bool) -> None:
    for split, ids in (("train", encoded.train), ("val", encoded.val)):
        documents = int(np.count_nonzero(ids == writer.tokenizer.eot))
        if cuts_documents and not writer.splits[split].tokens:
            # an end-of-text precedes each part of a cut document, but a split starts without one
            ids = ids[1:]
        writer.write(split, ids, documents)


def _print_left_out(progress: Progress) -> None:
    if progress.left:
        print(f"left out of archives, no text: {count_names(Counter(progress.left))}")
    if not (progress.empty or progress.bad or progress.links):
        return
    counts = f"{plural(progress.empty, 'empty document')}, {progress.bad:,} that cannot be read"
    if progress.links:
        counts += f", {plural(progress.links, 'link')} or paths out of archives"
    print(f"left out: {counts}")


def _print_separators(progress: Progress) -> None:
    for mark, count in progress.separators.items():
        print(
            f"warning: found {mark} {plural(count, 'time')} in text files, each of which is one "
            f"document: --separator {shlex.quote(mark)} --force splits them there",
            file=sys.stderr,
        )


def _check_splits(writer: Writer, val_fraction: float) -> None:
    """Raise DataError if a split has no token to predict; the next try needs other arguments."""
    train = writer.splits["train"]
    val = writer.splits["val"]
    if min(train.tokens, val.tokens) >= 2:
        return
    (writer.partial / PROGRESS_FILE).unlink(missing_ok=True)
    if train.documents and val.documents:
        raise DataError(
            f"train has {train.tokens} and val {val.tokens} token(s), both need 2; give more text"
        )
    # only with files of the hub: `choose_split` has checked local ones before
    raise DataError(explain_empty_split(train.documents, val.documents, val_fraction))


def hash_inputs(inputs: list[Input], hashes: Record) -> str:
    """Hash the names and sizes of files and, of local files, their contents.

    Beyond 1 GiB in all, `hashes` is updated, and a file is read completely only if its time or
    sample differs from its entry there (`hash_files`).
    """
    local = [file for file in inputs if "://" not in file.url]
    total = sum(file.size for file in local)
    is_large = total > HASHED_BYTES
    if is_large and not hashes:
        print(f"hashing {format_bytes(total)} of input once", flush=True)
    contents = hash_files([file.url for file in local], hashes if is_large else {})
    if is_large:
        hashes.update(contents)
    digest = hashlib.sha256()
    for file in inputs:
        digest.update(f"{file.name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        if file.url in contents:
            digest.update(bytes.fromhex(contents[file.url][0]))
    return digest.hexdigest()


def _hash_sources(args: argparse.Namespace, hashes: Record) -> dict[str, str]:
    """What `hash_inputs` gives for the local files as they are now, without those that are gone."""
    now = {}
    if not _reads_hub(args) and all(path.exists() for path in args.source):
        now["inputs"] = hash_inputs(_list_local_inputs(args), hashes)
    if args.val_source and all(path.exists() for path in args.val_source):
        val_inputs = local_inputs(args.val_source, any_text=args.corpus == "text")
        now["val_inputs"] = hash_inputs(val_inputs, hashes)
    return now


def _check_unchanged(
    partial: Path, provenance: dict, args: argparse.Namespace, hashes: Record
) -> None:
    """Raise DataError if local files were changed, added or removed while they were read.

    The record of progress is removed then: the next try starts over.
    """
    changes = describe_changes(provenance, provenance | _hash_sources(args, hashes))
    if changes:
        (partial / PROGRESS_FILE).unlink(missing_ok=True)
        raise DataError(
            f"{args.name}: input files changed while they were read ({changes}), so the set would "
            "be of neither state: prepare it again when nothing writes to them"
        )


def _check_existing(folder: Path, provenance: dict, args: argparse.Namespace) -> Meta:
    """Check the set in `folder`.

    Raises DataError if it is damaged, or was made with other arguments or from other files. Files
    that no longer exist are not compared.
    """
    meta = read_meta(folder)
    hashes = read_record(folder, INPUTS_FILE)
    now = provenance | {"config": args.config, "tokenizer": args.tokenizer}
    now["separator"] = args.separator or None
    if args.revision:
        now["revision"] = args.revision
    now |= _hash_sources(args, hashes)
    if hashes and not (folder / INPUTS_FILE).exists():
        print(f"{folder} has no {INPUTS_FILE}, so its input files are not compared")
        now = {key: value for key, value in now.items() if "inputs" not in key}
    recorded = {key: meta.source.get(key) for key in now}
    if Path(args.tokenizer, TOKENIZER_FILE).is_file():
        now["tokenizer_files"] = identity(load_tokenizer(args.tokenizer))
        recorded["tokenizer_files"] = meta.tokenizer
    changes = describe_changes(recorded, now)
    if changes:
        raise DataError(
            f"{folder} was made with other arguments, or its files have changed ({changes}): "
            f"replace it with --force, or choose another --name"
        )
    return check_dataset(folder, meta.tokenizer["vocab_size"])


if __name__ == "__main__":
    run_command(main)
