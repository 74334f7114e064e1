"""Loss at the end against one swept key, with a curve for each of the other settings: `scripts.report --over KEY`."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import ne
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from common.text import text_table
from configure.schema import KEYS
from eval.intervals import (
    Interval,
    correct_holm,
    correlate_seeds,
    count_independent,
    estimate_interval,
    pool_seeds,
)
from scripts.report.figures import save_figure
from scripts.report.page import remove_pictures
from scripts.report.pages import Block, write_page
from scripts.report.pictures import LOSS
from scripts.report.runs import Run, check_same_text, find_without_windows
from scripts.report.settings import ARM_KEYS, DTYPE, SETTING_KEYS, find_varying, name_values
from scripts.report.style import style

LOSSES = """\
Validation loss at the end, nats per token, mean over seeds; lower is better. ±: half of the 95% interval of its
difference from the mean of all cells, paired by seed and validation window, so that what they share (how hard the text
is) does not widen it."""
SEEDS = """\
Seeds {}. They are taken to move all cells of a table equally much: a cell's own two or three say little of that."""
SEED = "Seed {} alone: intervals are over documents, and another seed may turn any difference over."
SHARES = "Of the variance between cells {:.0%} lies between values of {}, {:.0%} between curves, {:.0%} in neither."
APART = "with half of its 95% interval, paired by seed and window."
ENDS = {  # of the last evaluation, means over seeds: key, title, what it is
    "val/gate_norm": (
        "Gate norm at the end",
        "√(E‖g‖²) on the validation windows, mean over layers and seeds: what training made of the initial norm.",
    ),
    "val/load_imbalance": (
        "Load imbalance at the end",
        "The busiest expert's load over the mean load on the validation windows, mean over layers and seeds; 1 is "
        "balanced.",
    ),
    "val/dead_experts": (
        "Dead experts at the end",
        "Experts, of all layers, that no token of the validation windows chose, mean over seeds.",
    ),
}
BEST = """\
Each curve at its best value of the key: for each seed the one that is best by the *other* seeds, so that a lucky run
does not choose itself."""
ONE_SEED = "Each curve at its best value of the key, chosen by the only seed: nothing is decided, all are flattered."
EQUAL = "Each curve as the mean over the values {}: what is left where the key is equal."
OVERALL = "Each router as the mean over those values and over all settings of the curves."
PAIRS = """\
Differences: first minus second with 95% intervals, paired by seed and window; seeds and documents are taken as
independent draws, seeds of one variance in a table. Curves are compared that differ in one thing. Holm: the p-value
corrected for the family of all rows of the table; at 0.05 or more the row is undecided as one of its family."""
FACES = ("full", "none", "left", "right", "top", "bottom")
Table = tuple[list[str], list[list[str]]]
Intervals = dict[tuple[str, Any], Interval]  # by a curve's label and a value of the key


class Curve(NamedTuple):
    """One router with its other settings: losses at the end, (S seeds, W windows) fp64, by values of the key."""

    names: tuple[Any, ...]  # the router, then values of the other keys in which curves differ
    settings: str  # those values as text
    cells: dict[Any, np.ndarray]
    ends: Mapping[str, Mapping[Any, float]] = MappingProxyType({})  # each of ENDS, by values of the key

    @property
    def label(self) -> str:
        """The router with its settings."""
        return ", ".join(filter(None, [self.names[0], self.settings]))

    def at_best(self) -> tuple[np.ndarray, list[Any]]:
        """Losses (S, W) with each seed at the value that is best by the other seeds, and those values."""
        values = list(self.cells)
        losses = np.array([cell.mean(1) for cell in self.cells.values()])  # (X, S)
        others = losses.sum(1, keepdims=True) - losses if losses.shape[1] > 1 else losses
        best = [values[i] for i in others.argmin(0)]
        return np.array([self.cells[x][seed] for seed, x in enumerate(best)]), best


class Candidate(NamedTuple):
    """What a table of pairs compares."""

    label: str
    names: tuple[Any, ...]  # as of a Curve
    losses: np.ndarray  # (S, W)


