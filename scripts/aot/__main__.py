"""Compile every Triton kernel without a GPU, print what came out, and fail where it is worse than limits.py says.

    python -m scripts.aot [--sm 90] [--shape 125m] [--dtype float16]

Everything takes 5 minutes of one core; kernels compiled before are cached. Columns after the launch's: registers per
thread; KB of shared memory per block; bytes spilled; blocks that a multiprocessor holds at once; wait, the most loads
(cp.async groups) that a wait leaves in flight, 0 drains the pipeline; the MMA (tensor-core instruction).

Exits with 1 if a kernel spills or takes more shared memory than a block may have; or, in half precision, if it has
fewer blocks or loads in flight than its limit, a product without its architecture's MMA, or one that waits for every
single MMA ("serialised"), except as limits.py admits.
"""

import multiprocessing
from itertools import product

import triton

import kernels.triton_experts as triton_experts
from common.command import build_parser, command, run_command
from scripts.aot.launches import SHAPES, compile_kernels
from scripts.aot.limits import SHARED, find_faults

DTYPES = [str(dtype).removeprefix("torch.") for dtype in triton_experts.DTYPES]
HEAD = "sm", "dtype", "shape", "kernel", "tile", "warps", "registers", "shared KB", "spilled", "blocks", "wait", "MMA"
LINE = "{:<3}  {:<8}  {:<6}  {:<38}  {:<10}  {:>5}  {:>9}  {:>9}  {:>7}  {:>6}  {:>4}  {}"


@command
def main(argv: list[str] | None = None) -> int:
    """Compile, print and compare."""
    parser = build_parser("scripts.aot", __doc__)
    parser.add_argument("--sm", type=int, choices=SHARED, nargs="+", default=[80, 90, 100])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="(default: all)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="(default: all)")
    args = parser.parse_args(argv)
    if triton_experts.INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set, which compiles nothing: unset it")
    jobs = list(product(args.sm, args.dtype, args.shape))
    print(f"Triton {triton.__version__}")
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
