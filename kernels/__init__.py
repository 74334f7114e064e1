"""Expert compute: `expert_mlp`, one function with several backends that agree in value and in all four gradients.

A backend is a line of `BACKENDS`; `reference` is the slow, obvious oracle that every other one is tested against.
"""

import torch

from kernels import reference, torch_grouped

try:
    from kernels import triton_experts
except ImportError:  # of triton, which there is for Linux alone
    triton_experts = None

BACKENDS = {
    "reference": reference.expert_mlp,
    "torch": torch_grouped.expert_mlp,
    "triton": triton_experts and triton_experts.expert_mlp,
}


def expert_mlp(x, w_in, w_out, weights, experts, backend="auto"):
    """out[n] = Σ_k weights[n, k] · GELU(x[n] @ w_in[e]) @ w_out[e], with e = experts[n, k]. Dropless at any imbalance.

    Args:
        x: (N, C) tokens.
        w_in, w_out: (E, C, H) and (E, H, C), the experts' weights, stacked.
        weights: (N, K) gates, fp32 (fp64 with fp64 inputs).
        experts: (N, K) int64 in [0, E), the K experts of a token distinct.
        backend: a key of BACKENDS, or "auto": triton where it can run on the device, else torch.

    Returns:
        (N, C) in x's dtype; under autocast, in the autocast dtype like any matrix product. GELU is the exact (erf) one.

    Raises:
        ValueError: unknown backend, or triton where it cannot run.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    if backend == "auto":
        backend = "triton" if x.is_cuda and not what_stops_triton(x.device, x.dtype) else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    if backend == "triton" and (problem := what_stops_triton(x.device, x.dtype)):
        raise ValueError(f"backend 'triton' {problem}, or set the backend to 'auto'")
    return BACKENDS[backend](x, w_in, w_out, weights, experts)


@torch.compiler.assume_constant_result
def what_stops_triton(device, dtype):
    """Why the triton backend cannot compute in this dtype on this device, and the remedy; empty if it can."""
    if triton_experts is None:
        return "needs Triton: on Linux, pip install triton"
    if dtype not in triton_experts.DTYPES:
        return f"does not compute in {dtype}: use float16, bfloat16 or float32"
    if triton_experts.INTERPRETED:
        return ""
    if device.type != "cuda" or torch.version.hip:
        return f"does not run on {device.type}: use a CUDA device, set TRITON_INTERPRET=1 to try it slowly on a CPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"does not run on {torch.cuda.get_device_name(device)}: use a GPU of compute capability 8.0 or later"
    return ""
