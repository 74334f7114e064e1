"""train.expert_parallel: ranks train as under DDP, two or four of which share experts.

Jobs of four and of eight ranks (CPU, gloo) go through all cases, in float64: rounding, which
differs, then changes no choice of an expert. Each rank leaves a report per case.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import write_tiny
from numerics import assert_near
from runs import be_killed, meet_in, run_job, start_ranks, untimed, wait_for_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import configure
import train
from configure import ConfigError
from eval.trained import load_model
from hf.export import export
from model import GPT, Experts
from runtime import checkpoint, distributed, memory, updates
from runtime import state as train_state
from runtime.distributed import Ranks
from runtime.memory import parameter_shapes
from runtime.metrics import ARRAYS, read_metrics
from runtime.parallel import full_tensor, local_part

LIMIT = 1e-5  # of the issue; the reduced sums of FSDP2 are float32
SAVED_STEP = 10  # of 20
ALL = [
    "train.max_steps=20",
    "train.micro_batch_size=2",
    "train.checkpoint_interval=10",
    "train.keep_checkpoints=9",
    "eval.interval=10",
    "eval.windows=6",  # two ranks have two windows, two have one
]
MODELS = {
    "kern": [
        "model.router=kern",
        "train.micro_batch_size=1",  # two in a step
        "train.balance_loss_coef=0.1",
        "train.ema_decay=0.75",
        "data.document_mask=true",
    ],
    "biased": [
        "model.router=sigmoid-renorm",
        "train.bias_update_rate=0.01",
        "model.n_hash_layer=1",
        "model.n_shared_expert=1",
        "model.n_kv_head=1",
        "model.gated=true",
        "model.activation=silu",
        "optim.expert_out_lr_ratio=2.0",
    ],
    "quantile": ["model.router=sigmoid", "train.bias_update=quantile"],
    "muon": [
        "model.router=softmax",
        "model.router_groups=4",
        "model.router_group_k=2",
        "optim.name=muon",
        "optim.grad_clip=0.3",
        "train.batch_size=16",  # on eight ranks, too, two micro-batches in a step
        "train.activation_checkpointing=true",
    ],
    # by dynamo and AOT autograd, without inductor; compared with an eager run
    "compiled": ["model.router=kern", "model.n_shared_expert=1"],
    "one": ["model.router=softmax-renorm"],  # the same two experts get all tokens
    "single": ["model.router=softmax", "model.top_k=1"],  # one expert gets all
    "inf": ["model.router=softmax"],  # an infinite gradient of one expert in step 3
}
# Rank 1 cannot compile sharded blocks: all ranks compile none, and nobody waits for it.
MODELS["uncompilable"] = MODELS["compiled"]


class Way(NamedTuple):
    parallel: str
    local_size: int  # ranks of a node
    n: int  # train.expert_parallel
    n_rank: int = 4


WAYS = {
    "ddp 1": Way("ddp", 4, 1),
    "zero2 1": Way("zero2", 4, 1),
    "fsdp 1": Way("fsdp", 4, 1),
    "hsdp 1": Way("hsdp", 2, 1),
    "ddp 2": Way("ddp", 4, 2),
    "ddp 4": Way("ddp", 4, 4),
    "zero2 2": Way("zero2", 4, 2),
    "fsdp 2": Way("fsdp", 4, 2),
    "fsdp 4": Way("fsdp", 4, 4),
    "hsdp 2": Way("hsdp", 2, 2),
    # the least with copies on two nodes, parts of FSDP2 within a node, and experts' ranks
    "hsdp 2 of 4": Way("hsdp", 4, 2, n_rank=8),
}
MOST = ["ddp 2", "ddp 4", "fsdp 2"]
COMPARED = {  # with "ddp 1"
    "kern": [*MOST, "zero2 2", "hsdp 2", "fsdp 4", "hsdp 2 of 4"],
    "biased": MOST,
    "quantile": ["ddp 2", "hsdp 2"],
    "muon": ["ddp 2", "fsdp 2", "hsdp 2 of 4"],
    "compiled": ["zero2 1", "fsdp 1", "hsdp 1", "fsdp 2"],
    "uncompilable": ["fsdp 2"],
    "one": ["ddp 4"],
    "single": ["ddp 2", "fsdp 4"],
    "inf": ["ddp 4", "fsdp 2"],
}
RESUMED = {  # the way that saved: the ways that resume
    "ddp 4": ["ddp 4", "ddp 1", "fsdp 2", "hsdp 2 of 4"],
    "fsdp 2": ["fsdp 2", "ddp 4"],
    "ddp 1": ["ddp 4"],
    "hsdp 2 of 4": ["hsdp 2 of 4", "ddp 2"],
}


class Case(NamedTuple):
    model: str
    way: str
    saved: str = ""  # the way that saved the checkpoint that it resumes from

    @property
    def name(self) -> str:
        return f"{self.model} {self.way}" + (f" from {self.saved}" if self.saved else "")


CASES = []
for model, compared in COMPARED.items():
    CASES += [Case(model, way) for way in ["ddp 1", *compared]]
for saved, resumed in RESUMED.items():
    CASES += [Case("kern", way, saved) for way in resumed]
# A checkpoint of eight ranks is resumed on four, and the other way round. A case that tries to
# compile has its own processes, as a run has: DTensor's caches take meshes of equal ranks for one,
# and so give an earlier run's, whose groups' names are others after a trial.
JOBS: list[list[Case]] = [[], [], []]
RESUMING = (1, 2)  # jobs that need checkpoints of the one before
for case in CASES:
    if case.model in ("compiled", "uncompilable") and case.way != "ddp 1":
        JOBS.append([case])
    elif WAYS[case.way].n_rank == 8:
        JOBS[1].append(case)
    else:
        JOBS[2 if case.saved == "hsdp 2 of 4" else 0].append(case)


# ---- what a rank does
def config_of(folder: Path, case: Case) -> configure.Config:
    way = WAYS[case.way]
    own = [
        *ALL,
        *MODELS[case.model],
        f"run.dir={(folder / case.name).as_posix()}",
        f"train.parallel={way.parallel}",
        f"train.expert_parallel={way.n}",
    ]
    if way.n_rank == 8:
        own.append("train.micro_batch_size=1")
    if case.way == "ddp 1":
        own.append("train.compile=off")
    return configure.load(folder / "tiny.toml", own, way.n_rank)


BUILD, DISTRIBUTE = train_state.build_optimizer, train_state.distribute
LERP = Tensor.lerp_
STEP, SAVE = updates.Updates.step, checkpoint.Saver.save


class Watch:
    """What a rank sees in the run of a case, which computes in float64 throughout."""

    def __init__(self, folder: Path, case: Case, rank: int) -> None:
        self.folder, self.case, self.rank = folder, case, rank
        self.report: dict[str, Any] = {"gradients": []}

    @contextmanager
    def patches(self) -> Iterator[None]:
        """Within this context the run is seen."""

        def step(of_run: updates.Updates, *args: Any) -> Tensor:
            addresses = {self.names[p]: local_part(p.grad).data_ptr() for p in self.names}
            self.report["unaligned"] = [name for name, at in addresses.items() if at % 16]
            self.report["gradients"].append(copy_full({p: p.grad for p in self.names}, self.names))
            return STEP(of_run, *args)

        def save(saver: checkpoint.Saver, number: int, model: GPT, *args: Any) -> None:
            SAVE(saver, number, model, *args)
            self.report["parameters"] = copy_full({p: p for p in self.names}, self.names)
            self.report["buffers"] = {name: value.clone() for name, value in model.named_buffers()}
            if number == SAVED_STEP and not self.case.saved:
                saver.wait()
                self.copy_run()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_state, "distribute", distribute_in_float64)
            patch.setattr(train_state, "build_optimizer", self.build_optimizer)
            patch.setattr(updates.Updates, "step", step)
            patch.setattr(checkpoint.Saver, "save", save)
            if self.case.model in ("compiled", "uncompilable"):  # as on CUDA
                patch.setattr(distributed, "pick_compile", lambda name, device: name == "auto")
            patch.setattr(nn.Module, "compile", lambda module: self.compile(module))
            # the mean of weights (train.ema_decay) has a factor in float32
            patch.setattr(Tensor, "lerp_", lambda a, b, factor: LERP(a, b, factor.double()))
            torch.set_default_dtype(torch.float64)
            yield

    def build_optimizer(self, model: GPT, *args: Any) -> Any:
        """Note the parameters; choose the experts of all tokens, or spoil a gradient."""
        self.names = {p: name for name, p in model.named_parameters()}
        self.report["compiles"] = model.blocks[0]._compiled_call_impl is not None
        self.report["held"] = sum(local_part(p).numel() for p in model.parameters())
        for block in model.blocks:
            if self.case.model == "one":
                block.mlp.router.selection_bias[[3, 6]] = 10.0
            if self.case.model == "single":
                block.mlp.router.selection_bias[3] = 10.0
            if self.case.model == "inf" and self.rank == 1:
                block.mlp.experts.register_forward_pre_hook(self.before_experts)
        return BUILD(model, *args)

    def compile(self, module: nn.Module) -> None:
        """In place of `Module.compile`, by dynamo and AOT autograd without inductor."""

        def compiled_call(*args: Any) -> Any:
            if self.case.model == "uncompilable" and self.rank == 1:
                assert not isinstance(module, FSDPModule), "a sharded block"
            return compiled(*args)

        compiled = torch.compile(module._call_impl, backend="aot_eager")
        module._compiled_call_impl = compiled_call

    def before_experts(self, experts: Experts, args: Any) -> None:
        if torch.is_grad_enabled():
            experts.w_in.register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        """Make the gradient of this rank's first expert infinite in step 3."""
        if len(self.report["gradients"]) != 2:
            return gradient
        gradient = gradient.clone()
        local_part(gradient)[0] = torch.inf
        return gradient

    def copy_run(self) -> None:
        """Copy the run for the cases that resume from its checkpoint, as if it were killed now."""
        ways = RESUMED.get(self.case.way, []) if self.case.model == "kern" else []
        for way in ways if self.rank == 0 else []:
            resumed = Case(self.case.model, way, self.case.way)
            shutil.copytree(self.folder / self.case.name, self.folder / resumed.name)


