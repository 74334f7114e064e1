"""Settings of a run: the schema, the reader of config files and train.py's command line."""

from configure.command_line import from_command_line, split_command_line, tell_torchrun
from configure.load import (
    ConfigError,
    differences,
    dumps,
    is_name_chosen,
    load,
    load_recorded,
    sweep_points,
)
from configure.schema import KEYS, Config

__all__ = [
    "KEYS",
    "Config",
    "ConfigError",
    "differences",
    "dumps",
    "from_command_line",
    "is_name_chosen",
    "load",
    "load_recorded",
    "split_command_line",
    "sweep_points",
    "tell_torchrun",
]
