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


def remember_types() -> None:
    """Let Triton's interpreter make each block type once, and look numpy's types up by name.

    It did both anew for each operation: a quarter of the time of a kernel.
    """
    from triton.language.core import block_type
    from triton.runtime import interpreter

    find_numpy_type = interpreter._get_np_dtype
    fill_block_type = block_type.__init__
    numpy_types = {}
    block_types = {}  # {(element type, *sizes): attributes}

    def find_by_name(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = find_numpy_type(dtype)
        return numpy_types[dtype.name]

    def fill_once(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in block_types:
            fill_block_type(self, element_ty, shape)
            block_types[key] = vars(self).copy()
        vars(self).update(block_types[key])

    interpreter._get_np_dtype = find_by_name
    block_type.__init__ = fill_once


# Matrices are tiny here: a second thread makes them slower, up to 100 times where cores are shared.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        patch_once()
        remember_types()
# Every run waits for its last save: polls of 50 ms would add up to half a minute.
checkpoint.POLL_SECONDS = 0.002
