"""What the pairs of a question say: difference, test, power, and the table."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from report.compare import Difference, equivalence, paired
from track.contest import Line, Pair, Protocol, find_pair, index_lines, list_pairs

EQUIVALENCE_LEVEL = 0.05  # of the two one-sided tests
SIZES = (0.005, 0.008)  # nats per byte, of which the page prints the power


class Answer(NamedTuple):
    """What the pairs of a question say so far."""

    name: str
    planned: int  # pairs
    pairs: list[tuple[Line, Line]]  # complete ones: arm and minus, both with a loss
    diverged: list[Pair]  # where one arm or both diverged: left out of the difference
    one_sided: tuple[int, int]  # settings where the arm, and where minus, has the lower loss
    difference: Difference | None  # None: fewer than two pairs

    @property
    def losses(self) -> list[float]:
        """The arm's losses."""
        return [first.loss for first, _ in self.pairs if first.loss is not None]

    @property
    def deviation(self) -> float:
        """Standard deviation of a pair's difference; NaN for fewer than two pairs."""
        if len(self.pairs) < 2:
            return math.nan
        return float(np.std([subtract(pair) for pair in self.pairs], ddof=1))


def subtract(pair: tuple[Line, Line]) -> float:
    """The loss of a pair's arm minus the other's."""
    first, second = pair
    assert first.loss is not None and second.loss is not None
    return first.loss - second.loss


def answer(protocol: Protocol, name: str, lines: Sequence[Line]) -> Answer:
    """Compare the arms of a question at the settings where both were trained."""
    found = index_lines(lines)
    planned = list_pairs(protocol, name)
    pairs = []
    diverged = []
    lower = higher = 0
    for pair in planned:
        runs = find_pair(found, pair)
        if runs is None:
            continue
        ends = [math.inf if run.loss is None else run.loss for run in runs]
        lower += ends[0] < ends[1]
        higher += ends[0] > ends[1]
        if math.inf in ends:
            diverged.append(pair)
        else:
            pairs.append(runs)
    difference = None
    if len(pairs) > 1:
        difference = paired([subtract(pair) for pair in pairs])
    return Answer(name, len(planned), pairs, diverged, (lower, higher), difference)


def judge(protocol: Protocol, answer: Answer) -> str:
    """The verdict of a question's only test, once all its pairs are there.

    With diverged runs a mean says nothing: the sign test over all settings decides, in which a
    diverged run is the higher one of its pair.
    """
    done = len(answer.pairs) + len(answer.diverged)
    if done < answer.planned:
        return f"{done} of {answer.planned} pairs"
    if answer.diverged:
        lower, higher = answer.one_sided
        p = stats.binomtest(lower, lower + higher).pvalue if lower + higher else 1.0
        if p >= protocol.alpha:
            return "undecided"
        return "lower (sign test)" if lower > higher else "higher (sign test)"
    difference = answer.difference
    assert difference is not None  # a question has two settings or more
    within = equivalence(difference, protocol.margin) < EQUIVALENCE_LEVEL
    if difference.p < protocol.alpha:
        sign = "lower" if difference.mean < 0 else "higher"
        return f"{sign}, by less than {protocol.margin:g}" if within else sign
    return "equivalent" if within else "undecided"


def power(size: float, deviation: float, pairs: int, alpha: float) -> float:
    """The chance that a two-sided t-test over pairs finds a difference.

    Args:
        size: the true mean difference.
        deviation: standard deviation of a pair's difference.
        pairs: their number.
        alpha: level of the test.
    """
    critical = stats.t.ppf(1 - alpha / 2, pairs - 1)
    shift = size / deviation * math.sqrt(pairs)
    return float(
        stats.nct.sf(critical, pairs - 1, shift) + stats.nct.cdf(-critical, pairs - 1, shift)
    )


def find_best(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The learning rate and the loss of the lowest point of a parabola in the rate's logarithm.

    Args:
        points: (rate, loss) of runs, whose other settings differ, too.

    Returns:
        None if there are fewer than six runs, or the parabola has no lowest point in their range.
    """
    if len(points) < 6:
        return None
    logs, losses = np.array(points).T
    logs = np.log(logs)
    parabola = np.polynomial.Polynomial.fit(logs, losses, 2).convert()
    bend = parabola.coef[2] if len(parabola.coef) == 3 else 0.0
    if bend <= 0:
        return None
    place = -parabola.coef[1] / (2 * bend)
    if not logs.min() <= place <= logs.max():
        return None
    return float(np.exp(place)), float(parabola(place))
