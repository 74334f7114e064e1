"""Pictures of a setting: functions that return a figure, or None without data.

A router has the same colour, marker and line style in every picture (style.py). Arms of several
routers with several options have a row of panels for each choice of options.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.comparisons import estimate
from report.settings import Arm, Setting, label_tick
from report.style import style
from report.tables import find_measures, read_measure

MARKERS = 12  # per line, about
Points = Mapping[Any, Sequence[float]]  # x: mean, low, high
Collect = Callable[[Arm], Points]  # what a panel draws of an arm


def plot_loss(setting: Setting, baseline: str) -> Figure | None:
    """Validation loss, and that minus the baseline's, over the key or over steps."""
    unit = setting.runs[0].unit
    panels: dict[str, Collect] = {
        f"validation loss, {unit}": partial(average, setting, name="val/loss"),
        f"minus {baseline}, {unit}": partial(subtract, setting, baseline=baseline),
    }
    return plot_panels(setting, panels)


def plot_product(setting: Setting) -> Figure:
    """Loss over initial gate norm × the key's value: mean and range over seeds; the largest norm has filled markers."""
    norms = sorted({arm.options["model.gate_norm"] for arm in setting.arms})
    figure = Figure((7, 4.5), layout="constrained")
    axes = figure.subplots()
    for arm in setting.arms:
        norm, look, points = (
            arm.options["model.gate_norm"],
            style(arm.router),
            average(setting, arm, "val/loss"),
        )
        means, lows, highs = zip(*points.values(), strict=True)
        filled = norm == norms[-1]
        look |= {
            "markerfacecolor": look["color"] if filled else "white",
            "linestyle": "-" if filled else ":",
        }
        xs = [norm * x for x in points]
        axes.plot(
            xs, means, label=f"{arm.router}, norm {norm:g}", markersize=6, linewidth=1.2, **look
        )
        axes.vlines(xs, lows, highs, color=look["color"], alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel=f"initial gate norm × {setting.key}",
        ylabel=f"validation loss, {setting.runs[0].unit}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return figure


def plot_measures(setting: Setting) -> Figure | None:
    """What is measured besides the losses."""
    return plot_panels(
        setting, {name: partial(average, setting, name=name) for name in find_measures(setting)}
    )


def average(setting: Setting, arm: Arm, name: str) -> Points:
    """Mean and range over seeds of what metrics.jsonl has by this name: at the end over the key, else over steps."""
    if setting.key:
        values = {x: read_measure(setting, cell, name) for x, cell in sorted(arm.cells.items())}
    else:
        columns = [run.series(name) for run in arm.runs]
        steps = sorted(set.intersection(*(set(column) for column in columns)))
        values = {step: [column[step] for column in columns] for step in steps}
    return {
        x: (float(np.mean(known)), min(known), max(known)) for x, known in values.items() if known
    }


def subtract(setting: Setting, arm: Arm, baseline: str) -> Points:
    """Validation loss minus the baseline's with 95% intervals, over the key or over steps."""
    points = {}
    for base in setting.counterparts(arm, baseline)[:1]:
        for x in setting.xs if setting.key else filter(None, setting.steps):
            difference = (
                estimate(setting, arm, base, xs=[x])
                if setting.key
                else estimate(setting, arm, base, x)
            )
            if difference:
                points[x] = (difference.mean, difference.low, difference.high)
    return points


def style_arm(setting: Setting, arm: Arm) -> dict[str, Any]:
    """The style of its router. Arms of the only router have colours of their own."""
    look = style(arm.router) | {"markersize": 5, "linewidth": 1.4}
    place, last = setting.arms.index(arm), len(setting.arms) - 1
    if last and len({other.router for other in setting.arms}) == 1:
        look["color"] = matplotlib.colormaps["viridis"](0.9 * place / last)
        look["marker"] = "os^DvP*X"[place % 8]
    return look


def split_rows(setting: Setting) -> dict[str, list[Arm]]:
    """Arms by their options, a row of panels each; those of one router alone in one row."""
    if len({arm.router for arm in setting.arms}) == 1:
        return {"": setting.arms}
    rows: dict[str, list[Arm]] = {}
    for arm in setting.arms:
        rows.setdefault(arm.options_label, []).append(arm)
    return rows


def plot_panels(setting: Setting, panels: Mapping[str, Collect]) -> Figure | None:
    """A grid: a row for each choice of options, a column for each panel that has data; one row is wrapped at three."""
    rows = split_rows(setting)
    drawn = {title: collect for title, collect in panels.items() if any(map(collect, setting.arms))}
    if not drawn:
        return None
    width = min(len(drawn), 3) if len(rows) == 1 else len(drawn)
    height = math.ceil(len(rows) * len(drawn) / width)
    figure = Figure((1 + 5 * width, 0.4 + 3.6 * height), layout="constrained")
    share = "col" if setting.key and len(rows) > 1 else False
    grid = figure.subplots(height, width, squeeze=False, sharex=share, sharey=share)
    figure.suptitle(fill(setting.label, 100), fontsize=11)
    cells = [(options, arms, *panel) for options, arms in rows.items() for panel in drawn.items()]
    for axes, (options, arms, title, collect) in zip(grid.flat, cells, strict=False):
        draw_panel(axes, setting, arms, collect, bars=title.startswith("minus "))
        axes.set(xlabel=setting.key or "step", ylabel=fill(title, 40))
        axes.set_title(fill(options, 60), fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True)  # matplotlib hides those above a shared axis
        if axes.get_lines():
            axes.legend(fontsize=8, framealpha=0.7)
    for axes in grid.flat[len(cells) :]:
        axes.remove()
    return figure


def draw_panel(
    axes: Axes, setting: Setting, arms: Sequence[Arm], collect: Collect, bars: bool
) -> None:
    """Lines with bands in their colour, or with `bars`, which do not fill the panel where they are long.

    Over steps the y-axis leaves out the first quarter, which is steep, but for the last value of a
    run that is there.
    """
    # a factor of 2 has one length everywhere, and so has the way from 0 to the smallest value
    if setting.key:
        axes.set_xscale(
            "symlog", base=2, linscale=0.5, linthresh=min(abs(x) for x in setting.xs if x)
        )
        axes.set_xticks(setting.xs, [label_tick(setting.key, x) for x in setting.xs])
        axes.minorticks_off()
    late: list[float] = []
    of_arms = {arm: points for arm in arms if (points := collect(arm))}
    for i, (arm, points) in enumerate(of_arms.items()):
        look, means, lows, highs = style_arm(setting, arm), *zip(*points.values(), strict=True)
        if bars:
            axes.axhline(0, color="black", linewidth=0.8)
            axes.vlines([*points], lows, highs, color=look["color"], alpha=0.5)
        else:
            axes.fill_between([*points], lows, highs, color=look["color"], alpha=0.15, linewidth=0)
        every = max(1, len(points) // MARKERS)
        axes.plot([*points], means, label=arm.label, markevery=(i % every, every), **look)
        if not setting.key:
            start = max(map(max, of_arms.values())) / 4
            late += [mean for x, mean in zip(points, means, strict=True) if x >= start] or means[
                -1:
            ]
    if late and max(late) > min(late):
        spare = 0.3 * (max(late) - min(late))
        axes.set_ylim(min(late) - spare, max(late) + spare)
