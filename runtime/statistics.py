"""What a training step measures, in one vector, so that one collective sums all of it over the ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from model import Stats


def join(loss: Tensor, aux_loss: Tensor, *of_layers: Tensor) -> Tensor:
    """A micro-batch's part of the vector; the last of `of_layers` are its loads (L, B, E)."""
    *means, loads = of_layers
    parts = (torch.ones_like(loss), loss, aux_loss, *means, loads.sum(1))
    return torch.cat([part.flatten().double() for part in parts])


class Statistics:
    """Sums over micro-batches, ranks and steps, as named views of one float64 vector on the device.

    A step's own sums count its micro-batches; `to_step_means` turns them into means, so that `steps` is then 1. Loads
    stay sums: they are tokens per step. The sum of several steps' vectors, divided by `steps`, is their mean.

    Attributes:
        vector: (3 + 4 L + L E,) float64, all of the below one after the other.
        steps: (), micro-batches of a step, or steps.
        loss: (), cross-entropy, nats per token.
        aux_loss: (), weighted balance and z-losses, mean over layers.
        entropy: (L,) nats, of the routing scores.
        zero_gates: (L,) fraction of the chosen gates that are exactly 0.
        gate_square: (L,) Σ g² of a token's gates, mean over tokens.
        gate_sum: (L,) Σ g of a token's gates, mean over tokens.
        loads: (L, E) tokens per expert.
    """

    def __init__(
        self,
        n_layer: int,
        n_expert: int,
        device: torch.device,
        join: Callable[..., Tensor] = join,
        vector: Tensor | None = None,
    ) -> None:
        """L = `n_layer` layers with a router (0 for a dense model), E = `n_expert`; zeros without a `vector`.

        `join` may be compiled.
        """
        sizes = (1, 1, 1, *[n_layer] * 4, n_layer * n_expert)
        self.shape = (n_layer, n_expert, device, join)
        self.join = join
        self.vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device) if vector is None else vector
        self.steps, self.loss, self.aux_loss, *of_layers, loads = self.vector.split(sizes)
        self.steps, self.loss, self.aux_loss = self.steps[0], self.loss[0], self.aux_loss[0]
        self.entropy, self.zero_gates, self.gate_square, self.gate_sum = of_layers
        self.loads = loads.view(n_layer, n_expert)

    def new(self) -> "Statistics":
        """Zeros of the same shape."""
        return Statistics(*self.shape)

    @torch.no_grad()
    def add_micro_batch(self, loss: Tensor, aux_loss: Tensor, stats: Stats) -> None:
        """Add one micro-batch: `loss` and `aux_loss` (), and the model's `stats` of L layers."""
        of_layers = (stats.entropy, stats.zero_gates, stats.gate_square, stats.gate_sum)
        self.vector += self.join(loss, aux_loss, *of_layers, stats.loads)

    @torch.no_grad()
    def to_step_means(self, micro_batches: float) -> None:
        """Divide all but the loads by the number of micro-batches of a step over all ranks, in place."""
        means = len(self.vector) - self.loads.numel()
        self.vector[:means] *= 1 / micro_batches

    def mean(self) -> "Statistics":
        """The mean over the steps that were added; NaN if there were none."""
        return Statistics(*self.shape, vector=self.vector / self.steps)
