"""Training under combinations of settings, each step against reference_trainer.py in float64.

A cover has every pair of two features' values in some run. The reference starts each step and each
evaluation from the run's own weights, so that errors do not add up; moments, selection biases and
means are its own. Logits are compared, then taken from the run; the experts that it chose must be
the best by them. What a step or an evaluation logs is compared, too.
Half precision may err as far as the reference does that rounds at the same places, each time to
another side.
"""

import math
import random
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference_trainer as reference
import torch
from corpora import write_ids
from interpreter import like_gpu  # noqa: F401 (a fixture)
from numerics import SEED, SHARE
from runs import metrics, run

import configure
import train
from data.tokenizer import ByteTokenizer
from hf import match_gates
from kernels import choose_backend
from router import Router
from runtime import updates, validation
from runtime.launch import Stop
from runtime.parallel import full_tensor
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
windows = 5

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
        "dense": "model.n_shared_expert=1",
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
    # names that are parts of metrics' names
    "sets": {"one": "data.name=loss", "mix": "data.mix={loss = 3, val = 1}"},
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
        "attention": "optim.name=muon;optim.muon_experts=false",
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
        "wsd": "optim.schedule=wsd;optim.decay_fraction=0.75;optim.grad_clip=0",
    },
    "backend": {"torch": "", "reference": "model.backend=reference"},
    # AdamW of experts' weights by a kernel, which also writes their half-precision copies
    "copies": {"casts": "", "kernel": ""},
    "start": {"fresh": "", "swap": ""},
    "stop": {"none": "", "once": ""},
}
# pairs that configure refuses, or that a source of weights does not have
FORBIDDEN = {
    (("layers", "hash"), ("router", "dense")),
    (("router", "dense"), ("start", "swap")),
    # no copies, or none that the kernel writes
    (("copies", "kernel"), ("dtype", "32")),
    (("copies", "kernel"), ("micro", "2")),
    (("copies", "kernel"), ("optimizer", "muon")),
    (("copies", "kernel"), ("router", "dense")),
}


# relative errors of sums; for half precision two roundings of the result
ROUNDING = {"float32": 2e-4, "bfloat16": 2 * 2**-7, "float16": 2 * 2**-10}
GROWTH_INTERVAL = 2  # steps before the loss scale doubles
N_HALF = 6  # rows in half precision of the default tests: 87% of all pairs are in one of its rows
DRAWS = 3  # of the reference's rounding errors
FACTOR = 8  # of the root mean square of these errors


def list_pairs(row):
    """Each two features of a row with their values."""
    return set(combinations(sorted(row.items()), 2))


def cover(features, tries=100):
    """Rows with a value for each feature, so that each allowed pair of values is in one: greedy."""
    rng = random.Random(0)
    missing = set()
    for a, b in combinations(sorted(features), 2):
        missing |= {((a, x), (b, y)) for x in features[a] for y in features[b]}
    missing -= FORBIDDEN
    rows = []
    while missing:
        candidates = []
        ordered = sorted(missing)
        while len(candidates) < tries:
            row = {name: rng.choice(list(values)) for name, values in features.items()}
            row |= dict(rng.choice(ordered))
            if FORBIDDEN.isdisjoint(list_pairs(row)):
                candidates.append(row)
        best = max(candidates, key=lambda row: len(list_pairs(row) & missing))
        missing -= list_pairs(best)
        rows.append(best)
    return rows


# ---- a run, step by step
class Seen(NamedTuple):
    """What one rank saw of a step, or of a pass over the validation windows, W in all."""

    weights: dict[str, torch.Tensor]  # parameters and buffers, before a step: the run's, or a mean
    batches: list[tuple[torch.Tensor, torch.Tensor]]  # (B, T) inputs and targets, each micro-batch
    choices: list[list[reference.Choice]]  # of each micro-batch and layer
    sets: Any = None  # (W,) number of each window's set
    gradients: dict[str, torch.Tensor] = {}  # of a step: unclipped, without the loss scale
    scale: float = 1.0  # of the loss


