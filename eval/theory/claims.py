"""The paper's analytical claims, measured: each function returns the rows and the panels of one section."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.theory import exact
from router import ROUTERS, Router, RouterSpec, Routing, monte_carlo_scale

WIDTH, STD = 768, 0.02  # the paper's 125M; with N(0, 0.02²) weights and LayerNorm before them logits have
TAU = STD * math.sqrt(WIDTH)  # a standard deviation of 0.554
PAPER = ("kern", "softmax", "sigmoid", "tanh")
DRAWS = 32  # routers that a mean is taken over: one router's tokens share W, so draws, not tokens, give the error
SPECS: dict[str, RouterSpec] = {name: spec for name, spec in ROUTERS.items() if spec}

Curve = Sequence[Sequence[float | None]]  # points: x, expectation, measurement, its standard error


class Estimate(NamedTuple):
    """A measured value and its standard error."""

    value: float
    error: float = 0.0

    def over(self, other: "Estimate") -> "Estimate":
        """The ratio to an independent estimate."""
        ratio = self.value / other.value
        return Estimate(ratio, ratio * math.hypot(self.error / self.value, other.error / other.value))


class Row(NamedTuple):
    """A line of the table."""

    quantity: str
    analytic: float | None  # None: no expectation is known
    measured: float
    error: float  # standard error of `measured`
    tolerance: float = 0.0  # of a value that a finite sample keeps from `analytic`

    def agrees(self) -> bool:
        """Is the measurement within 5 standard errors of its expectation, within 0.2%, or within its tolerance?"""
        if self.analytic is None:
            return True
        return abs(self.measured - self.analytic) <= 5 * self.error + 2e-3 * abs(self.analytic) + self.tolerance


class Panel(NamedTuple):
    """A plot: lines are expectations, or measurements where none is known; markers are measurements."""

    title: str
    xlabel: str  # of a logarithmic axis
    ylabel: str
    yscale: str
    curves: Mapping[str, Curve]


Claim = tuple[list[Row], list[Panel]]


def estimate(values: Tensor) -> Estimate:
    """Mean of values (n,) and its standard error."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


