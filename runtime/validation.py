"""Validation loss during training: the same windows every time, split across the ranks."""

from typing import Any

import torch
from torch import nn

from data.loader import prefetch, windows
from runtime import distributed
from runtime.batches import to_host_tensors
from runtime.distributed import Ranks
from runtime.metrics import gate_metrics, load_metrics
from runtime.preflight import Plan
from runtime.signals import Stop
from runtime.state import TrainState


def evaluate(
    state: TrainState, plan: Plan, step: int, ranks: Ranks, stop: Stop
) -> dict[str, Any] | None:
    """The values of a line of metrics after `step` steps. Every rank calls it.

    They are those of `measure_loss`; `val_ema/loss`, of a mixture `val_ema/SET/loss` too, if the
    run keeps a mean of its weights; and scores on tasks (eval.tasks) where they are due. None if
    any rank is asked to stop meanwhile.
    """
    values = measure_loss(state.runner, plan, ranks, stop)
    if values is not None and state.average:
        with state.average.in_model():
            of_mean = measure_loss(state.runner, plan, ranks, stop)
        if of_mean is None:
            return None
        values |= {
            name.replace("val/", "val_ema/"): of_mean[name]
            for name in of_mean
            if name.endswith("/loss")
        }
    if values is not None and plan.tasks:
        scores = plan.tasks(state.model, step, ranks, stop, plan.sharded)
        values = None if scores is None else values | scores
    return values


@torch.no_grad()
def measure_loss(model: nn.Module, plan: Plan, ranks: Ranks, stop: Stop) -> dict[str, Any] | None:
    """Cross-entropy and expert loads over the plan's validation windows. Every rank calls it.

    `model` is what `parallel.distribute` returned, and is left in training mode; `stop` is looked
    at between micro-batches.

    Returns:
        `val/loss` () and `val/window_losses` (W,), nats per token; of a mixture `val/loss` is a
        weighted mean, beside `val/SET/loss` () of each set and `val/window_weights` (W,). With
        routers `val/loads` (L, E), tokens, two numbers of them, and the scale of the gates
        (`gate_metrics`). None if any rank is asked to stop.
    """
    model.eval()
    indices, block_size = plan.validation.windows, plan.config.model.block_size
    mine = indices[ranks.rank :: ranks.world_size]
    losses, loads, gates = (
        torch.zeros(len(indices), dtype=torch.float64, device=ranks.device),
        [],
        [],
    )
    micro_batch = plan.config.train.micro_batch_size
    # Under FSDP2 every rank must join every forward pass: one without windows of its own takes any,
    # and counts none.
    rounds = range(0, -(-len(indices) // ranks.world_size), micro_batch)
    counts = [len(mine[first : first + micro_batch]) for first in rounds]
    rows = (
        mine[first : first + micro_batch] if len(mine) > first else indices[:1] for first in rounds
    )
    batches = prefetch(
        to_host_tensors(windows(plan.validation.tokens, chosen, block_size), ranks.device)
        for chosen in rows
    )
    for first, count, (x, y) in zip(rounds, counts, batches, strict=True):
        x, y = x.to(ranks.device, non_blocking=True), y.to(ranks.device, non_blocking=True)
        with plan.autocast:
            out = model(x, y)
        losses[ranks.rank :: ranks.world_size][first : first + count] = out.losses[:count]
        loads.append(out.stats.loads.sum(1) * min(count, 1))  # (L, E)
        of_gates = (out.stats.zero_gates, out.stats.gate_square, out.stats.gate_sum)
        gates.append(torch.stack(of_gates).double() * count)  # (3, L)
        if distributed.any_rank([stop.asked], ranks)[0]:
            model.train()
            return None
    model.train()
    losses = distributed.sum_over_ranks(losses)
    total_loads = distributed.sum_over_ranks(torch.stack(loads).sum(0))
    values = {"val/loss": losses.mean(), "val/window_losses": losses}
    if plan.config.data.mix:
        sets, weights = (
            torch.from_numpy(array).to(losses.device) for array in plan.validation[-2:]
        )
        values |= {"val/loss": (losses * weights).mean(), "val/window_weights": weights}
        values |= {
            f"val/{name}/loss": losses[sets == i].mean()
            for i, name in enumerate(plan.config.data.sets)
        }
    of_gates = distributed.sum_over_ranks(torch.stack(gates).sum(0)) / len(indices)
    if len(total_loads):  # no rows for a dense model
        summaries = load_metrics(total_loads) | gate_metrics(*of_gates)
        values |= {"val/loads": total_loads} | {
            f"val/{name}": value for name, value in summaries.items()
        }
    return values
