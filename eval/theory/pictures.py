"""Pictures of eval.theory: lines are exact, markers measured, one look per router (eval/style.py)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from eval.pictures import save_figure
from eval.style import style
from eval.theory.claims import PAPER, TAU, Curves

COLOURS = ("#000000", "#000000", "#555555", "#555555", "#888888", "#888888")
LOOKS: list[dict[str, Any]] = [  # of lines that are not routers
    {"color": color, "linestyle": line, "marker": marker}
    for color, line, marker in zip(COLOURS, ("-", "--", "-.", ":", "-", "--"), "osv^Dx", strict=True)
]
RC = {"font.size": 8, "axes.grid": True, "grid.color": "#dddddd", "axes.titlesize": 9}
RC |= {"lines.markerfacecolor": "white", "lines.markersize": 5}


def _plot_points(axes: Axes, x: ArrayLike, points: Curves, look: dict[str, Any], label: str) -> None:
    """The expectation as a line, measurements with bars of two standard errors on it."""
    axes.plot(x, points["analytic"], label=label, markevery=[], **look)  # markers in the legend alone
    error = np.multiply(2, points["error"])
    axes.errorbar(x, points["measured"], error, capsize=2, **look | {"linestyle": "none"})


def _set_log2_axis(axes: Axes, ticks: Sequence[float], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(label)


def plot_variance(panels: Sequence[Axes], curves: Curves) -> None:
    """Gate energy by number of experts, at a fixed number and at a fixed share of active ones."""
    for axes, label in zip(panels, ("k = 8", "k = M/8"), strict=True):
        for name in PAPER:
            points = curves[f"{label}, {name}"]
            _plot_points(axes, points["M"], points, style(name), name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.text(points["M"][-1], 1.06, "KERN's bound γ² = 1", ha="right", va="bottom", fontsize=7)
        ylabel = "E Σ g²  (output variance / an expert's)"
        axes.set(title=f"Gate energy, {label} active", yscale="log", ylabel=ylabel)
        _set_log2_axis(axes, points["M"], "experts M")
    panels[0].legend(loc="lower left")


def plot_gradients(panels: Sequence[Axes], curves: Curves) -> None:
    """Size of the gates' Jacobian by scale of the logits: plain, and relative to gates and logits."""
    tau = curves["tau"]
    for name in PAPER:
        points = curves[name]
        _plot_points(panels[0], tau, points | {"measured": points["rms"]}, style(name), name)
        panels[1].plot(tau, points["median"], **style(name))
    panels[0].set(title="Gradient of the gates", ylabel="RMS ‖∂g/∂s‖", yscale="log", ylim=(1e-3, 10))
    title, ylabel = "… relative to gates and logits (measured)", "median of τ ‖∂g/∂s‖ / ‖g‖"
    panels[1].set(title=title, ylabel=ylabel, yscale="log", ylim=(1e-4, 10))
    for axes in panels:
        _set_log2_axis(axes, tau, "standard deviation τ of the 64 logits s, 8 active")
        axes.axvline(TAU, color="black", linewidth=0.8)
        axes.text(0.58, axes.get_ylim()[0] * 1.5, "initialisation", fontsize=7)
    panels[0].legend(loc="upper right")


def plot_family(panels: Sequence[Axes], curves: Curves) -> None:
    """The largest gate when all logits are scaled, and when they are shifted."""
    for axes, key in zip(panels, ("factor", "shift"), strict=True):
        for name in PAPER:
            axes.plot(curves[key], curves[name][key], label=name, markevery=4, **style(name))
        literal = curves["exp(l1(s))"][key]
        axes.plot(curves[key], literal, "k-.", marker="+", markevery=4, label="exp(s/‖s‖₁), as worded")
        axes.set(ylabel="largest gate, mean over tokens", ylim=(0, 1.6))
    panels[0].set(title="Scaling the logits: invisible to a norm", xscale="log")
    panels[0].set_xlabel("factor a, logits a·s, s ~ N(0, 1), M = 64")
    panels[1].set(title="Shifting them: invisible to softmax", xlabel="shift b, logits s + b")
    panels[0].legend(loc="upper center", ncols=3)


def plot_monte_carlo(panels: Sequence[Axes], curves: Curves) -> None:
    """The constant by number of experts, and measurement and limit relative to its exact value."""
    for (label, points), look, shift in zip(curves.items(), LOOKS, (0.97, 1.03), strict=False):
        x, c = np.array(points["M"]), np.array(points["analytic"])
        _plot_points(panels[0], x, points, look, label)
        measured, error = points["measured"] / c, 2 * np.array(points["error"]) / c
        panels[1].errorbar(shift * x, measured, error, capsize=2, label=label, **look | {"linestyle": "none"})
        panels[1].plot(x, points["limit"] / c, label=f"limit of large M, {label}", **look | {"marker": ""})
    panels[0].set(title="Monte-Carlo constant", ylabel="c = E[1 / ‖top-k of ReLU(y)‖]")
    panels[1].set(title="Relative to its exact value", ylabel="c / exact c")
    panels[1].axhline(1, color="black", linewidth=0.8)
    for axes in panels:
        axes.legend(fontsize=7)
        _set_log2_axis(axes, [16, 32, 64, 128, 256, 512, 1024], "experts M")


def plot_positive(panels: Sequence[Axes], curves: Curves) -> None:
    """The chance of too few positive gates by share of active experts, on two scales."""
    for (label, points), look in zip(curves.items(), LOOKS, strict=True):
        share = np.array(points["k"]) / int(label.removeprefix("M = "))
        seen = points | {"measured": [value or float("nan") for value in points["measured"]]}  # no 0 on a log scale
        _plot_points(panels[0], share, points, look, label)
        _plot_points(panels[1], share, seen, look, label)
    panels[0].set_title("Chance of fewer than k positive gates")
    panels[1].set(title="The same, logarithmic", yscale="log", ylim=(1e-6, 2))
    for axes in panels:
        axes.set(xlabel="share of active experts k/M", ylabel="P(fewer than k of M positive)")
        axes.axvline(1 / 8, color="black", linewidth=0.8)
    panels[0].text(0.14, 0.6, "paper's main runs: 1/8", fontsize=7)
    panels[0].legend(loc="center right")


PICTURES: dict[str, Callable[[Sequence[Axes], Curves], None]] = {
    "variance": plot_variance,
    "gradients": plot_gradients,
    "family": plot_family,
    "monte-carlo": plot_monte_carlo,
    "positive": plot_positive,
}


def plot_claim(name: str, curves: Curves, path: Path) -> None:
    """Write the picture of a claim as a PNG, from the curves that its function returns."""
    with plt.rc_context(RC):
        figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        PICTURES[name](panels, curves)
        note = "lines: exact; markers: measured ± 2 standard errors"
        figure.supxlabel(note if name != "family" else "8 of 64 experts active, measured", fontsize=8)
        save_figure(figure, path)
