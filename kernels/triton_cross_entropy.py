"""Losses and gradient of a chunk of logits in Triton: a program reads its row twice.

The second read hits the L2 cache, so memory sees each logit read once and written once, where plain
torch operators take four such passes in fp32. kernels/cross_entropy.py calls it; for
TRITON_INTERPRET see triton_experts.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_tiles import power_of_2

BLOCK = 8192  # logits that 32 warps take at a time, 8 each: a load of 16 bytes in half precision
# Two such programs fill a multiprocessor. So an H100 has 264 rows under way: of 50,304 logits in
# half precision 26 MB, half of its L2 cache.

LOWEST = tl.constexpr(-3.0e38)  # a logit of -inf would make NaN of a difference


@triton.jit
def softmax_kernel(
    logits,
    targets,
    losses,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Fill losses[row] = logsumexp(z) - z[target] for the row's logits z (V,).

    With GRAD, z becomes SCALE · (softmax(z) - onehot).

    NaN for a target outside [0, V).
    """
    row = tl.program_id(0)
    z = logits + row.to(tl.int64) * V
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    # before any thread writes, see the reductions
    at_target = tl.load(z + tl.where(inside, target, 0)).to(tl.float32)
    col = tl.arange(0, BLOCK)
    # Each thread sums its own columns, WIDTH in a load: sums over threads would be barriers.
    own_col = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    own_top = tl.full((BLOCK // WIDTH,), LOWEST, tl.float32)
    own_total = tl.zeros((BLOCK // WIDTH,), tl.float32)  # of exp(z - own_top)
    for first in range(0, V, BLOCK):
        inside_row = first + own_col < V
        part = tl.load(z + first + own_col, mask=inside_row, other=LOWEST).to(tl.float32)
        higher = tl.maximum(own_top, tl.max(part, 1))
        new = tl.sum(tl.where(inside_row, tl.exp(part - higher[:, None]), 0.0), 1)
        own_total = own_total * tl.exp(own_top - higher) + new
        own_top = higher
    top = tl.max(own_top, 0)
    total = tl.sum(own_total * tl.exp(own_top - top), 0)
    tl.store(losses + row, tl.where(inside, top - at_target + tl.log(total), float("nan")))
    if GRAD:
        share = SCALE / total
        for first in range(0, V, BLOCK):
            part = tl.load(z + first + col, mask=first + col < V, other=-float("inf")).to(
                tl.float32
            )
            onehot = tl.where(first + col == target, SCALE, 0.0)
            grad = tl.exp(part - top) * share - onehot
            tl.store(z + first + col, grad.to(logits.dtype.element_ty), mask=first + col < V)


def softmax_cross_entropy(
    logits: Tensor, targets: Tensor, losses: Tensor, scale: int, grad: bool
) -> Tensor:
    """Fill losses (n,) fp32 from logits (n, V) and targets (n,) int64; return logits.

    With `grad`, the gradient scale · (softmax - onehot) replaces them.
    """
    n, V = logits.shape
    assert logits.is_contiguous() and targets.is_contiguous() and losses.dtype == torch.float32
    block = min(BLOCK, power_of_2(V))
    warps = max(1, block // 256)
    width = min(block, 16 // logits.itemsize)
    with torch.cuda.device_of(logits):
        softmax_kernel[(n,)](logits, targets, losses, V, scale, grad, block, width, num_warps=warps)
    return logits
