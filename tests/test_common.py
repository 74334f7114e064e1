"""common/: how commands end, files written in full or not at all, tables, progress on a terminal
and in a file.
"""

import errno
import os
import pty
import re
import runpy
import shlex
import subprocess
import sys
import termios
import threading
from functools import partial
from pathlib import Path

import pytest
from fake_runs import make_seeds
from pydantic import BaseModel
from runs import REPO_ROOT
from tqdm import TMonitor

from common import NEEDED, find_python_problem
from common.command import build_parser, command, require_packages, run_command
from common.files import (
    DamagedFile,
    exists,
    is_file,
    is_folder,
    list_matching,
    read_json,
    rename,
    write_atomic,
)
from common.progress import progress_bar
from common.text import (
    escape_controls,
    first_line,
    format_bytes,
    markdown_table,
    plural,
    text_table,
)
from report.__main__ import main as report_main
from runtime.reporter import format_bar

# ---- commands
COMMANDS = []
for folder in ("data", "eval", "scripts", "tools"):
    for path in sorted((REPO_ROOT / folder).glob("*.py")):
        if "__main__" in path.read_text():
            COMMANDS.append(path.relative_to(REPO_ROOT))


def raising(error):
    def main(*_):
        raise error

    return main


FULL = errno.ENOSPC
REPORTED = [  # error, what a command says of it
    (ValueError("two words"), "two words"),
    (OSError(FULL, "No space left"), f"[Errno {FULL}] No space left"),
    (FileExistsError(17, "", "/x"), "/x: a file is where a folder is needed"),
    (NotADirectoryError(20, "", "/x"), "/x: a file is where a folder is needed"),
    (FileNotFoundError(2, "No such file", "/a", None, "/x"), "/x: No such file"),
    (OSError(FULL, "No space left on device", "/x"), "/x: No space left on device"),
    (ModuleNotFoundError(name="no_such.part"), "no_such not installed: pip install -r "),
]


@pytest.mark.parametrize("error, said", REPORTED)
def test_an_error_of_a_command_is_one_line_and_exit_code_2(error, said, call, monkeypatch, capsys):
    (line,) = call(command(raising(error)), code=2).splitlines()
    assert line.startswith(f"error: {said}")
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first process of a node says it
    if not isinstance(error, ImportError):
        assert command(raising(error))([]) == 2 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [
    TypeError(), BrokenPipeError(), KeyboardInterrupt(), ModuleNotFoundError(name="common.no_such")
])  # fmt: skip
def test_a_bug_or_an_end_passes_through_a_command(error):
    with pytest.raises(type(error)):
        command(raising(error))([])


def test_a_command_returns_its_code_and_shows_its_docstring_as_it_is(capsys):
    assert command(lambda argv: None)([]) == 0 and command(lambda argv: 3)([]) == 3
    described = build_parser("scripts.some", "Does it.\n\n    two   columns\n")
    usage = "usage: python -m scripts.some [-h]\n\nDoes it.\n\n    two   columns\n"
    assert described.format_help().startswith(usage)
    with pytest.raises(SystemExit) as end:
        described.parse_args(["--no-such"])
    error = "error: unrecognized arguments: --no-such; python -m scripts.some --help has all "
    assert (end.value.code, capsys.readouterr().err) == (2, f"{error}arguments\n")
    require_packages("torch")
    said = r"^no_such_one not installed: pip install -r requirements/report\.txt$"
    with pytest.raises(ValueError, match=said):
        require_packages("torch", "no_such_one")


@pytest.mark.parametrize(
    "error, code, said",
    [(KeyboardInterrupt(), 130, "interrupted\n"), (SystemExit(4), 4, ""), (None, 0, "")],
)
def test_a_process_ends_with_the_code_of_its_command(error, code, said, capsys):
    with pytest.raises(SystemExit) as end:
        run_command(lambda: raising(error)([]) if error else 0)
    assert end.value.code == code and capsys.readouterr().err == said


