"""Train a GPT, dense or with experts, from a config file.

    python train.py config/125m.toml --model.router=softmax
    torchrun --nproc_per_node=8 train.py config/125m.toml
    python train.py --help        every key, its default and meaning

A run lives in runs/<name>/: config.toml, metrics.jsonl, checkpoints/. Started again, it goes on from its last
checkpoint.
"""

import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import configure
from data import DataError
from data.bins import check, open_tokens
from data.loader import Loader, ahead, fixed_windows, windows
from model import GPT, MoE, count_parameters, flops_per_token, parameter_shapes
from router import update_selection_bias
from runtime import RunError, checkpoint, distributed, memory
from runtime.metrics import Metrics, load_metrics, read, start_wandb
from runtime.parallel import average_in, distribute, whole

# Keys that may differ from those the run was begun with: they change where and how it computes, not what.
MAY_CHANGE = ("log.", "run.dir", "data.dir") + tuple(
    f"train.{key}:"
    for key in ["parallel", "activation_checkpointing", "timeout_minutes", "micro_batch_size", "compile", "device"]
)
MIN_LOSS_SCALE = 1.0  # GradScaler halves its scale without end; at 0 it would write NaN weights


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
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


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
            rows = loader.batch(step, (micro * ranks.world_size + ranks.rank) * micro_batch, micro_batch)
            yield on_host(rows, ranks.device)


@torch.no_grad()
def evaluate(model, tokens, indices, config, ranks, autocast):
    """Cross-entropy (nats a token) and expert loads over the validation windows `indices`, shared out among the
    ranks."""
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
    model.train()
    loss, loads = distributed.sum_over_ranks(loss), distributed.sum_over_ranks(loads)
    return {"val/loss": loss / len(indices)} | {f"val/{name}": value for name, value in load_metrics(loads).items()}


def open_run(config):
    """(folder, step of its last checkpoint or 0). Raises RunError if the folder holds a run of another config."""
    folder = Path(config.run.dir, config.run.name)
    if (folder / "config.toml").exists():
        changed = configure.differences(configure.load(folder / "config.toml"), config)
        changed = [line for line in changed if not line.startswith(MAY_CHANGE)]
        if changed:
            raise RunError(
                f"{folder} holds a run with another config:\n  " + "\n  ".join(changed) + "\n"
                "Give this one another name (--run.name=NAME), or remove that folder"
            )
    return folder, max(checkpoint.steps(folder / "checkpoints"), default=0)


