"""The pictures of a group: losses and what they are minus the baseline's, measures, loads.

One style for all, by plain matplotlib. A picture shows zero and whole intervals, has one legend for
all its panels, and can be read in grey: curves differ in marker and line style.
"""

import base64
import io
import itertools
import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from report.compare import Difference
from report.frame import Group, find_pairs
from report.labels import format_tick, name_unit
from report.tables import find_measures, list_rows

# Okabe and Ito's colours, which colour-blind readers can tell apart, then some of Tol's
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
COLOURS += ["#000000", "#882255", "#117733", "#332288", "#999933", "#AA4499"]
LINES = ["-", "--", "-.", ":", (0, (7, 2)), (0, (1, 1))]
CYCLE = cycler(color=COLOURS) + cycler(marker="os^vDPX*<>hp") + cycler(linestyle=2 * LINES)
N_COLOURED = 6  # curves of a picture
OTHERS = {"color": "#999999", "linewidth": 0.8, "zorder": 1, "label": "others"}
SVG = {"svg.fonttype": "none", "svg.hashsalt": ""}  # text as text; equal pictures are equal files
PANEL = (4.2, 3.0)  # width and height in inches: a phone's width
MAX_POINTS = 60  # of a curve; more are averaged, because training losses are noisy

Curves = dict[str, pd.DataFrame]  # columns mean, low and high; the index has the places
Styles = dict[str, dict[str, Any]]  # keyword arguments of `plot`


class Picture(NamedTuple):
    """A figure, and a sentence that says what it shows."""

    figure: Figure
    caption: str

    @property
    def address(self) -> str:
        """The picture itself, as an address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(format_svg(self.figure)).decode()}"


def format_svg(figure: Figure) -> bytes:
    """The figure as an SVG file."""
    output = io.BytesIO()
    with matplotlib.rc_context(SVG):
        figure.savefig(output, format="svg", metadata={"Date": None})
    return output.getvalue()


def draw_group(group: Group, baseline: str, sentence: str = "") -> list[Picture]:
    """All pictures of a group; `sentence` has the verdicts."""
    styles = choose_styles(group, baseline)
    pictures = [Picture(draw_losses(group, baseline, styles), sentence)]
    measures = find_measures(group)
    if measures:
        figure, panels = make_figure(len(measures))
        for axes, (name, (label, _)) in zip(panels, measures.items(), strict=True):
            plot_curves(axes, label, group, collect_curves(group, name), styles)
        add_legend(figure)
        pictures.append(Picture(figure, "Measures: mean and range over seeds."))
    loads = draw_loads(group)
    if loads is not None:
        pictures.append(Picture(loads, "Load of each layer's experts, the busiest first."))
    return pictures


# ---- what is drawn
def draw_losses(group: Group, baseline: str, styles: Styles) -> Figure:
    """The validation loss, and minus the baseline's, over the key or over steps."""
    losses = collect_curves(group, "val/loss")
    for label, run in group.curves.items():
        losses[label] = summarize_range(pd.DataFrame({0: run.series("val/loss")}))
    differences = collect_differences(group, baseline)
    by_time = {} if group.key else collect_by_time(group, losses)
    figure, panels = make_figure(1 + bool(differences) + bool(by_time))
    title = f"validation loss, {name_unit(group.shown[0])}; range of seeds"
    plot_curves(panels[0], title, group, losses, styles)
    if differences:
        title = f"minus {baseline}'s, 95% over seeds"
        plot_curves(panels[1], title, group, differences, styles, has_zero=True)
    if by_time:
        plot_curves(panels[-1], "validation loss", group, by_time, styles)
        panels[-1].set_xlabel("minutes of training, by each variant's median step")
    add_legend(figure)
    return figure


