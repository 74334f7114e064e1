"""eval/val_loss.py: which tokens are scored after which, the logged loss, bytes, pairs."""

import gzip
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import jsonl, write_ids
from numerics import SEED, assert_near, tolerance
from runs import change_facts, largest_file, read_tables
from runs import run as train_run

import configure
from configure.schema import Mix
from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from eval import scoring, val_loss
from eval.trained import load_model
from eval.val_loss import main
from report.compare import clustered
from runtime import checkpoint
from runtime.folder import path_of
from runtime.metrics import ARRAYS, read_metrics
from runtime.runs import format_manifest

EOT = 256
TEXT = "Ünder the bëe, june learns maps. " * 2  # 70 bytes: 3 windows of 32, the last one short


@pytest.fixture(scope="module")
def dense_run(module_tiny):
    """A run folder with checkpoints of steps 2 and 4; its data.dir holds only `tiny`.

    Dense: a router's choice could depend on the batch, where two experts are equal but for
    rounding.
    """
    # 6 windows: 4, then 2
    own = ["train.micro_batch_size=4", "train.checkpoint_interval=2", f"run.seed={SEED}"]
    own += ["train.ema_decay=0.5"]
    train_run(config := module_tiny("model.router=dense", "run.name=dense", *own))
    return path_of(config)


@pytest.fixture
def score(dense_run, capsys):
    """score("--stride", 8): the lines of JSON that the command writes, and what it prints."""

    def call(*arguments, label="step_00000004"):
        file = dense_run / f"eval/{label}/val_loss.json"
        file.unlink(missing_ok=True)
        assert main([str(dense_run), *map(str, arguments)]) == 0
        return [json.loads(line) for line in file.read_text().splitlines()], capsys.readouterr().out

    return call


@torch.no_grad()
def by_hand(model, documents, block, stride):
    """Nats of each token of `documents` but the first of each, from the definition.

    Windows begin at multiples of `stride`, and the first that holds a token among its targets
    scores it, here by a forward pass of its own.
    """
    nats = []
    for ids in documents:
        for at in range(1, len(ids)):
            starts = range(0, len(ids), stride)
            start = next(start for start in starts if start < at <= start + block)
            logits = model(torch.tensor([ids[start:at]])).logits[0, -1]
            nats.append(-logits.double().log_softmax(-1)[ids[at]].item())
    return nats


def assert_close(measured, wanted, name):
    """Equal but for the rounding of fp32 in the model; sums over windows are in fp64."""
    values = (torch.tensor([float(value)], dtype=torch.float64) for value in (measured, wanted))
    assert_near(*values, tolerance(torch.float32, 32), name)


@pytest.mark.numerics
def test_loss_equals_the_logged_one(dense_run, score):
    steps = {}
    for line in read_metrics(dense_run / "metrics.jsonl", ARRAYS):
        if "val/loss" in line:
            steps[line["step"]] = line
    (line,), _ = score()
    losses = np.array(steps[4]["val/window_losses"])
    assert_close(line["loss"], losses.mean(), "loss")
    assert (line["windows"], line["tokens"], line["split"], line["step"]) == (6, 6 * 32, "val", 4)
    wanted = clustered(losses, steps[4]["val/window_documents"])
    assert [line["loss"], line["low"], line["high"]] == pytest.approx(wanted[:3], rel=1e-3)
    assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert main([str(dense_run)]) == 0  # results are added
    assert (dense_run / "eval/step_00000004/val_loss.json").read_text().count("\n") == 2
    assert abs(steps[2]["val/loss"] - steps[4]["val/loss"]) > 1e-3  # so step and checkpoint matter
    (line,), _ = score("--checkpoint", 2, label="step_00000002")
    assert_close(line["loss"], steps[2]["val/loss"], "loss of step 2")


