"""Turn a corpus into a data set.

    python -m data.prepare --list
    python -m data.prepare fineweb-edu --config sample-10BT
    python -m data.prepare text --source FILES --name NAME

Documents stream from their files through worker processes into the shards of data/<name>/ (see bins.py). Killed at any
moment it goes on at the next start; the set is the same to the byte, however often that happens and however many
workers there are.
"""

import argparse
import errno
import hashlib
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from data import DataError
from data.bins import DATA_DIR, HASHED_BYTES, SHARD_TOKENS, Meta, check, read_meta, summary
from data.encode import Encoder, encode_in_order
from data.merge import merge
from data.readers import Input, Raw, read
from data.sources import SOURCES, hub_inputs, local_inputs, stdlib_inputs, table
from data.tokenizer import TOKENIZERS, load_tokenizer
from data.writer import Writer, differences, read_progress, recover

BATCH_BYTES = 2**20  # of raw documents, to a worker at a time
WORKER_BYTES = 2**25  # of input that are worth starting one more worker for
COMMIT_SECONDS = 10  # of work that a kill may cost


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    try:
        args = parse(argv)
        command = shlex.join(["python", "-m", "data.prepare", *(arg for arg in argv if arg != "--force")])
        if args.list:
            print(table())
        elif args.merge:
            merge(args.out, args.name, args.force, command)
        else:
            prepare(args, command)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; start again to go on", file=sys.stderr)
        return 130
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise DataError(f"{message} (python -m data.prepare --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments, the corpus' own defaults filled in. Raises DataError."""
    parser = Parser(prog="python -m data.prepare", description="Turn a corpus into token shards for training.")
    parser.add_argument(
        "corpus", nargs="?", choices=SOURCES, help="; ".join(f"{k}: {v.about}" for k, v in SOURCES.items())
    )
    parser.add_argument("--list", action="store_true", help="print the corpora with their sources, sizes and licences")
    parser.add_argument("--config", help="which variant of a corpus (see --list; default: the first)")
    parser.add_argument(
        "--revision",
        help="of the hub's data set: a commit, branch or tag (default: the newest; all --shards need the same)",
    )
    parser.add_argument(
        "--source", nargs="+", default=[], metavar="PATH", help="local files and folders to read instead"
    )
    parser.add_argument(
        "--roots", nargs="+", default=[], type=Path, metavar="FOLDER", help="of stdlib: Python sources there instead"
    )
    parser.add_argument("--text-field", metavar="FIELD", help="of a row of JSON or parquet (default: text)")
    parser.add_argument("--name", help="of the data set (default: the corpus')")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, help="default: bytes for stdlib, else gpt2")
    parser.add_argument(
        "--bpe-ranks", metavar="FILE", help="GPT-2's ranks (default: tiktoken's cache, then its download)"
    )
    parser.add_argument("--out", type=Path, default=DATA_DIR, metavar="FOLDER", help="of data sets (default: data)")
    parser.add_argument(
        "--val-fraction",
        type=float,
        metavar="F",
        help="part of the documents kept for validation (default: see --list)",
    )
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="processes (default: one a core)")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out documents that cannot be read, and count them"
    )
    parser.add_argument(
        "--shard", metavar="I/N", help="prepare the I-th of N parts of the corpus, each a set of its own"
    )
    parser.add_argument("--merge", action="store_true", help="make one set of all parts, which lie in --out")
    parser.add_argument("--force", action="store_true", help="replace the set that is there")
    args = parser.parse_args(argv)
    if args.list:
        return args
    if args.corpus is None:
        raise DataError(f"which corpus? One of {', '.join(SOURCES)}; --list tells more")

    source = SOURCES[args.corpus]
    if source.hub and not args.source:
        args.config = args.config or next(iter(source.hub))
    args.name = args.name or args.corpus
    args.text_field = args.text_field or source.text_field
    args.tokenizer = args.tokenizer or source.tokenizer
    args.val_fraction = source.val_fraction if args.val_fraction is None else args.val_fraction
    args.skip_bad |= args.corpus == "stdlib"
    if args.corpus == "books3" and not args.source and not args.merge:
        raise DataError(
            f"books3 was withdrawn from the hub for copyright: name your own copy by --source ({source.local}), or "
            f"prepare pg19, books in the public domain, in its place"
        )
    if args.corpus == "text" and not args.source and not args.merge:
        raise DataError("text needs files: add --source PATH ...")
    if args.roots and args.corpus != "stdlib":
        raise DataError(f"--roots are of the corpus stdlib: {args.corpus} takes --source")
    if args.source and not source.local:
        raise DataError(f"{args.corpus} takes no --source: leave it out, or prepare the corpus `text`")
    if args.config and args.config not in source.hub:
        choices = f"choose one of {', '.join(source.hub)}" if source.hub else "leave it out"
        raise DataError(f"{args.corpus} has no --config {args.config}: {choices}")
    if args.revision and (args.source or not source.hub):
        raise DataError("--revision is of a data set on the hub, and these files are local: leave it out")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.name) or args.name.endswith((".partial", ".old")):
        raise DataError(
            f"--name {args.name!r}: use letters, digits and . _ - alone, and no .partial or .old at the end"
        )
    if args.name != args.corpus and args.name in SOURCES:
        raise DataError(f"--name {args.name} is a corpus' own name: choose another")
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val-fraction {args.val_fraction}: expected a number between 0 and 1")
    for option in ("shard_tokens", "workers"):
        if getattr(args, option) < 1:
            raise DataError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected at least 1")
    if args.shard:
        if args.merge:
            raise DataError("--shard prepares a part, --merge joins them all: leave one of them out")
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", args.shard)
        if not found or int(found[1]) > int(found[2]):
            raise DataError(f"--shard {args.shard}: expected I/N with I from 1 to N, for instance 1/4")
        args.shard = int(found[1]), int(found[2])
        args.name += f"-{args.shard[0]}-of-{args.shard[1]}"
    return args


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Tally:
    """How far a preparation is; what a commit keeps beside the shards."""

    file: int = 0  # of the inputs, being read
    documents: int = 0  # of that file, taken
    read_bytes: int = 0  # of all inputs
    empty: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)  # of the bad
    lowest: float = 1.0  # place of a document, see encode.place


