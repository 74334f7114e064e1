"""`scripts.bench data`: the loader of training batches, from one set and from mixtures."""

import tempfile
from argparse import Namespace
from itertools import count
from pathlib import Path

import numpy as np
import torch

import configure
from common.text import plural
from data.bins import Tokens
from data.loader import Loader
from scripts.bench.harness import Benchmark

TOKENS = 2**27  # 256 MiB in all, so that they stay in the page cache
ROWS = 4096  # a call reads


def bench_data(args: Namespace, overrides: list[str]) -> None:
    """The loader alone: tokens/s of micro-batches from one set and from mixtures of as many random tokens in all."""
    config = configure.load(args.config, [*overrides, "--model.router=dense", "--run.seed=0"])
    size, length = config.train.micro_batch_size, config.model.block_size
    batches = -(-ROWS // size)
    title = f"micro-batches of {size} windows of {length} tokens, {TOKENS / 1e6:.0f} M tokens on disk"
    notes = "ratio: tokens/s over the first row's", "document masks cost the loader nothing: `step` has them"
    bench = Benchmark(args, torch.device("cpu"), title, *notes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokens.bin")
        np.random.default_rng(0).integers(config.model.vocab_size, size=TOKENS, dtype=np.uint16).tofile(file)
        steps = {sets: count() for sets in args.sets}
        loaders = {sets: open_mixture(file, sets, length, size) for sets in args.sets}

        def read(sets: int) -> None:
            for _ in range(batches):
                loaders[sets].batch(next(steps[sets]))

        before = resident_bytes()
        times = bench.time({sets: lambda sets=sets: read(sets) for sets in args.sets})
        grown = (resident_bytes() - before) / 2**20
    speeds = {sets: batches * size * length / seconds for sets, seconds in times.items()}
    rows = [[plural(sets, "set"), speed, speed / speeds[args.sets[0]]] for sets, speed in speeds.items()]
    bench.add_table(["sets", "tokens/s", "ratio"], rows)
    print(f"the process has grown by {grown:,.1f} MiB, without pages of the files")


def open_mixture(file: Path, sets: int, block_size: int, batch_size: int) -> Loader:
    """A loader of equal parts of the file as so many sets, of weights 1, 2, 3 and so on."""
    part = TOKENS // sets
    tokens = [Tokens([np.memmap(file, "<u2", "r", 2 * i * part, (part,))], f"set {i}") for i in range(sets)]
    return Loader(tokens, block_size, batch_size, seed=0, weights=range(1, sets + 1))


def resident_bytes() -> int:
    """Memory of this process now, as Linux says; 0 elsewhere."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
