"""scripts.watch: what a run's files say of it, the table in the terminal, the live page."""

import errno
import fcntl
import html
import http.client
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import fake_runs
import pytest
from runs import ALONE, REPO_ROOT, wait_until

from common.files import is_locked
from common.text import escape_controls
from report.blocks import Picture
from report.overview import describe_run
from runtime import FAILURE_FILE, RunError
from runtime.folder import RunFolder
from runtime.runs import Reading, Run, read_runs
from scripts import watch
from scripts.watch import build_page, make_server

TRAINING = {"train/loss": 2.5, "perf/tokens_per_sec": 80.0}
END = [(90, TRAINING), (100, TRAINING | {"val/loss": 2.0})]
NAN = float("nan")


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run's folder with some lines of metrics: 100 steps of 40 tokens;
    returns the folder.
    """

    def make(name="one", lines=(), owner=None, router="kern", *more):
        folder = tmp_path / "runs" / name
        shape = [
            "train.max_steps=100",
            "train.batch_size=4",
            "train.micro_batch_size=4",
            "model.block_size=10",
        ]
        fake_runs.make_run(
            folder, *shape, f"model.router={router}", "optim.warmup_steps=1", *more, until=0
        )
        (folder / "metrics.jsonl").write_text("")
        append(folder, *lines)
        if owner:
            (folder / "lock").write_text(f"process {owner} on {platform.node()}\n")
        return folder

    return make


def append(folder, *lines):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "tokens": 40 * step, **values}) + "\n"
            for step, values in lines
        )


def status_of(folder, now=None):
    return Run(folder).find_status(now)


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# ---- the state of a run
LOG, ME, ELSEWHERE = [(10, TRAINING)], platform.node(), "elsewhere"


@contextmanager
def locked(folder):
    """Within this context the lock is held, as by a process that trains the run."""
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


# the number decides nothing
@pytest.mark.parametrize("owner", [1, os.getpid(), dead_process()], ids=["init", "alive", "dead"])
@pytest.mark.parametrize("lines, held, host, quiet, state", [
    ([], True, ME, 1, "running"), (END, True, ME, 300, "running"), (LOG, True, ME, 301, "running"),
    ([], False, ME, 1, "stopped"), (LOG, False, ME, 301, "stopped"),
    (END, False, ME, 1, "finished"),
    # without its last evaluation
    (END[:1], False, ME, 1, "stopped"), ([(100, TRAINING)], False, ME, 1, "stopped"),
    # a lock over the network; a copy, or a network without locks
    (LOG, True, ELSEWHERE, 299, "running"), (LOG, False, ELSEWHERE, 299, "unknown"),
    (END, False, ELSEWHERE, 299, "finished"),
])  # fmt: skip
def test_state(make_run, owner, lines, held, host, quiet, state, monkeypatch):
    folder = make_run("one", lines)
    (folder / "lock").write_text(f"process {owner} on {host}\n")
    monkeypatch.setenv("TZ", "XYZ-14")  # 14 hours ahead
    time.tzset()
    with locked(folder) if held else nullcontext():
        # a run that has no line yet has just taken its lock
        newest, other = ("metrics.jsonl", "lock") if lines else ("lock", "metrics.jsonl")
        os.utime(folder / newest, (0, 4e9))
        os.utime(folder / other, (0, 3e9))
        status = status_of(folder, 4e9 + quiet)
    monkeypatch.undo()
    time.tzset()
    written = "2096-10-02 21:06:40"  # 4e9 seconds after 1970, local time
    trouble = f"no metrics since {written}" if held and quiet > 300 else ""
    if state == "unknown":
        trouble = f"its lock on elsewhere is not visible here; last written {written}"
    assert (status.state, status.trouble) == (state, trouble)


def test_a_lock_that_cannot_be_asked_for_is_unknown(make_run, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    folder = make_run("one", LOG, os.getpid())
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert status_of(folder).state == "unknown"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_the_lock_of_another_users_run_is_seen():
    """By a process that may read the lock and not write it."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        for is_held in (True, False):
            (Path(place) / "lock").write_text("process 1 on x\n")
            with locked(Path(place)) if is_held else nullcontext():
                child = os.fork()
                if not child:
                    code = 2
                    try:
                        os.setuid(65534)  # nobody
                        code = int(is_locked(Path(place) / "lock") is not is_held)
                    finally:
                        os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_watching_keeps_no_run_from_its_lock(make_run):
    """A thread asks all the time; the run takes its lock, and another process does not."""
    folder = make_run("one")
    run = RunFolder(folder)
    ended = threading.Event()
    states = set()

    def ask():
        while not ended.is_set():
            states.add(is_locked(folder / "lock"))

    watcher = threading.Thread(target=ask)
    watcher.start()
    try:
        for _ in range(300):
            with run.claim(ALONE):
                assert is_locked(folder / "lock")
        with run.claim(ALONE), pytest.raises(RunError, match="another process trains this run"):
            run.claim(ALONE).__enter__()
        with run.claim(ALONE):
            wait_until(lambda: True in states)
        wait_until(lambda: False in states)
    finally:
        ended.set()
        watcher.join()


