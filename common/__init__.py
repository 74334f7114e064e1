"""Helpers that every package may use: commands, atomic files, tables, progress.

They import nothing else of this repository. Every package with commands imports this one first, so
that a Python that cannot run them is named in a line.
"""

import sys
from importlib.util import find_spec

NEEDED = ("torch", "numpy", "pydantic", "tqdm", "safetensors")  # others are imported when used


def find_python_problem() -> str:
    """Why this Python cannot run the commands; "" if it can."""
    if sys.version_info < (3, 11):  # noqa: UP036  # which is what it asks
        version = sys.version.split()[0]
        return f"Python {version} is too old, nanoKERN needs 3.11 or later"
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed for {sys.executable}"
    return ""


PROBLEM = find_python_problem()
if PROBLEM:
    print(
        f"error: {PROBLEM}: source .venv/bin/activate, which scripts/quickstart.sh makes, or "
        "pip install -r requirements.txt",
        file=sys.stderr,
    )
    raise SystemExit(2)
