"""`scripts.bench train`: the same training run with several routers, as many steps of it as fit into a time."""

import gc
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from data.bins import check
from runtime import RunError, distributed
from runtime.memory import format_bytes
from scripts.bench.step import MFU, build, load_routers, shape_of, training_step, utilisation
from scripts.bench.tools import Report, time_once
from scripts.report.claims import differences, interval
from scripts.report.runs import Arm, load

EVALUATIONS = 8
SPARE = 0.85  # part of the time that is planned for
LEAST = 10  # steps


def bench_train(args, overrides):
    """Time a step of each router, reckon how many fit, and train one after the other with train.py: equal windows, seed
    and schedule. Each run stays in FOLDER/ROUTER, without its checkpoint, whatever becomes of the next."""
    began, folder = time.monotonic(), Path(args.folder)
    configs = load_routers(args, overrides)
    first = configs[args.routers[0]]
    check(Path(first.data.dir, first.data.name), first.model.vocab_size)
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder}: is not empty; name a new folder")
    device = distributed.pick_device(first.train.device)
    dtype = distributed.pick_dtype(first.train.dtype, device)
    columns = {"router": "<16", "steps": ",d", "M tokens": ",.1f", "val loss": ".4f", "minus first": "+.4f"}
    columns |= {"low": "+.4f", "high": "+.4f", "tokens/s": ",.0f", "MFU": ".1%", "imbalance": ".2f", "skipped": "d"}
    report = Report(args, overrides, device, f"{args.config}, {str(dtype).removeprefix('torch.')}", columns)
    times = {router: seconds_of_a_step(config, device, dtype) for router, config in configs.items()}
    left = args.seconds - (time.monotonic() - began)
    steps = int((SPARE * left - args.overhead * len(configs)) / sum(times.values()))
    words = ", ".join(f"{router} {seconds:.2f} s" for router, seconds in times.items())
    if steps < LEAST:
        raise RunError(
            f"fewer than {LEAST} steps of each fit into the {left:.0f} s left (a step: {words}; {args.overhead:g} s a "
            "run besides); give more --seconds, or name fewer --routers"
        )
    print(f"a step: {words}; {steps} steps of each fit into {left:.0f} s", flush=True)
    every = max(1, steps // EVALUATIONS)
    schedule = {"train.max_steps": steps, "optim.warmup_steps": steps // 10, "eval.interval": every}
    schedule |= {"train.checkpoint_interval": 0, "train.checkpoint_minutes": 0.0, "run.dir": str(folder)}
    runs = []
    for router in configs:
        settings = schedule | {"run.name": router, "model.router": router}
        words = [args.config, *overrides, *(f"--{key}={value}" for key, value in settings.items())]
        ended = train(folder, router, words)
        runs.append(load(folder / router))
        if runs[-1].evaluations:
            report.row([router, *figures(runs[-1], runs[0], device, dtype)])
        if not ended:
            raise KeyboardInterrupt
    print(f"minus first: val loss minus {args.routers[0]}'s at the last step, 95% interval over windows (one seed)")
    print(MFU)


def seconds_of_a_step(config, device, dtype):
    """Of one optimizer step: that of a micro-batch, times their number. An out-of-memory error is for the caller."""
    model, optimizer = build(config, device)
    step = training_step(model, optimizer, config, device, dtype, compile=config.train.compile)
    for _ in range(3):
        step()
    taken = statistics.median(time_once(step, device) for _ in range(5))
    del step, model, optimizer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return taken * config.train.batch_size / shape_of(config)[0]


def train(folder, router, arguments):
    """Run train.py; its words go to FOLDER/ROUTER.log. Returns whether it came to its end, which Ctrl-C and time limits
    keep it from. Raises RunError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    began, log = time.monotonic(), folder / f"{router}.log"
    checkpoints = folder / router / "checkpoints"
    try:
        with log.open("w") as file:
            code = subprocess.run([sys.executable, "train.py", *arguments], stdout=file, stderr=file).returncode
        size = sum(file.stat().st_size for file in checkpoints.rglob("*"))
    except KeyboardInterrupt:
        return False
    finally:
        shutil.rmtree(checkpoints, ignore_errors=True)
    if code:
        raise RunError(f"{router}: train.py ended with exit code {code}; {log} has its words")
    print(f"{router}: {time.monotonic() - began:.0f} s; its checkpoint of {format_bytes(size)} is removed", flush=True)
    return True


def figures(run, first, device, dtype):
    """The row of a finished run, but for its name."""
    end, config = max(run.evaluations), run.config
    found = interval([differences(*(Arm("", "", (), {0: one}) for one in (run, first)), end)])
    rates = [line["perf/tokens_per_sec"] for line in run.logs if "perf/tokens_per_sec" in line]
    rate = statistics.median(rates[1:] or rates)  # the first has the start in it
    ends = [found.mean, found.low, found.high] if run is not first else [None] * 3
    tokens = end * config.train.batch_size * config.model.block_size
    imbalance = run.evaluations[end].get("val/load_imbalance")
    skipped = int(run.logs[-1].get("optim/skipped_steps", 0))
    mfu = utilisation(config.model, rate, device, dtype)
    return [end, tokens / 1e6, run.loss(end), *ends, rate, mfu, imbalance, skipped]
