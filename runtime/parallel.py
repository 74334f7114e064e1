"""Distribute a model over ranks: DDP replicates it, FSDP2 shards every tensor.

Both average gradients in fp32.

ZeRO-2 (arXiv 1910.02054) is FSDP2 with reshard_after_forward=False. HSDP uses it when a step has
one micro-batch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

import kernels
from balance import expert_loads
from model import GPT, MoE
from runtime.distributed import Ranks


# ---- expert parallelism: tokens travel to their experts' ranks
# n ranks share one set of experts. Rank i of a group of n holds experts i·E/n to (i + 1)·E/n - 1 of
# each layer. A layer sends one row per token and chosen expert (C numbers in the compute type, and
# its gate in fp32) to the expert's rank, which calls `Experts` on the rows it received. The results
# return and are added up per token. No row is dropped or padded.
#
# The host waits for the device once per layer and forward pass: row counts travel first, and
# all-to-all needs them as host numbers.
#
# Shapes: N tokens, K = top_k, C = n_embd, E experts, n ranks of a group, R rows received.
class Routes(NamedTuple):
    """The way of a layer's N·K rows to the ranks of their experts and back."""

    order: Tensor  # (N·K,) rows n·K + k, sorted by expert and so by rank
    n_sent: list[int]  # rows to each rank of the group
    n_received: list[int]  # rows from each rank of the group
    group: dist.ProcessGroup

    def start_sending(self, x: Tensor) -> tuple[Tensor, Any]:
        """Send x, (N, C) to all K experts of a token or (N·K, C) with a row for each expert.

        Returns the rows (R, C) that arrive, and what to `wait` for before they are read.
        """
        copies = len(self.order) // len(x)
        leaving = x[self.order // copies]
        arriving = leaving.new_empty(sum(self.n_received), leaving.shape[1])
        work = dist.all_to_all_single(
            arriving, leaving, self.n_received, self.n_sent, self.group, async_op=True
        )
        return arriving, work

    def send(self, x: Tensor) -> Tensor:
        """The rows of `start_sending` when they have arrived."""
        rows, work = self.start_sending(x)
        work.wait()
        return rows

    def send_back(self, rows: Tensor, n: int) -> Tensor:
        """Return rows (R, C), and add up those of each token (n = N) or none (n = N·K): (n, C)."""
        arriving = rows.new_empty(len(self.order), rows.shape[1])
        dist.all_to_all_single(
            arriving, rows.contiguous(), self.n_sent, self.n_received, self.group
        )
        by_token = torch.empty_like(arriving)
        by_token[self.order] = arriving
        return by_token.view(n, -1, rows.shape[1]).sum(1)


class SendToExperts(torch.autograd.Function):
    """x (N, C) and gates (N, K) -> their rows (R, C) and (R, 1) at the experts' ranks.

    `works` gets what to wait for before either is read.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, routes: Routes, works: list[Any]
    ) -> tuple[Tensor, Tensor]:
        ctx.routes = routes
        ctx.gates_shape = gates.shape
        rows, rows_work = routes.start_sending(x)
        row_gates, gates_work = routes.start_sending(gates.reshape(-1, 1))
        works += [rows_work, gates_work]
        return rows, row_gates

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_gates: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyrefly: ignore[bad-override]  # *grads there
        n_token, top_k = ctx.gates_shape
        d_x = ctx.routes.send_back(d_rows, n_token)
        d_gates = ctx.routes.send_back(d_gates, n_token * top_k)
        return d_x, d_gates.view(ctx.gates_shape), None, None


class ReturnToTokens(torch.autograd.Function):
    """Rows (R, C) at the experts' ranks -> their sums (N, C) at the tokens' ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes, n_token: int) -> Tensor:
        ctx.routes = routes
        return routes.send_back(rows, n_token)

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]  # *grads there
        return ctx.routes.send(d_tokens), None, None


