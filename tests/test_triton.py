"""kernels/triton_experts.py against `reference`: small shapes in the interpreter on a CPU, full
ones on a GPU.
"""

import math
import re
import sys
import tempfile
from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import test_kernels
import torch
from interpreter import like_gpu  # noqa: F401
from numerics import (
    DEVICE,
    assert_equal,
    assert_near,
    guarded_buffers,
    seeded,
    tolerance,
)
from test_kernels import CASES, FORMS, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from configure.schema import Model
from kernels import expert_mlp, torch_grouped
from model import GPT
from runtime.parallel import compile_blocks

pytest.importorskip("triton")


from kernels import triton_experts  # noqa: E402
from kernels.triton_schedule import Schedule  # noqa: E402

# many tiles, full and partial, even in small matrices
SMALL = triton_experts.Tile(32, 16, 16, 4, 2)
TWO_PARTS = SMALL._replace(cols=48)  # of kernels that can
# CASES with fewer tiles: an expert has a full one and a partial one, or a partial one alone
TILED = {
    "typical": (55, 16, 24, 3, 2),
    "one token": CASES["one token"],
    "no token": CASES["no token"],
    "one expert": CASES["one expert"],
    "every expert": (40, 8, 6, 3, 3),
    "idle": (40, 8, 6, 4, 2),
    "collapsed": (80, 8, 6, 7, 1),
    "zero gates": CASES["zero gates"],
}
FEW = (9, 5, 7, 3, 2)  # N, C, H, E, K: a few tiles of SMALL, each of which takes 20 ms
DTYPES = triton_experts.DTYPES
SIZES = {"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 4, "vocab_size": 40}
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter")
assert triton_experts.INTERPRETED or DEVICE == "cuda", "imported before conftest.py could set it"


@pytest.mark.parametrize(
    "H, dtype, fits",
    [(12, torch.float16, False), (16, torch.float16, True), (12, torch.float32, True)],
)
def test_descriptors_of_gated_experts_start_at_16_bytes(H, dtype, fits):
    """The second half of w_in starts at column H, of which a descriptor asks whole 16 bytes."""
    w_in = torch.zeros(2, 32, 2 * H, dtype=dtype)
    descriptors = triton_experts.make_up_descriptors(w_in, SMALL, 32, glu=True)
    assert bool(descriptors) == fits


@pytest.fixture
def small_tiles(monkeypatch):
    for table in triton_experts.TILES.values():
        for kernel in table:
            two = kernel in ("up_tma", "rows_ahead", "weight_grad")
            monkeypatch.setitem(table, kernel, TWO_PARTS if two else SMALL)
    monkeypatch.setattr(triton_experts, "ROWS", SMALL.rows)
    monkeypatch.setattr(triton_experts, "FLOAT32_TILE", SMALL)
    return SMALL


def run_backend(leaves, experts, d_out, backend="triton", **more):
    """[output, four gradients], in guarded buffers, of strided inputs, which are left alone."""
    inputs = [t.mT.contiguous().mT for t in (*leaves, experts, d_out)]
    before = [t.clone() for t in inputs]
    *leaves, experts, d_out = inputs
    with guarded_buffers():
        results = test_kernels.run_backend(leaves, experts, d_out, backend, **more)
    assert_equal(inputs, before)
    return results


assert_equals_reference = partial(test_kernels.assert_equals_reference, run=run_backend)


def assert_form_equals_reference(form, *sizes, case="", dtype=torch.float16):
    activation, *gated = FORMS[form]
    inputs = make_inputs(*sizes, case, dtype, "cpu", *gated)
    assert_equals_reference(*inputs, activation=activation)


@on_cpu
@pytest.mark.numerics
@pytest.mark.parametrize(
    "case, dtype, form",
    [(case, torch.float32, "gelu") for case in TILED]
    + [("typical", torch.float32, form) for form in FORMS if form != "gelu"]
    + [
        ("idle", torch.float32, "gated silu"),
        ("idle", torch.bfloat16, "gelu"),
        ("one token", torch.float16, "gelu"),
    ],
)
def test_equals_reference(case, dtype, form, small_tiles):
    assert_form_equals_reference(form, *TILED[case], case=case, dtype=dtype)


@on_cpu
@pytest.mark.numerics
@pytest.mark.parametrize(
    "capability, form",
    # here 9 and 10 have the same kernels and tiles
    [(8, "gelu"), (8, "gated silu"), (9, "gated silu"), (10, "gelu")],
)
def test_half_precision_equals_reference_on_every_architecture(
    capability, form, small_tiles, monkeypatch
):
    """Matrices whose tiles have two parts, the last ones partial, loaded by descriptors where there
    are any.
    """
    monkeypatch.setattr(triton_experts, "major", lambda device: capability)
    others = "rows_ahead_kernel" if capability == 8 else "rows_kernel"
    monkeypatch.setattr(triton_experts, others, None)
    assert_form_equals_reference(form, 45, 48, 48, 3, 2)


@on_cpu
@pytest.mark.numerics
@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_with_the_tiles_of_a_gpu(dtype, form):
    """Partial tiles, and two of them along H; those of float32 are smaller."""
    sizes = (72, 40, 70) if dtype == torch.float32 else (140, 70, 140)
    assert_form_equals_reference(form, *sizes, 2, 1, dtype=dtype)
    if dtype == torch.float16:  # which descriptors fit: an H of 64 makes whole steps of them
        assert_form_equals_reference(form, 140, 128, 192, 2, 1)


@on_cpu
@pytest.mark.parametrize(
    # 600 tokens are several programs' work; of 300 experts a program looks at 8 tokens at once
    "N, n_expert",
    [(1, 9), (57, 9), (600, 9), (20, 300)],
)
def test_rows_are_sorted_by_expert_and_by_token(N, n_expert):
    experts = make_inputs(N, 1, 1, n_expert, 3, "idle")[1]
    order, inverse, offsets, table = triton_experts.sort_rows(experts, n_expert, 16)
    flat = experts.flatten()
    assert_equal(order, flat.argsort(stable=True).int())
    assert_equal(order[inverse.long()], torch.arange(N * 3, dtype=torch.int32))
    assert_equal(offsets.diff(), flat.bincount(minlength=n_expert).int())
    tiles = []
    for expert, (first, end) in enumerate(pairwise(offsets.tolist())):
        for row in range(first, end, 16):
            tiles += expert, row, end
    unused = [0] * (len(table) - 1 - len(tiles))
    assert table.tolist() == [*tiles, *unused, len(tiles) // 3]
    assert inverse.dtype == table.dtype == torch.int32


@on_cpu
@pytest.mark.numerics
def test_more_than_2_to_the_31_elements(tmp_path, monkeypatch):
    """With a 32-bit offset, element 2^32 would be element 0."""

    def virtual(*shape, dtype=torch.float16, device="cpu"):
        """Zeros in a sparse file, which take space only where they are written to."""
        _, file = tempfile.mkstemp(dir=tmp_path)
        return torch.from_file(file, True, math.prod(shape), dtype=dtype).view(shape)

    def assert_same(actual, wanted):
        assert_near(actual, wanted, tolerance(actual.dtype, 64))

    # All numbers are positive: in a sum that cancels, relative errors have no bound.
    far, width = 2**26, 64
    wide = 2**15  # the fifth expert's matrix starts at 2^32
    rows = torch.rand(3, wide, generator=seeded()).half()
    near = rows[:, :width].contiguous()
    w = (torch.rand(1, width, width, generator=seeded(1)) / width).half()
    wanted = (near.float() @ w[0].float()).half()
    square = near.float().T @ near.float()
    monkeypatch.setattr(torch, "empty", virtual)
    tall, gates = virtual(far + 3, width), virtual(far + 3, 1)
    tall[far:], gates[far:] = near, 1
    order = virtual(far + 3, dtype=torch.int32)
    order[far:] = torch.arange(far, far + 3)
    table = torch.tensor([0, far, far + 3, 1], dtype=torch.int32)
    for capability in (8, 9):
        monkeypatch.setattr(triton_experts, "major", lambda device, major=capability: major)
        down = triton_experts.multiply_rows(tall, w, table, 64, False)
        up, gated = triton_experts.multiply_up(tall, w, width, gates, order, table, 64, False)
        results = torch.stack([down[far:], up[far:], gated[far:]])
        assert_same(results, torch.stack([wanted, wanted, torch.nn.functional.gelu(wanted)]))

    order[far:] = torch.arange(3)
    schedule = Schedule(order, order, torch.tensor([far, far + 3], dtype=torch.int32), table)
    assert_same(triton_experts.weight_grad(near, tall, schedule, 1, True, torch.float32)[0], square)
    ends = torch.tensor([far - 1, far + 2], dtype=torch.int32)
    assert_same(triton_experts.combine(tall, ends, 2)[0], near[2])  # and a row of zeros

    d_w = virtual(5, wide, wide, dtype=torch.float32)
    bounds = torch.tensor([0, 0, 0, 0, 0, 3], dtype=torch.int32)
    share = torch.tensor([4, 5, 0, 3], dtype=torch.int32)
    triton_experts.weight_grad_kernel[(1,)](
        rows, rows, order[far:], bounds, share, d_w, d_w, wide, wide, True, 1, 64, 64, 64
    )
    assert_same(d_w[4, :64, :64], square)


@on_cpu
@pytest.mark.parametrize(
    "checkpointing", [pytest.param(True, marks=pytest.mark.integration), False]
)
def test_model_compiles_into_two_graphs(monkeypatch, checkpointing):
    """The first block, whose input has no output to be added, and all others: depth does not slow
    compiling down.

    With checkpointing the backward pass is traced, too.
    """
    backend = "aot_eager" if checkpointing else "eager"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = GPT(Model(**SIZES, n_expert=2, top_k=1, expert_hidden=8, backend="triton"))
    idx = torch.randint(40, (1, 4))

    def run(model):
        loss = model(idx, idx).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    wanted = run(model)
    for block in model.blocks:
        block.checkpointing = checkpointing
    compile_blocks(model)
    got = run(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert_equal(got, wanted)


@on_cpu
def test_experts_of_torch_are_not_traced(monkeypatch):
    """Their products' sizes depend on the loads."""
    traced = []

    def note(x, *others):
        traced.append(torch.compiler.is_compiling())
        return x

    monkeypatch.setattr(torch_grouped, "expert_mlp", note)
    monkeypatch.setitem(kernels.BACKENDS, "torch", None)
    kernels.prepare_compile()
    leaves, experts, _ = make_inputs(*FEW)
    torch.compile(expert_mlp, backend="eager")(*leaves, experts, "torch")
    assert traced == [False]


@on_cpu
def test_gradients_of_weights_are_not_rounded_under_autocast(small_tiles):
    """Those of float32 weights are sums in float32: nearer to the true ones than any in bfloat16
    can be.
    """
    leaves, experts, d_out = make_inputs(*TILED["typical"])
    d_out = d_out.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out, _, *d_weights, _ = run_backend(leaves, experts, d_out)
    rounded = [t.bfloat16() for t in leaves[:3]]
    assert_equal(out, run_backend([*rounded, leaves[3]], experts, d_out)[0])
    for gradient in d_weights:
        assert gradient.dtype == torch.float32
        assert not gradient.equal(gradient.bfloat16().float())


class CheckFakes(TorchDispatchMode):
    """Compares each of our operators to what torch.compile is told of it, on the inputs it gets."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "nanokern":
            self.names.add(function.name().removeprefix("nanokern::"))
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(function, args, kwargs, test_utils=checks)
        return function(*args, **(kwargs or {}))


@on_cpu
@pytest.mark.parametrize(
    "dtype, update",
    [
        (torch.float16, {"router": "kern", "gated": True, "activation": "silu", "bias": True}),
        (torch.bfloat16, {"router": "softmax", "norm": "rmsnorm"}),
        (None, {"router": "kern"}),
    ],
)
def test_operators_are_as_their_fakes(dtype, update, small_tiles):
    """In both passes of a model, in autocast's dtype if one is given; without gradients, too."""
    sizes = SIZES | {"n_layer": 1, "n_expert": 3, "expert_hidden": 8}
    model = GPT(Model(**sizes, top_k=2, backend="triton", **update))
    idx = torch.randint(40, (2, 4))
    with CheckFakes() as checked:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(idx, idx).loss
            with torch.no_grad():
                assert torch.equal(model(idx, idx).loss, loss)
        loss.backward()
    both = {"experts", "route", "router_linear", "add_norm"}
    assert checked.names == {f"{name}{end}" for name in both for end in ("", "_backward")}


@on_cpu
def test_where_triton_cannot_run(monkeypatch):
    leaves, experts, _ = make_inputs(*CASES["one token"])
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def refuse(words, dtype=torch.float16):
        with pytest.raises(ValueError, match=words):
            kernels.choose_backend("triton", cpu, dtype)

    refuse("'triton' does not compute in torch.float64: use float16.*'auto'", torch.float64)
    monkeypatch.setattr(triton_experts, "INTERPRETED", False)
    refuse("'triton' does not run on cpu: use a CUDA device, or set TRITON_INTERPRET=1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    # without a driver, as here, no kernel can be built; the reason is another without a compiler
    unbuilt = "cannot build a kernel here .*: install a C compiler"
    for capability, words in (
        ((7, 5), "T4: use a GPU of compute capability 8.0"),
        ((8, 0), unbuilt),
    ):
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            assert re.search(words, kernels.find_triton_problem(cuda, torch.float16))
            assert kernels.choose_backend("auto", cuda, torch.float16) == "torch"
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(kernels.triton, "find_launch_problem", return_value=""),
    ):
        assert kernels.choose_backend("auto", cuda, torch.float16) == "triton"
    monkeypatch.setattr(kernels, "triton", None)
    monkeypatch.setitem(sys.modules, "kernels.triton_kernels", None)
    refuse("'triton' needs Triton")
    assert torch.equal(expert_mlp(*leaves, experts), expert_mlp(*leaves, experts, "torch"))


FULL = {  # N, C, H, E, K
    "flagship": (32768, 768, 384, 64, 8),
    "wide": (65536, 2048, 1024, 32, 4),
    "narrow": (8192, 768, 96, 256, 64),
    "many small": (16384, 1024, 256, 256, 8),
    "few rows": (8192, 768, 384, 256, 4),
    "odd": (8191, 1000, 200, 48, 5),
}


@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ["balanced", "skewed", "collapsed", "idle"])
@pytest.mark.parametrize("name", FULL)
def test_equals_reference_in_full_size_on_gpu(name, routing, dtype):
    """With weights of a model's scale."""
    _, C, H, *_ = FULL[name]
    (x, w_in, w_out, weights), *more = make_inputs(*FULL[name], routing, dtype, DEVICE)
    assert_equals_reference([x, w_in * C**-0.5, w_out * H**-0.5, weights], *more)
