"""Loss at the end against one swept key, with a curve for each of the other settings: `scripts.report --over KEY`."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from configure.schema import KEYS
from eval.intervals import Interval, correct_holm, estimate_interval, pool_seeds
from eval.pages import Block, write_page
from eval.pictures import save_figure
from eval.style import style
from runtime.output import text_table
from scripts.report.page import remove_pictures
from scripts.report.pictures import LOSS, plot_lines
from scripts.report.runs import Run, check_same_text
from scripts.report.settings import ARM_KEYS, DTYPE, SETTING_KEYS, find_varying, name_values

TABLE = """\
Validation loss at the end, nats per token, mean over seeds; lower is better. ±: half of the 95% interval of its
difference from the mean of all cells, paired by seed and validation window, so that what they share (how hard the text
is) does not widen it. Seeds are taken to move all cells of a table equally much, since a cell's own two or three say
little of that. Spread: largest minus smallest of the row."""
SHARES = "Of the variance between cells {:.0%} lies between values of {}, {:.0%} between curves, {:.0%} in neither."
BEST = """\
Each curve at its best value of the key: for each seed the one that is best by the *other* seeds, so that a lucky run
does not choose itself."""
EQUAL = "Each curve as the mean over the values {}, which all have: what is left where the key is equal."
PAIRS = """\
Differences: first minus second with 95% intervals, paired by seed and window; seeds and documents are taken as
independent draws, seeds of one variance in a table. Holm: the p-value corrected for the family of all rows of the
table; at 0.05 or more the row is undecided as one of its family."""
ONE_SEED = "Each curve at its best value of the key, chosen by the only seed: nothing is decided, all are flattered."
APART = "Loss minus the mean of all curves at that value, with 95% intervals, paired by seed and window."
Table = tuple[list[str], list[list[str]]]
Intervals = dict[tuple[str, Any], Interval]  # by a curve's label and a value of the key


class Curve(NamedTuple):
    """One router with its other settings: losses at the end, (S seeds, W windows) fp64, by values of the key."""

    label: str
    router: str
    cells: dict[Any, np.ndarray]

    def at_best(self) -> tuple[np.ndarray, list[Any]]:
        """Losses (S, W) with each seed at the value that is best by the other seeds, and those values."""
        values = list(self.cells)
        losses = np.array([cell.mean(1) for cell in self.cells.values()])  # (X, S)
        others = losses.sum(1, keepdims=True) - losses if losses.shape[1] > 1 else losses
        best = [values[i] for i in others.argmin(0)]
        return np.array([self.cells[x][seed] for seed, x in enumerate(best)]), best


class Curves(NamedTuple):
    """All curves over a key, of the same seeds and windows."""

    key: str
    curves: list[Curve]
    seeds: list[int]
    documents: np.ndarray | None  # (W,), equal for windows of one document; None if not known
    notes: list[str]

    def estimate(self, differences: np.ndarray) -> Interval:
        """The interval of differences (S, W)."""
        return estimate_interval([differences], documents=[self.documents])

    @property
    def shared(self) -> list[Any]:
        """Values of the key that all curves have."""
        return [x for x in self.curves[0].cells if all(x in curve.cells for curve in self.curves)]

    def intervals(self) -> Intervals:
        """Mean losses, with the intervals of their differences from the mean of all cells."""
        cells = {(curve.label, x): cell for curve in self.curves for x, cell in curve.cells.items()}
        center = np.mean([*cells.values()], axis=0)  # (S, W)
        found = pool_seeds([self.estimate(cell - center) for cell in cells.values()], len(cells) - 1)
        mean = float(center.mean())
        moved = [at._replace(mean=at.mean + mean, low=at.low + mean, high=at.high + mean) for at in found]
        return dict(zip(cells, moved, strict=True))

    def deviations(self) -> Intervals:
        """Differences of losses from the mean of all curves at the same value of the key."""
        found = {}
        for x in self.shared:
            center = np.mean([curve.cells[x] for curve in self.curves], axis=0)  # (S, W)
            found |= {(curve.label, x): self.estimate(curve.cells[x] - center) for curve in self.curves}
        pooled = pool_seeds([*found.values()], (len(self.curves) - 1) * len(self.shared))
        return dict(zip(found, pooled, strict=True))


def write_curves(found: Curves, runs: int, notes: Sequence[str], folder: Path) -> str:
    """Write report.md, report.html and curves.png of so many runs into `folder`; returns what to print.

    Raises:
        ValueError: the folder has a report.md that is not one of runs.
        OSError: it cannot be written.
    """
    table, shares = build_table(found, found.intervals()), explain_variance(found)
    several = len(found.curves) > 1 and bool(found.shared)
    best = compare_pairs(found, list_best(found))
    equal = compare_pairs(found, list_means(found))
    remove_pictures(folder)
    save_figure(plot_curves(found), folder / "curves.png")
    noted = [*notes, *found.notes]
    blocks: list[Block] = [("h1", f"{runs} runs compared")]
    blocks += [("list", [f"**Note** {line}." for line in noted])] if noted else []
    blocks.append(("h2", f"Loss over {found.key}"))
    blocks.append(("picture", "curves.png", "Means over seeds, with the intervals of the tables."))
    blocks += [("table", *table), ("p", f"{TABLE} Seeds: {', '.join(map(str, found.seeds))}.")]
    blocks += [("p", shares)] if shares else []
    blocks += [("table", *build_table(found, found.deviations())), ("p", APART)] if several else []
    blocks += [("h2", "Each at its best"), ("table", *best), ("p", BEST if len(found.seeds) > 1 else ONE_SEED)]
    values = EQUAL.format(", ".join(f"{x:g}" for x in found.shared))
    blocks += [("h2", "At equal values"), ("table", *equal), ("p", values)] if several else []
    write_page([*blocks, ("p", PAIRS)], folder)
    lines = [text_table(*table), shares, "each at its best:", text_table(*best, left=3)]
    lines += ["at equal values, mean over them:", text_table(*equal, left=3)] if several else []
    lines += [f"note: {line}" for line in noted]
    return "\n".join(filter(None, lines))


def collect_curves(runs: Sequence[Run], key: str) -> Curves:
    """The curves of the runs that ended, by the seeds that all their cells have.

    Raises:
        ValueError: the key is unknown or no number, the runs have one value of it or are of several texts, or no seed
            is in all cells.
    """
    if KEYS.get(key, {}).get("type") not in ("integer", "number"):
        numbers = [name for name, of in KEYS.items() if of.get("type") in ("integer", "number")]
        raise ValueError(f"--over {key}: expected a key that is a number, such as {', '.join(numbers[:3])}")
    keys = [other for other in (*ARM_KEYS, *SETTING_KEYS, DTYPE) if other != key]
    ended, found = [run for run in runs if run.ended], defaultdict(lambda: defaultdict(dict))
    notes = [f"left out: {run.folder}: {run.progress}" for run in runs if run not in ended]
    for run in ended:
        found[run.values(keys)][run.value(key)][run.config.run.seed] = run
    values = sorted({x for cells in found.values() for x in cells})
    if len(values) < 2:
        raise ValueError(f"--over {key}: the runs that ended have {len(values)} value(s) of it; a curve needs two")
    check_same_text(ended, [-1])
    counts = [len(cell) for cells in found.values() for cell in cells.values()]
    seeds = sorted(set.intersection(*(set(cell) for cells in found.values() for cell in cells.values())))
    if not seeds:
        raise ValueError("no seed is in all cells; finish the sweep, or leave out the cells that lack seeds")
    if left := sum(counts) - len(seeds) * len(counts):
        notes.append(f"left out: {left} run(s) of seeds that other cells lack")
    varying, curves = [other for other in find_varying(found) if other != "model.router"], []
    for settings, cells in found.items():
        router = dict(settings)["model.router"]
        label = ", ".join([router, *name_values(settings, varying)])
        losses = {x: np.array([read_losses(cells[x][seed]) for seed in seeds]) for x in values if x in cells}
        curves.append(Curve(label, router, losses))
        if lacking := [f"{x:g}" for x in values if x not in cells]:
            notes.append(f"{label} has no run with {key} = {', '.join(lacking)}")
    order = {label: i for i, label in enumerate(dict.fromkeys(run.value("model.router") for run in ended))}
    documents = next((run.documents for run in ended if run.documents is not None), None)
    return Curves(key, sorted(curves, key=lambda curve: (order[curve.router], curve.label)), seeds, documents, notes)


def read_losses(run: Run) -> np.ndarray:
    """(W,) losses of the validation windows at the run's last step."""
    line = run.evaluations[run.config.train.max_steps]
    return np.asarray(line.get("val/window_losses", [line["val/loss"]]), dtype=np.float64)


