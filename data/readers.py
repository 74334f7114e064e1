"""Read the raw documents of a file in order: parquet, JSON lines and plain text.

Files are local or on the Hugging Face hub, plain or compressed. Nothing is extracted or copied to
disk. Memory grows with the longest document, a line up to DOCUMENT_BYTES, and not with the file.
The workers decode and parse the documents, see encode.py.

`datasets` opens the files of the hub. Its own readers do not serve: they change text (line ends,
dates), stop at a lone surrogate, and name no line.
"""

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

from common.text import first_line
from data import BARE_TOKENS, DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TEXT = (".txt", ".md")  # a file is a document
JSON = (".jsonl", ".json")  # a line is a document
ARCHIVE = "Unpack archives (tar -xf, unzip) and name their folder"
TABLE = (
    "Convert tables to .jsonl, for instance by pandas.read_csv(FILE, dtype=str, "
    "keep_default_na=False).to_json(NEW, orient='records', lines=True)"
)
# files that are no text of documents, though their start may be UTF-8, and what to do about them
OTHER = {
    ".bin": BARE_TOKENS,
    ".csv": TABLE,
    ".tsv": TABLE,
    ".tar": ARCHIVE,
    ".tgz": ARCHIVE,
    ".zip": ARCHIVE,
    ".warc": "Extract the text of WARC's web pages first, for instance by trafilatura",
}
STRINGS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
DOCUMENT_BYTES = 2**30  # of a line: a few MB of gzip may hold many GB
READ_BYTES = 2**20  # bytes per read of a stream; not measured
REQUEST_BYTES = 2**24  # bytes per request to the hub, which limits requests; not measured
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
    """Read the documents of `file`; of parquet the column `text_field`.

    Raises:
        DataError: the file is damaged, cut short or unreachable, or lacks the column.
    """
    try:
        with closing(_open(file.url)) as raw:
            yield from _read(file, raw, text_field)
    except (DataError, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:
        # pyarrow raises many kinds of errors for damaged files, the hub's libraries for network
        # failures.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        if "://" in file.url:
            raise DataError(
                f"{file.url}: reading from the hub failed ({reason}). The work done is kept: start "
                "again to resume. If it fails at the same place, the hub's file is damaged: "
                "download the others (hf download) and name them by --source"
            ) from error
        remedy = f"damaged or cut short ({reason}): fetch it again"
        if "requires too much memory" in reason:  # Zstandard's own words
            remedy = f"written by zstd --long ({reason}): write it again without"
        raise DataError(f"{file.url}: {remedy}") from error


def _open(url: str) -> IO[bytes]:
    if "://" not in url:
        return open(url, "rb")
    from datasets.utils.file_utils import xopen  # opens as `datasets` does, with retries

    if url.lower().endswith(".parquet"):
        return xopen(url, "rb")
    # Not one request for the whole file (block_size=0): where a lost connection cannot be made
    # again at once, huggingface_hub 2.4.0 reports the end of the file.
    stream = xopen(url, "rb", block_size=REQUEST_BYTES)
    # its own readline has no limit
    return io.BufferedReader(stream, READ_BYTES)  # pyrefly: ignore[bad-specialization]


def _read(file: Input, raw: IO[bytes], text_field: str) -> Iterator[Raw]:
    name = Path(file.name.lower())
    stream = raw
    if name.suffix in DECOMPRESS:
        if not file.size:
            raise EOFError("it is empty")
        assert isinstance(raw, io.BufferedReader), "parquet compresses itself"
        if raw.peek(1)[:1] != b"{":  # else plain under a wrong name, as in parts of proof-pile-2
            stream = DECOMPRESS[name.suffix](raw)
        name = name.with_suffix("")
    if name.suffix == ".parquet":
        yield from _read_parquet(file, raw, text_field)
        return
    if name.suffix in JSON:
        yield from _read_lines(file, raw, stream)
    else:
        text = stream.read().removeprefix(BYTE_ORDER_MARK)
        yield Raw(file.url, text, False, file.size, file)
    if "://" in file.url and raw.tell() != file.size:  # a lost connection must not end a corpus
        raise EOFError(f"it ended after {raw.tell():,} of {file.size:,} bytes")


def _decompress_zstd(raw: IO[bytes]) -> IO[bytes]:
    import pyarrow

    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
    return io.BufferedReader(stream, READ_BYTES)


# Functions that decompress frames in sequence, and raise an error if the last one is cut short. Not
# pyarrow for gzip and bz2: it reports zeros after the end, which tapes pad with, as damage.
DECOMPRESS: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _decompress_zstd,
}
# ends of the names of all files that can be read
KINDS = (
    *TEXT,
    *JSON,
    *(kind + end for end in DECOMPRESS for kind in TEXT + JSON),
    ".parquet",
)


def _read_lines(file: Input, raw: IO[bytes], stream: IO[bytes]) -> Iterator[Raw]:
    lines = iter(lambda: stream.readline(DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        where = f"{file.url}: line {number}"
        if len(line) > DOCUMENT_BYTES:
            raise DataError(
                f"{where}: more than {DOCUMENT_BYTES:,} bytes, too many for one document. Split it "
                "into documents, one to a line of .jsonl, or leave the file out"
            )
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield Raw(where, line, True, raw.tell(), file)


def _read_parquet(file: Input, raw: IO[bytes], text_field: str) -> Iterator[Raw]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    # Without pre_buffer and threads, as in `datasets`: buffers would stay in memory. Threads
    # would make Python hang at exit if reading stops early (apache/arrow issue 45214).
    parquet = ParquetFile(raw, pre_buffer=False)
    schema = parquet.schema_arrow
    count = schema.names.count(text_field)
    if count != 1:
        raise DataError(
            f"{file.url} has {count or 'no'} columns called {text_field!r} among "
            f"{', '.join(map(repr, schema.names))}: choose another --text-field, or leave it out"
        )
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
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(head, final=len(head) < HEAD_BYTES)  # a longer file's last character is cut
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head