def test_numbers_and_the_time_left(make_run):
    """88 steps of 40 tokens at the median speed of the last five lines: 40 tokens per second."""
    speeds = [1000, 1000, 40, 30, 50, 40, 9000]
    lines = [
        (i + 4, {"train/loss": 3 - i / 10, "perf/tokens_per_sec": speed})
        for i, speed in enumerate(speeds)
    ]
    folder = make_run("one", [*lines, (12, {"val/loss": 2.25, "perf/mfu": 0.123})], dead_process())
    row = [
        str(folder),
        "running",
        "12 of 100  12%",
        "2.4000",
        "2.2500",
        "12.3%",
        "40",
        "0:01:28",
        "",
    ]
    with locked(folder):
        assert [*describe_run(Run(folder)).values()] == row
    assert describe_run(Run(folder))["left"] == ""
    young = make_run("two", [(10, {"train/loss": 3.0})], dead_process())
    with locked(young):
        row = describe_run(Run(young))
    assert (row["state"], row["tokens/s"], row["left"]) == ("running", "", "")  # no speed yet


SLOW = "warning: slow disk"
BAD, GOOD = {"val/loss": NAN}, {"val/loss": 2.0}


@pytest.mark.parametrize("lines, files, state, trouble", [
    ([(10, TRAINING | {"train/loss": NAN})], {}, "failed", "train/loss is nan"),
    ([(9, GOOD), (10, {"val/loss": float("inf")})], {}, "failed", "val/loss is inf"),
    ([(9, GOOD), (10, BAD), (12, TRAINING)], {}, "failed", "val/loss is nan"),
    ([(8, BAD), (9, BAD), (10, GOOD)], {}, "stopped", ""),
    ([(8, BAD), (9, GOOD), (10, BAD)], {}, "failed", "val/loss is nan"),
    (LOG, {"crash-step_9.json": "", "crash-step_8.json": ""},
     "failed", "crash dump crash-step_9.json"),
    (LOG, {"train.log": "error: old\nx\nerror: no disk\ny"}, "failed", "error: no disk"),
    (LOG, {FAILURE_FILE: "lr 0.5: 20 steps in a row skipped. Start again\n"},
     "failed", "lr 0.5: 20 steps in a row skipped"),
    (END, {FAILURE_FILE: "no space left\n"}, "failed", "no space left"),
    (LOG, {"train.log": f"{SLOW}\n"}, "stopped", SLOW),
    (END, {"train.log": f"{SLOW}\n"}, "finished", SLOW),
])  # fmt: skip
def test_trouble(make_run, lines, files, state, trouble):
    folder = make_run("one", lines)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert status_of(folder) == (state, lines[-1][0], trouble)


