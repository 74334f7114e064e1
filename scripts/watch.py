"""Watch runs without wandb: a table in the terminal, or a page that reloads by itself.

    python -m scripts.watch                      every run below runs/
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --serve              their report as a page at http://127.0.0.1:6060

Reads the runs' files and writes nothing, so it can be started and stopped at any time. A run is
running while a process holds its lock, and unknown if that cannot be seen from this computer.
From another computer: ssh -L 6060:127.0.0.1:6060 HOST, then open the page there.
"""

import math
import os
import platform
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.command import build_parser, command, require_packages, run_command
from common.files import is_locked
from common.text import escape_controls
from report.blocks import Block, Bullets, Paragraph, Table
from report.runs import Run, find_runs, read_run
from runtime.metrics import list_arrays

VALUES = {  # column: (name in metrics.jsonl, format)
    "train loss": ("train/loss", ".4f"),
    "val loss": ("val/loss", ".4f"),
    "tokens/s": ("perf/tokens_per_sec", ",.0f"),
    "MFU": ("perf/mfu", ".1%"),
}
COLUMNS = ("run", "state", "step", *VALUES, "left", "trouble")
LOCK_CHARACTERS = 300  # of a lock that are read: a number and the name of a computer
MAX_THREADS = 24  # of the page's server; not measured
IDLE_SECONDS = 10  # until a silent connection to the page ends; not measured
SILENT = 300  # seconds without a line of metrics that are trouble of a running run; not measured


def describe_status(run: Run, now: float | None = None) -> dict[str, str]:
    """COLUMNS of a run; those that are unknown are empty.

    Its state is running, finished, failed, stopped, or unknown if it is of another computer. The
    time left is at the median speed of the last lines.

    Args:
        run: read from its folder.
        now: seconds since 1970; by default this moment.
    """
    if now is None:
        now = time.time()
    last = collect_newest(run)
    step = int(last.get("step", 0))
    trouble = find_trouble(run, last)
    lock = run.folder / "lock"
    trains = is_training(lock)
    last_written = last_modified(run.folder / "metrics.jsonl", lock)
    if trains:
        state = "running"
        if now - last_written > SILENT:
            # a time, not a duration: the page is built again if a row changed
            trouble = trouble or f"no metrics since {format_time(last_written)}"
    elif step >= run.max_steps and run.ended:
        state = "finished"
    elif trains is None:
        state = "unknown"
        known = describe_unknown_lock(lock, last_written)
        trouble = f"{trouble}; {known}" if trouble else known
    elif trouble and not trouble.startswith("warning"):
        state = "failed"
    else:
        state = "stopped"
    row = {
        "run": str(run.folder),
        "state": state,
        "step": f"{step:,} of {run.max_steps:,} {step / run.max_steps:>4.0%}",
    }
    for column, (name, form) in VALUES.items():
        row[column] = f"{last[name]:{form}}" if name in last else ""
    row["left"] = estimate_time_left(run, step) if trains else ""
    row["trouble"] = trouble
    return row


def estimate_time_left(run: Run, step: int) -> str:
    """The time from `step` to the end at the median speed of the last five lines; "" if unknown."""
    speeds = list(run.series("perf/tokens_per_sec").values())[-5:]
    if not speeds or median(speeds) <= 0:
        return ""
    tokens_per_step = run.config.train.batch_size * run.config.model.block_size
    tokens_left = (run.max_steps - step) * tokens_per_step
    return format_duration(tokens_left / median(speeds))


def describe_unknown_lock(lock: Path, last_written: float) -> str:
    """The reason why `is_training` is None."""
    if lock.exists() and not lock.is_file():
        return "its lock is not a regular file; remove it"
    host = read_host(lock)
    return f"its lock on {host} is not visible here; last written {format_time(last_written)}"


def format_time(seconds: float) -> str:
    """A time in seconds since 1970, such as 2026-11-26 09:30:00."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def format_duration(seconds: float) -> str:
    """A duration such as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


def build_table(rows: Sequence[dict[str, str]]) -> Table:
    """The table of the runs, without the columns that are empty for every run."""
    table = Table(list(COLUMNS), list(rows))
    table.drop_empty(COLUMNS)
    return table


def collect_newest(run: Run) -> dict[str, float]:
    """The newest value of each name in the run's metrics.

    `val/loss` is NaN if the last one was not finite.
    """
    values = {}
    for line in sorted(run.lines, key=lambda line: line["step"]):
        for name, value in line.items():
            if isinstance(value, int | float):
                values[name] = value
    if run.diverged is not None and run.diverged >= max(run.evaluations, default=0):
        values["val/loss"] = math.nan
        values["step"] = max(run.diverged, values.get("step", 0))
    return values


