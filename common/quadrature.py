"""Expectations over the k largest of M Gaussian numbers by quadrature, in numpy alone.

The numbers ("logits") are independent. Three facts leave one integral each, or two:

1. A logit z is among the top k if at most k - 1 of the other M - 1 are above it, a binomial
   probability. So a sum of f(z) over the top k has the expectation M ∫ f(z) p(z) P(Bin(M - 1, Q(z))
   < k) dz, with the normal density p and its upper tail Q: one integral, no order statistics.
2. Direction and length of a Gaussian vector are independent, so the expectation of a quotient by
   the l2 norm is the quotient of two expectations.
3. For a sum S in the denominator: S⁻ⁿ = ∫ tⁿ⁻¹ e^(-tS) dt / Γ(n), and e^(-tS) is a product over
   logits.
"""

import math
from functools import cache

import numpy as np

Array = np.ndarray

Z = np.linspace(-9, 9, 3601)  # the kink of ReLU, 0, is between two of Simpson's parabolas
STEP = Z[1] - Z[0]
P = np.exp(-(Z**2) / 2) / math.sqrt(2 * math.pi)  # p(z)
ABOVE = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in Z])  # Q(z); reversed: 1 - Q(z), exact
LOG_T_STEP = 0.25  # of ln t in fact 3; moments differ by 2e-13 from a quarter of it (2026-11-26)


@cache
def softmax_moments(n_expert: int, top_k: int, tau: float) -> tuple[float, float]:
    """E Σ p and E Σ p² over the top k of a softmax over M logits τ z (fact 3)."""
    others = n_expert - 1
    step = Z[4] - Z[0]
    exp_logits = np.exp(tau * Z[::4])  # (n,)
    # e^(-tS) tⁿ is not 0 for t near 1 / S, and S is between e^(-3τ) and M e^(7τ)
    first_log_t = -math.log(n_expert) - 7 * tau - 25
    last_log_t = 3 * tau + 4
    log_t = np.arange(first_log_t, last_log_t, LOG_T_STEP)  # (U,)
    t = np.exp(log_t)[:, None]  # (U, 1)
    decay = P[::4] * np.exp(-t * exp_logits)  # (U, n) density of z times e^(-t e^(τz))
    below = running_integral(decay, step)
    reversed_decay = decay[:, ::-1]
    above = running_integral(reversed_decay, step)[:, ::-1]
    total = below + above
    in_top_k = fewer(top_k, others, above / total, below / total)
    integrand = decay * total**others * in_top_k

    def moment(n: int) -> float:  # ∫ tⁿ⁻¹ … dt = ∫ tⁿ … d(ln t); Γ(1) = Γ(2) = 1
        over_z = simpson(integrand * exp_logits**n, step)  # (U,)
        over_t = np.exp(n * log_t) * n_expert * over_z
        return float(over_t.sum() * LOG_T_STEP)

    return moment(1), moment(2)


def mean_norm(n: int, power: int = 1) -> float:
    """E ‖z‖^power of n standard normals: 2^(power/2) Γ((n + power)/2) / Γ(n/2).

    Power -1 needs n > 1.
    """
    log_ratio = math.lgamma((n + power) / 2) - math.lgamma(n / 2)
    return 2 ** (power / 2) * math.exp(log_ratio)


def top_sum(f: Array, n_expert: int, top_k: int) -> float:
    """E Σ f(z) over the top k of M standard normals z (fact 1).

    Args:
        f: its values on the grid Z.
        n_expert: M.
        top_k: k.
    """
    in_top_k = fewer(top_k, n_expert - 1, ABOVE, ABOVE[::-1])
    integral = simpson(P * f * in_top_k, STEP)
    return n_expert * float(integral)


def fewer(k: int, n: int, q: Array, complement: Array) -> Array:
    """P(Bin(n, q) < k), elementwise. `complement` is 1 - q without cancellation."""
    if k > n:
        return np.ones_like(q)
    if k <= 0:
        return np.zeros_like(q)
    with np.errstate(divide="ignore"):  # log 0 = -inf, whose exponential is 0
        log_q = np.log(q)
        log_complement = np.log(complement)
    total = np.exp(n * log_complement)
    for j in range(1, k):
        log_probability = log_binomial(n, j) + j * log_q + (n - j) * log_complement
        total += np.exp(log_probability)
    return total


def log_binomial(n: int, j: int) -> float:
    """The logarithm of the number of ways to choose j of n."""
    chosen = math.lgamma(j + 1)
    others = math.lgamma(n - j + 1)
    return math.lgamma(n + 1) - chosen - others


def simpson(values: Array, h: float) -> Array:
    """Integrate over the last dimension by Simpson's rule: an odd number of values h apart."""
    first = values[..., 0]
    last = values[..., -1]
    middles = values[..., 1::2].sum(-1)
    joints = values[..., 2:-1:2].sum(-1)
    return h / 3 * (first + 4 * middles + 2 * joints + last)


def running_integral(values: Array, h: float) -> Array:
    """Integrate values (U, n), h apart, from the first up to each of them: (U, n).

    The trapezoidal rule, corrected by the slopes at both ends (Euler-Maclaurin).
    """
    slopes = np.gradient(values, h, axis=1)
    left = values[:, :-1]
    right = values[:, 1:]
    areas = np.zeros_like(values)
    areas[:, 1:] = np.cumsum((right + left) / 2 * h, axis=1)
    correction = h**2 / 12 * (slopes - slopes[:, :1])
    return (areas - correction).clip(0)
