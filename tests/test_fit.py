"""scripts.fit: the law of a ladder against a profile search, its intervals, what it refuses."""

import re

import numpy as np
import pytest
from fake_runs import add_checkpoint, loss_of, make_run
from scipy import stats

import configure
from model import flops_per_token
from scripts import fit

FLOOR, REDUCIBLE, EXPONENT = 1.2, 0.5, 0.25
WIDTHS = (32, 64, 128, 256, 512)


def draw_ladder(seed: int, n_seed: int = 3, n_budget: int = 5, sd: float = 0.004) -> fit.Ladder:
    """Losses of the law above, with normal noise."""
    random = np.random.default_rng(seed)
    flops = np.geomspace(1e13, 1e17, n_budget)
    losses = []
    for mean in FLOOR + REDUCIBLE * (flops / 1e15) ** -EXPONENT:
        losses.append(mean + sd * random.standard_normal(n_seed))
    return fit.Ladder(flops, losses)


@pytest.mark.parametrize("seed", range(2))
def test_law_is_that_of_a_profile_search(seed):
    """Numpy's least squares at each of 20,000 exponents; budgets have unequal numbers of seeds."""
    ladder = draw_ladder(seed, sd=0.02)
    ladder.losses[0] = ladder.losses[0][:1]
    means = np.array([losses.mean() for losses in ladder.losses])
    roots = np.sqrt([1, 3, 3, 3, 3])
    best = (np.inf, None)
    for exponent in np.geomspace(0.02, 1.5, 20_000):
        design = np.stack([np.ones(5), (ladder.flops / 1e15) ** -exponent], axis=1)
        found, squares, *_ = np.linalg.lstsq(design * roots[:, None], means * roots, rcond=None)
        best = min(best, (squares[0], [*found, exponent]))
    law = fit.fit_ladder(ladder, n_draw=1).law
    assert law == pytest.approx(best[1], rel=1e-3)


@pytest.mark.slow
def test_intervals_hold_the_truth_in_95_percent_of_ladders():
    n_ladder = 400
    covered = np.zeros(3)
    for seed in range(n_ladder):
        fitted = fit.fit_ladder(draw_ladder(seed), n_draw=150)
        truths = (FLOOR, REDUCIBLE, EXPONENT)
        for i, values in enumerate(zip(*fitted.draws, strict=True)):
            low, high = fitted.find_interval(values)
            covered[i] += low <= truths[i] <= high
    shares = covered / n_ladder
    assert (shares > 0.93).all() and (shares < 0.97).all(), shares


def test_a_misfit_is_reported():
    """By an F-test of scipy.stats; budgets that are off by ten times the seeds' deviation."""
    ladder = draw_ladder(0)
    fitted = fit.fit_ladder(ladder, n_draw=50)
    assert "too narrow" not in fit.describe(fitted, "nats")
    ladder.losses[2] += 0.04
    fitted = fit.fit_ladder(ladder, n_draw=50)
    assert "too narrow" in fit.describe(fitted, "nats")
    curve = fitted.law.floor + fitted.law.reducible * (ladder.flops / 1e15) ** -fitted.law.exponent
    between = 3 * ((ladder.means - curve) ** 2).sum() / (5 - 3)
    within = np.mean([losses.var(ddof=1) for losses in ladder.losses])
    wanted = stats.f.sf(between / within, 2, 10)
    assert fit.find_misfit(fitted) == pytest.approx(wanted, rel=1e-6)


def make_rung(folder, width: int, seed: int, *overrides: str, **shape):
    """A run of a small model on 200 steps for each channel, with a loss of the law."""
    given = [
        f"model.n_embd={width}",
        f"model.n_head={width // 32}",
        f"train.max_steps={200 * width}",
        f"run.seed={2 * seed}",  # losses of odd seeds are shifted
    ]
    file = folder / f"{width}-{seed}"
    shape = {"end": FLOOR + REDUCIBLE * (width / 128) ** -1.0, "noise": 0.003} | shape
    return make_run(file, *given, *overrides, **shape)


