"""data/: files of every kind as input, good, bad and damaged."""

import bz2
import csv
import gzip
import io
import json
import os
import re
import tempfile
import tracemalloc
from pathlib import Path

import corpora
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data import DataError
from data.bins import check_dataset, read_meta
from data.encode import Encoder
from data.readers import read_documents
from data.sources import local_inputs

pytest_plugins = ["corpora"]  # its fixtures
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": corpora.zstd, ".bz2": bz2.compress}
COLUMNS = {
    "string": lambda texts: pyarrow.array(texts, pyarrow.string()),
    "large": lambda texts: pyarrow.array(texts, pyarrow.large_string()),
    "dictionary": lambda texts: pyarrow.array(texts, pyarrow.string()).dictionary_encode(),
    "binary": lambda texts: pyarrow.array([text.encode() for text in texts], pyarrow.binary()),
    "view": lambda texts: pyarrow.array(texts, pyarrow.string_view()),
}
KINDS = [kind + end for kind in (".jsonl", ".json", ".csv", ".tsv") for end in COMPRESS]
KINDS += [f"{column}.parquet" for column in COLUMNS]
BOM = b"\xef\xbb\xbf"
TEXTS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))


def write_file(path: Path, texts: list[str]) -> None:
    """Write `texts` in the way that the file's ending says."""
    kind, _, end = path.name.partition(".")[2].partition(".")
    if path.suffix == ".parquet":
        parquet.write_table(
            pyarrow.table({"id": range(len(texts)), "text": COLUMNS[path.stem](texts)}),
            path,
            row_group_size=7,
        )
        return
    if kind in ("csv", "tsv"):
        stream = io.StringIO()
        rows = csv.writer(stream, delimiter={"csv": ",", "tsv": "\t"}[kind])
        rows.writerows([["id", "text", "label"], *([i, text, 1] for i, text in enumerate(texts))])
        data = stream.getvalue().encode()
    else:
        data = corpora.jsonl(texts)
    compress = COMPRESS[f".{end}" if end else ""]
    data = BOM + data
    path.write_bytes(corpora.in_parts(compress, data) if end else data)


def read(path: Path, field: str = "text") -> list[str]:
    (file,) = local_inputs([path], any_text=True)[0]
    encoder = Encoder(corpora.BYTES, 0.5)._replace(text_field=field)
    return [encoder.try_text(raw) for raw in read_documents(file, field)]


@given(texts=TEXTS)
@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_its_texts_back(tmp_path, kind, texts):
    for name in (kind, kind.upper()):
        path = tmp_path / (name if "parquet" in kind else f"a{name}")
        write_file(tmp_path / (kind if "parquet" in kind else f"a{kind}"), texts)
        if name != kind:
            (tmp_path / (kind if "parquet" in kind else f"a{kind}")).rename(path)
        assert read(path) == texts
        (file,) = local_inputs([path])[0]
        done = [raw.done for raw in read_documents(file, "text")]
        assert done == sorted(done) and all(0 <= size <= file.size for size in done)
        path.unlink()


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".md"])
def test_a_text_file_is_one_document_and_only_its_byte_order_mark_is_removed(tmp_path, kind, end):
    text = "\r\n# naïve\r\n\n a <|endoftext|> b \x00\u2028 🙂\r"
    stored = BOM + text.encode()
    path = tmp_path / f"a{kind}{end}"
    path.write_bytes(corpora.in_parts(COMPRESS[end], stored) if end else stored)
    assert read(path) == [text]


