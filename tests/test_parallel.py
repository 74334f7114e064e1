"""Many ranks: the same run on any number of them, under DDP, FSDP2 and HSDP; idle experts, steps that are not finite,
checkpoints that reshard, bytes as planned, ranks that die, refusals.

Jobs of 2 and of 4 ranks (CPU, gloo) go through their cases, and each leaves a report per case and rank, which the tests
read. What needs no numbers from the other ranks uses torch's fake process group. This file is the program of the ranks
that end, too.
"""

import os
import re
import shutil
import signal
import socket
import sys
import traceback
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import write_tiny
from numerics import assert_near, tolerance
from runs import (
    assert_same_columns,
    column,
    meet_in,
    run_torchrun,
    run_with_margin,
    start_ranks,
    untimed,
)
from torch.distributed.tensor import DTensor

import configure
import train
from configure import ConfigError
from eval.trained import load_model
from model import flops_per_token
from runtime import checkpoint, distributed, parallel
from runtime import state as train_state
from runtime.metrics import ARRAYS, read_metrics

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


WAYS = {
    "alone": Way(1, "auto", 1),
    "ddp-2": Way(2, "ddp", 2),
    "fsdp-2": Way(2, "fsdp", 2),
    "ddp-4": Way(4, "ddp", 4),
    "fsdp-4": Way(4, "fsdp", 4),
    "hsdp-2x2": Way(4, "hsdp", 2),
    "zero2-2": Way(2, "zero2", 2),
}
# 4, 2 or 1 micro-batches a step
ALL = ["train.micro_batch_size=2", "train.max_steps=4", "eval.interval=2", "train.timeout_minutes=2"]
SAVED = ["train.max_steps=6", "eval.interval=3", "train.checkpoint_interval=3", "train.keep_checkpoints=9"]
SAVED += ["optim.router_lr_ratio=0.5", "optim.expert_out_lr_ratio=2.0"]  # parameter groups of their own
MODELS = {  # kern-norelu: no gate is exactly 0, at which rounding would change gradients
    "pair": ["model.router=kern-norelu", "train.max_steps=3", "eval.interval=3"],
    "dense": ["model.router=dense"],
    "kern": ["model.router=kern-norelu"],
    "biased": [
        *("model.router=sigmoid-renorm", "train.bias_update_rate=0.01"),
        *("train.balance_loss_coef=0.1", "train.z_loss_coef=0.01"),
    ],
    "cut": ["model.router=kern-norelu", "train.balance_loss_coef=0.1"],  # into larger micro-batches than one rank's
    "modern": [
        *("model.router=kern-norelu", "model.norm=rmsnorm", "model.qk_norm=all", "model.n_kv_head=1", "model.pos=rope"),
        *("model.gated=true", "model.activation=silu", "model.n_shared_expert=1", "model.n_dense_layer=1"),
    ],
    # Two rows of 8 tokens a step, each token to one expert of 16: a rank of two lacks at least 8 of them.
    "idle": [
        *("model.router=kern-norelu", "model.block_size=8", "model.n_expert=16", "model.top_k=1"),
        *("train.batch_size=2", "train.micro_batch_size=1"),
    ],
    "windows": ["model.router=kern-norelu", "train.micro_batch_size=1", "eval.windows=5", "train.max_steps=2"],
    # Interpreted, so as little as can be: 16 tokens a step.
    "triton": [
        *("model.router=kern-norelu", "model.n_layer=1", "model.block_size=8", "train.batch_size=2"),
        *("train.micro_batch_size=1", "train.max_steps=2", "eval.windows=2", "train.activation_checkpointing=true"),
    ],
    "saved": [*SAVED, "model.router=sigmoid-renorm", "train.bias_update_rate=0.01", "train.balance_loss_coef=0.1"],
    "muon": [*SAVED, "model.router=kern-norelu", "optim.name=muon"],
    "blocks": ["model.dropout=0.1", "train.balance_loss_coef=0.1"],
    "inf": ["train.dtype=float16", "train.bias_update_rate=0.01", "train.max_steps=5"],
    # The most state to resume: dropout, a loss scale, a checkpoint in the middle of a log interval.
    "again": [*SAVED, "model.dropout=0.1", "train.dtype=float16", "log.interval=2", "train.loss_spike=skip"],
    # A loss scale that overflows in all steps before the checkpoint: AdamW has made no step yet.
    "early": [*SAVED, "train.dtype=float16", "train.z_loss_coef=200"],
}
ANY = ("dense", "kern", "modern", "biased", "cut", "windows", "triton", "muon")
COMPARED = ("pair", *ANY, "idle", "saved")  # with a run on one rank
CASES = {
    f"{model} {way}": Case(model, way)
    for model, ways in {
        "pair": ["ddp-2"],
        "dense": ["ddp-2", "fsdp-2", "zero2-2"],
        "kern": ["fsdp-2", "fsdp-4"],
        "modern": ["ddp-2", "fsdp-2"],
        "biased": ["fsdp-2", "ddp-4", "hsdp-2x2", "zero2-2"],
        "idle": ["ddp-2", "fsdp-2"],
        "windows": ["fsdp-2"],
        "muon": ["ddp-2", "hsdp-2x2"],
        "inf": ["ddp-2", "fsdp-2"],
    }.items()
    for way in ways
}
CASES["cut ddp-2"] = Case("cut", "ddp-2", ["train.micro_batch_size=4"])
CASES["triton fsdp-2"] = Case("triton", "fsdp-2", ["model.backend=triton"])
for way in ("ddp-2", "fsdp-2"):
    CASES[f"blocks {way}"] = Case("blocks", way)
    CASES[f"recomputed {way}"] = Case("blocks", way, ["train.activation_checkpointing=true"])
