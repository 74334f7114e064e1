"""`scripts.bench budget`: launches and bytes of a training step, counted without a GPU, and a model of its time.

Counted: a trace of the eager model on fake tensors at the real shapes, with the Triton operators, as on a GPU. Views
are left out; what is left is about one launch each. Bytes are those of inputs and outputs, once a launch. An operator
of ours counts as one launch.

Modelled: milliseconds by part, never held against a GPU, good to about 20%: it ranks changes and replaces no
measurement. The experts are those of scripts/bench/cycles.py; the rest is FLOPs or bytes over the rates below.
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import configure
import kernels
from attention import Attention
from configure.schema import Config
from model import GPT, MLP, Experts, MoE, count_parameters, dense_layers, flops_per_token
from router import Router
from scripts.bench import cycles
from scripts.bench.harness import Benchmark

VIEWS = (
    *("view", "t.", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "alias"),
    *("as_strided", "_unsafe_view", "unbind", "split", "lift", "size", "stride", "is_", "sym", "reshape", "unflatten"),
    *("diagonal", "prim.", "promote_types"),
)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
OPTIMIZER_BYTES = 36  # a parameter: norm 4; AdamW reads weight, gradient, moments, writes three, zeroes the gradient
COMPILED_BYTES = 64  # a token, channel and layer: what norms, residuals and casts move when fused, both ways

# Assumed, of an H100 and an H200 in half precision.
PEAK = 989e12  # FLOP/s of the data sheet
PRODUCT_RATE = 0.72 * 790e12  # of large matrix products; 790 is a measured ceiling
ATTENTION_RATE = 180e12  # of flash attention both ways, heads of 64, causal
FLOAT32_RATE = 50e12  # of a router's product, without TF32
SMALL_LAUNCH = 5e-6  # seconds that the smallest launch takes
DRAM = {"H100": 3.0e12, "H200": 4.3e12}  # bytes/s
DESIGN: cycles.Design = (
    cycles.WIDE_GRADIENTS | cycles.TILE_TABLE | cycles.ROWS_AHEAD | cycles.WIDE_UP
)  # of the experts' kernels in kernels/triton_experts.py

PARTS = (
    *("experts", "dense MLP", "qkv, proj", "head", "attention", "norms, residual, casts"),
    *("casts of expert weights", "routers", "AdamW, norm"),
)
SCOPES: dict[type, str] = {Attention: "Attention", MLP: "MLP", MoE: "Router", Router: "Router", Experts: "Experts"}


class Op(NamedTuple):
    """An operator of the trace.

    Attributes:
        phase: "forward" or "backward".
        part: one of PARTS.
        name: without "aten.".
        bytes: of inputs and outputs.
        flops: of a matrix product, else 0.
    """

    phase: str
    part: str
    name: str
    bytes: int
    flops: int


def count_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements."""
    n = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        n *= length if stride else 1
    return n


def count_flops(name: str, tensors: list[Tensor]) -> int:
    """FLOPs of a matrix product, from its two factors, the last inputs; 0 of any other operator."""
    if name.partition(".")[0] not in PRODUCTS:
        return 0
    a, b = tensors[-2:]
    return 2 * a.numel() * b.shape[-1]


