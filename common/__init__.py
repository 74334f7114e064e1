"""What every package may use: the frame of a command, files written in full, tables, progress.

Imports none of ours.
"""
