"""The running mean of a run's weights (train.ema_decay): the formula, and every command. On ranks: test_parallel.py."""

import json
import re

import pytest
import torch
from numerics import assert_near, tolerance
from runs import column, modules_in, run, steps

import train
from eval import downstream, val_loss
from eval.trained import load_model
from model import GPT
from runtime.distributed import Ranks
from runtime.folder import path_of
from runtime.preflight import Plan
from runtime.signals import Stop
from runtime.validation import measure_loss
from scripts import export, sample

DECAY = 0.75
EMA = [f"train.ema_decay={DECAY}", "train.keep_checkpoints=9", "train.checkpoint_interval=1"]
# The most state beside it: selection biases that move, dropout, a loss scale.
MOST = ["model.router=sigmoid-renorm", "train.bias_update_rate=0.01", "model.dropout=0.1", "train.dtype=float16"]
MOST += ["model.n_hash_layer=1"]
CPU = torch.device("cpu")


def means_by_hand(config, skipped):
    """{step: {name: mean}} in fp64, from the initial weights and those of the checkpoint of each step."""
    torch.manual_seed(config.run.seed)
    mean = {name: tensor.double() for name, tensor in GPT(config.model).state_dict().items()}
    means = {}
    for step in steps(config):
        if step not in skipped:
            state = load_model(path_of(config), step).model.state_dict()
            mean = {name: DECAY * mean[name] + (1 - DECAY) * state[name].double() for name in mean}
        means[step] = mean
    return means


@pytest.mark.numerics
def test_mean_is_the_formula_over_recorded_weights(tiny, monkeypatch):
    """Steps 3 and 4 are skipped for a gradient that is Inf: the mean stays, and so do weights and biases."""

    def spoil(plan, state, batches):
        result = forward_backward(plan, state, batches)
        if next(count) in (2, 3):
            state.updates.parameters[0].grad.fill_(torch.inf)
        return result

    forward_backward, count = train.forward_backward, iter(range(99))
    monkeypatch.setattr(train, "forward_backward", spoil)
    config = tiny(*EMA, "model.router=sigmoid-renorm", "train.bias_update_rate=0.01", "train.max_steps=6")
    assert column(run(config), "optim/skipped_steps")[-1] == 2
    for step, wanted in means_by_hand(config, skipped=(3, 4)).items():
        found = load_model(path_of(config), step, ema=True).model.state_dict()
        assert [*found] == [*wanted]
        for name, mean in wanted.items():
            assert_near(found[name], mean.float(), tolerance(torch.float32, 2, roundings=10), f"{step} {name}")
    assert all(mean.any() for name, mean in wanted.items() if name.endswith("selection_bias"))


def test_mean_is_evaluated_beside_a_run_that_it_does_not_change(tiny, capsys):
    alone = run(tiny("run.name=alone", *MOST))
    config = tiny(*EMA, *MOST)
    lines = run(config)
    losses = column(lines, "val_ema/loss")
    words = re.findall(r"step (\d), val loss (\S+), EMA (\S+)", capsys.readouterr().out)
    assert [word[2] for word in words] == [f"{loss:.4f}" for loss in losses]
    for key in ("train/loss", "val/loss", "optim/grad_norm", "val/window_losses"):
        assert column(lines, key) == column(alone, key)
    assert column(lines, "val/loss")[0] == losses[0]  # of the initial weights
    model = load_model(path_of(config), 4, ema=True).model
    found = measure_loss(model, Plan(config), Ranks(0, 1, CPU), Stop())["val/loss"]
    assert found.item() == losses[-1] != column(lines, "val/loss")[-1]


# ---- commands


@pytest.fixture
def trained(tiny):
    config = tiny("train.ema_decay=0.99")
    run(config)
    return path_of(config)


def test_commands_take_the_mean(trained, tmp_path, call, capsys):
    prompt = (trained, "--prompt", "a", "--tokens", 20, "--seed", 1)
    assert call(sample.main, *prompt) != call(sample.main, *prompt, "--ema")
    out = call(val_loss.main, trained, "--ema")
    (line,) = map(json.loads, (trained / "eval/step_00000004_ema/val_loss.json").open())
    logged = column([json.loads(line) for line in (trained / "metrics.jsonl").open()], "val_ema/loss")[-1]
    assert line["ema"] and line["loss"] == pytest.approx(logged, rel=1e-6)
    assert "step 4, EMA of decay 0.99" in out
    with modules_in(tmp_path / "modules"):
        assert export.main([str(trained), str(tmp_path / "out"), "--ema", "--check"]) == 0
    assert "the EMA of decay 0.99 up to step 4, in float32" in (tmp_path / "out/README.md").read_text()
    keys = [downstream.result_key(trained, load_model(trained, ema=ema), torch.float32, None) for ema in (False, True)]
    assert keys[1].pop("ema") and keys[0] == keys[1]
    assert "--ema with --average 2: the weights can be one mean" in call(
        sample.main, trained, "--ema", "--average", 2, code=2
    )
