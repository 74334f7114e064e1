"""runtime/metrics.py: lines and arrays through kills, full disks and damage."""

import errno
import json
import math
import os
from itertools import accumulate

import numpy as np
import pytest
import torch
from conftest import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import largest_file, read_lines

from runtime import RunError
from runtime.metrics import ARRAYS, Metrics, read_metrics


def log_run(folder, steps=range(6), resume_step=-1):
    """Log training and, at even steps, an evaluation, with arrays that tell their step."""
    folder.mkdir(exist_ok=True)
    metrics = Metrics(folder, resume_step)
    for step in steps:
        loads = torch.tensor([[step, 0.5], [1, 2]])
        metrics.log(step, 0, **{"train/loss": 1.0, "router/loads": loads})
        if step % 2 == 0:
            losses = torch.tensor([step, 0.1], dtype=torch.float64)
            metrics.log(step, 0, **{"val/loss": 2.0, "val/window_losses": losses})
    return metrics


def steps(folder, file="metrics.jsonl"):
    return [line["step"] for line in read_metrics(folder / file)]


def read_all(folder):
    lines = read_lines(folder / "metrics.jsonl")
    return {(line["step"], name): line[name] for line in lines for name in ARRAYS if name in line}


def names_in(folder):
    return sorted(path.name for path in (folder / "arrays").iterdir())


BROKEN = {
    "not UTF-8": b'{"step": 1, "tokens": 2, "a\xff": 3}',
    "a list": b'["step", "tokens"]',
    "no step": b'{"tokens": 2}',
    "no tokens": b'{"step": 1}',
    "step a float": b'{"step": 1.0, "tokens": 2}',
    "step beyond int64": b'{"step": 9223372036854775808, "tokens": 2}',
    "step below zero": b'{"step": -1, "tokens": 2}',
    "a text": b'{"step": 1, "tokens": 2, "val/loss": "2.5"}',
    "a list in place of a number": b'{"step": 1, "tokens": 2, "val/loss": [2.5]}',
    "a text in a list": b'{"step": 1, "tokens": 2, "val/loads": [[1, "2"]]}',
    "nested": b'{"step": 1, "tokens": 2, "val/loss": {"a": 2.5}}',
    "nested without end": b"[" * 100_000,
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    good = b'{"step": 0, "tokens": 0}'
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([good, line, good, b""]))
    with pytest.raises(RunError, match=r"line 2 is not a JSON object .*; remove that line"):
        Metrics(tmp_path, 0)
    assert file.read_bytes().count(good) == 2  # left as it was
    file.write_bytes(b"\n".join([good, b'{"step": 1}']))  # whole, so no kill has cut it
    with pytest.raises(RunError, match="line 2 is not"):
        read_metrics(file)


@settings(fuzz, max_examples=40)
@given(cut=st.integers(0, 460), nuls=st.sampled_from([0, 0, 7]))
def test_a_kill_at_any_byte_loses_one_line_at_most(tmp_path, cut, nuls):
    lines = []
    for step in range(5):  # the list of an older version stays in its line
        line = {"step": step, "tokens": 64 * step, "train/loss": 1 / (step + 1)}
        lines.append(line | {"router/loads": [[9.0, 0.5]]})
    texts = [json.dumps(line) + "\n" for line in lines]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(texts).encode()[:cut] + b"\0" * nuls)
    # complete without its line break, but not with NULs
    ends = [end - (nuls == 0) for end in accumulate(map(len, texts))]
    complete = sum(end <= cut for end in ends)
    assert read_metrics(path) == lines[:complete]
    metrics = Metrics(tmp_path, 3)
    metrics.log(9, 576, **{"train/loss": torch.tensor(2.5), "val/loss": -math.inf})
    last = {"step": 9, "tokens": 576, "train/loss": 2.5, "val/loss": -math.inf}
    assert read_metrics(path) == [*lines[: min(complete, 4)], last]  # at once
    metrics.close()
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("killed_at", range(6))
@pytest.mark.parametrize("saved_at", [-1, 0, 1, 3])
def test_a_resumed_run_has_the_lines_and_arrays_of_one_that_was_not_killed(
    tmp_path, saved_at, killed_at
):
    log_run(tmp_path, range(saved_at + 1)).sync()
    log_run(tmp_path, range(saved_at + 1, killed_at), resume_step=saved_at)
    (tmp_path / "arrays").mkdir(exist_ok=True)
    (tmp_path / "arrays/val_00000009.npz.1.tmp").touch()
    log_run(tmp_path, range(saved_at + 1, 6), resume_step=saved_at).close()
    wanted = {(step, "router/loads"): [[step, 0.5], [1, 2]] for step in range(6)}
    wanted |= {(step, "val/window_losses"): [step, 0.1] for step in (0, 2, 4)}
    assert read_all(tmp_path) == wanted
    assert steps(tmp_path) == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert not [*tmp_path.glob("arrays/*.tmp")]


