"""studies/: numbers of docs/results*.md computed from the records in another way."""

import json
import re
import shutil
import tarfile
import tomllib
from collections import defaultdict
from fnmatch import fnmatch
from functools import partial
from itertools import permutations, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_runs import load_groups, loss_of, make_curves, make_run, make_seeds
from runs import all_logits
from scipy import stats

from model import GPT
from studies import balancing, best, coordinates, effects, growth, results
from studies import product as studies_product

MARGIN = 0.012  # nats per byte; the text may name it anywhere
ROUTERS = (
    r"softmax-renorm|softmax|kern|sigmoid|tanh|identity"  # and their variants, such as kern-hash
)


class Run(NamedTuple):
    """A run of an archive, from its files alone."""

    folder: str  # runs/NAME
    settings: dict[str, Any]  # {section.key: value}
    losses: dict[int, float]  # {step: validation loss}


def read_archive(archive: Path) -> list[Run]:
    """The runs of an archive."""
    settings: dict[str, dict] = {}
    losses: dict[str, dict] = {}
    with tarfile.open(archive) as file:
        for member in file:
            folder, _, name = member.name.rpartition("/")
            if name == "config.toml":
                config = tomllib.loads(file.extractfile(member).read().decode())
                settings[folder] = {}
                for section, keys in config.items():
                    settings[folder] |= {f"{section}.{key}": x for key, x in keys.items()}
            elif name == "metrics.jsonl":
                losses[folder] = {}
                for text in file.extractfile(member):
                    if b'"val/loss"' in text:
                        line = json.loads(text)
                        losses[folder][line["step"]] = line["val/loss"]
    return [Run(folder, settings[folder], losses[folder]) for folder in settings]


def find_groups(runs: list[Run], key: str | None, x: str) -> list[tuple[str, dict[int, float]]]:
    """(router, {seed: loss}) of runs that differ by nothing else, where `key` (None: the step) is
    `x`.
    """
    groups: dict[tuple, dict] = defaultdict(dict)
    shared = set.intersection(*(set(run.settings) for run in runs))  # older runs lack newer keys
    for run in runs:
        others = {}
        for name, value in run.settings.items():
            if name in shared and not name.startswith(("run.", "log.")) and name != key:
                others[name] = value
        if key is None:
            loss = run.losses.get(int(x.replace(",", "")))
        else:
            loss = run.losses[max(run.losses)] if run.settings[key] == float(x) else None
        if loss is not None:
            group = run.settings["model.router"].split(",")[0], json.dumps(others, sort_keys=True)
            groups[group][run.settings["run.seed"]] = loss
    return [(router, losses) for (router, _), losses in groups.items()]


