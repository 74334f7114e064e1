"""Compile every Triton kernel for sm_80 and sm_90 without a GPU, and print the registers and memory each takes.

    python -m scripts.aot [--shape 125m] [--dtype float16]     everything takes 3 minutes

Exits with 1 if a kernel spills registers or takes more shared memory than a block may have.

Both passes of the experts and the Triton part of the LM head run on meta tensors, and each launch is compiled instead:
what is compiled is what would run.
"""

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels.triton_experts as triton_experts
from kernels import triton_cross_entropy
from kernels.cross_entropy import gradient_scale

SHAPES = {  # N, C, H, E, K, V: the paper's model of 125M active parameters and others; "few" rows per expert
    "125m": (32768, 768, 384, 64, 8, 50304),
    "wide": (65536, 2048, 1024, 32, 4, 131072),
    "narrow": (8192, 768, 96, 256, 64, 257),
    "odd": (8192, 1000, 200, 48, 5, 50257),
    "few": (8192, 768, 384, 256, 4, 32000),
}
SHARED = {80: 99 * 1024, 90: 227 * 1024}  # bytes per block; 99 KB for compute capability 8.6, 8.9 and 12.0
POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "int64": "*i64"}
LINE = "{:<2}  {:<8}  {:<6}  {:<11}  {:<10}  {:>5}  {:>6}  {:>9}  {:>9}  {:>9}"


def dtype_name(dtype: torch.dtype) -> str:
    """Name a type without its "torch."."""
    return str(dtype).removeprefix("torch.")


def compile_launch(kernel: Any, values: Mapping[str, Any], options: dict[str, Any], sm: int) -> Any:
    """Compile what a launch of `kernel` with these arguments and options would run on compute capability `sm`."""
    signature, constants, aligned = {}, {}, {}
    for i, (parameter, (name, value)) in enumerate(zip(kernel.params, values.items(), strict=True)):
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = POINTERS[dtype_name(value.dtype)] if isinstance(value, torch.Tensor) else "i32"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def read_resources(compiled: Any) -> tuple[int, int, int]:
    """Read registers per thread, bytes of shared memory per block, and bytes spilled per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], compiled.metadata.shared, used["STACK"] + used["LOCAL"]


def compile_kernels(sm: int, dtype: torch.dtype, N: int, C: int, H: int, E: int, K: int, V: int) -> list[tuple]:
    """Compile every kernel once: (name, tile, warps, stages, registers, shared, spilled) each."""
    lines = {}

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = inspect.signature(kernel.fn).bind(*arguments).arguments
        compiled = compile_launch(kernel, values, options, sm)
        tile = "x".join(str(values[side]) for side in ("ROWS", "COLS", "DEPTH", "BLOCK") if side in values)
        warps, stages = compiled.metadata.num_warps, compiled.metadata.num_stages
        name = kernel.__name__.removesuffix("_kernel")
        lines[name, tile, warps, stages, *read_resources(compiled)] = None

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with (
        mock.patch.object(triton.runtime.JITFunction, "run", record),
        mock.patch.object(triton_experts, "major", lambda device: sm // 10),
    ):
        x, w_in, w_out, weights = meta(N, C), meta(E, C, H), meta(E, H, C), meta(N, K, dtype=torch.float32)
        out, *kept = triton_experts.forward(x, w_in, w_out, weights, meta(N, K, dtype=torch.int64))
        triton_experts.backward(out, x, w_in, w_out, weights, *kept)
        targets, losses = meta(N, dtype=torch.int64), meta(N, dtype=torch.float32)
        triton_cross_entropy.softmax_cross_entropy(meta(N, V), targets, losses, gradient_scale(dtype), True)
    return list(lines)


def main() -> None:
    """Print a line per kernel, type, shape and architecture."""
    dtypes = {dtype_name(dtype): dtype for dtype in triton_experts.DTYPES}
    parser = argparse.ArgumentParser(prog="python -m scripts.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=SHAPES, help="(default: all)")
    parser.add_argument("--dtype", choices=dtypes, nargs="+", default=dtypes, help="(default: all)")
    args = parser.parse_args()
    if triton_experts.INTERPRETED:
        parser.error("TRITON_INTERPRET is set, which compiles nothing: unset it")
    failed = 0
    head = "sm", "dtype", "shape", "kernel", "tile", "warps", "stages", "registers", "shared KB", "spilled B"
    print(LINE.format(*head))
    for (sm, limit), dtype, shape in product(SHARED.items(), args.dtype, args.shape):
        for *kernel, registers, shared, spilled in compile_kernels(sm, dtypes[dtype], *SHAPES[shape]):
            line = LINE.format(sm, dtype, shape, *kernel, registers, f"{shared / 1024:.1f}", spilled)
            bad = spilled > 0 or shared > limit
            failed += bad
            print(f"{line}  too much" if bad else line, flush=True)
    if failed:
        sys.exit(f"{failed} kernels take too much")


if __name__ == "__main__":
    main()