def find_trouble(run: Run, last: dict[str, float]) -> str:
    """The gravest problem that the run's files show; "" without one."""
    for name in ("val/loss", "train/loss"):
        if not math.isfinite(last.get(name, 0.0)):
            return f"{name} is {last[name]}"
    dumps = sorted(run.folder.glob("crash-step_*.json"))
    if dumps:
        return f"crash dump {dumps[-1].name}"
    messages = [f"warning: {'; '.join(run.faults)}"] if run.faults else []
    log = run.folder / "train.log"  # which scripts.sweep writes
    if log.is_file():
        text = log.read_text(errors="replace")
        messages += re.findall(r"^(?:error|warning): .*", text, re.M)
    elif log.exists():  # opening a FIFO would wait for a process that writes to it
        messages.append(f"warning: {log.name} is not a regular file")
    return messages[-1] if messages else ""


def is_training(lock: Path) -> bool | None:
    """True if a process trains the run with this lock file; None if that cannot be known from here.

    The lock decides, not the number of the process: the kernel gives that to another process, and
    containers have numbers of their own.
    """
    if lock.exists() and not lock.is_file():
        return None
    locked = is_locked(lock)
    if locked is False and read_host(lock) != platform.node():
        return None  # it trains on another computer, or did
    return locked


def read_host(lock: Path) -> str:
    """The name of the computer that wrote the lock file; this one's if there is none."""
    try:
        with lock.open(errors="replace") as file:
            owner = re.fullmatch(r"process \d+ on (.*)\n?", file.read(LOCK_CHARACTERS))
    except OSError:
        return platform.node()
    return owner[1] if owner else platform.node()


def last_modified(*files: Path) -> float:
    """The time at which the newest of `files` was written, in seconds since 1970; 0 without any."""
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


@lru_cache(maxsize=1000)
def read_cached(folder: Path, modified: float) -> Run:
    """The run in a folder, read again when `modified`, the time of its newest file, changes."""
    return read_run(folder)


class Snapshot(NamedTuple):
    """The runs as they are now, their rows of COLUMNS, and a line for each folder left out."""

    runs: list[Run]
    rows: list[dict[str, str]]
    left_out: list[str]


def read_snapshot(places: Sequence[Path]) -> Snapshot:
    """Read the runs at these places and below. A folder that cannot be read is left out."""
    snapshot = Snapshot([], [], [])
    for folder in find_runs(places):
        metrics = folder / "metrics.jsonl"
        try:
            modified = last_modified(folder / "config.toml", metrics, *list_arrays(metrics))
            run = read_cached(folder, modified)
            row = describe_status(run)
        except Exception as error:  # whatever is wrong in one folder, the others are shown
            reason = " ".join(str(error).split()) or type(error).__name__
            snapshot.left_out.append(escape_controls(f"left out: {folder}: {reason}"))
            continue
        snapshot.runs.append(run)
        snapshot.rows.append({column: escape_controls(text) for column, text in row.items()})
    return snapshot


def format_table(places: Sequence[Path]) -> str:
    """The table of all runs, and the folders that cannot be read."""
    snapshot = read_snapshot(places)
    text = f"no runs in {', '.join(map(str, places))} yet"
    if snapshot.rows:
        text = build_table(snapshot.rows).to_text(left=2)
    return "\n".join([text, *snapshot.left_out])


def build_page(snapshot: Snapshot) -> bytes:
    """The runs' table, and below it the report of evaluated runs, as one HTML file.

    The page reloads itself.
    """
    before: list[Block] = [Paragraph("No runs yet.")]
    if snapshot.rows:
        before = [build_table(snapshot.rows)]
    if snapshot.left_out:
        before.append(Bullets(snapshot.left_out))
    evaluated = [run for run in snapshot.runs if run.evaluations]
    try:
        html = build_report(evaluated, before)
    except Exception as error:  # whatever is wrong in one run, the table is shown
        reason = str(error) or type(error).__name__
        html = build_report([], [*before, Bullets([f"no report: {reason}"])])
    every_10_seconds = '<meta http-equiv="refresh" content="10">'
    return html.replace("<head>", f"<head>\n{every_10_seconds}", 1).encode()


def build_report(evaluated: Sequence[Run], before: Sequence[Block]) -> str:
    """The report of evaluated runs as HTML, with `before` above it."""
    from report.groups import group_runs
    from report.page import Report, write_report  # imports torch and matplotlib

    report = Report([], [])
    if evaluated:
        try:
            groups, notes = group_runs(evaluated, unfinished=True)
            report = Report(groups, notes)
        except ValueError as error:  # such as runs of several texts: their table is shown
            report = Report([], [f"not compared: {error}"])
    with tempfile.TemporaryDirectory() as folder:
        write_report(report, Path(folder), before=before)
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


def make_server(port: int, read: Callable[[], Snapshot]) -> PageServer:
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
                snapshot = read()
                newest = (snapshot.rows, snapshot.left_out)
                if newest != shown:
                    page = build_page(snapshot)
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
        server = make_server(args.serve, lambda: read_snapshot(places))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port {args.serve}: {error}; name another, such as --serve 6061"
        ) from None
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()


if __name__ == "__main__":
    run_command(main)
