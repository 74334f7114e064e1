"""The training state: what a step changes and a checkpoint holds."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from balance import MARGIN_BINS, solve_selection_bias, update_selection_bias
from configure.schema import Optim
from kernels import choose_backend
from model import GPT, MoE
from runtime import checkpoint, distributed
from runtime.distributed import Ranks
from runtime.optimizers import AdamW, Muon, is_for_muon
from runtime.parallel import distribute, full_tensor, local_part, try_compiling, warm_up_ddp_buckets
from runtime.preflight import Plan
from runtime.statistics import Statistics, join
from runtime.updates import Updates


def build_optimizer(model: nn.Module, optim: Optim) -> AdamW:
    """AdamW or Muon with its moments allocated; weight decay on matrices only, not on LayerNorms, biases and γ.

    `Updates` reads a group's `lr_ratio`: optim.router_lr_ratio for routers (W, b, γ),
    optim.expert_out_lr_ratio for the routed experts' w_out.
    """
    groups: dict[tuple, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        group = {"lr_ratio": 1.0, "weight_decay": optim.weight_decay if p.dim() >= 2 else 0.0}
        if ".router." in name:
            group["lr_ratio"] = optim.router_lr_ratio
        elif name.endswith("experts.w_out"):
            group["lr_ratio"] = optim.expert_out_lr_ratio
        if optim.name == "muon" and is_for_muon(name, p.dim()):
            group["momentum"] = optim.momentum
        if p.requires_grad:
            groups.setdefault((*group.items(), p.dim() >= 2), {**group, "params": []})[
                "params"
            ].append(p)
    kind = Muon if optim.name == "muon" else AdamW
    optimizer = kind(
        [*groups.values()], lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )
    # now, not in the first step: float16 may skip it, and a checkpoint holds them
    for group in optimizer.param_groups:
        names = ("exp_avg",) if "momentum" in group else ("exp_avg", "exp_avg_sq")
        for p in group["params"]:
            moments = {name: torch.zeros_like(p) for name in names}
            optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return optimizer


def keep_copies(model: GPT, optimizer: AdamW, device: torch.device, dtype: torch.dtype) -> None:
    """Have AdamW leave copies of experts' weights in half precision, `dtype`, if a Triton kernel multiplies these."""
    by_triton = choose_backend(model.config.backend, device, dtype) == "triton"
    if by_triton and dtype != torch.float32 and not isinstance(optimizer, Muon):
        optimizer.keep_copies(
            [p for name, p in model.named_parameters() if ".experts." in name], dtype
        )


