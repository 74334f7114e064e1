"""The paper's analytical claims, measured: each function returns the rows and the curves of one section."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.theory import exact
from kernels import expert_mlp
from router import EPS, ROUTERS, Router, RouterSpec, Routing, monte_carlo_scale

WIDTH, STD = 768, 0.02  # the paper's 125M; with N(0, 0.02²) weights and LayerNorm before them logits have
TAU = STD * math.sqrt(WIDTH)  # a standard deviation of 0.554
PAPER = ("kern", "softmax", "sigmoid", "tanh")
EXPERT_WIDTH = 128  # where experts are measured too
DRAWS = 32  # routers that a mean is taken over: one router's tokens share W, so draws, not tokens, give the error
HOLDS, BOUND, FAILS, CONTEXT = "holds", "holds as a bound", "does not hold", "-"
SPECS: dict[str, RouterSpec] = {name: spec for name, spec in ROUTERS.items() if spec}
SPECS |= {f"{phi}-l2": RouterSpec(phi, pre="l2 over all") for phi in ("tanh", "sigmoid")}

Curves = dict[str, Any]
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
    """A line of the table. `analytic` is None where no expectation is known, `error` is a standard error."""

    claim: str
    paper: str
    analytic: float | None
    measured: float
    error: float
    verdict: str

    def agrees(self) -> bool:
        """Is the measurement within 5 standard errors of its expectation, or within 0.2%?"""
        if self.analytic is None:
            return True
        return abs(self.measured - self.analytic) <= 5 * self.error + 2e-3 * abs(self.analytic) + 1e-12


Claim = tuple[list[Row], Curves]


def judge(holds: bool, claimed: bool = True) -> str:
    """The verdict on a claim; "-" where the paper makes none."""
    return (HOLDS if holds else FAILS) if claimed else CONTEXT


def is_constant(ratio: float) -> bool:
    """Is `ratio`, the last value over the first, near enough to 1?"""
    return 0.8 < ratio < 1.25


def estimate(values: Tensor) -> Estimate:
    """Mean of values (n,) and its standard error."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


def make_curve(keys: str, points: Iterable[tuple[float | None, ...]]) -> Curves:
    """{key: [its value at each point]}, keys separated by spaces."""
    return {key: list(column) for key, column in zip(keys.split(), zip(*points, strict=True), strict=True)}


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


def mean_squares(routing: Routing) -> Tensor:
    """Mean over tokens of Σ g²."""
    return routing.weights.double().square().sum(-1).mean()


def mean_sum(routing: Routing) -> Tensor:
    """Mean over tokens of Σ g."""
    return routing.weights.double().sum(-1).mean()


def route_logits(spec: RouterSpec, logits: Tensor, top_k: int) -> Routing:
    """Routing of given logits (N, E): a Router whose W is the identity, in fp64."""
    n_expert = logits.shape[-1]
    router = Router(n_expert, n_expert, top_k, spec).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_expert))
    return router(logits)


