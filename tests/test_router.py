"""router.py: every router against an independent oracle, KERN's properties, the losses that balance experts."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numerics import assert_near, seeded, tolerance
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

import router as router_module
from eval.theory import exact
from router import ROUTERS, Router, RouterSpec, balance_loss, expert_loads, monte_carlo_scale, token_distribution

N, C, E, K = 48, 12, 16, 4
SPARSE = [name for name in ROUTERS if name != "dense"]
BIASED = ["sigmoid-renorm", "sqrtsoftplus"]  # published with a selection bias


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(seeded().initial_seed())


def make_router(name, n_embd=C, n_expert=E, top_k=K):
    """A router whose parameters are all random, γ fixed; logits of normal inputs are of size 1."""
    torch.manual_seed(seeded().initial_seed())
    router = Router(n_embd, n_expert, top_k, ROUTERS[name])
    with torch.no_grad():
        for p in router.parameters():
            p.normal_(std=n_embd**-0.5)
        if router.gamma is not None:
            router.gamma.fill_(0.7)
    return router


def identity_router(name, n_expert=E, top_k=K):
    """A router whose logits are its input."""
    router = Router(n_expert, n_expert, top_k, ROUTERS[name])
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_expert))
    return router


def clear_tokens(router):
    """(N, C) random tokens with a clear choice of experts and a clear sign of each logit, however sums are rounded."""
    x = torch.randn(20 * N, C)
    routing = router(x)
    scores = (routing.scores + router.selection_bias).sort(descending=True).values
    clear = (scores[:, K - 1] - scores[:, K] > 1e-4) | (scores[:, K - 1] == 0)
    return x[clear & (routing.logits.abs() > 1e-3).all(1)][:N].requires_grad_()


def balance(routing):
    return balance_loss(token_distribution(routing).mean(0), expert_loads(routing.experts, E))


def dense_gates(weights, experts, n_expert=E):
    """(N, K) gates and experts -> (N, E) gates, 0 where not chosen: what two routers agree on in any order of K."""
    return torch.zeros(len(weights), n_expert, dtype=weights.dtype).scatter(1, experts, weights)


def assert_same(actual, wanted, roundings=4.0):
    """Roundings: of logits, φ, norm and gate."""
    assert_near(actual, wanted, tolerance(actual.dtype, N, roundings))


def assert_same_gradients(mine, theirs, leaves):
    gradients = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (mine, theirs))
    for a, b in zip(*gradients, strict=True):
        assert b.any()
        assert_same(a, b, roundings=8)  # forward and backward


# every router against an oracle that shares no code with it
def transformers_router(cls):
    def gates(x, router):
        config = SimpleNamespace(  # the attributes that the four classes read
            **dict.fromkeys(("num_experts", "num_local_experts"), len(router.weight)), hidden_size=x.shape[1],
            num_experts_per_tok=router.top_k, norm_topk_prob=cls is not OlmoeTopKRouter, n_group=1, topk_group=1,
            scoring_func="sqrtsoftplus", routed_scaling_factor=1.0,
        )  # fmt: skip
        oracle = cls(config)
        oracle.weight = router.weight
        if hasattr(oracle, "e_score_correction_bias"):
            oracle.e_score_correction_bias = router.selection_bias
        _, weights, experts = oracle(x)
        return dense_gates(weights, experts, len(router.weight))

    return gates


def listing(logits, scale, scale_initial=1.0):
    """The forward pass of NormRouter in the paper's appendix."""
    norm = logits.norm(2, dim=-1, keepdim=True)
    return scale * scale_initial * torch.relu(logits / (norm + 1e-8))


def paper_router(x, router):
    logits = x @ router.weight.T + (0 if router.bias is None else router.bias)
    scores = listing(logits, 1.0 if router.gamma is None else router.gamma, router.c)
    return scores * (scores >= scores.sort(descending=True).values[:, [router.top_k - 1]])