class Curves(NamedTuple):
    """All curves over a key, of the same seeds and windows; those of a router follow each other."""

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

    def pool(self, found: Sequence[Interval], independent: float) -> list[Interval]:
        """Intervals of cells by one variance of seeds; `independent` as of `pool_seeds`, if cells of a curve were."""
        losses = np.array([[curve.cells[x].mean(1) for x in self.shared] for curve in self.curves])
        alike = correlate_seeds(losses) if self.shared else 0.0
        along = sum(len(curve.cells) for curve in self.curves) / len(self.curves)  # Satterthwaite's, as in pairs
        return pool_seeds(found, independent / (1 + (along - 1) * alike**2))

    def intervals(self) -> Intervals:
        """Mean losses, with the intervals of their differences from the mean of all cells."""
        cells = {(curve.label, x): cell for curve in self.curves for x, cell in curve.cells.items()}
        center = np.mean([*cells.values()], axis=0)  # (S, W)
        found = self.pool([self.estimate(cell - center) for cell in cells.values()], len(cells) - 1)
        mean = float(center.mean())
        moved = [at._replace(mean=at.mean + mean, low=at.low + mean, high=at.high + mean) for at in found]
        return dict(zip(cells, moved, strict=True))

    def differences(self, baseline: str) -> dict[str, Intervals]:
        """What is subtracted from each curve, and what is left: the baseline's of its settings, its router's first."""
        curves, first = {(curve.names[0], curve.settings): curve for curve in self.curves}, self.curves[0].settings
        same = " of the same settings" * bool(first)
        bases = {
            f"minus {baseline}'s{same}": [(baseline, curve.settings) for curve in self.curves],
            f"minus the same router's with {first}": [(curve.names[0], first) for curve in self.curves],
        }
        found = {words: self._subtract([curves.get(name) for name in names]) for words, names in bases.items()}
        return {words: intervals for words, intervals in found.items() if intervals}

    def _subtract(self, bases: Sequence[Curve | None]) -> Intervals:
        """Each curve minus its base at equal values of the key."""
        pairs = [
            (curve, base, x)
            for curve, base in zip(self.curves, bases, strict=True)
            if base is not None and base is not curve
            for x in curve.cells
            if x in base.cells
        ]
        independent = count_independent(((curve.label, x), (base.label, x)) for curve, base, x in pairs)
        found = self.pool([self.estimate(curve.cells[x] - base.cells[x]) for curve, base, x in pairs], independent)
        return {(curve.label, x): at for (curve, _, x), at in zip(pairs, found, strict=True)}


def write_curves(of: Curves, baseline: str, runs: int, notes: Sequence[str], folder: Path) -> str:
    """Write report.md, report.html and curves.png of so many runs into `folder`; returns what to print.

    Raises:
        ValueError: the folder has a report.md that is not one of runs.
        OSError: it cannot be written.
    """
    sections = list_sections(of, baseline)
    remove_pictures(folder)
    save_figure(plot_curves(of, baseline), folder / "curves.png")
    noted, lines = [*notes, *of.notes], []
    blocks: list[Block] = [("h1", f"{runs} runs compared")]
    blocks += [("list", [f"**Note** {line}." for line in noted])] if noted else []
    blocks += [("h2", f"Loss over {of.key}"), ("picture", "curves.png", "Means over seeds, with 95% intervals.")]
    for title, table, words in sections:
        blocks += [("h2", title)] if title else []
        blocks += [("table", *table), ("p", words)]
        lines += [f"{title}:"] * bool(title) + [text_table(*table, left=3 if table[0][0] == "curve" else 1)]
    shares = explain_variance(of)
    blocks += [("p", shares)] if shares else []
    write_page([*blocks, ("p", PAIRS)], folder)
    return "\n".join([*lines, *filter(None, [shares]), *(f"note: {line}" for line in noted)])


