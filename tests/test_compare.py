"""scripts.compare: what differs, losses paired by window, what it refuses, samples."""

import math
import re
import shutil

import numpy as np
import pytest
from conftest import write_tiny
from fake_runs import add_checkpoint, make_run
from runs import run as train_run
from scipy import stats

import configure
from eval.intervals import cluster_variance
from runtime import folder
from scripts import compare, sample
from scripts.report.runs import load_run_record


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """Folders of a run of kern and of one of softmax, on the tiny corpus."""
    file = write_tiny(tmp_path_factory.mktemp("trained"), corpus)
    configs = [configure.load(file, [f"model.router={name}", f"run.name={name}"]) for name in ("kern", "softmax")]
    for config in configs:
        train_run(config)
    return [folder.path_of(config) for config in configs]


@pytest.fixture
def said(capsys):
    """said(A, B, …): what the command prints."""

    def call(*arguments):
        assert compare.main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def error(capsys):
    """error(A, B, …): (its one line, what it printed before)."""

    def call(*arguments):
        assert compare.main([*map(str, arguments)]) == 2
        found = capsys.readouterr()
        assert len(found.err.splitlines()) == 1 and found.err.startswith("error: ")
        return found.err, found.out

    return call


def cells(out, name):
    """The cells after the first of the line that begins with `name`."""
    (line,) = [line for line in out.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


# ---- configs and losses


def test_two_trained_runs(trained, said):
    out = said(*trained, "--no-sample")
    head, rest = out.split("\n\n")[:2]
    assert head.splitlines() == [
        f"{side}: {run}, evaluated up to step 4" for side, run in zip("AB", trained, strict=True)
    ]
    assert rest.splitlines() == ["config, A -> B", "  model.router: 'kern' -> 'softmax'"]
    assert cells(out, "total") == ["0.03M", "0.03M"] and len(cells(out, "val imbalance")) == 2
    a, b = (load_run_record(run).evaluations[4] for run in trained)
    apart = np.subtract(a["val/window_losses"], b["val/window_losses"])
    variance, freedom = cluster_variance(apart, np.unique(a["val/window_documents"], return_inverse=True)[1])
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    row = [f"{value:.4f}" for value in (a["val/loss"], b["val/loss"])]
    row += [f"{apart.mean():+.4f}", f"[{apart.mean() - half:+.4f},", f"{apart.mean() + half:+.4f}]"]
    assert cells(out, "4  ")[:-1] == row and len(cells(out, "2  ")) == 6
    assert (
        "over the 6 validation windows of 4 documents, at most 2 of one, of both runs" in out
        and "Other seeds may differ by more" in out
    )
    assert "sample of" not in out


def test_samples_are_those_of_scripts_sample(trained, said, capsys):
    out = said(*trained, "--prompt", "june", "--tokens", 9, "--seed", 3).partition("\nsample of A, ")[2]
    texts = re.split(r"\n\nsample of B, .*:\n", out.partition(":\n")[2])
    for run, text in zip(trained, texts, strict=True):
        sample.main([str(run), "--prompt", "june", "--tokens", "9", "--seed", "3", "--temperature", "0.8"])
        assert text.removesuffix("\n") == capsys.readouterr().out.removesuffix("\n") and len(text) > len("june")
    assert texts[0] != texts[1]


def test_losses_at_the_steps_that_both_have(tmp_path, said):
    long = make_run(tmp_path / "long", "run.name=long")
    short = make_run(tmp_path / "short", "run.name=short", until=0.7, end=2.5)
    out = said(long, short, "--no-sample")
    assert "The configs differ only in run.name." in out
    assert f"A: {long}, evaluated up to step 1,000\nB: {short}, evaluated up to step 700\n" in out
    rows = out.split("lower\n")[1].split("\nIntervals")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["100", "300", "500", "700"]
    assert cells(out, "700") == ["2.0015", "2.5015", "-0.5000", "[-0.5000,", "-0.5000]", "A"]
    assert re.search(r"^step +1,000 +700 of 1,000$", out, re.MULTILINE)


def test_runs_with_arrays_in_their_metrics_compare_alike(tmp_path, said):
    """As older runs have them, also beside a run of today."""
    shapes = {"kern": {"noise": 0.05}, "softmax": {"noise": 0.05, "end": 2.1}}
    runs = {
        old: [
            make_run(tmp_path / str(old) / router, f"model.router={router}", f"run.name={router}", old=old, **shape)
            for router, shape in shapes.items()
        ]
        for old in (False, True)
    }
    new, old, mixed = (
        said(*pair, "--no-sample").split("\n\n")[1:]  # without the names of the folders
        for pair in (runs[False], runs[True], (runs[True][0], runs[False][1]))
    )
    assert new == old == mixed and "[" in new[-1]
    (ours, theirs) = (load_run_record(runs[old][0]).evaluations for old in (False, True))
    assert (
        ours == theirs
        and len(ours[1000]["val/loads"])
        and "val/loads" not in (runs[False][0] / "metrics.jsonl").read_text()
    )


def test_which_is_lower(tmp_path, said):
    """By the interval; undecided where it contains zero, and where windows' losses were not logged."""
    low, high, near = (
        make_run(tmp_path / router, f"model.router={router}", f"run.name={router}", noise=0.05, end=end)
        for router, end in (("kern", 2.0), ("softmax", 2.5), ("tanh", 2.02))
    )
    for runs, lower in (((high, low), "B"), ((low, high), "A"), ((low, near), "undecided")):
        assert cells(said(*runs, "--no-sample"), "1,000")[-1] == lower
    bare = [make_run(tmp_path / f"bare{i}", f"run.seed={i}", without=("val/window",)) for i in (0, 1)]
    with (bare[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1001, "tokens": 1, "val/loss": NaN}\n')
    out = said(*bare, "--no-sample")
    assert cells(out, "1,000")[2:] == ["-0.1000", "undecided"] and "loss not finite at 1,001" in out


# ---- what it refuses


def test_only_configs_of_runs_on_other_text_are_compared(tmp_path, error, said):
    one = make_run(tmp_path / "one")
    add_checkpoint(one, data="1", tokenizer="t")
    other = make_run(tmp_path / "data", "run.seed=1")
    add_checkpoint(other, data="2", tokenizer="t")
    cases = {
        "data (sha256 in their checkpoints) is 1 and 2": other,
        "model.block_size is 256 and 128": make_run(tmp_path / "length", "run.seed=1", "model.block_size=128"),
        "eval.spread is documents and tokens": make_run(tmp_path / "spread", "run.seed=1", "eval.spread=tokens"),
        "data.name is mix-bytes and pg19": make_run(tmp_path / "name", "run.seed=1", "data.name=pg19"),
    }
    for words, other in cases.items():
        said_, before = error(one, other)
        assert words in said_ and "eval.val_loss" in said_
        assert "  run.seed: 0 -> 1\n" in before and "validation loss" not in before
    same = make_run(tmp_path / "same", "data.name=pg19")  # another name for the same data
    add_checkpoint(same, data="1", tokenizer="t")
    assert "  data.name: 'mix-bytes' -> 'pg19'\n" in said(one, same, "--no-sample")


def test_bad_input(trained, tmp_path, error):
    assert "not a run" in error(trained[0], tmp_path)[0]
    assert error(*trained, "--tokens", 0)[0] == "error: --tokens 0: expected 1 or more\n"
    assert "a prompt of 40 tokens" in error(*trained, "--prompt", "x" * 40)[0]


def test_losses_are_compared_without_a_checkpoint(trained, tmp_path, error, said):
    run = tmp_path / "without"
    shutil.copytree(trained[1], run, ignore=shutil.ignore_patterns("checkpoints"))
    line, before = error(run, trained[0])
    assert line == f"error: {run}: no checkpoint, it has none yet; train it first\n" and "A minus B" in before
    assert cells(said(trained[0], run, "--no-sample"), "4  ") == cells(said(*trained, "--no-sample"), "4  ")
