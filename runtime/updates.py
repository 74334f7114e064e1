"""Optimizer steps that are taken or skipped by a decision on the device: no step makes the host wait for it.

Loss scale, spike test and counters are numbers on the device. So is the halt flag: a run that
cannot continue is halted, which skips every later step, until the host next reads the numbers. It
then finds weights, moments and numbers as they were when the run was halted.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from configure import Config
from runtime.parallel import full_tensor

# MIN: halved for ever, the scale would reach 0, and the weights NaN
FIRST_SCALE, MIN_SCALE = 65536.0, 1.0
GROWTH_INTERVAL = 2000  # healthy steps before the scale doubles
WINDOW = 128  # losses that a spike is measured against, once half of them exist
RUNNING, BAD_LOSS, BAD_GRADIENTS, SPIKES = range(4)  # what halted a run


Number = TypeVar("Number", Tensor, float)


class Counters(NamedTuple, Generic[Number]):
    """What became of the steps so far: () float64 tensors on the device, or the numbers that the host has read."""

    scale: Number  # factor of the loss before its backward pass
    healthy: Number  # steps since the scale last changed
    skipped: Number  # steps without an update
    skipped_in_row: Number
    taken: Number  # steps with an update
    spikes: Number
    spike_step: Number  # of the last spike
    spike_loss: Number
    spike_mean: Number  # of the losses before it
    halted: Number  # RUNNING, or why the run is halted
    step: Number  # the last one before the run was halted
    loss: Number  # its loss, nats per token
    grad_norm: Number  # before clipping


class Updates:
    """AdamW's steps (`fused`), with gradients unscaled and clipped inside its kernel.

    Every rank has one and comes to the same decisions, since losses and gradients are averaged
    before.

    Attributes:
        numbers: (13 + WINDOW,) float64 on the device, the `Counters` and the last losses;
            checkpoints hold it.
        parameters: all that AdamW changes.
    """

    def __init__(
        self, optimizer: torch.optim.AdamW, config: Config, scaled: bool, compile: bool = False
    ) -> None:
        """Counters of a new run, on the device of the optimizer's parameters.

        With `compile` the decision on a step, some hundred small operators, is compiled to a few
        kernels.

        With `scaled` it keeps a loss scale, as float16 needs. It is GradScaler's: halved after
        gradients that are NaN or Inf, doubled after GROWTH_INTERVAL healthy steps; but never below
        MIN_SCALE.
        """
        train = config.train
        self.optimizer, self.scaled, self.grad_clip = optimizer, scaled, config.optim.grad_clip
        self.loss_spike, self.spike_sigma = train.loss_spike, train.spike_sigma
        self.max_skipped_steps = train.max_skipped_steps
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        size, device = len(Counters._fields) + WINDOW, self.parameters[0].device
        self.numbers = torch.zeros(size, dtype=torch.float64, device=device)
        self.counters.scale.fill_(FIRST_SCALE if scaled else 1.0)
        self.decide = torch.compile(self._decide, fullgraph=True) if compile else self._decide

    @property
    def counters(self) -> Counters[Tensor]:
        return Counters(*self.numbers[: len(Counters._fields)].unbind())

    @property
    def scale(self) -> Tensor:
        """() fp32, the factor of the loss before its backward pass."""
        return self.counters.scale.float()

    def read(self) -> Counters[float]:
        """The counters as Python numbers. Waits for the device."""
        return Counters(*self.numbers[: len(Counters._fields)].tolist())

    @torch.no_grad()
    def step(self, step: int, lr: float, loss: Tensor) -> Tensor:
        """Take an optimizer step with the gradients in place, or skip it by a decision on the device.

        Skipped are steps whose gradients are NaN or Inf, spikes under loss_spike = "skip", and all
        steps of a halted run: one whose loss is NaN or Inf, or that skipped max_skipped_steps in a
        row.

        Args:
            step: number of the step, from 0.
            lr: its learning rate.
            loss: () its mean loss over all ranks, nats per token.

        Returns:
            () bool on the device: whether it was taken.
        """
        norm = full_tensor(nn.utils.get_total_norm([p.grad for p in self.parameters]))
        fused: Any = self.optimizer  # whose attributes torch does not declare
        # AdamW's kernels divide gradients by grad_scale, and do nothing where found_inf is 1.
        after, take, fused.grad_scale, fused.found_inf = self.decide(self.numbers, norm, loss, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        fused.step()
        self.numbers.copy_(after)
        return take

    def _decide(
        self, numbers: Tensor, norm: Tensor, loss: Tensor, step: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decide on a step: the numbers after it, whether it is taken, and AdamW's grad_scale and found_inf.

        `norm` () is that of the gradients in place, times the loss scale; the other arguments are
        those of `step`.
        """
        count = len(Counters._fields)
        before, losses = Counters(*numbers[:count].unbind()), numbers[count:]
        norm = norm.double() / before.scale
        healthy, finite, running = norm.isfinite(), loss.isfinite(), before.halted == RUNNING
        spike, mean = is_spike(losses, before.taken, loss, self.spike_sigma)
        spike = spike & healthy & (self.loss_spike != "off")
        skip = ~healthy | (spike & (self.loss_spike == "skip"))
        take = running & finite & ~skip

        # The counters after this step if its loss is finite, and if it is not: one is chosen on the
        # device.
        counted = self._count(before, healthy, skip)._replace(
            spikes=before.spikes + spike,
            spike_step=torch.where(spike, step, before.spike_step),
            spike_loss=torch.where(spike, loss, before.spike_loss),
            spike_mean=torch.where(spike, mean, before.spike_mean),
        )
        ended = before._replace(halted=torch.full_like(loss, BAD_LOSS))
        latest = {"step": torch.full_like(loss, step), "loss": loss, "grad_norm": norm}
        counted, ended = (
            torch.stack([*counters._replace(**latest)]).double() for counters in (counted, ended)
        )
        oldest = torch.arange(WINDOW, device=losses.device) == before.taken % WINDOW
        after = torch.cat(
            [torch.where(finite, counted, ended), torch.where(oldest & take, loss, losses)]
        )

        clip = (norm + 1e-6) / self.grad_clip if self.grad_clip else torch.zeros_like(norm)
        grad_scale = (before.scale * clip.clamp_min(1)).float()
        return torch.where(running, after, numbers), take, grad_scale, (~take).float()

    def _count(self, before: Counters[Tensor], healthy: Tensor, skip: Tensor) -> Counters[Tensor]:
        """The counters of taken and skipped steps, and the loss scale, after a step with a finite loss."""
        in_row = torch.where(skip, before.skipped_in_row + 1, 0)
        stuck = in_row == self.max_skipped_steps
        counters = before._replace(
            skipped=before.skipped + skip,
            skipped_in_row=in_row,
            taken=before.taken + ~skip,
            halted=torch.where(stuck, torch.where(healthy, SPIKES, BAD_GRADIENTS), RUNNING),
        )
        if not self.scaled:
            return counters
        grown = before.healthy + 1 == GROWTH_INTERVAL
        scale = torch.where(grown, before.scale * 2, before.scale)
        return counters._replace(
            scale=torch.where(healthy, scale, (before.scale / 2).clamp_min(MIN_SCALE)),
            healthy=torch.where(healthy & ~grown, before.healthy + 1, 0),
        )


def is_spike(losses: Tensor, count: Tensor, loss: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Whether a loss is more than `sigma` standard deviations above the mean of the last losses.

    Args:
        losses: (WINDOW,) the last losses, in any order; zeros where there are none yet.
        count: () losses so far. With fewer than WINDOW / 2 nothing is a spike.
        loss: () the new one.
        sigma: standard deviations.

    Returns:
        () bool, and that mean, ().
    """
    n = count.clamp_max(WINDOW)
    exists = torch.arange(WINDOW, device=losses.device) < n
    mean = losses.sum() / n
    deviation = (torch.where(exists, losses - mean, 0).square().sum() / (n - 1)).sqrt()
    return (count >= WINDOW // 2) & (loss > mean + sigma * deviation), mean
