"""The contest's tables, from records: in track/README.md, and shorter in README.md."""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.files import check_regular, write_atomic
from common.text import Table, markdown_table
from report.comparisons import correct_holm
from router import find_spec
from track.contest import (
    Losses,
    Protocol,
    compare,
    judge_sign,
    measure_curve,
    multiply_compute,
    score_rung,
)
from track.ladder import count_agreements, load_climbs, load_ladder, tabulate
from track.record import REPO_ROOT, Record, losses_of, missing_tasks, read_record

PAGE = REPO_ROOT / "track/README.md"
FRONT_PAGE = REPO_ROOT / "README.md"
FRONT_ROWS = 12
NGRAM = "n-gram"
BASELINE = "softmax"  # the paper's
BEGIN = "<!-- track: begin -->\n"
END = "<!-- track: end -->"


def read_all(protocol: Protocol) -> Iterator[tuple[Path, Record]]:
    """Read the records of this edition; files that are none are named on stderr."""
    for path in sorted(protocol.records.glob("*.json")):
        try:
            yield path, read_record(path)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)


def read_others(protocol: Protocol, name: str) -> list[Record]:
    """Read the records of other entries, complete or not; of routers that router.py knows."""
    others = []
    for path, record in read_all(protocol):
        if path.stem == name:
            continue
        try:
            find_spec(record["options"]["model.router"])
        except ValueError as error:
            print(f"{path}: left out, {error}", file=sys.stderr)
            continue
        others.append(record)
    return others


def load_complete(protocol: Protocol) -> list[Record]:
    """Read the complete records of this protocol; others are named on stderr."""
    records = []
    for path, record in read_all(protocol):
        if record["protocol_sha256"] != protocol.sha256:
            reason = "of another protocol; scripts.track verify tells more"
        elif path.stem != record["name"]:
            reason = f"it is the record of {record['name']}: remove it, or give it that name"
        elif missing_tasks(protocol, record):
            reason = f"not complete; enter {record['name']} to resume"
        else:
            records.append(record)
            continue
        print(f"{path}: left out, {reason}", file=sys.stderr)
    return records


def rank_entries(protocol: Protocol, losses: Mapping[str, Losses]) -> dict[str, str]:
    """Rank intervals: an entry is behind those that are decidedly lower (Holm over pairs, 5%)."""
    names = list(losses)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    rungs = range(len(protocol.rungs))
    differences = [compare(protocol, losses[a], losses[b], rungs) for a, b in pairs]
    corrected = correct_holm([difference.p_value() for difference in differences])
    ahead = dict.fromkeys(names, 0)
    behind = dict.fromkeys(names, 0)
    for (a, b), difference, p in zip(pairs, differences, corrected, strict=True):
        if p < 0.05 or math.isinf(difference.mean):
            first, last = (a, b) if difference.mean < 0 else (b, a)
            ahead[last] += 1
            behind[first] += 1
    return {name: f"{1 + ahead[name]}–{len(names) - behind[name]}" for name in names}


def list_columns(protocol: Protocol) -> list[str]:
    """The columns of track/README.md."""
    numbers = range(1, len(protocol.rungs) + 1)
    columns = ["router"]
    columns += [f"loss {number}" for number in numbers]
    columns += ["sign", f"compute {numbers[-1]}", "rank", f"minus {protocol.reference}", "p"]
    columns += [f"within ±{protocol.margin:g}", f"minus {BASELINE}"]
    for number in numbers:
        columns += [f"compute {number}", f"time {number}", f"dense {number}"]
    columns += ["gate norm", "zero gates", "load imbalance", "dead experts", "diverged"]
    columns.append("judged on")
    return list(dict.fromkeys(columns))


