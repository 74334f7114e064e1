"""The table of all runs: states, the keys that differ, losses and the time left.

The report, its live page, the terminal and scripts.sweep show this table. Imports no torch.
"""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from statistics import median

from common.text import escape_controls, plural
from configure.schema import select_keys
from report.blocks import Table
from report.labels import describe, find_varying, join_labels
from runtime.runs import Run

VALUES = {  # column: (name in metrics.jsonl, format)
    "train loss": ("train/loss", ".4f"),
    "val loss": ("val/loss", ".4f"),
    "MFU": ("perf/mfu", ".1%"),
}
COLUMNS = ("run", "settings", "state", "step", "train loss", "val loss", "note", "best")
COLUMNS += ("tokens/s", "MFU", "left", "trouble")
IMPORTANT = ("run", "state", "val loss", "trouble", "left", "step", "best", "train loss")
SETTING_KEYS = select_keys("report", "setting")
KEYS_IN_ORDER = ["model.router", "run.seed", *SETTING_KEYS, *select_keys("report", "option")]


def build_overview(runs: Sequence[Run], baseline: str = "kern") -> Table:
    """A row for each run: of each setting those that finished by loss, then the others.

    Notes mark the baseline and the lowest loss of a setting. Columns that are empty for every run
    are left out.
    """
    table = Table(list(COLUMNS), title="Runs", important=IMPORTANT)
    varying = find_varying(runs, KEYS_IN_ORDER)
    lowest: dict[tuple, Run] = {}  # {setting: the run with the lowest final loss}
    for run in sort_runs(runs):
        row = describe_run(run)
        settings = [describe(run, key) for key in varying]
        if run.config.train.branch_from:
            settings.append(f"branch of {run.config.train.branch_from}")
        notes = []
        if run.is_finished and lowest.setdefault(run.values(SETTING_KEYS), run) is run:
            notes.append("lowest")
        if run.config.model.router == baseline:
            notes.append("baseline")
        row["settings"] = escape_controls(join_labels(dict.fromkeys(settings)))
        row["note"] = join_labels(notes) if len(runs) > 1 else ""
        table.rows.append(row)
    table.columns = [name for name in COLUMNS if any(row.get(name) for row in table.rows)]
    return table


def sort_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs by setting; of each those that finished by loss, then the others by loss."""
    settings = [run.values(SETTING_KEYS) for run in runs]

    def place(run: Run) -> tuple:
        loss = run.newest.get("val/loss", math.inf)
        if math.isnan(loss):
            loss = math.inf
        return settings.index(run.values(SETTING_KEYS)), not run.is_finished, loss

    return sorted(runs, key=place)


def describe_run(run: Run) -> dict[str, str]:
    """Most of COLUMNS of a run; those that are unknown are empty.

    tokens/s is the median of the run's last five logs.
    """
    state, step, trouble = run.status
    speeds = list(run.series("perf/tokens_per_sec").values())[-5:]
    speed = median(speeds) if speeds else 0.0
    row = {
        "run": str(run.path),
        "state": state,
        "step": f"{step:,} of {run.max_steps:,} {step / run.max_steps:>4.0%}",
    }
    for column, (name, form) in VALUES.items():
        row[column] = f"{run.newest[name]:{form}}" if name in run.newest else ""
    losses = run.series("val/loss")
    best_step = min(losses, key=lambda step: losses[step], default=0)
    if best_step < run.last_evaluated:
        row["best"] = f"{losses[best_step]:.4f} at {best_step:,}"
    row["tokens/s"] = f"{speed:,.0f}" if speeds else ""
    row["left"] = estimate_time_left(run, step, speed) if state == "running" else ""
    row["trouble"] = trouble
    return {column: escape_controls(text) for column, text in row.items()}


def estimate_time_left(run: Run, step: int, speed: float) -> str:
    """The time from `step` to the end at `speed` tokens/s; "" if unknown."""
    tokens_per_step = run.config.train.batch_size * run.config.model.block_size
    try:
        seconds = (run.max_steps - step) * tokens_per_step / speed
        return str(timedelta(seconds=round(seconds)))
    except (ArithmeticError, ValueError):  # of a speed that is 0, close to it, or NaN
        return ""


def count_states(runs: Sequence[Run]) -> str:
    """The number of runs in each state, such as `3 runs: 1 running, 2 finished`."""
    states = Counter(run.status.state for run in runs)
    counts = [f"{count} {state}" for state, count in sorted(states.items(), reverse=True)]
    return f"{plural(len(runs), 'run')}: {', '.join(counts)}" if runs else "No runs yet"
