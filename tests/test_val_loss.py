"""eval/val_loss.py: which tokens are scored after which, the logged loss, bytes, pairs."""

import gzip
import json
import math
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from corpora import jsonl, write_ids
from numerics import SEED, tolerance
from runs import change_facts, largest_file, read_lines, read_tables
from runs import run as train_run

from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from eval import scoring, val_loss
from eval.trained import load_model
from eval.val_loss import main
from report.compare import clustered
from runtime.folder import path_of

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
    train_run(config := module_tiny("model.router=dense", "run.name=dense", *own))
    return path_of(config)


@pytest.fixture
def score(dense_run, capsys):
    """score("--stride", 8): the lines of JSON that the command writes, and what it prints."""

    def call(*arguments, step=4):
        file = dense_run / f"eval/step_{step:08}/val_loss.json"
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


def assert_values(line, wanted):
    """Equal but for the rounding of fp32 in the model; sums over windows are in fp64."""
    limit = tolerance(torch.float32, 32)
    for key, value in wanted.items():
        near = pytest.approx(value, rel=limit) if isinstance(value, float) else value
        assert line[key] == near, key


@pytest.mark.numerics
def test_loss_equals_the_logged_one(dense_run, score):
    lines = read_lines(dense_run / "metrics.jsonl")
    logged = {line["step"]: line for line in lines if "val/loss" in line}
    for step in (2, 4):
        (line,), _ = score("--checkpoint", step, step=step)
        losses = np.array(logged[step]["val/window_losses"])
        loss, low, high, *_ = clustered(losses, logged[step]["val/window_documents"])
        counts = {"windows": 6, "tokens": 6 * 32, "split": "val", "step": step}
        assert_values(line, counts | {"loss": loss, "perplexity": math.exp(loss)})
        assert [line["low"], line["high"]] == pytest.approx([low, high], rel=1e-3)
    assert abs(logged[2]["val/loss"] - logged[4]["val/loss"]) > 1e-3  # so the checkpoint matters


@pytest.fixture(scope="module")
def other_run(module_tiny):
    own = ["model.router=dense", "run.name=other", "run.seed=5", "model.n_embd=32"]
    train_run(config := module_tiny(*own))
    return path_of(config)


@pytest.mark.numerics
@pytest.mark.parametrize("stride, at_once", [(None, 8192), (8, 40)])
def test_texts_are_scored_and_paired_as_defined(
    dense_run, other_run, score, tmp_path, monkeypatch, stride, at_once
):
    """The losses of two runs by hand; their difference and its interval over documents."""
    monkeypatch.setattr(val_loss, "Scorer", partial(scoring.Scorer, tokens=at_once))
    texts = [TEXT, "x", " \n", "kestrels dance", "é" * 20]
    (one := tmp_path / "1.txt.gz").write_bytes(gzip.compress(b"a bee"))
    (many := tmp_path / "many.jsonl").write_bytes(jsonl(texts))
    texts.remove(" \n")
    own = ["--stride", stride] if stride else []
    lines, printed = score(other_run, "--data", one, many, *own)
    (rows,) = read_tables(printed)
    models = [load_model(run).model for run in (dense_run, other_run)]
    for line, row, documents in zip(lines, rows, (["a bee"], texts), strict=False):
        ids = [[EOT, *text.encode()] for text in documents]
        nats, others = (by_hand(model, ids, 32, stride or 32) for model in models)
        size = len("".join(documents).encode())
        wanted = {"tokens": size, "bytes": size, "split": "", "stride": stride}
        wanted |= {"loss": np.mean(nats), "bits_per_byte": sum(nats) / math.log(2) / size}
        assert_values(line, wanted)
        shown = [row[key] for key in ("data", "loss, nats per token", "bits per byte")]
        assert shown == [line["data"], *(f"{line[key]:.4f}" for key in ("loss", "bits_per_byte"))]
    one, many = lines
    assert many["low"] < many["loss"] < many["high"]
    assert one["low"] is one["high"] is None  # of one window
    assert (many["windows"], one["windows"]) == (7 if stride is None else 10, 1)
    owners = np.repeat(range(4), [len(text.encode()) for text in texts])  # the document of each
    wanted = clustered(np.subtract(others, nats), owners)[:3]
    differences = [row["minus the first's, 95%"] for row in rows]
    said = re.findall(r"[+-]\d+\.\d+", differences[3])
    assert [float(text) for text in said] == pytest.approx(wanted, abs=2e-4)
    assert differences[0] == "-" and abs(wanted[0]) > 1e-3
    assert [row["run"] for row in rows] == [str(dense_run)] * 2 + [str(other_run)] * 2


@pytest.mark.numerics
def test_windows_overlap_from_the_start_of_a_set(dense_run, score, corpus):
    tokens = np.fromfile(corpus / "tiny/val-00000.bin", "<u2").tolist()
    (line,), _ = score("--stride", 20, "--windows", 3)
    ids = tokens[: 32 + 2 * 20 + 1]
    nats = by_hand(load_model(dense_run).model, [ids], 32, 20)
    assert_values(line, {"windows": 3, "tokens": len(ids) - 1, "loss": np.mean(nats)})
    assert EOT not in ids and line["low"] < line["loss"] < line["high"]  # over its windows
    (line,), _ = score("--stride", 32, "--windows", "all")
    # the whole split, its last tokens too
    count = len(tokens) - 1
    assert_values(line, {"tokens": count, "bytes": count - tokens[1:].count(EOT)})
    train = np.fromfile(corpus / "tiny/train-00000.bin", "<u2")
    (line,), _ = score("--stride", 32, "--windows", "all", "--split", "train")
    assert_values(line, {"split": "train", "tokens": len(train) - 1})


def test_a_set_here_is_first_and_a_changed_one_is_said(
    dense_run, tmp_path, monkeypatch, corpus, call
):
    """The mean of weights: test_train.py; mixtures: test_mixture.py."""
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "tiny", ByteTokenizer(), 99)
    (row,) = read_tables(call(main, dense_run, "--data", "tiny"))[0]
    assert (row["data"], row["windows"]) == ("tiny", "3")
    changed = shutil.copytree(dense_run, tmp_path / "changed")
    file = changed / "config.toml"
    file.write_text(file.read_text().replace(f'dir = "{corpus}"', f'dir = "{tmp_path}"'))
    said = call(main, changed)
    assert said.startswith("note: tiny is no longer what dense was trained on\n")


def test_a_full_disk_names_the_file_and_keeps_its_lines(dense_run, call):
    call(main, dense_run, "--windows", 3)
    file = dense_run / "eval/step_00000004/val_loss.json"
    before = file.read_text()
    with largest_file(len(before)):
        said = call(main, dense_run, "--windows", 3, code=2)
    assert f"{file}: File too large" in said and file.read_text() == before


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
    shutil.copytree(path_of(config), folder / "short")
    path = shutil.copytree(dense_run, folder / "elsewhere") / "checkpoints/step_00000004"
    change_facts(path, lambda facts: facts.update(data="0" * 64))
    file = shutil.copytree(path_of(config), folder / "moved") / "config.toml"
    file.write_text(file.read_text().replace(config.data.dir, str(folder / "gone")))
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
