"""The dial of scripts.plan: configs for a budget, the ladder of config/ladder, bad input."""

import math
import re
import tomllib

import pytest
from runs import REPO_ROOT

import configure
from runtime.memory import count_parameters, flops_per_token
from scripts import dial, plan

LADDER = ("2x64", "3x96", "4x128", "6x192", "8x256", "12x768")


@pytest.mark.parametrize("budget", [1e15, 1e16, 1e17, 1e18, 1e19, 2e20, 1e21, 1e22])
def test_config_of_a_budget_spends_it_and_loads(call, tmp_path, budget):
    file = tmp_path / "mine.toml"
    out = call(plan.main, "--budget", budget, "--gpus", 8, "--write", file)
    config = configure.load(file, world_size=8)
    tokens = config.train.max_steps * config.train.batch_size * config.model.block_size
    flops = tokens * flops_per_token(config.model)
    assert flops == pytest.approx(budget, rel=0.02)
    active = count_parameters(config.model)[1]
    assert tokens > 19.9 * active
    # rate · decay · steps of the paper's run, where decay is not at its limit
    decay = 6e-4 * 0.1 * 50_000 / (config.optim.lr * config.train.max_steps)
    assert config.optim.weight_decay == pytest.approx(min(0.1, decay), rel=0.01)
    assert config.optim.warmup_steps == min(config.train.max_steps // 5, 500)
    assert config.train.batch_size % (8 * config.train.micro_batch_size) == 0
    if config.model.n_embd >= 512:
        assert config.model.n_embd == 64 * config.model.n_layer or config.model.n_layer == 8
        assert (config.model.n_embd / config.model.n_head, config.eval.windows) == (64, 2048)
    assert re.search(r"^--train\.parallel=", out, re.MULTILINE)  # a memory plan fits


@pytest.mark.parametrize("name", LADDER)
def test_ladder_is_what_the_dial_writes(call, tmp_path, name):
    committed = REPO_ROOT / f"config/ladder/{name}.toml"
    model = configure.load(committed).model
    assert f"{model.n_layer}x{model.n_embd}" == name
    active = count_parameters(model)[1]
    call(plan.main, "--active", active, "--gpus", 1, "--write", tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text() == committed.read_text()
    for line in committed.read_text().splitlines():
        if " = " in line and not line.startswith("#"):
            assert re.search(r"  # \S", line), line  # its rule


def test_last_rung_has_the_size_of_the_paper(call, tmp_path):
    settings = tomllib.loads((REPO_ROOT / "config/ladder/12x768.toml").read_text())
    ours = configure.load(REPO_ROOT / "config/ladder/12x768.toml").model
    paper = configure.load(REPO_ROOT / "config/125m.toml").model
    for key in ("n_layer", "n_head", "n_embd", "n_expert", "top_k", "expert_hidden"):
        assert getattr(ours, key) == getattr(paper, key)
    assert settings["model"]["vocab_size"] == paper.vocab_size


def test_more_hours_and_gpus_give_more(call):
    out = call(plan.main, "--hours", 3, "--gpus", 3, "--mfu", 0.2)
    assert re.search(r"^  time +(2\.9|3\.0) h on 3 x H100 at an MFU of 0.20 \(given\)", out, re.M)
    (rows,) = re.findall(r"^batch_size = (\d+)", out, re.M)
    power = 3 * math.ceil(2 ** round(math.log2(int(rows))) / 3)  # the next multiple of 3
    assert int(rows) == power
    sizes = []
    for hours, gpus in ((1, 1), (24, 1), (24, 8)):
        out = call(plan.main, "--hours", hours, "--gpus", gpus)
        sizes.append(int(re.search(r"^n_embd = (\d+)", out, re.MULTILINE)[1]))
        planned = float(re.search(r"^  time +([\d.]+) h", out, re.MULTILINE)[1])
        assert planned == pytest.approx(hours, rel=0.15)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("words", "pattern", "layers"),
    [
        ("--active 9K", r"--active 9K: the smallest rung has ([\d,]+)\n", "2"),
        ("--active 900B", r"--active 900B: the largest has ([\d,]+)\n", "64"),
        ("--budget 1e11", r"which needs (\S+) FLOPs; raise it to that\n", "2"),
    ],
)
def test_the_number_in_an_error_is_the_limit(call, words, pattern, layers):
    """It gives the smallest or largest shape; a little less, or half as much again, is refused."""
    option, _ = words.split()
    (limit,) = re.findall(pattern, call(plan.main, *words.split(), "--gpus=64", code=2))
    limit = float(limit.replace(",", ""))
    assert f"\nn_layer = {layers} " in call(plan.main, option, limit, "--gpus=64")
    beyond = (1.4 * limit, 1.6 * limit) if layers == "64" else (limit, 0.95 * limit)
    assert f"\nn_layer = {layers} " in call(plan.main, option, beyond[0], "--gpus=64")
    call(plan.main, option, beyond[1], "--gpus=64", code=2)


def test_a_number_of_parameters_chooses_the_nearest_rung_by_ratio(call):
    sizes = []
    for name in LADDER[:2]:
        sizes.append(
            count_parameters(configure.load(REPO_ROOT / f"config/ladder/{name}.toml").model)[1]
        )
    middle = (sizes[0] * sizes[1]) ** 0.5
    assert middle < 0.97 * sum(sizes) / 2
    for number, layers in ((0.99 * middle, 2), (1.01 * middle, 3)):
        out = call(plan.main, "--active", f"{number / 1e3:.3f}k", "--gpus", 1)
        assert f"\nn_layer = {layers} " in out
        assert out == call(plan.main, "--active", f"{number / 1e9:.9f}B", "--gpus", 1)


def test_a_model_that_is_too_large_names_its_memory_and_more_gpus(call):
    """On one GPU 16 bytes for each parameter, and activations of one sequence."""
    model = dial.make_model(24, 1536)
    words = ["--active", count_parameters(model)[1], "--memory", 24, "--gpus", 1]
    said = call(plan.main, *words, code=2)
    pattern = r"24 layers of width 1536 need (\S+) GiB on each of 1 GPUs, and one has 24 GiB; "
    (needed,) = re.findall(pattern + "set --gpus 2 or more", said)
    assert 1 < float(needed) / (16 * count_parameters(model)[0] / 2**30) < 1.2
    words[3] = float(needed) / 0.95  # of which 92% can be used
    call(plan.main, *words, code=2)
    words[3] = float(needed) / 0.90
    call(plan.main, *words)


@pytest.mark.parametrize(
    "words, error",
    [
        ("--budget 1e11", "1e\\+11: it is below the smallest rung, 2 layers of width 64, which"),
        ("--budget nan", "--budget nan: expected a number above 0"),
        ("--hours -1", "--hours -1: expected a number above 0"),
        ("--active 3x", "--active 3x: expected a number such as 350M"),
        ("--budget 1e15 config/125m.toml", "choose all settings"),
        ("--write x.toml", "name a config file, or one of --budget"),
        ("--budget 1e15 --write config/125m.toml", "exists; name another file"),
    ],
)
def test_bad_input_is_refused(call, monkeypatch, words, error):
    monkeypatch.chdir(REPO_ROOT)
    assert re.search(error, call(plan.main, *words.split(), code=2))
