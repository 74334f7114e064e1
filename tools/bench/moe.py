"""`tools.bench moe`: the experts' kernels against what one would write without them."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from balance import expert_loads
from runtime import RunError, distributed
from tools.bench.harness import DTYPES, Benchmark, divide

# N C H E K: 2,048 and 512 rows an expert
DEFAULT = {"cuda": (16384, 768, 384, 64, 8), "cpu": (4096, 256, 128, 64, 8)}
CEILING = {"cuda": (4096, 6144, 8192), "cpu": (1024, 2048)}  # sides of square matrix products


def sort_rows(x: Tensor, experts: Tensor, n_expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gather rows (N·K, C) sorted by expert; returns their order (N·K,) and loads (E,), too."""
    order = experts.flatten().argsort(stable=True)
    return x.index_select(0, order // experts.shape[1]), order, expert_loads(experts, n_expert)


def sum_rows(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's rows (N·K, C), times their gates, to (N, C)."""
    N, K = weights.shape
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    rows = rows.index_select(0, inverse).view(N, K, -1)
    return (rows * weights.unsqueeze(-1).to(rows.dtype)).sum(1)


def run_grouped_mm(
    x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor
) -> Tensor:
    """Compute `kernels.expert_mlp` in plain torch, by grouped products."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    ends = loads.cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.gelu(F.grouped_mm(rows, w_in, offs=ends)), w_out, offs=ends)
    return sum_rows(y, order, weights)


def run_loop(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Compute `kernels.expert_mlp` with two products per expert. The host waits for the loads."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    parts = zip(rows.split(loads.tolist()), w_in.unbind(), w_out.unbind(), strict=True)
    return sum_rows(torch.cat([F.gelu(part @ w1) @ w2 for part, w1, w2 in parts]), order, weights)


ALTERNATIVES = {"kernels": kernels.expert_mlp, "F.grouped_mm": run_grouped_mm, "loop": run_loop}


def run_dense(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Compute one MLP of as many FLOPs: hidden width K·H."""
    return F.gelu(x @ w1) @ w2


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fullest: float = 0.0
) -> tuple[list[Tensor], Tensor]:
    """Make the inputs of `kernels.expert_mlp` and the output's gradient (N, C).

    Random, with about equal loads; with `fullest`, expert 0 has so many times the mean load.
    `shape` is (N, C, H, E, K); weights are fp32, experts int64, all else `dtype`.
    """
    N, C, H, E, K = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator, device=device) * std

    scores = draw(N, E)
    if fullest:
        scores[:, 0] = -torch.inf
        scores[: round(fullest * N * K / E), 0] = torch.inf
    experts = scores.topk(K).indices
    weights = draw(N, E).softmax(-1).gather(1, experts)
    leaves = [
        draw(N, C).to(dtype),
        draw(E, C, H, std=C**-0.5).to(dtype),
        draw(E, H, C, std=H**-0.5).to(dtype),
        weights,
    ]
    return [leaf.requires_grad_() for leaf in leaves] + [experts], draw(N, C).to(dtype)


def run_both(call: partial[Tensor], d_out: Tensor) -> None:
    """Run a call forward and backward, to all arguments that want a gradient."""
    torch.autograd.grad(call(), [leaf for leaf in call.args if leaf.requires_grad], d_out)


def bench_moe(args: Namespace, overrides: list[str]) -> Benchmark:
    """Time the expert MLP's implementations in each --dtype, forward and with backward."""
    device = distributed.pick_device(args.device)
    N, C, H, E, K = shape = args.shape or DEFAULT[device.type]
    if not (0 < K <= E and min(shape) > 0):
        raise RunError(
            f"--shape {N} {C} {H} {E} {K}: all sizes must be at least 1, and K at most E"
        )
    for fullest in args.fullest or ():
        if not 0 <= fullest <= E / K:
            raise RunError(f"--fullest {fullest:g}: expected 0 to E/K = {E / K:g} times the mean")
    sides = ", ".join(str(side) for side in CEILING[device.type])
    notes = (
        "TFLOP/s: of 4·N·K·C·H FLOPs forward, three times that with backward",
        f"matmul ceiling: the fastest square product of side {sides}",
        "saved MB: what the graph keeps for the backward pass, without inputs",
        "ms: of the device, which waits until all is launched; host ms: to launch both passes",
    )
    bench = Benchmark(args, device, f"N {N}, C {C}, H {H}, E {E}, K {K}", *notes)
    for name in args.dtype or (
        ["float16", "bfloat16"] if device.type == "cuda" else ["float32", "bfloat16"]
    ):
        for fullest in args.fullest or [0.0]:
            time_implementations(bench, name, shape, fullest)
    return bench


def time_implementations(
    bench: Benchmark, name: str, shape: tuple[int, ...], fullest: float
) -> None:
    """Time all implementations in the dtype of this name, and add their table."""
    N, C, H, _, K = shape
    device, dtype, sides = bench.device, DTYPES[name], CEILING[bench.device.type]
    inputs, d_out = make_inputs(shape, dtype, device, fullest)
    calls = {what: partial(function, *inputs) for what, function in ALTERNATIVES.items()}
    x, w_in, w_out = (leaf.detach() for leaf in inputs[:3])
    dense = [x.clone(), w_in[:K].transpose(0, 1).flatten(1), w_out[:K].flatten(0, 1).clone()]
    calls["dense"] = partial(run_dense, *(leaf.requires_grad_() for leaf in dense))
    functions: dict[tuple, Callable] = {
        (what, "forward"): torch.no_grad()(call) for what, call in calls.items()
    }
    functions |= {(what, "both"): partial(run_both, call, d_out) for what, call in calls.items()}
    for side in sides:
        functions["ceiling", side] = partial(
            torch.mm, *torch.randn(2, side, side, device=device).to(dtype)
        )
    median = bench.time(functions, queued=True)
    ceiling = max(2 * side**3 / median["ceiling", side] for side in sides)
    rows: list[list[Any]] = []
    for what, seconds in ((what, median[what, way]) for what, way in median if way == "both"):
        over = [divide(seconds, median.get((base, "both"))) for base in ("dense", "kernels")]
        rate = 12 * N * K * C * H / seconds
        row = [
            what,
            name,
            fullest or None,
            1000 * median[what, "forward"],
            1000 * seconds,
            1000 * bench.host[what, "both"],
            *over,
            rate / 1e12,
            rate / ceiling,
        ]
        rows.append([*row, count_saved_bytes(calls[what]) / 1e6])
    rows.append(["matmul ceiling", name, *[None] * 6, ceiling / 1e12, 1.0, None])
    columns = [
        "implementation",
        "dtype",
        "fullest",
        "forward ms",
        "forward+backward ms",
        "host ms",
        "over dense",
        "over kernels",
    ]
    bench.add_table([*columns, "TFLOP/s", "of ceiling", "saved MB"], rows)
    bench.profile(functions["kernels", "both"], f"kernels, forward and backward, {name}")


def count_saved_bytes(call: partial[Tensor]) -> int:
    """Count the bytes, besides the output's, that a forward pass keeps for the backward pass.

    By allocations: `saved_tensors_hooks` do not see what an autograd.Function keeps in its context.
    """
    if call.args[0].is_cuda:
        before = torch.cuda.memory_allocated()
        out = call()
        return torch.cuda.memory_allocated() - before - out.nbytes
    with torch.profiler.profile(profile_memory=True) as profiler:
        out = call()
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages()) - out.nbytes
