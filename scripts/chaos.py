"""Train one run twice, once undisturbed and once under faults, and compare them bit by bit.

    python -m scripts.chaos config/quickstart.toml --faults 100 --model.router=kern --train.max_steps=600
    python -m scripts.chaos config/quickstart.toml --faults 20 --ranks 2 --train.micro_batch_size=4

A fault comes at a random moment: while the job starts, in a step, in a save. The job is then restarted until the next
one; if it ends before, its folder is put back and it starts again. With more than one rank it runs under torchrun.
Prints the faults survived, the steps lost and whether weights, AdamW's state and losses equal the undisturbed run's;
the exit code is 0 only if they do.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import configure
from common.command import run_command
from common.progress import progress_bar
from data.mixture import check_sets
from runtime import RunError, checkpoint
from runtime.checkpoint import DamagedError
from runtime.metrics import ARRAYS, read_metrics
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
TRIES = 20  # a job may reach its end before a fault so often


class Fault(NamedTuple):
    """A fault that the run survived."""

    kind: str
    place: str  # "in a save", "in a step" or "at the start"
    steps_lost: int


class Run(NamedTuple):
    """A run that is started several times; its output goes to the file <folder>.log."""

    folder: Path
    command: list[str]
    ranks: int
    max_steps: int

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.folder / "checkpoints"

    @contextmanager
    def start(self) -> Iterator[subprocess.Popen]:
        """Within it, the job runs: train.py, or torchrun over its ranks."""
        with open(f"{self.folder}.log", "ab") as log:
            job = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield job
        finally:
            job.kill()  # no effect once it has ended; the kernel then signals the ranks under torchrun

    def find_ranks(self, job: subprocess.Popen) -> list[int]:
        """Process ids of the ranks started so far; without torchrun, of the job itself."""
        if self.ranks == 1:
            return [job.pid]
        found = subprocess.run(["pgrep", "-P", str(job.pid), "-f", TRAIN.name], capture_output=True, text=True)
        return [int(line) for line in found.stdout.split()]

    def wait(self, job: subprocess.Popen) -> int:
        """The exit code, once all ranks are gone too."""
        pids = self.find_ranks(job)
        code = job.wait()
        while any(Path("/proc", str(pid)).exists() for pid in pids):
            time.sleep(0.02)
        return code

    def find_intact_step(self) -> int:
        """Step of the newest intact checkpoint, 0 if there is none."""
        for step in reversed(checkpoint.steps(self.checkpoints)):
            with suppress(DamagedError):
                return checkpoint.verify(checkpoint.folder_of(self.checkpoints, step))["step"]
        return 0

    def read_last_step(self) -> int:
        """The last step in metrics.jsonl, 0 if there is none."""
        try:
            return max((line["step"] for line in read_metrics(self.folder / "metrics.jsonl")), default=0)
        except (RunError, OSError):  # being written right now
            return 0


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
    except BrokenPipeError:  # an OSError that is for run_command
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare_runs(args: argparse.Namespace, file: str, overrides: list[str]) -> int:
    """Train both runs and print the comparison; returns the exit status. Raises ValueError and OSError."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    runs = []
    for name in ("undisturbed", "disturbed"):
        options = [*DEFAULTS, *overrides, f"--run.dir={args.out}", f"--run.name={name}"]
        config = configure.load(file, options, args.ranks)
        check_sets(config.data.folders, config.model.vocab_size)
        command = [sys.executable, *(launcher if args.ranks > 1 else []), str(TRAIN), file, *options]
        runs.append(run := Run(Path(args.out, name), command, args.ranks, config.train.max_steps))
        shutil.rmtree(run.folder, ignore_errors=True)
        Path(f"{run.folder}.log").unlink(missing_ok=True)
    calm, torn = runs
    Path(args.out).mkdir(parents=True, exist_ok=True)
    print("the undisturbed run …", flush=True)
    started = time.perf_counter()
    train_to_the_end(calm)
    print(f"… took {time.perf_counter() - started:.0f} s; now with {args.faults} faults", flush=True)
    return print_report(calm, torn, train_under_faults(torn, args.faults, random.Random(args.seed)))


def train_to_the_end(run: Run) -> None:
    """Start the run and wait for its end. Raises RunError if that is not a success."""
    with run.start() as job:
        if code := run.wait(job):
            raise RunError(f"{run.folder}: ended with exit code {code}, see {run.folder}.log")


def train_under_faults(run: Run, faults: int, rng: random.Random) -> list[Fault]:
    """Train to the end, with `faults` faults on the way. Raises RunError if the job ends otherwise."""
    moments = sorted(rng.uniform(0, 0.9 * run.max_steps) for _ in range(faults))  # before its end
    survived, bar = [], progress_bar(every=60, desc="faults", total=faults)
    before = Path(f"{run.folder}.before")
    for moment in moments:
        copy_folder(run.folder, before)
        for _ in range(TRIES):
            if fault := train_until_fault(run, moment, rng):
                break
            copy_folder(before, run.folder)
        else:
            remedy = "set a larger --train.max_steps"
            raise RunError(f"{run.folder}: ended before a fault {TRIES} times, see {run.folder}.log; {remedy}")
        survived.append(fault)
        bar.update()
    bar.close()
    shutil.rmtree(before, ignore_errors=True)
    train_to_the_end(run)
    return survived


