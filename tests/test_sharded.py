"""Every way of runtime/parallel.py on ranks that are threads of this process, in float64.

torch has such ranks for its own tests (`multi_threaded_pg`): collectives copy. Gradients,
steps and gathered weights are those of one plain model on the whole batch.
"""

import copy
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.testing._internal.distributed import multi_threaded_pg

from configure.schema import Config, Optim, Train
from model import GPT
from runtime import RunError, folder, parallel, updates
from runtime.distributed import Ranks, any_rank, check_agreement, gather, share_errors
from runtime.memory import estimate_memory
from runtime.optimizers import build_optimizer
from runtime.parallel import (
    copy_shard,
    distribute,
    draw_normal,
    full_tensor,
    gather_model,
    local_part,
    set_gradient_sync,
    start_journey,
    warm_up_ddp_buckets,
    without_parameters,
)
from runtime.updates import measure_norm

pytestmark = [
    pytest.mark.skipif(
        torch.__version__ < "2.12",
        reason="DTensor of torch 2.11 crashes in threads; test_parallel.py's ranks are processes",
    ),
    pytest.mark.filterwarnings("ignore:Set timeout is now only"),  # threads have none
]

N_PASS = 2  # micro-batches of a step, a row of each rank
CPU = torch.device("cpu")
BUILDING = threading.Lock()


def run_ranks(n_rank, act, local_size=0):
    """What `act` returns on each of `n_rank` ranks, each a thread."""
    multi_threaded_pg._install_threaded_pg()
    _distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()
    results = [None] * n_rank
    errors = []

    def be_a_rank(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=n_rank, store=store)
            ranks = Ranks(rank, n_rank, CPU, local_size or n_rank, dist.group.WORLD)
            results[rank] = act(ranks)
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=be_a_rank, args=(rank,)) for rank in range(n_rank)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def whole(tiny):
    """`whole(*overrides)`: a plain model with random weights."""

    def make(*overrides):
        settings = ["model.router=kern", "model.init_std=0.3", "model.n_shared_expert=1"]
        torch.manual_seed(0)
        model = GPT(tiny(*settings, *overrides).model)
        model.document_token = 256
        return model

    return make


