"""kernels/triton_linear.py against float64: in the interpreter on a CPU, compiled on a GPU."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from interpreter import like_gpu  # noqa: F401
from numerics import (
    DEVICE,
    as_leaves,
    assert_equal,
    assert_near,
    differentiate,
    guarded_buffers,
    seeded,
    tolerance,
)

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


def run(function, *inputs, dtype=None):
    """The logits and the gradient of each input."""
    *leaves, d = as_leaves(*inputs, dtype=dtype)
    with guarded_buffers():
        return differentiate([function(*leaves)], leaves, [d])


@pytest.mark.numerics
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(shape, has_bias):
    x, weight, bias, d = make_inputs(*shape)
    inputs = x, weight, bias if has_bias else None, d
    wanted = run(F.linear, *inputs, dtype=torch.float64)
    for a, b in zip(run(triton_linear.multiply_by_weight, *inputs), wanted, strict=True):
        assert_near(a, b, tolerance(torch.float32, max(shape)))


@on_cpu
def test_where_the_kernel_runs():
    x, weight, bias, _ = make_inputs(6, 16, 4)
    split = triton_linear.forward(x, weight, bias)
    plain = F.linear(x, weight, bias)
    assert_equal(kernels.linear(x, weight, bias, "triton"), split)
    assert_equal(kernels.linear(x, weight, bias, "torch"), plain)
    wide = [t.double() for t in (x, weight, bias)]
    assert kernels.linear(*wide, "auto").dtype == torch.float64
    for limit in ({"LARGEST": 3}, {"CAPABILITY": 8}):
        with mock.patch.multiple(triton_linear, **limit):
            assert_equal(kernels.linear(x, weight, bias, "triton"), plain)


@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize(
    "N, C, E, K", [(32768, 768, 64, 8), (8191, 1000, 48, 5), (8192, 768, 128, 4)]
)
def test_errs_no_more_than_float32_in_full_size_on_gpu(N, C, E, K):
    """Experts chosen by the logits differ from float32's no more often than its from float64's."""
    if torch.cuda.get_device_capability()[0] != triton_linear.CAPABILITY:
        pytest.skip("these kernels are for another GPU")
    inputs = make_inputs(N, C, E)
    inputs[1] *= 0.02
    ours, again = (run(triton_linear.multiply_by_weight, *inputs) for _ in range(2))
    plain, wide = (run(F.linear, *inputs, dtype=dtype) for dtype in (None, torch.float64))
    for a, b, exact in zip(ours, plain, wide, strict=True):
        assert (a - exact).norm() <= 1.05 * (b - exact).norm()
    assert_equal(ours, again)
    chosen = [t[0].topk(K).indices.sort(1).values for t in (ours, plain, wide)]
    differs = [(a != b).any(1).sum() for a, b in zip(chosen, chosen[1:], strict=False)]
    assert differs[0] <= 2 * differs[1] + 2  # few of thousands: numbers of chance
