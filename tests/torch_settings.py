"""Settings of torch and of runtime/checkpoint.py in each process that runs tests.

conftest.py imports it before the first test module.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from runtime import checkpoint


def patch_once() -> None:
    """Let Triton's interpreter patch its language once for each module of kernels.

    It does so at each launch, and at each call of a function by a kernel: a quarter of the time of
    the tests of kernels.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched = {}  # by id; holds the modules' names, so that no id comes twice

    def patch_new(fn: Callable) -> interpreter._LangPatchScope:
        if id(fn.__globals__) not in patched:
            patched[id(fn.__globals__)] = fn.__globals__
            patch(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch_new


# Matrices are tiny here: a second thread makes them slower, up to 100 times where cores are shared.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        patch_once()
# Every run waits for its last save: polls of 50 ms would add up to half a minute.
checkpoint.POLL_SECONDS = 0.002
