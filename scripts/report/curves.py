"""Loss at the end against one swept key, with a curve for each of the other settings: `scripts.report --over KEY`."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from configure.schema import KEYS
from eval.intervals import Interval, correct_holm, estimate_interval
from eval.pages import Block, write_page
from eval.pictures import save_figure
from eval.style import style
from runtime.output import text_table
from scripts.report.page import remove_pictures
from scripts.report.pictures import LOSS, plot_lines
from scripts.report.runs import ARM_KEYS, DTYPE, SETTING_KEYS, Run, check_same_text, find_varying, name_values

TABLE = """\
Validation loss at the end, nats per token, mean over seeds; lower is better. ±: half of the 95% interval of its
difference from the mean of all cells, paired by seed and validation window, so that what they share (how hard the text
is) does not widen it. Spread: largest minus smallest of the row."""
SHARES = "Of the variance between cells {:.0%} lies between values of {}, {:.0%} between curves, {:.0%} in neither."
BEST = """\
Each curve at its best value of the key: for each seed the one that is best by the *other* seeds, so that a lucky run
does not choose itself."""
EQUAL = "Each curve as the mean over the values {}, which all have: what is left where the key is equal."
PAIRS = """\
Differences: first minus second with 95% intervals, paired by seed and window; seeds and documents are taken as
independent draws. Holm: the p-value corrected for the family of all rows of the table; at 0.05 or more the row is
undecided as one of its family."""
ONE_SEED = "Each curve at its best value of the key, chosen by the only seed: nothing is decided, all are flattered."
Table = tuple[list[str], list[list[str]]]


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

    def intervals(self) -> dict[tuple[str, Any], Interval]:
        """{(label, value of the key)}: mean loss, with the interval of its difference from the mean of all cells."""
        center = np.mean([cell for curve in self.curves for cell in curve.cells.values()], axis=0)  # (S, W)
        found = {}
        for curve in self.curves:
            for x, cell in curve.cells.items():
                at = self.estimate(cell - center)
                shift = float(center.mean())
                found[curve.label, x] = at._replace(mean=at.mean + shift, low=at.low + shift, high=at.high + shift)
        return found


def write_curves(found: Curves, runs: int, notes: Sequence[str], folder: Path) -> str:
    """Write report.md, report.html and curves.png of so many runs into `folder`; returns what to print.

    Raises:
        ValueError: the folder has a report.md that is not one of runs.
        OSError: it cannot be written.
    """
    table, shares = build_table(found), explain_variance(found)
    best = compare_pairs(found, list_best(found))
    means, shared = list_means(found)
    equal = compare_pairs(found, means)
    remove_pictures(folder)
    save_figure(plot_curves(found), folder / "curves.png")
    noted = [*notes, *found.notes]
    blocks: list[Block] = [("h1", f"{runs} runs compared")]
    blocks += [("list", [f"**Note** {line}." for line in noted])] if noted else []
    blocks.append(("h2", f"Loss over {found.key}"))
    blocks.append(("picture", "curves.png", "Mean over seeds, with the intervals of the table."))
    blocks += [("table", *table), ("p", f"{TABLE} Seeds: {', '.join(map(str, found.seeds))}.")]
    blocks += [("p", shares)] if shares else []
    blocks += [("h2", "Each at its best"), ("table", *best), ("p", BEST if len(found.seeds) > 1 else ONE_SEED)]
    values = EQUAL.format(", ".join(f"{x:g}" for x in shared))
    blocks += [("h2", "At equal values"), ("table", *equal), ("p", values)] if shared else []
    write_page([*blocks, ("p", PAIRS)], folder)
    lines = [text_table(*table), shares, "each at its best:", text_table(*best, left=3)]
    lines += ["at equal values, mean over them:", text_table(*equal, left=3)] if shared else []
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


def build_table(of: Curves) -> Table:
    """A row for each value of the key, a column for each curve."""
    found, rows = of.intervals(), []
    for x in sorted({x for _, x in found}):
        cells = [found.get((curve.label, x)) for curve in of.curves]
        means = [cell.mean for cell in cells if cell]
        words = [f"{cell.mean:.4f} ±{(cell.high - cell.low) / 2:.4f}" if cell else "" for cell in cells]
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


def list_means(of: Curves) -> tuple[list[tuple[str, np.ndarray]], list[Any]]:
    """Each curve's label and its losses (S, W), means over the values that all curves have; and those values."""
    shared = [x for x in of.curves[0].cells if all(x in curve.cells for curve in of.curves)]
    return [(curve.label, np.mean([curve.cells[x] for x in shared], 0)) for curve in of.curves if shared], shared


def compare_pairs(of: Curves, named: Sequence[tuple[str, np.ndarray]]) -> Table:
    """A row for each pair of (label, losses (S, W)), the better first."""
    named = sorted(named, key=lambda one: one[1].mean())
    pairs = [(*pair, of.estimate(pair[0][1] - pair[1][1])) for pair in combinations(named, 2)]
    corrected = correct_holm([found.p_value() for *_, found in pairs]) if len(of.seeds) > 1 else []
    rows = []
    for i, ((label, losses), (other, _), found) in enumerate(pairs):
        verdict = found.decide("lower", "higher") if corrected else "one seed"
        holm = f"{corrected[i]:.2g}" if corrected else ""
        rows.append([label, other, verdict, f"{losses.mean():.4f}", str(found), holm])
    return ["curve", "against", "is", "loss", "difference", "Holm"], rows


def plot_curves(of: Curves) -> Figure:
    """A curve and its band for each, over octaves of the key; a value of 0 has no place there."""
    found, lines, seen = of.intervals(), {}, defaultdict(int)
    for curve in of.curves:
        points = {x: found[curve.label, x][:3] for x in sorted(curve.cells) if x > 0}
        face = ("full", "none", "left", "right", "top", "bottom")[seen[curve.router] % 6]
        seen[curve.router] += 1
        if points:
            lines[curve.label] = style(curve.router) | {"fillstyle": face, "markersize": 5}, points
    figure = plot_lines([(f"{of.key}, logarithmic", LOSS, lines)])
    assert figure
    ticks = sorted({x for _, points in lines.values() for x in points})
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    return figure
