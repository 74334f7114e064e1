"""Compile every Triton kernel without a GPU, and fail where one is worse than LEAST says.

    python -m tools.aot [--sm 90] [--shape 125m] [--dtype float16]

Everything takes 5 minutes of one core; kernels compiled before are cached. Columns after the
launch's: registers per thread; KB of shared memory per block; bytes spilled; blocks that a
multiprocessor holds at once; wait, the most loads (cp.async groups) that a wait leaves in flight, 0
drains the pipeline; the MMA (tensor-core instruction).

Exits with 1 if a kernel spills or takes more shared memory than a block may have; or, in half
precision, if it has fewer blocks or loads in flight than its limit, a product without its
architecture's MMA, or one that waits for every single MMA ("serialised").

Both passes of the experts, of KERN's router and of norms, the Triton part of the LM head and
AdamW's step run on meta tensors, and each launch is compiled instead: what is compiled is what
would run.
"""

import inspect
import multiprocessing
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

import kernels.triton_adamw as triton_adamw
import kernels.triton_cross_entropy as triton_cross_entropy
import kernels.triton_experts as triton_experts
import kernels.triton_linear as triton_linear
import kernels.triton_norm as triton_norm
import kernels.triton_router as triton_router
from common.command import build_parser, command, run_command
from common.text import plural
from kernels.cross_entropy import gradient_scale
from router import KERN

# N, C, H, E, K, V: the paper's model of 125M active parameters and others; "few" rows per expert,
# "gated" experts with SiLU, as config/modern_125m.toml has them
SHAPES: dict[str, tuple[Any, ...]] = {
    "125m": (32768, 768, 384, 64, 8, 50304),
    "wide": (65536, 2048, 1024, 32, 4, 131072),
    "narrow": (8192, 768, 96, 256, 64, 257),
    "odd": (8192, 1000, 200, 48, 5, 50257),
    "few": (8192, 768, 384, 256, 4, 32000),
    "gated": (32768, 768, 256, 64, 8, 50304, True),
}
# KB; a block takes 1 more than it asks
SHARED_MEMORY = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
N_WARP = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
N_REGISTER = 65536  # of a multiprocessor, as the two above

