"""Helpers for tests: train a tiny run, read what it wrote, and start processes quickly."""

import faulthandler
import hashlib
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, zip_longest
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
from numerics import SEED, assert_near, tolerance
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import train
from attention import KVCache
from configure import Config
from model import GPT
from router import Router, Routing
from runtime import checkpoint, folder
from runtime.distributed import Ranks
from runtime.metrics import ARRAYS, list_arrays, load_arrays, read_metrics
from runtime.runs import format_manifest

REPO_ROOT = Path(__file__).parents[1]
ALONE = Ranks(0, 1, torch.device("cpu"))
FORKS = multiprocessing.get_context("forkserver")
# the settings of both hold there, too
SETTINGS = ["conftest", "torch_settings"]
FORKS.set_forkserver_preload([*SETTINGS, "train", "scripts.sample", "pyarrow.parquet"])


@contextmanager
def modules_in(place: Path) -> Iterator[None]:
    """Within this context, transformers copies and imports the code of exported models below
    `place`.

    So it touches neither the user's cache nor the modules of other tests.
    """
    import transformers

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(place))
        patch.setattr(sys, "path", [*sys.path])  # transformers appends that folder
        forget()
        yield
        forget()


def run(config: Config) -> list[dict]:
    """Train, and return the lines of metrics.jsonl with their arrays."""
    train.train(config)
    return metrics(config)


def all_logits(model: GPT, idx: torch.Tensor, past: KVCache | None = None) -> torch.Tensor:
    """(B, T, V); the model itself returns those of the last position."""
    return model.logits(model.hidden(idx, past)[0])


def read_tables(text: str) -> list[list[dict[str, str]]]:
    """The rows of each table that a command prints, as {column: cell}.

    Of a row at most the last cell is empty.
    """
    lines = text.splitlines()
    tables = []
    for i, line in enumerate(lines):
        if not line or set(line) != {"-"}:
            continue
        columns = re.split("  +", lines[i - 1].strip())
        rows = []
        for row in lines[i + 1 :]:
            cells = re.split("  +", row.strip())
            if len(cells) < len(columns) - 1:
                break
            rows.append(dict(zip_longest(columns, cells, fillvalue="")))
        tables.append(rows)
    return tables


def column(lines: list[dict], key: str) -> list:
    """The values of `key`, from the lines that have it."""
    return [line[key] for line in lines if key in line]


