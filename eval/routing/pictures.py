"""Pictures of eval.routing, from the content of routing.json. Layers and experts are numbered from 0.

Readable without colour: greys, one scale from orange to violet, lines that differ in style and marker.
"""

from math import ceil
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from eval.pictures import add_load_bar, save_figure
from eval.routing.counts import Described, coactivation_shares
from eval.routing.page import format_token

COLUMNS = 6  # layers side by side in the picture of pairs
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#D55E00", "linestyle": "-", "marker": "o"},
    {"color": "#0072B2", "linestyle": "--", "marker": "s"},
)
PANELS = {  # of layers.png: two measures each
    "experts in use, exp(entropy)": {"entropy": "of a token's scores", "load_entropy": "of the loads"},
    "a token's gates": {"gate_sum": "sum", "gate_norm": "l2 norm"},
    "share of a token's most frequent expert": {"vocabulary_any": "any choice", "vocabulary_first": "first choice"},
    "share of experts that both models chose": {"matched": "matched", "same_number": "same number"},
}


def plot_routing(found: Described, folder: Path) -> None:
    """Write loads.png, layers.png, coactivation.png and tokens.png into `folder`."""
    with plt.rc_context({"font.size": 9, "axes.titlesize": 10, "grid.alpha": 0.3}):
        for plot in (plot_loads, plot_layers, plot_coactivation, plot_tokens):
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
    axes.set(xlabel="expert", ylabel="layer", yticks=range(0, L, ceil(L / 12)))
    add_load_bar(figure, image, [axes], "load / mean load (×: no token)")
    return figure


def plot_layers(found: Described) -> Figure:
    """The measures of PANELS over layers, dotted by chance; gates with bars from 5% to 95% of tokens."""
    layers = [a | b for a, b in zip(found["layers"], found.get("agreement", found["layers"]), strict=True)]
    shown = {title: labels for title, labels in PANELS.items() if labels.keys() <= layers[0].keys()}
    figure, panels = plt.subplots(1, len(shown), figsize=(4 * len(shown), 4), layout="constrained")
    for axes, (title, labels) in zip(panels, shown.items(), strict=True):
        for (key, label), look in zip(labels.items(), LOOKS, strict=True):
            _plot_measure(axes, layers, key, look | {"label": label})
        axes.set(title=title, xlabel="layer", xticks=range(0, len(layers), ceil(len(layers) / 12)), ylim=(0, None))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
        axes.grid()
    return figure


def _plot_measure(axes: Axes, layers: list[Described], key: str, look: dict[str, Any]) -> None:
    values = [layer[key] for layer in layers]
    if key.startswith("gate"):
        low, median, high = ([value["quantiles"][q] for value in values] for q in ("0.05", "0.5", "0.95"))
        axes.errorbar(range(len(values)), median, np.abs(np.subtract((low, high), median)), capsize=3, **look)
    else:
        axes.plot(np.exp(values) if key.endswith("entropy") else values, **look)
    if f"{key}_by_chance" in layers[0]:
        chance = look | {"linestyle": ":", "markerfacecolor": "white", "label": "by chance"}
        axes.plot([layer[f"{key}_by_chance"] for layer in layers], **chance)


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
        axes = figure.add_subplot(rows, columns, number, title=f"layer {number - 1}", xticks=[], yticks=[])
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


def plot_tokens(found: Described) -> Figure:
    """Share of occurrences of the most common tokens by expert, in the first, the middle and the last layer."""
    tokens = found["common_tokens"][: len(found["layers"][0]["common"])]
    numbers = np.unique(np.linspace(0, len(found["layers"]) - 1, 3).astype(int))
    size = 1.5 + 4 * len(numbers), 1.6 + 0.17 * len(tokens)
    figure, panels = plt.subplots(1, len(numbers), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, number in zip(panels[0], numbers, strict=True):
        shares = np.array(found["layers"][number]["common"]) / np.array([[token["seen"]] for token in tokens])
        order = np.lexsort((-shares.max(0), shares.argmax(0)))
        image = axes.imshow(shares[:, order], aspect="auto", cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=f"layer {number}", xticks=[], xlabel=f"{len(order)} experts, by the token they take most of")
    labels = [format_token(token).encode("ascii", "backslashreplace").decode() for token in tokens]  # fonts lack most
    panels[0][0].set_yticks(range(len(tokens)), labels, fontsize=8, family="monospace", parse_math=False)
    figure.colorbar(image, ax=panels, aspect=40).set_label("share of the token's occurrences")
    return figure
