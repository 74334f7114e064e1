"""tools.bench: alternatives compute the same, and rows follow from the times."""

import json

import pytest
import torch
from numerics import assert_near, tolerance

from kernels.reference import expert_mlp
from tools import bench

INPUTS, D_OUT = bench.make_inputs((48, 32, 16, 8, 2), torch.float32, torch.device("cpu"))


@pytest.mark.numerics
@pytest.mark.parametrize("implementation", bench.IMPLEMENTATIONS)
def test_implementations_equal_the_reference(implementation):
    """The dense MLP equals the first K experts, with all tokens sent to them at gates of 1."""
    x, w_in, w_out, weights, experts = INPUTS
    if implementation == "dense":
        experts = torch.arange(2).expand_as(experts)
        weights = torch.ones_like(weights)
    wanted = expert_mlp(x.double(), w_in.double(), w_out.double(), weights.double(), experts)
    out = bench.IMPLEMENTATIONS[implementation](*INPUTS)
    assert_near(out, wanted, tolerance(torch.float32, 32, roundings=4), implementation)
    bench.run_both(bench.IMPLEMENTATIONS[implementation], INPUTS, D_OUT)


def test_rows_of_steps(tiny_file, tmp_path, monkeypatch):
    """Times are given: medians are dense's 2 s and kern's 1 s; softmax fails and is skipped."""
    build = bench.build_step

    def build_or_fail(config, *arguments):
        if config.model.router == "softmax":
            raise RuntimeError("CUDA out of memory\nmore")
        return build(config, *arguments)

    seconds = iter([4.0, 1.0, 2.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(bench, "build_step", build_or_fail)
    monkeypatch.setattr(bench, "time_call", lambda function, device: function() or next(seconds))
    file = tmp_path / "step.json"
    words = ["step", str(tiny_file), "--rounds=3", f"--json={file}", "--run.name="]
    words += ["--train.batch_size=16", "--model.router=[dense,softmax,kern]"]
    assert bench.main(words) == 1
    data = json.loads(file.read_text())
    assert data["skipped"] == {"tiny-softmax": "RuntimeError: CUDA out of memory"}
    of_all = {"dtype": "float32"}
    # a step of 8 windows of 32 tokens: one micro-batch
    assert data["rows"] == [
        of_all | {"alternative": "tiny-dense", "ms": 2000.0, "tokens/s": 128, "ratio": 1.0},
        of_all | {"alternative": "tiny-kern", "ms": 1000.0, "tokens/s": 256, "ratio": 0.5},
    ]
