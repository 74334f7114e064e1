"""kernels/: every backend against `reference`, and `reference` against the formula by hand."""

import math

import numpy as np
import pytest
import torch
from numerics import DEVICE, assert_near, seeded, tolerance
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
    "idle expert": (50, 8, 6, 6, 2),
    "all on one expert": (200, 8, 6, 7, 1),
    "zero gates": (33, 8, 6, 4, 2),
}


def make_inputs(N, C, H, E, K, case="", dtype=torch.float32, device="cpu", gated=False):
    """(x, w_in, w_out, weights), experts and the gradient of the output.

    All are positive where few numbers come out: in a sum that cancels, relative errors have no
    bound.
    """
    g = seeded(N + E)
    shapes = (N, C), (E, C, (1 + gated) * H), (E, H, C), (N, C), (N, K)
    x, w_in, w_out, d_out, weights = (torch.randn(shape, generator=g) for shape in shapes)
    if case in ("one token", "one expert", "any shape"):
        x, w_in, w_out, d_out, weights = (t.abs() for t in (x, w_in, w_out, d_out, weights))
    scores = torch.rand(N, E, generator=g)
    if case == "idle expert":
        scores[:, 2] = -1
    if case == "all on one expert":
        scores[:, 4] = 2
    if case == "zero gates":
        weights[::2] = 0
    experts = scores.topk(K).indices.to(device)
    gate_dtype = torch.promote_types(dtype, torch.float32)
    leaves = [t.to(device, dtype) for t in (x, w_in, w_out)] + [weights.to(device, gate_dtype)]
    return leaves, experts, d_out.to(device, dtype)


def run_backend(leaves, experts, d_out, backend="torch", activation="gelu"):
    """[output, four gradients]."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = expert_mlp(*leaves, experts, backend, activation)
    return [
        t.detach().as_subclass(torch.Tensor)
        for t in (out, *torch.autograd.grad(out, leaves, d_out))
    ]


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
    if "blocks" not in request.param:
        for limit in ("NARROW", "FP32_WIDTH"):
            monkeypatch.setattr(torch_grouped, limit, math.inf if request.param == "narrow" else 0)
        monkeypatch.setattr(
            torch_grouped,
            "PART_BYTES",
            0 if "expert" in request.param else torch_grouped.PART_BYTES,
        )
        return lambda experts: experts
    monkeypatch.setattr(torch_grouped, "BLOCK", int(request.param.split()[-1]))
    return lambda experts: experts.as_subclass(AsOnGPU)


FEW = ("typical", "idle expert", "all on one expert", "zero gates", "no token")


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


@pytest.mark.numerics
def test_long_sums_in_half_precision(on_layout, monkeypatch):
    """Blocks of 4 rows would add to nothing on a GPU once their sum, in bfloat16, is 256 times as
    large.
    """
    add = torch.Tensor.index_add_

    def index_add_(total, *args):  # a CPU's sums in bfloat16 are wider inside
        assert total.dtype == torch.float32
        return add(total, *args)

    monkeypatch.setattr(torch.Tensor, "index_add_", index_add_)
    leaves, experts, d_out = make_inputs(3000, 4, 4, 1, 1, "any shape", torch.bfloat16)
    assert_equals_reference(leaves, on_layout(experts), d_out)


@pytest.mark.numerics
def test_sums_over_many_experts_stay_in_float32(on_layout):
    """Of 512 equal terms in bfloat16 a running sum would stop growing at the 256th: output and
    gradient of x.
    """
    N, C, H, E = 3, 4, 4, 512
    leaves, _, d_out = make_inputs(N, C, H, E, E, "any shape", torch.bfloat16)
    leaves[1], leaves[2] = (w[:1].abs().expand(E, -1, -1).contiguous() for w in leaves[1:3])
    leaves[0], leaves[3], d_out = leaves[0].abs(), torch.ones(N, E), d_out.abs()
    assert_equals_reference(leaves, on_layout(torch.arange(E).expand(N, E).contiguous()), d_out)


def test_gates_and_their_gradients_are_not_rounded_to_half_precision(on_layout):
    """These gates would be rounded to 166/128, and all results be 0.3% too small."""
    leaves, experts, d_out = make_inputs(70, 16, 24, 8, 2, dtype=torch.bfloat16)
    leaves[3].fill_((166 + 0.45) / 128)
    wanted = run_backend([t.double() for t in leaves], experts, d_out.double(), "reference")
    *results, d_weights = run_backend(leaves, on_layout(experts), d_out)
    for name, a, b in zip(NAMES, results, wanted, strict=False):
        assert (a.double() * b).sum() / (b * b).sum() == pytest.approx(1, abs=1e-3), name
    assert d_weights.dtype == torch.float32 and not torch.equal(
        d_weights, d_weights.bfloat16().float()
    )


@pytest.mark.numerics
def test_gates_beyond_the_largest_float16(on_layout):
    leaves, experts, d_out = make_inputs(70, 16, 24, 8, 2, dtype=torch.float16)
    leaves = [leaves[0] / 100, leaves[1], leaves[2] / 1000, leaves[3].sign() * 7e4]
    assert_equals_reference(leaves, on_layout(experts), d_out)


def test_torch_repeats_bit_for_bit_and_leaves_its_inputs_alone(on_layout):
    leaves, experts, d_out = make_inputs(*CASES["typical"])
    before = [t.clone() for t in (*leaves, experts, d_out)]
    first, again = (run_backend(leaves, on_layout(experts), d_out) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (*leaves, experts, d_out), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_is_not_finite_reaches_no_expert_but_its_own(dtype, on_layout):
    """Slots without a row must not read another token's values: NaN times a gate of 0 is NaN."""
    leaves, experts, d_out = make_inputs(*CASES["typical"], dtype=dtype)
    ends = [0, -1]  # the last row of its experts is next to the slots without one
    leaves[0][ends] = d_out[ends] = torch.nan
    out, d_x, d_w_in, d_w_out, d_weights = run_backend(leaves, on_layout(experts), d_out)
    spared = torch.ones(8, dtype=torch.bool).index_fill(0, experts[ends].flatten(), False)
    assert spared.any() and all(t[1:-1].isfinite().all() for t in (out, d_x, d_weights))
    assert all(
        t[spared].isfinite().all() and t[~spared].isnan().any((1, 2)).all()
        for t in (d_w_in, d_w_out)
    )


