"""The page, the pictures and the command of scripts.report, by what they contain."""

import html
import io
import re
import sys

import numpy as np
import pandas as pd
import pytest
from fake_runs import change_lines, load_groups, loss_of, make_curves, make_run, make_seeds
from matplotlib.figure import Figure

import report.__main__ as report
from report import plots
from report.blocks import Table
from report.compare import Difference, paired
from report.page import Report, Section, format_page
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
    """Mean and range of losses, and the difference with its interval; whole after the start.
    Half a minute a step, but for the first, makes the step times a half of the place in time.
    """
    runs = make_seeds(tmp_path, {"kern": 2, "tanh": 2.01}, 3, noise=0.003, points=40)
    for run in runs[3:]:
        change_lines(
            run, lambda line: line.update({"perf/step_ms": 9e9 if line["step"] < 99 else 3e4})
        )
    (group,) = load_groups(*runs)
    figure = draw_losses(group)
    losses, minus, by_time = figure.axes
    in_time = read_curve(losses, "tanh") * [0.5, 1, 1, 1]
    assert read_curve(by_time, "tanh") == pytest.approx(in_time)
    assert losses.get_title("left") == "validation loss, nats per byte; range of seeds"
    assert minus.get_title("left") == "minus kern's, 95% over seeds"
    of_losses, of_minus = [], []
    for step in range(0, 1001, 25):
        kern, tanh = np.array([loss_of(run, step) for run in runs]).reshape(2, 3)
        of_losses.append((step, kern.mean(), kern.min(), kern.max()))
        of_minus.append((step, *paired(tanh, kern)[:3]))
    of_losses = np.array(of_losses)
    assert read_curve(losses, "kern") == pytest.approx(of_losses)
    assert read_curve(minus, "tanh") == pytest.approx(np.array(of_minus[1:]))
    low, high = losses.get_ylim()
    assert low < of_losses[10:, 2].min() and of_losses[10:, 3].max() < high < of_losses[8, 3]
    (legend,) = figure.legends  # one, of both panels
    assert [text.get_text() for text in legend.get_texts()] == ["tanh", "kern"]


def test_curves_of_what_seeds_measured_apart(tmp_path):
    """A mean ends where a seed has no value, or it would jump there. A seed that never measured,
    as with another eval.tasks, counts not at all; those at other steps each are no curve.
    """
    runs = make_seeds(tmp_path, {"kern": 2}, 2)

    def change_first(line):
        if 300 <= line["step"] <= 500:
            line |= {"tasks/alone/acc": line["step"] / 1000, "tasks/apart/acc": 0.5}

    def change_second(line):
        if line["step"] < 300:
            line["tasks/apart/acc"] = 0.5
        elif line["step"] > 500:
            line.pop("train/loss", None)

    change_lines(runs[0], change_first)
    change_lines(runs[1], change_second)
    (group,) = load_groups(*runs)
    _, measures, *_ = plots.draw_group(group, "kern")
    curves = {}
    for axes in measures.figure.axes:
        curves[axes.get_title("left")] = axes.get_lines()[0].get_xydata().tolist()
    assert [x for x, _ in curves["training loss"]] == [100, 200, 300, 400, 500]
    assert curves["tasks/alone/acc"] == [[300, 0.3], [400, 0.4], [500, 0.5]]
    assert curves["tasks/apart/acc"] == []


def test_curves_over_a_key_show_all_points(tmp_path):
    (group,) = load_groups(*make_curves(tmp_path), key="model.gate_norm")
    losses, minus = draw_losses(group).axes
    assert [tick.get_text() for tick in losses.get_xticklabels()] == ["1", "2", "8"]
    first, second, third = losses.transData.transform([(x, 2.0) for x in (1, 2, 8)])[:, 0]
    assert third - second == pytest.approx(2 * (second - first))  # a factor of 4, and of 2
    for axes in (losses, minus):
        low, high = axes.get_ylim()
        curve = read_curve(axes, "tanh")
        assert low < curve[:, 2].min() and curve[:, 3].max() < high
    assert low < 0  # of the differences


