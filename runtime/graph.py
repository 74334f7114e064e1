"""Capture a micro-batch's forward and backward pass as a CUDA graph (train.cuda_graph).

Without it the host launches each of some 900 kernels, which lasts longer than the kernels
themselves: on an H200 a step of config/125m.toml lasts 86 ms, with it 82 (docs/gpu.md).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.text import first_line
from runtime.distributed import memory_bytes, print_once

MOST_PLANNED = 0.7  # share of a device's memory, with train.cuda_graph = auto; not measured
WARM_UP = 3  # steps before: kernels compile

# Of inputs and targets (B, T) int64 and any loads (L, E): their part of the step's statistics. It
# adds gradients to p.grad.
Passes = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Captured(NamedTuple):
    """A graph and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, Tensor, Tensor | None]
    statistics: Tensor
    gradients: list[Tensor | None]


class StepGraph:
    """Captures the passes of a step's micro-batches, and replays them in later steps.

    A step's first micro-batch writes the gradients, all others add to them: two graphs.

    They read experts' weights in half precision where `HalfCopies` keeps them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], enabled: bool) -> None:
        """Set up without capturing.

        Args:
            parameters: of the model; they get gradients.
            enabled: capture; else every step runs its passes.
        """
        self.parameters = list(parameters)
        # of torch.cuda.graph_pool_handle, which graphs of other models share; None: its own
        self.pool: Any = None
        self.enabled = enabled
        self.n_step = 0
        self.captured: dict[bool, Captured] = {}  # the key is True for the step's first micro-batch
        self.replays = False
        self.is_first = True

    def start_step(self) -> None:
        """Decide how the step is run."""
        self.replays = self.enabled and self.n_step >= WARM_UP
        self.is_first = True
        self.n_step += 1

    def run(self, passes: Passes, x: Tensor, y: Tensor, loads: Tensor | None) -> Tensor:
        """Run the passes, or replay them on these inputs; returns what they return."""
        is_first = self.is_first
        self.is_first = False
        if self.replays and is_first not in self.captured:
            try:
                self.captured[is_first] = self.capture(passes, x, y, loads, is_first)
            except RuntimeError as error:  # also without memory
                self.give_up(first_line(error), is_first)
        if not self.replays:
            return passes(x, y, loads)
        captured = self.captured[is_first]
        for static, given in zip(captured.inputs, (x, y, loads), strict=True):
            if static is not None and given is not None:
                static.copy_(given)
        captured.graph.replay()
        for p, gradient in zip(self.parameters, captured.gradients, strict=True):
            p.grad = gradient
        return captured.statistics  # read before the next micro-batch overwrites it

    def capture(
        self, passes: Passes, x: Tensor, y: Tensor, loads: Tensor | None, is_first: bool
    ) -> Captured:
        """Capture the passes on copies of the inputs. Nothing is computed."""
        inputs = (x.clone(), y.clone(), None if loads is None else loads.clone())
        if is_first:
            for p in self.parameters:
                p.grad = None
        pool = self.captured[True].graph.pool() if self.captured else self.pool
        graph, statistics = capture_graph(lambda: passes(*inputs), pool)
        gradients = [p.grad for p in self.parameters]
        return Captured(graph, inputs, statistics, gradients)

    def give_up(self, reason: str, is_first: bool) -> None:
        """Run this step and all later ones without graphs."""
        print_once(f"train.cuda_graph: steps run without a graph, it cannot be captured: {reason}")
        self.enabled = False
        self.replays = False
        self.captured = {}
        if is_first:
            for p in self.parameters:
                p.grad = None


def capture_graph(function: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call in the memory of `pool` (None: its own); returns the graph and its results."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        # thread_local: the thread that reads ahead may pin its batches meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = function()
    except RuntimeError:
        # a failed capture leaves its own stream, and a generator that refuses to draw outside of it
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph, outputs


def can_capture(
    asked: str, device: torch.device, is_sharded: bool, has_kernels: bool, planned_bytes: int
) -> bool:
    """Return True if train.cuda_graph = `asked` captures; prints a line if it is "on" and cannot.

    Args:
        asked: "auto", "on" or "off".
        device: where the run computes.
        is_sharded: the run has several ranks or a train.parallel other than ddp.
        has_kernels: experts are multiplied in fp32 or by Triton's kernels.
        planned_bytes: memory that the run is expected to need. A graph does not share the memory of
            its activations, so "auto" leaves a part of the device free for evaluations.
    """
    if asked == "off":
        return False
    reason = ""
    if device.type != "cuda" or is_sharded:
        reason = "one CUDA device and train.parallel = ddp"
    elif not has_kernels:
        reason = "model.backend = triton, or train.dtype = float32"
    if reason:
        if asked == "on":
            print_once(f"train.cuda_graph: steps run without a graph: it needs {reason}")
        return False
    capacity = memory_bytes(device)
    return asked == "on" or (capacity is not None and planned_bytes < MOST_PLANNED * capacity)
