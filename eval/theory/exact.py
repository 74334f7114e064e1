"""Expectations of routers at initialisation, computed rather than sampled. docs/theory.md derives them.

Throughout, the M logits of a token are independent N(0, τ²), which they are over draws of W for an input of fixed norm.
Three facts do the work:

1. Logit z is among the top k if at most k - 1 of the other M - 1 lie above it, a binomial probability, so a sum over
   the top k of f(z) has the expectation M ∫ f(z) p(z) P(Bin(M - 1, Q(z)) < k) dz, where p is the normal density and Q
   its upper tail: one integral, no order statistics.
2. Direction and length of a Gaussian vector are independent, so what an l2 norm leaves has an expectation of
   numerator over denominator, each taken alone.
3. Where a sum S stays in the denominator: S⁻ⁿ = ∫ tⁿ⁻¹ e^(-tS) dt / Γ(n), and e^(-tS) is a product over logits.

Arguments are numbers, results floats, errors of quadrature below 1e-4 of the value (tests/test_theory.py).
"""

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import torch


def log_cdf(z):
    """log P(a standard normal is below z), accurate in both tails."""
    return torch.special.log_ndtr(torch.from_numpy(z)).numpy()


Z = np.linspace(-9, 9, 3601)  # 0 is a node: ReLU bends there
P = np.exp(-(Z**2) / 2) / math.sqrt(2 * math.pi)
LOG_BELOW, LOG_ABOVE = log_cdf(Z), log_cdf(-Z)
RELU = Z.clip(0)


def integral(values, x=Z):
    return float(np.trapezoid(values, x))


def log_binomials(n, k):
    """log C(n, j) for j = 0 … k - 1."""
    return np.array([math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in range(k)])


def fewer_than(k, n, log_p, log_q):
    """P(Bin(n, p) < k), elementwise, from the logarithms of p and of 1 - p."""
    total = np.zeros(np.broadcast(log_p, log_q).shape)
    for j, c in enumerate(log_binomials(n, min(k, n + 1))):
        total += np.exp(c + j * log_p + (n - j) * log_q)
    return total.clip(max=1)


def chosen(n_expert, top_k, others=1):
    """P(a logit at z is among the top k, and so are `others` - 1 more above it), on the grid Z."""
    if top_k < others:
        return np.zeros_like(Z)
    return fewer_than(top_k - others + 1, n_expert - others, LOG_ABOVE, LOG_BELOW)


def top_sum(f, n_expert, top_k):
    """E Σ f(z) over the top k of M standard normals z; `f` holds its values on the grid Z. Exact (fact 1)."""
    return n_expert * integral(P * f * chosen(n_expert, top_k))


def mean_norm(n, power=1):
    """E ‖z‖^power of n standard normals: 2^(power/2) Γ((n + power)/2) / Γ(n/2). For power -1 needs n > 1."""
    return 2 ** (power / 2) * math.exp(math.lgamma((n + power) / 2) - math.lgamma(n / 2))


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


# What the gates of a router without norms are, and their derivatives, as functions of the logit
ELEMENTWISE = {
    "sigmoid": (sigmoid, lambda s: sigmoid(s) * sigmoid(-s)),
    "tanh": (np.tanh, lambda s: np.cosh(s) ** -2.0),
}


def sum_squares(router, n_expert, top_k, tau):
    """E Σ g² of the gates, for kern, kern-norelu, sigmoid, tanh and softmax. KERN's does not depend on τ."""
    if router in ELEMENTWISE:
        return top_sum(ELEMENTWISE[router][0](tau * Z) ** 2, n_expert, top_k)
    if router == "softmax":
        return softmax_moments(n_expert, top_k, tau)["squares"]
    kept = {"kern": RELU, "kern-norelu": Z}[router]
    return top_sum(kept**2, n_expert, top_k) / n_expert  # fact 2: E ‖z‖² = M


