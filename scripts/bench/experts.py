"""`scripts.bench moe` and `tune`: the experts' kernels against what one would write without them, and their tiles."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from runtime import RunError, distributed
from scripts.bench.tools import DTYPES, Report, in_turns, is_hopper, medians, over, usable

DEFAULT = {"cuda": (16384, 768, 384, 64, 8), "cpu": (4096, 256, 128, 64, 8)}  # N C H E K: 2,048 and 512 rows an expert
CEILING = {"cuda": (4096, 6144, 8192), "cpu": (1024, 2048)}  # sides of square products


# ---- alternatives, all with the arguments of `kernels.expert_mlp`


def grouped_mm(x, w_in, w_out, weights, experts):
    """Rows sorted by expert, torch's grouped product, rows put back: what one writes in plain torch today."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    ends = loads.cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.gelu(F.grouped_mm(rows, w_in, offs=ends)), w_out, offs=ends)
    return put_back(y, order, weights)


def loop(x, w_in, w_out, weights, experts):
    """One pair of products an expert. The host waits for the loads."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    parts = zip(rows.split(loads.tolist()), w_in.unbind(), w_out.unbind(), strict=True)
    return put_back(torch.cat([F.gelu(part @ w1) @ w2 for part, w1, w2 in parts]), order, weights)


def padded_bmm(x, w_in, w_out, weights, experts):
    """One batched product, every expert filled up to the largest load. The host waits for that."""
    rows, order, loads = sort_rows(x, experts, len(w_in))
    most = int(loads.max())
    first = loads.cumsum(0) - loads
    owner = experts.flatten()[order]
    slot = torch.arange(len(order), device=x.device) + (torch.arange(len(loads), device=x.device) * most - first)[owner]
    filled = rows.new_zeros(len(loads) * most, rows.shape[1]).index_copy(0, slot, rows)
    y = torch.bmm(F.gelu(torch.bmm(filled.view(len(loads), most, -1), w_in)), w_out)
    return put_back(y.flatten(0, 1).index_select(0, slot), order, weights)


def sort_rows(x, experts, n_expert):
    """(x of each row, the rows' places in (N, K), each expert's load); rows lie by expert."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    loads = torch.zeros(n_expert, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    return x.index_select(0, order // experts.shape[1]), order, loads


def put_back(rows, order, weights):
    """(N, C): each token's rows times their gates, summed."""
    N, K = weights.shape
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = rows.index_select(0, inverse).view(N, K, -1)
    return (rows * weights.unsqueeze(-1).to(rows.dtype)).sum(1)


def torch_backend(x, w_in, w_out, weights, experts):
    return kernels.expert_mlp(x, w_in, w_out, weights, experts, "torch")


ALTERNATIVES = {
    "kernels": kernels.expert_mlp,
    "torch backend": torch_backend,  # on a CPU that is what the kernels are
    "F.grouped_mm": grouped_mm,
    "loop": loop,
    "padded bmm": padded_bmm,
}
MAY_FAIL = ("torch backend", "F.grouped_mm", "loop", "padded bmm")  # not every device has them in every dtype


def dense(x, w1, w2):
    """One MLP of as many FLOPs: hidden width K·H."""
    return F.gelu(x @ w1) @ w2


# ---- moe


def problem(shape, dtype, device):
    """([x, w_in, w_out, weights, experts], the output's gradient): random, of about equal loads."""
    N, C, H, E, K = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(*size, std=1.0, dtype=dtype):
        return (torch.randn(*size, generator=generator, device=device) * std).to(dtype)

    scores, experts = random(N, E, dtype=torch.float32).softmax(-1).topk(K)
    leaves = [random(N, C), random(E, C, H, std=C**-0.5), random(E, H, C, std=H**-0.5), scores]
    return [leaf.requires_grad_() for leaf in leaves] + [experts], random(N, C)


