"""runtime/tracker.py: what Weights & Biases receives, failures that must not stop a run, and wandb agents."""

import json
import math
import shutil
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import wandb
import yaml  # a dependency of wandb
from runs import checkpoints, steps
from wandb.proto import wandb_internal_pb2

import configure
import train
from runtime import checkpoint, folder
from runtime.metrics import read_metrics
from runtime.tracker import WandbTracker, flatten_line, start_wandb

REPO_ROOT = Path(train.__file__).parent


# ---- lines and summary
def test_lists_by_layer_become_numbers():
    numbers = {"step": 3, "tokens": 96, "router/entropy": 0.5}
    lists = {
        "router/entropy_of_layers": [0.25, 0.75],
        "router/gamma_of_layers": [1.5, 2.5],
        "router/loads": [[4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]],
        "val/loads": [[1, 2]],
        "val/window_losses": [1.0],
    }
    wanted = {"entropy": (0.25, 0.75), "gamma": (1.5, 2.5), "load_imbalance": (4.0, 2.0), "dead_experts": (3, 1)}
    layers = {f"router/{name}/layer_0{i}": value for name, values in wanted.items() for i, value in enumerate(values)}
    assert flatten_line(numbers | lists) == numbers | layers
    after_dense = {f"router/{name}/layer_0{i}" for name in wanted for i in (3, 4)}
    assert set(flatten_line(lists, first_layer=3)) == after_dense


def test_summary_has_best_and_last_val_loss():
    run = SimpleNamespace(id="1", summary={}, log=lambda values, step: None)
    sender = WandbTracker(run, None, Path())
    sender.recall([{"step": 0, "tokens": 0, "train/loss": 1.0}])
    assert run.summary == {}
    sender.recall([{"step": step, "tokens": 0, "val/loss": loss} for step, loss in ((0, 4.0), (2, 2.0), (4, 3.0))])
    assert run.summary == {"val/loss_best": 2.0, "val/loss_final": 3.0}
    sender.log({"step": 5, "tokens": 0, "val/loss": 2.5})
    assert run.summary == {"val/loss_best": 2.0, "val/loss_final": 2.5}
    sender.log({"step": 6, "tokens": 0, "val/loss": 1.5})
    sender.log({"step": 7, "tokens": 0, "val/loss": math.nan})
    assert run.summary["val/loss_best"] == 1.5 and math.isnan(run.summary["val/loss_final"])


def test_summarize_adds_to_the_summary_and_a_table():
    lines, summary = [], {"val/loss_final": 3.0}
    run = SimpleNamespace(id="1", summary=summary, log=lambda values, step: lines.append((step, values)))
    sender = WandbTracker(run, SimpleNamespace(Table=lambda columns, data: (columns, data)), Path())
    sender.summarize({"downstream/piqa/acc": 0.5}, "downstream/table", ["task", "acc"], [["piqa", "0.5000"]], 9)
    assert run.summary == {"val/loss_final": 3.0, "downstream/piqa/acc": 0.5}
    assert lines == [(9, {"downstream/table": (["task", "acc"], [["piqa", "0.5000"]])})]


# ---- a client that fails
@pytest.fixture
def fake_wandb(monkeypatch):
    """A mock in place of the module; there is no API key."""
    fake = mock.MagicMock(Settings=wandb.Settings)
    fake.login.return_value = False
    fake.init.return_value.configure_mock(id="1", summary={})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    return fake


