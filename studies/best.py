"""Compare routers at their best values of a key, chosen by some seeds and judged by the others.

    python -m studies.best runs/norm-*_coef0.01-* --over model.gate_norm --choose-on 0 1 2 3

A router's best value has its lowest mean loss over the seeds of --choose-on. Without --choose-on
all seeds choose and judge, which flatters the best of many values. Used by the studies norm and
logits.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from report.__main__ import make_report_parser
from report.blocks import Table
from report.comparisons import Comparison, judge_pairs
from report.groups import Group, Variant
from report.run import format_value, join_labels
from report.tables import build_pairs_table
from studies.command import print_tables, read_with_notes


def tabulate(argv: Sequence[str]) -> list[Table]:
    """The verdicts on best values, a table for each group."""
    parser = make_report_parser("studies.best", __doc__)
    parser.add_argument("--choose-on", nargs="+", type=int, default=(), metavar="SEED")
    args = parser.parse_args(argv)
    if not args.over:
        raise ValueError("a best value is one of a key: name the key with --over")
    tables = []
    for group in read_with_notes(args).groups:
        comparisons = compare_best(group, args.choose_on, args.margin)
        tables.append(build_pairs_table(group, comparisons))
    return tables


def compare_best(group: Group, seeds: Sequence[int], margin: float = 0.0) -> list[Comparison]:
    """Compare variants at their best values of the key, by the seeds that did not choose them.

    Without `seeds` all seeds choose and judge.

    Raises:
        ValueError: a variant lacks one of the seeds, or has no other seed.
    """
    best = [choose_best(group, variant, seeds) for variant in group.variants]
    best.sort(key=lambda variant: np.mean([group.loss(run) for run in variant.runs.values()]))
    return judge_pairs(group, combinations(best, 2), margin)


def choose_best(group: Group, variant: Variant, seeds: Sequence[int]) -> Variant:
    """A variant at its value of the key with the lowest mean loss of `seeds`, with its other seeds.

    Without `seeds` the mean is of all seeds, and all are kept.

    Raises:
        ValueError: it lacks one of the seeds, or has no other seed.
    """
    means = {}
    for x in variant.xs:
        runs = variant.runs_at(x)
        missing = sorted(set(seeds) - runs.keys())
        if missing:
            raise ValueError(
                f"--choose-on {missing[0]}: {variant.label} has no run of this seed at {x:g}"
            )
        means[x] = np.mean([group.loss(runs[seed]) for seed in seeds or runs])
    x = min(means, key=means.__getitem__)
    judges = {}
    for seed, run in variant.runs_at(x).items():
        if seed not in seeds:
            judges[None, seed] = run
    if not judges:
        raise ValueError(
            f"--choose-on {', '.join(map(str, seeds))}: {variant.label} has no other seed to "
            "judge by"
        )
    label = join_labels([variant.options_label, format_value(group.key, x)])
    return Variant(variant.router, variant.options, judges, label)


if __name__ == "__main__":
    print_tables(tabulate)