def token_by_token(formula):
    """`formula(s, top)` gives the gates of the experts `top`, from one token's float64 logits `s`."""

    def gates(x, router):
        rows = []
        for token in x.double():
            s = torch.stack([(w.double() * token).sum() for w in router.weight])
            s = s if router.bias is None else s + router.bias.double()
            top = sorted(range(len(s)), key=lambda e: -s[e].item())[: router.top_k]
            scale = 1.0 if router.gamma is None else router.gamma.double()
            rows.append(torch.zeros_like(s).index_add(0, torch.tensor(top), scale * formula(s, top)))
        return torch.stack(rows).float()

    return gates


ORACLES = {
    "softmax": transformers_router(OlmoeTopKRouter),
    "softmax-renorm": transformers_router(MixtralTopKRouter),
    "sigmoid-renorm": transformers_router(DeepseekV3TopkRouter),
    "sqrtsoftplus": transformers_router(DeepseekV4TopKRouter),
    "kern": paper_router,
    "kern-mc": paper_router,
    "kern-nogamma": paper_router,
    "kern-nobias": paper_router,
    "kern-norelu": token_by_token(lambda s, top: s[top] / s.square().sum().sqrt()),
    "kern-after": token_by_token(lambda s, top: (s[top] / s[top].square().sum().sqrt()).relu()),
    "sigmoid": token_by_token(lambda s, top: 1 / (1 + (-s[top]).exp())),
    "tanh": token_by_token(lambda s, top: (s[top].exp() - (-s[top]).exp()) / (s[top].exp() + (-s[top]).exp())),
    "softmax-l2": token_by_token(lambda s, top: s[top].exp() / s.exp().square().sum().sqrt()),
    "sqrtgate": token_by_token(lambda s, top: (s[top].exp() / s[top].exp().sum()).sqrt()),
}


@pytest.mark.numerics
@pytest.mark.parametrize("name, biased", [(n, False) for n in SPARSE] + [(n, True) for n in BIASED])
def test_equals_oracle_in_values_and_gradients(name, biased):
    router = make_router(name)
    if biased:
        router.selection_bias.normal_(std=0.3)
    x, downstream = clear_tokens(router), torch.rand(N, E)  # positive: the sum that is γ's gradient does not cancel
    routing = router(x)
    mine = dense_gates(routing.weights, routing.experts)
    theirs = ORACLES[name](x, router)
    if biased:  # the bias made a difference
        assert (dense_gates(routing.weights, routing.scores.topk(K).indices) != mine).any()
    assert_same(mine, theirs)
    assert_same_gradients((mine * downstream).sum(), (theirs * downstream).sum(), [x, *router.parameters()])


@pytest.mark.numerics
@pytest.mark.parametrize("method, size", [("one", 1.0), ("one", 1e-8), ("monte_carlo", 1.0)])
def test_norm_router_equals_the_papers_listing(method, size):
    router = router_module.NormRouter(method, total_expert=E, top_k=K)
    torch.nn.init.constant_(router.scale, 1.3)
    logits = (size * torch.randn(2, 5, E)).requires_grad_()
    downstream = torch.rand(2, 5, E)
    mine, theirs = router(logits), listing(logits, router.scale, 1.0 if method == "one" else monte_carlo_scale(E, K))
    assert_same(mine, theirs)
    assert_same_gradients((mine * downstream).sum(), (theirs * downstream).sum(), [logits, router.scale])
    with pytest.raises(ValueError, match="'two' is not 'one' or 'monte_carlo'"):
        router_module.NormRouter("two")


# KERN


@pytest.mark.parametrize("n_expert, top_k", [(64, 8), (256, 8), (32, 8), (64, 64)])
def test_monte_carlo_constant(n_expert, top_k):
    """As the integral, which test_theory.py compares to the paper's; samples have a standard deviation of 0.27."""
    wanted = exact.monte_carlo(n_expert, top_k)
    near = pytest.approx(wanted, abs=4 * 0.27 / math.sqrt(20_000))
    assert monte_carlo_scale(n_expert, top_k, 20_000) == near
    assert make_router("kern-mc", n_expert=n_expert, top_k=top_k).c.item() == near


@pytest.mark.parametrize("name", ["softmax", "kern", "kern-mc"])
def test_gate_scale_multiplies_the_gates(name):
    router, scaled = (Router(C, E, K, ROUTERS[name], gate_scale=scale) for scale in (1.0, 4.0))
    scaled.weight = router.weight
    x = torch.randn(N, C)
    assert torch.equal(scaled(x).weights, 4 * router(x).weights)