def test_a_folder_is_read_in_order_and_says_what_is_left(run, tmp_path):
    """Links are followed; each folder is read once; a file that is named is read."""
    files = {
        "a.txt": b"one",
        "b.TXT": b"two",
        "deep/c.md": b"three",
        "deep/README.md": b"# Notes on c",
        "d.jsonl": b'{"text": "four"}\n',
        "README.md": b"The rows of this set",
        "more/README.md": b"---\nlicense: mit\nconfigs: []\n---\n# A data set",
        "one-more/README.md": BOM + b"---\r\nlicense: mit\r\n---\r\n",
        "more/dataset_infos.json": b"{}",
        ".git/objects/e.txt": b"hidden",
        ".f.txt": b"hidden",
        "deep/.ipynb_checkpoints/c-checkpoint.md": b"hidden",
        "g.pdf": b"%PDF\xff",
        "deep/h.PDF": b"%PDF\xff",
        "deep/i.py": b"print('five')\n",
        "NOTES": "Sechs: ä".encode(),
        "latin.tex": "Sieben: ä".encode("latin-1"),
        "zeros.dat": b"eight\0",
        "j.txt.old": ("n" + "ä" * 40_000).encode(),
        "crawl.warc": b"WARC/1.0\r\n",
        "LICENSE": b"",
    }
    source = corpora.write_tree(tmp_path / "in", files)
    (source / "deep/self").symlink_to(".")
    for number in range(9):
        (source / f"k{number}").symlink_to("deep")
    out = run("text", "--source", source, "--val-fraction", 0.5)
    left = out.partition("; left: ")[2].splitlines()[0]
    counts = {"3 hidden", "4 cards of data sets", "2 .pdf", "1 without an ending"}
    assert set(left.split(", ")) == counts | {"1 .tex", "1 .dat", "1 .warc"}
    names = ["NOTES", "a.txt", "b.TXT", "d.jsonl"]
    below = ["README.md", "c.md", "i.py"]
    wanted = [*names, *(f"deep/{name}" for name in below), "j.txt.old"]
    assert [file.name for file in local_inputs([source], any_text=True)[0]] == wanted
    # other corpora have files such as scripts beside their text
    assert [file.name for file in local_inputs([source / "deep"])[0]] == below[:2]
    named, _ = local_inputs([source / "README.md", source / ".f.txt"])
    assert [file.name for file in named] == ["README.md", ".f.txt"]


