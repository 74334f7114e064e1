"""How fast it is: alternatives timed in turns within one process, compared by ratios of medians.

    python -m scripts.bench moe [--tokens N] [--n-embd C] [--expert-hidden H] [--n-expert E] [--top-k K] [--dtype ...]
    python -m scripts.bench router config/125m.toml [--routers softmax kern] [--section.key=value ...]
    python -m scripts.bench step config/quickstart.toml [--routers dense softmax kern] [--dtype ...] [--compile off on]
    python -m scripts.bench experts config/125m.toml --model.router=kern [--experts 32 64 128 256]
    python -m scripts.bench length config/125m.toml [--routers dense kern] [--lengths 512 1024 2048]
    python -m scripts.bench tune
    python -m scripts.bench data [FILES]
    python -m scripts.bench scaling config/quickstart.toml --model.router=kern [--ranks 1 2]
    python -m scripts.bench eval [runs/NAME] --tasks-dir FOLDER [--limit 200] [--bpe-ranks FILE]
    python -m scripts.bench train config/125m.toml --seconds 560 --folder runs/race --data.name=NAME [--routers ...]
    python -m scripts.bench save config/125m.toml --model.n_layer=2 --train.micro_batch_size=1 --train.dtype=auto

`moe` times `kernels.expert_mlp` against F.grouped_mm, a loop over experts, a padded bmm, and one dense MLP of as many
FLOPs: TFLOP/s, the share of a matmul's rate measured beside it, and the bytes kept for the backward pass.

`router` times every router alone, forward and backward, and says what share of a training step that is.

`step` times whole training steps (forward, backward, clipping, AdamW; no auxiliary loss) of one micro-batch of random
tokens, for dense and each router: tokens/s, model FLOPs utilisation, peak memory. So it does, in the same shape, for
what one would pick instead: a plain dense GPT as nanoGPT has it, and transformers' OLMoE and Mixtral where installed.

`experts` times steps at more and more experts of which equally many are active, `length` at several context lengths
with equally many tokens a step.

`tune` times some tiles of every Triton kernel on the GPU at hand and prints lines for kernels/triton_experts.py.

These six take --json FILE for the figures and --profile FILE for a trace (chrome://tracing; .gz to pack it) and the ten
largest kernels. Where the hardware is that of a stated goal, they print it and whether it is met.

`data` times how fast text becomes GPT-2 tokens and tokens become batches: tiktoken alone on text in memory, a worker's
whole task (decode, parse, choose the split, tokenize) on the same documents, a whole preparation from file to file, and
the loader on the set that comes out.

`scaling` runs train.py itself on each number of ranks, with one micro-batch of the config's size a rank and step: then
averaging gradients weighs most. It prints tokens/s, and as efficiency tokens/s a rank over those of the first.

`eval` scores the paper's tasks by eval.downstream and by lm-evaluation-harness' own client: items/s, and whether their
log-likelihoods and answers agree. The model is a run, exported, or a random GPT-2. It needs requirements-eval.txt and
accelerate.

`train` is no timing but training: the same run with each router, one after the other, as many steps as fit into
--seconds, equal windows and seed; final losses, their differences with intervals over windows, tokens/s.

`save` times training steps while a checkpoint is being written against steps while none is, and the pause that training
makes for the copy.
"""

import argparse
import sys

import configure
from data import DataError
from router import ROUTERS
from runtime import RunError
from scripts.bench.data import bench_data
from scripts.bench.evaluation import bench_eval
from scripts.bench.experts import bench_moe, bench_tune
from scripts.bench.peers import PEERS
from scripts.bench.runs import bench_save, bench_scaling
from scripts.bench.step import bench_experts, bench_length, bench_router, bench_step
from scripts.bench.tools import DTYPES
from scripts.bench.train import bench_train

COMMANDS = {  # name: (function, rounds, help)
    "moe": (bench_moe, 7, "the experts' kernels against what one would write without them"),
    "router": (bench_router, 20, "every router, alone and as a share of a training step"),
    "step": (bench_step, 10, "a training step of dense and each router"),
    "experts": (bench_experts, 10, "a training step at more and more experts, equally many of them active"),
    "length": (bench_length, 10, "a training step at several context lengths"),
    "tune": (bench_tune, 10, "tiles of the Triton kernels on the GPU at hand"),
    "data": (bench_data, 5, "tokenizer, preparation and loader"),
    "scaling": (bench_scaling, 3, "train.py on several numbers of ranks"),
    "eval": (bench_eval, 3, "eval.downstream against the harness' own client"),
    "train": (bench_train, None, "training runs of several routers, as long as fits into a time"),
    "save": (bench_save, 5, "steps while a checkpoint is being written, and without"),
}


