"""scripts/golden.py: every router trains as it did when tests/golden.json was committed."""

import json
import math

import pytest

from router import ROUTERS
from scripts import golden

LOSSES = json.loads(golden.FILE.read_text())["losses"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    golden.write_corpus(folder)
    return folder


@pytest.mark.parametrize("router", ROUTERS)
def test_golden_losses(router, folder):
    largest, first = golden.compare_losses(golden.train_router(router, folder), LOSSES.get(router, {}))
    assert first is None, (
        f"{router}: {first} is the first loss that differs from tests/golden.json, the largest relative difference is "
        f"{largest:.1e}, allowed are {golden.TOLERANCE:.1e}. If intended: python -m scripts.golden --update"
    )


def test_the_file_holds_the_routers_and_their_losses_alone():
    assert list(LOSSES) == list(ROUTERS)
    names = {f"train {step}" for step in range(1, 31)} | {"val 0", "val 10", "val 20", "val 30"}
    assert all(set(row) == names for row in LOSSES.values())
    assert len({json.dumps(row) for row in LOSSES.values()}) == len(ROUTERS)  # all routers differ
    assert all(row["val 30"] < 0.7 * row["val 0"] for row in LOSSES.values())


def test_compare_names_the_first_loss_that_differs():
    row = LOSSES["kern"]
    assert golden.compare_losses(row, row) == (0, None)
    shifted = {name: loss * (1 + 1.5e-6) for name, loss in row.items()}
    assert golden.compare_losses(shifted, row) == (pytest.approx(1.5e-6, rel=1e-3), None)
    assert golden.compare_losses(row | {"train 7": row["train 7"] * (1 - 2.5e-6)}, row)[1] == "train 7"
    assert golden.compare_losses(row | {"val 10": math.nan}, row) == (math.inf, "val 10")
    assert golden.compare_losses(row | {"train 31": 1.0}, row) == (math.inf, "train 31")
    less = {name: loss for name, loss in row.items() if name != "val 30"}
    assert golden.compare_losses(less, row) == (math.inf, "val 30")
    assert golden.compare_losses(row, {}) == (math.inf, "val 0")
