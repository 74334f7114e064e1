"""What a run will need, before it is started: parameters, memory on each GPU, tokens, disk, hours.

    python -m scripts.plan config/1b3.toml --gpus 8 --memory 80 [--section.key=value ...]

Memory of activations, logits and working copies is an estimate (docs/scale.md); the rest is exact. Hours follow from
--mfu: a number, or the folder of a run that measured it.
"""

import argparse
import statistics
import sys
from pathlib import Path

import configure
from model import count_parameters, flops_per_token, parameter_shapes
from runtime import memory
from runtime.distributed import PEAK_FLOPS
from runtime.memory import format_bytes
from runtime.metrics import read


def plans(config, gpus, gpus_per_node):
    """{"ddp", "ddp, checkpointing", ...: Memory} of one of `gpus`."""
    shapes, dtype = parameter_shapes(config.model), config.train.dtype.replace("auto", "bfloat16")
    return {
        parallel + ", checkpointing" * checkpointing: memory.estimate_memory(
            shapes, config.model, config.train.micro_batch_size, dtype, parallel, n, checkpointing
        )
        for parallel, n in memory.list_parallelisms(gpus, min(gpus, gpus_per_node)).items()
        for checkpointing in (False, True)
    }


def hours(config, gpus, peak, mfu):
    """Of the whole run at `mfu` of `peak` FLOP/s a GPU."""
    return tokens(config) * flops_per_token(config.model) / (gpus * peak * mfu) / 3600


def tokens(config):
    return config.train.max_steps * config.train.batch_size * config.model.block_size


def measured_mfu(folder):
    """Median perf/mfu of a run. Raises ConfigError if it has none."""
    values = [line["perf/mfu"] for line in read(Path(folder, "metrics.jsonl")) if "perf/mfu" in line]
    if not values:
        raise configure.ConfigError(f"{folder} has no perf/mfu in its metrics.jsonl: name another run, or a number")
    return statistics.median(values)


def utilisation(text):
    """Of --mfu: a number in (0, 1], or a run's folder. Raises ConfigError."""
    try:
        mfu = float(text)
    except ValueError:
        return measured_mfu(text)
    if not 0 < mfu <= 1:
        raise configure.ConfigError(f"--mfu {text}: expected a number above 0 and at most 1")
    return mfu


def report(config, args):
    peak = PEAK_FLOPS[args.gpu]
    mfu = utilisation(args.mfu)
    total, active = count_parameters(config.model)
    count = tokens(config)
    checkpoint = 12 * total
    time = hours(config, args.gpus, peak, mfu)
    yield f"{config.run.name}: router {config.model.router}, {config.train.dtype}"
    yield f"  parameters       {total / 1e6:,.1f} M in all, {active / 1e6:,.1f} M active"
    yield f"  FLOPs a token    {flops_per_token(config.model) / 1e9:.3f} G (forward and backward)"
    steps = config.train.max_steps
    yield f"  tokens           {count / 1e9:.2f} B: {steps:,} steps of {count // steps:,}"
    yield f"  a checkpoint     {format_bytes(checkpoint)}, {config.train.keep_checkpoints} kept and one being written"
    gpus = f"{args.gpus} x {args.gpu} at an MFU of {mfu:.2f}"
    yield f"  time             {time:,.1f} h on {gpus}, {time * args.gpus:,.0f} GPU hours"
    here = min(args.gpus, args.gpus_per_node)
    yield f"  host memory      {format_bytes(4 * total * here)} a node at the start: {here} ranks make the model whole"
    yield ""
    yield f"memory of each of {args.gpus} GPUs, {config.train.micro_batch_size} sequences at a time:"
    columns = plans(config, args.gpus, args.gpus_per_node)
    width = max(map(len, columns)) + 2
    yield " " * 14 + "".join(f"{name:>{width}}" for name in columns)
    for part in memory.Memory._fields:
        yield f"  {part:12}" + "".join(f"{format_bytes(getattr(plan, part)):>{width}}" for plan in columns.values())
    yield f"  {'sum':12}" + "".join(f"{format_bytes(sum(plan)):>{width}}" for plan in columns.values())
    capacity = args.memory * 2**30
    verdicts = ["fits" if sum(plan) <= memory.USABLE * capacity else "too large" for plan in columns.values()]
    yield f"  {f'in {args.memory:g} GiB':12}" + "".join(f"{verdict:>{width}}" for verdict in verdicts)
    if "fits" in verdicts:
        chosen = list(columns)[verdicts.index("fits")]
        how, *checkpointing = chosen.split(", ")
        yield f"--train.parallel={how}" + " --train.activation_checkpointing=true" * bool(checkpointing)
    else:
        yield "none fits: more GPUs, a smaller train.micro_batch_size, or GPUs with more memory"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="config file; --section.key=value overrides it")
    parser.add_argument("--gpus", type=int, default=8, help="in all (default: %(default)s)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--memory", type=float, default=80, metavar="GIB", help="of one GPU (default: %(default)s)")
    parser.add_argument("--gpu", choices=PEAK_FLOPS, default="H100", help="whose peak counts (default: %(default)s)")
    parser.add_argument(
        "--mfu", default="0.4", metavar="MFU", help="a number, or a run's folder (default: %(default)s)"
    )
    args, overrides = parser.parse_known_args(argv)
    try:
        for name in ("gpus", "gpus_per_node", "memory"):
            if getattr(args, name) <= 0:
                raise configure.ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected more than 0")
        config = configure.load(args.config, overrides, world_size=args.gpus)
        for line in report(config, args):
            print(line)
    except (configure.ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
