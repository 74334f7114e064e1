"""The paper's analytical claims, measured: each function returns the rows and the panels of one section."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.theory import exact
from kernels import expert_mlp
from router import ROUTERS, Router, RouterSpec, Routing, monte_carlo_scale

WIDTH, STD = 768, 0.02  # the paper's 125M; with N(0, 0.02²) weights and LayerNorm before them logits have
TAU = STD * math.sqrt(WIDTH)  # a standard deviation of 0.554
PAPER = ("kern", "softmax", "sigmoid", "tanh")
EXPERT_WIDTH = 128  # where experts are measured too
DRAWS = 32  # routers that a mean is taken over: one router's tokens share W, so draws, not tokens, give the error
SPECS: dict[str, RouterSpec] = {name: spec for name, spec in ROUTERS.items() if spec}
SPECS |= {f"{phi}-l2": RouterSpec(phi, pre="l2 over all") for phi in ("tanh", "sigmoid")}

Curve = Sequence[Sequence[float | None]]  # points: x, expectation, measurement, its standard error
Statistic = Callable[[Routing], Tensor]


class Estimate(NamedTuple):
    """A measured value and its standard error."""

    value: float
    error: float = 0.0

    def over(self, other: "Estimate") -> "Estimate":
        """The ratio to an independent estimate."""
        ratio = self.value / other.value
        return Estimate(ratio, ratio * math.hypot(self.error / self.value, other.error / other.value))


@dataclass
class Row:
    """A line of the table."""

    claim: str
    paper: str  # what it says; "-": nothing, so there is no verdict
    analytic: float | None  # None: no expectation is known
    measured: float
    error: float  # standard error of `measured`; 0 if it is not an estimate
    holds: bool
    tolerance: float = 0.0  # of a value that rounding or a finite sample keeps from `analytic`

    @property
    def verdict(self) -> str:
        """What the measurement says of the paper's claim."""
        if self.paper == "constant" and not self.holds and self.measured < 1:
            return "only a bound"  # O(1) from above, but falling
        return "-" if self.paper == "-" else "holds" if self.holds else "does not hold"

    def agrees(self) -> bool:
        """Is the measurement within 5 standard errors of its expectation, within 0.2%, or within its tolerance?"""
        if self.analytic is None:
            return True
        return abs(self.measured - self.analytic) <= 5 * self.error + 2e-3 * abs(self.analytic) + self.tolerance


@dataclass
class Panel:
    """A plot: lines are expectations, or measurements where none is known; markers are measurements."""

    title: str
    xlabel: str  # of a logarithmic axis
    ylabel: str
    yscale: str
    curves: Mapping[str, Curve]


Claim = tuple[list[Row], list[Panel]]


def is_constant(ratio: Estimate) -> bool:
    """Is a ratio, the last value over the first, near enough to 1?"""
    return 0.8 < ratio.value < 1.25


def estimate(values: Tensor) -> Estimate:
    """Mean of values (n,) and its standard error."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


def repeat_seeded(measure: Callable[[], Tensor], seed: int, times: int = DRAWS) -> Tensor:
    """Results of `measure`, which draws a fresh model from torch's global generator, stacked: (times, ...) fp64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([measure().double() for _ in range(times)])


