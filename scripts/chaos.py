"""Train one run twice, once undisturbed and once under faults, and compare them bit by bit.

    python -m scripts.chaos config/quickstart.toml --faults 100 --model.router=kern --train.max_steps=600
    python -m scripts.chaos config/quickstart.toml --faults 20 --ranks 2 --train.micro_batch_size=4

A fault comes at a random moment: while the job starts, in a step, in a save. The job is then restarted until the next
one. With more than one rank it runs under torchrun. Prints the faults survived, the steps lost and whether weights,
AdamW's state and losses equal the undisturbed run's; the exit code is 0 only if they do.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

from tqdm import tqdm

import configure
from configure import Config
from data.bins import check_dataset
from runtime import RunError, checkpoint, folder
from runtime.checkpoint import DamagedError
from runtime.metrics import read_metrics
from runtime.signals import EXIT_CODE

TRAIN = Path(__file__).parent.parent / "train.py"
DEFAULTS = ["--log.interval=1", "--train.checkpoint_interval=2", "--train.timeout_minutes=1"]
FAULTS = {  # relative frequency of each kind
    "SIGKILL to a rank": 6,
    "SIGKILL to the launcher": 2,  # without a launcher, to the process
    "SIGTERM to a rank": 2,
    "SIGTERM to the launcher": 2,
    "bit flipped in the latest checkpoint": 2,
    "latest checkpoint cut short": 1,
    "half a line in metrics.jsonl": 1,
}
START_SECONDS = 4  # a fault during the start comes within this time


class Fault(NamedTuple):
    """A fault that the run survived."""

    kind: str
    place: str  # "in a save", "in a step" or "at the start"
    steps_lost: int


class Job:
    """train.py on some ranks, with its output in a file; killed at the end of a `with` block."""

    def __init__(self, file: str, overrides: list[str], ranks: int, log: TextIO) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*(launcher if ranks > 1 else [sys.executable]), str(TRAIN), file, *overrides]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.ranks = ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the kernel then signals the ranks under torchrun

    def find_ranks(self) -> list[int]:
        """Process ids of the ranks started so far; without torchrun, of the process itself."""
        if self.ranks == 1:
            return [self.process.pid]
        found = subprocess.run(["pgrep", "-P", str(self.process.pid), "-f", TRAIN.name], capture_output=True, text=True)
        return [int(line) for line in found.stdout.split()]

    def send(self, number: int, to_rank: bool, choose: Callable[[Sequence[int]], int]) -> None:
        """Send a signal to a rank, or to the launcher."""
        pids = self.find_ranks() if to_rank else []
        os.kill(choose(pids) if pids else self.process.pid, number)

    def wait(self) -> int:
        """The exit code, once all ranks are gone too."""
        pids = self.find_ranks()
        code = self.process.wait()
        while any(Path("/proc", str(pid)).exists() for pid in pids):
            time.sleep(0.02)
        return code


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="more than one: under torchrun (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    parser.add_argument("--out", default="runs/chaos", help="folder of the two runs, restarted (default: %(default)s)")
    args, rest = parser.parse_known_args(argv)
    if args.faults < 1 or args.ranks < 1:
        parser.error(f"--faults {args.faults} --ranks {args.ranks}: expected at least 1 of each")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `with` blocks end the job
    try:
        return compare_runs(args, *configure.split_command_line(rest))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare_runs(args: argparse.Namespace, file: str, overrides: list[str]) -> int:
    """Train both runs and print the comparison; returns the exit status. Raises ValueError and OSError."""
    out, names = Path(args.out), ("undisturbed", "disturbed")
    options = {name: [*DEFAULTS, *overrides, f"--run.dir={args.out}", f"--run.name={name}"] for name in names}
    calm, torn = (configure.load(file, options[name], args.ranks) for name in names)
    check_dataset(Path(calm.data.dir, calm.data.name), calm.model.vocab_size)
    ours = {*names, *(f"{name}.log" for name in names)}
    if out.is_dir() and (others := sorted(set(os.listdir(out)) - ours)):
        raise RunError(f"{out} also contains {others[0]}, not of this script; name another folder with --out")
    for name in names:
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    print("the undisturbed run …", flush=True)
    started = time.perf_counter()
    with (out / "undisturbed.log").open("w") as log, Job(file, options["undisturbed"], args.ranks, log) as job:
        if job.wait():
            raise RunError(f"{log.name}: the undisturbed run failed")
    print(f"… took {time.perf_counter() - started:.0f} s; now with {args.faults} faults", flush=True)
    with (out / "disturbed.log").open("w") as log:

        def start() -> Job:
            return Job(file, options["disturbed"], args.ranks, log)

        return print_report(calm, torn, train_under_faults(torn, start, args.faults, random.Random(args.seed)))


def train_under_faults(config: Config, start: Callable[[], Job], faults: int, rng: random.Random) -> list[Fault]:
    """Train to the end, with `faults` faults on the way. Raises RunError if the job ends otherwise."""
    path = folder.path_of(config)
    moments = sorted(rng.uniform(0, 0.9 * config.train.max_steps) for _ in range(faults))  # before its end
    survived = []
    for moment in tqdm(moments, unit="fault"):
        before = find_intact_step(path)
        with start() as job:
            code = wait_for_moment(job, path, moment, before, rng)
            if code is not None:
                remedy = "; set a larger --train.max_steps" if code == 0 else ""
                raise RunError(f"{path}: ended by itself with exit code {code}, see {path}.log{remedy}")
            reached = max(read_last_step(path), before)
            kind = rng.choices([*FAULTS], [*FAULTS.values()])[0]
            saving = any((path / "checkpoints").glob("step_*.tmp"))
            inject_fault(kind, job, path, rng)
        place = "in a save" if saving else "in a step" if reached > before else "at the start"
        survived.append(Fault(kind, place, max(0, reached - find_intact_step(path))))
    with start() as job:
        code = job.wait()
    if code:
        raise RunError(f"{path}: the last start ended with exit code {code}, see {path}.log")
    return survived


def wait_for_moment(job: Job, path: Path, moment: float, before: int, rng: random.Random) -> int | None:
    """Wait for step `moment`, or a few steps after `before`, where the job resumes; returns its exit code if it ends.

    One time in four, wait only for some moment of the start.
    """
    begun, target = time.time(), max(moment, before + rng.uniform(0, 3))
    patience = rng.uniform(0, START_SECONDS) if rng.random() < 0.25 else float("inf")
    metrics = path / "metrics.jsonl"
    while job.process.poll() is None and time.time() <= begun + patience:
        if metrics.exists() and metrics.stat().st_mtime > begun and read_last_step(path) >= target:
            time.sleep(rng.uniform(0, 0.1))  # somewhere in a step
            break
        time.sleep(0.005)
    return job.process.poll()


def inject_fault(kind: str, job: Job, path: Path, rng: random.Random) -> None:
    """End the job and damage its files as `kind` says. Raises RunError if it does not obey SIGTERM."""
    number = signal.SIGTERM if "SIGTERM" in kind else signal.SIGKILL
    job.send(number, "to a rank" in kind, rng.choice)
    code = job.wait()
    if number == signal.SIGTERM and job.ranks == 1 and code not in (EXIT_CODE, -number):
        remedy = "; it had just finished: set a larger --train.max_steps" if code == 0 else ""
        raise RunError(f"{path}: exit code {code} after SIGTERM, expected {EXIT_CODE}{remedy}")
    steps = checkpoint.steps(path / "checkpoints")
    if "checkpoint" in kind and len(steps) > 1:  # the run has to resume from the one before it
        file = rng.choice(sorted(checkpoint.folder_of(path / "checkpoints", steps[-1]).iterdir()))
        data = bytearray(file.read_bytes())
        if "flipped" in kind:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        file.write_bytes(data)
    if "half a line" in kind:
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1')


def find_intact_step(path: Path) -> int:
    """Step of the newest intact checkpoint, 0 if there is none."""
    for step in reversed(checkpoint.steps(path / "checkpoints")):
        try:
            return checkpoint.verify(checkpoint.folder_of(path / "checkpoints", step))["step"]
        except DamagedError:
            continue
    return 0


def read_last_step(path: Path) -> int:
    """The last step in metrics.jsonl, 0 if there is none."""
    try:
        return max((line["step"] for line in read_metrics(path / "metrics.jsonl")), default=0)
    except (RunError, OSError):  # being written right now
        return 0


def print_report(calm: Config, torn: Config, faults: list[Fault]) -> int:
    """Compare the two runs; returns 0 if weights, AdamW's state and metrics are equal, else 1."""
    last = torn.train.max_steps
    (files, losses), (torn_files, torn_losses) = (read_results(config) for config in (calm, torn))
    for head, values in (
        (f"\n{len(faults)} faults survived: ", Counter(fault.kind for fault in faults)),
        ("struck ", Counter(fault.place for fault in faults)),
    ):
        print(head + ", ".join(f"{count} {value}" for value, count in values.items()))
    lost = [fault.steps_lost for fault in faults]
    every = torn.train.checkpoint_interval
    print(f"steps lost: {sum(lost)} in all, {max(lost)} at most, of {last}; a checkpoint every {every}")
    print(f"weights and AdamW's state at step {last}: {'equal, bit for bit' if files == torn_files else 'DIFFERENT'}")
    print(f"metrics.jsonl, {len(losses)} lines without times: {'equal' if losses == torn_losses else 'DIFFERENT'}")
    return 0 if files == torn_files and losses == torn_losses else 1


def read_results(config: Config) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """SHA-256 of the files of the last checkpoint, and the lines of metrics.jsonl without times."""
    path = folder.path_of(config)
    manifest = checkpoint.verify(checkpoint.folder_of(path / "checkpoints", config.train.max_steps))
    files = {name: entry["sha256"] for name, entry in manifest["files"].items() if name != ".metadata"}
    lines = read_metrics(path / "metrics.jsonl")
    return files, [{key: line[key] for key in line if not key.startswith("perf/")} for line in lines]


if __name__ == "__main__":
    sys.exit(main())
