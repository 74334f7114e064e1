"""track/: the rules, pairs, score and count table against scipy, by hand and by simulation."""

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from itertools import product
from operator import attrgetter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import TINY
from matplotlib.figure import Figure
from scipy import stats

from configure.schema import KEYS
from data.bins import open_tokens, read_meta
from data.loader import Loader, choose_validation, identify
from report import plots
from runtime import updates
from runtime.launch import EXIT_CODE, Stop
from runtime.memory import flops_per_token
from scripts.plan import count_tokens
from track import counting, runner, table
from track.__main__ import main
from track.contest import (
    FILE,
    RECORDS,
    Line,
    Made,
    append_line,
    draw_setting,
    find_pair,
    list_missing,
    list_pairs,
    load_protocol,
    read_lines,
)
from track.runner import Runner
from track.score import Answer, answer, find_best, find_growth, judge

FOLDER = Path(table.PAGE).parent
MADE = Made(commit="a" * 40, torch="2", device="CPU", instructions="AVX2")
PROTOCOL = load_protocol(FILE)
RULES = """
[track]
text = ["absent", "absent"]
data_sha256 = "{data}"
alpha = 0.01
margin = 0.005
pilot_sd = 0.0089
first_seed = 300

[track.ranges]
"optim.lr" = [1e-3, 2e-3]
"optim.expert_out_lr_ratio" = [1.0, 2.0]
"optim.router_lr_ratio" = [1.0, 2.0]
"model.gate_norm" = [1.0, 2.0]
"train.balance_loss_coef" = [0.01, 0.02]

[track.balances]
loss = {{}}
none = {{}}

[track.rungs.main]
flops = 1e9
overrides = ["--train.max_steps=3", "--eval.interval=3"]

[track.arms]
dense = {{ router = "dense", balance = "none" }}
softmax-renorm-loss = {{ router = "softmax-renorm", balance = "loss" }}
kern-loss = {{ router = "kern", balance = "loss" }}

[track.questions]
kern = {{ arms = ["kern-loss"], minus = ["softmax-renorm-loss"], settings = 2 }}
"""


def make_line(arm="kern-loss", setting=0, loss: float | None = 1.3, made=MADE) -> Line:
    """A run of the record."""
    return Line(
        arm=arm,
        options=PROTOCOL.arms[arm],
        setting=setting,
        seed=PROTOCOL.first_seed + setting,
        loss=loss,
        load_imbalance=2.0,
        dead_experts=1.0,
        made=made,
        date="2026-11-29",
    )


DESCRIBE_CODE = runner.describe_code


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    """Tests must pass in a checkout whose code is not committed, too."""
    monkeypatch.setattr(runner, "describe_code", lambda: "b" * 40)


@pytest.fixture
def rules(tmp_path: Path, corpus: Path) -> str:
    """The config file of a contest of one question and 3 steps a run."""
    data = identify([read_meta(corpus / "tiny")], [1.0])["data"]
    text = TINY.format(runs=(tmp_path / "runs").as_posix(), data=corpus.as_posix())
    file = tmp_path / "tiny-contest.toml"
    # the contest names its runs
    file.write_text(text.replace('name = "tiny"\n', "", 1) + RULES.format(data=data))
    return str(file)


