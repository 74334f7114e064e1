"""Many ranks: the same run on any number of them, under DDP, FSDP2, ZeRO-2 and HSDP; ranks that
die.

Jobs of 2 and of 4 ranks (CPU, gloo) go through the cases of ranks.py, and each leaves a report per
case and rank, which the tests read. Run as a program, this file is a rank that is ended.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import ranks
import torch
from conftest import write_tiny
from numerics import assert_near, tolerance
from ranks import ANY, CASES, COMPARED, PEAK, RATE, RESHARDED, RESUMED, WAYS
from runs import (
    ALONE,
    assert_same_columns,
    column,
    meet_in,
    run,
    run_job,
    run_torchrun,
    run_with_margin,
    start_ranks,
    untimed,
)

import configure
import train
from data.loader import Loader
from runtime import checkpoint, preflight
from runtime.memory import flops_per_token
from runtime.metrics import ARRAYS, read_metrics


# ---- how the tests start them
class Outcome(NamedTuple):
    lines: list[dict]  # of metrics.jsonl
    reports: list[dict]  # one per rank
    folder: Path  # of the run


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    """Holds tiny.toml, and a run whose weights the cases of "given" start from."""
    file = write_tiny(tmp_path_factory.mktemp("ranks"), corpus)
    run(configure.load(file, ["model.router=softmax", f"run.dir={file.parent / 'start'}"]))
    return file.parent


@pytest.fixture(scope="module")
def alone(folder):
    """`alone(model)`: the override of the seed, and the Outcome of the run on one rank with that
    seed.
    """

    @cache
    def alone(model):
        watch = ranks.Watch(ranks.Case(model, "alone"), 0)

        def make(*overrides):
            watch.forget()
            place = f"run.dir={(folder / f'{model} alone').as_posix()}"
            own = ranks.overrides_of(model, folder)
            return configure.load(folder / "tiny.toml", [*own, *overrides, place])

        with watch.patches():
            seed, lines = run_with_margin(make)
        return seed, Outcome(lines, [watch.seen], folder / f"{model} alone" / seed)

    return alone


@pytest.fixture(scope="module")
def outcome(folder, alone):
    """`outcome(case)`.

    The first question about a case of several ranks starts all jobs of the integration tests.
    """

    def start(count, names, models):
        """What ended the job; "" if nothing did."""
        seeds = {model: alone(model)[0] for model in models}
        return run_job(count, ranks.be_a_rank, folder, names, seeds)

    @cache
    def start_pair():
        return start(2, ["pair ddp-2"], ["pair"])

    @cache
    def start_others():
        problem = ""
        for count in (2, 4):  # runs on 4 resume from checkpoints of 2
            names = [
                name
                for name, case in CASES.items()
                if WAYS[case.way].ranks == count and case.model != "pair"
            ]
            problem = problem or start(count, names, COMPARED[1:])
        return problem

    def outcome(name):
        problem = start_pair() if name == "pair ddp-2" else start_others()
        reports = [folder / f"{name}.{rank}" for rank in range(WAYS[CASES[name].way].ranks)]
        assert all(report.exists() for report in reports), problem
        return Outcome(
            read_metrics(folder / name / "tiny/metrics.jsonl", ARRAYS),
            [torch.load(report) for report in reports],
            folder / name / "tiny",
        )

    outcome.start_pair = start_pair
    outcome.start_others = start_others
    return outcome


def assert_same_run(one, other, after=-1, keys=("train/loss", "val/loss", "optim/grad_norm")):
    """The same lines after step `after` and the same weights at the end, up to rounding; the same
    loads and biases.
    """
    a, b = ([line for line in run.lines if line["step"] > after] for run in (one, other))
    assert column(a, "step") == column(b, "step")  # rank 0 alone writes
    assert column(a, "router/loads") == column(b, "router/loads") and column(
        a, "val/loads"
    ) == column(b, "val/loads")
    assert_same_columns(a, b, *keys)
    (a, a_buffers), (b, b_buffers) = (
        (run.reports[0]["parameters"], run.reports[0]["buffers"]) for run in (one, other)
    )
    for key in b:  # AdamW's steps are as large for gradients that are mostly rounding
        assert_near(a[key], b[key], tolerance(torch.float32, 257, roundings=40), key)
    for key in b_buffers:
        assert torch.equal(a_buffers[key], b_buffers[key]), key


def assert_same_bits(reports, others):
    """Parameters and buffers of each rank, and of each rank of another run."""
    for mine, other in zip(reports, others, strict=True):
        for part in ("parameters", "buffers"):
            assert all(torch.equal(value, other[part][key]) for key, value in mine[part].items())


# ---- two ranks under DDP
def test_the_pair_ends_without_errors(outcome):
    problem = outcome.start_pair()
    assert not problem, problem


@pytest.mark.numerics
def test_pair_trains_like_one_rank(outcome, alone, folder):
    """One expert is idle, and its selection bias differs: no rank's buffers go to the others."""
    ran = outcome("pair ddp-2")
    assert_same_run(ran, alone("pair")[1])
    for rank, report in enumerate(ran.reports):
        assert report["buffers"]["blocks.1.mlp.router.selection_bias"].tolist() == [
            0,
            0,
            0,
            -10 - rank,
            0,
            0,
            0,
            0,
        ]
    assert not any(layer[3] for loads in column(ran.lines, "router/loads") for layer in loads)
    seeds = [seed for report in ran.reports for seed in report["seeds"]]
    # rows of several ranks do not share a mask of dropout
    assert len(seeds) == len(set(seeds)) == 2 * 3
    flops = flops_per_token(ranks.config_of(folder, "pair ddp-2", "run.seed=0").model)
    timed = [line for line in ran.lines if "perf/mfu" in line]
    assert len(timed) == 3
    for line in timed:  # of two devices; 8 rows of 32 tokens a step, over both ranks
        assert line["perf/mfu"] == pytest.approx(flops * line["perf/tokens_per_sec"] / (2 * PEAK))
        assert line["perf/tokens_per_sec"] == pytest.approx(8 * 32 * 1000 / line["perf/step_ms"])


