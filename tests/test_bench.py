"""scripts/bench.py and scripts/gpu_check.sh. What is timed is not tested here, but what is made of the times."""

import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_kernels import CASES, make

import configure
import scripts.bench.__main__ as bench
from data import prepare, tokenizer
from kernels import reference
from runtime import RunError, distributed
from scripts.bench import data as bench_data
from scripts.bench import experts as bench_moe
from scripts.bench import step as bench_step
from scripts.bench import tools as bench_tools
from scripts.bench import train as bench_train
from scripts.bench.peers import PEERS
from scripts.report.runs import load

REPO_ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
TINY = ["--tokens=64", "--n-embd=32", "--expert-hidden=16", "--n-expert=8", "--top-k=2"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "figures.json"


@pytest.fixture
def small_ceiling(monkeypatch):
    monkeypatch.setitem(bench_moe.CEILING, "cpu", (16, 24))


@pytest.fixture
def timed(monkeypatch):
    """`timed(seconds)`: in place of clocks, `seconds(name)` for every function, which is called once."""

    def timed(seconds):
        def in_turns(functions, rounds, device, may_fail=(), report=None):
            for function in functions.values():
                function()
            return {name: [seconds(name)] for name in functions}

        for module in (bench_data, bench_moe, bench_step):
            monkeypatch.setattr(module, "in_turns", in_turns)

    return timed


def table(printed, data):
    """The rows of `data`, after checking that what was printed is the same."""
    lines = printed.splitlines()
    (head,) = [i for i, line in enumerate(lines) if re.split("  +", line.strip()) == list(data["rows"][0])]
    rows = [line for line in lines[head + 1 :] if len(re.split("  +", line.strip())) == len(data["rows"][0])]
    for line, row in zip(rows, data["rows"], strict=True):
        for cell, value in zip(re.split("  +", line.strip()), row.values(), strict=True):
            if value is None:
                assert cell == "-"
            elif isinstance(value, str):
                assert cell == value
            else:
                digits = len(cell.rstrip("%").partition(".")[2]) + 2 * cell.endswith("%")
                number = float(cell.rstrip("%").replace(",", "")) / (100 if cell.endswith("%") else 1)
                assert abs(number - value) <= 0.51 * 10**-digits, (cell, value)
    return data["rows"]


# ---- tools


def test_functions_are_timed_in_turns_after_a_warm_up():
    called = []
    functions = {name: lambda name=name: called.append(name) for name in "ab"}
    seconds = bench_tools.in_turns(functions, 3, CPU)
    assert "".join(called) == "ab" * 5  # two rounds of warm-up
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_what_cannot_run_is_left_out_with_a_line(capsys):
    def fails(error):
        raise error

    functions = {
        ("none", "forward"): lambda: fails(NotImplementedError("no kernel\nmore")),
        "large": lambda: fails(torch.OutOfMemoryError("too large")),
        "fine": lambda: None,
    }
    seen = SimpleNamespace(skipped={})
    seconds = bench_tools.in_turns(functions, 1, CPU, [("none", "forward")], seen)
    assert list(seconds) == ["fine"]
    assert seen.skipped == {"none forward": "NotImplementedError: no kernel", "large": "OutOfMemoryError: too large"}
    assert capsys.readouterr().out.splitlines()[0] == "skipped none forward: NotImplementedError: no kernel"
    with pytest.raises(RuntimeError, match="ours"):  # which may not
        bench_tools.in_turns({"kernels": lambda: fails(RuntimeError("ours"))}, 1, CPU)

    calls = []
    with pytest.raises(RuntimeError, match="later"):  # it ran once, so the device has it
        bench_tools.in_turns(
            {"a": lambda: calls.append(0) or len(calls) > 1 and fails(RuntimeError("later"))}, 1, CPU, "a"
        )
    calls.clear()  # memory may run out at any time
    functions["a"] = lambda: calls.append(0) or len(calls) > 3 and fails(torch.OutOfMemoryError("too large"))
    assert list(bench_tools.in_turns({"a": functions["a"], "fine": functions["fine"]}, 3, CPU)) == ["fine"]


@pytest.mark.parametrize("calls, rows", [(4, 0), (5, 0), (6, 2), (9, 2)])
def test_an_interrupt_leaves_what_was_timed(tiny_file, out, capsys, monkeypatch, calls, rows):
    """Of two models, in whole rounds, the first two of which are warm-up; no trace is begun."""
    called, time_once = [], bench_tools.time_once

    def interrupted(*given):
        called.append(0)
        if len(called) > calls:
            raise KeyboardInterrupt
        return time_once(*given)

    monkeypatch.setattr(bench_tools, "time_once", interrupted)
    trace = out.with_name("trace.json")
    arguments = ["--routers", "dense", "kern", "--peers", f"--json={out}", f"--profile={trace}"]
    assert bench.main(["step", str(tiny_file), *arguments]) == 130
    assert "cut short" in capsys.readouterr().err and len(called) == calls + 1
    assert len(json.loads(out.read_text())["rows"]) == rows and not trace.read_bytes()


def test_dtypes_that_the_device_lacks_are_skipped(monkeypatch, capsys):
    monkeypatch.setitem(bench_tools.DTYPES, "float16", torch.bool)  # has no products
    skipped = {}
    assert bench_tools.usable(["float32", "float16"], CPU, skipped) == {"float32": torch.float32}
    assert list(skipped) == ["float16"] and "skipped float16: " in capsys.readouterr().out


def test_kernels_of_a_profile_are_counted_once():
    """An operator reports its kernels' time as its own, and an annotated range spans that of others."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(key, device, gpu_time, cpu_time=0, annotation=False):
        return SimpleNamespace(
            key=key,
            device_type=device,
            self_device_time_total=gpu_time,
            self_cpu_time_total=cpu_time,
            is_user_annotation=annotation,
            count=2,
        )

    events = [event("small", cuda, 3), event("aten::mm", cpu, 8, 5), event("gemm", cuda, 8)]
    events += [event("Optimizer.step", cuda, 11, annotation=True)]
    assert bench_tools.largest_kernels(events, torch.device("cuda")) == [("gemm", 8, 2), ("small", 3, 2)]
    assert bench_tools.largest_kernels(events, CPU)[0] == ("aten::mm", 5, 2)


@pytest.fixture
def report(out):
    args = SimpleNamespace(what="moe", json=out, profile=None, words=["moe"])
    return bench_tools.Report(args, [], CPU, "title", {"a": "<4", "b": ".1f"})


def test_goals_say_whether_they_are_met(report, out, capsys):
    report.goal("rate", 0.5999, least=0.6)
    report.goal("rate", 0.6, least=0.6)
    report.goal("time", 1.16, most=1.15)
    report.goal("nothing", None, most=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "goal: rate >= 0.6: 0.600, NOT met",
        "goal: rate >= 0.6: 0.600, met",
        "goal: time <= 1.15: 1.160, NOT met",
    ]
    assert [goal["met"] for goal in json.loads(out.read_text())["goals"]] == [False, True, False]


def test_figures_are_on_disk_after_each_row(report, out):
    machine = json.loads(out.read_text())["machine"]
    assert machine["torch"] == torch.__version__ and machine["capability"] is None
    report.row(["x", 1.0])
    report.row(["y", None])
    data = json.loads(out.read_text())
    assert data["rows"] == [{"a": "x", "b": 1.0}, {"a": "y", "b": None}]
    assert data["what"] == "moe" and data["command"] == "python -m scripts.bench moe"
    assert list(out.parent.iterdir()) == [out]


# ---- moe


@pytest.mark.parametrize("case", ["typical", "idle expert"])
@pytest.mark.parametrize("name", [name for name in bench_moe.ALTERNATIVES if name != "F.grouped_mm"])
def test_alternatives_compute_the_same(name, case):
    leaves, experts, d_out = make(*CASES[case], case, torch.float64)
    assert_same(bench_moe.ALTERNATIVES[name], leaves, experts, d_out, 1e-12)


def test_grouped_mm_computes_the_same():
    """It has no float64, and wants rows of 16 bytes."""
    (x, w_in, w_out, weights, experts), d_out = bench_moe.problem((24, 16, 8, 5, 2), torch.float32, CPU)
    assert_same(bench_moe.grouped_mm, [x, w_in, w_out, weights], experts, d_out, 1e-5)


def assert_same(function, leaves, experts, d_out, tolerance):
    found = []
    for f in (function, reference.expert_mlp):
        inputs = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        y = f(*inputs, experts)
        found.append([y, *torch.autograd.grad(y, inputs, d_out)])
    for got, wanted in zip(*found, strict=True):
        assert (got - wanted).norm() <= tolerance * wanted.norm()


def test_moe(small_ceiling, out, capsys):
    assert bench.main(["moe", *TINY, "--rounds=1", f"--json={out}", "--dtype", "float32", "bfloat16"]) == 0
    printed, data = capsys.readouterr().out, json.loads(out.read_text())
    rows = table(printed, data)
    names = ["kernels", "F.grouped_mm", "loop", "padded bmm", "dense", "matmul ceiling"]
    assert [(row["implementation"], row["dtype"]) for row in rows] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in names
    ]
    kernels, *_, dense, ceiling = rows[:6]
    assert kernels["over kernels"] == dense["over dense"] == 1
    assert kernels["over dense"] == pytest.approx(kernels["forward+backward ms"] / dense["forward+backward ms"])
    assert kernels["TFLOP/s"] == pytest.approx(12 * 64 * 2 * 32 * 16 / kernels["forward+backward ms"] * 1e3 / 1e12)
    assert kernels["of ceiling"] == pytest.approx(kernels["TFLOP/s"] / ceiling["TFLOP/s"])
    # Before and after GELU, (N, K·H); the tokens, too, in float32, where the torch backend keeps no more than that.
    assert dense["saved MB"] == 2 * 64 * 32 * 4 / 1e6
    assert 64 * 32 * 4 / 1e6 <= kernels["saved MB"] < 2 * rows[2]["saved MB"]
    assert "goal" not in printed  # not of this shape


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
    assert bench_moe.saved_bytes(Keeps.apply, [x]) == 2 * 16
    assert bench_moe.saved_bytes(lambda x: x.exp().sum(), [x]) == 16
    assert bench_moe.saved_bytes(lambda x: x[:2] * 2.0, [x]) == 0


def test_an_alternative_that_is_missing_is_skipped(small_ceiling, out, capsys, monkeypatch):
    def missing(*args, **kwargs):
        raise NotImplementedError("grouped_mm: not on this device")

    monkeypatch.setattr(bench_moe.F, "grouped_mm", missing)
    assert bench.main(["moe", *TINY, "--rounds=1", "--dtype=float32", f"--json={out}"]) == 0
    assert "skipped F.grouped_mm both: NotImplementedError" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert [row["implementation"] for row in data["rows"]][:2] == ["kernels", "loop"]
    assert list(data["skipped"]) == ["F.grouped_mm forward", "F.grouped_mm both"]


def test_moe_goals(report, monkeypatch, capsys):
    seconds = {"kernels": 1.0, "F.grouped_mm": 1.5, "loop": 2.0, "dense": 0.5}

    def goals(shape, name):
        bench_moe.moe_goals(report, shape, name, seconds, 0.55)
        return [line.removeprefix("goal: ") for line in capsys.readouterr().out.splitlines()]

    assert goals((4096, 256, 128, 64, 8), "float32") == ["kernels over dense in float32 <= 1.6: 2.000, NOT met"]
    assert goals((4096, 256, 128, 64, 8), "bfloat16") == [
        "kernels over dense in bfloat16 <= 2.2: 2.000, met",
        "F.grouped_mm over kernels in bfloat16 >= 1.7: 1.500, NOT met",
        "loop over kernels in bfloat16 >= 1.7: 2.000, met",
    ]
    assert goals((4096, 256, 128, 64, 4), "bfloat16") == []
    report.device = torch.device("cuda")
    monkeypatch.setattr(bench_moe, "is_hopper", lambda device: True)
    assert goals((16384, 768, 384, 64, 8), "bfloat16") == [
        "kernels' share of the matmul ceiling in bfloat16 >= 0.6: 0.550, NOT met",
        "F.grouped_mm over kernels in bfloat16 >= 1.3: 1.500, met",
    ]
    assert "F.grouped_mm over kernels in float16 >= 3: 1.500, NOT met" in goals((16384, 768, 384, 64, 8), "float16")
    assert goals((16384, 768, 384, 64, 7), "bfloat16") == []


def test_tune_prints_lines_to_paste_and_leaves_the_tiles(out, capsys, monkeypatch, timed):
    ours = pytest.importorskip("kernels.triton_experts")
    small = ours.Tile(16, 16, 16, 4, 2)
    for kernel in ours.TILES[9]:
        monkeypatch.setitem(ours.TILES[9], kernel, small)
    monkeypatch.setattr(bench_moe, "TILES", [(32, 16, 16, 4, 2), small])
    seen = []
    run = ours.pick_tile
    monkeypatch.setattr(ours, "pick_tile", lambda kernel, *rest: seen.append(run(kernel, *rest)) or seen[-1])
    timed(lambda name: 0.010 if name[1] == 16 else 0.009 if name[0] == "rows" else 0.0099)
    sizes = ["--tokens=8", "--n-embd=16", "--expert-hidden=16", "--n-expert=2", "--top-k=1"]
    assert bench.main(["tune", *sizes, f"--json={out}"]) == 0
    printed = capsys.readouterr().out
    rows = table(printed, json.loads(out.read_text()))
    assert [row["tile"] for row in rows] == ["32, 16, 16, 4, 2", "16, 16, 16, 4, 2"] * 4
    assert [row["over present"] for row in rows[:4]] == pytest.approx([0.99, 1, 0.9, 1])
    pasted = re.findall(r'^        "(\w+)": (Tile\(.*\)),(.*)$', printed, re.MULTILINE)
    assert [(kernel, eval(tile, {"Tile": ours.Tile})) for kernel, tile, _ in pasted] == [
        ("up", small),  # a gain of 1% may be noise
        ("rows", ours.Tile(32, 16, 16, 4, 2)),
        ("down_grad", small),
        ("weight_grad", small),
    ]
    assert [note.strip() for *_, note in pasted] == ["", "# changed", "", ""]
    assert set(ours.TILES[9].values()) == {small} and {tile.rows for tile in seen} == {16, 32}


# ---- step, router, experts, length


def test_step(tiny_file, out, capsys, timed, monkeypatch):
    monkeypatch.setattr(distributed, "peak_flops", lambda device, dtype: 1e9)
    timed(lambda name: {"dense": 0.25, "kern": 0.5, "nanogpt": 1.0}[name[0]])

    def not_installed(config):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setitem(PEERS, "olmoe-eager", not_installed)
    arguments = ["--routers", "dense", "kern", "--dtype", "float32", "bfloat16", f"--json={out}"]
    arguments += ["--peers", "olmoe-eager", "nanogpt"]
    assert bench.main(["step", str(tiny_file), *arguments]) == 0
    printed = capsys.readouterr().out
    *rows, peer, _ = table(printed, json.loads(out.read_text()))
    assert (peer["router"], peer["ratio"], peer["MFU"]) == ("nanogpt", 4, None)
    assert "skipped olmoe-eager: ImportError: No module named 'transformers'" in printed
    assert [(row["router"], row["dtype"], row["compile"]) for row in rows] == [
        (router, dtype, "off") for router in ("dense", "kern") for dtype in ("float32", "bfloat16")
    ]
    assert [row["ratio"] for row in rows] == [1, 1, 2, 2]
    assert [row["tokens/s"] for row in rows] == [1024, 1024, 512, 512]  # 8 · 32 a step
    # A layer's active weights: 4·32² of attention, 2·32·8·2 of experts, 32·8 of the router; the head's 257·32.
    flops = 6 * (2 * (4096 + 1024 + 256) + 8224) + 12 * 2 * 32 * 32
    assert flops == 138432
    assert rows[2]["MFU"] == pytest.approx(flops * 512 / 1e9)
    assert rows[0]["MFU"] == pytest.approx((flops - 6 * 2 * 256) * 1024 / 1e9)
    assert "6 a token and active weight" in printed and rows[0]["peak GB"] is None


def test_step_compiled(tiny_file, out, capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, *more, **still: compiled.append(model) or model)
    arguments = ["--routers", "dense", "--peers", "nanogpt", "--compile", "on", "off", "--rounds=1", f"--json={out}"]
    assert bench.main(["step", str(tiny_file), *arguments]) == 0
    modes = [(row["compile"], row["router"]) for row in table(capsys.readouterr().out, json.loads(out.read_text()))]
    assert modes == [(mode, model) for mode in ("off", "on") for model in ("dense", "nanogpt")]
    assert len(compiled) == 2 + 1  # our blocks, and another's model as a whole


def test_steps_leave_the_weights_where_they_are(tiny):
    """So that routing, and with it the time, is the same from the first step to the last; AdamW runs all the same."""
    config = tiny("model.router=kern")
    model, optimizer = bench_step.build(config, CPU)
    before = [p.clone() for p in model.parameters()]
    step = bench_step.training_step(model, optimizer, config, CPU, torch.float32)
    step(update=False)
    assert not any(state["step"] for state in optimizer.state.values())
    step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert all(p.grad is None for p in model.parameters())


def test_router_share_of_a_step(tiny_file, out, capsys, timed):
    seconds = {"step": 0.1, "softmax": 0.002, "kern": 0.003, "tanh": 0.001}
    timed(lambda name: seconds[name[0]] / (4 if name[1] == "forward" else 1))
    assert bench.main(["router", str(tiny_file), "--routers", "dense", "softmax", "kern", "tanh", f"--json={out}"]) == 0
    printed = capsys.readouterr().out
    rows = table(printed, json.loads(out.read_text()))
    assert [row["router"] for row in rows] == ["softmax", "kern", "tanh"]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1.5, 0.5])
    assert [row["share of step"] for row in rows] == pytest.approx([0.04, 0.06, 0.02])  # 2 layers
    assert rows[1]["forward ms"] == pytest.approx(0.75) and rows[1]["ms a step"] == pytest.approx(6)
    assert "float32, 100.0 ms, with 2 routers" in printed


def test_experts(tiny_file, out, capsys, timed):
    timed(lambda name: name[0] / 100 + name[1] / 10)  # experts, and whether AdamW ran
    arguments = ["--model.router=kern", "--experts", "4", "8", f"--json={out}"]
    assert bench.main(["experts", str(tiny_file), *arguments]) == 0
    four, eight = table(capsys.readouterr().out, json.loads(out.read_text()))
    assert (four["experts"], eight["experts"]) == (4, 8)
    assert eight["ratio"] == pytest.approx(0.18 / 0.14) and eight["its ratio"] == pytest.approx(2)
    # 257·32 + 32·32 tables, the last norm's 32, a layer 4·32² + 2·32, the router's 8·33 + 1 and 2·32·8·8 of experts.
    assert eight["M total"] == pytest.approx(0.026322)
    assert eight["M active"] - four["M active"] == pytest.approx(2 * 4 * 33 / 1e6)  # the routers' rows alone
    assert eight["tokens/s"] == pytest.approx(256 / 0.18)


def test_length(tiny_file, out, capsys, timed):
    shapes = []
    timed(lambda name: {"dense": 1, "kern": 2}[name[0]] * (1 + name[1] / 64))
    real = torch.randint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda high, size, **more: shapes.append(size) or real(high, size, **more))
        assert bench.main(["length", str(tiny_file), "--lengths", "16", "64", f"--json={out}"]) == 0
    rows = table(capsys.readouterr().out, json.loads(out.read_text()))
    assert shapes == [(2, 16, 16), (2, 4, 64)] * 2  # x and y: 256 tokens each time
    assert [(row["router"], row["length"], row["sequences"]) for row in rows] == [
        ("dense", 16, 16),
        ("dense", 64, 4),
        ("kern", 16, 16),
        ("kern", 64, 4),
    ]
    assert [row["ratio"] for row in rows] == [1, 1, 2, 2]
    assert [row["of shortest"] for row in rows] == pytest.approx([1, 1.6, 1, 1.6])


def test_step_goals(report, monkeypatch, capsys):
    args = SimpleNamespace(config="config/125m.toml")
    median = {("dense", "float16"): 1.0, ("kern", "float16"): 1.3, ("softmax", "float16"): 1.25}
    mfu = {key: 0.44 for key in median}

    def goals(overrides, length, batch=32):
        bench_step.step_goals(report, args, overrides, (batch, length), "off", median, mfu)
        return [line.removeprefix("goal: ") for line in capsys.readouterr().out.splitlines()]

    assert goals([], 1024) == []
    monkeypatch.setattr(bench_step, "is_hopper", lambda device: True)
    report.device = torch.device("cuda")
    assert goals(["--model.block_size=1024", "--train.micro_batch_size=32"], 1024) == [
        "kern's MFU, float16, compile off >= 0.45: 0.440, NOT met",
        "kern over dense, float16, compile off <= 1.35: 1.300, met",
    ]
    assert goals([], 512) == goals([], 1024, batch=8) == goals(["--model.n_layer=2"], 1024) == []
    report.device, args.config = CPU, "config/quickstart.toml"
    assert goals(["--train.dtype=float16"], 256) == [
        "kern over dense, float16, compile off <= 1.8: 1.300, met",
        "kern over softmax, float16, compile off <= 1.02: 1.040, NOT met",
    ]


def test_profile_writes_a_trace_and_prints_ten_kernels(tiny_file, tmp_path, out, capsys):
    trace = tmp_path / "trace.json.gz"
    arguments = ["--routers", "kern", "--rounds=1", f"--profile={trace}", f"--json={out}"]
    assert bench.main(["step", str(tiny_file), *arguments]) == 0
    printed = capsys.readouterr().out
    lines = re.findall(r"^ *([\d.]+)% +([\d.]+) ms +(\d+) x  (\S.*)$", printed, re.MULTILINE)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    data = json.loads(out.read_text())["profile"]
    assert len(lines) == len(data) == 10
    assert {event.get("name") for event in events} >= {kernel["kernel"] for kernel in data}
    shares = [kernel["share"] for kernel in data]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) < 1
    assert [float(line[0]) for line in lines] == pytest.approx([100 * share for share in shares], abs=0.051)
    whole = [kernel["ms"] / kernel["share"] for kernel in data]
    assert whole == pytest.approx([whole[0]] * 10) and f" of {whole[0]:.2f} ms:" in printed


# ---- what is refused


def test_bad_input_is_refused_before_anything_is_timed(tiny_file, tmp_path, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("timed")

    for module in (bench_moe, bench_step):
        monkeypatch.setattr(module, "in_turns", never)

    def error(*arguments):
        assert bench.main([str(argument) for argument in arguments]) == 2
        return capsys.readouterr().err

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
    assert "router takes one --dtype" in error("router", tiny_file, "--dtype", "float32", "bfloat16")
    assert "does not divide into sequences of 48" in error("length", tiny_file, "--lengths", "16", "48")
    assert "tune takes one of float16 and bfloat16" in error("tune", "--dtype", "float32")
    monkeypatch.setattr(bench_moe.kernels, "what_stops_triton", lambda device, dtype: "does not run on cpu")
    assert "triton does not run on cpu" in error("tune", *TINY)
    with pytest.raises(SystemExit) as stop:
        bench.main(["step", str(tiny_file), "--routers", "kernn"])
    assert stop.value.code == 2
    assert "kernn" in (message := capsys.readouterr().err) and "softmax" in message


def test_a_cuda_device_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["moe", *TINY, "--device=cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


# ---- data, scaling, save


def test_data(tmp_path, capsys, monkeypatch, fake_ranks, timed):
    timed(lambda name: 0.5 if "process" in name else 2)
    (tmp_path / "ranks").write_bytes(fake_ranks)
    monkeypatch.setattr(tokenizer, "RANKS_SHA256", hashlib.sha256(fake_ranks).hexdigest())
    texts = [f"some words, {i} times" for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    monkeypatch.setattr(bench_data, "PREPARED_CHARACTERS", 10_000)
    assert bench.main(["data", str(tmp_path / "a.jsonl"), "--rounds=1", "--bpe-ranks", str(tmp_path / "ranks")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rates = [float(line.split("tokens/s")[0].split()[-1].replace(",", "")) for line in lines if "tokens/s" in line]
    ratios = [float(line.split("   ratio ")[1]) for line in lines if "   ratio " in line]
    repeats = 1 + 10_000 // sum(map(len, texts))
    assert rates[0] > 0 and ratios == [1, 4, 1, repeats]  # to tiktoken's, each in 2 seconds but our task
    assert rates[:4] == pytest.approx([ratio * rates[0] for ratio in ratios], abs=1)
    assert rates[4:] == [100 * B * T / 2 for T in (512, 1024, 2048) for B in (8, 32)]


def test_scaling(tiny_file, capsys):
    assert bench.main(["scaling", str(tiny_file), "--ranks", "1", "2", "--rounds=1", "--steps=5"]) == 0
    out = capsys.readouterr().out
    found = [re.search(rf"{ranks} ranks +([\d,]+) tokens/s +efficiency ([\d.]+)", out).groups() for ranks in (1, 2)]
    one, two = (float(rate.replace(",", "")) for rate, _ in found)
    assert found[0][1] == "1.00" and float(found[1][1]) == pytest.approx(two / one / 2, rel=0.02)
    assert "share its cores" in out


def test_save(tiny_file, tmp_path, capsys):
    assert bench.main(["save", str(tiny_file), "--rounds=1", f"--folder={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "medians of 1 saves of 0 MB each" in out
    assert len(re.findall(r"^.+? {2,}[\d.]+ ms", out, re.MULTILINE)) >= 3
    assert not [path for path in tmp_path.iterdir() if path != tiny_file]  # the checkpoints are gone


# ---- gpu_check.sh

FAKE = """\
#!/usr/bin/env bash
# In place of Python: says what it was asked for; router fails, length takes too long.
[ "$1" = - ] && exit 0
[ "$1" = -c ] && { echo packages; exit 0; }
echo "asked: $*"
case "$*" in
    *"bench router"*) exit 3;;
    *"bench step"*) echo "goal: step <= 1: 2.000, NOT met";;
    *"bench length"*) sleep 60;;
