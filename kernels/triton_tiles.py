"""Parts of the Triton kernels of experts: products of tiles, and activation functions.

Triton's interpreter, in which tests run the kernels on a CPU, is not a GPU. Known differences:

- It keeps NaN in a maximum or minimum of two, truncates float32 to bfloat16, and multiplies the
  bits of bfloat16. Tests make the first two as on a GPU (tests/interpreter.py); `dot` avoids the
  third.
- It runs programs one after another. Kernels use no atomics and no value of another program.
- It makes no constants of arguments that are 1, and assumes nothing of pointers that are multiples
  of 16. tests/test_spills.py compiles both.
- Its exponentials and divisions are exact, its float32 products, too. Tests marked `gpu` compare
  those of a GPU.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Triton 3.9 warns that 3.10 will not fuse products with sums by default: that changes bits and time
triton.knobs.language.default_fp_fusion = True


def divide_up(a: int, b: int) -> int:
    """Return a / b, rounded up; `triton.cdiv` costs the host 8 µs (EPYC, 2026-11-24)."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


@triton.constexpr_function
def main_part(cols):
    """The largest power of two in a tile's width.

    A width of 1.5 times a power of two is computed as two parts.
    """
    return 1 << (cols.bit_length() - 1)


@triton.jit
def dot(a, b, total):
    """Return total + a @ b, exact in fp32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def tile_mask(rows, cols):
    """The mask of a tile from those of its rows and columns."""
    return rows[:, None] & cols[None, :]


@triton.jit
def tile_offsets(row, col, STRIDE: tl.constexpr):
    """Where the elements of rows and columns are in a matrix with STRIDE columns."""
    return row[:, None] * STRIDE + col[None, :]


@triton.jit
def load_float32(place, mask):
    """Load numbers as float32, 0 where the mask is false."""
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_tile(
    base, row, col, end, limit, STRIDE: tl.constexpr, BY_ROW: tl.constexpr, BY_COL: tl.constexpr
):
    """Load rows and columns of base (_, STRIDE): 0 from row `end`, from column `limit` on."""
    place = base + row[:, None] * STRIDE + col[None, :]
    if BY_ROW and BY_COL:
        return tl.load(place, mask=tile_mask(row < end, col < limit), other=0.0)
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
    """Multiply rows `a_row` of a (_, IN) by two groups of columns of b[expert].

    b[expert] is (IN, OUT) or transposed.

    Returns two products in fp32, of columns `col`, which count up to LIMIT, and of columns
    `rest_col`; if that is None, the first one twice.
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
            total = dot(
                a_tile, load_tile(b, col, k, LIMIT, IN - done, STRIDE, not EVEN, not EVEN).T, total
            )
        else:
            total = dot(
                a_tile, load_tile(b, k, col, IN - done, LIMIT, STRIDE, not EVEN, not EVEN), total
            )
            if rest_col is not None:
                rest = dot(
                    a_tile,
                    load_tile(b, k, rest_col, IN - done, OUT, STRIDE, not EVEN, not EVEN),
                    rest,
                )
        a += DEPTH
        b += DEPTH if TRANSPOSED else DEPTH * OUT
    return total, rest


@triton.jit
def halves(tile):
    """Split the tile's columns into two parts."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def quarters(tile):
    """Split the tile's columns into four parts: an epilogue then needs half the registers."""
    left, right = halves(tile)
    a, b = halves(left)
    c, d = halves(right)
    return a, b, c, d


@triton.jit
def normal(x):
    """Compute the standard normal distribution's (cdf, density), within 8e-8.

    erf by Abramowitz and Stegun 7.1.26 shares its exponential with the density and takes half the
    instructions of tl.erf.
    """
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    bell = tl.exp2(-0.7213475204444817 * x * x)
    tail = (
        bell
        * t
        * (
            0.127414796
            + t * (-0.142248368 + t * (0.710706870 + t * (-0.726576013 + t * 0.530702714)))
        )
    )
    return tl.where(x < 0, tail, 1.0 - tail), 0.3989422804014327 * bell


@triton.jit
def activation(h, SILU: tl.constexpr):
    """Compute (act(h), act'(h)) of GELU or SiLU."""
    if SILU:
        sigmoid = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * h))
        return h * sigmoid, sigmoid * (1.0 + h * (1.0 - sigmoid))
    cdf, density = normal(h)
    return h * cdf, cdf + h * density
