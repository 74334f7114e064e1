"""eval/val_loss.py: which tokens are scored after which, by hand; the run's own logged loss; bytes; bad input."""

import gzip
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corpora import jsonl, write_ids
from numerics import SEED, assert_near, tolerance
from runs import run as train_run

from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from eval import val_loss
from eval.scoring import Scorer
from eval.trained import load_model, load_run
from eval.val_loss import main, open_prepared, open_text
from runtime import folder
from runtime.metrics import ARRAYS, read_metrics

EOT = 256
TEXT = "Ünder the bëe, june learns maps. " * 2  # 70 bytes: 3 windows of 32, the last one short


@pytest.fixture(scope="module")
def trained(module_tiny):
    """A run folder with checkpoints of steps 2 and 4; its data.dir holds only `tiny`.

    Dense: a router's choice could depend on the batch, where two experts are equal but for rounding.
    """
    own = ["train.micro_batch_size=4", "train.checkpoint_interval=2", f"run.seed={SEED}"]  # 6 windows: 4, then 2
    train_run(config := module_tiny("model.router=dense", *own))
    return folder.path_of(config)


@pytest.fixture
def score(trained, capsys):
    """score("--stride", 8): the lines of JSON that the command writes, and what it prints."""

    def call(*arguments):
        file = trained / "eval/step_00000004/val_loss.json"
        file.unlink(missing_ok=True)
        assert main([str(trained), *map(str, arguments)]) == 0
        return [json.loads(line) for line in file.read_text().splitlines()], capsys.readouterr().out

    return call


@torch.no_grad()
def by_hand(model, documents, block, stride):
    """Nats of each token of `documents` but the first of each, from the definition: windows begin at multiples of
    `stride`, and the first that holds a token among its targets scores it."""
    nats = []
    for ids in documents:
        for at in range(1, len(ids)):
            start = next(start for start in range(0, len(ids), stride) if start < at <= start + block)
            logits = model(torch.tensor([ids[start:at]])).logits[0, -1]  # by a forward pass of its own
            nats.append(-logits.double().log_softmax(-1)[ids[at]].item())
    return nats


def assert_close(measured, wanted, name):
    """Equal but for the rounding of fp32 in the model; sums over windows are in fp64."""
    values = (torch.tensor([float(value)], dtype=torch.float64) for value in (measured, wanted))
    assert_near(*values, tolerance(torch.float32, 32), name)


@pytest.mark.numerics
def test_loss_equals_the_logged_one(trained, score):
    steps = {line["step"]: line for line in read_metrics(trained / "metrics.jsonl", ARRAYS) if "val/loss" in line}
    (line,), _ = score()
    losses = np.array(steps[4]["val/window_losses"])
    assert_close(line["loss"], losses.mean(), "loss")
    assert (line["windows"], line["tokens"], line["split"], line["step"]) == (6, 6 * 32, "val", 4)
    labels = np.unique(steps[4]["val/window_documents"], return_inverse=True)[1]
    apart = losses - losses.mean()  # windows of equal length: the variance of a mean over documents
    parts = [(apart[labels == document].sum() ** 2, (labels == document).mean()) for document in range(max(labels) + 1)]
    variance = sum(square / (1 - share) for square, share in parts) / 6**2
    assert line["stderr"] == pytest.approx(math.sqrt(variance), rel=1e-3)
    assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert abs(steps[2]["val/loss"] - steps[4]["val/loss"]) > 1e-3  # so step and checkpoint matter
    assert main([str(trained), "--checkpoint", "2"]) == 0
    line = json.loads((trained / "eval/step_00000002/val_loss.json").read_text())
    assert_close(line["loss"], steps[2]["val/loss"], "loss of step 2")


@pytest.mark.numerics
@pytest.mark.parametrize("stride, at_once", [(None, 8192), (8, 40)])
def test_text_is_scored_as_defined(trained, score, tmp_path, monkeypatch, stride, at_once):
    """Documents of several windows, one token and none, in batches with and without padding."""
    monkeypatch.setattr(val_loss, "Scorer", partial(Scorer, tokens=at_once))
    monkeypatch.setattr(val_loss, "WINDOWS", 4)
    texts = [TEXT, "x", " \n", "kestrels dance", "é" * 20]
    (tmp_path / "many.jsonl").write_bytes(jsonl(texts))
    file = tmp_path / "one.txt.gz"
    file.write_bytes(gzip.compress(b"a bee"))
    lines, _ = score("--data", tmp_path / "many.jsonl", file, *([] if stride is None else ["--stride", stride]))
    model = load_model(trained).model
    for line, documents in zip(lines, ([TEXT, "x", *texts[3:]], ["a bee"]), strict=True):
        nats = by_hand(model, [[EOT, *text.encode()] for text in documents], 32, stride or 32)
        size = len("".join(documents).encode())
        assert line["tokens"] == line["bytes"] == len(nats) == size
        assert_close(line["loss"], np.mean(nats), "loss")
        assert_close(line["bits_per_byte"], sum(nats) / math.log(2) / size, "bits per byte")
        assert line["split"] is None
    few, _ = score("--data", tmp_path / "many.jsonl", "--stride", 8, "--windows", 3)
    assert few[0]["tokens"] == 32 + 8 + 8  # the first three
    few, _ = score("--data", tmp_path / "many.jsonl", "--windows", 3)
    assert few[0]["tokens"] == 32 + 6 + 14  # windows 0, 2 and 4 of 7, the third of the first text
    assert [line["windows"] for line in lines] == ([3 + 1 + 1 + 2, 1] if stride is None else [6 + 1 + 1 + 2, 1])


