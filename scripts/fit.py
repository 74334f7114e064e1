"""Fit L = L∞ + A · C^-α to the runs of a ladder: final validation loss over FLOPs.

    python -m scripts.fit runs/2x64-* runs/3x96-* runs/4x128-* runs/6x192-* --picture ladder.png

The runs differ in size, length and seed alone: four budgets at least, two of them with a second
seed. C is counted as scripts.plan does. The fit is by least squares, with 95% intervals by a
bootstrap: the seeds' deviations from the mean of their budget are drawn again, from those of all
budgets. A curve that misses the means by more than the seeds explain is reported.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import fdtrc, ndtri, stdtrit

from common.command import build_parser, command, require_packages, run_command
from report.blocks import Table
from report.frame import OPTION_KEYS
from report.labels import find_text_mismatch, name_unit
from runtime.memory import flops_per_token
from runtime.runs import Run, read_runs
from scripts.plan import count_tokens

MIN_BUDGETS = 4  # one more than parameters, to see a misfit
EXPONENTS = (0.01, 2.0)  # α is searched here; an interval that reaches an end decides nothing
N_DRAW = 1000
LEVEL = 0.975  # upper end of a 95% interval
QUANTILES = "weibull"  # numpy's default makes intervals of few draws too narrow
FIXED_KEYS = ["model.router", "optim.name", "optim.transfer", "optim.schedule", *OPTION_KEYS]


class Law(NamedTuple):
    """loss = floor + reducible · (C / centre)^-exponent."""

    floor: float  # L∞
    reducible: float  # the loss above it at the centre
    exponent: float  # α


class Ladder(NamedTuple):
    """Budgets, ascending, with the losses of their seeds."""

    flops: np.ndarray  # (budgets,)
    losses: list[np.ndarray]  # of each budget, (seeds,)

    @property
    def centre(self) -> float:
        """Geometric mean of the budgets."""
        return math.exp(np.log(self.flops).mean())

    @property
    def counts(self) -> np.ndarray:
        """(budgets,) number of seeds."""
        return np.array([len(losses) for losses in self.losses])

    @property
    def means(self) -> np.ndarray:
        """(budgets,) mean losses."""
        return np.array([losses.mean() for losses in self.losses])

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the seeds' deviations."""
        return int((self.counts - 1).sum())


class Fit(NamedTuple):
    """The law of a ladder and those of its bootstrap."""

    ladder: Ladder
    law: Law
    draws: list[Law]

    def find_interval(self, values: Sequence[float]) -> tuple[float, float]:
        """The 95% interval of a quantity with these values in the draws."""
        low, high = np.quantile(values, [1 - LEVEL, LEVEL], method=QUANTILES)
        return float(low), float(high)

    def predict(self, flops: np.ndarray) -> np.ndarray:
        """(3, …) the loss at budgets: the law's, low and high end of its interval."""
        ratios = flops / self.ladder.centre
        drawn = [evaluate(law, ratios) for law in self.draws]
        ends = np.quantile(drawn, [1 - LEVEL, LEVEL], axis=0, method=QUANTILES)
        return np.stack([evaluate(self.law, ratios), *ends])


def evaluate(law: Law, ratios: np.ndarray) -> np.ndarray:
    """The losses of a law at budgets over the centre."""
    return law.floor + law.reducible * ratios**-law.exponent


def read_ladder(runs: Sequence[Run]) -> Ladder:
    """Sort finished runs by FLOPs.

    Raises:
        ValueError: they are not runs of one ladder, or too few.
    """
    check_runs(runs)
    by_flops: dict[float, dict[int, Run]] = {}
    for run in runs:
        flops = float(count_tokens(run.config) * flops_per_token(run.config.model))
        of_budget = by_flops.setdefault(flops, {})
        first = of_budget.setdefault(run.seed, run)
        if first is not run:
            raise ValueError(
                f"{first.path} and {run.path}: both spend {flops:.3g} FLOPs with seed "
                f"{run.seed}, and a ladder has one setting for a budget; leave one out"
            )
    losses = []
    for _, of_budget in sorted(by_flops.items()):
        finals = [run.evaluations[run.max_steps]["val/loss"] for run in of_budget.values()]
        losses.append(np.array(finals))
    ladder = Ladder(np.array(sorted(by_flops)), losses)
    if len(losses) < MIN_BUDGETS:
        raise ValueError(
            f"too few: {len(losses)} budget(s), and a law with three parameters needs "
            f"{MIN_BUDGETS}; train more rungs of config/ladder"
        )
    if ladder.freedom < 2:
        raise ValueError(
            "too few: intervals need the differences between seeds, and the runs have "
            f"{len(runs)} seeds at {len(losses)} budgets; train two budgets with a second seed "
            "(--run.seed=1)"
        )
    return ladder


