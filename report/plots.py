"""The pictures of a group: losses and what they are minus the baseline's, measures, loads.

One style for all, by plain matplotlib: whoever draws something else takes `make_figure` and
`choose_styles`. A picture shows zero and whole intervals, has one legend for all its panels, and
can be read in grey: routers differ in marker and line style.
"""

import base64
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from report.frame import Group
from report.labels import format_tick, name_unit
from report.tables import find_measures, list_rows

DENSE_DOTS = (0, (1, 1))
LONG_DASHES = (0, (7, 2))
# Router: colour, line style, marker. The colours, mostly Okabe and Ito's, tell colour-blind readers
# routers apart: KERN's family is warm, softmax's blue, sigmoid's green. Others are black.
STYLES = {
    "dense": ("#555555", DENSE_DOTS, "x"),
    "softmax": ("#0072B2", "--", "s"),
    "sigmoid": ("#009E73", "-.", "^"),
    "tanh": ("#CC79A7", ":", "v"),
    "kern": ("#D55E00", "-", "o"),
    "kern-norelu": ("#E69F00", "--", "D"),
    "kern-after": ("#E69F00", "-.", "P"),
    "kern-mc": ("#A33B00", LONG_DASHES, "*"),
    "kern-nogamma": ("#A33B00", ":", "d"),
    "kern-nobias": ("#A33B00", "-.", "p"),
    "softmax-renorm": ("#56B4E9", "-", "<"),
    "sigmoid-renorm": ("#00583F", "--", ">"),
    "sqrtsoftplus": ("#00583F", ":", "h"),
    "softmax-l2": ("#003F63", LONG_DASHES, "X"),
    "sqrtgate": ("#003F63", ":", "8"),
}
# Okabe and Ito's, for curves of one picture whose own colours are not distinct
DISTINCT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#999999"  # of curves that do not lead
FREE_MARKERS = "H1234+|_"  # of routers that are not in STYLES
PANEL = (4.2, 3.0)  # width and height in inches
MAX_COLOURED = 6  # curves; of more those that do not lead are grey
MAX_POINTS = 60  # of a curve; more are averaged, because training losses are noisy

Curves = dict[str, pd.DataFrame]  # columns mean, low and high; the index has the places
Styles = Mapping[str, dict[str, Any]]  # keyword arguments of `plot`


class Picture(NamedTuple):
    """An SVG file, and a sentence that says what it shows."""

    svg: bytes
    caption: str

    @property
    def address(self) -> str:
        """The picture itself, as an address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


def draw_group(group: Group, baseline: str, sentence: str = "") -> list[Picture]:
    """All pictures of a group; `sentence` has the verdicts."""
    figures = {draw_losses(group, baseline): sentence}
    measures = find_measures(group)
    if measures:
        styles = choose_group_styles(group, baseline)
        figure, panels = make_figure(len(measures), columns=3)
        for axes, (name, (label, _)) in zip(panels, measures.items(), strict=True):
            plot_curves(axes, label, group, collect_curves(group, name), styles)
        add_legend(figure)
        figures[figure] = "Measures: mean and range over seeds."
    loads = draw_loads(group)
    if loads is not None:
        figures[loads] = "Load of each layer's experts, the busiest first."
    pictures = []
    for figure, caption in figures.items():
        output = io.BytesIO()
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
            figure.savefig(output, format="svg")
        pictures.append(Picture(output.getvalue(), caption))
    return pictures


# ---- what is drawn
def draw_losses(group: Group, baseline: str) -> Figure:
    """The validation loss, and minus the baseline's, over the key or over steps."""
    styles = choose_group_styles(group, baseline)
    losses = collect_curves(group, "val/loss")
    for label, run in group.curves.items():
        losses[label] = summarize_range(pd.DataFrame({0: run.series("val/loss")}))
    differences, over = collect_differences(group, baseline)
    figure, panels = make_figure(2 if differences else 1)
    title = f"validation loss, {name_unit(group.shown[0])}; range of seeds"
    plot_curves(panels[0], title, group, losses, styles)
    if differences:
        title = f"minus {baseline}'s, 95% over {over}"
        plot_curves(panels[1], title, group, differences, styles, has_zero=True)
    add_legend(figure)
    return figure


