"""The page, the pictures and the command of scripts.report, by what they contain."""

import html
import json
import re
import resource
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from fake_runs import load_groups, loss_of, make_curves, make_run, make_seeds
from matplotlib.figure import Figure
from runs import REPO_ROOT
from scipy import stats

import report.__main__ as report
from report import plots
from report.blocks import Table
from report.compare import Difference
from report.frame import compare_group
from report.page import Report, Section, describe_verdicts, format_page
from report.tables import find_measures
from runtime import FAILURE_FILE


def draw_losses(group, baseline="kern"):
    figure = plots.draw_losses(group, baseline, plots.choose_styles(group, baseline))
    figure.draw_without_rendering()
    return figure


def read_curve(axes, label):
    """Rows of x, mean, low and high of a curve by its artists."""
    number = [line.get_label() for line in axes.get_lines()].index(label)
    points = axes.get_lines()[number].get_xydata()
    bars = np.array(axes.collections[number].get_segments())  # (points, 2 ends, x and y)
    assert (bars[:, :, 0] == points[:, :1]).all()
    return np.column_stack([points, bars[:, :, 1]])


# ---- pictures
def test_curves_over_steps_are_those_of_the_runs(tmp_path):
    """Mean and range of losses, and the difference with its interval; whole after the start."""
    runs = make_seeds(tmp_path, {"kern": 2, "tanh": 2.01}, 3, noise=0.003, points=40)
    (group,) = load_groups(*runs)
    figure = draw_losses(group)
    losses, minus = figure.axes
    assert losses.get_title("left") == "validation loss, nats per byte; range of seeds"
    assert minus.get_title("left") == "minus kern's, 95% over seeds"
    of_losses, of_minus = [], []
    for step in range(0, 1001, 25):
        kern, tanh = np.array([loss_of(run, step) for run in runs]).reshape(2, 3)
        of_losses.append((step, kern.mean(), kern.min(), kern.max()))
        interval = stats.ttest_rel(tanh, kern).confidence_interval()
        of_minus.append((step, (tanh - kern).mean(), *interval))
    assert read_curve(losses, "kern") == pytest.approx(np.array(of_losses))
    assert read_curve(minus, "tanh") == pytest.approx(np.array(of_minus[1:]))
    for axes, rows in ((losses, of_losses), (minus, [*of_minus[10:], [0] * 4])):
        low, high = axes.get_ylim()
        late = np.array(rows[10:])
        assert low < late[:, 2].min() and late[:, 3].max() < high < max(of_losses[8])
    (legend,) = figure.legends  # one, of both panels
    assert [text.get_text() for text in legend.get_texts()] == ["tanh", "kern"]


def test_curves_end_where_a_seed_has_no_value(tmp_path):
    """Else their mean would jump there."""
    runs = make_seeds(tmp_path, {"kern": 2}, 2)
    lines = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["step"] <= 500 or "train/loss" not in line]
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    curve = plots.collect_curves(load_groups(*runs)[0], "train/loss")["kern"]
    assert list(curve.index) == list(range(100, 501, 100))


@pytest.mark.parametrize("of_second", [[], [100, 200]])
def test_what_one_seed_measured_alone_or_at_other_steps_is_drawn(tmp_path, of_second):
    """The seeds of one router: the second has no score (its eval.tasks is empty), or others."""
    runs = make_seeds(tmp_path, {"kern": 2}, 2)
    for run, measured in zip(runs, ([300, 400, 500], of_second), strict=True):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["step"] in measured and "val/loss" in line:
                line["tasks/lambada/acc"] = line["step"] / 1000
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = load_groups(*runs)
    _, measures, *_ = plots.draw_group(group, "kern")
    titles = [axes.get_title("left") for axes in measures.figure.axes]
    axes = measures.figure.axes[titles.index("tasks/lambada/acc")]
    points = axes.get_lines()[0].get_xydata().tolist()
    assert points == ([] if of_second else [[300, 0.3], [400, 0.4], [500, 0.5]])


def test_curves_over_a_key_show_all_points(tmp_path):
    (group,) = load_groups(*make_curves(tmp_path), key="model.gate_norm")
    losses, minus = draw_losses(group).axes
    assert [tick.get_text() for tick in losses.get_xticklabels()] == ["1", "2", "8"]
    places = losses.transData.transform([(x, 2.0) for x in (1, 2, 8)])[:, 0]
    assert np.diff(places)[1] == pytest.approx(2 * np.diff(places)[0])  # a factor of 4, and of 2
    for axes in (losses, minus):
        low, high = axes.get_ylim()
        curve = read_curve(axes, "tanh")
        assert low < curve[:, 2].min() and curve[:, 3].max() < high
    assert minus.get_ylim()[0] < 0


