"""scripts.report: intervals, what is paired with what, verdicts, the paper's numbers, tables, pictures, the page."""

import base64
import hashlib
import io
import json
import math
import re
import statistics
from contextlib import redirect_stdout
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest
from fake_runs import CONFIG, add_checkpoint, make_run
from scipy import stats

import configure
import scripts.report.__main__ as report
from common.text import text_table
from data.bins import fingerprint, open_tokens, read_meta
from data.loader import fixed_windows, window_documents
from eval import downstream
from eval.intervals import Interval, half_width
from eval.paper import NUMBERS, read_paper_losses
from scripts import compare
from scripts.report import claims, page, pictures, tables
from scripts.report.claims import CLAIMS, MARGIN, judge_claims, pair_differences
from scripts.report.pages import write_page
from scripts.report.runs import Run, expand_folders, load_run_record, load_run_records
from scripts.report.settings import Setting, group_runs
from scripts.report.style import STYLES, style


def load_settings(*folders):
    return group_runs([load_run_record(folder) for folder in folders])[0]


def judge(*folders):
    """{words of a claim: Finding}"""
    return {finding.words: finding for finding in judge_claims(load_settings(*folders))}


def make_pair(folder, left, right, seeds=3, gap=0.0, noise=0.0, early=0.0, overrides=(), **shape):
    """Runs of two routers; `left` ends `gap` above `right`, and is `early` more above it at the beginning."""
    return [
        make_run(folder / f"{router}{seed}", f"run.seed={seed}", f"model.router={router}", *overrides,
                 noise=noise, **shape, **({"end": 2 + gap, "early": early} if router == left else {"end": 2.0}))
        for router in (left, right)
        for seed in range(seeds)
    ]  # fmt: skip


# ---- pairing
def test_differences_are_of_seeds_in_common(tmp_path):
    kern = [make_run(tmp_path / f"kern{seed}", f"run.seed={seed}", end=1.5) for seed in (0, 1, 3)]
    dense = [make_run(tmp_path / f"dense{seed}", f"run.seed={seed}", "model.router=dense") for seed in (2, 3, 1)]
    (setting,) = load_settings(*kern, *dense)
    right, left = setting.arms
    assert (left.router, left.seeds, right.router, right.seeds) == ("kern", [0, 1, 3], "dense", [1, 2, 3])
    assert setting.counterpart(right, "kern") is left
    d = pair_differences(left, right, setting.end)
    assert d.shape == (2, 8)
    np.testing.assert_allclose(d, -0.5)  # what seeds and windows add is the same in both
    assert pair_differences(left, right, setting.end, [3]).shape == (1, 8)
    (setting,) = load_settings(kern[0], dense[0])
    assert setting.counterpart(setting.arms[0], "kern") is None and judge_claims([setting]) == []


@pytest.mark.parametrize("what", ["data", "tokenizer"])
def test_runs_of_other_data_are_refused(tmp_path, what):
    facts = {"data": "sha of the text", "tokenizer": "sha of GPT-2's", "wandb": "id"}
    routers = ("dense", "softmax", "kern")
    dense, softmax, kern = (make_run(tmp_path / router, f"model.router={router}") for router in routers)
    other = make_run(tmp_path / "other", "data.name=other")
    add_checkpoint(dense, **facts)
    add_checkpoint(other, **facts | {what: "else"})
    assert len(load_settings(dense, softmax, kern, other)) == 2  # kern's and softmax's data are unknown
    add_checkpoint(kern, 200, **facts | {what: "else"})
    add_checkpoint(kern, 100, **facts)  # the last counts
    with pytest.raises(ValueError, match=rf"{dense} and {kern}: {what} .* is sha of .* and else.* separate reports"):
        load_settings(dense, softmax, kern)
    assert [of.label for of in load_settings(dense, softmax, kern, other)] == ["other"]
    (kern / "checkpoints/step_00000200/manifest.json").write_text("damaged")
    assert len(load_settings(dense, softmax, kern)) == 1


def test_documents_of_validation_windows(tmp_path, corpus):
    """As recorded; those of a run of before from its data set, if its checkpoint says that it is the same."""
    assert load_run_record(make_run(tmp_path / "new", documents=3)).documents.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    shape = ["model.block_size=32", "eval.windows=6", "data.name=tiny", f"data.dir={corpus}"]
    old = make_run(tmp_path / "old", *shape, "eval.spread=tokens", windows=6, without=["val/window_documents"])
    assert load_run_record(old).documents is None  # no checkpoint
    add_checkpoint(old, data=fingerprint(read_meta(corpus / "tiny"))["data"])
    tokens = open_tokens(corpus / "tiny", "val")
    wanted = window_documents(tokens, 32, fixed_windows(tokens, 32, 6, "tokens"))
    assert load_run_record(old).documents.tolist() == wanted.tolist() and len({*wanted}) > 2
    add_checkpoint(old, 200, data="another")
    assert load_run_record(old).documents is None
    gone = make_run(tmp_path / "gone", "data.name=nowhere", windows=6, without=["val/window_documents"])
    add_checkpoint(gone, data="gone")
    assert load_run_record(gone).documents is None


def test_intervals_count_documents(tmp_path):
    """Where windows share documents the interval is that of the documents; the page says how many, or why not."""
    shape = {"left": "kern", "right": "softmax", "seeds": 2, "noise": 0.1}
    pair = {name: make_pair(tmp_path / name, **shape, **of) for name, of in {
        "apart": {"windows": 32}, "shared": {"windows": 32, "documents": 4}, "one": {"windows": 32, "documents": 1},
        "unknown": {"windows": 32, "without": ["val/window_documents"]}}.items()}  # fmt: skip
    found, said = {}, {}
    for name, runs in pair.items():
        (setting,), notes = group_runs([load_run_record(run) for run in runs])
        found[name] = claims.compare_arms(*setting.arms, setting.end)
        said[name] = [page.describe_setting(setting).split("; ")[-1], *notes]
    assert [found[name].parts[0][1] for name in pair] == [31, 3, 31, 31]
    assert found["apart"] == found["unknown"] == found["one"]
    assert said["apart"] == ["32 validation windows of 32 documents, at most 1 of one."]
    assert said["shared"] == ["32 validation windows of 4 documents, at most 8 of one."]
    assert said["one"][1] == "the 32 validation windows are of one document: intervals say nothing of others"
    assert said["unknown"][0] == "32 validation windows, taken as independent."
    assert "documents of the 32 validation windows are not known" in said["unknown"][1]


