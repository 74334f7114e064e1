"""Many ranks: the same run on any number of them, under DDP, FSDP2, ZeRO-2 and HSDP; ranks that
die.

Jobs of 2 and of 4 ranks (CPU, gloo) go through the cases of ranks.py, and each leaves a report per
case and rank, which the tests read.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import ranks
import torch
from conftest import write_tiny
from numerics import assert_near, tolerance
from ranks import ANY, CASES, COMPARED, PEAK, RESHARDED, RESUMED, WAYS
from runs import (
    ALONE,
    assert_same_columns,
    be_killed,
    column,
    end,
    meet_in,
    metrics,
    run,
    run_job,
    run_with_margin,
    start_ranks,
)

import configure
import train
from data.loader import Loader
from eval.trained import load_model
from runtime import checkpoint, preflight
from runtime.folder import path_of
from runtime.memory import flops_per_token


# ---- how the tests start them
class Outcome(NamedTuple):
    config: configure.Config
    lines: list[dict]  # of metrics.jsonl
    reports: list[dict]  # one per rank, of jobs

    def load_model(self):
        return load_model(path_of(self.config)).model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    """Holds tiny.toml, and a run whose weights the cases of "given" start from."""
    file = write_tiny(tmp_path_factory.mktemp("ranks"), corpus)
    run(configure.load(file, ["model.router=softmax", f"run.dir={file.parent / 'start'}"]))
    return file.parent


@pytest.fixture(scope="module")
def alone(folder):
    """`alone(model)`: the override of the seed, and the Outcome of the run on one rank with it."""

    @cache
    def alone(model):
        def make(*overrides):
            own = [*ranks.overrides_of(model, folder), f"run.dir={folder / f'{model} alone'}"]
            return configure.load(folder / "tiny.toml", [*own, *overrides])

        with ranks.patches(model):
            seed, lines = run_with_margin(make)
        return seed, Outcome(make(f"run.name=seed-{seed.partition('=')[2]}"), lines, [])

    return alone


@pytest.fixture(scope="module")
def start(alone, folder):
    """`start(True)`: run the job of the pair; of all others. What ended one; "" if nothing did."""

    @cache
    def start(is_pair):
        problem = ""
        for count in (2,) if is_pair else (2, 4):  # runs on 4 resume from checkpoints of 2
            names = []
            for name, case in CASES.items():
                if WAYS[case.way].ranks == count and (case.model == "pair") == is_pair:
                    names.append(name)
            models = {CASES[name].model for name in names} & {*COMPARED}
            seeds = {model: alone(model)[0] for model in models}
            problem = problem or run_job(count, ranks.be_a_rank, folder, names, seeds)
        return problem

    return start


@pytest.fixture(scope="module")
def outcome(folder, start):
    """`outcome(case)` of several ranks."""

    def outcome(name):
        case = CASES[name]
        problem = start(case.model == "pair")
        reports = [folder / f"{name}.{rank}" for rank in range(WAYS[case.way].ranks)]
        assert all(report.exists() for report in reports), problem
        config = ranks.config_of(folder, name, "run.seed=0")
        return Outcome(config, metrics(config), [torch.load(report) for report in reports])

    return outcome


def assert_same_run(one, other, after=-1, keys=("train/loss", "val/loss", "optim/grad_norm")):
    """The same lines after step `after` and the same weights at the end, up to rounding; the same
    loads and biases.
    """
    a, b = ([line for line in run.lines if line["step"] > after] for run in (one, other))
    for key in ("step", "router/loads", "val/loads"):  # rank 0 alone writes
        assert column(a, key) == column(b, key), key
    assert_same_columns(a, b, *keys)
    weights, wanted = one.load_model().state_dict(), other.load_model()
    for key, p in wanted.named_parameters():
        # AdamW's steps are as large for gradients that are mostly rounding
        assert_near(weights[key], p.detach(), tolerance(torch.float32, 257, roundings=40), key)
    for key, buffer in wanted.named_buffers():
        assert torch.equal(weights[key], buffer), key


# ---- two ranks under DDP
def test_the_pair_ends_without_errors(start):
    assert not start(True), start(True)


@pytest.mark.numerics
def test_pair_trains_like_one_rank(outcome, alone):
    """One expert is idle, and its selection bias differs: no rank's buffers go to the others."""
    ran = outcome("pair ddp-2")
    assert_same_run(ran, alone("pair")[1])
    # though rank 1 has a window less, and none in its last batch
    assert_same_columns(ran.lines, alone("pair")[1].lines, "val/gate_norm", "val/balance_loss")
    for rank, report in enumerate(ran.reports):
        for bias in report["biases"]:
            assert bias.tolist() == [0, 0, 0, -10 - rank, 0, 0, 0, 0]
        assert report["timeouts"] == {7}  # minutes, of the devices' groups and of the hosts'
    assert not any(layer[3] for loads in column(ran.lines, "router/loads") for layer in loads)
    seeds = [seed for report in ran.reports for seed in report["seeds"]]
    # rows of several ranks do not share a mask of dropout
    assert len(seeds) == len(set(seeds)) == 2 * 3
    flops = flops_per_token(ran.config.model)
    timed = [line for line in ran.lines if "perf/mfu" in line]
    assert len(timed) == 3
    for line in timed:  # of two devices; 8 rows of 32 tokens a step, over both ranks
        assert line["perf/mfu"] == pytest.approx(flops * line["perf/tokens_per_sec"] / (2 * PEAK))
        assert line["perf/tokens_per_sec"] == pytest.approx(8 * 32 * 1000 / line["perf/step_ms"])


