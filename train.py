"""Train a GPT, dense or with experts, from a config file.

    python train.py config/125m.toml --model.router=softmax
    torchrun --nproc_per_node=8 train.py config/125m.toml
    python train.py --help        every key, its default and meaning

A run lives in runs/<name>/: config.toml, metrics.jsonl, checkpoints/. Started again, it goes on from its last
checkpoint; --fresh starts over in runs/<name>-2. Exit codes: 0 finished, 2 an error, which is named, 75 asked to stop
(SIGTERM, SIGUSR1, Ctrl-C), saved, to be started again.
"""

import math
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import configure
from data import DataError
from data.bins import check, fingerprint, open_tokens
from data.loader import Loader, fixed_windows, prefetch, windows
from model import GPT, MoE, count_parameters, flops_per_token, parameter_shapes
from router import update_selection_bias
from runtime import RankError, RunError, Stopped, checkpoint, crash, distributed, initial, memory
from runtime import folder as run_folder
from runtime.metrics import Metrics, load_metrics
from runtime.parallel import distribute, full_tensor, set_gradient_sync, warm_up_ddp_buckets
from runtime.signals import EXIT_CODE, Stop
from runtime.tracker import start_wandb
from runtime.updates import BAD_LOSS, RUNNING, SPIKES, Updates


def learning_rate(optim, max_steps, step):
    """Rate of optimizer step `step` (from 0): linear warm-up to lr, then a cosine to lr · min_lr_ratio at max_steps."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, max_steps - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


def build_optimizer(model, optim):
    """AdamW; decay on matrices only, not on LayerNorms, biases and γ."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
    for p in params:  # now, not in the first step: float16 may skip that one, and a checkpoint holds the state
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return optimizer


def on_host(batch, device):
    """A batch as tensors from which a copy to `device` need not wait."""
    x, y = map(torch.from_numpy, batch)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread; without, pinning would open a context on GPU 0
        x, y = x.pin_memory(), y.pin_memory()
    return x, y


def micro_batches(loader, micro_batch, accumulation, steps, ranks):
    """This rank's part of each of `steps`, micro-batch after micro-batch. The rows that all ranks together take in a
    step are the same whatever their number."""
    for step in steps:
        for micro in range(accumulation):
            yield on_host(loader.batch(step, first_row(micro, micro_batch, ranks), micro_batch), ranks.device)


def first_row(micro, micro_batch, ranks):
    """Of this rank's micro-batch, among the rows of a step."""
    return (micro * ranks.world_size + ranks.rank) * micro_batch


