"""report/frame.py and tables.py: which runs are compared, paired with what, and every cell.

The oracle reads metrics.jsonl and computes with numpy and report/compare.py, which
tests/test_compare.py compares with scipy. Every measure of every line is a
number of its own, so one of another run, seed, step or value of the key shows.
"""

import hashlib
import json
import re
from itertools import product

import numpy as np
import pytest
from fake_runs import (
    add_checkpoint,
    change_lines,
    load_groups,
    loss_of,
    make_curves,
    make_run,
    make_seeds,
    read_series,
)

from common.measures import MEASURES
from report import tables
from report.compare import Difference, judge, lowest, paired
from report.frame import choose_baseline, compare_group, find_pairs, group_runs
from report.overview import build_overview, count_states
from report.paper import NUMBERS, build_paper_table
from report.plots import collect_differences
from runtime import FAILURE_FILE
from runtime.runs import Run, read_runs


def make(folder, *specs, **shape):
    """Runs 0, 1, … of overrides such as `router=tanh seed=1 optim.lr=0.1`."""
    runs = []
    for i, spec in enumerate(specs):
        given = spec.replace("router=", "model.router=").replace("seed=", "run.seed=").split()
        runs.append(make_run(folder / str(i), *given, **shape))
    return runs


def load(*folders, key=None):
    return group_runs([*map(Run, folders)], key)


# ---- which runs are compared
def test_runs_that_would_spoil_a_comparison_are_left_out(tmp_path):
    """Unfinished ones where others ended, and all but one of a group, router and seed."""
    kern, dense, twice = make(  # the last differs in keys that change no loss
        tmp_path, "", "router=dense", "train.micro_batch_size=4 log.interval=3"
    )
    early = make_run(tmp_path / "early", "model.router=tanh", until=0.2)
    again = make_run(tmp_path / "again", until=0.5)
    (group,), notes = load(again, early, kern, dense, twice)
    assert group.ends == [1000] and {run.path for run in group.compared} == {kern, dense}
    assert sorted(notes) == [
        f"{twice} is left out: {kern} has the same settings and seed",
        f"{again} is not compared: stopped at step 500 of 1,000",
        f"{early} is not compared: stopped at step 200 of 1,000",
    ]
    assert list(group.curves) == ["tanh, early, stopped", "kern, again, stopped"]
    further, failed = make(tmp_path / "further", "", "router=tanh", until=0.6)
    (failed / FAILURE_FILE).write_text("out of memory. And more")
    (group,), notes = load(again, further, failed)
    assert group.ends == [600] and notes == [
        f"{failed} is not compared: failed at step 600 of 1,000: out of memory",
        f"{again} is left out: {further} has the same settings and seed",
        "not at their end: 0. Losses are compared at step 600",
    ]
    far = make_run(tmp_path / "far", "model.router=tanh", until=0.9)
    (group,), notes = load(again, early, far)  # most reached 500
    assert group.ends == [500] and list(group.curves) == ["tanh, early, stopped"]
    third = make_run(tmp_path / "third", "model.router=tanh", points=3, until=0.34)
    (group,), _ = load(third, again)  # nothing is compared before training
    assert group.ends == [0] and compare_group(group) == []


@pytest.mark.parametrize("rises, is_compared", [(0, True), (600, False)])
def test_a_run_that_was_made_longer_on_its_way_is_not_compared(tmp_path, rises, is_compared):
    """Its learning rate rises after the warm-up, unlike that of a run of its length."""

    def set_rate(line):
        if "train/loss" in line:
            warm_up = min(line["step"], 300) / 300 * (1 - 1e-15 * (line["step"] == 300))
            decay = max(line["step"] - 600, 0) / 2000
            line["optim/lr"] = warm_up * (1 - decay) + (line["step"] == rises)

    run = make_run(tmp_path / "run", "optim.warmup_steps=300")
    change_lines(run, set_rate)
    groups, notes = group_runs([Run(run)])
    assert bool(groups[0].compared) == is_compared
    assert ("rose again, for a larger train.max_steps" in str(notes)) != is_compared


