"""Write metrics.jsonl and arrays/, forward lines to trackers (wandb, TensorBoard), read lines.

metrics.jsonl has a short JSON object per line: numbers, and lists of them by layer. Larger arrays,
by window or by expert (ARRAYS), are in arrays/val_STEP.npz and arrays/router_STEP.npz, which
np.load reads: `step` (n,) and each name (n, ...), for the n steps logged since the last such file,
up to STEP. They are written at each evaluation and before each checkpoint. Older runs have the
arrays in metrics.jsonl, as lists.
"""

import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from common.files import write_atomic
from common.text import first_line, plural
from runtime import RunError, describe_write_errors

if TYPE_CHECKING:  # scripts.watch imports this module without torch
    from torch import Tensor

ARRAYS = (
    "val/window_losses",  # (W,) nats per token
    "val/window_documents",  # (W,) equal numbers for windows of one document
    "val/window_weights",  # (W,) weight of each window in the mean of a mixture, 1 on average
    "val/loads",  # (L, E) tokens
    "router/loads",  # (L, E) tokens of a training step
)
# {prefix of arrays: a name in the lines that they belong to}
LINES = {"val": "val/loss", "router": "train/loss"}
LOGGED = "logged"  # key of a checkpoint's metadata: ranges of the steps that have lines

Steps = dict[str, set[int]]  # steps with lines by a value of LINES

MAX_STEPS = 10**7  # with lines; a run has fewer
FLOAT_BITS = sys.float_info.max_exp  # an integer with as many bits may be too large for a float

Line = dict[str, Any]  # `step`, `tokens`, and numbers or lists of numbers by name


def prefix_of(name: str) -> str:
    """`val` of `val/loss`."""
    return name.partition("/")[0]


