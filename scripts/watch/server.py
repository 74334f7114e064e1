"""The page of `scripts.watch --serve`: one HTML file and its numbers as JSON, for browsers on this machine alone."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripts.report.style import style

PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def make_server(port: int, read: Callable[[], list[dict[str, Any]]]) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that answers / with the page and /runs with what `read` returns, as JSON.

    Args:
        port: 0 takes any free one (`server_port` says which).
        read: the runs, each with `router`, called once a request.

    Raises:
        OSError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):  # a page elsewhere that had its name point here
                self.send_error(403, "open it as http://127.0.0.1")
            elif self.path == "/":
                self.reply("text/html; charset=utf-8", PAGE.read_bytes())
            elif self.path == "/runs":
                runs = [{**run, "color": style(run["router"])["color"]} for run in read()]
                self.reply("application/json", json.dumps(runs).encode())
            else:
                self.send_error(404)

        def reply(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Content-Security-Policy": POLICY,
                "Cache-Control": "no-store",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
