"""The tables of a group: losses, pairs, measures, and what it is in words.

± is the standard deviation over seeds, [low, high] a 95% interval; heads of columns say so.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from balance import MEASURES
from common.text import plural
from report.blocks import Table
from report.frame import DOCUMENTS, Comparison, Group
from report.labels import format_tick, format_value, join_labels, name_unit
from runtime.memory import count_parameters

SPREAD = "± SD over seeds"
MINUS = "first minus second, 95%"
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
        if len(values) == 1:
            return mean
        return f"{mean} ± {values.std():{form}}"

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
    cells = summarize(group.losses.loc[list_rows(group)])
    cells.columns = [format_tick(group.key, row) for row in cells.columns]
    rows = []
    for variant, row in cells.to_dict("index").items():
        rows.append({name: variant, "seeds": str(len(group.losses[variant].columns)), **row})
    return Table("Losses", rows, [name, "seeds", *reversed(cells.columns)])


def build_pairs_table(group: Group, pairs: Sequence[Comparison]) -> Table:
    """A row for each pair, the largest difference first.

    Over a key it has the difference at each value, and the mean, which is judged.
    """
    rows = []
    for pair in sorted(pairs, key=lambda pair: -abs(pair.difference.mean)):
        row = {"first": pair.left, "second": pair.right}
        for x in group.ends if group.key else ():
            at_x = group.compare(pair.left, pair.right, [x])
            row[format_tick(group.key, x)] = str(at_x.difference) if at_x else ""
        row[MINUS] = str(pair.difference)
        row["interval over"] = pair.over
        row["first is"] = pair.verdict
        row["Holm's p"] = "-" if math.isnan(pair.p) else f"{pair.p:.2g}"
        rows.append(row)
    return Table("Pairs", rows, ["first", "second", MINUS, "first is"])


def find_measures(group: Group) -> dict[str, tuple[str, str]]:
    """{name in metrics.jsonl: (in words, format)} of what runs measured besides val/loss.

    Of a measure of routing that evaluations have, theirs counts.
    """
    names: set[str] = set()
    for run in group.compared:
        names.update(*run.lines)
    labels = dict(LABELS)
    for measure, (label, form, *_) in MEASURES.items():
        is_evaluated = f"val/{measure}" in names
        labels[f"val/{measure}" if is_evaluated else f"router/{measure}"] = label, form
    for name in sorted(names):
        if LOSSES_AND_SCORES.fullmatch(name):
            labels[name] = name, ".4f"
    return {name: label for name, label in labels.items() if name in names}


def build_measure_table(group: Group) -> Table:
    """The measures at the end, with a row for each variant and value of the key.

    Where tasks are scored less often than losses, their last score by then counts.
    """
    columns = {}
    for name, (_, form) in find_measures(group).items():
        values = group.series(name)
        if not group.key:
            end = group.ends[0]
            values = values.loc[:end].ffill().tail(1).rename(index=lambda _, end=end: end)
        columns[name] = summarize(values, form).stack()
    cells = pd.DataFrame(columns).fillna("")
    rows = []
    for (variant, x), row in zip(cells.index.tolist(), cells.to_dict("records"), strict=True):
        label = variant
        if group.key:
            label = join_labels([variant, format_value(group.key, x)])
        if any(row.values()):
            rows.append({f"at the end, {SPREAD}": label, **row})
    return Table("Measures", rows)


def describe_group(group: Group) -> str:
    """The text, the length of training, the validation windows and the models' sizes."""
    run = group.shown[0]
    tokens = run.config.train.batch_size * run.config.model.block_size
    steps = sorted({run.max_steps for run in group.shown})
    windows = f"{run.count_windows():,} validation windows"
    documents = set(run.evaluations[run.last_evaluated].get(DOCUMENTS, ()))
    if documents:
        windows += f" of {plural(len(documents), 'document')}"
    sizes = []
    for total, active in sorted({count_parameters(run.config.model) for run in group.shown}):
        sizes.append(f"{total / 1e6:.2f}M parameters, {active / 1e6:.2f}M active")
    lengths = " or ".join(f"{length:,}" for length in steps)
    models = " or ".join(dict.fromkeys(sizes))
    return (
        f"{run.config.data.label}: {lengths} steps of {tokens:,} tokens; {windows}. {models}. "
        f"Losses in {name_unit(run)}."
    )
