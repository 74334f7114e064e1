"""scripts.watch: what a run's files say of it, the table in the terminal, the live page."""

import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import fake_runs
import pytest
from runs import REPO_ROOT

from scripts.report.runs import load_run
from scripts.watch import __main__ as watch
from scripts.watch.server import build_page, make_server
from scripts.watch.status import read_status

TRAINING = {"train/loss": 2.5, "perf/tokens_per_sec": 80.0}
END = [(90, TRAINING), (100, TRAINING | {"val/loss": 2.0})]
NAN = float("nan")


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run's folder with some lines of metrics: 100 steps of 40 tokens; returns the folder."""

    def make(name="one", lines=(), owner=None, router="kern", *more):
        folder = tmp_path / "runs" / name
        shape = ["train.max_steps=100", "train.batch_size=4", "train.micro_batch_size=4", "model.block_size=10"]
        fake_runs.make_run(folder, *shape, f"model.router={router}", "optim.warmup_steps=1", *more, until=0)
        (folder / "metrics.jsonl").write_text("")
        append(folder, *lines)
        if owner:
            (folder / "lock").write_text(f"process {owner} on {platform.node()}\n")
        return folder

    return make


def append(folder, *lines):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "tokens": 40 * step, **values}) + "\n" for step, values in lines)


def status_of(folder, now=None):
    return read_status(load_run(folder), now)


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# ---- the state of a run


@pytest.mark.parametrize("lines, alive, state", [
    *(([], True, "running"), ([(10, TRAINING)], True, "running"), (END, True, "running")),
    *(([], False, "stopped"), ([(10, TRAINING)], False, "stopped"), (END, False, "finished")),
    *((END[:1], False, "stopped"), ([(100, TRAINING)], False, "stopped")),  # without its last evaluation
])  # fmt: skip
def test_state(make_run, lines, alive, state):
    assert status_of(make_run("one", lines, os.getpid() if alive else dead_process())).state == state


def test_numbers_and_the_time_left(make_run):
    """90 steps of 40 tokens at the median speed of the last five lines: 40 tokens per second."""
    speeds = [1000, 1000, 40, 30, 50, 40, 9000]
    lines = [(i + 4, {"train/loss": 3 - i / 10, "perf/tokens_per_sec": speed}) for i, speed in enumerate(speeds)]
    folder = make_run("one", [*lines, (10, {"val/loss": 2.25, "perf/mfu": 0.123})], os.getpid())
    status = status_of(folder)
    assert (status.step, status.seconds_left) == (10, 90 * 40 / 40)
    row = [str(folder), "running", "10 of 100  10%", "2.4000", "2.2500", "9,000", "12.3%", "0:01:30", ""]
    assert status.as_row() == row
    (folder / "lock").write_text(f"process {dead_process()} on {platform.node()}\n")
    assert status_of(folder).seconds_left is None


@pytest.mark.parametrize("quiet, state", [(299, "running"), (301, "silent")])
def test_a_run_that_writes_nothing_is_silent(make_run, quiet, state):
    """By the time of its newest file, the lock or the metrics, and the time that is given."""
    for newest in ("lock", "metrics.jsonl"):
        folder = make_run(newest, [(10, TRAINING)], os.getpid())
        for name in ("lock", "metrics.jsonl"):
            os.utime(folder / name, (0, 4e9 if name == newest else 3e9))
        status = status_of(folder, 4e9 + quiet)
        assert (status.state, status.trouble) == (state, "no metrics for 0:05:01" if state == "silent" else "")


def test_a_process_of_another_user_lives(make_run, monkeypatch):
    def refuse(pid, number):
        raise PermissionError

    folder = make_run("one", [(10, TRAINING)], dead_process())
    monkeypatch.setattr(os, "kill", refuse)
    assert status_of(folder).state == "running"


def test_a_process_on_another_machine_lives_while_it_writes(make_run):
    folder = make_run("one", [(10, TRAINING)])
    (folder / "lock").write_text(f"process {dead_process()} on elsewhere\n")
    for name in ("lock", "metrics.jsonl"):
        os.utime(folder / name, (1000, 1000))
    assert [status_of(folder, 1000 + age).state for age in (299, 301)] == ["running", "stopped"]


LOG, SLOW = [(10, TRAINING)], "warning: slow disk"
BAD, GOOD = {"val/loss": NAN}, {"val/loss": 2.0}


@pytest.mark.parametrize("lines, files, state, trouble", [
    ([(10, TRAINING | {"train/loss": NAN})], {}, "failed", "train/loss is nan"),
    ([(9, GOOD), (10, {"val/loss": float("inf")})], {}, "failed", "val/loss is nan"),
    ([(8, BAD), (9, BAD), (10, GOOD)], {}, "stopped", ""),
    (LOG, {"crash-step_9.json": "", "crash-step_8.json": ""}, "failed", "crash dump crash-step_9.json"),
    (LOG, {"train.log": "error: old\nx\nerror: no disk\ny"}, "failed", "error: no disk"),
    (LOG, {"train.log": f"{SLOW}\n"}, "stopped", SLOW), (END, {"train.log": f"{SLOW}\n"}, "finished", SLOW),
])  # fmt: skip
def test_trouble(make_run, lines, files, state, trouble):
    folder = make_run("one", lines)
    for name, text in files.items():
        (folder / name).write_text(text)
    status = status_of(folder)
    assert (status.state, status.trouble) == (state, trouble)


