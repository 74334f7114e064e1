"""Everything that needs a GPU, in one process; each piece's figures are safe at once.

    python -m tools.gpu_check [--minutes 13] [PIECE ...]    on a GPU; all pieces or those named
    python -m tools.gpu_check --rehearse [PIECE ...]        the same at tiny sizes on the CPU

Pieces run in order of worth. --out FOLDER (runs/gpu_check) gets gpu_check.json, with all figures,
commit, device, driver and versions (docs/gpu.md), a trace, the log of the tests, and the runs of
`train`. A piece that fails says why and does not keep the next from running; one that does not fit
into the minutes left is left out. Exit code 1 if any piece failed or was left out, 2 if none can
run.

It needs no network. nanoGPT's model.py as nanogpt.py, and ScatterMoE's package scattermoe, are
timed, too, if Python finds them (PYTHONPATH).
"""

import gc
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.command import build_parser, command, run_command
from common.files import write_atomic
from common.text import first_line
from runtime import RunError
from tools import golden
from tools.bench import moe
from tools.bench.__main__ import main as bench

PAPER = ("dense", "softmax", "sigmoid", "tanh", "kern")
PROCESSES = 6  # of pytest: with 14 at once a GPU of 141 GB had no memory left (2026-11-26)


class Sizes(NamedTuple):
    """What is run: at full size on a GPU, or tiny."""

    config: list[str]
    shape: list[str]  # N C H E K of experts
    rounds: list[str]
    half: tuple[str, ...]  # dtypes
    device: str
    train: list[str]


FULL = Sizes(
    config=["config/125m.toml", "--model.block_size=1024", "--train.micro_batch_size=32"],
    shape=["32768", "768", "384", "64", "8"],
    rounds=["--rounds", "10"],
    half=("float16", "bfloat16"),
    device="cuda",
    train=["config/125m.toml", "--train.micro_batch_size=64", "--train.max_steps=80"],
)
TINY = Sizes(
    config=["config/quickstart.toml", "--model.n_layer=1", "--train.micro_batch_size=1"],
    shape=["16", "16", "16", "2", "1"],
    rounds=["--rounds", "1"],
    half=("float32", "bfloat16"),
    device="cpu",
    train=["config/quickstart.toml", "--train.micro_batch_size=1", "--train.max_steps=10"],
)


