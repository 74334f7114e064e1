"""Muon of q, k, v, gate and up in float64, against torch.optim.Muon of separate parameters.

The reference trains each matrix, of each expert too, as a parameter of its own.
"""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from numerics import SEED, assert_near
from runs import start_ranks, wait_for_ranks
from torch import Tensor
from torch.func import functional_call

from configure.schema import Model, Optim
from model import GPT
from runtime import optimizers, parallel
from runtime.distributed import Ranks
from runtime.optimizers import build_optimizer

N_STEP = 5
LR = 0.02
# Three experts on two ranks are uneven shards; a dense layer, a shared expert, k and v of one head.
MODEL = Model(
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    n_embd=8,
    block_size=6,
    vocab_size=13,
    n_expert=3,
    top_k=2,
    expert_hidden=6,
    n_shared_expert=1,
    gated=True,
    activation="silu",
)
# {end of a parameter's name: sizes of its matrices in rows of (out, in)}, by hand
SPLITS = {
    "attn.qkv.weight": [8, 4, 4],
    "0.mlp.w_in.weight": [18, 18],  # as wide as two experts and the shared one
    "shared.w_in.weight": [6, 6],
    "experts.w_in": [6, 6],
}


def build_model() -> GPT:
    torch.manual_seed(SEED)
    return GPT(MODEL).double()


def draw_batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1000 * SEED + step)
    tokens = torch.randint(MODEL.vocab_size, (4, MODEL.block_size + 1))
    return tokens[:, :-1], tokens[:, 1:]


class Reference:
    """The model with a parameter for each matrix."""

    def __init__(self, optim: Optim) -> None:
        self.model = build_model()
        self.matrices: dict[str, list[list[Tensor]]] = {}  # of each expert: its matrices
        self.others: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            if p.dim() == 1 or not name.startswith("blocks.") or ".router." in name:
                self.others[name] = p.detach().clone().requires_grad_()
                continue
            experts = p.detach().mT if p.dim() == 3 else p.detach()[None]  # (E or 1, out, in)
            sizes = [experts.shape[1]]
            for end, split in SPLITS.items():
                if name.endswith(end):
                    sizes = split
            self.matrices[name] = []
            for expert in experts:
                parts = [part.clone().requires_grad_() for part in expert.split(sizes)]
                self.matrices[name].append(parts)
        separate = []
        for experts in self.matrices.values():
            for parts in experts:
                separate += parts
        self.muon = torch.optim.Muon(
            separate,
            lr=LR,
            weight_decay=optim.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
        decayed = [p for p in self.others.values() if p.dim() > 1]
        vectors = [p for p in self.others.values() if p.dim() == 1]
        groups = [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, LR, (optim.beta1, optim.beta2), optim.eps)

    def join(self) -> dict[str, Tensor]:
        """{name in the model: its parameter}, differentiable by each matrix."""
        joined = dict(self.others)
        for name, experts in self.matrices.items():
            stack = torch.stack([torch.cat(parts) for parts in experts])
            joined[name] = stack.mT if "experts" in name else stack[0]
        return joined

    def step(self, x: Tensor, y: Tensor) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()
        functional_call(self.model, self.join(), (x, y)).loss.backward()
        # torch rounds to bfloat16 before the iteration
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            self.muon.step()
        self.adamw.step()


def compare(way: str, optim: Optim, ranks: Ranks) -> None:
    """Train both on the same batches, and assert that weights are equal after each step."""
    model = build_model()
    reference = Reference(optim)
    runner = parallel.distribute(model, way, ranks, torch.float64)
    optimizer = build_optimizer(model, optim)
    for group in optimizer.param_groups:
        group["lr"] = LR
    for step in range(N_STEP):
        x, y = draw_batch(step)
        runner(x, y).loss.backward()
        optimizer.step(torch.ones(()), torch.zeros(()))
        optimizer.zero_grad()
        reference.step(x, y)
        wanted = reference.join()
        for name, p in model.named_parameters():
            full = parallel.full_tensor(p.detach())
            assert_near(full, wanted[name], 1e-9, f"{name} after step {step + 1}")


def be_a_rank(file: Path, ways: list[str], local_size: int) -> None:
    """A rank: each way of sharding in turn."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    init = {"init_method": file.as_uri(), "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **init)
    for way in ways:
        calls = []
        compute = optimizers.Muon._compute_update

        def count(muon: Any, x: Tensor, p: Tensor, lr: float) -> Tensor:
            calls.append(p.dim())  # noqa: B023  # called within the iteration
            return compute(muon, x, p, lr)  # noqa: B023

        with mock.patch.object(optimizers.Muon, "_compute_update", count):
            ranks = Ranks(rank, world_size, torch.device("cpu"), local_size)
            compare(way, Optim(name="muon"), ranks)
        all_calls: list[Any] = [None] * world_size
        dist.all_gather_object(all_calls, calls.count(2))
        n_matrix = 8  # qkv and proj of two layers, two of the dense MLP, two of the shared expert
        copies = world_size if way == "ddp" else world_size // local_size
        assert sum(all_calls) == N_STEP * n_matrix * copies, (way, all_calls)
        # two of one shape, as qkv of both layers, go to two ranks
        on_first_rank = n_matrix if way == "ddp" else n_matrix - 2
        assert max(all_calls) == N_STEP * on_first_rank, (way, all_calls)
    dist.destroy_process_group()


@pytest.mark.numerics
def test_each_matrix_is_trained_as_torch_trains_it_alone():
    compare("ddp", Optim(name="muon"), Ranks(0, 1, torch.device("cpu")))


@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize(
    "n, ways, local_size",
    [(2, ["ddp", "zero2", "fsdp"], 2), (3, ["fsdp"], 3), (4, ["hsdp"], 2)],
)
def test_each_matrix_is_trained_so_on_several_ranks(tmp_path, n, ways, local_size):
    """And its iteration is computed once: on one rank, under HSDP on one of each node."""
    ranks = start_ranks(n, be_a_rank, tmp_path / "store", ways, local_size)
    wait_for_ranks(ranks, 300)
