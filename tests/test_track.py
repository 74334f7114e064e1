"""track/: scores and intervals against scipy and by simulation, and forged records."""

import bz2
import hashlib
import json
import math
import re
import shutil
import subprocess
import tarfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import TINY
from scipy import stats

import configure
import router as routers
from data.bins import read_meta, sha256_of
from data.mixture import identify
from gate_norm import score_deviation
from model import GPT
from report.comparisons import Difference, estimate_difference, judge_family
from router import ROUTERS, Router
from runtime.signals import Stop
from track import clean, contest, entry, ladder, ngram, retrain, table, verify
from track.__main__ import FILE, main
from track.contest import (
    Task,
    compare,
    draw_settings,
    list_judged,
    list_tasks,
    load_protocol,
    make_overrides,
)
from track.ladder import load_ladder
from track.record import (
    digest_code,
    losses_of,
    missing_tasks,
    new_record,
    read_commit,
    read_record,
    run_git,
    write_record,
)

EDITION_1 = contest.RECORDS / "edition-1"
RULES = """
[track]
edition = 7
reference = "softmax-renorm"
text = ["absent", "absent"]
data_sha256 = "{data}"
settings = 2
alpha = 0.01
margin = 0.02
tuning_sd = 0.002
seed_sd = 0.006
rerun_sd = 0.006
curve = [0.5, 2.0]
curve_settings = 1

[track.draws]
seed = 1
count = 3
length = 0.5
lr = [1e-3, 1e-2]
expert_out_lr_ratio = [0.5, 4.0]
router_lr_ratio = [0.2, 2.0]
gate_norm = [0.5, 8.0]
own_gate_norm = 0.25
balance_loss_coef = [1e-3, 1e-1]
bias_rate = [1e-3, 1e-1]

[[track.rungs]]
seeds = 2
minutes = 0.1

[[track.rungs]]
seeds = 2
minutes = 0.2
overrides = ["model.n_embd=64", "train.max_steps=6", "eval.interval=6"]

[track.entries]
softmax-renorm = {{ "model.router" = "softmax-renorm" }}
kern = {{ "model.router" = "kern" }}
kern-quantile = {{ "model.router" = "kern", "train.bias_update" = "quantile" }}
"""


def test_links_in_a_commit_are_not_followed(tmp_path, monkeypatch):
    """As a link to an environment outside of the checkout."""
    file = tmp_path / "commit.tar"
    with tarfile.open(file, "w") as archive:
        archive.add(Path(routers.__file__), "router.py")
        link = tarfile.TarInfo(".venv")
        link.type, link.linkname = tarfile.SYMTYPE, "/nowhere"
        archive.addfile(link)
    done = subprocess.CompletedProcess([], 0, file.read_bytes())
    monkeypatch.setattr("track.record.run_git", lambda *_: done)
    assert read_commit("0" * 40) == {"router.py": Path(routers.__file__).read_bytes()}


def write_rules(folder, corpus):
    """The config file of a contest of 3 draws and 2 rungs, 2 to 6 steps a run, on `corpus`."""
    data = identify([read_meta(corpus / "tiny")], [1.0])["data"]
    text = TINY.format(runs=(folder / "runs").as_posix(), data=corpus.as_posix())
    text = text.replace('name = "tiny"\n', "", 1)  # the contest names its runs
    file = folder / "tiny-contest.toml"
    file.write_text(text + RULES.format(data=data))
    return file


@pytest.fixture
def rules(tmp_path: Path, corpus: Path, monkeypatch) -> Path:
    """`write_rules`; its records are in tmp_path."""
    monkeypatch.setattr(contest, "RECORDS", tmp_path / "records")
    return write_rules(tmp_path, corpus)


@pytest.fixture
def protocol(rules):
    return load_protocol(str(rules))


@cache
def describe_code():
    """The commit that is checked out, and the digest of its code."""
    commit = run_git("rev-parse", "HEAD").stdout.decode().strip()
    code = digest_code(read_commit(commit))
    return {"commit": commit, "code_sha256": code, "machine": "Intel Xeon"}


