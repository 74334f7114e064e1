"""What a block's operators read and write, traced without computing: a further pass over the residual stream fails."""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from configure.schema import Model
from model import Block

B, T, C = 3, 40, 48  # no other tensor has as many elements as (B, T, C)
PRODUCTS = ("mm", "addmm", "experts_forward", "experts_backward", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward")  # fmt: skip


class Traffic(TorchDispatchMode):
    """Bytes of activations per token and channel that operators other than products and views read and write."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = str(function).split(".")[1]
        if not function.is_view and function.namespace != "prim" and name not in (*PRODUCTS, "_unsafe_view", "detach"):
            for t in tree_leaves((args, kwargs, out)):
                if isinstance(t, torch.Tensor) and t.numel() and t.numel() % (B * T * C) == 0:
                    self.moved[name] += t.nbytes // (B * T * C)
        return out


def trace(router):
    """Traffic of a pass forward and back of one block between others under autocast to float16."""
    sizes = {"n_head": 3, "n_embd": C, "block_size": T, "n_expert": 5, "top_k": 2, "expert_hidden": 7}
    with FakeTensorMode(), mock.patch.object(kernels, "find_triton_problem", lambda device, dtype: ""):
        block = Block(Model(**sizes, router=router, backend="triton"), 0)
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
    """By hand, twice: x 4 and y 2 are read, their sum 4 and its norm 2 written; back, the gradients 4 and 2 of both and
    the sum 4 are read, 4 and 2 written. Once and both ways, the norm that routers read, 4. Gradients of q, k, v: 12."""
    pytest.importorskip("triton")
    assert trace(router) == {"add_norm": 2 * 12 + exact, "add_norm_backward": 2 * 16 + exact, "cat": 12}
