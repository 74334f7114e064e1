"""Commands, run from the root as `python -m scripts.NAME`."""