def draw_loads(group: Group) -> Figure | None:
    """The loads of the layers of each variant's first run, in greys; None without any.

    × marks experts without a token.
    """
    ticks: dict[str, int] = {}  # the row of a variant's first layer
    rows: list[list[float]] = []
    for variant, runs in group.runs.items():
        x, seed = next(iter(runs))
        line = group.evaluation(variant, x if group.key else group.ends[0], seed)
        for layer in line.get("val/loads", []):
            ticks.setdefault(variant, len(rows))
            rows.append(sorted(np.divide(layer, np.mean(layer)), reverse=True))
    if not rows:
        return None
    figure, (axes,) = make_figure(size=(2 * PANEL[0], 1 + 0.1 * len(rows)))
    loads = pd.DataFrame(rows).to_numpy()  # NaN where a row has fewer experts
    scale = PowerNorm(0.5, vmin=0, vmax=np.nanmax(loads))  # a root shows small loads
    image = axes.imshow(loads, cmap="Greys", norm=scale, aspect="auto", interpolation="nearest")
    idle, experts = np.nonzero(loads == 0)
    axes.plot(experts, idle, "x", color="#D55E00", markersize=3, scalex=False, scaley=False)
    axes.grid(visible=False)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set_xlabel("expert, busiest first")
    figure.colorbar(image, label="load, 1 = even (×: none)")
    return figure


def collect_curves(group: Group, name: str) -> Curves:
    """The mean and range over seeds of a measure; over steps where all its seeds have a value."""
    curves = {}
    values = group.series(name)
    for variant in group.runs:
        of_seeds = pd.DataFrame(values[variant])
        points = summarize_range(of_seeds if group.key else of_seeds.dropna())
        if len(points):
            curves[variant] = points
    return curves


def summarize_range(values: pd.DataFrame) -> pd.DataFrame:
    """The mean and range over the columns of `values`.

    Neighbours of many points are averaged, at the last one's place.
    """
    ends = {"mean": values.mean(axis=1), "low": values.min(axis=1), "high": values.max(axis=1)}
    points = pd.DataFrame(ends).dropna()
    if len(points) <= MAX_POINTS:
        return points
    parts = np.arange(len(points)) * MAX_POINTS // len(points)
    places = points.index.to_series().groupby(parts).last()
    return points.groupby(parts).mean().set_index(places)


def collect_differences(group: Group, baseline: str) -> tuple[Curves, str]:
    """The loss minus that of the most similar variant of the baseline, with its interval.

    The text says what the intervals are over.
    """
    curves = {}
    draws = set()
    for variant in group.runs:
        points = {}
        for base in group.find_counterparts(variant, baseline)[:1]:
            for row in list_rows(group, MAX_POINTS):
                pair = group.compare(variant, base, [row])
                if pair is not None and (group.key or row > 0):
                    points[row] = pair.difference[:3]
                    draws.add(pair.over)
        if points:
            curves[variant] = pd.DataFrame(points, index=["mean", "low", "high"]).T
    return curves, " or ".join(sorted(draws))


# ---- how it is drawn
def choose_styles(routers: Sequence[str]) -> list[dict[str, Any]]:
    """Color, linestyle and marker of the curves of one picture.

    A router has the same style in every picture. Where two colours are equal, all get others.
    """
    styles = []
    for router in routers:
        free = FREE_MARKERS[zlib.crc32(router.encode()) % len(FREE_MARKERS)]
        colour, line, marker = STYLES.get(router, ("black", "-", free))
        styles.append({"color": colour, "linestyle": line, "marker": marker})
    if len({style["color"] for style in styles}) < len(styles) <= len(DISTINCT):
        for style, colour, marker in zip(styles, DISTINCT, "os^DvP", strict=False):
            style |= {"color": colour, "marker": marker}
    return styles


