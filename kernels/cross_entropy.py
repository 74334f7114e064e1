"""The LM head and its cross-entropy in one: chunk after chunk of rows, so that the logits of all rows never exist.

A chunk's logits x Wᵀ are made in the compute type; softmax - onehot, their gradient times N, takes their place, and
from it follows at once what the chunk adds to the gradients of x and W. The forward pass thus ends with both gradients,
and the backward pass only multiplies them by the loss's own gradient / N. The chunked form, and gradients in the
forward pass, are those of Liger Kernel (arXiv 2410.10989).

Half precision: sums over the vocabulary are in fp32, and so is dW, a sum over chunks. Before the backward pass nothing
is scaled by 1/N, nor by a GradScaler, so that no small gradient is lost; x and W come in as they are, mostly fp32, and
get gradients of that type: what is scaled in the end is not rounded to half precision again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import BACKENDS, what_stops_triton

try:
    from kernels import triton_cross_entropy
except ImportError:  # of triton, which there is for Linux alone
    triton_cross_entropy = None

CHUNK_BYTES = 2**28  # of logits in the compute type
ROWS = 128  # a chunk has a multiple of it: whole tiles of a matrix product
SCALE = 256  # of fp16 gradients of logits, in [-1, 1] without: at p = 2e-5, 1 of 50,304 tokens, fp16 is subnormal


def linear_cross_entropy(x, weight, targets, backend="auto"):
    """The mean over rows of -log softmax(x Wᵀ)[target], without the logits of all rows.

    Args:
        x: (N, C) final hidden states.
        weight: (V, C) of the LM head.
        targets: (N,) int64 in [0, V). None is ignored.
        backend: as that of `kernels.expert_mlp`; "reference" is F.linear and F.cross_entropy with all logits.

    Returns:
        () loss in nats, and (N,) that of each row, without gradient; fp32 (fp64 with fp64 inputs). Products are
        computed in x's dtype, under autocast in that of autocast; softmax in fp32 at least. It has no second
        derivatives.

    Raises:
        ValueError: unknown backend, or triton where it cannot run.
        IndexError: on a CPU, a target that is not in [0, V). On a GPU the loss is NaN (triton), or the device asserts.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    if backend == "reference":
        logits = F.linear(x, weight)
        losses = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")
        return losses.mean(), losses.detach()
    problem = what_stops_triton(x.device, dtype)
    if backend == "triton" and problem:
        raise ValueError(f"backend 'triton' {problem}, or set the backend to 'auto'")
    use_triton = backend == "triton" or (backend == "auto" and x.is_cuda and not problem)
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss, losses, *_ = head(x, weight, targets, dtype, grad, use_triton)
    return loss, losses.detach()


def chunk_rows(n_row, vocab_size, itemsize):
    """Rows of a chunk: all, if their logits take no more than CHUNK_BYTES, else chunks as equal as ROWS allows."""
    n_chunk = -(-n_row * vocab_size * itemsize // CHUNK_BYTES)
    return n_row if n_chunk <= 1 else -(-n_row // (n_chunk * ROWS)) * ROWS


def forward(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, grad: bool, use_triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, losses (N,), d_x (N, C) of type `dtype`, d_w (V, C) fp32), gradients of N · scale · loss and empty without
    `grad`."""
    N, V = len(x), len(weight)
    if N and targets.device.type == "cpu" and not 0 <= targets.min() <= targets.max() < V:
        raise IndexError(f"targets from {targets.min()} to {targets.max()}, of a vocabulary of {V}")
    with torch.autocast(x.device.type, enabled=False):
        _, losses, d_x, d_w = fake_forward(x, weight, targets, dtype, grad, use_triton)
        d_w.zero_()
        w, targets = weight.to(dtype), targets.contiguous()
        rows = chunk_rows(N, V, dtype.itemsize)
        buffers = [torch.empty(rows, V, dtype=dtype, device=x.device)]
        buffers += [] if use_triton else [torch.empty(rows, V, dtype=losses.dtype, device=x.device)]
        for first in range(0, N, rows):
            part = slice(first, min(first + rows, N))
            x_part, targets_part, losses_part = x[part].to(dtype), targets[part], losses[part]
            logits, *spare = (buffer[: len(x_part)] for buffer in buffers)
            torch.mm(x_part, w.t(), out=logits)
            if use_triton:
                triton_cross_entropy.softmax(logits, targets_part, losses_part, scale_of(dtype), grad)
                d_logits = logits
            else:
                d_logits = softmax(logits, *spare, targets_part, losses_part, scale_of(dtype), grad)
            if grad:
                torch.mm(d_logits, w, out=d_x[part])
                add_product(d_w, d_logits.t(), x_part)
        return losses.mean(), losses, d_x, d_w


def fake_forward(x, weight, targets, dtype, grad, use_triton):
    wide = torch.promote_types(dtype, torch.float32)
    d_x, d_w = (x.shape, weight.shape) if grad else (0, 0)
    loss, losses = x.new_empty((), dtype=wide), x.new_empty(len(x), dtype=wide)
    return loss, losses, x.new_empty(d_x, dtype=dtype), x.new_empty(d_w, dtype=wide)


def scale_of(dtype):
    return SCALE if dtype == torch.float16 else 1


def softmax(logits, spare, targets, losses, scale, grad):
    """Fills losses (n,) and, with `grad`, returns scale · (softmax - onehot) in logits' dtype, (n, V) in the place of
    either `logits` or `spare`, which is wide."""
    log_p = torch.log_softmax(logits, -1, dtype=spare.dtype, out=spare)
    index = targets[:, None]
    torch.neg(log_p.gather(1, index)[:, 0], out=losses)
    if not grad:
        return None
    p = log_p.exp_()
    if scale != 1:
        p.mul_(scale)
    p.scatter_add_(1, index, p.new_full((), -scale).expand_as(index))
    return p if p.dtype == logits.dtype else logits.copy_(p)


def add_product(total, a, b):
    """total += a @ b, not rounded to the type of a and b on the way."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def save(ctx, inputs, output):
    x, weight, _, dtype, *_ = inputs
    ctx.set_materialize_grads(False)  # of losses, d_x and d_w, which are none of autograd's
    ctx.save_for_backward(*output[2:])
    ctx.dtypes, ctx.divisor = (x.dtype, weight.dtype), len(x) * scale_of(dtype)


def backward(ctx, d_loss, *others):
    assert others == (None, None, None), "linear_cross_entropy has no second derivatives"
    factor = d_loss / ctx.divisor
    return *((d.to(factor.dtype) * factor).to(to) for d, to in zip(ctx.saved_tensors, ctx.dtypes, strict=True)), *[
        None
    ] * 4


# To torch.compile it is an opaque operator: a traced loop would be unrolled, and its buffers no longer shared.
head = torch.library.custom_op("nanokern::linear_cross_entropy", forward, mutates_args=())
head.register_fake(fake_forward)
head.register_autograd(backward, setup_context=save)
