"""Processes and devices: who this rank is, what it computes on, sums over all ranks, and what they agree upon."""

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from runtime import RankError, RunError

# Dense bfloat16 or float16 peak of a device, FLOP/s, from data sheets; the first name found in the device name holds.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


class Ranks(NamedTuple):
    rank: int
    world_size: int
    device: torch.device
    local_size: int = 1  # ranks on this node
    control: dist.ProcessGroup | None = None  # gloo, for a few words between ranks that are no work for a GPU


def world_size():
    """Ranks of this job, as torchrun tells them; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_size():
    """Ranks of this job on this node; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def pick_device(name):
    """The device of this rank for "auto", "cuda" or "cpu". Raises RunError if there is no such device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise RankError(
            "cuda was asked for, but torch finds no CUDA device here; set --train.device=auto or cpu (--device, where "
            "the command has that), or install a torch build with CUDA and check nvidia-smi"
        )
    if local_rank >= available:
        raise RankError(
            f"rank {local_rank} of this node has no GPU, there are {available}; set --nproc_per_node={available}"
        )
    return torch.device("cuda", local_rank)


def pick_dtype(name, device):
    """The torch.dtype of "float16", "bfloat16", "float32", or "auto": bfloat16 where `device` multiplies it fast, else
    float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        cpu = cpu_capabilities()
        fast = cpu.get("amx_bf16", False) or cpu.get("avx512_bf16", False)
    return torch.bfloat16 if fast else torch.float32


def cpu_capabilities():
    """What the CPU can do, by name; empty where torch cannot tell."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def device_name(device):
    """Such as "NVIDIA H200" or "AMD EPYC"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(cpu_capabilities().get("cpu_name", "CPU"))


def peak_flops(device, dtype):
    """Peak FLOP/s of one device at `dtype`, or None where it is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name(device)), None)


def memory_bytes(device):
    """Memory of a CUDA device; None for a CPU, which swaps."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def start(device, timeout_minutes=10):
    """Join the process group if there is more than one rank: NCCL on CUDA, gloo on CPU. Returns Ranks.

    A rank that waits for the others longer than the timeout fails, and torchrun then ends the job. Raises RunError if
    NCCL is missing.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size() == 1:
        return Ranks(0, 1, device)
    if device.type == "cuda" and not dist.is_nccl_available():
        raise RunError(
            "many ranks on CUDA devices need NCCL, which this torch was built without; install a torch build for Linux "
            "with CUDA, or start one rank"
        )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(minutes=timeout_minutes),
        device_id=device if device.type == "cuda" else None,
    )
    control = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
    return Ranks(dist.get_rank(), dist.get_world_size(), device, local_size(), control)


def be_deterministic():
    """Ask torch for the same bits each time, on CUDA too; an operation that cannot give them raises RuntimeError. Call
    it before CUDA is touched."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def gather(value, group):
    """[`value` of each rank], on every rank of `group`; alone without one."""
    if group is None:
        return [value]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


def any_rank(flags, ranks):
    """`flags`, some bools, each true on all ranks if it is on one. Waits for the hosts, not for their GPUs."""
    if ranks.control is None:
        return flags
    sums = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(sums, group=ranks.control)
    return [bool(count) for count in sums.tolist()]


def agree(what, ranks):
    """Raises RunError, on all ranks, if `what`, a few words, is not the same on all of them."""
    found = gather(what, ranks.control)
    for rank, words in enumerate(found):
        if words != found[0]:
            raise RunError(
                f"ranks disagree: {found[0]} (rank 0), {words} (rank {rank}). All nodes need the same config, the same "
                f"run.dir on a shared file system, and the same GPUs; or set --train.parallel"
            )


def sum_over_ranks(tensor):
    """`tensor`, summed over all ranks in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()
