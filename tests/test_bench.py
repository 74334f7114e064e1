"""tools.bench: alternatives compute the same, and rows follow from the times."""

import json

import pytest
import torch
from numerics import assert_near, tolerance

from kernels.reference import expert_mlp
from tools import bench

KINDS = ("kernels", "F.grouped_mm")


@pytest.mark.numerics
@pytest.mark.parametrize("implementation", KINDS)
def test_implementations_equal_the_reference(implementation):
    inputs, d_out = bench.make_inputs((48, 32, 16, 8, 2), torch.float32, torch.device("cpu"))
    wanted = expert_mlp(*(leaf.double() for leaf in inputs[:4]), inputs[4])
    out = bench.IMPLEMENTATIONS[implementation](*inputs)
    assert_near(out, wanted, tolerance(torch.float32, 32, roundings=4), implementation)
    bench.run_both(bench.IMPLEMENTATIONS[implementation], inputs, d_out)


def test_a_dense_mlp_of_as_many_flops_is_the_first_experts():
    """With all tokens sent to the first K experts at gates of 1 it equals them."""
    (x, w_in, w_out, weights, experts), _ = bench.make_inputs(
        (48, 32, 16, 8, 2), torch.float32, torch.device("cpu")
    )
    first = torch.arange(2).expand_as(experts)
    wanted = expert_mlp(x.double(), w_in.double(), w_out.double(), weights.double() * 0 + 1, first)
    out = bench.IMPLEMENTATIONS["dense"](x, w_in, w_out, weights, experts)
    assert_near(out, wanted, tolerance(torch.float32, 32, roundings=4), "dense")


def test_rows_of_steps(tiny_file, tmp_path, monkeypatch, capsys):
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
    words = ["step", str(tiny_file), "--rounds", "3", "--json", str(file), "--run.name="]
    assert bench.main([*words, "--model.router=[dense,softmax,kern]"]) == 1
    data = json.loads(file.read_text())
    assert data["skipped"] == {"tiny-softmax": "RuntimeError: CUDA out of memory"}
    assert [row["alternative"] for row in data["rows"]] == ["tiny-dense", "tiny-kern"]
    assert [row["ratio"] for row in data["rows"]] == [1.0, 0.5]
    dense, kern = (row["tokens/s"] for row in data["rows"])
    assert kern == 2 * dense > 0
    assert "skipped tiny-softmax" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["moe", "--shape", "8", "8", "8", "2", "3"], "K at most E"),
        (["moe", "--model.router=kern"], "moe takes no config keys"),
        (["moe", "--rounds", "0"], "expected 1 or more"),
        (["step", "none.toml"], "none.toml"),
    ],
)
def test_bad_input_is_one_line(words, error, capsys):
    with pytest.raises(SystemExit) as end:
        raise SystemExit(bench.main(words))
    assert end.value.code == 2
    assert error in capsys.readouterr().err
