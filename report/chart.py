"""Lines of one quantity as panels: over steps, or over the key of --over.

A router has the same colour, marker and line style in every picture (style.py); of many variants
those that do not lead are grey. Variants with several options have a panel for each choice of
options, all with the same axes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

from report.groups import Group, Variant
from report.run import format_tick, format_value, join_labels
from report.style import GREY, choose_styles

HEIGHT = 225  # points
LINE_HEIGHT = 14  # points of a line of text
MAX_COLOURED = 6
MAX_BARS = 12  # intervals of a line that are drawn side by side with others'; more are a band
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
    """Lines of one quantity, with a panel for each choice of options.

    Where the start of training would swallow the rest, steps are logarithmic, and the axis of
    differences is that of the rest. A value above all first ones is clipped. A note says so.
    """

    group: Group
    baseline: str
    title: str
    lines: Mapping[Variant, np.ndarray]
    is_difference: bool = False  # zero is always in the frame
    marks_best: bool = False  # the lowest loss over the key

    def list_panels(self) -> list[Panel]:
        """A panel for each choice of options; all variants of a single router are in one."""
        group = self.group
        has_one_router = len({variant.router for variant in group.variants + group.curves}) == 1
        rows: dict[str, list[Variant]] = {}
        for variant, line in self.lines.items():
            if np.isfinite(line[:, 1]).any():
                options = "" if has_one_router else variant.options_label
                rows.setdefault(options, []).append(variant)
        if not rows:
            return []
        self.choose_frame()
        panels = []
        for options, variants in rows.items():
            coloured = self.choose_coloured(variants)
            height = HEIGHT
            if not fit_at_ends(coloured):
                height += LINE_HEIGHT * len(coloured)
            draw = partial(self.draw, variants=variants, coloured=coloured)
            title = join_labels([self.title, options])
            n_grey = len(variants) - len(coloured)
            note = join_labels([self.note, f"grey: {n_grey} more" if n_grey else ""])
            panels.append(Panel(title, draw, self.describe(variants), height, note))
        return panels

    def choose_frame(self) -> None:
        """Choose the corners of the frame, and note which points are beyond it."""
        points = np.concatenate(list(self.lines.values()))
        points = points[np.isfinite(points[:, 1])]
        last_step = points[:, 0].max()
        if self.is_difference:
            points = np.append(points, [[last_step, 0, 0, 0]], axis=0)
        late = points[points[:, 0] >= last_step / 4]
        is_swallowed = not self.group.key and np.ptp(points[:, 1]) > 2 * np.ptp(late[:, 1])
        self.is_log = is_swallowed and not self.is_difference
        shown = points
        if self.is_log:
            points = points[points[:, 0] > 0]  # a logarithmic axis has no step 0
            first = points[points[:, 0] == points[:, 0].min()]
            shown = points[points[:, 3] <= np.nanmax(first)]
        elif is_swallowed:
            shown = late
        low = np.nanmin(shown[:, 1:])
        high = np.nanmax(shown[:, 1:])
        self.corners = [(points[:, 0].min(), low), (last_step, high)]
        notes = []
        if np.nanmax(points[:, 1:]) > high:
            notes.append(f"↑ up to {np.nanmax(points[:, 1:]):.3g}")
        if np.nanmin(points[:, 1:]) < low:
            notes.append(f"↓ down to {np.nanmin(points[:, 1:]):.3g}")
        self.note = ", ".join(notes)

    def choose_coloured(self, variants: Sequence[Variant]) -> list[Variant]:
        """The variants with a colour: all of few, else the baseline and those with lowest losses.

        Runs that are not compared are grey among many.
        """
        compared = [variant for variant in variants if not variant.state]
        if len(variants) <= MAX_COLOURED or not compared:
            return list(variants[:MAX_COLOURED])

        def rank(variant: Variant) -> tuple:
            is_baseline = self.baseline in (variant.router, variant.label)
            ends = self.group.ends_of(variant)
            losses = [np.mean(self.group.losses_at(variant, end)) for end in ends]
            return not is_baseline, min(losses)

        return sorted(compared, key=rank)[:MAX_COLOURED]

    def describe(self, variants: Sequence[Variant]) -> str:
        """What the lines of these variants show at their best, or at the last common point."""
        lines = {v.label: self.lines[v] for v in variants if not v.state}
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
        points = {label: line[line[:, 0] == x][0] for label, line in lines.items()}
        if self.is_difference:
            n_apart = sum(low > 0 or high < 0 for _, _, low, high in points.values())
            return f"Intervals that exclude 0 at {place}: {n_apart} of {len(points)}."
        ranked = sorted(points, key=lambda label: points[label][1])
        lowest = f"{points[ranked[0]][1]:.4g}"
        highest = f"{points[ranked[-1]][1]:.4g}"
        if lowest == highest:
            return f"At {place}: {lowest}{' for all' if len(ranked) > 1 else ''}."
        return f"At {place}: {ranked[0]} {lowest} is lowest, {ranked[-1]} {highest} highest."

    def draw(self, axes: Axes, variants: Sequence[Variant], coloured: Sequence[Variant]) -> None:
        """Draw the lines of some variants; those without a colour are behind the others."""
        axes.grid(alpha=0.3)
        axes.set_xlabel(self.group.key or "step")
        if self.group.key:
            scale_key_axis(axes, self.group)
        else:
            self.scale_steps(axes)
        axes.margins(0.05)
        axes.update_datalim(self.corners)
        axes.autoscale_view()
        axes.autoscale(False)  # lines that are shifted do not set the frame
        axes.locator_params(axis="y", nbins=5)
        for variant in variants:
            if variant not in coloured:
                xs, means, _, _ = self.lines[variant].T
                axes.plot(xs, means, color=GREY, linewidth=0.8, label=f"_{variant.label}")
        styles = choose_styles([variant.router for variant in coloured])
        for i, (variant, style) in enumerate(zip(coloured, styles, strict=True)):
            self.draw_line(axes, variant, style, 4 * i - 2 * (len(coloured) - 1))
        if self.is_difference:
            axes.axhline(0, color="black", linewidth=0.8)
        if fit_at_ends(coloured):
            label_ends(axes)
        else:
            axes.figure.legend(loc="outside lower left", frameon=False)

    def draw_line(self, axes: Axes, variant: Variant, style: dict[str, Any], shift: float) -> None:
        """Draw a line with its intervals: a band, or bars, `shift` points aside of others'."""
        xs, means, lows, highs = self.lines[variant].T
        color = style["color"]
        transform = axes.transData
        is_short = len(xs) <= MAX_BARS
        if is_short and (self.is_difference or self.group.key):
            transform += ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
            axes.vlines(xs, lows, highs, color=color, alpha=0.6, transform=transform)
        else:
            axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
        style["markersize"] = 4 if is_short else 2
        style["linewidth"] = 0.7 if variant.state else 1.5
        axes.plot(xs, means, label=variant.label, transform=transform, **style)
        if self.marks_best:
            x, loss, _, _ = find_lowest(self.lines[variant])
            axes.plot(x, loss, "o", fillstyle="none", ms=11, color=color, transform=transform)

    def scale_steps(self, axes: Axes) -> None:
        """Few ticks, and logarithmic steps where the start would swallow the rest."""
        if self.is_log:
            (first_step, _), (last_step, _) = self.corners
            axes.set_xscale("log", nonpositive="mask")
            subs = (1, 2, 5) if last_step < 50 * first_step else (1,)
            axes.xaxis.set_major_locator(LogLocator(subs=subs))
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.locator_params(axis="x", nbins=4, integer=True)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def find_lowest(line: np.ndarray) -> np.ndarray:
    """The point of a line with the lowest mean, (4,)."""
    return line[np.nanargmin(line[:, 1])]


def fit_at_ends(variants: Sequence[Variant]) -> bool:
    """True if the labels of these variants are short enough for the ends of lines."""
    return all(len(variant.label) <= LONGEST_END for variant in variants)


def label_ends(axes: Axes) -> None:
    """Name the lines at their ends; labels that would touch are moved apart."""
    low, high = axes.get_ylim()
    ends = []
    for line in axes.get_lines():
        label = str(line.get_label())
        if label.startswith("_"):  # it has none
            continue
        values = np.asarray(line.get_ydata())
        last = values[np.isfinite(values)][-1]
        end = min(1, max(0, (last - low) / (high - low)))
        ends.append((end, label, line.get_color()))
    ends.sort()
    offsets = END_GAP * np.arange(len(ends))
    heights = np.maximum.accumulate([end for end, _, _ in ends] - offsets) + offsets
    heights -= max(0, heights[-1] - 1)
    for (end, label, color), height in zip(ends, heights, strict=True):
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
    characters = AXIS_CHARACTERS * (places - places[0]) / np.ptp(places)
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
