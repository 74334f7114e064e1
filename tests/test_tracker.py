"""runtime/tracker.py: what Weights & Biases receives, failures that must not stop a run, and wandb agents."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urlparse

import matplotlib
import numpy as np
import pytest
import wandb
import yaml  # a dependency of wandb
from runs import checkpoints, steps
from wandb.proto import wandb_internal_pb2
from wandb.wandb_agent import Agent

import configure
import train
from runtime import checkpoint, folder, tracker
from runtime.load_pictures import draw_loads
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


# ---- pictures of loads

BLUE = (0x00, 0x72, 0xB2)  # of histogram bars


def draw(*loads):
    return draw_loads(1000, [list(layer) for layer in loads])


def mask(pixels, colour):
    return (pixels == np.array(colour, dtype=np.uint8)).all(-1)


def test_heatmap_colours_mean_the_same_load_in_every_picture():
    colours = matplotlib.colormaps["coolwarm"]
    twice, half = (colours(0.5 + octaves / 6, bytes=True)[:3] for octaves in (1, -1))
    without = draw((2, 1, 1, 0))["val/load_heatmap"]  # over their mean, 1
    also = draw((8, 4, 2, 2))["val/load_heatmap"]  # over 4
    area = mask(without, twice).sum()
    assert area > 20_000 and abs(mask(also, twice).sum() / area - 1) < 0.05
    assert mask(without, half).sum() < 1000 and mask(also, half).sum() > 1.9 * area
    assert mask(without, (0, 0, 0)).sum() > area > 10 * mask(also, (0, 0, 0)).sum()  # dead experts; the rest is text


def test_histogram_bars_count_experts_by_load():
    picture = draw((1, 1, 2, 4), (2, 2, 2, 2))["val/load_histogram"]
    upper, lower = (mask(rows, BLUE).sum(0) for rows in np.array_split(picture, 2))  # blue pixels by column
    half, mean, twice = stretches(upper > 0)
    (all_four,) = stretches(lower > 0)
    octave = 4 * len(mean)  # a bar is a quarter wide
    heights = np.array([upper[bar].max() for bar in (half, mean, twice)]) / lower[all_four].max()
    assert heights == pytest.approx([0.5, 0.25, 0.25], abs=0.04)
    one = mask(picture, (153, 153, 153)).sum(0).argmax()  # the grey line at a load of 1
    centres = [bar.mean() for bar in (half, mean, twice, all_four)]
    assert centres == pytest.approx([one - octave, one, one + octave, one], abs=1)
    dead, twice = stretches(mask(draw((0, 0, 1, 1))["val/load_histogram"], BLUE).any(0))
    assert dead.max() < half.min() and abs(len(dead) - len(twice)) < 10


def stretches(marks):
    """Indices of `marks` that are set, one array per run of neighbours."""
    (at,) = marks.nonzero()
    return np.split(at, (np.diff(at) > 1).nonzero()[0] + 1)


@pytest.mark.parametrize("L, E", [(1, 1), (1, 300), (100, 2)])
def test_pictures_have_a_readable_size(L, E):
    loads = np.zeros((L, E), dtype=int)
    loads[:, 0] = 10**6  # all others dead, this one far beyond the scale
    for pixels in draw(*loads.tolist()).values():
        assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
        assert 300 <= pixels.shape[0] <= 1400 and 600 <= pixels.shape[1] <= 1600


# ---- a client that fails
@pytest.fixture
def fake_wandb(monkeypatch, tmp_path):
    """A mock in place of the module; there is no API key."""
    fake = mock.MagicMock(Settings=wandb.Settings)
    fake.init.return_value.configure_mock(id="1", summary={})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return fake


def modes(fake_wandb):
    return [call.kwargs["mode"] for call in fake_wandb.init.call_args_list]


def test_disabled_wandb_is_not_imported(tiny, monkeypatch, capsys):
    for name in ("wandb", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    train.train(tiny("log.wandb=disabled"))
    assert "wandb:" not in capsys.readouterr().out


def test_a_dense_model_needs_no_matplotlib(fake_wandb, tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    train.train(tiny("log.wandb=offline", "model.router=dense"))
    assert fake_wandb.init.return_value.log.called and "wandb:" not in capsys.readouterr().out


def test_without_a_key_wandb_is_offline(fake_wandb, tiny, tmp_path, capsys):
    config = tiny("log.wandb=online", "log.project=mine")
    start_wandb(config, tmp_path, "abc", ("a", "b"))
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


@pytest.mark.parametrize("place", ["NETRC", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_with_a_key_wandb_is_online(fake_wandb, tiny, tmp_path, monkeypatch, capsys, place):
    host = urlparse(wandb.Settings().base_url).hostname
    if place == "NETRC":
        (tmp_path / "netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
        (tmp_path / "netrc").chmod(0o600)
    else:
        monkeypatch.setenv(place, "0" * 40)
    start_wandb(tiny("log.wandb=online"), tmp_path)
    assert modes(fake_wandb) == ["online"]
    assert capsys.readouterr().out == ""


def test_without_a_network_wandb_is_offline(fake_wandb, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    error = wandb.errors.CommError("Run initialization has timed out.\nMore words.")
    fake_wandb.init.side_effect = [error, mock.DEFAULT]
    assert start_wandb(tiny("log.wandb=online"), tmp_path).id == "1"
    assert [name for name, *_ in fake_wandb.mock_calls if "." not in name] == ["init", "teardown", "init"]
    assert modes(fake_wandb) == ["online", "offline"]
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


@pytest.mark.parametrize("kind, remedy", [(OSError, ""), (ImportError, "; pip install -r requirements-report.txt")])
def test_failing_pictures_cost_one_line(fake_wandb, tiny, monkeypatch, capsys, kind, remedy):
    monkeypatch.setattr(tracker, "draw_loads", mock.Mock(side_effect=kind("broken\nin more words")))
    config = tiny("log.wandb=offline")
    train.train(config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb:")]
    assert line == f"wandb: no pictures of loads (broken{remedy}); arrays/ has the loads"
    run = fake_wandb.init.return_value
    assert run.log.call_count == 7  # steps 1 to 4, and validation at 0, 2 and 4
    assert run.summary["val/loss_final"] == read_metrics(folder.path_of(config) / "metrics.jsonl")[-1]["val/loss"]


# ---- the real client

KEY = "canary0123456789abcdefcanary0123456789ab"  # looks like a key


class Server(ThreadingHTTPServer):
    """Answers like wandb's server until a run has started; then it drops every connection."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.cut, self.authorizations = False, set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.server.authorizations.add(self.headers.get("Authorization"))
        query = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.cut:
            self.close_connection = True
            return
        answer = {}
        if b"UpsertBucket" in query:
            project = {"id": "p", "name": "project", "entity": {"id": "e", "name": "someone"}}
            bucket = {"id": "b", "name": "b", "displayName": "tiny", "config": "{}", "project": project}
            answer = {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
            self.server.cut = True  # the run has started
        body = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


SHORT_FINISH = """
import sys, wandb, train
settings = wandb.Settings
wandb.Settings = lambda **given: settings(**given | {"init_timeout": 300, "finish_timeout": 3} if given else {})
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.integration
def test_lost_network_stops_nothing_and_the_key_is_in_no_file(tiny_file, tmp_path):
    server, home = Server(), tmp_path / "home"
    home.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    variables |= {name: str(home) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    variables |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": KEY}
    variables["MPLCONFIGDIR"] = matplotlib.get_cachedir()  # otherwise it searches for fonts for seconds
    command = [sys.executable, "-c", SHORT_FINISH, str(tiny_file), "--log.wandb=online"]
    done = subprocess.run(command, cwd=REPO_ROOT, env=variables, capture_output=True, timeout=600)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr.decode()
    (line,) = [line for line in done.stdout.decode().splitlines() if line.startswith("wandb:")]
    assert line.startswith("wandb: finish failed (")
    lines = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]
    used = b64encode(f"api:{KEY}".encode())
    assert any(used.decode() in (header or "") for header in server.authorizations)

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    places = {str(path): path.read_bytes() for path in files} | {"stdout": done.stdout, "stderr": done.stderr}
    for path in [path for path in files if path.suffix == ".wandb"]:  # its pieces may divide a text
        places |= {f"{path}, record {n}": r.SerializeToString() for n, r in enumerate(wandb_records(path))}
    assert [place for place, data in places.items() if KEY.encode() in data or used in data] == []


def test_resumed_run_is_the_same_run_in_wandb(tiny, monkeypatch):
    """Files of two starts, by the real client, offline: names, x-axis, each line's numbers, pictures, summary."""
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
            for name in ("val/load_heatmap", "val/load_histogram"):
                assert (name in sent[step]) == (step % 2 == 0)
                assert name not in sent[step] or (file.parent / "files" / sent[step][name]).read_bytes()[1:4] == b"PNG"

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
    """{step: {name: value}}; the value of a picture is its path."""
    found = {}
    for record in records:
        values = {tuple(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if values:
            found[values["_step",]] = {key[0]: values[key] for key in values if len(key) == 1 or key[1] == "path"}
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


@pytest.mark.integration
def test_run_of_an_agent_has_the_agents_id(tiny_file, tmp_path, monkeypatch):
    """The real agent starts it and the real client logs it, offline. Resumed by hand it is the same run."""
    file = tmp_path / "swept.toml"
    file.write_text(tiny_file.read_text().replace('name = "tiny"\n', "", 1))
    for name, value in {"SWEEP_ID": "sweep123", "DIR": str(tmp_path), "RUN_ID": "", "SWEEP_PARAM_PATH": ""}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)  # the agent sets these, and pytest takes them back
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(REPO_ROOT)
    agent = Agent(api=None, queue=None, sweep_id="sweep123")
    sweep = yaml.safe_load(Path("config/wandb_sweep.yaml").read_text())
    online = {"config/small.toml": str(file), "--log.wandb=online": "--log.wandb=offline"}
    agent._sweep_command = [online.get(word, word) for word in sweep["command"]]
    values = {"run.seed": {"value": 1}, "model.router": {"value": "softmax"}}
    agent._command_run({"run_id": "agents01", "program": sweep["program"], "args": values})
    (process,) = agent._run_processes.values()
    try:
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()

    swept = ["--run.seed=1", "--model.router=softmax", "--log.wandb=offline"]
    config = configure.load(file, swept)
    assert config.run.name == "swept-softmax-seed1" and wandb_id(config) == "agents01"
    (file_of_run,) = folder.path_of(config).glob("wandb/offline-run-*/run-agents01.wandb")
    (run,) = [record.run for record in ended(file_of_run) if record.HasField("run")]
    assert (run.run_id, run.sweep_id, run.run_group) == ("agents01", "sweep123", "swept")
    sections = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert sections["model"]["router"] == sections["model.router"] == "softmax"

    for name in ("SWEEP_ID", "RUN_ID", "SWEEP_PARAM_PATH", "DIR"):
        monkeypatch.delenv(f"WANDB_{name}")
    wandb.teardown()  # it has read the environment
    train.train(configure.load(file, [*swept, "--train.max_steps=5"]))
    assert len([*folder.path_of(config).glob("wandb/offline-run-*/run-agents01.wandb")]) == 2
