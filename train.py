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
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import configure
from data import DataError
from data.bins import check, fingerprint, open_tokens
from data.loader import Loader, ahead, fixed_windows, windows
from model import GPT, MoE, count_parameters, flops_per_token, parameter_shapes
from router import update_selection_bias
from runtime import RankError, RunError, Stopped, checkpoint, crash, distributed, memory
from runtime import folder as run_folder
from runtime.metrics import Metrics, load_metrics, start_wandb
from runtime.parallel import average_in, distribute, settle_buckets, whole
from runtime.signals import EXIT_CODE, Stop

MIN_LOSS_SCALE = 1.0  # GradScaler halves its scale without end; at 0 it would write NaN weights
SPIKE_WINDOW = 128  # losses that a spike is measured against, once there are half as many


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
    """Cross-entropy (nats a token) and expert loads over the validation windows `indices`, shared out among the ranks;
    None if any of them is asked to stop meanwhile."""
    model.eval()
    mine = indices[ranks.rank :: ranks.world_size]
    loss, loads = torch.zeros((), dtype=torch.float64, device=ranks.device), 0
    micro_batch = config.train.micro_batch_size
    # Under FSDP2 every rank must come to every forward pass: one without windows of its own takes any, and counts none.
    rounds = range(0, -(-len(indices) // ranks.world_size), micro_batch)
    counts = [len(mine[first : first + micro_batch]) for first in rounds]
    rows = (mine[first : first + micro_batch] if len(mine) > first else indices[:1] for first in rounds)
    batches = ahead(on_host(windows(tokens, chosen, config.model.block_size), ranks.device) for chosen in rows)
    for count, (x, y) in zip(counts, batches, strict=True):
        x, y = x.to(ranks.device, non_blocking=True), y.to(ranks.device, non_blocking=True)
        with autocast():
            out = model(x, y)
        loss += out.loss.double() * count
        loads = loads + out.stats.loads * min(count, 1)
        if distributed.any_rank([stop.asked], ranks)[0]:
            model.train()
            return None
    model.train()
    loss, loads = distributed.sum_over_ranks(loss), distributed.sum_over_ranks(loads)
    return {"val/loss": loss / len(indices)} | {f"val/{name}": value for name, value in load_metrics(loads).items()}


@dataclass
class Progress:
    """What a checkpoint keeps of the loop besides tensors."""

    in_interval: int = 0  # steps since the last logged one
    skipped: int = 0  # steps without an update
    skipped_in_row: int = 0
    spikes: int = 0
    losses: list[float] = field(default_factory=list)  # the last ones, that a spike is measured against


def is_spike(losses, loss, sigma):
    """Whether `loss` is more than `sigma` standard deviations above the mean of `losses`, the ones before it."""
    if len(losses) < SPIKE_WINDOW // 2:
        return False
    return loss > statistics.fmean(losses) + sigma * statistics.stdev(losses)


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
    parallel, needed = memory.settle(
        config, parameter_shapes(config.model), dtype, distributed.world_size(), distributed.local_size(), device
    )

    ranks = distributed.start(device, config.train.timeout_minutes)
    distributed.agree(f"train.parallel = {parallel}, {folder.name} with checkpoints up to step {last}", ranks)
    first = ranks.rank == 0
    if first:
        run_folder.lock(folder)
        checkpoint.sweep(folder / "checkpoints")
    start, kept = checkpoint.latest(folder / "checkpoints", ranks)
    done, scaling = resumed(folder, start, kept, identity) if start else (Progress(), {})

    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model = GPT(config.model)
    for block in model.blocks:
        block.checkpointing = config.train.activation_checkpointing
    runner = distribute(model, parallel, ranks, dtype, config.train.compile)
    optimizer = build_optimizer(model, config.optim)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)

    routers = [block.mlp.router for block in model.blocks if isinstance(block.mlp, MoE)]
    gammas = [router.gamma for router in routers if router.gamma is not None]
    L, E = len(routers), config.model.n_expert
    sizes = (1, 1, L, L, L * E)  # of a step's sums: loss, auxiliary loss, entropy, zero gates, loads
    interval = torch.zeros(sum(sizes), dtype=torch.float64, device=device)  # sums of the steps since the last log
    per_step = torch.ones_like(interval)  # all but loads are means of micro-batches, whose number may change
    per_step[: -L * E or None] /= batch_size / micro_batch
    parameters = list(model.parameters())
    saver = checkpoint.Saver(
        folder / "checkpoints",
        ranks,
        sharded=parallel != "ddp",
        keep=config.train.keep_checkpoints,
        on_error=config.train.on_save_error,
    )
    if start:
        checkpoint.load(folder / "checkpoints", start, model, optimizer, {"interval": interval})
        scaler.load_state_dict(scaling)
    with autocast():
        settle_buckets(runner, torch.zeros(micro_batch, config.model.block_size, dtype=torch.int64, device=device))
    optimizer.zero_grad(set_to_none=False)

    accumulation = batch_size // (micro_batch * ranks.world_size)
    batches = ahead(micro_batches(loader, micro_batch, accumulation, range(start, max_steps), ranks))
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
        tracker = start_wandb(config.log.wandb, config.log.project, config.run.name, folder, config.model_dump())
        metrics = Metrics(folder, start if start else -1, tracker, config.train.on_save_error)
    bar = tqdm(
        total=max_steps,
        initial=start,
        desc=config.run.name,
        disable=not first,
        mininterval=0.3 if sys.stderr.isatty() else 10,
        bar_format="{desc}: step {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} left{postfix}",
    )

    saved, saved_at = start, time.monotonic()
    clock, timed = time.perf_counter(), 0  # since then, so many steps
    for step in range(start, max_steps + 1):
        # `step` optimizer steps are done. Evaluate, save, and take the next.
        minutes = (time.monotonic() - saved_at) / 60
        late = first and 0 < config.train.checkpoint_minutes <= minutes  # by the clock of one rank
        asked, late = distributed.any_rank([stop.asked, late], ranks)
        paused = time.perf_counter()
        if not asked and (step % config.eval.interval == 0 or step == max_steps) and not (step == start and seen):
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
        every = config.train.checkpoint_interval
        if step > saved and (asked or late or step == max_steps or (every and step % every == 0)):
            if first:
                metrics.sync()
            facts = {"progress": asdict(done), "scaler": scaler.state_dict(), **identity}
            saver.save(step, model, optimizer, {"interval": interval}, facts)
            saved, saved_at = step, time.monotonic()
        saver.poll()
        clock += time.perf_counter() - paused
        if asked or step == max_steps:
            break

        torch.manual_seed(hash((config.run.seed, step, ranks.rank)))  # dropout, too, hangs on nothing else
        lr = learning_rate(config.optim, max_steps, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        totals, losses = 0, []  # of this step's micro-batches, see sizes
        for micro in range(accumulation):
            x, y = (part.to(device, non_blocking=True) for part in next(batches))
            average_in(runner, last=micro == accumulation - 1)
            with autocast():
                loss, stats = runner(x, y)[1:]
            aux_loss = torch.zeros((), device=device)
            if routers and config.train.balance_loss_coef:
                aux_loss = aux_loss + config.train.balance_loss_coef * stats.balance_loss.mean()
            if routers and config.train.z_loss_coef:
                aux_loss = aux_loss + config.train.z_loss_coef * stats.z_loss.mean()
            scaler.scale((loss + aux_loss) / accumulation).backward()
            losses.append(loss.detach())
            with torch.no_grad():
                parts = (loss, aux_loss, stats.entropy, stats.zero_gates, stats.loads)
                totals = totals + torch.cat([part.flatten().double() for part in parts])
        distributed.sum_over_ranks(totals)
        mean_loss = totals[0] * per_step[0]

        # The same on every rank from here on: losses are summed, gradients averaged over ranks already.
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        grad_norm = whole(norm)
        loss_is_finite, take = torch.stack([mean_loss.isfinite(), grad_norm.isfinite()]).tolist()
        if not loss_is_finite:
            rows = [first_row(micro, micro_batch, ranks) for micro in range(accumulation)]
            scale = {"loss": mean_loss.item(), "loss_scale": scaler.get_scale(), "learning_rate": lr}
            file = crash.dump(folder, step, scale, model, autocast, loader, rows, micro_batch, losses, ranks)
            raise RunError(
                f"{folder}: train loss {mean_loss.item()} in step {step + 1}, before its update: the weights are those "
                f"of step {step}. {file} has its windows and the norms of layers and gradients. Start again under "
                f"another run.name with a lower optim.lr, a longer optim.warmup_steps or train.dtype = bfloat16"
            )
        why = "" if take else "gradients that are not finite"
        if take and config.train.loss_spike != "off":
            now = mean_loss.item()
            if is_spike(done.losses, now, config.train.spike_sigma):
                done.spikes += 1
                why = "a loss spike" if config.train.loss_spike == "skip" else ""
                if first:
                    mean, then = statistics.fmean(done.losses), "skipped" if why else "taken all the same"
                    bar.write(f"{config.run.name}: step {step + 1}, loss {now:.4f} is a spike over {mean:.4f}: {then}")
            if not why:
                done.losses = [*done.losses, now][-SPIKE_WINDOW:]
        if why:
            done.skipped, done.skipped_in_row = done.skipped + 1, done.skipped_in_row + 1
        else:
            nn.utils.clip_grads_with_norm_(parameters, config.optim.grad_clip or math.inf, norm)
            scaler.step(optimizer)
            done.skipped_in_row = 0
        scaler.update()
        if not take and scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
            scaler.update(MIN_LOSS_SCALE)
        optimizer.zero_grad(set_to_none=not isinstance(runner, DistributedDataParallel))  # DDP's lie in its buckets
        if done.skipped_in_row == config.train.max_skipped_steps:
            raise RunError(
                f"{folder}: {done.skipped_in_row} steps in a row skipped, the last for {why} (step {step + 1}, loss "
                f"{mean_loss.item():.4g}, loss scale {scaler.get_scale():g}). The weights are those before the first "
                f"of them. Lower optim.lr, lengthen optim.warmup_steps, or use train.dtype = bfloat16 or float32, "
                f"under another run.name"
            )
        if not why and config.train.bias_update_rate:
            for router, load in zip(routers, totals.split(sizes)[-1].view(L, E), strict=True):
                update_selection_bias(router.selection_bias, load, config.train.bias_update_rate)

        interval += totals * per_step
        done.in_interval, timed = done.in_interval + 1, timed + 1
        log = (step + 1) % config.log.interval == 0 or step + 1 == max_steps
        gamma = torch.cat([whole(gamma.detach()) for gamma in gammas]).mean() if log and gammas else None
        if first and log:
            seconds = (time.perf_counter() - clock) / timed
            loss, aux_loss, entropy, zero_gates, loads = (interval / done.in_interval).split(sizes)
            values = {"train/loss": loss, "train/aux_loss": aux_loss}
            values |= {"optim/lr": lr, "optim/grad_norm": grad_norm, "optim/skipped_steps": done.skipped}
            values |= {"optim/loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}
            values |= {"optim/loss_spikes": done.spikes} if config.train.loss_spike != "off" else {}
            if routers:
                values |= {"router/entropy": entropy.mean(), "router/zero_gates": zero_gates.mean()}
                values |= {f"router/{name}": value for name, value in load_metrics(loads.view(L, E)).items()}
            values |= {} if gamma is None else {"router/gamma": gamma}
            values |= {"perf/tokens_per_sec": tokens_per_step / seconds, "perf/step_ms": 1000 * seconds}
            if peak:
                values["perf/mfu"] = flops * tokens_per_step / seconds / (peak * ranks.world_size)
            if device.type == "cuda":
                values["perf/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
            metrics.log(step + 1, (step + 1) * tokens_per_step, **values)
            bar.set_postfix_str(f"loss {loss.item():.4f}, {tokens_per_step / seconds:,.0f} tokens/s", refresh=False)
        if log:
            interval.zero_()
            done.in_interval, timed, clock = 0, 0, time.perf_counter()
        bar.update()

    saver.finish()
    bar.close()
    if first:
        metrics.close()
        run_folder.unlock(folder)
    del runner  # before the process group: DDP's destructor, were it the last owner, waits for gloo's threads for ever
    distributed.stop()
    if asked:
        raise Stopped(f"{folder}: asked to stop, saved at step {saved}. Started again (without --fresh) it goes on")


def resumed(folder, step, kept, identity):
    """(Progress, GradScaler's state) out of the facts that a checkpoint kept. Raises RunError if they are of other data
    or of other code."""
    try:
        then = {what: kept[what] for what in identity}
        done, scaling = Progress(**kept["progress"]), dict(kept["scaler"])
    except (KeyError, TypeError, ValueError) as error:
        path = checkpoint.folder_of(folder / "checkpoints", step)
        raise RunError(f"{path}: written by other code ({error}). Use that, or start over (--fresh)") from error
    for what, now in identity.items():
        if then[what] != now:
            raise RunError(
                f"{folder}: the {what} has changed since step {step}: sha256 {then[what]} then, {now} now. Bring back "
                f"what the run was begun with (data.name, data.dir), or start over in a new folder (--fresh)"
            )
    return done, scaling


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
