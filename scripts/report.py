"""`python -m scripts.report` is `python -m report`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("report", run_name="__main__", alter_sys=True)
