"""Residual sum and norm in Triton, one pass forward and one back; see `kernels.add_norm`.

    add_norm         a program takes ROWS tokens: reads x and y, writes x + y and its norm
    add_norm_grad    a program takes ROWS tokens at a time: computes their norms once more, writes
                     the gradients of x and y, and leaves its tokens' sums for those of weight and
                     bias

With x in fp32 and y in half precision a pass moves 12 bytes per element forward and 16 back, and 4
more each where the norm is also wanted in fp32. torch adds up the programs' sums, in an order that
N alone fixes: runs repeat bit for bit. Saved for the backward pass: x + y, which the next layer
keeps anyway.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operators import define_operator
from kernels.triton_tiles import divide_up, load_float32, power_of_2, tile_mask, tile_offsets

LARGEST = 8192  # channels; a row lies in the registers of one program
ELEMENTS = 1024  # of a program's tile, 8 in a thread, unless a row is longer
# at most, 8 on each multiprocessor of an H100; of longer rows fewer, so that all run at once. Of
# 32,768 x 768, 512 programs take 185 µs, 1,056 take 153, 2,112 take 158 (H100, 2026-11-27).
PROGRAMS = 1056


@triton.jit
def standardize(x, used, C: tl.constexpr, eps, RMS: tl.constexpr):
    """Return x̂ and 1/σ of each row, whose unused columns are 0; RMS keeps the row's mean."""
    if not RMS:
        x = tl.where(used, x - (tl.sum(x, 1) / C)[:, None], 0.0)
    step = 1.0 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    return x * step[:, None], step


@triton.jit
def add_norm_kernel(
    x,
    y,
    weight,
    bias,
    total,
    normed,
    exact,
    N,
    eps,
    C: tl.constexpr,
    RMS: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill total (N, C) with x + y, normed with its norm and, if EXACT, exact, too."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = tile_offsets(row.to(tl.int64), col, C)
    used = tile_mask(row < N, col < C)
    s = load_float32(x + at, mask=used)
    if ADD:
        s += load_float32(y + at, mask=used)
    s = s.to(total.dtype.element_ty)
    tl.store(total + at, s, mask=used)
    out = standardize(s.to(tl.float32), used, C, eps, RMS)[0]
    out *= load_float32(weight + col, mask=col < C)[None, :]
    if BIAS:
        out += load_float32(bias + col, mask=col < C)[None, :]
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=used)
    if EXACT:
        tl.store(exact + at, out.to(exact.dtype.element_ty), mask=used)