def test_runs_of_other_windows_or_steps_are_refused(tmp_path):
    runs = [make_run(tmp_path / "dense", "model.router=dense"), make_run(tmp_path / "kern", windows=9)]
    with pytest.raises(ValueError, match=r"dense and .*kern: number of validation windows is 8 and 9.*; give them"):
        load_settings(*runs)
    for run, step in zip(runs, (300, 700), strict=True):
        (run / "metrics.jsonl").write_text(f'{{"step": {step}, "tokens": 1, "val/loss": 2.0}}\n')
    with pytest.raises(ValueError, match=r"evaluated at no common step .*(dense at 300 .*kern at 700|kern at 700)"):
        load_settings(*runs)


def test_unfinished_runs_are_compared_at_the_last_step_that_all_have(tmp_path):
    kern = make_run(tmp_path / "kern", until=0.7)
    dense = make_run(tmp_path / "dense", "model.router=dense", end=3, until=0.9)
    settings, notes = group_runs([load_run_record(kern), load_run_record(dense)])
    assert (settings[0].end, settings[0].max_steps) == (700, 1000)
    up_to = f"{dense} (evaluated up to step 900), {kern} (evaluated up to step 700)"
    end = "All are compared at step 700 of 1,000, and no claim about the end is judged"
    assert notes == [f"unfinished or diverged: {up_to}. {end}"]
    assert [finding.words for finding in judge_claims(settings)] == ["kern is below dense at a tenth already"]
    with (kern / "metrics.jsonl").open("a") as file:
        file.write('{"step": 800, "tokens": 819200, "val/loss": NaN, "val/window_losses": [NaN, NaN]}\n')
    settings, (note,) = group_runs([load_run_record(kern), load_run_record(dense)])
    assert settings[0].end == 700 and "(evaluated up to step 700, loss not finite at 800). All are compared" in note


def test_runs_that_would_spoil_a_comparison_are_left_out(tmp_path):
    """Unfinished ones where others ended, all but one of a setting, router and seed, and folders that are no runs."""
    kern, dense = make_run(tmp_path / "kern"), make_run(tmp_path / "dense", "model.router=dense")
    early = make_run(tmp_path / "early", "model.router=tanh", until=0.2)
    again = make_run(tmp_path / "again", until=0.5)
    twice = make_run(tmp_path / "twice", "train.micro_batch_size=4", "log.interval=3")  # keys that change no loss
    (tmp_path / "failed").mkdir()
    runs, left_out = load_run_records([again, early, tmp_path / "failed", kern, dense, twice])
    assert [line.split(":")[:2] for line in left_out] == [["left out", f" {tmp_path / 'failed'}"]]
    (setting,), notes = group_runs(runs)
    assert setting.end == 1000 and {run.folder for run in setting.runs} == {kern, dense}
    assert sorted(notes) == sorted([
        f"left out: {again}: evaluated up to step 500 of 1,000",
        f"left out: {early}: evaluated up to step 200 of 1,000",
        f"{twice} is left out: {kern} has the same settings and seed",
    ])  # fmt: skip
    (setting,), notes = group_runs([load_run_record(run) for run in (early, make_run(tmp_path / "x", until=0.6))])
    assert setting.end == 200
    (setting,), (_, note) = group_runs([load_run_record(run) for run in (again, tmp_path / "x")])
    assert note == f"{again} is left out: {tmp_path / 'x'} has the same settings and seed"  # it was trained further


def test_arms_equally_alike_are_all_judged(tmp_path):
    """At two gate scales each; a label picks the one to subtract."""
    given = [("kern", 1), ("kern", 3), ("softmax", 1), ("softmax", 18)]
    runs = [make_run(tmp_path / f"{a}{b}", f"model.router={a}", f"model.gate_scale={b}") for a, b in given]
    (setting,) = load_settings(*runs)
    words = [finding.words for finding in judge_claims([setting]) if "ends below softmax" in finding.words]
    assert words == [
        "kern ends below softmax (gate_scale 1)",
        "kern ends below softmax (kern, gate_scale 3; softmax, gate_scale 1)",
        "kern ends below softmax (kern, gate_scale 3; softmax, gate_scale 18)",
    ]
    assert "several arms are kern: " in report.find_ambiguous([setting], "kern")[0]
    assert report.find_ambiguous([setting], "kern, gate_scale 3") == []
    labels = {arm.label: setting.counterpart(arm, "kern, gate_scale 3") for arm in setting.arms}
    assert labels.pop("kern, gate_scale 3") is None
    assert {other.label for other in labels.values()} == {"kern, gate_scale 3"}


def test_constants_of_routers_make_arms(tmp_path):
    balance, update, scale = "train.balance_loss_coef=0.01", "train.bias_update_rate=0.001", "model.gate_scale=0.2992"
    given = [("softmax", "run.seed=0"), ("softmax", balance), ("kern", balance), ("kern", "run.seed=0")]
    given += [("sigmoid-renorm", update), ("tanh", scale)]
    runs = [make_run(tmp_path / str(i), f"model.router={router}", rest) for i, (router, rest) in enumerate(given)]
    (setting,) = load_settings(*runs)
    arms = {arm.label: arm for arm in setting.arms}
    constants = "gate_scale {}, balance_loss_coef {}, bias_update_rate {}".format
    assert list(arms) == [
        f"softmax, {constants(1, 0, 0)}", f"softmax, {constants(1, 0.01, 0)}", f"tanh, {constants(0.2992, 0, 0)}",
        f"kern, {constants(1, 0, 0)}", f"kern, {constants(1, 0.01, 0)}", f"sigmoid-renorm, {constants(1, 0, 0.001)}",
    ]  # fmt: skip
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


@pytest.mark.parametrize(
    "scope, labels", [("global", ["kern"]), ("micro_batch", ["kern, micro_batch of 2", "kern, micro_batch of 4"])]
)
def test_micro_batches_make_arms_where_the_balance_loss_is_theirs(tmp_path, scope, labels):
    given = [f"train.balance_loss_scope={scope}", "train.balance_loss_coef=0.01"]
    runs = [make_run(tmp_path / str(n), *given, f"train.micro_batch_size={n}", f"run.seed={n}") for n in (2, 4)]
    (setting,) = load_settings(*runs)
    assert [arm.label for arm in setting.arms] == labels


