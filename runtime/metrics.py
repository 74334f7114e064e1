"""Where a run's numbers go: runs/<name>/metrics.jsonl always, a tracker (runtime/tracker.py) when asked; and loads in
numbers."""

import json
import os
from pathlib import Path

import torch
from tqdm import tqdm

from runtime import RunError, writing


class Metrics:
    """One JSON object a line, `step` and `tokens` (seen in training so far) in each. Rank 0 alone has one. Values are
    numbers, or lists of them by layer, expert or window.

    Infinite and NaN values are written `Infinity` and `NaN`, as Python's json does and reads. A tracker gets the lines
    that are there and each new one; one that fails is dropped with one printed line. Where the file cannot be written
    methods raise RunError, or, if `on_error` is "warn", print it once and try again with the next line; `close` raises
    it in any case.
    """

    def __init__(self, folder, resume_step, tracker=None, on_error="stop"):
        """`resume_step`: lines after this step, left by a run that was killed later, are dropped; below 0 all are, into
        metrics.old.jsonl. Of lines of the same step and names the last is kept."""
        self.path = Path(folder, "metrics.jsonl")
        self.tracker, self.on_error, self.waiting = tracker, on_error, b""
        kept = {(line["step"], *line): line for line in read(self.path) if line["step"] <= resume_step}
        with writing(self.path):
            temporary = self.path.with_suffix(".tmp")
            with temporary.open("w") as file:
                file.writelines(json.dumps(line) + "\n" for line in kept.values())
                file.flush()
                os.fsync(file.fileno())
            old = self.path.with_suffix(".old.jsonl")
            if resume_step < 0 and _size(self.path) > _size(old):
                os.replace(self.path, old)
            os.replace(temporary, self.path)
            self.file = self.path.open("ab", buffering=0)
        self._tell("recall", list(kept.values()))

    def log(self, step, tokens, **values):
        line = {"step": step, "tokens": tokens} | {name: _number(value) for name, value in values.items()}
        self._write(json.dumps(line).encode() + b"\n")
        self._tell("log", line)

    def sync(self):
        """Every line so far outlives a power failure. Comes before a checkpoint, whose steps are not trained again."""
        self._write(b"", sync=True)

    def close(self):
        self.on_error = "stop"
        self.sync()
        self.file.close()
        self._tell("finish")

    def _write(self, lines, sync=False):
        """Lines that wait, and these; no line at all rather than half of one."""
        lines, length = self.waiting + lines, os.fstat(self.file.fileno()).st_size
        try:
            with writing(self.path):
                rest = memoryview(lines)
                while rest:
                    rest = rest[self.file.write(rest) :]
                if sync:
                    os.fsync(self.file.fileno())
            self.waiting = b""
        except RunError as error:
            self.file.truncate(length)
            if self.on_error == "stop":
                raise
            if not self.waiting:
                tqdm.write(f"warning: {error}")
            self.waiting = lines

    def _tell(self, method, *arguments):
        if not self.tracker:
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:  # whatever it is: the numbers are in the file
            self.tracker = None
            tqdm.write(
                f"wandb: {method} failed ({reason(error)}): on without it. {self.path} has every number; what wandb "
                f"has got of them, `wandb sync {self.path.parent}/wandb/*run-*` sends"
            )


def read(path):
    """The lines of a metrics.jsonl, none if it is not there: dicts of numbers and lists of them, `step` (an int)
    and `tokens` in each.

    A last line that a kill cut short, or that a power failure filled with NUL bytes, is left out. Raises RunError that
    names any other line which is none of these.
    """
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n") if Path(path).is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            record = None
        whole = isinstance(record, dict) and type(record.get("step")) is int and "tokens" in record
        if whole and _are_numbers(record.values()):
            records.append(record)
        elif number < len(lines):
            raise RunError(f"{path}, line {number} is no JSON object of numbers with step and tokens; remove that line")
    return records


def load_metrics(loads):
    """Expert loads (L, E), counts, in two numbers; empty for a dense model (L = 0).

    `load_imbalance` is the busiest expert's load over the mean load, averaged over layers: 1 when balanced, E / K at
    worst. `dead_experts` is the number, over all layers, of experts that no token chose.
    """
    if not len(loads):
        return {}
    imbalance, dead = imbalance_and_dead(loads)
    return {"load_imbalance": imbalance.mean(), "dead_experts": dead.sum()}


def imbalance_and_dead(loads):
    """Both numbers of `load_metrics` for each layer of (L, E): (L,) each."""
    return loads.amax(1) / loads.double().mean(1), (loads == 0).sum(1)


def reason(error):
    """What an exception of someone else's code says, in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _size(path):
    return path.stat().st_size if path.exists() else 0


def _are_numbers(values):
    return all(_are_numbers(value) if isinstance(value, list) else isinstance(value, int | float) for value in values)


def _number(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value
