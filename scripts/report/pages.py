"""One page, written twice: as Markdown beside its pictures, and as one HTML file that contains them.

A page is a list of blocks: ("h1" or "h2", text), ("p", text), ("list", [text]), ("table", head, rows) and ("picture",
file name, caption).
Text may use **bold** and `code`; HTML in it, such as in the name of a folder, is escaped.
"""

import base64
import html
import re
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from common.files import write_atomic
from common.text import escape_html, markdown_table

TEMPLATE = Path(__file__).with_name("page.html")  # its policy allows nothing from outside the file
Block = tuple[Any, ...]


def write_page(blocks: list[Block], folder: str | Path, stem: str = "report") -> None:
    """Write `folder`/`stem`.md and `stem`.html; the pictures are in `folder` already. Raises OSError."""
    folder = Path(folder)
    title = next((html.escape(block[1]) for block in blocks if block[0] == "h1"), stem)
    body = "\n".join(_format_html(folder, *block) for block in blocks)
    write_atomic(folder / f"{stem}.md", "\n\n".join(format_markdown(*block) for block in blocks) + "\n")
    write_atomic(folder / f"{stem}.html", Template(TEMPLATE.read_text()).substitute(title=title, body=body))


def format_markdown(kind: str, *parts: Any) -> str:
    """One block as Markdown."""
    if kind == "list":
        return "\n".join(f"- {escape_html(text)}" for text in parts[0])
    if kind == "table":
        return markdown_table(*parts)
    *name, text = parts
    before = f"![{escape_html(text)}]({name[0]})\n\n" if name else {"h1": "# ", "h2": "## "}.get(kind, "")
    return before + escape_html(text)


def _format_html(folder: Path, kind: str, *parts: Any) -> str:
    if kind == "list":
        return f"<ul>{_join('li', parts[0])}</ul>"
    if kind == "table":
        head, rows = parts
        body = "\n".join(f"<tr>{_join('td', row)}</tr>" for row in rows)
        return f"<table><thead><tr>{_join('th', head)}</tr></thead><tbody>\n{body}\n</tbody></table>"
    if kind == "picture":
        name, text = parts
        data = base64.b64encode((folder / name).read_bytes()).decode()
        picture = f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
        return f"<figure>{picture}{_join('figcaption', [text])}</figure>"
    return _join(kind, parts)


def _join(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{_mark(text)}</{tag}>" for text in texts)


def _mark(text: str) -> str:
    """HTML with bold and code; an interval or a deviation stays on one line."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    return re.sub(r"\[[^] ]*, [^] ]*\]|± ", lambda number: number[0].replace(" ", "\u00a0"), text)
