"""Optimizer steps that are taken, or left out, on the device: no step makes the host wait for it.

Loss scale, spike test and counters are numbers on the device. So is the brake: a run that cannot go on is halted, which
leaves out every later step, until the host next reads the numbers. It then finds weights, moments and numbers as they
were when the run halted.
"""

from typing import NamedTuple

import torch
import torch.nn as nn

from runtime.parallel import full_tensor

FIRST_SCALE, MIN_SCALE = 65536.0, 1.0  # MIN: halved without end, the scale would come to 0, and weights to NaN
GROWTH_INTERVAL = 2000  # healthy steps before the scale doubles
WINDOW = 128  # losses that a spike is measured against, once there are half as many
RUNNING, BAD_LOSS, BAD_GRADIENTS, SPIKES = range(4)  # what halted a run


class State(NamedTuple):
    """The numbers, in the order in which they lie in `Updates.numbers`, before the last WINDOW losses."""

    scale: float  # of the loss
    healthy: float  # steps since the scale last changed
    skipped: float  # steps without an update
    skipped_in_row: float
    taken: float  # steps with one
    spikes: float
    spike_step: float  # of the last spike
    spike_loss: float
    spike_mean: float  # of the losses before it
    halted: float  # RUNNING, or why not
    step: float  # the last one while the run was not halted
    loss: float  # its loss
    grad_norm: float  # before clipping


class Updates:
    """AdamW's steps (`fused`), with gradients unscaled and clipped inside its kernel.

    `scaled`: keep a loss scale, as float16 needs; it is GradScaler's, halved after gradients that are not finite and
    doubled after GROWTH_INTERVAL healthy steps, but never below MIN_SCALE. `grad_clip`: largest gradient norm, 0 for
    none. `loss_spike`, `spike_sigma`, `max_skipped_steps`: as in `configure.schema.Train`. Every rank has one and
    comes to the same decisions, since losses and gradients are averaged before.
    """

    def __init__(self, optimizer, device, *, scaled, grad_clip, loss_spike="off", spike_sigma=6.0, max_skipped_steps=0):
        self.optimizer, self.scaled, self.grad_clip = optimizer, scaled, grad_clip
        self.loss_spike, self.spike_sigma, self.max_skipped_steps = loss_spike, spike_sigma, max_skipped_steps
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        first = dict.fromkeys(State._fields, 0.0) | {"scale": FIRST_SCALE if scaled else 1.0}
        self.numbers = torch.tensor([*first.values(), *[0.0] * WINDOW], dtype=torch.float64, device=device)

    @property
    def scale(self):
        """() fp32, the factor of the loss before its backward pass."""
        return self.numbers[0].float()

    @torch.no_grad()
    def step(self, step, lr, loss):
        """Take optimizer step `step` (from 0) at rate `lr` with the gradients in place; `loss`, (), is its mean loss.

        Left out on the device are steps whose gradients are not finite, spikes under loss_spike = "skip", and all steps
        of a halted run: one whose loss is not finite, or that left out max_skipped_steps (0: any number) in a row.
        Returns whether it was taken, () bool.
        """
        now, losses = State(*self.numbers[: len(State._fields)].unbind()), self.numbers[len(State._fields) :]
        norm = full_tensor(nn.utils.get_total_norm([p.grad for p in self.parameters])).double() / now.scale
        healthy = norm.isfinite()
        spike, mean = is_spike(losses, now.taken, loss, self.spike_sigma)
        spike = spike & healthy & (self.loss_spike != "off")
        left_out = ~healthy | (spike & (self.loss_spike == "skip"))
        running, finite = now.halted == RUNNING, loss.isfinite()
        take = running & finite & ~left_out

        in_row = torch.where(left_out, now.skipped_in_row + 1, 0)
        stuck = in_row == (self.max_skipped_steps or -1)
        counted = now._replace(
            skipped=now.skipped + left_out,
            skipped_in_row=in_row,
            taken=now.taken + ~left_out,
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

        for group in self.optimizer.param_groups:
            group["lr"] = lr
        clip = (norm + 1e-6) / self.grad_clip if self.grad_clip else torch.zeros_like(norm)
        self.optimizer.grad_scale = (now.scale * clip.clamp_min(1)).float()
        self.optimizer.found_inf = (~take).float()
        self.optimizer.step()
        self.numbers.copy_(torch.where(running, after, self.numbers))
        return take

    def read(self):
        """State as Python numbers. Waits for the device."""
        return State(*self.numbers[: len(State._fields)].tolist())


def is_spike(losses, count, loss, sigma):
    """(whether `loss` is more than `sigma` standard deviations above the mean of the last losses, that mean), () each.

    `losses` (WINDOW,) holds the last ones of `count`, in any order. With fewer than half as many there is no telling.
    """
    n = count.clamp_max(WINDOW)
    there = torch.arange(WINDOW, device=losses.device) < n
    mean = losses.sum() / n
    deviation = (torch.where(there, losses - mean, 0).square().sum() / (n - 1)).sqrt()
    return (count >= WINDOW // 2) & (loss > mean + sigma * deviation), mean
