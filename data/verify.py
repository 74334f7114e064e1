"""Read complete data sets and check all that can be checked.

    python -m data.verify NAME ...

Lengths and sha256 of all shards, every id below the vocabulary's end, as many end-of-text tokens as
documents; prints the set's numbers and how the two splits begin.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.command import build_parser, command, run_command
from common.progress import progress_bar
from data import DataError, bins

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
    """A description of the set in `folder`.

    Raises DataError naming a shard of wrong length, else all faults.
    """
    meta = bins.read_meta(folder)
    bins.check_lengths(folder, meta)
    total = sum(split.tokens for split in meta.splits.values())
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
            between = meta.source.get("split") == "ends"  # see encode.py: none after the last
            if ends != split.documents - between:
                faults.append(
                    f"{name}: {ends:,} end-of-text tokens, meta.json says {split.documents:,} documents"
                )
    if faults:
        raise DataError(
            "\n  ".join(
                [f"{folder} is damaged:", *faults, f"Prepare it again: {meta.prepare} --force"]
            )
        )
    tokenizer = bins.open_tokenizer(folder)
    lines = [
        f"{bins.describe_set(meta, folder)}: intact. Tokenizer {tokenizer.name}, made by: {meta.prepare}"
    ]
    for name in meta.splits:
        tokens = bins.open_tokens(folder, name)
        text = tokenizer.decode(tokens.read(0, min(SAMPLE_TOKENS, len(tokens))).tolist())
        lines.append(f"    {name} begins: {text!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
