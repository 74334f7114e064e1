"""Expectations of routers at initialisation, computed rather than sampled. docs/theory.md has the results.

Throughout, the M logits of a token are independent N(0, τ²), which they are over draws of W for an input of fixed norm.
Facts 1 to 3 are those of gate_norm.py, which has the sums of gates; here is what only the claims need, with scipy.
"""

import math

import numpy as np
from scipy import special
from scipy.integrate import simpson
from scipy.stats import binom, norm

from gate_norm import Z, gate_sum, mean_norm, top_sum


def jacobian_squares(router: str, n_expert: int, top_k: int, tau: float) -> float:
    """E ‖∂g/∂s‖²_F of the gates by all M logits, for kern, sigmoid or tanh.

    KERN: row i of the Jacobian is (e_i - s̄_i s̄)/‖s‖, of squared length (1 - s̄_i²)/‖s‖², so the sum is
    (number of positive gates - Σ g²)/‖s‖², and E 1/‖s‖² = 1/((M - 2) τ²).
    """
    s = tau * Z
    # Of gates without norms.
    derivatives = {"sigmoid": special.expit(s) * special.expit(-s), "tanh": np.cosh(s) ** -2.0}
    if router in derivatives:
        return top_sum(derivatives[router] ** 2, n_expert, top_k)
    assert router == "kern", router
    rows = positive_gates(n_expert, top_k) - gate_sum("kern", n_expert, top_k, tau, power=2)
    return rows / ((n_expert - 2) * tau**2)


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
    few = sum(binom.pmf(j, M, 0.5) * mean_norm(j, -1) for j in range(2, k))
    x, w = Z[Z >= 0], np.arange(-14, 30, 0.05)
    t = np.exp(2 * w)[:, None]
    others = (k - 1) * special.log_ndtr(-x) + (M - k) * special.log_ndtr(x / np.sqrt(1 + 2 * t))  # above, below
    density = norm.pdf(x) * np.exp(others - special.betaln(k, M - k + 1) - k / 2 * np.log1p(2 * t))  # (W, X)
    enough = 2 / math.sqrt(math.pi) * (np.exp(w) * simpson(density, x=x)).sum() * 0.05
    return float((few + enough) / (1 - (M + 1) / 2**M) / mean_norm(M, -1))
