"""Lines of one quantity as a panel: over steps, or over the key of --over.

A router has the same colour, marker and line style in every picture (style.py); of many variants
those that do not lead are grey.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

from report.groups import Group, Variant
from report.labels import format_tick, format_value
from report.style import GREY, choose_styles

HEIGHT = 225  # points
LINE_HEIGHT = 14  # points of a line of text
MAX_COLOURED = 6
MAX_BARS = 42  # of all lines, 4 points each, that fit side by side; more are bands
LONGEST_END = 15  # characters of a label at a curve's end; longer ones are below the panel
END_GAP = 0.085  # between labels at curves' ends, as a part of the axis: a line of text
AXIS_CHARACTERS = 32  # that fit side by side below an axis


class Panel(NamedTuple):
    """A picture: its title, what draws it, what it shows, its height in points, what is clipped."""

    title: str
    draw: Callable[[Axes], None]
    sentence: str
    height: float = HEIGHT
    note: str = ""


@dataclass
class Chart:
    """Lines of one quantity.

    Where the start of training would swallow the rest, steps are logarithmic, and the axis of
    differences is that of the rest. Runs that are not compared do not set the frame. A note says
    what is beyond it.
    """

    group: Group
    baseline: str
    title: str
    lines: Mapping[Variant, np.ndarray]
    sentence: str = ""  # by default what the lines of compared variants show
    is_difference: bool = False  # zero is always in the frame
    marks_best: bool = False  # the lowest loss over the key

    def list_panels(self) -> list[Panel]:
        """The panel; none if no line has a value."""
        self.lines = {v: line for v, line in self.lines.items() if np.isfinite(line[:, 1]).any()}
        if not self.lines:
            return []
        notes = self.choose_frame()
        self.choose_styles()
        n_grey = len(self.lines) - len(self.styles)
        if n_grey:
            notes.append(f"grey: {n_grey} more")
        height = HEIGHT
        if not self.names_ends:
            height += LINE_HEIGHT * len(self.styles)
        sentence = self.sentence or self.describe()
        return [Panel(self.title, self.draw, sentence, height, ", ".join(notes))]

    def choose_styles(self) -> None:
        """Choose the variants with a colour: all of few, else the baseline and the lowest losses.

        They are the same in every picture of the group. Runs that are not compared are grey among
        many.
        """

        def rank(variant: Variant) -> tuple:
            is_baseline = self.baseline in (variant.router, variant.label)
            ends = self.group.ends_of(variant)
            return not is_baseline, min(np.mean(self.group.losses_at(variant, x)) for x in ends)

        variants = self.group.variants + self.group.curves
        if len(variants) > MAX_COLOURED and self.group.variants:
            variants = sorted(self.group.variants, key=rank)
        variants = variants[:MAX_COLOURED]
        styles = choose_styles([variant.router for variant in variants])
        by_variant = zip(variants, styles, strict=True)
        self.styles = {variant: style for variant, style in by_variant if variant in self.lines}
        # long labels are below the panel
        self.names_ends = all(len(variant.label) <= LONGEST_END for variant in self.styles)

    def choose_frame(self) -> list[str]:
        """Choose the corners of the frame; notes on what is beyond it."""
        compared = [line for variant, line in self.lines.items() if not variant.state]
        lines = np.concatenate(list(self.lines.values()))
        points = np.concatenate(compared) if compared else lines
        points = points[np.isfinite(points[:, 1])]
        if self.is_difference:
            points = np.append(points, [[points[:, 0].max(), 0, 0, 0]], axis=0)
        steps = points[:, 0]
        is_shown = steps >= steps.max() / 4
        is_swallowed = np.ptp(points[:, 1]) > 2 * np.ptp(points[is_shown, 1])
        self.is_log = False
        if self.group.key or not is_swallowed:
            is_shown[:] = True
        elif not self.is_difference:
            self.is_log = True  # such an axis has no step 0
            self.lines = {v: line for v, line in self.lines.items() if line[-1, 0] > 0}
            lines = lines[lines[:, 0] > 0]
            is_shown |= steps == steps[steps > 0].min()
        values = points[is_shown, 1:]
        if not values.any():  # an axis of zeros has no negative part
            values = np.append(values, 1)
        low, high = find_range(values)
        lowest, highest = find_range(lines[:, 1:])
        notes = []
        span = high - low
        if highest > high + span:
            notes.append(f"↑ up to {highest:.3g}")
        else:
            high = max(high, highest)
        if lowest < low - span:
            notes.append(f"↓ down to {lowest:.3g}")
        else:
            low = min(low, lowest)
        self.corners = list(zip(find_range(lines[:, 0]), (low, high), strict=True))
        return notes

    def describe(self) -> str:
        """What the lines of compared variants show at their best, or at the last common point."""
        lines = {v.label: line for v, line in self.lines.items() if not v.state}
        if not lines:
            return "These runs are not compared yet."
        key = self.group.key
        if self.marks_best:
            texts = []
            for label, line in lines.items():
                x, loss, _, _ = find_lowest(line)
                texts.append(f"{label} {loss:.4f} at {format_tick(key, x)}")
            return f"Lowest, ringed: {'; '.join(texts)}."
        common = set.intersection(*(set(line[:, 0]) for line in lines.values()))
        if not common:
            return ""
        x = max(common)
        place = format_value(key, x) if key else f"step {x:,.0f}"
        values = {label: line[line[:, 0] == x][0, 1] for label, line in lines.items()}
        ranked = sorted(values, key=lambda label: values[label])
        lowest = f"{values[ranked[0]]:.4g}"
        highest = f"{values[ranked[-1]]:.4g}"
        if lowest == highest:
            return f"At {place}: {lowest}{' for all' if len(ranked) > 1 else ''}."
        return f"At {place}: {ranked[0]} {lowest} is lowest, {ranked[-1]} {highest} highest."

    def draw(self, axes: Axes) -> None:
        """Draw the lines; those without a colour are behind the others."""
        axes.grid(alpha=0.3)
        axes.set_xlabel(self.group.key or "step")
        if self.group.key:
            scale_key_axis(axes, self.group)
        else:
            self.scale_steps(axes)
        axes.margins(0.1, 0.08)  # lines side by side, and a ring, need room
        axes.update_datalim(self.corners)
        axes.autoscale_view()
        axes.autoscale(False)  # lines that are shifted do not set the frame
        axes.locator_params(axis="y", nbins=5)
        for variant, line in self.lines.items():
            if variant not in self.styles:
                axes.plot(line[:, 0], line[:, 1], color=GREY, linewidth=0.8, label="_grey")
        for i, variant in enumerate(self.styles):
            self.draw_line(axes, variant, i - (len(self.styles) - 1) / 2)
        if self.is_difference:
            axes.axhline(0, color="black", linewidth=0.8)
        if self.names_ends:
            self.label_ends(axes)
        else:
            axes.figure.legend(loc="outside lower left", frameon=False)

    def draw_line(self, axes: Axes, variant: Variant, shift: float) -> None:
        """Draw a line with its intervals: a band, or bars, `shift` bars aside of the middle."""
        line = self.lines[variant]
        xs, means, lows, highs = line.T
        style = dict(self.styles[variant])
        color = style["color"]
        transform = axes.transData
        n_bars = len(line) * len(self.styles)
        is_short = n_bars <= MAX_BARS
        if self.group.key or is_short and self.is_difference:
            points = 4 * min(1, MAX_BARS / n_bars) * shift
            transform += ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
            axes.vlines(xs, lows, highs, color=color, alpha=0.6, transform=transform)
        else:
            axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
        style["markersize"] = 4 if is_short else 2
        style["linewidth"] = 0.7 if variant.state else 1.5
        axes.plot(xs, means, label=variant.label, transform=transform, **style)
        if self.marks_best:
            x, loss, _, _ = find_lowest(line)
            axes.plot(x, loss, "o", fillstyle="none", ms=11, color=color, transform=transform)

    def scale_steps(self, axes: Axes) -> None:
        """Few ticks, and logarithmic steps where the start would swallow the rest."""
        if self.is_log:
            (first_step, _), (last_step, _) = self.corners
            axes.set_xscale("log", nonpositive="mask")
            factor = max(2, round((last_step / first_step) ** (1 / 3)))
            ticks = np.round(last_step / factor ** np.arange(4.0))
            axes.set_xticks(ticks[ticks >= first_step])
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.locator_params(axis="x", nbins=4, integer=True)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    def label_ends(self, axes: Axes) -> None:
        """Name the coloured lines at their ends; labels that would touch are moved apart."""
        low, high = axes.get_ylim()
        ends = []
        for variant, style in self.styles.items():
            means = self.lines[variant][:, 1]
            last = means[np.isfinite(means)][-1]
            end = np.clip((last - low) / (high - low), 0, 1)
            ends.append((end, variant.label, style["color"]))
        ends.sort()
        offsets = END_GAP * np.arange(len(ends))
        heights = np.maximum.accumulate([end for end, _, _ in ends] - offsets) + offsets
        heights -= max(0, heights[-1] - 1)
        for (end, label, color), height in zip(ends, heights, strict=True):
            link = {"arrowstyle": "-", "color": color, "relpos": (0, 0.5), "shrinkA": 0}
            axes.annotate(
                label, (1, end), (1.06, height), "axes fraction", va="center", arrowprops=link
            )


def find_range(values: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest of the values that are not NaN."""
    return np.nanmin(values), np.nanmax(values)


def find_lowest(line: np.ndarray) -> np.ndarray:
    """The point of a line with the lowest mean, (4,)."""
    return line[np.nanargmin(line[:, 1])]


def scale_key_axis(axes: Axes, group: Group) -> None:
    """Make a factor of 2 in the key, and the way from 0 to its smallest value, equally long.

    A tick that would touch the one to its left has no text.
    """
    smallest = min((abs(x) for x in group.xs if x), default=1)
    axes.set_xscale("symlog", base=2, linscale=0.5, linthresh=smallest)
    places = axes.transScale.transform([(x, 0) for x in group.xs])[:, 0]
    length = np.ptp(places) or 1.0  # 0 of a single value
    characters = AXIS_CHARACTERS * (places - places[0]) / length
    texts = []
    end = -math.inf
    for x, middle in zip(group.xs, characters, strict=True):
        text = format_tick(group.key, x)
        half = len(text) / 2
        if middle - half < end:
            text = ""
        else:
            end = middle + half + 0.7
        texts.append(text)
    axes.set_xticks(group.xs, texts)
    axes.minorticks_off()
