"""What all pictures share: no display, one resolution, one scale of expert loads. Needs requirements-report.txt."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

DPI = 110
LOADS = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
POWERS = ["1/8", "1/4", "1/2", "1", "2", "4", "8"]  # labels of LOADS


def add_load_bar(
    figure: Figure, image: AxesImage, axes: Sequence[Axes] | np.ndarray, label: str, shrink: float = 0.6
) -> None:
    """Add a colour bar for log2 of LOADS below `axes`."""
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=60, shrink=shrink, extend="both")
    bar.set_ticks([*np.log2(LOADS)], labels=POWERS)
    bar.set_label(label)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write the figure and close it."""
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
