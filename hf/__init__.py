"""Weights of other projects: runs that start from them (train.init_from), and runs written in their formats."""
