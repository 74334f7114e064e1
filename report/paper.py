"""The numbers that the paper prints: paper_numbers.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import is_file
from report.blocks import Table

FOLDER = Path(__file__).parent
EXPERIMENTS = FOLDER.parent / "config/paper"
PaperTable = dict[str, Any]
NUMBERS: dict[str, list[PaperTable]] = tomllib.loads((FOLDER / "paper_numbers.toml").read_text())


def find_paper_table(experiment: str, values: Mapping[str, Any]) -> PaperTable:
    """The table of an experiment whose conditions `values` ({key: value} of a config) meet.

    {} without one, also if `values` lacks a condition's key, which then varies.
    """
    for table in NUMBERS.get(experiment, []):
        conditions = table.get("where", {})
        if all(values.get(key) == value for key, value in conditions.items()):
            return table
    return {}


def build_paper_table(experiment: str, values: Mapping[str, Any]) -> Table:
    """The losses that the paper prints in the setting of `values`, {key: value} of a config.

    They have the deviation over seeds where it is printed, and ? if they are doubtful. Steps are
    the paper's, of 50,000. The table is empty if the paper prints none.
    """
    numbers = find_paper_table(experiment, values)
    rows = []
    for router, losses in numbers.get("loss", {}).items():
        row = {"paper at step": router}
        for steps, loss in losses.items():
            row[steps] = f"{loss:.4f}"
            if "std" in numbers:
                row[steps] += f" ± {numbers['std'][router][steps]:.4f}"
            if f"{router} {steps}" in numbers.get("doubtful", {}):
                row[steps] += "?"
        rows.append(row)
    return Table("The paper's losses", rows)


def check_experiment(experiment: str) -> None:
    """Raise ValueError if `experiment` is not a file in config/paper."""
    if not is_file(EXPERIMENTS / f"{experiment}.toml"):
        printed = ", ".join(stem for stem, tables in NUMBERS.items() if "loss" in tables[0])
        raise ValueError(
            f"--experiment {experiment}: not a file in config/paper; "
            f"the paper prints losses of {printed}"
        )
