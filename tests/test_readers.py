"""data/: files of every kind as input, good, bad and damaged."""

import bz2
import gzip
import io
import json
import os
import re
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import corpora
import pytest

from data import DataError
from data.bins import check_dataset, open_tokens, read_meta
from data.encode import Encoder, find_separators
from data.readers import Input, read_documents
from data.sources import local_inputs

pytest_plugins = ["corpora"]  # its fixtures


def make(folder: Path, name: str, texts: list[str]) -> tuple[str, list[Path]]:
    """A file, or folder, `name` of `texts`; returns the builder of `datasets` and the files that it
    should read.
    """
    path, plain = folder / name, folder / "plain"
    rows = corpora.jsonl(texts)
    members = {f"{i:03d}.{'txt' if i % 2 else 'md'}": text.encode() for i, text in enumerate(texts)}
    if ".parquet" in name:
        nulls = [text or None for text in texts]
        corpora.parquet(path, nulls, "large_string" if "large" in name else "string")
        return "parquet", [path]
    if ".json" in name:
        compress = {".gz": gzip.compress, ".zst": corpora.zstd}.get(path.suffix)
        path.write_bytes(corpora.in_parts(compress, rows) if compress else rows)
        corpora.write_tree(plain, {"rows.jsonl": rows})
        return "json", [plain / "rows.jsonl" if name.endswith(".zst") else path]
    corpora.write_tree(plain, members)
    if name == "folder":  # "deep" comes after all digits
        nested = {
            f"{'deep/er/' if i // 10 == 2 else ''}{member}": members[member]
            for i, member in enumerate(members)
        }
        corpora.write_tree(path, nested | {"notes.pdf": b"\xff", "zip.zip": b"\xff"})
        return "text", [path / member for member in sorted(nested)]
    archive = corpora.tar({"notes.pdf": b"\xff"} | members | {"last/": b""})
    if name.endswith(("gz", "zst")):
        archive = corpora.in_parts(corpora.zstd if name.endswith("zst") else gzip.compress, archive)
    path.write_bytes(archive)
    return "text", [plain / member for member in members]


@pytest.mark.parametrize(
    "name",
    [
        "rows.parquet",
        "large.parquet",
        "rows.jsonl",
        "rows.json",
        "rows.jsonl.gz",
        "ROWS.jsonl.zst",
        "rows.json.gz",
    ]
    + ["folder", "texts.tar", "texts.tar.gz", "texts.tgz", "texts.tar.zst"],
)
def test_every_kind_of_file_reads_as_datasets_reads_it(tmp_path, name):
    import datasets  # slow

    texts = corpora.corpus_texts()
    builder, paths = make(tmp_path, name, texts)
    inputs = local_inputs([tmp_path / name])
    raws = [raw for file in inputs for raw in read_documents(file, "text")]
    texts_read = [Encoder(corpora.BYTES, 0.5).text(raw) for raw in raws]
    more = {"sample_by": "document"} if builder == "text" else {}
    rows = datasets.load_dataset(
        builder, data_files=list(map(str, paths)), split="train", streaming=True, **more
    )
    assert texts_read == [row["text"] or "" for row in rows]
    if name == "folder":
        assert sorted(texts_read) == sorted(texts)
    else:
        done = [raw.done for raw in raws]
        assert texts_read == texts
        assert (
            done == sorted(done)
            and 0 <= done[0]
            and done[-1] <= inputs[0].size
            and done[-1] > inputs[0].size / 2
        )


@pytest.mark.parametrize(
    "name", ["rows.parquet", "rows.jsonl.gz", "texts.tar", "texts.tgz", "texts.tar.zst"]
)
def test_an_ending_in_capitals_is_the_same_ending(tmp_path, name):
    texts = [text for text in corpora.corpus_texts() if text][:5]
    make(tmp_path, name, texts)
    (tmp_path / name).rename(tmp_path / name.upper())
    (file,) = local_inputs([tmp_path / name.upper()])
    encoder = Encoder(corpora.BYTES, 0.5)
    assert [encoder.text(raw) for raw in read_documents(file, "text")] == texts


