"""Files that are written completely or not at all."""

import os
from pathlib import Path


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
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power failure: files created, renamed or removed.

    Raises OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def short_path(path: str | Path) -> str:
    """A path relative to the working directory if it is inside, else absolute."""
    relative = os.path.relpath(path)
    if Path(relative).parts[:1] == (os.pardir,):
        return os.path.abspath(path)
    return relative
