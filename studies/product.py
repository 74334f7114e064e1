"""Plot the loss over initial gate norm × learning rate ratio of w_out: the study w_out.

    python -m studies.product runs/w_out-* --over optim.expert_out_lr_ratio

Writes product.png.
"""

import sys
from collections.abc import Sequence

from matplotlib.figure import Figure

from common.command import command, run_command
from report.__main__ import make_report_parser
from report.groups import Group
from report.lines import collect_means
from report.style import choose_style
from studies.command import read_with_notes


def plot(argv: Sequence[str]) -> Figure:
    """The picture of the first group."""
    args = make_report_parser("studies.product", __doc__).parse_args(argv)
    return plot_product(read_with_notes(args).groups[0])


def plot_product(group: Group) -> Figure:
    """Loss over norm × the key's value: mean and range over seeds.

    The largest norm has filled markers.
    """
    figure = Figure((7, 4.5), layout="constrained")
    axes = figure.subplots()
    largest_norm = max(variant.options["model.gate_norm"] for variant in group.variants)
    for variant in group.variants:
        norm = variant.options["model.gate_norm"]
        xs, means, lows, highs = collect_means(group, variant, "val/loss").T
        xs = norm * xs
        style = choose_style(variant.router)
        style["markerfacecolor"] = "white"
        style["linestyle"] = ":"
        if norm == largest_norm:
            style["markerfacecolor"] = style["color"]
            style["linestyle"] = "-"
        label = f"{variant.router}, norm {norm:g}"
        axes.plot(xs, means, label=label, markersize=6, linewidth=1.2, **style)
        axes.vlines(xs, lows, highs, color=style["color"], alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"initial gate norm × {group.key}")
    axes.set_ylabel(f"validation loss, {group.runs[0].unit}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return figure


@command
def main(argv: Sequence[str]) -> None:
    """Write the picture."""
    plot(argv).savefig("product.png")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
