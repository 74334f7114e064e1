"""The tables of a group: losses, pairs, measures, and what it is in words.

± is the standard deviation over seeds, [low, high] a 95% interval; heads of columns say so.
"""

import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd

from balance import MEASURES
from common.text import plural
from report.blocks import Table
from report.compare import Verdict
from report.frame import MIN_SEEDS, Comparison, Group
from report.labels import format_tick, format_value, join_labels, name_unit
from runtime.memory import count_parameters

SPREAD = "± SD over seeds"
LABELS = {  # besides measures of routing: {name in metrics.jsonl: (in words, format)}
    "train/loss": ("training loss", ".4f"),
    "val_ema/loss": ("validation loss of averaged weights", ".4f"),
}
LOSSES_AND_SCORES = re.compile(r"val/.+/loss|tasks/.+/(acc|bits_per_byte)")  # names by set and task


def summarize(frame: pd.DataFrame, form: str = ".4f") -> pd.DataFrame:
    """Mean and standard deviation (of a sample) over the seeds of each variant, as text.

    Args:
        frame: columns (variant, seed).
        form: format of a number.

    Returns:
        A row for each variant, a column for each row of `frame`; "" without a value.
    """

    def format_mean(values: pd.Series) -> str:
        values = values.dropna()
        if values.empty:
            return ""
        mean = f"{values.mean():{form}}"
        return mean if len(values) == 1 else f"{mean} ± {values.std():{form}}"

    return frame.T.groupby(level=0, sort=False).agg(format_mean)


def list_rows(group: Group, n: int = 10) -> list[Any]:
    """The rows of losses to show: all values of the key, or at most n steps after 0.

    They are evenly apart, with the last.
    """
    rows = list(group.losses.index)
    if group.key:
        return rows
    steps = [step for step in rows if step > 0] or rows
    return steps[:: -math.ceil(len(steps) / n)][::-1]


def build_loss_table(group: Group) -> Table:
    """Loss of each variant over the key, or over steps."""
    name = f"{group.key or 'loss at step'}, {SPREAD}"
    columns = {row: format_tick(group.key, row) for row in list_rows(group)}
    cells = summarize(group.losses.loc[list(columns)])
    table = Table([name, "seeds", *columns.values()], title="Losses")
    table.important = [name, "seeds", *reversed(columns.values())]
    for variant in group.runs:
        n_seeds = len(group.losses[variant].columns)
        row = {name: f"**{variant}**", "seeds": str(n_seeds)}
        for x, column in columns.items():
            row[column] = str(cells.at[variant, x])
        table.rows.append(row)
    return table


def build_pairs_table(group: Group, pairs: Sequence[tuple[Comparison, Verdict]]) -> Table:
    """A row for each pair, the largest difference first.

    Over a key it has the difference at each value, and the mean, which is judged.
    """
    columns = {x: format_tick(group.key, x) for x in (group.ends if group.key else [])}
    judged = ["first minus second, 95%", "interval over", "first is", "Holm's p"]
    table = Table(["first", "second", *columns.values(), *judged], title="Pairs")
    table.important = ["first", "second", "first minus second, 95%", "first is"]
    for pair, verdict in sorted(pairs, key=lambda pair: -abs(pair[0].difference.mean)):
        row = {"first": pair.left, "second": pair.right}
        for x, column in columns.items():
            at_x = group.compare(pair.left, pair.right, [x])
            row[column] = str(at_x.difference) if at_x else ""
        seeds = plural(pair.difference.n, "seed")
        row["first minus second, 95%"] = str(pair.difference)
        row["interval over"] = seeds if pair.over == "seeds" else pair.over or "-"
        is_few = pair.difference.n < MIN_SEEDS and math.isfinite(pair.difference.mean)
        row["first is"] = f"**{verdict.text} ({seeds})**" if is_few else f"**{verdict.text}**"
        row["Holm's p"] = "-" if math.isnan(verdict.p) else f"{verdict.p:.2g}"
        table.rows.append(row)
    return table


def find_measures(group: Group) -> dict[str, tuple[str, str]]:
    """{name in metrics.jsonl: (in words, format)} of what runs measured besides val/loss.

    Of a measure of routing that evaluations have, theirs counts.
    """
    names = {name for run in group.compared for line in run.lines for name in line}
    found = {name: label for name, label in LABELS.items() if name in names}
    for measure, (label, form, *_) in MEASURES.items():
        for name in (f"router/{measure}", f"val/{measure}"):
            if name in names:
                found.pop(f"router/{measure}", None)
                found[name] = label, form
    scores = sorted(name for name in names if LOSSES_AND_SCORES.fullmatch(name))
    return found | {name: (name, ".4f") for name in scores}


def build_measure_table(group: Group) -> Table:
    """The measures at the end, with a row for each variant and value of the key.

    Where tasks are scored less often than losses, their last score by then counts.
    """
    head = f"at the end, {SPREAD}"
    table = Table([head], title="Measures")
    rows = {place: {} for place in product(group.runs, group.ends)}
    for name, (_, form) in find_measures(group).items():
        values = group.series(name)
        if not group.key:
            values = values.loc[: group.ends[0]].ffill()
        cells = summarize(values, form)
        last = None if group.key else cells.columns[-1]
        table.columns.append(name)
        for variant, end in rows:
            rows[variant, end][name] = str(cells.at[variant, last or end])
    for (variant, end), row in rows.items():
        if any(row.values()):
            label = format_value(group.key, end) if group.key else ""
            table.rows.append({head: join_labels([variant, label]), **row})
    return table


def describe_group(group: Group) -> str:
    """The text, the length of training, the validation windows and the models' sizes."""
    run = group.shown[0]
    tokens = run.config.train.batch_size * run.config.model.block_size
    lengths = sorted({run.max_steps for run in group.shown})
    steps = " or ".join(f"{length:,}" for length in lengths)
    windows = f"{run.count_windows():,} validation windows"
    documents = set(run.evaluations[run.last_evaluated].get("val/window_documents", ()))
    if documents:
        windows += f" of {plural(len(documents), 'document')}"
    sizes = [count_parameters(run.config.model) for run in group.shown]
    total, active = (format_range(counts) for counts in zip(*sizes, strict=True))
    return (
        f"`{run.config.data.label}`: {steps} steps of {tokens:,} tokens; {windows}. "
        f"{total} parameters, {active} active. Losses in {name_unit(run)}."
    )


def format_range(counts: Sequence[int]) -> str:
    """The smallest and the largest of some numbers of parameters, in millions."""
    ends = [f"{min(counts) / 1e6:.2f}M", f"{max(counts) / 1e6:.2f}M"]
    return " to ".join(dict.fromkeys(ends))
