"""scripts.watch: what a run's files say of it, the table, the page in a browser."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from runs import REPO_ROOT, Forked

import train
from runtime.metrics import Metrics
from runtime.signals import Stop
from scripts.watch import __main__ as watch
from scripts.watch import server
from scripts.watch.runs import WatchedRun, find_runs, format_seconds, is_alive, thin

CONFIG = """\
[model]
router = "{router}"
block_size = 10
[train]
max_steps = 100
batch_size = 4
[log]
group = "{group}"
"""
TRAINING = {"train/loss": 2.5, "perf/tokens_per_sec": 80.0}
SKIPS = {"optim/skipped_steps": 2, "optim/loss_spikes": 0}


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run's folder with some lines of metrics; returns the folder."""

    def make(name="one", lines=(), owner=None, router="kern", group="all"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(CONFIG.format(router=router, group=group))
        append(folder, *lines)
        if owner:
            (folder / "lock").write_text(f"process {owner} on {platform.node()}\n")
        return folder

    return make


def append(folder, *lines):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "tokens": 40 * step, **values}) + "\n" for step, values in lines)


def status_of(folder):
    run = WatchedRun(folder)
    run.refresh()
    return run.status()


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


END = [(90, TRAINING), (100, TRAINING | {"val/loss": 2.0})]


@pytest.mark.parametrize(
    "lines, alive, state",
    [([], True, "running"), ([(10, TRAINING)], True, "running"), ([(10, TRAINING)], False, "stopped")]
    + [([], False, "waiting"), (END, False, "finished"), (END, True, "running")]  # it saves its last checkpoint
    + [([(100, TRAINING)], False, "stopped")],  # before its last evaluation
)
def test_state(make_run, lines, alive, state):
    assert status_of(make_run("a", lines, os.getpid() if alive else dead_process())).state == state


def test_a_status_has_the_newest_numbers_and_the_time_left(make_run):
    lines = [(10, {"val/loss": 3.0}), (20, TRAINING), (30, {"train/loss": 2.25, "perf/tokens_per_sec": 80.0})]
    status = status_of(make_run("a", lines, os.getpid()))
    assert (status.step, status.max_steps, status.loss, status.val_loss) == (30, 100, 2.25, 3.0)
    assert status.seconds_left == 70 * 40 / 80  # steps, tokens per step, tokens per second
    assert status_of(make_run("b", lines)).seconds_left is None


def test_a_run_that_writes_nothing_is_silent(make_run):
    folder = make_run("a", [(10, TRAINING)], os.getpid())
    long_ago = time.time() - 1000
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    assert status_of(folder).state == "running"  # its lock is fresh: it has just started
    started = os.stat(f"/proc/{os.getpid()}").st_ctime
    lock_time = max(long_ago, started)
    os.utime(folder / "lock", (lock_time, lock_time))
    if lock_time == long_ago:
        assert status_of(folder).state == "silent"


def test_a_number_given_to_a_younger_process_is_not_the_runs(make_run):
    folder = make_run("a", [(10, TRAINING)], os.getpid())
    assert is_alive(folder / "lock")
    os.utime(folder / "lock", (1e9, 1e9))  # written before this process began
    assert not is_alive(folder / "lock")


def test_a_process_elsewhere_lives_while_it_writes(make_run):
    folder = make_run("a", [(10, TRAINING)])
    (folder / "lock").write_text("process 1 on another-machine\n")
    assert is_alive(folder / "lock")
    for file in ("lock", "metrics.jsonl"):
        os.utime(folder / file, (1e9, 1e9))
    assert not is_alive(folder / "lock")


