"""hf/swap.py: a trained softmax mixture gets another router. W is centred, gates keep their size, the run says so."""

import re

import pytest
import torch
from numerics import assert_near, seeded
from runs import column, metrics, modules_in, run
from safetensors.torch import load_file, save_file
from test_hf_open_moe import LIMIT, OURS, SHAPE
from test_router import GATES

from data.bins import open_tokens
from data.loader import fixed_windows, windows
from eval.routing import record_routing
from eval.trained import load_model
from gate_norm import gate_scale
from hf.init_from import read_initial_weights
from model import GPT
from router import ROUTERS, Router, find_spec, hash_table
from runtime.folder import path_of
from scripts import export

ONCE = ["train.max_steps=1", "optim.warmup_steps=0", "optim.lr=1e-9", "eval.interval=1"]


@pytest.fixture(scope="module")
def source(module_tiny):
    """A run of softmax whose z-loss has moved all logits, W having a part that is common to all experts."""
    moved = ["train.z_loss_coef=0.01", "train.balance_loss_coef=0.1", "optim.lr=5e-3"]
    moved += ["train.max_steps=150", "eval.interval=150"]
    run(config := module_tiny("run.name=source", "model.router=softmax", *moved))
    return config


def swapped(make, source, router, *more):
    """The Config of a run that begins with the weights of `source` and another router."""
    return make(f"run.name={router}", f"train.init_from={path_of(source)}", f"model.router={router}", *ONCE, *more)


def texts(config, split="val"):
    tokens = open_tokens(config.data.folders[0], split)
    return map(torch.from_numpy, windows(tokens, fixed_windows(tokens, 32, 48), 32))


@pytest.mark.parametrize(
    "name", [*(name for name in ROUTERS if name != "dense"), "exp, pre=l2 over all, post=l1 over topk"]
)
def test_a_router_ignores_a_shift_or_does_not(name):
    router = Router(8, 8, 2, find_spec(name)).double()
    logits = torch.randn(99, 8, generator=seeded(), dtype=torch.float64)
    here, there = router.choose(logits), router.choose(logits + 0.7)
    same = here.experts.equal(there.experts) and (here.weights - there.weights).abs().max() < 1e-12
    assert same == find_spec(name).ignores_shift


def test_centring_is_exact_for_softmax(module_tiny, source):
    old = load_model(path_of(source)).model
    weights = read_initial_weights(swapped(module_tiny, source, "kern"))
    assert "router weights are centred (mean over experts 0): softmax ignores that, kern does not" in weights.notes
    centred = GPT(source.model).eval()
    centred.load_state_dict(old.state_dict() | {name: t for name, t in weights.state.items() if ".router.w" in name})
    x, _ = texts(source)
    for before, after in zip(record_routing(old, x), record_routing(centred, x), strict=True):
        assert before.logits.mean(1).abs().max() > 0.01 > 1e-5 > after.logits.mean(1).abs().max()
        assert before.experts.equal(after.experts)
    assert (old.logits(old.hidden(x)[0]) - centred.logits(centred.hidden(x)[0])).abs().max() < 2e-5
    for router in ("softmax-renorm", "sqrtgate"):  # which ignore a shift, too
        state = read_initial_weights(swapped(module_tiny, source, router)).state
        assert all(tensor.equal(old.state_dict()[name]) for name, tensor in state.items() if ".router.w" in name)


@pytest.mark.parametrize("router", ["kern", "sigmoid", "tanh", "softmax-renorm"])
def test_gates_get_the_norm_of_the_old_ones_by_layer(module_tiny, source, router, capsys):
    """By formula in fp64, on other text, for the inputs that the routers have in the old model."""
    lines = run(swapped(module_tiny, source, router))
    old, new = (load_model(path_of(config)).model for config in (source, swapped(module_tiny, source, router)))
    for before, block in zip(record_routing(old, next(texts(source))), new.blocks, strict=True):
        s = before.logits.double()
        s = s - s.mean(1, keepdim=True) * (router != "softmax-renorm")
        gates = block.mlp.router.c.item() * GATES[router](s, s.gather(1, before.experts))
        norms = [g.double().square().sum(1).mean().sqrt().item() for g in (before.weights, gates)]
        assert norms[1] == pytest.approx(norms[0], rel=0.04)
    said = re.search(r"on training windows, (.*)\n", capsys.readouterr().out)[1]
    numbers = r"loss ([\d.]+), zero gates ([\d.]+)%, gate norm ([\d.]+)"
    was, now = re.fullmatch(rf"old router: {numbers}; {router}: {numbers}; its gates times .*\(.*\)", said), lines[0]
    *softmax, loss, zeros, norm = map(float, was.groups())
    assert softmax[0] == pytest.approx(column(metrics(source), "val/loss")[-1], abs=0.1) and softmax[1] == 0
    assert (loss, norm) == pytest.approx((now["val/loss"], now["val/gate_norm"]), rel=0.05)  # of other text
    assert zeros == pytest.approx(100 * now["val/zero_gates"], abs=2)


