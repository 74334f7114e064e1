"""Compile every Triton kernel without a GPU, print what came out, and fail where it is worse than limits.py says.

    python -m scripts.aot [--sm 90] [--shape 125m] [--dtype float16] [--jobs N]

Everything takes 5 minutes of one core; kernels compiled before are cached. Columns after the launch's: registers per
thread; KB of shared memory per block; bytes spilled; blocks that a multiprocessor holds at once; wait, loads (cp.async
groups) still in flight when a step of the main loop waits, 0 drains the pipeline; the MMA (tensor-core instruction).

Exits with 1 if a kernel spills or takes more shared memory than a block may have; or, in half precision, if it has
fewer blocks or loads in flight than its limit, a product without its architecture's MMA, or one that waits for every
single MMA ("serialised"). Faults that limits.py admits are marked "known".

Under another Triton, such as the one of an older torch:

    pip install --no-deps --target /tmp/triton triton==3.6.0
    PYTHONPATH=/tmp/triton python -m scripts.aot
"""

import multiprocessing
import os
from itertools import product

import triton

import kernels.triton_experts as triton_experts
from common.command import build_parser, command, run_command
from scripts.aot.launches import SHAPES, Kernel, compile_kernels, dtype_name
from scripts.aot.limits import SHARED, find_faults

DTYPES = {dtype_name(dtype): dtype for dtype in triton_experts.DTYPES}
HEAD = ("sm", "dtype", "shape", "kernel", "tile", "warps", "registers", "shared KB", "spilled", "blocks", "wait", "MMA")
LINE = "{:<3}  {:<8}  {:<6}  {:<38}  {:<10}  {:>5}  {:>9}  {:>9}  {:>7}  {:>6}  {:>4}  {}"

Job = tuple[int, str, str]  # compute capability, dtype, shape


def format_kernel(job: Job, kernel: Kernel) -> str:
    """Format a kernel's line of the table."""
    wait, mma = (kernel.loop.wait, kernel.loop.mma) if kernel.loop else (None, "")
    shared = f"{kernel.shared / 1024:.1f}"
    cells = [*job, *kernel[:4], shared, kernel.spilled, kernel.blocks, wait, mma]
    return LINE.format(*("-" if cell in (None, "") else cell for cell in cells))


def compile_job(job: Job) -> list[Kernel]:
    """Compile the kernels of one shape and dtype."""
    sm, dtype, shape = job
    return compile_kernels(sm, DTYPES[dtype], *SHAPES[shape])


@command
def main(argv: list[str] | None = None) -> int:
    """Compile, print and compare."""
    parser = build_parser("scripts.aot", __doc__)
    parser.add_argument("--sm", type=int, choices=SHARED, nargs="+", default=list(SHARED))
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="(default: all)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="(default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: cores)")
    args = parser.parse_args(argv)
    if triton_experts.INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set, which compiles nothing: unset it")
    jobs: list[Job] = list(product(args.sm, args.dtype, args.shape))
    print(f"Triton {triton.__version__}")
    print(LINE.format(*HEAD))
    n_fault = 0
    with multiprocessing.get_context("fork").Pool(min(args.jobs, len(jobs))) as pool:
        for job, kernels in zip(jobs, pool.imap(compile_job, jobs), strict=True):
            sm, dtype, shape = job
            for kernel in kernels:
                faults, known = find_faults(kernel, sm, shape, half=dtype != "float32")
                n_fault += len(faults)
                notes = [*faults, *(f"known: {fault}" for fault in known)]
                print("  ".join([format_kernel(job, kernel), *notes]), flush=True)
    print(f"{n_fault} faults")
    return 1 if n_fault else 0


if __name__ == "__main__":
    run_command(main)
