"""The paper's analytical claims against measurement: a table per claim.

    python -m studies.theory [--samples 20000] [--seed 0] [--only variance]

Each row: a quantity, its exact expectation, and what router.Router does with random weights and
inputs. Exit code 1 if a measurement is further from its expectation than chance allows.
docs/theory.md says which claims hold.

Expectations are computed rather than sampled. The M logits of a token are independent N(0, τ²),
which they are over draws of W for an input of fixed norm. Facts 1 to 3 stand in common/quadrature.py.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.command import build_parser, command, run_command
from common.quadrature import ABOVE, P, Z, fewer, mean_norm, simpson, top_sum
from common.text import text_table
from gate_norm import gate_sum
from router import ROUTERS, Router, RouterSpec, Routing, monte_carlo_scale

# the paper's 125M; with N(0, 0.02²) weights and LayerNorm before them logits have
WIDTH, STD = 768, 0.02
TAU = STD * math.sqrt(WIDTH)  # a standard deviation of 0.554
PAPER = ("kern", "softmax", "sigmoid", "tanh")
# routers that a mean is taken over: one router's tokens share W, so draws, not tokens, give the
# error
DRAWS = 32
SPECS: dict[str, RouterSpec] = {name: spec for name, spec in ROUTERS.items() if spec}


class Estimate(NamedTuple):
    """A measured value and its standard error."""

    value: float
    error: float = 0.0

    def over(self, other: "Estimate") -> "Estimate":
        """The ratio to an independent estimate."""
        ratio = self.value / other.value
        return Estimate(
            ratio, ratio * math.hypot(self.error / self.value, other.error / other.value)
        )


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
    statistic: Callable[[Routing], Tensor],
    name: str,
    n_expert: int,
    top_k: int,
    samples: int,
    seed: int,
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


def jacobian_squares(router: str, n_expert: int, top_k: int, tau: float) -> float:
    """E ‖∂g/∂s‖²_F of the gates by all M logits, for kern, sigmoid or tanh.

    KERN: row i of the Jacobian is (e_i - s̄_i s̄)/‖s‖, of squared length (1 - s̄_i²)/‖s‖², so the
    sum is (number of positive gates - Σ g²)/‖s‖², and E 1/‖s‖² = 1/((M - 2) τ²).
    """
    s = tau * Z
    # Of gates without norms.
    derivatives = {"sigmoid": np.cosh(s / 2) ** -2.0 / 4, "tanh": np.cosh(s) ** -2.0}
    if router in derivatives:
        return top_sum(derivatives[router] ** 2, n_expert, top_k)
    assert router == "kern", router
    rows = positive_gates(n_expert, top_k) - gate_sum("kern", n_expert, top_k, tau, power=2)
    return rows / ((n_expert - 2) * tau**2)


def fewer_positive(n_expert: int, top_k: int) -> float:
    """P(fewer than k of M symmetric logits are positive)."""
    return float(fewer(top_k, n_expert, np.array(0.5), np.array(0.5)))


def positive_gates(n_expert: int, top_k: int) -> float:
    """E min(k, number of positive logits): KERN's gates that are not 0."""
    return sum(1 - fewer_positive(n_expert, count) for count in range(1, top_k + 1))


def expected_constant(n_expert: int, top_k: int) -> float:
    """E[1 / ‖top-k of ReLU(y)‖₂ | at least 2 positive], y uniform on the sphere, 2 ≤ k ≤ M: the paper's constant.

    Without the condition it does not exist: with no positive score 1/norm is infinite, and with a
    single one, of size u, it is 1/u while u has a positive density at 0, so its mean diverges like
    a logarithm. Both together have probability (M + 1)/2ᴹ: never seen at 32 experts, certain in a
    large sample at 8.

    With T = Σ ReLU(z)² over the top k, c = E T^(-½) / E ‖z‖⁻¹ (fact 2) and T^(-½) = ∫ t^(-½)
    e^(-tT) dt / √π (fact 3). With j < k positive T is χ²_j. Otherwise condition on the k-th
    largest, at x / √(1 + 2t), k - 1 above it.
    """
    M, k = n_expert, top_k
    few = sum(math.comb(M, j) / 2**M * mean_norm(j, -1) for j in range(2, k))
    half, w = Z >= 0, np.arange(-14, 30, 0.05)
    t = np.exp(2 * w)[:, None]
    below = torch.special.log_ndtr(torch.from_numpy(Z[half] / np.sqrt(1 + 2 * t))).numpy()  # (W, X)
    places = math.lgamma(k) + math.lgamma(M - k + 1) - math.lgamma(M + 1)
    density = P[half] * np.exp(
        (k - 1) * np.log(ABOVE[half]) + (M - k) * below - places - k / 2 * np.log1p(2 * t)
    )
    enough = 2 / math.sqrt(math.pi) * (np.exp(w) * simpson(density, Z[1] - Z[0])).sum() * 0.05
    return float((few + enough) / (1 - (M + 1) / 2**M) / mean_norm(M, -1))


