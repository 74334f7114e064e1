"""Read runs, and sort them into settings and arms.

Runs of one setting have the same corpus, shape, schedule and validation windows: all that moves a loss except the
router, what balances or scales its gates, and train.dtype, which follows the router by default. An arm is one such
router, with a run for each seed.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import configure
from configure.schema import KEYS
from data.bins import check_lengths, fingerprint, open_tokens, read_meta
from data.loader import fixed_windows, window_documents
from eval.paper import PaperLosses
from eval.style import STYLES
from runtime import RunError, checkpoint
from runtime.folder import explain_missing
from runtime.metrics import ARRAYS, read_metrics
from runtime.output import plural
from scripts.watch.runs import find_runs

# What differs between arms of one setting.
ARM_KEYS = ("model.router", "model.gate_scale", "model.gate_norm")
ARM_KEYS += ("train.balance_loss_coef", "train.balance_loss_scope", "train.z_loss_coef", "train.bias_update_rate")
ARM_KEYS += ("optim.router_lr_ratio",)
# What moves no loss, except by rounding.
NEUTRAL_KEYS = re.compile(
    r"(run|log)\.|eval\.(interval|task)|data\.dir|model\.backend|train\.(device|compile|parallel|micro_batch_size|"
    r"deterministic|activation_checkpointing|timeout_minutes|checkpoint_|keep_|branch_|ema_decay|on_save_error|"
    r"max_skipped_steps)"
)
# What evaluations have besides the loss: of a mixture's sets, of the weights' running mean, of tasks.
MEASURE = re.compile(r"val/([^/]+)/loss|(val_ema)/loss|tasks/([^/]+)/(acc|bits_per_byte)")
LABEL = 60  # characters of a setting's label, if fewer keys distinguish settings too
TELLING = ("data.name", "data.mix", "model.n_embd", "train.max_steps", "optim.lr")  # the last to be left out of a label
DTYPE = "train.dtype"  # separates settings only where runs differ in nothing else
SETTING_KEYS = [key for key in KEYS if key not in (*ARM_KEYS, DTYPE) and not NEUTRAL_KEYS.match(key)]
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
        """The config's value of a dotted key; a mixture in words, and no data.name beside it."""
        mix = self.config.data.mix
        value = "" if mix and key == "data.name" else attrgetter(key)(self.config)
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
        return len(self.evaluations[step].get("val/window_losses", ())) or self.config.eval.windows


@dataclass(eq=False)
class Arm:
    """One router with its constants; `label` distinguishes it from other arms; `runs`: {seed: Run}."""

    label: str
    router: str
    constants: tuple[tuple[str, Any], ...] = ()
    runs: dict[int, Run] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        return sorted(self.runs)

    @property
    def first(self) -> Run:
        """The run of its lowest seed."""
        return self.runs[min(self.runs)]

    def shared_seeds(self, other: "Arm") -> list[int]:
        """Seeds that both arms have."""
        return [seed for seed in self.seeds if seed in other.runs]

    def losses(self, step: int) -> list[float]:
        """Validation loss of each seed at `step`."""
        return [self.runs[seed].loss(step) for seed in self.seeds]


