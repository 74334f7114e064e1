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

BATCH_BYTES = 2**23  # raw documents per worker's batch; about a second of work (not measured)


class Position(NamedTuple):
    """The position of reading in a list of inputs."""

    files: int = 0  # inputs that are read completely
    documents: int = 0  # documents of the next input that are read


def encode_inputs(
    inputs: list[Input], encoder: Encoder, workers: int, start: Position
) -> Generator[tuple[Encoded, Position, int], None, None]:
    """Tokenize all documents of `inputs` from `start` on, in `workers` processes.

    One worker is a thread of this process.

    Yields:
        (ids of the next documents, the position after them, bytes of `inputs` read so far).

    Raises:
        DataError: a bad file or document, or a worker process died.
    """
    pool: Executor
    if workers == 1:
        pool = ThreadPoolExecutor(1, initializer=_start_worker, initargs=(encoder,))
    else:  # spawn, not fork: pyarrow and the hub's libraries have started threads
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
    """Cut documents into batches of BATCH_BYTES or a little more.

    Yields:
        (documents, the position after them, bytes of `inputs` read so far).
    """
    batch: list[Raw] = []
    batch_bytes = 0
    read_bytes = sum(file.size for file in inputs[: start.files])  # bytes of complete files
    for number in range(start.files, len(inputs)):
        file = inputs[number]
        documents = enumerate(read_documents(file, text_field), start=1)
        if number == start.files:
            documents = islice(documents, start.documents, None)
        for count, raw in documents:
            batch.append(raw)
            batch_bytes += len(raw.data)
            if batch_bytes >= BATCH_BYTES:
                yield batch, Position(number, count), read_bytes + raw.done
                batch = []
                batch_bytes = 0
        read_bytes += file.size
    yield batch, Position(len(inputs)), read_bytes


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
