"""Read data sets completely and check them.

    python -m data.verify NAME ...

Checks lengths and sha256 of all shards, that every id is in the vocabulary, and that there are as
many end-of-text tokens as documents. Prints the set's numbers and the start of both splits. In a
set above 1 GiB, checked.json notes that it was checked.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.command import build_parser, command, run_command
from common.progress import progress_bar
from data import DataError, bins
from data.checked import CHECKED_FILE, Record, describe_shards, write_record
from data.round_trip import Loss

SAMPLE_TOKENS = 60


@command
def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = build_parser("data.verify", __doc__)
    add = parser.add_argument
    add("names", nargs="+", metavar="name", help="name of a data set, or its folder")
    add(
        "--out",
        type=Path,
        default=bins.DATA_DIR,
        metavar="FOLDER",
        help="folder of data sets (default: data)",
    )
    args = parser.parse_args(argv)
    for name in args.names:
        print(verify_dataset(Path(name) if os.sep in name else args.out / name))


def verify_dataset(folder: Path) -> str:
    """Check the set in `folder` and describe it.

    Raises DataError that names the first shard of wrong length, or else all faults.
    """
    meta = bins.read_meta(folder)
    bins.check_lengths(folder, meta)
    shards = bins.list_shards(meta)
    total = sum(shard.tokens for shard in shards)
    # before they are read: a change meanwhile is then one after the check
    record = describe_shards(folder, {shard.name: shard.sha256 for shard in shards})
    faults: list[str] = []

    def scan(shard: bins.Shard) -> tuple[int, list[str]]:
        return bins.scan_shard(folder / shard.name, shard.sha256, meta.tokenizer, bar.update)

    bar = progress_bar(desc="tokens", total=total, unit_scale=True)
    with bar, ThreadPoolExecutor() as pool:  # hashing and numpy release the interpreter lock
        for name, split in meta.splits.items():
            scans = list(pool.map(scan, split.files))
            for shard, (_, shard_faults) in zip(split.files, scans, strict=True):
                faults += [f"{shard.name}: {fault}" for fault in shard_faults]
            ends = sum(count for count, _ in scans)
            expected = split.documents
            if meta.source.get("split") == "ends":  # see encode.py: none after the last document
                expected -= 1
            if ends != expected:
                documents = f"meta.json says {split.documents:,} documents"
                faults.append(f"{name}: {ends:,} end-of-text tokens, {documents}")
    if faults:
        remedy = f"Prepare it again: {meta.prepare} --force"
        raise DataError("\n  ".join([f"{folder} is damaged:", *faults, remedy]))
    tokenizer = bins.open_tokenizer(folder)
    description = bins.describe_set(meta, folder)
    lines = [f"{description}: intact. Tokenizer {tokenizer.name}, made by: {meta.prepare}"]
    if bins.is_large(shards):
        lines += note_check(folder, record)
    for loss in meta.source.get("losses", []):
        lines.append(f"    warning: {Loss(**loss).describe()}")
    for name in meta.splits:
        tokens = bins.open_tokens(folder, name)
        text = tokenizer.decode(tokens.read(0, min(SAMPLE_TOKENS, len(tokens))).tolist())
        lines.append(f"    {name} starts: {text!r}")
    return "\n".join(lines)


def note_check(folder: Path, record: Record) -> list[str]:
    """Write the record of a complete check; a warning if that fails."""
    try:
        write_record(folder, record)
    except OSError as error:
        return [
            f"    warning: {folder / CHECKED_FILE} cannot be written ({error.strerror}): each "
            "start will read all files that have no note there"
        ]
    return []


if __name__ == "__main__":
    run_command(main)
