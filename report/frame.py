"""Runs that can be compared, as groups with pandas frames of their numbers.

A *variant* is a router with one choice of its options: what balances or scales its gates, and
train.dtype, which follows the router by default. It has a run for each seed and, in a report over a
key x, for each value of x. Runs of one *group* differ in router, options, seed and x alone: they
have the same corpus, shape, schedule and validation windows. configure/schema.py says of each key
whether it is an option, separates groups or is neutral.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import Any, NamedTuple

import pandas as pd

from common.text import plural
from configure.schema import KEYS, read_router_names, select_keys
from report.compare import UNDECIDED, Difference, judge, lowest, paired
from report.labels import (
    count_values,
    describe,
    find_text_mismatch,
    find_varying,
    format_value,
    join_labels,
)
from runtime.runs import Run

MIN_SEEDS = 3  # two seeds have one degree of freedom: the quantile of t is 12.7
FIRST_IN_LABELS = select_keys("label", "first")
LAST_IN_LABELS = select_keys("label", "last")
# Keys in which variants of a group may differ besides the router.
OPTION_KEYS = select_keys("report", "option")
SETTING_KEYS = select_keys("report", "setting")

Place = tuple[Any, int]  # a value of the report's key, None without a key; a seed


class Comparison(NamedTuple):
    """Two variants and the difference of their losses, left minus right.

    Attributes:
        left: variant.
        right: variant.
        difference: over seeds, with an interval from MIN_SEEDS on.
        verdict: what its family says of the left one, such as "lower".
        p: by Holm's correction; NaN with few seeds.
    """

    left: str
    right: str
    difference: Difference
    verdict: str = UNDECIDED
    p: float = math.nan


@dataclass(eq=False)
class Group:
    """Runs that can be compared; variants go by their labels.

    Attributes:
        values: values of the config's keys that all runs share.
        key: the key of --over: losses at the end of each run are compared.
        label: distinguishes the group from others; "" if there is only one.
        runs: {variant: {place: run}}, the runs that are compared.
        curves: {label: run}, the runs that are shown and not compared.
        variants: {label of a variant or a curve: its variant}, of all runs, in order.
        frames: what `series` has made.
    """

    values: dict[str, Any]
    key: str | None = None
    label: str = ""
    runs: dict[str, dict[Place, Run]] = field(default_factory=dict)
    curves: dict[str, Run] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)
    frames: dict[str, pd.DataFrame] = field(default_factory=dict)

    @property
    def compared(self) -> list[Run]:
        """The runs that are compared."""
        runs = []
        for of_variant in self.runs.values():
            runs += of_variant.values()
        return runs

    @property
    def shown(self) -> list[Run]:
        """The runs that are compared, then the others."""
        return [*self.compared, *self.curves.values()]

    def first_run(self, variant: str) -> Run:
        return next(iter(self.runs[variant].values()))

    def router(self, variant: str) -> str:
        return self.first_run(variant).config.model.router

    def series(self, name: str) -> pd.DataFrame:
        """A measure: columns (variant, seed), rows steps, or values of the key at runs' ends."""
        if name in self.frames:
            return self.frames[name]
        columns: dict[tuple[str, int], dict] = {}
        for variant, of_variant in self.runs.items():
            for (x, seed), run in of_variant.items():
                column = columns.setdefault((variant, seed), {})
                for step, value in sorted(run.series(name).items()):
                    if step <= run.max_steps:
                        row = x if self.key else step
                        column[row] = value  # of a value of the key the last one stays
        self.frames[name] = pd.DataFrame(columns, dtype=float).sort_index()
        return self.frames[name]

    @cached_property
    def losses(self) -> pd.DataFrame:
        """Validation losses; see `series`. Without a key at the steps that all runs have."""
        losses = self.series("val/loss")
        return losses if self.key else losses.dropna()

    @property
    def ends(self) -> list[Any]:
        """The rows of `losses` that are compared: all values of the key, or the last step."""
        rows = list(self.losses.index)
        return rows if self.key else rows[-1:]

    def compare(self, left: str, right: str, rows: Sequence[Any]) -> Comparison | None:
        """Mean over rows of `losses` of the left one's minus the right one's.

        It pairs the seeds that both have at every row at which they share one; None without any.
        """
        apart = pd.DataFrame(self.losses[left] - self.losses[right]).loc[list(rows)]
        apart = apart.dropna(how="all").dropna(axis="columns")
        return None if apart.empty else require_seeds(left, right, paired(apart.mean()))

    def compare_best(self, left: str, right: str) -> Comparison | None:
        """The left one at its best value of the key minus the right one at its own; see `lowest`.

        It pairs the seeds that have every value of both; None without any.
        """
        of_both = {v: pd.DataFrame(self.losses[v]).dropna(how="all") for v in (left, right)}
        losses = pd.concat(of_both, join="inner").dropna(axis="columns")
        if losses.empty:
            return None
        return require_seeds(left, right, lowest(losses.loc[left], losses.loc[right]))


