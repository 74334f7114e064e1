"""Put known faults into a copy of the code, one at a time, and see whether the tests notice.

    python -m scripts.mutate                    every fault of tests/faults/*.toml
    python -m scripts.mutate runtime train      those of two files
    python -m scripts.mutate --only fsync       those whose name contains a word
    python -m scripts.mutate --jobs 2           two at a time

A fault names a file, a text that occurs there once, what replaces it, and the tests that must fail. Each runs in a copy
of the files that git tracks or would add, so the working tree is never touched. Prints caught or MISSED for each, and
the share caught by folder. Exit codes: 0 all caught, 1 some missed, 2 a fault that cannot be applied. Not part of the
default tests, which check only that every fault still applies. The tests are run without a fault first.
"""

import argparse
import importlib
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import NamedTuple, NoReturn, TypeVar

import pytest

from runtime.output import run_command, text_table

REPO_ROOT = Path(__file__).resolve().parent.parent
ROOT = REPO_ROOT  # of this very code; a test gives REPO_ROOT another value
FAULTS = REPO_ROOT / "tests/faults"
LOG = "mutate.log"
FORK = multiprocessing.get_context("fork")
LIBRARIES = ("torch", "hypothesis.extra.numpy", "transformers", "pydantic", "pyarrow.parquet", "matplotlib.pyplot")
T = TypeVar("T")
TIMEOUT = 900  # seconds for one fault's tests: a fault that hangs them is caught


class Fault(NamedTuple):
    """A change of one place in the code that the tests must notice."""

    name: str  # what is wrong, in words
    file: str
    find: str  # occurs in the file exactly once
    replace: str
    tests: str  # arguments of pytest

    @property
    def folder(self) -> str:
        """Where it is counted: the first part of the file's path."""
        return self.file.split("/")[0]

    def apply_to(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the text to replace does not occur exactly once.
        """
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"fault {self.name!r}: {self.find!r} occurs {count} times in {self.file}, not once")
        return text.replace(self.find, self.replace)


def read_faults(stems: Sequence[str] = ()) -> list[Fault]:
    """The faults of tests/faults/<stem>.toml, of all files by default."""
    files = [FAULTS / f"{stem}.toml" for stem in stems] or sorted(FAULTS.glob("*.toml"))
    return [Fault(**row) for file in files for row in tomllib.loads(file.read_text())["fault"]]


def copy_tree(to: Path) -> None:
    """Copy the files of the working tree that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=REPO_ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (REPO_ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO_ROOT / name, to / name)


def tests_fail(tests: str, copy: Path) -> bool:
    """Whether `pytest <tests>` fails in `copy`, in a forked process: most of its time would go to importing torch.

    Raises:
        ValueError: these arguments name no test.
    """
    process = FORK.Process(target=_run_pytest, args=(tests, copy))
    process.start()
    process.join(TIMEOUT)
    process.kill()
    process.join()
    if process.exitcode in (4, 5):  # pytest's codes for wrong arguments and for no tests
        raise ValueError(f"pytest {tests}: {(copy / LOG).read_text()[-2000:]}")
    return process.exitcode != 0


def _run_pytest(tests: str, copy: Path) -> NoReturn:
    """Be a process that begins in `copy`, runs these tests and ends with pytest's exit code."""
    with (copy / LOG).open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.chdir(copy)
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests")]
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.is_relative_to(ROOT) and not file.is_relative_to(sys.prefix) and name != "__main__":
            del sys.modules[name]  # the code as it is, not the copy's
    os.environ["OMP_NUM_THREADS"] = "1"
    code = pytest.main(["-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", *shlex.split(tests)])
    sys.stdout.flush()
    os._exit(code)


def is_caught(fault: Fault, copy: Path) -> bool:
    """Whether the fault's tests fail in `copy`, which is left as it was. Raises ValueError."""
    file = copy / fault.file
    text = file.read_text()
    file.write_text(fault.apply_to(text))
    try:
        return tests_fail(fault.tests, copy)
    finally:
        file.write_text(text)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutate", description=__doc__.splitlines()[0])
    parser.add_argument("stems", nargs="*", help="files of tests/faults, without .toml; all by default")
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="faults tested at a time")
    args = parser.parse_args(argv)
    faults = [fault for fault in read_faults(args.stems) if args.only in fault.name]
    sys.dont_write_bytecode = True
    for library in LIBRARIES:  # once, for every process that is forked
        with suppress(ImportError):
            importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies: Queue[Path] = Queue()
        for job in range(args.jobs):
            copy_tree(Path(folder, str(job)))
            copies.put(Path(folder, str(job)))

        def in_a_copy(judge: Callable[[T, Path], bool], of: T) -> bool:
            copy = copies.get()
            try:
                return judge(of, copy)
            finally:
                copies.put(copy)

        caught: Counter[str] = Counter()
        try:
            all_tests = sorted({fault.tests for fault in faults})
            for tests, failed in zip(all_tests, pool.map(partial(in_a_copy, tests_fail), all_tests), strict=True):
                if failed:
                    raise ValueError(f"pytest {tests} fails without any fault")
            for fault, found in zip(faults, pool.map(partial(in_a_copy, is_caught), faults), strict=True):
                print(f"{'caught' if found else 'MISSED'}  {fault.file}: {fault.name}", flush=True)
                caught[fault.folder] += found
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    counts = Counter(fault.folder for fault in faults)
    rows = [[name, str(caught[name]), str(n), f"{caught[name] / n:.0%}"] for name, n in sorted(counts.items())]
    print(text_table(["folder", "caught", "of", "share"], rows))
    return int(caught.total() < len(faults))


if __name__ == "__main__":
    run_command(main)
