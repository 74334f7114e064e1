"""Triton's interpreter with the arithmetic of a GPU (the differences: kernels/triton_tiles.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch


@contextmanager
def gpu_arithmetic() -> Iterator[None]:
    """Within this context maxima and minima drop NaN, and float32 is rounded to bfloat16.

    Whole numbers wrap around: to look for that at each sum took a third of the time.
    """
    from triton.runtime.interpreter import (
        InterpreterBuilder,
        InterpreterOptions,
        TensorHandle,
        interpreter_builder,
    )

    truncate = InterpreterBuilder.create_fp_trunc

    def round_to(self, source, dtype):
        if dtype.scalar.name != "bf16":
            return truncate(self, source, dtype)
        bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16)
        return TensorHandle(bits.numpy(), dtype.scalar)

    def binary(function):
        return lambda self, a, b: self.binary_op(a, b, function)

    options = InterpreterOptions(sanitize_overflow=False)
    as_on_gpu = {
        "create_fp_trunc": round_to,
        "create_maxnumf": binary(np.fmax),
        "create_minnumf": binary(np.fmin),
    }
    with (
        mock.patch.object(interpreter_builder, "options", options),
        mock.patch.multiple(InterpreterBuilder, **as_on_gpu),
    ):
        yield


@pytest.fixture(autouse=True, scope="module")
def like_gpu() -> Iterator[None]:
    """`gpu_arithmetic` for all tests of a file that imports this fixture, on a CPU."""
    if torch.cuda.is_available():
        yield
        return
    with gpu_arithmetic():
        yield
