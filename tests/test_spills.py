"""Every Triton kernel at 125m.toml's shapes, compiled for an H100 or H200 without one.

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

pytest.importorskip("triton")

SM = 90
N, C, H, E, K, V = 32768, 768, 384, 64, 8, 50304  # 125m.toml, 64 windows of 512 tokens
N_SEQUENCE = 64
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
    """Both passes of each kernel on tensors without values."""
    from kernels import (
        triton_adamw,
        triton_cross_entropy,
        triton_experts,
        triton_linear,
        triton_norm,
        triton_router,
    )
    from kernels.cross_entropy import gradient_scale
    from router import KERN

    half, fp32 = torch.float16, torch.float32

    def empty(*shape, dtype=half):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, w_in, w_out, weights = empty(N, C), empty(E, C, H), empty(E, H, C), empty(N, K, dtype=fp32)
    experts = empty(N, K, dtype=torch.int64)
    out, *kept = triton_experts.forward(x, w_in, w_out, weights, experts, False)
    triton_experts.backward(out, x, w_in, w_out, weights, *kept, silu=False, grad_dtype=fp32)
    triton_cross_entropy.softmax_cross_entropy(
        empty(N, V), empty(N, dtype=torch.int64), empty(N, dtype=fp32), gradient_scale(half), True
    )
    logits, stream = empty(N, E, dtype=fp32), empty(N, C, dtype=fp32)
    bias, c = logits[0], logits[0, :1]  # γ is as large as c
    formula = (KERN.phi, KERN.pre, KERN.post)
    gates, chosen, _, _, probability, _, z_loss = triton_router.forward(
        logits, bias, c, c, *formula, K, N_SEQUENCE
    )
    for upstream in ((gates, None, None), (gates, probability, z_loss)):
        triton_router.backward(logits, chosen, c, c, *formula, N_SEQUENCE, *upstream)
    triton_linear.forward(stream, empty(E, C, dtype=fp32), c)
    triton_linear.backward(logits, stream, empty(E, C, dtype=fp32))
    norms = triton_norm.forward(stream, x, stream[0], None, 1e-5, False, half, True)
    triton_norm.backward(*norms, stream, stream[0], 1e-5, False, half, False)
    master, scalar = empty(E, C, H, dtype=fp32), c[0]
    triton_adamw.adamw_step(
        master, master, master, master, w_out, scalar, scalar, scalar, 1e-3, (0.9, 0.95), 1e-8, 0.1
    )


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
