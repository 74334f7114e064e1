"""The growth of the best gate norm with top_k: the transfer study.

    python -m studies.growth runs/transfer-* --over model.gate_norm

A seed's best norm is the vertex of the parabola through its lowest loss and the two neighbours,
over log norm; the end of the range where the loss is lowest there. The slope of log best norm on
log top_k, by least squares, is ½ if the best norm grows as √top_k. The slopes are one family.
"""

from collections.abc import Sequence

import numpy as np

from report.__main__ import make_report_parser
from report.blocks import Table
from report.comparisons import estimate_difference, judge_family
from report.groups import Group, Variant
from report.tables import format_p
from studies.command import print_tables, read_with_notes

TOP_K = "model.top_k"


def tabulate(argv: Sequence[str]) -> list[Table]:
    """The table of all groups together."""
    args = make_report_parser("studies.growth", __doc__).parse_args(argv)
    return [tabulate_growth(read_with_notes(args).groups)]


def tabulate_growth(groups: Sequence[Group]) -> Table:
    """The best gate norm of each router in groups that differ in top_k, and its slope.

    The groups have the same routers, with the same seeds at every norm.
    """
    groups = sorted(groups, key=lambda group: group.values[TOP_K])
    top_k = [group.values[TOP_K] for group in groups]
    columns = [f"top_k {count}" for count in top_k]
    table = Table(["best norm", *columns, "slope, 95%", "Holm's p"])
    slopes = []
    for variants in zip(*(group.variants for group in groups), strict=True):
        log_norms = np.array([find_log_best(variant) for variant in variants])  # (groups, seeds)
        row = {"best norm": f"**{variants[0].router}**"}
        for column, logs in zip(columns, log_norms, strict=True):
            row[column] = f"{2 ** logs.mean():.2f}"
        slopes_of_seeds = np.polyfit(np.log2(top_k), log_norms, 1)[0]
        slopes.append(estimate_difference(slopes_of_seeds))
        table.rows.append(row)
    for row, slope in zip(table.rows, judge_family(slopes), strict=True):
        row["slope, 95%"] = str(slope)
        row["Holm's p"] = format_p(slope)
    return table


def find_log_best(variant: Variant) -> list[float]:
    """log2 of the norm at which the loss of each seed is lowest."""
    norms = variant.xs
    xs = np.log2(norms)
    best = []
    for seed in sorted(variant.runs_at(norms[0])):
        runs = [variant.runs[norm, seed] for norm in norms]
        losses = [run.evaluations[run.max_steps]["val/loss"] for run in runs]
        lowest = int(np.argmin(losses))
        if lowest in (0, len(xs) - 1):
            best.append(xs[lowest])
            continue
        neighbours = slice(lowest - 1, lowest + 2)
        square, linear, _ = np.polyfit(xs[neighbours], losses[neighbours], 2)
        best.append(-linear / (2 * square))
    return best


if __name__ == "__main__":
    print_tables(tabulate)
