"""`scripts.bench limits`: the rates that the budget's model assumes of a GPU, measured."""
# Triton's stubs know neither constexpr arguments nor launch options.
# pyrefly: ignore-errors

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime import RunError, distributed
from scripts.bench import budget, cycles
from scripts.bench.harness import DTYPES, Benchmark

try:
    import triton
    import triton.language as tl
except ImportError:  # triton exists for Linux only
    triton = None

BLOCK = 4096  # elements of fp32 that a program reads at once
BUFFER = {"cuda": 512, "cpu": 4}  # blocks of it: 8 MB, which fit in the L2 cache and not in an L1
REPEAT = {"cuda": 256, "cpu": 2}  # blocks that a program reads
COPY = {"cuda": 2**28, "cpu": 2**16}  # elements of fp32
HEADS = {"cuda": (32, 12, 1024, 64), "cpu": (1, 1, 32, 16)}  # B, nh, T, hs: 125m.toml at 32 x 1,024 tokens
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

if triton:

    @triton.jit
    def read_kernel(x, out, N_BLOCK: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
        """Sum REPEAT blocks of x from this program's on, past the L1 cache, into this program's block of out."""
        at = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(REPEAT):
            total += tl.load(x + (tl.program_id(0) + i) % N_BLOCK * BLOCK + at, cache_modifier=".cg")
        tl.store(out + tl.program_id(0) * BLOCK + at, total)


def read_l2(x: Tensor, out: Tensor, repeat: int) -> None:
    """Read `repeat` blocks of x (blocks, BLOCK) in each of len(out) programs."""
    read_kernel[(len(out),)](x, out, len(x), repeat, BLOCK, num_warps=8)


def attend(q: Tensor, k: Tensor, v: Tensor, d_y: Tensor, backend: SDPBackend) -> None:
    """Run causal attention by one backend forward and backward."""
    with sdpa_kernel(backend):
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), d_y)


def bench_limits(args: Namespace, overrides: list[str]) -> None:
    """Measure what the budget assumes: L2 to multiprocessors, memory, and attention by flash and by cuDNN."""
    if overrides:
        raise RunError(f"unknown options {' '.join(overrides)}: limits takes no config keys")
    device = distributed.pick_device(args.device)
    kind = device.type
    dtype = args.dtype[0] if args.dtype else "float16" if kind == "cuda" else "float32"
    bench = Benchmark(args, device, f"attention in {dtype}", "B/clk/SM: at 1.7 GHz; the budget assumes the last column")
    n_sm = torch.cuda.get_device_properties(device).multi_processor_count if kind == "cuda" else 1
    x = torch.zeros(BUFFER[kind], BLOCK, device=device)
    out = torch.empty(8 * n_sm, BLOCK, device=device)
    source = torch.zeros(COPY[kind], device=device)
    B, heads, T, size = HEADS[kind]
    shape, q_k_v = (B, heads, T, size), []
    for _ in range(3):
        q_k_v.append(torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True))
    d_y = torch.randn(shape, device=device, dtype=DTYPES[dtype])
    functions: dict[str, Callable[[], Any]] = {"L2": partial(read_l2, x, out, REPEAT[kind])}
    functions["memory"] = partial(torch.empty_like(source).copy_, source)
    functions |= {name: partial(attend, *q_k_v, d_y, backend) for name, backend in BACKENDS.items()}
    median = bench.time(functions, may_fail=functions)
    flops = 7 * B * T * T * heads * size
    per_clock = n_sm * cycles.CLOCK
    amounts: dict[str, tuple[float, str, float]] = {  # what a call does, in units; the unit; assumed
        "L2": (len(out) * REPEAT[kind] * BLOCK * 4 / per_clock, "B/clk/SM", cycles.BANDWIDTH),
        "memory": (2 * source.nbytes / 1e12, "TB/s", budget.DRAM["H100"] / 1e12),
        "flash": (flops / 1e12, "TFLOP/s", budget.ATTENTION_RATE / 1e12),
        "cudnn": (flops / 1e12, "TFLOP/s", 1.4 * budget.ATTENTION_RATE / 1e12),
    }
    rows = []
    for name, seconds in median.items():
        amount, unit, assumed = amounts[name]
        rows.append([name, unit, 1000 * seconds, amount / seconds, assumed])
    bench.add_table(["rate", "unit", "ms", "measured", "assumed"], rows)
