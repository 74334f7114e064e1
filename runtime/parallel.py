"""How ranks share one model: DDP gives each a copy, FSDP2 a part of every tensor. Both average gradients in fp32."""

import inspect

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 renamed what keeps rank 0's buffers from overwriting the others' in every forward pass.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
BUFFERS_STAY = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


def distribute(model, parallel, ranks, dtype, compile=False):
    """What to call in place of `model`, which is moved to the device: itself on one rank, DDP around it ("ddp"), or
    itself with its parameters sharded ("fsdp": over all ranks; "hsdp": over those of a node, each node with all of it).
    `dtype` is what autocast computes in."""
    if compile:
        compile_blocks(model)
    if parallel in ("fsdp", "hsdp"):
        shard(model, parallel, ranks, dtype)
        return model
    model.to(ranks.device)
    if ranks.world_size > 1:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **{BUFFERS_STAY: False})
    return model


def compile_blocks(model):
    """torch.compile each block of a GPT, in place. They share one graph, so compiling takes as long for one as for all,
    and DDP and FSDP2 see gradients come block by block."""
    for block in model.blocks:
        block.compile()


def shard(model, parallel, ranks, dtype):
    """Shards every parameter of a GPT along its first dimension, which of the experts' weights is the expert.

    One group per block, one for its experts or MLP, and one for the rest. Experts are gathered in `dtype`, in which
    autocast would multiply them anyhow; all else in fp32, so that router, LayerNorms and residual stream are computed
    as under DDP.
    """
    shape, names = (ranks.world_size,), ("shard",)
    if parallel == "hsdp":
        shape, names = (ranks.world_size // ranks.local_size, ranks.local_size), ("replicate", "shard")
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    as_is = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(getattr(block.mlp, "experts", block.mlp), mesh=mesh, mp_policy=cast)
        fully_shard(block, mesh=mesh, mp_policy=as_is)
    fully_shard(model, mesh=mesh, mp_policy=as_is)


def warm_up_ddp_buckets(runner, x):
    """A backward pass of zeros through DDP, with inputs (B, T) like those of training.

    After its first one DDP lays out its buckets anew, and a sum over three ranks or more is rounded by where in a
    bucket it stands: a resumed run would differ in its first step from one that went on.
    """
    if isinstance(runner, DistributedDataParallel):
        (runner(x, x)[1] * 0).backward()


def set_gradient_sync(runner, last):
    """Tells DDP whether the next backward pass is the step's last, the one that averages gradients over ranks. FSDP2
    averages in each, so that no rank ever holds a whole gradient."""
    if isinstance(runner, DistributedDataParallel):
        runner.require_backward_grad_sync = last


def full_tensor(tensor):
    """A sharded tensor's full value, which every rank must ask for; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
