"""Routers: one formula, and one line of data per router.

    g = c · γ · post( φ( pre(W x + b) ) ) · 1[ m ∈ TopK(scores + β) ]

Scores are φ(pre(W x + b)), after a post norm over all; with a pre norm over the chosen experts they
are the logits. TopK comes before c and γ. With groups of experts, TopK is within a token's best
groups (`leave_best_groups`).

KERN ("Understanding the Mixture-of-Experts with Nadaraya-Watson Kernel", arXiv 2509.25913, Sec.
3.4) is φ = relu after an l2 norm over all logits, times a learnable γ. To add a router, add one
line to ROUTERS: configs, sweeps and tests find its name there.

Shapes: N tokens, C = n_embd, E experts, K = top_k. This file imports only torch, so that exported
models can ship it: its names are a public interface of theirs.
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
    chosen by their raw logits, and `post` cannot be over all. c is a number, or "monte_carlo" for
    `monte_carlo_scale`.

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
        if self.pre.endswith("topk") and self.post.endswith("all"):
            raise ValueError(
                f"pre {self.pre!r} leaves only the chosen experts, so post {self.post!r} has no "
                f"meaning; take post={self.post[:2]} over topk"
            )
        if self.c == "monte_carlo" and (self.phi, self.pre) != ("relu", "l2 over all"):
            raise ValueError(
                "c = 'monte_carlo' is the constant of phi 'relu' after pre 'l2 over all'"
            )

    def has_gradient(self, top_k: int) -> bool:
        """False if gates are constant: a norm over one chosen expert leaves only the sign."""
        return top_k > 1 or not any("topk" in norm for norm in (self.pre, self.post))

    @property
    def chooses_by_logits(self) -> bool:
        """True if experts are chosen by raw logits, and only the chosen ones are normalized."""
        return self.pre.endswith("topk")

    @property
    def ignores_shift(self) -> bool:
        """True if a number added to all logits changes nothing: φ subtracts a token's largest."""
        return "exp" in self.phi and self.pre == "none"

    @property
    def score_range(self) -> float:
        """The largest possible difference of two scores; inf if scores have no bounds."""
        if self.chooses_by_logits:
            return math.inf
        bounded = self.phi in ("exp", "sqrtexp", "sigmoid", "tanh")
        if bounded or self.post.endswith("all"):
            has_negative_scores = self.phi in ("identity", "tanh")
            return 2.0 if has_negative_scores else 1.0
        if self.pre == "none":
            return math.inf
        logits = torch.linspace(-1, 1, 201, device="cpu")  # normalized ones are in this range
        scores = PHI[self.phi](logits).tolist()
        return max(scores) - min(scores)


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
        ValueError: `router` is neither a name nor a formula, or the formula has no meaning.
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
        elif name == "c" and re.fullmatch(r"\d+(\.\d+)?", value) and 1e-37 < float(value) < 1e38:
            fields[name] = float(value)  # as float32 neither 0 nor infinite
        elif term == "c=monte_carlo":
            fields[name] = value
        else:
            raise ValueError(
                f"router {router!r}: {term!r} is none of pre=NORM, post=NORM, gamma, bias, "
                "c=NUMBER above 0"
            )
    return RouterSpec(phi, **fields)


Fused = Callable[..., tuple[Tensor, ...] | None]  # as `kernels.route`
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # as F.linear


