"""The Triton kernels of kernels/triton_experts.py: the experts' forward and backward pass.

A row is one (token, chosen expert) pair; kernels/triton_schedule.py sorts the R = N·K rows by
expert and cuts them into tiles, listed in `table`. The grid is as large as any routing can need, so
the host does not wait for the device. Masks end the tiles at an expert's last row. There are no
atomics and no autotuning, so runs repeat bit for bit.

    forward   up           hidden = x[token] @ w_in[e],  activated = gate · act(hidden)
              rows         y = activated @ w_out[e]
              combine      out[n] = Σ_k y[row of (n, k)]
    backward  down_grad    d_act = d_out[token] @ w_out[e]ᵀ,  d_gate = <d_act, act(hidden)>,
                           d_hidden = gate · d_act · act'(hidden),  activated again
              weight_grad  d_w_out[e] = activatedᵀ d_out[token],  d_w_in[e] = x[token]ᵀ d_hidden
              rows         d_row = d_hidden @ w_in[e]ᵀ,  then combine

Experts with a gate of their own (SwiGLU) have P = 2H pre-activations, of one product: act(a) · b. P
is H otherwise.

Saved for the backward pass: the inputs, hidden (R, P) and indices. The gate's gradient is <d_out
w_outᵀ, act(hidden)>, so neither the experts' outputs nor gathered inputs are kept (SonicMoE, arXiv
2512.14080).

The activation is in the up-projection's epilogue, which computes each element once; its result
needs a temporary (R, H). If the down-projection applied it while loading, each of its C / Tile.cols
column tiles would repeat about 20 operations per element, against 2 · 256 on tensor cores that are
15 times as fast: more than half their time. And operands that pass through registers cannot be
copied straight into shared memory.
"""

import triton
import triton.language as tl

from kernels.triton_schedule import read_tile
from kernels.triton_tiles import (
    activation,
    dot,
    halves,
    load_float32,
    load_tile,
    main_part,
    multiply,
    quarters,
    tile_mask,
    tile_offsets,
)


@triton.jit
def store_activations(
    hidden,
    activated,
    part,
    up,
    row,
    col,
    gate,
    inside,
    H: tl.constexpr,
    GLU: tl.constexpr,
    SILU: tl.constexpr,
):
    """Store pre-activations `part`, with GLU `up`, and gate · act(part), with GLU · up."""
    P: tl.constexpr = 2 * H if GLU else H
    place = tile_offsets(row, col, P)
    part = part.to(hidden.dtype.element_ty)
    tl.store(hidden + place, part, mask=inside)
    act, _ = activation(part.to(tl.float32), SILU)
    act *= gate
    if GLU:
        up = up.to(hidden.dtype.element_ty)
        tl.store(hidden + place + H, up, mask=inside)
        act *= up.to(tl.float32)
    tl.store(
        activated + row[:, None] * H + col[None, :], act.to(activated.dtype.element_ty), mask=inside
    )


