"""runtime/tracker.py: TensorBoard's files by TensorBoard's own reader, a stand-in where it is not installed."""

import sys
from collections import defaultdict
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from runs import column, run

import train
from runtime.folder import path_of
from runtime.tracker import flatten_line

ON = ["log.tensorboard=true", "train.checkpoint_interval=2"]


@pytest.fixture
def read():
    """read(config): {tag: [(step, value)]} as TensorBoard shows them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def call(config):
        found = reader.EventAccumulator(str(path_of(config) / "tensorboard"))
        found.Reload()
        return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    return call


def wanted(lines, first_layer=0):
    found = defaultdict(list)
    for line in (flatten_line(line, first_layer) for line in lines):
        for name in line.keys() - {"step", "tokens"}:
            found[name].append((line["step"], pytest.approx(line[name])))  # TensorBoard has float32
    return found


def test_steps_that_are_trained_again_are_there_once(tiny, read, before_steps):
    """A run that dies between checkpoints, and resumes; its first layer is dense."""
    config = tiny(*ON, "model.n_dense_layer=1")
    before_steps(lambda step: 1 / (step - 3))
    with pytest.raises(ZeroDivisionError):
        train.train(config)
    assert read(config)["train/loss"][-1][0] == 3  # step 3 was written; the checkpoint is of step 2
    before_steps(None)
    lines = run(config)
    found = read(config)
    assert found == wanted(lines, 1) and column(lines, "step") == [0, 1, 2, 2, 3, 4, 4]
    assert {"train/loss", "val/loss", "router/gate_norm", "router/load_imbalance/layer_01"} <= found.keys()
    assert not any("layer_00" in name for name in found)


def test_a_missing_package_is_named_before_anything_is_made(tiny, monkeypatch, tiny_file, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert train.main([str(tiny_file), "--log.tensorboard=true", "--data.name=absent"]) == 2
    error = capsys.readouterr().err
    assert "log.tensorboard" in error and "pip install tensorboard" in error and not path_of(tiny()).exists()
    assert run(tiny("train.max_steps=2"))[-1]["step"] == 2  # nobody else needs it


@pytest.mark.parametrize("broken", ["SummaryWriter", "add_scalar"])
def test_a_failure_costs_one_line(tiny, monkeypatch, capsys, broken):
    def fail(*args, **options):
        raise OSError("disk full\nand more")

    writer = SimpleNamespace(add_scalar=fail, flush=fail, close=fail)
    make = fail if broken == "SummaryWriter" else lambda *args, **options: writer
    package = ModuleType("tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    assert column(run(tiny(*ON)), "train/loss")[3:]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tensorboard: ")]
    assert "disk full): continuing without" in line and "has every number" in line
