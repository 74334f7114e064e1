"""kernels/triton_router.py against router.py in float64: in the interpreter on a CPU, compiled on a
GPU.
"""

import math
from itertools import product

import pytest
import torch
from interpreter import like_gpu  # noqa: F401
from numerics import DEVICE, assert_near, guarded_buffers, seeded, tolerance

from balance import Stats, measure
from configure.schema import Model
from kernels import route
from model import GPT
from router import ROUTERS, Router, top_k_indices

pytest.importorskip("triton")

from kernels import triton_experts, triton_router  # noqa: E402

# the interpreter's, of NaN and Inf on their way
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROUNDINGS = 4 if DEVICE == "cpu" else 12  # a GPU's exponentials and divisions are approximate
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter")
SPARSE = [name for name in ROUTERS if name != "dense"]
# B, T, E, K: two programs a sequence, the last with a token that does not exist
TYPICAL = (2, 7, 13, 4)
assert triton_experts.INTERPRETED or DEVICE == "cuda", (
    "kernels were imported before conftest.py could set it"
)
FUSED_FIELDS = Stats._fields[:-1]  # without margins
VALUES = ("weights", "experts", "scores", *FUSED_FIELDS)
LOSSES = ("weights", "probability", "z_loss")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, request):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(triton_router, "ELEMENTS", 64)


def make_logits(B, T, E, number=0):
    return torch.randn(B * T, E, generator=seeded(number))


def make_upstream(B, T, E, K):
    """Gradients of weights, probability and z-loss; the first positive: the sum that is γ's does
    not cancel.
    """
    some = seeded(1)
    return (
        torch.rand(B * T, K, generator=some),
        torch.randn(B, E, generator=some),
        torch.tensor(0.3),
    )


def make_router(name, E, K):
    router = Router(1, E, K, ROUTERS[name], gate_scale=1.5)
    if router.gamma is not None:
        torch.nn.init.constant_(router.gamma, 0.7)
    router.selection_bias.normal_(std=0.1, generator=seeded(2))
    return router


def collect(outputs, leaves, upstream, losses):
    """The outputs, detached, and the gradient of each leaf."""
    named = dict(zip(LOSSES, upstream, strict=True))
    loss = sum((outputs[key] * named[key].to(outputs[key])).sum() for key in losses)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return {key: value.detach() for key, value in outputs.items()}, gradients


def run_kernel(router, logits, upstream, B, losses=LOSSES):
    spec, router = router.spec, router.to(DEVICE)
    leaves = [
        t.detach().to(DEVICE).requires_grad_() for t in (logits, router.gamma) if t is not None
    ]
    gamma = leaves[1] if len(leaves) > 1 else None
    formula = (spec.phi, spec.pre, spec.post)
    with guarded_buffers():
        out = route(
            leaves[0], router.selection_bias, router.c, gamma, formula, router.top_k, B, "triton"
        )
        return collect(dict(zip(VALUES, out, strict=True)), leaves, upstream, losses)


def run_oracle(router, logits, upstream, B, experts, losses=LOSSES):
    """The torch router in float64, which chooses `experts`."""
    router = router.double()
    leaf = logits.detach().to(DEVICE).double().requires_grad_()
    routing = router.choose(leaf, experts)
    stats = measure(routing, B)
    values = (*routing[:3], *(getattr(stats, name) for name in FUSED_FIELDS))
    leaves = [leaf] if router.gamma is None else [leaf, router.gamma]
    return collect(dict(zip(VALUES, values, strict=True)), leaves, upstream, losses)


