"""Corpora, small ones of every kind of file, and `data.prepare` run on them: helpers and fixtures
for tests.
"""

import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data import prepare, workers
from data.bins import open_tokens, read_meta
from data.tokenizer import ByteTokenizer, open_tokenizer
from data.writer import Writer

BYTES = ByteTokenizer()


def jsonl(texts, **more) -> bytes:
    return b"".join(
        json.dumps({"id": i, "text": text} | more).encode() + b"\n" for i, text in enumerate(texts)
    )


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


def in_parts(compress, data: bytes, parts: int = 3) -> bytes:
    """Frames, or members, one after another, each begun in the middle of a line."""
    size = len(data) // parts + 1
    return b"".join(compress(data[i : i + size]) for i in range(0, len(data), size))


COMPRESS = {".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESS |= {"": bytes}
COLUMNS = {  # of parquet
    "string": pyarrow.string(),
    "large": pyarrow.large_string(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    "binary": pyarrow.binary(),
    "view": pyarrow.string_view(),
}


def write_file(path: Path, texts: list[str], parts: int = 3) -> None:
    """Texts as the rows of a file of the kind that its name says, which may be upper case."""
    name = path.name.lower()
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        column = pyarrow.array(texts, COLUMNS[path.stem.lower()])
        table = pyarrow.table({"id": range(len(texts)), "text": column})
        return parquet.write_table(table, path, row_group_size=7)
    compress = COMPRESS.get(Path(name).suffix, bytes)
    path.write_bytes(in_parts(compress, b"\xef\xbb\xbf" + jsonl(texts), parts))


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_ids(
    folder: Path, train, val=(), shard_tokens: int = 2**27, name="set", tokenizer=BYTES
) -> Path:
    with Writer(folder, tokenizer, shard_tokens) as writer:
        for split, ids in {"train": train, "val": val}.items():
            ids = np.asarray(ids, np.uint16)
            writer.write(split, ids, max(1, int((ids == tokenizer.eot).sum())))
        writer.finish(name, {"inputs": str(folder)}, f"python -m data.prepare text --name {name}")
    return folder


def corpus_texts(n: int = 40) -> list[str]:
    """Different texts of one to 200 lines, some blank, not all in ASCII."""
    rng = random.Random(0)
    texts = []
    for i in range(n):
        lines = rng.choice((1, 3, 200))
        texts.append("\n".join(f"{i}: naïve 🙂 {rng.random()}" for _ in range(lines)))
    texts[3] = ""
    texts[n // 2] = " \n"
    return texts


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """What the command prints; its exit code must be `code`.

    Sets are below tmp_path/out. The tokenizer is bytes by default, the name the corpus'. A few
    documents are split as many are, and shards have 999 tokens.
    """
    monkeypatch.setattr("data.encode.FEW_DOCUMENTS", 1)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 999)

    def run(*args, code=0, main=prepare.main) -> str:
        defaults = ["--out", str(tmp_path / "out")]
        if main is prepare.main:
            defaults += ["--tokenizer", "bytes"]
            if "text" in args[:1]:
                defaults += ["--name", "text"]
        ended = main([*defaults, *map(str, args)])
        printed = capsys.readouterr()
        assert ended == code and ("error: " in printed.err) == (code == 2), printed
        return printed.out + printed.err

    return run


@pytest.fixture
def small_batches(monkeypatch):
    """Of a document or a few; progress is recorded after each."""
    monkeypatch.setattr(workers, "BATCH_BYTES", 50)
    monkeypatch.setattr(prepare, "SAVE_BYTES", 1)


@pytest.fixture
def many_workers(monkeypatch):
    monkeypatch.setattr(prepare, "WORKER_BYTES", 500)


def documents_of(folder: Path) -> dict[str, list[str]]:
    """What the set in `folder` decodes to."""
    documents, tokenizer = {}, open_tokenizer(folder)
    for split in ("train", "val"):
        tokens = open_tokens(folder, split)
        ids = tokens.read(0, len(tokens))
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)
        assert not len(parts[-1])  # every document has its end
        documents[split] = [tokenizer.decode(part[:-1]) for part in parts[:-1]]
        assert len(documents[split]) == read_meta(folder).splits[split].documents
    return documents


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def place(text: str) -> float:
    """What prepare's split is documented to be: the hash of the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def split_of(texts, val_fraction) -> dict[str, list[str]]:
    parts = {"train": [], "val": []}
    for text in filter(str.strip, texts):
        parts["val" if place(text) < val_fraction else "train"].append(text)
    return parts


@pytest.fixture
def books(tmp_path) -> tuple:
    """The arguments that prepare 30 short texts in two files, of which one line is bad."""
    files = {
        "a.jsonl": jsonl(corpus_texts()[:20]) + b"not JSON\n",
        "b.jsonl": jsonl([f"{i} green bottles" for i in range(10)]),
    }
    named = "text", "--source", write_tree(tmp_path / "in", files), "--name", "text"
    return *named, "--val-fraction", 0.3, "--skip-bad"


@contextmanager
def interrupted_at(count: int):
    """A Ctrl-C at the batch of this number, if there are so many."""
    batches, encode = itertools.count(1), workers._encode

    def encode_or_stop(documents):
        if next(batches) == count:
            raise KeyboardInterrupt
        return encode(documents)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_encode", encode_or_stop)
        yield


@pytest.fixture
def stop_at(run):
    """A function: run the command, interrupted at the batch of this number; what it prints."""

    def stop_at(count: int, *args) -> str:
        with interrupted_at(count):
            return run(*args, code=130)

    return stop_at
