"""runtime/tracker.py: what Weights & Biases gets of a run, that it can only cost a line, and its agents."""

import itertools
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
from urllib.parse import urlparse

import matplotlib.image
import numpy as np
import pytest
import wandb
import yaml  # which wandb itself needs and brings
from wandb.proto import wandb_internal_pb2
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.wandb_agent import Agent

import configure
import train
from runtime import checkpoint, folder
from runtime.metrics import read
from runtime.tracker import Tracker, numbers, pictures, start_wandb

REPO_ROOT = Path(train.__file__).parent

# ---- what is sent of a line


def test_lists_by_layer_become_numbers():
    line = {
        "step": 3,
        "tokens": 96,
        "router/entropy": 0.5,
        "router/entropy_of_layers": [0.25, 0.75],
        "router/gamma_of_layers": [1.5, 2.5],
        "router/loads": [[4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]],
    }
    assert numbers(line) == {
        "step": 3,
        "tokens": 96,
        "router/entropy": 0.5,
        "router/entropy/layer_00": 0.25,
        "router/entropy/layer_01": 0.75,
        "router/gamma/layer_00": 1.5,
        "router/gamma/layer_01": 2.5,
        "router/load_imbalance/layer_00": 4.0,
        "router/load_imbalance/layer_01": 2.0,
        "router/dead_experts/layer_00": 3,
        "router/dead_experts/layer_01": 1,
    }
    assert numbers({"step": 4, "tokens": 128, "val/loads": [[1, 2]], "val/window_losses": [1.0]}) == {
        "step": 4,
        "tokens": 128,
    }


def test_summary_is_the_best_and_the_last_of_the_whole_run():
    run = SimpleNamespace(id="1", summary={}, log=lambda values, step: None)
    tracker = Tracker(run, None)
    tracker.recall([{"step": 0, "tokens": 0, "train/loss": 1.0}])
    assert run.summary == {}
    tracker.recall([{"step": step, "tokens": 0, "val/loss": loss} for step, loss in ((0, 4.0), (2, 2.0), (4, 3.0))])
    assert run.summary == {"val/loss_best": 2.0, "val/loss_final": 3.0}
    tracker.log({"step": 5, "tokens": 0, "val/loss": 2.5})
    assert run.summary == {"val/loss_best": 2.0, "val/loss_final": 2.5}
    tracker.log({"step": 6, "tokens": 0, "val/loss": 1.5})
    tracker.log({"step": 7, "tokens": 0, "val/loss": math.nan})
    assert run.summary["val/loss_best"] == 1.5 and math.isnan(run.summary["val/loss_final"])


def test_results_after_training_are_in_the_summary_and_a_table():
    lines = []
    run = SimpleNamespace(
        id="1", summary={"val/loss_final": 3.0}, log=lambda values, step: lines.append(values | {"step": step})
    )
    tracker = Tracker(run, None, lambda columns, data: (columns, data))
    tracker.summarize({"downstream/piqa/acc": 0.5}, "downstream/table", ["task", "acc"], [["piqa", "0.5000"]], 9)
    assert run.summary == {"val/loss_final": 3.0, "downstream/piqa/acc": 0.5}
    assert lines == [{"downstream/table": (["task", "acc"], [["piqa", "0.5000"]]), "step": 9}]


# ---- pictures of loads

BLUE = (0x00, 0x72, 0xB2)  # bars of the histograms


def draw(*loads):
    return pictures({"step": 1000, "tokens": 0, "val/loads": [list(layer) for layer in loads]})


def where(pixels, colour):
    return (pixels == np.array(colour, dtype=np.uint8)).all(-1)


def test_a_colour_of_the_heatmap_is_one_load_whatever_the_others_are():
    colours = matplotlib.colormaps["coolwarm"]
    twice, half = (colours(0.5 + octaves / 6, bytes=True)[:3] for octaves in (1, -1))
    without = draw((2, 1, 1, 0))["val/load_heatmap"]  # over their mean, 1
    also = draw((8, 4, 2, 2))["val/load_heatmap"]  # over 4
    area = where(without, twice).sum()
    assert area > 20_000 and abs(where(also, twice).sum() / area - 1) < 0.05
    assert where(without, half).sum() < 1000 and where(also, half).sum() > 1.9 * area
    assert where(without, (0, 0, 0)).sum() > area > 10 * where(also, (0, 0, 0)).sum()  # dead; but for the text


