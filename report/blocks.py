"""Tables and pictures, the blocks of a page."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.text import markdown_table, text_table


@dataclass
class Picture:
    """An SVG file, and a sentence that says what it shows."""

    file: str
    title: str
    caption: str
    svg: bytes

    @property
    def address(self) -> str:
        """Where a live page finds it: another one for other contents."""
        return f"{self.file}?{zlib.crc32(self.svg):x}"

    @property
    def data(self) -> str:
        """The picture itself, as an address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


@dataclass
class Table:
    """Rows of text, each {column: cell}. A column that a row lacks is empty in it.

    A page folds a long table below its title, unless it `is_open`. A narrow terminal shows the
    `important` columns first.
    """

    columns: list[str]
    rows: list[dict[str, str]] = field(default_factory=list)
    title: str = "Table"
    is_open: bool = False
    important: Sequence[str] = ()

    @property
    def lines(self) -> list[list[str]]:
        """The cells of each row, in the order of the columns."""
        lines = []
        for row in self.rows:
            lines.append([row.get(column, "") for column in self.columns])
        return lines

    def drop_empty(self, candidates: Sequence[str]) -> None:
        """Remove the columns among `candidates` that are empty in every row."""
        for column in candidates:
            if not any(row.get(column) for row in self.rows):
                self.columns.remove(column)

    def to_text(self, left: int = 1) -> str:
        """Aligned text for a terminal; the first `left` columns are aligned to the left."""
        return text_table(self.columns, self.lines, left, self.important)

    def to_markdown(self, gap: str = " ") -> str:
        """A Markdown table with `gap` between cells and bars."""
        return markdown_table(self.columns, self.lines, gap)