def test_runs_on_other_text_are_refused(tmp_path):
    facts = {"data": "sha of the text", "tokenizer": "sha of GPT-2's"}
    specs = [f"router={router}" for router in ("dense", "softmax", "kern", "tanh")]
    dense, softmax, kern, damaged = make(tmp_path, *specs)
    add_checkpoint(dense, **facts)
    for step, name in ((200, "data"), (300, "tokenizer")):  # the last counts
        add_checkpoint(kern, step, **facts | {name: "else"})
        groups, notes = load(dense, softmax, kern)
        said = rf"{dense} and .*: {name} .* is sha of .* and else.* separate reports"
        assert groups == [] and re.search(said, notes[-1])
    add_checkpoint(kern, 400, **facts)
    (add_checkpoint(damaged) / "manifest.json").write_text("{}")
    groups, notes = load(dense, damaged)
    assert groups == [] and f"so the data of {damaged} is unknown; put back" in notes[-1]
    assert len(load_groups(damaged)) == 1
    add_checkpoint(damaged, 50, **facts)  # an intact one, which names the data
    assert len(load_groups(dense, softmax, kern, damaged)) == 1
    # nor are unfinished ones shown beside others
    young, same = make(tmp_path / "young", specs[3], f"{specs[3]} seed=1", until=0.3)
    (third,) = make(tmp_path / "third", "data.name=other")  # a group that stands
    for run in (young, softmax):
        add_checkpoint(run, 200, data="else")
    (group,), notes = load(dense, young, same)
    assert list(group.curves) == ["tanh, 1, stopped"]
    assert any(str(young) in note and "data" in note for note in notes)
    (group,), notes = load(softmax, dense, third)
    assert group.compared[0].path == third and "sha256" in notes[-1]


SCOPE = "train.balance_loss_coef=0.01 train.balance_loss_scope="
FORMULA = "relu,post=l1_over_all"
GROUPS = {  # runs, separated by ;: {label of a group: variants}, both in order
    "data.name=b model.n_expert=9; data.name=a model.n_expert=9; data.name=a model.n_expert=8": (
        {"n_expert 8, a": ["kern"], "n_expert 9, a": ["kern"], "n_expert 9, b": ["kern"]}
    ),
    "eval.interval=50; train.micro_batch_size=4 seed=1; log.group=x seed=2": {"": ["kern"]},
    # what labels name first is enough
    "optim.lr=0.1; optim.lr=0.2 model.init_std=0.5": {"lr 0.1": ["kern"], "lr 0.2": ["kern"]},
    "model.top_k=2; model.top_k=4": {"top_k 2": ["kern"], "top_k 4": ["kern"]},
    "data.mix={a=6,b=4}; data.mix={b=0.4,a=0.6} seed=1; data.mix={a=3,b=1}": (
        {"a 6 + b 4": ["kern"], "a 3 + b 1": ["kern"]}
    ),
    f"{SCOPE}global train.micro_batch_size=2; {SCOPE}global seed=1": {"": ["kern"]},
    f"{SCOPE}micro_batch train.micro_batch_size=2; {SCOPE}micro_batch train.micro_batch_size=4": (
        {"": [f"kern, balance_loss_scope micro_batch of {n}" for n in (2, 4)]}
    ),
    # types where a router has several
    "train.dtype=float32; router=dense train.dtype=bfloat16": {"": ["dense", "kern"]},
    "router=dense train.dtype=bfloat16; router=dense train.dtype=float32 seed=1": (
        {"": ["dense, bfloat16", "dense, float32"]}
    ),
    # formulas come last, each with its options
    f"router={FORMULA} model.gate_scale=2; model.gate_scale=2; model.gate_scale=1": (
        {"": ["kern, gate_scale 1", "kern, gate_scale 2", f"{FORMULA}, gate_scale 2"]}
    ),
}


@pytest.mark.parametrize("specs, wanted", GROUPS.items())
def test_a_group_is_what_changes_a_loss_and_a_variant_an_option(tmp_path, specs, wanted):
    groups = load_groups(*make(tmp_path, *specs.split("; ")))
    assert [(group.label, list(group.runs)) for group in groups] == list(wanted.items())


# ---- pairs
def test_which_variants_are_compared(tmp_path):
    """With the baseline's most alike; of its own variants those that differ in one option."""
    option = "model.gate_scale={} train.z_loss_coef={}"
    specs = []
    for router, scale in (("kern", 1), ("kern", 3), ("softmax", 1), ("softmax", 3), ("tanh", 18)):
        specs.append(f"router={router} {option.format(scale, scale // 18)}")
    (group,) = load_groups(*make(tmp_path, *specs))
    softmax1, softmax3, tanh, kern1, kern3 = names = list(group.runs)
    with_kern = {(kern3, kern1), (softmax1, kern1), (softmax3, kern3), (tanh, kern1), (tanh, kern3)}
    assert set(find_pairs(group, "kern")) == with_kern
    assert set(find_pairs(group, kern3)) == {(v, kern3) for v in names[:4]}
    assert set(find_pairs(group, "tanh")) == {(v, tanh) for v in names if v != tanh}
    # a picture has each once, minus the first of those that are as like, and none of the baseline's
    group.losses[kern3] += 1
    curves = collect_differences(group, "kern")
    assert curves[tanh].loc[1000, "mean"] == pytest.approx(0) and len(curves) == 3
    assert len(collect_differences(group, kern1)) == 4
    given = [choose_baseline(group, name) for name in ("dense", "kern", kern3)]
    assert given == ["softmax", "kern", kern3]  # the first router, without that one
    (group,) = load_groups(*make(tmp_path / "two", option.format(1, 1), option.format(2, 2)))
    one, two = group.runs
    assert find_pairs(group, "kern") == []  # they differ in two options
    assert find_pairs(group, two) == [(one, two)]


