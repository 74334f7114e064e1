"""Tokenizing a corpus in units: each is a range of documents that a worker turns into one file of its own.

Where units begin depends on the inputs alone, and a unit's file appears complete or not at all. So to resume a
preparation is to see which files exist, and neither kills nor the number of workers change the result.

Files that begin in the same UNIT_BYTES of the input are a group, so that a large file is one of its own; its documents
are cut into units of UNIT_BYTES. The file of unit u of group g is `g-u.npz`, and `g-u-last.npz` if it is the last. A
complete group is not opened again; an incomplete one is read from its start, for most files can only be read so.
"""

import errno
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from common.files import write_atomic
from data import DataError
from data.bins import sha256_of
from data.encode import Encoded, Encoder
from data.readers import Input, Raw, read_documents

UNIT_BYTES = 2**23  # of raw documents; about a second of work
UNITS_NAME = "units-[0-9a-f]{12}"  # of their folder, a pattern
UNIT_FILE = r"\d{8}-\d{8}(-last)?\.npz"  # of its name, a pattern
CHANGES = {  # of arguments whose values say nothing
    "inputs": "the input files differ",
    "val_inputs": "the files of --val-source differ",
    "unit_fields": "another version of this program",
}
BEGUN_FILE = "begun.json"  # the arguments of the preparation that the units belong to


def open_units(partial: Path, made_from: dict, force: bool) -> Path:
    """The folder, below `partial`, for the units of a preparation with these arguments; it may hold some already.

    Raises:
        DataError: the units there belong to other arguments, and `force`, which deletes them, is not set.
    """
    begun, was = made_from | {"unit_bytes": UNIT_BYTES, "unit_fields": list(Encoded._fields)}, read_begun(partial)
    if was != begun:
        if has_units(partial):
            if not force:
                found = f"made with other arguments ({describe_changes(was, begun)}): resume with those, "
                found = found if was else f"whose {BEGUN_FILE} cannot be read: "
                raise DataError(
                    f"{partial} holds an unfinished set {found}start over with --force, or choose another --name"
                )
            remove_units(partial)
        write_atomic(partial / BEGUN_FILE, json.dumps(begun), durable=True)
    # The name tells arguments apart: a worker that outlives its killed parent cannot write into another's units.
    folder = partial / f"units-{sha256_of(begun)[:12]}"
    folder.mkdir(exist_ok=True)
    return folder


