"""Read runs, also while they train, and check that their losses are of one text.

Imports no torch.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import configure
from configure.schema import KEYS, has_effect, select_keys
from data.tokenizer import ByteTokenizer
from runtime import RunError, check_is_run
from runtime.manifest import read_newest_metadata
from runtime.metrics import (
    ARRAYS,
    Steps,
    collect_steps,
    describe_missing,
    find_damage,
    find_missing_steps,
    list_arrays,
    read_metrics,
)
from runtime.settings import check_model_settings

VALIDATION_ARRAYS = [name for name in ARRAYS if name.startswith("val/")]
REMEDY = (
    "give them separate reports, or score both on one text: "
    "python -m eval.val_loss RUN --data SET_OR_FILE"
)


@dataclass(eq=False)
class Run:
    """A run's files, read."""

    folder: Path
    config: configure.Config
    # {step: line of metrics.jsonl with a finite validation loss}
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)  # lines with a training loss
    diverged: int | None = None  # step of the first validation loss that was not finite
    missing: Steps = field(default_factory=dict)  # steps that had lines by its last checkpoint
    faults: list[str] = field(default_factory=list)  # of its metrics and arrays

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def max_steps(self) -> int:
        return self.config.train.max_steps

    @property
    def ended(self) -> bool:
        """True if it was evaluated at its last step."""
        return self.max_steps in self.evaluations

    @property
    def progress(self) -> str:
        """The last evaluated step, as text."""
        text = f"evaluated up to step {max(self.evaluations, default=0):,}"
        if self.diverged is not None:
            text += f", loss not finite at {self.diverged:,}"
        return text

    @property
    def unit(self) -> str:
        """The unit of its losses; with a vocabulary of bytes, tokens are bytes."""
        if self.config.model.vocab_size == ByteTokenizer.vocab_size:
            return "nats per byte"
        return "nats per token"

    def value(self, key: str) -> Any:
        """The config's value of a dotted key, as reports compare it; a mixture as text.

        A key without effect has its default. A mixture's data.name is empty: the mixture says it
        all. A balance loss over micro-batches depends on their size, so its scope names the size.
        """
        schema = KEYS[key]
        if not has_effect(key, self.value):
            return schema["default"]
        value = attrgetter(key)(self.config)
        if value in schema["report_as"]:
            return schema["report_as"][value]
        if key == "data.name" and self.config.data.mix:
            return ""
        if key == "train.balance_loss_scope" and value == "micro_batch":
            return f"{value} of {self.config.train.micro_batch_size}"
        return str(value) if isinstance(value, dict) else value

    def values(self, keys: Iterable[str]) -> tuple[Any, ...]:
        """The `value` of each key."""
        return tuple(self.value(key) for key in keys)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl that has a loss: evaluations, then logs."""
        return [*self.evaluations.values(), *self.logs]

    def series(self, name: str) -> dict[int, float]:
        """{step: value} of a name in metrics.jsonl."""
        return {line["step"]: line[name] for line in self.lines if name in line}

    def count_windows(self) -> int:
        """The number of validation windows of an evaluation."""
        count = self.config.eval.windows
        for line in self.evaluations.values():
            if "val/window_losses" in line:
                count = len(line["val/window_losses"])
        return count

    def check_config(self) -> None:
        """Raise RunError if the last checkpoint was trained with other settings than the config."""
        check_model_settings(self.config, self.identity(), self.folder)

    def identity(self) -> dict[str, Any]:
        """The metadata of the run's last checkpoint; {} without an intact one."""
        return read_newest_metadata(self.folder / "checkpoints")


def read_run(folder: Path) -> Run:
    """Read a run's config and metrics, in whatever state it is.

    Raises:
        ValueError: the folder is not a run. RunError or ConfigError of a broken file is one too.
    """
    check_is_run(folder)
    run = Run(folder, configure.load_recorded(folder / "config.toml"))
    metadata = run.identity()  # before the lines: those of a later checkpoint may be missing
    metrics = folder / "metrics.jsonl"
    lines = read_metrics(metrics, VALIDATION_ARRAYS)
    run.missing = find_missing_steps(collect_steps(lines), metadata)
    if run.missing:
        run.faults.append(describe_missing(metrics, run.missing))
    for file in list_arrays(metrics, "router"):  # the others have been read
        run.faults += find_damage(file)
    for line in lines:
        check_lists(folder, line)
        if "val/window_weights" in line:  # a mixture: the mean of weighted losses is val/loss
            line["val/window_losses"] = np.multiply(
                line["val/window_losses"], line["val/window_weights"]
            )
        if "train/loss" in line:
            run.logs.append(line)
        if math.isfinite(line.get("val/loss", math.nan)):
            run.evaluations[line["step"]] = line
        elif "val/loss" in line and run.diverged is None:
            run.diverged = line["step"]
    return run