def test_of_many_routers_the_baseline_and_the_best_have_colours(tmp_path):
    """Here the baseline is the worst; the others are grey. A run that fails changes no colour."""
    ends = {"kern": 2.9, "tanh": 2.1, "sigmoid": 2.2, "softmax": 2.3, "dense": 2.4}
    ends |= {"softmax-renorm": 2.5, "sqrtsoftplus": 2.6, "kern-after": 2.7}
    runs = make_seeds(tmp_path, ends, 1)
    (group,) = load_groups(*runs)
    styles = plots.choose_styles(group, "kern")
    others = {label for label, style in styles.items() if style["label"] == "others"}
    assert others == {"sqrtsoftplus", "kern-after"}
    coloured = {label: style for label, style in styles.items() if label not in others}
    for property_name in ("color", "marker"):
        assert len({style[property_name] for style in coloured.values()}) == 6
    (runs[3] / FAILURE_FILE).write_text("out of memory")  # softmax, before its first evaluation
    (runs[3] / "metrics.jsonl").write_text("")
    after = plots.choose_styles(load_groups(*runs)[0], "kern")
    assert all(after[label] == style for label, style in coloured.items() if label != "softmax")
    figure = draw_losses(group)
    lines = figure.axes[0].get_lines()
    finals = sorted(line.get_ydata()[-1] for line in lines if line.get_label() == "others")
    assert finals == pytest.approx([loss_of(runs[6]), loss_of(runs[7])])
    assert len(figure.legends[0].get_texts()) == 7
    many = pd.DataFrame({0: np.arange(100.0), 1: np.arange(100.0) + 2}, index=range(1, 101))
    points = plots.summarize_range(many)  # neighbours are averaged
    assert len(points) == 50 and tuple(points.loc[99.5]) == pytest.approx((99.5, 98.5, 100.5))


def test_loads_are_those_of_the_runs(tmp_path):
    """A row for each layer; × marks experts without a token."""
    runs = make_seeds(tmp_path, {"softmax": 2, "kern": 2}, 1)
    (group,) = load_groups(*runs)
    axes = plots.draw_loads(group).axes[0]
    files = [np.load(run / "arrays/val_00001000.npz") for run in runs]
    loads = np.concatenate([file["val/loads"][0] for file in files])
    shares = np.flip(np.sort(loads / loads.mean(axis=1, keepdims=True), axis=1), axis=1)
    assert np.asarray(axes.images[0].get_array()) == pytest.approx(shares)
    marks = axes.get_lines()[0].get_xydata()
    assert marks.tolist() == np.argwhere(shares == 0)[:, ::-1].tolist()
    labels = [f"{router}, layer {layer}" for router in ("softmax", "kern") for layer in (1, 2)]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == labels


def test_differences_are_sorted_with_whole_intervals():
    differences = {"b": Difference(0.02, 0.01, 0.03), "a": Difference(-0.01, -0.04, 0.02)}
    figure = plots.draw_differences("minus x", differences, {"dense": 0.05})
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a -0.0100", "b +0.0200"]
    points, zero, dense = axes.get_lines()
    assert points.get_xydata().tolist() == [[-0.01, 0], [0.02, 1]]
    bars = [bar.tolist() for bar in axes.collections[0].get_segments()]
    assert bars == [[[-0.04, 0], [0.02, 0]], [[0.01, 1], [0.03, 1]]]
    assert [zero.get_xdata()[0], dense.get_xdata()[0]] == [0, 0.05]
    assert axes.get_xlim()[0] < -0.04 and axes.get_xlim()[1] > 0.05 and axes.yaxis_inverted()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dense"]


# ---- the page
def read_page(out):
    """The page in a folder without tags, and its images."""
    page = (out / "report.html").read_text()
    text = html.unescape(re.sub("<[^>]*>", " ", page))
    return re.sub(r"\s+", " ", text), re.findall(r'<img alt="([^"]*)" src="data:image/svg', page)


