"""The best learning rate of each shape, optimizer and transfer, as for the studies muon and mup.

    python -m studies.best_rates runs/muon-*
    python -m studies.best_rates runs/mup-* runs/mup_wide-* --picture best-rates.png

A best rate is the vertex of the least-squares parabola over log2(rate), through the mean losses at
rates within a factor of 2 of the lowest. Neither it nor its interval goes beyond the rates tried.
The 95% interval is a bootstrap: what remains of losses without the means of rates and of seeds is
drawn again. The first line with a transfer and an optimizer is the reference of the others with
both. The difference of two optimizers of one model is paired by seed, each at its own best rate.
"""

import math
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy.special import ndtri, stdtrit

from common.text import plural
from report.__main__ import make_report_parser
from report.blocks import Table
from report.comparisons import Difference, estimate_difference
from report.groups import Group, Variant
from report.run import Run, join_labels
from studies.command import print_tables, read_with_notes

KEY = "optim.lr"
CONFIGS = Path(__file__).with_name("config")
N_DRAW = 1000
LEVEL = 0.975  # upper end of a 95% interval


class Curve(NamedTuple):
    """Losses over rates, by the seeds that have a run at each rate."""

    label: str
    run: Run  # one of them, for its shape
    seeds: list[int]
    rates: np.ndarray  # (R,) ascending
    losses: np.ndarray  # (R, S), nats per token

    @property
    def optimizer(self) -> str:
        return self.run.config.optim.name

    @property
    def transfer(self) -> str:
        return self.run.config.optim.transfer

    @property
    def means(self) -> np.ndarray:
        """(R,) losses over seeds."""
        return self.losses.mean(axis=1)


class Best(NamedTuple):
    """The minimum of a curve."""

    rate: float
    low: float  # 95% interval of the rate; NaN with one seed
    high: float
    losses: np.ndarray  # (S,) of the seeds' own parabolas at that rate


def tabulate(argv: Sequence[str]) -> list[Table]:
    """Best rates and, with two optimizers, their difference."""
    curves, picture = read_curves(argv)
    if picture:
        plot_curves(curves).savefig(picture)
    tables = [tabulate_rates(curves)]
    differences = tabulate_optimizers(curves)
    if differences.rows:
        tables.append(differences)
    return tables


def read_curves(argv: Sequence[str]) -> tuple[list[Curve], Path | None]:
    """The curves of the runs that the command's arguments name, and its picture's file.

    Notes on stderr say which runs are missing.

    Raises:
        ValueError: no seed has a run at each rate of a curve.
    """
    parser = make_report_parser("studies.best_rates", __doc__)
    parser.set_defaults(over=KEY)
    parser.add_argument("--picture", type=Path, help="a PNG file to write")
    args = parser.parse_args(argv)
    report = read_with_notes(args)
    curves = []
    for group in report.groups:
        for variant in group.variants:
            curves.append(make_curve(group, variant, len(group.variants)))
    count_missing(report.runs)
    return sorted(curves, key=order_curve), args.picture


def order_curve(curve: Curve) -> tuple:
    """A sort key: narrow shapes first, and of these many experts."""
    model = curve.run.config.model
    shape = (model.n_embd, model.n_layer, -model.n_expert, -model.top_k)
    return curve.transfer, curve.optimizer, *shape


def make_curve(group: Group, variant: Variant, n_variant: int) -> Curve:
    """The curve of a variant of a group."""
    rates = variant.xs
    seeds = sorted(set.intersection(*(set(variant.runs_at(rate)) for rate in rates)))
    own_label = variant.label if n_variant > 1 or not group.label else ""
    label = join_labels([group.label, own_label])
    if not seeds:
        raise ValueError(f"{label}: no seed has a run at each rate; train the others first")
    losses = np.zeros((len(rates), len(seeds)))
    for row, rate in zip(losses, rates, strict=True):
        row[:] = [group.loss(variant.runs[rate, seed]) for seed in seeds]
    return Curve(label, variant.first_run, seeds, np.array(rates), losses)


