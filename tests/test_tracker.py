"""runtime/tracker.py: what Weights & Biases receives, failures that must not stop a run."""

import json
import math
import re
import shutil
import struct
import sys
import tomllib
from base64 import b64encode
from collections import defaultdict
from hashlib import md5
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import yaml  # a dependency of wandb
from PIL import Image
from runs import REPO_ROOT, checkpoints, metrics

import report.__main__ as report
import train
from runtime import folder
from runtime.runs import Run
from runtime.tracker import PIXELS, draw_loads, flatten_line, send_report, start_wandb


# ---- lines and summary
def test_names_are_those_of_metrics():
    numbers = {"step": 3, "tokens": 96, "router/entropy": 0.5}
    lists = {"router/entropy_of_layers": [0.25, 0.75], "val/loads": [[1, 2]]}
    layers = {"router/entropy_of_layers/00": 0.25, "router/entropy_of_layers/01": 0.75}
    assert flatten_line(numbers | lists) == numbers | layers


def test_a_report_that_wandb_refuses_costs_one_line(fake_wandb, tiny, tmp_path, capsys):
    fake_wandb.init.side_effect = Exception("broken\nin more words")
    send_report(tmp_path / "report.html", "offline", [SimpleNamespace(config=tiny())], ([], []))
    said = f"wandb: report not sent (broken): send it again, or open {tmp_path}/report.html\n"
    assert capsys.readouterr().out == said


def test_loads_are_grey_rows():
    picture = draw_loads(np.array([[0, 1, 2, 1], [0, 0, 0, 8]]))
    cell = np.ones((PIXELS, PIXELS))
    assert (picture == np.kron([[0, 127, 255, 127], [0, 0, 0, 255]], cell)).all()


# ---- a client that fails
@pytest.fixture
def fake_wandb(monkeypatch):
    """A mock in place of the module; there is no API key."""
    import wandb  # slow: for the process that runs these tests alone

    fake = mock.MagicMock(Settings=wandb.Settings, errors=wandb.errors)
    fake.login.return_value = False
    fake.init.return_value.configure_mock(
        id="1", summary={}, resumed=False, starting_step=0, url="https://wandb"
    )
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
    assert re.fullmatch("wandb: no API key .*wandb login.*\n", capsys.readouterr().out)
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_SWEEP_ID", "sweep123")  # an agent sets project and id
        start_wandb(config, tmp_path, "abc")
    assert not {"project", "id", "resume"} & fake_wandb.init.call_args.kwargs.keys()
    capsys.readouterr()
    fake_wandb.login.side_effect = ValueError("API key must have 40 characters")
    start_wandb(config, tmp_path, "abc")
    assert "no API key (API key must have 40 characters): logging" in capsys.readouterr().out

    fake_wandb.reset_mock(side_effect=True)
    fake_wandb.login.return_value = True
    error = fake_wandb.errors.CommError("Run initialization has timed out.\nMore words.")
    fake_wandb.init.side_effect = [error, mock.DEFAULT]
    assert start_wandb(config, tmp_path).id == "1"
    calls = [(name, call.get("mode")) for name, _, call in fake_wandb.mock_calls if "." not in name]
    wanted = [("login", None), ("init", "online"), ("teardown", None), ("init", "offline")]
    assert calls == wanted
    said = r"wandb: no run online \(.* has timed out.\): logging offline; .*\n"
    assert re.fullmatch(said, capsys.readouterr().out)


def test_a_run_that_was_deleted_begins_anew(fake_wandb, tiny, tmp_path, capsys):
    fake_wandb.login.return_value = True
    says = "run me/mine/abc was previously created and deleted; try a new run name"
    fake_wandb.init.side_effect = [fake_wandb.errors.CommError(says), mock.DEFAULT]
    assert start_wandb(tiny("log.wandb=online"), tmp_path, "abc").id == "1"
    calls = [(call.kwargs["id"], call.kwargs["mode"]) for call in fake_wandb.init.call_args_list]
    assert calls == [("abc", "online"), (None, "online")]
    assert "wandb: the run was deleted there: logging to a new one" in capsys.readouterr().out


