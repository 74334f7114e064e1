"""eval.theory: expectations against closed forms, brute force and the paper's figures; verdicts.

Tolerances are those of quadrature and sampling (4 standard errors), in fp64: rounding is far below either.
"""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval.theory.__main__ as theory
from eval.theory import claims
from eval.theory import exact as theory_exact
from eval.theory.exact import RELU, P, Z
from gate_norm import softmax_moments

# shared/paper/results.json, derived.monte_carlo, 4e5 samples each:
# (M, k): c_mean, c_se, E_sum_g2, c_asymptotic, P_fewer_than_k_positive, E_nonzero_in_topk
SAMPLED = {
    (64, 8): (1.713322, 3.0e-4, 0.352606, 1.662508, 3.819071e-11, 8.0),
    (64, 32): (1.441210, 2.7e-4, 0.499763, 1.414214, 0.450327, 30.410452),
    (64, 64): (1.440714, 2.7e-4, 0.500152, 1.414214, 1.0, 32.0),
    (32, 4): (1.769189, 4.8e-4, 0.343874, 1.662508, 1.278007e-06, 3.999999),
    (32, 8): (1.540858, 4.2e-4, 0.452386, 1.467518, 1.051201e-03, 7.998614),
    (128, 16): (1.687343, 2.0e-4, 0.357117, 1.662508, 4.465077e-20, 16.0),
    (256, 8): (2.524164, 2.8e-4, 0.159331, 2.481825, 1.169286e-64, 8.0),
    (1024, 8): (4.139940, 7.1e-4, 0.058866, 4.092369, 1.285351e-291, 8.0),
}

# the same file, derived.init_gate_scale at width 768: √E Σg² and E Σg
GATES = {
    ("softmax", 64, 8): (0.0997, 0.2715),
    ("sigmoid", 64, 8): (2.0046, 5.6558),
    ("tanh", 64, 8): (1.9852, 5.5411),
    ("kern", 64, 8): (0.5940, 1.6211),
    ("softmax", 32, 8): (0.1649, 0.4448),
    ("tanh", 32, 8): (1.6673, 4.5110),
    ("softmax", 256, 8): (0.0342, 0.0942),
    ("sigmoid", 1024, 8): (2.3138, 6.5413),
    ("softmax", 64, 64): (0.1451, 1.0),
    ("kern", 64, 64): (0.7070, 3.2007),
    ("kern-norelu", 64, 64): (1.0, 0.0),
}


def sorted_logits(n, n_expert, tau, seed=0):
    """(n, M) of N(0, τ²), largest first."""
    return tau * -np.sort(-np.random.default_rng(seed).standard_normal((n, n_expert)), axis=1)


@pytest.mark.parametrize(("n_expert", "top_k"), SAMPLED)
def test_kerns_constants_are_those_sampled_for_the_paper(n_expert, top_k):
    c, error, squares, limit, fewer, gates = SAMPLED[n_expert, top_k]
    assert theory_exact.monte_carlo(n_expert, top_k) == pytest.approx(c, abs=4 * error)
    assert theory_exact.gate_sum("kern", n_expert, top_k, 1, power=2) == pytest.approx(squares, rel=1e-3)
    assert theory_exact.kern_limit(top_k / n_expert) ** -0.5 == pytest.approx(limit, rel=1e-6)
    assert theory_exact.fewer_positive(n_expert, top_k) == pytest.approx(fewer, rel=1e-5)
    assert theory_exact.positive_gates(n_expert, top_k) == pytest.approx(gates, rel=1e-6)


@pytest.mark.parametrize(("name", "n_expert", "top_k"), GATES)
def test_gates_at_initialisation_are_those_sampled_for_the_paper(name, n_expert, top_k):
    rms, total = GATES[name, n_expert, top_k]
    assert math.sqrt(theory_exact.gate_sum(name, n_expert, top_k, claims.TAU, power=2)) == pytest.approx(rms, rel=3e-3)
    assert theory_exact.gate_sum(name, n_expert, top_k, claims.TAU) == pytest.approx(total, rel=3e-3, abs=1e-6)


def test_top_sum_where_the_answer_is_known():
    """The largest of 2 normals has mean 1/√π, of 3 it is 1.5/√π; squares of all M sum to M, the best k or not."""
    assert theory_exact.top_sum(Z, 2, 1) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)
    assert theory_exact.top_sum(Z, 3, 1) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-6)
    assert theory_exact.top_sum(Z, 3, 2) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-6)  # the middle's mean is 0
    assert theory_exact.top_sum(Z**2, 17, 17) == pytest.approx(17, rel=1e-9)
    assert theory_exact.integrate(P * RELU) == pytest.approx(1 / math.sqrt(2 * math.pi), rel=1e-8)


