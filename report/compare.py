"""Is A lower than B? The only statistics here: differences, intervals, p-values and verdicts.

    paired([2.1, 2.3, 2.2], [2.0, 2.1, 2.1])     Student's t over pairs, such as seeds
    lowest(first, second)                        each at its best value of a key
    clustered(differences, documents)            windows of one document are one observation
    holm(p_values), judge(differences, margin)   of a family of comparisons

Intervals are of 95%, written as [low, high]. ± stands for the standard deviation over seeds, here
and on every page. Without enough values an interval and a p-value are NaN. Needs scipy.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

LEVEL = 0.05  # of tests; intervals are of 1 - LEVEL
LOWER = "lower"
HIGHER = "higher"
EQUIVALENT = "equivalent"
UNDECIDED = "undecided"


class Difference(NamedTuple):
    """A mean difference, first minus second.

    Attributes:
        mean: in the unit of the values.
        low: lower end of its 95% interval.
        high: upper end.
        p: two-sided p-value of no difference.
        n: the independent observations: pairs or clusters.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    n: int = 0

    def __str__(self) -> str:
        mean = f"{self.mean:+.4f}"
        if math.isnan(self.low):
            return mean
        return f"{mean} [{self.low:+.4f}, {self.high:+.4f}]"


def student(mean: float, error: float, freedom: float, n: int) -> Difference:
    """A difference by Student's t.

    Args:
        mean: the difference.
        error: its standard error.
        freedom: degrees of freedom of the error; NaN: no interval.
        n: the independent observations.
    """
    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    return Difference(mean, mean - half, mean + half, 2 * tail(abs(mean), error, freedom), n)


def tail(distance: float, error: float, freedom: float) -> float:
    """P(T > distance / error), T having Student's t; 0 is as far as 0 from values that agree."""
    if error == 0:
        return 0.5 if distance == 0 else float(distance < 0)
    return float(stdtr(freedom, -distance / error))


def paired(first: ArrayLike, second: ArrayLike = 0.0) -> Difference:
    """Mean of first minus second over pairs, as scipy's ttest_rel.

    Args:
        first: (n,) values, or differences if `second` is left out.
        second: (n,) values of the same seeds, documents or settings in the same order.
    """
    differences = np.subtract(first, second, dtype=np.float64)
    n = len(differences)
    if n < 2:
        return Difference(float(differences.mean()), n=n)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    mean = float(differences.mean())
    return student(mean, error, n - 1.0, n)


def clustered(
    differences: ArrayLike, clusters: ArrayLike, weights: ArrayLike | None = None
) -> Difference:
    """Weighted mean of differences; those of one cluster are one observation.

    The standard error is CR2 (Bell and McCaffrey 2002): a cluster pulls the mean towards itself,
    which 1 - its share corrects. The degrees of freedom are Satterthwaite's for clusters of equal
    values, (Σ n_g²)² / Σ n_g⁴ - 1 and 1 at least: where a few clusters hold most values, those few
    count.

    Args:
        differences: (W,) such as one for each validation window.
        clusters: (W,) equal numbers for values of one cluster, such as a document.
        weights: (W,) such as the tokens of each window; by default all are equal.
    """
    differences = np.asarray(differences, np.float64)
    sizes = np.ones(len(differences)) if weights is None else np.asarray(weights, np.float64)
    mean = float(np.average(differences, weights=sizes))
    labels = np.unique(clusters, return_inverse=True)[1]
    n = int(labels.max()) + 1
    if n < 2:
        return Difference(mean, n=n)
    shares = np.bincount(labels, sizes) / sizes.sum()
    residuals = np.bincount(labels, sizes * (differences - mean)) / sizes.sum()
    error = math.sqrt((residuals**2 / (1 - shares)).sum())
    freedom = float((shares**2).sum() ** 2 / (shares**4).sum()) - 1
    return student(mean, error, max(1.0, freedom), n)


def lowest(first: ArrayLike, second: ArrayLike) -> Difference:
    """The lowest row of first minus the lowest of second, by their true means.

    The row that looks lowest is partly lucky, and choosing it by the other seeds makes intervals
    too narrow: they hold the truth 82 to 90 times of 100. So all rows count. Where y is second's
    lowest row, the difference is at most that of any row x of first and y. The upper limit is, of
    all x, the lowest of its highest limits over y, by Bonferroni's correction for the number of x;
    the lower limit is the same from the other side. It holds at least 95 times of 100, whichever
    rows are lowest: 97 to 100 in test_compare.py. With one row each it is `paired`.

    Args:
        first: (X, n), a row for each value of a key, a column for each seed.
        second: (Y, n) of the same seeds.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    n = first.shape[1]
    mean = float(first.mean(axis=1).min() - second.mean(axis=1).min())
    if n < 2:
        return Difference(mean, n=n)
    limits = []
    p_values = []
    for one, other in ((first, second), (second, first)):
        apart = one[:, None] - other  # (X, Y, n)
        means = apart.mean(axis=2)
        errors = np.maximum(apart.std(axis=2, ddof=1) / math.sqrt(n), np.finfo(float).tiny)
        quantile = stdtrit(n - 1, 1 - LEVEL / 2 / len(one))
        highest = (means + quantile * errors).max(axis=1)
        limits.append(float(highest.min()))
        p_highest = stdtr(n - 1, means / errors).max(axis=1)
        p_values.append(len(one) * float(p_highest.min()))
    return Difference(mean, -limits[1], limits[0], min(1.0, 2 * min(p_values)), n)


def holm(p_values: Sequence[float]) -> list[float]:
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


def equivalence(difference: Difference, margin: float) -> float:
    """p-value of a true difference beyond ±`margin`, by two one-sided t-tests.

    Args:
        difference: of `paired`; NaN if it has no p-value.
        margin: the smallest difference that matters.

    Source: Schuirmann, A comparison of the two one-sided tests procedure, 1987.
    """
    if math.isnan(difference.p):
        return math.nan
    freedom = difference.n - 1
    error = (difference.high - difference.low) / 2 / float(stdtrit(freedom, 1 - LEVEL / 2))
    return tail(margin - abs(difference.mean), error, freedom)


class Verdict(NamedTuple):
    """What a family says of one of its differences, and its p-value by Holm's correction."""

    text: str
    p: float


def judge(differences: Sequence[Difference], margin: float = 0.0) -> list[Verdict]:
    """The verdict of each difference of a family, such as a table's column of pairs.

    At most 5% of families hold a false "lower" or "higher", and at most 5% a false "equivalent".
    What is decided to lie within the margin is "equivalent", even where its sign is decided too.

    Args:
        differences: of `paired`. One without a p-value decides nothing, but an infinite one, of a
            run that diverged, is higher.
        margin: of equivalence; 0: nothing is equivalent.
    """
    different = holm([difference.p for difference in differences])
    beyond = holm([equivalence(difference, margin) for difference in differences])
    verdicts = []
    for difference, p, p_beyond in zip(differences, different, beyond, strict=True):
        text = UNDECIDED
        if p_beyond < LEVEL:
            text = EQUIVALENT
        elif p < LEVEL or difference.mean == math.inf:
            text = LOWER if difference.mean < 0 else HIGHER
        verdicts.append(Verdict(text, p))
    return verdicts
