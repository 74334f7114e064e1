"""Watch runs without wandb: a table in the terminal, or a page that reloads by itself.

    python -m scripts.watch                      every run below runs/
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --serve              their report as a page at http://127.0.0.1:6060

Reads the runs' files and writes nothing, so it can be started and stopped at any time. A run is
running while a process holds its lock, and unknown if that cannot be seen from this computer.
From another computer: ssh -L 6060:127.0.0.1:6060 HOST, then open the page there.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from common.command import build_parser, command, require_packages, run_command
from common.text import escape_controls
from report.blocks import Block, Bullets, Paragraph, Table
from report.runs import Reading, Run, find_runs, read_runs

if TYPE_CHECKING:
    from report.groups import Group

VALUES = {  # column: (name in metrics.jsonl, format)
    "train loss": ("train/loss", ".4f"),
    "val loss": ("val/loss", ".4f"),
    "tokens/s": ("perf/tokens_per_sec", ",.0f"),
    "MFU": ("perf/mfu", ".1%"),
}
COLUMNS = ("run", "state", "step", *VALUES, "left", "trouble")
MAX_THREADS = 24  # of the page's server; not measured
IDLE_SECONDS = 10  # until a silent connection to the page ends; not measured


def describe_run(run: Run) -> dict[str, str]:
    """COLUMNS of a run; those that are unknown are empty.

    The time left is at the median speed of the last lines.
    """
    state, step, trouble = run.status
    row = {
        "run": str(run.folder),
        "state": state,
        "step": f"{step:,} of {run.max_steps:,} {step / run.max_steps:>4.0%}",
    }
    for column, (name, form) in VALUES.items():
        row[column] = f"{run.newest[name]:{form}}" if name in run.newest else ""
    row["left"] = estimate_time_left(run, step) if state == "running" else ""
    row["trouble"] = trouble
    return {column: escape_controls(text) for column, text in row.items()}


def estimate_time_left(run: Run, step: int) -> str:
    """The time from `step` to the end at the median speed of the last five lines; "" if unknown."""
    speeds = list(run.series("perf/tokens_per_sec").values())[-5:]
    if not speeds or median(speeds) <= 0:
        return ""
    tokens_per_step = run.config.train.batch_size * run.config.model.block_size
    seconds = (run.max_steps - step) * tokens_per_step / median(speeds)
    try:
        return str(timedelta(seconds=round(seconds)))
    except (OverflowError, ValueError):  # of a speed close to 0, or NaN
        return ""


def describe_runs(runs: Sequence[Run]) -> list[dict[str, str]]:
    """COLUMNS of each run."""
    return [describe_run(run) for run in runs]


def build_table(rows: Sequence[dict[str, str]]) -> Table:
    """The table of the runs, without the columns that are empty for every run."""
    table = Table(list(COLUMNS), list(rows))
    table.drop_empty(COLUMNS)
    return table


def read_places(places: Sequence[Path]) -> Reading:
    """Read the runs at these places and below; nothing if there is no run yet."""
    return read_runs(places) if find_runs(places) else Reading([], [])


def format_table(places: Sequence[Path]) -> str:
    """The table of all runs, and the folders that cannot be read."""
    reading = read_places(places)
    text = f"no runs in {', '.join(map(str, places))} yet"
    if reading.runs:
        text = build_table(describe_runs(reading.runs)).to_text(left=2)
    return "\n".join([text, *reading.left_out])


def build_page(reading: Reading) -> bytes:
    """The runs' table, and below it the report of evaluated runs, as one HTML file.

    The page reloads itself.
    """
    before: list[Block] = [Paragraph("No runs yet.")]
    if reading.runs:
        before = [build_table(describe_runs(reading.runs))]
    if reading.left_out:
        before.append(Bullets(reading.left_out))
    from report.groups import group_runs  # imports torch

    try:
        html = format_report(*group_runs(reading.runs), before)
    except Exception as error:  # whatever is wrong in one run, the table is shown
        reason = str(error) or type(error).__name__
        html = format_report([], [f"no report: {reason}"], before)
    every_10_seconds = '<meta http-equiv="refresh" content="10">'
    return html.replace("<head>", f"<head>\n{every_10_seconds}", 1).encode()


def format_report(groups: list["Group"], notes: list[str], before: Sequence[Block]) -> str:
    """The report of groups of runs as HTML, with `before` above it."""
    from report.page import Report, write_report  # imports matplotlib

    with tempfile.TemporaryDirectory() as folder:
        write_report(Report(groups, notes), Path(folder), before=before)
        return Path(folder, "report.html").read_text()


class PageServer(ThreadingHTTPServer):
    """A server whose threads are few, and which prints nothing if a browser closes early."""

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.free_threads = threading.BoundedSemaphore(MAX_THREADS)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.free_threads.acquire()  # others wait: idle connections end after IDLE_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free_threads.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def make_server(port: int, read: Callable[[], Reading]) -> PageServer:
    """A server on 127.0.0.1 that answers / with the page of the runs that `read` returns.

    Port 0 means any free one. The page is built again if a row of its table changed.

    Raises:
        OSError: the port is in use.
    """
    shown: tuple[list[dict[str, str]], list[str]] | None = None
    page = b""
    lock = threading.Lock()  # the server has a thread per request

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            nonlocal shown, page
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            # a foreign page whose name was made to point to this machine
            if host not in ("127.0.0.1", "localhost"):
                return self.send_error(403, "open it as http://127.0.0.1")
            if self.path != "/":
                return self.send_error(404)
            with lock:
                reading = read()
                newest = (describe_runs(reading.runs), reading.left_out)
                if newest != shown:
                    page = build_page(reading)
                    shown = newest
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Log no requests."""

    return PageServer(port, Handler)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or serve the page until Ctrl-C."""
    parser = build_parser("scripts.watch", __doc__)
    parser.add_argument(
        "runs", nargs="*", type=Path, help="folders of runs, or above them (default: runs)"
    )
    parser.add_argument(
        "--serve",
        nargs="?",
        type=int,
        const=6060,
        metavar="PORT",
        help="a page, at 6060 by default",
    )
    args = parser.parse_args(argv)
    missing = [str(place) for place in args.runs if not os.path.lexists(place)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: no such folder; "
            "name folders of runs, or leave them out for all of runs/"
        )
    places = args.runs or [Path("runs")]  # which the first run will make
    if args.serve is None:
        print(format_table(places))
        return
    require_packages("matplotlib", "scipy")
    try:
        server = make_server(args.serve, lambda: read_places(places))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port {args.serve}: {error}; name another, such as --serve 6061"
        ) from None
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()


if __name__ == "__main__":
    run_command(main)
