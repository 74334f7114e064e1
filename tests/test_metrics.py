"""runtime/metrics.py: metrics.jsonl whatever happens to it, Weights & Biases whatever happens to that, loads in
numbers."""

import codecs
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlparse

import pytest
import torch
import wandb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wandb.proto import wandb_internal_pb2

import train
from runtime import RunError, checkpoint
from runtime.metrics import Metrics, load_metrics, read, start_wandb

HOUSE = Path(train.__file__).parent
fuzz = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# ---- metrics.jsonl


def steps(folder):
    return [line["step"] for line in read(folder / "metrics.jsonl")]


def write_lines(folder, *lines, end="\n"):
    text = "\n".join(json.dumps(line) for line in lines) + end
    (folder / "metrics.jsonl").write_text(text)
    return text


def test_metrics_are_numbers_line_by_line(tmp_path):
    metrics = Metrics(tmp_path, -1)
    metrics.log(0, 0, **{"val/loss": torch.tensor(2.5), "optim/lr": 0.1})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 0, "tokens": 0, "val/loss": 2.5, "optim/lr": 0.1}]  # at once
    metrics.log(1, 64, **{"train/loss": math.inf, "val/loss": math.nan})
    metrics.close()
    last = read(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == 1 and last["train/loss"] == math.inf and math.isnan(last["val/loss"])


def test_resuming_drops_lines_after_the_checkpoint_and_a_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged = [(0, "val"), (2, "train"), (4, "train"), (4, "val"), (6, "train")]
    lines = [json.dumps({"step": step, "tokens": step * 64, name: 1.0}) for step, name in logged]
    path.write_text("\n".join(lines) + '\n{"step": 8, "tok')
    assert steps(tmp_path) == [0, 2, 4, 4, 6]
    metrics = Metrics(tmp_path, 4)
    metrics.log(5, 320)
    metrics.close()
    assert path.read_text().splitlines() == [*lines[:4], '{"step": 5, "tokens": 320}']
    Metrics(tmp_path, -1).close()  # from the start: nothing is kept
    assert path.read_text() == ""


def test_resuming_leaves_each_step_once(tmp_path):
    line, again, other = ({"step": 2, "tokens": 64, name: value} for name, value in (("a", 1), ("a", 2), ("b", 3)))
    late = {"step": 1, "tokens": 32, "a": 4}
    write_lines(tmp_path, {"step": 3, "tokens": 96, "a": 0}, line, other, again, late)
    Metrics(tmp_path, 2).close()
    assert read(tmp_path / "metrics.jsonl") == [again, other, late]


@pytest.mark.parametrize("end", ["", "\n", '\n{"step": 2, "tok', "\n" + "\0" * 5000, '\n{"st' + "\0" * 5000, "\n\n"])
def test_a_broken_end_is_left_out(tmp_path, end):
    lines = [{"step": 0, "tokens": 0}, {"step": 1, "tokens": 64}]
    write_lines(tmp_path, *lines, end=end)
    assert read(tmp_path / "metrics.jsonl") == lines


@pytest.mark.parametrize("content", [None, "", "\n", "\0\0\0", "{"])
def test_no_line_at_all(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert read(tmp_path / "metrics.jsonl") == []


BROKEN = {
    "half a line": b'{"st',
    "blank": b"",
    "NUL bytes": b"\0\0",
    "not UTF-8": b'{"step": 1, "tokens": 2, "a\xff": 3}',
    "UTF-16": '{"step": 1, "tokens": 2}'.encode("utf-16-be"),
    "a list": b'["step", "tokens"]',
    "no step": b'{"tokens": 2}',
    "no tokens": b'{"step": 1}',
    "step a float": b'{"step": 1.0, "tokens": 2}',
    "step a truth": b'{"step": true, "tokens": 2}',
    "a text": b'{"step": 1, "tokens": 2, "val/loss": "2.5"}',
    "nested": b'{"step": 1, "tokens": 2, "val/loss": {"a": 2.5}}',
    "nested without end": b"[" * 100_000,
    "digits without end": b'{"step": 1, "tokens": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    good = b'{"step": 0, "tokens": 0}'
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good, line, good, b""]))
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is no JSON object .*; remove that line"):
        Metrics(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_bytes().count(good) == 2  # left as it was


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
LINES = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(list(BROKEN.values()) + [codecs.BOM_UTF8 + b"{}", '{"step": 1}'.encode("utf-16")]),
    JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries({"step": st.integers(-1, 5) | JSON_VALUES, "tokens": st.integers() | JSON_VALUES}).map(
        lambda line: json.dumps(line).encode()
    ),
    st.fixed_dictionaries({"step": st.integers(0, 5), "tokens": st.integers(0), "loss": st.floats()}).map(
        lambda line: json.dumps(line).encode()
    ),
)


