"""Train every point of a config's [sweep]: in turn, several at a time, or as a Slurm array.

    python -m scripts.sweep config/quickstart.toml [--section.key=value ...]
    python -m scripts.sweep config/paper/books3_512.toml '--run.seed=[0,1,2]' --parallel 4
    python -m scripts.sweep config/paper/books3_512.toml --slurm array.sbatch

Each point is `train.py` with the point's overrides, on all GPUs of this machine or its share of
them. A list for a key is one more axis. Finished points are skipped, interrupted ones resume from
their last checkpoint. A point that fails is reported at the end and the others continue; the exit
code is then 1. The last lines are a table of all points. Asked to stop (SIGTERM, SIGUSR1, SIGHUP,
Ctrl-C), all running points save and the sweep ends with exit code 75.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m scripts.sweep")

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import configure
from common.command import build_parser, command, run_command
from common.cores import count_cores
from common.files import write_atomic
from common.text import format_bytes, plural
from configure import Config, ConfigError
from data import DataError
from data.loader import check_sets
from runtime import RunError, checkpoint, folder
from runtime.distributed import GPUS
from runtime.folder import RunFolder, find_branch
from runtime.launch import EXIT_CODE, Stop, end_with_parent, protect_output
from scripts import plan
from scripts.watch import read_places

REPO_ROOT = Path(__file__).parent.parent
TRAIN = REPO_ROOT / "train.py"
SBATCH = REPO_ROOT / "scripts/slurm/train.sbatch"


class Point(NamedTuple):
    """One run of the sweep."""

    number: str  # such as 3/12
    overrides: list[str]
    config: Config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return folder.path_of(self.config)

    def command(self, file: str, ranks: int) -> str:
        """The command that a user would type."""
        launcher = ["python"]
        if ranks > 1:
            launcher = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
        return shlex.join([*launcher, "train.py", file, *self.overrides])

    def steps_done(self) -> int:
        """Step of its last checkpoint; max_steps if nothing is left to do."""
        max_steps = self.config.train.max_steps
        run = RunFolder(self.folder)
        try:
            run.find_changes(self.config)
            if run.is_complete(self.config, run.last_step):
                return max_steps
        # the folder holds another config's run: train.py explains it better
        except (RunError, ConfigError):
            return 0
        return min(run.last_step, max_steps - 1)


class Job(NamedTuple):
    """A point that is training."""

    point: Point
    gpus: list[str]  # names as in CUDA_VISIBLE_DEVICES; empty: on the CPU
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Ask it to save and end.

        The ranks are asked directly, because torchrun would give them only 30 seconds.
        """
        if len(self.gpus) <= 1:
            self.process.terminate()
            return
        parent = f"\nPPid:\t{self.process.pid}\n".encode()
        for status in Path("/proc").glob("[0-9]*/status"):  # containers may lack pgrep
            with suppress(OSError):  # a process has ended meanwhile
                if parent in status.read_bytes():  # a name may be no UTF-8
                    os.kill(int(status.parent.name), signal.SIGUSR1)


def make_parser() -> argparse.ArgumentParser:
    """The options of the command; all else is the config file and its overrides."""
    parser = build_parser("scripts.sweep", __doc__)
    parser.usage = "python -m scripts.sweep FILE [--section.key=value ...] [options]"
    parser.allow_abbrev = False
    parser.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="run N points at a time, each on its share of GPUs",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands and totals, run nothing"
    )
    parser.add_argument(
        "--slurm", type=Path, metavar="OUT", help="write a Slurm array script, one task per point"
    )
    return parser


