"""The block's variants (norms, shared heads, gated and shared experts, dense layers) against models of transformers."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from numerics import assert_near, seeded, tolerance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import attention
from attention import KVCache
from configure import Config
from configure.conflicts import find_conflicts
from hf.names import to_hf
from model import GPT, MoE, count_parameters, flops_per_token

B, T, V = 3, 12, 40
SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": V}
SIZES |= {"n_expert": 8, "top_k": 2, "expert_hidden": 12}
MODERN = {"norm": "rmsnorm", "norm_eps": 1e-3, "activation": "silu", "gated": True, "pos": "rope", "rope_base": 300.0}
MODERN |= {"tie_embeddings": False, "n_kv_head": 2}


def settings(**update):
    return Config().model.model_copy(update={**SIZES, **MODERN, **update})


def build(**update):
    """A GPT in fp64 with weights that show where each applies."""
    torch.manual_seed(seeded().initial_seed())
    model = GPT(settings(**update)).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.2) + (p.dim() == 1 and not name.endswith("bias")))
    return model


def tokens(seed=0, shape=(B, T)):
    return torch.randint(V, shape, generator=seeded(seed))


def all_logits(model, idx, past=None):
    return model.logits(model.hidden(idx, past)[0])


# transformers


def shared_sizes(config, **more):
    return {
        "vocab_size": V,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": config.n_kv_head or 4,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": T,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "experts_implementation": "eager",
        "attn_implementation": "eager",
    } | more


def as_olmoe(config):
    sizes = shared_sizes(config, num_experts=8, intermediate_size=12, norm_topk_prob=False)
    return OlmoeForCausalLM(OlmoeConfig(**sizes, pad_token_id=None))


def as_qwen3(config):
    dense = config.n_dense_layer
    sizes = shared_sizes(config, num_experts=8, moe_intermediate_size=12, intermediate_size=24, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, mlp_only_layers=list(range(dense))))


def as_mixtral(config):
    sizes = shared_sizes(config, num_local_experts=8, intermediate_size=12, sliding_window=None)
    return MixtralForCausalLM(MixtralConfig(**sizes))


def as_glm4(config):
    shared, dense = config.n_shared_expert, config.n_dense_layer
    sizes = shared_sizes(config, n_routed_experts=8, moe_intermediate_size=12, intermediate_size=12 * (2 + shared))
    sizes |= {"n_shared_experts": shared, "first_k_dense_replace": dense, "norm_topk_prob": True, "use_qk_norm": True}
    sizes["rope_parameters"]["partial_rotary_factor"] = 1.0
    return Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, num_mtp_layers=0, partial_rotary_factor=1.0))


def their_name(name):
    """What transformers calls a weight of modeling_nanokern.py."""
    return name.replace(".mlp.router.", ".mlp.gate.").replace("gate.selection_bias", "gate.e_score_correction_bias")


def load_theirs(model, theirs):
    """Copy the weights, experts transposed."""
    state = {their_name(name): tensor for name, tensor in to_hf(model.state_dict()).items()}
    known = theirs.state_dict()
    state = {name: tensor.mT if ".experts." in name else tensor for name, tensor in state.items() if name in known}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not missing and not unexpected
    return theirs


PEERS = {
    "olmoe": (as_olmoe, {"router": "softmax", "qk_norm": "all"}),
    "olmoe, every head its own keys": (as_olmoe, {"router": "softmax", "qk_norm": "all", "n_kv_head": 0}),
    "qwen3": (as_qwen3, {"router": "softmax-renorm", "qk_norm": "head"}),
    "qwen3, a dense layer": (as_qwen3, {"router": "softmax-renorm", "qk_norm": "head", "n_dense_layer": 1}),
    "mixtral, one head of keys": (as_mixtral, {"router": "softmax-renorm", "n_kv_head": 1}),
    "glm4, shared experts": (
        as_glm4,
        {"router": "sigmoid-renorm", "qk_norm": "head", "n_dense_layer": 2, "n_shared_expert": 3},
    ),
}


@pytest.mark.numerics
@pytest.mark.parametrize("peer", PEERS)
def test_model_equals_that_of_transformers(peer):
    """Logits, loss and the gradients of all weights. Norms and routers compute in fp32 there: 8 a layer and pass."""
    make, update = PEERS[peer]
    model = build(**update)
    theirs = load_theirs(model, make(model.config).double().eval())
    idx = tokens(shape=(B, T + 1))[:, :T]
    near = tolerance(torch.float32, 32, roundings=24)
    assert_near(all_logits(model, idx), theirs(idx).logits, near)
    loss = F.cross_entropy(theirs(idx[:, :-1]).logits.flatten(0, 1), idx[:, 1:].flatten())
    out = model(idx[:, :-1], idx[:, 1:])
    assert_near(out.loss, loss, near)
    out.loss.backward()
    loss.backward()
    grads = to_hf({name: p.grad for name, p in model.named_parameters()})
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    ours = {their_name(name): grad.mT if ".experts." in name else grad for name, grad in grads.items()}
    assert ours.keys() == wanted.keys()
    for name, grad in wanted.items():  # which go through both passes
        assert_near(ours[name], grad, tolerance(torch.float32, 32, roundings=48), name)
    assert out.stats.loads.shape == (3 - model.config.n_dense_layer, B, 8)


# obvious code in fp64


def naive_attention(x, attn, config):
    """One position and one head at a time."""
    hs, kv = config.n_embd // config.n_head, config.n_kv_head or config.n_head
    q, k, v = (x @ attn.qkv.weight.T).split([config.n_embd, kv * hs, kv * hs], dim=-1)
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for h in range(config.n_head):
            own, shared = slice(h * hs, h * hs + hs), h // (config.n_head // kv)
            keys, values = (t[b, :, shared * hs : shared * hs + hs] for t in (k, v))
            for t in range(x.shape[1]):
                scores = torch.stack([q[b, t, own] @ keys[s] for s in range(t + 1)]) / hs**0.5
                out[b, t, own] = (scores.softmax(0)[:, None] * values[: t + 1]).sum(0)
    return out @ attn.proj.weight.T


@pytest.mark.numerics
@pytest.mark.parametrize("n_kv_head", [0, 1, 2, 4])
@pytest.mark.parametrize("copies", [False, True])
def test_shared_heads_equal_obvious_code(n_kv_head, copies, monkeypatch):
    if copies:
        monkeypatch.setattr(attention, "reads_groups", lambda q, mask: False)
    model = build(n_kv_head=n_kv_head, pos="learned", router="dense")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    attn = model.blocks[0].attn
    assert_near(attn(x), naive_attention(x, attn, model.config), tolerance(torch.float64, 32))


# counts, cache, names

VARIANTS = [
    {},
    {"qk_norm": "head", "n_shared_expert": 2, "n_dense_layer": 1},
    {"qk_norm": "all", "norm": "layernorm", "gated": False, "bias": True, "n_shared_expert": 1},
    {"qk_norm": "all", "n_kv_head": 0, "pos": "learned", "n_dense_layer": 2, "tie_embeddings": True},
    {"gated": False, "activation": "silu", "n_kv_head": 1, "qk_norm": "head", "norm": "layernorm"},
]
variants = pytest.mark.parametrize("update", VARIANTS)


@variants
@pytest.mark.parametrize("router", ["dense", "kern", "softmax"])
def test_active_parameters_are_equal(update, router):
    """A dense model has as many as an MoE but for router and norms' biases; counts are those of the built model."""
    model = GPT(settings(router=router, **update))
    total = sum(p.numel() for p in model.parameters())
    idle = sum(
        (8 - 2) * p[0].numel()
        for block in model.blocks
        if isinstance(block.mlp, MoE)
        for p in block.mlp.experts.parameters()
    )
    assert count_parameters(model.config) == (total, total - idle)
    dense = count_parameters(settings(router="dense", **update))
    routers = sum(p.numel() for name, p in model.named_parameters() if ".router." in name)
    biases = sum(
        p.numel()
        for name, p in GPT(settings(router="dense", **update)).named_parameters()
        if ".mlp." in name and name.endswith("bias")
    ) * (router != "dense")
    assert dense[0] == dense[1] == total - idle - routers + biases


