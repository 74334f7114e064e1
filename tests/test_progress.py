"""common/progress.py: a bar in place on any terminal, lines in a file."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

from common import progress
from common.progress import ProgressLines, progress_bar
from runtime import reporter


@pytest.fixture
def terminal(monkeypatch):
    """terminal(columns): make stderr a terminal that wide; returns a function that reads what it shows."""
    opened = []

    def open_terminal(columns):
        main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
        monkeypatch.setattr(sys, "stderr", os.fdopen(side, "w"))
        opened.extend([main, sys.stderr])
        return lambda: read_lines(main)

    yield open_terminal
    for file in opened:
        file.close() if hasattr(file, "close") else os.close(file)


def read_lines(main):
    """What a terminal shows up to the end of a line; it comes in pieces."""
    text = ""
    while not text.endswith("\n"):
        text += os.read(main, 65536).decode()
    return text


def show(bar, steps=3):
    bar.set_postfix_str("loss 2.5", refresh=False)
    for _ in range(steps):
        bar.update()
    bar.close()


@pytest.mark.parametrize("columns", [0, 80])
@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_a_terminal_shows_a_bar_even_if_it_does_not_know_its_width(terminal, monkeypatch, columns, kind):
    monkeypatch.setenv("TERM", kind)
    monkeypatch.delenv("COLUMNS", raising=False)
    read = terminal(columns)
    show(progress_bar(every=10, desc="tiny", total=3, bar_format=reporter.BAR))
    last = read().rstrip().split("\r")[-1]
    assert re.fullmatch(r"tiny: step 3/3 \|█+\| 00:00, 00:00 left, loss 2.5", last)
    assert len(last) == 79  # the bar fills the line; with a longer name it is shorter, and the numbers still show


def test_a_terminal_of_unknown_width_may_be_told_it(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    read = terminal(0)
    show(progress_bar(desc="tiny", total=3, bar_format=reporter.BAR))
    assert len(read().rstrip().split("\r")[-1]) == 23


def test_a_file_gets_lines(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress_bar(every=10, desc="tiny", initial=10, total=100, bar_format=reporter.BAR)
    for step in range(11, 43):
        now[0] += 1
        bar.set_postfix_str(f"loss {step}", refresh=False)
        bar.update()
    bar.write("tiny: val loss 2.0")
    bar.close()
    bar.close()
    found = capsys.readouterr()
    assert found.out == "tiny: val loss 2.0\n"
    assert found.err == (
        "tiny: step 20/100, 00:10, 01:20 left, loss 20\n"
        "tiny: step 30/100, 00:20, 01:10 left, loss 30\n"
        "tiny: step 40/100, 00:30, 01:00 left, loss 40\n"
        "tiny: step 42/100, 00:32, 00:58 left, loss 42\n"
    )


def test_a_file_gets_units_or_nothing(capsys):
    with progress_bar(every=10, desc="books", total=2_000_000, unit="B", unit_scale=True) as bar:
        assert isinstance(bar, ProgressLines)
        bar.update(1_500_000)
    assert re.fullmatch(r"books: 1.50M/2.00MB, 00:00, 00:00 left\n", capsys.readouterr().err)
    assert [*progress_bar(iterable=range(3), desc="rounds")] == [0, 1, 2]  # every: None
    show(progress_bar(desc="scored", total=3, disable=False))
    assert capsys.readouterr().err == ""
