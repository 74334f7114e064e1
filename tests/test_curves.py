"""scripts/report/curves.py: loss over a swept key, on runs whose losses are made up."""

import numpy as np
import pytest
from fake_runs import make_run

from scripts.report.__main__ import main
from scripts.report.curves import (
    Curve,
    build_table,
    collect_curves,
    compare_pairs,
    explain_variance,
    list_best,
    list_means,
    plot_curves,
)
from scripts.report.runs import load_run_records

NORMS = (0.5, 2.0, 8.0)
LOSSES = {"kern": (2.0, 1.8, 2.2), "softmax": (2.1, 1.9, 2.3)}  # at NORMS


@pytest.fixture
def folders(tmp_path):
    return [
        make_run(
            tmp_path / f"{router}-{norm}-{seed}",
            *(f"model.router={router}", f"model.gate_norm={norm}", f"run.seed={seed}"),
            end=end,
            noise=0.01,
        )
        for router, ends in LOSSES.items()
        for norm, end in zip(NORMS, ends, strict=True)
        for seed in range(3)
    ]


def collect(folders, key="model.gate_norm"):
    return collect_curves(load_run_records(folders)[0], key)


def test_table_best_and_shares(folders):
    of = collect(folders)
    assert [curve.label for curve in of.curves] == ["kern", "softmax"] and of.seeds == [0, 1, 2] and not of.notes
    head, rows = build_table(of, of.intervals())
    assert head == ["model.gate_norm", "kern", "softmax", "spread"] and [row[0] for row in rows] == ["0.5", "2", "8"]
    for row, *losses in zip(rows, *LOSSES.values(), strict=True):
        means = [float(cell.split()[0]) for cell in row[1:3]]
        assert means[1] - means[0] == pytest.approx(losses[1] - losses[0], abs=0.03)
        assert 0 < float(row[1].split("±")[1]) < 0.05  # though seeds lie 0.1 apart: all cells share that
        assert float(row[3]) == pytest.approx(abs(means[1] - means[0]), abs=2e-4)
    words = explain_variance(of)  # columns' means 2.05, 1.85, 2.25 and rows' 2, 2.1: variances 0.0267 and 0.0025
    assert "91% lies between values of model.gate_norm" in words.replace("92%", "91%").replace("90%", "91%")
    ((curve, other, verdict, _, _, holm),) = compare_pairs(of, list_best(of))[1]
    assert (curve, other, verdict) == ("kern at 2", "softmax at 2", "lower") and float(holm) < 0.05
    _, apart = build_table(of, of.deviations())
    assert all(row[1] == row[2].replace("+", "-") and -0.1 < float(row[1].split()[0]) < 0 for row in apart)
    axes, beside = plot_curves(of).axes
    assert [len(one.lines) for one in (axes, beside)] == [2, 2]
    assert axes.get_xscale() == "log" and [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "2", "8"]


def test_a_seed_does_not_choose_its_own_best():
    """Seed 0 is lucky at 4: it makes the others choose 4, and is itself at 2."""
    cells = {2.0: [1.0, 1.0, 1.0], 4.0: [0.5, 1.4, 1.4], 8.0: [1.6, 0.7, 1.6]}
    losses, best = Curve("kern", "kern", {x: np.array(of)[:, None] for x, of in cells.items()}).at_best()
    assert best == [2.0, 4.0, 4.0] and losses[:, 0].tolist() == [1.0, 1.4, 1.4]


def test_what_is_left_out_is_said(folders, tmp_path):
    half = make_run(tmp_path / "half", "model.gate_norm=4", "run.seed=0", until=0.5)
    of = collect([*folders[:-1], half])
    assert of.seeds == [0, 1]
    assert of.notes == [
        f"left out: {half}: evaluated up to step 500",
        "left out: 5 run(s) of seeds that other cells lack",
    ]
    assert collect(folders[:-3]).notes == ["softmax has no run with model.gate_norm = 8"]
    assert explain_variance(collect(folders[:-3])) == ""


def test_one_seed_decides_nothing(folders):
    of = collect(folders[::3])
    assert {row[2] for row in compare_pairs(of, list_best(of))[1]} == {"one seed"}


@pytest.mark.parametrize("values", [3, 2])
def test_curves_at_equal_values(folders, values):
    """Over the values that both have, of which the last curve may lack one."""
    of = collect(folders[: 9 + 3 * values])
    means, shared = list_means(of), of.shared
    assert shared == [*NORMS[:values]] and {x for _, x in of.deviations()} == {*shared}
    for (label, losses), curve in zip(means, of.curves, strict=True):
        assert label == curve.label
        assert np.allclose(losses, sum(curve.cells[x] for x in shared) / values, rtol=1e-12)
    ((curve, other, verdict, loss, difference, _),) = compare_pairs(of, means)[1]
    assert (curve, other, verdict) == ("kern", "softmax", "lower") and loss == f"{means[0][1].mean():.4f}"
    assert float(difference.split()[0]) == pytest.approx((means[0][1] - means[1][1]).mean(), abs=1e-4)


def test_curves_without_a_common_value(folders):
    of = collect([*folders[:6], *folders[-3:]])
    assert of.shared == [] == list_means(of) and len(plot_curves(of).axes) == 1


@pytest.mark.parametrize(
    "key, words",
    [
        ("model.router", "--over model.router: expected a key that is a number, such as run.seed, model.n_layer"),
        ("gate_norm", "--over gate_norm: expected a key that is a number"),
        ("optim.lr", "--over optim.lr: the runs that ended have 1 value(s) of it; a curve needs two"),
    ],
)
def test_bad_keys(folders, tmp_path, capsys, key, words):
    out = tmp_path / "out"
    assert main([*map(str, folders), "--over", key, "--out", str(out)]) == 2
    assert words in capsys.readouterr().err and not out.exists()


def test_the_page(folders, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*map(str, folders), "--over", "model.gate_norm", "--out", str(out)]) == 0
    printed, text = capsys.readouterr().out, (out / "report.md").read_text()
    assert "kern at 2" in printed and "kern at 2" in text and "![" in text
    assert (out / "curves.png").is_file() and (out / "report.html").is_file()
