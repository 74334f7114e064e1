"""What a run stands on: processes and devices, its folder, checkpoints, metrics."""

from contextlib import contextmanager


class RunError(ValueError):
    """The run cannot start or go on; the message names what is wrong and the remedy."""


class RankError(RunError):
    """A RunError that may be this rank's alone."""


class Stopped(Exception):
    """The run was asked to stop, and did so at a checkpoint."""


@contextmanager
def writing(path):
    """Turns an OSError within into a RunError that names `path` and what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}). Make room for it, or give yourself the right to write there "
            f"(or set another --run.dir), and start the same command again: it goes on from the last checkpoint"
        ) from error
