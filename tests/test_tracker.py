"""runtime/tracker.py: what Weights & Biases receives, failures that must not stop a run."""

import json
import math
import shutil
import sys
import tomllib
from unittest import mock

import pytest
import torch
import yaml  # a dependency of wandb
from runs import REPO_ROOT, checkpoints

import train
from balance import summarize_routing
from runtime import folder
from runtime.metrics import ARRAYS, read_metrics
from runtime.runs import Run
from runtime.tracker import flatten_line, start_wandb


# ---- lines and summary
def test_lists_by_layer_become_numbers():
    numbers = {"step": 3, "tokens": 96, "router/entropy": 0.5}
    lists = {
        "router/entropy_of_layers": [0.25, 0.75],
        "router/loads": [[4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]],
        "val/loads": [[1, 2]],
        "val/window_losses": [1.0],
    }
    wanted = {"entropy": (0.25, 0.75), "load_imbalance": (4.0, 2.0), "dead_experts": (3, 1)}
    layers = {}
    for name, values in wanted.items():
        for i, value in enumerate(values):
            layers[f"router/{name}/layer_0{i}"] = value
    assert flatten_line(numbers | lists) == numbers | layers
    summary = summarize_routing("router", torch.tensor(lists["router/loads"]), {})
    assert (summary["router/load_imbalance"], summary["router/dead_experts"]) == (3, 4)


# ---- a client that fails
@pytest.fixture
def fake_wandb(monkeypatch):
    """A mock in place of the module; there is no API key."""
    import wandb  # slow: for the process that runs these tests alone

    fake = mock.MagicMock(Settings=wandb.Settings, errors=wandb.errors)
    fake.login.return_value = False
    fake.init.return_value.configure_mock(id="1", summary={})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    return fake


def test_without_a_key_or_a_network_wandb_is_offline(
    fake_wandb, tiny, tmp_path, monkeypatch, capsys
):
    config = tiny("log.wandb=online", "log.project=mine")
    start_wandb(config, tmp_path, "abc", ("a", "b"))
    (call,) = fake_wandb.init.call_args_list  # the network was not tried
    wanted = {"mode": "offline", "project": "mine", "group": "tiny", "id": "abc"}
    wanted |= {"resume": "allow", "tags": ("a", "b"), "config": config.model_dump()}
    assert wanted.items() <= call.kwargs.items()
    (line,) = capsys.readouterr().out.splitlines()
    assert "no API key" in line and "wandb login" in line
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_SWEEP_ID", "sweep123")  # an agent sets project and id
        start_wandb(config, tmp_path, "abc")
    assert not {"project", "id", "resume"} & fake_wandb.init.call_args.kwargs.keys()
    capsys.readouterr()

    fake_wandb.reset_mock()
    fake_wandb.login.return_value = True
    error = fake_wandb.errors.CommError("Run initialization has timed out.\nMore words.")
    fake_wandb.init.side_effect = [error, mock.DEFAULT]
    assert start_wandb(config, tmp_path).id == "1"
    names = [name for name, *_ in fake_wandb.mock_calls if "." not in name]
    assert names == ["login", "init", "teardown", "init"]
    assert [call.kwargs["mode"] for call in fake_wandb.init.call_args_list] == ["online", "offline"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "has timed out.)" in line and "logging offline" in line


@pytest.mark.parametrize("failing, line_begins", [
    ("import", "wandb: no run ("),
    ("init", "wandb: no run (broken): continuing without it; metrics.jsonl has every number"),
    ("define_metric", "wandb: no run (broken)"),
    ("log", "wandb: log failed (broken)"),
    ("finish", "wandb: finish failed (broken)"),
])  # fmt: skip
def test_failing_wandb_costs_one_line(fake_wandb, tiny, monkeypatch, capsys, failing, line_begins):
    run = fake_wandb.init.return_value
    failed = getattr(fake_wandb if failing == "init" else run, failing)
    failed.side_effect = Exception("broken\nin more words")
    if failing == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny("log.wandb=offline", "train.max_steps=3")
    train.train(config)
    lines = Run(folder.path_of(config)).metrics
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "val/loss" in line] == [0, 2, 3]
    assert failed.call_count == (failing != "import")
    calls = [name for name, *_ in run.method_calls]
    # nothing after the failure
    assert not calls if failing in ("import", "init") else calls[-1] == failing
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb:")]
    assert line.startswith(line_begins)


def test_a_resumed_run_sends_its_lines_and_the_best_of_all(fake_wandb, tiny):
    """The least loss is of step 0, so the resumed start finds it only in the file.

    A start without wandb in between keeps the id.
    """
    config = tiny("log.wandb=offline", "train.checkpoint_interval=2")
    path = folder.path_of(config)
    train.train(config)
    began = read_metrics(path / "metrics.jsonl", ARRAYS)
    shutil.rmtree(path / "checkpoints/step_00000004")
    lines = [{"step": 0, "tokens": 0, "val/loss": 0.125}, *(line for line in began if line["step"])]
    text = ""
    for line in lines:
        numbers = {name: value for name, value in line.items() if name not in ARRAYS}
        text += json.dumps(numbers) + "\n"
    (path / "metrics.jsonl").write_text(text)
    train.train(tiny("log.wandb=disabled", "train.max_steps=3", "train.checkpoint_interval=2"))
    train.train(config)
    assert [call.kwargs["id"] for call in fake_wandb.init.call_args_list] == [None, "1"]
    assert Run(path).metadata["wandb"] == "1"
    lines = read_metrics(path / "metrics.jsonl", ARRAYS)
    resumed = [line for line in lines if line["step"] > 3]
    run = fake_wandb.init.return_value
    run.define_metric.assert_called_with("*", step_metric="tokens")
    sent = [(call.kwargs["step"], call.args[0]) for call in run.log.call_args_list]
    assert sent == [(line["step"], flatten_line(line)) for line in [*began, *resumed]]
    assert any("router/load_imbalance/layer_01" in values for _, values in sent)
    assert run.summary == {"val/loss_best": 0.125, "val/loss_final": resumed[-1]["val/loss"]}
    tracker = start_wandb(config, path)
    tracker.recall([{"val/loss": loss} for loss in (math.nan, 0.0625, math.nan)])
    assert run.summary["val/loss_best"] == 0.0625


@pytest.mark.integration
def test_the_real_client_resumes_a_run(tiny, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for max_steps in (2, 4):
        config = tiny("log.wandb=offline", f"train.max_steps={max_steps}", "optim.warmup_steps=0")
        train.train(config)
    assert "wandb: " not in capsys.readouterr().out
    path = checkpoints(config).parent
    files = [*path.glob("wandb/offline-run-*/run-*.wandb")]
    assert [file.stem for file in files] == [f"run-{Run(path).metadata['wandb']}"] * 2


def test_the_sweep_of_wandbs_agents_is_that_of_small_toml():
    sweep = yaml.safe_load((REPO_ROOT / "config/wandb_sweep.yaml").read_text())
    file = tomllib.loads((REPO_ROOT / "config/small.toml").read_text())
    values = {name: parameter["values"] for name, parameter in sweep["parameters"].items()}
    assert values == file["sweep"]