def require_seeds(left: str, right: str, difference: Difference) -> Comparison:
    """A comparison, without an interval if it is of fewer than MIN_SEEDS seeds."""
    if difference.n < MIN_SEEDS:
        difference = Difference(difference.mean, n=difference.n)
    return Comparison(left, right, difference)


def choose_baseline(group: Group, wanted: str) -> str:
    """The router or variant that is `wanted`; the first router of a group that lacks it."""
    routers = [group.router(variant) for variant in group.runs]
    if wanted in group.runs or wanted in routers or not routers:
        return wanted
    return routers[0]


def find_pairs(group: Group, baseline: str) -> list[tuple[str, str]]:
    """Each variant and those of the baseline, a router or a variant, that it is compared with.

    They are the second of their pairs, and have the most similar options. Of the baseline's own
    variants those are compared that differ in one option. Variants without a common seed are not.
    """
    references = [v for v in group.runs if baseline in (v, group.router(v))]
    options = {v: list_options(group.first_run(v), group.key) for v in group.runs}
    pairs = []
    for left in reversed(group.runs):
        rights = references
        if left in references:
            rights = references[: references.index(left)]  # each pair once
        distances = {}
        for right in rights:
            if not group.runs[left].keys().isdisjoint(group.runs[right]):
                n_differing = sum(map(operator.ne, options[left], options[right]))
                distances[right] = n_differing
        wanted = 1 if left in references else min(distances.values(), default=0)
        pairs += [(left, right) for right, distance in distances.items() if distance == wanted]
    return pairs


def compare_group(
    group: Group, baseline: str = "kern", margin: float = 0.0, at_best: bool = False
) -> list[Comparison]:
    """Every pair of a group at the end, as one family. Nothing is compared before training.

    In a group with a key pairs are compared by the mean over it, or `at_best`: each variant at its
    best value.
    """
    found = []
    if group.key or any(group.ends):
        for left, right in find_pairs(group, baseline):
            if at_best:
                comparison = group.compare_best(left, right)
            else:
                comparison = group.compare(left, right, group.ends)
            if comparison is not None:
                found.append(comparison)
    verdicts = judge([comparison.difference for comparison in found], margin)
    judged = []
    for pair, (text, p) in zip(found, verdicts, strict=True):
        if math.isnan(p):
            text += f" ({plural(pair.difference.n, 'seed')})"
        judged.append(pair._replace(verdict=text, p=p))
    return judged


def group_runs(runs: Sequence[Run], key: str | None = None) -> tuple[list[Group], list[str]]:
    """Sort runs into groups, with notes on runs that are not compared and on what is incomplete.

    Args:
        runs: in any state.
        key: of a report over a key.

    Raises:
        ValueError: the key is not a number, or the runs have one value of it.
    """
    notes = [fault for run in runs for fault in run.faults]
    group_keys = SETTING_KEYS
    if key is not None:
        tied_keys = find_tied_keys([run for run in runs if run.is_finished], key)
        if tied_keys:
            notes.append(f"{', '.join(tied_keys)} changed with {key}")
        group_keys = [other for other in SETTING_KEYS if other not in (key, *tied_keys)]
    by_setting: dict[tuple, list[Run]] = {}
    for run in sorted(runs, key=lambda run: order_run(run, key)):
        by_setting.setdefault(run.values(group_keys), []).append(run)
    option_keys = choose_label_keys(runs, key)
    groups = []
    for values, of_setting in by_setting.items():
        group = Group(dict(zip(group_keys, values, strict=True)), key)
        notes += add_runs(group, of_setting, option_keys)
        fault = find_fault(group)
        if fault:
            notes.append(f"left out: {fault}")
        elif group.shown:
            groups.append(group)
    label_groups(groups)
    return groups, [*notes, *filter(None, map(describe_gaps, groups))]


def find_tied_keys(runs: Sequence[Run], key: str) -> list[str]:
    """Keys that vary with `key`, having one value for each of its values.

    Such are the sizes of a larger model.

    Raises:
        ValueError: `key` is not a number, or the runs have one value of it.
    """
    if KEYS.get(key, {}).get("type") not in ("integer", "number") or key == "run.seed":
        raise ValueError(
            f"--over {key}: expected a key that is a number, such as optim.lr, and not the seed"
        )
    n_values = count_values(runs, [key])
    if n_values < 2:
        raise ValueError(
            f"--over {key}: the runs that ended have {n_values} value(s) of it; a curve needs two"
        )
    varying = find_varying(runs, [other for other in SETTING_KEYS if other != key])
    return [other for other in varying if count_values(runs, [key, other]) == n_values]


