"""Train the runs that questions of the contest lack, and record each as it ends."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import configure
from common.files import exists, take_lock
from configure import Config
from data.bins import read_meta
from data.loader import identify
from data.prepare import main as prepare
from runtime.distributed import device_name, pick_device
from runtime.launch import EXIT_CODE, Stop
from runtime.runs import Run
from scripts.sweep import Point, train_points
from track.contest import (
    UNIFORM,
    ArmAt,
    Line,
    Made,
    Protocol,
    append_line,
    list_missing,
    list_overrides,
)

REPO_ROOT = Path(__file__).parents[1]
TRAINING_CODE = (":(glob)*.py", "kernels", "runtime", "configure", "data", "common")
# what train.py says when it ends a run whose numbers are not finite
DIVERGED = ("before its update", "steps in a row skipped", "the run has diverged")


class Runner:
    """Trains runs of one rung, in folders of their own, into one record."""

    def __init__(self, file: str, protocol: Protocol, rung: str, record: Path) -> None:
        """Make a runner.

        Args:
            file: the config file.
            protocol: its rules, or those with an arm of the user's.
            rung: a name in `protocol.rungs`.
            record: file that the runs are added to.

        Raises:
            ValueError: there is no such rung.
        """
        if rung not in protocol.rungs:
            raise ValueError(f"--rung {rung}: expected {' or '.join(protocol.rungs)}")
        self.file = file
        self.protocol = protocol
        self.overrides = protocol.rungs[rung].overrides
        self.record = record
        self.config = configure.load(file, self.overrides)
        self.made = Made(
            commit=describe_code(),
            torch=torch.__version__,
            device=device_name(pick_device(self.config.train.device)),
            instructions=torch.backends.cpu.get_cpu_capability(),
        )
        self.folder = Path(
            self.config.run.dir, f"track-{Path(file).stem}", f"{rung}-{self.made.commit[:8]}"
        )

    def make_point(self, run: ArmAt) -> Point:
        """What train.py runs."""
        arm, setting = run
        name = f"{arm}-{setting}"
        width = self.config.model.n_embd
        overrides = [
            *self.overrides,
            *list_overrides(self.protocol, self.protocol.arms[arm], setting, width),
            f"--run.dir={self.folder}",
            f"--run.name={name}",
        ]
        return Point(name, overrides, configure.load(self.file, overrides))

    def train(
        self, questions: Sequence[str], lines: Sequence[Line], parallel: int, stop: Stop
    ) -> int:
        """Train what the questions' pairs lack, and add each run to the record as it ends.

        Args:
            questions: names in `protocol.questions`.
            lines: runs that there are already.
            parallel: runs at a time, one thread each.
            stop: asked between runs.

        Returns:
            The exit status.

        Raises:
            ValueError: another process trains in this folder, or the text was changed.
        """
        missing = list_missing(self.protocol, questions, lines, self.made)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                take_lock(lock)
            except BlockingIOError:
                raise ValueError(f"{self.folder}: another process trains here; wait") from None
            start = time.monotonic()
            ended = 0
            for line in self.train_each(missing, parallel, stop):
                append_line(self.record, line)
                ended += 1
                left = len(missing) - ended
                # as many as run at once end together
                minutes = (time.monotonic() - start) / 60 / max(ended, parallel) * left
                print(f"{describe(line)}; {left} left, about {minutes:.0f} min", flush=True)
        if stop.asked:
            print(f"stopped; {self.record} has what ended, the same command resumes")
            return EXIT_CODE
        return int(ended < len(missing))

    def train_each(self, runs: Sequence[ArmAt], parallel: int, stop: Stop) -> Iterator[Line]:
        """Train runs, and yield those that ended or diverged."""
        prepare_data(self.config, self.protocol)
        os.environ["OMP_NUM_THREADS"] = "1"  # a run must not depend on how many others run
        points = [self.make_point(run) for run in runs]
        run_of = {point.number: run for point, run in zip(points, runs, strict=True)}
        shares: list[list[str]] = [[] for _ in range(parallel)]
        for point, code in train_points(self.file, points, shares, stop):
            if stop.asked and code:  # it saved, or ended before it could
                continue
            line = self.read_run(point, run_of[point.number], code)
            if line:
                shutil.rmtree(point.folder / "checkpoints", ignore_errors=True)
                yield line
            else:
                log = point.folder / "train.log"
                print(f"{point.number} failed with exit code {code}: {log}", file=sys.stderr)

    def read_run(self, point: Point, run: ArmAt, code: int) -> Line | None:
        """The record of a run that ended; None if it failed for another reason than its loss."""
        arm, setting = run
        fields: dict[str, Any] = {
            "arm": arm,
            "options": self.protocol.arms[arm],
            "setting": setting,
            "seed": point.config.run.seed,
            "made": self.made,
            "date": date.today().isoformat(),
        }
        if code:
            log = (point.folder / "train.log").read_text(errors="replace")
            diverged = any(words in log for words in DIVERGED)
            return Line(**fields, loss=None) if diverged else None
        evaluations = Run(point.folder).evaluations
        last = evaluations[point.config.train.max_steps]
        for name in ("loss", "load_imbalance", "dead_experts", "zero_gates"):
            fields[name] = last.get(f"val/{name}")  # a dense model has no router
        if fields["loss"] >= UNIFORM:
            fields["loss"] = None
        if "val/gate_norm" in last:
            fields["gate_norm"] = [line["val/gate_norm"] for line in (evaluations[0], last)]
        return Line(**fields)


def describe(line: Line) -> str:
    """The run and its loss."""
    return f"{line.arm}, setting {line.setting}: {line.loss or 'diverged'}"


def describe_code() -> str:
    """The last commit that changed code that trains.

    Raises:
        ValueError: this is no git checkout, or such code is not committed.
    """
    changed = run_git("status", "--porcelain", "--", *TRAINING_CODE)
    commit = run_git("log", "-1", "--format=%H", "--", *TRAINING_CODE)
    if changed or not commit:
        raise ValueError(f"a run names its commit: no git checkout, or not committed: {changed}")
    return commit


def run_git(*arguments: str) -> str:
    """The output of git in the repository; empty if it fails."""
    return subprocess.run(
        ["git", *arguments], cwd=REPO_ROOT, capture_output=True, text=True
    ).stdout.strip()


def prepare_data(config: Config, protocol: Protocol) -> None:
    """Prepare the contest's set if it is missing.

    Raises:
        ValueError: that fails, or the set, or its text, is not the protocol's.
    """
    (folder,) = config.data.folders
    if not exists(folder / "meta.json"):
        source, val_source = protocol.text
        arguments = ["text", "--tokenizer", "bytes", "--source", source, "--val-source", val_source]
        prepare([*arguments, "--name", folder.name, "--out", str(folder.parent)])
    sha256 = identify([read_meta(folder)], [1.0])["data"]
    if sha256 != protocol.data_sha256:
        raise ValueError(
            f"{folder} has sha256 {sha256}, not {protocol.data_sha256}: the set or its text was "
            f"changed; git checkout -- track/text; rm -r {folder}"
        )
