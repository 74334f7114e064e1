"""runtime/: devices, compute types, ranks that agree, evaluation split across ranks, memory,
sharding, compiling.
"""

import os
import re
import signal
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from numerics import Operators
from runs import run
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from data import DataError
from model import GPT
from runtime import RankError, RunError, Stopped, distributed, launch, parallel
from runtime.distributed import Ranks
from runtime.launch import EXIT_CODE, Stop

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(2)` makes torch report these devices."""

    def gpus(count, name="NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    return gpus


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_peak_of_a_device_is_found_by_a_whole_name(gpus, name, peak):
    """Data sheets: dense float16 products; 1000e12 would be an A100's for an A1000's."""
    gpus(1, name)
    assert distributed.peak_flops(torch.device("cuda"), torch.float16) == peak


def test_pick_device(gpus, monkeypatch):
    """And products on CUDA sum in float32, parts of a product, too; a CPU's settings are left
    alone.
    """
    halves = dict.fromkeys(
        ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"), True
    )
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul := SimpleNamespace(**halves))
    gpus(0)
    assert distributed.pick_device("auto") == distributed.pick_device("cpu") == CPU
    with pytest.raises(RunError, match="--train.device=auto"):
        distributed.pick_device("cuda")
    gpus(2)
    assert distributed.pick_device("cpu") == CPU
    assert vars(matmul) == halves
    assert distributed.pick_device("auto") == torch.device("cuda", 0)
    assert vars(matmul) == dict.fromkeys(halves, False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.pick_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RunError, match="rank 2 .*--nproc_per_node=2"):
        distributed.pick_device("auto")


AMX = {"amx_bf16": True, "avx512_bf16": True}
AVX512 = {"amx_bf16": False, "avx512_bf16": True}
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "capabilities, name, device, router, dtype",
    [
        (AMX, "auto", CPU, "kern", torch.bfloat16),
        (AVX512, "auto", CPU, "kern", torch.float32),
        (AVX512, "auto", CPU, "dense", torch.bfloat16),
        ({"avx512_f": True}, "auto", CPU, "dense", torch.float32),
        (AMX, "float16", CPU, "kern", torch.float16),
        (AMX, "auto", CUDA, "kern", torch.float16),  # the paper's
    ],
)
def test_dtype_auto(monkeypatch, capabilities, name, device, router, dtype):
    monkeypatch.setattr(distributed, "cpu_capabilities", lambda: capabilities)
    assert distributed.pick_dtype(name, device, router) == dtype
    picked = [distributed.pick_compile(word, device) for word in ("auto", "on", "off")]
    assert picked == [device == CUDA, True, False]


@pytest.mark.parametrize(
    "arguments, names",
    {
        (8, False): "flash efficient math",
        (9, False): "cudnn flash efficient math",
        (9, True): "flash math",
    }.items(),
)
def test_attention_takes_the_kernel_that_is_asked_for(arguments, names):
    """cuDNN's on sm_90, never where a run must repeat."""
    order = [kernel.name for kernel in distributed.order_attention_kernels(*arguments)]
    assert " ".join(order).lower().replace("_attention", "") == names


def test_a_resumed_run_keeps_its_number_of_threads(tiny, monkeypatch, capsys):
    """Other numbers of threads round other sums."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(distributed, "count_cores", lambda: 9)
    for steps, possible in ((2, 3), (4, 5), (6, 2)):
        monkeypatch.setattr(torch, "get_num_threads", lambda possible=possible: possible)
        run(tiny(f"train.max_steps={steps}", "train.checkpoint_interval=1"))
        said = "3 threads of 5: as this run began" in capsys.readouterr().out
        assert said == (possible == 5)
    assert taken == [3]


# ---- runtime/parallel.py on rank 0 of a fake process group, in which nothing is sent
@contextmanager
def fake_ranks_of(world_size, per_node):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield Ranks(0, world_size, torch.device("cpu"), per_node)
    finally:
        dist.destroy_process_group()


def test_sharded_experts_alone_are_gathered_in_half_precision_and_all_reduced_in_fp32(tiny):
    with fake_ranks_of(2, 2) as ranks:
        model, dtypes = GPT(tiny("model.n_shared_expert=1").model), []
        parallel.distribute(model, "fsdp", ranks, torch.float16)
        block = model.blocks[0]
        mlp = block.mlp
        for module in (block.ln_1, mlp.router, mlp.experts, mlp.shared):
            module.register_forward_pre_hook(
                lambda part, _: dtypes.append(next(part.parameters()).dtype)
            )
        x = torch.zeros(2, 8, dtype=torch.int64)
        with torch.autocast("cpu", torch.float16):
            model(x, x)
        assert dtypes == [torch.float32] * 2 + [torch.float16] * 2
        for module in (model, block, mlp.experts, mlp.shared):
            assert module._get_fsdp_state()._mp_policy.reduce_dtype == torch.float32


@pytest.mark.parametrize(
    "way, passes, gathers",
    [("fsdp", 2, 18), ("hsdp", 2, 18), ("zero2", 2, 5), ("fsdp", 1, 9), ("hsdp", 1, 5)],
)
def test_weights_are_gathered_once_a_step_or_in_each_pass(tiny, way, passes, gathers):
    """FSDP2 gathers the five groups (blocks, their experts, the rest) in each forward and each
    backward pass.

    The rest stays gathered from a forward pass to its backward one. HSDP keeps all where a step is
    one micro-batch, and sums each group's gradients across nodes once a step.
    """
    with fake_ranks_of(4, 2) as ranks:
        model, x = GPT(tiny().model), torch.zeros(2, 8, dtype=torch.int64)
        parallel.distribute(model, way, ranks, torch.float32, accumulates=passes > 1)
        for _ in range(2):
            with Operators() as operators:
                for last in [*[False] * (passes - 1), True]:
                    parallel.set_gradient_sync(model, way, last)
                    model(x, x).loss.backward()
            assert operators.names.count("_allgather_base_") == gathers
            assert operators.names.count("allreduce_") == (5 if way == "hsdp" else 0)


def compile_by(backend):
    """In place of Module.compile."""

    def compile(module):
        module._compiled_call_impl = torch.compile(module._call_impl, backend=backend)

    return compile


@pytest.mark.integration
def test_compiled_routers_get_gradients_in_float32(tiny, monkeypatch):
    """As eager ones. torch would trace a backward pass under the forward pass's autocast."""
    monkeypatch.setattr(torch.nn.Module, "compile", compile_by("aot_eager"))
    torch._dynamo.reset()
    model, x = GPT(tiny().model), torch.arange(64).view(2, 32)
    gradients = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, x).loss
        gradients += torch.autograd.grad(loss, model.blocks[0].mlp.router.weight)
        parallel.compile_blocks(model)
    assert gradients[0].any() and torch.equal(*gradients)


def test_compiling_that_fails_names_the_remedy(tiny_file, monkeypatch, capsys):
    def fail(graph, inputs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by(fail))
    torch._dynamo.reset()
    assert train.main([str(tiny_file), "--train.compile=on"]) == 2
    error = capsys.readouterr().err
    assert "no C compiler" in error and "set --train.compile=off and start again" in error


# ---- how a process ends
SMALLER = (
    "Out of memory. Tried 2 GiB. Set a smaller --train.micro_batch_size, "
    "--train.activation_checkpointing=true, or --train.parallel=fsdp on more GPUs, and start "
    "again\n"
)
SAID = {  # exit code, and by the first rank, another of its node, and the first of another node
    RunError("no run"): (2, "error: no run\n", "", ""),
    RankError("no GPU"): (2, "error: no GPU\n", *["error on rank 1: no GPU\n"] * 2),
    OSError("no space"): (2, "error: no space\n", *["error on rank 1: no space\n"] * 2),
    DataError("no data"): (2, "error: no data\n", "", "error on rank 1: no data\n"),
    torch.OutOfMemoryError("Out of memory. Tried 2 GiB. Process 7 has"): (
        2,
        f"error: {SMALLER}",
        *[f"error on rank 1: {SMALLER}"] * 2,
    ),
    RuntimeError("lost"): (1, *["Traceback ... RuntimeError: lost\n"] * 3),
}


@pytest.mark.parametrize("error", SAID, ids=str)
def test_a_rank_says_its_error_and_ends_at_once(tiny_file, monkeypatch, capsys, error):
    """Threads cannot hold the process."""

    def start(config):
        raise error

    def leave(code):
        raise SystemExit(code)

    argv = [str(tiny_file), "--train.device=cpu", "--train.micro_batch_size=4"]
    code, *said = SAID[error]
    with pytest.raises(RuntimeError, match="^lost") if code == 1 else nullcontext():
        assert launch.launch(argv, start) == code and capsys.readouterr().err == said[0]
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, local_rank, says in zip("011", "010", said, strict=True):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit, match=str(code)):
            launch.launch(argv, start)
        printed = capsys.readouterr().err
        assert re.sub("(?s)^(Traceback).*(RuntimeError: lost)", r"\1 ... \2", printed) == says


def test_what_a_command_says_at_its_start_and_end(tiny_file, tiny, capsys, monkeypatch):
    """Data that are absent, a stop, a second Ctrl-C, and the commands that follow a run."""
    with pytest.raises(SystemExit, match="2"):
        launch.check_command([str(tiny_file), "--data.name=absent"])
    assert re.match("error: .*absent", capsys.readouterr().err)
    launch.check_command([str(tiny_file)])
    monkeypatch.setenv("WORLD_SIZE", "2")  # the ranks find it, one for a node
    launch.check_command([str(tiny_file), "--data.name=absent", "--train.micro_batch_size=4"])
    monkeypatch.delenv("WORLD_SIZE")

    def stop(config):
        raise Stopped("stopped at step 3")

    assert launch.launch([str(tiny_file)], stop) == EXIT_CODE
    assert capsys.readouterr().out == "stopped at step 3\n"

    def interrupt(argv, stop):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        launch.run_until_exit(interrupt, Stop())
    assert capsys.readouterr().out.startswith("interrupted again: not saved. The same command")

    run_folder = tiny_file.parent / "run"
    assert "wandb" not in launch.describe_next(run_folder)
    (run_folder / "wandb/offline-run-1").mkdir(parents=True)
    says = launch.describe_next(run_folder)
    assert f"\n  for part in {run_folder}/wandb/offline-run-*; do wandb sync" in says
    assert f"python -m scripts.report {run_folder}\n" in says


def test_ranks_end_with_their_launcher(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    monkeypatch.setattr(launch.ctypes, "CDLL", mock.Mock())  # Linux's part: test_survival.py
    launch.end_with_parent(os.getppid())
    assert killed == []
    launch.end_with_parent(os.getppid() + 1)
    assert killed == [(os.getpid(), signal.SIGTERM)]
