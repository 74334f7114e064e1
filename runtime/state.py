"""The training state: what a step changes and a checkpoint holds."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from balance import MARGIN_BINS, solve_selection_bias, update_selection_bias
from configure import Config
from configure.schema import Train
from model import GPT, MoE, Output
from runtime import RunError, checkpoint, distributed
from runtime.batches import RankBatches
from runtime.branch import Branch
from runtime.distributed import Ranks
from runtime.expert_parallel import Exchange, measure_ranks
from runtime.folder import RunFolder
from runtime.graph import StepGraph, can_capture
from runtime.memory import count_expert_ranks
from runtime.optimizers import Optimizers, build_optimizer, choose_copy_dtype
from runtime.parallel import (
    Compute,
    distribute,
    draw_normal,
    full_tensor,
    local_part,
    try_compiling,
    warm_up_ddp_buckets,
    without_parameters,
)
from runtime.preflight import Data, InitialWeights, Plan
from runtime.settings import check_model_settings, describe_model_settings
from runtime.statistics import Statistics, join
from runtime.transfer import scale_initial_weights
from runtime.updates import Updates


class WeightAverage:
    """The running mean of weights (train.ema_decay), without bias from the initial ones.

    After n taken steps it is (1 - decay) Σ decay^(n - i) w_i / (1 - decay^n), a mean of the weights
    w_1 to w_n after these steps, corrected like Adam's moments. (In torch's AveragedModel w_1 would
    keep the part decay^(n - 1).) It has parameters and buffers and is in fp32 on their device.
    Under FSDP2 each rank holds the mean of its own shards. Tables of hash layers are constants.

    Attributes:
        tensors: {name in model.state_dict(): mean}; a checkpoint holds them. Before the first step
            they are the initial weights.
    """

    def __init__(self, model: GPT, decay: float) -> None:
        """Start with the weights that `model`, on its device and sharded, has now."""
        self.model = model
        self.decay = decay
        # An optimizer step changes these in place. Under FSDP2 they are the sharded parameters only
        # outside of passes.
        self.weights = dict(model.named_parameters()) | dict(model.named_buffers())
        self.tensors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each mean, and of its weight."""
        for name, mean in self.tensors.items():
            if mean.is_floating_point():
                yield local_part(mean), local_part(self.weights[name].detach())

    @torch.no_grad()
    def update(self, taken: Tensor, n_taken: Tensor) -> None:
        """Move the mean towards the weights, if the step was taken; the host does not wait.

        Args:
            taken: () bool on the device, True if the last step was taken.
            n_taken: () float64 on the device, steps taken so far, with this one.
        """
        # 1 at the first step, which replaces the initial weights
        fraction = torch.full_like(n_taken, 1 - self.decay)
        fraction = fraction / (1 - self.decay ** n_taken.clamp_min(1))
        fraction = (fraction * taken).float()
        for mean, weight in self._pairs():
            mean.lerp_(weight, fraction)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchange weights and mean in place for this context: the model computes with the mean."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # the root keeps what it gathered for an evaluation, which would hide the exchange
                module.reshard()
        for mean, weight in self._pairs():
            old_weight = weight.clone()
            weight.copy_(mean)
            mean.copy_(old_weight)


class SelectionBias:
    """Moves the routers' selection biases (train.bias_update), except in hash layers.

    Attributes:
        n_bin: bins of the histograms that a step's statistics need: MARGIN_BINS with "quantile",
            else 0.
        moved: (L,) mean distance that the last step moved the biases by; None except with
            "quantile".
    """

    def __init__(self, mixtures: list[MoE], train: Train) -> None:
        self.routers = [mixture.router for mixture in mixtures]
        self.rate = train.bias_update_rate
        self.n_bin = MARGIN_BINS if train.bias_update == "quantile" else 0
        self.moved: Tensor | None = None
        for mixture in mixtures:
            mixture.counts_margins = self.n_bin > 0

    @torch.no_grad()
    def update(self, stats: Statistics, taken: Tensor) -> None:
        """Move the biases by a step's sums over all ranks, if the step was `taken`, () bool."""
        if not self.rate and not self.n_bin:
            return
        distances = []
        for router, loads, margins in zip(self.routers, stats.loads, stats.margins, strict=True):
            bias = router.selection_bias
            old_bias = bias.clone()
            if self.rate and router.hash_table is None:
                update_selection_bias(bias, loads, self.rate * taken)
            if self.n_bin and router.hash_table is None:
                solved = solve_selection_bias(bias, margins, router.top_k, router.spec.score_range)
                bias.copy_(torch.where(taken, solved, bias))
            distances.append((bias - old_bias).abs().mean())
        if self.n_bin and distances:  # a dense model has none
            self.moved = torch.stack(distances)


