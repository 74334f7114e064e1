"""`python -m scripts.report` is `python -m report`."""

from common.command import run_command
from report.__main__ import main

if __name__ == "__main__":
    run_command(main)
