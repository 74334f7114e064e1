"""Differences of losses, their intervals and p-values by a paired t-test, and verdicts. Needs scipy.

`HOW` of page.py tells a reader of a report what they mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtr, stdtrit

from common.text import plural

CONFIDENCE = 0.95
MIN_SEEDS = 3  # with two, one degree of freedom, the quantile of t is 12.7
LOWER, HIGHER, EQUIVALENT, UNDECIDED = "lower", "higher", "equivalent", "undecided"


@dataclass(frozen=True)
class Difference:
    """A mean difference in nats per token, with its standard error by Student's t.

    `over` says what was taken as independent draws: "seeds" or "documents". Without an interval (few seeds, documents
    not recorded) `error` is NaN and `over` is empty. `judge_family` sets the verdict and `p`, the p-value of no
    difference by Holm's correction.
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
    losses: Sequence[float] | np.ndarray, windows: np.ndarray | None = None, documents: np.ndarray | None = None
) -> Difference:
    """Mean of paired differences with its interval: over seeds, or over documents with fewer than MIN_SEEDS of them.

    Args:
        losses: (S,) differences of the seeds' losses, nats per token.
        windows: (W,) differences of the validation windows' losses, means over the seeds; None: not logged.
        documents: (W,) equal numbers for windows of one document; None: not known.
    """
    losses = np.asarray(losses, np.float64)
    seeds, mean = len(losses), float(losses.mean())
    if seeds >= MIN_SEEDS:
        return Difference(mean, seeds, float(losses.std(ddof=1)) / math.sqrt(seeds), seeds - 1.0, "seeds")
    if windows is None or documents is None or len(np.unique(documents)) < 2:
        return Difference(mean, seeds)
    return Difference(mean, seeds, *cluster_error(windows, documents), "documents")


def cluster_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """Standard error of the mean of values that are independent between clusters alone, and its degrees of freedom.

    The variance is Σ_g (Σ_{w in g} (x_w - mean))² / (1 - n_g/W) / W² (CR2: Bell and McCaffrey 2002). The degrees of
    freedom are Satterthwaite's for clusters whose values are all alike, (Σ n_g²)² / Σ n_g⁴ - 1 and 1 at least, so where
    a few clusters hold most values, those few count.

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
    """p-values corrected for being a family: at most 5% of families have a false one below 0.05. NaN are no members.

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
        differences: the family, such as a table's column of pairs. An infinite one, of a run that diverged, is higher.
        margin: of equivalence, nats per token: the smallest difference that matters. A difference that is decided to
            lie within it is "equivalent" even where its sign is decided too. 0: nothing is.
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
