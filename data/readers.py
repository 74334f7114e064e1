"""Read the raw documents of a file in order: parquet, tables, JSON lines and plain text.

Files are local or on the Hugging Face hub, plain or compressed. Nothing is extracted or copied to
disk. Memory grows with the longest document, up to DOCUMENT_BYTES, and not with the file. The
workers decode and parse the documents, see encode.py.

`datasets` opens the files of the hub. Its own readers do not serve: they change text (line ends,
dates, `NA` and numbers of tables), stop at a lone surrogate, and name no line.
"""

import bz2
import codecs
import csv
import gzip
import io
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from common.text import first_line
from data import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = (".gz", ".zst", ".bz2")
TEXT = (".txt", ".md")  # a file is a document
JSON = (".jsonl", ".json")  # a line is a document
TABLES = {".csv": ",", ".tsv": "\t"}  # a row is a document
PLAIN = (*TEXT, *JSON, *TABLES)
# ends of the names of all files that can be read
KINDS = (*PLAIN, *(kind + end for end in COMPRESSED for kind in PLAIN), ".parquet")
# files that are no text of documents, though their start may be UTF-8
OTHER = (*COMPRESSED, ".tar", ".tgz", ".warc", ".bin")
STRINGS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
# Of a line, a cell, and a compressed text file: a few MB of gzip may hold many GB. A plain text
# file may be longer, since its size is in sight.
DOCUMENT_BYTES = 2**30
READ_BYTES = 2**20  # bytes per read of a stream; not measured
HEAD_BYTES = 2**16  # of a file, by which `is_text` decides; not measured


class Input(NamedTuple):
    """A file to read."""

    url: str  # a local path, or hf://datasets/<repository>@<revision>/<path>
    name: str  # relative to its folder or repository
    size: int  # bytes
    split: str = "documents"  # decides which part is for validation, see encode.py


class Raw(NamedTuple):
    """A document before decoding."""

    where: str  # its file and line or row, for messages
    data: bytes
    is_json: bool  # a JSON object, else text
    done: int  # bytes of the input read so far
    file: Input
    is_checked: bool = False  # its ids are decoded and compared with its text


def read_documents(file: Input, text_field: str) -> Iterator[Raw]:
    """Read the documents of `file`; of parquet and tables the column `text_field`.

    Raises:
        DataError: the file is damaged, cut short or unreachable, or lacks the column.
    """
    try:
        with closing(_open(file.url)) as raw:
            yield from _read(file, raw, text_field)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        # pyarrow raises many kinds of errors for damaged files, the hub's libraries for network
        # failures.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        if "://" in file.url:
            raise DataError(
                f"{file.url}: reading from the hub failed ({reason}). "
                f"The work done is kept: start again to resume"
            ) from error
        if isinstance(error, UnicodeDecodeError):
            remedy = "is not UTF-8: convert it with iconv -f ENCODING -t utf-8"
        elif "requires too much memory" in reason:  # Zstandard's own words
            remedy = f"written by zstd --long ({reason}): write it again without"
        else:
            remedy = f"damaged or cut short ({reason}): fetch it again"
        raise DataError(f"{file.url}: {remedy}") from error


def _open(url: str) -> IO[bytes]:
    if "://" not in url:
        return open(url, "rb")
    from datasets.utils.file_utils import xopen  # opens as `datasets` does, with retries

    if url.lower().endswith(".parquet"):
        return xopen(url, "rb")
    stream = xopen(url, "rb", block_size=0)  # one request for the whole file
    # its own readline has no limit
    return io.BufferedReader(stream, READ_BYTES)  # pyrefly: ignore[bad-specialization]


def _read(file: Input, raw: IO[bytes], text_field: str) -> Iterator[Raw]:
    name = file.name.lower()
    compression = Path(name).suffix
    stream = raw
    if compression in COMPRESSED:
        if not file.size:
            raise EOFError("it is empty")
        stream = _decompress(raw, compression)
        name = name.removesuffix(compression)
    ending = Path(name).suffix
    if ending == ".parquet":
        yield from _read_parquet(file, raw, text_field)
    elif ending in JSON:
        yield from _read_lines(file, raw, stream)
    elif ending in TABLES:
        yield from _read_table(file, raw, stream, TABLES[ending], text_field)
    else:
        yield _read_text(file, stream, is_compressed=stream is not raw)


