"""Watch runs in the terminal: a table of their states, losses and speeds.

    python -m scripts.watch                      every run below runs/
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --every 30           again every 30 seconds, until Ctrl-C

Reads the runs' files and writes nothing, so it can be started and stopped at any time. A run is
running while a process holds its lock, and unknown if that cannot be seen from this computer. For
a page with curves: python -m scripts.report runs --follow
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m scripts.watch")

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.command import build_parser, command, run_command
from report.overview import build_overview
from runtime.runs import find_runs, read_runs

CLEAR = "\033[H\033[2J"  # moves a terminal's cursor to its first line and clears the screen


def read_places(places: Sequence[Path]) -> str:
    """Read all runs at these places and below: their table, and the folders that are left out."""
    text = f"no runs in {', '.join(map(str, places))} yet"
    if not find_runs(places):
        return text
    runs, left_out = read_runs(places)
    if runs:
        text = build_overview(runs).to_text(left=2)
    return "\n".join([text, *left_out])


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, with --every again and again until Ctrl-C."""
    parser = build_parser("scripts.watch", __doc__)
    parser.add_argument(
        "runs", nargs="*", type=Path, help="folders of runs, or above them (default: runs)"
    )
    parser.add_argument("--every", type=float, metavar="SECONDS", help="print the table again")
    parser.add_argument("--serve", nargs="?", const="6060", help="has left, see scripts.report")
    args = parser.parse_args(argv)
    places = args.runs or [Path("runs")]  # which the first run will make
    if args.serve is not None:
        names = " ".join(map(str, places))
        raise ValueError(
            f"--serve has left: python -m scripts.report {names} --follow writes one page again "
            "and again; open it in a browser, on a remote machine by python -m http.server"
        )
    if args.every is not None and not 1 <= args.every <= 86400:
        raise ValueError(f"--every {args.every:g}: expected 1 to 86400 seconds")
    missing = [str(place) for place in args.runs if not os.path.lexists(place)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: no such folder; "
            "name folders of runs, or leave them out for all of runs/"
        )
    while True:
        text = read_places(places)
        if args.every is not None and sys.stdout.isatty():
            text = CLEAR + text
        print(text, flush=True)
        if args.every is None:
            return
        time.sleep(args.every)


if __name__ == "__main__":
    run_command(main)