class Recorder:
    """Records the steps and evaluations of a run, also of one that is resumed."""

    def __init__(self, patch, stop_after=0):
        self.steps = []
        self.evaluations = []
        self.stop = Stop()
        self.stop_after = stop_after
        wrap(patch, train, "forward_backward", self.forward_backward)
        wrap(patch, validation, "measure_loss", self.measure_loss)
        wrap(patch, TrainState, "forward", self.forward)

    @contextmanager
    def watch(self, model):
        """Note the batches, and the choices of each layer, of this context."""
        self.batches, self.choices = [], []
        routers = [module for module in model.modules() if isinstance(module, Router)]
        hooks = [router.register_forward_hook(self.note_experts) for router in routers]
        yield
        for hook in hooks:
            hook.remove()
        # without those that were recomputed
        self.choices = [layers[: len(routers)] for layers in self.choices]

    def forward_backward(self, function, state, *args):
        weights = copy_tensors(state.model)
        with self.watch(state.model):
            result = function(state, *args)
        scale = state.updates.scale.item()
        gradients = {}
        for name, p in state.model.named_parameters():
            gradients[name] = full_tensor(p.grad).double() / scale
        self.steps.append(Seen(weights, self.batches, self.choices, None, gradients, scale))
        self.stop.asked = len(self.steps) == self.stop_after
        return result

    def measure_loss(self, function, state, data, *args):
        with self.watch(state.model):
            values = function(state, data, *args)
        weights = copy_tensors(state.model)
        self.evaluations.append(Seen(weights, self.batches, self.choices, data.sets))
        return values

    def forward(self, function, state, x, y):
        if counts(state.model):
            self.batches.append((x.clone(), y.clone()))
            self.choices.append([])
        return function(state, x, y)

    def note_experts(self, module, args, routing):
        if counts(module):
            choice = reference.Choice(routing.logits.detach().double(), routing.experts.clone())
            self.choices[-1].append(choice)


def counts(module):
    """False in a pass for a step's loads alone."""
    return torch.is_grad_enabled() or not module.training


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
        if stop_after:
            with pytest.raises(train.Stopped):
                train.train(config, recorder.stop)
            recorder.stop.asked = False
        train.train(config, recorder.stop)
    return recorder


# ---- comparison
def to_double(weights):
    """Float64 leaves of the reference."""
    leaves = {}
    for name, tensor in weights.items():
        is_float = tensor.is_floating_point()
        leaves[name] = tensor.double().requires_grad_() if is_float else tensor
    return leaves


def assert_within(actual, wanted, limit, name):
    """Assert that the norm of the error is at most `limit`."""
    error = (actual - wanted).double().norm().item()
    assert error <= limit * SHARE, f"{name}: error {error:.2e}, limit {limit:.2e}"


def find_limit(wanted, draws, rounding):
    """Largest error: `rounding` of the wanted norm, and what the draws err by."""
    errors = [(draw - wanted).norm().item() for draw in draws]
    spread = math.sqrt(np.mean(np.square(errors))) if errors else 0.0
    return rounding * wanted.norm().item() + FACTOR * spread


def assert_best(layer, bias, name):
    """Assert that no expert left out has a higher score, but for float32's rounding."""
    shifted = layer.scores + bias
    worst = shifted.gather(1, layer.chosen).amin(1)
    left_out = shifted.scatter(1, layer.chosen, -torch.inf).amax(1)
    assert (left_out - worst <= 1e-5 * shifted.abs().amax(1)).all(), name
    assert (layer.chosen.sort(1).values.diff(dim=1) > 0).all(), name  # distinct


class Passes(NamedTuple):
    """The reference's losses and gradients of a step, or its losses of an evaluation."""

    loss: torch.Tensor  # (W,) of each window
    aux_loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    layers: list[reference.Layer]  # of all micro-batches

    def is_finite(self):
        return all(gradient.isfinite().all() for gradient in self.gradients.values())


