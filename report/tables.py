"""The tables of groups: verdicts, losses, measures, and what a group is in words.

± is the standard deviation over seeds, [low, high] a 95% interval; heads of columns say so.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from common.measures import MEASURES
from report.blocks import Table
from report.frame import Comparison, Group
from report.labels import format_tick, format_value, join_labels, name_unit

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
    texts = cells.to_dict("index")
    rows = []
    for variant in group.runs:
        rows.append({name: variant, "seed": list_seeds(group, variant), **texts[variant]})
    return Table("Losses", rows, [name, *reversed(cells.columns)])


def list_verdicts(group: Group, families: Mapping[str, Sequence[Comparison]]) -> list[dict]:
    """A group's rows of the table of verdicts: each variant, its comparisons and its loss.

    The loss is that at the end; over a key it is the lowest mean of the values that most of the
    variant's seeds have, and its value is named.

    Args:
        group: the group.
        families: {what is compared, at the start of heads: pairs}.
    """
    losses = group.losses.loc[group.ends]
    cells = summarize(losses).to_dict("index")
    rows = []
    for variant in group.runs:
        comparisons: dict[str, dict] = {}  # by the variant that is subtracted
        for name, pairs in families.items():
            for pair in pairs:
                if pair.left == variant:
                    cells_of_pair = comparisons.setdefault(pair.right, {"minus": pair.right})
                    cells_of_pair |= describe_pair(pair, name)
        row = {"setting": group.label, "variant": variant}
        of_seeds = pd.DataFrame(losses[variant])  # (values of the key, seeds)
        counts = of_seeds.count(axis="columns")
        place = of_seeds[counts == counts.max()].mean(axis="columns").idxmin()
        seeds = of_seeds.loc[place].dropna().index
        end = {f"loss, {SPREAD}": cells[variant][place], "seed": ", ".join(map(str, sorted(seeds)))}
        if group.key:
            end[f"best {group.key}"] = format_tick(group.key, place)
        rows += [row | cells_of_pair | end for cells_of_pair in comparisons.values() or [{}]]
    return sorted(rows, key=len, reverse=True)  # the full ones name the columns


def describe_pair(pair: Comparison, name: str) -> dict[str, str]:
    """The cells of a comparison; `name` is at the start of their heads."""
    return {
        f"{name}is": pair.verdict,
        f"{name}difference, 95%": str(pair.difference),
        f"{name}Holm's p": "-" if math.isnan(pair.p) else f"{pair.p:.2g}",
    }


def list_seeds(group: Group, variant: str) -> str:
    """The seeds of a variant's runs that are compared, such as `0, 1, 2`."""
    return ", ".join(map(str, sorted(group.losses[variant].columns)))


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
    """The text, the length of training and the unit of losses."""
    run = group.shown[0]
    tokens = run.config.train.batch_size * run.config.model.block_size
    lengths = " or ".join(f"{steps:,}" for steps in sorted({run.max_steps for run in group.shown}))
    return (
        f"{run.config.data.label}: {lengths} steps of {tokens:,} tokens. "
        f"Losses in {name_unit(run)}."
    )
