"""Experts in Triton for fp16, bf16 and fp32, on CUDA devices of compute capability 8.0 and later: tiles and launches.

kernels/triton_expert_kernels.py describes the algorithm and holds the kernels. With TRITON_INTERPRET=1 set before this
module is imported, they run on CPU tensors, slowly.
"""
# Triton's stubs know neither constexpr arguments nor launch options.
# pyrefly: ignore-errors

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.triton_expert_kernels import (
    INTERPRETED,  # noqa: F401  # kernels.find_triton_problem reads it here
    combine_kernel,
    down_grad_kernel,
    index_kernel,
    rows_kernel,
    up_kernel,
    weight_grad_kernel,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Tile(NamedTuple):
    """Output rows and columns of a program, depth of one step of its sum, warps, and pipeline stages."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# By compute capability. Not autotuned: timings would then choose the order of sums, and so their bits. The tiles of 8.0
# also fit the 99 KB of shared memory of 8.6, 8.9 and 12.0. Those of 9.0 leave room for two blocks of `up` and of
# `down_grad` on a multiprocessor, so that one's epilogue overlaps with the other's products; the other kernels have a
# light epilogue and wide tiles, which need less L2 bandwidth: 85 FLOP per byte. `python -m scripts.aot` shows the
# resources of each. A benchmark tries other tiles by replacing entries.
TILES = {
    8: {
        "up": Tile(128, 128, 32, 8, 4),
        "rows": Tile(128, 128, 32, 8, 4),
        "down_grad": Tile(128, 128, 32, 8, 3),
        "weight_grad": Tile(128, 128, 32, 8, 4),
    },
    9: {
        "up": Tile(128, 128, 64, 8, 3),
        "rows": Tile(128, 256, 64, 8, 3),
        "down_grad": Tile(128, 128, 64, 8, 3),
        "weight_grad": Tile(128, 256, 64, 8, 3),
    },
}
TILES[10] = TILES[9]
FLOAT32_TILE = Tile(32, 64, 32, 4, 2)  # exact fp32 products take no tensor cores; larger tiles spill registers


def fit_tile(block: int, size: int) -> int:
    """Halve `block` (down to 16) as long as that saves a tenth of the work, because the last block is less empty."""
    while block > 16 and triton.cdiv(size, block // 2) * (block // 2) <= 0.9 * triton.cdiv(size, block) * block:
        block //= 2
    return block


def major(device: torch.device) -> int:
    """Return the device's major compute capability; on a CPU, 9: its tiles are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def pick_tile(kernel: str, like: Tensor, cols: int) -> Tile:
    """Pick the kernel's tile for the dtype and device of `like`, narrowed to a width of `cols`."""
    table = TILES.get(major(like.device), TILES[8])
    tile = FLOAT32_TILE if like.dtype == torch.float32 else table[kernel]
    return tile._replace(cols=fit_tile(tile.cols, cols))


def pick_rows_tile(
    kernel: str, like: Tensor, n_row: int, n_expert: int, cols: int, depth: int
) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Pick (grid, tile, launch options) of a kernel over the tiles of all experts' rows, `cols` wide, `depth` deep."""
    tile = pick_tile(kernel, like, cols)
    rows = tile.rows
    while rows > 64 and n_row < 4 * rows * n_expert:  # an expert's last tile is half empty: at most 1/8 of its work
        rows //= 2
    grid = ((n_row // rows + n_expert) * triton.cdiv(cols, tile.cols),)
    return grid, (rows, tile.cols, fit_tile(tile.depth, depth)), {"num_warps": tile.warps, "num_stages": tile.stages}


def sort_rows(experts: Tensor, n_expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of experts (N, K), stably: order, inverse and offsets (see the module), int32."""
    assert n_expert < 2**15
    flat = experts.flatten().to(torch.int16)  # half the radix passes of int32
    ranked, order64 = flat.sort(stable=True)
    offsets = torch.searchsorted(
        ranked, torch.arange(n_expert + 1, dtype=torch.int16, device=flat.device), out_int32=True
    )
    order = torch.empty(len(flat), dtype=torch.int32, device=flat.device)
    inverse = torch.empty_like(order)
    index_kernel[(triton.cdiv(len(flat), 1024),)](order64, order, inverse, len(flat), 1024)
    return order, inverse, offsets


def multiply_rows(a: Tensor, b: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Return a (R, in) @ b[e], (R, out), for b (E, in, out) or, transposed, (E, out, in)."""
    (n_row, depth), n_expert, cols = a.shape, len(b), b.shape[1 if transposed else 2]
    grid, tile, options = pick_rows_tile("rows", a, n_row, n_expert, cols, depth)
    out = torch.empty(n_row, cols, dtype=a.dtype, device=a.device)
    rows_kernel[grid](a, b, offsets, out, depth, cols, transposed, n_expert, *tile, **options)
    return out


def combine(rows: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Sum each token's rows (R, C): (N, C)."""
    C = rows.shape[1]
    N = len(inverse) // top_k
    out = torch.empty(N, C, dtype=rows.dtype, device=rows.device)
    tile = (4, 256)  # a warp takes 256 columns of a token, 16 bytes per lane
    combine_kernel[(triton.cdiv(N, tile[0]) * triton.cdiv(C, tile[1]),)](rows, inverse, out, N, C, top_k, *tile)
    return out


def weight_grad(
    a: Tensor, b: Tensor, order: Tensor, offsets: Tensor, largest: Tensor, top_k: int, gather_a: bool
) -> Tensor:
    """Sum aᵀ b over each expert's rows: (E, A, B). By token is a (N, A) if gather_a, else b (N, B)."""
    A, B, n_expert = a.shape[1], b.shape[1], len(largest)
    tile = pick_tile("weight_grad", a, B)
    rows = fit_tile(tile.rows, A)
    out = torch.empty(n_expert, A, B, dtype=a.dtype, device=a.device)
    grid = (n_expert * triton.cdiv(A, rows) * triton.cdiv(B, tile.cols),)
    weight_grad_kernel[grid](
        *(a, b, order, offsets, largest, out, A, B, gather_a, top_k, rows, tile.cols, tile.depth),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def forward(
    x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out (N, C), hidden (R, H), order, inverse, offsets for contiguous inputs shaped as in expert_mlp."""
    (N, top_k), (n_expert, C, H) = experts.shape, w_in.shape
    with torch.cuda.device_of(x):
        order, inverse, offsets = sort_rows(experts, n_expert)
        hidden, gated = (torch.empty(N * top_k, H, dtype=x.dtype, device=x.device) for _ in range(2))
        grid, tile, options = pick_rows_tile("up", x, N * top_k, n_expert, H, C)
        up_kernel[grid](*(x, w_in, weights, order, offsets, hidden, gated, C, H, n_expert, top_k, *tile), **options)
        out = combine(multiply_rows(gated, w_out, offsets, False), inverse, top_k)
    return out, hidden, order, inverse, offsets


def _fake_forward(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, ...]:
    (n_row,), n_expert = experts.flatten().shape, len(w_in)
    index = [experts.new_empty(n, dtype=torch.int32) for n in (n_row, n_row, n_expert + 1)]
    return x.new_empty(x.shape), x.new_empty(n_row, w_in.shape[2]), *index


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, w_in, w_out and weights."""
    (N, top_k), (n_expert, C, H) = weights.shape, w_in.shape
    d_out = d_out.contiguous()
    with torch.cuda.device_of(x):
        d_hidden, gated = torch.empty_like(hidden), torch.empty_like(hidden)
        grid, tile, options = pick_rows_tile("down_grad", x, N * top_k, n_expert, H, C)
        d_gate = torch.empty(N, top_k, triton.cdiv(H, tile[1]), dtype=torch.float32, device=x.device)
        down_grad_kernel[grid](
            *(d_out, w_out, weights, order, offsets, hidden, d_hidden, gated, d_gate, C, H, n_expert, top_k, *tile),
            **options,
        )
        largest = offsets.diff().argsort(descending=True, stable=True)
        d_w_out = weight_grad(gated, d_out, order, offsets, largest, top_k, gather_a=False)
        del gated
        d_w_in = weight_grad(x, d_hidden, order, offsets, largest, top_k, gather_a=True)
        d_x = combine(multiply_rows(d_hidden, w_in, offsets, True), inverse, top_k)
        return d_x, d_w_in, d_w_out, d_gate.sum(-1).to(weights.dtype)


def _fake_backward(d_out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in inputs[:4])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # of hidden and the indices, which are outputs only to be saved here
    ctx.save_for_backward(*inputs[:4], *output[1:])


# torch.compile sees both passes as opaque operators, known by the shapes of their results.
experts_forward = torch.library.custom_op("nanokern::experts_forward", forward, mutates_args=())
experts_forward.register_fake(_fake_forward)
experts_backward = torch.library.custom_op("nanokern::experts_backward", backward, mutates_args=())
experts_backward.register_fake(_fake_backward)
experts_forward.register_autograd(
    lambda ctx, d_out, *_: (*experts_backward(d_out, *ctx.saved_tensors), None), setup_context=_save_for_backward
)


def expert_mlp(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """See `kernels.expert_mlp`.

    Raises:
        ValueError: an expert's matrix has 2^31 elements or more, too many for its 32-bit offsets.
    """
    if w_in[0].numel() >= 2**31:
        raise ValueError("an expert's matrix has 2^31 elements or more: set model.backend to 'torch'")
    return experts_forward(*(t.contiguous() for t in (x, w_in, w_out, weights, experts)))[0]
