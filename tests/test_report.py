"""report/frame.py and tables.py: which runs are compared, paired with what, and every cell.

The oracle reads metrics.jsonl and computes with numpy and scipy. Every measure of every line is a
number of its own, so one of another run, seed, step or value of the key shows.
"""

import copy
import hashlib
import json
import math
import re
from itertools import product

import numpy as np
import pytest
from fake_runs import (
    CONFIG,
    add_checkpoint,
    change_lines,
    load_groups,
    loss_of,
    make_curves,
    make_run,
    make_seeds,
    read_series,
)
from scipy import stats

from common.measures import MEASURES
from report import tables
from report.compare import judge, lowest, paired
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
    kern, dense = make_run(tmp_path / "kern"), make_run(tmp_path / "dense", "model.router=dense")
    early = make_run(tmp_path / "early", "model.router=tanh", until=0.2)
    again = make_run(tmp_path / "again", until=0.5)
    # keys that change no loss
    twice = make_run(tmp_path / "twice", "train.micro_batch_size=4", "log.interval=3")
    (group,), notes = load(again, early, kern, dense, twice)
    assert group.ends == [1000] and {run.path for run in group.compared} == {kern, dense}
    assert sorted(notes) == sorted([
        f"{again} is not compared: stopped at step 500 of 1,000",
        f"{early} is not compared: stopped at step 200 of 1,000",
        f"{twice} is left out: {kern} has the same settings and seed",
    ])  # fmt: skip
    assert list(group.curves) == ["tanh, early, stopped", "kern, again, stopped"]
    further = make_run(tmp_path / "x", until=0.6)
    failed = make_run(tmp_path / "failed", "model.router=tanh", until=0.6)
    (failed / FAILURE_FILE).write_text("out of memory. And more")
    (group,), notes = load(again, further, failed)
    assert group.ends == [600] and notes == [
        f"{failed} is not compared: failed at step 600 of 1,000: out of memory",
        f"{again} is left out: {further} has the same settings and seed",
        "not at their end: x. Losses are compared at step 600",
    ]
    far = make_run(tmp_path / "far", "model.router=tanh", until=0.9)
    (group,), notes = load(again, early, far)  # most reached 500
    assert group.ends == [500] and list(group.curves) == ["tanh, early, stopped"]
    third = make_run(tmp_path / "third", "model.router=tanh", points=3, until=0.34)
    half = make_run(tmp_path / "half", points=2, until=0.5)
    (group,), _ = load(third, half)  # nothing is compared before training
    assert group.ends == [0] and len(group.compared) == 2 and compare_group(group) == []


