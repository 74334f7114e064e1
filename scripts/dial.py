"""Choose a config for a budget; each of its lines names its rule and the rule's source.

    python -m scripts.plan --budget 2e19 --gpus 8 --write mine.toml

The dial is one number: FLOPs or hours. It chooses the largest shape that the budget trains on 20
tokens per active parameter, and all else follows. Initial sizes and rates are
of one tuned base, carried to the shape by optim.transfer (docs/transfer.md).
"""

import math
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import exists, write_atomic
from common.text import format_bytes
from configure import Config, ConfigError
from configure.schema import Model, replace
from runtime import RunError
from runtime.distributed import GPUS
from runtime.memory import (
    USABLE,
    Memory,
    count_parameters,
    describe_rank_problem,
    estimate_parallelisms,
    flops_per_token,
    parameter_shapes,
)
from runtime.step_time import estimate_mfu

# Layers and width, by FLOPs. Models of bytes have 32 channels to a layer, so that the smallest have
# several layers; those of GPT-2's tokens 64, as nanochat's depth dial has. Most parameters of a
# smaller one of those would embed tokens. 12 x 768 is the paper's 125M.
SHAPES_OF_BYTES = [
    (2, 64),
    (3, 96),
    (4, 128),
    (5, 160),
    (6, 192),
    (8, 256),
    (10, 320),
    (12, 384),
]
SHAPES_OF_TOKENS = [
    (4, 256),
    (5, 320),
    (6, 384),
    (8, 512),
    (10, 640),
    (12, 768),
    (16, 1024),
    (20, 1280),
    (24, 1536),
    (32, 2048),
    (40, 2560),
    (48, 3072),
    (64, 4096),
]
TOKENS_PER_PARAMETER = 20
BEYOND = 4  # times the tokens of the largest shape are refused; not measured
# The base: config/quickstart.toml at its best rate (docs/results-tables.md, rates.toml).
BASE_BATCH = 2048  # tokens per step
BASE_TOKENS = 2.05e6
BATCH_EXPONENT = 0.47
MAX_DECAY = 0.1
DECAY_STEPS = 1000  # rate · decay · steps = 3 at the base's rate of 3e-3, as in the paper's run
MAX_WARMUP = 500

# Largest micro-batch, and whether activations are recomputed, which costs a third of a step: a pass
# of fewer than 8 sequences leaves experts too few rows (not measured).
PASSES = [
    (32, False),
    (16, False),
    (8, False),
    (32, True),
    (16, True),
    (8, True),
    (4, True),
    (2, True),
    (1, True),
]

# What differs between models of bytes and of GPT-2's tokens.
OF_BYTES = {
    "vocab_size": 257,
    "data": "stdlib",
    "block_size": 256,
    "head_size": 32,
    "hidden_ratio": 1 / 16,
    "dtype": "float32",
    "windows": 512,
}
OF_TOKENS = {
    "vocab_size": 50304,
    "data": "fineweb-edu",
    "block_size": 512,
    "head_size": 64,
    "hidden_ratio": 1 / 2,
    "dtype": "auto",
    "windows": 2048,
}
TEMPLATE = """\
# {model.n_layer} x {model.n_embd}: {active:,.2f} M active of {total:,.2f} M parameters,
# {budget:.3g} FLOPs, {tokens:,.0f} M tokens: {ratio:,.0f} tokens per active parameter.
# Written by scripts.plan. Rates are of the base, config/quickstart.toml, and
# optim.transfer carries them to this shape: docs/transfer.md. Sources of all
# rules: docs/choose.md.

[model]
n_layer = {model.n_layer}  # largest shape with 20 tokens per active parameter
n_embd = {model.n_embd}  # ours: 32 a layer for bytes, else 64, as nanochat
n_head = {model.n_head}  # 32 channels a head for bytes; tokens: the paper's
n_expert = {model.n_expert}  # arXiv 2509.25913, table of models
top_k = {model.top_k}  # the same
expert_hidden = {model.expert_hidden}  # width / 2 / top_k for bytes; tokens: the paper's
block_size = {model.block_size}  # quickstart.toml's for bytes; tokens: the paper's
vocab_size = {model.vocab_size}  # bytes, or GPT-2's tokens; must be data.name's
router = "{model.router}"  # its loads are more even than kern's: docs/choose.md
pos = "{model.pos}"  # quickstart.toml, of the base
init_std = {model.init_std}  # of the base; optim.transfer scales it

[data]
name = "{data}"  # name yours

[train]
batch_size = {batch}  # tokens^0.47, 2410.21676, through quickstart.toml
micro_batch_size = {micro_batch}  # at most 32, as fits, in equal passes
max_steps = {steps}  # the budget; 20 tokens or more: arXiv 2203.15556
dtype = "{dtype}"  # bytes: of quickstart.toml, a CPU; tokens: a GPU
parallel = "{parallel}"  # the first that fits: docs/scale.md{checkpointing}
balance_loss_coef = 0.01  # docs/results-tables.md, balance.toml

[optim]
lr = 0.003  # best of three at gate norm 2: docs/results-tables.md
transfer = "mup"  # arXiv 2203.03466, 2505.01618; docs/transfer.md
base_width = 128  # config/quickstart.toml
base_hidden = 64  # the same
base_layers = 2  # the same
warmup_steps = {warmup}  # a fifth, at most 500: quickstart.toml, 125m.toml
weight_decay = {decay:.3g}  # lr * decay * steps of 125m.toml: 2405.13698

[eval]
interval = {interval}  # ten evaluations
windows = {windows}  # the studies', the default
"""
CHECKPOINTING = "\nactivation_checkpointing = true  # 8 sequences a pass do not fit without"


