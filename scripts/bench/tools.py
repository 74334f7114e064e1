"""What the benchmarks share: turns, tables with their JSON, goals, traces."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

from runtime import RunError, distributed

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WARM_UP = 2  # rounds
FLUSH = 2**28  # bytes, more than any L2 holds
HOPPER = (9, 0)  # H100 and H200, for which the goals are stated


def in_turns(functions, rounds, device, may_fail=(), report=None):
    """{name: seconds of each of `rounds` calls}; one call of every function per round, after two rounds of warm-up.

    On a GPU a call begins with an empty L2, as in training, and is timed by events. Emptying it (1 GB of zeros) gives
    the host a start of some 0.4 ms: launches count where the device has to wait for them, as they would in training.

    A function that runs out of memory, or one named in `may_fail` that raises anything in its first call, is left out
    with a printed line, and {name: why} goes into what `report` skipped. An interrupt, by Ctrl-C or a time limit, ends
    the rounds, and is kept for `report.go_on()`, if every function has been timed by then.
    """
    seconds = {name: [] for name in functions}
    cold = torch.empty(FLUSH, dtype=torch.int8, device=device) if device.type == "cuda" else None
    try:
        for round_ in tqdm(range(rounds + WARM_UP), desc="rounds", disable=None, leave=False):
            for name in list(seconds):
                why = ""
                try:
                    taken = time_once(functions[name], device, cold)
                except Exception as error:
                    if not (isinstance(error, torch.OutOfMemoryError) or name in may_fail and not round_):
                        raise
                    why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
                if why:  # no longer in the handler, where the traceback holds tensors
                    del seconds[name]
                    skip(name, why, report and report.skipped)
                elif round_ >= WARM_UP:
                    seconds[name].append(taken)
    except KeyboardInterrupt:
        if report is None or not all(seconds.values()):
            raise
        report.cut = True
        print(f"cut short in round {round_ - WARM_UP + 1} of {rounds}", flush=True)
    return seconds


def time_once(function, device, cold=None):
    """Seconds of one call."""
    synchronize(device)
    if cold is None:
        begin = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        cold.zero_()
    begin.record()
    function()
    end.record()
    synchronize(device)
    return begin.elapsed_time(end) / 1000


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(seconds):
    """{name: median} of what `in_turns` returned."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def over(a, b):
    """a / b, or None where either is not known."""
    return None if a is None or b is None else a / b


def skip(name, why, skipped=None):
    """Say that something is left out, and why; `name` may be a tuple."""
    words = " ".join(map(str, name)) if isinstance(name, tuple) else str(name)
    print(f"skipped {words}: {why}", flush=True)
    if skipped is not None:
        skipped[words] = why


def usable(names, device, skipped):
    """{name: torch.dtype} of those dtypes that `device` multiplies; the others are skipped."""
    found = {}
    for name in names:
        try:
            if device.type == "cuda" and name == "bfloat16" and not torch.cuda.is_bf16_supported(False):
                raise RuntimeError("no bfloat16 in hardware")
            a = torch.ones(16, 16, dtype=DTYPES[name], device=device)
            a @ a
        except RuntimeError as error:
            skip(name, f"{distributed.device_name(device)}: {str(error).splitlines()[0]}", skipped)
        else:
            found[name] = DTYPES[name]
    return found


