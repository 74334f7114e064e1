"""`scripts.bench scaling` and `save`: train.py on several numbers of ranks, and steps while a checkpoint is written."""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

import configure
from data.prepare import cores
from runtime import RunError, checkpoint, distributed
from runtime.metrics import read as read_metrics
from scripts.bench.step import build, training_step
from scripts.bench.tools import describe, synchronize


def bench_scaling(args, overrides):
    config = configure.load(args.config, overrides)
    device = distributed.pick_device(config.train.device)
    rates = {ranks: [] for ranks in args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            for ranks in args.ranks:
                settings = {
                    "run.dir": folder,
                    "run.name": f"{ranks}-{round_}",
                    "train.batch_size": ranks * config.train.micro_batch_size,
                    "train.max_steps": args.steps,
                    "optim.warmup_steps": 1,
                    "eval.interval": args.steps,
                    "eval.windows": max(args.ranks),
                    "log.interval": args.steps // 5,
                }
                launch = (
                    ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
                )
                command = [sys.executable, *launch, "train.py", args.config, *overrides]
                command += [f"--{key}={value}" for key, value in settings.items()]
                threads = {} if device.type == "cuda" else {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
                done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True)
                if done.returncode:
                    raise RunError(f"{ranks} ranks failed:\n{done.stderr[-2000:]}")
                lines = read_metrics(Path(folder, f"{ranks}-{round_}", "metrics.jsonl"))
                rates[ranks] += [line["perf/tokens_per_sec"] for line in lines if "perf/tokens_per_sec" in line][1:]
    print(f"{describe(device)}, {cores()} cores; {args.config} {' '.join(overrides)}".rstrip())
    print(f"medians of {args.rounds} runs of {args.steps} steps each, their first fifth left out")
    base = statistics.median(rates[args.ranks[0]]) / args.ranks[0]
    for ranks, values in rates.items():
        rate = statistics.median(values)
        print(f"{ranks:4} ranks {rate:12,.0f} tokens/s   efficiency {rate / ranks / base:.2f}")
    if device.type == "cpu":
        print("ranks on one CPU share its cores: this shows that it works, not how it scales")


def bench_save(args, overrides):
    config = configure.load(args.config, overrides)
    device = distributed.pick_device(config.train.device)
    dtype = distributed.pick_dtype(config.train.dtype, device)
    model, optimizer = build(config, device)
    step = training_step(model, optimizer, config, device, dtype, compile=config.train.compile)
    times = {"quiet": [], "saving": [], "pause": [], "whole save": []}

    def timed(name, function):
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        times[name].append(time.perf_counter() - begin)

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        saver = checkpoint.Saver(folder, distributed.Ranks(0, 1, device), sharded=False, keep=1, on_error="stop")
        for _ in range(2):
            step()
        for round_ in tqdm(range(args.rounds), desc="rounds", disable=None):
            begin = time.perf_counter()
            timed("pause", lambda round_=round_: saver.save(round_, model, optimizer, {}, {}))
            during = 0
            while not saver.pending.done():
                timed("saving", step)
                during += 1
            times["saving"][-1:] = []  # the save ended within it
            times["whole save"].append(time.perf_counter() - begin)
            for _ in range(max(3, during)):
                timed("quiet", step)
        saver.finish()
        files = Path(folder, f"step_{args.rounds - 1:08d}").iterdir()
        size = sum(path.stat().st_size for path in files)
    median = {name: statistics.median(values or [math.nan]) for name, values in times.items()}
    print(f"{describe(device)}, {str(dtype).removeprefix('torch.')}; {args.config} {' '.join(overrides)}".rstrip())
    print(f"medians of {args.rounds} saves of {size / 1e6:,.0f} MB each, and of the steps during and between them")
    print(f"training pauses for the copy      {median['pause'] * 1000:9.1f} ms")
    print(f"copied, written and hashed after  {median['whole save'] * 1000:9.1f} ms")
    print(f"a step while nothing is saved     {median['quiet'] * 1000:9.1f} ms")
    ratio = median["saving"] / median["quiet"]
    print(f"a step while a save is under way  {median['saving'] * 1000:9.1f} ms   ratio {ratio:.3f}")
