"""Train every point of a config's [sweep]: in turn, several at once, or as a Slurm array.

    python -m scripts.sweep config/quickstart.toml [--section.key=value ...]
    python -m scripts.sweep config/paper/books3_512.toml '--run.seed=[0,1,2]' --parallel 4
    python -m scripts.sweep config/paper/books3_512.toml --scale 0.01        a rehearsal, in runs/rehearsal-0.01
    python -m scripts.sweep config/paper/books3_512.toml --slurm array.sbatch

Each point is `train.py` with the point's overrides, on all GPUs at hand or its share of them. A list for a key is one
more axis. One that is finished is passed over, one that was cut off goes on from its last checkpoint. A point that
fails is reported at the end and the others go on; the exit code is then 1. Asked to stop (SIGTERM, SIGUSR1, SIGHUP,
Ctrl-C), all points under way save and the sweep ends, with exit code 75.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

import configure
from model import count_parameters
from runtime import RunError, checkpoint, folder
from runtime.distributed import PEAK_FLOPS
from runtime.memory import format_bytes
from runtime.metrics import read
from runtime.signals import EXIT_CODE, Stop
from scripts import plan

REPO_ROOT = Path(__file__).parent.parent
TRAIN = REPO_ROOT / "train.py"
SBATCH = REPO_ROOT / "scripts/slurm/train.sbatch"
REPORT_SECONDS = 60  # between lines on the points under way, where several are at once
SCALED = (  # by --scale; what is 0 stays 0
    "train.max_steps",
    "train.checkpoint_interval",
    "optim.warmup_steps",
    "eval.interval",
    "eval.windows",
    "log.interval",
)


@dataclass
class Point:
    """One run of the sweep, and its process while there is one."""

    number: str  # such as 3/12
    overrides: list[str]
    config: configure.Config
    gpus: list[str] = field(default_factory=list)  # as CUDA_VISIBLE_DEVICES names them
    process: subprocess.Popen | None = None
    said: str = ""  # the last progress line

    @property
    def name(self):
        return f"{self.config.run.dir}/{self.config.run.name}"

    def command(self, file, ranks):
        """As a user would type it."""
        start = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else ["python"]
        return shlex.join([*start, "train.py", file, *self.overrides])

    def done(self):
        """Steps of its last checkpoint; all of them if nothing is left to do."""
        try:
            folder.changes(self.config)
            step = max(checkpoint.steps(folder.path_of(self.config) / "checkpoints"), default=0)
            over = folder.is_finished(self.config, step)
        except (RunError, configure.ConfigError):  # another config's run: train.py says it better
            return 0
        return self.config.train.max_steps if over else min(step, self.config.train.max_steps - 1)

    def begin(self, file, share, cores, log):
        """Start train.py on `share`, a list of GPUs, or with `cores` threads; if `log`, its output goes to train.log in
        the run's folder."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(share)}"]
        environment, self.gpus = dict(os.environ), share
        if share:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share)
        elif cores:
            environment.setdefault("OMP_NUM_THREADS", str(cores))
        if log:
            folder.path_of(self.config).mkdir(parents=True, exist_ok=True)
        with Path(self.name, "train.log").open("ab") if log else nullcontext() as output:
            self.process = subprocess.Popen(
                [*(launch if len(share) > 1 else [sys.executable]), TRAIN, file, *self.overrides],
                env=environment,
                stdout=output,
                stderr=output,
                process_group=0,  # a Ctrl-C is for the sweep, which passes it on once
            )

    def stop(self):
        """Ask it to save and end: its ranks themselves, to whom torchrun would grant 30 seconds."""
        ranks = []
        if len(self.gpus) > 1:
            with suppress(OSError):
                found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
                ranks = [int(line) for line in found.stdout.split()]
        for pid in ranks or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1 if ranks else signal.SIGTERM)

    def progress(self):
        """`name: step 300 of 1,000, train/loss 2.3456`."""
        seen = {}
        for line in read(Path(self.name, "metrics.jsonl")):
            seen |= line
        losses = (f", {key} {seen[key]:.4f}" for key in ("train/loss", "val/loss") if key in seen)
        return f"{self.name}: step {seen.get('step', 0):,} of {self.config.train.max_steps:,}{''.join(losses)}"


