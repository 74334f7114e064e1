"""data/: files of every kind as input, good, bad and damaged."""

import gzip
import io
import os
import re
import sys
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import corpora
import pyarrow
import pytest
from corpora import COLUMNS, COMPRESS, write_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data import DataError
from data.bins import check_dataset
from data.encode import Encoder
from data.readers import OTHER, TABLE, Input, read_documents
from data.sources import local_inputs

pytest_plugins = ["corpora"]  # its fixtures
KINDS = [f"a{kind}{end}" for kind in (".jsonl", ".json") for end in COMPRESS]
KINDS += [f"{column}.parquet" for column in COLUMNS]
BOM = b"\xef\xbb\xbf"
DAMAGED = ["a.jsonl.gz", "a.txt.gz", "a.jsonl.zst", "a.txt.bz2", "a.jsonl.xz", "string.parquet"]
TEXTS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))


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
        path = tmp_path / name
        write_file(path, texts)
        assert read(path) == texts
        (file,) = local_inputs([path])[0]
        done = [raw.done for raw in read_documents(file, "text")]
        assert done == sorted(done) and all(0 <= size <= file.size for size in done)
        path.unlink()


@pytest.mark.parametrize("end", COMPRESS)
def test_plain_lines_under_the_name_of_compressed_ones(tmp_path, end):
    path = tmp_path / f"a.jsonl{end}"
    path.write_bytes(ROWS)
    assert read(path) == [f"row {i}" for i in range(30)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_stream_that_ends_too_early(monkeypatch, name):
    """Where neither the text nor the compression shows it: after a line, or a member of gzip."""
    content = gzip.compress(ROWS) if name.endswith("gz") else ROWS
    for size, says in ((len(content), ""), (len(content) + 9, f"after {len(content)} of")):
        stream = io.BufferedReader(io.BytesIO(content))
        monkeypatch.setattr("data.readers._open", lambda url, stream=stream: stream)
        file = Input(f"hf://datasets/a/b@c/{name}", name, size)
        with (
            pytest.raises(DataError, match=f"hub failed .*{says}.*resume")
            if says
            else nullcontext()
        ):
            assert list(read_documents(file, "text"))


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".md"])
def test_a_text_file_is_one_document_and_only_its_byte_order_mark_is_removed(tmp_path, kind, end):
    text = "\r\n# naïve\r\n\n a <|endoftext|> b \x00\u2028 🙂\r"
    path = tmp_path / f"a{kind}{end}"
    path.write_bytes(corpora.in_parts(COMPRESS[end], BOM + text.encode()))
    assert read(path) == [text]


def test_a_folder_is_read_in_order_and_says_what_is_left(run, tmp_path, small_batches):
    """Links are followed; each folder is read once; a file that is named is read."""
    files = {
        "a.txt": b"one<|endoftext|>\nand more<|endoftext|>",
        "b.TXT": b"two",
        "deep/c.md": b"three<|endoftext|>",
        "deep/README.md": b"# Notes on c",
        "d.jsonl": b'{"text": "four<|endoftext|>"}\n',
        "README.md": b"-- What I wrote",
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
        "crawl.WARC.gz": gzip.compress(b"WARC/1.0\r\n"),
        "table.csv": b"id,text\n1,a\n",
        "table.tsv": b"id\ttext\n1\ta\n",
        "LICENSE": b"",
        "s.jsonl": b"",
        "t.txt": b"",
    }
    source = corpora.write_tree(tmp_path / "in", files)
    write_file(source / "string.parquet", [])
    (source / "deep/self").symlink_to(".")
    for number in range(9):
        (source / f"k{number}").symlink_to("deep")
    out = run("text", "--source", source, "--val-fraction", 0.5)
    left = "3 hidden, 3 cards of data sets, 2 .warc, 2 .pdf, 1 without an ending, 1 .tex, 1 .csv, "
    assert f"; left: {left}1 .tsv, 1 .dat. {TABLE}. {OTHER['.warc']}\n" in out
    # over all files and batches, not in rows
    assert "found <|endoftext|> 3 times in text files, each of which is one document" in out
    names = ["NOTES", "README.md", "a.txt", "b.TXT", "d.jsonl", "deep/README.md", "deep/c.md"]
    names += ["deep/i.py", "j.txt.old", "s.jsonl", "string.parquet", "t.txt"]
    assert [file.name for file in local_inputs([source], any_text=True)[0]] == names
    # other corpora have files such as scripts beside their text
    assert [file.name for file in local_inputs([source / "deep"])[0]] == ["README.md", "c.md"]
    named, notes = local_inputs([source / "more/README.md", source / ".f.txt"])
    assert [file.name for file in named] == ["README.md", ".f.txt"] and not notes


