"""Verdicts: differences of routers paired by seed, Student's t, Holm over the table; and what a difference is worth."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scripts.report.statistics import Difference, estimate_difference, judge_family
from scripts.track.protocol import Protocol
from scripts.track.record import Record, losses_of


class Row(NamedTuple):
    """An entry of the table."""

    record: Record
    mean: float  # loss of the judged seeds, nats per byte; infinite if one diverged
    against: dict[str, Difference]  # the reference and the second router, those that have entered, and not itself
    speedup: list[str] | None  # middle, low, high, as `effective_speedup`; None: not known


def losses_by_seed(record: Record, round: str = "judge") -> dict[int, float]:
    """{seed: loss} of the runs of a round; infinite where the run diverged."""
    return {task.seed: loss for task, loss in losses_of(record).items() if task.round == round}


def subtract(entry: Record, other: Record) -> Difference:
    """Mean difference of the losses, entry minus other, over the seeds that both have, by Student's t.

    These are the judged seeds, or those of drafts, where the entry is one and the other the reference. Infinite if a
    run of the entry diverged.

    Raises:
        ValueError: they share fewer than two seeds.
    """
    first, second = losses_by_seed(entry), losses_by_seed(other, "draft" if entry["draft"] else "judge")
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        raise ValueError(f"{entry['name']} and {other['name']} share fewer than two seeds; enter both again")
    differences = [first[seed] - second[seed] for seed in shared]
    return Difference(math.inf, len(shared)) if math.inf in differences else estimate_difference(differences)


def judge_entries(protocol: Protocol, entries: Sequence[Record]) -> list[Row]:
    """The rows of the table, the lowest mean loss first. Nothing is compared with a router of which a run diverged.

    The differences from the reference are a family, and so are those from the second router. Raises ValueError as
    `subtract` does.
    """
    against: dict[str, dict[str, Difference]] = {entry["name"]: {} for entry in entries}
    named = {entry["name"]: entry for entry in entries}
    for other in (protocol.reference, protocol.second):
        if other in named and math.inf not in losses_by_seed(named[other]).values():
            rivals = [entry for entry in entries if entry["name"] != other]
            judged = judge_family([subtract(entry, named[other]) for entry in rivals], protocol.margin)
            for entry, difference in zip(rivals, judged, strict=True):
                against[entry["name"]][other] = difference
    rows = []
    for name, entry in named.items():
        speedup, difference = None, against[name].get(protocol.reference)
        if difference:
            speedup = effective_speedup(protocol, named[protocol.reference], entry, difference)
        rows.append(Row(entry, float(np.mean([*losses_by_seed(entry).values()])), against[name], speedup))
    return sorted(rows, key=lambda row: (row.mean, row.record["name"]))


def loss_curve(protocol: Protocol, reference: Record) -> dict[float, float]:
    """{times the tokens: mean loss} of the reference, over the seeds that were run at every length."""
    judged, curve = losses_by_seed(reference), {}
    curve[1.0] = float(np.mean([judged[seed] for seed in protocol.length_seeds if seed in judged]))
    for length in protocol.lengths:
        losses = [run["loss"] for run in reference["runs"] if run["round"] == "length" and run["length"] == length]
        if losses and None not in losses:
            curve[length] = float(np.mean(losses))
    return dict(sorted(curve.items()))


def effective_speedup(protocol: Protocol, reference: Record, entry: Record, difference: Difference) -> list[str] | None:
    """How much sooner the entry reaches its loss than the reference does, by the clock: middle, low, high (95%).

    The tokens that the reference needs for the entry's loss, log-linear between its lengths, times the ratio of the
    times of a step; "<" or ">" where the loss is not among those of its lengths. The interval is that of the
    difference; it leaves out the errors of the reference's own curve and of the times.
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
