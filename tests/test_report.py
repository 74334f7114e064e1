"""report/: which runs are read and grouped, what is paired with what, verdicts, the paper's
numbers.
"""

import copy
import hashlib
import json
import math
import re
import shutil
from itertools import product

import numpy as np
import pytest
from fake_runs import (
    CONFIG,
    add_checkpoint,
    load_groups,
    loss_of,
    make_curves,
    make_run,
    make_seeds,
)
from scipy import stats

from model import GPT
from report import tables
from report.__main__ import make_report_parser
from report.comparisons import compare_group
from report.groups import group_runs
from report.lines import collect_differences
from report.overview import build_overview, count_states
from report.page import build_sections, read_report
from report.paper import NUMBERS, build_paper_table
from runtime import FAILURE_FILE
from runtime.runs import Run, read_runs


def load(*folders, key=None):
    return group_runs([Run(folder) for folder in folders], key)


def labels_of(group):
    return [variant.label for variant in group.variants]


def name_of(comparison):
    return f"{comparison.left.label} against {comparison.right.label}"


def test_losses_that_are_not_finite(tmp_path):
    """A finite one after them counts as an evaluation."""
    folder = make_run(tmp_path / "kern", until=0.7)
    line, metrics = '{"step": %d, "tokens": 1, "val/loss": NaN}\n', folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + line % 800 + line % 900)
    assert Run(folder).progress == "failed at step 900 of 1,000: val/loss is nan"
    for text, said in (
        (line % 0, "failed at step 0 of 1,000: val/loss is nan; continue with train.py"),
        ("", "stopped at step 0 of 1,000; continue with train.py"),
    ):
        metrics.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_report(make_report_parser("scripts.report", None).parse_args([str(folder)]))


def test_folders_stand_for_the_runs_below_them(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "deep/er/b")]
    (tmp_path / "report").mkdir()
    for folder in (tmp_path / "report", runs[0]):  # a run counts, also if it has a report
        (folder / "report.html").write_text("")
    places = [runs[1], tmp_path, tmp_path / "nothing", tmp_path / "report"]
    read, (note,) = read_runs(places)
    assert [run.path for run in read] == [runs[1], runs[0]]
    assert note.startswith(f"left out: {tmp_path}/nothing: no such folder")


def test_runs_on_other_text_are_refused(tmp_path):
    facts = {"data": "sha of the text", "tokenizer": "sha of GPT-2's"}
    dense = make_run(tmp_path / "dense", "model.router=dense")
    softmax = make_run(tmp_path / "softmax", "model.router=softmax")
    kern = make_run(tmp_path / "kern")
    add_checkpoint(dense, **facts)
    for name in ("data", "tokenizer"):
        add_checkpoint(kern, 200, **facts | {name: "else"})
        add_checkpoint(kern, 100, **facts)  # the last counts
        groups, notes = load(dense, softmax, kern)
        said = rf"dense and .*: {name} .* is sha of .* and else.* separate reports"
        assert groups == [] and re.search(said, notes[-1])
        newest, older = (kern / f"checkpoints/step_00000{n}00/manifest.json" for n in (2, 1))
        newest.write_text("damaged")  # an older one knows the data, too
        groups, notes = load(dense, softmax, kern)
        assert len(groups) == 1 and f"{newest}: damaged, checksum mismatch" in notes
        older.write_text("damaged")
        groups, notes = load(dense, softmax, kern)
        assert groups == [] and f"so the data of {kern} is unknown" in notes[-1]
        shutil.rmtree(kern / "checkpoints")
    more = make_run(tmp_path / "more", "model.router=tanh", windows=9)
    groups, (note,) = load(softmax, more)
    assert groups == [] and "number of validation windows is 8 and 9" in note
    # nor are unfinished ones shown beside others
    young = make_run(tmp_path / "young", "model.router=tanh", windows=9, until=0.3)
    same = make_run(tmp_path / "same", "model.router=tanh", "run.seed=1", until=0.3)
    (group,), notes = load(softmax, young, same)
    assert [curve.first_run.path for curve in group.curves] == [same]
    assert "number of validation windows is 8 and 9" in notes[-1] and "young" in notes[-1]
    other = make_run(tmp_path / "other", "data.name=other")
    groups, notes = load(softmax, more, other)  # the other group stands
    assert [group.label for group in groups] == ["other"]
    assert "number of validation windows" in notes[-1]


