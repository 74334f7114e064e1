"""What this process may use of its machine: cores, and the limits of its control groups."""

import os
from contextlib import suppress
from pathlib import Path

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def count_cores() -> int:
    """The number of cores that this process may use, by its affinity and its container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # `docker run --cpus=2`: "200000 100000"; in version 1 "200000", of a period of 100,000 µs
    for limit in read_cgroup_limits("cpu", "cpu.cfs_quota_us", "cpu.max"):
        quota, *period = limit.split()
        if quota.isdigit():  # else "max", or "-1"
            cores = min(cores, max(1, round(int(quota) / int(*period or [100_000]))))
    return cores


def read_cgroup_limits(controller: str, old_name: str, name: str) -> list[str]:
    """The limits of the control groups that this process is in, and of those above, as they are.

    Args:
        controller: of version 1, such as memory.
        old_name: of its file.
        name: of the file in version 2.
    """
    limits = []
    with suppress(OSError, ValueError):  # no Linux, or lines of another form
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)  # NUMBER:CONTROLLERS:/PATH; 2 names none
            if controllers and controller not in controllers.split(","):  # such as cpu,cpuacct
                continue
            path = CGROUPS / controllers / group.lstrip("/")
            # a container may not see its own group below the root, which then has its limit
            for folder in (path, *path.parents):
                with suppress(OSError):
                    limits.append((folder / (old_name if controllers else name)).read_text())
    return limits
