"""Progress on stderr: a bar on a terminal, lines in a file."""

import os
import re
import shutil
import sys
from typing import Any

from tqdm import tqdm

# between the parts of a format: a comma, or a space before or after the bar
SEPARATOR = re.compile(r"(, | (?=\|)|(?<=\|) )")
FORMAT = "{desc}: {n_fmt}/{total_fmt}{unit} |{bar}| {elapsed}, {remaining} left"


def progress_bar(every: float | None = None, **options: Any) -> Any:
    """A tqdm bar with `options` on a terminal; lines if stderr is a file or a pipe.

    The lines are at least `every` seconds apart; without `every` there are none.
    """
    if sys.stderr.isatty():
        if 0 in os.get_terminal_size(sys.stderr.fileno()):
            # tqdm shows nothing on a terminal that does not know its width: use $COLUMNS, or 80.
            size = shutil.get_terminal_size()
            options["ncols"] = size.columns - 1
            options["nrows"] = size.lines
        return FittedBar(mininterval=0.3, **options)
    if every is None:
        options["disable"] = True
        return tqdm(**options)
    return ProgressLines(every, **options)


class FittedBar(tqdm):
    """A tqdm bar whose line fits the terminal: the last parts of its format are left out.

    So a format has its parts in the order of their importance. The bar is such a part, of at least
    10 columns.
    """

    @staticmethod
    def format_meter(  # pyrefly: ignore[bad-override] (tqdm calls it by names alone)
        n: float,
        total: float,
        elapsed: float,
        ncols: int | None = None,
        bar_format: str | None = None,
        **options: Any,
    ) -> str:
        if ncols and bar_format:
            pieces = SEPARATOR.split(bar_format)  # every second one is a separator
            while len(pieces) > 1:
                bar_format = "".join(pieces)
                line = tqdm.format_meter(n, total, elapsed, bar_format=bar_format, **options)
                if len(line) <= ncols:
                    break
                del pieces[-2:]
            bar_format = "".join(pieces)
        return tqdm.format_meter(n, total, elapsed, ncols, bar_format=bar_format, **options)


class ProgressLines(tqdm):
    """A tqdm bar for a file: lines without the bar, one every few seconds and one at the end.

    tqdm itself would write carriage returns into the file.
    """

    monitor_interval = 0  # no thread that shows lines earlier

    def __init__(self, every: float, bar_format: str = FORMAT, **options: Any) -> None:
        options |= {"mininterval": every, "delay": every, "miniters": 1, "smoothing": 0}
        super().__init__(bar_format=bar_format, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Print a line."""
        self.bar_format = re.sub(r" \|\{bar.*?\}\|", ",", self.bar_format)
        print(self, file=sys.stderr, flush=True)

    def write(self, line: str) -> None:  # pyrefly: ignore[bad-override] (tqdm's prints bars again)
        print(line, flush=True)

    def close(self) -> None:
        """Print the final count, unless the last line has it."""
        if not self.disable and self.n != self.last_print_n:
            self.display()
        self.disable = True
        # out of tqdm's list of open bars
        self._decr_instances(self)  # pyrefly: ignore[missing-attribute] (its stub lacks it)
