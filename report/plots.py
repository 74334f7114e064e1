"""How pictures look: one style and a few functions for everything that draws, by plain matplotlib.

    figure, (left, right) = make_figure(2)
    plot_curve(left, "kern", points, choose_styles(["kern"])[0])
    set_frame(left, "validation loss", points)
    add_legend(figure)
    figure.savefig("losses.png")

The report uses it, and so should whatever draws. A picture shows zero and whole intervals, has one
legend for all its panels, and can be read in grey: routers differ in marker and line style.
"""

import io
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

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
MAX_POINTS = 60  # of a curve; more are averaged, because training losses are noisy


def choose_styles(routers: Sequence[str]) -> list[dict[str, Any]]:
    """Keyword arguments of `plot` for curves of one picture: color, linestyle, marker.

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


def make_figure(
    n_panels: int = 1, columns: int = 2, size: tuple[float, float] = PANEL
) -> tuple[Figure, list[Axes]]:
    """A figure with panels of a size in inches, at most `columns` side by side, and their axes."""
    columns = min(columns, n_panels)
    n_rows = math.ceil(n_panels / columns)
    figure = Figure((size[0] * columns, size[1] * n_rows), dpi=144, layout="constrained")
    axes = [figure.add_subplot(n_rows, columns, number + 1) for number in range(n_panels)]
    for panel in axes:
        panel.grid(alpha=0.3)
    return figure, axes


def summarize_range(values: pd.DataFrame) -> pd.DataFrame:
    """The points of a curve: columns mean, low and high, the range over the columns of `values`.

    Neighbours of many points are averaged, at the last one's place.
    """
    points = pd.DataFrame(
        {"mean": values.mean(axis=1), "low": values.min(axis=1), "high": values.max(axis=1)}
    ).dropna()
    if len(points) <= MAX_POINTS:
        return points
    parts = np.arange(len(points)) * MAX_POINTS // len(points)
    averaged = points.groupby(parts).mean()
    averaged.index = points.index.to_series().groupby(parts).last()
    return averaged


def plot_curve(axes: Axes, label: str, points: pd.DataFrame, style: dict[str, Any]) -> None:
    """Plot a curve with its intervals.

    Args:
        axes: where.
        label: in the legend.
        points: columns mean, low and high; the index has the places on the x-axis.
        style: of `choose_styles`.
    """
    (line,) = axes.plot(points.index, points["mean"], label=label, **style)
    line.set_markersize(3)
    axes.vlines(points.index, points["low"], points["high"], color=style["color"], alpha=0.4)


def set_frame(axes: Axes, title: str, points: pd.DataFrame, has_zero: bool = False) -> None:
    """Choose the y-axis: whole intervals of the last three quarters of the places, and zero.

    The start of training would swallow the rest; arrows in the title say how far it goes.

    Args:
        axes: where.
        title: above it.
        points: of all curves, as in `plot_curve`. An interval that is unknown is its mean.
        has_zero: zero is in the frame, as a line.
    """
    points = points.ffill(axis="columns")
    late = points[points.index >= points.index.max() / 4]
    low, high = late["low"].min(), late["high"].max()
    if has_zero:
        axes.axhline(0, color="black", linewidth=0.8)
        low, high = min(low, 0), max(high, 0)
    margin = 0.08 * (high - low or abs(high) or 1)
    axes.set_ylim(low - margin, high + margin)
    if points["high"].max() > high + margin:
        title += f"\n↑ up to {points['high'].max():.3g}"
    if points["low"].min() < low - margin:
        title += f"\n↓ down to {points['low'].min():.3g}"
    axes.set_title(title, loc="left", fontsize=10)


def scale_key(axes: Axes, ticks: Mapping[float, str]) -> None:
    """Make a factor of 2 on the x-axis, and the way from 0 to the smallest value, equally long."""
    smallest = min((abs(value) for value in ticks if value), default=1)
    axes.set_xscale("symlog", base=2, linscale=0.5, linthresh=smallest)
    axes.set_xticks(list(ticks), list(ticks.values()), rotation=90 if len(ticks) > 6 else 0)
    axes.minorticks_off()


def add_legend(figure: Figure) -> None:
    """Add one legend below all panels, of the first one's labels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = round(figure.get_figwidth() / PANEL[0])
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(handles) / columns))
    figure.legend(handles, labels, loc="outside lower left", frameon=False, ncols=columns)


def plot_loads(axes: Axes, loads: np.ndarray) -> None:
    """Plot how many tokens experts get, in greys; × marks those without a token.

    Args:
        axes: where.
        loads: (rows, E) relative to an even share; NaN where a row has fewer experts.
    """
    scale = PowerNorm(0.5, vmin=0, vmax=np.nanmax(loads))  # a root shows small loads
    image = axes.imshow(loads, cmap="Greys", norm=scale, aspect="auto", interpolation="nearest")
    rows, experts = np.nonzero(loads == 0)
    axes.plot(experts, rows, "x", color="#D55E00", markersize=3, scalex=False, scaley=False)
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, label="load, 1 = even (×: none)")


def to_svg(figure: Figure) -> bytes:
    """The figure as an SVG file: the same bytes for the same data, and text as text."""
    output = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):
        figure.savefig(output, format="svg", metadata={"Date": None})
    return output.getvalue()