def build_table(of: Curves, found: Intervals) -> Table:
    """A row for each value of the key, a column for each curve."""
    rows = []
    for x in sorted({x for _, x in found}):
        cells = [found.get((curve.label, x)) for curve in of.curves]
        means = [cell.mean for cell in cells if cell]
        sign = "+" if min(means) < 0 else ""
        words = [f"{cell.mean:{sign}.4f} ±{(cell.high - cell.low) / 2:.4f}" if cell else "" for cell in cells]
        rows.append([f"{x:g}", *words, f"{max(means) - min(means):.4f}"])
    return [of.key, *(curve.label for curve in of.curves), "spread"], rows


def explain_variance(of: Curves) -> str:
    """How much of the variance between cells lies between values of the key, and between curves; "" with gaps."""
    if len({tuple(curve.cells) for curve in of.curves}) > 1 or len(of.curves) < 2:
        return ""
    means = np.array([[cell.mean() for cell in curve.cells.values()] for curve in of.curves])  # (curves, X)
    over_key, over_curves = (means.mean(axis).var() / means.var() for axis in (0, 1))
    return SHARES.format(over_key, of.key, over_curves, 1 - over_key - over_curves)


def list_best(of: Curves) -> list[tuple[str, np.ndarray]]:
    """Each curve's label with its best values, and its losses (S, W) there."""
    found = []
    for curve in of.curves:
        losses, best = curve.at_best()
        found.append((f"{curve.label} at {'; '.join(f'{x:g}' for x in dict.fromkeys(best))}", losses))
    return found


