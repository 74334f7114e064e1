"""A run's files, read, and the values of its config as reports compare them. Imports no torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import configure
from configure.schema import KEYS, Mix, has_effect
from data.tokenizer import ByteTokenizer
from runtime.manifest import read_newest_metadata
from runtime.metrics import Steps
from runtime.settings import check_model_settings

NAMED_BY_VALUE = ("model.router", "data.name", "data.mix", "train.dtype")  # labels lack their keys


class Status(NamedTuple):
    """What a run does now.

    Attributes:
        state: "running" while a process holds its lock; "failed" if it ended with an error;
            "finished" if it was evaluated at its last step; "unknown" if it may train on another
            computer; else "stopped".
        step: the newest step of its metrics.
        trouble: the gravest problem, or why the state is unknown; "" without one.
    """

    state: str = "unknown"
    step: int = 0
    trouble: str = ""


@dataclass(eq=False)
class Run:
    """A run's files, read."""

    folder: Path
    config: configure.Config
    # {step: line of metrics.jsonl with a finite validation loss}
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)  # lines with a training loss
    # the first step of the last validation losses that were not finite
    diverged: int | None = None
    missing: Steps = field(default_factory=dict)  # steps that had lines by its last checkpoint
    faults: list[str] = field(default_factory=list)  # of its metrics and arrays
    status: Status = Status()

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
    def is_finished(self) -> bool:
        """True if its last loss counts: it was evaluated at its end, and did not fail."""
        return self.ended and self.status.state != "failed"

    @property
    def last_evaluated(self) -> int:
        """The step of its last finite validation loss; 0 without any."""
        return max(self.evaluations, default=0)

    @property
    def progress(self) -> str:
        """Its state and step, and what is wrong, as text."""
        text = f"{self.status.state} at step {self.status.step:,} of {self.max_steps:,}"
        return f"{text}: {self.status.trouble}" if self.status.trouble else text

    @cached_property
    def newest(self) -> dict[str, float]:
        """The newest value of each name in its metrics.

        `val/loss` is NaN if the last one was not finite.
        """
        values = {}
        for line in sorted(self.lines, key=lambda line: line["step"]):
            for name, value in line.items():
                if isinstance(value, int | float):
                    values[name] = value
        if self.diverged is not None and self.diverged >= self.last_evaluated:
            values["val/loss"] = math.nan
            values["step"] = max(self.diverged, values.get("step", 0))
        return values

    @property
    def unit(self) -> str:
        """The unit of its losses; with a vocabulary of bytes, tokens are bytes."""
        if self.config.model.vocab_size == ByteTokenizer.vocab_size:
            return "nats per byte"
        return "nats per token"

    def value(self, key: str) -> Any:
        """The config's value of a dotted key, as reports compare it; a mixture's parts as text.

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
        if key == "data.mix":  # mixtures of equal parts are one
            return str(Mix(self.config.data.sets)) if value else ""
        return value

    def values(self, keys: Iterable[str]) -> tuple[Any, ...]:
        """The `value` of each key."""
        return tuple(self.value(key) for key in keys)

    def describe(self, key: str) -> str:
        """The value of a key in words; the data by its names."""
        if key in ("data.name", "data.mix"):
            return self.config.data.label
        return format_value(key, self.value(key))

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


def count_values(runs: Iterable[Run], keys: Sequence[str]) -> int:
    """The number of different values that runs have of `keys` together."""
    return len({run.values(keys) for run in runs})


def find_varying(runs: Sequence[Run], keys: Iterable[str]) -> list[str]:
    """The keys of which runs have several values."""
    return [key for key in keys if count_values(runs, [key]) > 1]


def join_labels(labels: Iterable[str]) -> str:
    """The labels that are not empty, with commas."""
    return ", ".join(label for label in labels if label)


def format_value(key: str | None, value: Any) -> str:
    """A value with the name of its key, such as `gate_norm 2` or `init_from runs/a`."""
    text = format_tick(key, value)
    if key is None or key in NAMED_BY_VALUE:
        return text
    name = key.removesuffix(".name").split(".")[-1]
    return f"{name} {text}"


def format_tick(key: str | None, value: Any) -> str:
    """A value in a head or on an axis; `own` for a router's own gate norm."""
    if key == "model.gate_norm" and value == 0:
        return "own"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) or "none" if isinstance(value, str) else f"{value:.12g}"
