"""The training state: what a step changes and a checkpoint holds."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from configure.schema import Optim
from model import GPT, MoE
from router import update_selection_bias
from runtime import checkpoint, initial
from runtime.distributed import Ranks
from runtime.parallel import distribute, full_tensor, warm_up_ddp_buckets
from runtime.preflight import Plan
from runtime.statistics import Statistics
from runtime.updates import Updates


def build_optimizer(model: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """AdamW with its moments allocated; weight decay on matrices only, not on LayerNorms, biases and γ.

    Routers (W, b, γ) have groups of their own if optim.router_lr_ratio is not 1. `Updates` reads a group's `lr_ratio`.
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    routers = [name for name in params if ".router." in name and optim.router_lr_ratio != 1]
    groups = []
    for ratio, names in ((1.0, [name for name in params if name not in routers]), (optim.router_lr_ratio, routers)):
        matrices = [params[name] for name in names if params[name].dim() >= 2]
        others = [params[name] for name in names if params[name].dim() < 2]
        groups.append({"params": matrices, "weight_decay": optim.weight_decay, "lr_ratio": ratio})
        groups.append({"params": others, "weight_decay": 0.0, "lr_ratio": ratio})
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
    for p in params.values():  # now, not in the first step: float16 may skip that one, and a checkpoint holds the state
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return optimizer


class TrainState:
    """Model, optimizer, counters and running statistics of one run on one rank. A context manager.

    Attributes:
        step: optimizer steps done when it was built: that of the checkpoint, or of the branch, or 0.
        metadata: what the checkpoint recorded besides tensors, and the identity of the data.
        model: the GPT on its device, sharded under FSDP2.
        runner: what to call in its place: DDP around it, or itself.
        interval: statistics of the steps since the last line of metrics.
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        """Build the model and bring it to the newest intact checkpoint or its trunk's, if any. Every rank calls it.

        Raises:
            RunError: all checkpoints are damaged, or the newest is of other data or does not fit the model.
        """
        config, checkpoints = plan.config, plan.folder / "checkpoints"
        self.step, recorded = checkpoint.latest(checkpoints, ranks)
        if plan.branch and not self.step:
            checkpoints, self.step, recorded = (
                plan.branch.checkpoints,
                plan.branch.step,
                plan.branch.read_metadata(ranks),
            )
        if self.step:
            plan.check_identity(self.step, recorded or {})
        self.metadata = {**(recorded or {}), **plan.identity}

        torch.manual_seed(config.run.seed)  # the same weights on every rank
        self.model = GPT(config.model)
        if plan.initial_weights:
            initial.load_initial_weights(self.model, plan.initial_weights, ranks)
        for block in self.model.blocks:
            block.checkpointing = config.train.activation_checkpointing  # pyrefly: ignore[bad-argument-type]
        self.runner: nn.Module = distribute(self.model, plan.parallel, ranks, plan.dtype, config.train.compile)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.updates = Updates(
            self.optimizer,
            ranks.device,
            scaled=plan.dtype == torch.float16,
            grad_clip=config.optim.grad_clip,
            loss_spike=config.train.loss_spike,
            spike_sigma=config.train.spike_sigma,
            max_skipped_steps=config.train.max_skipped_steps,
        )
        self._routers = [block.mlp.router for block in self.model.blocks if isinstance(block.mlp, MoE)]
        self._bias_update_rate = config.train.bias_update_rate
        self.interval = Statistics(len(self._routers), config.model.n_expert, ranks.device)

        if self.step:
            checkpoint.load(checkpoints, self.step, self.model, self.optimizer, self.tensors)
        shape = (config.train.micro_batch_size, config.model.block_size)
        with plan.autocast:
            warm_up_ddp_buckets(self.runner, torch.zeros(shape, dtype=torch.int64, device=ranks.device))
        self.optimizer.zero_grad(set_to_none=False)

    def __enter__(self) -> "TrainState":
        return self

    def __exit__(self, *error: object) -> None:
        # Before the process group ends: as its last owner DDP's destructor would wait for gloo's threads for ever.
        del self.runner

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides weights and AdamW's moments."""
        return {"interval": self.interval.vector, "updates": self.updates.numbers}

    def zero_grad(self) -> None:
        """Forget the gradients; DDP's lie in its buckets and are filled with zeros instead."""
        self.optimizer.zero_grad(set_to_none=not isinstance(self.runner, DistributedDataParallel))

    def update_selection_bias(self, loads: Tensor, taken: Tensor) -> None:
        """Move the balancing biases (train.bias_update_rate) by a step's `loads` (L, E) if it was `taken`, () bool."""
        if self._bias_update_rate:
            for router, load in zip(self._routers, loads, strict=True):
                update_selection_bias(router.selection_bias, load, self._bias_update_rate * taken)

    def gammas(self) -> Tensor | None:
        """KERN's scales γ, (L,), None if the router has none. Under FSDP2 every rank must call it."""
        gammas = [router.gamma for router in self._routers if router.gamma is not None]
        return torch.cat([full_tensor(gamma.detach()) for gamma in gammas]) if gammas else None
