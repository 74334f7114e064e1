"""Many ranks: the same run on any number of them, under DDP, FSDP2 and HSDP; idle experts, steps that are not finite,
checkpoints that reshard, bytes as planned, ranks that die, refusals.

2 ranks, then 4 (CPU, gloo), go through all cases of theirs, and each leaves a report a case, which the tests read. This
file is the program of the ranks that end, too.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import TINY
from runs import column, meet_in, start_ranks
from torch.distributed.tensor import DTensor, Shard

import configure
import model as model_module
import train
from configure import ConfigError
from eval.trained import load_model
from model import parameter_shapes
from runtime import RunError, checkpoint, distributed, memory
from runtime import state as train_state
from runtime.metrics import read_metrics
from runtime.parallel import full_tensor

REPO_ROOT = Path(__file__).parents[1]


class Case(NamedTuple):
    ranks: int
    parallel: str
    overrides: list[str]
    ranks_a_node: int | None = None  # all
    inf_on_rank_1: int | None = None  # step whose gradient of expert 0, that of rank 0's shard, is infinite there
    shunned: int | None = None  # an expert that no token chooses
    copies: tuple[str, ...] = ()  # cases that go on from this one's checkpoint of step 4


WAYS = {
    "alone": Case(1, "auto", []),
    "ddp-2": Case(2, "ddp", []),
    "fsdp-2": Case(2, "fsdp", []),
    "ddp-4": Case(4, "ddp", []),
    "fsdp-4": Case(4, "fsdp", []),
    "hsdp-2x2": Case(4, "hsdp", [], ranks_a_node=2),
}
TWENTY = [
    "train.max_steps=20",
    "eval.interval=10",
    "eval.windows=8",
    "train.micro_batch_size=2",
]  # 4, 2 or 1 micro-batches a step
MODELS = {
    "dense": ["model.router=dense"],
    "softmax": ["model.router=softmax", "train.z_loss_coef=0.01"],
    "kern": ["model.router=kern"],
    "biased": ["model.router=sigmoid-renorm", "train.bias_update_rate=0.01", "train.balance_loss_coef=0.1"],
}
# Two rows of 8 tokens a step, each token to one expert of 16: a rank of two lacks at least 8 of them.
IDLE = ["model.block_size=8", "model.n_expert=16", "model.top_k=1", "train.batch_size=2", "train.micro_batch_size=1"]
IDLE += ["train.max_steps=6", "eval.interval=6"]
BLOCKS = ["model.dropout=0.1", "train.micro_batch_size=2", "train.max_steps=5", "eval.interval=5"]
HALF = [
    "train.dtype=float16",
    "train.bias_update_rate=0.01",
    "train.micro_batch_size=2",
    "train.max_steps=5",
    "eval.interval=5",
]
WINDOWS = ["train.micro_batch_size=1", "eval.windows=5", "train.max_steps=1"]  # on 4 ranks 2, 1, 1 and 1
WINDOWS += ["train.timeout_minutes=1", "optim.warmup_steps=0"]
NODES = ["train.micro_batch_size=1", "train.max_steps=6"]
UNEVEN = ["eval.windows=8", "train.micro_batch_size=2", "train.max_steps=1", "optim.warmup_steps=0"]
UNEVEN += ["model.n_expert=6", "model.block_size=31"]
SAVED = [
    "train.max_steps=8",
    "eval.interval=4",
    "eval.windows=8",
    "train.checkpoint_interval=4",
    "train.keep_checkpoints=9",
]
SAVED += ["train.micro_batch_size=2", "train.bias_update_rate=0.01", "train.balance_loss_coef=0.1"]
ONWARD = {"fsdp-2": ("alone", "ddp-2", "fsdp-4"), "ddp-2": ("fsdp-2",)}  # saved so: resumed so

CASES = {
    f"{name} {way}": case._replace(overrides=TWENTY + MODELS[name]) for way, case in WAYS.items() for name in MODELS
}
CASES |= {f"idle {way}": WAYS[way]._replace(overrides=IDLE, shunned=3) for way in ("alone", "ddp-2", "fsdp-2")}
CASES |= {
    f"blocks {way} {checkpointing}": WAYS[way]._replace(
        overrides=[*BLOCKS, f"train.activation_checkpointing={checkpointing}"]
    )
    for way in ("alone", "ddp-2", "fsdp-2")
    for checkpointing in ("false", "true")
}
# Interpreted, so as little as can be: 16 tokens a step.
TRITON = ["model.n_layer=1", "model.block_size=8", "train.batch_size=2", "train.micro_batch_size=1", "log.interval=1"]
TRITON += ["train.max_steps=2", "eval.interval=2", "eval.windows=2", "train.activation_checkpointing=true"]
CASES["torch alone"] = WAYS["alone"]._replace(overrides=[*TRITON, "model.backend=torch"])
CASES |= {
    f"triton {way}": WAYS[way]._replace(overrides=[*TRITON, "model.backend=triton"])
    for way in ("alone", "ddp-2", "fsdp-2")
}
CASES |= {f"inf {way}": WAYS[way]._replace(overrides=HALF, inf_on_rank_1=2) for way in ("ddp-2", "fsdp-2", "fsdp-4")}
CASES |= {f"windows {way}": WAYS[way]._replace(overrides=WINDOWS) for way in ("alone", "fsdp-2", "fsdp-4", "hsdp-2x2")}
CASES |= {f"uneven {way}": WAYS[way]._replace(overrides=UNEVEN) for way in ("fsdp-4", "hsdp-2x2")}
for saved, resumed in ONWARD.items():
    copies = tuple(f"{saved} to {way}" for way in resumed)
    CASES[f"saved {saved}"] = WAYS[saved]._replace(overrides=SAVED, copies=copies)
    CASES |= {f"{saved} to {way}": WAYS[way]._replace(overrides=SAVED) for way in resumed}


# As hard as can be to go on from: dropout, a loss scale, a checkpoint in the middle of a log interval.
AGAIN = [*SAVED, "model.dropout=0.1", "train.dtype=float16", "log.interval=3", "train.loss_spike=skip"]
for way in ("ddp-2", "fsdp-2", "ddp-4", "hsdp-2x2"):
    CASES[f"whole {way}"] = WAYS[way]._replace(overrides=AGAIN, copies=(f"resumed {way}",))
    CASES[f"resumed {way}"] = WAYS[way]._replace(overrides=AGAIN)


# A loss scale that overflows in all steps before the checkpoint: AdamW has made no step yet.
EARLY = [*SAVED, "train.dtype=float16", "train.loss_spike=off", "train.z_loss_coef=800"]
for way in ("alone", "ddp-2", "fsdp-2"):
    CASES[f"early {way}"] = WAYS[way]._replace(overrides=EARLY, copies=(f"early {way} resumed",))
    CASES[f"early {way} resumed"] = WAYS[way]._replace(overrides=EARLY)


# ---- what a rank does


def config_of(folder, name):
    """A case has its own run.dir; the runs that go on from another's checkpoint share its run.name."""
    case = CASES[name]
    own = [f"run.dir={(folder / name).as_posix()}", "train.timeout_minutes=2", f"train.parallel={case.parallel}"]
    return configure.load(folder / "tiny.toml", [*own, *case.overrides], case.ranks)


