"""The measures of a training step in one vector, so that one collective sums them over ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from balance import MEASURED_FIELDS, Stats


def join(loss: Tensor, aux_loss: Tensor, stats: Stats) -> Tensor:
    """One micro-batch as a vector, in the order of `Statistics.vector`."""
    parts = [torch.ones_like(loss), loss, aux_loss]
    parts += [getattr(stats, field) for field in MEASURED_FIELDS]
    parts.append(stats.loads.sum(1))
    if stats.margins is not None:
        parts.append(stats.margins)
    return torch.cat([part.flatten().double() for part in parts])


class Statistics:
    """Sums over micro-batches, ranks and steps, as named views of one float64 vector on the device.

    The sums of one step count its micro-batches; `to_step_means` turns them into means. Loads and
    margins stay sums over a step. The sum of several steps' vectors, divided by `steps`, is their
    mean. Checkpoints hold the vector, so its order does not change.

    Attributes:
        vector: (3 + F L + L E + L E M,) float64, all of the below one after the other.
        steps: (), micro-batches of a step; after `to_step_means` steps, so 1.
        loss: (), cross-entropy, nats per token.
        aux_loss: (), weighted balance and z-losses, mean over layers.
        layers: {field of Stats: (L,)}, the F fields of MEASURED_FIELDS, means over tokens.
        loads: (L, E) tokens per expert.
        margins: (L, E, M), histograms of `count_margins`; M = 0 except in steps under bias_update =
            "quantile".
    """

    def __init__(
        self,
        n_layer: int,
        n_expert: int,
        device: torch.device,
        n_bin: int = 0,
        join: Callable[..., Tensor] = join,
    ) -> None:
        """Zeros for L = `n_layer` layers with a router, E = `n_expert` and M = `n_bin`.

        `join` may be compiled.
        """
        self.shape = (n_layer, n_expert, device)
        self.join = join
        n_metric = len(MEASURED_FIELDS)
        n_load = n_layer * n_expert
        sizes = (3, n_metric * n_layer, n_load, n_load * n_bin)
        self.vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        scalars, layers, loads, margins = self.vector.split(sizes)
        self.steps, self.loss, self.aux_loss = scalars.unbind()
        self.layers = dict(zip(MEASURED_FIELDS, layers.view(n_metric, n_layer), strict=True))
        self.loads = loads.view(n_layer, n_expert)
        self.margins = margins.view(n_layer, n_expert, n_bin)

    def new(self, n_bin: int = 0) -> "Statistics":
        """Zeros of the same shape, but with M = `n_bin`."""
        return Statistics(*self.shape, n_bin, join=self.join)

    @torch.no_grad()
    def to_step_means(self, micro_batches: float) -> None:
        """Divide by the micro-batches of a step over all ranks, except loads and margins."""
        n_mean = len(self.vector) - self.loads.numel() - self.margins.numel()
        self.vector[:n_mean] *= 1 / micro_batches

    @torch.no_grad()
    def add_step(self, step: "Statistics") -> None:
        """Add the means of a step, without its margins."""
        self.vector += step.vector[: len(self.vector)]

    def mean(self) -> "Statistics":
        """The mean over the steps that were added; NaN if there were none."""
        mean = self.new()
        torch.div(self.vector, self.steps, out=mean.vector)
        return mean
