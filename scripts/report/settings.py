"""Sort runs into settings and arms.

Runs of one setting have the same corpus, shape, schedule and validation windows: all that moves a loss except the
router, what balances or scales its gates, and train.dtype, which follows the router by default. An arm is a router with
one choice of these options. It has a run for each seed and, in a report over a key, for each value of the key.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from configure.schema import KEYS
from eval.paper import PaperLosses
from scripts.report.runs import Run, check_same_text
from scripts.report.style import STYLES

DTYPE = "train.dtype"  # named only where a router has several
# What differs between arms of one setting, beside the router.
OPTION_KEYS = ("model.gate_scale", "model.gate_norm", "train.balance_loss_coef", "train.balance_loss_scope")
OPTION_KEYS += ("train.z_loss_coef", "train.bias_update_rate", "optim.router_lr_ratio", "optim.expert_out_lr_ratio")
OPTION_KEYS += (DTYPE,)
# What moves no loss, except by rounding.
NEUTRAL_KEYS = re.compile(
    r"(run|log)\.|eval\.(interval|task)|data\.dir|model\.backend|train\.(device|compile|parallel|micro_batch_size|"
    r"deterministic|activation_checkpointing|timeout_minutes|checkpoint_|keep_|branch_|ema_decay|on_save_error|"
    r"max_skipped_steps)"
)
SETTING_KEYS = [key for key in KEYS if key not in ("model.router", *OPTION_KEYS) and not NEUTRAL_KEYS.match(key)]
LABEL = 60  # characters of a setting's label, if fewer keys distinguish settings too
TELLING = ("data.name", "data.mix", "model.n_embd", "train.max_steps", "optim.lr")  # the last to be left out of a label
WORDS = {  # key: (name of an axis, short name before a value)
    "model.gate_norm": ("initial gate norm", "norm"),
    "model.n_embd": ("width of the model", "width"),
    "model.n_expert": ("experts", "experts"),
    "model.top_k": ("experts chosen per token", "top-k"),
    "model.block_size": ("tokens of context", "context"),
    "model.n_shared_expert": ("shared experts", "shared experts"),
    "train.max_steps": ("training steps", "steps"),
    "train.batch_size": ("sequences per step", "batch"),
    "train.balance_loss_coef": ("coefficient of the balance loss", "balance"),
    "optim.lr": ("peak learning rate", "lr"),
    "optim.router_lr_ratio": ("learning rate of the router / that of the rest", "router lr ×"),
    "optim.expert_out_lr_ratio": ("learning rate of the experts' output / that of the rest", "w_out lr ×"),
}


@dataclass(eq=False)
class Arm:
    """A router with its options. `label` distinguishes it from other arms, `options_label` from those of its router."""

    router: str
    options: dict[str, Any]
    cells: dict[Any, dict[int, Run]] = field(default_factory=dict)  # value of the report's key (or None): seed: run
    options_label: str = ""

    @property
    def label(self) -> str:
        return ", ".join(filter(None, [self.router, self.options_label]))

    @property
    def runs(self) -> list[Run]:
        return [cell[seed] for cell in self.cells.values() for seed in sorted(cell)]

    def shared_seeds(self, other: "Arm") -> set[int]:
        """Seeds that both arms have at some common value of the key."""
        return {seed for x, cell in self.cells.items() for seed in cell if seed in other.cells.get(x, {})}


@dataclass(eq=False)
class Setting:
    """Arms that are compared; `label` distinguishes the setting from others ("" if there is only one)."""

    label: str
    values: dict[str, Any]
    arms: list[Arm]
    key: str | None = None  # of a report over a key: losses are those at the end of each run
    printed: PaperLosses = PaperLosses()

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]

    @property
    def xs(self) -> list[Any]:
        """Values of the key, ascending; [None] without a key."""
        return sorted({x for arm in self.arms for x in arm.cells}) if self.key else [None]

    @property
    def max_steps(self) -> int:
        return max(run.max_steps for run in self.runs)

    @cached_property
    def steps(self) -> list[int]:
        """Steps at which every run was evaluated."""
        return sorted(set.intersection(*(set(run.evaluations) for run in self.runs)))

    @property
    def end(self) -> int:
        """The last step at which every run was evaluated."""
        return self.steps[-1]

    @property
    def tenths(self) -> dict[int, int]:
        """{i: step} of the tenths of training, 1 to 10, at which every run was evaluated: the paper's 5K, …, 50K."""
        steps = self.steps
        return {i: self.max_steps * i // 10 for i in range(1, 11) if self.max_steps * i / 10 in steps}

    @property
    def documents(self) -> np.ndarray | None:
        """(W,) the document of each validation window; None if no run recorded it."""
        return next((run.documents for run in self.runs if run.documents is not None), None)

    def evaluation(self, run: Run, step: int | None = None) -> dict[str, Any]:
        """A run's evaluation at `step`, by default the one that is compared: the end, or the last common step."""
        return run.evaluations[step if step is not None else run.max_steps if self.key else self.end]

    def counterparts(self, arm: Arm, name: str) -> list[Arm]:
        """Arms to compare `arm` with: of that label, or of another router of that name, and sharing a seed with it.

        Of several, those whose options are most like `arm`'s.
        """
        others = [
            other
            for other in self.arms
            if other is not arm and arm.shared_seeds(other) and name in (other.label, other.router)
        ]
        others = [other for other in others if other.label == name or other.router != arm.router]
        alike = [len(other.options.items() & arm.options.items()) for other in others]
        return [other for other, count in zip(others, alike, strict=True) if count == max(alike)]


def group_runs(
    runs: Sequence[Run], key: str | None = None, unfinished: bool = False
) -> tuple[list[Setting], list[str]]:
    """Sort runs into settings, with notes on what was left out or is unfinished.

    Of two runs of one setting, arm and seed the one evaluated further counts. An unfinished run does not count where
    others of its setting ended (unless `unfinished`), nor in a report over a key.

    Raises:
        ValueError: the key is not a number, or the runs have one value of it or a negative one; no setting's runs were
            evaluated on the same text.
    """
    runs, notes = _drop_unfinished(runs, key, unfinished)
    tied = check_key(runs, key) if key else []
    if tied:
        notes.append(f"with {key} {'also changes' if len(tied) == 1 else 'also change'} {', '.join(tied)}")
    setting_keys = [other for other in SETTING_KEYS if other not in (key, *tied)]
    option_keys = [other for other in OPTION_KEYS if other not in (key, *tied)]
    groups: dict[tuple, dict[tuple, Arm]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: -max(run.evaluations)):
        options = {other: run.value(other) for other in option_keys}
        arms = groups[tuple(run.value(other) for other in setting_keys)]
        router = run.config.model.router
        arm = arms.setdefault((router, *options.values()), Arm(router, options))
        first = arm.cells.setdefault(run.value(key) if key else None, {}).setdefault(run.seed, run)
        if first is not run:
            notes.append(f"{run.folder} is left out: {first.folder} has the same settings and seed")
    values = [dict(zip(setting_keys, group, strict=True)) for group in groups]
    naming = choose_label_keys(values)
    _label_arms([arm for arms in groups.values() for arm in arms.values()])
    settings, errors = [], []
    for setting_values, arms in zip(values, groups.values(), strict=True):
        setting = Setting(label_values(setting_values, naming), setting_values, sorted(arms.values(), key=_order), key)
        try:
            check_same_text(setting.runs)
            if not key and not setting.steps:
                raise ValueError(f"{', '.join(str(run.folder) for run in setting.runs)}: evaluated at no common step")
            settings.append(setting)
        except ValueError as error:
            errors.append(error)
    if not settings:
        raise errors[0]
    settings.sort(key=lambda setting: [setting.values[other] for other in naming])
    notes += [note for setting in settings for note in describe_gaps(setting)]
    return settings, [*notes, *(f"left out: {error}" for error in errors)]


def _drop_unfinished(runs: Sequence[Run], key: str | None, unfinished: bool) -> tuple[list[Run], list[str]]:
    """Runs that count, and a note for each way in which others do not."""

    def place(run: Run) -> tuple:
        return tuple(run.value(other) for other in SETTING_KEYS)

    ended = {place(run) for run in runs if run.ended}
    kept, left_out = [], defaultdict(list)  # how far: folders
    for run in runs:
        if run.ended or unfinished or not (key or place(run) in ended):
            kept.append(run)
        else:
            left_out[f"{run.progress} of {run.max_steps:,}"].append(str(run.folder))
    return kept, [f"left out: {', '.join(folders)}: {progress}" for progress, folders in left_out.items()]


def check_key(runs: Sequence[Run], key: str) -> list[str]:
    """Keys that have one value for each value of `key`, and several in all, such as the sizes of a larger model.

    Raises ValueError if the key is not a number, or the runs that ended have one value of it or a negative one.
    """
    if KEYS.get(key, {}).get("type") not in ("integer", "number"):
        numbers = [name for name, entry in KEYS.items() if entry.get("type") in ("integer", "number")]
        raise ValueError(f"--over {key}: expected a key that is a number, such as {', '.join(numbers[:3])}")
    values = {run.value(key) for run in runs}
    if len(values) < 2:
        raise ValueError(f"--over {key}: the runs that ended have {len(values)} value(s) of it; a curve needs two")
    if min(values) < 0:
        raise ValueError(f"--over {key}: {min(values):g} has no place on a logarithmic axis; leave its runs out")
    tied = []
    for other in SETTING_KEYS:
        pairs = {(run.value(key), run.value(other)) for run in runs}
        if other != key and len(pairs) == len(values) and len({value for _, value in pairs}) > 1:
            tied.append(other)
    return tied


def describe_gaps(setting: Setting) -> list[str]:
    """Notes on a setting: unfinished runs, seeds and values that arms lack, types of computation, branches."""
    notes = []
    short = [f"{run.folder} ({run.progress})" for run in setting.runs if not run.ended]
    if short:
        notes.append(
            f"unfinished or diverged: {', '.join(short)}. All are compared at step {setting.end:,} of "
            f"{setting.max_steps:,}, and no claim about the end is judged"
        )
    seeds = {run.seed for run in setting.runs}
    missing = []
    for arm in setting.arms:
        for x in setting.xs:
            if lacking := sorted(seeds - set(arm.cells.get(x, ()))):
                place = "" if x is None else f" at {label_value(setting.key, x)}"
                missing.append(f"{arm.label}{place} (seed {', '.join(map(str, lacking))})")
    if missing:
        more = f"; {len(missing) - 3} more" if len(missing) > 3 else ""
        notes.append(f"missing: {'; '.join(missing[:3])}{more}. A mean loss is over the seeds that an arm has")
    types = {run.value(DTYPE): arm.label for arm in setting.arms for run in arm.runs}
    if len(types) > 1:
        examples = ", ".join(f"{label} in {dtype}" for dtype, label in types.items())
        notes.append(f"computed in different types, so rounding is part of differences: {examples}")
    if trunks := sorted({run.config.train.branch_from for run in setting.runs} - {""}):
        more = f" and {len(trunks) - 2} more" if len(trunks) > 2 else ""
        notes.append(
            f"branches share the steps of their trunk, so what a seed did to it: {', '.join(trunks[:2])}{more}"
        )
    return [f"{setting.label}: {note}" if setting.label else note for note in notes]


def _order(arm: Arm) -> tuple:
    routers = list(STYLES)
    return routers.index(arm.router) if arm.router in routers else len(routers), arm.router, *arm.options.values()


def _label_arms(arms: Sequence[Arm]) -> None:
    """Label each arm by the options in which arms differ, by its type only where a router has several."""
    varying = find_varying([arm.options for arm in arms])
    if len({(arm.router, arm.options.get(DTYPE)) for arm in arms}) == len({arm.router for arm in arms}):
        varying = [key for key in varying if key != DTYPE]
    for arm in arms:
        arm.options_label = label_values(arm.options, varying)


def find_varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that have several values."""
    return [key for key in rows[0] if len({row[key] for row in rows}) > 1] if rows else []


def choose_label_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that label settings: those that vary, without some that are not needed where labels are long."""
    keys = find_varying(settings)
    for key in sorted(keys[::-1], key=lambda key: key in TELLING):
        fewer = [other for other in keys if other != key]
        long = max(len(label_values(values, keys)) for values in settings)
        if long > LABEL and len({label_values(values, fewer) for values in settings}) == len(settings):
            keys = fewer
    return keys


def label_values(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    """The values of these keys in words, separated by commas; empty text is left out."""
    return ", ".join(filter(None, (label_value(key, values[key]) for key in keys)))


def label_value(key: str | None, value: Any) -> str:
    """A value with its key's short name, such as `norm 2` or `own norm`; text stands alone."""
    if isinstance(value, str) or key is None:
        return str(value)
    if key == "model.gate_norm" and value == 0:
        return "own norm"
    name = WORDS[key][1] if key in WORDS else key.split(".")[1]
    return f"{name} {value:.12g}"


def label_axis(key: str) -> str:
    """The key in words."""
    return WORDS[key][0] if key in WORDS else key.split(".")[1].replace("_", " ")


def label_tick(key: str | None, value: Any) -> str:
    """A value in a head or on an axis."""
    return "own" if key == "model.gate_norm" and value == 0 else f"{value:,g}"
