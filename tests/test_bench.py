"""tools/bench and tools/gpu_check.py: what is timed, and what is made of the times."""

import json
import math
import re
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from runs import REPO_ROOT
from test_kernels import assert_equals_reference

import configure
import tools.bench.__main__ as bench
from model import GPT
from router import ROUTERS
from runtime import distributed
from runtime import state as train_state
from tools import gpu_check
from tools.bench import harness
from tools.bench import moe as bench_moe
from tools.bench import steps as bench_steps
from tools.bench.harness import Benchmark
from tools.bench.peers import find_peer

CPU = torch.device("cpu")


@pytest.fixture
def run_bench(tmp_path, capsys):
    """`run_bench("moe", ...)` runs a command; returns the rows of its table in figures.json and
    what it printed.
    """

    def run(*arguments, code=0):
        out = tmp_path / "figures.json"
        assert bench.main([*map(str, arguments), f"--json={out}"]) == code
        return json.loads(out.read_text())["rows"], capsys.readouterr().out

    return run


@pytest.fixture
def timed(monkeypatch):
    """`timed(seconds)`: in place of clocks, `seconds(*name)` for every function, all of which run
    once.
    """

    def fake(seconds):
        def time_in_turn(self, functions):
            for function in functions.values():
                function()
            return {name: seconds(*name) for name in functions}

        monkeypatch.setattr(Benchmark, "time", time_in_turn)

    return fake


def test_functions_are_timed_in_turn_and_what_fails_is_skipped(monkeypatch):
    called = []
    times = {"a": iter([100.0, 100.0, 1.0, 5.0, 2.0]), "b": iter([100.0, 100.0, 10.0, 30.0, 20.0])}

    def time_once(function, *_):
        function()
        return next(times[called[-1]]), 0.0

    monkeypatch.setattr(harness, "time_once", time_once)
    benchmark = Benchmark(
        Namespace(what="moe", json=None, command="python", rounds=3), CPU, "title"
    )
    functions = {(name,): partial(called.append, name) for name in "ab"}
    functions["large", "both"] = mock.Mock(side_effect=torch.OutOfMemoryError("x"))
    assert benchmark.time(functions) == {("a",): 2.0, ("b",): 20.0}
    rounds = {"".join(called[i : i + 2]) for i in range(0, 10, 2)}  # two of them to warm up
    assert rounds == {"ab", "ba"}  # in no fixed order
    assert benchmark.data["skipped"] == {"large both": "OutOfMemoryError: x"}


# ---- moe
@pytest.mark.numerics
@pytest.mark.parametrize("name", bench_moe.ALTERNATIVES)
def test_alternatives_compute_the_same(name):
    """In float32, since F.grouped_mm has no float64; of 6 tokens for 5 experts, some are idle."""
    (*leaves, experts), d_out = bench_moe.make_inputs((6, 16, 8, 5, 1), torch.float32, CPU)
    assert len(experts.unique()) < 5

    def run(leaves, experts, d_out):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = bench_moe.ALTERNATIVES[name](*leaves, experts)
        return [out, *torch.autograd.grad(out, leaves, d_out)]

    assert_equals_reference(leaves, experts, d_out, run)


def test_moe(run_bench, monkeypatch):
    monkeypatch.setitem(bench_moe.CEILING, "cpu", (16, 24))
    rows, _ = run_bench(
        "moe", "--rounds=1", "--shape", 64, 32, 16, 8, 2, "--dtype", "float32", "bfloat16"
    )
    names = ["kernels", "F.grouped_mm", "loop", "dense", "matmul ceiling"]
    wanted = [(name, dtype) for dtype in ("float32", "bfloat16") for name in names]
    assert [(row["implementation"], row["dtype"]) for row in rows] == wanted
    kernels, *_, dense, ceiling = rows[:5]
    assert kernels["over kernels"] == dense["over dense"] == 1
    assert kernels["over dense"] == pytest.approx(
        kernels["forward+backward ms"] / dense["forward+backward ms"]
    )
    assert kernels["TFLOP/s"] == pytest.approx(
        12 * 64 * 2 * 32 * 16 / kernels["forward+backward ms"] * 1e3 / 1e12
    )
    assert kernels["of ceiling"] == pytest.approx(kernels["TFLOP/s"] / ceiling["TFLOP/s"])
    # Before and after GELU, (N, K·H); the tokens, too, in float32, where the torch backend keeps no
    # more than that.
    assert dense["saved MB"] == 2 * 64 * 32 * 4 / 1e6
    assert 64 * 32 * 4 / 1e6 <= kernels["saved MB"] < 2 * rows[2]["saved MB"]