# ---- the table


def test_a_run_is_read_again_when_its_files_change(make_run, tmp_path):
    """Also after a resume that begins earlier, and when it begins or disappears after the watch."""

    def read():
        return watch.read_runs([tmp_path / "runs"])[0]

    assert read() == []
    folder = make_run("one", [(50, TRAINING)])
    (first,), (second,) = read(), read()
    assert first.step == 50 and first.run is second.run  # not read twice
    (folder / "metrics.jsonl").write_text("")
    append(folder, (20, TRAINING))
    os.utime(folder / "metrics.jsonl", (1, time.time() + 5))
    assert [status.step for status in read()] == [20]
    folder.rename(tmp_path / "gone")
    assert read() == []


def test_the_table(make_run, tmp_path, call):
    """Columns that are empty everywhere are left out; a folder that cannot be read is named below."""
    make_run("a", [(0, {"val/loss": 5.0}), (50, TRAINING | {"val/loss": 3.0})], dead_process())
    make_run("b", [], None)
    broken = make_run("c")
    (broken / "config.toml").write_text("[model\n")
    head, _, a, b, left_out = call(watch.main, tmp_path / "runs", "--once").splitlines()
    assert head.split("  ")[0] == "run" and "MFU" not in head and "left" not in head and "trouble" not in head
    assert a.split() == [str(tmp_path / "runs/a"), "stopped", "50", "of", "100", "50%", "2.5000", "3.0000", "80"]
    assert b.split()[1:] == ["stopped", "0", "of", "100", "0%"] and left_out.startswith(f"left out: {broken}: ")


def test_no_runs_yet_and_wrong_arguments(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(watch.main, "--once") == "no runs in runs yet\n"
    server = make_server(0, list)
    port = str(server.server_port)
    for words, says in ((["no"], "no: no such folder; name folders"), (["--every=0"], "--every 0: expected"),
                        (["--serve=99999"], "port 99999: "), ([f"--serve={port}"], f"port {port}: ")):  # fmt: skip
        assert says in call(watch.main, *words, code=2)
    server.server_close()


def test_watching_imports_no_torch(make_run, tmp_path):
    make_run("a", [(50, TRAINING)])
    code = f"import sys; from scripts.watch.__main__ import main; main([{str(tmp_path)!r}, '--once']); "
    code += "assert not {'torch', 'matplotlib', 'scipy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True, capture_output=True)


# ---- the live page


@contextmanager
def serving(*places):
    """The page's address, served from a thread."""
    with make_server(0, lambda: watch.read_runs(places)[0]) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def get(address, host=None):
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Host": host} if host else {})) as reply:
        return reply.read().decode(), reply.headers


def test_the_page_is_the_report_of_runs_that_train(tmp_path, monkeypatch):
    """Unfinished runs beside finished ones. It is written again when a run changes, and then alone."""
    monkeypatch.setattr("scripts.report.style.DPI", 25)
    for router, until in (("kern", 1.0), ("tanh", 0.5)):
        fake_runs.make_run(tmp_path / f"runs/{router}", f"model.router={router}", until=until)
    with serving(tmp_path / "runs") as address:
        page, headers = get(address)
        assert "refresh" in page and page.count("data:image/png") == 2
        assert re.search(r"<td>\S+/runs/tanh</td><td>stopped</td><td>500 of 1,000", page)
        assert "<b>tanh</b>" in page and "compared at step 500" in page and "undecided (1 seed)" in page
        assert get(address)[0] == page
        writes = []
        monkeypatch.setattr("scripts.watch.server.build_page", lambda *of: writes.append(1) or build_page(*of))
        get(address)
        append(tmp_path / "runs/tanh", (600, {"train/loss": 1.2345}))
        assert "1.2345" in get(address)[0] and writes == [1]
        for path, host, code in (("/runs", None, 404), ("/", "evil.example", 403)):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(address + path, host)
            assert error.value.code == code


def test_runs_that_cannot_be_compared_are_in_the_page(tmp_path, make_run):
    page = build_page([]).decode()
    assert "No runs yet" in page and "refresh" in page
    folders = [make_run("a", [(10, {"val/loss": 2.0})]), make_run("b", [(20, {"val/loss": 2.0})], None, "tanh")]
    statuses = [status_of(folder) for folder in folders]
    page = build_page(statuses).decode()
    assert "evaluated at no common step" in page and all(str(folder) in page for folder in folders)
