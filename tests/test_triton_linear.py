"""kernels/triton_linear.py against float64: in the interpreter on a CPU, compiled on a GPU."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from interpreter import like_gpu  # noqa: F401
from numerics import DEVICE, assert_near, guarded_buffers, seeded, tolerance

import kernels

pytest.importorskip("triton")

from kernels import triton_linear  # noqa: E402

on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter")
# N, C, E
SHAPES = [(200, 96, 13), (65, 33, 64), (1, 5, 1), (0, 8, 4), (130, 48, 100)]


def make_inputs(N, C, E):
    """x, weight, bias and the gradient of the logits."""
    some = seeded(N + E)
    shapes = (N, C), (E, C), (E,), (N, E)
    return [torch.randn(shape, generator=some).to(DEVICE) for shape in shapes]


def collect(function, x, weight, bias, d):
    """The logits and the gradient of each input."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    out = function(*leaves, *([None] if bias is None else []))
    return [out.detach(), *torch.autograd.grad(out, leaves, d)]


def run(*inputs):
    with guarded_buffers():
        return collect(triton_linear.multiply_by_weight, *inputs)


@pytest.mark.numerics
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(shape, has_bias):
    x, weight, bias, d = make_inputs(*shape)
    bias = bias if has_bias else None
    wide = [None if t is None else t.double() for t in (x, weight, bias, d)]
    for a, b in zip(run(x, weight, bias, d), collect(F.linear, *wide), strict=True):
        assert_near(a, b, tolerance(torch.float32, max(shape)))


@on_cpu
def test_where_the_kernel_runs():
    x, weight, bias, _ = make_inputs(6, 16, 4)
    split = triton_linear.forward(x, weight, bias)
    plain = F.linear(x, weight, bias)
    assert torch.equal(kernels.linear(x, weight, bias, "triton"), split)
    assert torch.equal(kernels.linear(x, weight, bias, "torch"), plain)
    wide = [t.double() for t in (x, weight, bias)]
    assert kernels.linear(*wide, "auto").dtype == torch.float64
    for limit in ({"LARGEST": 3}, {"CAPABILITY": 8}):
        with mock.patch.multiple(triton_linear, **limit):
            assert torch.equal(kernels.linear(x, weight, bias, "triton"), plain)


@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize(
    "N, C, E, K", [(32768, 768, 64, 8), (8191, 1000, 48, 5), (8192, 768, 128, 4)]
)
def test_errs_no_more_than_float32_in_full_size_on_gpu(N, C, E, K):
    """Experts chosen by the logits differ from float32's no more often than its from float64's."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != triton_linear.CAPABILITY:
        pytest.skip("these kernels are for another GPU")
    x, weight, bias, d = make_inputs(N, C, E)
    weight *= 0.02
    inputs = (x, weight, bias, d)
    ours, again, plain = run(*inputs), run(*inputs), collect(F.linear, *inputs)
    wide = collect(F.linear, *(t.double() for t in inputs))
    for a, b, exact in zip(ours, plain, wide, strict=True):
        assert (a - exact).norm() <= 1.05 * (b - exact).norm()
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    chosen = [t[0].topk(K).indices.sort(1).values for t in (ours, plain, wide)]
    differs = [(a != b).any(1).sum() for a, b in zip(chosen, chosen[1:], strict=False)]
    assert differs[0] <= 2 * differs[1] + 2  # few of thousands: numbers of chance
