"""The blocks of a page, and a page of blocks as Markdown and as one HTML file.

Text may use **bold** and `code`. HTML in it, such as in the name of a folder, is escaped.
"""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from common.files import write_atomic
from common.text import escape_html, markdown_table, text_table

TEMPLATE = Path(__file__).with_name("page.html")  # its policy allows nothing from outside the file


@dataclass
class Heading:
    """A heading; level 1 is the title of the page."""

    text: str
    level: int = 2


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
    """An SVG file in the folder of the page, and a sentence that says what it shows."""

    file: str
    title: str
    caption: str


@dataclass
class Table:
    """Rows of text, each {column: cell}. A column that a row lacks is empty in it."""

    columns: list[str]
    rows: list[dict[str, str]] = field(default_factory=list)

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
        return text_table(self.columns, self.lines, left)

    def to_markdown(self, gap: str = " ") -> str:
        """A Markdown table with `gap` between cells and bars."""
        return markdown_table(self.columns, self.lines, gap)


Block = Heading | Paragraph | Bullets | Picture | Table


def write_page(title: str, blocks: Sequence[Block], folder: Path) -> None:
    """Write report.md and report.html into `folder`, where the pictures already are.

    Pictures of an earlier report.md there that are not in this one are removed.

    Raises:
        OSError: a file cannot be written.
    """
    page = [Heading(title, level=1), *blocks]
    markdown = "\n\n".join(format_markdown(block) for block in page)
    body = "\n".join(format_html(block, folder) for block in page)
    template = Template(TEMPLATE.read_text())
    page_html = template.substitute(title=html.escape(title), body=body)
    pictures = {block.file for block in blocks if isinstance(block, Picture)}
    for file in list_pictures(folder / "report.md") - pictures:
        (folder / file).unlink(missing_ok=True)
    # a name of a folder may have bytes that are not UTF-8
    write_atomic(folder / "report.md", f"{markdown}\n".encode(errors="backslashreplace"))
    write_atomic(folder / "report.html", page_html.encode(errors="backslashreplace"))


def list_pictures(markdown: Path) -> set[str]:
    """The files of the pictures in a report.md; none if there is no such file."""
    if not markdown.is_file():
        return set()
    return set(
        re.findall(r"^!\[.*\]\(([\w.-]+\.(?:png|svg))\)$", markdown.read_text("utf-8"), re.M)
    )


def format_markdown(block: Block) -> str:
    """A block as Markdown."""
    if isinstance(block, Heading):
        return f"{'#' * block.level} {escape_html(block.text)}"
    if isinstance(block, Paragraph):
        return escape_html(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {escape_html(item)}" for item in block.items)
    if isinstance(block, Picture):
        return f"![{escape_html(block.title)}]({block.file})\n\n{escape_html(block.caption)}"
    return block.to_markdown()


def format_html(block: Block, folder: Path) -> str:
    """A block as HTML; a picture in `folder` is embedded."""
    if isinstance(block, Heading):
        return tag(f"h{block.level}", block.text)
    if isinstance(block, Paragraph):
        return tag("p", block.text)
    if isinstance(block, Bullets):
        return f"<ul>{tag_each('li', block.items)}</ul>"
    if isinstance(block, Picture):
        svg = base64.b64encode((folder / block.file).read_bytes()).decode()
        image = f'<img alt="{html.escape(block.title)}" src="data:image/svg+xml;base64,{svg}">'
        return f"<figure>{image}{tag('figcaption', block.caption)}</figure>"
    head = f"<thead><tr>{tag_each('th', block.columns)}</tr></thead>"
    body = "\n".join(f"<tr>{tag_each('td', line)}</tr>" for line in block.lines)
    return f'<div class="table" tabindex="0"><table>{head}<tbody>\n{body}\n</tbody></table></div>'


def tag_each(name: str, texts: Sequence[str]) -> str:
    """Each text as an HTML element."""
    return "".join(tag(name, text) for text in texts)


def tag(name: str, text: str) -> str:
    """An HTML element of text with bold and code; lines do not break in an interval or after ±."""
    text = html.escape(text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    text = re.sub(r"\[[^] ]*, [^] ]*\]|± ", lambda match: match[0].replace(" ", "\u00a0"), text)
    return f"<{name}>{text}</{name}>"