class Routing(NamedTuple):
    """A router's decision for N tokens. All but `experts` are fp32 (fp64 for fp64 inputs)."""

    weights: Tensor  # (N, K) gates of the chosen experts
    experts: Tensor  # (N, K) int64, distinct per token, by descending score or as in the hash table
    scores: Tensor  # (N, E) experts are chosen by scores + β; no gradient if `fused` computed them
    logits: Tensor  # (N, E) W x + b
    # fields of `balance.Stats` without margins, if `fused` computed them
    stats: tuple[Tensor, ...] | None = None


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
        n_group: int = 1,
        group_k: int = 1,
    ) -> None:
        """Build a router of `spec`.

        Args:
            n_embd: C.
            n_expert: E.
            top_k: K.
            spec: terms of the formula.
            gate_scale: multiplies c, to control the initial scale of the gates.
            table: (V, K) int64, see `hash_table`: each token's id then chooses its experts, and
                scores only give the gates.
            n_group: groups of consecutive experts.
            group_k: groups that a token's experts are chosen from, see `leave_best_groups`.

        Raises:
            ValueError: top_k is not between 1 and n_expert, or the groups are not equal or have
                fewer than top_k experts.
        """
        super().__init__()
        n_choice = n_expert // n_group * group_k
        if n_expert % n_group or not 1 <= top_k <= n_choice <= n_expert:
            raise ValueError(
                f"top_k {top_k} must lie between 1 and the {n_choice} experts of group_k {group_k} "
                f"groups, at most n_group; n_group {n_group} must divide n_expert {n_expert}"
            )
        self.top_k = top_k
        self.n_group = n_group
        self.group_k = group_k
        self.spec = spec
        self.fused: Fused | None = None  # `kernels.route`: computes the same faster, where it can
        self.linear: Linear = F.linear  # or `kernels.linear`: as exact, faster on a GPU
        self.weight = nn.Parameter(torch.empty(n_expert, n_embd))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(n_expert)) if spec.bias else None
        self.gamma = nn.Parameter(torch.ones(1)) if spec.gamma else None
        c = spec.c
        if c == "monte_carlo":
            asks_for_shapes = torch.get_default_device().type == "meta"
            c = math.nan if asks_for_shapes else monte_carlo_scale(n_expert, top_k)
        self.register_buffer("c", torch.tensor([gate_scale * c], dtype=torch.float32))
        self.register_buffer("selection_bias", torch.zeros(n_expert))
        if table is not None:
            # where buffers are created: vLLM creates parameters on the meta device, but no buffer
            table = table.to(self.selection_bias.device, copy=True)
        self.register_buffer("hash_table", table)

    def forward(self, x: Tensor, n_sequence: int = 1, ids: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x: (N, C) tokens, any floating dtype.
            n_sequence: number of sequences that the tokens form, for the statistics.
            ids: N int64 token ids, of any shape; hash layers need them.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = self._logits(x)  # (N, E)
            given = None
            if self.hash_table is not None:
                given = self.hash_table[ids].flatten(0, -2)  # (N, K)
            if given is None and self.fused is not None:
                routing = self._choose_fused(logits, n_sequence)
                if routing is not None:
                    return routing
            return self.choose(logits, given)

    def _logits(self, x: Tensor) -> Tensor:
        """W x + b, (N, E), in float32, or float64 for float64 inputs."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return self.linear(x.to(dtype), self.weight.to(dtype), bias)

    def _choose_fused(self, logits: Tensor, n_sequence: int) -> Routing | None:
        """What `choose` gives, by `fused`, with statistics; None where that cannot compute it."""
        assert self.fused is not None
        if self.group_k < self.n_group:
            return None  # the kernel knows no groups
        formula = (self.spec.phi, self.spec.pre, self.spec.post)
        bias, c, gamma = self.selection_bias, self.c, self.gamma
        out = self.fused(logits, bias, c, gamma, formula, self.top_k, n_sequence)
        if out is None:
            return None
        weights, experts, scores, *stats = out
        return Routing(weights, experts, scores, logits, tuple(stats))

    def choose(self, logits: Tensor, experts: Tensor | None = None) -> Routing:
        """Apply the formula to logits (N, E); `experts` (N, K), if given, replace the choice."""
        spec = self.spec
        phi = PHI[spec.phi]
        if spec.chooses_by_logits:
            scores = inputs = logits  # (N, E)
        else:
            inputs = normalize(logits, spec.pre)
            scores = phi(inputs)
        if spec.post.endswith("all"):
            scores = normalize(scores, spec.post)

        may_lack_best = experts is not None or self.group_k < self.n_group
        if experts is None:
            shifted = scores + self.selection_bias
            if self.group_k < self.n_group:
                shifted = leave_best_groups(shifted, self.n_group, self.group_k)
            experts = top_k_indices(shifted, self.top_k)  # (N, K)

        weights = scores.gather(-1, experts)  # (N, K), without β: it shifts only the choice
        if spec.chooses_by_logits:
            weights = phi(normalize(weights, spec.pre))
        elif may_lack_best and spec.post.endswith("topk"):
            # φ of the chosen alone: relative to a largest that is left out, exp may be below ε
            weights = phi(inputs.gather(-1, experts))
        if spec.post.endswith("topk"):
            weights = normalize(weights, spec.post)
        if spec.phi == "relu":
            weights = DeadTokenGradient.apply(weights, logits)
        scale = self.c.to(logits.dtype)
        if self.gamma is not None:
            scale = scale * self.gamma.to(logits.dtype)
        return Routing(weights * scale, experts, scores, logits)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, {self.spec}"


class DeadTokenGradient(torch.autograd.Function):
    """The identity on weights (N, K) that gives tokens without a gate a gradient on their logits.

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
    def backward(  # pyrefly: ignore[bad-override]  # *grads there
        ctx: Any, d_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        (weights,) = ctx.saved_tensors  # (N, K)
        top_k = weights.shape[-1]
        is_dead = weights.sum(-1, keepdim=True) == 0  # (N, 1)
        # (N, 1) negative, since descent then raises the logits
        rise = d_weights.sum(-1, keepdim=True).clamp_max(0)
        d_logit = torch.where(is_dead, rise / (top_k * ctx.n_expert), 0)
        return d_weights, d_logit.expand(-1, ctx.n_expert)


def normalize(s: Tensor, norm: str) -> Tensor:
    """Divide s (..., n) by ‖s‖ + ε over the last dimension; `norm` is one of NORMS."""
    if norm == "none":
        return s
    if norm.startswith("l1"):
        return s / (s.abs().sum(-1, keepdim=True) + EPS)
    return L2Normalize.apply(s)


class L2Normalize(torch.autograd.Function):
    """s / (‖s‖₂ + ε) over the last dimension, with its own backward pass.

    That has 14 operators where autograd has 20. Squares are summed in fp64: in fp32 they overflow
    for logits above 1e19.
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
    def backward(  # pyrefly: ignore[bad-override]  # *grads there
        ctx: Any, d_out: Tensor
    ) -> Tensor:
        out, norm = ctx.saved_tensors
        # (N, 1), 0 where s is 0
        along = (d_out * out).sum(-1, keepdim=True) * ((norm + EPS) / norm.clamp_min(1e-30))
        return torch.addcmul(d_out, out, along, value=-1) / (norm + EPS)


@torch.no_grad()
def top_k_indices(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores, largest first; ties go to the lower index.

    torch.topk leaves the order of ties undefined. Here each fp32 score becomes an int64 of the same
    order with the index in its low bits, so no two are equal. A stable sort gives the same and is 2
    to 3 times slower on a CPU (64 and 256 scores; 2 threads of an Intel Xeon, torch 2.13.0).

    Args:
        scores: (N, E) floating point, converted to fp32.
        k: at most E.

    Returns:
        (N, k) int64.
    """
    n_expert = scores.shape[-1]
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as two's complement it sorts like the floats
    reversed_index = torch.arange(n_expert - 1, -1, -1, device=scores.device)
    keys = order.long().mul_(2**32).add_(reversed_index)  # in half the time of << and |
    return torch.topk(keys, k, dim=-1).indices


@torch.no_grad()
def leave_best_groups(scores: Tensor, n_group: int, group_k: int) -> Tensor:
    """Set scores to -inf except in each token's best groups of experts.

    A group's score is the sum of its two largest scores; ties go to the lower group. It bounds the
    ranks that a token travels to (train.expert_parallel).

    Args:
        scores: (N, E) selection scores s + β.
        n_group: groups of E / n_group consecutive experts.
        group_k: groups that are left.

    Returns:
        (N, E).

    Source: DeepSeek-V3 (arXiv 2412.19437), Sec. 2.1.2, and its code.
    """
    groups = scores.unflatten(-1, (n_group, -1))  # (N, n_group, E / n_group)
    two_largest = groups.topk(min(2, groups.shape[-1]), dim=-1).values
    best = top_k_indices(two_largest.sum(-1), group_k)  # (N, group_k)
    is_left = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device)
    is_left.scatter_(1, best, True)
    return groups.masked_fill(~is_left.unsqueeze(-1), -torch.inf).flatten(1)


@cache
def hash_table(n_id: int, n_expert: int, top_k: int, seed: int) -> Tensor:
    """A random table of distinct experts for each token id.

    Each row takes the next K experts of random permutations of the experts; a permutation repeats
    until its end is the end of a row. So after any number of rows, counts of two experts differ by
    at most one, and ids that only pad the vocabulary change nothing.

    Args:
        n_id: vocabulary size.
        n_expert: E.
        top_k: experts per token, at most E.
        seed: of the permutations.

    Returns:
        (n_id, top_k) int64.

    Source: Hash Layers (arXiv 2106.04426).
    """
    rows_per_permutation = n_expert // math.gcd(n_expert, top_k)
    n_permutation = math.ceil(n_id / rows_per_permutation)
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(n_permutation, n_expert, generator=generator, device="cpu")
    permutations = random.argsort(1)
    column = torch.arange(rows_per_permutation * top_k, device="cpu") % n_expert
    table = permutations[:, column].view(-1, top_k)
    return table[:n_id].contiguous()


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
    n_part = 20  # parts, to bound the memory
    total = 0.0
    count = 0
    for _ in range(n_part):
        y = torch.randn(samples // n_part, n_expert, generator=generator, device="cpu")
        gates = normalize(y, "l2 over all").relu().topk(top_k).values  # (samples / n_part, top_k)
        norms = torch.linalg.vector_norm(gates, dim=-1)
        norms = norms[norms > 0]
        total += (1 / norms).sum().item()
        count += len(norms)
    return total / count


class NormRouter(nn.Module):
    """The paper's module as listed: logits (..., E) in, scores (..., E) in fp32 out, before top-k.

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
