"""Training under combinations of settings, each step against reference_trainer.py in float64.

A cover has every pair of two features' values in some run. The reference starts each step from the
run's own weights, so that errors do not add up; moments, selection biases and means are its own.
Which experts a token chose is taken from the run, and must be the best by the reference's scores.
"""

import random
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference_trainer as reference
import torch
from numerics import SEED, SHARE
from runs import metrics, run

import configure
import train
from data.tokenizer import ByteTokenizer
from data.writer import Writer
from hf import match_gates
from router import Router
from runtime import checkpoint, updates
from runtime.parallel import full_tensor
from runtime.signals import Stop
from runtime.state import TrainState

BASE = """
[model]
n_layer = 3
n_head = 4
n_embd = 16
block_size = 16
vocab_size = 257
n_expert = 8
top_k = 2
expert_hidden = 4
init_std = 0.2

[train]
batch_size = 8
max_steps = 4
device = "cpu"
checkpoint_interval = 5000

[optim]
lr = 1e-2
warmup_steps = 1
weight_decay = 0.5

[eval]
interval = 4
windows = 2

[log]
interval = 1
"""
# {feature: {value: overrides}}
FEATURES = {
    "router": {
        "dense": "model.router=dense",
        "kern": "model.router=kern",
        "softmax": "model.router=softmax",
        "sigmoid": "model.router=sigmoid-renorm",
        "after": "model.router=kern-after",
        "formula": "model.router=tanh, post=l2 over topk, gamma, c=2",
    },
    "bias": {
        "none": "",
        "sign": "train.bias_update_rate=0.05",
        "quantile": "train.bias_update=quantile",
    },
    "losses": {
        "none": "",
        "global": "train.balance_loss_coef=0.5",
        "sequence": "train.balance_loss_coef=0.5;train.balance_loss_scope=sequence",
        "micro": "train.balance_loss_coef=0.5;train.balance_loss_scope=micro_batch;"
        "train.z_loss_coef=0.1",
    },
    "layers": {
        "plain": "",
        "hash": "model.n_hash_layer=1",
        "dense": "model.n_dense_layer=1;model.n_shared_expert=1",
        "both": "model.n_dense_layer=1;model.n_hash_layer=1",
    },
    "gates": {"own": "", "scale": "model.gate_scale=2.5", "norm": "model.gate_norm=0.5"},
    "mlp": {
        "gelu": "",
        "bias": "model.bias=true",
        "gated": "model.gated=true;model.activation=silu",
    },
    "heads": {"all": "", "shared": "model.n_kv_head=2"},
    "qk_norm": {"off": "", "head": "model.qk_norm=head", "all": "model.qk_norm=all"},
    "positions": {"learned": "", "rope": "model.pos=rope;model.rope_base=50"},
    "norm": {"layer": "", "rms": "model.norm=rmsnorm;model.norm_eps=0.01"},
    "head": {"tied": "", "own": "model.tie_embeddings=false"},
    "masks": {"off": "", "documents": "data.document_mask=true"},
    "sets": {"one": "data.name=short", "mix": "data.mix={short = 3, other = 1}"},
    "mean": {"off": "", "ema": "train.ema_decay=0.75"},
    "micro": {
        "8": "train.micro_batch_size=8",
        "4": "train.micro_batch_size=4",
        "2": "train.micro_batch_size=2;train.activation_checkpointing=true",
    },
    "dtype": {
        "32": "train.dtype=float32",
        "b16": "train.dtype=bfloat16",
        "16": "train.dtype=float16",
    },
    "optimizer": {
        "adamw": "optim.beta1=0.8;optim.beta2=0.9;optim.eps=1e-4",
        "muon": "optim.name=muon",
        "unsplit": "optim.name=muon;optim.muon_split=false;optim.momentum=0.5",
    },
    "ratios": {
        "ones": "",
        "own": "optim.router_lr_ratio=0.5;optim.expert_out_lr_ratio=2.0",
        "router": "optim.router_lr_ratio=0",
        "experts": "optim.expert_out_lr_ratio=0",
    },
    "schedule": {
        "cosine": "optim.grad_clip=0.1",
        "linear": "optim.schedule=wsd;optim.decay_fraction=0.5;optim.min_lr_ratio=0.2",
        "sqrt": "optim.schedule=wsd;optim.decay_fraction=0.75;optim.decay=sqrt;optim.grad_clip=0",
    },
    "backend": {"torch": "", "reference": "model.backend=reference"},
    "start": {"fresh": "", "swap": "", "upcycled": ""},
    "stop": {"none": "", "once": ""},
}
# Pairs that configure refuses, or that a source of weights does not have
FORBIDDEN = [
    ("router dense", "layers hash"),
    ("router dense", "layers both"),
    ("router dense", "start swap"),
    ("router dense", "start upcycled"),
    ("mlp gated", "mlp bias"),
    ("start upcycled", "layers hash"),
    ("start upcycled", "layers dense"),
    ("start upcycled", "layers both"),
]


