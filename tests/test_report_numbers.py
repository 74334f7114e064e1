"""Tables and pictures of a report by their numbers: every cell and every artist, recomputed.

The oracle reads metrics.jsonl and computes with numpy and scipy. Every measure of every line is a
number of its own, so one of another run, seed, step or value of the key shows.
"""

import html
import json
import re
from functools import cache
from itertools import product

import numpy as np
import pytest
from fake_runs import load_groups, make_run
from matplotlib.colors import to_rgba
from scipy import stats

import report.__main__ as report
from report import pictures
from report.comparisons import compare_group
from report.style import GREY, NO_TOKEN, STYLES
from report.tables import MEASURES, build_measure_table, name_measure

# in the order of tables; a name is part of another's
ROUTERS = ("softmax", "kern", "softmax-renorm")
ENDS = {"softmax": 2.2, "kern": 2.0, "softmax-renorm": 2.02}
SEEDS = (0, 1, 2)
RENORM = "softmax-renorm"
PAIRS = [("softmax", "kern"), (RENORM, "kern"), (RENORM, "softmax")]  # the baseline is second


def read_lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@cache
def read_series(run, name):
    """{step: value} of a name in a run's metrics.jsonl."""
    return {line["step"]: line[name] for line in read_lines(run) if name in line}


def make_random_runs(folder, xs=(1,), **shape):
    """{(router, x, seed): run} at gate norms `xs`, whose lines have numbers of their own."""
    random = np.random.default_rng(1)
    runs = {}
    for router, x, seed in product(ROUTERS, xs, SEEDS):
        settings = [f"model.router={router}", f"model.gate_norm={x}", f"run.seed={seed}"]
        run = make_run(
            folder / f"{router}-{x}-{seed}", *settings, end=ENDS[router] + x / 10, **shape
        )
        lines = read_lines(run)
        for line in lines:
            for name in line.keys() - {"step", "tokens", "val/loss"}:
                line[name] = random.uniform(1, 9)
            if "router/entropy" in line:  # all end at the top of the frame
                line["router/entropy"] = line["step"] / 100 + random.uniform(0, 0.1)
            if "val/loss" in line:
                line["val/loss"] += random.normal(0, 0.01)
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs[router, x, seed] = run
    return runs


# ---- pictures
def draw(panel):
    figure = pictures.draw_figure([panel])
    figure.draw_without_rendering()
    return figure.axes[0]


def average(points, n):
    """At most n rows of x, mean, low and high: neighbours are averaged, at the last one's step."""
    rows = []
    size, more = divmod(len(points), n)
    while len(points) > n and len(rows) < n:
        end = sum(size + (number < more) for number in range(len(rows) + 1))
        start = end - size - (len(rows) < more)
        rows.append([points[end - 1][0], *np.mean(points[start:end], axis=0)[1:]])
    return np.array(rows or points)


def summarize_seeds(runs, router, name):
    """Rows of step, mean, lowest and highest over the seeds."""
    series = [read_series(runs[router, 1, seed], name) for seed in SEEDS]
    rows = []
    for step in sorted(series[0]):
        values = [of_seed[step] for of_seed in series]
        rows.append([step, np.mean(values), min(values), max(values)])
    return rows


def check_line(axes, label, rows):
    """The line of a label has these means, and its band these ends; both are in the frame."""
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    labels = [line.get_label() for line in lines]
    line = lines[labels.index(label)]
    assert np.array(line.get_xydata()) == pytest.approx(rows[:, :2])
    assert line.get_color() == STYLES[label][0]
    (band,) = axes.collections[labels.index(label)].get_paths()
    for x, _, low, high in rows:
        ys = band.vertices[np.isclose(band.vertices[:, 0], x), 1]
        assert (ys.min(), ys.max()) == pytest.approx((low, high))
    bottom, top = axes.get_ylim()
    left, right = axes.get_xlim()
    assert left <= rows[0, 0] and rows[-1, 0] <= right
    assert axes.get_title("left").count("↑") or rows[:, 3].max() <= top
    assert axes.get_title("left").count("↓") or rows[:, 2].min() >= bottom


def check_labels(axes, ends):
    """Each line is named at its end, in the order of the ends and within the frame's height."""
    heights = {text.get_text(): text.xyann[1] for text in axes.texts}
    anchors = {text.get_text(): text.xy[1] for text in axes.texts}
    assert sorted(heights, key=heights.get) == sorted(ends, key=ends.get)
    bottom, top = axes.get_ylim()
    for label, end in ends.items():
        assert -0.01 <= heights[label] <= 1.01
        assert anchors[label] == pytest.approx(min(1, max(0, (end - bottom) / (top - bottom))))


