"""The frame of every command: its arguments' help, one-line errors, Ctrl-C, a reader that leaves."""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Its errors are one line, without the usage of every option before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; {self.prog} --help has all arguments\n")


def build_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE` whose --help begins with `doc`, the module's docstring, as it is written."""
    return Parser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawTextHelpFormatter
    )


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate `main(argv) -> int | None`: ValueError and OSError become one line on stderr and the exit code 2.

    The package's own errors (RunError, DataError, ConfigError) are ValueErrors. None counts as 0.
    Under torchrun each node prints the line once: one of them alone may lack the run.
    """

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> int:
        try:
            return main(*args, **kwargs) or 0
        except BrokenPipeError:  # an OSError that is for run_command
            raise
        except (ValueError, OSError) as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr)
            return 2

    return run


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the code that `main` returns; 130 after Ctrl-C, 141 if stdout was closed, as by `… | head`."""
    try:
        try:
            code = main()
        except SystemExit as end:  # of argparse, say after --help
            code = end.code
        print(end="", flush=True)  # does nothing where there is no stdout
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # the interpreter flushes it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def require_packages(*names: str, requirements: str = "requirements-report.txt") -> None:
    """Raise ValueError that names the command to install them if one of these optional packages is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: pip install -r {requirements}")