# extremes

EXTREMES = {
    "zero": lambda s: 0 * s,
    "tiny": lambda s: 1e-30 * s,
    "1e4": lambda s: 1e4 * s,
    "1e20": lambda s: 1e20 * s,
    "1e30": lambda s: 1e30 * s,
    "negative": lambda s: -s.abs() - 0.1,
    "huge negative": lambda s: -1e30 * s.abs(),
    # One is large and positive: gates of tiny logits alone would give W a gradient of 1 / ε times the others, Inf.
    "mixed": lambda s: s.where(torch.arange(E) > 0, s.abs()) * torch.tensor([1e30, -1e30, 0.0, 1e-30]).repeat(E // 4),
}


@pytest.mark.numerics
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", SPARSE)
def test_extreme_logits(name, extreme):
    usual = torch.randn(N, E)
    x = EXTREMES[extreme](usual).requires_grad_()
    router = identity_router(name)
    routing = router(x)
    ((routing.weights * torch.randn(N, K)).sum() + balance(routing)).backward()
    for tensor in (routing.weights, routing.scores, x.grad, *(p.grad for p in router.parameters())):
        assert tensor.isfinite().all()
    assert (routing.experts.sort().values.diff() > 0).all()  # distinct
    if name.startswith("kern") and name != "kern-norelu" and extreme in ("zero", "negative", "huge negative"):
        assert (routing.weights == 0).all()
    if name.startswith("kern") and extreme in ("1e4", "1e20", "1e30"):
        assert_same(routing.weights, router(usual).weights)


@settings(deadline=None, max_examples=40)
@given(
    arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(allow_nan=False, width=32)),
    st.data(),
)
def test_ties_go_to_the_lower_index(array, data):
    values = [0.0, -0.0, 1.0, -1.0, 2.0**-140, -(2.0**-140)]
    scores = torch.from_numpy(array)
    tied = torch.tensor(data.draw(st.lists(st.sampled_from(values), min_size=8, max_size=8)))[None]
    for s in (scores, tied):
        k = data.draw(st.integers(1, s.shape[1]))
        wanted = s.argsort(dim=1, descending=True, stable=True)[:, :k]
        assert torch.equal(router_module.top_k_indices(s, k), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("name", SPARSE)
def test_routing_is_float32_whatever_the_autocast(name, norm, dtype):
    """In float16 the squares of these logits overflow at 1e4, and ε is 0 where they are 0."""
    logits = norm * F.normalize(torch.randn(N, E), dim=-1)
    upstream, outcomes = torch.randn(N, K), []
    for enabled in (False, True):
        router, x = identity_router(name), logits.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=enabled):
            routing = router(x)
            loss = (routing.weights * upstream).sum() + balance(routing)
        loss.backward()
        outcomes.append([*routing[:4], x.grad, *(p.grad for p in router.parameters())])
    for plain, under in zip(*outcomes, strict=True):
        assert under.dtype in (torch.float32, torch.int64) and under.isfinite().all() and torch.equal(plain, under)


def test_routing_of_inputs_in_other_dtypes():
    router, x = make_router("kern"), torch.randn(N, C)
    assert router(x.bfloat16()).weights.dtype == torch.float32
    assert torch.equal(router(x.bfloat16()).weights, router(x.bfloat16().float()).weights)
    assert router(x.double()).weights.dtype == torch.float64


# tokens without a positive score

RELU = ["kern", "kern-after", "kern-mc", "kern-nogamma", "kern-nobias"]


