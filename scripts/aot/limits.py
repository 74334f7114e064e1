"""What a kernel may not fall below: rules, and a row per kernel with the least over all shapes in half precision."""

from scripts.aot.launches import Kernel

SHARED = {80: 99, 90: 227, 100: 227}  # KB a block may have; 99 is the limit of compute capability 8.6, 8.9 and 12.0
MMA = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # the tensor-core instruction of half precision

# The least blocks on a multiprocessor of sm_80, sm_90 and sm_100. The longest name that a kernel's begins with counts.
BLOCKS = {
    "count": (10, 10, 12),
    "place": (2, 2, 2),
    "table": (42, 36, 36),
    "combine": (16, 16, 12),
    "up": (1, 2, 2),
    "up+gated": (1, 1, 1),
    "rows": (1, 1, 1),
    "down_grad": (2, 2, 2),
    "weight_grad": (2, 1, 1),
    "softmax": (2, 3, 3),
    "route": (4, 4, 4),
    "route_sum": (5, 6, 6),
}
# Where cp.async loads the tiles: the least loads in flight when the main loop waits. TMA's waits are not seen.
IN_FLIGHT = {
    "up": (4, 2, 2),
    "up+gated": (4, 1, 1),
    "rows": (4, 2, 2),
    "down_grad": (2, 2, 2),
    "weight_grad": (2, 2, 2),
}
# Known faults. At other shapes than the 125m model's some kernels spill up to four registers.
SPILLED = {"down_grad": 16, "place": 8, "up": 16}  # bytes
SERIALIZED = {"rows_ahead": 90}


def find_limit(table: dict[str, tuple[int, int, int]], name: str, sm: int) -> int | None:
    """The limit of a kernel in a table, by the longest key that its name begins with; None if there is none."""
    known = max((key for key in table if name.startswith(key)), key=len, default=None)
    return None if known is None else table[known][list(SHARED).index(sm)]


def find_faults(kernel: Kernel, sm: int, shape: str, half: bool) -> tuple[list[str], list[str]]:
    """Find what is wrong with a kernel.

    Args:
        kernel: what was compiled.
        sm: compute capability, a key of SHARED.
        shape: a key of launches.SHAPES.
        half: whether it computes in float16 or bfloat16; float32 takes no tensor cores and has no limits.

    Returns:
        Faults, and those that are known.
    """
    faults, known = [], []
    function = kernel.name.partition("+")[0]
    if kernel.spilled:
        admitted = 0 if shape == "125m" and sm != 80 else SPILLED.get(function, 0)
        (known if kernel.spilled <= admitted else faults).append(f"spills {kernel.spilled} B")
    if kernel.shared > SHARED[sm] * 1024:
        faults.append("too much shared memory")
    if not half:
        return faults, known
    least = find_limit(BLOCKS, kernel.name, sm)
    if least is None:
        faults.append("no row in BLOCKS of scripts/aot/limits.py: add it")
    elif kernel.blocks < least:
        faults.append(f"blocks < {least}")
    if kernel.loop is None:
        return faults, known
    if not kernel.loop.mma.startswith(MMA[sm]):
        faults.append(f"no {MMA[sm]}")
    least = find_limit(IN_FLIGHT, kernel.name, sm)
    if kernel.loop.wait is not None and least is not None and kernel.loop.wait < least:
        faults.append(f"wait < {least}")
    if kernel.loop.serialized:
        (known if SERIALIZED.get(function) == sm else faults).append("serialised products")
    return faults, known
