"""track/: its verdicts against scipy, records that were changed, and a tiny contest from end
to end.
"""

import bz2
import hashlib
import json
import math
import signal
import subprocess
import sys
from functools import partial
from itertools import cycle
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY
from fake_runs import make_run
from runs import wait_until
from scipy import stats

import configure
from data.bins import read_meta
from data.mixture import identify
from router import ROUTERS
from runtime.signals import EXIT_CODE, Stop
from track import clean
from track import protocol as protocols
from track.__main__ import CPU, load_complete, main
from track.entry import add_run, describe_machine, make_point, read_result, start_record
from track.protocol import Task, load_protocol, read_options
from track.record import (
    find_record_faults,
    judged_runs,
    losses_of,
    missing_tasks,
    new_record,
    read_record,
    write_record,
)
from track.table import PAGE, build_tables, judge_entries, loss_curve, write_tables

CONTEST = """
[track]
version = 3
reference = "softmax-renorm"
second = "kern"
margin = 0.02
text = ["absent", "absent"]
data_sha256 = "{data}"
draw_seed = 1
tune_seed = 0
final_seed = 1
finalists = 2
judge_seeds = [100, 101, 102]
draft_seeds = [200, 201]
lengths = [0.5, 2.0]
length_seeds = [100, 101]

[track.draws]
count = 3
lr = [1e-3, 1e-2]
router_lr_ratio = [0.2, 2.0]
expert_out_lr_ratio = [0.5, 4.0]
gate_norm = [0.5, 8.0]
own_gate_norm = 0.25
balance_loss_coef = [1e-3, 1e-1]
bias_update_rate = [1e-4, 1e-2]
"""


@pytest.fixture
def contest(tmp_path: Path, corpus: Path, monkeypatch) -> Path:
    """The config file of a contest of 3 draws and 3 judged seeds, 4 steps each, on `corpus`."""
    monkeypatch.setattr(protocols, "RECORDS", tmp_path / "records")
    data = identify([read_meta(corpus / "tiny")], [1.0])["data"]
    text = TINY.format(runs=(tmp_path / "runs").as_posix(), data=corpus.as_posix())
    text = text.replace('name = "tiny"\n', "", 1)  # the contest names its runs
    file = tmp_path / "contest.toml"
    file.write_text(text + CONTEST.format(data=data))
    return file


def make_record(protocol, name, losses, step_ms=None):
    """A complete record with `losses` of the judged seeds.

    Draw d has loss 2 + d, length l has 1.7 - 0.1 log2(l).
    """
    record = new_record(protocol, name, name)
    judged = dict(zip(protocol.judge_seeds, losses, strict=True))
    while missing := missing_tasks(protocol, record):
        for task in missing:
            loss = {"judge": judged.get(task.seed), "length": 1.7 - 0.1 * math.log2(task.length)}
            run = {**task._asdict(), "loss": loss.get(task.round, 2.0 + task.draw)}
            if task.round == "judge" and run["loss"] is not None:
                quarter = protocol.windows / 4
                run["documents"] = [[run["loss"] - 0.3, quarter], [run["loss"] + 0.1, 3 * quarter]]
                run |= {"gate_norm": [1.0, 2.0], "load_imbalance": 3.0, "dead_experts": 0.5}
            record["runs"].append(run)
    record["step_ms"] = step_ms or {"reference": 10.0, "entry": 10.0}
    return record


def save(path, record):
    write_record(path, record)
    return read_record(path)


