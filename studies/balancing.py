"""Four routers, each with four kinds of balancing: the study form_balance.

    python -m studies.balancing runs/form_balance-*

A seed counts where all 16 of its runs ended. The contrast is kern's lead over softmax-renorm
without balancing, minus its lead with a balance loss. It has no verdict before all seeds of the
study's config file count.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from report.__main__ import make_report_parser
from report.blocks import Table
from report.comparisons import Difference, estimate_difference, judge_family
from report.groups import Group, Variant
from report.style import choose_style
from report.tables import read_measure
from studies.command import print_tables, read_with_notes

CONFIG = Path(__file__).with_name("config") / "form_balance.toml"
BALANCE_KEYS = ("train.balance_loss_coef", "train.bias_update", "train.bias_update_rate")
BALANCINGS = ("none", "balance loss", "selection bias", "quantile")
LEADER = "kern"
REFERENCE = "softmax-renorm"


class Study(NamedTuple):
    """The runs of the study that are in."""

    group: Group
    variants: dict[tuple[str, str], Variant]  # {(router, balancing)}, as in the config file
    seeds: list[int]  # those with a run of every variant
    n_planned: int  # seeds in the config file

    @property
    def is_finished(self) -> bool:
        """True if all planned seeds are in."""
        return len(self.seeds) == self.n_planned

    def losses(self, router: str, balancing: str) -> np.ndarray:
        """(S,) final losses of a variant's `seeds`, nats per byte."""
        runs = self.variants[router, balancing].runs_at()
        return np.array([self.group.loss(runs[seed]) for seed in self.seeds])

    def measure_lead(self, balancing: str) -> np.ndarray:
        """(S,) losses of REFERENCE minus those of LEADER."""
        return self.losses(REFERENCE, balancing) - self.losses(LEADER, balancing)


def name_balancing(loss_coef: float, bias_update: str, bias_rate: float) -> str:
    """The member of BALANCINGS that values of BALANCE_KEYS stand for."""
    if bias_update == "quantile":
        return "quantile"
    if bias_rate > 0:
        return "selection bias"
    return "balance loss" if loss_coef > 0 else "none"


def read_study(argv: Sequence[str]) -> Study:
    """Read the runs that the command's arguments name.

    Raises:
        ValueError: they are several groups, or no seed has all runs of the config file.
    """
    args = make_report_parser("studies.balancing", __doc__).parse_args(argv)
    groups = read_with_notes(args).groups
    if len(groups) > 1:
        raise ValueError(f"expected runs of {CONFIG.name} alone, not of {len(groups)} settings")
    variants_in = {}
    for variant in groups[0].variants:
        balance = [variant.options[key] for key in BALANCE_KEYS]
        variants_in[variant.router, name_balancing(*balance)] = variant
    sweep = tomllib.loads(CONFIG.read_text())["sweep"]
    seeds = set(sweep["run.seed"])
    variants = {}
    for router, *balance in sweep[", ".join(["model.router", *BALANCE_KEYS])]:
        balancing = name_balancing(*balance)
        if (router, balancing) in variants_in:
            variants[router, balancing] = variants_in[router, balancing]
            seeds &= set(variants[router, balancing].runs_at())
        else:
            seeds.clear()
    if not seeds:
        raise ValueError(f"no seed of {CONFIG.name} has all its runs; train the others first")
    return Study(groups[0], variants, sorted(seeds), len(sweep["run.seed"]))


def tabulate(argv: Sequence[str]) -> list[Table]:
    """The table of all variants, and the contrast."""
    study = read_study(argv)
    return [tabulate_variants(study), tabulate_contrast(study)]


def tabulate_variants(study: Study) -> Table:
    """Means over seeds with 95% intervals by Student's t."""
    head = f"seeds of {study.n_planned}"
    columns = ["router", "balancing", head, "loss, 95%", f"minus {LEADER}, 95%"]
    table = Table([*columns, "load imbalance", "dead experts", "gates that are 0"])
    for (router, balancing), variant in study.variants.items():
        losses = study.losses(router, balancing)
        row = {
            "router": f"**{router}**",
            "balancing": balancing,
            head: str(len(study.seeds)),
            "loss, 95%": format_half_width(estimate_difference(losses)).removeprefix("+"),
        }
        if router != LEADER:
            difference = estimate_difference(losses - study.losses(LEADER, balancing))
            row[f"minus {LEADER}, 95%"] = format_half_width(difference)
        runs_by_seed = variant.runs_at()
        runs = [runs_by_seed[seed] for seed in study.seeds]
        imbalance = read_measure(study.group, runs, "val/load_imbalance")
        dead_experts = read_measure(study.group, runs, "val/dead_experts")
        zero_gates = read_measure(study.group, runs, "val/zero_gates")
        row["load imbalance"] = f"{np.mean(imbalance):.1f}"
        row["dead experts"] = f"{np.mean(dead_experts):.1f}"
        row["gates that are 0"] = f"{np.mean(zero_gates):.1%}"
        table.rows.append(row)
    return table


def format_half_width(difference: Difference) -> str:
    """A difference as mean ± half its 95% interval, which one seed does not have."""
    mean = f"{difference.mean:+.4f}"
    return f"{mean} ± {difference.half_width:.4f}" if difference.over else mean


def tabulate_contrast(study: Study) -> Table:
    """The two leads, and the contrast with its verdict."""
    contrast_by_seed = study.measure_lead("none") - study.measure_lead("balance loss")
    (contrast,) = judge_family([estimate_difference(contrast_by_seed)])
    verdict = contrast.verdict if study.is_finished else "not finished"
    head = f"{len(study.seeds)} of {study.n_planned} seeds"
    columns = [head, "none", "balance loss", "none minus balance loss, 95%"]
    row = {
        head: f"**{REFERENCE} minus {LEADER}**",
        "none minus balance loss, 95%": str(contrast),
        "lead without balancing is": f"**{verdict}**",
    }
    for balancing in ("none", "balance loss"):
        lead = estimate_difference(study.measure_lead(balancing))
        row[balancing] = format_half_width(lead)
    return Table([*columns, "lead without balancing is"], [row])


def plot(argv: Sequence[str]) -> Figure:
    """Loss by balancing: a line for each router, with 95% intervals from three seeds on."""
    study = read_study(argv)
    routers = list(dict.fromkeys(router for router, _ in study.variants))
    figure = Figure((7, 4.5), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(BALANCINGS))
    for index, router in enumerate(routers):
        means = []
        half_widths = []
        for balancing in BALANCINGS:
            loss = estimate_difference(study.losses(router, balancing))
            means.append(loss.mean)
            half_widths.append(loss.half_width if loss.over else 0.0)
        shift = 0.06 * (index - (len(routers) - 1) / 2)  # so that no interval hides another
        style = choose_style(router, routers)
        axes.errorbar(places + shift, means, yerr=half_widths, capsize=3, label=router, **style)
    axes.set_xticks(places, BALANCINGS)
    axes.set_xlabel("balancing")
    axes.set_ylabel(f"validation loss, {study.group.runs[0].unit}")
    unfinished = "" if study.is_finished else ", not finished"
    axes.set_title(f"{len(study.seeds)} of {study.n_planned} seeds{unfinished}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    print_tables(tabulate)
