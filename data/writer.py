"""Writing a data set (bins.py has the format): it appears under its name complete or not at all."""

import hashlib
import json
import os
import re
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from io import BufferedRandom, BufferedWriter
from pathlib import Path

import numpy as np

from common.files import exists, is_file, is_folder, sync_folder, take_lock, write_atomic
from data import DataError
from data.bins import SHARD_TOKENS, Meta, Shard, Split, list_shards, partial_folder
from data.tokenizer import RANKS_FILE, TOKENIZER_FILE, Tokenizer, identity

PROGRESS_FILE = "progress.json"  # its folder is data/<name>.partial/, next to the shards
LOCK_FILE = "lock"
OWN_FILES = re.compile(  # all that a set or an unfinished set may hold
    r"((train|val)-\d{5,}\.bin|progress\.json|lock|meta\.json|checked\.json|inputs\.json"
    rf"|{re.escape(RANKS_FILE)}|{re.escape(TOKENIZER_FILE)})(\.\d+\.tmp)?"
)


class Writer(AbstractContextManager["Writer"]):
    """Writes a set in <folder>.partial, which replaces <folder> at the end.

    with Writer(folder, tokenizer) as writer:
        writer.write("train", ids, documents)  # once or more
        writer.finish(name, source, prepare)

    Without `finish`, the partial folder is removed at the end, unless it has a record of progress.

    Raises:
        DataError: another process writes this set, or, from `finish`, the folder contains files
            that do not belong to a set.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self.folder = folder
        self.partial = partial_folder(folder)
        self.tokenizer = tokenizer
        self.partial.mkdir(parents=True, exist_ok=True)
        # The lock is held until the file is closed, at the latest when the process ends.
        self._lock = (self.partial / LOCK_FILE).open("a")
        try:
            take_lock(self._lock)
        except BlockingIOError as error:
            self._lock.close()
            raise DataError(
                f"{self.partial}: another process is preparing this set: wait for it"
            ) from error
        self._finished = False
        self.tokens = {"train": 0, "val": 0}  # written so far
        self.documents = {"train": 0, "val": 0}
        self._digests = {split: {} for split in self.tokens}  # of each shard, by its name
        self._shard_tokens = shard_tokens
        self._files: dict[str, BufferedWriter | BufferedRandom] = {}  # each split's last shard

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # closing writes, which fails on a full disk
                file.close()
        if not self._finished and not exists(self.partial / PROGRESS_FILE):
            shutil.rmtree(self.partial)  # not after `finish`: another process may have made it
        self._lock.close()

    def write(self, split: str, ids: np.ndarray, documents: int = 1) -> None:
        """Append complete documents: ids (n,), with an end-of-text token after each document."""
        self.documents[split] += documents
        while len(ids):
            number, start = divmod(self.tokens[split], self._shard_tokens)
            name = f"{split}-{number:05d}.bin"
            if start == 0:
                self._sync(split)
                self._files[split] = (self.partial / name).open("wb")
                self._digests[split][name] = hashlib.sha256()
            part = ids[: self._shard_tokens - start]
            data = part.astype("<u2", copy=False).tobytes()
            self._digests[split][name].update(data)
            self._files[split].write(data)
            self.tokens[split] += len(part)
            ids = ids[len(part) :]

    def _sync(self, split: str) -> None:
        if split in self._files:
            self._files[split].flush()
            os.fsync(self._files[split].fileno())

    def save(self) -> dict[str, Split]:
        """Wait until everything is on the disk. Returns both splits so far, as in meta.json."""
        splits = {}
        for split, digests in self._digests.items():
            self._sync(split)
            shards = []
            left = self.tokens[split]
            for name, digest in digests.items():
                shards.append(Shard(name, min(self._shard_tokens, left), digest.hexdigest()))
                left -= self._shard_tokens
            splits[split] = Split(self.tokens[split], self.documents[split], shards)
        return splits

    def resume(self, saved: dict[str, Split]) -> None:
        """Continue from what `save` returned; whatever was written later is cut off.

        Raises DataError if a shard is missing, too short or damaged.
        """
        for split, recorded in saved.items():
            self.tokens[split] = recorded.tokens
            self.documents[split] = recorded.documents
            for shard in recorded.files:
                path = self.partial / shard.name
                size = 2 * shard.tokens
                if not is_file(path) or path.stat().st_size < size:
                    raise DataError(f"{path}: missing or too short: start over with --force")
                file = path.open("r+b")
                file.truncate(size)
                digest = hashlib.file_digest(file, "sha256")  # ends where `write` goes on
                self._files[split] = file
                self._digests[split][shard.name] = digest
                if digest.hexdigest() != shard.sha256:
                    raise DataError(f"{path}: damaged, its sha256 differs: start over with --force")

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Write meta.json, and rename the folder; an older set is replaced."""
        meta = Meta(name, identity(self.tokenizer), "uint16", self.save(), source, prepare)
        keep = {PROGRESS_FILE, LOCK_FILE, *(shard.name for shard in list_shards(meta))}
        for path in self.partial.iterdir():
            if path.name not in keep:
                path.unlink()  # of an earlier preparation with other arguments
        for file, content in self.tokenizer.files.items():
            write_atomic(self.partial / file, content, durable=True)
        write_atomic(self.partial / "meta.json", json.dumps(asdict(meta), indent=1), durable=True)
        self._finished = True
        refuse_foreign_files(self.folder)  # a second time: preparing can last hours
        (self.folder / "meta.json").unlink(missing_ok=True)  # the old set is incomplete from here
        if exists(self.folder):
            shutil.rmtree(self.folder)
        os.rename(self.partial, self.folder)
        sync_folder(self.folder.parent)
        remove_leftovers(self.folder)
        return meta


def remove_leftovers(folder: Path) -> None:
    """Remove the record of progress and the lock from a complete set."""
    for path in (folder / PROGRESS_FILE, folder / LOCK_FILE):
        if exists(path):  # a read-only file system refuses to unlink even a missing file
            path.unlink(missing_ok=True)


def refuse_foreign_files(folder: Path) -> None:
    """Raise DataError if `folder`, which will be replaced, contains files of no data set."""
    if not is_folder(folder):
        return
    for path in sorted(folder.iterdir()):
        if not OWN_FILES.fullmatch(path.name):
            raise DataError(
                f"{folder} holds {path.name!r}, which does not belong to a data set: move it, "
                f"or choose another --name"
            )
