"""metrics.jsonl and arrays/ of a run: written by a run that trains, read by everyone.

metrics.jsonl has a short JSON object per line: numbers, and lists of them by layer. Larger arrays,
by window or by expert (ARRAYS), are in arrays/val_STEP.npz and arrays/router_STEP.npz, which
np.load reads: `step` (n,) and each name (n, ...), for the n steps logged since the last such file,
up to STEP. They are written at each evaluation and before each checkpoint. Older runs have the
arrays in metrics.jsonl, as lists.

The first line has the id of the run and no losses, and each file of arrays has the id
(runtime.identity).
"""

import io
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic_core import from_json  # in half of json's time
from tqdm import tqdm

from common.files import exists, is_folder, list_matching, naming, write_atomic
from common.text import first_line
from runtime import RunError, describe_read_error, describe_write_errors
from runtime.identity import ID_FORM, RUN_ID, ForeignError, Identity, check_origin

if TYPE_CHECKING:  # scripts.watch imports this module without torch
    from torch import Tensor

VALIDATION_ARRAYS = (
    "val/window_losses",  # (W,) nats per token
    "val/window_documents",  # (W,) equal numbers for windows of one document
    "val/window_weights",  # (W,) weight of each window in the mean of a mixture, 1 on average
    "val/loads",  # (L, E) tokens
)
ARRAYS = (*VALIDATION_ARRAYS, "router/loads")  # the last: (L, E) tokens of a training step
# the first line
HEADER = re.compile(rf'{{"step": 0, "tokens": 0, "{RUN_ID}": "({ID_FORM})"}}\n'.encode())
LARGEST = 2**63 - 1  # integer that a line may have: numpy's int64

Line = dict[str, Any]  # `step`, `tokens`, and numbers or lists of numbers by name


class Metrics:
    """Writes lines and arrays, each line with `step` and `tokens` (seen in training so far).

    Rank 0 alone has one.

    Inf and NaN are written `Infinity` and `NaN`, as Python's json writes and reads them. The
    tracker gets the lines that exist and each new one, the new ones with their arrays; if it fails
    it is dropped with one printed line.

    If a file cannot be written, such as on a full disk, each method raises RunError: the run ends,
    and no checkpoint is saved whose lines are lost.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_step: int,
        tracker: Any = None,
        identity: Identity | None = None,
    ) -> None:
        """Open the files of the run in `folder`.

        Drops lines and arrays after `resume_step`, which the resumed run will write again. With
        resume_step < 0, moves everything to metrics.old.jsonl and arrays.old. Raises RunError if
        the file cannot be written, or has other lines.
        """
        self.path = Path(folder, "metrics.jsonl")
        self.old = Path(folder, "metrics.old.jsonl")
        self.arrays = Path(folder, "arrays")
        self.tracker = tracker
        self.identity = identity
        self.pending_arrays: dict[str, dict[int, Line]] = {"val": {}, "router": {}}  # by step
        lines = read_metrics(self.path)
        kept = [line for line in lines if line["step"] <= resume_step]
        first_step = max(resume_step, 0) + 1
        if lines and lines[-1]["step"] >= first_step:
            source = f"resumed from the checkpoint of step {resume_step}"
            if resume_step < 0:
                source = "no checkpoint"
            steps = f"{first_step:,} to {lines[-1]['step']:,}"
            print(f"{self.path}: {source}, so its steps {steps} begin again")
        with describe_write_errors(self.path):
            if resume_step < 0 and len(lines) > len(read_metrics(self.old)):
                self._keep_old()
            for file in list_matching(self.arrays, "*.tmp"):
                file.unlink()
            for file in list_arrays(self.path):
                if last_step_of(file) > resume_step:
                    file.unlink()
            header = [{"step": 0, "tokens": 0, RUN_ID: identity.id}] if identity else []
            text = "".join(json.dumps(line) + "\n" for line in [*header, *kept])
            write_atomic(self.path, text, durable=True)
            self.file = self.path.open("ab", buffering=0)
        self._call_tracker("resume", kept)

    def _keep_old(self) -> None:
        """Keep the files of a run that starts over."""
        write_atomic(self.old, self.path.read_bytes())
        if is_folder(self.arrays):
            old_arrays = self.arrays.with_suffix(".old")
            shutil.rmtree(old_arrays, ignore_errors=True)
            self.arrays.rename(old_arrays)

    def log(self, step: int, tokens: int, **values: "Tensor | np.ndarray | float") -> None:
        """Append a line.

        Tensors are copied to the host; arrays of ARRAYS wait for an evaluation, `sync` or `close`.
        """
        line: Line = {"step": step, "tokens": tokens}
        arrays: Line = {}
        for name, value in values.items():
            host_value = value if isinstance(value, int | float) else value.tolist()
            if name in ARRAYS:
                arrays[name] = host_value
                self.pending_arrays[prefix_of(name)].setdefault(step, {})[name] = host_value
            else:
                line[name] = host_value
        # Arrays come before the line, which says that this evaluation is done.
        if self.pending_arrays["val"]:
            self._write_arrays()
        with describe_write_errors(self.path):
            unwritten = memoryview(json.dumps(line).encode() + b"\n")
            while unwritten:  # a part may fit on the disk
                unwritten = unwritten[self.file.write(unwritten) :]
        self._call_tracker("log", line | arrays)

    def sync(self) -> None:
        """Make every line and array so far survive a power failure; RunError if that fails."""
        self._write_arrays()
        with describe_write_errors(self.path):
            os.fsync(self.file.fileno())

    def close(self, failed: bool = False) -> None:
        """Write the pending arrays, close the file, end the tracker's run as `failed` or not."""
        try:
            self.sync()
        except RunError:
            failed = True
            raise
        finally:
            self.file.close()
            self._call_tracker("finish", int(failed))

    def _write_arrays(self) -> None:
        """Write the pending arrays; after a RunError they still wait."""
        for prefix, rows in self.pending_arrays.items():
            if not rows:
                continue
            if self.identity:
                self.identity.check()
            file = self.arrays / f"{prefix}_{max(rows):08}.npz"
            save_arrays(file, rows, self.identity.id if self.identity else "")
            rows.clear()

    def _call_tracker(self, method: str, *arguments: Any) -> None:
        """Call a method of the tracker; drop it if it fails."""
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:  # whatever it is: the numbers are in the file
            problem = f"{self.tracker.name}: {method} failed ({first_line(error)})"
            tqdm.write(f"{problem}: continuing without it. {self.path} has every number")
            self.tracker = None


