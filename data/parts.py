"""Parts of a set that --shard I/N makes, on one machine or on several: each is a complete set of some of the files."""

import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data import DataError
from data.bins import check_dataset, partial_folder, read_meta
from data.progress import describe_changes, read_progress
from data.readers import Input
from data.writer import Writer

COPY_TOKENS = 2**22  # that are copied at once
LEFT_OUT = ("empty", "bad", "links")  # keys of meta.json's `source`: numbers of documents


def part_folder(folder: Path, i: int, n: int) -> Path:
    """Where --shard i/n puts its part of the set `folder`."""
    return Path(f"{folder}.part-{i}-of-{n}")


def part_inputs(inputs: list[Input], i: int, n: int) -> list[Input]:
    """The i-th of n parts of about equal size, from i = 1: those files that begin in it."""
    total, starts = sum(file.size for file in inputs), itertools.accumulate((file.size for file in inputs), initial=0)
    numbers = [min(n, 1 + start * n // max(1, total)) for start in starts]
    return [file for file, number in zip(inputs, numbers, strict=False) if number == i]


def find_parts(folder: Path) -> list[Path]:
    """All parts of the set `folder`, in order; none if no part is there. Raises DataError if some are missing."""
    counts = {int(path.name.removesuffix(".partial").rpartition("-")[2]) for path in _list_parts(folder)}
    if len(counts) > 1:
        numbers = " and of ".join(map(str, sorted(counts)))
        raise DataError(f"{folder}.part-*: parts of {numbers}: remove those that do not belong together")
    parts = [part_folder(folder, i, n) for n in counts for i in range(1, n + 1)]
    for i, part in enumerate(parts, start=1):
        if not (part / "meta.json").exists():
            raise DataError(
                f"{part}: this part is not complete: make it with --shard {i}/{len(parts)}, or remove the other parts"
            )
    return parts


def remove_parts(folder: Path) -> None:
    """Delete the parts of the set `folder`, but not those that are being made."""
    for path in _list_parts(folder):
        if not path.name.endswith(".partial"):
            shutil.rmtree(path)


def find_revision(folder: Path, made_from: dict) -> str | None:
    """The revision of the hub's files that the set `folder` or a part of it was begun with; None if it was not."""
    for path in [partial_folder(folder), *_list_parts(folder)]:
        progress = read_progress(path)
        begun = progress.made_from if progress else {}
        if (path / "meta.json").exists():
            begun = read_meta(path).source
        if made_from.items() <= begun.items():
            return begun["revision"]
    return None


def _list_parts(folder: Path) -> list[Path]:
    """Folders of parts, complete or not."""
    name = re.compile(rf"{re.escape(folder.name)}\.part-\d+-of-\d+(\.partial)?")
    return sorted(path for path in folder.parent.glob("*.part-*") if name.fullmatch(path.name))


def count_tokens(folder: Path) -> int:
    """Tokens of both splits of a set."""
    return sum(split.tokens for split in read_meta(folder).splits.values())


def join_parts(writer: Writer, parts: Sequence[Path], made_from: dict) -> dict[str, int]:
    """Copy the shards of all parts, as all shards of a set but the last are full.

    Args:
        writer: of the set.
        parts: folders of all parts, in order.
        made_from: the arguments that decide what is in the set.

    Returns:
        The numbers of documents left out, see LEFT_OUT.

    Raises:
        DataError: a part is damaged or was made with other arguments.
    """
    metas = [check_dataset(part, writer.tokenizer.vocab_size) for part in parts]
    for i, (part, meta) in enumerate(zip(parts, metas, strict=True), start=1):
        was = {key: value for key, value in meta.source.items() if key not in LEFT_OUT}
        changes = describe_changes(was, made_from | {"part": f"{i}/{len(parts)}"})
        if changes:
            raise DataError(
                f"{part} was made with other arguments ({changes}): make it again with --force, or remove it"
            )
    for part, meta in zip(parts, metas, strict=True):
        for name, split in meta.splits.items():
            if made_from.get("split") == "ends" and split.tokens and writer.splits[name].tokens:
                writer.write(name, np.array([writer.tokenizer.eot]), documents=0)  # which stands between documents
            writer.splits[name].documents += split.documents
            for shard in split.files:
                ids = np.memmap(part / shard.name, "<u2", "r")
                for start in range(0, len(ids), COPY_TOKENS):
                    writer.write(name, ids[start : start + COPY_TOKENS], documents=0)
    return {key: sum(meta.source[key] for meta in metas) for key in LEFT_OUT}
