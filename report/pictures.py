"""Pictures of a group: panels, each with a sentence that says what it shows.

A panel is as wide as a phone's screen, so its text is read there without a zoom. A router has the
same colour, marker and line style in every picture (style.py); of many variants those that do not
lead are grey. Variants with several options have a panel for each choice of options.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

from report.comparisons import MIN_SEEDS, UNDECIDED, Comparison, measure_difference
from report.groups import Group, Variant, format_tick, format_value, join_labels
from report.runs import Run
from report.style import GREY, NO_TOKEN, choose_styles
from report.tables import find_measures, name_measure, read_measure
from runtime.metrics import prefix_of

WIDTH = 298  # points of a panel: on a phone it has 328 pixels, and text of TEXT_SIZE points 11
HEIGHT = 225  # points
TEXT_SIZE = 10  # points, matplotlib's own
LINE_HEIGHT = 14  # points of a line of text
MAX_COLOURED = 6
MAX_BARS = 12  # intervals of a line that are drawn side by side with others'; more are a band
MAX_POINTS = 60  # of a line over steps; more are averaged, because training losses are noisy
LONGEST_END = 15  # characters of a label at a curve's end; longer ones are below the panel


class PlotPoint(NamedTuple):
    """A point of a line, with the ends of its band or bar."""

    mean: float
    low: float
    high: float


Points = Mapping[Any, PlotPoint]  # {x: point}
Lines = Mapping[Variant, Points]  # of one quantity


class Panel(NamedTuple):
    """A picture: its title, what draws it, what it shows, and its height in points."""

    title: str
    draw: Callable[[Axes], None]
    sentence: str
    height: float = HEIGHT


def draw_figure(panels: Sequence[Panel], columns: int = 1) -> Figure:
    """A figure with these panels, all as high as the highest."""
    n_rows = math.ceil(len(panels) / columns)
    height = max(panel.height for panel in panels)
    size = (columns * WIDTH / 72, n_rows * height / 72)
    figure = Figure(size, dpi=144, layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(n_rows, columns, i + 1)
        axes.set_title(
            fill(panel.title, 46, replace_whitespace=False), loc="left", fontsize=TEXT_SIZE
        )
        panel.draw(axes)
    return figure


def list_measure_panels(group: Group, baseline: str) -> list[Panel]:
    """The training loss, the measures besides val/loss, and the experts' loads."""
    panels = []
    for name in ("train/loss", *find_measures(group)):
        lines = {variant: collect_means(group, variant, name) for variant in group.variants}
        panels += Chart(group, baseline, name_measure(name), lines).list_panels().values()
    return panels + list_load_panels(group)


def list_loss_panels(group: Group, baseline: str) -> list[Panel]:
    """Validation loss, and that minus the baseline's, over the key or over steps."""
    losses = {}
    differences = {}
    for variant in group.variants + group.curves:
        losses[variant] = collect_means(group, variant, "val/loss")
    for variant in group.variants:
        differences[variant] = collect_differences(group, variant, baseline)
    title = f"validation loss, {group.shown_runs[0].unit}"
    panels = Chart(group, baseline, title, losses, marks_best=group.key is not None).list_panels()
    title = f"minus {baseline}'s, 95% over {name_draws(group)}"
    beside = Chart(group, baseline, title, differences, is_difference=True).list_panels()
    ordered = []
    for options, panel in panels.items():
        ordered.append(panel)
        if options in beside:
            ordered.append(beside[options])
    return ordered


def name_draws(group: Group) -> str:
    """What the intervals of differences are over."""
    seeds = {run.seed for run in group.runs}
    return "seeds" if len(seeds) >= MIN_SEEDS else "documents"


