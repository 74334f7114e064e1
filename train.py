"""Train a GPT, dense or with experts, from a config file.

    python train.py config/125m.toml --model.router=softmax
    torchrun --nproc_per_node=8 train.py config/125m.toml
    python train.py --help        every key, its default and meaning

A run has a folder runs/<name>/: config.toml, metrics.jsonl, arrays/, checkpoints/. The same command
resumes from its last checkpoint; --fresh starts over in runs/<name>-2. Exit codes: 0 finished, 2 an
error, which is named, 75 asked to stop (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C) and saved: start it
again.
"""

import gc
import sys

gc.disable()  # imports make a million objects, and none is garbage

from runtime.launch import Stop, check_command, launch, protect_output, run_until_exit

# Importing torch needs seconds: a signal to stop is noted, and a typo or missing data reported,
# before.
STOP = Stop()
if __name__ == "__main__":
    protect_output()
    STOP.listen()
    check_command(sys.argv[1:])

import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import configure
from balance import Stats, balance_loss
from configure.schema import Optim, Train
from data.loader import prefetch
from runtime import Stopped, distributed
from runtime.batches import Batch, RankBatches, score, seed_step
from runtime.cadence import Cadence
from runtime.checkpoint import Saver
from runtime.distributed import Ranks
from runtime.folder import RunFolder, path_of
from runtime.parallel import set_gradient_sync
from runtime.preflight import InitialWeights, Plan, ScoreTasks, check_plan, plan_run
from runtime.reporter import Reporter, SilentReporter, describe_experts
from runtime.state import Statistics, TrainState, build_state
from runtime.updates import Guard
from runtime.validation import evaluate

# Collections pass over them, at the exit, too: importing this file takes 1.27 s of CPU in place of
# 2.22 (EPYC, 2026-11-29, medians of 7 in turn).
gc.freeze()
gc.enable()


