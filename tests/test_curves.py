"""scripts/report/curves.py: loss over a swept key, on runs whose losses are made up."""

import tarfile

import numpy as np
import pytest
from fake_runs import make_run
from runs import REPO_ROOT

from scripts.report.__main__ import main
from scripts.report.curves import (
    Curve,
    build_table,
    collect_curves,
    compare_pairs,
    explain_variance,
    list_means,
    list_sections,
    plot_curves,
)
from scripts.report.runs import load_run_records

NORMS = (0.5, 2.0, 8.0)
LOSSES = {"kern": (2.0, 1.8, 2.2), "softmax": (2.1, 1.9, 2.3)}  # at NORMS


PAIRS = (("kern", 0), ("kern", 2), ("softmax", 0), ("softmax", 4))  # of router and norm


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
    head, rows = build_table(of.key, of.intervals())
    assert head == ["model.gate_norm", "0.5", "2", "8"] and [row[0] for row in rows] == ["kern", "softmax"]
    (words,) = (of.differences("kern"),)
    assert [*words] == ["minus kern's"]
    _, ((router, *apart),) = build_table(of.key, words["minus kern's"], "+")
    assert router == "softmax"
    for kern, softmax, difference, *losses in zip(*(row[1:] for row in rows), apart, *LOSSES.values(), strict=True):
        means = [float(cell.split()[0]) for cell in (kern, softmax, difference)]
        assert means[1] - means[0] == pytest.approx(losses[1] - losses[0], abs=0.03)
        assert 0 < float(kern.split("±")[1]) < 0.05  # though seeds lie 0.1 apart: all cells share that
        assert means[2] == pytest.approx(means[1] - means[0], abs=2e-4) and difference.startswith("+")
    words = explain_variance(of)  # columns' means 2.05, 1.85, 2.25 and rows' 2, 2.1: variances 0.0267 and 0.0025
    assert "91% lies between values of model.gate_norm" in words.replace("92%", "91%").replace("90%", "91%")
    tables = {title: table[1] for title, table, _ in list_sections(of, "kern")}
    for what, end in {"Gate norm": "2", "Load imbalance": "2", "Dead experts": "5"}.items():
        assert tables[f"{what} at the end"] == [[router, *[end] * 3] for router in LOSSES]
    ((curve, other, verdict, _, _, holm),) = tables["Each at its best"]
    assert (curve, other, verdict) == ("kern at 2", "softmax at 2", "lower") and float(holm) < 0.05
    axes, beside = plot_curves(of, "kern").axes
    assert [len(one.lines) for one in (axes, beside)] == [2, 2]  # the other router and zero
    assert axes.get_xscale() == "log" and [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "2", "8"]


def test_a_seed_does_not_choose_its_own_best():
    """Seed 0 is lucky at 4: it makes the others choose 4, and is itself at 2."""
    cells = {2.0: [1.0, 1.0, 1.0], 4.0: [0.5, 1.4, 1.4], 8.0: [1.6, 0.7, 1.6]}
    losses, best = Curve(("kern",), "", {x: np.array(of)[:, None] for x, of in cells.items()}).at_best()
    assert best == [2.0, 4.0, 4.0] and losses[:, 0].tolist() == [1.0, 1.4, 1.4]


def test_what_is_left_out_is_said(folders, tmp_path):
    half = make_run(tmp_path / "half", "model.gate_norm=4", "run.seed=0", until=0.5)
    of = collect([*folders[:-1], half])
    assert of.seeds == [0, 1]
    assert of.notes == [
        f"left out: {half}: evaluated up to step 500",
        "left out: 5 run(s) of seeds that other cells lack: seed 2 of softmax at 8",
    ]
    some = [folder for folder in folders if folder.name.endswith("-0") or folder.name == "kern-2.0-1"]
    words = "seed 1 of kern at 0.5; seed 1 of kern at 8; seed 1 of softmax at 0.5; 2 more"
    assert collect(some).notes == [f"left out: 1 run(s) of seeds that other cells lack: {words}"]
    assert collect(folders[:-3]).notes == ["softmax has no run with model.gate_norm = 8"]
    assert explain_variance(collect(folders[:-3])) == ""


