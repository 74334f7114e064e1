"""Batches as tensors that a device can copy without waiting, and the one loop that scores text.

A run reads its rank's part of the training batches. The loop serves validation, tasks, loss on any
text, routing tables and traces.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.loader import Loader, stream_seed
from runtime.distributed import Ranks

Batch = tuple[Tensor, Tensor]  # inputs and targets, (B, T) int64 each


def to_host_tensors(batch: tuple[np.ndarray, np.ndarray], device: torch.device) -> Batch:
    """Inputs and targets in host memory, from which a copy to `device` need not wait."""
    x, y = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # pinning would otherwise open a context on GPU 0
        x, y = x.pin_memory(), y.pin_memory()
    return x, y


class RankBatches(NamedTuple):
    """This rank's micro-batches.

    All ranks together read the same rows in a step, on any number of ranks.
    """

    loader: Loader
    accumulation: int  # micro-batches of one rank in a step
    micro_batch_size: int  # sequences
    ranks: Ranks

    def read(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Yield the micro-batches of the given steps, one after the other."""
        for step in steps:
            for row in self._first_rows():
                batch = self.loader.batch(step, row, self.micro_batch_size)
                yield to_host_tensors(batch, self.ranks.device)

    def locate(self, step: int) -> list[int]:
        """The windows that this rank reads in a step, numbered over all sets (`Loader.indices`)."""
        windows = []
        for row in self._first_rows():
            windows += self.loader.indices(step, row, self.micro_batch_size).tolist()
        return windows

    def _first_rows(self) -> list[int]:
        """First row of each of this rank's micro-batches among the rows of a step."""
        rank, world_size = self.ranks.rank, self.ranks.world_size
        numbers = [micro * world_size + rank for micro in range(self.accumulation)]
        return [number * self.micro_batch_size for number in numbers]


def seed_step(seed: int, step: int, ranks: Ranks) -> None:
    """Seed torch for dropout by run, step and rank, so that a resumed step repeats it."""
    number = stream_seed(seed, step, ranks.rank)
    # torch.manual_seed also formats the stack of calls for each kind of device that is not here
    torch.default_generator.manual_seed(number)
    if ranks.device.type == "cuda":
        torch.cuda.manual_seed(number)


@torch.no_grad()
def score(
    forward: Callable[[Tensor, Tensor], Any],
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    observe: Callable[[Any], object] | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> Tensor | None:
    """Score windows, batch by batch.

    Args:
        forward: (inputs, targets) on the device -> an output with `losses` (B,), such as a GPT.
        batches: inputs and targets, (B, T) int64 each, in host memory.
        device: the model's.
        observe: gets the output of each batch, such as for its `stats`.
        is_stopped: asked after each batch.

    Returns:
        (W,) losses of all windows in order; None if stopped.
    """
    losses = [torch.zeros(0, device=device)]
    for inputs, targets in batches:
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        output = forward(inputs, targets)
        losses.append(output.losses)
        if observe:
            observe(output)
        if is_stopped and is_stopped():
            return None
    return torch.cat(losses)
