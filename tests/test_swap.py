"""hf/match_gates.py and hf/upcycle.py: another router for a mixture; mixtures of dense models."""

import math
import re
from itertools import repeat

import pytest
import torch
from numerics import assert_near, seeded
from runs import ALONE, all_logits, column, metrics, modules_in, run
from safetensors.torch import load_file, save_file
from test_hf_init_from import LOGITS, MODERN, ids, make_gpt2, refused, remedy, start
from test_hf_open_moe import LIMIT, OURS, SHAPE
from test_router import GATES, SPARSE

from data.bins import open_tokens
from data.loader import fixed_windows, windows
from eval.routing import record_routing
from eval.trained import load_model
from gate_norm import gate_scale
from hf import match_gates
from hf.export import export
from hf.init_from import read_initial_weights
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


@pytest.fixture
def few_tokens(monkeypatch):
    """Gates are matched on few tokens, where a test does not ask how well."""
    monkeypatch.setattr(match_gates, "TOKENS", 512)


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
    return map(torch.from_numpy, windows(tokens, fixed_windows(tokens, 32, 48), 32))


@pytest.mark.parametrize("name", [*SPARSE, "exp, pre=l2 over all, post=l1 over topk"])
def test_a_router_ignores_a_shift_or_does_not(name):
    router = Router(8, 8, 2, find_spec(name)).double()
    logits = torch.randn(99, 8, generator=seeded(), dtype=torch.float64)
    here, there = router.choose(logits), router.choose(logits + 0.7)
    same = here.experts.equal(there.experts) and (here.weights - there.weights).abs().max() < 1e-12
    assert same == find_spec(name).ignores_shift


@pytest.mark.usefixtures("few_tokens")
def test_centring_is_exact_for_softmax(module_tiny, source):
    old = load_model(path_of(source)).model
    weights = read_initial_weights(swapped(module_tiny, source, "kern"))
    assert (
        "router weights are centred (mean over experts 0): softmax ignores that, kern does not"
        in weights.notes
    )
    centred = GPT(source.model).eval()
    centred.load_state_dict(
        old.state_dict() | {name: t for name, t in weights.state.items() if ".router.w" in name}
    )
    x, _ = texts(source)
    for before, after in zip(record_routing(old, x), record_routing(centred, x), strict=True):
        assert before.logits.mean(1).abs().max() > 0.01 > 1e-5 > after.logits.mean(1).abs().max()
        assert before.experts.equal(after.experts)
    assert (all_logits(old, x) - all_logits(centred, x)).abs().max() < 2e-5
    for router in ("softmax-renorm", "sqrtgate"):  # which ignore a shift, too
        state = read_initial_weights(swapped(module_tiny, source, router)).state
        assert all(
            tensor.equal(old.state_dict()[name])
            for name, tensor in state.items()
            if ".router.w" in name
        )


def test_centring_takes_the_mean_of_all_logits(tiny):
    """Weights and biases: the new logits are the old ones minus a token's mean over experts."""
    softmax, kern = "exp, post=l1 over all, bias", "relu, pre=l2 over all, bias"
    old, new = (tiny(f"model.router={name}").model for name in (softmax, kern))
    state = {}
    for name, tensor in GPT(old).state_dict().items():
        state[name] = torch.randn(tensor.shape, generator=seeded(len(name)))
    before = dict(state)
    routers, _ = take_routers(state, old, new)
    x = torch.randn(5, old.n_embd, generator=seeded())
    assert list(routers) == ["blocks.0.mlp.router", "blocks.1.mlp.router"]
    for name in routers:
        logits = x @ before[f"{name}.weight"].T + before[f"{name}.bias"]
        centred = x @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        assert_near(centred, logits - logits.mean(1, keepdim=True), 1e-4, name)


@pytest.mark.parametrize("router", ["kern", "sigmoid", "tanh", "softmax-renorm"])
def test_gates_get_the_norm_of_the_old_ones_by_layer(module_tiny, source, router, capsys):
    """By formula in fp64, on other text, for the inputs that the routers have in the old model."""
    config = swapped(module_tiny, source, router)
    first = run(config)[0]
    old = load_model(path_of(source)).model
    new = load_model(path_of(config)).model
    for before, block in zip(record_routing(old, next(texts(source))), new.blocks, strict=True):
        s = before.logits.double()
        s = s - s.mean(1, keepdim=True) * (router != "softmax-renorm")
        gates = block.mlp.router.c.item() * GATES[router](s, s.gather(1, before.experts))
        norms = [g.double().square().sum(1).mean().sqrt().item() for g in (before.weights, gates)]
        assert norms[1] == pytest.approx(norms[0], rel=0.04)
    said = re.search(r"on training windows, (.*)\n", capsys.readouterr().out)[1]
    numbers = r"loss ([\d.]+), zero gates ([\d.]+)%, gate norm ([\d.]+)"
    line = rf"old router: {numbers}; {router}: {numbers}; its gates times .*"
    matched = re.fullmatch(line, said)
    old_loss, old_zeros, _, loss, zeros, norm = (float(number) for number in matched.groups())
    assert old_loss == pytest.approx(column(metrics(source), "val/loss")[-1], abs=0.1)
    assert old_zeros == 0
    # of other text
    assert loss == pytest.approx(first["val/loss"], rel=0.05)
    assert norm == pytest.approx(first["val/gate_norm"], rel=0.05)
    assert zeros == pytest.approx(100 * first["val/zero_gates"], abs=2)


