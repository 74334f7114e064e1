"""The frame of every command: help, one-line errors, exit codes, Ctrl-C and a closed stdout."""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without argparse's list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; {self.prog} --help has all arguments\n")


def build_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE`; its --help starts with `doc`, the module's docstring."""
    return Parser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawTextHelpFormatter
    )


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate `main(argv)`: ValueError and OSError become one line on stderr and exit code 2.

    The package's own errors (RunError, DataError, ConfigError) are ValueErrors. `main` returns an
    exit code or None, which means 0. Under torchrun one process per node prints the line, because
    the run may be missing on a single node.
    """

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> int:
        try:
            return main(*args, **kwargs) or 0
        except BrokenPipeError:  # an OSError, but run_command handles it
            raise
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if find_spec(package):  # it is there: a fault of this project
                raise
            print(
                f"error: {package} not installed: pip install -r requirements.txt", file=sys.stderr
            )
            return 2
        except (ValueError, OSError) as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {describe_error(error)}", file=sys.stderr)
            return 2

    return run


def describe_error(error: ValueError | OSError) -> str:
    """The message of an error; that of an OSError starts with its path."""
    path = getattr(error, "filename2", None) or getattr(error, "filename", None)
    # FileExistsError: a folder that is to be created
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{path}: a file is where a folder is needed"
    if isinstance(error, OSError) and path:
        return f"{path}: {error.strerror}"
    return str(error)


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the code that `main` returns.

    130 after Ctrl-C; 141 if the reader of stdout has closed it, for example in `… | head`.
    """
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse raises it, for example after --help
            code = end.code
        print(end="", flush=True)  # does nothing if there is no stdout
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def require_packages(*names: str, requirements: str = "requirements/report.txt") -> None:
    """Raise ValueError with the command that installs them if an optional package is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: pip install -r {requirements}")
