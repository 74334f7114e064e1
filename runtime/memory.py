"""Estimate a training step's GPU memory before anything is allocated, and choose a parallelism that fits.

Weights, gradients and optimizer state are exact. Activations, logits and working copies are counted
from what autograd saves for the backward pass; docs/scale.md has the terms and the measurements
they were compared with.
"""

from collections.abc import Mapping, Sequence
from math import ceil, log2, prod
from typing import NamedTuple

import torch

from attention import kv_heads
from common.text import format_bytes
from configure import Config
from configure.schema import Model
from kernels.cross_entropy import chunk_rows
from model import dense_layers
from runtime import RunError, distributed
from runtime.optimizers import is_for_muon
from runtime.parallel import holds_weights

USABLE = 0.92  # of a device's memory; the CUDA context, libraries and fragmentation take the rest
# Per element of a copy in autocast's compute type; auto is float16, as on any GPU.
CAST_BYTES = {"float32": 0, "float16": 2, "bfloat16": 2, "auto": 2}

Shapes = Mapping[str, Sequence[int]]  # {name: shape} of a model's parameters


class Memory(NamedTuple):
    """Bytes on one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int  # AdamW's two moments, Muon's one
    # weights cast to the compute type; of FSDP2 and ZeRO-2 also gathered weights and their
    # gradients
    copies: int
    activations: int
    logits: int
    ema: int = 0  # the running mean of weights (train.ema_decay)
    # full weights that each rank gathers for eval.tasks, beyond what a step has freed by then
    scoring: int = 0

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.ema


def estimate_memory(
    config: Config, shapes: Shapes, parallel: str, shards: int, accumulates: bool = True
) -> Memory:
    """Estimate the memory of one rank at the peak of a training step.

    What Muon works with comes when activations are gone, and is not counted. The mask of
    data.document_mask is, though compiled blocks on CUDA have no such tensor.

    Args:
        config: the run's.
        shapes: the model's parameters.
        parallel: "ddp" (also for one rank), "zero2", "fsdp" or "hsdp", in place of train.parallel.
        shards: ranks that a tensor is split across; 1 for "ddp".
        accumulates: whether a step has several micro-batches.
    """
    dtype, checkpointing = config.train.dtype, config.train.activation_checkpointing
    model, muon = config.model, config.optim.name == "muon"
    # by this rank
    owned = {name: ceil(shape[0] / shards) * prod(shape[1:]) for name, shape in shapes.items()}
    parameters = sum(owned.values())
    by_muon = sum(
        size for name, size in owned.items() if muon and is_for_muon(name, len(shapes[name]))
    )
    tokens = config.train.micro_batch_size * model.block_size
    hold = holds_weights(parallel, accumulates)
    copies = copied_bytes(shapes, model.n_layer, dtype, parallel, checkpointing, hold)
    n_dense = dense_layers(model)
    layers = [
        activation_bytes(model, tokens, dtype, dense=i < n_dense) for i in range(model.n_layer)
    ]
    inputs = model.n_layer * 4 * tokens * model.n_embd  # of the blocks, fp32
    activations = inputs + max(layers) if checkpointing else sum(layers)
    if config.data.document_mask:
        activations += (CAST_BYTES[dtype] or 4) * tokens * model.block_size
    logits = logits_bytes(model, tokens, dtype)
    gathered = (
        4 * sum(map(prod, shapes.values())) if config.eval.task_names and parallel != "ddp" else 0
    )
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters - 4 * by_muon,
        copies=copies,
        activations=activations,
        logits=logits,
        ema=4 * parameters if config.train.ema_decay else 0,
        scoring=max(0, gathered - copies - activations - logits),
    )


def copied_bytes(
    shapes: Shapes, n_layer: int, dtype: str, parallel: str, checkpointing: bool, hold: bool
) -> int:
    """Bytes of `Memory.copies`; the arguments are those of `estimate_memory`, and its `holds_weights`."""

    def count(prefix: str) -> int:
        return sum(prod(shape) for name, shape in shapes.items() if name.startswith(prefix))

    mlps = [count(f"blocks.{i}.mlp.") for i in range(n_layer)]
    rests = [count(f"blocks.{i}.") - mlp for i, mlp in enumerate(mlps)]  # of each block
    outside = count("") - sum(mlps) - sum(rests)
    kept = max if checkpointing else sum  # autograd keeps the casts of one block, or of all
    b = CAST_BYTES[dtype]
    casts = b * (outside + kept(rests))
    if parallel == "ddp":
        return casts + b * kept(mlps)
    # The buffer that a block arrives in, its gradients, and those being reduced in fp32. Parameters
    # outside of blocks stay gathered.
    g = b or 4
    arriving = (2 * g + 4) * max(mlps) + 3 * 4 * max(rests) + 2 * 4 * outside
    if hold:
        return casts + arriving + g * sum(mlps) + 4 * sum(rests)
    return casts + arriving + 2 * g * max(mlps) + 2 * 4 * max(rests)  # FSDP2 holds two


def logits_bytes(model: Model, tokens: int, dtype: str) -> int:
    """Bytes that the LM head and its loss take besides the head's weight and input (kernels/cross_entropy.py)."""
    b = CAST_BYTES[dtype] or 4
    V, C = model.vocab_size, model.n_embd
    chunk = chunk_rows(tokens, V, b) * V * b
    # of the weight; later a copy scaled by the loss's own gradient is beside it
    gradient = 4 * V * C
    return b * tokens * C + gradient + max(chunk, gradient)