def test_the_page_and_the_terminal_have_what_the_files_have(tmp_path, call):
    """The verdict and its picture first, the runs last; every number in both."""
    runs = make_seeds(tmp_path / "runs", {"kern": 1.5, "tanh": 2.0}, 3, noise=0.01)
    young = make_run(tmp_path / "runs/young", "run.seed=9", until=0.3)
    out = tmp_path / "out"
    printed = call(report.main, tmp_path / "runs", "--out", out, "--margin", 0.01)
    page, images = read_page(out)
    losses = [loss_of(run) for run in runs]
    apart = np.subtract(losses[3:], losses[:3])
    low, high = stats.ttest_1samp(apart, 0).confidence_interval()
    mean = f"{np.mean(losses[:3]):.4f} ± {np.std(losses[:3], ddof=1):.4f}"
    difference = f"{apart.mean():+.4f} [{low:+.4f}, {high:+.4f}]"
    ends = f"{np.mean(losses[3:]):.4f} ± {np.std(losses[3:], ddof=1):.4f} 0, 1, 2 kern {mean}"
    row = rf"tanh kern higher {re.escape(difference)} \S+ {re.escape(ends)}"
    for text in (page, re.sub(r"\s+", " ", printed)):
        assert re.search(row, text) and "± SD over seeds" in text
        assert f"{young} is not compared: stopped at step 300 of 1,000" in text
    for run, loss in zip(runs, losses, strict=True):
        assert re.search(rf"{run} \S+, seed \d finished .*?{loss:.4f}", page)
    assert "7 runs: 1 stopped, 6 finished (python -m scripts.watch shows each)" in printed
    shown = "Against kern: tanh higher; 0 undecided.", difference, "loss at step", str(runs[0])
    places = [page.index(text) for text in (*shown, "How to read")]
    assert places == sorted(places)
    assert len(images) == 3 and "tanh higher" in images[0]
    source = (out / "report.html").read_text()
    assert "within 0.01 nats" in page and 'http-equiv="refresh"' not in source
    assert [path.name for path in out.iterdir()] == ["report.html"]
    # runs that are not compared yet
    call(report.main, young, "--out", out)
    page, images = read_page(out)
    assert "These runs are not compared yet" not in page or len(images) == 1


def test_a_report_over_a_key_judges_the_best_and_the_mean(tmp_path, call):
    """tanh is lower at its best and higher by the mean; of two settings all verdicts come first."""
    for experts in (32, 64):
        for x, end in ((1, 1.9), (8, 3.0)):
            ends = {"kern": 2.0 + x / 100, "tanh": end}
            own = [f"model.n_expert={experts}", f"model.gate_norm={x}"]
            make_seeds(tmp_path / f"runs/{experts}-{x}", ends, 4, own, noise=0.003)
    arguments = [tmp_path / "runs", "--over", "model.gate_norm", "--out", tmp_path / "out"]
    printed = re.sub(r"\s+", " ", call(report.main, *arguments))
    page, images = read_page(tmp_path / "out")
    said = "Each at its best model.gate_norm against kern: tanh lower; 0 undecided. "
    said += "Mean over model.gate_norm against kern: tanh higher; 0 undecided."
    assert sum(said in image for image in images) == 2
    at_one = {}
    for router in ("tanh", "kern"):
        at_one[router] = [loss_of(tmp_path / f"runs/32-1/{router}{seed}") for seed in range(4)]
    difference = f"{np.mean(at_one['tanh']) - np.mean(at_one['kern']):+.4f}"
    for text in (page, printed):
        assert re.search(rf"n_expert 32 tanh kern lower {difference} \[.*?\] \S+ higher \+", text)
    source = (tmp_path / "out/report.html").read_text()
    assert source.index('<td class="">n_expert 64</td>') < source.index("<img")


def test_names_cannot_break_the_page():
    table = Table("Losses", [{"a|b": "<i>", "c": "1 ± 2", "empty": ""}])
    picture = plots.Picture(Figure(), "<u>")
    section = Section("<b> & co", "c <script>", [picture], [table], [{"<": "<script>"}])
    args = report.build_report_parser().parse_args(["runs", "--follow", "--every=7"])
    page = format_page(Report([], [], ["1 < 2"]), [section], args, ["report", "<script>"]).decode()
    assert "<script" not in page and "<u>" not in page and "<i>" not in page
    assert "c &lt;script&gt;" in page and "<li>1 &lt; 2.</li>" in page and "1 ± 2" in page
    assert "<th>a|b</th><th>c</th></tr>" in page
    assert '<meta http-equiv="refresh" content="7.0">' in page


def test_verdicts_in_words(tmp_path):
    """Of a router, or of a variant: with all others."""
    runs = []
    for norm, end in ((1, 2.0), (2, 2.5)):
        ends = {"kern": 2.0, "tanh": end}
        runs += make_seeds(tmp_path / str(norm), ends, 3, [f"model.gate_norm={norm}"])
    (group,) = load_groups(*runs)
    for baseline in ("kern", "kern, gate_norm 2", "tanh, gate_norm 1"):
        pairs = compare_group(group, baseline)
        said = describe_verdicts(pairs, group, "Against it")
        assert said == "Against it: tanh, gate_norm 2 higher; 2 undecided."


