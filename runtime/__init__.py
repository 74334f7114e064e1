"""The services of a run: processes and devices, its folder, checkpoints, metrics."""

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
    """The run was asked to stop, and did so at a checkpoint."""


def check_is_run(folder: Path) -> None:
    """Raise RunError if `folder` is not a run's."""
    if not (folder / "config.toml").is_file():
        fault = "no config.toml, so not a run" if folder.is_dir() else "no such folder"
        if (folder / "ckpt.pt").is_file():
            fault = "no run but a folder of nanoGPT, whose ckpt.pt is not read here"
        raise RunError(f"{folder}: {fault}; give a run's folder, such as runs/quickstart-kern")


@contextmanager
def describe_write_errors(path: str | Path) -> Iterator[None]:
    """Turn an OSError raised within into a RunError that names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}). Make room for it, or give yourself the "
            "right to write there (or set another --run.dir), and start the same command again: "
            "it resumes from the last checkpoint"
        ) from error
