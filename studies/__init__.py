"""Configs, records, tables and pictures of the studies behind docs/results.md."""
