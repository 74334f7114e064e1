"""Text for people: aligned tables, counts with their nouns, one-line reasons."""

from collections.abc import Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned text with a rule under the head, and without **: `left` columns to the left, the others to the right."""
    lines = [[cell.replace("**", "") for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(
        [aligned[0].rstrip(), "-" * len(aligned[0]), *(line.rstrip() for line in aligned[1:])]
    )


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 file`, `2,000 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(size: float) -> str:
    """A number of bytes as text, such as "1.9 GiB"."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], gap: str = " ") -> str:
    """A Markdown table: the first column to the left, the others to the right.

    HTML in cells is escaped.

    `gap` stands between cells and bars.
    """
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    escaped = [[escape_html(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"|{gap}{f'{gap}|{gap}'.join(line)}{gap}|" for line in escaped)


def escape_html(text: str) -> str:
    """Without HTML, which Markdown would pass on."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