def test_of_many_routers_the_baseline_and_the_best_have_colours(tmp_path):
    """Here the baseline is the worst; the others are grey. A run that fails changes no colour."""
    ends = {"kern": 2.9, "tanh": 2.1, "sigmoid": 2.2, "softmax": 2.3, "dense": 2.4}
    ends |= {"softmax-renorm": 2.5, "sqrtsoftplus": 2.6, "kern-after": 2.7}
    runs = make_seeds(tmp_path, ends, 1)
    (group,) = load_groups(*runs)
    styles = plots.choose_styles(group, "kern")
    others = {label for label, style in styles.items() if style["label"] == "others"}
    assert others == {"sqrtsoftplus", "kern-after"}
    for part in ("color", "marker"):
        assert len({style.get(part) for style in styles.values()}) == 7
    (runs[3] / FAILURE_FILE).write_text("out of memory")  # softmax, before its first evaluation
    (runs[3] / "metrics.jsonl").write_text("")
    after = plots.choose_styles(load_groups(*runs)[0], "kern")
    assert {label for label in after if after[label] != styles[label]} <= others
    assert len(draw_losses(group).legends[0].get_texts()) == 7
    many = pd.DataFrame({0: np.arange(100.0), 1: np.arange(100.0) + 2}, index=range(1, 101))
    points = plots.summarize_range(many)  # neighbours are averaged
    assert len(points) == 50 and tuple(points.loc[99.5]) == pytest.approx((99.5, 98.5, 100.5))


def test_loads_are_those_of_the_runs(tmp_path):
    """A row for each layer; × marks experts without a token."""
    runs = make_seeds(tmp_path, {"softmax": 2, "kern": 2}, 1)
    (group,) = load_groups(*runs)
    axes = plots.draw_loads(group).axes[0]
    loads = []
    for run in runs:
        loads += [*np.load(run / "arrays/val_00001000.npz")["val/loads"][0]]
    shares = [np.sort(layer)[::-1] / np.mean(layer) for layer in loads]
    assert np.asarray(axes.images[0].get_array()) == pytest.approx(np.array(shares))
    marks = axes.get_lines()[0].get_xydata()
    assert marks.tolist() == np.argwhere(np.equal(shares, 0))[:, ::-1].tolist()
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["softmax, layer 1", "softmax, layer 2", "kern, layer 1", "kern, layer 2"]


def test_differences_are_sorted_with_whole_intervals():
    differences = {"b": Difference(0.02, 0.01, 0.03), "a": Difference(-0.01, -0.04, 0.02)}
    lines = {"dense": 0.05, "counting": 0.054}
    figure = plots.draw_differences("minus x", differences, lines)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a -0.0100", "b +0.0200"]
    points = [line.get_xydata().tolist() for line in axes.get_lines()]
    verticals = [[[x, 0], [x, 1]] for x in (0, *lines.values())]
    assert points == [[[-0.01, 0], [0.02, 1]], *verticals]
    bars = np.array(axes.collections[0].get_segments()).reshape(2, 4).tolist()
    assert bars == [[-0.04, 0, 0.02, 0], [0.01, 1, 0.03, 1]]
    low, high = axes.get_xlim()
    assert low < -0.042 and high > 0.056 and axes.yaxis_inverted()  # not at the frame
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lines)


# ---- the page
def read_page(out):
    """The page in a folder without tags, and its images."""
    page = (out / "report.html").read_text()
    text = html.unescape(re.sub("<[^>]*>", " ", page))
    return re.sub(r"\s+", " ", text), re.findall(r'<img alt="([^"]*)" src="data:image/svg', page)


