"""eval/intervals.py: intervals over seeds and documents, p-values, Holm's correction; scripts/coverage.py."""

import math
import statistics
from itertools import combinations

import numpy as np
import pytest
import torch
from numerics import assert_near, seeded
from scipy import stats

from eval.intervals import (
    cluster_variance,
    correct_family,
    correct_holm,
    correlate_seeds,
    count_independent,
    estimate_interval,
    half_width,
    pool_seeds,
)
from scripts import coverage
from scripts.report.claims import CLAIMS

T = {3: 3.182446, 5: 2.570582}  # Student's t at 97.5%, by degrees of freedom, from a printed table
TABLE_DIGITS = 1e-6  # the table's last digit, relative, four times over


def assert_interval(found, mean, half, tolerance=TABLE_DIGITS):
    wanted = torch.tensor([mean, mean - half, mean + half], dtype=torch.float64)
    assert_near(torch.tensor(found[:3], dtype=torch.float64), wanted, tolerance, "interval")


def draw(*shape, number=0):
    return torch.randn(shape, generator=seeded(number), dtype=torch.float64).numpy()


@pytest.mark.numerics
def test_interval_is_students_over_seeds_or_windows_where_only_one_of_them_varies():
    means = draw(4)
    half = T[3] * statistics.stdev(means) / 2
    found = estimate_interval([np.repeat(means[:, None], 50, 1)])  # documents do not matter: they do not vary
    assert found[:4] == estimate_interval([np.repeat(means[:, None], 50, 1)], documents=[np.arange(50) // 9])[:4]
    assert_interval(found, means.mean(), half)
    assert found.seeds == 4
    losses = draw(6, number=1)
    half = T[5] * statistics.stdev(losses) / math.sqrt(6)
    found = estimate_interval([losses[None]])
    assert_interval(found, losses.mean(), half)
    assert found.seeds == 1


@pytest.mark.numerics
def test_interval_weighs_seeds_and_windows():
    """Cochran and Cox, by plain arithmetic: each quantile has the weight of its variance.

    What is left when both effects are subtracted is in both variances, and is taken out of that of seeds.
    """
    d = draw(4, 6) + np.array([[0], [1], [2], [0.5]])
    rest = sum((d[i, j] - d[i].mean() - d[:, j].mean() + d.mean()) ** 2 for i in range(4) for j in range(6))
    seeds = statistics.variance(d.mean(1).tolist()) / 4 - 2 / 3 * rest / (3 * 5) / (4 * 6)
    windows = statistics.variance(d.mean(0).tolist()) / 6
    t = (T[3] * seeds + T[5] * windows) / (seeds + windows)
    assert_interval(estimate_interval([d]), d.mean(), t * math.sqrt(seeds + windows))


@pytest.mark.numerics
def test_windows_of_one_document_count_as_one():
    """Four windows of each of six documents that say the same, in any order, are six."""
    losses = draw(6)
    half = T[5] * statistics.stdev(losses) / math.sqrt(6)
    order = np.random.default_rng(0).permutation(24)
    alike, documents = np.repeat(losses, 4)[order], 7 * np.repeat(np.arange(6), 4)[order]
    assert_interval(estimate_interval([alike[None]], documents=[documents]), losses.mean(), half)
    independent = estimate_interval([alike[None]])
    assert independent.high - independent.low < 1.1 * half
    assert estimate_interval([alike[None]], documents=[np.zeros(24)]) == independent  # one document says nothing
    both = estimate_interval([alike[None], alike[None]], ["x", "y"], [documents, documents])
    assert_interval(both, losses.mean(), half / math.sqrt(2), 0.3)


def test_documents_of_unequal_size():
    """By plain arithmetic: sums of documents, their correlation by analysis of variance, degrees of freedom."""
    values = np.array([1.0, 2.0, 4.0, 3.0, -1.0, 0.5])
    sums, sizes = [7 - 3 * 9.5 / 6, 2 - 2 * 9.5 / 6, 0.5 - 9.5 / 6], [3, 2, 1]
    variance = sum(s**2 / (1 - n / 6) for s, n in zip(sums, sizes, strict=True)) / 36
    within = sum((x - m) ** 2 for x, m in zip(values, [7 / 3] * 3 + [1] * 2 + [0.5], strict=True)) / 3
    between = (sum(s**2 / n for s, n in zip(sums, sizes, strict=True)) / 2 - within) / ((6 - 14 / 6) / 2)
    rho = max(between, 0) / (max(between, 0) + within)
    spread = [n * (1 + (n - 1) * rho) for n in sizes]
    freedom = sum(spread) ** 2 / sum(v**2 for v in spread) - 1
    found = cluster_variance(values, np.array([0, 0, 0, 1, 1, 2]))
    assert found == pytest.approx((variance, freedom)) and 1 < freedom < 2
    even = cluster_variance(values - values.mean(), np.array([0, 0, 0, 0, 0, 1]))
    assert even[1] == 1  # however unequal two documents are


@pytest.mark.slow
@pytest.mark.parametrize("seeds", coverage.SEEDS)
@pytest.mark.parametrize("sizes", coverage.SIZES)
@pytest.mark.parametrize("effects", coverage.EFFECTS)
def test_intervals_contain_the_truth_where_windows_share_documents(effects, sizes, seeds):
    """Within three deviations of 0.94 to 0.976; too wide where sizes are very unequal, or two seeds are alike."""
    old, new = coverage.simulate_coverage(coverage.EFFECTS[effects], coverage.SIZES[sizes], seeds, 500)
    wide = sizes == "35, 25, 18, …" or (effects, seeds) == ("seeds alike", 2)
    assert new > 0.94 - 0.032 and (new < 0.976 + 0.02 or wide), (old, new)
    if sizes == "16 each" and effects == "measured" and seeds == 1:
        assert old < 0.85


def test_pooled_seeds_share_a_variance():
    cells = [draw(3, 9, number=seed) * scale for seed, scale in enumerate((0.5, 1.0, 2.0))]
    own = [estimate_interval([cell]) for cell in cells]
    pooled = pool_seeds(own, 2)
    shared = sum(one.parts[-1][0] for one in own) / 3
    for one, after in zip(own, pooled, strict=True):
        assert after.mean == one.mean and after.seeds == 3
        assert after.parts == (one.parts[0], (pytest.approx(shared), 4.0))  # 2 of 3 seeds, times 2
        assert after.high - after.mean == pytest.approx(half_width(after.parts, 0.05))
        assert after.mean - after.low == pytest.approx(after.high - after.mean)
    single = [estimate_interval([cell[:1]]) for cell in cells]
    assert pool_seeds(single, 2) == single and pool_seeds([], 2) == []
    mixed = pool_seeds([own[0], estimate_interval([cells[1][:2]]), single[2]], 2)  # of three, two and one seed
    of_one = (2 * 3 * own[0].parts[-1][0] + 2 * estimate_interval([cells[1][:2]]).parts[-1][0]) / 3
    assert [one.parts[-1] for one in mixed[:2]] == [(pytest.approx(of_one / n), 3.0) for n in (3, 2)]
    assert mixed[2] == single[2]


@pytest.mark.numerics
def test_how_alike_a_seeds_effects_along_a_curve_are():
    """Of many curves the estimate is near the correlation they were drawn with; what all cells share is no part."""
    effects = draw(400, 1, 3) * math.sqrt(0.3) + draw(400, 5, 3, number=1) * math.sqrt(0.7)
    shared = draw(1, 1, 3, number=2) * 9 + draw(400, 5, 1, number=3) * 9  # a seed's of all, and cells' means
    assert abs(correlate_seeds(effects) - 0.3) < 0.05
    assert correlate_seeds(effects + shared) == pytest.approx(correlate_seeds(effects), rel=1e-9)
    assert correlate_seeds(np.repeat(draw(2, 1, 2), 4, 1)) == pytest.approx(1)
    turned = draw(2, 1, 2) * np.array([[[1], [-1]]])  # opposite at the two values of the key
    assert [correlate_seeds(losses) for losses in (turned, draw(1, 4, 2), draw(4, 1, 2), draw(4, 4, 1))] == [0] * 4


@pytest.mark.numerics
def test_a_family_shares_a_variance_of_seeds():
    """A difference whose two seeds happen to agree is not as certain as they say, nor more certain than alone."""
    noise = draw(2, 64) / 100
    noise -= noise.mean(1, keepdims=True)
    agree, apart = (noise + 0.1 + np.array([[0], [gap]]) for gap in (0, 0.01))
    found = [estimate_interval([d - d.mean() + 0.1]) for d in (agree, apart, apart)]
    pairs = [(0, 1), (0, 2), (1, 2)]
    alone, family = correct_holm([one.p_value() for one in found]), correct_family(found, pairs, [None] * 3)
    assert alone[0] < 1e-6 and 1e-3 < family[0] < 0.05
    assert all(p >= one.p_value() for p, one in zip(family, found, strict=True))
    pooled = correct_holm([one.p_value() for one in pool_seeds(found, 2)])
    assert family == [max(p, one.p_value()) for p, one in zip(pooled, found, strict=True)]
    assert correct_family(found, pairs * 2, [None] * 3) == family  # the same pairs again tell nothing new
    assert correct_family(found, pairs, [0.0] * 3) == [1] * 3


@pytest.mark.numerics
def test_what_pairs_tell_of_a_variance():
    """Of means of squares with (tr L)² / tr L² degrees of freedom, L from the pairs' contrasts."""
    star, apart = [(0, i) for i in range(1, 7)], [(0, 1), (2, 3), (4, 5)]
    for pairs in (star, apart, [(0, 1), (1, 2)], [*combinations(range(6), 2)]):
        rows = np.zeros((len(pairs), 7))
        for row, (one, other) in zip(rows, pairs, strict=True):
            row[[one, other]] = 1, -1
        L = rows.T @ rows
        assert count_independent(pairs) == pytest.approx(np.trace(L) ** 2 / np.trace(L @ L), rel=1e-12)
    assert [count_independent(pairs) for pairs in (star, apart, [])] == [pytest.approx(24 / 9), 3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("factor", [1, 2])
def test_pooled_intervals_contain_the_truth(factor, seeds):
    own, pooled, noisy, ratio = coverage.simulate_pooled(factor, seeds, 100)
    assert 0.92 < own < 0.98 and 0.92 < pooled < 0.98 and ratio < (0.5 if seeds == 2 else 0.75)
    assert 0.84 < noisy < (0.98 if factor == 1 else 0.93)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("alike", coverage.ALIKE)
def test_intervals_along_curves_contain_the_truth(alike, seeds):
    assert 0.9 < coverage.simulate_curves(alike, 4, seeds, 100) < 0.995


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_no_verdict_of_a_family_is_false_in_19_of_20_draws(seeds):
    assert coverage.simulate_family(coverage.EFFECTS["measured"], 6, seeds, 200) < 0.05


@pytest.mark.numerics
def test_p_value_is_students():
    d = draw(1, 9)
    found = estimate_interval([d])
    assert found.p_value() == pytest.approx(stats.ttest_1samp(d[0], 0).pvalue, rel=1e-9)
    assert found.p_value((found.high - found.low) / 2) == pytest.approx(0.05, rel=1e-9)
    seeds = np.repeat(draw(4, 1), 8, 1)
    assert estimate_interval([seeds]).p_value() == pytest.approx(stats.ttest_1samp(seeds[:, 0], 0).pvalue, rel=1e-9)
    assert estimate_interval([np.zeros((3, 8))]).p_value() == 1
    assert estimate_interval([np.ones((3, 8))]).p_value() < 1e-9
    assert math.isnan(estimate_interval([np.ones((3, 1))]).p_value())


def test_holm():
    """The example of statsmodels' and R's p.adjust: sorted, times 4, 3, 2, 1, never falling, at most 1."""
    assert correct_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert correct_holm([0.9, 0.8]) == [1, 1] and correct_holm([]) == []


def test_interval_at_its_limits():
    zero = estimate_interval([np.zeros((3, 8))])  # a run against itself
    assert zero[:4] == (0, 0, 0, 3) and str(zero) == "+0.0000 [+0.0000, +0.0000]"
    one = estimate_interval([np.array([[0.5], [0.25]])])
    assert one.mean == 0.375 and math.isnan(one.low) and math.isnan(one.high) and str(one) == "+0.3750"
    unknown = estimate_interval([np.array([[0.5, math.nan], [0.25, 1.0]])])
    assert {CLAIMS[0].judge(found) for found in (one, unknown)} == {"undecided (one window)"}


@pytest.mark.numerics
def test_interval_over_settings():
    """Seeds are shared by all settings, windows by those of one text."""
    d, rounding = draw(1, 32), 1e-12
    alone = estimate_interval([d])
    half = alone.high - alone.mean
    assert_interval(estimate_interval([d, d], ["books", "books"]), alone.mean, half, rounding)
    assert_interval(estimate_interval([d, d], ["books", "arxiv"]), alone.mean, half / math.sqrt(2), rounding)
    assert estimate_interval([d, -d], ["books", "books"])[:4] == (0, 0, 0, 1)
    same = estimate_interval([d, d], ["books 512", "books 1024"], corpora=["books", "books"])  # other windows of it
    assert_interval(same, alone.mean, half, rounding)
    few = estimate_interval([d, 9 * draw(1, 4)], ["books 512", "books 1024"], corpora=["books", "books"])
    assert few.parts[0][1] == 3  # degrees of freedom of the fewest windows, though their variance is the largest
    three = estimate_interval([d, d, d], "abc", corpora=["books", "books", "arxiv"])
    assert_interval(three, alone.mean, half * math.sqrt(5) / 3, rounding)
    seeds = np.repeat(draw(3, 1, number=1), 8, 1)
    alone = estimate_interval([seeds])  # more settings are not more seeds
    assert_interval(estimate_interval([seeds, seeds]), alone.mean, alone.high - alone.mean, rounding)
    assert_interval(estimate_interval([seeds, 0.9 - seeds]), 0.45, 0.0, rounding)


@pytest.mark.parametrize("remainder", [0, 2])
@pytest.mark.parametrize("seeds, windows", [(3, 32), (5, 64)])
def test_95_percent_of_intervals_contain_the_difference(seeds, windows, remainder):
    """Of 400 draws of crossed random effects at least 92% do, and not all: the intervals are not absurdly wide."""
    rng, draws = np.random.default_rng([seeds, windows, remainder]), 400
    for ratio in (0, 2, 30):  # part of the mean's deviation due to seeds, over that due to windows
        d = ratio * math.sqrt(seeds / windows) * rng.standard_normal((draws, seeds, 1))
        d = d + rng.standard_normal((draws, 1, windows)) + remainder * rng.standard_normal((draws, seeds, windows))
        found = [estimate_interval([one]) for one in d]
        assert 0.92 <= sum(one.low <= 0 <= one.high for one in found) / draws < 1, ratio
