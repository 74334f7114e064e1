"""How fast it is: alternatives timed in turn within one process, compared by ratios of medians.

    python -m scripts.bench moe [--tokens N] [--n-embd C] [--expert-hidden H] [--n-expert E] [--top-k K] [--dtype ...]
    python -m scripts.bench router config/125m.toml [--routers softmax kern] [--section.key=value ...]
    python -m scripts.bench step config/quickstart.toml [--routers dense softmax kern] [--dtype ...] [--compile off on]
    python -m scripts.bench experts config/125m.toml --model.router=kern [--experts 32 64 128 256]
    python -m scripts.bench length config/125m.toml [--routers dense kern] [--lengths 512 1024 2048]
    python -m scripts.bench tune [--kernels weight_grad] [--tokens N ...]
    python -m scripts.bench data config/125m.toml [--sets 1 5]
    python -m scripts.bench limits
    python -m scripts.bench budget config/125m.toml [--routers dense kern] [--section.key=value ...]
    python -m scripts.bench ranks config/125m.toml [--section.key=value ...]

moe      kernels.expert_mlp against F.grouped_mm, a loop over experts, a padded bmm, and one dense MLP of as many FLOPs;
         on a GPU also ScatterMoE, SonicMoE, QuACK and Liger where installed. TFLOP/s, the share of a matmul's rate
         measured beside it, and the bytes kept for the backward pass
router   every router alone, forward and backward, and its share of a training step
step     a training step (forward, backward, clipping, AdamW; no auxiliary loss) on one micro-batch of random tokens, of
         dense, each router, and what one would pick instead: a plain dense GPT as nanoGPT has it, and transformers'
         OLMoE and Mixtral where installed
experts  a step with more and more experts, of which equally many are active
length   a step at several context lengths, with equally many tokens
tune     tiles of every Triton kernel on this GPU; prints lines for kernels/triton_experts.py
data     the loader: tokens/s from one set and from mixtures of as many tokens, and how much memory the process gains
limits   the rates that `budget` assumes: L2 to multiprocessors, memory, attention by flash and by cuDNN
budget   without a GPU: launches and bytes of a step, and a model's milliseconds by part on an H100 and an H200, now and
         with changes not made yet; never held against a GPU, good to about 20%
ranks    without a GPU: what each of 8 GPUs moves and sends in a step under DDP, with a sharded optimizer, ZeRO-2, FSDP2

--json FILE writes the figures; --profile FILE, of a command that has it, a trace (chrome://tracing; .gz packs it).
For training runs of several routers: python -m scripts.sweep, then python -m scripts.report.
"""

import argparse
import sys
from typing import Any

import configure
from common.command import run_command
from router import ROUTERS
from runtime import RunError
from scripts.bench.budget import bench_budget
from scripts.bench.data import bench_data
from scripts.bench.harness import DTYPES
from scripts.bench.limits import bench_limits
from scripts.bench.moe import KERNELS, bench_moe, bench_tune
from scripts.bench.peers import PEERS
from scripts.bench.ranks import bench_ranks
from scripts.bench.steps import bench_experts, bench_length, bench_router, bench_step


def positive(text: str) -> int:
    """An argument that must be a whole number of at least 1. Raises ValueError, which argparse reports."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


SIZES = ("--tokens", "--n-embd", "--expert-hidden", "--n-expert", "--top-k")
OPTIONS: dict[str, dict[str, Any]] = {
    "config": {"help": "config file; --section.key=value overrides it"},
    "--rounds": {"type": positive, "help": "(default: %(default)s)"},
    "--json": {"metavar": "FILE", "help": "for the figures"},
    "--profile": {"metavar": "FILE", "help": "for a trace"},
    "--dtype": {"nargs": "+", "choices": DTYPES, "help": "(default: the config's or the device's)"},
    "--device": {"choices": ("auto", "cuda", "cpu"), "default": "auto", "help": "(default: %(default)s)"},
    **{size: {"type": positive, "metavar": "N", "help": "(default: the device's)"} for size in SIZES},
    "--routers": {"nargs": "+", "choices": ROUTERS, "default": list(ROUTERS), "metavar": "ROUTER"},
    "--peers": {"nargs": "*", "choices": PEERS, "default": list(PEERS), "metavar": "PEER", "help": "none: off"},
    "--compile": {"nargs": "+", "choices": ("off", "on"), "help": "(default: the config's)"},
    "--kernels": {"nargs": "+", "choices": KERNELS, "default": list(KERNELS), "help": "(default: all)"},
    "--experts": {"nargs": "+", "type": positive, "default": [32, 64, 128, 256], "metavar": "E"},
    "--sets": {"nargs": "+", "type": positive, "default": [1, 5], "metavar": "S", "help": "(default: %(default)s)"},
    "--lengths": {"nargs": "+", "type": positive, "default": [512, 1024, 2048], "metavar": "T"},
}
COMMANDS: dict[
    str, tuple[Any, int, list[str]]
] = {  # name: (function, rounds; 0: not timed; options besides --rounds and --json)
    "moe": (bench_moe, 7, ["--dtype", "--profile", "--device", *SIZES]),
    "router": (bench_router, 20, ["config", "--dtype", "--profile", "--routers", "--compile"]),
    "step": (bench_step, 10, ["config", "--dtype", "--profile", "--routers", "--peers", "--compile"]),
    "experts": (bench_experts, 10, ["config", "--dtype", "--profile", "--experts"]),
    "length": (bench_length, 10, ["config", "--dtype", "--profile", "--routers", "--lengths"]),
    "tune": (bench_tune, 10, ["--dtype", "--device", "--kernels", *SIZES]),
    "data": (bench_data, 20, ["config", "--sets"]),
    "limits": (bench_limits, 10, ["--dtype", "--device"]),
    "budget": (bench_budget, 0, ["config", "--routers"]),
    "ranks": (bench_ranks, 0, ["config"]),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for name, (function, rounds, options) in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__.splitlines()[0])
        for option in (*options, *["--rounds"] * (rounds > 0), "--json"):
            command.add_argument(option, **OPTIONS[option])
        command.set_defaults(rounds=rounds)
    commands.choices["length"].set_defaults(routers=["dense", "kern"])
    commands.choices["budget"].set_defaults(routers=["dense", "softmax", "kern"])
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; returns the exit code."""
    args, overrides = build_parser().parse_known_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    try:
        COMMANDS[args.what][0](args, overrides)
    except (configure.ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_command(main)