def test_runs_on_other_text_are_refused(tmp_path):
    facts = {"data": "sha of the text", "tokenizer": "sha of GPT-2's"}
    other = facts | {"data": "else"}
    specs = [f"router={router}" for router in ("dense", "softmax", "kern", "tanh")]
    dense, softmax, kern, damaged = make(tmp_path, *specs)

    def refuse(*runs):
        groups, notes = load(*runs)
        assert groups == []
        return notes[-1]

    add_checkpoint(dense, **facts)
    for step, name in ((200, "data"), (300, "tokenizer")):  # the last counts
        add_checkpoint(kern, step, **facts | {name: "else"})
        said = rf"{dense} and .*: {name} .* is sha of .* and else.* separate reports"
        assert re.search(said, refuse(dense, softmax, kern))
    add_checkpoint(kern, 400, **facts)
    assert len(load_groups(dense, softmax, kern)) == 1
    (add_checkpoint(damaged) / "manifest.json").write_text("{}")
    assert f"so the data of {damaged} is unknown; put back" in refuse(dense, damaged)
    assert len(load_groups(damaged)) == 1
    add_checkpoint(damaged, 50, **facts)  # an intact one, which names the data
    assert len(load_groups(dense, damaged)) == 1
    # nor are unfinished ones shown beside others
    young, same = make(tmp_path / "young", specs[3], f"{specs[3]} seed=1", until=0.3)
    add_checkpoint(young, **other)
    (group,), notes = load(dense, young, same)
    assert list(group.curves) == ["tanh, 1, stopped"]
    assert any(str(young) in note and "data" in note for note in notes)
    add_checkpoint(softmax, **other)
    (third,) = make(tmp_path / "third", "data.name=other")
    (group,), notes = load(softmax, dense, third)  # the other group stands
    assert [run.path for run in group.compared] == [third] and "sha256" in notes[-1]


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
    variants = [("kern", 1), ("kern", 3), ("softmax", 1), ("softmax", 3), ("tanh", 18)]
    option = "model.gate_scale={} train.z_loss_coef={}"
    runs = make(tmp_path, *(f"router={v} {option.format(s, s // 18)}" for v, s in variants))
    (group,) = load_groups(*runs)
    names = [f"{router}, gate_scale {s}, z_loss_coef {s // 18}" for router, s in variants]
    kern1, kern3, softmax1, softmax3, tanh = names
    with_kern = {(kern3, kern1), (softmax1, kern1), (softmax3, kern3), (tanh, kern1), (tanh, kern3)}
    assert set(find_pairs(group, "kern")) == with_kern
    assert set(find_pairs(group, kern3)) == {(v, kern3) for v in names if v != kern3}
    assert set(find_pairs(group, "tanh")) == {(v, tanh) for v in names[:4]}
    # in a picture the first of two that are as like is subtracted, and none of the baseline's own
    curves = collect_differences(group, "kern")
    apart = loss_of(runs[4]) - loss_of(runs[0])
    assert curves[tanh].loc[1000, "mean"] == pytest.approx(apart) and len(curves) == 3
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
    for shared, margin, said in (
        ([1, 3, 4], 0, "lower"),
        ([1, 4], 9, "undecided (2 seeds)"),
        ([3], 9, "undecided (1 seed)"),
    ):
        pairs = [[runs[seed] for seed in shared] for runs in (kern, dense)]
        (group,) = load_groups(kern[0], *pairs[0], dense[2], *reversed(pairs[1]))
        (pair,) = compare_group(group, "dense", margin)
        losses = [[*map(loss_of, runs)] for runs in pairs]
        mean = np.subtract(*losses).mean()
        assert (pair.left, pair.right, pair.verdict) == ("kern", "dense", said)
        if len(shared) < 3:
            assert str(pair.difference) == f"{mean:+.4f}" and math.isnan(pair.p)
            continue
        oracle = stats.ttest_rel(*losses)
        assert pair.difference == pytest.approx(
            (mean, *oracle.confidence_interval(), oracle.pvalue, 3)
        )
        assert pair.p == pytest.approx(oracle.pvalue)
    (group,) = load_groups(kern[0], dense[2])
    assert compare_group(group) == []


# ---- over a key
def test_seeds_and_values_that_curves_lack(tmp_path):
    """The mean is over seeds and values of both; each at its best over seeds with all values."""
    lacking = ["2/kern3", "8/tanh0", "8/tanh1", *(f"8/kern{seed}" for seed in range(4))]
    runs = [run for run in make_curves(tmp_path) if str(run.relative_to(tmp_path)) not in lacking]
    (group,) = load_groups(*runs, key="model.gate_norm")
    assert (group.ends, list(group.runs)) == ([1, 2, 8], ["tanh", "kern"])

    (pair,) = compare_group(group)
    losses = []
    for router, seed in product(("tanh", "kern"), range(3)):
        losses.append([loss_of(tmp_path / f"{x}/{router}{seed}") for x in (1, 2)])
    tanh, kern = np.mean(losses, axis=1).reshape(2, 3)
    assert pair.difference.n == 3
    assert pair.difference.p == pytest.approx(stats.ttest_rel(tanh, kern).pvalue)
    (pair,) = compare_group(group, at_best=True)  # one seed: tanh has 2 and 3 at 8, kern 0, 1, 2
    assert pair.verdict == "undecided (1 seed)"
    wanted = min(*losses[2], loss_of(tmp_path / "8/tanh2")) - min(losses[5])
    assert str(pair.difference) == f"{wanted:+.4f}"


