"""Which of two arms of a setting has the lower loss: differences, their intervals by Student's t, and verdicts.

All pairs of a setting are one family (`judge_family`), in one table. text.toml tells a reader what
the verdicts mean. Needs scipy.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from common.text import plural
from report.settings import Arm, Setting, label_value

CONFIDENCE = 0.95
MIN_SEEDS = 3  # with two, one degree of freedom, the quantile of t is 12.7
LOWER, HIGHER, EQUIVALENT, UNDECIDED = "lower", "higher", "equivalent", "undecided"


@dataclass(frozen=True)
class Difference:
    """A mean difference in nats per token, with its standard error by Student's t.

    `over` says what was taken as independent draws: "seeds" or "documents". Without an interval
    (few seeds, documents not recorded) `error` is NaN and `over` is empty. `judge_family` sets the
    verdict and `p`, the p-value of no difference by Holm's correction.
    """

    mean: float
    seeds: int
    error: float = math.nan
    freedom: float = math.nan
    over: str = ""
    verdict: str = UNDECIDED
    p: float = math.nan

    @property
    def half_width(self) -> float:
        """Half the length of the 95% interval; NaN without one."""
        return float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * self.error

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def p_value(self) -> float:
        """Two-sided p-value of no difference between routers; NaN unless it is over seeds."""
        return 2 * self._tail(abs(self.mean))

    def p_equivalent(self, margin: float) -> float:
        """p-value of a true difference beyond ±`margin`: the larger of two one-sided t-tests; NaN unless over seeds.

        Source: Schuirmann, A comparison of the two one-sided tests procedure, 1987.
        """
        return self._tail(margin - abs(self.mean))

    def _tail(self, distance: float) -> float:
        """P(T > distance / error)."""
        if self.over != "seeds":
            return math.nan
        if self.error == 0:
            return 0.5 if distance == 0 else float(distance < 0)
        return float(stdtr(self.freedom, -distance / self.error))

    def __str__(self) -> str:
        interval = "" if math.isnan(self.error) else f" [{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.mean:+.4f}{interval}"


def estimate_difference(
    losses: Sequence[float] | np.ndarray,
    windows: np.ndarray | None = None,
    documents: np.ndarray | None = None,
) -> Difference:
    """Mean of paired differences with its interval: over seeds, or over documents with fewer than MIN_SEEDS of them.

    Args:
        losses: (S,) differences of the seeds' losses, nats per token.
        windows: (W,) differences of the validation windows' losses, means over the seeds; None: not
            logged.
        documents: (W,) equal numbers for windows of one document; None: not known.
    """
    losses = np.asarray(losses, np.float64)
    seeds, mean = len(losses), float(losses.mean())
    if seeds >= MIN_SEEDS:
        return Difference(
            mean, seeds, float(losses.std(ddof=1)) / math.sqrt(seeds), seeds - 1.0, "seeds"
        )
    if windows is None or documents is None or len(np.unique(documents)) < 2:
        return Difference(mean, seeds)
    return Difference(mean, seeds, *cluster_error(windows, documents), "documents")


def cluster_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """Standard error of the mean of values that are independent between clusters alone, and its degrees of freedom.

    The variance is Σ_g (Σ_{w in g} (x_w - mean))² / (1 - n_g/W) / W² (CR2: Bell and McCaffrey
    2002). The degrees of freedom are Satterthwaite's for clusters whose values are all alike, (Σ
    n_g²)² / Σ n_g⁴ - 1 and 1 at least, so where a few clusters hold most values, those few count.

    Args:
        values: (W,).
        clusters: (W,) equal numbers for values of one cluster; two clusters at least.
    """
    labels = np.unique(clusters, return_inverse=True)[1]
    sizes = np.bincount(labels)
    sums = np.bincount(labels, values - values.mean())
    variance = (sums**2 / (1 - sizes / len(values))).sum() / len(values) ** 2
    weights = sizes.astype(np.float64) ** 2
    return math.sqrt(variance), max(1.0, float(weights.sum() ** 2 / (weights**2).sum() - 1))


def correct_holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being a family: at most 5% of families have a false one below 0.05.

    NaN are no members.

    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979.
    """
    tested = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[i] = largest
    return corrected


def judge_family(differences: Sequence[Difference], margin: float = 0.0) -> list[Difference]:
    """The differences of a family, first minus second, with their verdicts and Holm's p-values.

    At most 5% of families hold a false "lower" or "higher", and at most 5% a false "equivalent".

    Args:
        differences: the family, such as a table's column of pairs. An infinite one, of a run that
            diverged, is higher.
        margin: of equivalence, nats per token: the smallest difference that matters. A difference
            that is decided to lie within it is "equivalent" even where its sign is decided too. 0:
            nothing is.
    """
    different = correct_holm([difference.p_value() for difference in differences])
    equivalent = correct_holm([difference.p_equivalent(margin) for difference in differences])
    judged = []
    for difference, p, p_equivalent in zip(differences, different, equivalent, strict=True):
        verdict = UNDECIDED
        if p_equivalent < 1 - CONFIDENCE:
            verdict = EQUIVALENT
        elif p < 1 - CONFIDENCE or difference.mean == math.inf:
            verdict = LOWER if difference.mean < 0 else HIGHER
        elif difference.seeds < MIN_SEEDS:
            verdict = f"{UNDECIDED} ({plural(difference.seeds, 'seed')})"
        judged.append(replace(difference, verdict=verdict, p=p))
    return judged


