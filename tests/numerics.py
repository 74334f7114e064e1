"""Compare results in floating point on any CPU: tolerances that follow from the format, inputs from
numbered seeds.

`TEST_SEED=3` draws every input of `seeded` anew, `TEST_TOLERANCE=0.5` halves every tolerance:
tools/any_cpu.sh runs the tests marked `numerics` under many of both.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SEED = int(os.environ.get("TEST_SEED", 0))
SHARE = float(os.environ.get("TEST_TOLERANCE", 1))  # of each tolerance that an error may use
GUARD = 0x7B  # 61280 in float16, 1e36 in bfloat16 and float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of inputs and of their references
# of tensors, or of lists and dicts of them: equal to the bit, and of equal dtypes
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def seeded(number: int = 0, device: str = "cpu") -> torch.Generator:
    """A generator for the inputs of a test: another one for each `number` and each TEST_SEED."""
    return torch.Generator(device).manual_seed(number + 1_000_003 * SEED)


def tolerance(dtype: torch.dtype, length: int, roundings: float = 1.5) -> float:
    """Largest error of a tensor relative to its norm: `roundings` · ε(dtype) + √length / 2 ·
    ε(sum).

    A value rounded once errs by ε/2 at most; `roundings` counts how often a value passes through
    `dtype`, doubled for room. Sums accumulate in float32 or a wider dtype. A sum of n terms errs by
    n ε at worst and by about √n ε/2 at random, in any order: the order differs with the CPU and its
    libraries.

    Args:
        dtype: format of inputs and results.
        length: terms of the longest sum.
        roundings: roundings to `dtype` on the way.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return roundings * torch.finfo(dtype).eps + 0.5 * math.sqrt(length) * torch.finfo(wide).eps


def assert_near(
    actual: Tensor,
    wanted: Tensor,
    tolerance: float,
    name: str = "result",
    size: Tensor | None = None,
) -> None:
    """Assert equal shapes and ‖actual − wanted‖ ≤ tolerance · ‖wanted‖, in float64.

    NaN and Inf fail.

    Where terms cancel, the sum is smaller than its error deserves: `size`, like `wanted`, is then
    √Σ term².
    """
    assert actual.shape == wanted.shape, name
    actual, wanted = actual.detach().double(), wanted.detach().double()
    error = (actual - wanted).norm().item()
    limit = SHARE * tolerance * (wanted if size is None else size.double()).norm().item()
    # not of an infinite norm
    assert error == 0 or error < limit, f"{name}: error {error:.1e}, at most {limit:.1e}"


def differentiate(
    outputs: Sequence[Tensor | None], leaves: Sequence[Tensor | None], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs, detached, and the gradient of each leaf from `upstream`, those of the outputs.

    What is None is left out.
    """
    outputs, leaves = ([t for t in tensors if t is not None] for tensors in (outputs, leaves))
    loss = sum((out * d.to(out)).sum() for out, d in zip(outputs, upstream, strict=False))
    return [*(out.detach() for out in outputs), *torch.autograd.grad(loss, leaves)]


def as_leaves(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Leaves with the values of tensors, in `dtype`; None stays."""
    return [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors
    ]


@contextmanager
def guarded_buffers(guard: int = 2**17) -> Iterator[None]:
    """Surround what is allocated by torch.empty, empty_like and new_empty with `guard` bytes;
    assert that none changes.

    A kernel whose mask lets too much through writes there. Buffers are filled with the byte 255,
    NaN in any format: an element that nobody writes shows in the results. Guards hold a number,
    since a sum with NaN would stay NaN.
    """
    allocate, allocated = torch.empty, []

    def empty(*shape: int, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
        size = torch.Size(shape if not shape or isinstance(shape[0], int) else shape[0])
        dtype = dtype or torch.get_default_dtype()
        raw = allocate(2 * guard + size.numel() * dtype.itemsize, dtype=torch.uint8, device=device)
        raw.fill_(GUARD)[guard : len(raw) - guard] = 255
        allocated.append(raw)
        buffer = allocate(0, dtype=dtype, device=device)
        return buffer.set_(raw.untyped_storage(), guard // dtype.itemsize, size)

    def new_empty(
        like: Tensor, *shape: int, dtype: torch.dtype | None = None, device: object = None
    ) -> Tensor:
        return empty(*shape, dtype=dtype or like.dtype, device=device or like.device)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", lambda like: new_empty(like, like.shape)),
        mock.patch.object(Tensor, "new_empty", new_empty),
    ):
        yield
    for raw in allocated:
        assert (raw[:guard] == GUARD).all() and (raw[-guard:] == GUARD).all(), (
            "a kernel wrote outside of its buffer"
        )


class Operators(TorchDispatchMode):
    """Names of operators that are no views, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "_unsafe_view" not in str(function):
            self.names.append(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))