def prefix_of(name: str) -> str:
    """`val` of `val/loss`."""
    return name.partition("/")[0]


def read_metrics(path: str | Path) -> list[Line]:
    """The lines of a metrics.jsonl but the header; none if it does not exist.

    A last line that a kill cut short, or that a power failure filled with NUL bytes, is left out.

    Returns:
        Dicts of numbers and lists of numbers, `step` (int) and `tokens` in each.

    Raises:
        RunError: any other line is of another kind, such as one with a number beyond floats.
        ForeignError: the first line has the id of another run than its folder.
    """
    path = Path(path)
    lines: list[Line] = []
    if not exists(path):
        return lines
    with naming(path), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            header = HEADER.match(text) if number == 1 else None
            if header:
                check_origin(path, header[1].decode(), path.parent)
                continue
            line = _parse_line(text)
            if line is not None:
                lines.append(line)
            elif file.read(1) or text.rstrip().endswith(b"}"):  # a whole object, but a wrong one
                raise RunError(
                    f"{path}, line {number} is not a JSON object of numbers with step and "
                    "tokens; remove that line"
                )
    return lines


def _parse_line(text: bytes) -> Line | None:
    """The object of a line; None if it is not one of metrics.jsonl."""
    try:
        line = from_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or "tokens" not in line:
        return None
    for name, value in line.items():
        may_be_list = name in ARRAYS or name.endswith("_of_layers")
        if (isinstance(value, list) and not may_be_list) or not _are_numbers(value):
            return None
    return line if line["step"] >= 0 else None


def _are_numbers(value: Any) -> bool:
    """True for a number, and for a list of what is."""
    if isinstance(value, list):
        return all(map(_are_numbers, value))
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST)


def list_arrays(path: str | Path, prefix: str = "*") -> list[Path]:
    """The files of arrays next to the metrics.jsonl at `path`; of one prefix in order of steps."""
    return list_matching(Path(path).with_name("arrays"), f"{prefix}_{8 * '[0-9]'}.npz")


def last_step_of(file: Path) -> int:
    """The last step in a file of arrays, from its name."""
    return int(file.stem[-8:])


def save_arrays(file: Path, rows: dict[int, Line], run_id: str) -> None:
    """Write the arrays of some steps to one file. Raises RunError if that fails."""
    arrays = {"step": np.array(list(rows)), RUN_ID: np.array(run_id)}
    for name in next(iter(rows.values())):  # all have the same
        arrays[name] = np.array([row[name] for row in rows.values()])
    data = io.BytesIO()
    np.savez_compressed(data, allow_pickle=False, **arrays)
    with describe_write_errors(file):
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, data.getvalue(), durable=True)


def copy_arrays(source: Path, target: Path, last_step: int, run_id: str) -> None:
    """Copy arrays up to a step from the run in `source` to that in `target`, with its id.

    A file ends at each checkpoint. Raises RunError if one is damaged or cannot be written.
    """
    for file in list_arrays(source / "metrics.jsonl"):
        if last_step_of(file) <= last_step:
            save_arrays(target / "arrays" / file.name, load_arrays(file, ARRAYS), run_id)


def load_arrays(file: Path, names: Sequence[str]) -> dict[int, Line]:
    """{step: {name: array, as lists}} of a file of arrays, for those of `names` that it has.

    Raises RunError if it is damaged.
    """
    rows: dict[int, Line] = {}
    try:
        content = file.read_bytes()
    except OSError as error:
        raise describe_read_error(file, error) from error
    try:
        with np.load(io.BytesIO(content)) as data:
            if RUN_ID in data.files:
                check_origin(file, str(data[RUN_ID]), file.absolute().parents[1])
            for step in data["step"]:
                rows[int(step)] = {}
            for name in set(names) & set(data.files):
                for row, array in zip(rows.values(), data[name], strict=True):
                    row[name] = array.tolist()
    except ForeignError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds
        raise RunError(
            f"{file} is damaged ({first_line(error)}); remove it: the run does without it"
        ) from error
    return rows
