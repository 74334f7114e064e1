"""The tables of a report, each as a head and rows of text."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common.text import plural
from scripts.report.comparisons import Comparison, estimate, find_comparison
from scripts.report.runs import Run
from scripts.report.settings import Setting, label_tick, label_value, name_axis
from scripts.report.statistics import HIGHER, LOWER

RUN_COLUMNS = ("run", "router", "data", "total", "active", "step", "val loss", "tokens/s", "gate norm", "val imbalance")
MEASURES = {  # besides the losses: what it is, format
    "val/gate_norm": ("gate norm √(E‖g‖²)", ".3f"),
    "val/load_imbalance": ("load imbalance (busiest / mean)", ".2f"),
    "val/dead_experts": ("dead experts", ".1f"),
    "val_ema/loss": ("loss of the weights' running mean", ".4f"),
    "router/entropy": ("entropy of the gates in training, nats", ".3f"),
    "router/gamma": ("γ in training", ".3f"),
}
# (router, one that it ends below), Sec. 4.1 and the appendix on KERN-after
LOWER_IN_PAPER = {("kern", other) for other in ("dense", "softmax", "sigmoid", "tanh", "kern-after")}
LOWER_IN_PAPER |= {(router, "dense") for router in ("softmax", "sigmoid", "tanh")}


class Table(NamedTuple):
    """A head and rows of text."""

    head: list[str]
    rows: list[list[str]]


def summarize_run(run: Run) -> list[str]:
    """RUN_COLUMNS of a run at its last evaluation. tokens/s: median over the run; gate norm: first → last."""
    from model import count_parameters  # imports torch

    first, last = (run.evaluations[choose(run.evaluations)] for choose in (min, max))
    norms = [f"{line['val/gate_norm']:.3f}" for line in (first, last) if "val/gate_norm" in line]
    step, speeds = last["step"], run.series("perf/tokens_per_sec").values()
    return [
        run.config.run.name + run.trunk,
        run.config.model.router,
        run.config.data.label,
        *(f"{count / 1e6:.2f}M" for count in count_parameters(run.config.model)),
        f"{step:,}" if run.ended else f"{step:,} of {run.max_steps:,}",
        f"{last['val/loss']:.4f}",
        f"{statistics.median(speeds):,.0f}" if speeds else "-",
        " → ".join(norms) or "-",
        f"{last['val/load_imbalance']:.2f}" if "val/load_imbalance" in last else "-",
    ]


def format_mean(values: Sequence[float], form: str = ".4f") -> str:
    """Mean and standard deviation (of a sample) over seeds."""
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def make_columns(setting: Setting) -> dict[str, tuple[object, int | None]]:
    """{head: (value of the key, step)} of a table of losses: values of the key, or the tenths of training."""
    if setting.key:
        return {label_tick(setting.key, x): (x, None) for x in setting.xs}
    if not setting.tenths:
        return {f"{setting.steps[-1]:,}": (None, None)}
    return {f"{step:,}": (None, step) for step in setting.tenths.values()}


def build_loss_table(setting: Setting) -> Table:
    """Loss of each arm over the key or at the tenths of training; below it the paper's."""
    columns = make_columns(setting)
    rows = []
    for arm in setting.arms:
        counts = sorted({len(cell) for cell in arm.cells.values()})
        seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        cells = []
        for x, step in columns.values():
            losses = [setting.evaluation(run, step)["val/loss"] for run in arm.cells.get(x, {}).values()]
            cells.append(format_mean(losses) if losses else "")
        rows.append([f"**{arm.label}**", seeds, *cells])
        printed = [setting.printed.get((arm.router, i), "") for i in setting.tenths]
        if not setting.key and any(printed):
            rows.append(["paper", "", *printed])
    return Table([name_axis(setting.key) or "validation loss at step", "seeds", *columns], rows)


def build_difference_table(setting: Setting, baseline: str, comparisons: Sequence[Comparison]) -> Table | None:
    """Each arm minus its counterpart of the baseline: at each value of a key, and as the mean that has the verdict."""
    values = [x for x in setting.xs if x is not None]
    rows = []
    for arm in setting.arms:
        base = setting.baseline_of(arm, baseline)
        comparison = find_comparison(comparisons, arm, base)
        if comparison is None:
            continue
        cells = []
        for x in values:
            difference = estimate(setting, arm, comparison.right, xs=[x])
            half = f" ± {difference.half_width:.4f}" if difference and difference.over else ""
            cells.append(f"{difference.mean:+.4f}{half}" if difference else "")
        rows.append([arm.label, *cells, *format_comparison(comparison)])
    if not rows:
        return None
    mean = "mean over values, 95%" if values else "difference, 95%"
    head = [f"minus {baseline}", *(label_tick(setting.key, x) for x in values), mean]
    return Table([*head, "interval over", "verdict", "Holm's p"], rows)