def test_a_run_that_lost_its_losses_of_windows_is_named(folders, tmp_path, capsys):
    lost = make_run(tmp_path / "lost", "model.gate_norm=4", "run.seed=0")
    max((lost / "arrays").glob("val_*.npz")).unlink()
    assert main([str(folder) for folder in (*folders, lost)]) == 0
    said = capsys.readouterr().out
    assert f"no losses of windows in {lost}: restore" in said
    assert main([str(folder) for folder in (*folders, lost)] + ["--over", "model.gate_norm"]) == 2
    assert f"no losses of windows in {lost}: restore the file in arrays/" in capsys.readouterr().err


def test_branches_are_said_to_share_their_trunk(tmp_path):
    trunk = make_run(tmp_path / "trunk", "optim.schedule=wsd", "train.max_steps=1000")
    branches = [
        make_run(tmp_path / f"{n}", "optim.schedule=wsd", f"train.max_steps={n}", f"train.branch_from={trunk}")
        for n in (250, 500)
    ]
    (note,) = collect([trunk, *branches], "train.max_steps").notes
    assert note == f"branches share the steps of their trunk, so what a seed did to it: {trunk}"


def test_of_two_runs_of_one_seed_the_first_counts(folders, tmp_path):
    other = make_run(tmp_path / "other", f"model.gate_norm={NORMS[0]}", "run.seed=0", end=9.0)
    of = collect([*folders, other])
    assert of.notes == [f"{other} is left out: {folders[0]} has the same settings and seed"]
    assert of.curves[0].cells[NORMS[0]].mean() < 3


def test_without_losses_of_windows_means_stand_alone(folders):
    runs, _ = load_run_records(folders)
    for run in runs:
        for line in run.evaluations.values():
            del line["val/window_losses"]
    of = collect_curves(runs, "model.gate_norm")
    assert [float(cell) for cell in build_table(of.key, of.intervals())[1][0][1:]]  # no ± after the numbers
    assert {row[2] for row in compare_pairs(of, list_means(of))[1]} == {"undecided"}


def test_one_seed_decides_nothing(folders):
    of = collect(folders[::3])
    assert {row[2] for row in compare_pairs(of, list_means(of))[1]} == {"one seed"}


@pytest.mark.parametrize("values", [3, 2])
def test_curves_at_equal_values(folders, values):
    """Over the values that both have, of which the last curve may lack one."""
    of = collect(folders[: 9 + 3 * values])
    means, shared = list_means(of), of.shared
    assert shared == [*NORMS[:values]] and {x for _, x in of.differences("kern")["minus kern's"]} == {*shared}
    for (label, names, losses), curve in zip(means, of.curves, strict=True):
        assert (label, names) == (curve.label, curve.names)
        assert np.allclose(losses, sum(curve.cells[x] for x in shared) / values, rtol=1e-12)
    ((curve, other, verdict, loss, difference, _),) = compare_pairs(of, means)[1]
    assert (curve, other, verdict) == ("kern", "softmax", "lower") and loss == f"{means[0].losses.mean():.4f}"
    assert float(difference.split()[0]) == pytest.approx((means[0].losses - means[1].losses).mean(), abs=1e-4)


def make_runs(tmp_path, routers=("kern", "tanh"), more=lambda norm, steps: ()):
    """Two routers at two norms and two lengths: tanh is 0.1 above kern, norm 2 0.2 below norm 0 at 500 steps alone."""
    return [
        make_run(
            tmp_path / f"{router}-{norm}-{steps}-{seed}",
            *(f"model.router={router}", f"model.gate_norm={norm}", f"train.max_steps={steps}", f"run.seed={seed}"),
            *more(norm, steps),
            end=2.0 + 0.1 * (router == "tanh") - 0.2 * (norm == 2) * (steps == 500),
            noise=0.01,
        )
        for router in routers
        for norm in (0, 2)
        for steps in (500, 1000)
        for seed in range(2)
    ]


