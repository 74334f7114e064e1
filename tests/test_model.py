"""model.py: the dense model against transformers' GPT-2, parameter counts as printed in the paper, the MoE."""

import math

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_near, seeded, tolerance
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from attention import rotate
from configure import Config
from model import GPT
from router import EPS, ROUTERS

SPARSE = [name for name in ROUTERS if name != "dense"]
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 40}
SMALL |= {"n_expert": 8, "top_k": 2, "expert_hidden": 12}
B, T = 3, 12


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(seeded().initial_seed())


def assert_same(actual, wanted):
    """Roundings: of some 8 operators of each of 2 layers, forward and backward."""
    assert_near(actual, wanted, tolerance(torch.float32, B * T, roundings=16))


def settings(**update):
    return Config().model.model_copy(update={**SMALL, **update})


def build(seed=0, **update):
    torch.manual_seed(seeded(seed).initial_seed())
    return GPT(settings(**update))


def all_logits(model, idx):
    """Logits of all positions (B, T, V); the model itself returns those of the last."""
    kept = []
    hook = model.ln_f.register_forward_hook(lambda module, args, output: kept.append(output))
    model(idx, idx)
    hook.remove()
    return F.linear(kept[0], (model.lm_head or model.wte).weight)


def tokens(seed=0, shape=(B, T)):
    return torch.randint(SMALL["vocab_size"], shape, generator=seeded(seed))


# the dense model


@pytest.mark.numerics
@pytest.mark.parametrize("bias", [False, True])
def test_dense_equals_gpt2_of_transformers(bias):
    model = build(router="dense", n_embd=32, n_head=4, bias=bias)
    config = GPT2Config(
        vocab_size=40, n_positions=12, n_embd=32, n_layer=2, n_head=4, n_inner=24, activation_function="gelu"
    )
    gpt2 = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # initial LayerNorms of 1 and biases of 0 would hide where they apply
            p.add_(0.1 * torch.randn_like(p))
        for name, p in gpt2.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    theirs = gpt2.transformer
    pairs = [(theirs.wte, model.wte), (theirs.wpe, model.wpe), (theirs.ln_f, model.ln_f)]
    transposed = []  # its Conv1D keeps (in, out)
    for a, b in zip(theirs.h, model.blocks, strict=True):
        pairs += [(a.ln_1, b.ln_1), (a.ln_2, b.ln_2)]
        transposed += [(a.attn.c_attn, b.attn.qkv), (a.attn.c_proj, b.attn.proj)]
        transposed += [(a.mlp.c_fc, b.mlp.w_in), (a.mlp.c_proj, b.mlp.w_out)]
    with torch.no_grad():
        for a, b in pairs:
            a.weight.copy_(b.weight)
        for a, b in transposed:
            a.weight.copy_(b.weight.T)
        biases = [(a.bias, b.bias) for a, b in pairs[2:] + transposed] if bias else []
        for a, b in biases:
            a.copy_(b)
    idx = tokens(shape=(B, T + 1))[:, :T]
    wanted = gpt2(idx, labels=idx)  # it shifts the labels
    out = model(idx[:, :-1], idx[:, 1:])
    assert_same(all_logits(model, idx[:, :-1]), wanted.logits[:, :-1])
    assert_same(out.loss, wanted.loss)
    out.loss.backward()
    wanted.loss.backward()
    for a, b in pairs:
        assert_same(b.weight.grad, a.weight.grad)
    for a, b in transposed:
        assert_same(b.weight.grad, a.weight.grad.T)
    for a, b in biases:
        assert_same(b.grad, a.grad)
    assert len([name for name, _ in model.named_parameters() if name.endswith("bias")]) == len(biases) == 13 * bias


@pytest.mark.numerics
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_rotary_embedding_equals_transformers(base):
    x = torch.randn(2, 3, 10, 8)
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=3, max_position_embeddings=10,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(10)[None])
    wanted = apply_rotary_pos_emb(x, x, cos, sin)[0]
    assert_same(rotate(x, base), wanted)
    assert rotate(x.bfloat16(), base).dtype == torch.bfloat16


# initialisation


@pytest.mark.parametrize("bias", [False, True])
def test_initial_weights(bias):
    model = build(n_layer=8, n_embd=64, vocab_size=500, expert_hidden=64, bias=bias)
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    for name, std in stds.items():
        onto_residual = name.endswith(("attn.proj.weight", "experts.w_out"))
        assert std == pytest.approx(0.02 / math.sqrt(16) if onto_residual else 0.02, rel=0.1), name
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
    idx = tokens()
    assert model(idx, idx.roll(1)).loss.item() == pytest.approx(math.log(500), abs=0.1)


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_same_seed_gives_the_same_weights_whatever_the_router(pos):
    first = build(router="softmax", pos=pos).state_dict()
    for router in SPARSE:
        weights = build(router=router, pos=pos).state_dict()
        own = {name.rsplit(".", 1)[1] for name in weights.keys() ^ first.keys()}
        assert own <= {"bias", "gamma"}
        for name in weights.keys() & first.keys():
            assert torch.equal(weights[name], first[name]) or name.endswith("router.c"), name
    other = build(seed=1, router="softmax", pos=pos).state_dict()
    assert not torch.equal(first["wte.weight"], other["wte.weight"])


# behaviour, for every router


