"""Routing in Triton, from logits to gates, experts and statistics in two launches, and back in one.

Any router of router.py's formula is two stages of x ↦ post(φ(pre(x))), norms over the columns in
use: the first over all E columns gives the scores that experts are chosen by, the second over the K
chosen ones gives their gates.

    route       a program takes ROWS tokens of one sequence: both stages, the choice of experts, and
                sums over its tokens
    route_sum   adds up the programs' sums, in fixed order
    route_grad  computes both stages again, and the gradient of the logits from the gradients of
                gates, mean scores and z-loss

The choice takes K steps: the largest score, and of equal ones the lowest column. There are no
atomics, so runs repeat bit for bit. Saved for the backward pass: logits and experts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operators import define_operator
from kernels.triton_tiles import divide_up, load_float32, power_of_2, tile_mask, tile_offsets

PHIS = ("identity", "relu", "exp", "sqrtexp", "sigmoid", "tanh", "sqrtsoftplus")  # of router.PHI
LARGEST = 512  # experts; a row of scores lies in the registers of one warp
ELEMENTS = 1024  # of a program's tile, 8 in a thread
# Left to itself, ptxas sometimes uses 64 registers and spills one. `enable_fp_fusion` is off: fused
# with the product before it, the sum of score and β would not be what router.py chooses by.
REGISTERS = 128
EPS = tl.constexpr(1e-8)  # as in router.py
LOWEST = tl.constexpr(-(2**31))
SCALARS = tl.constexpr(5)  # z-loss, entropy, zero gates, Σ g², Σ g


@triton.jit
def normalize(x, NORM: tl.constexpr):
    """Divide each row by its norm + ε.

    Returns y, slope and step, with dx = (dy - slope · Σ dy y) · step.

    Before squaring, rows are scaled to a largest element of about 1: squares of logits beyond 1e19
    overflow.
    """
    if NORM == "l1":
        step = 1.0 / (tl.sum(tl.abs(x), 1) + EPS)
        y, slope = x * step[:, None], tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
    else:
        tl.static_assert(NORM == "l2")
        scale = 1.0 / tl.minimum(tl.maximum(tl.max(tl.abs(x), 1), 1e-18), 1e37)
        x *= scale[:, None]
        norm = tl.sqrt(tl.sum(x * x, 1))
        divisor = norm + EPS * scale
        y, step = x * (1.0 / divisor)[:, None], scale / divisor
        slope = y * tl.where(norm > 0, divisor / norm, 0.0)[:, None]
    return y, slope, step


@triton.jit
def phi(x, used, PHI: tl.constexpr):
    """(φ(x), φ'(x)), both 0 in columns not used.

    As router.PHI: exponentials are taken of x - max(x).
    """
    if PHI == "relu":
        y, slope = tl.where(x <= 0, 0.0, x), tl.where(x > 0, 1.0, 0.0)  # NaN stays NaN
    elif PHI == "exp" or PHI == "sqrtexp":
        RATE: tl.constexpr = 1.0 if PHI == "exp" else 0.5
        top = tl.max(tl.where(used, x, -float("inf")), 1)
        y = tl.exp(RATE * tl.where(used, x - top[:, None], 0.0))
        slope = RATE * y
    elif PHI == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
        slope = y * (1.0 - y)
    elif PHI == "tanh":  # by a series near 0, where the quotient would cancel
        small, square = tl.exp(-2.0 * tl.abs(x)), x * x
        series = 1 + square * (
            -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))
        )
        quotient = (1.0 - small) / (1.0 + small)
        y = tl.where(square < 0.0625, x * series, tl.where(x > 0, quotient, -quotient))
        slope = 1.0 - y * y
    # log(1 + small) = 2 artanh(small / (2 + small)), whose series has no cancellation
    elif PHI == "sqrtsoftplus":
        small = tl.exp(-tl.abs(x))
        part = small / (2.0 + small)
        square = part * part
        series = 1 / 9 + square * (1 / 11 + square * (1 / 13 + square * (1 / 15)))
        series = 1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * series)))
        softplus = tl.where(x > 0, x, 0.0) + 2.0 * part * series
        y = tl.sqrt(tl.maximum(softplus, 1e-30, propagate_nan=tl.PropagateNan.ALL))
        slope = tl.where(
            softplus < 1e-30, 0.0, tl.where(x > 0, 1.0, small) / (1.0 + small) / (2.0 * y)
        )
    else:
        tl.static_assert(PHI == "identity")
        y, slope = x, tl.full(x.shape, 1.0, tl.float32)
    return tl.where(used, y, 0.0), tl.where(used, slope, 0.0)


@triton.jit
def stage(x, used, PRE: tl.constexpr, PHI: tl.constexpr, POST: tl.constexpr):
    """post(φ(pre(x))) of each row over the columns used; 0 in the others."""
    x = tl.where(used, x, 0.0)
    if PRE != "none":
        x = normalize(x, PRE)[0]
    x = phi(x, used, PHI)[0]
    if POST != "none":
        x = normalize(x, POST)[0]
    return x


@triton.jit
def stage_grad(x, used, d, PRE: tl.constexpr, PHI: tl.constexpr, POST: tl.constexpr):
    """Gradient of x from that of stage(x), d; both 0 in columns not used."""
    x = tl.where(used, x, 0.0)
    d = tl.where(used, d, 0.0)
    if PRE != "none":
        x, pre_slope, pre_step = normalize(x, PRE)
    y, slope = phi(x, used, PHI)
    if POST != "none":
        out, post_slope, post_step = normalize(y, POST)
        d = (d - post_slope * tl.sum(d * out, 1)[:, None]) * post_step[:, None]
    d *= slope
    if PRE != "none":
        d = (d - pre_slope * tl.sum(d * x, 1)[:, None]) * pre_step[:, None]
    return tl.where(used, d, 0.0)


@triton.jit
def distribute(scores):
    """Positive scores over their sum, and one over the sum: `balance.token_distribution`."""
    positive = tl.where(scores <= 0, 0.0, scores)
    step = 1.0 / (tl.sum(positive, 1) + EPS)
    return positive * step[:, None], step


@triton.jit
def find_tokens(T, PROGRAMS, ROWS: tl.constexpr):
    """(sequence, first row, which of its ROWS rows exist) of this program's tokens."""
    sequence = tl.program_id(0) // PROGRAMS
    token = tl.program_id(0) % PROGRAMS * ROWS
    return sequence, sequence.to(tl.int64) * T + token, token + tl.arange(0, ROWS) < T


@triton.jit
def route_kernel(
    logits,
    selection_bias,
    c,
    gamma,
    weights,
    experts,
    scores,
    sums,
    T,
    PROGRAMS,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    PRE_1: tl.constexpr,
    PHI_1: tl.constexpr,
    POST_1: tl.constexpr,
    PRE_2: tl.constexpr,
    PHI_2: tl.constexpr,
    POST_2: tl.constexpr,
    GAMMA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPS: tl.constexpr,
):
    """Fill weights, experts, scores and a row of sums: distribution, loads (E each), SCALARS."""
    _, first, inside = find_tokens(T, PROGRAMS, ROWS)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = tile_offsets(row, col, E)
    real = (col < E)[None, :] & (row >= 0)[:, None]
    stored = (col < E)[None, :] & inside[:, None]
    s = load_float32(logits + first * E + at, mask=stored)
    q = stage(s, real, PRE_1, PHI_1, POST_1)
    tl.store(scores + first * E + at, q, mask=stored)

    shifted = q + load_float32(selection_bias + col, mask=col < E)[None, :]
    bits = tl.where(shifted == 0, 0.0, shifted).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    # as two's complement it sorts like the floats, NaN first
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(real, tl.maximum(order, LOWEST + 1), LOWEST)
    k_col = tl.arange(0, TOPS)
    index = tl.zeros((ROWS, TOPS), tl.int32)
    for k in range(TOP_K):
        top = tl.max(order, 1)
        best = tl.min(tl.where(order == top[:, None], col[None, :], BLOCK), 1)
        order = tl.where(col[None, :] == best[:, None], LOWEST, order)
        index = tl.where(k_col[None, :] == k, best[:, None], index)
    chosen = (order == LOWEST) & stored

    scale = tl.load(c)
    if GAMMA:
        scale *= tl.load(gamma)
    used = (k_col < TOP_K)[None, :] & inside[:, None]
    g = stage(tl.gather(q, index, 1), used, PRE_2, PHI_2, POST_2) * scale
    entry = first * TOP_K + row[:, None] * TOP_K + k_col[None, :]
    tl.store(weights + entry, g, mask=used)
    tl.store(experts + entry, index.to(tl.int64), mask=used)

    share = tl.where(inside[:, None], distribute(q)[0], 0.0)
    top = tl.max(tl.where(real, s, -float("inf")), 1)
    exponentials = tl.where(real, tl.exp(s - top[:, None]), 0.0)
    logsumexp = tl.log(tl.sum(exponentials, 1)) + top
    entropy = -tl.sum(share * tl.log(tl.maximum(share, 1e-30)), 1)
    n_zero = tl.sum(tl.where(used & (g == 0), 1.0, 0.0), 1)
    sums += tl.program_id(0).to(tl.int64) * (2 * E + SCALARS)
    tl.store(sums + col, tl.sum(share, 0), mask=col < E)
    tl.store(sums + E + col, tl.sum(tl.where(chosen, 1.0, 0.0), 0), mask=col < E)
    # a row of SCALARS numbers; Triton's ranges are powers of two
    scalar = tl.arange(0, 8)[None, :]
    row_sums = tl.where(scalar == 0, (logsumexp * logsumexp)[:, None], 0.0)
    row_sums = tl.where(scalar == 1, entropy[:, None], row_sums)
    row_sums = tl.where(scalar == 2, n_zero[:, None], row_sums)
    row_sums = tl.where(scalar == 3, tl.sum(g * g, 1)[:, None], row_sums)
    row_sums = tl.where(scalar == 4, tl.sum(g, 1)[:, None], row_sums)
    totals = tl.sum(tl.where(inside[:, None], row_sums, 0.0), 0)
    position = tl.arange(0, 8)
    tl.store(sums + 2 * E + position, totals, mask=position < SCALARS)


@triton.jit
def route_sum_kernel(
    sums,
    probability,
    loads,
    scalars,
    z_loss,
    B,
    T,
    PROGRAMS,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program b < B: means of the distribution and loads of sequence b.

    Program B: the scalars, over all tokens.
    """
    b = tl.program_id(0)
    row, col, width = tl.arange(0, ROWS), tl.arange(0, BLOCK), 2 * E + SCALARS
    if b < B:
        sums += b.to(tl.int64) * PROGRAMS * width
        share, count = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, PROGRAMS, ROWS):
            mask = tile_mask(first + row < PROGRAMS, col < E)
            share += load_float32(sums + (first + row)[:, None] * width + col[None, :], mask=mask)
            count += load_float32(
                sums + (first + row)[:, None] * width + E + col[None, :], mask=mask
            )
        tl.store(probability + b * E + col, tl.sum(share, 0) / T, mask=col < E)
        tl.store(loads + b * E + col, tl.sum(count, 0).to(tl.int64), mask=col < E)
    else:
        which = tl.arange(0, 8)
        total = tl.zeros((ROWS, 8), tl.float32)
        for first in range(0, B * PROGRAMS, ROWS):
            mask = tile_mask(first + row < B * PROGRAMS, which < SCALARS)
            at = sums + (first + row).to(tl.int64)[:, None] * width + 2 * E + which[None, :]
            total += load_float32(at, mask=mask)
        # Added to a tensor: Triton turns arguments that are 1 into constants, as B and T of a
        # single token.
        n = (tl.zeros((8,), tl.float32) + B * T) * tl.where(which == 2, TOP_K, 1)
        # not exactly 1 where it should be: this division is not rounded correctly
        mean = tl.sum(total, 0) / n
        mean = tl.where(tl.sum(total, 0) == n, 1.0, mean)
        tl.store(scalars + which, mean, mask=which < SCALARS)
        tl.store(z_loss + which, mean, mask=which == 0)


@triton.jit
def route_grad_kernel(
    logits,
    experts,
    c,
    gamma,
    d_weights,
    d_probability,
    d_z_loss,
    d_logits,
    d_scale,
    T,
    PROGRAMS,
    N,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    PRE_1: tl.constexpr,
    PHI_1: tl.constexpr,
    POST_1: tl.constexpr,
    PRE_2: tl.constexpr,
    PHI_2: tl.constexpr,
    POST_2: tl.constexpr,
    GAMMA: tl.constexpr,
    GATES: tl.constexpr,
    BALANCE: tl.constexpr,
    Z_LOSS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill d_logits, and d_scale with this program's part of γ's gradient."""
    sequence, first, inside = find_tokens(T, PROGRAMS, ROWS)
    row, col = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = tile_offsets(row, col, E)
    real = (col < E)[None, :] & (row >= 0)[:, None]
    stored = (col < E)[None, :] & inside[:, None]
    s = load_float32(logits + first * E + at, mask=stored)
    q = stage(s, real, PRE_1, PHI_1, POST_1)
    d_q = tl.zeros((ROWS, BLOCK), tl.float32)
    d_s = tl.zeros((ROWS, BLOCK), tl.float32)  # what bypasses the scores
    if GATES:
        chosen, d_w = tl.zeros((ROWS, BLOCK), tl.int1), tl.zeros((ROWS, BLOCK), tl.float32)
        for k in range(TOP_K):
            expert = tl.load(experts + first * TOP_K + row * TOP_K + k, mask=inside, other=-1).to(
                tl.int32
            )
            d = load_float32(d_weights + first * TOP_K + row * TOP_K + k, mask=inside)
            hit = col[None, :] == expert[:, None]
            chosen = chosen | hit
            d_w = tl.where(hit, d[:, None], d_w)
        scale = tl.load(c)
        w = stage(q, chosen, PRE_2, PHI_2, POST_2)
        if GAMMA:
            tl.store(d_scale + tl.program_id(0), tl.sum(tl.sum(d_w * w, 1), 0) * scale)
            scale *= tl.load(gamma)
        d_w *= scale
        if PHI_1 == "relu" or PHI_2 == "relu":  # router.DeadTokenGradient
            rise = tl.minimum(tl.sum(d_w, 1), 0.0) / (TOP_K * E)
            d_s += tl.where(tl.sum(w, 1) == 0, rise, 0.0)[:, None]
        d_q += stage_grad(q, chosen, d_w, PRE_2, PHI_2, POST_2)
    if BALANCE:
        share, step = distribute(q)
        d = load_float32(d_probability + sequence * E + col, mask=col < E)[None, :] / T
        d_q += tl.where(q > 0, (d - tl.sum(d * share, 1)[:, None]) * step[:, None], 0.0)
    if Z_LOSS:
        top = tl.max(tl.where(real, s, -float("inf")), 1)
        power = tl.where(real, tl.exp(s - top[:, None]), 0.0)
        total = tl.sum(power, 1)
        d_s += power * (2.0 * tl.load(d_z_loss) / N * (tl.log(total) + top) / total)[:, None]
    d_s += stage_grad(s, real, d_q, PRE_1, PHI_1, POST_1)
    tl.store(d_logits + first * E + at, d_s, mask=stored)


def split_stages(phi: str, pre: str, post: str) -> dict[str, str]:
    """Split a formula into the stage over all experts and the stage over the chosen ones.

    Returns:
        As arguments of the kernels, the norms before and after φ, "none", "l1" or "l2", and φ.
    """
    norms = {"no": "none", "l1": "l1", "l2": "l2"}
    before = norms[pre[:2]]
    after = norms[post[:2]]
    after_all = after if post.endswith("all") else "none"
    after_chosen = after if post.endswith("topk") else "none"
    over_all = before, phi, after_all
    chosen = "none", "identity", after_chosen
    if pre.endswith("topk"):
        over_all, chosen = ("none", "identity", "none"), (before, phi, after_chosen)
    names = "PRE_1", "PHI_1", "POST_1", "PRE_2", "PHI_2", "POST_2"
    return dict(zip(names, over_all + chosen, strict=True))


class Tile(NamedTuple):
    """Rows and columns of a program's tile, and the programs of a sequence."""

    rows: int
    block: int
    n_program: int


def pick_tile(n_expert: int, T: int) -> Tile:
    """Pick the tile for sequences of T tokens."""
    block = power_of_2(n_expert)
    rows = min(max(ELEMENTS // block, 1), power_of_2(max(T, 1)))
    return Tile(rows, block, divide_up(T, rows))


def forward(
    logits: Tensor,
    selection_bias: Tensor,
    c: Tensor,
    gamma: Tensor | None,
    phi: str,
    pre: str,
    post: str,
    top_k: int,
    n_sequence: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return weights, experts, scores, loads, probability, SCALARS (5,) and z-loss ().

    Inputs are contiguous.

    The z-loss is the first of the scalars once more, as a tensor of its own: a view would cost
    launches in the backward pass, and FSDP2 warns of views.
    """
    N, E = logits.shape
    T = N // n_sequence
    out = _fake_forward(logits, top_k, n_sequence)
    weights, experts, scores, loads, probability, scalars, z_loss = out
    tile = pick_tile(E, T)
    n_program = n_sequence * tile.n_program
    width = 2 * E + SCALARS.value
    sums = torch.empty(n_program, width, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        route_kernel[(n_program,)](
            logits,
            selection_bias,
            c,
            c if gamma is None else gamma,
            weights,
            experts,
            scores,
            sums,
            T,
            tile.n_program,
            E=E,
            TOP_K=top_k,
            **split_stages(phi, pre, post),
            GAMMA=gamma is not None,
            ROWS=tile.rows,
            BLOCK=tile.block,
            TOPS=power_of_2(top_k),
            maxnreg=REGISTERS,
            enable_fp_fusion=False,
        )
        route_sum_kernel[(n_sequence + 1,)](
            sums,
            probability,
            loads,
            scalars,
            z_loss,
            n_sequence,
            T,
            tile.n_program,
            E=E,
            TOP_K=top_k,
            ROWS=max(16, 2048 // tile.block),
            BLOCK=tile.block,
        )
    return out


def _fake_forward(logits: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Allocate what `forward` returns."""
    (N, E), (top_k, n_sequence) = logits.shape, others[-2:]
    experts = logits.new_empty(N, top_k, dtype=torch.int64)
    loads = logits.new_empty(n_sequence, E, dtype=torch.int64)
    shapes = (N, top_k), (N, E), (n_sequence, E), (SCALARS.value,), ()
    weights, scores, probability, scalars, z_loss = (logits.new_empty(shape) for shape in shapes)
    return weights, experts, scores, loads, probability, scalars, z_loss


def backward(
    logits: Tensor,
    experts: Tensor,
    c: Tensor,
    gamma: Tensor | None,
    phi: str,
    pre: str,
    post: str,
    n_sequence: int,
    d_weights: Tensor | None,
    d_probability: Tensor | None,
    d_z_loss: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits (N, E) and of γ (1,), 0 if there is none."""
    N, E = logits.shape
    T = N // n_sequence
    tile = pick_tile(E, T)
    n_program = n_sequence * tile.n_program
    d_logits = torch.empty_like(logits)
    has_gamma = gamma is not None and d_weights is not None
    n_scale = n_program if has_gamma else 0
    d_scale = torch.empty(n_scale, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        route_grad_kernel[(n_program,)](
            logits,
            experts,
            c,
            c if gamma is None else gamma,
            c if d_weights is None else d_weights.contiguous(),
            c if d_probability is None else d_probability.contiguous(),
            c if d_z_loss is None else d_z_loss.contiguous(),
            d_logits,
            d_scale,
            T,
            tile.n_program,
            N,
            E=E,
            TOP_K=experts.shape[1],
            **split_stages(phi, pre, post),
            GAMMA=has_gamma,
            GATES=d_weights is not None,
            BALANCE=d_probability is not None,
            Z_LOSS=d_z_loss is not None,
            ROWS=tile.rows,
            BLOCK=tile.block,
            maxnreg=REGISTERS,
            enable_fp_fusion=False,
        )
        return d_logits, d_scale.sum(0, keepdim=True)


def _fake_backward(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), logits.new_empty(1)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    logits, _, c, gamma, *ctx.formula, _, ctx.n_sequence = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1], c, gamma)


def _pass_back(
    backward: Any,
    ctx: Any,
    d_weights: Any,
    _: Any,
    d_scores: Any,
    __: Any,
    d_probability: Any,
    d_scalars: Any,
    d_z_loss: Any,
) -> tuple:
    assert d_scores is None and d_scalars is None, "`route` detaches them"
    gradients = d_weights, d_probability, d_z_loss
    d_logits, d_gamma = backward(*ctx.saved_tensors, *ctx.formula, ctx.n_sequence, *gradients)
    return d_logits, None, None, d_gamma if ctx.needs_input_grad[3] else None, *[None] * 5


compute_routing = define_operator(
    "route", forward, _fake_forward, backward, _fake_backward, _save_for_backward, _pass_back
)
