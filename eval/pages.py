"""One page, written twice: as Markdown beside its pictures, and as one HTML file that holds them.

A page is a list of blocks: ("h1" or "h2", words), ("p", words), ("list", [words]), ("table", head, rows) and
("picture", name, words). Of Markdown's marks inside words **bold** and `code` alone are known to HTML. What else words
hold, such as the name of a folder, is shown as it is, and makes no HTML in either.
"""

import base64
import html
import re
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
table { font-size: .87rem; line-height: 1.3; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ccc; text-align: right; vertical-align: baseline; }
th:first-child, td:first-child { text-align: left; min-width: 9rem; }
thead th { border-bottom: 2px solid #111; }
figure { margin: 1.5rem 0; } img { max-width: 100%; } figcaption { color: #444; }
code { background: #eee; padding: 0 .2rem; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing from outside, whatever a name holds


def write(blocks, folder, stem="report"):
    """`folder`/report.md and report.html; the pictures lie in `folder` already."""
    folder = Path(folder)
    (folder / f"{stem}.md").write_text("\n\n".join(markdown(*block) for block in blocks) + "\n", encoding="utf-8")
    title = next((html.escape(block[1]) for block in blocks if block[0] == "h1"), stem)
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    body = "\n".join(as_html(folder, *block) for block in blocks)
    page = f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{title}</title><style>{STYLE}</style></head>\n'
    (folder / f"{stem}.html").write_text(f"{page}<body>\n{body}\n</body>\n</html>\n", encoding="utf-8")


def markdown(kind, *parts):
    if kind in ("h1", "h2"):
        return "#" * int(kind[1]) + f" {harmless(parts[0])}"
    if kind == "p":
        return harmless(parts[0])
    if kind == "list":
        return "\n".join(f"- {harmless(words)}" for words in parts[0])
    if kind == "table":
        head, rows = parts
        rows = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
        return "\n".join("| " + " | ".join(harmless(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
    name, words = parts
    return f"![{harmless(words)}]({name})\n\n{harmless(words)}"


def harmless(words):
    """Without HTML, which Markdown would pass on."""
    return words.replace("&", "&amp;").replace("<", "&lt;")


def as_html(folder, kind, *parts):
    if kind in ("h1", "h2"):
        return f"<{kind}>{marked(parts[0])}</{kind}>"
    if kind == "p":
        return f"<p>{marked(parts[0])}</p>"
    if kind == "list":
        return "<ul>" + "".join(f"<li>{marked(words)}</li>" for words in parts[0]) + "</ul>"
    if kind == "table":
        head, rows = parts
        lines = ["".join(f"<td>{unbroken(marked(cell))}</td>" for cell in row) for row in rows]
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        titles = "".join(f"<th>{marked(cell)}</th>" for cell in head)
        return f"<table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table>"
    name, words = parts
    data = base64.b64encode((folder / name).read_bytes()).decode()
    picture = f'<img alt="{html.escape(words)}" src="data:image/png;base64,{data}">'
    return f"<figure>{picture}<figcaption>{marked(words)}</figcaption></figure>"


def marked(words):
    words = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(words))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", words)


def unbroken(cell):
    """Intervals and deviations stay on one line each, where cells are narrow."""
    return re.sub(r"^\S+ \[[^]]*\]$|\[[^]]*\]|± |\(paper: ", lambda found: found[0].replace(" ", "\u00a0"), cell)