def passes(config, ranks):
    """Micro-batches of a rank in a step."""
    return config.train.batch_size // (config.train.micro_batch_size * ranks)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors):
    return sum(local(tensor).nbytes for tensor in tensors)


def work(folder, name, rank=0):
    """Train as the case says, and report what this rank saw."""
    case, config = CASES[name], config_of(folder, name)
    accumulation = passes(config, case.ranks)
    seen = {"weights": [], "scales": [], "seeds": [], "loads": [], "dtypes": {}, "gradients": set(), "held": []}
    load_counts, save, build, Updates, settle = (
        model_module.expert_loads,
        checkpoint.Saver.save,
        train_state.build_optimizer,
        train_state.Updates,
        train_state.warm_up_ddp_buckets,
    )
    updates, settling = [], []

    def watched_updates(*args, **kwargs):
        updates.append(Updates(*args, **kwargs))
        return updates[0]

    def watched_settling(*args):
        settling.append(True)  # a pass that is not of training
        settle(*args)
        settling.clear()

    def watched_loads(experts, n_expert):
        loads = load_counts(experts, n_expert)
        if torch.is_grad_enabled() and not settling:
            seen["loads"].append(loads)
        return loads

    def watched_build(model, optim):
        optimizer = build(model, optim)
        parameters = list(model.parameters())
        seen["sharded"] = [isinstance(p, DTensor) and p.placements[-1] == Shard(0) for p in parameters]

        def before_forward(model, args):
            if model.training and not settling:
                seen["weights"].append([local(p).detach().clone() for p in parameters])
                seen["scales"].append(updates[0].scale.item())
                seen["seeds"].append(torch.initial_seed())
                seen["held"].append([0 if p.grad is None else local(p.grad).data_ptr() for p in parameters])

        model.register_forward_pre_hook(before_forward, prepend=True)  # before FSDP2 gathers anything

        def before_step(*_):
            seen["gradients"].add(nbytes(p.grad for p in parameters))

        optimizer.register_step_pre_hook(before_step)
        for part in ("ln_1", "mlp.router", "mlp.experts"):
            module = next((m for n, m in model.blocks[0].named_modules() if n == part), None)
            if module:
                module.register_forward_pre_hook(lambda m, _, part=part: seen["dtypes"].update({part: dtype_of(m)}))
        for block in model.blocks:
            if case.shunned is not None:
                block.mlp.router.selection_bias[case.shunned] = -10 - rank
        if case.inf_on_rank_1 is not None and rank == 1:
            model.blocks[0].mlp.experts.register_forward_pre_hook(hook_gradient)
        return optimizer

    def hook_gradient(experts, _):
        """On the whole parameter, which FSDP2 makes anew for every pass."""
        if torch.is_grad_enabled() and (len(seen["weights"]) - 1) // accumulation == case.inf_on_rank_1:
            experts.w_in.register_hook(infinite)

    def infinite(gradient):
        if (len(seen["weights"]) - 1) // accumulation == case.inf_on_rank_1:
            gradient = gradient.clone()
            gradient[0, 0, 0] = torch.inf
        return gradient

    def watched_save(saver, step, model, optimizer, *args):
        save(saver, step, model, optimizer, *args)
        if step == 4 and case.copies:
            saver.wait()
            if rank == 0:
                for copy in case.copies:
                    shutil.copytree(folder / name, folder / copy)
        seen["parameters"] = {key: full_tensor(p.detach()).clone() for key, p in model.named_parameters()}
        seen["buffers"] = {key: buffer.clone() for key, buffer in model.named_buffers()}
        seen["bytes"] = {
            "weights": nbytes(model.parameters()),
            "gradients": seen["gradients"].pop() if len(seen["gradients"]) == 1 else seen["gradients"],
            "optimizer": nbytes(t for state in optimizer.state.values() for key, t in state.items() if key != "step"),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "expert_loads", watched_loads)
        patch.setattr(checkpoint.Saver, "save", watched_save)
        patch.setattr(train_state, "build_optimizer", watched_build)
        patch.setattr(train_state, "Updates", watched_updates)
        patch.setattr(train_state, "warm_up_ddp_buckets", watched_settling)
        train.train(config)
    return seen


