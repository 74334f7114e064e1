"""Kills at random moments and damaged files, again and again: the run ends like an undisturbed one,
bit for bit.
"""

import json
import os
import random
import signal
import sys
import time
from itertools import count

import pytest
from runs import checkpoints, end, flip, meet_in, start_ranks, steps, wait_for_ranks

import configure
import train
from runtime import checkpoint
from runtime.folder import path_of
from runtime.launch import EXIT_CODE, Stop

FAULTS = ["SIGKILL"] * 2 + ["SIGTERM"] * 2 + ["flipped bit"] * 2 + ["half a line"]
# The most state to resume: dropout, a loss scale, selection biases, a mean of the
# weights.
HARD = [
    "model.dropout=0.1",
    "train.dtype=float16",
    "train.bias_update_rate=0.01",
]
HARD += [
    "train.ema_decay=0.9",
    "train.balance_loss_coef=0.01",
    "train.micro_batch_size=2",
    "log.interval=3",
]
HARD += [
    "train.max_steps=90",
    "train.checkpoint_interval=2",
    "train.timeout_minutes=1",
    "eval.interval=30",
]


def be_a_rank(file, name, store):
    """train.py on one rank of a job."""
    if "WORLD_SIZE" in os.environ:
        meet_in(store)
    sys.exit(
        train.main(
            [str(file), *(f"--{key}" for key in HARD), f"--run.name={name}"], Stop().listen()
        )
    )


def last_step(metrics):
    """The last step in a metrics.jsonl; its last line may be half written."""
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith(b"}") else 0


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_survives_faults(tiny_file, ranks):
    rng, numbers, codes = random.Random(ranks), count(), []

    def start(name):
        store = tiny_file.parent / f"{next(numbers)}.store"
        return start_ranks(ranks, be_a_rank, tiny_file, name, store)

    def finish(name):
        wait_for_ranks(start(name), 300)

    finish("undisturbed")
    config = configure.load(tiny_file, [*HARD, "run.name=disturbed"])
    metrics = path_of(config) / "metrics.jsonl"
    for fault in rng.sample(FAULTS, len(FAULTS)):
        before, processes = max(steps(config), default=0), start("disturbed")
        moment = before + rng.randint(1, 9) if rng.random() < 0.75 else None
        # without a step: while it starts
        patience = time.monotonic() + (60 if moment else rng.uniform(0, 1.5))
        while (
            all(process.process.is_alive() for process in processes) and time.monotonic() < patience
        ):
            if moment and last_step(metrics) >= moment:
                break
            time.sleep(0.002)
        number = signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL
        pid = rng.choice(processes).process.pid
        os.kill(pid, number)
        # then killed, as a launcher kills the others
        codes.append([process.wait(5)[0] for process in processes])
        newest = max(steps(config), default=0)
        if fault == "flipped bit" and len(steps(config)) > 1:
            file = rng.choice(sorted(checkpoint.folder_of(checkpoints(config), newest).iterdir()))
            flip(file, rng.randrange(8 * file.stat().st_size))
        if fault == "half a line" and metrics.exists():
            with metrics.open("a") as file:
                file.write('{"step": 1')
        assert newest < 90
    finish("disturbed")
    stopped = codes.count([EXIT_CODE] * ranks)
    assert stopped >= 1 and sum(-signal.SIGKILL in code for code in codes) >= 5, codes
    assert 0 not in sum(codes, [])
    assert end(config) == end(configure.load(tiny_file, [*HARD, "run.name=undisturbed"]))
    assert list(checkpoints(config).glob("*.damaged"))