# ---- the table
def test_the_table(make_run, tmp_path, call, monkeypatch):
    """Columns that are empty everywhere are left out; an unreadable folder is named below."""
    monkeypatch.chdir(tmp_path)
    assert call(watch.main) == "no runs in runs yet\n"
    make_run("a", [(0, {"val/loss": 5.0}), (50, TRAINING | {"val/loss": 3.0})], dead_process())
    broken = make_run("c")
    (broken / "config.toml").write_text("[model\n")
    head, _, a, left_out = call(watch.main).splitlines()
    assert (
        head.split("  ")[0] == "run"
        and "MFU" not in head
        and "left" not in head
        and "trouble" not in head
    )
    assert a.split() == ["runs/a", "stopped", "50", "of", "100", "50%", "2.5000", "3.0000", "80"]
    assert left_out.startswith("left out: runs/c: ")
    (make_run("d") / "config.toml").write_text("[model\n")
    assert [line[:16] for line in call(watch.main).splitlines()[3:]] == [
        "left out: runs/c",
        "left out: runs/d",
    ]
    said = call(watch.main, "runs/a", "x", "y", code=2)
    assert said.startswith("error: x, y: no such folder; ")
    with monkeypatch.context() as patch:
        patch.setattr(watch, "make_server", mock.Mock(side_effect=OSError("in use")))
        assert "port 6060: in use; name another" in call(watch.main, "--serve", code=2)
    with make_server(0, lambda: Reading([], [])) as server:
        port = str(server.server_port)
        assert f"port {port}: " in call(watch.main, f"--serve={port}", code=2)


def test_watching_and_reports_import_no_torch(make_run, tmp_path):
    make_run("a", [(50, TRAINING)])
    code = f"import sys; from scripts.watch import main; main([{str(tmp_path)!r}]); "
    code += "assert not {'torch', 'matplotlib', 'scipy'} & sys.modules.keys(); "
    code += "import report.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True, capture_output=True)


# ---- the live page
@contextmanager
def serve(read):
    """Serve the page of what `read` returns; yields a function that gets it, and the port."""
    with make_server(0, read) as server:

        def get(path="/", host="localhost"):
            request = urllib.request.Request(
                f"http://127.0.0.1:{server.server_port}{path}", headers={"Host": host}
            )
            with urllib.request.urlopen(request) as reply:
                return reply.read().decode()

        threading.Thread(target=server.serve_forever).start()
        try:
            yield get, server.server_port
        finally:
            server.shutdown()


def read_page(reading):
    """The HTML of the live page."""
    return build_page(reading, {})["/"].decode()


def assert_replies(port, kinds):
    """Each path has its kind, whatever the query, and is not sent again while it stays as it is."""
    for path, kind in kinds.items():
        for query in ("", "?a=b"):
            connection = http.client.HTTPConnection("localhost", port, timeout=20)
            connection.request("GET", path + query)
            reply = connection.getresponse()
            content = reply.read()
            assert (reply.status, reply.headers.get_content_type()) == (200, kind)
            assert len(content) == int(reply.headers["Content-Length"]) > 99
            known = {"If-None-Match": reply.headers["ETag"]}
            connection.request("GET", path + query, headers=known)
            assert connection.getresponse().status == 304
            connection.close()


def test_changed_content_of_equal_length_is_sent_again(monkeypatch):
    left_out = []
    monkeypatch.setattr(watch, "build_page", lambda *_: {"/": b"%d" % len(left_out)})
    with serve(lambda: Reading([], [*left_out])) as (_, port):
        connection = http.client.HTTPConnection("localhost", port, timeout=20)
        connection.request("GET", "/")
        reply = connection.getresponse()
        assert reply.read() == b"0"
        left_out.append("a run")
        connection.request("GET", "/", headers={"If-None-Match": reply.headers["ETag"]})
        reply = connection.getresponse()
        assert (reply.status, reply.read()) == (200, b"1")
        connection.close()
    addresses = [Picture("a.svg", "", "", svg).address for svg in (b"<svg/>", b"<div/>")]
    assert addresses[0] != addresses[1]


