"""Pictures of a setting: functions that return a figure, or None without data.

A router has the same colour, marker and line style in every picture (style.py). Arms of several routers with several
options have a row of panels for each choice of options.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from scripts.report.comparisons import Comparison, Part, compare_parts, find_comparison
from scripts.report.settings import Arm, Setting, label_axis, label_tick
from scripts.report.statistics import HIGHER, LOWER, Difference
from scripts.report.style import style
from scripts.report.tables import find_measures, read_measure

FACES = ("full", "none", "left", "right", "top", "bottom")
MARKERS = 12  # per line, about
Points = Mapping[Any, Sequence[float]]  # x: mean, low, high
Collect = Callable[[Arm], Points]


@dataclass(frozen=True)
class Column:
    """A column of panels: what is drawn of each arm."""

    title: str
    x_label: str
    collect: Collect
    over_key: bool = False
    zero: bool = False  # a line at 0, which is the baseline
    zoom: bool = False  # leave the steep first quarter out of the y-axis


def plot_loss(setting: Setting, baseline: str) -> Figure | None:
    """Validation loss over the key, and the difference from the baseline; over steps, with the training loss."""
    unit = setting.runs[0].unit
    if setting.key:
        x_label = label_axis(setting.key)
        columns = [
            Column(f"validation loss, {unit}", x_label, lambda arm: collect_ends(setting, arm), True),
            Column(f"minus {baseline}, {unit}", x_label, lambda arm: subtract_ends(setting, arm, baseline), True, True),
        ]
    else:
        columns = [
            Column(f"validation loss, {unit}", "step", collect_validation, zoom=True),
            Column(f"training loss, {unit}", "step", collect_training, zoom=True),
        ]
    return plot_columns(setting, columns)


def plot_difference(setting: Setting, baseline: str) -> Figure | None:
    """Loss minus the baseline's over steps, with 95% intervals; the picture of `plot_loss` has that over a key."""
    if setting.key or len([step for step in setting.steps if step]) < 2:
        return None

    def collect(arm: Arm) -> Points:
        points = {}
        for base in setting.counterparts(arm, baseline)[:1]:
            for step in filter(None, setting.steps):
                points[step] = interval(compare_parts([Part(setting, arm, base, step)]))
        return points

    title = f"validation loss minus {baseline}'s, {setting.runs[0].unit}"
    return plot_columns(setting, [Column(title, "step", collect, zero=True, zoom=True)])


def plot_measures(setting: Setting, baseline: str) -> Figure | None:
    """What evaluations measure besides the loss, over the key or over steps."""

    def collect(key: str) -> Collect:
        def points(arm: Arm) -> Points:
            if setting.key:
                cells = {x: [read_measure(setting, run, key) for run in cell.values()] for x, cell in arm.cells.items()}
                known = {x: [value for value in values if value is not None] for x, values in sorted(cells.items())}
                return {x: spread(values) for x, values in known.items() if values}
            columns = [{s: line[key] for s, line in run.evaluations.items() if key in line} for run in arm.runs]
            return spread_over_seeds(columns)

        return points

    x_label = label_axis(setting.key) if setting.key else "step"
    columns = [
        Column(text, x_label, collect(key), bool(setting.key), zoom=key.endswith("/loss"))
        for key, (text, _) in find_measures(setting).items()
    ]
    return plot_columns(setting, columns)


def plot_routing(setting: Setting, baseline: str) -> Figure | None:
    """Load imbalance, the gates' entropy, norm and sum, and γ of training batches, over steps."""
    if setting.key:
        return None
    K, E = setting.values["model.top_k"], setting.values["model.n_expert"]
    labels = {
        "router/load_imbalance": f"busiest expert's load / mean load in training (1 to {E / K:g})",
        "router/entropy": f"entropy of the gates, nats (at most {math.log(E):.2f})",
        "router/gate_norm": "norm of the gates, √(E‖g‖²)",
        "router/gate_sum": "sum of the gates, E Σ g",
        "router/gamma": "γ",
    }

    def collect(key: str) -> Collect:
        return lambda arm: spread_over_seeds([run.logged(key) for run in arm.runs])

    return plot_columns(setting, [Column(text, "step", collect(key)) for key, text in labels.items()])


