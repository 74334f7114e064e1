"""tools.aot: how many blocks fit, what counts as a fault, and the kernels themselves compiled
without a GPU.
"""

import os
import subprocess
import sys

import pytest
import torch
from runs import REPO_ROOT

pytest.importorskip("triton")

from kernels import triton_experts  # noqa: E402
from tools import aot  # noqa: E402


@pytest.mark.parametrize(
    "sm, registers, shared, warps, blocks",
    [
        (90, 128, 96 * 1024, 8, 2),
        (90, 129, 96 * 1024, 8, 1),
        (90, 32, 114 * 1024, 4, 1),
        (90, 32, 113 * 1024, 4, 2),
        (80, 32, 0, 4, 16),
        (80, 16, 56 * 1024, 4, 2),
        (100, 255, 0, 8, 1),
    ],
)
def test_blocks_on_a_multiprocessor(sm, registers, shared, warps, blocks):
    """One register more than 128 halves them."""
    assert aot.count_blocks(sm, registers, shared, warps) == blocks


def test_waits_and_products_of_a_kernel():
    """The most loads that a wait leaves counts; serialised is where each product is waited for."""
    product = "HGMMA.64x128x16.F32"
    text = f"DEPBAR.LE SB0, 0x1 ;\n{product} R24 ;\nDEPBAR.LE SB0, 0xa ;\n{product} R24 ;\n"
    drain = "DEPBAR.LE gsb0, 0x0 ;\n"
    assert aot.read_sass(text + drain) == (10, product, False)
    assert aot.read_sass(text + 2 * drain) == (10, product, True)
    assert aot.read_sass("FFMA R1, R2 ;\n") == (None, "", False)


@pytest.mark.parametrize("sm", aot.SHARED)
def test_operands_of_a_tile_fit_the_shared_memory_of_every_architecture(sm, monkeypatch):
    """In half precision, of the steps that are loaded ahead."""
    monkeypatch.setattr(triton_experts, "major", lambda device: sm // 10)
    like = torch.empty(0, dtype=torch.float16)
    for kernel in set().union(*triton_experts.TILES.values()):
        tile = triton_experts.pick_tile(kernel, like, triton_experts.ROWS, 768, 768)
        if tile is not None:
            step_bytes = 2 * tile.depth * (tile.rows + tile.cols)
            assert tile.stages * step_bytes <= aot.SHARED[sm] * 1024, kernel


GOOD = aot.Kernel(
    "up+glu+silu", "128x128x64", 8, 107, 96 * 1024, 0, 1, 2, "HGMMA.64x128x16.F32", False
)


@pytest.mark.parametrize(
    "change, faults",
    [
        ({}, []),
        ({"name": "up"}, ["blocks < 2"]),  # the limits of the longest name count
        ({"name": "up", "blocks": 2, "wait": 1}, ["wait < 2"]),
        ({"wait": 0}, ["wait < 1"]),
        ({"wait": None}, []),  # TMA loads the tiles
        ({"spilled": 16}, []),
        ({"spilled": 8, "shape": "125m"}, ["spills 8 B"]),
        ({"name": "weight_grad", "spilled": 40}, ["spills 40 B"]),
        ({"shared": 228 * 1024}, ["too much shared memory"]),
        ({"mma": "HMMA.16816.F32"}, ["no HGMMA"]),
        ({"mma": "", "half": False}, []),
        ({"name": "up", "mma": "HMMA.16816.F32", "wait": 3, "sm": 80}, ["wait < 4"]),
        ({"serialized": True}, ["serialised products"]),
        ({"name": "new"}, ["no row in LEAST of tools/aot.py: add it"]),
    ],
)
def test_what_is_worse_than_its_limit_is_a_fault(change, faults):
    job = {"sm": 90, "shape": "gated", "half": True}
    kernel = GOOD._replace(**{key: value for key, value in change.items() if key not in job})
    assert (
        aot.find_faults(kernel, **job | {key: value for key, value in change.items() if key in job})
        == faults
    )


def run_aot(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    given = {
        key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"
    } | environment
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=given, cwd=REPO_ROOT, capture_output=True, text=True)


@pytest.mark.integration
def test_kernels_compile_for_a100_and_h100(tmp_path):
    """For the flagship in float16, then again with a tile that is too wide, the others cached."""
    again = """
import sys
from kernels import triton_experts
from tools import aot
assert aot.main(sys.argv[1:]) == 0
print("once more", flush=True)
triton_experts.TILES[9]["weight_grad"] = triton_experts.Tile(128, 256, 64, 8, 6)
sys.exit(aot.main(sys.argv[1:]))
"""
    arguments = "--sm", "80", "90", "--shape", "125m", "--dtype", "float16"
    done = run_aot(again, *arguments, TRITON_CACHE_DIR=str(tmp_path))
    good, wide = (part.splitlines() for part in done.stdout.split("once more\n"))
    compiled = {tuple(line.split()[i] for i in (0, 3)) for line in good[2:] if " float16 " in line}
    for kernel in (
        "place",
        "combine",
        "down_grad",
        "weight_grad",
        "softmax+grad",
        "route+gamma",
        "add_norm+add",
    ):
        assert {("80", kernel), ("90", kernel)} <= compiled, done.stderr
    assert {
        ("80", "rows"),
        ("90", "rows_ahead"),
        ("80", "up"),
        ("90", "up+use_tma"),
        ("90", "adamw"),
    } <= compiled
    faults = [line.split()[3] for line in wide if "  too much shared memory  blocks < 1" in line]
    assert done.returncode == 1 and good[-1] == "0 faults", done.stdout + done.stderr
    assert faults == ["weight_grad"] and wide[-1] == "2 faults", done.stdout


@pytest.mark.integration
def test_kernels_compile_for_a_token_alone(tmp_path):
    """As in generation.

    Triton makes constants of arguments that are 1, which the interpreter does not.
    """
    code = """
from tools import aot
aot.SHAPES["alone"] = 1, 64, 64, 2, 1, 64
print([kernel.name for kernel in aot.compile_kernels((90, "float16", "alone"))])
"""
    done = run_aot(code, TRITON_CACHE_DIR=str(tmp_path))
    assert "route_sum" in done.stdout, done.stderr


@pytest.mark.slow
def test_every_kernel_is_within_its_limits():
    """Of every shape and dtype under the installed Triton; and the 125m model's for GPUs of the
    consumer kinds.
    """
    code = """
import sys
from tools import aot
sys.exit(aot.main([]) or aot.main(["--sm", "86", "89", "120", "--shape", "125m"]))
"""
    done = run_aot(code)
    assert done.returncode == 0, done.stdout + done.stderr
