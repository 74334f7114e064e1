"""A run's numbers: metrics.jsonl and arrays/ in its folder, trackers (wandb, TensorBoard) on request; what loads say.

Numbers, and lists of them by layer, are in metrics.jsonl: a short JSON object per line. Larger
arrays, by window or by expert (ARRAYS), are in arrays/val_STEP.npz and arrays/router_STEP.npz,
which np.load reads: `step` (n,) and each name (n, ...), for the n steps logged since the last such
file, up to STEP. They are written at each evaluation and before each checkpoint. Older runs have
the arrays in metrics.jsonl, as lists.
"""

import io
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from common.files import write_atomic
from common.text import first_line
from runtime import RunError, describe_write_errors

if TYPE_CHECKING:  # scripts.watch imports this module without torch
    from torch import Tensor

# Nats per token (W,); equal numbers where windows are of one document (W,); each window's weight in
# the mean, 1 on average, of a mixture (W,); tokens (L, E), of a step in training.
ARRAYS = (
    "val/window_losses",
    "val/window_documents",
    "val/window_weights",
    "val/loads",
    "router/loads",
)
# names in the lines to which the arrays of a section belong
LINES = {"val": "val/loss", "router": "train/loss"}


class Metrics:
    """Writes both, each line with `step` and `tokens` (seen in training so far).

    Rank 0 alone has one.

    Inf and NaN are written `Infinity` and `NaN`, as Python's json writes and reads them. Trackers
    get the lines that exist and each new one, the new ones with their arrays; one that fails is
    dropped with one printed line. Where a file cannot be written, methods raise RunError or, if
    `on_error` is "warn", print it once and try again with the next line; `close` raises it in any
    case.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_step: int,
        trackers: Sequence[Any] = (),
        on_error: str = "stop",
    ) -> None:
        """Open the files of the run in `folder` and drop what the resumed run will write again.

        That are lines and arrays after `resume_step`; below 0 all go to metrics.old.jsonl and
        arrays.old. Of lines with the same step and names the last is kept. Raises RunError if the
        file cannot be written, or has other lines.
        """
        self.path, self.arrays = Path(folder, "metrics.jsonl"), Path(folder, "arrays")
        self.trackers, self.on_error = [*trackers], on_error
        self.pending_lines = b""
        # {section: {step: {name: array}}}
        self.pending_arrays: dict[str, dict[int, dict[str, Any]]] = {}
        self.failing = False  # to write: one warning is enough
        lines = read_metrics(self.path)
        kept = {(line["step"], *line): line for line in lines if line["step"] <= resume_step}
        first, last = max(resume_step, 0) + 1, max((line["step"] for line in lines), default=0)
        if last >= first:
            reason = (
                f"resumed from the checkpoint of step {first - 1}" if first > 1 else "no checkpoint"
            )
            print(f"{self.path}: {reason}, so its steps {first:,} to {last:,} begin again")
        with describe_write_errors(self.path):
            if resume_step < 0:
                self._keep_old(len(lines))
            dropped = [file for file in list_arrays(self.path) if int(file.stem[-8:]) > resume_step]
            for file in [*dropped, *self.arrays.glob("*.tmp")]:
                file.unlink()
            write_atomic(
                self.path, "".join(json.dumps(line) + "\n" for line in kept.values()), durable=True
            )
            self.file = self.path.open("ab", buffering=0)
        self._tell("recall", list(kept.values()))

    def _keep_old(self, lines: int) -> None:
        """Keep the files of a run that starts over, unless those kept before have as many `lines` or more."""
        old = self.path.with_suffix(".old.jsonl")
        if lines <= len(read_metrics(old)):
            return
        write_atomic(old, self.path.read_bytes())
        if self.arrays.is_dir():
            shutil.rmtree(self.arrays.with_suffix(".old"), ignore_errors=True)
            self.arrays.rename(self.arrays.with_suffix(".old"))

    def log(self, step: int, tokens: int, **values: "Tensor | float") -> None:
        """Append a line.

        Tensors are copied to the host; those of ARRAYS wait for an evaluation, `sync` or `close`.
        """
        line: dict[str, Any] = {"step": step, "tokens": tokens}
        line |= {
            name: value if isinstance(value, int | float) else value.tolist()
            for name, value in values.items()
        }
        for name in line.keys() & ARRAYS:
            self.pending_arrays.setdefault(name.split("/")[0], {}).setdefault(step, {})[name] = (
                line[name]
            )
        self.pending_lines += (
            json.dumps({name: line[name] for name in line if name not in ARRAYS}).encode() + b"\n"
        )
        # before its line, which says that this evaluation is done
        self._write(arrays="val" in self.pending_arrays)
        self._tell("log", line)

    def sync(self) -> None:
        """Make every line and array so far survive a power failure."""
        self._write(arrays=True, sync=True)

    def close(self, failed: bool = False) -> None:
        """Write what is pending, close the file and end the trackers' run, which is marked as `failed`."""
        self.on_error = "stop"
        try:
            self.sync()
        except RunError:
            failed = True
            raise
        finally:
            self.file.close()
            self._tell("finish", int(failed))

    def _write(self, arrays: bool, sync: bool = False) -> None:
        """Write the pending lines, and with `arrays` those before; where that fails they stay pending."""
        try:
            if arrays:
                self._write_arrays()
            self._write_lines(sync)
            self.failing = self.failing and not arrays
        except RunError as error:
            if self.on_error == "stop":
                raise
            if not self.failing:
                tqdm.write(f"warning: {error}")
            self.failing = True

    def _write_arrays(self) -> None:
        for section, rows in [*self.pending_arrays.items()]:
            file, data = self.arrays / f"{section}_{max(rows):08}.npz", io.BytesIO()
            names = {name for row in rows.values() for name in row}
            arrays = {
                name: np.array([row[name] for row in rows.values()]) for name in sorted(names)
            }
            np.savez_compressed(data, allow_pickle=False, step=[*rows], **arrays)
            with describe_write_errors(file):
                self.arrays.mkdir(exist_ok=True)
                write_atomic(file, data.getvalue(), durable=True)
            del self.pending_arrays[section]

    def _write_lines(self, sync: bool) -> None:
        """Append the pending lines, all or nothing."""
        length = os.fstat(self.file.fileno()).st_size
        try:
            with describe_write_errors(self.path):
                rest = memoryview(self.pending_lines)
                while rest:
                    rest = rest[self.file.write(rest) :]
                if sync:
                    os.fsync(self.file.fileno())
        except RunError:
            self.file.truncate(length)  # no half of a line
            raise
        self.pending_lines = b""

    def _tell(self, method: str, *arguments: Any) -> None:
        for tracker in [*self.trackers]:
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # whatever it is: the numbers are in the file
                self.trackers.remove(tracker)
                problem = f"{tracker.name}: {method} failed ({first_line(error)})"
                tqdm.write(
                    f"{problem}: continuing without it. {self.path} has every number{tracker.remedy}"
                )


