"""Draw what an evaluation has measured: the pictures, and for routing a page with tables, beside the JSON file.

    python -m scripts.draw runs/NAME/eval/step_…/routing/routing.json   routing.md, routing.html and their pictures
    python -m scripts.draw docs/theory.json                             theory-CLAIM.png for each claim with curves

Needs requirements-report.txt.
"""

import json
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.command import build_parser, command, require_packages, run_command
from eval.routing import coactivation_shares, summarize_agreement, summarize_layers

if TYPE_CHECKING:  # imported once it is known to be installed
    from matplotlib.figure import Figure

    from scripts.report.pages import Block

COLUMNS = 6  # layers side by side in the picture of pairs
EXPERTS = 5  # per layer in the table of tokens
MIN_LOAD = 0.1  # of the mean load, for an expert in that table: fewer tokens differ from the text's by chance
TOKENS = 6  # per expert
LONGEST = 20  # characters of a token
LITERAL = str.maketrans({"*": "∗", "`": "ˋ"})  # the page would take them for bold and code

ABOUT = """Router {router}, {n_layer} layers of {n_expert} experts, {top_k} per token{mean}; {windows:,} validation
windows of {data}, {tokens:,} tokens. Layers and experts are numbered from 0."""
SUMMARY = """**busiest**: highest load over mean load. **idle**: experts that no token chose. **in use**: exp of the
entropy of the loads, the number of equally busy experts with the same entropy. **per token**: exp of the mean entropy
of a token's normalised positive scores; **nats**: that entropy.

**zero gates**: share of gates that are exactly 0. **sum**, **norm**: sum and l2 norm of a token's gates, median [5%,
95%].

**vocabulary**: vocabulary specialization (OLMoE, arXiv 2409.02060, Sec. 5), the share of a token's occurrences that its
most frequent expert has; mean over tokens seen {min_count} times or more. **partner**: share of an expert's tokens that
its most frequent partner has; mean over experts.

In brackets **by chance**: each token's choices taken from another token of another window; for partners, independent
choices."""
EXPERT_TOKENS = """Per layer the {EXPERTS} experts (with {MIN_LOAD:g} of the mean load or more) whose tokens differ most
from the text's: KL divergence in nats, less that by chance. Then each expert's most characteristic tokens (seen
{min_count} times or more) with their share of the expert's load, and how many times their share of the text that is.
#128 is token 128 where it is not a complete character; ∗ and ˋ stand for asterisk and backtick."""
AGREEMENT = """**same number**: share of a token's experts with equal numbers in both models. Between checkpoints of one
run this is OLMoE's router saturation; runs of different seeds number their experts independently.

**matched**: the same after the one-to-one renumbering of the other model's experts that makes it largest.

In brackets **by chance**: the other model's choices taken from another token of another window. **beyond chance**:
matched, on a scale where chance is 0 and full agreement 1."""


# ---- routing.json


def build_page(report: dict[str, Any]) -> list["Block"]:
    """Blocks of routing.md; the section on agreement only where two models were compared."""
    values = report | {"n_layer": len(report["layers"]), "n_expert": len(report["layers"][0]["loads"])}
    values |= {"EXPERTS": EXPERTS, "MIN_LOAD": MIN_LOAD, "mean": f", {report['mean']}" if report["mean"] else ""}

    def fill(text: str) -> list[str]:
        return [" ".join(paragraph.split()).format_map(values) for paragraph in text.split("\n\n")]

    pairs = "Tokens that chose both experts of a pair over what their loads would give; partners are neighbours."
    blocks: list[Block] = [
        ("h1", f"Routing of {report['run']} at step {report['step']:,}"),
        ("p", *fill(ABOUT)),
        ("table", *summarize_layers(report)),
        ("list", fill(SUMMARY)),
        ("picture", "loads.png", "Load of each expert over the mean of its layer."),
        ("h2", "Tokens of each expert"),
        ("p", *fill(EXPERT_TOKENS)),
        ("table", *tabulate_tokens(report["layers"])),
        ("h2", "Experts chosen together"),
        ("picture", "coactivation.png", pairs),
    ]
    if "agreement" in report:
        blocks += [("h2", f"Agreement with {report['other']}"), ("table", *summarize_agreement(report))]
        blocks += [("list", fill(AGREEMENT))]
    return blocks