def count_missing(runs: Sequence[Run]) -> None:
    """Print how many runs of the studies' config files have not finished."""
    finished = Counter(run.config.log.group for run in runs if run.is_finished)
    for study in dict.fromkeys(run.config.log.group for run in runs):
        file = CONFIGS / f"{study}.toml"
        if file.exists():
            axes = tomllib.loads(file.read_text())["sweep"]
            planned = math.prod(len(rows) for rows in axes.values())
            missing = planned - finished[study]
            if missing:
                print(
                    f"note: {missing} of {plural(planned, 'run')} of {file.name} are missing",
                    file=sys.stderr,
                )


def find_best(curve: Curve) -> Best | None:
    """The minimum of a curve; None if the lowest loss is at an end of the rates tried."""
    lowest = int(np.argmin(curve.means))
    if lowest in (0, len(curve.rates) - 1):
        return None
    logs = np.log2(curve.rates)
    near = np.abs(logs - logs[lowest]) < 1.05  # an octave; grids are rounded
    centred = logs[near] - logs[lowest]
    losses = curve.losses[near]
    parabola = np.polyfit(centred, losses.mean(axis=1), 2)
    vertex = find_vertices(parabola[:, None])[0]
    if not centred[0] < vertex < centred[-1]:
        return None
    by_seed = np.polyfit(centred, losses, 2)  # (3, S)
    at_vertex = np.array([vertex**2, vertex, 1.0]) @ by_seed
    low, high = draw_interval(centred, losses, parabola)
    first, last = logs[[0, -1]] - logs[lowest]
    ends = np.clip([low, high], first, last)
    rate, low, high = (curve.rates[lowest] * 2.0 ** np.array([vertex, *ends])).tolist()
    return Best(rate, low, high, at_vertex)


def find_vertices(parabolas: np.ndarray) -> np.ndarray:
    """(n,) places of the minima of parabolas (3, n); NaN without one."""
    square, linear, _ = parabolas
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(square > 0, -linear / (2 * square), np.nan)


def draw_interval(x: np.ndarray, losses: np.ndarray, parabola: np.ndarray) -> tuple[float, float]:
    """The 95% interval of a parabola's vertex; NaN with one seed.

    A draw without a minimum counts as far below and far above.

    Args:
        x: (R,) log2 of the rates.
        losses: (R, S).
        parabola: (3,) the fit to their means.
    """
    n_rate, n_seed = losses.shape
    freedom = (n_rate - 1) * (n_seed - 1)
    if not freedom:
        return math.nan, math.nan
    effects = losses - losses.mean(axis=1, keepdims=True)
    residuals = effects - effects.mean(axis=0)
    # as scripts.fit: too small by the lost degrees of freedom, and their size is uncertain
    scale = math.sqrt(losses.size / freedom) * stdtrit(freedom, LEVEL) / ndtri(LEVEL)
    random = np.random.default_rng(0)
    drawn = random.choice(scale * residuals.ravel(), (N_DRAW, n_seed, n_rate)).mean(axis=1)
    curves = np.polyval(parabola, x) + drawn  # (draws, R)
    vertices = find_vertices(np.polyfit(x, curves.T, 2))
    far = 100.0  # octaves
    low = np.quantile(np.nan_to_num(vertices, nan=-far), 1 - LEVEL, method="weibull")
    high = np.quantile(np.nan_to_num(vertices, nan=far), LEVEL, method="weibull")
    return float(low), float(high)


def describe_rate(curve: Curve, best: Best | None) -> str:
    """The best rate with its interval, or at which end of the rates it is."""
    if best is None:
        lowest = int(np.argmin(curve.means))
        rate = f"{curve.rates[lowest]:.2g}"
        if lowest == 0:
            return f"{rate} or below: the lowest tried"
        if lowest == len(curve.rates) - 1:
            return f"{rate} or above: the highest tried"
        return f"near {rate}: no parabola"
    if math.isnan(best.low):
        return f"{best.rate:.3g}"
    return f"{best.rate:.3g} [{best.low:.3g}, {best.high:.3g}]"