@torch.no_grad()
def evaluate(model, tokens, indices, config, ranks, autocast, stop):
    """Cross-entropy (nats a token), also of each window, and expert loads over the validation windows `indices`, shared
    out among the ranks; None if any of them is asked to stop meanwhile."""
    model.eval()
    mine = indices[ranks.rank :: ranks.world_size]
    losses, loads = torch.zeros(len(indices), dtype=torch.float64, device=ranks.device), 0
    micro_batch = config.train.micro_batch_size
    # Under FSDP2 every rank must come to every forward pass: one without windows of its own takes any, and counts none.
    rounds = range(0, -(-len(indices) // ranks.world_size), micro_batch)
    counts = [len(mine[first : first + micro_batch]) for first in rounds]
    rows = (mine[first : first + micro_batch] if len(mine) > first else indices[:1] for first in rounds)
    batches = prefetch(on_host(windows(tokens, chosen, config.model.block_size), ranks.device) for chosen in rows)
    for first, count, (x, y) in zip(rounds, counts, batches, strict=True):
        x, y = x.to(ranks.device, non_blocking=True), y.to(ranks.device, non_blocking=True)
        with autocast():
            out = model(x, y)
        losses[ranks.rank :: ranks.world_size][first : first + count] = out.losses[:count]
        loads = loads + out.stats.loads * min(count, 1)
        if distributed.any_rank([stop.asked], ranks)[0]:
            model.train()
            return None
    model.train()
    losses, loads = distributed.sum_over_ranks(losses), distributed.sum_over_ranks(loads)
    values = {"val/loss": losses.mean(), "val/window_losses": losses}
    if len(loads):
        values |= {"val/loads": loads} | {f"val/{name}": value for name, value in load_metrics(loads).items()}
    return values


def accumulate(runner, batches, count, scale, config, autocast, device):
    """Add the gradients of `count` of this rank's micro-batches, times `scale`, to those in place.

    Returns (sums over the micro-batches and over all ranks, in the order of `sizes_of`, and each one's loss); nothing
    waits for the device.
    """
    sums, losses = 0, []
    for micro in range(count):
        x, y = (part.to(device, non_blocking=True) for part in next(batches))
        set_gradient_sync(runner, last=micro == count - 1)
        with autocast():
            _, loss, stats, _ = runner(x, y)
        aux_loss = torch.zeros((), device=device)
        if len(stats.loads) and config.train.balance_loss_coef:
            aux_loss = aux_loss + config.train.balance_loss_coef * stats.balance_loss.mean()
        if len(stats.loads) and config.train.z_loss_coef:
            aux_loss = aux_loss + config.train.z_loss_coef * stats.z_loss.mean()
        ((loss + aux_loss) * scale / count).backward()
        losses.append(loss.detach())
        with torch.no_grad():
            parts = (torch.ones_like(loss), loss, aux_loss, stats.entropy, stats.zero_gates, stats.loads)
            sums = sums + torch.cat([part.flatten().double() for part in parts])
    return distributed.sum_over_ranks(sums), losses


def sizes_of(model):
    """How many numbers of a step are summed: micro-batches, loss, auxiliary loss, entropy, zero gates, loads."""
    L = model.n_layer if model.router != "dense" else 0
    return 1, 1, 1, L, L, L * model.n_expert


def train(config, stop=None):
    """Train the run that `config` describes, from its last whole checkpoint on. `stop.asked` ends it at a checkpoint:
    raises Stopped. Raises RunError, DataError and ConfigError of what is wrong with the input or the run."""
    # Everything that can be wrong is checked here, before a process group, a GPU or a weight.
    stop = stop or Stop()
    folder = run_folder.path_of(config)
    changes = run_folder.changes(config)
    last = max(checkpoint.steps(folder / "checkpoints"), default=0)
    max_steps, batch_size, micro_batch = config.train.max_steps, config.train.batch_size, config.train.micro_batch_size
    if last and run_folder.is_finished(config, last):
        losses = run_folder.evaluated(folder)
        if os.environ.get("RANK", "0") == "0":
            val_loss = f", val loss {losses[max(losses)]:.4f}" if losses else ""
            print(f"{folder}: finished already, {last} steps{val_loss}")
        return
    data = Path(config.data.dir, config.data.name)
    identity = fingerprint(check(data, config.model.vocab_size))
    train_tokens, val_tokens = open_tokens(data, "train"), open_tokens(data, "val")
    loader = Loader(train_tokens, config.model.block_size, batch_size, config.run.seed)
    val_windows = fixed_windows(val_tokens, config.model.block_size, config.eval.windows)
    if config.train.deterministic:
        distributed.be_deterministic()
    device = distributed.pick_device(config.train.device)
    dtype = distributed.pick_dtype(config.train.dtype, device)
    parallel, needed = memory.choose_parallelism(
        config, parameter_shapes(config.model), dtype, distributed.world_size(), distributed.local_size(), device
    )
    weights = None if last else initial.read(config)  # to begin with

    ranks = distributed.start(device, config.train.timeout_minutes)
    distributed.agree(f"train.parallel = {parallel}, {folder.name} with checkpoints up to step {last}", ranks)
    first = ranks.rank == 0
    if first:
        run_folder.lock(folder)
        checkpoint.sweep(folder / "checkpoints")
    start, kept = checkpoint.latest(folder / "checkpoints", ranks)
    if start:
        check_identity(folder, start, kept, identity)
    facts = {**(kept or {}), **identity}

    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model = GPT(config.model)
    if weights:
        initial.fill(model, weights, ranks)
    for block in model.blocks:
        block.checkpointing = config.train.activation_checkpointing
    runner = distribute(model, parallel, ranks, dtype, config.train.compile)
    optimizer = build_optimizer(model, config.optim)
    updates = Updates(
        optimizer,
        device,
        scaled=dtype == torch.float16,
        grad_clip=config.optim.grad_clip,
        loss_spike=config.train.loss_spike,
        spike_sigma=config.train.spike_sigma,
        max_skipped_steps=config.train.max_skipped_steps,
    )
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)

    routers = [block.mlp.router for block in model.blocks if isinstance(block.mlp, MoE)]
    gammas = [router.gamma for router in routers if router.gamma is not None]
    L, E, sizes = len(routers), config.model.n_expert, sizes_of(config.model)
    interval = torch.zeros(sum(sizes), dtype=torch.float64, device=device)  # sums of the steps since the last log
    per_step = torch.ones_like(interval)  # all but loads are means of micro-batches, whose number may change
    per_step[: -L * E or None] /= batch_size / micro_batch
    kept_tensors = {"interval": interval, "updates": updates.numbers}  # by checkpoints, besides weights and moments
    saver = checkpoint.Saver(
        folder / "checkpoints",
        ranks,
        sharded=parallel != "ddp",
        keep=config.train.keep_checkpoints,
        on_error=config.train.on_save_error,
    )
    if start:
        checkpoint.load(folder / "checkpoints", start, model, optimizer, kept_tensors)
    with autocast():
        warm_up_ddp_buckets(runner, torch.zeros(micro_batch, config.model.block_size, dtype=torch.int64, device=device))
    optimizer.zero_grad(set_to_none=False)

    accumulation = batch_size // (micro_batch * ranks.world_size)
    batches = prefetch(micro_batches(loader, micro_batch, accumulation, range(start, max_steps), ranks))
    tokens_per_step = batch_size * config.model.block_size
    peak = distributed.peak_flops(device, dtype)
    flops = flops_per_token(config.model)
    seen = distributed.gather(start in run_folder.evaluated(folder) if start else False, ranks.control)[0]
    if first:
        run_folder.write_config(folder, config)
        total, active = count_parameters(config.model)
        where = f"{ranks.world_size} x {device.type}" if ranks.world_size > 1 else str(device)
        print(
            f"{folder}: {config.model.router}, {total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active; {where}, "
            f"{str(dtype).removeprefix('torch.')}; {max_steps} steps of {tokens_per_step:,} tokens, "
            f"{len(val_windows)} validation windows" + (f", from step {start}" if start else "")
        )
        print(f"{folder}: memory: {memory.describe(parallel, needed, distributed.memory_bytes(device))}")
        if changes:
            print(f"{folder}: changed: {'; '.join(changes)}")
        sizes_in_words = [f"{n / 1e6:.{0 if n >= 1e7 else 2}f}M" for n in (total, active)]
        tags = (config.model.router, config.data.name, sizes_in_words[0], f"{sizes_in_words[1]} active")
        tracker = start_wandb(config, folder, facts.get("wandb"), tags)
        facts |= {"wandb": tracker.id} if tracker else {}
        metrics = Metrics(folder, start if start else -1, tracker, config.train.on_save_error)
    bar = tqdm(
        total=max_steps,
        initial=start,
        desc=config.run.name,
        disable=not first,
        mininterval=0.3 if sys.stderr.isatty() else 10,
        bar_format="{desc}: step {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} left{postfix}",
    )

    def check_updates():
        """What became of the steps so far. Waits for the device, so not in every step. RunError if they are halted."""
        state = updates.read()
        at, why = int(state.step), "a loss spike" if state.halted == SPIKES else "gradients that are not finite"
        if state.halted == BAD_LOSS:  # weights, windows and dropout are those of that step still: compute it once more
            torch.manual_seed(hash((config.run.seed, at, ranks.rank)))
            again = micro_batches(loader, micro_batch, accumulation, [at], ranks)
            losses = accumulate(runner, again, accumulation, updates.scale, config, autocast, device)[1]
            for p in updates.parameters:
                p.grad /= state.scale
            rows = [first_row(micro, micro_batch, ranks) for micro in range(accumulation)]
            rate = learning_rate(config.optim, max_steps, at)
            facts = {"loss": state.loss, "loss_scale": state.scale, "learning_rate": rate}
            file = crash.dump(folder, at, facts, model, autocast, loader, rows, micro_batch, losses, ranks)
            raise RunError(
                f"{folder}: train loss {state.loss} in step {at + 1}, before its update: the weights are those of step "
                f"{at}. {file} has its windows and, computed once more, its losses and the norms of layers and "
                f"gradients. Start again under another run.name with a lower optim.lr, a longer optim.warmup_steps or "
                f"train.dtype = bfloat16"
            )
        if state.halted != RUNNING:
            raise RunError(
                f"{folder}: {state.skipped_in_row:.0f} steps in a row skipped, the last for {why} (step {at + 1}, loss "
                f"{state.loss:.4g}, loss scale {state.scale:g}). The weights are those before the first of them. Lower "
                f"optim.lr, lengthen optim.warmup_steps, or use train.dtype = bfloat16 or float32, under another "
                f"run.name"
            )
        return state

    spikes = updates.read().spikes  # that have been told of
    saved, saved_at = start, time.monotonic()
    clock, timed = time.perf_counter(), 0  # since then, so many steps
    for step in range(start, max_steps + 1):
        # `step` optimizer steps are done. Evaluate, save, and take the next.
        minutes = (time.monotonic() - saved_at) / 60
        late = first and 0 < config.train.checkpoint_minutes <= minutes  # by the clock of one rank
        asked, late = distributed.any_rank([stop.asked, late], ranks)
        every = config.train.checkpoint_interval
        evaluating = (step % config.eval.interval == 0 or step == max_steps) and not (step == start and seen)
        saving = step > saved and (asked or late or step == max_steps or (every and step % every == 0))
        if evaluating or saving:
            check_updates()  # waits for the steps under way, which is no pause
        paused = time.perf_counter()
        if evaluating and not asked:
            result = evaluate(runner, val_tokens, val_windows, config, ranks, autocast, stop)
            asked = result is None
            if first and not asked:
                metrics.log(step, step * tokens_per_step, **result)
                bar.write(f"{config.run.name}: step {step}, val loss {result['val/loss'].item():.4f}")
            if not asked and not result["val/loss"].isfinite():
                raise RunError(
                    f"{folder}: val loss {result['val/loss'].item()} at step {step}, the run has diverged. Start again "
                    f"under another run.name, with a lower optim.lr or a longer optim.warmup_steps"
                )
        if saving or (asked and step > saved):  # asked to, maybe, while it evaluated
            if first:
                metrics.sync()
            saver.save(step, model, optimizer, kept_tensors, facts)
            saved, saved_at = step, time.monotonic()
        saver.poll()
        clock += time.perf_counter() - paused
        if asked or step == max_steps:
            break

        torch.manual_seed(hash((config.run.seed, step, ranks.rank)))  # dropout, too, hangs on nothing else
        lr = learning_rate(config.optim, max_steps, step)
        sums, _ = accumulate(runner, batches, accumulation, updates.scale, config, autocast, device)
        sums *= per_step
        taken = updates.step(step, lr, sums[1])
        optimizer.zero_grad(set_to_none=not isinstance(runner, DistributedDataParallel))  # DDP's lie in its buckets
        if config.train.bias_update_rate:
            for router, load in zip(routers, sums.split(sizes)[-1].view(L, E), strict=True):
                update_selection_bias(router.selection_bias, load, config.train.bias_update_rate * taken)

        interval += sums
        timed += 1
        log = (step + 1) % config.log.interval == 0 or step + 1 == max_steps
        gamma = torch.cat([full_tensor(gamma.detach()) for gamma in gammas]) if log and gammas else None
        state = check_updates() if log else None
        if first and log:
            seconds = (time.perf_counter() - clock) / timed
            _, loss, aux_loss, entropy, zero_gates, loads = (interval / interval[0]).split(sizes)
            values = {"train/loss": loss[0], "train/aux_loss": aux_loss[0]}
            values |= {"optim/lr": lr, "optim/grad_norm": state.grad_norm, "optim/skipped_steps": int(state.skipped)}
            values |= {"optim/loss_scale": state.scale} if updates.scaled else {}
            values |= {"optim/loss_spikes": int(state.spikes)} if config.train.loss_spike != "off" else {}
            if routers:
                values |= {"router/entropy": entropy.mean(), "router/zero_gates": zero_gates.mean()}
                values |= {"router/entropy_of_layers": entropy, "router/loads": loads.view(L, E)}
                values |= {f"router/{name}": value for name, value in load_metrics(loads.view(L, E)).items()}
            values |= {} if gamma is None else {"router/gamma": gamma.mean(), "router/gamma_of_layers": gamma}
            values |= {"perf/tokens_per_sec": tokens_per_step / seconds, "perf/step_ms": 1000 * seconds}
            if peak:
                values["perf/mfu"] = flops * tokens_per_step / seconds / (peak * ranks.world_size)
            if device.type == "cuda":
                values["perf/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
            metrics.log(step + 1, (step + 1) * tokens_per_step, **values)
            bar.set_postfix_str(f"loss {loss.item():.4f}, {tokens_per_step / seconds:,.0f} tokens/s", refresh=False)
            if state.spikes > spikes:
                count = f"{state.spikes - spikes:.0f} spikes, the last: " if state.spikes > spikes + 1 else ""
                then = "skipped" if config.train.loss_spike == "skip" else "taken all the same"
                bar.write(
                    f"{config.run.name}: {count}step {state.spike_step + 1:.0f}, loss {state.spike_loss:.4f} is a "
                    f"spike over {state.spike_mean:.4f}: {then}"
                )
        if log:
            interval.zero_()
            spikes, timed, clock = state.spikes, 0, time.perf_counter()
        bar.update()

    saver.finish()
    bar.close()
    if first:
        metrics.close()
        run_folder.unlock(folder)
    runner = (
        None  # before the process group: DDP's destructor, were it the last owner, waits for gloo's threads for ever
    )
    distributed.stop()
    if asked:
        raise Stopped(f"{folder}: asked to stop, saved at step {saved}. Started again (without --fresh) it goes on")


def check_identity(folder, step, kept, identity):
    """Raises RunError if the checkpoint of `step`, which kept some facts, is of other data or of other code."""
    missing = [what for what in identity if what not in kept]
    if missing:
        path = checkpoint.folder_of(folder / "checkpoints", step)
        raise RunError(f"{path}: written by other code (no {missing[0]} in it). Use that, or start over (--fresh)")
    for what, now in identity.items():
        if kept[what] != now:
            raise RunError(
                f"{folder}: the {what} has changed since step {step}: sha256 {kept[what]} then, {now} now. Bring back "
                f"what the run was begun with (data.name, data.dir), or start over in a new folder (--fresh)"
            )


def main(argv, stop=None):
    rank = int(os.environ.get("RANK", 0))
    config = configure.from_command_line([word for word in argv if word != "--fresh"], distributed.world_size())
    try:
        train(run_folder.renamed(config) if "--fresh" in argv else config, stop)
    except Stopped as stopped:
        if rank == 0:
            print(stopped, flush=True)
        return EXIT_CODE
    except (RunError, DataError, configure.ConfigError, OSError) as error:
        if getattr(tqdm, "_instances", None):
            print(file=sys.stderr)  # after the progress bar
        of_node = isinstance(error, DataError) and (dist.is_initialized() or os.environ.get("LOCAL_RANK") == "0")
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        elif of_node or isinstance(error, OSError | RankError):  # others come to rank 0 alike
            print(f"error on rank {rank}: {error}", file=sys.stderr)
        return 2
    except Exception:
        if not dist.is_initialized():
            raise
        traceback.print_exc()  # most often a rank is lost; a save under way would wait for it for an hour
        sys.stdout.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Stop().listen()))
