"""From raw documents to token ids: decode, parse, choose the split, tokenize; here or in worker processes."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from data import DataError
from data.readers import Raw
from data.tokenizer import Tokenizer

MAX_HELD = 2**28  # bytes of documents that wait for workers


class Encoded(NamedTuple):
    ids: dict[str, np.ndarray]  # train and val: (n,) uint16, an end-of-text after each document
    documents: dict[str, int]  # train and val
    empty: int  # documents with nothing but white space
    bad: list[str]  # those that are not what they should be: where and why
    lowest: float  # of the documents' places, see `place`


class Encoder(NamedTuple):
    """What turns a list of raw documents into ids; one process as well as another."""

    tokenizer: Tokenizer
    val_fraction: float
    text_field: str = "text"
    only: tuple[str, str] | None = None  # of JSON rows: those whose field (dots for nesting) has this value

    def __call__(self, documents: list[Raw]) -> Encoded:
        texts, empty, bad = [], 0, []
        for raw in documents:
            try:
                text = self.text(raw)
            except ValueError as error:
                bad.append(f"{raw.where} {error}")
                continue
            if text is None:
                continue
            if text.strip():
                texts.append(text)
            else:
                empty += 1
        places = [place(text) for text in texts]
        ids: dict[str, list] = {"train": [], "val": []}
        for where, document in zip(places, self.tokenizer.encode_batch(texts), strict=True):
            ids["val" if where < self.val_fraction else "train"] += [document, np.uint16([self.tokenizer.eot])]
        return Encoded(
            {split: np.concatenate([np.empty(0, np.uint16), *parts]) for split, parts in ids.items()},
            {split: len(parts) // 2 for split, parts in ids.items()},
            empty,
            bad,
            min(places, default=1.0),
        )

    def text(self, raw: Raw) -> str | None:
        """The text of a document; None if it is not of this corpus. Raises ValueError saying what is wrong with it."""
        if raw.problem:
            raise ValueError(raw.problem)
        try:
            text = raw.data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 at byte {error.start}: convert it with iconv -t utf-8") from error
        if not raw.is_json:
            return text
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON ({error}): correct or remove it") from error
        if not isinstance(row, dict):
            raise ValueError(f"is a {type(row).__name__}, expected a JSON object with a field {self.text_field!r}")
        if self.only and lookup(row, self.only[0]) != self.only[1]:
            return None
        if self.text_field not in row:
            fields = ", ".join(map(repr, row)) or "none at all"
            raise ValueError(f"has no field {self.text_field!r}; it has {fields}: choose one by --text-field")
        text = row[self.text_field]
        if text is not None and not isinstance(text, str):
            kind = type(text).__name__
            raise ValueError(
                f"has a {kind} in field {self.text_field!r}, expected a string: choose another --text-field"
            )
        return text or ""


def lookup(row: dict, field: str) -> object:
    """The value of a nested field, "meta.name" for instance; None if there is none."""
    for key in field.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def place(text: str) -> float:
    """Where in [0, 1) the hash of a text falls; validation takes those below its fraction. It hangs on the text alone,
    so a document's split stays what it is when the corpus grows."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def encode_in_order(
    batches: Iterable[tuple[object, list[Raw]]], encoder: Encoder, workers: int
) -> Iterator[tuple[object, Encoded]]:
    """(key, encoded documents) of each (key, documents), in the same order, whatever the number of worker processes
    (1: this process). No more batches are drawn than keep the workers busy. Raises DataError if a worker dies."""
    if workers == 1:
        for key, documents in batches:
            yield key, encoder(documents)
        return
    # Not fork: this process has threads of pyarrow's and the hub's libraries.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    pending: deque = deque()
    held = 0
    try:
        for key, documents in batches:
            size = sum(len(raw.data) for raw in documents)
            pending.append((key, pool.submit(_work, documents), size))
            held += size
            while len(pending) > 2 * workers + 2 or held > MAX_HELD or (pending and pending[0][1].done()):
                key, future, size = pending.popleft()
                held -= size
                yield key, future.result()
        for key, future, _ in pending:
            yield key, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, of lack of memory perhaps: start again to go on, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Callable[[list[Raw]], Encoded]  # of a worker process


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    multiprocessing.parent_process().join()  # returns when it is killed, too
    os._exit(1)


def _work(documents: list[Raw]) -> Encoded:
    return _encoder(documents)
