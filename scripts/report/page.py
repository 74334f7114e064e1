"""The page of a report: its text, tables and pictures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

import configure
from common.text import plural
from eval.paper import EXPERIMENTS
from scripts.report import pictures, tables
from scripts.report.comparisons import (
    MARGIN,
    Comparison,
    choose_best,
    compare_over_settings,
    compare_setting,
    judge_claims,
)
from scripts.report.figures import save_figure
from scripts.report.pages import Block, write_page
from scripts.report.runs import Run
from scripts.report.settings import Setting
from scripts.report.statistics import MIN_SEEDS, UNDECIDED
from scripts.report.tables import Table

TITLE = re.compile(r"# (One run|\d+ runs compared)\n")  # of a page that this module wrote
NOTES, PAIRS = 6, 15  # shown; more notes, or a table of more pairs, are folded
HOW = f"""\
A seed's loss is one observation. Differences are paired by seed, with 95% intervals and p-values by Student's t over
seeds. With fewer than {MIN_SEEDS} paired seeds the interval is **over documents** of the validation text (over windows
where documents were not recorded): it holds for these runs, says nothing of other seeds, and decides nothing. An
interval is about one difference. **Verdicts** count all pairs of a table as one family, by Holm's p-values: below 0.05
the first has a **lower** or a **higher** loss, else the pair is **undecided**. Undecided does not mean equal."""
HOW_EQUIVALENT = """\
**Equivalent**: two one-sided t-tests, with Holm's correction, place the difference within ±{} nats."""
HOW_CLAIMS = f"""\
**Supported**: the verdict on the pair is on the claim's side; for "ends like", the pair is equivalent at a margin of
{MARGIN} nats, the paper's own deviation over seeds. **Contradicted**: on the other side, or outside the margin."""
HOW_BEST = "Each arm at the value with its lowest mean loss over seeds {}, compared by its other seeds, one family."
HOW_RUNS = """\
`train loss`: mean of the training batches logged since the evaluation before, within a tenth of training. `gate norm`:
√(E‖g‖²) on the validation windows, mean over layers, at the first and the last evaluation. Runs timed one after another
cannot show what a router costs: `python -m scripts.bench step` times routers in turn."""


@dataclass
class Report:
    """What a report is of, and what was asked."""

    settings: list[Setting]
    notes: list[str]
    baseline: str = "kern"
    experiment: str | None = None
    choose_on: Sequence[int] = ()
    margin: float | None = None
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)  # by setting's label

    def compare(self, setting: Setting) -> list[Comparison]:
        """The pairs of a setting at the end, judged once: every table and picture shows these."""
        if setting.label not in self.comparisons:
            self.comparisons[setting.label] = compare_setting(setting, margin=self.margin)
        return self.comparisons[setting.label]


def write_report(report: Report, folder: Path, before: Sequence[Block] = ()) -> None:
    """Write report.md, report.html and their pictures into `folder`; `before`: blocks below the title.

    Raises:
        ValueError: the folder has a report.md that is not one of runs.
        OSError: it cannot be written.
    """
    remove_pictures(folder)
    runs = [run for setting in report.settings for run in setting.runs]
    blocks: list[Block] = [("h1", f"{len(runs)} runs compared" if len(runs) > 1 else "One run"), *before]
    blocks += format_notes(report.notes)
    if findings := judge_claims(report.settings):
        blocks += [("h2", "Claims"), make_block(tables.build_claims_table(findings)), ("p", HOW_CLAIMS)]
    if overall := compare_over_settings(report.settings, report.margin):
        blocks += [("h2", "Pairs, mean over settings"), *format_pairs(overall)]
    for setting in report.settings:
        blocks += format_setting(report, setting, folder)
    blocks += [("h2", "How to read the verdicts"), ("p", HOW)]
    if report.margin is not None:
        blocks.append(("p", HOW_EQUIVALENT.format(report.margin)))
    rows = [[f"`{run.folder}`{run.trunk}", *tables.summarize_run(run)[1:]] for run in runs]
    table = ("table", tables.RUN_COLUMNS, rows)
    blocks += [("h2", "Runs"), ("fold", plural(len(rows), "run"), [table]) if len(rows) > 30 else table]
    write_page([*blocks, ("p", HOW_RUNS)], folder)


def format_notes(notes: Sequence[str]) -> list[Block]:
    """A list of notes; those after the first NOTES are folded."""
    blocks: list[Block] = []
    if notes:
        blocks.append(("list", [f"**Note** {line}." for line in notes[:NOTES]]))
    if more := notes[NOTES:]:
        blocks.append(("fold", f"{len(more)} more notes", [("list", [f"{line}." for line in more])]))
    return blocks