def test_what_routers_and_settings_are_worth(tmp_path):
    """Each where the rest is equal; pairs that differ in both are not compared."""
    of = collect(make_runs(tmp_path), "train.max_steps")
    assert [curve.label for curve in of.curves] == [
        f"{name}, gate_norm {x}" for name in ("kern", "tanh") for x in (0, 2)
    ]
    routers, norms = of.differences("kern").items()
    assert routers[0] == "minus kern's of the same settings" and norms[0] == "minus the same router's with gate_norm 0"
    assert {label for label, _ in routers[1]} == {"tanh, gate_norm 0", "tanh, gate_norm 2"}
    assert all(at.mean == pytest.approx(0.1, abs=0.03) for at in routers[1].values())
    assert {label for label, _ in norms[1]} == {"kern, gate_norm 2", "tanh, gate_norm 2"}
    for (_, steps), at in norms[1].items():
        assert at.mean == pytest.approx(-0.2 * (steps == 500), abs=0.03)
    tables = {title: table[1] for title, table, _ in list_sections(of, "kern")}
    pairs = {(row[0], row[1]) for row in tables["At equal values, mean over them"]}
    assert len(pairs) == 4 and ("kern, gate_norm 2", "tanh, gate_norm 0") not in pairs
    ((better, worse, verdict, loss, difference, _),) = tables["Routers, mean over settings too"]
    assert (better, worse, verdict) == ("kern", "tanh", "lower") and loss.startswith("1.9")
    assert float(difference.split()[0]) == pytest.approx(-0.1, abs=0.03)


def test_keys_that_change_with_the_key_make_no_curves_of_their_own(tmp_path):
    """As those of a larger model do."""
    folders = make_runs(tmp_path, more=lambda norm, steps: (f"optim.lr={steps / 1e6}", f"model.n_embd={steps // 5}"))
    of = collect(folders, "train.max_steps")
    assert len(of.curves) == 4 and "with train.max_steps also change model.n_embd, optim.lr" in of.notes
    with pytest.raises(ValueError, match="have 1 value"):
        collect(folders[:2], "train.max_steps")


def test_curves_without_a_common_value(folders):
    of = collect([*folders[:6], *folders[-3:]])
    assert of.shared == [] == list_means(of) and len(plot_curves(of, "kern").axes) == 1


def test_zero_is_drawn_left_of_the_smallest_value(tmp_path):
    of = collect([make_run(tmp_path / f"{a}-{x}", f"model.router={a}", f"model.gate_norm={x}") for a, x in PAIRS])
    axes, beside = plot_curves(of, "kern").axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2", "4"] and axes.get_xticks()[0] == 1
    assert of.shared == [0] and beside.get_lines()[0].get_xdata().tolist() == [1]
    assert [title for title, *_ in list_sections(of, "kern")][1] == "Loss minus kern's"


def test_one_curve_has_no_pairs(folders):
    titles = [title for title, *_ in list_sections(collect(folders[:9]), "kern")]
    assert titles == ["", *(f"{what} at the end" for what in ("Gate norm", "Load imbalance", "Dead experts"))]


def test_each_setting_has_its_panels(tmp_path):
    runs = make_runs(tmp_path)
    figure = plot_curves(collect(runs, "train.max_steps"), "kern")
    own, _, none, two, *_ = figure.axes
    assert len(figure.axes) == 6 and [axes.get_ylabel() for axes in (own, two)] == ["gate_norm 0", "gate_norm 2"]
    assert none.get_title().endswith("minus the same router's with gate_norm 0")
    assert len(none.get_lines()) == 1  # at zero: nothing minus itself
    assert own.get_ylim() == two.get_ylim()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["kern", "tanh"]

    figure = plot_curves(collect([run for run in runs if run.name.startswith("kern")], "train.max_steps"), "kern")
    assert len(figure.axes) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["kern, gate_norm 0", "kern, gate_norm 2"]
    kern, two = figure.axes[0].get_lines()
    assert kern.get_fillstyle() != two.get_fillstyle()


