"""scripts/compare: what differs, losses paired by window, when it refuses, samples in columns."""

import math
import re
import shutil
import sys

import numpy as np
import pytest
from conftest import TINY
from runs import run as train_run
from scipy import stats
from test_report import invent, trained_on

import configure
from runtime import folder
from scripts import compare, sample
from scripts.report.runs import load_run_record


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """Folders of a run of kern and of one of softmax, on the tiny corpus."""
    home = tmp_path_factory.mktemp("trained")
    (home / "tiny.toml").write_text(TINY.format(runs=(home / "runs").as_posix(), data=corpus.as_posix()))
    configs = [
        configure.load(home / "tiny.toml", [f"model.router={router}", f"run.name={router}"])
        for router in ("kern", "softmax")
    ]
    for config in configs:
        train_run(config)
    return [folder.path_of(config) for config in configs]


@pytest.fixture
def said(capsys):
    """said(A, B, …): what the command prints, of runs that nobody trained without samples."""

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


def test_two_trained_runs(trained, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = said(*trained, "--prompt", "a bee ", "--tokens", 70)
    head, rest = out.split("\n\n")[:2]
    assert head.splitlines() == [
        f"{side}: {run}, evaluated up to step 4" for side, run in zip("AB", trained, strict=True)
    ]
    assert [line.split() for line in rest.splitlines()[2:]] == [["model.router", "kern", "softmax"]]
    assert cells(out, "total") == ["0.03M", "0.03M"] and len(cells(out, "load imbalance")) == 2
    a, b = (load_run_record(run).evaluations[4] for run in trained)
    apart = np.subtract(a["val/window_losses"], b["val/window_losses"])
    half = stats.t.ppf(0.975, 5) * apart.std(ddof=1) / math.sqrt(6)
    row = [f"{value:.4f}" for value in (a["val/loss"], b["val/loss"])]
    row += [f"{apart.mean():+.4f}", f"[{apart.mean() - half:+.4f},", f"{apart.mean() + half:+.4f}]"]
    assert cells(out, "4  ")[:-1] == row and len(cells(out, "2  ")) == 6
    assert "over the 6 validation windows" in out and "Other seeds may differ by more" in out
    texts = out.split("\n\n")[-1].splitlines()
    assert [part.strip() for part in texts[0].split("|")] == ["A, step 4", "B, step 4"]
    assert all(len(line) <= 100 and line[49] == "|" for line in texts)


@pytest.mark.parametrize("side, router", [(0, "kern"), (1, "softmax")])
def test_a_sample_is_that_of_scripts_sample(trained, said, capsys, monkeypatch, side, router):
    monkeypatch.setattr(compare, "format_columns", lambda heads, texts, width: "".join(f"<{text}>" for text in texts))
    texts = re.findall("<(.*?)>", said(*trained, "--prompt", "june", "--tokens", 9, "--seed", 3), re.DOTALL)
    sample.main([str(trained[side]), "--prompt", "june", "--tokens", "9", "--seed", "3", "--temperature", "0.8"])
    assert len(texts) == 2 and texts[side] == capsys.readouterr().out.removesuffix("\n")
    assert len(texts[side]) > len("june")


def test_the_last_step_that_both_have(tmp_path, said):
    long = invent(tmp_path / "long", "run.name=long")
    short = invent(tmp_path / "short", "run.name=short", until=0.7, end=2.5)
    out = said(long, short, "--no-sample")
    assert "The configs differ only in run.name." in out
    assert f"A: {long}, evaluated up to step 1,000\nB: {short}, evaluated up to step 700\n" in out
    rows = out.split("lower\n")[1].split("\nIntervals")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["100", "300", "500", "700"]
    assert cells(out, "700") == ["2.0015", "2.5015", "-0.5000", "[-0.5000,", "-0.5000]", "A"]
    assert re.search(r"^step +1,000 +700 of 1,000$", out, re.MULTILINE)


def test_which_is_lower(tmp_path, said):
    """By the interval; undecided where it contains zero, and where windows' losses were not logged."""
    low, high, near = (
        invent(tmp_path / router, f"model.router={router}", f"run.name={router}", noise=0.05, end=end)
        for router, end in (("kern", 2.0), ("softmax", 2.5), ("tanh", 2.02))
    )
    for runs, lower in (((high, low), "B"), ((low, high), "A"), ((low, near), "undecided")):
        assert cells(said(*runs, "--no-sample"), "1,000")[-1] == lower
    bare = [invent(tmp_path / f"bare{i}", f"run.seed={i}", without=("val/window",)) for i in (0, 1)]
    assert cells(said(*bare, "--no-sample"), "1,000")[2:] == ["-0.1000", "undecided"]


def test_what_else_differs_is_shown(tmp_path, said):
    one = invent(tmp_path / "one")
    other = invent(tmp_path / "other", "run.seed=1", "train.batch_size=16", "train.deterministic=true")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1001, "tokens": 1, "val/loss": NaN}\n')
    out = said(one, other, "--no-sample")
    assert cells(out, "train.batch_size") == ["8", "16"] and cells(out, "train.deterministic") == ["false", "true"]
    assert cells(out, "run.seed") == ["0", "1"] and "loss not finite at 1,001" in out


