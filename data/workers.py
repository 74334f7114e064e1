"""Tokenize documents in worker processes, in their order.

The result does not depend on the batches or on the number of workers.
"""

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
from data.round_trip import EVERY

BATCH_BYTES = 2**23  # raw documents per worker's batch; about a second of work (not measured)


Position = tuple[int, int]  # inputs that are read completely, documents of the next one


class Batch(NamedTuple):
    """Documents in the order of the inputs."""

    documents: list[Raw]
    position: Position  # after them
    read_bytes: int  # of all inputs so far


def encode_inputs(
    inputs: list[Input], encoder: Encoder, workers: int, start: Position = (0, 0)
) -> Generator[tuple[Encoded, Batch], None, None]:
    """Tokenize all documents of `inputs` from `start` on, in `workers` processes.

    One worker is a thread of this process.

    Yields:
        (ids of the next documents, these documents).

    Raises:
        DataError: a bad file or document, or a worker process died.
    """
    pool: Executor
    if workers == 1:
        pool = ThreadPoolExecutor(1, initializer=_start_worker, initargs=(encoder,))
    else:  # spawn, not fork: pyarrow and the hub's libraries have started threads
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    pending: deque[tuple[Future[Encoded], Batch]] = deque()
    try:
        for batch in cut_batches(inputs, encoder.text_field, start):
            pending.append((pool.submit(_encode, batch.documents), batch))
            if len(pending) > 2 * workers:
                encoded, batch = pending.popleft()
                yield encoded.result(), batch
        for encoded, batch in pending:
            yield encoded.result(), batch
    except BrokenProcessPool as error:
        died = "a worker process died, perhaps for lack of memory"
        raise DataError(f"{died}: start again to resume, with fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def cut_batches(inputs: list[Input], text_field: str, start: Position) -> Iterator[Batch]:
    """Cut documents into batches of BATCH_BYTES or a little more."""
    documents: list[Raw] = []
    size = 0
    files, done = start
    read_bytes = sum(file.size for file in inputs[:files])  # bytes of complete files
    for number, file in enumerate(inputs[files:], start=files):
        numbered = enumerate(read_documents(file, text_field), start=1)
        for count, raw in islice(numbered, done, None):
            documents.append(raw._replace(is_checked=True) if count % EVERY == 1 else raw)
            size += len(raw.data)
            if size >= BATCH_BYTES:
                yield Batch(documents, (number, count), read_bytes + raw.done)
                documents = []
                size = 0
        done = 0
        read_bytes += file.size
    yield Batch(documents, (len(inputs), 0), read_bytes)


_encoder: Encoder  # a global of each worker process


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    if threading.current_thread() is threading.main_thread():  # this worker is a process
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
        threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # also returns when the parent is killed
    os._exit(1)


def _encode(documents: list[Raw]) -> Encoded:
    return _encoder(documents)
