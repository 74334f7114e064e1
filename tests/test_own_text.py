"""data/: a text of one's own, in one file or a few: how validation is split off, and sources that
would vanish.
"""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from corpora import BYTES, REPO_ROOT, documents_of, jsonl, parquet, tar, write_tree, zstd

from configure import load
from data import encode, prepare, verify
from data.bins import check_dataset, open_tokens, read_meta
from data.sources import local_inputs

pytest_plugins = ["corpora"]  # its fixtures
LINES = "".join(f"line {i} of a naïve text\n" for i in range(100))


@pytest.fixture
def run(run, monkeypatch):
    """The command as it is, few documents included."""
    monkeypatch.setattr(encode, "FEW_DOCUMENTS", 10)
    return run


def texts_of(folder: Path) -> dict[str, str]:
    tokens = {name: open_tokens(folder, name) for name in ("train", "val")}
    return {name: BYTES.decode(each.read(0, len(each))) for name, each in tokens.items()}


@pytest.mark.parametrize(
    "name", ["input.txt", "input.md.gz", "input.jsonl", "input.parquet", "input.tar"]
)
def test_one_document_is_cut(run, tmp_path, name):
    parquet(tmp_path / "input.parquet", [LINES])
    text = LINES.encode()
    files = {
        "input.txt": text,
        "input.md.gz": gzip.compress(text),
        "input.tar": tar({"a.txt": text}),
    }
    write_tree(tmp_path, files | {"input.jsonl": jsonl([LINES])})
    out = run("text", "--source", tmp_path / name)
    assert (
        "warning: 1 document, too few to set some aside: validation is the last 5% of each" in out
    )
    cut = int(0.95 * len(LINES))
    # and no end-of-text
    assert texts_of(tmp_path / "out/text") == {"train": LINES[:cut], "val": LINES[cut:]}
    assert check_dataset(tmp_path / "out/text", 257).source["split"] == "ends"
    run("text", main=verify.main)
    out = run("text", "--source", tmp_path / name)
    assert "already there" in out and "warning" not in out


def test_a_few_documents_are_cut_each(run, tmp_path, small_batches, many_workers):
    """With end-of-text between the parts of different documents, in the order of the documents."""
    texts = [f"{i} {LINES}"[: 200 * i] for i in range(1, 10)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", *texts[:5], " "]))
    (tmp_path / "b.jsonl").write_bytes(jsonl(texts[5:]))
    out = run(
        "text", "--source", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--val-fraction", 0.25
    )
    assert "warning: 9 documents" in out and "2 empty documents" in out
    cuts = [150 * i for i in range(1, 10)]
    assert texts_of(tmp_path / "out/text") == {
        "train": "<|endoftext|>".join(text[:cut] for text, cut in zip(texts, cuts, strict=True)),
        "val": "<|endoftext|>".join(text[cut:] for text, cut in zip(texts, cuts, strict=True)),
    }
    assert [split.documents for split in read_meta(tmp_path / "out/text").splits.values()] == [9, 9]
    run("text", main=verify.main)


def test_very_many_documents_are_not_cut(run, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl(f"text {i}" for i in range(1000)))
    args = ("text", "--source", tmp_path / "in.jsonl", "--val-fraction")
    out = run(*args, 1e-5, code=2)
    assert "none of 1,000 documents fell into validation at --val-fraction 1e-05" in out
    assert not (tmp_path / "out").exists()  # nothing was tokenized
    run(*args, re.search(r"--val-fraction (\S+) makes about 10 of them validation", out)[1])
    assert 5 <= read_meta(tmp_path / "out/text").splits["val"].documents <= 20


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (b" \n", "", r"no documents to read.* with --source"),
        (b"\xff", "--skip-bad", r"no documents to read.* with --source"),
        (b"x", "--val-source empty.txt", r"no documents to read.* with --val-source"),
        (b"x", "--val-source in/a.txt", "in/a.txt is in --source and in --val-source: take it out"),
        (b"x", "--val-source in --val-fraction 0.1", "--val-source replaces --val-fraction"),
    ],
)
def test_what_cannot_work(run, tmp_path, monkeypatch, text, more, message):
    monkeypatch.chdir(write_tree(tmp_path, {"in/a.txt": text, "in/b.txt": b"", "empty.txt": b" "}))
    out = run("text", "--source", "in", *more.split(), code=2)
    assert re.search(message, out) and not (tmp_path / "out").exists()


