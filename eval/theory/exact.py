"""Expectations of routers at initialisation, computed rather than sampled. docs/theory.md has the results.

Throughout, the M logits of a token are independent N(0, τ²), which they are over draws of W for an input of fixed norm.
Three facts suffice:

1. A logit z is among the top k if at most k - 1 of the other M - 1 are above it, a binomial probability. So a sum of
   f(z) over the top k has the expectation M ∫ f(z) p(z) P(Bin(M - 1, Q(z)) < k) dz, with the normal density p and its
   upper tail Q: one integral, no order statistics.
2. Direction and length of a Gaussian vector are independent, so the expectation after an l2 norm is that of the
   numerator over that of the denominator.
3. Where a sum S stays in the denominator: S⁻ⁿ = ∫ tⁿ⁻¹ e^(-tS) dt / Γ(n), and e^(-tS) is a product over logits.

Relative errors of quadrature are below 1e-4 (tests/test_theory.py).
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import special
from scipy.integrate import cumulative_simpson, simpson
from scipy.stats import binom, norm

Array = np.ndarray

Z = np.linspace(-9, 9, 3601)  # 0 is a node between two of Simpson's parabolas: ReLU has its kink there
P = norm.pdf(Z)
RELU = Z.clip(0)

# The gates of a router without norms and their derivatives, as functions of the logit
ELEMENTWISE: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "sigmoid": (special.expit, lambda s: special.expit(s) * special.expit(-s)),
    "tanh": (np.tanh, lambda s: np.cosh(s) ** -2.0),
}
NUMERATORS = {"kern": RELU, "kern-norelu": Z}  # of gates divided by the l2 norm of all logits


def integrate(values: Array) -> float:
    """∫ of a function from its values on the grid Z."""
    return float(simpson(values, x=Z))


def chosen(n_expert: int, top_k: int, others: int = 1) -> Array:
    """P(a logit at z is among the top k, and so are `others` - 1 more above it), on the grid Z."""
    return binom.cdf(top_k - others, n_expert - others, special.ndtr(-Z))


def top_sum(f: Array, n_expert: int, top_k: int) -> float:
    """E Σ f(z) over the top k of M standard normals z, from the values of f on the grid Z (fact 1)."""
    return n_expert * integrate(P * f * chosen(n_expert, top_k))


def mean_norm(n: int, power: int = 1) -> float:
    """E ‖z‖^power of n standard normals: 2^(power/2) Γ((n + power)/2) / Γ(n/2). Power -1 needs n > 1."""
    return float(2 ** (power / 2) * special.poch(n / 2, power / 2))


def gate_sum(router: str, n_expert: int, top_k: int, tau: float, power: int = 1) -> float:
    """E Σ g^power of the gates, power 1 or 2, of kern, kern-norelu, sigmoid, tanh or softmax. KERN's is free of τ."""
    if router in ELEMENTWISE:
        return top_sum(ELEMENTWISE[router][0](tau * Z) ** power, n_expert, top_k)
    if router == "softmax":
        return softmax_moments(n_expert, top_k, tau)[power - 1]
    return top_sum(NUMERATORS[router] ** power, n_expert, top_k) / mean_norm(n_expert, power)  # fact 2


def kern_squared_sum(n_expert: int, top_k: int) -> float:
    """E (Σ g)² of KERN's gates: Σ g² plus all pairs.

    Both of a pair are chosen if the lower one is, with the higher among the k - 1 above it; ∫ of z' p(z') above z is
    p(z).
    """
    pairs = 2 * n_expert * (n_expert - 1) * integrate(P * RELU * P * chosen(n_expert, top_k, others=2))
    return gate_sum("kern", n_expert, top_k, 1, power=2) + pairs / n_expert


def kern_limit(share: float) -> float:
    """E Σ g² of KERN for large M and k = share · M: q p(q) + share, where q has the upper tail `share`, at most ½.

    From a half on the rest of TopK are zeros. For small shares it goes as 2 share · ln(1 / share).
    """
    q = norm.isf(min(share, 0.5))
    return float(q * norm.pdf(q) + min(share, 0.5))


