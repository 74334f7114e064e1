"""A GPU that computes nothing, so that the Python of GPU tests runs on a CPU.

Tensors on it have a shape, a dtype and a device, but no values. An operator refuses tensors of two
devices and a generator of another device, as on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import InterpretedFunction

NAME = "fakegpu"
FIRST_SEED = 2**62  # of a generator on it
AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
HALF = [torch.float16, torch.bfloat16]


class Generator(torch.Generator):
    """A generator on the CPU or, by its large seed, on the fake GPU."""

    def __new__(cls, device: str = "cpu") -> "Generator":
        return super().__new__(cls)

    def __init__(self, device: str = "cpu") -> None:
        self.first_seed = FIRST_SEED if device == NAME else 0

    def manual_seed(self, seed: int) -> "Generator":
        super().manual_seed(self.first_seed + seed)
        return self


class FakeGPU(FakeTensorMode):
    """The mode under which such tensors are made. Every comparison of their values is true."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool  # 0 of a number: no error, no norm
        if func is torch.ops.aten.equal.default:
            assert args[0].device == args[1].device, "equal: tensors on two devices"
            return True
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((1, args[0].dim()), dtype=torch.int64)  # of any number: one
        for tensor in args:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # torch would move its value to the GPU
        out = super().dispatch(func, types, args, kwargs)
        generator = (kwargs or {}).get("generator")
        if generator is not None:
            on_gpu = generator.initial_seed() >= FIRST_SEED
            assert (out.device.type == NAME) == on_gpu, f"{func}: a generator of another device"
        return out


def apply(module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Stand in for `nn.Module._apply`, which cannot move a tensor to the fake GPU in place."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = function(parameter.detach())
                part._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


@contextmanager
def fake_gpu(*modules: ModuleType) -> Iterator[None]:
    """Within it the DEVICE of these modules is a GPU, and a launched kernel does nothing."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME)
        getattr(torch, NAME).get_amp_supported_dtype = lambda: HALF
        AUTOCAST.fallback(torch.library.fallthrough_kernel)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "DEVICE", NAME))
            if hasattr(module, "guarded_buffers"):  # which read and write single bytes
                stack.enter_context(mock.patch.object(module, "guarded_buffers", nullcontext))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", apply))
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(FakeGPU())
        yield