@triton.jit
def add_norm_grad_kernel(
    d_total,
    d_normed,
    d_exact,
    total,
    weight,
    d_x,
    d_y,
    sums,
    N,
    eps,
    C: tl.constexpr,
    RMS: tl.constexpr,
    CAST: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill d_x (N, C), if CAST also d_y with the same, and sums (1 + BIAS, programs, C)."""
    col = tl.arange(0, BLOCK)
    w = load_float32(weight + col, mask=col < C)[None, :]
    weight_sum, bias_sum = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = tile_offsets(row.to(tl.int64), col, C)
        used = tile_mask(row < N, col < C)
        s = load_float32(total + at, mask=used)
        d = load_float32(d_normed + at, mask=used)
        rest = load_float32(d_total + at, mask=used)
        if EXACT:
            d += load_float32(d_exact + at, mask=used)
        # after all loads: they do not cross its barriers
        s, step = standardize(s, used, C, eps, RMS)
        weight_sum += d * s
        if BIAS:
            bias_sum += d
        d *= w
        along = s * (tl.sum(d * s, 1) / C)[:, None]
        if not RMS:
            along += (tl.sum(d, 1) / C)[:, None]
        d = rest + (d - along) * step[:, None]
        tl.store(d_x + at, d.to(d_x.dtype.element_ty), mask=used)
        if CAST:
            tl.store(d_y + at, d.to(d_y.dtype.element_ty), mask=used)
    sums += tl.program_id(0) * C
    tl.store(sums + col, tl.sum(weight_sum, 0), mask=col < C)
    if BIAS:
        tl.store(sums + tl.num_programs(0) * C + col, tl.sum(bias_sum, 0), mask=col < C)


class Tile(NamedTuple):
    """Rows and columns of a program's tile, and its warps."""

    rows: int
    block: int
    warps: int


def pick_tile(N: int, C: int) -> Tile:
    """Pick the tile of N tokens with C channels."""
    block = power_of_2(C)
    rows = min(max(ELEMENTS // block, 1), power_of_2(max(N, 1)))
    warps = min(max(rows * block // 256, 1), 16)
    return Tile(rows, block, warps)


def forward(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y, its norm in `dtype` and, if `exact`, in x's; inputs are contiguous."""
    total, normed, full = _fake_forward(x, y, weight, bias, eps, rms, dtype, exact)
    C = x.shape[-1]
    N = x.numel() // C
    tile = pick_tile(N, C)
    n_tile = divide_up(N, tile.rows)
    with torch.cuda.device_of(x):
        add_norm_kernel[(max(n_tile, 1),)](
            x,
            x if y is None else y,
            weight,
            weight if bias is None else bias,
            total,
            normed,
            full,
            N,
            eps,
            C=C,
            RMS=rms,
            ADD=y is not None,
            BIAS=bias is not None,
            EXACT=exact,
            ROWS=tile.rows,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )
    return total, normed, full


def _fake_forward(
    x: Tensor, y: Any, weight: Any, bias: Any, eps: Any, rms: Any, dtype: torch.dtype, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape if exact else 0),
    )


def backward(
    d_total: Tensor,
    d_normed: Tensor,
    d_exact: Tensor,
    total: Tensor,
    weight: Tensor,
    eps: float,
    rms: bool,
    y_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of y (empty if of x's dtype), and of parameters (1 or 2, C)."""
    C = weight.numel()
    N = total.numel() // C
    d_x, d_y, _ = _fake_backward(d_total, d_normed, d_exact, total, weight, eps, rms, y_dtype, bias)
    tile = pick_tile(N, C)
    n_tile = divide_up(N, tile.rows)
    at_once = max(PROGRAMS * ELEMENTS // (tile.rows * tile.block), 128)
    n_program = max(min(n_tile, at_once), 1)
    sums = torch.empty(1 + bias, n_program, C, dtype=torch.float32, device=d_x.device)
    with torch.cuda.device_of(total):
        add_norm_grad_kernel[(n_program,)](
            d_total.contiguous(),
            d_normed.contiguous(),
            d_exact.contiguous(),
            total,
            weight,
            d_x,
            d_y,
            sums,
            N,
            eps,
            C=C,
            RMS=rms,
            CAST=y_dtype != d_x.dtype,
            BIAS=bias,
            EXACT=d_exact.numel() > 0,
            ROWS=tile.rows,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )
        return d_x, d_y, sums.sum(1).to(weight.dtype)


def _fake_backward(
    d_total: Tensor,
    d_normed: Any,
    d_exact: Any,
    total: Tensor,
    weight: Tensor,
    eps: Any,
    rms: Any,
    y_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d_x = total.new_empty(total.shape)
    d_y = d_x.new_empty(0 if y_dtype == d_x.dtype else d_x.shape, dtype=y_dtype)
    return d_x, d_y, weight.new_empty(1 + bias, weight.numel())


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, y, weight, bias, ctx.eps, ctx.rms, *_ = inputs
    ctx.y_dtype = None if y is None else y.dtype
    ctx.bias = bias is not None
    ctx.save_for_backward(output[0], weight)


def _pass_back(backward: Any, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    d_x, d_y, d_parameters = backward(
        *gradients, total, weight, ctx.eps, ctx.rms, ctx.y_dtype or total.dtype, ctx.bias
    )
    if ctx.y_dtype in (None, total.dtype):
        d_y = None if ctx.y_dtype is None else d_x
    return d_x, d_y, d_parameters[0], d_parameters[1] if ctx.bias else None, None, None, None, None


normalize_sum = define_operator(
    "add_norm", forward, _fake_forward, backward, _fake_backward, _save_for_backward, _pass_back
)