def test_bars_of_the_histogram_are_experts_by_load():
    picture = draw((1, 1, 2, 4), (2, 2, 2, 2))["val/load_histogram"]
    upper, lower = (where(rows, BLUE).sum(0) for rows in np.array_split(picture, 2))  # blue pixels by column
    half, mean, twice = runs_of(upper > 0)
    (all_four,) = runs_of(lower > 0)
    heights = np.array([upper[bar].max() for bar in (half, mean, twice)]) / lower[all_four].max()
    assert heights == pytest.approx([0.5, 0.25, 0.25], abs=0.04)
    assert abs(all_four - mean).max() <= 1 and abs(half + twice - 2 * mean).max() <= 2  # an octave to either side
    dead = [where(draw(loads)["val/load_histogram"], (0, 0, 0)).sum() for loads in ((1, 1, 1, 1), (0, 0, 1, 1))]
    assert dead[1] > dead[0] + 1000


def runs_of(marks):
    """Indices of `marks` that are set, one array a stretch of neighbours."""
    (at,) = marks.nonzero()
    return np.split(at, (np.diff(at) > 1).nonzero()[0] + 1)


@pytest.mark.parametrize("L, E", [(1, 1), (1, 300), (100, 2)])
def test_pictures_of_any_model_are_of_a_size_to_look_at(L, E):
    loads = np.zeros((L, E), dtype=int)
    loads[:, 0] = 10**6  # all but one dead, that one far beyond the scale
    for pixels in draw(*loads.tolist()).values():
        assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
        assert 300 <= pixels.shape[0] <= 1400 and 600 <= pixels.shape[1] <= 1600


# ---- a client that fails


@pytest.fixture
def fake_wandb(monkeypatch, tmp_path):
    """Stands in for the module. `calls` are the modes that were asked for and the methods called; those in `failures`
    raise what is there. There is no key."""
    fake = SimpleNamespace(
        calls=[], failures={}, Settings=wandb.Settings, teardown=lambda: None, Image=lambda pixels: 0, Table=dict
    )

    def method(name, *arguments, **named):
        fake.calls.append(name)
        if name in fake.failures:
            raise fake.failures[name]

    def init(mode, **arguments):
        method(mode)
        run = SimpleNamespace(mode=mode, **{"id": "1", "summary": {}} | arguments)
        for name in ("define_metric", "log", "finish"):
            setattr(run, name, lambda *arguments, name=name, **named: method(name))
        return run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return fake


