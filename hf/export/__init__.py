"""Runs in the formats of other projects: the command that writes them, and the files it ships."""