def variance(samples: int, seed: int) -> list[Row]:
    """Sec. 3.4, "preserves the variance of the MoE output at a constant scale"."""
    rows = []
    for label, (few, many) in (("k = 8", ((32, 8), (256, 8))), ("k = M/8", ((32, 4), (256, 32)))):
        for name in PAPER:
            expected = gate_sum(name, *many, TAU, power=2) / gate_sum(name, *few, TAU, power=2)
            first, last = (
                sample_routers(
                    lambda routing: routing.weights.double().square().sum(-1),
                    name,
                    *shape,
                    samples,
                    seed,
                )
                for shape in (few, many)
            )
            rows.append(
                Row(f"{name}: E Σg² at M = 256 over M = 32, {label}", expected, last.over(first))
            )
    return rows


def measure_jacobian(
    name: str, logits: Tensor, top_k: int, tau: float
) -> tuple[Estimate, Estimate]:
    """Of gates of logits (N, E) of standard deviation τ: the RMS of ‖∂g/∂s‖, and the median of τ ‖∂g/∂s‖ / ‖g‖.

    The router's W is the identity, so that its inputs are its logits; in fp64.
    """
    n_expert = logits.shape[-1]
    router = Router(n_expert, n_expert, top_k, SPECS[name]).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_expert))
    logits = logits.clone().requires_grad_()
    gates = router(logits).weights
    rows = [
        torch.autograd.grad(gates[:, i].sum(), logits, retain_graph=True)[0] for i in range(top_k)
    ]
    squares = torch.stack(rows, 1).square().sum((1, 2))
    mean, error = estimate(squares)
    relative = tau * squares.sqrt() / gates.detach().norm(dim=-1)
    return Estimate(math.sqrt(mean), error / (2 * math.sqrt(mean))), Estimate(
        float(relative.median())
    )


def gradients(samples: int, seed: int) -> list[Row]:
    """Sec. 3.4, "the gradient vanishing problem"."""
    M, k, rows = 64, 8, []
    z = torch.randn(
        max(samples // 8, 100),
        M,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    for text, which, tau in (("RMS ‖∂g/∂s‖", 0, 4), ("median τ‖∂g/∂s‖/‖g‖", 1, 16)):
        for name in PAPER:
            small, large = (
                measure_jacobian(name, scale * z, k, scale)[which] for scale in (0.5, tau)
            )
            expected = None  # of medians, and of softmax
            if which == 0 and name != "softmax":
                first, last = (jacobian_squares(name, M, k, scale) for scale in (0.5, tau))
                expected = math.sqrt(last / first)
            rows.append(Row(f"{name}: {text}, τ = {tau} over τ = 0.5", expected, large.over(small)))
    return rows


def monte_carlo(samples: int, seed: int) -> list[Row]:
    """App. "Implementation Details": c = E[1 / ‖top-k of ReLU(y)‖]."""
    rows = []
    for M, k in ((32, 4), (64, 8), (256, 32), (256, 8), (1024, 8)):
        draws = [
            monte_carlo_scale(M, k, samples=max(samples // 10, 20), seed=seed + i)
            for i in range(10)
        ]
        rows.append(
            Row(
                f"c, {k} of {M}",
                expected_constant(M, k),
                estimate(torch.tensor(draws, dtype=torch.float64)),
            )
        )
    return rows


def positive(samples: int, seed: int) -> list[Row]:
    """App. "The Effect of ReLU": below half active, "the select router weights are usually positive"."""
    rows = []
    for M, k in ((32, 8), (64, 8), (64, 24), (64, 32)):
        share = sample_routers(
            lambda routing: (routing.weights == 0).any(-1), "kern", M, k, samples, seed
        )
        rows.append(
            Row(
                f"P(fewer than {k} of {M} gates positive)", fewer_positive(M, k), share, 5 / samples
            )
        )
    return rows


CLAIMS = {
    "variance": variance,
    "gradients": gradients,
    "monte-carlo": monte_carlo,
    "positive": positive,
}


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
    for name in [args.only] if args.only else CLAIMS:
        rows, cells = CLAIMS[name](args.samples, args.seed), []
        for row in rows:
            analytic = "-" if row.analytic is None else f"{row.analytic:.4g}"
            value, error = row.measured
            measured = f"{value:.4g}" + (f" ± {error:.1g}" if error else "")
            cells.append((row.quantity, analytic, measured + ("" if row.agrees() else "  (!)")))
        table = text_table(("quantity", "analytic", "measured ± standard error"), cells, left=3)
        print(f"{CLAIMS[name].__doc__}\n\n{table}\n", flush=True)
        off += [row.quantity for row in rows if not row.agrees()]
    if off:
        print(
            "(!) measured and analytic differ by more than chance allows: " + "; ".join(off),
            file=sys.stderr,
        )
    return 1 if off else 0


if __name__ == "__main__":
    run_command(main)
