"""The table of a track: verdicts on its entries, as Markdown in track/README.md and README.md, and as a picture.

Entries are compared by seed: Student's t over the differences, corrected by Holm's over the table.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files import write_atomic
from common.text import markdown_table
from report.comparisons import Difference, estimate_difference, judge_family
from report.style import choose_style
from track.protocol import BALANCE, REPO_ROOT, Protocol
from track.record import Record, judged_runs, losses_of, task_of

PAGE = REPO_ROOT / "track/README.md"
FRONT_PAGE = REPO_ROOT / "README.md"


class Row(NamedTuple):
    """An entry of the table."""

    record: Record
    mean: float  # loss of the judged seeds, nats per byte; infinite if one diverged
    # the reference and the second router, those that have entered, and not itself
    against: dict[str, Difference]
    speedup: list[str] | None  # middle, low, high, as `effective_speedup`; None: not known


def losses_by_seed(record: Record, round: str = "judge") -> dict[int, float]:
    """{seed: loss} of the runs of a round; infinite where the run diverged."""
    return {task.seed: loss for task, loss in losses_of(record).items() if task.round == round}


def subtract(entry: Record, other: Record) -> Difference:
    """Mean difference of the losses, entry minus other, over the seeds that both have, by Student's t.

    These are the judged seeds, or those of drafts, where the entry is one and the other the
    reference. Infinite if a run of the entry diverged.

    Raises:
        ValueError: they share fewer than two seeds.
    """
    first, second = (
        losses_by_seed(entry),
        losses_by_seed(other, "draft" if entry["draft"] else "judge"),
    )
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        raise ValueError(
            f"{entry['name']} and {other['name']} share fewer than two seeds; enter both again"
        )
    differences = [first[seed] - second[seed] for seed in shared]
    return (
        Difference(math.inf, len(shared))
        if math.inf in differences
        else estimate_difference(differences)
    )


def judge_entries(protocol: Protocol, entries: Sequence[Record]) -> list[Row]:
    """The rows of the table, the lowest mean loss first.

    Nothing is compared with a router of which a run diverged.

    The differences from the reference are a family, and so are those from the second router. Raises
    ValueError as `subtract` does.
    """
    against: dict[str, dict[str, Difference]] = {entry["name"]: {} for entry in entries}
    named = {entry["name"]: entry for entry in entries}
    for other in (protocol.reference, protocol.second):
        if other in named and math.inf not in losses_by_seed(named[other]).values():
            rivals = [entry for entry in entries if entry["name"] != other]
            judged = judge_family(
                [subtract(entry, named[other]) for entry in rivals], protocol.margin
            )
            for entry, difference in zip(rivals, judged, strict=True):
                against[entry["name"]][other] = difference
    rows = []
    for name, entry in named.items():
        speedup, difference = None, against[name].get(protocol.reference)
        if difference:
            speedup = effective_speedup(protocol, named[protocol.reference], entry, difference)
        rows.append(
            Row(entry, float(np.mean([*losses_by_seed(entry).values()])), against[name], speedup)
        )
    return sorted(rows, key=lambda row: (row.mean, row.record["name"]))


def loss_curve(protocol: Protocol, reference: Record) -> dict[float, float]:
    """{times the tokens: mean loss} of the reference, over the seeds that were run at every length."""
    judged, curve = losses_by_seed(reference), {}
    curve[1.0] = float(np.mean([judged[seed] for seed in protocol.length_seeds if seed in judged]))
    for length in protocol.lengths:
        losses = [
            run["loss"]
            for run in reference["runs"]
            if run["round"] == "length" and run["length"] == length
        ]
        if losses and None not in losses:
            curve[length] = float(np.mean(losses))
    return dict(sorted(curve.items()))


def effective_speedup(
    protocol: Protocol, reference: Record, entry: Record, difference: Difference
) -> list[str] | None:
    """How much sooner the entry reaches its loss than the reference does, by the clock: middle, low, high (95%).

    The tokens that the reference needs for the entry's loss, log-linear between its lengths, times
    the ratio of the times of a step; "<" or ">" where the loss is not among those of its lengths.
    The interval is that of the difference; it leaves out the errors of the reference's own curve
    and of the times.
    """
    curve = loss_curve(protocol, reference)
    if len(curve) < 2 or "step_ms" not in entry or math.isinf(difference.mean):
        return None
    faster = entry["step_ms"]["reference"] / entry["step_ms"]["entry"]
    lengths, losses = np.array([*curve]), np.minimum.accumulate([*curve.values()])
    texts = []
    for shift in (difference.mean, difference.high, difference.low):
        tokens = float(2 ** np.interp(curve[1.0] + shift, losses[::-1], np.log2(lengths)[::-1]))
        sign = {min(curve): "<", max(curve): ">"}.get(tokens, "")
        texts.append(f"{sign}{faster * tokens:.2f}")
    return texts


def build_verdicts(protocol: Protocol, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the columns that are on both pages."""
    names = protocol.reference, protocol.second
    cells = []
    for row in rows:
        loss = f"{row.mean:.4f}" if math.isfinite(row.mean) else "diverged"
        against = [row.against.get(name) for name in names]
        words = [
            f"{'' if math.isinf(one.mean) else one} **{one.verdict}**".strip() if one else ""
            for one in against
        ]
        speedup = "{} [{}, {}]".format(*row.speedup) if row.speedup else ""
        cells.append(
            [row.record["name"], loss, *words, "1" if row.record["name"] == names[0] else speedup]
        )
    return ["router", "loss", *(f"minus {name}" for name in names), "speed-up"], cells


