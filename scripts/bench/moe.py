"""`scripts.bench moe` and `tune`: the experts' kernels against what one would write without them, and their tiles."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from runtime import RunError, distributed
from scripts.bench import expert_peers
from scripts.bench.expert_peers import sort_rows, sum_rows
from scripts.bench.harness import DTYPES, Benchmark, divide

DEFAULT = {"cuda": (16384, 768, 384, 64, 8), "cpu": (4096, 256, 128, 64, 8)}  # N C H E K: 2,048 and 512 rows an expert
CEILING = {"cuda": (4096, 6144, 8192), "cpu": (1024, 2048)}  # sides of square matrix products
TILES = (  # rows, columns, depth, warps, stages, most registers: what `tune` tries besides the present tiles
    (128, 128, 64, 8, 3, None),
    (128, 128, 64, 4, 3, None),
    (128, 256, 64, 8, 3, None),
    (128, 256, 64, 8, 4, None),
    (128, 256, 64, 8, 5, None),
    (128, 128, 32, 8, 4, None),
    (128, 192, 32, 8, 5, 128),
    (128, 384, 64, 8, 3, None),
    (128, 384, 64, 8, 4, None),
)
INSTEAD = {"up": "up_described", "rows": "rows_ahead"}  # kernels that take over where weights can be described
KERNELS = ("up", "up_described", "rows", "rows_ahead", "down_grad", "weight_grad")  # which `tune` knows
WORTH = 0.98  # a tile replaces the present one if it takes at most this part of its time


def run_grouped_mm(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Compute `kernels.expert_mlp` in plain torch: rows sorted by expert, grouped products, rows put back."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    ends = loads.cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.gelu(F.grouped_mm(rows, w_in, offs=ends)), w_out, offs=ends)
    return sum_rows(y, order, weights)


def run_loop(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Compute `kernels.expert_mlp` with two products per expert. The host waits for the loads."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    parts = zip(rows.split(loads.tolist()), w_in.unbind(), w_out.unbind(), strict=True)
    return sum_rows(torch.cat([F.gelu(part @ w1) @ w2 for part, w1, w2 in parts]), order, weights)


ALTERNATIVES: dict[str, Callable[..., Tensor]] = {
    "kernels": kernels.expert_mlp,
    "torch backend": partial(kernels.expert_mlp, backend="torch"),  # on a CPU that is what the kernels are
    "F.grouped_mm": run_grouped_mm,
    "loop": run_loop,
}


def run_dense(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Compute one MLP of as many FLOPs: hidden width K·H."""
    return F.gelu(x @ w1) @ w2


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, gated: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Make [x, w_in, w_out, weights, experts] for `kernels.expert_mlp` and the output's gradient (N, C).

    Random, with about equal loads. `shape` is (N, C, H, E, K); weights are fp32, experts int64, all else `dtype`. With
    `gated`, experts have three matrices of two thirds the width.
    """
    N, C, H, E, K = shape
    H, P = (2 * H // 3, 2 * (2 * H // 3)) if gated else (H, H)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator, device=device) * std

    weights, experts = draw(N, E).softmax(-1).topk(K)
    leaves = [draw(N, C).to(dtype), draw(E, C, P, std=C**-0.5).to(dtype), draw(E, H, C, std=H**-0.5).to(dtype), weights]
    return [leaf.requires_grad_() for leaf in leaves] + [experts], draw(N, C).to(dtype)


def run_both(call: partial[Tensor], d_out: Tensor) -> None:
    """Run a call forward and backward, to all arguments that want a gradient."""
    torch.autograd.grad(call(), [leaf for leaf in call.args if leaf.requires_grad], d_out)


def bench_moe(args: Namespace, overrides: list[str]) -> None:
    """Time the expert MLP's implementations in each --dtype, forward and with backward."""
    device = distributed.pick_device(args.device)
    N, C, H, E, K = shape = pick_shape(args, overrides, device)
    sides = CEILING[device.type]
    notes = (
        "TFLOP/s: of 4·N·K·C·H FLOPs forward, three times that with backward",
        f"matmul ceiling: the fastest square product of side {', '.join(map(str, sides))}",
        "saved MB: what the graph keeps for the backward pass, without inputs",
    )
    bench = Benchmark(args, device, f"N {N}, C {C}, H {H}, E {E}, K {K}", *notes)
    names = args.dtype or (["float16", "bfloat16"] if device.type == "cuda" else ["float32", "bfloat16"])
    for name in names:
        dtype = DTYPES[name]
        inputs, d_out = make_inputs(shape, dtype, device)
        x, w_in, w_out = (leaf.detach() for leaf in inputs[:3])
        dense = [x.clone(), w_in[:K].transpose(0, 1).flatten(1), w_out[:K].flatten(0, 1).clone()]
        calls = {what: partial(f, *inputs) for what, f in ALTERNATIVES.items()}
        if device.type == "cpu":
            del calls["torch backend"]
        else:  # libraries for GPUs
            calls |= expert_peers.make_calls(expert_peers.PLAIN, inputs)
            gated, _ = make_inputs(shape, dtype, device, gated=True)
            calls["kernels, gated"] = partial(ALTERNATIVES["kernels"], *gated, activation="silu")
            calls |= expert_peers.make_calls(expert_peers.GATED, gated)
        may_fail = {*calls} - {"kernels"}
        calls["dense"] = partial(run_dense, *(leaf.requires_grad_() for leaf in dense))
        functions: dict[tuple[str, Any], Callable] = {
            (what, "forward"): torch.no_grad()(call) for what, call in calls.items()
        }
        functions |= {(what, "both"): partial(run_both, call, d_out) for what, call in calls.items()}
        for side in sides:
            functions["ceiling", side] = partial(torch.mm, *torch.randn(2, side, side, device=device).to(dtype))
        median = bench.time(functions, [key for key in functions if key[0] in may_fail])
        ceiling = max(2 * side**3 / median["ceiling", side] for side in sides)
        rows: list[list[Any]] = []
        for what, seconds in ((what, median[what, way]) for what, way in median if way == "both"):
            over = [divide(seconds, median.get((base, "both"))) for base in ("dense", "kernels")]
            rate = 12 * N * K * C * H / seconds
            row = [what, name, 1000 * median[what, "forward"], 1000 * seconds, *over, rate / 1e12, rate / ceiling]
            rows.append([*row, count_saved_bytes(calls[what]) / 1e6])
        rows.append(["matmul ceiling", name, None, None, None, None, ceiling / 1e12, 1.0, None])
        columns = ["implementation", "dtype", "forward ms", "forward+backward ms", "over dense", "over kernels"]
        bench.add_table([*columns, "TFLOP/s", "of ceiling", "saved MB"], rows)
        bench.profile(functions["kernels", "both"], f"kernels, forward and backward, {name}")