# ---- rules
@pytest.mark.parametrize("rung", PROTOCOL.rungs)
def test_arms_differ_in_router_and_balancing_alone(rung):
    """At a setting all arms have the same seed, rates and gate norm; nothing else is changed."""
    trainer = Runner(FILE, PROTOCOL, rung, Path())
    flops = flops_per_token(trainer.config.model) * count_tokens(trainer.config)
    assert PROTOCOL.rungs[rung].flops == pytest.approx(flops, rel=2e-3)
    base = {key: attrgetter(key)(trainer.config) for key in KEYS}
    for (name, arm), setting in product(PROTOCOL.arms.items(), (0, 1, 23)):
        drawn = draw_setting(PROTOCOL, setting)
        drawn["optim.lr"] = pytest.approx(drawn["optim.lr"] * 64 / base["model.n_embd"], rel=1e-3)
        coefficient = drawn.pop("train.balance_loss_coef")
        balancing = {
            "loss": {"train.balance_loss_coef": coefficient},
            "quantile": {"train.bias_update": "quantile"},
            "bias": {"train.bias_update_rate": 0.001},
            "none": {},
        }
        config = trainer.make_point((name, setting)).config
        assert {key: attrgetter(key)(config) for key in KEYS} == {
            **base,
            "run.dir": str(trainer.folder),
            "run.name": f"{name}-{setting}",
            "run.seed": 300 + setting,
            "model.router": arm.router,
            "model.n_hash_layer": arm.hash_layers,
            **drawn,
            **balancing[arm.balance],
        }


def test_settings_are_spread_over_the_ranges():
    """They are Roberts' points."""
    low, high = np.log(list(PROTOCOL.ranges.values())).T
    drawn = [list(draw_setting(PROTOCOL, setting).values()) for setting in range(24)]
    places = (np.log(drawn) - low) / (high - low)
    root = max(np.roots([1, 0, 0, 0, 0, -1, -1]).real)
    points = (0.5 + np.outer(np.arange(1, 25), root ** -np.arange(1.0, 6.0))) % 1
    assert places == pytest.approx(points, abs=0.01)  # settings have three digits


def test_questions_are_trained_in_pairs_by_setting():
    pairs = list_pairs(PROTOCOL, "kern")
    assert len(pairs) == 24
    assert pairs[6] == (("kern-loss", 6), ("softmax-renorm-loss", 6))
    assert pairs[7] == (("kern-quantile", 7), ("softmax-renorm-quantile", 7))
    missing = list_missing(PROTOCOL, list(PROTOCOL.questions), [], MADE)
    assert len(missing) == len(set(missing)) == 236
    for half in range(2, 49, 2):  # of the first 48 runs: pairs are complete
        counts = Counter(setting for _, setting in missing[:half])
        assert set(counts.values()) == {2} and sorted(counts) == list(range(half // 2))


def test_a_rung_trains_its_own_questions(monkeypatch):
    train = mock.Mock(return_value=0)
    monkeypatch.setattr(Runner, "train", train)
    assert main(["run", "--rung", "large"], Stop()) == 0
    assert train.call_args.args[0] == ["kern-quantile-large", "softmax-quantile-large"]


def test_pairs_are_made_alike(tmp_path):
    """A lost machine's half pair is made whole on another; a whole pair is not made again."""
    other = MADE.model_copy(update={"instructions": "AVX512"})
    pair = list_pairs(PROTOCOL, "kern")[0]
    half = [make_line(made=other), make_line("softmax-renorm-loss")]
    assert find_pair(half, pair) is None
    assert list_missing(PROTOCOL, ["kern"], half, MADE)[0] == ("kern-loss", 0)
    assert list_missing(PROTOCOL, ["kern"], half, other)[0] == ("softmax-renorm-loss", 0)
    third = MADE.model_copy(update={"torch": "3"})
    assert set(pair) < set(list_missing(PROTOCOL, ["kern"], half, third))
    file = tmp_path / "main.jsonl"
    whole = [*half, make_line("softmax-renorm-loss", made=other, loss=1.5)]
    for line in whole:
        append_line(file, line)
    assert read_lines(PROTOCOL, file) == whole
    assert find_pair(whole, pair) == (whole[0], whole[2])
    assert not set(pair) & set(list_missing(PROTOCOL, ["kern"], whole, third))


# ---- score
def spread(mean, deviation=1e-4, n=24):
    """{setting: difference}, by turns above and below a mean."""
    return {setting: mean + deviation * (-1) ** setting for setting in range(n)}


SMALL = spread(-0.003)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        (spread(-1, n=23), "runs are going on"),
        (spread(-0.013), "lower"),
        (spread(0.01), "higher"),
        (SMALL, "lower, by less than 0.005"),
        (spread(0), "equivalent"),
        (spread(0, 0.02), "undecided"),
        # 18 of 24 lower: p 0.023 by the sign test, though the mean of the others is decided
        ({**SMALL, **dict.fromkeys(range(6), math.inf)}, "undecided"),
        ({**SMALL, **dict.fromkeys(range(4), math.inf)}, "lower, by a sign test"),  # p 0.0015
        ({**SMALL, **dict.fromkeys(range(20), math.inf)}, "higher, by a sign test"),
        ({**SMALL, **dict.fromkeys(range(20), math.nan)}, "undecided"),  # both diverged
    ],
)
def test_verdicts(differences, verdict):
    assert judge(PROTOCOL, Answer("kern", "softmax", 1e9, 24, differences)) == verdict


