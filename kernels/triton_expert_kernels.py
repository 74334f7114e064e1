"""The Triton kernels of kernels/triton_experts.py: the experts' forward and backward pass.

A row is one (token, chosen expert) pair; the R = N·K rows are sorted by expert and not padded. `order` (R,) says which
entry of the (N, K) routing a row is, `inverse` (R,) at which row an entry is, `offsets` (E + 1,) where an expert's rows
begin, `table` which expert and rows are a tile's. The grid is as large as any routing can need, so the host does not
wait for the device. Masks end the tiles at an expert's last row. There are no atomics and no autotuning, so runs repeat
bit for bit.

    routing   count        how many rows each expert gets from each program's tokens; torch sums them up
              place        order, inverse, offsets
              table        tiles, and the experts by descending number of rows
    forward   up           hidden = x[token] @ w_in[e],  gated = gate · act(hidden)
              rows         y = gated @ w_out[e]
              combine      out[n] = Σ_k y[row of (n, k)]
    backward  down_grad    d_act = d_out[token] @ w_out[e]ᵀ,  d_gate = <d_act, act(hidden)>,
                           d_hidden = gate · d_act · act'(hidden),  gated again
              weight_grad  d_w_out[e] = gatedᵀ d_out[token],  d_w_in[e] = x[token]ᵀ d_hidden
              rows         d_row = d_hidden @ w_in[e]ᵀ,  then combine

Experts with a gate of their own (SwiGLU) have P = 2H pre-activations, of one product: act(a) · b. P is H otherwise.

Saved for the backward pass: the inputs, hidden (R, P) and indices. The gate's gradient is <d_out w_outᵀ, act(hidden)>,
so neither the experts' outputs nor gathered inputs are kept (SonicMoE, arXiv 2512.14080).

The activation is in the up-projection's epilogue, which computes each element once; its result needs a temporary
(R, H). If the down-projection applied it while loading, each of its C / Tile.cols column tiles would repeat about 20
operations per element, against 2 · 256 on tensor cores that are 15 times as fast: more than half their time. And
operands that pass through registers cannot be copied straight into shared memory.
"""
# Triton's stubs know neither constexpr arguments nor launch options; a kernel's arguments get their types at launch.
# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def read_tile(table, index):
    """Read (expert, first row, end of the expert's rows) of tile `index`; end 0: no tile."""
    return tl.load(table + 3 * index), tl.load(table + 3 * index + 1), tl.load(table + 3 * index + 2)


@triton.constexpr_function
def main_part(cols):
    """The largest power of two in a tile's width. A width of 1.5 times a power of two is computed as two parts."""
    return 1 << (cols.bit_length() - 1)


@triton.jit
def dot(a, b, total):
    """Return total + a @ b, exact in fp32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def load_tile(base, row, col, end, limit, STRIDE: tl.constexpr, BY_ROW: tl.constexpr, BY_COL: tl.constexpr):
    """Load rows `row`, columns `col` of base (_, STRIDE): BY_ROW: 0 from row `end` on, BY_COL: from `limit` on."""
    place = base + row[:, None] * STRIDE + col[None, :]
    if BY_ROW and BY_COL:
        return tl.load(place, mask=(row < end)[:, None] & (col < limit)[None, :], other=0.0)
    if BY_ROW:
        return tl.load(place, mask=(row < end)[:, None], other=0.0)
    if BY_COL:
        return tl.load(place, mask=(col < limit)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def multiply(
    a,
    a_row,
    b,
    expert,
    col,
    rest_col,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    LIMIT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply rows `a_row` of a (_, IN) by two groups of columns of b[expert], (IN, OUT) or transposed.

    Returns two products in fp32, of columns `col`, which count up to LIMIT, and of columns `rest_col`; if that is None,
    the first one twice.
    """
    k = tl.arange(0, DEPTH)
    a += a_row[:, None] * IN + k[None, :]
    b += expert.to(tl.int64) * IN * OUT
    STRIDE: tl.constexpr = IN if TRANSPOSED else OUT
    total = tl.zeros((ROWS, col.shape[0]), tl.float32)
    rest = total if rest_col is None else tl.zeros((ROWS, rest_col.shape[0]), tl.float32)
    for done in range(0, IN, DEPTH):
        a_tile = tl.load(a) if EVEN else tl.load(a, mask=(k < IN - done)[None, :], other=0.0)
        if TRANSPOSED:
            total = dot(a_tile, load_tile(b, col, k, LIMIT, IN - done, STRIDE, not EVEN, not EVEN).T, total)
        else:
            total = dot(a_tile, load_tile(b, k, col, IN - done, LIMIT, STRIDE, not EVEN, not EVEN), total)
            if rest_col is not None:
                rest = dot(a_tile, load_tile(b, k, rest_col, IN - done, OUT, STRIDE, not EVEN, not EVEN), rest)
        a += DEPTH
        b += DEPTH if TRANSPOSED else DEPTH * OUT
    return total, rest


