"""The effect of each part of KERN's formula on the loss: the factorial study.

    python -m studies.effects runs/factorial-*-top_k8-* --margin 0.012

The runs have the eight routers with and without the L2 norm, the ReLU and γ. A part's effect is the
mean loss of the four routers with it minus the mean of the four without it, by seed.
"""

from collections.abc import Sequence

import numpy as np

from report.__main__ import make_report_parser
from report.blocks import Table
from report.comparisons import estimate_difference, judge_family
from report.groups import Group
from report.tables import describe_draws, format_p
from router import find_spec
from studies.command import print_tables, read_with_notes

PARTS = ("l2 norm", "ReLU", "γ")


def tabulate(argv: Sequence[str]) -> list[Table]:
    """The effects, a table for each group."""
    args = make_report_parser("studies.effects", __doc__).parse_args(argv)
    return [tabulate_effects(group, args.margin) for group in read_with_notes(args).groups]


def tabulate_effects(group: Group, margin: float) -> Table:
    """The effects of PARTS, one family.

    Raises:
        ValueError: the routers of the group are not the eight formulas.
    """
    runs_of_formula = {}  # {(l2 norm, ReLU, γ): {seed: run}}
    for variant in group.variants:
        spec = find_spec(variant.router)
        if spec is not None:
            parts = (spec.pre == "l2 over all", spec.phi == "relu", spec.gamma)
            runs_of_formula[parts] = variant.runs_at()
    if not len(runs_of_formula) == len(group.variants) == 8:
        raise ValueError("expected runs of the eight formulas with and without each part")
    seeds = sorted(set.intersection(*map(set, runs_of_formula.values())))
    losses = np.zeros((8, len(seeds)))
    for row, runs in zip(losses, runs_of_formula.values(), strict=True):
        row[:] = [group.loss(runs[seed]) for seed in seeds]
    differences = []
    for with_part in np.array(list(runs_of_formula)).T:  # (8,), True for formulas with the part
        effect = losses[with_part].mean(axis=0) - losses[~with_part].mean(axis=0)
        differences.append(estimate_difference(effect))
    columns = ["part of the formula", "with minus without, 95%", "interval over"]
    table = Table([*columns, "with is", "Holm's p"])
    for part, difference in zip(PARTS, judge_family(differences, margin), strict=True):
        table.rows.append(
            {
                "part of the formula": f"**{part}**",
                "with minus without, 95%": str(difference),
                "interval over": describe_draws(difference),
                "with is": f"**{difference.verdict}**",
                "Holm's p": format_p(difference),
            }
        )
    return table


if __name__ == "__main__":
    print_tables(tabulate)