def test_an_answer_is_a_paired_t_test_without_diverged_runs():
    losses = [1.31, 1.3, 1.29, None, None, 1.32, 1.33, 1.28, 1.3, 1.34]
    runs = [run for pair in list_pairs(PROTOCOL, "kern") for run in pair]
    lines = [make_line(*run, loss) for run, loss in zip(runs, losses, strict=False)][::-1]
    one = answer(PROTOCOL, "kern", lines)
    expected = stats.ttest_1samp([0.01, 0.05, -0.04], 0)
    interval = expected.confidence_interval()
    assert one.mean == pytest.approx((0.02 / 3, *interval, expected.pvalue, 3))
    minus = "softmax-renorm-loss / softmax-renorm-quantile"
    cells = [str(one.mean), f"{expected.pvalue:.2g}", "**runs are going on**", "5 of 24", "1, 2"]
    assert table.tabulate_questions(PROTOCOL, [one])[1] == [["kern", minus, *cells]]
    assert table.tabulate_arms(PROTOCOL, lines, 1.3332)[1] == [
        ["counting", "", "", "1.3332", "", "", ""],
        ["softmax-renorm-loss", "3", "1.3200", "", "2.0", "1.0", "0"],
        ["softmax-renorm-quantile", "2", "1.2800", "", "2.0", "1.0", "1"],
        ["kern-loss", "3", "1.3050", "", "2.0", "1.0", "1"],
        ["kern-quantile", "2", "1.3100", "", "2.0", "1.0", "0"],
    ]


def test_growth_is_a_t_test_of_slopes_over_compute():
    """Settings that a rung lacks are left out; where a run diverged the slope is not finite."""
    rng = np.random.default_rng(4)
    flops = [2e12, 9e13, 9e14]
    losses = rng.normal(0, 0.01, (3, 8))
    losses[[0, 1, 2], [1, 2, 3]] = math.inf
    answers = [
        Answer("kern", "softmax", size, planned, dict(enumerate(row.tolist())))
        for size, planned, row in zip(flops, (9, 8, 24), losses, strict=True)
    ]
    del answers[2].differences[5]
    growth = find_growth("grows", answers)
    assert list(growth.differences) == [0, 1, 2, 3, 4, 6, 7] and growth.diverged == [1, 2, 3]
    slopes = [stats.linregress(np.log10(flops), losses[:, at]).slope for at in (0, 4, 6, 7)]
    expected = stats.ttest_1samp(slopes, 0)
    interval = expected.confidence_interval()
    assert growth.mean == pytest.approx((np.mean(slopes), *interval, expected.pvalue, 4))
    assert all(math.isnan(growth.differences[at]) for at in growth.diverged)
    assert growth.planned == 8


