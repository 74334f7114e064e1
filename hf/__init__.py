"""Weights of other projects, for runs that start from them (train.init_from); exports of runs."""
