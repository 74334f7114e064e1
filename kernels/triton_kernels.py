"""All Triton kernels, imported together where a device needs them: Triton is slow to import."""

from kernels import (
    triton_adamw,
    triton_cross_entropy,
    triton_experts,
    triton_linear,
    triton_norm,
    triton_router,
)

__all__ = [
    "triton_adamw",
    "triton_cross_entropy",
    "triton_experts",
    "triton_linear",
    "triton_norm",
    "triton_router",
]
