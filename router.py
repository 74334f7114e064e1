"""Routers: one formula, one line of data per router, and the losses that balance the experts' loads.

    g = c · γ · post( φ( pre(W x + b) ) ) · 1[ m ∈ TopK(scores + β) ]

KERN ("Understanding the Mixture-of-Experts with Nadaraya-Watson Kernel", arXiv 2509.25913, Sec.
3.4) is φ = relu after an l2 norm over all logits, times a learnable γ. To add a router, add one
line to ROUTERS: configs, sweeps and tests find its name there.

Shapes: N tokens, C = n_embd, E experts, K = top_k. This file imports only torch, so that exported
models can ship it.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = 1e-8  # the paper's ε; it rounds to 0 in float16, one reason why routers compute in float32

PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda s: s,
    "relu": F.relu,
    # scaled per token; the post norm removes the scale
    "exp": lambda s: (s - s.detach().amax(-1, keepdim=True)).exp(),
    "sqrtexp": lambda s: (0.5 * (s - s.detach().amax(-1, keepdim=True))).exp(),
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    # sqrt has an infinite gradient at 0
    "sqrtsoftplus": lambda s: F.softplus(s).clamp_min(1e-30).sqrt(),
}
NORMS = ("none", "l1 over all", "l2 over all", "l1 over topk", "l2 over topk")


@dataclass(frozen=True)
class RouterSpec:
    """One router as data: the terms of the formula above.

    A norm is over `all` E logits or over the `topk` chosen ones. With `pre` over topk, experts are
    chosen by their raw logits. c is a number, or "monte_carlo" for `monte_carlo_scale`.

    Raises:
        ValueError: an unknown φ or norm, or a combination that has no meaning.
    """

    phi: str
    pre: str = "none"
    post: str = "none"
    gamma: bool = False  # a learnable scalar γ, initialised to 1
    bias: bool = False  # the router bias b, initialised to 0
    c: float | Literal["monte_carlo"] = 1.0

    def __post_init__(self) -> None:
        if self.phi not in PHI:
            raise ValueError(f"phi {self.phi!r} is not one of {', '.join(PHI)}")
        for norm in (self.pre, self.post):
            if norm not in NORMS:
                raise ValueError(f"norm {norm!r} is not one of: {'; '.join(NORMS)}")
        if "exp" in self.phi and self.post == "none":
            raise ValueError(f"phi {self.phi!r} is computed up to a factor and needs a post norm")
        if self.c == "monte_carlo" and (self.phi, self.pre) != ("relu", "l2 over all"):
            raise ValueError(
                "c = 'monte_carlo' is the constant of phi 'relu' after pre 'l2 over all'"
            )

    @property
    def ignores_shift(self) -> bool:
        """Whether a number added to all logits of a token changes nothing: φ subtracts the largest first."""
        return "exp" in self.phi and self.pre == "none"

    @property
    def reach(self) -> float:
        """How far apart two scores that experts are chosen by can be; inf if they have no bounds."""
        if self.pre.endswith("topk"):  # they are raw logits
            return math.inf
        if self.post.endswith("all") or self.phi in ("exp", "sqrtexp", "sigmoid", "tanh"):
            return 2.0 if self.phi in ("identity", "tanh") else 1.0
        if self.pre == "none":
            return math.inf
        low, high = PHI[self.phi](torch.tensor([-1.0, 1.0], device="cpu")).tolist()  # every φ rises
        return high - low


KERN = RouterSpec("relu", pre="l2 over all", gamma=True, bias=True)

# A dict literal: configure/schema.py parses its keys from this source without importing torch.
ROUTERS: dict[str, RouterSpec | None] = {
    # no router: one MLP of hidden top_k · expert_hidden, equal active parameters (paper's baseline)
    "dense": None,
    "softmax": RouterSpec("exp", post="l1 over all"),  # paper's baseline; Switch, OLMoE
    "sigmoid": RouterSpec("sigmoid"),  # paper's baseline
    "tanh": RouterSpec("tanh"),  # paper's baseline
    "kern": KERN,  # the paper's router, Sec. 3.4
    "kern-norelu": replace(KERN, phi="identity"),  # App. "The Effect of ReLU"
    # App. "The Importance of Considering All Router Logit"
    "kern-after": replace(KERN, pre="l2 over topk"),
    "kern-mc": replace(KERN, c="monte_carlo"),  # App. "The Effect of KERN Initialization"
    "kern-nogamma": replace(KERN, gamma=False),  # control: the effect of the learnable scale
    "kern-nobias": replace(KERN, bias=False),  # the paper's formula has b, its listing shows none
    "softmax-renorm": RouterSpec("exp", post="l1 over topk"),  # Mixtral
    # DeepSeek-V3, with train.bias_update_rate
    "sigmoid-renorm": RouterSpec("sigmoid", post="l1 over topk"),
    # DeepSeek-V4, with train.bias_update_rate
    "sqrtsoftplus": RouterSpec("sqrtsoftplus", post="l1 over topk"),
    "softmax-l2": RouterSpec("exp", post="l2 over all"),  # control: KERN's norm with softmax's φ
    # control for scale: √softmax over topk, so Σ g² = 1
    "sqrtgate": RouterSpec("sqrtexp", post="l2 over topk"),
}


def find_spec(router: str) -> RouterSpec | None:
    """The spec of a name in ROUTERS, or of a formula such as "tanh, post=l2 over topk, gamma, c=2".

    A formula is φ and, after commas, the terms that differ from RouterSpec's defaults.

    Raises:
        ValueError: it is neither, or the formula has no meaning.
    """
    if router in ROUTERS:
        return ROUTERS[router]
    phi, *terms = (term.strip() for term in router.split(","))
    fields: dict[str, Any] = {}
    for term in terms:
        name, _, value = (part.strip() for part in term.partition("="))
        if name in ("gamma", "bias") and not value:
            fields[name] = True
        elif name in ("pre", "post") and value:
            fields[name] = value
        elif name == "c" and re.fullmatch(r"\d+(\.\d+)?", value):
            fields[name] = float(value)
        elif term == "c=monte_carlo":
            fields[name] = value
        else:
            raise ValueError(
                f"router {router!r}: {term!r} is none of pre=NORM, post=NORM, gamma, bias, c=NUMBER"
            )
    return RouterSpec(phi, **fields)


Fused = Callable[..., tuple[Tensor, ...] | None]  # as `kernels.route`


class Stats(NamedTuple):
    """What a model reports about its routers: a row for each of its L layers with experts, which one layer's lack."""

    loads: Tensor  # (L, B, E) int64, tokens of each sequence that chose each expert
    # (L, B, E) mean over a sequence's tokens of `token_distribution`, with gradient
    probability: Tensor
    z_loss: Tensor  # (L,) router z-loss, with gradient
    entropy: Tensor  # (L,) nats, mean over tokens of the entropy of `token_distribution`
    zero_gates: Tensor  # (L,) fraction of the N·K gates that are exactly 0
    gate_square: Tensor  # (L,) mean over tokens of Σ g², the sum over a token's K gates
    gate_sum: Tensor  # (L,) mean over tokens of Σ g
    # (L, E, MARGIN_BINS) int64, `count_margins`; only for train.bias_update = "quantile"
    margins: Tensor | None = None


