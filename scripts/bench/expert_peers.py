"""What `scripts.bench moe` times beside our experts where it is installed: ScatterMoE, SonicMoE, QuACK and Liger.

A function each, of (x, w_in, w_out, weights, experts) as `kernels.expert_mlp` has them. Weights are brought to the
layout of these libraries before. ScatterMoE and SonicMoE come from GitHub (shawntan/scattermoe, Dao-AILab/sonic-moe),
quack-kernels and liger-kernel from PyPI. Liger knows gated SiLU experts alone. ScatterMoE's was compared with ours in
Triton's interpreter; the others have not run, for want of a GPU.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = Sequence[Tensor]


def transpose_weights(inputs: Inputs) -> list[Tensor]:
    """The inputs with weights stored (E, out, in), as these libraries keep them, in our shape (E, in, out)."""
    x, w_in, w_out, *others = inputs
    return [x, *(w.detach().mT.contiguous().mT.requires_grad_() for w in (w_in, w_out)), *others]


def run_scattermoe(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """ScatterMoE's MLP (arXiv 2403.08245)."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear  # pyrefly: ignore[missing-import]

    where = flatten_sort_count(experts, num_experts=len(w_in))
    hidden = parallel_linear(x, w_in, experts.shape[1], *where, grouped_out=True)
    return parallel_linear(F.gelu(hidden), w_out, 1, *where, gates=weights.to(x.dtype), grouped_in=True)


def run_sonicmoe(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """SonicMoE with a routing of one's own (arXiv 2512.14080), for Hopper."""
    from sonicmoe.enums import ActivationType  # pyrefly: ignore[missing-import]
    from sonicmoe.functional import moe_general_routing_inputs  # pyrefly: ignore[missing-import]

    N, K = experts.shape
    tokens = torch.arange(N, device=x.device, dtype=torch.int32).repeat_interleave(K)
    stream = torch.cuda.current_stream().cuda_stream
    matrices = w_in.permute(2, 1, 0), None, w_out.permute(2, 1, 0), None  # (out, in, E), without biases
    routing = weights.flatten(), tokens, experts.flatten().int()
    return moe_general_routing_inputs(x, *routing, *matrices, len(w_in), stream, ActivationType.GELU)[0]


class GroupedProduct(torch.autograd.Function):
    """QuACK's product of rows (R, in), sorted by expert, with weights (E, in, out)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
        from quack.gemm_interface import gemm  # pyrefly: ignore[missing-import]

        ctx.save_for_backward(rows, weights, starts)
        return gemm(rows, weights, cu_seqlens_m=starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyrefly: ignore[bad-override]  # *grads there
        from quack.gemm_interface import gemm  # pyrefly: ignore[missing-import]

        rows, weights, starts = ctx.saved_tensors
        return gemm(grad, weights.mT, cu_seqlens_m=starts), gemm(rows.T, grad, cu_seqlens_k=starts), None


def sort_rows(x: Tensor, experts: Tensor, n_expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gather a row per token and chosen expert, sorted by expert: rows (N·K, C), their order (N·K,), loads (E,)."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    loads = torch.zeros(n_expert, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    return x.index_select(0, order // experts.shape[1]), order, loads


def sum_rows(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's rows (N·K, C), times their gates, to (N, C)."""
    N, K = weights.shape
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = rows.index_select(0, inverse).view(N, K, -1)
    return (rows * weights.unsqueeze(-1).to(rows.dtype)).sum(1)


def run_quack(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Rows sorted by expert in torch, and QuACK's grouped products."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    starts = F.pad(loads.cumsum(0), (1, 0)).to(torch.int32)
    y = GroupedProduct.apply(F.gelu(GroupedProduct.apply(rows, w_in, starts)), w_out, starts)
    return sum_rows(y, order, weights)


def run_liger(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Liger's fused experts, gated SiLU; weights (E, C, 2H) and (E, H, C)."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction  # pyrefly: ignore[missing-import]

    return LigerFusedMoEFunction.apply(x, w_in.mT, w_out.mT, experts.int(), weights)


PLAIN: dict[str, Callable[..., Tensor]] = {"ScatterMoE": run_scattermoe, "SonicMoE": run_sonicmoe, "QuACK": run_quack}
GATED: dict[str, Callable[..., Tensor]] = {"Liger, gated": run_liger}


def make_calls(functions: dict[str, Callable[..., Tensor]], inputs: Inputs) -> dict[str, partial[Tensor]]:
    """Calls of libraries, with weights in their layout. Whether they are installed shows in the first call."""
    return {name: partial(function, *transpose_weights(inputs)) for name, function in functions.items()}
