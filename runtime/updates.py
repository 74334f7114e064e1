"""Take or skip optimizer steps by a decision on the device: the host does not wait for it.

Loss scale and counters are numbers on the device. So is the halt flag: a run that cannot continue
is halted, which skips every later step until the host next reads the numbers. It then finds
weights, moments and numbers as they were when the run was halted (`Guard`).

A loss that is NaN or Inf halts it immediately, and a crash dump, crash-step_00001234.json in the
run's folder, has what led to it. Gradients that are NaN or Inf only skip their step;
MAX_SKIPPED_STEPS in a row halt the run.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.files import write_atomic
from runtime import RunError, distributed
from runtime.distributed import Ranks
from runtime.folder import RunFolder
from runtime.optimizers import Optimizers
from runtime.parallel import find_mesh, full_tensor, local_part, reshard

FIRST_SCALE = 65536.0  # the first scale of torch's GradScaler
MIN_SCALE = 1.0  # repeated halving would underflow the scale to 0 and make the weights NaN
GROWTH_INTERVAL = 2000  # healthy steps before the scale doubles, as torch's GradScaler
MAX_SKIPPED_STEPS = 20  # this many in a row stop the run
RUNNING, BAD_LOSS, BAD_GRADIENTS = range(3)  # what halted a run

Number = TypeVar("Number", Tensor, float)


class Counters(NamedTuple, Generic[Number]):
    """Counters of the steps so far: () float64 tensors on the device, or numbers on the host."""

    scale: Number  # factor of the loss before its backward pass
    healthy: Number  # steps since the scale last changed
    skipped: Number  # steps without an update
    skipped_in_row: Number
    taken: Number  # steps with an update
    halted: Number  # RUNNING, or why the run is halted
    step: Number  # the last one before the run was halted
    loss: Number  # the loss of that step, nats per token
    grad_norm: Number  # norm at that step, before clipping


# Loss spikes had numbers 5 to 8 and 13 to 140 until 0ce7a9c: older checkpoints have them.
N_NUMBER = 141
UNUSED = slice(5, 9)  # among the first 13, which hold the counters


def to_counters(numbers: Sequence[Number]) -> Counters[Number]:
    """The counters among the first 13 numbers."""
    return Counters(*numbers[: UNUSED.start], *numbers[UNUSED.stop : 13])


class Updates:
    """The optimizers' steps, with gradients unscaled and clipped inside their kernels.

    Every rank has one. All come to the same decisions, since losses and gradients are averaged
    before.

    Attributes:
        optimizer: changes the parameters.
        numbers: (N_NUMBER,) float64 on the device, which hold the `Counters`; checkpoints have it.
    """

    def __init__(
        self, optimizer: Optimizers, grad_clip: float, scaled: bool, compile: bool = False
    ) -> None:
        """Counters of a new run, on the device of the optimizer's parameters.

        Args:
            optimizer: changes the parameters.
            grad_clip: optim.grad_clip.
            scaled: keep a loss scale, as float16 needs. It is GradScaler's: halved after gradients
                that are NaN or Inf, doubled after GROWTH_INTERVAL healthy steps; but never below
                MIN_SCALE.
            compile: compile the decision on a step, some hundred small operators, to a few kernels.
        """
        self.optimizer = optimizer
        self.scaled = scaled
        self.grad_clip = grad_clip
        device = optimizer.parameters[0].device
        self.numbers = torch.zeros(N_NUMBER, dtype=torch.float64, device=device)
        self.counters.scale.fill_(FIRST_SCALE if scaled else 1.0)
        self.decide = torch.compile(self._decide, fullgraph=True) if compile else self._decide

    @property
    def counters(self) -> Counters[Tensor]:
        return to_counters(self.numbers[:13].unbind())

    @property
    def scale(self) -> Tensor:
        """() fp32, the factor of the loss before its backward pass."""
        return self.counters.scale.float()

    def read(self) -> Counters[float]:
        """The counters as Python numbers. Waits for the device."""
        return to_counters(self.numbers.tolist())

    @torch.no_grad()
    def step(self, step: int, lr: float, loss: Tensor) -> Tensor:
        """Take an optimizer step with the gradients in place, or skip it.

        The decision is made on the device. Skipped are steps whose gradients are NaN or Inf, and
        all steps of a halted run: one whose loss is NaN or Inf, or that skipped MAX_SKIPPED_STEPS
        in a row.

        Args:
            step: number of the step, from 0.
            lr: its learning rate.
            loss: () its mean loss over all ranks, nats per token.

        Returns:
            () bool on the device, True if it was taken.
        """
        gradients: list[Any] = [p.grad for p in self.optimizer.parameters]
        norm = measure_norm(gradients)
        after, take, grad_scale, found_inf = self.decide(self.numbers, norm, loss, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        self.optimizer.step(grad_scale, found_inf)
        self.numbers.copy_(after)
        return take

    def _decide(
        self, numbers: Tensor, norm: Tensor, loss: Tensor, step: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decide on a step.

        Args:
            numbers: the numbers before it.
            norm: () norm of the gradients in place, times the loss scale.
            loss: () as in `step`.
            step: as in `step`.

        Returns:
            The numbers after it, () bool whether it is taken, and `grad_scale` and `found_inf` of
            `Optimizers.step`.
        """
        before = to_counters(numbers[:13].unbind())
        norm = norm.double() / before.scale
        is_healthy = norm.isfinite()
        is_finite = loss.isfinite()
        is_running = before.halted == RUNNING
        take = is_running & is_finite & is_healthy

        # The counters after this step for a finite loss, and for another: one is chosen on the
        # device.
        counted = self._count(before, is_healthy)
        halted = before._replace(halted=torch.full_like(loss, BAD_LOSS))
        latest = {"step": torch.full_like(loss, step), "loss": loss, "grad_norm": norm}
        after_finite_loss = torch.stack(list(counted._replace(**latest))).double()
        after_bad_loss = torch.stack(list(halted._replace(**latest))).double()
        counters = torch.where(is_finite, after_finite_loss, after_bad_loss)
        first, others = counters[: UNUSED.start], counters[UNUSED.start :]
        after = torch.cat([first, numbers[UNUSED], others, numbers[13:]])
        after = torch.where(is_running, after, numbers)

        excess = (norm + 1e-6) / self.grad_clip if self.grad_clip else torch.zeros_like(norm)
        grad_scale = (before.scale * excess.clamp_min(1)).float()
        return after, take, grad_scale, (~take).float()

    def _count(self, before: Counters[Tensor], healthy: Tensor) -> Counters[Tensor]:
        """Count taken and skipped steps, and set the loss scale, after a finite loss."""
        in_row = torch.where(healthy, 0, before.skipped_in_row + 1)
        counters = before._replace(
            skipped=before.skipped + ~healthy,
            skipped_in_row=in_row,
            taken=before.taken + healthy,
            halted=torch.where(in_row == MAX_SKIPPED_STEPS, BAD_GRADIENTS, RUNNING),
        )
        if not self.scaled:
            return counters
        grown = before.healthy + 1 == GROWTH_INTERVAL
        scale = torch.where(grown, before.scale * 2, before.scale)
        return counters._replace(
            scale=torch.where(healthy, scale, (before.scale / 2).clamp_min(MIN_SCALE)),
            healthy=torch.where(healthy & ~grown, before.healthy + 1, 0),
        )


