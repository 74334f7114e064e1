"""The tables of a report, each as a head and rows of text."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from eval import paper
from scripts.report.comparisons import Comparison, Finding, Part, compare_parts, find_comparison
from scripts.report.runs import Run
from scripts.report.settings import Arm, Setting, label_axis, label_tick, label_value
from scripts.report.statistics import Verdict

RUN_COLUMNS = ("run", "router", "data", "total", "active", "step", "train loss", "val loss", "tokens/s", "gate norm")
RUN_COLUMNS += ("val imbalance",)
MEASURES = {  # of an evaluation, besides the loss: name, format
    "val/gate_norm": ("gate norm √(E‖g‖²)", ".3f"),
    "val/load_imbalance": ("load imbalance (busiest / mean)", ".2f"),
    "val/dead_experts": ("dead experts", ".1f"),
    "val_ema/loss": ("loss of the weights' running mean", ".4f"),
}


@dataclass(frozen=True)
class Table:
    """A head and rows of text; `left` is the number of columns that are text."""

    head: list[str]
    rows: list[list[str]]
    left: int = 1


def summarize_run(run: Run) -> list[str]:
    """RUN_COLUMNS of a run at its last evaluation. tokens/s: median over the run; gate norm: first → last."""
    from model import count_parameters  # imports torch

    first, last = (list(run.evaluations.values())[i] for i in (0, -1))
    step, loss, speeds = last["step"], run.train_loss(last["step"]), run.logged("perf/tokens_per_sec").values()
    norms = [f"{line['val/gate_norm']:.3f}" for line in (first, last) if "val/gate_norm" in line]
    return [
        run.config.run.name + run.trunk,
        run.config.model.router,
        run.config.data.label,
        *(f"{count / 1e6:.2f}M" for count in count_parameters(run.config.model)),
        f"{step:,}" if run.ended else f"{step:,} of {run.max_steps:,}",
        "-" if loss is None else f"{loss:.4f}",
        f"{last['val/loss']:.4f}",
        f"{statistics.median(speeds):,.0f}" if speeds else "-",
        " → ".join(norms) or "-",
        f"{last['val/load_imbalance']:.2f}" if "val/load_imbalance" in last else "-",
    ]


def format_mean(values: Sequence[float], form: str = ".4f") -> str:
    """Mean and standard deviation (of a sample) over seeds."""
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def format_p(verdict: Verdict) -> str:
    """Holm's p-value; "-" where none is tested."""
    return "-" if verdict.p != verdict.p else f"{verdict.p:.2g}"


def describe_seeds(arm: Arm) -> str:
    """How many seeds an arm has: `3`, or `2 to 3` where its cells differ."""
    counts = sorted({len(cell) for cell in arm.cells.values()})
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])


def make_columns(setting: Setting) -> dict[str, tuple[object, int | None]]:
    """{head: (value of the key, step)} of a table of losses: values of the key, or the tenths of training."""
    if setting.key:
        return {label_tick(setting.key, x): (x, None) for x in setting.xs}
    if not setting.tenths:
        return {f"{setting.end:,}": (None, setting.end)}
    scaled = setting.printed.losses and setting.max_steps != paper.STEPS
    return {f"{step:,} ({5 * i}K)" if scaled else f"{step:,}": (None, step) for i, step in setting.tenths.items()}


def build_loss_table(setting: Setting) -> Table:
    """Loss of each arm over the key or at the tenths of training; below it the paper's."""
    columns = make_columns(setting)
    rows = []
    for arm in setting.arms:
        cells = [arm.cells.get(x, {}).values() for x, _ in columns.values()]
        losses = [
            [setting.evaluation(run, step)["val/loss"] for run in runs]
            for runs, (_, step) in zip(cells, columns.values(), strict=True)
        ]
        rows.append([f"**{arm.label}**", describe_seeds(arm), *(format_mean(row) if row else "" for row in losses)])
        printed = [setting.printed.format_loss(arm.router, i) for i in setting.tenths]
        if not setting.key and any(printed):
            rows.append(["paper", "", *printed])
    first = label_axis(setting.key) if setting.key else "validation loss at step"
    return Table([first, "seeds", *columns], rows)


def build_difference_table(setting: Setting, baseline: str, comparisons: Sequence[Comparison]) -> Table | None:
    """Each arm minus its counterpart of the baseline: at each value of a key, and as the mean that has the verdict."""
    values = [x for x in setting.xs if x is not None]
    rows = []
    for arm in setting.arms:
        for base in setting.counterparts(arm, baseline)[:1]:
            comparison = find_comparison(comparisons, arm, base)
            if comparison is None:
                continue
            cells = [difference_at(setting, arm, base, x) for x in values]
            theirs = setting.printed.subtract(arm.router, base.router, find_tenth(setting))
            printed = [] if not setting.printed.losses else ["" if theirs is None else f"{theirs:+.4f}"]
            rows.append([arm.label, *cells, *format_comparison(comparison), *printed])
    if not rows:
        return None
    printed = ["the paper's difference"] if setting.printed.losses else []
    mean = "mean over values, 95%" if values else "difference, 95%"
    head = [f"minus {baseline}", *(label_tick(setting.key, x) for x in values)]
    return Table([*head, mean, "interval over", "verdict", "Holm's p", *printed], rows)


