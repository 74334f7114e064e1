"""Train one run twice, once undisturbed and once under faults, and compare them bit by bit.

    python -m scripts.chaos config/quickstart.toml --faults 100 --model.router=kern --train.max_steps=200
    python -m scripts.chaos config/quickstart.toml --faults 20 --ranks 2 --train.micro_batch_size=4

A fault comes at a random moment: while the job starts, in a step, in a save. The job is then started again until the
next. With more than one rank the job is torchrun's. Prints the faults survived, the steps lost and whether weights,
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
from pathlib import Path

from tqdm import tqdm

import configure
from data.bins import check_dataset
from runtime import RunError, checkpoint, folder
from runtime.checkpoint import DamagedError
from runtime.metrics import read
from runtime.signals import EXIT_CODE

TRAIN = Path(__file__).parent.parent / "train.py"
DEFAULTS = ["--log.interval=1", "--train.checkpoint_interval=2", "--train.timeout_minutes=1"]
FAULTS = {
    "SIGKILL to a rank": 6,
    "SIGKILL to the launcher": 2,  # or, without one, to the process
    "SIGTERM to a rank": 2,
    "SIGTERM to the launcher": 2,
    "bit flipped in the latest checkpoint": 2,
    "latest checkpoint cut short": 1,
    "half a line in metrics.jsonl": 1,
}  # how often, one to another


class Job:
    """train.py on some ranks, its output in a file."""

    def __init__(self, file, overrides, ranks, log):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*(launcher if ranks > 1 else [sys.executable]), str(TRAIN), file, *overrides]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.ranks = ranks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()  # ranks under torchrun are told of it by the kernel

    def rank_processes(self):
        """Process ids of the ranks, as far as they are there yet; the process itself without torchrun."""
        if self.ranks == 1:
            return [self.process.pid]
        found = subprocess.run(["pgrep", "-P", str(self.process.pid), "-f", TRAIN.name], capture_output=True, text=True)
        return [int(line) for line in found.stdout.split()]

    def send(self, number, to_rank, choice):
        pids = self.rank_processes() if to_rank else []
        os.kill(choice(pids) if pids else self.process.pid, number)

    def wait(self):
        """The exit code, when all its ranks are gone too."""
        pids = self.rank_processes()
        code = self.process.wait()
        while any(Path("/proc", str(pid)).exists() for pid in pids):
            time.sleep(0.02)
        return code


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="more than one: under torchrun (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    parser.add_argument(
        "--out", default="runs/chaos", help="folder of the two runs, which are begun anew (default: %(default)s)"
    )
    args, rest = parser.parse_known_args(argv)
    if args.faults < 1 or args.ranks < 1:
        parser.error("--faults and --ranks need at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `finally`, below
    try:
        file, overrides = configure.split_command_line(rest)
        overrides = [*DEFAULTS, *overrides, f"--run.dir={args.out}"]
        names = ["undisturbed", "disturbed"]
        calm, torn = (configure.load(file, [*overrides, f"--run.name={name}"], args.ranks) for name in names)
        check_dataset(Path(calm.data.dir, calm.data.name), calm.model.vocab_size)
        out, ours = Path(args.out), [*names, *(f"{name}.log" for name in names)]
        if out.is_dir() and (others := sorted(set(os.listdir(out)) - set(ours))):
            raise RunError(f"{out} holds more than this script's runs ({others[0]} …): name another folder by --out")
        for name in names:
            shutil.rmtree(out / name, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        print("the undisturbed run …", flush=True)
        started = time.perf_counter()
        with Path(args.out, "undisturbed.log").open("w") as log:
            arguments = file, [*overrides, "--run.name=undisturbed"], args.ranks, log
            with Job(*arguments) as job:
                code = job.wait()
            if code:
                raise RunError(f"{log.name}: the undisturbed run has failed")
        print(f"… took {time.perf_counter() - started:.0f} s; now with {args.faults} faults", flush=True)
        with Path(args.out, "disturbed.log").open("w") as log:
            arguments = file, [*overrides, "--run.name=disturbed"], args.ranks, log
            return report(calm, torn, *disturb(torn, arguments, args.faults, random.Random(args.seed)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def disturb(config, arguments, faults, dice):
    """Train under faults to the end. Returns (Counter of faults, steps lost to each, Counter of where they struck)."""
    path = folder.path_of(config)
    when = sorted(dice.uniform(0, config.train.max_steps - 1) for _ in range(faults))
    done, lost, places = Counter(), [], Counter()
    for moment in tqdm(when, unit="fault"):
        before = latest(path)
        with Job(*arguments) as job:
            code = wait_until(job, path, moment, before, dice)
            if code is not None:
                more = "; set a larger --train.max_steps" if code == 0 else ""
                raise RunError(f"{path}: ended by itself with exit code {code}, see {path}.log{more}")
            reached = max(last_step(path), before)
            kind = dice.choices([*FAULTS], FAULTS.values())[0]
            saving = any((path / "checkpoints").glob("step_*.tmp"))
            strike(kind, job, path, dice)
        places["in a save" if saving else "in a step" if reached > before else "at the start"] += 1
        done[kind] += 1
        lost.append(max(0, reached - latest(path)))
    with Job(*arguments) as job:
        code = job.wait()
    if code:
        raise RunError(f"{path}: the last start ended with exit code {code}, see {path}.log")
    return done, lost, places


def wait_until(job, path, moment, before, dice):
    """Until the run has come to step `moment`, and some steps beyond `before`, where it began; one in four times until
    some moment of its start. Returns its exit code if it ends by itself."""
    begun, target = time.time(), max(moment, before + dice.uniform(0, 3))
    patience = dice.uniform(0, 4) if dice.random() < 0.25 else float("inf")
    metrics = path / "metrics.jsonl"
    while job.process.poll() is None:
        if time.time() > begun + patience:
            break
        if metrics.exists() and metrics.stat().st_mtime > begun and last_step(path) >= target:
            time.sleep(dice.uniform(0, 0.1))  # somewhere in a step
            break
        time.sleep(0.005)
    return job.process.poll()


def strike(kind, job, path, dice):
    number = signal.SIGTERM if "SIGTERM" in kind else signal.SIGKILL
    job.send(number, "to a rank" in kind, dice.choice)
    code = job.wait()
    if number == signal.SIGTERM and job.ranks == 1 and code not in (EXIT_CODE, -number):
        raise RunError(f"{path}: exit code {code} after SIGTERM, expected {EXIT_CODE}")
    steps = checkpoint.steps(path / "checkpoints")
    if "checkpoint" in kind and len(steps) > 1:  # the one before it must do
        file = dice.choice(sorted(checkpoint.folder_of(path / "checkpoints", steps[-1]).iterdir()))
        data = bytearray(file.read_bytes())
        if "flipped" in kind:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            del data[dice.randrange(len(data)) :]
        file.write_bytes(data)
    if "half a line" in kind:
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1')


def latest(path):
    """Step of the newest whole checkpoint, 0 if there is none."""
    for step in reversed(checkpoint.steps(path / "checkpoints")):
        try:
            return checkpoint.verify(checkpoint.folder_of(path / "checkpoints", step))["step"]
        except DamagedError:
            continue
    return 0


def last_step(path):
    """That metrics.jsonl tells of."""
    try:
        return max((line["step"] for line in read(path / "metrics.jsonl")), default=0)
    except (RunError, OSError):  # just being written
        return 0


def report(calm, torn, done, lost, places):
    last = torn.train.max_steps
    files = []
    for config in (calm, torn):
        whole = checkpoint.verify(checkpoint.folder_of(folder.path_of(config) / "checkpoints", last))
        files.append({name: entry["sha256"] for name, entry in whole["files"].items() if name != ".metadata"})
    losses = [untimed(read(folder.path_of(config) / "metrics.jsonl")) for config in (calm, torn)]
    print(f"\n{sum(done.values())} faults survived: " + ", ".join(f"{count} {kind}" for kind, count in done.items()))
    print("struck " + ", ".join(f"{count} {place}" for place, count in places.items()))
    every = torn.train.checkpoint_interval
    print(f"steps lost: {sum(lost)} in all, {max(lost)} at most, of {last}; a checkpoint each {every}")
    print(f"weights and AdamW's state at step {last}: {'equal, bit for bit' if files[0] == files[1] else 'DIFFERENT'}")
    print(f"metrics.jsonl, {len(losses[0])} lines but for times: {'equal' if losses[0] == losses[1] else 'DIFFERENT'}")
    return 0 if files[0] == files[1] and losses[0] == losses[1] else 1


def untimed(lines):
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


if __name__ == "__main__":
    sys.exit(main())