def run_passes(config, passes, weights, step_loads, names, cast):
    """Losses of a step or an evaluation, and gradients for `names`, rounded by `cast`."""
    losses, auxiliaries, all_layers = [], [], []
    for (x, y), choices in zip(passes.batches, passes.choices, strict=True):
        loss, layers = reference.compute_loss(
            config, weights, x, y, choices, ByteTokenizer.eot, cast
        )
        losses.append(loss)
        auxiliaries.append(reference.compute_auxiliary(config, layers, step_loads))
        all_layers.append(layers)
    loss = torch.cat(losses)
    aux_loss = torch.stack(auxiliaries).mean()
    gradients = {}
    if names:
        leaves = [weights[name] for name in names]
        found = torch.autograd.grad(loss.mean() + aux_loss, leaves, materialize_grads=True)
        gradients = dict(zip(names, found, strict=True))
    joined = []
    for parts in zip(*all_layers, strict=True):
        fields = [torch.cat(field).detach() for field in zip(*parts, strict=True)]
        joined.append(reference.Layer._make(fields))
    return Passes(loss.detach(), aux_loss.detach(), gradients, joined)


def compare(config, recorder, lines):
    """Compare every step and evaluation of a run with the reference."""
    optimizer = reference.Optimizer(config)
    logged = [line for line in lines if "train/loss" in line]
    assert len(recorder.steps) == len(logged) == config.train.max_steps
    evaluations = compare_evaluations(config, recorder.evaluations, lines)
    states = [step.weights for step in recorder.steps[1:]] + [evaluations[-1][0].weights]
    mean = {}
    scale = 65536.0 if config.train.dtype == "float16" else 1.0
    healthy = 0  # steps since the scale changed
    for number, (step, after, line) in enumerate(zip(recorder.steps, states, logged, strict=True)):
        weights = to_double(step.weights)
        assert step.scale == scale
        layers = compare_passes(config, step, weights, line)
        rate = reference.find_rate(config, number)
        assert line["optim/lr"] == pytest.approx(rate)
        assert line["optim/skipped_steps"] == number - optimizer.n_step + (layers is None)
        if layers is None:  # a step that overflowed changes nothing but the loss scale
            scale /= 2
            healthy = 0
            for name, tensor in after.items():
                assert torch.equal(tensor, step.weights[name]), name
            continue
        healthy += 1
        if config.train.dtype == "float16" and healthy == GROWTH_INTERVAL:
            scale *= 2
            healthy = 0
        compare_updates(config, optimizer, step, after, rate, line)
        compare_biases(config, step, after, layers)
        gammas = [tensor.item() for name, tensor in after.items() if name.endswith("gamma")]
        assert line.get("router/gamma_of_layers", []) == pytest.approx(gammas)
        decay = config.train.ema_decay
        for name, tensor in after.items():
            mean[name] = decay * mean.get(name, 0) + (1 - decay) * tensor.double()
    assert optimizer.n_step >= 2  # of the steps, updates
    if decay:
        for name, tensor in evaluations[-1][1].weights.items():
            if tensor.is_floating_point():
                corrected = mean[name] / (1 - decay**optimizer.n_step)
                assert_within(
                    tensor, corrected, 1e-6 * corrected.norm().item() + 1e-15, f"mean {name}"
                )


def compare_evaluations(config, evaluations, lines):
    """Compare what is logged of each evaluation.

    Returns:
        For each, what was seen of it with the weights and, if there is one, with their mean.
    """
    evaluated = [line for line in lines if "val/loss" in line]
    prefixes = ["val", "val_ema"] if config.train.ema_decay else ["val"]
    assert len(evaluations) == len(prefixes) * len(evaluated)
    pairs = []
    for number, line in enumerate(evaluated):
        pair = evaluations[len(prefixes) * number :][: len(prefixes)]
        pairs.append(pair)
        for prefix, evaluation in zip(prefixes, pair, strict=True):
            compare_evaluation(config, evaluation, line, prefix)
    first = pairs[0]
    for name, tensor in first[0].weights.items():  # the mean of none
        assert torch.equal(tensor, first[-1].weights[name]), name
    return pairs


