"""Estimate a training step's GPU memory before it is allocated, and choose a parallelism.

Weights, gradients and optimizer state are exact. Activations, logits and working copies are counted
from what autograd saves for the backward pass; docs/scale.md has the terms and the measurements
they were compared with.
"""

from collections.abc import Mapping, Sequence
from math import ceil, gcd, log2, prod
from typing import NamedTuple

import torch

from attention import kv_heads
from common.text import format_bytes
from configure import Config
from configure.schema import Model
from kernels.cross_entropy import chunk_rows
from model import dense_layers
from router import find_spec
from runtime import RunError, distributed
from runtime.folder import replace
from runtime.optimizers import is_for_muon
from runtime.parallel import holds_weights

# Fraction of a device's memory. CUDA's context, libraries and fragmentation use the remainder; not
# measured.
USABLE = 0.92
# Traffic with shared experts over traffic without, at which they are chosen. The other half is room
# for waits of the host, unequal loads and casts in each micro-batch; not measured.
SHARED_TRAFFIC = 0.5
# Bytes per element of a copy in autocast's compute type; auto is float16, as on any GPU.
CAST_BYTES = {"float32": 0, "float16": 2, "bfloat16": 2, "auto": 2}

Shapes = Mapping[str, Sequence[int]]  # {name: shape} of a model's parameters


class Memory(NamedTuple):
    """Bytes on one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int  # AdamW has two moments, Muon one
    # weights cast to the compute type; under FSDP2 and ZeRO-2 also gathered weights and their
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

    Muon's working memory is not counted, since activations are freed before.

    Args:
        config: the run's settings.
        shapes: shapes of the model's parameters.
        parallel: "ddp" (also for one rank), "zero2", "fsdp" or "hsdp", in place of train.parallel.
        shards: ranks that a tensor is split across; 1 for "ddp".
        accumulates: True if a step has several micro-batches.
    """
    model = config.model
    dtype = config.train.dtype
    checkpointing = config.train.activation_checkpointing
    parameters = 0  # numbers on this rank
    moments = 0
    gathered = 4 * sum(prod(shape) for shape in shapes.values())
    n = count_expert_ranks(config)
    shapes = divide_experts(shapes, n)
    for name, shape in shapes.items():
        parts = max(1, shards // n) if ".experts." in name else shards
        size = ceil(shape[0] / parts) * prod(shape[1:])
        by_muon = is_for_muon(config.optim, name, len(shape))
        parameters += size
        moments += size if by_muon else 2 * size
    tokens = config.train.micro_batch_size * model.block_size
    hold = holds_weights(parallel, accumulates)
    copies = copied_bytes(shapes, model.n_layer, dtype, parallel, checkpointing, hold)

    n_dense = dense_layers(model)
    layers = []
    for layer in range(model.n_layer):
        dense = layer < n_dense
        layers.append(activation_bytes(model, tokens, dtype, dense, travels=n > 1))
    activations = sum(layers)
    if checkpointing:
        block_inputs = model.n_layer * 4 * tokens * model.n_embd  # fp32
        activations = block_inputs + max(layers)
    if config.data.document_mask:
        activations += (CAST_BYTES[dtype] or 4) * tokens * model.block_size
    logits = logits_bytes(model, tokens, dtype)

    scoring = 0
    if config.eval.task_names and (parallel != "ddp" or n > 1):
        scoring = max(0, gathered - copies - activations - logits)
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=4 * moments,
        copies=copies,
        activations=activations,
        logits=logits,
        ema=4 * parameters if config.train.ema_decay else 0,
        scoring=scoring,
    )


def count_expert_ranks(config: Config) -> int:
    """Ranks that share one set of experts; 1 for a dense model, which has none."""
    return 1 if find_spec(config.model.router) is None else config.train.expert_parallel


