"""The report of some runs: which blocks it has, in which order."""

import math
import re
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from common.text import plural
from report import pictures, tables
from report.blocks import Block, Bullets, Heading, Paragraph, Picture, Table, write_page
from report.comparisons import MIN_SEEDS, Comparison, compare_group
from report.groups import Group, group_runs, join_labels
from report.paper import read_paper_losses
from report.runs import read_runs

TEXT = tomllib.loads(Path(__file__).with_name("text.toml").read_text("utf-8"))


@dataclass
class Report:
    """The groups of a report, and the options it was asked for with."""

    groups: list[Group]
    notes: list[str]
    baseline: str = "kern"
    experiment: str | None = None
    margin: float = 0.0


def read_report(args: Namespace) -> Report:
    """Read the runs that the arguments of `python -m scripts.report` name.

    Raises:
        ValueError: they are no runs, or cannot be compared, or an argument does not fit them.
    """
    if not 0 <= args.margin < math.inf:
        raise ValueError(f"--margin {args.margin:g}: expected 0 or more nats")
    runs, left_out = read_runs(args.runs)
    groups, notes = group_runs(runs, args.over)
    if not groups:
        faults = [*left_out, *notes] or ["no run among the folders"]
        remedy = "" if left_out and not runs else "; continue with train.py, or name other runs"
        raise ValueError(faults[-1].removeprefix("left out: ") + remedy)
    names = set()
    for group in groups:
        if args.experiment:
            group.paper_losses = read_paper_losses(args.experiment, group.values)
        for variant in group.variants:
            names |= {variant.router, variant.label}
    if args.baseline != "kern" and args.baseline not in names:
        raise ValueError(f"--baseline {args.baseline!r}: the runs have {'; '.join(sorted(names))}")
    return Report(groups, notes + left_out, args.baseline, args.experiment, args.margin)


def write_report(report: Report, folder: Path, before: Sequence[Block] = ()) -> list[Block]:
    """Write report.md, report.html and their pictures into `folder`.

    Args:
        report: what is written.
        folder: exists.
        before: blocks below the title.

    Returns:
        The blocks with notes, tables and pictures.

    Raises:
        OSError: a file cannot be written.
    """
    blocks: list[Block] = []
    if report.notes:
        blocks.append(Bullets([f"**Note** {line}." for line in report.notes]))
    runs = []
    for group in report.groups:
        blocks += build_section(report, group, folder)
        runs += group.shown_runs
    explanations: list[Block] = []
    if runs:
        explanations += [
            Heading("How to read the verdicts"),
            Paragraph(TEXT["verdicts"].format(min_seeds=MIN_SEEDS)),
        ]
        if report.margin:
            explanations.append(Paragraph(TEXT["equivalent"].format(margin=report.margin)))
        explanations += [
            Heading("Runs"),
            Table(list(tables.RUN_COLUMNS), [tables.summarize_run(run) for run in runs]),
            Paragraph(TEXT["runs"]),
        ]
    write_page(plural(len(runs), "run"), [*before, *blocks, *explanations], folder)
    return blocks


def build_section(report: Report, group: Group, folder: Path) -> list[Block]:
    """The blocks of a group; writes its pictures into `folder`."""
    comparisons = compare_group(group, report.baseline, report.margin)
    blocks: list[Block] = [
        Heading(group.label or "Loss"),
        Paragraph(tables.describe_group(group)),
    ]
    if report.experiment:
        text = TEXT["paper"] if group.paper_losses else TEXT["not_in_paper"]
        blocks.append(Paragraph(text.format(experiment=report.experiment)))
    panels = pictures.list_loss_panels(group, report.baseline)
    panels += pictures.list_difference_panels(group, report.baseline, comparisons)
    blocks += save_pictures(panels, folder, group.label)
    if not group.variants:  # nothing is compared
        return blocks
    if group.key:
        loss_table = tables.build_loss_table(group)
    else:
        loss_table = tables.build_loss_table(group, tables.choose_steps(group))
        tables.add_best_losses(loss_table, group)
    blocks.append(loss_table)
    if comparisons:
        xs = group.xs if group.key else ()
        blocks.append(tables.build_pairs_table(group, comparisons, xs))
        blocks += advise_seeds(comparisons)
    measure_table = tables.build_measure_table(group)
    if measure_table.rows:
        blocks.append(measure_table)
    blocks += save_pictures(
        pictures.list_measure_panels(group, report.baseline), folder, group.label
    )
    return blocks


def save_pictures(panels: Sequence[pictures.Panel], folder: Path, label: str) -> list[Block]:
    """Write panels of a group into `folder`; their blocks."""
    blocks: list[Block] = []
    for panel in panels:
        words = re.findall(r"[A-Za-z0-9._]+", join_labels([label, panel.title]))
        file = "-".join(words) + ".svg"
        # the same bytes for the same data, and text as text
        with matplotlib.rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):
            figure = pictures.draw_figure([panel])
            figure.savefig(folder / file, metadata={"Date": None})
        blocks.append(Picture(file, " ".join(panel.title.split()), panel.sentence))
    return blocks


def advise_seeds(comparisons: Sequence[Comparison]) -> list[Block]:
    """The command that adds a seed, if a pair has too few for a verdict."""
    for pair in comparisons:
        if pair.difference.seeds < MIN_SEEDS:
            run = pair.left.runs[-1]
            name = run.config.run.name.removesuffix(f"-seed{run.seed}")
            advice = TEXT["seeds"].format(
                min_seeds=MIN_SEEDS, run=run, name=name, seed=run.seed + 1
            )
            return [Bullets([advice])]
    return []