def list_sections(of: Curves, baseline: str) -> list[tuple[str, Table, str]]:
    """The report's tables: title, table, and what it is."""
    values = ", ".join(f"{x:g}" for x in of.shared)
    seeds = (SEEDS if len(of.seeds) > 1 else SEED).format(", ".join(map(str, of.seeds)))
    sections = [("", build_table(of.key, of.intervals()), f"{LOSSES} {seeds}")]
    for words, found in of.differences(baseline).items():
        sections.append((f"Loss {words}", build_table(of.key, found, "+"), f"Loss {words}, {APART}"))
    for metric, (title, words) in ENDS.items():
        found = {(curve.label, x): end for curve in of.curves for x, end in curve.ends.get(metric, {}).items()}
        sections += [(title, build_table(of.key, found), words)] if found else []
    best = [Candidate(f"{curve.label} at {name_best(curve)}", curve.names, curve.at_best()[0]) for curve in of.curves]
    sections.append(("Each at its best", compare_pairs(of, best), BEST if len(of.seeds) > 1 else ONE_SEED))
    if len(of.curves) > 1 and of.shared:
        equal = list_means(of)
        sections.append(("At equal values, mean over them", compare_pairs(of, equal), EQUAL.format(values)))
        routers = average_routers(equal)
        if len(routers) > 1 and len(routers) < len(equal):
            sections.append(("Routers, mean over settings too", compare_pairs(of, routers), OVERALL))
    return [section for section in sections if section[1][1]]  # with rows


def collect_curves(runs: Sequence[Run], key: str) -> Curves:
    """The curves of the runs that ended, by the seeds that all their cells have.

    Raises:
        ValueError: the key is unknown or no number, the runs have one value of it or a negative one, or are of several
            texts, or no seed is in all cells.
    """
    if KEYS.get(key, {}).get("type") not in ("integer", "number"):
        numbers = [name for name, of in KEYS.items() if of.get("type") in ("integer", "number")]
        raise ValueError(f"--over {key}: expected a key that is a number, such as {', '.join(numbers[:3])}")
    ended, found = [run for run in runs if run.ended], defaultdict(lambda: defaultdict(dict))
    notes = [f"left out: {run.folder}: {run.progress}" for run in runs if run not in ended]
    keys = [other for other in (*ARM_KEYS, *SETTING_KEYS, DTYPE) if other != key]
    if tied := find_tied(ended, key):
        notes.append(f"with {key} also change{'s' * (len(tied) == 1)} {', '.join(tied)}")
    for run in ended:
        cell = found[run.values([other for other in keys if other not in tied])][run.value(key)]
        first = cell.setdefault(run.config.run.seed, run)
        if first is not run:
            notes.append(f"{run.folder} is left out: {first.folder} has the same settings and seed")
    values = sorted({x for cells in found.values() for x in cells})
    if len(values) < 2:
        raise ValueError(f"--over {key}: the runs that ended have {len(values)} value(s) of it; a curve needs two")
    if values[0] < 0:
        raise ValueError(f"--over {key}: {values[0]:g} has no place on a logarithmic axis; leave its runs out")
    check_same_text(ended, [-1])
    if lacking := find_without_windows(ended, -1):
        raise ValueError(lacking)
    if trunks := {run.config.train.branch_from for run in ended} - {""}:
        notes.append(f"branches share the steps of their trunk, so what a seed did to it: {', '.join(sorted(trunks))}")
    counts = [len(cell) for cells in found.values() for cell in cells.values()]
    seeds = sorted(set.intersection(*(set(cell) for cells in found.values() for cell in cells.values())))
    if not seeds:
        raise ValueError("no seed is in all cells; finish the sweep, or leave out the cells that lack seeds")
    varying, curves = [other for other in find_varying(found) if other != "model.router"], []
    routers = [*dict.fromkeys(run.value("model.router") for run in ended)]
    some = sorted({seed for cells in found.values() for cell in cells.values() for seed in cell})
    missing = []
    for settings, cells in found.items():
        curves.append(make_curve(settings, cells, seeds, varying))
        for x, cell in sorted(cells.items()):
            missing += [f"seed {seed} of {curves[-1].label} at {x:g}" for seed in some if seed not in cell]
        if lacking := [f"{x:g}" for x in values if x not in cells]:
            notes.append(f"{curves[-1].label} has no run with {key} = {', '.join(lacking)}")
    if left := sum(counts) - len(seeds) * len(counts):
        lacking = "; ".join(missing[:3]) + f"; {len(missing) - 3} more" * (len(missing) > 3)
        notes.append(f"left out: {left} run(s) of seeds that other cells lack: {lacking}")
    curves.sort(key=lambda curve: (routers.index(curve.names[0]), curve.names[1:]))
    documents = next((run.documents for run in ended if run.documents is not None), None)
    return Curves(key, curves, seeds, documents, notes)


