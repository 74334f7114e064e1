"""What made docs/results.md: configs and records of the studies, and their tables and pictures."""
