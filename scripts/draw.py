"""Draw the experts' loads that eval.routing has measured.

    python -m scripts.draw runs/NAME/eval/step_…/routing/routing.json   # writes loads.png there

Needs requirements-report.txt.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.command import build_parser, command, require_packages, run_command
from common.files import check_regular

if TYPE_CHECKING:  # imported once it is known to be installed
    from matplotlib.figure import Figure


def plot_loads(report: dict[str, Any]) -> "Figure":
    """Plot load over mean load by layer and expert, in greys."""
    from matplotlib.figure import Figure

    loads = np.array([layer["loads"] for layer in report["layers"]])  # (L, E)
    relative = loads / loads.mean(1, keepdims=True)
    height = 1.8 + 0.14 * max(len(loads), 6)  # inches
    figure = Figure((9, height), layout="constrained")
    title = f"{report['run']}, step {report['step']:,}"
    axes = figure.add_subplot(xlabel="expert", ylabel="layer", title=title)
    image = axes.imshow(
        relative, vmin=0, vmax=4, aspect="auto", cmap="Greys", interpolation="nearest"
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
    if file.is_dir():
        written = sorted(str(path) for path in file.rglob("routing.json"))
        remedy = f"name a file, such as {written[0]}" if written else "run eval.routing first"
        raise ValueError(f"{file}: a folder; {remedy}")
    require_packages("matplotlib")
    check_regular(file)
    try:
        figure = plot_loads(json.loads(file.read_text("utf-8")))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ValueError(f"{file}: not written by eval.routing; run it first") from None
    picture = file.with_name("loads.png")
    figure.savefig(picture)
    print(picture)


if __name__ == "__main__":
    run_command(main)