def test_the_table_of_runs(tmp_path):
    """Settings in the order they came in; of each the finished runs by loss, then the others."""
    branch = ["optim.schedule=wsd", "train.branch_from=runs/trunk/"]
    runs = {
        "a": make_run(tmp_path / "a", "model.n_layer=3", *branch),
        "b": make_run(tmp_path / "b", end=2.0),
        "c": make_run(tmp_path / "c", "model.router=tanh", "run.seed=2", end=1.5),
        "d": make_run(tmp_path / "d", "run.seed=4", until=0.3),
        "e": make_run(tmp_path / "e", "run.seed=6", until=0.7),
        "f": make_run(tmp_path / "f", "run.seed=8", until=0.5, end=1.0),
    }
    metrics = runs["e"] / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 800, "tokens": 1, "val/loss": NaN}\n')
    read, _ = read_runs(runs.values())
    assert count_states(read) == "6 runs: 2 stopped, 3 finished, 1 failed"
    assert count_states(read[:1]) == "1 run: 1 finished"
    table = build_overview(read, "kern")
    columns = ["run", "settings", "state", "step", "train loss", "val loss", "note"]
    assert table.columns == [*columns, "tokens/s", "trouble"]
    rest = "n_layer 2, schedule cosine"
    settings_of_a = "kern, seed 0, n_layer 3, schedule wsd, branch of runs/trunk"
    wanted = [
        ("a", settings_of_a, "finished", "1,000 of 1,000 100%", "lowest, baseline"),
        ("c", f"tanh, seed 2, {rest}", "finished", "1,000 of 1,000 100%", "lowest"),
        ("b", f"kern, seed 0, {rest}", "finished", "1,000 of 1,000 100%", "baseline"),
        ("f", f"kern, seed 8, {rest}", "stopped", "500 of 1,000  50%", "baseline"),
        ("d", f"kern, seed 4, {rest}", "stopped", "300 of 1,000  30%", "baseline"),
        ("e", f"kern, seed 6, {rest}", "failed", "800 of 1,000  80%", "baseline"),
    ]
    for row, (name, settings, state, step, note) in zip(table.rows, wanted, strict=True):
        assert (row["run"], row["settings"], row["state"]) == (str(runs[name]), settings, state)
        assert (row["step"], row["note"]) == (step, note)
        loss = "nan" if name == "e" else f"{loss_of(runs[name]):.4f}"
        assert (row["val loss"], row.get("best", ""), row["left"]) == (loss, "", "")
        assert row["trouble"] == ("val/loss is nan" if name == "e" else "")


def test_a_group_in_words(tmp_path):
    """Its sizes are those of the models; the experts that a token does not use are inactive."""
    runs = []
    for router in ("dense", "kern"):
        own = [f"model.router={router}", "train.micro_batch_size=4"]
        runs.append(make_run(tmp_path / router, *own, documents=3))
    (group,) = load_groups(*runs)
    sizes = []
    for run in runs:
        model = GPT(Run(run).config.model)
        total = sum(parameter.numel() for parameter in model.parameters())
        expert = 2 * 128 * 8  # both matrices of one
        idle = 0 if run.name == "dense" else 2 * (64 - 8) * expert
        sizes.append((f"{total / 1e6:.2f}M", f"{(total - idle) / 1e6:.2f}M"))
    (dense, dense_active), (kern, kern_active) = sizes
    lowest, highest = sorted([dense_active, kern_active])
    assert tables.describe_group(group) == (
        "`mix-bytes`: 1,000 steps of 2,048 tokens; 8 validation windows of 3 documents. "
        f"{dense} to {kern} parameters, {lowest} to {highest} active. Losses in nats per byte."
    )