def check_lists(folder: Path, line: dict[str, Any]) -> None:
    """Raise RunError if a line of metrics has a list in place of a number."""
    for name, value in line.items():
        is_list = name in ARRAYS or name.endswith("_of_layers")
        if isinstance(value, list) and not is_list:
            raise RunError(
                f"{folder}/metrics.jsonl, step {line['step']}: {name} is a list, expected a "
                "number; remove that line"
            )


def read_evaluated_runs(places: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs at these places and below that have a finite validation loss.

    Returns:
        The runs, and a note on each folder that is left out or has faults.

    Raises:
        ValueError: no run is left.
    """
    runs = []
    faults = []
    for folder in list_candidates(places):
        try:
            run = read_run(folder)
            run.check_config()
        except (OSError, ValueError) as error:
            faults.append(" ".join(str(error).split()))
            continue
        if run.evaluations:
            runs.append(run)
        elif run.diverged is not None:
            faults.append(f"{folder}: diverged; lower optim.lr, or leave it out")
        else:
            faults.append(f"{folder}: not evaluated yet; continue with train.py, or leave it out")
    if not runs and faults:
        raise ValueError(faults[0])
    if not runs:
        raise ValueError("no run among the folders; give some such as runs/quickstart-kern")
    notes = [f"left out: {fault}" for fault in faults]
    for run in runs:
        notes += run.faults
    return runs, notes


def list_candidates(places: Iterable[Path]) -> list[Path]:
    """The folders of runs at these places and below, and the places that hold no run.

    `read_run` says what is wrong with the latter. A folder with a report is not one of them.
    """
    folders: list[Path] = []
    for place in places:
        below = find_runs([place])
        has_report = (place / "report.html").is_file()
        if not below and not has_report:
            below = [place]
        folders += [folder for folder in below if folder not in folders]
    return folders


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The folders with a config.toml at `places` and below, in the order of their names.

    A folder that cannot be listed is one of them, because it may be a run; `read_run` then raises
    an error. Links to folders are followed at `places` alone.
    """
    folders: set[Path] = set()

    def add_unlisted(error: OSError) -> None:
        is_gone = not os.path.lexists(error.filename)
        if not is_gone and not isinstance(error, NotADirectoryError):
            folders.add(Path(error.filename))

    for place in places:
        for folder, below, files in os.walk(place, onerror=add_unlisted):
            if "config.toml" in files + below:
                folders.add(Path(folder))
    return sorted(folders)


def find_text_mismatch(runs: Sequence[Run]) -> str:
    """Why the runs' losses cannot be paired: other data, tokenizer, length or windows.

    "" if they can.
    """
    identities = [run.identity() for run in runs]
    keys = select_keys("validation_text")
    if all(identities):  # which identify the data better than its name
        keys = [key for key in keys if not key.startswith("data.")]
    first_with: dict[str, tuple[Any, Run]] = {}  # {name: its value in the first run that has one}
    for run, identity in zip(runs, identities, strict=True):
        properties = {
            "data (sha256 in their checkpoints)": identity.get("data"),
            "tokenizer (sha256 in their checkpoints)": identity.get("tokenizer"),
        }
        for key in keys:
            properties[key] = run.value(key)
        properties["number of validation windows"] = run.count_windows()
        for name, value in properties.items():
            if value is None:
                continue
            first_value, first_run = first_with.setdefault(name, (value, run))
            if value != first_value:
                return (
                    f"{first_run.folder} and {run.folder}: {name} is {str(first_value):.20} and "
                    f"{str(value):.20}, so their losses are of different text; {REMEDY}"
                )
    return ""