def test_keys_that_change_with_the_key(tmp_path):
    """Here the length of training, too, and the first router lacks the first value. Evaluations
    beyond a run's end are left out, as where train.max_steps was lowered after it.
    """
    specs = []
    for router, n_embd, n_layer in (("kern", 64, 2), ("kern", 128, 4), ("tanh", 128, 4)):
        size = f"model.n_embd={n_embd} model.n_layer={n_layer} train.max_steps={10 * n_embd}"
        specs.append(f"router={router} {size}")
    runs = make(tmp_path, *specs)
    config = runs[0] / "config.toml"
    assert "max_steps = 640\n" in config.read_text()
    config.write_text(config.read_text().replace("max_steps = 640\n", "max_steps = 320\n"))
    (group,), (note,) = load(*runs, key="model.n_embd")
    assert list(group.runs) == ["tanh", "kern"] and group.ends == [64, 128]
    assert note == "model.n_layer, train.max_steps changed with model.n_embd"
    assert tables.describe_group(group).startswith("mix-bytes: 320 or 1,280 steps of")
    early, kern, tanh = (f"{loss:.4f}" for loss in (loss_of(runs[0], 320), *map(loss_of, runs[1:])))
    lines = tables.build_loss_table(group).lines
    assert [line[2:] for line in lines] == [["", tanh], [early, kern]]
    cells = {line[0]: line[1] for line in tables.build_measure_table(group).lines}
    assert list(cells) == ["tanh, n_embd 128", "kern, n_embd 64", "kern, n_embd 128"]
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
        settings = [f"model.router={router}", f"model.gate_norm={x}", f"run.seed={seed}"]
        end = {"softmax": 2.2, "kern": 2.0, RENORM: 2.02}[router] + x / 10
        run = make_run(folder / f"{router}-{x}-{seed}", *settings, end=end, **shape)
        change_lines(run, change)
        runs[router, x, seed] = run
    return runs


def format_mean(values, form=".4f"):
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form}}" if len(values) else ""


def check_measures(table, runs, keys, step):
    """Each cell is the mean over seeds of the last values by a step; keys are labels' router, x."""
    head, *names = table.columns
    assert head.endswith("± SD over seeds") and len(names) == 6
    assert [row[head] for row in table.rows] == list(keys)
    for row, name in product(table.rows, names):
        values = []
        for seed in SEEDS:
            series = read_series(runs[*keys[row[head]], seed], name)
            values += [value for at, value in series.items() if at <= step][-1:]
        form = ".4f" if name == "train/loss" else MEASURES[name.split("/")[1]].form
        assert row[name] == format_mean(values, form), (row[head], name)


def test_every_cell_of_a_report_over_a_key(tmp_path):
    """Verdicts, losses and measures; report/compare.py has tests of its own."""
    runs = make_random_runs(tmp_path, XS)
    losses = {}  # {router: (XS, SEEDS)}
    for router in ROUTERS:
        losses[router] = np.array([[loss_of(runs[router, x, seed]) for seed in SEEDS] for x in XS])
    (group,) = load_groups(*runs.values(), key="model.gate_norm")
    table = tables.build_loss_table(group)
    assert table.columns == ["model.gate_norm, ± SD over seeds", "seed", "0.5", "1", "4"]
    assert table.lines == [
        [router, "0, 1, 2", *map(format_mean, losses[router])] for router in ROUTERS
    ]
    others = ("softmax", RENORM)
    means = [paired(losses[router].mean(0), losses["kern"].mean(0)) for router in others]
    bests = [lowest(losses[router], losses["kern"]) for router in others]
    cells = {router: {} for router in ROUTERS}
    for name, differences, margin in (("at best: ", bests, 0), ("mean: ", means, MARGIN)):
        verdicts = judge(differences, margin)
        assert len({verdict.text for verdict in verdicts}) == 2
        for router, difference, verdict in zip(others, differences, verdicts, strict=True):
            cells[router] |= {
                "minus": "kern",
                f"{name}is": verdict.text,
                f"{name}difference, 95%": str(difference),
                f"{name}Holm's p": f"{verdict.p:.2g}",
            }
    best = compare_group(group, at_best=True)
    pairs = compare_group(group, margin=MARGIN)
    wanted = []
    for router in (*others, "kern"):
        place = losses[router].mean(1).argmin()
        end = {"loss, ± SD over seeds": format_mean(losses[router][place]), "seed": "0, 1, 2"}
        end["best model.gate_norm"] = f"{XS[place]:g}"
        wanted.append({"setting": "", "variant": router} | cells[router] | end)
    assert tables.list_verdicts(group, {"at best: ": best, "mean: ": pairs}) == wanted
    keys = {f"{router}, gate_norm {x:g}": (router, x) for router, x in product(ROUTERS, XS)}
    check_measures(tables.build_measure_table(group), runs, keys, 1000)
    group.losses.loc[4, ("kern", 1)] = 0  # the best value has the lowest mean, not the lowest loss
    rows = tables.list_verdicts(group, {})
    assert {row["variant"]: row["best model.gate_norm"] for row in rows}["kern"] == "4"


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
    keys = {router: (router, 1) for router in ROUTERS}
    check_measures(tables.build_measure_table(group), runs, keys, 500)