@dataclass(eq=False)
class TrainState(AbstractContextManager["TrainState"]):
    """Model, optimizer, counters and running statistics of one run on one rank.

    Attributes:
        step: optimizer steps done when it was built: the step of the checkpoint or of the branch,
            or 0.
        metadata: everything in the checkpoint besides tensors, and the identity of the data.
        compute: device, type and parallelism.
        model: the GPT on its device, sharded under FSDP2.
        runner: the module to call in its place: DDP around the model, or the model.
        mixtures: the model's L layers with experts.
        optimizer: changes the model's parameters.
        updates: decides on steps and counts them.
        selection_bias: moves the routers' selection biases.
        average: the running mean of the weights, if the run keeps one.
        interval: statistics of the steps since the last line of metrics.
        graph: runs the passes of micro-batches, as a CUDA graph with train.cuda_graph.
    """

    step: int
    metadata: dict[str, Any]
    compute: Compute
    model: GPT
    runner: nn.Module
    mixtures: list[MoE]
    optimizer: Optimizers
    updates: Updates
    selection_bias: SelectionBias
    average: WeightAverage | None
    interval: Statistics
    graph: StepGraph

    def __exit__(self, *error: object) -> None:
        # Before the process group ends: as its last owner DDP's destructor would wait for gloo's
        # threads for ever.
        del self.runner

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors of a checkpoint besides weights and moments, nested."""
        tensors: dict[str, Any] = {
            "interval": self.interval.vector,
            "updates": self.updates.numbers,
        }
        if self.average:
            tensors["ema"] = self.average.tensors
        return tensors

    def forward(self, x: Tensor, y: Tensor) -> Output:
        """Run the model under autocast on x and y (B, T) int64, on its device."""
        with self.compute.autocast():
            return self.runner(x, y)

    def cast_experts_once(self) -> AbstractContextManager:
        """Within this context the passes of a step share one cast of all experts' weights.

        Not with activation checkpointing, which would keep all casts in memory, nor under FSDP2,
        which gathers them in half precision.
        """
        if not self.compute.shares_casts:
            return nullcontext()
        return self.model.cast_once(self.compute.dtype, self.optimizer.valid_copies())

    def zero_grad(self) -> None:
        """Drop the gradients. DDP's are in its buckets and are filled with zeros instead."""
        self.optimizer.zero_grad(set_to_none=not isinstance(self.runner, DistributedDataParallel))

    def describe_routers(self) -> dict[str, Tensor]:
        """`gamma` and `bias_moved`, (L,) each, if there are any.

        With shared experts (train.expert_parallel) also `measure_ranks`. Unless the model is
        replicated all ranks must call it.
        """
        values: dict[str, Tensor] = {}
        exchanges = []
        for mixture in self.mixtures:
            if isinstance(mixture.exchange, Exchange):
                exchanges.append(mixture.exchange)
        if exchanges:
            values |= measure_ranks(exchanges, self.compute.device)
        gammas = []
        for mixture in self.mixtures:
            if mixture.router.gamma is not None:
                gammas.append(full_tensor(mixture.router.gamma.detach()))
        if gammas:
            values["gamma"] = torch.cat(gammas)
        if self.selection_bias.moved is not None:
            values["bias_moved"] = self.selection_bias.moved
        return values


class Start(NamedTuple):
    """The checkpoint that a run continues from."""

    checkpoints: Path  # folder of the run's own checkpoints, or of its trunk's
    step: int  # 0: there is none
    metadata: dict[str, Any]


def find_start(
    run: RunFolder, branch: Branch | None, identity: dict[str, str], ranks: Ranks
) -> Start:
    """Find the newest intact checkpoint of `run`, or the trunk's of `branch`.

    Raises:
        RunError: all checkpoints are damaged, or the newest is not of the data with `identity`.
    """
    checkpoints = run.checkpoint_folder
    step, metadata = checkpoint.latest(checkpoints, ranks)
    if branch and not step:
        checkpoints = branch.trunk.checkpoint_folder
        step = branch.step
        metadata = branch.read_metadata(ranks)
    if step:
        for name, now in identity.items():
            then = metadata.get(name, "unknown")
            if then != now:
                raise RunError(
                    f"{run}: the {name} has changed since step {step}: sha256 {then} then, {now} "
                    "now. Restore what the run started with (data.name, data.mix, data.dir), or "
                    "start over in a new folder (--fresh)"
                )
    return Start(checkpoints, step, metadata)


def build_metadata(start: Start, data: Data, threads: int) -> dict[str, Any]:
    """Everything in a checkpoint besides tensors."""
    metadata = start.metadata | data.identity | {"threads": threads}
    if data.document_token is not None:
        metadata["document_token"] = data.document_token
    return metadata


