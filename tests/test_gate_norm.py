"""gate_norm.py: brute force, the norm of fresh models, what is refused."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from numerics import seeded
from test_router import GATES, SPARSE

import gate_norm
from configure import Config
from gate_norm import gate_scale, sample_square
from model import GPT
from router import ROUTERS, RouterSpec
from runtime.memory import parameter_shapes


def settings(**update):
    sizes = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 128,
        "block_size": 64,
        "vocab_size": 257,
        "expert_hidden": 8,
    }
    return Config().model.model_copy(update={**sizes, "init_std": 0.06, "gate_norm": 2.5, **update})


@cache
def draw_sorted(n_expert):
    """Standard normal logits of 40,000 tokens, each token's in descending order."""
    draws = np.random.default_rng(1).standard_normal((40_000, n_expert))
    return torch.from_numpy(draws).sort(descending=True).values


@pytest.mark.parametrize(
    ("n_expert", "top_k", "tau"), [(64, 8, 0.554), (8, 2, 0.1), (4, 4, 3.0), (16, 1, 9.0)]
)
@pytest.mark.parametrize("name", SPARSE)
def test_expectation_against_brute_force(name, n_expert, top_k, tau):
    s = tau * draw_sorted(n_expert)
    squares = GATES[name](s, s[:, :top_k]).square().sum(1)
    form = replace(ROUTERS[name], c=1.0, gamma=False, bias=False)
    expectation = sample_square(form, n_expert, top_k, tau)
    error = squares.std().item() / math.sqrt(len(s)) + gate_norm.PRECISION * expectation
    assert expectation == pytest.approx(squares.mean().item(), abs=4.5 * error, rel=1e-6)


MODERN = {
    "norm": "rmsnorm",
    "qk_norm": "head",
    "gated": True,
    "n_shared_expert": 1,
    "n_layer": 3,
    "router_init_ratio": 4.0,
    "router_groups": 4,
    "router_group_k": 1,
}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        *product(SPARSE, [{}]),
        *product(("softmax", "sigmoid", "kern"), [MODERN, {"n_hash_layer": 2}]),
    ],
)
def test_fresh_models_have_the_norm_on_their_first_batch(name, block):
    """Within the error of a few draws of weights, which are those without gate_norm though it may
    be sampled; router_init_ratio multiplies the draws of routers alone.
    """

    def build(seed, **update):
        torch.manual_seed(seeded(seed).initial_seed())
        return GPT(settings(**{"router": name} | block | update))

    gate_norm.sample_square.cache_clear()  # the first model samples
    models = [build(seed) for seed in range(4)]
    plain = build(0, gate_norm=0.0, router_init_ratio=1.0).state_dict()
    ratio = block.get("router_init_ratio", 1)
    for key, value in models[0].state_dict().items():
        factor = ratio if key.endswith("router.weight") else 1
        assert key.endswith(".c") or value.equal(factor * plain[key]), key
    idx = torch.randint(257, (4, 64), generator=seeded(0))
    with torch.no_grad():
        squares = torch.cat([model(idx, idx).stats.gate_square for model in models]).tolist()
    error = np.std(squares) / math.sqrt(len(squares))
    assert np.mean(squares) == pytest.approx(2.5**2, abs=4 * error, rel=0.005)
    assert error < 0.05 * 2.5**2


def test_factor_is_on_top_of_the_routers_own_and_nothing_by_default(monkeypatch):
    assert gate_scale(settings(router="kern", gate_norm=0.0, gate_scale=3.0)) == 3
    models = (GPT(settings(router=name, n_layer=1)) for name in ("kern", "kern-mc"))
    kern, monte_carlo = (model.blocks[0].mlp.router.c.item() for model in models)
    assert monte_carlo == pytest.approx(kern, rel=1e-6)
    spec = RouterSpec("tanh", post="l2 over topk")
    assert sample_square(spec, 12, 3, 0.5) == pytest.approx(1, abs=1e-5)
    monkeypatch.setattr(gate_norm, "sample_square", None)  # shapes alone need no estimate
    monkeypatch.setattr("router.monte_carlo_scale", None)
    shapes = parameter_shapes(settings(router="kern", gate_norm=0.0))
    for name in ("kern-after", "kern-mc"):
        assert parameter_shapes(settings(router=name)) == shapes