def test_gates_are_matched_on_equal_ranks_as_on_one(tiny, monkeypatch):
    """Sums over two ranks are twice those of one, which then reads half the batches.

    What is told is what the model then computes.
    """
    monkeypatch.setattr(match_gates, "TOKENS", 700)  # a batch has 256
    config = tiny("model.router=sigmoid")
    softmax = tiny("model.router=softmax").model
    torch.manual_seed(0)
    old = {f"blocks.{layer}.mlp.router": build_router(softmax, layer) for layer in range(2)}
    old["blocks.1.mlp.router"].weight.data.mul_(99)  # its gates are larger than the others'
    x, y = texts(config)
    told = []
    for ranks in (ALONE, Ranks(0, 2, torch.device("cpu"))):
        torch.manual_seed(0)
        model = GPT(config.model)
        monkeypatch.setattr(match_gates, "sum_over_ranks", lambda t, n=ranks.world_size: n * t)
        autocast = torch.autocast("cpu", enabled=False)
        read = []
        batches = (read.append(1) or batch for batch in repeat((x, y)))
        told.append(match_gates.match_gates(model, old, config, batches, autocast, ranks))
        assert len(read) == math.ceil(700 / (256 * ranks.world_size)) and model.training
    assert told[0] == told[1]
    _, loss, stats, _ = model(x, y)
    norm = sum(square.sqrt().item() for square in stats.gate_square) / 2
    factors = [f"{block.mlp.router.c.item():.3g}" for block in model.blocks]
    new = f"sigmoid: loss {loss:.4f}, zero gates {100 * stats.zero_gates.mean():.2f}%, "
    new += f"gate norm {norm:.3g}; its gates times {', '.join(factors)}"
    assert told[0].endswith(new) and "1" not in factors


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize("zero", ["old", "new"])
def test_a_router_without_gates_is_not_scaled(tiny, zero):
    """KERN with weights of 0 has none, which no factor changes."""
    names = {"old": "softmax", "new": "sigmoid"} | {zero: "kern"}
    config = tiny(f"model.router={names['new']}")
    model = GPT(config.model)
    settings = tiny(f"model.router={names['old']}").model
    old = {f"blocks.{layer}.mlp.router": build_router(settings, layer) for layer in range(2)}
    for layer, router in enumerate(old.values()):
        torch.nn.init.normal_(router.weight)
        silent = router if zero == "old" else model.blocks[layer].mlp.router
        torch.nn.init.zeros_(silent.weight)
    autocast = torch.autocast("cpu", enabled=False)
    batches = repeat(tuple(texts(config)))
    told = match_gates.match_gates(model, old, config, batches, autocast, ALONE)
    assert told.endswith("; its gates times 1, 1")
    assert all(block.mlp.router.c == 1 for block in model.blocks)


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize("word", ["model.gate_norm=0.7", "model.gate_scale=3.0"])
def test_what_the_user_sets_wins(module_tiny, source, word):
    run(config := swapped(module_tiny, source, "sigmoid", word, f"run.name={word[6:14]}"))
    c = [
        module.c.item()
        for module in load_model(path_of(config)).model.modules()
        if isinstance(module, Router)
    ]
    assert c == [pytest.approx(gate_scale(config.model))] * 2


@pytest.mark.usefixtures("few_tokens")
def test_the_scale_stays_in_runs_exports_and_classes_of_transformers(module_tiny, tmp_path, capsys):
    shape = [*SHAPE, *OURS["olmoe"]]
    run(softmax := module_tiny("run.name=olmoe", *shape))
    shape[shape.index("model.router=softmax")] = "run.name=renorm"
    run(config := swapped(module_tiny, softmax, "softmax-renorm", *shape))
    wanted = torch.tensor(metrics(config)[-1]["val/loss"])
    for form in ("auto", "nanokern"):
        words = [str(path_of(config)), str(tmp_path / form), "--format", form, "--check"]
        # what transformers imports of one test is not seen by others
        with modules_in(tmp_path / f"modules-{form}"):
            assert export.main(words) == 0, capsys.readouterr().err
    for place in (path_of(config), tmp_path / "auto", tmp_path / "nanokern"):
        again = f"train.init_from={place}", f"run.name=from-{place.name}"
        first = run(swapped(module_tiny, softmax, "softmax-renorm", *shape, *again))[0]["val/loss"]
        assert_near(torch.tensor(first), wanted, LIMIT, "loss")