@pytest.mark.numerics
def test_windows_overlap_from_the_start_of_a_set(trained, score, corpus):
    tokens = np.fromfile(corpus / "tiny/val-00000.bin", "<u2").tolist()
    (line,), out = score("--stride", 20, "--windows", 3)
    ids = tokens[: 32 + 2 * 20 + 1]
    assert (line["windows"], line["tokens"], line["stride"]) == (3, len(ids) - 1, 20)
    assert_close(line["loss"], np.mean(by_hand(load_model(trained).model, [ids], 32, 20)), "loss")
    assert "stride 20" in out
    (line,), _ = score("--stride", 32)
    assert line["tokens"] == len(tokens) - 1  # the whole split, its last tokens too
    assert line["bytes"] == len(ByteTokenizer().decode(token for token in tokens[1:] if token != EOT).encode())
    assert line["bytes"] == line["tokens"] - tokens.count(EOT)


def test_standard_error_of_unequal_windows():
    """By the definition for a ratio of sums; it equals that of a mean only for equal lengths."""
    nats, counts, each = np.array([10.0, 4.0, 9.0]), np.array([4, 2, 3]), np.arange(3)
    result = val_loss.summarize_losses(nats, counts, 18, each)
    assert result.loss == pytest.approx(23 / 9) and result.bits_per_byte == pytest.approx(23 / math.log(2) / 18)
    apart = [10 - 4 * 23 / 9, 4 - 2 * 23 / 9, 9 - 3 * 23 / 9]
    shares = [1 - count / 9 for count in counts]
    assert result.stderr == pytest.approx(math.sqrt(sum(d * d / s for d, s in zip(apart, shares, strict=True))) / 9)
    assert val_loss.summarize_losses(nats, counts, 18, np.zeros(3)) == result  # of a single document: over windows
    shared = val_loss.summarize_losses(nats, counts, 18, np.array([0, 0, 1]))
    assert shared._replace(stderr=0) == result._replace(stderr=0)
    assert shared.stderr == pytest.approx(math.sqrt((apart[0] + apart[1]) ** 2 * (9 / 3 + 9 / 6)) / 9)
    alone = val_loss.summarize_losses(nats[:1], counts[:1], 0, each[:1])
    assert math.isnan(alone.stderr) and math.isnan(alone.bits_per_byte)


def test_documents_of_scored_windows(trained, tmp_path, score, corpus):
    """Of a set by its end-of-text tokens, of a text file by its documents: ± is over these, however windows overlap."""
    trained_model, tokenizer = load_run(trained)
    tokens = np.fromfile(corpus / "tiny/val-00000.bin", "<u2")
    for stride in (None, 8):
        args = SimpleNamespace(split="val", stride=stride, windows=math.inf)
        scored = open_prepared(corpus / "tiny", trained_model, args, 6)
        middles = [(first + stop + 1) // 2 for _, stop, first in scored.windows.tolist()]
        wanted = [int(np.count_nonzero(tokens[:middle] == EOT)) for middle in middles]
        assert (np.diff(scored.documents) > 0).tolist() == (np.diff(wanted) > 0).tolist() and wanted[-1] > 2
    (tmp_path / "two.jsonl").write_bytes(jsonl([TEXT, "x" * 40]))
    scored = open_text(tmp_path / "two.jsonl", trained_model, tokenizer, SimpleNamespace(stride=8, windows=None))
    assert scored.documents.tolist() == [0] * 6 + [1] * 2


def write_set(path, tokenizer, length=99):
    ids = tokenizer.encode("x" * length)
    write_ids(path, ids, ids, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data tiny2", "--data tiny2: no such file"),
        ("--stride 33", "--stride 33: expected 1 to 32"),
        ("--data {}/short.txt", "short.txt: 1 token(s), expected at least 2"),
        ("--data {}/other", "other: its tokenizer ('gpt2') is not that of tiny"),
        ("--data {}/small", "20 tokens, but one window of block_size 32 needs 33"),
        ("--data {}/damaged", "damaged/val-00000.bin: expected sha256"),
    ],
)
def test_bad_input(trained, tmp_path, call, fake_ranks, words, message):
    (tmp_path / "short.txt").write_text("x")
    write_set(tmp_path / "other", GPT2Tokenizer(fake_ranks))
    write_set(tmp_path / "small", ByteTokenizer(), 20)
    write_set(tmp_path / "damaged", ByteTokenizer())
    (tmp_path / "damaged/val-00000.bin").write_bytes(b"y\0" * 99)
    said = call(main, trained, *words.format(tmp_path).split(), code=2)
    assert said.startswith("error: ") and message in said
    with pytest.raises(SystemExit, match="2"):
        main([str(trained), "--windows", "0"])