class Limits(NamedTuple):
    """Largest errors under a type, relative to a value's norm.

    Half precision only tells a factor from an error: near 0 it turns KERN's ReLU on and off.
    """

    loss: float
    gradient: float
    choice: float  # of a score left out above a chosen one's
    tokens: float  # share whose choice must be best


LIMITS = {
    "float32": Limits(loss=1e-5, gradient=2e-4, choice=1e-4, tokens=1.0),
    "bfloat16": Limits(loss=0.02, gradient=0.45, choice=0.1, tokens=0.9),
    "float16": Limits(loss=0.01, gradient=0.45, choice=0.1, tokens=0.9),
}


def is_allowed(row: dict[str, str], feature: str, value: str) -> bool:
    """Return True if `value` fits all values in `row`."""
    new = f"{feature} {value}"
    others = {f"{name} {chosen}" for name, chosen in row.items()}
    partners = [b for a, b in FORBIDDEN if a == new] + [a for a, b in FORBIDDEN if b == new]
    return others.isdisjoint(partners)


def list_pairs(row: dict[str, str]) -> set[tuple[str, str, str, str]]:
    """Each two features of a row with their values."""
    return {(a, row[a], b, row[b]) for a, b in combinations(sorted(row), 2)}


def complete_row(row: dict[str, str], features: dict, missing: set, rng: random.Random) -> None:
    """Give every feature that `row` lacks the value that covers most of the missing pairs."""
    names = [name for name in features if name not in row]
    rng.shuffle(names)
    for name in names:
        values = [value for value in features[name] if is_allowed(row, name, value)]
        rng.shuffle(values)
        gains = []
        for value in values:
            pairs = list_pairs({**row, name: value})
            gains.append(len(pairs & missing))
        row[name] = values[gains.index(max(gains))]


def cover(features: dict, tries: int = 20) -> list[dict[str, str]]:
    """Rows with a value for each feature, so that each allowed pair of values is in one: greedy."""
    rng = random.Random(0)
    missing = set()
    for a, b in combinations(sorted(features), 2):
        for x in features[a]:
            for y in features[b]:
                if is_allowed({a: x}, b, y):
                    missing.add((a, x, b, y))
    rows = []
    while missing:
        candidates = []
        for _ in range(tries):
            a, x, b, y = rng.choice(sorted(missing))
            row = {a: x, b: y}
            complete_row(row, features, missing, rng)
            candidates.append(row)
        best = max(candidates, key=lambda row: len(list_pairs(row) & missing))
        missing -= list_pairs(best)
        rows.append(best)
    return rows


