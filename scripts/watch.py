"""Watch runs without wandb: a table in the terminal, or a page that stays up to date.

    python -m scripts.watch                      every run below runs/
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --serve              their report as a page at http://127.0.0.1:6060

Reads the runs' files and writes nothing, so it can be started and stopped at any time. A run is
running while a process holds its lock, and unknown if that cannot be seen from this computer.
From another computer: ssh -L 6060:127.0.0.1:6060 HOST, then open the page there.
"""

import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.command import build_parser, command, require_packages, run_command
from report.overview import build_overview
from runtime.runs import Reading, find_runs, read_runs

SCRIPT = Path(__file__).parents[1] / "report/live.js"
TYPES = {".svg": "image/svg+xml", ".js": "text/javascript"}  # of files besides the page
MAX_THREADS = 24  # of the page's server; not measured
IDLE_SECONDS = 10  # until a silent connection to the page ends; not measured

Sections = dict[tuple, Any]  # of the report, by their data


def read_places(places: Sequence[Path]) -> Reading:
    """Read the runs at these places and below; nothing if there is no run yet."""
    return read_runs(places) if find_runs(places) else Reading([], [])


def format_table(places: Sequence[Path]) -> str:
    """The table of all runs, and the folders that cannot be read."""
    reading = read_places(places)
    text = f"no runs in {', '.join(map(str, places))} yet"
    if reading.runs:
        text = build_overview(reading.runs).to_text(left=2)
    return "\n".join([text, *reading.left_out])


def build_page(reading: Reading, sections: Sections) -> dict[str, bytes]:
    """{path: file} of the live page: the report of the runs, its pictures and its script.

    Sections whose data are in `sections` are not drawn again; the others are added.
    """
    from report.groups import group_runs  # with report.page it imports matplotlib
    from report.page import Report, build_sections, format_page

    try:
        groups, notes = group_runs(reading.runs)
        report = Report(reading.runs, groups, notes + reading.left_out)
        drawn = build_sections(report, sections)
    except Exception as error:  # whatever is wrong in one run, the table is shown
        fault = f"no report: {str(error) or type(error).__name__}"
        report = Report(reading.runs, [], [fault, *reading.left_out])
        drawn = {}
    sections.clear()
    sections.update(drawn)
    page = format_page(report, drawn.values(), ["scripts.watch", *sys.argv[1:]], live=True)
    files = {"/": page, "/live.js": SCRIPT.read_bytes()}
    for section in drawn.values():
        for picture in section.pictures:
            files[f"/{picture.file}"] = picture.svg
    return files


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
    files: dict[str, bytes] = {}
    sections: Sections = {}
    lock = threading.Lock()  # the server has a thread per request

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            nonlocal shown, files
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            # a foreign page whose name was made to point to this machine
            if host not in ("127.0.0.1", "localhost"):
                return self.send_error(403, "open it as http://127.0.0.1")
            path = self.path.partition("?")[0]
            with lock:
                if path == "/":
                    reading = read()
                    newest = (build_overview(reading.runs).rows, reading.left_out)
                    if newest != shown:
                        try:
                            files = build_page(reading, sections)
                        except OSError as error:  # such as a full disk
                            return self.send_error(500, explain=f"no page: {error}")
                        shown = newest
                content = files.get(path)
            if content is None:
                return self.send_error(404)
            self.send_content(path, content)

        def send_content(self, path: str, content: bytes) -> None:
            """Send a file, or that the browser's copy is up to date."""
            tag = f'"{zlib.crc32(content):x}"'
            is_known = self.headers.get("If-None-Match") == tag
            self.send_response(304 if is_known else 200)
            self.send_header("ETag", tag)
            if not is_known:
                kind = TYPES.get(Path(path).suffix, "text/html; charset=utf-8")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not is_known:
                self.wfile.write(content)

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
    require_packages("jinja2", "matplotlib", "scipy")
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
