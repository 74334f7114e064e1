"""What a kernel may not fall below: scripts/aot/pinned.csv, figures of today's kernels by Triton version and shape.

A row holds the worse of float16 and bfloat16; a kernel in float32 has a row only where it spills.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from scripts.aot.launches import Kernel

FILE = Path(__file__).with_name("pinned.csv")
KEY = ("triton", "sm", "shape", "kernel")
FIGURES = ("tile", "mma", "blocks", "buffers", "wait", "other", "spilled")
SHARED = {80: 99, 90: 227, 100: 227}  # KB a block may have; 99 is the limit of compute capability 8.6, 8.9 and 12.0
SLACK = 1.25  # times the pinned number of other instructions

Key = tuple[str, ...]
Row = dict[str, str]


def read_pins() -> dict[Key, Row]:
    """Read the pinned figures, by Triton version, compute capability, shape and kernel."""
    with FILE.open(newline="") as file:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(file)}


def write_pins(pins: dict[Key, Row]) -> None:
    """Write them, sorted."""
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, KEY + FIGURES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(pins[key] for key in sorted(pins))


def make_row(key: Key, kernels: Sequence[Kernel]) -> Row:
    """Make a row of the worse of the kernels of the types that share it, with the larger spill of all."""
    spilled = max(kernel.spilled for kernel in kernels)
    worst = max(kernels, key=lambda kernel: (-kernel.blocks, -kernel.buffers, -find_wait(kernel), kernel.other or 0))
    mma = worst.loop.mma.partition(".")[0] if worst.loop else ""
    wait = worst.loop.wait if worst.loop else None
    values = (worst.tile, mma, worst.blocks, worst.buffers, wait, worst.other, spilled)
    return dict(zip(KEY + FIGURES, [*key, *("" if value is None else str(value) for value in values)], strict=True))


def find_wait(kernel: Kernel) -> int:
    """Copies in flight after a wait in the main loop; where nothing waits, more than any."""
    return 99 if kernel.loop is None or kernel.loop.wait is None else kernel.loop.wait


def find_faults(kernel: Kernel, sm: int, half: bool, pin: Row | None) -> tuple[list[str], list[str]]:
    """Find what is wrong with a kernel: (faults, faults that its pin admits).

    Args:
        kernel: what was compiled.
        sm: compute capability.
        half: whether it computes in float16 or bfloat16. Only then tensor cores and most pins count.
        pin: its pinned figures; None for a new kernel.
    """
    faults, known = [], []
    if kernel.spilled:
        admitted = pin is not None and kernel.spilled <= int(pin["spilled"])
        (known if admitted else faults).append(f"spills {kernel.spilled} B")
    if kernel.shared > SHARED[sm] * 1024:
        faults.append("too much shared memory")
    if not half:
        return faults, known
    if kernel.loop is not None and not kernel.loop.mma:
        faults.append("no MMA")
    if find_wait(kernel) == 0:
        (known if pin is not None and pin["wait"] == "0" else faults).append("waits for all loads")
    if pin is None:
        return [*faults, "not pinned"], known
    if kernel.blocks < int(pin["blocks"]):
        faults.append(f"blocks < {pin['blocks']}")
    if kernel.buffers < float(pin["buffers"]):
        faults.append(f"buffers < {pin['buffers']}")
    if pin["wait"] and find_wait(kernel) < int(pin["wait"]):
        faults.append(f"wait < {pin['wait']}")
    if pin["mma"] and kernel.loop and kernel.loop.mma.partition(".")[0] != pin["mma"]:
        faults.append(f"not {pin['mma']}")
    if pin["other"] and (kernel.other or 0) > SLACK * int(pin["other"]):
        faults.append(f"other > {SLACK} x {pin['other']}")
    return faults, known
