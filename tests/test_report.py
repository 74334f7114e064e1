"""scripts/report: intervals, what is paired with what, verdicts, the paper's numbers, tables, pictures, the page."""

import base64
import io
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import zlib
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.text import Text

import configure
import scripts.report.__main__ as report
from eval.pages import write_page
from eval.paper import NUMBERS, read_paper_losses
from eval.style import STYLES, style
from runtime import checkpoint
from runtime.output import text_table
from scripts.report import page, pictures, tables
from scripts.report.claims import CLAIMS, MARGIN, Interval, estimate_interval, judge_claims, pair_differences
from scripts.report.runs import group_runs, load_run_record, load_run_records

REPO_ROOT = Path(__file__).parents[1]
CONFIG = REPO_ROOT / "config"
RESULTS = REPO_ROOT.parent / "shared/paper/results.json"


# ---- made-up runs


def invent(folder, *overrides, file=CONFIG / "small.toml", **shape):
    """The folder of a run that nobody trained, of kern and seed 0 by default; `shape` is that of its `lines`."""
    config = configure.load(file, ["run.seed=0", "model.router=kern", *overrides])
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(configure.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(config, **shape)))
    return folder


def lines(config, end=2.0, early=0.0, noise=0.0, points=10, windows=8, until=1.0, without=()):
    """Lines of a metrics.jsonl. The loss falls to `end`, with `early` more at the beginning; seeds and windows move it,
    all routers alike, but for `noise`. It is evaluated `points` times up to `until`, a part of max_steps. `without` are
    beginnings of keys to leave out."""
    model, steps = config.model, config.train.max_steps
    own = np.random.default_rng([config.run.seed, zlib.crc32(model.router.encode())])
    shift = 0.1 * config.run.seed + noise * own.standard_normal()
    text = 0.2 * np.random.default_rng(7).standard_normal(windows) + noise * own.standard_normal(windows)
    shares = own.dirichlet(np.ones(model.n_expert), model.n_layer)
    moe = model.router != "dense"
    found = []
    for i in range(round(points * until) + 1):
        step = steps * i // points
        at = {"step": step, "tokens": step * config.train.batch_size * model.block_size}
        left = 1 - i / points
        losses = end + early * left + 3 * left**4 + shift + text
        if i:
            line = at | {"train/loss": float(losses[0]), "perf/tokens_per_sec": 1000.0 + i, "perf/step_ms": 100.0 + i}
            if moe:
                line |= {"router/load_imbalance": 2 + left, "router/entropy": 3 + left, "router/zero_gates": 0.125}
                line |= {"router/dead_experts": 3, "router/loads": shares.tolist()}
            if model.router.startswith("kern"):
                line |= {"router/gamma": 1.5 - left / 2}
            found.append(line)
        line = at | {"val/loss": float(losses.mean()), "val/window_losses": losses.tolist()}
        if moe:
            line |= {"val/load_imbalance": 2 + left, "val/loads": np.floor(1000 * shares).tolist()}
        found.append(line)
    return [{key: value for key, value in line.items() if not key.startswith(tuple(without))} for line in found]


def settings_in(*folders):
    return group_runs([load_run_record(folder) for folder in folders])[0]


def judged(*folders):
    """{words of a claim: Finding}"""
    return {finding.words: finding for finding in judge_claims(settings_in(*folders))}


def verdicts(*folders):
    """{words of a claim: its verdict in the one setting that there is}"""
    return {words: finding.cells[""][1] for words, finding in judged(*folders).items()}


def trained_on(folder, step=100, **facts):
    """Gives the run a checkpoint's manifest with those facts."""
    path = checkpoint.folder_of(folder / "checkpoints", step)
    path.mkdir(parents=True)
    body = {"step": step, "files": {".metadata": {"bytes": 1, "sha256": "0"}}, "facts": facts}
    (path / checkpoint.MANIFEST).write_text(checkpoint._manifest_text(body))
    return path


# ---- intervals

T = {3: 3.182446, 5: 2.570582, 10: 2.228139, 30: 2.042272, 120: 1.979930}  # from the tables


def test_interval_where_windows_are_alike_is_students_over_seeds():
    means = [0.3, -0.1, 0.25, 0.4]
    found = estimate_interval([np.repeat(np.array(means)[:, None], 50, 1)])
    mean, half = statistics.fmean(means), T[3] * statistics.stdev(means) / 2
    assert found == pytest.approx((mean, mean - half, mean + half, 4))


def test_interval_of_one_seed_is_students_over_windows():
    losses = [0.3, -0.1, 0.25, 0.4, 0.1, -0.2]
    found, half = estimate_interval([np.array([losses])]), T[5] * statistics.stdev(losses) / math.sqrt(6)
    assert found.seeds == 1 and found.mean == pytest.approx(0.125)
    assert (found.low, found.high) == pytest.approx((0.125 - half, 0.125 + half))


