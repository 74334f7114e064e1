"""What the pairs of a question say: difference and test."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from report.compare import Difference, equivalence, paired
from track.contest import Line, Protocol, find_pair, list_pairs

EQUIVALENCE_LEVEL = 0.05  # of the two one-sided tests


class Answer(NamedTuple):
    """What the pairs of a question say so far."""

    name: str
    minus: str
    flops: float  # of a run
    planned: int  # pairs
    # {setting: loss of the arm minus the other's}, nats per byte; not finite where one diverged
    differences: dict[int, float]

    @property
    def diverged(self) -> list[int]:
        """The settings that are left out of the difference."""
        return [key for key, value in self.differences.items() if not math.isfinite(value)]

    @property
    def mean(self) -> Difference | None:
        """The mean difference with Student's interval over settings; None for fewer than two."""
        finite = [value for value in self.differences.values() if math.isfinite(value)]
        return paired(finite) if len(finite) > 1 else None


def answer(protocol: Protocol, name: str, lines: Sequence[Line]) -> Answer:
    """Compare the arms of a question at the settings where both were trained."""
    question = protocol.questions[name]
    differences = {}
    for pair in list_pairs(protocol, name):
        runs = find_pair(lines, pair)
        if runs:
            first, second = [run.loss or math.inf for run in runs]
            differences[runs[0].setting] = first - second
    flops = protocol.rungs[question.rung].flops
    return Answer(name, " / ".join(question.minus), flops, question.settings, differences)


def find_growth(name: str, answers: Sequence[Answer]) -> Answer:
    """How differences change with ten times the compute, as an answer of its own.

    At each setting they have a slope over log10(FLOPs), by least squares; NaN where a run diverged.

    Args:
        name: of the new answer.
        answers: to the same question on several rungs.
    """
    shared = set.intersection(*(set(one.differences) for one in answers))
    places = np.log10([one.flops for one in answers])
    places -= places.mean()
    slopes = {}
    for setting in sorted(shared):
        values = [one.differences[setting] for one in answers]
        is_finite = math.isfinite(sum(values))
        slopes[setting] = places @ values / (places @ places) if is_finite else math.nan
    return answers[0]._replace(
        name=name, planned=min(one.planned for one in answers), differences=slopes
    )


def answer_all(protocol: Protocol, lines: Mapping[str, Sequence[Line]]) -> list[Answer]:
    """The answers of all questions by the lines of each rung, then those of growth."""
    answers = {
        name: answer(protocol, name, lines[question.rung])
        for name, question in protocol.questions.items()
    }
    for name, members in protocol.growth.items():
        answers[name] = find_growth(name, [answers[member] for member in members])
    return list(answers.values())


def judge(protocol: Protocol, answer: Answer) -> str:
    """The verdict of a question's only test, once all its pairs are there.

    Where runs diverged a mean says nothing: the sign test over all settings decides, in which a
    diverged run is the higher one of its pair.
    """
    values = list(answer.differences.values())
    if len(values) < answer.planned:
        return "runs are going on"
    mean = answer.mean
    if answer.diverged or not mean:
        lower = sum(value < 0 for value in values)
        higher = sum(value > 0 for value in values)  # NaN, both diverged, is neither
        p = stats.binomtest(lower, max(1, lower + higher)).pvalue
        sign = "lower" if lower > higher else "higher"
        return f"{sign}, by a sign test" if p < protocol.alpha else "undecided"
    within = equivalence(mean, protocol.margin) < EQUIVALENCE_LEVEL
    if mean.p < protocol.alpha:
        sign = "lower" if mean.mean < 0 else "higher"
        return f"{sign}, by less than {protocol.margin:g}" if within else sign
    return "equivalent" if within else "undecided"


def find_best(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, float] | None:
    """The learning rate and the loss of the lowest point of a parabola in the rate's logarithm.

    Other settings of the runs differ, too. None if there are fewer than six runs, or the parabola
    has no lowest point between their rates.
    """
    if len(rates) < 6:
        return None
    places = np.log(rates)
    curvature, slope, height = np.polyfit(places, losses, 2)
    lowest = -slope / (2 * curvature)
    if curvature <= 0 or not min(places) <= lowest <= max(places):
        return None
    return math.exp(lowest), float(height + slope * lowest / 2)
