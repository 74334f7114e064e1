"""scripts/bench and scripts/gpu_check.sh. What is timed is not tested here, but what is made of the times."""

import gzip
import json
import math
import re
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

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
from scripts.bench import harness
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
    return Benchmark(Namespace(what="moe", json=out, command="python", rounds=3), CPU, "title")


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


@pytest.mark.parametrize("calls, rows", [(5, 0), (6, 2), (9, 2)])
def test_an_interrupt_leaves_what_was_timed(tiny_file, out, monkeypatch, calls, rows):
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
    with pytest.raises(KeyboardInterrupt):
        bench.main(["step", str(tiny_file), *arguments])
    assert len(json.loads(out.read_text())["rows"]) == rows and not trace.read_bytes()


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


def test_steps_leave_the_weights_where_they_are(tiny):
    """So that routing, and with it the time, is the same from the first step to the last; AdamW runs all the same."""
    config = tiny("model.router=kern")
    model, optimizer = bench_steps.build(config, CPU, bench_steps.GPT)
    before = [p.clone() for p in model.parameters()]
    bench_steps.Step(config, CPU, torch.float32)()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert all(p.grad is None for p in model.parameters())


def test_router_beside_a_step(tiny_file, run_bench, timed):
    seconds = {"softmax": 0.002, "kern": 0.003, "tanh": 0.001, "float32": 0.1}
    timed(lambda name: seconds[name[1]])
    (*rows, step), printed = run_bench("router", tiny_file, "--routers", "dense", "softmax", "kern", "tanh")
    assert [row["router or dtype"] for row in rows] == ["softmax", "kern", "tanh"]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1.5, 0.5])
    assert [row["share of float32 step"] for row in rows] == pytest.approx([0.04, 0.06, 0.02])  # 2 layers
    assert rows[1]["ms"] == pytest.approx(3) and rows[1]["ms per step"] == pytest.approx(6)
    assert (step["part"], step["ms per step"]) == ("step", 100) and "kern has 2 routers" in printed


def test_experts(tiny_file, run_bench, timed):
    timed(lambda name: name[0] / 100)
    (four, eight), _ = run_bench("experts", tiny_file, "--model.router=kern", "--experts", "4", "8")
    assert (four["experts"], eight["experts"], eight["ratio"]) == (4, 8, pytest.approx(2))
    # 257·32 + 32·32 tables, the last norm's 32, a layer 4·32² + 2·32, the router's 8·33 + 1 and 2·32·8·8 of experts.
    assert eight["M total"] == pytest.approx(0.026322)
    assert eight["M active"] - four["M active"] == pytest.approx(2 * 4 * 33 / 1e6)  # the routers' rows alone
    assert eight["tokens/s"] == pytest.approx(256 / 0.08)


def test_profile_writes_a_trace_and_prints_its_largest_operators(tiny_file, tmp_path, capsys):
    trace = tmp_path / "trace.json.gz"
    arguments = ["--routers", "kern", "--peers", "--rounds=1", f"--profile={trace}"]
    assert bench.main(["step", str(tiny_file), *arguments]) == 0
    head, printed = capsys.readouterr().out.split(f"{trace}: three calls of a step of kern, float32, off")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    listed = re.findall(r"^ *(aten::\w+) +[\d.]+% ", printed, re.MULTILINE)
    assert "Self CPU %" in printed and len(listed) > 5 and names >= {*listed}


# ---- what is refused
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["moe", *TINY, "--json=/no-such-folder/x.json"], "/no-such-folder/x.json cannot be written"),
        (["step", "FILE", "--profile=/"], "/ cannot be written"),
        (["experts", "FILE", "--model.n_layr=1"], "did you mean 'model.n_layer'?"),
        (["moe", "--model.n_layer=1"], "takes no config keys"),
        (["moe", *TINY, "--top-k=9"], "--top-k 9 must be at most --n-expert 8"),
        (["router", "FILE", "--routers", "dense"], "dense has no router"),
        (["experts", "FILE", "--model.router=dense"], "dense has no experts: set --model.router=kern"),
    ],
)
def test_bad_input_is_refused_before_anything_is_timed(arguments, message, tiny_file, call, monkeypatch):
    monkeypatch.setattr(Benchmark, "time", lambda *args, **kwargs: pytest.fail("timed"))
    given = [str(tiny_file) if argument == "FILE" else argument for argument in arguments]
    assert message in call(bench.main, *given, code=2)


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
        *"bench experts"*) ((SECONDS += most)); return 124;;
    esac
}
"""
BENCH = ["moe", "step", "router", "experts", "peers"]
TRACE = ["trace-step", "trace-moe", "compiled-dense", "compiled-kern"]
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
    outcomes = read_pieces(printed)
    assert script.returncode == 1 and list(outcomes) == [*BENCH, *TRACE]
    assert outcomes["router"] == "FAILED, exit code 3" and outcomes["experts"] == "FAILED, interrupted"
    assert all(outcomes[name] == "ok" for name in ("moe", "step", *TRACE))
    assert "peers          left out, no time" in printed
    figures = {part: json.loads((tmp_path / f"out/figures-{part}.json").read_text()) for part in ("bench", "trace")}
    assert set(figures["bench"]) == set(BENCH) - {"peers"} and set(figures["trace"]) == set(TRACE)


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
        args, overrides = bench.make_parser().parse_known_args(words[2:])
        assert Path(args.json).name == f"{name}.json"
        if args.what == "moe":
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
