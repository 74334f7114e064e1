"""Expert compute: `expert_mlp`, one function with several backends that agree in value and in all four gradients.

A backend is a line of `BACKENDS`; `reference` is the slow, obvious oracle that every other one is tested against.
"""

import torch

from kernels import reference, torch_grouped

BACKENDS = {"reference": reference.expert_mlp, "torch": torch_grouped.expert_mlp}


def expert_mlp(x, w_in, w_out, weights, experts, backend="auto"):
    """out[n] = Σ_k weights[n, k] · GELU(x[n] @ w_in[e]) @ w_out[e], with e = experts[n, k]. Dropless at any imbalance.

    Args:
        x: (N, C) tokens.
        w_in, w_out: (E, C, H) and (E, H, C), the experts' weights, stacked.
        weights: (N, K) gates, fp32 (fp64 with fp64 inputs).
        experts: (N, K) int64 in [0, E), the K experts of a token distinct.
        backend: "auto", or a key of BACKENDS.

    Returns:
        (N, C) in x's dtype; under autocast, in the autocast dtype like any matrix product. GELU is the exact (erf) one.

    Raises:
        ValueError: unknown backend.
    """
    if backend == "auto":
        backend = "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    return BACKENDS[backend](x, w_in, w_out, weights, experts)
