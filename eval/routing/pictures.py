"""Pictures of eval.routing, from the content of routing.json. Layers and experts are numbered from 0.

Readable without colour: greys, and one scale from orange to violet.
"""

from math import ceil
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from eval.routing.counts import Described, coactivation_shares
from scripts.report.figures import add_load_bar, save_figure

COLUMNS = 6  # layers side by side in the picture of pairs


def plot_routing(found: Described, folder: Path) -> None:
    """Write loads.png and coactivation.png into `folder`."""
    with plt.rc_context({"font.size": 9, "axes.titlesize": 10, "grid.alpha": 0.3}):
        for plot in (plot_loads, plot_coactivation):
            save_figure(plot(found), folder / f"{plot.__name__.removeprefix('plot_')}.png")


def plot_loads(found: Described) -> Figure:
    """Load over mean load by layer and expert."""
    loads = np.array([layer["loads"] for layer in found["layers"]])
    L, E = loads.shape
    figure, axes = plt.subplots(figsize=(9, 2.4 + 0.14 * max(L, 6)), layout="constrained")
    with np.errstate(divide="ignore"):
        shares = np.log2(loads / loads.mean(1, keepdims=True))
    image = axes.imshow(shares, aspect="auto", cmap="Greys", vmin=-3, vmax=3, interpolation="nearest")
    idle, experts = np.nonzero(loads == 0)
    axes.plot(experts, idle, "kx", markersize=min(5, 300 / E), scalex=False, scaley=False)
    ticks = range(0, L, ceil(L / 12))
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_yticks(ticks, [found["layers"][row]["layer"] for row in ticks])
    add_load_bar(figure, image, [axes], "load / mean load (×: no token)")
    return figure


def plot_coactivation(found: Described) -> Figure:
    """Lift of each pair of experts, one panel per layer."""
    columns, rows = min(len(found["layers"]), COLUMNS), ceil(len(found["layers"]) / COLUMNS)
    figure = plt.figure(figsize=(max(4.5, 2.6 * columns), 1.3 + 2.7 * rows), layout="constrained")
    colours = plt.get_cmap("PuOr_r").with_extremes(bad="#bbbbbb")
    for number, layer in enumerate(found["layers"], 1):
        together = np.array(layer["coactivation"])
        with np.errstate(divide="ignore", invalid="ignore"):
            lift = np.log2(coactivation_shares(together) / (together.diagonal() / found["tokens"]))
        lift = lift.clip(-9, 9)  # a pair never chosen has -inf, which would be drawn like NaN
        order = order_by_similarity(lift)
        axes = figure.add_subplot(rows, columns, number, title=f"layer {layer['layer']}", xticks=[], yticks=[])
        axes.imshow(lift[np.ix_(order, order)], cmap=colours, vmin=-3, vmax=3, interpolation="nearest")
    label = "tokens that chose both / expected from their loads\n(grey: an expert without tokens)"
    add_load_bar(figure, figure.axes[-1].images[0], figure.axes, label)
    return figure


def order_by_similarity(lift: np.ndarray) -> np.ndarray:
    """An order (E,) of experts with those of high log lift (E, E) side by side, by hierarchical clustering.

    Experts without tokens (NaN) come last.
    """
    active, idle = (np.flatnonzero(np.isnan(lift).all(1) == value) for value in (False, True))
    if len(active) > 2:
        distance = squareform(9 - lift[np.ix_(active, active)], checks=False)
        active = active[leaves_list(linkage(distance, "average", optimal_ordering=True))]
    return np.concatenate([active, idle])
