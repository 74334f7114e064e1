"""Choose a config for a budget; each of its lines names its rule and the rule's source.

    python -m scripts.plan --budget 2e19 --gpus 8 --write mine.toml

The dial is one number: FLOPs, active parameters or hours. It chooses the largest shape that the
budget trains on 20 tokens per active parameter, and all else follows. Initial sizes and rates are
of one tuned base, carried to the shape by optim.transfer (docs/transfer.md).
"""

import math
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import configure
from common.text import format_bytes
from configure import Config, ConfigError
from configure.check import format_toml
from configure.schema import SECTIONS, Model
from runtime.distributed import GPUS
from runtime.memory import USABLE, Memory, count_parameters, flops_per_token
from runtime.step_time import estimate_mfu

# Layers and width. From 512 channels on 64 to a layer, as nanochat's depth dial has; below 32, so
# that the smallest rungs have several layers. 12 x 768 is the paper's 125M.
SHAPES = [
    (2, 64),
    (3, 96),
    (4, 128),
    (6, 192),
    (8, 256),
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
BYTES_UP_TO = 256  # width: with GPT-2's vocabulary most parameters of a smaller model embed tokens
TOKENS_PER_PARAMETER = 20
# The base: config/quickstart.toml at its best rate (docs/results-tables.md, rates.toml).
BASE_BATCH = 2048  # tokens per step
BASE_TOKENS = 2.05e6
BATCH_EXPONENT = 0.47
MAX_DECAY = 0.1
DECAY_STEPS = 1000  # rate · decay · steps = 3 at the base's rate of 3e-3, as in the paper's run
MAX_WARMUP = 500

PlanMemory = Callable[[Config, int, int], dict[tuple[str, bool], Memory]]


class Line(NamedTuple):
    """A line of a config file."""

    key: str
    value: object
    reason: str


def add_dial(parser: ArgumentParser) -> None:
    """Add the options of the dial to those of scripts.plan."""
    dial = parser.add_mutually_exclusive_group()
    dial.add_argument("--budget", type=float, metavar="FLOPS", help="write a config for it")
    dial.add_argument("--active", metavar="N", help="the same, for active parameters, as 350M")
    dial.add_argument("--hours", type=float, help="the same, for hours on --gpus of --gpu")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the config's file, a new one")


def is_dialled(args: Namespace) -> bool:
    """True if the arguments set the dial."""
    return any(value is not None for value in (args.budget, args.active, args.hours))


def write_config(args: Namespace, plan_memory: PlanMemory) -> str:
    """The text of the config that the dial asks for, written to args.write if that is given.

    Raises:
        ConfigError: no shape is small enough, none of the memory plans fits, or the file exists.
    """
    if args.write and args.write.exists():
        raise ConfigError(f"--write {args.write}: exists; name another file, or remove it")
    layers, width, budget = choose_shape(args)
    model = make_model(layers, width)
    largest_micro_batch = 32
    while True:
        text = format_config(model, budget, args, largest_micro_batch)
        config = load_text(text, args.gpus)
        plans = plan_memory(config, args.gpus, args.gpus_per_node)
        least = min(sum(memory) for memory in plans.values())
        fitting = []
        for (parallel, _), memory in plans.items():
            if sum(memory) <= USABLE * args.memory * 2**30:
                fitting.append(parallel)
        if fitting:
            text = format_config(model, budget, args, largest_micro_batch, fitting[0])
            break
        if config.train.micro_batch_size == 1:
            raise ConfigError(
                f"{layers} layers of width {width} need {format_bytes(least)} on each of "
                f"{args.gpus} GPUs, and one has {args.memory:g} GiB; "
                f"set --gpus {2 * args.gpus} or more, or a smaller budget"
            )
        largest_micro_batch = config.train.micro_batch_size // 2
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    return text


def load_text(text: str, gpus: int) -> Config:
    """The checked config of a TOML text, for `gpus` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "dial.toml")
        file.write_text(text, encoding="utf-8")
        return configure.load(file, world_size=gpus)


def make_model(layers: int, width: int) -> Model:
    """The model of a shape."""
    is_small = width <= BYTES_UP_TO
    head_size = 32 if is_small else 64
    hidden = width // 16 if is_small else width // 2
    return Model(
        n_layer=layers,
        n_head=width // head_size,
        n_embd=width,
        block_size=256 if is_small else 512,
        vocab_size=257 if is_small else 50304,
        router="softmax-renorm",
        n_expert=64,
        top_k=8,
        expert_hidden=hidden,
        pos="rope",
        init_std=0.06,
    )


def choose_shape(args: Namespace) -> tuple[int, int, float]:
    """Layers, width and FLOPs that the dial asks for."""
    if args.active is not None:
        wanted = read_number(args.active)
        sizes = {shape: count_parameters(make_model(*shape))[1] for shape in SHAPES}
        smallest = min(sizes.values())
        if wanted < smallest:
            raise ConfigError(f"--active {args.active}: the smallest rung has {smallest:,}")
        if wanted > 1.5 * max(sizes.values()):
            raise ConfigError(f"--active {args.active}: the largest has {max(sizes.values()):,}")
        shape = min(SHAPES, key=lambda shape: abs(math.log(sizes[shape] / wanted)))
        return *shape, count_least_flops(make_model(*shape))
    name, value = ("--budget", args.budget) if args.hours is None else ("--hours", args.hours)
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} {value:g}: expected a number above 0")
    chosen = None
    for layers, width in SHAPES:
        model = make_model(layers, width)
        flops = value
        if args.hours is not None:
            flops = count_flops_in(args, model)
        if count_least_flops(model) <= flops:
            chosen = (layers, width, flops)
    if chosen is None:
        least = count_least_flops(make_model(*SHAPES[0]))
        raise ConfigError(
            f"{name} {value:g}: it is below the smallest rung, {SHAPES[0][0]} layers of width "
            f"{SHAPES[0][1]}, which needs {1.01 * least:.3g} FLOPs; raise it to that"
        )
    return chosen


def read_number(text: str) -> float:
    """A number with a suffix K, M or B."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1.0)
    digits = text if scale == 1 else text[:-1]
    try:
        number = float(digits) * scale
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"--active {text}: expected a number such as 350M")
    return number


