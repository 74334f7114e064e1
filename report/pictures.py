"""Pictures of a group: panels, each with a sentence that says what it shows.

A panel is as wide as a phone's screen, so its text is read there without a zoom. A router has the
same colour, marker and line style in every picture (style.py); of many variants those that do not
lead are grey. Variants with several options have a panel for each choice of options.

A *line* is (P, 4): rows of x, mean and the ends of its band or bar. NaN interrupts it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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

from report.comparisons import UNDECIDED, Comparison, Difference, measure_difference
from report.groups import Group, Variant
from report.run import format_tick, format_value, join_labels
from report.runs import Run
from report.style import GREY, NO_TOKEN, choose_styles
from report.tables import describe_draws, find_measures, name_measure, read_measure
from runtime.metrics import prefix_of

WIDTH = 298  # points of a panel: on a phone it has 328 pixels, and text of TEXT_SIZE points 11
HEIGHT = 225  # points
TEXT_SIZE = 10  # points, matplotlib's own
LINE_HEIGHT = 14  # points of a line of text
MAX_COLOURED = 6
MAX_BARS = 12  # intervals of a line that are drawn side by side with others'; more are a band
MAX_POINTS = 60  # of a line over steps; more are averaged, because training losses are noisy
LONGEST_END = 15  # characters of a label at a curve's end; longer ones are below the panel
END_GAP = 0.085  # between labels at curves' ends, as a part of the axis: a line of text

Lines = Mapping[Variant, np.ndarray]  # of one quantity


class Panel(NamedTuple):
    """A picture: its title, what draws it, what it shows, its height in points, what is clipped."""

    title: str
    draw: Callable[[Axes], None]
    sentence: str
    height: float = HEIGHT
    note: str = ""


def draw_figure(panels: Sequence[Panel], columns: int = 1) -> Figure:
    """A figure with these panels, all as high as the highest."""
    n_rows = math.ceil(len(panels) / columns)
    height = max(panel.height for panel in panels)
    size = (columns * WIDTH / 72, n_rows * height / 72)
    figure = Figure(size, dpi=144, layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(n_rows, columns, i + 1)
        title = fill(panel.title, 46, replace_whitespace=False)
        axes.set_title(f"{title}\n{panel.note}".strip(), loc="left", fontsize=TEXT_SIZE)
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
    for variant in group.variants + group.curves:
        losses[variant] = collect_means(group, variant, "val/loss")
    differences = {}
    draws = set()  # what the intervals are over
    for variant in group.variants:
        differences[variant], of_variant = collect_differences(group, variant, baseline)
        draws |= of_variant
    title = f"validation loss, {group.shown_runs[0].unit}"
    panels = Chart(group, baseline, title, losses, marks_best=bool(group.key)).list_panels()
    draws.discard("")  # of a single seed without documents: no interval
    title = f"minus {baseline}'s"
    if draws:
        title += f", 95% over {' or '.join(sorted(draws, reverse=True))}"
    beside = Chart(group, baseline, title, differences, is_difference=True).list_panels()
    ordered = []
    for options, panel in panels.items():
        ordered.append(panel)
        if options in beside:
            ordered.append(beside[options])
    return ordered


def list_difference_panels(baseline: str, comparisons: Sequence[Comparison]) -> list[Panel]:
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
    draws = [describe_draws(pair.difference) for pair in pairs]
    labels = [pair.left.label for pair in pairs]
    title = f"minus {baseline}'s at the end, 95% over {draws[0]}"
    if len(set(draws)) > 1:
        title = f"minus {baseline}'s at the end, 95%"
        labels = [f"{label}, {draw}" for label, draw in zip(labels, draws, strict=True)]
    labels = [fill(label, 20) for label in labels]
    n_lines = 1 + max(label.count("\n") for label in labels)
    height = 80 + LINE_HEIGHT * n_lines * len(pairs)
    draw = partial(draw_differences, pairs=pairs, labels=labels)
    return [Panel(fill(title, 30), draw, sentence, height)]


def draw_differences(axes: Axes, pairs: Sequence[Comparison], labels: Sequence[str]) -> None:
    """Draw a row for each pair: its difference with the interval, filled if it is decided."""
    axes.axvline(0, color="black", linewidth=0.8)
    styles = choose_styles([pair.left.router for pair in pairs])
    for row, (pair, style) in enumerate(zip(pairs, styles, strict=True)):
        difference = pair.difference
        fill_style = "none" if difference.verdict.startswith(UNDECIDED) else "full"
        color = style["color"]
        axes.plot([difference.low, difference.high], [row, row], color=color)
        axes.plot([difference.mean], [row], "o", color=color, fillstyle=fill_style)
    axes.set_yticks(range(len(pairs)), labels)
    axes.set_ylim(-0.7, len(pairs) - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.grid(alpha=0.3, axis="x")


def list_load_panels(group: Group) -> list[Panel]:
    """The experts' loads at the end, relative to an even share; no panel without any.

    A row is a layer of a variant's first run, its experts sorted. All have one scale.
    """
    loads = {}  # {label: (L, E)}
    sentences = []
    for variant in group.variants:
        evaluation = group.evaluation(variant.runs[0])
        if "val/loads" in evaluation:
            by_layer = np.array(evaluation["val/loads"], float)
            shares = -np.sort(-by_layer / by_layer.mean(1, keepdims=True))
            loads[variant.label] = shares
            n_dead = np.count_nonzero(shares == 0)
            dead = f"{n_dead} of {shares.size} dead"
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


def collect_means(group: Group, variant: Variant, name: str) -> np.ndarray:
    """The line of mean and range over seeds of a name in metrics.jsonl.

    It is over steps, or over the key at the end of each run.
    """
    values = {}  # {x: values of the seeds}
    if group.key:
        for x, runs in sorted(variant.runs_by_x.items()):
            values[x] = read_measure(group, runs, name)
    else:
        series = [run.series(name) for run in variant.runs]
        for step in set.intersection(*map(set, series)):
            values[step] = [values_by_step[step] for values_by_step in series]
    points = []
    for x, of_seeds in values.items():
        if of_seeds:
            points.append((x, float(np.mean(of_seeds)), min(of_seeds), max(of_seeds)))
    return build_line(points, [] if group.key else variant.runs, name)


def collect_differences(
    group: Group, variant: Variant, baseline: str
) -> tuple[np.ndarray, set[str]]:
    """The line of loss minus the baseline's with 95% intervals, and what these are over.

    It is over the key, or over steps after 0.
    """
    counterparts = group.find_counterparts(variant, baseline)
    if not counterparts:
        return build_line([]), set()
    base = counterparts[0]
    differences: dict[Any, Difference | None] = {}
    if group.key:
        for x in group.xs:
            differences[x] = measure_difference(group, variant, base, xs=[x])
    else:
        for step in group.steps:
            differences[step] = measure_difference(group, variant, base, step)
        differences.pop(0, None)  # before training
    points = []
    draws = set()
    for x, difference in differences.items():
        if difference is not None:
            points.append((x, difference.mean, difference.low, difference.high))
            draws.add(difference.over)
    return build_line(points, [] if group.key else [*variant.runs, *base.runs]), draws


def build_line(
    points: Sequence[tuple[float, ...]], runs: Sequence[Run] = (), name: str = "val/loss"
) -> np.ndarray:
    """A line with these points, interrupted at steps whose value of `name` one of `runs` lost."""
    kind = "train/loss" if prefix_of(name) in ("train", "router", "optim", "perf") else "val/loss"
    rows = {point[0]: point for point in points}
    for run in runs:
        for step in run.missing.get(kind, ()):
            rows[step] = (step, math.nan, math.nan, math.nan)
    return np.array(sorted(rows.values()) if points else [], float).reshape(-1, 4)


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

    Where the start of training would swallow the rest, steps are logarithmic, and the axis of
    differences is that of the rest. A value above all first ones is clipped. A note says so.
    """

    group: Group
    baseline: str
    title: str
    lines: Lines
    is_difference: bool = False
    marks_best: bool = False

    def __post_init__(self) -> None:
        lines = {}
        for variant, line in self.lines.items():
            if len(line):
                lines[variant] = line if self.group.key else average_neighbours(line)
        self.lines = lines
        self.is_log = False
        self.limits = (0.0, 1.0)
        self.note = ""
        points = np.concatenate([np.empty((0, 4)), *lines.values()])
        points = points[np.isfinite(points[:, 1])]
        if len(points):
            self.choose_frame(points)

    def choose_frame(self, points: np.ndarray) -> None:
        """Set axes that show these points, (P, 4), and a note on those that they do not."""
        zero = [0.0] if self.is_difference else []  # it is always in the frame
        late = points[points[:, 0] >= points[:, 0].max() / 4]
        length = np.ptp([*points[:, 1], *zero])
        is_swallowed = not self.group.key and length > 2 * np.ptp([*late[:, 1], *zero])
        self.is_log = is_swallowed and not self.is_difference
        if self.is_log and points[:, 0].max() > 0:
            points = points[points[:, 0] > 0]  # a logarithmic axis has no step 0
        shown = late if is_swallowed and self.is_difference else points
        low = np.nanmin([*shown[:, 1:].flat, *zero])
        high = np.nanmax([*shown[:, 1:].flat, *zero])
        if self.is_log:
            first_points = points[points[:, 0] == points[:, 0].min()]
            high = min(high, np.nanmax(first_points[:, 1:]))
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        self.limits = (low - margin, high + margin)
        notes = []
        if np.nanmax(points[:, 1:]) > self.limits[1]:
            notes.append(f"↑ up to {np.nanmax(points[:, 1:]):.3g}")
        if np.nanmin(points[:, 1:]) < self.limits[0]:
            notes.append(f"↓ down to {np.nanmin(points[:, 1:]):.3g}")
        self.note = ", ".join(notes)

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
            if not fit_at_ends(self.group, coloured):
                height += LINE_HEIGHT * len(coloured)
            draw = partial(self.draw, variants=variants, coloured=coloured)
            title = join_labels([self.title, options])
            n_grey = len(variants) - len(coloured)
            note = join_labels([self.note, f"grey: {n_grey} more" if n_grey else ""])
            panels[options] = Panel(title, draw, self.describe(variants), height, note)
        return panels

    def describe(self, variants: Sequence[Variant]) -> str:
        """What the lines of these variants show at their best, or at the last common point."""
        lines = {}
        for variant in variants:
            if variant not in self.group.curves:
                lines[variant] = self.lines[variant]
        if not lines:
            return "These runs are not compared yet."
        if self.marks_best:
            texts = []
            for variant in lines:
                x, loss = find_best(self.group, variant)
                texts.append(f"{variant.label} {loss:.4f} at {format_tick(self.group.key, x)}")
            return f"Lowest, ringed: {'; '.join(texts)}."
        common = set.intersection(*(set(line[:, 0]) for line in lines.values()))
        if not common:
            return ""
        x = max(common)
        place = format_value(self.group.key, x) if self.group.key else f"step {x:,.0f}"
        points = [(variant.label, *line[line[:, 0] == x][0, 1:]) for variant, line in lines.items()]
        if self.is_difference:
            n_apart = sum(low > 0 or high < 0 for _, _, low, high in points)
            return f"Intervals that exclude 0 at {place}: {n_apart} of {len(points)}."
        points.sort(key=lambda point: point[1])
        text = f"At {place}: {points[0][0]} {points[0][1]:.4g}"
        if len(points) > 1:
            text += f" is lowest, {points[-1][0]} {points[-1][1]:.4g} highest"
        return f"{text}."

    def draw(self, axes: Axes, variants: Sequence[Variant], coloured: Sequence[Variant]) -> None:
        """Draw the lines of some variants; those without a colour are behind the others."""
        axes.grid(alpha=0.3)
        axes.set_xlabel(self.group.key or "step")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        for variant in variants:
            if variant not in coloured:
                xs, means, _, _ = self.lines[variant].T
                axes.plot(xs, means, color=GREY, linewidth=0.8, label=f"_{variant.label}")
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
        if fit_at_ends(self.group, coloured):
            label_ends(axes)
        else:
            below = axes.transAxes + ScaledTranslation(0, -36 / 72, axes.figure.dpi_scale_trans)
            lines = list_named_lines(axes)
            axes.legend(
                handles=lines,
                frameon=False,
                loc="upper left",
                bbox_to_anchor=(-0.1, 0),
                bbox_transform=below,
            )

    def draw_line(self, axes: Axes, variant: Variant, style: dict[str, Any], shift: float) -> None:
        """Draw a line with its intervals: a band, or bars, `shift` points aside of others'."""
        xs, means, lows, highs = self.lines[variant].T
        color = style["color"]
        transform = axes.transData
        if len(xs) > MAX_BARS or not (self.is_difference or self.group.key):
            axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
        else:
            transform += ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
            axes.vlines(xs, lows, highs, color=color, alpha=0.6, transform=transform)
        style["markersize"] = 2 if len(xs) > MAX_BARS else 4
        if variant in self.group.curves:
            style["linewidth"] = 0.7
        label = label_line(self.group, variant)
        axes.plot(xs, means, label=label, transform=transform, **style)
        if self.marks_best and variant not in self.group.curves:
            ring = {"marker": "o", "fillstyle": "none", "markersize": 11, "color": color}
            best = find_best(self.group, variant)
            axes.plot(*best, label=f"_best {label}", transform=transform, **ring)

    def scale_steps(self, axes: Axes) -> None:
        """Few ticks, and logarithmic steps where the start would swallow the rest."""
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        steps = np.concatenate([line[:, 0] for line in self.lines.values()])
        margin = 0.05 * np.ptp(steps) or 1.0
        axes.set_xlim(steps.min() - margin, steps.max() + margin)  # shifted lines do not set it
        if self.is_log:
            first_step = steps[steps > 0].min()  # a young run may have step 0 alone
            subs = (1, 2, 5) if steps.max() < 50 * first_step else (1,)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=subs))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlim(first_step / 1.1, steps.max() * 1.1)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def average_neighbours(line: np.ndarray) -> np.ndarray:
    """At most MAX_POINTS points of a line: each the mean of as many, at the last one's step."""
    n_each = math.ceil(len(line) / MAX_POINTS)
    firsts = np.arange(0, len(line), n_each)
    lasts = np.minimum(firsts + n_each, len(line)) - 1
    averaged = np.add.reduceat(line, firsts) / (lasts - firsts + 1)[:, None]
    averaged[:, 0] = line[lasts, 0]
    return averaged


