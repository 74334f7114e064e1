"""The LM head and its cross-entropy in one operator, without the logits of all rows at once.

A chunk's logits x Wᵀ are computed in the compute dtype; softmax - onehot, their gradient times N,
replaces them in memory and gives at once the chunk's contribution to the gradients of x and W. So
the forward pass ends with both gradients, and the backward pass only multiplies them by the loss's
own gradient / N. Chunks, and gradients in the forward pass, follow Liger Kernel (arXiv 2410.10989).

Half precision: sums over the vocabulary are in fp32, and so is dW, a sum over chunks (see
`add_product`). Nothing is scaled by 1/N or by a GradScaler before the backward pass, so that no
small gradient underflows. x and W arrive as they are, mostly in fp32, and get gradients of that
dtype: the scaled result is not rounded to half precision again.

Shapes: N rows (tokens), C = n_embd, V = vocab_size, n rows of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import choose_backend

CHUNK_BYTES = 2**29  # of logits in the compute dtype; each chunk reads and writes dW once more
ROWS = 128  # a chunk's rows are a multiple of it: whole tiles of a matrix product
# of fp16 gradients of logits, else in [-1, 1]: p = 2e-5, 1 of 50,304 tokens, would be subnormal in
# fp16
SCALE = 256


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Mean over rows of -log softmax(x Wᵀ)[target], without the logits of all rows.

    Args:
        x: (N, C) final hidden states.
        weight: (V, C) of the LM head.
        targets: (N,) int64 in [0, V). None is ignored.
        backend: as in `kernels.expert_mlp`; "reference" is F.linear and F.cross_entropy with all
            logits.

    Returns:
        loss: () in nats.
        losses: (N,) of each row, without gradient.
        Both in fp32 (fp64 with fp64 inputs). Products are computed in x's dtype, under autocast in
        the autocast dtype; softmax in fp32 at least. There are no second derivatives.

    Raises:
        ValueError: unknown backend, or triton where it cannot run.
        RuntimeError: on a CPU, a target outside [0, V). On a GPU the loss is NaN (triton), or the
            device asserts.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    backend = choose_backend(backend, x.device, dtype)
    if backend == "reference":
        logits = F.linear(x, weight)
        losses = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none"
        )
        return losses.mean(), losses.detach()
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    use_triton = backend == "triton"
    loss, losses, *_ = LinearCrossEntropy.apply(x, weight, targets, dtype, grad, use_triton)
    return loss, losses.detach()


def chunk_rows(n_row: int, vocab_size: int, itemsize: int) -> int:
    """Rows per chunk: all if their logits fit into CHUNK_BYTES, else as equal as ROWS allows."""
    n_chunk = -(-n_row * vocab_size * itemsize // CHUNK_BYTES)
    return n_row if n_chunk <= 1 else -(-n_row // (n_chunk * ROWS)) * ROWS


def forward(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, grad: bool, use_triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute loss and gradients chunk by chunk.

    Returns:
        loss: () mean.
        losses: (N,).
        d_x: (N, C) in `dtype`, gradient of N · gradient_scale · loss; empty without `grad`.
        d_w: (V, C) in fp32 or wider, the same of W.
    """
    N, V = len(x), len(weight)
    with torch.autocast(x.device.type, enabled=False):
        wide_dtype = torch.promote_types(dtype, torch.float32)
        losses = x.new_empty(N, dtype=wide_dtype)
        d_x = x.new_empty(x.shape if grad else 0, dtype=dtype)
        d_w = x.new_zeros(weight.shape if grad else 0, dtype=wide_dtype)
        w, targets, scale = weight.to(dtype), targets.contiguous(), gradient_scale(dtype)
        rows = chunk_rows(N, V, dtype.itemsize)
        buffer = torch.empty(rows, V, dtype=dtype, device=x.device)
        wide = None if use_triton else torch.empty(rows, V, dtype=wide_dtype, device=x.device)
        for first in range(0, N, rows):
            part = slice(first, min(first + rows, N))
            x_part, targets_part, losses_part = x[part].to(dtype), targets[part], losses[part]
            logits = buffer[: len(x_part)]  # (n, V)
            torch.mm(x_part, w.t(), out=logits)
            if wide is None:
                d_logits = kernels.triton.triton_cross_entropy.softmax_cross_entropy(
                    logits, targets_part, losses_part, scale, grad
                )
            else:
                d_logits = softmax_cross_entropy(
                    logits, wide[: len(x_part)], targets_part, losses_part, scale, grad
                )
            if grad:
                torch.mm(d_logits, w, out=d_x[part])
                add_product(d_w, d_logits.t(), x_part)
        return losses.mean(), losses, d_x, d_w


def gradient_scale(dtype: torch.dtype) -> int:
    """Factor on the gradient of the logits while it is in `dtype`."""
    return SCALE if dtype == torch.float16 else 1


def softmax_cross_entropy(
    logits: Tensor, wide: Tensor, targets: Tensor, losses: Tensor, scale: int, grad: bool
) -> Tensor:
    """Fill losses (n,) from logits (n, V) and targets (n,); `wide` (n, V) is a wide buffer.

    With `grad`, returns scale · (softmax - onehot) (n, V) in logits' dtype, stored in `logits` or
    in `wide`.
    """
    log_p = torch.log_softmax(logits, -1, dtype=wide.dtype, out=wide)
    index = targets[:, None]
    torch.neg(log_p.gather(1, index)[:, 0], out=losses)
    if not grad:
        return logits
    p = log_p.exp_()
    if scale != 1:
        p.mul_(scale)
    p.scatter_add_(1, index, p.new_full((), -scale).expand_as(index))
    return p if p.dtype == logits.dtype else logits.copy_(p)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total in total's dtype, without rounding the product to the dtype of a and b.

    But a CPU's product in bfloat16 is rounded to it, as under autocast: in fp32 it would take 2.4
    times as long.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.bfloat16:
        total.add_(a @ b)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class LinearCrossEntropy(torch.autograd.Function):
    """`forward`, whose gradients the backward pass only scales."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        grad: bool,
        use_triton: bool,
    ) -> tuple[Tensor, ...]:
        output = forward(x, weight, targets, dtype, grad, use_triton)
        ctx.set_materialize_grads(False)  # of losses, d_x and d_w: nothing differentiates them
        ctx.save_for_backward(*output[2:])
        ctx.dtypes = (x.dtype, weight.dtype)
        ctx.divisor = len(x) * gradient_scale(dtype)
        return output

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *others: None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        assert others == (None, None, None), "linear_cross_entropy has no second derivatives"
        factor = d_loss / ctx.divisor
        grads = [
            (d.to(factor.dtype) * factor).to(dtype)
            for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None, None, None