def build_table(protocol: Protocol, records: Sequence[Record]) -> Table:
    """Build the table, the entry with the lowest mean loss first.

    Raises:
        ValueError: there is no record of the reference, or a judged run of it diverged.
    """
    losses = {record["name"]: losses_of(record) for record in records}
    finite = {}
    for name, entry in losses.items():
        if math.isfinite(sum(mean_losses(protocol, entry))):
            finite[name] = entry
    if protocol.reference not in losses:
        raise ValueError(f"no judged record of the reference: enter {protocol.reference} first")
    if protocol.reference not in finite:
        raise ValueError(f"a judged run of {protocol.reference} diverged: nothing to compare with")
    ranks = rank_entries(protocol, finite)
    rows = []
    for record in records:
        name = record["name"]
        means = mean_losses(protocol, losses[name])
        cells = {"router": name, "rank": ranks.get(name, "")}
        for number, mean in enumerate(means, 1):
            cells[f"loss {number}"] = f"{mean:.4f}" if math.isfinite(mean) else "diverged"
        if name != protocol.reference:
            cells |= format_verdict(protocol, losses[name], losses[protocol.reference])
            if name in finite:
                cells |= format_multipliers(protocol, record, losses)
        if name in finite and BASELINE in finite and name != BASELINE:
            rungs = range(len(protocol.rungs))
            difference = compare(protocol, finite[name], finite[BASELINE], rungs)
            cells[f"minus {BASELINE}"] = str(difference)
        cells |= format_measures(record)
        rows.append((sum(means), name, cells))
    head = list_columns(protocol)
    in_order = [cells for _, _, cells in sorted(rows, key=lambda row: row[:2])]
    table = []
    for cells in in_order + read_extra_rows(protocol):
        table.append([cells.get(column, "") for column in head])
    return head, table


def mean_losses(protocol: Protocol, losses: Losses) -> list[float]:
    """The mean loss on each rung."""
    return [score_rung(losses, rung) for rung in range(len(protocol.rungs))]


def format_verdict(protocol: Protocol, entry: Losses, reference: Losses) -> dict[str, str]:
    """Format {column: cell} of the comparison with the reference."""
    difference = compare(protocol, entry, reference, range(len(protocol.rungs)))
    cells = {"sign": f"**{judge_sign(protocol, difference)}**"}
    if math.isfinite(difference.mean):
        equivalent = difference.p_equivalent(protocol.margin) < 0.05
        cells[f"minus {protocol.reference}"] = str(difference)
        cells["p"] = f"{difference.p_value():.2g}"
        cells[f"within ±{protocol.margin:g}"] = "yes" if equivalent else "not shown"
    return cells


def format_multipliers(
    protocol: Protocol, record: Record, losses: Mapping[str, Losses]
) -> dict[str, str]:
    """Format the compute multipliers on each rung: by compute, by the clock, against dense."""
    reference = losses[protocol.reference]
    cells = {}
    for rung in range(len(protocol.rungs)):
        curve = measure_curve(reference, rung)
        ends = np.exp(curve[0, [0, -1]]).tolist()
        difference = compare(protocol, losses[record["name"]], reference, [rung])
        multiplier = multiply_compute(curve, difference)
        cells[f"compute {rung + 1}"] = format_interval(multiplier, ends)
        times = record["step_ms"][rung]
        by_clock = times["reference"] / times["entry"]
        cells[f"time {rung + 1}"] = format_interval(multiplier, ends, by_clock)
        if "dense" in losses and record["name"] != "dense":
            dense = multiply_compute(curve, compare(protocol, losses["dense"], reference, [rung]))
            cells[f"dense {rung + 1}"] = format_interval(divide(multiplier, dense), [0, math.inf])
    return cells