def test_lines_over_steps_are_those_of_the_runs(tmp_path):
    """Losses, differences and measures at 71 evaluations, of which 60 points are drawn."""
    runs = make_random_runs(tmp_path, points=70, without=("val/window", "val/loads"))
    (group,) = load_groups(*runs.values())
    validation, minus = pictures.list_loss_panels(group, "kern", compare_group(group))
    axes = draw(validation)
    assert axes.get_title("left") == "validation loss, nats per byte"  # nothing is clipped
    ends = {}
    for router in ROUTERS:
        rows = average(summarize_seeds(runs, router, "val/loss"), 60)
        check_line(axes, router, rows)
        ends[router] = rows[-1, 1]
    check_labels(axes, ends)
    lowest, highest = min(ends, key=ends.get), max(ends, key=ends.get)
    said = f"{lowest} {ends[lowest]:.4g} is lowest, {highest} {ends[highest]:.4g} highest"
    assert validation.sentence == f"At step 1,000: {said}."

    axes = draw(minus)
    ends = {}
    for router in ("softmax", RENORM):
        rows = []
        for step in sorted(read_series(runs["kern", 1, 0], "val/loss"))[1:]:
            losses = {}
            for name in (router, "kern"):
                losses[name] = [read_series(runs[name, 1, i], "val/loss")[step] for i in SEEDS]
            interval = stats.ttest_rel(losses[router], losses["kern"]).confidence_interval()
            rows.append([step, np.subtract(*losses.values()).mean(), *interval])
        rows = average(rows, 60)
        check_line(axes, router, rows)
        ends[router] = rows[-1, 1]
    check_labels(axes, ends)
    losses = {}
    for router in ROUTERS:
        losses[router] = [read_series(runs[router, 1, i], "val/loss")[1000] for i in SEEDS]
    p_values = correct_holm([stats.ttest_rel(losses[a], losses[b]).pvalue for a, b in PAIRS])
    decided = []
    for router, p_value in zip(("softmax", RENORM), p_values[:2], strict=True):
        if p_value < 0.05:
            decided.append((np.mean(losses[router]), f"{router} higher"))
    names = ", ".join(text for _, text in sorted(decided))
    assert minus.sentence == f"Decided: {names}. Undecided: {2 - len(decided)}."

    panels = {panel.title: panel for panel in pictures.list_measure_panels(group, "kern")}
    names = [name for name in MEASURES if name in read_lines(runs["kern", 1, 0])[-1]]
    assert len(names) == 3  # of an evaluation
    for name in ["train/loss", "router/gamma", "router/entropy", *names]:
        axes = draw(panels[name_measure(name)])
        ends = {}
        for router in ROUTERS if name != "router/gamma" else ["kern"]:
            rows = average(summarize_seeds(runs, router, name), 60)
            check_line(axes, router, rows)
            ends[router] = rows[-1, 1]
        check_labels(axes, ends)


