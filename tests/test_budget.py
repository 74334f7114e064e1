"""`scripts.bench budget`: counts of launches and bytes are pinned; the model gives the figures it was made with."""

import json
import math
from collections import Counter

import pytest

import configure
import scripts.bench.__main__ as bench
from model import parameter_shapes
from scripts.bench import budget, cycles, ranks

STEP = ["--model.block_size=1024", "--train.micro_batch_size=32", "--train.batch_size=32"]


def trace(router, *overrides):
    config = configure.load("config/125m.toml", [*STEP, f"--model.router={router}", *overrides])
    return config, budget.trace_step(config)


@pytest.mark.parametrize(
    "router, launches, gigabytes", [("dense", 488, 92.68), ("softmax", 456, 83.20), ("kern", 468, 83.30)]
)
def test_counts_of_the_flagship(router, launches, gigabytes):
    _, ops = trace(router)
    assert len(ops) == launches and sum(op.bytes for op in ops) / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_operators_belong_to_parts():
    """Products are known by their FLOPs: forward once, backward twice; qkv's gradient is put together once."""
    config, ops = trace("kern", "--model.n_layer=1", "--model.n_expert=32")
    N, C = 32 * 1024, config.model.n_embd
    flops = {part: sum(op.flops for op in ops if op.part == part) for part in budget.PARTS}
    assert flops["routers"] == 6 * N * C * 32 and flops["qkv, proj"] == 6 * N * 4 * C * C
    assert not any(flops[part] for part in budget.PARTS if part not in ("routers", "qkv, proj"))
    cats = [op for op in ops if op.name == "cat.default"]
    assert [(op.phase, op.bytes) for op in cats] == [("backward", 2 * N * 3 * C * 2)]
    # Two matrices of each expert, from fp32 to fp16; their gradients come in fp32.
    casts = [op for op in ops if op.part == "casts of expert weights"]
    weights = 32 * C * config.model.expert_hidden
    assert Counter((op.phase, op.bytes) for op in casts) == {("forward", 6 * weights): 2}
    norms = [op for op in ops if "layer_norm" in op.name]
    assert len(norms) == 6 and {op.part for op in norms} == {"norms, residual, casts"}
    routes = [(op.phase, op.part, op.name) for op in ops if "nanokern.route" in op.name]
    assert routes == [
        ("forward", "routers", "nanokern.route.default"),
        ("backward", "routers", "nanokern.route_backward.default"),
    ]
    _, ops = trace("dense", "--model.n_layer=1")
    dense = sum(op.flops for op in ops if op.part == "dense MLP")
    assert dense == 6 * N * 2 * C * config.model.top_k * config.model.expert_hidden


def test_ways_to_share_a_step_send_what_arithmetic_says():
    """8 ranks send 7/8 of what is summed or gathered: experts in float16, the rest and gradients in fp32."""
    config = configure.load("config/125m.toml", ["--model.router=kern", "--model.n_layer=2", "--train.batch_size=32"])
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config.model).items()}
    P, experts = sum(sizes.values()), sum(size for name, size in sizes.items() if ".experts." in name)
    rest = sum(size for name, size in sizes.items() if ".experts." not in name and name.startswith("blocks"))
    gathered, summed = 2 * experts + 4 * (P - experts), 4 * P
    moved = ranks.trace_ways(config)
    sent = {way: m.sent * 8 / 7 for way, m in moved.items()}
    assert sent["ddp"] == 2 * summed and sent["ddp, sharded AdamW"] == 3 * summed
    assert sent["zero2"] == pytest.approx(gathered + summed, rel=1e-3)  # γ is padded
    assert sent["fsdp"] == pytest.approx(gathered + 2 * experts + 4 * rest + summed, rel=1e-3)
    assert {way: m.update / P for way, m in moved.items()} == {way: 36 if way == "ddp" else 4.5 for way in moved}
    assert moved["zero2"].launches < moved["ddp"].launches and moved["zero2"].memory < moved["fsdp"].memory