def test_parts_of_a_run_are_sent_in_their_order(fake_wandb, tiny, tmp_path, capsys):
    """An offline part that is not sent keeps its run offline, and no other."""
    fake_wandb.login.return_value = True
    config = tiny("log.wandb=online")
    part = tmp_path / "wandb/offline-run-2026-abc"
    part.mkdir(parents=True)
    for id, said in (("abc", f"wandb: {part} is not sent (remove it if"), ("bc", "https://wandb")):
        start_wandb(config, tmp_path, id)
        assert said in capsys.readouterr().out
    (part / "run-abc.wandb.syncstate").touch()  # of a part that a kill has cut short
    start_wandb(config, tmp_path, "abc")
    modes = [call.kwargs["mode"] for call in fake_wandb.init.call_args_list]
    assert modes == ["offline", "online", "online"]


def test_a_run_of_which_wandb_has_nothing_is_sent_whole(fake_wandb, tiny, tmp_path):
    run = fake_wandb.init.return_value
    for resumed, count in ((True, 3), (False, 0)):
        run.configure_mock(resumed=resumed, starting_step=0)
        run.log.reset_mock()
        lines = [{"step": step, "tokens": step, "train/loss": 3.0} for step in range(3)]
        start_wandb(tiny("log.wandb=offline"), tmp_path, "1").resume(lines)
        assert run.log.call_count == count


def test_what_wandb_lacks_of_a_resumed_run_is_sent(fake_wandb, tiny, tmp_path):
    """It has steps 0 to 4, and drops what comes for these."""
    run = fake_wandb.init.return_value
    run.configure_mock(resumed=True, starting_step=5)
    tracker = start_wandb(tiny("log.wandb=offline"), tmp_path, "1")
    kept = [{"step": step, "tokens": 8 * step, "train/loss": 3.0} for step in range(3, 7)]
    tracker.resume(kept)
    evaluation = {"step": 4, "tokens": 32, "val/loss": 2.0}  # a stop has postponed it
    again = {"step": 4, "tokens": 32, "train/loss": 3.0}
    for line in (evaluation, again):
        tracker.log(line)
    wanted = [(kept[2], 5), (kept[3], 6), (evaluation, 5), (again, 4)]
    assert run.log.call_args_list == [mock.call(line, step=step) for line, step in wanted]
    assert run.summary["val/loss_final"] == 2.0


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
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 3]
    assert failed.call_count == (failing != "import")
    calls = [name for name, *_ in run.method_calls]
    # nothing after the failure
    assert not calls if failing in ("import", "init") else calls[-1] == failing
    (line,) = re.findall("wandb:.*", capsys.readouterr().out)
    assert line.startswith(line_begins)


def test_a_resumed_run_sends_its_lines_and_the_best_of_all(fake_wandb, tiny):
    """The least loss is of step 0, so the resumed start finds it only in the file.

    A start without wandb in between keeps the id.
    """
    config = tiny("log.wandb=offline", "train.checkpoint_interval=2")
    path = folder.path_of(config)
    train.train(config)
    began = metrics(config)
    shutil.rmtree(path / "checkpoints/step_00000004")
    file = path / "metrics.jsonl"
    file.write_text(re.sub('"val/loss": [^,]*', '"val/loss": 0.125', file.read_text(), count=1))
    train.train(tiny("log.wandb=disabled", "train.max_steps=3", "train.checkpoint_interval=2"))
    train.train(config)
    assert [call.kwargs["id"] for call in fake_wandb.init.call_args_list] == [None, "1"]
    assert Run(path).metadata["wandb"] == "1"
    resumed = [line for line in metrics(config) if line["step"] > 3]
    run = fake_wandb.init.return_value
    run.define_metric.assert_called_with("*", step_metric="tokens")
    wanted = []
    for line in [*began, *resumed]:
        picture = {"val/loads": fake_wandb.Image.return_value} if "val/loads" in line else {}
        wanted.append(mock.call(flatten_line(line) | picture, step=line["step"]))
    assert run.log.call_args_list == wanted
    assert run.summary == {"val/loss_best": 0.125, "val/loss_final": resumed[-1]["val/loss"]}
    tracker = start_wandb(config, path)
    tracker.recall([{"val/loss": loss} for loss in (math.nan, 0.0625, math.nan)])
    assert run.summary["val/loss_best"] == 0.0625