@command
def main(argv: list[str], stop: Stop | None = None) -> int:
    """Run the command; returns the exit status."""
    args, config_arguments = make_parser().parse_known_args(argv)
    file, overrides = configure.split_command_line(config_arguments)
    points = list_points(file, overrides)
    left = [point for point in points if point.steps_done() < point.config.train.max_steps]
    shares = split_gpus(find_gpus(points), 1 if args.parallel is None else args.parallel)
    trains = not args.slurm and not args.dry_run
    if not args.slurm:
        check_points(file, left, len(shares[0]), with_files=trains)
    print(format_totals(points, left), flush=True)
    if not trains:
        for error in find_data_errors(left):  # they may run on another machine
            print(f"warning: {error}", file=sys.stderr)
    if args.slurm:
        if left:
            write_slurm_array(args.slurm, file, left, args.parallel)
        return 0
    for point in points:
        if point not in left:
            print(f"[{point.number}] finished already: {point.folder}")
        elif args.dry_run:
            print(f"[{point.number}] {point.command(file, len(shares[0]))}")
    if args.dry_run:
        return 0
    stop = stop or Stop()
    failed = []
    for point, code in train_points(file, left, shares, stop, announce=True):
        if code:
            failed.append(point)
    if stop.asked:
        return EXIT_CODE
    for point in failed:
        log = f"    # log: {point.folder}/train.log" if len(shares) > 1 else ""
        print(f"failed: {point.command(file, len(shares[0]))}{log}", file=sys.stderr)
    folders = [point.folder for point in points]
    print(f"\n{read_places(folders)}\n\npython -m scripts.report {shlex.join(map(str, folders))}")
    return 1 if failed else 0


def check_points(file: str, left: list[Point], ranks: int, with_files: bool) -> None:
    """Check, before the first point starts, what would end a later one.

    Raises:
        ConfigError, DataError, RunError: what train.py would say.
    """
    for point in left:
        configure.load(file, point.overrides, world_size=max(1, ranks))
    if not with_files:
        return
    folders = {point.folder for point in left}
    for point in left:
        trained_before = Path(point.config.train.branch_from) in folders
        if not trained_before and not checkpoint.steps(point.folder / "checkpoints"):
            find_branch(point.config)
    for error in find_data_errors(left):
        raise error


def find_refused(file: str, points: list[Point], ranks: int) -> dict[str, str]:
    """{what train.py says on so many ranks: number of the first of the points that it refuses}."""
    refused: dict[str, str] = {}
    for point in points:
        try:
            configure.load(file, point.overrides, world_size=ranks)
        except configure.ConfigError as error:
            refused.setdefault(str(error), point.number)
    return refused


def find_data_errors(points: list[Point]) -> list[DataError]:
    """What is wrong with the data that the points read, each combination once."""
    sets = {(tuple(point.config.data.folders), point.config.model.vocab_size) for point in points}
    errors = []
    for folders, vocab_size in sorted(sets):
        try:
            check_sets(folders, vocab_size)
        except DataError as error:
            errors.append(error)
    return errors


def list_points(file: str, overrides: list[str]) -> list[Point]:
    """Every point of the sweep. Raises ConfigError.

    A point is in the folder that train.py would use for it: another one if a run of an edited
    config has its own.
    """
    combinations = configure.sweep_points(file, overrides)
    is_chosen = configure.is_name_chosen(file, overrides)
    points = []
    for number, point in enumerate(combinations, 1):
        config = configure.load(file, point)
        name = config.run.name
        if not is_chosen:
            with suppress(RunError, ConfigError):  # train.py explains it better
                config = folder.find_or_rename(config)
        if config.run.name != name:
            point = [*point, f"--run.name={config.run.name}"]
        points.append(Point(f"{number}/{len(combinations)}", point, config))
    return points


