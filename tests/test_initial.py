"""Initial weights: each rank draws one tensor at a time and keeps its shard.

One job of four ranks (CPU, gloo) builds all models.
"""

import ctypes
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import write_tiny
from runs import Forked, meet_in, start_ranks, wait_for_ranks
from torch.distributed import destroy_process_group, init_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

import configure
from model import GPT
from runtime import distributed
from runtime.parallel import distribute, full_tensor, local_part
from runtime.state import build_model, initialize
from runtime.transfer import scale_initial_weights

N_RANK = 4
M_MMAP_THRESHOLD = -3  # malloc.h
WAYS = [  # train.parallel, ranks of a node, train.expert_parallel
    ("ddp", 4, 1),
    ("zero2", 4, 1),
    ("fsdp", 4, 1),
    ("hsdp", 2, 1),
    ("ddp", 4, 2),
    ("ddp", 4, 4),
    ("fsdp", 4, 2),
    ("fsdp", 4, 4),
    ("hsdp", 2, 2),
]
MODELS = [
    ["model.router=kern", "model.bias=true", "model.gate_norm=1.0"],
    [
        "model.router=kern-mc",
        "model.n_shared_expert=1",
        "model.n_hash_layer=1",
        "model.tie_embeddings=false",
        "optim.transfer=mup",
        "optim.base_width=16",
        "optim.base_hidden=8",
    ],
]


def build_full(config: configure.Config) -> GPT:
    """The oracle: a model built in one go on the CPU."""
    torch.manual_seed(config.run.seed)
    model = GPT(config.model)
    scale_initial_weights(model, config.optim)
    return model


def build_on_rank(folder: Path) -> None:
    """Compare each way's weights with a full build's; leave the names of those that differ."""
    meet_in(folder / "store")
    with distributed.process_group(torch.device("cpu")) as ranks:
        for overrides in MODELS:
            own = [*overrides, "run.seed=7", "train.micro_batch_size=1"]
            config = configure.load(folder / "tiny.toml", own, N_RANK)
            wanted = build_full(config)
            after = torch.rand(1)
            for parallel, local_size, n in WAYS:
                ranks = ranks._replace(local_size=local_size)
                model = build_model(config, None)
                assert all(p.is_meta for p in model.parameters())
                fill = partial(initialize, config, None, ranks)
                distribute(
                    model, parallel, ranks, torch.float32, expert_parallel=n, initialize=fill
                )
                assert torch.equal(torch.rand(1), after), "other random numbers were drawn"
                state = model.state_dict()
                assert list(state) == list(wanted.state_dict())
                for name, value in wanted.state_dict().items():
                    assert torch.equal(full_tensor(state[name]), value), (parallel, n, name)


@pytest.mark.integration
def test_initial_weights_equal_a_full_build_bit_for_bit(corpus, tmp_path):
    write_tiny(tmp_path, corpus)
    wait_for_ranks(start_ranks(N_RANK, build_on_rank, tmp_path), 300)


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
    shards, largest, peak = (int(number) for number in printed.split())
    assert 8 * shards > 250e6 and largest > 16e6
    assert shards + largest <= peak < 8 * shards / 2  # with about 20 MB of libraries