@fuzz
@given(st.lists(LINES, max_size=6), st.sampled_from([b"\n", b"\r\n", b"\r", b"\x0b"]), st.integers(-1, 5))
def test_any_bytes_are_lines_or_a_named_error(tmp_path, lines, newline, resume_step):
    path = tmp_path / "metrics.jsonl"
    data = newline.join(lines)
    path.write_bytes(data)
    try:
        before = read(path)
        Metrics(tmp_path, resume_step).close()
    except RunError as error:
        number = int(re.match(re.escape(f"{path}, line ") + r"(\d+) .*; remove that line$", str(error))[1])
        assert number < len(data.split(b"\n"))  # a line that is there, and not the last
        assert path.read_bytes() == data
        return
    assert all(type(line["step"]) is int for line in before)
    assert all(isinstance(value, int | float) for line in before for value in line.values())
    after = read(path)
    assert {line["step"] for line in after} == {line["step"] for line in before if line["step"] <= resume_step}
    assert len({(line["step"], *line) for line in after}) == len(after)


@fuzz
@given(st.data())
def test_a_kill_at_any_byte_costs_the_line_in_writing(tmp_path, data):
    lines = [{"step": step, "tokens": 64 * step, "train/loss": 1 / (step + 1)} for step in range(5)]
    text = write_lines(tmp_path, *lines).encode()
    cut, nuls = data.draw(st.integers(0, len(text))), data.draw(st.sampled_from([0, 0, 7]))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text[:cut] + b"\0" * nuls)
    ends = [match.end() - 1 for match in re.finditer(b"\n", text)]  # whole without its line break, but not with NULs
    whole = sum(end <= cut - (nuls > 0) for end in ends)
    assert read(path) == lines[:whole]
    metrics = Metrics(tmp_path, 3)
    metrics.log(9, 576)
    metrics.close()
    assert path.read_bytes().endswith(b'{"step": 9, "tokens": 576}\n') and steps(tmp_path) == [*range(min(whole, 4)), 9]


def test_rewriting_reaches_the_disk_before_it_takes_the_files_place(tmp_path, monkeypatch):
    text, events = write_lines(tmp_path, {"step": 0, "tokens": 0}, {"step": 9, "tokens": 9}), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(os, "replace", lambda old, new: events.append("replace") or replace(old, new))
    metrics = Metrics(tmp_path, 0)
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    assert events == [inode, "replace"]
    metrics.log(1, 64)
    metrics.sync()
    assert events == [inode, "replace", inode]
    metrics.close()

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    text = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written \(Input/output error\)"):
        Metrics(tmp_path, -1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_full_disk_is_an_error_with_its_remedy(tmp_path):
    metrics = Metrics(tmp_path, -1)
    metrics.log(0, 0)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))  # the next line is written in part
    try:
        with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written \(File too large\)\. Make room"):
            metrics.log(1, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "tokens": 0}\n'  # and not half a line
    again = Metrics(tmp_path, 0)
    again.log(1, 64)
    again.close()
    assert steps(tmp_path) == [0, 1]


def test_full_disk_is_a_warning_where_the_config_says_so(tmp_path, capsys):
    metrics = Metrics(tmp_path, -1, on_error="warn")
    metrics.log(0, 0)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        for step in (1, 2):
            metrics.log(step, 64 * step)
        metrics.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert capsys.readouterr().out.count("warning: ") == 1 and steps(tmp_path) == [0]
    metrics.log(3, 192)  # there is room again
    assert steps(tmp_path) == [0, 1, 2, 3]
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        metrics.log(4, 256)
        with pytest.raises(RunError, match="metrics.jsonl cannot be written"):
            metrics.close()  # numbers are lost
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_numbers_of_a_run_that_begins_again_are_put_aside(tmp_path):
    metrics = Metrics(tmp_path, -1)
    for step in range(3):
        metrics.log(step, step)
    metrics.close()
    for _ in range(2):  # the second is shorter, and takes nothing's place
        Metrics(tmp_path, -1).log(0, 0)
        assert [line["step"] for line in read(tmp_path / "metrics.old.jsonl")] == [0, 1, 2] and steps(tmp_path) == [0]


def test_metrics_go_to_the_tracker_too(tmp_path):
    sent = []
    tracker = SimpleNamespace(log=lambda line, step: sent.append((step, line)), finish=lambda: sent.append("finish"))
    metrics = Metrics(tmp_path, -1, tracker)
    metrics.log(3, 96, **{"train/loss": torch.tensor(1.0)})
    metrics.close()
    assert sent == [(3, {"step": 3, "tokens": 96, "train/loss": 1.0}), "finish"]


