"""Judge the entries of a track; write the table in track/README.md and README.md, and a picture.

Entries are compared by seed: Student's t over the differences, corrected by Holm's over the table.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files import write_atomic
from common.text import Table, markdown_table
from report.comparisons import Difference, estimate_difference, judge_family
from report.style import choose_style
from track.protocol import BALANCE, REPO_ROOT, Protocol
from track.record import Record, judged_runs, losses_of, options_of

PAGE = REPO_ROOT / "track/README.md"
FRONT_PAGE = REPO_ROOT / "README.md"
MEASURES = [
    "gate norm",
    "load imbalance",
    "dead experts",
    "lr",
    "router lr",
    "w_out lr",
    "balance",
    "diverged",
]


class JudgedEntry(NamedTuple):
    """An entry of the table."""

    record: Record
    mean: float  # loss of the judged seeds, nats per byte; infinite if one diverged
    # {name: difference} from the reference and the second router, without itself
    against: dict[str, Difference]
    speedup: list[str] | None  # middle, low, high, see `effective_speedup`; None: unknown


def losses_by_seed(record: Record, round: str = "judge") -> dict[int, float]:
    """Return {seed: loss} of the runs of a round; infinite where the run diverged."""
    return {task.seed: loss for task, loss in losses_of(record).items() if task.round == round}


def subtract(entry: Record, other: Record) -> Difference:
    """Estimate the mean difference of the losses, entry minus other, by Student's t over seeds.

    A draft is compared by the reference's runs of the draft seeds, an entry by its judged seeds.

    Returns:
        The difference over the seeds that both have; infinite if a run of the entry diverged.

    Raises:
        ValueError: they share fewer than two seeds.
    """
    first = losses_by_seed(entry)
    second = losses_by_seed(other, "draft" if entry["draft"] else "judge")
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        raise ValueError(
            f"{entry['name']} and {other['name']} share fewer than two seeds; enter both again"
        )
    differences = [first[seed] - second[seed] for seed in shared]
    if math.inf in differences:
        return Difference(math.inf, len(shared))
    return estimate_difference(differences)


def judge_entries(protocol: Protocol, entries: Sequence[Record]) -> list[JudgedEntry]:
    """Judge the entries; return the rows of the table, the lowest mean loss first.

    The differences from the reference are one family of tests, those from the second router
    another. Nothing is compared with a router that has a diverged run. Raises ValueError as
    `subtract` does.
    """
    records = {entry["name"]: entry for entry in entries}
    against: dict[str, dict[str, Difference]] = {name: {} for name in records}
    for other in (protocol.reference, protocol.second):
        if other not in records or math.inf in losses_by_seed(records[other]).values():
            continue
        names = [name for name in records if name != other]
        differences = [subtract(records[name], records[other]) for name in names]
        judged = judge_family(differences, protocol.margin)
        for name, difference in zip(names, judged, strict=True):
            against[name][other] = difference
    rows = []
    for name, entry in records.items():
        mean = float(np.mean(list(losses_by_seed(entry).values())))
        difference = against[name].get(protocol.reference)
        speedup = None
        if difference:
            speedup = effective_speedup(protocol, records[protocol.reference], entry, difference)
        rows.append(JudgedEntry(entry, mean, against[name], speedup))
    return sorted(rows, key=lambda row: (row.mean, row.record["name"]))


def loss_curve(protocol: Protocol, reference: Record) -> dict[float, float]:
    """Average the reference's losses by length.

    Returns:
        {length: mean loss}, by increasing length. A length is the factor on the number of tokens;
        its mean is over `length_seeds`.
    """
    by_task = losses_of(reference)
    curve = {}
    for length in sorted([1.0, *protocol.lengths]):
        round = "judge" if length == 1 else "length"
        losses = []
        for task, loss in by_task.items():
            if (task.round, task.length) == (round, length) and task.seed in protocol.length_seeds:
                losses.append(loss)
        if losses and math.inf not in losses:
            curve[length] = float(np.mean(losses))
    return curve


def effective_speedup(
    protocol: Protocol, reference: Record, entry: Record, difference: Difference
) -> list[str] | None:
    """Compute how much sooner the entry reaches its loss than the reference does, in time.

    That is the length at which the reference reaches the entry's loss, log-linear between its
    lengths, times the ratio of the times of a step. The interval is that of the difference; it
    leaves out the errors of the reference's own curve and of the times.

    Returns:
        Middle, low and high (95%) as text, with "<" or ">" beyond the reference's lengths; None
        if the times or the curve are missing, or a run of the entry diverged.
    """
    curve = loss_curve(protocol, reference)
    if len(curve) < 2 or "step_ms" not in entry or math.isinf(difference.mean):
        return None
    faster = entry["step_ms"]["reference"] / entry["step_ms"]["entry"]
    log_lengths = np.log2(list(curve))
    losses = np.minimum.accumulate(list(curve.values()))  # interpolation needs a monotone curve
    texts = []
    for shift in (difference.mean, difference.high, difference.low):
        loss = curve[1.0] + shift
        length = float(2 ** np.interp(loss, losses[::-1], log_lengths[::-1]))
        sign = {min(curve): "<", max(curve): ">"}.get(length, "")
        texts.append(f"{sign}{faster * length:.2f}")
    return texts


def build_verdicts(protocol: Protocol, rows: Sequence[JudgedEntry]) -> Table:
    """Build head and cells of the columns that are on both pages."""
    cells = []
    for row in rows:
        name = row.record["name"]
        loss = f"{row.mean:.4f}" if math.isfinite(row.mean) else "diverged"
        first = format_difference(row.against.get(protocol.reference))
        second = format_difference(row.against.get(protocol.second))
        speedup = ""
        if name == protocol.reference:
            speedup = "1"
        elif row.speedup:
            speedup = "{} [{}, {}]".format(*row.speedup)
        cells.append([name, loss, first, second, speedup])
    head = [
        "router",
        "loss",
        f"minus {protocol.reference}",
        f"minus {protocol.second}",
        "speed-up",
    ]
    return head, cells


def format_difference(difference: Difference | None) -> str:
    """Format a difference with its verdict; "" for None, the router itself."""
    if difference is None:
        return ""
    verdict = f"**{difference.verdict}**"
    return verdict if math.isinf(difference.mean) else f"{difference} {verdict}"


def build_tables(protocol: Protocol, rows: Sequence[JudgedEntry]) -> dict[Path, str]:
    """Build {page: its table as Markdown}."""
    head, cells = build_verdicts(protocol, rows)
    without_intervals = []
    with_measures = []
    for verdicts, row in zip(cells, rows, strict=True):
        without_intervals.append([re.sub(r" \[.*?\]", "", cell) for cell in verdicts])
        with_measures.append(verdicts + list(format_measures(row).values()))
    full = markdown_table(head + MEASURES, with_measures, gap="")
    diverged = []
    for row in rows:
        for task, loss in losses_of(row.record).items():
            if math.isinf(loss):
                diverged.append(f"{row.record['name']} {task.name}")
    if diverged:
        full += f"\n\nDiverged: {', '.join(diverged)}."
    return {FRONT_PAGE: markdown_table(head, without_intervals, gap=""), PAGE: full}


def format_measures(row: JudgedEntry) -> dict[str, str]:
    """Format {column: cell} of the measures, means of the judged runs, and of the settings."""
    record = row.record
    runs = [run for run in judged_runs(record).values() if run["loss"] is not None]
    settings: dict[str, Any] = record["summary"]["settings"]
    routed = any("gate_norm" in run for run in runs)  # False for dense, which has few settings
    cells = dict.fromkeys(MEASURES, "")
    cells["load imbalance"] = format_measure(runs, "load_imbalance")
    cells["dead experts"] = format_measure(runs, "dead_experts")
    cells["lr"] = f"{settings['optim.lr']:g}"
    cells["diverged"] = str(record["summary"]["diverged"])
    if routed:
        norms = [run["gate_norm"] for run in runs if "gate_norm" in run]
        start, end = np.mean(norms, axis=0)
        cells["gate norm"] = f"{start:.2f} → {end:.2f}"
        cells["router lr"] = f"{settings['optim.router_lr_ratio']:g}"
        cells["w_out lr"] = f"{settings['optim.expert_out_lr_ratio']:g}"
        cells["balance"] = format_balance(record)
    return cells


def format_measure(runs: Sequence[Mapping[str, Any]], measure: str) -> str:
    """Format the mean of a measure over the runs that have it; "" if none has."""
    values = [run[measure] for run in runs if measure in run]
    return f"{np.mean(values):.1f}" if values else ""


def format_balance(record: Record) -> str:
    """Format what balances the loads in the judged runs."""
    if options_of(record).get("train.bias_update") == "quantile":
        return "quantile"
    settings = record["summary"]["settings"]
    for key, text in BALANCE.items():
        if key in settings:
            return f"{text} {settings[key]:g}"
    return "none"


def draw_differences(protocol: Protocol, rows: Sequence[JudgedEntry], picture: Path) -> None:
    """Draw each entry's difference from the reference with its 95% interval, and the margin."""
    from matplotlib.figure import Figure  # it may not be installed

    differences = {}
    for row in reversed(rows):
        difference = row.against.get(protocol.reference)
        if difference and math.isfinite(difference.mean):
            differences[row.record["name"]] = difference
    figure = Figure((8, 1.2 + 0.32 * len(differences)), layout="constrained")
    axes = figure.subplots()
    margin = protocol.margin
    label = f"equivalent: within ±{margin:g}"
    axes.axvspan(-margin, margin, color="black", alpha=0.07, label=label)
    axes.axvline(0, color="black", linewidth=0.8)
    for y, (name, difference) in enumerate(differences.items()):
        look = choose_style(name, differences) | {"linestyle": "none"}
        axes.errorbar([difference.mean], [y], xerr=[difference.half_width], capsize=3, **look)
    axes.set_yticks(range(len(differences)), differences)
    axes.set_xlabel(f"validation loss minus {protocol.reference}'s, nats per byte, 95% interval")
    axes.legend(fontsize=8, loc="upper right")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(picture)


def write_tables(protocol: Protocol, rows: Sequence[JudgedEntry]) -> Path:
    """Write both tables, each between the marks of its page, and the picture; return its path.

    Raises:
        ValueError: a page lacks the marks.
    """
    begin = "<!-- track: begin -->\n"
    end = "<!-- track: end -->"
    for page, table in build_tables(protocol, rows).items():
        before, begin_mark, rest = page.read_text().partition(begin)
        _, end_mark, after = rest.partition(end)
        if not (begin_mark and end_mark):
            raise ValueError(
                f"{page} lacks the lines {begin.strip()} and {end} that the table goes between"
            )
        write_atomic(page, f"{before}{begin}{table}\n{end}{after}")
    picture = PAGE.parent / f"{protocol.name}.png"
    draw_differences(protocol, rows, picture)
    return picture
