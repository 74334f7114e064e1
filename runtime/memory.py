"""Parameters and FLOPs of a model, and the GPU memory of a training step, before any is allocated.

Weights, gradients and optimizer state are exact. Activations, logits and working copies are counted
from what autograd saves for the backward pass; docs/scale.md has the terms and the measurements
they were compared with.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from attention import kv_heads
from common.text import format_bytes
from configure import Config
from configure.schema import Model, replace
from kernels.cross_entropy import chunk_rows
from model import GPT
from router import find_spec
from runtime import RunError, distributed
from runtime.optimizers import is_for_muon
from runtime.parallel import holds_weights

# Fraction of a device's memory. CUDA's context, libraries and fragmentation use the remainder; not
# measured.
USABLE = 0.92
# Bytes per element of a copy in autocast's compute type; auto is float16, as on any GPU.
CAST_BYTES = {"float32": 0, "float16": 2, "bfloat16": 2, "auto": 2}

Shapes = Mapping[str, Sequence[int]]  # {name: shape} of a model's parameters


# ---- parameters and arithmetic
class SkipInit(TorchFunctionMode):
    """Within it torch.nn.init draws nothing: on the meta device that imports torch._dynamo."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        return kwargs["tensor"] if is_init else func(*args, **kwargs)


def build_one_block(config: Model) -> GPT:
    """A GPT without values that has one block.

    Blocks differ in shape only by the table of a hash layer. 1,024 blocks last seconds to build,
    their hash tables minutes (2 cores, 2026-11-27).
    """
    with torch.device("meta"), SkipInit():
        return GPT(config.model_copy(update={"n_layer": 1}))


@lru_cache(maxsize=1)  # a run asks for those of its config three times
def parameter_shapes(config: Model) -> Mapping[str, tuple[int, ...]]:
    """Shape of each parameter of GPT(config) by name, without allocating them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, p in build_one_block(config).named_parameters():
        layers = config.n_layer if name.startswith("blocks.0.") else 1
        for layer in range(layers):
            shapes[name.replace("blocks.0.", f"blocks.{layer}.")] = tuple(p.shape)
    return shapes


def count_parameters(config: Model) -> tuple[int, int]:
    """Count (total, active) parameters; active ones include K of E experts.

    A tied embedding counts once.
    """
    shapes = parameter_shapes(config)
    total = sum(prod(shape) for shape in shapes.values())
    return total, count_active(config, shapes)


def count_active(config: Model, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Parameters among `shapes` that act on a token: all, but K of E experts."""
    active = 0
    for name, shape in shapes.items():
        size = prod(shape)
        if ".experts." in name:
            size = size // config.n_expert * config.top_k
        active += size
    return active


def flops_per_token(config: Model) -> int:
    """Floating-point operations of one training step per token.

    6 per active matrix weight (2 forward, 4 backward), including the LM head but not embedding
    look-ups, and 12·L·T·C for attention, without halving it for causality.

    Source: PaLM (arXiv 2204.02311), App. B.
    """
    matrices = {}
    for name, shape in parameter_shapes(config).items():
        if name.startswith("blocks.") and len(shape) > 1:
            matrices[name] = shape
    weights = count_active(config, matrices) + config.vocab_size * config.n_embd
    return 6 * weights + 12 * config.n_layer * config.block_size * config.n_embd


# ---- memory
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

    @property
    def saved(self) -> int:
        """Bytes that a checkpoint holds."""
        return self.weights + self.optimizer + self.ema


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
        size = ceil(prod(shape[:1]) / parts) * prod(shape[1:])
        by_muon = is_for_muon(config.optim, name, len(shape))
        parameters += size
        moments += size if by_muon else 2 * size
    tokens = config.train.micro_batch_size * model.block_size
    hold = holds_weights(parallel, accumulates)
    copies = copied_bytes(shapes, model.n_layer, dtype, parallel, checkpointing, hold)

    of_block = activation_bytes(model, tokens, dtype, travels=n > 1)
    activations = model.n_layer * of_block
    if checkpointing:
        block_inputs = model.n_layer * 4 * tokens * model.n_embd  # fp32
        activations = block_inputs + of_block
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