def run_formula(leaves, experts, d_out, activation="gelu"):
    """[output, four gradients] of all of a token's experts at once."""
    x, w_in, w_out, weights = leaves = [t.detach().requires_grad_() for t in leaves]
    H = w_out.shape[1]
    hidden = torch.einsum("nc,nkcp->nkp", x, w_in[experts])
    a, b = hidden[..., :H], hidden[..., H:] if w_in.shape[2] > H else 1.0
    act = a * (torch.special.ndtr(a) if activation == "gelu" else 1 / (1 + torch.exp(-a))) * b
    out = torch.einsum("nk,nkh,nkhc->nc", weights, act, w_out[experts])
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.numerics
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["typical", "idle expert", "every expert"])
def test_reference_equals_the_formula(case, form):
    activation, *gated = FORMS[form]
    inputs = make_inputs(*CASES[case], case, torch.float64, "cpu", *gated)
    assert_equals_reference(*inputs, run_formula, activation=activation)


class BytesMade(TorchDispatchMode):
    """Counts the bytes of all tensors made under it; views and `out=` make none."""

    total = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [
            t.untyped_storage().data_ptr() for t in (*args, *kwargs.values()) if torch.is_tensor(t)
        ]
        for t in out if isinstance(out, tuple | list) else [out]:
            if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in given:
                self.total += t.untyped_storage().nbytes()
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_autocast(backend):
    """It equals inputs rounded to bfloat16, but for float32 gradients of float32 parameters."""
    leaves, experts, d_out = make_inputs(*CASES["typical"])
    with torch.autocast("cpu", torch.bfloat16):
        under = run_backend(leaves, experts, d_out.bfloat16(), backend)
    rounded = [t.bfloat16() for t in leaves[:3]]
    cast = run_backend(rounded + leaves[3:], experts, d_out.bfloat16(), backend)
    assert [t.dtype for t in under] == [torch.bfloat16, *[torch.float32] * 4]
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(under, cast, strict=True))


def test_a_backward_pass_under_autocast_of_a_forward_pass_before_it(on_layout):
    leaves, experts, d_out = make_inputs(*CASES["typical"])
    leaves = [t.requires_grad_() for t in leaves]
    out = expert_mlp(*leaves, on_layout(experts), "torch")
    usual = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        under = torch.autograd.grad(out, leaves, d_out)
    assert all(torch.equal(a, b) for a, b in zip(under, usual, strict=True))


def test_backends_by_name():
    leaves, experts, d_out = make_inputs(*CASES["typical"])
    assert torch.equal(expert_mlp(*leaves, experts), expert_mlp(*leaves, experts, "torch"))
    with pytest.raises(ValueError, match="backend 'tritn' is not one of auto, reference, torch"):
        expert_mlp(*leaves, experts, "tritn")


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
    for experts in (even, torch.arange(K).expand(N, K).contiguous()):
        with BytesMade() as counted:
            run_backend(leaves, experts, d_out)
        made.append((counted.total, counted.largest))
    assert all(same <= 1.25 * usual for usual, same in zip(*made, strict=True))


def test_few_tokens_copy_no_weights():
    leaves, experts, _ = make_inputs(2, 128, 64, 64, 8)
    with BytesMade() as counted:
        expert_mlp(*leaves, experts, "torch")
    assert counted.total < 2 * leaves[1][0].nbytes


@pytest.mark.parametrize("most", [8, 40, 10**6])
def test_parts_are_within_their_bounds(most):
    """Of random loads: a part has one expert, or few in few slots, of which few are padding."""
    for number in range(200):
        random = np.random.default_rng(number)
        sizes = sorted(random.integers(0, 30, random.integers(1, 24)).tolist(), reverse=True)
        together = int(random.integers(1, 6))
        ranges = torch_grouped.group_experts(sizes, most, together)
        assert [first for first, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == len(sizes)
        for first, end in ranges:
            part = sizes[first:end]
            n_slot = len(part) * part[0]
            is_bounded = len(part) <= together and n_slot <= most and n_slot <= 17 / 16 * sum(part)
            assert len(part) == 1 or part[0] == 0 or is_bounded
