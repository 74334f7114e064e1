"""The blocks of a page, and a page of blocks as HTML.

Text may use **bold** and `code`. HTML in it, such as in the name of a folder, is escaped. The HTML
is one file that needs no other, or a live page, whose pictures and script a server has.
"""

import base64
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Template
from markupsafe import Markup, escape

from common.text import markdown_table, plural, text_table

TEMPLATE = Path(__file__).with_name("page.html")
LONG = 15  # rows of a table, and items of a list, that are shown without being unfolded


@dataclass
class Heading:
    """A heading; level 1 is the title of the page."""

    text: str
    level: int = 2

    @property
    def name(self) -> str:
        """Its name in the address of a link."""
        return re.sub(r"\W+", "-", self.text).strip("-")


@dataclass
class Paragraph:
    """A paragraph."""

    text: str


@dataclass
class Bullets:
    """A list of short texts."""

    items: list[str]


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


Block = Heading | Paragraph | Bullets | Picture | Table


def format_page(title: str, blocks: Sequence[Block], footer: str, live: bool = False) -> bytes:
    """The HTML of a page, with links to its headings."""
    template = Template(TEMPLATE.read_text(), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = template.render(
        title=title,
        kinds_and_blocks=[(type(block).__name__, block) for block in blocks],
        footer=footer,
        live=live,
        long=LONG,
        format_text=format_text,
        plural=plural,
    )
    return page.encode(errors="backslashreplace")


def format_text(text: str) -> Markup:
    """Text as HTML, with bold and code; lines do not break in an interval or after ±."""
    text = str(escape(text))
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    text = re.sub(r"\[[^] ]*, [^] ]*\]| ± ", lambda match: match[0].replace(" ", "\u00a0"), text)
    return Markup(text)