# ---- a run, step by step
class Step(NamedTuple):
    """What one rank saw of a step."""

    weights: dict[str, torch.Tensor]  # parameters and buffers before it
    gradients: dict[str, torch.Tensor]  # unclipped, without the loss scale
    batches: list[tuple[torch.Tensor, torch.Tensor]]  # (B, T) inputs and targets, each micro-batch
    chosen: list[list[torch.Tensor]]  # of each micro-batch and layer, (N, K)
    groups: dict[str, tuple[float, float]]  # {parameter: rate, decay}


class Recorder:
    """Records the steps of a run, also of one that is resumed."""

    def __init__(self, patch: pytest.MonkeyPatch, stop_after: int = 0) -> None:
        self.steps: list[Step] = []
        self.final: dict[str, torch.Tensor] = {}
        self.mean: dict[str, torch.Tensor] = {}
        self.stop = Stop()
        self.stop_after = stop_after
        self.batches: list[Any] = []
        self.chosen: list[Any] = []
        wrap(patch, train, "forward_backward", self.forward_backward)
        wrap(patch, TrainState, "forward", self.forward)
        wrap(patch, updates.Updates, "step", self.update)
        wrap(patch, checkpoint.Saver, "save", self.save)

    def forward_backward(self, function, state, *args):
        self.state = state
        self.batches, self.chosen = [], []
        weights = copy_tensors(state.model)
        hooks = []
        for module in state.model.modules():
            if isinstance(module, Router):
                hooks.append(module.register_forward_hook(self.note_experts))
        result = function(state, *args)
        for hook in hooks:
            hook.remove()
        gradients = {}
        for name, p in state.model.named_parameters():
            gradients[name] = full_tensor(p.grad).double() / state.updates.scale.item()
        n_layer = len(hooks)
        chosen = [layers[:n_layer] for layers in self.chosen]  # not those that were recomputed
        self.steps.append(Step(weights, gradients, self.batches, chosen, {}))
        return result

    def forward(self, function, state, x, y):
        if torch.is_grad_enabled():
            self.batches.append((x.clone(), y.clone()))
            self.chosen.append([])
        return function(state, x, y)

    def note_experts(self, module, args, routing):
        if torch.is_grad_enabled():
            self.chosen[-1].append(routing.experts.clone())

    def update(self, function, own, step, *args):
        taken = function(own, step, *args)
        names = {p: name for name, p in self.state.model.named_parameters()}
        for group in own.optimizer.param_groups:
            for p in group["params"]:
                self.steps[-1].groups[names[p]] = (group["lr"], group["weight_decay"])
        self.stop.asked = len(self.steps) == self.stop_after
        return taken

    def save(self, function, saver, step, model, *args):
        function(saver, step, model, *args)
        self.final = copy_tensors(model)
        if self.state.average:
            mean = self.state.average.tensors
            self.mean = {name: full_tensor(tensor).clone() for name, tensor in mean.items()}


def wrap(patch, owner, name, method):
    """Replace a function by `method`, which is given the function first."""
    function = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: method(function, *args))


def copy_tensors(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in tensors.items()}


def record(config, stop_after=0):
    """Train, with a stop and a resume after `stop_after` steps if it is not 0."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, stop_after)
        reader = train.find_reader(config)
        if stop_after:
            with pytest.raises(train.Stopped):
                train.train(config, recorder.stop, read_weights=reader)
            recorder.stop.asked = False
        train.train(config, recorder.stop, read_weights=reader)
    return recorder


# ---- comparison
def to_double(weights):
    """Float64 leaves of the reference."""
    leaves = {}
    for name, tensor in weights.items():
        is_float = tensor.is_floating_point()
        leaves[name] = tensor.double().requires_grad_() if is_float else tensor
    return leaves


def assert_close(actual, wanted, limit, name, floor=0.0):
    """Assert that the error is at most `limit` times the wanted norm, or `floor`."""
    error = (actual.double() - wanted).norm().item()
    size = max(wanted.norm().item(), floor)
    assert error <= limit * SHARE * size, f"{name}: error {error:.2e} of {size:.2e}"


def assert_best(layer, bias, limits, name):
    """Assert that no expert left out has a score above a chosen one's, but for rounding."""
    shifted = layer.scores.detach() + bias
    worst = shifted.gather(1, layer.chosen).amin(1)
    left_out = shifted.scatter(1, layer.chosen, -torch.inf).amax(1)
    is_best = left_out - worst <= limits.choice * shifted.abs().amax(1)
    assert is_best.double().mean() >= limits.tokens, name
    assert (layer.chosen.sort(1).values.diff(dim=1) > 0).all(), name  # distinct