def correct_holm(p_values):
    """Holm's correction, as R's p.adjust."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.maximum.accumulate(factors * np.array(p_values)[order])
    return np.minimum(1, corrected)[np.argsort(order)].tolist()


def test_of_many_routers_the_baseline_and_the_best_have_colours(tmp_path):
    """Here the baseline is the worst; the others are grey lines of their own numbers."""
    ends = {"kern": 2.9, "tanh": 2.1, "sigmoid": 2.2, "softmax": 2.3, "dense": 2.4}
    ends |= {RENORM: 2.5, "sqrtsoftplus": 2.6, "kern-after": 2.7}
    runs = {router: make_run(tmp_path / router, f"model.router={router}", end=end)
            for router, end in ends.items()}  # fmt: skip
    (group,) = load_groups(*runs.values())
    chosen = {"kern", "tanh", "sigmoid", "softmax", "dense", RENORM}
    panels = pictures.list_loss_panels(group, "kern")
    assert panels[1].title == "minus kern's, 95% over documents"
    panels.append(pictures.list_measure_panels(group, "kern")[0])
    for panel, name in zip(panels, ("val/loss", "minus", "train/loss"), strict=True):
        axes = draw(panel)
        lines = axes.get_lines()
        coloured = {line.get_label(): line for line in lines if line.get_label() in ends}
        greys = [line for line in lines if line.get_label() == "_grey"]
        assert coloured.keys() == chosen - {"kern" if name == "minus" else ""}
        assert [line.get_color() for line in greys] == [GREY] * 2
        assert panel.note.endswith("grey: 2 more")
        if name != "minus":
            wanted = sorted(list(read_series(runs[router], name).values())[-1]
                            for router in ("sqrtsoftplus", "kern-after"))  # fmt: skip
            assert sorted(line.get_ydata()[-1] for line in greys) == pytest.approx(wanted)
            for router, line in coloured.items():
                assert line.get_color() == STYLES[router][0]
                last = list(read_series(runs[router], name).values())[-1]
                assert line.get_ydata()[-1] == pytest.approx(last)


def test_loads_are_those_of_the_runs(tmp_path):
    """A row for each layer at its router's name; experts without a token are orange."""
    runs = make_random_runs(tmp_path)
    (group,) = load_groups(*runs.values())
    panel = pictures.list_measure_panels(group, "kern")[-1]
    axes = draw(panel)
    (image,) = axes.images
    wanted = []
    texts = []
    for router in ROUTERS:
        with np.load(runs[router, 1, 0] / "arrays/val_00001000.npz") as arrays:
            loads = arrays["val/loads"][list(arrays["step"]).index(1000)]
        shares = loads / loads.mean(axis=1, keepdims=True)
        wanted += np.flip(np.sort(shares, axis=1), axis=1).tolist()
        texts.append(f"{router}: {(shares == 0).sum()} of {shares.size} dead, ")
        texts[-1] += f"busiest {shares.max():.1f}"
    assert np.asarray(image.get_array()) == pytest.approx(np.array(wanted))
    assert panel.sentence == f"{'; '.join(texts)}."
    n_layers = len(loads)
    places = [np.mean(range(n * n_layers, (n + 1) * n_layers)) for n in range(len(ROUTERS))]
    assert list(axes.get_yticks()) == places
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(ROUTERS)
    colours = image.cmap(image.norm(np.array(wanted)))
    is_orange = (colours == to_rgba(NO_TOKEN)).all(axis=-1)
    assert (is_orange == (np.array(wanted) == 0)).all() and is_orange.any()


# ---- tables
def read_tables(page):
    """{head of the first column: rows as {head: cell}} of a page's tables."""
    tables = {}
    for table in re.findall(r"<table>(.*?)</table>", page, re.S):
        rows = []
        for row in re.findall(r"<tr>(.*?)</tr>", table, re.S):
            cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)
            texts = [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in cells]
            rows.append([text.replace("\u00a0", " ") for text in texts])
        head = rows[0]
        tables[head[0]] = [dict(zip(head, row, strict=True)) for row in rows[1:]]
    return tables


def format_mean(values, digits):
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def format_interval(differences):
    interval = stats.ttest_1samp(differences, 0).confidence_interval()
    return f"{np.mean(differences):+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


XS = (0.5, 1, 4)  # gate norms
MARGIN = 0.1


def read_losses(runs):
    """{(router, x): (seeds,)} the losses at the end."""
    losses = {}
    for router, x in product(ROUTERS, XS):
        ends = [read_series(runs[router, x, seed], "val/loss")[1000] for seed in SEEDS]
        losses[router, x] = np.array(ends)
    return losses


@pytest.mark.usefixtures("without_pictures")
def test_every_cell_of_a_report_over_a_key(tmp_path, call):
    """Of the tables of runs, losses, pairs and measures, and the curves' points, bars and rings."""
    runs = make_random_runs(tmp_path, XS)
    out = tmp_path / "out"
    options = ["--over", "model.gate_norm", "--margin", MARGIN, "--out", out]
    call(report.main, *runs.values(), *options)
    tables = read_tables((out / "report.html").read_text())
    losses = read_losses(runs)
    check_overview(tables["run"], runs)
    for router, row in zip(ROUTERS, tables["model.gate_norm"], strict=True):
        assert (row["model.gate_norm"], row["seeds"]) == (router, "3")
        for x in XS:
            assert row[f"{x:g}"] == format_mean(losses[router, x], 4)
    assert tables["first"] == judge_pairs(losses)
    assert {row["first is"] for row in tables["first"]} == {"equivalent", "higher", "lower"}
    check_measures(tables["at the end"], runs)
    check_curves(load_groups(*runs.values(), key="model.gate_norm")[0], losses)


def check_overview(rows, runs):
    """Losses are the last ones, the speed the median of the last five."""
    by_name = {str(run): run for run in runs.values()}
    for row in rows:
        run = by_name.pop(row["run"])
        speeds = list(read_series(run, "perf/tokens_per_sec").values())
        assert row["tokens/s"] == f"{np.median(speeds[-5:]):,.0f}"
        assert row["train loss"] == f"{read_series(run, 'train/loss')[1000]:.4f}"
        assert row["val loss"] == f"{read_series(run, 'val/loss')[1000]:.4f}"
    assert not by_name