RESHARDED = {"fsdp-2": ("ddp-2", "fsdp-4"), "ddp-2": ("zero2-2",)}  # saved under: resumed under
for saved, ways in RESHARDED.items():
    CASES[f"saved {saved}"] = Case("saved", saved, copies=tuple(f"{saved} to {way}" for way in ways))
    CASES |= {f"{saved} to {way}": Case("saved", way) for way in ways}
RESUMED = [("again", "fsdp-2"), ("again", "ddp-4"), ("again", "hsdp-2x2"), ("early", "fsdp-2"), ("muon", "fsdp-2")]
RESUMED += [("again", "zero2-2")]
for model, way in RESUMED:
    CASES[f"{model} {way}"] = Case(model, way, copies=(f"{model} {way} resumed",))
    CASES[f"{model} {way} resumed"] = Case(model, way)


# ---- what a rank does
def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Watch:
    """What a rank sees in the run of a case."""

    def __init__(self, case, rank):
        self.case, self.rank = case, rank
        self.forget()

    def forget(self):
        """Be ready for another run."""
        self.seen = {"weights": [], "gradients": [], "seeds": [], "loads": [], "warm_ups": [], "block_passes": 0}

    @contextmanager
    def patches(self, after_save=lambda saver, step: None):
        """Within this context, runs are seen; `after_save` is called with each save."""

        def save(saver, step, model, *args):
            SAVE(saver, step, model, *args)
            after_save(saver, step)
            full = {key: parallel.full_tensor(p.detach()) for key, p in model.named_parameters()}
            self.seen["parameters"] = {key: p.clone() for key, p in full.items()}
            self.seen["buffers"] = {key: buffer.clone() for key, buffer in model.named_buffers()}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.Saver, "save", save)
            patch.setattr(train_state, "build_optimizer", self.build_optimizer)
            patch.setattr(train, "learning_rate", self.learning_rate)
            patch.setattr(distributed, "peak_flops", lambda device, dtype: PEAK)
            yield

    def build_optimizer(self, model, optim):
        """Add hooks to the model, shun an expert, or make a gradient infinite, then build its optimizer."""
        self.parameters = list(model.parameters())
        model.register_forward_hook(self._after_forward)
        model.blocks[0].ln_1.register_forward_hook(self._after_norm)
        if self.case.model in ("pair", "idle"):
            for block in model.blocks:
                block.mlp.router.selection_bias[3] = -10 - self.rank
        if self.case.model == "inf" and self.rank == 1:
            model.blocks[0].mlp.experts.register_forward_pre_hook(self._before_experts)
        return BUILD(model, optim)

    def learning_rate(self, optim, max_steps, step):
        """Between the seed of a step and its forward pass."""
        self.seen["weights"].append([local(p).detach().clone() for p in self.parameters])
        self.seen["gradients"].append([0 if p.grad is None else local(p.grad).data_ptr() for p in self.parameters])
        self.seen["seeds"].append(torch.initial_seed())
        return RATE(optim, max_steps, step)

    def _after_forward(self, model, args, out):
        if model.training:  # before the first step: the pass that warms up DDP's buckets
            self.seen["loads" if self.seen["weights"] else "warm_ups"].append(out.stats.loads.sum(1))

    def _after_norm(self, *_):
        self.seen["block_passes"] += bool(self.seen["weights"]) and torch.is_grad_enabled()

    def _before_experts(self, experts, args):
        """On the full parameter, which FSDP2 makes anew for every pass."""
        if torch.is_grad_enabled() and len(self.seen["weights"]) == 3:
            experts.w_in.register_hook(self._spoil)

    def _spoil(self, gradient):
        """In step 3 the gradient of expert 0, which is in rank 0's shard."""
        if len(self.seen["weights"]) == 3:
            gradient = gradient.clone()
            gradient[0] = torch.inf
        return gradient