def test_the_page_and_the_terminal_have_what_the_files_have(tmp_path, call):
    """The verdict and its picture first, the runs last; every number in both."""
    ends = {"kern": 1.5, "tanh": 2.0, "softmax": 1.5}
    runs = make_seeds(tmp_path / "runs", ends, 3, noise=0.01)
    young = make_run(tmp_path / "runs/young", "run.seed=9", until=0.3)
    out = tmp_path / "out"
    printed = call(report.main, tmp_path / "runs", "--out", out, "--margin", 0.001)
    page, images = read_page(out)
    losses = [loss_of(run) for run in runs]
    difference = str(paired(losses[3:6], losses[:3]))
    kern, tanh, _ = (f"{x.mean():.4f} ± {x.std(ddof=1):.4f}" for x in np.reshape(losses, (3, 3)))
    row = rf"tanh kern higher {re.escape(difference)} \S+ {tanh} 0, 1, 2 kern {kern}"
    for text in (page, re.sub(r"\s+", " ", printed)):
        assert re.search(row, text) and "± SD over seeds" in text
        assert f"{young} is not compared: stopped at step 300 of 1,000" in text
    assert re.search(rf"{runs[4]} tanh, seed 1 finished .*?{losses[4]:.4f}", page)
    assert "10 runs: 1 stopped, 9 finished (python -m scripts.watch shows each)" in printed
    shown = "Against kern: tanh higher; 1 undecided.", difference, "loss at step", str(runs[0])
    places = [page.index(text) for text in (*shown, "How to read")]
    assert places == sorted(places)
    assert len(images) == 3 and "tanh higher" in images[0]
    assert "within 0.001 nats" in page
    assert 'http-equiv="refresh"' not in (out / "report.html").read_text()
    assert [*out.iterdir()] == [out / "report.html"]


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
    for text in (page, printed):
        assert re.search(r"n_expert 32 tanh kern lower -0.1\S+ \[.*?\] \S+ higher \+", text)
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
    assert "softmax kern undecided (1 seed) +0.5000 - " in page
    assert images[0] == "Loss: Against kern: 1 undecided."
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
def test_bad_input(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for name in ("kern", "nan", "empty", "cut"):
        make_run(tmp_path / name, until=name in ("kern", "cut"))
    make_run(tmp_path / "other", "model.gate_norm=2")
    (tmp_path / "nan/metrics.jsonl").write_text('{"step": 0, "tokens": 1, "val/loss": NaN}\n')
    (tmp_path / "empty/metrics.jsonl").write_text("")
    (tmp_path / "cut/arrays/val_00001000.npz").write_bytes(b"PK")
    names = "kern; kern, gate_norm 2; kern, gate_norm own"
    for arguments, said in [
        ("cut", "cut/arrays/val_00001000.npz is damaged"),
        ("kernel", "no such folder"),
        ("kern other --baseline softmx", f"--baseline 'softmx': the runs have {names}"),
        ("kern --out kern/config.toml", "a file, not a folder"),
        ("kern --out kern/config.toml/x", "a file is where a folder is needed"),
        ("nan", "failed at step 0 of 1,000: val/loss is nan; continue with train.py"),
        ("empty", "stopped at step 0 of 1,000; continue with train.py"),
        ("kern --experiment small", "--experiment small: not a file in config/paper; "),
        ("kern other --over model.router", "--over model.router: expected a key that is a"),
        ("kern other --over model.gate_nrm", "--over model.gate_nrm: expected a key"),
        ("kern other --over run.seed", "--over run.seed: expected a key that is a number,"),
        ("kern other --over optim.lr", "--over optim.lr: the runs that ended have 1 value"),
    ]:
        error = call(report.main, *arguments.split(), code=2)
        assert said in error and len(error.splitlines()) == 1 and error.startswith("error: ")
    for margin in ("-1", "inf"):
        with pytest.raises(SystemExit, match="2"):
            report.main(["kern", "--margin", margin])


def test_follow_writes_the_page_again(tmp_path, monkeypatch):
    """From before the first run on; what is wrong is said once, and at once in a pipe."""
    out = tmp_path / "out"
    page = out / "report.html"
    pipe = io.BytesIO()
    remedy = "give a run's folder, such as runs/quickstart-kern"
    lines = [f"warning: {tmp_path}/runs: no such folder; {remedy}"]

    def train():
        yield "no run yet"
        yield "still none"
        run = make_run(tmp_path / "runs/kern", until=0.5)
        lines.append(f"report: {page}")
        yield "half of it"
        assert 'http-equiv="refresh" content="0.1"' in page.read_text()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1000, "tokens": 1, "val/loss": 1.2345}\n')
        yield "its end"
        assert "1.2345" in page.read_text()

    def sleep(seconds):
        assert seconds == 0.1 and pipe.getvalue().decode().splitlines() == lines
        next(training)

    training = train()
    next(training)
    monkeypatch.setattr(report.time, "sleep", sleep)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    arguments = [tmp_path / "runs", "--follow", "--every=0.1", "--out", out]
    with pytest.raises(StopIteration):
        report.main([*map(str, arguments)])
