"""kernels/cross_entropy.py: both backends against F.cross_entropy in float64, and peak memory.

Without a GPU the Triton kernel runs in the interpreter; test_triton.py tests that it compiles.
"""

from importlib.util import find_spec

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
from test_kernels import BytesMade

import kernels
from configure import Config
from kernels import cross_entropy, find_triton_problem
from kernels.cross_entropy import linear_cross_entropy
from runtime.memory import logits_bytes

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, *HALF)
SHAPES = {  # N, C, V; with `small_chunks` of 8 rows and blocks of 128 logits
    "typical": (12, 16, 257),
    "one row": (1, 5, 7),
    "one token to choose": (9, 4, 1),
    "two": (20, 3, 2),
    "one full block": (5, 8, 128),
    "full blocks": (8, 8, 256),
}
WAYS = [("torch", dtype) for dtype in DTYPES] + [
    ("triton", dtype) for dtype in DTYPES if dtype != torch.float64
]
WAYS += [("reference", torch.float32)]
backends = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.fixture(autouse=True)
def triton_there(request):
    """Where Triton is installed nothing is skipped: a kernel that cannot run, or be interpreted,
    fails.
    """
    if "triton" in request.node.name:
        pytest.importorskip("triton")


@pytest.fixture
def small_chunks(monkeypatch):
    """Of 8 rows, the last one of what is left over; Triton's programs take 128 logits at a time."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 1)
    monkeypatch.setattr(cross_entropy, "ROWS", 8)
    if find_spec("triton"):
        monkeypatch.setattr("kernels.triton_cross_entropy.BLOCK", 128)


def make_inputs(N, C, V, dtype=torch.float32):
    g = seeded(N + V)
    x, weight = torch.randn(N, C, generator=g), 0.5 * torch.randn(V, C, generator=g)
    weight *= torch.linspace(0.5, 1.5, V)[:, None]  # the largest logits come late
    if V < 10:
        x /= 4  # no probability is near 1, whose gradient p - 1 would cancel
    targets = torch.randint(V, (N,), generator=g)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), targets.to(DEVICE)


def run_backend(x, weight, targets, backend="auto", scale=1.0, autocast=None):
    """[loss, two gradients of scale · loss], computed in guarded buffers."""
    leaves = as_leaves(x, weight)
    with guarded_buffers(), torch.autocast(DEVICE, autocast, enabled=autocast is not None):
        loss = linear_cross_entropy(*leaves, targets, backend)[0]
    return differentiate([loss], leaves, [torch.tensor(scale)])


def exact(x, weight, targets):
    """[loss, two gradients] by torch's own operators in float64."""
    x, weight = leaves = as_leaves(x, weight, dtype=torch.float64)
    return differentiate([F.cross_entropy(x @ weight.T, targets)], leaves, [torch.ones(())])


def assert_exact(got, x, weight, targets, dtype, roundings=3.0):
    """Compare to float64. Roundings in `dtype`: logits, their gradient, the result.

    A loss can be the small difference of large logits, so its error is compared to the largest
    logit, and a gradient of two choices a small sum of large terms.
    """
    x, weight = x.to(dtype), weight.to(dtype)
    limit = tolerance(dtype, max(*x.shape, len(weight)), roundings)
    largest = (x.double() @ weight.double().T).abs().max()
    (loss, *gradients), (wanted, *wanted_gradients) = got, exact(x, weight, targets)
    assert_near(loss + largest, wanted + largest, limit, "loss")
    x, weight = x.double(), weight.double()
    d_logits = ((x @ weight.T).softmax(1) - F.one_hot(targets, len(weight))) / len(x)
    sizes = ((d_logits**2 @ weight**2).sqrt(), (d_logits.T**2 @ x**2).sqrt())
    for name, a, b, size in zip("xW", gradients, wanted_gradients, sizes, strict=True):
        assert_near(a, b, limit, name, size)


@pytest.mark.numerics
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend, dtype", WAYS)
def test_equals_float64(backend, dtype, shape, small_chunks):
    inputs = make_inputs(*SHAPES[shape], dtype)
    got = run_backend(*inputs, backend)
    assert [t.dtype for t in got] == [torch.promote_types(dtype, torch.float32), dtype, dtype]
    assert_exact(got, *inputs, dtype)
    if dtype in HALF:
        under = run_backend(*make_inputs(*SHAPES[shape]), backend, autocast=dtype)
        assert {t.dtype for t in under} == {torch.float32}
        assert_exact(under, *inputs, dtype)


@pytest.mark.numerics
@backends
def test_a_gradient_beyond_the_largest_float16_under_autocast(backend, small_chunks):
    """One token is the target of every row, so its weight's gradient is a sum that float16 cannot
    hold.
    """
    x, weight, targets = make_inputs(70, 8, 20)
    x, weight = (4 + x).half().float(), weight.half().float()
    targets[:] = 3
    assert 256 * 70 * 4 > torch.finfo(torch.float16).max
    got = run_backend(x, weight, targets, backend, autocast=torch.float16)
    assert_exact(got, x, weight, targets, torch.float16)


