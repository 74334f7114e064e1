"""Evaluate trained runs: downstream tasks, loss on any text, and routing."""