@pytest.fixture(scope="module")
def hashed(module_tiny, tmp_path_factory):
    """A model of softmax with a hash layer, and its export, with another table than by default."""
    config = module_tiny(
        "run.name=hashed", "model.router=softmax", "model.n_hash_layer=1", "optim.lr=1e-2"
    )
    run(config)
    place = tmp_path_factory.mktemp("hashed") / "out"
    model = load_model(path_of(config)).model
    assert export.main([str(path_of(config)), str(place)]) == 0
    table = model.blocks[0].mlp.router.hash_table
    table.copy_((table + torch.arange(257)[:, None]) % 8)
    state = load_file(place / "model.safetensors")
    save_file(
        state | {"model.layers.0.mlp.router.hash_table": table.clone()}, place / "model.safetensors"
    )
    return place, model


@pytest.mark.parametrize("n_hash", [0, 1, 2])
def test_hash_layers_keep_their_table_and_the_norm_of_their_gates(
    module_tiny, source, hashed, n_hash, capsys
):
    place, old = hashed
    x, _ = texts(source)
    more = ["model.router=kern", f"model.n_hash_layer={n_hash}", f"run.name=hash-{n_hash}", *ONCE]
    config = module_tiny(f"train.init_from={place}", *more)
    run(config)
    said = capsys.readouterr().out
    new = load_model(path_of(config)).model
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


# ---- mixtures that start from dense models
# Of a dense model of width 16: E experts, K chosen, hidden width of each, router
COPIES = [
    "model.n_expert=8",
    "model.top_k=3",
    "model.expert_hidden=16",
    "model.router=softmax-renorm",
]
SLICES = [
    "model.n_expert=8",
    "model.top_k=2",
    "model.expert_hidden=8",
    "model.router=softmax-renorm",
]
TWO_COPIES_OF_SLICES = [
    "model.n_expert=12",
    "model.top_k=8",
    "model.expert_hidden=4",
    "model.router=sigmoid-renorm",
]
LAST_BLOCK = "blocks.1.mlp.experts."


def make_plain_gpt2(place, **update):
    """A GPT-2 of transformers without biases in its MLPs, saved in `place`."""
    theirs = make_gpt2(**update)
    with torch.no_grad():
        for block in theirs.transformer.h:
            block.mlp.c_fc.bias.zero_()
            block.mlp.c_proj.bias.zero_()
    theirs.save_pretrained(place)
    return theirs


@pytest.mark.numerics
@pytest.mark.parametrize(
    "shape", [COPIES, SLICES, TWO_COPIES_OF_SLICES], ids=["copies", "slices", "copies of slices"]
)
@pytest.mark.parametrize(
    "more", [[], ["model.gate_norm=3", "model.vocab_size=320", "model.block_size=20"]]
)
def test_a_mixture_computes_what_its_gpt2_does(tiny, tmp_path, shape, more):
    theirs = make_plain_gpt2(tmp_path / "gpt2")
    model, words = start(
        tiny(f"train.init_from={tmp_path / 'gpt2'}", "model.bias=true", *shape, *more)
    )
    idx = ids(model.config.block_size)
    assert_near(all_logits(model, idx)[..., :257], theirs(idx).logits, LOGITS, "logits")
    before, after = re.findall(r"\d\.\d{5}", words)
    assert abs(float(before) - float(after)) < 2e-5 and "because" not in words
    for note in ("only the first 20 of 32 positions are used", "ids 257 to 319 are missing and"):
        assert (note in words) == bool(more)


def train_dense(tiny, *more):
    """A run of a dense model of width 16; its losses are of few windows.

    Returns its folder and last loss.
    """
    config = tiny("run.name=dense", "model.router=dense", "eval.windows=4", *more)
    lines = run(config)
    return path_of(config), column(lines, "val/loss")[-1]


