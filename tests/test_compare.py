"""report/compare.py against scipy.stats and formulas by hand."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from report.compare import (
    Difference,
    clustered,
    equivalence,
    holm,
    judge,
    lowest,
    paired,
    student,
)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_paired_differences_are_those_of_scipy(n):
    random = np.random.default_rng(n)
    a, b = random.normal(2, 1, n), random.normal(2.5, 1, n)
    oracle = stats.ttest_rel(a, b)
    wanted = (np.mean(a - b), *oracle.confidence_interval(), oracle.pvalue, n)
    for difference in (paired(a, b), paired(a - b)):
        assert difference == pytest.approx(wanted)
        for margin in (0.5, 4):
            low = stats.ttest_1samp(a - b, -margin, alternative="greater").pvalue
            high = stats.ttest_1samp(a - b, margin, alternative="less").pvalue
            assert equivalence(difference, margin) == pytest.approx(max(low, high))
    assert str(paired([0.1, 0.3], [0, 0])) == "+0.2000 [-1.0706, +1.4706]"


def test_what_is_too_few_has_no_interval_and_decides_nothing():
    few = [paired([0.5]), clustered([0.4, 0.6], [7, 7]), clustered([0.5], [1])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for difference in few:
            assert difference.mean == pytest.approx(0.5) and str(difference) == "+0.5000"
            assert math.isnan(difference.low) and math.isnan(difference.high)
            assert math.isnan(difference.p) and math.isnan(equivalence(difference, 9))
    assert {verdict.text for verdict in judge(few, margin=9)} == {"undecided"}
    assert judge([Difference(math.inf)])[0].text == "higher"


@pytest.mark.parametrize("sizes", [[3, 1], [4, 2, 2, 2, 2], [4, 4, 4, 4, 4]])
def test_clusters_by_hand_and_as_pairs(sizes):
    random = np.random.default_rng(2)
    groups = [random.normal(1, 1, size) for size in sizes]
    values = np.concatenate(groups)
    mean = values.mean()
    shares = np.divide(sizes, len(values))
    sums = np.array([(group - mean).sum() for group in groups]) / len(values)
    error = math.sqrt((sums**2 / (1 - shares)).sum())
    freedom = (shares**2).sum() ** 2 / (shares**4).sum() - 1  # below 1 for the first sizes
    wanted = student(mean, error, max(1, freedom), len(sizes))
    assert clustered(values, np.repeat([9, 7, 8, 2, 4][: len(sizes)], sizes)) == pytest.approx(
        wanted
    )
    means = [group.mean() for group in groups]
    # a weight is as many equal values; clusters of one size are pairs of their means
    assert clustered(means, range(len(sizes)), sizes) == pytest.approx(wanted)
    if len({*sizes}) == 1:
        assert paired(means) == pytest.approx(wanted)


def limit_lowest(one, other):
    """The upper limit of the lowest row of one minus that of other, and its one-sided p-value."""
    limits, p_values = [], []
    for x in one:
        tests = [stats.ttest_rel(x, y, alternative="less") for y in other]
        level = 1 - 0.025 / len(one)
        limits.append(max(test.confidence_interval(level).high for test in tests))
        p_values.append(max(test.pvalue for test in tests))
    return min(limits), len(one) * min(p_values)


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 3, 4), (2, 5, 8)])
def test_the_lowest_rows_are_compared_by_all_pairs_of_rows(shape):
    random = np.random.default_rng(shape)
    for shift in (-4, 0, 4):
        first = random.normal(shift, 1, (shape[0], shape[2]))
        second = random.normal(0, 1, shape[1:])
        high, below = limit_lowest(first, second)
        low, above = limit_lowest(second, first)
        mean = first.mean(axis=1).min() - second.mean(axis=1).min()
        wanted = (mean, -low, high, min(1, 2 * below, 2 * above), shape[2])
        assert lowest(first, second) == pytest.approx(wanted)
        if shape[:2] == (1, 1):
            assert lowest(first, second) == pytest.approx(paired(first[0], second[0]))
    assert lowest([[1.0], [0.5]], [[0.75]])[:2] == pytest.approx((-0.25, math.nan), nan_ok=True)
    assert lowest([[1.0, 1.0]], [[0.5, 0.5], [2.0, 2.0]]) == (0.5, 0.5, 0.5, 0, 2)


BOWL = 3e-3 * np.linspace(-2, 2, 5) ** 2  # true losses at five rates
FLAT = 0 * BOWL


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize(("first", "second"), [
    (FLAT, FLAT), (FLAT, FLAT[:1]), (FLAT, 20 * BOWL), (BOWL, BOWL + 1e-3 * np.arange(5)),
])  # fmt: skip
def test_the_interval_of_the_lowest_holds_the_truth(n, first, second):
    """In 95 of 100 or more, with seeds in common; so equal routers are rarely called different."""
    random = np.random.default_rng(n)
    n_held = 0
    for _ in range(600):
        shared = random.normal(0, 8e-3, n)
        noise = random.normal(shared, 6e-3, (2, 5, n))
        one, other = (
            truth[:, None] + noise[i, : len(truth)] for i, truth in enumerate((first, second))
        )
        difference = lowest(one, other)
        n_held += difference.low <= first.min() - second.min() <= difference.high
    assert n_held >= 0.95 * 600


def test_values_that_agree_exactly():
    same, apart = paired([0.0] * 3), paired([0.25] * 3)
    assert (same.p, apart.p, apart.low, apart.high) == (1, 0, 0.25, 0.25)
    assert [equivalence(same, 0.1), equivalence(apart, 0.1), equivalence(same, 0)] == [0, 1, 0.5]
    assert [verdict.text for verdict in judge([same, apart])] == ["undecided", "higher"]


def test_holm():
    assert holm([0.03, 0.01, 0.04]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.4]) == pytest.approx([0.8, 0.8])
    assert holm([0.9, 0.8, 0.7]) == [1, 1, 1] and holm([]) == []
    # what has no p-value is no member of the family
    corrected = holm([math.nan, 0.02, 0.04])
    assert math.isnan(corrected[0]) and corrected[1:] == pytest.approx([0.04, 0.04])


def make(mean, p, n=8):
    """A difference over n seeds with that p-value."""
    return student(mean, abs(mean) / float(stats.t.isf(p / 2, n - 1)), n - 1, n)


def test_verdicts_are_those_of_the_family():
    family = judge([make(-0.02, 0.01), make(0.02, 0.03), make(-0.02, 0.04)])
    assert [verdict.text for verdict in family] == ["lower", "undecided", "undecided"]
    assert [verdict.p for verdict in family] == pytest.approx([0.03, 0.06, 0.06])
    alone = [judge([make(*given)])[0].text for given in ((-1, 0.049), (1, 0.049), (1, 0.051))]
    assert alone == ["lower", "higher", "undecided"]
    near = student(-0.004, 0.001, 7, 8)  # decided, but nearer than the margin
    verdicts = [judge([near], margin)[0].text for margin in (0, 0.02, 0.0045)]
    assert verdicts == ["lower", "equivalent", "lower"]
    wide = student(0.0, 0.009, 7, 8)  # equivalent alone (p 0.03), not as one of two
    assert judge([wide], 0.02)[0].text == "equivalent"
    assert [verdict.text for verdict in judge([wide, wide], 0.02)] == ["undecided"] * 2
