"""kernels/triton_router.py against router.py in float64: in the interpreter on a CPU, compiled on a
GPU.
"""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from interpreter import like_gpu  # noqa: F401
from numerics import (
    DEVICE,
    as_leaves,
    assert_equal,
    assert_near,
    guarded_buffers,
    seeded,
    tolerance,
)

from balance import Stats, measure
from kernels import route
from router import ROUTERS, Router, top_k_indices

pytest.importorskip("triton")

from kernels import triton_router  # noqa: E402

# the interpreter's, of NaN and Inf on their way
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROUNDINGS = 4 if DEVICE == "cpu" else 12  # a GPU's exponentials and divisions are approximate
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter")
SPARSE = [name for name in ROUTERS if name != "dense"]
# B, T, E, K: two programs a sequence, the last with a token that does not exist
TYPICAL = (2, 7, 13, 4)
FUSED_FIELDS = Stats._fields[:-1]  # without margins
VALUES = ("weights", "experts", "scores", *FUSED_FIELDS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, request):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(triton_router, "ELEMENTS", 64)


def make_inputs(name, B, T, E, K):
    """A router, logits, and gradients of weights, probability and z-loss; the first positive: the
    sum that is γ's does not cancel.
    """
    router = Router(1, E, K, ROUTERS[name], gate_scale=1.5)
    if router.gamma is not None:
        torch.nn.init.constant_(router.gamma, 0.7)
    router.selection_bias.normal_(std=0.1, generator=seeded(2))
    some = seeded(1)
    weights, probability = torch.rand(B * T, K, generator=some), torch.randn(B, E, generator=some)
    upstream = {"weights": weights, "probability": probability, "z_loss": torch.tensor(0.3)}
    return router, torch.randn(B * T, E, generator=seeded()), upstream


def collect(values, leaves, upstream):
    """{name: value or gradient} of VALUES and, from `upstream`, of logits and γ."""
    outputs = dict(zip(VALUES, values, strict=True))
    loss = sum((outputs[key] * d.to(outputs[key])).sum() for key, d in upstream.items())
    leaves = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    outputs |= zip(("d_logits", "d_gamma"), gradients, strict=False)
    return {key: value.detach() for key, value in outputs.items()}


def run_kernel(router, logits, upstream, B):
    spec, router = router.spec, router.to(DEVICE)
    logits, gamma = as_leaves(logits.to(DEVICE).T.contiguous().T, router.gamma)  # strided
    inputs = logits, router.selection_bias, router.c, gamma, (spec.phi, spec.pre, spec.post)
    with guarded_buffers():
        values = route(*inputs, router.top_k, B, "triton")
        return collect(values, [logits, gamma], upstream)


def run_oracle(router, logits, upstream, B, experts):
    """The torch router in float64, which chooses `experts`."""
    router = router.double()
    (leaf,) = as_leaves(logits, dtype=torch.float64)
    routing = router.choose(leaf, experts)
    return collect((*routing[:3], *measure(routing, B)[:-1]), [leaf, router.gamma], upstream)


def assert_equals_router(router, logits, upstream, B, floor=0.0):
    """Equal in values and gradients, and in the choice given the scores.

    `floor` is added to what errors relate to; of a gradient divided by the norm of a row, in which
    terms cancel.
    """
    logits = logits.to(DEVICE)
    E = logits.shape[1]
    out = run_kernel(router, logits, upstream, B)
    chosen = top_k_indices(out["scores"] + router.selection_bias, router.top_k)
    assert_equal(out["experts"], chosen)
    wanted = run_oracle(router, logits, upstream, B, out["experts"])
    floors = dict.fromkeys(out, floor)
    floors["entropy"] = 1  # of a sure choice it is a rounding
    floors["gate_sum"] += wanted["weights"].abs().sum(1).mean()
    floors["d_logits"] = floor / logits.double().norm(dim=1, keepdim=True).clamp(1e-8, 1)
    for key, value in out.items():
        if value.dtype == torch.int64:
            assert_equal(value, wanted[key])
            continue
        limit = tolerance(torch.float32, E, ROUNDINGS)
        if key.startswith("d_"):
            limit = tolerance(torch.float32, max(logits.shape), 4 * ROUNDINGS)
        if key != "z_loss" or key in upstream:
            assert_near(value, wanted[key], limit, key, wanted[key].abs() + floors[key])
    return out


