"""Watch runs without wandb: a table in the terminal, or a page on this machine that reloads by itself.

    python -m scripts.watch                      every run below runs/
    python -m scripts.watch runs/mine-*          these runs, or those below these folders
    python -m scripts.watch --serve              their report as a page at http://127.0.0.1:6060

Reads the runs' files and writes nothing, so it can be started and stopped at any time. From another
computer: ssh -L 6060:127.0.0.1:6060 HOST, then open the page there.
"""

import math
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from common.command import build_parser, command, require_packages, run_command
from common.text import first_line, text_table
from report.runs import Run, find_runs, load_run
from runtime.metrics import list_arrays

COLUMNS = {"train/loss": ".4f", "val/loss": ".4f", "perf/tokens_per_sec": ",.0f", "perf/mfu": ".1%"}
SILENT = 300  # seconds without a line of metrics before a run in progress is called silent
HEAD = ("run", "state", "step", "train loss", "val loss", "tokens/s", "MFU", "left", "trouble")


def describe_run(run: Run, now: float | None = None) -> list[str]:
    """Cells under HEAD of a run at the time `now`, in seconds since 1970, by default this moment; empty if unknown.

    Its state is running, silent, finished, failed or stopped. The time left is at the median speed
    of the last lines.
    """
    now = time.time() if now is None else now
    last = newest_values(run)
    step, trouble = int(last.get("step", 0)), find_trouble(run, last)
    alive = is_alive(run.folder / "lock", now)
    quiet = now - last_modified(run.folder / "metrics.jsonl", run.folder / "lock")
    if alive and quiet > SILENT:
        state, trouble = "silent", trouble or f"no metrics for {timedelta(seconds=round(quiet))}"
    elif alive:
        state = "running"
    elif step >= run.max_steps and run.ended:
        state = "finished"
    elif trouble and not trouble.startswith("warning"):
        state = "failed"
    else:
        state = "stopped"
    left, speeds = "", list(run.series("perf/tokens_per_sec").values())[-5:]
    if alive and speeds and median(speeds) > 0:
        tokens = (run.max_steps - step) * run.config.train.batch_size * run.config.model.block_size
        left = str(timedelta(seconds=round(tokens / median(speeds))))
    progress = f"{step:,} of {run.max_steps:,} {step / run.max_steps:>4.0%}"
    values = [f"{last[name]:{form}}" if name in last else "" for name, form in COLUMNS.items()]
    return [str(run.folder), state, progress, *values, left, trouble]


def build_table(rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table, without the columns that are empty for every run."""
    head, *cells = zip(
        *(column for column in zip(HEAD, *rows, strict=True) if any(column[1:])), strict=True
    )
    return list(head), [list(row) for row in cells]


def newest_values(run: Run) -> dict[str, float]:
    """The newest value of each name in the run's metrics; of `val/loss` the one that was not finite, if it was last."""
    values = {}
    for line in sorted([*run.evaluations.values(), *run.logs], key=lambda line: line["step"]):
        values |= {name: value for name, value in line.items() if isinstance(value, int | float)}
    if run.diverged is not None and run.diverged >= max(run.evaluations, default=0):
        values |= {"val/loss": math.nan, "step": max(run.diverged, values.get("step", 0))}
    return values


def find_trouble(run: Run, last: dict[str, float]) -> str:
    """The gravest thing that the run's files tell of, or nothing."""
    for name in ("val/loss", "train/loss"):
        if not math.isfinite(last.get(name, 0.0)):
            return f"{name} is {last[name]}"
    if dumps := sorted(run.folder.glob("crash-step_*.json")):
        return f"crash dump {dumps[-1].name}"
    log = run.folder / "train.log"  # of a sweep's point
    lines = re.findall(
        r"^(?:error|warning): .*", log.read_text(errors="replace") if log.exists() else "", re.M
    )
    return lines[-1] if lines else ""


def is_alive(lock: Path, now: float) -> bool:
    """Whether the process that wrote the lock file of a run's folder lives.

    A process on this machine is looked up, without touching its lock. Of one on another machine
    nothing can be known but the run's last line of metrics: it counts as alive while that is fresh.
    """
    owner = re.fullmatch(r"process (\d+) on (.*)\n?", lock.read_text() if lock.exists() else "")
    if not owner:
        return False
    if owner[2] != platform.node():
        return now - last_modified(lock.with_name("metrics.jsonl"), lock) < SILENT
    try:
        os.kill(int(owner[1]), 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process lives
    return True


def last_modified(*files: Path) -> float:
    """When the newest of `files` was written, in seconds since 1970; 0 if none is there."""
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


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
            runs.append(
                load_cached(
                    folder, last_modified(folder / "config.toml", metrics, *list_arrays(metrics))
                )
            )
        except (OSError, ValueError) as error:
            errors.append(f"left out: {folder}: {first_line(error)}")
    return runs, errors


def format_table(places: Sequence[Path]) -> str:
    """All runs, and the folders that cannot be read."""
    runs, errors = read_runs(places)
    none = f"no runs in {', '.join(map(str, places))} yet"
    return "\n".join(
        [text_table(*build_table([*map(describe_run, runs)]), left=2) if runs else none, *errors]
    )


def build_page(runs: Sequence[Run], rows: list[list[str]]) -> bytes:
    """The runs' table, and below it the report of those that were evaluated, as one HTML file that reloads itself."""
    from report.page import Report, write_report  # imports torch and matplotlib
    from report.settings import group_runs

    evaluated = [run for run in runs if run.evaluations]
    try:
        report = Report(*group_runs(evaluated, unfinished=True)) if evaluated else Report([], [])
    # runs of several texts under one setting, say: their table is shown all the same
    except ValueError as error:
        report = Report([], [f"not compared: {error}"])
    with tempfile.TemporaryDirectory() as folder:
        write_report(
            report, Path(folder), [("table", *build_table(rows)) if rows else ("p", "No runs yet.")]
        )
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
            # a page elsewhere that had its name point here
            if host not in ("127.0.0.1", "localhost"):
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
        raise ValueError(
            f"port {args.serve}: {error}; name another, such as --serve 6061"
        ) from None
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()


if __name__ == "__main__":
    run_command(main)