@pytest.mark.parametrize("file", COMMANDS)
def test_a_command_started_as_a_file_names_its_module(file):
    module = str(file.with_suffix("")).replace("/", ".")
    with pytest.raises(SystemExit, match=f"error: start .* as python -m {module}"):
        runpy.run_path(str(REPO_ROOT / file), run_name="__main__")


def test_a_python_that_cannot_run_the_commands_is_named(monkeypatch):
    """-S leaves out installed packages."""
    for words in (["-m", "scripts.plan"], ["-m", "data.prepare"], ["train.py"]):
        done = subprocess.run(
            [sys.executable, "-S", *words], cwd=REPO_ROOT, capture_output=True, text=True
        )
        said = f"error: {', '.join(NEEDED)} not installed for {sys.executable}: source "
        assert done.returncode == 2 and done.stderr.startswith(said)
        assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert find_python_problem() == ""
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    assert " is too old, nanoKERN needs 3.11 or later" in find_python_problem()


PRINTING = "import sys; from common.command import run_command; run_command(lambda: {})"


@pytest.mark.parametrize(
    "code, unbuffered",
    [
        (["-c", PRINTING.format("print('word\\n' * 100_000)")], ""),  # more than a pipe holds
        (["-c", PRINTING.format("(print('word'), sys.exit(3))")], ""),  # fails when it is flushed
        (["-m", "data.prepare", "--list"], "1"),  # where OSErrors are reported
    ],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(code, unbuffered):
    pipeline = f"(sleep 0.3; {shlex.join([sys.executable, *code])}; echo $? >&2) | true"
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        pipeline, shell=True, cwd=REPO_ROOT, env=env, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("", "141\n")


# ---- files
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, disk_calls):
    file = tmp_path / "file"
    write_atomic(file, "ä", durable=True)
    assert file.read_bytes() == "ä".encode()
    assert disk_calls == ["sync file.tmp", "rename file", f"sync {tmp_path.name}"]
    del disk_calls[:]
    write_atomic(file, b"old")
    assert disk_calls == ["rename file"]
    plain = tmp_path / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode
    plain.unlink()
    for module, name in ((os, "replace"), (Path, "open")):  # at the end, and at the start
        with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output") as caught:
            patch.setattr(module, name, raising(OSError(errno.EIO, "Input/output error")))
            write_atomic(file, "new")
        assert caught.value.filename == str(file)
    assert os.listdir(tmp_path) == ["file"] and file.read_text() == "old"


def test_a_rename_that_is_reported_as_failed_after_it_succeeded(tmp_path, monkeypatch):
    """As NFS does; one that has failed is an error."""
    replace = os.replace

    def report_failure(old, new):
        if new.name == "file":
            replace(old, new)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))

    failing = tmp_path / "failing"
    failing.write_text("old")
    monkeypatch.setattr(os, "replace", report_failure)
    write_atomic(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    for rename_one in (
        lambda: write_atomic(failing, "new"),
        lambda: rename(tmp_path / "gone", tmp_path / "not there"),
    ):
        with pytest.raises(FileNotFoundError):
            rename_one()
    assert sorted(os.listdir(tmp_path)) == ["failing", "file"] and failing.read_text() == "old"


class Point(BaseModel, strict=True, extra="forbid"):
    step: int
    losses: tuple[float, ...] = ()


@pytest.mark.parametrize(
    "content, error",
    [
        (b'{"step": 1, "losses": [1.5, 2]}', ""),
        (b"", "damaged, not JSON: EOF while parsing a value at line 1"),
        (b'{"step": "\xff"}', "damaged, not JSON: invalid unicode"),
        (b"[" * 100_000, "damaged, not JSON: recursion limit"),
        (b'{"step": "1"}', "step = '1': should be a valid integer"),
        (b'{"step": true}', "step = True: should be a valid integer"),
        (b'{"step": 1, "losses": [2, "x"]}', "losses.1 = 'x': should be a valid number"),
        (b"{}", "step is missing"),
        (b'{"step": 1, "more": 2}', "more = 2: Extra inputs are not permitted"),
        (b"[1]", "the content = [1]: should be an object"),
    ],
)
def test_json_is_read_as_its_model_says(tmp_path, content, error):
    file = tmp_path / "point.json"
    file.write_bytes(content)
    if not error:
        assert read_json(file, Point) == Point(step=1, losses=(1.5, 2.0))
        return
    with pytest.raises(DamagedFile, match="^" + re.escape(f"{file}: {error}")):
        read_json(file, Point)


def test_a_file_that_cannot_be_read_is_not_damaged(tmp_path):
    for path, fault in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError, match=f"{fault}.*{re.escape(str(path))}"):
            read_json(path, Point)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe, socket or device"):
        read_json(tmp_path / "pipe", Point)