def check_runs(runs: Sequence[Run]) -> None:
    """Raise ValueError if runs cannot be points of one law."""
    for run in runs:
        if not run.is_finished:
            raise ValueError(
                f"{run.path}: {run.progress}; a law is of finished runs: continue it with "
                "train.py, or leave it out"
            )
        if run.config.train.init_from:
            raise ValueError(
                f"{run.path}: train.init_from = {run.config.train.init_from}, whose FLOPs are "
                "not known; leave it out"
            )
    mismatch = find_text_mismatch(runs)
    if mismatch:
        raise ValueError(mismatch)
    for key in FIXED_KEYS:
        for run in runs:
            if run.value(key) != runs[0].value(key):
                raise ValueError(
                    f"{runs[0].path} and {run.path}: {key} is {runs[0].value(key)} and "
                    f"{run.value(key)}; runs of a ladder differ in size, length and seed alone: "
                    "fit each alone"
                )


def regress(exponent: float, logs: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> Law:
    """The law of an exponent by weighted least squares, which is linear in the other two."""
    powers = np.exp(-exponent * logs)
    deviations = powers - weights @ powers
    products = weights * deviations
    reducible = products @ losses / (products @ deviations)
    floor = weights @ (losses - reducible * powers)
    return Law(float(floor), float(reducible), exponent)


def fit_law(logs: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> Law:
    """The law with the least weighted squares, its exponent within EXPONENTS.

    Args:
        logs: (budgets,) of budgets over the centre.
        losses: (budgets,) means over seeds.
        weights: (budgets,) that sum to 1.
    """

    def measure_misfit(log_exponent: float) -> float:
        law = regress(math.exp(log_exponent), logs, losses, weights)
        residuals = losses - evaluate(law, np.exp(logs))
        return float(weights @ residuals**2)

    bounds = (math.log(EXPONENTS[0]), math.log(EXPONENTS[1]))
    found = minimize_scalar(
        measure_misfit, bounds=bounds, method="bounded", options={"xatol": 1e-4}
    )
    return regress(math.exp(found.x), logs, losses, weights)


def fit_ladder(ladder: Ladder, n_draw: int = N_DRAW) -> Fit:
    """Fit the law, and again with drawn deviations of seeds.

    Deviations from a mean are smaller than those from the truth by √(1 - 1/seeds), and few of them
    tell their size badly: both are corrected, the second by Student's t over the normal quantile.
    """
    logs = np.log(ladder.flops / ladder.centre)
    weights = ladder.counts / ladder.counts.sum()
    law = fit_law(logs, ladder.means, weights)
    deviations = []
    for losses in ladder.losses:
        n_seed = len(losses)
        if n_seed > 1:
            deviations += list((losses - losses.mean()) * math.sqrt(n_seed / (n_seed - 1)))
    pool = np.array(deviations) * (stdtrit(ladder.freedom, LEVEL) / ndtri(LEVEL))
    random = np.random.default_rng(0)
    fitted = evaluate(law, np.exp(logs))
    draws = []
    for _ in range(n_draw):
        noise = [random.choice(pool, count).mean() for count in ladder.counts]
        draws.append(fit_law(logs, fitted + noise, weights))
    return Fit(ladder, law, draws)


def check_fit(fit: Fit) -> None:
    """Raise ValueError if the runs do not decide the law."""
    low, high = fit.find_interval([law.exponent for law in fit.draws])
    floor_low, floor_high = fit.find_interval([law.floor for law in fit.draws])
    if low < 1.01 * EXPONENTS[0] or high > 0.99 * EXPONENTS[1] or floor_low < 0:
        raise ValueError(
            f"too few: the runs allow any α from {low:.2f} to {high:.2f} and any L∞ from "
            f"{floor_low:.2f} to {floor_high:.2f}; train more seeds, or rungs further apart"
        )


def find_misfit(fit: Fit) -> float:
    """The p-value of budgets that differ from the law by seeds alone: an F-test."""
    ladder = fit.ladder
    residuals = ladder.means - evaluate(fit.law, ladder.flops / ladder.centre)
    freedom = len(ladder.flops) - len(Law._fields)
    between = ladder.counts @ residuals**2 / freedom
    squares = [((losses - losses.mean()) ** 2).sum() for losses in ladder.losses]
    within = sum(squares) / ladder.freedom
    return float(fdtrc(freedom, ladder.freedom, between / within))


def tabulate(fit: Fit) -> Table:
    """The three parameters with their intervals."""
    table = Table(["parameter", "value", "95%"])
    names = ("L∞", f"A · C^-α at {fit.ladder.centre:.2e} FLOPs", "α")
    for name, value, values in zip(names, fit.law, zip(*fit.draws, strict=True), strict=True):
        low, high = fit.find_interval(values)
        row = {"parameter": name, "value": f"{value:.4f}", "95%": f"[{low:.4f}, {high:.4f}]"}
        table.rows.append(row)
    return table


def describe(fit: Fit, unit: str) -> str:
    """The law in words."""
    largest = fit.ladder.flops[-1]
    loss, low, high = fit.predict(np.array(10 * largest))
    floor_low, floor_high = fit.find_interval([law.floor for law in fit.draws])
    text = (
        f"If the law holds beyond the runs, ten times the FLOPs of the largest budget "
        f"({10 * largest:.2e}) give a loss of {loss:.3f} [{low:.3f}, {high:.3f}] {unit}, and no "
        f"budget gives less than {fit.law.floor:.3f} [{floor_low:.3f}, {floor_high:.3f}]."
    )
    p_value = find_misfit(fit)
    if p_value < 0.05:
        text += (
            f" The runs miss the curve by more than their seeds explain (p = {p_value:.2g}): the "
            "intervals are too narrow."
        )
    return text


def draw(fit: Fit, unit: str, file: Path) -> None:
    """The runs, the law and its band, up to ten times the largest budget."""
    from report.plots import DISTINCT, make_figure

    ladder = fit.ladder
    figure, (axes,) = make_figure(size=(7, 4.5))
    flops = np.geomspace(ladder.flops[0], 10 * ladder.flops[-1], 100)
    loss, low, high = fit.predict(flops)
    axes.fill_between(flops, low, high, color=DISTINCT[0], alpha=0.2, linewidth=0, label="95%")
    formula = f"{fit.law.floor:.3f} + A · C^-{fit.law.exponent:.3f}"
    axes.plot(flops, loss, color=DISTINCT[0], label=formula)
    for budget, losses in zip(ladder.flops, ladder.losses, strict=True):
        axes.plot([budget] * len(losses), losses, "o", color=DISTINCT[1], markersize=4)
    axes.axvline(ladder.flops[-1], color="grey", linestyle=":", label="largest budget trained")
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs")
    axes.set_ylabel(f"validation loss, {unit}")
    axes.legend()
    figure.savefig(file)


@command
def main(argv: Sequence[str]) -> None:
    """Print the law of some runs."""
    parser = build_parser("scripts.fit", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or above them")
    parser.add_argument("--picture", type=Path, help="a PNG file to write")
    args = parser.parse_args(argv)
    if args.picture:
        require_packages("matplotlib")
    runs, left_out = read_runs(args.runs)
    if left_out:
        raise ValueError(left_out[0].removeprefix("left out: "))
    ladder = read_ladder(runs)
    fit = fit_ladder(ladder)
    check_fit(fit)
    print(f"{tabulate(fit).to_text()}\n\n{describe(fit, name_unit(runs[0]))}")
    if args.picture:
        draw(fit, name_unit(runs[0]), args.picture)
        print(f"wrote {args.picture}")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