def test_the_page_is_the_report_of_runs_that_train(tmp_path, monkeypatch):
    """Unfinished runs beside finished ones.

    It is written again when a run changes, and then alone.
    """
    bare = ["val/load", "val/gate", "val/dead", "router/"]  # few pictures
    for router, until in (("kern", 1.0), ("tanh", 0.5)):
        words = f"model.router={router}"
        fake_runs.make_run(tmp_path / f"runs/{router}", words, until=until, without=bare)

    with serve(lambda: read_runs([tmp_path / "runs"])) as (get, port):
        page = get()
        picture = re.search(r'<img[^>]* src="/?([^"]*)"', page)[1]
        types = {"/": "text/html", f"/{picture}": "image/svg+xml", "/live.js": "text/javascript"}
        assert_replies(port, types)
        assert "live.js" in page and '<img alt="validation loss' in page
        assert re.search(r"<td>\S+/runs/tanh</td><td>tanh</td><td>stopped</td><td>500 of", page)
        assert (
            "<b>kern</b>" in page
            and "<b>tanh</b>" not in page
            and "runs/tanh is not compared: stopped at step 500 of 1,000" in page
        )
        writes, failures = [], []

        def build(*arguments):
            if failures:
                raise failures.pop()
            writes.append(1)
            return build_page(*arguments)

        monkeypatch.setattr(watch, "build_page", build)
        assert get() == page
        later = time.time() + 400
        with locked(tmp_path / "runs/tanh"):
            monkeypatch.setattr(time, "time", lambda: later)
            silent = get()
            assert "no metrics since" in silent and writes == [1]
            address = re.search(r'<img alt="validation loss[^>]*src="([^"]*)"', silent)[1]
            assert "tanh, seed 0, running" in get(f"/{address.lstrip('/')}")
            later += 100
            assert get() == silent and writes == [1]
        append(tmp_path / "runs/tanh", (600, {"train/loss": 1.2345}))
        failures.append(OSError(errno.ENOSPC, "disk full"))
        with pytest.raises(urllib.error.HTTPError) as error:
            get()
        assert error.value.code == 500 and "disk full" in error.value.read().decode()
        assert "1.2345" in get() and writes == [1, 1]
        file = tmp_path / "runs/kern/metrics.jsonl"  # trained again, with other losses
        file.write_text(re.sub(r'"val/loss": \d', '"val/loss": 7', file.read_text()))
        assert address not in get() and writes == [1, 1, 1]
        for path, host, code in (("/runs", "localhost", 404), ("/", "evil.example", 403)):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(path, host)
            assert error.value.code == code
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(watch, "build_page", mock.Mock(side_effect=full))
        append(tmp_path / "runs/tanh", (700, {"train/loss": 1.2}))
        with pytest.raises(urllib.error.HTTPError, match="500") as error:
            get()
        assert "no page: [Errno 28] No space left" in error.value.read().decode()


def test_the_server_is_seen_from_this_computer_alone():
    with make_server(0, lambda: Reading([], [])) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_idle_connections_end_and_threads_are_few(monkeypatch):
    monkeypatch.setattr(watch, "MAX_THREADS", 3)
    monkeypatch.setattr(watch, "IDLE_SECONDS", 0.5)
    before = threading.active_count()
    reading = Reading([], ["left out: runs/b: no reason"])
    with serve(lambda: reading) as (get, port), ExitStack() as stack:
        idle = []
        for _ in range(9):
            connection = socket.create_connection(("127.0.0.1", port), timeout=20)
            idle.append(stack.enter_context(connection))
        answer = []
        request = threading.Thread(target=lambda: answer.append(get()))
        request.start()
        deadline = time.monotonic() + 30
        while request.is_alive() and time.monotonic() < deadline:
            assert threading.active_count() <= before + 1 + 1 + 3  # server, request, its threads
            time.sleep(0.01)
        assert "left out: runs/b: no reason" in answer[0]
        for connection in idle:
            assert connection.recv(1) == b""  # the server has closed it


