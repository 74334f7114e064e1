"""From an input file to its raw documents, always in the same order: parquet, JSON lines, plain texts, tar archives.

Files may lie here or on the Hugging Face hub, plain or compressed; nothing is extracted or copied to disk, and memory
does not grow with the file. Decoding and parsing are left to whoever takes the documents (see encode.py).
"""

import io
import tarfile
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple

from data import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSION = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}
_STEMS = (".txt", ".md", ".jsonl", ".json", ".tar")
KINDS = (*(stem + end for end in ("", ".gz", ".zst") for stem in _STEMS), ".tgz", ".parquet")
TEXT = (".txt", ".md")  # of the members of an archive; the others are no documents


class Input(NamedTuple):
    url: str  # a path here, or hf://datasets/<repository>@<revision>/<path>
    name: str  # below the folder or repository it comes from
    size: int  # bytes


class Raw(NamedTuple):
    where: str  # for messages
    data: bytes
    is_json: bool  # one row of JSON, else text
    done: int  # bytes of the input that are read
    problem: str = ""  # why there is no document here after all


def read(file: Input, text_field: str, skip: int = 0) -> Iterator[Raw]:
    """The documents of `file` after the first `skip`; of parquet those in the column `text_field`.

    Raises DataError naming the file: damaged or cut short, without that column, or out of the hub's reach.
    """
    name = file.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet(file, text_field, skip)
            return
        end = next((end for end in COMPRESSION if name.endswith(end)), "")
        with closing(_open(file.url)) as raw:
            if end and not file.size:
                raise EOFError("it is empty")
            stream = _decompress(raw, COMPRESSION[end]) if end else raw
            stem = name.removesuffix(end)
            if stem.endswith((".jsonl", ".json")):
                documents = _lines(file, raw, stream)
            elif stem.endswith(".tar") or end == ".tgz":
                documents = _members(file, raw, stream)
            else:
                documents = iter([Raw(file.url, stream.read().removeprefix(BYTE_ORDER_MARK), False, file.size)])
            yield from islice(documents, skip, None)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        # pyarrow and tarfile raise many kinds of errors for damaged files, the hub's libraries as many for the network.
        if isinstance(error, OSError) and error.errno:
            raise  # the operating system's own, which name the file
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if "://" in file.url:
            raise DataError(
                f"{file.url}: reading from the hub failed ({reason}). What is prepared is kept: start again to go on"
            ) from error
        raise DataError(f"{file.url}: damaged or cut short ({reason}): fetch it again") from error


def _open(url: str, sequential: bool = True) -> BinaryIO:
    if "://" not in url:
        return open(url, "rb")
    from datasets.utils.file_utils import xopen  # opens as `datasets` does, and tries again when the network fails

    return xopen(url, "rb", block_size=0) if sequential else xopen(url, "rb")  # 0: one request from beginning to end


def _decompress(raw: BinaryIO, compression: str) -> BinaryIO:
    """Any number of frames, one after another; raises OSError where the last one is cut short."""
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), compression), 2**20)


def _lines(file: Input, raw: BinaryIO, stream: BinaryIO) -> Iterator[Raw]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield Raw(f"{file.url}: line {number}", line, True, raw.tell())


class _Member(tarfile.TarInfo):
    """A member whose header is whole; tarfile takes a broken or missing one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise  # the end as it should be
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} before the archive's end") from error


def _members(file: Input, raw: BinaryIO, stream: BinaryIO) -> Iterator[Raw]:
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
        for member in archive:
            archive.members = []  # it would remember each
            where, path = f"{file.url}: {member.name}", PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                yield Raw(where, b"", False, raw.tell(), "has a name that leads out of the archive")
            elif member.isreg() and path.name.lower().endswith(TEXT):
                data = archive.extractfile(member).read().removeprefix(BYTE_ORDER_MARK)
                yield Raw(where, data, False, raw.tell())


def _parquet(file: Input, text_field: str, skip: int) -> Iterator[Raw]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with closing(_open(file.url, sequential=False)) as raw:
        # What pyarrow buffers ahead stays in memory, and its threads make the interpreter hang or abort at its end if
        # one stops before the file does (apache/arrow issue 45214); so it is when `datasets` streams parquet.
        parquet = ParquetFile(raw, pre_buffer=False)
        schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
        if text_field not in schema.names:
            fields = ", ".join(map(repr, schema.names))
            raise DataError(f"{file.url} has no field {text_field!r}; it has {fields}: choose one by --text-field")
        kind = schema.field(text_field).type
        if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise DataError(
                f"{file.url}: field {text_field!r} is of type {kind}, expected string: choose another by --text-field"
            )
        number = 0
        for group in range(parquet.num_row_groups):
            if number + parquet.metadata.row_group(group).num_rows <= skip:
                number += parquet.metadata.row_group(group).num_rows
                continue
            for batch in parquet.iter_batches(256, row_groups=[group], columns=[text_field], use_threads=False):
                for data in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    number += 1
                    if number > skip:
                        yield Raw(f"{file.url}: row {number}", data or b"", False, file.size * number // rows)