def count_flops_in(args: Namespace, model: Model) -> float:
    """The FLOPs of args.hours, by --mfu or the estimate of runtime/step_time.py."""
    gpu = GPUS[args.gpu]
    mfu = args.mfu
    if mfu is None:
        config = load_text(format_config(model, count_least_flops(model), args), args.gpus)
        mfu = estimate_mfu(config, gpu, args.gpus)
    return args.hours * 3600 * args.gpus * gpu.peak * mfu


def count_least_flops(model: Model) -> float:
    """FLOPs of training a model on TOKENS_PER_PARAMETER."""
    return TOKENS_PER_PARAMETER * count_parameters(model)[1] * flops_per_token(model)


def choose_batch(tokens: float, block_size: int, gpus: int) -> int:
    """Sequences per step: a power of two near the power law, a multiple of `gpus`."""
    batch_tokens = BASE_BATCH * (tokens / BASE_TOKENS) ** BATCH_EXPONENT
    sequences = 2 ** max(0, round(math.log2(batch_tokens / block_size)))
    return -(-sequences // gpus) * gpus


def choose_micro_batch(batch: int, gpus: int, largest: int) -> int:
    """The largest divisor of a rank's part of the batch that is at most `largest`."""
    of_rank = batch // gpus
    return max(size for size in range(1, largest + 1) if of_rank % size == 0)


def format_config(
    model: Model,
    budget: float,
    args: Namespace,
    largest_micro_batch: int = 32,
    parallel: str = "ddp",
) -> str:
    """The TOML text: a line for each key with its rule and source."""
    tokens = budget / flops_per_token(model)
    batch = choose_batch(tokens, model.block_size, args.gpus)
    micro_batch = choose_micro_batch(batch, args.gpus, largest_micro_batch)
    steps = max(1, round(tokens / (batch * model.block_size)))
    total, active = count_parameters(model)
    lines = [*list_model_lines(model), *list_run_lines(model, batch, micro_batch, steps)]
    if parallel != "ddp":
        lines.append(Line("train.parallel", parallel, "the first that fits: docs/scale.md"))
        lines.sort(key=lambda line: list(SECTIONS).index(line.key.split(".")[0]))
    text = [
        f"# {model.n_layer} x {model.n_embd}: {active / 1e6:,.2f} M active of {total / 1e6:,.2f} M "
        f"parameters, {steps * batch * model.block_size / 1e6:,.0f} M tokens, {budget:.3g} FLOPs.",
        "# Written by scripts.plan. Rates are of the base, config/quickstart.toml; optim.transfer",
        "# carries them to this shape (docs/transfer.md). Sources of all rules: docs/choose.md.",
    ]
    section = ""
    for line in lines:
        of_key, _, name = line.key.partition(".")
        if of_key != section:
            section = of_key
            text += ["", f"[{section}]"]
        setting = f"{name} = {format_toml(line.value)}"
        text.append(f"{setting:26}  # {line.reason}")
    return "\n".join(text) + "\n"


def list_model_lines(model: Model) -> Iterator[Line]:
    """Lines of the section [model]."""
    is_small = model.n_embd <= BYTES_UP_TO
    ratio = "half the width: quickstart.toml" if is_small else "4 times the width: the paper's 125M"
    yield Line("model.n_layer", model.n_layer, "largest shape with 20 tokens per active parameter")
    yield Line(
        "model.n_embd", model.n_embd, "ours; 64 channels a layer from 512 on, as in nanochat"
    )
    yield Line("model.n_head", model.n_head, "32 channels a head below 512, then 64: the paper's")
    yield Line("model.n_expert", model.n_expert, "arXiv 2509.25913, table of models")
    yield Line("model.top_k", model.top_k, "the same")
    yield Line("model.expert_hidden", model.expert_hidden, f"top_k * expert_hidden is {ratio}")
    context = "quickstart.toml" if is_small else "arXiv 2509.25913"
    yield Line("model.block_size", model.block_size, context)
    vocabulary = "bytes" if is_small else "GPT-2's tokens"
    yield Line("model.vocab_size", model.vocab_size, f"{vocabulary}; must be data.name's")
    yield Line("model.router", model.router, "ties with kern under a balance loss: docs/results.md")
    yield Line("model.pos", model.pos, "quickstart.toml, of the base")
    yield Line("model.init_std", model.init_std, "of the base; optim.transfer scales it")


def list_run_lines(model: Model, batch: int, micro_batch: int, steps: int) -> Iterator[Line]:
    """Lines of the other sections."""
    is_small = model.n_embd <= BYTES_UP_TO
    yield Line("data.name", "stdlib" if is_small else "fineweb-edu", "name yours")
    yield Line("train.batch_size", batch, "tokens^0.47: arXiv 2410.21676, through quickstart.toml")
    yield Line("train.micro_batch_size", micro_batch, "largest up to 32 that fits: docs/scale.md")
    yield Line(
        "train.max_steps", steps, "the budget; 20 tokens per parameter or more: arXiv 2203.15556"
    )
    if is_small:
        yield Line("train.dtype", "float32", "for a CPU: quickstart.toml")
    yield Line("train.balance_loss_coef", 0.01, "docs/results-tables.md, balance.toml")
    yield Line("optim.lr", 3e-3, "best of three at the base: docs/results-tables.md, rates.toml")
    yield Line("optim.transfer", "mup", "arXiv 2203.03466, 2505.01618; docs/transfer.md")
    yield Line("optim.base_width", 128, "config/quickstart.toml")
    yield Line("optim.base_hidden", 64, "the same")
    yield Line("optim.base_layers", 2, "the same")
    warmup = min(steps // 5, MAX_WARMUP)
    yield Line("optim.warmup_steps", warmup, "a fifth, at most 500: quickstart.toml, 125m.toml")
    decay = float(f"{min(MAX_DECAY, DECAY_STEPS / steps):.3g}")
    yield Line("optim.weight_decay", decay, "lr * decay * steps as in 125m.toml: arXiv 2405.13698")
    interval = max(1, steps // 10)
    yield Line("eval.interval", interval, "ten evaluations")
    yield Line("eval.windows", 512 if is_small else 2048, "the studies', the default")
