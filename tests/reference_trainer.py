"""A plain trainer in float64, written from the documents: what a step of train.py must compute.

It shares no code with the project. Of a run it is given the parsed settings, its weights, its
batches, its routers' logits and the experts that its tokens chose; it computes losses and gradients
by autograd, each parameter's rate, decay and update, the selection bias and the mean of the
weights. Given a `Cast`, it rounds where autocast does: how far that moves a result is the error
that a type allows.

Logits are given because gates are not smooth: near 0 rounding turns KERN's ReLU on and off, and the
gradient of kern-after grows without limit.

Weights are in float64, by the names of GPT.state_dict().
Shapes: B sequences, T positions, C channels, N = B·T tokens, E experts, K of them chosen, H hidden.
"""

import math
from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-8


class Choice(NamedTuple):
    """What a router of the run computed."""

    logits: Tensor  # (N, E) float64
    experts: Tensor  # (N, K) int64


class Layer(NamedTuple):
    """The routing of a layer with experts."""

    own_logits: Tensor  # (N, E), from the layer's input
    logits: Tensor  # (N, E), the run's, with the gradient of own_logits
    scores: Tensor  # (N, E)
    gates: Tensor  # (N, K)
    chosen: Tensor  # (N, K) int64


# ---- half precision
class Cast:
    """Rounds a value to `dtype` on the way forward, and its gradient times `scale` on the way back.

    Each number is first moved by up to half a unit of rounding, so that every seed draws another
    error, where a sum in another order would be rounded to another side.
    """

    def __init__(self, dtype, scale, seed):
        self.dtype = dtype
        self.scale = scale
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        return x if self.dtype == torch.float64 else _Rounding.apply(x, self)

    def scaled(self, scale):
        """The same, but for the gradients' scale."""
        cast = copy(self)
        cast.scale = scale
        return cast

    def round(self, x, scale=1.0):
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 0.5
        moved = x * (1 + torch.finfo(self.dtype).eps * noise)
        return (moved * scale).to(self.dtype).double() / scale


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cast):
        ctx.cast = cast
        return cast.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.cast.round(gradient, ctx.cast.scale), None


EXACT = Cast(torch.float64, 1.0, 0)  # no rounding


# ---- the model
def divide(top, s, p):
    """Scores (N, K) over the p-norm of scores (N, …)."""
    return top / (torch.linalg.vector_norm(s, p, -1, keepdim=True) + EPS)


# {router: (scores from logits (N, E), gates from scores, logits and chosen logits (N, K))}
ROUTERS = {
    "softmax": (lambda s: s.softmax(-1), lambda s, top: top.exp() / s.exp().sum(-1, keepdim=True)),
    "sigmoid-renorm": (torch.sigmoid, lambda s, top: divide(top.sigmoid(), top.sigmoid(), 1)),
    "kern": (lambda s: divide(s.relu(), s, 2), lambda s, top: divide(top.relu(), s, 2)),
    "kern-after": (torch.clone, lambda s, top: divide(top.relu(), top, 2)),
    "tanh, post=l2 over topk, gamma, c=2": (
        torch.tanh,
        lambda s, top: divide(top.tanh(), top.tanh(), 2),
    ),
}


class ReviveDead(torch.autograd.Function):
    """The identity on gates (N, K); a token whose gates are all 0 raises its mean logit (N, 1)."""

    @staticmethod
    def forward(ctx, gates, mean_logit):
        ctx.dead = (gates == 0).all(-1, keepdim=True)
        return gates.clone()

    @staticmethod
    def backward(ctx, d_gates):
        pull = d_gates.mean(-1, keepdim=True).clamp_max(0)
        return d_gates, pull * ctx.dead


def normalize(x, weights, name, model):
    """LayerNorm or RMSNorm over the last dimension."""
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], model.norm_eps)
    return x + weights.get(f"{name}.bias", 0)


