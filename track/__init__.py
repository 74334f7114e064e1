"""The router track: one fixed contest that any router can enter; track/README.md is its page."""

import common  # noqa: F401  # checks this Python first