class Routing(NamedTuple):
    """What a router decides for N tokens. All but `experts` in fp32 (fp64 for fp64 inputs)."""

    weights: Tensor  # (N, K) gates of the chosen experts
    experts: Tensor  # (N, K) int64, distinct per token, by descending score or as in the hash table
    # (N, E) scores that experts are chosen by, before c, γ and β; no gradient if `fused` made them
    scores: Tensor
    logits: Tensor  # (N, E) W x + b
    stats: Stats | None = None  # if asked for


class Router(nn.Module):
    """Choose K of E experts for every token and weight them by the gates of the formula above.

    It computes in fp32 with autocast off: in fp16, squares overflow at 256 and ε is 0, so zero
    logits give NaN. Ties go to the lower index. A token without a positive KERN score gets gates of
    exactly 0: its MoE output is 0, so the residual stream passes it on, and `DeadTokenGradient`
    supplies the router's gradient.
    """

    c: Tensor  # (1,) constant of the formula, a buffer
    # (E,) β: shifts the choice of experts, never the gates; 0 unless train.bias_update moves it
    selection_bias: Tensor
    # (V, K) int64, the experts of each token id, in a hash layer: a buffer
    hash_table: Tensor | None

    def __init__(
        self,
        n_embd: int,
        n_expert: int,
        top_k: int,
        spec: RouterSpec,
        gate_scale: float = 1.0,
        table: Tensor | None = None,
    ) -> None:
        """Build a router of `spec`; `gate_scale` multiplies c, to control the initial scale of the gates.

        `table`, a `hash_table`, makes it a hash layer's: scores give the gates, and the token's id
        chooses the experts.

        Raises:
            ValueError: top_k is not between 1 and n_expert.
        """
        super().__init__()
        if not 1 <= top_k <= n_expert:
            raise ValueError(f"top_k {top_k} must lie between 1 and n_expert {n_expert}")
        self.top_k = top_k
        self.spec = spec
        self.fused: Fused | None = None  # `kernels.route`: computes the same faster, where it can
        # (N, K) experts that take the place of the choice, see eval/traces.py
        self.replay: Tensor | None = None
        self.counts_margins = False  # whether Stats in training have them
        self.weight = nn.Parameter(torch.empty(n_expert, n_embd))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(n_expert)) if spec.bias else None
        self.gamma = nn.Parameter(torch.ones(1)) if spec.gamma else None
        c = gate_scale * (monte_carlo_scale(n_expert, top_k) if spec.c == "monte_carlo" else spec.c)
        self.register_buffer("c", torch.tensor([c], dtype=torch.float32))
        self.register_buffer("selection_bias", torch.zeros(n_expert))
        self.register_buffer(
            "hash_table", None if table is None else table.to(self.weight.device, copy=True)
        )

    def forward(self, x: Tensor, n_sequence: int = 0, ids: Tensor | None = None) -> Routing:
        """Route tokens x (N, C) of any floating dtype; if the number of their sequences is given, with `stats`.

        `ids` are their N token ids, int64 of any shape, which hash layers need.
        """
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = F.linear(x.to(dtype), self.weight.to(dtype), bias)  # (N, E)
            routing, given = None, self.replay  # experts whatever the scores
            if given is None and self.hash_table is not None:
                given = self.hash_table[ids].flatten(0, -2)  # (N, K)
            if self.fused is not None and given is None:
                formula = (self.spec.phi, self.spec.pre, self.spec.post)
                out = self.fused(
                    logits,
                    self.selection_bias,
                    self.c,
                    self.gamma,
                    formula,
                    self.top_k,
                    n_sequence or 1,
                )
                if out is not None:
                    weights, experts, scores, *stats = out
                    routing = Routing(weights, experts, scores, logits, Stats(*stats))
            if routing is None:
                routing = self.choose(logits, given)
                routing = routing._replace(
                    stats=measure(routing, n_sequence) if n_sequence else None
                )
            if routing.stats is not None and self.counts_margins and self.training:
                margins = count_margins(
                    routing.scores, self.selection_bias, self.top_k, self.spec.reach
                )
                routing = routing._replace(stats=routing.stats._replace(margins=margins))
            return routing

    def choose(self, logits: Tensor, experts: Tensor | None = None) -> Routing:
        """Apply the formula to logits (N, E); `experts` (N, K), if given, are chosen whatever their scores.

        Raises ValueError if `experts` are of another N or K.
        """
        # which then normalises the chosen ones
        phi, by_logits = PHI[self.spec.phi], self.spec.pre.endswith("topk")
        scores = logits if by_logits else phi(normalize(logits, self.spec.pre))  # (N, E)
        if self.spec.post.endswith("all") and not by_logits:
            scores = normalize(scores, self.spec.post)
        if experts is None:
            experts = top_k_indices(scores + self.selection_bias, self.top_k)  # (N, K)
        elif (given := tuple(experts.shape)) != (wanted := (len(logits), self.top_k)):
            raise ValueError(
                f"experts to replay are {given}, (tokens, top_k) are {wanted}; take the trace of these tokens"
            )
        weights = scores.gather(-1, experts)  # (N, K), without β: it shifts only the choice
        if by_logits:
            weights = phi(normalize(weights, self.spec.pre))
        if self.spec.post.endswith("topk"):
            weights = normalize(weights, self.spec.post)
        if self.spec.phi == "relu":
            weights = DeadTokenGradient.apply(weights, logits)
        c = self.c.to(logits.dtype)
        weights = weights * (c if self.gamma is None else c * self.gamma.to(logits.dtype))
        return Routing(weights, experts, scores, logits)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, {self.spec}" + (
            ", by token id" if self.hash_table is not None else ""
        )