def test_a_setting_is_what_changes_a_loss(tmp_path):
    given = [("arxiv", 128), ("books3", 32), ("arxiv", 32), ("books3", 128)]
    runs = []
    for name, n in given:
        own = [f"data.name={name}", f"model.n_expert={n}"]
        runs += make_pair(tmp_path / f"{name}{n}", "kern", "softmax", 1, overrides=own)
    settings = load_settings(*runs)
    labels = [f"n_expert {n}, {name}" for n in (32, 128) for name in ("arxiv", "books3")]
    assert [setting.label for setting in settings] == labels
    assert all([arm.label for arm in setting.arms] == ["softmax", "kern"] for setting in settings)

    same = ["eval.interval=50", "train.micro_batch_size=4", "train.device=cpu", "data.dir=/elsewhere", "log.group=x"]
    other = ["optim.lr=1e-4", "train.batch_size=16", "model.top_k=4", "eval.windows=64"]
    runs = [make_run(tmp_path / f"x{i}", text) for i, text in enumerate(["run.seed=0", *same, *other])]
    settings = load_settings(*runs)
    assert len(settings) == 1 + len(other) and len({setting.label for setting in settings}) == len(settings)
    more = ["model.n_layer=3", "optim.warmup_steps=9", "model.init_std=0.5", "model.dropout=0.1"]  # not in labels
    labels = {setting.label for setting in load_settings(*runs, make_run(tmp_path / "y", *other, *more))}
    assert len(labels) == 2 + len(other) and max(map(len, labels)) <= 60


def test_types_separate_runs_that_differ_in_nothing_else(tmp_path):
    runs = [make_run(tmp_path / "dense", "model.router=dense", "train.dtype=bfloat16")]
    runs += [make_run(tmp_path / name, f"model.router={name}", "train.dtype=float32") for name in ("kern", "tanh")]
    settings, (note,) = group_runs([load_run_record(run) for run in runs])
    assert len(settings) == 1 and "dense in bfloat16; tanh, kern in float32; --train.dtype=float32 makes" in note
    runs.append(make_run(tmp_path / "dense32", "model.router=dense", "train.dtype=float32"))
    settings, notes = group_runs([load_run_record(run) for run in runs])
    assert [(of.label, len(of.arms)) for of in settings] == [("bfloat16", 1), ("float32", 3)] and notes == []


# ---- claims
@pytest.mark.parametrize(
    "low, high, verdict",
    [(-2, -1, "supported"), (-2, 1, "undecided"), (-1, 2, "undecided"), (1, 2, "contradicted")]
    + [(-1, 0, "undecided"), (0, 0, "undecided")],
)
def test_an_interval_that_contains_zero_is_undecided(low, high, verdict):
    """Whatever the side of its mean."""
    assert CLAIMS[0].judge(Interval((low + high) / 2, low, high, 3)) == verdict


@pytest.mark.parametrize(
    "low, high, verdict",
    [(0.7, 0.9, "supported"), (-0.9, 0.9, "supported"), (-0.9, 1.1, "undecided"), (0.9, 1.1, "undecided")]
    + [(-1.1, -0.9, "undecided"), (1.1, 1.5, "contradicted"), (-1.5, -1.1, "contradicted")],
)
def test_an_equal_loss_is_one_within_the_margin(low, high, verdict):
    (claim, *_) = [claim for claim in CLAIMS if claim.words == "kern-mc ends like kern"]
    assert claim.judge(Interval((low + high) / 2 * MARGIN, low * MARGIN, high * MARGIN, 3)) == verdict


@pytest.mark.parametrize(
    "top_k, said",
    [(8, {"kern-norelu ends like kern, few active"}), (32, set()), (64, {"kern ends below kern-norelu, all active"})],
)
def test_claims_of_few_or_all_active_experts(tmp_path, top_k, said):
    assert judge(*make_pair(tmp_path, "kern", "kern-norelu", 1, overrides=[f"model.top_k={top_k}"])).keys() == said


def test_claims_at_a_tenth(tmp_path):
    """kern begins worse than dense and ends better."""
    found = judge(*make_pair(tmp_path, "kern", "dense", gap=-0.2, early=1.0, noise=0.01))
    end = found["kern ends below dense"]
    assert end.cells[""].interval.mean == pytest.approx(-0.2, abs=0.04) and end.overall is None
    assert end.cells[""].interval.seeds == 3 and end.cells[""].verdict == "supported" and len(found) == 2
    assert found["kern is below dense at a tenth already"].cells[""].verdict == "contradicted"


@pytest.mark.parametrize("points, steps", [(4, 1000), (2, 4)])
def test_a_tenth_that_was_not_evaluated_is_not_judged(tmp_path, points, steps):
    """A tenth of 4 steps is no step, least of all the one before training."""
    overrides = [f"train.max_steps={steps}", "optim.warmup_steps=1"]
    found = judge(*make_pair(tmp_path, "kern", "dense", 1, overrides=overrides, points=points))
    assert found.keys() == {"kern ends below dense"}


def test_claims_over_settings(tmp_path):
    """Over all of them a claim is judged by the seeds that all have."""
    runs = []
    for name, seeds, gap in (("arxiv", 2, -0.2), ("books3", 3, 0.1)):
        runs += make_pair(tmp_path / name, "kern", "softmax", seeds, gap, 0.002, overrides=[f"data.name={name}"])
    found = judge(*runs)["kern ends below softmax"]
    assert {label: cell[1] for label, cell in found.cells.items()} == {"arxiv": "supported", "books3": "contradicted"}
    assert [cell[0].seeds for cell in found.cells.values()] == [2, 3]
    over_all, verdict, *_ = found.overall
    assert over_all.seeds == 2 and over_all.mean == pytest.approx(-0.05, abs=0.01) and verdict == "mixed"

    apart = make_pair(tmp_path / "x", "kern", "softmax", 1, overrides=["data.name=arxiv"])
    for router in ("kern", "softmax"):
        apart.append(make_run(tmp_path / f"y{router}", "run.seed=1", f"model.router={router}", "data.name=books3"))
    found = judge(*apart)["kern ends below softmax"]
    assert len(found.cells) == 2 and found.overall is None  # no seed in common


def test_every_pair_of_routers_is_judged(tmp_path):
    shape = {"left": "sqrtsoftplus", "right": "tanh", "seeds": 2, "noise": 0.002}
    runs = make_pair(tmp_path / "a", gap=-0.2, overrides=["data.name=arxiv"], **shape)
    runs += make_pair(tmp_path / "b", gap=0.1, overrides=["data.name=books3"], **shape)
    (pair,) = claims.judge_pairs(load_settings(*runs))
    verdicts = {label: cell.verdict for label, cell in pair.cells.items()} | {pair.words: pair.overall.verdict}
    assert verdicts == {"arxiv": "lower", "books3": "higher", "sqrtsoftplus against tanh": "mixed"}
    runs = [make_run(tmp_path / f"{a}{b}", f"model.router={a}", f"model.gate_scale={b}", until=0.55)
            for a in ("kern", "softmax") for b in (1, 3)]  # fmt: skip
    words = [pair.words for pair in claims.judge_pairs(load_settings(*runs))]
    assert len(words) == 4 and "kern against softmax (gate_scale 1)" in words
    assert "kern against kern (kern, gate_scale 3; kern, gate_scale 1)" in words
    assert claims.judge_pairs(load_settings(*make_pair(tmp_path / "x", "kern", "tanh", 2, until=0))) == []


