"""add_norm against formulas by hand in float64: kernels/triton_norm.py in the interpreter on a CPU
or compiled on a GPU, and torch's operators.
"""

import math
from itertools import product

import pytest
import torch
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
from torch import nn

from kernels import add_norm

pytest.importorskip("triton")

from kernels import triton_norm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
NORMS = {
    "layernorm": (nn.LayerNorm, {"bias": False}),
    "biased": (nn.LayerNorm, {}),
    "rmsnorm": (nn.RMSNorm, {}),
}
SHAPES = [(1, 7, 13), (2, 3, 96), (3, 5, 1), (2, 2, 1000)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, request):
    """So that programs take several tiles, the last with tokens that do not exist."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(triton_norm, "ELEMENTS", 32)
        monkeypatch.setattr(triton_norm, "PROGRAMS", 2)


def make_inputs(name, shape, y_dtype=None):
    """[x, y, parameters of the norm], the norm, and the gradients of x + y and of both norms.

    All are strided but y, which is as experts return it.
    """
    (kind, options), g = NORMS[name], seeded(sum(shape))
    norm = kind(shape[-1], eps=1e-3, **options)
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.5, generator=g)
    norm.to(DEVICE)
    drawn = (torch.randn(shape, generator=g).to(DEVICE) for _ in range(5))
    x, y, *upstream = (t.mT.contiguous().mT for t in drawn)
    y = None if y_dtype is None else y.to(y_dtype).flatten(0, 1).requires_grad_()
    return [(x + 3).requires_grad_(), y, *norm.parameters()], norm, upstream


def run(leaves, norm, upstream, dtype, exact, backend="triton"):
    rounds = exact or backend == "triton"  # torch leaves it to the product that follows
    second = dtype if dtype and rounds else torch.float32
    with guarded_buffers(), torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        outputs = add_norm(*leaves[:2], norm, exact, backend)
        assert [out.dtype for out in outputs[:2]] == [torch.float32, second]
        assert outputs[2] is None or outputs[2].dtype == torch.float32
        return differentiate(outputs, leaves, upstream)


def run_oracle(leaves, norm, upstream, count):
    """`count` outputs, and gradients, from the textbook in float64."""
    x, y, weight, *bias = leaves = as_leaves(*leaves, dtype=torch.float64)
    total = x if y is None else x + y.view_as(x)
    centred = total if isinstance(norm, nn.RMSNorm) else total - total.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    normed = weight * centred / deviation + sum(bias)
    return differentiate([total, normed, normed][:count], leaves, upstream)


# The norm, the output's dtype, y's dtype and whether x + y is also normed in float32: each pair of
# values
CELLS = [
    ("layernorm", torch.float16, torch.float16, True),
    ("layernorm", torch.bfloat16, None, True),
    ("layernorm", None, torch.float32, False),
    ("biased", torch.float16, None, True),
    ("biased", torch.bfloat16, torch.float32, False),
    ("biased", None, torch.float16, True),
    ("rmsnorm", torch.float16, torch.float32, False),
    ("rmsnorm", torch.bfloat16, torch.float16, True),
    ("rmsnorm", None, None, True),
]


@pytest.mark.numerics
@pytest.mark.parametrize("name, dtype, y_dtype, exact", CELLS)
def test_equals_float64(name, dtype, y_dtype, exact):
    count = 3 if exact and dtype else 2
    for shape, backend in product(SHAPES, ("triton", "torch")):
        leaves, norm, upstream = make_inputs(name, shape, y_dtype)
        got = run(leaves, norm, upstream, dtype, exact, backend)
        wanted = run_oracle(leaves, norm, upstream, count)
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            if backend == "torch" and i >= count:
                break  # gradients are torch's own
            # gradients by way of it
            rounded = a.dtype if i == 0 or (i, count) == (2, 3) else dtype or a.dtype
            # terms of size 1 in a parameter's gradient
            n = math.prod(shape[:-1]) if a.dim() == 1 else 0.01
            allowed = tolerance(rounded, max(shape), 4)
            assert_near(a, b, allowed, f"{shape}, {backend}, {i}", b.abs() + math.sqrt(n))


@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("C", [768, 1000, 2048, 8192])
def test_equals_float64_in_full_size_on_gpu(name, C):
    inputs = *make_inputs(name, (4, 1000, C), torch.float16), torch.float16, True
    first, again = run(*inputs), run(*inputs)
    for i, (a, b) in enumerate(zip(first, run_oracle(*inputs[:3], 3), strict=True)):
        assert_near(a, b, tolerance(torch.float16, C, 4), str(i))
    assert_equal(first, again)
