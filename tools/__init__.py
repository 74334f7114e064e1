"""Developers' commands, run from the root as `python -m tools.NAME`."""

import common  # noqa: F401  # checks this Python first