@pytest.mark.parametrize("n", [1, 2, 3, 64])
def test_mean_norms(n):
    """E‖z‖² is n; E‖z‖ of 1, 2, 3 normals √(2/π), √(π/2), 2√(2/π); E‖z‖ E‖z‖⁻¹ by Γ's recursion."""
    assert theory_exact.mean_norm(n, 2) == pytest.approx(n)
    known = {1: math.sqrt(2 / math.pi), 2: math.sqrt(math.pi / 2), 3: 2 * math.sqrt(2 / math.pi)}
    if n in known:
        assert theory_exact.mean_norm(n) == pytest.approx(known[n])
    if n > 1:
        assert theory_exact.mean_norm(n, -1) * (n - 1) == pytest.approx(theory_exact.mean_norm(n))  # Γ(x + 1) = x Γ(x)


def test_copies_of_one_expert_add_up_as_amplitudes():
    """k = M: E(Σ relu)² = M/2 + M(M - 1)/(2π), over E‖z‖² = M. k = 1: one gate, so the sum's square is Σg²."""
    assert theory_exact.kern_squared_sum(64, 64) == pytest.approx(0.5 + 63 / (2 * math.pi), rel=1e-8)
    squares = theory_exact.gate_sum("kern", 64, 1, 1, power=2)
    assert theory_exact.kern_squared_sum(64, 1) == pytest.approx(squares, rel=1e-9)
    s = sorted_logits(50_000, 16, 1)
    kept = s[:, :5].clip(0).sum(1) / np.linalg.norm(s, axis=1)
    assert theory_exact.kern_squared_sum(16, 5) == pytest.approx((kept**2).mean(), rel=0.01)


@pytest.mark.parametrize("tau", [0.3, 2.0, 6.0])
def test_softmax_moments_against_brute_force(tau):
    n, M, k = 60_000, 24, 5
    s = sorted_logits(n, M, tau)
    p = np.exp(s - s[:, :1])
    p /= p.sum(1, keepdims=True)
    kept = p[:, :k]
    exact = softmax_moments(M, k, tau)
    for found, values in zip(exact, (kept.sum(1), (kept**2).sum(1)), strict=True):
        assert found == pytest.approx(values.mean(), abs=4 * values.std() / math.sqrt(n))


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "kern"])
def test_gradients_against_autograd_of_the_formula(name):
    n, M, k, tau = 20_000, 16, 4, 1.5
    s = torch.from_numpy(sorted_logits(n, M, tau)).requires_grad_()
    gates = {"sigmoid": s.sigmoid, "tanh": s.tanh, "kern": lambda: (s / s.norm(dim=-1, keepdim=True)).relu()}[name]()
    squares = sum(torch.autograd.grad(gates[:, i].sum(), s, retain_graph=True)[0].square().sum(-1) for i in range(k))
    error = float(squares.std()) / math.sqrt(n)
    assert theory_exact.jacobian_squares(name, M, k, tau) == pytest.approx(float(squares.mean()), abs=4 * error)


def test_the_constant_exists_for_two_active_experts_but_not_for_one():
    """A single positive score u gives 1/u, whose mean grows with the number of samples, by p(0) ln 10 per decade."""
    with pytest.raises(ValueError, match="top_k 1 must lie between 2"):
        theory_exact.monte_carlo(8, 1)
    y = np.random.default_rng(0).standard_normal((400_000, 8))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    best = -np.sort(-y.clip(0), axis=1)[:, :2]
    two = 1 / np.linalg.norm(best[best[:, 1] > 0], axis=1)
    assert theory_exact.monte_carlo(8, 2) == pytest.approx(two.mean(), rel=2e-3)


def test_an_experts_output_is_of_the_size_computed():
    torch.manual_seed(0)
    x = F.layer_norm(torch.randn(64, 96), (96,))
    w_in, w_out = torch.randn(200, 96, 24) * 0.1, torch.randn(200, 24, 96) * 0.05
    measured = (F.gelu(x @ w_in) @ w_out).square().sum(-1).mean()
    assert theory_exact.expert_squares(96, 24, 0.1, 0.05) == pytest.approx(float(measured), rel=0.03)