# of few experts, gradients along a normalised row cancel
SHAPES = [(name, TYPICAL, 0.0) for name in SPARSE]
SHAPES += product(
    ("kern", "softmax-renorm"), [(1, 1, 1, 1), (2, 2, 5, 5), (1, 3, 64, 8), (3, 1, 2, 1)], [3.0]
)


@pytest.mark.numerics
@pytest.mark.parametrize("name, shape, floor", SHAPES)
def test_equals_router(name, shape, floor):
    assert_equals_router(*make_inputs(name, *shape), shape[0], floor=floor)


UNUSUAL = [*product(("kern", "kern-after", "softmax", "tanh"), ["ties"])]
UNUSUAL += product(("kern", "kern-after"), ["no positive score"])
# squares overflow from 1e19 on, and so does the z-loss; a row of zeros gives no NaN
UNUSUAL += product(("kern", "softmax", "sqrtsoftplus"), [0.0, 1e-30, 1e30])


@pytest.mark.numerics
@pytest.mark.parametrize("name, kind", UNUSUAL)
def test_unusual_logits(name, kind):
    B, T, E, K = TYPICAL
    router, logits, upstream = make_inputs(name, *TYPICAL)
    del upstream["z_loss"]
    # sure choices have no gradient but for ε; squares of gates underflow
    floor = 1.0 if name == "softmax" else 1e-35
    if kind == "ties":
        logits = torch.randint(-2, 2, (B * T, E), generator=seeded()).float()
        logits[0], logits[1], logits[2] = 0, -1, torch.tensor([0.0, -0.0]).repeat(E)[:E]
        router.selection_bias.fill_(-0.0)  # 0.0 would turn scores of -0.0 into 0.0
    elif kind == "no positive score":
        logits[::2], logits[1] = -0.1 - logits[::2].abs(), 0
        upstream["weights"][::2] -= 0.5  # of both signs: a negative mean lifts the token's logits
        del upstream["probability"]
    else:
        logits = kind * logits.clamp(-3, 3)
    out = assert_equals_router(router, logits, upstream, B, floor)
    assert all(value.isfinite().all() for key, value in out.items() if key != "z_loss")
    if kind == "no positive score":
        assert (out["weights"][::2] == 0).all() and (out["weights"][3::2] > 0).any(1).all()


ON_GPU = pytest.param((8, 1000, 64, 8), marks=pytest.mark.gpu)


@pytest.mark.parametrize("shape", [TYPICAL, ON_GPU])
@pytest.mark.parametrize(
    "name, bad", [*product(("kern", "softmax", "kern-after"), [math.nan]), ("kern", math.inf)]
)
def test_a_token_with_a_bad_logit_spoils_no_other(name, bad, shape):
    """It gets K distinct experts in range; its gates are then NaN where the torch router's are, and
    its loads count. A GPU's maximum may drop NaN, the interpreter's keeps it.
    """
    B, T, E, K = shape
    router, logits, upstream = make_inputs(name, *shape)
    upstream = {"weights": upstream["weights"]}
    clean = run_kernel(router, logits, upstream, B)
    logits[3, 5] = logits[9] = bad
    out = run_kernel(router, logits, upstream, B)
    spoilt = torch.zeros(B * T, dtype=torch.bool).index_fill(0, torch.tensor([3, 9]), True)
    for key in ("weights", "experts", "scores", "d_logits"):
        assert_equal(out[key][~spoilt], clean[key][~spoilt])
    loads = F.one_hot(out["experts"], E).sum(1)  # refuses an expert out of range
    assert loads.max() == 1
    assert_equal(out["loads"], loads.view(B, T, E).sum(1).to(out["loads"]))
    if math.isnan(bad):
        assert out["weights"][spoilt].isnan().all()


@on_cpu
def test_where_the_kernel_runs():
    for E, backend in ((6, "auto"), (6, "torch"), (6, "triton"), (513, "triton")):
        inputs = torch.randn(4, E), torch.zeros(E), torch.ones(1), None
        out = route(*inputs, ("exp", "none", "l1 over all"), 2, 1, backend)
        assert (out is not None) == ((E, backend) == (6, "triton"))


# on a GPU, in full size
@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, E, K",
    [*((name, 64, 8) for name in SPARSE), ("kern", 256, 8), ("kern", 48, 5), ("softmax", 512, 16)],
)
def test_equals_router_in_full_size_on_gpu(name, E, K):
    """Each router and shape compiles separately: 4 kernels."""
    inputs = name, 8, 1000, E, K
    first = assert_equals_router(*make_inputs(*inputs), 8)
    assert_equal(first, run_kernel(*make_inputs(*inputs), 8))
