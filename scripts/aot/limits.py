"""What a kernel may not fall below: rules, and a row per kernel with the least over all shapes in half precision."""

from scripts.aot.launches import Kernel

SHARED = {80: 99, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KB a block may have; 8.0 shares its tiles with 8.6
MMA = {90: "HGMMA", 100: "UTCHMMA"}  # the tensor-core instruction of half precision; HMMA of the others
COLUMNS = {90: 1, 100: 2}  # of LEAST; 0 of the others

# Of sm_80 (with 86, 89 and 120), sm_90 and sm_100: the least blocks on a multiprocessor, and, where cp.async loads the
# tiles, the least loads in flight (Kernel.wait). The longest name that a kernel's begins with counts.
LEAST = {
    "count": [(10, 10, 12)],
    "place": [(2, 2, 2)],
    "table": [(42, 36, 36)],
    "combine": [(12, 16, 12)],
    "up": [(1, 2, 2), (4, 2, 2)],
    "up+gated": [(1, 1, 1), (4, 1, 1)],
    "rows": [(1, 1, 1), (4, 2, 2)],
    "down_grad": [(2, 2, 2), (2, 2, 2)],
    "weight_grad": [(2, 1, 1), (2, 2, 2)],
    "softmax": [(1, 2, 2)],
    "route": [(4, 4, 4)],
    "route_sum": [(5, 6, 6)],
    "add_norm": [(6, 6, 6)],
    "add_norm_grad": [(3, 3, 3)],
}
# The most bytes of registers that a kernel may spill, but for the 125m model's on sm_90.
SPILLED = {"down_grad": 16, "place": 8, "up": 16}


def find_faults(kernel: Kernel, sm: int, shape: str, half: bool) -> list[str]:
    """Find what is wrong with a kernel of this shape of SHAPES, in `half` precision or in float32 (no tensor cores)."""
    faults = []
    function, column = kernel.name.partition("+")[0], COLUMNS.get(sm, 0)
    if kernel.spilled > (0 if (shape, sm) == ("125m", 90) else SPILLED.get(function, 0)):
        faults.append(f"spills {kernel.spilled} B")
    if kernel.shared > SHARED[sm] * 1024:
        faults.append("too much shared memory")
    if not half:
        return faults
    rows = sorted(filter(kernel.name.startswith, LEAST), key=len)
    if not rows:
        return [*faults, "no row in LEAST of scripts/aot/limits.py: add it"]
    blocks, *loads = LEAST[rows[-1]]
    if kernel.blocks < blocks[column]:
        faults.append(f"blocks < {blocks[column]}")
    if kernel.wait is not None and kernel.wait < loads[0][column]:
        faults.append(f"wait < {loads[0][column]}")
    mma = MMA.get(sm, "HMMA")
    if kernel.mma is not None and not kernel.mma.startswith(mma):
        faults.append(f"no {mma}")
    if kernel.serialized:
        faults.append("serialised products")
    return faults
