"""Counting sort of (token, expert) rows in Triton; the host does not wait for the device.

A row is one pair; the R = N·K rows are sorted by expert, then by token, and not padded. It is a
counting sort:

    count    how many rows each expert gets from each program's tokens; torch sums them up
    place    order, inverse, offsets
    table    tiles, and the experts by descending number of rows
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_tiles import divide_up, power_of_2

# Of a program that counts or places rows. Of 32,768 tokens, 64 experts and top-8, both kernels take
# 79 µs with 256 tokens and 4 warps, 53 with 64, 31 with 16 and 2 warps (H200, 2026-11-26).
TOKENS = 16
WARPS = 2


@triton.jit
def chosen(experts, token, k, N, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """Compare tokens' k-th choices with every expert: int32 (tokens, EXPERTS), 1 where equal."""
    expert = tl.load(experts + token.to(tl.int64) * TOP_K + k, mask=token < N, other=-1)
    return (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit
def count_kernel(
    experts,
    counts,
    N,
    N_EXPERT: tl.constexpr,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Fill counts (E, programs): rows that each expert gets from each program's tokens."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(N_EXPERT)
    total = tl.zeros((EXPERTS,), tl.int32)
    for step in range(STEPS):
        token = (tl.program_id(0) * STEPS + step) * STEP + tl.arange(0, STEP)
        for k in range(TOP_K):
            total += tl.sum(chosen(experts, token, k, N, TOP_K, EXPERTS), 0)
    e = tl.arange(0, EXPERTS)
    tl.store(counts + e * tl.num_programs(0) + tl.program_id(0), total, mask=e < N_EXPERT)


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
    """Fill order, inverse and offsets from counts (E, programs) and their running sums."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(N_EXPERT)
    e = tl.arange(0, EXPERTS)
    n_program = tl.num_programs(0)
    load = tl.load(sums + e * n_program + n_program - 1, mask=e < N_EXPERT, other=0)
    ends = tl.cumsum(load, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + e + 1, ends, mask=e < N_EXPERT)
        tl.store(offsets, 0)
    mine = e * n_program + tl.program_id(0)
    before = tl.load(sums + mine, mask=e < N_EXPERT, other=0) - tl.load(
        counts + mine, mask=e < N_EXPERT, other=0
    )
    free = ends - load + before  # (EXPERTS,) the next free row of each expert
    for step in range(STEPS):
        token = (tl.program_id(0) * STEPS + step) * STEP + tl.arange(0, STEP)
        taken = tl.zeros((STEP, EXPERTS), tl.int32)
        for k in range(TOP_K):
            taken += chosen(experts, token, k, N, TOP_K, EXPERTS)
        following = free + tl.sum(taken, 0)
        # (STEP, EXPERTS): rows of earlier tokens come before
        place = tl.cumsum(taken, 0) - taken + free[None, :]
        for k in range(TOP_K):
            here = chosen(experts, token, k, N, TOP_K, EXPERTS)
            row = tl.sum(here * place, 1)
            place += here  # a token that names an expert twice takes two rows
            entry = token.to(tl.int64) * TOP_K + k
            tl.store(inverse + entry, row, mask=token < N)
            tl.store(order + row, entry.to(tl.int32), mask=token < N)
        free = following


@triton.jit
def table_kernel(offsets, table, N_TILE: tl.constexpr, N_EXPERT: tl.constexpr, ROWS: tl.constexpr):
    """Fill table (3 · N_TILE + 1,) with the tiles that `read_tile` reads, then their number.

    Tiles are counted expert by expert.
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


@triton.jit
def read_tile(table, index):
    """Read (expert, first row, end of the expert's rows) of tile `index`; end 0: no tile."""
    return (
        tl.load(table + 3 * index),
        tl.load(table + 3 * index + 1),
        tl.load(table + 3 * index + 2),
    )


class Schedule(NamedTuple):
    """Which rows are whose, all int32."""

    order: Tensor  # (R,) which entry of the (N, K) routing a row is
    inverse: Tensor  # (R,) at which row an entry is
    offsets: Tensor  # (E + 1,) where an expert's rows begin
    # (3T + 1,) expert, first row and end of each of T tiles at most, then the number of tiles
    table: Tensor

    @classmethod
    def empty(cls, experts: Tensor, n_expert: int, rows: int) -> "Schedule":
        """Allocate the schedule of experts (N, K) in tiles of `rows` rows."""
        R = experts.numel()
        sizes = R, R, n_expert + 1, 3 * (R // rows + n_expert) + 1
        return cls(*(torch.empty(size, dtype=torch.int32, device=experts.device) for size in sizes))


def sort_rows(experts: Tensor, n_expert: int, rows: int) -> Schedule:
    """Sort the rows of experts (N, K) by expert, then by token; cut them into tiles of `rows`."""
    N, top_k = experts.shape
    schedule = order, inverse, offsets, table = Schedule.empty(experts, n_expert, rows)
    # tokens that a program looks at at once
    step = max(1, min(TOKENS, 4096 // power_of_2(n_expert)))
    steps = divide_up(TOKENS, step)
    grid = (max(1, divide_up(N, step * steps)),)
    counts = torch.empty(n_expert, *grid, dtype=torch.int32, device=experts.device)
    sizes = N, n_expert, top_k, step, steps
    count_kernel[grid](experts, counts, *sizes, num_warps=WARPS)
    sums = counts.cumsum(1, dtype=torch.int32)
    place_kernel[grid](experts, counts, sums, order, inverse, offsets, *sizes, num_warps=WARPS)
    n_tile = len(table) // 3
    table_kernel[(n_tile,)](offsets, table, n_tile, n_expert, rows, num_warps=1)
    return schedule
