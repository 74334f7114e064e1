"""Experts in Triton for fp16, bf16 and fp32, on compute capability 8.0 and later: launches.

kernels/triton_expert_kernels.py describes the algorithm and holds the kernels. With
TRITON_INTERPRET=1 set before this module is imported, they run on CPU tensors, slowly.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.operators import define_operator
from kernels.triton_expert_kernels import (
    add_partial_kernel,
    combine_kernel,
    down_grad_kernel,
    rows_ahead_kernel,
    rows_kernel,
    share_kernel,
    up_kernel,
    weight_grad_kernel,
)
from kernels.triton_schedule import Schedule, sort_rows
from kernels.triton_tiles import (
    INTERPRETED,  # noqa: F401  # kernels.find_triton_problem reads it here
    divide_up,
    power_of_2,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Tile(NamedTuple):
    """Rows and columns of a program's output, depth of a step of its sum, and launch options."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None  # at most; None: as the compiler likes

    @property
    def options(self) -> dict[str, int]:
        """Sizes as a kernel's arguments, and launch options."""
        sizes = {"ROWS": self.rows, "COLS": self.cols, "DEPTH": self.depth}
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages, **limit}


# By compute capability. Not autotuned: timings would then choose the order of sums, and so their
# bits. Widths are powers of two or, of kernels that multiply in two parts, 1.5 times that.
#
# 8.0: the tiles also fit the 99 KB of shared memory of 8.6, 8.9 and 12.0. 9.0: two blocks of `up`
# and of `down_grad` fit on a multiprocessor, so that one's epilogue overlaps with the other's
# products; the other kernels have a light epilogue and wide tiles, which need less L2 bandwidth: 96
# FLOP per byte. `up_tma`, `glu_tma` and `rows_ahead` load weights by tensor
# descriptors; where those do not fit, `up` and `rows` take over.
ROWS = 128  # of every tile
TILES = {
    8: {
        "up": Tile(ROWS, 128, 32, 8, 4),
        "rows": Tile(ROWS, 128, 32, 8, 4),
        "down_grad": Tile(ROWS, 128, 32, 8, 3, 128),
        "weight_grad": Tile(ROWS, 128, 16, 8, 4, 128),
    },
    9: {
        "up": Tile(ROWS, 128, 64, 8, 3),
        "up_tma": Tile(ROWS, 192, 32, 8, 5, 128),
        "glu_tma": Tile(ROWS, 256, 64, 8, 3),
        "rows": Tile(ROWS, 256, 64, 8, 3),
        "rows_ahead": Tile(ROWS, 384, 64, 8, 3),
        "down_grad": Tile(ROWS, 128, 64, 8, 3, 128),
        "weight_grad": Tile(ROWS, 384, 64, 8, 3),
    },
}
# Triton 3.9 spills registers of the wide one
TILES[10] = TILES[9] | {"weight_grad": Tile(ROWS, 256, 64, 8, 3)}
WIDTHS = (384, 256, 192, 128, 96, 64, 48, 32)
# exact fp32 products take no tensor cores; larger tiles spill registers
FLOAT32_TILE = Tile(32, 64, 32, 4, 2)


@cache
def fit_tile(block: int, size: int) -> int:
    """Make `block` smaller (down to 16) as long as that saves a tenth of the work.

    The last block is then less empty.

    Widths are powers of two and, where `block` is one of them, one and a half times those.
    """
    widths = WIDTHS if block in WIDTHS[::2] else WIDTHS[1::2]
    for width in (*widths, 16):
        if width >= block:
            continue
        if divide_up(size, width) * width > 0.9 * divide_up(size, block) * block:
            break
        block = width
    return block


def major(device: torch.device) -> int:
    """Return the device's major compute capability; on a CPU, 9: its tiles are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def pick_tile(kernel: str, like: Tensor, rows: int, cols: int, depth: int = 2**31) -> Tile | None:
    """Pick the kernel's tile for dtype and device of `like`, cut to its sizes; None if none."""
    table = TILES.get(major(like.device), TILES[8])
    tile = table.get(kernel)
    if like.dtype == torch.float32:
        tile = FLOAT32_TILE if kernel in TILES[8] else None
    if tile is None:
        return None
    registers = tile.registers if rows == tile.rows else None  # half the rows take fewer
    return tile._replace(
        rows=rows,
        cols=fit_tile(tile.cols, cols),
        depth=fit_tile(tile.depth, depth),
        registers=registers,
    )