def compare(config, recorder, lines):
    """Compare every step of a run with the reference."""
    limits = LIMITS[config.train.dtype]
    optimizer = reference.Optimizer(config)
    logged = [line for line in lines if "train/loss" in line]
    assert len(recorder.steps) == len(logged) == config.train.max_steps
    states = [step.weights for step in recorder.steps[1:]] + [recorder.final]
    mean = {}
    for number, (step, after, line) in enumerate(zip(recorder.steps, states, logged, strict=True)):
        weights = to_double(step.weights)
        layers = compare_losses(config, step, weights, line, limits)
        rate = reference.find_rate(config, number)
        assert line["optim/lr"] == pytest.approx(rate)
        wanted, norm = optimizer.step(
            {name: weights[name].detach() for name in step.gradients}, step.gradients, rate
        )
        assert line["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name, tensor in wanted.items():
            ratio, decay, _ = reference.find_group(config, name, tensor.dim())
            assert step.groups[name] == pytest.approx((rate * ratio, decay)), name
            before = step.weights[name]
            moved = tensor - before
            found = after[name].double() - before
            # a weight is rounded to float32, and its change with it
            floor = 1e-3 * before.norm().item()
            assert_close(found, moved, 1e-3, f"step {number} {name}", floor)
            assert ratio or torch.equal(after[name], before), name
        compare_biases(config, step, after, layers)
        decay = config.train.ema_decay
        for name, tensor in after.items():
            mean[name] = decay * mean.get(name, 0) + (1 - decay) * tensor.double()
    for name, tensor in recorder.mean.items():
        if tensor.is_floating_point():
            corrected = mean[name] / (1 - decay**config.train.max_steps)
            assert_close(tensor, corrected, 1e-6, f"mean {name}", 1e-9)
    assert bool(recorder.mean) == bool(config.train.ema_decay)


def compare_losses(config, step, weights, line, limits):
    """Compare losses and gradients; returns the routing of each layer in all micro-batches."""
    n_layer = len(step.chosen[0])
    step_loads = []
    for number in range(n_layer):
        chosen = torch.cat([layers[number] for layers in step.chosen])
        step_loads.append(reference.count_loads(chosen, config.model.n_expert))
    results = []
    total = 0
    for (x, y), chosen in zip(step.batches, step.chosen, strict=True):
        loss, layers = reference.compute_loss(config, weights, x, y, chosen, ByteTokenizer.eot)
        auxiliary = reference.compute_auxiliary(config, layers, step_loads)
        results.append((loss.item(), auxiliary.item(), layers))
        total = total + (loss + auxiliary) / len(step.batches)
    names = list(step.gradients)
    found = torch.autograd.grad(total, [weights[name] for name in names], allow_unused=True)
    gradients = dict(zip(names, found, strict=True))
    size = sum(g.norm().item() ** 2 for g in found if g is not None) ** 0.5
    for name, gradient in gradients.items():
        if gradient is None:
            gradient = torch.zeros_like(weights[name])
        assert_close(step.gradients[name], gradient, limits.gradient, name, floor=0.01 * size)
    assert line["train/loss"] == pytest.approx(
        np.mean([row[0] for row in results]), rel=limits.loss
    )
    aux_loss = np.mean([row[1] for row in results])
    assert line["train/aux_loss"] == pytest.approx(aux_loss, rel=10 * limits.loss, abs=1e-6)
    if n_layer:
        assert line["router/loads"] == [loads.tolist() for loads in step_loads]
    joined = []
    for number in range(n_layer):
        parts = [layers[number] for _, _, layers in results]
        fields = [torch.cat(field) for field in zip(*parts, strict=True)]
        joined.append(reference.Layer._make(fields))
    check_choices(config, step, weights, joined, limits)
    return joined


def check_choices(config, step, weights, layers, limits):
    """Experts are the best, or those of a hash layer's table."""
    ids = torch.cat([x.flatten() for x, _ in step.batches])
    routed = [name for name in step.weights if name.endswith("router.selection_bias")]
    for number, (name, layer) in enumerate(zip(routed, layers, strict=True)):
        table = step.weights.get(name.replace("selection_bias", "hash_table"))
        assert (table is not None) == (number < config.model.n_hash_layer)
        if table is not None:
            assert torch.equal(layer.chosen, table[ids]), name
        else:
            assert_best(layer, weights[name].detach(), limits, name)


def compare_biases(config, step, after, layers):
    routed = [name for name in after if name.endswith("router.selection_bias")]
    for number, name in enumerate(routed):
        before = step.weights[name].double()
        wanted = before
        if number >= config.model.n_hash_layer:
            layer = layers[number]
            wanted = reference.move_bias(before, config, layer.chosen, layer.scores.detach())
        # quantiles: to the width of a bin of the histogram, finest around 0
        allowed = 1e-6
        if config.train.bias_update == "quantile":
            allowed = 0.1 * layers[number].scores.std().item()
        assert (after[name] - wanted).abs().max() <= allowed, name


# ---- tests
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two prepared sets of short documents, and combinations.toml."""
    folder = tmp_path_factory.mktemp("combinations")
    for seed, name in enumerate(("short", "other")):
        rng = np.random.default_rng(seed)
        with Writer(folder / name, ByteTokenizer()) as writer:
            for split, n_document in {"train": 300, "val": 20}.items():
                for _ in range(n_document):
                    size = rng.integers(3, 20)
                    letters = rng.integers(97 + 13 * seed, 110 + 13 * seed, size)
                    tokens = np.append(letters, ByteTokenizer.eot)
                    writer.write(split, tokens.astype(np.uint16))
            writer.finish(name, {}, "a test")
    file = folder / "combinations.toml"
    file.write_text(BASE)
    return folder


def load(folder, number, row, *more, world_size=1):
    """The Config of a row."""
    overrides = [f"run.name=row-{number}", f"run.dir={folder / 'runs'}", f"data.dir={folder}"]
    overrides.append(f"run.seed={number + 1000 * SEED}")
    for feature, value in row.items():
        overrides += [text for text in FEATURES[feature][value].split(";") if text]
    return configure.load(folder / "combinations.toml", [*overrides, *more], world_size)


def find_start(folder, number, row):
    """The override of train.init_from: a run of two steps with another router."""
    if row["start"] == "fresh":
        return []
    router = "dense" if row["start"] == "upcycled" else "softmax-l2"
    config = load(
        folder,
        10_000 + number,
        row,
        f"model.router={router}",
        "train.max_steps=2",
        "optim.schedule=cosine",
        "train.bias_update=sign",
    )
    run(config)
    return [f"train.init_from={folder / 'runs' / config.run.name}"]


ROWS = cover(FEATURES)


@pytest.mark.numerics
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_step_is_the_references(folder, number, monkeypatch):
    monkeypatch.setattr(match_gates, "TOKENS", 512)  # for tests of accuracy: test_swap.py
    row = ROWS[number]
    config = load(folder, number, row, *find_start(folder, number, row))
    if SHARE < 1 and config.train.dtype != "float32":
        pytest.skip("half precision's limits hold for the default seed, which the whole suite runs")
    recorder = record(config, 2 if row["stop"] == "once" else 0)
    compare(config, recorder, metrics(config))
