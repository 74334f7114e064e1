"""Train a GPT, dense or with experts, from a config file.

    python train.py config/125m.toml --model.router=softmax
    torchrun --nproc_per_node=8 train.py config/125m.toml
    python train.py --help        every key, its default and meaning

A run has a folder runs/<name>/: config.toml, metrics.jsonl, arrays/, checkpoints/. The same command
resumes from its last checkpoint; --fresh starts over in runs/<name>-2. Exit codes: 0 finished, 2 an
error, which is named, 75 asked to stop (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C) and saved: start it
again.
"""

import sys

from runtime.launch import check_command, launch, run_until_exit

# before torch is imported, which takes seconds: a typo or missing data is reported at once
if __name__ == "__main__":
    check_command(sys.argv[1:])

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice

import torch
from torch import Tensor

import configure
from balance import Stats, balance_loss
from configure.schema import Optim, Train
from data.loader import prefetch
from runtime import Stopped, distributed
from runtime.batches import micro_batches, seed_step
from runtime.cadence import Cadence
from runtime.checkpoint import Saver
from runtime.folder import RunFolder, path_of
from runtime.guard import Guard
from runtime.parallel import set_gradient_sync
from runtime.preflight import OpenTasks, Plan
from runtime.reporter import Reporter, SilentReporter
from runtime.signals import Stop
from runtime.state import TrainState
from runtime.statistics import Statistics
from runtime.validation import evaluate


def learning_rate(optim: Optim, max_steps: int, step: int) -> float:
    """Rate of optimizer step `step` (from 0).

    Linear warm-up to lr, then a cosine to lr · min_lr_ratio at max_steps; or, with schedule "wsd",
    lr until the decay, which goes to lr · min_lr_ratio at max_steps as 1 - p or 1 - √p (arXiv
    2405.18392) of its part p.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    start = optim.warmup_steps if optim.schedule == "cosine" else optim.decay_start(max_steps)
    progress = max(0, step - start) / max(1, max_steps - start)
    if optim.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        height = 1 - (progress if optim.decay == "linear" else math.sqrt(progress))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * height)


def step_loads(plan: Plan, state: TrainState, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Loads (L, E) of a whole step over all ranks, in a forward pass of its micro-batches without gradients.

    The loads of the step before would be free, but with them the balance loss chases loads that it
    has just moved, and does not balance a small model at a high rate (docs/LOG.md). Dropout draws
    the same numbers in the pass to come.
    """
    cuda = [plan.device] if plan.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda), plan.autocast:
        of_parts = [state.runner(x, y).stats.loads.sum(1) for x, y in parts]
    return distributed.sum_over_ranks(torch.stack(of_parts).sum(0))


def auxiliary_loss(
    train: Train, routing: Stats, loads: Tensor | None = None, n_hash_layer: int = 0
) -> Tensor:
    """Weighted balance loss and z-loss of a micro-batch, mean over layers: (), 0 if no layer has a router.

    Args:
        train: their weights and train.balance_loss_scope.
        routing: of the micro-batch.
        loads: (L, E) of the whole step, over all ranks, for scope "global". The loss is linear in
            the scores, so with loads that all micro-batches share it does not depend on how a step
            is cut up.
        n_hash_layer: the first of the L layers, where scores choose no experts: they have no
            balance loss.
    """
    loss = routing.z_loss.new_zeros(())
    if len(routing.loads) and train.balance_loss_coef:
        if train.balance_loss_scope != "sequence":
            loads = (routing.loads.sum(1) if loads is None else loads)[:, None]  # (L, 1, E)
        else:
            loads = routing.loads  # (L, B, E)
        loss = (
            loss
            + train.balance_loss_coef
            * balance_loss(routing.probability, loads)[n_hash_layer:].mean()
        )
    if len(routing.loads) and train.z_loss_coef:
        loss = loss + train.z_loss_coef * routing.z_loss.mean()
    return loss


def forward_backward(
    plan: Plan, state: TrainState, batches: Iterator[tuple[Tensor, Tensor]]
) -> tuple[Statistics, list[Tensor]]:
    """Add one step's gradients, times the loss scale, to those in place.

    Nothing waits for the device.

    Args:
        plan: the run's plan.
        state: model and loss scale.
        batches: this rank's micro-batches, (B, T) int64 inputs and targets; a step's number of them
            is taken.

    Returns:
        The step's statistics over all ranks, and the loss of each of this rank's micro-batches, (),
        nats per token.
    """
    train, count = plan.config.train, plan.accumulation
    stats, losses, scale = state.interval.new(state.n_bin), [], state.updates.scale
    parts = []
    for x, y in islice(batches, count):
        parts.append((x.to(plan.device, non_blocking=True), y.to(plan.device, non_blocking=True)))
    shared = train.balance_loss_coef and train.balance_loss_scope == "global" and len(stats.loads)
    with (
        state.model.cast_once(plan.dtype, state.optimizer.fresh_copies())
        if plan.shares_casts
        else nullcontext()
    ):
        loads = step_loads(plan, state, parts) if shared and count > 1 else None
        for micro, (x, y) in enumerate(parts):
            set_gradient_sync(state.runner, plan.parallel, last=micro == count - 1)
            with plan.autocast:
                _, loss, routing, _ = state.runner(x, y)
            if shared and count == 1:
                loads = distributed.sum_over_ranks(routing.loads.sum(1))
            aux_loss = auxiliary_loss(train, routing, loads, plan.config.model.n_hash_layer)
            ((loss + aux_loss) * scale / count).backward()
            losses.append(loss.detach())
            stats.add_micro_batch(loss, aux_loss, routing)
    distributed.sum_over_ranks(stats.vector)
    stats.to_step_means(train.batch_size / train.micro_batch_size)
    return stats, losses


