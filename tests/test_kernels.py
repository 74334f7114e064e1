"""kernels/: the torch backend against `reference`.

test_combinations.py compares both to formulas of its own.
"""

import math

import pytest
import torch
from conftest import fuzz
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from
from numerics import DEVICE, as_leaves, assert_equal, assert_near, differentiate, seeded, tolerance
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import expert_mlp, torch_grouped

NAMES = ("out", "x", "w_in", "w_out", "weights")
# activation and whether the experts have a gate: GELU alone is in all tests, the others in those
# that compare values
FORMS = {
    "gelu": ("gelu",),
    "silu": ("silu",),
    "gated gelu": ("gelu", True),
    "gated silu": ("silu", True),
}
# N, C, H, E, K and what is special
CASES = {
    "typical": (70, 16, 24, 8, 2),
    "more rows than blocks of 128": (300, 8, 12, 3, 2),
    "one token": (1, 5, 7, 4, 2),
    "no token": (0, 5, 7, 4, 2),
    "one expert": (9, 5, 7, 1, 1),
    "every expert": (40, 8, 6, 5, 5),
    "idle": (50, 8, 6, 6, 2),
    "collapsed": (200, 8, 6, 7, 1),
    "zero gates": (33, 8, 6, 4, 2),
}


def make_inputs(N, C, H, E, K, case="", dtype=torch.float32, device="cpu", gated=False):
    """(x, w_in, w_out, weights), experts and the gradient of the output.

    All are positive where few numbers come out: in a sum that cancels, relative errors have no
    bound.
    """
    g = seeded(N + E, device)
    shapes = (N, C), (E, C, (1 + gated) * H), (E, H, C), (N, K), (N, C)
    tensors = [torch.randn(shape, generator=g, device=device) for shape in shapes]
    if case in ("one token", "one expert", "any shape"):
        tensors = [t.abs() for t in tensors]
    *leaves, weights, d_out = tensors
    leaves = [t.to(dtype) for t in leaves]
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    scores = torch.rand(N, E, generator=g, device=device)
    if case == "skewed":
        scores /= torch.arange(1, E + 1, device=device) ** 0.5
    if case == "collapsed":
        scores[:, E // 2 : E // 2 + K] += 1
    if case == "idle":
        scores[:, K::2] -= 1
    if case == "zero gates":
        weights[::2] = 0
    return [*leaves, weights], scores.topk(K).indices, d_out.to(dtype)


def run_backend(leaves, experts, d_out, backend="torch", activation="gelu"):
    """[output, four gradients]."""
    leaves = as_leaves(*leaves)
    out = expert_mlp(*leaves, experts, backend, activation)
    return [t.as_subclass(torch.Tensor) for t in differentiate([out], leaves, [d_out])]


def silu_error(dtype, activation="gelu"):
    """silu′(h) = σ(1 + h(1 − σ)), in torch and in the kernels, errs by h ε/2 where σ is near 1; h
    reaches 8 here.
    """
    return 4 * torch.finfo(dtype).eps if activation == "silu" else 0.0


def assert_equals_reference(leaves, experts, d_out, run=run_backend, **more):
    """Compare `run`, a backend, to `reference` in float64 on the same inputs.

    Gradients of closed gates are not 0: they can open again.
    """
    dtype, wide = leaves[0].dtype, [t.double() for t in leaves]
    wanted = run_backend(
        wide, experts.as_subclass(torch.Tensor), d_out.double(), "reference", **more
    )
    longest = max(*leaves[0].shape, *leaves[1].shape)
    # of products, gelu, gated gelu, the sum over experts
    limit = tolerance(dtype, longest, roundings=4)
    limit += silu_error(torch.promote_types(dtype, torch.float32), **more)
    for name, a, b in zip(NAMES, run(leaves, experts, d_out, **more), wanted, strict=True):
        assert a.dtype == (leaves[3].dtype if name == "weights" else dtype), name
        assert_near(a, b, limit, name)
        assert (a[b == 0] == 0).all(), name  # exactly: of idle experts, and of closed gates
        is_rounded = a.dtype != dtype and a.any() and a.equal(a.to(dtype).float())
        assert not is_rounded, "gradients of gates, in float32, were once in half precision"


class DeviceName(str):
    type = "cuda"


class AsOnGPU(torch.Tensor):
    """A CPU tensor whose device's type reads "cuda", so that the CPU takes the GPU's path.

    It refuses operations that would make the host wait for a GPU (except boolean masks).
    """

    WAITS = {
        "item",
        "tolist",
        "cpu",
        "numpy",
        "nonzero",
        "masked_select",
        "unique",
        "bincount",
        "repeat_interleave",
    }
    WAITS |= {"__bool__", "__int__", "__float__", "__index__"}
    device = property(lambda self: DeviceName("cpu"))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func.__name__ not in cls.WAITS, f"{func.__name__} waits for the GPU"
        return super().__torch_function__(func, types, args, kwargs or {})


LAYOUTS = ["narrow", "parts", "an expert per part", "blocks of 128", "blocks of 4"]


@pytest.fixture(params=LAYOUTS)
def on_layout(request, monkeypatch):
    """Make the torch backend use one of its ways; returns a function that disguises `experts` for
    the GPU's.
    """
    if "blocks" in request.param:
        monkeypatch.setattr(torch_grouped, "BLOCK", int(request.param.split()[-1]))
        return lambda experts: experts.as_subclass(AsOnGPU)
    for limit in ("NARROW", "FP32_WIDTH"):
        monkeypatch.setattr(torch_grouped, limit, math.inf if request.param == "narrow" else 0)
    if "expert" in request.param:
        monkeypatch.setattr(torch_grouped, "PART_BYTES", 0)
    return lambda experts: experts


FEW = ("typical", "idle", "collapsed", "zero gates", "no token")


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case, form",
    [(case, form) for form in FORMS for case in CASES if form == "gelu" or case in FEW],
)
def test_torch_equals_reference(case, form, dtype, on_layout):
    activation, *gated = FORMS[form]
    leaves, experts, d_out = make_inputs(*CASES[case], case, dtype, "cpu", *gated)
    assert_equals_reference(leaves, on_layout(experts), d_out, activation=activation)