class Trace(TorchDispatchMode):
    """Records operators with their module; in the backward pass, with that whose forward pass made the node."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.ops, self.scopes = "forward", list[Op](), [""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if not name.startswith(VIEWS):
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            scope = self.scopes[-1]
            if self.phase == "backward":
                node: Any = torch._C._current_autograd_node()
                scope = node.metadata.get("scope", "") if node is not None else ""
            moved = sum(map(count_bytes, given + made))
            if name.startswith("fsdp.all_gather_copy_in"):  # read and written; the buffer has more, for other ranks
                moved = 2 * sum(map(count_bytes, args[0]))
            elif name.startswith(("c10d.", "fsdp.")):  # what is written is among the arguments, and is not read
                moved = sum(map(count_bytes, {id(t): t for t in given}.values()))
            self.ops.append(Op(self.phase, self.find_part(name, scope, given), name, moved, count_flops(name, given)))
        return out

    @staticmethod
    def find_part(name: str, scope: str, given: list[Tensor]) -> str:
        """Find the part of PARTS that an operator of a module belongs to."""
        product = name.partition(".")[0] in PRODUCTS
        if name.startswith("nanokern.experts"):
            return "experts"
        if name.startswith("nanokern.linear_cross_entropy"):
            return "head"
        if "attention" in name:
            return "attention"
        if scope == "Attention" and product:
            return "qkv, proj"
        if scope == "MLP":
            return "dense MLP"
        types = {t.dtype for t in given if t.is_floating_point()}  # several: model.Fork adds gradients
        if scope == "Router" and not name.startswith("_to_copy") and len(types) < 2:
            return "routers"
        if any(t.dim() == 3 and scope == "Experts" for t in given):
            return "casts of expert weights"
        return "norms, residual, casts"

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Note the scope of each operator of `model`: Attention, MLP, Router (with an MoE's statistics) or Experts."""
        handles = []

        def enter(scope: str) -> Callable:
            def note(module: nn.Module, args: Any) -> None:
                mark_nodes(args, self.scopes[-1])  # what came before is not this module's
                self.scopes.append(scope)

            return note

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            mark_nodes(out, self.scopes.pop())

        for module in model.modules():
            if scope := SCOPES.get(type(module)):
                handles.append(module.register_forward_pre_hook(enter(scope)))
                handles.append(module.register_forward_hook(leave))
        with self:
            yield
        for handle in handles:
            handle.remove()


def mark_nodes(out: Any, scope: str) -> None:
    """Write `scope` into the nodes of the autograd graph behind `out` that have none yet."""
    nodes: list[Any] = [t.grad_fn for t in tree_leaves(out) if isinstance(t, Tensor)]
    while nodes:
        node = nodes.pop()
        if node is not None and "scope" not in node.metadata:
            node.metadata["scope"] = scope
            nodes += [following for following, _ in node.next_functions]


def one_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """An RMSNorm's bytes in one operator each way, as on CUDA; on a CPU torch takes it apart."""
    return F.layer_norm(x, shape, weight, None, eps or 1e-5)


def trace_step(config: Config, distribute: Callable[[GPT], nn.Module] = lambda model: model) -> list[Op]:
    """Trace the forward and backward pass of one micro-batch in float16, eager, with the Triton operators.

    Args:
        config: the run's.
        distribute: makes of the model the module that is called.
    """
    model_config = config.model.model_copy(update={"backend": "triton"})
    trace, shape = Trace(), (config.train.micro_batch_size, model_config.block_size)
    with (
        mock.patch.object(kernels, "find_triton_problem", lambda device, dtype: ""),
        mock.patch.object(F, "rms_norm", one_norm),
        FakeTensorMode(),
    ):
        model, x = GPT(model_config), torch.randint(model_config.vocab_size, shape)
        runner = distribute(model)
        with trace.watch(model):
            with torch.autocast("cpu", torch.float16):
                loss = runner(x, x).loss
            trace.phase = "backward"
            loss.backward()
    return trace.ops


def time_parts(config: Config, ops: list[Op], dram: float, design: cycles.Design = DESIGN) -> dict[str, float]:
    """Model the seconds of each of PARTS that the model has, on a GPU whose memory moves `dram` bytes per second."""
    model, N = config.model, config.train.micro_batch_size * config.model.block_size
    seconds: dict[str, float] = defaultdict(float)
    for op in ops:
        rate = FLOAT32_RATE if op.part == "routers" else PRODUCT_RATE
        seconds[op.part] += max(op.flops / rate, 0 if op.flops else op.bytes / dram, 0 if op.flops else SMALL_LAUNCH)
    C, layers = model.n_embd, model.n_layer - dense_layers(model)
    seconds["head"] = 6 * N * model.vocab_size * C / PRODUCT_RATE + 4 * N * model.vocab_size / dram  # softmax in place
    seconds["attention"] = 7 * N * model.block_size * C * model.n_layer / ATTENTION_RATE
    if layers:
        sizes = (N, C, model.expert_hidden, model.n_expert, model.top_k)
        seconds["experts"] = layers * sum(cycles.time_experts(*sizes, dram, design, gated=model.gated).values())
    seconds["AdamW, norm"] = OPTIMIZER_BYTES * count_parameters(model)[0] / dram
    return {part: seconds[part] for part in PARTS if seconds[part]}


@dataclass(frozen=True)
class Change:
    """What a step of one GPU, eager and with flash attention, has not got, and what it makes of the parts' seconds."""

    name: str
    apply: Callable[[Config, dict[str, float], float], dict[str, float]]


