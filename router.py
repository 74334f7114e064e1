"""Routers: one formula, one line of data per router, and the losses that balance experts.

    g = c · γ · post( φ( pre(W x + b) ) ) · 1[ m ∈ TopK(scores + β) ]

KERN ("Understanding the Mixture-of-Experts with Nadaraya-Watson Kernel", arXiv 2509.25913, Sec. 3.4) is φ = relu after
an l2 norm over all logits, times a learnable γ. To add a router, add a line to ROUTERS; every config, sweep and test
then knows its name.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

EPS = 1e-8  # the paper's ε; 0 in float16, one reason why routers compute in float32

PHI = {
    "identity": lambda s: s,
    "relu": F.relu,
    "exp": lambda s: (s - s.detach().amax(-1, keepdim=True)).exp(),  # up to a factor, which the post norm removes
    "sqrtexp": lambda s: (0.5 * (s - s.detach().amax(-1, keepdim=True))).exp(),
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "sqrtsoftplus": lambda s: F.softplus(s).clamp_min(1e-30).sqrt(),  # sqrt has no gradient at 0
}
NORMS = ("none", "l1 over all", "l2 over all", "l1 over topk", "l2 over topk")


@dataclass(frozen=True)
class RouterSpec:
    """One router as data: the terms of the formula above.

    Norms run over `all` E logits or over the `topk` survivors. With `pre` over topk the survivors are picked by their
    raw logits. c is a number, or "monte_carlo" (`monte_carlo_scale`).

    Raises:
        ValueError: an unknown φ or norm, or a combination that means nothing.
    """

    phi: str
    pre: str = "none"
    post: str = "none"
    gamma: bool = False  # a learnable scalar γ, initially 1
    bias: bool = False  # the router bias b, initially 0
    c: float | str = 1.0

    def __post_init__(self):
        if self.phi not in PHI:
            raise ValueError(f"phi {self.phi!r} is not one of {', '.join(PHI)}")
        for norm in (self.pre, self.post):
            if norm not in NORMS:
                raise ValueError(f"norm {norm!r} is not one of: {'; '.join(NORMS)}")
        if "exp" in self.phi and self.post == "none":
            raise ValueError(f"phi {self.phi!r} is computed up to a factor and needs a post norm")
        if self.c == "monte_carlo" and (self.phi, self.pre) != ("relu", "l2 over all"):
            raise ValueError("c = 'monte_carlo' is the constant of phi 'relu' after pre 'l2 over all'")


KERN = RouterSpec("relu", pre="l2 over all", gamma=True, bias=True)

ROUTERS: dict[str, RouterSpec | None] = {
    "dense": None,  # no router: one MLP of hidden top_k · expert_hidden, equal active parameters (paper's baseline)
    "softmax": RouterSpec("exp", post="l1 over all"),  # paper's baseline; Switch, OLMoE
    "sigmoid": RouterSpec("sigmoid"),  # paper's baseline
    "tanh": RouterSpec("tanh"),  # paper's baseline
    "kern": KERN,  # the paper's router, Sec. 3.4
    "kern-norelu": replace(KERN, phi="identity"),  # App. "The Effect of ReLU"
    "kern-after": replace(KERN, pre="l2 over topk"),  # App. "The Importance of Considering All Router Logit"
    "kern-mc": replace(KERN, c="monte_carlo"),  # App. "The Effect of KERN Initialization"
    "kern-nogamma": replace(KERN, gamma=False),  # control: is it the learnable scale?
    "kern-nobias": replace(KERN, bias=False),  # the paper's formula has b, its listing shows none
    "softmax-renorm": RouterSpec("exp", post="l1 over topk"),  # Mixtral
    "sigmoid-renorm": RouterSpec("sigmoid", post="l1 over topk"),  # DeepSeek-V3, with train.bias_update_rate
    "sqrtsoftplus": RouterSpec("sqrtsoftplus", post="l1 over topk"),  # DeepSeek-V4, with train.bias_update_rate
    "softmax-l2": RouterSpec("exp", post="l2 over all"),  # control: KERN's norm with softmax's φ
    "sqrtgate": RouterSpec("sqrtexp", post="l2 over topk"),  # control for scale: √softmax over topk, so Σ g² = 1
}


class Routing(NamedTuple):
    """What a router decides for N tokens. All but `experts` in fp32 (fp64 for fp64 inputs)."""

    weights: torch.Tensor  # (N, K) gates of the chosen experts
    experts: torch.Tensor  # (N, K) int64, distinct per token, by falling score
    scores: torch.Tensor  # (N, E) what experts are chosen by, before c, γ and β
    logits: torch.Tensor  # (N, E) W x + b


class Router(nn.Module):
    """x (N, C) -> Routing. Always in fp32, autocast off: in fp16 squares overflow at 256 and ε is 0, so zero logits
    give NaN.

    Ties go to the lower index. A token with no positive KERN score gets gates of exactly 0: its MoE output is 0, the
    residual stream passes it on. `DeadTokenGradient` has the router's gradient from it. `selection_bias` (β) shifts
    the choice of experts, never the gates, and has no gradient (DeepSeek-V3, arXiv 2412.19437, Sec. 2.1.2); it stays
    0 unless `update_selection_bias` is called. `gate_scale` is a factor of c: a control for the gates' initial scale.
    """

    def __init__(self, n_embd, n_expert, top_k, spec, gate_scale=1.0):
        super().__init__()
        if not 1 <= top_k <= n_expert:
            raise ValueError(f"top_k {top_k} must lie between 1 and n_expert {n_expert}")
        self.top_k = top_k
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(n_expert, n_embd))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(n_expert)) if spec.bias else None
        self.gamma = nn.Parameter(torch.ones(1)) if spec.gamma else None
        c = gate_scale * (monte_carlo_scale(n_expert, top_k) if spec.c == "monte_carlo" else spec.c)
        self.unscaled = c == 1 and not spec.gamma
        self.register_buffer("c", torch.tensor([c], dtype=torch.float32))
        self.register_buffer("selection_bias", torch.zeros(n_expert))

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = F.linear(x.to(dtype), self.weight.to(dtype), bias)  # (N, E)
            phi = PHI[self.spec.phi]
            if self.spec.pre.endswith("topk"):
                scores = logits
                experts = top_k_indices(scores + self.selection_bias, self.top_k)
                weights = phi(normalize(logits.gather(-1, experts), self.spec.pre))
            else:
                scores = phi(normalize(logits, self.spec.pre))
                if self.spec.post.endswith("all"):
                    scores = normalize(scores, self.spec.post)
                experts = top_k_indices(scores + self.selection_bias, self.top_k)
                weights = scores.gather(-1, experts)
            if self.spec.post.endswith("topk"):
                weights = normalize(weights, self.spec.post)
            if self.spec.phi == "relu":
                weights = DeadTokenGradient.apply(weights, logits)
            factor = self.c.to(dtype) if self.gamma is None else self.c.to(dtype) * self.gamma.to(dtype)
            if not self.unscaled:
                weights = weights * factor
            return Routing(weights, experts, scores, logits)

    def extra_repr(self):
        return f"top_k={self.top_k}, {self.spec}"


class DeadTokenGradient(torch.autograd.Function):
    """weights (N, K), logits (N, E) -> weights, unchanged. Backward, a token whose gates are all 0 lifts its logits.

    ReLU gives such a token no gradient, so a router without a positive score would be dead for ever. But the gates'
    own gradients tell whether more of the chosen experts would lower the loss. Where they do in the mean, that mean
    goes to the mean of the E logits: all rise alike, in the order they are in, until the best is positive and plain
    ReLU takes over. Not through the norm, which no common shift passes, and never downwards, where gates stay 0.

    Ours, the paper is silent; docs/paper.md has the measurements. At initialisation a token has no positive score with
    probability 2^-E, so at the paper's 64 experts nothing changes: other tokens' gradients get exactly 0 added.
    """

    @staticmethod
    def forward(ctx, weights, logits):
        ctx.save_for_backward(weights)
        ctx.n_expert = logits.shape[-1]
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, d_weights):
        (weights,) = ctx.saved_tensors
        dead = weights.sum(-1, keepdim=True) == 0
        rise = d_weights.sum(-1, keepdim=True).clamp_max(0)  # below 0: descent raises logits
        rise = torch.where(dead, rise / (weights.shape[-1] * ctx.n_expert), 0)
        return d_weights, rise.expand(-1, ctx.n_expert)


def normalize(s, norm):
    """s / (‖s‖ + ε) over the last dimension, by the norm that `norm` begins with."""
    if norm == "none":
        return s
    if norm.startswith("l1"):
        return s / (s.abs().sum(-1, keepdim=True) + EPS)
    return L2.apply(s)


class L2(torch.autograd.Function):
    """s / (‖s‖₂ + ε) over the last dimension. By hand, in 14 operators where autograd takes 20. Squares are summed in
    fp64: in fp32 those of logits beyond 1e19 overflow."""

    @staticmethod
    def forward(ctx, s):
        norm = torch.linalg.vector_norm(s, dim=-1, keepdim=True, dtype=torch.float64)
        norm = norm.clamp_max_(torch.finfo(s.dtype).max).to(s.dtype)
        out = s / (norm + EPS)
        ctx.save_for_backward(out, norm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        out, norm = ctx.saved_tensors
        along = (d_out * out).sum(-1, keepdim=True) * ((norm + EPS) / norm.clamp_min(1e-30))  # 0 where s is 0
        return torch.addcmul(d_out, out, along, value=-1) / (norm + EPS)


@torch.no_grad()
def top_k_indices(scores, k):
    """(N, E) -> (N, k) int64 indices of the largest scores, largest first; ties go to the lower index.

    torch.topk leaves the order of ties open. Here each fp32 score becomes an integer of the same order with the index
    below it, so no two are equal; a stable sort gives the same and took 2.8 times as long on a CPU (docs/LOG.md).
    """
    n = scores.shape[-1]
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 a 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement sorts like the floats
    index = torch.arange(n - 1, -1, -1, device=scores.device)
    return torch.topk((order.long() << 32) | index, k, dim=-1).indices


@cache
def monte_carlo_scale(n_expert, top_k, samples=200_000, seed=0):
    """The paper's Monte-Carlo constant (App. "Implementation Details"): E[1 / ‖top_k of relu(y)‖₂], y uniform on the
    unit sphere.

    With it gates have about unit l2 norm at initialisation; (64, 8) gives 1.713. Mended against the listing: drawn from
    a seeded generator, so that every rank has the same constant, and averaged over the samples with a positive score,
    where the listing gives inf (one sample in 2^n_expert has none). Strictly the expectation is infinite for any
    number of experts (docs/theory.md): that of samples whose positive scores are all near 0. At 32 experts and more
    they are too rare to matter; below some 16 the mean is finite and repeatable, but no scale to trust.

    Returns a float.
    """
    generator = torch.Generator().manual_seed(seed)
    total, count = 0.0, 0
    for _ in range(20):
        y = torch.randn(samples // 20, n_expert, generator=generator, device="cpu")
        kept = normalize(y, "l2 over all").relu().topk(top_k).values
        norms = torch.linalg.vector_norm(kept, dim=-1)
        norms = norms[norms > 0]
        total, count = total + (1 / norms).sum().item(), count + len(norms)
    return total / count


class NormRouter(nn.Module):
    """The paper's module as listed (App. "Implementation Details"): logits (..., E) in, scores (..., E) out; top-k is
    the caller's.

    A drop-in for `logits.softmax(-1)` in other codebases. `initial_method` is "one" or "monte_carlo".
    """

    def __init__(self, initial_method="one", total_expert=64, top_k=8, eps=EPS):
        super().__init__()
        if initial_method not in ("one", "monte_carlo"):
            raise ValueError(f"initial_method {initial_method!r} is not 'one' or 'monte_carlo'")
        c = monte_carlo_scale(total_expert, top_k) if initial_method == "monte_carlo" else 1.0
        self.register_buffer("scale_initial", torch.tensor([c], dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, logits):
        with torch.autocast(logits.device.type, enabled=False):
            s = logits.to(torch.promote_types(logits.dtype, torch.float32))
            s = s / (torch.linalg.vector_norm(s, dim=-1, keepdim=True) + self.eps)
            return self.scale * self.scale_initial * s.relu()


def expert_loads(experts, n_expert):
    """(N, K) chosen experts -> (E,) int64, the number of tokens that chose each."""
    flat = experts.flatten()
    return torch.zeros(n_expert, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def token_distribution(routing):
    """(N, E) routing scores, negative ones cut off, normalised to sum to 1 per token. For softmax these are its
    probabilities."""
    positive = routing.scores.relu()
    return positive / (positive.sum(-1, keepdim=True) + EPS)


def balance_loss(distribution, loads):
    """Load-balancing loss of Switch (arXiv 2101.03961, eq. 4): E · Σ_e f_e P_e, 1 when balanced, E when one expert
    takes all.

    f_e is the share of the N·K choices that fell on expert e (`loads`, (E,), no gradient), P_e the mean of
    `token_distribution` (N, E): scores are normalised per token, so the loss moves scores against each other and cannot
    push KERN's γ or scale down.
    """
    share = loads.to(distribution.dtype) / loads.sum()
    return len(loads) * torch.dot(share, distribution.mean(0))


@torch.no_grad()
def entropy(distribution):
    """Mean over tokens of the entropy of `token_distribution` (N, E), in nats."""
    return -(distribution * distribution.clamp_min(1e-30).log()).sum(-1).mean()


def z_loss(routing):
    """Router z-loss of ST-MoE (arXiv 2202.08906, eq. 5): the mean over tokens of logsumexp(logits)²."""
    return torch.logsumexp(routing.logits, dim=-1).square().mean()


@torch.no_grad()
def update_selection_bias(selection_bias, loads, rate):
    """β_e += rate · sign(mean load - load of e), in place (DeepSeek-V3, arXiv 2412.19437, Sec. 2.1.2): once per
    optimizer step, with `loads` (E,) summed over all its tokens on all ranks."""
    loads = loads.to(selection_bias.dtype)
    selection_bias.add_(rate * torch.sign(loads.mean() - loads))