@triton.jit
def halves(tile):
    """Split the tile's columns into two parts."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def quarters(tile):
    """Split the tile's columns into four parts: an epilogue that takes them in turn needs half the registers."""
    left, right = halves(tile)
    a, b = halves(left)
    c, d = halves(right)
    return a, b, c, d


@triton.jit
def normal(x):
    """Compute the standard normal distribution's (cdf, density), within 8e-8.

    erf by Abramowitz and Stegun 7.1.26 shares its exponential with the density and takes half the instructions of
    tl.erf.
    """
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    bell = tl.exp2(-0.7213475204444817 * x * x)
    tail = bell * t * (0.127414796 + t * (-0.142248368 + t * (0.710706870 + t * (-0.726576013 + t * 0.530702714))))
    return tl.where(x < 0, tail, 1.0 - tail), 0.3989422804014327 * bell


@triton.jit
def activation(h, SILU: tl.constexpr):
    """Compute (act(h), act'(h)) of GELU or SiLU."""
    if SILU:
        sigmoid = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * h))
        return h * sigmoid, sigmoid * (1.0 + h * (1.0 - sigmoid))
    cdf, density = normal(h)
    return h * cdf, cdf + h * density


@triton.jit
def chosen(experts, token, k, N, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """Compare the k-th choice of each token with every expert: int32 (tokens, EXPERTS), 1 where it is that one."""
    expert = tl.load(experts + token.to(tl.int64) * TOP_K + k, mask=token < N, other=-1)
    return (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit
def count_kernel(
    experts, counts, N, N_EXPERT: tl.constexpr, TOP_K: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr
):
    """Fill counts (programs, E): the rows that each expert gets from each program's STEP · STEPS tokens."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(N_EXPERT)
    total = tl.zeros((EXPERTS,), tl.int32)
    for step in range(STEPS):
        token = (tl.program_id(0) * STEPS + step) * STEP + tl.arange(0, STEP)
        for k in range(TOP_K):
            total += tl.sum(chosen(experts, token, k, N, TOP_K, EXPERTS), 0)
    e = tl.arange(0, EXPERTS)
    tl.store(counts + tl.program_id(0) * N_EXPERT + e, total, mask=e < N_EXPERT)


@triton.jit
def place_kernel(
    experts,
    counts,
    sums,
    order,
    inverse,
    offsets,
    N,
    N_EXPERT: tl.constexpr,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Fill order, inverse and offsets from counts (programs, E) and `sums`, their sums over programs up to each."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(N_EXPERT)
    e = tl.arange(0, EXPERTS)
    load = tl.load(sums + (tl.num_programs(0) - 1) * N_EXPERT + e, mask=e < N_EXPERT, other=0)
    ends = tl.cumsum(load, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + e + 1, ends, mask=e < N_EXPERT)
        tl.store(offsets, 0)
    mine = tl.program_id(0) * N_EXPERT + e
    before = tl.load(sums + mine, mask=e < N_EXPERT, other=0) - tl.load(counts + mine, mask=e < N_EXPERT, other=0)
    free = ends - load + before  # (EXPERTS,) the next free row of each expert
    for step in range(STEPS):
        token = (tl.program_id(0) * STEPS + step) * STEP + tl.arange(0, STEP)
        taken = tl.zeros((STEP, EXPERTS), tl.int32)
        for k in range(TOP_K):
            taken += chosen(experts, token, k, N, TOP_K, EXPERTS)
        following = free + tl.sum(taken, 0)
        place = tl.cumsum(taken, 0) - taken + free[None, :]  # (STEP, EXPERTS): rows of earlier tokens come before
        for k in range(TOP_K):
            here = chosen(experts, token, k, N, TOP_K, EXPERTS)
            row = tl.sum(here * place, 1)
            place += here  # a token that names an expert twice takes two rows
            entry = token.to(tl.int64) * TOP_K + k
            tl.store(inverse + entry, row, mask=token < N)
            tl.store(order + row, entry.to(tl.int32), mask=token < N)
        free = following


@triton.jit
def table_kernel(offsets, table, largest, N_TILE: tl.constexpr, N_EXPERT: tl.constexpr, ROWS: tl.constexpr):
    """Fill table (3 · N_TILE + 1,) with the tiles that `read_tile` reads, then their number, and `largest` (E,).

    Tiles are counted expert by expert; `largest` lists the experts by descending number of rows.
    """
    index = tl.program_id(0)
    e = tl.arange(0, triton.next_power_of_2(N_EXPERT))
    begin = tl.load(offsets + e, mask=e < N_EXPERT, other=0)
    end = tl.load(offsets + e + 1, mask=e < N_EXPERT, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)
    first = last - tiles
    mine = (first <= index) & (index < last)  # true of one expert at most
    tl.store(table + 3 * index, tl.sum(tl.where(mine, e, 0), 0))
    tl.store(table + 3 * index + 1, tl.sum(tl.where(mine, begin + (index - first) * ROWS, 0), 0))
    tl.store(table + 3 * index + 2, tl.sum(tl.where(mine, end, 0), 0))
    if index == 0:
        tl.store(table + 3 * N_TILE, tl.sum(tiles, 0))
    if index < N_EXPERT:
        load = tl.where(e < N_EXPERT, end - begin, -1)
        own = tl.sum(tl.where(e == index, load, 0), 0)
        rank = tl.sum(((load > own) | (load == own) & (e < index)).to(tl.int32), 0)
        tl.store(largest + rank, index)


@triton.jit
def store_activations(
    hidden, gated, part, up, row, col, gate, inside, H: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr
):
    """Store pre-activations `part` (and `up`, if GATED), and gate · act(part) (· up), at rows `row`, columns `col`."""
    P: tl.constexpr = 2 * H if GATED else H
    place = row[:, None] * P + col[None, :]
    part = part.to(hidden.dtype.element_ty)
    tl.store(hidden + place, part, mask=inside)
    act, _ = activation(part.to(tl.float32), SILU)
    act *= gate
    if GATED:
        up = up.to(hidden.dtype.element_ty)
        tl.store(hidden + place + H, up, mask=inside)
        act *= up.to(tl.float32)
    tl.store(gated + row[:, None] * H + col[None, :], act.to(gated.dtype.element_ty), mask=inside)


@triton.jit
def up_kernel(
    x,
    w_in,
    w_rest,
    weights,
    order,
    table,
    hidden,
    gated,
    C: tl.constexpr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill hidden (R, P) = x[token] @ w_in[e], rounded, and gated (R, H) = gate · act(hidden).

    GATED experts have P = 2H pre-activations a and b, and gated = gate · act(a) · b: a tile has COLS / 2 columns of
    each. DESCRIBED: w_in and w_rest are tensor descriptors of w_in as (E·C, P), for a tile's two groups of columns.

    In all kernels, the programs of one tile of rows are neighbours, and so are an expert's tiles: programs that run at
    the same time read the same rows and weights from the L2.
    """
    P: tl.constexpr = 2 * H if GATED else H
    WIDTH: tl.constexpr = COLS // 2 if GATED else COLS
    MAIN: tl.constexpr = main_part(WIDTH)
    REST: tl.constexpr = WIDTH if GATED else WIDTH - MAIN
    N_COL: tl.constexpr = (H + WIDTH - 1) // WIDTH
    EVEN: tl.constexpr = C % DEPTH == 0 and H % WIDTH == 0
    expert, first, end = read_tile(table, tl.program_id(0) // N_COL)
    if end == 0:
        return
    first_col = tl.program_id(0) % N_COL * WIDTH
    rest_col = first_col + (H if GATED else MAIN)
    row = tl.arange(0, ROWS)
    token = (tl.load(order + tl.minimum(first + row, end - 1)) // TOP_K).to(tl.int64)
    if DESCRIBED:
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
        total, rest = multiply(x, token, w_in, expert, col, others, C, P, H, False, EVEN, ROWS, DEPTH)
    entry = tl.load(order + tl.minimum(first + row, end - 1))  # again: in the loop its registers were better used
    gate = tl.load(weights + entry).to(tl.float32)[:, None]
    hidden += first.to(tl.int64) * P
    gated += first.to(tl.int64) * H
    parts = quarters(total)
    ups = quarters(rest) if GATED else parts
    for i in tl.static_range(4):
        col = first_col + i * (MAIN // 4) + tl.arange(0, MAIN // 4)
        inside = (first + row < end)[:, None] & (col < H)[None, :]
        store_activations(hidden, gated, parts[i], ups[i], row, col, gate, inside, H, GATED, SILU)
    if REST > 0 and not GATED:
        parts = halves(rest)
        for i in tl.static_range(2):
            col = rest_col + i * (REST // 2) + tl.arange(0, REST // 2)
            inside = (first + row < end)[:, None] & (col < H)[None, :]
            store_activations(hidden, gated, parts[i], parts[i], row, col, gate, inside, H, GATED, SILU)


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
    N_COL: tl.constexpr = (OUT + COLS - 1) // COLS
    EVEN: tl.constexpr = IN % DEPTH == 0 and OUT % COLS == 0
    expert, first, end = read_tile(table, tl.program_id(0) // N_COL)
    if end == 0:
        return
    col = tl.program_id(0) % N_COL * COLS + tl.arange(0, COLS)
    row = first + tl.arange(0, ROWS)
    a_row = tl.minimum(row, end - 1).to(tl.int64)
    total, _ = multiply(a, a_row, b, expert, col, None, IN, OUT, OUT, TRANSPOSED, EVEN, ROWS, DEPTH)
    place = row.to(tl.int64)[:, None] * OUT + col[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (col < OUT)[None, :])


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
    FLAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """As rows_kernel, by as many programs as run at once; IN is a multiple of DEPTH.

    a, b and b_rest are tensor descriptors: of a, and of b's rows under one another for a tile's first and other
    columns. Each program takes every so-many-th tile. With FLAT its loops become one, so that the loads of the next
    tile are under way while it stores this one.
    """
    N_COL: tl.constexpr = (OUT + COLS - 1) // COLS
    MAIN: tl.constexpr = main_part(COLS)
    for tile in tl.range(tl.program_id(0), tl.load(table + 3 * N_TILE) * N_COL, tl.num_programs(0), flatten=FLAT):
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
        col = first_col + tl.arange(0, MAIN)
        place = out + row.to(tl.int64)[:, None] * OUT
        tl.store(place + col[None, :], total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (col < OUT)[None, :])
        if COLS > MAIN:
            col = first_col + MAIN + tl.arange(0, COLS - MAIN)
            inside = (row < end)[:, None] & (col < OUT)[None, :]
            tl.store(place + col[None, :], rest.to(out.dtype.element_ty), mask=inside)


@triton.jit
def down_grad_kernel(
    d_out,
    w_out,
    weights,
    order,
    table,
    hidden,
    d_hidden,
    gated,
    d_gate,
    C: tl.constexpr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill d_hidden (R, P), gated (R, H) again, and d_gate, from d_act = d_out[token] @ w_out[e]ᵀ.

    d_hidden = gate · d_act · act'(hidden), of GATED experts gate · d_act · (b act'(a), act(a)). d_gate (R, column
    tiles) fp32 gets each tile's share of <d_act, act(hidden)>, in the order of the entries.
    """
    P: tl.constexpr = 2 * H if GATED else H
    N_COL: tl.constexpr = (H + COLS - 1) // COLS
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
    PARTS: tl.constexpr = 8 if GATED else 4  # a block must not take more than 128 registers of a thread
    for i in tl.static_range(PARTS):
        d_act = halves(parts[i // 2])[i % 2] if GATED else parts[i]
        col = first_col + i * (COLS // PARTS) + tl.arange(0, COLS // PARTS)
        place = row[:, None] * P + col[None, :]
        inside = (row < end)[:, None] & (col < H)[None, :]
        act, slope = activation(tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32), SILU)
        if GATED:
            up = tl.load(hidden + place + H, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_hidden + place + H, (gate * d_act * act).to(d_hidden.dtype.element_ty), mask=inside)
            act *= up
            slope *= up
            share += tl.sum(d_act * act, 1)
            d_act *= gate
            act *= gate
        d_pre = d_act * slope if GATED else gate * d_act * slope
        again = act if GATED else gate * act
        tl.store(d_hidden + place, d_pre.to(d_hidden.dtype.element_ty), mask=inside)
        tl.store(gated + row[:, None] * H + col[None, :], again.to(gated.dtype.element_ty), mask=inside)
        if not GATED:  # last: it then takes fewer registers
            share += tl.sum(d_act * act, 1)
    tl.store(d_gate + entry.to(tl.int64) * N_COL + first_col // COLS, share, mask=row < end)


@triton.jit
def weight_grad_kernel(
    a,
    b,
    order,
    offsets,
    largest,
    out,
    A: tl.constexpr,
    B: tl.constexpr,
    GATHER_A: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill out (E, A, B): the sum over an expert's rows of aᵀ b. One of a (_, A), b (_, B) is by token, one by row.

    `largest` (E,) lists the experts by descending number of rows: the longest programs must not start last.

    The loop loads the next step's tokens while it multiplies: an index that is loaded in the step that uses it splits
    Triton's pipeline into two levels, which leaves two buffers and drains them in every step. Past an expert's end only
    the operand by row is masked: its zeros meet a row of the expert's last token.
    """
    N_COL: tl.constexpr = (B + COLS - 1) // COLS
    N_TILE: tl.constexpr = (A + ROWS - 1) // ROWS * N_COL
    MAIN: tl.constexpr = main_part(COLS)
    EVEN: tl.constexpr = A % ROWS == 0 and B % COLS == 0
    expert = tl.load(largest + tl.program_id(0) // N_TILE)
    tile = tl.program_id(0) % N_TILE
    a_col = tile // N_COL * ROWS + tl.arange(0, ROWS)
    b_col = tile % N_COL * COLS + tl.arange(0, MAIN)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    step = tl.arange(0, DEPTH)
    last = end - 1
    token = tl.load(order + tl.minimum(first + step, last), mask=first + 0 * step < end, other=0) // TOP_K
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
    place = out + expert.to(tl.int64) * A * B + a_col[:, None] * B
    tl.store(place + b_col[None, :], total.to(out.dtype.element_ty), mask=(a_col < A)[:, None] & (b_col < B)[None, :])
    if COLS > MAIN:
        inside = (a_col < A)[:, None] & (c_col < B)[None, :]
        tl.store(place + c_col[None, :], rest.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(rows, inverse, out, N, C: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Fill out (N, C): the fp32 sum of each token's rows (R, C), in the order of its choices."""
    N_COL: tl.constexpr = (C + COLS - 1) // COLS
    token = tl.program_id(0) // N_COL * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % N_COL * COLS + tl.arange(0, COLS)
    inside = (token < N)[:, None] & (col < C)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in tl.range(0, TOP_K, loop_unroll_factor=4):
        row = tl.load(inverse + token * TOP_K + k, mask=token < N, other=0).to(tl.int64)
        total += tl.load(rows + row[:, None] * C + col[None, :], mask=inside, other=0.0).to(tl.float32)
    place = token.to(tl.int64)[:, None] * C + col[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
