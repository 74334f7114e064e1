"""Devices and ranks: what a rank computes on, and the collectives between ranks."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.cores import count_cores, read_cgroup_limits
from common.text import plural
from configure.command_line import read_rank_variable
from runtime import RankError, RunError

NCCL_MORE = timedelta(minutes=2)  # than train.timeout_minutes; not measured


class GPU(NamedTuple):
    """Numbers from a data sheet."""

    peak: float  # FLOP/s, dense products of float16 that sum in float32
    memory: float  # GiB
    bandwidth: float  # of its memory, bytes/s


# The first key counts that a word of a device's name ends with: L40 is no L4, A1000 no A100, and
# GH200 has an H200's peak. Cards with another clock, NVL and PCIe, come before those without; NVL's
# peak is torchtitan's.
GPUS = {
    "GB200": GPU(2500e12, 186, 8.0e12),
    "B200": GPU(2250e12, 180, 8.0e12),
    "H200 NVL": GPU(835e12, 141, 4.8e12),
    "H200": GPU(989e12, 141, 4.8e12),
    "H100 NVL": GPU(835e12, 94, 3.9e12),
    "H100 PCIe": GPU(756e12, 80, 2.0e12),
    "H100": GPU(989e12, 80, 3.35e12),
    "A100": GPU(312e12, 80, 2.0e12),
    "L40S": GPU(362e12, 48, 0.86e12),
    "L4": GPU(121e12, 24, 0.3e12),
    "T4": GPU(65e12, 16, 0.32e12),
    "3090": GPU(71e12, 24, 0.94e12),
    "4090": GPU(165e12, 24, 1.01e12),
    "5090": GPU(209e12, 32, 1.79e12),
}
VARIANTS = "Ti|D|Laptop"  # of a GeForce card, with a peak of their own


class Ranks(NamedTuple):
    """This rank and the size of the job."""

    rank: int
    world_size: int
    device: torch.device
    local_size: int = 1  # ranks on this node
    # gloo, for small messages between hosts; None on one rank
    control: dist.ProcessGroup | None = None
    timeout: timedelta = timedelta(minutes=10)  # of what devices send


def print_once(text: str) -> None:
    """Print on rank 0 of the job; works before there is a process group."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def local_rank() -> int:
    """Rank within this node, from torchrun's environment; 0 without torchrun."""
    return read_rank_variable("LOCAL_RANK")


def world_size() -> int:
    """Ranks of this job, from torchrun's environment; 1 without torchrun."""
    return read_rank_variable("WORLD_SIZE")


def local_size() -> int:
    """Ranks of this job on this node; 1 without torchrun."""
    return read_rank_variable("LOCAL_WORLD_SIZE")


def pick_device(name: str) -> torch.device:
    """This rank's device for "auto", "cuda" or "cpu". Sets products on CUDA to sum in fp32.

    Raises:
        RankError: it does not exist.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise RankError(
            "train.device = cuda, but torch finds no CUDA device: set --train.device=auto or cpu "
            "(--device, in commands that have it), or install a torch build with CUDA and check "
            "nvidia-smi"
        )
    if local_rank() >= available:
        raise RankError(
            f"rank {local_rank()} of this node has no GPU, there are {available}; set "
            f"--nproc_per_node={available}"
        )
    # cuBLAS must not add parts of a product (split-K) in float16 or bfloat16, which torch allows by
    # default.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device("cuda", local_rank())


def pick_dtype(name: str, device: torch.device, router: str) -> torch.dtype:
    """The compute type for "float16", "bfloat16", "float32" or "auto".

    "auto" is the paper's float16 on CUDA. On a CPU it is bfloat16 with AMX or, if `router` is
    "dense", with AVX-512's bfloat16 instructions, which gain nothing on small experts
    (docs/performance.md); else float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.float16
    cpu = cpu_capabilities()
    has_amx = cpu.get("amx_bf16", False)
    has_avx512 = cpu.get("avx512_bf16", False)
    if has_amx or (has_avx512 and router == "dense"):
        return torch.bfloat16
    return torch.float32


def pick_compile(name: str, device: torch.device) -> bool:
    """True if train.compile = `name` compiles on this device: "auto" does on CUDA."""
    return name == "on" or (name == "auto" and device.type == "cuda")


