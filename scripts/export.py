"""`python -m scripts.export` is `python -m hf.export.export`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("hf.export.export", run_name="__main__", alter_sys=True)
