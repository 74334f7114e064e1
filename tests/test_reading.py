"""The report and the table in the terminal agree about folders of every kind, with an independent
reading of metrics.jsonl.
"""

import fcntl
import html
import json
import math
import random
import re
import statistics
from contextlib import ExitStack
from itertools import product

import pytest
from fake_runs import make_run

from report import __main__ as report
from runtime import FAILURE_FILE
from scripts import watch

KINDS = ("finished", "young", "running", "stopped", "failed", "nan", "cut", "unreadable")
KINDS += ("failed at its end",)
UNTIL = {"young": 0, "running": 0.3, "stopped": 0.6, "failed": 0.4, "nan": 0.4}
STATES = {
    "young": "running",
    "nan": "failed",
    "cut": "stopped",
    "failed at its end": "failed",
}  # others are named like theirs


def make_kind(folder, kind, router, seed, locks):
    """Make a run's folder of a kind; running ones hold their lock until `locks` is closed."""
    own = [f"model.router={router}", f"run.seed={seed}"]
    make_run(folder, *own, until=UNTIL.get(kind, 1.0), end=2.0 + 0.1 * len(router), noise=0.01)
    metrics = folder / "metrics.jsonl"
    if kind.startswith("failed"):
        (folder / FAILURE_FILE).write_text("20 steps in a row skipped, NaN. Start again\n")
    elif kind == "nan":
        metrics.write_text(metrics.read_text() + '{"step": 500, "tokens": 1, "val/loss": NaN}\n')
    elif kind == "cut":  # within its last line, an evaluation
        metrics.write_text(metrics.read_text()[:-20])
    elif kind == "unreadable":
        (folder / "config.toml").write_text("[model")
    elif kind in ("young", "running"):
        lock = locks.enter_context((folder / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)


def read_last_loss(folder):
    """val/loss of step 1000, without the package's reader."""
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        if text.startswith('{"step": 1000,') and "val/loss" in text:
            return json.loads(text)["val/loss"]
    return math.nan


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("draw", range(4))
def test_every_reader_agrees_with_metrics(tmp_path, draw, capsys):
    rng = random.Random(draw)
    finished = {"kern": {}, "dense": {}}  # {router: {seed: loss}}
    out = tmp_path / "out"
    with ExitStack() as locks:
        kinds = {}
        for router, seed in product(finished, range(6)):
            kind = rng.choice(KINDS + ("finished",) * 6) if seed > 1 else "finished"
            folder = tmp_path / f"runs/{router}-{seed}"
            make_kind(folder, kind, router, seed, locks)
            kinds[folder] = kind
            if kind == "finished":
                finished[router][seed] = read_last_loss(folder)
        assert report.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
        terminal = watch.read_places([tmp_path / "runs"])
    page = html.unescape((out / "report.html").read_text())
    for folder, kind in kinds.items():
        if kind == "unreadable":
            for text in (page, terminal):
                assert re.search(rf"left out: {folder}: .*is not TOML", text)
            continue
        state = STATES.get(kind, kind)
        assert re.search(rf"{folder} .*{state} ", terminal)
        assert re.search(rf"{folder}\b.{{0,200}}{state}", page, re.S)
        assert (f"{folder} is not compared: {state} at step" in page) == (state != "finished")
    n_failed = sum(kind.startswith("failed") for kind in kinds.values())
    assert terminal.count("20 steps in a row skipped, NaN") == n_failed
    seeds = finished["kern"].keys() & finished["dense"].keys()
    differences = [finished["dense"][seed] - finished["kern"][seed] for seed in seeds]
    assert f"{statistics.fmean(differences):+.4f}" in page
