"""The pages, pictures and terminal output of scripts.report, and its command."""

import json
import re
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from fake_runs import load_groups, loss_of, make_run, make_seeds
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from runs import REPO_ROOT
from scipy import stats

import report.__main__ as report
from report import pictures
from report.blocks import Picture, Table
from report.comparisons import compare_group
from report.page import Report, Section, draw_pictures, format_page
from report.style import DISTINCT, STYLES, choose_styles
from report.tables import name_measure
from router import ROUTERS
from runtime.runs import Run


def lines_of(axes):
    """{label: (x, y)} of the lines of a panel that are in its legend."""
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def draw_losses(group):
    return pictures.draw_figure(pictures.list_loss_panels(group, "kern"), columns=2).axes


# ---- pictures
def test_losses_over_steps(tmp_path):
    """Mean and range over seeds."""
    runs = make_seeds(
        tmp_path, {"kern": 2, "tanh": 2}, overrides=["model.vocab_size=50257"], noise=0.003
    )
    (group,) = load_groups(*runs)
    validation, minus = draw_losses(group)
    assert validation.get_title("left") == "validation loss, nats per token"
    assert minus.get_title("left") == "minus kern's, 95% over seeds"
    losses = [Run(run).evaluations[1000]["val/loss"] for run in runs[:3]]
    xs, ys = lines_of(validation)["kern"]
    assert xs == list(range(0, 1001, 100)) and ys[-1] == pytest.approx(np.mean(losses))
    kern = validation.collections[list(lines_of(validation)).index("kern")]
    ends = [y for x, y in kern.get_paths()[0].vertices if x == 1000]
    assert (min(ends), max(ends)) == pytest.approx((min(losses), max(losses)))
    middle = np.array([Run(run).evaluations[500]["val/loss"] for run in runs])
    kern, tanh = middle[:3], middle[3:]
    (label, (xs, ys)), *others = lines_of(minus).items()
    assert (label, others, xs) == ("tanh", [], list(range(100, 1001, 100)))
    assert ys[4] == pytest.approx((tanh - kern).mean())
    interval = stats.ttest_rel(tanh, kern).confidence_interval()
    (bar,) = (
        path.vertices[:, 1]
        for path in minus.collections[0].get_paths()
        if path.vertices[0, 0] == 500
    )
    assert (min(bar), max(bar)) == pytest.approx((interval.low, interval.high))


def test_a_constant_difference_is_shown_from_its_start(tmp_path):
    (group,) = load_groups(*make_seeds(tmp_path, {"kern": 2, "tanh": 2.05}, noise=0.0))
    minus = draw_losses(group)[1]
    assert minus.get_xlim()[0] < 100
    assert 3 <= sum(0 <= tick <= 1000 for tick in minus.get_xticks()) <= 5  # labels have room
    panel = pictures.list_loss_panels(group, "kern")[0]
    losses = [loss_of(run.path) for run in group.runs]
    kern, tanh = np.mean(losses[3:]), np.mean(losses[:3])
    said = f"At step 1,000: kern {kern:.4g} is lowest, tanh {tanh:.4g} highest."
    assert panel.sentence == said
    files = [draw_pictures([panel], label)[0].file for label in ("3 layers", "4 layers")]
    assert files[0] != files[1]  # a live page has those of all groups
    for routers, more in ({"kern": 2}, ""), ({"kern": 2, "tanh": 2}, " for all"):
        (group,) = load_groups(*make_seeds(tmp_path / f"equal{more}", routers, 1))
        (panel, *_) = pictures.list_loss_panels(group, "kern")
        loss = loss_of(group.runs[0].path)
        assert panel.sentence == f"At step 1,000: {loss:.4g}{more}."
    assert list_notes(minus) == "minus kern's, 95% over seeds"


