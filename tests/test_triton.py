"""kernels/triton_experts.py against `reference`: small shapes in the interpreter on a CPU, full
ones on a GPU.
"""

import sys
from functools import partial
from unittest import mock

import pytest
import test_kernels
import torch
from interpreter import like_gpu  # noqa: F401
from numerics import DEVICE, assert_near, guarded_buffers, seeded, tolerance
from test_kernels import CASES, FORMS, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from configure.schema import Model
from kernels import expert_mlp, torch_grouped
from model import GPT
from runtime.parallel import compile_blocks

pytest.importorskip("triton")


from kernels import triton_experts  # noqa: E402

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
    "idle expert": (40, 8, 6, 4, 2),
    "all on one expert": (80, 8, 6, 7, 1),
    "zero gates": CASES["zero gates"],
}
FEW = (9, 5, 7, 3, 2)  # N, C, H, E, K: a few tiles of SMALL, each of which takes 20 ms
DTYPES = triton_experts.DTYPES
SIZES = {"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 4, "vocab_size": 40}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
assert triton_experts.INTERPRETED or torch.cuda.is_available(), (
    "kernels were imported before conftest.py could set it"
)


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
    """[output, four gradients], computed in guarded buffers."""
    with guarded_buffers():
        return test_kernels.run_backend(leaves, experts, d_out, backend, **more)


assert_equals_reference = partial(test_kernels.assert_equals_reference, run=run_backend)


@on_cpu
@pytest.mark.numerics
@pytest.mark.parametrize(
    "case, dtype, form",
    [(case, torch.float32, "gelu") for case in TILED]
    + [("typical", torch.float32, form) for form in FORMS if form != "gelu"]
    + [
        ("idle expert", torch.float32, "gated silu"),
        ("idle expert", torch.bfloat16, "gelu"),
        ("one token", torch.float16, "gelu"),
    ],
)
def test_equals_reference(case, dtype, form, small_tiles):
    activation, *gated = FORMS[form]
    assert_equals_reference(
        *make_inputs(*TILED[case], case, dtype, "cpu", *gated), activation=activation
    )


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels launched so far."""
    names, launch = set(), triton_experts.rows_kernel.__class__.__getitem__

    def record(kernel, grid):
        names.add(kernel.fn.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(triton_experts.rows_kernel.__class__, "__getitem__", record)
    return names


@on_cpu
@pytest.mark.numerics
@pytest.mark.parametrize(
    "capability, form",
    # here 9 and 10 have the same kernels and tiles
    [(8, "gelu"), (8, "gated silu"), (9, "gated silu"), (10, "gelu")],
)
def test_half_precision_equals_reference_on_every_architecture(
    capability, form, small_tiles, launched, monkeypatch
):
    """Matrices whose tiles have two parts, the last ones partial, loaded by descriptors where there
    are any.
    """
    activation, *gated = FORMS[form]
    monkeypatch.setattr(triton_experts, "major", lambda device: capability)
    inputs = make_inputs(45, 48, 48, 3, 2, "", torch.float16, "cpu", *gated)
    assert_equals_reference(*inputs, activation=activation)
    assert launched >= {"rows_kernel" if capability == 8 else "rows_ahead_kernel"}


@on_cpu
@pytest.mark.numerics
@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_with_the_tiles_of_a_gpu(dtype, form):
    """Partial tiles, and two of them along H; those of float32 are smaller."""
    activation, *gated = FORMS[form]
    shape = (72, 40, 70) if dtype == torch.float32 else (140, 70, 140)
    assert_equals_reference(
        *make_inputs(*shape, 2, 1, "", dtype, "cpu", *gated), activation=activation
    )
    if dtype == torch.float16:  # which descriptors fit: an H of 64 makes whole steps of them
        assert_equals_reference(
            *make_inputs(140, 128, 192, 2, 1, "", dtype, "cpu", *gated), activation=activation
        )


@on_cpu
@pytest.mark.parametrize(
    # 600 tokens are several programs' work; of 300 experts a program looks at 8 tokens at once
    "N, n_expert",
    [(1, 9), (57, 9), (600, 9), (20, 300)],
)
def test_rows_are_sorted_by_expert_and_by_token(N, n_expert):
    experts = make_inputs(N, 1, 1, n_expert, 3, "idle expert")[1]
    order, inverse, offsets, table = triton_experts.sort_rows(experts, n_expert, 16)
    assert torch.equal(order.long(), experts.flatten().argsort(stable=True))
    assert torch.equal(order[inverse.long()], torch.arange(N * 3, dtype=torch.int32))
    assert torch.equal(offsets.diff().long(), experts.flatten().bincount(minlength=n_expert))
    rows = enumerate(offsets.unfold(0, 2, 1).tolist())
    tiles = [[e, row, end] for e, (first, end) in rows for row in range(first, end, 16)]
    *listed, number = table.split([3] * (len(table) // 3) + [1])
    unused = [[0, 0, 0]] * (len(listed) - len(tiles))
    assert number == len(tiles) and [tile.tolist() for tile in listed] == tiles + unused
    assert {t.dtype for t in (order, inverse, offsets, table)} == {torch.int32}


@on_cpu
def test_inputs_of_any_strides_are_left_alone(small_tiles):
    leaves, experts, d_out = make_inputs(*FEW)
    wanted = run_backend(leaves, experts, d_out)
    strided = [t.mT.contiguous().mT for t in leaves]
    assert not any(t.is_contiguous() for t in strided)
    before = [t.clone() for t in (*strided, experts, d_out)]
    got = run_backend(strided, experts.mT.contiguous().mT, d_out.mT.contiguous().mT)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (*strided, experts, d_out), strict=True))
    out = expert_mlp(*[t.requires_grad_() for t in leaves], experts, "triton")
    out.sum().backward()  # whose gradient has strides of 0
    assert torch.equal(leaves[0].grad, run_backend(leaves, experts, torch.ones_like(d_out))[1])


@on_cpu
@pytest.mark.numerics
def test_more_than_2_to_the_31_elements(tmp_path):
    """With a 32-bit offset, element 2^32 would be element 0."""

    def virtual(*shape, dtype=torch.float16):
        """Zeros in a sparse file, which take space only where they are written to."""
        file = tmp_path / str(len(list(tmp_path.iterdir())))
        return torch.from_file(
            str(file), shared=True, size=torch.Size(shape).numel(), dtype=dtype
        ).view(shape)

    def assert_same(actual, wanted):
        assert_near(actual, wanted, tolerance(actual.dtype, 64))

    # All numbers are positive: in a sum that cancels, relative errors have no bound.
    far, width, some = 2**26, 64, seeded()
    near = torch.rand(3, width, generator=some).half()
    tall, out, gated = (virtual(far + 3, width) for _ in range(3))
    tall[far:] = near
    w = (torch.rand(1, width, width, generator=some) / width).half()
    wanted = (near.float() @ w[0].float()).half()
    ends = torch.tensor([far, far + 3], dtype=torch.int32)

    tile = torch.tensor([0, far, far + 3], dtype=torch.int32)
    triton_experts.rows_kernel[(1,)](tall, w, tile, out, width, width, False, 64, 64, 64)
    assert_same(out[far:], wanted)
    out[far:] = 0

    order, gates = virtual(far + 3, dtype=torch.int32), virtual(far + 3, dtype=torch.float32)
    sides = width, width, 1, False, False
    order[far:] = torch.arange(far, far + 3)
    gates[far:] = 1
    triton_experts.up_kernel[(1,)](
        tall, w, w, gates, order, tile, out, gated, *sides, False, 64, 64, 64
    )
    assert_same(out[far:], wanted)
    assert_same(gated[far:], torch.nn.functional.gelu(wanted))

    order[far:] = torch.arange(3)
    d_w = torch.zeros(1, width, width)
    all_rows = torch.tensor([0, 1, 0, far + 3], dtype=torch.int32)
    tail = True, 1, 64, 64, 64  # GATHER_A, TOP_K and the tile
    triton_experts.weight_grad_kernel[(1,)](
        near, tall, order, ends, all_rows, d_w, d_w, width, width, *tail
    )
    assert_same(d_w[0], near.float().T @ near.float())

    wide = 2**15  # the fifth expert's matrix starts at 2^32
    d_w, bounds = virtual(5, wide, wide, dtype=torch.float32), torch.zeros(6, dtype=torch.int32)
    bounds[-1] = 3
    rows = torch.rand(3, wide, generator=some).half()
    share = torch.tensor([4, 5, 0, 3], dtype=torch.int32)
    triton_experts.weight_grad_kernel[(1,)](
        rows, rows, order[far:], bounds, share, d_w, d_w, wide, wide, *tail
    )
    corner = rows[:, :64].float()
    assert_same(d_w[4, :64, :64], corner.T @ corner)

    triton_experts.combine_kernel[(1,)](tall, ends - 1, out, 1, width, 2, 4, 64)
    assert_same(out[0], near[2])  # and the row before `far`, of zeros


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
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@on_cpu
def test_experts_of_torch_are_not_traced(monkeypatch):
    """Their products' sizes depend on the loads."""
    traced, make_parts = [], torch_grouped.make_parts

    def note_and_make(*arguments):
        traced.append(torch.compiler.is_compiling())
        return make_parts(*arguments)

    monkeypatch.setattr(torch_grouped, "make_parts", note_and_make)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setitem(kernels.BACKENDS, "torch", torch_grouped.expert_mlp)
    torch._dynamo.reset()
    model = GPT(Model(**SIZES, n_expert=2, top_k=1, expert_hidden=24, backend="torch"))
    compile_blocks(model)
    idx = torch.randint(40, (1, 4))
    model(idx, idx).loss.backward()
    assert traced == [False] * 3


@on_cpu
def test_gradients_of_weights_are_not_rounded_under_autocast(small_tiles):
    """Those of float32 weights are sums in float32: nearer to the true ones than any in bfloat16
    can be.
    """
    leaves, experts, d_out = make_inputs(*TILED["typical"])
    leaves = [t.bfloat16().float() for t in leaves[:3]] + leaves[3:]
    with torch.autocast("cpu", torch.bfloat16):
        got = run_backend(leaves, experts, d_out.bfloat16())
    assert all(t.dtype == torch.float32 for t in got[2:4])
    assert not any(torch.equal(t, t.bfloat16().float()) for t in got[2:4])


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
    leaves, experts, d_out = make_inputs(*CASES["one token"])
    with pytest.raises(
        ValueError, match="'triton' does not compute in torch.float64: use float16.*'auto'"
    ):
        run_backend([t.double() for t in leaves], experts, d_out.double())
    monkeypatch.setattr(triton_experts, "INTERPRETED", False)
    with pytest.raises(
        ValueError,
        match="'triton' does not run on cpu: use a CUDA device, or set TRITON_INTERPRET=1",
    ):
        run_backend(leaves, experts, d_out)
    cuda = torch.device("cuda")
    for capability, problem in (((7, 5), "compute capability 8.0"), ((8, 0), "")):
        device = {
            "get_device_capability": lambda d, c=capability: c,
            "get_device_name": lambda d: "Tesla T4",
        }
        with mock.patch.multiple(torch.cuda, **device):
            assert problem in kernels.find_triton_problem(cuda, torch.float16)
            wanted = "torch" if problem else "triton"
            assert kernels.choose_backend("auto", cuda, torch.float16) == wanted
    monkeypatch.setattr(kernels, "triton", None)
    monkeypatch.setitem(sys.modules, "kernels.triton_kernels", None)
    with pytest.raises(ValueError, match="'triton' needs Triton"):
        run_backend(leaves, experts, d_out)
    assert torch.equal(expert_mlp(*leaves, experts), expert_mlp(*leaves, experts, "torch"))


FULL = {  # N, C, H, E, K
    "flagship": (32768, 768, 384, 64, 8),
    "wide": (65536, 2048, 1024, 32, 4),
    "narrow": (8192, 768, 96, 256, 64),
    "many small": (16384, 1024, 256, 256, 8),
    "few rows": (8192, 768, 384, 256, 4),
    "odd": (8191, 1000, 200, 48, 5),
}


def make_full_inputs(name, routing, dtype):
    """Arguments on the GPU with weights of a model's scale; routing: balanced, skewed, collapsed or
    idle.
    """
    N, C, H, E, K = FULL[name]
    some = seeded(device=DEVICE)
    x, w_in, w_out, d_out = (
        torch.randn(shape, generator=some, device=DEVICE) * scale
        for shape, scale in (((N, C), 1), ((E, C, H), C**-0.5), ((E, H, C), H**-0.5), ((N, C), 1))
    )
    scores = torch.rand(N, E, generator=some, device=DEVICE)
    if routing == "skewed":
        scores /= torch.arange(1, E + 1, device=DEVICE) ** 0.5
    if routing == "collapsed":
        scores[:, :K] += 1
    if routing == "idle":
        scores[:, K::2] -= 1
    weights, experts = scores.topk(K)
    return [x.to(dtype), w_in.to(dtype), w_out.to(dtype), weights], experts, d_out.to(dtype)


@pytest.mark.numerics
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ["balanced", "skewed", "collapsed", "idle"])
@pytest.mark.parametrize("name", FULL)
def test_equals_reference_in_full_size_on_gpu(name, routing, dtype):
    assert_equals_reference(*make_full_inputs(name, routing, dtype))
