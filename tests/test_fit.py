"""scripts.fit: the law of a ladder against scipy's, its intervals, what it refuses."""

import re

import numpy as np
import pytest
from fake_runs import add_checkpoint, loss_of, make_run
from matplotlib.figure import Figure
from scipy import stats
from scipy.optimize import curve_fit

import configure
from runtime.memory import flops_per_token
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


@pytest.mark.parametrize("seed", range(6))
def test_law_is_that_of_scipy(seed):
    """Of its least squares in three parameters; budgets have unequal numbers of seeds."""
    ladder = draw_ladder(seed, sd=0.02)
    ladder.losses[0] = ladder.losses[0][:1]

    def law(flops, floor, reducible, exponent):
        return floor + reducible * (flops / 1e15) ** -exponent

    means = [losses.mean() for losses in ladder.losses]
    start = (FLOOR, REDUCIBLE, EXPONENT)
    errors = 1 / np.sqrt([1, 3, 3, 3, 3])
    wanted, _ = curve_fit(law, ladder.flops, means, start, errors)
    assert fit.fit_ladder(ladder, n_draw=1).law == pytest.approx(wanted, rel=1e-3)


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


def test_a_misfit_is_reported(monkeypatch):
    """By an F-test of scipy.stats; budgets that are off by ten times the seeds' deviation."""
    ladder = draw_ladder(0)
    fitted = fit.fit_ladder(ladder, n_draw=50)
    assert "too narrow" not in fit.describe(fitted, "nats")
    ladder.losses[2] += 0.04
    ladder.losses[1] = ladder.losses[1][:2]
    fitted = fit.fit_ladder(ladder, n_draw=50)
    assert "too narrow" in fit.describe(fitted, "nats")
    curve = fitted.law.floor + fitted.law.reducible * (ladder.flops / 1e15) ** -fitted.law.exponent
    between = ([3, 2, 3, 3, 3] * (ladder.means - curve) ** 2).sum() / (5 - 3)
    within = sum(((losses - losses.mean()) ** 2).sum() for losses in ladder.losses) / 9
    wanted = stats.f.sf(between / within, 2, 9)
    assert fit.find_misfit(fitted) == pytest.approx(wanted, rel=1e-6)
    for p_value, is_said in ((0.049, True), (0.051, False)):
        monkeypatch.setattr(fit, "find_misfit", lambda _, p=p_value: p)
        assert (f"(p = {p_value})" in fit.describe(fitted, "nats")) == is_said


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


def estimate_errors(law, ratios, losses):
    """Standard errors of the floor, the reducible loss, the exponent and the loss at ten times the
    largest budget, by the delta method.
    """
    _, reducible, exponent = law
    counts = np.array([len(of_budget) for of_budget in losses])
    within = sum(((of_budget - of_budget.mean()) ** 2).sum() for of_budget in losses)
    variance = within / (counts - 1).sum()

    def differentiate(x):
        power = x**-exponent
        return np.stack([np.ones_like(x), power, -reducible * power * np.log(x)], axis=-1)

    design = differentiate(ratios)
    covariance = variance * np.linalg.inv(design.T @ (counts[:, None] * design))
    ahead = differentiate(np.array(10 * ratios.max()))
    return np.sqrt([*np.diag(covariance), ahead @ covariance @ ahead])


