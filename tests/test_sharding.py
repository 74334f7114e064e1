"""runtime/parallel.py on rank 0 of a fake process group, in which nothing is sent: sharding, its bytes, compiling."""

import copy
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from numerics import Operators
from runs import column, run
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from model import GPT, parameter_shapes
from runtime import distributed, memory, parallel
from runtime import state as train_state
from runtime.distributed import Ranks
from runtime.parallel import local_part


@contextmanager
def fake_ranks_of(world_size, per_node):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield Ranks(0, world_size, torch.device("cpu"), per_node)
    finally:
        dist.destroy_process_group()


SHARDED = [
    ("zero2", 2, 2, 2, "adamw"),
    ("fsdp", 2, 2, 2, "muon"),
    ("fsdp", 4, 4, 4, "adamw"),
    ("hsdp", 6, 2, 2, "adamw"),
    ("hsdp", 6, 3, 3, "muon"),
]


@pytest.mark.parametrize("way, world_size, per_node, shards, name", SHARDED)
def test_sharded_bytes_are_as_planned(tiny, way, world_size, per_node, shards, name):
    """On the rank that has most: the first, which holds γ and what does not divide. HSDP shards within a node."""
    config = tiny("model.n_expert=6", "model.block_size=31", "train.dtype=float32", f"optim.name={name}")
    shapes, possible = parameter_shapes(config.model), memory.list_parallelisms(world_size, per_node)
    plan = memory.estimate_memory(config, shapes, way, possible[way])
    with fake_ranks_of(world_size, per_node) as ranks:
        model = GPT(config.model)
        parallel.distribute(model, way, ranks, torch.float32)
        optimizer = train_state.build_optimizer(model, config.optim)
        experts = model.blocks[0].mlp.experts.w_in
        assert possible[way] == shards and experts.to_local().shape[0] == -(-6 // shards)
        assert [name for name, p in model.named_parameters() if not isinstance(p, DTensor)] == []
        weights = sum(local_part(p).nbytes for p in model.parameters())
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        assert (weights, sum(local_part(value).nbytes for value in states)) == (plan.weights, plan.optimizer)
        assert plan.gradients == plan.weights < 4 * sum(p.numel() for p in model.parameters())


def test_sharded_experts_alone_are_gathered_in_half_precision_and_all_reduced_in_fp32(tiny):
    with fake_ranks_of(2, 2) as ranks:
        model, dtypes = GPT(tiny("model.n_shared_expert=1").model), {}
        parallel.distribute(model, "fsdp", ranks, torch.float16)
        block = model.blocks[0]
        mlp = block.mlp
        parts = {"ln_1": block.ln_1, "router": mlp.router, "experts": mlp.experts, "shared": mlp.shared}
        for name, module in parts.items():
            module.register_forward_pre_hook(lambda m, _, name=name: dtypes.update({name: next(m.parameters()).dtype}))
        x = torch.zeros(2, 8, dtype=torch.int64)
        with torch.autocast("cpu", torch.float16):
            model(x, x)
        half, full = torch.float16, torch.float32
        assert dtypes == {"ln_1": full, "router": full, "experts": half, "shared": half}
        for module in (model, block, mlp.experts, mlp.shared):
            assert module._get_fsdp_state()._mp_policy.reduce_dtype == torch.float32


@pytest.mark.parametrize(
    "way, passes, gathers",
    [("fsdp", 2, 2 * 2 * 5 - 2), ("hsdp", 2, 2 * 2 * 5 - 2), ("zero2", 2, 5), ("fsdp", 1, 2 * 5 - 1), ("hsdp", 1, 5)],
)
def test_weights_are_gathered_once_a_step_or_in_each_pass(tiny, way, passes, gathers):
    """FSDP2 gathers the five groups (blocks, their experts, the rest) in each forward and each backward pass.

    The rest stays gathered from a forward pass to its backward one. HSDP keeps all where a step is one micro-batch.
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


def compile_by(backend, fails=False):
    """In place of Module.compile: dynamo with `backend`, or a forward pass that fails."""

    def compile(module):
        if fails:
            module.forward = mock.Mock(side_effect=RuntimeError("no C compiler\nset CC"))
        else:
            module._compiled_call_impl = torch.compile(module._call_impl, backend=backend)

    return compile


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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dynamo_does_not_cut_compiled_blocks_at_the_buckets_of_ddp(tiny, monkeypatch, checkpointing):
    """Older versions of torch refuse it where a graph has an autograd.Function or checkpointing: no run would start."""

    def refuse(self, graph, *_, **__):
        raise NotImplementedError("DDPOptimizer backend: Found a higher order op in the graph")

    monkeypatch.setattr("torch._dynamo.backends.distributed.DDPOptimizer.compile_fn", refuse)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_by("aot_eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=True), fake_ranks_of(2, 2) as ranks:
        model = GPT(tiny("model.router=kern").model)
        for block in model.blocks:
            block.checkpointing = checkpointing
        runner = parallel.distribute(model, "ddp", ranks, torch.bfloat16, compile=True)
        x = torch.zeros(1, 8, dtype=torch.int64)
        parallel.set_gradient_sync(runner, "ddp", last=False)  # a fake group cannot average
        with torch.autocast("cpu", torch.bfloat16):
            runner(x, x).loss.backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
def test_dynamo_compiles_all_that_a_run_needs(tiny, monkeypatch):
    """Blocks of two kinds in evaluations, whose last batch is smaller, for loads of a whole step, and in training."""
    monkeypatch.setattr(torch.nn.Module, "compile", compile_by("aot_eager"))
    torch._dynamo.reset()
    model, dtype = GPT(tiny("model.backend=triton", "model.n_dense_layer=1").model), torch.bfloat16
    autocast = torch.autocast("cpu", dtype)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        parallel.compile_blocks(model)
        for rows in (4, 3):
            with torch.no_grad(), autocast:
                model.eval()(*torch.zeros(2, rows, 8, dtype=torch.int64))
        x = torch.zeros(4, 8, dtype=torch.int64)
        with model.train().cast_once(dtype), autocast:
            with torch.no_grad():
                model(x, x)
            model(x, x).loss.backward()


@pytest.mark.parametrize("router, more", [("kern", ["model.n_dense_layer=1"]), ("dense", [])])
def test_a_trial_of_compiling_leaves_the_model_as_it_is(tiny, monkeypatch, capsys, router, more):
    """It runs with gradients and without, with a block of each kind."""
    monkeypatch.setattr(torch.nn.Module, "compile", compile_by("aot_eager"))
    model = GPT(tiny(f"model.router={router}", "model.dropout=0.5", *more).model)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    torch._dynamo.reset()  # another test's graphs would be taken
    torch._dynamo.utils.counters.clear()
    one = Ranks(0, 1, torch.device("cpu"))
    assert parallel.try_compiling(model, (2, 8), torch.autocast("cpu", torch.bfloat16), one)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2 * (1 + len(more))
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(block._compiled_call_impl is None and block.training for block in model.blocks)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_compiling_that_fails_on_any_rank_leaves_all_eager(tiny, monkeypatch, capsys, rank):
    """With one warning, and the losses of a run that does not try; rank 1 is another's, of which this one hears."""
    eager = column(run(tiny("run.name=eager", "train.compile=off")), "train/loss")
    monkeypatch.setattr(distributed, "pick_compile", lambda name, device: name != "off")  # as on CUDA
    monkeypatch.setattr(torch.nn.Module, "compile", compile_by("aot_eager", fails=rank == 0))
    others = ["RuntimeError: no C compiler"] if rank else []
    monkeypatch.setattr(parallel, "gather", lambda problem, group: [problem, *others])
    torch._dynamo.reset()
    capsys.readouterr()
    assert column(run(tiny("run.name=auto")), "train/loss") == eager
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert f"compiling failed on rank {rank}" in warning and warning.endswith("RuntimeError: no C compiler")


def test_compiling_that_fails_names_the_remedy(tiny_file, monkeypatch):
    def fail(graph, inputs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by(fail))
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="no C compiler") as error:
        train.main([str(tiny_file), "--train.compile=on"])
    assert error.value.__notes__ == ["torch cannot compile the model: set --train.compile=off and start again"]
