"""The running mean of a run's weights (train.ema_decay): an exponential moving average, EMA."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from model import GPT
from runtime.parallel import local_part


class WeightAverage:
    """mean = decay · mean + (1 - decay) · weights after each step taken, from the initial weights on.

    Of parameters and buffers, in fp32 on their device; under FSDP2 each rank holds the mean of its own part. The tables
    of hash layers are constants.

    Attributes:
        tensors: {name in model.state_dict(): mean}; a checkpoint holds them.
    """

    def __init__(self, model: GPT, decay: float) -> None:
        """Begin with the weights that `model`, on its device and sharded, has now."""
        self.model, self.decay = model, decay
        # An optimizer step changes these in place. Under FSDP2 they are the sharded parameters only outside of passes.
        self.weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tensors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each mean, and of its weight."""
        for name, mean in self.tensors.items():
            if mean.is_floating_point():
                yield local_part(mean), local_part(self.weights[name].detach())

    @torch.no_grad()
    def update(self, taken: Tensor) -> None:
        """Move the mean towards the weights after a step, if it was `taken`, () bool on the device."""
        part = (1 - self.decay) * taken.float()  # a tensor: the host does not wait to know whether it was taken
        for mean, weight in self._pairs():
            mean.lerp_(weight, part)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Within it the model computes with the mean. Weights and mean change places, so no third copy is needed."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # the root keeps what it gathered for an evaluation, which would hide the exchange
        for mean, weight in self._pairs():
            before = weight.clone()
            weight.copy_(mean)
            mean.copy_(before)
