"""The Triton kernels of kernels/triton_experts.py: the experts' forward and backward pass.

A row is one (token, chosen expert) pair; the R = N·K rows are sorted by expert and not padded. `order` (R,) says which
entry of the (N, K) routing a row is, `inverse` (R,) at which row an entry is, `offsets` (E + 1,) where an expert's rows
begin. Each program finds its expert and rows in `offsets`, and the grid is as large as any routing can need, so the
host neither waits for the device nor prepares a schedule. Masks end the tiles at an expert's last row. There are no
atomics and no autotuning, so runs repeat bit for bit.

    forward   up           hidden = x[token] @ w_in[e],  gated = gate · gelu(hidden)
              rows         y = gated @ w_out[e]
              combine      out[n] = Σ_k y[row of (n, k)]
    backward  down_grad    d_act = d_out[token] @ w_out[e]ᵀ,  d_gate = <d_act, gelu(hidden)>,
                           d_hidden = gate · d_act · gelu'(hidden),  gated again
              weight_grad  d_w_out[e] = gatedᵀ d_out[token],  d_w_in[e] = x[token]ᵀ d_hidden
              rows         d_row = d_hidden @ w_in[e]ᵀ,  then combine

Saved for the backward pass: the inputs, hidden (R, H) and indices. The gate's gradient is <d_out w_outᵀ, gelu(hidden)>,
so neither the experts' outputs nor gathered inputs are kept (SonicMoE, arXiv 2512.14080).

GELU is in the up-projection's epilogue, which computes each element once; its result needs a temporary (R, H). If the
down-projection applied it while loading, each of its C / Tile.cols column tiles would repeat about 20 operations per
element, against 2 · 256 on tensor cores that are 15 times as fast: more than half their time. And operands that pass
through registers cannot be copied straight into shared memory.
"""
# Triton's stubs know neither constexpr arguments nor launch options; a kernel's arguments get their types at launch.
# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def find_tile(offsets, index, N_EXPERT: tl.constexpr, ROWS: tl.constexpr):
    """Find (expert, first row, end of the expert's rows) of tile `index`, counted expert by expert; end 0: no tile."""
    e = tl.arange(0, triton.next_power_of_2(N_EXPERT))
    begin = tl.load(offsets + e, mask=e < N_EXPERT, other=0)
    end = tl.load(offsets + e + 1, mask=e < N_EXPERT, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)
    first = last - tiles
    mine = (first <= index) & (index < last)  # true of one expert at most
    expert = tl.sum(tl.where(mine, e, 0), 0)
    row = tl.sum(tl.where(mine, begin + (index - first) * ROWS, 0), 0)
    return expert, row, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def dot(a, b, total):
    """Return total + a @ b, exact in fp32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def multiply(
    a,
    a_row,
    b,
    expert,
    col,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply rows `a_row` of a (_, IN) by columns `col` of b[expert], (IN, OUT) or transposed: fp32 (ROWS, COLS)."""
    k = tl.arange(0, DEPTH)
    a += a_row[:, None] * IN + k[None, :]
    b += expert.to(tl.int64) * IN * OUT
    if TRANSPOSED:
        b += k[:, None] + col[None, :] * IN
    else:
        b += k[:, None] * OUT + col[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for done in range(0, IN, DEPTH):
        if IN % DEPTH == 0 and OUT % COLS == 0:
            a_tile, b_tile = tl.load(a), tl.load(b)
        else:
            a_tile = tl.load(a, mask=(k < IN - done)[None, :], other=0.0)
            b_tile = tl.load(b, mask=(k < IN - done)[:, None] & (col < OUT)[None, :], other=0.0)
        total = dot(a_tile, b_tile, total)
        a += DEPTH
        b += DEPTH if TRANSPOSED else DEPTH * OUT
    return total


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
def index_kernel(order64, order, inverse, R, BLOCK: tl.constexpr):
    """Fill order (R,) int32 from order64 (R,) int64, and inverse (R,) int32 so that inverse[order] = 0 … R - 1."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(order64 + row, mask=row < R, other=0)
    tl.store(order + row, entry.to(tl.int32), mask=row < R)
    tl.store(inverse + entry, row, mask=row < R)


@triton.jit
def up_kernel(
    x,
    w_in,
    weights,
    order,
    offsets,
    hidden,
    gated,
    C: tl.constexpr,
    H: tl.constexpr,
    N_EXPERT: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill hidden = x[token] @ w_in[e], rounded, and gated = gate · gelu(hidden), both (R, H).

    In all kernels, the programs of one tile of rows are neighbours, and so are an expert's tiles: programs that run at
    the same time read the same rows and weights from the L2.
    """
    N_COL: tl.constexpr = (H + COLS - 1) // COLS
    expert, first, end = find_tile(offsets, tl.program_id(0) // N_COL, N_EXPERT, ROWS)
    if end == 0:
        return
    first_col = tl.program_id(0) % N_COL * COLS
    col = first_col + tl.arange(0, COLS)
    row = first + tl.arange(0, ROWS)
    entry = tl.load(order + tl.minimum(row, end - 1))
    token = (entry // TOP_K).to(tl.int64)
    total = multiply(x, token, w_in, expert, col, C, H, False, ROWS, COLS, DEPTH).to(hidden.dtype.element_ty)
    gate = tl.load(weights + entry).to(tl.float32)[:, None]
    parts = quarters(total)
    for part in tl.static_range(4):
        col = first_col + part * (COLS // 4) + tl.arange(0, COLS // 4)
        place = row.to(tl.int64)[:, None] * H + col[None, :]
        inside = (row < end)[:, None] & (col < H)[None, :]
        h = parts[part].to(tl.float32)
        cdf, _ = normal(h)
        tl.store(hidden + place, parts[part], mask=inside)
        tl.store(gated + place, (gate * h * cdf).to(gated.dtype.element_ty), mask=inside)


@triton.jit
def rows_kernel(
    a,
    b,
    offsets,
    out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    N_EXPERT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill out (R, OUT) = a (R, IN) @ b[e], for b (E, IN, OUT) or, TRANSPOSED, (E, OUT, IN)."""
    N_COL: tl.constexpr = (OUT + COLS - 1) // COLS
    expert, first, end = find_tile(offsets, tl.program_id(0) // N_COL, N_EXPERT, ROWS)
    if end == 0:
        return
    col = tl.program_id(0) % N_COL * COLS + tl.arange(0, COLS)
    row = first + tl.arange(0, ROWS)
    a_row = tl.minimum(row, end - 1).to(tl.int64)
    total = multiply(a, a_row, b, expert, col, IN, OUT, TRANSPOSED, ROWS, COLS, DEPTH)
    place = row.to(tl.int64)[:, None] * OUT + col[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (col < OUT)[None, :])


@triton.jit
def down_grad_kernel(
    d_out,
    w_out,
    weights,
    order,
    offsets,
    hidden,
    d_hidden,
    gated,
    d_gate,
    C: tl.constexpr,
    H: tl.constexpr,
    N_EXPERT: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill d_hidden = gate · d_act · gelu'(hidden), gated = gate · gelu(hidden), both (R, H), and d_gate.

    d_act = d_out[token] @ w_out[e]ᵀ; d_gate (R, column tiles) fp32 gets each tile's share of <d_act, gelu(hidden)>, in
    the order of the entries.
    """
    N_COL: tl.constexpr = (H + COLS - 1) // COLS
    expert, first, end = find_tile(offsets, tl.program_id(0) // N_COL, N_EXPERT, ROWS)
    if end == 0:
        return
    first_col = tl.program_id(0) % N_COL * COLS
    col = first_col + tl.arange(0, COLS)
    row = first + tl.arange(0, ROWS)
    entry = tl.load(order + tl.minimum(row, end - 1))
    token = (entry // TOP_K).to(tl.int64)
    total = multiply(d_out, token, w_out, expert, col, C, H, True, ROWS, COLS, DEPTH)
    gate = tl.load(weights + entry).to(tl.float32)[:, None]
    share = tl.zeros((ROWS,), tl.float32)
    parts = quarters(total)
    for part in tl.static_range(4):
        d_act = parts[part]
        col = first_col + part * (COLS // 4) + tl.arange(0, COLS // 4)
        place = row.to(tl.int64)[:, None] * H + col[None, :]
        inside = (row < end)[:, None] & (col < H)[None, :]
        h = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
        cdf, density = normal(h)
        act, slope = h * cdf, cdf + h * density
        tl.store(d_hidden + place, (gate * d_act * slope).to(d_hidden.dtype.element_ty), mask=inside)
        tl.store(gated + place, (gate * act).to(gated.dtype.element_ty), mask=inside)
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
    """
    N_COL: tl.constexpr = (B + COLS - 1) // COLS
    N_TILE: tl.constexpr = (A + ROWS - 1) // ROWS * N_COL
    expert = tl.load(largest + tl.program_id(0) // N_TILE)
    tile = tl.program_id(0) % N_TILE
    a_col = tile // N_COL * ROWS + tl.arange(0, ROWS)
    b_col = tile % N_COL * COLS + tl.arange(0, COLS)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for done in range(first, end, DEPTH):
        row = done + tl.arange(0, DEPTH)
        token = tl.load(order + row, mask=row < end, other=0) // TOP_K
        a_row = (token if GATHER_A else row).to(tl.int64)[:, None]
        b_row = (row if GATHER_A else token).to(tl.int64)[:, None]
        inside = (row < end)[:, None]
        a_tile = tl.load(a + a_row * A + a_col[None, :], mask=inside & (a_col < A)[None, :], other=0.0)
        b_tile = tl.load(b + b_row * B + b_col[None, :], mask=inside & (b_col < B)[None, :], other=0.0)
        total = dot(tl.trans(a_tile), b_tile, total)
    place = expert.to(tl.int64) * A * B + a_col[:, None] * B + b_col[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(a_col < A)[:, None] & (b_col < B)[None, :])


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
