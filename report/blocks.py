"""A table of a report, for a page or a terminal."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.text import text_table


class Table(NamedTuple):
    """Rows of text, {column: cell}, with columns in the order of the first row that has them.

    Columns that are empty in all rows are left out. A narrow terminal shows the `important` columns
    first.
    """

    title: str
    rows: Sequence[Mapping]
    important: Sequence[str] = ()

    @property
    def columns(self) -> list[str]:
        names = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in names if any(row.get(name) for row in self.rows)]

    @property
    def lines(self) -> list[list[str]]:
        """The cells of each row, in the order of the columns."""
        columns = self.columns
        return [[row.get(column, "") for column in columns] for row in self.rows]

    def to_text(self, left: int = 1) -> str:
        """Aligned text for a terminal; the first `left` columns are aligned to the left."""
        return text_table(self.columns, self.lines, left, self.important)