def choose_group_styles(group: Group, baseline: str) -> Styles:
    """The styles of the curves with a colour: the baseline, then the lowest losses.

    They are the same in every picture of the group.
    """
    means = group.losses.loc[group.ends].T.groupby(level=0).mean().min(axis=1)

    def rank(variant: str) -> tuple:
        return baseline not in (variant, group.router(variant)), means[variant]

    shown = {variant: group.first_run(variant) for variant in sorted(group.runs, key=rank)}
    shown = dict(islice((shown | group.curves).items(), MAX_COLOURED))
    styles = choose_styles([run.config.model.router for run in shown.values()])
    return dict(zip(shown, styles, strict=True))


def make_figure(
    n_panels: int = 1, columns: int = 2, size: tuple[float, float] = PANEL
) -> tuple[Figure, list[Axes]]:
    """A figure with panels of a size in inches, at most `columns` side by side, and their axes."""
    columns = min(columns, n_panels)
    n_rows = math.ceil(n_panels / columns)
    figure = Figure((size[0] * columns, size[1] * n_rows), layout="constrained")
    panels = [figure.add_subplot(n_rows, columns, number + 1) for number in range(n_panels)]
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def add_legend(figure: Figure) -> None:
    """Add one legend below all panels, of the first one's labels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = round(figure.get_figwidth() / PANEL[0])
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(handles) / columns))
    figure.legend(handles, labels, loc="outside lower left", frameon=False, ncols=columns)


def plot_curves(
    axes: Axes, title: str, group: Group, curves: Curves, styles: Styles, has_zero: bool = False
) -> None:
    """Plot curves with their intervals; those without a style are grey, behind the others."""
    for label, style in styles.items():
        if label in curves:
            points = curves[label]
            (line,) = axes.plot(points["mean"], label=label, **style)
            line.set_markersize(3)
            colour = style["color"]
            axes.vlines(points.index, points["low"], points["high"], color=colour, alpha=0.4)
    greys = [label for label in curves if label not in styles]
    for label in greys:
        named = f"{len(greys)} others" if label == greys[0] else "_"
        axes.plot(curves[label]["mean"], color=GREY, linewidth=0.8, zorder=1, label=named)
    compared = [curves[label] for label in curves if label in group.runs]
    points = pd.concat(compared or list(curves.values())).ffill(axis="columns")
    if group.key:
        scale_key(axes, group)
        set_frame(axes, title, points, points, has_zero)
    else:
        axes.set_xlabel("step")
        set_frame(axes, title, points, points[points.index >= points.index.max() / 4], has_zero)


def set_frame(
    axes: Axes, title: str, points: pd.DataFrame, framed: pd.DataFrame, has_zero: bool
) -> None:
    """Choose the y-axis: whole intervals of the points that are `framed`, and zero.

    The start of training would swallow the rest; arrows in the title say how far it goes.
    """
    low, high = framed["low"].min(), framed["high"].max()
    if has_zero:
        axes.axhline(0, color="black", linewidth=0.8)
        low, high = min(low, 0), max(high, 0)
    margin = 0.08 * (high - low or abs(high) or 1)
    axes.set_ylim(low - margin, high + margin)
    lowest, highest = points["low"].min(), points["high"].max()
    if highest > high + margin:
        title += f"\n↑ up to {highest:.3g}"
    if lowest < low - margin:
        title += f"\n↓ down to {lowest:.3g}"
    axes.set_title(title, loc="left", fontsize=10)


def scale_key(axes: Axes, group: Group) -> None:
    """Make a factor of 2 in the key, and the way from 0 to its smallest value, equally long."""
    ticks = [format_tick(group.key, row) for row in group.ends]
    smallest = min((abs(row) for row in group.ends if row), default=1)
    axes.set_xscale("symlog", base=2, linscale=0.5, linthresh=smallest)
    axes.set_xticks(group.ends, ticks, rotation=90 if len(ticks) > 6 else 0)
    axes.minorticks_off()
    axes.set_xlabel(group.key or "")
