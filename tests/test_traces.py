"""eval/traces.py: what a trace holds, replays against a loop that takes its experts by hand, traces that do not fit."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import assert_near, tolerance
from runs import REPO_ROOT
from test_router import GATES

import train
from data.bins import open_tokens
from data.loader import fixed_windows, windows
from eval import routing, traces
from eval.routing import record_routing
from eval.trained import load_model
from router import Router

LIMIT = tolerance(torch.float32, 257, roundings=8)  # as in test_train.py


@pytest.fixture(scope="module")
def made(module_tiny):
    """A folder of runs that differ in routers, K, E, layers and the length of windows, and softmax's trace."""
    changes = {"softmax": "gate_scale=2.0", "kern": "init_std=0.05", "top_k": "top_k=3", "experts": "n_expert=4"}
    changes |= {"layers": "n_dense_layer=1", "ids": "block_size=32"}
    for name, change in changes.items():
        router = f"model.router={name if name in ('softmax', 'kern') else 'tanh'}"
        train.train(config := module_tiny(f"run.name={name}", f"model.{change}", router, "train.max_steps=2"))
    folder = Path(config.run.dir).parent
    assert routing.main([str(folder / "runs/softmax"), "--trace", str(folder / "soft.npz"), "--windows", "6"]) == 0
    return folder


def texts(made):
    trained = load_model(made / "runs/softmax")
    tokens = open_tokens(trained.config.data.folders[0], "val")
    return map(torch.from_numpy, windows(tokens, fixed_windows(tokens, 32, 6), 32))


def test_trace_has_experts_gates_and_tokens_by_layer(made):
    x, y = texts(made)
    model, trace = load_model(made / "runs/softmax").model, np.load(made / "soft.npz")
    assert trace["tokens"].tolist() == torch.cat([x, y[:, -1:]], 1).tolist() and trace["n_expert"] == 8
    assert trace["experts"].shape == trace["gates"].shape == (2, 6 * 32, 2)
    for layer, decided in enumerate(record_routing(model, x)):
        assert trace["experts"][layer].tolist() == decided.experts.tolist()
        assert_near(torch.from_numpy(trace["gates"][layer]), decided.weights, LIMIT, "gates")
    assert_near(torch.from_numpy(trace["losses"]), model(x, y).losses.double(), LIMIT, "losses")


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["kern", "softmax"])
def test_replayed_loss_is_that_of_gates_by_hand(made, name, call, monkeypatch):
    monkeypatch.setattr(traces, "BATCH_TOKENS", 64)  # several passes
    said = call(routing.main, made / "runs" / name, "--replay", made / "soft.npz").splitlines()
    (file,) = (made / f"runs/{name}/eval").rglob("replay-soft.json")
    report, trace = json.loads(file.read_text()), np.load(made / "soft.npz")
    (x, y), model, experts = texts(made), load_model(made / "runs" / name).model, torch.from_numpy(trace["experts"])
    own = (torch.stack([r.experts for r in record_routing(model, x)])[..., None] == experts[..., None, :]).any(-1)
    wanted = {"source_loss": trace["losses"].mean(), "loss": model(x, y).loss.item()}
    for chosen, router in zip(experts.long(), traces.find_routers(model), strict=True):

        def by_hand(module, inputs, routing, chosen=chosen):
            s, gamma = routing.logits, 1 if module.gamma is None else module.gamma
            gates = module.c * gamma * GATES[name](s, s.gather(1, chosen))
            return routing._replace(experts=chosen, weights=gates)

        router.register_forward_hook(by_hand)
    wanted["replayed_loss"] = model(x, y).loss.item()
    for key, value in wanted.items():
        assert_near(torch.tensor(report[key]), torch.tensor(value, dtype=torch.float64), LIMIT, key)
    assert report["same_choice"] == pytest.approx(own.float().mean().item())
    assert (report["same_choice"] == 1) == (report["replayed_loss"] == report["loss"]) == (name == "softmax")
    assert [line.split()[1] for line in said] == [f"{report[key]:.4f}" for key in routing.LOSSES]


def test_a_training_step_replays(made):
    """Another's choice reaches the router through the gates; then it is over."""
    x, y = texts(made)
    model = load_model(made / "runs/kern").model.requires_grad_(True)
    own = torch.stack([decided.experts for decided in record_routing(model, x)])

    def gradients():
        model.zero_grad()
        model(x, y).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    with traces.replay_routing(model, (own + 1) % 8):
        idle = (own[1] + 1) % 8
        assert model.blocks[1].mlp.router(torch.randn(192, 32)).experts.equal(idle)
        gradients()
        assert all(router.weight.grad.any() for router in traces.find_routers(model))
        with pytest.raises(
            ValueError, match=r"are \(192, 2\), \(tokens, top_k\) are \(160, 2\); take the trace of these"
        ):
            model(x[:5], y[:5])
    assert all(router.replay is None for router in model.modules() if isinstance(router, Router))
    assert [p.tolist() for p in gradients()] == [p.tolist() for p in before]
    with pytest.raises(ValueError, match="of 1 layers, the model has 2"), traces.replay_routing(model, own[:1]):
        pass


def test_the_loop_in_the_documentation_runs(made, monkeypatch):
    """Its gradients are those of the text, of a model that chose the same itself."""
    (code,) = re.findall("```python\n(.*?)```", (REPO_ROOT / "docs/traces.md").read_text(), re.DOTALL)
    monkeypatch.chdir(made)
    (made / "a.npz").write_bytes((made / "soft.npz").read_bytes())
    exec(code.replace("runs/B", "runs/softmax"), names := {})
    own, (x, y) = load_model(made / "runs/softmax").model.requires_grad_(True), texts(made)
    own(x, y).loss.backward()
    for mine, theirs in zip(names["model"].parameters(), own.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad, 10 * LIMIT, "gradient")


SHAPE = "soft.npz has (2, 8, 2) layers with experts, n_expert and top_k"
FAULTS = {
    "top_k": f"{SHAPE}, top_k (2, 8, 3); trace a run with these",
    "experts": f"{SHAPE}, experts (2, 4, 2)",
    "layers": f"{SHAPE}, layers (1, 8, 2)",
    "softmax --data tiny": "--replay, whose text is the trace's, no --data or --windows",
    "softmax --other {}/runs/kern": "--trace takes no --other",
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_does_not_fit_is_refused(made, words, call):
    name, *more = words.format(made).split()
    said = call(routing.main, made / "runs" / name, "--replay", made / "soft.npz", *more, code=2)
    assert FAULTS[words] in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer": "another"}, "its tokenizer is not that of ids; trace a run on data with the same tokenizer"),
        ({"tokens": np.zeros((6, 31), np.uint16)}, "of 192 tokens, are not those of 6 windows of 30; write it again"),
        ({"experts": np.full((2, 192, 2), 8, np.int16)}, "are not those of 6 windows of 32"),
        ({"experts": np.array(1)}, "is not a routing trace (not enough values to unpack"),
        (None, "is not a routing trace ("),
    ],
)
def test_damaged_traces_are_refused(made, changes, says, call, tmp_path):
    file = tmp_path / "bad.npz"
    if changes is None:
        file.write_text("no trace")
    else:
        np.savez(file, **{**np.load(made / "soft.npz"), **changes})
    assert says in call(routing.main, made / "runs/ids", "--replay", file, code=2)