@pytest.mark.parametrize("word", ["model.gate_norm=0.7", "model.gate_scale=3.0", "train.match_gates=false"])
def test_what_the_user_sets_wins(module_tiny, source, word):
    run(config := swapped(module_tiny, source, "sigmoid", word, f"run.name={word[6:14]}"))
    c = [module.c.item() for module in load_model(path_of(config)).model.modules() if isinstance(module, Router)]
    assert c == [pytest.approx(gate_scale(config.model))] * 2


def test_the_scale_stays_in_runs_exports_and_classes_of_transformers(module_tiny, tmp_path, capsys):
    shape = [*SHAPE, *OURS["olmoe"]]
    run(softmax := module_tiny("run.name=olmoe", *shape))
    shape[shape.index("model.router=softmax")] = "run.name=renorm"
    run(config := swapped(module_tiny, softmax, "softmax-renorm", *shape))
    wanted = torch.tensor(metrics(config)[-1]["val/loss"])
    for form in ("auto", "nanokern"):
        words = [str(path_of(config)), str(tmp_path / form), "--format", form, "--check"]
        with modules_in(tmp_path / f"modules-{form}"):  # what transformers imports of one test is not seen by others
            assert export.main(words) == 0, capsys.readouterr().err
    for place in (path_of(config), tmp_path / "auto", tmp_path / "nanokern"):
        again = f"train.init_from={place}", f"run.name=from-{place.name}"
        first = run(swapped(module_tiny, softmax, "softmax-renorm", *shape, *again))[0]["val/loss"]
        assert_near(torch.tensor(first), wanted, LIMIT, "loss")


@pytest.fixture(scope="module")
def hashed(module_tiny, tmp_path_factory):
    """A model of softmax with a hash layer, and its export with another table than a new one would be."""
    run(config := module_tiny("run.name=hashed", "model.router=softmax", "model.n_hash_layer=1", "optim.lr=1e-2"))
    place, model = tmp_path_factory.mktemp("hashed") / "out", load_model(path_of(config)).model
    assert export.main([str(path_of(config)), str(place)]) == 0
    table = model.blocks[0].mlp.router.hash_table
    table.copy_((table + torch.arange(257)[:, None]) % 8)
    state = load_file(place / "model.safetensors")
    save_file(state | {"model.layers.0.mlp.router.hash_table": table.clone()}, place / "model.safetensors")
    return place, model


@pytest.mark.parametrize("n_hash", [0, 1, 2])
def test_hash_layers_keep_their_table_and_the_norm_of_their_gates(module_tiny, source, hashed, n_hash, capsys):
    """By formula in fp64, on other text, for the inputs that the routers have in the old model."""
    (place, old), (x, _) = hashed, texts(source)
    more = ["model.router=kern", f"model.n_hash_layer={n_hash}", f"run.name=hash-{n_hash}", *ONCE]
    run(config := module_tiny(f"train.init_from={place}", *more))
    said, new = capsys.readouterr().out, load_model(path_of(config)).model
    assert (f"n_hash_layer changes from 1 to {n_hash}" in said) == (n_hash != 1)
    tables = [old.blocks[0].mlp.router.hash_table, hash_table(257, 8, 2, seed=1)]
    assert not tables[0].equal(hash_table(257, 8, 2, seed=0))
    layers = zip(record_routing(old, x), record_routing(new, x), new.blocks, tables, strict=True)
    for layer, (before, after, block, table) in enumerate(layers):
        s = before.logits.double() - before.logits.double().mean(1, keepdim=True)
        experts = table[x.flatten()] if layer < n_hash else s.topk(2).indices
        assert layer >= n_hash or after.experts.equal(experts)
        gates = block.mlp.router.c.item() * GATES["kern"](s, s.gather(1, experts))
        norms = [g.double().square().sum(1).mean().sqrt().item() for g in (before.weights, gates)]
        assert norms[1] == pytest.approx(norms[0], rel=0.04)