class Comparison(NamedTuple):
    """The difference of two arms, left minus right, with its verdict."""

    left: Arm
    right: Arm
    difference: Difference


def estimate(
    setting: Setting,
    left: Arm,
    right: Arm,
    step: int | None = None,
    xs: Sequence[Any] | None = None,
) -> Difference | None:
    """Left minus right at a step (None: the end), as the mean over the values of the key, or those of `xs` alone.

    By the values that both arms have, and the seeds that both have at all of these; None without
    any.
    """
    cells = [
        (cell, right.cells[x])
        for x, cell in left.cells.items()
        if x in right.cells and (xs is None or x in xs)
    ]
    seeds = (
        sorted(set.intersection(*(ours.keys() & theirs.keys() for ours, theirs in cells)))
        if cells
        else []
    )
    if not seeds:
        return None
    losses, windows, documents = np.zeros((len(cells), len(seeds))), [], None
    for i, (ours, theirs) in enumerate(cells):
        for j, seed in enumerate(seeds):
            a, b = setting.evaluation(ours[seed], step), setting.evaluation(theirs[seed], step)
            losses[i, j] = a["val/loss"] - b["val/loss"]
            if "val/window_losses" in a and "val/window_losses" in b:
                windows.append(np.subtract(a["val/window_losses"], b["val/window_losses"]))
                documents = a.get("val/window_documents")
    complete = len(windows) == losses.size
    return estimate_difference(losses.mean(0), np.mean(windows, 0) if complete else None, documents)


def find_pairs(setting: Setting, baseline: str) -> list[tuple[Arm, Arm]]:
    """Arms to compare: of one router those that differ in one option, of two routers those most alike.

    The baseline, a router or an arm's label, is the second of its pairs; if an arm, of pairs with
    all others.
    """
    pairs = []
    for left, right in combinations(setting.arms[::-1], 2):  # routers that someone added come first
        differing = sum(left.options[key] != right.options[key] for key in left.options)
        if left.router == right.router:
            alike = differing == 1 and left.shares_seed(right)
        else:
            counterparts = setting.counterparts(right, left.router) + setting.counterparts(
                left, right.router
            )
            alike = left in counterparts or right in counterparts
        subtracted = left.label == baseline or left.router == baseline != right.router
        if alike or baseline in (left.label, right.label):
            pairs.append((right, left) if subtracted else (left, right))
    return pairs


def judge_pairs(
    setting: Setting, pairs: Iterable[tuple[Arm, Arm]], margin: float = 0.0
) -> list[Comparison]:
    """A Comparison at the end for each pair, all of them one family; without pairs that lack a common seed."""
    known = [
        Comparison(*pair, difference) for pair in pairs if (difference := estimate(setting, *pair))
    ]
    judged = judge_family([pair.difference for pair in known], margin)
    return [
        pair._replace(difference=difference) for pair, difference in zip(known, judged, strict=True)
    ]


def compare_setting(
    setting: Setting, baseline: str = "kern", margin: float = 0.0
) -> list[Comparison]:
    """Every pair of a setting at the end. Nothing is compared before training."""
    return (
        judge_pairs(setting, find_pairs(setting, baseline), margin)
        if setting.key or setting.steps[-1]
        else []
    )


def choose_best(setting: Setting, seeds: Sequence[int], margin: float = 0.0) -> list[Comparison]:
    """Each arm at the value of the key with the lowest mean loss of `seeds`, compared by its other seeds.

    Raises ValueError if an arm lacks one of the seeds, or has no other seed.
    """
    best = []
    for arm in setting.arms:
        means = {}
        for x, cell in arm.cells.items():
            if missing := sorted(set(seeds) - set(cell)):
                raise ValueError(
                    f"--choose-on {missing[0]}: {arm.label} has no run of this seed at {x:g}"
                )
            means[x] = np.mean([setting.evaluation(cell[seed])["val/loss"] for seed in seeds])
        x = min(means, key=means.__getitem__)
        judged = {seed: run for seed, run in arm.cells[x].items() if seed not in seeds}
        if not judged:
            raise ValueError(
                f"--choose-on {', '.join(map(str, seeds))}: {arm.label} has no other seed to judge by"
            )
        label = ", ".join(filter(None, [arm.options_label, label_value(setting.key, x)]))
        best.append(Arm(arm.router, arm.options, {None: judged}, label))
    best.sort(key=lambda arm: np.mean([setting.evaluation(run)["val/loss"] for run in arm.runs]))
    return judge_pairs(setting, combinations(best, 2), margin)
