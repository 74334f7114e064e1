"""`scripts.bench step`, `experts` and `router`: whole training steps, and routers alone."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import configure
from configure.schema import Config, Model
from kernels import route
from model import GPT, count_parameters, flops_per_token
from router import ROUTERS, Router
from runtime import RunError, distributed
from runtime.parallel import compile_blocks
from runtime.state import build_optimizer
from runtime.updates import Updates
from scripts.bench.harness import DTYPES, Benchmark, divide, synchronize
from scripts.bench.peers import PEERS

NOTES = (
    "ratio: time over the first row's; peak GB: with weights and AdamW's state",
    "MFU: tokens/s · (6 per token and active weight, head included, + 12·L·T·C) / the data sheet's dense peak",
)


@cache
def build(config: Config, device: torch.device, make: Callable[[Model], nn.Module]) -> tuple[nn.Module, Any]:
    """Build a model and its optimizer once for all steps that share them."""
    torch.manual_seed(config.run.seed)
    with device:
        model = make(config.model)
    if isinstance(model, GPT) and config.data.document_mask:
        model.document_token = 0
    for block in getattr(model, "blocks", ()):
        block.checkpointing = config.train.activation_checkpointing
    return model, build_optimizer(model, config.optim)


@dataclass
class Step:
    """A training step as train.py does it, without auxiliary losses, on one micro-batch of random tokens.

    Everything is built in the first call: a model that does not fit is skipped like a step that fails.
    """

    config: Config
    device: torch.device
    dtype: torch.dtype  # of autocast
    make: Callable[[Model], nn.Module] = GPT
    compile: bool = False

    @cached_property
    def parts(self) -> tuple[Callable[..., Any], Any, Updates, Tensor]:
        """The compiled model, the optimizer, its updates, and x and y (2, B, T)."""
        model, optimizer = build(self.config, self.device, self.make)
        if self.compile and isinstance(model, GPT):
            compile_blocks(model)
        elif self.compile:
            model = torch.compile(model)
        clip, scaled = self.config.optim.grad_clip, self.dtype == torch.float16
        shape = 2, self.config.train.micro_batch_size, self.config.model.block_size
        tokens = torch.randint(self.config.model.vocab_size, shape, device=self.device)
        if self.config.data.document_mask:
            tokens[..., :: max(1, shape[-1] // 4)] = 0  # four documents to a window
        return model, optimizer, Updates(optimizer, self.device, scaled=scaled, grad_clip=clip), tokens

    def __call__(self) -> None:
        """Run the step; its gradients are dropped."""
        runner, optimizer, updates, (x, y) = self.parts
        try:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = runner(x, y).loss
            (loss * updates.scale).backward()
            updates.step(0, 0.0, loss.detach())  # at rate 0, so that weights and routing stay those of the start
        finally:  # also when memory ran out
            optimizer.zero_grad(set_to_none=True)

    def measure_peak(self) -> float | None:
        """GB (2^30 bytes) at the peak of a step, without other models on the device; None on a CPU."""
        if self.device.type != "cuda":
            return None
        held = sum(3 * p.nbytes for p in build(self.config, self.device, self.make)[0].parameters())  # and two moments
        synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self()
        return (torch.cuda.max_memory_allocated(self.device) - before + held) / 2**30


def time_steps(bench: Benchmark, names: list[str], steps: dict[tuple, Step]) -> None:
    """Time `steps` in turn; `names` are the columns of their keys."""
    torch._dynamo.config.recompile_limit = 1000  # dynamo silently gives up on a piece of code after 8 graphs
    median = bench.time(steps, may_fail=[key for key, step in steps.items() if step.make is not GPT or step.compile])
    rows = []
    for key, seconds in median.items():
        step, model = steps[key], steps[key].config.model
        rate = count_tokens(step.config) / seconds
        if step.make is GPT:
            mfu = divide(flops_per_token(model) * rate, distributed.peak_flops(bench.device, step.dtype))
            counts = [count / 1e6 for count in count_parameters(model)]
        else:  # of another implementation neither FLOPs nor active parameters are known
            parameters = build(step.config, bench.device, step.make)[0].parameters()
            mfu, counts = None, [sum(p.numel() for p in parameters) / 1e6, None]
        ratio = divide(seconds, median.get(next(iter(steps))))
        rows.append([*key, 1000 * seconds, rate, ratio, mfu, step.measure_peak(), *counts])
    bench.add_table([*names, "ms", "tokens/s", "ratio", "MFU", "peak GB", "M total", "M active"], rows)
    if median:
        last = list(median)[-1]
        bench.profile(steps[last], f"a step of {', '.join(map(str, last))}")


def count_tokens(config: Config) -> int:
    """Count the tokens of a micro-batch."""
    return config.train.micro_batch_size * config.model.block_size


def start(
    args: Namespace, overrides: list[str], config: Config, *notes: str
) -> tuple[Benchmark, dict[str, torch.dtype]]:
    """Start a benchmark of `config` on its device, in --dtype or its own."""
    title = f"{' '.join([args.config, *overrides])}, {count_tokens(config):,} tokens per step"
    bench = Benchmark(args, distributed.pick_device(config.train.device), title, *notes)
    own = str(distributed.pick_dtype(config.train.dtype, bench.device, config.model.router)).removeprefix("torch.")
    return bench, {name: DTYPES[name] for name in getattr(args, "dtype", None) or [own]}


def bench_step(args: Namespace, overrides: list[str]) -> None:
    """Time a training step of each of --routers and --peers, in each --dtype, with and without --compile.

    With data.document_mask each router's step is timed without masks, too.
    """
    configs = [configure.load(args.config, [*overrides, f"--model.router={router}"]) for router in args.routers]
    first, steps_of = configs[0], {}
    for config in configs:
        if config.data.document_mask:
            unmasked = config.data.model_copy(update={"document_mask": False})
            steps_of[config.model.router] = config.model_copy(update={"data": unmasked})
            steps_of[f"{config.model.router}, masks"] = config
        else:
            steps_of[config.model.router] = config
    bench, dtypes = start(args, overrides, first, *NOTES)
    compiled = distributed.pick_compile(first.train.compile, bench.device)
    modes = args.compile or ["on" if compiled else "off"]
    for mode, (name, dtype) in product(sorted(modes), dtypes.items()):  # "off" first: a compiled model stays so
        make = partial(Step, device=bench.device, dtype=dtype, compile=mode == "on")
        steps = {(router, name, mode): make(config) for router, config in steps_of.items()}
        steps |= {(peer, name, mode): make(first, make=PEERS[peer]) for peer in args.peers}
        time_steps(bench, ["router", "dtype", "compile"], steps)


def bench_experts(args: Namespace, overrides: list[str]) -> None:
    """Time a training step at each number of --experts, of which equally many are active."""
    configs = [configure.load(args.config, [*overrides, f"--model.n_expert={E}"]) for E in args.experts]
    if ROUTERS[configs[0].model.router] is None:
        raise RunError("dense has no experts: set --model.router=kern")
    bench, dtypes = start(args, overrides, configs[0], *NOTES, "AdamW and clipping take all experts, active or not")
    compile = distributed.pick_compile(configs[0].train.compile, bench.device)
    for name, dtype in dtypes.items():
        steps = {(c.model.n_expert, name): Step(c, bench.device, dtype, compile=compile) for c in configs}
        time_steps(bench, ["experts", "dtype"], steps)


def bench_router(args: Namespace, overrides: list[str]) -> None:
    """Time each router alone, forward and backward, beside a training step of kern; nothing is compiled."""
    specs = {router: spec for router in args.routers if (spec := ROUTERS[router])}
    if not specs:
        raise RunError("dense has no router: name others")
    config = configure.load(args.config, [*overrides, "--model.router=kern"])
    model, base = config.model, "softmax" if "softmax" in specs else next(iter(specs))
    N, C, E, K = count_tokens(config), model.n_embd, model.n_expert, model.top_k
    note = (
        f"gates in fp32, without balance losses; ratio: time over {base}'s; a step of kern has {model.n_layer} routers"
    )
    bench, dtypes = start(args, overrides, config, note)
    device = bench.device
    x = torch.randn(N, C, device=device, requires_grad=True)  # fp32, which LayerNorm returns under autocast too
    d_weights = torch.randn(N, K, device=device)
    modules = {router: Router(C, E, K, spec).to(device) for router, spec in specs.items()}
    for module in modules.values():
        module.fused = partial(route, backend=model.backend)  # as in the model

    functions: dict[tuple, Callable] = {}
    for router, module in modules.items():
        leaves = [x, *module.parameters()]
        functions["router", router] = partial(run_both_ways, module, x, leaves, d_weights)
    for name, dtype in dtypes.items():
        functions["step", name] = Step(config, device, dtype)
    median = bench.time(functions)
    rows = []
    for (kind, name), seconds in median.items():
        of_step = 1 if kind == "step" else model.n_layer
        ratio = divide(seconds, median.get(("router", base))) if kind == "router" else None
        shares = [divide(of_step * seconds, median.get(("step", dtype))) for dtype in dtypes]
        rows.append([kind, name, 1000 * seconds, ratio, 1000 * of_step * seconds, *shares])
    columns = ["part", "router or dtype", "ms", "ratio", "ms per step", *(f"share of {name} step" for name in dtypes)]
    bench.add_table(columns, rows)
    profiled = "kern" if "kern" in specs else base
    bench.profile(functions["router", profiled], f"router {profiled}, forward and backward")


def run_both_ways(module: Router, x: Tensor, leaves: list[Tensor], d_weights: Tensor) -> None:
    """Run a router forward, and backward to its input and parameters."""
    torch.autograd.grad(module(x).weights, leaves, d_weights)
