"""Draw the experts' loads that eval.routing has measured.

    python -m scripts.draw runs/NAME/eval/step_…/routing/routing.json   loads.png beside it

Needs requirements-report.txt.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.command import build_parser, command, require_packages, run_command

if TYPE_CHECKING:  # imported once it is known to be installed
    from matplotlib.figure import Figure


def plot_loads(report: dict[str, Any]) -> "Figure":
    """Load over mean load by layer and expert, in greys."""
    from matplotlib.figure import Figure

    loads = np.array([layer["loads"] for layer in report["layers"]])
    figure = Figure((9, 1.8 + 0.14 * max(len(loads), 6)), layout="constrained")
    axes = figure.add_subplot(
        xlabel="expert", ylabel="layer", title=f"{report['run']}, step {report['step']:,}"
    )
    shares = loads / loads.mean(1, keepdims=True)
    image = axes.imshow(
        shares, vmin=0, vmax=4, aspect="auto", cmap="Greys", interpolation="nearest"
    )
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
    try:
        figure = plot_loads(json.loads(file.read_text("utf-8")))
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: not written by eval.routing; run it first") from None
    figure.savefig(file.with_name("loads.png"))
    print(file.with_name("loads.png"))


if __name__ == "__main__":
    run_command(main)
