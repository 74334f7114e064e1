"""A cycle model of the experts' kernels on an H100 or H200, for `scripts.bench budget`.

It was never held against a GPU: good to about 20%, it ranks designs and replaces no measurement. Assumed: 132
multiprocessors at 1.7 GHz; tensor cores of 4,096 FLOP per clock each in half precision, which gives a measured ceiling
of about 790 TFLOP/s; 36 bytes per clock from L2 to a multiprocessor, the deciding unknown (30 to 48). Prologues,
epilogues and instructions per step are those of the SASS that scripts.aot reads.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

N_SM, CLOCK = 132, 1.7e9
TENSOR = 2048  # multiply-adds per clock and multiprocessor
BANDWIDTH = 36  # bytes per clock from L2 to a multiprocessor
OF_DRAM = 0.92  # share of a GPU's DRAM rate that a product's loads and stores reach


class Product(NamedTuple):
    """How a kernel computes a tile, in clocks where nothing else is said.

    Attributes:
        slots: blocks that a multiprocessor holds at once.
        rows, cols, depth: of a step's product.
        buffers: steps whose tiles are in shared memory.
        prologue: before the first load, of every block; with `ahead` once.
        epilogue: instructions after the last product, which blocks issue one after the other.
        tail: from then to the block's end.
        issue: from a product to the next load.
        latency: of a load.
        ahead: whether a block goes on with the next tile, whose loads begin during the epilogue.
    """

    slots: int
    rows: int
    cols: int
    depth: int
    buffers: int
    prologue: int
    epilogue: int
    tail: int
    issue: int
    latency: int
    ahead: bool = False


@dataclass
class Block:
    """A running block: what it does next, the step it is at, when steps' tiles arrived and products ended."""

    steps: int
    phase: str = "prologue"
    step: int = 0
    arrival: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)


