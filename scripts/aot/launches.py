"""Compile every launch of the Triton kernels at real shapes, and read what came out.

Both passes of the experts and of KERN's router, and the Triton part of the LM head, run on meta tensors, and each
launch is compiled instead: what is compiled is what would run.
"""

import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

import kernels.triton_experts as triton_experts
import kernels.triton_router as triton_router
from kernels import triton_cross_entropy
from kernels.cross_entropy import gradient_scale
from router import ROUTERS, RouterSpec
from scripts.aot.sass import Loop, count_blocks, find_loop

SHAPES: dict[
    str, tuple[Any, ...]
] = {  # N, C, H, E, K, V: the paper's model of 125M active parameters and others; "few" rows per expert
    # "gated" experts with SiLU, as config/modern_125m.toml has them
    "125m": (32768, 768, 384, 64, 8, 50304),
    "wide": (65536, 2048, 1024, 32, 4, 131072),
    "narrow": (8192, 768, 96, 256, 64, 257),
    "odd": (8192, 1000, 200, 48, 5, 50257),
    "few": (8192, 768, 384, 256, 4, 32000),
    "gated": (32768, 768, 256, 64, 8, 50304, True),
}
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int16": "i16", "int32": "i32", "int64": "i64"}


class Kernel(NamedTuple):
    """A compiled kernel and what its SASS says.

    Attributes:
        name: the function's, with the names of the switches that are on.
        tile: its block sizes, rows x columns x depth of a product.
        warps: per block.
        registers: per thread.
        shared: bytes of shared memory per block.
        spilled: bytes of registers per thread that went to local memory.
        blocks: how many a multiprocessor holds at once.
        loop: what the main loop of a product does; None of other kernels.
    """

    name: str
    tile: str
    warps: int
    registers: int
    shared: int
    spilled: int
    blocks: int
    loop: Loop | None


def dtype_name(dtype: torch.dtype) -> str:
    """Name a type without its "torch."."""
    return str(dtype).removeprefix("torch.")


def name_type(value: object) -> str:
    """Name an argument's type as Triton does."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[dtype_name(value.dtype)]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[dtype_name(value.base.dtype)]}{list(value.block_shape)}>"
    return "fp32" if isinstance(value, float) else "i32"


def compile_launch(kernel: Any, values: Mapping[str, Any], options: dict[str, Any], sm: int) -> Any:
    """Compile what a launch of `kernel` with these arguments and options would run on compute capability `sm`."""
    signature, constants, aligned = {}, {}, {}
    for i, (parameter, (name, value)) in enumerate(zip(kernel.params, values.items(), strict=True)):
        if parameter.is_constexpr or (type(value) is int and value == 1):  # Triton makes a constant of 1
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = name_type(value)
        if isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def run_tool(tool: Any, option: str, cubin: bytes) -> str:
    """Run one of CUDA's binary tools on a kernel's machine code, and return what it prints."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool.path, option, file.name], capture_output=True, text=True, check=True).stdout


def read_kernel(name: str, compiled: Any, values: Mapping[str, Any], sm: int) -> Kernel:
    """Read what was compiled for a launch with these arguments."""
    cubin, warps, shared = compiled.asm["cubin"], compiled.metadata.num_warps, compiled.metadata.shared
    usage = run_tool(triton.knobs.nvidia.cuobjdump, "-res-usage", cubin)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    tile = [values[side] for side in ("ROWS", "COLS", "DEPTH", "BLOCK") if side in values]
    switches = [key.lower() for key, value in values.items() if value is True]
    is_product = "DEPTH" in values
    return Kernel(
        name="+".join([name, *switches]),
        tile="x".join(map(str, tile)),
        warps=warps,
        registers=used["REG"],
        shared=shared,
        spilled=used["STACK"] + used["LOCAL"],
        blocks=count_blocks(sm, used["REG"], shared, warps),
        loop=find_loop(run_tool(triton.knobs.nvidia.nvdisasm, "-c", cubin)) if is_product else None,
    )


def compile_router(spec: RouterSpec | None, logits: torch.Tensor, top_k: int, n_sequence: int) -> None:
    """Launch the router's kernels; the backward pass with the gates' gradient alone, and with all."""
    assert spec is not None, "a dense model has no router"
    bias, c, formula = logits[0], logits[0, :1], (spec.phi, spec.pre, spec.post)
    gamma = c if spec.gamma else None
    weights, experts, _, _, probability, _, z_loss = triton_router.forward(
        logits, bias, c, gamma, *formula, top_k, n_sequence
    )
    for upstream in ((weights, None, None), (weights, probability, z_loss)):
        triton_router.backward(logits, experts, c, gamma, *formula, n_sequence, *upstream)


@contextmanager
def launches_compiled(sm: int) -> Iterator[dict[Kernel, None]]:
    """Within it launches compile for compute capability `sm` instead, each kernel once; yields those so far."""
    kernels: dict[Kernel, None] = {}

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = inspect.signature(kernel.fn).bind(*arguments).arguments
        compiled = compile_launch(kernel, values, options, sm)
        kernels[read_kernel(kernel.__name__.removesuffix("_kernel"), compiled, values, sm)] = None

    with (
        mock.patch.object(triton.runtime.JITFunction, "run", record),
        mock.patch.object(triton_experts, "major", lambda device: sm // 10),
    ):
        yield kernels


def compile_kernels(
    sm: int, dtype: torch.dtype, N: int, C: int, H: int, E: int, K: int, V: int, gated: bool = False
) -> list[Kernel]:
    """Compile every kernel of one shape once; gated experts have SiLU."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with launches_compiled(sm) as kernels:
        x, w_in, w_out = meta(N, C), meta(E, C, (1 + gated) * H), meta(E, H, C)
        weights = meta(N, K, dtype=torch.float32)
        out, *kept = triton_experts.forward(x, w_in, w_out, weights, meta(N, K, dtype=torch.int64), gated)
        triton_experts.backward(out, x, w_in, w_out, weights, *kept, silu=gated, grad_dtype=torch.float32)
        targets, losses = meta(N, dtype=torch.int64), meta(N, dtype=torch.float32)
        triton_cross_entropy.softmax_cross_entropy(meta(N, V), targets, losses, gradient_scale(dtype), True)
        compile_router(ROUTERS["kern"], meta(N, E, dtype=torch.float32), K, min(N, 32))
    return list(kernels)
