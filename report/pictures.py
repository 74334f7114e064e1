"""Pictures of a group: functions that return a figure, or None without data.

A router has the same colour, marker and line style in every picture (style.py). Variants of several
routers with several options have a row of panels for each choice of options.
"""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.comparisons import measure_difference
from report.groups import Group, Variant, format_tick
from report.runs import Run
from report.style import choose_style
from report.tables import find_measures, read_measure
from runtime.metrics import prefix_of

MARKER_SIZE = 5  # points of 1/72 inch
MARKER_SPACE = 120  # of the markers of a line together, a third of a panel: more hide the line


class PlotPoint(NamedTuple):
    """A point of a line, with the ends of its band or bar."""

    mean: float
    low: float
    high: float


Points = Mapping[Any, PlotPoint]  # {x: point}
Lines = Mapping[Variant, Points]  # one panel


def plot_loss(group: Group, baseline: str) -> Figure | None:
    """Validation loss, and that minus the baseline's, over the key or over steps."""
    unit = group.shown_runs[0].unit
    losses: dict[Variant, Points] = {}
    differences: dict[Variant, Points] = {}
    for variant in group.variants + group.curves:
        losses[variant] = collect_means(group, variant, "val/loss")
        differences[variant] = {}
    for variant in group.variants:
        differences[variant] = collect_differences(group, variant, baseline)
    panels = {f"validation loss, {unit}": losses, f"minus {baseline}, {unit}": differences}
    return plot_panels(group, panels)


def plot_measures(group: Group) -> Figure | None:
    """The measures besides val/loss, over the key or over steps."""
    panels = {}
    for name in find_measures(group):
        panels[name] = {variant: collect_means(group, variant, name) for variant in group.variants}
        panels[name] |= dict.fromkeys(group.curves, {})
    return plot_panels(group, panels)


def collect_means(group: Group, variant: Variant, name: str) -> Points:
    """Mean and range over seeds of a name in metrics.jsonl.

    They are over steps, or at the end of each run over the key.
    """
    values = {}  # {x: values of the seeds}
    if group.key:
        for x, runs in sorted(variant.runs_by_x.items()):
            values[x] = read_measure(group, runs, name)
    else:
        series = [run.series(name) for run in variant.runs]
        for step in sorted(set.intersection(*map(set, series))):
            values[step] = [values_by_step[step] for values_by_step in series]
    points = {}
    for x, of_seeds in values.items():
        if of_seeds:
            points[x] = PlotPoint(float(np.mean(of_seeds)), min(of_seeds), max(of_seeds))
    return points if group.key else mark_gaps(points, variant.runs, name)


def collect_differences(group: Group, variant: Variant, baseline: str) -> Points:
    """Loss minus the baseline's with 95% intervals, over the key or over steps after 0."""
    counterparts = group.find_counterparts(variant, baseline)
    if not counterparts:
        return {}
    base = counterparts[0]
    differences = {}
    if group.key:
        for x in group.xs:
            differences[x] = measure_difference(group, variant, base, xs=[x])
    else:
        for step in group.steps:
            differences[step] = measure_difference(group, variant, base, step)
        differences.pop(0, None)  # before training
    points = {}
    for x, difference in differences.items():
        if difference is not None:
            points[x] = PlotPoint(difference.mean, difference.low, difference.high)
    if group.key:
        return points
    return mark_gaps(points, [*variant.runs, *base.runs], "val/loss")


def mark_gaps(points: Points, runs: Sequence[Run], name: str) -> Points:
    """Interrupt a line over steps where a run has lost its value of `name`."""
    kind = "train/loss" if prefix_of(name) in ("train", "router", "optim", "perf") else "val/loss"
    marked = dict(points)
    for run in runs:
        for step in run.missing.get(kind, ()):
            marked[step] = PlotPoint(math.nan, math.nan, math.nan)
    return dict(sorted(marked.items())) if points else points


def choose_variant_style(group: Group, variant: Variant) -> dict[str, Any]:
    """The style of its router. Variants of the only router have colours of their own."""
    style = choose_style(variant.router, [other.router for other in group.variants])
    style["linewidth"] = 0.7 if variant in group.curves else 1.4
    labels = list(dict.fromkeys(other.label for other in group.variants + group.curves))
    index = labels.index(variant.label)
    last = len(labels) - 1
    if last > 0 and has_one_router(group):
        style["color"] = matplotlib.colormaps["viridis"](0.9 * index / last)
        style["marker"] = "os^DvP*X"[index % 8]
    return style


