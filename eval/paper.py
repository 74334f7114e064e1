"""What the paper claims and prints: paper_claims.toml and paper_numbers.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CLAIMS: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "paper_claims.toml").read_text())
NUMBERS: dict[str, list[dict[str, Any]]] = tomllib.loads((FOLDER / "paper_numbers.toml").read_text())


def find_paper_table(experiment: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an experiment whose conditions are met by `values` ({key: value} of a config), {} without one."""
    for table in NUMBERS.get(experiment, []):
        if all(values[key] == value for key, value in table.get("where", {}).items()):
            return table
    return {}
