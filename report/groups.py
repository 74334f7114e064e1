"""Sort runs into groups that can be compared, and each group into variants.

A *variant* is a router with one choice of its options: what balances or scales its gates, and
train.dtype, which follows the router by default. It has a run for each seed and, in a report over a
key x, for each value of x. Runs of one *group* differ in router, options, seed and x alone: they
have the same corpus, shape, schedule and validation windows. configure/schema.py says of each key
whether it is an option, separates groups or is neutral.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low
from typing import Any

from configure.schema import KEYS, select_keys
from report.labels import (
    count_values,
    describe,
    find_text_mismatch,
    find_varying,
    format_value,
    join_labels,
)
from report.style import STYLES
from runtime.runs import Run

FIRST_IN_LABELS = select_keys("label", "first")
LAST_IN_LABELS = select_keys("label", "last")
# Keys in which variants of a group may differ besides the router, in the order of labels.
OPTION_KEYS = [key for key in select_keys("report", "option") if key not in LAST_IN_LABELS]
OPTION_KEYS += LAST_IN_LABELS
SETTING_KEYS = select_keys("report", "setting")


@dataclass(eq=False)
class Variant:
    """A router with its options.

    `label` distinguishes it from all variants, `options_label` from other variants of its router.
    """

    router: str
    options: dict[str, Any]
    # {(value of the report's key, None without a key; seed): run}
    runs: dict[tuple[Any, int], Run] = field(default_factory=dict)
    options_label: str = ""
    state: str = ""  # of a run that is not compared, with its seed

    @property
    def label(self) -> str:
        return join_labels([self.router, self.options_label, self.state])

    @property
    def first_run(self) -> Run:
        return next(iter(self.runs.values()))

    @property
    def xs(self) -> list[Any]:
        """Values of the key that it has runs at, ascending; [None] without a key."""
        return sorted({x for x, _ in self.runs})

    def runs_at(self, x: Any = None) -> dict[int, Run]:
        """{seed: run} at a value of the key."""
        return {seed: run for (run_x, seed), run in self.runs.items() if run_x == x}

    def shares_seed(self, other: "Variant") -> bool:
        """True if both variants have a run with one seed at one value of the key."""
        return not self.runs.keys().isdisjoint(other.runs)


def list_runs(variants: Iterable[Variant]) -> list[Run]:
    """The runs of some variants."""
    runs = []
    for variant in variants:
        runs += variant.runs.values()
    return runs


@dataclass(eq=False)
class Group:
    """Variants that are compared.

    `label` distinguishes the group from others; it is "" if there is only one.
    """

    label: str
    values: dict[str, Any]  # values of the config's keys that all runs share
    variants: list[Variant]  # of the runs that are compared
    key: str | None = None  # the key of --over; losses at the end of each run are compared
    # runs that are shown and not compared, a variant for each
    curves: list[Variant] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """The runs that are compared."""
        return list_runs(self.variants)

    @property
    def shown_runs(self) -> list[Run]:
        """The runs that are compared, then those of the other curves."""
        return list_runs(self.variants + self.curves)

    @property
    def xs(self) -> list[Any]:
        """Values of the key, ascending; [None] without a key."""
        return sorted(set().union(*(variant.xs for variant in self.variants)))

    @property
    def max_steps(self) -> int:
        return max(run.max_steps for run in self.runs)

    @cached_property
    def steps(self) -> list[int]:
        """Steps at which every compared run was evaluated; the last is compared."""
        steps = [set(run.evaluations) for run in self.runs]
        return sorted(set.intersection(*steps)) if steps else []

    def ends_of(self, variant: Variant) -> list[Any]:
        """Where its losses are compared: at its values of the key, or at the last common step."""
        return variant.xs if self.key else self.steps[-1:]

    def evaluation(self, run: Run) -> dict[str, Any]:
        """A run's evaluation that is compared."""
        return run.evaluations[run.max_steps if self.key else self.steps[-1]]

    def loss(self, run: Run) -> float:
        """A run's validation loss that is compared."""
        return self.evaluation(run)["val/loss"]

    def evaluations_at(self, variant: Variant, at: Any) -> dict[int, dict[str, Any]]:
        """{seed: evaluation} of a variant at a value of the key, or without a key at a step."""
        runs = variant.runs_at(at if self.key else None)
        if self.key:
            return {seed: self.evaluation(run) for seed, run in runs.items()}
        return {seed: run.evaluations[at] for seed, run in runs.items()}

    def losses_at(self, variant: Variant, at: Any) -> list[float]:
        """The losses of the runs in `evaluations_at`."""
        return [line["val/loss"] for line in self.evaluations_at(variant, at).values()]

    def find_counterparts(self, variant: Variant, name: str) -> list[Variant]:
        """Variants to compare with `variant`: with that label, or of another router of that name.

        They share a seed with it. Of several, those that share most options with it.
        """
        candidates = []
        n_shared = []
        for other in self.variants:
            is_other_router = other.router == name and variant.router != name
            is_named = other.label == name or is_other_router
            if is_named and other is not variant and variant.shares_seed(other):
                candidates.append(other)
                n_shared.append(len(other.options.items() & variant.options.items()))
        most = max(n_shared, default=0)
        return [other for other, n in zip(candidates, n_shared, strict=True) if n == most]


