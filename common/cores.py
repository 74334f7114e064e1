"""The number of cores that this process may use, and of cores that other processes leave free."""

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")  # exists on Linux only


def count_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CoreTimes(NamedTuple):
    """Seconds on three clocks."""

    wall: float
    used: float  # seconds used by this process, summed over cores
    idle: float | None  # idle seconds of this process's cores, summed; None if unknown


def read_times() -> CoreTimes:
    """The three clocks now."""
    return CoreTimes(time.monotonic(), time.process_time(), read_idle_seconds())


def read_idle_seconds() -> float | None:
    """Idle seconds of this process's cores since the machine started, summed; None if unknown."""
    if not STAT.exists():
        return None
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in STAT.read_text().splitlines():
        fields = line.split()
        if fields and fields[0] in own:
            ticks += int(fields[4]) + int(fields[5])  # idle, and idle while a disk is awaited
    return ticks / os.sysconf("SC_CLK_TCK")


AT_IMPORT = read_times()


def count_free_cores() -> int | None:
    """Cores that no other process has used since this module was imported; None if unknown.

    They were idle, or this process used them. At least 1.
    """
    now = read_times()
    seconds = now.wall - AT_IMPORT.wall
    if now.idle is None or AT_IMPORT.idle is None or seconds <= 0:
        return None
    used = now.used - AT_IMPORT.used
    idle = now.idle - AT_IMPORT.idle
    return min(max(round((idle + used) / seconds), 1), count_cores())
