"""The blocks of a page, and a page of blocks as Markdown and as HTML.

Text may use **bold** and `code`. HTML in it, such as in the name of a folder, is escaped. The HTML
is one file that needs no other, or a live page, whose pictures and script a server has.
"""

import base64
import html
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from common.files import write_atomic
from common.text import escape_html, markdown_table, plural, text_table

TEMPLATE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
LIVE_POLICY = POLICY.replace("data:", "'self'; script-src 'self'; connect-src 'self'")
LIVE_HEAD = (
    '<script src="live.js" defer></script>'
    '<noscript><meta http-equiv="refresh" content="10"></noscript>'
)
LONG = 15  # rows of a table, and items of a list, that are shown without being unfolded
STATES = ("running", "failed", "unknown")  # cells that have a colour


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

    A page folds a long table below its title, unless it `is_open`.
    """

    columns: list[str]
    rows: list[dict[str, str]] = field(default_factory=list)
    title: str = "Table"
    is_open: bool = False

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


def write_page(title: str, blocks: Sequence[Block], footer: str, folder: Path) -> None:
    """Write report.md, report.html and the pictures into `folder`.

    Pictures of an earlier report.md there that are not in this one are removed.

    Raises:
        OSError: a file cannot be written.
    """
    page = [Heading(title, level=1), *blocks, Paragraph(footer)]
    markdown = "\n\n".join(format_markdown(block) for block in page)
    pictures = {block.file: block.svg for block in blocks if isinstance(block, Picture)}
    for file in list_pictures(folder / "report.md") - pictures.keys():
        (folder / file).unlink(missing_ok=True)
    for file, svg in pictures.items():
        (folder / file).write_bytes(svg)
    # a name of a folder may have bytes that are not UTF-8
    write_atomic(folder / "report.md", f"{markdown}\n".encode(errors="backslashreplace"))
    write_atomic(folder / "report.html", format_page(title, blocks, footer))


def format_page(title: str, blocks: Sequence[Block], footer: str, live: bool = False) -> bytes:
    """The HTML of a page, with links to its headings."""
    links = []
    parts = [tag("h1", title), ""]
    for block in blocks:
        if isinstance(block, Heading):
            name = re.sub(r"\W+", "-", block.text).strip("-")
            links.append(f'<a href="#{name}">{html.escape(block.text)}</a>')
            parts.append(f'</section><section id="{name}">')
        parts.append(format_html(block, live))
    parts[1] = f"<nav>{' · '.join(links)}</nav><section>"
    template = Template(TEMPLATE.read_text())
    page = template.substitute(
        title=html.escape(title),
        policy=LIVE_POLICY if live else POLICY,
        head=LIVE_HEAD if live else "",
        body="\n".join(parts),
        footer=tag("footer", footer),
    )
    return page.encode(errors="backslashreplace")


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


def format_html(block: Block, live: bool) -> str:
    """A block as HTML; a live page has addresses of pictures, others the pictures themselves."""
    if isinstance(block, Heading):
        return tag(f"h{block.level}", block.text)
    if isinstance(block, Paragraph):
        return tag("p", block.text)
    if isinstance(block, Bullets):
        items = f"<ul>{tag_each('li', block.items)}</ul>"
        return fold(plural(len(block.items), "note"), items, len(block.items) > LONG)
    if isinstance(block, Picture):
        source = block.address if live else block.data
        image = f'<img alt="{html.escape(block.title)}" src="{source}">'
        return f"<figure>{image}{tag('figcaption', block.caption)}</figure>"
    head = f"<thead><tr>{tag_each('th', block.columns)}</tr></thead>"
    body = "\n".join(f"<tr>{tag_each('td', line)}</tr>" for line in block.lines)
    table = f"<table>{head}<tbody>\n{body}\n</tbody></table>"
    title = f"{block.title}: {plural(len(block.rows), 'row')}"
    scrolled = f'<div class="table" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    return fold(title, scrolled, len(block.rows) > LONG, block.is_open)


def fold(title: str, content: str, is_long: bool, is_open: bool = False) -> str:
    """Long content below a title that unfolds it, and other content as it is."""
    if not is_long:
        return content
    state = " open" if is_open else ""
    return f"<details{state}><summary>{title}</summary>{content}</details>"


def tag_each(name: str, texts: Sequence[str]) -> str:
    """Each text as an HTML element."""
    return "".join(tag(name, text) for text in texts)


def tag(name: str, text: str) -> str:
    """An HTML element of text with bold and code; lines do not break in an interval or after ±."""
    text = html.escape(text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    text = re.sub(r"\[[^] ]*, [^] ]*\]|± ", lambda match: match[0].replace(" ", "\u00a0"), text)
    state = f' class="{text}"' if text in STATES else ""
    return f"<{name}{state}>{text}</{name}>"