@variants
@pytest.mark.parametrize("router", ["dense", "kern"])
def test_flops_equal_the_counters(update, router):
    model = GPT(settings(router=router, backend="reference", **update))  # it multiplies only the chosen rows
    idx = tokens()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # counts all T x T
        model(idx, idx).loss.backward()
    assert counter.get_total_flops() == B * T * flops_per_token(model.config)


@pytest.mark.numerics
@variants
def test_cache_equals_the_full_forward_pass(update):
    model = build(router="kern", top_k=8, **update).eval()  # all experts: no choice that rounding could change
    idx, start = tokens(), torch.tensor([0, 2, 5])
    past = KVCache(model.config, start, T, torch.float64)
    heads = update.get("n_kv_head", 2) or 4
    assert past.columns.shape == (3, 2, B, heads, T, 8)
    with torch.no_grad():
        steps = torch.cat([all_logits(model, part, past) for part in idx.split([6, 1, 1, 4], dim=1)], dim=1)
        chosen = past.select_rows(torch.tensor([2, 0]), T)
        assert chosen.columns.shape == (3, 2, 2, heads, T, 8)
        for row, first in enumerate(start.tolist()):
            whole = all_logits(model, idx[row : row + 1, first:])
            assert_near(steps[row : row + 1, first:], whole, tolerance(torch.float64, 64, roundings=32))


def test_defaults_are_the_papers():
    config = Config().model
    with torch.device("meta"):
        model = GPT(config)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    assert len(norms) == 2 * 12 + 1
    assert all(isinstance(norm, nn.LayerNorm) and norm.eps == 1e-5 and norm.bias is None for norm in norms)
    kinds = {name.split(".", 2)[-1] for name, _ in model.named_parameters() if name.startswith("blocks.")}
    assert kinds == {f"{name}.weight" for name in ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.router")} | {
        f"mlp.{name}" for name in ("router.bias", "router.gamma", "experts.w_in", "experts.w_out")
    }
    assert model.blocks[0].mlp.experts.w_in.shape == (64, 768, 384)


@pytest.mark.parametrize(
    "update, remedy",
    [
        ({"n_kv_head": 3}, {"n_kv_head": 1}),
        ({"n_kv_head": 64}, {"n_kv_head": 4}),
        ({"bias": True}, {"bias": False}),
        ({"n_dense_layer": 3}, {"n_dense_layer": 2}),
    ],
)
def test_what_means_nothing_is_refused(update, remedy):
    (error,) = find_conflicts(Config().model_copy(update={"model": settings(**update)}))
    ((key, value),) = remedy.items()
    assert f"set --model.{key}={str(value).lower()}" in error
    assert not find_conflicts(Config().model_copy(update={"model": settings(**update | remedy)}))


def test_dense_ignores_what_is_of_experts():
    model = settings(router="dense", n_dense_layer=7, backend="triton")
    assert not find_conflicts(Config().model_copy(update={"model": model}))
    assert count_parameters(model) == count_parameters(settings(router="dense"))