def main(argv, stop=None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False, usage="python -m scripts.sweep FILE [--section.key=value ...] [options]",
    )  # fmt: skip
    parser.add_argument("--parallel", type=int, metavar="N", help="points at once, each on its share of GPUs")
    parser.add_argument(
        "--scale", type=float, metavar="X", help="a rehearsal: steps and intervals times X, from 0 to 1"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and totals, run nothing")
    parser.add_argument("--slurm", type=Path, metavar="OUT", help="write a Slurm array script instead, a task a point")
    parser.add_argument("--gpu", choices=PEAK_FLOPS, default="H100", help="whose hours are reckoned (%(default)s)")
    parser.add_argument("--mfu", default="0.4", help="part of its peak in use, or a run that measured it (%(default)s)")
    args, rest = parser.parse_known_args(argv)
    if "--fresh" in rest:
        print("a sweep goes on with its runs; for new ones set another --run.dir", file=sys.stderr)
        return 2
    try:
        file, overrides = configure.split_command_line(rest)
        points = points_of(file, overrides, args.scale)
        left = [point for point in points if point.done() < point.config.train.max_steps]
        shares = share_out(gpus_at_hand(points), 1 if args.parallel is None else args.parallel)
        if not args.slurm:
            for point in left:  # what cannot work on so many ranks fails before the first point begins
                configure.load(file, point.overrides, world_size=max(1, len(shares[0])))
        print(totals(points, left, args, shares), flush=True)
    except configure.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.slurm:
        return write_array(args.slurm, file, left, args.parallel)
    for point in points:
        if point not in left:
            print(f"[{point.number}] finished already: {point.name}")
        elif args.dry_run:
            print(f"[{point.number}] {point.command(file, len(shares[0]))}")
    return 0 if args.dry_run else run(file, left, shares, stop or Stop())


def points_of(file, overrides, scale=None):
    """Every Point of the sweep, by `scale` smaller if it is given. Raises ConfigError."""
    if scale is not None and not 0 < scale < 1:
        raise configure.ConfigError(f"--scale {scale:g}: expected a number between 0 and 1, such as 0.01")
    all_of_them = configure.sweep_points(file, overrides)
    points = []
    for number, point in enumerate(all_of_them, 1):
        if scale is not None:
            point = [*point, *smaller(configure.load(file, point), scale)]
        points.append(Point(f"{number}/{len(all_of_them)}", point, configure.load(file, point)))
    return points


def smaller(config, scale):
    """Overrides that make a run's steps and all that goes by them smaller, none below 1, in folder and group apart."""
    values = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in SCALED}
    overrides = [f"--{key}={max(1, round(value * scale))}" for key, value in values.items() if value]
    apart = f"rehearsal-{scale:g}"
    return [*overrides, f"--run.dir={config.run.dir}/{apart}", f"--log.group={config.log.group}-{apart}"]


def gpus_at_hand(points):
    """What CUDA_VISIBLE_DEVICES would call them; none if no point would use one."""
    if not torch.cuda.is_available() or all(point.config.train.device == "cpu" for point in points):
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[: torch.cuda.device_count()] or [str(i) for i in range(torch.cuda.device_count())]


def share_out(gpus, parallel):
    """`parallel` lists of GPUs, all of one length. Points outnumbering GPUs share them. Raises ConfigError."""
    if parallel < 1:
        raise configure.ConfigError(f"--parallel {parallel}: expected 1 or more")
    each = len(gpus) // parallel
    if not each:
        return [gpus[i % len(gpus) :][:1] if gpus else [] for i in range(parallel)]
    return [gpus[i * each : (i + 1) * each] for i in range(parallel)]