def test_disabled_wandb_is_not_imported(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises
    train.train(tiny("log.wandb=disabled"))
    assert "wandb:" not in capsys.readouterr().out


def test_without_a_key_wandb_is_offline(fake_wandb, tiny, tmp_path, capsys):
    config = tiny("log.wandb=online", "log.project=mine", "model.n_dense_layer=1")
    assert start_wandb(config, tmp_path, "abc", ("a", "b")).first_layer == 1
    (call,) = fake_wandb.init.call_args_list  # the network was not tried
    wanted = {"mode": "offline", "project": "mine", "name": "tiny", "group": "tiny", "job_type": "train", "id": "abc"}
    wanted |= {"resume": "allow", "tags": ("a", "b"), "dir": str(tmp_path), "config": config.model_dump()}
    settings = call.kwargs["settings"]
    assert call.kwargs == wanted | {"settings": settings}
    assert (settings.init_timeout, settings.finish_timeout, settings.finish_timeout_raises) == (30, 30, True)
    (line,) = capsys.readouterr().out.splitlines()
    assert "no API key" in line and "wandb login" in line


def test_an_agent_sets_project_and_id(fake_wandb, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    start_wandb(tiny("log.wandb=offline"), tmp_path, "abc")
    assert not {"project", "id", "resume"} & fake_wandb.init.call_args.kwargs.keys()


def test_without_a_network_wandb_is_offline(fake_wandb, tiny, tmp_path, capsys):
    fake_wandb.login.return_value = True
    error = wandb.errors.CommError("Run initialization has timed out.\nMore words.")
    fake_wandb.init.side_effect = [error, mock.DEFAULT]
    assert start_wandb(tiny("log.wandb=online"), tmp_path).id == "1"
    assert [name for name, *_ in fake_wandb.mock_calls if "." not in name] == ["login", "init", "teardown", "init"]
    assert [call.kwargs["mode"] for call in fake_wandb.init.call_args_list] == ["online", "offline"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "has timed out.)" in line and "logging offline" in line


@pytest.mark.parametrize(
    "failing, words",
    [
        ("import", "wandb: no run ("),
        ("init", "wandb: no run (broken): continuing without it; metrics.jsonl has every number"),
        ("define_metric", "wandb: no run (broken)"),
        ("log", "wandb: log failed (broken)"),
        ("finish", "wandb: finish failed (broken)"),
    ],
)
def test_failing_wandb_costs_one_line(fake_wandb, tiny, monkeypatch, capsys, failing, words):
    run = fake_wandb.init.return_value
    failed = getattr(fake_wandb if failing == "init" else run, failing)
    failed.side_effect = Exception("broken\nin more words")
    if failing == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    train.train(tiny("log.wandb=offline", "train.max_steps=3"))
    lines = read_metrics(Path(tiny().run.dir, "tiny", "metrics.jsonl"))
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "val/loss" in line] == [0, 2, 3]
    assert failed.call_count == (failing != "import")
    calls = [name for name, *_ in run.method_calls]
    assert not calls if failing in ("import", "init") else calls[-1] == failing  # nothing after the failure
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb:")]
    assert line.startswith(words)


# ---- the real client


def test_resumed_run_is_the_same_run_in_wandb(tiny, monkeypatch):
    """Files of two starts, by the real client, offline: names, x-axis, each line's numbers, summary."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny("log.wandb=offline", "log.project=mine", "train.checkpoint_interval=2")
    path = folder.path_of(config)
    train.train(config)
    id = wandb_id(config)
    began = read_metrics(path / "metrics.jsonl")
    shutil.rmtree(path / "checkpoints/step_00000004")
    best = began[0] | {"val/loss": 0.125}  # of step 0, so the resumed start finds it only in the file
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [best, *began[1:]]))
    train.train(config)
    resumed = [line for line in read_metrics(path / "metrics.jsonl") if line["step"] > 2]
    assert wandb_id(config) == id and len(began) == 7 and len(resumed) == 3

    files = sorted(path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{id}"] * 2
    for file, lines in zip(files, (began, resumed), strict=True):
        records = ended(file)
        (run,) = [record.run for record in records if record.HasField("run")]
        assert (run.run_id, run.project, run.run_group, run.job_type) == (id, "mine", "tiny", "train")
        assert run.display_name == "tiny" and {*run.tags} == {"kern", config.data.name, "0.03M", "0.02M active"}
        sections = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert {name: sections[name] for name in config.model_dump()} == config.model_dump()
        (metric,) = [record.metric for record in records if record.HasField("metric")]
        assert (metric.glob_name, metric.step_metric) == ("*", "tokens")

        expected = {}
        for line in lines:
            expected.setdefault(line["step"], {}).update(flatten_line(line))
        sent = history(records)
        assert sent.keys() == expected.keys()
        for step in sent:
            assert sent[step] == sent[step] | expected[step]
            assert {f"router/{name}/layer_01" for name in OF_LAYERS} <= sent[step].keys() or step == 0

        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        summed = summary(records)
        assert summed["val/loss_best"] == (0.125 if lines is resumed else min(losses))
        assert summed["val/loss_final"] == losses[-1]


OF_LAYERS = ["entropy", "gamma", "dead_experts", "load_imbalance"]


def wandb_id(config):
    return checkpoint.verify(checkpoint.folder_of(checkpoints(config), steps(config)[-1]))["facts"]["wandb"]


def test_id_survives_a_start_without_wandb(fake_wandb, tiny):
    for max_steps, mode in ((2, "offline"), (3, "disabled"), (4, "offline")):
        config = tiny(f"train.max_steps={max_steps}", f"log.wandb={mode}", "optim.warmup_steps=0")
        train.train(config)
        assert wandb_id(config) == "1"
    assert [call.kwargs["id"] for call in fake_wandb.init.call_args_list] == [None, "1"]


def history(records):
    """{step: {name: value}}."""
    found = {}
    for record in records:
        values = {tuple(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if values:
            found[values["_step",]] = {key[0]: values[key] for key in values if len(key) == 1}
    return found


def summary(records):
    updates = [item for record in records for item in record.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def ended(file):
    """All records of a .wandb file. On a busy machine wandb's process still writes after `finish`."""
    until = time.monotonic() + 300
    while True:
        records = list(wandb_records(file))
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < until, f"{file} has no end"
        time.sleep(0.1)


def wandb_records(file):
    """Records of a .wandb file, a log in LevelDB's format: after a header of 7 bytes, pieces of (checksum 4, length 2,
    kind 1, data), of which kinds 1 and 4 end a record. No piece crosses a multiple of 32 KiB."""
    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


# ---- agents
def test_wandb_sweep_equals_the_sweep_of_small_toml():
    sweep = yaml.safe_load((REPO_ROOT / "config/wandb_sweep.yaml").read_text())
    file = REPO_ROOT / "config/small.toml"
    assert {name: of["values"] for name, of in sweep["parameters"].items()} == tomllib.loads(file.read_text())["sweep"]
    log = configure.load(file, configure.sweep_points(file, [])[0]).log
    assert (sweep["project"], sweep["name"]) == (log.project, log.group)
