"""optim.transfer: initial sizes and rates that let settings tuned at one shape serve another.

Each multiplier of the papers is an initial size and a rate of one parameter, which is the same for
AdamW and for Muon (docs/transfer.md derives them). So no forward pass changes, and checkpoints and
exports stay as they are.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from configure.schema import Optim
from gate_norm import own_gate_norm
from model import GPT

# The matrices of a block; "w_out" also is the end of a parameter without ".weight".
MATRICES = ("attn.qkv.weight", "attn.proj.weight", "w_in.weight", "w_out.weight", "w_in", "w_out")
# Those whose inputs are hidden units
HIDDEN = ("w_out", "w_out.weight")
# What a block adds to the residual stream is linear in these.
OUTPUTS = ("attn.proj.weight", "attn.proj.bias", "w_out", "w_out.weight", "w_out.bias")


class Ratios(NamedTuple):
    """A model's shape over the shape at which its settings were tuned."""

    width: float = 1.0  # of n_embd
    hidden: float = 1.0  # of the hidden units of a block that act on a token
    depth: float = 1.0  # of n_layer
    gates: tuple[float, ...] = ()  # of each block: √top_k over the norm that the gates start with


class Scale(NamedTuple):
    """Factors on a parameter's initial values and on its learning rate."""

    size: float = 1.0
    rate: float = 1.0


def measure_ratios(model: nn.Module, optim: Optim) -> Ratios:
    """The ratios of a GPT with optim.transfer = "mup"; ones for "none"."""
    if optim.transfer == "none":
        return Ratios()
    assert isinstance(model, GPT)
    shape = model.config
    depth = shape.n_layer / (optim.base_layers or shape.n_layer)
    gates = []
    for layer in range(shape.n_layer):
        # fresh routers have logits of the base width's size
        norm = own_gate_norm(shape, optim.base_width, by_table=layer < shape.n_hash_layer)
        gates.append(math.sqrt(shape.top_k) / norm)
    width = shape.n_embd / optim.base_width
    hidden = shape.active_hidden / optim.base_hidden
    return Ratios(width, hidden, depth, tuple(gates))


def find_scale(name: str, ratios: Ratios, by_muon: bool) -> Scale:
    """The factors of a parameter.

    Args:
        name: its name in the GPT.
        ratios: of its model.
        by_muon: Muon trains it; its steps have equal singular values.
    """
    size = 1.0
    rate = 1.0
    if name.startswith("ln_f."):  # a factor on the logits
        size /= ratios.width
        rate /= ratios.width
    elif name.endswith(("router.weight", *MATRICES)):
        inputs = ratios.hidden if name.endswith(HIDDEN) else ratios.width
        size /= math.sqrt(inputs)
        rate /= math.sqrt(inputs) if by_muon else inputs
    if name.endswith(OUTPUTS):
        # `GPT.init_weights` divides by the root of the depth
        size /= math.sqrt(ratios.depth)
        rate /= ratios.depth
    if name.endswith("experts.w_out") and ratios.gates:
        gates = ratios.gates[int(name.split(".")[1])]
        size *= gates
        rate *= gates
    return Scale(size, rate)


@torch.no_grad()
def scale_initial_weights(model: GPT, optim: Optim) -> None:
    """Multiply fresh weights by their sizes, in place.

    Raises ValueError for a block's matrix that is in no table here.
    """
    ratios = measure_ratios(model, optim)
    for name, p in model.named_parameters():
        is_matrix = p.dim() > 1 and name.startswith("blocks.")
        if is_matrix and not name.endswith(("router.weight", *MATRICES)):
            raise ValueError(f"runtime/transfer.py knows no size and rate of {name}")
        p.mul_(find_scale(name, ratios, by_muon=False).size)
