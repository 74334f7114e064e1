"""What a training step measures, in one vector, so that one collective sums all of it over the ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from balance import Stats


def join(loss: Tensor, aux_loss: Tensor, stats: Stats) -> Tensor:
    """A micro-batch's part of the vector."""
    of_layers = (stats.entropy, stats.zero_gates, stats.gate_square, stats.gate_sum)
    parts = [torch.ones_like(loss), loss, aux_loss, *of_layers, stats.loads.sum(1)]
    parts += [] if stats.margins is None else [stats.margins]
    return torch.cat([part.flatten().double() for part in parts])


class Statistics:
    """Sums over micro-batches, ranks and steps, as named views of one float64 vector on the device.

    A step's own sums count its micro-batches; `to_step_means` turns them into means, so that
    `steps` is then 1. Loads and margins stay sums over a step. The sum of several steps' vectors,
    divided by `steps`, is their mean.

    Attributes:
        vector: (3 + 4 L + L E + L E M,) float64, all of the below one after the other.
        steps: (), micro-batches of a step, or steps.
        loss: (), cross-entropy, nats per token.
        aux_loss: (), weighted balance and z-losses, mean over layers.
        entropy: (L,) nats, of the routing scores.
        zero_gates: (L,) fraction of the chosen gates that are exactly 0.
        gate_square: (L,) Σ g² of a token's gates, mean over tokens.
        gate_sum: (L,) Σ g of a token's gates, mean over tokens.
        loads: (L, E) tokens per expert.
        margins: (L, E, M), histograms of `balance.count_margins`; M = 0 but in steps under
            bias_update = "quantile".
    """

    def __init__(
        self,
        n_layer: int,
        n_expert: int,
        device: torch.device,
        n_bin: int = 0,
        join: Callable[..., Tensor] = join,
    ) -> None:
        """Zeros for L = `n_layer` layers with a router (0 for a dense model), E = `n_expert` and M = `n_bin`.

        `join` may be compiled.
        """
        sizes = (1, 1, 1, *[n_layer] * 4, n_layer * n_expert, n_layer * n_expert * n_bin)
        self.shape, self.join = (n_layer, n_expert, device), join
        self.vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self.steps, self.loss, self.aux_loss, *of_layers, loads, margins = self.vector.split(sizes)
        self.steps, self.loss, self.aux_loss = self.steps[0], self.loss[0], self.aux_loss[0]
        self.entropy, self.zero_gates, self.gate_square, self.gate_sum = of_layers
        self.loads = loads.view(n_layer, n_expert)
        self.margins = margins.view(n_layer, n_expert, n_bin)

    def new(self, n_bin: int = 0) -> "Statistics":
        """Zeros of the same shape, but with M = `n_bin`."""
        return Statistics(*self.shape, n_bin, join=self.join)

    @torch.no_grad()
    def add_micro_batch(self, loss: Tensor, aux_loss: Tensor, stats: Stats) -> None:
        """Add one micro-batch: `loss` and `aux_loss` (), and the model's `stats` of L layers."""
        self.vector += self.join(loss, aux_loss, stats)

    @torch.no_grad()
    def to_step_means(self, micro_batches: float) -> None:
        """Divide all but loads and margins by the number of micro-batches of a step over all ranks, in place."""
        means = len(self.vector) - self.loads.numel() - self.margins.numel()
        self.vector[:means] *= 1 / micro_batches

    def mean(self) -> "Statistics":
        """The mean over the steps that were added; NaN if there were none."""
        mean = self.new()
        torch.div(self.vector, self.steps, out=mean.vector)
        return mean
