"""A rank's part of the training batches, as tensors that a device can take without waiting."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from data.loader import stream_seed
from runtime.distributed import Ranks
from runtime.preflight import Plan


def to_host_tensors(
    batch: tuple[np.ndarray, np.ndarray], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T) int64, in host memory from which a copy to `device` need not wait."""
    x, y = map(torch.from_numpy, batch)
    if device.type == "cuda":
        # of this thread: pinning would otherwise open a context on GPU 0
        torch.cuda.set_device(device)
        x, y = x.pin_memory(), y.pin_memory()
    return x, y


def first_row(micro: int, micro_batch_size: int, ranks: Ranks) -> int:
    """Where this rank's micro-batch number `micro` begins among the rows of a step.

    The rows that all ranks take together in a step are the same for any number of ranks.
    """
    return (micro * ranks.world_size + ranks.rank) * micro_batch_size


def micro_batches(
    plan: Plan, steps: Iterable[int], ranks: Ranks
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches of the given steps, one after the other: inputs and targets, (B, T) int64 each."""
    size = plan.config.train.micro_batch_size
    for step in steps:
        for micro in range(plan.accumulation):
            yield to_host_tensors(
                plan.loader.batch(step, first_row(micro, size, ranks), size), ranks.device
            )


def seed_step(seed: int, step: int, ranks: Ranks) -> None:
    """Seed torch for dropout by the run's seed, the step and the rank alone, so that a resumed step repeats it."""
    torch.manual_seed(stream_seed(seed, step, ranks.rank))
