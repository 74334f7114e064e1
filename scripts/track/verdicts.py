"""Verdicts: differences of routers paired by seed, Student's t, Holm over the table; and what a difference is worth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.report.statistics import HIGHER, UNDECIDED, Difference, Verdict, estimate_difference, judge_family
from scripts.track.protocol import Protocol
from scripts.track.record import Record, losses_of


@dataclass(frozen=True)
class Judgement:
    """An entry against another one; `difference` is infinite if one of its runs diverged."""

    difference: Difference
    verdict: Verdict


@dataclass(frozen=True)
class Row:
    """An entry of the table."""

    record: Record
    losses: list[float]  # nats per byte, of the judged seeds
    against: dict[str, Judgement]  # the reference and the second router, those that have entered, and not itself
    speedup: list[str] | None  # middle, low, high, as `effective_speedup`; None: not known

    @property
    def mean(self) -> float:
        """Mean loss of the judged seeds, nats per byte."""
        return float(np.mean(self.losses))


def losses_by_seed(record: Record, round: str = "judge") -> dict[int, float]:
    """{seed: loss} of the runs of a round; infinite where the run diverged."""
    return {task.seed: loss for task, loss in losses_of(record).items() if task.round == round}


def subtract(entry: Record, other: Record) -> Difference:
    """Mean difference of the losses, entry minus other, over the seeds that both have, by Student's t.

    These are the judged seeds, or those of drafts, where the entry is one and the other the reference.

    Raises:
        ValueError: they share fewer than two seeds.
    """
    first, second = losses_by_seed(entry), losses_by_seed(other)
    if entry["draft"]:
        second = losses_by_seed(other, "draft")
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        raise ValueError(f"{entry['name']} and {other['name']} share fewer than two seeds; enter both again")
    differences = np.array([first[seed] - second[seed] for seed in shared])
    if not np.isfinite(differences).all():
        return Difference(math.inf, len(shared))
    return estimate_difference(differences)


def judge_against(entries: Sequence[Record], other: Record, margin: float) -> dict[str, Judgement]:
    """{name: judgement} of every other entry against one: a family of its own. An entry that diverged is higher."""
    differences = {entry["name"]: subtract(entry, other) for entry in entries if entry["name"] != other["name"]}
    finite = {name: difference for name, difference in differences.items() if math.isfinite(difference.mean)}
    verdicts = dict(zip(finite, judge_family([*finite.values()], margin), strict=True))
    return {name: Judgement(d, verdicts.get(name, Verdict(HIGHER))) for name, d in differences.items()}


def judge_entries(protocol: Protocol, entries: Sequence[Record]) -> list[Row]:
    """The rows of the table, the lowest mean loss first. Nothing is compared with a router of which a run diverged.

    Raises ValueError as `subtract` does.
    """
    named = {entry["name"]: entry for entry in entries}
    columns = {
        name: judge_against(entries, named[name], protocol.margin)
        for name in (protocol.reference, protocol.second)
        if name in named and math.inf not in losses_by_seed(named[name]).values()
    }
    rows = []
    for entry in entries:
        against = {name: column[entry["name"]] for name, column in columns.items() if entry["name"] in column}
        speedup = None
        if protocol.reference in against:
            difference = against[protocol.reference].difference
            speedup = effective_speedup(protocol, named[protocol.reference], entry, difference)
        rows.append(Row(entry, [*losses_by_seed(entry).values()], against, speedup))
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


def tokens_needed(curve: dict[float, float], loss: float) -> float:
    """Times the tokens that the reference needs for a loss, log-linear between the curve's lengths and within them."""
    losses = np.minimum.accumulate([*curve.values()])[::-1]  # ascending
    return float(2 ** np.interp(loss, losses, np.log2([*curve.keys()])[::-1]))


def effective_speedup(protocol: Protocol, reference: Record, entry: Record, difference: Difference) -> list[str] | None:
    """How much sooner the entry reaches its loss than the reference does, by the clock: middle, low, high (95%).

    The tokens that the reference needs for the entry's loss, times the ratio of the times of a step; "<" or ">" where
    the loss is not among those of the reference's lengths. The interval is that of the difference; it leaves out the
    errors of the reference's own curve and of the times.
    """
    curve = loss_curve(protocol, reference)
    if len(curve) < 2 or "step_ms" not in entry or not math.isfinite(difference.mean):
        return None
    faster = entry["step_ms"]["reference"] / entry["step_ms"]["entry"]
    texts = []
    for shift in (difference.mean, difference.high, difference.low):
        tokens = tokens_needed(curve, curve[1.0] + shift)
        sign = {min(curve): "<", max(curve): ">"}.get(tokens, "")
        texts.append(f"{sign}{faster * tokens:.2f}")
    return texts


def describe_judgement(judgement: Judgement) -> str:
    """`-0.0132 [-0.0190, -0.0074] lower`."""
    if not math.isfinite(judgement.difference.mean):
        return f"diverged **{HIGHER}**"
    bold = judgement.verdict.text if judgement.verdict.text.startswith(UNDECIDED) else f"**{judgement.verdict.text}**"
    return f"{judgement.difference} {bold}"