esac
"""
BENCH = ["moe", "router", "step", "experts", "length", "peers"]
TRACE = ["trace-step", "trace-moe", "compiled-dense", "compiled-kern", "tune"]


def check(tmp_path, *arguments, limit=590, **environment):
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "LIMIT": str(limit)} | environment
    environment["FOLDER"] = str(tmp_path / "out")
    command = ["bash", str(REPO_ROOT / "scripts/gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def pieces(done):
    """{piece: what became of it}"""
    summary = done.stdout.split("== summary")[1]
    return {line.split()[0]: line.partition(" s  ")[2] for line in summary.splitlines()[1:]}


def test_gpu_check_goes_on_after_pieces_that_fail(tmp_path):
    """A part that runs out of time takes none of the next one's."""
    done = check(tmp_path, "bench", "trace", limit=10)
    words = pieces(done)
    assert done.returncode == 1
    assert list(words) == [*BENCH, *TRACE]
    assert words["router"] == "FAILED, exit code 3" and words["length"] == "FAILED, cut short"
    assert all(words[name] == "ok" for name in ("moe", "step", "experts", *TRACE))
    assert "peers          left out, no time" in done.stdout
    assert (tmp_path / "out/router.log").read_text().startswith("asked: -m scripts.bench router config/125m.toml")
    assert "== goals\ngoal: step <= 1: 2.000, NOT met\n" in done.stdout