def copy_full(tensors: dict[Tensor, Any], names: dict[Tensor, str]) -> dict[str, Tensor]:
    """Copies of full tensors by the names of their parameters."""
    return {names[p]: full_tensor(value.detach()).clone() for p, value in tensors.items()}


def distribute_in_float64(
    model: GPT, parallel: str, ranks: Ranks, dtype: torch.dtype, **options: Any
) -> nn.Module:
    return DISTRIBUTE(model, parallel, ranks, torch.float64, **options)


def be_a_rank(folder: Path, cases: list[Case]) -> None:
    """Go through the cases; each meets in a file of its own."""
    rank = int(os.environ["RANK"])
    for case in cases:
        os.environ["LOCAL_WORLD_SIZE"] = str(WAYS[case.way].local_size)
        meet_in(folder / f"{case.name}.store")
        print("case:", case.name, flush=True)
        watch = Watch(folder, case, rank)
        with watch.patches():
            train.train(config_of(folder, case))
        torch.save(watch.report, folder / f"{case.name}.{rank}")


def train_until_killed(folder: Path, case: Case) -> None:
    """Train, and be killed in step 13, when the checkpoint of step 10 is complete."""
    meet_in(folder / f"{case.name}.killed")
    saved = folder / case.name / "tiny/checkpoints" / f"step_{SAVED_STEP:08d}"
    watch = Watch(folder, case, int(os.environ["RANK"]))

    def step(of_run: updates.Updates, *args: Any) -> Tensor:
        watch.report["gradients"].append(None)
        while len(watch.report["gradients"]) == 13:
            time.sleep(0.1)
            if saved.exists():
                be_killed()
        return STEP(of_run, *args)

    with watch.patches(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.Updates, "step", step)
        train.train(config_of(folder, case))