# ---- step and router
def test_step(tiny_file, run_bench, timed, monkeypatch):
    monkeypatch.setattr(distributed, "peak_flops", lambda device, dtype: 1e9)
    timed(lambda name: {"dense": 0.25, "kern": 0.5}[name.split(", ")[0]])
    keys = [
        "--model.router=dense",
        "--data.document_mask=false",
        "--model.router=kern",
        "--data.document_mask=true",
    ]
    rows, printed = run_bench("step", tiny_file, *keys)
    assert [row["alternative"] for row in rows] == [
        "dense, document_mask=false",
        "dense, document_mask=true",
        "kern, document_mask=false",
        "kern, document_mask=true",
    ]
    assert [row["ratio"] for row in rows] == [1, 1, 2, 2]
    assert [row["tokens/s"] for row in rows] == [1024, 1024, 512, 512]  # 8 · 32 a step
    # A layer's active weights: 4·32² of attention, 2·32·8·2 of experts, 32·8 of the router; the
    # head's 257·32.
    flops = 6 * (2 * (4096 + 1024 + 256) + 8224) + 12 * 2 * 32 * 32
    mfu = [(flops - 6 * 2 * 256) * 1024 / 1e9, flops * 512 / 1e9]
    assert [row["MFU"] for row in rows[::2]] == [pytest.approx(value) for value in mfu]
    assert re.search(r"kern, document_mask=true +float32 +500.000 +512.000 +2.000", printed)


def test_a_peer_has_the_shape_of_the_first_alternative(tiny_file, run_bench):
    """In OLMoE's form ours has as many parameters, and random weights have the loss of chance."""
    form = "router=softmax norm=rmsnorm gated=true activation=silu qk_norm=all pos=rope"
    form += " tie_embeddings=false"
    keys = [f"--model.{key}" for key in form.split()]
    config = configure.load(str(tiny_file), keys)
    peer = find_peer("olmoe", config.model)(config.model)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (peer, GPT(config.model))]
    assert sizes[0] == sizes[1]
    x, y = torch.randint(config.model.vocab_size, (2, 2, 8))
    assert peer(x, y).item() == pytest.approx(math.log(config.model.vocab_size), abs=0.3)
    rows, _ = run_bench("step", tiny_file, *keys, "--peer=olmoe", "--rounds=1")
    assert [row["alternative"] for row in rows] == ["softmax", "olmoe"]
    assert rows[1]["MFU"] is None and rows[1]["ratio"] > 0


@pytest.mark.parametrize("masked", [False, True])
def test_a_step_is_a_whole_one_but_leaves_the_weights(tiny, masked, monkeypatch):
    """So that routing, and with it the time, is the same from the first step to the last; AdamW
    runs all the same.
    """
    overrides = (
        f"data.document_mask={masked}".lower(),
        "train.activation_checkpointing=true",
        "train.compile=on",
    )
    compiled = []
    monkeypatch.setattr(bench_steps, "compile_blocks", compiled.append)
    step = bench_steps.Step(tiny("model.router=kern", *overrides), CPU)
    model, optimizer, _ = step.parts
    read = []
    model.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    before = [p.clone() for p in model.parameters()]
    step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(state["step"] == 1 and state["exp_avg"].any() for state in optimizer.state.values())
    assert all(p.grad is None for p in model.parameters()) and compiled == [model]
    assert model.document_token == (0 if masked else None) and all(
        block.checkpointing for block in model.blocks
    )
    assert not masked or (read[0][..., ::8] == 0).all()
    step()
    first, second = read
    assert not first.equal(second)  # loads change as in training


def test_a_step_has_the_balancing_of_training(tiny, monkeypatch):
    overrides = "model.router=kern", "train.bias_update=quantile"
    step = bench_steps.Step(tiny(*overrides), CPU)
    seen, solve = [], train_state.solve_selection_bias
    monkeypatch.setattr(
        train_state, "solve_selection_bias", lambda *args: seen.append(args[1]) or solve(*args)
    )
    step()
    routers = step.selection_bias.routers
    assert len(seen) == len(routers) == step.config.model.n_layer
    for margins in seen:  # every token has a margin to every expert
        assert (margins.sum(-1) == step.tokens).all()
    assert step.selection_bias.moved.eq(0).all()  # routing is the same in each step
    assert not any(router.selection_bias.any() for router in routers)


