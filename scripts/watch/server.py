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
from scripts.watch.status import Status, build_table

RELOAD = 10  # seconds between two loads of the page


def build_page(statuses: list[Status]) -> bytes:
    """The runs' table, and below it the report of those that were evaluated, as one HTML file that reloads itself."""
    runs = [status.run for status in statuses if status.run.evaluations]
    blocks = [("table", *build_table(statuses)) if statuses else ("p", "No runs yet.")]
    with tempfile.TemporaryDirectory() as folder:
        settings = []
        try:
            settings, notes = group_runs(runs, unfinished=True) if runs else ([], [])
            if settings:
                write_report(Report(settings, notes), Path(folder), before=blocks)
        except ValueError as error:  # runs of several texts under one setting, say: their table is shown all the same
            blocks.append(("p", f"Not compared: {error}"))
        if not settings:
            write_page([("h1", "Runs"), *blocks], folder)
        html = Path(folder, "report.html").read_text()
    return html.replace("<head>", f'<head>\n<meta http-equiv="refresh" content="{RELOAD}">', 1).encode()


def make_server(port: int, read: Callable[[], list[Status]]) -> ThreadingHTTPServer:
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
                statuses = read()
                if (newest := [status.as_row() for status in statuses]) != rows or not page:
                    rows, page = newest, build_page(statuses)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
