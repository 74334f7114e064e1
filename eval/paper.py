"""What the paper prints: paper_numbers.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
EXPERIMENTS = FOLDER.parent / "config/paper"
NUMBERS: dict[str, list[dict[str, Any]]] = tomllib.loads((FOLDER / "paper_numbers.toml").read_text())
STEPS = 50_000  # of every run in the paper


def find_paper_table(experiment: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an experiment whose conditions are met by `values` ({key: value} of a config), {} without one."""
    for table in NUMBERS.get(experiment, []):
        if all(values[key] == value for key, value in table.get("where", {}).items()):
            return table
    return {}


class PaperLosses(NamedTuple):
    """The paper's validation losses in one setting, by (router, tenths of training: 1 for 5K, …, 10 for 50K)."""

    losses: dict[tuple[str, int], float] = {}
    deviations: dict[tuple[str, int], float] = {}  # over seeds
    doubts: dict[tuple[str, int], str] = {}  # what contradicts the loss

    def subtract(self, left: str, right: str, tenth: int | None) -> str:
        """Loss of the router `left` minus that of `right`; "" if one is not printed or doubtful."""
        printed = {key[0]: loss for key, loss in self.losses.items() if key[1] == tenth and key not in self.doubts}
        return f"{printed[left] - printed[right]:+.4f}" if {left, right} <= printed.keys() else ""

    def format_loss(self, router: str, tenth: int) -> str:
        """The loss with its deviation and a mark of doubt; "" if it is not printed."""
        at = router, tenth
        deviation = f" ± {self.deviations[at]:.4f}" if at in self.deviations else ""
        return f"{self.losses[at]:.4f}{deviation}{'?' if at in self.doubts else ''}" if at in self.losses else ""


def read_paper_losses(experiment: str, values: Mapping[str, Any]) -> PaperLosses:
    """The losses of a file in config/paper in the setting of `values`. Raises ValueError of any other experiment."""
    if not (EXPERIMENTS / f"{experiment}.toml").is_file():
        printed = ", ".join(stem for stem, tables in NUMBERS.items() if "loss" in tables[0])
        raise ValueError(f"--experiment {experiment}: not a file in config/paper; the paper prints losses of {printed}")
    table = find_paper_table(experiment, values)

    def by_tenth(kind: str) -> dict[tuple[str, int], float]:
        rows = table.get(kind, {}).items()
        return {(router, int(at[:-1]) // 5): number for router, row in rows for at, number in row.items()}

    doubts = {(at.split()[0], int(at.split()[1][:-1]) // 5): why for at, why in table.get("doubtful", {}).items()}
    return PaperLosses(by_tenth("loss"), by_tenth("std"), doubts)
