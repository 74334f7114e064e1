"""config/paper/: one file per experiment of the paper, and controls.

Expected numbers are from the project's digest of the paper (results.json, not part of this
repository): ids of experiments, parameters without the position table, printed settings.
"""

from itertools import product
from operator import attrgetter

import pytest
from fake_runs import CONFIG
from runs import REPO_ROOT

import configure
from runtime.distributed import GPUS
from runtime.memory import count_parameters
from scripts import plan

FILES = {file.stem: file for file in sorted((CONFIG / "paper").glob("*.toml"))}

FIVE = ["dense", "softmax", "sigmoid", "tanh", "kern"]
FOUR, TWO = FIVE[1:], ["softmax", "kern"]
BOOKS3, BOTH = ["books3"], ["arxiv", "books3"]
FINE = [(32, 4, 768), (64, 8, 384), (128, 16, 192), (256, 32, 96)]
SPARSE = [(n, 8, 384) for n in (32, 64, 128, 256)]
MAIN = [(64, 8, 384)]
# file, as an experiment's id ends: all combinations of routers, data sets, length, (experts,
# active, hidden)
PAPER = {
    "arxiv_512": (FIVE, ["arxiv"], 512, MAIN),
    "books3_512": (FIVE, BOOKS3, 512, MAIN),
    "books3_1024": (FIVE, BOOKS3, 1024, MAIN),
    "arxiv_1024": (FIVE, ["arxiv"], 1024, MAIN),
    "len2048": (FIVE, BOOKS3, 2048, MAIN),
    "large_model_350M": (FIVE, BOOKS3, 512, [(64, 8, 512)]),
    "large_model_1.3B": (FIVE, BOOKS3, 512, [(64, 8, 1024)]),
    "granularity": (TWO, BOTH, 512, FINE),
    "large_gra": (FOUR, BOOKS3, 512, FINE[-1:]),
    "sparsity": (TWO, BOTH, 512, SPARSE),
    "large_spa": (FOUR, BOOKS3, 512, SPARSE[-1:]),
    "downstream": (FIVE, ["fineweb-edu"], 1024, [(64, 8, 384), (64, 8, 512), (64, 8, 1024)]),
    "training_curve": (FIVE, BOOKS3, 512, MAIN),
    "kern_after": (["kern", "kern-after", "kern-mc"], BOOKS3, 512, MAIN),
    "kern_init": (["kern", "kern-mc"], BOOKS3, 512, MAIN),
    "relu_table": (FOUR[:3] + ["kern-norelu", "kern"], BOOKS3, 1024, [(64, 8, 384), (64, 64, 384)]),
    "seeds": (FIVE, BOOKS3, 512, MAIN),
}

DENSE = {768: 123_587_328, 1024: 353_551_360, 2048: 1_311_082_496}  # width: parameters
MIXTURE = {  # (width, experts, active, hidden): total and active, of a router with γ and without b
    (768, 32, 4, 768): (520_243_980, 123_882_252),
    (768, 64, 8, 384): (520_538_892, 124_177_164),
    (768, 128, 16, 192): (521_128_716, 124_766_988),
    (768, 256, 32, 96): (522_308_364, 125_946_636),
    (768, 32, 8, 384): (293_751_564, 123_882_252),
    (768, 128, 8, 384): (974_113_548, 124_766_988),
    (768, 256, 8, 384): (1_881_262_860, 125_946_636),
    (768, 64, 64, 384): (520_538_892, 520_538_892),
    (1024, 64, 8, 512): (1_764_410_392, 355_124_248),
    (2048, 64, 8, 1024): (6_951_372_824, 1_314_228_248),
}
LEARNING_RATE = {768: 6e-4, 1024: 3e-4, 2048: 2e-4, 2560: 1.6e-4}


# the 125M model of the paper; where it is silent, the 125M file of the DAPE repository
DEFAULTS = """
model.n_layer=12 model.n_head=12 model.n_embd=768 model.block_size=512 model.vocab_size=50304
model.router=kern model.n_expert=64 model.top_k=8 model.expert_hidden=384 model.n_shared_expert=0
model.n_hash_layer=0 model.activation=gelu model.gated=False model.norm=layernorm
model.norm_eps=1e-05 model.pos=learned model.bias=False model.tie_embeddings=True model.dropout=0.0
model.init_std=0.02 model.gate_scale=1.0 model.gate_norm=0.0 model.qk_norm=off
train.batch_size=256 train.max_steps=50000 train.balance_loss_coef=0.0
train.balance_loss_scope=global train.z_loss_coef=0.0 train.bias_update_rate=0.0
optim.name=adamw optim.lr=0.0006 optim.beta1=0.9 optim.beta2=0.95 optim.eps=1e-08
optim.weight_decay=0.1 optim.grad_clip=1.0 optim.schedule=cosine optim.warmup_steps=500
optim.min_lr_ratio=0.1 optim.router_lr_ratio=1.0 optim.expert_out_lr_ratio=1.0
data.document_mask=False eval.interval=1000 eval.windows=2048 run.seed=0
"""


