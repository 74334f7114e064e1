"""Train every point of a config's [sweep]: in turn, several at once, or as a Slurm array.

    python -m scripts.sweep config/quickstart.toml [--section.key=value ...]
    python -m scripts.sweep config/paper/books3_512.toml '--run.seed=[0,1,2]' --parallel 4
    python -m scripts.sweep config/paper/books3_512.toml --scale 0.01        a rehearsal, in runs/rehearsal-0.01
    python -m scripts.sweep config/paper/books3_512.toml --slurm array.sbatch

Each point is `train.py` with the point's overrides, on all GPUs of this machine or its share of them. A list for a key
is one more axis. Finished points are skipped, interrupted ones resume from their last checkpoint. A point that fails is
reported at the end and the others continue; the exit code is then 1. The last lines are a table of all points. Asked to
stop (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C), all running points save and the sweep ends with exit code 75.
"""

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import configure
from common.command import build_parser, command, run_command
from common.text import plural, text_table
from configure import Config, ConfigError
from data.mixture import check_sets
from runtime import RunError, checkpoint, folder
from runtime.branch import find_branch
from runtime.distributed import PEAK_FLOPS
from runtime.folder import RunFolder
from runtime.memory import format_bytes
from runtime.metrics import read_metrics
from runtime.signals import EXIT_CODE, Stop
from scripts import plan

REPO_ROOT = Path(__file__).parent.parent
TRAIN = REPO_ROOT / "train.py"
SBATCH = REPO_ROOT / "scripts/slurm/train.sbatch"
# Multiplied by --scale. 0, which disables, and -1, a tenth of the run, stay.
SCALED = (
    *("train.max_steps", "train.checkpoint_interval", "optim.warmup_steps"),
    *("eval.interval", "eval.windows", "log.interval"),
)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class Point(NamedTuple):
    """One run of the sweep."""

    number: str  # such as 3/12
    overrides: list[str]
    config: Config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return folder.path_of(self.config)

    @property
    def run(self) -> RunFolder:
        """What that folder holds now."""
        return RunFolder(self.folder)

    def command(self, file: str, ranks: int) -> str:
        """The command that a user would type."""
        start = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else ["python"]
        return shlex.join([*start, "train.py", file, *self.overrides])

    def steps_done(self) -> int:
        """Step of its last checkpoint; max_steps if nothing is left to do."""
        try:
            self.run.find_changes(self.config)
            step = self.run.last_step
            finished = self.run.is_finished(self.config, step)
        except (RunError, ConfigError):  # the folder holds another config's run: train.py explains it better
            return 0
        return self.config.train.max_steps if finished else min(step, self.config.train.max_steps - 1)

    def last_values(self) -> dict[str, Any]:
        """The last value of each name in its metrics.jsonl, but the median tokens/s; empty if the file is broken."""
        values, speeds = {}, []
        with suppress(RunError):
            for line in read_metrics(self.folder / "metrics.jsonl"):
                values |= line
                speeds += [line["perf/tokens_per_sec"]] if "perf/tokens_per_sec" in line else []
        return values | {"perf/tokens_per_sec": median(speeds)} if speeds else values

    def progress(self) -> str:
        """`runs/name: step 300 of 1,000, train/loss 2.3456`."""
        values = self.last_values()
        losses = [f", {name} {values[name]:.4f}" for name in ("train/loss", "val/loss") if name in values]
        return f"{self.folder}: step {values.get('step', 0):,} of {self.config.train.max_steps:,}{''.join(losses)}"


class Job(NamedTuple):
    """A point that is training."""

    point: Point
    gpus: list[str]  # as CUDA_VISIBLE_DEVICES names them; empty: on the CPU
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, point: Point, file: str, gpus: list[str], threads: int, log: bool) -> "Job":
        """Start train.py on `gpus`, or on the CPU with `threads` threads (0: torch's own number).

        With `log` its output goes to train.log in the run's folder.
        """
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(gpus)}"]
        environment = dict(os.environ)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        elif threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if log:
            point.folder.mkdir(parents=True, exist_ok=True)
        with (point.folder / "train.log").open("ab") if log else nullcontext() as output:
            process = subprocess.Popen(
                [*(launch if len(gpus) > 1 else [sys.executable]), TRAIN, file, *point.overrides],
                env=environment,
                stdout=output,
                stderr=output,
                process_group=0,  # so that Ctrl-C reaches only the sweep, which passes it on once
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        return cls(point, gpus, process)

    def stop(self) -> None:
        """Ask it to save and end: the ranks directly, because torchrun would give them only 30 seconds."""
        ranks = []
        if len(self.gpus) > 1:
            with suppress(OSError):
                pgrep = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
                ranks = [int(pid) for pid in pgrep.stdout.split()]
        for pid in ranks or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1 if ranks else signal.SIGTERM)


