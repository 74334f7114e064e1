"""Stops a run that cannot continue: reads what became of the steps on the device and writes a crash dump.

A loss that is NaN or Inf stops it at once, and the dump, runs/<name>/crash-step_00001234.json,
shows what led to it. Gradients that are NaN or Inf, or loss spikes, only skip their step;
train.max_skipped_steps in a row stop the run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import write_atomic
from runtime import RunError, distributed
from runtime.batches import first_row
from runtime.distributed import Ranks
from runtime.parallel import full_tensor
from runtime.preflight import Plan
from runtime.state import TrainState
from runtime.updates import BAD_LOSS, RUNNING, SPIKES, Counters


class Guard:
    """Checks the counters that the device keeps (`Updates`).

    Every rank calls its methods at the same steps.
    """

    def __init__(
        self,
        plan: Plan,
        state: TrainState,
        ranks: Ranks,
        recompute: Callable[[int], tuple[list[Tensor], float]],
    ) -> None:
        """`recompute` repeats a step's forward and backward pass, scaled as then: this rank's losses, and its rate."""
        self.plan, self.state, self.ranks, self.recompute = plan, state, ranks, recompute
        self.remedy = "Start again under another run.name with a lower optim.lr or a longer optim.warmup_steps"
        if plan.dtype == torch.float16:
            self.remedy += ", or use train.dtype = bfloat16 or float32"

    def check(self) -> Counters[float]:
        """What became of the steps so far. Waits for the device, so it is not called in every step.

        Raises:
            RunError: the run is halted: a loss that is NaN or Inf, which also writes the crash
                dump, or too many skipped steps in a row.
        """
        counters = self.state.updates.read()
        step, folder = int(counters.step), self.plan.run
        if counters.halted == BAD_LOSS:  # weights, windows and dropout are still those of that step
            file = self._dump_crash(step, counters)
            raise RunError(
                f"{folder}: train loss {counters.loss} in step {step + 1}, before its update: the weights are those of "
                f"step {step}. {file} has its windows and, computed once more, its losses and the norms of weights "
                f"and gradients. {self.remedy}"
            )
        if counters.halted != RUNNING:
            why = "a loss spike" if counters.halted == SPIKES else "gradients that are NaN or Inf"
            raise RunError(
                f"{folder}: {counters.skipped_in_row:.0f} steps in a row skipped, the last for {why} (step {step + 1}, "
                f"loss {counters.loss:.4g}, loss scale {counters.scale:g}). The weights are those before the first of "
                f"them. {self.remedy}"
            )
        return counters

    def check_val_loss(self, step: int, loss: Tensor) -> None:
        """Raises RunError, on all ranks, if the validation loss (), nats per token, is NaN or Inf."""
        if not loss.isfinite():
            raise RunError(
                f"{self.plan.run}: val loss {loss.item()} at step {step}, the run has diverged. {self.remedy}"
            )

    @torch.no_grad()
    def _dump_crash(self, step: int, counters: Counters[float]) -> Path:
        """Compute step number `step` (from 0) once more and write what is known of it; returns the file's path."""
        plan, size = self.plan, self.plan.config.train.micro_batch_size
        with torch.enable_grad():
            tensors, rate = self.recompute(step)
        losses = [loss.item() for loss in tensors]
        rows = (first_row(micro, size, self.ranks) for micro in range(plan.accumulation))
        windows = [plan.loader.locate(step, row, size) for row in rows]
        of_rank = {
            "rank": self.ranks.rank,
            "micro_batches": [
                {"loss": loss, "windows": w} for loss, w in zip(losses, windows, strict=True)
            ],
        }
        dump: dict[str, Any] = {"step": step, "loss": counters.loss, "loss_scale": counters.scale}
        dump |= {"learning_rate": rate, "ranks": distributed.gather(of_rank, self.ranks.control)}
        dump["parameters"] = {}
        for name, p in self.state.model.named_parameters():
            assert p.grad is not None
            norms = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in (p, p.grad))
            weight, gradient = (full_tensor(norm).item() for norm in norms)
            dump["parameters"][name] = {
                "weight_norm": weight,
                "gradient_norm": gradient / counters.scale,
            }
        path = plan.run.path / f"crash-step_{step:08d}.json"
        if self.ranks.rank == 0:
            # JSON has no numbers for NaN and Inf: they become strings.
            text = json.loads(json.dumps(dump), parse_constant=lambda name: str(float(name)))
            try:
                write_atomic(path, json.dumps(text, indent=1) + "\n")
            except OSError as error:  # must not hide what went wrong
                print(f"warning: {path} could not be written ({error.strerror})", flush=True)
        return path
