"""Read runs, also while they train, and say whether their losses are of the same text.

Imports no torch.
"""

import math
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
from runtime.metrics import ARRAYS, read_metrics

REMEDY = "give them separate reports, or score both on one text: python -m eval.val_loss RUN --data SET_OR_FILE"


@dataclass(eq=False)
class Run:
    """A run's files, read."""

    folder: Path
    config: configure.Config
    # step: line with a finite validation loss
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)  # lines of training
    diverged: int | None = None  # step of the first validation loss that was not finite

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def max_steps(self) -> int:
        return self.config.train.max_steps

    @property
    def ended(self) -> bool:
        """Whether it was evaluated at its last step."""
        return self.max_steps in self.evaluations

    @property
    def progress(self) -> str:
        """How far it was evaluated, in words."""
        text = f"evaluated up to step {max(self.evaluations, default=0):,}"
        return text if self.diverged is None else f"{text}, loss not finite at {self.diverged:,}"

    @property
    def unit(self) -> str:
        """Of its losses: tokens are bytes where the vocabulary is that of bytes."""
        return (
            "nats per byte"
            if self.config.model.vocab_size == ByteTokenizer.vocab_size
            else "nats per token"
        )

    def value(self, key: str) -> Any:
        """The config's value of a dotted key, as reports compare it; a mixture in words, and no data.name beside it.

        A key without effect has its default. A balance loss over micro-batches is another for each
        of their sizes.
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
        """`value` of each key."""
        return tuple(self.value(key) for key in keys)

    def series(self, name: str) -> dict[int, float]:
        """{step: value} of the lines of metrics.jsonl that have the name."""
        return {
            line["step"]: line[name]
            for line in [*self.evaluations.values(), *self.logs]
            if name in line
        }

    def count_windows(self) -> int:
        """Validation windows of an evaluation."""
        lines = [
            line["val/window_losses"]
            for line in self.evaluations.values()
            if "val/window_losses" in line
        ]
        return len(lines[-1]) if lines else self.config.eval.windows

    def identity(self) -> dict[str, Any]:
        """sha256 of data and tokenizer by the run's last checkpoint; {} without an intact one."""
        from runtime import checkpoint  # imports torch

        folder = self.folder / "checkpoints"
        steps = checkpoint.steps(folder)
        try:
            return (
                checkpoint.read_manifest(checkpoint.folder_of(folder, steps[-1]))["facts"]
                if steps
                else {}
            )
        except RunError:  # the numbers are in metrics.jsonl all the same
            return {}


def load_run(folder: Path) -> Run:
    """Read a run's config and metrics, in whatever state it is.

    Raises:
        ValueError: the folder is not a run. RunError or ConfigError of a broken file is one too.
    """
    check_is_run(folder)
    run = Run(folder, configure.load(folder / "config.toml"))
    for line in read_metrics(
        folder / "metrics.jsonl", [name for name in ARRAYS if name.startswith("val/")]
    ):
        if "val/window_weights" in line:  # of a mixture: so their mean is val/loss
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


def load_evaluated(places: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The runs at these places and below that have a finite validation loss, and why others are left out.

    A report's folder is not named. Raises ValueError if no run is left.
    """
    runs, faults = [], []
    for place in places:
        is_report = (place / "report.html").is_file()
        for folder in find_runs([place]) or ([] if is_report else [place]):
            if folder in [run.folder for run in runs]:
                continue
            try:
                run = load_run(folder)
            except ValueError as error:
                faults.append(" ".join(str(error).split()))
                continue
            if run.evaluations:
                runs.append(run)
            elif run.diverged is not None:
                faults.append(f"{folder}: diverged; lower optim.lr, or leave it out")
            else:
                faults.append(
                    f"{folder}: not evaluated yet; continue with train.py, or leave it out"
                )
    if not runs:
        raise ValueError(
            faults[0]
            if faults
            else "no run among the folders; give some such as runs/quickstart-kern"
        )
    return runs, [f"left out: {fault}" for fault in faults]


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The folders with a config.toml at `places` and below, in order of their names."""
    return sorted({file.parent for place in places for file in place.rglob("config.toml")})


def find_other_text(runs: Sequence[Run]) -> str:
    """Why the runs' losses cannot be paired: other data, tokenizer, length or windows; "" if they can."""
    identities = [run.identity() for run in runs]
    keys = select_keys("validation_text")
    if all(identities):  # they tell the data
        keys = [key for key in keys if not key.startswith("data.")]
    seen: dict[str, tuple[Any, Run]] = {}  # what: its value in the first run that has it
    for run, identity in zip(runs, identities, strict=True):
        facts = {
            f"{name} (sha256 in their checkpoints)": identity.get(name)
            for name in ("data", "tokenizer")
        }
        facts |= {key: run.value(key) for key in keys} | {
            "number of validation windows": run.count_windows()
        }
        for name, value in facts.items():
            first, other = seen.setdefault(name, (value, run)) if value is not None else (None, run)
            if first != value:
                return (
                    f"{other.folder} and {run.folder}: {name} is {str(first):.20} and {str(value):.20}, so their "
                    f"losses are of different text; {REMEDY}"
                )
    return ""
