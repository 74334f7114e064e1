"""How fast it is: alternatives timed in turn within one process, compared by ratios of medians.

    python -m tools.bench step CONFIG [--section.key=value ...]
    python -m tools.bench moe

step     a training step of train.py (all passes, update, statistics) on random tokens, at rate 0
moe      kernels.expert_mlp against F.grouped_mm and one dense MLP of as many FLOPs, forward and
         backward

A list for a key makes alternatives, and so does an axis of the file; of several all combinations:

    python -m tools.bench step config/quickstart.toml --model.router=[dense,kern]

--json FILE writes the figures; --profile FILE a trace of the first alternative's step
(chrome://tracing). An alternative that raises RuntimeError, as without memory, is skipped with a
line, and the exit code is 1.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m tools.bench")

import json
import platform
import shlex
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

import configure
import kernels
from balance import expert_loads
from common.command import build_parser, command, run_command
from common.files import write_atomic
from common.text import first_line, text_table
from configure import Config
from configure.schema import replace
from runtime import distributed
from runtime.distributed import Ranks
from runtime.folder import RunFolder
from runtime.memory import estimate_memory, flops_per_token, parameter_shapes
from runtime.preflight import Data, Plan
from runtime.state import TrainState, build_state
from train import forward_backward

WARM_UP = 4  # calls before the first round; a CUDA graph is captured in the fourth
# N C H E K: 2,048 and 512 rows an expert
MOE_SHAPE = {"cuda": (16384, 768, 384, 64, 8), "cpu": (4096, 256, 128, 64, 8)}
MOE_DTYPES = {"cuda": ["float16", "bfloat16"], "cpu": ["float32", "bfloat16"]}


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: on a GPU by Triton's timer, with an empty L2 cache, else by torch's."""
    if device.type == "cuda":
        from triton.testing import do_bench

        median: Any = do_bench(function, warmup=1, rep=1, return_mode="median")
        return median / 1000
    return Timer("function()", globals={"function": function}).timeit(1).mean


