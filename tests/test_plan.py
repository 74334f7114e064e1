"""scripts.plan and runtime/memory.py: sizes and hours by hand, activations against autograd, the
parallelism chosen.
"""

import json
import os
import re
from unittest import mock

import pytest
import torch
from corpora import write_tree
from runs import REPO_ROOT, checkpoints, read_tables, run

import configure
import train
from common import cores
from configure import Config
from configure.schema import Model
from eval import routing, val_loss
from hf.export import export
from model import GPT
from runtime import RunError, distributed, memory
from runtime.distributed import GPUS
from runtime.folder import path_of
from runtime.memory import flops_per_token, parameter_shapes
from runtime.step_time import estimate_mfu
from scripts import plan, sample
from tools.bench import build_step

LARGE = REPO_ROOT / "config/1b3.toml"
P = 6_952_353_792  # its parameters (docs/choices.md: 6.9B)


# ---- the command
def read_memory(out):
    """{part: {parallelism: GiB}} of the memory table, and its last row."""
    *rows, last = read_tables(out)[0]
    parts = {}
    for row in rows:
        part = row.pop("part")
        parts[part] = {name: gibibytes(cell) for name, cell in row.items()}
    return parts, last


def gibibytes(text):
    number, unit = text.split()
    return float(number) / {"GiB": 1, "MiB": 1024, "KiB": 1024**2}[unit]


@pytest.mark.parametrize("gpus, per_node", [(8, 8), (4, 8), (8, 2), (1, 8)])
def test_plan_of_the_largest_model_by_hand(call, gpus, per_node):
    """16 bytes a parameter under DDP, a part of them under ZeRO-2 and FSDP2 (of all ranks) and HSDP
    (of a node's).
    """
    words = ["--gpus", gpus, "--gpus-per-node", per_node, "--gpu=A100"]
    out = call(plan.main, LARGE, *words, "--train.dtype=float16")
    config = configure.load(LARGE, ["--train.dtype=float16"], world_size=gpus)
    per_token = flops_per_token(config.model)
    mfu = estimate_mfu(config, GPUS["A100"], gpus)
    hours = 50_000 * 131_072 * per_token / (312e12 * mfu) / 3600
    time = f"{hours / gpus:,.2f} h on {gpus} x A100, {hours:,.2f} GPU hours"
    assert out.startswith(f"""\
1b3-kern: router kern, float16
  parameters       6,952.4 M in all, 1,315.3 M active
  FLOPs per token  {per_token / 1e9:.3f} G (forward and backward)
  tokens           6.55 B: 50,000 steps of 131,072; 5 per active parameter
  checkpoint       {12 * P / 2**30:.1f} GiB, 2 kept and one being written
  time             {time}; MFU {mfu:.2f} (estimated)

memory on each of {gpus} GPUs, 32 sequences at a time:
""")
    table, fits = read_memory(out)
    shards = {"ddp": 1}
    if gpus > 1:
        shards |= {"zero2": gpus, "fsdp": gpus}
    if per_node == 2:
        shards["hsdp"] = 2
    total = table.pop("sum")
    assert {*total} == {name + more for name in shards for more in ("", ", checkpointing")}
    for name, n in shards.items():
        state = sum(table[part][name] for part in ("weights", "gradients", "optimizer"))
        assert state == pytest.approx(16 * P / n / 2**30, rel=0.01)
        assert total[name] == pytest.approx(sum(row[name] for row in table.values()), abs=0.5)
        assert fits[name] == ("fits" if total[name] <= 0.92 * 80 else "too large")


@pytest.mark.parametrize(
    "words, last_line",
    [
        ("--gpus=8", "--train.parallel=zero2"),
        ("--gpus=8 --memory=200", "--train.parallel=ddp"),
        ("--gpus=8 --train.micro_batch_size=16 --memory=200", "--train.parallel=ddp"),  # two
        ("--gpus=16 --train.micro_batch_size=16", "--train.parallel=hsdp"),
        ("--gpus=4 --memory=24", "none fits"),
        # 43.2 GiB without it are more than 92%
        ("--gpus=8 --memory=45", "--train.activation_checkpointing=true"),
        ("--gpus=8 --memory=40 --train.micro_batch_size=16", "--train.parallel=fsdp"),
    ],
)
def test_plan_ends_with_what_to_choose(call, words, last_line):
    assert last_line in call(plan.main, LARGE, *words.split()).splitlines()[-1]