BUILD, RATE, SAVE = train_state.build_optimizer, train.learning_rate, checkpoint.Saver.save


def config_of(folder, name, seed):
    """A case has its own run.dir; the runs that resume from another's checkpoint share its run.name."""
    case = CASES[name]
    ranks, way, _ = WAYS[case.way]
    own = [seed, f"run.dir={(folder / name).as_posix()}", f"train.parallel={way}"]
    return configure.load(folder / "tiny.toml", [*ALL, *MODELS[case.model], *own, *case.own], ranks)


def work(folder, name, seed, rank):
    """Train as the case says; returns what this rank saw."""
    case = CASES[name]
    watch = Watch(case, rank)

    def copy_run(saver, step):
        if step == 3 and case.copies:
            saver.wait()
            for copy in case.copies if rank == 0 else ():
                shutil.copytree(folder / name, folder / copy)

    with watch.patches(copy_run):
        train.train(config_of(folder, name, seed))
    return watch.seen


def be_a_rank(folder, names, seeds):
    """Cases of as many ranks, one after another; each meets in a file of its own."""
    rank = int(os.environ["RANK"])
    for name in names:
        way = WAYS[CASES[name].way]
        os.environ["LOCAL_WORLD_SIZE"] = str(way.ranks_per_node)
        meet_in(folder / f"{name}.store")
        try:
            torch.save(work(folder, name, seeds.get(CASES[name].model, "run.seed=0"), rank), folder / f"{name}.{rank}")
        except Exception:
            (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
            if dist.is_initialized():
                dist.destroy_process_group()


# ---- how the tests start them
class Outcome(NamedTuple):
    lines: list[dict]  # of metrics.jsonl
    reports: list[dict]  # one per rank
    folder: Path  # of the run


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    return write_tiny(tmp_path_factory.mktemp("ranks"), corpus).parent


@pytest.fixture(scope="module")
def alone(folder):
    """`alone(model)`: the override of the seed, and the Outcome of the run on one rank with that seed."""

    @cache
    def alone(model):
        watch = Watch(Case(model, "alone"), 0)

        def make(*overrides):
            watch.forget()
            place = f"run.dir={(folder / f'{model} alone').as_posix()}"
            return configure.load(folder / "tiny.toml", [*ALL, *MODELS[model], *overrides, place])

        with watch.patches():
            seed, lines = run_with_margin(make)
        return seed, Outcome(lines, [watch.seen], folder / f"{model} alone" / seed)

    return alone


@pytest.fixture(scope="module")
def outcome(folder, alone):
    """`outcome(case)`. The first question about a case of several ranks starts all jobs of the integration tests."""

    def start(ranks, names, models):
        seeds = {model: alone(model)[0] for model in models}
        ended = [rank.wait(1200) for rank in start_ranks(ranks, be_a_rank, folder, names, seeds)]
        assert all(code == 0 for code, _ in ended), ended

    @cache
    def start_pair():
        start(2, ["pair ddp-2"], ["pair"])

    @cache
    def start_others():
        for ranks in (2, 4):  # runs on 4 resume from checkpoints of 2
            names = [name for name, case in CASES.items() if WAYS[case.way].ranks == ranks and case.model != "pair"]
            start(ranks, names, COMPARED[1:])

    def outcome(name):
        start_pair() if name == "pair ddp-2" else start_others()
        errors = [f"rank {path.name}: {path.read_text()}" for path in sorted(folder.glob(f"{name}.*.error"))]
        assert not errors, "\n".join(errors)
        reports = [torch.load(folder / f"{name}.{rank}") for rank in range(WAYS[CASES[name].way].ranks)]
        return Outcome(read_metrics(folder / name / "tiny/metrics.jsonl", ARRAYS), reports, folder / name / "tiny")

    return outcome


def assert_same_run(one, other, after=-1, keys=("train/loss", "val/loss", "optim/grad_norm")):
    """The same lines after step `after` and the same weights at the end, up to rounding; the same loads and biases."""
    a, b = ([line for line in run.lines if line["step"] > after] for run in (one, other))
    assert column(a, "step") == column(b, "step")  # rank 0 alone writes
    assert column(a, "router/loads") == column(b, "router/loads") and column(a, "val/loads") == column(b, "val/loads")
    assert_same_columns(a, b, *keys)
    (a, a_buffers), (b, b_buffers) = ((run.reports[0]["parameters"], run.reports[0]["buffers"]) for run in (one, other))
    for key in b:  # AdamW's steps are as large for gradients that are mostly rounding
        assert_near(a[key], b[key], tolerance(torch.float32, 257, roundings=40), key)
    for key in b_buffers:
        assert torch.equal(a_buffers[key], b_buffers[key]), key


def assert_same_on_all_ranks(outcome):
    for report in outcome.reports:
        for part in ("parameters", "buffers"):
            assert all(torch.equal(report[part][key], outcome.reports[0][part][key]) for key in report[part])


# ---- two ranks under DDP
@pytest.mark.numerics
def test_pair_trains_like_one_rank(outcome, alone):
    """One expert is idle, and its selection bias differs: no rank's buffers go to the others."""
    ran = outcome("pair ddp-2")
    assert_same_run(ran, alone("pair")[1])
    for rank, report in enumerate(ran.reports):
        assert report["buffers"]["blocks.1.mlp.router.selection_bias"].tolist() == [0, 0, 0, -10 - rank, 0, 0, 0, 0]
        assert len(report["loads"]) == 3 * 2 and len(report["warm_ups"]) == 1  # 3 steps of 2 micro-batches
        assert not any(loads[:, 3].any() for loads in report["loads"])
        _, second, third = report["gradients"]
        assert all(second) and second == third  # in DDP's buckets, so no rank ever holds them twice


def test_pair_draws_different_dropout(outcome):
    """Otherwise rows of several ranks would share a mask."""
    seeds = [seed for report in outcome("pair ddp-2").reports for seed in report["seeds"]]
    assert len(seeds) == len(set(seeds)) == 2 * 3  # one per rank and step


def test_pair_reports_the_mfu_of_two_devices(outcome, folder):
    flops = flops_per_token(config_of(folder, "pair ddp-2", "run.seed=0").model)
    for line in [line for line in outcome("pair ddp-2").lines if "perf/mfu" in line]:
        assert line["perf/mfu"] == pytest.approx(flops * line["perf/tokens_per_sec"] / (2 * PEAK))


def test_gradients_are_averaged_in_the_last_micro_batch_alone():
    runner = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    for last in (False, True):
        parallel.set_gradient_sync(runner, "ddp", last)
        assert runner.require_backward_grad_sync is last


# ---- equal runs
@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.model in ANY])
def test_same_run_on_any_number_of_ranks(outcome, alone, name):
    """Also with unequal numbers of validation windows, though a forward pass gathers weights from all ranks."""
    ran = outcome(name)
    assert_same_run(ran, alone(CASES[name].model)[1])
    assert_same_on_all_ranks(ran)
    if CASES[name].model in ("biased", "cut"):
        assert_same_columns(ran.lines, alone(CASES[name].model)[1].lines, "train/aux_loss")
    if CASES[name].model == "biased":
        assert ran.reports[0]["buffers"]["blocks.1.mlp.router.selection_bias"].any()
    if CASES[name].model == "kern":
        assert_same_columns(ran.lines, alone("kern")[1].lines, "router/gamma")


