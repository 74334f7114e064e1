"""The oracle of every backend: a loop over experts that a reader checks by eye."""

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_mlp(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str = "gelu",
) -> Tensor:
    """See `kernels.expert_mlp`.

    Computed in x's dtype, summed in the gates' dtype (fp32 or fp64).
    """
    act = {"gelu": F.gelu, "silu": F.silu}[activation]
    H = w_out.shape[1]
    gated = w_in.shape[2] == 2 * H
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for e, (w1, w2) in enumerate(zip(w_in.unbind(), w_out.unbind(), strict=True)):
        # (n,) tokens that chose expert e, and (n,) as which of their K choices
        token, k = torch.where(experts == e)
        h = x[token] @ w1  # (n, H), gated (n, 2H)
        y = (act(h[:, :H]) * h[:, H:] if gated else act(h)) @ w2  # (n, C)
        out = out.index_add(0, token, weights[token, k, None] * y)
    return out.to(x.dtype)
