"""tools/golden.py: every router trains as it did when tests/golden.json was committed."""

import json
import math
import re

import pytest

from router import ROUTERS
from tools import golden

LOSSES = json.loads(golden.FILE.read_text())["losses"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    golden.write_corpus(folder)
    return folder


@pytest.mark.parametrize("router", ROUTERS)
def test_golden_losses(router, folder):
    differences = golden.compare_losses(golden.train_router(router, folder), LOSSES.get(router, {}))
    differing = {
        name: difference
        for name, difference in differences.items()
        if difference > golden.TOLERANCE
    }
    assert not differing, f"{router}: if intended, python -m tools.golden --update; {differing}"


@pytest.mark.gpu
@pytest.mark.parametrize("router", ["softmax", "kern"])
def test_a_gpu_gives_the_golden_losses(router, folder):
    losses = golden.train_router(router, folder, "--train.device=cuda", "--train.compile=off")
    differences = golden.compare_losses(losses, LOSSES[router])
    assert max(differences.values()) < 1e-3  # another device's rounding grows from step to step


def test_a_loss_that_is_missing_or_not_finite_differs():
    row = LOSSES["kern"]
    assert set(golden.compare_losses(row, row).values()) == {0}
    changed = row | {"train 7": row["train 7"] * (1 - 2.5e-6), "val 10": math.nan, "train 31": 1.0}
    del changed["val 30"]
    differing = {
        name: d for name, d in golden.compare_losses(changed, row).items() if d > golden.TOLERANCE
    }
    infinite = dict.fromkeys(("val 10", "train 31", "val 30"), math.inf)
    assert differing == infinite | {"train 7": pytest.approx(2.5e-6, rel=1e-3)}


def test_the_command_fails_if_any_router_differs(monkeypatch, capsys):
    """Here the first of all; the last ones are equal."""
    made = {router: dict(losses) for router, losses in LOSSES.items()}
    first, *others = ROUTERS
    made[first]["train 7"] *= 1.01
    monkeypatch.setattr(golden, "write_corpus", lambda folder: None)
    monkeypatch.setattr(golden, "train_router", lambda router, folder: made[router])
    assert golden.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.search(rf"^{first} +1\.0e-02  differs first: train 7$", lines[0])
    assert len(lines) == len(others) + 1 and all("within 2e-06" in line for line in lines[1:])


def test_an_update_leaves_the_rows_that_are_within_the_tolerance(monkeypatch, tmp_path):
    """Another machine rounds differently: a new router's commit changes no other row."""
    text = golden.FILE.read_text()
    file = tmp_path / "golden.json"
    old = json.loads(text)
    new = list(ROUTERS)[-1]
    of_new = old["losses"].pop(new)
    file.write_text(json.dumps(old))
    monkeypatch.setattr(golden, "FILE", file)
    monkeypatch.setattr(golden, "write_corpus", lambda folder: None)
    rounded = {
        router: {name: loss * (1 + 1e-7 * (router != new)) for name, loss in row.items()}
        for router, row in LOSSES.items()
    }
    monkeypatch.setattr(golden, "train_router", lambda router, folder: rounded[router])
    assert golden.main(["--update"]) == 0
    assert file.read_text() == text and of_new == LOSSES[new]