def simulate(product: Product, n_tile: int, steps: int, bandwidth: float = BANDWIDTH) -> float:
    """Clocks that a multiprocessor takes for `n_tile` tiles of `steps` steps each."""
    p, slots = product, min(product.slots, n_tile)
    clocks = p.rows * p.cols * p.depth / TENSOR
    load = (p.rows + p.cols) * p.depth * 2 / bandwidth
    tensor = port = issued = end = 0.0  # when tensor cores, the port to L2 and the issue of epilogues are free
    shares = [n_tile // slots + (slot < n_tile % slots) if p.ahead else 1 for slot in range(slots)]
    queue = [(slot * 50.0, slot, Block(share * steps)) for slot, share in enumerate(shares)]
    waiting, number = 0 if p.ahead else n_tile - slots, slots
    while queue:
        t, key, block = heapq.heappop(queue)
        step = block.step
        if block.phase == "prologue":
            block.phase, then = "fill", t + p.prologue
        elif block.phase == "fill":
            for k in range(min(p.buffers - 1, block.steps)):
                port = max(port, t) + load
                block.arrival[k] = port + p.latency
            block.phase, then = "multiply", block.arrival[0] + 40
        elif block.phase == "multiply":
            tensor = max(tensor, t) + clocks
            block.done[step] = tensor
            block.phase, then = "load", max(t, block.done.get(step - 1, t)) + p.issue
        elif block.phase == "load":
            if (k := step + p.buffers - 1) < block.steps:
                port = max(port, t) + load
                block.arrival[k] = port + p.latency
            if (step + 1) % steps == 0:
                block.phase, then = "epilogue", max(t, block.done[step])
            else:
                block.step += 1
                block.phase, then = "multiply", max(t, block.arrival[block.step] + 40)
        elif block.phase == "epilogue":
            issued = max(issued, t) + p.epilogue
            block.phase, then = "end", issued + p.tail
        else:
            end, block.step = max(end, t), step + 1
            if block.step < block.steps:
                block.phase, then = "multiply", max(t, block.arrival[block.step] + 40)
            elif waiting:
                waiting, key, block, then = waiting - 1, number, Block(steps), t + 200
                number += 1
            else:
                continue
        heapq.heappush(queue, (then, key, block))
    return end


TABLE = 800  # clocks of a prologue that a table of tiles, made once per routing, saves
UP = Product(2, 128, 128, 64, 3, 1700, 3232, 900, 60, 650)
DOWN_GRAD = UP._replace(epilogue=4200, tail=1300)
ROWS = Product(1, 128, 256, 64, 3, 1300, 560, 1100, 80, 700)
W_OUT = Product(1, 128, 256, 64, 2, 1500, 520, 1000, 450, 700)
W_IN = Product(2, 128, 128, 64, 2, 1500, 280, 900, 250, 700)

Design = dict[str, Product]  # by kernel; "rows" computes both y and d_x
BEFORE: Design = {"up": UP, "rows": ROWS, "down_grad": DOWN_GRAD, "w_out": W_OUT, "w_in": W_IN}
WIDE_GRADIENTS: Design = {
    "w_out": Product(1, 128, 384, 64, 3, 1900, 800, 1000, 450, 700),
    "w_in": Product(1, 128, 384, 64, 3, 1900, 600, 1000, 430, 700),
}
TILE_TABLE: Design = {
    "up": UP._replace(prologue=1700 - TABLE),
    "down_grad": DOWN_GRAD._replace(prologue=1700 - TABLE),
    "rows": ROWS._replace(prologue=1300 - TABLE),
}
ROWS_AHEAD: Design = {"rows": Product(1, 128, 384, 64, 3, 1500, 1300, 250, 260, 700, ahead=True)}
WIDE_UP: Design = {"up": Product(2, 128, 192, 32, 5, 1700 - TABLE, 4900, 900, 110, 650)}


def time_experts(
    N: int,
    C: int,
    H: int,
    E: int,
    K: int,
    dram: float,
    design: Design,
    bandwidth: float = BANDWIDTH,
    gated: bool = False,
) -> dict[str, float]:
    """Seconds of each kernel of a layer's experts, forward and backward, balanced.

    Args:
        N: tokens.
        C: the model's width.
        H: an expert's width.
        E: experts.
        K: experts per token.
        dram: bytes per second of the GPU's memory.
        design: the kernels' tiles.
        bandwidth: bytes per clock from L2 to a multiprocessor.
        gated: whether experts have a gate. Tiles and epilogues are then taken to be the same.
    """
    R, weights, P = N * K, E * C * H * 2, (1 + gated) * H
    tiles = R // 128 + E // 2  # an expert's last tile is half empty

    def time(name: str, n_tile: int, steps: int, moved: float) -> float:
        clocks = simulate(design[name], math.ceil(n_tile / N_SM), steps, bandwidth)
        return max(clocks / CLOCK, moved / dram / OF_DRAM)

    def by_rows(name: str, cols: int, depth: int, moved: float) -> float:
        steps = math.ceil(depth / design[name].depth)
        return time(name, tiles * math.ceil(cols / design[name].cols), steps, moved)

    def by_expert(name: str, rows: int, cols: int, by_row: int) -> float:
        n_tile = E * math.ceil(rows / design[name].rows) * math.ceil(cols / design[name].cols)
        moved = 2 * (R * by_row + N * C) + 2 * E * rows * cols
        return time(name, n_tile, math.ceil(R / E / design[name].depth), moved)

    def rows_product(depth: int) -> float:
        return by_rows("rows", C, depth, 2 * R * depth + 2 * E * C * depth + 2 * R * C)

    combine = (2 * R * C + 2 * N * C) / dram / OF_DRAM
    return {
        "up": by_rows("up", P, C, 2 * N * C + 2 * E * C * P + 2 * R * (P + H)),
        "rows": rows_product(H),
        "combine": combine,
        "down_grad": by_rows("down_grad", H, C, N * C * 2 + weights + 2 * R * (2 * P + H)),
        "w_out": by_expert("w_out", H, C, H),
        "w_in": by_expert("w_in", C, P, P),
        "rows d_x": rows_product(P),
        "combine d_x": combine,
        "sort": (60 + 25 * N / 32768) * 1e-6,
    }