def fuse_blocks(config: Config, seconds: dict[str, float], dram: float) -> dict[str, float]:
    """Norms, residuals and casts in a few launches, as train.compile makes them."""
    N = config.train.micro_batch_size * config.model.block_size
    fused = COMPILED_BYTES * N * config.model.n_embd * config.model.n_layer / dram
    part = "norms, residual, casts"
    return {part: min(fused, seconds[part])}


def use_cudnn(config: Config, seconds: dict[str, float], dram: float) -> dict[str, float]:
    """Attention by cuDNN, if it is 1.4 times as fast."""
    return {"attention": seconds["attention"] / 1.4}


def share_optimizer(config: Config, seconds: dict[str, float], dram: float) -> dict[str, float]:
    """ZeRO-2, which train.parallel = auto takes where a step has one micro-batch; sends are taken as hidden."""
    return {"AdamW, norm": seconds["AdamW, norm"] / 8}


CHANGES = (
    Change("train.compile (estimate of fused bytes)", fuse_blocks),
    Change("cuDNN attention, if 1.4 times as fast", use_cudnn),
    Change("8 GPUs, if ZeRO-2's sends are hidden", share_optimizer),
)


def apply_changes(config: Config, ops: list[Op], dram: float, changes: Sequence[Change]) -> dict[str, float]:
    """Seconds of each part with `changes`."""
    seconds = time_parts(config, ops, dram)
    for change in changes:
        seconds |= {part: value for part, value in change.apply(config, seconds, dram).items() if part in seconds}
    return seconds


def bench_budget(args: Namespace, overrides: list[str]) -> None:
    """Count a training step's launches and bytes without a GPU, and model its milliseconds on H100 and H200."""
    configs = [configure.load(args.config, [*overrides, f"--model.router={router}"]) for router in args.routers]
    tokens = configs[0].train.micro_batch_size * configs[0].model.block_size
    title = f"{' '.join([args.config, *overrides])}, {tokens:,} tokens per micro-batch, float16, eager"
    notes = ("launches and GB are counted; ms are a model's, never held against a GPU, good to about 20%",)
    bench = Benchmark(args, torch.device("cpu"), title, *notes)
    traces = {config.model.router: (config, trace_step(config)) for config in configs}
    rows: list[list[Any]] = []
    for router, (config, ops) in traces.items():
        for phase in ("forward", "backward"):
            chosen = [op for op in ops if op.phase == phase]
            rows.append([router, phase, len(chosen), sum(op.bytes for op in chosen) / 1e9])
        rows.append([router, "both", len(ops), sum(op.bytes for op in ops) / 1e9])
        rows.append([router, "AdamW, norm", None, OPTIMIZER_BYTES * count_parameters(config.model)[0] / 1e9])
    bench.add_table(["router", "phase", "launches", "GB"], rows)
    bench.add_table(["router", "part", "launches", "GB", *(f"{gpu} ms" for gpu in DRAM)], part_rows(traces))
    bench.add_table(
        ["router", "change", *(f"{gpu} ms" for gpu in DRAM), *(f"{gpu} MFU" for gpu in DRAM)], change_rows(traces)
    )


def part_rows(traces: dict[str, tuple[Config, list[Op]]]) -> list[list[Any]]:
    """Rows of each router's parts, as the code is now."""
    rows: list[list[Any]] = []
    for router, (config, ops) in traces.items():
        times = [time_parts(config, ops, dram) for dram in DRAM.values()]
        for part in times[0]:
            mine = [op.bytes for op in ops if op.part == part]
            counts = [len(mine), sum(mine) / 1e9] if mine else [None, None]
            rows.append([router, part, *counts, *(1000 * seconds[part] for seconds in times)])
    return rows


def change_rows(traces: dict[str, tuple[Config, list[Op]]]) -> list[list[Any]]:
    """Rows of each router's step: now, with each of CHANGES alone, and with all."""
    rows: list[list[Any]] = []
    for router, (config, ops) in traces.items():
        tokens = config.train.micro_batch_size * config.model.block_size
        flops = flops_per_token(config.model) * tokens
        options = {"now": []} | {change.name: [change] for change in CHANGES} | {"all": CHANGES}
        for name, changes in options.items():
            times = [sum(apply_changes(config, ops, dram, changes).values()) for dram in DRAM.values()]
            rows.append([router, name, *(1000 * seconds for seconds in times), *(flops / s / PEAK for s in times)])
    return rows