def list_means(of: Curves) -> list[tuple[str, np.ndarray]]:
    """Each curve's label and its losses (S, W), means over the values that all curves have; [] if there are none."""
    shared = of.shared
    return [(curve.label, np.mean([curve.cells[x] for x in shared], 0)) for curve in of.curves if shared]


def compare_pairs(of: Curves, named: Sequence[tuple[str, np.ndarray]]) -> Table:
    """A row for each pair of (label, losses (S, W)), the better first."""
    named = sorted(named, key=lambda one: one[1].mean())
    pairs = [*combinations(named, 2)]
    estimates = pool_seeds([of.estimate(one[1] - other[1]) for one, other in pairs], len(named) - 1)
    corrected = correct_holm([found.p_value() for found in estimates]) if len(of.seeds) > 1 else []
    rows = []
    for i, (((label, losses), (other, _)), found) in enumerate(zip(pairs, estimates, strict=True)):
        verdict = found.decide("lower", "higher") if corrected else "one seed"
        holm = f"{corrected[i]:.2g}" if corrected else ""
        rows.append([label, other, verdict, f"{losses.mean():.4f}", str(found), holm])
    return ["curve", "against", "is", "loss", "difference", "Holm"], rows


def plot_curves(of: Curves) -> Figure:
    """A curve and its band for each, over octaves of the key, and minus the mean of all; a value of 0 has no place."""
    panels = [(LOSS, of.intervals())]
    if len(of.curves) > 1 and of.shared:
        panels.append(("loss minus the mean of all curves there", of.deviations()))
    looks, seen = {}, defaultdict(int)
    for curve in of.curves:
        face = ("full", "none", "left", "right", "top", "bottom")[seen[curve.router] % 6]
        looks[curve.label] = style(curve.router) | {"fillstyle": face, "markersize": 5}
        seen[curve.router] += 1
    drawn = []
    for words, found in panels:
        lines = {}
        for label, look in looks.items():
            points = {x: found[of_label, x][:3] for of_label, x in sorted(found) if of_label == label and x > 0}
            lines |= {label: (look, points)} if points else {}
        drawn.append((f"{of.key}, logarithmic", words, lines))
    figure = plot_lines(drawn)
    assert figure
    for axes, (*_, lines) in zip(figure.axes, drawn, strict=True):
        ticks = sorted({x for _, points in lines.values() for x in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    return figure