def measure_signal(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Tensor:
    """The part of the squared gradients of `parameters` that is alike from step to step, by AdamW's moments.

    Σ m̂² / Σ v̂ is 1 for constant gradients and (1 − β1) / (1 + β1) for independent ones of mean 0,
    after some tens of steps; the part is 1 and 0 there, and linear between. Signal to noise is part
    / (1 − part). Returns () fp32.
    """
    group = next(
        group
        for group in optimizer.param_groups
        if any(parameters[0] is p for p in group["params"])
    )
    beta1, beta2 = group["betas"]
    floor, states = (1 - beta1) / (1 + beta1), [optimizer.state[p] for p in parameters]
    step = states[0]["step"].to(parameters[0].device)
    first = (
        sum(full_tensor(state["exp_avg"].square().sum()) for state in states)
        / (1 - beta1**step) ** 2
    )
    second = sum(full_tensor(state["exp_avg_sq"].sum()) for state in states) / (1 - beta2**step)
    return (first / second - floor) / (1 - floor)


class WeightAverage:
    """The running mean of weights (train.ema_decay): decay · mean + (1 - decay) · weights after each step taken.

    Of parameters and buffers, from the initial ones on, in fp32 on their device; under FSDP2 each
    rank holds the mean of its own part. The tables of hash layers are constants.

    Attributes:
        tensors: {name in model.state_dict(): mean}; a checkpoint holds them.
    """

    def __init__(self, model: GPT, decay: float) -> None:
        """Begin with the weights that `model`, on its device and sharded, has now."""
        self.model, self.decay = model, decay
        # An optimizer step changes these in place. Under FSDP2 they are the sharded parameters only
        # outside of passes.
        self.weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tensors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each mean, and of its weight."""
        for name, mean in self.tensors.items():
            if mean.is_floating_point():
                yield local_part(mean), local_part(self.weights[name].detach())

    @torch.no_grad()
    def update(self, taken: Tensor) -> None:
        """Move the mean towards the weights after a step, if it was `taken`, () bool on the device."""
        # a tensor: the host does not wait to know whether it was taken
        part = (1 - self.decay) * taken.float()
        for mean, weight in self._pairs():
            mean.lerp_(weight, part)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Within it the model computes with the mean.

        Weights and mean change places, so no third copy is needed.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                # the root keeps what it gathered for an evaluation, which would hide the exchange
                part.reshard()
        for mean, weight in self._pairs():
            before = weight.clone()
            weight.copy_(mean)
            mean.copy_(before)


class TrainState(AbstractContextManager["TrainState"]):
    """Model, optimizer, counters and running statistics of one run on one rank.

    Attributes:
        step: optimizer steps done when it was built: that of the checkpoint, or of the branch, or
            0.
        metadata: what the checkpoint recorded besides tensors, and the identity of the data.
        model: the GPT on its device, sharded under FSDP2.
        runner: what to call in its place: DDP around it, or itself.
        average: the running mean of its weights, if the run keeps one.
        interval: statistics of the steps since the last line of metrics.
        n_bin: of the histograms in a step's statistics under train.bias_update = "quantile", else
            0.
        bias_moved: (L,) mean distance that the last step moved the selection biases by, under
            "quantile".
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        """Build the model and bring it to the newest intact checkpoint or its trunk's, if any.

        Every rank calls it.

        Raises:
            RunError: all checkpoints are damaged, or the newest is of other data or does not fit
                the model.
        """
        config, checkpoints = plan.config, plan.run.checkpoints
        self.step, recorded = checkpoint.latest(checkpoints, ranks)
        if plan.branch and not self.step:
            checkpoints, self.step = plan.branch.trunk.checkpoints, plan.branch.step
            recorded = plan.branch.read_metadata(ranks)
        if self.step:
            plan.check_identity(self.step, recorded)
        # of runs before it was recorded
        all_threads = torch.get_num_threads() if self.step else None
        threads = distributed.choose_threads(plan.device, recorded.get("threads", all_threads))
        self.metadata = recorded | plan.identity | {"threads": threads}
        if plan.document_token is not None:
            self.metadata["document_token"] = plan.document_token

        torch.manual_seed(config.run.seed)  # the same weights on every rank
        self.model = GPT(config.model)
        self.model.document_token = plan.document_token
        if plan.initial_weights:
            plan.initial_weights.load_into(self.model, ranks)
        for block in self.model.blocks:
            block.checkpointing = config.train.activation_checkpointing  # pyrefly: ignore[bad-argument-type]
        self._bias_update_rate = config.train.bias_update_rate
        mixtures = [block.mlp for block in self.model.blocks if isinstance(block.mlp, MoE)]
        self._routers = [mixture.router for mixture in mixtures]
        self.n_bin = MARGIN_BINS if config.train.bias_update == "quantile" else 0
        for mixture in mixtures:
            mixture.counts_margins = self.n_bin > 0
        self.bias_moved: Tensor | None = None
        shape = (config.train.micro_batch_size, config.model.block_size)
        compile = distributed.pick_compile(config.train.compile, plan.device)
        if compile and config.train.compile == "auto":
            compile = try_compiling(self.model, shape, plan.autocast, ranks)
        how = compile, plan.accumulation > 1, getattr(torch, config.train.reduce_dtype)
        self.runner: nn.Module = distribute(self.model, plan.parallel, ranks, plan.dtype, *how)
        if plan.initial_weights:
            plan.initial_weights.match_gates(self.model, plan, ranks)
        self.optimizer = build_optimizer(self.model, config.optim)
        if plan.shares_casts:
            keep_copies(self.model, self.optimizer, plan.device, plan.dtype)
        self.updates = Updates(self.optimizer, config, plan.dtype == torch.float16, compile)
        self.average = (
            WeightAverage(self.model, config.train.ema_decay) if config.train.ema_decay else None
        )
        joined = torch.compile(join, fullgraph=True) if compile else join
        self.interval = Statistics(
            len(self._routers), config.model.n_expert, ranks.device, join=joined
        )

        if self.step:
            checkpoint.load(checkpoints, self.step, self.model, self.optimizer, self.tensors)
        with plan.autocast:
            warm_up_ddp_buckets(
                self.runner, torch.zeros(shape, dtype=torch.int64, device=ranks.device)
            )
        self.optimizer.zero_grad(set_to_none=False)

    def __exit__(self, *error: object) -> None:
        # Before the process group ends: as its last owner DDP's destructor would wait for gloo's
        # threads for ever.
        del self.runner

    @property
    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds besides weights and AdamW's moments, nested."""
        tensors: dict[str, Any] = {
            "interval": self.interval.vector,
            "updates": self.updates.numbers,
        }
        if self.average:
            tensors["ema"] = self.average.tensors
        return tensors

    def zero_grad(self) -> None:
        """Forget the gradients; DDP's lie in its buckets and are filled with zeros instead."""
        self.optimizer.zero_grad(set_to_none=not isinstance(self.runner, DistributedDataParallel))

    @torch.no_grad()
    def update_selection_bias(self, stats: Statistics, taken: Tensor) -> None:
        """Move selection biases (train.bias_update), but hash layers', by a step's sums if it was `taken`, () bool."""
        before = [router.selection_bias.clone() for router in self._routers]
        for router, loads, margins in zip(self._routers, stats.loads, stats.margins, strict=True):
            bias = router.selection_bias
            if self._bias_update_rate and router.hash_table is None:
                update_selection_bias(bias, loads, self._bias_update_rate * taken)
            if self.n_bin and router.hash_table is None:
                solved = solve_selection_bias(bias, margins, router.top_k, router.spec.reach)
                bias.copy_(torch.where(taken, solved, bias))
        if self.n_bin and before:
            pairs = zip(self._routers, before, strict=True)
            self.bias_moved = torch.stack(
                [(router.selection_bias - old).abs().mean() for router, old in pairs]
            )

    def describe_routers(self) -> dict[str, Tensor]:
        """`gamma`, KERN's scales, `bias_moved` and `expert_signal`, (L,) each, if there are any.

        Under FSDP2 all ranks must call it.
        """
        gammas = [
            full_tensor(router.gamma.detach())
            for router in self._routers
            if router.gamma is not None
        ]
        values = {"gamma": torch.cat(gammas)} if gammas else {}
        if self.bias_moved is not None:
            values["bias_moved"] = self.bias_moved
        experts = [
            [*block.mlp.experts.parameters()]
            for block in self.model.blocks
            if isinstance(block.mlp, MoE)
        ]
        # not under Muon
        if experts and all("exp_avg_sq" in self.optimizer.state.get(p, ()) for p in experts[0]):
            values["expert_signal"] = torch.stack(
                [measure_signal(self.optimizer, weights) for weights in experts]
            )
        return values