def test_verdicts_are_as_often_right_as_the_page_says():
    """Edition 2's variances: router x setting 0.0048, seeds 0.0069 with a correlation of 0.65."""
    deviation = math.sqrt(2 * (0.0048**2 + (1 - 0.65) * 0.0069**2))  # of a pair's difference
    assert deviation == pytest.approx(PROTOCOL.pilot_sd, rel=0.01)
    n = 4000
    equal = np.random.default_rng(1).normal(0, deviation, (n, 24))  # equal routers

    def share(truth, *starts, of=equal):
        """Percent of contests whose verdict starts so, if the differences are less by `truth`."""
        rows = [dict(enumerate(row)) for row in of - truth]
        answers = [Answer("kern", "softmax", 1e9, len(row), row) for row in rows]
        return 100 * np.mean([judge(PROTOCOL, one).startswith(starts) for one in answers])

    assert share(0, "lower", "higher") < 1.5
    assert share(PROTOCOL.margin, "equivalent", "lower, by less than 0.005") < 6
    found = [share(0.005, "lower"), share(0.008, "lower"), share(0.008, "lower", of=equal[:, :8])]
    for rungs in (["draft", "main", "large"], ["draft", "main"]):
        sizes = np.log10([PROTOCOL.rungs[rung].flops for rung in rungs])
        of_rungs = equal[:, : 8 * len(rungs)].reshape(n, 8, -1)
        slopes = of_rungs @ (sizes - sizes.mean()) / (len(rungs) * sizes.var())
        assert share(0, "lower", "higher", of=slopes) < 1.5
        found.append(share(0.01, "lower", of=slopes))
    (text,) = re.findall("(?s)With the standard deviation .*? in 58%", table.PAGE.read_text())
    said = re.findall(r"(\d+)%", text)
    assert found == pytest.approx(list(map(int, said)), abs=2)


def test_the_best_rate_is_the_lowest_point_of_a_parabola():
    rates = np.geomspace(3e-3, 1.2e-2, 8)
    losses = 1.3 + 0.02 * np.log(rates / 5e-3) ** 2
    assert find_best(rates, losses) == pytest.approx((5e-3, 1.3))
    assert find_best(rates, 2.6 - losses) is None  # a highest point
    assert find_best(rates, 1.3 + 0.02 * np.log(rates / 2e-3) ** 2) is None  # beyond the rates
    assert find_best(rates[:5], losses[:5]) is None


