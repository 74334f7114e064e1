"""data/: the commands `data.prepare` and `data.verify`, from corpora to sets."""

import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import corpora
import pytest
from corpora import (
    BYTES,
    corpus_texts,
    documents_of,
    interrupted_at,
    jsonl,
    snapshot,
    split_of,
    write_file,
    write_tree,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import Forked, be_killed, flip, wait_until

from data import DataError, encode, prepare, readers, verify, workers
from data.bins import check_dataset, open_tokens, read_meta
from data.sources import SOURCES
from data.writer import Writer

pytest_plugins = ["corpora"]  # its fixtures


@given(
    texts=st.lists(st.text(max_size=30), max_size=30),
    val_fraction=st.floats(0.04, 0.97),
    steps=st.integers(1, 60),
)
@settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_texts_come_back_from_a_set(any_tokenizer, monkeypatch, texts, val_fraction, steps):
    """In small batches and shards, stopped at a batch and resumed."""
    texts += [f"text {i}" for i in range(12)]  # of both splits
    monkeypatch.setattr(prepare, "load_tokenizer", lambda *_: any_tokenizer)
    monkeypatch.setattr("data.tokenizer.load_tokenizer", lambda *_: any_tokenizer)
    monkeypatch.setattr(workers, "BATCH_BYTES", steps)
    monkeypatch.setattr(prepare, "SAVE_BYTES", steps)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 9 * steps)
    monkeypatch.setattr(encode, "FEW_DOCUMENTS", 1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in.jsonl").write_bytes(jsonl(texts))
        args = ["text", "--source", f"{folder}/in.jsonl", "--out", folder, "--allow-loss"]
        args += ["--val-fraction", str(val_fraction), "--name", "set"]
        with interrupted_at(steps):
            assert prepare.main(args) in (0, 130)
        assert prepare.main(args) == 0
        assert documents_of(Path(folder, "set")) == split_of(texts, val_fraction)
        meta = check_dataset(Path(folder, "set"), any_tokenizer.vocab_size)
        assert meta.source["empty"] == sum(not text.strip() for text in texts)


def test_a_set_that_is_prepared_again_is_already_there(run, books, tmp_path):
    run(*books)
    before = snapshot(tmp_path / "out")
    assert "already there" in run(*books)
    file = tmp_path / "in/a.jsonl"
    rows = file.read_bytes()
    file.write_bytes(rows.swapcase())  # of equal size
    out = run(*books, "--val-fraction", 0.5, "--tokenizer", "gpt2", "--text-field", "body", code=2)
    says = "inputs was '.*; text_field was 'text', is 'body'; tokenizer was 'bytes', is 'gpt2'; "
    assert re.search(f"{says}val_fraction was 0.3, is 0.5.*--force.*--name", out)
    file.write_bytes(rows)
    renamed = file.rename(tmp_path / "in/aa.jsonl")
    assert "inputs was '" in run(*books, code=2)
    renamed.rename(file)
    assert snapshot(tmp_path / "out") == before

    run(*books, "--val-fraction", 0.5, "--force")
    assert "--force" not in read_meta(tmp_path / "out/text").prepare
    shutil.rmtree(tmp_path / "in")  # a set does not need the files that it was made of
    assert "already there" in run(*books, "--val-fraction", 0.5)
    os.truncate(tmp_path / "out/text/train-00000.bin", 1000)
    assert "train-00000.bin: expected" in run(*books, "--val-fraction", 0.5, code=2)


@pytest.mark.parametrize("name", ["in/a.txt", "in/new.txt", "val/c.txt"])
def test_files_that_change_while_they_are_read_are_an_error(run, tmp_path, monkeypatch, name):
    """Nothing is kept, so the same command then makes the set of the files as they are."""
    write_tree(tmp_path, dict.fromkeys(["in/a.txt", "in/b.txt", "val/c.txt"], b"some text"))
    encode_inputs = workers.encode_inputs

    def change_at_the_end(*arguments):
        yield from encode_inputs(*arguments)
        (tmp_path / name).write_bytes(b"some text")

    monkeypatch.setattr(prepare, "encode_inputs", change_at_the_end)
    out = run("text", "--source", tmp_path / "in", "--val-source", tmp_path / "val", code=2)
    assert "input files changed while they were read" in out
    assert list((tmp_path / "out").iterdir()) == []


def test_foreign_files_are_not_touched(run, books, tmp_path, monkeypatch):
    """Of a set's folder and an unfinished one's, also if they come while the set is prepared."""
    names = ["meta.json.123.tmp", "train-00000.bin", "checked.json", "meta.json", "thesis.txt"]
    files = dict.fromkeys(names, b"mine")
    for name in ("text", "text.partial"):
        folder = write_tree(tmp_path / "out" / name, files)
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "hash_inputs", None)  # nothing is read before
            out = run(*books, "--force", code=2)
        assert f"{name} holds 'thesis.txt', which does not belong to a data set: move it" in out
        assert snapshot(folder) == files
        (folder / "thesis.txt").unlink()
    thesis = tmp_path / "out/text/thesis.txt"
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "describe_loss", lambda *_: thesis.write_text("mine") and "")
        assert "text holds 'thesis.txt'" in run(*books, "--force", code=2)
    assert snapshot(thesis.parent) == files
    thesis.unlink()
    run(*books, "--force")
    assert os.listdir(tmp_path / "out") == ["text"]


