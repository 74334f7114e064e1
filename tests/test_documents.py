"""data.document_mask: a cache against each document alone, and commands with masks.

test_combinations.py compares training with masks.
"""

import json

import numpy as np
import pytest
import torch
from corpora import write_ids
from numerics import assert_near, seeded, tolerance
from runs import all_logits, column, run
from test_model import VARIANTS, T, V, build_random

from attention import KVCache
from data import DataError
from eval import val_loss
from hf.export import export
from runtime.folder import path_of
from runtime.parallel import gather_model
from runtime.preflight import plan_run
from scripts import sample

END = V - 1
MASKED = "data.document_mask=true"
# (row, first, stop) of each document in three windows; the first one of a row has begun before it
DOCUMENTS = [(0, 0, 3), (0, 3, 8), (0, 8, T), (1, 0, 6), (1, 6, 7), (1, 7, T), (2, 0, T)]


def build(token=END, **update):
    # all experts, or those of a table: no choice that rounding could change
    model = build_random(router="kern", **{"top_k": 8} | update)
    model.document_token = token
    return model


def make_windows():
    """Tokens (3, T) of DOCUMENTS."""
    idx = torch.randint(END, (3, T), generator=seeded())
    idx[0, [3, 8]] = idx[1, [0, 6, 7]] = END
    return idx


def test_a_model_that_ranks_gather_keeps_documents_apart():
    model = build().float()
    idx = make_windows()
    assert all_logits(gather_model(model), idx).equal(all_logits(model, idx))


@pytest.mark.numerics
@pytest.mark.parametrize("update", VARIANTS)
@pytest.mark.parametrize("token", [None, END])
def test_a_cache_equals_each_document_alone(token, update):
    """Or each window, without a mask."""
    model, plain = (build(end, **update).eval() for end in (token, None))
    idx = make_windows()
    documents = [(row, 0, T) for row in range(3)] if token is None else DOCUMENTS
    start = torch.tensor([2, 0, 5])
    for row, first in enumerate(start.tolist()):
        idx[row, :first] = END
    past = KVCache(model.config, start, T, torch.float64)
    assert past.columns.shape == (3, 2, 3, update.get("n_kv_head", 2) or 4, T, 8)
    limit = tolerance(torch.float64, 64, roundings=32)
    with torch.no_grad():
        parts = [all_logits(model, part, past) for part in idx.split([4, 1, 2, 1, 1, 3], 1)]
        logits = torch.cat(parts, 1)
        for row, first, stop in documents:
            first = max(first, int(start[row]))
            (whole,) = all_logits(plain, idx[row : row + 1, first:stop])
            assert_near(logits[row, first:stop], whole, limit, f"row {row} from {first}")


def test_evaluation_has_the_mask_of_training(tiny, call, tmp_path):
    config = tiny(MASKED, "eval.windows=60")  # some of them with ends
    logged = column(run(config), "val/loss")[-1]
    call(val_loss.main, path_of(config))
    (line,) = map(json.loads, (path_of(config) / "eval/step_00000004/val_loss.json").open())
    assert line["loss"] == pytest.approx(logged, rel=1e-6)
    call(sample.main, path_of(config), "--prompt", "a", "--tokens", 40, "--ignore-end")
    assert "data.document_mask = true" in call(
        export.main, path_of(config), tmp_path / "out", code=2
    )
    assert not (tmp_path / "out").exists()


def test_what_a_mask_refuses(tiny, tmp_path):
    ids = np.arange(2000) % 200
    ids[-1] = 256  # the only end
    write_ids(tmp_path / "one", ids, ids)
    one = [f"data.dir={tmp_path}", "data.name=one"]
    with pytest.raises(
        DataError, match="its training split is one document, so.*one to a file or to a row"
    ):
        plan_run(tiny(MASKED, *one), None, None)
    plan_run(tiny(*one), None, None)
    write_ids(tmp_path / "many", np.tile(ids, 2), ids)
    mix = [f"data.dir={tmp_path}", "data.mix={many = 1, one = 1}"]
    with pytest.raises(DataError, match=f"^{tmp_path}/one: its training split is one document"):
        plan_run(tiny(MASKED, *mix), None, None)