# ---- counting
def kneser_ney(train, history, is_longest):
    """Modified Kneser-Ney from its definition: each of 4 tokens' probability after a history."""
    n = len(history) + (1 if is_longest else 2)
    grams = [tuple(text[at : at + n]) for text in train for at in range(len(text) - n + 1)]
    if not is_longest:  # kinds of tokens before
        grams = [gram[1:] for gram in set(grams)]
    grams = Counter(grams)
    n1, n2, n3, n4 = (max(1, list(grams.values()).count(count)) for count in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    discounts = {1: 1 - 2 * y * n2 / n1, 2: 2 - 3 * y * n3 / n2, 3: 3 - 4 * y * n4 / n3}
    discounts = {0: 0.0} | {count: max(0.0, value) for count, value in discounts.items()}
    lower = kneser_ney(train, history[1:], is_longest=False) if history else [0.25] * 4
    counts = [grams[(*history, token)] for token in range(4)]
    total = sum(counts)
    if not total:
        return lower
    freed = sum(discounts[min(3, count)] for count in counts)
    return [
        (count - discounts[min(3, count)] + freed * lower[token]) / total
        for token, count in enumerate(counts)
    ]


@pytest.mark.parametrize("context", [1, 2, 3])
def test_counting_by_hand(context):
    """Also after histories never seen, and at a window's start."""
    rng = np.random.default_rng(2)
    train = rng.choice(4, (12, 9), p=[0.5, 0.3, 0.15, 0.05])
    val = rng.choice(4, (60, 5))
    predicted = counting.predict(train, val, 4, context)
    for row, window in enumerate(val.tolist()):
        for at in range(1, 5):
            history = window[max(0, at - context) : at]
            expected = kneser_ney(train.tolist(), history, len(history) == context)
            assert sum(expected) == pytest.approx(1)
            assert predicted[row, at] == pytest.approx(expected[window[at]])


def test_counting_of_a_contest(rules, tmp_path, corpus, monkeypatch):
    """It is of the windows of setting 0, each once; no window's first token is predicted."""
    Path(rules).write_text(Path(rules).read_text().replace("max_steps=3", "max_steps=250"))
    for name, value in (("FILE", rules), ("RECORDS", tmp_path), ("CONTEXT", 1)):
        monkeypatch.setattr(counting, name, value)
    assert counting.main([]) == 0
    loader = Loader([open_tokens(corpus / "tiny", "train")], 32, 8, 300)
    train = [
        np.hstack([inputs, targets[:, -1:]]) for inputs, targets in map(loader.batch, range(250))
    ]
    distinct = np.unique(np.vstack(train), axis=0)
    assert len(distinct) < 2000
    tokens = open_tokens(corpus / "tiny", "val")
    places = 32 * choose_validation([tokens], 32, 6).windows
    val = np.array([tokens.read(place, 33) for place in places.tolist()])
    predicted = counting.predict(distinct, val, 257, 1)
    losses = json.loads((tmp_path / "counting.json").read_text())
    assert losses == {"main": pytest.approx(-np.log(predicted[:, 1:]).mean(), abs=1e-4)}


# ---- the record
RECORD = json.loads(make_line().model_dump_json())
CHANGED = "is another arm now, or has another seed"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": -7.4}, "main.jsonl, line 2: loss = -7.4: should be greater than 0"),
        ({"loss": math.log(257)}, "should be less than 5.549"),
        ({"loss": "1.3"}, "loss = '1.3': should be a valid number"),
        ({"zero_gates": 7.5}, "zero_gates"),
        ({"made": {**RECORD["made"], "commit": "HEAD"}}, "made.commit"),
        (json.dumps(RECORD).replace('"arm": "kern-loss", ', "").encode(), "line 2: arm is missing"),
        (
            b"{",
            "line 2: damaged, not JSON: EOF while parsing an object at line 1 column 1; delete",
        ),
        ({}, "main.jsonl, line 2: kern-loss, setting 0 is there before"),
        ({"arm": "mine"}, CHANGED),
        ({"options": {**RECORD["options"], "hash_layers": 1}, "setting": 1, "seed": 301}, CHANGED),
        ({"setting": 1}, CHANGED),
        ("run --only tanh", "--only tanh: another --rung, or some of kern"),
        ("run --rung small", "--rung small: expected main"),
        ("run --parallel 0", "--parallel and --rerun: expected a positive number"),
        ("verify --rerun -1", "--parallel and --rerun: expected a positive number"),
        ("enter mine --spec tanh,foo --rung main", "no router 'tanh,foo'"),
        ("enter Mine --spec tanh --balance loss --rung main", "Mine.[key] = 'Mine': String should"),
        (
            "enter kern-loss --spec tanh --balance loss --rung main",
            "'kern-loss' is another arm: take another name",
        ),
        ("enter tanh --settings 1 --rung main", "settings = 1: should be greater"),
        ("enter tanh --hash-layers -1 --rung main", "hash_layers = -1: should be greater"),
        ("enter tanh --rung main", "enter tanh: questions.tanh has an arm or rung that is not t"),
        ("enter tanh --balance loss", "enter tanh: questions.tanh has an arm or rung"),
        (("[track]\n", "[track]\nunknown = 1\n"), "unknown = 1: Extra inputs"),
        (('balance = "loss" }\n\n', 'balance = "luck" }\n\n'), "arms.kern-loss.balance"),
        (('["kern-loss"]', '["kern-los"]'), "questions.kern has an arm or rung that is not there"),
        (("settings = 2 }", 'settings = 2, rung = "small" }'), "questions.kern has an arm or rung"),
        (
            ("[track.questions]", "[track.growth]\nall = ['kern', 'dense']\n[track.questions]"),
            "growth.all",
        ),
        (("alpha = 0.01\n", ""), "alpha is missing"),
        (("[track]\n", "[track\n"), "TOML"),
    ],
)
def test_bad_records_arguments_and_rules(given, words, rules, tmp_path, capsys):
    """A change of the record, the line itself, arguments, or two texts of the rules."""
    arguments = "verify"
    if isinstance(given, str):
        arguments = given
    elif isinstance(given, tuple):
        Path(rules).write_text(Path(rules).read_text().replace(*given, 1))
    else:
        text = given.decode() if isinstance(given, bytes) else json.dumps({**RECORD, **given})
        (tmp_path / "main.jsonl").write_text(f"{json.dumps(RECORD)}\n{text}\n")
    records = ["--track", rules, "--records", str(tmp_path)]
    assert main([*records, *arguments.split()], Stop()) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