def test_paths_that_cannot_be_read(run, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    names = ("in/train.bin", "in/val.bin", "a.tar.gz", "b.warc", "c.csv")
    corpora.write_tree(tmp_path, dict.fromkeys(names, b"id,text"))
    (tmp_path / "empty").mkdir()
    for name, says in {
        "pipe.txt": "pipe.txt: a pipe, socket or device",
        "in/train.bin": "a .bin of nanoGPT or the like: tokens without a meta.json",
        "in": "a .bin of nanoGPT or the like: tokens without a meta.json",
        "a.tar.gz": "a.tar.gz: no file of a known kind.*another --source.*Unpack archives",
        "b.warc": "no file of a known kind.*left: 1 .warc. Extract the text of WARC",
        "c.csv": "no file of a known kind.*Convert tables to .jsonl",
        "empty": "empty: no file of a known kind",
        "absent": "absent: no such file or folder: correct --source",
    }.items():
        assert re.search(says, run("text", "--source", tmp_path / name, code=2))
    with pytest.raises(DataError, match="train.bin: a .bin of nanoGPT .* data.prepare text"):
        check_dataset(tmp_path / "in", 257)
    (tmp_path / "empty/link.txt").symlink_to("nowhere")
    assert "link.txt: No such file" in run("text", "--source", tmp_path / "empty", code=2)


ROWS = corpora.jsonl(f"row {i}" for i in range(30))
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
    b'{"text": "\xe9"}': "is not UTF-8 at byte 10: .*iconv -f ENCODING -t UTF-8",
    '{"text": "a"}'.encode("utf-16"): "is not UTF-8 at byte 0: .*iconv -f UTF-16 -t UTF-8",
}


@pytest.mark.parametrize("line", BAD_DOCUMENTS, ids=range(len(BAD_DOCUMENTS)))
def test_bad_documents(run, tmp_path, small_batches, line):
    """Named by their number in the file, whose empty lines count, or left out and counted."""
    rows = ROWS.splitlines(keepends=True)
    content = b"".join([*rows[:12], b"\n \r\n", line, b"\n\n", *rows])
    (tmp_path / "in.jsonl").write_bytes(content)
    args = ("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.3)
    out = run(*args, code=2)
    assert re.search(f"in.jsonl: line 15 .*{BAD_DOCUMENTS[line]}", out)
    assert "data.prepare --skip-bad leaves it out" in out
    assert not (tmp_path / "out/text").exists()
    out = run(*args, "--skip-bad")
    assert "left out: 0 empty documents, 1 that cannot be read, 0 for training" in out
    texts = [f"row {i}" for i in range(30)]
    wanted = corpora.split_of(texts[:12] + texts, 0.3)
    assert corpora.documents_of(tmp_path / "out/text") == wanted


def test_rows_and_columns_of_parquet(tmp_path, monkeypatch):
    """The bad row of 600, which are read in several batches; and columns that do not serve."""
    file = tmp_path / "in.parquet"
    rows = [b"row %d" % i for i in range(1, 601)]
    rows[520] = b"caf\xe9"
    columns = [
        pyarrow.array(column) for column in (range(600), rows, ["c", None] * 300, rows, rows)
    ]
    table = pyarrow.Table.from_arrays(columns, ["id", "text", "body", "twice", "twice"])
    parquet.write_table(table, file)
    assert read(file, "body") == ["c", ""] * 300
    for field, says in {
        "text": "row 521 is not UTF-8 at byte 3: convert",
        "x": " has no columns called 'x' among 'id', 'text', 'body', 'twice', 'twice': choose",
        "id": "field 'id' is of type int64, expected string: choose another",
        "twice": " has 2 columns called 'twice'",
    }.items():
        with pytest.raises(DataError, match=f"in.parquet:? ?{says}"):
            read(file, field)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="pyarrow"):  # no damage; see `command`
        read(file)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_the_longest_line(tmp_path, monkeypatch, end):
    """100 bytes are read and 101 are not; memory does not grow with a line without end."""
    monkeypatch.setattr("data.readers.DOCUMENT_BYTES", 100)
    path = tmp_path / f"in.jsonl{end}"
    path.write_bytes(COMPRESS[end](b"a" * 99 + b"\n" + b"b" * 2**25))
    documents = read_documents(local_inputs([path])[0][0], "text")
    assert next(documents).data == b"a" * 99 + b"\n"
    tracemalloc.start()
    with pytest.raises(DataError, match="line 2: more than 100 bytes.*Split it"):
        next(documents)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


@given(name=st.sampled_from(DAMAGED), place=st.floats(0, 1, exclude_max=True))
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_files(tmp_path, name, place):
    """Cut anywhere, in its second part, too, or with other bytes where it has a checksum."""
    path = tmp_path / name
    write_file(path, [f"row {i}: {i * 7919 % 1000}" for i in range(300)], parts=1)
    content = path.read_bytes()
    place = int(place * len(content))
    harmed = [content[:place], b"garbage" * 200]
    if not name.endswith("parquet"):
        harmed.append(content + content[: max(1, place)])
    if not name.endswith(("parquet", "zst")):
        harmed.append(content[:place] + b"garbage" + content[place:])
    for data in harmed:
        path.write_bytes(data)
        (file,), _ = local_inputs([path])
        says = rf"{name}: damaged or cut short \(.+\): fetch it again"
        with pytest.raises(DataError, match=says):
            list(read_documents(file, "text"))


def test_a_frame_with_a_large_window(run, tmp_path):
    """Of one raw block with a window of 2^31, as RFC 8878 describes it."""
    block = (1 + (len(ROWS) << 3)).to_bytes(3, "little")
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, (31 - 10) << 3]) + block + ROWS
    (tmp_path / "a.jsonl.zst").write_bytes(frame)
    out = run("text", "--source", tmp_path / "a.jsonl.zst", code=2)
    assert re.search("written by zstd --long .*: write it again without", out)
