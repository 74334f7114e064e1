"""Which of two arms of a setting has the lower loss.

All pairs of a setting are one family (`statistics.judge_family`), in one table.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from scripts.report.settings import Arm, Setting, label_value
from scripts.report.statistics import Difference, estimate_difference, judge_family


class Comparison(NamedTuple):
    """The difference of two arms, left minus right, with its verdict."""

    left: Arm
    right: Arm
    difference: Difference


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
    losses, windows, documents = np.zeros((len(cells), len(seeds))), [], None
    for i, (ours, theirs) in enumerate(cells):
        for j, seed in enumerate(seeds):
            a, b = setting.evaluation(ours[seed], step), setting.evaluation(theirs[seed], step)
            losses[i, j] = a["val/loss"] - b["val/loss"]
            if "val/window_losses" in a and "val/window_losses" in b:
                windows.append(np.subtract(a["val/window_losses"], b["val/window_losses"]))
                documents = a.get("val/window_documents")
    complete = len(windows) == losses.size
    return estimate_difference(losses.mean(0), np.mean(windows, 0) if complete else None, documents)


def find_pairs(setting: Setting, baseline: str) -> list[tuple[Arm, Arm]]:
    """Arms to compare: of one router those that differ in one option, of two routers those most alike.

    The baseline, a router or an arm's label, is the second of its pairs; if an arm, of pairs with all others.
    """
    pairs = []
    for left, right in combinations(setting.arms[::-1], 2):  # routers that someone added come first
        differing = sum(left.options[key] != right.options[key] for key in left.options)
        if left.router == right.router:
            alike = differing == 1 and left.shares_seed(right)
        else:
            counterparts = setting.counterparts(right, left.router) + setting.counterparts(left, right.router)
            alike = left in counterparts or right in counterparts
        subtracted = left.label == baseline or left.router == baseline != right.router
        if alike or baseline in (left.label, right.label):
            pairs.append((right, left) if subtracted else (left, right))
    return pairs


def judge_pairs(setting: Setting, pairs: Iterable[tuple[Arm, Arm]], margin: float = 0.0) -> list[Comparison]:
    """A Comparison at the end for each pair, all of them one family; without pairs that lack a common seed."""
    known = [(left, right, estimate(setting, left, right)) for left, right in pairs]
    known = [(left, right, difference) for left, right, difference in known if difference]
    judged = judge_family([difference for _, _, difference in known], margin)
    return [Comparison(left, right, difference) for (left, right, _), difference in zip(known, judged, strict=True)]


def compare_setting(setting: Setting, baseline: str = "kern", margin: float = 0.0) -> list[Comparison]:
    """Every pair of a setting at the end. Nothing is compared before training."""
    return judge_pairs(setting, find_pairs(setting, baseline), margin) if setting.key or setting.steps[-1] else []


def choose_best(setting: Setting, seeds: Sequence[int], margin: float = 0.0) -> list[Comparison]:
    """Each arm at the value of the key with the lowest mean loss of `seeds`, compared by its other seeds.

    Raises ValueError if an arm lacks one of the seeds, or has no other seed.
    """
    best = []
    for arm in setting.arms:
        means = {}
        for x, cell in arm.cells.items():
            if missing := sorted(set(seeds) - set(cell)):
                raise ValueError(f"--choose-on {missing[0]}: {arm.label} has no run of this seed at {x:g}")
            means[x] = np.mean([setting.evaluation(cell[seed])["val/loss"] for seed in seeds])
        x = min(means, key=means.__getitem__)
        judged = {seed: run for seed, run in arm.cells[x].items() if seed not in seeds}
        if not judged:
            raise ValueError(f"--choose-on {', '.join(map(str, seeds))}: {arm.label} has no other seed to judge by")
        label = ", ".join(filter(None, [arm.options_label, label_value(setting.key, x)]))
        best.append(Arm(arm.router, arm.options, {None: judged}, label))
    best.sort(key=lambda arm: np.mean([setting.evaluation(run)["val/loss"] for run in arm.runs]))
    return judge_pairs(setting, combinations(best, 2), margin)
