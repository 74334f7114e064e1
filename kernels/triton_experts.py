"""Experts in Triton for fp16, bf16 and fp32, on CUDA devices of compute capability 8.0 and later: tiles and launches.

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
    """Output rows and columns of a program, depth of one step of its sum, warps, stages, and registers of a thread."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None  # at most; None: as the compiler likes

    @property
    def options(self) -> dict[str, int]:
        """Launch options."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


# By compute capability. Not autotuned: timings would then choose the order of sums, and so their
# bits. Widths are powers of two or, of kernels that multiply in two parts, 1.5 times that. `python
# -m tools.aot` shows the resources of each.
#
# 8.0: the tiles also fit the 99 KB of shared memory of 8.6, 8.9 and 12.0. 9.0: two blocks of `up`
# and of `down_grad` fit on a multiprocessor, so that one's epilogue overlaps with the other's
# products; the other kernels have a light epilogue and wide tiles, which need less L2 bandwidth: 96
# FLOP per byte. `up_described`, `gated_described` and `rows_ahead` load weights by tensor
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
        "up_described": Tile(ROWS, 192, 32, 8, 5, 128),
        "gated_described": Tile(ROWS, 256, 64, 8, 3),
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
    """Make `block` smaller (down to 16) as long as that saves a tenth of the work: the last block is less empty.

    Widths are powers of two and, where `block` is one of them, one and a half times those.
    """
    widths = [*(WIDTHS if block in WIDTHS[::2] else WIDTHS[1::2]), 16]
    for width in (width for width in widths if width < block):
        if divide_up(size, width) * width > 0.9 * divide_up(size, block) * block:
            break
        block = width
    return block


def major(device: torch.device) -> int:
    """Return the device's major compute capability; on a CPU, 9: its tiles are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def pick_tile(kernel: str, like: Tensor, rows: int, cols: int, depth: int = 2**31) -> Tile | None:
    """Pick the kernel's tile for the dtype and device of `like`, cut to (rows, cols, depth); None if it has none."""
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
    """Rows of a tile; given their numbers of rows and experts, of `up`, `rows` and `down_grad`, which share a table."""
    rows = FLOAT32_TILE.rows if like.dtype == torch.float32 else ROWS
    # a last tile is half empty: 1/8 of the work
    while n_row is not None and rows > 64 and n_row < 4 * rows * n_expert:
        rows //= 2
    return rows


def describe(
    matrix: Tensor, depth: int, widths: list[int], transposed: bool
) -> list[TensorDescriptor]:
    """Describe matrix (rows, cols) by a block (depth, width), or transposed (width, depth), for each of `widths`.

    Returns:
        Descriptors; none if there are no rows or they do not begin at multiples of 16 bytes.
    """
    if not len(matrix) or matrix.data_ptr() % 16 or matrix.stride(0) * matrix.itemsize % 16:
        return []
    blocks = [[width, depth] if transposed else [depth, width] for width in widths]
    return [TensorDescriptor.from_tensor(matrix, block) for block in blocks]


