"""The training state: what a step changes and a checkpoint holds."""

from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from balance import MEASURED_FIELDS, SelectionBias, Stats
from configure import Config
from configure.schema import select_keys
from model import GPT, Experts, MoE, Output
from runtime import RunError, checkpoint, distributed
from runtime.batches import RankBatches
from runtime.distributed import Ranks
from runtime.folder import Branch, RunFolder
from runtime.graph import StepGraph, can_capture
from runtime.memory import count_expert_ranks
from runtime.optimizers import HalfCopies, build_optimizer
from runtime.parallel import (
    Compute,
    distribute,
    draw_normal,
    full_tensor,
    reshard,
    warm_up_ddp_buckets,
    without_parameters,
)
from runtime.preflight import InitialWeights, Plan
from runtime.runs import OLD_SETTINGS, check_settings, describe_settings
from runtime.transfer import scale_initial_weights
from runtime.updates import Updates, WeightAverage


# ---- the measures of a training step in one vector, so that one collective sums them over ranks
def join(loss: Tensor, aux_loss: Tensor, stats: Stats) -> Tensor:
    """One micro-batch as a vector, in the order of `Statistics.vector`."""
    parts = [torch.ones_like(loss), loss, aux_loss]
    parts += [getattr(stats, field) for field in MEASURED_FIELDS]
    parts.append(stats.loads.sum(1))
    if stats.margins is not None:
        parts.append(stats.margins)
    return torch.cat([part.flatten().double() for part in parts])


class Statistics:
    """Sums over micro-batches, ranks and steps, as named views of one float64 vector on the device.

    The sums of one step count its micro-batches; `to_step_means` turns them into means. Loads and
    margins stay sums over a step. The sum of several steps' vectors, divided by `steps`, is their
    mean. Checkpoints hold the vector, so its order does not change.

    Attributes:
        vector: (3 + F L + L E + L E M,) float64, all of the below one after the other.
        steps: (), micro-batches of a step; after `to_step_means` steps, so 1.
        loss: (), cross-entropy, nats per token.
        aux_loss: (), weighted balance and z-losses, mean over layers.
        layers: {field of Stats: (L,)}, the F fields of MEASURED_FIELDS, means over tokens.
        loads: (L, E) tokens per expert.
        margins: (L, E, M), histograms of `count_margins`; M = 0 except in steps under bias_update =
            "quantile".
    """

    def __init__(
        self,
        n_layer: int,
        n_expert: int,
        device: torch.device,
        n_bin: int = 0,
    ) -> None:
        """Zeros for L = `n_layer` layers with a router, E = `n_expert` and M = `n_bin`."""
        self.shape = (n_layer, n_expert, device)
        n_metric = len(MEASURED_FIELDS)
        n_load = n_layer * n_expert
        sizes = (3, n_metric * n_layer, n_load, n_load * n_bin)
        self.vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        scalars, layers, loads, margins = self.vector.split(sizes)
        self.steps, self.loss, self.aux_loss = scalars.unbind()
        self.layers = dict(zip(MEASURED_FIELDS, layers.view(n_metric, n_layer), strict=True))
        self.loads = loads.view(n_layer, n_expert)
        self.margins = margins.view(n_layer, n_expert, n_bin)

    def new(self, n_bin: int = 0) -> "Statistics":
        """Zeros of the same shape, but with M = `n_bin`."""
        return Statistics(*self.shape, n_bin)

    @torch.no_grad()
    def to_step_means(self, micro_batches: float) -> None:
        """Divide by the micro-batches of a step over all ranks, except loads and margins."""
        n_mean = len(self.vector) - self.loads.numel() - self.margins.numel()
        self.vector[:n_mean] *= 1 / micro_batches

    @torch.no_grad()
    def add_step(self, step: "Statistics") -> None:
        """Add the means of a step, without its margins."""
        self.vector += step.vector[: len(self.vector)]

    def mean(self) -> "Statistics":
        """The mean over the steps that were added; NaN if there were none."""
        mean = self.new()
        torch.div(self.vector, self.steps, out=mean.vector)
        return mean


# ---- the state
class Start(NamedTuple):
    """The checkpoint that a run continues from."""

    checkpoints: Path  # folder of the run's own checkpoints, or of its trunk's
    step: int  # 0: there is none
    metadata: dict[str, Any]


