"""What every command puts out: files that are there in full or not at all, aligned tables, one-line reasons, its end.

Imports nothing but the standard library, so that any package may use it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the code that `main` returns; 130 after Ctrl-C, 141 where nobody reads on, as in `… | head`."""
    try:
        try:
            code = main()
        except SystemExit as end:  # of argparse, say after --help
            code = end.code
        print(end="", flush=True)  # does nothing where there is no stdout
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        code = 141
    sys.exit(code)


def write_atomic(path: str | Path, data: str | bytes, durable: bool = False) -> None:
    """Write a file so that a reader, or a kill at any moment, finds the old content or the new, never a part.

    Args:
        path: the file; its folder exists. The temporary file beside it is `path` + "." + the process id + ".tmp".
        data: the whole content; text is encoded as UTF-8.
        durable: also survive a power failure, at the cost of two waits for the disk.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: str | Path) -> None:
    """Make the names in `folder` (files created, renamed or removed) survive a power failure. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned text with a rule under the head: the first `left` columns to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([aligned[0].rstrip(), "-" * len(aligned[0]), *(line.rstrip() for line in aligned[1:])])


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_packages(*names: str, requirements: str = "requirements-report.txt") -> None:
    """Raise ValueError that names the command to install them if one of these optional packages is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: pip install -r {requirements}")


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 file`, `2,000 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_path(path: str | Path) -> str:
    """A path relative to the working directory if it lies below, else absolute."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if Path(relative).parts[:1] == (os.pardir,) else relative


def format_size(size: int) -> str:
    """A number of bytes in decimal units, such as `1.12 MB`."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