def test_differences_are_of_seeds_in_common(tmp_path):
    """With fewer than three there is no interval and nothing is decided."""
    kern = make_seeds(tmp_path, {"kern": 1.5}, 5, noise=0.01)
    dense = make_seeds(tmp_path, {"dense": 2.0}, 5)
    for shared, said in (
        ([1, 3, 4], "lower"),
        ([1, 4], "undecided (2 seeds)"),
        ([3], "undecided (1 seed)"),
    ):
        pairs = [[runs[seed] for seed in shared] for runs in (kern, dense)]
        (group,) = load_groups(kern[0], *pairs[0], dense[2], *reversed(pairs[1]))
        (pair,) = compare_group(group, "dense", margin=0 if shared[2:] else 9)
        assert (pair.left, pair.right, pair.verdict) == ("kern", "dense", said)
        wanted = paired(*([*map(loss_of, runs)] for runs in pairs))
        if not shared[2:]:
            wanted = Difference(wanted.mean, n=len(shared))
        assert pair.difference == pytest.approx(wanted, nan_ok=True)
    (group,) = load_groups(kern[0], dense[2])
    assert compare_group(group) == []


# ---- over a key
def test_seeds_and_values_that_curves_lack(tmp_path):
    """The mean is over seeds and values of both; each at its best over seeds with all values."""
    lacking = ["2/kern3", "8/tanh0", "8/tanh1", *(f"8/kern{seed}" for seed in range(4))]
    runs = [run for run in make_curves(tmp_path) if str(run.relative_to(tmp_path)) not in lacking]
    (group,) = load_groups(*runs, key="model.gate_norm")
    assert (group.ends, list(group.runs)) == ([1, 2, 8], ["tanh", "kern"])

    folders = [f"{router}{seed}" for router in ("tanh", "kern") for seed in range(3)]
    losses = np.array([[loss_of(tmp_path / x / name) for name in folders] for x in "12"])
    tanh, kern = losses.mean(0).reshape(2, 3)
    (pair,) = compare_group(group)
    assert pair.difference == pytest.approx(paired(tanh, kern))
    (pair,) = compare_group(group, at_best=True)  # one seed: tanh has 2 and 3 at 8, kern 0, 1, 2
    assert pair.verdict == "undecided (1 seed)"
    wanted = min(*losses[:, 2], loss_of(tmp_path / "8/tanh2")) - losses[:, 5].min()
    assert str(pair.difference) == f"{wanted:+.4f}"


def test_keys_that_change_with_the_key(tmp_path):
    """Here the length of training, too, and the first router lacks the first value. Evaluations
    beyond a run's end are left out, as where train.max_steps was lowered after it.
    """
    size = "model.n_embd={} model.n_layer={} train.max_steps={}"
    small, large = size.format(64, 1, 640), size.format(128, 4, 1280)
    runs = make(tmp_path, small, large, f"router=tanh {large}")
    config = runs[0] / "config.toml"
    config.write_text(config.read_text().replace("max_steps = 640\n", "max_steps = 320\n"))
    young = make_run(tmp_path / "young", "model.n_embd=64", until=0)  # which ties nothing
    (group,), notes = load(*runs, young, key="model.n_embd")
    assert notes[0] == "model.n_layer, train.max_steps changed with model.n_embd"
    assert tables.describe_group(group).startswith("mix-bytes: 320 or 1,280 steps of")
    early, kern, tanh = (f"{loss:.4f}" for loss in (loss_of(runs[0], 320), *map(loss_of, runs[1:])))
    table = tables.build_loss_table(group)
    assert table.columns[2:] == ["64", "128"]
    assert [[line[0], *line[2:]] for line in table.lines] == [
        ["tanh", "", tanh],
        ["kern", early, kern],
    ]
    labels = [line[0] for line in tables.build_measure_table(group).lines]
    assert labels == ["tanh, n_embd 128", "kern, n_embd 64", "kern, n_embd 128"]
    assert load_groups(runs[0])[0].ends == [320]