def mean_sum(router, n_expert, top_k, tau):
    """E Σ g of the gates, routers as in `sum_squares`."""
    if router in ELEMENTWISE:
        return top_sum(ELEMENTWISE[router][0](tau * Z), n_expert, top_k)
    if router == "softmax":
        return softmax_moments(n_expert, top_k, tau)["sum"]
    kept = {"kern": RELU, "kern-norelu": Z}[router]
    return top_sum(kept, n_expert, top_k) / mean_norm(n_expert)


def kern_squared_sum(n_expert, top_k):
    """E (Σ g)² of KERN's gates: Σ g² plus all pairs. A pair is both chosen if the lower is, with the higher among its
    k - 1 betters; ∫ of z' p(z') above z is p(z)."""
    pairs = 2 * n_expert * (n_expert - 1) * integral(P * RELU * P * chosen(n_expert, top_k, others=2))
    return sum_squares("kern", n_expert, top_k, 1) + pairs / n_expert


def kern_limit(share):
    """E Σ g² of KERN as M grows with k = share · M: q p(q) + share, q the point with upper tail `share`; from a half
    on, where the rest of TopK are zeros, ½. For small shares it goes as 2 share · ln(1 / share)."""
    if share >= 0.5:
        return 0.5
    q = NormalDist().inv_cdf(1 - share)
    return q * NormalDist().pdf(q) + share


def jacobian_squares(router, n_expert, top_k, tau):
    """E ‖∂g/∂s‖²_F, gates by logits, all M logits included. Routers as in `sum_squares`, but kern-norelu.

    KERN: row i of the Jacobian is (e_i - s̄_i s̄)/‖s‖, of squared length (1 - s̄_i²)/‖s‖², so the sum is
    (number of positive gates - Σ g²)/‖s‖², and E 1/‖s‖² = 1/((M - 2) τ²).
    """
    if router in ELEMENTWISE:
        return top_sum(ELEMENTWISE[router][1](tau * Z) ** 2, n_expert, top_k)
    if router == "softmax":
        return softmax_moments(n_expert, top_k, tau, jacobian=True)["jacobian"]
    assert router == "kern", router
    kept = positive_gates(n_expert, top_k) - sum_squares("kern", n_expert, top_k, tau)
    return kept / ((n_expert - 2) * tau**2)


@cache
def softmax_moments(n_expert, top_k, tau, jacobian=False):
    """{"sum": E Σ p, "squares": E Σ p²} over the top k of a softmax over M and, if asked, "jacobian": E ‖∂p/∂s‖²_F =
    E Σ_i p_i² (1 - 2 p_i + Σ_j p_j²), i over the top k and j over all M. Fact 3, on a grid of ln t."""
    M, k = n_expert, top_k
    z, p = Z[::2], P[::2]
    h = z[1] - z[0]
    result = {"sum": 0.0, "squares": 0.0, "jacobian": 0.0}
    # e^(-tS) tⁿ lives where t ~ 1/S, and S between e^(-3τ) and M e^(7τ)
    for u in np.split(grid := np.arange(-math.log(M) - 7 * tau - 25, 3 * tau + 4, 0.25), range(64, len(grid), 64)):
        e = np.exp(tau * z)  # (Z,)
        decay = p * np.exp(-np.exp(u)[:, None] * e)  # (U, Z), density times e^(-t e^s)
        below, above = halves(decay, h)
        with np.errstate(divide="ignore"):
            log_above, log_below = np.log(above), np.log(below)
        picked = fewer_than_unnormalised(k, M - 1, log_above, log_below)

        def moment(n, values, u=u):  # ∫ tⁿ⁻¹ … dt = ∫ tⁿ … du; the other M - 1 or M - 2 are in `values`
            inner = M * np.trapezoid(values, dx=h, axis=1)
            return float((np.exp(n * u) * inner).sum() * 0.25) / math.gamma(n)

        result["sum"] += moment(1, decay * e * picked)
        squares = moment(2, decay * e**2 * picked)
        result["squares"] += squares
        if not jacobian:
            continue
        # Σ_{j ≠ i} p_j²: j above i, then one place less is left for i, or below
        below2, above2 = halves(decay * e**2, h)
        pairs = fewer_than_unnormalised(k - 1, M - 2, log_above, log_below) * above2
        pairs += fewer_than_unnormalised(k, M - 2, log_above, log_below) * below2
        result["jacobian"] += squares - 2 * moment(3, decay * e**3 * picked) + moment(4, decay * e**4 * picked)
        result["jacobian"] += (M - 1) * moment(4, decay * e**2 * pairs)
    return result


