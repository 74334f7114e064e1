"""How fast it is: alternatives timed in turn within one process, compared by ratios of medians.

    python -m scripts.bench step config/quickstart.toml [--routers dense softmax kern] [--dtype ...] [--compile off on]
    python -m scripts.bench router config/125m.toml [--routers softmax kern] [--section.key=value ...]
    python -m scripts.bench experts config/125m.toml --model.router=kern [--experts 32 64 128 256]
    python -m scripts.bench moe [--tokens N] [--n-embd C] [--expert-hidden H] [--n-expert E] [--top-k K] [--dtype ...]

step     a training step (forward, backward, clipping, AdamW; no auxiliary loss) on one micro-batch of random tokens, of
         dense, each router, and other implementations: a plain dense GPT as nanoGPT has it, and transformers' OLMoE
         where installed
router   every router alone, forward and backward, and its share of a training step
experts  a step with more and more experts, of which equally many are active
moe      kernels.expert_mlp against F.grouped_mm, a loop over experts, and one dense MLP of as many FLOPs: TFLOP/s, the
         share of a matmul's rate measured beside it, and the bytes kept for the backward pass

--json FILE writes the figures; --profile FILE, of a command that has it, a trace (chrome://tracing; .gz packs it).
For training runs of several routers: python -m scripts.sweep, then python -m scripts.report.
"""

import argparse
import shlex
import sys
from typing import Any

from common.command import build_parser, command, run_command
from router import ROUTERS
from scripts.bench.harness import DTYPES
from scripts.bench.moe import bench_moe
from scripts.bench.peers import PEERS
from scripts.bench.steps import bench_experts, bench_router, bench_step


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
    "--experts": {"nargs": "+", "type": positive, "default": [32, 64, 128, 256], "metavar": "E"},
}
COMMANDS: dict[str, tuple[Any, int, list[str]]] = {  # (function, rounds, options besides --rounds and --json)
    "step": (bench_step, 10, ["config", "--dtype", "--profile", "--routers", "--peers", "--compile"]),
    "router": (bench_router, 20, ["config", "--dtype", "--profile", "--routers"]),
    "experts": (bench_experts, 10, ["config", "--dtype", "--profile", "--experts"]),
    "moe": (bench_moe, 7, ["--dtype", "--profile", "--device", *SIZES]),
}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = build_parser("scripts.bench", __doc__)
    subparsers = parser.add_subparsers(dest="what", required=True)
    for name, (function, rounds, options) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=function.__doc__.splitlines()[0])
        for option in (*options, "--rounds", "--json"):
            subparser.add_argument(option, **OPTIONS[option])
        subparser.set_defaults(rounds=rounds)
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run a benchmark."""
    args, overrides = make_parser().parse_known_args(argv)
    args.command = shlex.join(["python", "-m", "scripts.bench", *(sys.argv[1:] if argv is None else argv)])
    COMMANDS[args.what][0](args, overrides)


if __name__ == "__main__":
    run_command(main)
