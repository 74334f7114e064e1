"""Read a whole data set and check all that can be checked.

    python -m data.verify NAME

Lengths and sha256 of all shards, every id below the vocabulary's end, as many ends of text as documents; prints what is
there and how the two splits begin.
"""

import argparse
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import DataError
from data.bins import DATA_DIR, Meta, check_lengths, open_tokenizer, open_tokens, read_meta

CHUNK_TOKENS = 2**22
SAMPLE_TOKENS = 60


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.verify", description="Check a data set from end to end.")
    parser.add_argument("name", help="of the data set, or its folder")
    parser.add_argument("--out", type=Path, default=DATA_DIR, metavar="FOLDER", help="of data sets (default: data)")
    args = parser.parse_args(argv)
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # the text may hold what the terminal cannot show
        print(verify(Path(args.name) if os.sep in args.name else args.out / args.name))
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def verify(folder: Path) -> str:
    """What the set in `folder` holds. Raises DataError of a shard missing or of wrong length, else of all faults."""
    meta = read_meta(folder)
    check_lengths(folder, meta)
    shards = [(folder / shard.name, shard.sha256) for split in meta.splits.values() for shard in split.files]
    total = sum(split.tokens for split in meta.splits.values())
    bar = tqdm(desc="tokens", total=total, unit_scale=True, disable=None)
    with bar, ThreadPoolExecutor() as pool:  # hashing and numpy leave the interpreter to others
        results = list(pool.map(lambda shard: read_shard(*shard, meta.tokenizer, bar), shards))
    problems = [problem for _, found in results for problem in found]
    ends = iter(count for count, _ in results)
    for name, split in meta.splits.items():
        documents = sum(next(ends) for _ in split.files)
        if documents != split.documents:
            problems.append(f"{name}: {documents:,} ends of text, meta.json says {split.documents:,} documents")
    if problems:
        raise DataError("\n  ".join([f"{folder} is damaged:", *problems, f"Prepare it again: {meta.prepare} --force"]))
    return report(folder, meta)


def read_shard(path: Path, sha256: str, tokenizer: dict, bar: tqdm) -> tuple[int, list[str]]:
    """(ends of text in the shard, what is wrong with it)."""
    digest, ends, position, problems = hashlib.sha256(), 0, 0, []
    with path.open("rb") as file:
        while data := file.read(2 * CHUNK_TOKENS):
            digest.update(data)
            ids = np.frombuffer(data, "<u2")
            ends += np.count_nonzero(ids == tokenizer["eot"])
            too_large = np.flatnonzero(ids >= tokenizer["vocab_size"])
            if len(too_large) and not problems:
                first = too_large[0]
                limit = tokenizer["vocab_size"]
                problems.append(f"{path.name}: id {ids[first]} at token {position + first:,}, expected below {limit}")
            position += len(ids)
            bar.update(len(ids))
    if digest.hexdigest() != sha256:
        problems.append(f"{path.name}: expected sha256 {sha256}, found {digest.hexdigest()}")
    return ends, problems


def report(folder: Path, meta: Meta) -> str:
    tokenizer = open_tokenizer(folder)
    lines = [f"{os.path.relpath(folder)}: whole. Tokenizer {tokenizer.name}, made by: {meta.prepare}"]
    for name, split in meta.splits.items():
        mean = split.tokens / max(1, split.documents)
        lines.append(
            f"  {name}: {split.tokens:,} tokens, {split.documents:,} documents ({mean:,.0f} tokens each), "
            f"{len(split.files)} files, {2 * split.tokens / 1e9:.3g} GB"
        )
        tokens = open_tokens(folder, name)
        text = tokenizer.decode(tokens.read(0, min(SAMPLE_TOKENS, len(tokens))))
        lines.append(f"    begins: {text!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