def test_a_missing_package_is_named(monkeypatch, error):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert error("A", "B") == ("error: scipy not installed: pip install -r requirements-report.txt\n", "")


# ---- what it refuses


def test_runs_on_other_text_show_their_configs_alone(tmp_path, error, said):
    def run(name, *overrides, facts=None, **shape):
        made = invent(tmp_path / name, f"run.name={name}", *overrides, **shape)
        if facts:
            trained_on(made, **facts)
        return made

    one = run("one", facts={"data": "1", "tokenizer": "t"})
    cases = {
        "data (sha256 in their checkpoints) is 1 and": run("data", "run.seed=1", facts={"data": "2", "tokenizer": "t"}),
        "tokenizer (sha256 in their checkpoints) is": run(
            "tokens", "run.seed=1", facts={"data": "1", "tokenizer": "u"}
        ),
        "model.block_size is 256 and 128": run("length", "run.seed=1", "model.block_size=128"),
        "data.name is mix-bytes and pg19": run("name", "run.seed=1", "data.name=pg19"),
        "number of validation windows is 8 and 4": run("windows", "run.seed=1", windows=4),
        "evaluated at no common step": run("steps", "run.seed=1", "train.max_steps=999", points=1),
    }
    drop_step_0(cases["evaluated at no common step"])
    for words, other in cases.items():
        said_, before = error(one, other)
        assert words in said_ and "eval.val_loss" in said_
        assert cells(before, "run.seed") == ["0", "1"] and "validation loss" not in before
    same = run("same", "data.name=pg19", facts={"data": "1", "tokenizer": "t"})  # another name for the same data
    assert cells(said(one, same, "--no-sample"), "data.name") == ["mix-bytes", "pg19"]


def drop_step_0(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 0,' not in line))


def test_bad_input(trained, tmp_path, error):
    assert "not a run" in error(trained[0], tmp_path)[0]
    assert error(*trained, "--tokens", 0) == ("error: --tokens 0: expected 1 or more\n", "")
    assert "a prompt of 40 tokens" in error(*trained, "--prompt", "x" * 40)[0]


# ---- samples


def test_without_a_checkpoint_there_is_no_sample(trained, tmp_path, said):
    run = tmp_path / "without"
    shutil.copytree(trained[1], run, ignore=shutil.ignore_patterns("checkpoints"))
    out = said(trained[0], run)
    assert f"no samples: {run}: no checkpoint, it has none yet; train it first" in out and "temperature" not in out
    assert "A minus B" in out and cells(out, "4  ") == cells(said(*trained, "--no-sample"), "4  ")
    assert "no samples" not in said(trained[0], run, "--no-sample")


def test_columns_fit_the_terminal():
    texts = ["one\n    indented, and a line that is much too long for its column\n\n\tlast", "\x1b[2Jé" + "x" * 99]
    wide = compare.format_columns(["A", "B"], texts, 83).splitlines()
    assert wide[0].split("|") == ["A".ljust(41), " B"] and wide[1].split(" | ") == ["-" * 40] * 2
    left, right = zip(*(line.split(" |") for line in wide[2:]), strict=True)
    assert [part.rstrip() for part in left] == [
        "one", "    indented, and a line that is much", "too long for its column", "", "    last",
    ]  # fmt: skip
    assert "".join(part.strip() for part in right) == "\ufffd[2Jé" + "x" * 99
    assert max(map(len, wide)) <= 83
