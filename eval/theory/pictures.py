"""Pictures of eval.theory, one look per router (scripts/report/style.py)."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from eval.theory.claims import Panel
from router import ROUTERS
from scripts.report.figures import save_figure
from scripts.report.style import OTHERS, style

RC = {"font.size": 8, "axes.grid": True, "grid.color": "#dddddd", "axes.titlesize": 9}
RC |= {"lines.markerfacecolor": "white", "lines.markersize": 5}


def plot_panels(panels: Sequence[Panel], path: Path) -> None:
    """Write a PNG with the panels side by side: expectations as lines, measurements with two standard errors."""
    with plt.rc_context(RC):
        figure, grid = plt.subplots(
            1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False, layout="constrained"
        )
        for axes, panel in zip(grid[0], panels, strict=True):
            for number, (label, points) in enumerate(panel.curves.items()):
                x, analytic, measured, error = np.array(points, float).T  # None -> NaN
                other = dict(zip(("color", "linestyle", "marker"), OTHERS[number], strict=True))
                look = style(label) if label in ROUTERS else other
                line = measured if np.isnan(analytic).all() else analytic
                axes.plot(x, line, label=label, markevery=[], **look)  # markers in the legend alone
                axes.errorbar(x, measured, 2 * error, capsize=2, **look | {"linestyle": "none"})
            axes.set(title=panel.title, ylabel=panel.ylabel, yscale=panel.yscale)
            axes.set_xscale("log", base=2)
            axes.set_xlabel(panel.xlabel)
        grid[0][0].legend()
        figure.supxlabel("lines: exact, where known; markers: measured ± 2 standard errors", fontsize=8)
        save_figure(figure, path)
