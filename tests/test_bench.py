"""scripts/bench and scripts/gpu_check.sh. What is timed is not tested here, but what is made of the times."""

import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numerics import assert_near, seeded, tolerance
from test_kernels import CASES, make_inputs

import configure
import scripts.bench.__main__ as bench
from data import prepare
from kernels import reference
from model import GPT
from runtime import distributed
from scripts.bench import expert_peers, harness
from scripts.bench import limits as bench_limits
from scripts.bench import moe as bench_moe
from scripts.bench import steps as bench_steps
from scripts.bench.harness import Benchmark
from scripts.bench.peers import PEERS

REPO_ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
TINY = ["--tokens=64", "--n-embd=32", "--expert-hidden=16", "--n-expert=8", "--top-k=2"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "figures.json"


@pytest.fixture
def small_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_moe.CEILING, "cpu", (16, 24))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`timed(seconds)`: in place of clocks, `seconds(name)` for every function, all of which run once."""
    real = Benchmark.time

    def fake(seconds: Callable) -> None:
        def time_in_turn(self: Benchmark, functions: Mapping, may_fail: list = (), warm_up: int = 0) -> dict:
            self.args.rounds = 1
            return {name: seconds(name) for name in real(self, functions, may_fail, warm_up=0)}

        monkeypatch.setattr(Benchmark, "time", time_in_turn)

    return fake


def check_table(printed: str, data: dict) -> list[dict]:
    """The rows of `data`, after checking that what was printed is the same."""
    columns = list(data["rows"][0])
    lines = [re.split("  +", line.strip()) for line in printed.splitlines()]
    rows = [cells for cells in lines if len(cells) == len(columns) and cells != columns]
    for cells, row in zip(rows, data["rows"], strict=True):
        for cell, value in zip(cells, row.values(), strict=True):
            if value is None:
                assert cell == "-"
            elif isinstance(value, str):
                assert cell == value
            else:
                digits = len(cell.rstrip("%").partition(".")[2]) + 2 * cell.endswith("%")
                number = float(cell.rstrip("%").replace(",", "")) / (100 if cell.endswith("%") else 1)
                assert abs(number - value) <= 0.51 * 10**-digits, (cell, value)
    return data["rows"]


@pytest.fixture
def run_bench(out: Path, capsys: pytest.CaptureFixture) -> Callable:
    """`run_bench("moe", ...)` runs a command; returns the rows of its table in figures.json and what it printed."""

    def run(*words: object) -> tuple[list[dict], str]:
        assert bench.main([*map(str, words), f"--json={out}"]) == 0
        printed = capsys.readouterr().out
        return check_table(printed, json.loads(out.read_text())), printed

    return run


# ---- harness
@pytest.fixture
def benchmark(out: Path) -> Benchmark:
    return Benchmark(Namespace(what="moe", json=out, words=["moe"], rounds=3), CPU, "title")


def test_functions_are_timed_in_turn_after_a_warm_up(benchmark, monkeypatch):
    called, times = [], iter([100.0] * 4 + [1.0, 10.0, 5.0, 30.0, 2.0, 20.0])
    monkeypatch.setattr(harness, "time_once", lambda function, *rest: function() or next(times))
    median = benchmark.time({name: lambda name=name: called.append(name) for name in "ab"})
    assert "".join(called) == "ab" * 5  # two rounds of warm-up
    assert median == {"a": 2.0, "b": 20.0}


def test_what_fails_is_skipped_with_a_line(benchmark, capsys):
    def fail(error: Exception) -> None:
        raise error

    functions = {
        ("none", "forward"): lambda: fail(NotImplementedError("no kernel\nmore")),
        "large": lambda: fail(torch.OutOfMemoryError("too large")),
        "fine": lambda: None,
    }
    assert list(benchmark.time(functions, [("none", "forward")])) == ["fine"]
    skipped = {"none forward": "NotImplementedError: no kernel", "large": "OutOfMemoryError: too large"}
    assert benchmark.data["skipped"] == skipped
    assert capsys.readouterr().out.splitlines()[0] == "skipped none forward: NotImplementedError: no kernel"
    with pytest.raises(RuntimeError, match="ours"):  # which may not
        benchmark.time({"kernels": lambda: fail(RuntimeError("ours"))})

    calls = []
    with pytest.raises(RuntimeError, match="later"):  # it ran once, so the device has it
        benchmark.time({"a": lambda: calls.append(0) or len(calls) > 1 and fail(RuntimeError("later"))}, "a")
    calls.clear()  # memory may run out at any time
    functions["a"] = lambda: calls.append(0) or len(calls) > 3 and fail(torch.OutOfMemoryError("too large"))
    assert list(benchmark.time({"a": functions["a"], "fine": functions["fine"]})) == ["fine"]


@pytest.mark.parametrize("calls, rows", [(4, 0), (5, 0), (6, 2), (9, 2)])
def test_an_interrupt_leaves_what_was_timed(tiny_file, out, capsys, monkeypatch, calls, rows):
    """Of two models, in whole rounds, the first two of which are warm-up; no trace is begun."""
    called, time_once = [], harness.time_once

    def interrupted(*given: object) -> float:
        called.append(0)
        if len(called) > calls:
            raise KeyboardInterrupt
        return time_once(*given)

    monkeypatch.setattr(harness, "time_once", interrupted)
    trace = out.with_name("trace.json")
    arguments = ["--routers", "dense", "kern", "--peers", f"--json={out}", f"--profile={trace}"]
    assert bench.main(["step", str(tiny_file), *arguments]) == 130
    assert "interrupted" in capsys.readouterr().err and len(called) == calls + 1
    assert len(json.loads(out.read_text())["rows"]) == rows and not trace.read_bytes()


def test_figures_are_on_disk_after_each_table(benchmark, out, capsys):
    machine = json.loads(out.read_text())["machine"]
    assert machine["torch"] == torch.__version__
    benchmark.add_table(["a", "b"], [["x", 1.0]])
    benchmark.add_table(["a", "b"], [["y", None]])
    data = json.loads(out.read_text())
    assert check_table(capsys.readouterr().out, data) == [{"a": "x", "b": 1.0}, {"a": "y", "b": None}]
    assert data["what"] == "moe" and data["command"] == "python -m scripts.bench moe"
    assert list(out.parent.iterdir()) == [out]


# ---- moe
@pytest.mark.numerics
@pytest.mark.parametrize("case", ["typical", "idle expert"])
@pytest.mark.parametrize("name", [name for name in bench_moe.ALTERNATIVES if name != "F.grouped_mm"])
def test_alternatives_compute_the_same(name, case):
    leaves, experts, d_out = make_inputs(*CASES[case], case, torch.float64)
    assert_same(bench_moe.ALTERNATIVES[name], leaves, experts, d_out)


@pytest.mark.numerics
def test_grouped_mm_computes_the_same():
    """It has no float64, and wants rows of 16 bytes."""
    (x, w_in, w_out, weights, experts), d_out = bench_moe.make_inputs((24, 16, 8, 5, 2), torch.float32, CPU)
    assert_same(bench_moe.run_grouped_mm, [x, w_in, w_out, weights], experts, d_out)


@pytest.mark.numerics
def test_quack_would_compute_the_same(monkeypatch):
    """With a stand-in for its product, as its docstring has the shapes: rows in parts, or a sum over rows in parts."""

    def gemm(a, b, cu_seqlens_m=None, cu_seqlens_k=None):
        if cu_seqlens_m is not None:
            return torch.cat([a[i:j] @ w for w, i, j in zip(b, cu_seqlens_m[:-1], cu_seqlens_m[1:], strict=True)])
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in zip(cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)])

    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace(gemm=gemm))
    leaves, experts, d_out = make_inputs(*CASES["idle expert"], "idle expert", torch.float64)
    assert_same(expert_peers.run_quack, leaves, experts, d_out)


def test_libraries_get_the_same_numbers_in_their_layout():
    """And one that is missing says so in its first call."""
    inputs, _ = bench_moe.make_inputs((6, 4, 9, 3, 2), torch.float32, CPU, gated=True)
    assert [tuple(t.shape) for t in inputs[1:3]] == [(3, 4, 12), (3, 6, 4)]  # as many weights as without a gate
    for name, call in expert_peers.make_calls({"missing": expert_peers.run_liger}, inputs).items():
        assert name == "missing" and all(torch.equal(a, b) for a, b in zip(call.args, inputs, strict=True))
        assert call.args[1].mT.is_contiguous() and call.args[2].mT.is_contiguous() and call.args[1].requires_grad
        with pytest.raises(ModuleNotFoundError, match="liger_kernel"):
            call()


def assert_same(function, leaves, experts, d_out):
    limit = tolerance(leaves[0].dtype, max(*leaves[0].shape, *leaves[1].shape), roundings=4)  # as in test_kernels.py
    found = []
    for f in (function, reference.expert_mlp):
        inputs = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        y = f(*inputs, experts)
        found.append([y, *torch.autograd.grad(y, inputs, d_out)])
    for got, wanted in zip(*found, strict=True):
        assert_near(got, wanted, limit)


def test_moe(small_ceiling, run_bench):
    rows, _ = run_bench("moe", *TINY, "--rounds=1", "--dtype", "float32", "bfloat16")
    names = ["kernels", "F.grouped_mm", "loop", "dense", "matmul ceiling"]
    wanted = [(name, dtype) for dtype in ("float32", "bfloat16") for name in names]
    assert [(row["implementation"], row["dtype"]) for row in rows] == wanted
    kernels, *_, dense, ceiling = rows[:5]
    assert kernels["over kernels"] == dense["over dense"] == 1
    assert kernels["over dense"] == pytest.approx(kernels["forward+backward ms"] / dense["forward+backward ms"])
    assert kernels["TFLOP/s"] == pytest.approx(12 * 64 * 2 * 32 * 16 / kernels["forward+backward ms"] * 1e3 / 1e12)
    assert kernels["of ceiling"] == pytest.approx(kernels["TFLOP/s"] / ceiling["TFLOP/s"])
    # Before and after GELU, (N, K·H); the tokens, too, in float32, where the torch backend keeps no more than that.
    assert dense["saved MB"] == 2 * 64 * 32 * 4 / 1e6
    assert 64 * 32 * 4 / 1e6 <= kernels["saved MB"] < 2 * rows[2]["saved MB"]


def test_saved_bytes_count_what_a_function_keeps_by_itself():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.own = x + 1  # (4,) float32
            ctx.save_for_backward(x, x * 2)
            return x * 3

        @staticmethod
        def backward(ctx, d_out):
            return d_out

    x = torch.ones(4, requires_grad=True)
    assert bench_moe.count_saved_bytes(partial(Keeps.apply, x)) == 2 * 16
    assert bench_moe.count_saved_bytes(partial(lambda x: x.exp().sum(), x)) == 16
    assert bench_moe.count_saved_bytes(partial(lambda x: -x[:2], x)) == 0


def test_an_alternative_that_is_missing_is_skipped(small_ceiling, out, run_bench, monkeypatch):
    def missing(*args, **kwargs):
        raise NotImplementedError("grouped_mm: not on this device")

    monkeypatch.setattr(bench_moe.F, "grouped_mm", missing)
    rows, printed = run_bench("moe", *TINY, "--rounds=1", "--dtype=float32")
    assert "skipped F.grouped_mm both: NotImplementedError" in printed
    assert [row["implementation"] for row in rows][:2] == ["kernels", "loop"]
    assert list(json.loads(out.read_text())["skipped"]) == ["F.grouped_mm forward", "F.grouped_mm both"]


def test_tune_prints_lines_to_paste_and_leaves_the_tiles(run_bench, monkeypatch, timed):
    ours = pytest.importorskip("kernels.triton_experts")
    small, other = ours.Tile(16, 16, 16, 4, 2), ours.Tile(16, 32, 16, 4, 2)
    for kernel in ours.TILES[9]:
        monkeypatch.setitem(ours.TILES[9], kernel, small)
    monkeypatch.setattr(ours, "ROWS", 16)
    monkeypatch.setattr(bench_moe, "TILES", [other, small])
    seen = []
    run = ours.pick_tile
    monkeypatch.setattr(
        ours, "pick_tile", lambda kernel, *rest: seen.append((kernel, run(kernel, *rest))) or seen[-1][1]
    )
    timed(lambda name: 0.010 if name[2] == 16 else 0.009 if name[0] == "rows" else 0.0099)
    sizes = ["--tokens=8", "--n-embd=32", "--expert-hidden=32", "--n-expert=2", "--top-k=1"]
    rows, printed = run_bench("tune", *sizes)
    tried = ["up", "up_described", "rows", "rows_ahead", "down_grad", "weight_grad"]
    assert [row["kernel"] for row in rows] == [k for k in tried for _ in range(1 if k == "up_described" else 2)]
    assert [row["over present"] for row in rows[3:5]] == pytest.approx([0.9, 1])
    pasted = re.findall(r'^        "(\w+)": (Tile\(.*\)),(.*)$', printed, re.MULTILINE)
    wanted = dict.fromkeys(tried, small)  # a gain of 1% may be noise
    wanted["rows"] = other
    assert [(kernel, eval(tile, {"Tile": ours.Tile})) for kernel, tile, _ in pasted] == [*wanted.items()]
    assert [note.strip() for *_, note in pasted] == ["", "", "# changed", "", "", ""]
    assert set(ours.TILES[9].values()) == {small} and ("rows", other) in seen


def test_tune_takes_some_kernels_alone(run_bench, monkeypatch):
    rows, printed = run_bench("tune", *TINY, "--rounds=1", "--kernels", "weight_grad")
    assert {row["kernel"] for row in rows} == {"weight_grad"} and "128, 256, 64, 8, 5" in {row["tile"] for row in rows}
    assert printed.count(": Tile(") == 1


def test_limits(run_bench, timed):
    """Rates are amounts over seconds, in the units that the budget assumes; a backend that is missing is skipped."""
    pytest.importorskip("triton")
    timed(lambda name: 0.5)
    rows, printed = run_bench("limits")
    assert [row["rate"] for row in rows] == ["L2", "memory", "flash"] and "skipped cudnn: RuntimeError" in printed
    l2, memory, flash = (row["measured"] for row in rows)
    assert l2 == pytest.approx(8 * 2 * 4096 * 4 / 0.5 / 1.7e9)  # bytes of 8 programs, of 2 blocks each, per clock
    assert memory == pytest.approx(2 * 4 * 2**16 / 0.5 / 1e12) and flash == pytest.approx(7 * 32 * 32 * 16 / 0.5 / 1e12)
    assert [row["assumed"] for row in rows] == [36, 3.0, 180]


def test_reading_from_l2_sums_what_it_reads():
    pytest.importorskip("triton")
    x = torch.randn(3, bench_limits.BLOCK, generator=seeded())
    out = torch.empty(5, bench_limits.BLOCK)
    bench_limits.read_l2(x, out, 2)
    for program in range(5):
        assert torch.equal(out[program], x[program % 3] + x[(program + 1) % 3])


# ---- step, router, experts, length
def test_step(tiny_file, run_bench, timed, monkeypatch):
    monkeypatch.setattr(distributed, "peak_flops", lambda device, dtype: 1e9)
    timed(lambda name: {"dense": 0.25, "kern": 0.5, "nanogpt": 1.0}[name[0]])

    def not_installed(config):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setitem(PEERS, "olmoe-eager", not_installed)
    arguments = ["--routers", "dense", "kern", "--dtype", "float32", "bfloat16", "--peers", "olmoe-eager", "nanogpt"]
    rows, printed = run_bench("step", tiny_file, *arguments)
    assert "skipped olmoe-eager float32 off: ImportError: No module named 'transformers'" in printed
    cases = [(model, dtype) for dtype in ("float32", "bfloat16") for model in ("dense", "kern", "nanogpt")]
    assert [(row["router"], row["dtype"], row["compile"]) for row in rows] == [(*case, "off") for case in cases]
    assert [row["ratio"] for row in rows] == [1, 2, 4] * 2
    assert [row["tokens/s"] for row in rows] == [1024, 512, 256] * 2  # 8 · 32 a step
    # A layer's active weights: 4·32² of attention, 2·32·8·2 of experts, 32·8 of the router; the head's 257·32.
    flops = 6 * (2 * (4096 + 1024 + 256) + 8224) + 12 * 2 * 32 * 32
    assert flops == 138432
    mfu = [(flops - 6 * 2 * 256) * 1024 / 1e9, flops * 512 / 1e9, None]
    assert [row["MFU"] for row in rows] == [pytest.approx(value) for value in mfu * 2]
    assert "6 per token and active weight" in printed and rows[0]["peak GB"] is None
    # Of the plain GPT: tables of 257 and 32 rows, a layer with biases (hidden 16), the last norm.
    layer = 4 * 32 * 32 + 4 * 32 + 2 * 32 * 16 + 16 + 32 + 4 * 32
    assert rows[2]["M total"] == pytest.approx((289 * 32 + 2 * layer + 2 * 32) / 1e6) and rows[2]["M active"] is None


def test_step_with_document_masks(tiny_file, run_bench, timed):
    timed(lambda name: {"dense": 0.25, "dense, masks": 0.5, "kern": 1.0, "kern, masks": 2.0}[name[0]])
    rows, _ = run_bench("step", tiny_file, "--routers", "dense", "kern", "--peers", "--data.document_mask=true")
    assert [(row["router"], row["ratio"]) for row in rows] == [
        ("dense", 1), ("dense, masks", 2), ("kern", 4), ("kern, masks", 8)
    ]  # fmt: skip


def test_step_compiled(tiny_file, run_bench, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, *more, **still: compiled.append(model) or model)
    arguments = ["--routers", "dense", "--peers", "nanogpt", "--compile", "on", "off", "--rounds=1"]
    rows, _ = run_bench("step", tiny_file, *arguments)
    wanted = [("off", "dense"), ("off", "nanogpt"), ("on", "dense"), ("on", "nanogpt")]
    assert [(row["compile"], row["router"]) for row in rows] == wanted
    assert len(compiled) == 2 + 1  # our blocks, and another's model as a whole


def test_steps_leave_the_weights_where_they_are(tiny):
    """So that routing, and with it the time, is the same from the first step to the last; AdamW runs all the same."""
    config = tiny("model.router=kern")
    model, optimizer = bench_steps.build(config, CPU, bench_steps.GPT)
    before = [p.clone() for p in model.parameters()]
    bench_steps.Step(config, CPU, torch.float32, update=False)()
    assert not any(state["step"] for state in optimizer.state.values())
    bench_steps.Step(config, CPU, torch.float32)()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert all(p.grad is None for p in model.parameters())


def test_router_share_of_a_step(tiny_file, run_bench, timed):
    seconds = {"step": 0.1, "softmax": 0.002, "kern": 0.003, "tanh": 0.001}
    timed(lambda name: seconds[name[0]] / (4 if name[1] == "forward" else 1))
    (*rows, step), printed = run_bench("router", tiny_file, "--routers", "dense", "softmax", "kern", "tanh")
    assert [row["router"] for row in rows] == ["softmax", "kern", "tanh"]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1.5, 0.5])
    assert [row["share of step"] for row in rows] == pytest.approx([0.04, 0.06, 0.02])  # 2 layers
    assert rows[1]["forward ms"] == pytest.approx(0.75) and rows[1]["ms per step"] == pytest.approx(6)
    assert (step["router"], step["ms per step"]) == ("step, float32", 100) and "kern has 2 routers" in printed


def test_router_compiled(tiny_file, run_bench, timed, monkeypatch):
    """Its modules as they are first, then compiled, where one that fails is skipped with a line."""
    compiled = []

    def compile(module):
        compiled.append(type(module).__name__)
        if module.__dict__.get("gamma") is None and len(compiled) == 1:
            module.forward = None

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    timed(lambda name: 0.001)
    rows, printed = run_bench("router", tiny_file, "--routers", "softmax", "kern", "--compile", "on", "off")
    modes = [("off", "softmax"), ("off", "kern"), ("off", "step, float32"), ("on", "kern"), ("on", "step, float32")]
    assert [(row["compile"], row["router"]) for row in rows] == modes
    assert "skipped softmax both: TypeError" in printed and rows[3]["ratio"] is None
    assert compiled == ["Router", "Router", "Block", "Block"]


def test_experts(tiny_file, run_bench, timed):
    timed(lambda name: name[1] / 100 + (name[0] == "step") / 10)  # experts, and whether AdamW ran
    rows, _ = run_bench("experts", tiny_file, "--model.router=kern", "--experts", "4", "8")
    four, eight, *_ = rows
    parts = [(part, experts) for part in ("step", "forward+backward") for experts in (4, 8)]
    assert [(row["part"], row["experts"]) for row in rows] == parts
    assert [row["ratio"] for row in rows] == pytest.approx([1, 0.18 / 0.14, 0.04 / 0.14, 0.08 / 0.14])
    # 257·32 + 32·32 tables, the last norm's 32, a layer 4·32² + 2·32, the router's 8·33 + 1 and 2·32·8·8 of experts.
    assert eight["M total"] == pytest.approx(0.026322)
    assert eight["M active"] - four["M active"] == pytest.approx(2 * 4 * 33 / 1e6)  # the routers' rows alone
    assert eight["tokens/s"] == pytest.approx(256 / 0.18)


def test_length(tiny_file, run_bench, timed, monkeypatch):
    shapes, draw = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda high, size, **more: shapes.append(size) or draw(high, size, **more))
    timed(lambda name: {"dense": 1, "kern": 2}[name[0]] * (1 + name[1] / 64))
    rows, _ = run_bench("length", tiny_file, "--lengths", "16", "64")
    assert shapes == [(2, 16, 16), (2, 4, 64)] * 2  # x and y: 256 tokens each time
    cells = [(router, T) for router in ("dense", "kern") for T in (16, 64)]
    assert [(row["router"], row["length"]) for row in rows] == cells
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1.6, 2, 3.2])
    assert {row["tokens/s"] * row["ms"] for row in rows} == {256e3}


def test_profile_writes_a_trace_and_prints_its_largest_operators(tiny_file, tmp_path, capsys):
    trace = tmp_path / "trace.json.gz"
    arguments = ["--routers", "kern", "--peers", "--rounds=1", f"--profile={trace}"]
    assert bench.main(["step", str(tiny_file), *arguments]) == 0
    head, printed = capsys.readouterr().out.split(f"{trace}: three calls of a step of kern, float32, off")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    listed = re.findall(r"^ *(aten::\w+) +[\d.]+% ", printed, re.MULTILINE)
    assert "Self CPU %" in printed and len(listed) > 5 and names >= {*listed}


# ---- what is refused
def test_bad_input_is_refused_before_anything_is_timed(tiny_file, tmp_path, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("timed")

    monkeypatch.setattr(Benchmark, "time", never)

    def error(*arguments):
        assert bench.main([str(argument) for argument in arguments]) == 2
        return capsys.readouterr().err

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA device" in error("moe", *TINY, "--device=cuda")
    for option in ("--json", "--profile"):
        for path in (tmp_path / "no folder" / "x.json", tmp_path):
            assert f"{path} cannot be written" in error("moe", *TINY, option, path)
            assert f"{path} cannot be written" in error("step", tiny_file, option, path)
    for command in ("step", "router", "experts", "length"):
        assert "did you mean 'model.n_layer'?" in error(command, tiny_file, "--model.n_layr=1")
    for command in ("moe", "tune"):
        assert "takes no config keys" in error(command, "--model.n_layer=1")
        assert "--top-k 9 must be at most" in error(command, *TINY, "--top-k=9")
    assert "dense has no router" in error("router", tiny_file, "--routers", "dense")
    assert "dense has no experts" in error("experts", tiny_file, "--model.router=dense")
    assert "does not divide into sequences of 48" in error("length", tiny_file, "--lengths", "16", "48")
    assert "tune takes one of float16 and bfloat16" in error("tune", "--dtype", "float32")
    monkeypatch.setattr(bench_moe.kernels, "find_triton_problem", lambda device, dtype: "does not run on cpu")
    assert "triton does not run on cpu" in error("tune", *TINY)
    for arguments in (["--routers", "kernn"], ["--rounds", "0"]):
        with pytest.raises(SystemExit) as stop:
            bench.main(["step", str(tiny_file), *arguments])
        assert stop.value.code == 2 and arguments[1] in capsys.readouterr().err


# ---- gpu_check.sh

FAKE = """\
#!/usr/bin/env bash
# In place of Python: prints its arguments.
[ "$1" = -c ] && { echo packages; exit 0; }
printf '%s\\n' "$@"
while [ $# -gt 1 ]; do
    [ "$1" = --json ] && echo '{"rows": []}' > "$2"
    shift
done
"""
CLOCK = """\
# Sourced by the script before it starts: time passes only in pieces, as much as a piece may take in `length`.
unset SECONDS
SECONDS=0
timeout() {
    local most=$4
    shift 4
    "$@"
    case "$*" in
        *"bench router"*) return 3;;
        *"bench length"*) ((SECONDS += most)); return 124;;
    esac
}
"""
BENCH = ["limits", "weight_grad", "moe", "step", "router", "experts", "length", "peers"]
TRACE = ["trace-step", "trace-moe", "compiled-dense", "compiled-kern", "tune"]
HANG = 600  # seconds, for scripts that take one


def start_check(tmp_path: Path, *arguments: str, fake: str = FAKE, **environment: str) -> subprocess.Popen:
    """Start gpu_check.sh with `fake` for Python, in a process group of its own, which heeds SIGINT."""
    python = tmp_path / "python"
    python.write_text(fake)
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "FOLDER": str(tmp_path / "out")} | environment
    command = ["bash", str(REPO_ROOT / "scripts/gpu_check.sh"), *arguments]
    pipe = subprocess.PIPE
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job inherits it ignored
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0, preexec_fn=heed
    )


def read_logs(out: Path) -> dict[str, str]:
    """{piece: what it printed}"""
    pieces = re.split(r"^== ([\w-]+): .*\n", (out / "gpu_check.log").read_text(), flags=re.M)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def read_pieces(printed: str) -> dict[str, str]:
    """{piece: what became of it}"""
    lines = printed.split("== summary")[1].splitlines()[1:]
    return {line.split()[0]: line.partition(" s  ")[2] for line in lines if not line.startswith("compare runs")}


def test_gpu_check_continues_after_pieces_that_fail(tmp_path):
    (tmp_path / "clock").write_text(CLOCK)
    script = start_check(tmp_path, "bench", "trace", LIMIT="45", BASH_ENV=str(tmp_path / "clock"))
    printed, _ = script.communicate(timeout=HANG)
    words = read_pieces(printed)
    assert script.returncode == 1
    assert list(words) == [*BENCH, *TRACE]
    assert words["router"] == "FAILED, exit code 3" and words["length"] == "FAILED, interrupted"
    assert all(words[name] == "ok" for name in ("moe", "step", "experts", *TRACE))
    assert "peers          left out, no time" in printed
    log = read_logs(tmp_path / "out")["router"]
    figures = {part: json.loads((tmp_path / f"out/figures-{part}.json").read_text()) for part in ("bench", "trace")}
    assert set(figures["bench"]) == set(BENCH) - {"peers"} and set(figures["trace"]) == set(TRACE)
    (tmp_path / "clock").write_text(CLOCK.replace("return 124", "return 0"))  # now only router fails
    script = start_check(tmp_path, "bench", BASH_ENV=str(tmp_path / "clock"))
    assert read_pieces(script.communicate(timeout=HANG)[0])["router"] == "FAILED, exit code 3"
    assert script.returncode == 1
    assert log.startswith("-m\nscripts.bench\nrouter\nconfig/125m.toml\n") and log in printed


@pytest.mark.parametrize("rehearse", [[], ["--rehearse"]])
def test_gpu_check_asks_for_what_the_commands_take(tmp_path, rehearse):
    script = start_check(tmp_path, *rehearse)
    printed, _ = script.communicate(timeout=HANG)
    assert script.returncode == 0
    trace = [name for name in TRACE if not (rehearse and name == "compiled-kern")]
    assert list(read_pieces(printed)) == [*BENCH, *trace, "kernels", "steps", "data", "train"]
    asked = {name: log.splitlines() for name, log in read_logs(tmp_path / "out").items()}
    assert len(list((tmp_path / "out").iterdir())) <= 8  # the device machine brings back few
    for name, words in asked.items():
        if words[:2] != ["-m", "scripts.bench"]:
            continue
        args, overrides = bench.build_parser().parse_known_args(words[2:])
        assert Path(args.json).name == f"{name}.json"
        if args.what == "limits":
            assert not overrides
        elif args.what in ("moe", "tune"):
            bench_moe.pick_shape(args, overrides, CPU)
        else:
            configure.load(REPO_ROOT / args.config, [*overrides, "--model.router=kern"])
        assert bool(getattr(args, "profile", None)) == name.startswith("trace")
    name = "packages-rehearsal" if rehearse else "packages"  # what one trains on the other does not find
    assert prepare.parse_arguments(asked["data"][2:]).name == name
    assert asked["train"][:2] == ["-m", "scripts.sweep"]
    file, overrides = configure.split_command_line(asked["train"][2:])
    configs = [configure.load(REPO_ROOT / file, point) for point in configure.sweep_points(REPO_ROOT / file, overrides)]
    assert [config.model.router for config in configs] == ["kern", "dense", "softmax", "sigmoid", "tanh"]
    assert {(config.data.name, config.train.max_steps) for config in configs} == {(name, 10 if rehearse else 80)}
    assert f"python -m scripts.report {Path(configs[0].run.dir).name}/*" in printed
    kernels, steps = ({word for word in asked[name] if word.startswith("tests/")} for name in ("kernels", "steps"))
    mark = "mark." + "gpu"
    marked = {f"tests/{file.name}" for file in (REPO_ROOT / "tests").glob("test_*.py") if mark in file.read_text()}
    assert steps | kernels == marked and not steps & kernels


def test_gpu_check_without_a_gpu_or_with_an_unknown_part(tmp_path):
    refused = {(): "no CUDA device here; --rehearse", ("benhc",): "no part benhc: name bench, trace"}
    for arguments, message in refused.items():
        script = start_check(tmp_path, *arguments, fake=FAKE.replace("echo packages; exit 0;", "exit 1;"))
        _, errors = script.communicate(timeout=HANG)
        assert script.returncode == 2 and message in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.integration
def test_gpu_check_stops_at_ctrl_c(tmp_path):
    fake = f"""\