# ---- tables
RENORM = "softmax-renorm"
ROUTERS = ("softmax", "kern", RENORM)  # in the order of tables
SEEDS = (0, 1, 2)
MARGIN = 0.1
XS = (0.5, 1, 4)  # gate norms


def make_random_runs(folder, xs=(1,), **shape):
    """{(router, x, seed): run} at gate norms `xs`, whose lines have numbers of their own."""
    random = np.random.default_rng(1)

    def change(line):
        for name in line.keys() - {"step", "tokens", "val/loss"}:
            line[name] = random.uniform(1, 9)
        if "val/loss" in line:
            line["val/loss"] += random.normal(0, 0.01)

    runs = {}
    for router, x, seed in product(ROUTERS, xs, SEEDS):
        end = {"softmax": 2.2, "kern": 2.0, RENORM: 2.02}[router] + x / 10
        runs[router, x, seed] = make_run(
            folder / f"{router}-{x}-{seed}",
            f"model.router={router}",
            f"model.gate_norm={x}",
            f"run.seed={seed}",
            end=end,
            **shape,
        )
        change_lines(runs[router, x, seed], change)
    return runs


def format_mean(values, form=".4f"):
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form}}" if len(values) else ""


def check_measures(table, runs, labels, step):
    """Each cell is the mean over seeds of the last values by a step; rows are as `runs`."""
    head, *names = table.columns
    assert head.endswith("± SD over seeds") and len(names) == 6
    assert [row[head] for row in table.rows] == labels
    of_rows = np.reshape([*runs.values()], (-1, len(SEEDS)))
    for (row, of_seeds), name in product(zip(table.rows, of_rows, strict=True), names):
        values = []
        for run in of_seeds:
            series = read_series(run, name)
            values += [value for at, value in series.items() if at <= step][-1:]
        form = ".4f" if name == "train/loss" else MEASURES[name.split("/")[1]].form
        assert row[name] == format_mean(values, form), (row[head], name)


def test_every_cell_of_a_report_over_a_key(tmp_path):
    """Verdicts, losses and measures; report/compare.py has tests of its own."""
    runs = make_random_runs(tmp_path, XS)
    losses = np.reshape([*map(loss_of, runs.values())], (len(ROUTERS), len(XS), len(SEEDS)))
    softmax, kern, renorm = losses
    (group,) = load_groups(*runs.values(), key="model.gate_norm")
    table = tables.build_loss_table(group)
    assert table.columns == ["model.gate_norm, ± SD over seeds", "seed", "0.5", "1", "4"]
    for line, router, of_router in zip(table.lines, ROUTERS, losses, strict=True):
        assert line == [router, "0, 1, 2", *map(format_mean, of_router)]
    best = compare_group(group, at_best=True)
    pairs = compare_group(group, margin=MARGIN)
    of_best = [lowest(other, kern) for other in (renorm, softmax)]
    of_means = [paired(other.mean(0), kern.mean(0)) for other in (renorm, softmax)]
    bests, means = judge(of_best), judge(of_means, MARGIN)
    for found, verdicts in ((best, bests), (pairs, means)):
        texts = [verdict.text for verdict in verdicts]
        assert texts == [pair.verdict for pair in found] and len({*texts}) == 2
    rows = tables.list_verdicts(group, {"at best: ": best, "mean: ": pairs})
    assert [row["variant"] for row in rows] == ["softmax", RENORM, "kern"]
    assert [*rows[0].values()][2:] == [
        "kern",
        bests[1].text,
        str(of_best[1]),
        f"{bests[1].p:.2g}",
        means[1].text,
        str(of_means[1]),
        f"{means[1].p:.2g}",
        format_mean(softmax[0]),
        "0, 1, 2",
        "0.5",
    ]
    labels = [f"{router}, gate_norm {x}" for router, x in product(ROUTERS, XS)]
    check_measures(tables.build_measure_table(group), runs, labels, 1000)
    group.losses.loc[4, ("kern", 1)] = 0  # the best value has the lowest mean, not the lowest loss
    assert tables.list_verdicts(group, {})[1]["best model.gate_norm"] == "4"
    group.losses.loc[4, ("kern", 2)] = np.nan  # a value that a seed lacks is not the best
    row = tables.list_verdicts(group, {})[1]
    assert row["best model.gate_norm"] != "4" and row["seed"] == "0, 1, 2"


