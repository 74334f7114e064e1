"""What a report compares: runs sorted into settings, and a setting's runs into arms.

Runs of one setting have all in common that moves a loss but the router and what balances or scales its gates: corpus,
shape, schedule, validation windows. An arm is one such router, with a run for each seed.
"""

import math
import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import configure
from configure.schema import KEYS
from eval.style import STYLES
from runtime import RunError, checkpoint
from runtime.metrics import read

NUMBERS = Path(__file__).parents[2] / "eval/paper_numbers.toml"
EXPERIMENTS = NUMBERS.parents[1] / "config/paper"
PAPER_STEPS = 50_000
OF_ARM = (
    "model.router",
    "model.gate_scale",
    "train.balance_loss_coef",
    "train.z_loss_coef",
    "train.bias_update_rate",
)
LISTS = ("val/window_losses", "val/loads", "router/loads")
NUMBERED = ("train/", "val/", "optim/", "router/", "perf/")
NO_MATTER = (  # to a loss, but for rounding
    "run.",
    "log.",
    "data.dir",
    "model.backend",
    "train.device",
    "train.compile",
    "train.parallel",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.timeout_minutes",
    "train.checkpoint_",
    "train.keep_checkpoints",
    "train.on_save_error",
    "train.max_skipped_steps",
    "train.deterministic",
    "eval.interval",
)


@dataclass
class Run:
    """A run's files, read: `config`, `evaluations` {step: line of metrics.jsonl} with a finite loss, `logs` [lines of
    training, numbers alone], `diverged`: the step at which the loss was infinite or NaN, or None."""

    folder: Path
    config: configure.Config
    evaluations: dict[int, dict]
    logs: list[dict]
    diverged: int | None = None

    def value(self, key):
        section, name = key.split(".")
        return getattr(getattr(self.config, section), name)

    @property
    def setting(self):
        return tuple((key, self.value(key)) for key in KEYS if key not in OF_ARM and not key.startswith(NO_MATTER))

    @property
    def arm(self):
        return tuple((key, self.value(key)) for key in OF_ARM)

    @property
    def ended(self):
        return self.config.train.max_steps in self.evaluations

    def short(self):
        """How far it came."""
        words = f"evaluated up to step {max(self.evaluations):,}"
        return words if self.diverged is None else f"{words}, loss not finite at {self.diverged:,}"

    def loss(self, step):
        return self.evaluations[step]["val/loss"]

    def seconds(self):
        """{step: seconds of training up to it}, without evaluations and saves, by the lines of the log."""
        total, before, seconds = 0.0, 0, {0: 0.0}
        for line in self.logs:
            if "perf/step_ms" in line:
                total += line["perf/step_ms"] / 1000 * (line["step"] - before)
                before = line["step"]
                seconds[before] = total
        return seconds


@dataclass
class Arm:
    """One router with its constants, `label` by what tells it from others; `runs` {seed: Run}."""

    label: str
    router: str
    constants: tuple
    runs: dict[int, Run] = field(default_factory=dict)

    @property
    def seeds(self):
        return sorted(self.runs)

    def shared(self, other):
        """Seeds that both arms have."""
        return [seed for seed in self.seeds if seed in other.runs]

    def losses(self, step):
        """[loss of each seed] at `step`."""
        return [self.runs[seed].loss(step) for seed in self.seeds]


