"""Distribute a model over ranks: DDP replicates it, FSDP2 shards every tensor.

Both average gradients in fp32.

ZeRO-2 (arXiv 1910.02054) is FSDP2 that gathers its weights once a step and keeps them for the
backward pass; HSDP does so, too, where a step is one micro-batch.
"""

import copy
import inspect
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.text import first_line
from model import GPT, MoE
from runtime.distributed import Ranks, gather, print_once

# Rank 0's buffers must not overwrite the others' in every forward pass; torch 2.13 renamed the
# option that does it.
_NAMES = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
DDP_OPTIONS: dict[str, Any] = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True}


def holds_weights(parallel: str, accumulates: bool) -> bool:
    """Whether a sharded model keeps all weights gathered from a forward pass to its backward pass."""
    return parallel == "zero2" or (parallel == "hsdp" and not accumulates)


def distribute(
    model: GPT,
    parallel: str,
    ranks: Ranks,
    dtype: torch.dtype,
    compile: bool = False,
    accumulates: bool = True,
    reduce_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Move `model` to the device, shard or wrap it, all in place, and return the module to call instead.

    Under "ddp" it is wrapped if there are several ranks; "zero2" and "fsdp" shard it over all
    ranks, "hsdp" over those of a node, with a replica on each. Autocast computes in `dtype`; with
    `compile` each block is compiled. A step `accumulates` several micro-batches or not; gradients
    are summed over ranks in `reduce_dtype`.
    """
    if compile:
        compile_blocks(model)
    if parallel != "ddp":
        _shard(model, parallel, ranks, dtype, holds_weights(parallel, accumulates), reduce_dtype)
        return model
    model.to(ranks.device)
    if ranks.world_size == 1:
        return model
    runner = DistributedDataParallel(model, **DDP_OPTIONS)
    if reduce_dtype == torch.bfloat16:
        # By its own name DDP refuses the hook with gloo, which can sum bfloat16, too.
        runner.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return runner


def compile_blocks(model: GPT) -> None:
    """torch.compile each block in place.

    All blocks but the first share one graph, so depth does not slow compiling. DDP and FSDP2 still
    receive gradients block by block. So dynamo need not cut graphs at DDP's buckets, which versions
    of torch before 2.13 may refuse where there is an autograd.Function or activation checkpointing
    in them.
    """
    model.compiled = True
    torch._dynamo.config.optimize_ddp = False
    # As in eager mode. By default a graph's backward pass is traced under autocast: routers' would
    # round to half.
    torch._functorch.config.backward_pass_autocast = "off"
    # Past the default of 8 dynamo leaves blocks eager. Two kinds of blocks, with gradients and
    # without, under `cast_once` or not, and the last, smaller batch of an evaluation need more.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    for block in model.blocks:
        block.compile()


def try_compiling(
    model: GPT, shape: tuple[int, int], autocast: torch.autocast, ranks: Ranks
) -> bool:
    """Whether blocks compile on every rank; one warning is printed if not. Every rank must call it.

    A copy of each kind of block runs forward, backward and without gradients, before the model is
    distributed: no collective waits then for a rank that failed, and the model, its gradients and
    random numbers stay as they are. `shape` is (B, T), that of a micro-batch.
    """
    problem = ""
    kinds = {repr(block.mlp): block for block in model.blocks}
    try:
        with torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []):
            for block in kinds.values():
                trial = copy.deepcopy(block).to(ranks.device)
                trial.compile()
                x = torch.zeros(
                    *shape, model.config.n_embd, device=ranks.device, requires_grad=True
                )
                with autocast:
                    idx = torch.zeros(shape, dtype=torch.int64, device=ranks.device)
                    documents = model.find_documents(idx, True)
                    y = trial(*trial(x, None, idx, None, documents)[:2], idx, None, documents)[1]
                    y.float().sum().backward()
                with torch.no_grad(), autocast:
                    trial.eval()(x, None, idx, None, documents)
    except Exception as error:  # whatever dynamo, inductor, Triton or a C compiler raise
        problem = f"{type(error).__name__}: {first_line(error)}"
    failed = [(rank, text) for rank, text in enumerate(gather(problem, ranks.control)) if text]
    if failed:
        torch._dynamo.reset()
        rank, problem = failed[0]
        print_once(
            f"warning: train.compile = auto: compiling failed on rank {rank}, so nothing is compiled: {problem}"
        )
    return not failed


def _shard(
    model: GPT,
    parallel: str,
    ranks: Ranks,
    dtype: torch.dtype,
    hold: bool,
    reduce_dtype: torch.dtype,
) -> None:
    """Shard every parameter along its first dimension, which for experts' weights is the expert.

    Each block is a group, its experts or MLP another, shared experts a third. Experts and MLPs are
    gathered in `dtype`, to which autocast would cast them anyway; the rest in fp32, so that router,
    norms and residual stream compute as under DDP. With `hold` no forward pass frees what it
    gathered.
    """
    shape, names = (ranks.world_size,), ("shard",)
    if parallel == "hsdp":
        shape, names = (
            (ranks.world_size // ranks.local_size, ranks.local_size),
            ("replicate", "shard"),
        )
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    free = False if hold else None  # None: all but the root, which is needed again at once
    for block in model.blocks:
        mlp = block.get_submodule("mlp")
        parts = [mlp.experts, mlp.shared] if isinstance(mlp, MoE) else [mlp]
        for part in parts:
            if part is not None:
                fully_shard(part, mesh=mesh, mp_policy=cast, reshard_after_forward=free)
        fully_shard(block, mesh=mesh, mp_policy=fp32, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=fp32, reshard_after_forward=free)


def warm_up_ddp_buckets(runner: nn.Module, x: Tensor) -> None:
    """Run a backward pass of zeros through DDP; `x` (B, T) int64 is shaped like training inputs.

    DDP reorders its buckets after its first backward pass, and a sum over three ranks or more is
    rounded differently at another place in a bucket. Without this a resumed run's first step would
    differ from an uninterrupted run's.
    """
    if isinstance(runner, DistributedDataParallel):
        (runner(x, x)[1] * 0).backward()


def set_gradient_sync(runner: nn.Module, parallel: str, last: bool) -> None:
    """Set whether the next backward pass is the step's `last`: only then DDP averages gradients over ranks.

    FSDP2 averages in every pass, since no rank has room for the full gradients. ZeRO-2 frees its
    weights in the last.
    """
    if isinstance(runner, DistributedDataParallel):
        runner.require_backward_grad_sync = last
    if parallel == "zero2" and isinstance(runner, FSDPModule):
        runner.set_reshard_after_backward(last)


def gather_model(model: GPT) -> GPT:
    """A copy of a sharded model with full weights, on its device. Every rank must call it."""
    with torch.device("meta"):
        copy = GPT(model.config)
    copy.to_empty(device=model.head.device).requires_grad_(False)
    copy.document_token = model.document_token
    own = copy.state_dict()
    for name, tensor in model.state_dict().items():
        own[name].copy_(full_tensor(tensor))
    return copy


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The full value of a sharded tensor, which every rank must call; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