def group_runs(runs: Sequence[Run], key: str | None = None) -> tuple[list[Group], list[str]]:
    """Sort runs into groups, with notes on runs that are not compared and on what is incomplete.

    Args:
        runs: in any state.
        key: of a report over a key.

    Raises:
        ValueError: the key is not a number, or the runs have one value of it.
    """
    compared, others = choose_compared(runs, key)
    notes = []
    for run in runs:
        notes += run.faults
    notes += [f"{run.path} is not compared: {run.progress}" for run in others]
    tied_keys: list[str] = []
    if key is not None:
        check_key(compared, key)
        tied_keys = find_tied_keys(compared, key)
        others = []  # a curve over a key has no steps
    if tied_keys:
        notes.append(f"{', '.join(tied_keys)} changed with {key}")
    groups, duplicates = build_groups(compared, others, key, tied_keys)
    notes += duplicates
    if not groups:
        return [], notes
    label_variants(groups)
    comparable, faults = reject_incomparable(label_groups(groups))
    for group in comparable:
        gaps = describe_gaps(group)
        if gaps:
            notes.append(gaps)
    return comparable, notes + faults


def choose_compared(runs: Sequence[Run], key: str | None) -> tuple[list[Run], list[Run]]:
    """The runs whose losses are compared, and the others. It decides this for every reader.

    Runs that finished are compared. Where none of a setting did, and there is no key, those that
    may still finish are compared, if they were evaluated as far as most of them. So neither a run
    that has just started nor one that failed moves the step that is compared.
    """
    finished_settings = {run.values(SETTING_KEYS) for run in runs if run.is_finished}
    started: dict[tuple, list[Run]] = {}  # unfinished runs by their settings
    for run in runs:
        setting = run.values(SETTING_KEYS)
        may_finish = run.status.state != "failed" and run.last_evaluated > 0
        if key is None and setting not in finished_settings and may_finish:
            started.setdefault(setting, []).append(run)
    compared = [run for run in runs if run.is_finished]
    for of_setting in started.values():
        reached_by_most = median_low(run.last_evaluated for run in of_setting)
        compared += [run for run in of_setting if run.last_evaluated >= reached_by_most]
    chosen = set(compared)
    return compared, [run for run in runs if run not in chosen]


def check_key(runs: Sequence[Run], key: str) -> None:
    """Raise ValueError if the key of a report is not a number, or the runs have one value of it."""
    if key == "run.seed":
        raise ValueError(
            "--over run.seed: seeds are the observations, not an axis; "
            "name a setting, such as optim.lr"
        )
    if KEYS.get(key, {}).get("type") not in ("integer", "number"):
        raise ValueError(f"--over {key}: expected a key that is a number, such as optim.lr")
    n_values = count_values(runs, [key])
    if n_values < 2:
        raise ValueError(
            f"--over {key}: the runs that ended have {n_values} value(s) of it; a curve needs two"
        )


def find_tied_keys(runs: Sequence[Run], key: str) -> list[str]:
    """Keys that vary with `key`, having one value for each of its values.

    Such are the sizes of a larger model.
    """
    n_values = count_values(runs, [key])
    varying = find_varying(runs, [other for other in SETTING_KEYS if other != key])
    return [other for other in varying if count_values(runs, [key, other]) == n_values]


