"""Jobs of several ranks for test_parallel.py: cases, and what each rank sees of its training."""

import os
import shutil
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from runs import meet_in
from torch.distributed import distributed_c10d

import configure
import train
from hf import match_gates
from runtime import checkpoint, distributed
from runtime import state as train_state

PEAK = 1e9  # FLOP/s of a CPU, for perf/mfu


# ---- cases
class Case(NamedTuple):
    model: str  # of MODELS
    way: str  # of WAYS
    own: list[str] = []  # overrides of this case alone
    copies: tuple[str, ...] = ()  # cases that resume from this one's checkpoint of step 3


class Way(NamedTuple):
    ranks: int
    parallel: str
    ranks_per_node: int
    n: int = 1  # train.expert_parallel


WAYS = {
    "alone": Way(1, "ddp", 1),
    "ddp-2": Way(2, "ddp", 2),
    "fsdp-2": Way(2, "fsdp", 2),
    "ddp-4": Way(4, "ddp", 4),
    "fsdp-4": Way(4, "fsdp", 4),
    "hsdp-2x2": Way(4, "hsdp", 2),
    "zero2-2": Way(2, "zero2", 2),
    "experts-2": Way(2, "ddp", 2, 2),
    "experts-2x2": Way(4, "ddp", 4, 2),
    "experts-fsdp": Way(4, "fsdp", 4, 2),
    "experts-hsdp": Way(4, "hsdp", 2, 2),
}
# 4, 2 or 1 micro-batches a step
ALL = [
    "train.micro_batch_size=2",
    "train.max_steps=4",
    "eval.interval=2",
    "eval.windows=5",  # unequal numbers on the ranks
    "train.timeout_minutes=7",
]
SAVED = [
    "train.max_steps=6",
    "eval.interval=3",
    "train.checkpoint_interval=3",
    "train.keep_checkpoints=9",
    # parameter groups of their own
    "optim.router_lr_ratio=0.5",
    "optim.expert_out_lr_ratio=2.0",
]
BALANCED = ["train.bias_update_rate=0.01", "train.balance_loss_coef=0.1"]
MODELS = {  # kern-norelu: no gate is exactly 0, at which rounding would change gradients
    "pair": ["model.router=kern-norelu", "train.max_steps=3", "eval.interval=3"],
    # from weights of another router, whose gates are matched
    "given": ["model.router=kern-norelu", "train.max_steps=2", "train.init_from=FOLDER/start/tiny"],
    "dense": ["model.router=dense", "data.document_mask=true", "train.ema_decay=0.75"],
    "kern": ["model.router=kern-norelu"],
    # into larger micro-batches than one rank's
    "cut": ["model.router=kern-norelu", "train.balance_loss_coef=0.1"],
    "muon": [
        *SAVED,
        "model.router=kern-norelu",
        "optim.name=muon",
        "model.n_kv_head=1",
        "model.gated=true",
        "model.activation=silu",
        "model.n_shared_expert=1",
    ],
    # A loss scale that overflows in all steps before the checkpoint: AdamW has made no step yet.
    "early": [*SAVED, "train.dtype=float16", "train.z_loss_coef=200"],
    "biased": ["model.router=sigmoid-renorm", *BALANCED, "train.z_loss_coef=0.01"],
    "saved": [*SAVED, "model.router=sigmoid-renorm", "model.n_hash_layer=1", *BALANCED],
    # One step: later ones differ by rounding, which can move a score to another bin.
    "quantile": [
        "model.router=sigmoid",
        "train.bias_update=quantile",
        "train.max_steps=1",
        "optim.warmup_steps=1",
        "model.n_hash_layer=1",
        "train.balance_loss_coef=0.1",
    ],
    "modern": [
        "model.router=kern-norelu",
        "model.norm=rmsnorm",
        "model.qk_norm=all",
        "model.n_kv_head=1",
        "model.pos=rope",
        "model.gated=true",
        "model.activation=silu",
        "model.n_shared_expert=1",
    ],
    # Interpreted, so as little as can be: 16 tokens a step.
    "triton": [
        "model.router=kern-norelu",
        "model.n_layer=1",
        "model.block_size=8",
        "train.batch_size=2",
        "train.micro_batch_size=1",
        "train.max_steps=2",
        "eval.windows=2",
        "train.activation_checkpointing=true",
    ],
    # The most state to resume: dropout, a loss scale, means of weights, a checkpoint in the middle
    # of a log interval.
    "again": [
        *SAVED,
        "model.dropout=0.1",
        "train.dtype=float16",
        "log.interval=2",
        "train.ema_decay=0.75",
    ],
}
ANY = ("given", "dense", "kern", "modern", "biased", "quantile", "cut", "triton", "muon")
COMPARED = ("pair", *ANY, "saved")  # with a run on one rank
CASES = {
    f"{model} {way}": Case(model, way)
    for model, ways in {
        "pair": ["ddp-2"],
        "given": ["ddp-2", "fsdp-4", "zero2-2"],
        "dense": ["ddp-2", "fsdp-2", "zero2-2"],
        "kern": ["fsdp-4", "experts-2x2"],
        "modern": ["ddp-2", "fsdp-2"],
        "biased": ["ddp-4", "hsdp-2x2", "zero2-2", "experts-hsdp"],
        "quantile": ["ddp-2", "experts-2"],
        "muon": ["hsdp-2x2", "experts-fsdp"],
    }.items()
    for way in ways
}
CASES["cut ddp-2"] = Case("cut", "ddp-2", ["train.micro_batch_size=4"])
CASES["triton fsdp-2"] = Case("triton", "fsdp-2", ["model.backend=triton"])
# saved under: resumed under
RESHARDED = {"fsdp-2": ("ddp-2", "fsdp-4", "experts-2x2"), "experts-2": ("zero2-2",)}
for saved, ways in RESHARDED.items():
    CASES[f"saved {saved}"] = Case(
        "saved", saved, copies=tuple(f"{saved} to {way}" for way in ways)
    )
    CASES |= {f"{saved} to {way}": Case("saved", way) for way in ways}
