"""The table of a track, in track/README.md and in short in README.md, and its picture."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.files import write_atomic
from common.text import markdown_table
from scripts.report.style import style
from scripts.track.protocol import BALANCE, REPO_ROOT, Protocol
from scripts.track.record import judged_runs, task_of
from scripts.track.verdicts import Row

if TYPE_CHECKING:  # it may not be installed
    from matplotlib.figure import Figure

PAGE = REPO_ROOT / "track/README.md"
FRONT_PAGE = REPO_ROOT / "README.md"


def build_verdicts(protocol: Protocol, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the columns that are on both pages."""
    names = protocol.reference, protocol.second
    cells = []
    for row in rows:
        loss = f"{row.mean:.4f}" if math.isfinite(row.mean) else "diverged"
        against = [row.against.get(name) for name in names]
        words = [f"{'' if math.isinf(one.mean) else one} **{one.verdict}**".strip() if one else "" for one in against]
        speedup = "{} [{}, {}]".format(*row.speedup) if row.speedup else ""
        cells.append([row.record["name"], loss, *words, "1" if row.record["name"] == names[0] else speedup])
    return ["router", "loss", *(f"minus {name}" for name in names), "speed-up"], cells


def build_tables(protocol: Protocol, rows: Sequence[Row]) -> dict[Path, str]:
    """{page: its table as Markdown}."""
    head, cells = build_verdicts(protocol, rows)
    measured = ["gate norm", "load imbalance", "dead experts", "lr", "router lr", "w_out lr", "balance", "diverged"]
    more = [[*verdicts, *format_measures(row)] for verdicts, row in zip(cells, rows, strict=True)]
    full = markdown_table([*head, *measured], more, gap="")
    runs = [(row.record["name"], run) for row in rows for run in row.record["runs"]]
    if diverged := [f"{name} {task_of(run).name}" for name, run in runs if run["loss"] is None]:
        full += f"\n\nDiverged: {', '.join(diverged)}."
    short = [[re.sub(r" \[.*?\]", "", cell) for cell in row] for row in cells]  # without intervals
    return {FRONT_PAGE: markdown_table(head, short, gap=""), PAGE: full}


def format_measures(row: Row) -> list[str]:
    """Gate norm at the start and end, load imbalance and dead experts (means of the judged runs), and the settings."""
    record = row.record
    runs = [run for run in judged_runs(record).values() if run["loss"] is not None]

    def mean(name: str, form: str) -> str:
        values = [run[name] for run in runs if name in run]
        return format(float(np.mean(values)), form) if values else ""

    norms = np.mean([run["gate_norm"] for run in runs if "gate_norm" in run] or [[math.nan] * 2], axis=0)
    settings: dict[str, Any] = record["summary"]["settings"]
    balance = [f"{text} {settings[key]:g}" for key, text in BALANCE.items() if key in settings]
    if record.get("options", {}).get("train.bias_update") == "quantile":
        balance = ["quantile"]
    routed = not math.isnan(norms[0])  # all but dense, which has no use for most settings
    return [
        f"{norms[0]:.2f} → {norms[1]:.2f}" if routed else "",
        mean("load_imbalance", ".1f"),
        mean("dead_experts", ".1f"),
        f"{settings['optim.lr']:g}",
        *(f"{settings[f'optim.{key}']:g}" if routed else "" for key in ("router_lr_ratio", "expert_out_lr_ratio")),
        (balance[0] if balance else "none") if routed else "",
        str(record["summary"]["diverged"]),
    ]


def plot_differences(protocol: Protocol, rows: Sequence[Row]) -> "Figure":
    """Each entry's difference from the reference with its 95% interval, and the margin of equivalence."""
    from matplotlib.figure import Figure

    judged = {row.record["name"]: row.against.get(protocol.reference) for row in reversed(rows)}
    drawn = {name: difference for name, difference in judged.items() if difference and math.isfinite(difference.mean)}
    figure = Figure((8, 1.2 + 0.32 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    equivalent = f"equivalent: within ±{protocol.margin:g}"
    axes.axvspan(-protocol.margin, protocol.margin, color="black", alpha=0.07, label=equivalent)
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (name, difference) in enumerate(drawn.items()):
        look = style(name) | {"linestyle": "none"}
        axes.errorbar([difference.mean], [place], xerr=[difference.half_width], capsize=3, **look)
    axes.set_yticks(range(len(drawn)), drawn)
    axes.set_xlabel(f"validation loss minus {protocol.reference}'s, nats per byte, 95% interval")
    axes.legend(fontsize=8, loc="upper right")
    axes.grid(axis="x", alpha=0.3)
    return figure


def write_tables(protocol: Protocol, rows: Sequence[Row]) -> Path:
    """Write both tables, each between the marks of its page, and the picture; returns the picture's path.

    Raises:
        ValueError: a page lacks the marks.
    """
    begin, end = "<!-- track: begin -->\n", "<!-- track: end -->"
    for page, table in build_tables(protocol, rows).items():
        head, found, rest = page.read_text().partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} lacks the lines {begin.strip()} and {end} that the table goes between")
        write_atomic(page, f"{head}{begin}{table}\n{end}{tail}")
    picture = PAGE.parent / f"{protocol.name}.png"
    plot_differences(protocol, rows).savefig(picture)
    return picture