#!/usr/bin/env bash
[ "$1" = -c ] && {{ echo x; exit 0; }}
exec {sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(7200)'
"""
    script = start_check(tmp_path, "bench", fake=fake, LIMIT="7200")
    log = tmp_path / "out/gpu_check.log"
    while not (log.is_file() and re.search(r"^\d+\n", log.read_text(), flags=re.M)):
        assert script.poll() is None
        time.sleep(0.1)
    os.killpg(script.pid, signal.SIGINT)
    _, errors = script.communicate(timeout=HANG)
    assert script.returncode == 130 and "stopped: figures and logs so far are in" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(read_logs(tmp_path / "out")["limits"].split()[0]), 0)
    assert list(read_logs(tmp_path / "out")) == ["limits"]


# ---- peers
@pytest.mark.parametrize("peer", PEERS)
def test_peers_learn(peer):
    """Each has the shape's depth, width and number of experts, and gradients for all that it has."""
    config = configure.load(REPO_ROOT / "config/quickstart.toml", ["--model.router=kern", "--model.n_expert=8"]).model
    torch.manual_seed(0)
    model = PEERS[peer](config)
    x = torch.randint(257, (2, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = model(x[:, :-1], x[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(257), abs=0.4) and losses[-1] < losses[0] - 0.2
    assert all(p.grad is not None for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts == (0 if peer == "nanogpt" else 2 * 8 * 3 * 128 * 8)


@pytest.mark.numerics
def test_the_plain_gpt_equals_our_dense_one():
    overrides = ["--model.router=dense", "--model.pos=learned", "--model.bias=true"]
    config = configure.load(REPO_ROOT / "config/quickstart.toml", overrides).model
    ours, plain, x = GPT(config), PEERS["nanogpt"](config), torch.randint(257, (2, 33), generator=seeded())
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
            other.copy_(mine.add_(0.02 * torch.randn(mine.shape, generator=seeded(1))))  # biases are 0 at first
    limit = tolerance(torch.float32, config.n_embd, roundings=16)  # of some 8 operators of each layer
    assert_near(plain(x[:, :-1], x[:, 1:]).loss, ours(x[:, :-1], x[:, 1:]).loss, limit)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_peers_compute_experts_in_the_autocast_dtype(dtype):
    config = configure.load(REPO_ROOT / "config/quickstart.toml", ["--model.router=kern", "--model.n_expert=8"]).model
    model, seen = PEERS["olmoe-grouped"](config), []
    stacks = [m for m in model.modules() if any(p.dim() == 3 for p in m.parameters(recurse=False))]
    for stack in stacks:
        stack.register_forward_pre_hook(lambda m, given: seen.extend(p.dtype for p in m.parameters(recurse=False)))
    x = torch.randint(257, (2, 33))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(x, x).loss.backward()
    assert stacks and set(seen) == {dtype or torch.float32}
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for m in stacks for p in m.parameters())
