"""Test the paper's analytical claims: python -m eval.theory."""