def test_router_beside_a_step(tiny_file, run_bench, timed):
    seconds = {"softmax": 0.002, "kern": 0.003}
    timed(
        lambda kind, name: (
            seconds.get(name, 0.001) if kind == "router" else {"softmax": 0.1, "kern": 0.1}[name]
        )
    )
    assert [row["alternative"] for row in run_bench("router", tiny_file)[0]] == [*ROUTERS][1:]
    rows, _ = run_bench("router", tiny_file, "--model.router=softmax", "--model.router=kern")
    assert [row["alternative"] for row in rows] == ["softmax", "kern"]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1.5])
    assert [row["share"] for row in rows] == pytest.approx([0.04, 0.06])  # 2 layers
    assert rows[1]["router ms"] == pytest.approx(3)
    rows, _ = run_bench("router", tiny_file, "--model.router=kern", "--model.n_dense_layer=1")
    assert rows[0]["share"] == pytest.approx(0.03)  # one layer has a router


@pytest.mark.parametrize("arguments, message", [
    (["moe", "--json=/no-such-folder/x.json"], "/no-such-folder"),
    (["step", "FILE", "--model.n_layr=1"], "did you mean 'model.n_layer'?"),
    (["moe", "--rounds=0"], "--rounds 0: expected 1 or more"),
    (["moe", "--model.n_layer=1"], "takes no config keys"),
    (["moe", "--shape", "8", "8", "8", "8", "9"], "K at most E"),
    (["step", "FILE", "--peer=nanogpt"], "4 * n_embd = 128 hidden units, these 16"),
    (["step", "FILE", "--peer=nanogpt", "--model.expert_hidden=64"], "no Python package nanogpt"),
    (["router", "FILE", "--model.router=dense"], "dense has no router: set --model.router=kern"),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_is_timed(
    arguments, message, tiny_file, capsys, monkeypatch
):
    monkeypatch.setattr(Benchmark, "time", lambda *args, **kwargs: pytest.fail("timed"))
    assert (
        bench.main([str(tiny_file) if argument == "FILE" else argument for argument in arguments])
        == 2
    )
    assert message in capsys.readouterr().err


# ---- gpu_check
def read_pieces(out):
    """{piece: result} of a check."""
    figures = json.loads((out / "gpu_check.json").read_text())
    return {name: result for name, (_, result) in figures["pieces"].items()}


def test_gpu_check_rehearses_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_moe.CEILING, "cpu", (16, 24))
    monkeypatch.chdir(REPO_ROOT)
    short = [*gpu_check.TINY.config, "--model.block_size=32", "--train.batch_size=1"]
    monkeypatch.setattr(gpu_check, "TINY", gpu_check.TINY._replace(config=short))
    pieces = ["steps", "experts", "errors", "attention", "trace", "routers"]
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path), *pieces]) == 0
    assert read_pieces(tmp_path) == dict.fromkeys(pieces, "ok")
    figures = json.loads((tmp_path / "gpu_check.json").read_text())
    assert figures["about"]["device"] == "cpu" and len(figures["errors"]["kernels float32"]) == 5
    rows = figures["step float32"]["rows"]
    assert [row["alternative"] for row in rows] == [
        "dense, cuda_graph=off",
        "dense, cuda_graph=on",
        "kern, cuda_graph=off",
        "kern, cuda_graph=on",
    ]
    assert (tmp_path / "kern-compile-off.trace.json.gz").exists()


def test_gpu_check_goes_on_after_a_failure_and_leaves_out_what_does_not_fit(
    tmp_path, monkeypatch, capsys
):
    def fail(check):
        raise torch.OutOfMemoryError("no memory\nat all")

    pieces = {
        "first": gpu_check.Piece(fail, 0),
        "second": gpu_check.Piece(lambda check: check.figures.update(done=True), 0),
        "long": gpu_check.Piece(fail, 3600),
    }
    times = iter([0, 9, 9, 18, 18, 27, 27, 28, 28, 31])  # three calls that warm up, and two
    with monkeypatch.context() as patch:
        patch.setattr(gpu_check.time, "perf_counter", lambda: next(times))
        assert gpu_check.time_function(list, rounds=2) == 2
    monkeypatch.setattr(gpu_check, "PIECES", pieces)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "describe_machine", dict)
    monkeypatch.setattr(gpu_check, "free_memory", nullcontext)
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert read_pieces(tmp_path) == {"first": "FAILED: OutOfMemoryError: no memory", "second": "ok"}
    assert re.search(r"long +left out: about 3600 s", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "torch finds no CUDA device here"),
        (["--rehearse", "sleep"], "no piece sleep: name some of steps"),
    ],
)
def test_gpu_check_refuses(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