def test_losses_over_a_key(tmp_path):
    """The loss of each choice of options, and beside it the difference from the baseline at equal
    options, without the baseline's.
    """
    runs = []
    for x, norm in product((0, 0.002), (0, 2)):
        given = [f"optim.weight_decay={x}", f"model.gate_norm={norm}"]
        runs += make_seeds(
            tmp_path / f"{x}-{norm}", {"kern": 2, "tanh": 2 + 100 * x * norm}, overrides=given
        )
    (group,) = load_groups(*runs, key="optim.weight_decay")
    losses, minus = draw_losses(group)
    tanh = ["tanh, gate_norm own", "tanh, gate_norm 2"]
    assert list(lines_of(losses)) == [*tanh, "kern, gate_norm own", "kern, gate_norm 2"]
    assert list(lines_of(minus)) == tanh
    # of a router: tanh's at equal options, and kern's with the other option; of a variant: all
    for baseline in ("kern", "kern, gate_norm 2", "tanh, gate_norm own"):
        comparisons = compare_group(group, baseline)
        sentence = pictures.list_loss_panels(group, baseline, comparisons)[1].sentence
        assert sentence == "Decided: tanh, gate_norm 2 higher. Undecided: 2."
    figure = losses.get_figure(root=True)
    assert figure.get_figheight() * 72 == pytest.approx(225 + 4 * 14)  # as high as the highest
    for axes in (losses, minus):  # such long names are below the panel
        (legend,) = axes.figure.legends
        assert [text.get_text() for text in legend.get_texts()] == list(lines_of(axes))
    assert lines_of(minus)[tanh[1]] == ([0, 0.002], pytest.approx([0, 0.4]))


@pytest.mark.parametrize("values", [(0, 2, 4, 16), (0, 1, 100), (1, 2, 3), (0, 0.1234567)])
def test_values_of_a_key_are_at_their_places(tmp_path, values):
    """In order and apart, each with its tick: a factor of 2 is as long as the way from 0 to the
    smallest value.
    """
    runs = [make_run(tmp_path / str(x), f"model.gate_norm={x}") for x in values]
    (group,) = load_groups(*runs, key="model.gate_norm")
    axes = draw_losses(group)[0]
    line, ring = axes.get_lines()  # of the only variant, and its best value
    assert ring.get_fillstyle() == "none"
    assert tuple(line.get_xdata()) == tuple(axes.get_xticks()) == values
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [
        str(x) if x else "own" for x in values
    ]
    places = axes.transData.transform([(x, 2.0) for x in values])[:, 0]
    smallest = min(x for x in values if x)
    unit = np.subtract(*axes.transData.transform([(2 * smallest, 2.0), (smallest, 2.0)])[:, 0])
    wanted = [1 + np.log2(x / smallest) if x else 0 for x in values]
    assert (places - places[0]) / unit == pytest.approx(np.subtract(wanted, wanted[0]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value, text", [(0, "own"), (2, "2")])
def test_a_group_with_one_value_of_the_key(tmp_path, value, text):
    """Beside one with two: a point near the middle of its axis."""
    runs = []
    for layers, x in ((2, value), (3, 0), (3, 1)):
        own = [f"model.gate_norm={x}", f"model.n_layer={layers}", "model.router=kern"]
        runs.append(make_run(tmp_path / f"{layers}-{x}", *own))
    runs.append(make_run(tmp_path / "4", "model.gate_norm=1", "model.n_layer=3", "run.seed=1"))
    runs.append(make_run(tmp_path / "5", f"model.gate_norm={value}", "model.n_embd=64"))
    groups = load_groups(*runs, key="model.gate_norm")
    group = next(group for group in groups if group.xs == [value])
    axes = draw_losses(group)[0]
    assert list(axes.get_xticks()) == [value]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [text]
    line = axes.get_lines()[0]
    place = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata()))
    assert 0.3 < place[0, 0] < 0.7