# ---- equal runs
@pytest.mark.integration
def test_ranks_end_without_errors(outcome):
    problem = outcome.start_others()
    assert not problem, problem


@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.model in ANY])
def test_same_run_on_any_number_of_ranks(outcome, alone, name):
    """Also with unequal numbers of validation windows, though a forward pass gathers weights from
    all ranks.
    """
    ran = outcome(name)
    assert_same_run(ran, alone(CASES[name].model)[1])
    assert_same_bits(ran.reports, ran.reports[:1] * len(ran.reports))
    if CASES[name].model in ("biased", "cut"):
        assert_same_columns(ran.lines, alone(CASES[name].model)[1].lines, "train/aux_loss")
    if CASES[name].model in ("biased", "quantile"):
        assert ran.reports[0]["buffers"]["blocks.1.mlp.router.selection_bias"].any()
    if CASES[name].model == "kern":
        names = ["router/gamma", "val/gate_norm", "val/gate_sum", "val/balance_loss"]
        assert_same_columns(ran.lines, alone("kern")[1].lines, *names)
    if CASES[name].model == "dense":  # with masks, and a mean of the weights
        assert_same_columns(ran.lines, alone("dense")[1].lines, "val_ema/loss")


# ---- checkpoints
@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize(
    "saved, resumed", [(saved, way) for saved, ways in RESHARDED.items() for way in ways]
)
def test_checkpoint_resumes_on_other_ranks(outcome, alone, saved, resumed):
    part = outcome(f"{saved} to {resumed}")
    assert len(part.reports[0]["seeds"]) == 3  # of 6 steps
    assert_same_run(part, alone("saved")[1], after=3)
    assert part.reports[0]["buffers"]["blocks.1.mlp.router.selection_bias"].any()


@pytest.mark.integration
@pytest.mark.parametrize("model, way", RESUMED)
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(outcome, model, way):
    """Also from a checkpoint before AdamW's first update: float16 may skip all steps before it."""
    undisturbed, part = outcome(f"{model} {way}"), outcome(f"{model} {way} resumed")
    assert len(part.reports[0]["seeds"]) == 3 < len(undisturbed.reports[0]["seeds"])
    assert untimed(part.lines) == untimed(undisturbed.lines)
    assert_same_bits(part.reports, undisturbed.reports)
    if model == "early":
        skipped = column(undisturbed.lines, "optim/skipped_steps")
        assert skipped[2] == 3 and skipped[-1] < 6


