"""A model whose blocks have weights only while they compute, for one that memory cannot hold."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from configure.schema import Model
from model import GPT


def build_by_block(
    model: Model, state: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> GPT:
    """A GPT in evaluation mode, on the CPU, that reads a block's weights in each pass.

    Embeddings, the last norm and the LM head stay in memory.

    Args:
        model: its settings.
        state: weights and buffers by the GPT's names, such as `LazyTensors`.
        dtype: of floating-point weights and buffers; None: as they are in `state`.
    """
    with torch.device("meta"):
        gpt = GPT(model).eval().requires_grad_(False)

    def fill(prefix: str, module: nn.Module, *_: Any) -> None:
        own = {}
        for name in module.state_dict():
            tensor = state[prefix + name]
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            own[name] = tensor
        module.load_state_dict(own, assign=True)

    def empty(module: nn.Module, *_: Any) -> None:
        module.to("meta")

    for name, module in gpt.named_children():
        if name != "blocks":
            fill(f"{name}.", module)
    for layer, block in enumerate(gpt.blocks):
        block.register_forward_pre_hook(partial(fill, f"blocks.{layer}."))
        block.register_forward_hook(empty)
    return gpt