def build_groups(
    compared: Sequence[Run], others: Sequence[Run], key: str | None, tied_keys: Sequence[str]
) -> tuple[list[Group], list[str]]:
    """Groups of the runs, without labels, and a note on each duplicate.

    Of two compared runs of one variant and seed the one that was evaluated further counts. Of the
    others those with an evaluation are curves.
    """
    group_keys = [other for other in SETTING_KEYS if other not in (key, *tied_keys)]
    option_keys = [other for other in OPTION_KEYS if other != key]
    all_keys = [*group_keys, "model.router", *option_keys]
    groups: dict[tuple, Group] = {}  # keys: values of group_keys
    variants: dict[tuple, Variant] = {}  # keys: values of all_keys
    notes = []

    def find_group(run: Run) -> Group:
        values = run.values(group_keys)
        named_values = dict(zip(group_keys, values, strict=True))
        return groups.setdefault(values, Group("", named_values, [], key))

    def make_variant(run: Run) -> Variant:
        options = dict(zip(option_keys, run.values(option_keys), strict=True))
        return Variant(run.config.model.router, options)

    for run in sorted(compared, key=lambda run: (-run.last_evaluated, run.seed)):
        x = None if key is None else run.value(key)
        variant = variants.setdefault(run.values(all_keys), make_variant(run))
        first = variant.runs.setdefault((x, run.seed), run)
        if first is not run:
            notes.append(f"{run.path} is left out: {first.path} has the same settings and seed")
    for variant in variants.values():
        find_group(variant.first_run).variants.append(variant)
    for run in others:
        if run.evaluations:
            variant = make_variant(run)
            variant.runs[None, run.seed] = run
            variant.state = f"seed {run.seed}, {run.status.state}"
            find_group(run).curves.append(variant)
    for group in groups.values():
        group.variants.sort(key=order_variant)
        group.curves.sort(key=order_variant)
    return list(groups.values()), notes


def order_variant(variant: Variant) -> tuple:
    """A sort key: routers in the order of STYLES, then options."""
    routers = list(STYLES)
    place = routers.index(variant.router) if variant.router in routers else len(routers)
    return place, variant.router, *variant.options.values()


def reject_incomparable(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """The groups whose losses can be compared, and a note on each other one.

    Curves of other text than the compared runs' are removed from their group.
    """
    comparable = []
    faults = []
    for group in groups:
        fault = find_text_mismatch(group.runs)
        if group.variants and group.key is None and not group.steps:
            folders = ", ".join(str(run.path) for run in group.runs)
            fault = f"{folders}: evaluated at no common step"
        if fault:
            faults.append(f"left out: {fault}")
            continue
        comparable.append(group)
        first = group.shown_runs[0]
        for curve in list(group.curves):
            fault = find_text_mismatch([first, curve.first_run])
            if fault:
                faults.append(f"left out: {fault}")
                group.curves.remove(curve)
    return comparable, faults


def describe_gaps(group: Group) -> str:
    """A note on the unfinished runs of a group, and on seeds and values that variants lack.

    "" without any.
    """
    gaps = [f"{run.path} ({run.progress})" for run in group.runs if not run.ended]
    seeds = {run.seed for run in group.runs}
    for variant in group.variants:
        for x in group.xs:
            missing = sorted(seeds - variant.runs_at(x).keys())
            if missing:
                at_x = "" if x is None else f" at {format_value(group.key, x)}"
                gaps.append(f"{variant.label}{at_x} lacks seed {', '.join(map(str, missing))}")
    if not gaps:
        return ""
    compared_at = "the end of each run"
    if group.key is None:
        compared_at = f"step {group.steps[-1]:,} of {group.max_steps:,}"
    note = (
        f"incomplete: {'; '.join(gaps)}. "
        f"Losses are compared at {compared_at}, by the seeds that both arms have"
    )
    return f"{group.label}: {note}" if group.label else note


def label_variants(groups: Sequence[Group]) -> None:
    """Label variants by the options in which they differ in any group.

    Keys that the schema labels last are named only where a router has several values of them.
    """
    variants = []
    for group in groups:
        variants += group.variants + group.curves
    runs = [variant.first_run for variant in variants]
    n_routers = count_values(runs, ["model.router"])
    varying = []
    for key in find_varying(runs, variants[0].options):
        if key not in LAST_IN_LABELS or count_values(runs, ["model.router", key]) > n_routers:
            varying.append(key)
    for variant in variants:
        values = [format_value(key, variant.options[key]) for key in varying]
        variant.options_label = ", ".join(values)


def label_groups(groups: Sequence[Group]) -> list[Group]:
    """Label each group by no more keys than distinguish them; sorts them by these keys.

    Keys that the schema labels first are chosen before others.
    """
    runs = [group.shown_runs[0] for group in groups]
    varying = find_varying(runs, groups[0].values)
    chosen: list[str] = []
    for key in sorted(varying, key=lambda key: key not in FIRST_IN_LABELS):
        if count_values(runs, [*chosen, key]) > count_values(runs, chosen):
            chosen.append(key)
    chosen.sort(key=SETTING_KEYS.index)
    for group, run in zip(groups, runs, strict=True):
        group.label = join_labels(dict.fromkeys(describe(run, key) for key in chosen))
    return sorted(groups, key=lambda group: [group.values[key] for key in chosen])
