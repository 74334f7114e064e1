"""Files that are written completely or not at all, checked JSON files, and locks on files."""

import errno
import fcntl
import fnmatch
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from pydantic import TypeAdapter, ValidationError

Content = TypeVar("Content")

LOCK_PATIENCE = 1.0  # seconds to retry a lock; `is_locked` holds it for microseconds; not measured


def write_atomic(path: str | Path, data: str | bytes, durable: bool = False) -> None:
    """Write `data`, text as UTF-8, so that `path` has the old content or the new, never a part.

    This also holds if the process is killed. `durable` makes it hold after a power failure, at the
    cost of two waits for the disk. Raises OSError if the file cannot be written; `path` is then
    unchanged.
    """
    if isinstance(data, str):
        data = data.encode()
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        rename(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk names none, a missing folder the temporary one
        raise
    if durable:
        sync_folder(path.parent)


def rename(old: Path, new: Path) -> None:
    """os.replace, for file servers that report an error of a rename that has succeeded.

    NFS does so where its answer was lost and the request was sent again. Raises OSError.
    """
    try:
        os.replace(old, new)
    except OSError:
        if os.path.lexists(old) or not os.path.lexists(new):
            raise


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power failure: files created, renamed or removed.

    Raises OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exists(path: Path) -> bool:
    """True if something is at a path, behind links too. See `find_mode`."""
    return find_mode(path) != 0


def is_file(path: Path) -> bool:
    """True if a file is at a path, behind links too. See `find_mode`."""
    return stat.S_ISREG(find_mode(path))


def is_folder(path: Path) -> bool:
    """True if a folder is at a path, behind links too. See `find_mode`."""
    return stat.S_ISDIR(find_mode(path))


def find_mode(path: Path) -> int:
    """`st_mode` of what is at a path; 0 if nothing is.

    Raises OSError if nobody can tell: without the right to look, or while a network's disk fails.
    Path.exists, is_file and is_dir of Python 3.14 say no then, and whoever believes them begins
    anew where files are.
    """
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: NUL in a name
        return 0
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 0
        raise


def list_matching(folder: Path, pattern: str) -> list[Path]:
    """What is in a folder under names that match a pattern, sorted; nothing if it is no folder.

    Raises OSError if it cannot be listed. Path.glob of Python 3.13 finds nothing then.
    """
    names = os.listdir(folder) if is_folder(folder) else []
    return sorted(folder / name for name in fnmatch.filter(names, pattern))


def check_regular(path: Path) -> None:
    """Raise OSError if a path is a FIFO or a device: opening it might wait forever for a writer."""
    if exists(path) and not (is_file(path) or is_folder(path)):
        raise OSError(errno.EINVAL, "a pipe, socket or device, not a file", str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError within this context names `path`; one of reading or writing has no path."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_content(path: Path) -> bytes:
    """All bytes of a file. Raises OSError, with its path."""
    check_regular(path)
    with naming(path):
        return path.read_bytes()


class DamagedFile(ValueError):
    """A file holds something else than it should; the message names its path and the key."""


def read_json(path: str | Path, model: type[Content]) -> Content:
    """Read a JSON file whose content `model` describes.

    Args:
        path: the file.
        model: a type that pydantic checks: a BaseModel, dataclass, TypedDict or `dict[str, int]`.
            Only a strict one refuses "1" where a number is expected.

    Raises:
        DamagedFile: not JSON, or not as `model` says.
        OSError: the file cannot be read, which does not mean that it is damaged.
    """
    path = Path(path)
    content = read_content(path)
    try:
        return TypeAdapter(model).validate_json(content)
    except ValidationError as invalid:
        raise DamagedFile(describe_invalid(path, invalid)) from None


def describe_invalid(where: str | Path, invalid: ValidationError) -> str:
    """A line of the form `WHERE: key.inner = value: expected …` for each of pydantic's errors."""
    lines = []
    for error in invalid.errors(include_url=False):
        key = ".".join(str(part) for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ").replace("Input should", "should")
        value = repr(error["input"])
        if len(value) > 100:
            value = f"{value[:100]}…"
        if error["type"] == "json_invalid":
            lines.append(f"{where}: damaged, not JSON: {message.removeprefix('Invalid JSON: ')}")
        elif error["type"] == "missing":
            lines.append(f"{where}: {key} is missing")
        else:
            lines.append(f"{where}: {key or 'the content'} = {value}: {message}")
    return "\n  ".join(lines)


def take_lock(file: IO) -> None:
    """Lock an open file for this process alone, until it is closed or the process ends.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # by another owner, or for a moment by `is_locked`
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def is_locked(path: Path) -> bool | None:
    """Return True if a process holds the lock of `take_lock`, None if that cannot be known.

    The kernel knows the locks of all processes that it runs, in any container. Locks of other
    computers it knows on most NFS mounts, but not on all. So False means only that no process of
    this computer holds the lock.
    """
    # This takes a shared lock for some microseconds, which needs no permission to write. A process
    # that takes the exclusive lock in that moment tries again. Queries that take no lock do not
    # work: F_GETLK does not see flock's locks, and /proc/locks hides those of processes in PID
    # namespaces other than its reader's.
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # no permission to read it, or no locks on this file system
        return None
    return False