def bench_moe(args, overrides):
    device = distributed.pick_device(args.device)
    shape = pick_shape(args, overrides, device)
    N, C, H, E, K = shape
    columns = {"implementation": "<14", "dtype": "<8", "forward ms": ".3f", "forward+backward ms": ".3f"}
    columns |= {"over dense": ".3f", "over kernels": ".3f", "TFLOP/s": ".3f", "of ceiling": ".1%", "saved MB": ".1f"}
    report = Report(args, [], device, f"N {N}, C {C}, H {H}, E {E}, K {K}", columns)
    names = args.dtype or (["float16", "bfloat16"] if device.type == "cuda" else ["float32", "bfloat16"])
    for name, dtype in usable(names, device, report.skipped).items():
        moe_rows(report, shape, name, dtype, args.rounds)
    sides = ", ".join(map(str, CEILING[device.type]))
    print(f"FLOPs: 4·N·K·C·H forward, thrice that with backward. ceiling: the fastest square product of side {sides}")
    print("saved MB: what the graph keeps for the backward pass, inputs left out")


def moe_rows(report, shape, name, dtype, rounds):
    N, C, H, E, K = shape
    device = report.device
    inputs, d_out = problem(shape, dtype, device)
    x, w_in, w_out = (leaf.detach() for leaf in inputs[:3])
    w1, w2 = w_in[:K].transpose(0, 1).flatten(1), w_out[:K].flatten(0, 1).clone()
    calls = {what: (f, inputs) for what, f in ALTERNATIVES.items() if device.type == "cuda" or what != "torch backend"}
    calls["dense"] = dense, [leaf.requires_grad_() for leaf in (x.clone(), w1, w2)]

    @torch.no_grad()
    def forward(what):
        f, inputs = calls[what]
        f(*inputs)

    def both(what):
        f, inputs = calls[what]
        torch.autograd.grad(f(*inputs), [leaf for leaf in inputs if leaf.requires_grad], d_out)

    functions = {(what, way.__name__): partial(way, what) for what in calls for way in (forward, both)}
    for side in CEILING[device.type]:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        functions["ceiling", side] = partial(torch.mm, a, b)
    may_fail = [key for key in functions if key[0] in MAY_FAIL]
    median = medians(in_turns(functions, rounds, device, may_fail, report))
    ceiling = max(2 * side**3 / median["ceiling", side] for side in CEILING[device.type])
    flops = 12 * N * K * C * H
    seconds = {what: median[what, "both"] for what in calls if (what, "both") in median}
    for what, time in seconds.items():
        f, inputs = calls[what]
        ratios = [over(time, seconds.get("dense")), over(time, seconds.get("kernels"))]
        report.row(
            [what, name, 1000 * median[what, "forward"], 1000 * time, *ratios]
            + [flops / time / 1e12, flops / time / ceiling, saved_bytes(f, inputs) / 1e6]
        )
    report.row(["matmul ceiling", name, None, None, None, None, ceiling / 1e12, 1.0, None])
    moe_goals(report, shape, name, seconds, flops / ceiling)
    report.profile(partial(both, "kernels"), f"kernels, forward and backward, {name}")
    report.trace = None  # of the first dtype alone


def moe_goals(report, shape, name, seconds, least_time):
    """`least_time` is what the FLOPs take at the ceiling's rate."""
    ours, grouped = seconds.get("kernels"), seconds.get("F.grouped_mm")
    if is_hopper(report.device) and shape[0] * shape[4] >= 2048 * shape[3]:
        if name != "float32":
            report.goal(f"kernels' share of the matmul ceiling in {name}", over(least_time, ours), least=0.6)
        if name in (least := {"float16": 3, "bfloat16": 1.3}):
            if grouped is None:
                print(f"goal: F.grouped_mm over kernels in {name} >= {least[name]}: it does not run here", flush=True)
            report.goal(f"F.grouped_mm over kernels in {name}", over(grouped, ours), least=least[name])
    if report.device.type == "cpu" and shape == DEFAULT["cpu"]:
        if name in (most := {"bfloat16": 2.2, "float32": 1.6}):
            report.goal(f"kernels over dense in {name}", over(ours, seconds.get("dense")), most=most[name])
        if name == "bfloat16":
            report.goal(f"F.grouped_mm over kernels in {name}", over(grouped, ours), least=1.7)
            report.goal(f"loop over kernels in {name}", over(seconds.get("loop"), ours), least=1.7)


class Storages(TorchDispatchMode):
    """Weak references to every storage that operators within return."""

    def __init__(self):
        super().__init__()
        self.found = {}  # address of the storage object: (reference, bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.found[reference.cdata] = (reference, storage.nbytes())
        return out


