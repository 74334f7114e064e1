"""Pictures of a report: functions that return a figure, or None without data.

Those of one setting take the baseline too, whether they need it or not, so that page.PICTURES can list them.
A router looks the same in all of them (scripts/report/style.py), and nothing depends on colour alone.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.intervals import UNDECIDED
from scripts.report.claims import compare_arms
from scripts.report.figures import add_load_bar
from scripts.report.settings import Arm, Setting
from scripts.report.style import style

MARKS = 12  # markers per line, about
COLUMN = 6  # panels of loads one below another; more are in two columns
LOSS = "validation loss, nats per token (lower is better)"

Points = dict[Any, Sequence[float]]  # x: mean, low, high
Lines = dict[str, tuple[dict[str, Any], Points]]  # label: style, points


def plot_loss(setting: Setting, baseline: str) -> Figure | None:
    """Validation loss and training loss by steps, mean and range over seeds."""

    def collect(arm: Arm) -> Points:
        columns = [{step: run.train_loss(step) for step in setting.steps} for run in arm.runs.values()]
        losses = {step: [loss for of in columns if (loss := of[step]) is not None] for step in setting.steps}
        return {step: spread(of) for step, of in losses.items() if len(of) == len(columns)}

    lines = draw_arms(setting, lambda arm: {step: spread(arm.losses(step)) for step in setting.steps})
    steps = f"steps of {setting.tokens:,} tokens"
    panels = [(steps, LOSS, lines), (steps, "training loss, nats per token", draw_arms(setting, collect))]
    return plot_lines(panels, margin=0.06)


def plot_measures(setting: Setting, baseline: str) -> Figure | None:
    """What evaluations measure besides the loss, by steps: mean and range over seeds."""

    def collect(arm: Arm, key: str) -> Points:
        steps = [step for step in setting.measures[key][1] if step or key.startswith("tasks/")]
        return {step: spread([run.evaluations[step][key] for run in arm.runs.values()]) for step in steps}

    steps = f"steps of {setting.tokens:,} tokens"
    arms = {key: draw_arms(setting, partial(collect, key=key)) for key in setting.measures}
    return plot_lines([(steps, setting.measures[key][0], lines) for key, lines in arms.items()], margin=0.06)


def plot_difference(setting: Setting, baseline: str) -> Figure | None:
    """Loss minus the baseline's with 95% intervals, by steps."""
    steps = [step for step in setting.steps if step]

    def subtract(arm: Arm) -> Points:
        base = setting.counterpart(arm, baseline)
        return {step: compare_arms(arm, base, step)[:3] for step in steps} if base else {}

    lines = draw_arms(setting, subtract)
    if lines:
        lines[baseline] = {"color": "black", "linewidth": 0.8}, dict.fromkeys(steps, (0.0, 0.0, 0.0))
    label = f"loss minus {baseline}'s, nats per token (below 0: better)"
    return plot_lines([(f"steps of {setting.tokens:,} tokens", label, lines)], margin=0.3)


def plot_routing(setting: Setting, baseline: str) -> Figure | None:
    """Load imbalance, the gates' entropy and norm, and γ of training batches: means over layers, then over seeds."""

    def collect(arm: Arm, key: str) -> Points:
        columns = [arm.runs[seed].logged(key) for seed in arm.seeds]
        steps = sorted(set.intersection(*map(set, columns)))
        return {step: spread([column[step] for column in columns]) for step in steps}

    K, E = setting.values["model.top_k"], setting.values["model.n_expert"]
    labels = {
        "router/load_imbalance": f"busiest expert's load / mean load in training (1 to {E / K:g})",
        "router/entropy": f"entropy of the gates, nats (at most {math.log(E):.2f})",
        "router/gate_norm": "norm of the gates, √E‖g‖²",
        "router/gate_sum": "sum of the gates, E Σ g",
        "router/gamma": "γ",
    }
    return plot_lines(
        [("steps", label, draw_arms(setting, partial(collect, key=key))) for key, label in labels.items()]
    )