def test_a_text_without_a_window_is_no_set(run, tmp_path):
    # the second is another text under the same name
    for text, code in ((b"ab", 2), (b"abc" * 20, 0)):
        (tmp_path / "a.txt").write_bytes(text)
        out = run("text", "--source", tmp_path / "a.txt", code=code)
        assert ("train has 1 and val 1 token(s)" in out) == (code == 2)
        assert (tmp_path / "out/text/meta.json").exists() == (code == 0)


def test_val_source(run, tmp_path, small_batches, many_workers):
    train, val = [f"train {i}" for i in range(40)], [f"val {i}" for i in range(12)]
    files = {
        "in/a.jsonl": jsonl(train),
        "val/b.jsonl.zst": zstd(jsonl(val[:11])),
        "c.txt": val[11].encode(),
    }
    write_tree(tmp_path, files)
    args = (
        "text",
        "--source",
        tmp_path / "in",
        "--val-source",
        tmp_path / "val",
        tmp_path / "c.txt",
    )
    out = run(*args)
    assert "warning" not in out and "of 40 and 12 documents" in out
    assert documents_of(tmp_path / "out/text") == {"train": train, "val": val}
    run("text", main=verify.main)
    assert "already there" in run(*args)

    out = run(*args[:3], code=2)
    assert "val_fraction 0.0, now 0.05" in out
    (tmp_path / "c.txt").write_text("other")
    out = run(*args, code=2)
    assert "(the files of --val-source differ)" in out
    (tmp_path / "c.txt").unlink()  # a set does not need the files that it was made of
    assert "already there" in run(*args)


def test_a_set_of_files_of_which_some_are_gone(run, tmp_path):
    """It does not need them, and is not compared with the others alone."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}\n" * 20)
    args = ["text", "--source", tmp_path / "a.txt", tmp_path / "b.txt"]
    run(*args)
    (tmp_path / "b.txt").unlink()
    assert "already there" in run(*args)


def test_a_separator_splits_the_validation_files_too(run, tmp_path):
    texts = {"a.txt": ["one", "two", "three"], "b.txt": ["four", "five"]}
    for name, parts in texts.items():
        (tmp_path / name).write_text("</s>".join(parts))
    args = ["text", "--source", tmp_path / "a.txt", "--val-source", tmp_path / "b.txt"]
    out = run(*args, "--separator", "</s>")
    assert "found </s>" not in out
    wanted = {"train": texts["a.txt"], "val": texts["b.txt"]}
    assert documents_of(tmp_path / "out/text") == wanted


def test_shakespeare_is_nanogpts_characters(run, tmp_path):
    """As data/shakespeare_char/prepare.py of nanoGPT splits them: the first int(0.9 n) are for
    training.
    """
    text = (
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 7
    )
    (tmp_path / "input.txt").write_text(text)
    args = ("shakespeare", "--source", str(tmp_path / "input.txt"), "--out", str(tmp_path / "out"))
    assert prepare.main(args) == 0
    meta = check_dataset(
        tmp_path / "out/shakespeare", load(REPO_ROOT / "config/shakespeare.toml").model.vocab_size
    )
    ids = np.fromfile(tmp_path / "out/shakespeare/train-00000.bin", "<u2")
    assert bytes(ids.astype(np.uint8)).decode() == text[: int(0.9 * len(text))]
    assert meta.splits["val"].tokens == len(text) - len(ids) and meta.tokenizer["name"] == "bytes"


def test_linked_folders_are_read_and_loops_end(tmp_path):
    write_tree(
        tmp_path, {"in/a.txt": b"a", "in/m/b.txt": b"b", "disk/c.txt": b"c", "disk/d/d.txt": b"d"}
    )
    for link, target in {
        "in/k": "../disk",
        "in/m/up": "..",
        "in/z": "../disk/d",
        "disk/d/self": ".",
    }.items():
        (tmp_path / link).symlink_to(target)
    (tmp_path / "in/e.txt").symlink_to("../disk/c.txt")
    (tmp_path / "folder").symlink_to("in")
    for root in ("in", "folder"):
        names = [file.name for file in local_inputs([tmp_path / root])]
        assert names == ["a.txt", "e.txt", "k/c.txt", "k/d/d.txt", "m/b.txt"]
