"""Draw what eval.routing has measured: a page with tables and a picture, beside the JSON file.

    python -m scripts.draw runs/NAME/eval/step_…/routing/routing.json   routing.md, routing.html and loads.png

Needs requirements-report.txt.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.command import build_parser, command, require_packages, run_command
from eval.routing import summarize_agreement, summarize_layers

if TYPE_CHECKING:  # imported once it is known to be installed
    from matplotlib.figure import Figure

    from scripts.report.pages import Block

EXPERTS = 5  # per layer in the table of tokens
MIN_LOAD = 0.1  # of the mean load, for an expert in that table: fewer tokens differ from the text's by chance
TOKENS = 6  # per expert
LONGEST = 20  # characters of a token
LITERAL = str.maketrans({"*": "∗", "`": "ˋ"})  # the page would take them for bold and code

ABOUT = """Router {router}, {n_layer} layers of {n_expert} experts, {top_k} per token{mean}; {windows:,} validation
windows of {data}, {tokens:,} tokens. Layers and experts are numbered from 0."""
SUMMARY = """**busiest**: highest load over mean load. **idle**: experts that no token chose. **in use**: exp of the
entropy of the loads. **per token**: exp of the mean entropy of a token's normalised positive scores. **zero gates**:
share of gates that are exactly 0. **vocabulary**: share of a token's occurrences that its most frequent expert has
(OLMoE, arXiv 2409.02060, Sec. 5). **partner**: share of an expert's tokens that its most frequent partner has. In
brackets **by chance**: each token's choices taken from another token of another window; for partners, independent
choices."""
EXPERT_TOKENS = """Per layer the experts (with {MIN_LOAD:g} of the mean load or more) whose tokens differ most from the
text's: KL divergence in nats, less that by chance. Then each expert's most characteristic tokens with their share of
the expert's load, and how many times their share of the text that is."""


def build_page(report: dict[str, Any]) -> list["Block"]:
    """Blocks of routing.md; the section on agreement only where two models were compared."""
    values = report | {"n_layer": len(report["layers"]), "n_expert": len(report["layers"][0]["loads"])}
    values |= {"MIN_LOAD": MIN_LOAD, "mean": f", {report['mean']}" if report["mean"] else ""}

    def fill(text: str) -> str:
        return " ".join(text.split()).format_map(values)

    blocks: list[Block] = [
        ("h1", f"Routing of {report['run']} at step {report['step']:,}"),
        ("p", fill(ABOUT)),
        ("table", *summarize_layers(report)),
        ("p", fill(SUMMARY)),
        ("picture", "loads.png", "Load of each expert over the mean of its layer."),
        ("h2", "Tokens of each expert"),
        ("p", fill(EXPERT_TOKENS)),
        ("table", *tabulate_tokens(report["layers"])),
    ]
    if "agreement" in report:
        blocks += [("h2", f"Agreement with {report['other']}"), ("table", *summarize_agreement(report))]
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
    """A token's text in quotes as Python writes it, cut at LONGEST characters."""
    text = token["text"]
    return repr(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…").translate(LITERAL)


def plot_loads(report: dict[str, Any]) -> "Figure":
    """Load over mean load by layer and expert, in greys."""
    from matplotlib.figure import Figure

    loads = np.array([layer["loads"] for layer in report["layers"]])
    figure = Figure((9, 1.8 + 0.14 * max(len(loads), 6)), layout="constrained")
    axes = figure.add_subplot(xlabel="expert", ylabel="layer")
    shares = loads / loads.mean(1, keepdims=True)
    image = axes.imshow(shares, vmin=0, vmax=4, aspect="auto", cmap="Greys", interpolation="nearest")
    idle, experts = np.nonzero(loads == 0)
    axes.plot(experts, idle, "kx", markersize=3, scalex=False, scaley=False)
    axes.set_yticks(range(len(loads)), [layer["layer"] for layer in report["layers"]])
    figure.colorbar(image, extend="max", label="load / mean load (×: no token)")
    return figure


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser("scripts.draw", __doc__)
    parser.add_argument("file", type=Path, help="routing.json of eval.routing")
    file = parser.parse_args(argv).file
    require_packages("matplotlib")
    if not file.is_file():
        raise ValueError(f"{file}: no such file; python -m eval.routing RUN writes it")
    try:
        report = json.loads(file.read_text("utf-8"))
    except ValueError:  # not JSON, or not text
        report = None
    if not isinstance(report, dict) or "layers" not in report:
        raise ValueError(f"{file}: not written by eval.routing; run it first")
    from scripts.report.pages import write_page
    from scripts.report.style import save_figure

    save_figure(plot_loads(report), file.parent / "loads.png")
    write_page(build_page(report), file.parent, "routing")
    print(f"{file.parent}/routing.md\n{file.parent}/routing.html")


if __name__ == "__main__":
    run_command(main)
