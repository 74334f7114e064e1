"""`scripts.bench scaling`: train.py itself on several numbers of ranks."""

import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import configure
from data.prepare import cores
from runtime import RunError, distributed
from runtime.metrics import read_metrics
from scripts.bench.harness import Benchmark


def bench_scaling(args: Namespace, overrides: list[str]) -> None:
    """Train for --steps on each number of --ranks, with one micro-batch per rank and step."""
    config = configure.load(args.config, overrides)
    device = distributed.pick_device(config.train.device)
    words = " ".join([args.config, *overrides])
    notes = [f"medians of runs of {args.steps} steps, without the first fifth; efficiency: tokens/s per rank, relative"]
    if device.type == "cpu":
        notes.append("ranks on one CPU share its cores: this shows that it works, not how it scales")
    bench = Benchmark(args, device, f"{words}, {cores()} cores", *notes)
    rates = {ranks: [] for ranks in args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for ranks in args.ranks:
                name = f"{ranks}-{turn}"
                batch, interval = ranks * config.train.micro_batch_size, args.steps // 5
                settings = [f"--run.dir={folder}", f"--run.name={name}", f"--train.max_steps={args.steps}"]
                settings += [f"--train.batch_size={batch}", f"--log.interval={interval}", "--optim.warmup_steps=1"]
                settings += [f"--eval.interval={args.steps}", f"--eval.windows={max(args.ranks)}"]
                torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
                command = [sys.executable, *(torchrun if ranks > 1 else []), "train.py", args.config]
                command += [*overrides, *settings]
                threads = {} if device.type == "cuda" else {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
                done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True)
                if done.returncode:
                    raise RunError(f"{ranks} ranks failed:\n{done.stderr[-2000:]}")
                lines = read_metrics(Path(folder, name, "metrics.jsonl"))
                rates[ranks] += [line["perf/tokens_per_sec"] for line in lines if "perf/tokens_per_sec" in line][1:]
    median = {ranks: statistics.median(values) for ranks, values in rates.items()}
    base = median[args.ranks[0]] / args.ranks[0]
    bench.add_table(
        ["ranks", "tokens/s", "efficiency"], [[ranks, rate, rate / ranks / base] for ranks, rate in median.items()]
    )