def read_records(file):
    """{kind: records} of a .wandb file: 7 bytes, and a block of LevelDB's log."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as the process does at its end; until then the file lacks the last records
    content = file.read_bytes()
    assert len(content) < 32768  # one block; records of more come in pieces
    records = defaultdict(list)
    at = 7
    while at < len(content):
        (size,) = struct.unpack_from("<4xH", content, at)
        start = at + 7
        at = start + size
        record = Record.FromString(content[start:at])
        name = record.WhichOneof("record_type")
        records[name].append(getattr(record, name))
    return records


def read_history(records):
    """{name: value} of each line that was sent; of a picture or table its file."""
    lines = []
    for history in records["history"]:
        line = {}
        for item in history.item:
            name, *key = item.nested_key or [item.key]
            if key in ([], ["path"]) and not name.startswith("_"):
                line[name] = json.loads(item.value_json)
        lines.append(line)
    return lines


def artifact_of(records):
    """{file: its digest} of the last one; wandb itself sends tables before it."""
    return {entry.path: entry.digest for entry in records["artifact"][-1].manifest.contents}


def digest(path):
    return b64encode(md5(path.read_bytes()).digest()).decode()


@pytest.mark.integration
def test_the_real_client_resumes_a_run(tiny, tmp_path, monkeypatch, capsys):
    """Its files have names and loads of metrics, and config.toml; the report's its page."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    for max_steps in (2, 4):
        config = tiny("log.wandb=offline", f"train.max_steps={max_steps}", "optim.warmup_steps=0")
        train.train(config)
    assert "wandb: " not in capsys.readouterr().out
    path = checkpoints(config).parent
    files = sorted(path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{Run(path).metadata['wandb']}"] * 2
    last = read_records(files[1])
    lines = {}  # of each step
    for line in metrics(config):
        if line["step"] > 2:
            lines[line["step"]] = lines.get(line["step"], {}) | line
    for line, values in zip(lines.values(), read_history(last), strict=True):
        if "val/loads" in line:
            picture = Image.open(files[1].parent / "files" / values.pop("val/loads"))
            assert (np.array(picture) == draw_loads(np.array(line["val/loads"]))).all()
        assert values == flatten_line(line)
    assert artifact_of(last) == {"config.toml": digest(path / "config.toml")}
    assert any((path / "wandb/artifacts/staging").iterdir())

    out = tmp_path / "report"
    assert report.main([str(path), "--out", str(out), "--wandb", "offline"]) == 0
    (file,) = out.glob("wandb/offline-run-*/run-*.wandb")
    records = read_records(file)
    (run,) = records["run"]
    assert (run.run_group, run.job_type, run.display_name) == ("tiny", "report", "report")
    assert artifact_of(records) == {"report.html": digest(out / "report.html")}
    (line,) = read_history(records)
    table = json.loads((file.parent / "files" / line["runs"]).read_text())
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert row["val loss"] == f"{lines[4]['val/loss']:.4f}" and row["run"] == str(path)
    page = file.parent / "files" / line["report"]
    assert page.read_text() == (out / "report.html").read_text()


def test_the_sweep_of_wandbs_agents_is_that_of_small_toml():
    sweep = yaml.safe_load((REPO_ROOT / "config/wandb_sweep.yaml").read_text())
    file = tomllib.loads((REPO_ROOT / "config/small.toml").read_text())
    values = {name: parameter["values"] for name, parameter in sweep["parameters"].items()}
    assert values == file["sweep"]