@pytest.mark.parametrize(("points", "shown"), [(9, 9), (10, 10), (11, 6), (20, 10), (25, 9)])
def test_at_most_ten_evaluations_are_in_a_table(tmp_path, points, shown):
    """Evenly apart, and the last among them."""
    run = make_run(tmp_path / "run", "train.max_steps=1100", points=points)
    (group,) = load_groups(run)
    stride = -(-points // 10)
    wanted = [1100 * i // points for i in range(points, 0, -stride)][::-1]
    table = tables.build_loss_table(group)
    assert table.columns[2:] == [f"{step:,}" for step in wanted] and len(wanted) == shown
    assert table.lines[0][2:] == [f"{loss_of(run, step):.4f}" for step in wanted]


# ---- groups and variants
def test_a_group_is_what_changes_a_loss(tmp_path):
    runs = []
    for name, n in (("arxiv", 128), ("books3", 32), ("arxiv", 32), ("books3", 128)):
        own = [f"data.name={name}", f"model.n_expert={n}"]
        runs += make_seeds(tmp_path / f"{name}{n}", {"kern": 2, "softmax": 2}, 1, own)
    groups = load_groups(*runs)
    labels = [f"n_expert {n}, {name}" for n in (32, 128) for name in ("arxiv", "books3")]
    assert [group.label for group in groups] == labels
    for group in groups:
        assert labels_of(group) == ["softmax", "kern"]
    same = ["eval.interval=50", "train.micro_batch_size=4", "train.device=cpu"]
    same += ["data.dir=/elsewhere", "log.group=x"]
    other = ["optim.lr=1e-4", "train.batch_size=16", "model.top_k=4", "eval.windows=64"]
    runs = []
    for i, override in enumerate(["run.seed=0", *same, *other]):
        runs.append(make_run(tmp_path / f"x{i}", override))
    groups = load_groups(*runs)
    labels = {group.label for group in groups}
    assert len(groups) == len(labels) == 1 + len(other)
    # not in labels
    more = ["model.n_layer=3", "optim.warmup_steps=9", "model.init_std=0.5", "model.dropout=0.1"]
    groups = load_groups(*runs, make_run(tmp_path / "y", *other, *more))
    labels = {group.label for group in groups}
    assert len(labels) == 2 + len(other)


def test_mixtures_of_equal_parts_are_one_setting(tmp_path):
    mixes = ["{a = 6, b = 4}", "{b = 0.4, a = 0.6}", "{a = 3, b = 1}"]
    runs = []
    for seed, mix in enumerate(mixes):
        runs.append(make_run(tmp_path / str(seed), f"run.seed={seed}", f"data.mix={mix}"))
    groups = load_groups(*runs)
    assert [len(group.runs) for group in groups] == [2, 1]
    assert [group.label for group in groups] == ["a 6 + b 4", "a 3 + b 1"]
    build_overview([Run(run) for run in runs])


@pytest.mark.parametrize("scope, count", [("global", 1), ("micro_batch", 2)])
def test_a_balance_loss_over_micro_batches_depends_on_their_size(tmp_path, scope, count):
    given = [f"train.balance_loss_scope={scope}", "train.balance_loss_coef=0.01"]
    runs = [
        make_run(tmp_path / str(n), *given, f"train.micro_batch_size={n}", f"run.seed={n}")
        for n in (2, 4)
    ]
    assert len(load_groups(*runs)[0].variants) == count


def test_types_are_named_where_a_router_has_several(tmp_path):
    """Seeds of one router in two types are two variants, which share no seed."""
    runs = [make_run(tmp_path / "dense", "model.router=dense", "train.dtype=bfloat16")]
    runs.append(make_run(tmp_path / "kern", "train.dtype=float32"))
    (group,) = load_groups(*runs)
    assert labels_of(group) == ["dense", "kern"] and len(compare_group(group)) == 1
    runs.append(
        make_run(tmp_path / "dense1", "model.router=dense", "run.seed=1", "train.dtype=float32")
    )
    (group,) = load_groups(*runs)
    assert labels_of(group) == ["dense, bfloat16", "dense, float32", "kern, float32"]
    (comparison,) = compare_group(group)
    assert name_of(comparison) == "dense, bfloat16 against kern, float32"


def test_formulas_come_last_each_with_its_options(tmp_path):
    routers = ["kern", "relu, post=l1 over topk", "tanh, post=l2 over topk"]
    runs = []
    for i, (scale, router) in enumerate(product((2, 1), reversed(routers))):
        own = [f"model.router={router}", f"model.gate_scale={scale}"]
        runs.append(make_run(tmp_path / str(i), *own))
    (group,) = load_groups(*runs)
    wanted = [f"{router}, gate_scale {scale}" for router in routers for scale in (1, 2)]
    assert labels_of(group) == wanted


def test_runs_that_would_spoil_a_comparison_are_left_out(tmp_path):
    """Unfinished ones where others ended, and all but one of a group, router and seed."""
    kern, dense = make_run(tmp_path / "kern"), make_run(tmp_path / "dense", "model.router=dense")
    early = make_run(tmp_path / "early", "model.router=tanh", until=0.2)
    again = make_run(tmp_path / "again", until=0.5)
    # keys that change no loss
    twice = make_run(tmp_path / "twice", "train.micro_batch_size=4", "log.interval=3")
    read = [Run(folder) for folder in (again, early, kern, dense, twice)]
    (group,), notes = group_runs(read)
    assert group.steps[-1] == 1000 and {run.path for run in group.runs} == {kern, dense}
    assert sorted(notes) == sorted([
        f"{again} is not compared: stopped at step 500 of 1,000",
        f"{early} is not compared: stopped at step 200 of 1,000",
        f"{twice} is left out: {kern} has the same settings and seed",
    ])  # fmt: skip
    assert [curve.first_run.path for curve in group.curves] == [early, again]
    further = make_run(tmp_path / "x", until=0.6)
    failed = make_run(tmp_path / "failed", "model.router=tanh", until=0.6)
    (failed / FAILURE_FILE).write_text("out of memory. And more")
    (group,), notes = load(again, further, failed)
    notes.remove(f"{failed} is not compared: failed at step 600 of 1,000: out of memory")
    assert group.steps[-1] == 600 and f"{again} is left out: {further}" in notes[0]
    assert notes[1].startswith(
        f"incomplete: {further} (stopped at step 600 of 1,000). "
        "Losses are compared at step 600 of 1,000, by the seeds that both arms have"
    )


# ---- pairs
def test_differences_are_of_seeds_in_common(tmp_path):
    kern = [
        make_run(tmp_path / f"k{seed}", f"run.seed={seed}", end=1.5, noise=0.01)
        for seed in (0, 1, 3, 4)
    ]
    dense = [
        make_run(tmp_path / f"d{seed}", f"run.seed={seed}", "model.router=dense")
        for seed in (2, 3, 1, 4)
    ]
    (group,), notes = load(*kern, *dense)
    (comparison,) = compare_group(group, "dense")
    pairs = [(loss_of(tmp_path / f"k{seed}"), loss_of(tmp_path / f"d{seed}")) for seed in (1, 3, 4)]
    oracle = stats.ttest_rel(*zip(*pairs, strict=True))
    interval = oracle.confidence_interval()
    assert name_of(comparison) == "kern against dense" and comparison.difference.seeds == 3
    assert comparison.difference.verdict == "lower"
    assert comparison.difference.p == pytest.approx(oracle.pvalue)
    assert comparison.difference.low == pytest.approx(interval.low)
    assert comparison.difference.high == pytest.approx(interval.high)
    assert len(notes) == 1 and notes[0].startswith(
        "incomplete: dense lacks seed 0; kern lacks seed 2. "
    )
    table = tables.build_loss_table(group)
    row, other = table.lines
    assert table.columns[-1] == "1,000" and row[:2] == ["**dense**", "4"]
    losses = [loss_of(run) for run in kern]
    assert other[-1] == f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"
    (group,) = load_groups(kern[0], dense[0])
    assert compare_group(group) == []


@pytest.mark.parametrize("seeds, said", [(1, "1 seed"), (2, "2 seeds")])
def test_few_seeds_have_an_interval_over_documents_that_decides_nothing(tmp_path, seeds, said):
    runs = make_seeds(tmp_path, {"kern": 1.5, "tanh": 2.0}, seeds, noise=0.01, documents=4)
    (group,) = load_groups(*runs)
    (comparison,) = compare_group(group, "tanh", margin=9)
    windows = [np.array(Run(run).evaluations[1000]["val/window_losses"]) for run in runs]
    apart = np.mean(windows[:seeds], 0) - np.mean(windows[seeds:], 0)
    oracle = stats.ttest_1samp(apart.reshape(4, -1).mean(1), 0).confidence_interval()
    assert comparison.difference.low == pytest.approx(oracle.low)
    (row,) = tables.build_pairs_table(group, [comparison]).lines
    assert row[3:] == ["documents", f"**undecided ({said})**", "-"]
    del group.runs[-1].evaluations[1000]["val/window_losses"]  # of the last seed alone
    (comparison,) = compare_group(group, "tanh")
    assert comparison.difference.over == "" and math.isnan(comparison.difference.low)


def test_which_variants_are_compared(tmp_path):
    """Of one router those that differ in one option, of two routers those most alike."""
    given = [("kern", 1), ("kern", 3), ("softmax", 1), ("softmax", 3), ("tanh", 18)]
    runs = []
    for router, scale in given:
        folder = tmp_path / f"{router}{scale}"
        own = [f"model.router={router}", f"model.gate_scale={scale}"]
        runs.append(make_run(folder, *own, end=2 + scale / 100))
    (group,) = load_groups(*runs)
    comparisons = compare_group(group)
    pairs = {name_of(comparison).replace(", gate_scale ", "") for comparison in comparisons}
    assert len(pairs) == len(comparisons)
    assert pairs == {
        "kern3 against kern1",
        "softmax3 against softmax1",
        "softmax1 against kern1",
        "softmax3 against kern3",
        "tanh18 against kern1",
        "tanh18 against kern3",
        "tanh18 against softmax1",
        "tanh18 against softmax3",
    }
    tanh = next(variant for variant in group.variants if variant.router == "tanh")
    apart = collect_differences(group, tanh, "kern")  # from the first of two as like it
    assert apart[1000].mean == pytest.approx(0.17)
    (only,) = group.find_counterparts(group.variants[0], "kern")
    assert only.label == "kern, gate_scale 1"
    (only,) = group.find_counterparts(group.variants[0], "tanh, gate_scale 18")
    assert only.router == "tanh" and group.find_counterparts(only, "tanh") == []
    first = make_run(tmp_path / "1", "model.gate_scale=1", "train.z_loss_coef=1")
    second = make_run(tmp_path / "2", "model.gate_scale=2", "train.z_loss_coef=2")
    (group,) = load_groups(first, second)
    assert len(group.variants) == 2 and compare_group(group) == []
    # a variant that is asked for is compared with all others
    pair = compare_group(group, group.variants[1].label)[0]
    assert (pair.left, pair.right) == tuple(group.variants)


def test_no_pair_of_routers_flips_within_a_table(tmp_path):
    """The baseline is one variant of kern; other variants of it are second too."""
    runs = []
    for router, scale in product(("softmax", "kern"), (1, 3)):
        own = [f"model.router={router}", f"model.gate_scale={scale}"]
        runs.append(make_run(tmp_path / f"{router}{scale}", *own))
    (group,) = load_groups(*runs)
    pairs = compare_group(group, "kern, gate_scale 1")
    routers = {(pair.left.router, pair.right.router) for pair in pairs}
    assert routers == {("softmax", "kern"), ("kern", "kern"), ("softmax", "softmax")}


# ---- over a key
def test_curves_over_a_key(tmp_path):
    runs = make_curves(tmp_path)
    (group,), notes = load(*runs, key="model.gate_norm")
    assert (notes, group.xs, labels_of(group)) == ([], [1, 2, 8], ["tanh", "kern"])
    table = tables.build_loss_table(group)
    assert table.columns == ["model.gate_norm", "seeds", "1", "2", "8"]
    kern, tanh = {}, {}
    for x in (1, 2, 8):
        kern[x] = np.array([loss_of(tmp_path / f"{x}/kern{seed}") for seed in range(4)])
        tanh[x] = np.array([loss_of(tmp_path / f"{x}/tanh{seed}") for seed in range(4)])
    means = [cell.split()[0] for cell in table.lines[1][2:]]
    assert means == [f"{losses.mean():.4f}" for losses in kern.values()]
    apart = {x: tanh[x] - kern[x] for x in (1, 2, 8)}
    oracle = stats.ttest_1samp(np.mean(list(apart.values()), 0), 0)
    (comparison,) = compare_group(group)
    assert name_of(comparison) == "tanh against kern"
    assert comparison.difference.p_value() == pytest.approx(oracle.pvalue)
    (row,) = tables.build_pairs_table(group, [comparison], group.xs).rows
    interval = stats.ttest_1samp(apart[2], 0).confidence_interval()
    assert row["2"] == f"{apart[2].mean():+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"
    assert row["first is"] == "**higher**"


def test_seeds_and_values_that_curves_lack(tmp_path):
    lacking = ["2/kern3", "8/tanh0", "8/tanh1", *(f"8/kern{seed}" for seed in range(4))]
    runs = [run for run in make_curves(tmp_path) if str(run.relative_to(tmp_path)) not in lacking]
    (group,), (note,) = load(*runs, key="model.gate_norm")
    missing = [
        "tanh at gate_norm 8 lacks seed 0, 1",
        "kern at gate_norm 2 lacks seed 3",
        "kern at gate_norm 8 lacks seed 0, 1, 2, 3",
    ]
    assert note.startswith(f"incomplete: {'; '.join(missing)}.")
    (comparison,) = compare_group(group)
    assert comparison.difference.seeds == 3  # those with both routers at both common values
    rows = tables.build_loss_table(group).rows
    assert [row["seeds"] for row in rows] == ["2 to 4", "3 to 4"]


def test_keys_that_change_with_the_key(tmp_path):
    """Here the length of training, too. The first router lacks the first value."""
    runs = []
    for router, n_embd, n_layer in (("kern", 64, 2), ("kern", 128, 4), ("tanh", 128, 4)):
        own = [f"model.router={router}", f"model.n_embd={n_embd}", f"model.n_layer={n_layer}"]
        own.append(f"train.max_steps={10 * n_embd}")
        runs.append(make_run(tmp_path / f"{router}{n_embd}", *own, end=n_layer))
    (group,), (note, incomplete) = load(*runs, key="model.n_embd")
    assert labels_of(group) == ["tanh", "kern"] and group.xs == [64, 128]
    assert note == "model.n_layer, train.max_steps changed with model.n_embd"
    assert tables.describe_group(group).startswith("`mix-bytes`: 640 or 1,280 steps of")
    losses = [f"{loss_of(run):.4f}" for run in runs]
    lines = tables.build_loss_table(group).lines
    assert [line[2:] for line in lines] == [["", losses[2]], losses[:2]]
    assert incomplete.startswith("incomplete: tanh at n_embd 64 lacks seed 0.")
    runs.append(make_run(tmp_path / "other", "data.name=other", *own))
    _, notes = load(*runs, key="model.n_embd")
    assert notes[1].startswith("mix-bytes: incomplete: tanh")
    assert len(load_groups(*runs[:3], key="model.n_layer")) == 1


@pytest.mark.parametrize("key, given, said", [
    ("model.router", [1, 2], "expected a key that is a number"),
    ("model.gate_nrm", [1, 2], "expected a key"),
    ("model.gate_norm", [1, 1], "1 value(s) of it"),
    ("run.seed", [1, 2], "seeds are the observations, not an axis"),
])  # fmt: skip
def test_bad_keys(tmp_path, key, given, said):
    runs = [make_run(tmp_path / str(i), f"model.gate_norm={x}") for i, x in enumerate(given)]
    with pytest.raises(ValueError) as error:
        load(*runs, key=key)
    assert f"--over {key}: " in str(error.value) and said in str(error.value)


# ---- the paper's numbers
def test_numbers_are_those_compared_with_the_paper():
    """All 367 were compared with a second transcription of the paper: after a correction, put in
    the new hash.
    """
    numbers = copy.deepcopy(NUMBERS)
    for printed in numbers.values():
        for table in printed:
            table.pop("doubtful", None)
    digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()
    assert digest.startswith("1e1bc6f5290e5894")


@pytest.mark.usefixtures("without_pictures")
def test_the_papers_losses_are_below_the_runs(tmp_path):
    """As printed: in the order of the paper, with deviations and doubts."""
    file = CONFIG / "paper/books3_512.toml"
    (group,) = load_groups(make_run(tmp_path / "kern", file=file))
    table = build_paper_table("books3_512", group.values)
    assert table.columns == ["paper at step", "5K", "50K"]
    assert table.lines[0] == ["dense", "4.1460", "3.4429?"]
    assert ["sigmoid", "", "3.3206"] in table.lines
    seeds = build_paper_table("seeds", group.values)
    kern = seeds.lines[-1]
    assert (len(seeds.columns), kern[0], kern[-1][6:]) == (11, "kern", " ± 0.0041")
    assert build_paper_table("controls_scale", group.values).rows == []
    # of runs with several numbers of experts, each of which has its own table in the paper
    values = {"model.n_expert": 64, "data.name": "arxiv"}
    assert build_paper_table("sparsity", values).lines == [
        ["softmax", "1.8781"],
        ["kern", "1.8291"],
    ]
    assert build_paper_table("sparsity", values | {"data.name": "books3"}).lines[1][1] == "3.3080"
    assert build_paper_table("sparsity", {"data.name": "arxiv"}).rows == []
    arguments = [str(tmp_path / "kern"), "--experiment", "books3_512"]
    report = read_report(make_report_parser("scripts.report", None).parse_args(arguments))
    (section,) = build_sections(report, {}).values()
    assert [table.title for table in section.tables][:2] == ["Losses", "The paper's losses"]
    arguments[-1] = "small"
    with pytest.raises(
        ValueError, match="--experiment small: not a file in config/paper; .* books3_512"
    ):
        read_report(make_report_parser("scripts.report", None).parse_args(arguments))
