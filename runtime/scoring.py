"""The one loop that scores text: validation, tasks, loss on any text, routing tables and traces."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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
