"""From an input file to its raw documents, always in the same order: parquet, JSON lines, plain text, tar archives.

Files may be local or on the Hugging Face hub, plain or compressed; nothing is extracted or copied
to disk, and memory does not grow with the file. Decoding and parsing happen in encode.py, in the
workers.
"""

import bz2
import gzip
import io
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, NamedTuple

from common.text import first_line
from data import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSION = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_STEMS = (".txt", ".md", ".jsonl", ".json", ".tar")
KINDS = (
    *(stem + end for end in ("", ".gz", ".zst", ".bz2") for stem in _STEMS),
    ".tgz",
    ".parquet",
)
TEXT = (".txt", ".md")  # the members of an archive that are documents


class Input(NamedTuple):
    """A file to read."""

    url: str  # a local path, or hf://datasets/<repository>@<revision>/<path>
    name: str  # relative to its folder or repository
    size: int  # bytes
    split: str = "documents"  # how validation is chosen from it, see encode.py


class Raw(NamedTuple):
    """A document before decoding."""

    where: str  # for messages
    data: bytes
    is_json: bool  # one row of JSON, else text
    done: int  # bytes of the input read so far
    file: Input
    is_link: bool = False  # in an archive, without content of its own; or its path leads out of it


def read_documents(file: Input, text_field: str) -> Iterator[Raw]:
    """The documents of `file`; of parquet the column `text_field`.

    Raises:
        DataError: the file is damaged, cut short or unreachable, or has no such column.
    """
    name = file.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(file, text_field)
            return
        end = next((end for end in COMPRESSION if name.endswith(end)), "")
        with closing(_open(file.url)) as raw:
            if end and not file.size:
                raise EOFError("it is empty")
            stream = _decompress(raw, COMPRESSION[end]) if end else raw
            stem = name.removesuffix(end)
            if stem.endswith((".jsonl", ".json")):
                yield from _read_lines(file, raw, stream)
            elif stem.endswith(".tar") or end == ".tgz":
                yield from _read_members(file, raw, stream)
            else:
                yield Raw(
                    file.url, stream.read().removeprefix(BYTE_ORDER_MARK), False, file.size, file
                )
    except (DataError, MemoryError):
        raise
    except Exception as error:
        # pyarrow and tarfile raise many kinds of errors for damaged files, the hub's libraries as
        # many for the network.
        if isinstance(error, OSError) and error.errno:
            raise  # the operating system's own, which name the file
        reason = f"{type(error).__name__}: {first_line(error)}"
        if "://" in file.url:
            raise DataError(
                f"{file.url}: reading from the hub failed ({reason}). The work done is kept: start again to resume"
            ) from error
        raise DataError(f"{file.url}: damaged or cut short ({reason}): fetch it again") from error


def _open(url: str, sequential: bool = True) -> IO[bytes]:
    if "://" not in url:
        return open(url, "rb")
    from datasets.utils.file_utils import xopen  # opens as `datasets` does, with retries

    # 0: one request from beginning to end
    return xopen(url, "rb", block_size=0) if sequential else xopen(url, "rb")


def _decompress(raw: IO[bytes], compression: str) -> IO[bytes]:
    """Decodes any number of frames in sequence; raises OSError or EOFError if the last one is cut short."""
    # pyarrow takes zeros after the end, with which tapes and disk images pad, for damage
    if compression == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 2**20)  # pyrefly: ignore[bad-argument-type]
    if compression == "bz2":
        return bz2.BZ2File(raw)  # pyrefly: ignore[bad-return]
    import pyarrow

    return io.BufferedReader(
        pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), compression), 2**20
    )


def _read_lines(file: Input, raw: IO[bytes], stream: IO[bytes]) -> Iterator[Raw]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield Raw(f"{file.url}: line {number}", line, True, raw.tell(), file)


class _Member(tarfile.TarInfo):
    """A member with an intact header; tarfile takes a broken or missing one for the end of the archive."""

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
            if not member.name.lower().endswith(TEXT):
                continue
            where = f"{file.url}: {member.name}"
            path = Path(member.name)
            if member.islnk() or member.issym() or path.is_absolute() or ".." in path.parts:
                yield Raw(where, b"", False, raw.tell(), file, is_link=True)
            elif member.isreg():
                content = archive.extractfile(member)
                assert content is not None  # a regular file has content
                yield Raw(
                    where, content.read().removeprefix(BYTE_ORDER_MARK), False, raw.tell(), file
                )


def _read_parquet(file: Input, text_field: str) -> Iterator[Raw]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with closing(_open(file.url, sequential=False)) as raw:
        # What pyarrow buffers ahead stays in memory, and its threads make the interpreter hang or
        # abort at exit if the reading stops before the file ends (apache/arrow issue 45214);
        # `datasets` streams parquet the same way.
        parquet = ParquetFile(raw, pre_buffer=False)
        schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
        if text_field not in schema.names:
            fields = ", ".join(map(repr, schema.names))
            raise DataError(
                f"{file.url} has no field {text_field!r}; it has {fields}: choose one with --text-field"
            )
        kind = schema.field(text_field).type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DataError(
                f"{file.url}: field {text_field!r} is of type {kind}, expected string: choose another --text-field"
            )
        number = 0
        for batch in parquet.iter_batches(256, columns=[text_field], use_threads=False):
            column = batch.column(0)
            for data in column.cast(pyarrow.large_binary()).to_pylist():
                number += 1
                yield Raw(
                    f"{file.url}: row {number}",
                    data or b"",
                    False,
                    file.size * number // rows,
                    file,
                )