def jacobian_squares(router: str, n_expert: int, top_k: int, tau: float) -> float:
    """E ‖∂g/∂s‖²_F of the gates by all M logits, for kern, sigmoid or tanh.

    KERN: row i of the Jacobian is (e_i - s̄_i s̄)/‖s‖, of squared length (1 - s̄_i²)/‖s‖², so the sum is
    (number of positive gates - Σ g²)/‖s‖², and E 1/‖s‖² = 1/((M - 2) τ²).
    """
    if router in ELEMENTWISE:
        return top_sum(ELEMENTWISE[router][1](tau * Z) ** 2, n_expert, top_k)
    assert router == "kern", router
    rows = positive_gates(n_expert, top_k) - gate_sum("kern", n_expert, top_k, tau, power=2)
    return rows / ((n_expert - 2) * tau**2)


@cache
def softmax_moments(n_expert: int, top_k: int, tau: float) -> tuple[float, float]:
    """E Σ p and E Σ p² over the top k of a softmax over M. Fact 3, on a grid of u = ln t."""
    M, k = n_expert, top_k
    z, p, h = Z[::4], P[::4], Z[4] - Z[0]
    # e^(-tS) tⁿ is above 0 where t ~ 1/S, and S between e^(-3τ) and M e^(7τ)
    u = np.arange(-math.log(M) - 7 * tau - 25, 3 * tau + 4, 0.25)
    e = np.exp(tau * z)
    decay = p * np.exp(-np.exp(u)[:, None] * e)  # (U, Z), density times e^(-t e^s)
    below = cumulative_simpson(decay, dx=h, axis=1, initial=0).clip(0)
    above = cumulative_simpson(decay[:, ::-1], dx=h, axis=1, initial=0)[:, ::-1].clip(0)
    both = below + above
    picked = decay * both ** (M - 1) * binom.cdf(k - 1, M - 1, above / both)  # fewer than k of the others above z

    def moment(n: int) -> float:  # ∫ tⁿ⁻¹ … dt = ∫ tⁿ … du; Γ(1) = Γ(2) = 1
        return float((np.exp(n * u) * M * simpson(picked * e**n, dx=h, axis=1)).sum() * 0.25)

    return moment(1), moment(2)


def fewer_positive(n_expert: int, top_k: int) -> float:
    """P(fewer than k of M symmetric logits are positive)."""
    return float(binom.cdf(top_k - 1, n_expert, 0.5))


def positive_gates(n_expert: int, top_k: int) -> float:
    """E min(k, number of positive logits): KERN's gates that are not 0."""
    return float(binom.sf(np.arange(top_k), n_expert, 0.5).sum())


def monte_carlo(n_expert: int, top_k: int) -> float:
    """E[1 / ‖top-k of ReLU(y)‖₂ | at least 2 positive], y uniform on the sphere, 2 ≤ k ≤ M: the paper's constant.

    Without the condition it does not exist: with no positive score 1/norm is infinite, and with a single one, of size
    u, it is 1/u while u has a positive density at 0, so its mean diverges like a logarithm. Both together have
    probability (M + 1)/2ᴹ: never seen at 32 experts, certain in a large sample at 8.

    With T = Σ ReLU(z)² over the top k, c = E T^(-½) / E ‖z‖⁻¹ (fact 2) and T^(-½) = ∫ t^(-½) e^(-tT) dt / √π (fact 3).
    With j < k positive T is χ²_j. Otherwise condition on the k-th largest, at x / √(1 + 2t), k - 1 above it.
    """
    M, k = n_expert, top_k
    if not 2 <= k <= M:
        raise ValueError(f"top_k {k} must lie between 2 and n_expert {M}")
    few = sum(binom.pmf(j, M, 0.5) * mean_norm(j, -1) for j in range(2, k))
    x, w = Z[Z >= 0], np.arange(-14, 30, 0.05)
    t = np.exp(2 * w)[:, None]
    others = (k - 1) * special.log_ndtr(-x) + (M - k) * special.log_ndtr(x / np.sqrt(1 + 2 * t))  # above, below
    density = norm.pdf(x) * np.exp(others - special.betaln(k, M - k + 1) - k / 2 * np.log1p(2 * t))  # (W, X)
    enough = 2 / math.sqrt(math.pi) * (np.exp(w) * simpson(density, x=x)).sum() * 0.05
    return float((few + enough) / (1 - (M + 1) / 2**M) / mean_norm(M, -1))


def expert_squares(n_embd: int, expert_hidden: int, std_in: float, std_out: float) -> float:
    """E ‖E_m(x)‖² of an untrained expert, ‖x‖² = n_embd: C H std_out² E gelu(h)², h ~ N(0, C std_in²)."""
    h = math.sqrt(n_embd) * std_in * Z
    return n_embd * expert_hidden * std_out**2 * integrate(P * (h * special.ndtr(h)) ** 2)