def make_record(protocol, name, loss=1.6, options=None, spread=0.003):
    """A complete, intact record of this commit; draw d of a rung has `loss` + d / 1000."""
    record = new_record(protocol, name, options or {"model.router": name})
    record["made"] = [dict(describe_code())]
    while missing := missing_tasks(protocol, record):
        for number, task in enumerate(missing):
            value = loss + task.draw / 1000 + spread * (number % 2) - 0.1 * math.log2(task.length)
            run = {**task._asdict(), "loss": value, "made": 0}
            if task.round == "judge":
                windows = protocol.load(task.rung).eval.windows
                run["documents"] = [[value - 0.4, windows // 2], [value + 0.4, windows // 2]]
                run |= {"gate_norm": [1.0, 2.0], "load_imbalance": 3.0, "dead_experts": 0.5}
            record["runs"].append(run)
    record["step_ms"] = [{"reference": 10.0, "entry": 8.0}] * len(protocol.rungs)
    return record


def save(protocol, record):
    path = protocol.records / f"{record['name']}.json"
    write_record(path, record)
    return path


def faults_of(protocol, record, others=()):
    """The faults of a record that was written with a digest of its own."""
    return "; ".join(verify.find_record_faults(protocol, save(protocol, record), others))


# ---- protocol and tuning
def test_the_rules_of_the_edition():
    """edition-2.json lists what is resolved now; draws are stratified in their ranges and suit
    every router; the cost of an entry is that of the issue.
    """
    protocol = load_protocol(FILE)
    listed = json.loads(Path(FILE).with_suffix(".json").read_text())
    assert len(listed) == len(protocol.rungs) and listed[0]["train.max_steps"] == 960
    draws = draw_settings(protocol)
    count = len(draws)
    for key in ("lr", "router_lr_ratio", "expert_out_lr_ratio"):
        low, high = np.log(protocol.draws[key])
        parts = (np.log([draw[f"optim.{key}"] for draw in draws]) - low) / (high - low)
        assert sorted(np.floor(parts * count + 0.02)) == pytest.approx(np.arange(count), abs=1)
        assert stats.kstest(parts, "uniform").statistic < 1.5 / count, key
    assert sum(draw["model.gate_norm"] == 0 for draw in draws) == count // 4
    for method in ("balance_loss_coef", "bias_rate"):
        assert sum(method in draw for draw in draws) == pytest.approx(count / 3, abs=1)
    for draw, name in zip(range(count), cycle(ROUTERS), strict=False):
        length = (1, 0.5, 2)[draw % 3]
        for rung, width in enumerate((64, 96)):
            task = Task("curve", rung, draw, 5, length)
            overrides = make_overrides(protocol, {"model.router": name}, task)
            config = configure.load(FILE, overrides)
            model = config.model
            assert model.top_k * model.expert_hidden == 4 * model.n_embd == 4 * width
            assert config.optim.lr == pytest.approx(draws[draw]["optim.lr"] * 64 / width, rel=1e-3)
            steps = config.train.max_steps
            assert steps == config.eval.interval == (960, 2930)[rung] * length
            assert config.optim.warmup_steps == steps / 5
            rate = draws[draw].get("bias_rate", 0) * score_deviation(model)
            assert config.train.bias_update_rate == pytest.approx(rate, rel=1e-3)
            assert (config.train.balance_loss_coef > 0) == ("balance_loss_coef" in draws[draw])
    tasks = list_tasks(protocol, "kern", dict.fromkeys(list_tasks(protocol, "kern", {}), 1.0))
    minutes = sum(protocol.rungs[task.rung].minutes * task.length for task in tasks)
    assert len(tasks) == count + 6 * 3 and minutes <= 160
    lines = Path(contest.__file__).read_text().splitlines()
    assert len(lines) <= 300  # track/README.md promises it


@pytest.mark.parametrize("router", ["softmax-renorm", "kern", "identity, bias", "kern-after"])
def test_the_unit_of_the_bias_rate(router):
    """The spread of a fresh model's scores, on tokens that LayerNorm has left."""
    model = configure.load(FILE, [f"model.router={router}"]).model
    layer = Router(model.n_embd, model.n_expert, model.top_k, routers.find_spec(router))
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.weight, std=model.init_std)
    x = torch.nn.functional.layer_norm(torch.randn(4000, model.n_embd), [model.n_embd])
    measured = layer(x).scores.std(-1).mean().item()
    assert score_deviation(model) == pytest.approx(measured, rel=0.1)


def test_tasks_and_seeds_follow_from_name_rules_and_losses(protocol):
    draws = list_tasks(protocol, "kern", {})
    assert [(task.round, task.draw, task.length) for task in draws] == [
        ("draw", d, 0.5) for d in range(3)
    ]
    losses = dict(zip(draws, [1.5, math.inf, 1.4], strict=True))
    judged = list_tasks(protocol, "kern", losses)[3:]
    assert [task[:3] for task in judged] == [
        ("judge", rung, draw) for rung in (0, 1) for draw in (2, 0) for _ in range(2)
    ]
    reference = list_tasks(
        protocol,
        "softmax-renorm",
        dict(zip(list_tasks(protocol, "softmax-renorm", {}), (1, 2, 3), strict=True)),
    )
    assert [(t.rung, t.draw, t.length) for t in reference if t.round == "curve"] == [
        (0, 0, 0.5),
        (0, 0, 2.0),
        (1, 0, 0.5),
        (1, 0, 2.0),
    ]
    assert len({t.seed for t in reference if t.round == "curve"}) == 4
    digest = hashlib.sha256(json.dumps([protocol.sha256, "kern", "judge", 0, 2, 0]).encode())
    assert judged[0].seed == int(digest.hexdigest()[:7], 16)
    other_rules = protocol.model_copy(update={"sha256": "0"})
    for other in (
        list_tasks(
            protocol, "kern-nobias", dict.fromkeys(list_tasks(protocol, "kern-nobias", {}), 1.0)
        ),
        list_tasks(other_rules, "kern", dict.fromkeys(list_tasks(other_rules, "kern", {}), 1.0)),
        list_tasks(
            protocol.as_draft(),
            "kern",
            dict.fromkeys(list_tasks(protocol.as_draft(), "kern", {}), 1.0),
        ),
    ):
        assert not {task.seed for task in other} & {task.seed for task in draws + judged}
    assert len({task.seed for task in judged}) == 8


def test_quantile_balancing_replaces_the_drawn_balance(protocol):
    options = protocol.entries["kern-quantile"] | {"model.n_hash_layer": 1}
    for draw in range(3):
        config = configure.load(
            protocol.file, make_overrides(protocol, options, Task("judge", 1, draw, 3))
        )
        assert (config.train.bias_update, config.train.bias_update_rate) == ("quantile", 0)
        assert config.train.balance_loss_coef == 0 and config.model.n_hash_layer == 1


def test_a_changed_default_is_refused(rules, monkeypatch):
    """Rules are compared as resolved, not as the file has them; new keys do not matter."""
    before = load_protocol(str(rules))
    fixed = [{"optim.weight_decay": 0.1, "optim.beta2": 0.95}] * 2
    rules.with_suffix(".json").write_text(json.dumps(fixed))
    assert load_protocol(str(rules)).sha256 != before.sha256
    rules.write_text(rules.read_text().replace("[optim]", "[optim]\nweight_decay = 0.2"))
    with pytest.raises(ValueError, match=r"weight_decay on rung 1 is 0\.2, not 0\.1 as in"):
        load_protocol(str(rules))
    rules.with_suffix(".json").unlink()
    assert load_protocol(str(rules)).sha256 != before.sha256
    assert {"train.max_steps", "optim.beta2", "model.n_layer"}.isdisjoint(contest.FREE)


# ---- score
def test_a_comparison_is_welchs_test(protocol):
    """One setting, one rung, no luck of tuning: scipy's; then the fixed part, by hand."""
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(1.6, 0.01, 8), draw.normal(1.61, 0.02, 5)
    tasks = [Task("judge", 0, 3, seed) for seed in range(8)]
    losses = [dict(zip(tasks, values.tolist(), strict=False)) for values in (ours, theirs)]
    plain = protocol.model_copy(update={"tuning_sd": 0.0})
    difference = compare(plain, *losses, [0])
    test = stats.ttest_ind(ours, theirs, equal_var=False)
    assert difference.mean == pytest.approx(ours.mean() - theirs.mean())
    assert difference.p_value() == pytest.approx(test.pvalue)
    assert difference.low == pytest.approx(test.confidence_interval().low)
    widened = compare(protocol, *losses, [0])
    assert widened.error**2 == pytest.approx(difference.error**2 + 2 * 0.002**2)
    assert widened.freedom == pytest.approx(
        difference.freedom * (widened.error / difference.error) ** 4
    )
    # two settings; two seeds each on one rung, one on the other: the spread between settings is
    # no noise, and the first rung's noise is taken for the second's
    cells = {(0, 1): [1.0, 1.2], (0, 2): [3.0, 3.4], (1, 1): [2.2], (1, 2): [4.2]}
    entry_losses = {
        Task("judge", rung, setting, seed): loss
        for (rung, setting), cell in cells.items()
        for seed, loss in enumerate(cell)
    }
    flat = {task: 1.0 for task in entry_losses}
    both = compare(plain, entry_losses, flat, [0, 1])
    assert both.mean == pytest.approx((2.15 + 3.2) / 2 - 1)
    noise = (0.02 + 0.08) / 2
    assert both.error**2 == pytest.approx((noise / 4 + noise / 2) / 4)
    assert both.freedom == pytest.approx(2)  # all of it from four runs in two settings


def test_verdicts_do_not_change_when_others_enter(protocol):
    records = [make_record(protocol, "softmax-renorm", 1.6), make_record(protocol, "kern", 1.58)]
    head, before = table.build_table(protocol, records)
    others = [make_record(protocol, "tanh", 1.585), make_record(protocol, "dense", 1.7)]
    _, after = table.build_table(protocol, records + others)
    rows = [dict(zip(head, rows[0], strict=True)) for rows in (before, after)]
    assert rows[0]["router"] == "kern" and rows[0]["sign"] == "**lower**"
    changed = {column for column in head if rows[0][column] != rows[1][column]}
    assert changed <= {"rank", "dense 1", "dense 2"}
    assert [row[0] for row in after] == ["kern", "tanh", "softmax-renorm", "dense"]
    assert [row[head.index("rank")] for row in after] == ["1–2", "1–2", "3–3", "4–4"]


def test_multipliers_are_read_from_the_references_curve(protocol):
    """The reference's loss falls by 0.1 with each doubling: 0.05 lower is worth √2."""
    reference = losses_of(make_record(protocol, "softmax-renorm", 1.6, spread=0.0))
    curve = contest.measure_curve(reference, 1)
    assert np.exp(curve[0]) == pytest.approx([0.5, 1, 2])
    assert curve[1] == pytest.approx([0.1, 0, -0.1]) and curve[2] == pytest.approx(0)
    for loss, wanted in ((1.6, 1.0), (1.55, 2**0.5), (1.65, 2**-0.5), (1.2, 2.0), (1.9, 0.5)):
        entered = losses_of(make_record(protocol, "kern", loss, spread=0.0))
        difference = compare(protocol, entered, reference, [1])
        middle, low, high = contest.multiply_compute(curve, difference)
        assert middle == pytest.approx(wanted)
        half = stats.norm.ppf(0.975) * 0.002 * 2**0.5
        assert low == pytest.approx(np.clip(2 ** (-(loss + half - 1.6) / 0.1), 0.5, 2), rel=1e-3)
        assert high == pytest.approx(np.clip(2 ** (-(loss - half - 1.6) / 0.1), 0.5, 2), rel=1e-3)
    # a run of the curve against the mean of two judged runs, which differ by 0.003
    noisy = contest.measure_curve(losses_of(make_record(protocol, "softmax-renorm", 1.6)), 1)
    error = math.sqrt(0.003**2 / 2 * (1 + 1 / 2))
    assert noisy[2] == pytest.approx([error, 0, error])
    two = protocol.model_copy(update={"curve_settings": 2})  # two such runs of each length
    noisy = contest.measure_curve(losses_of(make_record(two, "softmax-renorm", 1.6)), 1)
    assert noisy[2] == pytest.approx(np.array([error, 0, error]) / 2**0.5)
    diverged = dict(losses_of(make_record(two, "softmax-renorm", 1.6)))
    diverged[next(t for t in diverged if t[:2] == ("curve", 1) and t.length == 2)] = math.inf
    curve_of_three = contest.measure_curve(diverged, 1)
    assert curve_of_three[2] == pytest.approx([error / 2**0.5, 0, error])
    difference = Difference(-0.05, 2, 0.002, 9.0, "seeds")
    wide = contest.multiply_compute(np.array([curve[0], curve[1], [error, 0, error]]), difference)
    half = stats.t(9).ppf(0.975) * math.hypot(0.002, error / 2)
    assert wide == pytest.approx([2**0.5, 2 ** (0.5 - half / 0.1), 2 ** (0.5 + half / 0.1)])
    record = make_record(protocol, "kern", 1.55, spread=0.0)
    cells = table.format_multipliers(
        protocol, record, {"softmax-renorm": reference, "kern": losses_of(record)}
    )
    assert cells["compute 2"].startswith("1.41 [1.36") and cells["time 2"].startswith("1.77 [1.70")
    faster = make_record(protocol, "kern", 1.2)
    cells = table.format_multipliers(
        protocol, faster, {"softmax-renorm": reference, "kern": losses_of(faster)}
    )
    assert cells["compute 1"] == ">2.00 [>2.00, >2.00]"
    dense = losses_of(make_record(protocol, "dense", 1.65, spread=0.0))
    cells = table.format_multipliers(
        protocol, record, {"softmax-renorm": reference, "kern": losses_of(record), "dense": dense}
    )
    assert cells["dense 2"].startswith("2.00 [")


@pytest.fixture(scope="module")
def truth():
    """Losses of edition 1's 14 routers with experts at its 16 draws, (14, 16), without noise."""
    losses = {}
    for path in sorted(EDITION_1.glob("*.json")):
        record = json.loads(path.read_text())
        draws = [run["loss"] for run in record["runs"] if run["round"] == "draw"]
        numbers = [run["draw"] for run in record["runs"] if run["round"] == "draw"]
        if record["name"] != "dense":
            losses[record["name"]] = np.array(draws)[np.argsort(numbers)]
    values = np.array(list(losses.values()))
    additive = values.mean(1, keepdims=True) + values.mean(0) - values.mean()
    rest = values - additive
    seed_variance = 0.0063**2  # of edition 1's entries
    shrunk = additive + rest * math.sqrt(1 - seed_variance / np.mean(rest**2))
    reference = list(losses).index("softmax-renorm")
    return shrunk, reference


def test_intervals_cover_the_luck_of_tuning_and_of_seeds(truth):
    """Whole contests, draws and seeds redrawn, with what edition 1's records say of both.

    The difference that is covered is the mean over all redrawn contests of a pair of routers.
    """
    losses, reference = truth
    protocol = load_protocol(FILE)
    random = np.random.default_rng(0)
    screening_sd = (
        0.0123  # of a run at a quarter of the length: the pilot's, six draws of three seeds
    )
    count = protocol.draws["count"]
    draws = list_tasks(protocol, "kern", {})
    entries = [number for number in range(len(losses)) if number != reference]
    differences = defaultdict(list)
    for entry_number in entries * 80:
        drawn = random.integers(0, losses.shape[1], count)
        scores = []
        for number in (entry_number, reference):
            means = losses[number, drawn]
            tried = dict(zip(draws, means + random.normal(0, screening_sd, count), strict=True))
            judged = list_tasks(protocol, "kern", tried)[count:]
            noise = random.normal(0, protocol.seed_sd, len(judged))
            scores.append({t: means[t.draw] + e for t, e in zip(judged, noise, strict=True)})
        differences[entry_number].append(compare(protocol, *scores, (0, 1)))
    covered = wrong = 0
    for pairs in differences.values():
        means = [pair.mean for pair in pairs]
        target = np.mean(means)
        assert np.std(means) < 0.007
        covered += sum(pair.low <= target <= pair.high for pair in pairs)
        # a pair of equal routers: a sign at p < 0.01 is false
        shifted = [Difference(p.mean - target, 2, p.error, p.freedom, "seeds") for p in pairs]
        wrong += sum(contest.judge_sign(protocol, pair) != "undecided" for pair in shifted)
    total = 80 * len(entries)
    assert 0.93 <= covered / total <= 0.97
    assert wrong / total <= 0.02
    assert np.mean([p.high - p.low for pairs in differences.values() for p in pairs]) < 0.025


def test_multiplier_intervals_cover(truth):
    """Noise of seeds and of the curve; a gain of 30% in compute."""
    protocol = load_protocol(FILE)
    random = np.random.default_rng(1)
    slope = -0.13  # nats per byte and e-fold of tokens, as in edition 1
    tasks = list_tasks(
        protocol,
        protocol.reference,
        dict.fromkeys(list_tasks(protocol, protocol.reference, {}), 1.0),
    )
    noise_sd, luck_sd = protocol.seed_sd, protocol.tuning_sd
    covered = 0
    for _ in range(400):
        luck = random.normal(0, luck_sd, 2)
        noise = random.normal(0, noise_sd, (2, len(tasks)))
        reference = {
            t: 1.6 + slope * math.log(t.length) + luck[0] + e
            for t, e in zip(tasks, noise[0], strict=True)
        }
        entered = {
            t: 1.6 + slope * math.log(1.3) + luck[1] + e
            for t, e in zip(tasks, noise[1], strict=True)
        }
        _, low, high = contest.multiply_compute(
            contest.measure_curve(reference, 0), compare(protocol, entered, reference, [0])
        )
        covered += low <= 1.3 <= high
    assert 0.93 <= covered / 400 <= 0.99


# ---- the ladder
# floor and power of the reference's loss; edition 2's is near the third
CURVES = [(1.0, 0.12), (1.0, 0.208), (1.2, 0.37)]


def climb(lad, gains, curve=CURVES[0], luck=0.0, noise=None):
    """Judged losses on every rung: a floor and a power of the compute times e^gain, luck, noise."""
    floor, power = curve
    compute = np.array(lad.compute)
    ideal = floor + (1.6 - floor) * (compute / compute[0] * np.exp(gains)) ** -power
    tasks = [
        task
        for task in list_judged(lad.protocol, "any", range(lad.protocol.settings))
        if task.rung < lad.own_rungs or task.draw < lad.settings
    ]
    noise = np.zeros(len(tasks)) if noise is None else noise
    return {t: ideal[t.rung] + luck + e for t, e in zip(tasks, noise, strict=True)}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("gains", [[0.2] * 3, [-0.7] * 3, [0.1, 0.3, 0.45], [0.0] * 3])
def test_gains_come_back(gains, curve):
    """Without noise the gains are those that the losses were made with, on every rung."""
    lad = load_ladder(load_protocol(FILE), 3)
    compute = np.array(lad.compute)
    assert (compute[1] / compute[0], compute[2] / compute[0]) == pytest.approx((8.46, 41.1), 1e-2)
    entry = climb(lad, gains, curve)
    for task in entry:  # settings that stopped at the contest's rungs count for noise alone
        if task.draw >= lad.settings:
            entry[task] += 1.0
    measured = ladder.measure_gains(lad, entry, climb(lad, np.zeros(3), curve))
    # worth is taken half way between rungs, where a power's mean over them is not exactly
    assert measured.by_rung[0] == pytest.approx(gains, rel=0.04, abs=1e-9)
    slope = stats.linregress(np.log(compute), measured.by_rung[0]).slope * math.log(10)
    assert measured.per_decade[0] == pytest.approx(slope, abs=1e-9)


def test_a_gain_beyond_the_floor_is_a_number():
    """No compute brings the reference there: its gain is very large."""
    lad = load_ladder(load_protocol(FILE), 3)
    entry = dict.fromkeys(climb(lad, np.zeros(3)), 0.5)
    measured = ladder.measure_gains(lad, entry, climb(lad, np.zeros(3)))
    assert np.all(np.isfinite(measured.by_rung)) and np.all(measured.by_rung[0] > 10)


def simulate_ladders(truth, lad, true_gains, curve):
    """Measured gains of 1,000 ladders, draws and seeds redrawn."""
    losses, reference = truth
    random = np.random.default_rng(2)
    entries = [number for number in range(len(losses)) if number != reference][::3]
    measured = []
    for number in entries:
        luck = np.empty((200, 2))
        for contest_luck in luck:
            drawn = random.integers(0, losses.shape[1], lad.protocol.draws["count"])
            for side, router in enumerate((number, reference)):
                means = losses[router, drawn]
                tried = means + random.normal(0, 0.0123, len(drawn))
                contest_luck[side] = means[np.argsort(tried)[: lad.settings]].mean()
        luck -= luck.mean(0)
        for of_entry, of_reference in luck:
            noise = random.normal(0, lad.protocol.seed_sd, (2, 21))
            entry = climb(lad, true_gains, curve, of_entry, noise[0])
            reference_climb = climb(lad, np.zeros(3), curve, of_reference, noise[1])
            measured.append(ladder.measure_gains(lad, entry, reference_climb))
    return measured


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("gain", [0.2, -0.7])
def test_intervals_of_a_ladder_cover(truth, gain, curve, monkeypatch):
    """The gain is the same on all rungs."""
    monkeypatch.setattr(ladder, "SAMPLES", 2000)
    lad = load_ladder(load_protocol(FILE), 3)
    measured = simulate_ladders(truth, lad, np.full(3, gain), curve)
    lows, highs = np.array([gains.by_rung[1:] for gains in measured]).transpose(1, 0, 2)
    changes = np.array([gains.per_decade for gains in measured])
    covered = np.mean((lows < gain) & (gain < highs), axis=0).tolist()
    covered.append(np.mean((changes[:, 1] < 0) & (0 < changes[:, 2])))
    assert len(measured) == 1000
    assert min(covered) >= 0.93 and max(covered) <= 0.97, covered
    verdicts = [ladder.judge_growth(lad, gains) for gains in measured]
    assert max(verdicts.count("grows"), verdicts.count("fades")) <= 50
    # what track/METHOD.md says of a ladder's power
    assert 0.2 < np.median(changes[:, 2] - changes[:, 1]) / 2 < 0.5
    assert verdicts.count("holds") <= 10


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("gain", [0.2, -0.7])
def test_a_ladder_finds_some_growth(truth, gain, curve, monkeypatch):
    """A gain that changes by 0.25 per tenfold compute: the share that track/METHOD.md prints."""
    monkeypatch.setattr(ladder, "SAMPLES", 2000)
    lad = load_ladder(load_protocol(FILE), 3)
    growing = gain + 0.25 * np.log10(np.array(lad.compute) / lad.compute[0])
    measured = simulate_ladders(truth, lad, growing, curve)
    grows = [ladder.judge_growth(lad, gains) == "grows" for gains in measured]
    assert 0.2 < np.mean(grows) < 0.7, np.mean(grows)


def make_climb(protocol, record, lower):
    """A ladder's record of an entry, `lower` than its own draws."""
    lad = load_ladder(protocol, 3)
    climbed = new_record(lad.protocol, record["name"], record["options"])
    climbed["made"] = record["made"]
    for task in ladder.list_climb(lad, record["name"], losses_of(record)):
        windows = lad.protocol.load(task.rung).eval.windows
        loss = 1.4 - lower + task.draw / 1000
        run = {**task._asdict(), "loss": loss, "made": 0, "documents": [[loss, windows]]}
        climbed["runs"].append(run)
    write_record(lad.protocol.records / f"{record['name']}.json", climbed)
    return climbed


class Climbed(NamedTuple):
    """A ladder of two entries: softmax-renorm, and kern, which is lower."""

    rules: ladder.Ladder
    records: list  # of the contest
    climbed: list  # of the ladder
    entered: dict  # {entry: losses of the contest}


@pytest.fixture
def two_climbs(protocol):
    lad = load_ladder(protocol, 3)
    records = [make_record(protocol, "softmax-renorm"), make_record(protocol, "kern", 1.59)]
    for run in records[0]["runs"] + records[1]["runs"]:
        run["loss"] -= 0.1 * run["rung"]
        run["documents"] = [[run["loss"], protocol.load(run["rung"]).eval.windows]]
    for record in records:
        save(protocol, record)
    entered = {record["name"]: losses_of(record) for record in records}
    assert ladder.load_climbs(lad, entered) == {}
    climbed = [make_climb(protocol, record, 0.02 * i) for i, record in enumerate(records)]
    return Climbed(lad, records, climbed, entered)


def test_a_table_of_a_ladder(protocol, two_climbs):
    """Rungs come from two records."""
    lad, records, _, entered = two_climbs
    climbs = ladder.load_climbs(lad, entered)
    assert {task.rung for task in climbs["kern"]} == {0, 1, 2}
    head, [row] = ladder.tabulate(lad, climbs)
    gains = ladder.measure_gains(lad, climbs["kern"], climbs["softmax-renorm"])
    middles = [float(cell.split()[0]) for cell in row[1:4]]
    assert head[1:4] == ["gain 1", "gain 2", "gain 3"] and row[0] == "kern"
    assert middles == pytest.approx(gains.by_rung[0], abs=0.006)
    pages = table.build_pages(protocol, records)
    assert "orders 1 of 1 pairs" in pages[table.PAGE] and "|gain 3|" in pages[table.PAGE]
    (axes,) = ladder.plot(lad, climbs).axes
    drawn = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    assert np.array(drawn.get_ydata()) == pytest.approx(gains.by_rung[0])


def test_faults_of_a_ladders_record_are_named(two_climbs, protocol, capsys):
    lad, records, climbed, entered = two_climbs
    path = lad.protocol.records / "kern.json"
    assert verify.find_record_faults(protocol, path, records[:1]) == []
    climbed[1]["runs"][0]["seed"] += 1
    write_record(path, climbed[1])
    faults = str(verify.find_record_faults(protocol, path, records[:1]))
    assert "is no run of this entry" in faults and "scripts.track ladder kern" in faults
    assert "kern" not in ladder.load_climbs(lad, entered)
    assert "kern.json lacks 1 of 3 runs" in capsys.readouterr().err
    write_record(path, {**climbed[1], "runs": []})
    faults = str(verify.find_record_faults(protocol, path, records[:1]))
    assert "3 of 3 runs are missing" in faults
    path.write_text("{")
    assert "kern" not in ladder.load_climbs(lad, entered)
    assert "kern.json: not JSON" in capsys.readouterr().err
    write_record(path, {**climbed[1], "protocol_sha256": "0" * 64})
    assert "kern" not in ladder.load_climbs(lad, entered)
    assert "kern.json is of other rules; move it away" in capsys.readouterr().err


def test_a_run_of_a_ladder_that_diverged_is_no_number(two_climbs, protocol):
    lad, _, climbed, entered = two_climbs
    climbed[1]["runs"][0]["loss"] = None
    write_record(lad.protocol.records / "kern.json", climbed[1])
    diverged = ladder.load_climbs(lad, entered)
    _, [row] = ladder.tabulate(lad, diverged)
    assert row[-1] == "diverged on rung 3" and (protocol.records / "kern.json").exists()
    (axes,) = ladder.plot(lad, diverged).axes
    assert "kern: diverged" in [text.get_text() for text in axes.get_legend().get_texts()]
    by_kern = protocol.model_copy(update={"reference": "kern"})
    with pytest.raises(ValueError, match="kern diverged on rung 3: nothing to compare with"):
        ladder.tabulate(lad.model_copy(update={"protocol": by_kern}), diverged)


def test_a_reference_that_does_not_fall_gives_no_ladder(two_climbs, protocol):
    lad, records, climbed, entered = two_climbs
    climbs = ladder.load_climbs(lad, entered)
    flat = {task: 1.5 for task in climbs["softmax-renorm"]}
    with pytest.raises(ValueError, match="its loss must fall"):
        ladder.measure_gains(lad, climbs["kern"], flat)
    for run in climbed[0]["runs"]:
        run["loss"] = 2.0
    climbed[1]["runs"][0]["loss"] = 1.5
    for record in climbed:
        write_record(lad.protocol.records / f"{record['name']}.json", record)
    page = table.build_pages(protocol, records)[table.PAGE]
    assert "No ladder: softmax-renorm has" in page and "its loss must fall" in page


# ---- honesty: what a cheater may try (the attacks of a referee)
@pytest.mark.parametrize("name", ROUTERS)
def test_no_router_sees_the_future(name):
    """Gates up to token t are equal to the bit when token t + 1 changes: alone, and in a model."""
    assert verify.is_causal(load_protocol(FILE), {"model.router": name})
    if name == "dense":
        return
    settings = ["model.n_embd=32", "model.block_size=16", "model.backend=reference"]
    model = GPT(configure.load(FILE, [f"model.router={name}", *settings]).model)
    gates = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, routing: gates.append(routing.weights))
    ids = torch.randint(257, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for last in (ids[0, -1].item(), 3):
            ids[0, -1] = last
            model(ids)
    before, after = gates[:2], gates[2:]
    assert torch.equal(before[0][:-1], after[0][:-1])
    # after experts: a product of another number of tokens may round otherwise
    torch.testing.assert_close(before[1][:-1], after[1][:-1], rtol=0, atol=1e-6)
    assert not torch.equal(before[1][-1], after[1][-1])


def test_a_router_that_looks_across_tokens_is_refused(monkeypatch):
    protocol, ahead = load_protocol(FILE), {"model.router": "sigmoid, gamma"}
    for others in (
        lambda s: s.mean(0, keepdim=True),
        lambda s: s.mean(0, keepdim=True) * (len(s) > 100),  # not in a small test
        lambda s: s[-1:] * (s.shape[1] == 64),  # the last token alone, where the track has it
        lambda s: torch.cat([s[1:], s[-1:]]),  # the next
        lambda s: torch.cat([s[:1], s[:-1]]),  # the one before
    ):
        phi = {**routers.PHI, "sigmoid": lambda s, o=others: torch.sigmoid(s + 1e-3 * o(s))}
        with monkeypatch.context() as patch:
            patch.setattr(routers, "PHI", phi)
            (fault,) = verify.find_router_faults(protocol, "mine", ahead, [])
            assert "sees the future" in fault
            assert verify.is_causal(protocol, {"model.router": "tanh"})
    assert verify.find_router_faults(protocol, "mine", ahead, []) == []
    logits = Router._logits
    looks = lambda self, x: logits(self, x) + (self.gamma - 1) * logits(self, x).roll(-1, 0)  # noqa: E731
    with monkeypatch.context() as patch:  # not before it has learned
        patch.setattr(Router, "_logits", looks)
        assert not verify.is_causal(protocol, ahead)
    # a hash layer by the next token's id, or only in training
    hashed = {"model.router": "tanh", "model.n_hash_layer": 1}
    assert verify.is_causal(protocol, hashed)
    given = Router._given_experts
    next_id = lambda self, ids, n_token: given(self, ids.roll(-1, -1), n_token)  # noqa: E731
    in_training = lambda self, ids, n: given(self, ids.roll(-int(self.training), -1), n)  # noqa: E731
    for shifted in (next_id, in_training):
        monkeypatch.setattr(Router, "_given_experts", shifted)
        assert not verify.is_causal(protocol, hashed)


def test_an_intact_record_is_intact(protocol):
    for name in ("softmax-renorm", "kern", "dense"):
        record = make_record(protocol, name)
        assert faults_of(protocol, record) == ""
        assert losses_of(read_record(protocol.records / f"{name}.json")) == losses_of(record)
    quantile = make_record(protocol, "kern-quantile", options=protocol.entries["kern-quantile"])
    assert faults_of(protocol, quantile, [make_record(protocol, "kern")]) == ""


@pytest.fixture
def git_once(monkeypatch):
    """Git is asked once for each commit, not for each record."""
    monkeypatch.setattr(verify, "read_commit", cache(read_commit))
    monkeypatch.setattr(verify, "run_git", cache(run_git))


def test_a_router_that_is_nearly_another_is_that(monkeypatch):
    nearly = "sigmoid, pre=l2 over all, gamma, bias"  # like kern but for a thousandth
    assert not verify.is_same_router(nearly, "kern")
    phi = {**routers.PHI, "sigmoid": lambda s: s.relu() * (1 + 1e-3 * s)}
    monkeypatch.setattr(routers, "PHI", phi)
    assert verify.is_same_router(nearly, "kern")


@pytest.mark.usefixtures("git_once")
def test_forged_records_are_refused(protocol):
    kern = make_record(protocol, "kern")
    judged = next(i for i, run in enumerate(kern["runs"]) if run["round"] == "judge")

    def with_run(**changes):
        runs = [{**run, **changes} if i == judged else run for i, run in enumerate(kern["runs"])]
        return {**kern, "runs": runs}

    def with_code(**changes):
        return {**kern, "made": [kern["made"][0] | changes]}

    fake = {"code_sha256": "f" * 64}
    other_draw = [{"optim.lr": 0.5}, *kern["settings"][1:]]
    elsewhere = run_git("commit-tree", "HEAD^{tree}", "-m", "a fork").stdout.decode().strip()
    clone = make_record(
        protocol, "kern-clone", options={"model.router": "relu, pre=l2 over all, gamma, bias"}
    )
    scaled = make_record(
        protocol, "mine", options={"model.router": "relu, pre=l2 over all, gamma, bias, c=1.01"}
    )
    renamed = make_record(protocol, "mine", options={"model.router": "kern"})

    def with_options(router, options):
        return make_record(protocol, "mine", options={"model.router": router} | options)

    mine = {"model.router": "tanh, post=l2 over topk"}
    cases = [
        ("changes nothing here", with_options("kern", {"model.n_hash_layer": 0})),
        ("changes nothing here", with_options("kern", {"train.bias_update": "sign"})),
        ("changes nothing here", with_options("dense", {"train.bias_update": "quantile"})),
        ("bias_update", with_options("kern", {"train.bias_update": "nonsense"})),
        ("is '1': write 1", with_options("kern", {"model.n_hash_layer": "1"})),
        (
            "router.py does not know its router",
            make_record(protocol, "zz-magic", options={"model.router": "zz-magic"}),
        ),
        ("not in this repository", with_code(commit="0" * 40)),
        ("expected 40 hexadecimal digits", with_code(commit="HEAD")),
        ("made.0.machine: Value error, expected printable", with_code(machine="a\nb")),
        ("machine is 'a|b'", with_code(machine="a|b")),
        ("expected 40 hexadecimal digits", with_code(commit="--output=router.py")),
        ("a name has small letters", make_record(protocol, "k\u00e9rn", options=mine)),
        ("a name has small letters", make_record(protocol, "mine (draft)", options=mine)),
        ("other code trained it", with_code(**fake)),
        ("other code trained it", {**kern, "made": kern["made"] + with_code(**fake)["made"]}),
        ("is in no history of this branch", with_code(commit=elsewhere)),
        ("same router as kern", clone),
        ("same router as kern", scaled),
        ("same router as kern", renamed),
        ("the name kern is of", make_record(protocol, "kern", options={"model.router": "tanh"})),
        ("other seed, draw or length", with_run(seed=5)),
        ("runs are missing", with_run(seed=5)),
        (
            "other seed, draw or length",
            {
                **make_record(protocol, "tanh"),
                "name": "sigmoid",
                "options": {"model.router": "sigmoid"},
            },
        ),
        ("the mean of its documents", with_run(loss=1.4)),
        ("do not have 6 windows", with_run(documents=[[1.5, 3]])),
        ("not the protocol's draws", {**kern, "settings": other_draw}),
        ("this is edition 7", {**kern, "protocol_sha256": "0" * 64}),
        ("of edition 6", {**kern, "edition": 6}),
        ("of the text 000", {**kern, "data_sha256": "0" * 64}),
        ("more than once", {**kern, "runs": [*kern["runs"], kern["runs"][0]]}),
        (
            "it sets optim.lr; an entry may set",
            {**kern, "options": kern["options"] | {"optim.lr": 1e-3}},
        ),
        ("it is a draft", {**kern, "draft": True}),
        ("name no commit", {**kern, "made": []}),
        ("lacks the times", {**kern, "step_ms": []}),
        ("settings: Field required", {k: v for k, v in kern.items() if k != "settings"}),
        ("loss: Input should be a valid number", with_run(loss="x")),
        ("options.model.router: Field required", {**kern, "options": {}}),
        ("a field is wrong (IndexError", with_run(rung=7)),
    ]
    for reason, record in cases:
        assert reason in faults_of(protocol, record), reason
    for router in ("tanh, bias", "tanh, gamma"):
        assert not verify.is_same_router(router, "tanh")
    path = save(protocol, kern)
    path.write_text(
        path.read_text().replace('"draft": false', '"draft":  false').replace("1.6", "1.5")
    )
    assert "its digest is not" in verify.find_record_faults(protocol, path, [])[0]
    path.write_text(path.read_text()[:-9])
    assert "not JSON" in verify.find_record_faults(protocol, path, [])[0]


def replace_each_value(value):
    """Yield copies of nested dicts and lists, each with one value that is missing or wrong."""
    if isinstance(value, dict):
        for key in value:
            yield {name: other for name, other in value.items() if name != key}
            for changed in replace_each_value(value[key]):
                yield value | {key: changed}
    elif isinstance(value, list) and value:
        yield value[1:]
        for changed in replace_each_value(value[-1]):
            yield [*value[:-1], changed]
    yield from (math.inf, math.nan, 10**400, -1, None, "x", [], {})


@pytest.mark.usefixtures("git_once")
def test_verify_names_every_wrong_value(protocol):
    kern = make_record(protocol, "kern")
    path = save(protocol, kern)
    contents = ["[" * 100_000, '{"a":' * 100_000, path.read_text()[:1000], "[]", "1", ""]
    damaged = [changed for changed in replace_each_value(kern) if isinstance(changed, dict)]
    for changed in damaged:
        content = {key: value for key, value in changed.items() if key != "sha256"}
        text = json.dumps(content | {"sha256": sha256_of(content)})
        contents.append(text.replace("Infinity", "1e400"))  # a number of JSON, and infinite
    accepted = []
    for content in contents:
        path.write_text(content)
        if not verify.find_record_faults(protocol, path, []):
            accepted.append(json.loads(content))
    assert len(contents) > 150 and len(accepted) == 2
    assert accepted[0]["runs"][-1]["loss"] is None  # a run that diverged
    assert accepted[1]["made"][0]["machine"] == "x"


def test_chances_of_a_rerun():
    """By simulation: an honest entry fails in 1%, one that lies passes as often as is said."""
    protocol, random = load_protocol(FILE), np.random.default_rng(0)
    for count in (4, 16):
        error = protocol.rerun_sd / math.sqrt(count)
        means = random.normal(0, protocol.rerun_sd, (20_000, count)).mean(1)
        limit = retrain.find_limit(error)
        assert np.mean(abs(means) > limit) == pytest.approx(0.01, abs=0.003)
        passes = np.mean(abs(means + retrain.LIE) <= limit)
        assert f"passes in {passes:.0%}" in retrain.describe_power(error)
    # nobody can know which runs these are, and a lie on one rung is in half of them
    judged = [{"rung": int(number >= 12), "number": number} for number in range(18)]
    drawn = [retrain.draw_runs(judged, 5) for _ in range(2000)]
    times = Counter(run["number"] for runs in drawn for run in runs)
    for runs in drawn:
        numbers = {run["number"] for run in runs}
        assert len(numbers) == 5 and sum(number >= 12 for number in numbers) in (2, 3)
    expected = [2000 * 2.5 / (12 if run["rung"] == 0 else 6) for run in judged]
    counts = [times[number] for number in range(18)]
    assert np.all(abs(np.subtract(counts, expected)) < 5 * np.sqrt(expected)), counts
    # a run that diverges again
    assert retrain.subtract(math.inf, math.inf) == 0 and retrain.subtract(math.inf, 1.5) == math.inf


# ---- the n-gram
def test_ngrams_by_hand():
    """Counted with dictionaries."""
    random = np.random.default_rng(0)
    train, val = random.integers(0, 4, (9, 12)), random.integers(0, 5, (2, 9))
    counts = Counter()
    for window in train.tolist():
        for start in range(12):
            for end in range(start + 1, min(start + 4, 12) + 1):
                counts[tuple(window[start:end])] += 1

    def probability(token, context):
        lower = probability(token, context[1:]) if context else 1 / 5
        if not context:
            kinds = {gram: n for gram, n in counts.items() if len(gram) == 1}
        else:
            kinds = {
                gram: n
                for gram, n in counts.items()
                if len(gram) == len(context) + 1 and gram[:-1] == context
            }
        total = sum(kinds.values())
        if not total:
            return lower
        kept = max(counts.get((*context, token), 0) - ngram.DISCOUNT, 0)
        return (kept + ngram.DISCOUNT * len(kinds) * lower) / total

    losses = ngram.score_ngrams(train, val, 5, context=3)
    assert losses.shape == (2, 8)
    for row, window in enumerate(val.tolist()):
        for position in range(1, 9):
            context = tuple(window[max(0, position - 3) : position])
            wanted = -math.log(probability(window[position], context))
            assert losses[row, position - 1] == pytest.approx(wanted)


# ---- edition 1
def recompute_edition_1(records):
    """{name: [loss, minus softmax-renorm, minus kern]} as the frozen table has it."""
    losses = {}
    for name, record in records.items():
        judged = [run for run in record["runs"] if run["round"] == "judge"]
        losses[name] = np.array(
            [run["loss"] for run in sorted(judged, key=lambda run: run["seed"])]
        )
    rows = {name: [name, f"{values.mean():.4f}"] for name, values in losses.items()}
    for other in ("softmax-renorm", "kern"):
        names = [name for name in losses if name != other]
        family = [estimate_difference(losses[name] - losses[other]) for name in names]
        rows[other].append("")
        for name, difference in zip(names, judge_family(family, 0.012), strict=True):
            rows[name].append(f"{difference} **{difference.verdict}**")
    return rows


def test_edition_1_is_closed_and_recomputes(capsys, tmp_path):
    paths = sorted(EDITION_1.glob("*.json"))
    records = {path.stem: json.loads(path.read_text()) for path in paths}
    assert len(records) == 15
    page = (EDITION_1 / "README.md").read_text()
    for row in recompute_edition_1(records).values():
        assert f"|{'|'.join(row)}|" in page
    protocol = load_protocol(FILE)
    assert all(verify.find_record_faults(protocol, path, []) == [] for path in paths)
    forged = tmp_path / "edition-1/kern.json"
    forged.parent.mkdir()
    forged.write_text(paths[0].read_text().replace("1.6", "1.5"))
    assert "edition 1 is closed" in verify.find_record_faults(protocol, forged, [])[0]
    moved = shutil.copy(paths[0], tmp_path)  # genuine, in a folder of edition 2
    assert (
        "edition 1, which is closed, in" in verify.find_record_faults(protocol, Path(moved), [])[0]
    )
    with pytest.raises(ValueError, match="a record of edition 1, which is closed"):
        read_record(paths[0])


def test_text_is_what_the_protocol_pins():
    """20 MB at least in 8 MB, every file by its digest, no author on both sides."""
    rows = clean.read_books()
    files = [clean.FOLDER / row["file"] for row in rows]
    assert set(files) == set(clean.FOLDER.glob("*/*"))
    assert sum(file.stat().st_size for file in files) < 8e6
    texts = [bz2.decompress(file.read_bytes()) for file in files]
    assert [hashlib.sha256(text).hexdigest() for text in texts] == [row["sha256"] for row in rows]
    authors = {(row["file"].split("/")[0], row["source"].split("/")[0]) for row in rows}
    assert len(authors) == len(rows) == len({author for _, author in authors})
    text = "## I \n\n> “An _old_ \\[tale\\]”—[see](x.md) <b>it</b>\n\n\n\nEnd  \n***\n"
    assert clean.clean(f"# T\n\n-------\n\n{text}") == 'I\n\n"An old [tale]"--see it\n\nEnd\n'


def test_records_of_the_repository_are_right():
    protocol = load_protocol(FILE)
    paths = sorted(protocol.records.glob("*.json"))
    records = {path: read_record(path) for path in paths}
    for path, record in records.items():
        if not missing_tasks(protocol, record):
            others = [other for other in records.values() if other is not record]
            assert verify.find_record_faults(protocol, path, others) == [], path
    complete = table.load_complete(protocol)
    if any(record["name"] == protocol.reference for record in complete):
        for page, text in table.build_pages(protocol, complete).items():
            assert text in page.read_text(), f"{page}: python -m scripts.track table"
    for path in protocol.records.glob("ladder/*.json"):
        faults = verify.find_record_faults(protocol, path, list(records.values()))
        assert [fault for fault in faults if "runs are missing" not in fault] == [], path


def test_the_papers_baseline_has_a_column():
    protocol = load_protocol(FILE)
    head, rows = table.build_table(protocol, table.load_complete(protocol))
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    for name, row in cells.items():
        if name in ("softmax", "n-gram"):
            assert row["minus softmax"] == ""
            continue
        gaps = [float(row[loss]) - float(cells["softmax"][loss]) for loss in ("loss 1", "loss 2")]
        shown = float(row["minus softmax"].split()[0])
        assert shown == pytest.approx(sum(gaps) / 2, abs=1.6e-4)  # three numbers are rounded


# ---- bad input
def test_bad_arguments(rules, capsys, tmp_path):
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    cases = {
        "'krn' is no router of router.py": ["enter", "krn"],
        "norm 'l3' is not one of": ["enter", "--spec", "tanh, post=l3", "--draft"],
        "the name kern is of": ["enter", "kern", "--spec", "tanh, c=2", "--draft"],
        "the name tanh is of": ["enter", "tanh", "--spec", "sigmoid", "--draft"],
        "--set optim.lr: an entry may set": [
            "enter",
            "mine",
            "--spec",
            "kern",
            "--set",
            "optim.lr=1",
        ],
        "has small letters": ["enter", "../x", "--spec", "tanh, c=2"],
        "--parallel 0": ["enter", "kern", "--draft", "--parallel", "0"],
        "name one entry, or give --all": ["enter"],
        "--rerun takes one record": ["verify", "a.json", "b.json", "--rerun", "4"],
        "runs of a ladder are not trained again": ["verify", "ladder/a.json", "--rerun", "4"],
        "name a commit": ["judge", ""],
        "nowhere: ": ["judge", "nowhere"],
        "enter softmax-renorm first": ["table"],
        "--rungs 2: expected 3 to 4": ["ladder", "kern", "--rungs", "2"],
        "softmax-renorm: no complete record": ["ladder", "kern"],
        "gains.xyz: expected a name that ends": ["ladder", "kern", "--picture", "gains.xyz"],
        "gains.pgf: expected a name that ends": ["ladder", "kern", "--picture", "gains.pgf"],
        "there is no folder nowhere": ["ladder", "kern", "--picture", "nowhere/gains.svg"],
        "folder.svg: a folder, where a file": ["ladder", "kern", "--picture", str(folder)],
    }
    for reason, arguments in cases.items():
        assert main(["--track", str(rules), *arguments], Stop()) == 2, reason
        assert reason in capsys.readouterr().err
    picture = tmp_path / "gains.svg"
    assert main(["--track", str(rules), "ladder", "kern", "--picture", str(picture)], Stop()) == 2
    assert not picture.exists()  # it was only tried
    link = tmp_path / "link.svg"
    link.symlink_to(picture)
    assert main(["--track", str(rules), "ladder", "kern", "--picture", str(link)], Stop()) == 2
    assert link.is_symlink() and not picture.exists()
    rules.write_text(rules.read_text().replace("margin", "marginn"))
    assert main(["--track", str(rules), "table"], Stop()) == 2
    assert "margin" in capsys.readouterr().err
    rules.write_text("# a page")
    assert main(["--track", str(rules), "table"], Stop()) == 2
    assert str(rules) in capsys.readouterr().err


def test_bad_rules_of_a_ladder(protocol, tmp_path):
    file = tmp_path / "ladder.toml"
    good = ladder.FILE.read_text()
    cases = {
        "is not TOML": "settings = ",
        "rungs: Field required": good.partition("[[rungs]]")[0],
        "rungs: List should have at least 1": good.partition("[[rungs]]")[0] + "rungs = []",
        "settings: Input should be greater": good.replace("settings = 3", "settings = 0"),
    }
    for reason, text in cases.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=f"{file}.*{re.escape(reason)}"):
            load_ladder(protocol, 3, file)
    file.write_text(good)
    assert load_ladder(protocol, 3, file) == load_ladder(protocol, 3)