def sign(record):
    """The record with a digest of its own, made by hand."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return content | {
        "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    }


@pytest.mark.parametrize("file", [CPU, "config/track/gpu.toml"])
def test_draws_lie_in_their_ranges_and_suit_every_router(file):
    protocol = load_protocol(file)
    draws = protocol.draw_settings()
    assert draws[:4] == protocol.as_draft().draw_settings() and len(draws) == 16
    many = protocol.model_copy(update={"draws": protocol.draws | {"count": 3000}}).draw_settings()
    assert many[:16] == draws
    for key in ("lr", "router_lr_ratio", "expert_out_lr_ratio"):
        low, high = np.log(protocol.draws[key])
        parts = (np.log([draw[f"optim.{key}"] for draw in many]) - low) / (high - low)
        assert stats.kstest(parts, "uniform").pvalue > 0.001, key
    own = np.mean([draw["model.gate_norm"] == 0 for draw in many])
    assert own == pytest.approx(0.25, abs=0.03)
    for key in ("train.balance_loss_coef", "train.bias_update_rate"):
        assert np.mean([key in draw for draw in many]) == pytest.approx(1 / 3, abs=0.03)
    for draw, router in zip(range(16), cycle(ROUTERS), strict=False):
        config = configure.load(file, protocol.overrides(router, Task("judge", draw, 100)))
        assert config.run.seed == 100 and config.optim.lr == draws[draw]["optim.lr"]


def test_an_entry_sets_options(contest, tmp_path, capsys):
    """Quantile balancing takes the place of the drawn balance; all else is drawn as for every
    router.
    """
    protocol = load_protocol(str(contest))
    options = read_options(protocol.file, ["train.bias_update=quantile", "model.n_hash_layer=1"])
    assert read_options(protocol.file, ["train.bias_update=sign"]) == {}
    record = make_record(protocol, "kern", [1.5, 1.6, 1.7]) | {"name": "mine", "options": options}
    assert any("train.bias_update_rate" in draw for draw in record["settings"])
    for draw, drawn in enumerate(protocol.draw_settings()):
        config = make_point(protocol, record, Task("draw", draw, 0), tmp_path).config
        assert config.train.bias_update == "quantile"
        assert config.model.n_hash_layer == 1
        assert config.model.router == "kern"
        assert (config.train.bias_update_rate, config.train.balance_loss_coef) == (0, 0)
        hashed = make_point(
            protocol,
            record | {"options": {"model.n_hash_layer": 1}},
            Task("draw", draw, 0),
            tmp_path,
        )
        assert {key: attrgetter(key)(hashed.config) for key in drawn} == drawn
        assert config.optim == hashed.config.optim and config.model == hashed.config.model
    assert find_record_faults(protocol, save(tmp_path / "mine.json", record), "mine.json") == []
    changed = save(tmp_path / "kern.json", record | {"name": "kern"})
    assert (
        "router kern {'train.bias_update'" in find_record_faults(protocol, changed, "kern.json")[0]
    )
    with pytest.raises(
        ValueError, match="has options {'train.bias_update': 'quantile'.*, this entry {}"
    ):
        start_record(protocol, tmp_path / "kern.json", "kern", "kern", {})
    records = [make_record(protocol, "softmax-renorm", [1.6, 1.7, 1.8]), record]
    rows = judge_entries(protocol, [save(tmp_path / "x.json", each) for each in records])
    assert "|quantile|0|" in build_tables(protocol, rows)[PAGE]


def test_tasks_follow_from_losses(contest):
    protocol = load_protocol(str(contest))
    draws = [Task("draw", draw, 0) for draw in range(3)]
    assert protocol.list_tasks("kern", {}) == draws
    losses = dict(zip(draws, [1.5, math.inf, 1.4], strict=True))
    finals = [Task("final", 2, 1), Task("final", 0, 1)]
    assert protocol.list_tasks("kern", losses) == draws + finals
    # means 1.475 and 1.50: the last run alone decides nothing
    close = losses | {finals[0]: 1.55, finals[1]: 1.5}
    assert protocol.list_tasks("kern", close)[-1] == Task("judge", 2, 102)
    losses |= {finals[0]: 1.7, finals[1]: 1.5}  # 1.55 and 1.50
    judged = [Task("judge", 0, seed) for seed in (100, 101, 102)]
    assert protocol.list_tasks("kern", losses) == draws + finals + judged
    lengths = [Task("length", 0, seed, length) for length in (0.5, 2.0) for seed in (100, 101)]
    drafts = [Task("draft", 0, seed) for seed in (200, 201)]
    assert (
        protocol.list_tasks("softmax-renorm", losses) == draws + finals + judged + drafts + lengths
    )
    assert (protocol.count_tasks("kern"), protocol.count_tasks("softmax-renorm")) == (8, 14)
    assert "--train.max_steps=8" in protocol.overrides("kern", lengths[-1])
    draft = protocol.as_draft()
    first = {Task("draw", draw, 0): 1.0 + draw for draw in range(4)}
    assert draft.list_tasks("kern", first) == [*first, Task("judge", 0, 200), Task("judge", 0, 201)]


def test_verdicts_are_those_of_scipy():
    protocol, draw = load_protocol(CPU), np.random.default_rng(0)
    base = draw.normal(1.6, 0.02, 10)
    shifts = {"kern": -0.05, "tanh": 0.05, "sigmoid": 0.0, "softmax": -0.008}
    noise = {"kern": 0.01, "tanh": 0.01, "sigmoid": 0.004, "softmax": 0.03}
    losses = {
        name: base + shift + draw.normal(0, noise[name], 10) for name, shift in shifts.items()
    }
    records = [make_record(protocol, "softmax-renorm", base)]
    records += [make_record(protocol, name, values.tolist()) for name, values in losses.items()]
    rows = {row.record["name"]: row for row in judge_entries(protocol, records)}
    words = {name: rows[name].against["softmax-renorm"].verdict for name in shifts}
    assert words == {
        "kern": "lower",
        "tanh": "higher",
        "sigmoid": "equivalent",
        "softmax": "undecided",
    }
    assert set(rows["softmax-renorm"].against) == {"kern"}
    p_values = sorted(
        (stats.ttest_rel(values, base).pvalue, name) for name, values in losses.items()
    )
    largest = 0.0
    for rank, (p, name) in enumerate(p_values):
        largest = max(largest, min(1, (4 - rank) * p))
        assert rows[name].against["softmax-renorm"].p == pytest.approx(largest)
    assert rows["tanh"].against["kern"].mean == pytest.approx(
        (losses["tanh"] - losses["kern"]).mean()
    )
    assert rows["tanh"].mean == pytest.approx(losses["tanh"].mean())


def test_speedup_is_tokens_times_step_times():
    """The reference's loss falls by 0.1 with each doubling: 0.05 lower is worth √2, a 1.5 times
    longer step 2/3.
    """
    protocol = load_protocol(CPU)
    reference = make_record(protocol, "softmax-renorm", [1.7] * 10)
    spread = np.array([0.01, -0.01] * 5)
    entry = make_record(
        protocol, "kern", (1.65 + spread).tolist(), {"reference": 10.0, "entry": 15.0}
    )
    rows = {row.record["name"]: row for row in judge_entries(protocol, [reference, entry])}
    half = stats.ttest_1samp(spread, 0).confidence_interval().high
    wanted = [2 ** (0.5 + shift / 0.1) / 1.5 for shift in (0, -half, half)]
    assert rows["kern"].speedup == [f"{value:.2f}" for value in wanted]
    for loss, text in ((1.81, "<0.33"), (1.49, ">2.67")):  # beyond half and four times the tokens
        entry = make_record(protocol, "kern", [loss] * 10, {"reference": 10.0, "entry": 15.0})
        rows = {row.record["name"]: row for row in judge_entries(protocol, [reference, entry])}
        assert rows["kern"].speedup[0] == text
    diverged = make_record(protocol, "tanh", [1.5] * 9 + [None])  # is higher, and listed last
    *_, row = judge_entries(protocol, [diverged, reference])
    assert (row.record["name"], row.against["softmax-renorm"].verdict) == ("tanh", "higher")
    assert row.mean == math.inf and row.speedup is None
    rows = judge_entries(protocol.model_copy(update={"reference": "tanh"}), [reference, diverged])
    assert rows[0].against == {}


@pytest.mark.slow
def test_error_rates_of_a_table():
    """11 entries, a deviation of differences above the pilot's: at most 5% of tables hold a false
    word; power.
    """
    protocol, draw = load_protocol(CPU), np.random.default_rng(0)
    names = [name for name in ROUTERS if name != "softmax-renorm"][:11]
    deviation, seeds, tables = 0.009, len(protocol.judge_seeds), 400

    def share(word, shift):
        """The share of tables, and of entries, with the word, if all entries differ by `shift`."""
        hits = np.zeros((tables, len(names)), bool)
        for i in range(tables):
            base = draw.normal(1.6, 0.02, seeds)
            records = [make_record(protocol, "softmax-renorm", base)]
            for name in names:
                losses = base + shift + draw.normal(0, deviation, seeds)
                records.append(make_record(protocol, name, losses.tolist()))
            rows = {row.record["name"]: row for row in judge_entries(protocol, records)}
            hits[i] = [rows[name].against["softmax-renorm"].verdict == word for name in names]
        return hits.any(1).mean(), hits.mean()

    limit = stats.binom.ppf(0.999, tables, 0.05) / tables
    assert share("lower", 0.0)[0] <= limit
    assert share("equivalent", protocol.margin)[0] <= limit
    assert share("equivalent", 0.0)[1] > 0.8


def test_what_the_reference_is_compared_by(contest):
    """Drafts by its runs of their seeds; the curve of its lengths by the seeds that have every
    length.
    """
    protocol = load_protocol(str(contest))
    reference = make_record(protocol, "softmax-renorm", [1.6, 1.7, 1.8])
    drafts = [loss for task, loss in losses_of(reference).items() if task.round == "draft"]
    draft = make_record(protocol.as_draft(), "kern", [1.9, 1.8]) | {"name": "kern (draft)"}
    rows = {row.record["name"]: row for row in judge_entries(protocol, [reference, draft])}
    difference = rows["kern (draft)"].against["softmax-renorm"]
    assert difference.mean == pytest.approx(1.85 - np.mean(drafts)) and difference.seeds == 2
    assert loss_curve(protocol, reference) == pytest.approx({0.5: 1.8, 1.0: 1.65, 2.0: 1.6})
    reference["runs"] = [
        run for run in reference["runs"] if run["round"] != "draft" or run["seed"] == 200
    ]
    with pytest.raises(ValueError, match="share fewer than two seeds; enter both again"):
        judge_entries(protocol, [reference, draft])


def test_a_run_names_the_machine_that_made_it(contest, tmp_path):
    protocol = load_protocol(str(contest))
    record = new_record(protocol, "kern", "kern")
    names = ["first", "second", "first"]
    for task, name in zip(missing_tasks(protocol, record), names, strict=True):
        made = describe_machine(protocol) | {"machine": name}
        point = make_point(protocol, record, task, tmp_path)
        make_run(point.folder, *point.overrides, file=contest, points=1)
        add_run(protocol, record, read_result(point.folder, task), made, tmp_path / "kern.json")
    written = read_record(tmp_path / "kern.json")
    assert [written["made"][run["made"]]["machine"] for run in written["runs"]] == names


def test_verify_refuses_tampering(contest, tmp_path, capsys):
    protocol = load_protocol(str(contest))
    path = protocol.records / "kern.json"
    intact = make_record(protocol, "kern", [1.5, 1.6, 1.7])
    del intact["options"]  # which older records lack
    record = save(path, intact)
    assert find_record_faults(protocol, record, path.name) == []
    assert record["summary"]["loss"] == pytest.approx(1.6) and path.stat().st_size < 150_000

    judged = next(i for i, run in enumerate(intact["runs"]) if run["round"] == "judge")

    def without(key, i):
        return intact | {key: [value for j, value in enumerate(intact[key]) if j != i]}

    changed = [{**run, "loss": 1.4} if i == judged else run for i, run in enumerate(intact["runs"])]
    short = intact["runs"][judged] | {"documents": [[1.5, 3]]}
    other_draw = [{"optim.lr": 0.5}, *intact["settings"][1:]]
    cases = {
        "version 2 of the protocol": intact | {"version": 2},
        "fixed_sha256": intact | {"fixed_sha256": "0" * 64},
        "data_sha256": intact | {"data_sha256": "0" * 64},
        "not the protocol's draws": intact | {"settings": other_draw},
        "runs are missing, such as judge-draw0-seed100": without("runs", judged),
        "the mean of its documents 1.5": intact | {"runs": changed},
        "more than once": intact | {"runs": [*intact["runs"], intact["runs"][0]]},
        "is not in the protocol": intact
        | {"runs": [*intact["runs"], {**intact["runs"][judged], "seed": 9}]},
        "its formula is": intact | {"formula": "RouterSpec(phi='tanh')"},
        "one entry a name": intact
        | {"name": "tanh", "router": "tanh", "formula": repr(ROUTERS["tanh"])},
        "it is of the router tanh": intact | {"router": "tanh", "formula": repr(ROUTERS["tanh"])},
        "it is a draft": intact | {"draft": True},
        "do not have 6 windows": intact | {"runs": [*without("runs", judged)["runs"], short]},
        "lacks the times": {key: value for key, value in intact.items() if key != "step_ms"},
        "are not as `enter`": intact | {"name": "mine", "options": {"model.n_hash_layer": 0}},
    }
    for reason, tampered in cases.items():
        path.write_text(json.dumps(sign(tampered)))
        assert reason in "; ".join(find_record_faults(protocol, read_record(path), path.name)), (
            reason
        )
    text = json.dumps(record | {"margin": 1})
    path.write_text(text)
    assert "its digest is not" in find_record_faults(protocol, read_record(path), path.name)[0]
    arguments = ["--track", str(contest), "verify", str(path)]
    assert main(arguments, Stop()) == 1 and "1 fault" in capsys.readouterr().out
    path.write_text(json.dumps({key: value for key, value in intact.items() if key != "settings"}))
    assert main(arguments, Stop()) == 1 and "a field is missing" in capsys.readouterr().out
    path.write_text(text[:-9])
    assert main(arguments, Stop()) == 1 and "not JSON" in capsys.readouterr().out
    for file in (path, tmp_path / "kern.json"):
        file.write_text(json.dumps(record))
    assert main([*arguments, str(tmp_path / "kern.json")], Stop()) == 1
    printed = capsys.readouterr().out
    assert f"{path}: intact" in printed
    assert f"{path} is an entry of the same name; keep one" in printed


def test_table_has_what_the_records_say(contest, tmp_path, monkeypatch, capsys):
    protocol = load_protocol(str(contest))
    records = [
        make_record(protocol, "softmax-renorm", [1.6, 1.7, 1.8]),
        make_record(protocol, "kern", [1.4, 1.5, 1.6]),
    ]
    records = [save(protocol.records / f"{record['name']}.json", record) for record in records]
    pages = tmp_path / "README.md", tmp_path / "front.md"
    for page, name in zip(pages, ("PAGE", "FRONT_PAGE"), strict=True):
        monkeypatch.setattr(f"track.table.{name}", page)
        page.write_text("above\n<!-- track: begin -->\nold\n<!-- track: end -->\nbelow\n")
    rows = judge_entries(protocol, records)
    write_tables(protocol, rows)
    lines = pages[0].read_text().splitlines()
    assert (lines[0], lines[-1]) == ("above", "below") and "old" not in lines
    kern = [cell.strip() for cell in lines[4].split("|")[1:-1]]
    assert kern[:4] == ["kern", "1.5000", "-0.2000 [-0.2000, -0.2000] **lower**", ""]
    assert kern[5:8] == ["1.00 → 2.00", "3.0", "0.5"]
    assert float(kern[8]) == protocol.draw_settings()[0]["optim.lr"]
    assert len(build_tables(protocol, rows)) == 2
    assert (tmp_path / "contest.png").stat().st_size > 5000
    save(protocol.records / "kern_old.json", make_record(protocol, "kern", [2.4, 2.5, 2.6]))
    by_name = {record["name"]: record for record in records}
    assert {record["name"]: record for record in load_complete(protocol)} == by_name
    assert "kern_old.json: left out, it is the record of kern" in capsys.readouterr().err
    pages[1].write_text("no marks")
    with pytest.raises(ValueError, match=r"front\.md lacks the lines"):
        write_tables(protocol, rows)


def test_text_is_what_the_protocol_pins():
    """20 MB at least in 8 MB, every file by its digest, no author on both sides."""
    rows = clean.read_books()
    files = [clean.FOLDER / row["file"] for row in rows]
    assert set(files) == set(clean.FOLDER.glob("*/*"))
    assert sum(file.stat().st_size for file in files) < 8e6
    texts = [bz2.decompress(file.read_bytes()) for file in files]
    assert [hashlib.sha256(text).hexdigest() for text in texts] == [row["sha256"] for row in rows]
    authors = {(row["file"].split("/")[0], row["source"].split("/")[0]) for row in rows}
    assert len(authors) == len(rows) == len({author for _, author in authors})
    text = (
        "## I \n\n> \u201cAn _old_ \\[tale\\]\u201d\u2014[see](x.md) <b>it</b>\n\n\n\nEnd  \n***\n"
    )
    assert clean.clean(f"# T\n\n-------\n\n{text}") == 'I\n\n"An old [tale]"--see it\n\nEnd\n'


def test_records_of_the_repository_are_right():
    protocol = load_protocol(CPU)
    paths = sorted(protocol.records.glob("*.json"))
    records = [read_record(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if not missing_tasks(protocol, record):
            assert find_record_faults(protocol, record, path.name) == [], path
    complete = [
        record for record in records if judged_runs(record).keys() >= set(protocol.judge_seeds)
    ]
    for page, text in build_tables(protocol, judge_entries(protocol, complete)).items():
        assert text in page.read_text(), f"{page}: python -m scripts.track table"


def test_bad_arguments(contest, capsys):
    quantile = ["--set", "train.bias_update=quantile"]
    cases = {
        "'krn' is no router of router.py": ["enter", "krn"],
        "norm 'l3' is not one of": ["enter", "--spec", "tanh, post=l3", "--draft"],
        "kern is a router of router.py; give": ["enter", "kern", "--spec", "tanh, c=2"],
        "a name of its own: NAME --spec kern": ["enter", "kern", *quantile],
        "--set optim.lr: an entry may set": [
            "enter",
            "mine",
            "--spec",
            "kern",
            "--set",
            "optim.lr=1",
        ],
        "has small letters": ["enter", "../x", "--spec", "tanh, c=2"],
        "--parallel 0": ["enter", "kern", "--draft", "--parallel", "0"],
        "--rerun takes one record": ["verify", "a.json", "b.json", "--rerun", "1"],
    }
    for reason, arguments in cases.items():
        assert main(["--track", str(contest), *arguments], Stop()) == 2
        assert reason in capsys.readouterr().err
    contest.write_text(contest.read_text().replace("margin", "marginn"))
    assert main(["--track", str(contest), "table"], Stop()) == 2
    assert "margin" in capsys.readouterr().err


@pytest.mark.integration
def test_a_draft_is_interrupted_resumed_and_trained_again(contest, tmp_path):
    """Records of a killed and resumed draft equal those of one that was not.

    A run that diverges ends nothing.
    """
    command = [sys.executable, "-m", "scripts.track", "--track", str(contest)]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    enter = [*command, "enter", "--draft", "--parallel", "2", "--spec", "tanh, post=l1 over all"]
    enter += ["--set", "train.bias_update=quantile", "--set", "model.n_hash_layer=1"]
    drafts = tmp_path / "runs/track-contest/drafts"

    def draft(name):
        (path,) = drafts.glob(f"{name}-*.json")
        return read_record(path)

    whole = run([*enter, "whole"])
    assert whole.returncode == 0 and "6 of 6 runs" in whole.stdout, whole.stderr
    wanted = losses_of(draft("whole"))
    assert len(wanted) == 4 + 2 and all(map(math.isfinite, wanted.values()))
    assert all(draft("whole")["made"][run["made"]]["machine"] for run in draft("whole")["runs"])

    process = subprocess.Popen([*enter, "cut"])
    wait_until(lambda: list(drafts.glob("cut-*.json")), lambda: process.poll() is None)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == EXIT_CODE
    assert 1 <= len(losses_of(draft("cut"))) < 6
    assert run([*enter, "cut"]).returncode == 0
    assert losses_of(draft("cut")) == wanted
    assert draft("cut")["settings"] == load_protocol(str(contest)).as_draft().draw_settings()

    mad = tmp_path / "mad.toml"
    mad.write_text(contest.read_text().replace("lr = [1e-3, 1e-2]", "lr = [1e30, 1e31]"))
    diverged = run([*command[:-1], str(mad), "enter", "--draft", "tanh", "--parallel", "2"])
    assert diverged.returncode == 0 and "6 of 6 runs" in diverged.stdout, (
        diverged.stdout + diverged.stderr
    )
    assert diverged.stdout.count(": diverged; ") == 6
    assert "tanh (draft)  diverged" in diverged.stdout

    record = load_protocol(str(contest)).records / "mine.json"
    write_record(record, draft("whole"))
    for _ in range(2):
        again = run([*command, "verify", str(record), "--rerun", "201"])
        assert again.returncode == 0 and "difference +0.0000000" in again.stdout
    contest.write_text(contest.read_text().replace("data_sha256 = ", 'data_sha256 = "0" # '))
    assert "the protocol 0" in run(enter).stderr
