"""Routers: one formula, and one line of data per router.

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

    def has_gradient(self, top_k: int) -> bool:
        """Return False if gates are constant: a norm over one chosen expert leaves only the sign."""
        return top_k > 1 or not any("topk" in norm for norm in (self.pre, self.post))

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
            if fields[name] > torch.finfo(torch.float32).max:
                raise ValueError(f"router {router[:40]!r}…: c is too large for float32")
        elif term == "c=monte_carlo":
            fields[name] = value
        else:
            raise ValueError(
                f"router {router!r}: {term!r} is none of pre=NORM, post=NORM, gamma, bias, c=NUMBER"
            )
    return RouterSpec(phi, **fields)


Fused = Callable[..., tuple[Tensor, ...] | None]  # as `kernels.route`
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # as F.linear


class Routing(NamedTuple):
    """What a router decides for N tokens. All but `experts` in fp32 (fp64 for fp64 inputs)."""

    weights: Tensor  # (N, K) gates of the chosen experts
    experts: Tensor  # (N, K) int64, distinct per token, by descending score or as in the hash table
    # (N, E) scores that experts are chosen by, before c, γ and β; no gradient if `fused` made them
    scores: Tensor
    logits: Tensor  # (N, E) W x + b
    # the fields of `balance.Stats` but margins, where `fused` has computed them, too
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
        self.linear: Linear = F.linear  # or `kernels.linear`: as exact, faster on a GPU
        # (N, K) experts that take the place of the choice, see eval/traces.py
        self.replay: Tensor | None = None
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

    def forward(self, x: Tensor, n_sequence: int = 1, ids: Tensor | None = None) -> Routing:
        """Route tokens x (N, C) of any floating dtype, which form `n_sequence` sequences (for the statistics).

        `ids` are their N token ids, int64 of any shape, which hash layers need.
        """
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = self.linear(x.to(dtype), self.weight.to(dtype), bias)  # (N, E)
            given = self.replay  # experts whatever the scores
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
                    n_sequence,
                )
                if out is not None:
                    weights, experts, scores, *stats = out
                    return Routing(weights, experts, scores, logits, tuple(stats))
            return self.choose(logits, given)

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
