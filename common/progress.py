"""Progress on stderr: a bar on a terminal, lines in a file."""

import os
import sys
from typing import Any

from tqdm import tqdm

FORMAT = "{desc}: {n_fmt}/{total_fmt}{unit}, {elapsed}, {remaining} left |{bar}|"


def progress_bar(every: float | None = None, **options: Any) -> Any:
    """A tqdm bar with `options` on a terminal; lines if stderr is a file or a pipe.

    tqdm cuts a line that is too long for the terminal at its end. The lines of a file are at least
    `every` seconds apart; without `every` there are none.
    """
    if sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0: it does not know
        return tqdm(ncols=columns - 1, mininterval=0.3, **options)
    if every is None:
        options["disable"] = True
        return tqdm(**options)
    return ProgressLines(every, **options)


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
        self.bar_format = self.bar_format.removesuffix(" |{bar}|")
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