def read_lines(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl, with their arrays; older runs have these in the lines."""
    lines = read_metrics(path)
    for prefix, loss in (("val", "val/loss"), ("router", "train/loss")):
        rows = {}
        for file in list_arrays(path, prefix):
            rows |= load_arrays(file, ARRAYS)
        for line in lines:
            if loss in line:
                line |= rows.get(line["step"], {})
    return lines


def metrics(config: Config) -> list[dict]:
    """The lines of the run's metrics.jsonl, with their arrays."""
    return read_lines(folder.path_of(config) / "metrics.jsonl")


def checkpoints(config: Config) -> Path:
    """The run's folder of checkpoints."""
    return folder.path_of(config) / "checkpoints"


def steps(config: Config) -> list[int]:
    """Steps of the run's checkpoints, ascending."""
    return checkpoint.steps(checkpoints(config))


def content(place: Path) -> dict[Path, str]:
    """{path: sha256} of all files below `place`, but for the lock, which each start writes."""
    files = (path for path in place.rglob("*") if path.is_file() and path.name != "lock")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def change_facts(path: Path, change: Callable[[dict], object]) -> None:
    """Call `change` on the metadata of a checkpoint; its manifest then has the right checksum."""
    body = checkpoint.read_manifest(path)
    change(body["facts"])
    (path / checkpoint.MANIFEST).write_text(format_manifest(body))


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, counted from the end where it is negative."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def untimed(lines: list[dict]) -> list[dict]:
    """The lines of metrics.jsonl without times, and with "nan" for NaN: equal for equal runs."""
    kept = []
    for line in lines:
        values = {key: value for key, value in line.items() if not key.startswith("perf/")}
        kept.append({key: value if value == value else "nan" for key, value in values.items()})
    return kept


# ---- runs that differ by rounding alone
# least distance between the last expert chosen and the next, relative to a token's largest score
MARGIN = 1e-5
# a step passes through about ten operators in two blocks, and AdamW keeps the errors of those
# before
ROUNDINGS = 8


def run_with_margin(make: Callable[..., Config], *overrides: str) -> tuple[str, list[dict]]:
    """Train with the first seed for which no token is undecided between two experts, in training
    and evaluation.

    Rounding, which depends on CPU and batch shape, then changes no choice of an expert, only the
    last digits of losses. `make` makes a Config of overrides. Returns the override of run.seed, and
    the lines of metrics.jsonl.
    """
    for seed in count(1000 * SEED):
        margins = [math.inf]

        def watch(
            module: nn.Module, args: tuple, routing: Routing, margins: list[float] = margins
        ) -> None:
            if isinstance(module, Router) and module.top_k < routing.scores.shape[-1]:
                scores = routing.scores.detach() + module.selection_bias
                best = scores.topk(module.top_k + 1).values
                margins.append(((best[:, -2] - best[:, -1]) / scores.abs().amax(-1)).min().item())

        hook = register_module_forward_hook(watch)
        lines = run(make(*overrides, f"run.seed={seed}", f"run.name=seed-{seed}"))
        hook.remove()
        if min(margins) > MARGIN:
            return f"run.seed={seed}", lines
    raise AssertionError("unreachable")


def assert_same_columns(
    lines: list[dict], wanted: list[dict], *keys: str, roundings: float = ROUNDINGS
) -> None:
    """Assert that two runs of the tiny model, equal but for rounding, have the same values of
    `keys`.
    """
    limit = tolerance(torch.float32, 257, roundings)  # sums over 256 tokens, or over 257 logits
    for key in keys:
        a, b = (torch.tensor(column(run, key), dtype=torch.float64) for run in (lines, wanted))
        assert len(b), key
        assert_near(a, b, limit, key)


class End(NamedTuple):
    """What must be equal, bit for bit, at the end of two equal runs."""

    lines: list[dict]  # of metrics.jsonl, with arrays and without times
    tensors: dict  # sha256 of the files that hold weights, AdamW's moments and selection biases
    facts: dict  # hashes of the data, threads; without the run's id and its settings


def end(config: Config) -> End:
    """The `End` of a finished run."""
    lines = untimed(metrics(config))
    manifest = checkpoint.verify(checkpoint.folder_of(checkpoints(config), config.train.max_steps))
    tensors = {
        name: file["sha256"] for name, file in manifest["files"].items() if name != ".metadata"
    }
    facts = dict(manifest["facts"])
    del facts["run_id"], facts["settings"]
    return End(lines, tensors, facts)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within this context, writing beyond `size` bytes of a file fails with "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- processes
def wait_until(
    condition: Callable[[], object], is_alive: Callable[[], object] = lambda: True
) -> None:
    """Return once `condition` holds.

    Fail where that takes minutes, or where what it waits for has ended.
    """
    deadline = time.monotonic() + 300
    while not condition():
        assert is_alive() and time.monotonic() < deadline
        time.sleep(0.02)


class Forked:
    """A process that calls `function(*args)` of a test module, with extra environment variables.

    It is forked from a process that has already imported torch and train.py: importing takes longer
    than most tests.
    """

    def __init__(self, function: Callable, *args: object, **variables: str) -> None:
        # the first call starts the fork server, whose sys.path differs
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(REPO_ROOT), str(REPO_ROOT / "tests")]))
            forkserver.ensure_running()
        file, self.printed = tempfile.mkstemp()
        os.close(file)
        self.process = FORKS.Process(target=_call, args=(self.printed, variables, function, args))
        self.process.start()

    def wait(self, seconds: float) -> tuple[int | None, str]:
        """Its exit code and what it printed, once it has ended.

        After `seconds` it is aborted (exit code -6) and prints the stacks of its threads.
        """
        self.process.join(seconds)
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(10)
        self.process.kill()  # where it was stopped, or is blocked in the kernel
        self.process.join()
        printed = Path(self.printed).read_text(errors="replace")
        os.remove(self.printed)
        return self.process.exitcode, printed


