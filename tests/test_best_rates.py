"""studies.best_rates: runs with known best rates, and intervals over simulated sweeps."""

from pathlib import Path

import numpy as np
import pytest
from fake_runs import loss_of, make_run

from studies import best_rates

CONFIGS = Path(best_rates.__file__).with_name("config")
RATES = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2)


def bend(rate: float, best: float, curvature: float = 0.03) -> float:
    """A loss that is lowest, 1.5, at `best`."""
    return 1.5 + curvature * np.log2(rate / best) ** 2


def make_sweep(folder: Path, optimizer: str, best: float, lift: float, seeds=range(3)) -> None:
    """Runs of muon.toml, whose losses a seed moves alike for all rates."""
    for rate in RATES:
        for seed in seeds:
            given = [f"optim.name={optimizer}", f"optim.lr={rate}", f"run.seed={seed}"]
            make_run(
                folder / f"{optimizer}-{rate}-{seed}",
                *given,
                file=CONFIGS / "muon.toml",
                end=lift + bend(rate, best),
                noise=0.01,
            )


def test_best_rates_and_the_difference_of_optimizers(tmp_path, capsys):
    make_sweep(tmp_path, "adamw", 2.5e-3, 0.02)
    make_sweep(tmp_path, "muon", 5e-3, 0.0, seeds=[1, 2])  # paired by number, not by place
    given = ["optim.name=muon", "optim.lr=3e-3", "run.seed=0"]
    make_run(tmp_path / "stopped", *given, file=CONFIGS / "muon.toml", until=0.5)
    picture = tmp_path / "best.png"
    rates, difference = best_rates.tabulate([str(tmp_path), "--picture", str(picture)])
    assert [row["seeds"] for row in rates.rows] == ["3", "2"]
    for row, best in zip(rates.rows, (0.0025, 0.005), strict=True):
        # moves by seeds alone leave no residual: the interval is the point
        assert row["best rate, 95%"] == f"{best:.3g} [{best:.3g}, {best:.3g}]"
    lifted = [loss_of(tmp_path / f"adamw-0.003-{seed}") for seed in range(3)]
    wanted = np.mean(lifted) - bend(3e-3, 2.5e-3) + 1.5
    assert float(rates.rows[0]["loss at it"]) == pytest.approx(wanted, abs=1e-4)
    (row,) = difference.rows
    assert list(row.values()) == ["**optim adamw**", "**optim muon**", "+0.0200", "2"]
    assert "5 of 30 runs of muon.toml are missing" in capsys.readouterr().err
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(("best", "said"), [(1e-4, "or below"), (4e-2, "or above")])
def test_a_minimum_at_the_end_is_not_extrapolated(tmp_path, best, said):
    make_sweep(tmp_path, "adamw", best, 0.0, seeds=[0])
    (rates,) = best_rates.tabulate([str(tmp_path)])
    assert said in rates.rows[0]["best rate, 95%"]
    assert "loss at it" not in rates.rows[0]


def test_other_shapes_are_held_against_the_first(tmp_path):
    """Width 128's best rate is twice that of width 64 with the same transfer."""
    for transfer, width, best in (("mup", 64, 4e-3), ("mup", 128, 8e-3), ("none", 64, 3e-3)):
        for rate in (1.5e-3, 3e-3, 5.2e-3, 8.5e-3, 1.6e-2):
            given = {
                "model.n_embd": width,
                "model.n_head": width // 32,
                "model.n_expert": 64,
                "model.top_k": 8,
                "model.expert_hidden": width // 16,
                "optim.transfer": transfer,
                "optim.lr": rate,
            }
            make_run(
                tmp_path / f"{transfer}-{width}-{rate}",
                *(f"{key}={value}" for key, value in given.items()),
                file=CONFIGS / "mup.toml",
                end=bend(rate, best),
            )
    (table,) = best_rates.tabulate([str(tmp_path)])
    first, second, other = table.rows
    assert "over the first's rate" not in first.keys() | other.keys()
    assert second["over the first's rate"] == "2.00"
    losses = {}
    for rate in (5.2e-3, 8.5e-3):  # nearest to 4e-3, as a ratio; the lowest of width 128
        losses[rate] = loss_of(tmp_path / f"mup-128-{rate}")
    excess = losses[5.2e-3] / losses[8.5e-3] - 1
    assert second["more loss at the first's rate"] == f"{excess:.2%}"


@pytest.mark.parametrize(("n_seed", "sd"), [(2, 0.003), (3, 0.003), (2, 0.012)])
def test_intervals_hold_the_truth_in_95_percent_of_sweeps(n_seed, sd):
    """Grids of √2, with normal noise and a shift for each seed."""
    rates = 3e-3 * 2.0 ** np.arange(-2, 2.5, 0.5)
    truth = 3.4e-3
    n_sweep = 400
    covered = 0
    random = np.random.default_rng(1)
    for _ in range(n_sweep):
        losses = bend(rates, truth)[:, None] + 0.1 * random.standard_normal(n_seed)
        losses = losses + sd * random.standard_normal(losses.shape)
        curve = best_rates.Curve("", None, list(range(n_seed)), rates, losses)
        best = best_rates.find_best(curve)
        covered += best is None or best.low <= truth <= best.high
        assert best is None or 0.7499e-3 < best.low <= best.high < 12.001e-3  # the rates tried
    assert 0.93 < covered / n_sweep < 0.98