# ---- damaged folders
def replace_by_fifo(file):
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def test_arrays_that_come_and_go_are_seen(tmp_path):
    """Also with old times, as of a file that was put back or removed."""
    run = fake_runs.make_run(tmp_path / "a", end=2.0)
    array = run / "arrays/val_00000001.npz"
    troubles = []
    for change in (lambda: None, lambda: array.write_bytes(b"cut"), array.unlink):
        array.parent.mkdir(exist_ok=True)
        change()
        if array.exists():
            os.utime(array, (0, 0))
        troubles.append(read_runs([tmp_path]).left_out)
    assert troubles[0] == troubles[2] == [] and f"{array} is damaged" in troubles[1][0].replace(
        "left out: ", ""
    )
    config = run / "config.toml"
    config.write_text(config.read_text().replace("\nseed = 0\n", "\nseed = 7\n"))
    assert [read.seed for read in read_runs([tmp_path]).runs] == [7]


def write_metrics(text):
    return lambda run: (run / "metrics.jsonl").write_text(text)


def write_value(name, value):
    line = {"step": 10, "tokens": 400, "val/loss": 2.0} | {name: value}
    return write_metrics(json.dumps(line) + "\n")


def write_file(name, content):
    return lambda run: (run / name).write_bytes(content)


def make_lock_folder(run):
    (run / "lock").unlink(missing_ok=True)
    (run / "lock").mkdir()


def add_array_fifo(run):
    (run / "arrays").mkdir(exist_ok=True)
    os.mkfifo(run / "arrays/val_00000010.npz")


NO_NUMBERS = "line 1 is not a JSON object of numbers"
# name of a folder: what is done to it, what its line says. "\\x1b" is an escape that is shown.
DAMAGES = {
    "huge-loss": (write_value("val/loss", 10**400), NO_NUMBERS),
    "huge-step": (write_value("step", 10**400), NO_NUMBERS),
    "huge-tokens": (write_value("tokens", -(10**400)), NO_NUMBERS),
    "many-digits": (write_metrics('{"step": 1, "tokens": %s}\n' % ("9" * 5000)), NO_NUMBERS),
    "negative-step": (write_value("step", -1), NO_NUMBERS),
    "list-loss": (write_value("val/loss", [2.0]), "line 1 is not a JSON object"),
    "list-gamma": (write_value("router/gamma", [2.0]), "line 1 is not a JSON object"),
    "weights": (write_value("val/window_weights", [1.0, 2.0]), "val/window_losses"),
    "deep": (write_metrics("[" * 10**5 + "\n{}\n"), NO_NUMBERS),
    "slow": (write_value("perf/tokens_per_sec", 1e-300), "10 of 100"),
    "infinite": (write_value("perf/tokens_per_sec", math.inf), "10 of 100"),
    "not-text": (write_file("metrics.jsonl", b"\xff\x00\n{}\n"), NO_NUMBERS),
    "metrics-fifo": (lambda run: replace_by_fifo(run / "metrics.jsonl"), "not a regular file"),
    "array-fifo": (add_array_fifo, "val_00000010.npz is damaged"),
    "lock-fifo": (lambda run: replace_by_fifo(run / "lock"), "is not visible here"),
    "lock-folder": (make_lock_folder, "is not visible here"),
    "lock-binary": (write_file("lock", bytes(range(256)) * 99), "stopped"),
    "lock-number": (write_file("lock", b"process %s on x\n" % (b"9" * 9999)), "stopped"),
    "lock-escape": (write_file("lock", b"process 1 on \x1b[2Jhost\n"), r"its lock on \x1b[2Jhost"),
    "log-fifo": (lambda run: replace_by_fifo(run / "train.log"), "stopped"),
    "log-escape": (write_file("train.log", b"error: \x1b]0;x\x07\x9b\n"), r"error: \x1b]0;x\x07"),
    "crash\x1b[1A": (write_file("crash-step_1\r.json", b""), r"crash dump crash-step_1\r.json"),
    "new\nline": (write_file("config.toml", b"[model"), "is not TOML"),
    os.fsdecode(b"byte\xff"): (write_metrics(""), r"byte\udcff"),
    "config-fifo": (lambda run: replace_by_fifo(run / "config.toml"), "no config.toml"),
    "config-binary": (write_file("config.toml", b"\xff\xfe"), "is not TOML"),
    "config-deep": (write_file("config.toml", b"a = " + b"[" * 10**5), "is not TOML"),
    "closed": (write_metrics(""), "Permission denied"),
    "closed-config": (write_metrics(""), "Permission denied"),
}