# ---- Weights & Biases: a client that fails


@pytest.fixture
def fake_wandb(monkeypatch, tmp_path):
    """Stands in for the module. `calls` are the modes that were asked for and the methods called; those in `failures`
    raise what is there. There is no key."""
    fake = SimpleNamespace(calls=[], failures={}, Settings=wandb.Settings, teardown=lambda: None)

    def method(name, *arguments, **named):
        fake.calls.append(name)
        if name in fake.failures:
            raise fake.failures[name]

    def init(mode, **arguments):
        method(mode)
        run = SimpleNamespace(mode=mode, **arguments)
        for name in ("define_metric", "log", "finish"):
            setattr(run, name, lambda *arguments, name=name, **named: method(name))
        return run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return fake


def start(mode, folder):
    return start_wandb(mode, "project", "name", folder, {"a": 1})


def test_wandb_disabled_is_not_even_imported(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises
    assert start("disabled", tmp_path) is None
    assert capsys.readouterr().out == ""


def test_wandb_without_a_key_goes_offline_in_one_line(fake_wandb, tmp_path, capsys):
    run = start("online", tmp_path)
    assert (run.mode, run.project, run.name, run.dir, run.config) == (
        "offline",
        "project",
        "name",
        str(tmp_path),
        {"a": 1},
    )
    assert fake_wandb.calls == ["offline", "define_metric"]  # the network was not even tried
    (line,) = capsys.readouterr().out.splitlines()
    assert "no API key" in line and "wandb login" in line


@pytest.mark.parametrize("key", ["environment", "netrc"])
def test_wandb_with_a_key_goes_online(fake_wandb, tmp_path, monkeypatch, capsys, key):
    if key == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    else:
        host = urlparse(wandb.Settings().base_url).hostname
        (tmp_path / "netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
        (tmp_path / "netrc").chmod(0o600)
    assert start("online", tmp_path).mode == "online"
    assert capsys.readouterr().out == ""


def test_wandb_without_a_network_goes_offline_in_one_line(fake_wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    fake_wandb.failures["online"] = wandb.errors.CommError("Run initialization has timed out.\nMore words.")
    assert start("online", tmp_path).mode == "offline"
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


# ---- Weights & Biases: the real client

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
        "import sys, runtime.metrics, train; runtime.metrics.WANDB_SECONDS = 3; sys.exit(train.main(sys.argv[1:]))"
    )
    homes = {name: str(tmp_path / "home") for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    (tmp_path / "home").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | homes
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_file), f"--log.wandb={mode}"],
        cwd=HOUSE,
        env=environment | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY},
        capture_output=True,
        timeout=80,
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


def test_wandb_goes_on_with_the_run_that_its_checkpoint_names(tiny, monkeypatch):
    """The real client, offline: two processes' files carry one id, with router, corpus and sizes as tags."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = ["log.wandb=offline", "train.checkpoint_interval=2", "eval.interval=2"]
    config = tiny(*own)
    train.train(config)
    checkpoints = Path(config.run.dir, config.run.name, "checkpoints")
    assert re.fullmatch("[0-9a-f]{8}", checkpoint.verify(checkpoints / "step_00000004")["facts"]["wandb"])
    shutil.rmtree(checkpoints / "step_00000004")
    train.train(config)
    files = sorted(Path(config.run.dir).rglob("run-*.wandb"))
    runs = [record.run for file in files for record in wandb_records(file) if record.run.run_id]
    assert len(files) == 2 and {run.run_id for run in runs} == {files[0].stem.removeprefix("run-")}
    assert {run.job_type for run in runs} == {"train"}
    assert {*runs[0].tags} == {"kern", config.data.name, "0M", "0M active"}


def test_wandb_writes_offline_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = start("offline", tmp_path)
    metrics = Metrics(tmp_path, -1, run)
    metrics.log(1, 64, **{"train/loss": torch.tensor(1.5)})
    metrics.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    logged, until = {}, time.monotonic() + 60  # on a busy machine wandb's own process writes after `finish`
    while "train/loss" not in logged and time.monotonic() < until:
        logged = {item.nested_key[0]: item.value_json for record in wandb_records(file) for item in record.history.item}
    assert logged["train/loss"] == "1.5"


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


# ---- loads in numbers


def test_load_metrics_by_hand():
    values = load_metrics(torch.tensor([[4, 0, 0, 0], [1, 1, 0, 2]]))  # busiest over mean: 4 and 2
    assert {name: value.item() for name, value in values.items()} == {"load_imbalance": 3.0, "dead_experts": 4}
    assert load_metrics(torch.full((1, 4), 7))["load_imbalance"] == 1
    assert load_metrics(torch.zeros(0, 4)) == {}  # dense: no layer has a router