@pytest.mark.integration
@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2"])
def test_activation_checkpointing_changes_nothing(outcome, way):
    """Bit for bit, dropout and all: what is computed once more draws the same random numbers."""
    kept, again = outcome(f"blocks {way}"), outcome(f"recomputed {way}")
    assert untimed(again.lines) == untimed(kept.lines)
    for key, parameter in kept.reports[0]["parameters"].items():
        assert torch.equal(parameter, again.reports[0]["parameters"][key])
    assert again.reports[0]["block_passes"] == 2 * kept.reports[0]["block_passes"] > 0


@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2"])
def test_ranks_may_lack_experts(outcome, alone, way):
    ran = outcome(f"idle {way}")
    mine, other = (torch.stack(report["loads"]) for report in ran.reports)  # (passes, L, E)
    for lacks, has in ((mine, other), (other, mine)):
        assert ((lacks == 0) & (has > 0)).any(-1).any()
    for rank, report in enumerate(ran.reports):
        assert report["buffers"]["blocks.0.mlp.router.selection_bias"][3] == -10 - rank
    assert_same_run(ran, alone("idle")[1])


# ---- steps that are not finite
@pytest.mark.integration
@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2"])
def test_infinite_gradient_on_one_rank_is_skipped_on_all(outcome, way):
    """Under FSDP2 it is one expert, in the shard of one rank; the others must learn of it."""
    ran = outcome(f"inf {way}")
    assert column(ran.lines, "optim/skipped_steps") == [0, 0, 1, 1, 1]
    assert column(ran.lines, "optim/loss_scale") == [65536, 65536, 32768, 32768, 32768]
    for report in ran.reports:
        changed = [
            any(not torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel())
            for before, after in zip(report["weights"], report["weights"][1:], strict=False)
        ]
        assert changed == [True, True, False, True]
        assert all(parameter.isfinite().all() for parameter in report["parameters"].values())
    assert_same_on_all_ranks(ran)  # nor do loads of the skipped step count on some