@pytest.mark.parametrize("rehearse", [[], ["--rehearse"]])
def test_gpu_check_asks_for_what_bench_takes(tmp_path, rehearse):
    """Every command of both forms is one that the parser knows, with config keys that there are."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/sleep"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    done = check(tmp_path, *rehearse, PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    trace = [name for name in TRACE if not (rehearse and name == "compiled-kern")]
    assert list(pieces(done)) == ["kernels", "steps", "compiled", *BENCH, "data", "train", *trace]
    asked = {log.stem: log.read_text().splitlines()[0].split()[1:] for log in (tmp_path / "out").glob("*.log")}
    for name, words in asked.items():
        if words[:2] != ["-m", "scripts.bench"]:
            continue
        args, overrides = bench.build_parser().parse_known_args(words[2:])
        assert args.json == str(tmp_path / "out" / f"{name}.json")
        if args.what in ("moe", "tune"):
            bench_moe.pick_shape(args, overrides, CPU)
        else:
            configure.load(REPO_ROOT / args.config, [*overrides, "--model.router=kern"])
        assert bool(args.profile) == name.startswith("trace")
    name = "packages-rehearsal" if rehearse else "packages"  # what one trains on the other does not find
    assert prepare.parse(asked["data"][2:]).name == name and f"--data.name={name}" in asked["train"]
    words = ({word for word in asked[name] if word.startswith("tests/")} for name in ("steps", "compiled", "kernels"))
    steps, compiled, kernels = words
    marked = {
        f"tests/{file.name}" for file in (REPO_ROOT / "tests").glob("test_*.py") if "mark.gpu" in file.read_text()
    }
    assert (
        steps | kernels == marked and not steps & kernels and compiled == steps
    )  # this file names the mark, too, and has none


def test_gpu_check_without_a_gpu_or_with_a_part_that_there_is_not(tmp_path):
    fake = FAKE.replace("echo packages; exit 0;", "exit 1;")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "FAKE", fake)
        done = check(tmp_path)
        wrong = check(tmp_path, "benhc")
    assert done.returncode == 2 and "no CUDA device here; --rehearse" in done.stderr
    assert wrong.returncode == 2 and "no part benhc: name tests, bench, train, trace" in wrong.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["lock"]


def test_gpu_check_refuses_what_would_be_lost_time(tmp_path):
    done = check(tmp_path, "train", DATA="nosuch")
    assert done.returncode == 2 and "no data set data/nosuch: prepare it" in done.stderr
    done = check(tmp_path, LIMIT="soon")
    assert done.returncode == 2 and "LIMIT is soon: give whole seconds" in done.stderr
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = check(tmp_path, "bench")
    assert done.returncode == 2 and "another gpu_check.sh writes to" in done.stderr


def test_gpu_check_stops_at_ctrl_c(tmp_path):
    """As a terminal sends it, to the script's group."""
    fake = tmp_path / "python"
    rest = f"exec {sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'"
    fake.write_text(f'#!/usr/bin/env bash\n[ "$1" = - ] && exit 0\n[ "$1" = -c ] && {{ echo x; exit 0; }}\n{rest}\n')
    fake.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "FOLDER": str(tmp_path / "out")}
    script = subprocess.Popen(
        ["bash", str(REPO_ROOT / "scripts/gpu_check.sh"), "bench"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    piece = next(int(line) for line in script.stdout if line.strip().isdigit())
    os.killpg(script.pid, signal.SIGINT)
    out, err = script.communicate(timeout=20)
    assert script.returncode == 130 and "stopped: figures and logs so far are in" in err
    with pytest.raises(ProcessLookupError):
        os.kill(piece, 0)
    assert not (tmp_path / "out/router.log").exists()


# ---- training runs


def test_bench_train_trains_each_router_for_equal_steps(tiny_file, tmp_path, capsys, monkeypatch):
    out = tmp_path / "race"
    monkeypatch.setattr(bench_train, "seconds_of_a_step", lambda *given: 0.03)
    words = [
        "train",
        str(tiny_file),
        "--folder",
        str(out),
        "--routers",
        "kern",
        "dense",
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert bench.main([*words, "--seconds", "40", "--overhead", "19"]) == 2  # too few steps fit
    assert "fewer than 10 steps of each fit into the" in capsys.readouterr().err
    assert bench.main([*words, "--seconds", "22", "--overhead", "9"]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["router"] for row in rows] == ["kern", "dense"] and rows[0]["minus first"] is None
    assert rows[0]["steps"] == rows[1]["steps"] >= 10
    losses = [load(out / router).loss(rows[0]["steps"]) for router in ("kern", "dense")]
    assert [row["val loss"] for row in rows] == losses
    assert rows[1]["minus first"] == pytest.approx(losses[1] - losses[0]) and rows[1]["low"] < rows[1]["high"]
    assert not (out / "kern/checkpoints").exists()
    assert bench.main([*words, "--seconds", "21"]) == 2 and "is not empty" in capsys.readouterr().err


def test_bench_train_leaves_figures_of_a_run_that_is_cut_short(tiny_file, tmp_path, capsys, monkeypatch):
    """Of its last evaluation, against the first run's at that step."""
    out, figures, real = tmp_path / "race", tmp_path / "x.json", subprocess.run
    monkeypatch.setattr(bench_train, "seconds_of_a_step", lambda *given: 0.03)

    def interrupted(command, **more):
        done = real(command, **more)
        if "--model.router=dense" in command:
            log = out / "dense/metrics.jsonl"
            lines = log.read_text().splitlines()
            at = [i for i, line in enumerate(lines) if "val/loss" in line][2]
            log.write_text("\n".join(lines[: at + 1]) + "\n")
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(subprocess, "run", interrupted)
    words = ["train", str(tiny_file), f"--folder={out}", f"--json={figures}", "--seconds=22", "--overhead=9"]
    assert bench.main([*words, "--routers", "kern", "dense"]) == 130 and "cut short" in capsys.readouterr().err
    whole, cut = json.loads(figures.read_text())["rows"]
    assert 0 < cut["steps"] < whole["steps"]
    kern, dense = (load(out / router) for router in ("kern", "dense"))
    assert cut["minus first"] == pytest.approx(dense.loss(cut["steps"]) - kern.loss(cut["steps"]))
    assert not (out / "dense/checkpoints").exists()


# ---- models of other makes


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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_peers_compute_experts_in_the_autocast_dtype(dtype):
    """As ours do; gradients come to the weights in float32."""
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


def test_report_names_the_file_that_cannot_be_written(tmp_path):
    with pytest.raises(RunError, match="Is a directory; name another file"), bench_tools.naming(tmp_path):
        (tmp_path / "x").mkdir()
        (tmp_path / "x").write_text("")
