"""Make track/text from the books' sources, and compare each with the repository's.

    git clone https://github.com/mlschmitt/classic-books-markdown CLONE
    git -C CLONE checkout 944882722e9a96fa6cf2739dc2ea757e101f412f
    python -m track.clean CLONE

track/text/SOURCES.tsv names each book's file in the clone and the sha256 of its cleaned text.
"""

import bz2
import csv
import hashlib
import re
from pathlib import Path

from common.command import build_parser, command, run_command

FOLDER = Path(__file__).parent / "text"
TABLE = FOLDER / "SOURCES.tsv"
STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-"}
)


def clean(markdown: str) -> str:
    """Turn a book into plain text: no head, Markdown or curly quotes; a line between paragraphs."""
    text = markdown.replace("\r\n", "\n").removeprefix("\ufeff")
    _, _, text = text.partition("\n-------\n")  # without the head
    text = text.translate(STRAIGHT)
    text = re.sub(r"<[^<>]{1,80}>|!?\[([^]\[]*)\]\([^()]*\)", r"\1", text)  # HTML, links
    text = re.sub(r"(?m)^ {0,3}(#+|>+|[*_-]{3,}\s*$)", "", text)  # headings, quotations, rules
    text = re.sub(r"\\(?=[^\w\s])|[*_]", "", text)  # escapes, emphasis
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def read_books() -> list[dict[str, str]]:
    """Read the rows of SOURCES.tsv: sha256, file, source."""
    with TABLE.open(newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


@command
def main(argv: list[str] | None = None) -> int:
    """Write the texts; the exit status is 1 if one differs."""
    parser = build_parser("track.clean", __doc__)
    parser.add_argument("clone", type=Path, metavar="CLONE", help="folder with the sources")
    clone = parser.parse_args(argv).clone
    differ = 0
    for row in read_books():
        text = clean((clone / row["source"]).read_text(encoding="utf-8")).encode()
        digest = hashlib.sha256(text).hexdigest()
        same = digest == row["sha256"]
        differ += not same
        verdict = "the same" if same else f"differs, sha256 {digest}"
        print(f"{row['file']}: {verdict}", flush=True)
        path = FOLDER / row["file"]
        if not path.exists() or bz2.decompress(path.read_bytes()) != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bz2.compress(text))
    return int(differ > 0)


if __name__ == "__main__":
    run_command(main)