def test_options_that_need_memory_are_planned(call):
    """Muon has one moment for the blocks' matrices; the mean of weights and scoring on tasks have
    rows of their own.
    """

    def plan_with(*options):
        return call(plan.main, LARGE, "--gpus=4", "--train.micro_batch_size=1", *options)

    more = ["--optim.name=muon", "--train.ema_decay=0.9", "--eval.tasks=sciq"]
    plain = read_memory(plan_with())[0]
    full = read_memory(plan_with(*more))[0]
    assert not {"ema", "scoring"} & plain.keys()
    assert full["ema"] == full["weights"] == plain["weights"]
    for name, bytes_of_muon in full["optimizer"].items():
        assert bytes_of_muon < 0.52 * plain["optimizer"][name]
    assert full["scoring"]["ddp"] == 0 < full["scoring"]["fsdp"]
    shared = read_memory(plan_with(*more, "--train.expert_parallel=4"))[0]
    assert shared["scoring"]["ddp"] > 0  # a rank gathers the others' experts
    for options, n_byte in ((["--train.expert_parallel=4"], 12), (["--train.ema_decay=0.9"], 16)):
        assert f"checkpoint       {n_byte * P / 2**30:.1f} GiB" in plan_with(*options)


def test_a_parameter_without_dimensions_counts_as_one(tiny):
    config = tiny()
    shapes = dict(parameter_shapes(config.model))
    for n_shard in (1, 4):
        plain = memory.estimate_memory(config, shapes, "ddp", n_shard)
        scalar = memory.estimate_memory(config, shapes | {"scalar": ()}, "ddp", n_shard)
        assert scalar.weights == plain.weights + 4 and scalar.optimizer == plain.optimizer + 8


def test_plan_takes_fewer_gpus_where_a_batch_has_no_work_for_eight(call):
    for words, gpus in [([LARGE], 8), (["config/quickstart.toml", "--model.router=kern"], 1)]:
        out = call(plan.main, *words)
        mfu = estimate_mfu(configure.load(*words[:1], words[1:], gpus), GPUS["H100"], gpus)
        assert f" h on {gpus} x H100, " in out and f"; MFU {mfu:.2f} (estimated)\n" in out


@pytest.mark.parametrize(
    "words, error",
    [
        ("--gpus=16", "set --train.batch_size=512 or --train.micro_batch_size=16"),
        ("--gpus=0", "--gpus 0: expected more than 0"),
        ("--gpus-per-node=-1", "--gpus-per-node -1: expected more than 0"),
        ("--memory=nan", "--memory nan: expected more than 0"),
        ("--gpus=4 --train.expert_parallel=8", "with 4 rank(s), 4 on this node: groups of 8"),
    ],
)
def test_plan_refuses_bad_input(call, words, error):
    assert error in call(plan.main, LARGE, *words.split(), code=2)


@pytest.mark.parametrize(
    "words",
    [
        "optim.name=adamw train.dtype=float16",
        "optim.name=adamw train.ema_decay=0.9 model.router=dense model.tie_embeddings=false",
        "optim.name=muon train.dtype=float16 train.ema_decay=0.9",
        "optim.name=muon train.dtype=float32 optim.router_lr_ratio=0",
    ],
)
def test_planned_checkpoint_has_the_size_of_its_files(tiny, words):
    """A model of a few MB, whose small tensors and index are 1 to 2% of the checkpoint."""
    large = "model.n_embd=128 model.expert_hidden=256 model.vocab_size=4096 train.max_steps=1"
    config = tiny(*words.split(), *large.split())
    run(config)
    size = sum(file.stat().st_size for file in checkpoints(config).glob("*/*"))
    assert 0.975 * size < plan.checkpoint_bytes(config) < size


# ---- activations
SHAPE = {"vocab_size": 64, "n_embd": 192, "expert_hidden": 192, "n_expert": 16, "top_k": 4}
HEADS = {"n_kv_head": 2, "pos": "rope"}
GATED = {"gated": True, "activation": "silu"}
BLOCKS = [
    ("dense", {}),
    ("kern", {}),
    ("dense", GATED),
    ("kern", GATED | {"n_shared_expert": 2}),
    ("dense", {"pos": "rope"}),
    ("dense", {"qk_norm": "all"}),
    ("kern", HEADS | GATED | {"qk_norm": "head"}),
]
CASES = [(*block, dtype) for block in BLOCKS for dtype in ("float32", "bfloat16")]
CASES.append(("softmax", {"n_expert": 256}, "float32"))  # more experts than channels


