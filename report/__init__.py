"""Runs sorted into settings, their losses paired, the paper's claims judged, on one page."""

import common  # noqa: F401  # checks this Python first
