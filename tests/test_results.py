"""studies/: numbers of docs/results*.md computed from the records in another way."""

import json
import re
import shutil
import tarfile
import tomllib
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from fake_runs import load_groups, loss_of, make_curves, make_run
from scipy import stats

from studies import best, effects, growth, results


def read_losses(archive: Path) -> list[tuple[dict, float]]:
    """(config, last validation loss) of each run in an archive, from its files alone."""
    runs: dict[str, dict] = defaultdict(dict)
    with tarfile.open(archive) as file:
        for member in file:
            folder, name = member.name.rsplit("/", 1)
            if name == "config.toml":
                runs[folder]["config"] = tomllib.loads(file.extractfile(member).read().decode())
            elif name == "metrics.jsonl":
                for line in map(json.loads, file.extractfile(member)):
                    runs[folder]["loss"] = line.get("val/loss", runs[folder].get("loss"))
    return [(run["config"], run["loss"]) for run in runs.values()]


@pytest.mark.parametrize(("name", "key"), [("w_out", "expert_out_lr_ratio"), ("rates", "lr")])
def test_tables_are_means_of_the_runs_last_losses(name: str, key: str) -> None:
    cells: dict[tuple, list[float]] = defaultdict(list)
    for config, loss in read_losses(results.RECORDS / f"{name}.tar.xz"):
        norm = config["model"]["gate_norm"]
        shown_norm = f"{norm:g}" if norm else "own"
        label = f"{config['model']['router']}, gate_norm {shown_norm}"
        cells[label, config["optim"][key]].append(loss)
    page = (results.DOCS / "results-tables.md").read_text()
    table = page.split(f"runs/{name}-* --over optim.{key}`\n\n")[1].split("\n\n")[0].splitlines()
    head, _, *rows = [line.replace("*", "").strip("|").split("|") for line in table]
    shown = {}
    for label, _, *means in rows:
        for x, mean in zip(head[2:], means, strict=True):
            shown[label, float(x)] = mean
    assert shown == {cell: f"{fmean(losses):.4f}" for cell, losses in cells.items()}


def test_pages_are_those_of_the_records() -> None:
    assert results.main(["--check"]) == 0


def test_numbers_of_the_text_stand_in_tables() -> None:
    """A loss or a difference that the text names, to its three or four digits; but for numbers of
    other papers.
    """
    text, tables = ((results.DOCS / name).read_text() for name in results.PAGES)
    ours = re.sub(r"(?ms)^## Related work$.*?(?=^## |\Z)", "", text)
    lines = [*ours.splitlines(), *tables.splitlines()]
    in_tables = []
    in_text = []
    for line in lines:
        if line.startswith("|"):
            in_tables += re.findall(r"\d+\.\d{3,}", line)
        elif not line.startswith("`python"):
            in_text += re.findall(r"\d+\.\d{3,4}", line)
    numbers = np.array(in_tables, dtype=float)
    for number in in_text:
        digits = len(number.split(".")[1])
        assert abs(numbers - float(number)).min() <= 0.5001 * 10**-digits, number


def test_a_changed_table_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in results.PAGES:
        shutil.copy(results.DOCS / name, tmp_path)
    monkeypatch.setattr(results, "DOCS", tmp_path)
    page = tmp_path / "results-tables.md"
    right = page.read_text()
    page.write_text(right.replace("1.8394", "1.8395"))
    assert results.main(["--check"]) == 2 and "results-tables.md" in capsys.readouterr().err
    assert results.main([]) == 0 and page.read_text() == right
    page.write_text("`python -m scripts.report runs/none-* --over optim.lr`\n")
    assert results.main(["--check"]) == 2 and "runs/none-*" in capsys.readouterr().err


def test_the_growth_of_the_best_norm_is_found(tmp_path):
    """Losses are parabolas over log norm, whose lowest points a seed shifts by known amounts."""
    shifts = (0.1, -0.12, 0.02)
    runs = []
    for top_k, x, seed in product((2, 8, 32), (1, 2, 4, 8, 16), range(3)):
        lowest = 0.6 + (0.4 + shifts[seed]) * np.log2(top_k)
        end = 1.5 + 0.01 * (np.log2(x) - lowest) ** 2
        given = [f"model.top_k={top_k}", f"model.gate_norm={x}", f"run.seed={seed}"]
        runs.append(make_run(tmp_path / f"{top_k}-{x}-{seed}", *given, end=end))
    table = growth.tabulate_growth(load_groups(*runs, key="model.gate_norm"))
    assert table.columns[1:4] == ["top_k 2", "top_k 8", "top_k 32"]
    ((_, *best_norms, slope),) = table.lines
    wanted = [2 ** (0.6 + 0.4 * log_top_k) for log_top_k in (1, 3, 5)]
    assert [float(x) for x in best_norms] == pytest.approx(wanted, rel=0.02)
    oracle = stats.ttest_1samp([0.4 + shift for shift in shifts], 0)
    low, high = oracle.confidence_interval()
    assert [float(x) for x in re.findall(r"[-+][\d.]+", slope)] == pytest.approx(
        [0.4, low, high], abs=0.01
    )


def test_the_parts_of_a_formula_have_their_effects(tmp_path):
    """Losses are sums of three effects, which a seed shifts by known amounts; seven formulas are
    refused.
    """
    sizes = (-0.02, 0.001, 0.03)
    shifts = (0.004, -0.005, 0.001)
    runs = []
    for l2, relu, gamma, seed in product((0, 1), (0, 1), (0, 1), range(3)):
        router = "relu, bias" if relu else "identity, bias"
        if l2:
            router += ", pre=l2 over all"
        if gamma:
            router += ", gamma"
        end = 1.6 + 0.1 * seed + np.dot((l2, relu, gamma), sizes) + l2 * shifts[seed]
        given = [f"model.router={router}", f"run.seed={seed}"]
        runs.append(make_run(tmp_path / f"{l2}{relu}{gamma}-{seed}", *given, end=end))
    (group,) = load_groups(*runs)
    rows = effects.tabulate_effects(group, 0.012).lines
    low, high = stats.ttest_1samp([sizes[0] + shift for shift in shifts], 0).confidence_interval()
    numbers = [float(x) for x in re.findall(r"[-+][\d.]+", rows[0][1])]
    assert numbers == pytest.approx([-0.02, low, high], abs=1e-4)
    assert [row[0] for row in rows] == ["**l2 norm**", "**ReLU**", "**γ**"]
    assert [row[3] for row in rows] == ["**lower**", "**equivalent**", "**higher**"]
    with pytest.raises(ValueError, match="eight formulas"):
        effects.tabulate_effects(*load_groups(*runs[3:]), 0.012)


def test_the_best_value_is_judged_by_other_seeds(tmp_path):
    runs = make_curves(tmp_path, seeds=6)
    lucky = tmp_path / "8/kern5"  # best of all, but of a seed that does not choose
    lines = (lucky / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"val/loss": 0.5})
    (lucky / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (group,) = load_groups(*runs, key="model.gate_norm")
    (pair,) = best.compare_best(group, [0, 1])
    labels = (pair.left.label, pair.right.label)
    assert labels == ("kern, gate_norm 2", "tanh, gate_norm 2")
    differences = []
    for seed in (2, 3, 4, 5):
        differences.append(
            loss_of(tmp_path / f"2/kern{seed}") - loss_of(tmp_path / f"2/tanh{seed}")
        )
    assert pair.difference.mean == pytest.approx(np.mean(differences))
    assert pair.difference.seeds == 4
    command = [*map(str, runs), "--over", "model.gate_norm", "--margin", "0.5", "--choose-on"]
    (table,) = best.tabulate([*command, "0", "1"])
    assert table.lines[0][-3:-1] == ["4 seeds", "**equivalent**"]
    for seeds, said in (["9"], "no run of this seed"), ("012345", "no other seed"):
        with pytest.raises(ValueError, match=said):
            best.tabulate([*command, *seeds])
    with pytest.raises(ValueError, match="with --over"):
        best.tabulate([str(runs[0]), "--choose-on", "0"])
