"""Kernels that compute wrongly are found before a run trains with them, and left unused."""

import pytest
import torch
from interpreter import like_gpu  # noqa: F401

import kernels
from configure.schema import Model
from kernels import (
    triton_adamw,
    triton_cross_entropy,
    triton_experts,
    triton_linear,
    triton_norm,
    triton_router,
    triton_schedule,
)
from router import Router
from runtime import RunError, kernel_check
from runtime.kernel_check import find_wrong_kernel
from runtime.preflight import check_backend
from runtime.reporter import describe_experts

CPU = torch.device("cpu")
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 8, "vocab_size": 41}
MIXTURE = SIZES | {"n_expert": 4, "top_k": 2, "expert_hidden": 16}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(kernel_check, "ROWS", 6)


@pytest.mark.parametrize(
    "dtype, update",
    [
        (torch.float16, {"router": "kern"}),
        (torch.bfloat16, {"router": "softmax", "norm": "rmsnorm", "gated": True, "bias": True}),
        (
            torch.float32,
            {"router": "sigmoid", "activation": "silu", "n_hash_layer": 1, "n_layer": 2},
        ),
        (torch.float16, {"router": "dense"}),
    ],
)
def test_right_kernels_pass(dtype, update):
    assert find_wrong_kernel(Model(**MIXTURE | update), 33, CPU, dtype) == ""


def test_a_router_with_other_logits_is_checked_by_its_formula(monkeypatch):
    def _logits(self, x):
        return x @ torch.ones(MIXTURE["n_embd"], MIXTURE["n_expert"])

    monkeypatch.setattr(Router, "_logits", _logits)
    assert find_wrong_kernel(Model(**MIXTURE), 33, CPU, torch.float32) == ""
    choose = Router.choose
    monkeypatch.setattr(Router, "choose", lambda self, logits, _: choose(self, logits + 1))
    assert find_wrong_kernel(Model(**MIXTURE), 33, CPU, torch.float32) == "routing"


@pytest.mark.parametrize(
    "module, kernel, output, name",
    [
        (triton_norm, "add_norm_kernel", 5, "norm"),
        (triton_norm, "add_norm_grad_kernel", 6, "norm"),
        (triton_cross_entropy, "softmax_kernel", 0, "LM head"),
        (triton_linear, "logits_kernel", 3, "router's product"),
        (triton_linear, "logits_input_grad_kernel", 2, "router's product"),
        (triton_linear, "logits_weight_grad_kernel", 2, "router's product"),
        (triton_router, "route_kernel", 4, "routing"),
        (triton_router, "route_sum_kernel", 1, "routing"),
        (triton_router, "route_grad_kernel", 7, "routing"),
        (triton_experts, "up_kernel", 7, "experts"),
        (triton_experts, "rows_ahead_kernel", 4, "experts"),
        (triton_experts, "combine_kernel", 2, "experts"),
        (triton_experts, "weight_grad_kernel", 5, "experts"),
        (triton_experts, "down_grad_kernel", 7, "experts"),
        (triton_schedule, "place_kernel", 3, "experts"),
        (triton_adamw, "adamw_kernel", 4, "AdamW"),
    ],
)
def test_a_broken_kernel_is_named(module, kernel, output, name, monkeypatch):
    """The last row of an output is in reverse."""
    right = getattr(module, kernel)

    class Broken:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                right[grid](*arguments, **options)
                last = arguments[output].view(-1, arguments[output].shape[-1])[-1]
                last.copy_(last.flip(0))

            return launch

    monkeypatch.setattr(module, kernel, Broken())
    assert find_wrong_kernel(Model(**MIXTURE), 33, CPU, torch.float16) == name


def test_wrong_kernels_are_left_unused(tiny, monkeypatch):
    """By "auto" with a line that says so; "triton" is refused."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(kernel_check, "find_wrong_kernel", lambda *arguments: "experts")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "B300")
    monkeypatch.setattr(kernels, "defect", "")
    config = tiny("model.router=kern")
    assert kernels.choose_backend("auto", gpu, torch.float16) == "triton"
    check_backend(config, gpu, torch.float16)
    assert kernels.choose_backend("auto", gpu, torch.float16) == "torch"
    (line,) = describe_experts(config, gpu, torch.float16)
    assert line.startswith("experts by torch, since triton computes wrong values (experts) on B300")
    with pytest.raises(RunError, match="model.backend: .*wrong values.*install another release"):
        check_backend(tiny("model.backend=triton"), gpu, torch.float16)


@pytest.mark.gpu
def test_kernels_of_125m_pass():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert find_wrong_kernel(Model(), 32 * 1024, torch.device("cuda"), dtype) == ""
