"""Means of paired losses over seeds and validation windows with 95% intervals: windows of one document are one draw.

The difference d[s, w] of two routers at seed s and window w is taken as the sum of what they differ by on average, an
effect of the seed, one of the window's document, one of the window, and remainders of seed with document and with
window. Seeds and documents are independent draws; windows of one document are not. scripts.coverage simulates how often
such intervals contain the truth (docs/after.md).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
UNDECIDED = "undecided"


class Interval(NamedTuple):
    """A mean difference and the ends of its 95% interval, nats per token, and the number of seeds behind it.

    `parts`: (variance of the mean, degrees of freedom) of seeds and of each text's documents.
    """

    mean: float
    low: float
    high: float
    seeds: int
    parts: tuple[tuple[float, float], ...] = ()

    def decide(self, below: str, above: str) -> str:
        """`below` or `above`, the side of zero that the interval is on; UNDECIDED if it touches zero or has no ends."""
        return below if self.high < 0 else above if self.low > 0 else UNDECIDED

    def p_value(self, distance: float | None = None) -> float:
        """The least error rate at which an interval of this kind reaches no farther than `distance` from the mean.

        By default `distance` is that to zero: the two-sided p-value of no difference. NaN without ends.
        """
        distance = abs(self.mean) if distance is None else distance
        if math.isnan(self.low):
            return math.nan
        if half_width(self.parts, 1e-12) <= distance:
            return 1e-12 if distance else 1.0
        from scipy.optimize import brentq

        return float(np.exp(brentq(lambda x: half_width(self.parts, math.exp(x)) - distance, math.log(1e-12), 0)))

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if math.isnan(self.low) else f" [{self.low:+.4f}, {self.high:+.4f}]")


def estimate_interval(
    differences: Sequence[np.ndarray],
    texts: Sequence[Any] | None = None,
    documents: Sequence[np.ndarray | None] | None = None,
    corpora: Sequence[Any] | None = None,
) -> Interval:
    """Mean difference over settings with its interval, from crossed random effects of seeds and documents.

    The mean has the variance V = V_s + V_d. V_d, of documents, is that of the means over seeds (`cluster_variance`).
    V_s, of seeds, is the variance of the seeds' means over their number, 0 at least, less the remainders, which V_d has
    in it already (two-way clustering: Cameron, Gelbach and Miller 2011); only (S - 2) / (S - 1) of them, since V_s of
    two or three seeds is often too small by chance (scripts.coverage). The interval is mean ± (t_s·V_s + t_d·V_d) / √V,
    with the quantiles of Student's t for the degrees of freedom of each. Over settings, each seed's differences are
    averaged first, and each window's over settings that share windows.

    Args:
        differences: one (S seeds, W windows) array per setting, nats per token, of the same seeds in each.
        texts: one value per setting; settings of equal values share their windows. By default none do.
        documents: (W,) per setting, equal for windows of one document. None, or a single document: each window counts
            as one of its own.
        corpora: one value per setting; other windows of one corpus may be of the same documents, so their errors are
            taken as equal. By default each text is a corpus.

    Returns:
        With one seed the interval is over documents alone; with one window its ends are NaN.

    Source: the approximate t of Cochran and Cox, Experimental Designs.
    """
    seeds, settings = len(differences[0]), len(differences)
    mean = float(np.mean([d.mean() for d in differences]))
    sharing = defaultdict(list)
    for setting, text in enumerate(texts or range(settings)):
        sharing[text].append(setting)
    if any(differences[of[0]].shape[1] == 1 for of in sharing.values()):
        return Interval(mean, math.nan, math.nan, seeds)
    of_corpora, remainder = defaultdict(list), 0.0
    for text, of in sharing.items():
        d = np.sum([differences[setting] for setting in of], 0) / settings  # (S, W), a part of the mean
        labels = number_clusters(documents[of[0]] if documents else None, d.shape[1])
        of_corpora[corpora[of[0]] if corpora else text].append(cluster_variance(d.mean(0), labels))
        if seeds > 1:
            rest = d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()
            remainder += sum(cluster_variance(row, labels)[0] for row in rest) / (seeds * (seeds - 1))
    parts = [
        (sum(math.sqrt(variance) for variance, _ in of) ** 2, min(freedom for _, freedom in of))
        for of in of_corpora.values()
    ]
    if seeds > 1:
        means, share = np.mean([d.mean(1) for d in differences], 0), remainder * (seeds - 2) / (seeds - 1)
        parts.append((float(np.maximum(0, means.var(ddof=1) / seeds - share)), seeds - 1.0))
    half = half_width(parts, 1 - CONFIDENCE)
    return Interval(mean, mean - half, mean + half, seeds, tuple(parts))


def pool_seeds(found: Sequence[Interval], independent: float) -> list[Interval]:
    """Intervals of one family of differences with one variance of seeds for all: the mean of their own.

    Two or three seeds know little of their variance; that of many differences is known well. Assumed: seeds move all
    of them equally much. Where half move by twice as much, theirs contain the truth in 88 or 89% (scripts.coverage).

    Args:
        found: by `estimate_interval`; those of one seed are returned as they are.
        independent: how many independent differences tell as much of the variance: n - 1 for n values minus their mean,
            `count_independent` for pairs.
    """
    known = [one for one in found if one.seeds > 1 and not math.isnan(one.low)]
    weights = [one.seeds - 1.0 for one in known]
    if not known:
        return list(found)
    of_one = np.average([one.parts[-1][0] * one.seeds for one in known], weights=weights)  # variance of a single seed
    freedom, pooled = float(np.mean(weights)) * max(1, independent), []
    for one in found:
        if one in known:
            parts = (*one.parts[:-1], (float(of_one) / one.seeds, freedom))
            half = half_width(parts, 1 - CONFIDENCE)
            one = one._replace(low=one.mean - half, high=one.mean + half, parts=parts)
        pooled.append(one)
    return pooled


def correlate_seeds(losses: np.ndarray) -> float:
    """How much a seed's effects on the cells of one curve are alike: their correlation, 0 to 1.

    Args:
        losses: (C curves, X values, S seeds). A seed's effect on all cells is no part of it.

    Source: the intraclass correlation by analysis of variance, ICC(1) of Shrout and Fleiss 1979.
    """
    C, X, S = losses.shape
    if C < 2 or X < 2 or S < 2:
        return 0.0
    effects = losses - losses.mean((0, 1)) - losses.mean(2, keepdims=True) + losses.mean()
    of_curves = effects.mean(1, keepdims=True)
    between = X * np.sum(of_curves**2) / ((C - 1) * (S - 1))
    within = np.sum((effects - of_curves) ** 2) / (C * (X - 1) * (S - 1))
    return float((between - within) / (between + (X - 1) * within)) if between > within else 0.0


def count_independent(pairs: Iterable[tuple[Hashable, Hashable]]) -> float:
    """How many independent differences tell as much of a variance as those of these pairs of independent values.

    All pairs of n values count as n - 1, and n values minus one that they share as 4n / (n + 3): it is part of each.

    Source: Satterthwaite's degrees of freedom, (tr L)² / tr L², L being the Laplacian of the graph of pairs.
    """
    degrees = Counter(value for pair in pairs for value in pair).values()
    return sum(degrees) ** 2 / sum(n * n + n for n in degrees) if degrees else 0.0


def half_width(parts: Sequence[tuple[float, float]], error: float) -> float:
    """Half the length of an interval that misses the truth at that rate; `parts`: variances, degrees of freedom."""
    from scipy.stats import t  # only reports need scipy

    variances, freedom = np.transpose(parts)
    total = variances.sum()
    return float(np.dot(variances, t.isf(error / 2, freedom)) / math.sqrt(total)) if total else 0.0


def number_clusters(documents: np.ndarray | None, windows: int) -> np.ndarray:
    """(W,) labels from 0 on: of documents, or of windows where there are no two documents."""
    labels = np.unique(np.arange(windows) if documents is None else documents, return_inverse=True)[1]
    return labels if labels.any() else np.arange(windows)


def cluster_variance(values: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Variance of a mean whose values are independent between clusters alone, and its degrees of freedom.

    Σ_g (Σ_{w in g} (x_w - mean))² / (1 - n_g/W) / W², unbiased where values are independent (CR2: Bell and McCaffrey
    2002). Satterthwaite's degrees of freedom, (Σ v_g)² / Σ v_g² - 1 and 1 at least, for cluster sums of the variance
    v_g = n_g (1 + (n_g - 1) ρ), ρ being the correlation within clusters by analysis of variance (Imbens and Kolesár
    2016). So where a few clusters hold most values, those few count.

    Args:
        values: (W,).
        labels: (W,) int64, the cluster of each: every number from 0 up to the number of clusters, two at least.
    """
    W, sizes, centred = len(values), np.bincount(labels), values - values.mean()
    sums = np.bincount(labels, centred)
    variance = float((sums**2 / (1 - sizes / W)).sum() / W**2)
    G, within = len(sizes), np.sum((centred - (sums / sizes)[labels]) ** 2)
    rho = 0.0
    if G < W:
        within /= W - G
        between = max(0, (np.sum(sums**2 / sizes) - (G - 1) * within) / (W - np.sum(sizes**2) / W))
        rho = between / (between + within) if between else 0.0
    spread = sizes * (1 + (sizes - 1) * rho)
    return variance, max(1.0, float(spread.sum() ** 2 / np.sum(spread**2) - 1))


def correct_holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being a family: below 0.05 all are, with no false one among them 19 times in 20.

    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def correct_family(
    found: Sequence[Interval], pairs: Iterable[tuple[Hashable, Hashable]], distances: Sequence[float | None]
) -> list[float]:
    """Holm's p-values of a family of differences with one variance of seeds for all, and none below its own p-value.

    A difference's own two or three seeds give an interval, but no small p-value: where they happen to agree it is far
    too small (scripts.coverage simulates how often some verdict of a family is false).

    Args:
        found: by `estimate_interval`.
        pairs: the two values of each difference.
        distances: as of `Interval.p_value`.
    """
    pooled = pool_seeds(found, count_independent(set(pairs)))
    own, shared = ([one.p_value(at) for one, at in zip(of, distances, strict=True)] for of in (found, pooled))
    return [max(p) for p in zip(own, correct_holm(shared), strict=True)]