def collect_ends(setting: Setting, arm: Arm) -> Points:
    """Loss at the end by values of the key."""
    cells = sorted(arm.cells.items())
    return {x: spread([setting.evaluation(run)["val/loss"] for run in cell.values()]) for x, cell in cells}


def subtract_ends(setting: Setting, arm: Arm, baseline: str) -> Points:
    """Loss at the end minus that of the baseline, with 95% intervals, by values of the key."""
    points = {}
    for base in setting.counterparts(arm, baseline)[:1]:
        for x in sorted(arm.cells.keys() & base.cells.keys()):
            ours, theirs = (Arm(one.router, one.options, {x: one.cells[x]}) for one in (arm, base))
            if difference := compare_parts([Part(setting, ours, theirs)]):
                points[x] = interval(difference)
    return points


def collect_validation(arm: Arm) -> Points:
    """Validation loss by steps."""
    return spread_over_seeds([{s: line["val/loss"] for s, line in run.evaluations.items()} for run in arm.runs])


def collect_training(arm: Arm) -> Points:
    """Training loss by steps of evaluations, a mean over the batches since the one before."""
    losses = [{step: run.train_loss(step) for step in run.evaluations} for run in arm.runs]
    return spread_over_seeds([{s: loss for s, loss in row.items() if loss is not None} for row in losses])


def spread_over_seeds(columns: Sequence[Mapping[int, float]]) -> Points:
    """Mean and range over seeds at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(column) for column in columns)))
    return {step: spread([column[step] for column in columns]) for step in steps}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, least and greatest."""
    return float(np.mean(values)), min(values), max(values)


def interval(difference: Difference | None) -> tuple[float, float, float]:
    """Mean and 95% interval of a Difference; NaN where there is none."""
    return (math.nan,) * 3 if difference is None else (difference.mean, difference.low, difference.high)


def style_arm(setting: Setting, arm: Arm) -> dict[str, Any]:
    """The style of its router. Arms of the only router have colours of their own; else their markers' faces differ."""
    look = style(arm.router) | {"markersize": 5, "linewidth": 1.4}
    twins = [other for other in setting.arms if other.router == arm.router]
    place = twins.index(arm)
    if len(twins) == len(setting.arms) > 1:
        look["color"] = matplotlib.colormaps["viridis"](0.9 * place / (len(twins) - 1))
        look["marker"] = "os^DvP*X"[place % 8]
    elif len(split_rows(setting)) == 1:
        look["fillstyle"] = FACES[place % len(FACES)]
    return look


def split_rows(setting: Setting) -> dict[str, list[Arm]]:
    """Arms by their options, a row of panels each, where several routers have several; else all in one row."""
    rows: dict[str, list[Arm]] = {}
    for arm in setting.arms:
        rows.setdefault(arm.options_label, []).append(arm)
    shared = len(rows) > 1 and all(len(arms) > 1 for arms in rows.values())
    return rows if shared else {"": setting.arms}


def plot_columns(setting: Setting, columns: Sequence[Column]) -> Figure | None:
    """A grid of panels: a row for each choice of options, a column for each thing that has data."""
    rows = split_rows(setting)
    drawn = [column for column in columns if any(column.collect(arm) for arm in setting.arms)]
    if not drawn:
        return None
    if len(rows) == 1 and len(drawn) > 2:  # wrap
        width, height = 2, math.ceil(len(drawn) / 2)
    else:
        width, height = len(drawn), len(rows)
    figure = Figure((1 + 5.5 * width, 0.4 + 3.6 * height), layout="constrained")
    share = bool(setting.key) and len(rows) > 1
    grid = figure.subplots(height, width, squeeze=False, sharey="col" if share else False)
    cells = [(row, column) for row in rows.items() for column in drawn]
    for axes in grid.flat[len(cells) :]:
        axes.remove()
    for i, (axes, ((title, arms), column)) in enumerate(zip(grid.flat, cells, strict=False)):
        draw_panel(axes, setting, arms, column)
        if i == 0 or not setting.key or len(rows) == 1:
            add_legend(axes, {arm.label: arm.router if title else arm.label for arm in arms})
        axes.set_ylabel(column.title)
        if title:
            axes.set_title(fill(title, 60), fontsize=10)
    return figure