class Check:
    """Runs pieces and keeps their figures."""

    def __init__(self, sizes: Sizes, out: Path) -> None:
        self.sizes = sizes
        self.out = out
        self.figures: dict[str, Any] = {"about": describe_machine()}

    def save(self) -> None:
        write_atomic(self.out / "gpu_check.json", json.dumps(self.figures, indent=1) + "\n")

    def bench(self, name: str, *arguments: str) -> None:
        """Run a command of tools.bench and keep its figures as `name`."""
        file = self.out / "bench.json"
        with free_memory():
            code = bench([*arguments, *self.sizes.rounds, f"--json={file}"])
        self.figures[name] = json.loads(file.read_text())
        file.unlink()
        if code:
            raise RunError(f"{name}: some alternatives were skipped")

    def bench_step(self, name: str, routers: Iterable[str], *more: str) -> None:
        """Time steps of these routers."""
        chosen = [f"--model.router={router}" for router in routers]
        self.bench(name, "step", *self.sizes.config, *chosen, *more)

    def bench_steps(self) -> None:
        """Eager steps, with and without a CUDA graph."""
        graphs = ["--train.cuda_graph=off", "--train.cuda_graph=on"]
        eager = ["--train.compile=off", *graphs]
        for dtype in self.sizes.half:
            routers = ("dense", "softmax", "kern") if dtype == "float16" else ("dense", "kern")
            self.bench_step(f"step {dtype}", routers, f"--train.dtype={dtype}", *eager)

    def bench_compiled(self) -> None:
        """Compiled steps, with and without a CUDA graph."""
        graphs = ["--train.cuda_graph=off", "--train.cuda_graph=on"]
        for dtype in self.sizes.half:
            words = [f"--train.dtype={dtype}", "--train.compile=on", *graphs]
            self.bench_step(f"compiled {dtype}", ("dense", "kern"), *words)

    def trace(self, compile: str) -> None:
        """Trace a step of kern."""
        file = self.out / f"kern-compile-{compile}.trace.json.gz"
        words = [f"--train.compile={compile}", f"--train.dtype={self.sizes.half[0]}"]
        self.bench_step(f"trace, compile {compile}", ["kern"], *words, f"--profile={file}")

    def bench_experts(self) -> None:
        """The experts' kernels, at even loads and with a fullest expert of 8 times the mean."""
        if importlib.util.find_spec("scattermoe"):
            moe.ALTERNATIVES["ScatterMoE"] = run_scattermoe
        loads = ["--fullest", "0", "8" if self.sizes is FULL else "1"]
        types = ["--dtype", *self.sizes.half]
        self.bench("experts", "moe", "--shape", *self.sizes.shape, *types, *loads)

    def bench_routers(self) -> None:
        """Routers alone."""
        chosen = [f"--model.router={router}" for router in PAPER if router != "dense"]
        words = [f"--train.dtype={self.sizes.half[0]}", "--train.compile=off"]
        self.bench("routers", "router", *self.sizes.config, *chosen, *words)

    def bench_options(self) -> None:
        """Every router, Muon and document masks, in whole steps."""
        words = [f"--train.dtype={self.sizes.half[0]}", "--train.compile=off"]
        self.bench_step("routers, steps", PAPER, *words)
        optimizers = ["--optim.name=adamw", "--optim.name=muon"]
        self.bench_step("muon", ["kern"], *words, *optimizers)
        masks = ["--data.document_mask=false", "--data.document_mask=true"]
        self.bench_step("masks", ["kern"], *words, *masks)

    def measure_errors(self) -> None:
        """Relative errors of the experts against float64: output and four gradients."""
        device = torch.device(self.sizes.device)
        shape = tuple(int(side) for side in self.sizes.shape)
        shape = (min(shape[0], 8192), *shape[1:])
        rows = self.figures["errors"] = {}
        for name in self.sizes.half:
            inputs, d_out = moe.make_inputs(shape, moe.DTYPES[name], device)
            wide = [t.detach().double() if t.is_floating_point() else t for t in inputs]
            exact = run_both(moe.run_loop, wide, d_out.double())
            for alternative in ("kernels", "F.grouped_mm"):
                got = run_both(moe.ALTERNATIVES[alternative], inputs, d_out)
                errors = []
                for a, b in zip(got, exact, strict=True):
                    errors.append(((a.double() - b).norm() / b.norm()).item())
                rows[f"{alternative} {name}"] = errors
                print(f"{alternative:14} {name:9}", *(f"{error:.1e}" for error in errors))

    def bench_attention(self) -> None:
        """CuDNN's attention and flash attention: time, and whether two runs are equal."""
        shape = (32, 12, 1024, 64) if self.sizes is FULL else (1, 2, 16, 8)
        rows = self.figures["attention"] = {}
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            if self.sizes is TINY:
                backend = SDPBackend.MATH
            inputs = torch.randn(3, *shape, device=self.sizes.device, dtype=torch.float16)
            inputs.requires_grad_()
            function = partial(attend, backend, inputs, torch.randn_like(inputs[0]))
            equal = all(torch.equal(function(), function()) for _ in range(3))
            ms = 1000 * time_function(function)
            rows[backend.name] = {"ms": ms, "runs are equal": equal}
            print(f"{backend.name:20} {ms:.3f} ms forward and backward, runs are equal: {equal}")

    def bench_nanogpt(self) -> None:
        """Our dense model and nanoGPT's own, compiled."""
        words = ["--train.compile=on"]
        if self.sizes is TINY:
            words = ["--train.compile=off", "--model.expert_hidden=64"]
        for dtype in self.sizes.half:
            more = [f"--train.dtype={dtype}", "--peer=nanogpt"]
            self.bench_step(f"nanoGPT {dtype}", ["dense"], *words, *more)

    def compare_golden(self) -> None:
        """100 steps of five routers on the device and on the CPU."""
        file = self.out / "golden.json"
        if golden.main(["--device", self.sizes.device, "--json", str(file)]):
            raise RunError("losses differ from the CPU's")

    def test(self) -> None:
        """Run the GPU tests, in several processes with pytest-xdist: compiling takes longest."""
        # files without such tests may need packages that a machine with a GPU lacks
        paths = sorted(Path("tests").glob("test_*.py"))
        files = [str(path) for path in paths if "mark.gpu" in path.read_text()]
        words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        words += files
        if importlib.util.find_spec("xdist"):
            words += ["-n", str(PROCESSES)]
        if self.sizes is TINY:
            words += ["--collect-only"]
        self.run_process("tests", words)

    def train(self) -> None:
        """Train the paper's routers on Python's own sources, as bytes."""
        roots = str(Path(torch.__file__).parent if self.sizes is FULL else Path("scripts"))
        data = ["data.prepare", "stdlib", "--roots", roots, "--name", "packages"]
        held_out = "0.02" if self.sizes is FULL else "0.2"
        python = [sys.executable, "-m"]
        self.run_process("data", [*python, *data, "--val-fraction", held_out, "--force"])
        routers = json.dumps(list(PAPER))
        words = [f"--model.router={routers}", "--data.name=packages", f"--run.dir={self.out}/runs"]
        words += ["--optim.warmup_steps=8", "--eval.interval=10", "--eval.windows=64"]
        words += ["--train.checkpoint_interval=0", "--train.checkpoint_minutes=0"]
        batch = "256" if self.sizes is FULL else "1"
        words += [f"--train.batch_size={batch}", "--train.compile=off"]
        self.run_process("train", [*python, "scripts.sweep", *self.sizes.train, *words])

    def train_on_all(self) -> None:
        """Train on all GPUs: DDP, ZeRO-2 and FSDP2."""
        n_gpu = torch.cuda.device_count()
        for parallel in ("ddp", "zero2", "fsdp"):
            words = [f"--nproc_per_node={n_gpu}", "train.py", *self.sizes.train]
            words += [f"--train.parallel={parallel}", f"--train.batch_size={64 * n_gpu}"]
            words += [
                "--data.name=packages",
                f"--run.name={parallel}",
                f"--run.dir={self.out}/runs",
            ]
            words += ["--train.checkpoint_interval=0", "--train.checkpoint_minutes=0"]
            self.run_process(parallel, [sys.executable, "-m", "torch.distributed.run", *words])

    def run_process(self, name: str, words: list[str]) -> None:
        """Run a command; its output goes to NAME.log, its last lines are printed."""
        log = self.out / f"{name}.log"
        with log.open("w") as file:
            code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT).returncode
        lines = log.read_text().splitlines()
        print(*lines[-6:], sep="\n")
        self.figures[name] = {"exit code": code, "last lines": lines[-6:]}
        if code:
            raise RunError(f"exit code {code}, see {log}")