def compare_evaluation(config, evaluation, line, prefix):
    """Compare the losses of an evaluation and, but for the mean of weights, its routing."""
    weights = to_double(evaluation.weights)
    wanted, draws = draw_passes(config, evaluation, weights, (), 1.0)
    rounding = ROUNDING[config.train.dtype] / 8
    limit = find_limit(wanted.loss, [draw.loss for draw in draws], rounding) + 1e-6
    if prefix == "val":
        found = torch.tensor(line["val/window_losses"])
        assert_within(found, wanted.loss, limit, "val/window_losses")
        compare_measures(config, wanted.layers, line, "val")
    sets = torch.from_numpy(evaluation.sets)
    mean = 0
    for number, (name, share) in enumerate(config.data.sets.items()):
        loss = wanted.loss[sets == number].mean()
        mean += share * loss
        if config.data.mix:
            value = torch.tensor(line[f"{prefix}/{name}/loss"])
            assert_within(value, loss, limit, f"{prefix} {name}")
    assert_within(torch.tensor(line[f"{prefix}/loss"]), mean, limit, prefix)
    if config.data.mix and prefix == "val":
        weighted = np.multiply(line["val/window_losses"], line["val/window_weights"])
        assert np.mean(weighted) == pytest.approx(line["val/loss"])


def compare_measures(config, layers, line, prefix):
    """Compare what is logged of the routing in `layers`."""
    if not layers:
        assert not any(key.startswith(("router/", "val/loads")) for key in line)
        return
    measured = [reference.measure(layer, config.model.n_expert) for layer in layers]
    assert line[f"{prefix}/loads"] == [values.pop("loads").tolist() for values in measured]
    for name in measured[0]:
        values = [values[name].item() for values in measured]
        # of a training step not all are logged, of an evaluation not all others
        if f"{prefix}/{name}" not in line:
            assert name == {"val": "entropy", "router": "balance_loss"}[prefix]
            continue
        assert line[f"{prefix}/{name}_of_layers"] == pytest.approx(values, rel=1e-4, abs=1e-6), name
        total = sum(values) if name == "dead_experts" else np.mean(values)
        assert line[f"{prefix}/{name}"] == pytest.approx(total, rel=1e-4, abs=1e-6), name


