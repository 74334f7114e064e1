"""Helpers that every package may use: commands, atomic files, tables, progress.

They import nothing else of this repository.
"""