def count_flops(folder) -> float:
    config = configure.load(folder / "config.toml")
    tokens = config.train.max_steps * config.train.batch_size * config.model.block_size
    return tokens * flops_per_token(config.model)


def test_command_fits_runs_of_a_ladder(call, tmp_path):
    runs = [make_rung(tmp_path, width, seed) for width in WIDTHS for seed in range(3)]
    out = call(fit.main, tmp_path, "--picture", tmp_path / "ladder.png")
    values = {}
    for line in out.splitlines():
        row = re.match(r"(\S+).* ([\d.]+)  \[([\d.]+), ([\d.]+)\]$", line)
        if row:
            values[row[1]] = [float(x) for x in row.groups()[1:]]
    flops = np.array([count_flops(run) for run in runs])
    losses = np.array([loss_of(run) for run in runs])
    centre = stats.gmean(flops)
    curve = values["L∞"][0] + values["A"][0] * (flops / centre) ** -values["α"][0]
    assert np.abs(curve - losses).max() < 0.03  # the law above is of widths, nearly one of FLOPs
    for value, low, high in values.values():
        assert low < value < high
    assert f"{10 * flops.max():.2e}" in out and (tmp_path / "ladder.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("overrides", "shape", "error"),
    [
        ([], {"until": 0.5}, r"at step .*; a law is of finished runs: continue it"),
        ([], {"end": np.nan}, "validation loss was not finite at step"),
        (["data.name=other"], {}, "data.name is .* so their losses are of different text"),
        (["model.router=tanh"], {}, "model.router is kern and tanh; runs of a ladder differ in"),
        (["optim.name=muon"], {}, "optim.name is adamw and muon"),
    ],
)
def test_runs_that_are_no_ladder_are_refused(call, tmp_path, overrides, shape, error):
    for width in WIDTHS[:4]:
        for seed in range(2):
            make_rung(tmp_path, width, seed)
    make_rung(tmp_path, WIDTHS[4], 0, *overrides, **shape)
    assert re.search(error, call(fit.main, tmp_path, code=2))


def test_other_mixtures_are_refused(call, tmp_path):
    folders = {}
    for width in WIDTHS:
        for seed in range(2):
            folders[width, seed] = make_rung(tmp_path / "runs", width, seed)
    add_checkpoint(folders[32, 0], data="d", tokenizer="one")
    add_checkpoint(folders[64, 0], data="d", tokenizer="two")
    assert "tokenizer (sha256" in call(fit.main, tmp_path, code=2)
    again = make_rung(tmp_path / "again", 64, 1, "optim.lr=1e-3")
    out = call(fit.main, folders[64, 1], again, code=2)
    assert "both spend" in out and "with seed 2" in out
    branch = make_rung(tmp_path / "initial", 64, 1, "train.init_from=runs/other")
    assert "train.init_from = runs/other, whose FLOPs" in call(fit.main, branch, code=2)
    (folders[32, 1] / "metrics.jsonl").write_text("{")
    assert str(folders[32, 1]) in call(fit.main, folders[32, 1], folders[128, 1], code=2)


@pytest.mark.parametrize(
    ("widths", "n_seed", "noise", "error"),
    [
        (WIDTHS[:3], 3, 0.003, r"too few: 3 budget\(s\), and a law with three parameters needs 4"),
        (WIDTHS, 1, 0.003, "too few: intervals need the differences between seeds"),
        (WIDTHS, 2, 0.4, "too few: the runs allow any α from"),
    ],
)
def test_too_few_runs_are_refused(call, tmp_path, widths, n_seed, noise, error):
    for width in widths:
        for seed in range(n_seed):
            make_rung(tmp_path, width, seed, noise=noise)
    assert re.search(error, call(fit.main, tmp_path, code=2))