def multiply(x, weights, name, cast=EXACT):
    out = cast(x) @ cast(weights[f"{name}.weight"]).T
    return cast(out + weights.get(f"{name}.bias", 0))


def activate(hidden, model):
    """Hidden units from pre-activations (…, H), or (…, 2H) if gated: the gate first."""
    gate, up = hidden.chunk(2, -1) if model.gated else (hidden, 1)
    return getattr(F, model.activation)(gate) * up


def rotate(x, positions, base):
    """Turn the channel pairs (i, i + half) of x (B, nh, T, hs)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, :, None] * frequency  # (B, 1, T, half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def attend(x, weights, name, model, positions, visible, cast):
    """Attention with its projections, x (B, T, C), of keys that `visible` (B, T, T) allows."""
    B, T, C = x.shape
    size = C // model.n_head
    n_kv = model.n_kv_head or model.n_head
    q, k, v = multiply(x, weights, f"{name}.qkv", cast).split([C, n_kv * size, n_kv * size], -1)
    heads = []
    for part, norm in ((q, "q_norm"), (k, "k_norm"), (v, None)):
        if norm and model.qk_norm == "all":
            part = normalize(part, weights, f"{name}.{norm}", model)
        part = part.view(B, T, -1, size).transpose(1, 2)  # (B, heads, T, size)
        if norm and model.qk_norm == "head":
            part = normalize(part, weights, f"{name}.{norm}", model)
        if norm and model.pos == "rope":
            part = rotate(part, positions, model.rope_base)
        heads.append(cast(part))
    own = torch.arange(model.n_head) // (model.n_head // n_kv)  # a head's keys and values
    q, k, v = heads[0], heads[1][:, own], heads[2][:, own]
    scores = (q @ k.mT / math.sqrt(size)).masked_fill(~visible[:, None], -math.inf)
    shares = scores.softmax(-1)  # (B, nh, T, T)
    out = cast(shares) @ v
    return multiply(out.transpose(1, 2).flatten(2), weights, f"{name}.proj", cast)


def mix_experts(x, weights, name, model, choice, cast):
    """The output (N, C) of a mixture for tokens x (N, C), and its routing."""
    own_logits = multiply(x, weights, f"{name}.router")
    logits = own_logits + (choice.logits - own_logits).detach()
    chosen = choice.experts
    find_scores, find_gates = ROUTERS[model.router]
    gates = find_gates(logits, logits.gather(1, chosen))
    if model.router.startswith("kern"):
        gates = ReviveDead.apply(gates, logits.mean(-1, keepdim=True))
    gates = gates * weights[f"{name}.router.c"] * weights.get(f"{name}.router.gamma", 1)
    w_in = cast(weights[f"{name}.experts.w_in"])[chosen]  # (N, K, C, H)
    w_out = cast(weights[f"{name}.experts.w_out"])[chosen]
    hidden = cast(activate(cast(torch.einsum("nc,nkch->nkh", cast(x), w_in)), model))
    out = cast(torch.einsum("nkh,nkhc->nkc", hidden, w_out))
    y = cast((gates[..., None] * out).sum(1))
    if model.n_shared_expert:
        hidden = activate(multiply(x, weights, f"{name}.shared.w_in", cast), model)
        y = y + multiply(hidden, weights, f"{name}.shared.w_out", cast)
    return y, Layer(own_logits, logits, find_scores(logits), gates, chosen)


def compute_loss(config, weights, x, y, choices, end_of_text, cast=EXACT):
    """Cross-entropy (B,) of inputs x and targets y (B, T), and the routing of each layer."""
    model = config.model
    position = torch.arange(x.shape[1])
    document = (x == end_of_text).cumsum(1) * config.data.document_mask  # number in its row
    same = document[:, :, None] == document[:, None]  # (B, T, T)
    visible = same & (position <= position[:, None])
    positions = visible.sum(-1) - 1  # in the document
    stream = weights["wte.weight"][x]
    if model.pos == "learned":
        stream = stream + weights["wpe.weight"][positions]
    layers = []
    for i in range(model.n_layer):
        block = f"blocks.{i}"
        inner = normalize(stream, weights, f"{block}.ln_1", model)
        name = f"{block}.attn"
        stream = stream + attend(inner, weights, name, model, positions, visible, cast)
        inner = normalize(stream, weights, f"{block}.ln_2", model)
        if f"{block}.mlp.router.weight" in weights:
            tokens = inner.flatten(0, 1)
            choice = choices[len(layers)]
            out, layer = mix_experts(tokens, weights, f"{block}.mlp", model, choice, cast)
            layers.append(layer)
            stream = stream + out.view_as(stream)
        else:
            hidden = activate(multiply(inner, weights, f"{block}.mlp.w_in", cast), model)
            stream = stream + multiply(hidden, weights, f"{block}.mlp.w_out", cast)
    head = weights["wte.weight"] if model.tie_embeddings else weights["lm_head.weight"]
    # the LM head's gradients are those of the sum over tokens, without the loss scale
    cast = cast.scaled(x.numel())
    logits = cast(cast(normalize(stream, weights, "ln_f", model)) @ cast(head).T)
    return F.cross_entropy(logits.mT, y, reduction="none").mean(1), layers


def count_loads(chosen, n_expert):
    """Tokens that chose each expert: chosen (…, K) -> (E,) float64."""
    return torch.bincount(chosen.flatten(), minlength=n_expert).double()


def find_shares(scores):
    """The scores (N, E), without those below 0, as shares of a token's sum."""
    positive = scores.clamp_min(0)
    return positive / (positive.sum(-1, keepdim=True) + EPS)


