"""The dial of scripts.plan: configs for a budget, the ladder of config/ladder, bad input."""

import re
from itertools import pairwise

import pytest
from runs import REPO_ROOT

import configure
from runtime.distributed import GPUS
from runtime.memory import count_parameters, flops_per_token
from runtime.step_time import estimate_mfu
from scripts import dial, plan

LADDER = ("2x64", "3x96", "4x128", "6x192", "8x256", "12x768")


@pytest.mark.parametrize(
    "budget, gpus", [(1e15, 8), (3e16, 7), (1e17, 8), (2e17, 3), (1e18, 100), (2e20, 24), (1e22, 8)]
)
def test_config_of_a_budget_spends_it_and_loads(call, tmp_path, budget, gpus):
    file = tmp_path / "mine.toml"
    out = call(plan.main, "--budget", budget, "--gpus", gpus, "--write", file)
    config = configure.load(file, world_size=gpus)
    model, steps = config.model, config.train.max_steps
    tokens = steps * config.train.batch_size * model.block_size
    assert tokens * flops_per_token(model) == pytest.approx(budget, rel=0.02)
    active = count_parameters(model)[1]
    assert (
        150 * active > tokens > 19.9 * active
        and f": {tokens / active:,.0f} tokens per active" in out
    )
    assert f"; {tokens / active:,.0f} per active parameter\n" in out
    # rate · decay · steps of the paper's run, where decay is not at its limit
    decay = 6e-4 * 0.1 * 50_000 / (config.optim.lr * steps)
    assert config.optim.weight_decay == pytest.approx(min(0.1, decay), rel=0.01)
    assert config.optim.warmup_steps == min(steps // 5, 500)
    of_bytes = model.vocab_size == 257
    assert model.n_embd / model.n_layer == (32 if of_bytes else 64) or model.n_layer == 8
    assert (model.n_embd / model.n_head, config.eval.windows) == ((32, 512), (64, 2048))[
        not of_bytes
    ]
    power_law = 2048 * (budget / flops_per_token(model) / 2.05e6) ** 0.47 / model.block_size
    assert 0.7 / 2**0.5 < config.train.batch_size / power_law < 1.34 * 2**0.5
    of_rank = config.train.batch_size // gpus
    assert config.train.micro_batch_size >= min(8, of_rank)
    assert f"--train.parallel={config.train.parallel}" in out.splitlines()[-1]  # it fits


@pytest.mark.parametrize("name", LADDER)
def test_ladder_is_what_the_dial_writes(call, tmp_path, name):
    committed = REPO_ROOT / f"config/ladder/{name}.toml"
    model = configure.load(committed).model
    assert f"{model.n_layer}x{model.n_embd}" == name
    least = repr(20 * count_parameters(model)[1] * flops_per_token(model))
    call(plan.main, "--budget", least, "--gpus", 1, "--write", tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text() == committed.read_text()
    if name == "12x768":
        paper = configure.load(REPO_ROOT / "config/125m.toml").model
        for key in ("n_layer", "n_head", "n_embd", "n_expert", "top_k", "expert_hidden"):
            assert getattr(model, key) == getattr(paper, key)


def test_more_hours_and_gpus_give_more(call):
    out = call(plan.main, "--hours", 3, "--gpus", 3, "--mfu", 0.2)
    assert re.search(
        r"^  time +(2\.9|3\.0) h on 3 x H100, 9 GPU hours; MFU 0.20 \(given\)", out, re.M
    )
    sizes = []
    for hours, gpus in ((1, 1), (24, 1), (24, 8), (24, 64)):
        out = call(plan.main, "--hours", hours, "--gpus", gpus)
        sizes.append(int(re.search(r"^n_embd = (\d+)", out, re.MULTILINE)[1]))
        planned = float(re.search(r"^  time +([\d.]+) h", out, re.MULTILINE)[1])
        assert planned == pytest.approx(hours, rel=0.04)
    assert sizes == sorted(set(sizes))


def test_no_two_rungs_are_far_apart():
    needed = [dial.count_least_flops(model) for model in dial.list_models()]
    ratios = [after / before for before, after in pairwise(needed)]
    assert 1 < min(ratios) and max(ratios) < 7


@pytest.mark.parametrize(
    "sequences, gpus, largest, divided",
    [
        (128, 1, 32, (128, 32)),
        (128, 3, 32, (126, 21)),  # 42.7 a GPU: two passes
        (128, 5, 32, (130, 26)),
        (128, 100, 32, (100, 1)),
        (128, 90, 32, (90, 1)),
        (128, 80, 32, (160, 2)),
        (128, 128, 32, (128, 1)),
        (512, 8, 8, (512, 8)),
        (1, 1, 32, (1, 1)),
    ],
)
def test_every_gpu_takes_equal_passes(sequences, gpus, largest, divided):
    assert dial.divide_batch(sequences, gpus, largest) == divided


def test_memory_chooses_passes_before_it_recomputes_activations(call, tmp_path):
    """The written config fits by the plan's own table, which names its settings last."""
    settings = []
    for memory in (80, 30, 26, 24):
        file = tmp_path / f"{memory}.toml"
        words = ["--budget", 1e19, "--gpus", 1, "--memory", memory, "--write", file]
        last = call(plan.main, *words).splitlines()[-1]
        train = configure.load(file).train
        settings.append((train.micro_batch_size, train.activation_checkpointing))
        assert ("checkpointing=true" in last) == train.activation_checkpointing
        assert max(map(len, file.read_text().splitlines())) <= 80
    assert settings == [(32, False), (16, False), (8, False), (32, True)]


def test_an_estimated_mfu_knows_the_passes_of_a_step(write, monkeypatch):
    """12 bytes of each weight for every pass after the first, at 0.9 of 3.35 TB/s."""
    gpu = GPUS["H100"]
    config = configure.load(write(), world_size=4)
    few = configure.load(write(), ["--train.micro_batch_size=4"], world_size=4)
    tokens = 256 * 512 / 4
    seconds = []
    for each in (config, few):
        mfu = estimate_mfu(each, gpu, 4)
        seconds.append(tokens * flops_per_token(each.model) / gpu.peak / mfu)
    bytes_of_a_pass = 12 * count_parameters(config.model)[0]
    longer = 1.08 * 14 * bytes_of_a_pass / (0.9 * gpu.bandwidth)  # 16 passes instead of 2
    assert seconds[1] - seconds[0] == pytest.approx(longer, rel=1e-3)
    once = configure.load(write(), ["--train.micro_batch_size=64"], world_size=4)
    mfu = estimate_mfu(once, gpu, 4)
    monkeypatch.setattr("runtime.step_time.PASS_BYTES", 0)
    assert estimate_mfu(once, gpu, 4) == mfu


def test_a_model_that_is_too_large_names_its_memory_and_more_gpus(call):
    """On one GPU 16 bytes for each parameter, and activations of one sequence."""
    model = dial.make_model(24, 1536, dial.OF_TOKENS)
    words = ["--budget", 1.01 * dial.count_least_flops(model), "--memory", 24, "--gpus", 1]
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
        ("--hours 1e-9", r"1e-09: it is below the smallest rung, 2 layers .* \S+ hours; raise it"),
        ("--hours 1e4 --gpus 64", r"it is beyond the largest rung, .* up to \S+ hours; lower it"),
        ("--hours 1e30 --gpus 64", r"it is beyond the largest rung, .* up to \S+ hours; lower it"),
        ("--budget 1e19 --gpus 4096", "a step of this budget has 128 sequences .* --gpus 128 or"),
        ("--budget nan", "--budget nan: expected a number above 0"),
        ("--hours -1", "--hours -1: expected a number above 0"),
        ("--budget 1e15 config/125m.toml", "choose all settings"),
        ("--write x.toml", "name a config file, --budget or --hours"),
        ("--budget 1e15 --write config/125m.toml", "exists; name another file"),
    ],
)
def test_bad_input_is_refused(call, monkeypatch, words, error):
    """A limit that an error names is accepted."""
    monkeypatch.chdir(REPO_ROOT)
    said = call(plan.main, *words.split(), code=2)
    assert re.search(error, said)
    for limit in re.findall(r"(\S+) (?:FLOPs|hours); (?:raise|lower) it to that", said):
        call(plan.main, words.split()[0], limit, "--gpus", 64 if "lower" in said else 8)