def test_what_is_left_out_is_counted_over_all_batches(run, tmp_path, small_batches):
    members = {}
    for i in range(20):
        members[f"{i}.txt"] = b"text %d </s>\n</s>\n" % i
        members[f"{i}-empty.txt"] = b" \n"
        members[f"{i}-bad.txt"] = b"\xe9"
        members[f"../{i}.txt"] = b"a path out"
        members[f"{i}.png"] = b"\0"
    corpora.write_tree(tmp_path, {"in.tar": corpora.tar(members)})
    out = run("text", "--source", tmp_path / "in.tar", "--val-fraction", 0.5, "--skip-bad")
    assert "left out: 20 empty documents, 20 that cannot be read, 20 links or paths out" in out
    assert "left out of archives, no text: 20 .png\n" in out
    assert "found </s> 20 times" in out
    source = check_dataset(tmp_path / "out/text", 257).source
    assert (source["empty"], source["bad"], source["links"]) == (20, 20, 20)


@pytest.mark.parametrize(
    "end", [".txt", ".md", ".txt.gz", ".md.gz", ".txt.zst", ".md.zst", ".txt.bz2"]
)
def test_a_text_file_is_one_document_and_only_its_byte_order_mark_is_removed(tmp_path, end):
    data = "\r\n# naïve\r\n\n a <|endoftext|> b \x00\u2028 🙂\n".encode()
    compress = {".gz": gzip.compress, ".zst": corpora.zstd, ".bz2": bz2.compress}.get(
        Path("a" + end).suffix, bytes
    )
    stored = b"\xef\xbb\xbf" + data
    (tmp_path / f"a{end}").write_bytes(
        corpora.in_parts(compress, stored) if compress is not bytes else stored
    )
    assert [raw.data for raw in read_documents(local_inputs([tmp_path])[0], "text")] == [data]


def test_text_field_bom_blank_lines_and_crlf(run, tmp_path):
    texts = ["one", "two", "three", "four"]
    rows = b"".join(json.dumps({"text": "no", "body": text}).encode() + b"\n" for text in texts)
    lines = (
        b"\xef\xbb\xbf" + rows.replace(b"\n", b"\r\n\r\n \n") + b'{"body": "no end of line\\r\\n"}'
    )
    corpora.write_tree(tmp_path / "in", {"a.jsonl": lines})
    corpora.parquet(tmp_path / "in/b.parquet", ["no"] * 4, body=[text.upper() for text in texts])
    out = run("text", "--source", tmp_path / "in", "--val-fraction", 0.5, "--text-field", "body")
    wanted = corpora.split_of([*texts, "no end of line\r\n", *map(str.upper, texts)], 0.5)
    assert corpora.documents_of(tmp_path / "out/text") == wanted and "left out" not in out


ROWS = corpora.jsonl(f"row {i}" for i in range(30))