@pytest.mark.numerics
@pytest.mark.parametrize("name", RELU)
def test_a_token_without_positive_score_lifts_its_logits(name):
    router = make_router(name, n_embd=E).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
        if router.bias is not None:
            router.bias.mul_(0.01)
    x = torch.randn(N, E, dtype=torch.float64)
    x[: N // 2] = -0.1 - x[: N // 2].abs()
    x[0], x[1] = 0, x[1].where(x[1] < -1, 0)  # all logits, then some of them near 0
    x.requires_grad_()
    downstream = torch.randn(N, K, dtype=torch.float64)
    routing = router(x)

    s = x if router.bias is None else x + router.bias
    scale = router.c.double() * (1.0 if router.gamma is None else router.gamma)
    dead = (s <= 0).all(1)
    chosen = s[~dead].gather(1, routing.experts[~dead])
    normed = chosen if name == "kern-after" else s[~dead]
    downstream[~dead] = downstream[~dead].abs()  # so that the sum which is γ's gradient does not cancel
    gates = chosen.relu() / (normed.square().sum(1, keepdim=True).sqrt() + router_module.EPS)
    assert N // 2 - 2 <= dead.sum() < N
    assert (routing.weights[dead] == 0).all() and (routing.weights[~dead] > 0).any(1).all()
    pull = (scale * downstream).mean(1).detach().clamp_max(0)[dead]  # the gradient of each gate before c and γ
    assert (pull == 0).any() and (pull < 0).any()
    surrogate = (scale * gates * downstream[~dead]).sum() + (pull * s[dead].mean(1)).sum()

    leaves = [x] + [p for p in (router.bias, router.gamma) if p is not None]
    assert_same_gradients((routing.weights * downstream).sum(), surrogate, leaves)
    (routing.weights * downstream)[dead].sum().backward()
    assert (router.weight.grad != 0).any()
    assert router.gamma is None or router.gamma.grad == 0


# balance
@pytest.mark.numerics
@pytest.mark.parametrize("name", SPARSE)
def test_selection_bias_shifts_the_choice_alone(name):
    router = make_router(name)
    x = torch.randn(N, C)
    before = router(x)
    router.selection_bias[5] = 1e3
    after = router(x)
    assert (after.experts == 5).any(1).all()
    assert not (before.experts == 5).any(1).all()
    assert torch.equal(after.scores, before.scores)
    if "topk" not in router.spec.pre + router.spec.post:
        gates = after.scores.gather(1, after.experts) * router.c * (1.0 if router.gamma is None else router.gamma)
        assert_same(after.weights, gates)
    assert not router.selection_bias.requires_grad
    assert "selection_bias" in router.state_dict()


@pytest.mark.numerics
def test_update_selection_bias():
    bias = torch.tensor([0.5, 0.0, 0.0, -1.0])
    router_module.update_selection_bias(bias, torch.tensor([9, 3, 4, 0]), rate=0.01)
    assert_same(bias, torch.tensor([0.49, 0.01, 0.0, -0.99]))


@pytest.mark.numerics
@pytest.mark.parametrize("top_k", [1, 4])
def test_balance_loss_equals_transformers(top_k):
    router = make_router("softmax", top_k=top_k)
    x = torch.randn(N, C, requires_grad=True)
    routing = router(x)
    mine = balance(routing)
    theirs = load_balancing_loss_func((x @ router.weight.T,), E, top_k) / top_k
    assert_same(mine, theirs)
    assert_same_gradients(mine, theirs, [x, router.weight])


@pytest.mark.numerics
def test_z_loss():
    router = make_router("kern")
    x = torch.randn(N, C)
    logits = F.linear(x, router.weight, router.bias)
    assert_same(router_module.z_loss(router(x)), (logits.exp().sum(1).log() ** 2).mean())
    assert router_module.z_loss(identity_router("softmax")(torch.full((N, E), 1e4))).isfinite()


# errors
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"phi": "swish"}, "phi 'swish' is not one of identity, relu"),
        ({"phi": "relu", "pre": "l3 over all"}, "norm 'l3 over all' is not one of: none; l1 over all"),
        ({"phi": "exp"}, "'exp' is computed up to a factor and needs a post norm"),
        ({"phi": "tanh", "pre": "l2 over all", "c": "monte_carlo"}, "phi 'relu' after pre 'l2 over all'"),
    ],
)
def test_spec_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        RouterSpec(**fields)


@pytest.mark.parametrize("top_k", [0, E + 1])
def test_top_k_error(top_k):
    with pytest.raises(ValueError, match=f"top_k {top_k} must lie between 1 and n_expert {E}"):
        Router(C, E, top_k, ROUTERS["kern"])


def test_entropy_by_hand():
    distribution = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert router_module.entropy(distribution).item() == pytest.approx((math.log(2) + 0 + math.log(4)) / 3)
