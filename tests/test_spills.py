"""Every Triton kernel at 125m.toml's widths, compiled for an H100 or H200 without one.

ptxas says how many registers each spills and whether it waits for every product (wgmma) alone.
"""

import inspect
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from runs import REPO_ROOT

from configure.schema import Model

pytest.importorskip("triton")

SM = 90
LARGEST_SHARED = 227 * 1024  # bytes that a block may have on sm_90
SPILLED = {"weight_grad": 32}  # outside of its loop over rows; other kernels spill nothing


def compile_launch(kernel, values, options):
    """What a launch of a kernel with these arguments would run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    signature, constants, aligned = {}, {}, {}
    for i, (parameter, (name, value)) in enumerate(zip(kernel.params, values.items(), strict=True)):
        if parameter.is_constexpr or (type(value) is int and value == 1):  # as Triton does with 1
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", SM, 32), options=options)


def read_machine_code(compiled):
    """(bytes spilled, products, waits for all products before them)."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", text))
    return (
        spilled,
        len(re.findall(r"\bHGMMA", text)),
        len(re.findall(r"DEPBAR\.LE gsb0, 0x0", text)),
    )


def launch_all():
    """Both passes of each kernel, as runtime/kernel_check.py launches them for 125m.toml."""
    import kernels
    from kernels import cross_entropy, triton_kernels, triton_router
    from router import KERN
    from runtime import kernel_check

    with (
        mock.patch.object(kernels, "triton", triton_kernels),
        mock.patch.object(kernels, "choose_backend", return_value="triton"),
        mock.patch.object(cross_entropy, "choose_backend", return_value="triton"),
        mock.patch.object(kernel_check, "is_near", return_value=True),
        mock.patch.object(kernel_check, "ROWS", 16),
    ):
        kernel_check.find_wrong_kernel(Model(), 32768, torch.device("cpu"), torch.float16)
    # of several sequences, and without losses of the router
    logits, formula = torch.randn(512, 64), (KERN.phi, KERN.pre, KERN.post)
    bias, c = logits[0], logits[0, :1]
    gates, chosen, *_ = triton_router.forward(logits, bias, c, c, *formula, 8, 4)
    triton_router.backward(logits, chosen, c, c, *formula, 4, gates, None, None)


def compile_all():
    """{kernel: what is wrong with it}, of each launch."""
    import triton

    from kernels import triton_experts

    faults = {}

    def compile_instead(kernel, *arguments, grid, warmup, **named):
        signature = inspect.signature(kernel.fn)
        options = {name: named.pop(name) for name in [*named] if name not in signature.parameters}
        values = signature.bind(*arguments, **named).arguments
        compiled = compile_launch(kernel, values, options)
        name = kernel.__name__.removesuffix("_kernel")
        spilled, n_product, n_wait = read_machine_code(compiled)
        found = faults.setdefault(name, [])
        if spilled > SPILLED.get(name, 0):
            found.append(f"spills {spilled} bytes")
        if compiled.metadata.shared > LARGEST_SHARED:
            found.append(f"{compiled.metadata.shared} bytes of shared memory")
        if "DEPTH" in values and n_product == 0:
            found.append("no wgmma")
        if 1 < n_product <= n_wait:
            found.append("serialised products")

    with (
        mock.patch.object(triton.runtime.JITFunction, "run", compile_instead),
        mock.patch.object(triton_experts, "major", lambda device: SM // 10),
    ):
        launch_all()
    return faults


@pytest.mark.integration
def test_kernels_for_an_h100_spill_nothing_and_overlap_their_products(tmp_path):
    """In a process without Triton's interpreter, which the other tests set."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(REPO_ROOT), str(REPO_ROOT / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, cwd=REPO_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = dict(line.split(": ") for line in done.stdout.splitlines())
    assert {"up", "rows_ahead", "down_grad", "weight_grad", "route", "adamw"} <= printed.keys()
    assert set(printed.values()) == {"ok"}, printed


if __name__ == "__main__":
    for kernel, faults in compile_all().items():
        print(f"{kernel}: {', '.join(faults) or 'ok'}")
