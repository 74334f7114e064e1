"""What every rank prints and returns on errors, on two and three ranks.

The user reads one message: rank 0's, or that of the rank that alone has the error. A device that is
missing is named by each rank, for each may have another. No rank waits for one that has ended; if
it was lost in a step, the others return 1.
"""

import contextlib
import io
import json
import os
import sys
import time
from typing import NamedTuple

import pytest
import torch
from conftest import write_tiny
from runs import meet_in, start_ranks, wait_for_ranks

import train
from model import GPT
from runtime.parallel import full_tensor, local_part
from runtime.signals import EXIT_CODE, Stop

SETTINGS = ["--train.batch_size=12", "--train.micro_batch_size=2", "--eval.windows=6"]
ALL = None
NEAR = 1e-4  # of weighted sums of a parameter
# {case: (overrides, code, words of the message, the rank that prints it)}
CASES = {
    "trained": ([], 0, "finished, 4 steps", 0),
    "finished": (["--run.name=trained"], 0, "finished already", 0),
    "unknown-data": (["--data.name=none"], 2, "none", 0),
    "other-config": (["--run.name=trained", "--optim.lr=1"], 2, "optim.lr", 0),
    "bad-micro-batch": (["--train.micro_batch_size=5"], 2, "train.batch_size = 12", 0),
    "bad-device": (["--train.device=cuda"], 2, "train.device", ALL),
    "nan-on-the-last": ([], 2, "train loss nan in step 1", 0),
    "asked-on-the-last": ([], EXIT_CODE, "asked to stop, saved at step", 0),
    "disagreement": ([], 2, "disagree", 0),
    "disk-of-the-last": ([], 2, "no room on this node", -1),
    "bug-on-the-last": ([], 1, "a bug", -1),
}


def harm(case, is_last, patch, stop):
    """Prepare a fault of the last rank."""
    forward = GPT.forward

    def poison(model, *args):
        out = forward(model, *args)
        return out._replace(loss=out.loss * torch.nan) if model.training else out

    def fail(*args):
        raise {"disk-of-the-last": OSError("no room on this node")}.get(case, KeyError("a bug"))

    if not is_last:
        return []
    if case == "nan-on-the-last":
        patch.setattr(GPT, "forward", poison)
    if case == "asked-on-the-last":
        stop.asked = True
    if case in ("disk-of-the-last", "bug-on-the-last"):
        patch.setattr(train, "learning_rate", fail)
    return ["--train.parallel=fsdp"] if case == "disagreement" else []