class TrainState(AbstractContextManager["TrainState"]):
    """Model, optimizer, counters and running statistics of one run on one rank.

    Attributes:
        step: optimizer steps done when it was built: the step of the checkpoint or of the branch,
            or 0.
        metadata: everything in the checkpoint besides tensors, and the identity of the data.
        compute: device, type and parallelism.
        model: on its device, sharded under FSDP2.
        runner: the module to call in its place: DDP around the model, or the model.
        mixtures: the model's L layers with experts.
        half: copies of experts' weights that the passes of a step share; none with activation
            checkpointing, which would keep all of them in memory, nor under FSDP2, which gathers
            experts in half precision.
        optimizer: changes the model's parameters.
        updates: decides on steps and counts them.
        selection_bias: moves the routers' selection biases.
        average: the running mean of the weights, if the run keeps one.
        interval: statistics of the steps since the last line of metrics.
        join: the function of that name, perhaps compiled.
        graph: runs the passes of micro-batches, as a CUDA graph with train.cuda_graph.
    """

    def __init__(
        self, plan: Plan, start: Start, model: GPT, runner: nn.Module, compute: Compute
    ) -> None:
        """The state of a new run, whose `start` has the metadata of all its checkpoints."""
        config, train = plan.config, plan.config.train
        compiles = distributed.pick_compile(train.compile, plan.device)
        self.step = start.step
        self.metadata = start.metadata
        self.compute = compute
        self.model = model
        self.runner = runner
        self.mixtures = find_mixtures(self.model)
        layers: list[Experts] = []
        if compute.shares_casts:
            layers = [mixture.experts for mixture in self.mixtures]
        self.half = HalfCopies(layers, plan.dtype, config.model.backend)
        self.optimizer = build_optimizer(self.model, config.optim, self.half, compiles)
        self.updates = Updates(
            self.optimizer, config.optim.grad_clip, plan.dtype == torch.float16, compiles
        )
        self.selection_bias = SelectionBias(
            [mixture.router for mixture in self.mixtures],
            train.bias_update,
            train.bias_update_rate,
        )
        for mixture in self.mixtures:
            mixture.counts_margins = self.selection_bias.n_bin > 0
        self.average = WeightAverage(self.model, train.ema_decay) if train.ema_decay else None
        self.interval = Statistics(len(self.mixtures), config.model.n_expert, plan.device)
        self.join = torch.compile(join, fullgraph=True) if compiles else join
        is_sharded = compute.sharded or distributed.world_size() > 1
        has_kernels = self.half.by_kernel or not layers
        captures = can_capture(
            train.cuda_graph, plan.device, is_sharded, has_kernels, sum(plan.memory)
        )
        self.graph = StepGraph(self.model.parameters(), captures)

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

    def zero_grad(self) -> None:
        """Drop the gradients. DDP's are in its buckets and are filled with zeros instead."""
        self.optimizer.zero_grad(set_to_none=not isinstance(self.runner, DistributedDataParallel))

    def describe_routers(self) -> dict[str, Tensor]:
        """`gamma` and `bias_moved`, (L,) each, if there are any.

        Unless the model is replicated all ranks must call it.
        """
        values: dict[str, Tensor] = {}
        gammas = []
        for mixture in self.mixtures:
            if mixture.router.gamma is not None:
                gammas.append(full_tensor(mixture.router.gamma.detach()))
        if gammas:
            values["gamma"] = torch.cat(gammas)
        if self.selection_bias.moved is not None:
            values["bias_moved"] = self.selection_bias.moved
        return values


def find_mixtures(model: GPT) -> list[MoE]:
    """The layers with experts."""
    return [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]


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


def build_metadata(plan: Plan, start: Start, threads: int) -> dict[str, Any]:
    """Everything in a checkpoint besides tensors."""
    metadata = start.metadata | plan.data.identity | {"threads": threads}
    if plan.data.document_token is not None:
        metadata["document_token"] = plan.data.document_token
    metadata.pop(OLD_SETTINGS, None)
    return metadata | describe_settings(plan.config)


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


def place_model(plan: Plan, model: GPT, compute: Compute, ranks: Ranks) -> nn.Module:
    """Distribute the model over the ranks, give it its initial weights; returns what to call."""
    config, train = plan.config, plan.config.train
    runner = distribute(
        model,
        compute.parallel,
        ranks,
        compute.dtype,
        distributed.pick_compile(train.compile, compute.device),
        accumulates=plan.accumulation > 1,
        expert_parallel=compute.expert_parallel,
        initialize=partial(initialize, config, plan.initial_weights, ranks),
    )
    if plan.initial_weights:
        batches = RankBatches(plan.data.loader, plan.accumulation, train.micro_batch_size, ranks)
        plan.initial_weights.match_gates(
            model, config, batches.read(count()), compute.autocast(), ranks
        )
        reshard(model)
    return runner


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
    changed = select_keys("decay_branch") if start.checkpoints != plan.run.checkpoint_folder else ()
    check_settings(config, start.metadata, path, changed)
    threads = distributed.set_threads(plan.device, start.metadata.get("threads"))
    start = start._replace(metadata=build_metadata(plan, start, threads))
    compute = Compute(
        plan.device,
        plan.dtype,
        train.parallel,
        train.activation_checkpointing,
        count_expert_ranks(config),
    )
    model = build_model(config, plan.data.document_token)
    runner = place_model(plan, model, compute, ranks)
    state = TrainState(plan, start, model, runner, compute)
    if start.step:
        moments = state.optimizer.state
        checkpoint.restore(start.checkpoints, start.step, model, moments, state.tensors)
    with compute.autocast():
        warm_up_ddp_buckets(runner, train.micro_batch_size, config.model.block_size, plan.device)
    state.optimizer.zero_grad(set_to_none=False)
    return state
