"""The report of some runs: which blocks it has, in which order."""

import io
import math
import re
import shlex
import subprocess
import time
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

from common.text import plural
from report import pictures, tables
from report.blocks import Block, Bullets, Heading, Paragraph, Picture, format_page
from report.comparisons import MIN_SEEDS, compare_group
from report.groups import Group, group_runs
from report.overview import build_overview, count_states
from report.paper import build_paper_table, check_experiment
from report.run import Run, join_labels
from report.runs import read_runs
from report.status import format_time

REPO_ROOT = Path(__file__).parents[1]
TEXT = tomllib.loads(Path(__file__).with_name("text.toml").read_text("utf-8"))


@dataclass
class Report:
    """The groups of a report, and the options it was asked for with.

    `sections` has the blocks of groups by their data, so that a live page draws again only what
    was evaluated.
    """

    runs: list[Run]
    groups: list[Group]
    notes: list[str]
    baseline: str = "kern"
    experiment: str | None = None
    margin: float = 0.0
    sections: dict[Any, list[Block]] = field(default_factory=dict)


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
    if args.experiment:
        check_experiment(args.experiment)
    names = set()
    for group in groups:
        for variant in group.variants:
            names |= {variant.router, variant.label}
    if args.baseline != "kern" and args.baseline not in names:
        raise ValueError(f"--baseline {args.baseline!r}: the runs have {'; '.join(sorted(names))}")
    return Report(runs, groups, notes + left_out, args.baseline, args.experiment, args.margin)


def build_report(report: Report) -> list[Block]:
    """The overview, the notes, and the sections of the groups."""
    blocks: list[Block] = [
        Heading("Overview"),
        Paragraph(f"{count_states(report.runs)}."),
    ]
    if report.runs:
        blocks += [build_overview(report.runs, report.baseline), Paragraph(TEXT["overview"])]
    if report.notes:
        blocks += [Heading("Notes"), Bullets([f"{line}." for line in report.notes])]
    sections = {}
    for group in report.groups:
        data = [group.label]
        for run in group.shown_runs:
            data += [run.folder, run.status.state, run.last_evaluated, *run.series("val/loss")]
        key = tuple(data)
        sections[key] = report.sections.get(key) or build_section(report, group)
        blocks += sections[key]
    report.sections.clear()
    report.sections.update(sections)
    return blocks


def format_report(
    report: Report, blocks: Sequence[Block], command: Sequence[str], live: bool = False
) -> bytes:
    """The page of a report's blocks, with how to read the verdicts and where it is from.

    Args:
        report: what the page is of.
        blocks: of `build_report`.
        command: the arguments of python that made the page.
        live: a server has its pictures and its script.
    """
    explanation = [
        Heading("How to read the verdicts"),
        Paragraph(TEXT["verdicts"].format(min_seeds=MIN_SEEDS)),
    ]
    if report.margin:
        explanation.append(Paragraph(TEXT["equivalent"].format(margin=report.margin)))
    title = plural(len(report.runs), "run")
    return format_page(title, [*blocks, *explanation], describe_origin(command), live)


def describe_origin(command: Sequence[str]) -> str:
    """The date, the commit of the code, and the command that makes the page."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPO_ROOT, capture_output=True, text=True
    )
    commit = described.stdout.strip() or "unknown"
    date = format_time(time.time())
    return f"{date}, commit {commit}: `python -m {shlex.join(command)}`"


def build_section(report: Report, group: Group) -> list[Block]:
    """The blocks of a group."""
    comparisons = compare_group(group, report.baseline, report.margin)
    blocks: list[Block] = [
        Heading(group.label or "Loss"),
        Paragraph(tables.describe_group(group)),
    ]
    panels = pictures.list_loss_panels(group, report.baseline, comparisons)
    blocks += draw_pictures(panels, group.label)
    if not group.variants:  # nothing is compared
        return blocks
    blocks.append(tables.build_loss_table(group))
    if report.experiment:
        paper = build_paper_table(report.experiment, group.values)
        text = TEXT["paper"] if paper.rows else TEXT["not_in_paper"]
        blocks += [paper, Paragraph(text.format(experiment=report.experiment))]
    if comparisons:
        xs = group.xs if group.key else ()
        blocks.append(tables.build_pairs_table(group, comparisons, xs))
    measure_table = tables.build_measure_table(group)
    if measure_table.rows:
        blocks.append(measure_table)
    panels = pictures.list_measure_panels(group, report.baseline)
    return blocks + draw_pictures(panels, group.label)


def draw_pictures(panels: Sequence[pictures.Panel], label: str) -> list[Block]:
    """The pictures of a group's panels."""
    blocks: list[Block] = []
    for panel in panels:
        words = re.findall(r"[A-Za-z0-9._]+", join_labels([label, panel.title]))
        output = io.BytesIO()
        # the same bytes for the same data, and text as text
        with matplotlib.rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):
            pictures.draw_figure([panel]).savefig(output, format="svg", metadata={"Date": None})
        svg = output.getvalue()
        title = " ".join(panel.title.split())
        blocks.append(Picture(f"{'-'.join(words)}.svg", title, panel.sentence, svg))
    return blocks
