"""One data set out of the parts that several machines prepared."""

import re
import shutil
from pathlib import Path

from data import DataError
from data.bins import check_dataset, describe_set, open_tokenizer, open_tokens, partial_folder
from data.units import describe_changes, has_units
from data.writer import Writer, recover, refuse_foreign_files

CHUNK_TOKENS = 2**22


def merge_parts(out: Path, name: str, force: bool, command: str) -> None:
    """Make `out`/`name` of its parts, `out`/`name`-I-of-N: the set that one machine would have made. Removes the parts.

    Raises DataError if parts are missing, damaged or made with different arguments.
    """
    folder = (out / name).resolve()
    recover(folder)
    if (folder / "meta.json").exists() and not force:
        meta = check_dataset(folder, 2**16)
        print(f"already there: {describe_set(meta, folder)}; to make it anew of its parts add --force")
        return
    if has_units(partial_folder(folder)) and not force:
        raise DataError(f"{partial_folder(folder)} is an unfinished set: finish it, or replace it with --force")
    parts = _find_parts(out, name)
    for part in parts:  # they are removed at the end
        refuse_foreign_files(part)
    metas = [check_dataset(part, 2**16) for part in parts]
    sources = [{k: v for k, v in meta.source.items() if k not in ("shard", "empty", "bad")} for meta in metas]
    for part, source, meta in zip(parts, sources, metas, strict=True):
        changes = describe_changes(sources[0], source) or describe_changes(
            dict(metas[0].tokenizer), dict(meta.tokenizer)
        )
        if changes:
            raise DataError(
                f"{parts[0]} and {part} were made with different arguments ({changes}): prepare one of them again"
            )
    for split, change in (("train", "smaller"), ("val", "larger")):
        if not any(meta.splits[split].tokens for meta in metas):
            raise DataError(f"no part of {name} has a {split} document: prepare them with a {change} --val-fraction")

    with Writer(folder, open_tokenizer(parts[0]), sources[0]["shard_tokens"]) as writer:
        for split in ("train", "val"):
            for part, meta in zip(parts, metas, strict=True):
                tokens = open_tokens(part, split)
                for start in range(0, len(tokens), CHUNK_TOKENS):
                    writer.write(split, tokens.read(start, min(CHUNK_TOKENS, len(tokens) - start)), 0)
                writer.write(split, tokens.read(0, 0), meta.splits[split].documents)
        counts = {key: sum(meta.source[key] for meta in metas) for key in ("empty", "bad")}
        commands = " && ".join([*(meta.prepare for meta in metas), command])
        meta = writer.finish(name, sources[0] | counts, commands)
    for part in parts:
        shutil.rmtree(part)
    print(f"merged: {describe_set(meta, folder)}")


def _find_parts(out: Path, name: str) -> list[Path]:
    """The folders of all parts, in order. Raises DataError if some are missing or count another number of parts."""
    found = {path: re.fullmatch(re.escape(name) + r"-(\d+)-of-(\d+)", path.name) for path in sorted(out.glob("*-of-*"))}
    parts = {(int(match[1]), int(match[2])): path for path, match in found.items() if match}
    if not parts:
        raise DataError(f"{out} has no parts of {name}: prepare them with --shard 1/N to N/N")
    n = max(of for _, of in parts)
    others = [path.name for (_, of), path in parts.items() if of != n]
    if others:
        raise DataError(f"{out} has parts of different numbers: remove {', '.join(others)}, or those of {n}")
    missing = [f"--shard {i}/{n}" for i in range(1, n + 1) if not (out / f"{name}-{i}-of-{n}" / "meta.json").is_file()]
    if missing:
        raise DataError(f"{name}: parts are missing or unfinished: prepare {', '.join(missing)}")
    return [parts[i, n] for i in range(1, n + 1)]
