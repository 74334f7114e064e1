"""scripts/compare: what differs, losses paired by window, when it refuses, samples in columns."""

import math
import re
import shutil

import numpy as np
import pytest
from conftest import TINY
from runs import run as train_run
from test_report import invent, trained_on

import configure
from runtime import folder
from scripts import compare, sample
from scripts.report.claims import quantile
from scripts.report.runs import load


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
    assert head.splitlines() == [f"A: {trained[0]}", f"B: {trained[1]}"]
    assert [line.split() for line in rest.splitlines()[2:]] == [["model.router", "kern", "softmax"]]
    assert cells(out, "total") == ["0.03M", "0.03M"] and len(cells(out, "load imbalance")) == 2
    a, b = (load(run).evaluations[4] for run in trained)
    apart = np.subtract(a["val/window_losses"], b["val/window_losses"])
    half = quantile(5) * apart.std(ddof=1) / math.sqrt(6)
    row = [f"{value:.4f}" for value in (a["val/loss"], b["val/loss"])]
    row += [f"{apart.mean():+.4f}", f"[{apart.mean() - half:+.4f},", f"{apart.mean() + half:+.4f}]"]
    assert cells(out, "4  ") == row and len(cells(out, "2  ")) == 5
    assert "over the 6 validation windows" in out and "Seeds are not covered" in " ".join(out.split())
    texts = out.split("\n\n")[-1].splitlines()
    assert [part.strip() for part in texts[0].split("|")] == ["A, step 4", "B, step 4"]
    assert all(len(line) <= 100 and line[49] == "|" for line in texts)


@pytest.mark.parametrize("side, router", [(0, "kern"), (1, "softmax")])
def test_a_sample_is_that_of_scripts_sample(trained, said, capsys, monkeypatch, side, router):
    monkeypatch.setenv("COLUMNS", "79")  # one below the other
    monkeypatch.setattr(compare, "column", lambda head, text, width: [f"<{text}>"])
    texts = re.findall("<(.*?)>", said(*trained, "--prompt", "june", "--tokens", 9, "--seed", 3), re.DOTALL)
    sample.main([str(trained[side]), "--prompt", "june", "--tokens", "9", "--seed", "3", "--temperature", "0.8"])
    assert len(texts) == 2 and texts[side] == capsys.readouterr().out.removesuffix("\n")
    assert len(texts[side]) > len("june")


def test_the_last_step_that_both_have(tmp_path, said):
    long = invent(tmp_path / "long", "run.name=long")
    short = invent(tmp_path / "short", "run.name=short", until=0.7, end=2.5)
    out = said(long, short, "--no-sample")
    assert "nothing but run.name" in out
    flat = " ".join(out.split())
    assert "At step 700, the last that both have, A is lower by 0.5000 nats a token" in flat
    assert "Step 700 is one of 1,000 in A and of 1,000 in B" in flat
    rows = out.split("95% interval\n")[1].split("\n\n")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["100", "200", "400", "500", "700"]
    assert re.search(r"^step +1,000 +700 of 1,000$", out, re.MULTILINE)
    assert "is one of" not in said(long, long, "--no-sample")


def test_steps_of_the_table():
    assert compare.some(list(range(0, 1001, 100))) == [200, 400, 600, 800, 1000]
    assert compare.some([0, 5, 9]) == [5, 9] and compare.some([0]) == [0]
    assert compare.some(list(range(1, 8))) == [1, 2, 4, 5, 7]


def test_which_is_lower(tmp_path, said):
    """By the interval; open where it holds zero; without one where windows' losses were not logged."""
    runs = [
        invent(tmp_path / router, f"model.router={router}", f"run.name={router}", noise=0.05, end=end)
        for router, end in (("kern", 2.0), ("softmax", 2.5), ("tanh", 2.02))
    ]
    low, high, near = runs
    assert "B is lower by" in " ".join(said(high, low, "--no-sample").split())
    assert "A is lower by" in " ".join(said(low, high, "--no-sample").split())
    assert "which of the two is lower stays open" in " ".join(said(low, near, "--no-sample").split())
    bare = [invent(tmp_path / f"bare{i}", f"run.seed={i}", without=("val/window",)) for i in (0, 1)]
    out = " ".join(said(*bare, "--no-sample").split())
    assert "A minus B is -0.1000 nats a token, without an interval" in out
    assert "is lower by" not in out and "The interval is" not in out and "Seeds are not covered" in out


def test_what_else_may_make_the_difference(tmp_path, said):
    one = invent(tmp_path / "one")
    other = invent(tmp_path / "other", "run.seed=1", "train.batch_size=16", "train.deterministic=true")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1001, "tokens": 1, "val/loss": NaN}\n')
    out = said(one, other, "--no-sample")
    assert cells(out, "train.batch_size") == ["8", "16"] and cells(out, "train.deterministic") == ["false", "true"]
    flat = " ".join(out.split())
    assert "Their seeds differ" in flat and "A step is 2,048 tokens in A and 4,096 in B" in flat
    assert "B diverged: its loss was not finite at step 1,001" in flat
    assert "seeds differ" not in (same := said(one, one, "--no-sample")) and "tokens in A" not in same


# ---- what it refuses


def test_runs_on_other_text_show_their_configs_alone(tmp_path, error, said):
    def run(name, *overrides, facts=None, **shape):
        made = invent(tmp_path / name, f"run.name={name}", *overrides, **shape)
        if facts:
            trained_on(made, **facts)
        return made

    one = run("one", facts={"data": "1", "tokenizer": "t"})
    cases = {
        "trained on different data": run("data", "run.seed=1", facts={"data": "2", "tokenizer": "t"}),
        "trained on different tokenizer": run("tokens", "run.seed=1", facts={"data": "1", "tokenizer": "u"}),
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
    assert f"no samples: {run}: no checkpoint, it has none; train it first" in out and "temperature" not in out
    assert "A minus B" in out and cells(out, "4  ") == cells(said(*trained, "--no-sample"), "4  ")
    assert "no samples" not in said(trained[0], run, "--no-sample")


def test_columns_fit_the_terminal():
    texts = ["one\n    indented, and a line that is much too long for its column\n\n\tlast", "\x1b[2Jé" + "x" * 99]
    wide = compare.beside(["A", "B"], texts, 83).splitlines()
    assert wide[0].split("|") == ["A".ljust(41), " B"] and wide[1].split(" | ") == ["-" * 40] * 2
    left, right = zip(*(line.split(" |") for line in wide[2:]), strict=True)
    assert [part.rstrip() for part in left] == [
        "one", "    indented, and a line that is much", "too long for its column", "", "    last",
    ]  # fmt: skip
    assert "".join(part.strip() for part in right) == "\ufffd[2Jé" + "x" * 99
    assert max(map(len, wide)) <= 83
    narrow = compare.beside(["A", "B"], texts, 40).splitlines()
    assert narrow[0] == "A" and narrow[narrow.index("B") - 1] == "" and max(map(len, narrow)) == 40
