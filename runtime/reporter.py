"""What rank 0 reports of a run: the header, the progress bar, lines of metrics.

Other ranks have a silent reporter.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.progress import progress_bar
from common.text import plural
from kernels import choose_backend, find_triton_problem
from model import count_parameters, flops_per_token
from runtime import RunError, distributed, memory
from runtime.distributed import Ranks
from runtime.metrics import Metrics, gate_metrics, load_metrics
from runtime.preflight import Plan
from runtime.state import TrainState
from runtime.statistics import Statistics
from runtime.tracker import WandbTracker, start_trackers
from runtime.updates import Counters

BAR = "{desc}: step {n_fmt}/{total_fmt} |{bar}| {elapsed}, {remaining} left{postfix}"


class SilentReporter(AbstractContextManager["SilentReporter"]):
    """In place of a Reporter on ranks other than 0: the same methods, nothing said."""

    metadata: dict[str, Any] = {}
    pause = nullcontext

    def ignore(self, *_: object) -> None:
        """In place of every method that reports."""

    __exit__ = log_evaluation = log_steps = count_step = sync = ignore


class Reporter(AbstractContextManager["Reporter"]):
    """Writes config.toml, the metrics with wandb and TensorBoard, the header to stdout and a progress bar to stderr.

    Attributes:
        metadata: what a checkpoint records of it: the id of its wandb run.
    """

    def __init__(self, plan: Plan, state: TrainState, ranks: Ranks) -> None:
        """Print the header and open everything.

        Raises RunError if metrics.jsonl cannot be written.
        """
        config, self.plan, self.ranks = plan.config, plan, ranks
        plan.run.write_config(config)
        if plan.branch:
            plan.branch.copy_metrics(plan.run.path)
        self.flops = flops_per_token(config.model)
        self.peak = distributed.peak_flops(plan.device, plan.dtype)
        self.spikes = state.updates.read().spikes  # already reported
        parameters = count_parameters(config.model)
        _print_header(plan, ranks, state.step, *parameters)
        sizes = [f"{n / 1e6:.{0 if n >= 1e7 else 2}f}M" for n in parameters]
        tags = (config.model.router, *config.data.sets, sizes[0], f"{sizes[1]} active")
        resume_step = state.step or -1
        trackers = start_trackers(
            config, plan.run.path, resume_step, state.metadata.get("wandb"), tags
        )
        ids = [tracker.id for tracker in trackers if isinstance(tracker, WandbTracker)]
        self.metadata = {"wandb": ids[0]} if ids else {}
        self.metrics = Metrics(plan.run.path, resume_step, trackers, config.train.on_save_error)
        total = config.train.max_steps
        self.bar = progress_bar(
            every=10, desc=config.run.name, initial=state.step, total=total, bar_format=BAR
        )
        # when the steps of this interval began; None before the first
        self.clock: float | None = None
        self.steps_timed = 0

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.bar.close()
        # the error under way is the one to be raised
        with suppress(RunError) if error else nullcontext():
            self.metrics.close(failed=error is not None)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is done within is no part of the steps' time."""
        start = time.perf_counter()
        yield
        self.clock = (self.clock or start) + time.perf_counter() - start

    def count_step(self) -> None:
        self.steps_timed += 1
        self.bar.update()

    def sync(self) -> None:
        """Make the lines so far survive a power failure.

        Comes before a checkpoint, whose steps are not repeated.
        """
        self.metrics.sync()

    def log_evaluation(self, step: int, values: dict[str, Any]) -> None:
        """A line of validation metrics (`validation.evaluate`) after `step` steps."""
        values = values | {"val/window_documents": self.plan.validation.documents}
        self.metrics.log(step, step * self.plan.tokens_per_step, **values)
        text = f"val loss {values['val/loss'].item():.4f}"
        if mix := self.plan.config.data.mix:
            losses = [f"{name} {values[f'val/{name}/loss'].item():.4f}" for name in mix]
            text += f" ({', '.join(losses)})"
        if "val_ema/loss" in values:
            text += f", EMA {values['val_ema/loss'].item():.4f}"
        for line in (text, describe_scores(values)):
            if line:
                self.bar.write(f"{self.plan.config.run.name}: step {step}, {line}")

    def log_steps(
        self, step: int, lr: float, counters: Counters, mean: Statistics, routers: dict[str, Tensor]
    ) -> None:
        """A line of training metrics after `step` steps; the device is idle, since `counters` were just read from it.

        `lr` is the rate of the last step, `mean` the mean over the steps since the last line, and
        `routers` are `TrainState.describe_routers`.
        """
        assert self.clock is not None  # every step comes after a pause
        seconds = (time.perf_counter() - self.clock) / self.steps_timed
        tokens = self.plan.tokens_per_step
        values = {"train/loss": mean.loss, "train/aux_loss": mean.aux_loss, "optim/lr": lr}
        values |= {
            "optim/grad_norm": counters.grad_norm,
            "optim/skipped_steps": int(counters.skipped),
        }
        if self.plan.dtype == torch.float16:
            values["optim/loss_scale"] = counters.scale
        if self.plan.config.train.loss_spike != "off":
            values["optim/loss_spikes"] = int(counters.spikes)
        if len(mean.loads):  # no rows for a dense model
            values |= {
                "router/entropy": mean.entropy.mean(),
                "router/entropy_of_layers": mean.entropy,
            }
            values |= {"router/loads": mean.loads}
            summaries = load_metrics(mean.loads) | gate_metrics(
                mean.zero_gates, mean.gate_square, mean.gate_sum
            )
            values |= {f"router/{name}": value for name, value in summaries.items()}
        for name, of_layers in routers.items():
            values |= {f"router/{name}": of_layers.mean(), f"router/{name}_of_layers": of_layers}
        values |= {"perf/tokens_per_sec": tokens / seconds, "perf/step_ms": 1000 * seconds}
        if self.peak:
            values["perf/mfu"] = self.flops * tokens / seconds / (self.peak * self.ranks.world_size)
        if self.plan.device.type == "cuda":
            values["perf/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        self.metrics.log(step, step * tokens, **values)
        self.bar.set_postfix_str(
            f"loss {mean.loss.item():.4f}, {tokens / seconds:,.0f} tokens/s", refresh=False
        )
        self._report_spikes(counters)
        self.clock, self.steps_timed = time.perf_counter(), 0

    def _report_spikes(self, counters: Counters) -> None:
        new, self.spikes = counters.spikes - self.spikes, counters.spikes
        if not new:
            return
        count = f"{new:.0f} spikes, the last: " if new > 1 else ""
        outcome = "skipped" if self.plan.config.train.loss_spike == "skip" else "taken all the same"
        self.bar.write(
            f"{self.plan.config.run.name}: {count}step {counters.spike_step + 1:.0f}, loss {counters.spike_loss:.4f} "
            f"is a spike over {counters.spike_mean:.4f}: {outcome}"
        )


def describe_scores(values: dict[str, Any]) -> str:
    """Accuracies and bits per byte among the values of an evaluation: `sciq acc 0.2500, 1.4142 bits/byte; …`."""
    tasks: dict[str, list[str]] = {}
    for name, value in values.items():
        _, task, metric = [*name.split("/", 2), "", ""][:3]
        if name.startswith("tasks/") and metric in ("acc", "bits_per_byte"):
            tasks.setdefault(task, []).append(
                f"acc {value:.4f}" if metric == "acc" else f"{value:.4f} bits/byte"
            )
    return "; ".join(f"{task} {', '.join(scores)}" for task, scores in tasks.items())


def _print_header(plan: Plan, ranks: Ranks, step: int, total: int, active: int) -> None:
    """A few lines: the model, the machine, the length of the run; the memory; the sets; what has changed."""
    config = plan.config
    devices = (
        f"{ranks.world_size} x {plan.device.type}" if ranks.world_size > 1 else str(plan.device)
    )
    if devices == "cpu":
        devices += f", {plural(torch.get_num_threads(), 'thread')}"
    print(
        f"{plan.run}: {config.model.router}, {total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active; {devices}, "
        f"{str(plan.dtype).removeprefix('torch.')}; {config.train.max_steps} steps of {plan.tokens_per_step:,} tokens, "
        f"{len(plan.validation.windows)} validation windows of "
        f"{plural(len(np.unique(plan.validation.documents)), 'document')}"
        + (f", from step {step}" if step else "")
        + (f" of {plan.branch.trunk}" if plan.branch else "")
    )
    capacity = distributed.memory_bytes(plan.device)
    print(f"{plan.run}: memory: {memory.describe_memory(plan.parallel, plan.memory, capacity)}")
    if plan.device.type == "cuda":
        experts = choose_backend(config.model.backend, plan.device, plan.dtype)
        problem = find_triton_problem(plan.device, plan.dtype) if experts == "torch" else ""
        print(f"{plan.run}: experts by {experts}{problem and f', since triton {problem}'}")
    if plan.device.type == "cuda" and plan.document_token is None:
        kernel = distributed.name_attention_kernel(config.model, plan.device, plan.dtype)
        print(
            f"{plan.run}: attention by {kernel}{', deterministic' if config.train.deterministic else ''}"
        )
    if plan.device.type == "cpu" and plan.dtype == torch.float16:
        print(
            f"{plan.run}: warning: float16 on a CPU takes 8 to 30 times as long as float32 (--train.dtype=auto)"
        )
    if config.data.mix:
        parts = zip(
            config.data.sets.items(), plan.loader.count_epochs(config.train.max_steps), strict=True
        )
        text = ", ".join(f"{name} {part:.1%} ({epoch:.2g} epochs)" for (name, part), epoch in parts)
        print(f"{plan.run}: data: {text}")
    if plan.changes:
        print(f"{plan.run}: changed: {'; '.join(plan.changes)}")