def test_a_family_of_claims_is_corrected():
    """Three claims that are supported alone; two are not as a family. Another setting's column is another family."""
    claim = CLAIMS[0]

    def judge(p):  # seeds are alike, so this is the p-value by one variance of seeds for all, too
        mean = -math.sqrt(0.1) * float(stats.t.isf(p / 2, 9))
        return claims.Judged(Interval(mean, mean - 1, -1e-4, 3, ((0.1, 9.0), (0.0, 2.0))), "supported", p)

    cells = [{"a": judge(p)} for p in (0.01, 0.03, 0.04)]
    cells[1]["b"] = judge(0.03)
    cells[2]["b"] = judge(0.03)._replace(verdict="undecided (one seed)", p_value=math.nan)
    overall = [None, None, judge(0.01)]
    findings = [claims.Finding(claim, str(i), cells[i], overall[i], ("kern", str(i))) for i in range(3)]
    corrected = claims.correct_findings(findings)
    assert [of.cells["a"].corrected for of in corrected] == pytest.approx([0.03, 0.06, 0.06])
    assert [of.cells["a"].lost for of in corrected] == [False, True, True]
    assert corrected[1].cells["b"].corrected == pytest.approx(0.03)
    assert corrected[2].overall.corrected == pytest.approx(0.01)
    said = [report.format_finding(of._replace(overall=None))[0].split(", -")[0] for of in corrected]
    assert said[:2] == ["0 in a: supported (Holm: p 0.03)", "1 in a: supported (Holm: undecided, p 0.06)"]
    assert report.format_finding(corrected[2])[2].split(", -")[0] == "  2 in b: undecided (one seed)"
    text = tables.build_findings_table(corrected, [Setting(name, {}, []) for name in "ab"])[1]
    assert [row[3].split("] ")[1] for row in text[:2]] == [
        "**supported** (Holm: p 0.03)",
        "**supported** (Holm: undecided, p 0.06)",
    ]


def test_p_values_agree_with_verdicts(tmp_path):
    """Below 0.05 where the interval decides, for differences and for equal losses, and at the limits."""
    equal = next(claim for claim in CLAIMS if claim.equal)
    for mean in np.linspace(-2, 2, 81) * MARGIN:
        for variance in (1e-9, 1e-6, 4e-6, 1e-5):
            parts = ((variance, 4.0), (variance / 3, 2.0))
            half = half_width(parts, 0.05)
            found = Interval(float(mean), mean - half, mean + half, 3, parts)
            for claim in (CLAIMS[0], equal):
                assert (claim.p_value(found) < 0.05) == (claim.judge(found) != "undecided")
    assert math.isnan(CLAIMS[0].p_value(found._replace(seeds=1)))


def test_settings_of_one_text_share_their_windows(tmp_path):
    """The same differences in both settings: no more is known than from one, unless the text is another."""
    overall = {}
    for key, values in (("model.n_expert", (32, 64)), ("data.name", ("arxiv", "books3"))):
        runs = []
        for value in values:
            runs += make_pair(tmp_path / str(value), "kern", "softmax", 1, noise=0.1, overrides=[f"{key}={value}"])
        found = judge(*runs)["kern ends below softmax"]
        one, other = found.cells.values()
        assert one[0][:4] == pytest.approx(other[0][:4])
        overall[key] = (found.overall[0].high - found.overall[0].low) / (one[0].high - one[0].low)
    assert overall == pytest.approx({"model.n_expert": 1, "data.name": 1 / math.sqrt(2)})


def test_each_claim_names_known_routers():
    for claim in CLAIMS:
        assert {claim.left, claim.right} <= STYLES.keys() & {*claim.words.replace(",", "").split()}, claim


# ---- the paper's numbers
def test_numbers_are_those_compared_with_the_paper():
    """All 367 were compared with a second transcription of the paper: after a correction, put in the new hash."""
    numbers = {}
    for stem, printed in NUMBERS.items():
        numbers[stem] = [{key: value for key, value in table.items() if key != "doubtful"} for table in printed]
    assert hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest().startswith("1e1bc6f5290e5894")


@pytest.mark.parametrize("experiment", NUMBERS)
def test_each_table_is_of_runs_of_an_experiment(experiment):
    file = CONFIG / "paper" / f"{experiment}.toml"
    points = []
    for point in configure.sweep_points(file):
        sections = configure.load(file, point).model_dump()
        points.append({f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()})
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


def make_paper_setting(folder, experiment, *overrides, routers=("dense", "kern"), **shape):
    """The one setting of an experiment's runs of two routers, seed 0, evaluated at each tenth."""
    file = CONFIG / "paper" / f"{experiment}.toml"
    runs = [make_run(folder / router, f"model.router={router}", *overrides, file=file, **shape) for router in routers]
    (setting,) = load_settings(*runs)
    setting.printed = read_paper_losses(experiment, setting.values)
    return setting