class Benchmark:
    """Times alternatives and prints their table; --json FILE has the rows after each table."""

    def __init__(self, args: Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.data: dict[str, Any] = {
            "command": args.command,
            "device": distributed.device_name(device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rows": [],
            "skipped": {},
        }
        print("{device}, {threads} threads, torch {torch}, Python {python}".format(**self.data))

    def time(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Time each function once a round: slow moments of the machine hit all of them.

        Returns:
            {name: median in seconds}, without functions that raised RuntimeError.
        """
        seconds: dict[str, list[float]] = {}
        for name, function in functions.items():
            try:
                for _ in range(WARM_UP):
                    function()
            except RuntimeError as error:  # out of memory, no kernel for this dtype
                reason = f"{type(error).__name__}: {first_line(error)}"
                self.data["skipped"][name] = reason
                print(f"skipped {name}: {reason}", flush=True)
                continue
            seconds[name] = []
        for _ in range(self.args.rounds):
            for name, times in seconds.items():
                times.append(time_call(functions[name], self.device))
        return {name: statistics.median(times) for name, times in seconds.items()}

    def add_table(self, rows: list[dict[str, Any]]) -> None:
        """Print rows of one form, and add them to the JSON file."""
        self.data["rows"] += rows
        if self.args.json:
            write_atomic(self.args.json, json.dumps(self.data, indent=1) + "\n")
        if not rows:
            return
        lines = []
        for row in rows:
            lines.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()])
        print(text_table(list(rows[0]), lines, left=2), flush=True)


# ---- whole steps
class Step(NamedTuple):
    """A training step that can be repeated."""

    state: TrainState
    config: Config
    batches: Iterator[tuple[Tensor, Tensor]]

    def __call__(self) -> None:
        """Run it as train.py does, at rate 0: weights and routing stay as at the start."""
        stats = forward_backward(self.state, self.batches, 1, self.config.train)
        taken = self.state.updates.step(0, 0.0, stats.loss)
        self.state.zero_grad()
        self.state.selection_bias.update(stats.loads, stats.margins, taken)


def build_step(config: Config, device: torch.device, folder: Path, pool: Any = None) -> Step:
    """Build a model with its optimizer, and random tokens: new ones for each step.

    `pool` is memory for its CUDA graph, which graphs of other steps may use, too.

    With the same batch again and again a CPU's kernels would be compiled for its numbers of rows
    once, and steps look up to 1.3 times as fast as in training.
    """
    micro_batch_size = config.train.micro_batch_size
    config = replace(config, "train", batch_size=micro_batch_size)
    shapes = parameter_shapes(config.model)
    plan = Plan(
        config=config,
        run=RunFolder(folder),
        changes=[],
        last_step=0,
        branch=None,
        data=Data(None, None, {}, 0 if config.data.document_mask else None),  # pyrefly: ignore[bad-argument-type]
        device=device,
        dtype=distributed.pick_dtype(config.train.dtype, device, config.model.router),
        memory=estimate_memory(config, shapes, "ddp", 1),
        accumulation=1,
        tasks=None,
        initial_weights=None,
        evaluated_steps=set(),
    )
    shape = (2, micro_batch_size, config.model.block_size)
    batches = (draw_tokens(config, shape) for _ in repeat(None))
    state = build_state(plan, Ranks(0, 1, device))
    state.graph.pool = pool
    return Step(state, config, batches)


def draw_tokens(config: Config, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T) int64; with data.document_mask four documents to a window."""
    x, y = torch.randint(config.model.vocab_size, shape)
    if config.data.document_mask:
        x[:, :: max(1, shape[-1] // 4)] = 0
    return x, y


def bench_step(args: Namespace, overrides: list[str]) -> Benchmark:
    """Time a training step of each alternative; ratios are to the first."""
    configs = {}
    for point in configure.sweep_points(args.config, overrides):
        config = configure.load(args.config, point)
        configs[config.run.name] = config
    device = distributed.pick_device(next(iter(configs.values())).train.device)
    bench = Benchmark(args, device)
    # of all graphs: five models' would not fit an H200; each replay writes what it reads
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Step] = {}

        def run(name: str) -> None:
            if name not in steps:  # a model that does not fit is skipped like a step that fails
                steps[name] = build_step(configs[name], device, Path(folder, "run"), pool)
            steps[name]()

        medians = bench.time({name: partial(run, name) for name in configs})
        rows = []
        for name, seconds in medians.items():
            config = steps[name].config
            dtype = steps[name].state.compute.dtype
            tokens_per_sec = config.train.batch_size * config.model.block_size / seconds
            row: dict[str, Any] = {"alternative": name, "dtype": str(dtype).removeprefix("torch.")}
            row |= {"ms": 1000 * seconds, "tokens/s": round(tokens_per_sec)}
            row["ratio"] = seconds / next(iter(medians.values()))
            peak = distributed.peak_flops(device, dtype)
            if peak:  # MFU: 6 FLOPs a token and active weight, + 12 L T C, of the data sheet's peak
                row["MFU"] = flops_per_token(config.model) * tokens_per_sec / peak
            rows.append(row)
        bench.add_table(rows)
        if args.profile and steps:
            write_trace(next(iter(steps.values())), args.profile)
    return bench


def write_trace(step: Callable[[], object], file: str) -> None:
    """Trace a call, and print its largest kernels by their own time."""
    with torch.profiler.profile() as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(file)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    print(profiler.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=30))


# ---- experts
def run_grouped_mm(
    x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor
) -> Tensor:
    """Compute `kernels.expert_mlp` in plain torch, by grouped products."""
    order = experts.flatten().argsort(stable=True)  # (N·K,)
    ends = expert_loads(experts, len(w_in)).cumsum(0).to(torch.int32)
    rows = x.index_select(0, order // experts.shape[1])
    y = F.grouped_mm(F.gelu(F.grouped_mm(rows, w_in, offs=ends)), w_out, offs=ends)
    y = y.index_select(0, order.argsort()).view(*weights.shape, -1)  # (N, K, C)
    return (y * weights.unsqueeze(-1).to(y.dtype)).sum(1)


def run_dense(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Compute one MLP of as many FLOPs: hidden width K·H."""
    K = weights.shape[1]
    return F.gelu(x @ w_in[:K].transpose(0, 1).flatten(1)) @ w_out[:K].flatten(0, 1)


IMPLEMENTATIONS = {
    "kernels": kernels.expert_mlp,
    "F.grouped_mm": run_grouped_mm,
    "dense": run_dense,
}


def run_both(function: Callable[..., Tensor], inputs: list[Tensor], d_out: Tensor) -> None:
    """Run a function forward and backward, to all inputs that want a gradient."""
    wanted = [leaf for leaf in inputs if leaf.requires_grad]
    torch.autograd.grad(function(*inputs), wanted, d_out, allow_unused=True)


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Random inputs of `kernels.expert_mlp`, with about equal loads, and d_out (N, C)."""
    N, C, H, E, K = shape
    torch.manual_seed(0)
    weights, experts = torch.randn(N, E, device=device).softmax(-1).topk(K)
    leaves = [
        torch.randn(N, C, device=device).to(dtype),
        (torch.randn(E, C, H, device=device) / C**0.5).to(dtype),
        (torch.randn(E, H, C, device=device) / H**0.5).to(dtype),
        weights,
    ]
    d_out = torch.randn(N, C, device=device).to(dtype)
    return [*(leaf.requires_grad_() for leaf in leaves), experts], d_out


def bench_moe(args: Namespace, overrides: list[str]) -> Benchmark:
    """Time the expert MLP's implementations, forward and backward, in each of MOE_DTYPES."""
    if overrides:
        raise ValueError(f"unknown options {' '.join(overrides)}: moe takes no config keys")
    device = distributed.pick_device("auto")
    N, C, H, E, K = shape = MOE_SHAPE[device.type]
    bench = Benchmark(args, device)
    print(f"N {N}, C {C}, H {H}, E {E}, K {K}; TFLOP/s: of 12·N·K·C·H FLOPs, both passes")
    for name in MOE_DTYPES[device.type]:
        inputs, d_out = make_inputs(shape, getattr(torch, name), device)
        functions = {}
        for implementation, function in IMPLEMENTATIONS.items():
            functions[implementation] = partial(run_both, function, inputs, d_out)
        rows = []
        for implementation, seconds in bench.time(functions).items():
            row: dict[str, Any] = {"implementation": implementation, "dtype": name}
            rows.append(row | {"ms": 1000 * seconds, "TFLOP/s": 12e-12 * N * K * C * H / seconds})
        bench.add_table(rows)
    return bench


@command
def main(argv: list[str] | None = None) -> int:
    """Run a benchmark."""
    parser = build_parser("tools.bench", __doc__)
    subparsers = parser.add_subparsers(dest="what", required=True)
    step = subparsers.add_parser("step")
    step.add_argument("config", help="config file; --section.key=value overrides it")
    step.add_argument("--profile", metavar="FILE", help="for a trace")
    for subparser in (step, subparsers.add_parser("moe")):
        subparser.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
        subparser.add_argument("--json", metavar="FILE", help="for the figures")
    args, overrides = parser.parse_known_args(argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: expected 1 or more")
    words = sys.argv[1:] if argv is None else argv
    args.command = shlex.join(["python", "-m", "tools.bench", *words])
    bench = {"step": bench_step, "moe": bench_moe}[args.what](args, overrides)
    return 1 if bench.data["skipped"] else 0


if __name__ == "__main__":
    run_command(main)
