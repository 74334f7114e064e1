"""The dial of scripts.plan: configs for a budget, the ladder of config/ladder, bad input."""

import re

import pytest
from runs import REPO_ROOT

import configure
from runtime.memory import count_parameters, flops_per_token
from scripts import dial, plan

LADDER = ("2x64", "3x96", "4x128", "6x192", "8x256", "12x768")


@pytest.mark.parametrize("budget", [1e15, 1e17, 2e17, 1e18, 2e20, 1e22])
def test_config_of_a_budget_spends_it_and_loads(call, tmp_path, budget):
    file = tmp_path / "mine.toml"
    out = call(plan.main, "--budget", budget, "--gpus", 8, "--write", file)
    config = configure.load(file, world_size=8)
    model, steps = config.model, config.train.max_steps
    tokens = steps * config.train.batch_size * model.block_size
    assert tokens * flops_per_token(model) == pytest.approx(budget, rel=0.02)
    active = count_parameters(model)[1]
    assert tokens > 19.9 * active and f": {tokens / active:,.0f} tokens per active" in out
    assert f"; {tokens / active:,.0f} per active parameter\n" in out
    # rate · decay · steps of the paper's run, where decay is not at its limit
    decay = 6e-4 * 0.1 * 50_000 / (config.optim.lr * steps)
    assert config.optim.weight_decay == pytest.approx(min(0.1, decay), rel=0.01)
    assert config.optim.warmup_steps == min(steps // 5, 500)
    if model.n_embd > 256:
        assert model.n_embd == 64 * model.n_layer or model.n_layer == 8
        assert (model.n_embd / model.n_head, config.eval.windows) == (64, 2048)
    assert f"--train.parallel={config.train.parallel}" in out.splitlines()[-1]  # it fits


@pytest.mark.parametrize("name", LADDER)
def test_ladder_is_what_the_dial_writes(call, tmp_path, name):
    committed = REPO_ROOT / f"config/ladder/{name}.toml"
    model = configure.load(committed).model
    assert f"{model.n_layer}x{model.n_embd}" == name
    active = count_parameters(model)[1]
    call(plan.main, "--active", active, "--gpus", 1, "--write", tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text() == committed.read_text()
    if name == "12x768":
        paper = configure.load(REPO_ROOT / "config/125m.toml").model
        for key in ("n_layer", "n_head", "n_embd", "n_expert", "top_k", "expert_hidden"):
            assert getattr(model, key) == getattr(paper, key)


def test_more_hours_and_gpus_give_more(call):
    out = call(plan.main, "--hours", 3, "--gpus", 3, "--mfu", 0.2)
    assert re.search(r"^  time +(2\.9|3\.0) h on 3 x H100 at an MFU of 0.20 \(given\)", out, re.M)
    (rows,) = re.findall(r"^batch_size = (\d+)", out, re.M)
    power = 2 ** (int(rows).bit_length() - 1)
    assert int(rows) == -(-power // 3) * 3  # the next multiple of 3
    sizes = []
    for hours, gpus in ((1, 1), (24, 1), (24, 8)):
        out = call(plan.main, "--hours", hours, "--gpus", gpus)
        sizes.append(int(re.search(r"^n_embd = (\d+)", out, re.MULTILINE)[1]))
        planned = float(re.search(r"^  time +([\d.]+) h", out, re.MULTILINE)[1])
        assert planned == pytest.approx(hours, rel=0.15)
    assert sizes == sorted(set(sizes))


def test_a_number_of_parameters_chooses_the_nearest_rung_by_ratio(call):
    sizes = [count_parameters(dial.make_model(*shape))[1] for shape in dial.SHAPES]
    middle = (sizes[0] * sizes[1]) ** 0.5
    cases = {0.99 * middle: 2, 1.01 * middle: 3, sizes[0]: 2, sizes[-1] * 1.4: 64}
    for number, layers in cases.items():
        for text in (f"{number / 1e3:.3f}k", f"{number / 1e9:.9f}B"):
            assert f"\nn_layer = {layers} " in call(plan.main, "--active", text, "--gpus", layers)
    for number in (0.99 * sizes[0], 1.6 * sizes[-1]):
        said = call(plan.main, "--active", number, code=2)
        assert f"rungs have {sizes[0]:,} to {sizes[-1]:,}" in said


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
        ("--budget 1e11", r"1e\+11: it is below the smallest rung, 2 layers of width 64, which"),
        ("--budget 1e23", "beyond the largest rung, 64 layers of width 4096, which takes up to"),
        ("--budget 1e19 --gpus 4096", "a step of this budget has 128 sequences .* --gpus 128 or"),
        ("--budget nan", "--budget nan: expected a number above 0"),
        ("--hours -1", "--hours -1: expected a number above 0"),
        ("--active 3x", "--active 3x: expected a number such as 350M"),
        ("--budget 1e15 config/125m.toml", "choose all settings"),
        ("--write x.toml", "name a config file, or one of --budget"),
        ("--budget 1e15 --write config/125m.toml", "exists; name another file"),
    ],
)
def test_bad_input_is_refused(call, monkeypatch, words, error):
    """A limit that an error names is accepted."""
    monkeypatch.chdir(REPO_ROOT)
    said = call(plan.main, *words.split(), code=2)
    assert re.search(error, said)
    for limit in re.findall(r"(\S+) FLOPs; (?:raise|lower) it to that", said):
        call(plan.main, "--budget", limit, "--gpus", 64 if "lower" in said else 8)
