"""studies.theory: expectations against closed forms, brute force and the paper's figures.

Tolerances are those of quadrature and sampling (4 standard errors), in fp64: rounding is far below
either.
"""

import math

import numpy as np
import pytest
import torch

from studies import theory

# shared/paper/results.json, derived.monte_carlo, 4e5 samples each:
# (M, k): c_mean, c_se, E_sum_g2, c_asymptotic, P_fewer_than_k_positive, E_nonzero_in_topk
SAMPLED = {
    (64, 8): (1.713322, 3.0e-4, 0.352606, 1.662508, 3.819071e-11, 8.0),
    (64, 32): (1.441210, 2.7e-4, 0.499763, 1.414214, 0.450327, 30.410452),
    (64, 64): (1.440714, 2.7e-4, 0.500152, 1.414214, 1.0, 32.0),
    (32, 4): (1.769189, 4.8e-4, 0.343874, 1.662508, 1.278007e-06, 3.999999),
    (1024, 8): (4.139940, 7.1e-4, 0.058866, 4.092369, 1.285351e-291, 8.0),
}


@pytest.mark.parametrize(("n_expert", "top_k"), SAMPLED)
def test_kerns_constants_are_those_sampled_for_the_paper(n_expert, top_k):
    c, error, squares, _, fewer, gates = SAMPLED[n_expert, top_k]
    assert theory.expected_constant(n_expert, top_k) == pytest.approx(c, abs=4 * error)
    assert theory.gate_sum("kern", n_expert, top_k, 1, power=2) == pytest.approx(squares, rel=1e-3)
    assert theory.fewer_positive(n_expert, top_k) == pytest.approx(fewer, rel=1e-5)
    assert theory.mean_positive_gates(n_expert, top_k) == pytest.approx(gates, rel=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "kern"])
def test_gradients_against_autograd_of_the_formula(name):
    n, M, k, tau = 20_000, 16, 4, 1.5
    draws = np.random.default_rng(0).standard_normal((n, M))
    s = torch.from_numpy(-tau * np.sort(-draws, axis=1)).requires_grad_()
    gates = {
        "sigmoid": s.sigmoid,
        "tanh": s.tanh,
        "kern": lambda: (s / s.norm(dim=-1, keepdim=True)).relu(),
    }[name]()
    squares = sum(
        torch.autograd.grad(gates[:, i].sum(), s, retain_graph=True)[0].square().sum(-1)
        for i in range(k)
    )
    error = float(squares.std()) / math.sqrt(n)
    assert theory.jacobian_squares(name, M, k, tau) == pytest.approx(
        float(squares.mean()), abs=4 * error
    )
    (rms, rms_error), _ = theory.measure_jacobian(name, s.detach(), k, tau)  # scaled, if by c
    assert rms_error / rms == pytest.approx(error / (2 * float(squares.mean())))


def test_the_constant_of_two_active_experts():
    """Given two positive scores: a single one, u, gives 1/u, whose mean grows with the number of
    samples.
    """
    y = np.random.default_rng(0).standard_normal((400_000, 8))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    best = -np.sort(-y.clip(0), axis=1)[:, :2]
    two = 1 / np.linalg.norm(best[best[:, 1] > 0], axis=1)
    assert theory.expected_constant(8, 2) == pytest.approx(two.mean(), rel=2e-3)


def test_measured_meets_analytic(monkeypatch, capsys):
    monkeypatch.setattr(theory, "DRAWS", 8)
    rows = {row.quantity: row for claim in theory.CLAIMS.values() for row in claim(320, 0)}
    ratio = theory.Estimate(4.0, 0.3).over(theory.Estimate(2.0, 0.2))
    assert ratio == pytest.approx((2.0, 2.0 * math.hypot(0.3 / 4, 0.2 / 2)))
    assert len(rows) == 8 + 8 + 5 + 4 and all(row.agrees() for row in rows.values())
    assert sum(row.measured.error > 0 and row.analytic is not None for row in rows.values()) > 15
    for quantity, low, high in (
        ("kern: E Σg² at M = 256 over M = 32, k = M/8", 0.95, 1.15),
        ("kern: E Σg² at M = 256 over M = 32, k = 8", 0.3, 0.4),
        ("softmax: RMS ‖∂g/∂s‖, τ = 4 over τ = 0.5", 3, 4),
        ("kern: median τ‖∂g/∂s‖/‖g‖, τ = 16 over τ = 0.5", 0.999, 1.001),
        ("P(fewer than 32 of 64 gates positive)", 0.35, 0.55),
    ):
        assert low < rows[quantity].measured.value < high, quantity


def test_measurement_off_its_expectation_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(theory, "fewer_positive", lambda n_expert, top_k: 0.5)
    # and a claim that holds follows
    claims = {name: theory.CLAIMS[name] for name in ("positive", "variance")}
    monkeypatch.setattr(theory, "CLAIMS", claims)
    assert theory.main(["--samples", "320"]) == 1
    said = capsys.readouterr()
    assert (
        "(!) measured and analytic differ" in said.err and "(!)" in said.out and "τ" not in said.out
    )
    assert theory.main(["--only", "variance", "--samples", "100"]) == 0
    assert theory.main(["--samples", "5"]) == 2
