"""The frame of a study's command."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from common.command import command, run_command
from report.blocks import Table
from report.page import Report, read_report


def print_tables(tabulate: Callable[[Sequence[str]], Sequence[Table]]) -> None:
    """Print the tables that `tabulate` makes of the command's arguments, and exit."""

    @command
    def main() -> None:
        for table in tabulate(sys.argv[1:]):
            print(table.to_text() + "\n")

    run_command(main)


def read_with_notes(args: Namespace) -> Report:
    """The report that the arguments name; its notes go to stderr, as a study has only tables."""
    report = read_report(args)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    return report