def has_one_router(group: Group) -> bool:
    """True if all variants of a group have the same router."""
    return len({variant.router for variant in group.variants + group.curves}) == 1


def split_rows(group: Group) -> dict[str, list[Variant]]:
    """Variants by their options, a row of panels each; variants of one router are in one row."""
    variants = group.variants + group.curves
    if has_one_router(group):
        return {"": variants}
    rows: dict[str, list[Variant]] = {}
    for variant in variants:
        rows.setdefault(variant.options_label, []).append(variant)
    return rows


def plot_panels(group: Group, panels: Mapping[str, Lines]) -> Figure | None:
    """A grid: a row for each choice of options, a column for each of `panels` that has data.

    A single row is wrapped at three.
    """
    rows = split_rows(group)
    with_data = {title: lines for title, lines in panels.items() if any(lines.values())}
    if not with_data:
        return None
    n_panels = len(rows) * len(with_data)
    width = len(with_data) if len(rows) > 1 else min(len(with_data), 3)
    height = math.ceil(n_panels / width)
    figure = Figure((1 + 5 * width, 0.4 + 3.6 * height), layout="constrained")
    share = "col" if group.key and len(rows) > 1 else False
    grid = figure.subplots(height, width, squeeze=False, sharex=share, sharey=share)
    figure.suptitle(fill(group.label, 100), fontsize=11)
    free_axes = list(grid.flat)
    for options, variants in rows.items():
        for title, lines in with_data.items():
            axes = free_axes.pop(0)
            lines_of_row = {variant: lines[variant] for variant in variants if lines[variant]}
            draw_panel(axes, group, lines_of_row, bars=title.startswith("minus "))
            axes.set(xlabel=group.key or "step", ylabel=fill(title, 40))
            axes.set_title(fill(options, 60), fontsize=10)
            axes.grid(alpha=0.3)
            axes.tick_params(labelbottom=True)  # matplotlib hides those above a shared axis
            if axes.get_lines():
                axes.legend(fontsize=8, framealpha=0.7)
    for axes in free_axes:
        axes.remove()
    return figure


def draw_panel(axes: Axes, group: Group, lines: Lines, bars: bool) -> None:
    """Draw lines with bands in their colour, or with bars, which hide less where they are long."""
    if group.key:
        scale_key_axis(axes, group)
    for variant, points in lines.items():
        style = choose_variant_style(group, variant)
        xs = list(points)
        means, lows, highs = zip(*points.values(), strict=True)
        if bars:
            axes.axhline(0, color="black", linewidth=0.8)
            axes.vlines(xs, lows, highs, color=style["color"], alpha=0.5)
        else:
            axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
        style["markersize"] = max(1, min(MARKER_SIZE, MARKER_SPACE / len(points)))
        axes.plot(xs, means, label=label_line(group, variant), **style)
    if lines and not group.key:
        leave_out_start(axes, list(lines.values()))


def label_line(group: Group, variant: Variant) -> str:
    """A variant's label; that of a run that is not compared says its seed and state."""
    if variant not in group.curves:
        return variant.label
    (run,) = variant.runs
    return f"{variant.label}, seed {run.seed}, {run.status.state}"


def scale_key_axis(axes: Axes, group: Group) -> None:
    """Make a factor of 2 in the key, and the way from 0 to its smallest value, equally long."""
    smallest = min(abs(x) for x in group.xs if x)
    axes.set_xscale("symlog", base=2, linscale=0.5, linthresh=smallest)
    axes.set_xticks(group.xs, [format_tick(group.key, x) for x in group.xs])
    axes.minorticks_off()


def leave_out_start(axes: Axes, lines: Sequence[Points]) -> None:
    """Limit the y-axis to means after the first quarter of steps, which is steep.

    The last mean of a line that ends earlier is kept in sight.
    """
    start = max(max(points) for points in lines) / 4
    shown: list[float] = []
    for points in lines:
        known = {step: point for step, point in points.items() if math.isfinite(point.mean)}
        means = [point.mean for step, point in known.items() if step >= start]
        last = known[max(known)]
        shown += means or [last.mean]
    low = min(shown)
    high = max(shown)
    if high > low:
        spare = 0.3 * (high - low)
        axes.set_ylim(low - spare, high + spare)
