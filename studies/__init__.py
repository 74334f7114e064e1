"""What made docs/results.md: the studies' tables and pictures from their records."""
