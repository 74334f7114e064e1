"""A run's numbers: runs/<name>/metrics.jsonl always, a tracker (runtime/tracker.py) on request; and what loads say."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from runtime import RunError, describe_write_errors
from runtime.output import first_line, write_atomic


class Metrics:
    """Appends one JSON object per line, each with `step` and `tokens` (seen in training so far). Rank 0 alone has one.

    Values are numbers, or lists of them by layer, expert or window; Inf and NaN are written `Infinity` and `NaN`, as
    Python's json writes and reads them. A tracker gets the lines that exist and each new one; one that fails is dropped
    with one printed line. Where the file cannot be written, methods raise RunError or, if `on_error` is "warn", print
    it once and try again with the next line; `close` raises it in any case.
    """

    def __init__(self, folder: str | Path, resume_step: int, tracker: Any = None, on_error: str = "stop") -> None:
        """Open the file and drop what the resumed run will write again.

        Args:
            folder: of the run.
            resume_step: lines after this step are dropped; below 0 all are, into metrics.old.jsonl. Of lines with
                the same step and names the last is kept.
            tracker: a runtime.tracker.Tracker; None: no wandb.
            on_error: "stop" or "warn".

        Raises:
            RunError: the file cannot be written, or has lines of another kind.
        """
        self.path = Path(folder, "metrics.jsonl")
        self.tracker, self.on_error, self.waiting = tracker, on_error, b""
        lines, old = read_metrics(self.path), self.path.with_suffix(".old.jsonl")
        kept = {(line["step"], *line): line for line in lines if line["step"] <= resume_step}
        with describe_write_errors(self.path):
            if resume_step < 0 and len(lines) > len(read_metrics(old)):
                write_atomic(old, self.path.read_bytes())
            write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in kept.values()), durable=True)
            self.file = self.path.open("ab", buffering=0)
        self._tell("recall", list(kept.values()))

    def log(self, step: int, tokens: int, **values: Tensor | float) -> None:
        """Append a line. Tensors are copied to the host."""
        line: dict[str, Any] = {"step": step, "tokens": tokens}
        line |= {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._write(json.dumps(line).encode() + b"\n")
        self._tell("log", line)

    def sync(self) -> None:
        """Make every line so far survive a power failure."""
        self._write(b"", sync=True)

    def close(self, failed: bool = False) -> None:
        """Write what is waiting, close the file and end the tracker's run, which is marked as `failed`."""
        self.on_error = "stop"
        try:
            self.sync()
        except RunError:
            failed = True
            raise
        finally:
            self.file.close()
            self._tell("finish", int(failed))

    def _write(self, lines: bytes, sync: bool = False) -> None:
        """Append the waiting lines and these; no line at all rather than half of one."""
        lines, length = self.waiting + lines, os.fstat(self.file.fileno()).st_size
        try:
            with describe_write_errors(self.path):
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

    def _tell(self, method: str, *arguments: Any) -> None:
        if not self.tracker:
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:  # whatever it is: the numbers are in the file
            self.tracker = None
            tqdm.write(
                f"wandb: {method} failed ({first_line(error)}): continuing without it. {self.path} has every number; "
                f"`wandb sync {self.path.parent}/wandb/*run-*` sends what wandb has got of them"
            )


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none if it does not exist.

    A last line that a kill cut short, or that a power failure filled with NUL bytes, is left out.

    Returns:
        Dicts of numbers and lists of numbers, `step` (int) and `tokens` in each.

    Raises:
        RunError: any other line is of another kind; it is named.
    """
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n") if Path(path).is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode())
            if type(record["step"]) is not int or "tokens" not in record or not _are_numbers(record.values()):
                raise ValueError
            records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                raise RunError(
                    f"{path}, line {number} is not a JSON object of numbers with step and tokens; remove that line"
                ) from None
    return records


def load_metrics(loads: Tensor) -> dict[str, Tensor]:
    """Two numbers that summarise expert loads; empty for a dense model.

    Args:
        loads: (L, E), tokens per expert; L = 0 for a dense model.

    Returns:
        `load_imbalance`: the busiest expert's load over the mean load, averaged over layers: 1 when balanced, E / K at
        worst. `dead_experts`: the number, over all layers, of experts that no token chose.
    """
    if not len(loads):
        return {}
    imbalance, dead = imbalance_and_dead(loads)
    return {"load_imbalance": imbalance.mean(), "dead_experts": dead.sum()}


def imbalance_and_dead(loads: Tensor) -> tuple[Tensor, Tensor]:
    """Both numbers of `load_metrics` for each layer of (L, E): (L,) each."""
    return loads.amax(1) / loads.double().mean(1), (loads == 0).sum(1)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(_are_numbers(value) if isinstance(value, list) else isinstance(value, int | float) for value in values)
