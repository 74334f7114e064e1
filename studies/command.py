"""The frame of a study's command."""

import sys
from collections.abc import Callable, Sequence

from common.command import command, run_command
from report.blocks import Table


def print_tables(tabulate: Callable[[Sequence[str]], Sequence[Table]]) -> None:
    """Print the tables that `tabulate` makes of the command's arguments, and exit."""

    @command
    def main() -> None:
        for table in tabulate(sys.argv[1:]):
            print(table.to_text() + "\n")

    run_command(main)