def activation_bytes(model: Model, tokens: int, dtype: str, dense: bool) -> int:
    """Bytes that autograd saves of one block, with or without experts, for `tokens` tokens."""
    b = CAST_BYTES[dtype] or 4
    C, H, K, E, shared = (
        model.n_embd,
        model.expert_hidden,
        model.top_k,
        model.n_expert,
        model.n_shared_expert,
    )
    # First norm: input (fp32), output. Attention, its output. Second norm: input, output.
    bytes_per_token = (4 + b) * C + attention_bytes(model, b) + (4 + b) * C
    # an MLP's pre-activations, activated gate, activations per H
    per_unit = (4 if model.gated else 2) * b * H
    if dense:
        return tokens * (bytes_per_token + per_unit * (K + shared))
    bytes_per_token += 4 * 4 * E  # logits, scores, probabilities and what their losses keep
    # pre-activations, gates and indices
    bytes_per_token += (2 if model.gated else 1) * b * K * H + 20 * K
    bytes_per_token += per_unit * shared
    if b != 4:
        bytes_per_token += 4 * C  # the router's fp32 input
        bytes_per_token += b * C if shared else 0  # the shared experts' cast of it
    return tokens * bytes_per_token


def attention_bytes(model: Model, b: int) -> int:
    """Bytes per token that autograd saves of attention without its input; `b` bytes per element."""
    C, kv = model.n_embd, model.n_embd // model.n_head * kv_heads(model)
    normed, rotated = model.qk_norm != "off", model.pos == "rope"
    # output; qkv, which queries, values or the norms' inputs are parts of
    saved = b * (C + C + 2 * kv)
    # queries and keys, no longer a part of the product qkv
    saved += b * (C + kv) if normed or rotated else 0
    # the output in the order of tokens: rotated queries lie in that of heads
    saved += b * C if rotated else 0
    saved += 4 * (C + kv) if normed and b != 4 else 0  # the norms' inputs in fp32
    return saved


def list_parallelisms(world_size: int, local_size: int, ddp_first: bool = True) -> dict[str, int]:
    """The possible values of train.parallel and how many ranks split a tensor under each, in the order "auto" tries.

    The job has `world_size` ranks, `local_size` on each node. On one node ZeRO-2 comes before DDP
    unless `ddp_first`: it shares the optimizer's work, but sends gradients in each micro-batch, so
    it is faster if a step has one.
    """
    names = (
        ["ddp", "hsdp", "zero2", "fsdp"]
        if ddp_first or world_size > local_size
        else ["zero2", "ddp", "fsdp"]
    )
    shards = {"ddp": 1}
    if world_size > local_size > 1 and world_size % local_size == 0:
        shards["hsdp"] = local_size
    if world_size > 1:
        shards |= {"zero2": world_size, "fsdp": world_size}
    return {name: shards[name] for name in names if name in shards}


def choose_parallelism(
    config: Config, shapes: Shapes, world_size: int, local_size: int, device: torch.device
) -> tuple[str, Memory]:
    """Resolve train.parallel: what the config names, or for "auto" the first parallelism that fits the device.

    Returns:
        "ddp", "zero2", "fsdp" or "hsdp", and the estimate of each rank's memory under it.

    Raises:
        RunError: it needs more ranks, or the device's memory is known and smaller than the state
            alone.
    """
    train, capacity = config.train, distributed.memory_bytes(device)
    accumulates = train.batch_size > train.micro_batch_size * world_size
    possible = list_parallelisms(
        world_size, local_size, ddp_first=device.type != "cuda" or accumulates
    )
    if train.parallel not in ("auto", *possible):
        raise RunError(
            f"train.parallel = {train.parallel} is not possible with {world_size} rank(s), {local_size} on this node: "
            f"set --train.parallel=auto, or one of {', '.join(possible)}, or start more ranks with torchrun"
        )
    estimates = {
        parallel: estimate_memory(config, shapes, parallel, shards, accumulates)
        for parallel, shards in possible.items()
        if train.parallel in ("auto", parallel)
    }
    chosen = select_fitting(estimates, capacity)
    check_state_fits(estimates[chosen], capacity, shapes)
    return chosen, estimates[chosen]


def select_fitting(estimates: Mapping[str, Memory], capacity: int | None) -> str:
    """The first key whose memory fits into `capacity` bytes, or the last; the first if capacity is None (unknown)."""
    fitting = (
        name
        for name, memory in estimates.items()
        if capacity is None or sum(memory) <= USABLE * capacity
    )
    return next(fitting, list(estimates)[-1])


def check_state_fits(memory: Memory, capacity: int | None, shapes: Shapes) -> None:
    """Raises RunError if weights, gradients and optimizer state alone exceed `capacity` bytes (None: unknown)."""
    if capacity is not None and memory.state > capacity:
        per_parameter = 20 if memory.ema else 16  # bytes over all ranks that share it, all in fp32
        least = per_parameter * sum(map(prod, shapes.values())) / (USABLE * capacity)
        mean = ", the running mean of weights (train.ema_decay)" if memory.ema else ""
        raise RunError(
            f"weights, gradients and optimizer{mean} need {format_bytes(memory.state)} a GPU, this one has "
            f"{format_bytes(capacity)}: set --train.parallel=fsdp on {2 ** ceil(log2(least))} GPUs or more"
        )


def describe_memory(parallel: str, memory: Memory, capacity: int | None) -> str:
    """One line about `memory` for the start of a run; `capacity` in bytes, None if unknown."""
    parts = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in memory._asdict().items() if size
    )
    line = f"{parallel}, about {format_bytes(sum(memory))} a rank: {parts}"
    if capacity is not None and sum(memory) > USABLE * capacity:
        line += (
            f"; the device's {format_bytes(capacity)} may be too little: set a smaller train.micro_batch_size or "
            f"train.activation_checkpointing = true"
        )
    return line
