"""Read what a kernel will do from its SASS, NVIDIA's machine code, as `nvdisasm -c` prints it."""

import re
from collections import Counter
from typing import NamedTuple

MMA = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA)[\w.]*")  # tensor cores of 9.0, 8.x, 10.0
SHARED_MEMORY = {80: 164, 90: 228, 100: 228}  # KB of a multiprocessor, of which a block takes 1 more than it asks for
N_REGISTER, N_WARP = 65536, 64  # of a multiprocessor


class Loop(NamedTuple):
    """What a kernel's main loop does, the one with most matrix products.

    Attributes:
        mma: opcode of its matrix products, "" if there are none anywhere.
        n_mma: how many it has.
        n_other: how many other instructions.
        wait: the fewest groups of asynchronous copies (cp.async) that a wait in it leaves in flight: 0 drains the
            pipeline. None where it waits for none: tiles that TMA loads, all tiles at once, or no pipeline at all.
        n_drain: how many waits let no earlier HGMMA still run. ptxas puts one after each HGMMA where other instructions
            write its accumulators within the loop (C7510 to C7515); the PTX does not show it.
    """

    mma: str = ""
    n_mma: int = 0
    n_other: int = 0
    wait: int | None = None
    n_drain: int = 0

    @property
    def serialized(self) -> bool:
        """Whether each of several products waits for the one before."""
        return self.n_mma > 1 and self.n_drain >= self.n_mma


def parse(text: str) -> tuple[list[str], dict[str, int]]:
    """Parse a disassembly: instructions without padding, and {label: index of the instruction after it}."""
    instructions: list[str] = []
    labels = {}
    for line in text.splitlines():
        if match := re.match(r"(\.L\w+):", line):
            labels[match[1]] = len(instructions)
            continue
        match = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", line)
        if match and not re.match(r"NOP|@!PT LDS", match[1]):
            instructions.append(match[1])
    return instructions, labels


def find_loop(text: str) -> Loop:
    """Find the main loop: the smallest with most matrix products, or all between the first and last if unrolled."""
    instructions, labels = parse(text)
    products = [i for i, instruction in enumerate(instructions) if MMA.search(instruction)]
    if not products:
        return Loop()
    end = next((i for i in range(products[-1], len(instructions)) if instructions[i] == "EXIT"), len(instructions))
    loops = []
    for last, instruction in enumerate(instructions[:end]):  # what follows waits for slow barriers, and jumps back
        match = re.search(r"\bBRA\b.*?(\.L\w+)", instruction)
        if match and (first := labels.get(match[1], last + 1)) <= last:
            loops.append((sum(first <= i <= last for i in products), first - last, first, last))
    n_mma, _, first, last = max(loops, default=(0, 0, 0, 0))
    if unrolled := not n_mma:
        n_mma, first, last = len(products), products[0], products[-1]
    body = instructions[first : last + 1]
    name = Counter(match[0] for i in body if (match := MMA.search(i))).most_common(1)[0][0]
    copies = [i for i, instruction in enumerate(body) if "LDGSTS" in instruction]
    end = max(copies, default=0) if unrolled else len(body)  # after the last copy a wait for all is right
    waits = [int(match[1], 16) for i in body[:end] if (match := re.search(r"\bDEPBAR\.LE SB\d, (0x[0-9a-f]+)", i))]
    n_drain = sum(bool(re.search(r"\bDEPBAR\.LE gsb0, 0x0", instruction)) for instruction in body)
    return Loop(name, n_mma, len(body) - n_mma, min(waits, default=None), n_drain)


def count_blocks(sm: int, registers: int, shared: int, warps: int) -> int:
    """Count the blocks that a multiprocessor holds at once.

    Args:
        sm: compute capability, 80, 90 or 100.
        registers: per thread; they are given out in eights.
        shared: bytes of shared memory per block.
        warps: per block.
    """
    by_registers = N_REGISTER // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, SHARED_MEMORY[sm] * 1024 // (shared + 1024), N_WARP // warps)
