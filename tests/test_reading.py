"""The report and the table in the terminal agree about folders of every kind, with an independent
reading of metrics.jsonl.
"""

import fcntl
import html
import random
import re
import statistics
from contextlib import ExitStack
from itertools import product

import pytest
from fake_runs import loss_of, make_run

from report import __main__ as report
from runtime import FAILURE_FILE
from scripts import watch

STATES = {  # kind of a run: its state, and how much of it was trained
    "finished": ("finished", 1),
    "young": ("running", 0),
    "running": ("running", 0.3),
    "stopped": ("stopped", 0.6),
    "failed": ("failed", 0.4),
    "failed at its end": ("failed", 1),
    "nan": ("failed", 0.4),
    "cut": ("stopped", 1),
    "unreadable": ("", 1),
}


def make_kind(folder, kind, router, seed, locks):
    """Make a run's folder of a kind; running ones hold their lock until `locks` is closed."""
    own = [f"model.router={router}", f"run.seed={seed}"]
    make_run(folder, *own, until=STATES[kind][1], end=2.0 + 0.1 * len(router), noise=0.01)
    metrics = folder / "metrics.jsonl"
    if kind.startswith("failed"):
        (folder / FAILURE_FILE).write_text("20 steps in a row skipped, NaN. Start again\n")
    elif kind == "nan":
        metrics.write_text(metrics.read_text() + '{"step": 500, "tokens": 1, "val/loss": NaN}\n')
    elif kind == "cut":  # within its last line, an evaluation
        metrics.write_text(metrics.read_text()[:-20])
    elif kind == "unreadable":
        (folder / "config.toml").write_text("[model")
    elif STATES[kind][0] == "running":
        lock = locks.enter_context((folder / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("draw", range(4))
def test_every_reader_agrees_with_metrics(tmp_path, draw, capsys):
    rng = random.Random(draw)
    finished = {"kern": {}, "dense": {}}  # {router: {seed: loss}}
    out = tmp_path / "out"
    with ExitStack() as locks:
        kinds = {}
        for router, seed in product(finished, range(6)):
            kind = rng.choice([*STATES, *["finished"] * 6]) if seed > 1 else "finished"
            folder = tmp_path / f"runs/{router}-{seed}"
            make_kind(folder, kind, router, seed, locks)
            kinds[folder] = kind
            if kind == "finished":
                finished[router][seed] = loss_of(folder)
        assert report.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
        terminal = watch.read_places([tmp_path / "runs"])
    page = html.unescape((out / "report.html").read_text())
    for folder, kind in kinds.items():
        if kind == "unreadable":
            for text in (page, terminal):
                assert re.search(rf"left out: {folder}: .*is not TOML", text)
            continue
        state, _ = STATES[kind]
        assert re.search(rf"{folder} .*{state} ", terminal)
        assert re.search(rf"{folder}\b.{{0,200}}{state}", page, re.S)
        assert (f"{folder} is not compared: {state} at step" in page) == (state != "finished")
    n_failed = sum(kind.startswith("failed") for kind in kinds.values())
    assert terminal.count("20 steps in a row skipped, NaN") == n_failed
    seeds = finished["kern"].keys() & finished["dense"].keys()
    differences = [finished["dense"][seed] - finished["kern"][seed] for seed in seeds]
    assert f"{statistics.fmean(differences):+.4f}" in page