def draw_batch(n_rank):
    """(N_PASS, ranks, T + 1) int64."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(257, (N_PASS, n_rank, 33), generator=generator)


def assert_equal(values, wanted, rtol):
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        scale = wanted[name].abs().max().item()
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=rtol * scale, msg=name)


WAYS = [  # train.parallel, ranks, ranks of a node, train.expert_parallel, optimizer
    ("ddp", 2, 2, 1, "muon"),
    ("fsdp", 3, 3, 1, "muon"),
    ("ddp", 4, 4, 2, "adamw"),
    ("zero2", 4, 4, 2, "muon"),  # a rank has a part of its experts
    ("hsdp", 4, 2, 2, "adamw"),  # each node has all experts
]


def train_step(model, way, ranks, optim, batch, **options):
    """Two passes and a step of a rank: what it has to agree in, and what it holds."""
    runner = distribute(model, way, ranks, torch.float64, **options)
    model = getattr(runner, "module", runner)
    warm_up_ddp_buckets(runner, 1, 32, CPU)
    losses = 0.0
    for number, rows in enumerate(batch):
        set_gradient_sync(runner, way, number == N_PASS - 1)
        own = rows.chunk(ranks.world_size)[ranks.rank]
        loss = runner(own[:, :-1], own[:, 1:]).loss / N_PASS
        loss.backward()
        losses += loss.item()
    if way == "ddp":  # an evaluation's loads do not count; FSDP2 would keep gathered weights
        with torch.no_grad():
            runner(batch[0, :1, :-1], batch[0, :1, 1:])
    parameters = dict(model.named_parameters())
    report = {"loss": losses, "part": local_part(model.head).detach().clone()}
    report["held"] = sum(local_part(p).numel() for p in parameters.values())
    report["gradients"] = {key: full_tensor(p.grad).clone() for key, p in parameters.items()}
    optimizer = build_optimizer(model, optim)
    report["norm"] = measure_norm([p.grad for p in optimizer.parameters]).item()
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["lr_ratio"]
    optimizer.step(torch.ones((), dtype=torch.float32), torch.zeros((), dtype=torch.float32))
    states = [state for part in optimizer.parts for state in part.state.values()]
    moments = [local_part(state[name]) for state in states for name in state if name != "step"]
    report["moments"] = sum(moment.numel() for moment in moments)
    gathered = gather_model(model)
    assert gathered.document_token == 256 and not gathered.head.requires_grad
    report["weights"] = gathered.state_dict()
    return report


@pytest.mark.parametrize(("way", "n_rank", "local_size", "n_shared", "name"), WAYS)
def test_ranks_train_like_one_model(whole, way, n_rank, local_size, n_shared, name):
    """Gradients, weights, what is gathered, and the memory that is planned."""
    model = whole() if n_shared == 1 else whole("model.n_layer=1")
    optim = Optim(name=name, weight_decay=0.1)
    batch = draw_batch(n_rank)
    copies = [copy.deepcopy(model) for _ in range(n_rank)]

    def act(ranks):
        own = copies[ranks.rank]
        options = {"expert_parallel": n_shared}
        if way == "fsdp":  # of a model whose weights have no memory until they are sharded
            start = {key: p.detach() for key, p in own.named_parameters()}
            with BUILDING, without_parameters():  # its hook is of all threads
                own = GPT(model.config)
            own.document_token = 256

            def initialize(shards):
                for key, p in shards.named_parameters():
                    copy_shard(start[key], p)

            options["initialize"] = initialize
        return train_step(own, way, ranks, optim, batch, **options)

    reports = run_ranks(n_rank, act, local_size)
    shapes = {key: p.shape for key, p in model.named_parameters()}
    wanted = train_step(model, "ddp", Ranks(0, 1, CPU), optim, batch)
    assert sum(report["loss"] for report in reports) / n_rank == pytest.approx(wanted["loss"])
    for report in reports:
        assert report["norm"] == pytest.approx(wanted["norm"])
        assert_equal(report["gradients"], wanted["gradients"], 1e-9)
        # Muon's directions are computed in less than float64
        assert_equal(report["weights"], wanted["weights"], 1e-9 if name == "adamw" else 1e-5)
    settings = Config(
        model=model.config, optim=optim, train=Train(expert_parallel=n_shared, dtype="float32")
    )
    n_shard = {"ddp": 1, "hsdp": local_size}.get(way, n_rank)
    planned = estimate_memory(settings, shapes, way, n_shard)
    assert planned.weights == planned.gradients == 4 * max(report["held"] for report in reports)
    assert planned.optimizer == 4 * max(report["moments"] for report in reports)
    if way == "hsdp":  # a node's ranks hold parts, and its equals on other nodes the same
        parts = [report["part"] for report in reports]
        assert torch.equal(parts[0], parts[2]) and not torch.equal(parts[0], parts[1])


def test_gates_travel_unrounded_under_autocast():
    generator = torch.Generator().manual_seed(0)
    gates = torch.rand(2, 6, 2, dtype=torch.float32, generator=generator)
    experts = torch.rand(2, 6, 4, generator=generator).argsort(-1)[..., :2]

    def act(ranks):
        rows = (torch.zeros(6, 3), gates[ranks.rank], experts[ranks.rank])
        with torch.autocast("cpu", torch.bfloat16):
            return start_journey(4, ranks.control, *rows).arrive()[1].flatten().tolist()

    assert sorted(sum(run_ranks(2, act), [])) == sorted(gates.flatten().tolist())


def test_shards_are_drawn_as_the_full_tensor(whole):
    """Also rows of a longer table; the rest of it stays."""
    torch.manual_seed(5)
    wanted = torch.empty(16, 3).normal_(1.0, 2.0)

    def act(ranks):
        mesh = parallel.build_mesh({"shard": ranks.world_size}, ranks)
        zeros = torch.distributed.tensor.zeros(16, 3, device_mesh=mesh, placements=[SHARD])
        with BUILDING:  # one generator for all threads
            torch.manual_seed(5)
            draw_normal(zeros, 1.0, 2.0)
        drawn = full_tensor(zeros).clone()
        copy_shard(torch.ones(6, 3), zeros)
        return drawn, full_tensor(zeros).clone()

    SHARD = torch.distributed.tensor.Shard(0)
    for drawn, copied in run_ranks(3, act):
        assert torch.equal(drawn, wanted)
        assert torch.equal(copied, torch.cat([torch.ones(6, 3), wanted[6:]]))


def test_the_norm_of_gradients_is_one_number(monkeypatch):
    """Groups of ranks with the same shards may round its sum differently."""

    def sum_otherwise(norm):
        return full_tensor(norm) + 1e-5 * dist.get_rank()

    def act(ranks):
        mesh = parallel.build_mesh({"shard": 3}, ranks)
        shards = torch.distributed.tensor.DTensor.from_local(torch.ones(4), mesh)
        return measure_norm([shards, torch.ones(2)]).item()

    monkeypatch.setattr(updates, "full_tensor", sum_otherwise)
    assert len(set(run_ranks(3, act))) == 1


def test_ranks_agree_and_share_errors():
    def act(ranks):
        assert gather(10 * ranks.rank, ranks.control) == [0, 10, 20]
        flags = [ranks.rank == 1, False, ranks.rank != 1]
        assert any_rank(flags, ranks) == [True, False, True]
        check_agreement({"optim.lr": 0.1, "step": 7}, ranks)
        plan = {"optim.lr": 0.1, "step": [7, 7, 8][ranks.rank]}
        with pytest.raises(RunError, match=r"^ranks disagree: step: 7 \(rank 0\), 8 \(rank 2\)"):
            check_agreement(plan, ranks)
        with pytest.raises(RunError, match="^no space on rank 2$"), share_errors(ranks):
            if ranks.rank == 2:
                raise RunError("no space on rank 2")
        with share_errors(ranks):
            pass

    run_ranks(3, act)


def test_all_ranks_must_see_the_folder_of_the_run(tmp_path, monkeypatch):
    """Otherwise their shards of a checkpoint would be elsewhere; it may appear late, as on NFS."""
    late = tmp_path / "late"
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: late.symlink_to(tmp_path / "run"))

    def act(ranks):
        path = tmp_path / "run" if ranks.rank != 1 else late
        run = folder.RunFolder(path)
        with run.claim(ranks):
            run.check_shared(ranks)
            other = folder.RunFolder(tmp_path / "other") if ranks.rank == 1 else run
            with pytest.raises(RunError, match=r"other: rank 1 on \S+ does not see the folder"):
                other.check_shared(ranks._replace(timeout=timedelta(0)))

    run_ranks(3, act)
    assert late.is_symlink()