def find_tied(runs: Sequence[Run], key: str) -> list[str]:
    """Settings with one value for each value of `key`, and several in all, such as the sizes of a larger model."""
    pairs = {other: {(run.value(key), run.value(other)) for run in runs} for other in SETTING_KEYS if other != key}
    count = len({run.value(key) for run in runs})
    return [other for other, of in pairs.items() if len(of) == count and len({value for _, value in of}) > 1]


def make_curve(
    settings: Sequence[tuple[str, Any]], cells: Mapping[Any, Mapping[int, Run]], seeds: list[int], varying: list[str]
) -> Curve:
    """The curve of {value of the key: {seed: run}}; its `varying` settings name it."""
    losses, ends = {}, defaultdict(dict)
    for x, runs in sorted(cells.items()):
        lines = [runs[seed].evaluations[runs[seed].config.train.max_steps] for seed in seeds]
        losses[x] = np.array([line.get("val/window_losses", [line["val/loss"]]) for line in lines], dtype=np.float64)
        for metric in ENDS:
            if all(metric in line for line in lines):
                ends[metric][x] = float(np.mean([line[metric] for line in lines]))
    of = dict(settings)
    return Curve((of["model.router"], *map(of.get, varying)), ", ".join(name_values(settings, varying)), losses, ends)


def build_table(key: str, found: Mapping[tuple[str, Any], Interval | float], sign: str = "") -> Table:
    """A row for each curve, a column for each value of the key; `sign` "+" of differences."""
    words = {at: f"{of:.4g}" if isinstance(of, float) else name_mean(of, sign) for at, of in found.items()}
    values, labels = sorted({x for _, x in words}), dict.fromkeys(label for label, _ in words)
    return [key, *(f"{x:g}" for x in values)], [
        [label, *(words.get((label, x), "") for x in values)] for label in labels
    ]


def name_mean(of: Interval, sign: str) -> str:
    """`1.8418 ±0.0120`; without ends, as of runs that recorded no losses of windows, the mean alone."""
    return f"{of.mean:{sign}.4f}" + ("" if math.isnan(of.low) else f" ±{(of.high - of.low) / 2:.4f}")


def explain_variance(of: Curves) -> str:
    """How much of the variance between cells lies between values of the key, and between curves; "" with gaps."""
    if len({tuple(curve.cells) for curve in of.curves}) > 1 or len(of.curves) < 2:
        return ""
    means = np.array([[cell.mean() for cell in curve.cells.values()] for curve in of.curves])  # (curves, X)
    over_key, over_curves = (means.mean(axis).var() / means.var() for axis in (0, 1))
    return SHARES.format(over_key, of.key, over_curves, 1 - over_key - over_curves)


def name_best(curve: Curve) -> str:
    """The values at which a curve's seeds are best."""
    return "; ".join(f"{x:g}" for x in dict.fromkeys(curve.at_best()[1]))


def list_means(of: Curves) -> list[Candidate]:
    """Each curve as the mean over the values that all curves have; [] if there are none."""
    shared = of.shared
    return [Candidate(c.label, c.names, np.mean([c.cells[x] for x in shared], 0)) for c in of.curves if shared]