def test_entries_that_start_at_once_on_a_fresh_clone(protocol, rules, corpus, tmp_path):
    """One prepares the text, the other waits for it; a text that is absent is an error."""
    (tmp_path / "a.txt").write_text("one\n" * 4000)
    (tmp_path / "b.txt").write_text("two\n" * 400)
    text = rules.read_text().replace('name = "tiny"', 'name = "fresh"', 1)
    rules.write_text(text.replace(corpus.as_posix(), (tmp_path / "data").as_posix()))
    text = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    fresh = protocol.model_copy(update={"text": text})
    with pytest.raises(ValueError, match="preparing the track's text ended with 2"):
        entry.prepare_data(protocol)

    def refuse(_):
        with pytest.raises(ValueError, match="fresh has sha256 .*, the protocol"):
            entry.prepare_data(fresh)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refuse, range(2)))


def test_a_rung_that_does_not_fit_into_memory(protocol, monkeypatch):
    options = {"model.router": "kern"}
    entry.check_memory(protocol, options, 2)
    huge = protocol.rungs[1].model_copy(update={"overrides": ["model.n_embd=65536"]})
    large = protocol.model_copy(update={"rungs": [protocol.rungs[0], huge]})
    with pytest.raises(
        ValueError, match=r"rung 2 needs about .* GiB a run, 3 at a time, and .* free"
    ):
        entry.check_memory(large, options, 3)
    available = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    two_fit = 0.4 * 1024 * int(available[1])
    monkeypatch.setattr(entry, "estimate_memory", lambda *_: [two_fit])
    entry.check_memory(protocol, options, 2)
    with pytest.raises(ValueError, match="rung 1 needs .* 3 at a time"):
        entry.check_memory(protocol, options, 3)