@pytest.mark.parametrize(
    "lines, files, state, trouble",
    [
        ([(10, {"val/loss": float("nan")})], {}, "failed", "val/loss is nan"),
        ([(10, TRAINING)], {"crash-step_00000009.json": "{}"}, "failed", "crash dump crash-step_00000009.json"),
        ([(10, TRAINING)], {"train.log": "x\nerror: one\nerror: disk full\nbye\n"}, "failed", "error: disk full"),
        ([(10, TRAINING)], {"train.log": "warning: slow\n"}, "stopped", "warning: slow"),
        ([(10, TRAINING | SKIPS)], {}, "stopped", "warning: 2 skipped steps"),
    ],
)
def test_trouble(make_run, lines, files, state, trouble):
    folder = make_run("a", lines)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert (status_of(folder).state, status_of(folder).trouble) == (state, trouble)


def test_refresh_reads_whole_lines_and_a_file_written_anew(make_run):
    folder = make_run("a", [(10, TRAINING)])
    run, file = WatchedRun(folder), folder / "metrics.jsonl"
    run.refresh()
    with file.open("a") as stream:
        stream.write('{"step": 20, "tokens": 800, "train')
    run.refresh()
    assert run.status().step == 10
    with file.open("a") as stream:
        stream.write('/loss": 2.0}\nnot a line\n[]\n')
    run.refresh()
    assert (run.status().step, run.series["train/loss"]) == (20, [(10, 2.5), (20, 2.0)])
    (folder / "new").write_text('{"step": 10, "tokens": 400, "train/loss": 9.0}\n' + 200 * " ")  # longer than before
    (folder / "new").rename(file)
    run.refresh()
    assert run.series["train/loss"] == [(10, 9.0)]
    file.unlink()
    run.refresh()
    assert run.status().step == 0


def test_curves_of_sets_means_and_tasks(make_run):
    values = {"val/loss": 2.0, "val_ema/loss": 1.5, "val/books/loss": 1.0, "tasks/sciq/acc": 0.5}
    more = {"val_ema/books/loss": 1.0, "tasks/sciq/acc_stderr": 0.1}
    run = WatchedRun(make_run("a", [(10, values | more)]))
    run.refresh()
    assert run.series == {name: [(10, value)] for name, value in values.items()}
    assert run.status().by_set == "books 1.0000"


def test_loads_are_those_of_the_newest_evaluation(make_run):
    """From the folder of arrays; older runs have them in their lines, as the runs of this file."""
    folder = make_run("a", [(10, {"val/loads": [[3, 1]]})])
    run, metrics = WatchedRun(folder), Metrics(folder, 10)
    run.refresh()
    assert run.as_json()["loads"] == [[1.5, 0.5]]
    for step, loads in ((20, [[1, 3]]), (30, [[2, 0]])):
        metrics.log(step, 0, **{"val/loss": 2.0, "val/loads": np.array(loads)})
        assert run.read_loads() == loads
    (folder / "arrays/val_00000040.npz").write_bytes(b"damaged")
    assert run.read_loads() == [[2, 0]]
    metrics.log(50, 0, **{"val/loss": 2.0, "val/window_losses": np.ones(2)})
    assert run.read_loads() == []  # a dense model


def test_thin_keeps_means_and_the_last_step():
    series = [(step, float(step)) for step in range(1, 11)]
    assert thin(series, 20) == series
    assert thin(series, 4) == [(3, 2.0), (6, 5.0), (9, 8.0), (10, 10.0)]
    assert thin([(1, 1.0), (2, float("nan"))], 9) == [(1, 1.0), (2, None)]
    assert thin([], 4) == []


