"""Turn a corpus into a data set.

    python -m data.prepare stdlib
    python -m data.prepare text --source FILES --name NAME

Documents stream through the tokenizer into data/<name>/; see bins.py for what lies there afterwards.
"""

import argparse
import hashlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from data import DataError
from data.bins import DATA_DIR, SHARD_TOKENS, Meta, Writer, check, read_meta
from data.sources import SOURCES, Documents
from data.tokenizer import TOKENIZERS, load_tokenizer

BATCH_CHARACTERS = 4_000_000  # tokenized at a time


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        prepare(parse(argv), shlex.join(["python", "-m", "data.prepare", *(arg for arg in argv if arg != "--force")]))
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise DataError(f"{message} (python -m data.prepare --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments, the corpus' own defaults filled in. Raises DataError."""
    corpora = "; ".join(f"{name}: {source.description}" for name, source in SOURCES.items())
    parser = Parser(prog="python -m data.prepare", description="Turn a corpus into token shards for training.")
    parser.add_argument("corpus", choices=SOURCES, help=corpora)
    parser.add_argument("--source", nargs="+", default=[], metavar="PATH", help="files and folders, for text")
    parser.add_argument("--text-field", default="text", metavar="FIELD", help="of a .jsonl row (default: text)")
    parser.add_argument("--name", help="of the data set (default: the corpus')")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, help="default: bytes for stdlib, gpt2 for text")
    parser.add_argument("--ranks", metavar="FILE", help="GPT-2's ranks (default: tiktoken's cache, then its download)")
    parser.add_argument("--out", type=Path, default=DATA_DIR, metavar="FOLDER", help="of data sets (default: data)")
    parser.add_argument("--val-fraction", type=float, metavar="F", help="documents kept for validation")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="replace the set that is there")
    args = parser.parse_args(argv)

    source = SOURCES[args.corpus]
    args.name = args.name or args.corpus
    args.tokenizer = args.tokenizer or source.tokenizer
    args.val_fraction = source.val_fraction if args.val_fraction is None else args.val_fraction
    if source.takes_paths and not args.source:
        raise DataError(f"{args.corpus} needs files: add --source PATH ...")
    if args.source and not source.takes_paths:
        raise DataError(f"{args.corpus} takes no --source: leave it out, or prepare the corpus `text`")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.name):
        raise DataError(f"--name {args.name!r}: use letters, digits and . _ - alone")
    if args.name != args.corpus and args.name in SOURCES:
        raise DataError(f"--name {args.name} is a corpus' own name: choose another")
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val-fraction {args.val_fraction}: expected a number between 0 and 1")
    if args.shard_tokens < 1:
        raise DataError(f"--shard-tokens {args.shard_tokens}: expected at least 1")
    return args


def prepare(args: argparse.Namespace, command: str) -> None:
    """Make the set that `args` describe unless it is there. `command`, what the user typed, is kept in meta.json."""
    folder = args.out / args.name
    made_from = {"corpus": args.corpus, "val_fraction": args.val_fraction, "shard_tokens": args.shard_tokens}
    if args.source:
        made_from |= {"paths": [os.path.abspath(path) for path in args.source], "text_field": args.text_field}
    if (folder / "meta.json").exists() and not args.force:
        print(f"already there: {summary(existing(folder, made_from, args.tokenizer), folder)}")
        return

    source = SOURCES[args.corpus]
    reader_args = ([Path(path) for path in args.source], args.text_field) if source.takes_paths else ()
    documents = source.documents(*reader_args)
    tokenizer = load_tokenizer(args.tokenizer, args.ranks)
    skipped: list[str] = []
    progress = tqdm(desc=args.name, unit=" documents", disable=None)  # shown on a terminal alone
    with progress, Writer(folder, tokenizer, args.shard_tokens) as writer:
        for batch in batches(assign(readable(documents, skipped), args.val_fraction)):
            splits, texts = zip(*batch, strict=True)
            for split, ids in zip(splits, tokenizer.encode_batch(list(texts)), strict=True):
                writer.add(split, ids)
            progress.update(len(batch))
            progress.set_postfix(tokens=f"{writer.tokens('train') + writer.tokens('val'):,}")
        if not writer.tokens("train"):
            raise DataError(f"all documents fell into validation: lower --val-fraction (now {args.val_fraction})")
        meta = writer.finish(args.name, made_from, command)
    if skipped:
        examples = ", ".join(skipped[:3]) + (", …" if len(skipped) > 3 else "")
        print(f"skipped {len(skipped)} documents, empty or not UTF-8: {examples}")
    print(f"prepared: {summary(meta, folder)}")


def existing(folder: Path, made_from: dict, tokenizer: str) -> Meta:
    """The set in `folder`. Raises DataError if it is damaged or was made with other arguments than these."""
    meta = read_meta(folder)
    was, now = meta.source | {"tokenizer": meta.tokenizer["name"]}, made_from | {"tokenizer": tokenizer}
    changed = [key for key in sorted(was | now) if was.get(key) != now.get(key)]
    if changed:
        changes = "; ".join(f"{key} {was.get(key)!r}, now {now.get(key)!r}" for key in changed)
        raise DataError(
            f"{folder} was made with other arguments ({changes}): replace it by --force, or choose another --name"
        )
    return check(folder, meta.tokenizer["vocab_size"])


def summary(meta: Meta, folder: Path) -> str:
    train, val = meta.splits["train"], meta.splits["val"]
    return (
        f"{train.tokens:,} train and {val.tokens:,} val tokens of {train.documents:,} and {val.documents:,} documents "
        f"in {os.path.relpath(folder)}"
    )


def readable(documents: Documents, skipped: list[str]) -> Iterator[str]:
    """The documents' texts; the ids of those with nothing to read go to `skipped`."""
    for id_, text in documents:
        if text is None or not text.strip():
            skipped.append(id_)
        else:
            yield text


def assign(texts: Iterable[str], val_fraction: float) -> Iterator[tuple[str, str]]:
    """(split, text) of each text. The split hangs on the text's hash alone, so it stays when a corpus grows.

    Of few documents perhaps none has a hash low enough for validation; then the lowest goes there. So the lowest yet
    seen is held back until one is low enough. Raises DataError, at the end, of fewer than two documents.
    """
    lowest: tuple[float, str] | None = None
    seen_val = False
    count = 0
    for text in texts:
        count += 1
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64  # uniform in [0, 1)
        if place < val_fraction:
            seen_val = True
            yield "val", text
        elif seen_val or (lowest and place >= lowest[0]):
            yield "train", text
        else:
            if lowest:
                yield "train", lowest[1]
            lowest = place, text
    if count < 2:
        raise DataError(
            f"{count or 'no'} document{'s' * (count == 0)} to read: training and validation need one each. "
            f"Name more files, or cut one up: split -n l/100 --additional-suffix=.txt FILE part-"
        )
    if lowest:
        yield ("train" if seen_val else "val"), lowest[1]


def batches(pairs: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Lists of (split, text) with about BATCH_CHARACTERS in each, so that memory stays bounded."""
    batch, characters = [], 0
    for pair in pairs:
        batch.append(pair)
        characters += len(pair[1])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


if __name__ == "__main__":
    sys.exit(main())
