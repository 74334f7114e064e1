"""`python -m scripts.track` is `python -m track`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("track", run_name="__main__", alter_sys=True)