def tabulate_tokens(layers: Iterable[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of the experts whose tokens differ most from the text's."""
    rows = []
    for layer in layers:
        loads, mean = layer["loads"], sum(layer["loads"]) / len(layer["loads"])
        beyond = {e: expert["nats"] - expert["nats_by_chance"] for e, expert in enumerate(layer["experts"])}
        busy = [e for e in beyond if loads[e] >= MIN_LOAD * mean]
        for e in sorted(busy, key=lambda e: -beyond[e])[:EXPERTS]:
            tokens = layer["experts"][e]["tokens"][:TOKENS]
            cells = [f"{format_token(token)} {token['share']:.0%} {token['lift']:.1f}×" for token in tokens]
            cells += [""] * (TOKENS - len(cells))
            rows.append([f"{layer['layer']}, {e}", f"{loads[e] / mean:.2f}", f"{beyond[e]:.2f}", *cells])
    return ["layer, expert", "load / mean", "nats", "tokens", *[""] * (TOKENS - 1)], rows


def format_token(token: dict[str, Any]) -> str:
    """A token's text in quotes as Python writes it, cut at LONGEST characters; #id if not a complete character."""
    text = token["text"]
    if "\ufffd" in text:
        return f"#{token['id']}"
    return repr(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…").translate(LITERAL)


def plot_loads(report: dict[str, Any]) -> "Figure":
    """Load over mean load by layer and expert, in greys."""
    from scripts.report.figures import add_load_bar, plt

    loads = np.array([layer["loads"] for layer in report["layers"]])
    L, E = loads.shape
    figure, axes = plt.subplots(figsize=(9, 2.4 + 0.14 * max(L, 6)), layout="constrained")
    with np.errstate(divide="ignore"):
        shares = np.log2(loads / loads.mean(1, keepdims=True))
    image = axes.imshow(shares, aspect="auto", cmap="Greys", vmin=-3, vmax=3, interpolation="nearest")
    idle, experts = np.nonzero(loads == 0)
    axes.plot(experts, idle, "kx", markersize=min(5, 300 / E), scalex=False, scaley=False)
    ticks = range(0, L, ceil(L / 12))
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_yticks(ticks, [report["layers"][row]["layer"] for row in ticks])
    add_load_bar(figure, image, [axes], "load / mean load (×: no token)")
    return figure


def plot_coactivation(report: dict[str, Any]) -> "Figure":
    """Lift of each pair of experts, one panel per layer; readable without colour, from orange to violet."""
    from scripts.report.figures import add_load_bar, plt

    layers = report["layers"]
    columns, rows = min(len(layers), COLUMNS), ceil(len(layers) / COLUMNS)
    figure = plt.figure(figsize=(max(4.5, 2.6 * columns), 1.3 + 2.7 * rows), layout="constrained")
    colours = plt.get_cmap("PuOr_r").with_extremes(bad="#bbbbbb")
    for number, layer in enumerate(layers, 1):
        together = np.array(layer["coactivation"])
        with np.errstate(divide="ignore", invalid="ignore"):
            lift = np.log2(coactivation_shares(together) / (together.diagonal() / report["tokens"]))
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
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    idle = np.isnan(lift).all(1)
    active = np.flatnonzero(~idle)
    if len(active) > 2:
        distance = squareform(9 - lift[np.ix_(active, active)], checks=False)
        active = active[leaves_list(linkage(distance, "average", optimal_ordering=True))]
    return np.concatenate([active, np.flatnonzero(idle)])


# ---- theory.json


def plot_panels(panels: Sequence[dict[str, Any]]) -> "Figure":
    """Panels side by side: expectations as lines, measurements with two standard errors."""
    from scripts.report.figures import plt
    from scripts.report.style import OTHERS, STYLES, style

    figure, grid = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False, layout="constrained")
    for axes, panel in zip(grid[0], panels, strict=True):
        for number, (label, points) in enumerate(panel["curves"].items()):
            x, analytic, measured, error = np.array(points, float).T  # None -> NaN
            other = dict(zip(("color", "linestyle", "marker"), OTHERS[number], strict=True))
            look = style(label) if label in STYLES else other
            line = measured if np.isnan(analytic).all() else analytic
            axes.plot(x, line, label=label, markevery=[], **look)  # markers in the legend alone
            axes.errorbar(x, measured, 2 * error, capsize=2, **look | {"linestyle": "none"})
        axes.set(title=panel["title"], ylabel=panel["ylabel"], yscale=panel["yscale"])
        axes.set_xscale("log", base=2)
        axes.set_xlabel(panel["xlabel"])
    grid[0][0].legend()
    figure.supxlabel("lines: exact, where known; markers: measured ± 2 standard errors", fontsize=8)
    return figure


def draw_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures of a routing.json or theory.json, and the page of a routing.json: the files' paths."""
    from scripts.report.figures import plt, save_figure
    from scripts.report.pages import write_page

    rc = {"font.size": 8, "axes.titlesize": 9, "grid.color": "#dddddd"}
    rc |= {"lines.markerfacecolor": "white", "lines.markersize": 5}
    written = []
    if "layers" in report:
        with plt.rc_context(rc):
            save_figure(plot_loads(report), folder / "loads.png")
            save_figure(plot_coactivation(report), folder / "coactivation.png")
        write_page(build_page(report), folder, "routing")
        return [folder / "routing.md", folder / "routing.html"]
    for claim, results in report["claims"].items():
        if results["panels"]:
            with plt.rc_context(rc | {"axes.grid": True}):
                save_figure(plot_panels(results["panels"]), folder / f"theory-{claim}.png")
            written.append(folder / f"theory-{claim}.png")
    return written


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser("scripts.draw", __doc__)
    parser.add_argument("file", type=Path, help="routing.json of eval.routing, or theory.json of eval.theory")
    file = parser.parse_args(argv).file
    require_packages("matplotlib", "scipy")
    report = json.loads(file.read_text())
    if not isinstance(report, dict) or not report.keys() & {"layers", "claims"}:
        raise ValueError(f"{file}: not written by eval.routing or eval.theory; run one of them first")
    for path in draw_report(report, file.parent):
        print(path)


if __name__ == "__main__":
    run_command(main)