def bad_line(line: bytes) -> dict[str, bytes]:
    return {"in.jsonl": ROWS[: len(ROWS) // 2].rpartition(b"\n")[0] + b"\n" + line + b"\n" + ROWS}


LINE = ROWS[: len(ROWS) // 2].count(b"\n") + 1
TAR = corpora.tar({"m.txt": b"\xe9"})
BAD_DOCUMENTS = {
    "not JSON": (
        bad_line(b'{"text"'),
        rf"in.jsonl: line {LINE} is not JSON \(Expecting.*correct or remove it",
    ),
    "a byte order mark within": (
        bad_line(b'\xef\xbb\xbf{"text": "a"}'),
        rf"in.jsonl: line {LINE} is not JSON \(Unexpected UTF-8 BOM",
    ),
    "deep JSON": (bad_line(b"[" * 10**5), rf"in.jsonl: line {LINE} is not JSON"),
    "huge number": (bad_line(b'{"text": ' + b"1" * 10**4 + b"}"), rf"in.jsonl: line {LINE} "),
    "an array": (bad_line(b'["a"]'), rf"line {LINE} is not a JSON object"),
    "no such field": (
        bad_line(b'{"body": 1, "id": 3}'),
        rf"line {LINE} has no text in .*'text'; it has 'body', 'id'",
    ),
    "no field at all": (
        bad_line(b"{}"),
        f"line {LINE} has no text in field 'text'; it has none at all: choose one with",
    ),
    "number": (bad_line(b'{"text": 3}'), rf"line {LINE} has no text in field 'text'.*--text-field"),
    "latin1 in JSON": (
        bad_line(b'{"text": "\xe9"}'),
        rf"in.jsonl: line {LINE} is not UTF-8 at byte 10: .*iconv",
    ),
    "latin1 in tar": ({"in/a.jsonl": ROWS, "in/b.tar": TAR}, "b.tar: m.txt is not UTF-8 at byte 0"),
}


@pytest.mark.parametrize("case", BAD_DOCUMENTS)
def test_bad_documents(run, tmp_path, case):
    files, message = BAD_DOCUMENTS[case]
    source = corpora.write_tree(tmp_path, files) / next(iter(files)).partition("/")[0]
    out = run("text", "--source", source, "--val-fraction", 0.3, code=2)
    assert re.search(message, out) and "leave such documents out with --skip-bad" in out
    assert not (tmp_path / "out/text").exists()

    out = run("text", "--source", source, "--val-fraction", 0.3, "--skip-bad")
    assert "left out: 0 empty documents, 1 that cannot be read" in out
    meta = check_dataset(tmp_path / "out/text", 257)
    assert (meta.source["bad"], meta.source["empty"]) == (1, 0)
    wanted = [json.loads(row)["text"] for row in ROWS.splitlines()]
    wanted = wanted[: LINE - 1] + wanted if "in.jsonl" in files else wanted
    assert corpora.documents_of(tmp_path / "out/text") == corpora.split_of(wanted, 0.3)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('["a", "b"]', r"no text in field 'text' but a list \(\['a', 'b'\]\): .*--text-field"),
        (f'["{"a" * 99}"]', r"'text' but a list \(\['a{38}\): choose another --text-field"),
        ("3.5", r"no text in field 'text' but a number \(3.5\)"),
        ("9" * 5000, r"no text in field 'text' but a number \(inf\)"),
        ("true", r"but a boolean \(True\)"),
        ('{"a": "b"}', "but a object"),
        ('"one", "text": "two"', "has several fields 'text': rename all but one"),
    ],
)
def test_a_field_that_holds_no_single_text(run, tmp_path, value, says):
    corpora.write_tree(tmp_path, bad_line(b'{"text": ' + value.encode() + b"}"))
    out = run("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.3, code=2)
    assert re.search(f"line {LINE} .*{says}", out)


def test_what_stands_beside_a_good_text_does_not_matter(run, tmp_path):
    """An integer that Python refuses to parse, and fields of the text's name deeper in the row."""
    rows = [b'{"text": "long integer", "id": ' + b"9" * 5000 + b"}"]
    rows.append(b'{"text": "deep", "meta": {"text": "a", "more": [{"text": "b"}]}}')
    rows.append(b'{"text": "say \\"text\\" and \\"text\\""}')
    corpora.write_tree(tmp_path, {"in.jsonl": b"\n".join(rows) + b"\n" + ROWS})
    run("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.3)
    texts = ["long integer", "deep", 'say "text" and "text"', *(f"row {i}" for i in range(30))]
    assert corpora.documents_of(tmp_path / "out/text") == corpora.split_of(texts, 0.3)


def test_two_columns_of_one_name(run, tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text"] * 2)
    parquet.write_table(table, tmp_path / "a.parquet")
    out = run("text", "--source", tmp_path / "a.parquet", code=2)
    assert "a.parquet has 2 columns called 'text': rename all but one" in out


def test_a_column_that_holds_no_text(run, tmp_path):
    corpora.parquet(tmp_path / "in.parquet", ["a", "b"], body=["c", "d"])
    args = ("text", "--source", tmp_path / "in.parquet", "--text-field")
    out = run(*args, "content", code=2)
    assert "in.parquet has no field 'content'; it has 'id', 'text', 'body': choose one" in out
    out = run(*args, "id", code=2)
    assert "in.parquet: field 'id' is of type int64, expected string: choose another" in out


def test_a_bad_row_is_named_by_its_number(tmp_path):
    """Of 600, which are read in several batches; and how far the file is read at each row."""
    import pyarrow
    from pyarrow import parquet

    rows = [b"row %d" % i for i in range(1, 601)]
    rows[520] = b"caf\xe9"
    table = pyarrow.table({"text": pyarrow.array(rows, pyarrow.binary()).view(pyarrow.string())})
    parquet.write_table(table, tmp_path / "in.parquet")
    (file,) = local_inputs([tmp_path / "in.parquet"])
    read = list(read_documents(file, "text"))
    assert [raw.data for raw in read] == rows
    assert [raw.done for raw in read] == [file.size * i // 600 for i in range(1, 601)]
    with pytest.raises(DataError, match="in.parquet: row 521 is not UTF-8 at byte 3: convert"):
        Encoder(corpora.BYTES, 0.5)(read)
    assert Encoder(corpora.BYTES, 0.5, skip_bad=True)(read).bad == 1


def test_a_bad_document_of_a_text_file_is_named_by_its_number(run, tmp_path):
    """Documents of white space alone count, too."""
    corpora.write_tree(tmp_path, {"in.txt": b"one|two| \n|caf\xe9|five"})
    out = run("text", "--source", tmp_path / "in.txt", "--separator", "|", code=2)
    assert "in.txt: document 4 is not UTF-8 at byte 3" in out


def zstd_frame(data: bytes, window_log: int) -> bytes:
    """A frame of one raw block, as the format's specification (RFC 8878) describes it."""
    block = (1 + (len(data) << 3)).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([0, (window_log - 10) << 3]) + block + data


def test_a_window_above_128_mib_is_named(run, tmp_path):
    texts = [f"row {i}" for i in range(30)]
    for window_log in (27, 28, 31):
        for before in (b"", corpora.zstd(ROWS)):  # also in a later frame
            file = tmp_path / "in.jsonl.zst"
            file.write_bytes(before + zstd_frame(ROWS, window_log))
            code = 2 if window_log > 27 else 0
            args = ("--source", file, "--val-fraction", 0.3, "--force")
            out = run("text", *args, code=code)
            assert ("window above 128 MiB (zstd --long)" in out) == bool(code)
            assert ("damaged" in out) == 0
            if not code:
                rows = texts * (2 if before else 1)
                wanted = corpora.split_of(rows, 0.3)
                assert corpora.documents_of(tmp_path / "out/text") == wanted


FOLDER = {
    "a.txt": b"one",
    "b.TXT": b"two",
    "deep/c.md": b"three",
    "deep/README.md": b"# Notes on c",
    "d.jsonl": b'{"text": "four"}\n',
    "README.md": b"The rows of this set",
    "more/README.md": b"---\nlicense: mit\nconfigs: []\n---\n# A data set",
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
    "LICENSE": b"",
}


def test_a_folder_says_what_is_read_and_what_is_left(run, tmp_path, monkeypatch):
    monkeypatch.setattr("data.encode.FEW_DOCUMENTS", 10)
    card = b"\xef\xbb\xbf---\r\nlicense: mit\r\n---\r\n"  # with a byte order mark
    source = corpora.write_tree(tmp_path / "in", FOLDER | {"one-more/README.md": card})
    out = run("text", "--source", source, "--val-fraction", 0.5)
    others = "1 without an ending, 1 .jsonl, 1 .py, 1 .old"
    assert f"{source}: read: 2 .txt, 2 .md, {others}; left: " in out
    left = out.partition("; left: ")[2].splitlines()[0]
    counts = {"3 hidden", "4 cards of data sets", "2 .pdf", "1 without an ending"}
    counts |= {"1 .tex", "1 .dat"}
    assert set(left.split(", ")) == counts
    assert read_meta(tmp_path / "out/text").splits["train"].documents == 8  # cut
    text = open_tokens(tmp_path / "out/text", "train")
    read = bytes(text.read(0, len(text)).astype("u1"))
    assert b"hidden" not in read and b"five" not in read and b"print" in read
    # other corpora have files such as scripts beside their text
    assert [file.name for file in local_inputs([source / "deep"])] == ["README.md", "c.md"]
    # a file that is named is read
    named = local_inputs([source / "README.md", source / ".f.txt"])
    assert [file.name for file in named] == ["README.md", ".f.txt"]


@pytest.mark.parametrize("name", ["in.tar", "in.tgz"])
def test_members_of_an_archive_are_read_by_content(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("data.encode.FEW_DOCUMENTS", 10)
    archive = corpora.tar({f"./{path}": data for path, data in FOLDER.items()})
    source = tmp_path / name
    source.write_bytes(gzip.compress(archive) if name == "in.tgz" else archive)
    out = run("text", "--source", source, "--val-fraction", 0.5)
    left = re.search("left out of archives, no text: (.*)", out)
    counts = {"3 hidden", "2 .pdf", "1 .jsonl", "1 .json", "1 without an ending", "1 .tex"}
    assert left and set(left[1].split(", ")) == counts | {"1 .dat"}
    texts = ["a.txt", "b.TXT", "deep/c.md", "deep/README.md", "README.md", "more/README.md"]
    texts += ["deep/i.py", "NOTES", "j.txt.old"]
    read = [raw.data for raw in read_documents(*local_inputs([source], any_text=True), "text")]
    assert [data for data in read if data] == [FOLDER[path] for path in texts]
    # other corpora's archives have other files beside .txt and .md
    read = [raw.data for raw in read_documents(*local_inputs([source]), "text")]
    assert read == [FOLDER[path] for path in texts[:6]] + 3 * [b"hidden"]


@pytest.mark.parametrize("named", ["train.bin", "."])
def test_bare_tokens_are_called_so(run, tmp_path, named):
    corpora.write_tree(tmp_path / "in", {"train.bin": b"\1\0", "val.bin": b"\1\0"})
    out = run("text", "--source", tmp_path / "in" / named, code=2)
    assert "a .bin of nanoGPT or the like: tokens without a meta.json" in out
    with pytest.raises(DataError, match="train.bin: a .bin of nanoGPT .* data.prepare text"):
        check_dataset(tmp_path / "in", 257)


# with a mark of another kind, which is not sought where --separator splits
STORIES = ["Once upon a time.\n\nThe end.\n", "The second\n[SEP]\n", "The third <eos>, it says\n"]


@pytest.mark.parametrize(
    ("mark", "between"),
    [
        ("<|endoftext|>", "<|endoftext|>\n"),
        ("<|endoftext|>", "  <|endoftext|>\r\n"),
        ("<|endoftext|>", "<|endoftext|>"),
        ("</s>", "</s>\n"),
        ("<EOS>", "<EOS>\n"),
    ],
)
def test_a_mark_between_documents_is_noticed(run, tmp_path, monkeypatch, mark, between):
    monkeypatch.setattr("data.encode.FEW_DOCUMENTS", 10)
    stories = STORIES * 12
    body = between.join(stories).encode() + between.encode()
    corpora.write_tree(tmp_path / "in", {"a.txt": body})
    corpora.write_tree(tmp_path / "tar", {"a.tar": corpora.tar({"a.txt": body})})
    for source in (tmp_path / "in", tmp_path / "tar"):
        out = run("text", "--source", source, "--val-fraction", 0.3, "--force")
        assert f"found {mark} {len(stories)} times" in out
        assert f"--separator '{mark}' --force" in out
        args = ("text", "--source", source, "--val-fraction", 0.3, "--separator", mark)
        assert "made with other arguments" in run(*args, code=2)
        assert "found" not in run(*args, "--force")
        assert corpora.documents_of(tmp_path / "out/text") == corpora.split_of(stories, 0.3)
        assert "already there" in run(*args)
        assert f"(separator {mark!r}, now None)" in run(*args[:-2], code=2)


def test_which_marks_stand_between_documents():
    """Those with bars anywhere, others on a line of their own, in any case of their letters."""
    anywhere = ["<|endoftext|>", "<|end_of_text|>", "<|EndOfDocument|>", "<|endofdoc|>"]
    anywhere += ["<|eos|>", "<|eot|>", "<|EOD|>"]
    own_line = ["</s>", "<s>", "<S>", "<doc>", "</doc>", "<sep>", "<eos>", "<eot>", "<eod>"]
    own_line += ["<endoftext>", "<end_of_document>", "[EOS]", "[eot]", "[SEP]"]
    for mark in anywhere:
        assert find_separators(f"a{mark}b {mark}\n") == [mark, mark]
    for mark in own_line:
        assert find_separators(f"a\n \t{mark}\t \nb\r\n{mark}\r\n{mark}") == [mark] * 3
        assert find_separators(f"a {mark}\n{mark} b\n") == []
    prose = "<p>\n<|user|>\n[CLS]\n[1]\n<docs>\n<//s>\n(SEP)\n"
    assert find_separators(prose) == []


@pytest.mark.parametrize("mark", ["<|endoftext|>", "[EOS]"])
def test_marks_are_counted_over_all_batches(run, tmp_path, small_batches, mark):
    story = b"once upon a time\n%b\n" % mark.encode()
    corpora.write_tree(tmp_path / "in", {"a.txt": 3 * story, "b.txt": 4 * story})
    said = run("text", "--source", tmp_path / "in", "--val-fraction", 0.3)
    assert f"found {mark} 7 times" in said


def test_marks_are_not_sought_in_rows_or_in_prose(run, tmp_path):
    rows = corpora.jsonl(["<|endoftext|>"] * 30)
    prose = b"HTML has <s> and <sep>,\n<p>\n<div>\n</div>"
    corpora.write_tree(tmp_path / "in", {"a.jsonl": rows + ROWS, "b.txt": prose})
    assert "found" not in run("text", "--source", tmp_path / "in", "--val-fraction", 0.3)


def test_a_read_error_names_the_file():
    """As a failing disk's: the process's own memory cannot be read from its start."""
    with pytest.raises(DataError, match="/proc/self/mem: cannot be read .Input/output error."):
        list(read_documents(Input("/proc/self/mem", "mem", 0), "text"))


def test_a_pipe_is_refused(tmp_path):
    """It would wait for a writer for ever."""
    os.mkfifo(tmp_path / "in.txt")
    with pytest.raises(DataError, match="in.txt: a pipe, socket or device.* --source"):
        local_inputs([tmp_path / "in.txt"])


@pytest.mark.parametrize("size", [99, 100, 101])
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.txt.gz", "in.tar", "in.txt"])
def test_the_longest_document(tmp_path, monkeypatch, name, size):
    """100 bytes are read and 101 are not, except of a plain text file."""
    monkeypatch.setattr("data.readers.DOCUMENT_BYTES", 100)
    monkeypatch.setattr("data.readers.READ_BYTES", 7)
    monkeypatch.setattr("data.readers.HEAD_BYTES", 13)
    data = bytes(65 + i % 26 for i in range(size - 1)) + b"\n"
    content = corpora.tar({"b.txt": data}) if "tar" in name else data
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (file,) = local_inputs([tmp_path / name])
    if size > 100 and name != "in.txt":
        with pytest.raises(DataError, match="more than 100 bytes"):
            list(read_documents(file, "text"))
    else:
        (raw,) = read_documents(file, "text")
        assert raw.data == data


def test_links_in_an_archive_are_counted_and_not_followed(tmp_path):
    """Symbolic and hard ones, absolute paths, and paths out of it; not folders and devices."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind in {
            "a.txt": tarfile.REGTYPE,
            "b.txt": tarfile.SYMTYPE,
            "c.txt": tarfile.LNKTYPE,
            "/d.txt": tarfile.REGTYPE,
            "e/../../f.txt": tarfile.REGTYPE,
            "g.txt": tarfile.DIRTYPE,
            "h.txt": tarfile.FIFOTYPE,
            "i..txt": tarfile.REGTYPE,
        }.items():
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = "a.txt"
            text = f"text of {name}".encode() if kind == tarfile.REGTYPE else b""
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    corpora.write_tree(tmp_path, {"in.tar": stream.getvalue()})
    read = list(read_documents(*local_inputs([tmp_path / "in.tar"]), "text"))
    links = [raw.where.rpartition(": ")[2] for raw in read if raw.is_link]
    assert links == ["b.txt", "c.txt", "/d.txt", "e/../../f.txt"]
    assert [raw.data for raw in read if raw.data] == [b"text of a.txt", b"text of i..txt"]
    assert Encoder(corpora.BYTES, 0.5)(read).links == 4


BOMB = b"a" * 2**25


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("in.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": "' + BOMB), "line 2"),
        ("in.jsonl.bz2", bz2.compress(BOMB), "line 1"),
        ("in.jsonl.zst", corpora.zstd(BOMB), "line 1"),
        ("in.txt.gz", gzip.compress(BOMB), "in.txt.gz"),
        ("in.tar.gz", gzip.compress(corpora.tar({"b.txt": BOMB})), "b.txt"),
    ],
)
def test_memory_does_not_grow_with_a_line_without_end(tmp_path, monkeypatch, name, content, where):
    monkeypatch.setattr("data.readers.DOCUMENT_BYTES", 2**20)
    corpora.write_tree(tmp_path, {name: content})
    (file,) = local_inputs([tmp_path / name])
    tracemalloc.start()
    with pytest.raises(DataError, match=f"{where}: more than 1,048,576 bytes.*Split it"):
        list(read_documents(file, "text"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24
    monkeypatch.setattr("data.readers.DOCUMENT_BYTES", 2**28)  # as many as it has are read
    assert sum(len(raw.data) for raw in read_documents(file, "text")) >= len(BOMB)


def parquet_bytes(texts) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        corpora.parquet(Path(folder, "a.parquet"), texts)
        return Path(folder, "a.parquet").read_bytes()


def garbled(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(b ^ 0xA5 for b in data[at : at + 64]) + data[at + 64 :]


def damaged_files() -> dict[str, tuple[str, bytes]]:
    rows = [f"row {i}: {i * 7919 % 1000}" for i in range(300)]
    archive = corpora.tar({f"{i}.txt": row.encode() * 60 for i, row in enumerate(rows[:20])})
    intact = {
        "in.tar": archive,
        "in.tar.gz": gzip.compress(archive),
        "in.tar.zst": corpora.zstd(archive),
    }
    gz, zst = (compress(corpora.jsonl(rows)) for compress in (gzip.compress, corpora.zstd))
    intact |= {"in.jsonl.gz": gz, "in.txt.gz": gz, "in.jsonl.zst": zst}
    intact["in.parquet"] = parquet_bytes(rows)
    cases = {}
    for name, data in intact.items():
        cases[f"{name} is garbage"] = name, b"garbage" * 200
        cases[f"{name} is empty"] = name, b""
        cases[f"{name} is cut in the middle"] = name, data[: len(data) // 2 + 100]
        if name.endswith("gz"):  # Zstandard's frames need not have a check sum
            cases[f"{name} has garbage in the middle"] = name, garbled(data, len(data) // 2)
        if name.endswith(("gz", "zst")):
            cases[f"{name} lacks its last byte"] = name, data[:-1]
            cases[f"{name} has garbage after its end"] = name, data + b"garbage"
            cases[f"{name} has its second part cut"] = name, data + data[: len(data) // 2]
    # at 1024 bytes stands the second one's header
    three = corpora.tar({f"{i}.txt": b"x" * 512 for i in range(3)})
    cases["in.tar has garbage for a header"] = "in.tar", garbled(three, 1024)
    for where, size in {
        "in a header": 1100,
        "between two members": 1024,
        "in a member": 1600,
    }.items():
        cases[f"in.tar is cut {where}"] = "in.tar", three[:size]
    cases["in.parquet has garbage in a page"] = "in.parquet", garbled(intact["in.parquet"], 100)
    return cases


DAMAGED = damaged_files()


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(run, tmp_path, case):
    """A damaged file is never taken for an intact one, nor with --skip-bad."""
    name, data = DAMAGED[case]
    corpora.write_tree(tmp_path / "in", {"a.jsonl": ROWS, name: data})
    for more in ((), ("--skip-bad",)):
        out = run("text", "--source", tmp_path / "in", "--val-fraction", 0.3, *more, code=2)
        assert re.search(rf"in/{name}: damaged or cut short \(.+\): fetch it again", out)
        assert "Traceback" not in out and not (tmp_path / "out/text").exists()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.tar", "a.parquet"])
def test_files_without_documents_beside_others_are_accepted(run, tmp_path, name):
    """A writer that filters may leave a parquet file without rows."""
    empty = {"a.tar": corpora.tar({}), "a.parquet": parquet_bytes([])}.get(name, b"")
    corpora.write_tree(tmp_path / "in", {name: empty, "b.jsonl": ROWS})
    run("text", "--source", tmp_path / "in", "--val-fraction", 0.3)
    assert sum(map(len, corpora.documents_of(tmp_path / "out/text").values())) == 30