def assert_equals_router(router, logits, upstream, B, losses=LOSSES, floor=0.0):
    """Equal in values and gradients, and in the choice given the scores.

    `floor` is added to what errors relate to; of a gradient divided by the norm of a row, in which
    terms cancel.
    """
    logits = logits.to(DEVICE)
    n_token, E = logits.shape
    out, gradients = run_kernel(router, logits, upstream, B, losses)
    chosen = top_k_indices(out["scores"] + router.selection_bias, router.top_k)
    assert torch.equal(out["experts"], chosen)
    wanted, wanted_gradients = run_oracle(router, logits, upstream, B, out["experts"], losses)
    for key in VALUES:
        if out[key].dtype == torch.int64:
            assert torch.equal(out[key], wanted[key]), key
        elif key != "z_loss" or "z_loss" in losses:
            # the entropy of a sure choice is a rounding
            size = wanted[key] + (1 if key == "entropy" else floor)
            if key == "gate_sum":
                size = wanted["weights"].abs().sum(1).mean() + floor
            assert_near(out[key], wanted[key], tolerance(torch.float32, E, ROUNDINGS), key, size)
    limit = tolerance(torch.float32, max(E, n_token), 4 * ROUNDINGS)
    floors = floor / logits.double().norm(dim=1, keepdim=True).clamp(1e-8, 1), floor
    named = zip(("d_logits", "d_gamma"), gradients, wanted_gradients, floors, strict=False)
    for key, gradient, reference, least in named:
        assert gradient.isfinite().all(), key
        assert_near(gradient, reference, limit, key, reference.abs() + least)
    return out


# of few experts, gradients along a normalised row cancel
SHAPES = [(name, TYPICAL, 0.0) for name in SPARSE]
SHAPES += product(
    ("kern", "softmax-renorm"), [(1, 1, 1, 1), (2, 2, 5, 5), (1, 3, 64, 8), (3, 1, 2, 1)], [3.0]
)


@pytest.mark.numerics
@pytest.mark.parametrize("name, shape, floor", SHAPES)
def test_equals_router(name, shape, floor):
    B, T, E, K = shape
    upstream = make_upstream(*shape)
    assert_equals_router(make_router(name, E, K), make_logits(B, T, E), upstream, B, floor=floor)


UNUSUAL = [*product(("kern", "kern-after", "softmax", "tanh"), ["ties"])]
UNUSUAL += product(("kern", "kern-after"), ["no positive score"])
# squares overflow from 1e19 on, and so does the z-loss; a row of zeros gives no NaN
UNUSUAL += product(("kern", "softmax", "sqrtsoftplus"), [0.0, 1e-30, 1e30])


@pytest.mark.numerics
@pytest.mark.parametrize("name, kind", UNUSUAL)
def test_unusual_logits(name, kind):
    B, T, E, K = TYPICAL
    router, upstream, logits = (
        make_router(name, E, K),
        make_upstream(*TYPICAL),
        make_logits(B, T, E),
    )
    # sure choices have no gradient but for ε; squares of gates underflow
    losses, floor = LOSSES[:2], 1.0 if name == "softmax" else 1e-35
    if kind == "ties":
        logits = torch.randint(-2, 2, (B * T, E), generator=seeded()).float()
        logits[0], logits[1], logits[2] = 0, -1, torch.tensor([0.0, -0.0]).repeat(E)[:E]
        router.selection_bias.fill_(-0.0)  # 0.0 would turn scores of -0.0 into 0.0
    elif kind == "no positive score":
        logits[::2], logits[1] = -0.1 - logits[::2].abs(), 0
        upstream[0][::2] -= 0.5  # of both signs: a negative mean lifts the token's logits
        losses = LOSSES[:1]
    else:
        logits = kind * logits.clamp(-3, 3)
    out = assert_equals_router(router, logits, upstream, B, losses, floor)
    assert all(out[key].isfinite().all() for key in VALUES if key != "z_loss")
    if kind == "no positive score":
        assert (out["weights"][::2] == 0).all() and (out["weights"][3::2] > 0).any(1).all()


BAD_LOGITS = [
    ("kern", math.nan),
    ("softmax", math.nan),
    ("kern-after", math.nan),
    ("kern", math.inf),
]


def assert_bad_logits_spoil_no_other(name, bad, B, T, E, K):
    """A token with one gets K distinct experts in range; its gates are then NaN where the torch
    router's are, and its loads count.
    """
    router, upstream = make_router(name, E, K), make_upstream(B, T, E, K)
    logits = make_logits(B, T, E).to(DEVICE)
    clean, clean_gradients = run_kernel(router, logits, upstream, B, ["weights"])
    logits[3, 5] = bad
    logits[9] = bad
    out, gradients = run_kernel(router, logits, upstream, B, ["weights"])
    experts, token = out["experts"], torch.arange(B * T, device=DEVICE)
    others = (token != 3) & (token != 9)
    assert (experts.sort(1).values.diff(dim=1) > 0).all()
    assert (experts >= 0).all() and (experts < E).all()
    for key in ("weights", "experts", "scores"):
        assert torch.equal(out[key][others], clean[key][others])
    assert torch.equal(gradients[0][others], clean_gradients[0][others])
    assert (out["loads"].sum(1) == T * K).all()
    if math.isnan(bad):
        assert out["weights"][~others].isnan().all()