RESUMED = [
    ("again", "fsdp-2"),
    ("again", "ddp-4"),
    ("again", "hsdp-2x2"),
    ("early", "fsdp-2"),
    ("muon", "fsdp-2"),
    ("again", "experts-2x2"),
    ("muon", "experts-fsdp"),
]
for model, way in RESUMED:
    CASES[f"{model} {way}"] = Case(model, way, copies=(f"{model} {way} resumed",))
    CASES[f"{model} {way} resumed"] = Case(model, way)


# ---- what a rank does
BUILD, RATE, SAVE = train_state.build_optimizer, train.learning_rate, checkpoint.Saver.save


@contextmanager
def patches(model, rank=0, after_save=lambda saver, step: None):
    """Within this context runs are those of the cases of `model`; `after_save` follows each save.

    Yields torch's seed in each step, the timeouts of this rank's groups, and the selection biases
    of the pair.
    """
    seen = {"seeds": [], "biases": [], "timeouts": set()}

    def save(saver, step, *args):
        SAVE(saver, step, *args)
        after_save(saver, step)

    def build_optimizer(network, *args):
        """Let the pair's routers shun an expert."""
        if model == "pair":
            seen["biases"] = [block.mlp.router.selection_bias for block in network.blocks]
            for bias in seen["biases"]:
                bias[3] = -10 - rank
        return BUILD(network, *args)

    def learning_rate(*args):
        """Between the seed of a step and its forward pass."""
        seen["seeds"].append(torch.initial_seed())
        for group in distributed_c10d._world.pg_map:
            options = group._get_backend(torch.device("cpu")).options
            seen["timeouts"].add(options._timeout.total_seconds() / 60)
        return RATE(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Saver, "save", save)
        patch.setattr(train_state, "build_optimizer", build_optimizer)
        patch.setattr(train, "learning_rate", learning_rate)
        patch.setattr(distributed, "peak_flops", lambda device, dtype: PEAK)
        patch.setattr(match_gates, "TOKENS", 512)  # for tests of accuracy: test_swap.py
        yield seen


def overrides_of(model, folder):
    return [text.replace("FOLDER", folder.as_posix()) for text in (*ALL, *MODELS[model])]


def config_of(folder, name, seed):
    """A case has its own run.dir; the runs that resume from another's checkpoint share its
    run.name.
    """
    case = CASES[name]
    ranks, way, _, n = WAYS[case.way]
    own = [seed, f"run.dir={(folder / name).as_posix()}", f"train.parallel={way}"]
    own.append(f"train.expert_parallel={n}")
    return configure.load(
        folder / "tiny.toml", [*overrides_of(case.model, folder), *own, *case.own], ranks
    )


def work(folder, name, seed, rank):
    """Train as the case says; returns what this rank saw."""
    case = CASES[name]

    def copy_run(saver, step):
        if step == 3 and case.copies:
            saver.wait()
            for copy in case.copies if rank == 0 else ():
                shutil.copytree(folder / name, folder / copy)

    with patches(case.model, rank, copy_run) as seen:
        train.train(config_of(folder, name, seed))
    return seen


def be_a_rank(folder, names, seeds):
    """Cases of as many ranks, one after another; each meets in a file of its own."""
    rank = int(os.environ["RANK"])
    for name in names:
        way = WAYS[CASES[name].way]
        os.environ["LOCAL_WORLD_SIZE"] = str(way.ranks_per_node)
        meet_in(folder / f"{name}.store")
        print("case:", name, flush=True)
        seen = work(folder, name, seeds.get(CASES[name].model, "run.seed=0"), rank)
        torch.save(seen, folder / f"{name}.{rank}")
