"""The initial norm √E‖g‖² of a router's gates, and the factor on them that gives another (model.gate_norm).

A router's form sets the size of its gates at initialisation, over a 20-fold range, and with it the
size of the MoE's output. Routers compare at equal size if all begin at one norm.

Logits of a fresh router are N(0, τ²) and independent over draws of W, with τ = init_std ·
router_init_ratio · √n_embd for the input that LayerNorm or RMSNorm leaves, of squared length n_embd
(where model.norm_eps is small beside the variance before it). Then these facts give E Σ gⁿ by
quadrature for most routers, in numpy alone:

1. A logit z is among the top k if at most k - 1 of the other M - 1 are above it, a binomial
   probability. So a sum of f(z) over the top k has the expectation M ∫ f(z) p(z) P(Bin(M - 1, Q(z))
   < k) dz, with the normal density p and its upper tail Q: one integral, no order statistics.
2. Direction and length of a Gaussian vector are independent, so the expectation after an l2 norm is
   that of the numerator over that of the denominator.
3. Where a sum S stays in the denominator: S⁻ⁿ = ∫ tⁿ⁻¹ e^(-tS) dt / Γ(n), and e^(-tS) is a product
   over logits.

Relative errors of quadrature are below 1e-4 (tests/test_theory.py). Other routers are sampled.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from configure.schema import Model as ModelConfig
from router import ROUTERS, Router, RouterSpec, find_spec, monte_carlo_scale

Array = np.ndarray

# 0 is a node between two of Simpson's parabolas: ReLU has its kink there
Z = np.linspace(-9, 9, 3601)
P = np.exp(-(Z**2) / 2) / math.sqrt(2 * math.pi)
RELU = Z.clip(0)
# Q; ABOVE[::-1] is 1 - Q without cancellation
ABOVE = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in Z])

# The gates of a router without norms, as functions of the logit
ELEMENTWISE: dict[str, Callable[[Array], Array]] = {
    "sigmoid": lambda s: (1 + np.tanh(s / 2)) / 2,
    "tanh": np.tanh,
}
NUMERATORS = {"kern": RELU, "kern-norelu": Z}  # of gates divided by the l2 norm of all logits


def gate_scale(config: ModelConfig) -> float:
    """The factor on the gates of `config`'s router: model.gate_scale, or what sets √E‖g‖² to model.gate_norm.

    Seven digits, so that processors that round differently have the same.
    """
    spec = find_spec(config.router)
    if spec is None or not config.gate_norm:
        return config.gate_scale
    if torch.get_default_device().type == "meta":
        return math.nan  # only shapes are asked for
    c = monte_carlo_scale(config.n_expert, config.top_k) if spec.c == "monte_carlo" else spec.c
    tau = config.init_std * config.router_init_ratio * math.sqrt(config.n_embd)
    square = expected_square(spec, config.n_expert, config.top_k, tau)
    return float(f"{config.gate_norm / (c * math.sqrt(square)):.7g}")


def expected_square(spec: RouterSpec, n_expert: int, top_k: int, tau: float) -> float:
    """E Σ g² of a fresh router with c = 1 and logits N(0, τ²): exact where there is a formula, else sampled."""
    form = replace(spec, c=1.0, gamma=False, bias=False)  # γ is initialised at 1, b at 0
    if tau > 6:  # the quadrature's grid is too coarse, and e^9τ overflows in the end
        return sample_square(form, n_expert, top_k, tau)
    for name in (*NUMERATORS, *ELEMENTWISE, "softmax"):
        known = ROUTERS[name]
        if known and form == replace(known, gamma=False, bias=False):
            return gate_sum(name, n_expert, top_k, tau, power=2)
    if form == ROUTERS["softmax-l2"]:
        return gate_sum("softmax", n_expert, top_k, 2 * tau)  # e^2s / Σ e^2s
    if form == ROUTERS["sqrtgate"]:
        return 1.0
    return sample_square(form, n_expert, top_k, tau)


@cache
@torch.no_grad()
def sample_square(
    spec: RouterSpec, n_expert: int, top_k: int, tau: float, precision: float = 1e-3
) -> float:
    """Estimate E Σ g² of `spec` for logits N(0, τ²), to a standard error of `precision` times the mean.

    Half of that in the norm. Seeded: each call gives the same.
    """
    # the model's own weights are drawn as without it
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        router = Router(n_expert, n_expert, top_k, spec)
        router.weight.copy_(torch.eye(n_expert))
    generator = torch.Generator().manual_seed(0)
    count, total, of_squares = 0, 0.0, 0.0
    while True:
        z = torch.randn(2**20 // n_expert + 1, n_expert, generator=generator, device="cpu")
        squares = router(tau * z).weights.double().square().sum(-1)
        count, total = count + len(z), total + squares.sum().item()
        of_squares += squares.square().sum().item()
        mean = total / count
        if math.sqrt(max(of_squares / count - mean**2, 0) / count) <= precision * mean:
            return mean


def gate_sum(router: str, n_expert: int, top_k: int, tau: float, power: int = 1) -> float:
    """E Σ g^power of the gates, power 1 or 2, of kern, kern-norelu, sigmoid, tanh or softmax.

    KERN's is free of τ.
    """
    if router in ELEMENTWISE:
        return top_sum(ELEMENTWISE[router](tau * Z) ** power, n_expert, top_k)
    if router == "softmax":
        return softmax_moments(n_expert, top_k, tau)[power - 1]
    # fact 2
    return top_sum(NUMERATORS[router] ** power, n_expert, top_k) / mean_norm(n_expert, power)


@cache
def softmax_moments(n_expert: int, top_k: int, tau: float) -> tuple[float, float]:
    """E Σ p and E Σ p² over the top k of a softmax over M. Fact 3, on a grid of u = ln t."""
    M, k = n_expert, top_k
    z, p, h = Z[::4], P[::4], Z[4] - Z[0]
    # e^(-tS) tⁿ is above 0 where t ~ 1/S, and S between e^(-3τ) and M e^(7τ)
    u = np.arange(-math.log(M) - 7 * tau - 25, 3 * tau + 4, 0.25)
    e = np.exp(tau * z)
    decay = p * np.exp(-np.exp(u)[:, None] * e)  # (U, Z), density times e^(-t e^s)
    below = running_integral(decay, h)
    above = running_integral(decay[:, ::-1], h)[:, ::-1]
    both = below + above
    # fewer than k of the others above z
    picked = decay * both ** (M - 1) * fewer(k, M - 1, above / both, below / both)

    def moment(n: int) -> float:  # ∫ tⁿ⁻¹ … dt = ∫ tⁿ … du; Γ(1) = Γ(2) = 1
        return float((np.exp(n * u) * M * simpson(picked * e**n, h)).sum() * 0.25)

    return moment(1), moment(2)


def mean_norm(n: int, power: int = 1) -> float:
    """E ‖z‖^power of n standard normals: 2^(power/2) Γ((n + power)/2) / Γ(n/2).

    Power -1 needs n > 1.
    """
    return 2 ** (power / 2) * math.exp(math.lgamma((n + power) / 2) - math.lgamma(n / 2))


def top_sum(f: Array, n_expert: int, top_k: int) -> float:
    """E Σ f(z) over the top k of M standard normals z, from the values of f on the grid Z (fact 1)."""
    chosen = fewer(top_k, n_expert - 1, ABOVE, ABOVE[::-1])  # P(a logit at z is among the top k)
    return n_expert * float(simpson(P * f * chosen, Z[1] - Z[0]))


def fewer(k: int, n: int, q: Array, rest: Array) -> Array:
    """P(Bin(n, q) < k) elementwise; `rest` is 1 - q without cancellation."""
    if k > n:
        return np.ones_like(q)
    with np.errstate(divide="ignore"):  # log 0 = -inf, whose exponential is 0
        log_q, log_rest = np.log(q), np.log(rest)
    total = np.exp(n * log_rest) if k > 0 else np.zeros_like(q)
    for j in range(1, k):
        choices = math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1)
        total += np.exp(choices + j * log_q + (n - j) * log_rest)
    return total


def simpson(values: Array, h: float) -> Array:
    """∫ over the last dimension by Simpson's rule, of an odd number of values h apart."""
    return (
        h
        / 3
        * (
            values[..., 0]
            + 4 * values[..., 1::2].sum(-1)
            + 2 * values[..., 2:-1:2].sum(-1)
            + values[..., -1]
        )
    )


def running_integral(values: Array, h: float) -> Array:
    """∫ from the first up to each of the values (U, n) h apart: trapezoids, corrected by the slopes at both ends."""
    slopes = np.gradient(values, h, axis=1)
    areas = np.zeros_like(values)
    areas[:, 1:] = np.cumsum((values[:, 1:] + values[:, :-1]) / 2 * h, axis=1)
    return (areas - h**2 / 12 * (slopes - slopes[:, :1])).clip(0)