def copied_bytes(
    shapes: Shapes, n_layer: int, dtype: str, parallel: str, checkpointing: bool, hold: bool
) -> int:
    """Bytes of `Memory.copies`; arguments as in `estimate_memory`, `hold` as `holds_weights`."""
    mlp = 0  # parameters of a block's MLP
    other = 0  # of a block outside its MLP
    outside = 0
    for name, shape in shapes.items():
        if not name.startswith("blocks."):
            outside += prod(shape)
        elif name.startswith("blocks.0.mlp."):
            mlp += prod(shape)
        elif name.startswith("blocks.0."):
            other += prod(shape)
    n_cast = 1 if checkpointing else n_layer  # blocks whose casts autograd keeps
    cast_bytes = CAST_BYTES[dtype]
    casts = cast_bytes * (outside + n_cast * other)
    if parallel == "ddp":
        return casts + cast_bytes * n_cast * mlp
    # The buffer that a block is gathered in, its gradients, and gradients that are reduced in fp32.
    # Parameters outside of blocks stay gathered.
    gathered_bytes = cast_bytes or 4
    arriving = (2 * gathered_bytes + 4) * mlp + 3 * 4 * other + 2 * 4 * outside
    blocks = n_layer * (gathered_bytes * mlp + 4 * other)
    if not hold:
        blocks = 2 * (gathered_bytes * mlp + 4 * other)  # FSDP2 holds two
    return casts + arriving + blocks


def logits_bytes(model: Model, tokens: int, dtype: str) -> int:
    """Bytes of the LM head and its loss, except its weight and input (kernels/cross_entropy.py)."""
    b = CAST_BYTES[dtype] or 4
    V = model.vocab_size
    C = model.n_embd
    chunk = chunk_rows(tokens, V, b) * V * b
    # The weight's gradient. When the chunks are freed, a copy times the loss's gradient is made.
    gradient = 4 * V * C
    return b * tokens * C + gradient + max(chunk, gradient)