def copy_folder(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`, which may be missing."""
    shutil.rmtree(target, ignore_errors=True)
    if source.exists():
        shutil.copytree(source, target)


def train_until_fault(run: Run, moment: float, rng: random.Random) -> Fault | None:
    """Train to about step `moment` and end the job there; None if it reached its end before. Raises RunError."""
    before = run.find_intact_step()
    with run.start() as job:
        code = wait_for_moment(run, job, moment, before, rng)
        if code:
            raise RunError(f"{run.folder}: ended by itself with exit code {code}, see {run.folder}.log")
        reached = max(run.read_last_step(), before)
        kind = rng.choices([*FAULTS], [*FAULTS.values()])[0]
        saving = any(run.checkpoints.glob("step_*.tmp"))
        if code == 0 or not inject_fault(kind, run, job, rng):
            return None
    place = "in a save" if saving else "in a step" if reached > before else "at the start"
    return Fault(kind, place, max(0, reached - run.find_intact_step()))


def wait_for_moment(run: Run, job: subprocess.Popen, moment: float, before: int, rng: random.Random) -> int | None:
    """Wait for step `moment`, or a few steps after `before`, where the job resumes; returns its exit code if it ends.

    One time in four, wait only for some moment of the start.
    """
    begun, target = time.time(), max(moment, before + rng.uniform(0, 3))
    patience = rng.uniform(0, START_SECONDS) if rng.random() < 0.25 else float("inf")
    metrics = run.folder / "metrics.jsonl"
    while job.poll() is None and time.time() <= begun + patience:
        if metrics.exists() and metrics.stat().st_mtime > begun and run.read_last_step() >= target:
            time.sleep(rng.uniform(0, 0.1))  # somewhere in a step
            break
        time.sleep(0.005)
    return job.poll()


def inject_fault(kind: str, run: Run, job: subprocess.Popen, rng: random.Random) -> bool:
    """End the job and damage its files as `kind` says; False if it had ended. Raises RunError if it ignores SIGTERM."""
    number = signal.SIGTERM if "SIGTERM" in kind else signal.SIGKILL
    pids = run.find_ranks(job) if "to a rank" in kind else []
    os.kill(rng.choice(pids or [job.pid]), number)
    code = run.wait(job)
    if code == 0:
        return False
    if number == signal.SIGTERM and run.ranks == 1 and code not in (EXIT_CODE, -number):
        raise RunError(f"{run.folder}: exit code {code} after SIGTERM, expected {EXIT_CODE}")
    steps = checkpoint.steps(run.checkpoints)
    if "checkpoint" in kind and len(steps) > 1:  # the run has to resume from the one before it
        file = rng.choice(sorted(checkpoint.folder_of(run.checkpoints, steps[-1]).iterdir()))
        data = bytearray(file.read_bytes())
        if "flipped" in kind:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        file.write_bytes(data)
    if "half a line" in kind:
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1')
    return True


def print_report(calm: Run, torn: Run, faults: list[Fault]) -> int:
    """Compare the two runs; returns 0 if weights, AdamW's state and metrics are equal, else 1."""
    (files, losses), (torn_files, torn_losses) = read_results(calm), read_results(torn)
    kinds, places = (Counter(column) for column in list(zip(*faults, strict=True))[:2])
    print(f"\n{len(faults)} faults survived: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    print(", ".join(f"{count} {place}" for place, count in places.items()))
    lost = [fault.steps_lost for fault in faults]
    print(f"steps lost: {sum(lost)} in all, {max(lost)} at most, of {torn.max_steps}")
    words = {True: "equal", False: "DIFFERENT"}
    print(f"weights and AdamW's state at step {torn.max_steps}: {words[files == torn_files]}")
    print(f"metrics.jsonl, {len(losses)} lines without times: {words[losses == torn_losses]}")
    return 0 if files == torn_files and losses == torn_losses else 1


def read_results(run: Run) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """SHA-256 of the files of the last checkpoint, and the lines of metrics.jsonl with arrays and without times."""
    manifest = checkpoint.verify(checkpoint.folder_of(run.checkpoints, run.max_steps))
    files = {name: entry["sha256"] for name, entry in manifest["files"].items() if name != ".metadata"}
    lines = read_metrics(run.folder / "metrics.jsonl", ARRAYS)
    return files, [{key: line[key] for key in line if not key.startswith("perf/")} for line in lines]


if __name__ == "__main__":
    run_command(main)
