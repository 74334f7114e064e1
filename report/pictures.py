"""The pictures of a group: losses and what they are minus the baseline's, measures, loads."""

import base64
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report import plots
from report.frame import Group
from report.labels import format_tick, name_unit
from report.tables import find_measures, list_rows

MAX_COLOURED = 6  # curves; of more those that do not lead are grey


class Picture(NamedTuple):
    """An SVG file, and a sentence that says what it shows."""

    svg: bytes
    caption: str

    @property
    def address(self) -> str:
        """The picture itself, as an address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


Styles = Mapping[str, dict[str, Any]]


def draw_group(group: Group, baseline: str, sentence: str = "") -> list[Picture]:
    """All pictures of a group; `sentence` has the verdicts."""
    figures = {draw_losses(group, baseline): sentence}
    measures = find_measures(group)
    if measures:
        styles = choose_group_styles(group, baseline)
        figure, panels = plots.make_figure(len(measures), columns=3)
        for axes, (name, (label, _)) in zip(panels, measures.items(), strict=True):
            plot_curves(axes, label, group, collect_curves(group, group.series(name)), styles)
        plots.add_legend(figure)
        figures[figure] = "Measures: mean and range over seeds."
    loads = collect_loads(group)
    if loads:
        figures[draw_loads(loads)] = "Load of each layer's experts, the busiest first."
    return [Picture(plots.to_svg(figure), caption) for figure, caption in figures.items()]


def choose_group_styles(group: Group, baseline: str) -> Styles:
    """The styles of the curves with a colour: the baseline, then the lowest losses.

    They are the same in every picture of the group.
    """
    means = group.losses.loc[group.ends].T.groupby(level=0).mean().min(axis=1)

    def rank(variant: str) -> tuple:
        return baseline not in (variant, group.router(variant)), means[variant]

    shown = {variant: group.first_run(variant) for variant in sorted(group.runs, key=rank)}
    shown = dict(islice((shown | group.curves).items(), MAX_COLOURED))
    styles = plots.choose_styles([run.config.model.router for run in shown.values()])
    return dict(zip(shown, styles, strict=True))


def draw_losses(group: Group, baseline: str) -> Figure:
    """The validation loss, and minus the baseline's, over the key or over steps."""
    styles = choose_group_styles(group, baseline)
    losses = collect_curves(group, group.losses)
    for label, run in group.curves.items():
        losses[label] = plots.summarize_range(pd.DataFrame({0: run.series("val/loss")}))
    differences, over = collect_differences(group, baseline)
    figure, panels = plots.make_figure(2 if differences else 1)
    title = f"validation loss, {name_unit(group.shown[0])}; range of seeds"
    plot_curves(panels[0], title, group, losses, styles)
    if differences:
        title = f"minus {baseline}'s, 95% over {over}"
        plot_curves(panels[1], title, group, differences, styles, has_zero=True)
    plots.add_legend(figure)
    return figure


def collect_curves(group: Group, values: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """{variant: points} of a measure; over steps where all its seeds have a value."""
    curves = {}
    for variant in group.runs:
        of_seeds = pd.DataFrame(values[variant])
        points = plots.summarize_range(of_seeds if group.key else of_seeds.dropna())
        if len(points):
            curves[variant] = points
    return curves


def collect_differences(group: Group, baseline: str) -> tuple[dict[str, pd.DataFrame], str]:
    """{variant: points} of the loss minus that of the most similar variant of the baseline.

    The text says what the intervals are over.
    """
    curves = {}
    draws = set()
    for variant in group.runs:
        points = {}
        for base in group.find_counterparts(variant, baseline)[:1]:
            for row in list_rows(group, plots.MAX_POINTS):
                pair = group.compare(variant, base, [row])
                if pair is not None and (group.key or row > 0):
                    points[row] = pair.difference[:3]
                    draws.add(pair.over)
        if points:
            curves[variant] = pd.DataFrame(points, index=["mean", "low", "high"]).T
    return curves, " or ".join(sorted(draws))


def plot_curves(
    axes: Axes,
    title: str,
    group: Group,
    curves: Mapping[str, pd.DataFrame],
    styles: Styles,
    has_zero: bool = False,
) -> None:
    """Plot curves of a group; those without a style are grey, behind the others.

    Those that are not compared do not set the frame.
    """
    for label, style in styles.items():
        if label in curves:
            plots.plot_curve(axes, label, curves[label], style)
    greys = [label for label in curves if label not in styles]
    for label in greys:
        named = f"{len(greys)} others" if label == greys[0] else "_"
        axes.plot(curves[label]["mean"], color=plots.GREY, linewidth=0.8, zorder=1, label=named)
    compared = [curves[label] for label in curves if label in group.runs]
    points = pd.concat(compared or list(curves.values()))
    if group.key:
        plots.scale_key(axes, {row: format_tick(group.key, row) for row in group.ends})
        points.index = [0] * len(points)  # all are in the frame
    plots.set_frame(axes, title, points, has_zero)
    axes.set_xlabel(group.key or "step")


def collect_loads(group: Group) -> dict[str, list[list[float]]]:
    """{variant: loads of its first run's layers}, sorted, relative to an even share."""
    loads = {}
    for variant, runs in group.runs.items():
        x, seed = next(iter(runs))
        line = group.evaluation(variant, x if group.key else group.ends[0], seed)
        shares = [np.divide(layer, np.mean(layer)) for layer in line.get("val/loads", [])]
        if shares:
            loads[variant] = [sorted(layer, reverse=True) for layer in shares]
    return loads


def draw_loads(loads: Mapping[str, list[list[float]]]) -> Figure:
    """The layers of each variant below each other."""
    rows = pd.DataFrame([layer for layers in loads.values() for layer in layers])
    figure, (axes,) = plots.make_figure(size=(2 * plots.PANEL[0], 1 + 0.1 * len(rows)))
    plots.plot_loads(axes, rows.to_numpy())
    starts = np.cumsum([0, *map(len, loads.values())])[:-1]
    axes.set_yticks(starts, list(loads))  # at the first layer
    axes.set_xlabel("expert, busiest first")
    return figure