def list_texts(figure):
    """The texts that a figure draws: ticks out of sight are not among them."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn = axis._update_ticks()
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                hidden |= {tick.label1, tick.label2} if tick not in drawn else {tick.label2}
    texts = [text for text in figure.findobj(Text) if text not in hidden]
    return [text for text in texts if text.get_visible() and text.get_text()]


@pytest.mark.parametrize("shape", ["many", "few", "over", "options"])
def test_pictures_can_be_read(tmp_path, shape):
    """By what is drawn: all in the frame, text of 11 pixels on a phone, no label on another."""
    routers = dict.fromkeys(list(ROUTERS) if shape == "many" else ["kern", "tanh"], 2.2)
    values = ["0"] if shape == "many" else ["0.25", "0.5", "1", "2", "3", "9", "10", "16"]
    group_key = "model.gate_norm" if shape == "over" else None
    if shape in ("few", "options"):
        values = ["1", "2"] if shape == "options" else ["0"]
    # few have bars, not bands; over a key only the last counts
    points = {"few": 6, "over": 1}.get(shape, 20)
    runs = []
    for x in values:
        runs += make_seeds(
            tmp_path / x, routers, 2, [f"model.gate_norm={x}"], noise=0.03, points=points
        )
    (group,) = load_groups(*runs, key=group_key)
    panels = pictures.list_loss_panels(group, "kern", compare_group(group))
    panels += pictures.list_measure_panels(group, "kern")
    for panel in panels:
        assert panel.sentence
        figure = pictures.draw_figure([panel])
        figure.draw_without_rendering()
        check_texts(figure)
        check_frame(panel, figure.axes[0])


def check_texts(figure):
    """Texts have 11 pixels on a phone, are in the picture and not on each other."""
    phone = 328 / (figure.get_figwidth() * 72)
    boxes = []
    for text in list_texts(figure):
        assert text.get_fontsize() * phone >= 11
        box = Text.get_window_extent(text, figure._get_renderer())  # an annotation's without link
        assert figure.bbox.padded(1).containsx(box.x0), text.get_text()
        assert figure.bbox.padded(1).containsx(box.x1), text.get_text()
        assert figure.bbox.padded(1).containsy(box.y0), text.get_text()
        assert figure.bbox.padded(1).containsy(box.y1), text.get_text()
        boxes.append(box.padded(-1))
    for box, other in combinations(boxes, 2):
        overlap = Bbox.intersection(box, other)
        assert overlap is None or min(overlap.size) <= 0


def check_frame(panel, axes):
    """Zero and whole intervals are in the frame; what is not is before an arrow."""
    low, high = axes.get_ylim()
    if panel.title.startswith("minus"):
        assert low < 0 < high
    if "load of each" in panel.title:
        return
    for line in axes.get_lines():
        points = drop_off_axis(axes, line.get_xydata())
        if len(points) > 2:  # not the line at 0, nor a ring
            pixels = line.get_transform().transform(points)[:, 0]
            assert axes.bbox.x0 - 1 <= pixels.min() and pixels.max() <= axes.bbox.x1 + 1
            assert np.ptp(pixels) > axes.bbox.width / 2  # no frame of empty space
        check_clipped(points, low, high, list_notes(axes))
    for collection in axes.collections:
        for path in collection.get_paths():
            check_clipped(drop_off_axis(axes, path.vertices), low, high, list_notes(axes))


def drop_off_axis(axes, points):
    """Points without step 0 where steps are logarithmic."""
    return points[points[:, 0] > 0] if axes.get_xscale() == "log" else points


def check_clipped(points, low, high, notes):
    """Points beyond the frame are of the first quarter, and a note has an arrow to their side."""
    for x, y in points:
        assert low <= y <= high or x < 250
        assert y <= high or "↑ up to" in notes
        assert y >= low or "↓ down to" in notes


def list_notes(axes):
    """What a panel says of what is not in its frame."""
    return axes.get_title("left")


def read_html(out):
    """The page in a folder, and its tables as lines of cells between bars."""
    html = (out / "report.html").read_text()
    lines = []
    for row in re.findall(r"<tr>.*?</tr>", html):
        cells = re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)
        lines.append(f"| {' | '.join(cells)} |".replace("\u00a0", " "))
    return html, "\n".join(lines)


def test_a_loss_that_explodes_is_clipped_with_an_arrow(tmp_path):
    runs = make_seeds(tmp_path, {"kern": 2, "tanh": 2}, 1, points=20, without=BARE)
    file = runs[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["step"] == 50 and "val/loss" in line:
            line["val/loss"] = 5.0
        if line["step"] == 100 and "val/loss" in line:
            line["val/loss"] = 90.0
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    axes = draw_losses(load_groups(*runs)[0])[0]
    assert axes.get_ylim()[1] < 6 and "↑ up to 90" in list_notes(axes)
    minus = pictures.list_loss_panels(load_groups(*runs)[0], "tanh")[1]
    difference = loss_of(runs[0], 100) - 90
    assert minus.note == f"↓ down to {difference:.3g}"


def test_a_line_that_ends_early_beyond_the_frame_is_named_at_its_edge(tmp_path):
    runs = make_seeds(tmp_path, {"kern": 2, "tanh": 2}, 1, points=20, without=BARE)
    file = runs[0] / "metrics.jsonl"
    lines = []
    for line in map(json.loads, file.read_text().splitlines()):
        if "train/loss" in line and line["step"] > 200:
            del line["train/loss"]
        if "train/loss" in line and line["step"] > 50:
            line["train/loss"] += 50
        if line.keys() & {"train/loss", "val/loss"}:
            lines.append(json.dumps(line) + "\n")
    file.write_text("".join(lines))
    (panel, *_) = pictures.list_measure_panels(load_groups(*runs)[0], "kern")
    axes = pictures.draw_figure([panel]).axes[0]
    assert axes.get_ylim()[1] < 6 and "↑ up to 5" in list_notes(axes)
    places = {text.get_text(): text.xy[1] for text in axes.texts}
    assert places["kern"] == 1 and 0 < places["tanh"] < 1


def test_a_run_at_step_0_has_no_line_on_a_logarithmic_axis(tmp_path):
    """Its label would have none, and its band no place."""
    make_run(tmp_path / "new", "run.seed=9", until=0)
    runs = [tmp_path / "new", *make_seeds(tmp_path, {"kern": 2, "tanh": 2}, 1, points=20)]
    for run in runs[1:]:
        file = run / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["step"] < 250 and "val/loss" in line:
                line["val/loss"] += 3.0
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = load_groups(*runs)
    axes = draw_losses(group)[0]
    assert axes.get_xscale() == "log" and len(group.curves) == 1
    # a factor of 3, as near to the cube root of 1,000 / 50 as a whole number is
    assert list(axes.get_xticks()) == [1000, 333, 111]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1,000", "333", "111"]
    assert list(lines_of(axes)) == ["tanh", "kern"]


# linear RGB as seen by readers without one kind of cone: Machado, Oliveira and Fernandes 2009
SIGHTS = {
    "all cones": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}


def convert_to_lab(colour, sight):
    """CIE L*a*b* of a colour as a reader with this sight sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(sight) @ linear, 0, 1)
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    xyz = np.array(to_xyz) @ seen / [0.95047, 1, 1.08883]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHTS)
def test_colour_blind_readers_tell_lines_apart(sight):
    """Colours of one picture differ by 17 in L*a*b*, where 2 can be seen; lines differ too."""
    paper = [STYLES[router][0] for router in ("dense", "softmax", "sigmoid", "tanh", "kern")]
    for colours in (paper, DISTINCT):
        for one, other in combinations(colours, 2):
            one_lab = convert_to_lab(one, SIGHTS[sight])
            assert np.linalg.norm(one_lab - convert_to_lab(other, SIGHTS[sight])) > 17