def tile_rows(like: Tensor, n_row: int | None = None, n_expert: int = 0) -> int:
    """Rows of a tile; with `n_row` and `n_expert`, for the kernels that share a table of tiles."""
    rows = FLOAT32_TILE.rows if like.dtype == torch.float32 else ROWS
    # a last tile is half empty: 1/8 of the work
    while n_row is not None and rows > 64 and n_row < 4 * rows * n_expert:
        rows //= 2
    return rows


def make_descriptors(
    matrix: Tensor, depth: int, widths: list[int], transposed: bool
) -> list[TensorDescriptor]:
    """Make TMA descriptors of matrix (rows, cols), in blocks of (depth, width) or transposed.

    Returns:
        One for each of `widths`; none if there are no rows or they do not start at multiples of 16
        bytes.
    """
    row_bytes = matrix.stride(0) * matrix.itemsize
    if len(matrix) == 0 or matrix.data_ptr() % 16 or row_bytes % 16:
        return []
    descriptors = []
    for width in widths:
        block = [width, depth] if transposed else [depth, width]
        descriptors.append(TensorDescriptor.from_tensor(matrix, block))
    return descriptors


def split_width(cols: int) -> list[int]:
    """The widths of a tile's two parts; a power of two has one part, which is returned twice."""
    main = 1 << (cols.bit_length() - 1)
    return [main, cols - main or main]