# ---- a job of torchrun, whose rank 1 is killed
def be_killed_at_step_3(folder):
    def learning_rate(optim, max_steps, step):
        if step == 3 and os.environ["RANK"] == "1":
            print("rank 1 ends at step 3", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return RATE(optim, max_steps, step)

    train.learning_rate = learning_rate
    own = [f"--run.dir={folder / 'killed'}", "--train.micro_batch_size=1"]
    sys.exit(train.main([str(folder / "tiny.toml"), *own]))


@pytest.mark.integration
def test_job_ends_when_a_rank_is_killed(folder):
    job = run_torchrun({"": ["--standalone", "--nproc_per_node=2", __file__, folder]})[""]
    assert job.code != 0  # and it did end
    assert "at step 3" in job.output  # it had begun
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", job.output), job.output


# ---- a rank that hangs
TIMEOUT = 15  # seconds


class Hang(NamedTuple):
    """One call that never returns."""

    owner: object
    name: str  # of the function
    rank: int  # that hangs in it
    at: Callable[..., bool]  # from a call's arguments
    parallel: str = "ddp"
    saved: int = 2  # step of the newest intact checkpoint


HANGS = {
    "the plan": Hang(preflight, "open_data", 1, lambda *_: True, saved=0),
    "a batch": Hang(Loader, "batch", 1, lambda loader, step, *_: step == 3),
    "an evaluation": Hang(train, "evaluate", 1, lambda state, step, *_: step == 4),
    "a save of rank 0": Hang(checkpoint.Saver, "_publish", 0, lambda *_: True, saved=0),
    "the last save of rank 0": Hang(
        checkpoint.Saver, "_publish", 0, lambda saver, step, *_: step == 4
    ),
    "the last save of all": Hang(
        checkpoint.Saver, "_hash_own_files", 1, lambda saver, path: "00004" in str(path), "fsdp"
    ),
}


def be_hung(folder, place):
    """A rank of a job in which one rank hangs for ever in `place`."""
    hang = HANGS[place]
    checkpoint.LONGEST_SAVE = 1  # not six times as long
    meet_in(folder / f"{place}.store")
    call = getattr(hang.owner, hang.name)
    own = [
        f"--run.dir={folder / place}",
        f"--train.timeout_minutes={TIMEOUT / 60}",
        f"--train.parallel={hang.parallel}",
        "--train.micro_batch_size=1",
        "--train.checkpoint_interval=2",
        "--eval.interval=2",
    ]
    if place == "a save of rank 0":  # the steps go on meanwhile
        own += ["--train.max_steps=100000", "--train.checkpoint_interval=100000"]
        own += ["--train.keep_steps=2", "--eval.interval=100000"]

    def hanging(*args):
        if int(os.environ["RANK"]) == hang.rank and hang.at(*args):
            (folder / f"{place}.hung").touch()
            while True:
                time.sleep(1)
        return call(*args)

    def note_end(code):
        (folder / f"{place}.{os.environ['RANK']}.ended").touch()
        end(code)

    end, os._exit = os._exit, note_end
    setattr(hang.owner, hang.name, hanging)
    train.main([str(folder / "tiny.toml"), *own])


@pytest.fixture(scope="module")
def hung(folder):
    """{place: the exit code and output of the rank that does not hang}."""
    jobs = {place: start_ranks(2, be_hung, folder, place) for place in HANGS}
    outcomes = {}
    for place, processes in jobs.items():
        outcomes[place] = processes[1 - HANGS[place].rank].wait(300)
    for place, processes in jobs.items():
        processes[HANGS[place].rank].wait(0)  # torchrun kills it
    return outcomes


@pytest.mark.integration
@pytest.mark.parametrize("place", HANGS)
def test_job_ends_when_a_rank_hangs_anywhere(hung, folder, place):
    code, output = hung[place]
    assert code in (1, 2), output
    began = (folder / f"{place}.hung").stat().st_mtime
    ended = (folder / f"{place}.{1 - HANGS[place].rank}.ended").stat().st_mtime
    assert 0 < ended - began < TIMEOUT + 15, output  # 30 s on a machine that does nothing else
    checkpoints = folder / place / "tiny/checkpoints"
    assert checkpoint.latest(checkpoints, ALONE)[0] == HANGS[place].saved
    assert not list(checkpoints.glob("*.damaged"))


if __name__ == "__main__":
    be_killed_at_step_3(Path(sys.argv[1]))
