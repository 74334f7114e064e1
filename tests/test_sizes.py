"""Sizes of chunks, parts and buffers, all tiny at once: no result may depend on them.

The plain sizes are far above anything in tests, so a fault at a boundary would only show in long
runs. test_prepare.py prepares sets in tiny batches and shards.
"""

import importlib
import json

import pytest
from numerics import SHARE
from runs import column, metrics, run

from eval import val_loss
from runtime.folder import path_of

# {module: {constant: tiny value}}
SIZES = {
    "data.bins": {"CHUNK_BYTES": 6, "RELEASE_BYTES": 64, "FAULT_BYTES": 8},
    "data.loader": {"STRETCH": 3},
    "eval.scoring": {"LOGITS": 30_000},
    "kernels.cross_entropy": {"CHUNK_BYTES": 40_000, "ROWS": 3},
    "kernels.torch_grouped": {"NARROW": 4, "FP32_WIDTH": 2, "PART_BYTES": 3000, "COPY_BYTES": 16},
}


@pytest.mark.numerics
def test_losses_do_not_depend_on_sizes(tiny, call, monkeypatch):
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
    for name, constants in SIZES.items():
        module = importlib.import_module(name)
        for constant, value in constants.items():
            assert value < getattr(module, constant)
            monkeypatch.setattr(module, constant, value)
    assert measure("tiny") == pytest.approx(plain, rel=2e-5 * SHARE)