def is_hopper(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


class Report:
    """One table, printed row by row, and the JSON file of the same figures, written whole after each row.

    `columns` is {name: format}; a format of letters to the left ("<12") is for words, None prints as "-". Raises
    RunError if a file that `args` names cannot be written.
    """

    def __init__(self, args, overrides, device, title, columns):
        self.path, self.trace, self.columns = args.json, args.profile, columns
        self.data = {
            "what": args.what,
            "command": shlex.join(["python", "-m", "scripts.bench", *args.words]),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": machine(device),
            "rows": [],
            "skipped": {},
            "goals": [],
        }
        self.skipped = self.data["skipped"]
        self.cut = False  # before all rounds were over
        self.title = f"{describe(device)}; {title} {' '.join(overrides)}".rstrip()
        self.device = device
        self.write()
        if self.trace:
            with naming(self.trace), open(self.trace, "ab"):
                pass

    def row(self, values):
        """Print `values`, one a column, and keep them."""
        widths = {name: int(form[1:]) if form[0] == "<" else max(9, len(name)) for name, form in self.columns.items()}
        if not self.data["rows"]:
            print(self.title)
            heads = (f"{name:{'<' if self.columns[name][0] == '<' else '>'}{widths[name]}}" for name in self.columns)
            print("  ".join(heads).rstrip())
        cells = []
        for (name, form), value in zip(self.columns.items(), values, strict=True):
            text = "-" if value is None else format(value, "" if form[0] == "<" else form)
            cells.append(f"{text:<{widths[name]}}" if form[0] == "<" else f"{text:>{widths[name]}}")
        print("  ".join(cells).rstrip(), flush=True)
        self.data["rows"].append(dict(zip(self.columns, values, strict=True)))
        self.write()

    def goal(self, words, value, least=None, most=None):
        """One of the goals that the table is read against; nothing if `value` is not known."""
        if value is None:
            return
        met = value >= least if most is None else value <= most
        limit = f">= {least:g}" if most is None else f"<= {most:g}"
        print(f"goal: {words} {limit}: {value:.3f}, {'met' if met else 'NOT met'}", flush=True)
        self.data["goals"].append({"goal": f"{words} {limit}", "value": value, "met": met})
        self.write()

    def go_on(self):
        """Raises KeyboardInterrupt if there was one among the rounds: what they timed is written, no more is begun."""
        if self.cut:
            raise KeyboardInterrupt

    def profile(self, function, name):
        """If a trace was asked for, write that of three calls of `function`, and print its ten largest kernels. Raises
        as `go_on` does."""
        self.go_on()
        if not self.trace:
            return
        calls = 3
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        function()
        synchronize(self.device)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(calls):
                function()
            synchronize(self.device)
        with naming(self.trace):
            profiler.export_chrome_trace(str(self.trace))
        kernels = largest_kernels(profiler.key_averages(), self.device)
        total = sum(time for _, time, _ in kernels)
        what = "kernels" if self.device.type == "cuda" else "operators, by time of their own,"
        print(f"{self.trace}: {name}; the ten largest {what} of {total / calls / 1000:.2f} ms:")
        self.data["profile"] = []
        for kernel, time_, count in kernels[:10]:
            print(f"{time_ / total:6.1%} {time_ / calls / 1000:9.3f} ms {count / calls:6.0f} x  {kernel[:80]}")
            self.data["profile"].append(
                {"kernel": kernel, "share": time_ / total, "ms": time_ / calls / 1000, "calls": count / calls}
            )
        self.write()

    def write(self):
        if not self.path:
            return
        temporary = Path(f"{self.path}.tmp")
        with naming(self.path):
            temporary.write_text(json.dumps(self.data, indent=1) + "\n")
            os.replace(temporary, self.path)


def largest_kernels(averages, device):
    """[(name, microseconds, calls)] of a profile, largest first: kernels on a GPU, else operators' own CPU time."""
    if device.type == "cuda":  # an operator has its kernels' time once more, and so has an annotated range
        events = [e for e in averages if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
        found = [(e.key, e.self_device_time_total, e.count) for e in events]
    else:
        found = [(e.key, e.self_cpu_time_total, e.count) for e in averages]
    return sorted(found, key=lambda kernel: -kernel[1])


class naming:
    """Turns an OSError within into a RunError that names `path`."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError):
            raise RunError(f"{self.path} cannot be written: {error.strerror}; name another file") from error


def machine(device):
    """What ran, for the JSON."""
    try:
        import triton
    except ImportError:
        triton = None
    return {
        "device": distributed.device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver() if device.type == "cuda" else None,
        "triton": triton and triton.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
    }


def driver():
    """The version of NVIDIA's driver, None if nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def describe(device):
    threads, python = torch.get_num_threads(), platform.python_version()
    return f"{distributed.device_name(device)}, {threads} threads, torch {torch.__version__}, Python {python}"
