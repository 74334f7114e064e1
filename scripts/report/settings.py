"""Sort runs into settings and arms.

Runs of one setting have the same corpus, shape, schedule and validation windows: all that moves a loss except the
router, what balances or scales its gates, and train.dtype, which follows the router by default. An arm is one such
router, with a run for each seed.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from common.text import plural
from configure.schema import KEYS
from eval.paper import PaperLosses
from scripts.report.runs import Run, check_same_text, find_without_windows
from scripts.report.style import STYLES

# What differs between arms of one setting.
ARM_KEYS = ("model.router", "model.gate_scale", "model.gate_norm")
ARM_KEYS += ("train.balance_loss_coef", "train.balance_loss_scope", "train.z_loss_coef", "train.bias_update_rate")
ARM_KEYS += ("optim.router_lr_ratio", "optim.expert_out_lr_ratio")
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
        types[find_without_windows(setting.runs, setting.end)].append(setting.label)
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
