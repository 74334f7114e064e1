"""`python -m scripts.export` is `python -m hf.export.export`."""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m scripts.export")

import runpy

if __name__ == "__main__":
    runpy.run_module("hf.export.export", run_name="__main__", alter_sys=True)
