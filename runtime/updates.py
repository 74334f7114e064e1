"""Optimizer steps that are taken or skipped by a decision on the device: no step makes the host wait for it.

Loss scale, spike test and counters are numbers on the device. So is the halt flag: a run that cannot continue is
halted, which skips every later step, until the host next reads the numbers. It then finds weights, moments and numbers
as they were when the run was halted.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.parallel import full_tensor

FIRST_SCALE, MIN_SCALE = 65536.0, 1.0  # MIN: halved for ever, the scale would reach 0, and the weights NaN
GROWTH_INTERVAL = 2000  # healthy steps before the scale doubles
WINDOW = 128  # losses that a spike is measured against, once half of them exist
RUNNING, BAD_LOSS, BAD_GRADIENTS, SPIKES = range(4)  # what halted a run


class State(NamedTuple):
    """The counters, in their order in `Updates.numbers`, where the last WINDOW losses follow them."""

    scale: float  # factor of the loss before its backward pass
    healthy: float  # steps since the scale last changed
    skipped: float  # steps without an update
    skipped_in_row: float
    taken: float  # steps with an update
    spikes: float
    spike_step: float  # of the last spike
    spike_loss: float
    spike_mean: float  # of the losses before it
    halted: float  # RUNNING, or why the run is halted
    step: float  # the last one before the run was halted
    loss: float  # its loss, nats per token
    grad_norm: float  # before clipping


class Updates:
    """AdamW's steps (`fused`), with gradients unscaled and clipped inside its kernel.

    Every rank has one and comes to the same decisions, since losses and gradients are averaged before.

    Attributes:
        numbers: (13 + WINDOW,) float64 on the device, the fields of `State` and the last losses; a checkpoint holds it.
        parameters: all that AdamW changes.
    """

    def __init__(
        self,
        optimizer: torch.optim.AdamW,
        device: torch.device | str,
        *,
        scaled: bool,
        grad_clip: float,
        loss_spike: str = "off",
        spike_sigma: float = 6.0,
        max_skipped_steps: int = 0,
    ) -> None:
        """Counters of a new run.

        Args:
            optimizer: a fused AdamW.
            device: of its parameters.
            scaled: keep a loss scale, as float16 needs. It is GradScaler's: halved after gradients that are NaN or
                Inf, doubled after GROWTH_INTERVAL healthy steps; but never below MIN_SCALE.
            grad_clip: largest gradient norm; 0 disables clipping.
            loss_spike: "off", "warn" or "skip", as in `configure.schema.Train`.
            spike_sigma: standard deviations above the mean that make a spike.
            max_skipped_steps: skipped steps in a row that halt the run; 0 disables that.
        """
        self.optimizer, self.scaled, self.grad_clip = optimizer, scaled, grad_clip
        self.loss_spike, self.spike_sigma, self.max_skipped_steps = loss_spike, spike_sigma, max_skipped_steps
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        first = dict.fromkeys(State._fields, 0.0) | {"scale": FIRST_SCALE if scaled else 1.0}
        self.numbers = torch.tensor([*first.values(), *[0.0] * WINDOW], dtype=torch.float64, device=device)

    @property
    def scale(self) -> Tensor:
        """() fp32, the factor of the loss before its backward pass."""
        return self.numbers[0].float()

    @torch.no_grad()
    def step(self, step: int, lr: float, loss: Tensor) -> Tensor:
        """Take an optimizer step with the gradients in place, or skip it by a decision on the device.

        Skipped are steps whose gradients are NaN or Inf, spikes under loss_spike = "skip", and all steps of a halted
        run: one whose loss is NaN or Inf, or that skipped max_skipped_steps in a row.

        Args:
            step: number of the step, from 0.
            lr: its learning rate.
            loss: () its mean loss over all ranks, nats per token.

        Returns:
            () bool on the device: whether it was taken.
        """
        now: Any = State._make(self.numbers[: len(State._fields)].unbind())  # () tensors here
        losses = self.numbers[len(State._fields) :]
        norm = full_tensor(nn.utils.get_total_norm([p.grad for p in self.parameters])).double() / now.scale
        healthy = norm.isfinite()
        spike, mean = is_spike(losses, now.taken, loss, self.spike_sigma)
        spike = spike & healthy & (self.loss_spike != "off")
        skip = ~healthy | (spike & (self.loss_spike == "skip"))
        running, finite = now.halted == RUNNING, loss.isfinite()
        take = running & finite & ~skip

        # The counters after this step: `counted` if its loss is finite, else `ended`. Both are computed, and one is
        # chosen on the device.
        in_row = torch.where(skip, now.skipped_in_row + 1, 0)
        stuck = in_row == (self.max_skipped_steps or -1)
        counted = now._replace(
            skipped=now.skipped + skip,
            skipped_in_row=in_row,
            taken=now.taken + ~skip,
            spikes=now.spikes + spike,
            spike_step=torch.where(spike, step, now.spike_step),
            spike_loss=torch.where(spike, loss, now.spike_loss),
            spike_mean=torch.where(spike, mean, now.spike_mean),
            halted=torch.where(stuck, torch.where(healthy, SPIKES, BAD_GRADIENTS), RUNNING),
        )
        if self.scaled:
            grown = now.healthy + 1 == GROWTH_INTERVAL
            scale = torch.where(grown, now.scale * 2, now.scale)
            counted = counted._replace(
                scale=torch.where(healthy, scale, (now.scale / 2).clamp_min(MIN_SCALE)),
                healthy=torch.where(healthy & ~grown, now.healthy + 1, 0),
            )
        ended = now._replace(halted=torch.full_like(loss, BAD_LOSS))
        last = {"step": torch.full_like(loss, step), "loss": loss, "grad_norm": norm}
        counted, ended = (torch.stack([*state._replace(**last)]).double() for state in (counted, ended))
        here = torch.arange(WINDOW, device=losses.device) == now.taken % WINDOW
        after = torch.cat([torch.where(finite, counted, ended), torch.where(here & take, loss, losses)])

        # AdamW's fused kernel divides gradients by grad_scale, and does nothing where found_inf is 1.
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        clip = (norm + 1e-6) / self.grad_clip if self.grad_clip else torch.zeros_like(norm)
        fused: Any = self.optimizer  # whose attributes torch does not declare
        fused.grad_scale = (now.scale * clip.clamp_min(1)).float()
        fused.found_inf = (~take).float()
        fused.step()
        self.numbers.copy_(torch.where(running, after, self.numbers))
        return take

    def read(self) -> State:
        """The counters as Python numbers. Waits for the device."""
        return State(*self.numbers[: len(State._fields)].tolist())


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
