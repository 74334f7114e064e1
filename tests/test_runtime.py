"""runtime/distributed.py: devices, compute types and a job of one process."""

import pytest
import torch

from runtime import RunError, distributed


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(2, capability=(8, 0))` makes torch report these devices."""

    def gpus(count, capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    return gpus


def test_pick_device(gpus, monkeypatch):
    gpus(0)
    assert distributed.pick_device("auto") == distributed.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(RunError, match="--train.device=auto"):
        distributed.pick_device("cuda")
    gpus(2)
    assert distributed.pick_device("cpu") == torch.device("cpu")
    assert distributed.pick_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.pick_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RunError, match="rank 2 .*--nproc_per_node=2"):
        distributed.pick_device("auto")


@pytest.mark.parametrize(
    "capabilities, dtype",
    [
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_f": True, "amx_bf16": False}, torch.float32),
    ],
)
def test_dtype_auto_on_a_cpu(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(distributed, "cpu_capabilities", lambda: capabilities)
    assert distributed.pick_dtype("auto", torch.device("cpu")) == dtype
    assert distributed.pick_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_dtype_auto_on_a_gpu(gpus, capability, dtype):
    gpus(1, capability)
    assert distributed.pick_dtype("auto", torch.device("cuda", 0)) == dtype


def test_cpu_without_capabilities_computes_in_float32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert distributed.pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert distributed.device_name(torch.device("cpu")) == "CPU"


def test_peak_flops_are_known_for_some_devices(gpus):
    gpus(1)
    assert distributed.peak_flops(torch.device("cuda", 0), torch.bfloat16) == 989e12
    assert distributed.peak_flops(torch.device("cuda", 0), torch.float32) is None
    assert distributed.peak_flops(torch.device("cpu"), torch.bfloat16) is None
    gpus(1, name="Some New Device")
    assert distributed.peak_flops(torch.device("cuda", 0), torch.float16) is None


def test_one_process_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with distributed.process_group(torch.device("cpu")) as ranks:
        assert ranks == (0, 1, torch.device("cpu"), 1, None)
        assert not torch.distributed.is_initialized()
        assert distributed.sum_over_ranks(torch.tensor(3.0)) == 3
