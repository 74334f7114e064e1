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


@pytest.fixture
def compare(monkeypatch):
    """A function: `compare(losses, *arguments)` runs the command as if routers trained to these."""

    def compare(losses, *arguments):
        monkeypatch.setattr(golden, "train_router", lambda router, folder: losses[router])
        return golden.main([*arguments])

    monkeypatch.setattr(golden, "write_corpus", lambda folder: None)
    return compare


@pytest.mark.parametrize(
    ("loss", "difference"), [(1 + 2.5e-6, "2.5e-06"), (math.nan, "inf"), (None, "inf")]
)
def test_the_command_fails_if_any_router_differs(compare, capsys, loss, difference):
    """Here the first of all, by one loss, one that is no number, or one that is missing."""
    first, *others = ROUTERS
    row = dict(LOSSES[first])
    expected = row.pop("train 7")
    if loss is not None:
        row["train 7"] = expected * loss
    assert compare(LOSSES | {first: row}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.search(rf"^{first} +{difference}  differs first: train 7$", lines[0])
    assert len(lines) == len(others) + 1 and all("within 2e-06" in line for line in lines[1:])