def test_row_off_by_more_than_chance_or_tolerance_is_flagged():
    row = claims.Row("a", "b", 1.0, 1.1, 0.03, True)
    assert row.agrees() and "(!)" not in theory.format_rows([row])
    row.error = 0.01
    assert not row.agrees() and "1.1 ± 0.01  (!)" in theory.format_rows([row])
    row.analytic = None
    assert row.agrees()
    row = claims.Row("a", "0", 0.0, 2.2e-16, 0.0, True, tolerance=5e-8)
    assert row.agrees() and "2.2e-16 (tolerance 5e-08)" in theory.format_rows([row])  # not a standard error
    row.measured = 6e-8
    assert not row.agrees()


def test_verdicts():
    def verdict(paper, measured, holds):
        return claims.Row("a", paper, None, measured, 0.0, holds).verdict

    assert verdict("constant", 1.1, True) == "holds" and verdict("constant", 1.3, False) == "does not hold"
    assert verdict("constant", 0.3, False) == "only a bound" and verdict("small", 0.3, False) == "does not hold"
    assert verdict("-", 0.3, True) == "-"


def test_ratio_has_the_error_of_both_estimates():
    value, error = claims.Estimate(6.0, 0.3).over(claims.Estimate(2.0, 0.2))
    assert value == 3 and error == pytest.approx(3 * math.hypot(0.3 / 6, 0.2 / 2))
    value, error = claims.estimate(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64))
    assert value == 3 and error == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Exit status and content of theory.json of a small run of everything."""
    folder = tmp_path_factory.mktemp("theory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "DRAWS", 12)
        status = theory.main(["--samples", "500", "--out", str(folder)])
    return status, json.loads((folder / "theory.json").read_text())


def test_measured_meets_analytic_and_the_verdicts_follow(report):
    status, found = report
    rows = {row["claim"]: row for claim in found["claims"].values() for row in claim["rows"]}
    assert status == 0 and len(rows) > 50
    assert sum(row["error"] > 0 and row["analytic"] is not None for row in rows.values()) > 30
    for claim, verdict in {
        "E‖MoE‖² / E‖E_m‖², independent experts, 8 of 64": "holds",
        "E‖MoE‖² / E‖E_m‖², 64 copies of one expert, 8 of 64": "does not hold",
        "kern: E Σg² at M = 256 over M = 32, k = M/8": "holds",
        "kern: E Σg² at M = 256 over M = 32, k = 8": "only a bound",
        "kern: E‖MoE‖² at 32 of 256 over 4 of 32, M·H fixed": "only a bound",
        "softmax: RMS ‖∂g/∂s‖, τ = 4 over τ = 0.5": "does not hold",
        "sigmoid: RMS ‖∂g/∂s‖, τ = 4 over τ = 0.5": "holds",
        "kern: experts of 64 that a token updates, k = 64": "does not hold",
        "max |sigmoid router - φ(s), φ = sigmoid|": "holds",
        "max |softmax router - exp(l1(s)), as Sec. 3.4 words it|": "does not hold",
        "Nadaraya-Watson weights sum to 1: softmax, 8 of 64": "does not hold",
        "P(fewer than 8 of 64 gates positive)": "holds",
        "P(fewer than 28 of 64 gates positive)": "does not hold",
        "tokens with the same gates without ReLU, 8 of 64": "holds",
    }.items():
        assert rows[claim]["verdict"] == verdict, claim


def test_panels_hold_expectations_and_measurements(report):
    _, found = report
    panels = {name: claim["panels"] for name, claim in found["claims"].items()}
    assert {name for name in panels if panels[name]} == set(claims.CLAIMS) - {"family"}
    energy = panels["variance"][1]["curves"]["kern"]
    assert [point[0] for point in energy] == [16, 32, 64, 128, 256]
    for experts, analytic, measured, error in energy:
        assert analytic == theory_exact.gate_sum("kern", experts, experts // 8, claims.TAU, power=2)
        assert abs(analytic - measured) < 5 * error + 1e-3


def test_only_runs_one_claim_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert theory.main(["--only", "family", "--samples", "400", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "softmax router" in printed and "Monte" not in printed and not list(tmp_path.iterdir())
    assert theory.main(["--samples", "5"]) == 2
    assert "--samples 5: expected 100 or more" in capsys.readouterr().err


def test_measurement_off_its_expectation_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(claims.exact, "fewer_positive", lambda n_expert, top_k: 0.5)
    assert theory.main(["--only", "positive", "--samples", "320"]) == 1
    assert "(!) measured and analytic differ" in (said := capsys.readouterr()).err and "(!)" in said.out
