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

import pytest
import torch
from conftest import write_tiny
from runs import meet_in, start_ranks

import train
from model import GPT
from runtime.launch import EXIT_CODE, Stop

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


@pytest.fixture(scope="module", params=[3])
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