def list_difference_panels(
    group: Group, baseline: str, comparisons: Sequence[Comparison]
) -> list[Panel]:
    """The differences that are judged, a row for each variant but the baseline; none without."""
    pairs = [pair for pair in comparisons if baseline in (pair.right.router, pair.right.label)]
    if not pairs:
        return []
    pairs.sort(key=lambda pair: -pair.difference.mean)
    decided = []
    for pair in reversed(pairs):
        if not pair.difference.verdict.startswith(UNDECIDED):
            decided.append(f"{pair.left.label} {pair.difference.verdict}")
    sentence = f"Decided: {', '.join(decided) or 'nothing'}. Hollow markers are undecided."
    title = fill(f"minus {baseline}'s at the end, 95% over {name_draws(group)}", 30)
    height = 80 + LINE_HEIGHT * len(pairs)
    return [Panel(title, partial(draw_differences, pairs=pairs), sentence, height)]


def draw_differences(axes: Axes, pairs: Sequence[Comparison]) -> None:
    """Draw a row for each pair: its difference with the interval, filled if it is decided."""
    styles = choose_styles([pair.left.router for pair in pairs])
    axes.axvline(0, color="black", linewidth=0.8)
    for row, (pair, style) in enumerate(zip(pairs, styles, strict=True)):
        difference = pair.difference
        fill_style = "none" if difference.verdict.startswith(UNDECIDED) else "full"
        color = style["color"]
        axes.plot([difference.low, difference.high], [row, row], color=color)
        axes.plot([difference.mean], [row], "o", color=color, fillstyle=fill_style)
    axes.set_yticks(range(len(pairs)), [fill(pair.left.label, 20) for pair in pairs])
    axes.set_ylim(-0.7, len(pairs) - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.grid(alpha=0.3, axis="x")


def list_load_panels(group: Group) -> list[Panel]:
    """The experts' loads at the end, relative to an even share; no panel without any.

    A row is a layer of a variant's first run, its experts sorted. All have one scale.
    """
    loads = {}  # {label: (L, E)}
    for variant in group.variants:
        evaluation = group.evaluation(variant.runs[0])
        if "val/loads" in evaluation:
            by_layer = np.array(evaluation["val/loads"], float)
            shares = by_layer / by_layer.mean(1, keepdims=True)
            loads[variant.label] = -np.sort(-shares)
    if not loads:
        return []
    sentences = []
    for label, shares in loads.items():
        n_dead = np.count_nonzero(shares == 0)
        sentences.append(f"{label}: {n_dead} of {shares.size} dead, busiest {shares.max():.1f}")
    n_layers = sum(len(shares) for shares in loads.values())
    height = 110 + max(2 * LINE_HEIGHT * len(loads), 4 * n_layers)
    draw = partial(draw_loads, loads=loads)
    return [Panel("load of each layer's experts", draw, f"{'; '.join(sentences)}.", height)]


def draw_loads(axes: Axes, loads: Mapping[str, np.ndarray]) -> None:
    """Draw the layers of each variant below each other, the busiest expert first."""
    widest = max(shares.shape[1] for shares in loads.values())
    rows = []
    middles = []
    for shares in loads.values():
        middles.append(len(rows) + len(shares) / 2 - 0.5)
        for layer in shares:
            rows.append(np.pad(layer, (0, widest - len(layer)), constant_values=np.nan))
        axes.axhline(len(rows) - 0.5, color="white", linewidth=2)
    image = np.array(rows)
    colours = matplotlib.colormaps["viridis"].with_extremes(under=NO_TOKEN)
    scale = PowerNorm(0.5, vmin=1e-9, vmax=np.nanmax(image))  # a root shows small loads
    mesh = axes.imshow(image, cmap=colours, norm=scale, aspect="auto", interpolation="nearest")
    axes.set_yticks(middles, [fill(label, 20) for label in loads])
    axes.set_xlabel("expert, busiest first\norange: no token")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    bar = axes.figure.colorbar(mesh, ax=axes, location="bottom", label="load, 1 = even share")
    bar.ax.xaxis.set_major_locator(MaxNLocator(4))


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


def average_neighbours(points: Points) -> Points:
    """At most MAX_POINTS points: each the mean of as many neighbours, at the last one's step."""
    n_each = math.ceil(len(points) / MAX_POINTS)
    steps = list(points)
    averaged = {}
    for first in range(0, len(steps), n_each):
        neighbours = steps[first : first + n_each]
        mean, low, high = np.mean([points[step] for step in neighbours], axis=0)
        averaged[neighbours[-1]] = PlotPoint(float(mean), float(low), float(high))
    return averaged


def choose_coloured(group: Group, variants: Sequence[Variant], baseline: str) -> list[Variant]:
    """The variants with a colour: all of few, else the baseline and those with lowest losses.

    Runs that are not compared are grey among many.
    """
    if len(variants) <= MAX_COLOURED:
        return list(variants)
    compared = [variant for variant in variants if variant not in group.curves]
    ranked = sorted(compared, key=lambda variant: find_best(group, variant)[1])
    ranked.sort(key=lambda variant: baseline not in (variant.router, variant.label))
    return ranked[:MAX_COLOURED]


def find_best(group: Group, variant: Variant) -> tuple[Any, float]:
    """The value of the key with the lowest mean loss, and that loss."""
    means = {}
    for x, runs in variant.runs_by_x.items():
        means[x] = float(np.mean([group.loss(run) for run in runs.values()]))
    best = min(means, key=lambda x: means[x])
    return best, means[best]


@dataclass
class Chart:
    """Lines of one quantity: a panel for each choice of options, all with the same axes.

    Where the start of training would swallow the rest, steps are logarithmic, and differences are
    shown from a quarter of training. A value above all first ones is clipped. Notes say so.
    """

    group: Group
    baseline: str
    title: str
    lines: Lines
    is_difference: bool = False
    marks_best: bool = False

    def __post_init__(self) -> None:
        lines = {}
        for variant, points in self.lines.items():
            if points:
                lines[variant] = points if self.group.key else average_neighbours(points)
        self.lines = lines
        self.start = -math.inf  # the first step that is shown
        self.is_log = False
        if not self.group.key:
            self.choose_steps()
        self.limits = self.find_limits()

    def choose_steps(self) -> None:
        """Set `start` and `is_log` if the first quarter makes the axis twice as long."""
        last_step = max((max(points) for points in self.lines.values()), default=0)
        early = []
        late = []
        zero = [0.0] if self.is_difference else []  # it is always in the frame
        for points in self.lines.values():
            for step, point in points.items():
                values = early if step < last_step / 4 else late
                if math.isfinite(point.mean):
                    values.append(point.mean)
        if early and late and np.ptp(early + late + zero) > 2 * np.ptp(late + zero):
            self.start = last_step / 4 if self.is_difference else 1
            self.is_log = not self.is_difference

    def find_limits(self) -> tuple[float, float]:
        """The ends of the axis of values, around whole intervals and, of differences, zero."""
        firsts = []
        values = [0.0] if self.is_difference else []
        for points in self.lines.values():
            shown = [point for x, point in points.items() if x >= self.start]
            firsts += [point.high for point in shown[:1]]
            for point in shown:
                values += point
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        low = min(finite)
        high = max(finite)
        if self.is_log:
            high = min(high, max(firsts))
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return low - margin, high + margin

    def list_panels(self) -> dict[str, Panel]:
        """{options: its panel}; all variants of a single router are in one panel."""
        shown = self.group.variants + self.group.curves
        has_one_router = len({variant.router for variant in shown}) == 1
        rows: dict[str, list[Variant]] = {}
        for variant in self.lines:
            options = "" if has_one_router else variant.options_label
            rows.setdefault(options, []).append(variant)
        panels = {}
        for options, variants in rows.items():
            coloured = choose_coloured(self.group, variants, self.baseline)
            height = HEIGHT
            if not fit_at_ends(label_line(self.group, variant) for variant in coloured):
                height += LINE_HEIGHT * (len(coloured) + 1)
            draw = partial(self.draw, variants=variants, coloured=coloured)
            title = join_labels([self.title, options])
            panels[options] = Panel(title, draw, self.describe(variants), height)
        return panels

    def describe(self, variants: Sequence[Variant]) -> str:
        """What the lines of these variants show at their best, or at the last common point."""
        variants = [variant for variant in variants if variant not in self.group.curves]
        if not variants:
            return "These runs are not compared yet."
        if self.marks_best:
            texts = []
            for variant in variants:
                x, loss = find_best(self.group, variant)
                texts.append(f"{variant.label} {loss:.4f} at {format_tick(self.group.key, x)}")
            return f"Lowest, ringed: {'; '.join(texts)}."
        common = set.intersection(*(set(self.lines[variant]) for variant in variants))
        if not common:
            return ""
        x = max(common)
        place = format_value(self.group.key, x) if self.group.key else f"step {x:,}"
        points = {variant.label: self.lines[variant][x] for variant in variants}
        if self.is_difference:
            n_apart = sum(point.low > 0 or point.high < 0 for point in points.values())
            return f"Intervals that exclude 0 at {place}: {n_apart} of {len(points)}."
        lowest = min(points, key=lambda label: points[label].mean)
        highest = max(points, key=lambda label: points[label].mean)
        text = f"At {place}: {lowest} {points[lowest].mean:.4g}"
        if highest != lowest:
            text += f" is lowest, {highest} {points[highest].mean:.4g} highest"
        return f"{text}."

    def draw(self, axes: Axes, variants: Sequence[Variant], coloured: Sequence[Variant]) -> None:
        """Draw the lines of some variants; those without a colour are behind the others."""
        axes.grid(alpha=0.3)
        axes.set_xlabel(self.group.key or "step")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        for variant in variants:
            if variant not in coloured:
                means = [point.mean for point in self.lines[variant].values()]
                label = f"_{variant.label}"
                axes.plot(list(self.lines[variant]), means, color=GREY, linewidth=0.8, label=label)
        styles = choose_styles([variant.router for variant in coloured])
        for i, (variant, style) in enumerate(zip(coloured, styles, strict=True)):
            self.draw_line(axes, variant, style, 4 * i - 2 * (len(coloured) - 1))
        if self.is_difference:
            axes.axhline(0, color="black", linewidth=0.8)
        if self.group.key:
            scale_key_axis(axes, self.group)
        else:
            self.scale_steps(axes)
        axes.set_ylim(self.limits)
        self.note_clipped(axes)
        label_lines(axes, len(variants) - len(coloured))

    def draw_line(self, axes: Axes, variant: Variant, style: dict[str, Any], shift: float) -> None:
        """Draw a line with its intervals: a band, or bars, `shift` points aside of others'."""
        points = self.lines[variant]
        xs = list(points)
        means, lows, highs = zip(*points.values(), strict=True)
        color = style["color"]
        transform = axes.transData
        if len(points) > MAX_BARS or not (self.is_difference or self.group.key):
            axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
        else:
            aside = ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
            transform = axes.transData + aside
            axes.vlines(xs, lows, highs, color=color, alpha=0.6, transform=transform)
        size = 2 if len(points) > MAX_BARS else 4
        label = label_line(self.group, variant)
        if variant in self.group.curves:
            style["linewidth"] = 0.7
        axes.plot(xs, means, label=label, transform=transform, markersize=size, **style)
        if self.marks_best and variant not in self.group.curves:
            x = find_best(self.group, variant)[0]
            ring = {"marker": "o", "fillstyle": "none", "markersize": 11, "color": color}
            axes.plot([x], [points[x].mean], label=f"_best {label}", transform=transform, **ring)

    def scale_steps(self, axes: Axes) -> None:
        """Show the steps from `start` on, with few ticks."""
        last_step = max(max(points) for points in self.lines.values())
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if self.is_log:
            steps: set[int] = set()
            for points in self.lines.values():
                steps.update(points)
            first_step = min(steps - {0})  # a young run may have step 0 alone
            subs = (1, 2, 5) if last_step < 50 * first_step else (1,)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=subs))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlim(first_step / 1.1, last_step * 1.1)
        elif self.start > 0:
            axes.set_xlim(self.start - 0.04 * last_step, 1.04 * last_step)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    def note_clipped(self, axes: Axes) -> None:
        """Say with arrows what is not in the frame."""
        before = []
        above = []
        for points in self.lines.values():
            for x, point in points.items():
                if x < self.start:
                    before.append(point.mean)
                elif point.high > self.limits[1]:
                    above.append(point.high)
        notes = []
        if before:
            notes.append(f"← before: {min(before):.3g} to {max(before):.3g}")
        if above:
            notes.append(f"↑ up to {max(above):.3g}")
        text = ", ".join(notes)
        axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", color="#444444")