def add_runs(group: Group, runs: Sequence[Run], option_keys: Sequence[str]) -> list[str]:
    """Add the runs of a setting to its group: those that are compared, and the others as curves.

    Of two compared runs of one variant and seed the one that was evaluated further counts.

    Returns:
        A note on each run that is not compared.
    """
    compared = dict.fromkeys(choose_compared(runs, group.key))
    notes = []
    for run in runs:
        options = [format_value(key, run.value(key)) for key in option_keys]
        variant = join_labels([run.config.model.router, *options])
        group.variants[variant] = variant
        if run in compared:
            x = None if group.key is None else run.value(group.key)
            first = group.runs.setdefault(variant, {}).setdefault((x, run.seed), run)
            if first is not run:
                rival = f"{first.path} has the same settings and seed"
                notes.append(f"{run.path} is left out: {rival}")
            continue
        reason = run.progress
        if has_two_lengths(run):
            reason = "its learning rate rose again, for a larger train.max_steps"
        notes.append(f"{run.path} is not compared: {reason}")
        fault = find_text_mismatch([*list(compared)[:1], run])
        if fault:
            notes.append(f"left out: {fault}")
        elif run.evaluations and group.key is None:
            label = f"{variant}, {run.path.name}, {run.status.state}"
            group.curves[label] = run
            group.variants[label] = variant
    return notes


def choose_compared(runs: Sequence[Run], key: str | None) -> list[Run]:
    """The runs of a setting whose losses are compared. It decides this for every reader.

    They are those that finished, of one length all the time. Where none did, and there is no key,
    they are those that may still finish and were evaluated as far as most of them. So neither a run
    that has just started nor one that failed moves the step that is compared.
    """
    runs = [run for run in runs if not has_two_lengths(run)]
    finished = [run for run in runs if run.is_finished]
    started = [run for run in runs if run.status.state != "failed" and run.last_evaluated > 0]
    if finished or key or not started:
        return finished
    reached_by_most = median_low(run.last_evaluated for run in started)
    return [run for run in started if run.last_evaluated >= reached_by_most]


def has_two_lengths(run: Run) -> bool:
    """True if its learning rate rose after the warm-up: train.max_steps became larger on the way.

    A run of the longer length alone has other rates.
    """
    rates = run.series("optim/lr")
    steps = sorted(step for step in rates if step >= run.config.optim.warmup_steps)
    # the warm-up's last rate may be rounded below the peak
    return any(rates[later] > rates[step] * (1 + 1e-6) for step, later in pairwise(steps))


def choose_label_keys(runs: Sequence[Run], key: str | None) -> list[str]:
    """The options that labels of variants name: those that vary.

    Keys that the schema labels last are named only where a router has several values of them.
    """
    n_routers = count_values(runs, ["model.router"])
    chosen = []
    for other in find_varying(runs, [other for other in OPTION_KEYS if other != key]):
        is_needed = other not in LAST_IN_LABELS
        if is_needed or count_values(runs, ["model.router", other]) > n_routers:
            chosen.append(other)
    return chosen


def list_options(run: Run, key: str | None) -> tuple:
    """A run's values of the options that a report over a key has variants of."""
    return run.values([other for other in OPTION_KEYS if other != key])


def order_run(run: Run, key: str | None) -> tuple:
    """A sort key: routers in the order of router.py, formulas after them, then options."""
    routers = read_router_names()
    router = run.config.model.router
    place = len(routers)
    if router in routers:
        place = routers.index(router)
    return place, router, *list_options(run, key), -run.last_evaluated, run.seed


def label_groups(groups: list[Group]) -> None:
    """Label each group by the keys that distinguish them, and sort them by these keys.

    Where those that the schema labels first do, the others are not named.
    """
    runs = [group.shown[0] for group in groups]
    keys = find_varying(runs, groups[0].values) if groups else []
    first = [key for key in keys if key in FIRST_IN_LABELS]
    if count_values(runs, first) == len(groups):
        keys = first
    for group, run in zip(groups, runs, strict=True):
        group.label = join_labels(dict.fromkeys(describe(run, key) for key in keys))
    groups.sort(key=lambda group: [group.values[key] for key in keys])


def find_fault(group: Group) -> str:
    """Why the runs of a group cannot be compared; "" if they can."""
    if group.runs and group.losses.empty:
        folders = ", ".join(str(run.path) for run in group.compared)
        return f"{folders}: evaluated at no common step"
    return find_text_mismatch(group.compared)


def describe_gaps(group: Group) -> str:
    """A note on compared runs that have not ended; "" without any."""
    unfinished = [run.path.name for run in group.compared if not run.ended]
    if not unfinished:
        return ""
    note = f"not at their end: {', '.join(unfinished)}. Losses are compared at step"
    return join_labels([group.label, f"{note} {group.ends[0]:,}"])