def end_with_parent(parent: int) -> None:
    """Have Linux send this process SIGTERM when its `parent` dies, however it does: train.py then saves and ends."""
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own options, and the rest for train.py."""
    parser = build_parser("scripts.sweep", __doc__)
    parser.usage, parser.allow_abbrev = "python -m scripts.sweep FILE [--section.key=value ...] [options]", False
    parser.add_argument("--parallel", type=int, metavar="N", help="run N points at once, each on its share of GPUs")
    parser.add_argument("--scale", type=float, metavar="X", help="a rehearsal: steps and intervals times X, 0 < X < 1")
    parser.add_argument("--fresh", action="store_true", help="start every point over, in a new folder")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and totals, run nothing")
    parser.add_argument("--slurm", type=Path, metavar="OUT", help="write a Slurm array script, one task per point")
    parser.add_argument("--gpu", choices=PEAK_FLOPS, default="H100", help="for the estimate of hours (%(default)s)")
    parser.add_argument("--mfu", default="0.4", help="model FLOPs utilisation, or a run that measured it (%(default)s)")
    return parser.parse_known_args(argv)


@command
def main(argv: list[str], stop: Stop | None = None) -> int:
    """The command; returns the exit status."""
    args, rest = parse_arguments(argv)
    file, overrides = configure.split_command_line(rest)
    points = list_points(file, overrides, args.scale, args.fresh)
    left = [point for point in points if point.steps_done() < point.config.train.max_steps]
    shares = split_gpus(find_gpus(points), 1 if args.parallel is None else args.parallel)
    if not args.slurm:
        check_points(file, left, len(shares[0]), with_files=not args.dry_run)
    print(format_totals(points, left, args, shares), flush=True)
    if args.slurm:
        write_slurm_array(args.slurm, file, left, args.parallel)
        return 0
    for point in points:
        if point not in left:
            print(f"[{point.number}] finished already: {point.folder}")
        elif args.dry_run:
            print(f"[{point.number}] {point.command(file, len(shares[0]))}")
    if args.dry_run:
        return 0
    code = Pool(file, left, shares).run(stop or Stop())
    if code != EXIT_CODE:
        print(f"\n{format_results(points)}", flush=True)
    return code


def check_points(file: str, left: list[Point], ranks: int, with_files: bool) -> None:
    """Raise ConfigError, DataError or RunError, before the first point starts, for what would end a later one."""
    folders = {point.folder for point in left}
    for point in left:
        configure.load(file, point.overrides, world_size=max(1, ranks))
        trained_before = Path(point.config.train.branch_from) in folders
        if with_files and not trained_before and not checkpoint.steps(point.folder / "checkpoints"):
            find_branch(point.config)
    sets = {(*point.config.data.folders, point.config.model.vocab_size) for point in left}
    for *data, vocab_size in sorted(sets) if with_files else ():
        check_sets(data, vocab_size)


def list_points(file: str, overrides: list[str], scale: float | None = None, fresh: bool = False) -> list[Point]:
    """Every point of the sweep, made smaller by `scale` if it is given, in new folders if `fresh`. Raises ConfigError.

    Raises RunError if a launcher restarts a `fresh` sweep: it would begin new runs each time.
    """
    if scale is not None and not 0 < scale < 1:
        raise ConfigError(f"--scale {scale:g}: expected a number between 0 and 1, such as 0.01")
    combinations = configure.sweep_points(file, overrides)
    points = []
    for number, point in enumerate(combinations, 1):
        if scale is not None:
            point = [*point, *scale_down(configure.load(file, point), scale)]
        plain = configure.load(file, point)
        config = folder.renamed(plain) if fresh else choose_folder(plain, file, point)
        if config.run.name != plain.run.name:
            point = [*point, f"--run.name={config.run.name}"]
        points.append(Point(f"{number}/{len(combinations)}", point, config))
    return points


def choose_folder(config: Config, file: str, overrides: list[str]) -> Config:
    """`config` in the folder that train.py would take for it: another one if a run of an edited config has its own."""
    if not configure.is_name_chosen(file, overrides):
        with suppress(RunError, ConfigError):  # train.py explains it better
            return folder.find_or_rename(config)
    return config


def scale_down(config: Config, scale: float) -> list[str]:
    """Overrides that shorten a run and all its intervals, none below 1, in a folder and a group of its own."""
    values = {key: attrgetter(key)(config) for key in SCALED}
    overrides = [f"--{key}={max(1, round(value * scale))}" for key, value in values.items() if value > 0]
    name, train = f"rehearsal-{scale:g}", config.train
    if train.kept_steps:
        kept = ",".join(str(max(1, round(step * scale))) for step in sorted(train.kept_steps))
        overrides.append(f"--train.keep_steps={kept}")
    if train.branch_from:  # the trunk's rehearsal
        trunk = Path(train.branch_from)
        overrides.append(f"--train.branch_from={trunk.parent / name / trunk.name}")
    return [*overrides, f"--run.dir={config.run.dir}/{name}", f"--log.group={config.log.group}-{name}"]


def find_gpus(points: list[Point]) -> list[str]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES would name them; none if no point would use one."""
    if not torch.cuda.is_available() or all(point.config.train.device == "cpu" for point in points):
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[: torch.cuda.device_count()] or [str(i) for i in range(torch.cuda.device_count())]