def plot_axis(settings: Sequence[Setting], key: str) -> Figure | None:
    """Mean loss at the end against a swept key, a panel per corpus; None if two settings have the same value."""
    corpora: dict[str, Lines] = defaultdict(dict)
    for setting in sorted(settings, key=lambda setting: setting.values[key]):
        for arm in setting.arms:
            _, points = corpora[setting.runs[0].config.data.label].setdefault(arm.label, (style_arm(setting, arm), {}))
            if setting.values[key] in points:
                return None
            points[setting.values[key]] = (statistics.fmean(arm.losses(setting.end)),) * 3
    figure = plot_lines([(f"{key}, {corpus}", LOSS, lines) for corpus, lines in sorted(corpora.items())])
    for axes in figure.axes if figure else ():
        ticks = sorted({setting.values[key] for setting in settings})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    return figure


def draw_arms(setting: Setting, points: Callable[[Arm], Points]) -> Lines:
    """The line of each arm that has points."""
    return {arm.label: (style_arm(setting, arm), found) for arm in setting.arms if (found := points(arm))}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, least and greatest."""
    return statistics.fmean(values), min(values), max(values)


def plot_lines(panels: Sequence[tuple[str, str, Lines]], margin: float | None = None) -> Figure | None:
    """Lines with bands, a panel for each (x label, y label, lines) that has any; legends give last values, in order.

    With `margin` the y-axis leaves out the steep first quarter of the lines, and has that part of its range to spare.
    """
    panels = [panel for panel in panels if panel[2]]
    columns = max(1, min(len(panels), 2))
    rows = math.ceil(len(panels) / columns)
    height = max([5, *(0.6 + 0.21 * len(lines) for *_, lines in panels)])  # inches; a legend has a line for each
    figure = Figure((9 if columns == 1 else 14, rows * height), layout="constrained")
    for i, (x_label, y_label, lines) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1, xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3)
        drawn, late, faint = [], [], min(0.15, 0.8 / len(lines))
        for j, (label, (look, points)) in enumerate(lines.items()):
            means, lows, highs = zip(*points.values(), strict=True)
            every = max(1, len(points) // MARKS)
            label = f"{label} {means[-1]:.4f}"
            (line,) = axes.plot([*points], means, markevery=(j % every, every), label=label, **look)
            axes.fill_between([*points], lows, highs, color=look["color"], alpha=faint, linewidth=0)
            drawn.append((means[-1], j, line))
            late += means[len(means) // 4 :]
        if margin is not None:
            spare = margin * (max(late) - min(late)) or 0.1
            axes.set_ylim(min(late) - spare, max(late) + spare)
        axes.legend(handles=[line for *_, line in sorted(drawn)[::-1]], loc="upper left", bbox_to_anchor=(1, 1))
    return figure if panels else None


def style_arm(setting: Setting, arm: Arm) -> dict[str, Any]:
    """The style of its router; arms of one router differ in their markers' faces."""
    twins = [other for other in setting.arms if other.router == arm.router]
    face = ("full", "none", "left", "right", "top", "bottom")[twins.index(arm) % 6]
    return style(arm.router) | {"fillstyle": face, "markersize": 5, "linewidth": 1.3}