FOUND = {  # whether it exists, is a file, is a folder
    "file": (True, True, False),
    "link": (True, True, False),
    ".": (True, False, True),
    "none": (False, False, False),
    "file/none": (False, False, False),
    "loop": (False, False, False),
    "nu\0l": (False, False, False),
}


def test_what_nobody_can_look_at_is_not_missing(tmp_path, monkeypatch):
    """For lack of rights, or while a network's disk fails: Path.exists of Python 3.14 says no,
    and Path.glob of 3.13 finds nothing.
    """
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    looks = exists, is_file, is_folder
    for name, found in FOUND.items():
        assert tuple(look(tmp_path / name) for look in looks) == found, name
    for number in (errno.EACCES, errno.EIO, errno.ESTALE):
        for look in looks:
            with monkeypatch.context() as patch, pytest.raises(OSError, match=f"{number}"):
                patch.setattr(os, "stat", raising(OSError(number, "")))
                look(tmp_path)
    assert list_matching(tmp_path / "none", "*") == list_matching(tmp_path / "file", "*") == []
    assert list_matching(tmp_path, "[fl]*") == sorted(tmp_path.glob("[fl]*"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"{errno.EIO}"):
        patch.setattr(os, "listdir", raising(OSError(errno.EIO, "")))
        list_matching(tmp_path, "*")
    command = ["git", "grep", "-E", r"\.(exists|is_file|is_dir)\(\)", "--", "*.py", ":!tests"]
    assert subprocess.run(command, cwd=REPO_ROOT).returncode == 1  # no line; 128: git failed


# ---- text
def run_in_terminal(action, columns):
    """What a fork of this process prints in a terminal of so many columns."""
    child, terminal = pty.fork()
    if child == 0:
        code = 1
        try:
            termios.tcsetwinsize(1, (24, columns))
            # it would override the terminal
            os.environ.pop("COLUMNS", None)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            action()
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0) == (child, 0)
    printed = os.read(terminal, 10_000).decode()
    os.close(terminal)
    return printed


@pytest.mark.parametrize(
    "columns, head, left_out",
    [
        (1, "run", "tokens per second; loss; note"),
        (10, "run  loss", "tokens per second; note"),
        (15, "run  loss  note", "tokens per second"),
        (33, "run  tokens per second  loss", "note"),
        (34, "run  tokens per second  loss  note", ""),
    ],
)
def test_a_table_has_the_columns_that_fit_the_terminal(columns, head, left_out):

    def show_table():
        all_columns = ["run", "tokens per second", "loss", "note"]
        print(text_table(all_columns, [["a", "20", "1.5", "x"]], important=["run", "loss"]))

    shown, rule, _, *last = run_in_terminal(show_table, columns).splitlines()
    assert (shown, rule) == (head, "-" * len(head))
    assert last == ([f"no room for {left_out}: add | cat to see all"] if left_out else [])


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_tables_of_a_report_keep_what_matters_most(tmp_path, call, monkeypatch, columns):
    """Each fits, and has names, states, last losses and differences; a pipe gets all columns."""
    make_seeds(tmp_path / "a", {"kern": 2.0, "tanh": 2.1, "softmax": 2.2}, noise=0.003)
    monkeypatch.chdir(tmp_path)
    report = partial(call, report_main, "a", "--out", "report")
    assert "no room for" not in report()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = report()
    for kept in ("variant .* minus .* is .* difference, 95%", "loss at step.* 1,000$"):
        (line,) = re.findall(f"{kept}.*", printed, re.M)
        assert len(line) <= columns
    assert "no room for" in printed