def cpu_capabilities() -> Mapping[str, Any]:
    """The CPU's name and instruction sets; empty in versions of torch that do not report them."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def set_threads(device: torch.device, recorded: int | None) -> int:
    """Give a run on a CPU its threads: those that it started with. Returns their number.

    Another number of threads rounds sums differently. With several ranks, or with OMP_NUM_THREADS
    or MKL_NUM_THREADS set, the launcher has chosen it.

    Args:
        device: on CUDA nothing is set.
        recorded: the number that the run started with; None: torch's default, but not more than
            the cores that a container's quota allows, for which torch does not look.
    """
    is_set = "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
    default = torch.get_num_threads()
    if device.type == "cuda" or world_size() > 1 or is_set:
        return default
    possible = min(default, count_cores())
    threads = possible if recorded is None else min(recorded, possible)
    if threads < possible:
        print_once(
            f"{plural(threads, 'thread')} of {possible}: as this run began; "
            f"OMP_NUM_THREADS={possible} takes all"
        )
    if threads != default:
        torch.set_num_threads(threads)
    return threads


def device_name(device: torch.device) -> str:
    """The device's product name, such as "NVIDIA H200" or "AMD EPYC"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(cpu_capabilities().get("cpu_name", "CPU"))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device at `dtype`; None if unknown."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    for name, gpu in GPUS.items():
        if re.search(rf"{name}\b(?! ({VARIANTS}))", device_name(device)):
            return gpu.peak
    return None


def memory_bytes(device: torch.device) -> int | None:
    """Memory of a CUDA device, or of a CPU's host for each of its ranks; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    capacity = host_memory_bytes()
    return None if capacity is None else capacity // local_size()


def host_memory_bytes() -> int | None:
    """Memory of this machine, or what its container or job may use; None if unknown."""
    limits = []
    for limit in read_cgroup_limits("memory", "memory.limit_in_bytes", "memory.max"):
        if limit.strip().isdigit():  # else "max"
            limits.append(int(limit))
    with suppress(ValueError, OSError, AttributeError):  # Windows has no sysconf
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def make_deterministic() -> None:
    """Make torch bitwise reproducible, before CUDA is used.

    Operations that cannot be reproducible then raise RuntimeError.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def order_attention_kernels(capability: int, deterministic: bool) -> list[SDPBackend]:
    """Kernels of F.scaled_dot_product_attention on a GPU, in order of preference.

    cuDNN's is the fastest from compute capability 9 on (torch's own choice depends on versions).
    With `deterministic` only flash attention, whose backward pass then sums in a fixed order, and
    plain products remain.
    """
    if deterministic:
        return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if capability >= 9:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return order


@contextmanager
def attention_kernels(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Set the kernels that attention uses on a GPU within this context; on a CPU torch chooses."""
    if device.type != "cuda":
        yield
        return
    capability, _ = torch.cuda.get_device_capability(device)
    with sdpa_kernel(order_attention_kernels(capability, deterministic), set_priority=True):
        yield


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """`value` of each rank of `group` in rank order, on every rank; [value] if group is None."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def any_rank(flags: Sequence[bool], ranks: Ranks) -> list[bool]:
    """For each of `flags`, True if it is set on any rank.

    Waits for the hosts, not for their GPUs.
    """
    if ranks.control is None:
        return list(flags)
    counts = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(counts, group=ranks.control)
    return counts.bool().tolist()


def check_agreement(plan: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise RunError, on all ranks, if a value of `plan` differs between ranks."""
    plans = gather(plan, ranks.control)
    for rank, other in enumerate(plans):
        differences = []
        for name, value in plans[0].items():
            if other.get(name) != value:
                differences.append(f"{name}: {value} (rank 0), {other.get(name)} (rank {rank})")
        if differences:
            raise RunError(
                f"ranks disagree: {'; '.join(differences)}. All nodes need the same config, data, "
                "packages and GPUs, and the same run.dir on a shared file system; or set "
                "--train.dtype or --model.backend"
            )


@contextmanager
def share_errors(ranks: Ranks) -> Iterator[None]:
    """If one rank raises a RunError within this context, raise it on every rank.

    Otherwise the others would wait in their next collective for a rank that has ended.
    """
    error: RunError | None = None
    try:
        yield
    except RunError as caught:
        error = caught
    for message in gather(str(error) if error else None, ranks.control):
        if message:
            raise error or RunError(message)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """`tensor`, summed over all ranks in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = 10) -> Iterator[Ranks]:
    """Join the job's process group for this context: NCCL on CUDA, gloo on CPU; none on one rank.

    A rank that waits longer than `timeout_minutes` for the others fails, and torchrun then ends the
    job. After an error another rank may be lost, so the group is aborted, which does not wait.
    """
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    if world_size() == 1:
        yield Ranks(0, 1, device)
        return
    timeout = timedelta(minutes=timeout_minutes)
    # The hosts wait for a lost rank, too, and say so before NCCL ends the process without a word.
    device_timeout = timeout + NCCL_MORE if on_cuda else timeout
    try:
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            timeout=device_timeout,
            device_id=device if on_cuda else None,
        )
    except ValueError as error:  # without torchrun's variables
        raise RankError(f"{error}; start the {world_size()} ranks with torchrun") from error
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)  # a group of all ranks includes this one
        yield Ranks(
            dist.get_rank(), dist.get_world_size(), device, local_size(), control, device_timeout
        )
    except BaseException:
        _abort_process_group()
        raise
    # Rank 0 may have waited for its tracker, and torchrun kills it 30 s after another rank's end.
    dist.barrier(control)
    dist.destroy_process_group()
