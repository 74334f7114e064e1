"""Settings of a run: the schema (`schema.py`) and the reader of files and command lines (`load.py`)."""

from configure.load import (
    ConfigError,
    differences,
    dumps,
    from_command_line,
    is_name_chosen,
    load,
    split_command_line,
    sweep_points,
    tell_torchrun,
)
from configure.schema import KEYS, Config

__all__ = [
    "KEYS", "Config", "ConfigError", "differences", "dumps", "from_command_line", "is_name_chosen", "load",
    "split_command_line", "sweep_points", "tell_torchrun"
]  # fmt: skip
