"""The tables of a report, each as a head and rows of text."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common.text import plural
from report.comparisons import HIGHER, LOWER, Comparison, estimate
from report.runs import Run
from report.settings import Setting, label_tick, label_value

Table = tuple[list[str], list[list[str]]]  # head and rows
RUN_COLUMNS = ("run", "router", "data", "total", "active", "step", "val loss", "tokens/s")
MEASURES = {  # besides the losses: a name in metrics.jsonl and its format
    "val/gate_norm": ".3f",
    "val/load_imbalance": ".2f",
    "val/dead_experts": ".1f",
    "val_ema/loss": ".4f",
    "router/entropy": ".3f",
    "router/gamma": ".3f",
    "router/expert_signal": ".3f",
}
# (router, one that it ends below), Sec. 4.1 and the appendix on KERN-after
LOWER_IN_PAPER = {
    ("kern", other) for other in ("dense", "softmax", "sigmoid", "tanh", "kern-after")
}
LOWER_IN_PAPER |= {(router, "dense") for router in ("softmax", "sigmoid", "tanh")}


def summarize_run(run: Run) -> list[str]:
    """RUN_COLUMNS of a run at its last evaluation. tokens/s: median over the run."""
    from model import count_parameters  # imports torch

    step, speeds, train = (
        max(run.evaluations),
        run.series("perf/tokens_per_sec").values(),
        run.config.train,
    )
    trunk = (
        f" (branch of {train.branch_from} at step {train.branch_step:,})"
        if train.branch_from
        else ""
    )
    return [
        f"`{run.folder}`{trunk}",
        run.config.model.router,
        run.config.data.label,
        *(f"{count / 1e6:.2f}M" for count in count_parameters(run.config.model)),
        f"{step:,}" if run.ended else f"{step:,} of {run.max_steps:,}",
        f"{run.evaluations[step]['val/loss']:.4f}",
        f"{statistics.median(speeds):,.0f}" if speeds else "-",
    ]


def format_mean(values: Sequence[float], form: str = ".4f") -> str:
    """Mean and standard deviation (of a sample) over seeds."""
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def build_loss_table(setting: Setting) -> Table:
    """Loss of each arm over the key, or at the tenths of training with the paper's losses below it."""
    if setting.key:
        columns = [(label_tick(setting.key, x), x, None) for x in setting.xs]
    else:
        steps = [*setting.tenths.values()] or setting.steps[-1:]
        columns = [(f"{step:,}", None, step) for step in steps]
    rows = []
    for arm in setting.arms:
        counts = sorted({len(cell) for cell in arm.cells.values()})
        seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        cells = []
        for _, x, step in columns:
            losses = [
                setting.evaluation(run, step)["val/loss"] for run in arm.cells.get(x, {}).values()
            ]
            cells.append(format_mean(losses) if losses else "")
        rows.append([f"**{arm.label}**", seeds, *cells])
        printed = [setting.printed.get((arm.router, i), "") for i in setting.tenths]
        if any(printed):
            rows.append(["paper", "", *printed])
    return [
        setting.key or "validation loss at step",
        "seeds",
        *(head for head, *_ in columns),
    ], rows


def build_pairs_table(
    setting: Setting, comparisons: Sequence[Comparison], xs: Sequence[Any] = ()
) -> Table:
    """A row for each pair, the largest difference first: at values of the key, and the mean, which is judged."""
    head = ["first", "second", *(label_tick(setting.key, x) for x in xs)]
    head += ["first minus second, 95%", "interval over", "first is", "Holm's p", "in the paper"]
    rows = []
    for pair in sorted(comparisons, key=lambda pair: -abs(pair.difference.mean)):
        mean, cells = pair.difference, [pair.left.label, pair.right.label]
        for x in xs:
            difference = estimate(setting, pair.left, pair.right, xs=[x])
            half = f" ± {difference.half_width:.4f}" if difference and difference.over else ""
            cells.append(f"{difference.mean:+.4f}{half}" if difference else "")
        over = f"{mean.seeds} seeds" if mean.over == "seeds" else mean.over or "-"
        p = "-" if math.isnan(mean.p) else f"{mean.p:.2g}"
        rows.append([*cells, str(mean), over, f"**{mean.verdict}**", p, find_claim(pair)])
    if not any(row[-1] for row in rows):
        return head[:-1], [row[:-1] for row in rows]
    return head, rows


def find_claim(pair: Comparison) -> str:
    """What the paper says the first of a pair is, at its routers' own norms; "" if nothing."""
    if any(arm.options.get("model.gate_norm") != 0 for arm in (pair.left, pair.right)):
        return ""
    if (pair.left.router, pair.right.router) in LOWER_IN_PAPER:
        return LOWER
    return HIGHER if (pair.right.router, pair.left.router) in LOWER_IN_PAPER else ""


def find_measures(setting: Setting) -> dict[str, str]:
    """{name in metrics.jsonl: format} of what the runs of the setting measured besides the losses."""
    names = {
        name
        for run in setting.runs
        for line in [*run.evaluations.values(), *run.logs]
        for name in line
    }
    documents = {run.config.eval.task_limit for run in setting.runs}
    if len(documents) > 1:  # scores on other documents cannot be compared
        names = {name for name in names if not name.startswith("tasks/")}
    of_sets = [
        name
        for name in sorted(names)
        if re.fullmatch(r"val/.+/loss|tasks/.+/(acc|bits_per_byte)", name)
    ]
    return {
        name: form
        for name, form in (MEASURES | dict.fromkeys(of_sets, ".4f")).items()
        if name in names
    }


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
            row = [
                ", ".join(
                    filter(None, [arm.label, label_value(setting.key, x) if setting.key else ""])
                )
            ]
            for name, form in measures.items():
                values = read_measure(setting, cell, name)
                row.append(format_mean(values, form) if values else "")
            if any(row[1:]):
                rows.append(row)
    return ["at the end", *measures], rows


def describe_setting(setting: Setting) -> str:
    """The text, how long is trained, and the validation windows."""
    run = setting.runs[0]
    tokens = run.config.train.batch_size * run.config.model.block_size
    steps = " or ".join(f"{count:,}" for count in sorted({run.max_steps for run in setting.runs}))
    documents = {*run.evaluations[max(run.evaluations)].get("val/window_documents", ())}
    of_documents = f" of {plural(len(documents), 'document')}" if documents else ""
    windows = f"{run.count_windows():,} validation windows{of_documents}"
    return f"`{run.config.data.label}`: {steps} steps of {tokens:,} tokens; {windows}. Losses in {run.unit}."
