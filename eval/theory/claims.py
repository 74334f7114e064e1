"""The paper's analytical claims, measured: each function returns the rows of one section."""

import math
from collections.abc import Callable
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
    measured: Estimate
    tolerance: float = 0.0  # of a value that a finite sample keeps from `analytic`

    def agrees(self) -> bool:
        """Is the measurement within 5 standard errors of its expectation, within 0.2%, or within its tolerance?"""
        if self.analytic is None:
            return True
        value, error = self.measured
        return abs(value - self.analytic) <= 5 * error + 2e-3 * abs(self.analytic) + self.tolerance


def estimate(values: Tensor) -> Estimate:
    """Mean of values (n,) and its standard error."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


def sample_routers(
    statistic: Callable[[Routing], Tensor], name: str, n_expert: int, top_k: int, samples: int, seed: int
) -> Estimate:
    """The mean over DRAWS freshly initialised routers, and over tokens, of `statistic` (N,) of their routing.

    `samples` tokens in all, unit-variance inputs as they leave a LayerNorm.
    """
    results = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for _ in range(DRAWS):
            router = Router(WIDTH, n_expert, top_k, SPECS[name])
            x = F.layer_norm(torch.randn(max(samples // DRAWS, 1), WIDTH), (WIDTH,))
            results.append(statistic(router(x)).double().mean())
    return estimate(torch.stack(results))


def variance(samples: int, seed: int) -> list[Row]:
    """Sec. 3.4, "preserves the variance of the MoE output at a constant scale"."""
    rows = []
    for label, (few, many) in (("k = 8", ((32, 8), (256, 8))), ("k = M/8", ((32, 4), (256, 32)))):
        for name in PAPER:
            expected = exact.gate_sum(name, *many, TAU, power=2) / exact.gate_sum(name, *few, TAU, power=2)
            first, last = (
                sample_routers(lambda routing: routing.weights.double().square().sum(-1), name, *shape, samples, seed)
                for shape in (few, many)
            )
            rows.append(Row(f"{name}: E Σg² at M = 256 over M = 32, {label}", expected, last.over(first)))
    return rows


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


def gradients(samples: int, seed: int) -> list[Row]:
    """Sec. 3.4, "the gradient vanishing problem"."""
    M, k, rows = 64, 8, []
    z = torch.randn(max(samples // 8, 100), M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for text, which, tau in (("RMS ‖∂g/∂s‖", 0, 4), ("median τ‖∂g/∂s‖/‖g‖", 1, 16)):
        for name in PAPER:
            small, large = (measure_jacobian(name, scale * z, k, scale)[which] for scale in (0.5, tau))
            expected = None  # of medians, and of softmax
            if which == 0 and name != "softmax":
                first, last = (exact.jacobian_squares(name, M, k, scale) for scale in (0.5, tau))
                expected = math.sqrt(last / first)
            rows.append(Row(f"{name}: {text}, τ = {tau} over τ = 0.5", expected, large.over(small)))
    return rows


def monte_carlo(samples: int, seed: int) -> list[Row]:
    """App. "Implementation Details": c = E[1 / ‖top-k of ReLU(y)‖]."""
    rows = []
    for M, k in ((32, 4), (64, 8), (256, 32), (256, 8), (1024, 8)):
        draws = [monte_carlo_scale(M, k, samples=max(samples // 10, 20), seed=seed + i) for i in range(10)]
        rows.append(Row(f"c, {k} of {M}", exact.monte_carlo(M, k), estimate(torch.tensor(draws, dtype=torch.float64))))
    return rows


def positive(samples: int, seed: int) -> list[Row]:
    """App. "The Effect of ReLU": below half active, "the select router weights are usually positive"."""
    rows = []
    for M, k in ((32, 8), (64, 8), (64, 24), (64, 32)):
        share = sample_routers(lambda routing: (routing.weights == 0).any(-1), "kern", M, k, samples, seed)
        rows.append(Row(f"P(fewer than {k} of {M} gates positive)", exact.fewer_positive(M, k), share, 5 / samples))
    return rows


CLAIMS: dict[str, Callable[[int, int], list[Row]]] = {
    "variance": variance,
    "gradients": gradients,
    "monte-carlo": monte_carlo,
    "positive": positive,
}
