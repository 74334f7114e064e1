"""The command line of train.py: FILE and overrides in, a Config or one line per error out."""

import json
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from configure.load import ConfigError, load
from configure.schema import KEYS, SECTIONS, Config

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


USAGE = """\
usage: python train.py FILE [--section.key=value ...]

Trains the model described by FILE (TOML, such as config/quickstart.toml). FILE holds what differs
from the defaults below; --section.key=value overrides both. The same command resumes a run;
--fresh starts over in a new folder, and deletes nothing.
Many GPUs: torchrun --nproc_per_node=8 train.py FILE [...]"""
HELP_WIDTH = 120  # columns


def from_command_line(argv: Sequence[str]) -> Config:
    """Load the Config of train.py's arguments, for the number of ranks that torchrun started.

    `--section.key value` works too. `--help` prints every key and exits with 0; a wrong command
    line or config prints the errors to stderr and exits with 2. Ranks other than 0 exit silently.
    """
    if "-h" in argv or "--help" in argv:
        _exit(0, f"{USAGE}\n\n{help_text()}")
    try:
        for name in LEAST:
            read_rank_variable(name)
    except ValueError as error:  # each process prints it: which is the first is unknown
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        file, overrides = split_command_line([word for word in argv if word != "--fresh"])
        return load(file, overrides, read_rank_variable("WORLD_SIZE"))
    except ConfigError as error:
        tell_torchrun(str(error))
        _exit(2, f"error: {error}")


def split_command_line(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the config file and `--key=value` overrides.

    Raises ConfigError if not one file.
    """
    files: list[str] = []
    overrides: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith("--"):
            files.append(argument)
        elif "=" in argument:
            overrides.append(argument)
        else:
            overrides.append(f"{argument}={next(arguments, '')}")
    if len(files) != 1:
        given = "found none"
        if files:
            given = f"found {len(files)}: {', '.join(files)} (overrides start with --)"
        raise ConfigError(
            f"one config file is needed, {given}\n{USAGE}\nevery key: python train.py --help"
        )
    return files[0], overrides


def help_text() -> str:
    """Describe every key by default, meaning and type, grouped by section."""
    width_of_keys = max(len(key) for key in KEYS) + len("--")
    sections: dict[str, list[str]] = {section: [f"[{section}]"] for section in SECTIONS}
    for key, schema in KEYS.items():
        start = f"  {'--' + key:{width_of_keys}}  {json.dumps(schema['default']):10}  "
        meaning = textwrap.fill(
            f"{schema['description']} ({_describe_type(key)})",
            HELP_WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )
        sections[key.split(".")[0]].append(meaning)
    return "\n\n".join("\n".join(lines) for lines in sections.values())


def _describe_type(key: str) -> str:
    """A key's type and range, such as `integer >= 1` or `one of learned, rope`."""
    schema = KEYS[key]
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    signs = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
        "pattern": "matching",
    }
    limits = [f"{sign} {schema[limit]}" for limit, sign in signs.items() if limit in schema]
    return f"{schema['type']} {', '.join(limits)}".strip()


def _exit(status: int, text: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr if status else sys.stdout)
    raise SystemExit(status)


def tell_torchrun(error: str) -> None:
    """Leave an error for torchrun, which prints it after its own trace."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        details = {"timestamp": str(int(time.time()))}
        body = {"message": {"message": f"error: {error}", "extraInfo": details}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(body))
