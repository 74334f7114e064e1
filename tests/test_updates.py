"""Steps that are taken or skipped on the device: loss scale, clipping, runs that are
halted.
"""

import json
import math
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch
from numerics import SEED, Operators, assert_near, tolerance
from runs import metrics, run, steps

from balance import MARGIN_BINS, SelectionBias
from configure.schema import Model, Optim
from data.bins import open_tokens
from data.loader import Loader
from eval.trained import load_model
from model import GPT
from runtime import RunError, folder
from runtime.optimizers import (
    HalfCopies,
    Optimizers,
    build_optimizer,
)
from runtime.runs import Run
from runtime.updates import BAD_LOSS, Updates, WeightAverage

# ---- against torch in float64
SMALL = Model(
    n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=11, n_expert=3, top_k=2, expert_hidden=4
)


def test_copies_follow_the_weights_and_stay_where_they_are():
    """Of experts' weights in half precision; steps with them: test_combinations.py."""
    model = GPT(SMALL)
    experts = model.blocks[0].mlp.experts
    half = HalfCopies([experts], torch.float16, "triton")
    optimizer = build_optimizer(model, Optim(), half)
    addresses = [copied.data_ptr() for copied in half.copies.values()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(torch.ones(()), torch.zeros(()))
    moved = flat(model)
    optimizer.step(torch.ones(()), torch.ones(()))  # a skipped one
    assert torch.equal(flat(model), moved)
    assert {state["step"].item() for state in optimizer.state.values()} == {1}
    assert all(torch.equal(copied, weight.half()) for weight, copied in half.copies.items())
    with torch.no_grad():
        experts.w_in.mul_(2)  # as loading a checkpoint changes weights
    assert half.is_valid(experts.w_out) and not half.is_valid(experts.w_in)
    with half.in_passes():
        for copied, weight in zip(experts.copies, (experts.w_in, experts.w_out), strict=True):
            assert torch.equal(copied, weight.half())
    assert experts.copies is None
    assert [copied.data_ptr() for copied in half.copies.values()] == addresses


def test_a_kernels_step_stays_within_its_weights():
    adamw_step = pytest.importorskip("kernels.triton_adamw").adamw_step
    buffers = [torch.full((4000,), 7.0) for _ in range(4)]
    buffers.append(torch.full((4000,), 7.0, dtype=torch.bfloat16))
    numbers = torch.ones(()), torch.ones(()), torch.zeros(())
    adamw_step(*(buffer[333:2999] for buffer in buffers), *numbers, 0.1, (0.0, 0.95), 1e-8, 0.5)
    for buffer in (buffers[0], buffers[4]):
        assert (buffer < 7).nonzero().flatten().tolist() == [*range(333, 2999)]
        assert len(buffer.unique()) == 2


# a number leaves its device: .item(), bool(), if
HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero"}
EAGER = [
    "log.interval=100",
    "eval.interval=100",
    "train.max_steps=9",
    "train.bias_update_rate=0.01",
    "train.balance_loss_coef=0.01",
    "train.z_loss_coef=0.001",
]


@pytest.fixture
def in_steady_steps(before_steps):
    """`in_steady_steps(begin, end)` calls begin before the fifth training step, and end after the
    seventh.

    Returns a list of the steps begun.
    """

    def watch(begin, end):
        begun = []
        before_steps(lambda step: {4: begin, 7: end}.get(step, lambda: None)())
        before_steps(begun.append)
        return begun

    return watch


QUANTILE = ["train.bias_update_rate=0", "train.bias_update=quantile", "model.n_hash_layer=1"]


@pytest.mark.parametrize(
    "router, dtype, own",
    [("dense", "float32", []), ("kern", "float16", QUANTILE), ("softmax-renorm", "float16", [])],
)
def test_steady_step_reads_no_number(tiny, in_steady_steps, router, dtype, own):
    """Except that on a CPU experts read their loads as a list."""
    with Operators() as host:
        torch.ones(()).item()
    assert HOST_READS & {*host.names}  # it sees them
    host.names.clear()
    begun = in_steady_steps(host.__enter__, lambda: host.__exit__(None, None, None))
    own = [
        *own,
        f"model.router={router}",
        f"train.dtype={dtype}",
        "model.backend=torch",
        "train.ema_decay=0.9",
    ]
    run(tiny(*EAGER, *own))
    assert {4, 7} < set(begun) and host.names and not HOST_READS & {*host.names}


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("router", ["dense", "kern", "softmax-renorm"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steady_step_never_makes_the_host_wait(tiny, in_steady_steps, router, dtype, compile):
    mode = torch.cuda.set_sync_debug_mode
    torch._dynamo.reset()  # after some graphs of one function it gives up, and says nothing
    torch._dynamo.utils.counters.clear()
    begun = in_steady_steps(lambda: mode("error"), lambda: mode("default"))
    own = [
        f"train.dtype={dtype}",
        f"model.router={router}",
        f"train.compile={str(compile).lower()}",
    ]
    try:
        run(tiny(*EAGER, "train.device=cuda", *own))
    finally:
        mode("default")
    assert {4, 7} < set(begun)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == compile


# ---- steps that are not finite
def flat(model):
    return torch.cat([t.detach().flatten() for t in (*model.parameters(), *model.buffers())])


@pytest.fixture
def poison(monkeypatch):
    """`poison(steps)` makes the gradients of those training steps infinite, `poison(steps, factor)`
    multiplies their
    losses. It returns a list that training fills: weights and biases, in one vector, as each step
    found them."""

    def poison(steps, factor=None):
        forward, weights = GPT.forward, []

        def poisoned(model, idx, targets=None):
            out = forward(model, idx, targets)
            if model.training and torch.is_grad_enabled():
                weights.append(flat(model))
                if len(weights) - 1 in steps:
                    loss = out.loss * (factor or 1)
                    if factor is None:
                        loss.register_hook(lambda gradient: gradient * math.inf)
                    out = out._replace(loss=loss)
            return out

        monkeypatch.setattr(GPT, "forward", poisoned)
        return weights

    return poison


@pytest.mark.parametrize(
    "dtype, most, message",
    [
        ("float32", 3, r"3 steps in a row skipped, .*\(step 9, loss \d.*lower optim\.lr"),
        (
            "float16",
            20,
            r"20 steps .*\(step 26, .*scale 1\)\. .* use train\.dtype = bfloat16",
        ),
    ],
)
def test_too_many_skipped_steps_in_a_row_stop_the_run(
    tiny, poison, monkeypatch, dtype, most, message
):
    """Not single ones."""
    monkeypatch.setattr("runtime.updates.MAX_SKIPPED_STEPS", most)
    weights = poison({1, 3, *range(6, 100)})
    own = [f"train.dtype={dtype}", "train.bias_update_rate=0.01", "eval.interval=50"]
    config = tiny("train.max_steps=50", *own)
    with pytest.raises(RunError, match=message):
        run(config)
    state, _, trouble = Run(folder.path_of(config)).status
    assert state == "failed" and trouble.startswith(f"{most} steps in a row skipped, the last for")
    assert len(weights) == 6 + most
    assert torch.equal(weights[6], weights[-1]) and weights[-1].isfinite().all()


@pytest.mark.parametrize(
    "loss, pause, saved, logged, passes",  # one of them for the crash dump
    [
        (math.nan, "log.interval=5 train.checkpoint_interval=3", [3], 0, 6),
        (-math.inf, "train.checkpoint_interval=5", [], 0, 6),
        (math.inf, "eval.interval=5", [], 0, 6),
        (math.nan, "log.interval=1 train.checkpoint_interval=1", [2, 3], 3, 5),
    ],
)
def test_loss_that_is_not_finite_stops_the_run_before_the_update(
    tiny, poison, saves_end_first, loss, pause, saved, logged, passes
):
    """It is noticed before the run logs, saves or evaluates. Later steps change nothing."""
    saves_end_first()
    weights = poison({3}, loss)
    config = tiny("train.max_steps=50", "log.interval=50", "eval.interval=50", *pause.split())
    with pytest.raises(RunError, match=rf"train loss {loss} in step 4, .* of step 3\. ") as error:
        run(config)
    assert "lower optim.lr" in str(error.value)
    assert "bfloat16" not in str(error.value)  # of no help to a run in float32
    assert len(weights) == passes
    assert weights[3].isfinite().all() and torch.equal(weights[3], weights[-1])
    assert not torch.equal(weights[2], weights[3])
    assert steps(config) == saved
    assert max(line["step"] for line in metrics(config)) == logged
    if saved:
        assert torch.equal(flat(load_model(folder.path_of(config)).model), weights[3])


@pytest.mark.numerics
def test_crash_dump_repeats_the_step(tiny, poison):
    """Of a step whose loss was bad only once: windows, dropout, weights and gradients are those of
    an undisturbed run. JSON has no NaN.
    """
    own = [
        "model.dropout=0.1",
        "train.dtype=float16",
        "train.micro_batch_size=4",
        f"run.seed={SEED}",
        "train.checkpoint_interval=1",
        "train.keep_checkpoints=9",
    ]
    undisturbed = tiny("run.name=undisturbed", *own)
    third = run(undisturbed)[4]
    poison({5}, math.nan)  # the second micro-batch of step 3
    with pytest.raises(RunError, match="train loss nan in step 3.*crash-step_00000002.json has"):
        run(config := tiny(*own))
    (file,) = folder.path_of(config).glob("crash-*")
    dump = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name}"))
    assert (dump["step"], dump["loss"], dump["loss_scale"]) == (2, "nan", 65536)
    (rank,) = dump["ranks"]
    tokens = open_tokens(Path(config.data.dir, config.data.name), "train")
    loader = Loader([tokens], config.model.block_size, config.train.batch_size, SEED)
    assert rank["windows"] == loader.indices(2).tolist()
    assert statistics.fmean(rank["losses"]) == pytest.approx(third["train/loss"], rel=1e-6)
    model = load_model(folder.path_of(undisturbed), 2).model
    norms = dump["parameters"]
    for name, p in model.named_parameters():
        assert norms[name]["weight_norm"] == pytest.approx(p.norm().item(), rel=1e-5), name
    norm = torch.tensor([norms[name]["gradient_norm"] for name in norms]).norm()
    limit = tolerance(torch.float32, 257 * 32)  # the longest tensor
    assert_near(norm, torch.tensor(third["optim/grad_norm"]), limit, "gradient norm")


def test_a_decision_is_compiled_once(monkeypatch):
    monkeypatch.setattr("runtime.updates.GROWTH_INTERVAL", 8)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    p = torch.nn.Parameter(torch.ones(7))
    optimizer = Optimizers([torch.optim.AdamW([p], fused=True)], [p])
    updates = Updates(optimizer, 1.0, True, compile=True)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for step in range(40):
            p.grad = torch.full((7,), math.inf if step in (20, 21, 30) else 1.0)
            updates.step(step, 0.0, torch.tensor(1.0 + step, dtype=torch.float64))
    counters = updates.read()
    # doubled after steps 7, 15, 29 and 38, halved after 20, 21 and 30
    assert (counters.skipped, counters.taken, counters.scale) == (3, 37, 65536 * 2)
    assert (counters.step, counters.loss, counters.healthy) == (39, 40.0, 1)


def test_muon_compiles_once_and_takes_the_steps_that_it_takes_without(monkeypatch):
    """At a rate of its own each step, the second one skipped."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    weights = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = GPT(SMALL)
        optimizers = build_optimizer(model, Optim(name="muon"), compile=compile)
        limit = {"recompile_limit": 4, "fail_on_recompile_limit_hit": True}  # shapes, not steps
        with torch._dynamo.config.patch(limit):
            for step, last in enumerate((1.0, math.inf, 3.0, 4.0)):
                for group in optimizers.param_groups:
                    group["lr"] = 0.1 / (step + 1)
                for p in model.parameters():
                    p.grad = torch.randn_like(p)
                    p.grad.view(-1)[-1] = last
                optimizers.step(torch.tensor(2.0), torch.tensor(float(step == 1)))
        weights.append(flat(model))
    assert weights[0].isfinite().all()
    assert_near(weights[1], weights[0], tolerance(torch.float32, 64), "weights")


def test_an_optimizer_that_ignores_clipping_and_skipped_steps_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    for unaware in (torch.optim.SGD([p]), torch.optim.AdamW([p], fused=False)):
        with pytest.raises(AssertionError, match="must obey grad_scale and found_inf"):
            Optimizers([unaware], [p])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_bad_loss_of_finite_gradients_changes_no_weight(loss):
    """The guard of the loss alone, without the one of the gradients; the step after it neither."""
    model = GPT(SMALL)
    updates = Updates(build_optimizer(model, Optim()), 1.0, scaled=False)
    before = flat(model)
    for step, value in enumerate((loss, 1.0)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert not updates.step(step, 0.1, torch.tensor(value, dtype=torch.float64))
    counters = updates.read()
    assert (counters.halted, counters.step, counters.taken) == (BAD_LOSS, 0, 0)
    assert torch.equal(flat(model), before)
    updates.numbers.copy_(torch.arange(141))  # the places that checkpoints have had from the start
    assert updates.read() == (0, 1, 2, 3, 4, 9, 10, 11, 12)


def test_a_skipped_step_leaves_muons_means_and_the_biases():
    model = GPT(SMALL.model_copy(update={"router": "kern"}))
    optimizers = build_optimizer(model, Optim(name="muon"))
    for value, found_inf in ((1.0, 0.0), (math.nan, 1.0)):
        before = flat(model), str(optimizers.state)
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizers.step(torch.ones(()), torch.tensor(found_inf))
    assert torch.equal(flat(model), before[0]) and str(optimizers.state) == before[1]
    routers = [block.mlp.router for block in model.blocks]
    margins = torch.ones(len(routers), SMALL.n_expert, MARGIN_BINS, dtype=torch.int64)
    margins[:, 0, :500] = 9
    for taken in (False, True):
        SelectionBias(routers, "quantile", 0.0).update(margins, margins, torch.tensor(taken))
        assert (routers[0].selection_bias == 0).all() == (not taken)


def test_a_skipped_step_leaves_the_mean_of_weights():
    """With decay d the mean of w_1 and w_2 is (d w_1 + w_2) (1 - d) / (1 - d²)."""
    p = torch.nn.Parameter(torch.tensor([0.0], dtype=torch.float64))
    average = WeightAverage(torch.nn.ParameterList([p]), 0.25)
    for weight, taken, n_taken in (
        (5.0, False, 0),
        (1.0, True, 1),
        (3.0, True, 2),
        (7.0, False, 2),
    ):
        p.data.fill_(weight)
        average.update(torch.tensor(taken), torch.tensor(float(n_taken), dtype=torch.float64))
    (mean,) = average.tensors.values()
    assert mean.item() == pytest.approx((0.25 * 1 + 3) * 0.75 / (1 - 0.25**2), rel=1e-6)