class Piece(NamedTuple):
    """A method of `Check`, and seconds that it took on an H200 or is expected to take."""

    run: Callable[[Check], object]
    seconds: int


PIECES = {
    "steps": Piece(Check.bench_steps, 40),
    "experts": Piece(Check.bench_experts, 40),
    "errors": Piece(Check.measure_errors, 20),
    "attention": Piece(Check.bench_attention, 5),
    "trace": Piece(partial(Check.trace, compile="off"), 15),
    "compiled": Piece(Check.bench_compiled, 90),
    "trace-compiled": Piece(partial(Check.trace, compile="on"), 20),
    "routers": Piece(Check.bench_routers, 15),
    "options": Piece(Check.bench_options, 45),
    "nanogpt": Piece(Check.bench_nanogpt, 45),
    "golden": Piece(Check.compare_golden, 60),
    "tests": Piece(Check.test, 200),
    "train": Piece(Check.train, 180),
}
MANY = {"many-gpus": Piece(Check.train_on_all, 120)}  # where there are several


def describe_machine() -> dict[str, Any]:
    """Commit, device, driver and versions."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    about: dict[str, Any] = {
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": "cpu",
    }
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout
        about["device"] = torch.cuda.get_device_name()
        about["devices"] = torch.cuda.device_count()
        about["driver"] = driver.partition("\n")[0]
        about["cuda"] = torch.version.cuda
        about["cudnn"] = torch.backends.cudnn.version()
        about["triton"] = metadata.version("triton")
    return about


def run_both(function: Callable[..., Tensor], inputs: list[Tensor], d_out: Tensor) -> list[Tensor]:
    """The output and the gradients of all floating-point inputs."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    out = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, d_out)]