def compute_auxiliary(config, layers, step_loads):
    """Weighted balance and z-losses, mean over layers; `step_loads` (L, E) are the whole step's."""
    train, model = config.train, config.model
    balance = []
    z = []
    for number, layer in enumerate(layers):
        z.append(layer.logits.logsumexp(-1).pow(2).mean())
        if number < model.n_hash_layer:
            continue
        shares = find_shares(layer.scores).view(-1, model.block_size, model.n_expert)
        for row, chosen in zip(shares, layer.chosen.split(model.block_size), strict=True):
            loads = {
                "sequence": count_loads(chosen, model.n_expert),
                "micro_batch": count_loads(layer.chosen, model.n_expert),
                "global": step_loads[number],
            }[train.balance_loss_scope]
            balance.append(model.n_expert * (loads / loads.sum() * row.mean(0)).sum())
    if not layers:
        return torch.zeros(())
    return (
        train.balance_loss_coef * torch.stack(balance).mean()
        + train.z_loss_coef * torch.stack(z).mean()
    )


def measure(layer, n_expert):
    """What is logged of a layer's tokens, () each but for loads (E,)."""
    shares = find_shares(layer.scores)
    loads = count_loads(layer.chosen, n_expert)
    return {
        "loads": loads,
        "load_imbalance": loads.max() / loads.mean(),
        "dead_experts": (loads == 0).sum(),
        "balance_loss": n_expert * (loads / loads.sum() * shares.mean(0)).sum(),
        "entropy": torch.special.entr(shares).sum(-1).mean(),
        "zero_gates": (layer.gates == 0).double().mean(),
        "gate_norm": layer.gates.pow(2).sum(-1).mean().sqrt(),
        "gate_sum": layer.gates.sum(-1).mean(),
    }


# ---- the optimizer
def find_rate(config, step):
    """The learning rate of step `step`, from 0."""
    optim, steps = config.optim, config.train.max_steps
    if step < optim.warmup_steps:
        return optim.lr / optim.warmup_steps * (step + 1)
    if optim.schedule == "cosine":
        part = (step - optim.warmup_steps) / (steps - optim.warmup_steps)
        height = math.cos(math.pi / 2 * part) ** 2
    else:
        decay = round(optim.decay_fraction * steps)
        part = max(0.0, (step - (steps - decay)) / decay)
        height = 1 - part
    lowest = optim.lr * optim.min_lr_ratio
    return lowest + (optim.lr - lowest) * height


