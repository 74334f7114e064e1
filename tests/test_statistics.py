"""report/comparisons.py against scipy.stats and formulas by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from report.comparisons import (
    Difference,
    cluster_error,
    correct_holm,
    estimate_difference,
    judge_family,
)


@pytest.mark.parametrize(
    "windows, documents", [(None, None), (np.ones(4), None), (np.ones(4), np.zeros(4))]
)
def test_without_documents_two_seeds_have_no_interval(windows, documents):
    alone = estimate_difference([0.1, 0.3], windows, documents)
    assert alone.over == "" and math.isnan(alone.low) and str(alone) == "+0.2000"


def test_cluster_error_of_unequal_documents_by_hand():
    values, clusters = np.array([1.0, 3.0, 2.0, 8.0]), np.array([7, 7, 7, 2])
    # mean 3.5; sums of residuals -4.5 and 4.5; shares 3/4 and 1/4
    variance = (4.5**2 / (1 - 3 / 4) + 4.5**2 / (1 - 1 / 4)) / 16
    error, freedom = cluster_error(values, clusters)
    # (9 + 1)² / (81 + 1) - 1 < 1
    assert error == pytest.approx(math.sqrt(variance)) and freedom == 1
    _, freedom = cluster_error(np.arange(12.0), np.repeat([0, 1, 2, 3, 4], [4, 2, 2, 2, 2]))
    assert freedom == pytest.approx((16 + 4 * 4) ** 2 / (256 + 4 * 16) - 1)


@pytest.mark.parametrize(
    "mean, margin", [(0.01, 0.03), (-0.01, 0.03), (0.05, 0.03), (-0.029, 0.03)]
)
def test_equivalence_is_two_one_sided_tests(mean, margin):
    losses = mean + np.array([-0.01, 0.0, 0.002, 0.008])
    low = stats.ttest_1samp(losses, -margin, alternative="greater").pvalue
    high = stats.ttest_1samp(losses, margin, alternative="less").pvalue
    assert estimate_difference(losses).p_equivalent(margin) == pytest.approx(max(low, high))


def test_seeds_that_agree_exactly():
    same, apart = estimate_difference([0.0] * 3), estimate_difference([0.25] * 3)
    assert (same.p_value(), apart.p_value()) == (1, 0) and (apart.low, apart.high) == (0.25, 0.25)
    assert (same.p_equivalent(0.1), apart.p_equivalent(0.1), same.p_equivalent(0)) == (0, 1, 0.5)
    assert [one.verdict for one in judge_family([same, apart])] == ["undecided", "higher"]


def test_holm():
    assert correct_holm([0.03, 0.01, 0.04]) == pytest.approx([0.06, 0.03, 0.06])
    assert correct_holm([0.5, 0.4]) == pytest.approx([0.8, 0.8]) and correct_holm(
        [0.9, 0.8, 0.7]
    ) == [1, 1, 1]
    # what has no p-value is no member of the family
    corrected = correct_holm([math.nan, 0.02, 0.04])
    assert (
        math.isnan(corrected[0])
        and corrected[1:] == pytest.approx([0.04, 0.04])
        and correct_holm([]) == []
    )


def make(mean, p, freedom=7.0):
    """A difference over seeds with that p-value."""
    return Difference(
        mean, int(freedom) + 1, abs(mean) / float(stats.t.isf(p / 2, freedom)), freedom, "seeds"
    )


def test_verdicts_are_those_of_the_family():
    verdicts = judge_family([make(-0.02, 0.01), make(0.02, 0.03), make(-0.02, 0.04)])
    assert [one.verdict for one in verdicts] == ["lower", "undecided", "undecided"]
    assert [one.p for one in verdicts] == pytest.approx([0.03, 0.06, 0.06])
    alone = [
        judge_family([one])[0].verdict
        for one in (make(-0.02, 0.049), make(0.02, 0.049), make(0.02, 0.051))
    ]
    assert alone == ["lower", "higher", "undecided"]
    near = Difference(-0.004, 8, 0.001, 7.0, "seeds")  # decided, but nearer than the margin
    assert [judge_family([near], margin)[0].verdict for margin in (0, 0.02, 0.0045)] == [
        "lower",
        "equivalent",
        "lower",
    ]
    wide = Difference(0.0, 8, 0.009, 7.0, "seeds")  # equivalent alone (p 0.03), not as one of two
    assert judge_family([wide], 0.02)[0].verdict == "equivalent"
    assert [one.verdict for one in judge_family([wide, wide], 0.02)] == ["undecided", "undecided"]