@pytest.mark.parametrize("steps, heads", [(50_000, ["5,000", "50,000"]), (1000, ["100 (5K)", "1,000 (50K)"])])
def test_numbers_are_beside_the_same_part_of_training(tmp_path, steps, heads):
    setting = make_paper_setting(tmp_path, "books3_512", f"train.max_steps={steps}", "model.n_layer=2", end=3.5)
    head, rows = tables.build_loss_table(setting)
    assert [head[0], head[1], head[10], len(head)] == ["validation loss at step", *heads, 11]
    dense, paper, difference, kern, *rest = rows
    losses = [setting.arms[0].losses(steps * i // 10)[0] for i in range(1, 11)]
    assert dense == ["**dense**", *[f"{loss:.4f}" for loss in losses]]
    assert paper == ["paper", "4.1460", *[""] * 8, "3.4429?"]
    assert difference[1] == f"{losses[0] - 4.1460:+.4f}" and set(difference[2:10]) == {""}
    assert difference[10] == f"{losses[9] - 3.4429:+.4f}"
    assert rest[0] == ["paper", "4.2165", *[""] * 8, "3.3080"]
    assert "dense at 50K: 0.16 below the mean of three seeds" in page.compare_with_paper(setting, "books3_512")

    head, rows = tables.build_difference_table(setting, "kern")
    assert head[0] == f"at step {steps:,}" and head[-1] == "the paper's difference"
    assert rows[0][-1] == "" and rows[1][3:] == ["", "", ""]  # dense at 50K is doubtful


def test_numbers_of_an_unfinished_run(tmp_path):
    """None of the end beside a step before it, nor any beside a step that is no tenth."""
    setting = make_paper_setting(tmp_path, "books3_512", until=0.55, points=20)
    assert setting.end == 27_500
    head, rows = tables.build_loss_table(setting)
    assert head[-1] == "25,000" and rows[1] == ["paper", "4.1460", "", "", "", ""]
    assert tables.build_difference_table(setting, "kern")[1][0][-1] == ""
    assert "doubtful" not in page.compare_with_paper(setting, "books3_512")
    setting = make_paper_setting(tmp_path / "x", "books3_512", until=0, points=20)
    head, rows = tables.build_loss_table(setting)
    assert head[1:] == ["0"] and [row[0] for row in rows] == ["**dense**", "**kern**"]


def test_deviations_of_the_paper_over_seeds(tmp_path):
    setting = make_paper_setting(tmp_path, "seeds")
    rows = tables.build_loss_table(setting)[1]
    assert rows[1][1] == "4.3863 ± 0.1699" and rows[1][10] == "3.6030 ± 0.1132?" and rows[4][10] == "3.3112 ± 0.0041"
    assert "± is the standard deviation over seeds" in page.compare_with_paper(setting, "seeds")
    setting = make_paper_setting(tmp_path / "x", "large_gra", routers=("softmax", "kern"))
    assert tables.build_difference_table(setting, "kern")[1][0][-1] == "+0.1188"  # 3.4150 - 3.2962


def test_numbers_are_those_of_the_setting(tmp_path):
    both = ("softmax", "kern")
    setting = make_paper_setting(tmp_path, "sparsity", "model.n_expert=128", "data.name=arxiv", routers=both)
    assert setting.printed.losses == {("softmax", 10): 1.8738, ("kern", 10): 1.8195}
    assert setting.printed.subtract("kern", "softmax", 10) == pytest.approx(1.8195 - 1.8738)
    assert setting.printed.subtract("kern", "softmax", 1) is None
    assert setting.printed.subtract("kern", "softmax", None) is None
    setting = make_paper_setting(tmp_path / "x", "sparsity", "model.n_expert=16", "data.name=arxiv", routers=both)
    assert page.compare_with_paper(setting, "sparsity") == "The paper prints no loss of `sparsity` in this setting."
    assert [row[0] for row in tables.build_loss_table(setting)[1]] == ["**softmax**", "**kern**"]


def test_unknown_experiments_are_refused(tmp_path):
    for name in ("books3", "nothing", "../paper/books4"):
        with pytest.raises(ValueError) as refused:
            read_paper_losses(name, {})
        known = "arxiv_512, books3_512, books3_1024, len2048, large_model_350M, large_model_1.3B, large_gra, large_spa"
        said = f"--experiment {name}: not a file in config/paper; the paper prints losses of {known}, sparsity, "
        assert str(refused.value) == f"{said}relu_table, seeds"
    setting = make_paper_setting(tmp_path, "kern_after")
    for name in ("kern_after", "downstream"):  # a figure alone, and accuracies
        setting.printed = read_paper_losses(name, setting.values | {"model.n_embd": 768})
        assert page.compare_with_paper(setting, name) == f"The paper prints no loss of `{name}` in this setting."


def test_differences_from_the_papers_setting_are_listed(tmp_path):
    own = make_paper_setting(tmp_path / "own", "books3_512", "log.interval=100", "eval.interval=5000", "run.seed=7")
    assert page.list_differences(own, "books3_512") == []
    words = page.compare_with_paper(own, "books3_512")
    assert "Not the paper's setting" not in words and "Other tokens" not in words
    changed = ["data.name=stdlib", "optim.lr=3e-3", "train.balance_loss_coef=0.01", "model.vocab_size=300"]
    other = make_paper_setting(tmp_path / "other", "books3_512", *changed)
    expected = ["data.name = stdlib (books3)", "optim.lr = 0.003 (0.0006)", "train.balance_loss_coef = 0.01 (0.0)"]
    found = page.list_differences(other, "books3_512")
    assert sorted(expected) == sorted(line for line in found if "vocab" not in line) and len(found) == 4
    words = page.compare_with_paper(other, "books3_512")
    assert "**Not the paper's setting**" in words and f"brackets): {', '.join(found)}." in words
    assert "**Other tokens**" in words


# ---- tables and pictures
def test_measures_besides_the_loss(tmp_path):
    measured = ["val_ema/loss", "val_ema/books/loss", "tasks/sciq/acc_stderr", "tasks/sciq/acc", "tasks/sciq/em"]
    kern = [make_run(tmp_path / f"kern{seed}", f"run.seed={seed}", measured=measured) for seed in (0, 1)]
    dense = make_run(tmp_path / "dense", "model.router=dense", 'eval.tasks=["sciq"]', measured=measured[:-1], points=20)
    (setting,) = load_settings(*kern, dense)
    every = list(range(0, 1001, 200))  # where all runs have them
    assert setting.measures == {
        "val_ema/loss": ("loss of the weights' mean", every), "tasks/sciq/acc": ("sciq, accuracy", every)
    }  # fmt: skip
    head, rows = tables.build_measures_table(setting)
    assert head == ["at the end", "loss of the weights' mean", "sciq, accuracy"]
    for arm, (label, *cells) in zip(setting.arms, rows, strict=True):
        assert label == arm.label and cells == [tables.format_mean([loss + 1 for loss in arm.losses(1000)])] * 2
    panels = pictures.plot_measures(setting, "kern").axes
    assert [[len(line.get_xdata()) for line in axes.lines] for axes in panels] == [[5, 5], [6, 6]]


def test_scores_on_unequal_numbers_of_documents_say_so(tmp_path):
    limits = {0: 500, 1: 500, 2: 0}
    runs = [
        make_run(tmp_path / str(seed), f"run.seed={seed}", f"eval.task_limit={limit}", measured=["tasks/sciq/acc"])
        for seed, limit in limits.items()
    ]
    names = [load_settings(*some)[0].measures["tasks/sciq/acc"][0] for some in (runs[:2], runs)]
    assert names == ["sciq, accuracy", "sciq, accuracy (unequal eval.task_limit: 0, 500)"]


def test_losses_over_seeds(tmp_path):
    runs = [make_run(tmp_path / str(seed), f"run.seed={seed}") for seed in range(3)]
    (setting,) = load_settings(*runs)
    _, ((label, *cells),) = tables.build_loss_table(setting)
    losses = setting.arms[0].losses(1000)
    assert label == "**kern** (3 seeds)" and len(cells) == 10
    assert cells[-1] == f"{sum(losses) / 3:.4f} ± 0.1000"  # seeds are 0.1 apart


def test_differences_to_the_baseline(tmp_path):
    runs = make_pair(tmp_path, "dense", "kern", gap=0.25) + make_pair(tmp_path / "x", "tanh", "kern", gap=-0.1)[:3]
    head, rows = tables.build_difference_table(load_settings(*runs)[0], "kern")
    assert head == ["at step 1,000", "seeds", "loss", "minus kern, paired, 95%", "kern is"]
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("dense", "+0.2500 [+0.2500, +0.2500]", "better"),
        ("tanh", "-0.1000 [-0.1000, -0.1000]", "worse"),
        ("kern", "", ""),
    ]
    rows = tables.build_difference_table(load_settings(*runs[:3], runs[3], runs[6])[0], "kern")[1]
    assert rows[0][1:2] + rows[0][4:] == ["3, 1 paired", "undecided (one seed)"] and rows[1][1] == "1"


def test_lines_bands_and_legends():
    """The legend gives the last values in their order; the y-axis leaves out the steep beginning."""
    lines = {str(i): (style("kern"), {0: (9, 8, 10), 5: (end, end, end), 9: (end, end - 1, end + 1), 12: (end,) * 3})
             for i, end in enumerate([2, 2.5, 1])}  # fmt: skip
    figure = pictures.plot_lines([("x", "y", lines), ("x", "nothing", {})], margin=0.1)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["1 2.5000", "0 2.0000", "2 1.0000"]
    assert axes.get_ylim() == pytest.approx((0.85, 2.65))
    assert axes.lines[0].get_xydata().tolist() == [[0, 9], [5, 2], [9, 2], [12, 2]]
    band = axes.collections[0].get_paths()[0].vertices.tolist()
    assert [0, 8] in band and [0, 10] in band and [0, 9] not in band
    assert pictures.plot_lines([("x", "y", {})]) is None


def test_pictures_show_what_their_axes_say(tmp_path):
    runs = make_pair(tmp_path, "kern", "dense", 2, gap=-0.25)
    (setting,) = load_settings(*runs)
    ends = pictures.plot_ends([setting], "kern").axes[0]
    assert ends.lines[1].get_xydata().tolist() == pytest.approx(np.array([[0.25, 0]]))
    loss, train = pictures.plot_loss(setting, "kern").axes
    for axes, losses in ((loss, Run.loss), (train, Run.train_loss)):
        means = [statistics.fmean(losses(run, 1000) for run in arm.runs.values()) for arm in setting.arms]
        assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx(means)
    routing = pictures.plot_routing(setting, "kern")
    assert [axes.lines[0].get_ydata()[-1] for axes in routing.axes] == [4.0, 3.0, 2.0, 1.5]
    assert "in training (1 to 8)" in routing.axes[0].get_ylabel()
    loads = pictures.plot_loads(setting, "kern").axes[0].images[0].get_array()
    expected = np.array(setting.arms[1].first.evaluations[1000]["val/loads"])
    assert pictures.plot_pairs(setting, "kern") is None
    (setting,) = load_settings(*runs, make_run(tmp_path / "tanh", "model.router=tanh", end=1.875))
    texts = pictures.plot_pairs(setting, "kern").axes[0].texts
    cells = {text.get_position(): (text.get_text(), text.get_weight()) for text in texts}  # kern, tanh (1 seed), dense
    assert len(cells) == 6 and cells[0, 2] == ("+0.2500", "bold") and cells[1, 0] == ("-0.1250", "normal")
    shares = 2.0 ** loads.filled(-np.inf)
    np.testing.assert_allclose(shares, expected / expected.mean(1, keepdims=True), rtol=1e-12)


# ---- the whole command
@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder of runs, folder of their report, what the terminal showed): three routers, two seeds."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("reports") / "new" / "report"
    for router, end in (("dense", 2.0), ("softmax", 1.95), ("kern", 1.9)):
        for seed in range(2):
            make_run(runs / f"{router}-{seed}", f"model.router={router}", f"run.seed={seed}", end=end, noise=0.01)
    with redirect_stdout(io.StringIO()) as said:
        arguments = [str(runs), "--experiment", "books3_512", "--out", str(out)]
        assert report.main(arguments) == 0
    return runs, out, said.getvalue().splitlines()


