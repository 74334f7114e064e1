"""Reports of a run on rank 0: the header, the progress bar, lines of metrics.

Other ranks have a silent reporter.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from balance import summarize_routing
from common.progress import progress_bar
from common.text import plural
from configure import Config
from kernels import choose_backend, find_triton_problem
from runtime import RunError, distributed, memory
from runtime.distributed import Ranks
from runtime.identity import RUN_ID
from runtime.memory import count_parameters, flops_per_token
from runtime.metrics import Metrics
from runtime.preflight import Plan
from runtime.state import Statistics, TrainState
from runtime.tracker import start_wandb
from runtime.updates import Counters


class SilentReporter(AbstractContextManager["SilentReporter"]):
    """Replaces the Reporter on ranks other than 0: the same methods, which do nothing."""

    metadata: dict[str, Any] = {}
    pause = nullcontext

    def ignore(self, *_: object) -> None:
        """Replaces every method that reports."""

    __exit__ = log_evaluation = log_steps = count_step = sync = ignore


class Reporter(AbstractContextManager["Reporter"]):
    """Writes config.toml, metrics, the header to stdout and a progress bar to stderr.

    Attributes:
        metadata: what a checkpoint needs: the ids of the run and of its wandb run, if any.
    """

    def __init__(self, plan: Plan, state: TrainState, ranks: Ranks) -> None:
        """Print the header and open everything.

        Raises RunError if metrics.jsonl cannot be written.
        """
        config = plan.config
        self.plan = plan
        self.ranks = ranks
        identity = plan.run.identity
        assert identity, "rank 0 has claimed the folder"
        plan.run.write_config(config)
        if plan.branch:
            plan.branch.copy_metrics(plan.run.path, identity.id)
        self.flops = flops_per_token(config.model)
        self.peak = distributed.peak_flops(plan.device, plan.dtype)
        total, active = count_parameters(config.model)
        for line in describe_plan(plan, ranks, state.step, total, active):
            print(f"{plan.run}: {line}")

        tags = [config.model.router, *config.data.sets]
        tags += [format_millions(total), f"{format_millions(active)} active"]
        resume_step = state.step or -1
        tracker = start_wandb(config, plan.run.path, state.metadata.get("wandb"), tags)
        self.metadata = {RUN_ID: identity.id}
        if tracker:
            self.metadata["wandb"] = tracker.id
        self.metrics = Metrics(plan.run.path, resume_step, tracker, identity)
        self.bar = progress_bar(
            every=10,
            desc=config.run.name,
            initial=state.step,
            total=config.train.max_steps,
            bar_format=format_bar(config.run.name),
        )
        self.interval_start: float | None = None  # time of perf_counter; None before the first step
        self.steps_timed = 0

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.bar.close()
        # an error that is already raised must not be replaced
        with suppress(RunError) if error else nullcontext():
            self.metrics.close(failed=error is not None)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent within this context does not count as the steps' time."""
        start = time.perf_counter()
        yield
        if self.interval_start is None:
            self.interval_start = start
        self.interval_start += time.perf_counter() - start

    def count_step(self) -> None:
        self.steps_timed += 1
        self.bar.update()

    def sync(self) -> None:
        """Make the lines so far survive a power failure.

        Comes before a checkpoint, whose steps are not repeated.
        """
        self.metrics.sync()

    def write(self, text: str) -> None:
        """Print a line about the run above the progress bar."""
        self.bar.write(f"{self.plan.config.run.name}: {text}")

    def log_evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Write a line of validation metrics (`validation.evaluate`) after `step` steps."""
        logged = values | {"val/window_documents": self.plan.data.validation.documents}
        self.metrics.log(step, step * self.plan.tokens_per_step, **logged)
        text = f"step {step}, val loss {values['val/loss'].item():.4f}"
        if self.plan.config.data.mix:
            losses = []
            for name in self.plan.config.data.mix:
                losses.append(f"{name} {values[f'val/{name}/loss'].item():.4f}")
            text += f" ({', '.join(losses)})"
        if "val_ema/loss" in values:
            text += f", EMA {values['val_ema/loss'].item():.4f}"
        self.write(text)
        scores = describe_scores(values)
        if scores:
            self.write(f"step {step}, {scores}")

    def log_steps(
        self, step: int, lr: float, counters: Counters, mean: Statistics, routers: dict[str, Tensor]
    ) -> None:
        """Write a line of training metrics after `step` steps.

        The device is idle, since `counters` were just read from it.

        Args:
            step: optimizer steps done.
            lr: learning rate of the last one.
            counters: what became of the steps so far.
            mean: the mean over the steps since the last line.
            routers: `TrainState.describe_routers`.
        """
        assert self.interval_start is not None  # every step comes after a pause
        step_seconds = (time.perf_counter() - self.interval_start) / self.steps_timed
        config = self.plan.config
        values: dict[str, Any] = {
            "train/loss": mean.loss,
            "train/aux_loss": mean.aux_loss,
            "optim/lr": lr,
            "optim/grad_norm": counters.grad_norm,
            "optim/skipped_steps": int(counters.skipped),
        }
        if self.plan.dtype == torch.float16:
            values["optim/loss_scale"] = counters.scale
        values |= summarize_routing("router", mean.loads, mean.layers | routers)
        speed = self.plan.tokens_per_step / step_seconds
        values |= self._measure_performance(speed, step_seconds)
        self.metrics.log(step, step * self.plan.tokens_per_step, **values)
        self.bar.bar_format = format_bar(config.run.name, mean.loss.item(), speed)
        self.interval_start = time.perf_counter()
        self.steps_timed = 0

    def _measure_performance(self, speed: float, step_seconds: float) -> dict[str, float]:
        """Metrics `perf/…` of `speed` tokens per second over all ranks."""
        values = {"perf/tokens_per_sec": speed, "perf/step_ms": 1000 * step_seconds}
        if self.peak:
            values["perf/mfu"] = self.flops * speed / (self.peak * self.ranks.world_size)
        if self.plan.device.type == "cuda":
            values["perf/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        return values


def format_bar(name: str, loss: float | None = None, speed: float = 0.0) -> str:
    """The format of the progress bar, its parts in the order of their importance.

    Args:
        name: of the run.
        loss: the last training loss, nats per token; None before the first.
        speed: tokens per second.
    """
    parts = ["step {n_fmt}/{total_fmt}"]
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    parts.append("{remaining} left")
    if loss is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    name = name.replace("{", "{{").replace("}", "}}")
    return f"{', '.join(parts)}, {{elapsed}}, {name} |{{bar}}|"


def format_millions(count: int) -> str:
    """`125M`, and below 10 million `1.25M`."""
    decimals = 0 if count >= 1e7 else 2
    return f"{count / 1e6:.{decimals}f}M"


def describe_scores(values: dict[str, Any]) -> str:
    """Scores among the values of an evaluation: `sciq/acc 0.2500, sciq/bits_per_byte 1.4142`."""
    scores = []
    for name, value in values.items():
        if name.startswith("tasks/") and name.endswith(("/acc", "/bits_per_byte")):
            scores.append(f"{name.removeprefix('tasks/')} {value:.4f}")
    return ", ".join(scores)


def describe_plan(plan: Plan, ranks: Ranks, step: int, total: int, active: int) -> list[str]:
    """The header: model, machine and length of the run; memory; kernels; data; changed settings.

    Args:
        plan: the run's plan.
        ranks: this rank and the others.
        step: optimizer steps done.
        total: the model's parameters.
        active: the parameters that a token uses.
    """
    config = plan.config
    documents = plural(len(np.unique(plan.data.validation.documents)), "document")
    summary = (
        f"{config.model.router}, {total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active; "
        f"{describe_devices(plan.device, ranks)}, {config.train.dtype}; "
        f"{config.train.max_steps} steps of {plan.tokens_per_step:,} tokens, "
        f"{len(plan.data.validation.windows)} validation windows of {documents}"
    )
    if step:
        summary += f", from step {step}"
    if plan.branch:
        summary += f" of {plan.branch.trunk}"
    capacity = distributed.memory_bytes(plan.device)
    lines = [
        summary,
        f"memory: {memory.describe_memory(plan.config.train.parallel, plan.memory, capacity)}",
    ]
    lines += describe_experts(config, plan.device, plan.dtype)
    if plan.device.type == "cpu" and plan.dtype == torch.float16:
        lines.append(
            "warning: float16 on a CPU takes 8 to 30 times as long as float32 (--train.dtype=auto)"
        )
    if config.data.mix:
        sets = []
        epochs = plan.data.loader.count_epochs(config.train.max_steps)
        for (name, weight), epoch in zip(config.data.sets.items(), epochs, strict=True):
            sets.append(f"{name} {weight:.1%} ({epoch:.2g} epochs)")
        lines.append(f"data: {', '.join(sets)}")
    if plan.changes:
        lines.append(f"changed: {'; '.join(plan.changes)}")
    return lines


def describe_devices(device: torch.device, ranks: Ranks) -> str:
    """`8 x cuda`, `cuda:0`, or on a CPU `cpu, 4 threads`."""
    if ranks.world_size > 1:
        return f"{ranks.world_size} x {device.type}"
    if device.type == "cpu":
        return f"cpu, {plural(torch.get_num_threads(), 'thread')}"
    return str(device)


def describe_experts(config: Config, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The backend that runs on a GPU; none on a CPU, which has no choice."""
    if device.type != "cuda":
        return []
    backend = choose_backend(config.model.backend, device, dtype)
    problem = find_triton_problem(device, dtype) if backend == "torch" else ""
    return [f"experts by {backend}, since triton {problem}" if problem else f"experts by {backend}"]
