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
from report.frame import (
    MIN_SEEDS,
    Comparison,
    Group,
    choose_baseline,
    compare_group,
    group_runs,
)
from report.overview import build_overview, count_states
from report.paper import build_paper_table, check_experiment
from report.plots import Picture, draw_group
from runtime import RunError
from runtime.runs import Run, format_time, read_runs

TEMPLATE = Path(__file__).with_name("page.html")


class Section(NamedTuple):
    """What a page says of a group."""

    title: str
    text: str
    pictures: list[Picture]
    tables: list[Table]
    verdicts: list[dict]


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
    found, left_out = read_runs(args.runs)
    runs = []
    for run in found:
        try:
            run.loads  # noqa: B018  # read now, to leave out the run whose file is damaged
            runs.append(run)
        except RunError as error:
            left_out.append(f"left out: {error}")
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
    baseline = choose_baseline(group, args.baseline)
    pairs = compare_group(group, baseline, args.margin)
    families = {"": pairs}
    text = describe_verdicts(pairs, group, f"Against {baseline}")
    if group.key:
        best = compare_group(group, baseline, at_best=True)
        families = {"at best: ": best, "mean: ": pairs}
        at_best = describe_verdicts(best, group, f"Each at its best {group.key} against {baseline}")
        mean = describe_verdicts(pairs, group, f"Mean over {group.key} against {baseline}")
        text = f"{at_best} {mean}"
    pictures = draw_group(group, baseline, text)
    shown = []
    verdicts = []
    if group.runs:
        verdicts = tables.list_verdicts(group, families)
        shown = [tables.build_loss_table(group), tables.build_measure_table(group)]
        if args.experiment:
            shown.insert(1, build_paper_table(args.experiment, group.values))
    shown = [table for table in shown if table.rows]
    title = group.label or "Loss"
    return Section(title, tables.describe_group(group), pictures, shown, verdicts)


def describe_verdicts(pairs: Sequence[Comparison], group: Group, what: str) -> str:
    """The variants whose loss is decided to differ from the baseline's, and how many are not.

    `what` says what is compared with it.
    """
    if not group.runs:
        return "These runs are not compared yet."
    ordered = sorted(pairs, key=lambda pair: pair.difference.mean)
    decided = [f"{pair.left} {pair.verdict}" for pair in ordered if UNDECIDED not in pair.verdict]
    n_undecided = len(pairs) - len(decided)
    return f"{what}: {'; '.join([*decided, f'{n_undecided} undecided'])}."


def build_verdicts(sections: Sequence[Section]) -> Table:
    """The table of all settings."""
    return Table("Verdicts", [row for section in sections for row in section.verdicts])


def format_page(
    report: Report, sections: Sequence[Section], args: Namespace, command: Sequence[str]
) -> bytes:
    """The HTML of a report; `command` has the arguments of python that made it."""
    template = Template(TEMPLATE.read_text(), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = template.render(
        report=report,
        states=count_states(report.runs),
        overview=build_overview(report.runs),
        verdicts=build_verdicts(sections),
        sections=sections,
        args=args,
        origin=f"{format_time(time.time())}: python -m {shlex.join(command)}",
        min_seeds=MIN_SEEDS,
        spread=tables.SPREAD,
    )
    # a name of a folder may have bytes that are not UTF-8
    return page.encode(errors="backslashreplace")
