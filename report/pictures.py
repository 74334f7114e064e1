"""Pictures of a group: panels, each with a sentence that says what it shows.

A panel is as wide as a phone's screen, so its text is read there without a zoom.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import fill

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from report.chart import LINE_HEIGHT, Chart, Panel
from report.comparisons import Comparison
from report.groups import Group
from report.labels import name_unit
from report.lines import build_line, collect_differences, collect_means
from report.style import NO_TOKEN
from report.tables import find_measures, name_measure

WIDTH = 298  # points of a panel: on a phone it has 328 pixels, and text of TEXT_SIZE points 11
TEXT_SIZE = 10  # points, matplotlib's own


def draw_figure(panels: Sequence[Panel], columns: int = 1) -> Figure:
    """A figure with these panels, all as high as the highest."""
    n_rows = math.ceil(len(panels) / columns)
    height = max(panel.height for panel in panels)
    size = (columns * WIDTH / 72, n_rows * height / 72)
    figure = Figure(size, dpi=144, layout="constrained")
    parts = figure.subfigures(n_rows, columns, squeeze=False)
    for panel, part in zip(panels, parts.flat, strict=False):
        axes = part.add_subplot()
        title = fill(panel.title, 46, replace_whitespace=False)
        axes.set_title(f"{title}\n{panel.note}".strip(), loc="left", fontsize=TEXT_SIZE)
        panel.draw(axes)
    return figure


def list_measure_panels(group: Group, baseline: str) -> list[Panel]:
    """The training loss, the measures besides val/loss, and the experts' loads."""
    panels = []
    for name in ("train/loss", *find_measures(group)):
        lines = {variant: collect_means(group, variant, name) for variant in group.variants}
        panels += Chart(group, baseline, name_measure(name), lines).list_panels()
    return panels + list_load_panels(group)


def list_loss_panels(
    group: Group, baseline: str, comparisons: Sequence[Comparison] = ()
) -> list[Panel]:
    """Validation loss, then that minus the baseline's, over the key or over steps.

    `comparisons` are those that the sentence below the differences names.
    """
    losses = {}
    for variant in group.variants + group.curves:
        losses[variant] = collect_means(group, variant, "val/loss")
    title = f"validation loss, {name_unit(group.shown_runs[0])}"
    panels = Chart(group, baseline, title, losses, marks_best=bool(group.key)).list_panels()
    lines = {}
    draws = set()  # what the intervals are over
    for variant in group.variants:
        points = {}
        for x, difference in collect_differences(group, variant, baseline).items():
            points[x] = (difference.mean, difference.low, difference.high)
            draws.add(difference.over)
        lines[variant] = build_line(group, points)
    over = " or ".join(sorted(draws - {""}))
    title = f"minus {baseline}'s, 95% over {over}" if over else f"minus {baseline}'s"
    sentence = describe_verdicts(baseline, comparisons)
    return panels + Chart(group, baseline, title, lines, sentence, True).list_panels()


def describe_verdicts(baseline: str, comparisons: Sequence[Comparison]) -> str:
    """The variants whose loss is decided to differ from the baseline's, and how many are not."""
    decided = []
    n_undecided = 0
    for pair in sorted(comparisons, key=lambda pair: pair.difference.mean):
        if baseline in (pair.right.router, pair.right.label):
            if pair.difference.is_decided:
                decided.append(f"{pair.left.label} {pair.difference.verdict}")
            else:
                n_undecided += 1
    return f"Decided: {', '.join(decided) or 'nothing'}. Undecided: {n_undecided}."


def list_load_panels(group: Group) -> list[Panel]:
    """The experts' loads at the end, relative to an even share; no panel without any.

    A row is a layer of a variant's first run, its experts sorted. All have one scale.
    """
    loads = {}  # {label: (L, E)}
    sentences = []
    for variant in group.variants:
        by_layer = np.array(group.evaluation(variant.first_run).get("val/loads", []), float)
        if by_layer.size:
            shares = -np.sort(-by_layer / by_layer.mean(1, keepdims=True))
            loads[variant.label] = shares
            dead = f"{np.count_nonzero(shares == 0)} of {shares.size} dead"
            sentences.append(f"{variant.label}: {dead}, busiest {shares.max():.1f}")
    if not loads:
        return []
    n_layers = sum(len(shares) for shares in loads.values())
    height = 110 + max(2 * LINE_HEIGHT * len(loads), 4 * n_layers)
    draw = partial(draw_loads, loads=loads)
    return [Panel("load of each layer's experts", draw, f"{'; '.join(sentences)}.", height)]


def draw_loads(axes: Axes, loads: Mapping[str, np.ndarray]) -> None:
    """Draw the layers of each variant below each other, the busiest expert first."""
    widest = max(shares.shape[1] for shares in loads.values())
    rows = np.empty((0, widest))
    middles = []
    for shares in loads.values():
        missing = widest - shares.shape[1]
        middles.append(len(rows) + len(shares) / 2 - 0.5)
        rows = np.append(rows, np.pad(shares, ((0, 0), (0, missing)), constant_values=np.nan), 0)
        axes.axhline(len(rows) - 0.5, color="white", linewidth=2)
    colours = matplotlib.colormaps["viridis"].with_extremes(under=NO_TOKEN)
    scale = PowerNorm(0.5, vmin=1e-9, vmax=np.nanmax(rows))  # a root shows small loads
    mesh = axes.imshow(rows, cmap=colours, norm=scale, aspect="auto", interpolation="nearest")
    axes.set_yticks(middles, [fill(label, 20) for label in loads])
    axes.set_xlabel("expert, busiest first\norange: no token")
    axes.locator_params(axis="x", nbins=4, integer=True)
    bar = axes.figure.colorbar(mesh, ax=axes, location="bottom", label="load, 1 = even share")
    bar.ax.locator_params(axis="x", nbins=4)