@pytest.mark.parametrize(("points", "shown"), [(10, 10), (12, 6)])
def test_at_most_ten_evaluations_are_in_a_table(tmp_path, points, shown):
    """Evenly apart, and the last among them, which a narrow terminal shows first."""
    run = make_run(tmp_path / "run", "train.max_steps=1100", points=points)
    (group,) = load_groups(run)
    table = tables.build_loss_table(group)
    wanted = [1100 * i // points for i in range(points, 0, -math.ceil(points / 10))][::-1]
    assert table.columns[2:] == [f"{step:,}" for step in wanted] and len(wanted) == shown
    assert table.lines[0][2:] == [f"{loss_of(run, step):.4f}" for step in wanted]
    assert list(table.important)[1] == "1,100"
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
    columns = ["run", "settings", "state", "step", "train loss", "val loss", "tokens/s", "trouble"]
    assert table.columns == columns
    for row, (name, settings, state, trouble) in zip(
        table.lines,
        [
            ("a", "kern, seed 0, n_layer 3, schedule wsd, branch of runs/trunk", "finished", ""),
            ("c", "tanh, seed 2, n_layer 2, schedule cosine", "finished", ""),
            ("b", "kern, seed 0, n_layer 2, schedule cosine", "finished", ""),
            ("f", "kern, seed 8, n_layer 2, schedule cosine", "stopped", ""),
            ("d", "kern, seed 4, n_layer 2, schedule cosine", "stopped", ""),
            ("e", "kern, seed 6, n_layer 2, schedule cosine", "failed", "val/loss is nan"),
        ],
        strict=True,
    ):
        step, loss = list(read_series(tmp_path / name).items())[-1]
        progress = f"{step:,} of 1,000 {step / 1000:>4.0%}"
        assert row[:4] == [str(tmp_path / name), settings, state, progress]
        assert (row[5], row[7]) == (f"{loss:.4f}", trouble)


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


def test_the_papers_losses(tmp_path):
    """As printed: in the order of the paper, with deviations and doubts."""
    file = CONFIG / "paper/books3_512.toml"
    (group,) = load_groups(make_run(tmp_path / "kern", file=file))
    table = build_paper_table("books3_512", group.values)
    assert table.columns == ["paper at step", "5K", "50K"]
    assert table.lines[0] == ["dense", "4.1460", "3.4429?"]
    assert ["sigmoid", "", "3.3206"] in table.lines
    kern = build_paper_table("seeds", group.values).lines[-1]
    assert (len(kern), kern[0], kern[-1][6:]) == (11, "kern", " ± 0.0041")
    assert build_paper_table("controls_scale", group.values).rows == []
    # of runs with several numbers of experts, each of which has its own table in the paper
    values = {"model.n_expert": 64, "data.name": "books3"}
    assert build_paper_table("sparsity", values).lines[1] == ["kern", "3.3080"]
    assert build_paper_table("sparsity", {"data.name": "books3"}).rows == []
