"""What the paper prints: paper_numbers.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
EXPERIMENTS = FOLDER.parent / "config/paper"
NUMBERS: dict[str, list[dict[str, Any]]] = tomllib.loads(
    (FOLDER / "paper_numbers.toml").read_text()
)


def find_paper_table(experiment: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an experiment whose conditions are met by `values` ({key: value} of a config), {} without one."""
    for table in NUMBERS.get(experiment, []):
        if all(values[key] == value for key, value in table.get("where", {}).items()):
            return table
    return {}


def read_paper_losses(experiment: str, values: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """The paper's losses by (router, tenths of training: 1 for 5K, …, 10 for 50K) in the setting of `values`.

    As text: `3.4429 ± 0.0040` with the deviation over seeds where it is printed, and `?` if the
    number is doubtful. Raises ValueError if `experiment` is not a file in config/paper.
    """
    if not (EXPERIMENTS / f"{experiment}.toml").is_file():
        printed = ", ".join(stem for stem, tables in NUMBERS.items() if "loss" in tables[0])
        raise ValueError(
            f"--experiment {experiment}: not a file in config/paper; the paper prints losses of {printed}"
        )
    table = find_paper_table(experiment, values)
    losses = {}
    for router, row in table.get("loss", {}).items():
        for at, loss in row.items():
            deviation = table.get("std", {}).get(router, {}).get(at)
            text = f"{loss:.4f}" if deviation is None else f"{loss:.4f} ± {deviation:.4f}"
            doubt = "?" if f"{router} {at}" in table.get("doubtful", {}) else ""
            losses[router, int(at.removesuffix("K")) // 5] = text + doubt
    return losses