# ---- the reports
@pytest.fixture(scope="module")
def outcome(tmp_path_factory, corpus):
    """`outcome(case)`: lines of metrics.jsonl, and the reports of all ranks.

    The first question about a case starts its job.
    """
    folder = write_tiny(tmp_path_factory.mktemp("ranks"), corpus).parent

    @cache
    def find_problem(number: int) -> str:
        """What ended the job, or the one whose checkpoints it needs; "" if nothing did."""
        if number in RESUMING and (problem := find_problem(number - 1)):
            return problem
        cases = JOBS[number]
        return run_job(WAYS[cases[0].way].n_rank, be_a_rank, folder, cases)

    @cache
    def outcome(case: Case) -> tuple[list[dict], list[dict]]:
        problems = [find_problem(number) for number, cases in enumerate(JOBS) if case in cases]
        reports = [folder / f"{case.name}.{rank}" for rank in range(WAYS[case.way].n_rank)]
        assert all(report.exists() for report in reports), "\n".join(problems)
        lines = read_metrics(folder / case.name / "tiny/metrics.jsonl", ARRAYS)
        return lines, [torch.load(report) for report in reports]

    outcome.folder = folder
    outcome.find_problem = find_problem
    return outcome


def assert_same_run(outcome, case: Case, wanted: Case) -> None:
    """Equal losses, loads and gradients of each step after the first saved one, weights and β."""
    lines, reports = outcome(case)
    wanted_lines, wanted_reports = outcome(wanted)
    assert lines[-1]["step"] == 20 and len(lines) == len(wanted_lines)
    for line, wanted_line in zip(lines, wanted_lines, strict=True):
        by_rank = {key for key in line if key.startswith("router/rank_")}  # not under DDP
        assert line.keys() - by_rank == wanted_line.keys() - by_rank
        for key in line.keys() & wanted_line.keys() - {"time"}:
            if not key.startswith("perf/"):
                value = torch.tensor(line[key], dtype=torch.float64)
                wanted_value = torch.tensor(wanted_line[key], dtype=torch.float64)
                torch.testing.assert_close(value, wanted_value, rtol=LIMIT, atol=1e-8, msg=key)
    for report in reports:
        wanted_report = wanted_reports[0]
        compared = wanted_report["gradients"][-len(report["gradients"]) :]
        for gradients, wanted_gradients in zip(report["gradients"], compared, strict=True):
            for name, gradient in gradients.items():
                if wanted_gradients[name].isfinite().all():
                    assert_near(gradient, wanted_gradients[name], LIMIT, name)
                else:
                    assert not gradient.isfinite().all(), name
        for part in ("parameters", "buffers"):
            for name, value in report[part].items():
                torch.testing.assert_close(value, wanted_report[part][name], rtol=LIMIT, atol=1e-7)


