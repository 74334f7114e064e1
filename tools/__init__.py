"""Developers' commands, run from the root as `python -m tools.NAME`."""
