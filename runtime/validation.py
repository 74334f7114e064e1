"""Validation loss during training: the same windows every time, split across the ranks."""

from typing import Any

import torch
from torch import Tensor

from balance import balance_loss, summarize_routing
from common.measures import MEASURES
from configure import Config
from data.loader import Validation, prefetch
from model import Output
from runtime import distributed
from runtime.batches import score, to_host_tensors
from runtime.distributed import Ranks
from runtime.launch import Stop
from runtime.preflight import ScoreTasks
from runtime.state import TrainState


def evaluate(
    state: TrainState,
    step: int,
    validation: Validation,
    tasks: ScoreTasks | None,
    config: Config,
    ranks: Ranks,
    stop: Stop,
) -> dict[str, Any] | None:
    """The values of a line of metrics after `step` steps. Every rank calls it.

    They are the values of `measure_loss`; if the run keeps a mean of its weights `val_ema/loss`,
    with a mixture also `val_ema/SET/loss`; and the scores of `tasks` (eval.tasks) at steps where
    they are due. None if any rank is asked to stop meanwhile.
    """
    values = measure_loss(state, validation, config, ranks, stop)
    if values is not None and state.average:
        with state.average.in_model():
            ema_values = measure_loss(state, validation, config, ranks, stop)
        if ema_values is None:
            return None
        for name, value in ema_values.items():
            if name.endswith("/loss"):
                values[f"val_ema/{name.removeprefix('val/')}"] = value
    if values is not None and tasks:
        scores = tasks(state.model, step, ranks, stop, state.compute.sharded)
        if scores is None:
            return None
        values.update(scores)
    return values


def measure_loss(
    state: TrainState, validation: Validation, config: Config, ranks: Ranks, stop: Stop
) -> dict[str, Any] | None:
    """Cross-entropy and expert loads over the validation windows. Every rank calls it.

    The model is left in training mode. `stop` is checked after each micro-batch.

    Returns:
        `val/loss` () and `val/window_losses` (W,), nats per token. With a mixture `val/loss` is a
        weighted mean; then there are `val/SET/loss` () of each set and `val/window_weights` (W,).
        With routers the values of `summarize_routing`. None if any rank is asked to stop.
    """
    indices = validation.windows
    own_indices = indices[ranks.rank :: ranks.world_size]
    most_windows = -(-len(indices) // ranks.world_size)  # windows on rank 0
    size = config.train.micro_batch_size
    parts = [own_indices[first : first + size] for first in range(0, most_windows, size)]
    # Under FSDP2 every rank must join every forward pass. A rank without windows of its own reads
    # any window and does not count it.
    batches = prefetch(
        to_host_tensors(validation.source.read(part if len(part) else indices[:1]), ranks.device)
        for part in parts
    )
    fields = [m.field for m in MEASURES.values() if m.field and m.in_validation]
    experts, layers = [], []

    def observe(out: Output) -> None:
        count = len(parts[len(layers)])
        # (2, L, E), both summed over the windows; 0 if none of them counts
        of_experts = torch.stack([out.stats.loads.double(), out.stats.probability.double()])
        experts.append(of_experts.sum(2) * (count > 0))
        batch_layers = torch.stack([getattr(out.stats, name) for name in fields])  # (F, L)
        layers.append(batch_layers.double() * count)

    def is_stopped() -> bool:
        return distributed.any_rank([stop.asked], ranks)[0]

    state.runner.eval()
    own_losses = score(state.forward, batches, ranks.device, observe, is_stopped)
    state.runner.train()
    if own_losses is None:
        return None

    losses = torch.zeros(len(indices), dtype=torch.float64, device=ranks.device)
    losses[ranks.rank :: ranks.world_size] = own_losses[: len(own_indices)].double()
    distributed.sum_over_ranks(losses)
    loads, probability = distributed.sum_over_ranks(torch.stack(experts).sum(0))  # (L, E)
    means = distributed.sum_over_ranks(torch.stack(layers).sum(0)) / len(indices)  # (F, L)

    values: dict[str, Any] = {"val/loss": losses.mean(), "val/window_losses": losses}
    if config.data.mix:
        values |= average_mixture(losses, validation, list(config.data.sets))
    measured = dict(zip(fields, means, strict=True))
    measured["balance_loss"] = balance_loss(probability / len(indices), loads)
    return values | summarize_routing("val", loads.long(), measured)


def average_mixture(losses: Tensor, validation: Validation, names: list[str]) -> dict[str, Tensor]:
    """Losses of a mixture and of its sets `names`, from `losses` (W,), and the windows' weights."""
    sets = torch.from_numpy(validation.sets).to(losses.device)
    weights = torch.from_numpy(validation.weights).to(losses.device)
    values = {"val/loss": (losses * weights).mean(), "val/window_weights": weights}
    for number, name in enumerate(names):
        values[f"val/{name}/loss"] = losses[sets == number].mean()
    return values
