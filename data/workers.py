"""Tokenizing documents in worker processes, in their order: neither the batches nor the workers change the result."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import NamedTuple

from data import DataError
from data.encode import Encoded, Encoder
from data.readers import Input, Raw, read_documents

BATCH_BYTES = 2**23  # of raw documents that a worker takes at once; about a second of work


class Position(NamedTuple):
    """Where reading stands in a list of inputs."""

    files: int = 0  # read completely
    documents: int = 0  # read of the next file


def encode_inputs(
    inputs: list[Input], encoder: Encoder, workers: int, start: Position
) -> Generator[tuple[Encoded, Position, int], None, None]:
    """Tokenize all documents of `inputs` from `start` on, in `workers` processes; 1 means in a thread of this one.

    Yields:
        (ids of the next documents, the position after them, bytes of `inputs` read up to there).

    Raises:
        DataError: a bad file or document, or a worker process died.
    """
    pool: Executor
    if workers == 1:
        pool = ThreadPoolExecutor(1, initializer=_start_worker, initargs=(encoder,))
    else:  # spawn, not fork: this process has threads of pyarrow's and the hub's libraries
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    pending: deque[tuple[Future[Encoded], Position, int]] = deque()
    try:
        for documents, position, read_bytes in cut_batches(inputs, encoder.text_field, start):
            pending.append((pool.submit(_encode, documents), position, read_bytes))
            if len(pending) > 2 * workers:
                encoded, position, read_bytes = pending.popleft()
                yield encoded.result(), position, read_bytes
        for encoded, position, read_bytes in pending:
            yield encoded.result(), position, read_bytes
    except BrokenProcessPool as error:
        died = "a worker process died, perhaps for lack of memory"
        raise DataError(f"{died}: start again to resume, with fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def cut_batches(
    inputs: list[Input], text_field: str, start: Position
) -> Iterator[tuple[list[Raw], Position, int]]:
    """(documents of BATCH_BYTES or a little more, the position after them, bytes of `inputs` up to there), in order."""
    documents: list[Raw] = []
    size, before = 0, sum(file.size for file in inputs[: start.files])
    for number, file in enumerate(inputs[start.files :], start.files):
        skipped = start.documents if number == start.files else 0
        for count, raw in enumerate(
            islice(read_documents(file, text_field), skipped, None), skipped + 1
        ):
            documents.append(raw)
            size += len(raw.data)
            if size >= BATCH_BYTES:
                yield documents, Position(number, count), before + raw.done
                documents, size = [], 0
        before += file.size
    yield documents, Position(len(inputs)), before


_encoder: Encoder  # of a worker


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    if threading.current_thread() is threading.main_thread():  # a process of its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # returns when the parent is killed, too
    os._exit(1)


def _encode(documents: list[Raw]) -> Encoded:
    return _encoder(documents)