def take_rights(monkeypatch, folder, file):
    """Let the system refuse to list `folder`, what is in it, and to open `file`.

    Root, who may run this test, has the right to all.
    """

    def refuse_some(call):
        def guarded(path, *args, **options):
            name = str(path)
            is_refused = name.endswith((folder, file)) and call is not stat
            if is_refused or f"{folder}/" in name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *args, **options)

        return guarded

    stat = os.stat
    for module, name in ((os, "scandir"), (os, "stat"), (io, "open")):
        monkeypatch.setattr(module, name, refuse_some(getattr(module, name)))


@pytest.fixture
def damaged_runs(make_run, tmp_path, monkeypatch):
    """Folders with every damage, beside runs/good; a read that waits fails."""
    monkeypatch.chdir(tmp_path)
    make_run("good", END)
    (tmp_path / "runs/loop").symlink_to("loop")
    for name, (damage, _) in DAMAGES.items():
        damage(make_run(name, LOG))
    alarm = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a read waits for a writer"))
    signal.alarm(60)
    take_rights(monkeypatch, "runs/closed", "runs/closed-config/config.toml")
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, alarm)


def test_a_damaged_folder_is_a_line_and_the_others_are_shown(damaged_runs, tmp_path, call):
    (good,) = [line for line in call(watch.main, "runs/good").splitlines() if "runs/good" in line]
    text = call(watch.main, *sorted((tmp_path / "runs").glob("*")))
    assert all(character.isprintable() for character in text.replace("\n", ""))
    lines = text.replace(f"{tmp_path}/", "").splitlines()
    (among_others,) = [line for line in lines if "runs/good " in line]
    assert among_others.replace("lowest, baseline", "").split() == good.split()
    names = {escape_controls(name): says for name, (_, says) in DAMAGES.items()}
    for name, says in (names | {"loop": "no such folder"}).items():
        (line,) = [line for line in lines if re.search(rf"runs/{re.escape(name)}[:/ ]", line)]
        assert says in line
    assert len(lines) == 2 + 1 + len(names) + 1  # head and rule, good, the damaged ones, loop


def test_the_page_shows_damaged_folders_and_the_others(damaged_runs, tmp_path, monkeypatch):
    page = html.unescape(read_page(read_runs([Path("runs")])))
    for name, (_, says) in DAMAGES.items():
        assert escape_controls(name) in page and says in page
    assert "<td>runs/good</td>" in page and "<img" in page


def test_a_folder_that_is_damaged_while_the_page_is_open(make_run, tmp_path):
    """A new folder's fault is on the next page, although no row of the table changed."""
    make_run("a", END)
    with serve(lambda: read_runs([tmp_path / "runs"])) as (get, _):
        assert "left out" not in get()
        broken = tmp_path / "runs/b"
        broken.mkdir()
        (broken / "config.toml").write_text("[model")
        assert f"{broken}: " in html.unescape(get())
        shutil.rmtree(broken)
        assert str(broken) not in get()


def test_a_run_that_breaks_the_report_leaves_the_table(make_run, monkeypatch):
    folder = make_run("a", END)

    def fail(*_, **__):
        raise KeyError("odd")

    monkeypatch.setattr("report.groups.group_runs", fail)
    page = read_page(read_runs([folder]))
    assert f"<td>{folder}</td><td>finished</td>" in page and "no report: " in page


def test_runs_that_cannot_be_compared_are_in_the_page(tmp_path, make_run):
    page = read_page(Reading([], []))
    assert "No runs yet" in page and "live.js" in page
    folders = [
        make_run("a", [(10, {"val/loss": 2.0})]),
        make_run("b", [(20, {"val/loss": 2.0})], None, "tanh"),
    ]
    page = read_page(read_runs(folders))
    assert "evaluated at no common step" in page and all(str(folder) in page for folder in folders)