def _call(log: str, variables: dict[str, str], function: Callable, args: tuple) -> None:
    """Call `function(*args)` with stdout and stderr redirected to the file `log`."""
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()
    os.environ |= variables
    function(*args)


def start_ranks(count: int, function: Callable, *args: object) -> list[Forked]:
    """Start `count` processes with the environment variables that torchrun sets."""
    all_ranks = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [
        Forked(function, *args, RANK=str(i), LOCAL_RANK=str(i), **all_ranks) for i in range(count)
    ]


def wait_for_ranks(ranks: list[Forked], seconds: float) -> list[str]:
    """Return what each rank printed, once all have ended.

    Fail if one ends with an error, or not in time. Those that still run are aborted then.
    """
    deadline = time.monotonic() + seconds
    while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.process.exitcode for rank in ranks):
            break
        time.sleep(0.05)
    ended = [rank.wait(5) for rank in ranks]
    report = "\n".join(f"rank {i}: exit code {code}\n{out}" for i, (code, out) in enumerate(ended))
    assert all(code == 0 for code, _ in ended), report
    return [out for _, out in ended]


def run_job(count: int, function: Callable, *args: object) -> str:
    """Run ranks that go through several cases; returns what ended them early, "" if nothing did.

    An error must end the job. Ranks that went on would start the next case minutes apart, and so
    lose each other in each case that is left.
    """
    try:
        wait_for_ranks(start_ranks(count, function, *args), 1200)
    except AssertionError as error:
        return str(error)
    return ""


# audit events, before the call
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}


def be_killed() -> NoReturn:
    """A fault: nothing more is done."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def fork_with_fault(
    action: Callable, folder: Path, number: int, fault: Callable
) -> tuple[int, str]:
    """Call `action` in a fork, and `fault` just before its call `number` (from 0; -1: none) that
    changes files.

    Files are opened below `folder`. Returns what `action` does, the exit code, and what was
    printed: FAULT, too.
    """
    with tempfile.TemporaryFile("w+") as printed:
        if not (child := os.fork()):
            code, calls = 99, count()

            def count_call(event: str, args: tuple) -> None:
                opens = event == "open" and str(args[0]).startswith(str(folder))
                opens = opens and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if (opens or event in {*WRITES, "fsync"}) and next(calls) == number:
                    print("FAULT", flush=True)
                    fault()

            try:
                for stream in (1, 2):
                    os.dup2(printed.fileno(), stream)
                sys.addaudithook(count_call)
                os.fsync = lambda descriptor: count_call("fsync", ())
                code = action()
                sys.stdout.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        return code, printed.read()


class Job(NamedTuple):
    """How torchrun ended."""

    code: int
    output: str  # of all its ranks


def run_torchrun(jobs: dict[str, list]) -> dict[str, Job]:
    """Run torchrun with the arguments of each job, all at once, since they wait for most of their
    time.
    """
    variables = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    processes = {
        name: subprocess.Popen([*torchrun, *arguments], cwd=REPO_ROOT, env=variables, **pipes)
        for name, arguments in jobs.items()
    }
    outputs = {name: process.communicate(timeout=1200)[0] for name, process in processes.items()}
    return {name: Job(process.returncode, outputs[name]) for name, process in processes.items()}


def meet_in(file: Path, init: Callable = dist.init_process_group) -> None:
    """Make this rank's process groups rendezvous through `file`, not at torchrun's address."""
    own = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group = partial(init, init_method=file.as_uri(), **own)