# ---- tests
@pytest.mark.integration
@pytest.mark.parametrize("number", range(len(JOBS)))
def test_ranks_end_without_errors(outcome, number):
    problem = outcome.find_problem(number)
    assert not problem, problem


@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.saved and case.way != "ddp 1"], ids=lambda c: c.name
)
def test_same_run_as_under_ddp(outcome, case):
    assert_same_run(outcome, case, Case(case.model, "ddp 1"))


@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize("case", [case for case in CASES if case.saved], ids=lambda c: c.name)
def test_checkpoint_resumes_with_another_n(outcome, case):
    assert len(outcome(case)[1][0]["gradients"]) == 10  # of 20 steps
    assert_same_run(outcome, case, Case(case.model, "ddp 1"))


@pytest.mark.integration
@pytest.mark.numerics
def test_killed_run_resumes(outcome):
    case = Case("kern", "ddp 4", "killed")
    killed = start_ranks(4, train_until_killed, outcome.folder, case)
    assert all(rank.wait(300)[0] != 0 for rank in killed)
    resumed = start_ranks(4, be_a_rank, outcome.folder, [case])
    wait_for_ranks(resumed, 300)
    assert len(outcome(case)[1][0]["gradients"]) == 10
    assert_same_run(outcome, case, Case("kern", "ddp 4"))


@pytest.mark.integration
@pytest.mark.parametrize("case", [Case("biased", "ddp 4"), Case("biased", "fsdp 2")], ids=str)
def test_checkpoint_is_loaded_and_exported_as_any(outcome, tmp_path, case):
    run = outcome.folder / case.name / "tiny"
    report = outcome(case)[1][0]
    weights = load_model(run).model.state_dict()
    for name, value in report["parameters"].items():
        torch.testing.assert_close(weights[name], value.float(), rtol=0, atol=0, msg=name)
    assert export.main([str(run), str(tmp_path / "exported")]) == 0  # it compares logits