def recompute(
    plan: Plan, state: TrainState, ranks: distributed.Ranks, step: int
) -> tuple[list[Tensor], float]:
    """Forward and backward pass of a step once more: this rank's losses, and the step's learning rate."""
    seed_step(plan.config.run.seed, step, ranks)
    _, losses = forward_backward(plan, state, micro_batches(plan, [step], ranks))
    return losses, learning_rate(plan.config.optim, plan.config.train.max_steps, step)


def train(
    config: configure.Config,
    stop: Stop | None = None,
    open_tasks: OpenTasks | None = None,
    notes: Iterable[str] = (),
) -> None:
    """Train the run that `config` describes, from its newest intact checkpoint on.

    Args:
        config: checked settings (`configure.load`).
        stop: its `asked` ends the run at a checkpoint; it may be set at any time, by any rank.
        open_tasks: `eval.in_loop.TaskScores`, which scores the model on eval.tasks; needed with
            those alone.
        notes: lines to print once nothing is left that could refuse the run.

    Raises:
        RunError: the run cannot start or continue.
        DataError: the data set cannot be used.
        Stopped: asked to stop; a checkpoint is saved.
    """
    stop = stop or Stop()
    if line := RunFolder(path_of(config)).describe_finished(config):
        return distributed.print_once(line)
    if config.train.deterministic:
        distributed.make_deterministic()
    plan = Plan(config, open_tasks)  # reads only; raises whatever is wrong with the input
    for note in notes:
        distributed.print_once(note)
    seed, max_steps = config.run.seed, config.train.max_steps

    with ExitStack() as stack:  # closes everything, the last first, on every path
        stack.enter_context(distributed.attention_kernels(plan.device, config.train.deterministic))
        ranks = stack.enter_context(
            distributed.process_group(plan.device, config.train.timeout_minutes)
        )
        agreed = f"train.parallel = {plan.parallel}, {plan.run.path.name} at step {plan.last_step}"
        distributed.check_agreement(agreed, ranks)
        with distributed.share_errors(ranks):
            stack.enter_context(plan.run.claim(ranks))
        state = stack.enter_context(TrainState(plan, ranks))
        with distributed.share_errors(ranks):
            report = stack.enter_context(
                Reporter(plan, state, ranks) if ranks.rank == 0 else SilentReporter()
            )
        saver = stack.enter_context(
            Saver(plan.run.checkpoints, ranks, plan.sharded, plan.config.train)
        )
        batches = prefetch(micro_batches(plan, range(state.step, max_steps), ranks))
        stack.callback(batches.close)
        cadence = Cadence(plan, state.step, ranks, stop)
        guard = Guard(plan, state, ranks, partial(recompute, plan, state, ranks))

        for step in range(state.step, max_steps + 1):  # `step` optimizer steps are done
            due = cadence.at(step)  # the ranks agree through their hosts: no device is waited for
            if due.evaluate or due.save:
                guard.check()  # waits for the device; no checkpoint of a run that is halted
            with report.pause():
                if due.evaluate:
                    values = evaluate(state, plan, step, ranks, stop)
                    if values is None:
                        due = cadence.at(step)  # some rank was asked to stop meanwhile
                    else:
                        report.log_evaluation(step, values)
                        guard.check_val_loss(step, values["val/loss"])
                if due.save:
                    report.sync()
                    saver.save(
                        step,
                        state.model,
                        state.optimizer,
                        state.tensors,
                        state.metadata | report.metadata,
                    )
                    cadence.note_save(step)
                saver.poll()
            if due.stop or step == max_steps:
                break

            seed_step(seed, step, ranks)  # dropout depends on nothing else
            lr = learning_rate(config.optim, max_steps, step)
            stats, _ = forward_backward(plan, state, batches)
            taken = state.updates.step(step, lr, stats.loss)  # decided on the device
            state.zero_grad()
            state.update_selection_bias(stats, taken)
            if state.average:
                state.average.update(taken)
            state.interval.vector += stats.vector[: len(state.interval.vector)]  # without margins
            report.count_step()
            if cadence.is_log_due(step + 1):
                counters = guard.check()  # waits for the device
                report.log_steps(
                    step + 1, lr, counters, state.interval.mean(), state.describe_routers()
                )
                state.interval.vector.zero_()

    if due.stop:
        raise Stopped(
            f"{plan.run}: asked to stop, saved at step {cadence.saved_step}. The same command resumes it"
        )
    distributed.print_once(f"{plan.run}: finished, {plan.run.describe_result(max_steps)}")


def find_scorer(config: configure.Config) -> OpenTasks | None:
    """Check eval.tasks and return what scores a model on them; None without tasks, so that eval is not imported."""
    if not config.eval.task_names:
        return None
    from eval.in_loop import TaskScores, check_run_tasks

    check_run_tasks(config)
    return TaskScores


def main(argv: list[str], stop: Stop | None = None) -> int:
    """Train from a command line. Returns the exit code."""

    def start(config: configure.Config, notes: list[str]) -> None:
        train(config, stop, find_scorer(config), notes)

    return launch(argv, start)


if __name__ == "__main__":
    run_until_exit(main)