def label_line(group: Group, variant: Variant) -> str:
    """A variant's label; that of a run that is not compared says its seed and state."""
    if variant not in group.curves:
        return variant.label
    (run,) = variant.runs
    return f"{variant.label}, seed {run.seed}, {run.status.state}"


def fit_at_ends(group: Group, variants: Sequence[Variant]) -> bool:
    """True if the labels of these variants are short enough for the ends of lines."""
    return all(len(label_line(group, variant)) <= LONGEST_END for variant in variants)


def list_named_lines(axes: Axes) -> list:
    """The lines of a panel that have a label."""
    return [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def label_ends(axes: Axes) -> None:
    """Name the lines at their ends; labels that would touch are moved apart."""
    lines = {}  # {height of its end as a part of the axes, its label: line}
    low, high = axes.get_ylim()
    for line in list_named_lines(axes):
        values = np.asarray(line.get_ydata())
        end = (values[np.isfinite(values)][-1] - low) / (high - low)
        lines[np.clip(end, 0, 1), line.get_label()] = line
    ends = sorted(lines)
    offsets = END_GAP * np.arange(len(ends))
    heights = np.maximum.accumulate([end for end, _ in ends] - offsets) + offsets
    heights -= max(0, heights[-1] - 1)
    for (end, label), height in zip(ends, heights, strict=True):
        color = lines[end, label].get_color()
        link = {"arrowstyle": "-", "color": color, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            label, (1, end), (1.06, height), "axes fraction", va="center", arrowprops=link
        )


def scale_key_axis(axes: Axes, group: Group) -> None:
    """Make a factor of 2 in the key, and the way from 0 to its smallest value, equally long.

    A tick that would touch the one to its left has no text.
    """
    smallest = min(abs(x) for x in group.xs if x)
    axes.set_xscale("symlog", base=2, linscale=0.5, linthresh=smallest)
    places = axes.transScale.transform([(x, 0) for x in group.xs])[:, 0]
    margin = 0.08 * np.ptp(places)
    ends = [(places.min() - margin, 0), (places.max() + margin, 0)]
    left, right = axes.transScale.inverted().transform(ends)[:, 0]
    axes.set_xlim(left, right)  # shifted lines do not set it
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