@pytest.mark.numerics
@backends
def test_large_and_small_logits(backend):
    """±1e4, whole numbers so that nothing is rounded before the softmax, and rows where two are on
    top.
    """
    x, weight, targets = make_inputs(24, 8, 300)
    x, weight = (100 * x).round(), (100 * weight).round()
    weight[7], targets[::3] = weight[5], 7
    x[::2], x[1::4] = (x[::2] / 10).round(), 20 * weight[5].sign()
    logits = x @ weight.T
    assert logits.max() > 1e4 and logits.min() < -1e4
    assert_exact(run_backend(x, weight, targets, backend), x, weight, targets, torch.float32)


@pytest.mark.numerics
@backends
def test_small_probabilities_in_float16(backend):
    """At the start of training each is 2e-5, below the least normal number of float16; under a
    small loss scale or a
    large one."""
    x, weight, targets = make_inputs(8, 8, 50304)
    # positive: the sum over rows does not cancel
    x, weight = x.abs().half().float(), (0.05 * weight).half().float()
    wanted = exact(x, weight, targets)[2]
    wanted[targets] = 0  # others would drown
    # their errors average to 0.1 ε, of subnormal numbers 0.37 ε
    limit = tolerance(torch.float16, 8, roundings=0.25)
    for scale in (2.0**-10, 1.0, 2.0**20):
        loss, *gradients = run_backend(x, weight, targets, backend, scale, torch.float16)
        gradients = [t / scale for t in gradients]
        assert_exact([loss, *gradients], x, weight, targets, torch.float16)
        assert_near(gradients[1].index_fill(0, targets, 0), wanted, limit, "W, others")


@backends
def test_without_gradients_none_are_computed(backend, monkeypatch):
    x, weight, targets = make_inputs(5, 16, 257)
    wanted = run_backend(x, weight, targets, backend)[0]
    monkeypatch.setattr(cross_entropy, "add_product", lambda *args: pytest.fail("a gradient"))
    for mode, leaf in (
        (torch.enable_grad, weight),
        (torch.no_grad, weight.clone().requires_grad_()),
    ):
        with mode():
            loss = linear_cross_entropy(x, leaf, targets, backend)[0]
        assert_equal(loss, wanted)
        assert not loss.requires_grad


def test_backward_twice():
    x, weight, targets = make_inputs(30, 8, 20)
    leaves = as_leaves(x, weight)
    loss = linear_cross_entropy(*leaves, targets)[0]
    first, second = (torch.autograd.grad(s * loss, leaves, retain_graph=True) for s in (2, 1))
    assert_equal(first, tuple(2 * t for t in second))
    d_x = torch.autograd.grad(loss, leaves[0], create_graph=True)[0]
    with pytest.raises(AssertionError, match="no second derivatives"):
        d_x.sum().backward()


def test_targets_outside_the_vocabulary_and_an_unknown_backend():
    x, weight, targets = make_inputs(6, 8, 20)
    with pytest.raises(ValueError, match="'fast' is not one of auto, reference, torch, triton"):
        linear_cross_entropy(x, weight, targets, "fast")
    for wrong in (20, -1, -100):
        targets[4] = wrong
        if not find_triton_problem(x.device, x.dtype):
            logits, losses = x @ weight.T, x.new_empty(6)
            softmax = kernels.triton.triton_cross_entropy.softmax_cross_entropy
            softmax(logits, targets, losses, 1, True)
            assert losses.isnan().nonzero().tolist() == [[4]]
        if DEVICE == "cpu":
            says = f"index {wrong} is out of bounds for dimension 1 with size 20"
            with pytest.raises(RuntimeError, match=says):
                linear_cross_entropy(x, weight, targets)


@pytest.mark.parametrize("N", [200, 1000])
@pytest.mark.parametrize("grad", [True, False])
def test_memory_is_that_of_a_chunk(grad, N, monkeypatch):
    """Of 128 rows, whose logits take more than x, weight or their gradients; all chunks share two
    buffers.
    """
    V, C = 300, 8
    chunk = 128 * V * 4
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk)
    x, weight, targets = make_inputs(N, C, V)
    with BytesMade() as made:
        cross_entropy.forward(x, weight, targets, torch.float32, grad, False)
    assert made.largest == chunk
    model = Config().model.model_copy(update={"vocab_size": V, "n_embd": C})
    # of plain torch operators; indices and results, some numbers a row
    log_p, losses = chunk, 6 * 4 * N
    assert made.total <= logits_bytes(model, N, "float32") + log_p + losses


@pytest.mark.numerics
@pytest.mark.gpu
@backends
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("N, C, V", [(8192, 768, 50304), (4096, 768, 50257), (8192, 128, 257)])
def test_full_size_on_a_gpu(N, C, V, dtype, backend, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 2**27)
    x, weight, targets = make_inputs(N, C, V)
    weight *= 0.1
    autocast = dtype if dtype in HALF else None
    first, again = (run_backend(x, weight, targets, backend, autocast=autocast) for _ in range(2))
    assert_exact(first, x, weight, targets, dtype)
    assert_equal(first, again)