def test_paths_that_cannot_be_read(run, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    files = {"in/train.bin": b"\1\0", "in/val.bin": b"\1\0", "a.tar": b"\0", "b.warc": b"WARC/1.0"}
    corpora.write_tree(tmp_path, files)
    (tmp_path / "empty").mkdir()
    for name, says in {
        "pipe.txt": "pipe.txt: a pipe, socket or device.* --source",
        "in/train.bin": "a .bin of nanoGPT or the like: tokens without a meta.json",
        "in": "a .bin of nanoGPT or the like: tokens without a meta.json",
        "a.tar": "no file of a known kind.*unpack an archive",
        "b.warc": "no file of a known kind.*unpack an archive",
        "empty": "empty: no file of a known kind",
        "absent": "absent: no such file or folder: correct --source",
    }.items():
        assert re.search(says, run("text", "--source", tmp_path / name, code=2))
    with pytest.raises(DataError, match="train.bin: a .bin of nanoGPT .* data.prepare text"):
        check_dataset(tmp_path / "in", 257)
    (tmp_path / "empty/link.txt").symlink_to("nowhere")
    assert "link.txt: no such file" in run("text", "--source", tmp_path / "empty", code=2)


ROWS = corpora.jsonl(f"row {i}" for i in range(30))
LINE = ROWS[: len(ROWS) // 2].count(b"\n") + 1
CSV = b"id,text\n" + b"".join(b"%d,row %d\n" % (i, i) for i in range(LINE - 2))
BAD_DOCUMENTS = {  # a line of JSON lines, or another file: what is said of it
    b'{"text"': r"is not JSON \(Expecting.*correct or remove it",
    b'\xef\xbb\xbf{"text": "a"}': r"is not JSON \(Unexpected UTF-8 BOM",
    b"[" * 10**5: "",
    b'{"text": ' + b"1" * 10**4 + b"}": "",
    b'["a"]': "is not a JSON object",
    b'{"body": 1, "id": 3}': "has no field 'text'; it has 'body', 'id': choose one",
    b"{}": "has no field 'text'; it has none at all: choose one with --text-field",
    b'{"text": 3.5}': "has no text in field 'text' but 3.5: choose another --text-field",
    b'{"text": ["a", "b"]}': r"has no text in field 'text' but \['a', 'b'\]",
    b'{"text": true}': "has no text in field 'text' but True",
    b'{"text": "\xe9"}': "is not UTF-8 at byte 10: .*iconv",
}


@pytest.mark.parametrize("line", BAD_DOCUMENTS, ids=range(len(BAD_DOCUMENTS)))
def test_bad_documents(run, tmp_path, small_batches, line):
    """Named by their number in the file, whose empty lines count, or left out and counted."""
    before, after = ROWS.splitlines(keepends=True)[: LINE - 3], ROWS
    (tmp_path / "in.jsonl").write_bytes(b"".join(before) + b"\n \r\n" + line + b"\n\n" + after)
    args = ("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.3)
    out = run(*args, code=2)
    assert re.search(f"in.jsonl: line {LINE} .*{BAD_DOCUMENTS[line]}", out)
    assert "leave such documents out with --skip-bad" in out
    assert not (tmp_path / "out/text").exists()
    out = run(*args, "--skip-bad")
    assert "left out: 0 empty documents, 1 that cannot be read" in out
    meta = check_dataset(tmp_path / "out/text", 257)
    assert (meta.source["bad"], meta.source["empty"]) == (1, 0)
    texts = [json.loads(row)["text"] for row in ROWS.splitlines()]
    wanted = corpora.split_of(texts[: LINE - 3] + texts, 0.3)
    assert corpora.documents_of(tmp_path / "out/text") == wanted


def test_a_bad_row_is_named_by_its_number(tmp_path):
    """Of 600, which are read in several batches."""
    rows = [b"row %d" % i for i in range(1, 601)]
    rows[520] = b"caf\xe9"
    parquet.write_table(pyarrow.table({"text": pyarrow.array(rows)}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match="in.parquet: row 521 is not UTF-8 at byte 3: convert"):
        read(tmp_path / "in.parquet")


def test_columns(tmp_path):
    """Of parquet and of tables: the field is named, and one that is not there is an error."""
    table = pyarrow.table({"id": [1, 2], "text": ["a", "b"], "body": ["c", None]})
    parquet.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "in.csv").write_bytes(b'id,text,body\n1,a,c\n2,"b\n, ""x""",\n')
    for name in ("in.parquet", "in.csv"):
        assert read(tmp_path / name, "body") == ["c", ""]
        says = f"{name} has no field 'content'; it has 'id', 'text', 'body': choose one"
        with pytest.raises(DataError, match=says):
            read(tmp_path / name, "content")
    assert read(tmp_path / "in.csv") == ["a", 'b\n, "x"']
    with pytest.raises(DataError, match="'id' is of type int64, expected string: choose another"):
        read(tmp_path / "in.parquet", "id")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text"] * 2)
    parquet.write_table(twice, tmp_path / "in.parquet")
    (tmp_path / "in.csv").write_bytes(b"text,text\na,b\n")
    for name in ("in.parquet", "in.csv"):
        with pytest.raises(DataError, match=f"{name} has 2 columns called 'text': rename all"):
            read(tmp_path / name)


def test_marks_between_documents_are_counted(run, tmp_path, small_batches):
    """Over all files and batches, not in rows."""
    body = b"Once upon a time.<|endoftext|>\nThe second.\n<|endoftext|>\n"
    rows = corpora.jsonl(f"<|endoftext|> {i}" for i in range(30))
    source = corpora.write_tree(tmp_path / "in", {"a.txt": body, "b.txt": body, "c.jsonl": rows})
    out = run("text", "--source", source, "--val-fraction", 0.3)
    assert "found <|endoftext|> 4 times in text files, each of which is one document" in out


@pytest.mark.parametrize("size", [99, 100, 101])
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.txt.gz", "in.txt"])
def test_the_longest_document(tmp_path, monkeypatch, name, size):
    """100 bytes are read and 101 are not, except of a plain text file."""
    monkeypatch.setattr("data.readers.DOCUMENT_BYTES", 100)
    monkeypatch.setattr("data.readers.READ_BYTES", 7)
    data = bytes(65 + i % 26 for i in range(size - 1)) + b"\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (file,) = local_inputs([tmp_path / name])[0]
    if size > 100 and name != "in.txt":
        with pytest.raises(DataError, match="more than 100 bytes"):
            list(read_documents(file, "text"))
    else:
        (raw,) = read_documents(file, "text")
        assert raw.data == data


BOMB = b"a" * 2**25


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("in.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": "' + BOMB), "line 2"),
        ("in.jsonl.zst", corpora.zstd(BOMB), "line 1"),
        ("in.txt.bz2", bz2.compress(BOMB), "in.txt.bz2"),
    ],
)
def test_memory_does_not_grow_with_a_line_without_end(tmp_path, monkeypatch, name, content, where):
    monkeypatch.setattr("data.readers.DOCUMENT_BYTES", 2**20)
    (tmp_path / name).write_bytes(content)
    (file,) = local_inputs([tmp_path / name])[0]
    tracemalloc.start()
    with pytest.raises(DataError, match=f"{where}: more than 1,048,576 bytes.*Split it"):
        list(read_documents(file, "text"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def garbled(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(b ^ 0xA5 for b in data[at : at + 64]) + data[at + 64 :]


def damaged_files() -> dict[str, tuple[str, bytes]]:
    rows = [f"row {i}: {i * 7919 % 1000}" for i in range(300)]
    jsonl = corpora.jsonl(rows)
    intact = {
        "in.jsonl.gz": gzip.compress(jsonl),
        "in.txt.gz": gzip.compress(jsonl),
        "in.jsonl.zst": corpora.zstd(jsonl),
        "in.txt.bz2": bz2.compress(jsonl),
    }
    with tempfile.TemporaryDirectory() as folder:
        corpora.parquet(Path(folder, "a.parquet"), rows)
        intact["in.parquet"] = Path(folder, "a.parquet").read_bytes()
    cases = {}
    for name, data in intact.items():
        cases[f"{name} is garbage"] = name, b"garbage" * 200
        cases[f"{name} is empty"] = name, b""
        cases[f"{name} is cut in the middle"] = name, data[: len(data) // 2 + 100]
        if name.endswith("gz"):  # Zstandard's frames need not have a check sum
            cases[f"{name} has garbage in the middle"] = name, garbled(data, len(data) // 2)
            cases[f"{name} has garbage after its end"] = name, data + b"garbage"
        if name != "in.parquet":
            cases[f"{name} lacks its last byte"] = name, data[:-1]
            cases[f"{name} has its second part cut"] = name, data + data[: len(data) // 2]
    cases["in.parquet has garbage in a page"] = "in.parquet", garbled(intact["in.parquet"], 100)
    cases["a quote is not closed"] = "in.csv", b'text\n"a\n'
    return cases


DAMAGED = damaged_files()


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(run, tmp_path, case):
    """A damaged file is never taken for an intact one, nor with --skip-bad."""
    name, data = DAMAGED[case]
    corpora.write_tree(tmp_path / "in", {"a.jsonl": ROWS, name: data})
    args = ("text", "--source", tmp_path / "in", "--val-fraction", 0.3, "--skip-bad")
    out = run(*args, code=2)
    assert re.search(rf"in/{name}: damaged or cut short \(.+\): fetch it again", out)
    assert "Traceback" not in out and not (tmp_path / "out/text").exists()


def test_other_faults_of_files_are_named(run, tmp_path):
    # a frame of one raw block with a window of 2^31, as RFC 8878 describes it
    block = (1 + (len(ROWS) << 3)).to_bytes(3, "little")
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, (31 - 10) << 3]) + block + ROWS
    for name, data, says in (
        ("a.jsonl.zst", frame, "written by zstd --long .*: write it again without"),
        ("a.csv", b"text\ncaf\xe9\n", "a.csv: is not UTF-8: convert it with iconv"),
    ):
        (tmp_path / name).write_bytes(data)
        assert re.search(says, run("text", "--source", tmp_path / name, code=2))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_files_without_documents_beside_others_are_accepted(run, tmp_path, name):
    """A writer that filters may leave a parquet file without rows."""
    source = corpora.write_tree(tmp_path / "in", {name: b"", "b.jsonl": ROWS})
    if name == "a.parquet":
        corpora.parquet(source / name, [])
    run("text", "--source", source, "--val-fraction", 0.3)
    meta = read_meta(tmp_path / "out/text")
    assert sum(split.documents for split in meta.splits.values()) == 30