def format_setting(report: Report, setting: Setting, folder: Path) -> list[Block]:
    """The section of a setting: its tables and pictures."""
    comparisons = report.compare(setting)
    blocks: list[Block] = [("h2", setting.label or "Loss"), ("p", tables.describe_setting(setting))]
    if report.experiment:
        blocks.append(("p", describe_paper(setting, report.experiment)))

    def add(name: str, figure: Figure | None, caption: str) -> None:
        if figure is not None:
            file = re.sub(r"[^A-Za-z0-9._]+", "-", f"{setting.label}-{name}").strip("-") + ".png"
            save_figure(figure, folder / file)
            blocks.append(("picture", file, caption))

    bands = "Left: mean and range over seeds. Right: difference with 95% intervals."
    spread = "Mean and range over seeds. Lower is better."
    add("loss", pictures.plot_loss(setting, report.baseline), bands if setting.key else spread)
    blocks.append(make_block(tables.build_loss_table(setting)))
    if table := tables.build_difference_table(setting, report.baseline, comparisons):
        blocks.append(make_block(table))
        caption = f"Loss minus {report.baseline}'s with 95% intervals. Filled: lower or higher; open: undecided."
        add("ends", pictures.plot_ends(setting, report.baseline, comparisons), caption)
        caption = f"Loss minus {report.baseline}'s over training, with 95% intervals of each step alone."
        add("difference", pictures.plot_difference(setting, report.baseline), caption)
    blocks += format_pairs(comparisons)
    if report.choose_on:
        best = tables.build_pairs_table(choose_best(setting, report.choose_on))
        blocks += [make_block(best), ("p", HOW_BEST.format(", ".join(map(str, report.choose_on))))]
    blocks += [make_block(table) for table in tables.build_measure_tables(setting)]
    caption = "Measured on the validation windows, mean and range over seeds."
    add("measures", pictures.plot_measures(setting, report.baseline), caption)
    add("routing", pictures.plot_routing(setting, report.baseline), "Training batches, means over layers and seeds.")
    return blocks


def make_block(table: Table) -> Block:
    """A table as a block of a page."""
    return "table", table.head, table.rows


def format_pairs(comparisons: Sequence[Comparison]) -> list[Block]:
    """The table of pairs, folded if it is long; nothing without pairs."""
    if not comparisons:
        return []
    table = make_block(tables.build_pairs_table(comparisons))
    undecided = sum(comparison.verdict.text.startswith(UNDECIDED) for comparison in comparisons)
    title = f"{plural(len(comparisons), 'pair')}, {undecided} of them undecided"
    return [("fold", title, [table]) if len(comparisons) > PAIRS else table]


def remove_pictures(folder: Path) -> None:
    """Remove the pictures of the report in the folder, and no others. Raises ValueError of another report.md."""
    previous = folder / "report.md"
    text = previous.read_text() if previous.is_file() else ""
    if text and not TITLE.match(text):
        raise ValueError(f"--out {folder}: its report.md is not a report of runs; name another folder")
    for name in re.findall(r"^!\[.*\]\(([\w.-]+\.png)\)", text, re.M):
        (folder / name).unlink(missing_ok=True)


def describe_paper(setting: Setting, experiment: str) -> str:
    """How far the paper's numbers may be compared with these runs."""
    printed = setting.printed
    if not printed.losses:
        return f"The paper prints no loss of `{experiment}` in this setting."
    text = f"The paper's numbers are those of `{experiment}`, at the same part of training."
    if differing := list_differences(setting, experiment):
        text += (
            " **Not the paper's setting**: compare differences between routers, not losses (the paper's values in "
            f"brackets): {', '.join(differing)}."
        )
    if printed.deviations:
        text += " ± is the standard deviation over seeds, ours of a sample, the paper's of a population."
    shown = {(arm.router, i) for arm in setting.arms for i in setting.tenths}
    doubts = [f"{at[0]} at {5 * at[1]}K: {why}" for at, why in printed.doubts.items() if at in shown]
    return text + (f" Numbers marked ? are doubtful: {'; '.join(doubts)}." if doubts else "")


def list_differences(setting: Setting, experiment: str) -> list[str]:
    """`key = value here (value there)` for each value that no run of the experiment has."""
    file = EXPERIMENTS / f"{experiment}.toml"
    points = [Run(file, configure.load(file, point)) for point in configure.sweep_points(file)]
    lines = []
    for key in (*setting.values, *setting.arms[0].options):
        theirs = ["float16" if point.value(key) == "auto" else point.value(key) for point in points]
        if odd := sorted({run.value(key) for run in setting.runs}.difference(theirs)):
            lines.append(f"{key} = {', '.join(map(str, odd))} ({theirs[0]})")
    return lines