def make_long_sums():
    """Blocks of 4 rows would add to nothing on a GPU once their sum, in bfloat16, is 256 times as
    large.
    """
    return make_inputs(3000, 4, 4, 1, 1, "any shape", torch.bfloat16)


def make_many_experts():
    """Of 512 equal terms in bfloat16 a running sum would stop growing at the 256th: output and
    gradient of x.
    """
    (x, w_in, w_out, _), _, d_out = make_inputs(3, 4, 4, 512, 512, "any shape", torch.bfloat16)
    w_in, w_out = (w[:1].expand(512, -1, -1).contiguous() for w in (w_in, w_out))
    return [x, w_in, w_out, torch.ones(3, 512)], torch.arange(512).repeat(3, 1), d_out


def make_gates_beyond_the_largest_float16():
    (x, w_in, w_out, weights), *more = make_inputs(70, 16, 24, 8, 2, dtype=torch.float16)
    return [x / 100, w_in, w_out / 1000, weights.sign() * 7e4], *more


@pytest.mark.numerics
@pytest.mark.parametrize(
    "make", [make_long_sums, make_many_experts, make_gates_beyond_the_largest_float16]
)
def test_what_half_precision_could_not_hold(make, on_layout, monkeypatch):
    add = torch.Tensor.index_add_

    def index_add_(total, *args):  # a CPU's sums in bfloat16 are wider inside
        assert total.dtype == torch.float32
        return add(total, *args)

    monkeypatch.setattr(torch.Tensor, "index_add_", index_add_)
    leaves, experts, d_out = make()
    assert_equals_reference(leaves, on_layout(experts), d_out)


def test_gates_are_not_rounded_to_bfloat16(on_layout):
    """177 / 128 is a number in bfloat16, and the other gate is nearest to it."""
    leaves, experts, _ = make_inputs(*CASES["typical"])
    x, w_in, w_out, gates = (tensor.detach().bfloat16() for tensor in leaves)
    less, more = (
        expert_mlp(x, w_in, w_out, torch.full(gates.shape, gate), on_layout(experts), "torch")
        for gate in (177 / 128, 177 / 128 + 0.0035)
    )
    less, more = less.double(), more.double()
    assert (less * more).sum() / less.square().sum() == pytest.approx(1.0025, abs=1e-3)