def list_differences(groups: list[tuple[str, dict[int, float]]]) -> set[tuple[str, str]]:
    """(router, mean difference over seeds to another group with Student's interval)."""
    shown = set()
    for (router, one), (_, other) in permutations(groups, 2):
        seeds = one.keys() & other.keys()
        differences = [one[seed] - other[seed] for seed in seeds]
        if len(differences) > 1:
            mean = fmean(differences)
            low, high = stats.ttest_1samp(differences, 0).confidence_interval()
            shown.add((router, f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"))
    return shown


def read_tables(text: str) -> list[list[list[str]]]:
    """The cells of each table of a page, without those of the line below its head."""
    tables = []
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        head, _, *rows = block.replace("*", "").splitlines()
        tables.append([line[1:-1].split("|") for line in (head, *rows)])
    return tables


def collect_cells(text: str) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """{("means" or "differences", x): (router, cell)} of all tables below a command."""
    shown = defaultdict(list)
    for head, *rows in read_tables(text):
        kind = {"seeds": "means", "second": "differences"}.get(head[1])
        for column, x in enumerate(head):
            if kind and re.fullmatch(r"[\d.,]+", x):
                shown[kind, x] += [(row[0].split(",")[0], row[column]) for row in rows]
    return shown


def test_tables_are_computed_from_the_runs_losses() -> None:
    """Every mean and every interval of differences of scripts.report's tables.

    Cells are compared by column and router, so no code is needed that names the rows.
    """
    runs = []
    for archive in results.RECORDS.glob("*.tar.xz"):
        runs += read_archive(archive)
    n_mean = n_interval = 0
    for name in results.PAGES:
        page = (results.DOCS / name).read_text()
        for arguments, text in re.findall(
            r"(?m)^`python -m scripts\.report (.+)`\n((?:\n*\|.*\n)+)", page
        ):
            patterns = re.findall(r"runs/\S+", arguments)
            key = re.search(r"--over (\S+)", arguments)
            chosen = []
            for run in runs:
                if any(fnmatch(run.folder, pattern) for pattern in patterns):
                    chosen.append(run)
            shown = collect_cells(text)
            for (kind, x), labelled in shown.items():
                cells = [cell for cell in labelled if cell[1]]
                groups = find_groups(chosen, key and key[1], x)
                if kind == "means":
                    wanted = []
                    for router, losses in groups:
                        wanted.append((router, f"{fmean(losses.values()):.4f}"))
                    assert sorted(cells) == sorted(wanted), (arguments, x)
                    n_mean += len(cells)
                else:
                    assert set(cells) <= list_differences(groups), (arguments, x)
                    n_interval += len(cells)
    assert n_mean >= 300 and n_interval >= 40


def test_pairs_are_listed_from_three_seeds_of_one_pair_on(tmp_path) -> None:
    few = make_seeds(tmp_path, {"kern": 2.0, "softmax": 2.1}, seeds=2)
    more = make_seeds(tmp_path / "more", {"tanh": 2.2}, seeds=3)
    third = make_run(tmp_path / "kern2", "run.seed=2", end=2.0)
    for runs, titles in ((few, set()), ([*few, *more, third], {"Pairs"})):
        made = results.tabulate_report([str(run) for run in runs])
        assert {table.title for table in made} - {"Losses", "Measures"} == titles


@pytest.mark.integration  # each number is compared with the records above
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
            if "track/records/edition-1/README.md)" in paragraph:
                tables += track_page
            if "](track/README.md)" in paragraph:
                tables += (results.DOCS.parent / "track/README.md").read_text()
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
    """In a page with the first table of one archive."""
    text = (results.DOCS / "results-tables.md").read_text()
    command = "`python -m scripts.report runs/w_out-* "
    right = command + text.split(command)[1].split("\n#")[0]
    monkeypatch.setattr(results, "DOCS", tmp_path)
    monkeypatch.setattr(results, "PAGES", ["results-tables.md"])
    shutil.copy(results.RECORDS / "w_out.tar.xz", tmp_path)
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    page = tmp_path / "results-tables.md"
    page.write_text(right.replace("1.8398", "1.8399"))
    assert page.read_text() != right
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
    (all_choose,) = best.compare_best(group, [])
    assert all_choose.left.label == "kern, gate_norm 8"
    assert all_choose.difference.seeds == 6


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
        assert line[2] == "3" and line[5:7] == ["2.0", "5.0"]
        half_width = stats.t.ppf(0.975, 2) * losses_of_seeds.std(ddof=1) / 3**0.5
        assert line[3] == f"{losses_of_seeds.mean():.4f} ± {half_width:.4f}"
        assert float(line[7].rstrip("%")) == pytest.approx(100 * losses_of_seeds.mean() + 100, 1e-3)
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
    for seed in (300, 301, 302):  # all of one variant
        shutil.rmtree(folders[15, seed])
    with pytest.raises(ValueError, match="no seed of form_balance.toml has all its runs"):
        balancing.tabulate([str(tmp_path)])


def test_sizes_over_widths(monkeypatch, capsys):
    """First values by a plain forward pass; then the table and the picture."""
    small = {"n_embd": 16, "block_size": 8, "n_expert": 4, "top_k": 2, "expert_hidden": 4}
    monkeypatch.setattr(coordinates, "BASE", coordinates.BASE.model_copy(update=small))
    for name, value in {"N_STEP": 2, "N_SEQUENCE": 2, "LEARNED": 1}.items():
        monkeypatch.setattr(coordinates, name, value)
    figures, drawn = [], []
    monkeypatch.setattr(coordinates.Figure, "savefig", lambda own, *_, **__: figures.append(own))
    optimizers = []
    build = coordinates.build_optimizer
    keep = lambda *args: optimizers.append(build(*args)) or optimizers[-1]  # noqa: E731
    monkeypatch.setattr(coordinates, "build_optimizer", keep)
    draw = coordinates.draw
    monkeypatch.setattr(coordinates, "draw", lambda *args: (drawn.append(args), draw(*args)))
    argv = ["--widths", "16", "32", "--routers", "kern", "--seeds", "2", "--picture", "x.png"]
    assert coordinates.main(argv) in (0, None)
    ((sizes, widths, _),) = drawn
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert {group["lr_ratio"] for group in groups} > {1.0}
    for group in groups:
        assert group["lr"] == pytest.approx(3e-3 * group["lr_ratio"])
    for name, values in sizes["none"].items():
        assert values.shape == (2, 3) and np.all(values[:, 0] != values[:, 1])
        assert sizes["mup"][name][1, 2] != pytest.approx(values[1, 2], rel=1e-4), name

    text = torch.tensor(list(coordinates.TEXT.read_bytes()))
    starts = torch.randint(
        len(text) - 8, (1, 2, 1), generator=torch.Generator().manual_seed(-1)
    ).flatten()
    probe = torch.stack([text[start : start + 8] for start in starts])

    def keep_gates(gates, _router, _inputs, routing):
        gates.append(routing.weights)

    squares = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        wide = {"router": "kern", "n_embd": 32, "n_head": 4, "expert_hidden": 8}
        model = GPT(coordinates.BASE.model_copy(update=wide))
        gates: list[torch.Tensor] = []
        for block in model.blocks:
            block.mlp.router.register_forward_hook(partial(keep_gates, gates))
        with torch.no_grad():
            logits = all_logits(model, probe)
        squares.append([logits.square().mean().item(), torch.cat(gates).square().mean().item()])
    by_hand = np.sqrt(np.mean(squares, axis=0))
    found = [sizes["none"][name][1, 0] for name in ("logits", "gates")]
    assert found == pytest.approx(by_hand, rel=1e-5)

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    printed = {tuple(row[1:-2]): row[-2:] for row in rows}
    for name, values in sizes["mup"].items():
        spread = (values.max(0) / values.min(0)).max()
        assert printed["adamw", *name.split()][0] == f"{spread:.2f}"
    assert ("muon", "gates") in printed
    learned = sizes["mup"]["logits"][:, 1:]
    spread = (learned.max(0) / learned.min(0)).max()
    assert printed["adamw", "logits,", "from", "step", "1"][0] == f"{spread:.2f}"
    panels = np.array(figures[0].axes).reshape(2, -1)
    for transfer, row in zip(("mup", "none"), panels, strict=True):
        for axes, values in zip(row, sizes[transfer].values(), strict=True):
            assert [list(line.get_ydata()) for line in axes.lines] == values.T.tolist()
            assert list(axes.lines[0].get_xdata()) == widths
    assert coordinates.main(["--widths", "12"]) == 2
    assert "--widths 12: expected a multiple of 8" in capsys.readouterr().err


def test_losses_over_the_product_of_norm_and_rate(tmp_path, monkeypatch):
    """A line of each norm: x is norm times the key, y the mean over seeds; the last is filled."""
    runs = []
    for norm, ratio, seed in product((2, 4), (0.5, 1, 2), range(2)):
        given = [f"model.gate_norm={norm}", f"optim.expert_out_lr_ratio={ratio}"]
        given.append(f"run.seed={seed}")
        folder = tmp_path / f"{norm}-{ratio}-{seed}"
        runs.append(make_run(folder, *given, end=2 + norm / 10 + ratio / 100, noise=0.01))
    argv = [*map(str, runs), "--over", "optim.expert_out_lr_ratio"]
    (axes,) = studies_product.plot(argv).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["kern, norm 2", "kern, norm 4"]
    for norm, label in ((2, "kern, norm 2"), (4, "kern, norm 4")):
        means = []
        for ratio in (0.5, 1, 2):
            ends = [loss_of(tmp_path / f"{norm}-{ratio}-{seed}") for seed in range(2)]
            means.append(np.mean(ends))
        assert list(lines[label].get_xdata()) == [norm * 0.5, norm, norm * 2]
        assert list(lines[label].get_ydata()) == pytest.approx(means)
    styles = [(line.get_linestyle(), line.get_markerfacecolor()) for line in lines.values()]
    assert styles == [(":", "white"), ("-", lines["kern, norm 4"].get_color())]
    assert axes.get_xlabel() == "initial gate norm × optim.expert_out_lr_ratio"
    assert axes.get_xscale() == "log"