def test_arrays_are_beside_short_lines(tmp_path):
    metrics = log_run(tmp_path)
    first, second, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == '{"step": 0, "tokens": 0, "train/loss": 1.0}'
    assert second == '{"step": 0, "tokens": 0, "val/loss": 2.0}'
    files = [f"{prefix}_0000000{step}.npz" for prefix in ("router", "val") for step in (0, 2, 4)]
    assert names_in(tmp_path) == files  # each evaluation writes; the loads of step 5 wait
    metrics.close()
    assert names_in(tmp_path) == sorted([*files, "router_00000005.npz"])
    arrays = np.load(tmp_path / "arrays/router_00000004.npz")
    assert arrays["step"].tolist() == [3, 4] and arrays["router/loads"].shape == (2, 2, 2)
    line = read_lines(tmp_path / "metrics.jsonl")[-2]
    assert line == {"step": 4, "tokens": 0, "val/loss": 2.0, "val/window_losses": [4, 0.1]}


def test_an_evaluation_that_has_a_line_has_its_arrays(tmp_path, monkeypatch):
    """After a kill in between it has no line, so a resume repeats it."""
    metrics = log_run(tmp_path, steps=range(1))

    def kill(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("runtime.metrics.memoryview", kill, raising=False)  # before the line
        metrics.log(2, 0, **{"val/loss": 2.0, "val/window_losses": torch.ones(2)})
    assert names_in(tmp_path)[-1] == "val_00000002.npz" and steps(tmp_path)[-1] == 0


def test_what_is_written_is_synced_in_order(tmp_path, disk_calls):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "tokens": 0}\n{"step": 9, "tokens": 9}\n')
    rewriting = ["sync metrics.jsonl.tmp", "rename metrics.jsonl", f"sync {tmp_path.name}"]
    metrics = Metrics(tmp_path, 0)
    metrics.log(1, 64, **{"router/loads": torch.ones(1, 2)})
    assert disk_calls == rewriting
    metrics.sync()
    arrays = ["sync router_00000001.npz.tmp", "rename router_00000001.npz", "sync arrays"]
    assert disk_calls == [*rewriting, *arrays, "sync metrics.jsonl"]
    metrics.close()


def test_a_full_disk_ends_the_run_and_its_resume_has_each_line_once(tmp_path):
    metrics = log_run(tmp_path, steps=[1])
    with largest_file(60):
        with pytest.raises(RunError, match=r"jsonl cannot be written \(File too large\)\. Make"):
            metrics.log(2, 128, **{"a long name": 1.5})  # written in part
        with pytest.raises(RunError, match=r"npz cannot be written \(File too large\)\. Make"):
            metrics.close()
    assert steps(tmp_path) == [1] and not names_in(tmp_path)
    log_run(tmp_path, steps=[2, 3], resume_step=1).close()  # there is room again
    assert steps(tmp_path) == [1, 2, 2, 3]


def test_lines_that_nobody_can_look_at_are_kept(tmp_path, monkeypatch):
    """As of a network's disk that fails for a moment."""
    log_run(tmp_path, range(3)).close()
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    stat = os.stat

    def fail(path, **options):
        if str(path).endswith("metrics.jsonl"):
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **options)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(os, "stat", fail)
        Metrics(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines


def test_numbers_of_a_run_that_starts_over_are_kept_in_another_file(tmp_path, capsys):
    lost = f"{tmp_path}/metrics.jsonl: {{}}, so its steps {{}} begin again\n"
    log_run(tmp_path, range(3)).close()
    Metrics(tmp_path, 2).close()
    assert capsys.readouterr().out == ""  # nothing is lost
    log_run(tmp_path, [2], resume_step=1).close()
    said = lost.format("resumed from the checkpoint of step 1", "2 to 2")
    assert capsys.readouterr().out == said
    for is_first in (True, False):  # the second run is shorter and does not replace the first
        log_run(tmp_path, [0]).close()
        said = lost.format("no checkpoint", "1 to 2") if is_first else ""
        assert capsys.readouterr().out == said
        assert steps(tmp_path, "metrics.old.jsonl") == [0, 0, 1, 2, 2]
        assert steps(tmp_path) == [0, 0] and len([*(tmp_path / "arrays.old").iterdir()]) == 4
    log_run(tmp_path).close()
    Metrics(tmp_path, -1).close()  # a longer one does
    assert max(steps(tmp_path, "metrics.old.jsonl")) == 5
    assert len([*(tmp_path / "arrays.old").iterdir()]) == 7
