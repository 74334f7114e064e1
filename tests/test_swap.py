"""hf/match_gates.py: another router for a mixture."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_near, seeded
from runs import run
from safetensors.torch import load_file, save_file
from test_router import GATES, SPARSE

from data.bins import open_tokens
from data.loader import Windows, fixed_windows
from eval.routing import record_routing
from eval.trained import load_model
from gate_norm import gate_scale
from hf import match_gates
from hf.export import export
from hf.match_gates import take_routers
from model import GPT, build_router
from router import Router, find_spec, hash_table
from runtime.distributed import Ranks
from runtime.folder import path_of

ONCE = ["train.max_steps=1", "optim.warmup_steps=0", "optim.lr=1e-9", "eval.interval=1"]


@pytest.fixture(scope="module")
def source(module_tiny):
    """A run of softmax. Its z-loss has moved all logits: W has a part common to all experts."""
    config = module_tiny(
        "run.name=source",
        "model.router=softmax",
        "train.z_loss_coef=0.01",
        "train.balance_loss_coef=0.1",
        "optim.lr=1e-2",
        "train.max_steps=60",
        "eval.interval=60",
    )
    run(config)
    return config


def swapped(make, source, router, *more):
    """The Config of a run that starts with the weights of `source` and another router."""
    return make(
        f"run.name={router}",
        f"train.init_from={path_of(source)}",
        f"model.router={router}",
        *ONCE,
        *more,
    )


def texts(config, split="val"):
    tokens = open_tokens(config.data.folders[0], split)
    return map(torch.from_numpy, Windows([tokens], 32).read(fixed_windows(tokens, 32, 48)))


def assert_gates_are_matched(old, new, x, centre=True, tables=()):
    """By formula in fp64, for the inputs that the routers have in the old model.

    Args:
        tables: of the new model's hash layers.
    """
    router = new.config.router
    for layer, (before, block) in enumerate(zip(record_routing(old, x), new.blocks, strict=True)):
        s = before.logits.double()
        s = s - s.mean(1, keepdim=True) * centre
        experts = tables[layer][x.flatten()] if layer < len(tables) else s.topk(2).indices
        gates = block.mlp.router.c.item() * GATES[router](s, s.gather(1, experts))
        norms = [g.double().square().sum(1).mean().sqrt().item() for g in (before.weights, gates)]
        assert norms[1] == pytest.approx(norms[0], rel=0.04)


@pytest.mark.parametrize("name", [*SPARSE, "exp, pre=l2 over all, post=l1 over topk"])
def test_a_router_ignores_a_shift_or_does_not(name):
    router = Router(8, 8, 2, find_spec(name)).double()
    logits = torch.randn(99, 8, generator=seeded(), dtype=torch.float64)
    here, there = (router.choose(shifted).weights for shifted in (logits, logits + 0.7))
    same = torch.allclose(here, there, rtol=0, atol=1e-12)
    assert same == find_spec(name).ignores_shift


def test_centring_takes_the_mean_of_all_logits(tiny):
    """Weights and biases: the new logits are the old ones minus a token's mean over experts."""
    softmax, kern = "exp, post=l1 over all, bias", "relu, pre=l2 over all, bias"
    old, new = (tiny(f"model.router={name}").model for name in (softmax, kern))
    state = {
        name: torch.randn(tensor.shape, generator=seeded(len(name)))
        for name, tensor in GPT(old).state_dict().items()
    }
    before = dict(state)
    routers, _ = take_routers(state, old, new)
    assert list(routers) == ["blocks.0.mlp.router", "blocks.1.mlp.router"]
    x = torch.randn(5, old.n_embd, generator=seeded())
    for name in routers:
        parts = f"{name}.weight", f"{name}.bias"
        logits, centred = (F.linear(x, *map(w.get, parts)) for w in (before, state))
        assert_near(centred, logits - logits.mean(1, keepdim=True), 1e-4, name)


@pytest.mark.parametrize("router", ["kern", "sigmoid", "tanh", "softmax-renorm"])
def test_gates_get_the_norm_of_the_old_ones_by_layer(module_tiny, source, router, capsys):
    """On other text."""
    config = swapped(module_tiny, source, router)
    run(config)
    old = load_model(path_of(source)).model
    new = load_model(path_of(config)).model
    assert_gates_are_matched(old, new, next(texts(source)), router != "softmax-renorm")
    listed = ", ".join(f"{block.mlp.router.c.item():.3g}" for block in new.blocks)
    note = f"the gates of {router} times {listed}, to the old router's norm\n"
    assert f"{path_of(config)}: {note}" in capsys.readouterr().out