def split_gpus(gpus: list[str], parallel: int) -> list[list[str]]:
    """`parallel` lists of GPUs, all of one length; points that outnumber GPUs share them. Raises ConfigError."""
    if parallel < 1:
        raise ConfigError(f"--parallel {parallel}: expected 1 or more")
    each = len(gpus) // parallel
    if not each:
        return [gpus[i % len(gpus) :][:1] if gpus else [] for i in range(parallel)]
    return [gpus[i * each : (i + 1) * each] for i in range(parallel)]


def format_totals(points: list[Point], left: list[Point], args: argparse.Namespace, shares: list[list[str]]) -> str:
    """What is left to do, in two lines: tokens, hours, disk. Raises ConfigError for a wrong --mfu."""
    peak, mfu = PEAK_FLOPS[args.gpu], plan.parse_mfu(args.mfu)
    line = f"{plural(len(points), 'point')}, {len(points) - len(left)} finished"
    if not left:
        return line
    tokens = hours = disk = 0.0
    for point in left:
        train = point.config.train
        share = 1 - max(point.steps_done(), train.branch_step) / train.max_steps
        tokens += share * plan.count_tokens(point.config)
        hours += share * plan.estimate_hours(point.config, 1, peak, mfu)
        disk += plan.checkpoint_bytes(point.config) * (train.keep_checkpoints + len(train.kept_steps))
    largest = max(plan.checkpoint_bytes(point.config) for point in left)
    in_writing = largest * min(len(shares), len(left))
    gpus = len({gpu for share in shares for gpu in share})
    amount = f"{tokens / 1e9:,.2f} B" if tokens >= 1e9 else f"{tokens / 1e6:,.2f} M"
    line += f"; to do: {amount} tokens, {hours:,.1f} GPU hours ({args.gpu}, MFU {mfu:.2f}"
    line += f", {hours / gpus:,.1f} h on the {gpus} here)" if gpus > 1 else ")"
    root = next(path for path in (Path(left[0].config.run.dir).absolute() / "_").parents if path.exists())
    free = shutil.disk_usage(root).free
    line += f"\ncheckpoints: {format_bytes(disk)} at the end, {format_bytes(in_writing)} more while they are written; "
    line += f"{format_bytes(free)} free"
    if disk + in_writing > free:
        line += "\nwarning: too little disk: lower --train.keep_checkpoints"
    return line


