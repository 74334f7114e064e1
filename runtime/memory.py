"""What a training step needs of a GPU's memory, reckoned before anything is allocated, and which way of sharing fits.

Weights, gradients and optimizer state are exact. Activations, logits and working copies are counted from what autograd
keeps for the backward pass; docs/scale.md has the terms, and what they were measured against.
"""

from math import ceil, log2, prod
from typing import NamedTuple

from kernels.cross_entropy import chunk_rows
from runtime import RunError, distributed

USABLE = 0.92  # of a device's memory; the CUDA context, libraries and fragmentation take the rest
REST = {"float32": 0, "float16": 2, "bfloat16": 2}  # bytes of a weight's copy in the type autocast computes in


class Memory(NamedTuple):
    """Bytes on one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int  # AdamW's two moments
    copies: int  # weights cast to the compute type, and under FSDP2 gathered ones with their gradients
    activations: int
    logits: int

    @property
    def state(self):
        """What is there whatever the batch."""
        return self.weights + self.gradients + self.optimizer


def plan(shapes, model, micro_batch_size, dtype, parallel, shards, checkpointing):
    """Memory of one rank.

    `shapes` is {name: shape} of the model's parameters, `model` has the attributes of `configure.schema.Model`, `dtype`
    is a name such as "float16", `parallel` is "ddp" (one rank too), "fsdp" or "hsdp", `shards` the number of ranks that
    share a tensor.
    """
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    in_mlp = sum(size for name, size in sizes.items() if name.startswith("blocks.0.mlp."))
    in_block = sum(size for name, size in sizes.items() if name.startswith("blocks.0.")) - in_mlp
    outside = sum(size for name, size in sizes.items() if not name.startswith("blocks."))
    kept_blocks = 1 if checkpointing else model.n_layer  # whose casts autograd keeps
    copies = REST[dtype] * (outside + kept_blocks * in_block)
    if parallel == "ddp":
        parameters = sum(sizes.values())
        copies += REST[dtype] * kept_blocks * in_mlp
    else:
        parameters = sum(ceil(shape[0] / shards) * prod(shape[1:]) for shape in shapes.values())
        # Two blocks are gathered at a time, one more is in the buffer it comes in, one has gradients, which go out in
        # fp32; what is outside of blocks stays gathered.
        copies += (4 * (REST[dtype] or 4) + 4) * in_mlp + 5 * 4 * in_block + 2 * 4 * outside
    tokens = micro_batch_size * model.block_size
    layer = activation_bytes(model, tokens, dtype)
    per_layer = 4 * tokens * model.n_embd if checkpointing else layer  # a block's input
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        copies=copies,
        activations=model.n_layer * per_layer + (layer if checkpointing else 0),
        logits=logits_bytes(model, tokens, dtype),
    )


def logits_bytes(model, tokens, dtype):
    """What the LM head takes besides its weight and its input (kernels/cross_entropy.py), bytes."""
    b = REST[dtype] or 4
    V, C = model.vocab_size, model.n_embd
    chunk = chunk_rows(tokens, V, b) * V * b
    gradient = 4 * V * C  # of the weight, before the loss's own gradient is known; then scaled, beside it
    return b * tokens * C + gradient + max(chunk, gradient)


def activation_bytes(model, tokens, dtype):
    """What autograd keeps of one block, bytes."""
    b = REST[dtype] or 4
    C, H, K, E = model.n_embd, model.expert_hidden, model.top_k, model.n_expert
    # Attention: its LayerNorm's input (fp32) and output, q k v, its output. Second LayerNorm: input, output.
    bytes_per_token = (4 + b + 3 * b + b) * C + (4 + b) * C
    if model.router == "dense":
        return tokens * (bytes_per_token + 2 * b * K * H)  # before and after GELU
    bytes_per_token += 4 * C * (b != 4)  # the router's fp32 input
    bytes_per_token += 4 * 4 * E  # logits, scores, probabilities and what their losses keep
    bytes_per_token += b * K * H + 20 * K  # pre-activations, gates and indices
    return tokens * bytes_per_token


def ways(world_size, local_size):
    """{how ranks can share a model: how many share a tensor}, least traffic first. A node has `local_size` of them."""
    ways = {"ddp": 1}
    if world_size > local_size > 1 and world_size % local_size == 0:
        ways["hsdp"] = local_size
    if world_size > 1:
        ways["fsdp"] = world_size
    return ways


def choose_parallelism(config, shapes, dtype, world_size, local_size, device):
    """(how the ranks share the model, the Memory that takes on each): what the config says, or the first that fits.

    Raises RunError if there are not the ranks for it, or if not even the state fits where the device's memory is known.
    """
    capacity = distributed.memory_bytes(device)
    possible = ways(world_size, local_size)
    if config.train.parallel not in ("auto", *possible):
        raise RunError(
            f"train.parallel = {config.train.parallel} cannot be with {world_size} rank(s), {local_size} on this node: "
            f"set --train.parallel=auto, or one of {', '.join(possible)}, or start more ranks with torchrun"
        )
    name, checkpointing = str(dtype).removeprefix("torch."), config.train.activation_checkpointing
    plans = {
        way: plan(shapes, config.model, config.train.micro_batch_size, name, way, shards, checkpointing)
        for way, shards in possible.items()
        if config.train.parallel in ("auto", way)
    }
    chosen = choose(plans, capacity)
    check(chosen, plans[chosen], capacity, world_size)
    return chosen, plans[chosen]


def choose(plans, capacity):
    """The first of `plans` ({parallel: Memory}) that fits into `capacity` bytes, or the last; the first if `capacity`
    is None, which is not known."""
    for parallel, memory in plans.items():
        if capacity is None or sum(memory) <= USABLE * capacity:
            return parallel
    return parallel


def check(parallel, memory, capacity, world_size):
    """Raises RunError if not even weights, gradients and optimizer state fit into `capacity` bytes, where known."""
    if capacity is None or memory.state <= capacity:
        return
    needed = f"weights, gradients and AdamW need {human(memory.state)} a GPU, this one has {human(capacity)}"
    if parallel == "ddp":
        ranks = power_of_two(memory.state / (USABLE * capacity))
        remedy = "set --train.parallel=fsdp"
        remedy += f" on {ranks} GPUs (torchrun --nproc_per_node={ranks})" if ranks > world_size else ""
    elif parallel == "hsdp":
        remedy = "set --train.parallel=fsdp, which shards over all nodes"
    else:
        remedy = f"start {power_of_two(world_size * memory.state / (USABLE * capacity))} ranks"
    raise RunError(f"{needed}: {remedy}")


def power_of_two(least):
    """The next, which divides most batches; 2 at least."""
    return 2 ** max(1, ceil(log2(least)))


def human(size):
    """A number of bytes as text, such as "1.9 GiB"."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def describe(parallel, memory, capacity):
    """One line for the start of a run."""
    parts = ", ".join(f"{name} {human(size)}" for name, size in memory._asdict().items() if size)
    line = f"{parallel}, about {human(sum(memory))} a rank: {parts}"
    if capacity is not None and sum(memory) > USABLE * capacity:
        line += (
            f"; of {human(capacity)} there may be too little: a smaller train.micro_batch_size or "
            f"train.activation_checkpointing = true spares some"
        )
    return line
