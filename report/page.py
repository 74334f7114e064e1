"""The page of a report: page.html, filled in. It is one file that needs no other."""

import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Template

from report import tables
from report.blocks import Table
from report.compare import UNDECIDED
from report.frame import MIN_SEEDS, Comparison, Group, compare_group, group_runs
from report.overview import build_overview, count_states
from report.paper import build_paper_table, check_experiment
from report.plots import Picture, draw_group
from runtime.runs import Run, format_time, read_runs

TEMPLATE = Path(__file__).with_name("page.html")


class Section(NamedTuple):
    """What a page says of a group."""

    title: str
    text: str
    pictures: list[Picture]
    tables: list[Table]


class Report(NamedTuple):
    """The runs of a report, and the groups of them that can be compared."""

    runs: list[Run]
    groups: list[Group]
    notes: list[str]


def read_report(args: Namespace) -> Report:
    """Read the runs that the arguments of `python -m scripts.report` name.

    Raises:
        ValueError: they are no runs, or cannot be compared, or an argument does not fit them.
    """
    runs, left_out = read_runs(args.runs)
    groups, notes = group_runs(runs, args.over)
    if not groups:
        faults = [*left_out, *notes] or ["no run among the folders"]
        remedy = "" if left_out and not runs else "; continue with train.py, or name other runs"
        raise ValueError(faults[-1].removeprefix("left out: ") + remedy)
    if args.experiment:
        check_experiment(args.experiment)
    names = {name for group in groups for v in group.runs for name in (v, group.router(v))}
    if args.baseline != "kern" and args.baseline not in names:
        raise ValueError(f"--baseline {args.baseline!r}: the runs have {'; '.join(sorted(names))}")
    return Report(runs, groups, notes + left_out)


def build_section(group: Group, args: Namespace) -> Section:
    """The section of a group."""
    pairs = compare_group(group, args.baseline, args.margin)
    pictures = draw_group(group, args.baseline, describe_verdicts(pairs, group, args.baseline))
    shown = []
    if group.runs:
        shown = [tables.build_pairs_table(group, pairs), tables.build_loss_table(group)]
        if args.experiment:
            shown.append(build_paper_table(args.experiment, group.values))
        shown.append(tables.build_measure_table(group))
    shown = [table for table in shown if table.rows]
    return Section(group.label or "Loss", tables.describe_group(group), pictures, shown)


def describe_verdicts(pairs: Sequence[Comparison], group: Group, baseline: str) -> str:
    """The variants whose loss is decided to differ from the baseline's, and how many are not."""
    if not group.runs:
        return "These runs are not compared yet."
    with_baseline = [p for p in pairs if baseline in (p.right, group.router(p.right))]
    with_baseline.sort(key=lambda pair: pair.difference.mean)
    decided = [f"{p.left} {p.verdict}" for p in with_baseline if UNDECIDED not in p.verdict]
    n_undecided = len(with_baseline) - len(decided)
    return f"Against {baseline}: {'; '.join([*decided, f'{n_undecided} undecided'])}."


def format_page(
    report: Report, sections: Sequence[Section], args: Namespace, command: Sequence[str]
) -> bytes:
    """The HTML of a report; `command` has the arguments of python that made it."""
    template = Template(TEMPLATE.read_text(), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = template.render(
        report=report,
        states=count_states(report.runs),
        overview=build_overview(report.runs),
        sections=sections,
        args=args,
        origin=f"{format_time(time.time())}: python -m {shlex.join(command)}",
        min_seeds=MIN_SEEDS,
        spread=tables.SPREAD,
    )
    # a name of a folder may have bytes that are not UTF-8
    return page.encode(errors="backslashreplace")
