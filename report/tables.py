"""The tables of a report."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from common.text import plural
from report.blocks import Table
from report.comparisons import Comparison, Difference, measure_difference
from report.groups import Group, Variant
from report.labels import format_tick, format_value, join_labels, name_unit
from runtime.runs import Run

MEASURES = {  # besides the losses: {name in metrics.jsonl: (in words, format)}
    "val/gate_norm": ("gate norm", ".3f"),
    "val/load_imbalance": ("busiest expert's load, 1 = even", ".2f"),
    "val/dead_experts": ("experts without a token, all layers", ".1f"),
    "val_ema/loss": ("validation loss of averaged weights", ".4f"),
    "router/entropy": ("entropy of routing scores, nats", ".3f"),
    "router/gamma": ("γ, mean over layers", ".3f"),
}
LOSSES_AND_SCORES = re.compile(r"val/.+/loss|tasks/.+/(acc|bits_per_byte)")  # names by set and task


def format_mean(values: Sequence[float], form: str = ".4f") -> str:
    """Mean and standard deviation (of a sample) over seeds; "" without values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):{form}}"


def list_steps(group: Group) -> list[int]:
    """The evaluations to show: at most ten after step 0, evenly apart, with the last."""
    steps = [step for step in group.steps if step > 0] or group.steps
    stride = math.ceil(len(steps) / 10)
    return steps[::-stride][::-1]


def build_loss_table(group: Group) -> Table:
    """Loss of each variant over the key, or over steps."""
    name = group.key or "validation loss at step"
    xs = group.xs if group.key else list_steps(group)
    columns = {x: format_tick(group.key, x) if group.key else f"{x:,}" for x in xs}
    table = Table([name, "seeds", *columns.values()], title="Losses")
    table.important = [name, "seeds", *reversed(columns.values())]
    for variant in group.variants:
        row = {name: f"**{variant.label}**", "seeds": describe_seed_counts(variant)}
        for x, column in columns.items():
            row[column] = format_mean(group.losses_at(variant, x))
        table.rows.append(row)
    return table


def describe_seed_counts(variant: Variant) -> str:
    """The number of seeds, as a range where it varies over the key."""
    counts = [len(variant.runs_at(x)) for x in variant.xs]
    ends = dict.fromkeys([min(counts), max(counts)])
    return " to ".join(map(str, ends))


def build_pairs_table(
    group: Group, comparisons: Sequence[Comparison], xs: Sequence[Any] = ()
) -> Table:
    """A row for each pair, the largest difference first.

    It has the difference at each of `xs`, values of the key, and the mean, which is judged.
    """
    table = Table(["first", "second"], title="Pairs")
    table.important = ["first", "second", "first minus second, 95%", "first is"]
    table.columns += [format_tick(group.key, x) for x in xs]
    table.columns += ["first minus second, 95%", "interval over", "first is", "Holm's p"]
    for pair in sorted(comparisons, key=lambda pair: -abs(pair.difference.mean)):
        row = {"first": pair.left.label, "second": pair.right.label}
        for x in xs:
            difference = measure_difference(group, pair.left, pair.right, x)
            row[format_tick(group.key, x)] = str(difference or "")
        row["first minus second, 95%"] = str(pair.difference)
        row["interval over"] = describe_draws(pair.difference)
        row["first is"] = f"**{pair.difference.verdict}**"
        row["Holm's p"] = format_p(pair.difference)
        table.rows.append(row)
    return table


def describe_draws(difference: Difference) -> str:
    """The number or kind of draws that a difference's interval is over."""
    if difference.over == "seeds":
        return f"{difference.seeds} seeds"
    return difference.over or "-"


def format_p(difference: Difference) -> str:
    """Holm's p-value; - if there is none."""
    return "-" if math.isnan(difference.p) else f"{difference.p:.2g}"


def find_measures(group: Group) -> dict[str, str]:
    """{name in metrics.jsonl: format} of what the runs of a group measured besides val/loss."""
    names: set[str] = set()
    for run in group.runs:
        for line in run.lines:
            names.update(line)
    formats = {name: form for name, (_, form) in MEASURES.items() if name in names}
    for name in sorted(names):
        if LOSSES_AND_SCORES.fullmatch(name):
            formats[name] = ".4f"
    return formats


def name_measure(name: str) -> str:
    """A name in metrics.jsonl in words, or itself."""
    if name == "train/loss":
        return "training loss"
    return MEASURES[name][0] if name in MEASURES else name


def read_measure(group: Group, runs: Iterable[Run], name: str) -> list[float]:
    """A measure at the end of each run that has it.

    Where tasks are scored less often than losses, their last score counts.
    """
    values = []
    for run in runs:
        last_step = group.evaluation(run)["step"]
        measured = [value for step, value in run.series(name).items() if step <= last_step]
        values += measured[-1:]
    return values


def build_measure_table(group: Group) -> Table:
    """The measures at the end, with a row for each variant and value of the key."""
    measures = find_measures(group)
    table = Table(["at the end", *measures], title="Measures")
    for variant in group.variants:
        for x in variant.xs:
            runs = variant.runs_at(x).values()
            row = {}
            for name, form in measures.items():
                row[name] = format_mean(read_measure(group, runs, name), form)
            if any(row.values()):
                label = format_value(group.key, x) if group.key else ""
                row["at the end"] = join_labels([variant.label, label])
                table.rows.append(row)
    return table


def describe_group(group: Group) -> str:
    """The text, the length of training, the validation windows and the models' sizes."""
    from runtime.memory import count_parameters  # imports torch

    run = group.shown_runs[0]
    tokens = run.config.train.batch_size * run.config.model.block_size
    lengths = sorted({run.max_steps for run in group.shown_runs})
    steps = " or ".join(f"{length:,}" for length in lengths)
    windows = f"{run.count_windows():,} validation windows"
    last_evaluation = run.evaluations[run.last_evaluated]
    documents = set(last_evaluation.get("val/window_documents", ()))
    if documents:
        windows += f" of {plural(len(documents), 'document')}"
    sizes = [count_parameters(run.config.model) for run in group.shown_runs]
    total, active = (format_range(counts) for counts in zip(*sizes, strict=True))
    return (
        f"`{run.config.data.label}`: {steps} steps of {tokens:,} tokens; {windows}. "
        f"{total} parameters, {active} active. Losses in {name_unit(run)}."
    )


def format_range(counts: Sequence[int]) -> str:
    """The smallest and the largest of some numbers of parameters, in millions."""
    ends = [f"{min(counts) / 1e6:.2f}M", f"{max(counts) / 1e6:.2f}M"]
    return " to ".join(dict.fromkeys(ends))
