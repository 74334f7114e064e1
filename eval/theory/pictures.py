"""Pictures of eval.theory: lines exact, markers measured, one look per router (eval/style.py)."""

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from eval.pictures import finish
from eval.style import style

MEASURED = {"linestyle": "none", "markerfacecolor": "white", "markersize": 5}
GREYS = ("#000000", "#000000", "#555555", "#555555", "#888888", "#888888")
LINES = ("-", "--", "-.", ":", "-", "--")
MARKERS = "osv^Dx"


def plain(i):
    """Look of the i-th line where lines are not routers."""
    return {"color": GREYS[i], "linestyle": LINES[i], "marker": MARKERS[i]}


def both(axes, x, analytic, measured, error, look, label):
    """Expectation as a line, measurements with bars of two standard errors on it."""
    axes.plot(x, analytic, color=look["color"], linestyle=look["linestyle"])
    axes.errorbar(x, measured, [2 * e for e in error], capsize=2, **{**look, **MEASURED})
    axes.plot([], [], label=label, **{**look, "markerfacecolor": "white", "markersize": 5})  # for the legend alone


def experts_axis(axes, ticks):
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{t:.0f}" for t in ticks])
    axes.set_xlabel("experts M")


def variance(panels, curves):
    for axes, label in zip(panels, ("k = 8", "k = M/8"), strict=True):
        for key, points in curves.items():
            path, name = key.split(", ")
            if path == label:
                x = points["M"]
                both(axes, x, points["analytic"], points["measured"], points["error"], style(name), name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.text(x[-1], 1.06, "KERN's bound γ² = 1", ha="right", va="bottom", fontsize=7)
        axes.set_title(f"Gate energy, {label} active")
        axes.set_yscale("log")
        axes.set_ylabel("E Σ g²  (output variance / an expert's)")
        experts_axis(axes, x)
    panels[0].legend(loc="lower left")


def gradients(panels, curves):
    tau = curves["tau"]
    for name in ("softmax", "sigmoid", "tanh", "kern"):
        points = curves[name]
        both(panels[0], tau, points["analytic"], points["rms"], points["error"], style(name), name)
        panels[1].plot(
            tau, points["median"], label=name, **{**style(name), "markerfacecolor": "white", "markersize": 5}
        )
    panels[0].set(title="Gradient of the gates", ylabel="RMS ‖∂g/∂s‖", ylim=(1e-3, 10))
    panels[1].set(
        title="… relative to gates and logits (measured)", ylabel="median of τ ‖∂g/∂s‖ / ‖g‖", ylim=(1e-4, 10)
    )
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(tau, [f"{t:g}" for t in tau])
        axes.set_xlabel("standard deviation τ of the 64 logits s, 8 active")
        axes.axvline(0.554, color="black", linewidth=0.8)
        axes.text(0.58, axes.get_ylim()[0] * 1.5, "initialisation", fontsize=7)
    panels[0].legend(loc="upper right")


def family(panels, curves):
    for axes, key in zip(panels, ("factor", "shift"), strict=True):
        for name in ("softmax", "sigmoid", "tanh", "kern"):
            look = style(name)
            axes.plot(curves[key], curves[name][key], label=name, markevery=4, **{**look, "markerfacecolor": "white"})
        axes.plot(
            curves[key], curves["exp(l1(s))"][key], "k-.", marker="+", markevery=4, label="exp(s/‖s‖₁), as worded"
        )
        axes.set_ylabel("largest gate, mean over tokens")
        axes.set_ylim(0, 1.6)
    panels[0].set(
        title="Scaling the logits: a norm sees nothing",
        xlabel="factor a, logits a·s, s ~ N(0, 1), M = 64",
        xscale="log",
    )
    panels[1].set(title="Shifting them: softmax sees nothing", xlabel="shift b, logits s + b")
    panels[0].legend(loc="upper center", ncols=3)


def monte_carlo(panels, curves):
    for i, (label, points) in enumerate(curves.items()):
        both(panels[0], points["M"], points["analytic"], points["measured"], points["error"], plain(i), label)
        off = [m / a for m, a in zip(points["measured"], points["analytic"], strict=True)]
        error = [2 * e / a for e, a in zip(points["error"], points["analytic"], strict=True)]
        shifted = [M * (0.97, 1.03)[i] for M in points["M"]]
        panels[1].errorbar(shifted, off, error, label=f"measured, {label}", capsize=2, **{**plain(i), **MEASURED})
        limit = [v / a for v, a in zip(points["limit"], points["analytic"], strict=True)]
        panels[1].plot(points["M"], limit, color=GREYS[i], linestyle=LINES[i], label=f"limit of large M, {label}")
    panels[0].set(title="Monte-Carlo constant", ylabel="c = E[1 / ‖top-k of ReLU(y)‖]")
    panels[0].legend(title="active")
    panels[1].axhline(1, color="black", linewidth=0.8)
    panels[1].set(title="Relative to its exact value", ylabel="c / exact c")
    panels[1].legend(loc="lower right", fontsize=7)
    for axes in panels:
        experts_axis(axes, [16, 32, 64, 128, 256, 512, 1024])


def positive(panels, curves):
    for i, (label, points) in enumerate(curves.items()):
        M = int(label.split(" = ")[1])
        share = [k / M for k in points["k"]]
        for axes in panels:
            seen = [m if m > 0 or axes is panels[0] else float("nan") for m in points["measured"]]
            both(axes, share, points["analytic"], seen, points["error"], plain(i), label)
    panels[0].set(title="Chance of fewer than k positive gates", ylabel="P(fewer than k of M positive)")
    panels[1].set(title="The same, logarithmic", ylabel="P(fewer than k of M positive)", yscale="log", ylim=(1e-6, 2))
    for axes in panels:
        axes.set_xlabel("share of active experts k/M")
        axes.axvline(1 / 8, color="black", linewidth=0.8)
    panels[0].text(0.14, 0.6, "paper's main runs: 1/8", fontsize=7)
    panels[0].legend(loc="center right")


PICTURES = {
    "variance": variance,
    "gradients": gradients,
    "family": family,
    "monte-carlo": monte_carlo,
    "positive": positive,
}


def draw(name, curves, path):
    """Write the picture of claim `name`, from the curves that eval.theory measured, as a PNG."""
    with plt.rc_context({"font.size": 8, "axes.grid": True, "grid.color": "#dddddd", "axes.titlesize": 9}):
        figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        PICTURES[name](panels, curves)
        note = (
            "lines: exact; markers: measured ± 2 standard errors"
            if name != "family"
            else "8 of 64 experts active, measured"
        )
        figure.legend(
            handles=[Line2D([], [], linestyle="none")], labels=[note], loc="outside lower center", frameon=False
        )
        finish(figure, path)
