"""What every benchmark shares: alternatives timed in turn, tables and JSON files, traces."""

import json
import os
import platform
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import torch

from common.files import write_atomic
from common.progress import progress_bar
from common.text import first_line, text_table
from runtime import distributed

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WARM_UP = 2  # rounds
FLUSH_BYTES = 2**28  # more than any L2 cache
PROFILED = 2  # calls in a trace
LONG_GAP = 0.02  # ms
MOST_AHEAD = 0.02  # seconds that the device waits for the host; both passes launch in 3 ms
ORDER_SEED = 0  # of the order of alternatives in each round
# Kineto, which reads it at the first trace, prints no "USDT" and "STAGE" lines above its levels.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
CLOCK = 2e9  # cycles a second, about a GPU's highest: of the wait for the host


class Benchmark:
    """Times functions on `device`, prints tables, and writes their figures to --json FILE.

    `args` are those of the command line: `what`, `command`, `rounds`, `json` and `profile`.
    """

    def __init__(self, args: Namespace, device: torch.device, title: str, *notes: str) -> None:
        self.args, self.device = args, device
        self.host: dict[tuple, float] = {}  # median seconds until a function returns
        self.cold = (
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
            if device.type == "cuda"
            else None
        )
        machine: dict[str, Any] = {
            "device": distributed.device_name(device),
            "threads": torch.get_num_threads(),
        }
        machine |= {"torch": torch.__version__, "python": platform.python_version()}
        # kernels/ imports it if installed
        machine["triton"] = getattr(sys.modules.get("triton"), "__version__", None)
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        self.data: dict[str, Any] = {
            "what": args.what,
            "command": args.command,
            "date": date,
            "machine": machine,
        }
        self.data |= {"rows": [], "skipped": {}}
        named = "{device}, {threads} threads, torch {torch}, Python {python}".format_map(machine)
        print("\n".join([f"{named}; {title}; {args.rounds} rounds", *notes]), flush=True)
        self.write_json()

    def write_json(self) -> None:
        """Write all figures so far to --json FILE, if there is one."""
        if self.args.json:
            write_atomic(self.args.json, json.dumps(self.data, indent=1) + "\n")

    def time(
        self, functions: Mapping[tuple, Callable[[], object]], queued: bool = False
    ) -> dict[tuple, float]:
        """Time each function once per round: slow moments of the machine hit all of them.

        Each round has another order, drawn from a fixed seed: whoever follows the largest model
        finds its data in the cache. On a GPU a call starts with an empty L2 cache, as in training,
        and is timed by events. Emptying the cache (1 GB of zeros) lets the host run some 0.4 ms
        ahead: launches count where the device has to wait for them, as they would in training.

        Args:
            functions: {name: function}.
            queued: on a GPU, let the device wait until the host has launched everything, so that
                kernels alone are timed. `host` has the host's part.

        Returns:
            {name: median, seconds}, without functions that raised RuntimeError, which are skipped.
        """
        seconds: dict[tuple, list[float]] = {name: [] for name in functions}
        host: dict[tuple, list[float]] = {name: [] for name in functions}
        shuffle = random.Random(ORDER_SEED).shuffle
        n_round = self.args.rounds + WARM_UP
        for _ in progress_bar(iterable=range(n_round), desc="rounds", leave=False):
            order = list(seconds)
            shuffle(order)
            for name in order:
                # a function that waits for the device takes longer the longer that waits
                ahead = min(2 * host[name][-1], MOST_AHEAD) if queued and host[name] else 0.0
                try:
                    taken, of_host = time_once(functions[name], self.cold, ahead)
                # out of memory, no kernel for this type, a graph that does not compile
                except RuntimeError as error:
                    del seconds[name]
                    label = " ".join(map(str, name))
                    self.data["skipped"][label] = reason = (
                        f"{type(error).__name__}: {first_line(error)}"
                    )
                    print(f"skipped {label}: {reason}", flush=True)
                    continue
                seconds[name].append(taken)
                host[name].append(of_host)
        medians = {name: statistics.median(times[WARM_UP:]) for name, times in seconds.items()}
        self.host = {name: statistics.median(host[name][WARM_UP:]) for name in medians}
        return medians

    def add_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Print a table of texts, numbers and None (a dash), and add its rows to the JSON file."""
        if rows:
            left = sum(isinstance(value, str) for value in rows[0])
            print(
                text_table(columns, [[format_cell(value) for value in row] for row in rows], left),
                flush=True,
            )
        self.data["rows"] += [dict(zip(columns, row, strict=True)) for row in rows]
        self.write_json()

    def profile(self, function: Callable[[], object], name: str) -> None:
        """If --profile FILE asks for it, trace two calls and print their largest kernels."""
        if not self.args.profile:
            return
        function()
        with torch.profiler.profile() as profiler:
            for _ in range(PROFILED):
                function()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        profiler.export_chrome_trace(self.args.profile)
        print(f"{self.args.profile}: {PROFILED} calls of {name}")
        if self.device.type == "cuda":
            self.data["trace"] = summary = summarize_trace(profiler)
            for line in describe_trace(summary):
                print(line)
            self.write_json()
            return
        print("the largest operators by their own time:")
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)
        print(table, flush=True)


def summarize_trace(profiler: torch.profiler.profile) -> dict[str, Any]:
    """Summarise a call on the device: kernels by name [launches, ms], and ms between them."""
    recorded: Any = profiler.events()
    events = [event for event in recorded if "CUDA" in str(event.device_type)]
    # the optimizer's range counts its kernels once more
    events = [event for event in events if not event.name.startswith("Optimizer.")]
    events.sort(key=lambda event: event.time_range.start)
    kernels: dict[str, list[float]] = {}
    idle = waits = 0.0
    end = events[0].time_range.start
    for event in events:
        row = kernels.setdefault(event.name, [0.0, 0.0])
        row[0] += 1 / PROFILED
        row[1] += event.time_range.elapsed_us() / 1000 / PROFILED
        gap = max(0.0, event.time_range.start - end) / 1000 / PROFILED
        idle += gap
        waits += gap if gap * PROFILED > LONG_GAP else 0.0
        end = max(end, event.time_range.end)
    span = (end - events[0].time_range.start) / 1000 / PROFILED
    largest = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return {"ms": span, "idle ms": idle, "long gaps ms": waits, "kernels": largest}


def describe_trace(summary: dict[str, Any], n_row: int = 30) -> list[str]:
    """Lines of `summarize_trace`, with its largest kernels."""
    launches = sum(row[0] for row in summary["kernels"].values())
    long_gaps = f"{summary['long gaps ms']:.2f} of them in gaps above {1000 * LONG_GAP:.0f} µs"
    busy = f"{summary['ms']:.1f} ms a call, {launches:.0f} launches"
    lines = [f"{busy}, {summary['idle ms']:.2f} ms idle, {long_gaps}"]
    for name, (count, ms) in list(summary["kernels"].items())[:n_row]:
        lines.append(f"{ms:8.3f} ms {count:6.1f}  {name[:90]}")
    return lines


def time_once(
    function: Callable[[], object], cold: torch.Tensor | None, ahead: float = 0.0
) -> tuple[float, float]:
    """Time one call: seconds of the device, and seconds until the function returned.

    On a GPU these are between CUDA events after filling the L2 cache with `cold`; the device first
    waits for `ahead` seconds.
    """
    if cold is None:
        start = time.perf_counter()
        function()
        taken = time.perf_counter() - start
        return taken, taken
    torch.cuda.synchronize(cold.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        torch.cuda._sleep(int(ahead * CLOCK))
    for _ in range(4):
        cold.zero_()
    begin.record()
    start = time.perf_counter()
    function()
    taken = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize(cold.device)
    return begin.elapsed_time(end) / 1000, taken


def divide(a: float | None, b: float | None) -> float | None:
    """Divide a by b; None where either is unknown."""
    return None if a is None or b is None else a / b


def format_cell(value: str | float | None) -> str:
    """Format a table's cell: large numbers as whole ones."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
