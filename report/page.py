"""The page of a report: its text, tables and pictures, as Markdown and as one HTML file.

A page is a list of blocks: ("h1" or "h2", text), ("p", text), ("list", [text]), ("table", head,
rows) and ("picture", file name, caption). Text may use **bold** and `code`; HTML in it, such as in
the name of a folder, is escaped.
"""

import base64
import html
import re
import tomllib
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from common.files import write_atomic
from common.text import escape_html, markdown_table, plural
from report import pictures, tables
from report.comparisons import MIN_SEEDS, choose_best, compare_setting
from report.paper import read_paper_losses
from report.runs import load_evaluated
from report.settings import Setting, group_runs

TEMPLATE = Path(__file__).with_name("page.html")  # its policy allows nothing from outside the file
Block = tuple[Any, ...]
TEXT = tomllib.loads(Path(__file__).with_name("text.toml").read_text("utf-8"))


@dataclass
class Report:
    """What a report is of, and what was asked."""

    settings: list[Setting]
    notes: list[str]
    baseline: str = "kern"
    experiment: str | None = None
    choose_on: Sequence[int] = ()
    margin: float = 0.0


def read_report(args: Namespace) -> Report:
    """What the arguments of `python -m scripts.report` name.

    Raises ValueError if these are no runs, or not to be compared, or an argument does not fit them.
    """
    if args.choose_on and not args.over:
        raise ValueError("--choose-on chooses a value of a key: name the key with --over")
    runs, left_out = load_evaluated(args.runs)
    settings, notes = group_runs(runs, args.over)
    for setting in settings if args.experiment else ():
        setting.printed = read_paper_losses(args.experiment, setting.values)
    names = {
        name for setting in settings for arm in setting.arms for name in (arm.router, arm.label)
    }
    if args.baseline not in {*names, "kern"}:
        raise ValueError(f"--baseline {args.baseline!r}: the runs have {'; '.join(sorted(names))}")
    return Report(
        settings, notes + left_out, args.baseline, args.experiment, args.choose_on, args.margin
    )


def write_report(report: Report, folder: Path, before: Sequence[Block] = ()) -> list[Block]:
    """Write report.md, report.html and their pictures into `folder`; `before`: blocks below the title.

    Returns the blocks with notes, tables and pictures. Raises OSError if it cannot be written.
    """
    blocks: list[Block] = (
        [("list", [f"**Note** {line}." for line in report.notes])] if report.notes else []
    )
    for setting in report.settings:
        blocks += format_setting(report, setting, folder)
    explained: list[Block] = []
    if runs := [run for setting in report.settings for run in setting.runs]:
        explained += [
            ("h2", "How to read the verdicts"),
            ("p", TEXT["verdicts"].format(min_seeds=MIN_SEEDS)),
        ]
        explained += (
            [("p", TEXT["equivalent"].format(margin=report.margin))] if report.margin else []
        )
        rows = [*map(tables.summarize_run, runs)]
        explained += [("h2", "Runs"), ("table", tables.RUN_COLUMNS, rows), ("p", TEXT["runs"])]
    write_page(plural(len(runs), "run"), [*before, *blocks, *explained], folder)
    return blocks


def format_setting(report: Report, setting: Setting, folder: Path) -> list[Block]:
    """The section of a setting: its tables and pictures."""
    comparisons = compare_setting(setting, report.baseline, report.margin)
    blocks: list[Block] = [("h2", setting.label or "Loss"), ("p", tables.describe_setting(setting))]
    if report.experiment:
        text = TEXT["paper" if setting.printed else "not_in_paper"]
        blocks.append(("p", text.format(experiment=report.experiment)))

    def add_picture(name: str, figure: Figure | None, caption: str) -> None:
        if figure is not None:
            file = re.sub(r"[^A-Za-z0-9._]+", "-", f"{setting.label}-{name}").strip("-") + ".png"
            figure.savefig(folder / file)
            blocks.append(("picture", file, caption))

    add_picture("loss", pictures.plot_loss(setting, report.baseline), TEXT["losses"])
    blocks.append(("table", *tables.build_loss_table(setting)))
    if comparisons:
        xs = setting.xs if setting.key else ()
        blocks.append(("table", *tables.build_pairs_table(setting, comparisons, xs)))
        if few := [pair.left.runs[-1] for pair in comparisons if pair.difference.seeds < MIN_SEEDS]:
            name = few[0].config.run.name.removesuffix(f"-seed{few[0].seed}")
            more = {"min_seeds": MIN_SEEDS, "run": few[0], "name": name, "seed": few[0].seed + 1}
            blocks.append(("list", [TEXT["seeds"].format(**more)]))
    if report.choose_on:
        best = tables.build_pairs_table(
            setting, choose_best(setting, report.choose_on, report.margin)
        )
        blocks += [
            ("table", *best),
            ("p", TEXT["best"].format(seeds=", ".join(map(str, report.choose_on)))),
        ]
    head, rows = tables.build_measure_table(setting)
    blocks += [("table", head, rows)] if rows else []
    add_picture("measures", pictures.plot_measures(setting), TEXT["measures"])
    return blocks


def write_page(title: str, blocks: list[Block], folder: Path) -> None:
    """Write report.md and report.html into `folder`, where the pictures are already.

    Raises OSError.
    """
    blocks = [("h1", title), *blocks]
    body = "\n".join(_format_html(folder, *block) for block in blocks)
    write_atomic(
        folder / "report.md", "\n\n".join(format_markdown(*block) for block in blocks) + "\n"
    )
    page = Template(TEMPLATE.read_text()).substitute(title=html.escape(title), body=body)
    write_atomic(folder / "report.html", page)


def format_markdown(kind: str, *parts: Any) -> str:
    """One block as Markdown."""
    if kind == "list":
        return "\n".join(f"- {escape_html(text)}" for text in parts[0])
    if kind == "table":
        return markdown_table(*parts)
    *name, text = parts
    before = (
        f"![{escape_html(text)}]({name[0]})\n\n"
        if name
        else {"h1": "# ", "h2": "## "}.get(kind, "")
    )
    return before + escape_html(text)


def _format_html(folder: Path, kind: str, *parts: Any) -> str:
    if kind == "list":
        return f"<ul>{_join('li', parts[0])}</ul>"
    if kind == "table":
        head, rows = parts
        body = "\n".join(f"<tr>{_join('td', row)}</tr>" for row in rows)
        return (
            f"<table><thead><tr>{_join('th', head)}</tr></thead><tbody>\n{body}\n</tbody></table>"
        )
    if kind == "picture":
        name, text = parts
        data = base64.b64encode((folder / name).read_bytes()).decode()
        picture = f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
        return f"<figure>{picture}{_join('figcaption', [text])}</figure>"
    return _join(kind, parts)


def _join(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{_mark(text)}</{tag}>" for text in texts)


def _mark(text: str) -> str:
    """HTML with bold and code; an interval or a deviation stays on one line."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    return re.sub(r"\[[^] ]*, [^] ]*\]|± ", lambda number: number[0].replace(" ", "\u00a0"), text)
