"""Read runs, and say whether their losses are of the same text."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import configure
from data.bins import check_lengths, fingerprint, open_tokens, read_meta
from data.loader import fixed_windows, window_documents
from runtime import RunError, checkpoint
from runtime.folder import explain_missing
from runtime.metrics import ARRAYS, read_metrics
from scripts.watch.runs import find_runs

REMEDY = "give them separate reports, or score both on one text: python -m eval.val_loss RUN --data SET_OR_FILE"


@dataclass(eq=False)
class Run:
    """A run's files, read."""

    folder: Path
    config: configure.Config
    evaluations: dict[int, dict[str, Any]]  # step: line and arrays with a finite validation loss
    logs: list[dict[str, Any]]  # lines of training
    diverged: int | None = None  # step of the first validation loss that was not finite

    def value(self, key: str) -> Any:
        """The config's value of a dotted key; a mixture in words, and no data.name beside it.

        A balance loss over micro-batches is another for each of their sizes.
        """
        mix = self.config.data.mix
        value = "" if mix and key == "data.name" else attrgetter(key)(self.config)
        if key == "train.balance_loss_scope" and value == "micro_batch":
            return f"{value} of {self.config.train.micro_batch_size}"
        return str(value) if isinstance(value, dict) else value

    def values(self, keys: Iterable[str]) -> tuple[tuple[str, Any], ...]:
        """(key, value) of each key."""
        return tuple((key, self.value(key)) for key in keys)

    @property
    def trunk(self) -> str:
        """` (branch of runs/NAME at step 800)`; empty if it is none."""
        train = self.config.train
        return f" (branch of {train.branch_from} at step {train.branch_step:,})" if train.branch_from else ""

    @property
    def ended(self) -> bool:
        """Whether it was evaluated at its last step."""
        return self.config.train.max_steps in self.evaluations

    @property
    def progress(self) -> str:
        """How far it was evaluated, in words."""
        words = f"evaluated up to step {max(self.evaluations):,}"
        return words if self.diverged is None else f"{words}, loss not finite at {self.diverged:,}"

    def loss(self, step: int) -> float:
        """Validation loss at `step`, nats per token."""
        return self.evaluations[step]["val/loss"]

    def train_loss(self, step: int) -> float | None:
        """Mean over the training batches logged since the evaluation before `step`, and within a tenth of training."""
        since = max([step - math.ceil(self.config.train.max_steps / 10), *(at for at in self.evaluations if at < step)])
        losses = [loss for at, loss in self.logged("train/loss").items() if since < at <= step and math.isfinite(loss)]
        return statistics.fmean(losses) if losses else None

    def logged(self, key: str) -> dict[int, float]:
        """{step: value} of the lines of training that have the key."""
        return {line["step"]: line[key] for line in self.logs if key in line}

    @cached_property
    def documents(self) -> np.ndarray | None:
        """(W,) equal numbers for validation windows of one document; None if that is not known.

        A run of before they were recorded has them from its data set, if that is still there.
        """
        for line in self.evaluations.values():
            if "val/window_documents" in line:
                return np.array(line["val/window_documents"])
        folder = Path(self.config.data.dir, self.config.data.name)
        try:
            meta = read_meta(folder)
            if read_identity(self).get("data") != fingerprint(meta)["data"]:
                return None
            check_lengths(folder, meta)
            tokens, block = open_tokens(folder, "val"), self.config.model.block_size
            of = self.config.eval
            return window_documents(tokens, block, fixed_windows(tokens, block, of.windows, of.spread))
        except (ValueError, OSError):
            return None

    def count_windows(self, step: int) -> int:
        """Validation windows of the evaluation at `step`."""
        lines = [self.evaluations[step], *self.evaluations.values()]  # an array's file may be gone
        return next(
            (len(of["val/window_losses"]) for of in lines if "val/window_losses" in of), self.config.eval.windows
        )


