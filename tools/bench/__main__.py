"""How fast it is: alternatives timed in turn within one process, compared by ratios of medians.

    python -m tools.bench step CONFIG [--section.key=value ...]
    python -m tools.bench router CONFIG [--section.key=value ...]
    python -m tools.bench moe [--shape N C H E K] [--dtype float32 ...] [--device cpu]

step     a training step (forward, backward, clipping, AdamW; no auxiliary loss) on one micro-batch
         of random tokens; --peer adds transformers' OLMoE, or nanoGPT's model.py that lies beside
         as nanogpt.py, of the first alternative's shape
router   the router alone, forward and backward, and its share of a training step; all routers
         unless some are named
moe      kernels.expert_mlp against F.grouped_mm, a loop over experts, and one dense MLP of as many
         FLOPs: TFLOP/s, the share of a matmul's rate measured beside it, and the bytes kept for the
         backward pass

A key given several times makes alternatives, of several such keys all combinations; ratios are to
the first:

    python -m tools.bench step config/quickstart.toml --model.router=dense --model.router=kern
    python -m tools.bench step config/quickstart.toml --train.cuda_graph=off --train.cuda_graph=on

--json FILE writes the figures; --profile FILE a trace (chrome://tracing; .gz packs it) of the last
alternative. What raises RuntimeError, as without memory, is skipped with a line, and the exit code
is 1.
"""

import shlex
import sys

from common.command import build_parser, command, run_command
from tools.bench.harness import DTYPES
from tools.bench.moe import bench_moe
from tools.bench.peers import PEERS
from tools.bench.steps import bench_router, bench_step

COMMANDS = {"step": bench_step, "router": bench_router, "moe": bench_moe}


@command
def main(argv: list[str] | None = None) -> int:
    """Run a benchmark."""
    parser = build_parser("tools.bench", __doc__)
    subparsers = parser.add_subparsers(dest="what", required=True)
    for name in COMMANDS:
        subparser = subparsers.add_parser(name)
        if name == "moe":
            subparser.add_argument("--shape", nargs=5, type=int, metavar=("N", "C", "H", "E", "K"))
            subparser.add_argument("--dtype", nargs="+", choices=DTYPES)
            subparser.add_argument(
                "--fullest",
                nargs="+",
                type=float,
                metavar="TIMES",
                help="loads of the fullest expert, in means; 0: about equal loads",
            )
            subparser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
        else:
            subparser.add_argument("config", help="config file; --section.key=value overrides it")
        if name == "step":
            subparser.add_argument("--peer", nargs="+", choices=PEERS, default=[])
        subparser.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
        subparser.add_argument("--json", metavar="FILE", help="for the figures")
        subparser.add_argument("--profile", metavar="FILE", help="for a trace")
    args, overrides = parser.parse_known_args(argv)
    if args.what == "moe" and overrides:
        raise ValueError(f"unknown options {' '.join(overrides)}: moe takes no config keys")
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: expected 1 or more")
    args.command = shlex.join(
        ["python", "-m", "tools.bench", *(sys.argv[1:] if argv is None else argv)]
    )
    return 1 if COMMANDS[args.what](args, overrides).data["skipped"] else 0


if __name__ == "__main__":
    run_command(main)
