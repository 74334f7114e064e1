"""What every benchmark shares: alternatives timed in turn, tables with a JSON file of the same figures, traces."""

import json
import os
import platform
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any

import torch
from torch.utils import collect_env

from common.files import write_atomic
from common.progress import progress_bar
from common.text import first_line, text_table
from runtime import RunError, distributed

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WARM_UP = 2  # rounds
FLUSH_BYTES = 2**28  # more than any L2 cache
FORMATS = {"tokens/s": ",.0f", "MFU": ".1%", "of ceiling": ".1%"}  # of columns; others have three decimals


class Benchmark:
    """Times functions, prints tables, and writes their figures to --json FILE.

    Args:
        args: the command line: `what`, `command`, `rounds`, `json` and, where the command has it, `profile`.
        device: where the functions compute.
        title: what is measured, for the line above the first table.
        notes: what its columns mean, a line each.

    Raises:
        RunError: a file that `args` names cannot be written.
    """

    def __init__(self, args: Namespace, device: torch.device, title: str, *notes: str) -> None:
        self.args, self.device, self.interrupted = args, device, ""
        self.trace = getattr(args, "profile", None)
        for path in filter(None, (args.json, self.trace)):
            try:
                open(path, "ab").close()
            except OSError as error:
                raise RunError(f"{path} cannot be written: {error.strerror}; name another file") from error
        machine = describe_machine(device)
        self.data: dict[str, Any] = {
            "what": args.what,
            "command": args.command,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": machine,
            "rows": [],
            "skipped": {},
        }
        named = "{device}, {threads} threads, torch {torch}, Python {python}".format_map(machine)
        self.head = [f"{named}; {title}; {args.rounds} rounds", *notes]
        self.write_json()

    def write_json(self) -> None:
        """Write all figures so far to --json FILE, if there is one."""
        if self.args.json:
            write_atomic(self.args.json, json.dumps(self.data, indent=1) + "\n")

    def time(
        self, functions: Mapping[Any, Callable[[], object]], may_fail: Collection = (), warm_up: int = WARM_UP
    ) -> dict[Any, float]:
        """Time each function once per round, in turn, so that slow moments of the machine hit all of them alike.

        On a GPU a call begins with an empty L2 cache, as in training, and is timed by events. Emptying the cache (1 GB
        of zeros) lets the host run some 0.4 ms ahead: launches count where the device has to wait for them, as they
        would in training.

        Args:
            functions: what to call, by name.
            may_fail: names of functions that may raise anything in their first call, and are then skipped.
            warm_up: rounds before those that count.

        Returns:
            {name: median, seconds}, without functions that ran out of memory, which are skipped too. After Ctrl-C or a
            time limit the medians are those of the rounds so far, and the next table is the last one.

        Raises:
            KeyboardInterrupt: interrupted before every function was timed once.
        """
        seconds, turn = {name: [] for name in functions}, 0
        cold = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device) if self.device.type == "cuda" else None
        try:
            for turn in progress_bar(iterable=range(self.args.rounds + warm_up), desc="rounds", leave=False):
                for name in list(seconds):
                    try:
                        taken = time_once(functions[name], self.device, cold)
                    except Exception as error:
                        if not (isinstance(error, torch.OutOfMemoryError) or name in may_fail and not turn):
                            raise
                        del seconds[name]
                        self._skip(name, error)
                    else:
                        if turn >= warm_up:
                            seconds[name].append(taken)
        except KeyboardInterrupt:
            if not all(seconds.values()):
                raise
            self.interrupted = f"interrupted after {turn - warm_up} of {self.args.rounds} rounds"
        return {name: statistics.median(times) for name, times in seconds.items()}

    def _skip(self, name: Any, error: Exception) -> None:
        label = " ".join(map(str, name)) if isinstance(name, tuple) else str(name)
        self.data["skipped"][label] = reason = f"{type(error).__name__}: {first_line(error)}"
        print(f"skipped {label}: {reason}", flush=True)

    def add_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Print a table of texts, numbers and None (a dash), and add its rows to the JSON file.

        Raises:
            KeyboardInterrupt: the last timing was interrupted. The table is complete by then.
        """
        if rows:
            cells = [[format_cell(*cell) for cell in zip(columns, row, strict=True)] for row in rows]
            left = sum(isinstance(value, str) for value in rows[0])
            print("\n".join([*self.head, text_table(columns, cells, left)]), flush=True)
            self.head = []
        self.data["rows"] += [dict(zip(columns, row, strict=True)) for row in rows]
        self.write_json()
        if self.interrupted:
            print(self.interrupted, flush=True)
            raise KeyboardInterrupt

    def profile(self, function: Callable[[], object], name: str) -> None:
        """If --profile FILE asks for it, write a trace of three calls and print their largest operators and kernels."""
        if not self.trace:
            return
        time_once(function, self.device)
        with torch.profiler.profile() as profiler:
            for _ in range(3):
                time_once(function, self.device)
        profiler.export_chrome_trace(str(self.trace))
        print(f"{self.trace}: three calls of {name}; the largest operators and kernels by their own time:")
        where = "device" if self.device.type == "cuda" else "cpu"
        print(profiler.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=20), flush=True)
        self.trace = None  # one trace per command


def time_once(function: Callable[[], object], device: torch.device, cold: torch.Tensor | None = None) -> float:
    """Seconds of one call: of the host's clock, or of CUDA events after filling the L2 cache with `cold`."""
    synchronize(device)
    if cold is None:
        start = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        cold.zero_()
    begin.record()
    function()
    end.record()
    synchronize(device)
    return begin.elapsed_time(end) / 1000


def synchronize(device: torch.device) -> None:
    """Wait for all work on a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def divide(a: float | None, b: float | None) -> float | None:
    """Divide a by b; None where either is unknown."""
    return None if a is None or b is None else a / b


def format_cell(column: str, value: str | float | None) -> str:
    """Format a table's cell by its type and its column."""
    if value is None or isinstance(value, str):
        return value or "-"
    return format(value, ",d" if isinstance(value, int) else FORMATS.get(column, ".3f"))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, for the title and the JSON file."""
    cuda = device.type == "cuda"
    return {
        "device": distributed.device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),  # kernels/ imports it where it is installed
        "python": platform.python_version(),
    }