def add_dial(parser: ArgumentParser) -> None:
    """Add the options of the dial to those of scripts.plan."""
    dial = parser.add_mutually_exclusive_group()
    dial.add_argument("--budget", type=float, metavar="FLOPS", help="write a config for it")
    dial.add_argument("--hours", type=float, help="the same, for hours on --gpus of --gpu")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the config's file, a new one")


def is_dialled(args: Namespace) -> bool:
    """True if the arguments set the dial."""
    return args.budget is not None or args.hours is not None


def plan_memory(config: Config, gpus: int, gpus_per_node: int) -> dict[tuple[str, bool], Memory]:
    """Estimate memory by (parallelism, activation checkpointing); what sends least comes first.

    Raises RunError if train.expert_parallel is impossible on these GPUs.
    """
    shapes = parameter_shapes(config.model)
    local_gpus = min(gpus, gpus_per_node)
    plans = {}
    for checkpointing in (False, True):
        planned = replace(config, "train", activation_checkpointing=checkpointing)
        for parallel, memory in estimate_parallelisms(planned, shapes, gpus, local_gpus).items():
            plans[parallel, checkpointing] = memory
    if not plans:
        raise RunError(describe_rank_problem(config, gpus, local_gpus))
    return plans


def write_config(args: Namespace) -> str:
    """The text of the config that the dial asks for, written to args.write if that is given.

    Raises:
        ConfigError: no shape is small enough, none of the memory plans fits, or the file exists.
    """
    if args.write and exists(args.write):
        raise ConfigError(f"--write {args.write}: exists; name another file, or remove it")
    model, budget = choose_shape(args)
    sequences = count_sequences(model, budget)
    if args.gpus > sequences:
        raise ConfigError(
            f"--gpus {args.gpus}: a step of this budget has {sequences} sequences "
            f"(tokens^{BATCH_EXPONENT}); set --gpus {sequences} or a larger budget"
        )
    least = math.inf
    for largest, checkpointing in PASSES:
        text = format_config(model, budget, args.gpus, largest)
        plans = plan_memory(read_config(text), args.gpus, args.gpus_per_node)
        least = min(least, *(sum(memory) for memory in plans.values()))
        for (parallel, recomputes), memory in plans.items():
            if recomputes == checkpointing and sum(memory) <= USABLE * args.memory * 2**30:
                text = format_config(model, budget, args.gpus, largest, parallel, checkpointing)
                if args.write:
                    write_atomic(args.write, text)
                return text
    raise ConfigError(
        f"{model.n_layer} layers of width {model.n_embd} need {format_bytes(least)} on each of "
        f"{args.gpus} GPUs, and one has {args.memory:g} GiB; "
        f"set --gpus {2 * args.gpus} or more, or a smaller budget"
    )


def read_config(text: str) -> Config:
    """The config of a TOML text that `format_config` wrote."""
    return replace(Config.model_validate(tomllib.loads(text)), "run", name="plan")


def list_models() -> list[Model]:
    """The models of all shapes, by the FLOPs that they need."""
    models = [make_model(*shape, OF_BYTES) for shape in SHAPES_OF_BYTES]
    return models + [make_model(*shape, OF_TOKENS) for shape in SHAPES_OF_TOKENS]


