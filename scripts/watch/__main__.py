"""Watch runs without wandb: a table in the terminal, or a page on this machine that refreshes by itself.

    python -m scripts.watch                      every run below runs/, every 5 seconds until Ctrl-C
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --serve              a page at http://127.0.0.1:6060
    python -m scripts.watch --once               the table once, as it is when its output is not a terminal

Reads the runs' files and writes nothing, so it can be started and stopped at any time. From another computer:
ssh -L 6060:127.0.0.1:6060 HOST, then open the page there.
"""

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.command import run_command
from common.text import text_table
from scripts.watch.runs import Status, WatchedRun, find_runs, format_seconds

HEAD = ["run", "state", "step", "loss", "val loss", "by set", "tokens/s", "MFU", "left", "trouble"]
CLEAR = "\x1b[H\x1b[J"


class Watcher:
    """The runs at some places, those that begin later too."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = places
        self.runs: dict[Path, WatchedRun] = {}
        self.lock = threading.Lock()  # the page's server has a thread per request

    def refresh(self) -> list[WatchedRun]:
        """Every run, up to date. A folder that cannot be read is left out."""
        with self.lock:
            found = find_runs(self.places)
            self.runs = {folder: run for folder, run in self.runs.items() if folder in found}
            for folder in found:
                try:
                    if folder not in self.runs:
                        self.runs[folder] = WatchedRun(folder)
                    self.runs[folder].refresh()
                except (OSError, ValueError, KeyError):
                    self.runs.pop(folder, None)
            return [self.runs[folder] for folder in found if folder in self.runs]

    def as_json(self) -> list[dict[str, Any]]:
        """What the page shows."""
        return [run.as_json() for run in self.refresh()]


def format_status(status: Status) -> list[str]:
    """One row of the table."""

    def show(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    share = f"{status.step / status.max_steps:.0%}"
    return [
        status.name,
        status.state,
        f"{status.step:,} of {status.max_steps:,} {share:>4}",
        show(status.loss, ".4f"),
        show(status.val_loss, ".4f"),
        status.by_set,
        show(status.tokens_per_sec, ",.0f"),
        show(status.mfu, ".1%"),
        "" if status.seconds_left is None else format_seconds(status.seconds_left),
        status.trouble,
    ]


def format_table(runs: Sequence[WatchedRun]) -> str:
    """All runs, without the columns that are empty for every one."""
    rows = [format_status(run.status()) for run in runs]
    used = [i for i in range(len(HEAD)) if any(row[i] for row in rows)]
    return text_table([HEAD[i] for i in used], [[row[i] for i in used] for row in rows], left=2)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs, or above them (default: runs)")
    parser.add_argument("--serve", nargs="?", type=int, const=6060, metavar="PORT", help="a page, at 6060 by default")
    parser.add_argument("--every", type=float, default=5, metavar="SECONDS", help="between two tables (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print the table once")
    args = parser.parse_args(argv)
    if missing := [str(place) for place in args.runs if not place.is_dir()]:
        print(f"error: {', '.join(missing)}: no such folder", file=sys.stderr)
        return 2
    if args.every <= 0:
        print(f"error: --every {args.every:g}: expected a number of seconds above 0", file=sys.stderr)
        return 2
    watcher = Watcher(args.runs or [Path("runs")])  # which the first run will make
    try:
        return serve(watcher, args.serve) if args.serve is not None else show(watcher, args.every, args.once)
    except KeyboardInterrupt:
        return 0


def show(watcher: Watcher, every: float, once: bool) -> int:
    """Print the table, again and again on a terminal."""
    once = once or not sys.stdout.isatty()
    while True:
        runs = watcher.refresh()
        table = format_table(runs) if runs else f"no runs in {', '.join(map(str, watcher.places))} yet"
        print(table if once else CLEAR + table, flush=True)
        if once:
            return 0
        time.sleep(every)


def serve(watcher: Watcher, port: int) -> int:
    """Serve the page until Ctrl-C."""
    from scripts.watch.server import make_server

    try:
        server = make_server(port, watcher.as_json)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "expected 1 to 65535"
        print(f"error: port {port}: {reason}; name another: --serve {6061 if port != 6061 else 6062}", file=sys.stderr)
        return 2
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()
    return 0


if __name__ == "__main__":
    run_command(main)
