"""Read runs, also while they train, and check that their losses are of one text.

Imports no torch.
"""

import math
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import configure
from common.text import escape_controls
from configure.schema import select_keys
from report.run import Run
from report.status import find_status
from runtime import RunError, check_is_run
from runtime.metrics import (
    ARRAYS,
    collect_steps,
    describe_missing,
    find_contradictions,
    find_damage,
    find_missing_steps,
    list_arrays,
    read_metrics,
)

VALIDATION_ARRAYS = [name for name in ARRAYS if name.startswith("val/")]
REMEDY = (
    "give them separate reports, or score both on one text: "
    "python -m eval.val_loss RUN --data SET_OR_FILE"
)


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
    run.faults += find_contradictions(metrics, lines, run.config.train.max_steps)
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
        elif "val/loss" in line and (run.diverged is None or run.diverged < run.last_evaluated):
            run.diverged = line["step"]
    run.status = find_status(run)
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


class Reading(NamedTuple):
    """The runs of some folders as they are now, and a line for each folder that is left out."""

    runs: list[Run]
    left_out: list[str]


def read_runs(places: Iterable[Path]) -> Reading:
    """Read the runs at these places and below, and find the state of each.

    Reports, the live page, the table of scripts.watch and that of scripts.sweep all start here.
    """
    reading = Reading([], [])
    for folder in list_candidates(places):
        metrics = folder / "metrics.jsonl"
        try:
            files = [folder / "config.toml", metrics, *list_arrays(metrics)]
            run = read_cached(folder, describe_files(files))
            run.check_config()
            run.status = find_status(run)  # its lock changes without its files
            reading.runs.append(run)
        except Exception as error:  # whatever is wrong in one folder, the others are read
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason.removeprefix(f"{folder}: ")
            reading.left_out.append(escape_controls(f"left out: {folder}: {reason}"))
    return reading


def describe_files(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Name, time of the last change and size of each file that exists."""
    states = []
    for file in files:
        if file.exists():
            state = file.stat()
            states.append((file.name, state.st_mtime_ns, state.st_size))
    return tuple(states)


@lru_cache(maxsize=1000)
def read_cached(folder: Path, files: tuple) -> Run:
    """The run in a folder, read again when its `files` are others (`describe_files`)."""
    return read_run(folder)


def list_candidates(places: Iterable[Path]) -> list[Path]:
    """The folders of runs at these places and below, and the places that hold no run.

    `read_run` says what is wrong with the latter. A folder with a report is not one of them.
    """
    folders: list[Path] = []
    for place in places:
        below = find_runs([place])
        if not below and not (place / "report.html").is_file():
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