# ---- training
@pytest.mark.parametrize(
    "error", ["the run has diverged", "steps in a row skipped", "before its update", "5.6"]
)
def test_runs_are_recorded_as_they_end(rules, tmp_path, monkeypatch, capsys, error):
    """A failure, then a stop, then the rest: no run is lost or trained twice; a run that diverged
    or ended above ln 257 has a line, too.
    """
    full = "no space left on device"
    nan = f"error: {error}"
    line = (
        '{"step": 0, "tokens": 1, "val/load_imbalance": 2.5, "val/loss": 5.5, "val/gate_norm": 1}\n'
    )
    measured = line + line.replace("0", "3", 1).replace("1}", "2}")
    if error == "5.6":
        nan = measured.replace("5.5", error)
    else:
        assert error in Path(updates.__file__).read_text()
    low, middle, high = (measured.replace("5.5", loss) for loss in ("1.3", "1.4", "1.5"))
    # the fourth ends before it is stopped
    ends = [full, high, "stopped", middle, full, nan, low]
    trained = []

    def train_points(file, points, shares, stop):
        assert len(shares) == 2
        for point in points:
            end = ends[len(trained)]
            trained.append(point.number)
            (point.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            stop.asked |= end == "stopped"
            is_whole = "{" in end
            (point.folder / ("metrics.jsonl" if is_whole else "train.log")).write_text(end)
            yield point, 0 if is_whole else EXIT_CODE if stop.asked else 1

    monkeypatch.setattr(runner, "train_points", train_points)
    monkeypatch.setattr(runner, "time", mock.Mock(monotonic=lambda: 60 * len(trained)))
    command = ["--track", rules, "--records", str(tmp_path / "records"), "run", "--parallel", "2"]
    assert main(command, Stop()) == EXIT_CODE
    output = capsys.readouterr()
    assert "kern-loss-0 failed with exit code 1" in output.err and "resumes" in output.out
    assert "3 left, about 3 min" in output.out  # two runs at once, two minutes
    assert output.err.count("failed") == 1  # not the stopped one
    # one fails again; then nothing is left
    assert [main(command, Stop()) for _ in range(3)] == [1, 0, 0]
    first = ["kern-loss-0", "softmax-renorm-loss-0", "kern-loss-1", "softmax-renorm-loss-1"]
    assert trained == [*first, "kern-loss-0", "kern-loss-1", "kern-loss-0"]
    assert not list((tmp_path / "runs").rglob("checkpoints"))
    lines = read_lines(load_protocol(rules), tmp_path / "records/main.jsonl")
    assert {line.run: line.loss for line in lines} == {
        ("softmax-renorm-loss", 0): 1.5,
        ("softmax-renorm-loss", 1): 1.4,
        ("kern-loss", 1): None,
        ("kern-loss", 0): 1.3,
    }
    assert lines[0].gate_norm == [1.0, 2.0] and lines[0].load_imbalance == 2.5
    assert lines[0].made.commit == "b" * 40


@pytest.mark.parametrize("change", [{}, {"status": "M router.py"}, {"log": ""}])
def test_code_that_trains_must_be_committed(change, monkeypatch):
    git = {"log": "c" * 40, "status": "", **change}
    monkeypatch.setattr(runner, "run_git", lambda command, *_: git[command])
    if not change:
        assert DESCRIBE_CODE() == "c" * 40
        return
    with pytest.raises(ValueError, match="not committed: " + git["status"]):
        DESCRIBE_CODE()


@pytest.mark.integration
def test_a_contest_from_end_to_end(rules, tmp_path, capsys, monkeypatch):
    """Train four runs, verify them, train two again to the same bits, enter a formula."""
    records = ["--track", rules, "--records", str(tmp_path / "records")]
    assert main([*records, "run", "--parallel", "2"], Stop()) == 0
    assert main([*records, "verify", "--rerun", "2", "--parallel", "2"], Stop()) == 0
    output = capsys.readouterr().out
    lines = read_lines(load_protocol(rules), tmp_path / "records/main.jsonl")
    assert len(lines) == 4 and not list((tmp_path / "runs").rglob("checkpoints"))
    again = re.findall(r": ([\d.]+), recorded ([\d.]+) with", output)
    assert len(again) == 2 and all(float(first) == float(then) for first, then in again)
    mine = ["enter", "mine", "--spec", "tanh, post=l2 over topk", "--balance", "loss"]
    assert main([*records, *mine, "--settings", "2", "--rung", "main"], Stop()) == 0
    assert "2 of 2" in capsys.readouterr().out
    assert main([*records, *mine[:2], "--spec", "tanh", *mine[4:], "--rung", "main"], Stop()) == 2
    assert "take another name" in capsys.readouterr().err
    (file,) = (tmp_path / "runs").rglob("main-mine.jsonl")
    recorded = [json.loads(line)["arm"] for line in file.read_text().splitlines()]
    assert recorded == ["mine", "mine"]  # the reference is there


# ---- pages and closed editions
def test_the_page_has_the_records_tables(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    shutil.copy(table.PAGE, page)
    monkeypatch.setattr(table, "PAGE", page)
    assert main(["table"], Stop()) == 0
    assert page.read_text() == (FOLDER / "README.md").read_text()
    assert not list(tmp_path.glob("*.svg"))
    losses = {
        "softmax-renorm-quantile": 1.3,
        "dense": 1.35,
        "tanh-quantile": 1.28,
        "kern-quantile": 1.31,
        "softmax-quantile": 1.2,
    }
    # Settings at which kern has quantile balancing; softmax has three of them, too few to be drawn.
    for (arm, loss), setting in list(product(losses.items(), (1, 3, 5, 7)))[:-1]:
        append_line(tmp_path / "main.jsonl", make_line(arm, setting, loss + setting / 100))
    for (arm, loss), setting in product(
        (("softmax-renorm-quantile", 1.5), ("kern-quantile", 1.59)), (1, 3)
    ):
        append_line(tmp_path / "draft.jsonl", make_line(arm, setting, loss))
    shutil.copy(RECORDS / "counting.json", tmp_path)
    draw = mock.Mock(return_value=Figure())
    monkeypatch.setattr(plots, "draw_differences", draw)
    assert main(["--records", str(tmp_path), "table"], Stop()) == 0
    text = page.read_text()
    assert "/differences.svg)" in text
    assert (tmp_path / "differences.svg").exists()
    _, means, levels = draw.call_args.args
    assert {name: mean.mean for name, mean in means.items()} == pytest.approx(
        {"kern": 0.01, "kern-quantile": 0.01, "tanh-quantile": -0.02}
    )
    assert "|kern-quantile-draft|softmax-renorm-quantile|+0.0900 [+0.0900, +0.0900]|" in text
    slope = f"{(0.01 - 0.09) / math.log10(9.13e13 / 2.22e12):+.4f}"
    assert f"|kern-quantile-to-main|softmax-renorm-quantile|{slope} [{slope}, {slope}]|" in text
    assert levels == pytest.approx({"dense": 0.05, "counting": 1.3332 - 1.34})


def test_a_closed_edition_is_as_it_was():
    first = FOLDER / "records/edition-1"
    for row in (first / "SHA256SUMS").read_text().splitlines():
        digest, name = row.split()
        assert hashlib.sha256((first / name).read_bytes()).hexdigest() == digest
