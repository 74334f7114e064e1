"""The growth of the best gate norm with top_k: the transfer study.

    python -m studies.growth runs/transfer-* --over model.gate_norm

A seed's best norm is the vertex of the parabola through its lowest loss and the two neighbours,
over log norm; the end of the range where the loss is lowest there. The slope of log best norm on
log top_k, by least squares, is ½ if the best norm grows as √top_k.
"""

from collections.abc import Sequence

import numpy as np

from common.command import command, run_command
from report.__main__ import make_parser
from report.blocks import Table
from report.comparisons import estimate_difference
from report.groups import Group, Variant
from report.page import read_report

TOP_K = "model.top_k"


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    for table in tabulate(argv):
        print(table.to_text() + "\n")


def tabulate(argv: Sequence[str] | None) -> list[Table]:
    """The table of all groups together."""
    args = make_parser("studies.growth", __doc__).parse_args(argv)
    return [tabulate_growth(read_report(args).groups)]


def tabulate_growth(groups: Sequence[Group]) -> Table:
    """The best gate norm of each router in groups that differ in top_k, and its slope."""
    groups = sorted(groups, key=lambda group: group.values[TOP_K])
    columns = [f"top_k {group.values[TOP_K]}" for group in groups]
    log_top_k = np.log2([group.values[TOP_K] for group in groups])
    table = Table(["best norm", *columns, "slope, 95%"])
    for variant in groups[0].variants:
        same_router = [find_variant(group, variant.router) for group in groups]
        seeds = find_common_seeds(same_router)
        log_norms = np.zeros((len(groups), len(seeds)))
        for i, group in enumerate(groups):
            log_norms[i] = [find_log_best(group, same_router[i], seed) for seed in seeds]
        row = {"best norm": f"**{variant.router}**"}
        for column, logs in zip(columns, log_norms, strict=True):
            row[column] = f"{2 ** logs.mean():.2f}"
        slopes = np.polyfit(log_top_k, log_norms, 1)[0]
        row["slope, 95%"] = str(estimate_difference(slopes))
        table.rows.append(row)
    return table


def find_variant(group: Group, router: str) -> Variant:
    """The group's first variant of a router."""
    return next(variant for variant in group.variants if variant.router == router)


def find_common_seeds(variants: Sequence[Variant]) -> list[int]:
    """The seeds that the variants have at every value of the key."""
    seeds_of_cells = []
    for variant in variants:
        seeds_of_cells += [set(runs) for runs in variant.runs_by_x.values()]
    return sorted(set.intersection(*seeds_of_cells))


def find_log_best(group: Group, variant: Variant, seed: int) -> float:
    """log2 of the value of the key at which a seed's loss is lowest."""
    xs = sorted(variant.runs_by_x)
    log_xs = np.log2(xs)
    losses = np.array([group.loss(variant.runs_by_x[x][seed]) for x in xs])
    lowest = int(losses.argmin())
    if lowest in (0, len(xs) - 1):
        return float(log_xs[lowest])
    neighbours = slice(lowest - 1, lowest + 2)
    square, linear, _ = np.polyfit(log_xs[neighbours], losses[neighbours], 2)
    return float(-linear / (2 * square))


if __name__ == "__main__":
    run_command(main)