def read_metrics(path: str | Path, arrays: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none if it does not exist.

    A last line that a kill cut short, or that a power failure filled with NUL bytes, is left out.

    Args:
        path: the file.
        arrays: those of ARRAYS to add to the lines where they were logged, as lists; older runs
            have all of them.

    Returns:
        Dicts of numbers and lists of numbers, `step` (int) and `tokens` in each.

    Raises:
        RunError: any other line is of another kind, or a file of arrays is damaged; it is named.
    """
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n") if Path(path).is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse_line(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            problem = "is not a JSON object of numbers with step and tokens; remove that line"
            raise RunError(f"{path}, line {number} {problem}")
    for section in {name.split("/")[0] for name in arrays}:
        rows: dict[int, dict[str, np.ndarray]] = {}
        for file in list_arrays(path, section):
            rows |= load_arrays(file, [name for name in arrays if name.startswith(section)])
        for record in records:
            if LINES[section] in record:
                record |= {
                    name: value.tolist() for name, value in rows.get(record["step"], {}).items()
                }
    return records


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode())
        is_record = (
            isinstance(record, dict) and type(record.get("step")) is int and "tokens" in record
        )
        return record if is_record and _are_numbers(record.values()) else None
    except (ValueError, RecursionError):
        return None


def list_arrays(path: str | Path, section: str = "*") -> list[Path]:
    """The files of arrays beside the metrics.jsonl at `path`; of one section, `val` or `router`, in order of steps."""
    return sorted(Path(path).with_name("arrays").glob(f"{section}_{8 * '[0-9]'}.npz"))


def load_arrays(file: Path, names: Sequence[str]) -> dict[int, dict[str, np.ndarray]]:
    """{step: {name: array}} of a file of arrays, of those `names` that it has.

    Raises RunError if it is damaged.
    """
    try:
        with np.load(file) as data:
            columns = {name: data[name] for name in names if name in data}
            return {
                int(step): {name: columns[name][i] for name in columns}
                for i, step in enumerate(data["step"])
            }
    except Exception as error:  # numpy and zipfile raise many kinds
        raise RunError(
            f"{file} is damaged ({first_line(error)}); remove it: the run does without it"
        ) from error


def load_metrics(loads: "Tensor") -> "dict[str, Tensor]":
    """Two numbers that summarise expert loads (L, E), tokens per expert.

    `load_imbalance` is the busiest expert's load over the mean load, averaged over layers: 1 when
    balanced, E / K at worst. `dead_experts` is the number, over all layers, of experts that no
    token chose.
    """
    imbalance, dead = imbalance_and_dead(loads)
    return {"load_imbalance": imbalance.mean(), "dead_experts": dead.sum()}


def gate_metrics(zeros: "Tensor", square: "Tensor", total: "Tensor") -> "dict[str, Tensor]":
    """The scale of the gates, by layer and as the mean over layers.

    Args:
        zeros: (L,) fraction of the chosen gates that are exactly 0.
        square: (L,) mean over tokens of Σ g², over the K gates of a token.
        total: (L,) mean over tokens of Σ g.

    Returns:
        `zero_gates` (); `gate_norm`: √E‖g‖², and `gate_sum`: E Σ g; each () and, with `_of_layers`,
        (L,).
    """
    norm = square.sqrt()
    means = {"zero_gates": zeros.mean(), "gate_norm": norm.mean(), "gate_sum": total.mean()}
    return means | {"gate_norm_of_layers": norm, "gate_sum_of_layers": total}


def imbalance_and_dead(loads: "Tensor") -> "tuple[Tensor, Tensor]":
    """Both numbers of `load_metrics` for each layer of (L, E): (L,) each."""
    return loads.amax(1) / loads.double().mean(1), (loads == 0).sum(1)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(
        _are_numbers(value) if isinstance(value, list) else isinstance(value, int | float)
        for value in values
    )