def prepare(args: argparse.Namespace, command: str) -> None:
    """Make the set that `args` describe unless it is there. `command`, what the user typed, is kept in meta.json."""
    folder = (args.out / args.name).resolve()
    recover(folder)
    made_from = {key: getattr(args, key) for key in ("corpus", "text_field", "val_fraction", "shard_tokens")}
    made_from |= {"config": args.config} if args.config else {}
    made_from |= {"shard": list(args.shard)} if args.shard else {}
    if (folder / "meta.json").exists() and not args.force:
        print(f"already there: {summary(existing(folder, made_from, args), folder)}")
        return

    tokenizer = load_tokenizer(args.tokenizer, args.bpe_ranks)
    hub = SOURCES[args.corpus].hub.get(args.config)
    if hub and not args.source:
        made_from["revision"], inputs = hub_inputs(hub, args.revision or begun_revision(folder, made_from))
    else:
        inputs = files_here(args)
    made_from |= {"inputs": fingerprint(inputs), "tokenizer": args.tokenizer}
    if args.shard:
        part, parts = args.shard
        if parts > len(inputs):
            raise DataError(
                f"{len(inputs)} files cannot be shared out in {parts} parts: --shard 1/{len(inputs)} at most, as a "
                f"file belongs to one part; or cut the files up"
            )
        inputs = inputs[len(inputs) * (part - 1) // parts : len(inputs) * part // parts]

    encoder = Encoder(tokenizer, args.val_fraction, args.text_field, hub.only if hub else None)
    try:
        with Writer(folder, tokenizer, args.shard_tokens, made_from, args.force) as writer:
            tally = run(writer, inputs, encoder, args)
            check_splits(writer, tally, args)
            found = {"empty": tally.empty, "bad": tally.bad}
            meta = writer.finish(args.name, made_from | found, command)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(args.out).free / 1e9
        raise DataError(
            f"{args.out}: the disk is full ({free:.1f} GB are free). What did not fit is removed, the rest is kept: "
            f"make room and start again to go on"
        ) from error
    if tally.empty or tally.bad:
        examples = "".join(f"\n  {example}" for example in tally.examples)
        print(f"left out: {tally.empty:,} empty documents, {tally.bad:,} that cannot be read{examples}")
    print(f"prepared: {summary(meta, folder)}")


def begun_revision(folder: Path, made_from: dict) -> str | None:
    """The hub's revision with which an unfinished set of these arguments was begun."""
    try:
        begun = (read_progress(folder) or {"made_from": {}})["made_from"]
    except DataError:
        return None  # damaged, which the writer will say
    return begun.get("revision") if made_from.items() <= begun.items() else None


def run(writer: Writer, inputs: list[Input], encoder: Encoder, args: argparse.Namespace) -> Tally:
    """All documents of `inputs`, those after the writer's last commit, into the writer."""
    tally = Tally(**(writer.state or {}))
    total = sum(file.size for file in inputs)
    workers = min(args.workers, 1 + (total - tally.read_bytes) // WORKER_BYTES)
    print(
        f"{args.name}: {len(inputs):,} files, {total / 1e9:.3g} GB, {args.tokenizer}, {workers} workers"
        + (f", from {tally.read_bytes / max(1, total):.0%} on" if writer.state else "")
    )
    begin = committed = time.monotonic()
    begin_tokens = sum(map(writer.tokens, ("train", "val")))
    bar = tqdm(
        desc=args.name,
        total=total,
        initial=tally.read_bytes,
        mininterval=0.3 if sys.stderr.isatty() else 30,
        bar_format="{desc}: {percentage:3.0f}% |{bar:20}| {elapsed}, {remaining} left{postfix}",
    )
    with bar:
        for position, encoded in encode_in_order(batches(inputs, tally, args.text_field), encoder, workers):
            if encoded.bad and not args.skip_bad:
                raise DataError(f"{encoded.bad[0]}; or leave such documents out by --skip-bad")
            filled = [writer.write(split, ids, encoded.documents[split]) for split, ids in encoded.ids.items()]
            tally.file, tally.documents, tally.read_bytes = position
            tally.empty += encoded.empty
            tally.bad += len(encoded.bad)
            tally.examples = (tally.examples + encoded.bad)[:3]
            tally.lowest = min(tally.lowest, encoded.lowest)

            documents = sum(map(writer.documents, encoded.ids))
            tokens = sum(map(writer.tokens, encoded.ids))
            now = time.monotonic()
            speed = (tokens - begin_tokens) / (now - begin)
            bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens, {speed:,.0f} tokens/s", refresh=False)
            bar.update(tally.read_bytes - bar.n)
            if any(filled) or now > committed + COMMIT_SECONDS:
                writer.commit(asdict(tally))
                committed = now
    return tally


def batches(inputs: list[Input], begin: Tally, text_field: str) -> Iterator[tuple[tuple[int, int, int], list[Raw]]]:
    """((file, documents taken of it, bytes read of all), documents) from `begin` on, BATCH_BYTES at a time."""
    file, taken = begin.file, begin.documents
    before = sum(file.size for file in inputs[:file])
    batch: list[Raw] = []
    size = 0
    for number in range(file, len(inputs)):
        for raw in read(inputs[number], text_field, taken):
            taken += 1
            batch.append(raw)
            size += len(raw.data)
            if size >= BATCH_BYTES:
                yield (number, taken, before + raw.done), batch
                batch, size = [], 0
        before += inputs[number].size
        taken = 0
    if batch:
        yield (len(inputs), 0, before), batch


def files_here(args: argparse.Namespace) -> list[Input]:
    return stdlib_inputs(args.roots) if args.corpus == "stdlib" else local_inputs(map(Path, args.source))


def fingerprint(inputs: list[Input]) -> str:
    """A hash of local files: their names and, up to 1 GiB in all, contents; beyond, and on the hub, their sizes."""
    here = all("://" not in file.url for file in inputs) and sum(file.size for file in inputs) <= HASHED_BYTES
    digest = hashlib.sha256()
    for file in inputs:
        digest.update(f"{file.name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        if here:
            with open(file.url, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def check_splits(writer: Writer, tally: Tally, args: argparse.Namespace) -> None:
    """Raises DataError, and gives up the set, if training or validation got nothing."""
    train, val = writer.tokens("train"), writer.tokens("val")
    if train and val or args.shard:  # of parts the whole counts
        return
    writer.discard()
    if not train and not val:
        raise DataError(f"no documents to read ({tally.empty:,} empty, {tally.bad:,} bad): name other files")
    several = "Of one document make several: split -n l/100 --additional-suffix=.txt FILE part-"
    if writer.documents("train") + writer.documents("val") == 1:
        raise DataError(f"there is one document to read, and training and validation need one each. {several}")
    if val:
        raise DataError(f"all documents fell into validation: lower --val-fraction (now {args.val_fraction})")
    unit = 10.0 ** (math.floor(math.log10(tally.lowest or 1e-9)) - 2)
    enough = math.floor(tally.lowest / unit + 1) * unit
    remedy = f"--val-fraction {enough:.3g} is the least that gives it one" if enough < 1 else "there are too few"
    raise DataError(
        f"the corpus is too small: none of its documents fell into validation at --val-fraction {args.val_fraction}; "
        f"{remedy}. {several}"
    )


def existing(folder: Path, made_from: dict, args: argparse.Namespace) -> Meta:
    """The set in `folder`. Raises DataError if it is damaged or was made with other arguments than these, or from files
    that have changed since."""
    meta = read_meta(folder)
    now = made_from | {"tokenizer": args.tokenizer}
    now |= {"revision": args.revision} if args.revision else {}
    if (args.source or not args.config) and all(map(os.path.exists, args.source)):
        now["inputs"] = fingerprint(files_here(args))
    not_asked = {"empty", "bad", "inputs", "revision"} - set(now)
    changes = differences({key: value for key, value in meta.source.items() if key not in not_asked}, now)
    if changes:
        raise DataError(
            f"{folder} was made with other arguments, or its files have changed ({changes}): replace it by --force, or "
            f"choose another --name"
        )
    return check(folder, meta.tokenizer["vocab_size"])


if __name__ == "__main__":
    sys.exit(main())
