"""What eval and track still use of the comparisons before report/compare.py; leaves with them.

All pairs of a group are one family (`judge_family`), in one table. page.html explains the verdicts
to readers of a report. Needs scipy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtr, stdtrit

from common.text import plural

CONFIDENCE = 0.95
MIN_SEEDS = 3  # two seeds have one degree of freedom: the quantile of t is 12.7
LOWER = "lower"
HIGHER = "higher"
EQUIVALENT = "equivalent"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Difference:
    """A mean difference in nats per token, with its standard error by Student's t.

    Without an interval (few seeds, documents not recorded) `error` is NaN and `over` is empty.
    `judge_family` sets `verdict` and `p`.
    """

    mean: float
    seeds: int
    error: float = math.nan
    freedom: float = math.nan  # degrees of freedom of t
    over: str = ""  # the independent draws: "seeds" or "documents"
    verdict: str = UNDECIDED
    p: float = math.nan  # p-value of no difference, by Holm's correction

    @property
    def is_decided(self) -> bool:
        """True if the verdict is one."""
        return not self.verdict.startswith(UNDECIDED)

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
        """p-value of a true difference beyond ±`margin`; NaN unless it is over seeds.

        It is the larger one of two one-sided t-tests.

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
        mean = f"{self.mean:+.4f}"
        if math.isnan(self.error):
            return mean
        return f"{mean} [{self.low:+.4f}, {self.high:+.4f}]"


def estimate_difference(
    losses: Sequence[float] | np.ndarray,
    windows: np.ndarray | None = None,
    documents: np.ndarray | None = None,
) -> Difference:
    """Mean of paired differences with its interval: over seeds, or over documents.

    Documents count where there are fewer than MIN_SEEDS seeds.

    Args:
        losses: (S,) differences of the seeds' losses, nats per token.
        windows: (W,) differences of the validation windows' losses, means over the seeds; None: not
            logged.
        documents: (W,) equal numbers for windows of one document; None: not known.
    """
    losses = np.asarray(losses, np.float64)
    seeds = len(losses)
    mean = float(losses.mean())
    if seeds >= MIN_SEEDS:
        error = float(losses.std(ddof=1)) / math.sqrt(seeds)
        return Difference(mean, seeds, error, seeds - 1.0, "seeds")
    if windows is None or documents is None or len(np.unique(documents)) < 2:
        return Difference(mean, seeds)
    error, freedom = cluster_error(windows, documents)
    return Difference(mean, seeds, error, freedom, "documents")


def cluster_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """Standard error of the mean of clustered values, and its degrees of freedom.

    Values of different clusters are independent. The variance is
    Σ_g (Σ_{w in g} (x_w - mean))² / (1 - n_g/W) / W² (CR2: Bell and McCaffrey 2002). The degrees of
    freedom are Satterthwaite's for clusters of equal values, (Σ n_g²)² / Σ n_g⁴ - 1 and 1 at least:
    where a few clusters hold most values, those few count.

    Args:
        values: (W,).
        clusters: (W,) equal numbers for values of one cluster; two clusters at least.
    """
    labels = np.unique(clusters, return_inverse=True)[1]
    sizes = np.bincount(labels)
    sums = np.bincount(labels, values - values.mean())
    variance = (sums**2 / (1 - sizes / len(values))).sum() / len(values) ** 2
    squares = sizes.astype(np.float64) ** 2
    freedom = float(squares.sum() ** 2 / (squares**2).sum() - 1)
    return math.sqrt(variance), max(1.0, freedom)


def correct_holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being a family: at most 5% of families have a false one below 0.05.

    NaN are no members.

    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979.
    """
    members = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    members.sort(key=lambda i: p_values[i])
    corrected = [math.nan] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(members):
        n_left = len(members) - rank
        largest = max(largest, min(1.0, n_left * p_values[i]))
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
