"""Report, live page, terminal and sweep's table agree about folders of every kind, with an
independent reading of metrics.jsonl.
"""

import fcntl
import html
import itertools
import json
import math
import random
import re
import statistics
from contextlib import ExitStack

import pytest
from fake_runs import make_run

from report.__main__ import make_report_parser
from report.comparisons import compare_group
from report.page import read_report
from runtime import FAILURE_FILE
from runtime.runs import read_runs
from scripts import sweep, watch

KINDS = ("finished", "young", "running", "stopped", "failed", "nan", "cut", "unreadable", "shape")
NAN_LINE = '{"step": 500, "tokens": 1, "val/loss": NaN}\n'


def make_kind(folder, kind, router, seed, locks):
    """Make a run's folder of a kind; running ones hold their lock until `locks` is closed."""
    until = {"young": 0, "running": 0.3, "stopped": 0.6, "failed": 0.4, "nan": 0.4}.get(kind, 1.0)
    own = [f"model.router={router}", f"run.seed={seed}"]
    if kind == "shape":
        own.append("model.n_layer=3")
    make_run(folder, *own, until=until, end=2.0 + 0.1 * len(router), noise=0.01)
    metrics = folder / "metrics.jsonl"
    if kind == "failed":
        (folder / FAILURE_FILE).write_text("20 steps in a row skipped, NaN. Start again\n")
    elif kind == "nan":
        metrics.write_text(metrics.read_text() + NAN_LINE)
    elif kind == "cut":  # within its last line
        metrics.write_text(metrics.read_text()[:-20])
    elif kind == "unreadable":
        (folder / "config.toml").write_text("[model")
    elif kind in ("young", "running"):
        lock = locks.enter_context((folder / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)


def read_losses(folder):
    """{step: val/loss} of the whole lines of metrics.jsonl, without the package's reader."""
    losses = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if "val/loss" in values:
            losses[values["step"]] = values["val/loss"]
    return losses


def expected_state(kind, losses):
    """The state that a run of a kind is in."""
    if kind in ("young", "running"):
        return "running"
    if kind in ("failed", "nan"):
        return "failed"
    return "finished" if math.isfinite(losses.get(1000, math.nan)) else "stopped"


def check_state(folder, state, tables, page, notes):
    """The tables, the page and the notes of the report have this state of the run in `folder`."""
    for text in tables:
        assert re.search(rf"{folder} .*{state} ", text)
    assert re.search(rf"{folder}\b.{{0,200}}{state}", page, re.S)
    said = f"{folder} is not compared: {state} at step"
    assert (said in notes) == (said in page) == (state != "finished")


def check_pair(pair, finished):
    """A pair's difference is the mean over the seeds that both routers finished."""
    differences = []
    for seed in (0, 1, 2, 8):
        first = finished.get((pair.left.router, seed))
        second = finished.get((pair.right.router, seed))
        if first is not None and second is not None:
            differences.append(first - second)
    assert pair.difference.seeds == len(differences)
    assert pair.difference.mean == pytest.approx(statistics.fmean(differences))


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("draw", range(4))
def test_every_reader_agrees_with_metrics(tmp_path, draw):
    """Each step adds a folder of some kind; then states and differences are checked."""
    rng = random.Random(draw)
    cells = list(itertools.product(("dense", "kern", "softmax"), range(3)))
    rng.shuffle(cells)
    kinds = {}
    with ExitStack() as locks:
        for router, seed in [("kern", 8), ("dense", 8), *cells]:
            kind = "finished" if seed == 8 else rng.choice(KINDS + ("finished",) * 6)
            folder = tmp_path / f"{router}-{seed}"
            make_kind(folder, kind, router, seed, locks)
            kinds[folder] = (kind, router, seed)
        args = make_report_parser("scripts.report", None).parse_args([str(tmp_path)])
        report = read_report(args)
        page = html.unescape(watch.build_page(read_runs([tmp_path]), {})["/"].decode())
        terminal = watch.format_table([tmp_path])
        table_of_sweep = sweep.format_table(list(kinds))

    notes = "\n".join(report.notes)
    finished = {}  # {(router, seed): loss}
    for folder, (kind, router, seed) in kinds.items():
        if kind == "unreadable":
            for text in (notes, page, terminal, table_of_sweep):
                assert re.search(rf"left out: {folder}: .*is not TOML", text)
            continue
        losses = read_losses(folder)
        state = expected_state(kind, losses)
        check_state(folder, state, [terminal, table_of_sweep], page, notes)
        if state == "finished" and kind != "shape":
            finished[router, seed] = losses[1000]
    n_failed = sum(kind == "failed" for kind, _, _ in kinds.values())
    assert terminal.count("20 steps in a row skipped, NaN") == n_failed

    (group,) = [group for group in report.groups if group.values["model.n_layer"] == 2]
    assert group.steps[-1] == 1000
    compared = {(run.config.model.router, run.seed) for run in group.runs}
    assert compared == finished.keys()
    for pair in compare_group(group):
        check_pair(pair, finished)
        assert f"{pair.difference.mean:+.4f}" in page
