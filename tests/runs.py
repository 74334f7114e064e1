"""Training a tiny run in a test, what it leaves behind, and processes that start at once."""

import multiprocessing
import os
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

import train
from runtime import checkpoint, folder
from runtime.metrics import read

REPO_ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "scripts.sample", "pytest", "hypothesis", "pyarrow.parquet"])


@contextmanager
def modules_in(place):
    """Below it, transformers copies and imports the code of exports within this context: not among the user's, nor
    beside that of other tests."""
    import transformers

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(place))
        patch.setattr(sys, "path", [*sys.path])  # transformers adds that folder
        forget()
        yield
        forget()


def run(config):
    """Train, and read the lines of metrics.jsonl."""
    train.train(config)
    return read(folder.path_of(config) / "metrics.jsonl")


def column(lines, key):
    return [line[key] for line in lines if key in line]


def checkpoints(config):
    return folder.path_of(config) / "checkpoints"


def steps(config):
    return checkpoint.steps(checkpoints(config))


class End(NamedTuple):
    """What two equal runs have in common at their ends, bit for bit."""

    lines: list[dict]  # of metrics.jsonl, but for times
    tensors: dict  # sha256 of the files that hold weights, AdamW's moments and selection biases
    facts: dict  # counters, loss scale, history of losses


def end(config):
    lines = [
        {key: value for key, value in line.items() if not key.startswith("perf/")}
        for line in read(folder.path_of(config) / "metrics.jsonl")
    ]
    manifest = checkpoint.verify(checkpoint.folder_of(checkpoints(config), config.train.max_steps))
    tensors = {name: file["sha256"] for name, file in manifest["files"].items() if name != ".metadata"}
    return End(lines, tensors, manifest["facts"])


# ---- processes without their imports


class Forked:
    """`function(*args)` of a test module in a process of its own, with some variables in its environment. It is forked
    from a process that has imported torch and train.py before, which takes longer than most tests."""

    def __init__(self, function, *args, **variables):
        with pytest.MonkeyPatch.context() as patch:  # the first starts that process, which has another sys.path
            patch.setenv("PYTHONPATH", os.pathsep.join([str(REPO_ROOT), str(REPO_ROOT / "tests")]))
            forkserver.ensure_running()
        file, self.printed = tempfile.mkstemp()
        os.close(file)
        self.process = FORKS.Process(target=_be, args=(self.printed, variables, function, args))
        self.process.start()

    def wait(self, seconds):
        """(exit code, what it printed). After so many seconds it is killed: -9."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        printed = Path(self.printed).read_text(errors="replace")
        os.remove(self.printed)
        return self.process.exitcode, printed


def _be(log, variables, function, args):
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= variables
    function(*args)


def start_ranks(count, function, *args):
    """So many, with the variables that torchrun gives to its ranks."""
    all_ranks = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [Forked(function, *args, RANK=str(i), LOCAL_RANK=str(i), **all_ranks) for i in range(count)]


def meet_in(file, init=dist.init_process_group):
    """From now on the process groups of this rank meet in `file`, not at torchrun's address."""
    own = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group = partial(init, init_method=file.as_uri(), **own)