PICTURES = {  # size in pixels, height and width
    "ends.png": (None, 880), "loss.png": (550, 1540), "difference.png": (550, 990),
    "pairs.png": (None, None), "routing.png": (1100, 1540), "loads.png": (None, 990),
}  # fmt: skip
DESCRIPTION = (
    "`mix-bytes`: 2,048 tokens per step, 2.0 M in all; max_steps 1000, n_layer 2, n_expert 64, top_k 8, n_embd 128, "
    "block_size 256, expert_hidden 8, lr 0.003, gate_scale 1.0, gate_norm 0.0, "
    "balance_loss_coef 0.0, balance_loss_scope global, z_loss_coef 0.0, bias_update_rate 0.0, router_lr_ratio 1.0, "
    "expert_out_lr_ratio 1.0; "
    "8 validation windows of 8 documents, at most 1 of one."
)


def test_report_is_written(written):
    _, out, said = written
    assert {file.name for file in out.iterdir()} == PICTURES.keys() | {"report.md", "report.html"}
    text = (out / "report.md").read_text()
    for name, (height, width) in PICTURES.items():
        pixels = matplotlib.image.imread(out / name)[..., :3]
        assert pixels.shape[:2] == (height or pixels.shape[0], width or pixels.shape[1]) and min(pixels.shape[:2]) > 150
        colours = np.unique((255 * pixels.astype(np.float64)).round() @ [65536, 256, 1])
        assert len(colours) > 40, name  # lines, words and their edges, not an empty frame
    assert re.findall(r"!\[[^]]+\]\((.*?)\)", text) == list(PICTURES)
    assert text.startswith("# 6 runs compared\n")
    for part in ("| kern ends below dense | Sec. 4.1 | -0.", "3.4429?", "(5K)", DESCRIPTION):
        assert part in text, part
    assert said[2].split()[:2] == ["small-dense", "dense"] and said[7].split()[0] == "small-softmax-seed1"
    assert any(
        re.fullmatch(r"kern ends below dense: \w+(?: \(Holm: [^)]+\))?, -0\.\d{4} \[.*\]", line) for line in said
    )
    assert said[-1] == f"report: {out}/report.html"


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
HARMLESS |= {"table", "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption", "details", "summary"}


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