def test_measures_of_runs_that_train_are_of_the_step_that_all_have(tmp_path):
    """kern's runs are at step 800, the others at 500, which is compared."""
    runs = make_random_runs(tmp_path, until=0.8)
    for (router, _, _), run in runs.items():
        if router != "kern":
            change_lines(run, lambda line: line["step"] > 500 and line.clear())
    # its last entropy is older
    change_lines(
        runs["softmax", 1, 0], lambda line: line["step"] == 500 and line.pop("router/entropy", 0)
    )
    (group,) = load_groups(*runs.values())
    check_measures(tables.build_measure_table(group), runs, [*ROUTERS], 500)


@pytest.mark.parametrize("points, steps", [
    (10, "110 220 330 440 550 660 770 880 990 1,100"),
    (12, "183 366 550 733 916 1,100"),
])  # fmt: skip
def test_at_most_ten_evaluations_are_in_a_table(tmp_path, points, steps):
    """Evenly apart, and the last among them, which a narrow terminal shows first."""
    run = make_run(tmp_path / "run", "train.max_steps=1100", points=points)
    (group,) = load_groups(run)
    table = tables.build_loss_table(group)
    assert table.columns[2:] == steps.split() and list(table.important)[1] == "1,100"
    said = "mix-bytes: 1,100 steps of 2,048 tokens. Losses in nats per byte."
    assert tables.describe_group(group) == said


def test_the_table_of_runs(tmp_path):
    """Settings in the order they came in; of each the finished runs by loss, then the others."""
    branch = ["optim.schedule=wsd", "train.branch_from=runs/trunk/"]
    make_run(tmp_path / "a", "model.n_layer=3", *branch)
    make_run(tmp_path / "b", end=2.0)
    make_run(tmp_path / "c", "model.router=tanh", "run.seed=2", end=1.5)
    make_run(tmp_path / "d", "run.seed=4", until=0.3)
    make_run(tmp_path / "f", "run.seed=8", until=0.5, end=1.0)
    with (make_run(tmp_path / "e", "run.seed=6", until=0.7) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 800, "tokens": 1, "val/loss": NaN}\n')
    read, (note,) = read_runs([tmp_path / "e", tmp_path, tmp_path / "nothing"])
    assert note.startswith(f"left out: {tmp_path}/nothing: no such folder")
    read.sort(key=lambda run: run.path)
    assert count_states(read) == "6 runs: 2 stopped, 3 finished, 1 failed"
    table = build_overview(read)
    heads = "run, settings, state, step, train loss, val loss, tokens/s, trouble"
    assert ", ".join(table.columns) == heads
    rows = ["; ".join([*line[1:4], line[5], line[7]]) for line in table.lines]
    assert rows == [
        "kern, seed 0, n_layer 3, schedule wsd, branch of runs/trunk; "
        "finished; 1,000 of 1,000 100%; 2.0000; ",
        "tanh, seed 2, n_layer 2, schedule cosine; finished; 1,000 of 1,000 100%; 1.5000; ",
        "kern, seed 0, n_layer 2, schedule cosine; finished; 1,000 of 1,000 100%; 2.0000; ",
        "kern, seed 8, n_layer 2, schedule cosine; stopped; 500 of 1,000  50%; 1.1875; ",
        "kern, seed 4, n_layer 2, schedule cosine; stopped; 300 of 1,000  30%; 2.7203; ",
        "kern, seed 6, n_layer 2, schedule cosine; failed; 800 of 1,000  80%; nan; val/loss is nan",
    ]
    assert [line[0] for line in table.lines] == [str(tmp_path / name) for name in "acbfde"]


# ---- the paper's numbers
def test_numbers_are_those_compared_with_the_paper():
    """All 367 were compared with a second transcription of the paper: after a correction, or
    another doubt, put in the new hash.
    """
    digest = hashlib.sha256(json.dumps(NUMBERS, sort_keys=True).encode()).hexdigest()
    assert digest.startswith("665988bedfafa1db")


def test_the_papers_losses():
    """As printed: in the order of the paper, with deviations and doubts."""
    table = build_paper_table("books3_512", {})
    assert table.columns == ["paper at step", "5K", "50K"]
    assert table.lines[0] == ["dense", "4.1460", "3.4429?"]
    assert ["sigmoid", "", "3.3206"] in table.lines
    kern = build_paper_table("seeds", {}).lines[-1]
    assert (len(kern), kern[0], kern[-1][6:]) == (11, "kern", " ± 0.0041")
    assert build_paper_table("controls_scale", {}).rows == []
    # of runs with several numbers of experts, each of which has its own table in the paper
    values = {"model.n_expert": 64, "data.name": "books3"}
    assert build_paper_table("sparsity", values).lines[1] == ["kern", "3.3080"]
    assert build_paper_table("sparsity", {"data.name": "books3"}).rows == []