# What a kernel may not fall below: rules, and a row per kernel with the least over all shapes in
# half precision.
# KB a block may have; 8.0 shares its tiles with 8.6
SHARED = {80: 99, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# the tensor-core instruction of half precision; HMMA of the others
MMA = {90: "HGMMA", 100: "UTCHMMA"}
COLUMNS = {90: 1, 100: 2}  # of LEAST; 0 of the others

# Of sm_80 (with 86, 89 and 120), sm_90 and sm_100: the least blocks on a multiprocessor, and, where
# cp.async loads the tiles, the least loads in flight (Kernel.wait). The longest name that a
# kernel's begins with counts.
LEAST = {
    "count": [(12, 12, 12)],
    "place": [(8, 8, 8)],
    "table": [(36, 36, 36)],
    "combine": [(12, 16, 12)],
    "up": [(1, 2, 2), (4, 2, 2)],
    "up+glu": [(1, 1, 1), (4, 1, 1)],
    "rows": [(1, 1, 1), (4, 2, 2)],
    "down_grad": [(2, 2, 2), (2, 2, 2)],
    "weight_grad": [(2, 1, 1), (2, 2, 2)],
    "add_partial": [(8, 8, 8)],
    "share": [(64, 64, 64)],
    "softmax": [(1, 2, 2)],
    "route": [(4, 4, 4)],
    "route_sum": [(5, 5, 6)],
    "adamw": [(8, 8, 8)],
    "logits": [(1, 1, 1), (1, 1, 1)],
    "add_norm": [(6, 6, 6)],
    "add_norm_grad": [(3, 3, 3)],
}
# The most bytes of registers that a kernel may spill.
SPILLED = {"down_grad": 24, "place": 8, "up": 16, "weight_grad": 32}
# The same of the 125m model's on sm_90. weight_grad's are outside of the loop over its rows.
SPILLED_125M = {"weight_grad": 32}

DTYPES = [str(dtype).removeprefix("torch.") for dtype in triton_experts.DTYPES]
HEAD = (
    "sm",
    "dtype",
    "shape",
    "kernel",
    "tile",
    "warps",
    "registers",
    "shared KB",
    "spilled",
    "blocks",
    "wait",
    "MMA",
)
LINE = "{:<3}  {:<8}  {:<6}  {:<38}  {:<10}  {:>5}  {:>9}  {:>9}  {:>7}  {:>6}  {:>4}  {}"


class Kernel(NamedTuple):
    """A compiled kernel and what its SASS says.

    `wait` of 0 drains the pipeline in each step of the main loop; None: TMA loads the tiles, or
    there is no pipeline. ptxas serializes products where other instructions write HGMMA's
    accumulators (C7510 to C7515), unseen in the PTX.
    """

    name: str  # the function's, with the names of the switches that are on
    tile: str  # block sizes, rows x columns x depth of a product
    warps: int
    registers: int  # per thread
    shared: int  # bytes of shared memory per block
    spilled: int  # bytes of registers that went to local memory
    blocks: int  # that a multiprocessor holds at once
    # the most groups of asynchronous copies (cp.async) that any wait leaves in flight
    wait: int | None
    # opcode of the tensor cores' products, "" without any; None of kernels that are no product
    mma: str | None
    serialized: bool  # whether each of several products waits for the one before


def compile_launch(kernel: Any, values: Mapping[str, Any], options: dict[str, Any], sm: int) -> Any:
    """Compile what a launch of `kernel` would run on compute capability `sm`."""
    signature, constants, aligned = {}, {}, {}
    for i, (parameter, (name, value)) in enumerate(zip(kernel.params, values.items(), strict=True)):
        # Triton makes a constant of 1
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def count_blocks(sm: int, registers: int, shared: int, warps: int) -> int:
    """Count the blocks that a multiprocessor holds at once."""
    by_registers = N_REGISTER // (-(-registers // 8) * 8 * 32 * warps)  # given out in eights
    return min(by_registers, SHARED_MEMORY[sm] * 1024 // (shared + 1024), N_WARP[sm] // warps)


def read_sass(text: str) -> tuple[int | None, str, bool]:
    """Read `wait`, `mma` and `serialized` (see Kernel) from SASS, NVIDIA's machine code."""
    # tensor cores of 9.0, 8.x, 10.0
    products = re.findall(r"\b(?:HGMMA|HMMA|UTC\w*MMA)[\w.]*", text)
    waits = [int(number, 16) for number in re.findall(r"\bDEPBAR\.LE SB\d, (0x[0-9a-f]+)", text)]
    # waits that let no earlier HGMMA still run
    n_drain = len(re.findall(r"\bDEPBAR\.LE gsb0, 0x0", text))
    mma = Counter(products).most_common(1)[0][0] if products else ""
    return max(waits, default=None), mma, 1 < len(products) <= n_drain


def read_kernel(name: str, compiled: Any, values: Mapping[str, Any], sm: int) -> Kernel:
    """Read what was compiled for a launch with these arguments."""
    cubin, warps, shared = (
        compiled.asm["cubin"],
        compiled.metadata.num_warps,
        compiled.metadata.shared,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spilled = used["STACK"] + used["LOCAL"]
    tile = "x".join(
        str(values[side]) for side in ("ROWS", "COLS", "DEPTH", "BLOCK") if side in values
    )
    name = "+".join([name, *(key.lower() for key, value in values.items() if value is True)])
    blocks = count_blocks(sm, used["REG"], shared, warps)
    code = read_sass(text) if "DEPTH" in values else (None, None, False)  # the depth of a product
    return Kernel(name, tile, warps, used["REG"], shared, spilled, blocks, *code)


def compile_kernels(job: tuple[int, str, str]) -> list[Kernel]:
    """Compile every kernel of a job (sm, dtype, shape) once; gated experts have SiLU."""
    sm, name, shape = job
    (N, C, H, E, K, V, *gates), dtype, fp32 = SHAPES[shape], getattr(torch, name), torch.float32
    gated, meta = any(gates), partial(torch.empty, dtype=dtype, device="meta")
    kernels: dict[Kernel, None] = {}  # a set in order

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        signature = inspect.signature(kernel.fn)
        options = {key: named.pop(key) for key in list(named) if key not in signature.parameters}
        values = signature.bind(*arguments, **named).arguments
        compiled = compile_launch(kernel, values, options, sm)
        kernels[read_kernel(kernel.__name__.removesuffix("_kernel"), compiled, values, sm)] = None

    with (
        mock.patch.object(triton.runtime.JITFunction, "run", record),
        mock.patch.object(triton_experts, "major", lambda device: sm // 10),
    ):
        x, w_in, w_out = meta(N, C), meta(E, C, (1 + gated) * H), meta(E, H, C)
        weights = meta(N, K, dtype=fp32)
        out, *kept = triton_experts.forward(
            x, w_in, w_out, weights, meta(N, K, dtype=torch.int64), gated
        )
        triton_experts.backward(out, x, w_in, w_out, weights, *kept, silu=gated, grad_dtype=fp32)
        targets, losses = meta(N, dtype=torch.int64), meta(N, dtype=fp32)
        triton_cross_entropy.softmax_cross_entropy(
            meta(N, V), targets, losses, gradient_scale(dtype), True
        )
        logits, n_sequence, formula = (
            meta(N, E, dtype=fp32),
            min(N, 32),
            (KERN.phi, KERN.pre, KERN.post),
        )
        bias, c = logits[0], logits[0, :1]  # γ is as large as c
        gates, chosen, _, _, probability, _, z_loss = triton_router.forward(
            logits, bias, c, c, *formula, K, n_sequence
        )
        # the gates' gradient alone, and all
        for upstream in ((gates, None, None), (gates, probability, z_loss)):
            triton_router.backward(logits, chosen, c, c, *formula, n_sequence, *upstream)
        stream, full = meta(N, C, dtype=fp32), dtype != fp32
        if sm // 10 == triton_linear.CAPABILITY and E <= triton_linear.LARGEST:
            router_weight = meta(E, C, dtype=fp32)
            triton_linear.forward(stream, router_weight, c)
            triton_linear.backward(logits, stream, router_weight)
        for bias, rms, exact in (
            (stream[0], False, full),
            (None, True, full),
            (None, False, False),
        ):
            norms = triton_norm.forward(stream, x, stream[0], bias, 1e-5, rms, dtype, exact)
            triton_norm.backward(*norms, stream, stream[0], 1e-5, rms, dtype, bias is not None)
        if full:
            weight, scalar = meta(E, C, H, dtype=fp32), c[0]
            moments, numbers = (weight, weight), (scalar, scalar, scalar)
            triton_adamw.adamw_step(
                weight, weight, *moments, w_out, *numbers, 1e-3, (0.9, 0.95), 1e-8, 0.1
            )
    return list(kernels)


def find_faults(kernel: Kernel, sm: int, shape: str, half: bool) -> list[str]:
    """Find what is wrong with a kernel of this shape, in `half` precision or in float32."""
    faults = []
    function, column = kernel.name.partition("+")[0], COLUMNS.get(sm, 0)
    spilled = SPILLED_125M if (shape, sm) == ("125m", 90) else SPILLED
    if kernel.spilled > spilled.get(function, 0):
        faults.append(f"spills {kernel.spilled} B")
    if kernel.shared > SHARED[sm] * 1024:
        faults.append("too much shared memory")
    if not half:
        return faults
    rows = sorted(filter(kernel.name.startswith, LEAST), key=len)
    if not rows:
        return [*faults, "no row in LEAST of tools/aot.py: add it"]
    blocks, *loads = LEAST[rows[-1]]
    if kernel.blocks < blocks[column]:
        faults.append(f"blocks < {blocks[column]}")
    if kernel.wait is not None and kernel.wait < loads[0][column]:
        faults.append(f"wait < {loads[0][column]}")
    mma = MMA.get(sm, "HMMA")
    if kernel.mma is not None and not kernel.mma.startswith(mma):
        faults.append(f"no {mma}")
    if kernel.serialized:
        faults.append("serialised products")
    return faults


@command
def main(argv: list[str] | None = None) -> int:
    """Compile, print and compare."""
    parser = build_parser("tools.aot", __doc__)
    parser.add_argument("--sm", type=int, choices=SHARED, nargs="+", default=[80, 90, 100])
    parser.add_argument(
        "--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="(default: all)"
    )
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="(default: all)")
    args = parser.parse_args(argv)
    if triton_experts.INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set, which compiles nothing: unset it")
    jobs = list(product(args.sm, args.dtype, args.shape))
    print(f"Triton {triton.__version__}; {plural(len(jobs), 'job')} (all 54: 5 minutes of a core)")
    print(LINE.format(*HEAD))
    n_fault = 0
    with multiprocessing.get_context("fork").Pool() as pool:
        for job, kernels in zip(jobs, pool.imap(compile_kernels, jobs), strict=True):
            sm, dtype, shape = job
            for kernel in kernels:
                faults = find_faults(kernel, sm, shape, half=dtype != "float32")
                n_fault += len(faults)
                cells = [*job, *kernel[:4], f"{kernel.shared / 1024:.1f}", *kernel[5:9]]
                line = LINE.format(*("-" if cell in (None, "") else cell for cell in cells))
                print("  ".join([line, *faults]), flush=True)
    print(f"{n_fault} faults")
    return 1 if n_fault else 0


if __name__ == "__main__":
    run_command(main)
