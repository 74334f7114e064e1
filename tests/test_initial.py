"""Initial weights: each rank draws one tensor at a time and keeps its shard."""

import ctypes
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_tiny
from runs import Forked
from torch.distributed import destroy_process_group, init_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

import configure
from runtime import distributed
from runtime.parallel import distribute, local_part
from runtime.state import build_model, initialize

M_MMAP_THRESHOLD = -3  # malloc.h


def peak_memory(name: str) -> int:
    """VmHWM or VmRSS of this process, bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def build_one_shard(folder: Path) -> None:
    """Build a model of 260 MB as one of 8 ranks, and print the shards' bytes and the peak."""
    overrides = ["model.n_layer=8", "model.n_embd=128", "model.expert_hidden=1000"]
    overrides += ["model.n_expert=32", "run.seed=7"]
    config = configure.load(folder / "tiny.toml", overrides)
    init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    ranks = distributed.Ranks(0, 8, torch.device("cpu"), 8)
    # Freed tensors go back to the system at once; how many malloc keeps differs from run to run.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory("VmRSS")
    model = build_model(config, None)
    fill = partial(initialize, config, None, ranks)
    distribute(model, "fsdp", ranks, torch.float32, initialize=fill)
    shards = sum(local_part(p).nbytes for p in model.parameters())
    largest = max(4 * p.numel() for p in model.parameters())
    print(shards, largest, peak_memory("VmHWM") - before)
    destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_builds_its_shards_and_no_full_copy(corpus, tmp_path):
    write_tiny(tmp_path, corpus)
    code, printed = Forked(build_one_shard, tmp_path).wait(120)
    assert code == 0, printed
    numbers = printed.splitlines()[-1]  # a stand-in for a group has no timeout, and torch says so
    shards, largest, peak = (int(number) for number in numbers.split())
    assert 8 * shards > 250e6 and largest > 16e6
    assert shards + largest <= peak < 0.6 * 8 * shards  # 50 MB of it libraries; 80 with CUDA's
