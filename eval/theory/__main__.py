"""The paper's analytical claims against measurement: one table, one picture a claim.

    python -m eval.theory [--out FOLDER] [--samples 20000] [--seed 0] [--only variance]

Each row: what is claimed, what the paper says of it, its exact expectation (eval/theory_exact.py), what the Router of
router.py does with random weights and inputs, and a verdict on the paper. With --out, pictures and theory.json go to
FOLDER. Exit status 1 if a measurement is further from its expectation than chance allows. docs/theory.md explains.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from eval.theory import exact
from kernels import expert_mlp
from router import EPS, ROUTERS, Router, RouterSpec, Routing, monte_carlo_scale

WIDTH, STD = 768, 0.02  # the paper's 125M; with N(0, 0.02²) weights and LayerNorm before them logits have
TAU = STD * math.sqrt(WIDTH)  # a standard deviation of 0.554
PAPER = ("softmax", "sigmoid", "tanh", "kern")
DRAWS = 32  # routers that a mean is taken over: one router's tokens share W, so draws, not tokens, give the error
HOLDS, BOUND, FAILS, CONTEXT = "holds", "holds as a bound", "does not hold", "-"


@dataclass
class Row:
    """A line of the table. `analytic` is None where no expectation is known, `error` is a standard error."""

    claim: str
    paper: str
    analytic: float | None
    measured: float
    error: float
    verdict: str

    def agrees(self):
        """Is the measurement within 5 standard errors of its expectation, or within 0.2%?"""
        if self.analytic is None:
            return True
        return abs(self.measured - self.analytic) <= 5 * self.error + 2e-3 * abs(self.analytic) + 1e-12


def mean_error(values):
    """Mean and standard error over the first dimension."""
    return values.mean(0), values.std(0) / math.sqrt(len(values))


def over_routers(statistic, spec, n_expert, top_k, samples, seed):
    """Mean and standard error of `statistic(routing)` over DRAWS freshly initialised routers, `samples` tokens in all,
    unit-variance inputs as they leave a LayerNorm."""
    values = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for _ in range(DRAWS):
            router = Router(WIDTH, n_expert, top_k, spec)
            x = F.layer_norm(torch.randn(max(samples // DRAWS, 1), WIDTH), (WIDTH,))
            values.append(torch.as_tensor(statistic(router(x)), dtype=torch.float64))
    return mean_error(torch.stack(values))


def sum_squares(routing):
    return routing.weights.double().square().sum(-1).mean()


def from_logits(spec, logits, top_k):
    """Routing of given logits (N, E): a Router whose W is the identity, in fp64."""
    n_expert = logits.shape[-1]
    router = Router(n_expert, n_expert, top_k, spec).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_expert))
    return router(logits)


def dense_gates(spec, logits, top_k):
    """(N, E) gates, 0 where an expert is not chosen."""
    routing = from_logits(spec, logits, top_k)
    return torch.zeros_like(logits).scatter(-1, routing.experts, routing.weights).detach()


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stays(ratio):
    """The verdict on "is constant" when the last is `ratio` times the first."""
    return HOLDS if 0.8 < ratio < 1.25 else FAILS


# --- the variance of the output -----------------------------------------------------------------------------------


def moe_output(n_expert, top_k, hidden, samples, seed, n_embd=128, alike=False):
    """E ‖MoE_KERN(x)‖² and its standard error, over freshly initialised routers and experts. `alike`: the experts are
    copies of one, as in sparse upcycling (arXiv 2212.05055)."""
    values = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for _ in range(DRAWS):
            router = Router(n_embd, n_expert, top_k, ROUTERS["kern"])
            w_in = torch.randn(1 if alike else n_expert, n_embd, hidden).expand(n_expert, -1, -1) * STD
            w_out = torch.randn(1 if alike else n_expert, hidden, n_embd).expand(n_expert, -1, -1) * STD
            x = F.layer_norm(torch.randn(max(samples // 100 // DRAWS, 8), n_embd), (n_embd,))
            routing = router(x)
            y = expert_mlp(x, w_in, w_out, routing.weights, routing.experts)
            values.append(y.double().square().sum(-1).mean())
    return mean_error(torch.stack(values))


def variance(samples, seed):
    """Sec. 3.4, "preserves the variance of the MoE output at a constant scale"."""
    curves = {}
    shapes = {"k = 8": [(M, 8) for M in (8, 16, 32, 64, 128, 256, 512, 1024)]}
    shapes["k = M/8"] = [(M, M // 8) for M in (8, 16, 32, 64, 128, 256)]
    for label, path in shapes.items():
        for name in PAPER:
            curves[label, name] = points = {"M": [], "analytic": [], "measured": [], "error": []}
            for M, k in path:
                mean, error = over_routers(sum_squares, ROUTERS[name], M, k, samples, seed)
                for key, value in zip(points, (M, exact.sum_squares(name, M, k, TAU), mean, error), strict=True):
                    points[key].append(float(value))

    def change(label, name, first=32, last=256):
        p = curves[label, name]
        i, j = p["M"].index(first), p["M"].index(last)
        analytic, measured = (p[key][j] / p[key][i] for key in ("analytic", "measured"))
        return analytic, measured, measured * math.hypot(*(p["error"][n] / p["measured"][n] for n in (i, j)))

    one = exact.expert_squares(128, 32, STD, STD)  # E ‖E_m‖² at width 128, hidden 32
    expected = exact.sum_squares("kern", 64, 8, TAU)
    rows = []
    for text, alike, analytic in (
        ("E‖MoE‖² / E‖E_m‖², independent experts, 8 of 64", False, expected),
        ("E‖MoE‖² / E‖E_m‖², 64 copies of one expert, 8 of 64", True, exact.kern_squared_sum(64, 8)),
    ):
        mean, error = (float(v / one) for v in moe_output(64, 8, 32, samples, seed, alike=alike))
        rows.append(Row(text, f"{expected:.4f}", analytic, mean, error, stays(mean / expected)))
    largest, _ = over_routers(lambda r: r.weights.double().square().sum(-1).max(), ROUTERS["kern"], 8, 8, samples, seed)
    verdict = BOUND if largest <= 1 else FAILS
    rows.append(Row("kern: largest Σg² of a router's tokens, 8 of 8", "O(1)", None, float(largest), 0.0, verdict))
    for label in shapes:
        for name in ("kern", "softmax", "sigmoid", "tanh"):
            analytic, measured, error = change(label, name)
            verdict = stays(measured) if name == "kern" else CONTEXT
            if verdict == FAILS and measured < 1:
                verdict = BOUND  # O(1) from above, but falling
            paper = "constant" if name == "kern" else "-"
            text = f"{name}: E Σg² at M = 256 over M = 32, {label}"
            rows.append(Row(text, paper, analytic, measured, error, verdict))
    small, large = (moe_output(M, M // 8, 2048 // M, samples, seed) for M in (32, 256))
    ratio = float(large[0] / small[0])
    error = ratio * math.hypot(*(float(e / m) for m, e in (small, large)))
    analytic = exact.sum_squares("kern", 256, 32, TAU) / exact.sum_squares("kern", 32, 4, TAU) / 8
    text = "kern: E‖MoE‖² at 32 of 256 over 4 of 32, M·H fixed"
    rows.append(Row(text, "constant", analytic, ratio, error, stays(ratio)))
    for name in ("tanh", "sigmoid"):
        spec = RouterSpec(name, pre="l2 over all")
        (first, e1), (last, e2) = (over_routers(sum_squares, spec, M, M // 8, samples, seed) for M in (32, 256))
        ratio = float(last / first)
        paper, verdict = ("constant", stays(ratio)) if name == "tanh" else ("not listed", CONTEXT)
        text = f"φ = {name} after l2: E Σg² at M = 256 over M = 32, k = M/8"
        rows.append(Row(text, paper, None, ratio, ratio * math.hypot(e1 / first, e2 / last), verdict))
    return rows, {f"{label}, {name}": points for (label, name), points in curves.items()}


# --- gradients ----------------------------------------------------------------------------------------------------


def jacobian(spec, logits, top_k):
    """Routing of given logits (N, E) in fp64, and ∂gate/∂logit (N, K, E)."""
    logits = logits.clone().requires_grad_()
    routing = from_logits(spec, logits, top_k)
    rows = [torch.autograd.grad(routing.weights[:, i].sum(), logits, retain_graph=True)[0] for i in range(top_k)]
    return Routing(*(t.detach() for t in routing)), torch.stack(rows, 1)


def reached(name, n_expert, top_k, seed, tokens=64):
    """Mean number of experts that get a gradient from one token, and its standard error."""
    counts = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(tokens):
            router = Router(16, n_expert, top_k, ROUTERS[name])
            w_in, w_out = (torch.randn(n_expert, *shape).requires_grad_() for shape in ((16, 4), (4, 16)))
            x = torch.randn(1, 16)
            routing = router(x)
            expert_mlp(x, w_in, w_out, routing.weights, routing.experts).square().sum().backward()
            counts.append((w_out.grad.flatten(1).abs().sum(1) > 0).sum().double())
    return mean_error(torch.stack(counts))


def gradients(samples, seed):
    """Sec. 3.4, "the gradient vanishing problem" and "even less active experts still receive updates"."""
    M, k = 64, 8
    z = normal((max(samples // 8, 100), M), seed)
    order = z.topk(k).indices
    scales = [0.25, 0.5, 1, 2, 4, 8, 16]
    rows, curves = [], {"tau": scales}
    for name in PAPER:
        points = curves[name] = {key: [] for key in ("analytic", "rms", "error", "median", "weakest", "wrong")}
        for tau in scales:
            routing, J = jacobian(ROUTERS[name], tau * z, k)
            squares = J.square().sum((1, 2))
            mean, error = mean_error(squares)
            rms = float(mean.sqrt())
            points["analytic"].append(math.sqrt(exact.jacobian_squares(name, M, k, tau)))
            points["rms"].append(rms)
            points["error"].append(float(error) / (2 * rms))
            relative = tau * squares.sqrt() / routing.weights.norm(dim=-1)
            points["median"].append(float(relative.median()))
            direct = J.gather(-1, routing.experts[:, :, None])[..., 0]  # (N, K) ∂g_m/∂s_m, best expert first
            weakest = float((direct[:, -1] / direct[:, 0]).median())
            points["weakest"].append(weakest if math.isfinite(weakest) else None)  # 0 over 0 in fp64
            wrong = (routing.experts.sort(-1).values != order.sort(-1).values).any(-1)
            points["wrong"].append(float(wrong.double().mean()))

    def at(name, tau, key):
        return curves[name][key][scales.index(tau)]

    def against_kern(text, values):
        """Rows for {router: (analytic, measured, error)}; the paper's claim is that KERN's is the largest."""
        for name, (analytic, measured, error) in values.items():
            if name == "kern":
                paper, verdict = "-", CONTEXT
            else:
                paper, verdict = "below KERN", HOLDS if measured < values["kern"][1] else FAILS
            rows.append(Row(f"{name}: {text}", paper, analytic, measured, error, verdict))

    names = ("kern", "softmax", "sigmoid", "tanh")
    values = {}
    for name in names:
        analytic, measured = (at(name, 4, key) / at(name, 0.5, key) for key in ("analytic", "rms"))
        error = math.hypot(*(at(name, tau, "error") / at(name, tau, "rms") for tau in (0.5, 4)))
        values[name] = analytic, measured, measured * error
    against_kern("RMS ‖∂g/∂s‖, τ = 4 over τ = 0.5", values)
    for tau in (8, 16):
        values = {n: (1.0 if n == "kern" else None, at(n, tau, "median") / at(n, 0.5, "median"), 0.0) for n in names}
        against_kern(f"median τ‖∂g/∂s‖/‖g‖, τ = {tau} over τ = 0.5", values)
    against_kern("∂g/∂s, 8th over 1st chosen, median, τ = 4", {n: (None, at(n, 4, "weakest"), 0.0) for n in names})
    for name in ("sigmoid", "tanh"):
        rows.append(Row(f"{name}: tokens with a wrong choice, τ = 16", "-", None, at(name, 16, "wrong"), 0.0, CONTEXT))
    for name, top_k, expected in (("kern", 8, 8), ("kern", 64, exact.positive_gates(64, 64)), ("kern-norelu", 64, 64)):
        mean, error = reached(name, M, top_k, seed)
        paper, verdict = ("all 64", FAILS if mean < 63 else HOLDS) if name == "kern" else ("-", CONTEXT)
        text = f"{name}: experts of 64 that a token updates, k = {top_k}"
        rows.append(Row(text, paper, expected, float(mean), float(error), verdict))
    routing, J = jacobian(ROUTERS["kern"], TAU * z, k)
    squares = J.square().sum(1)  # (N, M)
    outside = squares.scatter(-1, routing.experts, 0).sum(-1) / squares.sum(-1)
    mean, error = mean_error(outside)
    rows.append(Row("kern: share of ‖∂g/∂s‖² in rows not chosen", "> 0", None, float(mean), float(error), HOLDS))
    return rows, curves


# --- softmax and sigmoid as cases of φ(LN(s)) -----------------------------------------------------------------------


def literal(s):
    """Softmax as Sec. 3.4 words it, φ(LN(s)) with LN the l1 norm and φ the exponential."""
    return (s / s.abs().sum(-1, keepdim=True)).exp()


def family(samples, seed):
    """Sec. 3.3 and 3.4, "generalizes both Sigmoid- and Softmax-based routers"."""
    M = 64
    s = normal((max(samples // 20, 100), M), seed)

    def gap(ours, theirs):
        return float((ours - theirs).abs().max())

    def verdict(value):
        return HOLDS if value < 1e-6 else FAILS

    sigmoid, softmax, kern = (dense_gates(ROUTERS[name], s, M) for name in ("sigmoid", "softmax", "kern"))
    found = [
        ("sigmoid router - φ(s), φ = sigmoid", gap(sigmoid, 1 / (1 + (-s).exp())), 0.0),
        (
            "softmax router - l1(exp(s)), norm after φ as in Sec. 3.2",
            gap(softmax, s.exp() / s.exp().sum(-1, keepdim=True)),
            0.0,
        ),
        ("softmax router - exp(LN(s)), LN(s) = s - logsumexp(s)", gap(softmax, (s - s.logsumexp(-1, True)).exp()), 0.0),
        ("softmax router - exp(l1(s)), as Sec. 3.4 words it", gap(softmax, literal(s)), None),
        ("the same, rescaled to sum to 1", gap(softmax, F.normalize(literal(s), p=1, dim=-1)), None),
    ]
    rows = [Row(f"max |{text}|", "0", expected, value, EPS, verdict(value)) for text, value, expected in found]
    kern2, softmax2 = (dense_gates(ROUTERS[name], 2 * s, M) for name in ("kern", "softmax"))
    rows += [
        Row("max |g(2s) - g(s)|, kern: zero for any φ after any norm", "-", 0.0, gap(kern2, kern), EPS, CONTEXT),
        Row(
            "max |g(2s) - g(s)|, softmax: so no φ(norm(s))",
            "0",
            None,
            gap(softmax2, softmax),
            EPS,
            verdict(gap(softmax2, softmax)),
        ),
    ]
    for name, k, claim in (
        ("kern", 8, "-"),
        ("softmax", 8, "1"),
        ("sigmoid", 8, "-"),
        ("softmax-renorm", 8, "-"),
        ("softmax", 64, "1"),
    ):
        mean, error = over_routers(lambda r: r.weights.double().sum(-1).mean(), ROUTERS[name], M, k, samples, seed)
        sums_to_1 = 1.0 if name == "softmax-renorm" else exact.mean_sum(name, M, k, TAU)
        text = f"Nadaraya-Watson weights sum to 1: {name}, {k} of 64"
        is_1 = HOLDS if abs(mean - 1) < 1e-3 else FAILS
        rows.append(Row(text, claim, sums_to_1, float(mean), float(error), is_1 if claim == "1" else CONTEXT))
    curves = {"factor": torch.logspace(-1, 1.5, 26).tolist(), "shift": torch.linspace(-3, 3, 25).tolist()}
    s = s[:500]
    for name in PAPER:
        curves[name] = {
            "factor": [float(dense_gates(ROUTERS[name], a * s, 8).amax(-1).mean()) for a in curves["factor"]],
            "shift": [float(dense_gates(ROUTERS[name], s + a, 8).amax(-1).mean()) for a in curves["shift"]],
        }
    curves["exp(l1(s))"] = {
        "factor": [float(literal(a * s).amax(-1).mean()) for a in curves["factor"]],
        "shift": [float(literal(s + a).amax(-1).mean()) for a in curves["shift"]],
    }
    return rows, curves


# --- the Monte-Carlo constant ---------------------------------------------------------------------------------------


def monte_carlo(samples, seed):
    """App. "Implementation Details": c = E[1 / ‖top-k of ReLU(y)‖]."""
    curves = {}
    for label, path in {
        "k = 8": [(M, 8) for M in (32, 64, 128, 256, 512, 1024)],
        "k = M/8": [(M, M // 8) for M in (16, 32, 64, 128, 256, 512)],
    }.items():
        curves[label] = points = {"M": [], "k": [], "analytic": [], "limit": [], "measured": [], "error": []}
        for M, k in path:
            draws = [monte_carlo_scale(M, k, samples=max(samples // 10, 20), seed=seed + i) for i in range(10)]
            mean, error = mean_error(torch.tensor(draws, dtype=torch.float64))
            values = M, k, exact.monte_carlo(M, k), exact.kern_limit(k / M) ** -0.5, float(mean), float(error)
            for key, value in zip(points, values, strict=True):
                points[key].append(value)
    rows = []
    for label, points in curves.items():
        for M, k, analytic, _, mean, error in zip(*points.values(), strict=True):
            if label == "k = M/8" or M in (128, 256, 1024):
                rows.append(Row(f"c, {k} of {M}", "finite", analytic, mean, error, HOLDS))
    mean, error = over_routers(sum_squares, ROUTERS["kern-mc"], 64, 8, samples, seed)
    expected = exact.monte_carlo(64, 8) ** 2 * exact.sum_squares("kern", 64, 8, TAU)
    rows.append(
        Row("kern-mc: E Σg², 8 of 64 (unit norm would be 1)", "-", expected, float(mean), float(error), CONTEXT)
    )
    listings, size, M = max(samples // 200, 20), 100_000, 16
    generator = torch.Generator().manual_seed(seed)
    infinite = torch.tensor(
        [bool((torch.randn(size, M, generator=generator) <= 0).all(-1).any()) for _ in range(listings)]
    ).double()
    mean, error = mean_error(infinite)
    text = "share of the paper's listings, 10⁵ samples, that are inf, M = 16"
    rows.append(Row(text, "finite", 1 - (1 - 2.0**-M) ** size, float(mean), float(error), FAILS if mean else HOLDS))
    return rows, curves


# --- positive gates -------------------------------------------------------------------------------------------------


def positive(samples, seed):
    """App. "The Effect of ReLU": below half active, "the select router weights are usually positive"."""
    curves, rows = {}, []
    for M in (8, 16, 32, 64, 128, 256):
        ks = sorted({max(1, round(M * share / 16)) for share in range(1, 17)})

        def shares(routing, ks=ks):
            positive = (routing.weights > 0).sum(-1)
            return torch.stack([(positive < k).double().mean() for k in ks])

        mean, error = over_routers(shares, ROUTERS["kern"], M, M, samples, seed)
        points = ks, [exact.fewer_positive(M, k) for k in ks], mean.tolist(), error.clamp_min(1 / samples).tolist()
        curves[f"M = {M}"] = dict(zip(("k", "analytic", "measured", "error"), points, strict=True))
    for M, k in ((32, 4), (32, 8), (64, 8), (64, 24), (64, 28), (64, 32), (64, 64)):
        points = curves[f"M = {M}"]
        _, analytic, measured, error = (values[points["k"].index(k)] for values in points.values())
        paper = "small" if k < M / 2 else "-"
        usually = CONTEXT if k >= M / 2 else HOLDS if measured < 0.1 else FAILS
        text = f"P(fewer than {k} of {M} gates positive)"
        rows.append(Row(text, paper, analytic, measured, error, usually))
    for M, k in ((64, 32), (64, 64)):
        mean, error = over_routers(
            lambda r: (r.weights > 0).double().sum(-1).mean(), ROUTERS["kern"], M, k, samples, seed
        )
        rows.append(
            Row(
                f"gates that are not 0, {k} of {M}", "-", exact.positive_gates(M, k), float(mean), float(error), CONTEXT
            )
        )
    for k in (8, 32):
        logits = normal((samples, 64), seed)
        alike = dense_gates(ROUTERS["kern"], logits, k) == dense_gates(ROUTERS["kern-norelu"], logits, k)
        mean, error = mean_error(alike.all(-1).double())
        text = f"tokens with the same gates without ReLU, {k} of 64"
        paper, verdict = ("most", HOLDS if mean > 0.9 else FAILS) if k < 32 else ("-", CONTEXT)
        rows.append(Row(text, paper, 1 - exact.fewer_positive(64, k), float(mean), float(error), verdict))
    return rows, curves


CLAIMS = {
    "variance": variance,
    "gradients": gradients,
    "family": family,
    "monte-carlo": monte_carlo,
    "positive": positive,
}


def number(value):
    return "-" if value is None else f"{value:.4g}"


def table(rows):
    """Aligned text."""
    cells = [("claim", "paper", "analytic", "measured ± standard error", "verdict")]
    for row in rows:
        measured = number(row.measured) + (f" ± {row.error:.1g}" if row.error else "")
        measured += "" if row.agrees() else "  (!)"
        cells.append((row.claim, row.paper, number(row.analytic), measured, row.verdict))
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m eval.theory", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for theory-*.png and theory.json")
    parser.add_argument("--samples", type=int, default=20_000, help="tokens a mean is taken over (default 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=CLAIMS, help="one claim")
    args = parser.parse_args(argv)
    if args.samples < 100:
        parser.error("--samples must be 100 or more")
    results, strays = {}, []
    for name in [args.only] if args.only else CLAIMS:
        rows, curves = CLAIMS[name](args.samples, args.seed)
        print(f"{CLAIMS[name].__doc__}\n\n{table(rows)}\n", flush=True)
        strays += [row.claim for row in rows if not row.agrees()]
        results[name] = {"rows": [asdict(row) for row in rows], "curves": curves}
        if args.out:
            from eval.theory import pictures

            args.out.mkdir(parents=True, exist_ok=True)
            pictures.draw(name, curves, args.out / f"theory-{name}.png")
    if args.out:
        report = {"samples": args.samples, "seed": args.seed, "torch": torch.__version__, "claims": results}
        (args.out / "theory.json").write_text(json.dumps(report, indent=1) + "\n")
    if strays:
        print("(!) measured and analytic differ by more than chance allows: " + "; ".join(strays), file=sys.stderr)
    return 1 if strays else 0


if __name__ == "__main__":
    sys.exit(main())
