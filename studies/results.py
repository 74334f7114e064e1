"""Rewrite the tables and pictures of docs/results.md and docs/results-tables.md.

    python -m studies.results              writes them from studies/records
    python -m studies.results --check      writes nothing; fails if a table differs

Below a line `python -m MODULE …`, MODULE being scripts.report or one of studies/, a page has the
command's tables, its picture, or both. The tables of a report are: losses as means over seeds;
other measures, without --over, of at most six variants; with three seeds, the verdicts on pairs
with the baseline, one family. A picture is the report's first.
"""

import lzma
import re
import shlex
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from common.command import build_parser, command, run_command
from common.files import check_regular, write_atomic
from common.text import first_line
from report import tables
from report.__main__ import make_report_parser
from report.blocks import Table
from report.comparisons import MIN_SEEDS, find_pairs, judge_pairs
from report.groups import Group
from report.page import Report, read_report
from report.pictures import draw_figure, list_loss_panels
from studies import balancing, best, best_rates, effects, growth, product

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = Path(__file__).with_name("records")
PAGES = ("results.md", "results-tables.md")
COMMAND = re.compile(
    r"^(?P<line>`python -m (?P<module>scripts\.report|studies\.\w+) (?P<arguments>[^`]+)`\n)"
    r"(?P<tables>(?:\n*\|.*\n)*)(?P<image>\n!\[[^]]*\]\((?P<picture>.+)\)\n)?",
    re.MULTILINE,
)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages and pictures, or compare the pages."""
    parser = build_parser("studies.results", __doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a table differs"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for archive in sorted(RECORDS.glob("*.tar.xz")):
            extract_runs(archive, Path(folder))
        fill = partial(fill_command, folder=Path(folder), draw=not args.check)
        for page in PAGES:
            before = (DOCS / page).read_text()
            text = COMMAND.sub(fill, before)
            if args.check and text != before:
                raise ValueError(
                    f"docs/{page} differs from studies/records: run without --check, then git diff"
                )
            if not args.check:
                write_atomic(DOCS / page, text)
                print(f"wrote docs/{page}")


def extract_runs(archive: Path, folder: Path) -> None:
    """Extract runs/NAME, without their weights, into a folder.

    Raises:
        ValueError: the archive is damaged.
    """
    check_regular(archive)
    try:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        reason = first_line(error)
        raise ValueError(f"{archive}: cannot be read ({reason}); take it from git again") from None


def fill_command(match: re.Match, folder: Path, draw: bool) -> str:
    """A command of a page with its tables, from the runs below `folder`.

    A command with a picture alone stays as it is; `draw` writes the picture.
    """
    module = match["module"]
    argv = expand_arguments(match["arguments"], folder)
    if draw and match["picture"]:
        PLOT[module](argv).savefig(DOCS / match["picture"])
    if match["picture"] and not match["tables"]:
        return match[0]
    text = "\n\n".join(table.to_markdown(gap="") for table in TABULATE[module](argv))
    return f"{match['line']}\n{text.replace(' ± ', '±')}\n{match['image'] or ''}"


def expand_arguments(arguments: str, folder: Path) -> list[str]:
    """The arguments of a command, with runs/PATTERN replaced by the runs below `folder`.

    Raises:
        ValueError: a pattern fits no run.
    """
    argv = []
    for argument in shlex.split(arguments):
        if not argument.startswith("runs/"):
            argv.append(argument)
            continue
        runs = sorted(str(run) for run in folder.glob(argument))
        if not runs:
            raise ValueError(f"{argument}: studies/records has no such run")
        argv += runs
    return argv


def parse_report(argv: Sequence[str]) -> Report:
    """The report that the arguments of scripts.report name."""
    return read_report(make_report_parser("scripts.report", None).parse_args(argv))


def plot_report(argv: Sequence[str]) -> Figure:
    """The losses of a report's first group."""
    report = parse_report(argv)
    return draw_figure(list_loss_panels(report.groups[0], report.baseline), columns=2)


def tabulate_report(argv: Sequence[str]) -> list[Table]:
    """Losses, measures and verdicts of each group of a report."""
    report = parse_report(argv)
    report_tables = []
    for group in report.groups:
        report_tables += tabulate_means(group)
        pairs = []
        for left, right in find_pairs(group, report.baseline):
            if report.baseline in (right.router, right.label):
                pairs.append((left, right))
        comparisons = judge_pairs(group, pairs, report.margin)
        if any(comparison.difference.seeds >= MIN_SEEDS for comparison in comparisons):
            xs = group.xs if group.key else ()
            report_tables.append(tables.build_pairs_table(group, comparisons, xs))
    return report_tables


def tabulate_means(group: Group) -> list[Table]:
    """Losses and, without a key, other measures of a group, without deviations."""
    losses = tables.build_loss_table(group)
    if group.label:
        rename_first_column(losses, group.label)
    means = [losses]
    if group.key is None and len(group.variants) <= 6:
        means.append(tables.build_measure_table(group))
    for table in means:
        for row in table.rows:
            for column, cell in row.items():
                row[column] = cell.split(" ±")[0]
    return means


def rename_first_column(table: Table, name: str) -> None:
    """Give the first column of a table another name."""
    old = table.columns[0]
    table.columns[0] = name
    for row in table.rows:
        row[name] = row.pop(old)


TABULATE: dict[str, Callable[[Sequence[str]], list[Table]]] = {
    "scripts.report": tabulate_report,
    "studies.balancing": balancing.tabulate,
    "studies.best": best.tabulate,
    "studies.best_rates": best_rates.tabulate,
    "studies.effects": effects.tabulate,
    "studies.growth": growth.tabulate,
}
PLOT: dict[str, Callable[[Sequence[str]], Figure]] = {
    "scripts.report": plot_report,
    "studies.balancing": balancing.plot,
    "studies.best_rates": best_rates.plot,
    "studies.product": product.plot,
}


if __name__ == "__main__":
    run_command(main)