@triton.jit
def up_kernel(
    x,
    w_in,
    w_rest,
    weights,
    order,
    table,
    hidden,
    activated,
    C: tl.constexpr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    GLU: tl.constexpr,
    SILU: tl.constexpr,
    USE_TMA: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill hidden (R, P) = x[token] @ w_in[e], rounded, and activated (R, H) = gate · act(hidden).

    GLU experts have P = 2H pre-activations a and b, and activated = gate · act(a) · b: a tile has
    COLS / 2 columns of each. USE_TMA: w_in and w_rest are tensor descriptors of w_in as (E·C, P),
    for a tile's two groups of columns.

    In all kernels, the programs of one tile of rows are neighbours, and so are an expert's tiles:
    programs that run at the same time read the same rows and weights from the L2.
    """
    P: tl.constexpr = 2 * H if GLU else H
    WIDTH: tl.constexpr = COLS // 2 if GLU else COLS
    MAIN: tl.constexpr = main_part(WIDTH)
    REST: tl.constexpr = WIDTH if GLU else WIDTH - MAIN
    N_COL: tl.constexpr = tl.cdiv(H, WIDTH)
    EVEN: tl.constexpr = C % DEPTH == 0 and H % WIDTH == 0
    expert, first, end = read_tile(table, tl.program_id(0) // N_COL)
    if end == 0:
        return
    first_col = tl.program_id(0) % N_COL * WIDTH
    rest_col = first_col + (H if GLU else MAIN)
    row = tl.arange(0, ROWS)
    token = (tl.load(order + tl.minimum(first + row, end - 1)) // TOP_K).to(tl.int64)
    if USE_TMA:
        total, rest = tl.zeros((ROWS, MAIN), tl.float32), tl.zeros((ROWS, REST), tl.float32)
        a = x + token[:, None] * C + tl.arange(0, DEPTH)[None, :]
        for done in range(0, C, DEPTH):
            a_tile = tl.load(a)
            total = dot(a_tile, w_in.load([expert * C + done, first_col]), total)
            rest = dot(a_tile, w_rest.load([expert * C + done, rest_col]), rest)
            a += DEPTH
    else:
        others = None if REST == 0 else rest_col + tl.arange(0, REST)
        col = first_col + tl.arange(0, MAIN)
        total, rest = multiply(
            x, token, w_in, expert, col, others, C, P, H, False, EVEN, ROWS, DEPTH
        )
    # again: in the loop its registers were better used
    entry = tl.load(order + tl.minimum(first + row, end - 1))
    gate = tl.load(weights + entry).to(tl.float32)[:, None]
    hidden += first.to(tl.int64) * P
    activated += first.to(tl.int64) * H
    parts = quarters(total)
    if REST > 0 and not GLU:  # half as many columns
        parts = parts + halves(rest)
    ups = quarters(rest) if GLU else parts
    for i in tl.static_range(len(parts)):
        col = first_col + i * (MAIN // 4) + tl.arange(0, MAIN // 4)
        inside = tile_mask(first + row < end, col < H)
        store_activations(hidden, activated, parts[i], ups[i], row, col, gate, inside, H, GLU, SILU)


@triton.jit
def rows_kernel(
    a,
    b,
    table,
    out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill out (R, OUT) = a (R, IN) @ b[e], for b (E, IN, OUT) or, TRANSPOSED, (E, OUT, IN)."""
    N_COL: tl.constexpr = tl.cdiv(OUT, COLS)
    EVEN: tl.constexpr = IN % DEPTH == 0 and OUT % COLS == 0
    expert, first, end = read_tile(table, tl.program_id(0) // N_COL)
    if end == 0:
        return
    col = tl.program_id(0) % N_COL * COLS + tl.arange(0, COLS)
    row = first + tl.arange(0, ROWS)
    a_row = tl.minimum(row, end - 1).to(tl.int64)
    total, _ = multiply(a, a_row, b, expert, col, None, IN, OUT, OUT, TRANSPOSED, EVEN, ROWS, DEPTH)
    place = tile_offsets(row.to(tl.int64), col, OUT)
    inside = tile_mask(row < end, col < OUT)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(base, row, col, tile, end, STRIDE: tl.constexpr):
    """Store a tile in base (_, STRIDE): rows before `end`, columns before STRIDE."""
    place = base + row.to(tl.int64)[:, None] * STRIDE + col[None, :]
    inside = tile_mask(row < end, col < STRIDE)
    tl.store(place, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def rows_ahead_kernel(
    a,
    b,
    b_rest,
    table,
    out,
    N_TILE: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """As rows_kernel, by as many programs as run at once; IN is a multiple of DEPTH.

    a, b and b_rest are tensor descriptors: of a, and of b's rows under one another for a tile's
    first and other columns. Each program takes every so-many-th tile. The loops are not flattened
    into one: the next tile's loads would be under way while this one is stored, but ptxas then lets
    no two products of sm_90 overlap.
    """
    N_COL: tl.constexpr = tl.cdiv(OUT, COLS)
    MAIN: tl.constexpr = main_part(COLS)
    for tile in range(tl.program_id(0), tl.load(table + 3 * N_TILE) * N_COL, tl.num_programs(0)):
        expert, first, end = read_tile(table, tile // N_COL)
        first_col = tile % N_COL * COLS
        total = tl.zeros((ROWS, MAIN), tl.float32)
        if COLS > MAIN:
            rest = tl.zeros((ROWS, COLS - MAIN), tl.float32)
        for done in range(0, IN, DEPTH):
            a_tile = a.load([first, done])
            if TRANSPOSED:
                total = dot(a_tile, b.load([expert * OUT + first_col, done]).T, total)
                if COLS > MAIN:
                    rest = dot(a_tile, b_rest.load([expert * OUT + first_col + MAIN, done]).T, rest)
            else:
                total = dot(a_tile, b.load([expert * IN + done, first_col]), total)
                if COLS > MAIN:
                    rest = dot(a_tile, b_rest.load([expert * IN + done, first_col + MAIN]), rest)
        row = first + tl.arange(0, ROWS)
        store_tile(out, row, first_col + tl.arange(0, MAIN), total, end, OUT)
        if COLS > MAIN:
            col = first_col + MAIN + tl.arange(0, COLS - MAIN)
            store_tile(out, row, col, rest, end, OUT)


@triton.jit
def down_grad_kernel(
    d_out,
    w_out,
    weights,
    order,
    table,
    hidden,
    d_hidden,
    activated,
    d_gate,
    C: tl.constexpr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    GLU: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill d_hidden (R, P), activated (R, H) and d_gate from d_act = d_out[token] @ w_out[e]ᵀ.

    d_hidden = gate · d_act · act'(hidden), of GLU experts gate · d_act · (b act'(a), act(a)).
    d_gate (R, column tiles) fp32 gets each tile's share of <d_act, act(hidden)>, in the order of
    the entries.
    """
    P: tl.constexpr = 2 * H if GLU else H
    N_COL: tl.constexpr = tl.cdiv(H, COLS)
    EVEN: tl.constexpr = C % DEPTH == 0 and H % COLS == 0
    expert, first, end = read_tile(table, tl.program_id(0) // N_COL)
    if end == 0:
        return
    first_col = tl.program_id(0) % N_COL * COLS
    col = first_col + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    entry = tl.load(order + tl.minimum(first + row, end - 1))
    token = (entry // TOP_K).to(tl.int64)
    total, _ = multiply(d_out, token, w_out, expert, col, None, C, H, H, True, EVEN, ROWS, DEPTH)
    entry = tl.load(order + tl.minimum(first + row, end - 1))
    gate = tl.load(weights + entry).to(tl.float32)[:, None]
    row = (first + row).to(tl.int64)
    share = tl.zeros((ROWS,), tl.float32)
    parts = quarters(total)
    # a block must not take more than 128 registers of a thread
    PARTS: tl.constexpr = 8 if GLU else 4
    for i in tl.static_range(PARTS):
        d_act = halves(parts[i // 2])[i % 2] if GLU else parts[i]
        col = first_col + i * (COLS // PARTS) + tl.arange(0, COLS // PARTS)
        place = tile_offsets(row, col, P)
        inside = tile_mask(row < end, col < H)
        act, slope = activation(load_float32(hidden + place, mask=inside), SILU)
        if GLU:
            up = load_float32(hidden + place + H, mask=inside)
            tl.store(
                d_hidden + place + H,
                (gate * d_act * act).to(d_hidden.dtype.element_ty),
                mask=inside,
            )
            act *= up
            slope *= up
            share += tl.sum(d_act * act, 1)
            d_act *= gate
            act *= gate
        d_pre = d_act * slope if GLU else gate * d_act * slope
        again = act if GLU else gate * act
        tl.store(d_hidden + place, d_pre.to(d_hidden.dtype.element_ty), mask=inside)
        tl.store(
            activated + row[:, None] * H + col[None, :],
            again.to(activated.dtype.element_ty),
            mask=inside,
        )
        if not GLU:  # last: it then takes fewer registers
            share += tl.sum(d_act * act, 1)
    tl.store(d_gate + entry.to(tl.int64) * N_COL + first_col // COLS, share, mask=row < end)


@triton.jit
def share_kernel(
    offsets, shares, share, N_GROUP: tl.constexpr, N_EXPERT: tl.constexpr, BY_EXPERT: tl.constexpr
):
    """Fill shares (N_GROUP, 4): experts [before, until) and rows [start, stop) of each group.

    Where loads are nearly even, a group has BY_EXPERT whole experts. Else it has rows [group *
    share, group * share + share), of whatever experts; an expert without rows is in one group, too.
    """
    group = tl.program_id(0)
    g = tl.arange(0, triton.next_power_of_2(N_GROUP))
    rows = tl.load(offsets + tl.minimum((g + 1) * BY_EXPERT, N_EXPERT))
    rows -= tl.load(offsets + tl.minimum(g * BY_EXPERT, N_EXPERT))
    before = tl.minimum(group * BY_EXPERT, N_EXPERT)
    until = tl.minimum(before + BY_EXPERT, N_EXPERT)
    start = tl.load(offsets + before)
    stop = tl.load(offsets + until)
    # a share cuts experts, whose parts take about a tenth of its time (H200, 2026-11-26)
    if tl.max(rows, 0) > share + share // 16:
        start = group * share
        stop = start + share
        e = tl.arange(0, triton.next_power_of_2(N_EXPERT))
        first = tl.load(offsets + e, mask=e < N_EXPERT, other=2**31 - 1)
        # an expert without rows behind the last row counts as one that has it
        last = tl.maximum(tl.load(offsets + N_EXPERT), 1) - 1
        first = tl.where(e < N_EXPERT, tl.minimum(first, last), first)
        end = tl.load(offsets + e + 1, mask=e < N_EXPERT, other=2**31 - 1)
        before = tl.sum(((first < start) & (end <= start)).to(tl.int32), 0)
        until = tl.sum((first < stop).to(tl.int32), 0)
    tl.store(shares + 4 * group, before)
    tl.store(shares + 4 * group + 1, until)
    tl.store(shares + 4 * group + 2, start)
    tl.store(shares + 4 * group + 3, stop)


@triton.jit
def weight_grad_kernel(
    a,
    b,
    order,
    offsets,
    shares,
    out,
    partial,
    A: tl.constexpr,
    B: tl.constexpr,
    GATHER_A: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill out (E, A, B): the sum over an expert's rows of aᵀ b; or out and partial (groups, A, B).

    One of a (_, A), b (_, B) is by token, one by row.

    A group of programs, one for each tile of (A, B), reads the rows of its line in `shares`: about
    equally many under any loads. An expert's rows in the group where they start are summed in
    `out`, its rows in each later group in that group's part of `partial`: add_partial_kernel adds
    them.

    The loop loads the next step's tokens while it multiplies: an index that is loaded in the step
    that uses it splits Triton's pipeline into two levels, which leaves two buffers and drains them
    in every step. Past a segment's end only the operand by row is masked: its zeros meet a row of
    the segment's last token.
    """
    N_COL: tl.constexpr = tl.cdiv(B, COLS)
    N_TILE: tl.constexpr = tl.cdiv(A, ROWS) * N_COL
    MAIN: tl.constexpr = main_part(COLS)
    EVEN: tl.constexpr = A % ROWS == 0 and B % COLS == 0
    group = tl.program_id(0) // N_TILE
    tile = tl.program_id(0) % N_TILE
    line = shares + 4 * group
    for expert in range(tl.load(line).to(tl.int64), tl.load(line + 1).to(tl.int64)):
        a_col = tile // N_COL * ROWS + tl.arange(0, ROWS)
        b_col = tile % N_COL * COLS + tl.arange(0, MAIN)
        step = tl.arange(0, DEPTH)
        first = tl.maximum(tl.load(offsets + expert), tl.load(line + 2))
        end = tl.minimum(tl.load(offsets + expert + 1), tl.load(line + 3))
        last = end - 1
        token = (
            tl.load(order + tl.minimum(first + step, last), mask=first + 0 * step < end, other=0)
            // TOP_K
        )
        total = tl.zeros((ROWS, MAIN), tl.float32)
        if COLS > MAIN:
            c_col = tile % N_COL * COLS + MAIN + tl.arange(0, COLS - MAIN)
            rest = tl.zeros((ROWS, COLS - MAIN), tl.float32)
        for done in range(first, end, DEPTH):
            row = done + step
            following = tl.load(order + tl.minimum(row + DEPTH, last)) // TOP_K
            a_row = (token if GATHER_A else row).to(tl.int64)
            b_row = (row if GATHER_A else token).to(tl.int64)
            a_tile = load_tile(a, a_row, a_col, end, A, A, not GATHER_A, not EVEN).T
            total = dot(a_tile, load_tile(b, b_row, b_col, end, B, B, GATHER_A, not EVEN), total)
            if COLS > MAIN:
                rest = dot(a_tile, load_tile(b, b_row, c_col, end, B, B, GATHER_A, not EVEN), rest)
            token = following
        # not before the loop, which needs the registers
        target = out + expert * (A * B)
        if tl.load(offsets + expert) < tl.load(line + 2):
            target = partial + group.to(tl.int64) * A * B
        place = target + a_col[:, None] * B
        tl.store(place + b_col[None, :], total, mask=tile_mask(a_col < A, b_col < B))
        if COLS > MAIN:
            inside = tile_mask(a_col < A, c_col < B)
            tl.store(place + c_col[None, :], rest, mask=inside)


@triton.jit
def add_partial_kernel(
    offsets,
    shares,
    partial,
    out,
    share,
    SIZE: tl.constexpr,
    N_EXPERT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add to out (E, SIZE) the sums of experts' rows in later groups, partial (groups, SIZE)."""
    N_BLOCK: tl.constexpr = tl.cdiv(SIZE, BLOCK)
    group = tl.program_id(0) // N_BLOCK + 1
    expert = tl.load(shares + 4 * group).to(tl.int64)
    start = tl.load(shares + 4 * group + 2)
    if expert < N_EXPERT:
        first = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        # the expert's rows start in the group before this one
        if (first < start) & (first >= start - share):
            index = tl.program_id(0) % N_BLOCK * BLOCK + tl.arange(0, BLOCK)
            target = out + expert * SIZE + index
            total = tl.load(target, mask=index < SIZE)
            for later in range(group.to(tl.int64), (end + share - 1) // share):
                total += tl.load(partial + later * SIZE + index, mask=index < SIZE)
            tl.store(target, total, mask=index < SIZE)


@triton.jit
def combine_kernel(
    rows,
    inverse,
    out,
    N,
    C: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Fill out (N, C): the fp32 sum of each token's rows (R, C), in the order of its choices."""
    N_COL: tl.constexpr = tl.cdiv(C, COLS)
    token = tl.program_id(0) // N_COL * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % N_COL * COLS + tl.arange(0, COLS)
    inside = tile_mask(token < N, col < C)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in tl.range(0, TOP_K, loop_unroll_factor=4):
        row = tl.load(inverse + token * TOP_K + k, mask=token < N, other=0).to(tl.int64)
        total += load_float32(rows + row[:, None] * C + col[None, :], mask=inside)
    place = tile_offsets(token.to(tl.int64), col, C)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
