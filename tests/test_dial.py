"""The dial of scripts.plan: configs for a budget, the ladder of config/ladder, bad input."""

import re
import tomllib

import pytest
from runs import REPO_ROOT

import configure
from model import count_parameters, flops_per_token
from scripts import plan

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
    if config.optim.weight_decay < 0.1:
        product = config.optim.lr * config.optim.weight_decay * config.train.max_steps
        assert product == pytest.approx(6e-4 * 0.1 * 50_000, rel=0.01)
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
    sizes = []
    for hours, gpus in ((1, 1), (24, 1), (24, 8)):
        out = call(plan.main, "--hours", hours, "--gpus", gpus)
        sizes.append(int(re.search(r"^n_embd = (\d+)", out, re.MULTILINE)[1]))
        planned = float(re.search(r"^  time +([\d.]+) h", out, re.MULTILINE)[1])
        assert planned == pytest.approx(hours, rel=0.15)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    "words, error",
    [
        ("--budget 1e11", "below the smallest rung, 2 layers of width 64"),
        ("--budget nan", "--budget nan: expected a number above 0"),
        ("--hours -1", "--hours -1: expected a number above 0"),
        ("--active 3x", "--active 3x: expected a number such as 350M"),
        ("--active 9K", "--active 9K: the smallest rung has"),
        ("--active 900B", "--active 900B: the largest has"),
        ("--budget 1e22 --gpus 1", "need .* GiB on each of 1 GPUs, and one has 80 GiB; set --gpus"),
        ("--budget 1e15 config/125m.toml", "choose all settings"),
        ("--write x.toml", "name a config file, or one of --budget"),
        ("--budget 1e15 --write config/125m.toml", "exists; name another file"),
    ],
)
def test_bad_input_is_refused(call, monkeypatch, words, error):
    monkeypatch.chdir(REPO_ROOT)
    assert re.search(error, call(plan.main, *words.split(), code=2))