def sample_routers(
    statistic: Callable[[Routing], Tensor], name: str, n_expert: int, top_k: int, samples: int, seed: int
) -> Tensor:
    """`statistic` of the routing of each of DRAWS freshly initialised routers, (DRAWS, ...) fp64.

    `samples` tokens in all, unit-variance inputs as they leave a LayerNorm.
    """
    results = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for _ in range(DRAWS):
            router = Router(WIDTH, n_expert, top_k, SPECS[name])
            x = F.layer_norm(torch.randn(max(samples // DRAWS, 1), WIDTH), (WIDTH,))
            results.append(statistic(router(x)).double())
    return torch.stack(results)


def gate_energy(name: str, n_expert: int, top_k: int, samples: int, seed: int) -> tuple[float, Estimate]:
    """E Σg² of a router's gates at initialisation: expected and measured."""

    def mean_energy(routing: Routing) -> Tensor:
        return routing.weights.double().square().sum(-1).mean()

    measured = estimate(sample_routers(mean_energy, name, n_expert, top_k, samples, seed))
    return exact.gate_sum(name, n_expert, top_k, TAU, power=2), measured


def variance(samples: int, seed: int) -> Claim:
    """Sec. 3.4, "preserves the variance of the MoE output at a constant scale"."""
    rows, panels = [], []
    for label, share, sizes in (("k = 8", 0, (16, 32, 64, 128, 256, 1024)), ("k = M/8", 8, (16, 32, 64, 128, 256))):
        curves = {}
        for name in PAPER:
            energy = {M: gate_energy(name, M, M // share if share else 8, samples, seed) for M in sizes}
            curves[name] = [(M, analytic, *measured) for M, (analytic, measured) in energy.items()]
            (many, measured_many), (few, measured_few) = energy[256], energy[32]
            text = f"{name}: E Σg² at M = 256 over M = 32, {label}"
            rows.append(Row(text, many / few, *measured_many.over(measured_few)))
        panels.append(Panel(f"Gate energy, {label} active", "experts M", "E Σ g²", "log", curves))
    return rows, panels


def measure_jacobian(name: str, logits: Tensor, top_k: int, tau: float) -> tuple[Estimate, Estimate]:
    """Of gates of logits (N, E) of standard deviation τ: the RMS of ‖∂g/∂s‖, and the median of τ ‖∂g/∂s‖ / ‖g‖.

    The router's W is the identity, so that its inputs are its logits; in fp64.
    """
    n_expert = logits.shape[-1]
    router = Router(n_expert, n_expert, top_k, SPECS[name]).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_expert))
    logits = logits.clone().requires_grad_()
    gates = router(logits).weights
    rows = [torch.autograd.grad(gates[:, i].sum(), logits, retain_graph=True)[0] for i in range(top_k)]
    squares = torch.stack(rows, 1).square().sum((1, 2))
    mean, error = estimate(squares)
    relative = tau * squares.sqrt() / gates.detach().norm(dim=-1)
    return Estimate(math.sqrt(mean), error / (2 * math.sqrt(mean))), Estimate(float(relative.median()))


def gradients(samples: int, seed: int) -> Claim:
    """Sec. 3.4, "the gradient vanishing problem"."""
    M, k, scales, rows = 64, 8, (0.25, 0.5, 1, 2, 4, 8, 16), []
    z = torch.randn(max(samples // 8, 100), M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    measured = {(name, tau): measure_jacobian(name, tau * z, k, tau) for name in PAPER for tau in scales}
    expected = {
        (name, tau): exact.jacobian_squares(name, M, k, tau) ** 0.5
        for name, tau in measured
        if name != "softmax" and tau <= 4  # beyond, a few tokens make the mean of sigmoid and tanh
    }
    for text, which, tau in (("RMS ‖∂g/∂s‖", 0, 4), ("median τ‖∂g/∂s‖/‖g‖", 1, 8), ("median τ‖∂g/∂s‖/‖g‖", 1, 16)):
        for name in PAPER:
            ratio = measured[name, tau][which].over(measured[name, 0.5][which])
            analytic = expected[name, tau] / expected[name, 0.5] if (name, tau) in expected else None
            rows.append(Row(f"{name}: {text}, τ = {tau} over τ = 0.5", analytic, *ratio))
    xlabel = "standard deviation τ of the 64 logits s, 8 active"
    curves = {name: [(tau, expected.get((name, tau)), *measured[name, tau][0]) for tau in scales[:5]] for name in PAPER}
    relative = {name: [(tau, None, *measured[name, tau][1]) for tau in scales] for name in PAPER}
    return rows, [
        Panel("Gradient of the gates", xlabel, "RMS ‖∂g/∂s‖", "log", curves),
        Panel("… relative to gates and logits", xlabel, "median of τ ‖∂g/∂s‖ / ‖g‖", "log", relative),
    ]


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
            measured, analytic = estimate(torch.tensor(draws, dtype=torch.float64)), exact.monte_carlo(M, k)
            curves[label].append((M, analytic, *measured))
            limits.append((M, exact.kern_limit(k / M) ** -0.5, None, 0.0))
            rows.append(Row(f"c, {k} of {M}", analytic, *measured))
        curves[f"{label}, limit of large M"] = limits
    return rows, [Panel("Monte-Carlo constant", "experts M", "c = E[1 / ‖top-k of ReLU(y)‖]", "linear", curves)]


def positive(samples: int, seed: int) -> Claim:
    """App. "The Effect of ReLU": below half active, "the select router weights are usually positive"."""
    rows, curves = [], {}
    for M in (16, 32, 64, 256):
        ks = [M * share // 16 for share in range(1, 17)]

        def shares_below(routing: Routing, ks: list[int] = ks) -> Tensor:
            return ((routing.weights > 0).sum(-1, keepdim=True) < torch.tensor(ks)).double().mean(0)

        sampled = sample_routers(shares_below, "kern", M, M, samples, seed)  # (DRAWS, len(ks))
        points = [(k, exact.fewer_positive(M, k), estimate(column)) for k, column in zip(ks, sampled.T, strict=True)]
        curves[f"M = {M}"] = [(k / M, analytic, *measured) for k, analytic, measured in points]
        rows += [
            Row(f"P(fewer than {k} of {M} gates positive)", analytic, *measured, tolerance=5 / samples)
            for k, analytic, measured in points
            if k * 8 in (M, 2 * M, 3 * M, 4 * M)
        ]
    labels = "share of active experts k/M", "P(fewer than k of M positive)"
    return rows, [Panel("Chance of fewer than k positive gates", *labels, "linear", curves)]


CLAIMS: dict[str, Callable[[int, int], Claim]] = {
    "variance": variance,
    "gradients": gradients,
    "monte-carlo": monte_carlo,
    "positive": positive,
}