def test_everything_is_on_the_disk_before_a_set_has_its_name(
    run, tmp_path, monkeypatch, disk_calls
):
    """So that a power cut leaves a complete set or one that resumes."""
    texts = corpus_texts()
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts))
    size = sum(len(text.encode()) + 1 for text in split_of(texts, 0.2)["train"])
    (tmp_path / "out").mkdir()
    disk_calls.clear()
    args = ("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.2)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", size // 2 + 1)
    run(*args)
    assert disk_calls == [
        *("sync train-00000.bin", "sync train-00001.bin", "sync val-00000.bin"),
        *("sync progress.json.tmp", "rename progress.json", "sync text.partial"),
        *("sync train-00001.bin", "sync val-00000.bin"),  # again: they may have grown
        *("sync meta.json.tmp", "rename meta.json", "sync text.partial"),
        *("rename text", "sync out"),
    ]


REVISION = "5d1c"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The calls of a stand-in for the hub, with the files below
    tmp_path/datasets/<repository>@<revision>/.
    """
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.registry import _registry

    hub = mock.Mock()
    hub.ask.return_value = SimpleNamespace(sha=REVISION)  # also of a tag

    class FakeHub(DirFileSystem):
        protocol = "hf"
        cachable = False

        def __init__(self, block_size=None, **_):
            super().__init__(tmp_path, fsspec.filesystem("file"))
            self.block_size = block_size

        def open(self, path, *args, **_):
            hub.open(Path(path).name, self.block_size)
            return super().open(path)

    monkeypatch.setitem(_registry, "hf", FakeHub)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", hub.ask)
    return hub


FINEWEB, PROOF_PILE = "HuggingFaceFW/fineweb-edu", "EleutherAI/proof-pile-2"
CORPORA = [  # the files, and what is asked for
    ("fineweb-edu --config default --revision v1", FINEWEB, "data/{}/string.parquet", "v1"),
    ("arxiv", PROOF_PILE, "arxiv/train/{}.jsonl.zst", None),
]


@pytest.mark.parametrize("words, repo, form, revision", CORPORA)
def test_a_corpus_of_the_hub(run, hub, tmp_path, words, repo, form, revision):
    texts = corpus_texts()
    files = {form.format("a"): texts[:20], form.format("b"): texts[20:]}
    files["sample/10BT/string.parquet"] = ["no"]
    for name, part in files.items():
        write_file(tmp_path / f"datasets/{repo}@{REVISION}" / name, part)
    args = [*words.split(), "--val-fraction", 0.2]
    prepared = tmp_path / "out" / args[0]
    assert f"{prepared.name}: 2 files, " in run(*args)
    assert documents_of(prepared) == split_of(texts, 0.2)
    source = check_dataset(prepared, 257).source
    assert source["revision"] == REVISION
    assert source["config"] == ("default" if revision else "proof-pile-2")
    hub.ask.assert_called_once_with(repo, revision=revision, timeout=30)
    if not revision:
        size = 2**24  # of a request
        calls = [mock.call("a.jsonl.zst", size), mock.call("b.jsonl.zst", size)]
        assert hub.open.mock_calls == calls
        assert check_dataset(prepared, 257).prepare.endswith(f" --revision {REVISION}")

    hub.ask.side_effect = OSError  # what is there needs no hub
    assert "already there" in run(*args)
    other = "0" * 40
    assert f"revision was '{REVISION}', is '{other}'" in run(*args, "--revision", other, code=2)


def test_an_unfinished_set_keeps_its_revision(run, hub, tmp_path, small_batches, stop_at):
    """The same command resumes, though the hub has a newer commit; by --force it starts over."""
    hub.ask.side_effect = lambda repo, revision, timeout: SimpleNamespace(sha=revision or sha)
    for sha, number in (("old", 0), ("new", 900)):
        texts = [f"text {number + i}" for i in range(40)]
        write_file(tmp_path / f"datasets/{PROOF_PILE}@{sha}/arxiv/train/a.jsonl.zst", texts)
    args = ["arxiv", "--val-fraction", 0.2]
    sha = "old"
    stop_at(9, *args)
    sha = "new"
    assert "resuming after" in run(*args)
    prepared = tmp_path / "out/arxiv"
    assert check_dataset(prepared, 257).source["revision"] == "old"
    assert documents_of(prepared) == split_of([f"text {i}" for i in range(40)], 0.2)
    shutil.rmtree(prepared)
    sha = "old"
    stop_at(9, *args)
    sha = "new"
    run(*args, "--force")
    assert documents_of(prepared) == split_of(texts, 0.2)


def test_a_lost_connection_and_a_hub_out_of_reach(run, hub, tmp_path, monkeypatch):
    file = f"datasets/{PROOF_PILE}@{REVISION}/arxiv/train/a.jsonl.zst"
    write_file(tmp_path / file, ["text"])
    with monkeypatch.context() as patch:
        patch.setattr(readers, "_open", mock.Mock(side_effect=ConnectionError("connection lost")))
        out = run("arxiv", code=2)
    says = "reading from the hub failed (ConnectionError: connection lost). The work done is kept"
    assert f"hf://{file}: {says}: start again to resume" in out
    out = run("arxiv", "--config", "common-pile", code=2)
    page = "https://huggingface.co/datasets/common-pile/arxiv_papers"
    assert f"{page} has no files '*.json*.gz' at revision {REVISION}: choose another" in out
    hub.ask.side_effect = ConnectionError("no network.\n\nNot Found, or private")
    out = run("fineweb-edu", code=2)
    command = f"hf download {FINEWEB} --repo-type dataset --include 'sample/10BT/..parquet' --local"
    says = "cannot be read at .* .ConnectionError: no network. Not Found, or private"
    says = f"/datasets/{FINEWEB} {says}.*--source FOLDER.*{command}"
    assert re.search(says, out, re.S) and not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("stdlib", {"name": "stdlib", "skip_bad": True, "tokenizer": "bytes"}),
        ("text --source a/my.book.txt", {"name": "my", "skip_bad": False, "tokenizer": "gpt2"}),
        ("fineweb-edu", {"config": "sample-10BT", "val_fraction": 0.0005}),
        ("arxiv --source x --val-source y", {"config": None, "val_fraction": 0.0}),
    ],
)
def test_defaults_of_a_corpus(words, wanted):
    args = vars(prepare.parse_arguments(words.split()))
    assert {key: args[key] for key in wanted} == wanted


def test_the_list_has_all_corpora(call):
    assert {f"[{corpus}]" for corpus in SOURCES} <= {*call(prepare.main, "--list").splitlines()}


BAD_ARGUMENTS = {
    "": r"which corpus\? One of stdlib, text, shakespeare, fineweb-edu.*--list describes",
    "books3": r"books3 needs files: add --source.*withdrawn for copyright.*pg19",
    "shakespeare": "shakespeare needs files: add --source with input.txt .*download it: https://",
    "text --source x --val-source x --val-fraction 0.1": "--val-source replaces --val-fraction",
    "fineweb-edu --config 1BT": "no --config 1BT: choose one of sample-10BT, sample-100BT",
    "pg19 --revision main --source x": "--revision belongs to a data set on the hub",
    "text --source absent": "absent: no such file or folder: correct --source",
    "stdlib --name ../x": "only letters, digits",
    "text --source x --name stdlib": "--name stdlib is the name of a corpus",
    "stdlib --val-fraction nan": "nan: expected a number between 0 and 1",
    "stdlib --workers 0": "--workers 0: expected at least 1",
    "stdlib --source x": "stdlib takes no --source: leave it out, or prepare the corpus `text`",
    "stdlib --revision main": "--revision belongs to a data set on the hub",
    "fineweb-edu --val-source x": "--val-source needs --source, the files for training",
    "stdlib --val-fraction 0": "--val-fraction 0.0: expected a number between 0 and 1",
    "stdlib --val-fraction 1": "--val-fraction 1.0: expected a number between 0 and 1",
    "stdlib --name a.partial": "--name 'a.partial': use only .* and no .partial at the end",
    "stdlib --name .a": "--name '.a': use only letters",
    "text --source x --tokenizer gpt3": "x: no such file or folder",  # before the tokenizer
    "stdlib --tokenizer gpt3": "no tokenizer 'gpt3': choose one of bytes, gpt2, a folder with",
    "stdlib --tokenizer gpt2 --bpe-ranks absent": "absent: cannot be read or downloaded",
}


@pytest.mark.parametrize("args", BAD_ARGUMENTS)
def test_bad_arguments(run, tmp_path, monkeypatch, args):
    """Refused before a file is read as a whole."""
    monkeypatch.setattr(prepare, "hash_inputs", None)
    assert re.search(BAD_ARGUMENTS[args], run(*args.split(), code=2), re.S)
    assert not (tmp_path / "out").exists()


def test_verify_describes_a_set_and_finds_every_damaged_file(run, books, tmp_path):
    run(*books, "--name", "books")
    prepared = tmp_path / "out/books"
    out = run("books", main=verify.main)
    for split, texts in documents_of(prepared).items():
        assert f"\n    {split} starts: {texts[0][:20]!r}"[:-1] in out
    meta = read_meta(prepared)
    assert meta.source["bad"] == 1
    assert f"of 24 and 5 documents in {prepared}: intact. Tokenizer bytes, made by: " in out
    assert meta.prepare.startswith("python -m data.prepare --out ")
    assert meta.prepare.endswith(shlex.join([*map(str, books), "--name", "books"]))
    assert run(prepared, "books", main=verify.main) == 2 * out  # a path is a name, too
    flip(prepared / "train-00001.bin", 8000)
    flip(prepared / "val-00000.bin", 0)
    prepared = prepared.rename(tmp_path / "out/other")
    out = run("other", main=verify.main, code=2)
    remedy = f"again: {meta.prepare} --force --name other --out {tmp_path}/out"
    assert "other is damaged:" in out and remedy in out
    damaged = re.findall(r"(\S+): expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}", out)
    assert damaged == ["train-00001.bin", "val-00000.bin"]
    os.truncate(prepared / "train-00001.bin", 100)
    says = "train-00001.bin: expected 1998 bytes (999 tokens), found 100"
    assert says in run("other", main=verify.main, code=2)


# a text of one's own, in one file or a few
LINES = "".join(f"line {i} of a naïve text\n" for i in range(100))


@pytest.fixture
def few(run, monkeypatch):
    """The command as it is, few documents included."""
    monkeypatch.setattr(encode, "FEW_DOCUMENTS", 10)
    return run


def test_a_few_documents_are_cut_each(few, tmp_path, small_batches, many_workers):
    """With end-of-text between the parts of different documents, in the order of the documents."""
    texts = [f"{i} {LINES}"[: 200 * i + 1] for i in range(1, 10)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", None, *texts[:5], " "]))
    (tmp_path / "b.jsonl").write_bytes(jsonl(texts[5:]))
    args = ("text", "--source", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--val-fraction", 0.25)
    args += ("--workers", 2)
    out = few(*args)
    assert "warning: 9 documents, too few to set some aside: validation is the last 25%" in out
    assert "3 empty documents" in out and ", bytes, 2 workers" in out
    for split, parts in (
        ("train", [text[: 150 * i] for i, text in enumerate(texts, start=1)]),
        ("val", [text[150 * i :] for i, text in enumerate(texts, start=1)]),
    ):
        tokens = open_tokens(tmp_path / "out/text", split)
        assert BYTES.decode(tokens.read(0, len(tokens))) == "<|endoftext|>".join(parts)
        assert read_meta(tmp_path / "out/text").splits[split].documents == 9
    out = few(*args)
    assert "already there" in out and "warning" not in out


def test_very_many_documents_are_not_cut(few, tmp_path):
    args = ("text", "--source", tmp_path / "in.jsonl", "--val-fraction")
    texts = [f"text {i}" for i in range(100)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts))
    out = few(*args, 1e-5, code=2)
    assert "none of 100 documents fell into validation at --val-fraction 1e-05" in out
    assert not (tmp_path / "out").exists()  # nothing was tokenized
    few(*args, re.search(r"--val-fraction (\S+) makes about 10 of them validation", out)[1])
    assert 5 <= read_meta(tmp_path / "out/text").splits["val"].documents <= 20
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts[:99]))
    assert "99 documents, too few to set some aside" in few(*args, 1e-5, "--force")


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (b" \n", "", "no documents to read"),
        (b"\xff", "--skip-bad", "no documents to read"),
        (b"x", "--val-source empty.txt", "no documents to read"),
        (
            b"x",
            "--val-source copy.txt",
            r"(?s)1 for training that are in --val.*train has 0 and val 2.*r --val-source: its",
        ),
        (b"ab", "", r"train has 1 and val 1 token\(s\), both need 2"),
    ],
)
def test_what_cannot_work(few, tmp_path, monkeypatch, text, more, message):
    monkeypatch.chdir(
        write_tree(
            tmp_path, {"in/a.txt": text, "in/b.txt": b"", "empty.txt": b" ", "copy.txt": b"x"}
        )
    )
    out = few("text", "--source", "in", *more.split(), code=2)
    assert re.search(message, out) and not list((tmp_path / "out").glob("*"))


def test_val_source(few, tmp_path, small_batches, many_workers):
    """A validation document is no training document, whatever its file is called."""
    train, val = [f"train {i}" for i in range(40)], [f"val {i}" for i in range(12)]
    files = {
        "in/a.jsonl": jsonl([*train[:20], val[3], *train[20:], val[11], val[11], " "]),
        "val/b.jsonl.zst": corpora.zstd(jsonl(val[:11])),
        "c.txt": val[11].encode(),
    }
    write_tree(tmp_path, files)
    args = ("text", "--source", tmp_path / "in", "--val-source", tmp_path / "val")
    args += (tmp_path / "c.txt", "--workers", 2)
    out = few(*args)
    assert "warning" not in out and "of 40 and 12 documents" in out
    assert "left out: 1 empty document, 0 that cannot be read, 3 for training that are in" in out
    assert documents_of(tmp_path / "out/text") == {"train": train, "val": val}
    assert read_meta(tmp_path / "out/text").source["shared"] == 3
    assert "already there" in few(*args)
    assert "val_fraction was 0.0, is 0.05" in few(*args[:3], code=2)
    (tmp_path / "c.txt").write_text("other")
    assert "(val_inputs was" in few(*args, code=2)
    (tmp_path / "c.txt").unlink()  # a set is not compared with a part of its files
    assert "already there" in few(*args)


# a preparation that is stopped; test_second_time.py kills it at any step
def test_an_argument_may_neither_go_nor_come():
    less, more = {"seed": 1}, {"seed": 1, "val_source": "v"}
    for recorded, now, change in ((more, less, "'v', is None"), (less, more, "None, is 'v'")):
        with pytest.raises(DataError, match=rf"^set made .* \(val_source was {change}\)"):
            prepare.refuse_changes(recorded, now, "set made")


@pytest.fixture
def undisturbed(run, books, tmp_path, small_batches):
    """The files of a set prepared from `books` in small units, without a stop.

    They are removed again.
    """
    run(*books)
    files = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    return files


def test_stopped_it_resumes(run, books, tmp_path, undisturbed, stop_at, monkeypatch):
    """Files that are tokenized are not read again; what was not recorded is cut off."""
    stop_at(22, *books)  # in b.jsonl
    assert "half-prepared. Resume with the command" in run("text", main=verify.main, code=2)
    partial = tmp_path / "out/text.partial"
    splits = json.loads((partial / "progress.json").read_text())["splits"]
    last = max(partial.glob("train-*.bin"))
    for path, harm, says in (
        (partial / "train-00000.bin", lambda path: os.truncate(path, 1997), "missing or too short"),
        (last, Path.unlink, "missing or too short"),
        (partial / "val-00000.bin", lambda path: flip(path, 9), "damaged, its sha256 differs"),
    ):
        content = path.read_bytes()
        harm(path)
        assert f"{path}: {says}: start over with --force" in run(*books, code=2)
        path.write_bytes(content)
    last.write_bytes(last.read_bytes() + b"more")
    (partial / "val-00077.bin").write_bytes(b"not recorded")
    read = mock.Mock(side_effect=workers.read_documents)
    monkeypatch.setattr(workers, "read_documents", read)
    out = run(*books)
    written = sum(split["tokens"] for split in splits.values())
    assert f", resuming after {written:,} tokens" in out and written > 999
    assert [call.args[0].name for call in read.mock_calls] == ["b.jsonl"]
    done, total = re.search(r"text: (\S+)/(\S+)B, ", out).groups()  # the bar at its end
    assert done == total
    assert snapshot(tmp_path / "out") == undisturbed


def test_an_unfinished_set_that_does_not_resume(run, books, tmp_path, undisturbed, stop_at):
    """One of other arguments, or whose record is damaged: another digit would leave out documents,
    or write them twice.
    """
    other = [*books, "--val-fraction", 0.5]
    stop_at(13, *other)
    unfinished = snapshot(tmp_path / "out")
    assert "(val_fraction was 0.5, is 0.3)" in run(*books, code=2)
    assert snapshot(tmp_path / "out") == unfinished
    record = tmp_path / "out/text.partial/progress.json"
    text = record.read_text()
    damaged = ["{", '{"made_from": 1}', text.replace("[0, ", "[1, ")]
    damaged += [text.replace('"tokens": 9', '"tokens": 8'), text.replace(": 1", ": 2")]
    for content in damaged:
        record.write_text(content)
        out = run(*other, code=2)
        assert f"{record}: " in out and "--force" in out
    assert "resuming" not in run(*books, "--force")
    assert snapshot(tmp_path / "out") == undisturbed


def test_two_commands_at_once(run, books, tmp_path, small_batches):
    (tmp_path / "out").mkdir()
    with Writer(tmp_path / "out/text", BYTES):
        for force in ([], ["--force"]):
            out = run(*books, *force, code=2)
            assert "another process is preparing this set: wait for it" in out
    run(*books)


def is_running(pid: int) -> bool:
    """False for a process that has ended, also if nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def prepare_and_die(pids, argv):
    """Write the workers' ids into the file `pids` after 12 batches, and be killed."""

    def cut_and_die(*args):
        for number, batch in enumerate(cut(*args)):
            if number == 12:
                pids.write_text(json.dumps([c.pid for c in multiprocessing.active_children()]))
                be_killed()
            yield batch

    workers.BATCH_BYTES, prepare.WORKER_BYTES = 50, 500
    cut, workers.cut_batches = workers.cut_batches, cut_and_die
    prepare.main(list(map(str, argv)))


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux' /proc")
def test_no_worker_outlives_the_command(books, tmp_path):
    """test_second_time.py kills it at any step, with one worker, and resumes."""
    pids = tmp_path / "pids"
    arguments = [*books, "--tokenizer", "bytes", "--out", tmp_path / "out", "--workers", 2]
    assert Forked(prepare_and_die, pids, arguments).wait(300)[0] == -signal.SIGKILL
    children = json.loads(pids.read_text())
    assert len(children) == 2 and is_running(os.getpid())
    wait_until(lambda: not any(map(is_running, children)))


@pytest.mark.integration
def test_killed_workers_are_an_error(run, books, tmp_path, undisturbed, many_workers, monkeypatch):
    cut = workers.cut_batches

    def kill_workers(*args):
        for number, batch in enumerate(cut(*args)):
            if number == 10:
                # one that lives could finish all batches
                for child in multiprocessing.active_children():
                    child.kill()
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(workers, "cut_batches", kill_workers)
        out = run(*books, "--workers", 2, code=2)
    assert "a worker process died" in out and "start again to resume, with fewer --workers" in out
    assert not (tmp_path / "out/text").exists() and not multiprocessing.active_children()
    assert "resuming after" in run(*books)
    assert snapshot(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("name", ["train-00000.bin", "train-last", "progress.json", "meta.json"])
def test_the_disk_is_full(run, books, tmp_path, undisturbed, monkeypatch, name):
    """Both flushing and closing the file fail."""
    if name == "train-last":
        name = max(name for name in undisturbed if "train" in name).rpartition("/")[2]
    real = Path.open

    def open_(path, mode="r", *args, **more):
        if path.name.startswith(name) and "r" not in mode:
            with real(path, "wb") as file:
                file.write(b"what did fit")
            return real(Path("/dev/full"), mode, *args, **more)
        return real(path, mode, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        out = run(*books, code=2)
    named = tmp_path / f"out/text.partial{f'/{name}' if name.endswith('json') else ''}"
    assert f"No space left on device: '{named}'. What is done is kept: make room and start" in out
    assert not list((tmp_path / "out").rglob("*.tmp"))
    recorded = (tmp_path / "out/text.partial/progress.json").exists()
    assert recorded == (name not in ("train-00000.bin", "progress.json"))
    assert ("resuming after" in run(*books)) == recorded
    assert snapshot(tmp_path / "out") == undisturbed
