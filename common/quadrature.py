"""Expectations over the k largest of M Gaussian numbers by quadrature.

The numbers ("logits") are independent. Three facts leave one integral each, or two:

1. A logit z is among the top k if at most k - 1 of the other M - 1 are above it, a binomial
   probability. So a sum of f(z) over the top k has the expectation M ∫ f(z) p(z) P(Bin(M - 1, Q(z))
   < k) dz, with the normal density p and its upper tail Q: one integral, no order statistics.
2. Direction and length of a Gaussian vector are independent, so the expectation after an l2 norm is
   the expectation of the numerator over the expectation of the denominator.
3. Where a sum S stays in the denominator: S⁻ⁿ = ∫ tⁿ⁻¹ e^(-tS) dt / Γ(n), and e^(-tS) is a product
   over logits.
"""

import math
from functools import cache

import numpy as np
from scipy.integrate import cumulative_trapezoid, simpson
from scipy.special import bdtr

Array = np.ndarray

# 3,601 points: relative errors of the integrals are below 1e-4 (tests/test_theory.py). 0 is a node
# between two of Simpson's parabolas, since ReLU has its kink there.
Z = np.linspace(-9, 9, 3601)
STEP = Z[1] - Z[0]
DENSITY = np.exp(-(Z**2) / 2) / math.sqrt(2 * math.pi)  # p
ABOVE = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in Z])  # Q


def probability_of_fewer(k: int, n: int, q: Array) -> Array:
    """P(Bin(n, q) < k), elementwise in q."""
    if k > n:
        return np.ones_like(q)
    return bdtr(k - 1, n, q)


def top_sum(f: Array, n_expert: int, top_k: int) -> float:
    """E Σ f(z) over the top k of M standard normals z (fact 1); `f` are values on the grid Z."""
    is_chosen = probability_of_fewer(top_k, n_expert - 1, ABOVE)
    integral = simpson(DENSITY * f * is_chosen, dx=STEP)
    return n_expert * float(integral)


def mean_norm(n: int, power: int = 1) -> float:
    """E ‖z‖^power of n standard normals: 2^(power/2) Γ((n + power)/2) / Γ(n/2).

    Power -1 needs n > 1.
    """
    half = power / 2
    log_upper = math.lgamma(n / 2 + half)
    log_lower = math.lgamma(n / 2)
    return 2**half * math.exp(log_upper - log_lower)


@cache
def softmax_moments(n_expert: int, top_k: int, tau: float) -> tuple[float, float]:
    """E Σ p and E Σ p² over the top k of a softmax over M logits N(0, τ²) (facts 1 and 3)."""
    z = Z[::4]  # every fourth point: the second integral makes the grid two-dimensional
    dz = 4 * STEP
    # u = ln t. t e^(-tS) is not 0 for t near 1/S, and S is between e^(-3τ) and M e^(7τ).
    du = 0.25  # moments differ by 2e-13 from those at a quarter of it (2026-11-26)
    lowest = -math.log(n_expert) - 7 * tau - 25
    highest = 3 * tau + 4
    u = np.arange(lowest, highest, du)
    t = np.exp(u)[:, None]  # (U, 1)
    e = np.exp(tau * z)  # (Z,)
    decay = DENSITY[::4] * np.exp(-t * e)  # (U, Z)
    below = running_integral(decay, dz)
    from_above = running_integral(decay[:, ::-1], dz)
    above = from_above[:, ::-1]
    total = below + above
    is_chosen = probability_of_fewer(top_k, n_expert - 1, above / total)
    others = total ** (n_expert - 1)
    weight = decay * others * is_chosen

    def moment(power: int) -> float:  # ∫ tⁿ⁻¹ … dt = ∫ tⁿ … du; Γ(1) = Γ(2) = 1
        over_logits = simpson(weight * e**power, dx=dz)  # (U,)
        powers_of_t = np.exp(power * u)
        integral = (powers_of_t * n_expert * over_logits).sum()
        return float(integral * du)

    return moment(1), moment(2)


def running_integral(values: Array, h: float) -> Array:
    """∫ from the first up to each of the values (U, n), which are h apart.

    Trapezoids, corrected by the slopes at both ends (Euler and Maclaurin).
    """
    areas = cumulative_trapezoid(values, dx=h, axis=1, initial=0)
    slopes = np.gradient(values, h, axis=1)
    change_of_slope = slopes - slopes[:, :1]
    correction = h**2 / 12 * change_of_slope
    corrected = areas - correction
    return corrected.clip(0)
