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
    """Raise ValueError if one of LEAST is no such number, or the rank is beyond the size."""
    values = {name: read_rank_variable(name) for name in LEAST}
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise ValueError(
            f"RANK = {values['RANK']} in the environment is not below WORLD_SIZE = "
            f"{values['WORLD_SIZE']}; start with torchrun, or unset both"
        )
