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

from scripts.report.comparisons import estimate
from scripts.report.settings import Arm, Setting, label_tick
from scripts.report.style import style
from scripts.report.tables import find_measures, read_measure

FACES = ("full", "none", "left", "right", "top", "bottom")
MARKERS = 12  # per line, about
Points = Mapping[Any, Sequence[float]]  # x: mean, low, high


@dataclass(frozen=True)
class Panel:
    """What is drawn of each arm, over the key or over steps."""

    title: str
    collect: Callable[[Arm], Points]
    zero: bool = False  # a line at 0, which is the baseline
    zoom: bool = False  # leave the steep first quarter of steps out of the y-axis


def plot_loss(setting: Setting, baseline: str) -> Figure | None:
    """Validation loss, and that minus the baseline's."""
    unit = setting.runs[0].unit
    panels = [Panel(f"validation loss, {unit}", lambda arm: average(setting, arm, "val/loss"), zoom=True)]
    panels.append(Panel(f"minus {baseline}, {unit}", lambda arm: subtract(setting, arm, baseline), True, True))
    return plot_panels(setting, panels)


def plot_measures(setting: Setting) -> Figure | None:
    """What is measured besides the losses."""
    return plot_panels(
        setting,
        [
            Panel(text, lambda arm, name=name: average(setting, arm, name), zoom=name.endswith("/loss"))
            for name, (text, _) in find_measures(setting).items()
        ],
    )


def average(setting: Setting, arm: Arm, name: str) -> Points:
    """Mean and range over seeds of what metrics.jsonl has by this name: at the end over the key, else over steps."""
    if not setting.key:
        return spread_over_seeds([run.series(name) for run in arm.runs])
    points = {}
    for x, cell in sorted(arm.cells.items()):
        values = [read_measure(setting, run, name) for run in cell.values()]
        if known := [value for value in values if value is not None]:
            points[x] = (float(np.mean(known)), min(known), max(known))
    return points


def subtract(setting: Setting, arm: Arm, baseline: str) -> Points:
    """Validation loss minus the baseline's with 95% intervals, over the key or over steps."""
    points = {}
    if base := setting.baseline_of(arm, baseline):
        for x in setting.xs if setting.key else filter(None, setting.steps):
            difference = estimate(setting, arm, base, xs=[x]) if setting.key else estimate(setting, arm, base, x)
            if difference:
                points[x] = (difference.mean, difference.low, difference.high)
    return points


def spread_over_seeds(columns: Sequence[Mapping[int, float]]) -> Points:
    """Mean and range over seeds at the steps that all of them have."""
    points = {}
    for step in sorted(set.intersection(*(set(column) for column in columns))):
        values = [column[step] for column in columns]
        points[step] = (float(np.mean(values)), min(values), max(values))
    return points


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


def plot_panels(setting: Setting, panels: Sequence[Panel]) -> Figure | None:
    """A grid: a row for each choice of options, a column for each panel that has data; one row is wrapped at three."""
    rows = split_rows(setting)
    drawn = [panel for panel in panels if any(panel.collect(arm) for arm in setting.arms)]
    if not drawn:
        return None
    width = min(len(drawn), 3) if len(rows) == 1 else len(drawn)
    height = math.ceil(len(rows) * len(drawn) / width)
    figure = Figure((1 + 5 * width, 0.4 + 3.6 * height), layout="constrained")
    grid = figure.subplots(height, width, squeeze=False, sharey="col" if setting.key and len(rows) > 1 else False)
    cells = [(options, arms, panel) for options, arms in rows.items() for panel in drawn]
    for axes, (options, arms, panel) in zip(grid.flat, cells, strict=False):
        draw_panel(axes, setting, arms, panel)
        axes.set_ylabel(panel.title)
        axes.set_title(fill(options, 60), fontsize=10)
        handles, labels = axes.get_legend_handles_labels()
        names = {arm.label: arm.router if options else arm.label for arm in arms}
        if handles:
            axes.legend(handles, [names[label] for label in labels], fontsize=8, framealpha=0.7)
    for axes in grid.flat[len(cells) :]:
        axes.remove()
    return figure


def draw_panel(axes: Axes, setting: Setting, arms: Sequence[Arm], panel: Panel) -> None:
    """Lines with bands in their colour. Two points or fewer are markers without a line."""
    late = []
    place_x = scale_key(axes, setting) if setting.key else lambda x: x
    for i, arm in enumerate(arms):
        points = panel.collect(arm)
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
    axes.set_xlabel(setting.key or "step")
    if panel.zero:
        axes.axhline(0, color="black", linewidth=0.8)
    if panel.zoom and not setting.key and late and max(late) > min(late):
        spare = 0.3 * (max(late) - min(late))
        axes.set_ylim(min(late) - spare, max(late) + spare)


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