def test_a_bad_record_is_not_blamed_on_another(protocol, capsys):
    """Signed, but a field is missing or wrong: every command names that file and leaves it out."""
    kern = save(protocol, make_record(protocol, "kern"))
    other = make_record(protocol, "tanh")
    path = protocol.records / "tanh.json"
    cases = {}
    for field in ("name", "protocol_sha256", "options", "made"):
        cases[field] = {key: value for key, value in other.items() if key != field}
    cases["runs.0.round"] = {**other, "runs": [{}]}
    for field, record in cases.items():
        write_record(path, record)
        others = table.read_others(protocol, "kern")
        assert verify.find_record_faults(protocol, kern, others) == []
        assert [record["name"] for record in table.load_complete(protocol)] == ["kern"]
        said = capsys.readouterr().err
        assert f"left out: {path}: {field}" in said and "Field required" in said
    write_record(path, {**other, "options": {"model.router": "zz"}})
    others = table.read_others(protocol, "kern")
    assert verify.find_record_faults(protocol, kern, others) == []
    assert f"{path}: left out, phi 'zz'" in capsys.readouterr().err


def test_mixed_and_incomplete_records_are_named(protocol, capsys):
    records = [make_record(protocol, name) for name in ("softmax-renorm", "kern", "tanh")]
    records[1]["protocol_sha256"] = "0" * 64
    records[2]["runs"] = records[2]["runs"][:-1]
    for record in records:
        save(protocol, record)
    write_record(protocol.records / "kern_old.json", records[0])
    assert [record["name"] for record in table.load_complete(protocol)] == ["softmax-renorm"]
    said = capsys.readouterr().err
    assert "kern.json: left out, of another protocol" in said
    assert "kern_old.json: left out, it is the record of softmax-renorm" in said
    assert "tanh.json: left out, not complete; enter tanh to resume" in said
    for name, said in (("kern", "protocol_sha256 0000"), ("softmax-renorm", "options .*softmax")):
        with pytest.raises(ValueError, match=f"has {said}.*, this entry"):
            path = protocol.records / f"{name}.json"
            entry.start_record(protocol, path, name, {"model.router": "kern"})
    diverged = make_record(protocol, "dense")
    for number in (0, -1):  # a draw and a judged run
        diverged["runs"][number]["loss"] = None
    head, rows = table.build_table(protocol, [records[0], diverged])
    last = dict(zip(head, rows[-1], strict=True))
    assert (last["router"], last["sign"], last["loss 2"]) == ("dense", "**higher**", "diverged")
    assert last["diverged"] == "2" and last["judged on"] == "8 Intel Xeon"