def build_parser():
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__.split("\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    commands = {name: what.add_parser(name, help=words) for name, (_, _, words) in COMMANDS.items()}
    for name, (_, rounds, _) in COMMANDS.items():
        if rounds:
            commands[name].add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    for name in ("router", "step", "experts", "length", "scaling", "train", "save"):
        commands[name].add_argument("config", help="config file; --section.key=value overrides it")
    for name in ("moe", "router", "step", "experts", "length", "tune"):
        command = commands[name]
        command.add_argument("--dtype", nargs="+", choices=DTYPES, help="(default: the config's or the device's)")
        command.add_argument("--json", metavar="FILE", help="for the figures")
        command.add_argument("--profile", metavar="FILE", help="for a trace")
    for name in ("moe", "tune"):
        command = commands[name]
        command.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
        for size in ("tokens", "n-embd", "expert-hidden", "n-expert", "top-k"):
            command.add_argument(f"--{size}", type=int, metavar="N", help="(default: the device's)")
    for name, routers in {"router": list(ROUTERS), "step": list(ROUTERS), "length": ["dense", "kern"]}.items():
        commands[name].add_argument("--routers", nargs="+", default=routers, choices=ROUTERS, metavar="ROUTER")
    commands["step"].add_argument(
        "--peers",
        nargs="*",
        default=list(PEERS),
        choices=PEERS,
        metavar="PEER",
        help="models of other makes; none: off",
    )
    commands["step"].add_argument("--compile", nargs="+", choices=("off", "on"), help="(default: the config's)")
    commands["experts"].add_argument("--experts", nargs="+", type=int, default=[32, 64, 128, 256], metavar="E")
    commands["length"].add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], metavar="T")
    train = commands["train"]
    train.add_argument("--seconds", type=float, required=True, help="for all of it")
    train.add_argument("--folder", required=True, help="new, for the runs")
    train.add_argument("--overhead", type=float, default=30, help="seconds a run takes besides (default: %(default)s)")
    train.add_argument("--json", metavar="FILE", help="for the figures")
    train.set_defaults(profile=None)
    routers = ["kern", "dense", "softmax", "sigmoid", "tanh"]
    train.add_argument("--routers", nargs="+", default=routers, choices=ROUTERS, metavar="ROUTER")
    data, scaling, save, tasks = (commands[name] for name in ("data", "scaling", "save", "eval"))
    tasks.add_argument("run", nargs="?", help="run folder (default: a random GPT-2)")
    tasks.add_argument(
        "--tasks-dir", required=True, metavar="FOLDER", help="TASK.jsonl of each of the paper's six tasks"
    )
    tasks.add_argument("--limit", type=int, default=200, help="documents a task (default: %(default)s)")
    tasks.add_argument("--bpe-ranks", metavar="FILE", help="GPT-2's ranks")
    tasks.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    data.add_argument("files", nargs="*", help="text as data.prepare takes it (default: Python's standard library)")
    data.add_argument("--bpe-ranks", metavar="FILE", help="GPT-2's ranks")
    scaling.add_argument("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="(default: 1 2)")
    scaling.add_argument("--steps", type=int, default=50, help="of a run (default: %(default)s)")
    save.add_argument("--folder", help="on the disk that is to be tried (default: the one for temporary files)")
    return parser


def main(argv=None):
    parser = build_parser()
    args, overrides = parser.parse_known_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    if getattr(args, "rounds", 1) < 1 or args.what == "scaling" and (args.steps < 5 or min(args.ranks) < 1):
        parser.error("--rounds and --ranks need at least 1, --steps at least 5")
    if args.what == "length" and min(args.lengths) < 1:
        parser.error("--lengths need at least 1")
    try:
        COMMANDS[args.what][0](args, overrides)
    except (configure.ConfigError, DataError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cut short", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
