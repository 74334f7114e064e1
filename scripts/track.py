"""`python -m scripts.track` is `python -m track`."""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m scripts.track")

import runpy

if __name__ == "__main__":
    runpy.run_module("track", run_name="__main__", alter_sys=True)