@pytest.mark.numerics
@pytest.mark.parametrize("router", ROUTERS)
def test_causality(router):
    model = build(router=router, top_k=8)  # all experts: no choice that rounding could change
    idx = tokens()
    before = all_logits(model, idx)
    for t in (1, 6, T - 1):
        changed = idx.clone()
        changed[:, t] = (idx[:, t] + 1) % SMALL["vocab_size"]
        after = all_logits(model, changed)
        assert_same(after[:, :t], before[:, :t])
        assert (after[:, t:] - before[:, t:]).abs().amax((0, 2)).min() > 1e-6


@pytest.mark.parametrize("router", ROUTERS)
def test_every_parameter_gets_a_gradient(router):
    model = build(router=router, n_expert=32)
    idx = tokens(shape=(1, 3))  # 3 tokens · 2 choices: most experts idle
    out = model(idx, idx)
    assert router == "dense" or (out.stats.loads == 0).any(-1).all()
    out.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        assert p.grad.any() or name.endswith("router.bias"), name


@pytest.mark.numerics
@pytest.mark.parametrize("router", ROUTERS)
def test_output(router):
    model = build(router=router, tie_embeddings=router != "softmax")
    idx, targets, routings = tokens(0), tokens(1), []
    for block in model.blocks if router != "dense" else ():
        block.mlp.router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    out = model(idx, targets)
    first_pass = list(routings)
    assert out.logits is None
    logits = all_logits(model, idx)
    assert_same(out.loss, F.cross_entropy(logits.view(-1, 40), targets.view(-1)))  # cross-entropy alone
    assert out.losses.shape == (B,)
    assert_same(out.losses.mean(), out.loss)
    last = model(idx)
    assert last.loss is None
    assert_same(last.logits, logits[:, -1:])
    loads, probability, *others = out.stats
    n_layer = 0 if router == "dense" else 2
    assert [s.shape for s in others] == [(n_layer,)] * 5
    assert loads.dtype == torch.int64
    if router != "dense":
        assert loads.shape == probability.shape == (2, B, 8)
        assert (loads.sum(-1) == T * 2).all()
        for layer, routing in enumerate(first_pass):
            positive = routing.scores.relu()
            p = positive / (positive.sum(1, keepdim=True) + EPS)  # a token may have no positive score
            assert_same(out.stats.entropy[layer], torch.special.entr(p).sum(1).mean())
            assert out.stats.zero_gates[layer] == (routing.weights == 0).float().mean()
            assert_same(out.stats.gate_square[layer], torch.linalg.vector_norm(routing.weights, dim=1).square().mean())
            assert_same(out.stats.gate_sum[layer], torch.stack([gates.sum() for gates in routing.weights]).mean())
            assert_same(probability[layer], torch.stack([rows.mean(0) for rows in p.chunk(B)]))
            for of_sequence, experts in zip(loads[layer], routing.experts.chunk(B), strict=True):
                assert torch.equal(of_sequence, experts.flatten().bincount(minlength=8))
        for loss in (probability[..., 0].sum(), out.stats.z_loss.sum()):
            assert torch.autograd.grad(loss, model.wte.weight, retain_graph=True)[0].any()


# the mixture of experts


def test_a_token_without_positive_scores_passes_unchanged():
    model = build(router="kern")
    block = model.blocks[0]
    x = torch.randn(B, T, 16)
    with torch.no_grad():
        block.mlp.router.bias.fill_(-100)
        y, stats = block(x)
        assert stats.zero_gates == 1
        assert torch.equal(y, x + block.attn(block.ln_1(x)))
        block.mlp.router.bias.zero_()
        y, stats = block(x)
        assert stats.zero_gates < 0.5
        assert not torch.equal(y, x + block.attn(block.ln_1(x)))


def test_too_many_tokens():
    with pytest.raises(ValueError, match="13 tokens are more than the model's block_size of 12"):
        build()(tokens(shape=(1, 13)))


@pytest.mark.parametrize("n_shared_expert", [0, 1])
def test_gradients_of_a_fork_are_those_of_a_cast(n_shared_expert, monkeypatch):
    model, idx, results = build(n_shared_expert=n_shared_expert), tokens(), []
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(idx, idx).loss
        loss.backward()
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
        monkeypatch.setattr("model.Fork.apply", lambda x, dtype: (x, x.to(dtype)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class CountCasts(TorchDispatchMode):
    """Counts casts of experts' weights, known by their shape and float32."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].dim() == 3 and len(args[0]) == SMALL["n_expert"] and args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


def test_passes_share_a_cast_of_the_experts():
    """Two passes under autocast, with one cast for both or one each: the same losses and gradients, bit for bit."""
    model, idx = build(n_shared_expert=1), tokens(shape=(2, B, T))

    def run(dtype=torch.bfloat16):
        model.zero_grad()
        with CountCasts() as casts:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                losses = [model(part, part).loss for part in idx]
            sum(losses).backward()
        return casts.count, [*losses, *(p.grad.clone() for p in model.parameters())]

    for dtype, number in ((torch.bfloat16, 2 * 2 * SMALL["n_layer"]), (torch.float32, 0)):
        count, apart = run(dtype)
        with model.cast_once(dtype):
            none, together = run(dtype)
        assert count == number and none == 0
        assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    with model.cast_once(torch.bfloat16):
        before = run()[1][0]
        with torch.no_grad():
            model.blocks[0].mlp.experts.w_in.mul_(2)
        assert torch.equal(run()[1][0], before)  # the copy is still the old one
    assert not torch.equal(run()[1][0], before)