def divide_experts(shapes: Shapes, n: int) -> Shapes:
    """The shapes on one of `n` ranks that share the experts."""
    divided = {}
    for name, shape in shapes.items():
        is_shared = ".experts." in name
        divided[name] = (shape[0] // n, *shape[1:]) if is_shared else tuple(shape)
    return divided


def estimate_traffic(
    config: Config, shapes: Shapes, parallel: str, world_size: int, local_size: int
) -> float:
    """Estimate the bytes that one rank sends per step, by the formulas of docs/scale.md."""
    model = config.model
    train = config.train
    passes = train.batch_size / (train.micro_batch_size * world_size)
    n = count_expert_ranks(config)
    b = CAST_BYTES[train.dtype] or 4
    expert_numbers = 0
    other_numbers = 0
    for name, shape in shapes.items():
        if ".experts." in name:
            expert_numbers += prod(shape)
        else:
            other_numbers += prod(shape)

    within = local_size if parallel == "hsdp" else world_size  # ranks that shard or copy weights
    own_experts = expert_numbers / n if within > n else 0  # others of the rank's group have these
    weights = b * own_experts + 4 * other_numbers
    gradients = 4 * (own_experts + other_numbers)
    if parallel == "ddp":
        total = 2 * gradients
    elif holds_weights(parallel, accumulates=passes > 1):
        total = weights + passes * gradients
    else:
        total = passes * (2 * weights + gradients)
    if parallel == "hsdp":
        nodes = world_size / local_size
        total += 2 * 4 * (expert_numbers + other_numbers) / local_size * (nodes - 1) / nodes

    tokens = train.micro_batch_size * model.block_size
    n_layer = model.n_layer - dense_layers(model)
    journeys = 6 if train.activation_checkpointing else 4  # there and back; again for gradients
    row_bytes = b * model.top_k * tokens * model.n_embd
    return total + passes * n_layer * journeys * row_bytes * (n - 1) / n


def copied_bytes(
    shapes: Shapes, n_layer: int, dtype: str, parallel: str, checkpointing: bool, hold: bool
) -> int:
    """Bytes of `Memory.copies`; arguments as in `estimate_memory`, `hold` as `holds_weights`."""
    mlps = [0] * n_layer  # parameters of each block's MLP
    others = [0] * n_layer  # of each block outside its MLP
    outside = 0
    for name, shape in shapes.items():
        if not name.startswith("blocks."):
            outside += prod(shape)
            continue
        layer, part = name.split(".")[1:3]
        if part == "mlp":
            mlps[int(layer)] += prod(shape)
        else:
            others[int(layer)] += prod(shape)
    kept = max if checkpointing else sum  # autograd keeps the casts of one block, or of all
    cast_bytes = CAST_BYTES[dtype]
    casts = cast_bytes * (outside + kept(others))
    if parallel == "ddp":
        return casts + cast_bytes * kept(mlps)
    # The buffer that a block is gathered in, its gradients, and gradients that are reduced in fp32.
    # Parameters outside of blocks stay gathered.
    gathered_bytes = cast_bytes or 4
    arriving = (2 * gathered_bytes + 4) * max(mlps) + 3 * 4 * max(others) + 2 * 4 * outside
    if hold:
        return casts + arriving + gathered_bytes * sum(mlps) + 4 * sum(others)
    two_blocks = 2 * gathered_bytes * max(mlps) + 2 * 4 * max(others)  # FSDP2 holds two
    return casts + arriving + two_blocks


def logits_bytes(model: Model, tokens: int, dtype: str) -> int:
    """Bytes of the LM head and its loss, except its weight and input (kernels/cross_entropy.py)."""
    b = CAST_BYTES[dtype] or 4
    V = model.vocab_size
    C = model.n_embd
    chunk = chunk_rows(tokens, V, b) * V * b
    # The weight's gradient. When the chunks are freed, a copy times the loss's gradient is made.
    gradient = 4 * V * C
    return b * tokens * C + gradient + max(chunk, gradient)


def activation_bytes(
    model: Model, tokens: int, dtype: str, dense: bool, travels: bool = False
) -> int:
    """Bytes that autograd saves of one block, with or without experts, for `tokens` tokens.

    If a token `travels` to its experts (train.expert_parallel), a rank also keeps the rows that it
    received. Equal loads on all ranks are assumed.
    """
    b = CAST_BYTES[dtype] or 4
    C = model.n_embd
    H = model.expert_hidden
    K = model.top_k
    norm_bytes = (4 + b) * C  # input (fp32) and output
    bytes_per_token = norm_bytes + attention_bytes(model, b) + norm_bytes
    # an MLP's pre-activations, activated gate and activations, for a width of H
    mlp_bytes = (4 if model.gated else 2) * b * H
    if dense:
        return tokens * (bytes_per_token + mlp_bytes * (K + model.n_shared_expert))
    bytes_per_token += 4 * 4 * model.n_expert  # logits, scores, probabilities; for their losses
    pre_activations = (2 if model.gated else 1) * b * K * H
    bytes_per_token += pre_activations + 20 * K  # gates and indices
    bytes_per_token += mlp_bytes * model.n_shared_expert
    if travels:
        bytes_per_token += K * (b * C + 8)  # rows, and their order
    if b != 4:
        bytes_per_token += 4 * C  # the router's fp32 input
        if model.n_shared_expert:
            bytes_per_token += b * C  # their cast of it
    return tokens * bytes_per_token


def attention_bytes(model: Model, b: int) -> int:
    """Bytes per token that autograd saves of attention without its input; `b` bytes per element."""
    C = model.n_embd
    kv_width = model.n_embd // model.n_head * kv_heads(model)
    normed = model.qk_norm != "off"
    rotated = model.pos == "rope"
    output = C
    qkv = C + 2 * kv_width
    saved = b * (output + qkv)
    if normed or rotated:
        saved += b * (C + kv_width)  # queries and keys: no longer views of the product qkv
    if rotated:
        saved += b * C  # the output in the order of tokens: rotated queries are in order of heads
    if normed and b != 4:
        saved += 4 * (C + kv_width)  # the norms' inputs in fp32
    return saved


def list_parallelisms(world_size: int, local_size: int, ddp_first: bool = True) -> dict[str, int]:
    """{possible train.parallel: ranks that share a tensor}, in the order that "auto" tries.

    On one node ZeRO-2 comes before DDP unless `ddp_first`: it shares the optimizer's work, but
    sends gradients in each micro-batch, so it is faster if a step has one.

    Args:
        world_size: ranks of the job.
        local_size: ranks on each node.
        ddp_first: prefer DDP.
    """
    names = ["ddp", "hsdp", "zero2", "fsdp"]
    if not ddp_first and world_size <= local_size:
        names = ["zero2", "ddp", "fsdp"]
    shards = {"ddp": 1}
    if world_size > local_size > 1 and world_size % local_size == 0:
        shards["hsdp"] = local_size
    if world_size > 1:
        shards |= {"zero2": world_size, "fsdp": world_size}
    return {name: shards[name] for name in names if name in shards}


def choose_parallelism(
    config: Config, shapes: Shapes, world_size: int, local_size: int, device: torch.device
) -> tuple[str, Memory]:
    """Resolve train.parallel: "auto" becomes the first parallelism that fits the device.

    Returns:
        "ddp", "zero2", "fsdp" or "hsdp", and the estimate of each rank's memory under it.

    Raises:
        RunError: it or train.expert_parallel needs other ranks, or the device's memory is known
            and smaller than the state alone.
    """
    train = config.train
    capacity = distributed.memory_bytes(device)
    accumulates = train.batch_size > train.micro_batch_size * world_size
    possible = list_parallelisms(
        world_size, local_size, ddp_first=device.type != "cuda" or accumulates
    )
    if train.parallel not in ("auto", *possible):
        raise RunError(
            f"train.parallel = {train.parallel} is not possible with {world_size} rank(s), "
            f"{local_size} on this node: set --train.parallel=auto, or one of "
            f"{', '.join(possible)}, or start more ranks with torchrun"
        )
    estimates = {}
    problem = ""
    for parallel, shards in possible.items():
        if train.parallel in ("auto", parallel):
            problem = describe_expert_problem(config, parallel, world_size, local_size)
            if not problem:
                estimate = estimate_memory(config, shapes, parallel, shards, accumulates)
                estimates[parallel] = estimate
    if not estimates:
        raise RunError(problem)
    chosen = select_fitting(estimates, capacity)
    check_state_fits(estimates[chosen], capacity, shapes)
    return chosen, estimates[chosen]


def choose_expert_parallel(
    config: Config, shapes: Shapes, world_size: int, local_size: int, device: torch.device
) -> int:
    """Ranks that share one set of experts; arguments as in `choose_parallelism`.

    With train.parallel = "auto" and no asked number the GPUs of a node share them if each then
    sends at most SHARED_TRAFFIC of the bytes. A line says so.
    """
    asked = count_expert_ranks(config)
    n = local_size
    may_choose = config.train.parallel == "auto" and config.train.expert_parallel == 1
    has_experts = find_spec(config.model.router) is not None
    if device.type != "cuda" or n == 1 or not (may_choose and has_experts):
        return asked
    shared = replace(config, "train", expert_parallel=n)
    if config.model.n_expert % n or describe_expert_problem(shared, "ddp", world_size, local_size):
        return asked
    sent = []
    for planned in (config, shared):
        parallel, memory = choose_parallelism(planned, shapes, world_size, local_size, device)
        sent.append(estimate_traffic(planned, shapes, parallel, world_size, local_size))
    capacity = distributed.memory_bytes(device)
    fits = capacity is None or sum(memory) <= USABLE * capacity
    if not fits or sent[1] > SHARED_TRAFFIC * sent[0]:
        return asked
    distributed.print_once(
        f"train.parallel = auto: the {n} GPUs of a node share the experts (train.expert_parallel): "
        f"each sends about {format_bytes(sent[1])} per step, otherwise {format_bytes(sent[0])}"
    )
    return n


def describe_expert_problem(config: Config, parallel: str, world_size: int, local_size: int) -> str:
    """Say why train.expert_parallel is impossible with `parallel` on these ranks; "" if it is not.

    Arguments as in `choose_parallelism`.
    """
    n = count_expert_ranks(config)
    if n == 1:
        return ""
    on_ranks = f"train.expert_parallel = {n} with {world_size} rank(s), {local_size} on this node"
    if world_size % n:
        return (
            f"{on_ranks}: groups of {n} ranks do not divide the ranks; set "
            f"--train.expert_parallel={gcd(world_size, n)}, or start {n} ranks or a multiple with "
            "torchrun"
        )
    if parallel == "hsdp" and local_size % n:
        return (
            f"{on_ranks}: with train.parallel = hsdp ranks of one node share the experts; set "
            f"--train.expert_parallel={gcd(local_size, n)} or --train.parallel=fsdp"
        )
    shards = list_parallelisms(world_size, local_size)[parallel]
    if parallel != "ddp" and config.model.n_expert % shards:
        return (
            f"{on_ranks}: train.parallel = {parallel} shards experts over {shards} ranks, which "
            f"must divide model.n_expert = {config.model.n_expert}; set --train.parallel=ddp or "
            "--train.expert_parallel=1"
        )
    return ""


def select_fitting(estimates: Mapping[str, Memory], capacity: int | None) -> str:
    """The first key whose memory fits into `capacity` bytes (None: unknown), or the last key."""
    for name, memory in estimates.items():
        if capacity is None or sum(memory) <= USABLE * capacity:
            return name
    return list(estimates)[-1]


def check_state_fits(memory: Memory, capacity: int | None, shapes: Shapes) -> None:
    """Raise RunError if `memory.state` exceeds `capacity` bytes (None: unknown)."""
    if capacity is None or memory.state <= capacity:
        return
    state_per_weight = memory.state / memory.weights
    total = state_per_weight * 4 * sum(prod(shape) for shape in shapes.values())  # of all ranks
    least_gpus = 2 ** ceil(log2(total / (USABLE * capacity)))
    mean = ", the running mean of weights (train.ema_decay)" if memory.ema else ""
    raise RunError(
        f"weights, gradients and optimizer{mean} need {format_bytes(memory.state)} a GPU, this "
        f"one has {format_bytes(capacity)}: set --train.parallel=fsdp on {least_gpus} GPUs or more"
    )


def describe_memory(parallel: str, memory: Memory, capacity: int | None) -> str:
    """One line about `memory` for the start of a run; `capacity` in bytes, None if unknown."""
    sizes = [f"{name} {format_bytes(size)}" for name, size in memory._asdict().items() if size]
    line = f"{parallel}, about {format_bytes(sum(memory))} a rank: {', '.join(sizes)}"
    if capacity is not None and sum(memory) > USABLE * capacity:
        line += (
            f"; the device's {format_bytes(capacity)} may be too little: set a smaller "
            "train.micro_batch_size or train.activation_checkpointing = true"
        )
    return line