def test_tables_align_numbers_to_the_right_and_escape_html():
    table = text_table(["run", "loss"], [["long name", "1"], ["b", "10.25"]])
    assert table == f"run         loss\n{'-' * 16}\nlong name      1\nb          10.25"
    table = text_table(["run", "of"], [["a", "xy"], ["b", "z"]], left=2)
    assert table == "run  of\n-------\na    xy\nb    z"
    table = markdown_table(["a", "b"], [["<x>|&", "1"]])
    assert table == "| a | b |\n| --- | --: |\n| &lt;x>\\|&amp; | 1 |"
    counts = [plural(count, "file") for count in (0, 1, 2000)]
    assert counts == ["0 files", "1 file", "2,000 files"]
    sizes = [0, 40_800, 2**19 - 1, 2**19, 1_120_000, 2**29 - 1, 2**29, 10**9, 2**40]
    shown = (
        "0.0 KiB, 39.8 KiB, 512.0 KiB, 0.5 MiB, 1.1 MiB, 512.0 MiB, 0.5 GiB, 0.9 GiB, 1024.0 GiB"
    )
    assert [format_bytes(size) for size in sizes] == shown.split(", ")
    assert escape_controls("é\tb\n\x1b[2J\r\x9b", "\t\n") == "é\tb\n\\x1b[2J\\r\\x9b"
    errors = ValueError("one\ntwo"), ValueError("\n  one\ntwo\n"), KeyError()
    assert [first_line(error) for error in errors] == ["one", "one", "KeyError"]


# ---- progress
LOSS = r"step 250/1000, loss 2\.3457"
SPEED = rf"{LOSS}, 0[23]:\d\d left, 123,457 tokens/s"
LONG = rf"{SPEED}, 0[01]:\d\d"
NAME = "quickstart-kern-warmup_steps200"


@pytest.mark.parametrize(
    "columns, shown",
    [
        (0, rf"{LONG}, {NAME[:14]}"),  # one that does not know it: 80
        (27, LOSS),
        (60, rf"{SPEED}, 0"),
        (80, rf"{LONG}, {NAME[:14]}"),
        (120, rf"{LONG}, {NAME} \|#+\d? +\|"),
    ],
)
def test_a_narrow_terminal_keeps_what_matters_most(columns, shown):
    """In a pseudo-terminal the line is no wider than its columns: its end is cut."""

    def show_bar():
        bar = progress_bar(every=10, desc="-", total=1000, smoothing=0, ascii=True)
        bar.start_t -= 50
        bar.bar_format = format_bar(NAME, 2.34567, 123456.7)
        bar.update(250)
        bar.refresh()

    printed = run_in_terminal(show_bar, columns)
    line = printed.rstrip().split("\r")[-1].rstrip()
    assert len(line) <= (columns or 79) and re.fullmatch(shown, line)


def test_a_file_gets_lines(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    threads = threading.enumerate()  # another test's bar may have left a TMonitor
    with progress_bar(every=10, desc="tiny", unit=" steps", initial=10, total=100) as bar:
        for _ in range(11):
            now[0] += 1
            bar.update()
        bar.write("tiny: val loss 2.0")
    bar.close()
    with progress_bar(every=10, desc="whole", total=1) as bar:
        now[0] += 10
        bar.update()
    new_threads = set(threading.enumerate()) - set(threads)
    assert not any(isinstance(thread, TMonitor) for thread in new_threads)
    printed = capsys.readouterr()
    assert printed.out == "tiny: val loss 2.0\n"
    assert printed.err.splitlines() == [
        "tiny: 20/100 steps, 00:10, 01:20 left",
        "tiny: 21/100 steps, 00:11, 01:19 left",
        "whole: 1/1it, 00:10, 00:00 left",
    ]
