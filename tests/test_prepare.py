"""data/: from corpora to sets: readers, encoding, the commands `data.prepare` and `data.verify`."""

import errno
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from base64 import b64encode
from contextlib import contextmanager, suppress
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import Forked

from data import DataError, bins, prepare, sources, units, verify
from data.bins import check_dataset, open_tokenizer, open_tokens, read_meta
from data.encode import Encoder
from data.readers import KINDS, read_documents
from data.sources import SOURCES, local_inputs
from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from data.writer import Writer

BYTES = ByteTokenizer()
REPO_ROOT = Path(__file__).parents[1]
FAKE_RANKS = b"".join(  # a file of GPT-2's form and size, with other merges: all bytes, then 50,000 pairs of them
    b"%s %d\n" % (b64encode(bytes(token)), rank)
    for rank, token in enumerate(
        itertools.chain(product(range(256)), islice(product(range(256), repeat=2), 50_000)),
    )
)
BLANK = ("", " \n", "\t")


# files of every kind


def jsonl(texts, **more) -> bytes:
    return b"".join(json.dumps({"id": i, "text": text} | more).encode() + b"\n" for i, text in enumerate(texts))


def zstd(data: bytes) -> bytes:
    import pyarrow

    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as file:
        file.write(data)
    return stream.getvalue().to_pybytes()


