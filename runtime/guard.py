"""Stop a run that cannot continue: read the counters on the device and write a crash dump.

A loss that is NaN or Inf stops it immediately, and the dump, runs/<name>/crash-step_00001234.json,
shows what led to it. Gradients that are NaN or Inf, or loss spikes, only skip their step;
MAX_SKIPPED_STEPS in a row stop the run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.files import write_atomic
from runtime import RunError, distributed
from runtime.distributed import Ranks
from runtime.folder import RunFolder
from runtime.parallel import full_tensor
from runtime.state import TrainState
from runtime.updates import BAD_LOSS, RUNNING, SPIKES, Counters


class Recomputed(NamedTuple):
    """A step's forward and backward pass, computed again."""

    losses: list[Tensor]  # () of each of this rank's micro-batches, nats per token
    windows: list[Any]  # windows of each of these micro-batches (`Loader.locate`)
    learning_rate: float


class Guard:
    """Checks the counters that the device keeps (`Updates`).

    Every rank calls its methods at the same steps.
    """

    def __init__(
        self,
        run: RunFolder,
        state: TrainState,
        ranks: Ranks,
        recompute: Callable[[int], Recomputed],
    ) -> None:
        """`recompute` repeats the forward and backward pass of a step (from 0)."""
        self.run = run
        self.state = state
        self.ranks = ranks
        self.recompute = recompute
        self.remedy = (
            "Start again under another run.name with a lower optim.lr or a longer "
            "optim.warmup_steps"
        )
        if state.compute.dtype == torch.float16:
            self.remedy += ", or use train.dtype = bfloat16 or float32"

    def check(self) -> Counters[float]:
        """Read the counters of the steps so far. Waits for the device: not for every step.

        Raises:
            RunError: the run is halted: a loss that is NaN or Inf, which also writes the crash
                dump, or too many skipped steps in a row.
        """
        counters = self.state.updates.read()
        step = int(counters.step)
        if counters.halted == BAD_LOSS:  # weights are still as they were before that step
            file = self._dump_crash(step, counters)
            raise RunError(
                f"{self.run}: train loss {counters.loss} in step {step + 1}, before its update: "
                f"the weights are those of step {step}. {file} has its windows and, computed once "
                f"more, its losses and the norms of weights and gradients. {self.remedy}"
            )
        if counters.halted != RUNNING:
            reason = (
                "a loss spike" if counters.halted == SPIKES else "gradients that are NaN or Inf"
            )
            raise RunError(
                f"{self.run}: {counters.skipped_in_row:.0f} steps in a row skipped, the last for "
                f"{reason} (step {step + 1}, loss {counters.loss:.4g}, loss scale "
                f"{counters.scale:g}). The weights are those before the first of them. "
                f"{self.remedy}"
            )
        return counters

    def check_val_loss(self, step: int, loss: Tensor) -> None:
        """Raise RunError, on all ranks, if the validation loss () is NaN or Inf."""
        if not loss.isfinite():
            raise RunError(
                f"{self.run}: val loss {loss.item()} at step {step}, the run has diverged. "
                f"{self.remedy}"
            )

    def _dump_crash(self, step: int, counters: Counters[float]) -> Path:
        """Compute step number `step` (from 0) again and describe it in a file; returns its path."""
        losses, windows, learning_rate = self.recompute(step)
        micro_batches = []
        for loss, micro_windows in zip(losses, windows, strict=True):
            micro_batches.append({"loss": loss.item(), "windows": micro_windows})
        this_rank = {"rank": self.ranks.rank, "micro_batches": micro_batches}
        dump = {
            "step": step,
            "loss": counters.loss,
            "loss_scale": counters.scale,
            "learning_rate": learning_rate,
            "ranks": distributed.gather(this_rank, self.ranks.control),
            "parameters": measure_parameters(self.state, counters.scale),
        }
        path = self.run.path / f"crash-step_{step:08d}.json"
        if self.ranks.rank == 0:
            # JSON has no numbers for NaN and Inf: they become strings.
            finite = json.loads(json.dumps(dump), parse_constant=lambda name: str(float(name)))
            try:
                write_atomic(path, json.dumps(finite, indent=1) + "\n")
            except OSError as error:  # must not hide the error that stops the run
                print(f"warning: {path} could not be written ({error.strerror})", flush=True)
        return path


@torch.no_grad()
def measure_parameters(state: TrainState, loss_scale: float) -> dict[str, dict[str, float]]:
    """{name: norms of the weight and of its gradient}, in float64. Every rank calls it."""
    norms = {}
    for name, p in state.model.named_parameters():
        assert p.grad is not None
        weight_norm = full_tensor(torch.linalg.vector_norm(p, dtype=torch.float64))
        gradient_norm = full_tensor(torch.linalg.vector_norm(p.grad, dtype=torch.float64))
        norms[name] = {
            "weight_norm": weight_norm.item(),
            "gradient_norm": gradient_norm.item() / loss_scale,
        }
    return norms
