"""`tools.bench step` and `router`: whole training steps, and routers alone."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import configure
from configure.schema import Config, Model
from kernels import linear, route
from model import GPT, MoE
from router import ROUTERS, Router, find_spec
from runtime import RunError, distributed
from runtime.graph import WARM_UP, StepGraph, can_capture
from runtime.memory import flops_per_token
from runtime.optimizers import build_optimizer, choose_copy_dtype
from runtime.parallel import compile_blocks
from runtime.state import SelectionBias
from runtime.statistics import Statistics
from runtime.updates import Updates
from tools.bench.harness import Benchmark, divide
from tools.bench.peers import find_peer


class Step:
    """A training step as train.py does it, without auxiliary losses, on random tokens.

    Each step has others: with one batch again and again, kernels that are compiled for the number
    of an expert's rows were compiled once, and kern's steps looked up to 1.3 times as fast as in
    training on a CPU.

    Everything is built in the first call: a model that does not fit is skipped like a step that
    fails.
    """

    def __init__(self, config: Config, device: torch.device, pool: Any = None) -> None:
        self.config, self.device = config, device
        self.pool = pool  # see StepGraph
        self.dtype = distributed.pick_dtype(config.train.dtype, device, config.model.router)
        self.tokens = config.train.micro_batch_size * config.model.block_size

    @cached_property
    def parts(self) -> tuple[GPT, Any, Updates]:
        """The model, the optimizer and its updates."""
        config = self.config
        torch.manual_seed(config.run.seed)
        with self.device:
            model = GPT(config.model)
        if config.data.document_mask:
            model.document_token = 0
        for block in model.blocks:
            block.checkpointing = config.train.activation_checkpointing  # pyrefly: ignore[bad-argument-type]
        if distributed.pick_compile(config.train.compile, self.device):
            compile_blocks(model)
        copy_dtype = None
        if not config.train.activation_checkpointing:
            copy_dtype = choose_copy_dtype(config.model.backend, self.device, self.dtype)
        optimizer = build_optimizer(model, config.optim, copy_dtype)
        return model, optimizer, Updates(optimizer, config, self.dtype == torch.float16)

    @cached_property
    def selection_bias(self) -> SelectionBias:
        """What moves the biases after a step, if the config says so."""
        mixtures = [block.mlp for block in self.parts[0].blocks if isinstance(block.mlp, MoE)]
        return SelectionBias(mixtures, self.config.train)

    @cached_property
    def statistics(self) -> Statistics:
        """Zeros, of which each step takes a copy."""
        n_router = len(self.selection_bias.routers)
        return Statistics(n_router, self.config.model.n_expert, self.device)

    def draw_tokens(self) -> Tensor:
        """Draw x and y (2, B, T)."""
        shape = 2, self.config.train.micro_batch_size, self.config.model.block_size
        tokens = torch.randint(self.config.model.vocab_size, shape, device=self.device)
        if self.config.data.document_mask:
            tokens[..., :: max(1, shape[-1] // 4)] = 0  # four documents to a window
        return tokens

    @cached_property
    def graph(self) -> StepGraph:
        """As in train.py, but weights are cast within the graph; runs the steps before it."""
        captures = can_capture(self.config.train.cuda_graph, self.device, False, True, 0)
        graph = StepGraph(self.parts[0].parameters(), captures, pool=self.pool)
        if captures:
            for _ in range(WARM_UP):
                self.run(graph)
        return graph

    def __call__(self) -> None:
        """Run the step; its gradients are dropped."""
        self.run(self.graph)

    def run(self, graph: StepGraph) -> None:
        """Run the step's passes by `graph`, and update."""
        _, optimizer, updates = self.parts
        x, y = self.draw_tokens()
        try:
            graph.start_step(optimizer.valid_copies())
            loss, row = graph.run(self.run_passes, x, y, None)
            # at rate 0, so that weights and routing stay as at the start
            taken = updates.step(0, 0.0, loss)
            self.balance(row, torch.zeros_like(taken))
        finally:  # also when memory ran out
            optimizer.zero_grad(set_to_none=True)

    def balance(self, row: Tensor, taken: Tensor) -> None:
        """Compute the selection biases from a step's statistics; keep them if it was `taken`."""
        stats = self.statistics.new(self.selection_bias.n_bin)
        stats.vector += row
        self.selection_bias.update(stats, taken)

    def run_passes(self, x: Tensor, y: Tensor, loads: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the forward and the backward pass; returns the loss, (), and the statistics."""
        model, optimizer, updates = self.parts
        join = self.statistics.join  # first: layers then know what they count
        once: AbstractContextManager = nullcontext()
        if not self.config.train.activation_checkpointing:
            once = model.cast_once(self.dtype, optimizer.valid_copies())
        in_half = self.dtype != torch.float32
        with once, torch.autocast(self.device.type, self.dtype, enabled=in_half):
            out = model(x, y)
        assert out.loss is not None, "there are targets"
        (out.loss * updates.scale).backward()
        loss = out.loss.detach()
        return loss, join(loss, torch.zeros_like(loss), out.stats)


class Peer(Step):
    """A training step of another project's model, with torch's AdamW and without a CUDA graph."""

    def __init__(
        self, build: Callable[[Model], nn.Module], config: Config, device: torch.device
    ) -> None:
        train = config.train.model_copy(update={"cuda_graph": "off"})
        super().__init__(config.model_copy(update={"train": train}), device)
        self.build = build

    @cached_property
    def parts(self) -> tuple[Any, Any, Updates]:
        """The model, the optimizer and its updates."""
        torch.manual_seed(self.config.run.seed)
        with self.device:
            model = self.build(self.config.model).train()
        if distributed.pick_compile(self.config.train.compile, self.device):
            model.compile()
        optimizer = build_optimizer(model, self.config.optim)
        return model, optimizer, Updates(optimizer, self.config, self.dtype == torch.float16)

    def run_passes(self, x: Tensor, y: Tensor, loads: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the forward and the backward pass; returns the loss, (), twice."""
        model, _, updates = self.parts
        in_half = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=in_half):
            loss = model(x, y)
        (loss * updates.scale).backward()
        return loss.detach(), loss.detach()

    def balance(self, row: Tensor, taken: Tensor) -> None:
        """Do nothing: it has no selection biases."""


