"""Evaluate trained runs: downstream tasks, loss on any text, routing, and the paper's theory."""
