"""A router's products in Triton: float32 by tensor cores, each operand split into parts.

cuBLAS multiplies float32 without tensor cores: its three products take 308 µs of N 32,768 tokens,
C 768 and E 64 on an H200, these 210 (2026-11-26). A split product costs three (tf32x3) or six
(bf16x6) products of a tensor core.

Tensor cores truncate when they add, which a long sum would feel. So each DEPTH of a sum is a
product of its own, and these are added in float32. On an H200 the logits' error against float64 is
1.6e-7 (tf32x3), cuBLAS's 5.0e-7; the gradients' 7.7e-8 and 1.1e-7 (bf16x6), cuBLAS's 1.4e-7 and
5.0e-7.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operators import define_operator
from kernels.triton_tiles import (
    INTERPRETED,
    divide_up,
    load_float32,
    power_of_2,
    tile_mask,
    tile_offsets,
)

LARGEST = 128  # experts; more would spill registers
# On 8.0 some spill, and for 10.0 Triton 3.6 and 3.7 compile some of them to a trap.
CAPABILITY = 9  # major


class Plan(NamedTuple):
    """How a product is split and its tile: rows, columns, depth of a step, warps and stages."""

    precision: str
    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


LOGITS = Plan("tf32x3", 64, 0, 32, 4, 3)  # all experts are columns
INPUT_GRAD = Plan("bf16x6", 64, 64, 64, 4, 2)
WEIGHT_GRAD = Plan("bf16x6", 0, 128, 32, 4, 3)  # all experts are rows
GROUPS = 132  # of tokens, whose sums the weight's gradient adds up


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """Return total + a @ b, in float32."""
    part = tl.dot(a, b, input_precision=PRECISION)
    return tl.fma(part, 1.0, total)  # a sum would be folded into the product


@triton.jit
def logits_kernel(
    x,
    weight,
    bias,
    out,
    N,
    C: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fill out (N, E) = x (N, C) @ weight (E, C)ᵀ, with BIAS plus bias (E,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    c = tl.arange(0, DEPTH)
    place = tile_offsets(row.to(tl.int64), c, C)
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for done in range(0, C, DEPTH):
        used = c < C - done
        a = load_float32(x + place + done, mask=tile_mask(row < N, used))  # (ROWS, DEPTH)
        w = weight + e[:, None] * C + c[None, :] + done
        b = load_float32(w, mask=tile_mask(e < E, used))  # (EXPERTS, DEPTH)
        total = multiply(a, b.T, total, PRECISION)
    if BIAS:
        total += load_float32(bias + e, mask=e < E)[None, :]
    inside = tile_mask(row < N, e < E)
    tl.store(out + row.to(tl.int64)[:, None] * E + e[None, :], total, mask=inside)


@triton.jit
def logits_input_grad_kernel(
    d,
    weight,
    out,
    N,
    C: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fill out (N, C) = d (N, E) @ weight (E, C)."""
    N_COL: tl.constexpr = tl.cdiv(C, COLS)
    row = tl.program_id(0) // N_COL * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % N_COL * COLS + tl.arange(0, COLS)
    e = tl.arange(0, DEPTH)
    place = tile_offsets(row.to(tl.int64), e, E)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for done in range(0, E, DEPTH):
        used = e < E - done
        a = load_float32(d + place + done, mask=tile_mask(row < N, used))
        w = weight + (done + e)[:, None] * C + col[None, :]
        b = load_float32(w, mask=tile_mask(used, col < C))  # (DEPTH, COLS)
        total = multiply(a, b, total, PRECISION)
    inside = tile_mask(row < N, col < C)
    tl.store(out + row.to(tl.int64)[:, None] * C + col[None, :], total, mask=inside)


@triton.jit
def logits_weight_grad_kernel(
    d,
    x,
    partial,
    N,
    STEPS,
    C: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fill partial (groups, E, C): dᵀ x over each group's tokens, for d (N, E) and x (N, C)."""
    N_COL: tl.constexpr = tl.cdiv(C, COLS)
    group = tl.program_id(0) // N_COL
    col = tl.program_id(0) % N_COL * COLS + tl.arange(0, COLS)
    e = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS, COLS), tl.float32)
    for step in range(STEPS):
        row = (group * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
        wide = row.to(tl.int64)[:, None]
        a = load_float32(d + wide * E + e[None, :], mask=tile_mask(row < N, e < E))
        b = load_float32(x + wide * C + col[None, :], mask=tile_mask(row < N, col < C))
        total = multiply(a.T, b, total, PRECISION)
    place = tile_offsets(group * E + e, col, C)
    tl.store(partial + place, total, mask=tile_mask(e < E, col < C))


def choose_precision(plan: Plan) -> str:
    """Return the product's precision; the interpreter, which has no bf16x6, uses float32's."""
    return "ieee" if INTERPRETED else plan.precision


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (N, C) @ weight (E, C)ᵀ + bias (E,), all contiguous and float32."""
    N, C = x.shape
    E = len(weight)
    out = x.new_empty(N, E)
    plan = LOGITS
    experts = max(16, power_of_2(E))
    with torch.cuda.device_of(x):
        logits_kernel[(divide_up(N, plan.rows),)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            N,
            C,
            E,
            EXPERTS=experts,
            ROWS=plan.rows,
            DEPTH=plan.depth,
            BIAS=bias is not None,
            PRECISION=choose_precision(plan),
            num_warps=max(plan.warps, experts // 32),
            num_stages=plan.stages,
        )
    return out


def _fake_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))


def backward(d: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight from the product's, d (N, E)."""
    d = d.contiguous()
    with torch.cuda.device_of(x):
        return compute_input_grad(d, weight), compute_weight_grad(d, x)


def compute_input_grad(d: Tensor, weight: Tensor) -> Tensor:
    """Return d (N, E) @ weight (E, C)."""
    N = len(d)
    E, C = weight.shape
    out = d.new_empty(N, C)
    plan = INPUT_GRAD
    n_program = divide_up(N, plan.rows) * divide_up(C, plan.cols)
    logits_input_grad_kernel[(n_program,)](
        d,
        weight,
        out,
        N,
        C,
        E,
        ROWS=plan.rows,
        COLS=plan.cols,
        DEPTH=plan.depth,
        PRECISION=choose_precision(plan),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    return out


def compute_weight_grad(d: Tensor, x: Tensor) -> Tensor:
    """Return d (N, E)ᵀ @ x (N, C)."""
    N, E = d.shape
    C = x.shape[1]
    plan = WEIGHT_GRAD
    experts = max(16, power_of_2(E))
    steps = divide_up(N, GROUPS * plan.depth)
    n_group = divide_up(N, steps * plan.depth) if N else 0
    partial = x.new_empty(n_group, E, C)
    logits_weight_grad_kernel[(n_group * divide_up(C, plan.cols),)](
        d,
        x,
        partial,
        N,
        steps,
        C,
        E,
        EXPERTS=experts,
        COLS=plan.cols,
        DEPTH=plan.depth,
        PRECISION=choose_precision(plan),
        num_warps=max(plan.warps, experts // 16),
        num_stages=plan.stages,
    )
    return partial.sum(0)


def _fake_backward(d: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _pass_back(backward: Any, ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_weight = backward(d, *ctx.saved_tensors)
    d_bias = d.sum(0) if ctx.has_bias else None
    return d_x, d_weight, d_bias


multiply_by_weight = define_operator(
    "router_linear",
    forward,
    _fake_forward,
    backward,
    _fake_backward,
    _save_for_backward,
    _pass_back,
)
