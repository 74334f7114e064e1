"""Compile every Triton kernel without a GPU, print what came out, and fail where it is worse than pinned.

    python -m scripts.aot [--sm 90] [--shape 125m] [--dtype float16] [--jobs N]
    python -m scripts.aot --pin [...]                      then writes today's figures to scripts/aot/pinned.csv

Everything takes 5 minutes of one core; kernels compiled before are cached. Columns after the launch's: registers per
thread; KB of shared memory per block; bytes spilled; blocks that a multiprocessor holds at once; buffers, tiles of one
step in shared memory; wait, loads (cp.async groups) still in flight when a step of the main loop waits; the MMA
(tensor-core instruction); other instructions per 4 MMAs in the main loop.

Exits with 1 if a kernel spills or takes more shared memory than a block may have; or, in half precision, if a product
has no MMA, waits for all loads in its main loop (0 drains the pipeline), or has fewer blocks, buffers or loads in
flight, another MMA, or 1.25 times the other instructions of pinned.csv. A spill or a wait of 0 that pinned.csv has is
a known fault, named on its line and at the end. Pins belong to the installed Triton's minor version; the newest pinned
version stands in for another.

Under another Triton, such as the one of an older torch:

    pip install --no-deps --target /tmp/triton triton==3.6.0
    PYTHONPATH=/tmp/triton python -m scripts.aot
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import product

import triton

import kernels.triton_experts as triton_experts
from common.command import run_command
from scripts.aot import pinned
from scripts.aot.launches import SHAPES, Kernel, compile_kernels, dtype_name

DTYPES = {dtype_name(dtype): dtype for dtype in triton_experts.DTYPES}
HEAD = ("sm", "dtype", "shape", "kernel", "tile", "warps", "stages", "registers", "shared KB", "spilled")
HEAD += ("blocks", "buffers", "wait", "other", "MMA")
LINE = "{:<3}  {:<8}  {:<6}  {:<20}  {:<10}  {:>5}  {:>6}  {:>9}  {:>9}  {:>7}  {:>6}  {:>7}  {:>4}  {:>5}  {}"

Job = tuple[int, str, str]  # compute capability, type, shape


def format_kernel(job: Job, kernel: Kernel) -> str:
    """Format a kernel's line of the table."""
    wait, mma = (kernel.loop.wait, kernel.loop.mma) if kernel.loop else (None, "")
    shared = f"{kernel.shared / 1024:.1f}"
    cells = [*job, *kernel[:5], shared, kernel.spilled, kernel.blocks, kernel.buffers or None, wait, kernel.other, mma]
    return LINE.format(*("-" if cell in (None, "") else cell for cell in cells))


def compile_job(job: Job) -> list[Kernel]:
    """Compile the kernels of one shape and type."""
    sm, dtype, shape = job
    return compile_kernels(sm, DTYPES[dtype], *SHAPES[shape])


def compile_jobs(jobs: list[Job], n_process: int) -> Iterator[list[Kernel]]:
    """Compile the jobs in processes; yields their kernels in the jobs' order."""
    if min(n_process, len(jobs)) == 1:
        yield from map(compile_job, jobs)
        return
    with multiprocessing.get_context("fork").Pool(min(n_process, len(jobs))) as pool:
        yield from pool.imap(compile_job, jobs)


def pick_version(pins: Iterable[pinned.Key]) -> tuple[str, str]:
    """Pick the installed Triton's minor version, and the one whose pins count: the same, or else the newest."""
    installed = ".".join(triton.__version__.split(".")[:2])
    versions = {key[0] for key in pins}
    newest = max(versions, key=lambda version: [int(part) for part in version.split(".")], default=installed)
    return installed, installed if installed in versions else newest


def covers(job: Job, key: pinned.Key) -> bool:
    """Tell whether a job compiles the kernel of a pin."""
    sm, dtype, shape = job
    return key[1:3] == (str(sm), shape) and key[3].endswith(" float32") == (dtype == "float32")


def report(jobs: list[Job], n_process: int, pin: bool) -> list[str]:
    """Print a line per kernel; returns the faults. With `pin`, write the figures instead of comparing them."""
    pins = pinned.read_pins()
    installed, version = pick_version(pins)
    version = installed if pin else version
    print(f"Triton {triton.__version__}" + ("" if pin else f", compared with pins of {version}"))
    print(LINE.format(*HEAD))
    faults, admitted, seen = [], set(), dict[pinned.Key, list[Kernel]]()
    for job, found in zip(jobs, compile_jobs(jobs, n_process), strict=True):
        sm, dtype, shape = job
        half = dtype != "float32"
        for kernel in found:
            key = (version, str(sm), shape, kernel.name if half else f"{kernel.name} {dtype}")
            row = pinned.make_row(key, [kernel]) if pin else pins.get(key)
            wrong, known = pinned.find_faults(kernel, sm, half, row)
            faults += [f"sm_{sm} {dtype} {shape} {kernel.name}: {fault}" for fault in wrong]
            admitted |= {f"sm_{sm} {kernel.name} {fault}" for fault in known}
            print("  ".join([format_kernel(job, kernel), *wrong, *(f"known: {fault}" for fault in known)]), flush=True)
            if half or kernel.spilled:
                seen.setdefault(key, []).append(kernel)
    mine = {key for key in pins if key[0] == version and any(covers(job, key) for job in jobs)}
    if pin:
        pins = {key: row for key, row in pins.items() if key not in mine}
        pinned.write_pins(pins | {key: pinned.make_row(key, kernels) for key, kernels in seen.items()})
    else:
        gone = sorted(mine - set(seen))
        faults += [f"sm_{sm} {shape} {name}: in pinned.csv, but not launched; --pin" for _, sm, shape, name in gone]
    if admitted:
        print("known faults, in pinned.csv: " + ", ".join(sorted(admitted)))
    return faults


def main() -> None:
    """Compile, print and compare."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sm", type=int, choices=pinned.SHARED, nargs="+", default=list(pinned.SHARED))
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="(default: all)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="(default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: cores)")
    parser.add_argument("--pin", action="store_true", help="write the figures to scripts/aot/pinned.csv")
    args = parser.parse_args()
    if triton_experts.INTERPRETED:
        parser.error("TRITON_INTERPRET is set, which compiles nothing: unset it")
    if args.pin and len(set(args.dtype)) < len(DTYPES):
        parser.error("--pin takes the worst of all types: leave --dtype out")
    faults = report(list(product(args.sm, args.dtype, args.shape)), max(args.jobs, 1), args.pin)
    if faults:
        sys.exit("\n".join([*faults, f"{len(faults)} faults"]))


if __name__ == "__main__":
    run_command(main)
