"""The lines of pictures, as numbers.

A *line* is (P, 4): rows of x, mean and the ends of its band or bar.
"""

from typing import Any

import numpy as np

from report.comparisons import Difference, measure_difference
from report.groups import Group, Variant
from report.tables import read_measure

MAX_POINTS = 60  # of a line over steps; more are averaged, because training losses are noisy


def collect_means(group: Group, variant: Variant, name: str) -> np.ndarray:
    """The line of mean and range over seeds of a name in metrics.jsonl.

    It is over steps, or over the key at the end of each run.
    """
    values = {}  # {x: values of the seeds}
    if group.key:
        for x in group.xs:
            values[x] = read_measure(group, variant.runs_at(x).values(), name)
    else:
        series = [run.series(name) for run in variant.runs.values()]
        for step in set(series[0]).intersection(*series):
            values[step] = [values_by_step[step] for values_by_step in series]
    points = {}
    for x, of_seeds in values.items():
        if of_seeds:
            points[x] = (np.mean(of_seeds), min(of_seeds), max(of_seeds))
    return build_line(group, points)


def collect_differences(group: Group, variant: Variant, baseline: str) -> dict[Any, Difference]:
    """Loss minus the baseline's at each value of the key, or at each step after 0."""
    differences = {}
    for base in group.find_counterparts(variant, baseline)[:1]:
        for x in group.xs if group.key else group.steps:
            difference = measure_difference(group, variant, base, x)
            if difference is not None and (group.key or x > 0):
                differences[x] = difference
    return differences


def build_line(group: Group, points: dict[Any, tuple]) -> np.ndarray:
    """A line with these points, {x: (mean, low, high)}.

    Over steps neighbours of many points are averaged, at the last one's step.
    """
    if not points:
        return np.empty((0, 4))
    line = np.array([(x, *points[x]) for x in sorted(points)], float)
    if group.key or len(line) <= MAX_POINTS:
        return line
    parts = np.array_split(line, MAX_POINTS)
    averaged = np.array([part.mean(axis=0) for part in parts])
    averaged[:, 0] = [part[-1, 0] for part in parts]
    return averaged
