"""Progress bars on stderr: in place on a terminal, lines in a file."""

import os
import re
import shutil
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

FORMAT = "{desc}: {n_fmt}/{total_fmt}{unit} |{bar}| {elapsed}, {remaining} left{postfix}"


def progress_bar(every: float | None = None, **options: Any) -> Any:
    """A bar with tqdm's `options` on a terminal, also on one that does not know its width, where tqdm shows nothing.

    Where stderr is a file or a pipe, ProgressLines, at least `every` seconds apart; by default
    nothing is shown there.
    """
    if sys.stderr.isatty():
        if 0 in os.get_terminal_size(sys.stderr.fileno()):
            columns, options["nrows"] = shutil.get_terminal_size()  # as $COLUMNS says, or 80
            options["ncols"] = columns - 1
        return tqdm(mininterval=0.3, **options)
    return tqdm(**options | {"disable": True}) if every is None else ProgressLines(every, **options)


class ProgressLines(AbstractContextManager["ProgressLines"]):
    """What is used of a tqdm bar, for a file: a line every so many seconds and at the end, without the bar itself."""

    def __init__(
        self, every: float, desc: str, total: int, initial: int = 0, **options: Any
    ) -> None:
        """`bar_format`, `unit` and `unit_scale` among tqdm's `options` have a meaning here."""
        layout = re.sub(r" \|\{bar.*?\}\|", ",", options.pop("bar_format", FORMAT))
        self.options = options | {
            "prefix": desc,
            "total": total,
            "initial": initial,
            "bar_format": layout,
        }
        self.every, self.n, self.shown = every, initial, initial
        self.started = self.shown_at = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        """Count `n` more, and show it if the last line is old enough."""
        self.n += n
        if time.monotonic() >= self.shown_at + self.every:
            self._show()

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        self.options["postfix"] = text

    def write(self, line: str) -> None:
        print(line, flush=True)

    def close(self) -> None:
        """Show the end, unless it was the last line."""
        if self.n != self.shown:
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        print(
            tqdm.format_meter(self.n, elapsed=now - self.started, **self.options),
            file=sys.stderr,
            flush=True,
        )
        self.shown, self.shown_at = self.n, now