def find_group(config, name, dim):
    """Factor on the rate, decay, and whether Muon trains the parameter."""
    optim = config.optim
    is_router = ".router." in name
    ratio = 1.0
    if is_router:
        ratio = optim.router_lr_ratio
    elif name.endswith("experts.w_out"):
        ratio = optim.expert_out_lr_ratio
    by_muon = optim.name == "muon" and dim > 1 and "blocks" in name and not is_router
    if "experts" in name:
        by_muon = by_muon and optim.muon_experts
    return ratio, optim.weight_decay if dim > 1 else 0.0, by_muon


def orthogonalize(matrix):
    """Five steps of Muon's quintic on the singular values of matrices (…, A, B)."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.pow(2).sum(-1, keepdim=True).sqrt().clamp_min(1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ (s[..., None] * v)


def find_direction(config, name, matrix):
    """Muon's step at rate 1: q, k, v, and gate and up, are matrices of their own."""
    model = config.model
    is_expert = ".experts." in name
    if is_expert and name.endswith("w_in"):  # stored as (E, in, out)
        matrix = matrix.mT
    sizes = [matrix.shape[-2]]
    if "qkv" in name:
        kv = (model.n_kv_head or model.n_head) * (model.n_embd // model.n_head)
        sizes = [model.n_embd, kv, kv]
    elif "w_in" in name and model.gated:
        sizes = [matrix.shape[-2] // 2] * 2
    parts = []
    for part in matrix.split(sizes, -2):
        parts.append(0.2 * max(part.shape[-2:]) ** 0.5 * orthogonalize(part))
    step = torch.cat(parts, -2)
    return step.mT if is_expert and name.endswith("w_in") else step


class Optimizer:
    """AdamW and Muon in float64, with moments of their own."""

    def __init__(self, config):
        self.config = config
        self.n_step = 0
        self.first = {}
        self.second = {}

    def step(self, weights, gradients, rate):
        """The weights after a step with unclipped gradients; and the gradients' norm."""
        optim = self.config.optim
        self.n_step += 1
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        clip = min(1.0, optim.grad_clip / norm) if optim.grad_clip else 1.0
        after = {}
        for name, gradient in gradients.items():
            ratio, decay, by_muon = find_group(self.config, name, gradient.dim())
            b1 = 0.95 if by_muon else optim.beta1
            g = gradient * clip
            m = b1 * self.first.get(name, 0) + (1 - b1) * g
            self.first[name] = m
            if by_muon:
                direction = find_direction(self.config, name, b1 * m + (1 - b1) * g)
            else:
                v = optim.beta2 * self.second.get(name, 0) + (1 - optim.beta2) * g * g
                self.second[name] = v
                size = (v / (1 - optim.beta2**self.n_step)).sqrt() + optim.eps
                direction = m / (1 - b1**self.n_step) / size
            after[name] = weights[name] - rate * ratio * (decay * weights[name] + direction)
        return after, norm


def move_bias(bias, config, layer_chosen, layer_scores):
    """β (E,) after a step, from all of its tokens: chosen (N, K), scores (N, E)."""
    train, model = config.train, config.model
    if train.bias_update == "sign":
        loads = count_loads(layer_chosen, model.n_expert)
        return bias + train.bias_update_rate * (loads.mean() - loads).sign()
    shifted = layer_scores + bias
    threshold = shifted.sort(-1, descending=True).values[:, model.top_k, None]
    margins = (threshold - shifted).sort(0).values  # (N, E)
    share = len(margins) * model.top_k // model.n_expert  # tokens of each expert if balanced
    new = bias + margins[share - 1]
    return new - new.mean()
