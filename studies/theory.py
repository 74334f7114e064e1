"""The paper's analytical claims against measurement: a table per claim.

    python -m studies.theory [--samples 20000] [--seed 0] [--only variance]

Each row: a quantity, its exact expectation, and what router.Router does with random weights and
inputs. Exit code 1 if a measurement is further from its expectation than chance allows.
docs/theory.md says which claims hold.

Expectations are computed rather than sampled. The M logits of a token are independent N(0, τ²):
they are, over draws of W for an input of fixed norm. common/quadrature.py states facts 1 to 3.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.integrate import simpson
from torch import Tensor

from common.command import build_parser, command, run_command
from common.quadrature import (
    ABOVE,
    DENSITY,
    STEP,
    Z,
    mean_norm,
    probability_of_fewer,
    top_sum,
)
from common.text import text_table
from gate_norm import gate_sum
from router import ROUTERS, Router, RouterSpec, Routing, monte_carlo_scale

WIDTH = 768  # width of the paper's model with 125M active parameters
INIT_STD = 0.02  # std of its initial weights
TAU = INIT_STD * math.sqrt(WIDTH)  # 0.554, the standard deviation of logits after a LayerNorm
PAPER = ("kern", "softmax", "sigmoid", "tanh")
# Routers that a mean is over. Tokens of one router share W, so draws of W give the error.
DRAWS = 32  # not measured
SPECS: dict[str, RouterSpec] = {name: spec for name, spec in ROUTERS.items() if spec}


class Estimate(NamedTuple):
    """A measured value and its standard error."""

    value: float
    error: float = 0.0

    def over(self, other: "Estimate") -> "Estimate":
        """The ratio to an independent estimate."""
        ratio = self.value / other.value
        relative_error = math.hypot(self.error / self.value, other.error / other.value)
        return Estimate(ratio, ratio * relative_error)


class Row(NamedTuple):
    """A line of the table."""

    quantity: str
    analytic: float | None  # None: no expectation is known
    measured: Estimate
    tolerance: float = 0.0  # allows for a bias of finite samples

    def agrees(self) -> bool:
        """Return True if the measurement is within 5 standard errors + 0.2% + the tolerance."""
        if self.analytic is None:
            return True
        allowed = 5 * self.measured.error + 2e-3 * abs(self.analytic) + self.tolerance
        return abs(self.measured.value - self.analytic) <= allowed


def estimate_mean(values: Tensor) -> Estimate:
    """Mean of values (n,) and its standard error."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