def average_routers(found: Sequence[Candidate]) -> list[Candidate]:
    """Each router that has all settings, as the mean over them."""
    of_routers = defaultdict(dict)
    for one in found:
        of_routers[one.names[0]][one.names[1:]] = one.losses
    settings = {names for of in of_routers.values() for names in of}
    return [
        Candidate(router, (router,), np.mean([*of.values()], 0))
        for router, of in of_routers.items()
        if len(of) == len(settings)
    ]


def compare_pairs(of: Curves, found: Sequence[Candidate]) -> Table:
    """A row for each pair that differs in one thing, the better first."""
    found = sorted(found, key=lambda one: one.losses.mean())
    pairs = [pair for pair in combinations(found, 2) if sum(map(ne, *(one.names for one in pair))) == 1]
    independent = count_independent((one.label, other.label) for one, other in pairs)
    estimates = pool_seeds([of.estimate(one.losses - other.losses) for one, other in pairs], independent)
    corrected = correct_holm([at.p_value() for at in estimates]) if len(of.seeds) > 1 else []
    rows = []
    for i, ((one, other), at) in enumerate(zip(pairs, estimates, strict=True)):
        verdict = at.decide("lower", "higher") if corrected else "one seed"
        holm = f"{corrected[i]:.2g}" if corrected else ""
        rows.append([one.label, other.label, verdict, f"{one.losses.mean():.4f}", str(at), holm])
    return ["curve", "against", "is", "loss", "difference", "Holm"], rows


def plot_curves(of: Curves, baseline: str) -> Figure:
    """Curves with their intervals, and beside them what is left without others', over octaves of the key.

    Each setting of several routers has a row of panels. A value of 0 is drawn as far left of the smallest other as that
    is of the next, a tenth of it at least.
    """
    settings = dict.fromkeys(curve.settings for curve in sorted(of.curves, key=lambda curve: curve.names[1:]))
    rows = {name: [curve for curve in of.curves if curve.settings == name] for name in settings}
    if one_router := len({curve.names[0] for curve in of.curves}) == 1:
        rows = {"": of.curves}
    columns = {LOSS: of.intervals()} | {f"loss {words}": found for words, found in of.differences(baseline).items()}
    positive = [*sorted({x for curve in of.curves for x in curve.cells if x > 0}), math.inf][:2]
    left = positive[0] / min(positive[1] / positive[0], 10)  # where 0 is drawn
    ticks = sorted({x or left for curve in of.curves for x in curve.cells})
    figure, entries = Figure((1 + 4 * len(columns), 1.2 + 2.6 * max(len(rows), 1.3)), layout="constrained"), {}
    grid = figure.subplots(len(rows), len(columns), sharex=True, sharey="col", squeeze=False)
    for row, (setting, curves) in enumerate(rows.items()):
        grid[row, 0].set_ylabel(fill(setting, 35))
        for axes, (words, found) in zip(grid[row], columns.items(), strict=True):
            for i, curve in enumerate(curves):
                look = style(curve.names[0]) | {"fillstyle": FACES[i % len(FACES)] if one_router else "full"}
                points = {x or left: found[curve.label, x] for x in curve.cells if (curve.label, x) in found}
                if not points:
                    continue
                means, lows, highs = ([at[end] for at in points.values()] for end in range(3))
                (line,) = axes.plot([*points], means, markersize=5, **look)
                axes.fill_between([*points], lows, highs, color=look["color"], alpha=0.12, linewidth=0)
                entries.setdefault(curve.label if one_router else curve.names[0], line)
            if not axes.has_data():
                axes.text(0.5, 0.5, "the reference, or none", transform=axes.transAxes, ha="center")
            axes.grid(alpha=0.3)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{0 if tick == left else tick:g}" for tick in ticks])
            if words != LOSS:
                axes.axhline(0, color="black", linewidth=0.8)
            if not row:
                axes.set_title(fill(words, 56), fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel(f"{of.key}, logarithmic")
    across = max(1, int(figure.get_figwidth() / (0.8 + 0.1 * max(map(len, entries)))))  # inches
    figure.set_figheight(figure.get_figheight() + 0.2 * len(entries) / across)
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=min(across, len(entries)))
    return figure
