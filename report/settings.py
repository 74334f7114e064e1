"""Sort runs into settings and arms.

Runs of one setting have the same corpus, shape, schedule and validation windows: all that moves a
loss except the router, what balances or scales its gates, and train.dtype, which follows the router
by default. An arm is a router with one choice of these options. It has a run for each seed and, in
a report over a key, for each value of the key. configure/schema.py says of each key whether it is
an option, separates settings or is neutral.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from configure.schema import KEYS, select_keys
from report.runs import Run, find_other_text
from report.style import STYLES

LAST_LABELS = select_keys("label", "last")
# What differs between arms of one setting besides the router; in labels, in this order.
OPTION_KEYS = [key for key in select_keys("report", "option") if key not in LAST_LABELS]
OPTION_KEYS += LAST_LABELS
SETTING_KEYS = select_keys("report", "setting")


@dataclass(eq=False)
class Arm:
    """A router with its options.

    `label` distinguishes it from other arms, `options_label` from those of its router.
    """

    router: str
    options: dict[str, Any]
    # value of the report's key (or None): seed: run
    cells: dict[Any, dict[int, Run]] = field(default_factory=dict)
    options_label: str = ""

    @property
    def label(self) -> str:
        return ", ".join(filter(None, [self.router, self.options_label]))

    @property
    def runs(self) -> list[Run]:
        return [cell[seed] for cell in self.cells.values() for seed in sorted(cell)]

    def shares_seed(self, other: "Arm") -> bool:
        """Whether both arms have a run of one seed at a common value of the key."""
        return any(cell.keys() & other.cells.get(x, {}).keys() for x, cell in self.cells.items())


@dataclass(eq=False)
class Setting:
    """Arms that are compared; `label` distinguishes the setting from others ("" if there is only one)."""

    label: str
    values: dict[str, Any]
    arms: list[Arm]
    key: str | None = None  # of a report over a key: losses are those at the end of each run
    # of the paper, by router and tenth
    printed: dict[tuple[str, int], str] = field(default_factory=dict)

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
        """Steps at which every run was evaluated; the last is compared."""
        return sorted(set.intersection(*(set(run.evaluations) for run in self.runs)))

    @property
    def tenths(self) -> dict[int, int]:
        """{i: step} of the tenths of training, 1 to 10, at which every run was evaluated: the paper's 5K, …, 50K."""
        return {
            i: self.max_steps * i // 10
            for i in range(1, 11)
            if self.max_steps * i / 10 in self.steps
        }

    def evaluation(self, run: Run, step: int | None = None) -> dict[str, Any]:
        """A run's evaluation at `step`, by default the one that is compared: the end, or the last common step."""
        if step is None:
            step = run.max_steps if self.key else self.steps[-1]
        return run.evaluations[step]

    def counterparts(self, arm: Arm, name: str) -> list[Arm]:
        """Arms to compare `arm` with: of that label, or of another router of that name, and sharing a seed with it.

        Of several, those whose options are most like `arm`'s.
        """
        named = [
            other
            for other in self.arms
            if name == other.label or name == other.router != arm.router
        ]
        others = [other for other in named if other is not arm and arm.shares_seed(other)]
        alike = [len(other.options.items() & arm.options.items()) for other in others]
        return [other for other, count in zip(others, alike, strict=True) if count == max(alike)]


def group_runs(
    runs: Sequence[Run], key: str | None = None, unfinished: bool = False
) -> tuple[list[Setting], list[str]]:
    """Sort runs into settings, with notes on what was left out or is unfinished.

    Of two runs of one setting, arm and seed the one evaluated further counts. An unfinished run
    does not count where others of its setting ended (unless `unfinished`), nor in a report over a
    key.

    Raises:
        ValueError: the key is not a number, or the runs have one value of it; no setting's runs
            were evaluated on the same text.
    """
    ended = {run.values(SETTING_KEYS) for run in runs if run.ended}
    kept = [
        run
        for run in runs
        if run.ended or unfinished or not (key or run.values(SETTING_KEYS) in ended)
    ]
    notes = [
        f"{run.folder} is left out: {run.progress} of {run.max_steps:,}"
        for run in runs
        if run not in kept
    ]
    tied = check_key(kept, key) if key else []
    if tied:
        notes.append(f"{', '.join(tied)} changed with {key}")
    keys = [other for other in SETTING_KEYS if other not in (key, *tied)]
    option_keys = [other for other in OPTION_KEYS if other != key]
    groups: dict[tuple, dict[tuple, Arm]] = {}  # values of the setting: router and options: arm
    for run in sorted(kept, key=lambda run: -max(run.evaluations)):
        router, options = run.config.model.router, run.values(option_keys)
        arms = groups.setdefault(run.values(keys), {})
        arm = arms.setdefault(
            (router, options), Arm(router, dict(zip(option_keys, options, strict=True)))
        )
        first = arm.cells.setdefault(run.value(key) if key else None, {}).setdefault(run.seed, run)
        if first is not run:
            notes.append(f"{run.folder} is left out: {first.folder} has the same settings and seed")
    label_arms([arm for arms in groups.values() for arm in arms.values()])
    settings = []
    for values, arms in groups.items():
        settings.append(
            Setting(
                "", dict(zip(keys, values, strict=True)), sorted(arms.values(), key=place_arm), key
            )
        )
    faults = {}
    for setting in label_settings(settings):
        folders = ", ".join(str(run.folder) for run in setting.runs)
        apart = "" if setting.key or setting.steps else f"{folders}: evaluated at no common step"
        faults[setting] = apart or find_other_text(setting.runs)
    comparable = [setting for setting, fault in faults.items() if not fault]
    if not comparable:
        raise ValueError(next(iter(faults.values())))
    notes += filter(None, map(describe_gaps, comparable))
    return comparable, notes + [f"left out: {fault}" for fault in faults.values() if fault]


