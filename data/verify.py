"""Read data sets completely and check them.

    python -m data.verify NAME ...

Checks lengths and sha256 of all shards, and that every id is in the vocabulary. Prints the set's
numbers and the start of both splits.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m data.verify")

import os
from pathlib import Path

from common.command import build_parser, command, run_command
from common.progress import progress_bar
from data import DataError, bins
from data.tokenizer import open_tokenizer

SAMPLE_TOKENS = 60


@command
def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = build_parser("data.verify", __doc__)
    add = parser.add_argument
    add("names", nargs="+", metavar="name", help="name of a data set, or its folder")
    add("--out", type=Path, default=bins.DATA_DIR, help="folder of data sets (default: data)")
    args = parser.parse_args(argv)
    for name in args.names:
        print(verify_dataset(Path(name) if os.sep in name else args.out / name))


def verify_dataset(folder: Path) -> str:
    """Check the set in `folder` and describe it.

    Raises DataError that names the first shard of wrong length, or else all faults.
    """
    meta = bins.read_meta(folder)
    bins.check_lengths(folder, meta)
    faults: list[str] = []
    total = sum(split.tokens for split in meta.splits.values())
    with progress_bar(desc="tokens", total=total, unit_scale=True) as bar:
        for shard, found in bins.scan_shards(folder, meta, bar.update):
            faults += [f"{shard.name}: {fault}" for fault in found]
    if faults:
        raise DataError(
            "\n  ".join([f"{folder} is damaged:", *faults, bins.name_remedy(meta, folder)])
        )
    tokenizer = open_tokenizer(folder)
    description = bins.describe_set(meta, folder)
    lines = [f"{description}: intact. Tokenizer {tokenizer.name}, made by: {meta.prepare}"]
    lines += [f"warning: {loss}" for loss in meta.source.get("losses", [])]
    for name in meta.splits:
        tokens = bins.open_tokens(folder, name)
        text = tokenizer.decode(tokens.read(0, min(SAMPLE_TOKENS, len(tokens))).tolist())
        lines.append(f"{name} starts: {text!r}")
    return "\n    ".join(lines)


if __name__ == "__main__":
    run_command(main)