def _decompress(raw: IO[bytes], compression: str) -> IO[bytes]:
    """Decompress frames in sequence. Raises OSError or EOFError if the last one is cut short."""
    # Not pyarrow for gzip and bz2: it reports zeros after the end, which tapes pad with, as damage.
    if compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), READ_BYTES)  # pyrefly: ignore[bad-argument-type]
    if compression == ".bz2":
        return bz2.BZ2File(raw)  # pyrefly: ignore[bad-return]
    import pyarrow

    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
    return io.BufferedReader(stream, READ_BYTES)


def _read_lines(file: Input, raw: IO[bytes], stream: IO[bytes]) -> Iterator[Raw]:
    lines = iter(lambda: stream.readline(DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        where = f"{file.url}: line {number}"
        _check_length(line, where)
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield Raw(where, line, True, raw.tell(), file)


def _check_length(data: bytes, where: str) -> None:
    if len(data) > DOCUMENT_BYTES:
        raise DataError(
            f"{where}: more than {DOCUMENT_BYTES:,} bytes, too many for one document. Split it "
            "into documents, one to a line of .jsonl, or leave the file out"
        )


def _read_text(file: Input, stream: IO[bytes], is_compressed: bool) -> Raw:
    """The text file, which is one document."""
    parts = iter(lambda: stream.read(READ_BYTES), b"")
    if is_compressed:
        parts = islice(parts, DOCUMENT_BYTES // READ_BYTES + 1)
    data = b"".join(parts)
    if is_compressed:
        _check_length(data, file.url)
    return Raw(file.url, data.removeprefix(BYTE_ORDER_MARK), False, file.size, file)


def _read_table(
    file: Input, raw: IO[bytes], stream: IO[bytes], delimiter: str, text_field: str
) -> Iterator[Raw]:
    csv.field_size_limit(DOCUMENT_BYTES)
    lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
    _check_field(file, list(rows.fieldnames or ()), text_field)
    for row in rows:
        text = row[text_field] or ""
        yield Raw(f"{file.url}: line {rows.line_num}", text.encode(), False, raw.tell(), file)


def _check_field(file: Input, fields: list[str], text_field: str) -> None:
    """Raise DataError unless exactly one of the columns of a file is called `text_field`."""
    if text_field not in fields:
        names = ", ".join(map(repr, fields)) or "none at all"
        raise DataError(
            f"{file.url} has no field {text_field!r}; it has {names}: choose one with "
            "--text-field, or leave the file out"
        )
    if fields.count(text_field) > 1:
        raise DataError(
            f"{file.url} has {fields.count(text_field)} columns called {text_field!r}: "
            f"rename all but one, or choose another --text-field"
        )


def _read_parquet(file: Input, raw: IO[bytes], text_field: str) -> Iterator[Raw]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    # Without pre_buffer and threads, as in `datasets`: buffers would stay in memory. Threads
    # would make Python hang at exit if reading stops early (apache/arrow issue 45214).
    parquet = ParquetFile(raw, pre_buffer=False)
    schema = parquet.schema_arrow
    _check_field(file, schema.names, text_field)
    kind = schema.field(text_field).type
    if pyarrow.types.is_dictionary(kind):  # such as a categorical of pandas
        kind = kind.value_type
    if str(kind) not in STRINGS:
        raise DataError(
            f"{file.url}: field {text_field!r} is of type {kind}, expected string: "
            f"choose another --text-field"
        )
    number = 0
    for batch in parquet.iter_batches(256, columns=[text_field], use_threads=False):
        column = batch.column(0).cast(kind).cast(pyarrow.large_binary())
        for data in column.to_pylist():
            number += 1
            done = file.size * number // parquet.metadata.num_rows
            yield Raw(f"{file.url}: row {number}", data or b"", False, done, file)


def is_text(path: Path) -> bool:
    """Return True if a file is text by its first HEAD_BYTES: UTF-8 without NUL bytes."""
    if path.name.lower().endswith(OTHER):
        return False
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    try:
        # the last character of a longer file may be cut
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head