@pytest.mark.numerics
def test_a_mixture_computes_what_its_dense_run_does(tiny):
    """With gated MLPs, also with more positions. The copies differ after training."""
    place, _ = train_dense(tiny, *MODERN)
    own = [*MODERN, *SLICES, f"train.init_from={place}"]
    model, _ = start(tiny(*own, "model.block_size=64"))
    assert_near(
        all_logits(model, ids(32)), all_logits(load_model(place).model, ids(32)), LOGITS, "logits"
    )
    w_in = model.state_dict()[LAST_BLOCK + "w_in"]
    mlp = load_model(place).model.blocks[1].mlp
    for i, expert in enumerate(w_in):  # a copy of two slices after the other
        first = 8 * (i % 2)
        gate = mlp.w_in.weight[first : first + 8]
        up = mlp.w_in.weight[16 + first : 16 + first + 8]
        assert expert.equal(torch.cat([gate, up]).mT)
    run(config := tiny(*own))
    w_in = load_model(path_of(config)).model.state_dict()[LAST_BLOCK + "w_in"]
    assert not w_in[0].equal(w_in[2])


def test_new_routers_have_the_size_of_fresh_ones(tiny):
    """With the experts of a dense model as with random ones."""
    place, _ = train_dense(tiny, "train.max_steps=1")
    for ratio in (1, 5):
        own = [*SLICES, f"model.router_init_ratio={ratio}", "model.init_std=0.05"]
        model, _ = start(tiny(*own, f"train.init_from={place}"))
        weights = [block.mlp.router.weight.flatten() for block in model.blocks]
        assert torch.cat(weights).std().item() == pytest.approx(0.05 * ratio, rel=0.2)
    _, words = start(tiny(*SLICES, "model.router=sigmoid", f"train.init_from={place}"))
    assert "because the sum of a token's sigmoid gates varies" in words  # by 2%
    other, _ = start(tiny(*own, f"train.init_from={place}", "run.seed=5"))
    assert not weights[0].equal(other.blocks[0].mlp.router.weight.flatten())


def mean_largest_gate(router, tau):
    """Mean of the one chosen gate of 4 experts, with logits N(0, τ²), by samples."""
    s = tau * torch.randn(200_000, 4, generator=torch.Generator().manual_seed(0))
    gates = s.relu() / s.norm(dim=1, keepdim=True) if router == "kern" else s.softmax(1)
    return gates.amax(1).mean().item()


@pytest.mark.numerics
def test_losses_of_another_function_are_printed(tiny, capsys):
    """KERN's gates have no fixed sum: their mean is divided out, and both losses are those of
    evaluations.
    """
    place, last = train_dense(tiny)
    config = tiny(
        *SLICES,
        "model.router=kern",
        "model.bias=true",
        "eval.windows=4",
        f"train.init_from={place}",
    )
    loss = column(run(config), "val/loss")[0]
    printed = capsys.readouterr().out
    words = f"loss on 4 validation windows {last:.5f} -> {loss:.5f}, because the sum of a token's "
    assert f"4 copies of its MLP's 2 slices, {words}kern gates varies" in printed
    assert abs(loss - last) > 1e-4
    mine = start(config)[0].state_dict()[LAST_BLOCK + "w_out"][5]  # (H, C)
    theirs = load_model(place).model.state_dict()["blocks.1.mlp.w_out.weight"].mT[8:]
    # Two of each logit: the sum of the largest is as often there, and the norm √2 as large.
    assert_near(mine * mean_largest_gate("kern", 1.0) / 2**0.5, theirs, 0.02)
    wide = [*SLICES, "model.router=softmax", "model.init_std=0.5", f"train.init_from={place}"]
    mine = start(tiny(*wide))[0].state_dict()[LAST_BLOCK + "w_out"][5]
    # a logit's standard deviation is init_std √C; two of each halve its probability
    assert_near(mine * mean_largest_gate("softmax", 0.5 * 32**0.5) / 2, theirs, 0.02)


CONFLICTS = {  # with a dense model of width 16: what makes it fit
    "model.expert_hidden=5": "expert_hidden=8",  # K slices
    "model.expert_hidden=5 model.top_k=3": "expert_hidden=16",
    "model.expert_hidden=4": "expert_hidden=8",  # 2 of 4 slices would be chosen
    "model.n_expert=9": "expert_hidden=16",
    "model.n_shared_expert=1": "n_shared_expert=0",
    "model.router_groups=4 model.router_group_k=2": "router_groups=1 router_group_k=1",
    "model.n_hash_layer=1": "n_hash_layer=0",  # whose table would choose slices of several copies
}


@pytest.mark.parametrize("other", CONFLICTS)
def test_what_does_not_fit_is_refused_with_its_remedy(tiny, tmp_path, other):
    make_plain_gpt2(tmp_path)
    config = [f"train.init_from={tmp_path}", "model.bias=true", *SLICES, *other.split()]
    needed = remedy(refused(tiny(*config)))
    assert needed == [f"--model.{word}" for word in CONFLICTS[other].split()]
    start(tiny(*config, *needed))