@pytest.mark.parametrize("name, bad", BAD_LOGITS)
def test_a_token_with_a_bad_logit_spoils_no_other(name, bad):
    assert_bad_logits_spoil_no_other(name, bad, *TYPICAL)


# as a part of the model
def test_runs_repeat_bit_for_bit_and_strides_do_not_matter():
    router, upstream = make_router("kern", *TYPICAL[2:]), make_upstream(*TYPICAL)
    logits = make_logits(*TYPICAL[:3])
    first, gradients = run_kernel(router, logits, upstream, 2)
    again, gradients_again = run_kernel(router, logits.T.contiguous().T, upstream, 2)
    assert all(torch.equal(first[key], again[key]) for key in VALUES)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))


@pytest.mark.numerics
@pytest.mark.parametrize("router", ["softmax", "kern"])
def test_model_with_all_kernels_and_without(router):
    """Loss, statistics and all gradients; with balance loss and z-loss, so each output of the
    router's kernel takes part.
    """
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 6, "vocab_size": 40}
    sizes |= {"n_expert": 6, "top_k": 2, "expert_hidden": 8, "init_std": 0.3}
    idx = torch.randint(40, (3, 6), generator=seeded(1)).to(DEVICE)
    results = []
    for backend, checkpointing in (("torch", False), ("triton", False), ("triton", True)):
        torch.manual_seed(seeded().initial_seed())
        model = GPT(Model(**sizes, router=router, backend=backend)).to(DEVICE)
        for block in model.blocks:
            block.checkpointing = checkpointing
        out = model(idx, idx)
        probe = torch.randn(out.stats.probability.shape, generator=seeded(3)).to(DEVICE)
        loss = out.loss + (out.stats.probability * probe).sum() + 0.1 * out.stats.z_loss.sum()
        results.append(
            [out.loss, *out.stats[:-1], *torch.autograd.grad(loss, list(model.parameters()))]
        )
    for wanted, got, again in zip(*results, strict=True):
        assert got.dtype == wanted.dtype and got.requires_grad == wanted.requires_grad
        # γ's gradient: terms of about 0.1 that cancel
        size = wanted.abs() + (0.1 if wanted.shape == (1,) else 0)
        # of the routers, of the norms
        assert_near(got, wanted, tolerance(torch.float32, 64, 64 + 64), size=size)
        assert torch.equal(got, again)


@on_cpu
def test_where_the_kernel_runs():
    many = triton_router.LARGEST + 1
    for E, backend, runs in (
        (6, "auto", 0),
        (6, "torch", 0),
        (6, "triton", 1),
        (many, "triton", 0),
    ):
        inputs = torch.randn(4, E), torch.zeros(E), torch.ones(1), None
        out = route(*inputs, ("exp", "none", "l1 over all"), 2, 1, backend)
        assert (out is not None) == runs, (E, backend)


# on a GPU, in full size
@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, E, K",
    [*((name, 64, 8) for name in SPARSE), ("kern", 256, 8), ("kern", 48, 5), ("softmax", 512, 16)],
)
def test_equals_router_in_full_size_on_gpu(name, E, K):
    """Each router and shape compiles separately: 4 kernels."""
    upstream = make_upstream(8, 1000, E, K)
    assert_equals_router(make_router(name, E, K), make_logits(8, 1000, E), upstream, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name, bad", BAD_LOGITS)
def test_a_token_with_a_bad_logit_spoils_no_other_on_gpu(name, bad):
    """A GPU's maximum may drop NaN, the interpreter's keeps it."""
    assert_bad_logits_spoil_no_other(name, bad, 8, 1000, 64, 8)