def test_wandb_disabled_is_not_even_imported(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises
    assert start_wandb(tiny("log.wandb=disabled"), tmp_path) is None
    assert capsys.readouterr().out == ""


def test_wandb_without_a_key_goes_offline_in_one_line(fake_wandb, tiny, tmp_path, capsys):
    config = tiny("log.wandb=online", "log.project=mine")
    run = start_wandb(config, tmp_path, "abc", ("a", "b")).run
    assert (run.mode, run.project, run.name, run.group) == ("offline", "mine", "tiny", "tiny")
    assert (run.id, run.tags, run.job_type, run.dir) == ("abc", ("a", "b"), "train", str(tmp_path))
    assert run.config == config.model_dump()
    assert fake_wandb.calls == ["offline", "define_metric"]  # the network was not even tried
    (line,) = capsys.readouterr().out.splitlines()
    assert "no API key" in line and "wandb login" in line


def test_an_agent_of_wandbs_has_set_project_and_id(fake_wandb, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    run = start_wandb(tiny("log.wandb=offline"), tmp_path, "abc").run
    assert run.id == "1" and not hasattr(run, "project") and run.group == "tiny"  # 1: wandb's own


@pytest.mark.parametrize("key", ["environment", "netrc"])
def test_wandb_with_a_key_goes_online(fake_wandb, tiny, tmp_path, monkeypatch, capsys, key):
    if key == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    else:
        host = urlparse(wandb.Settings().base_url).hostname
        (tmp_path / "netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
        (tmp_path / "netrc").chmod(0o600)
    assert start_wandb(tiny("log.wandb=online"), tmp_path).run.mode == "online"
    assert capsys.readouterr().out == ""


def test_wandb_without_a_network_goes_offline_in_one_line(fake_wandb, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    fake_wandb.failures["online"] = wandb.errors.CommError("Run initialization has timed out.\nMore words.")
    assert start_wandb(tiny("log.wandb=online"), tmp_path).run.mode == "offline"
    assert fake_wandb.calls == ["online", "offline", "define_metric"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "has timed out.)" in line and "logging offline" in line


@pytest.mark.parametrize(
    "failing, called, words",
    [
        ("import", [], "wandb: no run ("),
        ("offline", ["offline"], "wandb: no run (broken): on without it, metrics.jsonl has every number"),
        ("define_metric", ["offline", "define_metric"], "wandb: no run (broken)"),
        ("log", ["offline", "define_metric", "log"], "wandb: log failed (broken): on without it"),
        ("finish", ["offline", "define_metric", "log", "finish"], "wandb: finish failed (broken)"),
    ],
)
def test_wandb_that_fails_costs_a_line(fake_wandb, tiny, monkeypatch, capsys, failing, called, words):
    fake_wandb.failures[failing] = Exception("broken\nin more words")
    if failing == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    train.train(tiny("log.wandb=offline", "train.max_steps=3"))
    lines = read(Path(tiny().run.dir, "tiny", "metrics.jsonl"))
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "val/loss" in line] == [0, 2, 3]
    assert list(dict.fromkeys(fake_wandb.calls)) == called  # and nothing after the failure
    assert fake_wandb.calls.count(failing) <= 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb:")]
    assert line.startswith(words)


def test_pictures_that_cannot_be_drawn_cost_a_line(fake_wandb, tiny, monkeypatch, capsys):
    sent = []

    def image(pixels):
        raise OSError("no font\nin more words")

    fake_wandb.Image = image
    monkeypatch.setattr(Tracker, "finish", lambda tracker: sent.append(tracker.run.summary))
    config = tiny("log.wandb=offline")
    train.train(config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb:")]
    assert line.startswith("wandb: no pictures of loads (no font): on without them")
    assert fake_wandb.calls.count("log") == 7  # steps 1 to 4, and validation at 0, 2 and 4
    assert sent and sent[0]["val/loss_final"] == read(folder.path_of(config) / "metrics.jsonl")[-1]["val/loss"]


def test_matplotlib_is_imported_for_pictures_alone(tiny_file):
    """Nor is wandb where it is disabled. One process: first without wandb, then dense."""
    program = "import sys, train\n" + "".join(
        f"assert train.main({[str(tiny_file), '--train.max_steps=2', *words]}) == 0\n"
        f"print('seen', 'wandb' in sys.modules, 'matplotlib' in sys.modules)\n"
        for words in ([], ["--log.wandb=offline", "--model.router=dense", "--run.name=dense"])
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO_ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    seen = [line for line in done.stdout.splitlines() if line.startswith("seen")]
    assert seen == ["seen False False", "seen True False"]


# ---- the real client

KEY = "canary0123456789abcdefcanary0123456789ab"  # of a key's form


class Server(ThreadingHTTPServer):
    """As much of wandb's server as beginning a run takes. Then, or from the start, every connection is cut."""

    daemon_threads = True

    def __init__(self, cut):
        super().__init__(("127.0.0.1", 0), Handler)
        self.cut, self.authorizations = cut, set()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # clients that hang up


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
            self.server.cut = True  # the run has begun
        body = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def forms(secret):
    """The ways in which a text may stand in a file: plain and in UTF-16, and each of these in base64 from any offset,
    and in hexadecimal."""
    for plain in (secret.encode(), secret.encode("utf-16-le"), secret.encode("utf-16-be")):
        yield plain
        yield plain.hex().encode()
        for offset in range(3):
            coded = b64encode(b"\0" * offset + plain)
            yield coded[-(-offset * 8 // 6) : len(coded) - 4]  # those characters that hang on the secret alone


def test_forms_of_a_secret():
    found = [form for form in forms(KEY) if form in b64encode(b"Authorization: " + KEY.encode() + b"\n")]
    assert len(found) == 1 and len(set(forms(KEY))) == 15 and min(map(len, forms(KEY))) >= 40


@pytest.mark.parametrize(
    "mode, network, line",
    [
        ("offline", "none", None),
        ("online", "none", "wandb: no run online ("),
        ("online", "vanishes", "wandb: finish failed ("),
    ],
)
def test_a_dead_network_stops_nothing_and_the_key_is_nowhere(tiny_file, tmp_path, mode, network, line):
    server = Server(cut=network == "none")
    program = (
        "import sys, runtime.tracker, train; runtime.tracker.WANDB_SECONDS = 3; sys.exit(train.main(sys.argv[1:]))"
    )
    homes = {name: str(tmp_path / "home") for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    (tmp_path / "home").mkdir()
    homes["MPLCONFIGDIR"] = matplotlib.get_cachedir()  # it would look for fonts for seconds
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | homes
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_file), f"--log.wandb={mode}"],
        cwd=REPO_ROOT,
        env=environment | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY},
        capture_output=True,
        timeout=120,
    )
    took = time.monotonic() - began
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr.decode()
    said = [text for text in done.stdout.decode().splitlines() if text.startswith("wandb:")]
    assert len(said) == (line is not None) and all(text.startswith(line) for text in said)
    lines = read(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [text["step"] for text in lines if "train/loss" in text] == [1, 2, 3, 4], took
    used = b64encode(f"api:{KEY}".encode()).decode()
    assert any(used in (text or "") for text in server.authorizations) == (mode == "online")

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    places = {str(path): path.read_bytes() for path in files} | {"stdout": done.stdout, "stderr": done.stderr}
    for path in [path for path in files if path.suffix == ".wandb"]:  # where a piece's end may divide what stands there
        places |= {f"{path}, record {n}": r.SerializeToString() for n, r in enumerate(wandb_records(path))}
    assert [place for place, data in places.items() if any(form in data for form in forms(KEY))] == []


def test_a_run_and_what_goes_on_with_it_are_one_in_wandb(tiny, monkeypatch):
    """Two starts' files, by the real client, offline: names, x-axis, each line's numbers, pictures, summary."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny("log.wandb=offline", "log.project=mine", "train.checkpoint_interval=2")
    path = folder.path_of(config)
    train.train(config)
    id = wandb_id(config)
    began = read(path / "metrics.jsonl")
    shutil.rmtree(path / "checkpoints/step_00000004")
    best = began[0] | {"val/loss": 0.125}  # of step 0, so the start that goes on finds it in the file alone
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [best, *began[1:]]))
    train.train(config)
    went_on = [line for line in read(path / "metrics.jsonl") if line["step"] > 2]
    assert wandb_id(config) == id and len(began) == 7 and len(went_on) == 3

    files = sorted(path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{id}"] * 2
    for file, lines in zip(files, (began, went_on), strict=True):
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
            expected.setdefault(line["step"], {}).update(numbers(line))
        sent = history(records)
        assert sent.keys() == expected.keys()
        for step in sent:
            assert sent[step] == sent[step] | expected[step]
            assert {f"router/{name}/layer_01" for name in OF_LAYERS} <= sent[step].keys() or step == 0
            for name in ("val/load_heatmap", "val/load_histogram"):
                assert (name in sent[step]) == (step % 2 == 0)
                if name in sent[step]:
                    image = file.parent / "files" / sent[step][name]
                    height, width = matplotlib.image.imread(image, format="png").shape[:2]
                    assert 300 <= height <= 1400 and 600 <= width <= 1600

        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        summed = summary(records)
        assert summed["val/loss_best"] == (0.125 if lines is went_on else min(losses))
        assert summed["val/loss_final"] == losses[-1]


OF_LAYERS = ["entropy", "gamma", "dead_experts", "load_imbalance"]


def wandb_id(config):
    """The facts of the run's last checkpoint have it."""
    folder_of_all = folder.path_of(config) / "checkpoints"
    return checkpoint.verify(checkpoint.folder_of(folder_of_all, max(checkpoint.steps(folder_of_all))))["facts"][
        "wandb"
    ]


def test_a_start_without_wandb_in_between_keeps_the_id(tiny, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for steps, mode in ((2, "offline"), (3, "disabled"), (4, "offline")):
        config = tiny(f"train.max_steps={steps}", f"log.wandb={mode}", "optim.warmup_steps=0")
        train.train(config)
        ids.append(wandb_id(config))
    files = sorted(folder.path_of(config).glob("wandb/offline-run-*/*.wandb"))
    assert len(set(ids)) == 1 and [file.stem for file in files] == [f"run-{ids[0]}"] * 2
    lines = read(folder.path_of(config) / "metrics.jsonl")
    assert summary(ended(files[1]))["val/loss_best"] == min(line["val/loss"] for line in lines if "val/loss" in line)


def history(records):
    """{step: {name: value}}; for a picture its path."""
    steps = {}
    for record in records:
        values = {tuple(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if values:
            steps[values["_step",]] = {key[0]: values[key] for key in values if len(key) == 1 or key[1] == "path"}
    return steps


def summary(records):
    updates = [item for record in records for item in record.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def ended(file):
    """All records of a .wandb file. On a busy machine wandb's own process still writes after `finish`."""
    until = time.monotonic() + 60
    while True:
        records = list(wandb_records(file))
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < until, f"{file} has no end"
        time.sleep(0.1)


def wandb_records(file):
    """Records of a .wandb file, which is a log of LevelDB's format: blocks of 32 KiB, the first without its first 7
    bytes; in them pieces of (checksum 4, length 2, kind 1, data), of which kinds 1 and 4 end a record."""
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


def test_the_sweep_for_agents_is_the_files(monkeypatch):
    """Its every combination, as an agent would call train.py, is one of scripts.sweep's points, in a folder of its
    own."""
    monkeypatch.chdir(REPO_ROOT)
    sweep = yaml.safe_load(Path("config/wandb_sweep.yaml").read_text())
    parameters = {name: choice["values"] for name, choice in sweep["parameters"].items()}
    axes = tomllib.loads(Path("config/small.toml").read_text())["sweep"]
    assert parameters == axes, "config/wandb_sweep.yaml repeats config/small.toml's [sweep]"
    configs = []
    for row in itertools.product(*parameters.values()):
        words = agents_words(sweep, dict(zip(parameters, row, strict=True)))
        assert words[:3] == ["/usr/bin/env", "python", "train.py"]
        configs.append(configure.load(*configure.split_command_line(words[3:])))
    points = configure.sweep_points("config/small.toml", ["--log.wandb=online"])
    names = [config.run.name for config in configs]
    assert names == [configure.load("config/small.toml", point).run.name for point in points]
    assert len({*names}) == len(names)
    logs = {(config.log.project, config.log.group, config.log.wandb) for config in configs}
    assert logs == {(sweep["project"], sweep["name"], "online")}


def agents_words(sweep, values):
    """The command line that wandb's agent makes, by its own functions."""
    macros = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
    words = create_sweep_command(sweep["command"])
    return [new for word in words for new in (macros[word[2:-1]] if word.startswith("${") else [word])]


def test_a_run_of_an_agent_is_the_agents(tiny_file, tmp_path, monkeypatch):
    """The real agent starts it, the real client logs it, offline. By hand it goes on as the same run."""
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
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()

    config = configure.load(file, ["--run.seed=1", "--model.router=softmax", "--log.wandb=offline"])
    assert config.run.name == "swept-softmax-seed1" and wandb_id(config) == "agents01"
    (file_of_run,) = folder.path_of(config).glob("wandb/offline-run-*/run-agents01.wandb")
    (run,) = [record.run for record in ended(file_of_run) if record.HasField("run")]
    assert (run.run_id, run.sweep_id, run.run_group) == ("agents01", "sweep123", "swept")
    sections = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert sections["model"]["router"] == sections["model.router"] == "softmax"

    for name in ("SWEEP_ID", "RUN_ID", "SWEEP_PARAM_PATH", "DIR"):
        monkeypatch.delenv(f"WANDB_{name}")
    wandb.teardown()  # it has read the environment
    train.train(
        configure.load(file, ["--run.seed=1", "--model.router=softmax", "--log.wandb=offline", "--train.max_steps=5"])
    )
    assert len([*folder.path_of(config).glob("wandb/offline-run-*/run-agents01.wandb")]) == 2