# ---- checkpoints
@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize("saved, resumed", [(saved, way) for saved, ways in RESHARDED.items() for way in ways])
def test_checkpoint_resumes_on_other_ranks(outcome, alone, saved, resumed):
    part = outcome(f"{saved} to {resumed}")
    assert len(part.reports[0]["weights"]) == 3  # of 6 steps
    assert_same_run(part, alone("saved")[1], after=3)
    assert part.reports[0]["buffers"]["blocks.0.mlp.router.selection_bias"].any()


@pytest.mark.integration
@pytest.mark.parametrize("model, way", RESUMED)
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(outcome, model, way):
    """Also from a checkpoint before AdamW's first update: float16 may skip all steps before it."""
    undisturbed, part = outcome(f"{model} {way}"), outcome(f"{model} {way} resumed")
    assert len(part.reports[0]["weights"]) == 3 < len(undisturbed.reports[0]["weights"])
    assert untimed(part.lines) == untimed(undisturbed.lines)
    for mine, others in zip(part.reports, undisturbed.reports, strict=True):
        for kind in ("parameters", "buffers"):
            assert all(torch.equal(value, others[kind][key]) for key, value in mine[kind].items())
    if model == "early":
        skipped = column(undisturbed.lines, "optim/skipped_steps")
        assert skipped[2] == 3 and skipped[-1] < 6


