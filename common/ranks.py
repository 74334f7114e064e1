"""The variables by which torchrun tells a process its rank."""

import os

LEAST = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}  # also the defaults


def read_rank_variable(name: str) -> int:
    """The value of one of LEAST; without torchrun that of one process.

    Raises ValueError if it is no such number.
    """
    text = os.environ.get(name, str(LEAST[name]))
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if not LEAST[name] <= value < 10**6:
        raise ValueError(
            f"{name} = {text!r} in the environment: expected a whole number of at least "
            f"{LEAST[name]}, as torchrun sets it; start with torchrun, or unset {name}"
        )
    return value


def check_rank_variables() -> None:
    """Raise ValueError if one of LEAST is no such number."""
    for name in LEAST:
        read_rank_variable(name)