def test_long_legends_stay_in_the_picture(tmp_path):
    """Of one router with six settings."""
    given = [(lr, decay) for lr in (1e-4, 2e-4, 3e-4) for decay in (0.1, 0.2)]
    runs = [
        make_run(
            tmp_path / f"{lr}-{decay}-{norm}",
            f"optim.lr={lr}",
            f"optim.weight_decay={decay}",
            f"model.gate_norm={norm}",
        )
        for lr, decay in given
        for norm in (1, 2)
    ]
    figure = plot_curves(collect(runs), "kern")
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].get_texts()) == 6 and 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_differences_from_one_curve_are_not_independent(tmp_path):
    """Two routers minus kern: 8/5 of a difference, by 2 seeds, at three lengths that seeds move alike."""
    folders = [
        make_run(tmp_path / f"{a}-{n}-{s}", f"model.router={a}", f"train.max_steps={n}", f"run.seed={s}", noise=0.01)
        for a in ("kern", "tanh", "softmax")
        for n in (500, 1000, 2000)
        for s in range(2)
    ]
    found = collect(folders, "train.max_steps").differences("kern")["minus kern's"]
    assert [at.parts[-1][1] for at in found.values()] == [pytest.approx(8 / 5)] * 6


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


def test_negative_values_are_refused(tmp_path, capsys):
    runs = [make_run(tmp_path / str(n), f"train.checkpoint_interval={n}") for n in (-1, 0)]
    assert main([*map(str, runs), "--over", "train.checkpoint_interval", "--out", str(tmp_path / "out")]) == 2
    assert "--over train.checkpoint_interval: -1 has no place on a logarithmic axis" in capsys.readouterr().err


def test_an_unknown_baseline(folders, tmp_path, capsys):
    assert (
        main([*map(str, folders), "--over", "model.gate_norm", "--baseline", "kernel", "--out", str(tmp_path / "o")])
        == 2
    )
    assert "--baseline 'kernel': the runs have kern; softmax" in capsys.readouterr().err


def test_the_page(folders, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*map(str, folders), "--over", "model.gate_norm", "--out", str(out)]) == 0
    printed, text = capsys.readouterr().out, (out / "report.md").read_text()
    assert "kern at 2" in printed and "kern at 2" in text and "![" in text
    assert (out / "curves.png").is_file() and (out / "report.html").is_file()


@pytest.mark.parametrize(
    ("patterns", "key", "row"),
    [
        (["length-*"], "train.max_steps", ["kern, gate_norm 2", "1.8515", "1.7156", "1.6040", "1.5169"]),
        (["rates-*"], "optim.lr", ["kern, gate_norm 2", "1.8549", "1.8394", "1.9094"]),
        (
            ["balance-*", "rates-*-lr0.003-*"],
            "train.balance_loss_coef",
            ["kern, gate_norm 2", "1.8394", "1.8333", "1.8370"],
        ),
        (["balance-*-gate_norm4*"], "train.balance_loss_coef", ["kern", "1.8342", "1.8338"]),
        (["large-*", "rates-*-lr0.003-*"], "model.n_embd", ["kern, gate_norm 2", "1.8394", "1.5428"]),
        (
            ["w_out-*"],
            "optim.expert_out_lr_ratio",
            ["kern, gate_norm 2", "1.9309", "1.8475", "1.8272", "1.8477"],
        ),
        (["gamma-*"], "model.gate_norm", ["kern-nobias", "1.9497", "1.8396", "1.8386"]),
        (["block-*"], "model.gate_norm", ["kern, n_shared_expert 0, muon", "1.8048", "1.7861", "1.7966"]),
    ],
)
def test_published_records_give_the_published_losses(tmp_path, monkeypatch, patterns, key, row):
    """Of docs/results.md."""
    monkeypatch.chdir(tmp_path)
    for pattern in patterns:
        with tarfile.open(REPO_ROOT / "docs/records" / f"{pattern.partition('-')[0]}.tar.xz") as archive:
            for member in archive:
                (tmp_path / member.name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / member.name).write_bytes(archive.extractfile(member).read())
    of = collect([folder for pattern in patterns for folder in sorted(tmp_path.glob(f"runs/{pattern}"))], key)
    (found,) = (cells for cells in build_table(key, of.intervals())[1] if cells[0] == row[0])
    assert [cell.split()[0] for cell in found[1:]] == row[1:]
    assert len({*of.documents}) == 87
