"""Analyse what the routers of a trained run do: python -m eval.routing."""
