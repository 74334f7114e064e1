"""A table of a report, for a page or a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.text import text_table


@dataclass
class Table:
    """Rows of text, each {column: cell}. A column that a row lacks is empty in it.

    A narrow terminal shows the `important` columns first.
    """

    columns: list[str]
    rows: list[dict] = field(default_factory=list)
    title: str = "Table"
    important: Sequence[str] = ()

    @property
    def lines(self) -> list[list[str]]:
        """The cells of each row, in the order of the columns."""
        lines = []
        for row in self.rows:
            lines.append([row.get(column, "") for column in self.columns])
        return lines

    def to_text(self, left: int = 1) -> str:
        """Aligned text for a terminal; the first `left` columns are aligned to the left."""
        return text_table(self.columns, self.lines, left, self.important)