@dataclass(eq=False)
class Setting:
    """Arms that are compared; `label` distinguishes the setting from others ("" if there is only one)."""

    label: str
    values: dict[str, Any]
    arms: list[Arm]
    printed: PaperLosses = PaperLosses()
    varying: Sequence[str] = ()  # keys of which other settings have other values

    @property
    def runs(self) -> list[Run]:
        return [arm.runs[seed] for arm in self.arms for seed in arm.seeds]

    @property
    def max_steps(self) -> int:
        return self.values["train.max_steps"]

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.values["train.batch_size"] * self.values["model.block_size"]

    @property
    def has_paper_tokens(self) -> bool:
        """Whether a nat per token means the same as in the paper: GPT-2's vocabulary."""
        return self.values["model.vocab_size"] == KEYS["model.vocab_size"]["default"]

    @cached_property
    def steps(self) -> list[int]:
        """Steps at which every run was evaluated."""
        return sorted(set.intersection(*(set(run.evaluations) for run in self.runs)))

    @property
    def end(self) -> int:
        """The last step at which every run was evaluated."""
        return self.steps[-1]

    @cached_property
    def measures(self) -> dict[str, tuple[str, list[int]]]:
        """{key: (name, steps at which every run has it)} of what MEASURE matches, in order of the lines."""
        found, limits = {}, sorted({run.config.eval.task_limit for run in self.runs})
        unequal = f" (unequal eval.task_limit: {', '.join(map(str, limits))})" * (len(limits) > 1)
        for key in dict.fromkeys(key for line in self.runs[0].evaluations.values() for key in line):
            steps = [step for step in self.steps if all(key in run.evaluations[step] for run in self.runs)]
            if steps and (parts := MEASURE.fullmatch(key)):
                name, mean, task, metric = parts.groups()
                share = f"loss on {name} ({self.runs[0].config.data.sets[name]:.0%})" if name else ""
                of_task = f"{task}, {'accuracy' if metric == 'acc' else 'bits per byte'}{unequal}"
                found[key] = (share or ("loss of the weights' mean" if mean else of_task), steps)
        return found

    @property
    def tenths(self) -> dict[int, int]:
        """{i: step} of the tenths of training, 1 to 10, at which every run was evaluated: the paper's 5K, …, 50K."""
        return {i: self.max_steps * i // 10 for i in range(1, 11) if self.max_steps * i / 10 in self.steps}

    @property
    def end_tenth(self) -> int | None:
        """The tenth of training that `end` is, if it is one."""
        return next((i for i, step in self.tenths.items() if step == self.end), None)

    def counterparts(self, arm: Arm, name: str) -> list[Arm]:
        """Arms to compare `arm` with: of that label, or of another router of that name, and sharing a seed with it.

        Of several of one router, those whose constants are most like `arm`'s.
        """
        others = [other for other in self.arms if other is not arm and other.label == name]
        others = others or [other for other in self.arms if other.router == name != arm.router]
        others = [other for other in others if arm.shared_seeds(other)]
        alike = [len({*arm.constants} & {*other.constants}) for other in others]
        return [other for other, number in zip(others, alike, strict=True) if number == max(alike)]

    def counterpart(self, arm: Arm, name: str) -> Arm | None:
        """The first of `counterparts`, if any."""
        return next(iter(self.counterparts(arm, name)), None)


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


def group_runs(runs: Sequence[Run]) -> tuple[list[Setting], list[str]]:
    """Sort runs into settings, with notes on what was left out or is unfinished.

    Of two runs of one setting, arm and seed the one evaluated further counts; an unfinished run does not count where
    others of its setting ended; nor does a setting whose runs were not evaluated on the same text. Raises ValueError if
    that is true of every setting.
    """
    ended = {run.values(SETTING_KEYS) for run in runs if run.ended}
    short = [run for run in runs if run.values(SETTING_KEYS) in ended and not run.ended]
    reached = defaultdict(list)  # how far: folders
    for run in short:
        reached[f"{run.progress} of {run.config.train.max_steps:,}"].append(str(run.folder))
    left_out = [f"left out: {', '.join(folders)}: {how_far}" for how_far, folders in reached.items()]
    notes, errors, types, groups = [], [], defaultdict(list), defaultdict(lambda: defaultdict(dict))
    runs = sorted([run for run in runs if run not in short], key=lambda run: -max(run.evaluations))
    divided = _find_divided(runs)
    for run in runs:
        setting = run.values(SETTING_KEYS)
        setting += ((DTYPE, run.value(DTYPE) if setting in divided else ""),)
        first = groups[setting][run.values(ARM_KEYS)].setdefault(run.config.run.seed, run)
        if first is not run:
            left_out.append(f"{run.folder} is left out: {first.folder} has the same settings and seed")
    varying = find_varying(groups)
    naming = _choose_names(groups, varying)
    constants = find_varying(arm[1:] for arms in groups.values() for arm in arms)
    order, settings = list(STYLES), []
    for values, arms in sorted(groups.items(), key=lambda item: [dict(item[0])[key] for key in varying]):
        found = [
            Arm(", ".join([router, *name_values(rest, constants)]), router, tuple(rest), seeds)
            for ((_, router), *rest), seeds in arms.items()
        ]
        found.sort(key=lambda arm: (order.index(arm.router) if arm.router in order else len(order), arm.constants))
        setting = Setting(", ".join(name_values(values, naming)), dict(values), found, varying=varying)
        try:
            check_same_text(setting.runs, setting.steps)
        except ValueError as error:
            errors.append(error)
            continue
        settings.append(setting)
        types[_describe_types(setting)].append(setting.label)
        types[_describe_dependence(setting)].append(setting.label)
        if short := [f"{run.folder} ({run.progress})" for run in setting.runs if not run.ended]:
            notes.append(
                f"{setting.label}{': ' * bool(setting.label)}unfinished or diverged: {', '.join(short)}. All are "
                f"compared at step {setting.end:,} of {setting.max_steps:,}, and no claim about the end is judged"
            )
    if not settings:
        raise errors[0]
    notes += [f"{'; '.join(labels)}{': ' * any(labels)}{words}" for words, labels in types.items() if words]
    return settings, [*notes, *(f"left out: {error}" for error in errors), *left_out]


def _find_divided(runs: Iterable[Run]) -> set[tuple[tuple[str, Any], ...]]:
    """Settings in which two runs differ in train.dtype alone."""
    types = defaultdict(set)
    for run in runs:
        types[run.values(SETTING_KEYS), run.values(ARM_KEYS), run.config.run.seed].add(run.value(DTYPE))
    return {setting for (setting, *_), found in types.items() if len(found) > 1}


def _describe_types(setting: Setting) -> str:
    """Which arms were computed in which type, and the remedy; "" if all were in one."""
    arms = defaultdict(dict)  # type: labels, in order
    for arm in setting.arms:
        for run in arm.runs.values():
            arms[run.value(DTYPE)][arm.label] = None
    found = "; ".join(f"{', '.join(labels)} in {dtype}" for dtype, labels in arms.items())
    remedy = f"--{DTYPE}={'float32' if 'float32' in arms else 'bfloat16'} makes them alike"
    return f"computed in different types, so rounding is part of differences: {found}; {remedy}" * (len(arms) > 1)


def find_documents(arms: Iterable[Arm], windows: int) -> np.ndarray | None:
    """The document of each of that many validation windows of these arms; None if no run knows them."""
    known = (run.documents for arm in arms for run in arm.runs.values())
    return next((labels for labels in known if labels is not None and len(labels) == windows), None)


def describe_windows(setting: Setting) -> str:
    """How many validation windows there are, and of how many documents."""
    count = setting.runs[0].count_windows(setting.end)
    labels = find_documents(setting.arms, count)
    if labels is None:
        return f"{count:,} validation windows, taken as independent"
    _, sizes = np.unique(labels, return_counts=True)
    return f"{count:,} validation windows of {plural(len(sizes), 'document')}, at most {sizes.max()} of one"


def _describe_dependence(setting: Setting) -> str:
    """What intervals leave out, where documents of windows are not known or only one; else ""."""
    count = setting.runs[0].count_windows(setting.end)
    labels = find_documents(setting.arms, count)
    if labels is None:
        return (
            f"the documents of the {count:,} validation windows are not known, since the runs are of before they were "
            f"recorded and the data set or the checkpoints are gone: intervals take windows as independent, and are "
            f"too narrow if many share a document"
        )
    one = count > 1 and not np.ptp(labels)
    return f"the {count:,} validation windows are of one document: intervals say nothing of others" * one


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


def read_identity(run: Run) -> dict[str, Any]:
    """sha256 of data and tokenizer by the run's last checkpoint; {} without an intact one."""
    folder = run.folder / "checkpoints"
    steps = checkpoint.steps(folder)
    try:
        return checkpoint.read_manifest(checkpoint.folder_of(folder, steps[-1]))["facts"] if steps else {}
    except RunError:  # the numbers are in metrics.jsonl all the same
        return {}


def find_varying(rows: Iterable[Sequence[tuple[str, Any]]]) -> list[str]:
    """Keys that have several values."""
    return [columns[0][0] for columns in zip(*rows, strict=True) if len(set(columns)) > 1]


def _choose_names(settings: Iterable[Sequence[tuple[str, Any]]], keys: list[str]) -> list[str]:
    """The keys that label settings: all of `keys`, but without some that are not needed where labels are long."""
    for key in sorted(keys[::-1], key=lambda key: key in TELLING):
        fewer = [other for other in keys if other != key]
        long, short = ([", ".join(name_values(values, of)) for values in settings] for of in (keys, fewer))
        if max(map(len, long)) > LABEL and len({*short}) == len(short):
            keys = fewer
    return keys


def name_values(values: Iterable[tuple[str, Any]], keys: Sequence[str]) -> list[str]:
    """Text stands alone, a number after the last word of its key; empty text is left out."""
    given = [(key.split(".")[1], value) for key, value in values if key in keys and value != ""]
    return [value if isinstance(value, str) else f"{name} {value:.12g}" for name, value in given]