def test_defaults_are_the_papers():
    config = configure.Config()
    for setting in DEFAULTS.split():
        key, _, value = setting.partition("=")
        assert str(attrgetter(key)(config)) == value, key


def runs(stem):
    return [
        configure.load(FILES[stem], point, world_size=8)
        for point in configure.sweep_points(FILES[stem])
    ]


def parameters(model):
    """(total, active) parameters by the digest's table."""
    table = model.block_size * model.n_embd
    if model.router == "dense":
        return (DENSE[model.n_embd] + table,) * 2
    shape = (model.n_embd, model.n_expert, model.top_k, model.expert_hidden)
    more_of_layer = model.n_expert if "kern" in model.router else -1
    return tuple(count + table + model.n_layer * more_of_layer for count in MIXTURE[shape])


@pytest.mark.parametrize("stem", FILES)
def test_runs_are_those_of_the_paper(stem):
    """And their hours those of docs/experiments.md."""
    expanded = []
    hours = 0.0
    for config in runs(stem):
        hours += plan.estimate_hours(config, 1, GPUS["H100"])
        model, train, optim = config.model, config.train, config.optim
        shape = (model.n_expert, model.top_k, model.expert_hidden)
        expanded.append((model.router, config.data.name, shape, config.run.seed, model.block_size))
        assert (train.max_steps, train.dtype) == (50_000, "auto")
        assert (optim.beta1, optim.beta2, optim.lr) == (0.9, 0.95, LEARNING_RATE[model.n_embd])
        assert model.dropout == 0 == 5000 % config.eval.interval
        if stem == "downstream":
            tokens = train.max_steps * train.batch_size * model.block_size
            assert tokens == pytest.approx(50e9, rel=0.05)
        else:
            assert train.batch_size == 256
        counts = count_parameters(model)
        if stem in PAPER:
            assert train.balance_loss_coef == train.z_loss_coef == train.bias_update_rate == 0
            assert counts == parameters(model), config.run.name
        elif stem == "large_model_2.7B":
            total = 2.6 if model.router == "dense" else 14.4
            assert round(counts[0] / 1e9, 1) == total and 2.64e9 < counts[1] < 2.66e9
    row = f"| `{stem}` | {len(expanded)} | {hours:.0f} |"
    assert row in (REPO_ROOT / "docs/experiments.md").read_text()
    if stem in PAPER:
        routers, sets, length, shapes = PAPER[stem]
        seeds = [0, 1, 2] if stem == "seeds" else [0]
        assert sorted(expanded) == sorted(product(routers, sets, shapes, seeds, [length]))


SIZES = {"125m": (12, 12, 768, 6e-4), "350m": (24, 16, 1024, 3e-4), "1b3": (24, 16, 2048, 2e-4)}


@pytest.mark.parametrize("name", SIZES)
def test_files_of_one_size_match_the_papers_table(name):
    """Layers, heads, width, learning rate; 1b3: configs/1-3B.yml of the DAPE repository."""
    config = configure.load(CONFIG / f"{name}.toml", world_size=8)
    model, train = config.model, config.train
    assert (model.n_layer, model.n_head, model.n_embd, config.optim.lr) == SIZES[name]
    # equal active parameters with the dense model
    assert model.expert_hidden * model.top_k == 4 * model.n_embd
    assert (train.batch_size, train.micro_batch_size) == (32 * 8, 32)


def test_controls():
    """Controls of routers have no balance, but for one whose balance is a bias.

    Controls of balance have a loss or none.
    """
    routers = ["softmax-renorm", "sqrtgate", "softmax-l2", "kern-nogamma", "kern"]
    rates = {(c.model.router, c.train.bias_update_rate) for c in runs("controls_routers")}
    assert {(router, 0) for router in routers} <= rates
    assert [pair for pair in rates if pair[1]] == [("sigmoid-renorm", 0.001)]
    coefs = {(c.model.router, c.train.balance_loss_coef) for c in runs("controls_balance")}
    assert {*product(["softmax", "kern"], [0, 0.1])} < coefs
    # the own norm of kern: test_theory.py
    assert {c.model.gate_norm for c in runs("controls_scale")} == {0.594}


@pytest.mark.integration
def test_no_two_runs_of_all_files_share_a_folder():
    studies = CONFIG.parent.glob("docs/studies/config/*.toml")
    names = []
    for file in [*FILES.values(), *CONFIG.glob("*.toml"), *studies]:
        for point in configure.sweep_points(file):
            name = configure.load(file, point).run.name
            assert len(name) <= 100
            assert name.startswith(f"{file.stem}-") or file.stem == "length_branches"
            names.append(name)
    assert len(names) == len(set(names))
