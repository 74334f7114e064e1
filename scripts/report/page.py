"""The page of a report: its text, tables and pictures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from scripts.report import pictures, tables
from scripts.report.comparisons import compare_setting
from scripts.report.pages import Block, write_page
from scripts.report.settings import Setting
from scripts.report.statistics import MIN_SEEDS
from scripts.report.style import save_figure

HOW = f"""\
A seed's loss is one observation. Differences are paired by seed, with 95% intervals and p-values by Student's t over
seeds. With fewer than {MIN_SEEDS} paired seeds the interval is **over documents** of the validation text (over windows
where documents were not recorded): it holds for these runs, says nothing of other seeds, and decides nothing. An
interval is about one difference. **Verdicts** count all pairs of a table as one family, by Holm's p-values: below 0.05
the first has a **lower** or a **higher** loss, else the pair is **undecided**. Undecided does not mean equal.
**Paper claims**: what the paper says of the first loss of a pair at the routers' own norms, and whether the verdict
supports it."""
HOW_SEEDS = f"""\
**Add seeds** for a verdict, {MIN_SEEDS} for each router, such as: python train.py {{run.folder}}/config.toml \
--run.seed={{seed}} --run.name={{name}}-seed{{seed}}"""
HOW_EQUIVALENT = """\
**Equivalent**: two one-sided t-tests, with Holm's correction, place the difference within ±{} nats."""
HOW_PAPER = """\
The paper's numbers are those of `{}`, at the same part of training. Where the runs differ from that file in more than
the router, compare differences between routers, not losses. ± is the standard deviation over seeds, ours of a sample,
the paper's of a population. ? marks doubtful numbers: eval/paper_numbers.toml says why."""
HOW_RUNS = """\
Runs timed one after another cannot show what a router costs: `python -m scripts.bench step` times routers in turn."""


@dataclass
class Report:
    """What a report is of, and what was asked."""

    settings: list[Setting]
    notes: list[str]
    baseline: str = "kern"
    experiment: str | None = None
    margin: float | None = None


def write_report(report: Report, folder: Path, before: Sequence[Block] = ()) -> list[Block]:
    """Write report.md, report.html and their pictures into `folder`; `before`: blocks below the title.

    Returns the blocks of the page. Raises OSError if it cannot be written.
    """
    runs = [run for setting in report.settings for run in setting.runs]
    blocks: list[Block] = [("h1", f"{len(runs)} runs compared" if len(runs) > 1 else "One run"), *before]
    if report.notes:
        blocks.append(("list", [f"**Note** {line}." for line in report.notes]))
    for setting in report.settings:
        blocks += format_setting(report, setting, folder)
    blocks += [("h2", "How to read the verdicts"), ("p", HOW)]
    if report.margin is not None:
        blocks.append(("p", HOW_EQUIVALENT.format(report.margin)))
    rows = [[f"`{run.folder}`{run.trunk}", *tables.summarize_run(run)[1:]] for run in runs]
    blocks += [("h2", "Runs"), ("table", tables.RUN_COLUMNS, rows), ("p", HOW_RUNS)]
    write_page(blocks, folder)
    return blocks


def format_setting(report: Report, setting: Setting, folder: Path) -> list[Block]:
    """The section of a setting: its tables and pictures."""
    comparisons = compare_setting(setting, report.margin)
    blocks: list[Block] = [("h2", setting.label or "Loss"), ("p", tables.describe_setting(setting))]
    if report.experiment:
        missing = f"The paper prints no loss of `{report.experiment}` in this setting."
        blocks.append(("p", HOW_PAPER.format(report.experiment) if setting.printed else missing))

    def add_picture(name: str, figure: Figure | None, caption: str) -> None:
        if figure is not None:
            file = re.sub(r"[^A-Za-z0-9._]+", "-", f"{setting.label}-{name}").strip("-") + ".png"
            save_figure(figure, folder / file)
            blocks.append(("picture", file, caption))

    caption = "Losses: mean and range over seeds, lower is better. Differences: 95% intervals of each point alone."
    add_picture("loss", pictures.plot_loss(setting, report.baseline), caption)
    blocks.append(("table", *tables.build_loss_table(setting)))
    if table := tables.build_difference_table(setting, report.baseline, comparisons):
        blocks.append(("table", *table))
    if comparisons:
        blocks.append(("table", *tables.build_pairs_table(comparisons)))
        if few := [pair.left.runs[-1] for pair in comparisons if pair.difference.seeds < MIN_SEEDS]:
            name = few[0].config.run.name.removesuffix(f"-seed{few[0].seed}")
            blocks.append(("list", [HOW_SEEDS.format(run=few[0], name=name, seed=few[0].seed + 1)]))
    if (table := tables.build_measure_table(setting)).rows:
        blocks.append(("table", *table))
    caption = "On the validation windows, or in training where the title says so: mean and range over seeds."
    add_picture("measures", pictures.plot_measures(setting), caption)
    return blocks