def train(config):
    # Everything that can be wrong is checked here, before a process group, a GPU or a weight.
    folder, start = open_run(config)
    max_steps, batch_size, micro_batch = config.train.max_steps, config.train.batch_size, config.train.micro_batch_size
    if start >= max_steps:
        losses = [line["val/loss"] for line in read(folder / "metrics.jsonl") if "val/loss" in line]
        if os.environ.get("RANK", "0") == "0":
            print(f"{folder}: finished already, {start} steps" + (f", val loss {losses[-1]:.4f}" if losses else ""))
        return
    data = Path(config.data.dir, config.data.name)
    check(data, config.model.vocab_size)
    train_tokens, val_tokens = open_tokens(data, "train"), open_tokens(data, "val")
    loader = Loader(train_tokens, config.model.block_size, batch_size, config.run.seed)
    val_windows = fixed_windows(val_tokens, config.model.block_size, config.eval.windows)
    device = distributed.pick_device(config.train.device)
    dtype = distributed.pick_dtype(config.train.dtype, device)
    parallel, needed = memory.settle(
        config, parameter_shapes(config.model), dtype, distributed.world_size(), distributed.local_size(), device
    )

    ranks = distributed.start(device, config.train.timeout_minutes)
    distributed.agree(f"train.parallel = {parallel}, going on from step {start}")
    first = ranks.rank == 0
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model = GPT(config.model)
    for block in model.blocks:
        block.checkpointing = config.train.activation_checkpointing
    runner = distribute(model, parallel, ranks, dtype, config.train.compile)
    optimizer = build_optimizer(model, config.optim)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if start:
        checkpoint.load(folder / "checkpoints", start, model, optimizer, scaler)

    routers = [block.mlp.router for block in model.blocks if isinstance(block.mlp, MoE)]
    gammas = [router.gamma for router in routers if router.gamma is not None]
    L, E = len(routers), config.model.n_expert
    sizes = (1, 1, L, L, L * E)  # of a step's sums: loss, auxiliary loss, entropy, zero gates, loads
    parameters = list(model.parameters())

    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
    accumulation = batch_size // (micro_batch * ranks.world_size)
    batches = ahead(micro_batches(loader, micro_batch, accumulation, range(start, max_steps), ranks))
    tokens_per_step = batch_size * config.model.block_size
    peak = distributed.peak_flops(device, dtype)
    flops = flops_per_token(config.model)
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.toml").exists():
            (folder / "config.tmp").write_text(configure.dumps(config))
            os.replace(folder / "config.tmp", folder / "config.toml")
        total, active = count_parameters(config.model)
        where = f"{ranks.world_size} x {device.type}" if ranks.world_size > 1 else str(device)
        print(
            f"{folder}: {config.model.router}, {total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active; {where}, "
            f"{str(dtype).removeprefix('torch.')}; {max_steps} steps of {tokens_per_step:,} tokens, "
            f"{len(val_windows)} validation windows" + (f", from step {start}" if start else "")
        )
        print(f"{folder}: memory: {memory.describe(parallel, needed, distributed.memory_bytes(device))}")
        tracker = start_wandb(config.log.wandb, config.log.project, config.run.name, folder, config.model_dump())
        metrics = Metrics(folder, start if start else -1, tracker)
    bar = tqdm(
        total=max_steps,
        initial=start,
        desc=config.run.name,
        disable=not first,
        mininterval=0.3 if sys.stderr.isatty() else 10,
        bar_format="{desc}: step {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} left{postfix}",
    )

    logged = read(folder / "metrics.jsonl") if start else []
    skipped = max((line.get("optim/skipped_steps", 0) for line in logged if line["step"] <= start), default=0)
    skipped_in_row = 0
    interval, clock = [], time.perf_counter()  # totals of the steps since the last logged one
    for step in range(start, max_steps + 1):
        # `step` optimizer steps are done. Evaluate, save, and take the next.
        if (step % config.eval.interval == 0 or step == max_steps) and (step > start or not start):
            paused = time.perf_counter()
            result = evaluate(runner, val_tokens, val_windows, config, ranks, autocast)
            if first:
                metrics.log(step, step * tokens_per_step, **result)
                bar.write(f"{config.run.name}: step {step}, val loss {result['val/loss'].item():.4f}")
            if not result["val/loss"].isfinite():
                raise RunError(
                    f"{folder}: val loss {result['val/loss'].item()} at step {step}, the run has diverged. Start again "
                    f"under another run.name, with a lower optim.lr or a longer optim.warmup_steps"
                )
            clock += time.perf_counter() - paused
        every = config.train.checkpoint_interval
        due = every and step % every == 0 and not skipped_in_row  # after a finite step alone
        if step > start and (step == max_steps or due):
            paused = time.perf_counter()
            checkpoint.save(folder / "checkpoints", step, model, optimizer, scaler, config.train.keep_checkpoints)
            clock += time.perf_counter() - paused
        if step == max_steps:
            break

        torch.manual_seed(hash((config.run.seed, step, ranks.rank)))  # dropout, too, hangs on nothing else
        lr = learning_rate(config.optim, max_steps, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        totals = 0  # of this step's micro-batches, see sizes
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
            with torch.no_grad():
                parts = (loss, aux_loss, stats.entropy, stats.zero_gates, stats.loads)
                totals = totals + torch.cat([part.flatten().double() for part in parts])
        distributed.sum_over_ranks(totals)

        scaler.unscale_(optimizer)
        grad_norm = whole(nn.utils.clip_grad_norm_(parameters, config.optim.grad_clip or math.inf))
        finite = bool(grad_norm.isfinite())  # the same on every rank: gradients are averaged over ranks already
        if finite:
            scaler.step(optimizer)
            skipped_in_row = 0
        else:
            skipped, skipped_in_row = skipped + 1, skipped_in_row + 1
        scaler.update()
        if not finite and scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
            scaler.update(MIN_LOSS_SCALE)
        optimizer.zero_grad(set_to_none=not isinstance(runner, DistributedDataParallel))  # DDP's lie in its buckets
        if skipped_in_row == config.train.max_skipped_steps:
            raise RunError(
                f"{folder}: {skipped_in_row} steps in a row had gradients that are not finite (step {step + 1}, loss "
                f"{totals[0].item() / accumulation / ranks.world_size:.4g}, loss scale {scaler.get_scale():g}). The "
                f"weights are those before the first of them. Lower optim.lr, lengthen optim.warmup_steps, or use "
                f"train.dtype = bfloat16 or float32, under another run.name"
            )
        if finite and config.train.bias_update_rate:
            for router, load in zip(routers, totals.split(sizes)[-1].view(L, E), strict=True):
                update_selection_bias(router.selection_bias, load, config.train.bias_update_rate)

        interval.append(totals)
        log = (step + 1) % config.log.interval == 0 or step + 1 == max_steps
        gamma = torch.cat([whole(gamma.detach()) for gamma in gammas]).mean() if log and gammas else None
        if first and log:
            seconds = (time.perf_counter() - clock) / len(interval)
            means = torch.stack(interval).mean(0) / (accumulation * ranks.world_size)  # per micro-batch
            loss, aux_loss, entropy, zero_gates, loads = means.split(sizes)
            values = {"train/loss": loss, "train/aux_loss": aux_loss}
            values |= {"optim/lr": lr, "optim/grad_norm": grad_norm, "optim/skipped_steps": skipped}
            values |= {"optim/loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}
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
            interval, clock = [], time.perf_counter()
        bar.update()

    bar.close()
    if first:
        metrics.close()
    del runner  # before the process group: DDP's destructor, were it the last owner, waits for gloo's threads for ever
    distributed.stop()


if __name__ == "__main__":
    config = configure.from_command_line(sys.argv[1:], distributed.world_size())
    try:
        train(config)
    except (RunError, DataError, configure.ConfigError, OSError) as error:
        rank = int(os.environ.get("RANK", 0))
        if rank == 0 or isinstance(error, OSError):  # other errors come to all ranks alike
            print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr)
        sys.exit(2)
