"""The table of a track, in track/README.md and in short in README.md, and its picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.files import write_atomic
from common.text import markdown_table
from scripts.report.style import save_figure, style
from scripts.track.protocol import BALANCE, REPO_ROOT, Protocol
from scripts.track.record import find_diverged, judged_runs, task_of
from scripts.track.verdicts import Row, describe_judgement

if TYPE_CHECKING:  # it may not be installed
    from matplotlib.figure import Figure

PAGE = REPO_ROOT / "track/README.md"
FRONT_PAGE = REPO_ROOT / "README.md"


def build_tables(protocol: Protocol, rows: Sequence[Row]) -> dict[Path, str]:
    """{page: its table as Markdown}."""
    judged = ["router", "loss", f"minus {protocol.reference}", f"minus {protocol.second}", "speed-up"]
    measured = ["gate norm", "load imbalance", "dead experts", "lr", "router lr", "w_out lr", "balance", "diverged"]
    full = markdown_table([*judged, *measured], [format_verdicts(protocol, row) + format_measures(row) for row in rows])
    diverged = [f"{row.record['name']} {task_of(run).name}" for row in rows for run in find_diverged(row.record)]
    if diverged:
        full += f"\n\nDiverged: {', '.join(diverged)}."
    return {FRONT_PAGE: markdown_table(judged, [format_verdicts(protocol, row) for row in rows]), PAGE: full}


def format_verdicts(protocol: Protocol, row: Row) -> list[str]:
    """The columns that are on both pages."""
    names = protocol.reference, protocol.second
    against = [describe_judgement(row.against[name]) if name in row.against else "" for name in names]
    loss = f"{row.mean:.4f}" if math.isfinite(row.mean) else "diverged"
    return [row.record["name"], loss, *against, format_speedup(protocol, row)]


def format_speedup(protocol: Protocol, row: Row) -> str:
    """`1.21 [1.05, 1.40]`."""
    if row.speedup is None:
        return "1" if row.record["name"] == protocol.reference else ""
    return "{} [{}, {}]".format(*row.speedup)


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
    return [
        "" if math.isnan(norms[0]) else f"{norms[0]:.2f} → {norms[1]:.2f}",
        mean("load_imbalance", ".1f"),
        mean("dead_experts", ".1f"),
        *(f"{settings[f'optim.{key}']:g}" for key in ("lr", "router_lr_ratio", "expert_out_lr_ratio")),
        balance[0] if balance else "none",
        str(record["summary"]["diverged"]),
    ]


def write_between_marks(page: Path, text: str) -> None:
    """Replace what is between the marks of a page's table. Raises ValueError if it has none."""
    begin, end = "<!-- track: begin -->\n", "<!-- track: end -->"
    head, found, rest = page.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} lacks the lines {begin.strip()} and {end} that the table goes between")
    write_atomic(page, f"{head}{begin}{text}\n{end}{tail}")


def plot_differences(protocol: Protocol, rows: Sequence[Row]) -> "Figure":
    """Each entry's difference from the reference with its 95% interval, and the margin of equivalence."""
    from matplotlib.figure import Figure

    judged = [row for row in reversed(rows) if protocol.reference in row.against]
    drawn = [(row, row.against[protocol.reference].difference) for row in judged]
    drawn = [(row, difference) for row, difference in drawn if math.isfinite(difference.mean)]
    figure = Figure((8, 1.2 + 0.32 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    margin = protocol.margin
    axes.axvspan(-margin, margin, color="black", alpha=0.07, label=f"equivalent: within ±{margin:g}")
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (row, difference) in enumerate(drawn):
        look = style(row.record["name"]) | {"linestyle": "none"}
        axes.errorbar([difference.mean], [place], xerr=[difference.half_width], capsize=3, **look)
    axes.set_yticks(range(len(drawn)), [row.record["name"] for row, _ in drawn])
    axes.set_xlabel(f"validation loss minus {protocol.reference}'s, nats per byte, 95% interval")
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    return figure


def write_tables(protocol: Protocol, rows: Sequence[Row]) -> Path:
    """Write both tables and the picture; returns the picture's path."""
    for page, table in build_tables(protocol, rows).items():
        write_between_marks(page, table)
    picture = PAGE.parent / f"{protocol.name}.png"
    save_figure(plot_differences(protocol, rows), picture)
    return picture
