"""Expectations over the k largest of M Gaussian numbers by quadrature, in numpy alone.

The numbers ("logits") are independent. Three facts leave one integral each, or two:

1. A logit z is among the top k if at most k - 1 of the other M - 1 are above it, a binomial
   probability. So a sum of f(z) over the top k has the expectation M ∫ f(z) p(z) P(Bin(M - 1, Q(z))
   < k) dz, with the normal density p and its upper tail Q: one integral, no order statistics.
2. Direction and length of a Gaussian vector are independent, so the expectation after an l2 norm is
   that of the numerator over that of the denominator.
3. Where a sum S stays in the denominator: S⁻ⁿ = ∫ tⁿ⁻¹ e^(-tS) dt / Γ(n), and e^(-tS) is a product
   over logits.
"""

import math
from functools import cache

import numpy as np

Array = np.ndarray

# 0 is a node between two of Simpson's parabolas: ReLU has its kink there
Z = np.linspace(-9, 9, 3601)
P = np.exp(-(Z**2) / 2) / math.sqrt(2 * math.pi)
# Q; ABOVE[::-1] is 1 - Q without cancellation
ABOVE = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in Z])


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