def build_tables(protocol: Protocol, rows: Sequence[Row]) -> dict[Path, str]:
    """{page: its table as Markdown}."""
    head, cells = build_verdicts(protocol, rows)
    measured = [
        "gate norm",
        "load imbalance",
        "dead experts",
        "lr",
        "router lr",
        "w_out lr",
        "balance",
        "diverged",
    ]
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

    norms = np.mean(
        [run["gate_norm"] for run in runs if "gate_norm" in run] or [[math.nan] * 2], axis=0
    )
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
        *(
            f"{settings[f'optim.{key}']:g}" if routed else ""
            for key in ("router_lr_ratio", "expert_out_lr_ratio")
        ),
        (balance[0] if balance else "none") if routed else "",
        str(record["summary"]["diverged"]),
    ]


def draw_differences(protocol: Protocol, rows: Sequence[Row], picture: Path) -> None:
    """Draw each entry's difference from the reference with its 95% interval, and the margin of equivalence."""
    from matplotlib.figure import Figure  # it may not be installed

    judged = {row.record["name"]: row.against.get(protocol.reference) for row in reversed(rows)}
    drawn = {
        name: difference
        for name, difference in judged.items()
        if difference and math.isfinite(difference.mean)
    }
    figure = Figure((8, 1.2 + 0.32 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    equivalent = f"equivalent: within ±{protocol.margin:g}"
    axes.axvspan(-protocol.margin, protocol.margin, color="black", alpha=0.07, label=equivalent)
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (name, difference) in enumerate(drawn.items()):
        look = choose_style(name, drawn) | {"linestyle": "none"}
        axes.errorbar([difference.mean], [place], xerr=[difference.half_width], capsize=3, **look)
    axes.set_yticks(range(len(drawn)), drawn)
    axes.set_xlabel(f"validation loss minus {protocol.reference}'s, nats per byte, 95% interval")
    axes.legend(fontsize=8, loc="upper right")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(picture)


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
            raise ValueError(
                f"{page} lacks the lines {begin.strip()} and {end} that the table goes between"
            )
        write_atomic(page, f"{head}{begin}{table}\n{end}{tail}")
    picture = PAGE.parent / f"{protocol.name}.png"
    draw_differences(protocol, rows, picture)
    return picture
