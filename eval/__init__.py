"""Evaluate trained runs: downstream tasks, loss on any text, and routing."""

import common  # noqa: F401  # checks this Python first
