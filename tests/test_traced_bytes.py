"""What operators read and write, traced without computing: a further pass over residual stream or
weights fails.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from configure.schema import Config, Model, Optim
from model import GPT, Block
from runtime.optimizers import build_optimizer, choose_copy_dtype
from runtime.updates import Updates

B, T, C = 3, 40, 48  # no other tensor has as many elements as (B, T, C)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "experts", "router_linear", ATTENTION)
PRODUCTS += ("experts_backward", "router_linear_backward", f"{ATTENTION}_backward")


class Traffic(TorchDispatchMode):
    """Bytes per element that operators other than products and views read and write of tensors of
    `size` elements.
    """

    def __init__(self, size=B * T * C):
        super().__init__()
        self.moved, self.size = Counter(), size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = str(function).split(".")[1]
        if (
            not function.is_view
            and function.namespace != "prim"
            and name not in (*PRODUCTS, "_unsafe_view", "detach")
        ):
            for t in tree_leaves((args, kwargs, out)):
                if isinstance(t, torch.Tensor) and t.numel() and t.numel() % self.size == 0:
                    self.moved[name] += t.nbytes // self.size
        return out


SIZES = {
    "n_head": 3,
    "n_embd": C,
    "block_size": T,
    "n_expert": 5,
    "top_k": 2,
    "expert_hidden": 7,
    "backend": "triton",
}


def trace(router):
    """Traffic of a pass forward and back of one block between others under autocast to float16."""
    with (
        FakeTensorMode(),
        mock.patch.object(kernels, "find_triton_problem", lambda device, dtype: ""),
    ):
        block = Block(Model(**SIZES, router=router), 0)
        x = torch.empty(B, T, C, requires_grad=True)
        y, idx = x.detach().half().requires_grad_(), torch.empty(B, T, dtype=torch.int64)
        gradients = [t.detach() for t in (x, y)]
        with Traffic() as traffic:
            with torch.autocast("cpu", torch.float16):
                x, y, _ = block(x, y, idx)
            torch.autograd.backward([x, y.view(B, T, C)], gradients)
    return traffic.moved


@pytest.mark.parametrize("router, exact", [("dense", 0), ("kern", 4)])
def test_bytes_of_a_block(router, exact):
    """By hand, twice: x 4 and y 2 are read, their sum 4 and its norm 2 written; back, the gradients
    4 and 2 of both and
    the sum 4 are read, 4 and 2 written. Once and both ways, the norm that routers read, 4.
    Gradients of q, k, v: 12."""
    pytest.importorskip("triton")
    assert trace(router) == {
        "add_norm": 2 * 12 + exact,
        "add_norm_backward": 2 * 16 + exact,
        "cat": 12,
    }


def test_bytes_of_a_step_of_experts_weights():
    """Norm of the gradient 4; the rest by one kernel, whose copies the next passes take: torch's
    would take 38.
    """
    triton_adamw = pytest.importorskip("kernels.triton_adamw")
    half, cpu = torch.float16, torch.device("cpu")
    no_problem = mock.patch.object(kernels, "find_triton_problem", lambda device, dtype: "")
    with FakeTensorMode(), no_problem, mock.patch.object(triton_adamw, "adamw_step") as step:
        model = GPT(Model(**SIZES, n_layer=1, vocab_size=11))
        copy_dtype = choose_copy_dtype("triton", cpu, half)
        optimizer = build_optimizer(model, Optim(), copy_dtype)
        updates = Updates(optimizer, Config(), True)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        with Traffic(5 * 7 * C) as traffic:
            updates.step(0, 1e-3, torch.ones((), dtype=torch.float64))
            with model.cast_once(half, optimizer.valid_copies()):
                pass
    assert traffic.moved == {"linalg_vector_norm": 2 * 4} and step.call_count == 2  # w_in and w_out
    read = sum(t.element_size() for t in step.call_args.args[:4])
    written = sum(step.call_args.args[i].element_size() for i in (0, 2, 3, 4))
    assert (read, written) == (16, 14)