def learning_rate(optim: Optim, max_steps: int, step: int) -> float:
    """Rate of optimizer step `step` (from 0).

    Linear warm-up to lr, then a cosine to lr · min_lr_ratio at max_steps; or, with schedule "wsd",
    lr until a linear decay to lr · min_lr_ratio at max_steps.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    start = optim.warmup_steps if optim.schedule == "cosine" else optim.decay_start(max_steps)
    progress = max(0, step - start) / max(1, max_steps - start)
    if optim.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        height = 1 - progress
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * height)


def describe_rate_change(plan: Plan, step: int) -> str:
    """One line if changed settings move the rate of the step after `step`, else ""."""
    old, new = plan.run.recorded, plan.config
    if old is None or (old.optim, old.train.max_steps) == (new.optim, new.train.max_steps):
        return ""
    rates = []
    for config in (old, new):
        rate = learning_rate(config.optim, config.train.max_steps, step)
        rates.append(f"{rate:.3g}")
    if rates[0] == rates[1]:
        return ""
    changes = "; ".join(plan.changes)
    return f"{changes}: the learning rate of step {step + 1:,} is {rates[1]} instead of {rates[0]}"


def count_step_loads(state: TrainState, micro_batches: list[Batch]) -> Tensor:
    """Loads (L, E) of a step over all ranks, from a forward pass without gradients.

    The loads of the previous step would be free, but with them the balance loss chases loads that
    it has just moved, and does not balance a small model at a high rate (docs/LOG-1.md). Dropout
    draws the same numbers in the training pass.
    """
    cuda = [state.compute.device] if state.compute.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda):
        loads = [state.forward(x, y).stats.loads.sum(1) for x, y in micro_batches]
    return distributed.sum_over_ranks(torch.stack(loads).sum(0))


def auxiliary_loss(
    train: Train, stats: Stats, step_loads: Tensor | None = None, n_hash_layer: int = 0
) -> Tensor:
    """Weighted balance loss and z-loss of a micro-batch, mean over layers: (); 0 without routers.

    Args:
        train: the weights of both losses, and train.balance_loss_scope.
        stats: of the micro-batch.
        step_loads: (L, E) of the whole step, over all ranks, for scope "global". The loss is linear
            in the scores, so with loads that all micro-batches share it does not depend on how a
            step is divided into micro-batches.
        n_hash_layer: first layers, which choose no experts by scores: they have no balance loss.
    """
    loss = stats.z_loss.new_zeros(())
    if len(stats.loads) == 0:
        return loss
    if train.balance_loss_coef:
        if train.balance_loss_scope == "sequence":
            loads = stats.loads  # (L, B, E)
        elif step_loads is not None:
            loads = step_loads[:, None]  # (L, 1, E)
        else:
            loads = stats.loads.sum(1, keepdim=True)  # (L, 1, E)
        by_layer = balance_loss(stats.probability, loads)[n_hash_layer:]
        loss = loss + train.balance_loss_coef * by_layer.mean()
    if train.z_loss_coef:
        loss = loss + train.z_loss_coef * stats.z_loss.mean()
    return loss


def needs_step_loads(state: TrainState, train: Train) -> bool:
    """Return True if the balance loss is computed from the loads of the whole step."""
    return bool(state.mixtures and train.balance_loss_coef and train.balance_loss_scope == "global")


def run_passes(
    state: TrainState, accumulation: int, train: Train, x: Tensor, y: Tensor, loads: Tensor | None
) -> Tensor:
    """Add a micro-batch's gradients, times the loss scale, to p.grad.

    Args:
        state: model and loss scale.
        accumulation: micro-batches of one rank in a step.
        train: settings of the auxiliary losses.
        x: (B, T) int64 inputs.
        y: (B, T) int64 targets.
        loads: (L, E) of the whole step, where `needs_step_loads` and the step has several
            micro-batches.

    Returns:
        Its part of the step's statistics.
    """
    out = state.forward(x, y)
    assert out.loss is not None, "there are targets"
    if needs_step_loads(state, train) and accumulation == 1:
        loads = distributed.sum_over_ranks(out.stats.loads.sum(1))
    aux_loss = auxiliary_loss(train, out.stats, loads, state.model.config.n_hash_layer)
    ((out.loss + aux_loss) * state.updates.scale / accumulation).backward()
    with torch.no_grad():
        return state.join(out.loss, aux_loss, out.stats)


def forward_backward(
    state: TrainState, batches: Iterator[Batch], accumulation: int, train: Train
) -> Statistics:
    """Add a step's gradients, times the loss scale, to p.grad. Nothing waits for the device.

    Args:
        state: model and loss scale.
        batches: this rank's micro-batches, (B, T) int64 inputs and targets; the step reads the next
            `accumulation`.
        accumulation: micro-batches of one rank in a step.
        train: settings of the auxiliary losses and the batch.

    Returns:
        The step's statistics over all ranks.
    """
    stats = state.interval.new(state.selection_bias.n_bin)
    device = state.compute.device
    micro_batches = []
    for x, y in islice(batches, accumulation):
        micro_batches.append((x.to(device, non_blocking=True), y.to(device, non_blocking=True)))
    passes = partial(run_passes, state, accumulation, train)
    state.graph.start_step()
    with state.half.in_passes():
        loads = None
        if needs_step_loads(state, train) and accumulation > 1:
            loads = count_step_loads(state, micro_batches)
        for number, (x, y) in enumerate(micro_batches):
            last = number == accumulation - 1
            set_gradient_sync(state.runner, state.compute.parallel, last)
            stats.vector += state.graph.run(passes, x, y, loads)
    distributed.sum_over_ranks(stats.vector)
    stats.to_step_means(train.batch_size / train.micro_batch_size)
    return stats


def recompute(
    state: TrainState, batches: RankBatches, config: configure.Config, step: int
) -> dict[str, list[Any]]:
    """Repeat a step (from 0) for a crash dump, which also reads the gradients that this leaves.

    Returns this rank's windows, and the loss of each, nats per token.
    """
    ranks = batches.ranks
    seed_step(config.run.seed, step, ranks)
    forward_backward(state, batches.read([step]), batches.accumulation, config.train)
    seed_step(config.run.seed, step, ranks)  # the same dropout
    losses = score(state.forward, batches.read([step]), ranks.device)
    assert losses is not None
    return {"windows": batches.locate(step), "losses": losses.tolist()}


def train(config: configure.Config, stop: Stop | None = None) -> None:
    """Train the run that `config` describes, from its newest intact checkpoint on.

    Args:
        config: checked settings (`configure.load`).
        stop: its `asked` ends the run at a checkpoint; it may be set at any time, by any rank.

    Raises:
        RunError: the run cannot start or continue.
        DataError: the data set cannot be used.
        Stopped: asked to stop; a checkpoint is saved.
    """
    stop = stop or Stop()
    finished = RunFolder(path_of(config)).describe_finished(config)
    if finished:
        return distributed.print_once(finished)
    if config.train.deterministic:
        distributed.make_deterministic()
    # reads only; raises every user error
    plan = plan_run(config, open_tasks, read_weights)
    config = plan.config
    with ExitStack() as stack:  # closes everything, the last first, on every path
        stop.check_launcher()
        session = open_session(plan, stop, stack)
        is_stopped = run_steps(plan, session, stop)
    if is_stopped:
        raise Stopped(
            f"{plan.run}: asked to stop, saved at step {session.cadence.saved_step}. The same "
            "command resumes it"
        )
    result = plan.run.describe_result(config.train.max_steps)
    distributed.print_once(f"{plan.run}: finished, {result}")


class Session(NamedTuple):
    """The parts of a run that is training, on one rank."""

    ranks: Ranks
    state: TrainState
    report: Reporter | SilentReporter
    saver: Saver
    batches: Iterator[Batch]  # this rank's micro-batches of all steps to come
    cadence: Cadence
    guard: Guard


def list_agreed(plan: Plan) -> dict[str, Any]:
    """What must be the same on all ranks; of the settings all but the names of folders."""
    config = plan.config
    agreed = {key: attrgetter(key)(config) for key in configure.KEYS if not key.endswith("dir")}
    agreed |= plan.data.identity
    agreed["step"] = plan.last_step
    agreed["kernels"] = ", ".join(describe_experts(config, plan.device, plan.dtype))
    agreed["torch"] = torch.__version__
    if config.train.parallel == "hsdp":
        agreed["ranks per node"] = distributed.local_size()
    return agreed


def open_session(plan: Plan, stop: Stop, stack: ExitStack) -> Session:
    """Join the other ranks, claim the run's folder, and build all that its steps need.

    Every rank calls it; `stack` closes what it opens. Raises RunError as `train`.
    """
    config = plan.config
    stack.enter_context(distributed.attention_kernels(plan.device, config.train.deterministic))
    ranks = stack.enter_context(
        distributed.process_group(plan.device, config.train.timeout_minutes)
    )
    distributed.check_agreement(list_agreed(plan), ranks)
    with distributed.share_errors(ranks):
        stack.enter_context(plan.run.claim(ranks))
        if ranks.rank == 0:
            check_plan(plan)
    plan.run.check_shared(ranks)
    state = stack.enter_context(build_state(plan, ranks))
    rate_change = describe_rate_change(plan, state.step)
    if rate_change:
        distributed.print_once(f"{plan.run}: {rate_change}")
    with distributed.share_errors(ranks):
        report = stack.enter_context(
            Reporter(plan, state, ranks) if ranks.rank == 0 else SilentReporter()
        )
    folder = plan.run.checkpoint_folder
    is_sharded = state.compute.sharded
    saver = stack.enter_context(Saver(folder, ranks, is_sharded, config.train, plan.run.identity))
    rank_batches = RankBatches(
        plan.data.loader, plan.accumulation, config.train.micro_batch_size, ranks
    )
    batches = prefetch(rank_batches.read(range(state.step, config.train.max_steps)))
    stack.callback(batches.close)
    evaluated = state.step in plan.evaluated_steps
    cadence = Cadence(config, state.step, evaluated, ranks, stop, saver)
    recompute_step = partial(recompute, state, rank_batches, config)
    guard = Guard(plan.run, state.model, state.updates, ranks, recompute_step)
    return Session(ranks, state, report, saver, batches, cadence, guard)


def run_steps(plan: Plan, session: Session, stop: Stop) -> bool:
    """Train, evaluate, log and save until the last step. Returns True if asked to stop before."""
    ranks, state, report, saver, batches, cadence, guard = session
    config = plan.config
    max_steps = config.train.max_steps
    step = state.step  # optimizer steps that are done
    while True:
        due = cadence.at(step)  # the ranks agree through their hosts, not through devices
        if due.evaluate or due.save:
            guard.check()  # waits for the device; a halted run saves no checkpoint
        with report.pause():
            if due.evaluate:
                values = evaluate(
                    state, step, plan.data.validation, plan.tasks, config, ranks, stop
                )
                if values is None:
                    due = cadence.at(step)  # some rank was asked to stop meanwhile
                else:
                    report.log_evaluation(step, values)
                    guard.check_val_loss(step, values["val/loss"])
            if due.save:
                report.sync()
                metadata = state.metadata | report.metadata
                saver.save(step, state.model, state.optimizer.state, state.tensors, metadata)
                cadence.note_save(step)
            saver.poll()
        if due.stop or step >= max_steps:
            return due.stop

        seed_step(config.run.seed, step, ranks)  # dropout depends on nothing else
        lr = learning_rate(config.optim, max_steps, step)
        stats = forward_backward(state, batches, plan.accumulation, config.train)
        taken = state.updates.step(step, lr, stats.loss)  # decided on the device
        state.zero_grad()
        state.selection_bias.update(stats.loads, stats.margins, taken)
        if state.average:
            state.average.update(taken, state.updates.counters.taken)
        state.interval.add_step(stats)
        report.count_step()
        step += 1
        if cadence.is_log_due(step):
            counters = guard.check()  # waits for the device
            routers = state.describe_routers()
            report.log_steps(step, lr, counters, state.interval.mean(), routers)
            state.interval.vector.zero_()


def open_tasks(config: configure.Config) -> ScoreTasks:
    """The scorer of eval.tasks. Without tasks eval is not imported."""
    from eval.in_loop import TaskScores

    return TaskScores(config)


def read_weights(config: configure.Config) -> InitialWeights:
    """The weights of train.init_from. Without it hf is not imported."""
    from hf.init_from import read_initial_weights

    return read_initial_weights(config)


def main(argv: list[str], stop: Stop | None = None) -> int:
    """Train from a command line. Returns the exit code."""
    return launch(argv, partial(train, stop=stop))


if __name__ == "__main__":
    run_until_exit(main, STOP)
