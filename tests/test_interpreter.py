"""tests/interpreter.py against the interpreter as it is, and against PTX for an H100."""

import math
import os
import subprocess
import sys

import pytest
import torch
from interpreter import gpu_arithmetic
from runs import REPO_ROOT

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def probe(x, largest, rounded, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(largest + at, tl.maximum(value, 1.5))
    tl.store(rounded + at, value.to(tl.bfloat16))


def run_probe(device="cpu"):
    """Maxima with 1.5, and bfloat16, of a number above the middle of two, of NaN, and of others."""
    values = torch.tensor([1.0, 1 + 2**-8 + 2**-9, math.nan, 2.0], device=device)
    largest = torch.empty(4, device=device)
    rounded = torch.empty(4, dtype=torch.bfloat16, device=device)
    probe[(1,)](values, largest, rounded, N=4)
    return largest, rounded


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_the_interpreter_differs_without_our_arithmetic():
    """Otherwise tests/interpreter.py can go."""
    largest, rounded = run_probe()
    assert largest[2].isnan() and rounded[1] == 1.0
    with gpu_arithmetic():
        largest, rounded = run_probe()
    assert largest.tolist() == [1.5, 1.5, 1.5, 2.0]
    assert rounded[1] == 1 + 2**-7


@pytest.mark.gpu
def test_a_gpu_has_our_arithmetic():
    largest, rounded = run_probe("cuda")
    assert largest.tolist() == [1.5, 1.5, 1.5, 2.0] and rounded[1] == 1 + 2**-7


@pytest.mark.integration
def test_ptx_drops_nan_and_rounds_to_nearest():
    code = """
import triton
from triton.backends.compiler import GPUTarget
from test_interpreter import probe

signature = {"x": "*fp32", "largest": "*fp32", "rounded": "*bf16", "N": "constexpr"}
source = triton.compiler.ASTSource(probe, signature, constexprs={"N": 4})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""
    own = {"PYTHONPATH": os.pathsep.join([str(REPO_ROOT), str(REPO_ROOT / "tests")])}
    variables = {**os.environ, **own}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=REPO_ROOT, capture_output=True, text=True
    )
    assert "max.f32" in done.stdout and "max.NaN" not in done.stdout, done.stderr
    assert "cvt.rn.bf16" in done.stdout