def measure_norm(gradients: list[Any]) -> Tensor:
    """() norm of all gradients over all ranks. Each shard counts once; every rank must call it."""
    by_mesh: dict[Any, list[Any]] = {}  # torch does not sum over tensors of several meshes
    for gradient in gradients:
        by_mesh.setdefault(find_mesh(gradient), []).append(gradient)
    norms = [full_tensor(nn.utils.get_total_norm(part)) for part in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if any(mesh is not None for mesh in by_mesh):
        # Groups of ranks with equal shards may sum in other orders, and their weights would part.
        dist.broadcast(norm, 0)
    return norm


class WeightAverage:
    """The running mean of weights (train.ema_decay), without bias from the initial ones.

    After n taken steps it is (1 - decay) Σ decay^(n - i) w_i / (1 - decay^n), a mean of the weights
    w_1 to w_n after these steps, corrected like Adam's moments. (In torch's AveragedModel w_1 would
    keep the part decay^(n - 1).) It has parameters and buffers and is in fp32 on their device.
    Under FSDP2 each rank holds the mean of its own shards. Tables of hash layers are constants.

    Attributes:
        tensors: {name in model.state_dict(): mean}; a checkpoint holds them. Before the first step
            they are the initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start with the weights that `model`, on its device and sharded, has now."""
        self.model = model
        self.decay = decay
        # An optimizer step changes these in place. Under FSDP2 they are the sharded parameters only
        # outside of passes.
        self.weights = dict(model.named_parameters()) | dict(model.named_buffers())
        self.tensors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each mean, and of its weight."""
        for name, mean in self.tensors.items():
            if mean.is_floating_point():
                yield local_part(mean), local_part(self.weights[name].detach())

    @torch.no_grad()
    def update(self, taken: Tensor, n_taken: Tensor) -> None:
        """Move the mean towards the weights, if the step was taken; the host does not wait.

        Args:
            taken: () bool on the device, True if the last step was taken.
            n_taken: () float64 on the device, steps taken so far, with this one.
        """
        # 1 at the first step, which replaces the initial weights
        fraction = torch.full_like(n_taken, 1 - self.decay)
        fraction = fraction / (1 - self.decay ** n_taken.clamp_min(1))
        fraction = (fraction * taken).float()
        for mean, weight in self._pairs():
            mean.lerp_(weight, fraction)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchange weights and mean in place for this context: the model computes with the mean."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # the root keeps what it gathered for an evaluation, which would hide the exchange
        reshard(self.model)
        for mean, weight in self._pairs():
            old_weight = weight.clone()
            weight.copy_(mean)
            mean.copy_(old_weight)


# ---- the host's side
class Guard:
    """Checks the counters that the device keeps (`Updates`).

    Every rank calls its methods at the same steps.
    """

    def __init__(
        self,
        run: RunFolder,
        model: nn.Module,
        updates: Updates,
        ranks: Ranks,
        recompute: Callable[[int], dict[str, list[Any]]],
    ) -> None:
        """`recompute` repeats the forward and backward pass of a step (from 0).

        It returns this rank's windows and the loss of each.
        """
        self.run = run
        self.model = model
        self.updates = updates
        self.ranks = ranks
        self.recompute = recompute
        self.remedy = (
            "Start again under another run.name with a lower optim.lr or a longer "
            "optim.warmup_steps"
        )
        if updates.scaled:
            self.remedy += ", or use train.dtype = bfloat16 or float32"

    def check(self) -> Counters[float]:
        """Read the counters of the steps so far. Waits for the device: not for every step.

        Raises:
            RunError: the run is halted: a loss that is NaN or Inf, which also writes the crash
                dump, or too many skipped steps in a row.
        """
        counters = self.updates.read()
        step = int(counters.step)
        if counters.halted == BAD_LOSS:  # weights are still as they were before that step
            file = self._dump_crash(step, counters)
            raise RunError(
                f"{self.run}: train loss {counters.loss} in step {step + 1}, before its update: "
                f"the weights are those of step {step}. {file} has its windows and, computed once "
                f"more, the loss of each and the norms of weights and gradients. {self.remedy}"
            )
        if counters.halted != RUNNING:
            raise RunError(
                f"{self.run}: {counters.skipped_in_row:.0f} steps in a row skipped, the last for "
                f"gradients that are NaN or Inf (step {step + 1}, loss {counters.loss:.4g}, loss "
                f"scale {counters.scale:g}). The weights are those before the first of them. "
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
        """Repeat step number `step` (from 0) and describe it in a file; returns its path."""
        windows = {"rank": self.ranks.rank} | self.recompute(step)
        dump = {
            "step": step,
            "loss": counters.loss,
            "loss_scale": counters.scale,
            "ranks": distributed.gather(windows, self.ranks.control),
            "parameters": measure_parameters(self.model, counters.scale),
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
def measure_parameters(model: nn.Module, loss_scale: float) -> dict[str, dict[str, float]]:
    """{name: norms of the weight and of its gradient}, in float64. Every rank calls it."""
    norms = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        weight_norm = full_tensor(torch.linalg.vector_norm(p, dtype=torch.float64))
        gradient_norm = full_tensor(torch.linalg.vector_norm(p.grad, dtype=torch.float64))
        norms[name] = {
            "weight_norm": weight_norm.item(),
            "gradient_norm": gradient_norm.item() / loss_scale,
        }
    return norms