def kept_bytes(model, dtype):
    """Bytes of tensors that autograd keeps for the backward pass, but weights and their casts."""
    gpt, sizes, alive = GPT(model), {}, []
    shapes = {tuple(p.shape) for p in gpt.parameters() if p.dim() > 1}
    shapes |= {shape[::-1] for shape in shapes}

    def pack(tensor):
        if tuple(tensor.shape) not in shapes:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)  # so that no address comes twice
        return tensor

    x = torch.randint(64, (4, 256))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        gpt(x, x)
    return sum(sizes.values())


@pytest.mark.parametrize("router, more, dtype", CASES)
def test_activations_are_what_autograd_keeps(router, more, dtype):
    """Of one block more; a CPU pads the experts' slots, by a few percent."""
    one, two = [Model(router=router, n_layer=n, **SHAPE | more) for n in (1, 2)]
    kept = kept_bytes(two, dtype) - kept_bytes(one, dtype)
    assert 0.93 * kept < memory.activation_bytes(two, 4 * 256, dtype) < 1.05 * kept


# ---- the choice of a parallelism
SMALL = memory.Memory(
    weights=2**30, gradients=2**30, optimizer=2**31, copies=0, activations=2**32, logits=0
)


@pytest.mark.parametrize(
    "gpu, commit, names, tolerance, n_row",
    [
        ("H200", "290e916", ["routers, steps", "step bfloat16", "350m.toml"], 0.06, 9),
        ("H200", "63e4928", ["1b3"], 0.06, 2),
        ("H100", "d14e3d6", ["routers, steps", "step float16", "step bfloat16"], 0.07, 9),
    ],
)
def test_estimated_steps_last_as_long_as_measured_ones(gpu, commit, names, tolerance, n_row):
    """In half precision; 350M, 1.3B (8 layers) and the H100 set no rate of the estimate."""
    record = REPO_ROOT / f"docs/records/gpu/{gpu.lower()}-{commit}.json"
    figures = json.loads(record.read_text())
    ratios = []
    for name in names:
        command = figures[name]["command"]
        (file,) = re.findall(r"config/\S+", command)
        words = re.findall(r"--model\.(?!router)\S+", command)
        (batch,) = re.findall(r"--train\.micro_batch_size=(\d+)", command)
        words += [f"--train.micro_batch_size={batch}", f"--train.batch_size={batch}"]
        for row in figures[name]["rows"]:
            router, _, graph = row["alternative"].partition(", ")
            if graph != "cuda_graph=off":
                config = configure.load(REPO_ROOT / file, [*words, f"--model.router={router}"])
                ratios.append(estimate_mfu(config, GPUS[gpu]) / row["MFU"])
    assert ratios == pytest.approx([1] * n_row, rel=tolerance)


@pytest.mark.parametrize(
    "capacity, ema, fitting, remedy",
    [
        (3, 0, [], "fsdp on more GPU"),
        (2.2, 0, ["zero2"], "zero2, which needs 2.0 GiB"),  # 92% are 2.02
        (2.17, 2**30, ["zero2"], "fsdp on more GPU"),  # 92% are 1.996
    ],
)
def test_device_known_to_be_too_small_is_refused(capacity, ema, fitting, remedy):
    needed = SMALL._replace(ema=ema)
    estimates = {"ddp": needed} | dict.fromkeys(fitting, memory.Memory(2**31, 0, 0, 0, 0, 0))
    error = f"need {needed.state / 2**30:.1f} GiB a GPU, this one has {capacity:.1f} GiB: "
    with pytest.raises(RunError, match=f"{error}set --train.parallel={remedy}"):
        memory.check_state_fits(Config(), estimates, int(capacity * 2**30))
    memory.check_state_fits(Config(), estimates, needed.state)


def test_the_largest_part_of_memory_is_named():
    said = memory.describe_memory("ddp", SMALL, 2**40)
    assert said == "ddp, about 8.0 GiB a rank, activations 4.0 GiB of it"


