"""`scripts.bench ranks`: what DDP, a sharded optimizer, ZeRO-2 and FSDP2 move in a step on 8 GPUs, counted without one.

FSDP2's groups, copies and collectives are traced on rank 0 of a process group that sends nothing. DDP's reducer is C++
that a trace does not see: a copy of each gradient to its bucket and an all-reduce per bucket are added by arithmetic.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import configure
from configure.schema import Config
from model import parameter_shapes
from runtime import parallel
from runtime.distributed import Ranks
from scripts.bench.budget import DRAM, OPTIMIZER_BYTES, trace_step
from scripts.bench.harness import Benchmark

RANKS = 8
BUCKET = 25 * 2**20  # bytes of a DDP bucket
COLLECTIVES = ("c10d._allgather_base_", "c10d._reduce_scatter_base_")
UNCOUNTED = ("profiler.", "empty.")  # launch nothing


class Moved(NamedTuple):
    """What a rank does in a step of one micro-batch."""

    launches: int
    memory: float  # bytes of its device's memory, forward, backward and collectives
    sent: float  # bytes to other ranks
    update: float  # bytes of memory of the gradient norm and AdamW


@contextmanager
def sharded(way: str) -> Iterator[Any]:
    """Give a function that shards a fake model over RANKS."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = parallel.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))  # reads numbers: not when fake

        def shard(model: Any) -> nn.Module:
            with mock.patch.object(parallel, "init_device_mesh", lambda *_, **__: mesh):
                return parallel.distribute(model, way, Ranks(0, RANKS, torch.device("cpu"), RANKS), torch.float16)

        yield shard
    finally:
        dist.destroy_process_group()


def trace_ways(config: Config) -> dict[str, Moved]:
    """What each way of sharing a step moves; the model is traced in float16, as in `trace_step`."""
    shapes = [torch.Size(shape).numel() for shape in parameter_shapes(config.model).values()]
    P, others = 4 * sum(shapes), (RANKS - 1) / RANKS  # fp32 bytes
    update = OPTIMIZER_BYTES / 4 * P
    ops = trace_step(config)
    # Each gradient is read, and written to its bucket, which is read and written by the sum over ranks.
    ddp = Moved(len(ops) + len(shapes) + -(-P // BUCKET), sum(op.bytes for op in ops) + 4 * P, 2 * P * others, update)
    shared = ddp._replace(memory=ddp.memory + 2 * P, sent=ddp.sent + P * others, update=update / RANKS)
    moved = {"ddp": ddp, "ddp, sharded AdamW": shared}
    for way in ("zero2", "fsdp"):
        with sharded(way) as shard:
            ops = [op for op in trace_step(config, shard) if not op.name.startswith(UNCOUNTED)]
        # A collective's operands: all of it and a rank's part.
        sent = sum(op.bytes * (RANKS - 1) / (RANKS + 1) for op in ops if op.name.startswith(COLLECTIVES))
        moved[way] = Moved(len(ops), sum(op.bytes for op in ops), sent, update / RANKS)
    return moved


def bench_ranks(args: Namespace, overrides: list[str]) -> None:
    """Count what a step moves on each of 8 GPUs under DDP, with a sharded optimizer, ZeRO-2 and FSDP2."""
    config = configure.load(args.config, overrides)
    tokens = config.train.micro_batch_size * config.model.block_size
    title = f"{' '.join([args.config, *overrides])}, {tokens:,} tokens per rank, float16, eager, {RANKS} ranks"
    notes = ("GB: read and written in memory, collectives included; ms: of all memory traffic, by the data sheet",)
    bench = Benchmark(args, torch.device("cpu"), title, *notes)
    rows = [
        [way, m.launches, m.memory / 1e9, m.sent / 1e9, m.update / 1e9]
        + [1000 * (m.memory + m.update) / dram for dram in DRAM.values()]
        for way, m in trace_ways(config).items()
    ]
    bench.add_table(["", "launches", "GB", "GB sent", "GB AdamW", *(f"{gpu} ms" for gpu in DRAM)], rows)