def build_router(config: Config, device: torch.device) -> Callable[[], object]:
    """Build a config's router: both passes on random fp32 tokens, without a balance loss."""
    model, spec = config.model, find_spec(config.model.router)
    if spec is None:
        raise RunError(f"model.router = {model.router} has no router: set --model.router=kern")
    router = Router(model.n_embd, model.n_expert, model.top_k, spec).to(device)
    router.fused = partial(route, backend=model.backend)  # as in the model
    router.linear = partial(linear, backend=model.backend)
    n_token = config.train.micro_batch_size * model.block_size
    x = torch.randn(n_token, model.n_embd, device=device, requires_grad=True)
    d_weights = torch.randn(n_token, model.top_k, device=device)
    return lambda: torch.autograd.grad(router(x).weights, [x, *router.parameters()], d_weights)


def start(
    args: Namespace, overrides: list[str], *notes: str
) -> tuple[dict[str, Config], Benchmark]:
    """Load a config for each combination of values; start a benchmark on the first's device."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        values.setdefault(override.partition("=")[0], []).append(override)
    configs = {}
    for point in product(*values.values()):
        config = configure.load(args.config, point)
        varied = []
        for override in point:
            key, _, value = override.partition("=")
            if len(values[key]) > 1:
                name = key.rpartition(".")[2]
                varied.append(value if name == "router" else f"{name}={value}")
        configs[", ".join(varied) or config.model.router] = config
    device = distributed.pick_device(next(iter(configs.values())).train.device)
    return configs, Benchmark(args, device, " ".join([args.config, *overrides]), *notes)


def bench_step(args: Namespace, overrides: list[str]) -> Benchmark:
    """Time a training step of each alternative, and of peers of the first one's shape."""
    flops = "6 per token and active weight, head included, + 12·L·T·C"
    note = f"MFU: tokens/s · ({flops}) / the data sheet's dense peak"
    configs, bench = start(args, overrides, "ratio: time over the first row's", note)
    first = next(iter(configs.values()))
    peers = {name: find_peer(name, first.model) for name in args.peer}
    # dynamo silently gives up on a piece of code after 8 graphs
    torch._dynamo.config.recompile_limit = 1000
    # of all graphs, five of which would need 80 GB; each replay writes what it reads
    pool = torch.cuda.graph_pool_handle() if bench.device.type == "cuda" else None
    steps = {name: Step(config, bench.device, pool) for name, config in configs.items()}
    steps |= {name: Peer(build, first, bench.device) for name, build in peers.items()}
    median = bench.time({(name,): step for name, step in steps.items()})
    rows = []
    for (name,), seconds in median.items():
        step, rate = steps[name], steps[name].tokens / seconds
        mfu = None
        if name not in peers:  # whose operations are others
            mfu = divide(
                flops_per_token(step.config.model) * rate,
                distributed.peak_flops(bench.device, step.dtype),
            )
        ratio = divide(seconds, median.get((next(iter(steps)),)))
        rows.append(
            [name, str(step.dtype).removeprefix("torch."), 1000 * seconds, rate, ratio, mfu]
        )
    bench.add_table(["alternative", "dtype", "ms", "tokens/s", "ratio", "MFU"], rows)
    if median:
        (last,) = list(median)[-1]
        bench.profile(steps[last], f"a step of {last}")
    return bench


def bench_router(args: Namespace, overrides: list[str]) -> Benchmark:
    """Time each alternative's router alone, both passes, and a training step of the first.

    Without a --model.router all are taken; as many models with their optimizers would not fit a
    GPU.
    """
    if not any(override.startswith("--model.router=") for override in overrides):
        overrides = [
            *overrides,
            *(f"--model.router={name}" for name, spec in ROUTERS.items() if spec),
        ]
    note = "ratio: time over the first row's; share: of all layers' routers in a step of its model"
    configs, bench = start(args, overrides, note)
    functions: dict[tuple, Any] = {
        ("router", name): build_router(c, bench.device) for name, c in configs.items()
    }
    first, config = next(iter(configs.items()))
    step = ("step", first)
    median = bench.time(functions | {step: Step(config, bench.device)})
    rows = []
    for name, config in configs.items():
        alone = median.get(("router", name))
        of_step = divide(
            alone, divide(median.get(step), config.model.n_layer - config.model.n_dense_layer)
        )
        rows.append(
            [name, divide(alone, 1e-3), divide(alone, median.get(("router", first))), of_step]
        )
    bench.data["step ms"] = divide(median.get(step), 1e-3)
    bench.add_table(["alternative", "router ms", "ratio", "share"], rows)
    last = list(configs)[-1]
    bench.profile(functions["router", last], f"router {last}, forward and backward")
    return bench