def load_run_record(folder: Path) -> Run:
    """Read a run's config and metrics.

    Raises:
        ValueError: the folder is not a run, or was not evaluated. RunError or ConfigError of a broken file is one too.
    """
    if not (folder / "config.toml").is_file():
        raise ValueError(explain_missing(folder))
    run = Run(folder, configure.load(folder / "config.toml"), {}, [])
    for line in read_metrics(folder / "metrics.jsonl", [name for name in ARRAYS if name.startswith("val/")]):
        if "val/window_weights" in line:  # of a mixture: so their mean is val/loss
            line["val/window_losses"] = np.multiply(line["val/window_losses"], line["val/window_weights"])
        if "train/loss" in line:
            run.logs.append(line)
        if math.isfinite(line.get("val/loss", math.nan)):
            run.evaluations[line["step"]] = line
        elif "val/loss" in line and run.diverged is None:
            run.diverged = line["step"]
    if not run.evaluations:
        reason = "not evaluated yet; continue with train.py" if run.diverged is None else "diverged; lower optim.lr"
        raise ValueError(f"{folder}: {reason}, or leave it out")
    return run


def expand_folders(places: Iterable[Path]) -> list[Path]:
    """Each run at a place or below it, once; a place without any stands for itself, unless it is a report's folder."""
    found = {place: find_runs([place]) for place in places}
    alone = {place: [] if (place / "report.html").is_file() else [place] for place in found}
    return [*dict.fromkeys(folder for place, runs in found.items() for folder in runs or alone[place])]


def load_run_records(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read every folder: the runs, and why other folders are left out. Raises ValueError if none is a run."""
    runs, errors, left_out = [], [], defaultdict(list)  # reason: folders
    for folder in folders:
        try:
            runs.append(load_run_record(folder))
        except ValueError as error:
            errors.append(error)
            left_out[" ".join(str(error).removeprefix(str(folder)).split())].append(str(folder))
    if not runs:
        raise errors[0] if errors else ValueError("no run among the folders; give some such as runs/quickstart-kern")
    return runs, [f"left out: {', '.join(of)}{reason}" for reason, of in left_out.items()]


def check_same_text(runs: Sequence[Run], steps: Sequence[int]) -> None:
    """Raise ValueError if the losses at `steps` cannot be paired: other data, tokenizer, length or windows, or no step.

    A step is at most a run's last evaluation; -1 is that one.
    """
    seen, identities = {}, [read_identity(run) for run in runs]
    for what in ("data", "tokenizer"):
        known = [(identity[what], run) for identity, run in zip(identities, runs, strict=True) if what in identity]
        seen[f"{what} (sha256 in their checkpoints)"] = dict(known)
    for key in ("model.block_size", "data.name", "data.mix") if not all(identities) else ("model.block_size",):
        seen[key] = {run.value(key): run for run in runs}
    seen["number of validation windows"] = {
        run.count_windows(max(run.evaluations) if at < 0 else at): run for run in runs for at in steps
    }
    seen["eval.spread"] = {run.value("eval.spread"): run for run in runs}
    for what, of in seen.items():
        if len(of) > 1:
            (one, run), (two, other), *_ = of.items()
            raise ValueError(
                f"{run.folder} and {other.folder}: {what} is {str(one):.20} and {str(two):.20}, so their losses are of "
                f"different text; {REMEDY}"
            )
    if not steps:
        found = "; ".join(f"{run.folder} at {', '.join(map(str, list(run.evaluations)[:4]))} …" for run in runs[:2])
        raise ValueError(f"evaluated at no common step ({found}); leave out runs that lack steps, or {REMEDY}")


def find_without_windows(runs: Sequence[Run], step: int) -> str:
    """Folders of runs that have no losses of windows at `step` (-1: their last), and the remedy; "" if all or none."""
    ends = [run.evaluations[max(run.evaluations) if step < 0 else step] for run in runs]
    lacking = [str(run.folder) for run, line in zip(runs, ends, strict=True) if "val/window_losses" not in line]
    words = f"no losses of windows in {', '.join(lacking)}: restore the file in arrays/, or leave the run out"
    return words * (0 < len(lacking) < len(runs))


def read_identity(run: Run) -> dict[str, Any]:
    """sha256 of data and tokenizer by the run's last checkpoint; {} without an intact one."""
    folder = run.folder / "checkpoints"
    steps = checkpoint.steps(folder)
    try:
        return checkpoint.read_manifest(checkpoint.folder_of(folder, steps[-1]))["facts"] if steps else {}
    except RunError:  # the numbers are in metrics.jsonl all the same
        return {}
