"""How often the 95% intervals of reports contain the truth where validation windows share documents: a simulation.

    python -m scripts.coverage                  a table, beside intervals that take windows as independent ("old")
    python -m scripts.coverage --draws 20000    the same, more exactly

Each draw is an array of paired differences, seeds by 128 windows, whose true mean is 0: d = seed + document + window +
seed × document + seed × window, each normal and independent. EFFECTS are their standard deviations in that order, in
units of the window's; "measured" is what tanh minus softmax shows on mix-bytes (docs/LOG.md). With one seed its own
effect is left out: then the interval is about that pair of runs. A second table is of `scripts.report --over`: curves
whose intervals share one variance of seeds, a third the same where a seed moves all of a curve alike. A fourth has how
often some of all pairs of equal routers is decided by Holm's p-value. Needs requirements-report.txt.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from common.command import require_packages, run_command
from common.text import text_table
from eval.intervals import correct_family, estimate_interval, half_width, pool_seeds
from scripts.report.curves import Curve, Curves

EFFECTS = {
    "measured": (0.6, 0.9, 1.0, 0.5, 1.3),
    "documents alike": (0.6, 0.0, 1.0, 0.0, 1.3),
    "seeds alike": (0.0, 0.9, 1.0, 0.5, 1.3),
    "seeds differ": (2.0, 0.9, 1.0, 0.5, 1.3),
}
WINDOWS = 128
BOOKS = [35, 25, 18, 4, 4, 2, 2, 2, 2, 2, 2, *[1] * 30]  # windows by document of mix-bytes, evenly over its tokens
SPREAD = [2] * 53 + [1] * 22  # and spread over its documents
SIZES = {**{f"{n} each": [n] * (WINDOWS // n) for n in (1, 4, 8, 16)}, "35, 25, 18, …": BOOKS, "at most 2": SPREAD}
SEEDS = (1, 2, 3, 5)
FAMILY = 24  # cells of a table of curves
VALUES = 4  # cells of a curve in the third table
ALIKE = (0.0, 0.5, 1.0)  # correlations of a seed's effects along a curve


def draw_differences(rng: np.random.Generator, effects: Sequence[float], labels: np.ndarray, seeds: int) -> np.ndarray:
    """One array of paired differences, (S, W); `labels`: (W,), the document of each window."""
    seed, document, window, seed_document, seed_window = effects
    of_documents = document * rng.standard_normal(labels[-1] + 1)
    of_documents = of_documents + seed_document * rng.standard_normal((seeds, labels[-1] + 1))  # (S, D)
    of_windows = window * rng.standard_normal(len(labels)) + seed_window * rng.standard_normal((seeds, len(labels)))
    return of_documents[:, labels] + of_windows + seed * (seeds > 1) * rng.standard_normal((seeds, 1))


def old_half_width(d: np.ndarray) -> float:
    """Half the interval of before: seeds and windows are independent, and their remainder counts twice."""
    S, W = d.shape
    parts = [(d.mean(0).var(ddof=1) / W, W - 1.0)]
    if S > 1:
        parts.append((d.mean(1).var(ddof=1) / S, S - 1.0))
    return half_width(parts, 0.05)


def simulate_coverage(effects: Sequence[float], sizes: Sequence[int], seeds: int, draws: int) -> tuple[float, float]:
    """Parts of the old and of the new intervals that contain the truth. The same numbers each time."""
    rng, labels = np.random.default_rng([seeds, *sizes]), np.repeat(np.arange(len(sizes)), sizes)
    old = new = 0
    for _ in range(draws):
        d = draw_differences(rng, effects, labels, seeds)
        found = estimate_interval([d], documents=[labels])
        old += abs(found.mean) <= old_half_width(d)
        new += found.low <= 0 <= found.high
    return old / draws, new / draws


def simulate_pooled(factor: float, seeds: int, draws: int) -> tuple[float, float, float, float]:
    """Intervals of FAMILY cells minus their mean; seeds move every second cell `factor` times as much.

    Returns:
        The parts of own and of pooled intervals that contain the truth, that of pooled ones of the cells that are moved
        more, and the width of pooled intervals over that of own ones, medians.
    """
    rng, labels = np.random.default_rng([seeds, int(10 * factor)]), np.repeat(np.arange(len(SPREAD)), SPREAD)
    seed, *others = EFFECTS["measured"]
    held, widths = [], []
    for _ in range(draws):
        moved = [factor if i % 2 else 1 for i in range(FAMILY)]
        cells = np.array([draw_differences(rng, (by * seed, *others), labels, seeds) for by in moved])
        own = [estimate_interval([cell - cells.mean(0)], documents=[labels]) for cell in cells]
        pooled = pool_seeds(own, FAMILY - 1)
        held.append([[one.low <= 0 <= one.high for one in of] for of in (own, pooled)])
        widths.append([np.median([one.high - one.low for one in of]) for of in (own, pooled)])
    (own, pooled), (wide, narrow) = np.mean(held, 0), np.median(widths, 0)
    return own.mean(), pooled.mean(), pooled[1::2].mean(), narrow / wide


def simulate_curves(alike: float, curves: int, seeds: int, draws: int) -> float:
    """The part of intervals of curves minus the first that contain the truth; `alike`: one of ALIKE."""
    rng, labels = np.random.default_rng([curves, seeds, int(10 * alike)]), np.repeat(np.arange(len(SPREAD)), SPREAD)
    seed, *others = EFFECTS["measured"]
    held = []
    for _ in range(draws):
        made = []
        for i in range(curves):
            common = math.sqrt(alike) * rng.standard_normal((seeds, 1))
            moved = common + math.sqrt(1 - alike) * rng.standard_normal((VALUES, seeds, 1))
            cells = {x: draw_differences(rng, (0, *others), labels, seeds) + seed * moved[x] for x in range(VALUES)}
            made.append(Curve((str(i),), "", cells))
        found = Curves("", made, list(range(seeds)), labels, []).differences("0")
        held += [one.low <= 0 <= one.high for of in found.values() for one in of.values()]
    return float(np.mean(held))


def simulate_family(effects: Sequence[float], routers: int, seeds: int, draws: int) -> float:
    """The part of draws of equal routers in which some pair's verdict holds for the family of all pairs."""
    rng, labels = np.random.default_rng([routers, seeds]), np.repeat(np.arange(len(SPREAD)), SPREAD)
    pairs, false = list(combinations(range(routers), 2)), 0
    for _ in range(draws):
        losses = [draw_differences(rng, effects, labels, seeds) for _ in range(routers)]
        found = [estimate_interval([losses[i] - losses[j]], documents=[labels]) for i, j in pairs]
        false += min(correct_family(found, pairs, [None] * len(pairs))) < 0.05
    return false / draws


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 after an error that is the user's to fix."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.coverage", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=2000, help="of each cell (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        require_packages("scipy")
        if args.draws < 1:
            raise ValueError(f"--draws {args.draws}: expected 1 or more")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = []
    for name, effects in EFFECTS.items():
        for label, sizes in SIZES.items():
            cells = [simulate_coverage(effects, sizes, seeds, args.draws) for seeds in SEEDS]
            rows.append([name, label, *(f"{old:.3f} {new:.3f}" for old, new in cells)])
    print(text_table(("effects", "windows of a document", *(f"{n} seeds: old, new" for n in SEEDS)), rows, left=2))
    print(f"{args.draws:,} draws of a cell, so ± {1.96 * math.sqrt(0.05 * 0.95 / args.draws):.3f}")
    draws, rows = max(1, args.draws // FAMILY), []
    for seeds, factor in ((2, 1), (2, 2), (3, 1), (3, 2)):
        rows.append([str(seeds), f"{factor}", *(f"{part:.3f}" for part in simulate_pooled(factor, seeds, draws))])
    columns = ("seeds", "half moved by", "own", "pooled", "pooled, of those", "width, pooled over own")
    print(f"\ncurves, {FAMILY} cells, {draws:,} draws:\n{text_table(columns, rows, left=0)}")
    rows = [
        [str(curves), str(seeds), *(f"{simulate_curves(alike, curves, seeds, draws):.3f}" for alike in ALIKE)]
        for curves in (2, 4, 6)
        for seeds in (2, 3)
    ]
    columns = ("curves", "seeds", *(f"alike by {alike:g}" for alike in ALIKE))
    print(f"\ncurves of {VALUES} values minus the first, {draws:,} draws:\n{text_table(columns, rows, left=0)}")
    draws, rows = max(1, args.draws // 4), []
    for name in ("measured", "seeds differ"):
        for routers in (4, 6):
            parts = [simulate_family(EFFECTS[name], routers, seeds, draws) for seeds in SEEDS[1:]]
            rows.append([name, str(routers), *(f"{part:.3f}" for part in parts)])
    columns = ("effects", "equal routers", *(f"{n} seeds" for n in SEEDS[1:]))
    print(f"\nsome pair decided by Holm, {draws:,} draws:\n{text_table(columns, rows, left=1)}")
    return 0


if __name__ == "__main__":
    run_command(main)
