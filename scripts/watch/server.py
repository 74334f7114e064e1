"""The page of `scripts.watch --serve`: the report of the runs, written again when they change."""

import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripts.report.page import Report, write_report
from scripts.report.pages import write_page
from scripts.report.settings import group_runs
from scripts.watch.status import HEAD, Status

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
RELOAD = 10  # seconds between two loads of the page


class LivePage:
    """The report as HTML. `render` writes it again if a run changed since the last time."""

    def __init__(self, read: Callable[[], list[Status]]) -> None:
        self.read = read
        self.lock = threading.Lock()  # the server has a thread per request
        self.rows: list[list[str]] | None = None
        self.html = b""

    def render(self) -> bytes:
        """The page; the errors of runs that cannot be compared are in it."""
        with self.lock:
            statuses = self.read()
            rows = [status.as_row() for status in statuses]
            if rows != self.rows:
                self.html, self.rows = build_page(statuses, rows), rows
            return self.html


def build_page(statuses: list[Status], rows: list[list[str]]) -> bytes:
    """The runs' table, and below it the report of those that were evaluated, as one HTML file that reloads itself."""
    runs = [status.run for status in statuses if status.run.evaluations]
    table = ("table", HEAD, rows) if rows else ("p", "No runs yet.")
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings, notes = group_runs(runs, unfinished=True) if runs else ([], [])
            if settings:
                write_report(Report(settings, notes), Path(folder), before=[table])
        except ValueError as error:  # runs of several texts under one setting, say: their table is shown all the same
            settings, table = [], ("fold", f"not compared: {error}", [table])
        if not settings:
            write_page([("h1", "Runs"), table], folder)
        html = Path(folder, "report.html").read_text()
    return html.replace("<head>", f'<head>\n<meta http-equiv="refresh" content="{RELOAD}">', 1).encode()


def make_server(port: int, render: Callable[[], bytes]) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that answers / with what `render` returns; port 0 takes any free one.

    Raises OSError if the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):  # a page elsewhere that had its name point here
                return self.send_error(403, "open it as http://127.0.0.1")
            if self.path != "/":
                return self.send_error(404)
            body = render()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