def divide(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of two multipliers (middle, low, high); errors add in the logarithm by squares."""
    logs = np.log(np.divide(ours, theirs[0]))
    spread = np.log(theirs) - math.log(theirs[0])
    low = logs[0] - math.hypot(logs[1] - logs[0], spread[2])
    high = logs[0] + math.hypot(logs[2] - logs[0], spread[1])
    return np.exp([logs[0], low, high]).tolist()


def format_interval(multiplier: Sequence[float], ends: Sequence[float], factor: float = 1) -> str:
    """Format middle, low and high, times a factor; a value at an end of the curve is a bound."""
    texts = []
    for value in multiplier:
        bound = ""
        if value <= ends[0] * 1.0001:
            bound = "<"
        elif value >= ends[1] / 1.0001:
            bound = ">"
        texts.append(f"{bound}{value * factor:.2f}")
    return "{} [{}, {}]".format(*texts)


def format_measures(record: Record) -> dict[str, str]:
    """Format {column: cell} of the measures: means of the judged runs of all rungs."""
    runs = [run for run in record["runs"] if run["round"] == "judge" and run["loss"] is not None]
    cells = {"diverged": str(sum(run["loss"] is None for run in record["runs"]))}
    norms = [run["gate_norm"] for run in runs if "gate_norm" in run]
    if norms:
        start, end = np.mean(norms, axis=0)
        cells["gate norm"] = f"{start:.2f} → {end:.2f}"
    for measure in ("zero_gates", "load_imbalance", "dead_experts"):
        values = [run[measure] for run in runs if measure in run]
        if values:
            cells[measure.replace("_", " ")] = f"{np.mean(values):.2g}"
    cells["judged on"] = name_machines(record)
    return cells


def name_machines(record: Record) -> str:
    """Where the judged runs ran, such as "7 Intel Xeon, 11 NVIDIA H200"."""
    judged = [run for run in record["runs"] if run["round"] == "judge"]
    machines = Counter(record["made"][run["made"]]["machine"] for run in judged)
    return ", ".join(f"{count} {machine}" for machine, count in sorted(machines.items()))


def read_extra_rows(protocol: Protocol) -> list[dict[str, Any]]:
    """Rows that are no entries: the n-gram of track/ngram.py."""
    file = protocol.records / "ngram.tsv"
    check_regular(file)
    if not file.exists():
        return []
    row = {"router": NGRAM}
    for line in file.read_text().splitlines()[1:]:
        rung, loss = line.split("\t")[:2]
        row[f"loss {rung}"] = f"{float(loss):.4f}"
    return [row]


def build_pages(protocol: Protocol, records: Sequence[Record]) -> dict[Path, str]:
    """Build {page: its table as Markdown}; the front page waits for two entries to compare."""
    head, rows = build_table(protocol, records)
    page = [markdown_table(head, rows, gap=""), *describe_ladder(protocol, records)]
    pages = {PAGE: "\n\n".join(page)}
    if len(records) > 1:
        pages[FRONT_PAGE] = markdown_table(*shorten(protocol, head, rows), gap="")
    return pages


def shorten(protocol: Protocol, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The table for a phone: four columns of the last rung, the best entries and what they face."""
    rung = len(protocol.rungs)
    columns = ["router", f"loss {rung}", "sign", f"compute {rung}"]
    faced = {protocol.reference, "dense", NGRAM}
    others = [row[0] for row in rows if row[0] not in faced]
    shown = faced.union(others[: FRONT_ROWS - len(faced)])
    short = []
    for row in rows:
        if row[0] in shown:
            cells = dict(zip(head, row, strict=True))
            cells["sign"] = cells["sign"].strip("*").replace("undecided", "–")
            short.append([cells[column].partition(" [")[0] for column in columns])
    return columns, short


def describe_ladder(protocol: Protocol, records: Sequence[Record]) -> list[str]:
    """How far rung 1 tells what rung 2 says, and the gains of entries that climbed three rungs."""
    losses = {record["name"]: losses_of(record) for record in records}
    routers = {name: losses[name] for name in losses if name != "dense"}  # that it is last is easy
    agreeing, pairs = count_agreements(routers)
    texts = []
    if pairs:
        texts.append(f"Rung 1 orders {agreeing} of {pairs} pairs of routers as rung 2 does.")
    ladder = load_ladder(protocol, len(protocol.rungs) + 1)
    climbs = load_climbs(ladder, losses)
    if protocol.reference in climbs and len(climbs) > 1:
        try:
            gains = markdown_table(*tabulate(ladder, climbs), gap="")
            texts.append(f"Gains up the [ladder](#ladder), 95% intervals:\n\n{gains}")
        except ValueError as error:  # compute has no worth
            texts.append(f"No ladder: {error}.")
    return texts


def write_tables(protocol: Protocol, records: Sequence[Record]) -> None:
    """Write both tables, each between the marks of its page.

    Raises:
        ValueError: a page lacks the marks.
    """
    for page, table in build_pages(protocol, records).items():
        check_regular(page)
        before, begin_mark, rest = page.read_text().partition(BEGIN)
        _, end_mark, after = rest.partition(END)
        if not (begin_mark and end_mark):
            raise ValueError(
                f"{page} lacks the lines {BEGIN.strip()} and {END} that the table goes between"
            )
        write_atomic(page, f"{before}{BEGIN}{table}\n{END}{after}")
