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
from functools import lru_cache
from pathlib import Path

from common.command import build_parser, command, require_packages, run_command
from common.text import first_line, text_table
from runtime.metrics import list_arrays
from scripts.report.runs import Run, find_runs, load_run
from scripts.watch.status import Status, build_table, last_modified, read_status

CLEAR = "\x1b[H\x1b[J"


@lru_cache(maxsize=1000)
def load_cached(folder: Path, modified: float) -> Run:
    """`load_run`, again when `modified`, the time of the newest file, is another."""
    return load_run(folder)


def read_runs(places: Sequence[Path]) -> tuple[list[Status], list[str]]:
    """The status of every run at these places now, and a line for each folder that cannot be read."""
    statuses, errors = [], []
    for folder in find_runs(places):
        metrics = folder / "metrics.jsonl"
        try:
            run = load_cached(folder, last_modified(folder / "config.toml", metrics, *list_arrays(metrics)))
            statuses.append(read_status(run))
        except (OSError, ValueError) as error:
            errors.append(f"left out: {folder}: {first_line(error)}")
    return statuses, errors


def format_table(places: Sequence[Path]) -> str:
    """All runs, and the folders that cannot be read."""
    statuses, errors = read_runs(places)
    none = f"no runs in {', '.join(map(str, places))} yet"
    return "\n".join([text_table(*build_table(statuses), left=2) if statuses else none, *errors])


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
        remedy = "name folders of runs or one above them, such as runs; train.py makes a run's when it starts"
        raise ValueError(f"{', '.join(missing)}: no such folder; {remedy}")
    if args.every <= 0:
        raise ValueError(f"--every {args.every:g}: expected a number of seconds above 0")
    places = args.runs or [Path("runs")]  # which the first run will make
    try:
        if args.serve is not None:
            return serve(places, args.serve)
        once = args.once or not sys.stdout.isatty()
        while True:
            print(("" if once else CLEAR) + format_table(places), flush=True)
            if once:
                return
            time.sleep(args.every)
    except KeyboardInterrupt:  # the way to end it, so no "interrupted"
        return


def serve(places: Sequence[Path], port: int) -> None:
    """Serve the page until Ctrl-C. Raises ValueError if the port cannot be used."""
    require_packages("matplotlib", "scipy")
    from scripts.watch.server import make_server

    try:
        server = make_server(port, lambda: read_runs(places)[0])
    except (OSError, OverflowError) as error:
        raise ValueError(f"port {port}: {error}; name another, such as --serve 6061") from None
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()


if __name__ == "__main__":
    run_command(main)
