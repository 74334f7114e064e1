"""The corpora that `python -m data.prepare` knows: one table, a line each, and the readers behind it.

A reader yields (id, text), one pair a document, always in the same order. Text is None where a document is not UTF-8
and the corpus would rather lose it than stop.
"""

import gzip
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from data import DataError

Documents = Iterator[tuple[str, str | None]]


class Source(NamedTuple):
    description: str
    documents: Callable[..., Documents]  # (paths, text_field) where takes_paths, else ()
    tokenizer: str  # unless told otherwise
    val_fraction: float  # of the documents, unless told otherwise
    takes_paths: bool


# Tests are more than half of the library, and many systems ship Python without them;
# encodings and pydoc_data are generated tables; the rest is other people's code.
STDLIB_SKIPS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


def stdlib_documents() -> Documents:
    """Every module of the running Python's standard library, by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if STDLIB_SKIPS.isdisjoint(relative.parts):
            try:
                yield relative.as_posix(), path.read_bytes().decode()
            except UnicodeDecodeError:
                yield relative.as_posix(), None


TEXT_KINDS = (".txt", ".md", ".jsonl", ".txt.gz", ".md.gz", ".jsonl.gz")


def text_documents(paths: list[Path], text_field: str) -> Documents:
    """Local files, and files below folders in sorted order: a .txt or .md is one document, a .jsonl has one a row.

    Raises DataError: at once, a path that is not there or holds no file of a known kind; while reading, text that is
    not UTF-8 or a broken archive, and rows that are not JSON objects with a string in `text_field`.
    """
    files = [file for path in paths for file in _find_files(path)]
    return (document for file in files for document in _read(file, text_field))


def _find_files(path: Path) -> list[Path]:
    kinds = " ".join(TEXT_KINDS)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(TEXT_KINDS) and file.is_file())
        if not files:
            raise DataError(f"{path}: no file of a known kind ({kinds}) in this folder: name another --source")
        return files
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder: correct --source")
    if not path.name.endswith(TEXT_KINDS):
        raise DataError(f"{path}: not a file of a known kind ({kinds}): rename or convert it")
    return [path]


def _read(path: Path, text_field: str) -> Documents:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            if ".jsonl" not in path.suffixes[-2:]:
                yield str(path), _decode(file.read(), path, 0)
                return
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    text = _row_text(_decode(line, path, offset), f"{path}: line {number}", text_field)
                    yield f"{path}:{number}", text
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: broken gzip file ({error}): fetch it again") from error


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {offset + error.start}: convert it with iconv -t utf-8") from error


def _row_text(line: str, where: str, text_field: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error}): correct or remove it") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a {type(row).__name__}, expected a JSON object with a field {text_field!r}")
    if text_field not in row:
        fields = ", ".join(map(repr, row)) or "none at all"
        raise DataError(f"{where} has no field {text_field!r}; it has {fields}: choose one by --text-field")
    if not isinstance(row[text_field], str):
        kind = type(row[text_field]).__name__
        raise DataError(f"{where}: field {text_field!r} is a {kind}, expected a string: choose another by --text-field")
    return row[text_field]


SOURCES = {
    "stdlib": Source("the source text of Python's standard library", stdlib_documents, "bytes", 0.05, False),
    "text": Source("local .txt .md .jsonl files, also .gz, and folders of them", text_documents, "gpt2", 0.01, True),
}