def in_parts(compress, data: bytes, parts: int = 3) -> bytes:
    """Frames, or members, one after another; they part in the middle of lines."""
    size = len(data) // parts + 1
    return b"".join(compress(data[i : i + size]) for i in range(0, len(data), size))


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def parquet(path: Path, texts, type_: str = "string", body=None, rows_a_group: int = 7, **options) -> None:
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.array(texts, getattr(pyarrow, type_)())
    table = pyarrow.table({"id": range(len(texts)), "text": column} | ({"body": body} if body else {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=rows_a_group, **options)


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def corpus_texts(n: int = 40) -> list[str]:
    """Different texts of one to 200 lines, some blank, not all in ASCII."""
    rng = random.Random(0)
    texts = ["\n".join(f"{i}: naïve 🙂 {rng.random()}" for _ in range(rng.choice((1, 3, 200)))) for i in range(n)]
    texts[3], texts[n // 2] = "", " \n"
    return texts


# the command


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on sets below tmp_path/out, tokenizer bytes unless told otherwise; returns (exit code, what it
    printed)."""

    def run(*args, main=prepare.main) -> tuple[int, str]:
        args = [*map(str, args), "--out", str(tmp_path / "out")]
        if main is prepare.main and "--tokenizer" not in args:
            args += ["--tokenizer", "bytes"]
        code = main(args)
        printed = capsys.readouterr()
        assert ("error: " in printed.err) == (code == 2), printed
        return code, printed.out + printed.err

    return run


@pytest.fixture
def small_units(monkeypatch):
    """Units of a document or two."""
    monkeypatch.setattr(units, "UNIT_BYTES", 50)


@pytest.fixture
def many_workers(monkeypatch):
    """A worker process for every few documents."""
    monkeypatch.setattr(prepare, "WORKER_BYTES", 500)


def documents_of(folder: Path) -> dict[str, list[str]]:
    """What the set in `folder` decodes to."""
    found, tokenizer = {}, open_tokenizer(folder)
    for split in ("train", "val"):
        tokens = open_tokens(folder, split)
        ids = tokens.read(0, len(tokens))
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)
        assert not len(parts[-1])  # every document has its end
        found[split] = [tokenizer.decode(part[:-1]) for part in parts[:-1]]
        assert len(found[split]) == read_meta(folder).splits[split].documents
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def place(text: str) -> float:
    """What prepare's split is documented to be: the hash of the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def split_of(texts, val_fraction) -> dict[str, list[str]]:
    texts = [text for text in texts if text.strip()]
    return {
        "train": [text for text in texts if place(text) >= val_fraction],
        "val": [text for text in texts if place(text) < val_fraction],
    }


# readers


def texts_by_datasets(kind: str, paths: list[Path]) -> list[str]:
    import datasets

    more = {"sample_by": "document"} if kind == "text" else {}
    rows = datasets.load_dataset(kind, data_files=list(map(str, paths)), split="train", streaming=True, **more)
    return [row["text"] or "" for row in rows]


def make(folder: Path, name: str, texts: list[str]) -> tuple[str, list[Path]]:
    """A file, or folder, `name` of `texts`; returns the builder of `datasets` and the files that it should read."""
    path, plain = folder / name, folder / "plain"
    rows = jsonl(texts)
    members = {f"{i:03d}.{'txt' if i % 2 else 'md'}": text.encode() for i, text in enumerate(texts)}
    if ".parquet" in name:
        nulls = [text or None for text in texts]
        parquet(path, nulls, "large_string" if "large" in name else "string")
        return "parquet", [path]
    if ".json" in name:
        compress = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix)
        path.write_bytes(in_parts(compress, rows) if compress else rows)
        write_tree(plain, {"rows.jsonl": rows})
        return "json", [plain / "rows.jsonl" if name.endswith(".zst") else path]
    write_tree(plain, members)
    if name == "folder":
        nested = {f"{'deep/er/' if i // 10 == 2 else ''}{member}": members[member] for i, member in enumerate(members)}
        write_tree(path, nested | {"notes.pdf": b"\xff", "zip.zip": b"\xff"})
        return "text", [path / member for member in [*members] if (path / member).exists()] + [
            path / "deep/er" / member for member in members if (path / "deep/er" / member).exists()
        ]
    archive = tar({"notes.pdf": b"\xff"} | members | {"last/": b""})
    if name.endswith(("gz", "zst")):
        archive = in_parts(zstd if name.endswith("zst") else gzip.compress, archive)
    path.write_bytes(archive)
    return "text", [plain / member for member in members]


@pytest.mark.parametrize(
    "name",
    ["rows.parquet", "large.parquet", "rows.jsonl", "rows.json", "rows.jsonl.gz", "ROWS.jsonl.zst", "rows.json.gz"]
    + ["folder", "texts.tar", "texts.tar.gz", "texts.tgz", "texts.tar.zst"],
)
def test_every_kind_of_file_reads_as_datasets_reads_it(tmp_path, name):
    texts = corpus_texts()
    builder, paths = make(tmp_path, name, texts)
    inputs = local_inputs([tmp_path / name])
    raws = [raw for file in inputs for raw in read_documents(file, "text")]
    encoder = Encoder(BYTES, 0.5)
    found = [encoder.text(raw) for raw in raws]
    assert found == texts_by_datasets(builder, paths)
    assert sorted(found) == sorted(texts) and len(texts) == 40
    if name != "folder":
        done = [raw.done for raw in raws]
        assert found == texts
        assert done == sorted(done) and 0 <= done[0] and done[-1] <= inputs[0].size and done[-1] > inputs[0].size / 2


@pytest.mark.parametrize("end", [".txt", ".md", ".txt.gz", ".md.gz", ".txt.zst", ".md.zst"])
def test_a_text_file_is_one_document_kept_to_the_byte(tmp_path, end):
    data = "\r\n# naïve\r\n\n a <|endoftext|> b \x00\u2028 🙂\n".encode()
    compress = {".gz": gzip.compress, ".zst": zstd}.get(Path("a" + end).suffix, bytes)
    (tmp_path / f"a{end}").write_bytes(in_parts(compress, data) if compress is not bytes else data)
    assert [raw.data for raw in read_documents(local_inputs([tmp_path])[0], "text")] == [data]


def test_documented_kinds_are_the_ones_read():
    assert {".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".tar", ".tar.gz", ".tgz", ".parquet"} < set(KINDS)


def test_files_named_are_read_in_the_order_named_and_folders_sorted(run, tmp_path):
    names = ["b.txt", "a.txt", "f/10.txt", "f/2.txt", "f/a/x.txt", "f/a.txt"]
    write_tree(tmp_path, {name: f"of {name}".encode() for name in names})
    args = (tmp_path / "b.txt", tmp_path / "f", tmp_path / "a.txt")
    assert [file.name for file in local_inputs(args)] == ["b.txt", "10.txt", "2.txt", "a/x.txt", "a.txt", "a.txt"]


def test_bom_blank_lines_and_crlf_in_json_lines(run, tmp_path):
    lines = b"\xef\xbb\xbf" + jsonl(["one", "two"]).replace(b"\n", b"\r\n\r\n \n") + b'{"text": "no end of line\\r\\n"}'
    (tmp_path / "a.jsonl").write_bytes(lines)
    code, out = run("text", "--source", tmp_path / "a.jsonl", "--val-fraction", 0.5)
    assert code == 0 and "left out" not in out
    assert documents_of(tmp_path / "out/text") == split_of(["one", "two", "no end of line\r\n"], 0.5)


def test_text_field(run, tmp_path):
    """Of JSON lines and parquet alike."""
    texts = ["one", "two", "three", "four"]
    rows = b"".join(json.dumps({"text": "no", "body": text}).encode() + b"\n" for text in texts)
    write_tree(tmp_path / "in", {"a.jsonl": rows})
    parquet(tmp_path / "in/b.parquet", ["no"] * 4, body=[text.upper() for text in texts])
    assert run("text", "--source", tmp_path / "in", "--val-fraction", 0.5, "--text-field", "body")[0] == 0
    found = documents_of(tmp_path / "out/text")
    assert found == split_of([*texts, *map(str.upper, texts)], 0.5)


# from text to ids


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def any_tokenizer(request):
    return BYTES if request.param == "bytes" else GPT2Tokenizer(FAKE_RANKS)


@given(texts=st.lists(st.text(max_size=30), max_size=30), val_fraction=st.floats(0.01, 0.99), steps=st.integers(1, 60))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_come_back_from_a_set(any_tokenizer, monkeypatch, texts, val_fraction, steps):
    texts += ["train " + "x" * next(n for n in itertools.count() if place("train " + "x" * n) >= val_fraction)]
    texts += ["val " + "x" * next(n for n in itertools.count() if place("val " + "x" * n) < val_fraction)]
    monkeypatch.setattr(prepare, "load_tokenizer", lambda *_: any_tokenizer)
    monkeypatch.setattr(bins, "load_tokenizer", lambda *_: any_tokenizer)
    monkeypatch.setattr(units, "UNIT_BYTES", steps)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in.jsonl").write_bytes(jsonl(texts))
        args = (
            f"text --source {folder}/in.jsonl --out {folder} --shard-tokens {9 * steps} --val-fraction {val_fraction}"
        )
        assert prepare.main(args.split()) == 0
        assert documents_of(Path(folder, "text")) == split_of(texts, val_fraction)
        check_dataset(Path(folder, "text"), any_tokenizer.vocab_size)
        assert read_meta(Path(folder, "text")).source["empty"] == sum(not text.strip() for text in texts)


def test_split_hangs_on_the_text_alone(run, tmp_path):
    texts = [f"document {i}" for i in range(400)]
    splits = []
    for name, part in {"large": texts, "small": texts[::3], "turned": texts[::-1]}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(part))
        code, _ = run("text", "--source", tmp_path / f"{name}.jsonl", "--name", name, "--val-fraction", 0.2)
        found = documents_of(tmp_path / "out" / name)
        assert code == 0 and found == split_of(part, 0.2)
        splits.append(found)
    large, small, turned = splits
    assert set(small["val"]) == set(large["val"]) & set(texts[::3])
    assert turned["val"] == large["val"][::-1] and turned["train"] == large["train"][::-1]
    assert 50 < len(large["val"]) < 110


@pytest.mark.parametrize("name", ["in", "rows.jsonl.gz"])
def test_the_set_is_the_same_for_any_number_of_workers(run, tmp_path, monkeypatch, small_units, many_workers, name):
    texts = corpus_texts()
    if name == "in":
        write_tree(tmp_path / "in", {"a.jsonl": jsonl(texts[:20]), "b.tar": tar({"x.txt": texts[30].encode()})})
    else:
        (tmp_path / name).write_bytes(gzip.compress(jsonl(texts)))
    processes, pool = [], units.ProcessPoolExecutor
    monkeypatch.setattr(
        units, "ProcessPoolExecutor", lambda n, *args, **more: processes.append(n) or pool(n, *args, **more)
    )
    sets = []
    for workers in (1, 2, 3):
        monkeypatch.setattr(prepare, "cores", lambda workers=workers: workers)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        code, out = run("text", "--source", tmp_path / name, "--shard-tokens", 997, "--val-fraction", 0.2)
        assert code == 0 and f"{workers} workers" in out
        sets.append(snapshot(tmp_path / "out"))
    assert processes == [2, 3]
    assert sets[0] == sets[1] == sets[2] and len(sets[0]) > 10


def test_more_workers_than_the_work_is_worth_are_not_started(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(corpus_texts()))
    code, out = run("text", "--source", tmp_path / "a.jsonl", "--val-fraction", 0.2, "--workers", 64)
    assert code == 0 and " 1 workers" in out


# the whole command


def test_a_folder_becomes_a_set(run, tmp_path):
    files = {
        "b.txt": b"bee\n",
        "a.md": "# naïve\r\n".encode(),
        "deep/c.txt.gz": gzip.compress(b"sea"),
        "empty.txt": b" \n",
        "ignored.pdf": b"\xff",
        "rows.jsonl.gz": gzip.compress(jsonl(["one", "two", "", "<|endoftext|>"])),
    }
    source = write_tree(tmp_path / "in", files)
    code, out = run("text", "--source", source, "--name", "mine", "--val-fraction", 0.4)
    assert code == 0 and "prepared:" in out and "left out: 2 empty documents, 0 that cannot be read" in out
    found = documents_of(tmp_path / "out/mine")
    assert found["train"] and found["val"]
    assert found == split_of(["# naïve\r\n", "bee\n", "sea", "one", "two", "<|endoftext|>"], 0.4)
    meta = check_dataset(tmp_path / "out/mine", 257)
    assert meta.name == "mine" and (meta.source["empty"], meta.source["bad"]) == (2, 0)
    assert meta.prepare.startswith(f"python -m data.prepare text --source {source} --name mine")
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_stdlib_is_prepared_from_the_running_python(run, tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("b.py", "a/c.py", "a/test/t.py", "site-packages/p.py", "latin.py", "notes.txt", "d.py", "e.py"):
        write_tree(library, {name: f"# {name}".encode()})
    (library / "latin.py").write_bytes(b"\xe9")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    code, out = run("stdlib", "--val-fraction", 0.15)
    assert code == 0 and "0 empty documents, 1 that cannot be read" in out and "latin.py" in out
    assert documents_of(tmp_path / "out/stdlib") == split_of(["# a/c.py", "# b.py", "# d.py", "# e.py"], 0.15)


def test_python_sources_below_other_roots(run, tmp_path):
    """All of them, those of tests too; of two roots each under its own name."""
    files = {"one/a.py": "# a", "one/test/b.py": "# b", "two/a.py": "# c", "two/d.txt": "d", "two/e/f.py": "# f"}
    write_tree(tmp_path, {name: text.encode() for name, text in files.items()})
    (tmp_path / "none").mkdir()
    roots = [tmp_path / "two", tmp_path / "one"]
    assert run("stdlib", "--roots", *roots, "--name", "code", "--val-fraction", 0.4)[0] == 0
    assert documents_of(tmp_path / "out/code") == split_of(["# c", "# f", "# a", "# b"], 0.4)
    assert "already there" in run("stdlib", "--roots", *roots, "--name", "code", "--val-fraction", 0.4)[1]
    (tmp_path / "one/a.py").write_text("# other")
    assert "its files have changed" in run("stdlib", "--roots", *roots, "--name", "code", "--val-fraction", 0.4)[1]
    assert "none: no .py file in it: name another --roots" in run("stdlib", "--roots", tmp_path / "none")[1]
    assert "absent: no such folder" in run("stdlib", "--roots", tmp_path / "absent")[1]


@pytest.fixture
def books(tmp_path) -> tuple:
    """The arguments that prepare 30 short texts in two files."""
    files = {"a.jsonl": jsonl(corpus_texts()[:20]), "b.jsonl": jsonl([f"{i} green bottles" for i in range(10)])}
    return "text", "--source", write_tree(tmp_path / "in", files), "--val-fraction", 0.3, "--shard-tokens", 999


def test_prepared_again_it_is_already_there(run, books, tmp_path):
    assert run(*books)[0] == 0
    before = snapshot(tmp_path / "out")
    modified = (tmp_path / "out/text/meta.json").stat().st_mtime_ns
    code, out = run(*books)
    assert code == 0 and "already there" in out
    assert (tmp_path / "out/text/meta.json").stat().st_mtime_ns == modified

    for changed, message in (
        (("--val-fraction", 0.5), "val_fraction 0.3, now 0.5"),
        (("--tokenizer", "gpt2"), "tokenizer 'bytes', now 'gpt2'"),
        (("--text-field", "body"), "text_field 'text', now 'body'"),
        (("--shard-tokens", 500), "shard_tokens 999, now 500"),
    ):
        code, out = run(*books, *changed)
        assert code == 2 and message in out and "--force" in out and "--name" in out
    assert snapshot(tmp_path / "out") == before

    assert run(*books, "--val-fraction", 0.5, "--force")[0] == 0
    assert "--force" not in read_meta(tmp_path / "out/text").prepare
    assert (
        documents_of(tmp_path / "out/text")["val"]
        == split_of(corpus_texts()[:20] + [f"{i} green bottles" for i in range(10)], 0.5)["val"]
    )
    assert os.listdir(tmp_path / "out") == ["text"]

    damaged = tmp_path / "out/text/train-00000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    code, out = run(*books, "--val-fraction", 0.5)
    assert code == 2 and "train-00000.bin: expected" in out


@pytest.mark.parametrize("hashed", [True, False])
def test_source_files_changed_since_are_noticed(run, books, tmp_path, monkeypatch, hashed):
    if not hashed:
        monkeypatch.setattr(prepare, "HASHED_BYTES", 1)
    assert run(*books)[0] == 0
    changed = tmp_path / "in/b.jsonl"
    content = changed.read_bytes()
    changed.write_bytes(content.replace(b"green", b"white"))
    code, out = run(*books)
    assert code == (2 if hashed else 0)
    assert ("its files have changed (inputs" in out and "--force" in out) == hashed
    changed.write_bytes(content + b"\n")
    code, out = run(*books)
    assert code == 2 and "its files have changed" in out
    changed.rename(tmp_path / "in/c.jsonl")
    assert run(*books)[0] == 2
    (tmp_path / "in/c.jsonl").rename(changed)
    changed.write_bytes(content)
    assert run(*books)[0] == 0
    shutil.rmtree(tmp_path / "in")  # a set does not need the files that it was made of
    code, out = run(*books)
    assert code == 0 and "already there" in out


def fail_after(monkeypatch, count: int, error=KeyboardInterrupt) -> None:
    """Lets the command fail at the unit of this number."""
    calls, write = itertools.count(1), units._write_unit

    def failing(*args):
        if next(calls) == count:
            raise error
        return write(*args)

    monkeypatch.setattr(units, "_write_unit", failing)


def test_stopped_it_resumes(run, books, tmp_path, small_units, monkeypatch):
    assert run(*books)[0] == 0
    whole = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    with monkeypatch.context() as patch:
        fail_after(patch, 13)
        code, out = run(*books)
        assert code == 130 and "stopped; start again to resume" in out
    with pytest.raises(DataError, match="text: half-prepared. Resume with the command that began it"):
        check_dataset(tmp_path / "out/text", 257)
    assert run("text", main=verify.main)[0] == 2
    unfinished = snapshot(tmp_path / "out")
    assert 11 <= len([name for name in unfinished if name.endswith(".npz")]) <= 15

    rows = (tmp_path / "in/b.jsonl").read_bytes()
    for changed in (("--val-fraction", 0.5), ("--shard-tokens", 500), ("--text-field", "body"), ("inputs",)):
        if changed == ("inputs",):
            (tmp_path / "in/b.jsonl").write_bytes(jsonl(["another"]))
        code, out = run(*books, *(changed if len(changed) > 1 else ()))
        assert code == 2 and "text.partial holds an unfinished set made with other arguments" in out
        assert all(remedy in out for remedy in (changed[0].strip("-").replace("-", "_"), "--force", "--name"))
        assert snapshot(tmp_path / "out") == unfinished
    (tmp_path / "in/b.jsonl").write_bytes(rows)

    code, out = run(*books)
    assert code == 0 and re.search(r", resuming after 1\d units", out)
    assert snapshot(tmp_path / "out") == whole


def test_complete_groups_of_files_are_not_read_again(run, books, tmp_path, small_units, monkeypatch):
    assert run(*books)[0] == 0
    whole = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    opened, read = [], units.read_documents
    monkeypatch.setattr(units, "read_documents", lambda file, *args: opened.append(file.name) or read(file, *args))
    with monkeypatch.context() as patch:
        calls, real = itertools.count(1), units.write_atomic

        def stop_at_b(path, *args, **more):
            if "b.jsonl" in opened and next(calls) == 6:  # those of a.jsonl are written
                raise KeyboardInterrupt
            return real(path, *args, **more)

        patch.setattr(units, "write_atomic", stop_at_b)
        assert run(*books)[0] == 130
    opened.clear()
    assert run(*books)[0] == 0 and opened == ["b.jsonl"]
    assert snapshot(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["other arguments", "begun.json"])
def test_force_starts_an_unfinished_set_over(run, books, tmp_path, small_units, monkeypatch, damage):
    with monkeypatch.context() as patch:
        fail_after(patch, 13)
        assert run(*books, *(("--val-fraction", 0.5) if damage == "other arguments" else ()))[0] == 130
    if damage == "begun.json":
        (tmp_path / "out/text.partial/begun.json").write_text("{")
        code, out = run(*books)
        assert code == 2 and "begun.json cannot be read" in out and "--force" in out
    code, out = run(*books, "--force")
    assert code == 0 and "resuming" not in out
    forced = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    assert run(*books)[0] == 0
    assert snapshot(tmp_path / "out") == forced


@pytest.mark.parametrize("garbage", [b"", b"garbage", None])
def test_a_damaged_unit_is_made_anew(run, books, tmp_path, small_units, monkeypatch, garbage):
    assert run(*books)[0] == 0
    whole = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    with monkeypatch.context() as patch:
        fail_after(patch, 13)
        assert run(*books)[0] == 130
    unit = sorted((tmp_path / "out/text.partial").glob("*/*.npz"))[3]
    unit.write_bytes(unit.read_bytes()[:-30] if garbage is None else garbage)
    code, out = run(*books)
    assert code == 2 and f"{unit} was damaged" in out and "is removed: start again to make it anew" in out
    assert run(*books)[0] == 0
    assert snapshot(tmp_path / "out") == whole


def test_left_overs_of_an_older_format_are_replaced(run, books, tmp_path):
    """A folder without meta.json, which no version of the writer leaves, but a copy cut short does."""
    write_tree(tmp_path / "out/text", {"train-00999.bin": b"left over"})
    with pytest.raises(DataError, match="half-prepared, it has no meta.json"):
        read_meta(tmp_path / "out/text")
    assert run(*books)[0] == 0
    check_dataset(tmp_path / "out/text", 257)
    assert not (tmp_path / "out/text/train-00999.bin").exists()


@pytest.mark.parametrize("folder", ["text", "text.partial"])
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_other_peoples_files_are_not_removed(run, books, tmp_path, folder, force):
    (tmp_path / "out" / folder).mkdir(parents=True)
    (tmp_path / "out" / folder / "thesis.txt").write_text("precious")
    code, out = run(*books, *force)
    assert code == 2 and f"{folder} holds 'thesis.txt', which is no part of a data set: move it" in out
    assert (tmp_path / "out" / folder / "thesis.txt").read_text() == "precious"


def test_a_set_behind_a_link_is_replaced_where_it_lies(run, books, tmp_path):
    (tmp_path / "disk/text").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/text").symlink_to(tmp_path / "disk/text")
    assert run(*books)[0] == 0 and run(*books, "--val-fraction", 0.3, "--force")[0] == 0
    assert read_meta(tmp_path / "disk/text").source["val_fraction"] == 0.3
    assert (tmp_path / "out/text").is_symlink() and os.listdir(tmp_path / "disk") == ["text"]


def test_two_processes_at_once(run, books, tmp_path, small_units):
    (tmp_path / "out").mkdir()
    with Writer(tmp_path / "out/text", BYTES):
        other = subprocess.run(
            [sys.executable, "-m", "data.prepare", *map(str, books), "--tokenizer", "bytes", "--out", tmp_path / "out"],
            cwd=REPO_ROOT,
            capture_output=True,
            text=True,
        )
        assert (
            other.returncode == 2 and "another process is preparing this set: wait for it, or stop it" in other.stderr
        )
        code, out = run(*books, "--force")
        assert code == 2 and "another process is preparing this set" in out
    assert run(*books)[0] == 0


# the hub


REVISION = "5d1c"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the hub: files below hub.root/<repository>@<revision>/, the newest revision in hub.newest."""
    import fsspec
    import huggingface_hub

    hub = SimpleNamespace(root=tmp_path / "hub", newest=REVISION, asked=[], opened=[], reachable=True, cut={})

    class FakeHub(fsspec.AbstractFileSystem):
        protocol = "hf"
        cachable = False

        def ls(self, path, detail=True, **_):
            place = hub.root / self._strip_protocol(path)
            if not place.exists():
                raise FileNotFoundError(path)
            found = [
                {
                    "name": each.relative_to(hub.root).as_posix(),
                    "size": each.stat().st_size,
                    "type": "directory" if each.is_dir() else "file",
                }
                for each in (sorted(place.iterdir(), reverse=True) if place.is_dir() else [place])
            ]
            return found if detail else [each["name"] for each in found]

        def _open(self, path, mode="rb", **_):
            hub.opened.append((path.rpartition("/")[2], self.storage_options.get("block_size")))
            return Cut((hub.root / path).read_bytes(), hub.cut.get(path.rpartition("/")[2], 2**40))

    class Cut(io.BytesIO):
        """A connection that is lost where `end` is passed."""

        def __init__(self, data, end):
            super().__init__(data)
            self.end = end

        def read(self, *args):
            data = super().read(*args)
            if self.tell() > self.end:
                raise OSError("connection lost")
            return data

    def dataset_info(self, repo, revision=None, timeout=None):
        assert timeout <= 60
        hub.asked.append((repo, revision))
        if not hub.reachable:
            raise huggingface_hub.errors.OfflineModeIsEnabled("Cannot reach https://huggingface.co")
        return SimpleNamespace(sha=revision or hub.newest)

    real = fsspec.get_filesystem_class("hf")
    fsspec.register_implementation("hf", FakeHub, clobber=True)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    yield hub
    fsspec.register_implementation("hf", real, clobber=True)


def shared(hub, repo, names, texts, write, revision=REVISION) -> None:
    """Puts `texts`, shared out evenly, as the files `names` into the fake hub."""
    for i, name in enumerate(names):
        part = texts[len(texts) * i // len(names) : len(texts) * (i + 1) // len(names)]
        write(hub.root / "datasets" / f"{repo}@{revision}" / name, part)


def write_zst(path, texts, **more):
    write_tree(path.parent, {path.name: in_parts(zstd, jsonl(texts, **more))})


@pytest.mark.parametrize(
    ("corpus", "config", "repo", "names", "write"),
    [
        ("fineweb-edu", None, sources.FINEWEB, ["sample/10BT/000.parquet", "sample/10BT/001.parquet"], parquet),
        ("fineweb-edu", "default", sources.FINEWEB, ["data/CC-1/0.parquet", "data/CC-2/0.parquet"], parquet),
        ("arxiv", None, "EleutherAI/proof-pile-2", ["arxiv/train/a.jsonl.zst", "arxiv/train/b.jsonl.zst"], write_zst),
        (
            "pg19",
            None,
            "emozilla/pg19",
            ["data/train-00000-of-2-x.parquet", "data/train-00001-of-2-y.parquet"],
            parquet,
        ),
    ],
)
def test_a_corpus_of_the_hub(run, hub, tmp_path, corpus, config, repo, names, write):
    texts = corpus_texts()
    shared(hub, repo, names, texts, write)
    shared(hub, repo, [f"validation-{Path(name).name}" for name in names], ["no"], write)
    shared(hub, repo, [str(Path(name).parent / "test-0.parquet") for name in names[:1]], ["no"], write) if (
        corpus == "pg19"
    ) else None
    args = [corpus, "--val-fraction", 0.2, *(("--config", config) if config else ())]
    code, out = run(*args)
    assert code == 0 and "2 files" in out
    assert documents_of(tmp_path / "out" / corpus) == split_of(texts, 0.2)
    source = check_dataset(tmp_path / "out" / corpus, 257).source
    assert source["revision"] == REVISION and source["config"] == (config or next(iter(SOURCES[corpus].hub)))
    assert hub.asked == [(repo, None)]
    if write is write_zst:  # in one request from beginning to end
        assert hub.opened == [("a.jsonl.zst", 0), ("b.jsonl.zst", 0)]

    hub.reachable = False  # what is there needs no hub
    code, out = run(*args)
    assert code == 0 and "already there" in out
    code, out = run(*args, "--revision", "other")
    assert code == 2 and f"revision '{REVISION}', now 'other'" in out


def test_only_the_arxiv_rows_of_the_pile(run, hub, tmp_path):
    texts = corpus_texts()

    def write(path, texts):
        ours = jsonl(texts, meta={"pile_set_name": "ArXiv"}).splitlines()
        others = [
            b'{"text": "no", "meta": {"pile_set_name": "Github"}}',
            b'{"text": "no"}',
            b'{"text": "no", "meta": "ArXiv"}',
            b'{"meta": {}}',
        ]
        rows = itertools.chain(*zip(ours, itertools.cycle(others)))  # noqa: B905 (endless)
        write_tree(path.parent, {path.name: zstd(b"\n".join(rows))})

    shared(hub, "monology/pile-uncopyrighted", ["train/00.jsonl.zst", "train/01.jsonl.zst"], texts, write)
    assert run("arxiv", "--config", "pile", "--val-fraction", 0.2)[0] == 0
    assert documents_of(tmp_path / "out/arxiv") == split_of(texts, 0.2)
    meta = read_meta(tmp_path / "out/arxiv")
    assert (meta.source["empty"], meta.source["bad"]) == (2, 0)
    local = hub.root / f"datasets/monology/pile-uncopyrighted@{REVISION}/train"
    assert run("arxiv", "--config", "pile", "--val-fraction", 0.2, "--source", local, "--name", "copy")[0] == 0
    assert documents_of(tmp_path / "out/copy") == documents_of(tmp_path / "out/arxiv")


@pytest.mark.parametrize(("corpus", "write"), [("arxiv", write_zst), ("fineweb-edu", parquet)])
def test_connection_lost_it_resumes_with_the_same_revision(run, hub, tmp_path, small_units, corpus, write):
    repo, names = {
        "arxiv": ("EleutherAI/proof-pile-2", ["arxiv/train/a.jsonl.zst", "arxiv/train/b.jsonl.zst"]),
        "fineweb-edu": (sources.FINEWEB, ["sample/10BT/a.parquet", "sample/10BT/b.parquet"]),
    }[corpus]
    shared(hub, repo, names, corpus_texts(), write)
    args = (corpus, "--val-fraction", 0.2, "--shard-tokens", 999)
    assert run(*args)[0] == 0
    whole = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")

    name = names[1].rpartition("/")[2]
    hub.cut[name] = (hub.root / f"datasets/{repo}@{REVISION}" / names[1]).stat().st_size // 2
    code, out = run(*args)
    assert code == 2 and "start again to resume" in out and "connection lost" in out
    assert f"hf://datasets/{repo}@{REVISION}/{names[1]}: reading from the hub failed" in out
    hub.cut.clear()
    hub.asked.clear()
    hub.newest = "newer"  # the corpus moves on
    shared(hub, repo, names, ["another"] * 4, write, revision="newer")

    code, out = run(*args, "--revision", "newer")
    assert code == 2 and f"revision '{REVISION}', now 'newer'" in out
    code, out = run(*args)
    assert code == 0 and "resuming after" in out and hub.asked[-1] == (repo, REVISION)
    assert snapshot(tmp_path / "out") == whole
    assert read_meta(tmp_path / "out" / corpus).source["revision"] == REVISION


def test_a_revision_asked_for(run, hub, tmp_path):
    shared(hub, "emozilla/pg19", ["data/train-0.parquet"], corpus_texts(), parquet, revision="v1")
    assert run("pg19", "--revision", "v1", "--val-fraction", 0.2)[0] == 0
    assert read_meta(tmp_path / "out/pg19").source["revision"] == "v1"


def test_hub_out_of_reach(run, hub, tmp_path):
    hub.reachable = False
    code, out = run("fineweb-edu")
    assert code == 2 and "https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu is unreachable" in out
    assert "OfflineModeIsEnabled" in out and "HF_ENDPOINT" in out
    command = "hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include 'sample/10BT/*.parquet' --local-dir"
    assert command in out and "--source FOLDER" in out
    assert not (tmp_path / "out").exists()


def test_hub_without_such_files(run, hub, tmp_path):
    shared(hub, sources.FINEWEB, ["sample/10BT/000.parquet"], corpus_texts(), parquet)
    code, out = run("fineweb-edu", "--config", "sample-100BT")
    assert code == 2 and f"has no files 'sample/100BT/*.parquet' at revision {REVISION}: choose another --config" in out


def test_a_downloaded_copy_is_the_same_corpus(run, hub, tmp_path):
    texts, names = corpus_texts(), ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    shared(hub, sources.FINEWEB, names, texts, parquet)
    assert run("fineweb-edu", "--name", "a", "--val-fraction", 0.2)[0] == 0
    copy = hub.root / f"datasets/{sources.FINEWEB}@{REVISION}"
    assert run("fineweb-edu", "--name", "b", "--val-fraction", 0.2, "--source", copy)[0] == 0
    assert documents_of(tmp_path / "out/a") == documents_of(tmp_path / "out/b") == split_of(texts, 0.2)


# killed


class Stop:
    """An audit hook that stops this process before its k-th step that changes files below `folder`."""

    EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}

    def __init__(self, folder: Path, k: int, how: str):
        self.folder, self.left, self.how = str(folder), k, how

    def __call__(self, event: str, args: tuple) -> None:
        if event not in self.EVENTS or (self.how == "full" and event != "open"):
            return
        writes = event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and (event != "open" or str(args[0]).startswith(self.folder)):
            self.step()

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            print("STOPPED", flush=True)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt if self.how == "interrupt" else OSError(errno.ENOSPC, "No space left on device")


def start(argv: list[str], folder: Path, k: int = 0, how: str = "kill") -> tuple[int, str]:
    """Runs the command in a child process, stopped before its k-th step (0: not); (exit code, what it printed)."""
    with tempfile.TemporaryFile("w+") as printed:
        if (child := os.fork()) == 0:
            code = 99
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                stop = Stop(folder, k, how)
                sys.addaudithook(stop)
                os.fsync = lambda descriptor: stop.step()
                code = prepare.main(argv)
                sys.stdout.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        return code, printed.read()


def stop_everywhere(folder: Path, scenario: str, how: str) -> int:
    """Stops `scenario` before each of its steps in turn, starts it again, and demands the result of an undisturbed
    run. Returns the number of steps."""
    units.UNIT_BYTES = 150
    source, out, template = folder / "in", folder / "out", folder / "template"
    texts = [f"{i} green bottles hanging on the wall" for i in range(9)]
    write_tree(source, {"a.jsonl": jsonl(texts[:5]), "b.jsonl": jsonl(texts[5:])})
    begin = f"text --source {source} --tokenizer bytes --shard-tokens 60 --name set --out {out}".split()
    argv = [*begin, "--val-fraction", "0.4"]
    out.mkdir()
    if scenario == "replace":  # a whole set
        assert start([*begin, "--val-fraction", "0.6"], out)[0] == 0
        argv.append("--force")
    if scenario == "start over":  # an unfinished set
        assert start([*begin, "--val-fraction", "0.6"], out, 30)[0] == -signal.SIGKILL
        argv.append("--force")
    if scenario == "merge":
        for i in (1, 2):
            assert start([*argv, "--shard", f"{i}/2"], out)[0] == 0
        argv.append("--merge")
    shutil.copytree(out, template)
    code, printed = start(argv, out)
    assert code == 0, printed
    wanted = snapshot(out)
    assert set(map(os.path.dirname, wanted)) == {"set"} and len(wanted) > 4
    assert wanted != snapshot(template)

    def begin_anew():
        shutil.rmtree(out)
        shutil.copytree(template, out)

    def go_on(context):
        places = [out / f"set{end}" for end in ("", ".old", ".partial")]
        whole = [place for place in places if (place / "meta.json").exists()]
        for place in whole[:1]:  # what is in use; .old may be half removed where there is another
            check_dataset(place, 257)
        assert whole or scenario != "replace", f"{context}: the set that was there is lost"
        code, printed = start(argv, out)
        assert code == 0, f"{context}: {printed}"
        found = {name: data for name, data in snapshot(out).items() if scenario != "merge" or name.startswith("set/")}
        differing = [name for name in found | wanted if found.get(name) != wanted.get(name)]
        assert not differing, f"{context}: {differing}"

    for k in itertools.count(1):
        begin_anew()
        code, printed = start(argv, out, k, how)
        if "STOPPED" not in printed:
            break
        expected = {"kill": -signal.SIGKILL, "interrupt": 130, "full": 2}[how]
        assert code == expected, f"step {k}: {code} {printed}"
        if how == "full":
            assert "the disk is full" in printed and "start again to resume" in printed, printed
        go_on(f"step {k}: {printed}")
    steps = k - 1

    rng = random.Random(0)
    for round_ in range(6 if how == "kill" else 0):  # killed again and again
        begin_anew()
        for _ in range(100):
            code, printed = start(argv, out, rng.randint(1, steps), how)
            if code == 0:
                break
        go_on(f"round {round_}")
    print(steps)


@pytest.mark.parametrize(
    ("scenario", "how", "least"),
    [
        ("begin", "kill", 40),
        ("replace", "kill", 50),
        ("start over", "kill", 45),
        ("merge", "kill", 15),
        ("begin", "interrupt", 40),
        ("begin", "full", 30),
    ],
)
def test_stopped_at_any_step_nothing_is_lost(tmp_path, scenario, how, least):
    """In a process of its own, as it forks."""
    code, printed = Forked(stop_everywhere, tmp_path, scenario, how).wait(300)
    assert code == 0, printed[-3000:]
    assert int(printed.split()[-1]) >= least


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux' /proc")
def test_killed_at_random_moments(tmp_path):
    """The real command, or one of its workers: nothing is lost, and no worker outlives it."""
    rng = random.Random(0)
    rows = jsonl(f"{i}: " + "green bottles " * rng.randint(1, 2000) for i in range(2600))  # 36 MB: worth two workers
    (tmp_path / "a.jsonl.gz").write_bytes(in_parts(lambda data: gzip.compress(data, 1), rows, 2))
    (tmp_path / "b.jsonl").write_bytes(rows)
    out, partial = tmp_path / "out", tmp_path / "out/text.partial"
    source = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"]
    code = "import sys; from data import prepare, units; units.UNIT_BYTES = 2**18; sys.exit(prepare.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "text", "--source", *source, "--tokenizer", "bytes"]
    command += ["--shard-tokens", "500000", "--out", out, "--workers", "2"]

    def begin():  # not into a pipe: whoever outlives the command would keep it open
        with open(tmp_path / "printed", "wb") as printed:
            return subprocess.Popen(list(map(str, command)), cwd=REPO_ROOT, stdout=printed, stderr=printed)

    assert begin().wait(120) == 0
    assert ", 2 workers" in (tmp_path / "printed").read_text()
    whole = snapshot(out)
    shutil.rmtree(out)
    assert len(whole) > 100

    for what in ("the command", "a worker", "the command", "the command", "a worker", "joining", "joining"):
        process = begin()
        pattern = "*.bin" if what == "joining" else "units-*/*.npz"
        until = len(list(partial.glob(pattern))) + rng.randint(1, 60)
        while len(list(partial.glob(pattern))) < until and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        children = children_of(process.pid)
        os.kill(process.pid if what != "a worker" else children[-1], signal.SIGKILL)
        printed = (tmp_path / "printed").read_text()
        assert process.wait(60) == (2 if what == "a worker" else -signal.SIGKILL), printed
        assert not (out / "text").exists() and list(partial.glob("units-*/*.npz")), printed
        deadline = time.monotonic() + 10
        while outliving := [child for child in children if alive(child)]:
            if time.monotonic() > deadline:
                for child in outliving:
                    os.kill(child, signal.SIGKILL)
                raise AssertionError("workers outlive the command")
            time.sleep(0.01)
    assert begin().wait(120) == 0
    assert "resuming after" in (tmp_path / "printed").read_text()
    assert snapshot(out) == whole


@contextmanager
def at_most(seconds: int):
    def over(*_):
        raise AssertionError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_worker_is_killed(run, books, tmp_path, small_units, many_workers, monkeypatch):
    """By the kernel, for instance, when memory is short."""
    assert run(*books, "--workers", 2)[0] == 0
    whole = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    cuts, cut = itertools.count(1), units._cut_group

    def kill_one(*args):
        for unit in cut(*args):
            if next(cuts) == 11:
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
            yield unit

    with monkeypatch.context() as patch, at_most(60):
        patch.setattr(units, "_cut_group", kill_one)
        code, out = run(*books, "--workers", 2)
    assert code == 2 and "a worker process died" in out and "start again to resume, with fewer --workers" in out
    assert not (tmp_path / "out/text").exists() and not multiprocessing.active_children()
    code, out = run(*books, "--workers", 2)
    assert code == 0 and "resuming after" in out
    assert snapshot(tmp_path / "out") == whole


@pytest.mark.parametrize("where", ["a unit", "the first shard", "the last shard", "meta.json"])
def test_the_disk_is_full(run, books, tmp_path, small_units, monkeypatch, where):
    """A file takes no more: its flush fails, and so does its close."""
    assert run(*books)[0] == 0
    whole = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    last = max(name for name in whole if "train" in name).rpartition("/")[2]
    name = {"a unit": "00000000-00000007.npz", "the first shard": "train-00000.bin", "the last shard": last}.get(
        where, where
    )
    real = Path.open

    def open_(path, mode="r", *args, **more):
        file = real(path, mode, *args, **more)
        if path.name.startswith(name) and "w" in mode:
            file.write(b"what did fit")
            file.close()
            return real(Path("/dev/full"), mode, *args, **more)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        code, out = run(*books)
    assert code == 2 and "the disk is full" in out and "make room and start again to resume" in out
    assert re.search(r"\(\d+\.\d GB are free\)", out)
    left = {path.name for path in (tmp_path / "out/text.partial").iterdir()}
    assert {re.sub("-.*", "", name) for name in left} == {"begun.json", "lock", "units"}
    assert not list((tmp_path / "out").rglob("*.tmp"))

    code, out = run(*books)
    assert code == 0 and "resuming after" in out
    assert snapshot(tmp_path / "out") == whole


def test_other_errors_of_the_system_name_the_file(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/text.partial").write_text("in the way")
    (tmp_path / "in.jsonl").write_bytes(jsonl(["one", "two"]))
    code, out = run("text", "--source", tmp_path / "in.jsonl")
    assert code == 2 and "out/text.partial" in out


# parts


@pytest.fixture
def five_files(tmp_path) -> tuple:
    texts = corpus_texts()
    files = {f"{i}.jsonl": jsonl(texts[8 * i : 8 * i + 8]) for i in range(5)}
    return "text", "--source", write_tree(tmp_path / "in", files), "--val-fraction", 0.2, "--shard-tokens", 999


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_parts_make_the_set_of_a_single_run(run, five_files, tmp_path, n):
    assert run(*five_files, "--name", "single")[0] == 0
    for i in range(1, n + 1):
        code, _ = run(*five_files, "--name", "set", "--shard", f"{i}/{n}")
        assert code == 0
        assert run(*five_files, "--name", "set", "--shard", f"{i}/{n}")[1].startswith("already there")
        code, out = run(f"set-{i}-of-{n}", main=verify.main)
        assert code == 0 and f"set-{i}-of-{n}: intact" in out
    code, out = run(*five_files, "--name", "set", "--merge")
    assert code == 0 and "merged: " in out
    assert sorted(os.listdir(tmp_path / "out")) == ["set", "single"]
    assert documents_of(tmp_path / "out/set") == documents_of(tmp_path / "out/single") == split_of(corpus_texts(), 0.2)
    single, merged = (check_dataset(tmp_path / "out" / name, 257) for name in ("single", "set"))
    assert merged.source == single.source and merged.source["empty"] == 2 and merged.tokenizer == single.tokenizer
    assert merged.splits == single.splits  # to the byte
    assert run("set", main=verify.main)[0] == 0

    code, out = run(*five_files, "--name", "set", "--merge")
    assert code == 0 and out.startswith("already there")
    code, out = run(*five_files, "--name", "set")  # the whole of it
    assert code == 0 and out.startswith("already there")


def test_parts_of_gpt2_carry_its_ranks(run, five_files, tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokenizer.RANKS_SHA256", hashlib.sha256(FAKE_RANKS).hexdigest())
    (tmp_path / "ranks").write_bytes(FAKE_RANKS)
    for i in (1, 2):
        assert run(*five_files, "--tokenizer", "gpt2", "--bpe-ranks", tmp_path / "ranks", "--shard", f"{i}/2")[0] == 0
    assert run(*five_files, "--merge")[0] == 0
    assert documents_of(tmp_path / "out/text") == split_of(corpus_texts(), 0.2)


def test_more_parts_than_files(run, five_files, tmp_path):
    code, out = run(*five_files, "--shard", "1/6")
    assert (
        code == 2
        and "5 files cannot be split into 6 parts, as a file belongs to one part: use --shard 1/5 at most" in out
    )
    assert not (tmp_path / "out").exists()


def test_parts_missing_or_unfinished(run, five_files, tmp_path):
    code, out = run(*five_files, "--merge")
    assert code == 2 and "has no parts of text: prepare them with --shard 1/N to N/N" in out
    assert run(*five_files, "--shard", "2/4")[0] == 0
    assert run(*five_files, "--shard", "3/4")[0] == 0
    (tmp_path / "out/text-3-of-4").rename(tmp_path / "out/text-3-of-4.partial")
    before = snapshot(tmp_path / "out")
    code, out = run(*five_files, "--merge")
    assert code == 2 and "parts are missing or unfinished: prepare --shard 1/4, --shard 3/4, --shard 4/4" in out
    assert snapshot(tmp_path / "out") == before


def test_parts_of_different_numbers(run, five_files, tmp_path):
    for part in ("1/2", "2/2", "2/3"):
        assert run(*five_files, "--shard", part)[0] == 0
    code, out = run(*five_files, "--merge")
    assert code == 2 and "parts of different numbers" in out and "text-1-of-2, text-2-of-2" in out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--val-fraction", 0.5), "val_fraction 0.2, now 0.5"),
        (("--shard-tokens", 500), "shard_tokens 999, now 500"),
        (("--source", "in/0.jsonl", "in/1.jsonl"), "inputs "),
        (("--tokenizer", "gpt2"), "tokenizer 'bytes', now 'gpt2'"),
    ],
)
def test_parts_of_different_arguments(run, five_files, tmp_path, monkeypatch, changed, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.tokenizer.RANKS_SHA256", hashlib.sha256(FAKE_RANKS).hexdigest())
    (tmp_path / "ranks").write_bytes(FAKE_RANKS)
    assert run(*five_files, "--shard", "1/2")[0] == 0
    assert run(*five_files, *changed, "--bpe-ranks", "ranks", "--shard", "2/2")[0] == 0
    code, out = run(*five_files, "--merge")
    assert code == 2 and "were made with different arguments" in out and message in out
    assert not (tmp_path / "out/text").exists()


def test_a_damaged_part_is_not_merged(run, five_files, tmp_path):
    for i in (1, 2):
        assert run(*five_files, "--shard", f"{i}/2")[0] == 0
    damaged = tmp_path / "out/text-2-of-2/train-00000.bin"
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    code, out = run(*five_files, "--merge")
    assert code == 2 and "text-2-of-2/train-00000.bin: expected sha256" in out and "--shard 2/2" in out
    assert not (tmp_path / "out/text").exists()


def test_merge_beside_a_set_or_an_unfinished_one(run, five_files, tmp_path, monkeypatch, small_units):
    with monkeypatch.context() as patch:
        fail_after(patch, 5)
        assert run(*five_files, "--name", "set")[0] == 130
    for i in (1, 2):
        assert run(*five_files, "--name", "set", "--shard", f"{i}/2")[0] == 0
    code, out = run(*five_files, "--name", "set", "--merge")
    assert code == 2 and "set.partial is an unfinished set: finish it, or replace it with --force" in out
    assert run(*five_files, "--name", "set")[0] == 0
    whole = snapshot(tmp_path / "out/set")
    code, out = run(*five_files, "--name", "set", "--merge")
    assert code == 0 and "already there" in out and "--force" in out
    assert snapshot(tmp_path / "out/set") == whole and (tmp_path / "out/set-1-of-2").exists()
    assert run(*five_files, "--name", "set", "--merge", "--force")[0] == 0
    assert os.listdir(tmp_path / "out") == ["set"] and "--merge" in read_meta(tmp_path / "out/set").prepare
    assert documents_of(tmp_path / "out/set") == split_of(corpus_texts(), 0.2)


def test_parts_without_any_validation(run, five_files, tmp_path):
    lowest = min(map(place, filter(str.strip, corpus_texts())))
    for i in (1, 2):
        assert run(*five_files, "--val-fraction", lowest / 2, "--shard", f"{i}/2")[0] == 0
    code, out = run(*five_files, "--merge")
    assert code == 2 and "no part of text has a val document: prepare them with a larger --val-fraction" in out


def test_a_part_may_lack_a_split(run, tmp_path):
    for i in range(12):
        (tmp_path / f"{i:02d}.txt").write_text(f"the text of file {i}" * bool(i))  # one is empty
    argv = ("text", "--source", *sorted(tmp_path.glob("*.txt")), "--val-fraction", 0.3)
    for i in range(1, 13):
        assert run(*argv, "--shard", f"{i}/12")[0] == 0
    assert run(*argv, "--merge")[0] == 0
    merged = documents_of(tmp_path / "out/text")
    assert run(*argv, "--name", "whole")[0] == 0
    assert merged == documents_of(tmp_path / "out/whole") and len(merged["val"]) > 1
    assert read_meta(tmp_path / "out/text").prepare.count("--shard") == 12  # what makes it again


# bad input


ROWS = jsonl(f"row {i}" for i in range(30))
TEXT_LIKE = b"".join(f"word {i} of a text; ".encode() for i in range(400))


def bad_line(line: bytes) -> dict[str, bytes]:
    return {"in.jsonl": ROWS[: len(ROWS) // 2].rpartition(b"\n")[0] + b"\n" + line + b"\n" + ROWS}


LINE = ROWS[: len(ROWS) // 2].count(b"\n") + 1
BAD_DOCUMENTS = {
    "not JSON": (bad_line(b'{"text"'), rf"in.jsonl: line {LINE} is not JSON \(Expecting.*correct or remove it"),
    "deep JSON": (bad_line(b"[" * 10**5), rf"in.jsonl: line {LINE} is not JSON"),
    "huge number": (bad_line(b'{"text": ' + b"1" * 10**4 + b"}"), rf"in.jsonl: line {LINE} "),
    "an array": (bad_line(b'["a"]'), rf"line {LINE} is a list, expected a JSON object with a field 'text'"),
    "null": (bad_line(b"null"), rf"line {LINE} is a NoneType, expected a JSON object"),
    "no such field": (
        bad_line(b'{"body": "a", "id": 3}'),
        rf"line {LINE} has no field 'text'; it has 'body', 'id': choose one with --text-field",
    ),
    "no field": (bad_line(b"{}"), rf"line {LINE} has no field 'text'; it has none at all"),
    "number": (bad_line(b'{"text": 3}'), rf"line {LINE} has a int in field 'text', expected a string.*--text-field"),
    "list": (bad_line(b'{"text": ["a"]}'), rf"line {LINE} has a list in field 'text', expected a string"),
    "latin1 in JSON": (bad_line(b'{"text": "\xe9"}'), rf"in.jsonl: line {LINE} is not UTF-8 at byte 10: .*iconv"),
    "UTF-16": (bad_line('{"text": "a"}'.encode("utf-16")), rf"in.jsonl: line {LINE} is not UTF-8 at byte 0"),
    "latin1": ({"in/a.jsonl": ROWS, "in/b.txt": b"abc\xe9"}, "in/b.txt is not UTF-8 at byte 3: convert it with iconv"),
    "latin1 in gz": ({"in/a.jsonl": ROWS, "in/b.txt.gz": gzip.compress(b"\xe9")}, "b.txt.gz is not UTF-8 at byte 0"),
    "latin1 in tar": ({"in/a.jsonl": ROWS, "in/b.tar": tar({"m.txt": b"\xe9"})}, "b.tar: m.txt is not UTF-8 at byte 0"),
}


@pytest.mark.parametrize("case", BAD_DOCUMENTS)
def test_bad_documents(run, tmp_path, case):
    files, message = BAD_DOCUMENTS[case]
    source = write_tree(tmp_path, files) / next(iter(files)).partition("/")[0]
    code, out = run("text", "--source", source, "--val-fraction", 0.3)
    assert code == 2 and re.search(message, out) and "leave such documents out with --skip-bad" in out
    assert not (tmp_path / "out/text").exists()

    code, out = run("text", "--source", source, "--val-fraction", 0.3, "--skip-bad")
    assert code == 0 and "left out: 0 empty documents, 1 that cannot be read" in out and re.search(message, out)
    meta = check_dataset(tmp_path / "out/text", 257)
    assert (meta.source["bad"], meta.source["empty"]) == (1, 0)
    wanted = [json.loads(row)["text"] for row in ROWS.splitlines()]
    wanted = wanted[: LINE - 1] + wanted if "in.jsonl" in files else wanted
    assert documents_of(tmp_path / "out/text") == split_of(wanted, 0.3)


def test_links_in_a_tar_are_no_documents(run, tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo(f"{kind.decode()}.txt")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    write_tree(tmp_path / "in", {"a.jsonl": ROWS, "b.tar": stream.getvalue()})
    assert run("text", "--source", tmp_path / "in", "--val-fraction", 0.3)[0] == 0
    assert sum(map(len, documents_of(tmp_path / "out/text").values())) == 30


def test_many_bad_documents_are_counted_and_three_shown(run, tmp_path, small_units):
    rows = ROWS.replace(b'"text": "row 1', b'"text": {"row 1')
    (tmp_path / "in.jsonl").write_bytes(rows + jsonl(BLANK))
    code, out = run("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.3, "--skip-bad")
    assert code == 0 and "left out: 3 empty documents, 11 that cannot be read" in out
    assert re.findall(r"line (\d+) is not JSON", out) == ["2", "11", "12"]
    assert (read_meta(tmp_path / "out/text").source["bad"], read_meta(tmp_path / "out/text").source["empty"]) == (11, 3)


def test_after_a_bad_line_skip_bad_resumes(run, tmp_path, small_units):
    texts = corpus_texts()
    rows = jsonl(texts[:35]) + b"not JSON\n" + jsonl(texts[35:])
    (tmp_path / "in.jsonl").write_bytes(rows)
    args = ("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.3, "--shard-tokens", 999)
    code, out = run(*args)
    assert code == 2 and "line 36 is not JSON" in out
    code, out = run(*args, "--skip-bad")
    assert code == 0 and int(re.search(r", resuming after (\d+) units", out)[1]) > 10
    assert (read_meta(tmp_path / "out/text").source["bad"], read_meta(tmp_path / "out/text").source["empty"]) == (1, 2)
    resumed = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    assert run(*args, "--skip-bad")[0] == 0
    assert snapshot(tmp_path / "out") == resumed
    assert documents_of(tmp_path / "out/text") == split_of(texts, 0.3)


def test_parquet_without_the_text(run, tmp_path):
    parquet(tmp_path / "in.parquet", ["a"] * 20)
    args = ("text", "--source", tmp_path / "in.parquet", "--text-field")
    code, out = run(*args, "body")
    assert code == 2 and "in.parquet has no field 'body'; it has 'id', 'text': choose one with --text-field" in out
    code, out = run(*args, "id", "--skip-bad")
    assert code == 2 and "field 'id' is of type int64, expected string: choose another --text-field" in out


def parquet_bytes(texts) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        parquet(Path(folder, "a.parquet"), texts)
        return Path(folder, "a.parquet").read_bytes()


def garbled(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(b ^ 0xA5 for b in data[at : at + 64]) + data[at + 64 :]


def damaged_files() -> dict[str, tuple[str, bytes]]:
    rows = [f"row {i}: {i * 7919 % 1000}" for i in range(300)]
    archive = tar({f"{i}.txt": row.encode() * 60 for i, row in enumerate(rows[:20])})
    whole = {
        "in.jsonl.gz": gzip.compress(jsonl(rows)),
        "in.jsonl.zst": zstd(jsonl(rows)),
        "in.txt.gz": gzip.compress(jsonl(rows)),
        "in.tar": archive,
        "in.tar.gz": gzip.compress(archive),
        "in.tar.zst": zstd(archive),
        "in.parquet": parquet_bytes(rows),
    }
    cases = {}
    for name, data in whole.items():
        cases[f"{name} is garbage"] = name, b"garbage" * 200
        cases[f"{name} is of no bytes"] = name, b""
        cases[f"{name} is cut in the middle"] = name, data[: len(data) // 2 + 100]
        cases[f"{name} has its begin alone"] = name, data[:15]
        if name != "in.parquet":  # there the other column begins
            cases[f"{name} has garbage at its begin"] = name, garbled(data, 0)
        if name.endswith("gz"):  # Zstandard's frames need not have a check sum
            cases[f"{name} has garbage in the middle"] = name, garbled(data, len(data) // 2)
        if name.endswith(("gz", "zst")):
            cases[f"{name} lacks its last byte"] = name, data[:-1]
            cases[f"{name} has garbage after its end"] = name, data + b"garbage"
            cases[f"{name} has its second part cut"] = name, data + data[: len(data) // 2]
    # what stands at 1024 bytes is the header of the second member of three
    three = tar({f"{i}.txt": b"x" * 512 for i in range(3)})
    cases["in.tar has garbage for a header"] = "in.tar", garbled(three, 1024)
    cases["in.tar is cut in a header"] = "in.tar", three[:1100]
    cases["in.tar is cut between two members"] = "in.tar", three[:1024]
    cases["in.tar is cut in a member"] = "in.tar", three[:1600]
    cases["in.parquet has garbage in a page"] = "in.parquet", garbled(whole["in.parquet"], 100)
    return cases


DAMAGED = damaged_files()


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(run, tmp_path, case):
    """A damaged file is never taken for a whole one, not with --skip-bad either."""
    name, data = DAMAGED[case]
    write_tree(tmp_path / "in", {"a.jsonl": ROWS, name: data})
    for more in ((), ("--skip-bad",)):
        code, out = run("text", "--source", tmp_path / "in", "--val-fraction", 0.3, *more)
        assert code == 2 and re.search(rf"in/{name}: damaged or cut short \(.+\): fetch it again", out)
        assert "Traceback" not in out and not (tmp_path / "out/text").exists()


def test_a_parquet_file_without_rows(run, tmp_path):
    """As a writer that filters leaves them behind."""
    parquet(tmp_path / "in/a.parquet", [])
    parquet(tmp_path / "in/b.parquet", ["one", "two", "three", "four"])
    code, out = run("text", "--source", tmp_path / "in", "--val-fraction", 0.5)
    assert code == 0, out
    assert documents_of(tmp_path / "out/text") == split_of(["one", "two", "three", "four"], 0.5)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.tar"])
def test_files_without_documents_are_no_error_beside_others(run, tmp_path, name):
    write_tree(tmp_path / "in", {name: tar({}) if name == "a.tar" else b"", "b.jsonl": ROWS})
    assert run("text", "--source", tmp_path / "in", "--val-fraction", 0.3)[0] == 0
    assert sum(map(len, documents_of(tmp_path / "out/text").values())) == 30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", r"a.pdf: not a file of a known kind \(.txt .md .jsonl.*\): rename or convert it"),
        ("folder/a.pdf", r"folder: no file of a known kind \(.txt .*name another --source"),
        ("absent", r"absent: no such file or folder: correct --source"),
    ],
)
def test_sources_that_are_none(run, tmp_path, name, message):
    if name != "absent":
        write_tree(tmp_path, {name: b"a"})
    code, out = run("text", "--source", tmp_path / name.partition("/")[0])
    assert code == 2 and re.search(message, out) and not (tmp_path / "out").exists()


# small corpora


def test_advice_for_a_corpus_too_small_can_be_followed(run, tmp_path):
    for i in range(30):
        texts = [f"text {i}", f"another {i}"]
        (tmp_path / "in.jsonl").write_bytes(jsonl(texts))
        args = ("text", "--source", tmp_path / "in.jsonl", "--name", f"set{i}", "--val-fraction")
        code, out = run(*args, 1e-6)
        assert code == 2 and "the corpus is too small: none of its documents fell into validation" in out
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob(f"set{i}*"))
        advice = re.search(r"--val-fraction (\S+) is the least that gives it one", out)[1]
        lowest = min(map(place, texts))
        assert lowest < float(advice) < lowest * 1.02
        code, out = run(*args, advice)
        assert code == 0, f"{texts} {advice}: {out}"
        assert documents_of(tmp_path / "out" / f"set{i}")["val"] == [min(texts, key=place)]


def test_one_document(run, tmp_path):
    """No --val-fraction helps: what does is said, and does."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(TEXT_LIKE)
    code, out = run("text", "--source", tmp_path / "in")
    assert code == 2 and "there is one document to read" in out
    command = re.search(r"split -n l/100 --additional-suffix=.txt FILE part-", out)[0]
    (tmp_path / "parts").mkdir()
    lines = b"".join(b"line %d of a text\n" % i for i in range(2000))
    (tmp_path / "in/a.txt").write_bytes(lines)
    subprocess.run(command.replace("FILE", "../in/a.txt").split(), cwd=tmp_path / "parts", check=True)
    code, out = run("text", "--source", tmp_path / "parts")
    assert code == 0
    found = documents_of(tmp_path / "out/text")
    assert len(found["train"]) + len(found["val"]) == 100
    assert len("".join(found["train"] + found["val"])) == len(lines)


def test_everything_in_validation(run, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a", "b"]))
    code, out = run("text", "--source", tmp_path / "in.jsonl", "--val-fraction", "0.999999")
    assert code == 2 and "all documents fell into validation: lower --val-fraction (now 0.999999)" in out
    assert not list((tmp_path / "out").iterdir())
    assert run("text", "--source", tmp_path / "in.jsonl", "--val-fraction", (place("a") + place("b")) / 2)[0] == 0


@pytest.mark.parametrize(("rows", "counts"), [(b"", "0 empty, 0 bad"), (jsonl(BLANK) + b"{}\n", "3 empty, 1 bad")])
def test_no_documents(run, tmp_path, rows, counts):
    (tmp_path / "in.jsonl").write_bytes(rows)
    code, out = run("text", "--source", tmp_path / "in.jsonl", "--skip-bad")
    assert code == 2 and f"no documents to read ({counts}): name other files" in out
    assert not list((tmp_path / "out").iterdir())


def test_a_corpus_too_small_leaves_nothing(run, tmp_path, small_units):
    """So that other arguments may be tried."""
    (tmp_path / "in.jsonl").write_bytes(jsonl(corpus_texts()))
    code, out = run("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 1e-6)
    assert code == 2 and "too small" in out and not list((tmp_path / "out").iterdir())
    assert run("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.5)[0] == 0


# arguments


def test_list_names_every_corpus_with_its_licence(run):
    code, out = run("--list")
    assert code == 0
    parts = dict(zip(SOURCES, re.split("^(?=[a-z0-9-]+: )", out, flags=re.M)[1:], strict=True))
    for name, part in parts.items():
        assert part.startswith(f"{name}: {SOURCES[name].about}\n")
        for config, hub in SOURCES[name].hub.items():
            row = part[part.index(f"--config {config}") :]
            assert hub.repo in row and hub.files in row and f"{hub.download}; {hub.tokens} tokens" in row
            assert f"licence: {hub.licence}" in row and hub.licence
    assert "withdrawn for copyright" in parts["books3"] and "pg19" in parts["books3"]
    assert "PSF licence" in parts["stdlib"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], r"which corpus\? One of stdlib, text, fineweb-edu.*--list describes"),
        (["stdlbi"], "invalid choice: 'stdlbi'.*stdlib"),
        (["text"], "text needs files: add --source"),
        (["books3"], r"books3 was withdrawn from the hub for copyright.*--source.*pg19"),
        (["books3", "--source", "absent"], "absent: no such file or folder"),
        (["text", "--source", "absent.txt"], "absent.txt: no such file or folder"),
        (["stdlib", "--source", "x"], "takes no --source"),
        (["text", "--source", "x", "--roots", "x"], "--roots belongs to the corpus stdlib: text takes --source"),
        (
            ["fineweb-edu", "--config", "sample-1BT"],
            "has no --config sample-1BT: choose one of sample-10BT, sample-100BT",
        ),
        (["stdlib", "--config", "default"], "stdlib has no --config default: leave it out"),
        (["pg19", "--revision", "main", "--source", "x"], "--revision belongs to a data set on the hub"),
        (["stdlib", "--revision", "main"], "--revision belongs to a data set on the hub, and these files are local"),
        (["stdlib", "--name", "../x"], "only letters, digits"),
        (["stdlib", "--name", "a/b"], "only letters, digits"),
        (["stdlib", "--name", ".x"], "only letters, digits"),
        (["stdlib", "--name", "x\n"], "only letters, digits"),
        (["stdlib", "--name", "x.partial"], "no .partial or .old at the end"),
        (["stdlib", "--name", "x.old"], "no .partial or .old at the end"),
        (["text", "--source", "x", "--name", "stdlib"], "--name stdlib is the name of a corpus"),
        (["stdlib", "--val-fraction", "1.5"], "1.5: expected a number between 0 and 1"),
        (["stdlib", "--val-fraction", "0"], "0.0: expected a number between 0 and 1"),
        (["stdlib", "--val-fraction", "nan"], "nan: expected a number between 0 and 1"),
        (["stdlib", "--val-fraction", "few"], "invalid float value: 'few'"),
        (["stdlib", "--shard-tokens", "0"], "--shard-tokens 0: expected at least 1"),
        (["stdlib", "--workers", "0"], "--workers 0: expected at least 1"),
        (["stdlib", "--tokenizer", "gpt2", "--bpe-ranks", "absent"], "absent: cannot read GPT-2's BPE file"),
        (["stdlib", "--shard", "0/2"], "--shard 0/2: expected I/N with I from 1 to N, for instance 1/4"),
        (["stdlib", "--shard", "3/2"], "--shard 3/2: expected I/N"),
        (["stdlib", "--shard", "x"], "--shard x: expected I/N"),
        (["stdlib", "--shard", "1/2/3"], "--shard 1/2/3: expected I/N"),
        (["stdlib", "--shard", "1/2", "--merge"], "--shard prepares one part, --merge joins all"),
    ],
)
def test_bad_arguments(run, tmp_path, args, message):
    code, out = run(*args)
    assert code == 2
    assert re.search(message, out, re.S)
    assert not (tmp_path / "out").exists()


def test_books3_from_a_tar_of_ones_own(run, tmp_path):
    texts = [text for text in corpus_texts() if text.strip()]
    archive = tar({"books3/": b""} | {f"books3/the-eye/{i}.epub.txt": text.encode() for i, text in enumerate(texts)})
    (tmp_path / "books3.tar.gz").write_bytes(gzip.compress(archive))
    assert run("books3", "--source", tmp_path / "books3.tar.gz", "--val-fraction", 0.2)[0] == 0
    assert documents_of(tmp_path / "out/books3") == split_of(texts, 0.2)


# verify


@pytest.fixture
def whole(run, books, tmp_path) -> Path:
    assert run(*books, "--name", "whole")[0] == 0
    return tmp_path / "out/whole"


def test_verify_prints_what_is_there(run, whole):
    code, out = run("whole", main=verify.main)
    assert code == 0 and "whole: intact. Tokenizer bytes, made by: python -m data.prepare text --source" in out
    for split, texts in documents_of(whole).items():
        tokens = sum(len(text.encode()) + 1 for text in texts)
        assert f"{split}: {tokens:,} tokens, {len(texts):,} documents" in out
        begin = "".join(f"{text}<|endoftext|>" for text in texts).encode()[:40].decode(errors="ignore")
        assert f"begins: {begin!r}"[:-1] in out


def edit(path: Path, position: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[position : position + len(value)] = value
    path.write_bytes(data)


def forge_hashes(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    for split in meta["splits"].values():
        for shard in split["files"]:
            shard["sha256"] = hashlib.sha256((folder / shard["name"]).read_bytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))


def test_verify_finds_a_file_cut_short(run, whole):
    os.truncate(whole / "train-00001.bin", 100)
    code, out = run("whole", main=verify.main)
    assert code == 2 and re.search(r"train-00001.bin: expected 1998 bytes \(999 tokens\), found 100.*--force", out)
    (whole / "train-00001.bin").unlink()
    code, out = run("whole", main=verify.main)
    assert code == 2 and "train-00001.bin: missing, expected 999 tokens" in out


def test_verify_finds_flipped_bits_in_every_file(run, whole):
    good = (whole / "train-00001.bin").read_bytes()
    edit(whole / "train-00001.bin", 1000, bytes([good[1000] ^ 1]))
    edit(whole / "val-00000.bin", 0, b"?")
    code, out = run("whole", main=verify.main)
    assert code == 2 and "whole is damaged:" in out and "Prepare it again: python -m data.prepare text" in out
    assert re.findall(r"(\S+): expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}", out) == [
        "train-00001.bin",
        "val-00000.bin",
    ]


@pytest.mark.parametrize("chunk", [2**22, 100])
def test_verify_finds_ids_beyond_the_vocabulary(run, whole, monkeypatch, chunk):
    monkeypatch.setattr(bins, "CHUNK_BYTES", chunk)
    edit(whole / "train-00001.bin", 2 * 517, (257).to_bytes(2, "little"))
    edit(whole / "train-00001.bin", 2 * 800, (65535).to_bytes(2, "little"))
    forge_hashes(whole)
    code, out = run("whole", main=verify.main)
    assert code == 2 and "train-00001.bin: id 257 at token 517, expected below 257" in out
    assert "sha256" not in out


def test_verify_counts_documents(run, whole):
    first = documents_of(whole)["train"][0]
    edit(whole / "train-00000.bin", 2 * len(first.encode()), b"a\0")  # one end of text less
    forge_hashes(whole)
    documents = read_meta(whole).splits["train"].documents
    code, out = run("whole", main=verify.main)
    assert code == 2 and f"train: {documents - 1} end-of-text tokens, meta.json says {documents} documents" in out


def test_verify_without_a_set(run, whole):
    code, out = run("absent", main=verify.main)
    assert (
        code == 2
        and "absent: no such data set. Prepare it: python -m data.prepare text --source FILES --name absent" in out
    )


# memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux' /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Peak of the reading and writing process, and of its workers, for 2 MB and for 60 MB of text."""
    texts = [f"{i}: " + "green bottles " * 700 for i in range(6000)]  # 10 kB each
    for name, part in {"small": texts[:200], "large": texts}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rows.jsonl.gz").write_bytes(gzip.compress(jsonl(part), 1))
        parquet(folder / "rows.parquet", part, rows_a_group=500, compression="none", use_dictionary=False)
        (folder / "texts.tar").write_bytes(tar({f"{i}.txt": text.encode() for i, text in enumerate(part)}))
    code = f"""
import resource, sys
from pathlib import Path
from data import prepare, units

units.UNIT_BYTES = 2**20

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024

for file in ("rows.jsonl.gz", "texts.tar", "rows.parquet"):
    peaks = []
    for size in ("small", "large"):
        name = size + "-" + file
        args = ["--source", f"{tmp_path}/" + size + "/" + file, "--out", f"{tmp_path}/out", "--name", name]
        assert prepare.main(["text", "--tokenizer", "bytes", "--workers", "1", *args]) == 0
        peaks.append(peak())
    print(file, *peaks, file=sys.stderr)
    print(peaks[1] - peaks[0])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    growth = [int(line) for line in done.stdout.splitlines() if line.isdigit() or line.startswith("-")]
    assert len(growth) == 3 and max(growth) < 40, done.stderr  # MB; the ids alone are 120