@pytest.mark.integration
def test_sharded_checkpoint_is_read_by_one_process(outcome):
    ran = outcome("saved fsdp-2")
    model, _, step, *_ = load_model(ran.folder)
    assert step == 6
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, ran.reports[0]["parameters"][key])
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, ran.reports[0]["buffers"][key])


def test_ranks_that_do_not_divide_the_batch_are_refused(tiny_file):
    with pytest.raises(ConfigError, match="or start 1, 2, 4, 8 ranks") as caught:
        configure.load(tiny_file, ["train.micro_batch_size=1"], 3)
    assert "1 times 3 rank(s) = 3" in str(caught.value) and "--train.batch_size=9" in str(caught.value)
    for ranks in (1, 2, 4, 8):
        configure.load(tiny_file, ["train.micro_batch_size=1"], ranks)


# ---- jobs of torchrun: ranks that end, and nodes
def be_ended(folder, how):
    """A rank: DDP, or FSDP2 that saves all the time. Before step 3 rank 1 sends itself the signal `how`."""
    how, _, saving = how.partition(" ")

    def learning_rate(optim, max_steps, step):
        if step == 3 and os.environ["RANK"] == "1":
            print("rank 1 ends at step 3", flush=True)
            os.kill(os.getpid(), getattr(signal, how))
        return RATE(optim, max_steps, step)

    train.learning_rate = learning_rate
    own = [f"--run.dir={(folder / (how + saving)).as_posix()}", "--train.micro_batch_size=1"]
    own += ["--train.timeout_minutes=0.5"]
    own += ["--train.parallel=fsdp", "--train.checkpoint_interval=1"] if saving else []
    sys.exit(train.main([str(folder / "tiny.toml"), *own]))


@pytest.fixture(scope="module")
def jobs(folder, alone):
    """{name: Job} of torchrun: ranks that are ended, and two nodes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    two = ["--standalone", "--nproc_per_node=2", __file__, folder]
    nodes = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=two"]
    nodes += [f"--rdzv_endpoint=localhost:{port}", "train.py", folder / "tiny.toml"]
    nodes += [f"--run.dir={(folder / 'nodes').as_posix()}", "--train.parallel=fsdp"]
    nodes += [f"--{key}" for key in [*ALL, *MODELS["kern"], alone("kern")[0]]]
    ended = {how: [*two, how] for how in ("SIGKILL", "SIGSTOP saving")}
    return run_torchrun(ended | {"node 0": nodes, "node 1": nodes})


@pytest.mark.integration
@pytest.mark.numerics
def test_two_agents_of_torchrun_train_like_one_process(jobs, folder, alone):
    for name in ("node 0", "node 1"):
        assert jobs[name].code == 0, jobs[name].output
    assert "fsdp, about" in jobs["node 0"].output + jobs["node 1"].output
    lines = read_metrics(folder / "nodes/tiny/metrics.jsonl")
    assert_same_columns(lines, alone("kern")[1].lines, "train/loss", "val/loss", "optim/grad_norm")


@pytest.mark.integration
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP saving"])
def test_job_ends_when_a_rank_does(jobs, name):
    job = jobs[name]
    assert job.code != 0  # and it did end
    assert "at step 3" in job.output  # it had begun
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", job.output), job.output
    if name != "SIGKILL":  # rank 0 gave up waiting; torchrun then killed the other, which does not end when asked to
        assert "Timed out waiting 30000ms" in job.output


if __name__ == "__main__":
    be_ended(Path(sys.argv[1]), sys.argv[2])