def activation_bytes(model: Model, tokens: int, dtype: str, travels: bool = False) -> int:
    """Bytes that autograd saves of one block for `tokens` tokens.

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
    if model.router == "dense":
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


def list_parallelisms(world_size: int, local_size: int) -> dict[str, int]:
    """{possible train.parallel: ranks that share a tensor}; what sends least is first.

    Args:
        world_size: ranks of the job.
        local_size: ranks on each node.
    """
    shards = {"ddp": 1}
    if world_size > local_size > 1 and world_size % local_size == 0:
        shards["hsdp"] = local_size
    if world_size > 1:
        shards |= {"zero2": world_size, "fsdp": world_size}
    return shards


def describe_rank_problem(config: Config, world_size: int, local_size: int) -> str:
    """Say why train.parallel or train.expert_parallel is impossible on these ranks, else ""."""
    parallel = config.train.parallel
    possible = list_parallelisms(world_size, local_size)
    if parallel not in possible:
        return (
            f"train.parallel = {parallel} is not possible with {world_size} rank(s), {local_size} "
            f"on this node: set --train.parallel={' or '.join(possible)}, or start more "
            "ranks with torchrun"
        )
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
    shards = possible[parallel]
    if parallel != "ddp" and config.model.n_expert % shards:
        return (
            f"{on_ranks}: train.parallel = {parallel} shards experts over {shards} ranks, which "
            f"must divide model.n_expert = {config.model.n_expert}; set --train.parallel=ddp or "
            "--train.expert_parallel=1"
        )
    return ""


def estimate_parallelisms(
    config: Config, shapes: Shapes, world_size: int, local_size: int
) -> dict[str, Memory]:
    """{train.parallel: memory of one rank} for each one that these ranks allow."""
    accumulates = config.train.batch_size > config.train.micro_batch_size * world_size
    estimates = {}
    for parallel, shards in list_parallelisms(world_size, local_size).items():
        planned = replace(config, "train", parallel=parallel)
        if not describe_rank_problem(planned, world_size, local_size):
            estimates[parallel] = estimate_memory(config, shapes, parallel, shards, accumulates)
    return estimates


def plan_memory(config: Config, device: torch.device) -> Memory:
    """Estimate the memory of each rank of this job.

    Raises RunError if train.parallel or train.expert_parallel needs other ranks, or if the state
    alone is larger than the memory of `device` or of its host.
    """
    ranks = (distributed.world_size(), distributed.local_size())
    shapes = parameter_shapes(config.model)
    estimates = estimate_parallelisms(config, shapes, *ranks)
    problem = describe_rank_problem(config, *ranks)
    if problem:
        raise RunError(problem)
    capacity = distributed.memory_bytes(device)
    if device.type == "cuda" and capacity is not None:
        check_state_fits(config, estimates, capacity)
    memory = estimates[config.train.parallel]
    check_host(config, memory, device)
    return memory


def check_host(config: Config, memory: Memory, device: torch.device) -> None:
    """Raise RunError if the host cannot hold what a run keeps there.

    A checkpoint is written from a copy of the state, of all ranks if each has a part of it, else of
    one. On a CPU the state itself is on the host, too.
    """
    n_rank = distributed.local_size()
    is_shared = config.train.parallel != "ddp" or count_expert_ranks(config) > 1
    need = memory.saved * (n_rank if is_shared else 1)
    purpose = "a checkpoint's copy of its state"
    if device.type == "cpu":
        need += n_rank * memory.state
        purpose = "its state and a checkpoint's copy of it"
    smaller = "a smaller model (model.n_layer, model.n_embd, model.n_expert) or "
    check_host_memory(config.run.name, purpose, need, smaller)


def check_host_memory(name: str | Path, purpose: str, need: int, instead: str = "") -> None:
    """Raise RunError if the host has less memory than `need` bytes, for the `purpose` of `name`."""
    capacity = distributed.host_memory_bytes()
    if capacity is not None and need > capacity:
        raise RunError(
            f"{name}: {format_bytes(need)} of memory are needed for {purpose}, and this host (or "
            f"its container) has {format_bytes(capacity)}: use {instead}a machine or container "
            "with more"
        )


def check_state_fits(config: Config, estimates: Mapping[str, Memory], capacity: int) -> None:
    """Raise RunError if the state of train.parallel exceeds `capacity` bytes; it names what fits.

    Args:
        config: the run.
        estimates: memory of a rank by each train.parallel that is possible.
        capacity: bytes of a device.
    """
    memory = estimates[config.train.parallel]
    if memory.state <= capacity:
        return
    remedy = "--train.parallel=fsdp on more GPUs (python -m scripts.plan FILE --gpus=N)"
    for name, other in estimates.items():
        if sum(other) <= USABLE * capacity:
            remedy = f"--train.parallel={name}, which needs {format_bytes(sum(other))}"
            break
    mean = ", the running mean of weights (train.ema_decay)" if memory.ema else ""
    raise RunError(
        f"train.parallel = {config.train.parallel}: weights, gradients and optimizer{mean} need "
        f"{format_bytes(memory.state)} a GPU, this one has {format_bytes(capacity)}: set {remedy}"
    )


def describe_memory(parallel: str, memory: Memory, capacity: int | None) -> str:
    """One line about `memory` for the start of a run; `capacity` in bytes, None if unknown."""
    largest = max(memory._fields, key=lambda name: getattr(memory, name))
    most = f"{largest} {format_bytes(max(memory))}"  # scripts.plan lists them all
    line = f"{parallel}, about {format_bytes(sum(memory))} a rank, {most} of it"
    if capacity is not None and sum(memory) > USABLE * capacity:
        line += (
            f"; the {format_bytes(capacity)} there are may be too little: set a smaller "
            "train.micro_batch_size or train.activation_checkpointing = true"
        )
    return line