@pytest.mark.parametrize(
    ("device", "words", "n_state", "n_copy"),
    [
        ("cpu", [], 2, 1),  # under DDP one rank writes
        ("cpu", ["train.parallel=fsdp"], 2, 2),
        ("cuda", [], 0, 1),
        ("cuda", ["train.parallel=zero2", "train.ema_decay=0.9"], 0, 2),
        ("cuda", ["train.expert_parallel=2"], 0, 2),
        ("cuda", ["train.expert_parallel=2", "model.router=dense"], 0, 1),
    ],
)
def test_host_known_to_be_too_small_is_refused(tiny, monkeypatch, device, words, n_state, n_copy):
    """By hand: of two ranks the state, and the copy that a checkpoint is written from."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    needed = SMALL._replace(ema=2**28)
    need = n_state * (2**32 + 2**28) + n_copy * (2**30 + 2**31 + 2**28)
    capacities = iter([need, None, need - 1])
    monkeypatch.setattr(distributed, "host_memory_bytes", lambda: next(capacities))
    arguments = tiny(*words), needed, torch.device(device)
    for _ in range(2):
        memory.check_host(*arguments)
    with pytest.raises(RunError, match=f"^tiny: {need / 2**30:.1f} GiB of memory .*host"):
        memory.check_host(*arguments)


def test_commands_refuse_a_model_that_the_host_cannot_hold(
    tiny, tiny_file, tmp_path, call, monkeypatch
):
    """Before anything is allocated or written."""
    run(tiny())
    folder, out, new = path_of(tiny()), tmp_path / "export", [tiny_file, "--run.name=new"]
    n_byte = 4 * memory.count_parameters(tiny().model)[0]
    host = mock.Mock()
    monkeypatch.setattr(distributed, "host_memory_bytes", host)
    for n_copy, purpose, main, *words in (
        (1, "its weights", val_loss.main, folder),
        (1, "its weights", sample.main, folder),
        (1, "its weights", routing.main, folder),
        (1, "its state and", train.main, *new),
        (2, "its export", export.main, folder, out),
        (4, "its export", export.main, folder, out, "--check"),
    ):
        host.return_value = n_copy * n_byte - 1
        assert f"B of memory are needed for {purpose}" in call(main, *words, code=2)
    host.return_value = n_byte
    call(routing.main, folder, "--windows=2")
    host.return_value = 2 * n_byte
    call(export.main, folder, out)
    assert {*tmp_path.iterdir()} == {folder.parent, tiny_file, out}
    assert [*folder.parent.iterdir()] == [folder]


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": "700"}, 700),
        ("0::/hidden", {"memory.max": "600"}, 600),  # a container sees its own at the root
        (
            "5:cpu:/b\n4:memory:/a\n0::/",
            {
                "memory/a/memory.limit_in_bytes": "600",
                "memory/memory.limit_in_bytes": "500",
                "b/memory.max": "400",
            },
            500,
        ),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "800"}, 750),
        (None, {"memory.max": "600"}, 750),
    ],
)
def test_limits_of_a_container(tmp_path, monkeypatch, own, files, limit):
    write_tree(tmp_path / "mounted", {name: f"{text}\n".encode() for name, text in files.items()})
    if own is not None:
        (tmp_path / "cgroup").write_text(f"{own}\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "mounted")
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 10, "SC_PHYS_PAGES": 75}.get)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert distributed.memory_bytes(torch.device("cpu")) == limit // 2


@pytest.mark.parametrize(
    ("quota", "count"),
    [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("300000", 3), ("-1", 8)],
)
def test_threads_and_workers_of_a_container(tmp_path, monkeypatch, quota, count):
    """On 8 cores; torch sees its affinity alone. Version 1 has two files."""
    own, file = "0::/", "cpu.max"
    if " " not in quota:
        own, file = "3:memory:/b\n2:cpu,cpuacct:/a\n0::/", "cpu,cpuacct/cpu.cfs_quota_us"
    write_tree(tmp_path, {"cgroup": f"{own}\n".encode(), f"mounted/{file}": f"{quota}\n".encode()})
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "mounted")
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    set_threads = mock.Mock()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    assert cores.count_cores() == count
    assert distributed.set_threads(torch.device("cpu"), None) == count
    assert set_threads.mock_calls == ([mock.call(count)] if count < 8 else [])


@pytest.mark.parametrize(
    ("own", "world_size", "local_size", "problem"),
    [
        ("ddp", 2, 2, "= 4 with 2 rank.* do not divide the ranks; set --train.expert_parallel=2"),
        ("ddp", 1, 1, "= 4 with 1 rank.* set --train.expert_parallel=1, or start 4 ranks"),
        ("hsdp", 8, 2, "ranks of one node share the experts; set --train.expert_parallel=2"),
        ("fsdp", 16, 8, "over 16 ranks, which must divide model.n_expert = 8; set --train.para"),
        ("hsdp", 2, 2, "= hsdp is not possible with 2 rank.*=ddp or zero2 or fsdp, or"),
        ("fsdp", 1, 1, "= fsdp is not possible with 1 rank.*=ddp, or start more ranks"),
        ("hsdp", 24, 12, "over 12 ranks, which must divide model.n_expert = 8; set --train.para"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(tiny, own, world_size, local_size, problem):
    config = tiny(f"train.parallel={own}", "train.expert_parallel=4")
    assert re.search(problem, memory.describe_rank_problem(config, world_size, local_size))
    dense = tiny(f"train.parallel={own}", "model.router=dense", "train.expert_parallel=3")
    if own == "fsdp":  # experts may be shared across nodes
        assert not memory.describe_rank_problem(config, 8, 2)
    if own in memory.list_parallelisms(world_size, local_size):  # a sweep may have "dense"
        assert memory.describe_rank_problem(dense, world_size, local_size) == ""


@pytest.mark.parametrize("file", ["1b3", "olmoe"])
def test_configs_fit_eight_gpus_of_80_gigabytes(call, file):
    """As the last line says, the plan's choice is the file's own."""
    path = REPO_ROOT / f"config/{file}.toml"
    train = configure.load(path, ["--data.name=any"], 8).train
    out = call(plan.main, path, "--gpus=8", "--data.name=any")
    assert read_memory(out)[1][train.parallel] == "fits"


def test_weights_stay_gathered_on_a_node_only_in_steps_of_one_micro_batch(call):
    copies = {}
    for batch in (128, 256):  # on four ranks, two a node
        words = ["--gpus=4", "--gpus-per-node=2", f"--train.batch_size={batch}"]
        row = read_memory(call(plan.main, LARGE, *words))[0]["copies"]
        copies[batch] = row["hsdp"] / row["zero2"]
    assert copies[128] == 1 > 2 * copies[256]


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("micro_batch", [4, 16])
def test_peak_on_a_gpu_is_as_planned(micro_batch, tmp_path):
    """A training step of 125m.toml in float16 as train.py takes it, within 15%."""
    words = [f"--train.micro_batch_size={micro_batch}", "--train.dtype=float16"]
    words += ["--train.compile=off", "--train.cuda_graph=off"]
    config = configure.load(REPO_ROOT / "config/125m.toml", words)
    shapes = parameter_shapes(config.model)
    planned = sum(memory.estimate_memory(config, shapes, "ddp", 1))
    torch.cuda.reset_peak_memory_stats()
    step = build_step(config, torch.device("cuda"), tmp_path)
    for _ in range(3):
        step()
    assert torch.cuda.max_memory_allocated() == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize("gpu, record", [("H100", "h100-d14e3d6"), ("H200", "h200-290e916")])
def test_the_readme_has_the_figures_of_records_and_plan(gpu, record):
    """Tokens per second and MFU were measured, hours and GPU hours are this plan's."""
    steps = json.loads((REPO_ROOT / f"docs/records/gpu/{record}.json").read_text())["step float16"]
    (kern,) = [step for step in steps["rows"] if step["alternative"] == "kern, cuda_graph=on"]
    config = configure.load(REPO_ROOT / "config/125m.toml")
    hours = plan.estimate_hours(config, 8, GPUS[gpu])
    measured = f"{round(kern['tokens/s'], -3):,.0f} tokens/s, MFU {100 * kern['MFU']:.0f}%"
    row = f"| {gpu} | {measured} | {hours:.1f} hours: {8 * hours:.0f} GPU hours"
    assert row in (REPO_ROOT / "README.md").read_text()