def dtype_of(module):
    return next(module.parameters(recurse=False)).dtype


def be_a_rank(folder):
    """All cases of as many ranks, one after another; each meets in a file of its own."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, case in CASES.items():
        if case.ranks != ranks:
            continue
        os.environ["LOCAL_WORLD_SIZE"] = str(case.ranks_a_node or ranks)
        meet_in(folder / f"{name}.store")
        try:
            torch.save(work(folder, name, rank), folder / f"{name}.{rank}.pt")
        except Exception:
            (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
            if dist.is_initialized():
                dist.destroy_process_group()


def be_ended(folder, how):
    """A rank: DDP, or FSDP2 that saves all the time. Before step 3 rank 1 sends itself the signal `how`."""
    how, _, saving = how.partition(" ")
    if "MASTER_ADDR" not in os.environ:  # torchrun's
        meet_in(folder / f"{how}.store")
    last_step = train.learning_rate

    def learning_rate(optim, max_steps, step):
        if step == 3 and os.environ["RANK"] == "1":
            print("rank 1 ends at step 3", flush=True)
            os.kill(os.getpid(), getattr(signal, how))
        return last_step(optim, max_steps, step)

    train.learning_rate = learning_rate
    own = [f"--run.dir={(folder / (how + saving)).as_posix()}", "--train.micro_batch_size=1"]
    own += ["--train.timeout_minutes=0.5"]
    own += ["--train.parallel=fsdp", "--train.checkpoint_interval=1"] if saving else []
    sys.exit(train.main([str(folder / "tiny.toml"), *own]))


# ---- how the tests start them


class Outcome(NamedTuple):
    lines: list[dict]  # of metrics.jsonl
    reports: list[dict]  # a rank
    folder: Path  # of the run


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("ranks")
    text = TINY.format(runs=(folder / "runs").as_posix(), data=corpus.as_posix())
    (folder / "tiny.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def outcome(folder, request):
    """`outcome(case)`: what came of it. Runs of several ranks are there after the first question for one of them."""
    if any("jobs" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("jobs")  # they wait for most of their time, which may as well be now
    started, alone = set(), {}

    def outcome(name):
        ranks = CASES[name].ranks
        for number in (2, 4):  # runs on 4 go on from checkpoints of 2
            if number <= ranks and number not in started:
                started.add(number)
                ended = [rank.wait(600) for rank in start_ranks(number, be_a_rank, folder)]
                assert all(code == 0 for code, _ in ended), ended
        if ranks == 1:
            if name not in alone:
                alone[name] = [work(folder, name)]
            reports = alone[name]
        else:
            errors = [f"rank {path.name}: {path.read_text()}" for path in sorted(folder.glob(f"{name}.*.error"))]
            assert not errors, "\n".join(errors)
            reports = [torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks)]
        run = folder / name / "tiny"
        return Outcome(read_metrics(run / "metrics.jsonl"), reports, run)

    return outcome


def assert_same_run(one, other, after=-1):
    """Losses to 1e-5 from step `after` on, and the same weights at the end."""
    keys = ("train/loss", "train/aux_loss", "val/loss", "optim/grad_norm")
    for key in (*keys, "router/gamma", "router/load_imbalance", "val/load_imbalance"):
        a, b = ([line[key] for line in run.lines if key in line and line["step"] > after] for run in (one, other))
        assert a == pytest.approx(b, rel=1e-5), key
    a, b = one.reports[0], other.reports[0]
    for key in a["parameters"]:
        torch.testing.assert_close(a["parameters"][key], b["parameters"][key], rtol=1e-4, atol=1e-5)
    for key in a["buffers"]:
        assert torch.equal(a["buffers"][key], b["buffers"][key]), key


# ---- equal runs


@pytest.mark.parametrize("way", [way for way in WAYS if way != "alone"])
@pytest.mark.parametrize("model", MODELS)
def test_same_run_on_any_number_of_ranks(outcome, model, way):
    alone, ranks = outcome(f"{model} alone"), outcome(f"{model} {way}")
    assert column(ranks.lines, "step") == column(alone.lines, "step")  # rank 0 alone writes
    assert len(column(ranks.lines, "train/loss")) == 20 and len(column(ranks.lines, "val/loss")) == 3
    assert_same_run(ranks, alone)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "alone"])
@pytest.mark.parametrize("model", ["kern", "biased"])
def test_ranks_hold_the_same_selection_biases_and_gammas(outcome, model, way):
    alone, reports = outcome(f"{model} alone").reports[0], outcome(f"{model} {way}").reports
    for report in reports:
        for part in ("parameters", "buffers"):  # whole ones; under DDP each rank's own
            assert all(torch.equal(report[part][key], reports[0][part][key]) for key in report[part])
    biases = [report["buffers"]["blocks.1.mlp.router.selection_bias"] for report in (alone, *reports)]
    assert all(torch.equal(bias, biases[0]) for bias in biases)
    assert bool(biases[0].any()) == (model == "biased")
    if model == "kern":
        gammas = [report["parameters"]["blocks.1.mlp.router.gamma"].item() for report in (alone, *reports)]
        assert gammas == pytest.approx([gammas[0]] * len(gammas), rel=1e-6) and abs(gammas[0] - 1) > 1e-3
        assert len(column(outcome(f"{model} {way}").lines, "router/gamma")) == 20


@pytest.mark.parametrize("way", ["alone", "ddp-2", "fsdp-2"])
def test_activation_checkpointing_changes_nothing(outcome, way):
    """Bit for bit, dropout and all: what is computed once more draws the same random numbers."""
    kept, again = outcome(f"blocks {way} false"), outcome(f"blocks {way} true")
    for key in ("train/loss", "val/loss", "optim/grad_norm", "router/gamma"):
        assert column(again.lines, key) == column(kept.lines, key) != []
    for key, parameter in kept.reports[0]["parameters"].items():
        assert torch.equal(parameter, again.reports[0]["parameters"][key])
    assert len(again.reports[0]["loads"]) == 2 * len(kept.reports[0]["loads"])  # so blocks were computed once more


def test_ranks_draw_their_own_dropout(outcome):
    """Else rows of several ranks would share a mask."""
    seeds = [seed for report in outcome("blocks ddp-2 false").reports for seed in set(report["seeds"])]
    assert len(seeds) == len(set(seeds)) == 2 * 5  # one a rank and step


@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2"])
def test_ranks_may_lack_experts(outcome, way):
    alone, ranks = outcome("idle alone"), outcome(f"idle {way}")
    mine, other = (torch.stack(report["loads"]) for report in ranks.reports)  # (passes, E)
    for lacks, has in ((mine, other), (other, mine)):
        assert ((lacks == 0) & (has > 0)).any(-1).sum() >= 6  # of 12 passes; it lasts until all tokens agree
    assert not mine[:, 3].any() and not other[:, 3].any()
    for rank, report in enumerate(ranks.reports):  # no rank's buffers go to the others
        assert report["buffers"]["blocks.0.mlp.router.selection_bias"][3] == -10 - rank
    assert len(column(ranks.lines, "train/loss")) == 6
    assert_same_run(ranks, alone)


@pytest.mark.parametrize("way", ["alone", "ddp-2", "fsdp-2"])
def test_triton_kernels_train_alike_on_any_number_of_ranks(outcome, way):
    """With activation checkpointing."""
    assert_same_run(outcome(f"triton {way}"), outcome("torch alone"))


@pytest.mark.parametrize("way", ["fsdp-2", "fsdp-4", "hsdp-2x2"])
def test_ranks_may_have_unequal_numbers_of_validation_windows(outcome, way):
    """A forward pass gathers weights from all ranks, so each must take part in as many."""
    assert_same_run(outcome(f"windows {way}"), outcome("windows alone"))


# ---- steps that are not finite


@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2", "fsdp-4"])
def test_infinite_gradient_on_one_rank_is_skipped_on_all(outcome, folder, way):
    """Under FSDP2 it is one element, in the shard of one rank; the others must learn of it."""
    ran = outcome(f"inf {way}")
    assert column(ran.lines, "optim/skipped_steps") == [0, 0, 1, 1, 1]
    accumulation = passes(config_of(folder, f"inf {way}"), len(ran.reports))
    for report in ran.reports:
        weights, scales = report["weights"][::accumulation], report["scales"][::accumulation]
        changed = [
            any(not torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel())
            for before, after in zip(weights, weights[1:], strict=False)
        ]
        assert changed == [True, True, False, True]
        assert scales == [65536, 65536, 65536, 32768, 32768]
        for key, parameter in report["parameters"].items():
            assert torch.equal(parameter, ran.reports[0]["parameters"][key]) and parameter.isfinite().all()
        for key, buffer in report["buffers"].items():  # nor do loads of the skipped step count on some
            assert torch.equal(buffer, ran.reports[0]["buffers"][key])
    assert column(ran.lines, "val/loss")[-1] < column(ran.lines, "val/loss")[0]


# ---- checkpoints


@pytest.mark.parametrize("saved, resumed", [(saved, way) for saved, ways in ONWARD.items() for way in ways])
def test_checkpoint_of_some_ranks_goes_on_with_others(outcome, saved, resumed):
    whole, part = outcome(f"saved {saved}"), outcome(f"{saved} to {resumed}")
    assert len(part.reports[0]["weights"]) == 4 * 8 // (2 * CASES[f"{saved} to {resumed}"].ranks)  # 4 of 8 steps
    assert column(part.lines, "step") == column(whole.lines, "step")
    assert_same_run(part, whole, after=4)
    assert whole.reports[0]["buffers"]["blocks.0.mlp.router.selection_bias"].any()


@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2", "ddp-4", "hsdp-2x2"])
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(outcome, way):
    whole, part = outcome(f"whole {way}"), outcome(f"resumed {way}")
    assert len(part.reports[0]["weights"]) < len(whole.reports[0]["weights"])
    untimed = [[{k: v for k, v in line.items() if k[:5] != "perf/"} for line in run.lines] for run in (whole, part)]
    assert untimed[0] == untimed[1]
    for mine, others in zip(part.reports, whole.reports, strict=True):
        assert mine["scales"] == others["scales"][-len(mine["scales"]) :]
        for kind in ("parameters", "buffers"):
            assert all(torch.equal(value, others[kind][key]) for key, value in mine[kind].items())


@pytest.mark.parametrize("way", ["alone", "ddp-2", "fsdp-2"])
def test_checkpoint_from_before_the_first_update_goes_on_bit_for_bit(outcome, way):
    """AdamW makes its state in its first step, unless it is made before; float16 may skip that one."""
    whole, part = outcome(f"early {way}"), outcome(f"early {way} resumed")
    assert column(whole.lines, "optim/skipped_steps")[3] == 4 and column(whole.lines, "optim/skipped_steps")[-1] < 8
    assert column(part.lines, "step") == column(whole.lines, "step")
    for key in ("train/loss", "val/loss", "optim/loss_scale", "router/gamma"):
        assert column(part.lines, key) == column(whole.lines, key)
    for key, value in part.reports[0]["parameters"].items():
        assert torch.equal(value, whole.reports[0]["parameters"][key])


def test_sharded_checkpoint_is_read_by_one_process(outcome):
    ran = outcome("saved fsdp-2")
    model, _, step, *_ = load_model(ran.folder)
    assert step == 8
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, ran.reports[0]["parameters"][key])
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, ran.reports[0]["buffers"][key])


# ---- memory


def planned(config, parallel, shards):
    dtype = config.train.dtype
    shapes, micro_batch = parameter_shapes(config.model), config.train.micro_batch_size
    return memory.estimate_memory(
        shapes, config.model, micro_batch, dtype, parallel, shards, config.train.activation_checkpointing
    )


@pytest.mark.parametrize(
    "case, shards",
    [(f"{model} {way}", n) for model in ("dense", "kern") for way, n in (("alone", 1), ("ddp-2", 1), ("fsdp-2", 2))]
    + [("kern fsdp-4", 4), ("kern hsdp-2x2", 2), ("uneven fsdp-4", 4), ("uneven hsdp-2x2", 2)],
)
def test_bytes_are_as_planned(outcome, folder, case, shards):
    """Exactly, on the rank that has most: the first, which holds γ and what does not divide."""
    parallel = "ddp" if CASES[case].parallel == "auto" else CASES[case].parallel
    plan = planned(config_of(folder, case), parallel, shards)
    first, *others = (report["bytes"] for report in outcome(case).reports)
    assert first == {"weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer}
    for other in others:
        assert all(other[part] <= first[part] for part in first)
    total = 4 * sum(parameter.numel() for parameter in outcome(case).reports[0]["parameters"].values())
    assert (first["weights"] < total) == (shards > 1)


@pytest.mark.parametrize("way", ["ddp-2", "ddp-4"])
def test_gradients_stay_in_ddps_buckets(outcome, way):
    """Once DDP has settled them each lies where it lay, so no rank ever holds gradients twice."""
    first, *later = outcome(f"kern {way}").reports[0]["held"][12:]  # its first steps find the order of buckets
    assert len(later) >= 7 and all(first) and all(held == first for held in later)


@pytest.mark.parametrize("way", ["fsdp-2", "fsdp-4", "hsdp-2x2"])
def test_every_parameter_stays_sharded_between_passes(outcome, way):
    assert all(report["sharded"] and all(report["sharded"]) for report in outcome(f"kern {way}").reports)


@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2"])
def test_experts_alone_are_gathered_in_half_precision(outcome, way):
    experts = torch.float32 if way == "ddp-2" else torch.float16  # DDP gathers nothing, autocast casts
    for report in outcome(f"inf {way}").reports:
        assert report["dtypes"] == {"ln_1": torch.float32, "mlp.router": torch.float32, "mlp.experts": experts}


SMALL = memory.Memory(weights=2**30, gradients=2**30, optimizer=2**31, copies=0, activations=2**32, logits=0)


def test_the_first_way_that_fits_is_chosen():
    plans = {"ddp": SMALL, "hsdp": SMALL._replace(activations=2**31), "fsdp": SMALL._replace(activations=0)}
    for gibibytes, parallel in ((9, "ddp"), (8, "hsdp"), (7, "hsdp"), (6, "fsdp"), (1, "fsdp")):
        assert memory.select_fitting(plans, gibibytes * 2**30) == parallel
    assert memory.select_fitting(plans, None) == "ddp"


@pytest.mark.parametrize(
    "file, ranks_a_node, ranks, parallel",
    [("125m", 8, 8, "ddp"), ("350m", 8, 8, "ddp"), ("1b3", 8, 8, "fsdp"), ("1b3", 8, 16, "hsdp")],
)
def test_models_of_the_paper_on_cards_of_80_gigabytes(monkeypatch, file, ranks_a_node, ranks, parallel):
    monkeypatch.setattr(distributed, "memory_bytes", lambda device: 80 * 10**9)
    config = configure.load(REPO_ROOT / "config" / f"{file}.toml", ["data.name=any", "train.batch_size=512"], ranks)
    chosen = memory.choose_parallelism(
        config, parameter_shapes(config.model), torch.float16, ranks, ranks_a_node, torch.device("cuda")
    )
    assert chosen[0] == parallel


@pytest.mark.parametrize("parallel, ranks", [("hsdp", 2), ("hsdp", 3), ("fsdp", 1)])
def test_way_that_the_ranks_do_not_allow_is_refused(tiny, monkeypatch, parallel, ranks):
    """HSDP on one node, on nodes of unequal size; FSDP2 on one rank."""
    config = tiny()
    config = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
    with pytest.raises(RunError, match=f"= {parallel} .* {ranks} rank.*set --train.parallel=auto"):
        memory.choose_parallelism(config, parameter_shapes(config.model), torch.float32, ranks, 2, torch.device("cpu"))


def test_device_known_to_be_too_small_is_refused():
    shapes = {"wte.weight": (2**14, 2**14)}  # 4 GiB with gradients and AdamW's moments
    with pytest.raises(
        RunError, match=r"need 4.0 GiB a GPU, this one has 3.0 GiB: set --train.parallel=fsdp on 2 GPUs"
    ):
        memory.check_state_fits(SMALL, 3 * 2**30, shapes)
    memory.check_state_fits(SMALL, 4 * 2**30, shapes)
    memory.check_state_fits(SMALL, None, shapes)


def test_run_that_cannot_fit_is_refused_before_anything_is_made(tiny, monkeypatch):
    monkeypatch.setattr(distributed, "memory_bytes", lambda device: 1000)
    with pytest.raises(RunError, match="--train.parallel=fsdp"):
        train.train(tiny())
    assert not Path(tiny().run.dir).exists()


# ---- jobs of torchrun: ranks that end, and nodes


class Job(NamedTuple):
    code: int
    output: str
    seconds: float


@pytest.fixture(scope="module")
def jobs(folder):
    """`jobs(name)`: what became of a torchrun job or, "SIGSTOP", of two ranks without it. All start together, as they
    wait for most of their time."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    environment = os.environ | {"PYTHONPATH": str(REPO_ROOT), "OMP_NUM_THREADS": "1"}
    two = [*torchrun, "--standalone", "--nproc_per_node=2", __file__, folder]
    nodes = [*torchrun, "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=two"]
    nodes += [f"--rdzv_endpoint=localhost:{port}", "train.py", folder / "tiny.toml"]
    nodes += [f"--run.dir={(folder / 'nodes').as_posix()}", "--train.parallel=fsdp", *(f"--{key}" for key in NODES)]
    commands = {how: [*two, how] for how in ("SIGKILL", "SIGSTOP saving")}
    commands |= {"node 0": nodes, "node 1": nodes}
    started, ended = time.perf_counter(), {}
    processes = {
        name: subprocess.Popen(
            command, cwd=REPO_ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for name, command in commands.items()
    }

    pair = start_ranks(2, be_ended, folder, "SIGSTOP")

    def wait(name):
        if name not in ended and name == "SIGSTOP":
            (code, first), (_, second) = pair[0].wait(120), pair[1].wait(0)
            ended[name] = Job(code, first + second, time.perf_counter() - started)
        elif name not in ended:
            output = processes[name].communicate(timeout=600)[0]
            ended[name] = Job(processes[name].returncode, output, time.perf_counter() - started)
        return ended[name]

    yield wait
    for name in ("SIGSTOP", *processes):  # killed, torchrun would leave its ranks behind
        wait(name)


def test_two_agents_of_torchrun_train_like_one_process(jobs, folder):
    for name in ("node 0", "node 1"):
        assert jobs(name).code == 0, jobs(name).output
    alone = configure.load(folder / "tiny.toml", [f"run.dir={(folder / 'one').as_posix()}", *NODES])
    train.train(alone)
    one, two = (read_metrics(folder / way / "tiny" / "metrics.jsonl") for way in ("one", "nodes"))
    assert "fsdp, about" in jobs("node 0").output + jobs("node 1").output
    assert column(two, "step") == column(one, "step")
    for key in ("train/loss", "val/loss", "optim/grad_norm"):
        assert column(two, key) == pytest.approx(column(one, key), rel=1e-5)


def test_rank_ends_by_itself_when_another_is_silent(jobs):
    job = jobs("SIGSTOP")
    assert job.code > 0 and job.seconds > 30, job.output
    assert "at step 3" in job.output and "Timed out waiting 30000ms" in job.output


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP saving"])
def test_job_ends_when_a_rank_does(jobs, name):
    job = jobs(name)
    assert job.code != 0  # and it did end
    assert "at step 3" in job.output  # it had begun
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", job.output), job.output
    if name != "SIGKILL":  # rank 0 gave up waiting; torchrun then killed the other, which does not end when asked to
        assert "Timed out waiting 30000ms" in job.output and job.seconds > 30


# ---- refusals


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
def test_sharding_over_one_rank_is_refused(tiny, parallel):
    with pytest.raises(RunError, match=f"= {parallel} .* 1 rank.*set --train.parallel=auto"):
        train.train(tiny(f"train.parallel={parallel}"))
    assert not Path(tiny().run.dir).exists()


def test_ranks_that_do_not_divide_the_batch_are_refused(tiny_file):
    with pytest.raises(ConfigError, match="or start 1, 2, 4, 8 ranks") as caught:
        configure.load(tiny_file, ["train.micro_batch_size=1"], 3)
    assert "1 times 3 rank(s) = 3" in str(caught.value) and "--train.batch_size=9" in str(caught.value)
    for ranks in (1, 2, 4, 8):
        configure.load(tiny_file, ["train.micro_batch_size=1"], ranks)


def test_rank_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.pick_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RunError, match="rank 2 of this node has no GPU, there are 2; set --nproc_per_node=2"):
        distributed.pick_device("auto")


if __name__ == "__main__":
    be_ended(Path(sys.argv[1]), sys.argv[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("micro_batch", [4, 16])
def test_peak_on_a_gpu_is_as_planned(micro_batch):
    """Of a training step of 125m.toml in float16, within 15%, gradients staying as they do under DDP."""
    config = configure.load(REPO_ROOT / "config/125m.toml", [f"--train.micro_batch_size={micro_batch}"])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = model_module.GPT(config.model).cuda()
    optimizer = train_state.build_optimizer(model, config.optim)
    updates = train_state.Updates(optimizer, "cuda", scaled=True, grad_clip=1.0)
    x = torch.randint(50257, (micro_batch, config.model.block_size), device="cuda")
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(x, x)[1]
        (loss * updates.scale).backward()
        updates.step(0, 1e-4, loss.detach())
        optimizer.zero_grad(set_to_none=False)
    shapes = parameter_shapes(config.model)
    planned = memory.estimate_memory(shapes, config.model, micro_batch, "float16", "ddp", 1, checkpointing=False)
    assert torch.cuda.max_memory_allocated() == pytest.approx(sum(planned), rel=0.15)
