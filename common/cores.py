"""How many cores this process may use, and how many of them other processes leave to it."""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")  # Linux alone


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_idle_seconds() -> float | None:
    """Seconds that the cores of this process have been idle since the machine started, summed; None if unknown."""
    if not STAT.exists():
        return None
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    cores = [
        fields
        for fields in map(str.split, STAT.read_text().splitlines())
        if fields and fields[0] in own
    ]
    return sum(int(idle) + int(waiting) for _, _, _, _, idle, waiting, *_ in cores) / os.sysconf(
        "SC_CLK_TCK"
    )


BEGAN = time.monotonic(), time.process_time(), read_idle_seconds()


def count_free_cores() -> int | None:
    """Cores that no other process has used since this module was imported, 1 at least; None if unknown.

    They were idle, or this process used them.
    """
    began, own, idle = BEGAN
    idle_now, seconds = read_idle_seconds(), time.monotonic() - began
    if idle is None or idle_now is None or seconds <= 0:
        return None
    free = (idle_now - idle + time.process_time() - own) / seconds
    return min(max(round(free), 1), count_cores())