def read_begun(partial: Path) -> dict:
    """The arguments of the unfinished preparation in `partial`; empty if there is none, or its file is damaged."""
    try:
        begun = json.loads((partial / BEGUN_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return begun if isinstance(begun, dict) else {}


def describe_changes(was: dict, now: dict) -> str:
    """The keys whose values differ, in words; empty if none."""
    changed = [key for key in sorted(was | now) if was.get(key) != now.get(key)]
    return "; ".join(CHANGES.get(key, f"{key} {was.get(key)!r}, now {now.get(key)!r}") for key in changed)


def has_units(partial: Path) -> bool:
    """Whether `partial` holds work to resume."""
    return any(unit_files(folder) for folder in _unit_folders(partial))


def remove_units(partial: Path) -> None:
    """Delete all units below `partial`, whatever their arguments."""
    for folder in _unit_folders(partial):
        shutil.rmtree(folder, ignore_errors=True)
    if (partial / BEGUN_FILE).exists():  # on a read-only file system even unlinking nothing fails
        (partial / BEGUN_FILE).unlink(missing_ok=True)


def unit_files(folder: Path) -> list[Path]:
    """The units in `folder`, in the order of their documents; other files are ignored."""
    return sorted(path for path in folder.glob("*.npz") if re.fullmatch(UNIT_FILE, path.name))


def _unit_folders(partial: Path) -> list[Path]:
    return [folder for folder in partial.glob("units-*") if re.fullmatch(UNITS_NAME, folder.name)]


def write_units(
    folder: Path, inputs: list[Input], encoder: Encoder, workers: int, part: tuple[int, int] = (1, 1)
) -> Generator[int, None, None]:
    """Tokenize every unit of `inputs` whose file is missing in `folder`.

    Args:
        folder: for the units.
        inputs: the files of the whole corpus.
        encoder: turns documents into ids.
        workers: number of processes; with 1 the work is done in a thread of this one.
        part: (i, n): write the i-th of n parts of the units, i from 1.

    Yields:
        The bytes of `inputs` read so far, after each unit.

    Raises:
        DataError: a bad file or document, or a worker process died.
        OSError: a file cannot be written.
    """
    pool: Executor
    if workers == 1:
        pool = ThreadPoolExecutor(1, initializer=_start_worker, initargs=(encoder,))
    else:  # spawn, not fork: this process has threads of pyarrow's and the hub's libraries
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    pending: deque[tuple[int, Future]] = deque()
    try:
        for path, documents, read_bytes in _cut_units(folder, inputs, encoder.text_field, part):
            pending.append((read_bytes, pool.submit(_write_unit, path, documents)))
            if len(pending) > 2 * workers:  # in order, so that of two bad documents the first is reported
                read_bytes, written = pending.popleft()
                written.result()
                yield read_bytes
        for read_bytes, written in pending:
            written.result()
            yield read_bytes
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, perhaps for lack of memory: start again to resume, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def read_units(folder: Path) -> Iterator[Encoded]:
    """All units of a tokenized corpus, in the order of its documents.

    Raises:
        DataError: units are damaged; all such are removed, so that one more start rebuilds them.
        OSError: the disk or the permissions, not the file, are at fault.
    """
    paths = unit_files(folder)
    for i, path in enumerate(paths):
        unit = _read_unit(path)
        if unit is None:
            damaged = [later for later in paths[i:] if _read_unit(later) is None]
            for each in damaged:
                each.unlink()
            names = f"{path}{f' and {len(damaged) - 1} more' if damaged[1:] else ''}"
            raise DataError(f"damaged and now removed: {names}. Start again to rebuild what was removed")
        yield unit


def _read_unit(path: Path) -> Encoded | None:
    """The content of a unit; None if it is damaged: such a zip file can raise nearly anything."""
    try:
        with np.load(path) as file:
            train, val, *counts = (file[field] for field in Encoded._fields)
        return Encoded(train, val, *(count.tolist() for count in counts))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE):
            raise
        return None


def _cut_units(
    folder: Path, inputs: list[Input], text_field: str, part: tuple[int, int]
) -> Iterator[tuple[Path, list[Raw], int]]:
    """(file, documents, bytes of `inputs` read up to its end) of each unit whose file is missing, in order."""
    existing = {path.name for path in unit_files(folder)}
    complete = _complete_groups(existing)
    starts = itertools.accumulate((file.size for file in inputs), initial=0)
    groups = itertools.groupby(zip(starts, inputs, strict=False), lambda pair: pair[0] // UNIT_BYTES)
    for i, (group, files) in enumerate(groups):
        if i % part[1] == part[0] - 1 and group not in complete:
            for unit, (documents, read_bytes, last) in enumerate(_cut_group(files, text_field)):
                name = f"{group:08d}-{unit:08d}{'-last' if last else ''}.npz"
                if name not in existing:
                    yield folder / name, documents, read_bytes


def _complete_groups(existing: Iterable[str]) -> set[int]:
    """The groups of which the last unit and all before it exist."""
    complete = set()
    for group, names in itertools.groupby(sorted(existing), lambda name: name[:8]):
        *before, last = names
        if last.endswith("-last.npz") and int(last[9:17]) == len(before):
            complete.add(int(group))
    return complete


def _cut_group(files: Iterable[tuple[int, Input]], text_field: str) -> Iterator[tuple[list[Raw], int, bool]]:
    """(documents, bytes of all inputs read up to their end, whether they are the last) of each unit, at least one."""
    documents: list[Raw] = []
    size = read_bytes = 0
    for start, file in files:
        for raw in read_documents(file, text_field):
            if size >= UNIT_BYTES:
                yield documents, read_bytes, False
                documents, size = [], 0
            documents.append(raw)
            size += len(raw.data)
            read_bytes = start + raw.done
        read_bytes = start + file.size
    yield documents, read_bytes, True


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


def _write_unit(path: Path, documents: list[Raw]) -> None:
    """Tokenize a unit into its file."""
    content = io.BytesIO()
    np.savez(content, **_encoder(documents)._asdict())
    write_atomic(path, content.getvalue(), durable=True)