@pytest.mark.numerics
@pytest.mark.parametrize("stride, at_once", [(None, 8192), (8, 40)])
def test_text_is_scored_as_defined(dense_run, score, tmp_path, monkeypatch, stride, at_once):
    monkeypatch.setattr(val_loss, "Scorer", partial(scoring.Scorer, tokens=at_once))
    texts = [TEXT, "x", " \n", "kestrels dance", "é" * 20]
    (tmp_path / "many.jsonl").write_bytes(jsonl(texts))
    file = tmp_path / "one.txt.gz"
    file.write_bytes(gzip.compress(b"a bee"))
    words = ["--data", tmp_path / "many.jsonl", file]
    lines, printed = score(*words, *([] if stride is None else ["--stride", stride]))
    model = load_model(dense_run).model
    for line, documents in zip(lines, ([TEXT, "x", *texts[3:]], ["a bee"]), strict=True):
        nats = by_hand(model, [[EOT, *text.encode()] for text in documents], 32, stride or 32)
        size = len("".join(documents).encode())
        assert line["tokens"] == line["bytes"] == len(nats) == size
        assert_close(line["loss"], np.mean(nats), "loss")
        assert_close(line["bits_per_byte"], sum(nats) / math.log(2) / size, "bits per byte")
        assert line["split"] == "" and line["stride"] == stride
    assert lines[0]["low"] < lines[0]["loss"] < lines[0]["high"]
    assert lines[1]["low"] is lines[1]["high"] is None  # of one window
    assert [line["windows"] for line in lines] == ([7, 1] if stride is None else [10, 1])
    (rows,) = read_tables(printed)
    for row, line in zip(rows, lines, strict=True):
        assert row["run"] == str(dense_run) and row["data"] == line["data"]
        assert row["loss, nats per token"] == f"{line['loss']:.4f}"
        assert row["bits per byte"] == f"{line['bits_per_byte']:.4f}"


@pytest.mark.numerics
def test_windows_overlap_from_the_start_of_a_set(dense_run, score, corpus):
    tokens = np.fromfile(corpus / "tiny/val-00000.bin", "<u2").tolist()
    (line,), _ = score("--stride", 20, "--windows", 3)
    ids = tokens[: 32 + 2 * 20 + 1]
    assert (line["windows"], line["tokens"], line["stride"]) == (3, len(ids) - 1, 20)
    assert EOT not in ids and line["low"] < line["loss"] < line["high"]  # over its windows
    model = load_model(dense_run).model
    nats = by_hand(model, [ids], 32, 20)
    assert_close(line["loss"], np.mean(nats), "loss")
    (line,), _ = score("--stride", 32, "--windows", "all")
    assert line["tokens"] == len(tokens) - 1  # the whole split, its last tokens too
    assert line["bytes"] == line["tokens"] - tokens[1:].count(EOT)
    (line,), _ = score("--windows", 2, "--split", "train")
    assert (line["windows"], line["split"]) == (2, "train")


def test_losses_of_two_runs_are_paired_by_document(dense_run, module_tiny, tmp_path, call):
    """The difference and its interval by hand, on windows that overlap."""
    own = ["model.router=dense", "run.name=other", "run.seed=5", "model.n_embd=32"]
    train_run(config := module_tiny(*own))
    other = path_of(config)
    texts = [TEXT, "kestrels dance", "é" * 20, "a bee learns maps of the field"]
    file = tmp_path / "many.jsonl"
    file.write_bytes(jsonl(texts))
    printed = call(main, dense_run, other, "--data", file, "--stride", 8)
    first, second = (load_model(run).model for run in (dense_run, other))
    nats = []
    owners = []  # the document of each
    for number, text in enumerate(texts):
        documents = [[EOT, *text.encode()]]
        own = np.subtract(by_hand(second, documents, 32, 8), by_hand(first, documents, 32, 8))
        nats.extend(own)
        owners.extend([number] * len(own))
    wanted = clustered(nats, owners)[:3]
    (rows,) = read_tables(printed)
    assert rows[0]["minus the first's, 95%"] == "-"
    said = re.findall(r"[+-]\d+\.\d+", rows[1]["minus the first's, 95%"])
    assert [float(text) for text in said] == pytest.approx(wanted, abs=2e-4)
    assert abs(wanted[0]) > 1e-3 and [row["run"] for row in rows] == [str(dense_run), str(other)]


def test_weights_and_data_are_said(dense_run, tmp_path, score, monkeypatch, corpus, call):
    """Which mean, a set here before one in data.dir, and that a set is no longer the same."""
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "tiny", ByteTokenizer(), 99)
    (line,), _ = score("--data", "tiny")
    facts = {"run": "dense", "step": 4, "data": "tiny", "split": "val", "windows": 3}
    assert {key: line[key] for key in facts} == facts
    (ema,), printed = score("--ema", label="step_00000004_ema")
    assert "val_loss.json: EMA of decay 0.5\n" in printed and "no longer" not in printed
    plain, _ = score()
    assert ema["loss"] != plain[0]["loss"]
    changed = shutil.copytree(dense_run, tmp_path / "changed")
    file = changed / "config.toml"
    file.write_text(file.read_text().replace(f'dir = "{corpus}"', f'dir = "{tmp_path}"'))
    said = call(main, changed)
    assert said.startswith("note: tiny is no longer what dense was trained on\n")


