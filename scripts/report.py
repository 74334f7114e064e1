"""`python -m scripts.report` is `python -m report`."""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m scripts.report")

import runpy

if __name__ == "__main__":
    runpy.run_module("report", run_name="__main__", alter_sys=True)