def compare_updates(config, optimizer, step, after, rate, line):
    """Compare the change of each weight."""
    before = {name: step.weights[name].double() for name in step.gradients}
    wanted, norm = optimizer.step(before, step.gradients, rate)
    assert line["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, tensor in wanted.items():
        ratio, _, _ = reference.find_group(config, name, tensor.dim())
        moved = tensor - before[name]
        found = after[name].double() - before[name]
        # a weight is rounded to float32, and its change with it
        limit = 1e-3 * max(moved.norm().item(), 1e-3 * before[name].norm().item())
        assert_within(found, moved, limit, name)
        assert ratio or torch.equal(after[name].double(), before[name]), name


def compare_passes(config, step, weights, line):
    """Compare losses and gradients.

    Returns:
        The routing of each layer in all micro-batches; None if the gradients overflowed.
    """
    has_overflowed = not all(gradient.isfinite().all() for gradient in step.gradients.values())
    # The reference sums in another order: at twice the scale it has to overflow, too, or at half of
    # it not.
    scale = step.scale * (2 if has_overflowed else 0.5)
    wanted, draws = draw_passes(config, step, weights, step.gradients, scale)
    rounding = ROUNDING[config.train.dtype]
    for name in ("loss", "aux_loss"):
        value = getattr(wanted, name).mean()
        errors = [getattr(draw, name).mean() for draw in draws]
        limit = find_limit(value, errors, rounding / 8) + 1e-6
        assert_within(torch.tensor(line[f"train/{name}"]), value, limit, name)
    compare_measures(config, wanted.layers, line, "router")
    for number, layer in enumerate(wanted.layers):
        own = [draw.layers[number].own_logits for draw in draws]
        limit = find_limit(layer.own_logits, own, rounding)
        assert_within(layer.logits, layer.own_logits, limit, f"logits of layer {number}")
    check_choices(config, step, weights, wanted.layers)
    if has_overflowed:
        assert not any(draw.is_finite() for draw in draws)
        return None
    assert all(draw.is_finite() for draw in draws)
    size = math.sqrt(sum(g.norm().item() ** 2 for g in wanted.gradients.values()))
    for name, gradient in wanted.gradients.items():
        limit = find_limit(gradient, [draw.gradients[name] for draw in draws], rounding)
        assert_within(step.gradients[name], gradient, limit + 0.01 * rounding * size, name)
    return wanted.layers


def draw_passes(config, passes, weights, names, scale):
    """The reference's passes, exact, and several with other rounding errors in half precision."""
    step_loads = []
    for choices in zip(*passes.choices, strict=True):
        chosen = torch.cat([choice.experts for choice in choices])
        step_loads.append(reference.count_loads(chosen, config.model.n_expert))
    run = partial(run_passes, config, passes, weights, step_loads, names)
    draws = []
    if config.train.dtype != "float32":
        dtype = getattr(torch, config.train.dtype)
        draws = [run(reference.Cast(dtype, scale, seed)) for seed in range(DRAWS)]
    return run(reference.EXACT), draws


def check_choices(config, step, weights, layers):
    """Experts are the best, or those of a hash layer's table."""
    ids = torch.cat([x.flatten() for x, _ in step.batches])
    routed = [name for name in step.weights if name.endswith("router.selection_bias")]
    for number, (name, layer) in enumerate(zip(routed, layers, strict=True)):
        table = step.weights.get(name.replace("selection_bias", "hash_table"))
        assert (table is not None) == (number < config.model.n_hash_layer)
        if table is not None:
            assert torch.equal(layer.chosen, table[ids]), name
        else:
            assert_best(layer, weights[name].detach(), name)


def compare_biases(config, step, after, layers):
    routed = [name for name in after if name.endswith("router.selection_bias")]
    for number, name in enumerate(routed):
        before = step.weights[name].double()
        wanted = before
        if number >= config.model.n_hash_layer:
            layer = layers[number]
            wanted = reference.move_bias(before, config, layer.chosen, layer.scores)
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
    rng = np.random.default_rng(0)
    for number, name in enumerate(("loss", "val")):
        letters = 97 + 13 * number + rng.integers(13, size=(2, 4000))
        ends = rng.random((2, 4000)) < 1 / 12
        train_ids, val_ids = np.where(ends, ByteTokenizer.eot, letters)
        write_ids(folder / name, train_ids, val_ids[:250], name=name)
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
    config = load(
        folder,
        10_000 + number,
        row,
        "model.router=softmax-l2",
        "train.max_steps=2",
        "optim.schedule=cosine",
        "train.bias_update=sign",
    )
    run(config)
    return [f"train.init_from={folder / 'runs' / config.run.name}"]


ROWS = cover(FEATURES)
HALF = [number for number, row in enumerate(ROWS) if row["dtype"] != "32"]
# Half precision takes five times as long as float32, and the first rows cover most pairs.
MARKED = dict.fromkeys(HALF[N_HALF:], [pytest.mark.integration])


@pytest.mark.numerics
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=MARKED.get(number, [])) for number in range(len(ROWS))]
)
def test_every_step_is_the_references(folder, number, monkeypatch):
    monkeypatch.setattr(match_gates, "TOKENS", 512)  # for tests of accuracy: test_swap.py
    monkeypatch.setattr(updates, "GROWTH_INTERVAL", GROWTH_INTERVAL)
    monkeypatch.setattr("runtime.optimizers.BATCH", 1300)  # two parameters of attention at once
    row = ROWS[number]
    if row["copies"] == "kernel":
        choose = partial(choose_backend, "triton")
        monkeypatch.setattr("runtime.optimizers.choose_backend", lambda _, *args: choose(*args))
    config = load(folder, number, row, *find_start(folder, number, row))
    recorder = record(config, 2 if row["stop"] == "once" else 0)
    compare(config, recorder, metrics(config))
