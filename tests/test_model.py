"""model.py and attention.py: whole models against transformers' GPT-2, counts, caches, entropy.

test_hf_open_moe.py compares them to OLMoE, Qwen3-MoE and Mixtral, test_combinations.py training to
a reference.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_near, seeded, tolerance
from runs import all_logits
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

import attention
from attention import KVCache
from configure import Config
from hf.formats import FORMATS
from model import GPT
from router import EPS, ROUTERS
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


# transformers
def assert_equals_theirs(model, theirs, convert, near):
    """Logits, loss and the gradients of all our weights; `convert` gives a dict of tensors their
    names and layout.
    """
    known = theirs.state_dict()
    state = {name: tensor for name, tensor in convert(model.state_dict()).items() if name in known}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all(
        name == "lm_head.weight" or not known[name].any() for name in missing
    )
    idx = tokens(shape=(B, T + 1))[:, :T]
    assert_near(all_logits(model, idx), theirs(idx).logits, near)
    loss = F.cross_entropy(theirs(idx[:, :-1]).logits.flatten(0, 1), idx[:, 1:].flatten())
    out = model(idx[:, :-1], idx[:, 1:])
    assert_near(out.loss, loss, near)
    out.loss.backward()
    loss.backward()
    wanted = {
        name: p.grad
        for name, p in theirs.named_parameters()
        if p.grad is not None and name not in missing
    }
    ours = convert({name: p.grad for name, p in model.named_parameters()})
    assert ours.keys() == wanted.keys()
    for name, grad in wanted.items():  # which go through both passes
        assert_near(ours[name], grad, 2 * near, name)
    return out.stats


@pytest.mark.numerics
def test_dense_equals_gpt2_of_transformers():
    model = build_random(router="dense", bias=True)
    sizes = {
        "vocab_size": V,
        "n_positions": T,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 24,
    }
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, activation_function="gelu")).double().eval()
    convert = partial(FORMATS["gpt2"].from_own, model=model.config)
    assert_equals_theirs(model, theirs, convert, tolerance(torch.float64, 32, roundings=48))


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()])
def test_heads_share_keys_or_their_copies(mask, monkeypatch):
    q, k, v = (torch.randn(2, heads, 5, 4, generator=seeded(heads)) for heads in (6, 3, 3))
    shared = attention.attend(q, k, v, mask)
    monkeypatch.setattr(attention, "can_share_keys", lambda q, mask: False)
    assert_same(attention.attend(q, k, v, mask), shared)


# counts, caches

VARIANTS = [
    MODERN,
    MODERN | {"qk_norm": "head", "n_shared_expert": 2},
    MODERN
    | {"qk_norm": "all", "norm": "layernorm", "gated": False, "bias": True, "n_shared_expert": 1},
    MODERN
    | {
        "qk_norm": "all",
        "n_kv_head": 0,
        "pos": "learned",
        "tie_embeddings": True,
    },
    MODERN
    | {
        "gated": False,
        "activation": "silu",
        "n_kv_head": 1,
        "qk_norm": "head",
        "norm": "layernorm",
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
    sparse, dense = settings(router=router, **update), settings(router="dense", **update)
    sizes, plain = (
        {name: p.numel() for name, p in GPT(config).named_parameters()}
        for config in (sparse, dense)
    )
    active = {
        name: n * sparse.top_k // 8 if ".experts." in name else n for name, n in sizes.items()
    }
    for config in (sparse, dense):
        built = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
        assert parameter_shapes(config) == built
    assert count_parameters(sparse) == (sum(sizes.values()), sum(active.values()))
    assert count_parameters(dense) == (sum(plain.values()),) * 2
    routers = sum(n for name, n in active.items() if ".router." in name)
    biases = sum(n for name, n in plain.items() if ".mlp." in name and name.endswith("bias"))
    assert sum(plain.values()) == sum(active.values()) - routers + biases


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


@pytest.mark.numerics
@variants
def test_cache_equals_the_full_forward_pass(update):
    # all experts, or those of a table: no choice that rounding could change
    own = {"top_k": 8} | update
    model = build_random(router="kern", **own).eval()
    idx, start = tokens(), torch.tensor([0, 2, 5])
    past = KVCache(model.config, start, T, torch.float64)
    heads = update.get("n_kv_head", 2) or 4
    assert past.columns.shape == (3, 2, B, heads, T, 8)
    with torch.no_grad():
        steps = torch.cat(
            [all_logits(model, part, past) for part in idx.split([6, 1, 1, 4], dim=1)], dim=1
        )
        for row, first in enumerate(start.tolist()):
            whole = all_logits(model, idx[row : row + 1, first:])
            assert_near(
                steps[row : row + 1, first:], whole, tolerance(torch.float64, 64, roundings=32)
            )


def test_same_seed_gives_the_same_weights_whatever_the_router():
    first = build(router="softmax").state_dict()
    for router in ROUTERS.keys() - {"dense"}:
        weights = build(router=router).state_dict()
        assert {name.rsplit(".", 1)[1] for name in weights.keys() ^ first.keys()} <= {
            "bias",
            "gamma",
        }
        for name in weights.keys() & first.keys():
            assert torch.equal(weights[name], first[name]) or name.endswith("router.c"), name


# behaviour, for every router
@pytest.mark.numerics
@pytest.mark.parametrize("router", ROUTERS)
def test_output(router):
    model = build(router=router, tie_embeddings=router != "softmax")
    idx, targets, routings = tokens(0), tokens(1), []
    for block in model.blocks if router != "dense" else ():
        block.mlp.router.register_forward_hook(
            lambda module, args, routing: routings.append(routing)
        )
    out = model(idx, targets)
    first_pass = list(routings)
    assert out.logits is None
    logits = all_logits(model, idx)
    # cross-entropy alone
    assert_same(out.loss, F.cross_entropy(logits.view(-1, V), targets.view(-1)))
    assert out.losses.shape == (B,)
    assert_same(out.losses.mean(), out.loss)
    last = model(idx)
    assert last.loss is None
    assert_same(last.logits, logits[:, -1:])
    assert out.stats.z_loss.shape == (0 if router == "dense" else 3,) and out.stats.margins is None
    for layer, routing in enumerate(first_pass):
        positive = routing.scores.relu()
        # a token may have no positive score
        p = positive / (positive.sum(1, keepdim=True) + EPS)
        assert out.stats.zero_gates[layer] == (routing.weights == 0).float().mean()
        assert_same(out.stats.entropy[layer], torch.special.entr(p).sum(1).mean())
        assert_same(
            out.stats.gate_square[layer],
            torch.linalg.vector_norm(routing.weights, dim=1).square().mean(),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_is_computed_in_float32(dtype):
    x = torch.randn(2, 3, 400, 8, generator=seeded()).to(dtype)
    assert torch.equal(attention.rotate(x, 10000.0), attention.rotate(x.float(), 10000.0).to(dtype))


@pytest.mark.parametrize("router", ["dense", "softmax"])
def test_dropout_drops_its_share_of_each_branch(router):
    model = build(router=router, n_layer=1, n_embd=64, block_size=32, dropout=0.25)
    block, x, idx = model.blocks[0], torch.randn(8, 32, 64), torch.zeros(8, 32, dtype=torch.int64)
    torch.nn.init.zeros_(block.attn.proj.weight)
    with torch.no_grad():
        assert ((block(x, None, idx)[1] == 0).float().mean() - 0.25).abs() < 0.03
        torch.nn.init.normal_(block.attn.proj.weight)
        assert ((block.attn(x) == 0).float().mean() - 0.25).abs() < 0.03
        model.eval()
        assert (block.attn(x) != 0).all() and (block(x, None, idx)[1] != 0).float().mean() > 0.99