@pytest.mark.parametrize(
    "seconds, text", [(9, "9 s"), (61, "1 min"), (7500, "2 h 05 min"), (190_000, "2 d 4 h"), (59.9, "60 s")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_runs_are_found_below_folders(make_run, tmp_path):
    make_run("b")
    make_run("sweep/a")
    (tmp_path / "runs/empty").mkdir()
    assert [str(run.relative_to(tmp_path / "runs")) for run in find_runs([tmp_path / "runs"])] == ["b", "sweep/a"]
    assert find_runs([tmp_path / "runs/b", tmp_path / "runs"])[0].name == "b"  # once each


def test_the_table(make_run, tmp_path, capsys):
    make_run("a", END)
    make_run("b", [(10, TRAINING)], os.getpid())
    assert watch.main([str(tmp_path / "runs")]) == 0  # stdout is no terminal: once
    head, _, a, b = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "val", "loss", "tokens/s", "left"]  # no MFU, no trouble
    assert a.split()[1:] == ["finished", "100", "of", "100", "100%", "2.5000", "2.0000", "80"]
    assert b.split()[1:] == ["running", "10", "of", "100", "10%", "2.5000", "80", "45", "s"]


def test_no_runs_yet_and_wrong_places(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert watch.main([]) == 0 and "no runs in runs yet" in capsys.readouterr().out  # nor such a folder
    assert watch.main([str(tmp_path)]) == 0
    assert f"no runs in {tmp_path} yet" in capsys.readouterr().out
    assert watch.main([str(tmp_path / "typo")]) == 2
    assert "typo: no such folder" in capsys.readouterr().err


def test_watching_imports_no_torch():
    words = "import sys, scripts.watch.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], cwd=REPO_ROOT, timeout=300).returncode == 0


def test_a_broken_config_hides_only_its_run(make_run, tmp_path, capsys):
    make_run("a", END)
    (make_run("b") / "config.toml").write_text("[model\n")
    (make_run("c") / "config.toml").write_text("")
    assert watch.main([str(tmp_path / "runs"), "--once"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@contextmanager
def serving(*places):
    found = server.make_server(0, watch.Watcher(places).as_json)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        found.shutdown()
        found.server_close()
        thread.join()


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
        return reply.headers, reply.read().decode()


def test_the_server_answers_this_machine_alone(make_run, tmp_path, capsys):
    make_run("a", [(10, TRAINING | {"val/loss": float("inf"), "val/loads": [[1, 3], [0, 0]]})])
    with serving(tmp_path / "runs") as url:
        headers, page = fetch(url)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing from outside
        (run,) = json.loads(fetch(f"{url}/runs")[1], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert run["router"] == "kern" and run["group"].endswith("runs/all") and run["color"].startswith("#")
        assert run["val_loss"] is None and run["series"]["val/loss"] == [[10, None]]
        assert run["loads"] == [[0.5, 1.5], [0, 0]]
        for path, headers, code in (("/etc/passwd", {}, 404), ("/runs", {"Host": "evil.example:80"}, 403)):
            with pytest.raises(urllib.error.HTTPError) as error:
                fetch(url + path, **headers)
            assert error.value.code == code
        port = url.rsplit(":", 1)[1]
        assert watch.main([str(tmp_path), "--serve", port]) == 2  # taken
        assert watch.main([str(tmp_path), "--serve", "99999"]) == 2
        assert watch.main([str(tmp_path), "--every", "-1"]) == 2
        taken, too_high, negative = capsys.readouterr().err.splitlines()
    assert taken == f"error: port {port}: Address already in use; name another: --serve 6061"
    assert too_high == "error: port 99999: expected 1 to 65535; name another: --serve 6061"
    assert negative == "error: --every -1: expected a number of seconds above 0"


# ---- the page in a browser

browser = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


def show_page(url):
    """The page as it is after some seconds in a browser: what it says, and its charts by title."""
    budget = ["--virtual-time-budget=4000", "--dump-dom", url]
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *budget]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    charts = dict(re.findall(r'aria-label="(.*?)">(.*?)</section>', dom, re.S))
    return dom.partition("<main")[0], charts, dom.partition("<main")[2]


@pytest.mark.integration
@browser
def test_the_page_in_a_browser(make_run, tmp_path):
    folder = make_run("a<b>x</b>", [(step, TRAINING | {"val/loss": 2.0}) for step in (10, 20)])
    make_run("soft", [(10, TRAINING | {"val/loads": [[1, 2]]})], os.getpid(), router="softmax")
    with serving(tmp_path / "runs") as url:
        table, charts, rest = show_page(url)
        assert "2 found, 1 running" in table and "20 of 100" in table and "a&lt;b&gt;x&lt;" in table
        assert "MFU" not in table and "trouble" not in table  # columns without a value
        assert charts.keys() == {"Loss", "Speed"} and rest.count("<canvas") == 1
        append(folder, (30, TRAINING))
        assert "30 of 100" in show_page(url)[0]


@pytest.mark.integration
@browser
def test_the_page_refreshes_by_itself(make_run, monkeypatch):
    folder, steps, read = make_run("a"), iter(range(10, 100)), watch.Watcher.as_json

    def read_more(watcher):
        append(folder, (next(steps), TRAINING))
        return read(watcher)

    monkeypatch.setattr(watch.Watcher, "as_json", read_more)
    with serving(folder) as url:
        assert re.search(r">1[1-9] of 100<", show_page(url)[0])


@pytest.mark.integration
@browser
def test_hovering_and_hiding(make_run, tmp_path, monkeypatch):
    """A script in the page stands for the hand: the values at a step, and curves without the runs of a sweep."""
    curve = [(step, {"val/loss": 3 - step / 100}) for step in range(0, 101, 10)]
    for group, names in {"one": ("a", "b"), "two": ("c",)}.items():
        for name in names:
            make_run(name, curve, group=group)
    hand = """setTimeout(() => {
      const svg = document.querySelector("main svg"), box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2}));
      document.title = document.querySelector(".tip").textContent;
      document.querySelector("tr.group input").click();
    }, 2000);</script>"""
    page = tmp_path / "page.html"
    page.write_text(server.PAGE.read_text().replace("</script>", hand))
    with serving(tmp_path / "runs") as url:
        assert show_page(url)[1]["Loss"].count("<path") == 3
        assert len(set(re.findall(r'stroke-dasharray="(.*?)"', show_page(url)[0]))) == 3  # of one router, so one colour
        monkeypatch.setattr(server, "PAGE", page)
        table, charts, _ = show_page(url)
    assert re.search(r"<title>step 46a val 2.5b val 2.5c val 2.5</title>", table)
    assert charts["Loss"].count("<path") == 1


def train_point(file, name, *words):
    train.main([file, f"--run.name={name}", "--log.group=sweep", "--eval.interval=10", *words], Stop().listen())


@pytest.mark.integration
@browser
def test_the_page_of_a_run_that_trains(tiny_file, tmp_path):
    assert Forked(train_point, str(tiny_file), "dense", "--model.router=dense").wait(300)[0] == 0
    process = Forked(train_point, str(tiny_file), "long", "--train.max_steps=100000")
    watched, ends = tmp_path / "runs/long", time.monotonic() + 300

    def wait_for_step(step):
        while not (watched / "config.toml").exists() or status_of(watched).step < step:
            assert process.process.is_alive() and time.monotonic() < ends, process.wait(0)
            time.sleep(0.05)

    with serving(tmp_path / "runs") as url:
        steps = [0]
        for _ in range(2):
            wait_for_step(steps[-1] + 20)
            table, charts, rest = show_page(url)
            steps.append(int(re.search(r">([\d,]+) of 100,000<", table)[1].replace(",", "")))
            assert "2 found, 1 running" in table and "4 of 4" in table and table.count('class="group"') == 1
            assert {title: body.count("<path") for title, body in charts.items()} == {
                "Loss": 4, "Gate norm": 1, "Gate sum": 1, "Load imbalance": 1, "Speed": 2,
            }  # fmt: skip
            assert rest.count("<canvas") == 1 and "long: busiest" in rest
        assert steps[0] < steps[1] < steps[2]
        os.kill(process.process.pid, signal.SIGTERM)
        assert process.wait(300)[0] == 0
        assert "2 found, 0 running" in (table := show_page(url)[0]) and ">stopped<" in table