def halves(values, h):
    """(∫ up to each node, ∫ from each node) along the last axis, by the trapezoid rule."""
    steps = (values[:, 1:] + values[:, :-1]) * (h / 2)
    zero = np.zeros_like(values[:, :1])
    below = np.concatenate([zero, steps.cumsum(1)], 1)
    above = np.concatenate([steps[:, ::-1].cumsum(1)[:, ::-1], zero], 1)
    return below, above


def fewer_than_unnormalised(k, n, log_a, log_b):
    """Σ_{j < k} C(n, j) aʲ bⁿ⁻ʲ, elementwise: `fewer_than` where a + b need not be 1."""
    total = np.zeros_like(log_a)
    for j, c in enumerate(log_binomials(n, min(k, n + 1))):
        exponent = np.full_like(log_a, c)
        if j:
            exponent += j * log_a
        if n - j:
            exponent += (n - j) * log_b
        total += np.exp(exponent)
    return total


def fewer_positive(n_expert, top_k):
    """P(fewer than k of M symmetric logits are positive) = P(Bin(M, ½) < k)."""
    return float(sum(math.comb(n_expert, j) for j in range(top_k)) / 2**n_expert)


def positive_gates(n_expert, top_k):
    """E min(k, number of positive logits): KERN's gates that are not 0."""
    return sum(math.comb(n_expert, j) * min(j, top_k) for j in range(n_expert + 1)) / 2**n_expert


def monte_carlo(n_expert, top_k):
    """E[1 / ‖top-k of ReLU(y)‖₂ | at least 2 positive], y uniform on the sphere, 2 ≤ k ≤ M: the paper's constant.

    Without the condition it does not exist: with no positive score 1/norm is infinite, and with a single one, of size
    u, it is 1/u while u has a positive density at 0, so its mean diverges like a logarithm. Both together have
    probability (M + 1)/2ᴹ: never seen at 32 experts, certain in a large sample at 8.

    With T = Σ ReLU(z)² over the top k, c = E T^(-½) / E ‖z‖⁻¹ (fact 2) and T^(-½) = ∫ t^(-½) e^(-tT) dt / √π (fact 3).
    j < k positive: T is χ²_j. Otherwise condition on the k-th largest, at x / √(1 + 2t), k - 1 above it.
    """
    M, k = n_expert, top_k
    if not 2 <= k <= M:
        raise ValueError(f"top_k {k} must lie between 2 and n_expert {M}")
    few = sum(math.comb(M, j) / 2**M * mean_norm(j, -1) for j in range(2, k))
    x, p, log_q = Z[Z >= 0], P[Z >= 0], LOG_ABOVE[Z >= 0]
    w = np.arange(-14, 30, 0.05)  # t = e^(2w)
    log_c = math.log(M) + math.lgamma(M) - math.lgamma(k) - math.lgamma(M - k + 1)
    values = np.zeros_like(w)
    for i, t in enumerate(np.exp(2 * w)):
        log_below = log_cdf(x / math.sqrt(1 + 2 * t)) * (M - k)
        inner = integral(p * np.exp(log_c + (k - 1) * log_q + log_below - k / 2 * math.log1p(2 * t)), x)
        values[i] = math.exp(w[i]) * inner
    enough = 2 / math.sqrt(math.pi) * values.sum() * 0.05
    condition = 1 - (M + 1) / 2**M
    return (few + enough) / condition / mean_norm(M, -1)


def expert_squares(n_embd, expert_hidden, std_in, std_out):
    """E ‖E_m(x)‖² of an untrained expert, ‖x‖² = n_embd: C H std_out² E gelu(h)², h ~ N(0, C std_in²)."""
    h = math.sqrt(n_embd) * std_in * Z
    gelu = h * np.exp(log_cdf(h))
    return n_embd * expert_hidden * std_out**2 * integral(P * gelu**2)