def dense_gates(spec: RouterSpec, logits: Tensor, top_k: int) -> Tensor:
    """(N, E) gates, 0 where an expert is not chosen."""
    routing = route_logits(spec, logits, top_k)
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
    curves, rows = {}, []
    shapes = {"k = 8": [(M, 8) for M in (8, 16, 32, 64, 128, 256, 512, 1024)]}
    shapes["k = M/8"] = [(M, M // 8) for M in (8, 16, 32, 64, 128, 256)]
    one = exact.expert_squares(EXPERT_WIDTH, 32, STD, STD)  # E ‖E_m‖², hidden 32
    expected = exact.gate_sum("kern", 64, 8, TAU, power=2)
    for text, copies, analytic in (
        ("E‖MoE‖² / E‖E_m‖², independent experts, 8 of 64", False, expected),
        ("E‖MoE‖² / E‖E_m‖², 64 copies of one expert, 8 of 64", True, exact.kern_squared_sum(64, 8)),
    ):
        found = moe_variance(64, 8, 32, samples, seed, copies=copies).over(Estimate(one))
        rows.append(Row(text, f"{expected:.4f}", analytic, *found, judge(is_constant(found.value / expected))))
    sampled = sample_routers(lambda r: r.weights.double().square().sum(-1).max(), "kern", 8, 8, samples, seed)
    largest = float(sampled.mean())
    verdict = BOUND if largest <= 1 else FAILS
    rows.append(Row("kern: largest Σg² of a router's tokens, 8 of 8", "O(1)", None, largest, 0.0, verdict))
    for label, path in shapes.items():
        for name in PAPER:
            measured = {M: estimate(sample_routers(mean_squares, name, M, k, samples, seed)) for M, k in path}
            analytic = {M: exact.gate_sum(name, M, k, TAU, power=2) for M, k in path}
            points = ((M, analytic[M], *measured[M]) for M, _ in path)
            curves[f"{label}, {name}"] = make_curve("M analytic measured error", points)
            ratio = measured[256].over(measured[32])
            verdict = judge(is_constant(ratio.value), name == "kern")
            if verdict == FAILS and ratio.value < 1:
                verdict = BOUND  # O(1) from above, but falling
            text = f"{name}: E Σg² at M = 256 over M = 32, {label}"
            paper = "constant" if name == "kern" else "-"
            rows.append(Row(text, paper, analytic[256] / analytic[32], *ratio, verdict))
    ratio = moe_variance(256, 32, 8, samples, seed).over(moe_variance(32, 4, 64, samples, seed))
    energy = curves["k = M/8, kern"]["analytic"]
    text = "kern: E‖MoE‖² at 32 of 256 over 4 of 32, M·H fixed"
    rows.append(Row(text, "constant", energy[5] / energy[2] / 8, *ratio, judge(is_constant(ratio.value))))
    for name, paper in (("tanh", "constant"), ("sigmoid", "not listed")):
        last, first = (
            estimate(sample_routers(mean_squares, f"{name}-l2", M, M // 8, samples, seed)) for M in (256, 32)
        )
        ratio = last.over(first)
        text = f"φ = {name} after l2: E Σg² at M = 256 over M = 32, k = M/8"
        rows.append(Row(text, paper, None, *ratio, judge(is_constant(ratio.value), name == "tanh")))
    return rows, curves


# --- gradients ----------------------------------------------------------------------------------------------------


def route_with_jacobian(spec: RouterSpec, logits: Tensor, top_k: int) -> tuple[Routing, Tensor]:
    """Routing of given logits (N, E) in fp64, and ∂gate/∂logit (N, K, E)."""
    logits = logits.clone().requires_grad_()
    routing = route_logits(spec, logits, top_k)
    rows = [torch.autograd.grad(routing.weights[:, i].sum(), logits, retain_graph=True)[0] for i in range(top_k)]
    return Routing(*(t.detach() for t in routing)), torch.stack(rows, 1)


def count_updated_experts(name: str, n_expert: int, top_k: int, seed: int) -> Estimate:
    """Number of experts that get a gradient from one token."""

    def measure() -> Tensor:
        router = Router(16, n_expert, top_k, SPECS[name])
        w_in, w_out = (torch.randn(n_expert, *shape).requires_grad_() for shape in ((16, 4), (4, 16)))
        x = torch.randn(1, 16)
        routing = router(x)
        loss = expert_mlp(x, w_in, w_out, routing.weights, routing.experts).square().sum()
        (gradient,) = torch.autograd.grad(loss, w_out)
        return (gradient.flatten(1).abs().sum(1) > 0).sum()

    return estimate(repeat_seeded(measure, seed, times=64))


def measure_jacobian(name: str, z: Tensor, top_k: int, tau: float) -> tuple[float | None, ...]:
    """At logits τz: the exact RMS of ‖∂g/∂s‖, the measured one, its error, and the medians described in `gradients`."""
    routing, J = route_with_jacobian(SPECS[name], tau * z, top_k)
    squares = J.square().sum((1, 2))
    mean, error = estimate(squares)
    rms = math.sqrt(mean)
    relative = tau * squares.sqrt() / routing.weights.norm(dim=-1)
    direct = J.gather(-1, routing.experts[:, :, None])[..., 0]  # (N, K) ∂g_m/∂s_m, best expert first
    weakest = float((direct[:, -1] / direct[:, 0]).median())
    wrong = (routing.experts.sort(-1).values != z.topk(top_k).indices.sort(-1).values).any(-1)
    return (
        math.sqrt(exact.jacobian_squares(name, z.shape[1], top_k, tau)),
        rms,
        error / (2 * rms),
        float(relative.median()),
        weakest if math.isfinite(weakest) else None,  # 0 over 0 in fp64
        float(wrong.double().mean()),
    )


def gradients(samples: int, seed: int) -> Claim:
    """Sec. 3.4, "the gradient vanishing problem" and "even less active experts still receive updates"."""
    M, k = 64, 8
    z = normal((max(samples // 8, 100), M), seed)
    scales = [0.25, 0.5, 1, 2, 4, 8, 16]
    curves: Curves = {"tau": scales}
    for name in PAPER:
        points = (measure_jacobian(name, z, k, tau) for tau in scales)
        curves[name] = make_curve("analytic rms error median weakest wrong", points)
    rows = []

    def at(name: str, tau: float, key: str) -> float:
        return curves[name][key][scales.index(tau)]

    def compare_with_kern(text: str, values: dict[str, tuple[float | None, Estimate]]) -> None:
        for name, (analytic, found) in values.items():  # the paper's claim is that KERN's value is the largest
            paper = "-" if name == "kern" else "below KERN"
            verdict = judge(found.value < values["kern"][1].value, name != "kern")
            rows.append(Row(f"{name}: {text}", paper, analytic, *found, verdict))

    values: dict[str, tuple[float | None, Estimate]] = {}
    for name in PAPER:
        last, first = (Estimate(at(name, tau, "rms"), at(name, tau, "error")) for tau in (4, 0.5))
        values[name] = at(name, 4, "analytic") / at(name, 0.5, "analytic"), last.over(first)
    compare_with_kern("RMS ‖∂g/∂s‖, τ = 4 over τ = 0.5", values)
    for tau in (8, 16):
        medians = {name: Estimate(at(name, tau, "median") / at(name, 0.5, "median")) for name in PAPER}
        text = f"median τ‖∂g/∂s‖/‖g‖, τ = {tau} over τ = 0.5"
        compare_with_kern(text, {name: (1.0 if name == "kern" else None, found) for name, found in medians.items()})
    text = "∂g/∂s, 8th over 1st chosen, median, τ = 4"
    compare_with_kern(text, {name: (None, Estimate(at(name, 4, "weakest"))) for name in PAPER})
    for name in ("sigmoid", "tanh"):
        rows.append(Row(f"{name}: tokens with a wrong choice, τ = 16", "-", None, at(name, 16, "wrong"), 0.0, CONTEXT))
    for name, top_k, expected in (("kern", 8, 8), ("kern", 64, exact.positive_gates(64, 64)), ("kern-norelu", 64, 64)):
        found = count_updated_experts(name, M, top_k, seed)
        text = f"{name}: experts of 64 that a token updates, k = {top_k}"
        paper = "all 64" if name == "kern" else "-"
        rows.append(Row(text, paper, expected, *found, judge(found.value >= 63, name == "kern")))
    routing, J = route_with_jacobian(SPECS["kern"], TAU * z, k)
    squares = J.square().sum(1)  # (N, M)
    outside = estimate(squares.scatter(-1, routing.experts, 0).sum(-1) / squares.sum(-1))
    rows.append(Row("kern: share of ‖∂g/∂s‖² in rows not chosen", "> 0", None, *outside, judge(outside.value > 0)))
    return rows, curves


# --- softmax and sigmoid as cases of φ(LN(s)) -----------------------------------------------------------------------


def literal_softmax(s: Tensor) -> Tensor:
    """Softmax as Sec. 3.4 words it, φ(LN(s)) with LN the l1 norm and φ the exponential."""
    return (s / s.abs().sum(-1, keepdim=True)).exp()


def family(samples: int, seed: int) -> Claim:
    """Sec. 3.3 and 3.4, "generalizes both Sigmoid- and Softmax-based routers"."""
    M = 64
    s = normal((max(samples // 20, 100), M), seed)
    sigmoid, softmax, kern = (dense_gates(SPECS[name], s, M) for name in ("sigmoid", "softmax", "kern"))
    kern2, softmax2 = (dense_gates(SPECS[name], 2 * s, M) for name in ("kern", "softmax"))
    literal = literal_softmax(s)
    after = s.exp() / s.exp().sum(-1, keepdim=True)
    rows = []
    for text, expected, difference in (
        ("|sigmoid router - φ(s), φ = sigmoid|", 0.0, sigmoid - 1 / (1 + (-s).exp())),
        ("|softmax router - l1(exp(s)), norm after φ as in Sec. 3.2|", 0.0, softmax - after),
        ("|softmax router - exp(LN(s)), LN(s) = s - logsumexp(s)|", 0.0, softmax - (s - s.logsumexp(-1, True)).exp()),
        ("|softmax router - exp(l1(s)), as Sec. 3.4 words it|", None, softmax - literal),
        ("|the same, rescaled to sum to 1|", None, softmax - F.normalize(literal, p=1, dim=-1)),
        ("|g(2s) - g(s)|, kern: zero for any φ after any norm", 0.0, kern2 - kern),
        ("|g(2s) - g(s)|, softmax: so no φ(norm(s))", None, softmax2 - softmax),
    ):
        gap, claimed = float(difference.abs().max()), "kern" not in text
        rows.append(Row(f"max {text}", "0" if claimed else "-", expected, gap, EPS, judge(gap < 1e-6, claimed)))
    for name, k in (("kern", 8), ("softmax", 8), ("sigmoid", 8), ("softmax-renorm", 8), ("softmax", 64)):
        found = estimate(sample_routers(mean_sum, name, M, k, samples, seed))
        expected = 1.0 if name == "softmax-renorm" else exact.gate_sum(name, M, k, TAU)
        text = f"Nadaraya-Watson weights sum to 1: {name}, {k} of 64"
        claimed = name == "softmax"
        rows.append(Row(text, "1" if claimed else "-", expected, *found, judge(abs(found.value - 1) < 1e-3, claimed)))
    curves: Curves = {"factor": torch.logspace(-1, 1.5, 26).tolist(), "shift": torch.linspace(-3, 3, 25).tolist()}
    routers = {name: lambda s, name=name: dense_gates(SPECS[name], s, 8) for name in PAPER}
    for name, gates in (routers | {"exp(l1(s))": literal_softmax}).items():
        curves[name] = {
            "factor": [float(gates(a * s[:500]).amax(-1).mean()) for a in curves["factor"]],
            "shift": [float(gates(s[:500] + b).amax(-1).mean()) for b in curves["shift"]],
        }
    return rows, curves


# --- the Monte-Carlo constant ---------------------------------------------------------------------------------------


def monte_carlo(samples: int, seed: int) -> Claim:
    """App. "Implementation Details": c = E[1 / ‖top-k of ReLU(y)‖]."""
    curves, rows = {}, []
    shapes = {"k = 8": [(M, 8) for M in (32, 64, 128, 256, 512, 1024)]}
    shapes["k = M/8"] = [(M, M // 8) for M in (16, 32, 64, 128, 256, 512)]
    for label, path in shapes.items():
        points = []
        for M, k in path:
            draws = [monte_carlo_scale(M, k, samples=max(samples // 10, 20), seed=seed + i) for i in range(10)]
            found, analytic = estimate(torch.tensor(draws, dtype=torch.float64)), exact.monte_carlo(M, k)
            points.append((M, k, analytic, exact.kern_limit(k / M) ** -0.5, *found))
            if label == "k = M/8" or M in (128, 256, 1024):
                rows.append(Row(f"c, {k} of {M}", "finite", analytic, *found, HOLDS))
        curves[label] = make_curve("M k analytic limit measured error", points)
    found = estimate(sample_routers(mean_squares, "kern-mc", 64, 8, samples, seed))
    expected = exact.monte_carlo(64, 8) ** 2 * exact.gate_sum("kern", 64, 8, TAU, power=2)
    rows.append(Row("kern-mc: E Σg², 8 of 64 (unit norm would be 1)", "-", expected, *found, CONTEXT))
    size, M = 100_000, 16
    generator = torch.Generator().manual_seed(seed)
    listings = (torch.randn(size, M, generator=generator) for _ in range(max(samples // 200, 20)))
    found = estimate(torch.stack([(y <= 0).all(-1).any().double() for y in listings]))
    text = "share of the paper's listings, 10⁵ samples, that are inf, M = 16"
    rows.append(Row(text, "finite", 1 - (1 - 2.0**-M) ** size, *found, judge(not found.value)))
    return rows, curves


# --- positive gates -------------------------------------------------------------------------------------------------


def positive(samples: int, seed: int) -> Claim:
    """App. "The Effect of ReLU": below half active, "the select router weights are usually positive"."""
    curves, rows = {}, []
    for M in (8, 16, 32, 64, 128, 256):
        ks = sorted({max(1, round(M * share / 16)) for share in range(1, 17)})

        def shares_below(routing: Routing, ks: list[int] = ks) -> Tensor:
            positive = (routing.weights > 0).sum(-1)
            return torch.stack([(positive < k).double().mean() for k in ks])

        sampled = sample_routers(shares_below, "kern", M, M, samples, seed)  # (DRAWS, len(ks))
        points = []
        for k, column in zip(ks, sampled.T, strict=True):
            value, error = estimate(column)
            points.append((k, exact.fewer_positive(M, k), value, max(error, 1 / samples)))
            if (M, k) in ((32, 4), (32, 8), (64, 8), (64, 24), (64, 28), (64, 32), (64, 64)):
                text, paper = f"P(fewer than {k} of {M} gates positive)", "small" if k < M / 2 else "-"
                rows.append(Row(text, paper, *points[-1][1:], judge(value < 0.1, k < M / 2)))
        curves[f"M = {M}"] = make_curve("k analytic measured error", points)
    for k in (32, 64):
        sampled = sample_routers(lambda r: (r.weights > 0).double().sum(-1).mean(), "kern", 64, k, samples, seed)
        text = f"gates that are not 0, {k} of 64"
        rows.append(Row(text, "-", exact.positive_gates(64, k), *estimate(sampled), CONTEXT))
    for k in (8, 32):
        logits = normal((samples, 64), seed)
        equal = dense_gates(SPECS["kern"], logits, k) == dense_gates(SPECS["kern-norelu"], logits, k)
        found = estimate(equal.all(-1).double())
        text = f"tokens with the same gates without ReLU, {k} of 64"
        verdict = judge(found.value > 0.9, k < 32)
        rows.append(Row(text, "most" if k < 32 else "-", 1 - exact.fewer_positive(64, k), *found, verdict))
    return rows, curves


CLAIMS: dict[str, Callable[[int, int], Claim]] = {
    "variance": variance,
    "gradients": gradients,
    "family": family,
    "monte-carlo": monte_carlo,
    "positive": positive,
}
