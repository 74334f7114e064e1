"""The file that lists the value of every key on each rung, so that no default changes unseen."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import check_regular
from configure.removed import REMOVED

FixedKeys = dict[str, Any]  # {key: its value} of a rung


def check_fixed_keys(path: Path, now: Sequence[FixedKeys]) -> list[FixedKeys]:
    """Compare the keys of every rung with a file, and return the file's.

    The file leaves out keys that are newer than its edition.

    Raises:
        ValueError: a key has another value `now`, or the file is damaged.
    """
    fixed = read_fixed_keys(path, len(now))
    for rung, listed in enumerate(fixed):
        for key, value in listed.items():
            current = REMOVED[key].default if key in REMOVED else now[rung].get(key)
            if current != value:
                change = f"{key} on rung {rung + 1} is {current}, not {value}"
                raise ValueError(f"{change} as in {path}: set file or default back")
    return fixed


def read_fixed_keys(path: Path, n_rungs: int) -> list[FixedKeys]:
    """Read {key: value} of each rung; ValueError if the file is damaged."""
    check_regular(path)
    try:
        fixed = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}; take it from git again") from None
    is_list = isinstance(fixed, list) and all(isinstance(settings, dict) for settings in fixed)
    if not is_list or len(fixed) != n_rungs:
        raise ValueError(f"{path}: not the keys of {n_rungs} rungs; take it from git again")
    return fixed
