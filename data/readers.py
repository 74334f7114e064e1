"""Read the raw documents of a file in order: parquet, JSON lines, plain text, tar archives.

Files are local or on the Hugging Face hub, plain or compressed. Nothing is extracted or copied to
disk. Memory grows with the longest document, up to DOCUMENT_BYTES, and not with the file. The
workers decode and parse the documents, see encode.py.
"""

import bz2
import codecs
import gzip
import io
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, NamedTuple

from common.text import first_line
from data import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSION = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
TEXT = (".txt", ".md")  # files and members of archives that are one document each
JSON = (".jsonl", ".json")  # files with a document in each line
PLAIN = (*TEXT, *JSON, ".tar")
COMPRESSED = tuple(kind + end for end in (".gz", ".zst", ".bz2") for kind in PLAIN)
# Of a line, of a member of an archive, and of a compressed text file: a few MB of gzip may hold
# many GB. A plain text file may be longer, since its size is in sight.
DOCUMENT_BYTES = 2**30
READ_BYTES = 2**20  # bytes per read of a stream; not measured
HEAD_BYTES = 2**16  # of a file or member, by which `is_text` decides; not measured
KINDS = (*PLAIN, *COMPRESSED, ".tgz", ".parquet")  # ends of all file names that can be read


class Input(NamedTuple):
    """A file to read."""

    url: str  # a local path, or hf://datasets/<repository>@<revision>/<path>
    name: str  # relative to its folder or repository
    size: int  # bytes
    split: str = "documents"  # decides which part is for validation, see encode.py
    source: str = ""  # the path on the command line that it was found in
    separator: str = ""  # text between the documents of a text file; empty: it is one document
    any_text: bool = False  # members of an archive are chosen by their content, not by .txt and .md


class Raw(NamedTuple):
    """A document before decoding."""

    where: str  # its file and line, row or member, for messages
    data: bytes
    is_json: bool  # a JSON object, else text
    done: int  # bytes of the input read so far
    file: Input
    is_link: bool = False  # a link in an archive, or a member whose path leads out of it
    left: str = ""  # the ending of a member that is no text, or "hidden"; it has no data


def read_documents(file: Input, text_field: str) -> Iterator[Raw]:
    """Read the documents of `file`; of a parquet file the column `text_field`.

    Raises:
        DataError: the file is damaged, cut short or unreachable, or lacks the column.
    """
    try:
        if file.name.lower().endswith(".parquet"):
            yield from _read_parquet(file, text_field)
        else:
            yield from _read_stream(file)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        # pyarrow and tarfile raise many kinds of errors for damaged files, the hub's libraries for
        # network failures.
        if isinstance(error, OSError) and error.errno:
            if error.filename is not None:
                raise
            raise DataError(
                f"{file.url}: cannot be read ({error.strerror}): copy it from its source again"
            ) from error
        reason = f"{type(error).__name__}: {first_line(error)}"
        if "requires too much memory" in reason:  # Zstandard's own words
            raise DataError(
                f"{file.url}: written with a window above 128 MiB (zstd --long), which cannot be "
                f"read here: write it again with zstd -dc --long=31 FILE | zstd > NEW.zst"
            ) from error
        if "://" in file.url:
            raise DataError(
                f"{file.url}: reading from the hub failed ({reason}). "
                f"The work done is kept: start again to resume"
            ) from error
        raise DataError(f"{file.url}: damaged or cut short ({reason}): fetch it again") from error


def _read_stream(file: Input) -> Iterator[Raw]:
    name = file.name.lower()
    end = Path(name).suffix
    with closing(_open(file.url)) as raw:
        stream = raw
        if end in COMPRESSION:
            if not file.size:
                raise EOFError("it is empty")
            stream = _decompress(raw, COMPRESSION[end])
            name = name.removesuffix(end)
        if name.endswith(JSON):
            yield from _read_lines(file, raw, stream)
        elif name.endswith(".tar") or end == ".tgz":
            yield from _read_members(file, raw, stream)
        else:
            if stream is raw:
                data = stream.read()
            else:
                data = _read_bounded(stream, file.url)
            yield from _split_text(file, file.url, data, file.size)


def _open(url: str, sequential: bool = True) -> IO[bytes]:
    if "://" not in url:
        return open(url, "rb")
    from datasets.utils.file_utils import xopen  # opens as `datasets` does, with retries

    if sequential:
        stream = xopen(url, "rb", block_size=0)  # one request for the whole file
        # its own readline has no limit
        return io.BufferedReader(stream, READ_BYTES)  # pyrefly: ignore[bad-specialization]
    return xopen(url, "rb")


def _decompress(raw: IO[bytes], compression: str) -> IO[bytes]:
    """Decompress frames in sequence. Raises OSError or EOFError if the last one is cut short."""
    # Not pyarrow for gzip and bz2: it reports zeros after the end, which tapes pad with, as damage.
    if compression == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), READ_BYTES)  # pyrefly: ignore[bad-argument-type]
    if compression == "bz2":
        return bz2.BZ2File(raw)  # pyrefly: ignore[bad-return]
    import pyarrow

    return io.BufferedReader(
        pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), compression), READ_BYTES
    )


