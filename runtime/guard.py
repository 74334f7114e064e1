"""Stops a run that cannot go on: reads what became of the steps on the device, says why, and leaves a crash dump."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from runtime import RunError
from runtime.batches import first_row
from runtime.crash import dump_crash
from runtime.distributed import Ranks
from runtime.preflight import Plan
from runtime.state import TrainState
from runtime.updates import BAD_LOSS, RUNNING, SPIKES, State

OTHER_RUN = "under another run.name"


class Guard:
    """Checks the counters that the device keeps (`Updates`). Every rank calls its methods at the same steps."""

    def __init__(
        self, plan: Plan, state: TrainState, ranks: Ranks, recompute: Callable[[int], tuple[list[Tensor], float]]
    ) -> None:
        """`recompute` repeats a step's forward and backward pass, scaled as then: this rank's losses, and its rate."""
        self.plan, self.state, self.ranks, self.recompute = plan, state, ranks, recompute

    def check(self) -> State:
        """What became of the steps so far. Waits for the device, so it is not called in every step.

        Raises:
            RunError: the run is halted: a loss that is NaN or Inf, or too many skipped steps in a row. A step
                with a bad loss is computed once more and written to crash-step_….json, with norms of layers and
                gradients.
        """
        found = self.state.updates.read()
        at, folder = int(found.step), self.plan.folder
        if found.halted == BAD_LOSS:  # weights, windows and dropout are still those of that step
            file = self._dump_crash(at, found)
            raise RunError(
                f"{folder}: train loss {found.loss} in step {at + 1}, before its update: the weights are those of step "
                f"{at}. {file} has its windows and, computed once more, its losses and the norms of layers and "
                f"gradients. Start again {OTHER_RUN} with a lower optim.lr, a longer optim.warmup_steps or "
                f"train.dtype = bfloat16"
            )
        if found.halted != RUNNING:
            why = "a loss spike" if found.halted == SPIKES else "gradients that are NaN or Inf"
            raise RunError(
                f"{folder}: {found.skipped_in_row:.0f} steps in a row skipped, the last for {why} (step {at + 1}, loss "
                f"{found.loss:.4g}, loss scale {found.scale:g}). The weights are those before the first of them. Lower "
                f"optim.lr, lengthen optim.warmup_steps, or use train.dtype = bfloat16 or float32, {OTHER_RUN}"
            )
        return found

    def check_val_loss(self, step: int, loss: Tensor) -> None:
        """Raises RunError, on all ranks, if the validation loss (), nats per token, is NaN or Inf."""
        if not loss.isfinite():
            raise RunError(
                f"{self.plan.folder}: val loss {loss.item()} at step {step}, the run has diverged. Start again "
                f"{OTHER_RUN}, with a lower optim.lr or a longer optim.warmup_steps"
            )

    def _dump_crash(self, at: int, found: State) -> Path:
        """Compute step `at` (from 0) once more and write crash-step_….json; returns its path."""
        plan, state, ranks = self.plan, self.state, self.ranks
        losses, rate = self.recompute(at)
        for p in state.updates.parameters:
            p.grad /= found.scale
        size = plan.config.train.micro_batch_size
        rows = [first_row(micro, size, ranks) for micro in range(plan.accumulation)]
        metadata = {"loss": found.loss, "loss_scale": found.scale, "learning_rate": rate}
        return dump_crash(plan, at, metadata, state.model, rows, losses, ranks)
