"""Text for people: aligned tables, counts with their nouns, one-line reasons."""

import codecs
import shutil
import sys
from collections.abc import Sequence

Cells = Sequence[str]  # a line of a table
Table = tuple[list[str], list[list[str]]]  # head and rows


def text_table(
    head: Cells, rows: Sequence[Cells], left: int = 1, important: Sequence[str] = ()
) -> str:
    """A table as aligned text with a rule under the head; Markdown's ** is removed.

    The first `left` columns are aligned to the left, the others to the right. Control characters
    in cells are escaped. If stdout is a terminal, columns for which it is too narrow are left out
    and named below the table. The `important` ones come first, then the others from the left.
    """
    columns = []
    for column in zip(head, *rows, strict=True):
        cells = [escape_controls(cell.replace("**", "")) for cell in column]
        width = max(len(cell) for cell in cells)
        if len(columns) < left:
            cells = [cell.ljust(width) for cell in cells]
        else:
            cells = [cell.rjust(width) for cell in cells]
        columns.append(cells)
    names = [*important, *head]
    order = sorted(range(len(head)), key=lambda column: names.index(head[column]))
    shown = fit_terminal([len(cells[0]) for cells in columns], order)
    lines = []
    for cells in zip(*columns, strict=True):
        lines.append("  ".join(cells[column] for column in shown))
    lines.insert(1, "-" * len(lines[0]))
    left_out = [name for column, name in enumerate(head) if column not in shown]
    if left_out:
        lines.append(f"no room for {'; '.join(left_out)}: add | cat to see all")
    return "\n".join(line.rstrip() for line in lines)


def fit_terminal(widths: Sequence[int], order: Sequence[int]) -> list[int]:
    """The columns of a table to show: all, unless stdout is a terminal that is too narrow.

    Then a column is shown if there is room for it after those before it in `order`. The first
    always is.
    """
    if not sys.stdout.isatty():
        return sorted(order)
    first, *others = order
    shown = [first]
    room = shutil.get_terminal_size().columns - widths[first]
    for column in others:
        width = widths[column] + 2  # with the space before it
        if width <= room:
            shown.append(column)
            room -= width
    return sorted(shown)


def escape_controls(text: str, keep: str = "") -> str:
    """Escape with backslashes what neither prints, such as newlines, nor is in `keep`.

    So names and logs cannot move a terminal's cursor, and bytes that are not UTF-8 can be printed.
    """
    if text.isprintable():
        return text
    characters = []
    for character in text:
        if not character.isprintable() and character not in keep:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def decode_utf8(data: bytes) -> str:
    """The text of UTF-8 bytes. Raises ValueError with the remedy, and UTF-16 by its name."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = "UTF-16" if is_utf16 else "ENCODING"
        raise ValueError(
            f"is not UTF-8 at byte {error.start}: convert it with iconv -f {encoding} -t UTF-8"
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; its type if the message is empty."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 file`, `2,000 files`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def format_bytes(size: float) -> str:
    """A number of bytes as text, such as "1.9 GiB"."""
    if size >= 2**29:
        return f"{size / 2**30:.1f} GiB"
    if size >= 2**19:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB"


def markdown_table(head: Cells, rows: Sequence[Cells], gap: str = " ") -> str:
    """A Markdown table; HTML and bars in cells are escaped.

    The first column is aligned to the left, the others to the right. `gap` is the space between a
    cell and a bar.
    """
    alignments = ["---"] + ["--:"] * (len(head) - 1)
    bar = f"{gap}|{gap}"
    lines = []
    for line in (head, alignments, *rows):
        cells = [escape_html(cell).replace("|", "\\|") for cell in line]
        joined = bar.join(cells)
        lines.append(f"|{gap}{joined}{gap}|")
    return "\n".join(lines)


def escape_html(text: str) -> str:
    """Escape & and <, so that a Markdown renderer shows the text and does not read it as HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
