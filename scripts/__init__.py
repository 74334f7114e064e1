"""Commands, run from the root as `python -m scripts.NAME`."""

import common  # noqa: F401  # checks this Python first