def draw_loads(group: Group) -> Figure | None:
    """The last loads of the layers of each variant's first run, in greys; None without any.

    × marks experts without a token.
    """
    rows: dict[str, list[float]] = {}
    for variant in group.runs:
        run = group.first_run(variant)
        for number, layer in enumerate(run.loads, 1):
            loads = np.divide(layer, np.mean(layer))
            label = f"{variant}, layer {number}"
            rows[label] = sorted(loads, reverse=True)
    if not rows:
        return None
    table = pd.DataFrame(rows.values()).to_numpy()  # NaN where a row has fewer experts
    figure, (axes,) = make_figure(1, height=1.2 + 0.12 * len(rows))
    figure.set_figwidth(2 * PANEL[0])
    scale = PowerNorm(0.5, vmin=0)  # a root shows small loads
    image = axes.imshow(table, cmap="Greys", norm=scale, aspect="auto", interpolation="nearest")
    idle, experts = np.nonzero(table == 0)
    axes.plot(experts, idle, "x", color=COLOURS[0], markersize=3)
    axes.grid(visible=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xlabel("expert, busiest first; load 1 = even, ×: none")
    figure.colorbar(image)
    return figure


def draw_differences(
    title: str, differences: Mapping[str, Difference], lines: Mapping[str, float]
) -> Figure:
    """Differences with intervals, the lowest at the top; other values as vertical lines."""
    table = pd.DataFrame(differences, index=Difference._fields).T.sort_values("mean")
    rows = range(len(table))
    figure, (axes,) = make_figure(1, height=1.2 + 0.24 * len(table))
    axes.plot(table["mean"], rows, "o", color="black", markersize=4)
    axes.hlines(rows, table["low"], table["high"], color="black")
    labels = []
    for name, mean in table["mean"].items():
        labels.append(f"{name} {mean:+.4f}")
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    for (name, value), style in zip(lines.items(), CYCLE, strict=False):
        axes.axvline(value, label=name, color=style["color"], linestyle=style["linestyle"])
    axes.autoscale_view(scaley=False)  # axvline leaves a line at the edge where it is
    axes.set_title(title, loc="right", fontsize=10)
    add_legend(figure)
    return figure


def collect_curves(group: Group, name: str) -> Curves:
    """The mean and range over seeds of a measure, without seeds that never measured it.

    Over steps it is where all others have a value.
    """
    curves = {}
    values = group.series(name)
    for variant in group.runs:
        of_seeds = pd.DataFrame(values[variant]).dropna(axis="columns", how="all")
        curves[variant] = summarize_range(of_seeds if group.key else of_seeds.dropna())
    return curves


def collect_by_time(group: Group, losses: Curves) -> Curves:
    """Losses over minutes of training, without evaluations; curves of runs with logged steps."""
    curves = {}
    for label, points in losses.items():
        runs = group.runs[label].values() if label in group.runs else [group.curves[label]]
        times = [ms for run in runs for ms in run.series("perf/step_ms").values()]
        if times:
            curves[label] = points.set_axis(points.index * median(times) / 60_000)
    return curves


def summarize_range(values: pd.DataFrame) -> pd.DataFrame:
    """The mean and range over the columns of `values`; neighbours of many points are averaged."""
    points = pd.DataFrame(
        {
            "mean": values.mean(axis=1),
            "low": values.min(axis=1),
            "high": values.max(axis=1),
        }
    )
    points = points.dropna().rename_axis("place").reset_index()
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    return points.groupby(points.index // stride).mean().set_index("place")


def collect_differences(group: Group, baseline: str) -> Curves:
    """The loss minus that of the most similar variant of the baseline, with its interval."""
    curves: Curves = {}
    for left, right in find_pairs(group, baseline):
        if left in curves or baseline == group.router(left) != right:
            continue
        points = {}
        for row in list_rows(group, MAX_POINTS):
            pair = group.compare(left, right, [row])
            if pair is not None:
                points[row] = pair.difference[:3]
        if points:
            curves[left] = pd.DataFrame(points, index=["mean", "low", "high"]).T
    return curves


# ---- how it is drawn
def choose_styles(group: Group, baseline: str) -> Styles:
    """The style of each curve in all pictures of a group.

    The baseline and the lowest losses have a colour, the others are grey. It is by the place of the
    variant among all that have runs: one that fails changes no other's.
    """

    def rank(variant: str) -> tuple:
        is_baseline = baseline in (variant, group.router(variant))
        return not is_baseline, pd.DataFrame(group.losses[variant]).mean(axis=1).min()

    of_variants = dict(zip(dict.fromkeys(group.variants.values()), itertools.cycle(CYCLE)))
    styles: Styles = dict.fromkeys([*group.runs, *group.curves], OTHERS)
    for label in [*sorted(group.runs, key=rank), *group.curves][:N_COLOURED]:
        styles[label] = {**of_variants[group.variants[label]], "label": label, "markersize": 3}
        if label in group.curves:
            styles[label] |= {"linewidth": 0.8, "marker": ""}
    return styles


def make_figure(n_panels: int, height: float = PANEL[1]) -> tuple[Figure, list[Axes]]:
    """A figure with panels of a height in inches, at most 3 side by side, and their axes."""
    columns = min(3, n_panels)
    n_rows = math.ceil(n_panels / columns)
    figure = Figure((PANEL[0] * columns, height * n_rows), layout="constrained")
    panels = [figure.add_subplot(n_rows, columns, number + 1) for number in range(n_panels)]
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def add_legend(figure: Figure) -> None:
    """Add one legend below all panels, of the first one's labels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    columns = round(figure.get_figwidth() / PANEL[0])
    figure.set_figheight(figure.get_figheight() + 0.2 * len(by_label) / columns)
    place = "outside lower left"
    figure.legend(by_label.values(), by_label, loc=place, frameon=False, ncols=columns)


def plot_curves(
    axes: Axes, title: str, group: Group, curves: Curves, styles: Styles, has_zero: bool = False
) -> None:
    """Plot curves with their intervals; the y-axis shows these whole, and zero if it `has_zero`.

    Over steps it is that of the last three quarters: the start of training would swallow the rest.
    """
    for label, points in curves.items():
        axes.plot(points["mean"], **styles[label])
        colour = styles[label]["color"]
        axes.vlines(points.index, points["low"], points["high"], color=colour, alpha=0.4)
    compared = [curves[label] for label in curves if label in group.runs]
    points = pd.concat(compared or list(curves.values())).ffill(axis="columns")
    if group.key:
        smallest = min((abs(row) for row in group.ends if row), default=1)
        axes.set_xscale("symlog", base=2, linthresh=smallest)
        ticks = [format_tick(group.key, x) for x in group.ends]
        axes.set_xticks(group.ends, ticks, rotation=45)
        axes.minorticks_off()
    else:
        points = points[points.index >= points.index.max() / 4]
    if has_zero:
        axes.axhline(0, color="black", linewidth=0.8)
        points.loc[0] = 0
    if len(points):  # seeds may have measured at other steps each
        low, high = points["low"].min(), points["high"].max()
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel(group.key or "step")
    axes.set_title(title, loc="left", fontsize=10)
