"""Pictures of eval.routing, from what routing.json has. Layers and experts are numbered from 0.

Greys, one scale from orange to violet, and lines that differ in style and marker: nothing hangs on colour alone.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import font_manager

from eval.pictures import LOADS, POWERS, finish, load_bar
from eval.routing.counts import coactivation
from eval.style import style

COLUMNS = 6  # of layers in a grid
LAYERS = 3  # in the picture of tokens
LONGEST = 20  # text of a token
FONT = "DejaVu Sans Mono"  # comes with matplotlib
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})
CHANCE = {"color": "#777777", "linestyle": ":", "marker": "x"}


def draw(found, folder):
    """Write the pictures of `found` into `folder`: {name: (file name, caption)}."""
    pictures = {
        "loads": (loads, "Load of each expert over the mean of its layer; right: in order of size."),
        "layers": (layers, "By layer: how many experts are in use, and how much a token's identity decides."),
        "gates": (gates, "Gates of a token by layer: grey, how many tokens; marks, median and the middle 90%."),
        "coactivation": (
            pairs,
            "Pairs of experts: tokens that chose both over what their loads alone would give; experts in an order that "
            "puts partners side by side.",
        ),
        "tokens": (
            tokens,
            "Share of a token's occurrences that chose an expert; the commonest tokens, commonest first.",
        ),
    }
    if "agreement" in found:
        caption = "The share of a token's experts that both models chose; dotted: by chance."
        pictures["agreement"] = (agreement, caption)
    for name, (picture, _) in pictures.items():
        with plt.rc_context({"font.size": 9, "axes.titlesize": 10}):
            finish(picture(found), folder / f"{name}.png")
    return {name: (f"{name}.png", caption) for name, (_, caption) in pictures.items()}


def visible(text, number):
    """A token's text, white space as signs, cut at LONGEST characters; #number if it is no whole character."""
    if "\ufffd" in text:
        return f"#{number}"
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return "".join(one if one.isprintable() else escaped(one) for one in text.translate(VISIBLE))


def escaped(one):
    return one.encode("unicode_escape").decode()


