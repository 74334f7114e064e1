"""The services of a run: processes and devices, its folder, checkpoints, metrics."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common  # noqa: F401  # checks this Python first

FAILURE_FILE = "failure.txt"  # in a run's folder: the error that ended its last start


class RunError(ValueError):
    """The run cannot start or continue; the message names what is wrong and the remedy."""


class RankError(RunError):
    """A RunError that may be this rank's alone."""


class Stopped(Exception):
    """The run was asked to stop, and did so at a checkpoint, or before its first step."""


@contextmanager
def describe_write_errors(path: str | Path) -> Iterator[None]:
    """Turn an OSError raised within into a RunError that names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}). {advise(error)}, and start the same "
            "command again: it resumes from the last checkpoint"
        ) from error


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def advise(error: BaseException) -> str:
    """What to do about an error of writing; torch reports some without their number."""
    number = getattr(error, "errno", None)
    if number in FORBIDDEN:
        return "Give yourself the right to write there (or set another --run.dir)"
    if number in FULL:
        return "Make room on the disk"
    if number:
        return "Check the disk and its network"
    return "Make room on the disk, or check it"


class UnreadableError(RunError):
    """A file that may be intact cannot be read now."""


def describe_read_error(path: Path, error: OSError) -> UnreadableError:
    """The error for a file of a run that cannot be read, which does not mean that it is damaged."""
    return UnreadableError(
        f"{path} cannot be read ({error.strerror}). It may be intact, so nothing was changed. "
        "Check the disk, its network and your right to read it, and start again"
    )
