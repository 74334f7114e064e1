"""Write the tables and pictures of docs/results.md and docs/results-tables.md anew from studies/records.

    python -m studies.results              writes them
    python -m studies.results --check      writes nothing; fails if a table differs

Below a line `python -m scripts.report …` a page has the tables of this report: losses as means over
seeds; other measures, without --over, of at most six arms; with three seeds, the verdicts on pairs
with the baseline, one family; and those on best values (--choose-on). A picture there is the
report's first.
"""

import re
import shlex
import tarfile
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from common.command import build_parser, command, run_command
from common.files import write_atomic
from common.text import markdown_table
from report import comparisons, tables
from report.__main__ import make_parser
from report.page import Report, read_report
from report.pictures import plot_loss, plot_product
from report.settings import Arm, Setting
from report.tables import Table
from router import find_spec

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = Path(__file__).with_name("records")
PAGES = ("results.md", "results-tables.md")
TOP_K = "model.top_k"
COMMAND = re.compile(
    r"^(`python -m scripts\.report ([^`]+)`\n)(?:\n!\[[^]]*\]\((.+)\)\n|((?:\n*\|.*\n)*))",
    re.MULTILINE,
)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages and pictures, or compare the pages."""
    parser = build_parser("studies.results", __doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a table differs"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for archive in sorted(RECORDS.glob("*.tar.xz")):
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")  # runs/NAME, without their weights
        for page in PAGES:
            before = (DOCS / page).read_text()
            text = COMMAND.sub(
                partial(fill_command, folder=Path(folder), draw=not args.check), before
            )
            if args.check and text != before:
                raise ValueError(
                    f"docs/{page} differs from studies/records: run without --check, then git diff"
                )
            if not args.check:
                write_atomic(DOCS / page, text)
                print(f"wrote docs/{page}")


def fill_command(match: re.Match, folder: Path, draw: bool) -> str:
    """The tables of a COMMAND of a page, from the runs below `folder`; its picture is written anew if `draw`."""
    line, arguments, picture, _ = match.groups()
    if not picture:
        return f"{line}\n{format_tables(find_report(arguments, folder))}\n"
    if draw:
        report = find_report(arguments, folder)
        setting = report.settings[0]
        # over their product with the gate norm
        of_rates = setting.key == "optim.expert_out_lr_ratio"
        figure = plot_product(setting) if of_rates else plot_loss(setting, report.baseline)
        assert figure is not None
        figure.savefig(DOCS / picture)
    return match[0]


def find_report(arguments: str, folder: Path) -> Report:
    """The report that a command's `arguments` name, of runs below `folder`.

    Raises ValueError if a pattern of theirs fits no run.
    """
    words = []
    for word in shlex.split(arguments):
        found = sorted(map(str, folder.glob(word))) if word.startswith("runs/") else [word]
        if not found:
            raise ValueError(f"{word}: studies/records has no such run")
        words += found
    return read_report(make_parser().parse_args(words))


def format_tables(report: Report) -> str:
    """Losses and verdicts of each setting, as Markdown."""
    made = []
    for setting in report.settings:
        head, rows = tables.build_loss_table(setting)
        means = [([setting.label or head[0], *head[1:]], rows)]
        means += (
            [] if setting.key or len(setting.arms) > 6 else [tables.build_measure_table(setting)]
        )
        made += [
            (head, [[cell.split(" ±")[0] for cell in row] for row in rows]) for head, rows in means
        ]
        named = comparisons.find_pairs(setting, report.baseline)
        named = [
            (left, right) for left, right in named if report.baseline in (right.router, right.label)
        ]
        pairs = comparisons.judge_pairs(setting, named, report.margin)
        if any(pair.difference.seeds >= comparisons.MIN_SEEDS for pair in pairs):
            made.append(tables.build_pairs_table(setting, pairs, setting.xs if setting.key else ()))
        if report.choose_on:
            best = comparisons.choose_best(setting, report.choose_on, report.margin)
            made.append(tables.build_pairs_table(setting, best))
        made += tabulate_effects(setting, report.margin)
    if len({setting.values[TOP_K] for setting in report.settings}) > 2:
        made.append(tabulate_growth(report.settings))
    return "\n\n".join(markdown_table(*table, gap="") for table in made).replace(" ± ", "±")


def tabulate_effects(setting: Setting, margin: float) -> list[Table]:
    """What each part of kern's formula adds to the loss: the mean of the arms with it minus that of those without it.

    One table if the arms are the eight formulas with and without each part, none otherwise.
    """
    specs = [spec for arm in setting.arms if (spec := find_spec(arm.router))]
    has = np.array([[spec.pre == "l2 over all", spec.phi == "relu", spec.gamma] for spec in specs])
    if len(has) != 8 or len(np.unique(has, axis=0)) != 8:
        return []
    cells = [cell for arm in setting.arms for cell in arm.cells.values()]
    seeds = sorted(set.intersection(*map(set, cells)))
    # (8, S)
    losses = np.array(
        [[setting.evaluation(cell[seed])["val/loss"] for seed in seeds] for cell in cells]
    )
    effects = [
        comparisons.estimate_difference(losses[part].mean(0) - losses[~part].mean(0))
        for part in has.T
    ]
    rows = [
        [
            f"**{part}**",
            str(effect),
            f"{effect.seeds} seeds",
            f"**{effect.verdict}**",
            f"{effect.p:.2g}",
        ]
        for part, effect in zip(
            ("l2 norm", "ReLU", "γ"), comparisons.judge_family(effects, margin), strict=True
        )
    ]
    return [
        (
            [
                "part of the formula",
                "with minus without, 95%",
                "interval over",
                "with is",
                "Holm's p",
            ],
            rows,
        )
    ]


def tabulate_growth(settings: Sequence[Setting]) -> Table:
    """The best gate norm of each router in settings that differ in top_k, and the slope of its logarithm on log top_k.

    A seed's best norm is the vertex of the parabola through its lowest loss and the neighbours,
    over log norm; the end of the range where the loss is lowest there. The slope, by least squares,
    is ½ if the best norm grows as √top_k.
    """
    settings = sorted(settings, key=lambda setting: setting.values[TOP_K])
    tops = np.log2([setting.values[TOP_K] for setting in settings])
    rows = []
    for router in [arm.router for arm in settings[0].arms]:
        arms = [next(arm for arm in setting.arms if arm.router == router) for setting in settings]
        seeds = sorted(
            set.intersection(*(set(cell) for arm in arms for cell in arm.cells.values()))
        )
        best = np.array(
            [
                [find_best(setting, arm, seed) for seed in seeds]
                for setting, arm in zip(settings, arms, strict=True)
            ]
        )
        slope = comparisons.estimate_difference(np.polyfit(tops, best, 1)[0])
        rows.append([f"**{router}**", *(f"{2 ** logs.mean():.2f}" for logs in best), str(slope)])
    return [
        "best norm",
        *(f"top_k {setting.values[TOP_K]}" for setting in settings),
        "slope, 95%",
    ], rows


def find_best(setting: Setting, arm: Arm, seed: int) -> float:
    """log2 of the value of the key at which the loss of a seed is lowest."""
    xs = np.log2(sorted(arm.cells))
    losses = np.array(
        [setting.evaluation(arm.cells[x][seed])["val/loss"] for x in sorted(arm.cells)]
    )
    i = int(losses.argmin())
    if i in (0, len(xs) - 1):
        return float(xs[i])
    square, linear, _ = np.polyfit(xs[i - 1 : i + 2], losses[i - 1 : i + 2], 2)
    return float(-linear / (2 * square))


if __name__ == "__main__":
    run_command(main)
