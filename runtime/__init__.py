"""What a run stands on: processes and devices, checkpoints, metrics."""


class RunError(ValueError):
    """The run cannot start or go on; the message names what is wrong and the remedy."""
