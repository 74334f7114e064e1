"""runtime/: devices and compute types, ranks that agree, evaluation split across ranks, the memory plan."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
from numerics import SEED, assert_near, tolerance
from runs import run
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import cores
from configure import Config
from configure.schema import Model, Train
from model import GPT
from runtime import RunError, distributed, memory
from runtime.distributed import Ranks
from runtime.preflight import Plan
from runtime.signals import Stop
from runtime.validation import measure_loss

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


def test_pick_device(gpus, monkeypatch):
    """And products on CUDA sum in float32, parts of a product, too; a CPU's settings are left alone."""
    halves = dict.fromkeys(("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"), True)
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


@pytest.mark.parametrize(
    "capabilities, dense, mixture",
    [({"amx_bf16": True, "avx512_bf16": True}, torch.bfloat16, torch.bfloat16)]
    + [({"amx_bf16": False, "avx512_bf16": True}, torch.bfloat16, torch.float32)]
    + [({"amx_bf16": False, "avx512_f": True}, torch.float32, torch.float32)],
)
def test_dtype_auto(monkeypatch, capabilities, dense, mixture):
    monkeypatch.setattr(distributed, "cpu_capabilities", lambda: capabilities)
    assert distributed.pick_dtype("auto", CPU, "dense") == dense
    assert distributed.pick_dtype("auto", CPU, "kern") == mixture
    assert distributed.pick_dtype("float16", CPU, "kern") == torch.float16
    assert distributed.pick_dtype("auto", torch.device("cuda"), "kern") == torch.float16  # the paper's


def test_what_is_known_of_devices(gpus):
    """Whether they compile, and how fast they are."""
    gpus(1)
    for device, auto in ((CPU, False), (torch.device("cuda"), True)):
        assert [distributed.pick_compile(name, device) for name in ("auto", "on", "off")] == [auto, True, False]
    assert distributed.peak_flops(torch.device("cuda", 0), torch.bfloat16) == 989e12
    assert distributed.peak_flops(torch.device("cuda", 0), torch.float32) is None
    assert distributed.peak_flops(CPU, torch.bfloat16) is None
    gpus(1, name="Some New Device")
    assert distributed.peak_flops(torch.device("cuda", 0), torch.float16) is None


def test_ranks_that_disagree_are_refused(monkeypatch):
    ranks = Ranks(0, 2, CPU, control=object())
    monkeypatch.setattr(distributed, "gather", lambda value, group: [value, "train.parallel = fsdp"])
    distributed.check_agreement("train.parallel = fsdp", ranks)
    with pytest.raises(RunError, match=r"disagree: train.parallel = ddp .rank 0., train.parallel = fsdp .rank 1."):
        distributed.check_agreement("train.parallel = ddp", ranks)


