"""Print what a run will need: parameters, memory on each GPU, tokens, disk, hours.

    python -m scripts.plan config/1b3.toml --gpus 8 --gpu H100 [--section.key=value ...]
    python -m scripts.plan --budget 2e19 --gpus 8 --write FILE      scripts/dial.py has the rules

Memory of activations, logits and working copies is an estimate (docs/scale.md); the rest is exact.
Hours follow from the parts of a step (runtime/step_time.py), without communication.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m scripts.plan")

import argparse
import sys
from math import gcd

import configure
from common.command import build_parser, command, run_command
from common.text import format_bytes, text_table
from configure import Config, ConfigError
from configure.schema import replace
from runtime.distributed import GPU, GPUS
from runtime.memory import (
    USABLE,
    Memory,
    count_parameters,
    estimate_memory,
    flops_per_token,
    parameter_shapes,
)
from runtime.step_time import estimate_mfu
from scripts.dial import add_dial, is_dialled, plan_memory, read_config, write_config


def estimate_hours(config: Config, gpus: int, gpu: GPU) -> float:
    """Estimate the hours of a run."""
    speed = gpus * gpu.peak * estimate_mfu(config, gpu, gpus)  # FLOP/s
    return count_tokens(config) * flops_per_token(config.model) / speed / 3600


def count_tokens(config: Config) -> int:
    """Count the tokens that a run trains on."""
    return config.train.max_steps * config.train.batch_size * config.model.block_size


def checkpoint_bytes(config: Config) -> int:
    """The bytes of one checkpoint, without its index, buffers and counters: 2% of a tiny one."""
    alone = replace(config, "train", expert_parallel=1)
    return estimate_memory(alone, parameter_shapes(config.model), "ddp", 1).saved


def describe_run(config: Config, args: argparse.Namespace) -> str:
    """The size, length and cost of a run."""
    tokens = count_tokens(config)
    steps = config.train.max_steps
    total, active = count_parameters(config.model)
    gpu = GPUS[args.gpu]
    hours = estimate_hours(config, args.gpus, gpu)
    return f"""\
{config.run.name}: router {config.model.router}, {config.train.dtype}
  parameters       {total / 1e6:,.1f} M in all, {active / 1e6:,.1f} M active
  FLOPs per token  {flops_per_token(config.model) / 1e9:.3f} G (forward and backward)
  tokens           {tokens / 1e9:.2f} B: {steps:,} steps of {tokens // steps:,}; \
{tokens / active:,.0f} per active parameter
  checkpoint       {format_bytes(checkpoint_bytes(config))}, {config.train.keep_checkpoints} kept \
and one being written
  time             {hours:,.2f} h on {args.gpus} x {args.gpu}, {hours * args.gpus:,.2f} GPU hours; \
MFU {estimate_mfu(config, gpu, args.gpus):.2f} (estimated)
"""


def describe_memory_plans(config: Config, args: argparse.Namespace) -> str:
    """The memory of one GPU by parallelism, and the options of the first that fits."""
    plans = plan_memory(config, args.gpus, args.gpus_per_node)
    limit = USABLE * args.memory * 2**30
    columns = {"part": [*Memory._fields, "sum", f"in {args.memory:g} GiB"]}
    fitting = {}  # column: the options
    for (parallel, checkpointing), memory in plans.items():
        name = f"{parallel}, checkpointing" if checkpointing else parallel
        fits = sum(memory) <= limit
        sizes = [format_bytes(size) for size in (*memory, sum(memory))]
        columns[name] = [*sizes, "fits" if fits else "too large"]
        if fits:
            option = " --train.activation_checkpointing=true" if checkpointing else ""
            fitting[name] = f"--train.parallel={parallel}{option}"
    nothing = format_bytes(0)
    rows = []
    for row in zip(*columns.values(), strict=True):
        if set(row[1:]) != {nothing}:
            rows.append(row)
    table = text_table([*columns], rows, important=["part", *fitting])
    remedy = "none fits: more GPUs, a smaller train.micro_batch_size, or GPUs with more memory"
    return (
        f"memory on each of {args.gpus} GPUs, {config.train.micro_batch_size} sequences at a time:"
        f"\n{table}\n{next(iter(fitting.values()), remedy)}"
    )


def load_planned(args: argparse.Namespace, overrides: list[str]) -> Config:
    """The config of the file, or the one that the dial chooses, which is printed.

    Raises:
        ConfigError: neither or both are named, or they are wrong.
    """
    if not is_dialled(args):
        if args.write or not args.config:
            raise ConfigError("name a config file, --budget or --hours")
        config = configure.load(args.config, overrides, world_size=args.gpus or 1)
        if args.gpus is None:
            args.gpus = gcd(8, config.train.batch_size // config.train.micro_batch_size)
        return config
    args.gpus = args.gpus or 8
    given = [text for text in (args.config, *overrides) if text]
    if given:
        raise ConfigError(
            f"{given[0]}: --budget and --hours choose all settings; leave it out, "
            "and override the config that --write wrote"
        )
    text = write_config(args)
    print(text)
    return read_config(text)


@command
def main(argv: list[str]) -> None:
    """Print the plan of a config."""
    parser = build_parser("scripts.plan", __doc__)
    parser.add_argument("config", nargs="?", help="file; --section.key=value overrides it")
    add_dial(parser)
    parser.add_argument(
        "--gpus", type=int, help="in all (default: 8, fewer where a batch has no work for 8)"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--gpu", choices=GPUS, default="H100", help="for its peak FLOP/s and memory (%(default)s)"
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="of one GPU (default: as --gpu has)"
    )
    args, overrides = parser.parse_known_args(argv)
    args.memory = GPUS[args.gpu].memory if args.memory is None else args.memory
    for name in ("gpus", "gpus_per_node", "memory"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected more than 0")
    config = load_planned(args, overrides)
    print(f"{describe_run(config, args)}\n{describe_memory_plans(config, args)}")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