class DeadTokenGradient(torch.autograd.Function):
    """Pass weights (N, K) through; backward, give logits (N, E) a gradient for tokens whose gates are all 0.

    ReLU gives such a token no gradient, so a router without a positive score would stay dead. The
    gates' own gradients still say whether more of the chosen experts would lower the loss. If their
    mean is negative, it becomes the gradient of the mean of the E logits: all logits rise together,
    in unchanged order, until the best is positive and plain ReLU takes over. It bypasses the norm,
    which removes any common shift, and never lowers logits, since the gates would stay 0.

    This rule is ours; docs/paper.md has the measurements. At initialisation a token has no positive
    score with probability 2^-E, so at the paper's 64 experts nothing changes: the other tokens'
    gradients get exactly 0 added.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.n_expert = logits.shape[-1]
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]  # *grads there
        (weights,) = ctx.saved_tensors  # (N, K)
        dead = weights.sum(-1, keepdim=True) == 0  # (N, 1)
        # (N, 1), negative: descent raises the logits
        rise = d_weights.sum(-1, keepdim=True).clamp_max(0)
        rise = torch.where(dead, rise / (weights.shape[-1] * ctx.n_expert), 0)
        return d_weights, rise.expand(-1, ctx.n_expert)


def normalize(s: Tensor, norm: str) -> Tensor:
    """Divide s (..., n) by ‖s‖ + ε over the last dimension; `norm` is one of NORMS and its start names the norm."""
    if norm == "none":
        return s
    if norm.startswith("l1"):
        return s / (s.abs().sum(-1, keepdim=True) + EPS)
    return L2Normalize.apply(s)


class L2Normalize(torch.autograd.Function):
    """s / (‖s‖₂ + ε) over the last dimension, with a backward pass of its own: 14 operators where autograd takes 20.

    Squares are summed in fp64: in fp32 those of logits beyond 1e19 overflow.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(s, dim=-1, keepdim=True, dtype=torch.float64)  # (N, 1)
        norm = norm.clamp_max_(torch.finfo(s.dtype).max).to(s.dtype)
        out = s / (norm + EPS)
        ctx.save_for_backward(out, norm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  # *grads there
        out, norm = ctx.saved_tensors
        # (N, 1), 0 where s is 0
        along = (d_out * out).sum(-1, keepdim=True) * ((norm + EPS) / norm.clamp_min(1e-30))
        return torch.addcmul(d_out, out, along, value=-1) / (norm + EPS)


@torch.no_grad()
def top_k_indices(scores: Tensor, k: int) -> Tensor:
    """Return (N, k) int64 indices of the k largest of scores (N, E), largest first; ties go to the lower index.

    torch.topk leaves the order of ties undefined. Here each fp32 score becomes an int64 of the same
    order with the index in its low bits, so no two are equal. A stable sort gives the same and
    takes 2 to 3 times as long on a CPU (64 and 256 scores; 2 threads of an Intel Xeon, torch
    2.13.0).
    """
    n = scores.shape[-1]
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as two's complement it sorts like the floats
    index = torch.arange(n - 1, -1, -1, device=scores.device)
    # << and | take twice the time
    return torch.topk(order.long().mul_(2**32).add_(index), k, dim=-1).indices


@cache
def hash_table(n_id: int, n_expert: int, top_k: int, seed: int) -> Tensor:
    """A random table (n_id, top_k) int64: distinct experts for each token id (Hash Layers, arXiv 2106.04426).

    Up to any id every expert appears equally often, up to one, so ids that only pad the vocabulary
    change nothing: the table is made of permutations of the experts, each repeated until its end is
    the end of a row.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = n_expert // math.gcd(n_expert, top_k)  # of a block
    order = torch.rand(-(-n_id // rows), n_expert, generator=generator, device="cpu").argsort(1)
    place = torch.arange(rows * top_k, device="cpu") % n_expert
    return order[:, place].view(-1, top_k)[:n_id].contiguous()


@cache
def monte_carlo_scale(n_expert: int, top_k: int, samples: int = 200_000, seed: int = 0) -> float:
    """Estimate the paper's constant c = E[1 / ‖top_k of relu(y)‖₂], y uniform on the unit sphere.

    With it gates have about unit l2 norm at initialisation; (64, 8) gives 1.713. Two faults of the
    listing are fixed: the generator is seeded, so that every rank has the same constant, and the
    mean is over samples with a positive score, where the listing gives inf (one sample in
    2^n_expert has none). Strictly the expectation is infinite for any number of experts
    (docs/theory.md), because of samples whose positive scores are all near 0. From 32 experts on
    these are too rare to matter; below about 16 the mean is finite and repeatable, but not a
    meaningful scale.

    Source: App. "Implementation Details".
    """
    generator = torch.Generator().manual_seed(seed)
    total, count = 0.0, 0
    for _ in range(20):  # in parts, to bound the memory
        y = torch.randn(samples // 20, n_expert, generator=generator, device="cpu")
        gates = normalize(y, "l2 over all").relu().topk(top_k).values  # (samples / 20, top_k)
        norms = torch.linalg.vector_norm(gates, dim=-1)
        norms = norms[norms > 0]
        total, count = total + (1 / norms).sum().item(), count + len(norms)
    return total / count


class NormRouter(nn.Module):
    """The paper's module as listed: logits (..., E) in, scores (..., E) in fp32 out; top-k is left to the caller.

    A drop-in for `logits.softmax(-1)` in other codebases. `initial_method` is "one" or
    "monte_carlo".

    Source: App. "Implementation Details".
    """

    scale_initial: Tensor

    def __init__(
        self, initial_method: str = "one", total_expert: int = 64, top_k: int = 8, eps: float = EPS
    ) -> None:
        super().__init__()
        if initial_method not in ("one", "monte_carlo"):
            raise ValueError(f"initial_method {initial_method!r} is not 'one' or 'monte_carlo'")
        c = monte_carlo_scale(total_expert, top_k) if initial_method == "monte_carlo" else 1.0
        self.register_buffer("scale_initial", torch.tensor([c], dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, logits: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            s = logits.to(torch.promote_types(logits.dtype, torch.float32))
            s = s / (torch.linalg.vector_norm(s, dim=-1, keepdim=True) + self.eps)
            return self.scale * self.scale_initial * s.relu()


def expert_loads(experts: Tensor, n_expert: int) -> Tensor:
    """Count the tokens that chose each expert: experts (..., N, K) int64 -> (..., E) int64."""
    flat = experts.flatten(-2)
    loads = torch.zeros(*flat.shape[:-1], n_expert, dtype=torch.int64, device=flat.device)
    return loads.scatter_add_(-1, flat, torch.ones_like(flat))


def token_distribution(routing: Routing) -> Tensor:
    """Normalise the routing scores, negative ones set to 0, to sum to 1 per token: (N, E).

    For softmax these are its probabilities.
    """
    positive = routing.scores.relu()
    return positive / (positive.sum(-1, keepdim=True) + EPS)


def measure(routing: Routing, n_sequence: int) -> Stats:
    """Compute the statistics of tokens that form `n_sequence` sequences."""
    experts, gates = routing.experts, routing.weights.detach()
    # (B, E)
    loads = expert_loads(experts.view(n_sequence, -1, experts.shape[1]), routing.scores.shape[1])
    distribution = token_distribution(routing)  # (N, E)
    probability = distribution.view(n_sequence, -1, distribution.shape[1]).mean(1)  # (B, E)
    of_gates = (
        (gates == 0).float().mean(),
        gates.square().sum() / len(gates),
        gates.sum() / len(gates),
    )
    return Stats(loads, probability, z_loss(routing), entropy(distribution), *of_gates)


def balance_loss(probability: Tensor, loads: Tensor) -> Tensor:
    """Switch load-balancing loss E · Σ_e f_e P_e: 1 when balanced, E when one expert takes every token.

    Scores are normalised per token, so the loss moves them against each other and cannot shrink
    KERN's γ or scale.

    Args:
        probability: (..., E) P, the mean over tokens of `token_distribution`. Carries the gradient.
        loads: (..., E), tokens per expert, of these tokens or of others; f_e is their share of all
            choices. No gradient.

    Returns:
        (...) dimensionless.

    Source: Switch Transformer (arXiv 2101.03961), eq. 4.
    """
    share = (loads / loads.sum(-1, keepdim=True)).to(probability.dtype)
    return loads.shape[-1] * (share * probability).sum(-1)


@torch.no_grad()
def entropy(distribution: Tensor) -> Tensor:
    """Mean entropy per token in nats, a scalar (), of `token_distribution` (N, E)."""
    return -(distribution * distribution.clamp_min(1e-30).log()).sum(-1).mean()


def z_loss(routing: Routing) -> Tensor:
    """Router z-loss, a scalar (): mean over tokens of logsumexp(logits)².

    Source: ST-MoE (arXiv 2202.08906), eq. 5.
    """
    return torch.logsumexp(routing.logits, dim=-1).square().mean()


@torch.no_grad()
def update_selection_bias(selection_bias: Tensor, loads: Tensor, rate: float | Tensor) -> None:
    """Once per optimizer step, in place: β_e += rate · sign(mean load - load of e).

    Args:
        selection_bias: (E,) β of one router.
        loads: (E,) tokens per expert, summed over all tokens of the step on all ranks.
        rate: step size, `train.bias_update_rate`; a 0-d tensor to skip the step on the device.

    Source: DeepSeek-V3 (arXiv 2412.19437), Sec. 2.1.2.
    """
    loads = loads.to(selection_bias.dtype)
    selection_bias.add_(rate * torch.sign(loads.mean() - loads))


MARGIN_BINS = 1000


def squash(margins: Tensor, span: Tensor) -> Tensor:
    """Margins of at most `span` (0-d), or of any size if that is inf, as numbers in [-1, 1]."""
    return torch.where(span.isinf(), margins / (1 + margins.abs()), margins / span)


def unsquash(x: Tensor, span: Tensor) -> Tensor:
    """The margins that `squash` makes x of."""
    return torch.where(span.isinf(), x / (1 - x.abs()), x * span)


@torch.no_grad()
def count_margins(scores: Tensor, selection_bias: Tensor, top_k: int, reach: float) -> Tensor:
    """Histograms (E, MARGIN_BINS) int64 of the margins by which tokens miss experts, for `solve_selection_bias`.

    A token's margins are α - (s + β), where α is its (K+1)-th largest s + β: it is an expert's if
    the margin is negative. Bins span ±(reach + max β - min β), beyond which no margin lies; if
    scores have no bounds (reach is inf), they span the margins m as m / (1 + |m|). Their edges are
    the cubes of even steps, finest at 0, where the margins of balanced experts end: in 1,000 even
    bins, those of softmax over hundreds of experts share one.

    Args:
        scores: (N, E), of any part of a step: counts of parts add up.
        selection_bias: (E,) β that experts were chosen with.
        top_k: K < E.
        reach: of the scores, `RouterSpec.reach`; inf if they have no bounds.
    """
    n_expert, shifted = len(selection_bias), scores + selection_bias
    margins = shifted.topk(top_k + 1, dim=-1).values[:, -1:] - shifted  # (N, E)
    margins = squash(margins, reach + selection_bias.amax() - selection_bias.amin())  # in [-1, 1]
    place = margins.sign() * margins.abs() ** (1 / 3)
    bins = ((place + 1) * (MARGIN_BINS / 2)).long().clamp(0, MARGIN_BINS - 1)
    bins = bins + MARGIN_BINS * torch.arange(n_expert, device=bins.device)
    return expert_loads(bins, n_expert * MARGIN_BINS).view(n_expert, MARGIN_BINS)


@torch.no_grad()
def solve_selection_bias(
    selection_bias: Tensor, margins: Tensor, top_k: int, reach: float
) -> Tensor:
    """The β (E,), of mean 0, under which an expert would have had K/E of a step's tokens, were other β as they are.

    It is the K/E quantile of margin + β, interpolated within a bin. `margins` (E, MARGIN_BINS) are
    sums over the step's tokens on all ranks; the other arguments are those of `count_margins`.

    Source: Quantile Balancing (kexue.fm/archives/11619); histograms as in Kimi K3's report, App. D.
    """
    n_expert, counts, old = len(selection_bias), margins.long(), selection_bias.double()
    below = counts.cumsum(-1)  # (E, bins); of integers, so exact and deterministic on a GPU, too
    wanted = top_k * below[:, -1:]  # times E, an integer
    # (E, 1) first bin with enough tokens up to its end
    at = (below * n_expert < wanted).sum(-1, keepdim=True)
    inside = counts.gather(-1, at)
    place = at + 1 - (below.gather(-1, at) - wanted.double() / n_expert) / inside
    edge = (2 * place[:, 0] / MARGIN_BINS - 1) ** 3
    new = old + unsquash(edge, reach + old.amax() - old.amin())
    return (new - new.mean()).to(selection_bias.dtype)
