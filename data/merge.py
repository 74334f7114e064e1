"""One data set out of the parts that several machines prepared."""

import os
import re
import shutil
from pathlib import Path

from data import DataError
from data.bins import Meta, Shard, Split, check, open_tokenizer, partial_folder, summary
from data.writer import differences, lock, publish, read_progress, recover, refuse_foreign


def merge(out: Path, name: str, force: bool, command: str) -> None:
    """Make `out`/`name` of its parts, `out`/`name`-I-of-N, in their order. Their shards are linked, not copied, where
    the file system can, and their folders go. Raises DataError if parts are missing, damaged or do not fit together."""
    folder = (out / name).resolve()
    recover(folder)
    if (folder / "meta.json").exists() and not force:
        print(f"already there: {summary(check(folder, 2**16), folder)}; to make it anew of its parts add --force")
        return
    if not force and read_progress(folder):
        raise DataError(f"{partial_folder(folder)} is an unfinished set: finish it, or replace it by --force")
    folders = find_parts(out, name)
    metas = [check(part, 2**16) for part in folders]
    sources = [{k: v for k, v in meta.source.items() if k not in ("shard", "empty", "bad")} for meta in metas]
    for part, source, meta in zip(folders, sources, metas, strict=True):
        changes = differences(sources[0], source) or differences(metas[0].tokenizer, meta.tokenizer)
        if changes:
            raise DataError(
                f"{folders[0]} and {part} were made with different arguments ({changes}): make one of them anew"
            )
    for split, change in (("train", "smaller"), ("val", "larger")):
        if not any(meta.splits[split].tokens for meta in metas):
            raise DataError(f"no part of {name} has a {split} document: prepare them with a {change} --val-fraction")
    refuse_foreign(folder)
    refuse_foreign(partial_folder(folder))

    partial = partial_folder(folder)
    partial.mkdir(exist_ok=True)
    locked = lock(partial)
    for path in partial.iterdir():
        if path.name != "lock":
            path.unlink()
    splits = {}
    for split in ("train", "val"):
        shards = []
        for part, meta in zip(folders, metas, strict=True):
            for shard in meta.splits[split].files:
                shards.append(Shard(f"{split}-{len(shards):05d}.bin", shard.tokens, shard.sha256))
                link(part / shard.name, partial / shards[-1].name)
        documents = sum(meta.splits[split].documents for meta in metas)
        splits[split] = Split(sum(shard.tokens for shard in shards), documents, shards)
    commands = " && ".join([*(meta.prepare for meta in metas), command])
    counts = {key: sum(meta.source[key] for meta in metas) for key in ("empty", "bad")}
    meta = Meta(name, metas[0].tokenizer, metas[0].dtype, splits, sources[0] | counts, commands)
    publish(folder, meta, open_tokenizer(folders[0]))
    os.close(locked)
    for part in folders:
        shutil.rmtree(part)
    print(f"merged: {summary(meta, folder)}")


def find_parts(out: Path, name: str) -> list[Path]:
    """The folders of all parts, in order. Raises DataError if some are missing, or are parts of another number."""
    found = {path: re.fullmatch(re.escape(name) + r"-(\d+)-of-(\d+)", path.name) for path in sorted(out.glob("*-of-*"))}
    parts = {(int(match[1]), int(match[2])): path for path, match in found.items() if match}
    if not parts:
        raise DataError(f"{out} has no parts of {name}: prepare them by --shard 1/N to N/N")
    n = max(of for _, of in parts)
    strange = [path.name for (_, of), path in parts.items() if of != n]
    if strange:
        raise DataError(f"{out} has parts of different numbers: remove {', '.join(strange)}, or those of {n}")
    missing = [f"--shard {i}/{n}" for i in range(1, n + 1) if not (out / f"{name}-{i}-of-{n}" / "meta.json").is_file()]
    if missing:
        raise DataError(f"{name}: parts are missing or unfinished: prepare {', '.join(missing)}")
    return [parts[i, n] for i in range(1, n + 1)]


def link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, target)
