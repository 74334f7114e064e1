"""Which of two arms of a setting has the lower loss.

All pairs of a setting are one family (`statistics.judge_family`). Every table shows its verdicts, so a pair has one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from scripts.report.settings import Arm, Setting
from scripts.report.statistics import HIGHER, LOWER, Difference, Verdict, estimate_difference, judge_family


@dataclass(frozen=True)
class Comparison:
    """The difference of two arms, left minus right, and its verdict."""

    left: Arm
    right: Arm
    difference: Difference
    verdict: Verdict


def estimate(
    setting: Setting, left: Arm, right: Arm, step: int | None = None, xs: Sequence[Any] | None = None
) -> Difference | None:
    """Left minus right at a step (None: the end), as the mean over the values of the key, or those of `xs` alone.

    By the values that both arms have, and the seeds that both have at all of these; None without any.
    """
    cells = [(cell, right.cells[x]) for x, cell in left.cells.items() if x in right.cells and (xs is None or x in xs)]
    seeds = sorted(set.intersection(*(ours.keys() & theirs.keys() for ours, theirs in cells))) if cells else []
    if not seeds:
        return None
    losses, windows = np.zeros((len(cells), len(seeds))), []
    for i, (ours, theirs) in enumerate(cells):
        for j, seed in enumerate(seeds):
            a, b = setting.evaluation(ours[seed], step), setting.evaluation(theirs[seed], step)
            losses[i, j] = a["val/loss"] - b["val/loss"]
            if "val/window_losses" in a and "val/window_losses" in b:
                windows.append(np.subtract(a["val/window_losses"], b["val/window_losses"]))
    complete = len(windows) == losses.size
    return estimate_difference(losses.mean(0), np.mean(windows, 0) if complete else None, setting.documents)


def find_pairs(setting: Setting) -> list[tuple[Arm, Arm]]:
    """Arms to compare: of one router those that differ in one option, of two routers those most alike."""
    pairs = []
    for left, right in combinations(setting.arms[::-1], 2):  # routers that someone added come first
        differing = sum(left.options[key] != right.options[key] for key in left.options)
        if left.router == right.router:
            alike = differing == 1 and left.shares_seed(right)
        else:
            counterparts = setting.counterparts(right, left.router) + setting.counterparts(left, right.router)
            alike = left in counterparts or right in counterparts
        if alike:
            pairs.append((left, right))
    return pairs


def judge_pairs(setting: Setting, pairs: Iterable[tuple[Arm, Arm]], margin: float | None = None) -> list[Comparison]:
    """A Comparison at the end for each pair, all of them one family; without pairs that lack a common seed."""
    known = [(left, right, estimate(setting, left, right)) for left, right in pairs]
    known = [(left, right, difference) for left, right, difference in known if difference]
    verdicts = judge_family([difference for _, _, difference in known], margin)
    return [Comparison(*pair, verdict) for pair, verdict in zip(known, verdicts, strict=True)]


def compare_setting(setting: Setting, margin: float | None = None) -> list[Comparison]:
    """Every pair of a setting at the end. Nothing is compared before training."""
    return judge_pairs(setting, find_pairs(setting), margin) if setting.key or setting.steps[-1] else []


def find_comparison(comparisons: Sequence[Comparison], left: Arm, right: Arm | None) -> Comparison | None:
    """That of `left` minus `right`, whichever way round it was made; None if they were not compared."""
    for comparison in comparisons:
        if (comparison.left, comparison.right) == (left, right):
            return comparison
        if (comparison.left, comparison.right) == (right, left):
            old, verdict = comparison.difference, comparison.verdict
            text = {LOWER: HIGHER, HIGHER: LOWER}.get(verdict.text, verdict.text)
            return Comparison(left, comparison.left, replace(old, mean=-old.mean), replace(verdict, text=text))
    return None