def difference_at(setting: Setting, arm: Arm, base: Arm, x: float) -> str:
    """Mean difference at one value of the key with half its interval; empty where one of the arms has no run."""
    ours, theirs = (Arm(one.router, one.options, {x: one.cells.get(x, {})}) for one in (arm, base))
    difference = compare_parts([Part(setting, ours, theirs)])
    if difference is None:
        return ""
    half = difference.half_width
    return f"{difference.mean:+.4f}" if half != half else f"{difference.mean:+.4f} ± {half:.4f}"


def find_tenth(setting: Setting) -> int | None:
    """The tenth of training that the setting's end is, if it is one."""
    if setting.key:
        return None
    return next((i for i, step in setting.tenths.items() if step == setting.end), None)


def format_comparison(comparison: Comparison) -> list[str]:
    """The difference with its interval, what that is over, the verdict and Holm's p-value."""
    difference, verdict = comparison.difference, comparison.verdict
    over = f"{difference.seeds} seeds" if difference.over == "seeds" else difference.over or "-"
    return [str(difference), over, f"**{verdict.text}**", format_p(verdict)]


def build_pairs_table(comparisons: Sequence[Comparison]) -> Table:
    """A row for each pair, the largest difference first."""
    ranked = sorted(comparisons, key=lambda comparison: -abs(comparison.difference.mean))
    rows = [[comparison.left.label, comparison.right.label, *format_comparison(comparison)] for comparison in ranked]
    return Table(["first", "second", "first minus second, 95%", "interval over", "first is", "Holm's p"], rows, 2)


def build_claims_table(findings: Sequence[Finding]) -> Table:
    """A row for each claim in each setting and for each pair of arms."""
    rows = []
    for finding in findings:
        claim, comparison = finding.claim, finding.comparison
        routers = f"{comparison.left.router} against {comparison.right.router}"
        options = "" if comparison.name == routers else f" ({comparison.name})"
        tenth = claim.tenth if finding.setting.printed.losses else None
        theirs = finding.setting.printed.subtract(claim.left, claim.right, tenth)
        difference, over, _, p = format_comparison(comparison)
        printed = "" if theirs is None else f"{theirs:+.4f}"
        text = claim.text + options
        rows.append([text, claim.source, finding.setting.label, difference, over, f"**{finding.verdict}**", p, printed])
    head = ["claim", "where", "setting", "left minus right, 95%", "interval over", "verdict", "Holm's p", "paper's"]
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return Table([head[i] for i in used], [[row[i] for i in used] for row in rows], 2)


def find_measures(setting: Setting) -> dict[str, tuple[str, str]]:
    """{name in an evaluation: (text, format)} of what evaluations of the setting measured besides the loss."""
    runs, measures = setting.runs, {}
    names = [key for arm in setting.arms for line in arm.runs[0].evaluations.values() for key in line]
    for key in dict.fromkeys(names):
        section, _, rest = key.partition("/")
        if key in MEASURES:
            measures[key] = MEASURES[key]
        elif section == "val" and rest.endswith("/loss"):
            name = rest.removesuffix("/loss")
            measures[key] = (f"loss on {name} ({runs[0].config.data.sets[name]:.0%})", ".4f")
        elif section == "tasks" and rest.endswith(("/acc", "/bits_per_byte")):
            name, _, metric = rest.partition("/")
            measures[key] = (f"{name}, {'accuracy' if metric == 'acc' else 'bits per byte'}", ".4f")
    limits = sorted({run.config.eval.task_limit for run in runs})
    if len(limits) > 1:
        unequal = f" (unequal eval.task_limit: {', '.join(map(str, limits))})"
        measures |= {key: (text + unequal, form) for key, (text, form) in measures.items() if key.startswith("tasks/")}
    return measures


def read_measure(setting: Setting, run: Run, key: str) -> float | None:
    """A measure of a run at the end; tasks may be scored less often, then at their last step. None if it has none."""
    last = setting.evaluation(run)["step"]
    values = [line[key] for step, line in run.evaluations.items() if key in line and step <= last]
    return values[-1] if values else None


def build_measure_tables(setting: Setting) -> list[Table]:
    """What evaluations measure besides the loss, at the end: a column for each, or over a key a table for each."""
    measures = find_measures(setting)

    def cell(arm: Arm, x: object, key: str) -> str:
        values = [read_measure(setting, run, key) for run in arm.cells.get(x, {}).values()]
        known = [value for value in values if value is not None]
        return format_mean(known, measures[key][1]) if known else ""

    if not measures:
        return []
    if not setting.key:
        rows = [[arm.label, *(cell(arm, None, key) for key in measures)] for arm in setting.arms]
        return [Table(["at the end", *(text for text, _ in measures.values())], rows)]
    head = [label_tick(setting.key, x) for x in setting.xs]
    return [
        Table([text, *head], [[arm.label, *(cell(arm, x, key) for x in setting.xs)] for arm in setting.arms])
        for key, (text, _) in measures.items()
    ]


def describe_setting(setting: Setting) -> str:
    """The text, how long is trained, and the validation windows."""
    run = setting.runs[0]
    tokens = run.config.train.batch_size * run.config.model.block_size
    counts = f"{run.count_windows():,} validation windows"
    if setting.documents is not None:
        counts += f" of {len(set(setting.documents.tolist())):,} documents"
    steps = " or ".join(f"{count:,}" for count in sorted({run.max_steps for run in setting.runs}))
    shape = ", ".join(
        label_value(key, run.value(key))
        for key in ("model.n_layer", "model.n_embd", "model.n_expert", "model.top_k")
        if len({other.value(key) for other in setting.runs}) == 1
    )
    return f"`{run.config.data.label}`: {steps} steps of {tokens:,} tokens; {shape}; {counts}. Losses in {run.unit}."