def plot_ends(settings: Sequence[Setting], baseline: str) -> Figure | None:
    """Where each arm ends against the baseline, with 95% intervals; diamonds: the paper's difference."""
    rows = [(of, arm, base) for of in settings for arm in of.arms if (base := of.counterpart(arm, baseline))]
    labels = [f"{of.label}: {arm.label}" if of.label else arm.label for of, arm, _ in rows]
    width = max([8, *(5 + 0.08 * len(label) for label in labels)])  # inches
    figure = Figure((width, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlabel=f"loss minus {baseline}'s, nats per token (left of 0: better)")
    for place, (setting, arm, base) in enumerate(rows):
        found, look = compare_arms(arm, base, setting.end), style_arm(setting, arm)
        axes.plot([found.low, found.high], [place, place], color=look["color"], linewidth=2)
        axes.plot(found.mean, place, color=look["color"], marker=look["marker"])
        theirs = setting.printed.subtract(arm.router, base.router, setting.end_tenth)
        if theirs is not None and setting.has_paper_tokens:
            axes.plot(theirs, place, "D", markersize=9, color="black", fillstyle="none")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure if rows else None


def plot_pairs(setting: Setting, baseline: str) -> Figure | None:
    """Loss of each arm minus that of each other, in order of their losses; None for fewer than three arms."""
    arms = sorted(setting.arms, key=lambda arm: statistics.fmean(arm.losses(setting.end)))
    pairs = [(arm, other) for arm, other in permutations(arms, 2) if arm.shared_seeds(other)]
    if len(arms) < 3 or not pairs:
        return None
    figure = Figure((3 + 0.62 * len(arms), 2 + 0.35 * len(arms)), layout="constrained")
    axes, decided = figure.add_subplot(), np.zeros((len(arms), len(arms)))
    for arm, other in pairs:
        found = compare_arms(arm, other, setting.end)
        row, column = arms.index(arm), arms.index(other)
        sure = found.seeds > 1 and found.decide("lower", "higher") != UNDECIDED
        decided[row, column] = found.mean if sure else 0
        color, weight, slant = ("black", "bold", "normal") if sure else ("#555555", "normal", "italic")
        font = {"color": color, "weight": weight, "style": slant, "size": 8}
        axes.text(column, row, f"{found.mean:+.4f}", font, ha="center", va="center")
    limit = 2 * np.abs(decided).max() or 1  # pale, so that the numbers stand out
    axes.imshow(decided, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
    labels = [arm.label for arm in arms]
    axes.set_yticks(range(len(arms)), labels)
    axes.set_xticks(range(len(arms)), labels, rotation=45, ha="left", rotation_mode="anchor")
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    return figure


def plot_loads(setting: Setting, baseline: str) -> Figure | None:
    """Load of each expert over its layer's mean at the last common evaluation, for the first seed of each arm."""
    lines = {arm.label: arm.first.evaluations[setting.end] for arm in setting.arms}
    loads = {label: np.array(line["val/loads"], np.float64) for label, line in lines.items() if line.get("val/loads")}
    first_layers = {arm.label: arm.first.config.model.n_dense_layer for arm in setting.arms}
    columns = 1 if len(loads) <= COLUMN else 2
    rows, layers = math.ceil(len(loads) / columns), max(map(len, loads.values()), default=0)
    figure = Figure((5 + 4 * columns, 1.3 + rows * (0.55 + 0.14 * max(3, layers))), layout="constrained")
    for i, (label, of) in enumerate(loads.items()):
        axes, ticks = figure.add_subplot(rows, columns, i + 1, ylabel="layer"), range(0, len(of), 1 + len(of) // 6)
        axes.set_yticks(ticks, [str(first_layers[label] + row) for row in ticks])
        axes.set_title(label, loc="left", fontsize=9)
        with np.errstate(divide="ignore"):
            octaves = np.log2(of / of.mean(1, keepdims=True))  # (L, E)
        image = axes.imshow(octaves, aspect="auto", cmap="Greys", vmin=-3, vmax=3, interpolation="nearest")
        idle, experts = np.nonzero(of == 0)  # layers of experts without a token
        axes.plot(experts, idle, "kx", markersize=min(5, 300 / of.shape[1]), scalex=False, scaley=False)
        if i >= len(loads) - columns:
            axes.set_xlabel("expert")
        if i == len(loads) - 1:
            add_load_bar(figure, image, figure.axes, "load / mean load; ×: no token", 0.5)
    return figure if loads else None
