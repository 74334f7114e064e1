"""What all pictures share: no display, one resolution, one scale of loads."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

DPI = 110
LOADS = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
POWERS = ["1/8", "1/4", "1/2", "1", "2", "4", "8"]  # LOADS in words


def load_bar(figure, image, axes, words, shrink=0.6):
    """A bar for log2 of LOADS."""
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=60, shrink=shrink, extend="both")
    bar.set_ticks(np.log2(LOADS), labels=POWERS)
    bar.set_label(words)


def finish(figure, path):
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
