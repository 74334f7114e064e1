"""Sizes of chunks, parts and buffers, all tiny at once: no result may depend on them.

The plain sizes are far above anything in tests, so a fault at a boundary would only show in long
runs. Bytes of prepared sets are compared exactly, losses to rounding.
"""

import importlib
import json

import pytest
from numerics import SHARE
from runs import column, metrics, run

from data import prepare
from eval import val_loss
from runtime.folder import path_of

# {module: {constant: tiny value}}
SIZES = {
    "data.bins": {"CHUNK_BYTES": 6, "RELEASE_BYTES": 64, "FAULT_BYTES": 8},
    "data.loader": {"STRETCH": 3},
    "data.prepare": {"SAVE_BYTES": 50, "WORKER_BYTES": 60, "SHARD_TOKENS": 97},
    "data.readers": {"READ_BYTES": 5},
    "data.workers": {"BATCH_BYTES": 40},
    "eval.scoring": {"LOGITS": 30_000},
    "kernels.cross_entropy": {"CHUNK_BYTES": 40_000, "ROWS": 3},
    "kernels.torch_grouped": {"NARROW": 4, "FP32_WIDTH": 2, "PART_BYTES": 3000, "COPY_BYTES": 16},
}


@pytest.fixture
def shrink(monkeypatch):
    """A function that sets all SIZES."""

    def shrink():
        for name, constants in SIZES.items():
            module = importlib.import_module(name)
            for constant, value in constants.items():
                assert value < getattr(module, constant)
                monkeypatch.setattr(module, constant, value)

    return shrink


def write_texts(folder):
    """Files of documents in lines and whole: empty ones, CRLF, letters of one to four bytes."""
    folder.mkdir()
    texts = []
    for number in range(80):
        texts.append(f"{number} é€𝄞\r\nline " + "ab" * (number % 23))
    lines = [
        json.dumps({"text": text}, ensure_ascii=number % 2 == 0)
        for number, text in enumerate(texts)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8", newline="")
    (folder / "b.txt").write_text("\n".join(texts), encoding="utf-8", newline="")
    (folder / "c.txt").write_text("€", encoding="utf-8")
    return [folder / name for name in ("a.jsonl", "b.txt", "c.txt")]


def prepare_texts(files, place, call, workers):
    words = ["text", "--source", *files, "--name", "set", "--tokenizer", "bytes"]
    out = call(prepare.main, *words, "--out", place, "--workers", workers)
    assert f", {workers} worker" in out
    meta = json.loads((place / "set/meta.json").read_text())
    content = {}
    for split in ("train", "val"):
        shards = sorted((place / "set").glob(f"{split}-*.bin"))
        content[split] = b"".join(shard.read_bytes() for shard in shards)
    counts = {
        split: [entry["tokens"], entry["documents"]] for split, entry in meta["splits"].items()
    }
    return content, counts, len(list((place / "set").glob("*.bin")))


@pytest.mark.parametrize("workers", [1, 2])
def test_prepared_bytes_do_not_depend_on_sizes(tmp_path, call, shrink, workers):
    files = write_texts(tmp_path / "texts")
    content, counts, n_shard = prepare_texts(files, tmp_path / "plain", call, 1)
    assert n_shard == 2
    shrink()
    found, found_counts, n_shard = prepare_texts(files, tmp_path / "tiny", call, workers)
    assert n_shard > 20
    assert found == content and found_counts == counts


@pytest.mark.numerics
def test_losses_do_not_depend_on_sizes(tiny, call, shrink):
    own = ["model.router=kern-norelu", "train.micro_batch_size=4", "train.max_steps=2"]

    def measure(name):
        config = tiny(*own, f"run.name={name}")
        lines = run(config)
        call(val_loss.main, path_of(config), "--windows", 20)
        (file,) = (path_of(config) / "eval").rglob("val_loss.json")
        scores = json.loads(file.read_text().splitlines()[-1])
        values = []
        for key in ("train/loss", "optim/grad_norm", "val/loss"):
            values += column(lines, key)
        assert metrics(config) == lines
        for key in ("loss", "low", "bits_per_byte", "tokens"):
            values.append(scores[key])
        for documents in column(lines, "val/window_documents"):
            values += documents
        return values

    plain = measure("plain")
    shrink()
    assert measure("tiny") == pytest.approx(plain, rel=2e-5 * SHARE)
