"""Weights of other projects, for runs that start from them (train.init_from); exports of runs."""

import common  # noqa: F401  # checks this Python first