@dataclass
class Setting:
    """`arms` that are to be compared, `label` by what tells this setting from others ("" if there is but one).

    `steps` are those at which every run was evaluated, `end` the last of them; `tokens` are those of one step.
    """

    label: str
    values: dict
    arms: list[Arm]

    @property
    def runs(self):
        return [arm.runs[seed] for arm in self.arms for seed in arm.seeds]

    @property
    def max_steps(self):
        return self.values["train.max_steps"]

    @property
    def tokens(self):
        return self.values["train.batch_size"] * self.values["model.block_size"]

    @cached_property
    def steps(self):
        return sorted(set.intersection(*(set(run.evaluations) for run in self.runs)))

    @property
    def end(self):
        return self.steps[-1]

    def tenths(self):
        """{i: step} of those i tenths of max_steps, 1 to 10, at which every run was evaluated: the paper's 5K … 50K."""
        return {i: self.max_steps * i // 10 for i in range(1, 11) if self.max_steps * i / 10 in self.steps}

    def tenth(self, step):
        """i if `step` is i tenths of training, else None."""
        return next((i for i, at in self.tenths().items() if at == step), None)

    def counterparts(self, arm, name):
        """The arms to compare `arm` with, by their label, or by another router's name: of several of one router those
        with most constants like `arm`'s. Only such as have a seed in common with it."""
        others = [other for other in self.arms if other is not arm and other.label == name]
        others = others or [other for other in self.arms if other.router == name != arm.router]
        others = [other for other in others if arm.shared(other)]
        alike = [sum(a == b for a, b in zip(arm.constants, other.constants, strict=True)) for other in others]
        return [other for other, number in zip(others, alike, strict=True) if number == max(alike)]

    def counterpart(self, arm, name):
        """The first of them, or None."""
        return next(iter(self.counterparts(arm, name)), None)


def load_all(folders):
    """([Run], [why a folder is left out]). Raises ValueError, RunError or ConfigError of the first if none is a run."""
    runs, errors = [], []
    for folder in folders:
        try:
            runs.append(load(folder))
        except (ValueError, RunError) as error:  # ConfigError is one
            errors.append(error)
    if errors and not runs:
        raise errors[0]
    return runs, [f"left out: {' '.join(str(error).split())}" for error in errors]


def load(folder):
    """The Run in `folder`. Raises ValueError if it holds no evaluated run, RunError or ConfigError of a broken file."""
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{folder}: no config.toml, so not a run; give folders such as runs/quickstart-kern")
    evaluations, logs, diverged = {}, [], None
    for line in read(folder / "metrics.jsonl"):
        if wrong := wrong_kind(line):
            raise RunError(f"{folder}/metrics.jsonl, step {line['step']}: {wrong}")
        if "train/loss" in line:
            logs.append({key: value for key, value in line.items() if not isinstance(value, list)})
        if "val/loss" in line:
            if math.isfinite(line["val/loss"]):
                evaluations[line["step"]] = line
            elif diverged is None:
                diverged = line["step"]
    if not evaluations:
        reason = (
            "not evaluated yet; go on with train.py" if diverged is None else "diverged; start again with another lr"
        )
        raise ValueError(f"{folder}: {reason}, or leave it out")
    return Run(folder, configure.load(folder / "config.toml"), evaluations, logs, diverged)


def wrong_kind(line):
    """What in a line is not of the kind that train.py writes, in words; empty if all is well."""
    lists = {key: value for key, value in line.items() if isinstance(value, list)}
    for key in line:
        if key in LISTS and key not in lists:
            return f"{key} is no list"
        if key.startswith(NUMBERED) and key not in LISTS and not key.endswith("_of_layers") and key in lists:
            return f"{key} is a list, not a number"
    if "val/window_losses" in lists and not all(isinstance(loss, int | float) for loss in lists["val/window_losses"]):
        return "val/window_losses is not a list of numbers"
    loads = lists.get("val/loads", [])
    if any(not isinstance(layer, list) or len(layer) != len(loads[0]) or not layer for layer in loads):
        return "val/loads is not layers by experts"
    if line.get("perf/tokens_per_sec", 1) <= 0:
        return "perf/tokens_per_sec is not above 0"
    return ""


def settings_of(runs):
    """([Setting], [what is odd about the runs]). A run that is there twice under two names counts once, and one that
    is not at its end does not count where others are.

    Raises ValueError if there is none, or if runs to be compared differ in their data or in their validation windows.
    """
    if not runs:
        raise ValueError("no run among the folders; give some such as runs/quickstart-kern")
    oddities, groups = [], defaultdict(lambda: defaultdict(dict))
    ended = {run.setting for run in runs if run.ended}
    for run in sorted(runs, key=lambda run: -max(run.evaluations)):  # of two the one that came further
        if run.setting in ended and not run.ended:
            oddities.append(f"{run.folder} is left out: {run.short()} of {run.config.train.max_steps:,}")
            continue
        first = groups[run.setting][run.arm].setdefault(run.config.run.seed, run)
        if first is not run:
            oddities.append(f"{run.folder} has the settings and the seed of {first.folder}: it is left out")
    varying = _varying([dict(setting) for setting in groups])
    varying_arm = _varying([dict(arm) for arms in groups.values() for arm in arms])
    settings = []
    for setting, arms in sorted(groups.items(), key=lambda item: [dict(item[0])[key] for key in varying]):
        found = [
            Arm(_label(dict(arm), varying_arm), dict(arm)["model.router"], arm[1:], seeds)
            for arm, seeds in arms.items()
        ]
        found.sort(key=lambda arm: (_rank(arm.router), arm.constants))
        settings.append(Setting(_label(dict(setting), varying), dict(setting), found))
        oddities += _check(settings[-1])
    return settings, oddities


def _check(setting):
    """Raises ValueError if the runs are not to be paired; returns lines on what they lack."""
    runs = setting.runs
    for what in ("data", "tokenizer"):
        seen = {identity[what]: run for run in runs if (identity := identity_of(run)) and what in identity}
        if len(seen) > 1:
            one, other, *_ = seen.values()
            raise ValueError(
                f"{one.folder} and {other.folder}: trained on different {what} (sha256 in their checkpoints) under the "
                f"name {setting.values['data.name']}; report them apart"
            )
    if not setting.steps:
        evaluated = "; ".join(f"{run.folder} at {', '.join(map(str, list(run.evaluations)[:4]))} …" for run in runs[:2])
        raise ValueError(f"no step at which all runs were evaluated ({evaluated}); leave out those that lack steps")
    counts = {len(line["val/window_losses"]) for run in runs for line in run.evaluations.values() if _windows(line)}
    if len(counts) > 1:
        raise ValueError(
            f"{setting.label or 'runs'}: {sorted(counts)} validation windows: not paired; report them apart"
        )
    where = f"{setting.label}: " * bool(setting.label)
    short = [f"{run.folder} ({run.short()})" for run in runs if not run.ended]
    if not short:
        return []
    words = "unfinished or diverged" if any(run.diverged is not None for run in runs) else "unfinished"
    return [
        f"{where}{words}: {', '.join(short)}. All are compared at step {setting.end:,} of {setting.max_steps:,}, "
        f"and no claim about the end is judged"
    ]


def _windows(line):
    return "val/window_losses" in line


def identity_of(run):
    """sha256 of data and tokenizer as its last checkpoint has them, or None."""
    checkpoints = run.folder / "checkpoints"
    steps = checkpoint.steps(checkpoints)
    try:
        return checkpoint.read_manifest(checkpoint.folder_of(checkpoints, max(steps)))["facts"] if steps else None
    except RunError:  # damaged: the numbers are in metrics.jsonl all the same
        return None


def _rank(router):
    return (list(STYLES).index(router), "") if router in STYLES else (len(STYLES), router)


def _varying(rows):
    return [key for key in rows[0] if any(row[key] != rows[0][key] for row in rows)]


def _label(values, varying):
    """Text stands alone, a number behind its key's last word; the router always."""
    parts = [values["model.router"]] if "model.router" in values else []
    for key in varying:
        value = values[key]
        if key != "model.router":
            parts.append(value if isinstance(value, str) else f"{key.split('.')[1]} {value:.12g}")
    return ", ".join(parts)


def slug(text):
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")


class Paper:
    """What the paper prints of one experiment, for the settings of it that runs have."""

    def __init__(self, experiment):
        """Raises ValueError of an experiment that the paper has not."""
        tables = tomllib.loads(NUMBERS.read_text())
        if not (EXPERIMENTS / f"{experiment}.toml").is_file():
            printed = ", ".join(stem for stem, rows in tables.items() if "loss" in rows[0])
            raise ValueError(
                f"--experiment {experiment}: no file of config/paper; the paper prints losses of {printed}"
            )
        self.experiment, self.tables = experiment, tables.get(experiment, [])

    def table(self, setting):
        """The table whose conditions `setting` meets, {} if there is none."""
        for table in self.tables:
            if "loss" in table and all(setting.values[key] == value for key, value in table.get("where", {}).items()):
                return table
        return {}

    def losses(self, setting, router, what="loss"):
        """{1 for 5K, …, 10 for 50K: the paper's number}, of `what` "loss" or "std"."""
        return {int(at[:-1]) // 5: value for at, value in self.table(setting).get(what, {}).get(router, {}).items()}

    def difference(self, setting, left, right, tenth=10):
        """The paper's loss of the router `left` minus that of `right`, None if it has not both or one is doubtful."""
        ours, theirs = (self.losses(setting, router).get(tenth) for router in (left, right))
        doubtful = {(left, tenth), (right, tenth)} & set(self.doubts(setting))
        return None if ours is None or theirs is None or doubtful else ours - theirs

    def same_tokens(self, setting):
        """Whether a nat a token means the same there: GPT-2's vocabulary."""
        return setting.values["model.vocab_size"] == KEYS["model.vocab_size"]["default"]

    def doubts(self, setting):
        """{(router, tenth): why its number is doubtful}"""
        doubts = self.table(setting).get("doubtful", {}).items()
        return {(key.split()[0], int(key.split()[1][:-1]) // 5): why for key, why in doubts}

    def differences(self, setting):
        """Lines `key = value here (value there)` of what `setting` and its arms have and the experiment has not."""
        file = EXPERIMENTS / f"{self.experiment}.toml"
        points = [configure.load(file, point) for point in configure.sweep_points(file)]
        points = [Run(file, point, {}, []) for point in points]
        found = []
        for key in (*setting.values, *OF_ARM[1:]):
            ours = {run.value(key) for run in setting.runs}
            theirs = [point.value(key) for point in points]
            if odd := sorted(ours.difference(theirs)):
                found.append(f"{key} = {', '.join(map(str, odd))} ({theirs[0]})")
        return found