def sample_routers(statistic: Statistic, name: str, n_expert: int, top_k: int, samples: int, seed: int) -> Tensor:
    """`statistic` of the routing of each of DRAWS freshly initialised routers, (DRAWS, ...) fp64.

    `samples` tokens in all, unit-variance inputs as they leave a LayerNorm.
    """

    @torch.no_grad()
    def measure() -> Tensor:
        router = Router(WIDTH, n_expert, top_k, SPECS[name])
        return statistic(router(F.layer_norm(torch.randn(max(samples // DRAWS, 1), WIDTH), (WIDTH,))))

    return repeat_seeded(measure, seed)


def estimate_gate_sum(name: str, n_expert: int, top_k: int, samples: int, seed: int, power: int = 1) -> Estimate:
    """E Σ g^power of a router's gates at initialisation."""

    def gate_sum(routing: Routing) -> Tensor:
        return (routing.weights.double() ** power).sum(-1).mean()

    return estimate(sample_routers(gate_sum, name, n_expert, top_k, samples, seed))


def route_logits(spec: RouterSpec, logits: Tensor, top_k: int) -> Routing:
    """Routing of given logits (N, E): a Router whose W is the identity, in fp64."""
    n_expert = logits.shape[-1]
    router = Router(n_expert, n_expert, top_k, spec).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_expert))
    return router(logits)


def dense_gates(name: str, logits: Tensor, top_k: int) -> Tensor:
    """(N, E) gates, 0 where an expert is not chosen."""
    routing = route_logits(SPECS[name], logits, top_k)
    return torch.zeros_like(logits).scatter(-1, routing.experts, routing.weights).detach()


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normals in fp64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the variance of the output -----------------------------------------------------------------------------------


def moe_variance(n_expert: int, top_k: int, hidden: int, samples: int, seed: int, copies: bool = False) -> Estimate:
    """E ‖MoE_KERN(x)‖² over freshly initialised routers and experts of width EXPERT_WIDTH.

    With `copies` all experts are copies of one, as in sparse upcycling (arXiv 2212.05055).
    """
    C, n = EXPERT_WIDTH, 1 if copies else n_expert

    @torch.no_grad()
    def measure() -> Tensor:
        router = Router(C, n_expert, top_k, SPECS["kern"])
        w_in = torch.randn(n, C, hidden).expand(n_expert, -1, -1) * STD
        w_out = torch.randn(n, hidden, C).expand(n_expert, -1, -1) * STD
        x = F.layer_norm(torch.randn(max(samples // 100 // DRAWS, 8), C), (C,))
        routing = router(x)
        return expert_mlp(x, w_in, w_out, routing.weights, routing.experts).double().square().sum(-1).mean()

    return estimate(repeat_seeded(measure, seed))


def variance(samples: int, seed: int) -> Claim:
    """Sec. 3.4, "preserves the variance of the MoE output at a constant scale"."""
    rows, panels = [], []
    one = Estimate(exact.expert_squares(EXPERT_WIDTH, 32, STD, STD))  # E ‖E_m‖², hidden 32
    expected = exact.gate_sum("kern", 64, 8, TAU, power=2)
    for text, copies, analytic in (
        ("independent experts", False, expected),
        ("64 copies of one expert", True, exact.kern_squared_sum(64, 8)),
    ):
        found = moe_variance(64, 8, 32, samples, seed, copies).over(one)
        holds = is_constant(found.over(Estimate(expected)))
        rows.append(Row(f"E‖MoE‖² / E‖E_m‖², {text}, 8 of 64", f"{expected:.4f}", analytic, *found, holds))
    for label, share, sizes in (("k = 8", 0, (16, 32, 64, 128, 256, 1024)), ("k = M/8", 8, (16, 32, 64, 128, 256))):
        curves = {}
        for name in PAPER:
            shapes = [(M, M // share if share else 8) for M in sizes]
            analytic = {M: exact.gate_sum(name, M, k, TAU, power=2) for M, k in shapes}
            measured = {M: estimate_gate_sum(name, M, k, samples, seed, power=2) for M, k in shapes}
            curves[name] = [(M, analytic[M], *measured[M]) for M in sizes]
            ratio = measured[256].over(measured[32])
            text, paper = f"{name}: E Σg² at M = 256 over M = 32, {label}", "constant" if name == "kern" else "-"
            rows.append(Row(text, paper, analytic[256] / analytic[32], *ratio, is_constant(ratio)))
        panels.append(Panel(f"Gate energy, {label} active", "experts M", "E Σ g²", "log", curves))
    found = moe_variance(256, 32, 8, samples, seed).over(moe_variance(32, 4, 64, samples, seed))
    analytic = exact.gate_sum("kern", 256, 32, TAU, power=2) / exact.gate_sum("kern", 32, 4, TAU, power=2) / 8
    text = "kern: E‖MoE‖² at 32 of 256 over 4 of 32, M·H fixed"
    rows.append(Row(text, "constant", analytic, *found, is_constant(found)))
    for name, paper in (("tanh", "constant"), ("sigmoid", "-")):
        last, first = (estimate_gate_sum(f"{name}-l2", M, M // 8, samples, seed, power=2) for M in (256, 32))
        text, found = f"φ = {name} after l2: E Σg² at M = 256 over M = 32, k = M/8", last.over(first)
        rows.append(Row(text, paper, None, *found, is_constant(found)))
    return rows, panels


# --- gradients ----------------------------------------------------------------------------------------------------


def route_with_jacobian(name: str, logits: Tensor, top_k: int) -> tuple[Routing, Tensor]:
    """Routing of given logits (N, E) in fp64, and ∂gate/∂logit (N, K, E)."""
    logits = logits.clone().requires_grad_()
    routing = route_logits(SPECS[name], logits, top_k)
    rows = [torch.autograd.grad(routing.weights[:, i].sum(), logits, retain_graph=True)[0] for i in range(top_k)]
    weights, experts, scores, logits = (t.detach() for t in routing[:4])
    return Routing(weights, experts, scores, logits), torch.stack(rows, 1)


def count_updated_experts(n_expert: int, top_k: int, seed: int) -> Estimate:
    """Number of experts that get a gradient from one token, with KERN."""

    def measure() -> Tensor:
        router = Router(16, n_expert, top_k, SPECS["kern"])
        w_in, w_out = (torch.randn(n_expert, *shape).requires_grad_() for shape in ((16, 4), (4, 16)))
        x = torch.randn(1, 16)
        routing = router(x)
        loss = expert_mlp(x, w_in, w_out, routing.weights, routing.experts).square().sum()
        (gradient,) = torch.autograd.grad(loss, w_out)
        return (gradient.flatten(1).abs().sum(1) > 0).sum()

    return estimate(repeat_seeded(measure, seed, times=64))


def measure_jacobian(name: str, z: Tensor, top_k: int, tau: float) -> tuple[Estimate, Estimate]:
    """At the logits τz (N, E): the RMS of ‖∂g/∂s‖, and the median of τ ‖∂g/∂s‖ / ‖g‖, over tokens."""
    routing, J = route_with_jacobian(name, tau * z, top_k)
    squares = J.square().sum((1, 2))
    mean, error = estimate(squares)
    relative = tau * squares.sqrt() / routing.weights.norm(dim=-1)
    return Estimate(math.sqrt(mean), error / (2 * math.sqrt(mean))), Estimate(float(relative.median()))


def gradients(samples: int, seed: int) -> Claim:
    """Sec. 3.4, "the gradient vanishing problem" and "even less active experts still receive updates"."""
    M, k, scales, rows = 64, 8, (0.25, 0.5, 1, 2, 4, 8, 16), []
    z = normal((max(samples // 8, 100), M), seed)
    found = {(name, tau): measure_jacobian(name, z, k, tau) for name in PAPER for tau in scales}
    expected = {
        (name, tau): exact.jacobian_squares(name, M, k, tau) ** 0.5
        for name, tau in found
        if name != "softmax" and tau <= 4  # beyond, a few tokens make the mean of sigmoid and tanh
    }
    for text, which, tau in (
        ("RMS ‖∂g/∂s‖, τ = 4 over τ = 0.5", 0, 4),
        ("median τ‖∂g/∂s‖/‖g‖, τ = 8 over τ = 0.5", 1, 8),
        ("median τ‖∂g/∂s‖/‖g‖, τ = 16 over τ = 0.5", 1, 16),
    ):
        kern = found["kern", tau][which].over(found["kern", 0.5][which])
        for name in PAPER:
            ratio = found[name, tau][which].over(found[name, 0.5][which])
            analytic = expected[name, tau] / expected[name, 0.5] if (name, tau) in expected else None
            paper = "-" if name == "kern" else "below KERN"
            rows.append(Row(f"{name}: {text}", paper, analytic, *ratio, ratio.value < kern.value))
    for top_k, positive in ((8, 8), (64, exact.positive_gates(64, 64))):
        updated = count_updated_experts(M, top_k, seed)
        text = f"kern: experts of 64 that a token updates, k = {top_k}"
        rows.append(Row(text, "all 64", positive, *updated, updated.value >= 63))
    routing, J = route_with_jacobian("kern", TAU * z, k)
    squares = J.square().sum(1)  # (N, M)
    outside = estimate(squares.scatter(-1, routing.experts, 0).sum(-1) / squares.sum(-1))
    rows.append(Row("kern: share of ‖∂g/∂s‖² in rows not chosen", "> 0", None, *outside, outside.value > 0))
    xlabel = "standard deviation τ of the 64 logits s, 8 active"
    curves = {name: [(tau, expected.get((name, tau)), *found[name, tau][0]) for tau in scales[:5]] for name in PAPER}
    relative = {name: [(tau, None, *found[name, tau][1]) for tau in scales] for name in PAPER}
    return rows, [
        Panel("Gradient of the gates", xlabel, "RMS ‖∂g/∂s‖", "log", curves),
        Panel("… relative to gates and logits", xlabel, "median of τ ‖∂g/∂s‖ / ‖g‖", "log", relative),
    ]


# --- softmax and sigmoid as cases of φ(LN(s)) -----------------------------------------------------------------------


def family(samples: int, seed: int) -> Claim:
    """Sec. 3.3 and 3.4, "generalizes both Sigmoid- and Softmax-based routers"."""
    M, rows = 64, []
    s = normal((max(samples // 20, 100), M), seed)
    sigmoid, softmax, kern = (dense_gates(name, s, M) for name in ("sigmoid", "softmax", "kern"))
    worded = F.normalize(s, p=1, dim=-1).exp()  # Sec. 3.4: LN the l1 norm, φ the exponential
    for text, expected, difference in (
        ("|sigmoid router - φ(s), φ = sigmoid|", 0.0, sigmoid - s.sigmoid()),
        ("|softmax router - l1(exp(s)), norm after φ as in Sec. 3.2|", 0.0, softmax - F.normalize(s.exp(), 1, -1)),
        ("|softmax router - exp(LN(s)), LN(s) = s - logsumexp(s)|", 0.0, softmax - (s - s.logsumexp(-1, True)).exp()),
        ("|softmax router - exp(l1(s)), as Sec. 3.4 words it|", None, softmax - worded),
        ("|the same, rescaled to sum to 1|", None, softmax - F.normalize(worded, p=1, dim=-1)),
        ("|g(2s) - g(s)|, kern: zero for any φ after any norm", 0.0, dense_gates("kern", 2 * s, M) - kern),
        ("|g(2s) - g(s)|, softmax: so no φ(norm(s))", None, dense_gates("softmax", 2 * s, M) - softmax),
    ):
        gap, paper = float(difference.abs().max()), "-" if "kern" in text else "0"
        rows.append(Row(f"max {text}", paper, expected, gap, 0.0, gap < 1e-6, tolerance=5e-8))
    for name, k in (("kern", 8), ("softmax", 8), ("sigmoid", 8), ("softmax-renorm", 8), ("softmax", 64)):
        found = estimate_gate_sum(name, M, k, samples, seed)
        expected = 1.0 if name == "softmax-renorm" else exact.gate_sum(name, M, k, TAU)
        text, paper = f"Nadaraya-Watson weights sum to 1: {name}, {k} of 64", "1" if name == "softmax" else "-"
        rows.append(Row(text, paper, expected, *found, abs(found.value - 1) < 1e-3))
    return rows, []


# --- the Monte-Carlo constant ---------------------------------------------------------------------------------------


def monte_carlo(samples: int, seed: int) -> Claim:
    """App. "Implementation Details": c = E[1 / ‖top-k of ReLU(y)‖]."""
    rows, curves = [], {}
    for label, shapes in (
        ("k = 8", [(M, 8) for M in (32, 64, 128, 256, 512, 1024)]),
        ("k = M/8", [(M, M // 8) for M in (16, 32, 64, 128, 256, 512)]),
    ):
        curves[label], limits = [], []
        for M, k in shapes:
            draws = [monte_carlo_scale(M, k, samples=max(samples // 10, 20), seed=seed + i) for i in range(10)]
            found, analytic = estimate(torch.tensor(draws, dtype=torch.float64)), exact.monte_carlo(M, k)
            curves[label].append((M, analytic, *found))
            limits.append((M, exact.kern_limit(k / M) ** -0.5, None, 0.0))
            rows.append(Row(f"c, {k} of {M}", "finite", analytic, *found, True))
        curves[f"{label}, limit of large M"] = limits
    found = estimate_gate_sum("kern-mc", 64, 8, samples, seed, power=2)
    expected = exact.monte_carlo(64, 8) ** 2 * exact.gate_sum("kern", 64, 8, TAU, power=2)
    rows.append(Row("kern-mc: E Σg², 8 of 64 (unit norm would be 1)", "-", expected, *found, True))
    return rows, [Panel("Monte-Carlo constant", "experts M", "c = E[1 / ‖top-k of ReLU(y)‖]", "linear", curves)]


# --- positive gates -------------------------------------------------------------------------------------------------


def positive(samples: int, seed: int) -> Claim:
    """App. "The Effect of ReLU": below half active, "the select router weights are usually positive"."""
    rows, curves = [], {}
    shown = {(32, 4), (32, 8), (64, 8), (64, 24), (64, 28), (64, 32), (64, 64)}
    for M in (16, 32, 64, 256):
        ks = [M * share // 16 for share in range(1, 17)]

        def shares_below(routing: Routing, ks: list[int] = ks) -> Tensor:
            return ((routing.weights > 0).sum(-1, keepdim=True) < torch.tensor(ks)).double().mean(0)

        sampled = sample_routers(shares_below, "kern", M, M, samples, seed)  # (DRAWS, len(ks))
        curves[f"M = {M}"] = []
        for k, column in zip(ks, sampled.T, strict=True):
            analytic, found = exact.fewer_positive(M, k), estimate(column)
            curves[f"M = {M}"].append((k / M, analytic, *found))
            if (M, k) in shown:
                text, paper = f"P(fewer than {k} of {M} gates positive)", "small" if k < M / 2 else "-"
                rows.append(Row(text, paper, analytic, *found, found.value < 0.1, tolerance=5 / samples))
    for k in (8, 32):
        logits = normal((samples, 64), seed)
        equal = dense_gates("kern", logits, k) == dense_gates("kern-norelu", logits, k)
        found = estimate(equal.all(-1).double())
        text, paper = f"tokens with the same gates without ReLU, {k} of 64", "most" if k < 32 else "-"
        rows.append(Row(text, paper, 1 - exact.fewer_positive(64, k), *found, found.value > 0.9))
    labels = "share of active experts k/M", "P(fewer than k of M positive)"
    return rows, [Panel("Chance of fewer than k positive gates", *labels, "linear", curves)]


CLAIMS: dict[str, Callable[[int, int], Claim]] = {
    "variance": variance,
    "gradients": gradients,
    "family": family,
    "monte-carlo": monte_carlo,
    "positive": positive,
}