def test_command_fits_runs_of_a_ladder(call, tmp_path, monkeypatch):
    """Every number that it prints, and the picture's data; intervals are Student's t's."""
    runs = [make_rung(tmp_path, width, seed) for width in WIDTHS for seed in range(3)]
    pictures = []
    monkeypatch.setattr(Figure, "savefig", lambda *args, **_: pictures.append(args))
    out = call(fit.main, tmp_path, "--picture", tmp_path / "ladder.png")
    rows = re.findall(r"^(\S+).* +([\d.]+)  \[([\d.]+), ([\d.]+)\]$", out, re.M)
    assert [name for name, *_ in rows] == ["L∞", "A", "α"]
    table = np.array([row[1:] for row in rows], dtype=float)  # (3, [value, low, high])
    floor, reducible, exponent = law = table[:, 0]
    losses = {}
    for run in runs:
        losses.setdefault(count_flops(run), []).append(loss_of(run))
    flops = np.array(sorted(losses))
    losses = [np.array(losses[budget]) for budget in flops]
    centre = stats.gmean(flops)
    assert f"at {centre:.2e} FLOPs" in out

    def curve(budgets):
        return floor + reducible * (budgets / centre) ** -exponent

    # the law above is of widths, nearly one of FLOPs
    assert np.abs(curve(flops) - [of_budget.mean() for of_budget in losses]).max() < 0.03
    pattern = r"budget \((.*)\) give a loss of (\S+) \[(\S+), (\S+)\] (.*), and no budget gives "
    said = re.search(pattern, out)
    assert said[1] == f"{10 * flops.max():.2e}" and said[5] == "nats per byte"
    ahead = np.array(said.groups()[1:4], dtype=float)
    assert ahead[0] == pytest.approx(curve(10 * flops.max()), abs=1e-3)
    least = re.search(r"gives less than (\S+) \[(\S+), (\S+)\]\.", out).groups()
    assert [float(text) for text in least] == pytest.approx(table[0], abs=6e-4)
    errors = estimate_errors(law, flops / centre, losses)
    widths = [high - low for _, low, high in [*table, ahead]]
    assert widths == pytest.approx(2 * stats.t.ppf(0.975, 10) * errors, rel=0.08)
    assert ((table[:, 1] < law) & (law < table[:, 2])).all()

    ((figure, file),) = pictures
    (axes,) = figure.axes
    assert file == tmp_path / "ladder.png" and axes.get_xscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("FLOPs", "validation loss, nats per byte")
    drawn, *points, largest = axes.lines
    x, y = drawn.get_xydata().T
    assert [x[0], x[-1]] == pytest.approx([flops.min(), 10 * flops.max()])
    assert y == pytest.approx(curve(x), abs=2e-3)
    label = re.fullmatch(r"(\S+) \+ A · C\^-(\S+)", drawn.get_label()).groups()
    assert [float(text) for text in label] == pytest.approx([floor, exponent], abs=6e-4)
    assert [line.get_xydata().T.tolist() for line in points] == [
        [[budget] * 3, of_budget.tolist()] for budget, of_budget in zip(flops, losses, strict=True)
    ]
    assert set(largest.get_xdata()) == {flops.max()}
    band = axes.collections[0].get_paths()[0].vertices
    at_end = band[np.isclose(band[:, 0], x[-1]), 1]
    assert [at_end.min(), at_end.max()] == pytest.approx(ahead[1:], abs=1e-3)


@pytest.mark.parametrize(
    ("overrides", "shape", "error"),
    [
        ([], {"until": 0.5}, r"at step .*; a law is of finished runs: continue it"),
        ([], {"end": np.nan}, "val/loss is nan; a law is of finished runs"),
        (["data.name=other"], {}, "data.name is .* so their losses are of different text"),
        (["model.router=tanh"], {}, "model.router is kern and tanh; runs of a ladder differ in"),
        (["optim.name=muon"], {}, "optim.name is adamw and muon"),
        (["optim.schedule=wsd"], {}, "optim.schedule is cosine and wsd"),
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
    ("floors", "exponents"), [((1, 2), (0.01, 0.3)), ((1, 2), (0.3, 2)), ((-0.1, 2), (0.3, 0.4))]
)
def test_laws_that_reach_a_limit_are_not_decided(floors, exponents):
    draws = [fit.Law(*row) for row in zip(floors * 40, [1] * 80, exponents * 40, strict=True)]
    said = (
        f"any α from {exponents[0]:.2f} to {exponents[1]:.2f} and any L∞ from {floors[0]:.2f} to "
    )
    with pytest.raises(ValueError, match=f"{said}{floors[1]:.2f};"):
        fit.check_fit(fit.Fit(draw_ladder(0), draws[0], draws))
    inner = [fit.Law(floor, 1, exponent) for floor in (0.1, 2) for exponent in (0.3, 0.4)]
    fit.check_fit(fit.Fit(draw_ladder(0), inner[0], inner * 20))


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
