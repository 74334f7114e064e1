"""The Python of the GPU tests of kernels/, on a fake GPU: a wrong device shows without a GPU."""

import math
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from numerics import seeded
from runs import REPO_ROOT

pytest.importorskip("triton")

import fake_gpu  # noqa: E402
import numerics  # noqa: E402
import test_cross_entropy  # noqa: E402
import test_kernels  # noqa: E402
import test_triton  # noqa: E402
import test_triton_linear  # noqa: E402
import test_triton_norm  # noqa: E402
import test_triton_router  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the tests themselves")
# the first arguments of each; small where a test can be small
CASES = {
    test_cross_entropy.test_full_size_on_a_gpu: (64, 8, 257, torch.float16, "triton"),
    test_kernels.test_torch_equals_reference_on_gpu: ("typical", torch.float16),
    test_triton.test_equals_reference_in_full_size_on_gpu: ("odd", "idle", torch.float16),
    test_triton_linear.test_errs_no_more_than_float32_in_full_size_on_gpu: (80, 96, 13, 2),
    test_triton_norm.test_equals_float64_in_full_size_on_gpu: ("biased", 768),
    test_triton_router.test_equals_router_in_full_size_on_gpu: ("kern", 64, 8),
    test_triton_router.test_a_token_with_a_bad_logit_spoils_no_other_on_gpu: ("kern", math.nan),
}
MODULES = (
    test_cross_entropy,
    test_kernels,
    test_triton,
    test_triton_linear,
    test_triton_norm,
    test_triton_router,
)


def find_gpu_tests(module: ModuleType) -> list:
    """All functions of a test module that are marked gpu."""
    marked = []
    for function in vars(module).values():
        marks = getattr(function, "pytestmark", [])
        if any(mark.name == "gpu" for mark in marks):
            marked.append(function)
    return marked


def test_each_gpu_test_of_a_kernel_has_a_case():
    found = [function for module in MODULES for function in find_gpu_tests(module)]
    assert set(found) == set(CASES)


def run_cases():
    """Run each case, and check that the fake GPU refuses what a GPU does."""
    for function, arguments in CASES.items():
        fixtures = function.__code__.co_varnames[: function.__code__.co_argcount]
        with pytest.MonkeyPatch.context() as monkeypatch, fake_gpu.fake_gpu(*MODULES):
            more = {"monkeypatch": monkeypatch} if "monkeypatch" in fixtures else {}
            function(*arguments, **more)
    with fake_gpu.fake_gpu(numerics):
        x = torch.ones(3, device=numerics.DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(AssertionError, match="another device"):
            torch.nn.init.normal_(x, generator=seeded())
        torch.nn.init.normal_(x, generator=seeded(device=numerics.DEVICE))


@pytest.mark.integration
def test_gpu_tests_keep_to_one_device():
    """In a process of its own: autograd counts the kinds of devices once."""
    environment = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    run_cases()
