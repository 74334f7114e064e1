"""The page of a report: page.html, filled in.

Text in a cell may use **bold** and `code`. HTML in it, such as in the name of a folder, is escaped.
The page is one file that needs no other, or a live page, whose pictures and script a server has.
"""

import io
import math
import re
import shlex
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from jinja2 import Template
from markupsafe import Markup, escape

from common.text import plural
from report import pictures, tables
from report.blocks import Picture, Table
from report.comparisons import MIN_SEEDS, compare_group
from report.groups import Group, group_runs
from report.labels import join_labels
from report.overview import build_overview, count_states
from report.paper import build_paper_table, check_experiment
from runtime.runs import Run, format_time, read_runs

TEMPLATE = Path(__file__).with_name("page.html")
LONG = 15  # rows of a table, and notes, that are shown without being unfolded


@dataclass
class Section:
    """What a page says of a group."""

    title: str
    text: str
    loss_pictures: list[Picture]
    tables: list[Table] = field(default_factory=list)
    measure_pictures: list[Picture] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name in the address of a link."""
        return re.sub(r"\W+", "-", self.title).strip("-")

    @property
    def pictures(self) -> list[Picture]:
        return self.loss_pictures + self.measure_pictures


@dataclass
class Report:
    """The groups of a report, and the options it was asked for with."""

    runs: list[Run]
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
    if args.experiment:
        check_experiment(args.experiment)
    names = set()
    for group in groups:
        for variant in group.variants:
            names |= {variant.router, variant.label}
    if args.baseline != "kern" and args.baseline not in names:
        raise ValueError(f"--baseline {args.baseline!r}: the runs have {'; '.join(sorted(names))}")
    return Report(runs, groups, notes + left_out, args.baseline, args.experiment, args.margin)


def build_sections(report: Report, known: Mapping[tuple, Section]) -> dict[tuple, Section]:
    """A section for each group, by its data. Those in `known` are not drawn again."""
    sections = {}
    for group in report.groups:
        data: list = [group.label]
        for run in group.shown_runs:
            data += [run.path, run.status.state, *run.series("val/loss").items()]
        key = tuple(data)
        sections[key] = known.get(key) or build_section(report, group)
    return sections


def build_section(report: Report, group: Group) -> Section:
    """The section of a group."""
    comparisons = compare_group(group, report.baseline, report.margin)
    panels = pictures.list_loss_panels(group, report.baseline, comparisons)
    loss_pictures = draw_pictures(panels, group.label)
    section = Section(group.label or "Loss", tables.describe_group(group), loss_pictures)
    if not group.variants:  # nothing is compared
        return section
    section.tables.append(tables.build_loss_table(group))
    if report.experiment:
        section.tables.append(build_paper_table(report.experiment, group.values))
    xs = group.xs if group.key else ()
    section.tables.append(tables.build_pairs_table(group, comparisons, xs))
    section.tables.append(tables.build_measure_table(group))
    section.tables = [table for table in section.tables if table.rows]
    panels = pictures.list_measure_panels(group, report.baseline)
    section.measure_pictures = draw_pictures(panels, group.label)
    return section


def draw_pictures(panels: Sequence[pictures.Panel], label: str) -> list[Picture]:
    """The pictures of a group's panels."""
    drawn = []
    for panel in panels:
        words = re.findall(r"[A-Za-z0-9._]+", join_labels([label, panel.title]))
        output = io.BytesIO()
        # the same bytes for the same data, and text as text
        with matplotlib.rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):
            pictures.draw_figure([panel]).savefig(output, format="svg", metadata={"Date": None})
        file = f"{'-'.join(words)}.svg"
        drawn.append(Picture(file, panel.title, panel.sentence, output.getvalue()))
    return drawn


def format_page(
    report: Report, sections: Iterable[Section], command: Sequence[str], live: bool = False
) -> bytes:
    """The HTML of a report.

    Args:
        report: what the page is of.
        sections: of its groups.
        command: the arguments of python that made the page.
        live: a server has its pictures and its script.
    """
    template = Template(TEMPLATE.read_text(), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = template.render(
        report=report,
        states=count_states(report.runs),
        overview=build_overview(report.runs, report.baseline),
        sections=sections,
        origin=describe_origin(command),
        live=live,
        long=LONG,
        min_seeds=MIN_SEEDS,
        format_text=format_text,
        plural=plural,
    )
    # a name of a folder may have bytes that are not UTF-8
    return page.encode(errors="backslashreplace")


def format_text(text: str) -> Markup:
    """Text as HTML, with bold and code; lines do not break in an interval or after ±."""
    text = str(escape(text))
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    text = re.sub(r"\[[^] ]*, [^] ]*\]| ± ", lambda match: match[0].replace(" ", "\u00a0"), text)
    return Markup(text)


def describe_origin(command: Sequence[str]) -> str:
    """The date, the commit of the code, and the command that makes the page."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=TEMPLATE.parent,
        capture_output=True,
        text=True,
    )
    commit = described.stdout.strip() or "unknown"
    date = format_time(time.time())
    return f"{date}, commit {commit}: `python -m {shlex.join(command)}`"