def split_width(cols: int) -> list[int]:
    """The widths of a tile's two parts; of a power of two, which has one part, that twice."""
    main = 1 << (cols.bit_length() - 1)
    return [main, cols - main or main]


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
    """Return the pre-activations (R, P) and gate · activations (R, H) of experts' up-projections, see up_kernel."""
    (N, C), P, top_k = x.shape, w_in.shape[2], weights.shape[1]
    gated = P == 2 * H
    hidden, activated = (
        torch.empty(N * top_k, width, dtype=x.dtype, device=x.device) for width in (P, H)
    )
    w_parts: list[Any] = []
    if tile := pick_tile("gated_described" if gated else "up_described", x, rows, P, C):
        widths = [tile.cols // 2] * 2 if gated else split_width(tile.cols)
        if C % tile.depth == 0 and (gated or sum(widths) == tile.cols):
            w_parts = describe(w_in.flatten(0, 1), tile.depth, widths, False)
    described = len(w_parts) > 0 and N > 0
    if not described:
        tile, w_parts = pick_tile("up", x, rows, P, C), [w_in, w_in]
    grid = (len(table) // 3 * divide_up(H, tile.cols // (1 + gated)),)
    sides = C, H, top_k, gated, silu, described
    up_kernel[grid](
        x, *w_parts, weights, order, table, hidden, activated, *sides, *tile[:3], **tile.options
    )
    return hidden, activated


def multiply_rows(a: Tensor, b: Tensor, table: Tensor, rows: int, transposed: bool) -> Tensor:
    """Return a (R, in) @ b[e], (R, out), for b (E, in, out) or, transposed, (E, out, in)."""
    (n_row, depth), cols, n_tile = a.shape, b.shape[1 if transposed else 2], len(table) // 3
    out = torch.empty(n_row, cols, dtype=a.dtype, device=a.device)
    tile = pick_tile("rows_ahead", a, rows, cols, depth)
    if tile and depth % tile.depth == 0:
        ours = describe(a, tile.depth, [rows], True)
        theirs = describe(b.flatten(0, 1), tile.depth, split_width(tile.cols), transposed)
        if ours and theirs:
            grid = (min(count_at_once(a.device), n_tile * divide_up(cols, tile.cols)),)
            sides = n_tile, depth, cols, transposed, *tile[:3]
            rows_ahead_kernel[grid](*ours, *theirs, table, out, *sides, **tile.options)
            return out
    tile = pick_tile("rows", a, rows, cols, depth)
    grid = (n_tile * divide_up(cols, tile.cols),)
    rows_kernel[grid](a, b, table, out, depth, cols, transposed, *tile[:3], **tile.options)
    return out


def combine(rows: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Sum each token's rows (R, C): (N, C)."""
    C = rows.shape[1]
    N = len(inverse) // top_k
    out = torch.empty(N, C, dtype=rows.dtype, device=rows.device)
    tile = (4, 256)  # a warp takes 256 columns of a token, 16 bytes per lane
    combine_kernel[(divide_up(N, tile[0]) * divide_up(C, tile[1]),)](
        rows, inverse, out, N, C, top_k, *tile
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
        ROWS=tile.rows,
        COLS=tile.cols,
        DEPTH=tile.depth,
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
    """Choose how many groups of `n_tile` programs leave few of `at_once` multiprocessors idle in the last wave."""
    best = 1
    for n_group in range(1, at_once + 1):
        waves = divide_up(n_group * n_tile, at_once)
        busy = n_group * n_tile / (waves * at_once)
        best_waves = divide_up(best * n_tile, at_once)
        if busy > 1.03 * best * n_tile / (best_waves * at_once):
            best = n_group
    return best


Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def forward(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    experts: Tensor,
    silu: bool,
    copy_in: Tensor | None = None,
    copy_out: Tensor | None = None,
) -> Six:
    """Compute the experts for contiguous inputs shaped as in expert_mlp.

    copy_in and copy_out, if given, are w_in and w_out in x's dtype: they are multiplied, and w_in
    and w_out get gradients in their own dtype, which are not rounded to x's on the way.

    Returns:
        out (N, C), hidden (R, P) and the fields of a Schedule.
    """
    w_in, w_out = w_in if copy_in is None else copy_in, w_out if copy_out is None else copy_out
    (n_expert, H, _), rows = w_out.shape, tile_rows(x, experts.numel(), len(w_out))
    with torch.cuda.device_of(x):
        schedule = order, inverse, _, table = sort_rows(experts, n_expert, rows)
        hidden, activated = multiply_up(x, w_in, H, weights, order, table, rows, silu)
        out = combine(
            multiply_rows(activated, w_out, table, rows, False), inverse, experts.shape[1]
        )
    return out, hidden, *schedule


def _fake_forward(
    x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor, *others: Any
) -> Six:
    n_row, n_expert = experts.numel(), len(w_in)
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
    (N, top_k), (n_expert, H, C) = weights.shape, w_out.shape
    d_out, rows = d_out.contiguous(), tile_rows(x, N * top_k, n_expert)
    with torch.cuda.device_of(x):
        d_hidden, activated = torch.empty_like(hidden), hidden.new_empty(N * top_k, H)
        tile = pick_tile("down_grad", x, rows, H, C)
        n_col = divide_up(H, tile.cols)
        d_gate = torch.empty(N, top_k, n_col, dtype=torch.float32, device=x.device)
        sides = C, H, top_k, hidden.shape[1] == 2 * H, silu
        down_grad_kernel[len(table) // 3 * n_col,](
            *(
                d_out,
                w_out,
                weights,
                order,
                table,
                hidden,
                d_hidden,
                activated,
                d_gate,
                *sides,
                *tile[:3],
            ),
            **tile.options,
        )
        schedule = Schedule(order, inverse, offsets, table)
        d_w_out = weight_grad(activated, d_out, schedule, top_k, False, grad_dtype)
        del activated
        d_w_in = weight_grad(x, d_hidden, schedule, top_k, True, grad_dtype)
        d_x = combine(multiply_rows(d_hidden, w_in, table, rows, True), inverse, top_k)
        return d_x, d_w_in, d_w_out, d_gate.sum(-1).to(weights.dtype)


def _fake_backward(
    d_out: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    d_w_in, d_w_out = (w.new_empty(w.shape, dtype=others[-1]) for w in (w_in, w_out))
    return x.new_empty(x.shape), d_w_in, d_w_out, weights.new_empty(weights.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w_in, w_out, weights, _, ctx.silu, copy_in, copy_out = inputs
    # of hidden and the indices, which are outputs only to be saved here
    ctx.set_materialize_grads(False)
    ctx.grad_dtype = w_in.dtype
    w_in, w_out = w_in if copy_in is None else copy_in, w_out if copy_out is None else copy_out
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
    copies: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `kernels.expert_mlp`; the weights may have another dtype than x if there are copies in x's.

    Raises:
        ValueError: an expert's matrix has 2^31 elements or more, too many for its 32-bit offsets.
    """
    if w_in[0].numel() >= 2**31:
        raise ValueError(
            "an expert's matrix has 2^31 elements or more: set model.backend to 'torch'"
        )
    tensors = [t.contiguous() for t in (x, w_in, w_out, weights, experts)]
    in_half = [t.contiguous() for t in copies] if copies else [None, None]
    return compute_experts(*tensors, activation == "silu", *in_half)[0]