@pytest.mark.integration
@pytest.mark.parametrize("way", ["ddp 4", "fsdp 2"])
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(outcome, way):
    lines, reports = outcome(Case("kern", way, way))
    wanted_lines, wanted_reports = outcome(Case("kern", way))
    assert untimed(lines) == untimed(wanted_lines)
    for report, wanted_report in zip(reports, wanted_reports, strict=True):
        for name, value in report["parameters"].items():
            assert torch.equal(value, wanted_report["parameters"][name]), name


@pytest.mark.integration
def test_gradients_of_ddp_are_aligned_although_gamma_has_one_element(outcome):
    """AdamW's vectorized kernels need 16 bytes; DDP keeps gradients one after the other."""
    for report in outcome(Case("kern", "ddp 1"))[1]:
        assert any(name.endswith("gamma") for name in report["gradients"][0])
        assert not report["unaligned"]


@pytest.mark.integration
def test_one_rank_may_get_all_tokens(outcome):
    """Two experts get all tokens, and have one rank of four each: two ranks get none."""
    lines, _ = outcome(Case("one", "ddp 4"))
    for line in lines[1:]:
        for loads in line.get("router/loads", []):
            assert loads[3] == loads[6] == 8 * 32 and sum(loads) == 2 * 8 * 32


@pytest.mark.integration
def test_infinite_gradient_of_one_expert_is_skipped_on_all_ranks(outcome):
    for way in ("ddp 4", "fsdp 2"):
        lines, _ = outcome(Case("inf", way))
        skipped = [line["optim/skipped_steps"] for line in lines if "optim/skipped_steps" in line]
        assert skipped[1:4] == [0, 1, 1]


@pytest.mark.integration
@pytest.mark.parametrize("way", ["ddp 2", "ddp 4", "zero2 2", "fsdp 4", "hsdp 2", "hsdp 2 of 4"])
def test_weights_are_as_planned(outcome, tmp_path, corpus, way):
    case = Case("kern", way)
    config = config_of(write_tiny(tmp_path, corpus).parent, case)
    parallel, local_size, _, n_rank = WAYS[way]
    shards = memory.list_parallelisms(n_rank, local_size)[parallel]
    plan = memory.estimate_memory(config, parameter_shapes(config.model), parallel, shards)
    assert plan.weights == 4 * max(report["held"] for report in outcome(case)[1])


# ---- what is refused
def test_experts_that_do_not_divide_are_refused(tiny):
    with pytest.raises(
        ConfigError, match="n_expert = 8 .* = 3 ranks; set --train.expert_parallel=1"
    ):
        tiny("train.expert_parallel=3")


@pytest.mark.parametrize(
    ("own", "world_size", "local_size", "problem"),
    [
        ("ddp", 2, 2, "= 4 with 2 rank.* do not divide the ranks; set --train.expert_parallel=2"),
        ("ddp", 1, 1, "= 4 with 1 rank.* set --train.expert_parallel=1, or start 4 ranks"),
        ("hsdp", 8, 2, "ranks of one node share the experts; set --train.expert_parallel=2"),
        ("fsdp", 16, 8, "over 16 ranks, which must divide model.n_expert = 8; set --train.para"),
        ("hsdp", 2, 2, "= hsdp is not possible with 2 rank.* to one of ddp, zero2, fsdp, or"),
        ("fsdp", 1, 1, "= fsdp is not possible with 1 rank.* to one of ddp, or start more ranks"),
        ("hsdp", 24, 12, "over 12 ranks, which must divide model.n_expert = 8; set --train.para"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(tiny, own, world_size, local_size, problem):
    config = tiny(f"train.parallel={own}", "train.expert_parallel=4")
    assert re.search(problem, memory.describe_rank_problem(config, world_size, local_size))
    dense = tiny(f"train.parallel={own}", "model.router=dense", "train.expert_parallel=3")
    if own in memory.list_parallelisms(world_size, local_size):  # a sweep may have "dense"
        assert memory.describe_rank_problem(dense, world_size, local_size) == ""
