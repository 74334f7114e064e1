"""What a run stands on: processes and devices, its folder, checkpoints, metrics."""


class RunError(ValueError):
    """The run cannot start or go on; the message names what is wrong and the remedy."""


class Stopped(Exception):
    """The run was asked to stop, and did so at a checkpoint."""