def _read_bounded(stream: IO[bytes], where: str) -> bytes:
    """All bytes of a stream. Raises DataError if they are more than DOCUMENT_BYTES."""
    parts = []
    size = 0
    while part := stream.read(READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > DOCUMENT_BYTES:
            raise too_long(where)
    return b"".join(parts)


def too_long(where: str) -> DataError:
    """The error of a document that would not fit the memory."""
    return DataError(
        f"{where}: more than {DOCUMENT_BYTES:,} bytes, too many for one document. Split it into "
        "documents, one to a line of .jsonl, or leave the file out"
    )


def _read_lines(file: Input, raw: IO[bytes], stream: IO[bytes]) -> Iterator[Raw]:
    lines = iter(lambda: stream.readline(DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > DOCUMENT_BYTES:
            raise too_long(f"{file.url}: line {number}")
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield Raw(f"{file.url}: line {number}", line, True, raw.tell(), file)


def _split_text(file: Input, where: str, data: bytes, done: int) -> Iterator[Raw]:
    """The documents of a text file or of a member of an archive; without a separator it is one."""
    data = data.removeprefix(BYTE_ORDER_MARK)
    if not file.separator:
        yield Raw(where, data, False, done, file)
        return
    separator = re.escape(file.separator.encode())
    own_line = rb"(?m:^[ \t]*%b[ \t]*(?:\r?\n|\Z))" % separator
    for number, part in enumerate(re.split(own_line + b"|" + separator, data), start=1):
        if part.strip():
            yield Raw(f"{where}: document {number}", part, False, done, file)


def is_text(name: str, head: bytes) -> bool:
    """Return True if a file is text by its first HEAD_BYTES: UTF-8 without NUL bytes.

    Endings of compressed files and of nanoGPT's tokens say that the content is no text.
    """
    if Path(name).suffix.lower() in (*COMPRESSION, ".bin"):
        return False
    try:
        # the last character of a longer file may be cut
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head


class _Member(tarfile.TarInfo):
    """A member with an intact header. tarfile itself ends the archive at a broken header."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Member":  # pyrefly: ignore[bad-override-param-name]
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # pyrefly: ignore[missing-attribute] (the stubs lack it)
            raise  # the regular end
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} before the archive's end") from error


def _read_members(file: Input, raw: IO[bytes], stream: IO[bytes]) -> Iterator[Raw]:
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
        for member in archive:
            archive.members = []  # pyrefly: ignore[missing-attribute] (or it would remember every member)
            path = Path(member.name)
            where = f"{file.url}: {member.name}"
            named = path.name.lower().endswith(TEXT)
            if member.isdir() or not (named or file.any_text):
                continue
            if file.any_text and any(part.startswith(".") and part != ".." for part in path.parts):
                yield Raw(where, b"", False, raw.tell(), file, left="hidden")
            elif member.islnk() or member.issym() or path.is_absolute() or ".." in path.parts:
                yield Raw(where, b"", False, raw.tell(), file, is_link=True)
            elif member.isreg():
                yield from _read_member(file, where, archive, member, raw, named)


def _read_member(
    file: Input,
    where: str,
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    raw: IO[bytes],
    named: bool,
) -> Iterator[Raw]:
    """The documents of a regular member; one that is not `named` as text must have such content."""
    content = archive.extractfile(member)
    assert content is not None  # a regular file has content
    head = content.read(HEAD_BYTES)
    name = member.name.lower()
    if not named and (name.endswith(KINDS) or not is_text(name, head)):
        ending = Path(name).suffix or "without an ending"
        yield Raw(where, b"", False, raw.tell(), file, left=ending)
        return
    if member.size > DOCUMENT_BYTES:
        raise too_long(where)
    yield from _split_text(file, where, head + content.read(), raw.tell())


def _read_parquet(file: Input, text_field: str) -> Iterator[Raw]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with closing(_open(file.url, sequential=False)) as raw:
        # Without pre_buffer and threads, as in `datasets`: buffers would stay in memory. Threads
        # would make Python hang at exit if reading stops early (apache/arrow issue 45214).
        parquet = ParquetFile(raw, pre_buffer=False)
        schema = parquet.schema_arrow
        rows = parquet.metadata.num_rows
        if text_field not in schema.names:
            fields = ", ".join(map(repr, schema.names))
            raise DataError(
                f"{file.url} has no field {text_field!r}; it has {fields}: "
                f"choose one with --text-field"
            )
        if schema.names.count(text_field) > 1:
            raise DataError(
                f"{file.url} has {schema.names.count(text_field)} columns called {text_field!r}: "
                f"rename all but one, or choose another --text-field"
            )
        kind = schema.field(text_field).type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DataError(
                f"{file.url}: field {text_field!r} is of type {kind}, expected string: "
                f"choose another --text-field"
            )
        number = 0
        for batch in parquet.iter_batches(256, columns=[text_field], use_threads=False):
            column = batch.column(0)
            for data in column.cast(pyarrow.large_binary()).to_pylist():
                number += 1
                where = f"{file.url}: row {number}"
                done = file.size * number // rows
                yield Raw(where, data or b"", False, done, file)
