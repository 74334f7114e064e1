"""Training on a GPU: on one rank of DDP and FSDP2, resumed, compiled, in float16.

Where possible the tests also run on the CPU, with gloo instead of NCCL, so that errors of a test
show without a GPU.
"""

import math
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from numerics import SEED, assert_near, tolerance
from runs import checkpoints, column, end, run, steps
from torch.nn.parallel import DistributedDataParallel

from model import GPT
from runtime import checkpoint
from runtime import state as train_state
from runtime.distributed import Ranks, attention_kernels
from runtime.parallel import distribute
from runtime.updates import Updates

ON_GPU = pytest.param("cuda", "float16", marks=[pytest.mark.gpu])
ON_GPU_BF16 = pytest.param("cuda", "bfloat16", marks=[pytest.mark.gpu])
DEVICES = [("cpu", "float32"), ON_GPU, ON_GPU_BF16]
STEPS = 6


@pytest.fixture
def on(tiny):
    """`on(device, dtype, *overrides)` makes a Config; nothing is compiled, unless overrides ask for
    it.
    """
    own = "train.compile=off"
    return lambda device, dtype, *more: tiny(
        f"train.device={device}", f"train.dtype={dtype}", own, *more
    )


@pytest.fixture
def one_rank():
    """A process group of one rank: NCCL if there is a GPU, else gloo."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def learn(config, dtype, wrap):
    """Train the model that `wrap` returns for some steps; return the losses."""
    device = torch.device(config.train.device)
    torch.manual_seed(SEED)
    model = GPT(config.model)
    runner = wrap(model, Ranks(0, 1, device))
    optimizer = train_state.build_optimizer(model, config.optim)
    updates = Updates(optimizer, config.optim.grad_clip, dtype == torch.float16)
    x = torch.arange(4 * 33, device=device).view(4, 33) * 7 % 251
    losses = []
    for step in range(STEPS):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = runner(x[:, :-1], x[:, 1:])[1]
        (loss * updates.scale).backward()
        updates.step(step, 1e-2, loss.detach())
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


def assert_alike(losses, wanted, dtype):
    """Assert that losses, each a mean over at least 128 tokens, differ by rounding alone.

    A token passes through about ten operators of two blocks in `dtype` in each step. Each errs by
    ε/2 at most, one way or the other: √(10 · STEPS) ε/2 for a token, √128 times less for a mean;
    four times that for room. Sums over 257 logits, in float32, err once a step.
    """
    roundings = 2 * math.sqrt(10 * STEPS / 128)
    assert_near(
        torch.tensor(losses), torch.tensor(wanted), tolerance(dtype, 257 * STEPS, roundings)
    )


@pytest.mark.numerics
@pytest.mark.parametrize("device, dtype", [("cpu", "float16"), ("cpu", "bfloat16"), *DEVICES])
def test_ddp_and_fsdp_on_one_rank_learn_as_the_model_alone_does(on, one_rank, device, dtype):
    """And as in float32. FSDP2 starts from weights on the CPU, as in train.py."""
    config, dtype = on(device, dtype), getattr(torch, dtype)

    def alone(model, ranks):
        return model.to(device)

    def copied(model, ranks):
        return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)

    def sharded(model, ranks):
        return distribute(model, "fsdp", ranks, dtype)

    wanted = learn(config, dtype, alone)
    assert wanted[-1] < wanted[0] - 0.5
    assert_alike(wanted, learn(config, torch.float32, alone), dtype)
    for wrap in (copied, sharded):
        assert_alike(learn(config, dtype, wrap), wanted, dtype)


@pytest.mark.parametrize("router", ["kern", "dense"])
@pytest.mark.parametrize("device, dtype", DEVICES)
def test_resumed_run_is_bit_equal(on, device, dtype, router, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    own = [
        f"model.router={router}",
        "model.dropout=0.1",
        "train.max_steps=6",
        "train.checkpoint_interval=3",
    ]
    config = on(device, dtype, *own, "train.keep_checkpoints=9", "train.deterministic=true")
    try:
        run(config)
        whole = end(config)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert steps(config) == [3, 6]
        shutil.rmtree(checkpoint.folder_of(checkpoints(config), 6))
        run(config)
        assert steps(config) == [3, 6] and end(config) == whole
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_compiled_run_learns_as_an_eager_one_does(on, dtype):
    losses = []
    for compile in ("false", "true"):
        torch._dynamo.reset()
        own = [f"train.compile={compile}", f"run.name={compile}", f"train.max_steps={STEPS}"]
        losses.append(column(run(on("cuda", dtype, *own)), "val/loss"))
    assert_alike(*losses, getattr(torch, dtype))
    assert len(losses[0]) > 1


@pytest.mark.gpu
def test_the_kernels_that_run_are_those_meant_for_the_device(on):
    """Experts by Triton; attention by cuDNN from sm_90 on, else by flash attention; with
    determinism never by cuDNN.
    """
    device, (capability, _) = torch.device("cuda"), torch.cuda.get_device_capability()
    model = GPT(on("cuda", "float16").model).to(device)
    x = torch.zeros(2, 16, dtype=torch.int64, device=device)
    kernels = {"up_kernel", "rows", "down_grad_kernel", "weight_grad_kernel"}
    for deterministic in (False, True):
        with torch.profiler.profile() as profile, attention_kernels(device, deterministic):
            with torch.autocast("cuda", torch.float16):
                model(x, x).loss.backward()
            torch.cuda.synchronize()
        names = " ".join(event.key for event in profile.key_averages())
        assert all(kernel in names for kernel in kernels)
        assert ("cudnn_attention" in names) == (capability >= 9 and not deterministic)
        assert ("flash_attention" in names) == (capability < 9 or deterministic)