def sample_routers(
    statistic: Callable[[Routing], Tensor],
    name: str,
    n_expert: int,
    top_k: int,
    samples: int,
    seed: int,
) -> Estimate:
    """Mean of a statistic of the routing over DRAWS new routers and over tokens.

    Args:
        statistic: (N,) of a routing of N tokens.
        name: router in ROUTERS.
        n_expert: experts.
        top_k: experts per token.
        samples: tokens in all; inputs have unit variance, as after a LayerNorm.
        seed: of routers and inputs.
    """
    tokens = max(samples // DRAWS, 1)  # tokens per router
    results = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for _ in range(DRAWS):
            router = Router(WIDTH, n_expert, top_k, SPECS[name])
            x = F.layer_norm(torch.randn(tokens, WIDTH), (WIDTH,))  # (N, C)
            results.append(statistic(router(x)).double().mean())
    return estimate_mean(torch.stack(results))


def jacobian_squares(router: str, n_expert: int, top_k: int, tau: float) -> float:
    """E ‖∂g/∂s‖²_F of the gates by all M logits, for kern, sigmoid or tanh.

    KERN: row i of the Jacobian is (e_i - s̄_i s̄)/‖s‖, of squared length (1 - s̄_i²)/‖s‖², so the
    sum is (number of positive gates - Σ g²)/‖s‖², and E 1/‖s‖² = 1/((M - 2) τ²).
    """
    s = tau * Z
    if router == "sigmoid":
        return top_sum((np.cosh(s / 2) ** -2.0 / 4) ** 2, n_expert, top_k)
    if router == "tanh":
        return top_sum((np.cosh(s) ** -2.0) ** 2, n_expert, top_k)
    assert router == "kern", router
    positive = mean_positive_gates(n_expert, top_k)
    squares = gate_sum("kern", n_expert, top_k, tau, power=2)
    return (positive - squares) / ((n_expert - 2) * tau**2)


def fewer_positive(n_expert: int, top_k: int) -> float:
    """P(fewer than k of M symmetric logits are positive)."""
    return float(probability_of_fewer(top_k, n_expert, np.array(0.5)))


def mean_positive_gates(n_expert: int, top_k: int) -> float:
    """E min(k, number of positive logits): KERN's gates that are not 0."""
    return sum(1 - fewer_positive(n_expert, count) for count in range(1, top_k + 1))


def expected_constant(n_expert: int, top_k: int) -> float:
    """The paper's constant: E[1 / ‖top-k of ReLU(y)‖₂ | at least 2 positive], 2 ≤ k ≤ M.

    y is uniform on the sphere.

    Without the condition it does not exist: with no positive score 1/norm is infinite, and with a
    single one, of size u, it is 1/u while u has a positive density at 0, so its mean diverges like
    a logarithm. Both together have probability (M + 1)/2ᴹ: never seen at 32 experts, certain in a
    large sample at 8.

    With T = Σ ReLU(z)² over the top k, c = E T^(-½) / E ‖z‖⁻¹ (fact 2) and T^(-½) = ∫ t^(-½)
    e^(-tT) dt / √π (fact 3). With j < k positive T is χ²_j. Otherwise condition on the k-th
    largest, at x / √(1 + 2t), k - 1 above it.
    """
    M = n_expert
    k = top_k
    p_enough = 1 - (M + 1) / 2**M  # probability of at least 2 positive
    few_positive = 0.0  # part of E T^(-½) with 2 ≤ j < k positive
    for j in range(2, k):
        few_positive += math.comb(M, j) / 2**M * mean_norm(j, -1)
    # The part with k positive: ∫ t^(-½) e^(-tT) dt / √π over t = e^(2w), dt = 2t dw.
    w_step = 0.05
    w = np.arange(-14, 30, w_step)
    t = np.exp(2 * w)[:, None]  # (W, 1)
    x = Z[Z >= 0]  # (X,)
    scaled = torch.from_numpy(x / np.sqrt(1 + 2 * t))
    log_below = torch.special.log_ndtr(scaled).numpy()  # (W, X), of each of M - k others
    log_above = np.log(ABOVE[Z >= 0])  # (X,), of each of k - 1 larger ones
    log_beta = math.lgamma(k) + math.lgamma(M - k + 1) - math.lgamma(M + 1)
    log_density = (k - 1) * log_above + (M - k) * log_below - log_beta
    density = DENSITY[Z >= 0] * np.exp(log_density - k / 2 * np.log1p(2 * t))
    integrals = np.exp(w) * simpson(density, dx=STEP)  # (W,)
    k_positive = 2 / math.sqrt(math.pi) * integrals.sum() * w_step
    return float((few_positive + k_positive) / p_enough / mean_norm(M, -1))


def variance(samples: int, seed: int) -> list[Row]:
    """Sec. 3.4, "preserves the variance of the MoE output at a constant scale"."""
    shapes = {"k = 8": ((32, 8), (256, 8)), "k = M/8": ((32, 4), (256, 32))}  # (M, k)
    rows = []
    for label, (small, large) in shapes.items():
        for name in PAPER:
            expected = gate_sum(name, *large, TAU, power=2) / gate_sum(name, *small, TAU, power=2)
            measured_small = sample_routers(sum_squares, name, *small, samples, seed)
            measured_large = sample_routers(sum_squares, name, *large, samples, seed)
            quantity = f"{name}: E Σg² at M = 256 over M = 32, {label}"
            rows.append(Row(quantity, expected, measured_large.over(measured_small)))
    return rows


def sum_squares(routing: Routing) -> Tensor:
    """Σ g² of each token, (N,)."""
    return routing.weights.double().square().sum(-1)


def has_zero_gate(routing: Routing) -> Tensor:
    """True for tokens (N,) with a gate of 0."""
    return (routing.weights == 0).any(-1)


def measure_jacobian(
    name: str, logits: Tensor, top_k: int, tau: float
) -> tuple[Estimate, Estimate]:
    """The RMS of ‖∂g/∂s‖ over tokens, and the median of τ ‖∂g/∂s‖ / ‖g‖.

    The router's W is the identity, so that its inputs are its logits; in fp64.

    Args:
        name: router in ROUTERS.
        logits: (N, E) with standard deviation `tau`.
        top_k: experts per token.
        tau: τ.
    """
    n_expert = logits.shape[-1]
    router = Router(n_expert, n_expert, top_k, SPECS[name]).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_expert))
    logits = logits.clone().requires_grad_()
    gates = router(logits).weights  # (N, K)
    squares = torch.zeros(len(logits), dtype=torch.float64)  # (N,), ‖∂g/∂s‖²
    for i in range(top_k):
        (gradient,) = torch.autograd.grad(gates[:, i].sum(), logits, retain_graph=True)  # (N, E)
        squares += gradient.square().sum(-1)
    mean, error = estimate_mean(squares)
    rms = math.sqrt(mean)
    relative = tau * squares.sqrt() / gates.detach().norm(dim=-1)
    return Estimate(rms, error / (2 * rms)), Estimate(float(relative.median()))