def test_torch_repeats_bit_for_bit_and_leaves_its_inputs_alone(on_layout):
    """Also in a backward pass under autocast of a forward pass before it."""
    leaves, experts, d_out = make_inputs(*CASES["typical"])
    before = [t.clone() for t in (*leaves, experts, d_out)]
    first = run_backend(leaves, on_layout(experts), d_out)
    leaves = as_leaves(*leaves)
    out = expert_mlp(*leaves, on_layout(experts), "torch")
    with torch.autocast("cpu", torch.bfloat16):
        again = [out, *torch.autograd.grad(out, leaves, d_out)]
    assert_equal(first, [t.as_subclass(torch.Tensor) for t in again])
    assert_equal(before, [*leaves, experts, d_out])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_is_not_finite_reaches_no_expert_but_its_own(dtype, on_layout):
    """Slots without a row must not read another token's values: NaN times a gate of 0 is NaN."""
    leaves, experts, d_out = make_inputs(*CASES["typical"], dtype=dtype)
    ends = [0, -1]  # the last row of its experts is next to the slots without one
    leaves[0][ends] = d_out[ends] = torch.nan
    results = run_backend(leaves, on_layout(experts), d_out)
    out, d_x, d_w_in, d_w_out, d_weights = (t.isnan().flatten(1) for t in results)
    assert not torch.cat([out, d_x, d_weights], 1)[1:-1].any()
    reached = torch.zeros(8, dtype=torch.bool).index_fill(0, experts[ends].flatten(), True)
    assert not reached.all() and d_w_in.any(1).equal(reached) and d_w_out.any(1).equal(reached)


def find_storages(values):
    return [value.untyped_storage() for value in values if torch.is_tensor(value)]


class BytesMade(TorchDispatchMode):
    """Counts the bytes of all tensors made under it; views and `out=` make none."""

    total = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [storage.data_ptr() for storage in find_storages([*args, *kwargs.values()])]
        for storage in find_storages(out if isinstance(out, tuple | list) else [out]):
            if storage.data_ptr() not in given:
                self.total += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        return out


@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_torch_equals_reference_on_gpu(case, dtype):
    assert_equals_reference(*make_inputs(*CASES[case], case, dtype, DEVICE))


def test_memory_stays_bounded_when_all_tokens_choose_the_same_experts():
    """A step allocates then at most a quarter more than under even loads; padding every expert
    would take E/K = 16.
    """
    N, C, H, E, K = 1024, 16, 24, 64, 4
    leaves, _, d_out = make_inputs(N, C, H, E, K)
    even = (torch.arange(N * K).view(N, K) * 7) % E
    made = []
    for experts in (even, torch.arange(K).repeat(N, 1)):
        with BytesMade() as counted:
            run_backend(leaves, experts, d_out)
        made.append((counted.total, counted.largest))
    assert all(same <= 1.25 * usual for usual, same in zip(*made, strict=True))


def test_few_tokens_copy_no_weights():
    leaves, experts, _ = make_inputs(2, 128, 64, 64, 8)
    with BytesMade() as counted:
        expert_mlp(*leaves, experts, "torch")
    assert counted.total < 2 * leaves[1][0].nbytes


@fuzz
@given(
    sizes=lists(integers(0, 29), min_size=1, max_size=24),
    most=sampled_from([8, 40, 10**6]),
    together=integers(1, 5),
)
def test_parts_are_within_their_bounds(sizes, most, together):
    """A part has one expert, or few in few slots, of which few are padding; idle ones are one."""
    sizes.sort(reverse=True)
    ranges = torch_grouped.group_experts(sizes, most, together)
    parts = [sizes[first:end] for first, end in ranges]
    assert [size for part in parts for size in part] == sizes
    assert sum(part[0] == 0 for part in parts) <= 1
    for part in parts:
        n_slot = len(part) * part[0]
        is_bounded = len(part) <= together and n_slot <= most and n_slot <= 17 / 16 * sum(part)
        assert len(part) == 1 or part[0] == 0 or is_bounded