# ---- equal runs
MORE = {  # what else is compared, by model
    "biased": ["train/aux_loss"],
    "cut": ["train/aux_loss"],
    "kern": ["router/gamma", "val/gate_norm", "val/gate_sum", "val/balance_loss"],
    "dense": ["val_ema/loss"],  # with masks
}


@pytest.mark.integration
def test_ranks_end_without_errors(start):
    assert not start(False), start(False)


@pytest.mark.integration
@pytest.mark.numerics
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.model in ANY])
def test_same_run_on_any_number_of_ranks(outcome, alone, name):
    """Also with unequal numbers of validation windows, though a forward pass gathers weights from
    all ranks.
    """
    ran = outcome(name)
    model = CASES[name].model
    wanted = alone(model)[1]
    assert_same_run(ran, wanted)
    assert_same_columns(ran.lines, wanted.lines, *MORE.get(model, []))
    for report in ran.reports:
        assert report["timeouts"] <= {7, 6 * 7}  # of passes, of saves
    if model in ("biased", "quantile"):
        assert wanted.load_model().blocks[1].mlp.router.selection_bias.any()


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
    assert part.load_model().blocks[1].mlp.router.selection_bias.any()


@pytest.mark.integration
@pytest.mark.parametrize("model, way", RESUMED)
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(outcome, model, way):
    """Also from a checkpoint before AdamW's first update: float16 may skip all steps before it."""
    undisturbed, part = outcome(f"{model} {way}"), outcome(f"{model} {way} resumed")
    assert len(part.reports[0]["seeds"]) == 3 < len(undisturbed.reports[0]["seeds"])
    assert end(part.config) == end(undisturbed.config)
    if model == "early":
        skipped = column(undisturbed.lines, "optim/skipped_steps")
        assert skipped[2] == 3 and skipped[-1] < 6


# ---- a rank that hangs, or is killed
TIMEOUT = 15  # seconds


class Hang(NamedTuple):
    """One call that never returns."""

    owner: object
    name: str  # of the function
    rank: int  # that hangs in it
    at: Callable[..., bool]  # from a call's arguments
    parallel: str = "ddp"
    saved: int = 2  # step of the newest intact checkpoint
    wait: Callable[[], object] = lambda: time.sleep(9999)


HANGS = {
    "the plan": Hang(preflight, "open_data", 1, lambda *_: True, saved=0),
    "a batch": Hang(Loader, "batch", 1, lambda loader, step, *_: step == 3),
    "a step, killed": Hang(train, "seed_step", 1, lambda seed, step, *_: step == 3, wait=be_killed),
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
        own += [
            "--train.max_steps=100000",
            "--train.checkpoint_interval=100000",
            "--train.keep_steps=2",
            "--eval.interval=100000",
        ]

    def hanging(*args):
        if int(os.environ["RANK"]) == hang.rank and hang.at(*args):
            (folder / f"{place}.hung").touch()
            hang.wait()
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
