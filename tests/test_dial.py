"""The dial of scripts.plan: configs for a budget, the ladder of config/ladder, bad input."""

import re
from itertools import pairwise

import pytest
from runs import REPO_ROOT

import configure
from configure import Config
from configure.schema import replace
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
    model, train, optim = config.model, config.train, config.optim
    steps = train.max_steps
    tokens = steps * train.batch_size * model.block_size
    flops = flops_per_token(model)
    active = count_parameters(model)[1]
    assert tokens * flops == pytest.approx(budget, rel=0.02)
    assert 19.9 < tokens / active < 150
    assert f": {tokens / active:,.0f} tokens per active" in out
    assert f"; {tokens / active:,.0f} per active parameter\n" in out
    # rate · decay · steps of the paper's run, where decay is not at its limit
    decay = min(0.1, 6e-4 * 0.1 * 50_000 / (optim.lr * steps))
    assert optim.weight_decay == pytest.approx(decay, rel=0.01)
    power_law = 2048 * (budget / flops / 2.05e6) ** 0.47 / model.block_size
    assert 0.7 / 2**0.5 < train.batch_size / power_law < 1.34 * 2**0.5
    assert train.micro_batch_size >= min(8, train.batch_size // gpus)
    assert f"--train.parallel={train.parallel}" in out.splitlines()[-1]  # it fits


@pytest.mark.parametrize("name", LADDER)
def test_ladder_is_what_the_dial_writes(call, tmp_path, name):
    committed = REPO_ROOT / f"config/ladder/{name}.toml"
    model = configure.load(committed).model
    assert f"{model.n_layer}x{model.n_embd}" == name
    least = 20 * count_parameters(model)[1] * flops_per_token(model)
    call(plan.main, f"--budget={least!r}", "--gpus=1", "--write", tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text() == committed.read_text()


def test_the_ladders_largest_model_has_the_papers_shape():
    """Of 125M active parameters, but for its router and positions."""
    ladder = configure.load(REPO_ROOT / "config/ladder/12x768.toml").model
    other = {"router": "kern", "pos": "learned", "init_std": 0.02}
    assert ladder.model_copy(update=other) == configure.Config().model


def test_more_hours_and_gpus_give_more(call):
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
        (128, 100, 32, (100, 1)),
        (128, 80, 32, (160, 2)),
        (128, 128, 32, (128, 1)),
        (512, 8, 8, (512, 8)),
        (1, 1, 32, (1, 1)),
    ],
)
def test_every_gpu_takes_equal_passes(sequences, gpus, largest, divided):
    assert dial.divide_batch(sequences, gpus, largest) == divided


@pytest.mark.parametrize(
    "memory, micro_batch, recomputes",
    [(80, 32, False), (30, 16, False), (26, 8, False), (24, 32, True)],
)
def test_memory_chooses_passes_before_it_recomputes_activations(
    call, tmp_path, memory, micro_batch, recomputes
):
    """The written config fits by the plan's own table, which names its settings last."""
    file = tmp_path / "mine.toml"
    words = ["--budget=1e19", "--gpus=1", "--memory", memory, "--write", file]
    last = call(plan.main, *words).splitlines()[-1]
    train = configure.load(file).train
    assert (train.micro_batch_size, train.activation_checkpointing) == (micro_batch, recomputes)
    assert ("checkpointing=true" in last) == recomputes


def test_an_estimated_mfu_knows_the_passes_of_a_step():
    """12 bytes of each weight for every pass after the first, at 0.9 of 3.35 TB/s."""
    gpu = GPUS["H100"]
    seconds = []
    for micro_batch in (64, 128, 4):  # on four ranks 1, 1 and 16 passes
        config = replace(Config(), "train", micro_batch_size=micro_batch)
        mfu = estimate_mfu(config, gpu, n_gpu=4)
        seconds.append(256 / 4 * 512 * flops_per_token(config.model) / gpu.peak / mfu)
    longer = 1.08 * 15 * 12 * count_parameters(config.model)[0] / (0.9 * gpu.bandwidth)
    assert seconds[1] == seconds[0]
    assert seconds[2] - seconds[0] == pytest.approx(longer, rel=1e-3)


def test_a_model_that_is_too_large_names_its_memory_and_more_gpus(call):
    """On one GPU 16 bytes for each parameter, and activations of one sequence."""
    model = dial.make_model(24, 1536, dial.OF_TOKENS)
    words = ["--gpus=1", f"--budget={1.01 * dial.count_least_flops(model)}"]
    said = call(plan.main, *words, "--memory=24", code=2)
    pattern = r"24 layers of width 1536 need (\S+) GiB on each of 1 GPUs, and one has 24 GiB; "
    needed = float(re.search(pattern + "set --gpus 2 or more", said)[1])
    assert 1 < needed / (16 * count_parameters(model)[0] / 2**30) < 1.2
    call(plan.main, *words, f"--memory={needed / 0.95}", code=2)  # of which 92% can be used
    call(plan.main, *words, f"--memory={needed / 0.90}")


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
