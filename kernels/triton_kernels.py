"""All Triton kernels, imported together where a device needs them: Triton is slow to import."""

import subprocess
from functools import cache

import torch
import triton
import triton.language as tl

from common.text import first_line
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


@triton.jit
def one_kernel(out):
    """Write 1 to out (1,)."""
    tl.store(out, 1.0)


@cache
def find_launch_problem(device: torch.device) -> str:
    """Say why Triton cannot build or launch a kernel on a GPU, and the remedy; empty if it can.

    It calls a C compiler, which many images of containers lack, and its assembler must know the
    GPU.
    """
    try:
        with torch.cuda.device(device):
            one_kernel[(1,)](torch.empty(1, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton, of the compilers that it calls, of CUDA
        reason = first_line(error)
        if isinstance(error, subprocess.CalledProcessError):  # its message has temporary names
            reason = f"{error.cmd[0]} fails"
        return (
            f"cannot build a kernel here ({reason}): install a C compiler and Python's "
            "headers (Debian: gcc, python3-dev), or a release of torch that knows this GPU"
        )
    return ""
