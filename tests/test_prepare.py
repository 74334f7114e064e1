"""data/: the commands `data.prepare` and `data.verify`, from corpora to sets."""

import gzip
import hashlib
import io
import itertools
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import corpora
import pytest
from corpora import (
    corpus_texts,
    documents_of,
    jsonl,
    parquet,
    place,
    snapshot,
    split_of,
    tar,
    write_tree,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import bins, prepare, readers, verify, workers
from data.bins import check_dataset, read_meta
from data.encode import Encoder
from data.sources import SOURCES, local_inputs

pytest_plugins = ["corpora"]  # its fixtures


def edit(path: Path, position: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[position : position + len(value)] = value
    path.write_bytes(data)


@given(
    texts=st.lists(st.text(max_size=30), max_size=30),
    val_fraction=st.floats(0.01, 0.99),
    steps=st.integers(1, 60),
)
@settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_texts_come_back_from_a_set(any_tokenizer, monkeypatch, texts, val_fraction, steps):
    texts += [
        "train "
        + "x" * next(n for n in itertools.count() if place("train " + "x" * n) >= val_fraction)
    ]
    texts += [
        "val " + "x" * next(n for n in itertools.count() if place("val " + "x" * n) < val_fraction)
    ]
    monkeypatch.setattr(prepare, "load_tokenizer", lambda *_: any_tokenizer)
    monkeypatch.setattr(bins, "load_tokenizer", lambda *_: any_tokenizer)
    monkeypatch.setattr(workers, "BATCH_BYTES", steps)
    monkeypatch.setattr(prepare, "SAVE_BYTES", steps)
    monkeypatch.setattr("data.encode.FEW_DOCUMENTS", 1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in.jsonl").write_bytes(jsonl(texts))
        args = f"--source {folder}/in.jsonl --name text --out {folder} --shard-tokens {9 * steps}"
        assert prepare.main(["text", *args.split(), "--val-fraction", str(val_fraction)]) == 0
        assert documents_of(Path(folder, "text")) == split_of(texts, val_fraction)
        check_dataset(Path(folder, "text"), any_tokenizer.vocab_size)
        assert read_meta(Path(folder, "text")).source["empty"] == sum(
            not text.strip() for text in texts
        )


def test_the_set_is_the_same_for_any_number_of_workers(
    run, tmp_path, monkeypatch, small_batches, many_workers
):
    texts = corpus_texts()
    files = {
        "a.jsonl.gz": gzip.compress(jsonl(texts[:30])),
        "b.tar": tar({"x.txt": texts[30].encode()}),
    }
    write_tree(tmp_path / "in", files)
    pool, sets = mock.Mock(wraps=workers.ProcessPoolExecutor), []
    monkeypatch.setattr(workers, "ProcessPoolExecutor", pool)
    for number in (1, 3):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        monkeypatch.setattr(prepare, "count_cores", lambda number=number: number)
        out = run("text", "--source", tmp_path / "in", "--shard-tokens", 997, "--val-fraction", 0.2)
        size = sum(path.stat().st_size for path in (tmp_path / "in").iterdir()) / 1024
        workers_said = "1 worker" if number == 1 else f"{number} workers"
        assert f"text: 2 files, {size:.1f} KiB, bytes, {workers_said}\n" in out
        sets.append(snapshot(tmp_path / "out"))
    assert [call.args[0] for call in pool.call_args_list] == [3]
    assert sets[0] == sets[1] and len(sets[0]) > 10


def test_python_sources_below_other_roots(run, tmp_path, monkeypatch):
    files = {
        "one/a.py": "# a",
        "one/test/b.py": "# b",
        "two/a.py": "# c",
        "two/d.txt": "d",
        "two/e/f.py": "# f",
    }
    write_tree(tmp_path, {name: text.encode() for name, text in files.items()})
    (tmp_path / "none").mkdir()
    options = ("--name", "code", "--val-fraction", 0.4)
    args = ("stdlib", "--roots", tmp_path / "two", tmp_path / "one", *options)
    run(*args)
    assert documents_of(tmp_path / "out/code") == split_of(["# c", "# f", "# a", "# b"], 0.4)
    assert "already there" in run(*args)
    (tmp_path / "link").symlink_to("one")
    monkeypatch.chdir(tmp_path / "two")
    assert "already there" in run("stdlib", "--roots", ".", "../link", *options)
    (tmp_path / "one/a.py").write_text("# other")
    assert "its files have changed" in run(*args, code=2)
    assert "none: no .py file there: name another --roots" in run(
        "stdlib", "--roots", tmp_path / "none", code=2
    )


def test_a_set_that_is_prepared_again_is_already_there(run, books, tmp_path):
    run(*books)
    before = snapshot(tmp_path / "out")
    assert "already there" in run(*books)
    for changed, message in (
        (("--val-fraction", 0.5), "val_fraction 0.3, now 0.5"),
        (("--tokenizer", "gpt2"), "tokenizer 'bytes', now 'gpt2'"),
        (
            ("--text-field", "body", "--shard-tokens", 500),
            "shard_tokens 999, now 500; text_field 'text', now 'body'",
        ),
    ):
        out = run(*books, *changed, code=2)
        assert message in out and "--force" in out and "--name" in out
    assert snapshot(tmp_path / "out") == before

    run(*books, "--val-fraction", 0.5, "--force")
    assert "--force" not in read_meta(tmp_path / "out/text").prepare
    texts = corpus_texts()[:20] + [f"{i} green bottles" for i in range(10)]
    assert documents_of(tmp_path / "out/text") == split_of(texts, 0.5)
    assert os.listdir(tmp_path / "out") == ["text"]
    shutil.rmtree(tmp_path / "in")  # a set does not need the files that it was made of
    assert "already there" in run(*books, "--val-fraction", 0.5)
    os.truncate(tmp_path / "out/text/train-00000.bin", 1000)
    assert "train-00000.bin: expected" in run(*books, "--val-fraction", 0.5, code=2)


def test_changed_large_inputs_are_refused(run, tmp_path, monkeypatch):
    """Each file is read once; later by its time and a sample, and again where these differ."""
    monkeypatch.setattr(prepare, "HASHED_BYTES", 1000)
    monkeypatch.setattr("data.encode.FEW_DOCUMENTS", 10)
    source = tmp_path / "in.txt"
    text = b"line of a text\n" * 20_000
    source.write_bytes(text)
    args = ("text", "--source", source)
    assert "hashing 293.0 KiB of input once" in run(*args)
    hashed = []
    file_digest = hashlib.file_digest

    def note_digest(file, name):
        hashed.append(Path(file.name).name)
        return file_digest(file, name)

    monkeypatch.setattr("data.checked.hashlib.file_digest", note_digest)
    assert "already there" in run(*args) and hashed == []
    os.utime(source, ns=(0, 0))  # as a copy has it
    assert "already there" in run(*args) and hashed == ["in.txt"]
    os.utime(source)
    between = 293 * 1024 // 30  # the samples are 20 kB apart and have 4 kB
    edit(source, between, b"X")
    assert "the input files differ" in run(*args, code=2)
    source.write_bytes(b"X" + text[1:])
    assert "the input files differ" in run(*args, code=2)
    (tmp_path / "out/text/inputs.json").unlink()  # as in a set of an earlier version
    out = run(*args)
    assert "no inputs.json, so its input files are not compared" in out and "already there" in out


@pytest.mark.parametrize("change", ["grown", "changed", "added", "validation"])
def test_files_that_change_while_they_are_read_are_an_error(run, tmp_path, monkeypatch, change):
    """Nothing is kept, so the same command then makes the set of the files as they are."""
    source = write_tree(tmp_path / "in", {"a.txt": b"first text\n" * 50, "b.txt": b"second " * 50})
    val = write_tree(tmp_path / "val", {"c.txt": b"third text " * 50})
    file, content = {
        "grown": (source / "a.txt", b"first text\n" * 51),
        "changed": (source / "a.txt", b"other text\n" * 50),
        "added": (source / "d.txt", b"more text\n" * 50),
        "validation": (val / "c.txt", b"other text " * 50),
    }[change]
    args = ("text", "--source", source, "--val-source", val)
    encode_inputs = workers.encode_inputs

    def change_after_the_first_batch(*arguments):
        for number, batch in enumerate(encode_inputs(*arguments)):
            yield batch
            if number == 0:
                file.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "encode_inputs", change_after_the_first_batch)
        said = run(*args, code=2)
    which = "the files of --val-source" if change == "validation" else "the input files"
    assert f"changed while they were read ({which} differ)" in said
    assert list((tmp_path / "out").iterdir()) == []
    run(*args)
    texts = {path.read_text() for path in source.iterdir()}
    assert set(documents_of(tmp_path / "out/text")["train"]) == texts


def test_a_foreign_file_that_comes_while_a_set_is_replaced(run, books, tmp_path, monkeypatch):
    run(*books)
    thesis = tmp_path / "out/text/thesis.txt"

    def check_then_write(writer, fraction):
        thesis.write_text("mine")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_check_splits", check_then_write)
        said = run(*books, "--force", code=2)
    assert "text holds 'thesis.txt', which does not belong to a data set" in said
    assert thesis.read_text() == "mine"
    assert set(os.listdir(thesis.parent)) > {"meta.json", "train-00000.bin"}
    thesis.unlink()
    run(*books, "--force")
    assert os.listdir(tmp_path / "out") == ["text"]
    names = {re.sub(r"\d{5}", "N", path.name) for path in thesis.parent.iterdir()}
    assert names == {"meta.json", "train-N.bin", "val-N.bin"}


def test_few_batches_are_in_memory(tmp_path, monkeypatch):
    """Of 50 documents, each a batch, as many are read as the worker may need next."""
    (tmp_path / "in.jsonl").write_bytes(jsonl(f"text {i}" for i in range(50)))
    monkeypatch.setattr(workers, "BATCH_BYTES", 1)
    cut = workers.cut_batches
    batches = []

    def count_batches(*args):
        for batch in cut(*args):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(workers, "cut_batches", count_batches)
    encoder = Encoder(corpora.BYTES, 0.5)
    inputs = local_inputs([tmp_path / "in.jsonl"])
    encoded = workers.encode_inputs(inputs, encoder, 1, workers.Position())
    for number in range(1, 40):
        _, position, _ = next(encoded)
        assert position == (0, number) and len(batches) == number + 2
    assert [position for _, position, _ in encoded][-1] == (1, 0) and len(batches) == 51


@pytest.mark.parametrize("folder", ["text", "text.partial"])
def test_a_foreign_folder_is_not_changed(run, books, tmp_path, monkeypatch, folder):
    """Nor is a file read before that."""
    monkeypatch.setattr(prepare, "hash_inputs", None)
    left = {"meta.json.123.tmp": b"", "train-00000.bin": b"", "checked.json": b""}  # by a set
    write_tree(tmp_path / "out" / folder, left | {"thesis.txt": b"mine", "meta.json": b"{}"})
    before = snapshot(tmp_path / "out")
    out = run(*books, "--force", code=2)
    assert f"{folder} holds 'thesis.txt', which does not belong to a data set: move it" in out
    assert snapshot(tmp_path / "out") == before


def test_everything_is_on_the_disk_before_a_set_has_its_name(run, tmp_path, disk_calls):
    """So that a power cut leaves a complete set or one that resumes."""
    texts = corpus_texts()
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts))
    size = sum(len(text.encode()) + 1 for text in split_of(texts, 0.2)["train"])
    (tmp_path / "out").mkdir()
    disk_calls.clear()
    args = ("text", "--source", tmp_path / "in.jsonl", "--val-fraction", 0.2)
    run(*args, "--shard-tokens", size // 2 + 1)
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
    """A stand-in for the hub: files below hub.root/<repository>@<revision>/, the newest revision in
    hub.newest.
    """
    import fsspec
    import huggingface_hub

    hub = SimpleNamespace(
        root=tmp_path / "hub", newest=REVISION, asked=[], opened=[], reachable=True
    )

    class FakeHub(fsspec.AbstractFileSystem):
        protocol = "hf"
        cachable = False

        def ls(self, path, detail=True, **_):
            entries = fsspec.filesystem("file").ls(
                hub.root / self._strip_protocol(path), detail=True
            )
            entries = [
                entry | {"name": os.path.relpath(entry["name"], hub.root)}
                for entry in reversed(entries)
            ]
            return entries if detail else [entry["name"] for entry in entries]

        def _open(self, path, mode="rb", **_):
            hub.opened.append((path.rpartition("/")[2], self.storage_options.get("block_size")))
            return io.BytesIO((hub.root / path).read_bytes())

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


def upload(hub, repo, names, texts, write, revision=REVISION) -> None:
    """Puts `texts`, split evenly, as the files `names` into the fake hub."""
    for i, name in enumerate(names):
        part = texts[len(texts) * i // len(names) : len(texts) * (i + 1) // len(names)]
        write(hub.root / "datasets" / f"{repo}@{revision}" / name, part)


def write_zst(path, texts, **more):
    write_tree(path.parent, {path.name: corpora.in_parts(corpora.zstd, jsonl(texts, **more))})


PROOF_PILE = (
    "EleutherAI/proof-pile-2",
    ["arxiv/train/a.jsonl.zst", "arxiv/train/b.jsonl.zst"],
    write_zst,
)
FINEWEB = "HuggingFaceFW/fineweb-edu"
SAMPLE = (FINEWEB, ["sample/10BT/000.parquet", "sample/10BT/001.parquet"], parquet)
DEFAULT = (FINEWEB, ["data/a/0.parquet", "data/b/0.parquet"], parquet)
PG19 = ("emozilla/pg19", ["data/train-0.parquet", "data/train-1.parquet"], parquet)


@pytest.mark.parametrize(
    ("corpus", "options", "repo", "names", "write"),
    [
        ("fineweb-edu", {}, *SAMPLE),
        ("fineweb-edu", {"config": "default"}, *DEFAULT),
        ("arxiv", {}, *PROOF_PILE),
        ("pg19", {"revision": "v1"}, *PG19),
    ],
)
def test_a_corpus_of_the_hub(run, hub, tmp_path, corpus, options, repo, names, write):
    texts = corpus_texts()
    revision = options.get("revision", REVISION)
    upload(hub, repo, names, texts, write, revision)
    others = [f"validation-{Path(name).name}" for name in names]
    if corpus == "pg19":
        others.append("data/test-0.parquet")
    upload(hub, repo, others, ["no"], write, revision)
    args = [corpus, "--val-fraction", 0.2]
    for name, value in options.items():
        args += [f"--{name}", value]
    paths = [hub.root / "datasets" / f"{repo}@{revision}" / name for name in names]
    size = sum(path.stat().st_size for path in paths) / 1024
    assert f"{corpus}: 2 files, {size:.1f} KiB, bytes, 1 worker\n" in run(*args)
    assert documents_of(tmp_path / "out" / corpus) == split_of(texts, 0.2)
    source = check_dataset(tmp_path / "out" / corpus, 257).source
    assert source["revision"] == revision
    assert source["config"] == options.get("config", next(iter(SOURCES[corpus].hub)))
    assert hub.asked == [(repo, options.get("revision"))]
    if write is write_zst:  # in one request from beginning to end
        assert hub.opened == [("a.jsonl.zst", 0), ("b.jsonl.zst", 0)]

    hub.reachable = False  # what is there needs no hub
    assert "already there" in run(*args)
    if corpus == "fineweb-edu":
        other = "default" if not options else "sample-10BT"
        said = f"(config {source['config']!r}, now {other!r})"
        assert said in run(*args, "--config", other, code=2)
    assert f"revision '{revision}', now 'other'" in run(*args, "--revision", "other", code=2)


def test_a_corpus_that_changes_resumes_with_its_revision(
    run, hub, tmp_path, small_batches, stop_at
):
    upload(hub, *PROOF_PILE[:2], corpus_texts(), write_zst)
    args = ("arxiv", "--val-fraction", 0.2, "--shard-tokens", 999)
    stop_at(13, *args)
    hub.newest = "newer"
    upload(hub, *PROOF_PILE[:2], ["another"] * 4, write_zst, revision="newer")
    assert f"revision '{REVISION}', now 'newer'" in run(*args, "--revision", "newer", code=2)
    assert "resuming after" in run(*args) and hub.asked[-1] == (PROOF_PILE[0], REVISION)
    assert read_meta(tmp_path / "out/arxiv").source["revision"] == REVISION
    assert documents_of(tmp_path / "out/arxiv") == split_of(corpus_texts(), 0.2)


def test_a_lost_connection_and_a_hub_out_of_reach(run, hub, tmp_path, monkeypatch):
    upload(hub, *PROOF_PILE[:2], corpus_texts(), write_zst)
    with monkeypatch.context() as patch:
        patch.setattr(readers, "_open", mock.Mock(side_effect=ConnectionError("connection lost")))
        out = run("arxiv", code=2)
    assert (
        f"hf://datasets/{PROOF_PILE[0]}@{REVISION}/{PROOF_PILE[1][0]}: reading from the hub failed"
        in out
    )
    assert "connection lost" in out and "start again to resume" in out
    out = run("arxiv", "--config", "common-pile", code=2)
    page = "https://huggingface.co/datasets/common-pile/arxiv_papers"
    assert f"{page} has no files '*.json*.gz' at revision {REVISION}: choose another" in out
    upload(hub, "emozilla/pg19", ["data/train-0.parquet"], ["one", "two", "three"], parquet)
    monkeypatch.setattr("data.encode.FEW_DOCUMENTS", 10)
    out = run("pg19", "--val-fraction", 1e-6, code=2)
    assert "none of 3 documents fell into validation at --val-fraction 1e-06: " in out
    assert "--val-fraction 0.5 makes about 2 of them validation" in out
    hub.reachable = False
    out = run("fineweb-edu", code=2)
    assert "https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu is unreachable" in out
    assert "OfflineModeIsEnabled" in out
    command = f"hf download {FINEWEB} --repo-type dataset --include 'sample/10BT/*.parquet'"
    assert (
        f"{command} --local-dir" in out
        and "--source FOLDER" in out
        and not [*(tmp_path / "out").iterdir()]
    )


def test_a_set_of_own_text_is_named_after_its_only_file_or_folder():
    for source, name in (
        ("notes/", "notes"),
        ("a/my.book.txt.gz", "my"),
        ("arxiv.txt", "text"),
        ("é.txt", "text"),
    ):
        assert prepare.parse_arguments(["text", "--source", source]).name == name
    for args, name in (
        ("text --source a.txt b.txt", "text"),
        ("shakespeare --source input.txt", "shakespeare"),
    ):
        assert prepare.parse_arguments(args.split()).name == name
    assert prepare.parse_arguments(["text", "--source", "a.txt", "--name", "b"]).name == "b"


DEFAULTS = {  # tokenizer, validation fraction, the hub's files
    "stdlib": ("bytes", 0.05, None),
    "text": ("gpt2", 0.05, None),
    "shakespeare": ("bytes", 0.1, None),
    "fineweb-edu": ("gpt2", 0.0005, "sample-10BT"),
    "arxiv": ("gpt2", 0.001, "proof-pile-2"),
    "books3": ("gpt2", 0.001, None),
    "pg19": ("gpt2", 0.005, "default"),
}


@pytest.mark.parametrize("corpus", SOURCES)
def test_defaults_of_a_corpus(call, corpus):
    """As parsed, and as --list has them."""
    source = SOURCES[corpus]
    files = [] if source.hub or not source.local else ["--source", "x"]
    args = prepare.parse_arguments([corpus, *files])
    tokenizer, val_fraction, config = DEFAULTS[corpus]
    assert (args.tokenizer, args.val_fraction, args.config) == (tokenizer, val_fraction, config)
    assert (args.text_field, args.separator, args.shard_tokens) == ("text", "", 100_000_000)
    assert (args.out, args.workers) == (prepare.DATA_DIR, prepare.count_cores())
    assert (args.skip_bad, args.allow_loss, args.force) == (corpus == "stdlib", False, False)
    assert prepare.parse_arguments([corpus, *files, "--val-fraction", "0.5"]).val_fraction == 0.5
    if source.local:
        args = prepare.parse_arguments([corpus, "--source", "x", "--val-source", "y"])
        assert (args.val_fraction, args.config) == (0.0, None)  # all of --source is for training
    listed = re.split(r"(?m)^(?=\S)", call(prepare.main, "--list"))[1:]
    (entry,) = [entry for entry in listed if entry.startswith(f"{corpus}: {source.about}\n")]
    assert f"\n    tokenizer {tokenizer}, {100 * val_fraction:.2f}% of the documents for" in entry
    configs = re.findall(r"--config (\S+): (\S+), (\S+)\n +download (.*); (.*) tokens; (.*)", entry)
    assert configs == [
        (name, hub.repo, hub.files, hub.download, hub.tokens, f"licence: {hub.licence}")
        for name, hub in source.hub.items()
    ]
    assert (f"\n    --source: {source.local}" in entry) == bool(source.local)
    assert (f"\n    notes: {source.notes}" in entry) == bool(source.notes)


BAD_ARGUMENTS = {
    "": r"which corpus\? One of stdlib, text, shakespeare, fineweb-edu.*--list describes",
    "books3": r"books3 needs files: add --source.*withdrawn for copyright.*pg19",
    "shakespeare": "shakespeare needs files: add --source with input.txt .*download it: https://",
    "text --source x --roots x": "--roots belongs to the corpus stdlib: text takes --source",
    "fineweb-edu --config 1BT": "no --config 1BT: choose one of sample-10BT, sample-100BT",
    "pg19 --revision main --source x": "--revision belongs to a data set on the hub",
    "text --source absent": "absent: no such file or folder: correct --source",
    "stdlib --name ../x": "only letters, digits",
    "text --source x --name stdlib": "--name stdlib is the name of a corpus",
    "stdlib --val-fraction nan": "nan: expected a number between 0 and 1",
    "stdlib --shard-tokens 0": "--shard-tokens 0: expected at least 1",
    "stdlib --workers 0": "--workers 0: expected at least 1",
    "stdlib --source x": "stdlib takes no --source: leave it out, or prepare the corpus `text`",
    "stdlib --revision main": "--revision belongs to a data set on the hub",
    "fineweb-edu --val-source x": "--val-source needs --source, the files for training",
    "stdlib --val-fraction 0": "--val-fraction 0.0: expected a number between 0 and 1",
    "stdlib --val-fraction 1": "--val-fraction 1.0: expected a number between 0 and 1",
    "stdlib --name a.partial": "--name 'a.partial': use only .* and no .partial at the end",
    "stdlib --name .a": "--name '.a': use only letters",
    "text --source x --tokenizer gpt3": "x: no such file or folder",  # before the tokenizer
    "stdlib --tokenizer gpt2 --bpe-ranks absent": "absent: cannot read GPT-2's BPE file",
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
    counts = []
    starts = []
    for split, texts in documents_of(prepared).items():
        data = [text.encode() for text in texts]
        counts.append((sum(map(len, data)) + len(data), len(data)))
        start = b"".join(part + b"\0" for part in data)[:60]  # 60 tokens, an end of text is one
        text = start.decode(errors="replace").replace("\0", "<|endoftext|>")
        starts.append(f"    {split} starts: {text!r}\n")
    (train, n_train), (val, n_val) = counts
    command = shlex.join(["python", "-m", "data.prepare", *map(str, books), "--name", "books"])
    assert out == (
        f"{train:,} train and {val:,} val tokens of {n_train} and {n_val} documents in "
        f"{prepared}: intact. Tokenizer bytes, made by: {command} --out {tmp_path}/out "
        f"--tokenizer bytes\n{''.join(starts)}"
    )
    assert run(prepared, "books", main=verify.main) == 2 * out  # a path is a name, too
    good = (prepared / "train-00001.bin").read_bytes()
    edit(prepared / "train-00001.bin", 1000, bytes([good[1000] ^ 1]))
    edit(prepared / "val-00000.bin", 0, b"?")
    out = run("books", main=verify.main, code=2)
    assert (
        "books is damaged:" in out
        and "Prepare it again: python -m data.prepare text" in out
        and "--force" in out
    )
    damaged = re.findall(r"(\S+): expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}", out)
    assert damaged == ["train-00001.bin", "val-00000.bin"]
    os.truncate(prepared / "train-00001.bin", 100)
    assert "train-00001.bin: expected 1998 bytes (999 tokens), found 100" in run(
        "books", main=verify.main, code=2
    )
