"""Writing a data set (bins.py has the format): it appears under its name complete or not at all."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np

from common.files import sync_folder, write_atomic
from data import DataError
from data.bins import CHUNK_BYTES, SHARD_TOKENS, Meta, Shard, Split, list_shards, partial_folder
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
        DataError: ids do not fit uint16, another process writes this set, or, from `finish`, the
            folder contains files that do not belong to a set.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        if tokenizer.vocab_size > 2**16:
            raise DataError(
                f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids; "
                f"uint16 shards hold 65536"
            )
        self.folder = folder
        self.partial = partial_folder(folder)
        self.tokenizer = tokenizer
        self.partial.mkdir(parents=True, exist_ok=True)
        # The lock is held until the file is closed, at the latest when the process ends.
        self._lock = (self.partial / LOCK_FILE).open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise DataError(
                f"{self.partial}: another process is preparing this set: wait for it"
            ) from error
        self._finished = False
        self.tokens = {"train": 0, "val": 0}  # written so far
        self.documents = {"train": 0, "val": 0}
        self._digests = {split: hashlib.sha256() for split in self.tokens}  # of all their shards
        self._shard_tokens = shard_tokens
        self._files: dict[str, IO[bytes]] = {}  # the last shard of each split

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # closing writes, which fails on a full disk
                file.close()
        if not self._finished and not (self.partial / PROGRESS_FILE).exists():
            shutil.rmtree(self.partial)  # not after `finish`: another process may have made it
        self._lock.close()

    def write(self, split: str, ids: np.ndarray, documents: int = 1) -> None:
        """Append complete documents: ids (n,), with an end-of-text token after each document."""
        self.documents[split] += documents
        while len(ids):
            number, start = divmod(self.tokens[split], self._shard_tokens)
            if split not in self._files or start == 0:
                self._sync(split)
                path = self.partial / f"{split}-{number:05d}.bin"
                self._files[split] = path.open("ab" if start else "wb")
            part = ids[: self._shard_tokens - start]
            data = part.astype("<u2", copy=False).tobytes()
            self._digests[split].update(data)
            self._files[split].write(data)
            self.tokens[split] += len(part)
            ids = ids[len(part) :]

    def _sync(self, split: str) -> None:
        if split in self._files:
            self._files[split].flush()
            os.fsync(self._files[split].fileno())

    def save(self) -> dict[str, tuple[int, int]]:
        """Wait until everything is on the disk. Returns what `resume` needs."""
        for split in self.tokens:
            self._sync(split)
        return {split: (self.tokens[split], self.documents[split]) for split in self.tokens}

    @property
    def sha256(self) -> dict[str, str]:
        """Of all bytes written so far, by split."""
        return {split: digest.hexdigest() for split, digest in self._digests.items()}

    def resume(self, saved: dict[str, tuple[int, int]], sha256: dict[str, str]) -> None:
        """Continue from what `save` returned; whatever was written later is cut off.

        Raises DataError if a shard is missing or too short, or their bytes are not of `sha256`.
        """
        for split in self.tokens:
            self.tokens[split], self.documents[split] = saved.get(split, (0, 0))
            for path, size in self._sizes(split).items():
                if not path.is_file() or path.stat().st_size < 2 * size:
                    raise DataError(
                        f"{path}: missing or shorter than {PROGRESS_FILE} says: start over with "
                        "--force"
                    )
                os.truncate(path, 2 * size)
                with path.open("rb") as file:
                    while data := file.read(CHUNK_BYTES):
                        self._digests[split].update(data)
            found = self.sha256[split]
            if sha256.get(split, found) != found:
                raise DataError(
                    f"{self.partial}: a file of {split} is damaged: expected sha256 "
                    f"{sha256[split]} of all, found {found}: start over with --force"
                )

    def _sizes(self, split: str) -> dict[Path, int]:
        """The tokens of each shard by its path."""
        sizes = {}
        for number, start in enumerate(range(0, self.tokens[split], self._shard_tokens)):
            path = self.partial / f"{split}-{number:05d}.bin"
            sizes[path] = min(self._shard_tokens, self.tokens[split] - start)
        return sizes

    def finish(self, name: str, source: dict, prepare: str) -> Meta:
        """Write meta.json, and rename the folder; an older set is replaced."""

        def describe_shard(path: Path, tokens: int) -> Shard:
            with path.open("rb") as file:
                return Shard(path.name, tokens, hashlib.file_digest(file, "sha256").hexdigest())

        self.save()
        splits = {}
        for split in self.tokens:
            sizes = self._sizes(split)
            with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
                shards = list(pool.map(describe_shard, sizes.keys(), sizes.values()))
            splits[split] = Split(self.tokens[split], self.documents[split], shards)
        meta = Meta(name, identity(self.tokenizer), "uint16", splits, source, prepare)
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
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.rename(self.partial, self.folder)
        sync_folder(self.folder.parent)
        remove_leftovers(self.folder)
        return meta


def remove_leftovers(folder: Path) -> None:
    """Remove the record of progress and the lock from a complete set."""
    for path in (folder / PROGRESS_FILE, folder / LOCK_FILE):
        if path.exists():  # a read-only file system refuses to unlink even a missing file
            path.unlink(missing_ok=True)


def refuse_foreign_files(folder: Path) -> None:
    """Raise DataError if `folder`, which will be replaced, contains files of no data set."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not OWN_FILES.fullmatch(path.name):
            raise DataError(
                f"{folder} holds {path.name!r}, which does not belong to a data set: move it, "
                f"or choose another --name"
            )