def draw_panel(axes: Axes, setting: Setting, arms: Sequence[Arm], column: Column) -> None:
    """Lines with bands in their colour. Two points or fewer are markers without a line."""
    late = []
    place_x = scale_key(axes, setting) if column.over_key else lambda x: x
    for i, arm in enumerate(arms):
        points = column.collect(arm)
        if not points:
            continue
        look, xs = style_arm(setting, arm), [place_x(x) for x in points]
        means, lows, highs = zip(*points.values(), strict=True)
        if len(points) <= 2:
            look["linestyle"] = "none"
            axes.vlines(xs, lows, highs, color=look["color"], linewidth=1.2, alpha=0.6)
        every = max(1, len(points) // MARKERS)
        axes.plot(xs, means, label=arm.label, markevery=(i % every, every), **look)
        axes.fill_between(xs, lows, highs, color=look["color"], alpha=0.15, linewidth=0)
        late += means[len(means) // 4 :]
    axes.grid(alpha=0.3)
    axes.set_xlabel(column.x_label)
    if column.zero:
        axes.axhline(0, color="black", linewidth=0.8)
    if column.zoom and late and max(late) > min(late):
        spare = 0.3 * (max(late) - min(late))
        axes.set_ylim(min(late) - spare, max(late) + spare)


def add_legend(axes: Axes, names: Mapping[str, str]) -> None:
    """A legend inside the panel; `names`: {label of an arm: its name in the legend}."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, [names[label] for label in labels], loc="best", fontsize=8, framealpha=0.7)


def scale_key(axes: Axes, setting: Setting) -> Callable[[float], float]:
    """Make the x-axis logarithmic with a tick for each value; returns where a value is drawn.

    A value of 0 is drawn as far left of the smallest other as that is of the next, a tenth of it at least.
    """
    positive = [*(x for x in setting.xs if x > 0), math.inf][:2]
    left = positive[0] / min(positive[1] / positive[0], 10)
    axes.set_xscale("log", base=2)
    axes.set_xticks([x or left for x in setting.xs], [label_tick(setting.key, x) for x in setting.xs])
    axes.xaxis.set_minor_locator(NullLocator())
    return lambda x: x or left


def plot_ends(setting: Setting, baseline: str, comparisons: Sequence[Comparison]) -> Figure | None:
    """Where each arm ends against the baseline; filled markers: the verdict is lower or higher."""
    rows = []
    for arm in setting.arms:
        for base in setting.counterparts(arm, baseline)[:1]:
            comparison = find_comparison(comparisons, arm, base)
            if comparison:
                rows.append(comparison)
    if len(rows) < 2:
        return None
    figure = Figure((9, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlabel=f"loss minus {baseline}'s, {setting.runs[0].unit} (left of 0: better)")
    for place, comparison in enumerate(rows):
        mean, low, high = interval(comparison.difference)
        look = style_arm(setting, comparison.left)
        decided = comparison.verdict.text in (LOWER, HIGHER)
        face = look["color"] if decided else "white"
        marker = "s" if look["marker"] == "x" else look["marker"]  # an x has no face
        axes.plot([low, high], [place, place], color=look["color"], linewidth=2, zorder=1)
        axes.scatter([mean], [place], color=look["color"], facecolor=face, marker=marker, zorder=2)
    means = [comparison.difference.mean for comparison in rows]
    spare = max(0.6 * (max(*means, 0) - min(*means, 0)), 1e-4)
    axes.set_xlim(min(*means, 0) - spare, max(*means, 0) + spare)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_yticks(range(len(rows)), [comparison.left.label for comparison in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure
