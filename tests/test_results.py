"""studies/: numbers of docs/results*.md computed from the records in another way."""

import json
import re
import shutil
import tarfile
import tomllib
from collections import defaultdict
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from fake_runs import load_groups, loss_of, make_curves, make_run
from scipy import stats

from studies import balancing, best, effects, growth, results

MARGIN = 0.012  # nats per byte; the text may name it anywhere
ROUTERS = (
    r"softmax-renorm|softmax|kern|sigmoid|tanh|identity"  # and their variants, such as kern-hash
)


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


def find_sections(page: str) -> dict[str, str]:
    """{anchor of a heading: the heading with the text below it}, as GitHub makes anchors."""
    sections = {}
    for section in re.split(r"(?m)^(?=#+ )", page):
        heading = section.split("\n")[0].strip("# ").lower()
        sections[re.sub(r"[^\w -]", "", heading).replace(" ", "-")] = section
    return sections


def find_rows(text: str, routers: list[str]) -> list[str]:
    """The rows of tables that name one of `routers`; without routers, all."""
    rows = re.findall(r"(?m)^\|.*$", text)
    return [row for row in rows if not routers or set(routers) & set(re.findall(ROUTERS, row))]


def find_unsupported_numbers(
    page: str, tables_page: str, track_page: str, results_page: str = ""
) -> list[str]:
    """Losses and differences of the text that are not in the tables that it points to.

    These are the tables of its section and those that its paragraph links. The number must be in a
    row with a router that the sentence names, or else the paragraph.
    """
    linked_sections = find_sections(tables_page)
    unsupported = []
    for section in find_sections(page).values():
        text = re.sub(r"(?m)^[|`!].*$", "", section)  # without tables, commands and pictures
        for paragraph in re.split(r"\n\n|\n(?=- )", text):
            tables = section
            for anchor in re.findall(r"results-tables\.md#([\w-]+)", paragraph):
                tables += linked_sections[anchor]
            if "](../track/records/edition-1/README.md)" in paragraph:
                tables += track_page
            if "](docs/results.md" in paragraph:
                tables += results_page
            words = re.sub(r"\]\([^)]*\)", "]", paragraph).replace("\n", " ").lower()
            words = words.replace("logits", "identity")
            for sentence in re.split(r"(?<=[.:;]) ", words):
                routers = re.findall(ROUTERS, sentence) or re.findall(ROUTERS, words)
                rows = " ".join(find_rows(tables, routers))
                cells = np.array([np.inf, *re.findall(r"\d+\.\d{2,}", rows)], dtype=float)
                for number in re.findall(r"\d+\.\d{3,4}", sentence):
                    digits = len(number.split(".")[1])
                    is_near = abs(cells - float(number)).min() <= 0.5001 * 10**-digits
                    if not is_near and float(number) != MARGIN:
                        unsupported.append(f"{number} in: {sentence}")
    return unsupported


def test_numbers_of_the_text_are_in_the_tables_that_it_names() -> None:
    tables_page = (results.DOCS / "results-tables.md").read_text()
    track_page = (results.DOCS.parent / "track/records/edition-1/README.md").read_text()
    page = (results.DOCS / "results.md").read_text()
    front_page = find_sections((results.DOCS.parent / "README.md").read_text())
    assert find_unsupported_numbers(page, tables_page, track_page) == []
    assert len(set(re.findall(r"\d+ of 10 seeds", page.replace("\n", " ")))) == 1  # text and table
    text = front_page["which-router-is-best"]
    assert find_unsupported_numbers(text, tables_page, track_page, page) == []
    tables = "## One\n|**kern**|1.6044|\n|**tanh**|1.7123|\n## Two\n|**kern**|1.8055|\n"
    for sentence, unsupported in (
        ("Kern has 1.604, tanh 1.7123.", 0),
        ("Kern has 1.6045.", 1),
        ("Kern is lowest: tanh has 1.6044.", 1),
        ("Kern has 1.8055.", 1),
    ):
        text = f"{sentence} [one](results-tables.md#one)"
        assert len(find_unsupported_numbers(text, tables, "")) == unsupported, sentence


def test_every_study_is_on_a_page() -> None:
    """A run is in a table; an archive or config is named with what became of it."""
    pages = "".join((results.DOCS / name).read_text() for name in results.PAGES)
    patterns = []
    for match in results.COMMAND.finditer(pages):
        patterns += re.findall(r"runs/\S+", match["arguments"])
    named = pages + (results.DOCS / "method.md").read_text()
    for archive in results.RECORDS.glob("*.tar.xz"):
        assert f"{archive.name.split('.')[0]}.toml" in named, archive
        with tarfile.open(archive) as file:
            folders = {
                str(Path(member).parent) for member in file.getnames() if "config.toml" in member
            }
        for folder in folders:
            assert any(fnmatch(folder, pattern) for pattern in patterns), folder
    for config in (results.RECORDS / "../config").glob("*.toml"):
        assert config.name in named, config


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
    ((_, *best_norms, slope, p_value),) = table.lines
    wanted = [2 ** (0.6 + 0.4 * log_top_k) for log_top_k in (1, 3, 5)]
    assert [float(x) for x in best_norms] == pytest.approx(wanted, rel=0.02)
    oracle = stats.ttest_1samp([0.4 + shift for shift in shifts], 0)
    low, high = oracle.confidence_interval()
    assert [float(x) for x in re.findall(r"[-+][\d.]+", slope)] == pytest.approx(
        [0.4, low, high], abs=0.01
    )
    assert float(p_value) == pytest.approx(oracle.pvalue, rel=0.1)


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


def test_leads_by_balancing_equal_numpy(tmp_path):
    """Table, contrast and picture of 3 whole seeds; a fourth lacks one run and does not count."""
    sweep = tomllib.loads(balancing.CONFIG.read_text())["sweep"]
    keys = ", ".join(["model.router", *balancing.BALANCE_KEYS])
    random = np.random.default_rng(5)
    folders = {}
    for row, seed in product(range(16), (300, 301, 302, 303)):
        given = [f"run.seed={seed}"]
        for key, value in zip(keys.split(", "), sweep[keys][row], strict=True):
            given.append(f"{key}={value}")
        folder = tmp_path / f"{row}-{seed}"
        folders[row, seed] = folder
        if (row, seed) != (15, 303):
            make_run(folder, *given, end=random.normal(1.6, 0.02), measured=("val/zero_gates",))
    losses = np.zeros((4, 4, 3))  # balancing, router, seed
    for row, seed in product(range(16), range(3)):
        losses[row // 4, row % 4, seed] = loss_of(folders[row, 300 + seed])
    cells, contrast = balancing.tabulate([str(tmp_path)])
    assert [row[1] for row in cells.lines[::4]] == list(balancing.BALANCINGS)
    for line, losses_of_seeds, kern in zip(
        cells.lines, losses.reshape(16, 3), np.repeat(losses[:, 1], 4, axis=0), strict=True
    ):
        assert line[2] == "3" and line[5] == "5.0"
        half_width = stats.t.ppf(0.975, 2) * losses_of_seeds.std(ddof=1) / 3**0.5
        assert line[3] == f"{losses_of_seeds.mean():.4f} ± {half_width:.4f}"
        assert float(line[6].rstrip("%")) == pytest.approx(100 * losses_of_seeds.mean() + 100, 1e-3)
        if line[0] == "**kern**":
            assert line[4] == ""
            continue
        difference = losses_of_seeds - kern
        half_width = stats.t.ppf(0.975, 2) * difference.std(ddof=1) / 3**0.5
        assert line[4] == f"{difference.mean():+.4f} ± {half_width:.4f}"
    leads = losses[:2, 0] - losses[:2, 1]  # none and balance loss; softmax-renorm minus kern
    low, high = stats.ttest_1samp(leads[0] - leads[1], 0).confidence_interval()
    ((_, none, loss, interval, verdict),) = contrast.lines
    shown = [float(number) for number in re.findall(r"[-+]\d\.\d+", interval)]
    assert shown == pytest.approx([(leads[0] - leads[1]).mean(), low, high], abs=6e-5)
    assert none.startswith(f"{leads[0].mean():+.4f}") and loss.startswith(f"{leads[1].mean():+.4f}")
    assert contrast.columns[0] == "3 of 10 seeds" and verdict == "**not finished**"
    study = balancing.read_study([str(tmp_path)])._replace(n_planned=3)
    (line,) = balancing.tabulate_contrast(study).lines
    judged = "undecided"
    if low > 0 or high < 0:
        judged = "higher" if low > 0 else "lower"
    assert line[-1] == f"**{judged}**"
    (axes,) = balancing.plot([str(tmp_path)]).axes
    assert axes.get_title() == "3 of 10 seeds, not finished"
    for router, line in enumerate(axes.containers):
        assert line[0].get_ydata() == pytest.approx(losses[:, router].mean(axis=1))
    shutil.rmtree(folders[0, 300])
    shutil.rmtree(folders[1, 301])
    shutil.rmtree(folders[2, 302])
    with pytest.raises(ValueError, match="no seed of form_balance.toml has all its runs"):
        balancing.tabulate([str(tmp_path)])