def label_line(group: Group, variant: Variant) -> str:
    """A variant's label; that of a run that is not compared says its seed and state."""
    if variant not in group.curves:
        return variant.label
    (run,) = variant.runs
    return f"{variant.label}, seed {run.seed}, {run.status.state}"


def fit_at_ends(labels: Iterable[str]) -> bool:
    """True if these labels are short enough for the ends of lines."""
    return all(len(label) <= LONGEST_END for label in labels)


def label_lines(axes: Axes, n_grey: int) -> None:
    """Name the lines at their ends, or in a legend below the panel; say how many are grey."""
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    more = f"grey: {n_grey} more" if n_grey else ""
    if not fit_at_ends(str(line.get_label()) for line in lines):
        below = axes.transAxes + ScaledTranslation(0, -36 / 72, axes.figure.dpi_scale_trans)
        axes.legend(
            handles=lines,
            title=more,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(-0.1, 0),
            bbox_transform=below,
        )
        return
    low, high = axes.get_ylim()
    ends = []  # (height as a part of the axes, text, colour)
    for line in lines:
        values = np.asarray(line.get_ydata(), float)
        end = float(values[np.isfinite(values)][-1])
        height = min(1.0, (end - low) / (high - low))
        ends.append((height, str(line.get_label()), line.get_color()))
    if more:
        ends.append((0.0, more, GREY))
    ends.sort()
    heights = spread_out([end[0] for end in ends], 0.085)
    for (end, text, color), height in zip(ends, heights, strict=True):
        link = {"arrowstyle": "-", "color": color, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
        axes.annotate(text, (1, end), (1.06, height), "axes fraction", va="center", arrowprops=link)


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved to be `gap` apart, and at most 1 where there is room."""
    spread = []
    for i, height in enumerate(heights):
        spread.append(max(height, spread[-1] + gap) if i else height)
    top = 1.0
    for i in reversed(range(len(spread))):
        spread[i] = min(spread[i], top)
        top = spread[i] - gap
    return spread


def scale_key_axis(axes: Axes, group: Group) -> None:
    """Make a factor of 2 in the key, and the way from 0 to its smallest value, equally long.

    A tick that would touch the one to its left has no text.
    """
    smallest = min(abs(x) for x in group.xs if x)
    axes.set_xscale("symlog", base=2, linscale=0.5, linthresh=smallest)
    axes.margins(x=0.08)
    places = axes.transScale.transform([(x, 0) for x in group.xs])[:, 0]
    characters = 32 * (places - places[0]) / np.ptp(places)  # that an axis has room for
    texts = []
    end = -math.inf
    for x, place in zip(group.xs, characters, strict=True):
        text = format_tick(group.key, x)
        if place - len(text) / 2 < end:
            text = ""
        else:
            end = place + len(text) / 2 + 0.7
        texts.append(text)
    axes.set_xticks(group.xs, texts)
    axes.minorticks_off()