def loads(found):
    """Load over the mean, by layer and expert, and each layer's in order of size."""
    shares = np.array([np.array(layer["loads"]) / np.mean(layer["loads"]) for layer in found["layers"]])
    L, E = shares.shape
    figure, (heat, ranked) = plt.subplots(
        1, 2, figsize=(12, 2.4 + 0.14 * max(L, 6)), layout="constrained", width_ratios=(3, 1)
    )
    with np.errstate(divide="ignore"):
        image = heat.imshow(np.log2(shares), aspect="auto", cmap="Greys", vmin=-3, vmax=3, interpolation="nearest")
    idle, experts = np.nonzero(shares == 0)
    heat.plot(experts, idle, "kx", markersize=min(5, 300 / E), scalex=False, scaley=False)
    heat.set(xlabel="expert", ylabel="layer", yticks=range(0, L, max(1, L // 6)), title="Load of each expert")
    for number, mine in enumerate(shares):
        tone = str(0.75 * number / max(1, L - 1))
        ranked.plot(np.sort(mine[mine > 0])[::-1], color=tone, linestyle="-" if number % 2 else "--", linewidth=1)
    ranked.set_yscale("log", base=2)
    top = max(9, 1.2 * shares.max())
    ranked.set(ylim=(1 / 16, top), xlabel="experts, busiest first", ylabel="load / mean load")
    more = [2**power for power in range(4, math.ceil(math.log2(top)))]
    ranked.set_yticks([*LOADS, *more], [*POWERS, *map(str, more)])
    ranked.set_title("dark: first layer, light: last")
    ranked.grid(alpha=0.3)
    load_bar(figure, image, heat, "load / mean load (×: no token)")
    return figure


def layers(found):
    """Effective numbers of experts and vocabulary specialization over layers."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(max(9, 3 + 0.35 * len(found["layers"])), 4), layout="constrained"
    )
    own = style(found["router"]) | {"linestyle": "-"}
    over_layers(left, found, lambda layer: math.exp(layer["entropy"]), "of a token's scores", own)
    other = {"color": "#000000", "linestyle": "--", "marker": "s"}
    over_layers(left, found, lambda layer: math.exp(layer["load_entropy"]), "of all tokens' choices (load)", other)
    E, K = len(found["layers"][0]["loads"]), found["top_k"]
    for level, words in ((E, f"all {E} experts alike"), (K, f"{K} a token")):
        left.axhline(level, color="#777777", linewidth=0.8)
        left.annotate(
            words, (0.01, level), (0, 2), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8
        )
    left.set_yscale("log", base=2)
    ticks = [2**power for power in range(math.ceil(math.log2(E)) + 1)]
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.set(ylim=(0.9, 1.4 * E), ylabel="exp(entropy), experts", title="Effective number of experts")
    for name, words, look in (("any", f"among its {K}", own), ("first", "first of all", other)):
        over_layers(right, found, lambda layer, n=name: layer[f"vocabulary_{n}"], words, look)
        by_chance = CHANCE | {"marker": look["marker"]}
        over_layers(
            right, found, lambda layer, n=name: layer[f"vocabulary_{n}_by_chance"], f"{words}, by chance", by_chance
        )
    right.set(
        ylim=(0, 1.02), ylabel="share of a token's occurrences", title="Its commonest expert: vocabulary specialization"
    )
    for axes in (left, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
    return figure


def agreement(found):
    """Experts in common over layers."""
    figure, axes = plt.subplots(figsize=(max(6, 2 + 0.3 * len(found["layers"])), 4), layout="constrained")
    looks = {"matched": {"color": "#0072B2", "linestyle": "-", "marker": "o"}}
    looks["same_number"] = {"color": "#D55E00", "linestyle": "--", "marker": "s"}
    words = {"matched": "experts renumbered to match best", "same_number": "experts of the same number"}
    for name, look in looks.items():
        over_layers(axes, found, lambda layer, n=name: layer[n], words[name], look, "agreement")
        by_chance = look | {"linestyle": ":", "markerfacecolor": "white"}
        over_layers(
            axes, found, lambda layer, n=name: layer[f"{n}_by_chance"], "the same, by chance", by_chance, "agreement"
        )
    axes.set(
        ylim=(0, 1.02),
        ylabel="share of a token's experts",
        title=f"Chosen by both: {found['run']} and {found['other']}",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
    return figure


def over_layers(axes, found, value, label, look, key="layers"):
    """A line of `value(layer)`."""
    L = len(found[key])
    axes.plot(range(L), [value(layer) for layer in found[key]], label=label, markersize=5, linewidth=1.3, **look)
    axes.set(xlabel="layer", xlim=(-0.5, L - 0.5), xticks=range(0, L, max(1, L // 12)))
    axes.grid(alpha=0.3)


def gates(found):
    """Histograms of the gates' sum and norm, a column a layer."""
    L, colour = len(found["layers"]), style(found["router"])["color"]
    figure, panels = plt.subplots(1, 2, figsize=(max(8, 2 + 0.7 * L), 4), layout="constrained")
    names = {"gate_sum": "sum of a token's gates", "gate_norm": "l2 norm of a token's gates"}
    for axes, (key, words) in zip(panels, names.items(), strict=True):
        columns = np.array([layer[key]["histogram"] for layer in found["layers"]], dtype=float)
        edges = found["layers"][0][key]["edges"]
        columns /= columns.max(1, keepdims=True)
        axes.pcolormesh(np.arange(L + 1) - 0.5, edges, columns.T, cmap="Greys", vmin=0, vmax=1.4)
        low, middle, high = (
            np.array([layer[key]["quantiles"][q] for layer in found["layers"]]) for q in ("0.05", "0.5", "0.95")
        )
        axes.errorbar(range(L), middle, (middle - low, high - middle), fmt="o", color=colour, markersize=4, capsize=3)
        axes.set(xlabel="layer", xticks=range(0, L, max(1, L // 12)), ylabel=words)
    figure.suptitle("Gates: median and 5% to 95%; grey: tokens, over the most in a bin of the layer", fontsize=10)
    return figure


def pairs(found):
    """Lift of each pair of experts, a panel a layer."""
    L, E = len(found["layers"]), len(found["layers"][0]["loads"])
    columns = min(L, COLUMNS)
    figure, panels = plt.subplots(
        -(-L // columns),
        columns,
        figsize=(max(4.5, 2.6 * columns), 0.8 + 2.7 * -(-L // columns)),
        squeeze=False,
        layout="constrained",
    )
    colours = plt.get_cmap("PuOr_r").with_extremes(bad="#bbbbbb")
    for number, axes in enumerate(panels.flat):
        if number >= L:
            axes.axis("off")
            continue
        together = np.array(found["layers"][number]["coactivation"])
        with np.errstate(divide="ignore", invalid="ignore"):
            lift = np.log2(coactivation(together) / (together.diagonal() / found["tokens"]))
        lift = np.nan_to_num(lift, nan=np.nan, neginf=-9)  # never together
        order = side_by_side(lift)
        image = axes.imshow(lift[np.ix_(order, order)], cmap=colours, vmin=-3, vmax=3, interpolation="nearest")
        axes.set(title=f"layer {number}", xticks=[], yticks=[])
    figure.suptitle(f"Pairs of {E} experts", fontsize=10)
    load_bar(
        figure, image, panels, "tokens that chose both / expected from their loads\n(grey: an expert of no token)", 0.6
    )
    return figure


def side_by_side(lift):
    """An order (E,) of experts in which those with a high log lift (E, E) are neighbours: from the first on, the
    nearest of those left to the last two. Experts that are nan come last."""
    near = np.nan_to_num(lift, nan=-99)
    order, left = [int(near.max(1).argmax())], np.ones(len(near), dtype=bool)
    while len(order) < len(near):
        left[order[-1]] = False
        order.append(int(np.where(left, near[order[-2:]].sum(0), -np.inf).argmax()))
    return np.array(order)


def tokens(found):
    """Of the commonest tokens, the share of occurrences that chose each expert: a panel for the first, the middle and
    the last layer."""
    L, common = len(found["layers"]), found["common_tokens"]
    chosen = sorted({round(i * (L - 1) / (LAYERS - 1)) for i in range(LAYERS)})
    rows = len(found["layers"][0]["common"])
    figure, panels = plt.subplots(
        1,
        len(chosen),
        figsize=(1.5 + 4 * len(chosen), 1.6 + 0.17 * rows),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, number in zip(panels[0], chosen, strict=True):
        counts = np.array(found["layers"][number]["common"])
        shares = counts / np.array([token["seen"] for token in common[:rows]])[:, None]
        order = np.lexsort((-shares.max(0), shares.argmax(0)))
        image = axes.imshow(shares[:, order], aspect="auto", cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=f"layer {number}", xticks=[], xlabel=f"{len(order)} experts, by the token they take most of")
    glyphs = font_manager.get_font(font_manager.findfont(FONT)).get_charmap()
    words = [
        "".join(one if ord(one) in glyphs else escaped(one) for one in visible(token["text"], token["id"]))
        for token in common[:rows]
    ]
    figure.suptitle(f"Where the {rows} commonest tokens go", fontsize=10)
    panels[0][0].set_yticks(range(rows), words, fontsize=8, family=FONT, parse_math=False)
    figure.colorbar(image, ax=panels, location="right", aspect=40).set_label("share of the token's occurrences")
    return figure
