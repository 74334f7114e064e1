"""optim.transfer: sizes and rates against a table by hand, the gates' identity, coordinates."""

import math

import numpy as np
import pytest
import torch

from configure import Config
from configure.schema import Model, Optim
from gate_norm import own_gate_norm
from model import GPT
from runtime.distributed import Ranks
from runtime.optimizers import build_optimizer
from runtime.parallel import allocate_parameters
from runtime.state import build_model, initialize

STD = 0.06
OUT = STD / math.sqrt(2 * 2)  # of residual projections in a base of two layers
DECAY = 0.5
SHAPE = {"block_size": 64, "vocab_size": 97, "n_expert": 6, "top_k": 4}


def table(m, h, d, gates):
    """{ends of names: (std, or value of a vector; rate under AdamW; rate under Muon)} for m times
    the base's width, h times its hidden width and d times its depth, where gates have a norm of
    √K over `gates` in the base.
    """
    of_input = (STD / m**0.5, 1 / m, 1 / m**0.5)
    of_hidden = (OUT / h**0.5 / d, 1 / h / d, 1 / h**0.5 / d)
    return {
        ("wte.weight", "wpe.weight", "lm_head.weight"): (STD, 1, 1),
        ("ln_f.weight",): (1 / m, 1 / m, 1 / m),
        ("ln_f.bias",): (0, 1 / m, 1 / m),
        ("ln_1.weight", "ln_2.weight"): (1, 1, 1),
        ("ln_1.bias", "ln_2.bias", "qkv.bias", "mlp.w_in.bias"): (0, 1, 1),
        ("attn.qkv.weight", "mlp.w_in.weight", "shared.w_in.weight", "experts.w_in"): of_input,
        ("router.weight",): (STD / m**0.5, 0.25 / m, 0.25 / m),  # router_lr_ratio
        ("attn.proj.weight",): (OUT / m**0.5 / d, 1 / m / d, 1 / m**0.5 / d),
        ("attn.proj.bias", "mlp.w_out.bias"): (0, 1 / d, 1 / d),
        ("mlp.w_out.weight", "shared.w_out.weight"): of_hidden,
        ("experts.w_out",): tuple(gates * value for value in of_hidden),
    }


ONE_RANK = Ranks(0, 1, torch.device("cpu"))


def build(model: Model, optim: Optim) -> GPT:
    config = Config(model=model, optim=optim)
    gpt = build_model(config, None)
    allocate_parameters(gpt, ONE_RANK.device)
    initialize(config, None, ONE_RANK, gpt)
    return gpt


@pytest.mark.parametrize(
    ("name", "m", "h", "d"),
    [
        ("adamw", 3, 3, 2),
        ("adamw", 3, 2, 1),
        ("muon", 3, 3, 2),
    ],
)
@pytest.mark.parametrize("router", ["sigmoid", "dense"])
def test_sizes_and_rates_are_of_the_table(name, m, h, d, router):
    """Rate times decay is that of "none". Groups' own ratios stay factors."""
    shape = {"n_layer": 2 * d, "n_head": 2 * m, "n_embd": 64 * m, "expert_hidden": 16 * h} | SHAPE
    more = {"n_shared_expert": 1, "bias": True, "tie_embeddings": False, "init_std": STD}
    keys = {"name": name, "weight_decay": DECAY, "router_lr_ratio": 0.25}
    optim = Optim(**keys, transfer="mup", base_width=64, base_hidden=80, base_layers=2)
    model = Model(router=router, **shape, **more)
    gpt = build(model, optim)
    groups = build_optimizer(gpt, optim).param_groups
    group_of = {p: group for group in groups for p in group["params"]}
    rows = table(m, h, d, 2 / own_gate_norm(model, 64))
    of_name = {end: row for ends, row in rows.items() for end in ends}
    checked = set()
    for parameter, p in gpt.named_parameters():
        (end,) = [end for end in of_name if parameter.endswith(end)]
        checked.add(end)
        size, by_adamw, by_muon = of_name[end]
        rate = by_muon if name == "muon" else by_adamw
        group = group_of[p]
        assert group["lr_ratio"] == pytest.approx(rate, rel=1e-6), parameter
        if p.dim() == 1:
            assert p.detach().numpy() == pytest.approx(size, rel=1e-6), parameter
            assert group["weight_decay"] == 0
            continue
        assert p.std().item() == pytest.approx(size, rel=4 / math.sqrt(2 * p.numel())), parameter
        decay = DECAY * 0.25 if end == "router.weight" else DECAY
        assert rate * group["weight_decay"] == pytest.approx(decay), parameter
    others = ("router", "shared", "experts") if router == "dense" else ("mlp.",)
    assert checked == {end for end in of_name if not end.startswith(others)}