MEASURED = ("val/dead_experts", "router/gamma", "val/gate_norm", "train/loss")


def test_measures_and_routing(tmp_path):
    shown = ["tasks/arc/acc", "val/books.v2/loss"]  # a set's name may have a dot
    measured = [*shown, "val_ema/loss", "tasks/arc/acc_norm"]
    runs = make_seeds(tmp_path, {"dense": 2, "kern": 2}, 2, measured=measured)
    (group,) = load_groups(*runs)
    panels = {}
    for panel in pictures.list_measure_panels(group, "kern"):
        panels[panel.title] = lines_of(pictures.draw_figure([panel]).axes[0])
    for name in ("val_ema/loss", "val/load_imbalance", "router/entropy", *MEASURED):
        panels[name] = panels[name_measure(name)]
    for name in shown:
        assert panels[name]["dense"][0] == list(range(0, 1001, 200))
    assert "tasks/arc/acc_norm" not in panels
    assert panels["val/dead_experts"].keys() == panels["router/gamma"].keys() == {"kern"}
    assert panels["val/gate_norm"]["kern"][1][::10] == pytest.approx([1, 2])
    assert panels["router/gamma"]["kern"][1][-1] == 1.5


# ---- pages
def test_the_report_is_written(tmp_path, call):
    runs = make_seeds(tmp_path / "runs", {"kern": 2, "tanh": 2.5, "softmax": 2}, noise=0.003)
    out = tmp_path / "out"
    printed = call(report.main, *runs, "--out", out)
    html, page = read_html(out)
    assert "<h1>9 runs</h1>" in html and f"report: {out}/report.html" in printed
    pictures_of_page = re.findall(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,', html)
    losses = ["validation loss, nats per byte", "minus kern&#39;s, 95% over seeds"]
    assert pictures_of_page[:2] == losses and "load of each layer&#39;s experts" in pictures_of_page
    assert "Decided: tanh higher. Undecided: 1." in html
    (row,) = re.findall(r"^\| tanh \| kern \| .*", page, re.M)
    assert re.match(r"\| tanh \| kern \| \+0\.(49|50)\d+ \[.*\] \| 3 seeds \| <b>higher</b> ", row)
    assert "of 8 documents" in html and "Losses in nats per byte" in html and "Student's t" in html
    assert re.search(r"^tanh +kern +\+0.(49|50)\d+ \[.*\] +3 seeds +higher", printed, re.M)
    assert "| 1,008 |" in page  # tokens/s: 1,006 to 1,010 were logged last


def test_every_evaluation_is_shown_and_the_old_page_is_replaced(tmp_path, call):
    """A run of 60 steps that is best at step 40; the folder has a report with more pictures."""
    out = tmp_path / "out"
    call(report.main, make_run(tmp_path / "old"), "--out", out)
    (out / "own.png").write_text("of the user")
    short = ["train.max_steps=60", "optim.warmup_steps=1"]
    run = make_run(tmp_path / "run", *short, points=3, without=BARE)
    file = run / "metrics.jsonl"
    lines = []
    for line in map(json.loads, file.read_text().splitlines()):
        if line["step"] == 40 and "val/loss" in line:
            line["val/loss"] = 0.5
        lines.append(json.dumps(line) + "\n")
    file.write_text("".join(lines))
    printed = call(report.main, run, "--out", out)
    at_20, at_60 = f"{loss_of(run, 20):.4f}", f"{loss_of(run):.4f}"
    assert re.search(rf"^kern +1 +{at_20} +0\.5000 +{at_60}$", printed, re.M)
    (row,) = re.findall(r"^\| \S+run \|.*", read_html(out)[1], re.M)
    assert f"| {at_60} | 0.5000 at 40 |" in row
    assert {path.name for path in out.iterdir()} == {"report.html", "own.png"}
    assert read_html(out)[0].count("<img") == 2
    (line,) = draw_losses(load_groups(run)[0])[0].get_lines()
    assert list(line.get_xdata()) == [0, 20, 40, 60]
    assert line.get_marker() != "None" and line.get_markevery() is None


BARE = ["val/window", "val/load", "val/gate", "val/dead", "router/", "perf/"]


@pytest.mark.parametrize("shape", [{"until": 0}, {"points": 1}, {"without": BARE}])
def test_runs_with_little_in_them(tmp_path, call, shape):
    """Evaluated before training alone, once, or without anything but losses.

    The tables have the losses that there are, and no columns, rows or pictures of others.
    """
    runs = make_seeds(tmp_path, {"softmax": 2.5, "kern": 2}, 1, **shape)
    call(report.main, *runs, "--out", tmp_path / "out")
    html, page = read_html(tmp_path / "out")
    losses = [f"{loss_of(run):.4f}" for run in runs]
    for run, loss in zip(runs, losses, strict=True):
        (row,) = [line for line in page.splitlines() if str(run) in line and "|" in line]
        assert f"| {loss} |" in row
    titles = re.findall(r'<img alt="([^"]*)"', html)
    assert titles[0] == "validation loss, nats per byte"
    if "until" in shape:
        assert len(titles) == 1 and "first minus second" not in page
        for run in runs:
            assert f"{run} is not compared: stopped at step 0 of 1,000" in html
        return
    n_shown = 10 if "without" in shape else 1
    for router, run in zip(("softmax", "kern"), runs, strict=True):
        (row,) = re.findall(rf"^\| <b>{router}</b> \| 1 \| (.*) \|", page, re.M)
        wanted = [f"{loss_of(run, 1000 * i // n_shown):.4f}" for i in range(1, n_shown + 1)]
        assert row.split(" | ") == wanted
    difference = loss_of(runs[0]) - loss_of(runs[1])
    assert re.search(rf"\| softmax \| kern \| \{difference:+.4f} .*undecided \(1 seed\)", page)
    assert ("at the end" in page) == ("without" not in shape)
    assert ("load of each layer&#39;s experts" in titles) == ("without" not in shape)


def test_long_tables_and_notes_are_folded():
    """Of more than 15 rows; the table of runs is open."""
    for rows, is_folded in ((15, False), (16, True)):
        table = Table(["a"], [{"a": str(i)} for i in range(rows)], "Losses")
        report = Report([], [], ["a note"] * rows)
        section = Section("Title", "text", [], [table])
        html = format_page(report, [section], ["scripts.report"]).decode()
        assert html.count("<details>") == html.count("</details>") == 2 * is_folded
        assert (f"<summary>Losses: {rows} rows</summary>" in html) == is_folded
        assert (f"<summary>{rows} notes</summary>" in html) == is_folded
        table.is_open = True
        html = format_page(report, [section], ["scripts.report"]).decode()
        assert html.count("<details open>") == is_folded


def test_lines_of_one_colour_get_others():
    """Two routers have the same colour; a picture of more lines than colours keeps them."""
    pair = ["kern-norelu", "kern-after"]
    assert STYLES[pair[0]][0] == STYLES[pair[1]][0]
    styles = choose_styles(pair)
    for style, router, colour, marker in zip(styles, pair, DISTINCT, "os", strict=False):
        assert style == {"color": colour, "linestyle": STYLES[router][1], "marker": marker}
    for routers in (["kern", "tanh"], [*pair, "kern", "tanh", "dense", "softmax", "sigmoid"]):
        own = [STYLES[router] for router in routers]
        assert [tuple(style.values()) for style in choose_styles(routers)] == own


def test_names_cannot_break_the_page():
    cells = ["<i>", "1 ± 2 in [-1, 2]"]
    table = Table(["a|b", "c"], [dict(zip(["a|b", "c"], cells, strict=True))])
    picture = Picture("x.svg", "<u>", "<u>", b"<svg/>")
    section = Section("<b> & co", "**b** `c` **bold** `code` <script>", [picture], [table])
    report = Report([], [], ["1 < 2"])
    html = format_page(report, [section], ["scripts.report", "<script>"]).decode()
    shown = "<b>b</b> <code>c</code> <b>bold</b> <code>code</code> &lt;script&gt;"
    assert "<script" not in html and shown in html
    assert "<h2>&lt;b&gt; &amp; co</h2>" in html and '<section id="b-co">' in html
    assert (
        "<th>a|b</th>" in html
        and "<td>&lt;i&gt;</td>" in html
        and "1\u00a0±\u00a02 in [-1,\u00a02]" in html
    )
    assert '<a href="#b-co">&lt;b&gt; &amp; co</a>' in html
    assert "<li>1 &lt; 2.</li>" in html and "<u>" not in html and "default-src 'none'" in html


@pytest.mark.usefixtures("without_pictures")
def test_the_default_folder_follows_the_runs(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for name in ("mine-kern", "mine-tanh", "other"):
        make_run(tmp_path / f"runs/{name}", f"model.router={'tanh' if 'tanh' in name else 'kern'}")
    for given, wanted in (
        (["mine-kern"], "report-mine-kern"),
        (["mine-kern", tmp_path / "runs/mine-tanh"], "report-mine"),
    ):
        call(report.main, *(Path("runs", name) for name in given))
        html = (tmp_path / f"runs/{wanted}/report.html").read_text()
        assert f"<h1>{len(given)} run" in html
        # of the code's repository: this folder is in none
        assert ("commit unknown" in html) != (REPO_ROOT / ".git").exists()
    call(report.main, "runs")
    assert (tmp_path / "runs/report/report.html").is_file()


def test_bad_input(tmp_path, call):
    kern = make_run(tmp_path / "kern")
    other = make_run(tmp_path / "other", "model.gate_norm=2")
    for arguments, said in [
        ([tmp_path / "kernel"], "no such folder"),
        (
            [kern, other, "--baseline", "softmx"],
            "--baseline 'softmx': the runs have kern; kern, gate_norm 2; kern, gate_norm own",
        ),
        ([kern, "--out", kern / "config.toml"], "a file, not a folder"),
        ([kern, "--margin", "-1"], "--margin -1: expected 0 or more"),
        ([kern, "--out", kern / "config.toml/x"], "a file is where a folder is needed"),
    ]:
        error = call(report.main, *arguments, code=2)
        assert said in error and len(error.splitlines()) == 1 and error.startswith("error: ")