BARE = ["val/window", "val/load", "val/gate", "val/dead", "router/", "perf/"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [{"until": 0}, {"points": 1}, {"without": BARE}])
def test_runs_with_little_in_them(tmp_path, call, shape):
    """Evaluated before training alone, once, or without anything but losses."""
    runs = make_seeds(tmp_path, {"softmax": 2.5, "kern": 2}, 1, **shape)
    call(report.main, *runs, "--out", tmp_path / "out")
    page, images = read_page(tmp_path / "out")
    assert all(f"{loss_of(run):.4f}" in page for run in runs)
    if "until" in shape:
        assert len(images) == 1 and "These runs are not compared yet." in page
        return
    difference = loss_of(runs[0]) - loss_of(runs[1])
    assert re.search(rf"softmax kern undecided \(1 seed\) \{difference:+.4f} - ", page)
    (group,) = load_groups(*runs)
    assert list(find_measures(group))[:1] == ["train/loss"]
    assert len(images) == (2 if "without" in shape else 3)


# ---- the command
@pytest.mark.usefixtures("without_pictures")
def test_the_default_folder_and_the_papers_numbers(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for name in ("mine-kern", "mine-tanh"):
        make_run(tmp_path / f"runs/{name}", f"model.router={name[5:]}")
    call(report.main, "runs/mine-kern", tmp_path / "runs/mine-tanh")
    page, _ = read_page(tmp_path / "runs/report-mine")
    assert "python -m scripts.report runs/mine-kern" in page
    call(report.main, "runs", "--experiment", "books3_512")
    page, _ = read_page(tmp_path / "runs/report-mine")
    assert "dense 4.1460 3.4429?" in page and "those of books3_512" in page


@pytest.mark.usefixtures("without_pictures")
def test_bad_input(tmp_path, call):
    kern = make_run(tmp_path / "kern")
    other = make_run(tmp_path / "other", "model.gate_norm=2")
    names = "kern; kern, gate_norm 2; kern, gate_norm own"
    nan = make_run(tmp_path / "nan", until=0)
    (nan / "metrics.jsonl").write_text('{"step": 0, "tokens": 1, "val/loss": NaN}\n')
    empty = make_run(tmp_path / "empty", until=0)
    (empty / "metrics.jsonl").write_text("")
    cut = make_run(tmp_path / "cut")
    (cut / "arrays/val_00001000.npz").write_bytes(b"PK")
    for arguments, said in [
        ([cut], "cut/arrays/val_00001000.npz is damaged"),
        ([tmp_path / "kernel"], "no such folder"),
        ([kern, other, "--baseline", "softmx"], f"--baseline 'softmx': the runs have {names}"),
        ([kern, "--out", kern / "config.toml"], "a file, not a folder"),
        ([kern, "--out", kern / "config.toml/x"], "a file is where a folder is needed"),
        ([nan], "failed at step 0 of 1,000: val/loss is nan; continue with train.py"),
        ([empty], "stopped at step 0 of 1,000; continue with train.py"),
        ([kern, "--experiment", "small"], "--experiment small: not a file in config/paper; "),
    ]:
        error = call(report.main, *arguments, code=2)
        assert said in error and len(error.splitlines()) == 1 and error.startswith("error: ")
    for margin in ("-1", "nan", "x"):
        with pytest.raises(SystemExit, match="2"):
            report.main([str(kern), "--margin", margin])
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))  # as on a full disk
    try:
        error = call(report.main, kern, "--out", tmp_path / "out", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert f"{tmp_path}/out/report.html" in error and list((tmp_path / "out").iterdir()) == []


def test_follow_writes_the_page_again(tmp_path):
    """From before the first run on; what is wrong is said once."""
    command = [sys.executable, "-m", "scripts.report", tmp_path / "runs", "--follow", "--every=0.1"]
    command += ["--out", tmp_path / "out"]
    page = tmp_path / "out/report.html"
    with subprocess.Popen(command, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = [process.stdout.readline()]
            time.sleep(1)
            run = make_run(tmp_path / "runs/kern", until=0.5)
            while not said[-1].startswith("report: "):  # first of a run that is half written
                said.append(process.stdout.readline())
            assert 'http-equiv="refresh" content="0.1"' in page.read_text()
            line = {"step": 1000, "tokens": 1, "val/loss": 1.2345}
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            deadline = time.monotonic() + 60
            while "1.2345" not in page.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            process.terminate()
    assert said[0].startswith(f"warning: {tmp_path}/runs: no such folder")
    assert said[-1] == f"report: {page}\n" and len(said) == len(set(said))