def test_gates_of_a_hash_layer_are_not_those_of_the_best():
    """With g = s and s of N(0, τ²), K gates by a table have the norm τ√K, so G is 1 / τ; those of
    the K largest s have another.
    """
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "expert_hidden": 16, "n_hash_layer": 1}
    model = Model(router="identity, gamma", **shape, **SHAPE, init_std=STD)
    optim = Optim(transfer="mup", base_width=64, base_hidden=64)
    gpt = build(model, optim)
    groups = build_optimizer(gpt, optim).param_groups
    draws = np.random.default_rng(0).standard_normal((100_000, 6))
    squares = np.sort(draws)[:, 2:] ** 2  # of the 4 largest
    for layer, norm in enumerate((2, math.sqrt(4 * squares.mean()))):
        gates = 2 / (STD * math.sqrt(64) * norm)
        w_out = gpt.blocks[layer].mlp.experts.w_out
        (group,) = [group for group in groups if any(p is w_out for p in group["params"])]
        assert group["lr_ratio"] == pytest.approx(gates, rel=5e-3)
        assert w_out.std().item() == pytest.approx(OUT * gates, rel=0.04)


def train(model: Model, optim: Optim, n_step: int = 5, dtype=torch.float32) -> tuple[list, GPT]:
    """Losses of steps on random tokens, and the trained model."""
    gpt = build(model, optim).to(dtype)
    optimizer = build_optimizer(gpt, optim)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(n_step):
        tokens = torch.randint(model.vocab_size, (4, 9), generator=generator)
        loss = gpt(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * group["lr_ratio"]
        optimizer.step(torch.ones(()), torch.zeros(()))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gpt


SMALL = Model(n_layer=2, n_head=2, n_embd=16, expert_hidden=8, init_std=0.2, **SHAPE)
ROOT_K = "sqrtexp, post=l2 over topk, c=2"  # its gates have norm √K by themselves


@pytest.mark.parametrize("router", ["dense", ROOT_K])
def test_at_the_base_a_step_is_that_of_none_to_the_bit(router):
    model = SMALL.model_copy(update={"router": router})
    _, plain = train(model, Optim(lr=1e-2), n_step=1)
    # of layers no base is named
    optim = Optim(lr=1e-2, transfer="mup", base_width=16, base_hidden=32)
    _, moved = train(model, optim, n_step=1)
    for (name, wanted), p in zip(plain.named_parameters(), moved.parameters(), strict=True):
        assert p.equal(wanted), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_constant_of_the_router_changes_nothing(name):
    """The gates' identity of docs/theory.md: with decay too, since rate times decay is fixed."""
    keys = {"name": name, "lr": 1e-2, "eps": 1e-30, "weight_decay": DECAY}
    for transfer in ("mup", "none"):
        optim = Optim(**keys, transfer=transfer, base_width=8, base_hidden=16)
        losses = []
        for router in ("sigmoid, gamma", "sigmoid, gamma, c=5"):
            model = SMALL.model_copy(update={"router": router})
            losses.append(train(model, optim, dtype=torch.float64)[0])
        assert (losses[0] == pytest.approx(losses[1], rel=1e-6)) == (transfer == "mup")


def test_a_matrix_without_a_row_in_the_table_is_refused():
    optim = Optim(transfer="mup", base_width=16, base_hidden=32)
    gpt = build(SMALL.model_copy(update={"router": "kern"}), optim)
    gpt.blocks[1].mlp.router.project = torch.nn.Linear(16, 16)
    with pytest.raises(ValueError, match="size and rate of blocks.1.mlp.router.project.weight$"):
        initialize(Config(model=gpt.config, optim=optim), None, ONE_RANK, gpt)