def gradients(samples: int, seed: int) -> list[Row]:
    """Sec. 3.4, "the gradient vanishing problem"."""
    M = 64
    k = 8
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(max(samples // 8, 100), M, generator=generator, dtype=torch.float64)
    rows = []
    medians = []
    for name in PAPER:
        rms, median = measure_jacobian(name, 0.5 * z, k, 0.5)
        rms_at_4, _ = measure_jacobian(name, 4 * z, k, 4)
        _, median_at_16 = measure_jacobian(name, 16 * z, k, 16)
        expected = None  # not known of softmax, nor of medians
        if name != "softmax":
            squares = jacobian_squares(name, M, k, 4) / jacobian_squares(name, M, k, 0.5)
            expected = math.sqrt(squares)
        rows.append(Row(f"{name}: RMS ‖∂g/∂s‖, τ = 4 over τ = 0.5", expected, rms_at_4.over(rms)))
        quantity = f"{name}: median τ‖∂g/∂s‖/‖g‖, τ = 16 over τ = 0.5"
        medians.append(Row(quantity, None, median_at_16.over(median)))
    return rows + medians


def monte_carlo(samples: int, seed: int) -> list[Row]:
    """App. "Implementation Details": c = E[1 / ‖top-k of ReLU(y)‖]."""
    samples_per_draw = max(samples // 10, 20)
    rows = []
    for M, k in ((32, 4), (64, 8), (256, 32), (256, 8), (1024, 8)):
        draws = torch.zeros(10, dtype=torch.float64)
        for i in range(len(draws)):
            draws[i] = monte_carlo_scale(M, k, samples=samples_per_draw, seed=seed + i)
        rows.append(Row(f"c, {k} of {M}", expected_constant(M, k), estimate_mean(draws)))
    return rows


def positive(samples: int, seed: int) -> list[Row]:
    """App. "The Effect of ReLU": "the select router weights are usually positive" if k < M/2."""
    rows = []
    for M, k in ((32, 8), (64, 8), (64, 24), (64, 32)):
        share = sample_routers(has_zero_gate, "kern", M, k, samples, seed)
        quantity = f"P(fewer than {k} of {M} gates positive)"
        rows.append(Row(quantity, fewer_positive(M, k), share, tolerance=5 / samples))
    return rows


CLAIMS = {
    "variance": variance,
    "gradients": gradients,
    "monte-carlo": monte_carlo,
    "positive": positive,
}


def format_row(row: Row) -> tuple[str, str, str]:
    """Quantity, analytic and measured value as text; (!) marks a measurement that is off."""
    analytic = "-" if row.analytic is None else f"{row.analytic:.4g}"
    value, error = row.measured
    measured = f"{value:.4g}"
    if error:
        measured += f" ± {error:.1g}"
    if not row.agrees():
        measured += "  (!)"
    return row.quantity, analytic, measured


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 1 if a measurement is off its expectation."""
    parser = build_parser("studies.theory", __doc__)
    parser.add_argument(
        "--samples", type=int, default=20_000, help="tokens per mean (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", choices=CLAIMS, help="one claim")
    args = parser.parse_args(argv)
    if args.samples < 100:
        raise ValueError(f"--samples {args.samples}: expected 100 or more")
    off = []
    for name, measure_claim in CLAIMS.items():
        if args.only and args.only != name:
            continue
        rows = measure_claim(args.samples, args.seed)
        lines = [format_row(row) for row in rows]
        table = text_table(("quantity", "analytic", "measured ± standard error"), lines, left=3)
        print(f"{measure_claim.__doc__}\n\n{table}\n", flush=True)
        off += [row.quantity for row in rows if not row.agrees()]
    if off:
        print(
            "(!) measured and analytic differ by more than chance allows: " + "; ".join(off),
            file=sys.stderr,
        )
    return 1 if off else 0


if __name__ == "__main__":
    run_command(main)