def run_scattermoe(
    x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor
) -> Tensor:
    """Compute `kernels.expert_mlp` by ScatterMoE."""
    from scattermoe.parallel_experts import (  # pyrefly: ignore[missing-import]
        flatten_sort_count,
        parallel_linear,
    )

    with torch.no_grad():
        by_expert = flatten_sort_count(experts, num_experts=len(w_in))
    hidden = parallel_linear(x, w_in, experts.shape[1], *by_expert, grouped_out=True)
    gates = weights.to(x.dtype)
    return parallel_linear(F.gelu(hidden), w_out, 1, *by_expert, gates=gates, grouped_in=True)


def attend(backend: SDPBackend, inputs: Tensor, d_out: Tensor) -> Tensor:
    """Causal attention forward and backward; returns the gradient of queries, keys and values."""
    with sdpa_kernel([backend]):
        q, k, v = inputs.unbind()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.autograd.grad(out, inputs, d_out)[0]


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_function(function: Callable[[], object], rounds: int = 10) -> float:
    """Median seconds of a call, until the device is done."""
    times = []
    for _ in range(rounds + 3):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


@contextmanager
def free_memory() -> Any:
    """Give the device's memory back afterwards."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_piece(check: Check, name: str, piece: Piece) -> str:
    """Run a piece, save its figures, and say what became of it."""
    print(f"\n== {name}", flush=True)
    start = time.monotonic()
    problem = ""
    with free_memory():
        try:
            piece.run(check)
        except Exception as error:  # the next piece is to run whatever this one met
            problem = f"FAILED: {type(error).__name__}: {first_line(error)}"
            if not isinstance(error, RunError):
                traceback.print_exc(limit=8)
    seconds = time.monotonic() - start
    result = problem or "ok"
    check.figures.setdefault("pieces", {})[name] = [round(seconds), result]
    check.save()
    return f"{name:16} {seconds:4.0f} s  {result}"


def choose_pieces(names: list[str]) -> dict[str, Piece]:
    """The named pieces, or all that the devices allow."""
    possible = PIECES | MANY
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise ValueError(f"no piece {unknown[0]}: name some of {', '.join(possible)}")
    if names:
        return {name: possible[name] for name in names}
    return possible if torch.cuda.device_count() > 1 else PIECES


def run_pieces(args: Namespace) -> int:
    """Run all pieces that fit into the time; returns the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    check = Check(TINY if args.rehearse else FULL, args.out.resolve())
    end = time.monotonic() + 60 * args.minutes
    lines = []
    for name, piece in choose_pieces(args.pieces).items():
        if time.monotonic() + piece.seconds > end and not args.rehearse:
            lines.append(f"{name:16}         left out: about {piece.seconds} s did not fit")
        else:
            lines.append(run_piece(check, name, piece))
    print("\n== summary", *lines, f"figures: {args.out / 'gpu_check.json'}", sep="\n")
    return int(any("FAILED" in line or "left out" in line for line in lines))


@command
def main(argv: list[str] | None = None) -> int:
    """Run pieces."""
    parser = build_parser("tools.gpu_check", __doc__)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=", ".join(PIECES | MANY))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--minutes", type=float, default=13.0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), metavar="FOLDER")
    args = parser.parse_args(argv)
    if not args.rehearse and not torch.cuda.is_available():
        raise RunError("torch finds no CUDA device here; --rehearse tries the pieces on the CPU")
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes:g}: expected more than 0")
    return run_pieces(args)


if __name__ == "__main__":
    run_command(main)
