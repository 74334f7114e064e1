"""Watch runs without wandb: a table in the terminal, or a page on this machine that reloads by itself.

    python -m scripts.watch                      every run below runs/, every 5 seconds until Ctrl-C
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --serve              their report as a page at http://127.0.0.1:6060
    python -m scripts.watch --once               the table once, as it is when its output is not a terminal

Reads the runs' files and writes nothing, so it can be started and stopped at any time. From another computer:
ssh -L 6060:127.0.0.1:6060 HOST, then open the page there.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.command import build_parser, command, require_packages, run_command
from common.text import first_line, text_table
from runtime.metrics import list_arrays
from scripts.report.runs import Run, find_runs, load_run
from scripts.watch.status import HEAD, Status, last_modified, read_status

CLEAR = "\x1b[H\x1b[J"


class Watcher:
    """The runs at some places, those that begin later too. A run is read again when its files change."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = places
        self.runs: dict[Path, tuple[float, Run]] = {}  # folder: when its files were written, what they hold
        self.errors: dict[Path, str] = {}  # folders that cannot be read

    def read(self) -> list[Status]:
        """Every run's status now."""
        folders = find_runs(self.places)
        self.runs = {folder: entry for folder, entry in self.runs.items() if folder in folders}
        self.errors = {}
        for folder in folders:
            metrics = folder / "metrics.jsonl"
            changed = last_modified(folder / "config.toml", metrics, *list_arrays(metrics))
            if folder in self.runs and self.runs[folder][0] == changed:
                continue
            try:
                self.runs[folder] = (changed, load_run(folder))
            except (OSError, ValueError) as error:
                self.runs.pop(folder, None)
                self.errors[folder] = first_line(error)
        return [read_status(run) for _, run in (self.runs[folder] for folder in folders if folder in self.runs)]


def format_table(watcher: Watcher) -> str:
    """All runs, without the columns that are empty for every one, and the folders that cannot be read."""
    rows = [status.as_row() for status in watcher.read()]
    used = [i for i in range(len(HEAD)) if any(row[i] for row in rows)]
    lines = [f"left out: {folder}: {error}" for folder, error in watcher.errors.items()]
    if not rows:
        return "\n".join([f"no runs in {', '.join(map(str, watcher.places))} yet", *lines])
    return "\n".join([text_table([HEAD[i] for i in used], [[row[i] for i in used] for row in rows], left=2), *lines])


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table again and again, or serve the page."""
    parser = build_parser("scripts.watch", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs, or above them (default: runs)")
    parser.add_argument("--serve", nargs="?", type=int, const=6060, metavar="PORT", help="a page, at 6060 by default")
    parser.add_argument("--every", type=float, default=5, metavar="SECONDS", help="between two tables (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print the table once")
    args = parser.parse_args(argv)
    if missing := [str(place) for place in args.runs if not place.is_dir()]:
        raise ValueError(f"{', '.join(missing)}: no such folder")
    if args.every <= 0:
        raise ValueError(f"--every {args.every:g}: expected a number of seconds above 0")
    watcher = Watcher(args.runs or [Path("runs")])  # which the first run will make
    try:
        if args.serve is not None:
            return serve(watcher, args.serve)
        show(watcher, args.every, args.once)
    except KeyboardInterrupt:  # the way to end it, so no "interrupted"
        return


def show(watcher: Watcher, every: float, once: bool) -> None:
    """Print the table, again and again on a terminal."""
    once = once or not sys.stdout.isatty()
    while True:
        table = format_table(watcher)
        print(table if once else CLEAR + table, flush=True)
        if once:
            return
        time.sleep(every)


def serve(watcher: Watcher, port: int) -> None:
    """Serve the page until Ctrl-C. Raises ValueError if the port cannot be used."""
    require_packages("matplotlib", "scipy")
    from scripts.watch.server import LivePage, make_server

    other = 6061 if port != 6061 else 6062
    if not 0 <= port <= 65535:
        raise ValueError(f"--serve {port}: expected a port from 1 to 65535, such as {other}")
    try:
        server = make_server(port, LivePage(watcher.read).render)
    except OSError as error:
        raise ValueError(f"port {port}: {error.strerror}; name another: --serve {other}") from None
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()


if __name__ == "__main__":
    run_command(main)