def check_key(runs: Sequence[Run], key: str) -> list[str]:
    """Keys that have one value for each value of `key`, and several in all, such as the sizes of a larger model.

    Raises ValueError if the key is not a number, or the runs that ended have one value of it.
    """
    if key == "run.seed":
        raise ValueError(
            "--over run.seed: seeds are the observations, not an axis; name a setting, such as optim.lr"
        )
    if KEYS.get(key, {}).get("type") not in ("integer", "number"):
        raise ValueError(f"--over {key}: expected a key that is a number, such as optim.lr")
    values = {run.value(key) for run in runs}
    if len(values) < 2:
        raise ValueError(
            f"--over {key}: the runs that ended have {len(values)} value(s) of it; a curve needs two"
        )
    varying = [
        other
        for other in SETTING_KEYS
        if other != key and len({run.value(other) for run in runs}) > 1
    ]
    return [
        other for other in varying if len({run.values([key, other]) for run in runs}) == len(values)
    ]


def describe_gaps(setting: Setting) -> str:
    """A note on the unfinished runs of a setting, and on seeds and values that arms lack; "" without any."""
    gaps = [f"{run.folder} ({run.progress})" for run in setting.runs if not run.ended]
    seeds = {run.seed for run in setting.runs}
    for arm in setting.arms:
        for x in setting.xs:
            if lacking := sorted(seeds - set(arm.cells.get(x, ()))):
                place = "" if x is None else f" at {label_value(setting.key, x)}"
                gaps.append(f"{arm.label}{place} lacks seed {', '.join(map(str, lacking))}")
    if not gaps:
        return ""
    where = (
        "the end of each run"
        if setting.key
        else f"step {setting.steps[-1]:,} of {setting.max_steps:,}"
    )
    note = f"incomplete: {'; '.join(gaps)}. Losses are compared at {where}, by the seeds that both arms have"
    return f"{setting.label}: {note}" if setting.label else note


def place_arm(arm: Arm) -> tuple:
    """A sort key: routers in the order of STYLES, then by options."""
    routers = list(STYLES)
    return (
        routers.index(arm.router) if arm.router in routers else len(routers),
        arm.router,
        *arm.options.values(),
    )


def label_arms(arms: Sequence[Arm]) -> None:
    """Label each arm by the options in which arms differ.

    An option that the schema labels last is named only where a router has several values of it.
    """
    varying = find_varying([arm.options for arm in arms])
    routers = {arm.router for arm in arms}
    for key in LAST_LABELS:
        if len({(arm.router, arm.options.get(key)) for arm in arms}) == len(routers):
            varying = [other for other in varying if other != key]
    for arm in arms:
        arm.options_label = ", ".join(label_value(key, arm.options[key]) for key in varying)


def find_varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that have several values."""
    return [key for key in rows[0] if len({row[key] for row in rows}) > 1]


def label_settings(settings: Sequence[Setting]) -> list[Setting]:
    """Label each by no more keys than distinguish them; returns them in the order of their labels.

    Keys that the schema labels first are chosen before others.
    """
    rows = [setting.values for setting in settings]
    named_first = select_keys("label", "first")
    chosen: list[str] = []
    labels: set[tuple] = {()}
    for key in sorted(find_varying(rows), key=lambda key: key not in named_first):
        finer = {tuple(row[name] for name in [*chosen, key]) for row in rows}
        if len(finer) > len(labels):
            chosen, labels = [*chosen, key], finer
    chosen.sort(key=SETTING_KEYS.index)
    for setting in settings:
        setting.label = ", ".join(
            filter(None, (label_value(key, setting.values[key]) for key in chosen))
        )
    return sorted(settings, key=lambda setting: [setting.values[key] for key in chosen])


def label_value(key: str | None, value: Any) -> str:
    """A value with the name of its key, such as `gate_norm 2`; text stands alone."""
    return (
        str(value)
        if isinstance(value, str) or key is None
        else f"{key.split('.')[1]} {label_tick(key, value)}"
    )


def label_tick(key: str | None, value: Any) -> str:
    """A number in a head or on an axis; `own` for a router's own gate norm."""
    return "own" if key == "model.gate_norm" and value == 0 else f"{value:.12g}"
