"""Layers of experts as other projects compute them, of a config's sizes, for `scripts.bench step --peers`.

Written anew from their descriptions: nanochat's pull request 798 and torchtitan/models/moe/moe.py (2026-11). Both have
sigmoid scores, rows sorted by expert and `F.grouped_mm`; neither balances loads here. The activation is the config's.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configure.schema import Model
from kernels.torch_grouped import activate


class Peer(nn.Module, ABC):
    """What both have in common. Shapes: N tokens, R = N·K rows, weights (E, out, in)."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        E, C, H = config.n_expert, config.n_embd, config.expert_hidden
        self.top_k, self.hidden, self.activation = config.top_k, H, config.activation
        self.gate = nn.Linear(C, E, bias=False)
        self.w_in = nn.Parameter(config.init_std * torch.randn(E, (1 + config.gated) * H, C))
        self.w_out = nn.Parameter(config.init_std * torch.randn(E, C, H))

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, None]:
        """(B, T, C) to (N, C), and no Stats."""
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)  # (N, E)
        scores = logits.float().sigmoid()
        experts = scores.topk(self.top_k, sorted=False).indices  # (N, K)
        order = experts.flatten().argsort(stable=True)  # (R,)
        loads = torch.histc(experts.float(), bins=len(self.w_in), min=0, max=len(self.w_in))
        gates = scores.gather(1, experts).flatten()[order, None]  # (R, 1)
        return self.compute(tokens.to(logits.dtype), gates, order, loads.cumsum(0).to(torch.int32)), None

    @abstractmethod
    def compute(self, x: Tensor, gates: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        """The experts' sum (N, C) by gates (R, 1) and flat choices in order of their experts (R,)."""

    def multiply(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Each row (R, C) through its expert; the rows of expert e end at ends[e]."""
        w_in, w_out = (w.to(rows.dtype).mT for w in (self.w_in, self.w_out))
        hidden = activate(F.grouped_mm(rows, w_in, offs=ends), self.hidden, self.activation)[0]
        return F.grouped_mm(hidden, w_out, offs=ends)


class NanoChat(Peer):
    """Gates multiply outputs in their dtype, which go back to their places and are summed."""

    def compute(self, x: Tensor, gates: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        rows = self.multiply(x[order // self.top_k], ends)
        places = torch.zeros_like(rows).index_put((order,), rows * gates.to(rows.dtype))
        return places.view(len(x), self.top_k, -1).sum(1)


class TorchTitan(Peer):
    """Gates multiply inputs in fp32, outputs are added to their tokens' by `scatter_add`."""

    def compute(self, x: Tensor, gates: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        token = (order // self.top_k)[:, None].expand(-1, x.shape[1])
        rows = (x.gather(0, token).float() * gates).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, token, self.multiply(rows, ends))


PEERS = {"nanochat": NanoChat, "torchtitan": TorchTitan}