def test_the_page_contains_text_and_pictures(written):
    out = written[1]
    pictures, page = assert_self_contained((out / "report.html").read_text())
    images = [base64.b64decode(source.partition(",")[2]) for source in pictures]
    assert images == [(out / name).read_bytes() for name in PICTURES]
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    words = "".join(page.text)
    for part in ("Claims", "kern ends below dense", "supported", "mix-bytes", "4.1460", "Not the paper's setting"):
        assert part in words, part
    assert "**" not in words and "`" not in words


@pytest.fixture
def drawn(monkeypatch):
    """Names of the pictures; they are plotted, but their files are one pixel: drawing takes a second each."""
    names = []

    def save_figure(figure, path):
        names.append(path.name)
        matplotlib.image.imsave(path, np.zeros((1, 1, 3)))

    monkeypatch.setattr(page, "save_figure", save_figure)
    return names


def run_report(out, *arguments):
    """(lines on the terminal, text of report.md); the page is self-contained, and has each picture."""
    with redirect_stdout(io.StringIO()) as said:
        assert report.main([*map(str, arguments), "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    pictures, _ = assert_self_contained((out / "report.html").read_text())
    names = re.findall(r"!\[[^]]+\]\((.*?)\)", text)
    assert len(pictures) == len(names) and all((out / name).is_file() for name in names)
    assert "nan" not in text
    return said.getvalue().splitlines(), text


WILD = "<img src=x onerror=alert(1)>&amp;|`**b`**| <b>"


def test_names_cannot_break_the_page(tmp_path, drawn):
    """Folders may be named anything; the names of runs and corpora are checked by configure."""
    runs = [make_run(tmp_path / WILD / f"{name}|{WILD}", until=1 - i / 10) for i, name in enumerate("ab")]
    runs += [make_run(tmp_path / WILD / "dense", "model.router=dense", until=0.5)]
    _, text = run_report(tmp_path / "out", *runs)
    shown = "".join(Page((tmp_path / "out/report.html").read_text()).text)
    assert "alert(1)" in text and "<img" not in text and "<b>" not in text
    assert "<img src=x onerror=alert(1)>&amp;|" in shown


def test_words_in_a_page(tmp_path):
    """Of Markdown's marks bold and code count, and a | ends no cell."""
    blocks = [("h1", "a < b & c"), ("p", "x <script>y</script> **z** `w<v`"), ("list", ["one", "<two>"])]
    blocks += [("table", ["a|b", "n"], [["x | y", "+0.1 [0, 1] **ok**"], ["p", "+0.1 [0, 1]"], ["q", "1 ± 2"]])]
    blocks.append(("fold", "more & more", [("p", "**within**")]))
    write_page(blocks, tmp_path)
    html, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert_self_contained(html)
    assert "<h1>a &lt; b &amp; c</h1>" in html and "<title>a &lt; b &amp; c</title>" in html
    assert "<b>z</b> <code>w&lt;v</code>" in html and "<li>&lt;two&gt;</li>" in html
    cells = re.findall("<td>(.*?)</td>", html)
    assert cells[:2] == ["x | y", "+0.1 [0,\u00a01] <b>ok</b>"]  # may break before and after the interval
    assert cells[3::2] == ["+0.1 [0,\u00a01]", "1 ±\u00a02"]
    assert "| a\\|b | n |\n| --- | --: |\n| x \\| y | +0.1 [0, 1] **ok** |" in text
    assert "<details><summary>more &amp; more</summary><p><b>within</b></p></details>" in html
    text, _, folded = text.partition("<details><summary>more &amp; more</summary>\n\n")
    assert "<" not in text and "# a &lt; b &amp; c" in text and folded == "**within**\n\n</details>\n"


def test_without_the_baseline_there_is_no_difference(tmp_path, drawn):
    runs = make_pair(tmp_path, "dense", "softmax", 1)
    run_report(tmp_path / "out", *runs, "--baseline", "softmax")
    assert drawn == ["ends.png", "loss.png", "difference.png", "routing.png", "loads.png"]
    drawn.clear()
    said, text = run_report(tmp_path / "out", *runs)
    assert drawn == ["loss.png", "routing.png", "loads.png"]
    assert not (tmp_path / "out/ends.png").exists()  # the pictures of an earlier report are removed
    assert "minus" not in text.partition("## Loss")[2]
    assert "softmax ends below dense: undecided (one seed), +0.0000 [+0.0000, +0.0000]" in said
    one = [make_run(tmp_path / str(i), f"train.balance_loss_coef={i / 10}") for i in range(2)]
    drawn.clear()
    _, text = run_report(tmp_path / "out", *one)  # kern alone, with two constants
    assert drawn == ["loss.png", "routing.png", "loads.png"] and "**kern, balance_loss_coef 0.1**" in text
    drawn.clear()
    _, text = run_report(tmp_path / "out", runs[0])
    assert drawn == ["loss.png"] and text.startswith("# One run\n")
    assert "None apply: no setting has both routers of a claim." in text


@pytest.mark.parametrize("at", [0.0, 1.0])
def test_one_evaluation(tmp_path, drawn, at):
    """Before training, or after it alone."""
    runs = make_pair(tmp_path, "kern", "dense", 2, gap=-0.1, noise=0.001, until=at, points=10 if not at else 1)
    if at:
        for run in runs:
            file = run / "metrics.jsonl"
            file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"step": 0,' not in line))
    said, text = run_report(tmp_path / "out", *runs)
    assert ("difference.png" in drawn) == ("kern ends below dense" in text) == bool(at)
    assert f"validation loss at step | {1000 if at else 0:,}" in text
    assert any("0 of 1,000" in line for line in said) != bool(at)


def test_metrics_of_old_runs(tmp_path, drawn):
    """Without losses of windows, loads and times: differences of means, and neither interval nor verdict."""
    missing = ["val/window_losses", "val/loads", "router/", "perf"]
    runs = make_pair(tmp_path, "kern", "dense", gap=-0.125, without=missing)
    said, text = run_report(tmp_path / "out", *runs)
    assert drawn == ["ends.png", "loss.png", "difference.png"]
    assert "kern ends below dense: undecided (one window), -0.1250" in said
    assert "| +0.1250 | undecided |" in text
    row = r"kern0` \| kern \| mix-bytes \| 0.44M \| 0.21M \| 1,000 \| [\d.]+ \| [\d.]+ \| - \| 1.000 → 2.000 \| 2.00 \|"
    assert re.search(row, text)


def test_several_settings(tmp_path, drawn):
    """Three sizes, a corpus whose name differs little, and a dense model on a third."""
    runs = [
        run
        for name, n in (("mix_a", 16), ("mix_a", 64), ("mix_a", 128), ("mix-a", 64))
        for run in make_pair(tmp_path / name / str(n), "kern", "softmax", 2, -0.1, 0.001,
                             overrides=[f"data.name={name}", f"model.n_expert={n}"])
    ]  # fmt: skip
    runs.append(make_run(tmp_path / "dense", "model.router=dense", "data.name=alone"))
    said, text = run_report(tmp_path / "out", *runs)
    assert len(set(drawn)) == len(drawn) and drawn[:2] == ["ends.png", "model.n_expert.png"]
    head = next(line for line in text.splitlines() if line.startswith("| claim"))
    assert head.split(" | ")[:4] == ["| claim", "where", "all settings", "n_expert 16, mix_a"]
    assert any(re.match(r"kern ends below softmax: supported \(Holm: p .*\), -0\.(09|10)", line) for line in said)
    part = text.partition("## n_expert 64, alone")[2].partition("\n## ")[0]
    assert "minus kern" not in part and "dense" in part
    drawn.clear()
    more = [make_run(tmp_path / f"lr{n}", "data.name=mix_a", f"model.n_expert={n}", "optim.lr=1e-3") for n in (16, 64)]
    run_report(tmp_path / "out2", *runs[:12:4], *more)
    assert "model.n_expert.png" not in drawn  # a number of experts has two losses


def test_folders_stand_for_the_runs_below_them(written, tmp_path):
    runs, out, _ = written
    first, *others = sorted(runs.iterdir())
    assert expand_folders([runs]) == [first, *others]
    assert expand_folders([others[0], out, runs, tmp_path]) == [others[0], first, *others[1:], tmp_path]


def test_the_default_folder_follows_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("small-kern", "small-kern-seed1", "small-tanh", "small_scale-kern", "old/small-kern"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()

    def name(*runs):
        return str(report.name_folder([tmp_path / "runs" / run for run in runs]))

    small = ["small-kern", "small-kern-seed1", "small-tanh"]
    assert name(*small) == name(*small[::-1]) == "runs/report-small"
    assert name(*small, "small_scale-kern", "old/small-kern") == "runs/report"
    assert name("small-kern-seed1", "small-tanh") == "runs/report-small-kern-seed1+tanh"
    assert re.fullmatch("runs/report-small-kern-[0-9a-f]{6}", name("small-kern"))
    assert str(report.name_folder([report.Path("runs/small-tanh")])) == "runs/report-small-tanh"


def test_bad_input_is_refused(tmp_path, capsys):
    def error(*arguments, out=tmp_path / "out"):
        assert report.main([*map(str, arguments), "--out", str(out)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and len(said.err.splitlines()) == 1
        assert not (tmp_path / "out").exists()
        return said.err

    nothing, run = tmp_path / "nothing", make_run(tmp_path / "kern")
    assert f"{nothing}: no such folder; give a run's" in error(nothing)
    started = make_run(tmp_path / "started", without=["val/"])
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
    wrong = "--experiment books4: not a file in config/paper; the paper prints losses of"
    assert wrong in error(run, "--experiment", "books4")
    (tmp_path / "curves.png").write_text("")
    assert "curves.png: File exists; name another folder with --out" in error(run, out=tmp_path / "curves.png")
    (tmp_path / "report.md").write_text("# My thesis\n\n![a](curves.png)\n")
    assert f"{tmp_path}: its report.md is not a report of runs" in error(run, out=tmp_path)
    assert (tmp_path / "curves.png").exists()
    assert f"--out {run}: a run's folder" in error(run, out=run)


@pytest.mark.parametrize(
    "command, packages, file",
    [(report, "matplotlib, scipy", "report"), (compare, "scipy", "report"), (downstream, "lm_eval", "eval")],
)
def test_missing_packages_are_named_before_anything_is_read(monkeypatch, capsys, command, packages, file):
    monkeypatch.setattr("common.command.find_spec", lambda name: None)
    assert command.main(["no-such-run", "nor-this"][: 1 + (command is compare)]) == 2
    assert capsys.readouterr().err == f"error: {packages} not installed: pip install -r requirements-{file}.txt\n"


# ---- the terminal

SPEEDS = {1: 1e3, 2: 12345.6, 3: 1e5}
DENSE = [{"step": i, "train/loss": 5.0, "perf/tokens_per_sec": speed} for i, speed in SPEEDS.items()]
DENSE += [{"step": i, "train/loss": loss} for i, loss in ((1080, 4.0), (1081, 2.0), (1200, 2.5), (1201, 9.0))]
DENSE += [{"step": 0, "val/loss": 5.5}, {"step": 1200, "val/loss": 2.34567}]
KERN = [{"step": 0, "val/loss": 5.5, "val/load_imbalance": 1.5, "val/gate_norm": 0.5941}]
KERN += [{"step": 1000, "val/loss": 2.25, "val/load_imbalance": 3.456, "val/gate_norm": 2}]


def test_table_on_the_terminal(tiny, tmp_path):
    runs = []
    for router, lines in (("dense", DENSE), ("kern", KERN)):
        folder = tmp_path / router
        folder.mkdir()
        config = tiny(f"run.name=run-{router}", f"model.router={router}", "train.max_steps=1200")
        (folder / "config.toml").write_text(configure.dumps(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"tokens": 0} | line) + "\n" for line in lines))
        runs.append(load_run_record(folder))
    head, rule, dense, kern = text_table(tables.COLUMNS, [tables.summarize_run(run) for run in runs], 2).splitlines()
    assert re.split("  +", head.strip()) == list(tables.COLUMNS)
    assert set(rule) == {"-"} and len(rule) == len(head) == len(dense) == len(kern)
    # 257·32 + 32·32 tables, 2 layers of 4·32² + 2·32 and 2·32·16 a dense MLP, 32 of the last norm: 19,744 parameters.
    # Training loss: mean of 2.0 and 2.5, the batches of the last tenth, 1,081 to 1,200.
    assert " ".join(dense.split()) == "run-dense dense tiny 0.02M 0.02M 1,200 2.2500 2.3457 12,346 - -"
    # Each layer 2·32·8·8 + 8·32 + 8 + 1 instead of 2·32·16: 26,402; of 8 experts 2 are active: 20,258.
    assert " ".join(kern.split()) == "run-kern kern tiny 0.03M 0.02M 1,000 of 1,200 - 2.2500 - 0.594 → 2.000 3.46"