def build_model(config: Config, document_token: int | None) -> GPT:
    """The model on the CPU, with shapes of parameters in place of parameters."""
    torch.manual_seed(config.run.seed)
    with without_parameters():
        model = GPT(config.model)
    model.document_token = document_token
    for block in model.blocks:
        block.checkpointing = config.train.activation_checkpointing  # pyrefly: ignore[bad-argument-type]
    return model


def initialize(
    config: Config, initial_weights: InitialWeights | None, ranks: Ranks, model: GPT
) -> None:
    """Give the parameters of `build_model`, on their device and sharded, their initial values.

    They are drawn one tensor at a time, and equal for any number of ranks.
    """
    model.init_weights(draw_normal)
    if config.optim.transfer != "none":
        scale_initial_weights(model, config.optim)
    if initial_weights:
        initial_weights.load_into(model, ranks)


def choose_compiling(
    model: GPT,
    config: Config,
    compute: Compute,
    distribute_copy: Callable[..., nn.Module],
    ranks: Ranks,
) -> bool:
    """True if blocks are to be compiled; with train.compile = "auto" copies are tried first."""
    if not distributed.pick_compile(config.train.compile, compute.device):
        return False
    if config.train.compile != "auto":
        return True
    shape = (config.train.micro_batch_size, config.model.block_size)
    return try_compiling(model, shape, distribute_copy, compute.autocast(), ranks)


def build_state(plan: Plan, ranks: Ranks) -> TrainState:
    """Build the model and bring it to the newest intact checkpoint or its trunk's, if any.

    Every rank calls it.

    Raises:
        RunError: all checkpoints are damaged, or the newest does not fit the data, the config or
            the model.
    """
    config, train = plan.config, plan.config.train
    start = find_start(plan.run, plan.branch, plan.data.identity, ranks)
    path = checkpoint.folder_of(start.checkpoints, start.step)
    check_model_settings(config, start.metadata, path)
    threads = distributed.set_threads(plan.device, start.metadata.get("threads"))
    model = build_model(config, plan.data.document_token)
    mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]
    selection_bias = SelectionBias(mixtures, train)

    compute = Compute(
        plan.device,
        plan.dtype,
        train.parallel,
        train.activation_checkpointing,
        count_expert_ranks(config),
    )
    distribute_model = partial(
        distribute,
        parallel=train.parallel,
        ranks=ranks,
        dtype=plan.dtype,
        accumulates=plan.accumulation > 1,
        expert_parallel=compute.expert_parallel,
    )
    compiles = choose_compiling(model, config, compute, distribute_model, ranks)
    runner = distribute_model(
        model,
        compile=compiles,
        initialize=partial(initialize, config, plan.initial_weights, ranks),
    )
    if plan.initial_weights:
        batches = RankBatches(plan.data.loader, plan.accumulation, train.micro_batch_size, ranks)
        plan.initial_weights.match_gates(
            model, config, batches.read(count()), compute.autocast(), ranks
        )

    copy_dtype = None
    if compute.shares_casts:
        copy_dtype = choose_copy_dtype(config.model.backend, plan.device, plan.dtype)
    optimizer = build_optimizer(model, config.optim, copy_dtype)
    joined = torch.compile(join, fullgraph=True) if compiles else join
    planned_bytes = sum(plan.memory)
    cast_weights: list[Tensor] = []
    if compute.shares_casts and plan.dtype != torch.float32:
        for mixture in mixtures:
            cast_weights += [mixture.experts.w_in, mixture.experts.w_out]
    keeps_casts = not cast_weights or (copy_dtype is not None and config.optim.name == "adamw")
    is_sharded = ranks.world_size > 1 or compute.sharded
    captures = can_capture(train.cuda_graph, plan.device, is_sharded, keeps_casts, planned_bytes)
    metadata = build_metadata(start, plan.data, threads) | describe_model_settings(config)
    average = None
    if train.ema_decay:
        average = WeightAverage(model, train.ema_decay)
    state = TrainState(
        step=start.step,
        metadata=metadata,
        compute=compute,
        model=model,
        runner=runner,
        mixtures=mixtures,
        optimizer=optimizer,
        updates=Updates(optimizer, config, scaled=plan.dtype == torch.float16, compile=compiles),
        selection_bias=selection_bias,
        average=average,
        interval=Statistics(len(mixtures), config.model.n_expert, ranks.device, join=joined),
        graph=StepGraph(model.parameters(), captures, cast_weights),
    )
    if start.step:
        checkpoint.restore(start.checkpoints, start.step, model, optimizer.parts, state.tensors)
    shape = (train.micro_batch_size, config.model.block_size)
    with compute.autocast():
        warm_up_ddp_buckets(runner, shape, ranks.device)
    for mixture in mixtures:
        if isinstance(mixture.exchange, Exchange):
            mixture.exchange.n_rows = []  # without the warm-up's
    optimizer.zero_grad(set_to_none=False)
    return state