def test_interval_weighs_seeds_and_windows():
    """Cochran and Cox, by plain arithmetic: each quantile has the weight of its variance."""
    d = np.random.default_rng(0).normal(size=(4, 6)) + np.array([[0], [1], [2], [0.5]])
    seeds = statistics.variance(d.mean(1).tolist()) / 4
    windows = statistics.variance(d.mean(0).tolist()) / 6
    t = (T[3] * seeds + T[5] * windows) / (seeds + windows)
    found = estimate_interval([d])
    assert found.high - found.mean == pytest.approx(t * math.sqrt(seeds + windows), rel=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_interval_at_its_limits():
    assert estimate_interval([np.zeros((3, 8))]) == (0, 0, 0, 3)  # a run against itself
    assert str(estimate_interval([np.zeros((3, 8))])) == "+0.0000 [+0.0000, +0.0000]"
    one = estimate_interval([np.array([[0.5], [0.25]])])
    assert one.mean == 0.375 and math.isnan(one.low) and math.isnan(one.high)
    assert str(one) == "+0.3750"
    unknown = estimate_interval([np.array([[0.5, math.nan], [0.25, 1.0]])])
    assert {CLAIMS[0].judge(found) for found in (one, unknown)} == {"undecided (one window)"}


def test_interval_over_settings():
    """Seeds are shared by all settings, windows by those of one text."""
    d = np.random.default_rng(1).normal(size=(1, 32))
    alone = estimate_interval([d])
    width = alone.high - alone.low
    same, other = estimate_interval([d, d], ["books", "books"]), estimate_interval([d, d], ["books", "arxiv"])
    assert same == pytest.approx(alone)
    assert other.high - other.low == pytest.approx(width / math.sqrt(2))
    assert estimate_interval([d, -d], ["books", "books"]) == (0, 0, 0, 1)
    seeds = np.repeat([[0.1], [0.2], [0.6]], 8, 1)
    assert estimate_interval([seeds, seeds]) == pytest.approx(
        estimate_interval([seeds])
    )  # more settings are not more seeds
    assert estimate_interval([seeds, 0.9 - seeds])[:3] == pytest.approx((0.45, 0.45, 0.45))


RATIOS = (0, 1, 2, 3, 30)  # part of the mean's deviation due to seeds, over that due to windows


@pytest.mark.parametrize("left_over", [0, 2])
@pytest.mark.parametrize("seeds, windows", [(3, 32), (3, 128), (5, 32), (5, 64)])
def test_intervals_hold_the_difference_as_often_as_they_say(seeds, windows, left_over):
    """Of crossed random effects at least 94% of the intervals hold the mean, and they are not absurdly wide."""
    rng, draws = np.random.default_rng([seeds, windows, left_over]), 1500
    for ratio in RATIOS:
        shape = (draws, seeds, windows)
        d = ratio * math.sqrt(seeds / windows) * rng.standard_normal((draws, seeds, 1))
        d = d + rng.standard_normal((draws, 1, windows)) + left_over * rng.standard_normal(shape)
        found = [estimate_interval([one]) for one in d]
        holds = sum(one.low <= 0 <= one.high for one in found) / draws
        assert 0.94 <= holds <= 0.995, ratio


def test_intervals_over_group_runs_one_corpus_hold_the_difference():
    """Four settings that share windows and seeds: taken for other windows, two thirds of the intervals would."""
    rng, draws, holds, apart = np.random.default_rng(3), 1500, 0, 0
    for _ in range(draws):
        common = 0.2 * rng.standard_normal((3, 1)) + 3 * rng.standard_normal(32)
        settings = [common + 0.3 * rng.standard_normal((3, 32)) for _ in range(4)]
        together = estimate_interval(settings, ["books"] * 4)
        holds += together.low <= 0 <= together.high
        wrong = estimate_interval(settings)
        apart += wrong.low <= 0 <= wrong.high
    assert 0.94 <= holds / draws <= 0.995
    assert apart / draws < 0.85


# ---- pairing


def test_differences_are_of_seeds_in_common(tmp_path):
    kern = [invent(tmp_path / f"kern{seed}", f"run.seed={seed}", "model.router=kern", end=1.5) for seed in (0, 1, 3)]
    dense = [invent(tmp_path / f"dense{seed}", f"run.seed={seed}", "model.router=dense") for seed in (2, 3, 1)]
    (setting,) = settings_in(*kern, *dense)
    assert setting.counterpart(setting.arms[0], "kern") is setting.arms[1]
    left, right = (next(arm for arm in setting.arms if arm.router == router) for router in ("kern", "dense"))
    assert (left.seeds, right.seeds) == ([0, 1, 3], [1, 2, 3])
    d = pair_differences(left, right, setting.end)
    assert d.shape == (2, 8)
    np.testing.assert_allclose(d, -0.5)  # what seeds and windows add is the same in both
    assert pair_differences(left, right, setting.end, [3]).shape == (1, 8)


def test_runs_without_seeds_in_common_are_not_compared(tmp_path):
    runs = [
        invent(tmp_path / router, f"run.seed={i}", f"model.router={router}")
        for i, router in enumerate(("kern", "dense"))
    ]
    (setting,) = settings_in(*runs)
    assert all(setting.counterpart(arm, other.router) is None for arm in setting.arms for other in setting.arms)
    assert judge_claims([setting]) == []


@pytest.mark.parametrize("what", ["data", "tokenizer"])
def test_runs_of_other_data_are_refused(tmp_path, what):
    facts = {"data": "sha of the text", "tokenizer": "sha of GPT-2's", "wandb": "id"}
    dense, softmax, kern = (
        invent(tmp_path / router, f"model.router={router}") for router in ("dense", "softmax", "kern")
    )
    elsewhere = invent(tmp_path / "elsewhere", "data.name=other")
    trained_on(dense, **facts)
    trained_on(elsewhere, **facts | {what: "else"})
    assert len(settings_in(dense, softmax, kern, elsewhere)) == 2  # one has no checkpoint to tell
    trained_on(kern, 200, **facts | {what: "else"})
    trained_on(kern, 100, **facts)  # the last counts
    with pytest.raises(ValueError, match=rf"{dense} and {kern}: {what} .* is sha of .* and else.* report them apart"):
        settings_in(dense, softmax, kern)
    (kern / "checkpoints/step_00000200/manifest.json").write_text("damaged")
    assert len(settings_in(dense, softmax, kern)) == 1


def test_runs_of_other_windows_are_refused(tmp_path):
    runs = invent(tmp_path / "dense", "model.router=dense"), invent(tmp_path / "kern", windows=9)
    with pytest.raises(ValueError, match=r"dense and .*kern: number of validation windows is 8 and 9.*; report"):
        settings_in(*runs)


def test_a_run_counts_once(tmp_path):
    runs = [invent(tmp_path / name, "train.micro_batch_size=4", f"log.interval={i}") for i, name in enumerate("ab", 1)]
    settings, notes = group_runs([load_run_record(folder) for folder in runs])
    assert [run.folder for run in settings[0].runs] == runs[:1]
    assert notes == [f"{runs[1]} is left out: {runs[0]} has the same settings and seed"]


def test_unfinished_runs_are_compared_at_the_last_step_that_all_have(tmp_path):
    kern = invent(tmp_path / "kern", "model.router=kern", until=0.7)
    dense = invent(tmp_path / "dense", "model.router=dense", end=3, until=0.9)
    settings, notes = group_runs([load_run_record(kern), load_run_record(dense)])
    assert (settings[0].end, settings[0].max_steps) == (700, 1000)
    assert notes == [
        f"unfinished or diverged: {dense} (evaluated up to step 900), {kern} (evaluated up to step 700). All are "
        f"compared at step 700 of 1,000, and no claim about the end is judged"
    ]
    assert [finding.words for finding in judge_claims(settings)] == ["kern is below dense at a tenth already"]


def test_diverged_runs_are_named(tmp_path):
    kern, dense = (
        invent(tmp_path / "kern", "model.router=kern", until=0.3),
        invent(tmp_path / "dense", "model.router=dense", until=0.9),
    )
    with (kern / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "tokens": 819200, "train/loss": NaN, "perf/step_ms": 1.0}\n')
        file.write('{"step": 400, "tokens": 819200, "val/loss": NaN, "val/window_losses": [NaN, NaN]}\n')
    settings, (note,) = group_runs([load_run_record(kern), load_run_record(dense)])
    assert settings[0].end == 300
    assert f"unfinished or diverged: {dense} (evaluated up to step 900), {kern} (" in note
    assert "(evaluated up to step 300, loss not finite at 400). All are compared" in note


def test_what_is_not_at_its_end_does_not_spoil_what_is(tmp_path):
    """Nor does a run that was begun once more in another folder."""
    kern, dense = invent(tmp_path / "kern", "model.router=kern"), invent(tmp_path / "dense", "model.router=dense")
    early = invent(tmp_path / "early", "model.router=tanh", until=0.2)
    again = invent(tmp_path / "again", "model.router=kern", until=0.5)
    (tmp_path / "failed").mkdir()
    runs, left_out = load_run_records([again, early, tmp_path / "failed", kern, dense])
    assert [line.split(":")[:2] for line in left_out] == [["left out", f" {tmp_path / 'failed'}"]]
    (setting,), notes = group_runs(runs)
    assert setting.end == 1000 and {run.folder for run in setting.runs} == {kern, dense}
    assert sorted(notes) == [
        f"{again} is left out: evaluated up to step 500 of 1,000",
        f"{early} is left out: evaluated up to step 200 of 1,000",
    ]


def test_of_a_run_that_is_there_twice_the_one_counts_that_came_further(tmp_path):
    runs = [invent(tmp_path / name, "model.router=kern", until=until) for name, until in (("a", 0.2), ("b", 0.6))]
    (setting,), (note, _) = group_runs([load_run_record(run) for run in runs])
    assert [run.folder for run in setting.runs] == [runs[1]]
    assert note == f"{runs[0]} is left out: {runs[1]} has the same settings and seed"


def test_arms_equally_alike_are_all_judged(tmp_path):
    """At two gate scales each; a label picks the one to subtract."""
    runs = [
        invent(tmp_path / f"{router}{scale}{seed}", f"model.router={router}", f"model.gate_scale={scale}",
               f"run.seed={seed}", end=end)
        for router, scale, end in (("kern", 1.0, 2.0), ("kern", 3.0, 1.5), ("softmax", 1.0, 2.5), ("softmax", 18.0, 2))
        for seed in (0, 1, 2)
    ]  # fmt: skip
    (setting,), _ = group_runs([load_run_record(run) for run in runs])
    words = [
        finding.words for finding in judge_claims([setting]) if "softmax" in finding.words and "ends" in finding.words
    ]
    assert words == [
        "kern ends below softmax (gate_scale 1)",
        "kern ends below softmax (kern, gate_scale 3; softmax, gate_scale 1)",
        "kern ends below softmax (kern, gate_scale 3; softmax, gate_scale 18)",
    ]
    assert (
        report.find_ambiguous([setting], "kern") != [] and report.find_ambiguous([setting], "kern, gate_scale 3") == []
    )
    labels = {arm.label: setting.counterpart(arm, "kern, gate_scale 3") for arm in setting.arms}
    assert labels.pop("kern, gate_scale 3") is None
    assert {other.label for other in labels.values()} == {"kern, gate_scale 3"}


def test_runs_without_a_common_step_are_refused(tmp_path):
    runs = []
    for router, step in (("dense", 300), ("kern", 700)):
        runs.append(invent(tmp_path / router, f"model.router={router}"))
        (runs[-1] / "metrics.jsonl").write_text(f'{{"step": {step}, "tokens": 1, "val/loss": 2.0}}\n')
    with pytest.raises(ValueError, match=r"evaluated at no common step .*dense at 300 .*kern at 700"):
        settings_in(*runs)


def test_constants_of_routers_make_arms(tmp_path):
    given = [
        ("softmax", "train.balance_loss_coef=0.0"),
        ("softmax", "train.balance_loss_coef=0.01"),
        ("kern", "train.balance_loss_coef=0.01"),
        ("kern", "train.balance_loss_coef=0.0"),
        ("sigmoid-renorm", "train.bias_update_rate=0.001"),
        ("tanh", "model.gate_scale=0.2992"),
    ]
    runs = [invent(tmp_path / str(i), f"model.router={router}", rest) for i, (router, rest) in enumerate(given)]
    (setting,) = settings_in(*runs)
    plain = ", gate_scale 1, balance_loss_coef {}, bias_update_rate {}"
    arms = {arm.label: arm for arm in setting.arms}
    assert list(arms) == [
        "softmax" + plain.format("0", "0"),
        "softmax" + plain.format("0.01", "0"),
        "tanh, gate_scale 0.2992, balance_loss_coef 0, bias_update_rate 0",
        "kern" + plain.format("0", "0"),
        "kern" + plain.format("0.01", "0"),
        "sigmoid-renorm" + plain.format("0", "0.001"),
    ]
    softmax, balanced, tanh, kern, balanced_kern, deepseek = arms.values()
    assert setting.counterpart(softmax, "kern") is kern
    assert setting.counterpart(balanced, "kern") is balanced_kern
    assert setting.counterpart(balanced_kern, "softmax") is balanced
    assert setting.counterpart(deepseek, "kern") is kern and setting.counterpart(tanh, "kern") is kern
    assert setting.counterpart(kern, "kern") is None and setting.counterpart(kern, "dense") is None
    words = [finding.words for finding in judge_claims([setting])]
    assert "kern ends below softmax (gate_scale 1, balance_loss_coef 0.01, bias_update_rate 0)" in words
    assert f"kern ends below tanh ({balanced_kern.label}; {tanh.label})" in words
    looks = [pictures.style_arm(setting, arm) for arm in (softmax, balanced)]
    assert looks[0]["color"] == looks[1]["color"] and looks[0]["fillstyle"] != looks[1]["fillstyle"]


def test_settings_are_told_apart_by_what_moves_a_loss(tmp_path):
    given = [("arxiv", 128), ("books3", 32), ("arxiv", 32), ("books3", 128)]
    runs = [
        invent(tmp_path / f"{router}{i}", f"model.router={router}", f"data.name={name}", f"model.n_expert={n}")
        for i, (name, n) in enumerate(given)
        for router in ("kern", "softmax")
    ]
    settings = settings_in(*runs)
    labels = [f"n_expert {n}, {name}" for n in (32, 128) for name in ("arxiv", "books3")]
    assert [setting.label for setting in settings] == labels
    assert all([arm.label for arm in setting.arms] == ["softmax", "kern"] for setting in settings)

    same = ["eval.interval=50", "train.micro_batch_size=4", "train.device=cpu", "data.dir=/elsewhere", "log.group=x"]
    other = ["optim.lr=1e-4", "train.batch_size=16", "model.top_k=4", "eval.windows=64", "train.dtype=bfloat16"]
    runs = [invent(tmp_path / f"x{i}", text) for i, text in enumerate(["run.seed=0", *same, *other])]
    settings = settings_in(*runs)
    assert len(settings) == 1 + len(other) and len({setting.label for setting in settings}) == len(settings)


# ---- claims


def pair(folder, left, right, seeds=3, gap=0.0, noise=0.0, early=0.0, overrides=(), **shape):
    """Runs of two routers; `left` ends `gap` above `right`, and is `early` more above it at the beginning."""
    return [
        invent(
            folder / f"{router}{seed}",
            f"run.seed={seed}",
            f"model.router={router}",
            *overrides,
            noise=noise,
            **shape,
            **({"end": 2 + gap, "early": early} if router == left else {"end": 2.0}),
        )
        for router in (left, right)
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(
    "gap, noise, seeds, verdict",
    [
        (-0.1, 0.005, 3, "supported"),
        (0.1, 0.005, 3, "contradicted"),
        (-0.1, 0.2, 3, "undecided"),
        (0.0, 0.0, 3, "undecided"),
        (-0.1, 0.005, 1, "undecided (one seed)"),
    ],
)
def test_verdicts(tmp_path, gap, noise, seeds, verdict):
    found = judged(*pair(tmp_path, "kern", "softmax", seeds, gap, noise))["kern ends below softmax"]
    difference, said = found.cells[""]
    assert said == verdict and difference.seeds == seeds
    assert difference.mean == pytest.approx(gap, abs=4 * noise + 1e-9)
    assert found.overall is None


@pytest.mark.parametrize(
    "low, high, verdict",
    [(-2, -1, "supported"), (-2, 1, "undecided"), (-1, 2, "undecided"), (1, 2, "contradicted"), (-1, 0, "undecided")],
)
def test_an_interval_that_contains_zero_is_undecided(low, high, verdict):
    assert CLAIMS[0].judge(Interval((low + high) / 2, low, high, 3)) == verdict


@pytest.mark.parametrize(
    "gap, noise, verdict",
    [(0.8, 0.02, "supported"), (-0.8, 0.02, "supported"), (1.0, 0.05, "undecided"), (1.5, 0.02, "contradicted")]
    + [(-1.5, 0.02, "contradicted"), (0.0, 1.0, "undecided")],
)
def test_an_equal_loss_is_one_within_the_margin(tmp_path, gap, noise, verdict):
    runs = pair(tmp_path, "kern-mc", "kern", gap=gap * MARGIN, noise=noise * MARGIN)
    assert verdicts(*runs)["kern-mc ends like kern"] == verdict


@pytest.mark.parametrize(
    "top_k, said",
    [(8, {"kern-norelu ends like kern, few active"}), (32, set()), (64, {"kern ends below kern-norelu, all active"})],
)
def test_claims_of_few_or_all_active_experts(tmp_path, top_k, said):
    runs = pair(tmp_path, "kern", "kern-norelu", overrides=[f"model.top_k={top_k}"])
    assert verdicts(*runs).keys() == said


def test_claims_at_a_tenth(tmp_path):
    """kern begins worse than dense and ends better."""
    said = verdicts(*pair(tmp_path, "kern", "dense", gap=-0.2, early=1.0, noise=0.01))
    assert said == {"kern ends below dense": "supported", "kern is below dense at a tenth already": "contradicted"}


@pytest.mark.parametrize("points, steps", [(4, 1000), (2, 4)])
def test_a_tenth_that_was_not_evaluated_is_not_judged(tmp_path, points, steps):
    """A tenth of 4 steps is no step, least of all the one before training."""
    overrides = [f"train.max_steps={steps}", "optim.warmup_steps=1"]
    said = verdicts(*pair(tmp_path, "kern", "dense", overrides=overrides, points=points))
    assert said.keys() == {"kern ends below dense"}


def test_claims_over_settings(tmp_path):
    """In all of them: by the seeds that all have."""
    runs = [
        run
        for name, seeds, gap in (("arxiv", 2, -0.2), ("books3", 3, 0.1))
        for run in pair(tmp_path / name, "kern", "softmax", seeds, gap, 0.002, overrides=[f"data.name={name}"])
    ]
    found = judged(*runs)["kern ends below softmax"]
    assert {label: cell[1] for label, cell in found.cells.items()} == {"arxiv": "supported", "books3": "contradicted"}
    assert [cell[0].seeds for cell in found.cells.values()] == [2, 3]
    over_all, verdict = found.overall
    assert over_all.seeds == 2 and over_all.mean == pytest.approx(-0.05, abs=0.01) and verdict == "mixed"

    apart = pair(tmp_path / "x", "kern", "softmax", 1, overrides=["data.name=arxiv"])
    for router in ("kern", "softmax"):
        apart.append(invent(tmp_path / f"y{router}", "run.seed=1", f"model.router={router}", "data.name=books3"))
    found = judged(*apart)["kern ends below softmax"]
    assert len(found.cells) == 2 and found.overall is None  # no seed in common


def test_group_runs_one_corpus_share_their_windows(tmp_path):
    """The same differences in both settings: no more is known than from one, unless the text is another."""
    overall = {}
    for key, values in (("model.n_expert", (32, 64)), ("data.name", ("arxiv", "books3"))):
        runs = [
            run
            for value in values
            for run in pair(tmp_path / str(value), "kern", "softmax", 1, noise=0.1, overrides=[f"{key}={value}"])
        ]
        found = judged(*runs)["kern ends below softmax"]
        one, other = found.cells.values()
        assert one[0] == pytest.approx(other[0])
        overall[key] = (found.overall[0].high - found.overall[0].low) / (one[0].high - one[0].low)
    assert overall == pytest.approx({"model.n_expert": 1, "data.name": 1 / math.sqrt(2)})


def test_each_claim_is_of_routers_that_are_there():
    for claim in CLAIMS:
        assert {claim.left, claim.right} <= STYLES.keys(), claim
        assert claim.left in claim.words and claim.right in claim.words, claim


# ---- the paper's numbers

ROUTERS = {"Dense": "dense", "Softmax": "softmax", "Sigmoid": "sigmoid", "Tanh": "tanh", "KERN": "kern"}
ROUTERS["KERN-without-ReLU"] = "kern-norelu"


def in_results():
    """{(experiment, condition, "loss", "std" or "accuracy", router, at): number} of the file that was typed from the
    paper."""
    experiments = {one["id"]: one for one in json.loads(RESULTS.read_text())["experiments"]}
    found = {}

    def add(experiment, condition, kind, losses):
        for method, numbers in losses.items():
            for at, number in (numbers or {}).items():
                found[experiment, condition, kind, ROUTERS[method], at] = number

    for id, one in experiments.items():
        if id.startswith("fig_") and id != "fig_sparsity" and one.get("loss"):
            add(id.removeprefix("fig_").removeprefix("baseline_"), (), "loss", one["loss"])
    for name, methods in experiments["fig_sparsity"]["loss"].items():
        for method, numbers in methods.items():
            for n_expert, number in zip((32, 64, 128, 256), numbers, strict=True):
                condition = (("data.name", name.lower()), ("model.n_expert", n_expert))
                add("sparsity", condition, "loss", {method: {"50K": number}})
    for key, losses in experiments["app_relu_table"]["loss"].items():
        add("relu_table", (("model.top_k", int(key.split("_")[0])),), "loss", losses)
    add("seeds", (), "loss", experiments["app_seeds"]["mean"])
    add("seeds", (), "std", experiments["app_seeds"]["variance_as_printed"])
    widths = {"520M_125M": 768, "1.7B_350M": 1024, "6.9B_1.3B": 2048}
    for size, accuracies in experiments["table_downstream"]["accuracy"].items():
        add("downstream", (("model.n_embd", widths[size]),), "accuracy", accuracies)
    return found


@pytest.mark.skipif(not RESULTS.is_file(), reason="needs ../shared/paper/results.json")
def test_numbers_are_the_papers():
    found = {
        (experiment, tuple(sorted(table.get("where", {}).items())), kind, router, at): number
        for experiment, tables in NUMBERS.items()
        for table in tables
        for kind in ("loss", "std", "accuracy")
        for router, numbers in table.get(kind, {}).items()
        for at, number in numbers.items()
    }
    assert found == in_results()
    assert len(found) == 367


@pytest.mark.parametrize("experiment", NUMBERS)
def test_each_table_is_of_runs_of_an_experiment(experiment):
    file = CONFIG / "paper" / f"{experiment}.toml"
    points = [load_point(file, point) for point in configure.sweep_points(file)]
    for table in NUMBERS[experiment]:
        assert table.keys() <= {"where", "loss", "std", "accuracy", "doubtful"}
        mine = [point for point in points if all(point[key] == value for key, value in table.get("where", {}).items())]
        printed = table.get("loss") or table["accuracy"]
        assert printed.keys() <= {point["model.router"] for point in mine}
        for doubt in table.get("doubtful", {}):
            router, at = doubt.split()
            assert at in printed[router]
    wheres = [tuple(table.get("where", {}).items()) for table in NUMBERS[experiment]]
    assert len(set(wheres)) == len(wheres) and len({tuple(dict(where)) for where in wheres}) == 1


def load_point(file, point):
    sections = configure.load(file, point).model_dump()
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def papers(folder, experiment, *overrides, routers=("dense", "kern"), **shape):
    """The one setting of an experiment's runs of two routers, seed 0, evaluated at each tenth."""
    file = CONFIG / "paper" / f"{experiment}.toml"
    runs = [invent(folder / router, f"model.router={router}", *overrides, file=file, **shape) for router in routers]
    (setting,) = settings_in(*runs)
    setting.printed = read_paper_losses(experiment, setting.values)
    return setting


@pytest.mark.parametrize("steps, heads", [(50_000, ["5,000", "50,000"]), (1000, ["100 (5K)", "1,000 (50K)"])])
def test_numbers_stand_beside_the_same_part_of_training(tmp_path, steps, heads):
    setting = papers(tmp_path, "books3_512", f"train.max_steps={steps}", "model.n_layer=2", end=3.5)
    head, rows = tables.build_loss_table(setting)
    assert [head[0], head[1], head[10], len(head)] == ["validation loss at step", *heads, 11]
    dense, paper, difference, kern, *rest = rows
    mean = [statistics.fmean(arm.losses(steps // 10)[0] for arm in [setting.arms[i]]) for i in (0, 1)]
    assert dense == ["**dense**", *[f"{setting.arms[0].losses(steps * i // 10)[0]:.4f}" for i in range(1, 11)]]
    assert paper == ["paper", "4.1460", *[""] * 8, "3.4429?"]
    assert difference[1] == f"{mean[0] - 4.1460:+.4f}" and set(difference[2:10]) == {""}
    assert difference[10] == f"{setting.arms[0].losses(steps)[0] - 3.4429:+.4f}"
    assert rest[0] == ["paper", "4.2165", *[""] * 8, "3.3080"]
    assert "dense at 50K: 0.16 below the mean of three seeds" in page.compare_with_paper(setting, "books3_512")

    head, rows = tables.build_difference_table(setting, "kern")
    assert head[0] == f"at step {steps:,}" and head[-1] == "the paper's difference"
    assert rows[0][-1] == "" and rows[1][3:] == ["", "", ""]  # dense at 50K is doubtful


def test_numbers_of_an_unfinished_run(tmp_path):
    """None of the end beside a step before it, nor any beside a step that is no tenth."""
    setting = papers(tmp_path, "books3_512", until=0.55, points=20)
    assert setting.end == 27_500
    head, rows = tables.build_loss_table(setting)
    assert head[-1] == "25,000" and rows[1] == ["paper", "4.1460", "", "", "", ""]
    assert tables.build_difference_table(setting, "kern")[1][0][-1] == ""
    assert "doubtful" not in page.compare_with_paper(setting, "books3_512")
    setting = papers(tmp_path / "x", "books3_512", until=0, points=20)
    head, rows = tables.build_loss_table(setting)
    assert head[1:] == ["0"] and [row[0] for row in rows] == ["**dense**", "**kern**"]


def test_spread_over_the_papers_seeds(tmp_path):
    setting = papers(tmp_path, "seeds")
    rows = tables.build_loss_table(setting)[1]
    assert rows[1][1] == "4.3863 ± 0.1699" and rows[1][10] == "3.6030 ± 0.1132?" and rows[4][10] == "3.3112 ± 0.0041"


def test_numbers_are_those_of_the_run_s_setting(tmp_path):
    both = ("softmax", "kern")
    setting = papers(tmp_path, "sparsity", "model.n_expert=128", "data.name=arxiv", routers=both)
    assert setting.printed.losses == {("softmax", 10): 1.8738, ("kern", 10): 1.8195}
    assert setting.printed.subtract("kern", "softmax", 10) == pytest.approx(1.8195 - 1.8738)
    assert setting.printed.subtract("kern", "softmax", 1) is None
    assert setting.printed.subtract("kern", "softmax", None) is None
    setting = papers(tmp_path / "x", "sparsity", "model.n_expert=16", "data.name=arxiv", routers=both)
    assert page.compare_with_paper(setting, "sparsity") == "The paper prints no loss of `sparsity` in this setting."
    assert [row[0] for row in tables.build_loss_table(setting)[1]] == ["**softmax**", "**kern**"]


def test_unknown_experiments_are_refused(tmp_path):
    for name in ("books3", "nothing", "../paper/books4"):
        with pytest.raises(ValueError) as refused:
            read_paper_losses(name, {})
        assert str(refused.value) == (
            f"--experiment {name}: not a file in config/paper; the paper prints losses of arxiv_512, books3_512, "
            f"books3_1024, len2048, large_model_350M, large_model_1.3B, large_gra, large_spa, sparsity, relu_table, "
            f"seeds"
        )
    setting = papers(tmp_path, "kern_after")
    for name in ("kern_after", "downstream"):  # a figure alone, and accuracies
        setting.printed = read_paper_losses(name, setting.values | {"model.n_embd": 768})
        assert page.compare_with_paper(setting, name) == f"The paper prints no loss of `{name}` in this setting."


def test_what_is_not_as_in_the_paper_is_said(tmp_path):
    own = papers(tmp_path / "own", "books3_512", "log.interval=100", "eval.interval=5000", "run.seed=7")
    assert page.list_differences(own, "books3_512") == []
    assert "Not the paper's setting" not in page.compare_with_paper(own, "books3_512")
    sparse = papers(
        tmp_path / "sparse", "sparsity", "model.n_expert=256", "data.name=books3", routers=("softmax", "kern")
    )
    assert page.list_differences(sparse, "sparsity") == []
    changed = ["data.name=stdlib", "optim.lr=3e-3", "train.balance_loss_coef=0.01"]
    other = papers(tmp_path / "other", "books3_512", *changed)
    expected = ["data.name = stdlib (books3)", "optim.lr = 0.003 (0.0006)", "train.balance_loss_coef = 0.01 (0.0)"]
    assert page.list_differences(other, "books3_512") == expected
    words = page.compare_with_paper(other, "books3_512")
    assert "**Not the paper's setting**" in words and f"brackets): {', '.join(expected)}." in words


# ---- tables


def test_losses_over_seeds(tmp_path):
    runs = [invent(tmp_path / str(seed), f"run.seed={seed}", "model.router=kern") for seed in range(3)]
    (setting,) = settings_in(*runs)
    _, ((label, *cells),) = tables.build_loss_table(setting)
    losses = setting.arms[0].losses(1000)
    assert label == "**kern** (3 seeds)" and len(cells) == 10
    assert cells[-1] == f"{sum(losses) / 3:.4f} ± 0.1000"  # seeds are 0.1 apart


def test_leads_over_the_baseline(tmp_path):
    runs = pair(tmp_path, "dense", "kern", gap=0.25) + pair(tmp_path / "x", "tanh", "kern", gap=-0.1)[:3]
    head, rows = tables.build_difference_table(settings_in(*runs)[0], "kern")
    assert head == ["at step 1,000", "seeds", "loss", "minus kern, paired, 95%", "kern is"]
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("dense", "+0.2500 [+0.2500, +0.2500]", "better"),
        ("tanh", "-0.1000 [-0.1000, -0.1000]", "worse"),
        ("kern", "", ""),
    ]
    rows = tables.build_difference_table(settings_in(*runs[:3], runs[3], runs[6])[0], "kern")[1]
    assert rows[0][1:2] + rows[0][4:] == ["3, 1 paired", "undecided (one seed)"] and rows[1][1] == "1"


def test_what_is_said_of_a_setting(tmp_path):
    (setting,) = settings_in(*pair(tmp_path, "dense", "kern", 1, overrides=["train.balance_loss_coef=0.01"]))
    assert page.describe_setting(setting) == (
        "`mix-bytes`: 2,048 tokens per step, 2.0 M in all; max_steps 1000, n_layer 2, n_expert 64, top_k 8, "
        "n_embd 128, block_size 256, expert_hidden 8, lr 0.003, windows 128, gate_scale 1.0, "
        "balance_loss_coef 0.01, z_loss_coef 0.0, bias_update_rate 0.0."
    )


def test_time_of_training(tmp_path):
    """By the first seed's lines, interpolated between them."""
    (setting,) = settings_in(*(invent(tmp_path / str(seed), f"run.seed={seed}") for seed in range(2)))

    def minutes():
        figure = pictures.plot_loss_by_time(setting, "kern")
        return dict(zip(setting.steps, figure.axes[0].lines[0].get_xdata(), strict=False))

    assert minutes()[0] == 0 and minutes()[200] * 60 == pytest.approx(20.3)
    run = setting.runs[0]
    run.logs[:] = [line | {"perf/step_ms": 300} for line in run.logs if line["step"] % 200 == 0]
    assert minutes()[300] * 60 == pytest.approx(90) and minutes()[1000] * 60 == pytest.approx(300)


def test_labels_of_lines_do_not_overlap():
    """In the order of their lines' ends, within the axes, at least a line's height apart."""
    ends = [2, 2, 2, 0, 1.99, 2.01]
    lines = {str(i): (style("kern"), {0: (1, 1, 1), 9: (end, end, end)}) for i, end in enumerate(ends)}
    figure = pictures.plot_lines([("x", "y", lines)])
    figure.draw_without_rendering()
    places = {text.get_text().split()[0]: Text.get_window_extent(text) for text in figure.axes[0].texts}
    assert sorted(places, key=lambda label: places[label].y0) == ["3", "4", "0", "1", "2", "5"]
    boxes = sorted(places.values(), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 for below, above in zip(boxes, boxes[1:], strict=False))
    assert boxes[-1].y1 <= figure.bbox.y1 and max(box.x1 for box in boxes) <= figure.bbox.x1


# ---- the whole command


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of runs, folder of their report, what the terminal showed): three routers, two seeds."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("reports") / "new" / "report"
    for router, end in (("dense", 2.0), ("softmax", 1.95), ("kern", 1.9)):
        for seed in range(2):
            invent(runs / f"{router}-{seed}", f"model.router={router}", f"run.seed={seed}", end=end, noise=0.01)
    with redirect_stdout(io.StringIO()) as said:
        arguments = [*map(str, sorted(runs.iterdir())), "--experiment", "books3_512", "--out", str(out)]
        assert report.main(arguments) == 0
    return runs, out, said.getvalue().splitlines()


PICTURES = {  # size in pixels, height and width
    "ends.png": (None, 880),
    "loss.png": (550, 880),
    "difference.png": (550, 880),
    "time.png": (550, 880),
    "routing.png": (550, 1980),
    "loads.png": (None, 990),
}


def test_report_of_made_up_runs(made):
    _, out, said = made
    assert {file.name for file in out.iterdir()} == PICTURES.keys() | {"report.md", "report.html"}
    text = (out / "report.md").read_text()
    for name, (height, width) in PICTURES.items():
        pixels = matplotlib.image.imread(out / name)[..., :3]
        assert pixels.shape[1] == width and pixels.shape[0] == (height or pixels.shape[0]) and pixels.shape[0] > 150
        colours = np.unique((255 * pixels.astype(np.float64)).round() @ [65536, 256, 1])
        assert len(colours) > 40, name  # lines, words and their edges, not an empty frame
    assert re.findall(r"!\[[^]]+\]\((.*?)\)", text) == list(PICTURES)
    assert text.startswith("# 6 runs compared\n")
    for part in (
        "| kern ends below dense | Sec. 4.1 | -0.",
        "3.4429?",
        "(5K)",
        "`mix-bytes`",
    ):
        assert part in text, part
    assert said[-1] == f"report: {out}/report.html"
    assert any(re.fullmatch(r"kern ends below dense: \w+, -0\.\d{4} \[.*\]", line) for line in said)


class Page(HTMLParser):
    """Tags with their attributes, and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


HARMLESS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li", "b", "code"}
HARMLESS |= {"table", "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption"}


def assert_self_contained(html):
    """Nothing in the page leads outside, and no script is in it."""
    page = Page(html)
    assert {tag for tag, _ in page.tags} <= HARMLESS
    for tag, attributes in page.tags:
        allowed = {"meta": {"charset", "http-equiv", "content"}, "img": {"alt", "src"}, "html": {"lang"}}
        assert attributes.keys() <= allowed.get(tag, set()), tag
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert all(source.startswith("data:image/png;base64,") for source in pictures)
    for trace in ("http:", "https:", "@import", "url(", "javascript:"):
        assert trace not in html, trace
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none';") and "script" not in policy
    return pictures, page


def test_the_page_holds_all_of_it(made):
    out = made[1]
    pictures, page = assert_self_contained((out / "report.html").read_text())
    images = [base64.b64decode(source.partition(",")[2]) for source in pictures]
    assert images == [(out / name).read_bytes() for name in PICTURES]
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    words = "".join(page.text)
    for part in ("Claims", "kern ends below dense", "supported", "mix-bytes", "4.1460", "Not the paper's setting"):
        assert part in words, part
    assert "**" not in words and "`" not in words


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are plotted, but their files are one pixel: drawing takes a second each."""
    drawn = []

    def save_figure(figure, path):
        drawn.append(path.name)
        matplotlib.image.imsave(path, np.zeros((1, 1, 3)))

    monkeypatch.setattr(page, "save_figure", save_figure)
    return drawn


def reported(out, *arguments):
    """(lines on the terminal, text of report.md); the page is self-contained, and holds each picture."""
    with redirect_stdout(io.StringIO()) as said:
        assert report.main([*map(str, arguments), "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    pictures, _ = assert_self_contained((out / "report.html").read_text())
    names = re.findall(r"!\[[^]]+\]\((.*?)\)", text)
    assert len(pictures) == len(names) and all((out / name).is_file() for name in names)
    assert "nan" not in text
    return said.getvalue().splitlines(), text


WILD = "<img src=x onerror=alert(1)>&amp;|`**b**`| <b>"


def test_names_cannot_break_the_page(tmp_path, undrawn, capsys):
    """Folders alone may be named anything: names of runs and corpora are checked, and routers are known."""
    runs = [invent(tmp_path / WILD / f"{name}|{WILD}", until=1 - i / 10) for i, name in enumerate("ab")]
    runs += [invent(tmp_path / WILD / "dense", "model.router=dense", until=0.5)]
    _, text = reported(tmp_path / "out", *runs)
    html = (tmp_path / "out/report.html").read_text()
    shown = "".join(Page(html).text)
    assert "alert(1)" in text and "<img" not in text and "<b>" not in text
    assert "<img src=x onerror=alert(1)>&amp;|" in shown
    for key in ("run.name", "data.name"):
        with pytest.raises(configure.ConfigError):
            configure.load(CONFIG / "small.toml", ["--run.seed=0", "--model.router=kern", f"--{key}=a<b"])


def test_words_in_a_page(tmp_path):
    """Of Markdown's marks bold and code count, and a | ends no cell."""
    blocks = [("h1", "a < b & c"), ("p", "x <script>y</script> **z** `w<v`"), ("list", ["one", "<two>"])]
    blocks += [("table", ["a|b", "n"], [["x | y", "+0.1 [0, 1] **ok**"], ["p", "+0.1 [0, 1]"], ["q", "1 ± 2"]])]
    write_page(blocks, tmp_path)
    html, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert_self_contained(html)
    assert "<h1>a &lt; b &amp; c</h1>" in html and "<title>a &lt; b &amp; c</title>" in html
    assert "<b>z</b> <code>w&lt;v</code>" in html and "<li>&lt;two&gt;</li>" in html
    cells = re.findall("<td>(.*?)</td>", html)
    assert cells[:2] == ["x | y", "+0.1 [0,\u00a01] <b>ok</b>"]  # may break before and after the interval
    assert cells[3::2] == ["+0.1 [0,\u00a01]", "1 ±\u00a02"]
    assert "| a\\|b | n |\n| --- | --: |\n| x \\| y | +0.1 [0, 1] **ok** |" in text
    assert "<" not in text and "# a &lt; b &amp; c" in text


def test_without_the_baseline_there_is_no_difference(tmp_path, undrawn):
    runs = pair(tmp_path, "dense", "softmax", 1)
    said, text = reported(tmp_path / "out", *runs)
    assert undrawn == ["loss.png", "time.png", "routing.png", "loads.png"]
    assert "minus" not in text.partition("## Loss")[2]
    assert "softmax ends below dense: undecided (one seed), +0.0000 [+0.0000, +0.0000]" in said
    undrawn.clear()
    reported(tmp_path / "out", *runs, "--baseline", "softmax")
    assert undrawn == ["ends.png", "loss.png", "difference.png", "time.png", "routing.png", "loads.png"]


def test_dense_alone(tmp_path, undrawn):
    _, text = reported(tmp_path / "out", invent(tmp_path / "dense", "model.router=dense"))
    assert undrawn == ["loss.png", "time.png"] and text.startswith("# One run\n")
    assert "None apply: no setting has both routers of a claim." in text


def test_one_router_with_two_constants_has_no_baseline(tmp_path, undrawn):
    runs = [invent(tmp_path / str(i), "model.router=kern", f"train.balance_loss_coef={i / 10}") for i in range(2)]
    _, text = reported(tmp_path / "out", *runs)
    assert "ends.png" not in undrawn and "difference.png" not in undrawn and "**kern, balance_loss_coef 0.1**" in text


@pytest.mark.parametrize("at", [0.0, 1.0])
def test_one_evaluation(tmp_path, undrawn, at):
    """Before training, or after it alone."""
    runs = pair(tmp_path, "kern", "dense", 2, gap=-0.1, noise=0.001, until=at, points=10 if not at else 1)
    if at:
        for run in runs:
            file = run / "metrics.jsonl"
            file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"step": 0,' not in line))
    said, text = reported(tmp_path / "out", *runs)
    assert ("difference.png" in undrawn) == bool(at)
    assert ("kern ends below dense" in text) == bool(at)
    assert f"validation loss at step | {1000 if at else 0:,}" in text
    assert any("0 of 1,000" in line for line in said) != bool(at)


def test_runs_that_were_not_timed(tmp_path, undrawn):
    runs = pair(tmp_path, "kern", "dense", without=["perf/"])
    _, text = reported(tmp_path / "out", *runs)
    assert "time.png" not in undrawn and {"loss.png", "difference.png"} <= set(undrawn)
    assert re.search(r"\| small-kern \| kern \| 0.44M \| 0.21M \| 1,000 \| [\d.]+ \| - \| 2.00 \|", text)


def test_metrics_of_before(tmp_path, undrawn):
    """Without losses of windows and loads: differences of means, and neither interval nor verdict."""
    runs = pair(tmp_path, "kern", "dense", gap=-0.125, without=["val/window_losses", "val/loads", "router/"])
    said, text = reported(tmp_path / "out", *runs)
    assert undrawn == ["ends.png", "loss.png", "difference.png", "time.png"]
    assert "kern ends below dense: undecided (one window), -0.1250" in said
    assert "| +0.1250 | undecided |" in text


def test_several_settings(tmp_path, undrawn):
    """Three sizes, a corpus whose name differs little, and a dense model on a third."""
    runs = [
        run
        for name, n in (("mix_a", 16), ("mix_a", 64), ("mix_a", 128), ("mix-a", 64))
        for run in pair(
            tmp_path / name / str(n),
            "kern",
            "softmax",
            2,
            -0.1,
            0.001,
            overrides=[f"data.name={name}", f"model.n_expert={n}"],
        )
    ]
    runs.append(invent(tmp_path / "dense", "model.router=dense", "data.name=alone"))
    said, text = reported(tmp_path / "out", *runs)
    assert len(set(undrawn)) == len(undrawn) and undrawn[:2] == ["ends.png", "model.n_expert.png"]
    head = next(line for line in text.splitlines() if line.startswith("| claim"))
    assert head.split(" | ")[:4] == ["| claim", "where", "all settings", "n_expert 16, mix_a"]
    assert any(re.match(r"kern ends below softmax: supported, -0\.(09|10)", line) for line in said)
    part = text.partition("## n_expert 64, alone")[2].partition("\n## ")[0]
    assert "minus kern" not in part and "dense" in part
    undrawn.clear()
    more = [invent(tmp_path / f"lr{n}", "data.name=mix_a", f"model.n_expert={n}", "optim.lr=1e-3") for n in (16, 64)]
    reported(tmp_path / "out2", *runs[:12:4], *more)
    assert "model.n_expert.png" not in undrawn  # not one line any more


def test_a_report_among_the_folders_is_left_out(made, tmp_path, undrawn):
    runs, out, _ = made
    said, _ = reported(tmp_path / "out", *sorted(runs.iterdir()), out)
    assert said[-2].startswith(f"note: left out: {out}: no config.toml, so not a run")


def test_bad_input_is_refused(tmp_path, capsys):
    def error(*arguments, out=tmp_path / "out"):
        assert report.main([*map(str, arguments), "--out", str(out)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and len(said.err.splitlines()) == 1
        assert not (tmp_path / "out").exists()
        return said.err

    nothing, run = tmp_path / "nothing", invent(tmp_path / "kern", "model.router=kern")
    assert f"{nothing}: no config.toml, so not a run" in error(nothing)
    started = invent(tmp_path / "started", without=["val/"])
    assert f"{started}: not evaluated yet" in error(started)
    (started / "metrics.jsonl").unlink()
    assert f"{started}: not evaluated yet" in error(started)
    (started / "metrics.jsonl").write_text('{"step": 0, "tokens": 0, "val/loss": NaN}\n')
    assert f"{started}: diverged" in error(started)
    (started / "metrics.jsonl").write_text('{"step": 0, "tokens": 0, "val/loss": 2.0}\nbroken\n{}\n')
    assert "metrics.jsonl, line 2 is not a JSON object" in error(started)
    (started / "metrics.jsonl").write_text('{"step": 0, "tokens": 0, "val/loss": 2.0}\n')
    (started / "config.toml").write_text("[model\n")
    assert "config.toml is not TOML" in error(started)
    assert "--baseline 'dense': the runs have kern" in error(run, "--baseline", "dense")
    assert "--experiment books4: not a file in config/paper; the paper prints losses of" in error(
        run, "--experiment", "books4"
    )
    (tmp_path / "curves.png").write_text("")
    assert f"exists: '{tmp_path / 'curves.png'}'" in error(run, out=tmp_path / "curves.png")
    assert f"--out {run}: a run's folder" in error(run, out=run)


@pytest.mark.parametrize("names", [["matplotlib"], ["scipy"], ["matplotlib", "scipy"]])
def test_a_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch, capsys, names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(report, "load_run_records", None)
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    words = f"error: {', '.join(names)} not installed: pip install -r requirements-report.txt\n"
    assert capsys.readouterr().err == words and not (tmp_path / "out").exists()


# ---- the terminal

DENSE = [
    {"step": 0, "val/loss": 5.5},
    {"step": 1, "train/loss": 5.4, "perf/tokens_per_sec": 1000.0},
    {"step": 2, "train/loss": 5.3, "perf/tokens_per_sec": 12345.6},
    {"step": 1200, "train/loss": 2.0, "perf/tokens_per_sec": 99999.0},
    {"step": 1200, "val/loss": 2.34567},
]
KERN = [{"step": 0, "val/loss": 5.5, "val/load_imbalance": 1.5}]
KERN += [{"step": 1000, "val/loss": 2.25, "val/load_imbalance": 3.456}]


def test_table_on_the_terminal(tiny, tmp_path):
    runs = []
    for router, lines_of in (("dense", DENSE), ("kern", KERN)):
        folder = tmp_path / router
        folder.mkdir()
        config = tiny(f"run.name=run-{router}", f"model.router={router}", "train.max_steps=1200")
        (folder / "config.toml").write_text(configure.dumps(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"tokens": 0} | line) + "\n" for line in lines_of))
        runs.append(load_run_record(folder))
    head, rule, dense, kern = text_table(tables.COLUMNS, [tables.summarize_run(run) for run in runs], 2).splitlines()
    assert re.split("  +", head.strip()) == list(tables.COLUMNS)
    assert set(rule) == {"-"} and len(rule) == len(head) == len(dense) == len(kern)
    # 257·32 + 32·32 tables, 2 layers of 4·32² + 2·32 and 2·32·16 a dense MLP, 32 of the last norm: 19,744 parameters.
    assert dense.split() == ["run-dense", "dense", "0.02M", "0.02M", "1,200", "2.3457", "12,346", "-"]
    # Each layer 2·32·8·8 + 8·32 + 8 + 1 instead of 2·32·16: 26,402; of 8 experts 2 are active: 20,258.
    assert kern.split() == ["run-kern", "kern", "0.03M", "0.02M", "1,000", "of", "1,200", "2.2500", "-", "3.46"]


def test_terminal_has_the_table_and_notes(made, tmp_path, undrawn):
    runs, _, said = made
    assert said[2].split()[:2] == ["small-dense", "dense"] and said[7].split()[0] == "small-softmax-seed1"
    said, _ = reported(tmp_path / "out", runs / "kern-0", runs / "kern-0")
    assert said[-2] == f"note: {runs}/kern-0 is left out: {runs}/kern-0 has the same settings and seed"


# ---- a browser


class Browser:
    """Headless Chromium by its DevTools, over pipes: fds 3 and 4 of its own."""

    def __init__(self, profile):
        (theirs, self.commands), (self.answers, written) = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        flags += "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=800,900 "
        flags += "--remote-debugging-pipe"
        words = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{written}', "bash", shutil.which("chromium"), *flags.split()]
        self.process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}"], pass_fds=(theirs, written), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(written)
        self.number, self.waiting, self.events, self.session = 0, b"", [], {}

    def ask(self, method, **parameters):
        """The result of a method; events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def until(self, method):
        while not any(event["method"] == method for event in self.events):
            self.read()

    def read(self):
        while b"\0" not in self.waiting:
            part = os.read(self.answers, 1 << 20)
            assert part, "Chromium has ended"
            self.waiting += part
        line, _, self.waiting = self.waiting.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def evaluate(self, expression):
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self):
        os.close(self.commands)
        self.process.kill()
        self.process.wait()
        os.close(self.answers)


LAST_PIXEL = """image => {
    const canvas = document.createElement('canvas')
    canvas.width = image.naturalWidth
    canvas.height = image.naturalHeight
    const context = canvas.getContext('2d')
    context.drawImage(image, 0, 0)
    return context.getImageData(canvas.width - 1, canvas.height - 1, 1, 1).data[3]
}"""  # how opaque it is: 0 where the picture is cut off


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium: apt-get install chromium")
def test_a_browser_shows_every_picture_and_asks_for_nothing(made, tmp_path):
    page = tmp_path / "moved" / "report.html"  # without its pictures
    page.parent.mkdir()
    shutil.copy(made[1] / "report.html", page)
    browser = Browser(tmp_path / "profile")
    try:
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.ask("Target.attachToTarget", targetId=target, flatten=True)
        browser.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Log", "Runtime"):
            browser.ask(f"{domain}.enable")
        browser.ask("Page.navigate", url=page.as_uri())
        browser.until("Page.loadEventFired")
        sizes = browser.evaluate("[...document.images].map(i => [i.naturalWidth, i.naturalHeight, i.clientWidth])")
        assert [size[0] for size in sizes] == [width for _, width in PICTURES.values()]
        assert all(height > 150 and shown > 600 for _, height, shown in sizes)
        assert browser.evaluate(f"[...document.images].map({LAST_PIXEL})") == [255] * len(PICTURES)
        assert browser.evaluate("document.querySelector('h1').innerText") == "6 runs compared"
        assert browser.evaluate("document.documentElement.scrollWidth") <= 800  # tables scroll on their own
        asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
        assert asked[0] == page.as_uri() and len(asked) == 1 + len(PICTURES)
        assert all(url.startswith("data:image/png;base64,") for url in asked[1:])
        wrong = [e for e in browser.events if e["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
        assert wrong == []
    finally:
        browser.close()