def count_saved_bytes(call: partial[Tensor]) -> int:
    """Count the bytes, besides the output's, that stay after a forward pass because its graph needs them.

    By allocations: `saved_tensors_hooks` do not see what an autograd.Function keeps in its context.
    """
    if call.args[0].is_cuda:
        before = torch.cuda.memory_allocated()
        out = call()
        return torch.cuda.memory_allocated() - before - out.nbytes
    with torch.profiler.profile(profile_memory=True) as profiler:
        out = call()
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages()) - out.nbytes


def bench_tune(args: Namespace, overrides: list[str]) -> None:
    """Time tiles of each Triton kernel, and print those that are faster as lines for kernels/triton_experts.py."""
    device = distributed.pick_device(args.device)
    shape = N, C, H, E, K = pick_shape(args, overrides, device)
    (dtype, *others) = args.dtype or ["float16"]
    if others or dtype == "float32":
        raise RunError("tune takes one of float16 and bfloat16, which share their tiles")
    if why := kernels.find_triton_problem(device, DTYPES[dtype]):
        raise RunError(f"tune times the triton kernels, and triton {why}")
    ours: Any = kernels.triton_experts
    bench = Benchmark(args, device, f"{dtype}, N {N}, C {C}, H {H}, E {E}, K {K}")
    table = ours.TILES.get(ours.major(device), ours.TILES[8])
    before = dict(table)
    inputs, d_out = make_inputs(shape, DTYPES[dtype], device)
    x, w_in, w_out, weights, experts = (tensor.detach() for tensor in inputs)
    kept = ours.forward(x, w_in, w_out, weights, experts, False)[1:]
    hidden, schedule, rows = kept[0], ours.Schedule(*kept[1:]), ours.tile_rows(x, N * K, E)
    listed = schedule.order, schedule.offsets, schedule.largest
    up = partial(ours.multiply_up, x, w_in, H, weights, schedule.order, schedule.table, rows, False)
    down = partial(ours.multiply_rows, hidden, w_out, schedule.table, rows, False)
    timed: dict[str, Callable[[], object]] = {
        "up": up,
        "up_described": up,
        "rows": down,
        "rows_ahead": down,
        "down_grad": partial(ours.backward, d_out, x, w_in, w_out, weights, *kept, False, x.dtype),
        "weight_grad": partial(ours.weight_grad, x, hidden, *listed, K, True, x.dtype),
    }

    def run_with_tile(kernel: str, tile: Any) -> None:
        present = dict(table)
        table[kernel] = tile
        table[INSTEAD.get(kernel)] = None
        try:
            timed[kernel]()
        finally:
            table.clear()
            table.update(present)

    chosen = {}
    try:
        for kernel in (kernel for kernel in args.kernels if kernel in table):
            tiles = dict.fromkeys([before[kernel], *(ours.Tile(*tile) for tile in TILES if fits(kernel, tile[1]))])
            functions = {(kernel, *tile): partial(run_with_tile, kernel, tile) for tile in tiles}
            median = bench.time(functions, list(functions)[1:])  # a tile may need more shared memory than there is
            present = median[kernel, *before[kernel]]
            ranked = sorted((seconds, tile) for (_, *tile), seconds in median.items())
            rows = [[kernel, format_tile(tile), 1000 * seconds, seconds / present] for seconds, tile in ranked]
            bench.add_table(["kernel", "tile", "ms", "over present"], rows)
            fastest, tile = ranked[0]
            chosen[kernel] = table[kernel] = ours.Tile(*tile) if fastest < WORTH * present else before[kernel]
    finally:
        table.update(before)
    print(f"for kernels/triton_experts.py, TILES[{ours.major(device)}]; then see `python -m scripts.aot` for spills:")
    for kernel, tile in chosen.items():
        changed = "" if tile == before[kernel] else "  # changed"
        print(f'        "{kernel}": Tile({format_tile(tile)}),{changed}')


def format_tile(tile: Sequence[int | None]) -> str:
    """Format a tile as its class takes it, without a limit on registers where there is none."""
    return ", ".join(str(value) for value in tile if value is not None)


def fits(kernel: str, cols: int) -> bool:
    """Whether a kernel computes tiles of this width, in one part or in two."""
    two = cols & (cols - 1) > 0
    return two if kernel == "up_described" else kernel in ("rows_ahead", "weight_grad") or not two


def pick_shape(args: Namespace, overrides: list[str], device: torch.device) -> tuple[int, ...]:
    """Pick (N, C, H, E, K) from the arguments, by default the device's. Raises RunError."""
    if overrides:
        raise RunError(f"unknown options {' '.join(overrides)}: {args.what} takes no config keys")
    given = args.tokens, args.n_embd, args.expert_hidden, args.n_expert, args.top_k
    shape = tuple(default if size is None else size for size, default in zip(given, DEFAULT[device.type], strict=True))
    if shape[4] > shape[3]:
        raise RunError(f"--top-k {shape[4]} must be at most --n-expert {shape[3]}")
    return shape