def be_a_rank(file, case):
    """Run train.py with the fault of a case; write exit code, stdout and stderr to a file."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    result = file.parent / f"{case}-{world_size}-{rank}.json"
    meet_in(file.parent / f"{case}-{world_size}.store")
    stop = Stop()
    out, err = io.StringIO(), io.StringIO()

    def note(code):
        result.write_text(json.dumps([code, out.getvalue(), err.getvalue()]))

    def exit_at_once(code):
        note(code)
        leave(code)

    leave = os._exit
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "_exit", exit_at_once)
    arguments = harm(case, rank == world_size - 1, patch, stop)
    overrides = [*SETTINGS, f"--run.name={case}", *CASES[case][0], *arguments]
    overrides += [f"--run.dir={file.parent / f'runs-{world_size}'}"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = train.main([str(file), *overrides], stop)
        except SystemExit as end:
            code = end.code
    note(code)
    sys.exit(code)


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory, corpus):
    """{case: (code, stdout, stderr) of each rank}."""
    file = write_tiny(tmp_path_factory.mktemp("ranks"), corpus)
    results = {}
    for case in CASES:
        processes = start_ranks(request.param, be_a_rank, file, case)
        printed = [process.wait(300) for process in processes]
        results[case] = []
        for rank in range(request.param):
            path = file.parent / f"{case}-{request.param}-{rank}.json"
            assert path.exists(), (case, printed)
            results[case].append(json.loads(path.read_text()))
    return results


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_one_rank_says_it_and_all_end(results, case):
    _, wanted, words, speaker = CASES[case]
    ranks = results[case]
    said = [rank for rank, (_, out, err) in enumerate(ranks) if words in out + err]
    last = len(ranks) - 1
    speakers = {0: [0], -1: [last], ALL: list(range(len(ranks)))}[speaker]
    assert said == speakers, ranks
    for rank, (code, out, err) in enumerate(ranks):
        was_lost = case.endswith("of-the-last") and rank != last
        assert code == (1 if was_lost else wanted), ranks
        if rank:
            assert out == "", out
            names_itself = err.startswith(f"error on rank {rank}: ")
            assert names_itself == (rank in speakers and wanted == 2), err


# ---- what each rank computes with
EVERY_RANK = ["--train.batch_size=24", "--model.router=sigmoid-renorm"]
EVERY_RANK += ["--train.balance_loss_coef=0.5", "--train.z_loss_coef=0.1"]
EVERY_RANK += ["--train.bias_update_rate=0.01", "--train.ema_decay=0.75", "--optim.grad_clip=0.5"]
EVERY_RANK += ["--optim.router_lr_ratio=0.5", "--optim.expert_out_lr_ratio=2"]
EVERY_RANK += ["--data.document_mask=true", "--optim.weight_decay=0.3"]
EVERY_RANK += ["--train.activation_checkpointing=true"]


class Way(NamedTuple):
    """How the ranks share the work."""

    n_rank: int
    n_node: int
    overrides: list[str]
    n_shard: int  # parts of a weight, which consecutive ranks hold
    n_expert_shard: int  # of an expert's weights


WAYS = {
    "ddp-2": Way(2, 1, ["--train.parallel=ddp"], 1, 1),
    "ddp-3": Way(3, 1, ["--train.parallel=ddp"], 1, 1),
    "fsdp-3": Way(3, 1, ["--train.parallel=fsdp"], 3, 3),
    "hsdp-2x2": Way(4, 2, ["--train.parallel=hsdp"], 2, 2),  # the least that has both axes
    "experts-2x2": Way(4, 1, ["--train.parallel=ddp", "--train.expert_parallel=2"], 1, 2),
    "alone": Way(1, 1, [], 1, 1),
}


def cut(full, n_shard, rank):
    """The part of a tensor that a rank of consecutive ones holds."""
    parts = full.chunk(n_shard)
    number = rank % n_shard
    return parts[number] if number < len(parts) else full[:0]


def compute_as_a_rank(file, way):
    """Train, and write to a file what this rank holds and computes with."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _, n_node, overrides, n_shard, n_expert_shard = WAYS[way]
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size // n_node)
    meet_in(file.parent / f"{way}.store")
    seen = {"misplaced": [], "seeds": [], "rates": [], "weights": [], "flags": []}
    build_state, learning_rate = train.build_state, train.learning_rate

    def watch_state(plan, ranks):
        seen["state"] = state = build_state(plan, ranks)
        for key, p in state.model.named_parameters():
            n = n_expert_shard if ".experts." in key else n_shard
            part = cut(full_tensor(p.detach()), n, rank)
            if not local_part(p.detach()).equal(part):
                seen["misplaced"].append(key)
        return state

    def watch_step(*arguments):
        state = seen["state"]
        seen["seeds"].append(torch.initial_seed())
        rates = {(group["lr"], group["weight_decay"]) for group in state.optimizer.param_groups}
        seen["rates"].append(sorted(rates))
        tensors = state.model.state_dict()
        tensors |= {f"mean of {key}": tensor for key, tensor in state.average.tensors.items()}
        weights = {}
        for key, tensor in tensors.items():
            full = full_tensor(tensor.detach()).double().flatten()
            numbers = torch.arange(len(full), dtype=torch.float64)
            weights[key] = (full @ numbers.cos()).item()
        seen["weights"].append(weights)
        blocks = state.model.blocks
        flags = [block.checkpointing for block in blocks]
        seen["flags"].append([*flags, state.model.document_token, state.updates.grad_clip])
        return learning_rate(*arguments)

    train.build_state, train.learning_rate = watch_state, watch_step
    own = [f"--run.dir={file.parent / way}", *SETTINGS, *EVERY_RANK]
    code = train.main([str(file), *own, *overrides])
    del seen["state"]
    (file.parent / f"{way}-{rank}.json").write_text(json.dumps(seen))
    sys.exit(code)


def compute(file, way):
    """What each rank saw."""
    n_rank = WAYS[way].n_rank
    processes = start_ranks(n_rank, compute_as_a_rank, file, way)
    wait_for_ranks(processes, 300)
    names = [f"{way}-{rank}.json" for rank in range(n_rank)]
    return [json.loads((file.parent / name).read_text()) for name in names]


@pytest.fixture(scope="module")
def place(tmp_path_factory, corpus):
    return write_tiny(tmp_path_factory.mktemp("computed"), corpus)


@pytest.fixture(scope="module")
def alone(place):
    """What a single process sees."""
    return compute(place, "alone")[0]


@pytest.mark.integration
@pytest.mark.parametrize("way", list(WAYS)[:-1])
def test_every_rank_computes_with_every_setting(place, alone, way):
    """Each holds its part of the weights and no other; all come to one process's weights.

    Only the seeds of dropout are a rank's own.
    """
    ranks = compute(place, way)
    for seen in ranks:
        assert seen["misplaced"] == []
        assert seen["rates"] == alone["rates"]
        assert seen["flags"] == alone["flags"]
        assert seen["weights"] == ranks[0]["weights"]
        for own, wanted in zip(seen["weights"], alone["weights"], strict=True):
            assert own == pytest.approx(wanted, abs=NEAR)
    seeds = set()
    for seen in ranks:
        seeds |= set(seen["seeds"])
    assert len(seeds) == len(ranks) * len(alone["seeds"])


# ---- how the tests wait for ranks
def wait_for_a_lost_rank():
    if os.environ["RANK"] == "1":
        raise ValueError("lost")
    time.sleep(3600)


@pytest.mark.integration
def test_a_test_ends_when_one_of_its_ranks_does():
    """It shows the error, and where the others were."""
    with pytest.raises(AssertionError) as caught:
        wait_for_ranks(start_ranks(2, wait_for_a_lost_rank), 3000)
    waiting, lost = str(caught.value).split("rank 1: exit code 1")
    assert "rank 0: exit code -6" in waiting and "in wait_for_a_lost_rank" in waiting
    assert "ValueError: lost" in lost
