"""Every router against its formula by hand, KERN's properties, the losses that balance experts."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from numerics import assert_near, seeded, tolerance

import router as router_module
from balance import (
    balance_loss,
    expert_loads,
    token_distribution,
)
from router import (
    PHI,
    ROUTERS,
    Router,
    RouterSpec,
    find_spec,
)

N, C, E, K = 48, 12, 16, 4
SPARSE = [name for name in ROUTERS if name != "dense"]
RELU = ["kern", "kern-after", "kern-mc", "kern-nogamma", "kern-nobias"]


def total(x):
    return x.sum(1, keepdim=True)


def share(x):
    return x / total(x)


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def sqrtsoftplus(x):
    return (1 + x.exp()).log().sqrt()


# A token's gates (n, K) from its logits, all (n, E) and the chosen (n, K): docs/paper.md, section
# 2, with c = γ = 1
GATES = {
    "softmax": lambda s, top: top.exp() / total(s.exp()),
    "sigmoid": lambda s, top: sigmoid(top),
    "tanh": lambda s, top: 2 * sigmoid(2 * top) - 1,
    "kern": lambda s, top: top.clamp_min(0) / total(s**2).sqrt(),
    "kern-norelu": lambda s, top: top / total(s**2).sqrt(),
    "kern-after": lambda s, top: top.clamp_min(0) / total(top**2).sqrt(),
    "softmax-renorm": lambda s, top: share(top.exp()),
    "sigmoid-renorm": lambda s, top: share(sigmoid(top)),
    "sqrtsoftplus": lambda s, top: share(sqrtsoftplus(top)),
    "softmax-l2": lambda s, top: top.exp() / total((2 * s).exp()).sqrt(),
    "sqrtgate": lambda s, top: share(top.exp()).sqrt(),
}
# Another way to write each of ROUTERS, docs/paper.md's table
FORMULAS = {
    "kern-after": "relu,bias,gamma, pre = l2 over topk",
    "kern-mc": "relu, pre=l2 over all, gamma, bias, c=monte_carlo",
    "sqrtgate": "sqrtexp, post=l2 over topk, c=1",
}
GATES |= dict.fromkeys(("kern-mc", "kern-nogamma", "kern-nobias"), GATES["kern"])
# What experts are chosen by, plus the bias, where a router is published with one
BIASED = {"sigmoid-renorm": sigmoid, "sqrtsoftplus": sqrtsoftplus}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(seeded().initial_seed())


def identity_router(name):
    """A router whose logits are its input."""
    router = Router(E, E, K, find_spec(name))
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    return router


def balance(routing):
    return balance_loss(token_distribution(routing).mean(0), expert_loads(routing.experts, E))


def assert_same(actual, wanted, roundings=4.0):
    """Roundings: of logits, φ, norm and gate."""
    assert_near(actual, wanted, tolerance(actual.dtype, N, roundings))


def assert_same_gradients(mine, theirs, leaves):
    gradients = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (mine, theirs))
    for a, b in zip(*gradients, strict=True):
        assert b.any()
        assert_same(a, b, roundings=8)  # forward and backward


@pytest.mark.numerics
@pytest.mark.parametrize(
    "name, biased", [(name, False) for name in SPARSE] + [(name, True) for name in BIASED]
)
def test_equals_its_formula_in_values_and_gradients(name, biased):
    """With c = 1.5 times its own and γ = 0.7; half of the tokens have no positive logit."""
    router = Router(E, E, K, ROUTERS[name], gate_scale=1.5)
    scale = torch.tensor(1.5, dtype=torch.float64)
    if name == "kern-mc":
        scale *= router_module.monte_carlo_scale(E, K)
    leaves = [torch.randn(N, E)]
    leaves[0][::2] = -0.1 - leaves[0][::2].abs()
    leaves[0].requires_grad_()
    if router.gamma is not None:
        leaves.append(torch.nn.init.constant_(router.gamma, 0.7))
        scale = scale * router.gamma.double()
    scores = s = leaves[0].double()
    if biased:
        router.selection_bias.normal_(std=0.3)
        scores = BIASED[name](s)
    elif name in RELU:
        router.selection_bias[0] = 10  # an expert whose gate is often closed comes first
        scores = s.relu()
    routing = router.choose(leaves[0])
    scores = (scores + router.selection_bias).float()
    assert_same(scores.gather(1, routing.experts), scores.topk(K).values)
    gates = scale * GATES[name](s, s.gather(1, routing.experts))
    d_gates = -torch.rand(N, K)  # of one sign: the sum that is γ's gradient does not cancel
    dead = (s < 0).all(1)
    d_gates[dead] += 0.5
    loss = (gates * d_gates).sum()
    # the mean of the gates' gradients before c and γ, if negative, lifts all logits
    if name in RELU:
        assert (routing.weights[dead] == 0).all()
        pull = d_gates.mean(1)[dead].clamp_max(0)
        assert (pull == 0).any() and (pull < 0).any()
        loss = loss + scale.detach() * (pull * s[dead].mean(1)).sum()
    assert_same(routing.weights, gates.float())
    assert_same_gradients((routing.weights * d_gates).sum(), loss, leaves)


@pytest.mark.parametrize("n_expert, top_k", [(64, 8), (32, 8), (64, 64)])
def test_monte_carlo_constant(n_expert, top_k):
    """One sample has a standard deviation of 0.27; the first constant is 1.7135 by an integral
    (docs/theory.md).
    """
    draws = np.random.default_rng(0).standard_normal((100_000, n_expert))
    s = torch.from_numpy(draws).sort(descending=True).values
    mean = (1 / GATES["kern"](s, s[:, :top_k]).norm(dim=1)).mean().item()
    near = pytest.approx(mean, abs=4 * 0.27 * math.sqrt(1 / 20_000 + 1 / 100_000))
    assert Router(C, n_expert, top_k, ROUTERS["kern-mc"]).c.item() == near


# One token's logits are large and positive in the last: gates of tiny logits alone would give W a
# gradient of 1 / ε times the others, Inf.
FACTORS = [0.0, 1e-30, 1e4, 1e20, 1e30, -1.0, -1e30, torch.tensor([1e30, -1e30, 0.0, 1e-30] * 4)]


@pytest.mark.numerics
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", SPARSE)
def test_extreme_logits(name, factor):
    """Factors with a minus multiply absolute values."""
    usual = torch.randn(N, E)
    if torch.as_tensor(factor).min() < 0:
        usual.abs_()
    x = (factor * usual).requires_grad_()
    router = identity_router(name)
    routing = router(x)
    ((routing.weights * torch.randn(N, K)).sum() + balance(routing)).backward()
    for tensor in (routing.weights, routing.scores, x.grad, *(p.grad for p in router.parameters())):
        assert tensor.isfinite().all()
    assert (routing.experts.sort().values.diff() > 0).all()  # distinct
    if name in RELU and (x <= 0).all():
        assert (routing.weights == 0).all()
    if name.startswith("kern") and torch.as_tensor(factor).min() > 1:
        assert_same(routing.weights, router(usual).weights)


@pytest.mark.parametrize("k", [1, 5, 12])
def test_ties_go_to_the_lower_index(k):
    values = [0.0, -0.0, 1.0, -1.0, 1 + 2**-23, 2.0**-140, -(2.0**-140), 3e38, math.inf, -math.inf]
    s = torch.tensor(values)[torch.randint(len(values), (500, 12))]
    wanted = s.argsort(dim=1, descending=True, stable=True)[:, :k]
    assert router_module.top_k_indices(s, k).equal(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("name", SPARSE)
def test_routing_is_float32_whatever_the_autocast_and_the_input(name, norm, dtype):
    """In float16 the squares of these logits overflow at 1e4, and ε is 0 where they are 0."""
    logits = (norm * F.normalize(torch.randn(N, E), dim=-1)).to(dtype)
    upstream, outcomes = torch.randn(N, K), []
    for enabled, x in ((False, logits.float()), (True, logits)):
        router = identity_router(name)
        with torch.autocast("cpu", dtype, enabled=enabled):
            routing = router(x.requires_grad_())
            loss = (routing.weights * upstream).sum() + balance(routing)
        loss.backward()
        outcomes.append([*routing[:4], *(p.grad for p in router.parameters())])
    for wanted, got in zip(*outcomes, strict=True):
        assert got.isfinite().all() and got.dtype == wanted.dtype and torch.equal(got, wanted)
    assert router(logits.double()).weights.dtype == torch.float64


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("phi", PHI)
def test_norms_before_and_after_phi_can_both_be_over_the_chosen(phi, order):
    form = find_spec(f"{phi}, pre=l2 over topk, post=l{order} over topk")
    gates = Router(C, E, K, form)(torch.randn(N, C)).weights
    assert_same(gates.norm(order, dim=-1), torch.ones(N))


def test_which_scores_are_bounded(monkeypatch):
    """Those of logits from tiny to huge are within `score_range`; some are nearly as far apart."""
    formulas = [
        "identity, post=l1 over all",
        "sqrtsoftplus, pre=l1 over all",
        "sqrtsoftplus, post=l2 over all",
        "relu, post=l2 over all",
        "tanh, pre=l2 over all",
        "exp, pre=l2 over all, post=l2 over topk",
    ]
    unbounded = {"identity", "relu, post=l2 over topk", "sqrtsoftplus, post=l1 over topk"}
    unbounded |= {"tanh, pre=l1 over topk", "kern-after", "sqrtsoftplus"}
    logits = [torch.randn(99, E) * scale for scale in (0.01, 1, 1e3)]
    logits = torch.cat([*logits, 2e3 * torch.eye(E), -torch.eye(E)])
    for name in {*SPARSE, *formulas, *unbounded}:
        spec = find_spec(name)
        scores = Router(C, E, K, spec).choose(logits).scores
        share = (scores.max() - scores.min()) / spec.score_range
        assert share == 0 if name in unbounded else 0.4 < share <= 1, name
    monkeypatch.setitem(router_module.PHI, "square", torch.square)  # a φ that falls and rises
    assert RouterSpec("square", pre="l2 over all").score_range == pytest.approx(1)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("name", [*SPARSE, "tanh, pre=l1 over topk", "relu, post=l2 over topk"])
def test_which_routers_get_no_gradient(name, top_k):
    """From their gates: one that is normalised over the only chosen expert is constant."""
    router = Router(C, E, top_k, find_spec(name)).double()
    torch.nn.init.normal_(router.weight)  # logits so large that ε changes nothing
    gates = router(torch.randn(N, C, dtype=torch.float64)).weights
    (gates * torch.randn(N, top_k)).sum().backward()
    assert (router.weight.grad.abs().max() > 1e-4) == find_spec(name).has_gradient(top_k)


@pytest.mark.parametrize(
    "n_id, n_expert, top_k", [(1000, 16, 4), (257, 8, 3), (50, 6, 4), (9, 5, 5), (3, 64, 8)]
)
def test_hash_table(n_id, n_expert, top_k):
    """Distinct experts for each id, every expert equally often up to any id, and partners that
    vary.
    """
    table, again, other = (
        router_module.hash_table.__wrapped__(n_id, n_expert, top_k, seed) for seed in (1, 1, 2)
    )
    assert table.shape == (n_id, top_k) and table.equal(again) and not table.equal(other)
    chosen = F.one_hot(table, n_expert).sum(1)
    counts = chosen.cumsum(0)
    assert chosen.max() == 1 and (counts.amax(1) - counts.amin(1) <= 1).all()
    if n_id == 1000:
        assert len(chosen.unique(dim=0)) > 700


@pytest.mark.parametrize("name", [name for name in SPARSE if "topk" in ROUTERS[name].post])
def test_a_norm_over_the_chosen_is_not_that_of_an_expert_left_out(name):
    """By a table, or by groups with a bias, however much larger its logit is."""
    s = torch.randn(N, E)
    s[:, -1] = 80
    s.requires_grad_()
    exact = s.double()
    wanted = GATES[name](exact, exact[:, :K])
    d_gates = torch.rand(N, K)
    by_table = Router(C, E, K, ROUTERS[name]).choose(s, torch.arange(K).expand(N, K)).weights
    router = Router(C, E, K, ROUTERS[name], n_group=E // K, group_k=1)
    router.selection_bias[:K] = 100
    by_group = router.choose(s)
    in_order = by_group.experts.argsort(1)
    assert by_group.experts.gather(1, in_order).equal(torch.arange(K).expand(N, K))
    for gates in (by_table, by_group.weights.gather(1, in_order)):
        assert_same(gates, wanted.float())
        assert_same_gradients((gates * d_gates).sum(), (wanted * d_gates).sum(), [s])


def test_a_hash_table_is_created_where_buffers_are():
    """vLLM creates parameters on the meta device, buffers not. A device context holds for both."""
    table = router_module.hash_table(6, E, K, seed=0)
    with init_empty_weights(include_buffers=False):
        router = Router(C, E, K, find_spec("softmax"), table=table)
    assert router.weight.is_meta and router.hash_table.equal(table)
    with torch.device("meta"):
        router = Router(C, E, K, find_spec("softmax"), table=table)
    assert router.hash_table.is_meta


@pytest.mark.numerics
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("n_group, group_k", [(2, 1), (4, 2), (8, 3), (16, 5)])
def test_groups_equal_a_loop(name, n_group, group_k):
    """With β, and with many ties: scores are multiples of 1/4."""
    router = Router(E, E, K, find_spec(name), n_group=n_group, group_k=group_k)
    router.selection_bias.copy_(torch.randint(-2, 3, (E,)) / 4)
    logits = torch.randint(-4, 5, (N, E)) / 4
    routing = router.choose(logits)
    shifted = routing.scores + router.selection_bias
    for token, experts in zip(shifted, routing.experts.tolist(), strict=True):
        groups = token.numpy().reshape(n_group, -1)
        sums = np.sort(groups)[:, -2:].sum(1)  # in float32, as the router's
        groups[np.argsort(-sums, kind="stable")[group_k:]] = -np.inf
        assert experts == np.argsort(-groups.flatten(), kind="stable")[:K].tolist()
    wanted = Router(E, E, K, find_spec(name)).choose(logits, routing.experts)
    assert torch.equal(routing.weights, wanted.weights)  # gates are as ever


def test_the_fused_router_knows_no_groups_and_takes_no_experts():
    """With as many groups as there are, nothing changes, and it computes."""
    x = torch.randn(N, C)
    for group_k, calls in ((2, 0), (4, 1)):
        router = Router(C, E, K, ROUTERS["kern"], n_group=4, group_k=group_k)
        router.fused = mock.Mock(return_value=None)
        router(x)
        assert router.fused.call_count == calls
    router.hash_table = torch.arange(N * K).view(N, K) % E
    assert router(x, ids=torch.arange(N)).experts.equal(router.hash_table)
    assert router.fused.call_count == 1


NOT_A_TERM = "is none of pre=NORM, post=NORM, gamma, bias"
REFUSED = {
    "tanh, pre": NOT_A_TERM,
    "tanh, gamma=1": NOT_A_TERM,
    "tanh, c=": NOT_A_TERM,
    "tanh, c=-1": NOT_A_TERM,
    "tanh,": NOT_A_TERM,
    "cosh, gamma": "phi 'cosh' is not one of identity",
    "tanh, post=l3 over all": "norm 'l3 over all' is not",
    "tanh, c=0": NOT_A_TERM,
    f"tanh, c={10**39}": NOT_A_TERM,
    "exp, c=2": "needs a post norm",
    "tanh, pre=l2 over all, c=monte_carlo": "'relu' after pre 'l2 over all'",
    "tanh, pre=l2 over topk, post=l1 over all": "no meaning; take post=l1 over topk",
    # top_k, n_group and group_k
    (0, 1, 1): f"top_k 0 must lie between 1 and the {E} experts",
    (E + 1, 1, 1): f"top_k {E + 1} must lie between 1 and the {E} experts",
    (K, 3, 1): f"n_group 3 must divide n_expert {E}",
    (K, 4, 5): "group_k 5 groups, at most n_group",
    (K, 4, 0): "the 0 experts of group_k 0 groups",
    (K, 8, 1): "top_k 4 must lie between 1 and the 2 experts of group_k 1 groups",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_means_nothing_is_refused(settings):
    with pytest.raises(ValueError, match=REFUSED[settings]):
        if isinstance(settings, str):
            find_spec(settings)
        else:
            top_k, *groups = settings
            Router(C, E, top_k, ROUTERS["kern"], 1.0, None, *groups)


def test_a_formula_is_the_router_that_it_names():
    for name, formula in FORMULAS.items():
        assert find_spec(formula) == find_spec(name) == ROUTERS[name]
    assert find_spec("dense") is None and find_spec("tanh, c=2.5") == RouterSpec("tanh", c=2.5)


@pytest.mark.numerics
@pytest.mark.parametrize("method, size", [("one", 1.0), ("one", 1e-8), ("monte_carlo", 1.0)])
def test_norm_router_equals_the_papers_listing(method, size):
    router = router_module.NormRouter(method, total_expert=E, top_k=K)
    torch.nn.init.constant_(router.scale, 1.3)
    logits = (size * torch.randn(2, 5, E)).requires_grad_()
    initial = 1.0 if method == "one" else router_module.monte_carlo_scale(E, K)
    norm = logits.norm(2, dim=-1, keepdim=True)
    theirs = router.scale * initial * torch.relu(logits / (norm + 1e-8))
    mine = router(logits)
    assert_same(mine, theirs)
    d = torch.rand(2, 5, E)
    assert_same_gradients((mine * d).sum(), (theirs * d).sum(), [logits, router.scale])