def find_gpus(points: list[Point]) -> list[str]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them; none if no point uses one."""
    if not torch.cuda.is_available() or all(point.config.train.device == "cpu" for point in points):
        return []
    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[:count] or [str(i) for i in range(count)]


def split_gpus(gpus: list[str], parallel: int) -> list[list[str]]:
    """`parallel` lists of GPUs, all of one length; points that outnumber GPUs share them.

    Raises ConfigError.
    """
    if parallel < 1:
        raise ConfigError(f"--parallel {parallel}: expected 1 or more")
    if not gpus:
        return [[] for _ in range(parallel)]
    size = max(1, len(gpus) // parallel)
    starts = [i * size % len(gpus) for i in range(parallel)]
    return [gpus[start : start + size] for start in starts]


def format_totals(points: list[Point], left: list[Point]) -> str:
    """One line on what is left to do: tokens, hours on an H100, disk."""
    line = f"{plural(len(points), 'point')}, {len(points) - len(left)} finished"
    if not left:
        return line
    tokens = hours = disk = 0.0
    for point in left:
        train = point.config.train
        share = 1 - max(point.steps_done(), train.branch_step) / train.max_steps
        checkpoints = train.keep_checkpoints + len(train.kept_steps)
        tokens += share * plan.count_tokens(point.config)
        hours += share * plan.estimate_hours(point.config, 1, GPUS["H100"])
        disk += checkpoints * plan.checkpoint_bytes(point.config)
    line += f"; to do: {tokens / 1e6:,.2f} M tokens"
    if hours >= 0.05:  # less is trained on a CPU
        line += f", {hours:,.1f} GPU hours (H100, MFU estimated)"
    return f"{line}, {format_bytes(disk)} of checkpoints"


def train_points(
    file: str, points: list[Point], shares: list[list[str]], stop: Stop, announce: bool = False
) -> Iterator[tuple[Point, int]]:
    """Train points until `stop`, each on one of the `shares` of the GPUs.

    Yields each point that ended with its exit code. A point that was stopped, by whomever, stops
    all: `stop.asked` says so. The output of points goes to their runs' train.log, unless they are
    announced and train in turn.
    """
    waiting = list(points)
    free = list(shares)
    running: list[Job] = []
    stopping = False
    has_log = len(shares) > 1 or not announce
    while running or (waiting and not stop.asked):
        if stop.asked and not stopping:
            stopping = True
            for job in running:
                job.stop()
        while waiting and free and not stop.asked:
            point = waiting.pop(0)
            gpus = free.pop(0)
            if announce:
                log = f"    # log: {point.folder}/train.log" if has_log else ""
                print(f"[{point.number}] {point.command(file, len(gpus))}{log}", flush=True)
            running.append(start_point(file, point, gpus, len(shares), has_log))
        # a second Ctrl-C: the points were asked already, so keep waiting
        with suppress(KeyboardInterrupt):
            time.sleep(0.1)
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            free.append(job.gpus)
            code = job.process.returncode
            if code == EXIT_CODE:
                stop.asked = True
            if announce and has_log:
                print(f"[{job.point.number}] exit code {code}: {job.point.folder}", flush=True)
            yield job.point, code


def start_point(file: str, point: Point, gpus: list[str], n_job: int, has_log: bool) -> Job:
    """Start train.py on `gpus`, one of `n_job` jobs, each with a share of the cores."""
    launcher = [sys.executable]
    if len(gpus) > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(gpus)}"]
    env = dict(os.environ)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif has_log:
        env.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // n_job)))
    log = point.folder / "train.log"
    if has_log:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") if has_log else nullcontext() as out:
        # In a process group of its own Ctrl-C reaches only the sweep, which passes it on once.
        process = subprocess.Popen(
            [*launcher, TRAIN, file, *point.overrides],
            env=env,
            stdout=out,
            stderr=out,
            process_group=0,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    return Job(point, gpus, process)


def write_slurm_array(path: Path, file: str, left: list[Point], parallel: int | None) -> None:
    """Write scripts/slurm/train.sbatch as an array with one task per point.

    `parallel` tasks run at a time.
    """
    limit = "" if parallel is None else f"%{parallel}"
    sbatch = SBATCH.read_text()
    options = "\n".join(re.findall(r"^#SBATCH (?!--output).*", sbatch, re.MULTILINE))
    tasks = []
    for task, point in enumerate(left):
        tasks.append(f"    {task}) set -- {shlex.join([file, *point.overrides])} ;;\n")
    n_gpu = re.search(r"--gpus-per-node=(?:\w+:)?(\d+)\b", options)
    if n_gpu:
        for fault, number in find_refused(file, left, int(n_gpu[1])).items():
            print(f"warning: [{number}] {fault}, or sbatch --gpus-per-node=N", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"""\
#!/usr/bin/env bash
# {len(left)} points, one task each. Submit it with sbatch from the checkout's root.
# Written by python -m scripts.sweep --slurm. It runs scripts/slurm/train.sbatch, which
# explains what it needs.
{options}
#SBATCH --array=0-{len(left) - 1}{limit}
#SBATCH --output=nanokern-%A_%a.out
case "$SLURM_ARRAY_TASK_ID" in
{"".join(tasks)}esac
exec bash {shlex.quote(str(SBATCH))} "$@"
"""
    write_atomic(path, text)
    print(f"sbatch {shlex.quote(str(path))}    # {len(left)} tasks")


if __name__ == "__main__":
    protect_output()  # a sweep trains on when its terminal is closed
    run_command(lambda: main(sys.argv[1:], Stop().listen()))
