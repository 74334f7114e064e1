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
from runtime import folder
from scripts import compare, sample
from scripts.report.runs import load_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """Folders of a run of kern and of one of softmax, on the tiny corpus."""
    file = write_tiny(tmp_path_factory.mktemp("trained"), corpus)
    configs = [configure.load(file, [f"model.router={name}", f"run.name={name}"]) for name in ("kern", "softmax")]
    for config in configs:
        train_run(config)
    return [folder.path_of(config) for config in configs]


@pytest.fixture
def error(capsys):
    """error(A, B, …): (its one line, what it printed before)."""

    def call(*arguments):
        assert compare.main([*map(str, arguments)]) == 2
        printed = capsys.readouterr()
        assert len(printed.err.splitlines()) == 1 and printed.err.startswith("error: ")
        return printed.err, printed.out

    return call


def cells(out, name):
    """The cells after the first of the line that begins with `name`."""
    (line,) = [line for line in out.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_two_trained_runs(trained, call):
    out = call(compare.main, *trained, "--no-sample")
    ends = [f"{side}: {run}, evaluated up to step 4" for side, run in zip("AB", trained, strict=True)]
    assert out.startswith("\n".join([*ends, "", "config, A -> B", "  model.router: 'kern' -> 'softmax'", ""]))
    assert cells(out, "total") == ["0.03M", "0.03M"] and len(cells(out, "val imbalance")) == 2
    a, b = (load_run(run).evaluations[4] for run in trained)
    apart = np.subtract(a["val/window_losses"], b["val/window_losses"])
    sizes = np.unique(a["val/window_documents"], return_counts=True)[1]
    sums = np.array([apart[np.equal(a["val/window_documents"], d)].sum() for d in np.unique(a["val/window_documents"])])
    error = math.sqrt(((sums - sizes * apart.mean()) ** 2 / (1 - sizes / 6)).sum()) / 6
    half = stats.t.ppf(0.975, max(1, (sizes**2).sum() ** 2 / (sizes**4).sum() - 1)) * error
    row = [f"{value:.4f}" for value in (a["val/loss"], b["val/loss"])]
    row += [f"{apart.mean():+.4f}", f"[{apart.mean() - half:+.4f},", f"{apart.mean() + half:+.4f}]"]
    assert cells(out, "4  ") == row and len(cells(out, "2  ")) == 5
    assert "over documents" in out and "nats per byte" in out and "lower" not in out  # one seed has no verdict
    assert cells(call(compare.main, *trained[::-1], "--no-sample"), "4  ")[2] == f"{-apart.mean():+.4f}"


def test_samples_are_those_of_scripts_sample(trained, call):
    out = call(compare.main, *trained, "--prompt", "june", "--tokens", 9, "--seed", 3).partition("\nsample of A, ")[2]
    texts = re.split(r"\n\nsample of B, .*:\n", out.partition(":\n")[2])
    for run, text in zip(trained, texts, strict=True):
        alone = call(sample.main, run, "--prompt", "june", "--tokens", 9, "--seed", 3, "--temperature", 0.8)
        assert text.removesuffix("\n") == alone.removesuffix("\n") and len(text) > len("june")
    assert texts[0] != texts[1]


def test_losses_at_the_steps_that_both_have(tmp_path, call):
    """At most five, the last among them; runs with their arrays in metrics.jsonl, as older ones, compare alike."""
    for old in (False, True):
        long = make_run(tmp_path / f"{old}/long", "run.name=long", old=old)
        short = make_run(tmp_path / f"{old}/short", "run.name=short", until=0.7, end=2.5)
        out = call(compare.main, long, short, "--no-sample")
        assert "The configs differ only in run.name." in out
        assert f"A: {long}, evaluated up to step 1,000\nB: {short}, evaluated up to step 700\n" in out
        rows = out.split("95% interval\n")[1].split("\nIntervals")[0].splitlines()[1:]
        assert [row.split()[0] for row in rows] == ["100", "300", "500", "700"]
        assert cells(out, "700") == ["2.0015", "2.5015", "-0.5000", "[-0.5000,", "-0.5000]"]
        assert re.search(r"^step +1,000 +700 of 1,000$", out, re.MULTILINE)


def test_only_configs_of_runs_on_other_text_are_compared(tmp_path, error, call):
    one = make_run(tmp_path / "one")
    add_checkpoint(one, data="1", tokenizer="t")
    for key, before, after in (("model.block_size", "256", "128"), ("eval.spread", "documents", "tokens")):
        other = make_run(tmp_path / key, "run.seed=1", f"{key}={after}")
        line, printed = error(one, other)
        assert f"{key} is {before} and {after}" in line and "eval.val_loss" in line
        assert "  run.seed: 0 -> 1\n" in printed and "validation loss" not in printed
    same = make_run(tmp_path / "same", "data.name=pg19")  # another name for the same data
    add_checkpoint(same, data="1", tokenizer="t")
    assert "  data.name: 'mix-bytes' -> 'pg19'\n" in call(compare.main, one, same, "--no-sample")


def test_bad_input(trained, tmp_path, error):
    assert "not a run" in error(trained[0], tmp_path)[0]
    assert error(*trained, "--tokens", 0)[0] == "error: --tokens 0: expected 1 or more\n"
    without = tmp_path / "without"
    shutil.copytree(trained[1], without, ignore=shutil.ignore_patterns("checkpoints"))
    line, before = error(without, trained[0])
    assert "no checkpoint" in line and "A minus B" in before  # the losses are compared all the same
    early, late = (make_run(tmp_path / name, "eval.windows=8", until=0) for name in ("early", "late"))
    (late / "metrics.jsonl").write_text('{"step": 9, "tokens": 1, "val/loss": 1}\n')
    assert "no common step" in error(early, late, "--no-sample")[0]
