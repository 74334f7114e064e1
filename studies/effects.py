"""The effect of each part of KERN's formula on the loss: the factorial study.

    python -m studies.effects runs/factorial-*-top_k8-* --margin 0.012

The runs have the eight routers with and without the L2 norm, the ReLU and γ. A part's effect is the
mean loss of the four routers with it minus that of the four without it, by seed.
"""

from collections.abc import Sequence

import numpy as np

from common.command import command, run_command
from report.__main__ import make_parser
from report.blocks import Table
from report.comparisons import estimate_difference, judge_family
from report.groups import Group
from report.page import read_report
from report.tables import describe_draws, format_p
from router import find_spec

PARTS = ("l2 norm", "ReLU", "γ")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of each group."""
    for table in tabulate(argv):
        print(table.to_text() + "\n")


def tabulate(argv: Sequence[str] | None) -> list[Table]:
    """The effects, a table for each group."""
    args = make_parser("studies.effects", __doc__).parse_args(argv)
    return [tabulate_effects(group, args.margin) for group in read_report(args).groups]


def tabulate_effects(group: Group, margin: float) -> Table:
    """The effects of PARTS, one family.

    Raises:
        ValueError: the routers of the group are not the eight formulas.
    """
    has_part = []  # of each router
    runs_of_router = []  # {seed: run}
    for variant in group.variants:
        spec = find_spec(variant.router)
        if spec is not None:
            has_part.append([spec.pre == "l2 over all", spec.phi == "relu", spec.gamma])
            runs_of_router.append(variant.runs_by_x[None])
    n_formulas = len({tuple(parts) for parts in has_part})
    if n_formulas != 8 or len(has_part) != 8:
        raise ValueError("expected runs of the eight formulas with and without each part")
    seeds = sorted(set.intersection(*map(set, runs_of_router)))
    losses = np.zeros((8, len(seeds)))
    for i, runs in enumerate(runs_of_router):
        losses[i] = [group.loss(runs[seed]) for seed in seeds]
    differences = []
    for with_part in np.array(has_part).T:
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
    run_command(main)