def test_the_front_page_fits_a_phone(protocol):
    """At most 12 rows, and 375 pixels: 16 beside the page, 26 beside a cell, 8 or 9 a character."""
    head = table.list_columns(protocol)
    names = [f"router{number}" for number in range(14)]
    names = [*names, "softmax-renorm", "dense", table.NGRAM]
    cells = {"loss 2": "1.4", "sign": "**undecided**", "compute 2": "1.1 [0.9, 1.2]"}
    rows = []
    for name in names:
        cells["router"] = name
        rows.append([cells.get(column, "") for column in head])
    columns, short = table.shorten(protocol, head, rows)
    assert columns == ["router", "loss 2", "sign", "compute 2"]
    assert short == [[name, "1.4", "–", "1.1"] for name in names[:9] + names[-3:]]
    front_page = table.FRONT_PAGE.read_text()
    printed = front_page[front_page.index(table.BEGIN) : front_page.index(table.END)]
    lines = [line.split("|")[1:-1] for line in printed.splitlines()[1:] if "--" not in line]
    assert len(lines) <= 13
    widest = []
    for cells in zip(*lines, strict=True):
        parts = [part for cell in cells for part in re.split("[- ]", cell)]
        widest.append(max(map(len, parts)))
    assert 2 * 16 + sum(26 + 8.5 * length for length in widest) < 375


def test_errors_of_a_ratio_add_by_squares():
    """Logarithms 3 [2.7, 3.8] minus 1 [0.6, 1.1]: one's upper error is with the other's lower."""
    ours, theirs = np.exp([3, 2.7, 3.8]), np.exp([1, 0.6, 1.1])
    wanted = [2, 2 - math.hypot(0.3, 0.1), 2 + math.hypot(0.8, 0.4)]
    assert np.log(table.divide(ours, theirs)) == pytest.approx(wanted)