def test_sets_of_a_mixture_have_their_parts(dense_run, tmp_path, corpus, call):
    """Of the windows, and of the mean."""
    mixed = shutil.copytree(dense_run, tmp_path / "mixed")
    shutil.copytree(corpus / "tiny", tmp_path / "tiny")
    write_set(tmp_path / "other", ByteTokenizer(), 999)
    config = load_model(dense_run).config
    data = {"mix": Mix({"tiny": 2.0, "other": 1.0}), "dir": str(tmp_path)}
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    (mixed / "config.toml").write_text(configure.dumps(config))
    settings = {"data.mix": data["mix"]}
    newest = mixed / "checkpoints/step_00000004"
    change_facts(newest, lambda facts: facts["settings"].update(settings))
    (mixed / "eval/step_00000004/val_loss.json").unlink(missing_ok=True)
    said = call(main, mixed)
    text = (mixed / "eval/step_00000004/val_loss.json").read_text()
    of_set = {Path(row["data"]).name: row for row in map(json.loads, text.splitlines())}
    assert (of_set["tiny"]["windows"], of_set["other"]["windows"]) == (4, 2)
    mean = (2 * of_set["tiny"]["loss"] + of_set["other"]["loss"]) / 3
    assert f": mean by the weights of the mixture {mean:.4f}" in said
    assert abs(of_set["tiny"]["loss"] - of_set["other"]["loss"]) > 0.01


def test_a_full_disk_names_the_file_and_keeps_its_lines(dense_run, call):
    call(main, dense_run, "--windows", 3)
    file = dense_run / "eval/step_00000004/val_loss.json"
    before = file.read_text()
    with largest_file(len(before)):
        said = call(main, dense_run, "--windows", 3, code=2)
    assert f"File too large: '{file}" in said and file.read_text() == before


def write_set(path, tokenizer, length=99):
    ids = tokenizer.encode("x" * length)
    write_ids(path, ids, ids, tokenizer=tokenizer)


ERRORS = {
    "RUN --data tiny2": "--data tiny2: no such file, and no prepared set here or in DATA, which "
    "holds tiny; name one",
    "RUN --stride 33": "--stride 33: expected 1 to 32",
    "RUN --data HERE/short.txt": "short.txt: 1 token(s), expected at least 2",
    "RUN --data HERE/other": "other: its tokenizer ('gpt2') is not that of dense",
    "RUN --data HERE/small": "20 tokens, but one window of block_size 32 needs 33",
    "RUN --data HERE/damaged": "damaged/val-00000.bin: expected sha256",
    "HERE/moved": "HERE/gone/tiny: no such data set. Prepare it",
    "RUN HERE/short": "short cannot be compared: they differ in model.block_size; name",
    "RUN HERE/elsewhere": "elsewhere cannot be compared: they differ in data; name",
    "RUN HERE/short.txt": "HERE/short.txt",
}


@pytest.fixture(scope="module")
def faulty(dense_run, module_tiny, tmp_path_factory, fake_ranks):
    """A folder of data that cannot be scored, and of a run with shorter windows."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "short.txt").write_text("x")
    write_set(folder / "other", GPT2Tokenizer(fake_ranks))
    write_set(folder / "small", ByteTokenizer(), 20)
    write_set(folder / "damaged", ByteTokenizer())
    (folder / "damaged/val-00000.bin").write_bytes(b"y\0" * 99)
    train_run(config := module_tiny("model.router=dense", "run.name=short", "model.block_size=16"))
    file = shutil.copytree(path_of(config), folder / "short") / "config.toml"
    manifest = shutil.copytree(dense_run, folder / "elsewhere") / "checkpoints/step_00000004"
    body = checkpoint.read_manifest(manifest)
    body["facts"]["data"] = "0" * 64
    (manifest / checkpoint.MANIFEST).write_text(format_manifest(body))
    moved = shutil.copytree(path_of(config), folder / "moved") / "config.toml"
    moved.write_text(file.read_text().replace(config.data.dir, str(folder / "gone")))
    return folder


@pytest.mark.parametrize("words", ERRORS)
def test_errors(dense_run, faulty, call, corpus, words):
    def fill(text):
        places = {"RUN": dense_run, "HERE": faulty, "DATA": corpus}
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    said = call(main, *fill(words).split(), code=2)
    assert said.startswith("error: ") and fill(ERRORS[words]) in said
    with pytest.raises(SystemExit, match="2"):
        main([str(dense_run), "--windows", "0"])


def test_a_loss_beyond_floats_has_a_perplexity():
    corpus = val_loss.Corpus("a", [([EOT], [1])] * 2, np.arange(2), 2)
    line = corpus.describe(np.array([800.0, 1000.0]))
    assert (line["loss"], line["perplexity"]) == (900, math.exp(99))


def test_runs_of_other_data_are_compared_on_one_set(dense_run, faulty, call):
    said = call(main, dense_run, faulty / "elsewhere", "--data", "tiny")
    assert "no longer" not in said and "+0.0000 [" in said