def test_shared_keys_and_values_are_read_once():
    """By attention of 12 heads over 4 of keys: queries and output, keys and values, the logarithms of the sums."""
    N, C = 16 * 1024, 768
    config = configure.load("config/modern_125m.toml", ["--model.router=dense", "--model.n_layer=1"])
    forward, _ = [op for op in budget.trace_step(config) if op.part == "attention"]
    assert forward.bytes == 2 * (2 * N * C + 2 * N * C // 3) + 4 * N * 12


@pytest.mark.parametrize("bandwidth, now, then", [(30, 3054, 0.537), (36, 2757, 0.595), (48, 2390, 0.667)])
def test_the_cycle_model_gives_the_figures_it_was_made_with(bandwidth, now, then):
    """Microseconds of a layer before the changes, and share of 790 TFLOP/s after those of the kernels, on an H100."""
    sizes, dram = (32768, 768, 384, 64, 8), budget.DRAM["H100"]
    before = cycles.time_experts(*sizes, dram, cycles.BEFORE, bandwidth)
    assert sum(before.values()) * 1e6 == pytest.approx(now, abs=1)
    after = cycles.time_experts(*sizes, dram, budget.DESIGN, bandwidth)
    assert 12 * 32768 * 8 * 768 * 384 / sum(after.values()) / 790e12 == pytest.approx(then, abs=0.001)


def test_a_pipeline_hides_loads():
    """Of a long tile: with two buffers a step waits for its load, with six it is as long as its product or its load."""
    clocks = []
    for buffers in (2, 6):
        product = cycles.Product(1, 128, 128, 64, buffers, 0, 0, 0, 60, 650)
        clocks.append(cycles.simulate(product, 1, 1000, bandwidth=100) / 1000)
    assert clocks[1] == pytest.approx(128 * 128 * 64 / cycles.TENSOR, rel=0.05) and clocks[0] > 1.5 * clocks[1]
    assert cycles.simulate(product, 1, 1000, bandwidth=36) / 1000 == pytest.approx(256 * 64 * 2 / 36, rel=0.05)


def test_the_command_prints_and_writes_three_tables(capsys, tmp_path):
    words = [
        "config/125m.toml",
        *STEP,
        "--model.n_layer=2",
        "--routers",
        "dense",
        "kern",
        f"--json={tmp_path / 'b.json'}",
    ]
    assert bench.main(["budget", *words]) == 0
    printed = capsys.readouterr().out
    assert "never held against a GPU" in printed and "rounds" not in printed
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    steps = {(row["router"], row["change"]): row["H100 ms"] for row in rows if "change" in row}
    parts = [row for row in rows if "part" in row]
    for router in ("dense", "kern"):
        total = sum(row["H100 ms"] for row in parts if row["router"] == router)
        assert steps[router, "now"] == pytest.approx(total)
        of_router = {name: value for (of, name), value in steps.items() if of == router}
        assert all(
            of_router["all"] < value < of_router["now"]
            for name, value in of_router.items()
            if name not in ("all", "now")
        )
        counted = next(row for row in rows if row.get("phase") == "both" and row["router"] == router)
        assert counted["launches"] == sum(row["launches"] or 0 for row in parts if row["router"] == router)
    assert not any("weight" in name for router, name in steps if router == "dense")


def test_gated_experts_take_three_halves_of_the_products():
    sizes, dram = (32768, 768, 256, 64, 8), budget.DRAM["H100"]
    plain, gated = (cycles.time_experts(*sizes, dram, budget.DESIGN, gated=gated) for gated in (False, True))
    assert gated["rows"] == plain["rows"] and gated["w_out"] == plain["w_out"]
    for kernel in ("up", "rows d_x", "w_in"):
        assert 1.3 < gated[kernel] / plain[kernel] < 2.2, kernel


def test_an_rmsnorm_counts_as_one_operator():
    layer, rms = (trace("kern", "--model.n_layer=1", f"--model.norm={norm}")[1] for norm in ("layernorm", "rmsnorm"))
    assert [(op.phase, op.name) for op in layer] == [(op.phase, op.name) for op in rms]


@pytest.mark.parametrize("more", [[], ["--model.n_expert=256"], ["--model.n_expert=2", "--model.top_k=1"]])
def test_small_models_have_a_budget(capsys, more):
    """Also where a matrix is narrower than a tile."""
    assert bench.main(["budget", "config/quickstart.toml", "--routers", "kern", "softmax-renorm", *more]) == 0
    assert "kern" in capsys.readouterr().out