def saved_bytes(function, inputs):
    """Bytes of neither inputs nor output that stay after a forward pass, because its graph needs them.

    Counted by storage, and not by `saved_tensors_hooks`, which do not see what an autograd.Function keeps by itself.
    """
    with Storages() as storages:
        out = function(*inputs)
    given = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in [out, *inputs]}
    left = [(key, size) for key, (reference, size) in storages.found.items() if not reference.expired()]
    return sum(size for key, size in left if key not in given)


# ---- tune

# Rows, columns, depth, warps, stages; tried besides the present ones. What takes more shared memory than there is, is
# skipped.
TILES = [
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (64, 256, 64, 8, 3),
    (64, 128, 64, 4, 4),
    (128, 128, 32, 8, 4),
]
WORTH = 0.98  # of the present time, else a tile stays as it is


def bench_tune(args, overrides):
    device = distributed.pick_device(args.device)
    shape = pick_shape(args, overrides, device)
    N, C, H, E, K = shape
    (dtype, *others) = args.dtype or ["float16"]
    if others or dtype == "float32":
        raise RunError("tune takes one of float16 and bfloat16, which share their tiles")
    if why := kernels.what_stops_triton(device, DTYPES[dtype]):
        raise RunError(f"tune times the triton kernels, and triton {why}")
    from kernels import triton_experts as ours

    columns = {"kernel": "<12", "tile": "<20", "timed": "<11", "ms": ".3f", "over present": ".3f"}
    report = Report(args, [], device, f"{dtype}, N {N}, C {C}, H {H}, E {E}, K {K}", columns)
    table = ours.TILES.get(ours.major(device), ours.TILES[8])
    before = dict(table)
    inputs, d_out = problem(shape, DTYPES[dtype], device)
    inputs = [tensor.detach() for tensor in inputs]
    x, w_in, w_out, weights = inputs[:4]
    kept = hidden, order, _, offsets = ours.forward(*inputs)[1:]
    largest = offsets.diff().argsort(descending=True)

    def forward():
        ours.forward(*inputs)

    def backward():
        ours.backward(d_out, x, w_in, w_out, weights, *kept)

    def rows():
        ours.multiply_rows(hidden, w_out, offsets, False)

    def weight_grad():
        ours.weight_grad(x, hidden, order, offsets, largest, K, gather_a=True)

    timed = {"up": forward, "rows": rows, "down_grad": backward, "weight_grad": weight_grad}

    def with_tile(kernel, tile, function):
        table[kernel] = tile
        function()

    try:
        for kernel, function in timed.items():
            tiles = dict.fromkeys([before[kernel], *(ours.Tile(*tile) for tile in TILES)])
            functions = {(kernel, *tile): partial(with_tile, kernel, tile, function) for tile in tiles}
            median = medians(in_turns(functions, args.rounds, device, list(functions)[1:], report))
            now, best = median[kernel, *before[kernel]], min(median, key=median.get)
            for (_, *tile), time in sorted(median.items(), key=lambda item: item[1]):
                report.row([kernel, ", ".join(map(str, tile)), function.__name__, 1000 * time, time / now])
            report.go_on()
            table[kernel] = ours.Tile(*best[1:]) if median[best] < WORTH * now else before[kernel]
        chosen = dict(table)
    finally:
        table.update(before)
    print(f"for kernels/triton_experts.py, TILES[{ours.major(device)}]; then see `python -m scripts.aot` for spills:")
    for kernel, tile in chosen.items():
        line = f'"{kernel}": Tile({", ".join(map(str, tile))}),'
        print(f"        {line}{'' if tile == before[kernel] else '  # changed'}")


def pick_shape(args, overrides, device):
    """(N, C, H, E, K) of the arguments, by default that of the device."""
    if overrides:
        raise RunError(f"unknown options {' '.join(overrides)}: {args.what} takes no config keys")
    given = args.tokens, args.n_embd, args.expert_hidden, args.n_expert, args.top_k
    shape = tuple(default if size is None else size for size, default in zip(given, DEFAULT[device.type], strict=True))
    if min(shape) < 1 or shape[4] > shape[3]:
        raise RunError(f"--top-k {shape[4]} must be at most --n-expert {shape[3]}, and all sizes at least 1")
    return shape