def test_gates_are_matched_by_sums_over_ranks(tiny, monkeypatch):
    """Each of two ranks reads half the batches. Where the other one has the new gates' squares for
    the old ones', and these for them, nothing changes.

    KERN with weights of 0 has no gates; as old or new router it leaves c as it is.
    """
    monkeypatch.setattr(match_gates, "TOKENS", 4000)  # a batch has 1536
    config = tiny("model.router=kern", "model.n_layer=4")
    kern, softmax = (tiny(f"model.router={name}").model for name in ("kern", "softmax"))
    torch.manual_seed(0)
    model = GPT(config.model)
    old = {f"blocks.{layer}.mlp.router": build_router(softmax, layer) for layer in range(3)}
    old["blocks.3.mlp.router"] = build_router(kern, 3)
    for router in (model.blocks[2].mlp.router, old["blocks.3.mlp.router"]):
        torch.nn.init.zeros_(router.weight)
    batch = tuple(texts(config))
    told = []
    for world_size, total in (
        (1, lambda squares: squares),
        (2, lambda squares: squares + squares.flip(0)),
    ):
        monkeypatch.setattr(match_gates, "sum_over_ranks", total)
        ranks = Ranks(0, world_size, torch.device("cpu"))
        batches = iter([batch] * (3 if world_size == 1 else 2))
        autocast = torch.autocast("cpu", enabled=False)
        new = deepcopy(model)
        told.append(match_gates.match_gates(new, old, batches, autocast, ranks))
        assert next(batches, None) is None and new.training
    assert told[0] != told[1] == "1, 1, 1, 1" and told[0].endswith(", 1, 1")


@pytest.mark.parametrize("word", ["model.gate_norm=0.7", "model.gate_scale=3.0"])
def test_what_the_user_sets_wins(module_tiny, source, word):
    run(config := swapped(module_tiny, source, "sigmoid", word, f"run.name={word[6:14]}"))
    for block in load_model(path_of(config)).model.blocks:
        assert block.mlp.router.c.item() == pytest.approx(gate_scale(config.model))


def test_a_layer_that_becomes_a_hash_layer_gets_its_factor(tiny):
    same = ["model.router=kern", "model.gate_norm=1"]
    run(first := tiny("run.name=first", *same))
    more = ["run.name=hashed", "model.n_hash_layer=1", *ONCE]
    run(config := tiny(f"train.init_from={path_of(first)}", *same, *more))
    factors = [block.mlp.router.c.item() for block in load_model(path_of(config)).model.blocks]
    wanted = [gate_scale(config.model, by_table=True), gate_scale(config.model)]
    assert factors == pytest.approx(wanted) and wanted[0] > 1.1 * wanted[1]


def test_hash_layers_keep_their_table_and_the_norm_of_their_gates(tiny, source, tmp_path, capsys):
    """Of an export with another table than by default."""
    run(first := tiny("run.name=first", "model.router=softmax", "model.n_hash_layer=1"))
    place = tmp_path / "out"
    assert export.main([str(path_of(first)), str(place)]) == 0
    state = load_file(place / "model.safetensors")
    moved = (state["model.layers.0.mlp.router.hash_table"] + torch.arange(257)[:, None]) % 8
    state["model.layers.0.mlp.router.hash_table"] = moved
    save_file(state, place / "model.safetensors")
    old = load_model(path_of(first)).model
    old.blocks[0].mlp.router.hash_table.copy_(moved)
    tables = [moved, hash_table(257, 8, 2, seed=1)]
    x, _ = texts(source)
    for n_hash in (0, 1, 2):
        more = ["model.router=kern", f"model.n_hash_layer={n_hash}", *ONCE]
        config = tiny(f"train.init_from={place}", f"run.name=hash-{n_hash}", *more)
        capsys.readouterr()
        run(config)
        changes = f"n_hash_layer changes from 1 to {n_hash}" in capsys.readouterr().out
        assert changes == (n_hash != 1)
        new = load_model(path_of(config)).model
        assert_gates_are_matched(old, new, x, tables=tables[:n_hash])
        for after, table in zip(record_routing(new, x)[:n_hash], tables, strict=False):
            assert after.experts.equal(table[x.flatten()])
