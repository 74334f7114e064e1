"""The table of all runs: states, the keys that differ, losses and the time left.

The report, scripts.watch and scripts.sweep show this table. Imports no torch.
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
IMPORTANT = ("run", "state", "val loss", "trouble", "left", "step", "train loss")
SETTING_KEYS = select_keys("report", "setting")
KEYS_IN_ORDER = ["model.router", "run.seed", *SETTING_KEYS, *select_keys("report", "option")]


def build_overview(runs: Sequence[Run]) -> Table:
    """A row for each run: of each setting those that finished by loss, then the others by loss.

    Columns that are empty for every run are left out.
    """
    varying = find_varying(runs, KEYS_IN_ORDER)
    settings: dict[tuple, int] = {}  # in the order they came in
    for run in runs:
        settings.setdefault(run.values(SETTING_KEYS), len(settings))

    def place(run: Run) -> tuple:
        loss = run.newest.get("val/loss", math.inf)
        setting = settings[run.values(SETTING_KEYS)]
        return setting, not run.is_finished, math.isnan(loss), loss

    rows = []
    for run in sorted(runs, key=place):
        labels = [describe(run, key) for key in varying]
        if run.config.train.branch_from:
            labels.append(f"branch of {run.config.train.branch_from}")
        settings_label = escape_controls(join_labels(dict.fromkeys(labels)))
        rows.append({"run": "", "settings": settings_label} | describe_run(run))
    return Table("Runs", rows, IMPORTANT)


def describe_run(run: Run) -> dict[str, str]:
    """The cells of a run but its settings; those that are unknown are empty.

    tokens/s is the median of the run's last five logs.
    """
    state, step, trouble = run.status
    row = {"run": str(run.path), "state": state}
    row["step"] = f"{step:,} of {run.max_steps:,} {step / run.max_steps:>4.0%}"
    for column, (name, form) in VALUES.items():
        row[column] = f"{run.newest[name]:{form}}" if name in run.newest else ""
    speeds = list(run.series("perf/tokens_per_sec").values())[-5:]
    speed = median(speeds) if speeds else 0.0
    row["tokens/s"] = f"{speed:,.0f}" if speeds else ""
    row["left"] = ""
    if state == "running" and speed >= 1:
        tokens_per_step = run.config.train.batch_size * run.config.model.block_size
        seconds = (run.max_steps - step) * tokens_per_step / speed
        row["left"] = str(timedelta(seconds=round(seconds)))
    row["trouble"] = trouble
    return {column: escape_controls(text) for column, text in row.items()}


def count_states(runs: Sequence[Run]) -> str:
    """The number of runs in each state, such as `3 runs: 1 running, 2 finished`."""
    states = Counter(run.status.state for run in runs)
    counts = [f"{count} {state}" for state, count in sorted(states.items(), reverse=True)]
    return f"{plural(len(runs), 'run')}: {', '.join(counts)}"