class Journey(NamedTuple):
    """The rows of a layer on their way to the ranks of their experts and back."""

    routes: Routes
    n_token: int
    rows: Tensor  # (R, C) on this rank
    gates: Tensor  # (R, 1)
    local_experts: Tensor  # (R, 1) from 0
    works: list[Any]  # to wait for before rows and gates are read

    def arrive(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows (R, C) on this rank, their gates (R, 1) and experts (R, 1) from 0."""
        for work in self.works:
            work.wait()
        return self.rows, self.gates, self.local_experts

    def return_to_tokens(self, rows: Tensor) -> Tensor:
        """The sums (N, C) over each token's experts, from the experts' outputs (R, C)."""
        return ReturnToTokens.apply(rows, self.routes, self.n_token)


def start_journey(
    n_expert: int, group: dist.ProcessGroup, x: Tensor, gates: Tensor, experts: Tensor
) -> Journey:
    """Start to send x (N, C) and gates (N, K) to experts (N, K), of E = `n_expert`."""
    routes, local_experts = plan_routes(experts, n_expert, group)
    if torch.is_autocast_enabled(x.device.type):  # half the bytes
        x = x.to(torch.get_autocast_dtype(x.device.type))
    works: list[Any] = []
    rows, row_gates = SendToExperts.apply(x, gates, routes, works)
    return Journey(routes, len(x), rows, row_gates, local_experts, works)


def plan_routes(experts: Tensor, n_expert: int, group: dist.ProcessGroup) -> tuple[Routes, Tensor]:
    """Exchange row counts within `group`, and plan the way of the rows. The host waits.

    Args:
        experts: (N, K) int64, chosen by this rank's tokens.
        n_expert: E.
        group: n ranks.

    Returns:
        The routes, and the experts (R, 1) of the rows that this rank receives, from 0.
    """
    n = dist.get_world_size(group)
    loads = expert_loads(experts, n_expert)  # (E,) rows from this rank
    own_loads = torch.empty_like(loads)  # (n·E/n,) rows from each rank for each expert of this rank
    dist.all_to_all_single(own_loads, loads, group=group)
    rows_by_rank = torch.stack([loads, own_loads]).view(2, n, -1).sum(-1)
    n_sent, n_received = rows_by_rank.tolist()
    own_experts = torch.arange(n_expert // n, device=experts.device).repeat(n)
    local_experts = own_experts.repeat_interleave(own_loads, output_size=sum(n_received))
    order = experts.flatten().argsort(stable=True)
    return Routes(order, n_sent, n_received, group), local_experts.unsqueeze(1)


DDP_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True}
# Rank 0's buffers must not overwrite the others' in every forward pass; torch 2.13 renamed the
# option.
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    DDP_OPTIONS["forward_sync_buffers"] = False
else:
    DDP_OPTIONS["broadcast_buffers"] = False


# ---- all ways
class Compute(NamedTuple):
    """Device, type and parallelism of a rank."""

    device: torch.device
    dtype: torch.dtype  # the type that autocast computes in
    parallel: str  # "ddp", "zero2", "fsdp" or "hsdp"
    checkpointing: bool  # activations are computed again in the backward pass
    expert_parallel: int = 1  # ranks that share one set of experts

    def autocast(self) -> torch.autocast:
        """A new autocast context; disabled for float32."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=enabled)

    @property
    def sharded(self) -> bool:
        """True if each rank holds a part of every tensor, or of experts', between steps."""
        return self.parallel != "ddp" or self.expert_parallel > 1

    @property
    def shares_casts(self) -> bool:
        """True if a step's passes share one cast of all experts' weights (`HalfCopies`)."""
        return self.dtype != torch.float32 and not self.sharded and not self.checkpointing


def holds_weights(parallel: str, accumulates: bool) -> bool:
    """True if a sharded model keeps all weights gathered until the backward pass."""
    return parallel == "zero2" or (parallel == "hsdp" and not accumulates)


@contextmanager
def without_parameters() -> Iterator[None]:
    """Build modules in this context with parameters that have a shape and no memory.

    A module loses its parameters to the meta device when its parent gets it. Until then its
    constructor works as usual, so it draws the same random numbers. Buffers keep their values.
    """

    def drop_parameters(_: nn.Module, name: str, module: nn.Module | None) -> None:
        parameters = {} if module is None else dict(module.named_parameters(recurse=False))
        for key, p in parameters.items():
            setattr(module, key, nn.Parameter(p.to("meta"), p.requires_grad))

    handle = register_module_module_registration_hook(drop_parameters)
    try:
        yield
    finally:
        handle.remove()


def allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Move a module to `device`; parameters without memory, or this rank's shards, become zeros."""

    def allocate(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(allocate)


@torch.no_grad()
def draw_normal(p: Tensor, mean: float, std: float) -> None:
    """`nn.init.normal_` of the full tensor on the CPU, so that each device and rank has its values.

    A sharded `p` gets its part of them.
    """
    full = p
    if isinstance(p, DTensor) or p.device.type != "cpu":
        full = torch.empty(p.shape, dtype=p.dtype, device="cpu")
    nn.init.normal_(full, mean, std)
    if full is not p:
        copy_shard(full, p)


@torch.no_grad()
def copy_shard(full: Tensor, p: Tensor) -> None:
    """Copy `full` into `p`, or the part that belongs to this rank's shard of `p`.

    If `full` has fewer rows, the last rows of `p` stay as they are.
    """
    rows = own_rows(full, p)
    local_part(p.detach())[: len(rows)].copy_(rows)


def own_rows(full: Tensor, p: Tensor) -> Tensor:
    """The rows of `full` that belong to this rank's shard of `p`, or all; a view."""
    if not isinstance(p, DTensor):
        return full
    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return full[offset[0] : offset[0] + len(p.to_local())]


def distribute(
    model: GPT,
    parallel: str,
    ranks: Ranks,
    dtype: torch.dtype,
    compile: bool = False,
    accumulates: bool = True,
    expert_parallel: int = 1,
    initialize: Callable[[GPT], object] = lambda model: None,
) -> nn.Module:
    """Move `model` to the device, shard or wrap it in place; returns the module to call instead.

    Args:
        model: equal on all ranks, or built `without_parameters`.
        parallel: "ddp" wraps it if there are several ranks; "zero2" and "fsdp" shard it over all
            ranks, "hsdp" over the ranks of a node, with a replica on each node.
        ranks: this rank and the others.
        dtype: the type that autocast computes in.
        compile: compile each block.
        accumulates: a step has several micro-batches.
        expert_parallel: consecutive ranks that share one set of experts.
        initialize: gives the model's parameters, sharded on the device, their values.
    """
    if compile:
        compile_blocks(model)
    expert_mesh = None
    if expert_parallel > 1:
        sizes = plan_expert_grid(parallel, ranks, expert_parallel)
        expert_mesh = build_mesh(sizes, ranks)
        share_experts(model, expert_mesh["expert"], ranks.device)
    if parallel != "ddp":
        sizes = {"shard": ranks.world_size}
        if parallel == "hsdp":
            n_node = ranks.world_size // ranks.local_size
            sizes = {"replicate": n_node, "shard": ranks.local_size}
        mesh = build_mesh(sizes, ranks)
        hold = holds_weights(parallel, accumulates)
        _shard(model, mesh, expert_mesh, ranks.world_size, dtype, hold)
    if parallel == "ddp" or model.head.is_meta:
        allocate_parameters(model, ranks.device)
    initialize(model)
    runner: nn.Module = model
    if parallel == "ddp":
        runner = _replicate(model, ranks, expert_mesh)
    if expert_mesh is not None and not has_shards(expert_mesh):
        group = expert_mesh.get_group("replicate")
        average_gradients(runner, expert_parameters(model), group, ranks.world_size)
    return runner


def _replicate(model: GPT, ranks: Ranks, expert_mesh: DeviceMesh | None) -> nn.Module:
    """Wrap the model in DDP if there are several ranks; with an `expert_mesh` except experts."""
    if ranks.world_size == 1:
        return model
    experts = {} if expert_mesh is None else expert_parameters(model)
    unaligned = {}
    for name, p in model.named_parameters():
        # KERN's γ has one element. In a bucket it would shift the gradients after it off 16 bytes,
        # where vectorized kernels are slower.
        if p.numel() % 4 and p.requires_grad:
            unaligned[name] = p
    names = [*experts, *unaligned]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    runner = DistributedDataParallel(model, **DDP_OPTIONS)
    average_gradients(runner, unaligned, None, ranks.world_size)
    return runner


def expert_parameters(model: GPT) -> dict[str, nn.Parameter]:
    """{name: weights of routed experts}."""
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def build_mesh(sizes: Mapping[str, int], ranks: Ranks) -> DeviceMesh:
    """All ranks as a grid of `sizes` {axis: ranks}."""
    shape = tuple(sizes.values())
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=tuple(sizes))
    # torch before 2.15 has no public function
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():  # torch gives them 10 minutes
        set_timeout(ranks.timeout, group)
    return mesh


def plan_expert_grid(parallel: str, ranks: Ranks, n: int) -> dict[str, int]:
    """The grid {axis: ranks}: groups of `n` consecutive ranks, "expert", share one set of experts.

    Ranks of equal place in their groups have the same experts: parts of FSDP2 along "shard", copies
    along "replicate".
    """
    groups = ranks.world_size // n
    shards = {"ddp": 1, "hsdp": ranks.local_size // n}.get(parallel, groups)
    sizes = {"replicate": groups // shards, "shard": shards}
    used = {axis: size for axis, size in sizes.items() if size > 1} or {"replicate": 1}
    return used | {"expert": n}


def has_shards(expert_mesh: DeviceMesh) -> bool:
    """True if FSDP2 shards a rank's experts over an axis of `plan_expert_grid`."""
    return "shard" in (expert_mesh.mesh_dim_names or ())


def share_experts(model: GPT, mesh: DeviceMesh, device: torch.device) -> None:
    """Keep this rank's experts of each layer, in place, on `device`; send tokens to the others.

    Args:
        model: equal on all ranks.
        mesh: the group of ranks.
        device: this rank's.
    """
    for block in model.blocks:
        mixture = block.mlp
        if not isinstance(mixture, MoE):
            continue
        for name, p in list(mixture.experts.named_parameters()):
            part = p.detach().chunk(mesh.size())[mesh.get_local_rank()]
            if not part.is_meta:
                part = part.to(device, copy=True)
            shard = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(mixture.experts, name, nn.Parameter(shard))
        n_expert = len(mixture.router.weight)
        start = torch.compiler.disable(start_journey)  # it waits for counts of rows
        mixture.exchange = partial(start, n_expert, mesh.get_group())


def average_gradients(
    runner: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None,
    world_size: int,
) -> None:
    """Sum gradients over `group` (None: all ranks) and divide by `world_size`, in a last pass.

    For experts `group` has the ranks with copies of them. A rank's loss is a mean over its own
    tokens, and the step's loss the mean over all ranks. An expert's rank has the sum of the
    gradients of its group's losses, since all of them sent it tokens. So gradients are summed over
    the groups and divided by the number of all ranks.
    """

    def start(parameter: Tensor) -> None:
        if not getattr(runner, "require_backward_grad_sync", True):
            return
        assert parameter.grad is not None, "called after it was added to"
        gradient = local_part(parameter.grad)
        gradient /= world_size
        work: Any = dist.all_reduce(gradient, group=group, async_op=True)
        # called at the end of the backward pass, as DDP's
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)  # pyrefly: ignore[missing-attribute]

    for parameter in parameters.values():
        parameter.register_post_accumulate_grad_hook(start)


def compile_blocks(model: GPT) -> None:
    """torch.compile each block in place.

    All blocks except the first share one graph, so depth does not slow compiling. DDP and FSDP2
    still receive gradients block by block. So dynamo need not cut graphs at DDP's buckets, which
    versions of torch before 2.13 may refuse if there is an autograd.Function or activation
    checkpointing in them.
    """
    kernels.prepare_compile()
    torch._dynamo.config.optimize_ddp = False
    # By default a graph's backward pass is traced under autocast, which would round the routers'
    # backward pass to half precision. Eager mode does not.
    torch._functorch.config.backward_pass_autocast = "off"
    # Beyond the default of 8 dynamo leaves blocks eager. Two kinds of blocks, with gradients and
    # without, with `HalfCopies` or not, and the last, smaller batch of an evaluation need more.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    for block in model.blocks:
        block.compile()


def _shard(
    model: GPT,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    world_size: int,
    dtype: torch.dtype,
    hold: bool,
) -> None:
    """Shard every parameter along its first dimension, which for experts' weights is the expert.

    Each block is a group, its experts or MLP another, shared experts a third. Experts and MLPs are
    gathered in `dtype`, to which autocast would cast them anyway; other parameters in fp32, so that
    router, norms and residual stream compute as under DDP. With `hold` forward passes keep the
    gathered weights. With an `expert_mesh` (`plan_expert_grid`) a rank's experts are sharded over
    the ranks that have the same ones.
    """
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    half = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    # None: all groups free their weights except the root, which the backward pass needs first
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": False if hold else None}
    expert_options: dict[str, Any] | None = options
    if expert_mesh is not None:
        if has_shards(expert_mesh):
            axes = (expert_mesh.mesh_dim_names or ())[:-1]  # without "expert"
            expert_options = options | {"mesh": expert_mesh[axes]}
        else:
            options["ignored_params"] = set(expert_parameters(model).values())
            expert_options = None
    for block in model.blocks:
        mlp = block.get_submodule("mlp")
        if isinstance(mlp, MoE):
            if expert_options is not None:
                experts = fully_shard(mlp.experts, mp_policy=half, **expert_options)
                if expert_mesh is not None:  # see average_gradients
                    experts.set_gradient_divide_factor(world_size)
                    # gloo has no operation that sums and divides
                    experts.set_force_sum_reduction_for_comms(True)
            if mlp.shared is not None:
                fully_shard(mlp.shared, mp_policy=half, **options)
        else:
            fully_shard(mlp, mp_policy=half, **options)
        fully_shard(block, mp_policy=fp32, **options)
    fully_shard(model, mp_policy=fp32, **options)


def warm_up_ddp_buckets(runner: nn.Module, B: int, T: int, device: torch.device) -> None:
    """Run a backward pass of zeros through DDP, of inputs (B, T).

    DDP reorders its buckets after its first backward pass, and a sum over three ranks or more is
    rounded differently at another place in a bucket. Without this a resumed run's first step would
    differ from an uninterrupted run's.
    """
    if isinstance(runner, DistributedDataParallel):
        x = torch.zeros(B, T, dtype=torch.int64, device=device)
        loss = runner(x, x).loss
        (loss * 0).backward()


def set_gradient_sync(runner: nn.Module, parallel: str, last: bool) -> None:
    """Prepare a backward pass: only in the `last` of a step DDP averages gradients over ranks.

    FSDP2 averages in every pass, since no rank has room for the full gradients; HSDP across nodes
    only in the last one. ZeRO-2 frees its weights in the last one.
    """
    # DDP reads it, and average_gradients
    runner.require_backward_grad_sync = last  # pyrefly: ignore[bad-argument-type]
    if isinstance(runner, FSDPModule):
        if parallel == "zero2":
            runner.set_reshard_after_backward(last)
        elif parallel == "hsdp":
            runner.set_requires_all_reduce(last)


def reshard(model: nn.Module) -> None:
    """Let the parameters of a sharded model be its shards again after a forward pass.

    FSDP2 leaves the gathered weights of some modules in their place. An optimizer built on these
    would never get a gradient.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_model(model: GPT) -> GPT:
    """A copy of a sharded model with full weights, on its device. Every rank must call it."""
    with torch.device("meta"):
        copy = GPT(model.config)
    copy.to_empty(device=model.head.device).requires_grad_(False)
    copy.document_token = model.document_token
    tensors = copy.state_dict()
    for name, tensor in model.state_dict().items():
        tensors[name].copy_(full_tensor(tensor))
    return copy


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, in the same memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The full value of a sharded tensor; any other tensor unchanged. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def find_mesh(tensor: Tensor) -> DeviceMesh | None:
    """The ranks that a sharded tensor is on; None for any other tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None
