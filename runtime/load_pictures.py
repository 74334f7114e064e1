"""Pictures of expert loads for wandb: a heat map, and a histogram per layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

LOADS = ["1/8", "1/4", "1/2", "1", "2", "4", "8"]  # ticks, the same in all pictures so that runs compare
BINS = np.r_[0, 1e-12, 2 ** ((np.arange(24) - 11.5) / 4), np.inf]  # of histograms: dead, then quarter octaves


def draw_loads(step: int, loads: Sequence[Sequence[float]], first_layer: int = 0) -> dict[str, np.ndarray]:
    """Draw loads (L, E), each layer over its mean, as a heat map and as one histogram per layer.

    Args:
        step: named in the title.
        loads: (L, E) tokens per expert.
        first_layer: the number of the first row's layer.

    Returns:
        {name: pixels (height, width, 3), uint8}. Scales are fixed, so that pictures of several runs compare.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tokens = np.array(loads)
    L, E = tokens.shape
    relative = tokens / tokens.mean(1, keepdims=True)
    title = f"step {step:,}: busiest expert {relative.max():.1f} times its layer's mean, "
    title += f"{(tokens == 0).sum():,} of {tokens.size:,} dead"
    size = np.clip((2 + E / 10, 1.5 + 0.4 * L), (8, 3.5), (16, 13))  # inches
    pictures = {}
    for name, draw in {"val/load_heatmap": _draw_heatmap, "val/load_histogram": _draw_histograms}.items():
        figure = Figure(tuple(size), layout="constrained")  # without pyplot there is nothing to close
        axes, ticks = figure.add_subplot(ylabel="layer"), range(0, L, 1 + L // 40)
        axes.set_yticks(ticks, [str(first_layer + row) for row in ticks])
        draw(axes, relative)
        figure.suptitle(title, fontsize="medium")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pictures[name] = np.asarray(canvas.buffer_rgba())[..., :3]
    return pictures


def _draw_heatmap(ax: Any, relative: np.ndarray) -> None:
    # The black background shows where an expert is dead: a logarithmic scale leaves 0 out.
    image = ax.imshow(relative, "coolwarm", norm="log", vmin=1 / 8, vmax=8, aspect="auto", interpolation="none")
    bar = ax.figure.colorbar(image, extend="both", label="load over mean load; black: dead")
    bar.set_ticks(2.0 ** np.arange(-3, 4), labels=LOADS)
    bar.minorticks_off()
    ax.set(xlabel="expert", facecolor="black")
    ax.locator_params(axis="x", integer=True)


def _draw_histograms(ax: Any, relative: np.ndarray) -> None:
    counts = np.array([np.histogram(row, BINS)[0] for row in relative])
    bars = np.insert(0.9 * counts / counts.max(), 1, 0, axis=1)  # a gap after the dead ones
    edges = np.r_[-3.75, -3.45, (np.arange(26) - 12.5) / 4]  # octaves
    for layer, heights in enumerate(bars):
        foot = layer + 0.45  # the y-axis points down
        ax.stairs(foot - heights, edges, baseline=foot, fill=True, color="#0072B2")
        ax.axhline(foot, color="0.8", linewidth=0.8, zorder=0)
    ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    ax.set_xticks([-3.6, *range(-3, 4)], ["dead", *LOADS])
    ax.set(xlabel="load over mean load; outermost: 1/8 and less, 8 and more", ylim=(len(bars) - 0.5, -0.5))
    ax.set_ylabel(f"layer (highest bar: {counts.max()} experts)")