def totals(points, left, args, shares):
    """What is left to do, in a line or two: tokens, hours, disk."""
    peak, mfu = PEAK_FLOPS[args.gpu], plan.parse_mfu(args.mfu)
    tokens = hours = disk = 0
    for point in left:
        config = point.config
        part = 1 - point.done() / config.train.max_steps
        tokens += part * plan.count_tokens(config)
        hours += part * plan.estimate_hours(config, 1, peak, mfu)
        disk += 12 * count_parameters(config.model)[0] * config.train.keep_checkpoints
    line = f"{len(points)} points, {len(points) - len(left)} finished"
    if not left:
        return line
    gpus = len(set(sum(shares, [])))
    on = f", {hours / gpus:,.1f} h on the {gpus} here" if gpus > 1 else ""
    amount = f"{tokens / 1e9:,.2f} B" if tokens >= 1e9 else f"{tokens / 1e6:,.2f} M"
    written = max(12 * count_parameters(point.config.model)[0] for point in left) * min(len(shares), len(left))
    root = next(path for path in (Path(left[0].config.run.dir).absolute() / "_").parents if path.exists())
    free = shutil.disk_usage(root).free
    line += f"; to do: {amount} tokens, {hours:,.1f} GPU hours ({args.gpu}, MFU {mfu:.2f}{on})\n"
    line += f"checkpoints: {format_bytes(disk)} at the end, {format_bytes(written)} more while they are written; "
    line += f"{format_bytes(free)} free"
    return line + "\nwarning: too little disk: lower --train.keep_checkpoints" * (disk + written > free)


def run(file, left, shares, stop):
    """Train the points of `left`, as many at once as there are shares of the GPUs; returns the exit code."""
    waiting, under_way, free, failed = list(left), [], list(shares), []
    parallel, next_report = len(shares) > 1, time.monotonic() + REPORT_SECONDS
    cores = max(1, len(os.sched_getaffinity(0)) // len(shares)) if parallel else 0  # 0: torch's own choice
    stopping = False
    while waiting or under_way:
        if stop.asked and not stopping:
            stopping = True
            waiting.clear()
            for point in under_way:
                point.stop()
        while waiting and free:
            point = waiting.pop(0)
            point.begin(file, free.pop(0), cores, log=parallel)
            where = f"; log: {point.name}/train.log" if parallel else ""
            print(f"[{point.number}] {point.command(file, len(point.gpus))}{where}", flush=True)
            under_way.append(point)
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: they have been asked, so wait for them all the same
            time.sleep(0.1)
        for point in [point for point in under_way if point.process.poll() is not None]:
            under_way.remove(point)
            free.append(point.gpus)
            code = point.process.returncode
            if parallel:
                how = {0: "finished", EXIT_CODE: "stopped"}.get(code, f"failed with exit code {code}")
                print(f"[{point.number}] {how}: {point.progress()}", flush=True)
            if code == EXIT_CODE:
                stop.asked = True
            elif code and not stopping:
                failed.append(point)
        if parallel and time.monotonic() > next_report:
            next_report = time.monotonic() + REPORT_SECONDS
            for point in under_way:
                line, before = point.progress(), point.said
                point.said = line
                if line != before:
                    print(f"[{point.number}] {line}", flush=True)
    for point in failed:
        log = f" ({point.name}/train.log)" if parallel else ""
        print(f"failed: {point.command(file, len(point.gpus))}{log}", file=sys.stderr)
    return EXIT_CODE if stop.asked else 1 if failed else 0


def write_array(path, file, left, parallel):
    """scripts/slurm/train.sbatch as an array, with a task for each point of `left`, `parallel` of them at a time."""
    if not left:
        print("nothing to do: no array written")
        return 0
    head, mark, body = SBATCH.read_text().partition("set -uo pipefail\n")
    assert mark, f"{SBATCH} has changed"
    limit = "" if parallel is None else f"%{parallel}"
    options = [line for line in head.splitlines() if line.startswith("#SBATCH") and "--output" not in line]
    options += [f"#SBATCH --array=0-{len(left) - 1}{limit}", "#SBATCH --output=nanokern-%A_%a.out"]
    cases = [f"    {i}) set -- {shlex.join([file, *point.overrides])} ;;" for i, point in enumerate(left)]
    lines = [
        "#!/usr/bin/env bash",
        f"# {len(left)} points of {file}, a task each. From the checkout's root: sbatch {path}",
        "# Written by python -m scripts.sweep --slurm from scripts/slurm/train.sbatch, where its needs are told.",
        *options,
        mark.strip(),
        "",
        'case "$SLURM_ARRAY_TASK_ID" in',
        *cases,
        "esac",
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n" + body)
    except OSError as error:
        print(f"--slurm {path}: {error.strerror}; name a file", file=sys.stderr)
        return 2
    print(f"sbatch {shlex.quote(str(path))}    # {len(left)} tasks")
    return 0


if __name__ == "__main__":
    listening = Stop().listen()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal is gone; nohup's way stays
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    sys.exit(main(sys.argv[1:], listening))
