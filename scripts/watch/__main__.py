"""Watch runs without wandb: a table in the terminal, or a page on this machine that reloads by itself.

    python -m scripts.watch                      every run below runs/
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --serve              their report as a page at http://127.0.0.1:6060

Reads the runs' files and writes nothing, so it can be started and stopped at any time. From another computer:
ssh -L 6060:127.0.0.1:6060 HOST, then open the page there.
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.command import build_parser, command, require_packages, run_command
from common.text import first_line, text_table
from runtime.metrics import list_arrays
from scripts.report.runs import Run, find_runs, load_run
from scripts.watch.status import build_table, describe_run, last_modified


@lru_cache(maxsize=1000)
def load_cached(folder: Path, modified: float) -> Run:
    """`load_run`, again when `modified`, the time of the newest file, is another."""
    return load_run(folder)


def read_runs(places: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs at these places as they are now, and a line for each folder that cannot be read."""
    runs, errors = [], []
    for folder in find_runs(places):
        metrics = folder / "metrics.jsonl"
        try:
            runs.append(load_cached(folder, last_modified(folder / "config.toml", metrics, *list_arrays(metrics))))
        except (OSError, ValueError) as error:
            errors.append(f"left out: {folder}: {first_line(error)}")
    return runs, errors


def format_table(places: Sequence[Path]) -> str:
    """All runs, and the folders that cannot be read."""
    runs, errors = read_runs(places)
    none = f"no runs in {', '.join(map(str, places))} yet"
    return "\n".join([text_table(*build_table([*map(describe_run, runs)]), left=2) if runs else none, *errors])


def build_page(runs: Sequence[Run], rows: list[list[str]]) -> bytes:
    """The runs' table, and below it the report of those that were evaluated, as one HTML file that reloads itself."""
    from scripts.report.page import Report, write_report  # imports torch and matplotlib
    from scripts.report.settings import group_runs

    evaluated = [run for run in runs if run.evaluations]
    try:
        report = Report(*group_runs(evaluated, unfinished=True)) if evaluated else Report([], [])
    except ValueError as error:  # runs of several texts under one setting, say: their table is shown all the same
        report = Report([], [f"not compared: {error}"])
    with tempfile.TemporaryDirectory() as folder:
        write_report(report, Path(folder), [("table", *build_table(rows)) if rows else ("p", "No runs yet.")])
        html = Path(folder, "report.html").read_text()
    every_10_seconds = '<meta http-equiv="refresh" content="10">'
    return html.replace("<head>", f"<head>\n{every_10_seconds}", 1).encode()


def make_server(port: int, read: Callable[[], list[Run]]) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that answers / with the page of the runs that `read` returns; port 0 takes any free one.

    The page is built again if a row of its table changed. Raises OSError if the port is taken.
    """
    rows: list[list[str]] = []
    page = b""
    lock = threading.Lock()  # the server has a thread per request

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal rows, page
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):  # a page elsewhere that had its name point here
                return self.send_error(403, "open it as http://127.0.0.1")
            if self.path != "/":
                return self.send_error(404)
            with lock:
                runs = read()
                if (newest := [*map(describe_run, runs)]) != rows or not page:
                    rows, page = newest, build_page(runs, newest)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or serve the page until Ctrl-C."""
    parser = build_parser("scripts.watch", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs, or above them (default: runs)")
    parser.add_argument("--serve", nargs="?", type=int, const=6060, metavar="PORT", help="a page, at 6060 by default")
    args = parser.parse_args(argv)
    if missing := [str(place) for place in args.runs if not place.exists()]:
        raise ValueError(
            f"{', '.join(missing)}: no such folder; name folders of runs, or leave them out for all of runs/"
        )
    places = args.runs or [Path("runs")]  # which the first run will make
    if args.serve is None:
        print(format_table(places))
        return
    require_packages("matplotlib", "scipy")
    try:
        server = make_server(args.serve, lambda: read_runs(places)[0])
    except (OSError, OverflowError) as error:
        raise ValueError(f"port {args.serve}: {error}; name another, such as --serve 6061") from None
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()


if __name__ == "__main__":
    run_command(main)