def tabulate_rates(curves: Sequence[Curve]) -> Table:
    """A row for each curve."""
    table = Table(
        ["runs", "optimizer", "transfer", "seeds", "best rate, 95%", "loss at it"]
        + ["over the first's rate", "more loss at the first's rate"]
    )
    references: dict[tuple[str, str], Best | None] = {}
    for curve in curves:
        best = find_best(curve)
        row = {
            "runs": f"**{curve.label}**",
            "optimizer": curve.optimizer,
            "transfer": curve.transfer,
            "seeds": str(curve.losses.shape[1]),
            "best rate, 95%": describe_rate(curve, best),
        }
        if best is not None:
            row["loss at it"] = f"{best.losses.mean():.4f}"
        is_first = (curve.transfer, curve.optimizer) not in references
        reference = references.setdefault((curve.transfer, curve.optimizer), best)
        if reference is not None and not is_first:
            if best is not None:
                row["over the first's rate"] = f"{best.rate / reference.rate:.2f}"
            nearest = np.argmin(np.abs(np.log(curve.rates / reference.rate)))
            excess = curve.means[nearest] / curve.means.min() - 1
            row["more loss at the first's rate"] = f"{excess:.2%}"
        table.rows.append(row)
    return table


def tabulate_optimizers(curves: Sequence[Curve]) -> Table:
    """Differences of optimizers of one model."""
    column = "first minus second, each at its best rate"
    table = Table(["first", "second", column, "seeds"])
    for first, second in combinations(curves, 2):
        same_model = first.run.config.model == second.run.config.model
        if not same_model or first.transfer != second.transfer:
            continue
        difference = compare_best(first, second)
        if difference is not None:
            row = {"first": f"**{first.label}**", "second": f"**{second.label}**"}
            table.rows.append({**row, column: str(difference), "seeds": str(difference.seeds)})
    return table


def compare_best(left: Curve, right: Curve) -> Difference | None:
    """The difference at the best rates, over the seeds of both; None if one has no minimum."""
    left_best = find_best(left)
    right_best = find_best(right)
    seeds = sorted(set(left.seeds) & set(right.seeds))
    if left_best is None or right_best is None or not seeds:
        return None
    differences = []
    for seed in seeds:
        left_loss = left_best.losses[left.seeds.index(seed)]
        differences.append(left_loss - right_best.losses[right.seeds.index(seed)])
    return estimate_difference(differences)


def plot(argv: Sequence[str]) -> Figure:
    """Loss over rate, a panel for each transfer, with the best rates marked."""
    curves, _ = read_curves(argv)
    return plot_curves(curves)


def name_shape(curve: Curve) -> str:
    """The curve's label without the transfer, which is its panel's title."""
    return curve.label.removesuffix(f", transfer {curve.transfer}")


def plot_curves(curves: Sequence[Curve]) -> Figure:
    """As Figure 1 of arXiv 2203.03466."""
    transfers = list(dict.fromkeys(curve.transfer for curve in curves))
    figure = Figure((1 + 5 * len(transfers), 4.5), layout="constrained")
    panels = figure.subplots(1, len(transfers), sharey=True, squeeze=False)[0]
    shapes = list(dict.fromkeys(name_shape(curve) for curve in curves))
    colours = colormaps["viridis"](np.linspace(0, 0.85, len(shapes)))
    for axes, transfer in zip(panels, transfers, strict=True):
        for curve in curves:
            if curve.transfer != transfer:
                continue
            shape = name_shape(curve)
            colour = colours[shapes.index(shape)]
            axes.plot(curve.rates, curve.means, "o-", markersize=3, color=colour, label=shape)
            best = find_best(curve)
            if best is not None:
                axes.plot(best.rate, best.losses.mean(), "*", markersize=12, color=colour)
        axes.set_title(f'transfer = "{transfer}"')
        axes.set_xscale("log", base=2)
        axes.set_xlabel("learning rate")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    panels[0].set_ylabel(f"validation loss, {curves[0].run.unit}")
    return figure


if __name__ == "__main__":
    print_tables(tabulate)