class Pool:
    """Trains points, as many at once as there are shares of the GPUs."""

    def __init__(self, file: str, points: list[Point], shares: list[list[str]]) -> None:
        self.file, self.waiting, self.free = file, [*points], [*shares]
        self.parallel = len(shares) > 1
        self.threads = max(1, len(os.sched_getaffinity(0)) // len(shares)) if self.parallel else 0
        self.running: list[Job] = []
        self.reported: set[str] = set()  # lines about points that other processes train

    def run(self, stop: Stop) -> int:
        """Train all points, or until `stop`; returns the exit status."""
        failed, passed_on = [], False
        while self.running or (self.waiting and not stop.asked):
            if stop.asked and not passed_on:
                passed_on = True
                for job in self.running:
                    job.stop()
            while not stop.asked and self._start_one():
                pass
            with suppress(KeyboardInterrupt):  # a second Ctrl-C: the points were asked already, so keep waiting
                time.sleep(0.1)
            for job in [job for job in self.running if job.process.poll() is not None]:
                code = self._end(job)
                if code == EXIT_CODE:
                    stop.asked = True
                elif code and not passed_on:
                    failed.append(job)
        self._report_failed(failed)
        return EXIT_CODE if stop.asked else int(len(failed) > 0)

    def _start_one(self) -> bool:
        """Start a point that no other process trains, if GPUs are free; whether one was started."""
        if not self.waiting or not self.free:
            return False
        owners = {point.number: point.run.find_owner() for point in self.waiting}
        point = next((point for point in self.waiting if not owners[point.number]), None)
        if point is None:  # the rest of a sweep that was killed is saving, or someone trains them by hand
            lines = {f"waiting: {owners[point.number]} trains {point.folder}" for point in self.waiting}
            for line in sorted(lines - self.reported):
                print(line, flush=True)
            self.reported |= lines
            return False
        self.waiting.remove(point)
        job = Job.start(point, self.file, self.free.pop(0), self.threads, log=self.parallel)
        self.running.append(job)
        log = f"; log: {point.folder}/train.log" if self.parallel else ""
        print(f"[{point.number}] {point.command(self.file, len(job.gpus))}{log}", flush=True)
        return True

    def _report_failed(self, jobs: list[Job]) -> None:
        for job in jobs:
            log = f" ({job.point.folder}/train.log)" if self.parallel else ""
            print(f"failed: {job.point.command(self.file, len(job.gpus))}{log}", file=sys.stderr)

    def _end(self, job: Job) -> int:
        """Take back the GPUs of a job that has ended, and report it; returns its exit code."""
        self.running.remove(job)
        self.free.append(job.gpus)
        code = job.process.returncode
        if self.parallel:
            how = {0: "finished", EXIT_CODE: "stopped"}.get(code, f"failed with exit code {code}")
            print(f"[{job.point.number}] {how}: {job.point.progress()}", flush=True)
        return code


def format_results(points: list[Point]) -> str:
    """A table of all points: router, values of the other axes, last losses, median tokens/s, folder."""
    keys = ["model.router"]
    for override in (override for point in points for override in point.overrides):
        key = override.removeprefix("--").partition("=")[0]
        values = {attrgetter(key)(point.config) for point in points}
        if key not in (*keys, "run.name") and len(values) > 1:
            keys.append(key)
    width = max(len(str(point.folder)) for point in points)
    rows = []
    for point in points:
        values, max_steps = point.last_values(), point.config.train.max_steps
        step = values.get("step", 0)
        row = [str(attrgetter(key)(point.config)) for key in keys]
        row.append(f"{step:,}" if step >= max_steps else f"{step:,} of {max_steps:,}")
        row += [f"{values[name]:.4f}" if name in values else "-" for name in ("train/loss", "val/loss")]
        row.append(f"{values['perf/tokens_per_sec']:,.0f}" if "perf/tokens_per_sec" in values else "-")
        rows.append([*row, f"{point.folder!s:<{width}}"])
    axes = [key.split(".")[1] for key in keys]
    return text_table([*axes, "step", "train loss", "val loss", "tokens/s", f"{'folder':<{width}}"], rows)


def write_slurm_array(path: Path, file: str, left: list[Point], parallel: int | None) -> None:
    """Write scripts/slurm/train.sbatch as an array with one task per point, `parallel` of them at a time."""
    if not left:
        print("nothing to do: no array written")
        return
    head, mark, body = SBATCH.read_text().partition("set -uo pipefail\n")
    assert mark, f"{SBATCH} has changed"
    limit = "" if parallel is None else f"%{parallel}"
    options = [line for line in head.splitlines() if line.startswith("#SBATCH") and "--output" not in line]
    options += [f"#SBATCH --array=0-{len(left) - 1}{limit}", "#SBATCH --output=nanokern-%A_%a.out"]
    cases = [f"    {i}) set -- {shlex.join([file, *point.overrides])} ;;" for i, point in enumerate(left)]
    lines = [
        "#!/usr/bin/env bash",
        f"# {len(left)} points of {file}, one task each. From the checkout's root: sbatch {path}",
        "# Written by python -m scripts.sweep --slurm from scripts/slurm/train.sbatch, which explains what it needs.",
        *options,
        f'{mark}\ncase "$SLURM_ARRAY_TASK_ID" in',
        *cases,
        "esac",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + body)
    print(f"sbatch {shlex.quote(str(path))}    # {len(left)} tasks")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], Stop().listen()))