@pytest.mark.numerics
def test_evaluation_is_split_across_ranks(tiny):
    """5 windows: the second of two ranks has none in the last round, takes another's, and counts it nowhere."""
    plan = Plan(tiny("model.router=kern-norelu", "train.micro_batch_size=1", "eval.windows=5"))
    torch.manual_seed(SEED)
    model = GPT(plan.config.model)
    alone, *parts = (measure_loss(model, plan, Ranks(rank, n, CPU), Stop()) for rank, n in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(parts[0]["val/loads"] + parts[1]["val/loads"], alone["val/loads"])
    total = parts[0]["val/window_losses"] + parts[1]["val/window_losses"]
    assert_near(total, alone["val/window_losses"], tolerance(torch.float32, 257), "windows")
    squares = [part["val/gate_norm_of_layers"] ** 2 for part in (*parts, alone)]
    assert_near(squares[0] + squares[1], squares[2], tolerance(torch.float32, 257), "squared gate norms")
    sums = [part["val/gate_sum_of_layers"] for part in (*parts, alone)]
    assert_near(sums[0] + sums[1], sums[2], tolerance(torch.float32, 257), "sums of gates")
    assert (parts[1]["val/window_losses"] != 0).tolist() == [False, True, False, True, False] and model.training


SIZES = {"n_layer": 3, "n_embd": 8, "n_head": 2, "n_expert": 4, "top_k": 2, "expert_hidden": 6, "vocab_size": 10}
MODEL = Model(block_size=16, **SIZES)
CONFIG = Config(model=MODEL, train=Train(micro_batch_size=2))
BLOCK = {"attn.weight": (24, 8), "mlp.router": (4, 8), "mlp.w_in": (4, 8, 6), "mlp.w_out": (4, 6, 8)}  # 192 + 416
SHAPES = {"wte": (10, 8)} | {f"blocks.{i}.{name}": shape for i in range(3) for name, shape in BLOCK.items()}  # 1904
TOKENS = 2 * 16
LAYER, LOGITS = 10240, 1472  # test_plan.py compares the activations of a layer with what autograd keeps


@pytest.mark.parametrize(
    "parallel, shards, checkpointing, parameters, copies, activations",
    [
        ("ddp", 1, False, 1904, 2 * 1904, 3 * LAYER),
        ("ddp", 1, True, 1904, 2 * (80 + 192 + 416), 3 * 4 * TOKENS * 8 + LAYER),  # casts of one block; inputs
        # An expert each; casts; experts in bf16 four times and once in fp32, the rest of a block five times in fp32,
        # what is outside of blocks twice.
        ("fsdp", 2, False, 952, 2 * (80 + 3 * 192) + (4 * 2 + 4) * 416 + 5 * 4 * 192 + 2 * 4 * 80, 3 * LAYER),
        # All gathered; of a block what arrives, its gradients and those that are reduced.
        (
            "zero2",
            2,
            False,
            952,
            2 * (80 + 3 * 192) + 3 * (2 * 416 + 4 * 192) + (2 * 2 + 4) * 416 + 3 * 4 * 192 + 2 * 4 * 80,
            3 * LAYER,
        ),
        ("hsdp", 2, True, 952, 2 * (80 + 192) + (4 * 2 + 4) * 416 + 5 * 4 * 192 + 2 * 4 * 80, 3072 + LAYER),
    ],
)
def test_memory_plan_by_hand(parallel, shards, checkpointing, parameters, copies, activations):
    train = Train(micro_batch_size=2, dtype="bfloat16", activation_checkpointing=checkpointing)
    config = CONFIG.model_copy(update={"train": train})
    plan = memory.estimate_memory(config, SHAPES, parallel, shards)
    assert plan == (4 * parameters, 4 * parameters, 8 * parameters, copies, activations, LOGITS, 0, 0)
    if parallel == "zero2":  # HSDP keeps its weights, too, where a step is one micro-batch
        assert memory.estimate_memory(config, SHAPES, "hsdp", shards, False) == plan
    averaged = CONFIG.model_copy(update={"train": train.model_copy(update={"ema_decay": 0.9})})
    with_mean = memory.estimate_memory(averaged, SHAPES, parallel, shards)
    assert with_mean == plan._replace(ema=4 * parameters) and with_mean.state == plan.state + 4 * parameters


@pytest.mark.parametrize(
    "capability, deterministic, first",
    [(8, False, "flash"), (9, False, "cudnn"), (10, False, "cudnn"), (9, True, "flash")],
)
def test_attention_takes_the_kernel_that_is_asked_for(capability, deterministic, first):
    """cuDNN's on sm_90, never where a run must repeat; and the name of what torch takes is right, here on a CPU."""
    order = distributed.order_attention_kernels(capability, deterministic)
    assert order[0].name == f"{first.upper()}_ATTENTION" and order[-1] is SDPBackend.MATH
    assert deterministic == (not {SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION} & {*order})
    arguments = Config().model, torch.device("cpu"), torch.float32
    assert distributed.name_attention_kernel(*arguments) == "flash"
    with sdpa_kernel([SDPBackend.MATH]):
        assert distributed.name_attention_kernel(*arguments) == "math"


def test_threads_are_as_many_as_cores_are_free(tmp_path, monkeypatch, capsys):
    """Ten seconds of four cores: two were idle, this process used one, another process one."""

    def write_stat(*idle):
        lines = [f"cpu{core} 7 7 7 {ticks} 7 7 7 0 0 0" for core, ticks in enumerate(idle)]
        (tmp_path / "stat").write_text("\n".join(["cpu 9 9 9 9 9 9 9", *lines, "cpu4 0 0 0 5000 0 0", "btime 1"]))

    write_stat(0, 0, 0, 0)
    monkeypatch.setattr(cores, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(cores, "BEGAN", (50.0, 5.0, cores.read_idle_seconds()))
    write_stat(1000, 1000, 0, 0)
    monkeypatch.setattr(time, "monotonic", lambda: 60.0)
    monkeypatch.setattr(time, "process_time", lambda: 15.0)
    assert cores.count_free_cores() == 3
    threads, taken = [4], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    assert distributed.choose_threads(CPU, 2) == distributed.choose_threads(CPU, None) == 4  # OMP_NUM_THREADS is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert distributed.choose_threads(CPU, 9) == 4 and capsys.readouterr().out == ""
    assert distributed.choose_threads(CPU, 2) == 2 and "as this run began" in capsys.readouterr().out
    assert distributed.choose_threads(CPU, None) == 3 and "3 threads of 4: other processes" in capsys.readouterr().out
    assert taken == [4, 2, 3]


def test_a_resumed_run_keeps_its_number_of_threads(tiny, monkeypatch):
    """Other numbers of threads round other sums."""
    asked = []
    monkeypatch.setattr(distributed, "choose_threads", lambda device, recorded: asked.append(recorded) or 3)
    for steps in (2, 4):
        run(tiny(f"train.max_steps={steps}", "train.checkpoint_interval=2"))
    assert asked == [None, 3]
