"""Compile every launch of the Triton kernels at real shapes, and read what came out.

Both passes of the experts, of KERN's router and of norms, and the Triton part of the LM head, run on meta tensors, and
each launch is compiled instead: what is compiled is what would run.
"""

import inspect
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

import kernels.triton_experts as triton_experts
import kernels.triton_norm as triton_norm
import kernels.triton_router as triton_router
from kernels import triton_cross_entropy
from kernels.cross_entropy import gradient_scale
from router import KERN

# N, C, H, E, K, V: the paper's model of 125M active parameters and others; "few" rows per expert, "gated" experts with
# SiLU, as config/modern_125m.toml has them
SHAPES: dict[str, tuple[Any, ...]] = {
    "125m": (32768, 768, 384, 64, 8, 50304),
    "wide": (65536, 2048, 1024, 32, 4, 131072),
    "narrow": (8192, 768, 96, 256, 64, 257),
    "odd": (8192, 1000, 200, 48, 5, 50257),
    "few": (8192, 768, 384, 256, 4, 32000),
    "gated": (32768, 768, 256, 64, 8, 50304, True),
}
SHARED_MEMORY = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # KB; a block takes 1 more than it asks
N_WARP = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
N_REGISTER = 65536  # of a multiprocessor, as the two above


class Kernel(NamedTuple):
    """A compiled kernel and what its SASS says.

    `wait` of 0 drains the pipeline in each step of the main loop; None: TMA loads the tiles, or there is no pipeline.
    ptxas serializes products where other instructions write HGMMA's accumulators (C7510 to C7515), unseen in the PTX.
    """

    name: str  # the function's, with the names of the switches that are on
    tile: str  # block sizes, rows x columns x depth of a product
    warps: int
    registers: int  # per thread
    shared: int  # bytes of shared memory per block
    spilled: int  # bytes of registers that went to local memory
    blocks: int  # that a multiprocessor holds at once
    wait: int | None  # the most groups of asynchronous copies (cp.async) that any wait leaves in flight
    mma: str | None  # opcode of the tensor cores' products, "" without any; None of kernels that are no product
    serialized: bool  # whether each of several products waits for the one before


def compile_launch(kernel: Any, values: Mapping[str, Any], options: dict[str, Any], sm: int) -> Any:
    """Compile what a launch of `kernel` with these arguments and options would run on compute capability `sm`."""
    signature, constants, aligned = {}, {}, {}
    for i, (parameter, (name, value)) in enumerate(zip(kernel.params, values.items(), strict=True)):
        if parameter.is_constexpr or (type(value) is int and value == 1):  # Triton makes a constant of 1
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def count_blocks(sm: int, registers: int, shared: int, warps: int) -> int:
    """Count the blocks that a multiprocessor holds at once, of `registers` per thread and `shared` bytes per block."""
    by_registers = N_REGISTER // (-(-registers // 8) * 8 * 32 * warps)  # given out in eights
    return min(by_registers, SHARED_MEMORY[sm] * 1024 // (shared + 1024), N_WARP[sm] // warps)


def read_sass(text: str) -> tuple[int | None, str, bool]:
    """Read `wait`, `mma` and `serialized` (see Kernel) from SASS, NVIDIA's machine code."""
    products = re.findall(r"\b(?:HGMMA|HMMA|UTC\w*MMA)[\w.]*", text)  # tensor cores of 9.0, 8.x, 10.0
    waits = [int(number, 16) for number in re.findall(r"\bDEPBAR\.LE SB\d, (0x[0-9a-f]+)", text)]
    n_drain = len(re.findall(r"\bDEPBAR\.LE gsb0, 0x0", text))  # waits that let no earlier HGMMA still run
    mma = Counter(products).most_common(1)[0][0] if products else ""
    return max(waits, default=None), mma, 1 < len(products) <= n_drain


def read_kernel(name: str, compiled: Any, values: Mapping[str, Any], sm: int) -> Kernel:
    """Read what was compiled for a launch with these arguments."""
    cubin, warps, shared = compiled.asm["cubin"], compiled.metadata.num_warps, compiled.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spilled = used["STACK"] + used["LOCAL"]
    tile = "x".join(str(values[side]) for side in ("ROWS", "COLS", "DEPTH", "BLOCK") if side in values)
    name = "+".join([name, *(key.lower() for key, value in values.items() if value is True)])
    blocks = count_blocks(sm, used["REG"], shared, warps)
    code = read_sass(text) if "DEPTH" in values else (None, None, False)  # the depth of a product
    return Kernel(name, tile, warps, used["REG"], shared, spilled, blocks, *code)


def compile_kernels(job: tuple[int, str, str]) -> list[Kernel]:
    """Compile every kernel of a compute capability, dtype and shape of SHAPES once; gated experts have SiLU."""
    sm, name, shape = job
    (N, C, H, E, K, V, *gates), dtype, fp32 = SHAPES[shape], getattr(torch, name), torch.float32
    gated, meta = any(gates), partial(torch.empty, dtype=dtype, device="meta")
    kernels: dict[Kernel, None] = {}  # a set in order

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = inspect.signature(kernel.fn).bind(*arguments).arguments
        compiled = compile_launch(kernel, values, options, sm)
        kernels[read_kernel(kernel.__name__.removesuffix("_kernel"), compiled, values, sm)] = None

    with (
        mock.patch.object(triton.runtime.JITFunction, "run", record),
        mock.patch.object(triton_experts, "major", lambda device: sm // 10),
    ):
        x, w_in, w_out = meta(N, C), meta(E, C, (1 + gated) * H), meta(E, H, C)
        weights = meta(N, K, dtype=fp32)
        out, *kept = triton_experts.forward(x, w_in, w_out, weights, meta(N, K, dtype=torch.int64), gated)
        triton_experts.backward(out, x, w_in, w_out, weights, *kept, silu=gated, grad_dtype=fp32)
        targets, losses = meta(N, dtype=torch.int64), meta(N, dtype=fp32)
        triton_cross_entropy.softmax_cross_entropy(meta(N, V), targets, losses, gradient_scale(dtype), True)
        logits, n_sequence, formula = meta(N, E, dtype=fp32), min(N, 32), (KERN.phi, KERN.pre, KERN.post)
        bias, c = logits[0], logits[0, :1]  # γ is as large as c
        gates, chosen, _, _, probability, _, z_loss = triton_router.forward(logits, bias, c, c, *formula, K, n_sequence)
        for upstream in ((gates, None, None), (gates, probability, z_loss)):  # the gates' gradient alone, and all
            triton_router.backward(logits, chosen, c, c, *formula, n_sequence, *upstream)
        stream, full = meta(N, C, dtype=fp32), dtype != fp32
        for bias, rms, exact in ((stream[0], False, full), (None, True, full), (None, False, False)):
            norms = triton_norm.forward(stream, x, stream[0], bias, 1e-5, rms, dtype, exact)
            triton_norm.backward(*norms, stream, stream[0], 1e-5, rms, dtype, bias is not None)
    return list(kernels)
