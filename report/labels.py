"""Words for the values of a config's keys, and the keys in which runs differ. Imports no torch."""

from collections.abc import Iterable, Sequence
from typing import Any

from configure.schema import select_keys
from data.tokenizer import ByteTokenizer
from runtime.runs import Run

NAMED_BY_VALUE = ("model.router", "data.name", "data.mix", "train.dtype")  # labels lack their keys
REMEDY = (
    "give them separate reports, or score both on one text: "
    "python -m eval.val_loss RUN --data SET_OR_FILE"
)


def count_values(runs: Iterable[Run], keys: Sequence[str]) -> int:
    """The number of different values that runs have of `keys` together."""
    return len({run.values(keys) for run in runs})


def find_varying(runs: Sequence[Run], keys: Iterable[str]) -> list[str]:
    """The keys of which runs have several values."""
    return [key for key in keys if len({run.value(key) for run in runs}) > 1]


def join_labels(labels: Iterable[str]) -> str:
    """The labels that are not empty, with commas."""
    return ", ".join(label for label in labels if label)


def describe(run: Run, key: str) -> str:
    """A run's value of a key in words; the data by its names."""
    if key in ("data.name", "data.mix"):
        return run.config.data.label
    return format_value(key, run.value(key))


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
    if isinstance(value, str):
        return value or "none"
    return f"{value:,}" if key is None else f"{value:.12g}"


def name_unit(run: Run) -> str:
    """The unit of a run's losses; with a vocabulary of bytes, tokens are bytes."""
    if run.config.model.vocab_size == ByteTokenizer.vocab_size:
        return "nats per byte"
    return "nats per token"


def find_text_mismatch(runs: Sequence[Run]) -> str:
    """Why the runs' losses cannot be paired: other data, tokenizer, length or windows.

    "" if they can. Data whose sha256 a damaged manifest hides is never equal to other data.
    """
    for run in runs:
        if run.faults and not run.metadata and len(runs) > 1:
            return (
                f"{run.faults[0]}, so the data of {run.path} is unknown; put back a copy, or "
                "remove that checkpoint"
            )
    first_with: dict[str, tuple[Any, Run]] = {}  # {name: its value in the first run that has one}
    for run in runs:
        properties = {
            "data (sha256 in their checkpoints)": run.metadata.get("data"),
            "tokenizer (sha256 in their checkpoints)": run.metadata.get("tokenizer"),
        }
        for key in select_keys("validation_text"):
            properties[key] = run.value(key)
        for name, value in properties.items():
            if value is None:
                continue
            first_value, first_run = first_with.setdefault(name, (value, run))
            if value != first_value:
                return (
                    f"{first_run.path} and {run.path}: {name} is {str(first_value):.20} and "
                    f"{str(value):.20}, so their losses are of different text; {REMEDY}"
                )
    return ""
