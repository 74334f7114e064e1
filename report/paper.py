"""The numbers that the paper prints: paper_numbers.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
EXPERIMENTS = FOLDER.parent / "config/paper"
PaperTable = dict[str, Any]
NUMBERS: dict[str, list[PaperTable]] = tomllib.loads((FOLDER / "paper_numbers.toml").read_text())


def find_paper_table(experiment: str, values: Mapping[str, Any]) -> PaperTable:
    """The table of an experiment whose conditions `values` ({key: value} of a config) meet.

    {} without one.
    """
    for table in NUMBERS.get(experiment, []):
        conditions = table.get("where", {})
        if all(values[key] == value for key, value in conditions.items()):
            return table
    return {}


def read_paper_losses(experiment: str, values: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """The paper's losses in the setting of `values`, {key: value} of a config.

    Returns:
        {(router, tenths of training: 1 for 5K, …, 10 for 50K): text}, such as `3.4429 ± 0.0040`
        with the deviation over seeds where it is printed, and `?` if the number is doubtful.

    Raises:
        ValueError: `experiment` is not a file in config/paper.
    """
    if not (EXPERIMENTS / f"{experiment}.toml").is_file():
        printed = ", ".join(stem for stem, tables in NUMBERS.items() if "loss" in tables[0])
        raise ValueError(
            f"--experiment {experiment}: not a file in config/paper; "
            f"the paper prints losses of {printed}"
        )
    table = find_paper_table(experiment, values)
    losses = {}
    for router, row in table.get("loss", {}).items():
        for steps, loss in row.items():  # steps as printed: 5K
            tenths = int(steps.removesuffix("K")) // 5
            losses[router, tenths] = format_loss(table, router, steps, loss)
    return losses


def format_loss(table: PaperTable, router: str, steps: str, loss: float) -> str:
    """A printed loss with its deviation, and `?` if it is doubtful."""
    text = f"{loss:.4f}"
    deviation = table.get("std", {}).get(router, {}).get(steps)
    if deviation is not None:
        text += f" ± {deviation:.4f}"
    if f"{router} {steps}" in table.get("doubtful", {}):
        text += "?"
    return text