def make_model(layers: int, width: int, kind: Mapping[str, Any]) -> Model:
    """The model of a shape, of bytes or of tokens."""
    return Model(
        n_layer=layers,
        n_head=width // kind["head_size"],
        n_embd=width,
        block_size=kind["block_size"],
        vocab_size=kind["vocab_size"],
        router="softmax-renorm",
        n_expert=64,
        top_k=8,
        expert_hidden=int(width * kind["hidden_ratio"]),
        pos="rope",
        init_std=0.06,
    )


def choose_shape(args: Namespace) -> tuple[Model, float]:
    """The model and the FLOPs that the dial asks for. Raises ConfigError."""
    models = list_models()
    name, value, unit = "--budget", args.budget, "FLOPs"
    if args.hours is not None:
        name, value, unit = "--hours", args.hours, "hours"
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} {value:g}: expected a number above 0")
    least = [count_least_flops(model) for model in models]
    given = [value if unit == "FLOPs" else count_flops_in(args, model) for model in models]
    possible = [i for i in range(len(models)) if least[i] <= given[i]]
    model = models[max(possible, default=0)]
    flops = given[max(possible, default=0)]
    rung = f"{model.n_layer} layers of width {model.n_embd}"
    if not possible:
        raise ConfigError(
            f"{name} {value:g}: it is below the smallest rung, {rung}, which needs "
            f"{1.01 * least[0] / flops * value:.3g} {unit}; raise it to that"
        )
    most = BEYOND * least[-1]
    if flops > most:
        raise ConfigError(
            f"{name} {value:g}: it is beyond the largest rung, {rung}, which takes up to "
            f"{0.99 * most / flops * value:.3g} {unit}; lower it to that"
        )
    return model, flops


def count_flops_in(args: Namespace, model: Model) -> float:
    """The FLOPs of args.hours, by the estimate of runtime/step_time.py.

    It depends on the batch, and the batch on the FLOPs: so it is made a second time.
    """
    gpu = GPUS[args.gpu]
    most = args.hours * 3600 * args.gpus * gpu.peak
    flops = count_least_flops(model)
    for _ in range(2):
        config = read_config(format_config(model, flops, args.gpus))
        flops = most * estimate_mfu(config, gpu, args.gpus)
    return flops


def count_least_flops(model: Model) -> float:
    """FLOPs of training a model on TOKENS_PER_PARAMETER."""
    return TOKENS_PER_PARAMETER * count_parameters(model)[1] * flops_per_token(model)


def count_sequences(model: Model, budget: float) -> int:
    """Sequences per step by the power law, rounded to a power of two."""
    tokens = budget / flops_per_token(model)
    batch_tokens = BASE_BATCH * (tokens / BASE_TOKENS) ** BATCH_EXPONENT
    power = round(math.log2(batch_tokens / model.block_size))
    return 2 ** min(max(0, power), 20)  # of what has more the budget is refused


def divide_batch(sequences: int, gpus: int, largest: int) -> tuple[int, int]:
    """The batch nearest to `sequences` that every GPU takes in equal passes, and the micro-batch.

    The micro-batch is at most `largest`.
    """
    passes = math.ceil(sequences / gpus / largest)
    micro_batch = max(1, round(sequences / gpus / passes))
    return gpus * passes * micro_batch, micro_batch


def format_config(
    model: Model,
    budget: float,
    gpus: int,
    largest_micro_batch: int = 32,
    parallel: str = "ddp",
    checkpointing: bool = False,
) -> str:
    """The TOML text: a line for each key with its rule and source."""
    sequences = count_sequences(model, budget)
    batch, micro_batch = divide_batch(sequences, gpus, largest_micro_batch)
    tokens_per_step = batch * model.block_size
    steps = max(1, round(budget / flops_per_token(model) / tokens_per_step))
    total, active = count_parameters(model)
    text = TEMPLATE.format(
        model=model,
        budget=budget,
        batch=batch,
        micro_batch=micro_batch,
        steps=steps,
        parallel=parallel,
        checkpointing=CHECKPOINTING if checkpointing else "",
        total=total / 1e6,
        active=active / 1e6,
        tokens=steps * tokens_per_step / 1e6,
        ratio=steps * tokens_per_step / active,
        warmup=min(steps // 5, MAX_WARMUP),
        decay=min(MAX_DECAY, DECAY_STEPS / steps),
        interval=max(1, steps // 10),
        **(OF_BYTES if model.vocab_size == OF_BYTES["vocab_size"] else OF_TOKENS),
    )
    return align_reasons(text)


def align_reasons(text: str) -> str:
    """Put the comments behind settings in one column."""
    lines = []
    for line in text.splitlines():
        setting, mark, reason = line.partition("  # ")
        lines.append(f"{setting:26}{mark}{reason}" if mark else line)
    return "\n".join(lines) + "\n"