def make_up_descriptors(
    w_in: Tensor, tile: Tile | None, C: int, glu: bool
) -> list[TensorDescriptor]:
    """Make descriptors of w_in (E, C, P) for a tile's two parts; none where they do not fit."""
    if tile is None or C % tile.depth != 0:
        return []
    if glu and w_in.shape[2] // 2 * w_in.itemsize % 16:
        return []  # the kernel loads the second half at column H: a descriptor's rule of 16 bytes
    widths = [tile.cols // 2, tile.cols // 2] if glu else split_width(tile.cols)
    if not glu and sum(widths) != tile.cols:
        return []
    return make_descriptors(w_in.flatten(0, 1), tile.depth, widths, False)


def multiply_up(
    x: Tensor,
    w_in: Tensor,
    H: int,
    weights: Tensor,
    order: Tensor,
    table: Tensor,
    rows: int,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """Return pre-activations (R, P) and gate · activations (R, H); see up_kernel."""
    N, C = x.shape
    P = w_in.shape[2]
    top_k = weights.shape[1]
    glu = P == 2 * H
    hidden = torch.empty(N * top_k, P, dtype=x.dtype, device=x.device)
    activated = torch.empty(N * top_k, H, dtype=x.dtype, device=x.device)
    tile = pick_tile("glu_tma" if glu else "up_tma", x, rows, P, C)
    w_parts: list[Any] = make_up_descriptors(w_in, tile, C, glu)
    use_tma = len(w_parts) > 0 and N > 0
    if not use_tma:
        tile = pick_tile("up", x, rows, P, C)
        w_parts = [w_in, w_in]
    width = tile.cols // 2 if glu else tile.cols
    n_tile = len(table) // 3
    up_kernel[(n_tile * divide_up(H, width),)](
        x,
        *w_parts,
        weights,
        order,
        table,
        hidden,
        activated,
        C=C,
        H=H,
        TOP_K=top_k,
        GLU=glu,
        SILU=silu,
        USE_TMA=use_tma,
        **tile.options,
    )
    return hidden, activated


def multiply_rows(a: Tensor, b: Tensor, table: Tensor, rows: int, transposed: bool) -> Tensor:
    """Return a (R, in) @ b[e], (R, out), for b (E, in, out) or, transposed, (E, out, in)."""
    n_row, depth = a.shape
    cols = b.shape[1] if transposed else b.shape[2]
    out = torch.empty(n_row, cols, dtype=a.dtype, device=a.device)
    n_tile = len(table) // 3
    tile = pick_tile("rows_ahead", a, rows, cols, depth)
    if tile is not None and depth % tile.depth == 0:
        a_desc = make_descriptors(a, tile.depth, [rows], True)
        b_widths = split_width(tile.cols)
        b_desc = make_descriptors(b.flatten(0, 1), tile.depth, b_widths, transposed)
        if a_desc and b_desc:
            # as many programs as run at once
            n_program = min(count_at_once(out.device), n_tile * divide_up(cols, tile.cols))
            rows_ahead_kernel[(n_program,)](
                *a_desc,
                *b_desc,
                table,
                out,
                N_TILE=n_tile,
                IN=depth,
                OUT=cols,
                TRANSPOSED=transposed,
                **tile.options,
            )
            return out
    tile = pick_tile("rows", a, rows, cols, depth)
    rows_kernel[(n_tile * divide_up(cols, tile.cols),)](
        a, b, table, out, IN=depth, OUT=cols, TRANSPOSED=transposed, **tile.options
    )
    return out


def combine(rows: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Sum each token's rows (R, C): (N, C)."""
    C = rows.shape[1]
    N = len(inverse) // top_k
    out = torch.empty(N, C, dtype=rows.dtype, device=rows.device)
    n_token, n_col = 4, 256  # a warp reads 256 columns of a token, 16 bytes per lane
    combine_kernel[(divide_up(N, n_token) * divide_up(C, n_col),)](
        rows, inverse, out, N, C=C, TOP_K=top_k, ROWS=n_token, COLS=n_col
    )
    return out


def weight_grad(
    a: Tensor, b: Tensor, rows: Schedule, top_k: int, gather_a: bool, dtype: torch.dtype
) -> Tensor:
    """Sum aᵀ b over each expert's rows: (E, A, B) in `dtype`.

    By token is a (N, A) if gather_a, else b (N, B).
    """
    A = a.shape[1]
    B = b.shape[1]
    n_expert = len(rows.offsets) - 1
    tile = pick_tile("weight_grad", a, fit_tile(tile_rows(a), A), B)
    n_tile = divide_up(A, tile.rows) * divide_up(B, tile.cols)
    n_group = count_groups(n_tile, count_at_once(a.device))
    share = max(1, divide_up(len(rows.order), n_group * tile.depth)) * tile.depth
    shares = torch.empty(n_group, 4, dtype=torch.int32, device=a.device)
    share_kernel[(n_group,)](
        rows.offsets,
        shares,
        share,
        N_GROUP=n_group,
        N_EXPERT=n_expert,
        BY_EXPERT=divide_up(n_expert, n_group),
        num_warps=1,
    )
    out = torch.empty(n_expert, A, B, dtype=torch.float32, device=a.device)
    partial = torch.empty(n_group, A, B, dtype=torch.float32, device=a.device)
    weight_grad_kernel[(n_group * n_tile,)](
        a,
        b,
        rows.order,
        rows.offsets,
        shares,
        out,
        partial,
        A=A,
        B=B,
        GATHER_A=gather_a,
        TOP_K=top_k,
        **tile.options,
    )
    if n_group > 1:
        block = min(4096, power_of_2(A * B))
        n_block = divide_up(A * B, block)
        add_partial_kernel[((n_group - 1) * n_block,)](
            rows.offsets,
            shares,
            partial,
            out,
            share,
            SIZE=A * B,
            N_EXPERT=n_expert,
            BLOCK=block,
        )
    return out.to(dtype)


@cache
def count_at_once(device: torch.device) -> int:
    """Multiprocessors of the device; of the interpreter 4, so that few programs have much to do."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def count_groups(n_tile: int, at_once: int) -> int:
    """Choose how many groups of `n_tile` programs leave few multiprocessors idle at the end."""
    best = 1
    for n_group in range(1, at_once + 1):
        waves = divide_up(n_group * n_tile, at_once)
        busy = n_group * n_tile / (waves * at_once)
        best_waves = divide_up(best * n_tile, at_once)
        if busy > 1.03 * best * n_tile / (best_waves * at_once):
            best = n_group
    return best


ForwardOutput = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # see `forward`


def forward(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    experts: Tensor,
    silu: bool,
    half_in: Tensor | None = None,
    half_out: Tensor | None = None,
) -> ForwardOutput:
    """Compute the experts for contiguous inputs shaped as in expert_mlp.

    half_in and half_out, if given, are w_in and w_out in x's dtype: they are multiplied, and w_in
    and w_out get gradients in their own dtype, which are not rounded to x's on the way.

    Returns:
        out (N, C), hidden (R, P) and the fields of a Schedule.
    """
    if half_in is not None and half_out is not None:
        w_in, w_out = half_in, half_out
    n_expert, H, _ = w_out.shape
    rows = tile_rows(x, experts.numel(), n_expert)
    with torch.cuda.device_of(x):
        schedule = sort_rows(experts, n_expert, rows)
        table = schedule.table
        hidden, activated = multiply_up(x, w_in, H, weights, schedule.order, table, rows, silu)
        by_row = multiply_rows(activated, w_out, table, rows, False)  # (R, C)
        out = combine(by_row, schedule.inverse, experts.shape[1])
    return out, hidden, *schedule


def _fake_forward(
    x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor, *others: Any
) -> ForwardOutput:
    n_row = experts.numel()
    n_expert = len(w_in)
    schedule = Schedule.empty(experts, n_expert, tile_rows(x, n_row, n_expert))
    return x.new_empty(x.shape), x.new_empty(n_row, w_in.shape[2]), *schedule


def backward(
    d_out: Tensor,
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    hidden: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    table: Tensor,
    silu: bool,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, w_in and w_out, both in grad_dtype, and weights."""
    N, top_k = weights.shape
    n_expert, H, C = w_out.shape
    d_out = d_out.contiguous()
    rows = tile_rows(x, N * top_k, n_expert)
    schedule = Schedule(order, inverse, offsets, table)
    with torch.cuda.device_of(x):
        d_hidden = torch.empty_like(hidden)
        activated = hidden.new_empty(N * top_k, H)
        tile = pick_tile("down_grad", x, rows, H, C)
        n_col = divide_up(H, tile.cols)
        d_gate = torch.empty(N, top_k, n_col, dtype=torch.float32, device=x.device)
        n_tile = len(table) // 3
        down_grad_kernel[(n_tile * n_col,)](
            d_out,
            w_out,
            weights,
            order,
            table,
            hidden,
            d_hidden,
            activated,
            d_gate,
            C=C,
            H=H,
            TOP_K=top_k,
            GLU=hidden.shape[1] == 2 * H,
            SILU=silu,
            **tile.options,
        )
        d_w_out = weight_grad(activated, d_out, schedule, top_k, False, grad_dtype)
        del activated
        d_w_in = weight_grad(x, d_hidden, schedule, top_k, True, grad_dtype)
        d_row = multiply_rows(d_hidden, w_in, table, rows, True)  # (R, C)
        d_x = combine(d_row, inverse, top_k)
        return d_x, d_w_in, d_w_out, d_gate.sum(-1).to(weights.dtype)


def _fake_backward(
    d_out: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    grad_dtype = others[-1]
    d_w_in = w_in.new_empty(w_in.shape, dtype=grad_dtype)
    d_w_out = w_out.new_empty(w_out.shape, dtype=grad_dtype)
    return x.new_empty(x.shape), d_w_in, d_w_out, weights.new_empty(weights.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w_in, w_out, weights, _, ctx.silu, half_in, half_out = inputs
    # of hidden and the indices, which are outputs only to be saved here
    ctx.set_materialize_grads(False)
    ctx.grad_dtype = w_in.dtype
    if half_in is not None:
        w_in, w_out = half_in, half_out
    ctx.save_for_backward(x, w_in, w_out, weights, *output[1:])


def _pass_back(backward: Any, ctx: Any, d_out: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    gradients = backward(d_out, *ctx.saved_tensors, ctx.silu, ctx.grad_dtype)
    return (*gradients, None, None, None, None)


compute_experts = define_operator(
    "experts", forward, _fake_forward, backward, _fake_backward, _save_for_backward, _pass_back
)


def expert_mlp(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str = "gelu",
    half_weights: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `kernels.expert_mlp`; the weights may have another dtype than x if half_weights have x's.

    Raises:
        ValueError: an expert's matrix has 2^31 elements or more, too many for its 32-bit offsets.
    """
    if w_in[0].numel() >= 2**31:
        raise ValueError(
            "an expert's matrix has 2^31 elements or more: set model.backend to 'torch'"
        )
    tensors = [t.contiguous() for t in (x, w_in, w_out, weights, experts)]
    half_in = half_out = None
    if half_weights is not None:
        half_in = half_weights[0].contiguous()
        half_out = half_weights[1].contiguous()
    return compute_experts(*tensors, activation == "silu", half_in, half_out)[0]