def format_comparison(comparison: Comparison) -> list[str]:
    """The difference with its interval, what that is over, the verdict and Holm's p-value, "-" without one."""
    difference, verdict = comparison.difference, comparison.verdict
    over = f"{difference.seeds} seeds" if difference.over == "seeds" else difference.over or "-"
    p = "-" if math.isnan(verdict.p) else f"{verdict.p:.2g}"
    return [str(difference), over, f"**{verdict.text}**", p]


def build_pairs_table(comparisons: Sequence[Comparison]) -> Table:
    """A row for each pair, the largest difference first."""
    ranked = sorted(comparisons, key=lambda comparison: -abs(comparison.difference.mean))
    head = ["first", "second", "first minus second, 95%", "interval over", "first is", "Holm's p"]
    rows = [[c.left.label, c.right.label, *format_comparison(c), judge_claim(c)] for c in ranked]
    if any(row[-1] for row in rows):
        return Table([*head, "paper claims"], rows)
    return Table(head, [row[:-1] for row in rows])


def judge_claim(comparison: Comparison) -> str:
    """What the paper claims of the first of a pair, at its routers' own norms, and what the verdict says of it."""
    left, right, verdict = comparison.left, comparison.right, comparison.verdict.text
    if left.options.get("model.gate_norm") != 0 or right.options.get("model.gate_norm") != 0:
        return ""
    for claim, pair in ((LOWER, (left.router, right.router)), (HIGHER, (right.router, left.router))):
        if pair in LOWER_IN_PAPER:
            contradicted = "contradicted" if verdict in (LOWER, HIGHER) else "undecided"
            return f"{claim}: {'supported' if verdict == claim else contradicted}"
    return ""


def find_measures(setting: Setting) -> dict[str, tuple[str, str]]:
    """{name in metrics.jsonl: (text, format)} of what the runs of the setting measured besides the losses."""
    names = {name for run in setting.runs for line in [*run.evaluations.values(), *run.logs] for name in line}
    measures = {name: entry for name, entry in MEASURES.items() if name in names}
    for name in sorted(names):
        section, _, rest = name.partition("/")
        if section == "val" and rest.endswith("/loss"):
            measures[name] = (f"loss on {rest.removesuffix('/loss')}", ".4f")
        elif section == "tasks" and rest.endswith(("/acc", "/bits_per_byte")):
            task, _, metric = rest.partition("/")
            measures[name] = (f"{task}, {'accuracy' if metric == 'acc' else 'bits per byte'}", ".4f")
    return measures


def read_measure(setting: Setting, cell: Mapping[int, Run], name: str) -> list[float]:
    """A measure at the end of each run of a cell that has it; tasks may be scored less often, then at their last."""
    values = []
    for run in cell.values():
        last = setting.evaluation(run)["step"]
        values += [value for step, value in run.series(name).items() if step <= last][-1:]
    return values


def build_measure_table(setting: Setting) -> Table:
    """What is measured besides the loss, at the end: a row for each arm and value of the key, a column for each."""
    measures = find_measures(setting)
    rows = []
    for arm in setting.arms:
        for x, cell in sorted(arm.cells.items()):
            row = [", ".join(filter(None, [arm.label, label_value(setting.key, x) if setting.key else ""]))]
            for name, (_, form) in measures.items():
                values = read_measure(setting, cell, name)
                row.append(format_mean(values, form) if values else "")
            rows.append(row)
    return Table(["at the end", *(text for text, _ in measures.values())], rows if measures else [])


def describe_setting(setting: Setting) -> str:
    """The text, how long is trained, and the validation windows."""
    run = setting.runs[0]
    tokens = run.config.train.batch_size * run.config.model.block_size
    steps = " or ".join(f"{count:,}" for count in sorted({run.max_steps for run in setting.runs}))
    documents = "" if setting.documents is None else f" of {plural(len(np.unique(setting.documents)), 'document')}"
    windows = f"{run.count_windows():,} validation windows{documents}"
    return f"`{run.config.data.label}`: {steps} steps of {tokens:,} tokens; {windows}. Losses in {run.unit}."
