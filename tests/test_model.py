"""model.py and attention.py: counts, caches, initial weights, dropout.

test_combinations.py compares training to a reference, test_hf_export.py and test_hf_open_moe.py
models to transformers' GPT-2, OLMoE, Qwen3-MoE and Mixtral.
"""

import math

import pytest
import torch
from numerics import assert_near, seeded, tolerance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import attention
from configure import Config
from model import GPT
from router import ROUTERS
from runtime.memory import count_parameters, flops_per_token, parameter_shapes

B, T, V = 3, 12, 40
SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": V}
SIZES |= {"n_expert": 8, "top_k": 2, "expert_hidden": 12}
MODERN = {
    "norm": "rmsnorm",
    "norm_eps": 1e-3,
    "activation": "silu",
    "gated": True,
    "pos": "rope",
    "rope_base": 300.0,
}
MODERN |= {"tie_embeddings": False, "n_kv_head": 2}


def settings(**update):
    return Config().model.model_copy(update={**SIZES, **update})


def build(seed=0, **update):
    torch.manual_seed(seeded(seed).initial_seed())
    return GPT(settings(**update))


def build_random(**update):
    """A GPT in fp64 with weights that show where each applies."""
    model = build(**update).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.2)
                + (p.dim() == 1 and not name.endswith("bias"))
            )
    return model


def tokens(seed=0, shape=(B, T)):
    return torch.randint(V, shape, generator=seeded(seed))


def assert_same(actual, wanted):
    """Roundings: of some 8 operators of each of 3 layers, forward and backward."""
    assert_near(actual, wanted, tolerance(torch.float32, B * T, roundings=16))


def test_heads_share_keys_or_their_copies(monkeypatch):
    q, k, v = (torch.randn(2, heads, 5, 4, generator=seeded(heads)) for heads in (6, 3, 3))
    shared = attention.attend(q, k, v, None)
    monkeypatch.setattr(attention, "can_share_keys", lambda q, mask: False)
    assert_same(attention.attend(q, k, v, None), shared)


# counts, caches

VARIANTS = [
    MODERN,
    MODERN | {"qk_norm": "head", "n_shared_expert": 2},
    MODERN
    | {"qk_norm": "all", "norm": "layernorm", "gated": False, "bias": True, "n_shared_expert": 1},
    MODERN
    | {
        "norm": "layernorm",
        "gated": False,
        "n_kv_head": 0,
        "pos": "learned",
        "tie_embeddings": True,
    },
    MODERN | {"n_hash_layer": 3, "top_k": 3},
]
variants = pytest.mark.parametrize("update", VARIANTS)


@variants
@pytest.mark.parametrize("router", ["kern", "softmax"])
def test_active_parameters_are_equal(update, router):
    """A dense model has as many as an MoE but for router and norms' biases; counts are those of the
    built model.
    """
    counts = {}
    for name in (router, "dense"):
        config = settings(router=name, **update)
        shapes = {key: tuple(p.shape) for key, p in GPT(config).named_parameters()}
        assert parameter_shapes(config) == shapes
        counts[name] = {key: math.prod(shape) for key, shape in shapes.items()}
    sizes, plain = counts[router], counts["dense"]
    total = sum(plain.values())
    idle = sum(n for key, n in sizes.items() if ".experts." in key) * (8 - config.top_k) // 8
    active = sum(sizes.values()) - idle
    assert count_parameters(config) == (total, total)
    assert count_parameters(settings(router=router, **update)) == (active + idle, active)
    routers = sum(n for key, n in sizes.items() if ".router." in key)
    biases = sum(n for key, n in plain.items() if ".mlp." in key and key.endswith("bias"))
    assert total == active - routers + biases


@variants
@pytest.mark.parametrize("router", ["dense", "kern"])
def test_flops_equal_the_counters(update, router):
    # it multiplies only the chosen rows
    model = GPT(settings(router=router, backend="reference", **update))
    idx = tokens()
    # counts all T x T
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(idx, idx).loss.backward()
    assert counter.get_total_flops() == B * T * flops_per_token(model.config)


def test_same_seed_gives_the_same_weights_whatever_the_router():
    first = build(router="softmax").state_dict()
    for router in ROUTERS.keys() - {"dense"}:
        weights = build(router=router).state_dict()
        own = {name.rsplit(".", 1)[1] for name in weights.keys() ^ first.keys()}
        assert own <= {"bias", "gamma"}
        for name in weights.keys() & first.keys():
            assert weights[name].equal(first[name]) or name.endswith("router.c"), name


def test_a_parameter_that_would_lose_its_value_is_refused():
    """Models are built without data, so a constructor's values are gone."""
    model = build()
    model.blocks[1].mlp.router.temperature = torch.nn.Parameter(torch.full((1,), 0.07))
    with pytest.raises(ValueError, match="no initial value of blocks.1.mlp.router.temperature$"):
        model.init_weights()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_is_computed_in_float32(dtype):
    x = torch.randn(2, 3, 400, 8, generator=seeded()).to(dtype)
    assert torch.equal(attention.rotate(x, 10000.0), attention.rotate(x.float(), 10000.0).to(dtype))


@pytest.mark.parametrize("router", ["dense", "softmax"])
def test_dropout_drops_its_share_of_each_branch(router):
    model = build(router=router, n_layer=1, n_embd=64, block_size=32, dropout=0.25)
    (block,) = model.blocks
    x, idx = torch.randn(8, 32, 64), torch.zeros(8, 32, dtype=torch.int64)
    with torch.no_grad():
        for branch in (block.attn, lambda x: block(x, None, idx)[1]):
            for share in (0.25, 0):
                model.train(share > 0)
                assert ((branch(x) == 0).float().mean() - share).abs() < 0.03