class ArrayBuffer:
    """Arrays of one prefix, "val" or "router", that wait to be written to one file."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.rows: dict[int, dict[str, Any]] = {}  # {step: {name: nested lists}}

    def add(self, step: int, name: str, array: Any) -> None:
        row = self.rows.setdefault(step, {})
        row[name] = array

    def write(self, folder: Path) -> None:
        """Write the arrays to a file in `folder`, and forget them; RunError if that fails."""
        if not self.rows:
            return
        columns: dict[str, list] = {"step": list(self.rows)}
        for name in sorted({name for row in self.rows.values() for name in row}):
            columns[name] = [row[name] for row in self.rows.values()]
        data = io.BytesIO()
        arrays = {name: np.array(column) for name, column in columns.items()}
        np.savez_compressed(data, allow_pickle=False, **arrays)
        file = folder / f"{self.prefix}_{max(self.rows):08}.npz"
        with describe_write_errors(file):
            folder.mkdir(exist_ok=True)
            write_atomic(file, data.getvalue(), durable=True)
        self.rows = {}


class Metrics:
    """Writes lines and arrays, each line with `step` and `tokens` (seen in training so far).

    Rank 0 alone has one.

    Inf and NaN are written `Infinity` and `NaN`, as Python's json writes and reads them. Trackers
    get the lines that exist and each new one, the new ones with their arrays; one that fails is
    dropped with one printed line. If a file cannot be written, methods raise RunError or, if
    `on_error` is "warn", print it once and try again with the next line; `close` raises it in any
    case.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_step: int,
        trackers: Sequence[Any] = (),
        on_error: str = "stop",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files of the run in `folder`.

        Prints a warning if lines are missing that the checkpoint with this `metadata` knows, or if
        arrays are damaged.

        Drops lines and arrays after `resume_step`, which the resumed run will write again. With
        resume_step < 0, moves everything to metrics.old.jsonl and arrays.old. Of lines with the
        same step and names the last is kept. Raises RunError if the file cannot be written, or has
        other lines.
        """
        self.path = Path(folder, "metrics.jsonl")
        self.arrays = Path(folder, "arrays")
        self.trackers = list(trackers)
        self.on_error = on_error
        self.pending_lines = b""
        self.buffers = {prefix: ArrayBuffer(prefix) for prefix in LINES}
        self.failing = False  # a warning was printed: one is enough
        lines = read_metrics(self.path)
        kept = {}
        for line in lines:
            if line["step"] <= resume_step:
                kept[line["step"], *line] = line
        self._announce_repeats(lines, resume_step)
        self.logged = collect_steps(kept.values())
        self._warn_of_faults(metadata or {}, resume_step)
        with describe_write_errors(self.path):
            if resume_step < 0:
                self._keep_old(len(lines))
            for file in self.arrays.glob("*.tmp"):
                file.unlink()
            for file in list_arrays(self.path):
                if last_step_of(file) > resume_step:
                    file.unlink()
            text = "".join(json.dumps(line) + "\n" for line in kept.values())
            write_atomic(self.path, text, durable=True)
            self.file = self.path.open("ab", buffering=0)
        self._call_trackers("recall", list(kept.values()))

    @property
    def metadata(self) -> dict[str, Any]:
        """What a checkpoint needs, to tell later if lines are missing."""
        ranges = {name: to_ranges(steps) for name, steps in self.logged.items()}
        return {LOGGED: ranges}

    def _warn_of_faults(self, metadata: Mapping[str, Any], resume_step: int) -> None:
        """Print what is missing or damaged up to the checkpoint; its steps stay known as logged."""
        missing = find_missing_steps(self.logged, metadata)
        faults = [describe_missing(self.path, missing)] if missing else []
        for file in list_arrays(self.path):
            if last_step_of(file) <= resume_step:
                faults += find_damage(file)
        for fault in faults:
            print(f"warning: {fault}", flush=True)
        for name, steps in missing.items():
            self.logged[name] |= steps

    def _announce_repeats(self, lines: Sequence[Line], resume_step: int) -> None:
        """Print a line if steps that have lines are trained again."""
        first = max(resume_step, 0) + 1
        last = max((line["step"] for line in lines), default=0)
        if last < first:
            return
        reason = "no checkpoint"
        if resume_step > 0:
            reason = f"resumed from the checkpoint of step {resume_step}"
        print(f"{self.path}: {reason}, so its steps {first:,} to {last:,} begin again")

    def _keep_old(self, n_line: int) -> None:
        """Keep the files of a run that starts over, unless the kept ones have as many lines."""
        old = self.path.with_suffix(".old.jsonl")
        if n_line <= len(read_metrics(old)):
            return
        write_atomic(old, self.path.read_bytes())
        if self.arrays.is_dir():
            shutil.rmtree(self.arrays.with_suffix(".old"), ignore_errors=True)
            self.arrays.rename(self.arrays.with_suffix(".old"))

    def log(self, step: int, tokens: int, **values: "Tensor | np.ndarray | float") -> None:
        """Append a line.

        Tensors are copied to the host; arrays of ARRAYS wait for an evaluation, `sync` or `close`.
        """
        numbers: Line = {"step": step, "tokens": tokens}
        arrays: Line = {}
        for name, value in values.items():
            host_value = value if isinstance(value, int | float) else value.tolist()
            if name in ARRAYS:
                arrays[name] = host_value
                self.buffers[prefix_of(name)].add(step, name, host_value)
            else:
                numbers[name] = host_value
        self.pending_lines += json.dumps(numbers).encode() + b"\n"
        for name in self.logged.keys() & numbers.keys():
            self.logged[name].add(step)
        # Arrays come before the line, which says that this evaluation is done.
        self._write(arrays=bool(self.buffers["val"].rows))
        self._call_trackers("log", numbers | arrays)

    def sync(self) -> None:
        """Make every line and array so far survive a power failure."""
        self._write(arrays=True, sync=True)

    def close(self, failed: bool = False) -> None:
        """Write all that is pending, close the file, end the trackers' run as `failed` or not."""
        self.on_error = "stop"
        try:
            self.sync()
        except RunError:
            failed = True
            raise
        finally:
            self.file.close()
            self._call_trackers("finish", int(failed))

    def _write(self, arrays: bool, sync: bool = False) -> None:
        """Write the pending lines, before them `arrays`; after a failure they stay pending."""
        try:
            if arrays:
                for buffer in self.buffers.values():
                    buffer.write(self.arrays)
            self._write_lines(sync)
            self.failing = self.failing and not arrays
        except RunError as error:
            if self.on_error == "stop":
                raise
            if not self.failing:
                tqdm.write(f"warning: {error}")
            self.failing = True

    def _write_lines(self, sync: bool) -> None:
        """Append the pending lines, all or nothing."""
        length = os.fstat(self.file.fileno()).st_size
        try:
            with describe_write_errors(self.path):
                unwritten = memoryview(self.pending_lines)
                while unwritten:
                    unwritten = unwritten[self.file.write(unwritten) :]
                if sync:
                    os.fsync(self.file.fileno())
        except RunError:
            self.file.truncate(length)  # no half of a line
            raise
        self.pending_lines = b""

    def _call_trackers(self, method: str, *arguments: Any) -> None:
        """Call a method of each tracker; drop those that fail."""
        for tracker in list(self.trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # whatever it is: the numbers are in the file
                self.trackers.remove(tracker)
                problem = f"{tracker.name}: {method} failed ({first_line(error)})"
                tqdm.write(
                    f"{problem}: continuing without it. {self.path} has every "
                    f"number{tracker.remedy}"
                )


def read_metrics(path: str | Path, arrays: Sequence[str] = ()) -> list[Line]:
    """The lines of a metrics.jsonl; none if it does not exist.

    A last line that a kill cut short, or that a power failure filled with NUL bytes, is left out.

    Args:
        path: the file.
        arrays: names of ARRAYS to add to the lines they were logged with, as lists; older runs have
            all of them.

    Returns:
        Dicts of numbers and lists of numbers, `step` (int) and `tokens` in each.

    Raises:
        RunError: any other line is of another kind, such as one with a number beyond floats, or a
            file of arrays is damaged; it is named.
    """
    path = Path(path)
    if not path.exists():
        return []
    records = _read_lines(path)
    for prefix in {prefix_of(name) for name in arrays}:
        rows: dict[int, dict[str, np.ndarray]] = {}  # {step: {name: array}}
        for file in list_arrays(path, prefix):
            rows.update(load_arrays(file, arrays))
        for record in records:
            if LINES[prefix] in record:
                for name, array in rows.get(record["step"], {}).items():
                    record[name] = array.tolist()
    return records


def _read_lines(path: Path) -> list[Line]:
    """The lines of a file; see `read_metrics`."""
    if not path.is_file():  # opening a FIFO would wait for a process that writes to it
        raise RunError(f"{path} is not a regular file; remove it")
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse_line(line)
        if record is not None:
            records.append(record)
        elif number < len(lines) or line.endswith(b"}"):  # a whole object, but a wrong one
            problem = "is not a JSON object of numbers with step and tokens; remove that line"
            raise RunError(f"{path}, line {number} {problem}")
    return records


def _parse_line(line: bytes) -> Line | None:
    """The object of a line; None if it is not one of metrics.jsonl."""
    try:
        record = json.loads(line.decode())
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            return None
        if not 0 <= record["step"] < 2**63:  # numpy's integers
            return None
        return record if "tokens" in record and _are_numbers(record.values()) else None
    except (ValueError, RecursionError):
        return None


def list_arrays(path: str | Path, prefix: str = "*") -> list[Path]:
    """The files of arrays next to the metrics.jsonl at `path`; of one prefix in order of steps."""
    return sorted(Path(path).with_name("arrays").glob(f"{prefix}_{8 * '[0-9]'}.npz"))


def last_step_of(file: Path) -> int:
    """The last step in a file of arrays, from its name."""
    return int(file.stem[-8:])


def load_arrays(file: Path, names: Sequence[str] | None = None) -> dict[int, dict[str, np.ndarray]]:
    """{step: {name: array}} of a file of arrays, for the `names` that it has, or for all.

    Raises RunError if it is damaged.
    """
    rows = {}
    try:
        if not file.is_file():  # opening a FIFO would wait for a process that writes to it
            raise OSError("not a regular file")
        with np.load(file) as data:
            columns = {name: data[name] for name in names or data.files if name in data}
            for index, step in enumerate(data["step"]):
                rows[int(step)] = {name: column[index] for name, column in columns.items()}
    except Exception as error:  # numpy and zipfile raise many kinds
        raise RunError(
            f"{file} is damaged ({first_line(error)}); remove it: the run does without it"
        ) from error
    return rows


def find_damage(file: Path) -> list[str]:
    """The fault of a file of arrays; none if it is intact."""
    try:
        load_arrays(file)
    except RunError as error:
        return [str(error)]
    return []


def collect_steps(lines: Iterable[Line]) -> Steps:
    """The steps of lines with a validation loss, and of lines with a training loss."""
    steps: Steps = {name: set() for name in LINES.values()}
    for line in lines:
        for name in steps.keys() & line.keys():
            steps[name].add(line["step"])
    return steps


def find_missing_steps(present: Steps, metadata: Mapping[str, Any]) -> Steps:
    """The steps that a checkpoint's metadata knows and that have no line; {} if there are none."""
    missing = {}
    logged = metadata.get(LOGGED)
    for name in present:
        known: set[int] = set()
        if isinstance(logged, dict):
            known.update(*from_ranges(logged.get(name)))
        if known - present[name]:
            missing[name] = known - present[name]
    return missing


def describe_missing(path: Path, missing: Steps) -> str:
    """A line about steps without lines."""
    parts = []
    for name, steps in missing.items():
        span = f"step {min(steps)}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
        parts.append(f"{plural(len(steps), 'line')} with {name} ({span})")
    return (
        f"{path} is cut short or has a gap: {', '.join(parts)} that the last checkpoint knows are "
        "missing. The weights do not need them; put back a copy for reports"
    )


def find_contradictions(path: Path, lines: Sequence[Line], max_steps: int) -> list[str]:
    """A line about the first value, step and order of lines that no run of max_steps writes."""
    twice = backwards = beyond = ""
    values: dict[tuple[int, str], float] = {}
    last_step = 0
    for line in lines:
        step = line["step"]
        if step < last_step:
            backwards = backwards or f"step {step} comes after step {last_step}"
        if step > max_steps:
            beyond = beyond or f"step {step} is beyond the run's {max_steps} steps"
        last_step = step
        for name, value in line.items():
            if isinstance(value, list):
                continue
            earlier = values.setdefault((step, name), value)
            if str(value) != str(earlier):  # NaN equals NaN here
                twice = twice or f"step {step} has {name} {earlier} and {value}"
    faults = [fault for fault in (twice, backwards, beyond) if fault]
    if not faults:
        return []
    return [f"{path} was changed: {'; '.join(faults)}. Put back a copy, or remove those lines"]


def to_ranges(steps: Iterable[int]) -> list[list[int]]:
    """Steps as [first, last, spacing], in order."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges:
            first, last, spacing = ranges[-1]
            if first == last or step - last == spacing:
                ranges[-1] = [first, step, step - last]
                continue
        ranges.append([step, step, 1])
    return ranges


def from_ranges(ranges: Any) -> list[range]:
    """The steps that `to_ranges` wrote; none if it is no such list, or would fill the memory."""
    try:
        steps = [range(first, last + 1, spacing) for first, last, spacing in ranges]
        count = sum(len(part) for part in steps)
    except (TypeError, ValueError, OverflowError):
        return []
    return steps if count <= MAX_STEPS else []


def _are_numbers(values: Iterable[Any]) -> bool:
    """True for numbers that floats can hold and lists of them, nested."""
    for value in values:
        if isinstance(value, list):
            if not _are_numbers(value):
                return False
        elif isinstance(value, int):
            if value.bit_length() >= FLOAT_BITS:
                return False
        elif not isinstance(value, float):
            return False
    return True