def judge_pairs(losses):
    """The rows of the table of pairs: t-tests over seeds of means over the key, one family."""
    means = []
    for first, second in PAIRS:
        of_pair = [losses[first, x] - losses[second, x] for x in XS]
        means.append(np.mean(of_pair, axis=0))
    p_values = correct_holm([stats.ttest_1samp(mean, 0).pvalue for mean in means])
    beyond = []  # two one-sided tests: the larger p-value
    for mean in means:
        below = stats.ttest_1samp(mean, MARGIN, alternative="less").pvalue
        above = stats.ttest_1samp(mean, -MARGIN, alternative="greater").pvalue
        beyond.append(max(below, above))
    rows = []
    for (first, second), mean, p, p_beyond in zip(
        PAIRS, means, p_values, correct_holm(beyond), strict=True
    ):
        verdict = "undecided"
        if p_beyond < 0.05:
            verdict = "equivalent"
        elif p < 0.05:
            verdict = "lower" if mean.mean() < 0 else "higher"
        row = {"first": first, "second": second, "first is": verdict, "Holm's p": f"{p:.2g}"}
        row |= {"first minus second, 95%": format_interval(mean), "interval over": "3 seeds"}
        for x in XS:
            row[f"{x:g}"] = format_interval(losses[first, x] - losses[second, x])
        rows.append((-abs(mean.mean()), row))
    return [row for _, row in sorted(rows, key=lambda entry: entry[0])]


def check_measures(rows, runs):
    by_label = {row["at the end"]: row for row in rows}
    assert len(by_label) == len(rows) == len(ROUTERS) * len(XS)
    for router, x in product(ROUTERS, XS):
        row = by_label[f"{router}, gate_norm {x:g}"]
        for name in row.keys() - {"at the end"}:
            values = []
            for seed in SEEDS:
                values += list(read_series(runs[router, x, seed], name).values())[-1:]
            digits = int(MEASURES[name][1][1])
            assert row[name] == (format_mean(values, digits) if values else ""), name


def test_measures_of_runs_that_train_are_of_the_step_that_all_have(tmp_path):
    """kern's runs are at step 800, the others at 500, which is compared."""
    runs = make_random_runs(tmp_path, until=0.8)
    for (router, _, _), run in runs.items():
        if router != "kern":
            lines = [json.dumps(line) + "\n" for line in read_lines(run) if line["step"] <= 500]
            (run / "metrics.jsonl").write_text("".join(lines))
    (group,) = load_groups(*runs.values())
    rows = build_measure_table(group).rows
    assert [row["at the end"] for row in rows] == list(ROUTERS)
    for router, row in zip(ROUTERS, rows, strict=True):
        assert "val/gate_norm" in row and "router/entropy" in row
        for name in row.keys() - {"at the end"}:
            values = []
            for seed in SEEDS:
                series = read_series(runs[router, 1, seed], name)
                values += [value for step, value in series.items() if step <= 500][-1:]
            digits = int(MEASURES[name][1][1])
            assert row[name] == (format_mean(values, digits) if values else ""), (router, name)


def check_curves(group, losses):
    """Means, bars from the lowest to the highest seed, and a ring at the lowest mean."""
    panel = pictures.list_loss_panels(group, "kern")[0]
    axes = draw(panel)
    lines = axes.get_lines()
    best = []
    for number, router in enumerate(ROUTERS):
        curve, ring = lines[2 * number : 2 * number + 2]
        values = np.array([losses[router, x] for x in XS])
        means = values.mean(axis=1)
        assert curve.get_label() == router
        assert list(curve.get_xdata()) == list(XS)
        assert curve.get_ydata() == pytest.approx(means)
        assert ring.get_xdata()[0] == XS[means.argmin()]
        assert ring.get_ydata()[0] == pytest.approx(means.min())
        best.append(f"{router} {means.min():.4f} at {XS[means.argmin()]:g}")
        for artist in (curve, ring):  # side by side, 4 points of 2 pixels apart
            places = artist.get_transform().transform(artist.get_xydata())
            shifts = places - axes.transData.transform(artist.get_xydata())
            assert shifts == pytest.approx(np.tile([8 * (number - 1), 0], (len(shifts), 1)))
        bars = axes.collections[number].get_segments()
        for x, of_x, bar in zip(XS, values, bars, strict=True):
            assert list(bar[:, 0]) == [x, x]
            assert bar[:, 1] == pytest.approx([of_x.min(), of_x.max()])
    assert panel.sentence == f"Lowest, ringed: {'; '.join(best)}."
