"""Expert parallelism: n ranks share one set of experts, and tokens travel to their experts' ranks.

Rank i of a group of n holds experts i·E/n to (i + 1)·E/n - 1 of each layer. A layer sends one row
per token and chosen expert (C numbers in the compute type, and its gate in fp32) to the expert's
rank, which calls `Experts` on the rows it received. The results return and are added up per token.
No row is dropped or padded.

The host waits for the device once per layer and forward pass: row counts travel first, and
all-to-all needs them as host numbers. A fixed capacity of N·K rows per rank would need no counts on
the host and drop nothing, for n times the memory of rows. torch's symmetric memory reads the counts
on the device, on GPUs that NVLink connects. Both are not implemented.

Shapes in comments: N tokens, K = top_k, C = n_embd, E experts, n ranks of a group, R rows received.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from balance import expert_loads


class Routes(NamedTuple):
    """The way of a layer's N·K rows to the ranks of their experts and back."""

    order: Tensor  # (N·K,) rows n·K + k, sorted by expert and so by rank
    n_sent: list[int]  # rows to each rank of the group
    n_received: list[int]  # rows from each rank of the group
    group: dist.ProcessGroup

    def start_sending(self, x: Tensor) -> tuple[Tensor, Any]:
        """Send x, (N, C) to all K experts of a token or (N·K, C) with a row for each expert.

        Returns the rows (R, C) that arrive, and what to `wait` for before they are read.
        """
        copies = len(self.order) // len(x)
        leaving = x[self.order // copies]
        arriving = leaving.new_empty(sum(self.n_received), leaving.shape[1])
        work = dist.all_to_all_single(
            arriving, leaving, self.n_received, self.n_sent, self.group, async_op=True
        )
        return arriving, work

    def send(self, x: Tensor) -> Tensor:
        """The rows of `start_sending` when they have arrived."""
        rows, work = self.start_sending(x)
        work.wait()
        return rows

    def send_back(self, rows: Tensor, n: int) -> Tensor:
        """Return rows (R, C), and add up those of each token (n = N) or none (n = N·K): (n, C)."""
        arriving = rows.new_empty(len(self.order), rows.shape[1])
        dist.all_to_all_single(
            arriving, rows.contiguous(), self.n_sent, self.n_received, self.group
        )
        by_token = torch.empty_like(arriving)
        by_token[self.order] = arriving
        return by_token.view(n, -1, rows.shape[1]).sum(1)


class SendToExperts(torch.autograd.Function):
    """x (N, C) and gates (N, K) -> their rows (R, C) and (R, 1) at the experts' ranks.

    `works` gets what to wait for before either is read.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, routes: Routes, works: list[Any]
    ) -> tuple[Tensor, Tensor]:
        ctx.routes = routes
        ctx.gates_shape = gates.shape
        rows, rows_work = routes.start_sending(x)
        row_gates, gates_work = routes.start_sending(gates.reshape(-1, 1))
        works += [rows_work, gates_work]
        return rows, row_gates

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_gates: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyrefly: ignore[bad-override]  # *grads there
        n_token, top_k = ctx.gates_shape
        d_x = ctx.routes.send_back(d_rows, n_token)
        d_gates = ctx.routes.send_back(d_gates, n_token * top_k)
        return d_x, d_gates.view(ctx.gates_shape), None, None


class ReturnToTokens(torch.autograd.Function):
    """Rows (R, C) at the experts' ranks -> their sums (N, C) at the tokens' ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes, n_token: int) -> Tensor:
        ctx.routes = routes
        return routes.send_back(rows, n_token)

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]  # *grads there
        return ctx.routes.send(d_tokens), None, None


class Exchange:
    """Starts to send a layer's tokens to the ranks of their experts; `MoE.exchange`."""

    def __init__(self, n_expert: int, group: dist.ProcessGroup) -> None:
        self.n_expert = n_expert
        self.group = group

    @torch.compiler.disable
    def __call__(self, x: Tensor, gates: Tensor, experts: Tensor) -> "Journey":
        return Journey(self.n_expert, self.group, x, gates, experts)


class Journey:
    """The rows of a layer on their way to the ranks of their experts and back."""

    def __init__(
        self, n_expert: int, group: dist.ProcessGroup, x: Tensor, gates: Tensor, experts: Tensor
    ) -> None:
        """Start to send x (N, C) and gates (N, K) to experts (N, K), of E = `n_expert`."""
        self.n_token = len(x)
        self.routes, self.local_experts = plan_routes(experts, n_expert, group)
        if torch.is_autocast_enabled(x.device.type):  # half the bytes
            x = x.to(torch.get_autocast_dtype(x.device.type))
        self.works: list[Any] = []
        self.rows, self.gates = SendToExperts.apply(x, gates, self.routes, self.works)

    def arrive(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows (R, C) on this rank, their gates (R, 1) and experts (R, 1) from 0."""
        for work in self.works:
            work.wait()
        return self.rows, self.gates, self.local_experts

    def return_to_tokens(self, rows: Tensor) -> Tensor:
        """The sums (N, C) over each token's experts, from the experts' outputs (R, C)."""
        return ReturnToTokens.apply(rows, self.routes, self.n_token)


def plan_routes(experts: Tensor, n_expert: int, group: dist.ProcessGroup) -> tuple[Routes, Tensor]:
    """Exchange row counts within `group`, and plan the way of the rows. The host waits.

    Args:
        experts: (N, K) int64, chosen by this rank's tokens.
        n_expert: E.
        group: n ranks.

    Returns:
        The routes, and the experts (R, 1) of the rows that this rank receives, from 0.
    """
    n = dist.get_world_size(group)
    loads = expert_loads(experts, n_expert)  # (E,) rows from this rank
    own_loads = torch.empty_like(loads)  # (n·E/n,) rows from each rank for each expert of this rank
    dist.all_to_all_single(own_loads, loads, group=group)
    rows_by_rank = torch.stack([loads, own_loads]).view(2, n, -1).sum(-1)
    n_sent, n_received = rows_by_rank.tolist()
    own_experts = torch.arange(n_expert // n, device=experts.device).repeat(n)
    local_experts = own_experts.repeat_interleave(own_loads, output_size=sum(n_received))
    order = experts.flatten().argsort(stable=True)
    return Routes(order, n_sent, n_received, group), local_experts.unsqueeze(1)
