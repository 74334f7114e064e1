"""eval/routing.py and eval/traces.py: counts against loops, the command, replays."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from numerics import SEED, assert_near, seeded, tolerance
from runs import REPO_ROOT, read_lines, read_tables
from scipy import stats
from test_router import GATES, SPARSE

import train
from data.bins import open_tokens
from data.loader import fixed_windows
from eval import routing, traces
from eval.routing import measure_layer, record_routing, route_text
from eval.trained import load_model, load_run
from model import GPT

NEAR = tolerance(torch.float32, 257, roundings=8)  # as in test_train.py


@pytest.fixture(scope="module")
def made(module_tiny):
    """A folder of runs: kern with checkpoints of steps 2 and 4, dense, softmax."""
    more = {
        "kern": "train.checkpoint_interval=2",
        "dense": "train.max_steps=2",
        "softmax": "model.gate_scale=2.0",
    }
    for name, word in more.items():
        train.train(config := module_tiny(f"run.name={name}", f"model.router={name}", word))
    return Path(config.run.dir)


def read_windows(tokens, count):
    """(W, T + 1), windows of 32 with their targets."""
    starts = 32 * fixed_windows(tokens, 32, count)
    return np.stack([tokens.read(start, 33) for start in starts.tolist()]).astype(np.int64)


@pytest.mark.numerics
@pytest.mark.parametrize("router", SPARSE)
def test_counts_are_those_of_tables_of_choices(router, tiny, monkeypatch):
    """By pandas, from a row for each choice of a token."""
    monkeypatch.setattr(traces, "BATCH_TOKENS", 5 * 32)  # the last batch is smaller
    torch.manual_seed(seeded().initial_seed())
    config = tiny("model.init_std=0.2", f"model.router={router}")
    model = GPT(config.model).double().eval()  # no choice depends on the batch size
    model.blocks[1].mlp.router.selection_bias[3] = -1e9  # an idle expert
    tokens = read_windows(open_tokens(config.data.folders[0], "val"), 12)
    idx, targets = (torch.from_numpy(part.copy()) for part in (tokens[:, :-1], tokens[:, 1:]))
    ids = idx.flatten().numpy()
    often = pd.Series(ids).value_counts()
    monkeypatch.setattr(routing, "MIN_COUNT", often.iloc[5])
    common = often[often >= often.iloc[5]].index
    trace = traces.trace_windows(model, tokens)
    with torch.no_grad(), traces.record_decisions(model) as decisions:
        losses = model(idx, targets).losses
    assert_near(torch.from_numpy(trace.losses), losses.double(), NEAR, "losses")
    for number, decided in enumerate(decisions):
        assert trace.experts[number].tolist() == decided.experts.tolist()
        assert_near(torch.from_numpy(trace.gates[number]), decided.weights.float(), NEAR, "gates")
        choices = pd.DataFrame({"expert": decided.experts.flatten()})
        choices["token"] = choices.index // 2
        choices["vocabulary"] = ids[choices.token]
        by_chance = routing.shuffled_baseline(idx.numpy()).ravel()
        choices["vocabulary_by_chance"] = by_chance[choices.token]
        chose = pd.crosstab(choices.token, choices.expert).reindex(columns=range(8), fill_value=0)
        loads = chose.sum()
        partners = (chose.T @ chose).mask(np.eye(8, dtype=bool), 0).max()
        others = [loads.drop(expert) for expert in range(8) if loads[expert]]
        entropy = stats.entropy(decided.scores.clamp_min(0), axis=1)  # NaN of scores that are 0
        wanted = {
            "loads": loads.tolist(),
            "in_use": math.exp(stats.entropy(loads)),
            "per_token": math.exp(np.nan_to_num(entropy).mean()),
            "zero_gates": (decided.weights == 0).double().mean().item(),
            "strongest_partner": (partners / loads).mean(),  # of experts with tokens
            # one more of two experts
            "strongest_partner_by_chance": np.mean([of.max() / of.sum() for of in others]),
        }
        for key in ("vocabulary", "vocabulary_by_chance"):
            most = pd.crosstab(choices[key], choices.expert).max(axis=1)
            wanted[key] = (most / often)[common].mean()
        layer = measure_layer(idx.numpy(), trace, number, 8)
        for key, value in wanted.items():
            assert layer[key] == pytest.approx(value, rel=1e-5), key


def test_chance_is_another_window_and_position():
    x = np.arange(4 * 32).reshape(4, 32)
    y = routing.shuffled_baseline(x)
    assert sorted(y.ravel()) == x.ravel().tolist() and not (y // 32 == x // 32).any()
    assert (y % 32 == x % 32).mean() < 0.2


COLUMNS = {
    "layer": "{layer}",
    "busiest": "{load_imbalance:.2f}",
    "idle": "{dead_experts}",
    "in use": "{in_use:.1f}",
    "per token": "{per_token:.1f}",
    "zero gates": "{zero_gates:.2%}",
    "vocabulary": "{vocabulary:.0%} ({vocabulary_by_chance:.0%})",
    "partner": "{strongest_partner:.0%} ({strongest_partner_by_chance:.0%})",
}


def test_command_measures_a_checkpoint(made, call):
    """Loads are what training saw in the same windows; cells are numbers of routing.json."""
    run = made / "kern"
    printed = call(routing.main, run, "--windows", 6, "--checkpoint", 2)
    file = run / "eval/step_00000002/routing/routing.json"
    report = json.loads(file.read_text())
    lines = read_lines(run / "metrics.jsonl")
    (logged,) = (line for line in lines if "val/loads" in line and line["step"] == 2)
    of_layers = pd.DataFrame(report["layers"])
    assert np.allclose(of_layers.loads.tolist(), logged["val/loads"])
    assert of_layers.dead_experts.sum() == logged["val/dead_experts"]
    for key in ("load_imbalance", "zero_gates"):
        assert np.isclose(of_layers[key].mean(), logged[f"val/{key}"]), key
    facts = {"run": "kern", "step": 2, "tokens": 192}
    assert {key: report[key] for key in facts} == facts
    assert printed.endswith(f"192 tokens; {file}\n")
    (rows,) = read_tables(printed)
    for row, layer in zip(rows, report["layers"], strict=True):
        assert row == {name: form.format(**layer) for name, form in COLUMNS.items()}


def test_a_text_goes_where_a_pass_over_its_document_sends_it(made):
    trained, tokenizer = load_run(made / "kern")
    tokens, experts, gates = route_text(trained.model, tokenizer, "a bé")
    assert tokens == ["a", " ", "b", "\ufffd", "\ufffd"]
    assert experts.shape == gates.shape == (2, 5, 2)
    # attention is causal
    whole = record_routing(trained.model, torch.tensor([[256, *"a bé and more".encode()]]))
    for layer, decided in enumerate(whole):
        assert torch.equal(experts[layer], decided.experts[1:6])
        assert_near(gates[layer], decided.weights[1:6].double(), NEAR, "gates")
    with pytest.raises(ValueError, match="a dense model has no router"):
        route_text(load_model(made / "dense").model, tokenizer, "a")


ERRORS = {
    "dense": "dense is dense and has no router; name a run with another model.router",
    "kern --windows -1": "--windows -1: expected 1 or more",
    "kern --windows 1": "tiny: 1 window, chance needs two; raise --windows or name a larger set",
    "kern --windows 2": "no token occurs 65 times among 64 tokens; raise --windows",
    "kern --data absent": "absent: no such data set. Prepare it",
    "kern --trace {}/absent/a.npz --windows 2": "absent",
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors(made, words, call, monkeypatch):
    monkeypatch.setattr(routing, "MIN_COUNT", 65)
    run, *more = words.format(made).split()
    (line,) = call(routing.main, made / run, *more, code=2).splitlines()
    assert line.startswith("error: ") and ERRORS[words] in line


# ---- eval/traces.py: what a file holds, and replays against a loop that takes experts by hand
@pytest.fixture(scope="module")
def trace(made):
    """Softmax's trace of six windows, read from its file."""
    file = made / "a.npz"
    words = ["--trace", str(file), "--windows", "6", "--data", "tiny"]
    assert routing.main([str(made / "softmax"), *words]) == 0
    return np.load(file)


def test_trace_has_experts_gates_and_tokens_by_layer(made, trace):
    trained = load_model(made / "softmax")
    tokens = read_windows(open_tokens(trained.config.data.folders[0], "val"), 6)
    wanted = traces.trace_windows(trained.model, tokens)._asdict() | {"tokens": tokens}
    wanted |= {"source": "softmax, step_00000004", "n_expert": 8}
    wanted["tokenizer"] = trained.metadata["tokenizer"]
    assert wanted.pop("entropy").shape == (2,)  # of no file
    for name in trace:
        assert np.array_equal(trace[name], wanted.pop(name)), name
    assert not wanted and trace["experts"].shape == (2, 6 * 32, 2)
    many = {"n_layer": 1, "n_expert": 300, "expert_hidden": 1}  # more than a byte holds
    model = GPT(trained.config.model.model_copy(update=many)).eval()
    assert traces.trace_windows(model, tokens).experts.max() > 255


def test_two_traces_are_compared_as_documented(made, trace, monkeypatch, capsys):
    """A model whose experts have other numbers agrees wholly once they are matched."""
    experts = trace["experts"]
    other = np.random.default_rng(SEED).permutation(8)[experts]
    np.savez(made / "b.npz", experts=other)
    _, code = read_code()
    monkeypatch.chdir(made)
    exec(code, {})
    printed = np.array(capsys.readouterr().out.split(), float).reshape(2, 2)
    same = (experts[..., None] == other[..., None, :]).any(-1).mean((1, 2))
    assert np.allclose(printed, np.c_[same, [1, 1]], atol=1e-3) and same.max() < 1


def read_code():
    """The blocks of Python in docs/traces.md."""
    page = (REPO_ROOT / "docs/traces.md").read_text()
    return re.findall("```python\n(.*?)```", page, re.DOTALL)


@pytest.mark.numerics
def test_the_loop_in_the_documentation_replays(made, trace, monkeypatch):
    """Its gradients are those of gates by hand at the experts of a trace, of another choice."""
    other = (torch.from_numpy(trace["experts"]).long() + 1) % 8
    np.savez(made / "other.npz", tokens=trace["tokens"], experts=other.short())
    code, _ = read_code()
    monkeypatch.chdir(made)
    exec(code.replace("runs/B", "softmax").replace("a.npz", "other.npz"), names := {})
    model = load_model(made / "softmax").model.requires_grad_(True)
    for chosen, router in zip(other, traces.find_routers(model), strict=True):

        def by_hand(module, inputs, routing, chosen=chosen):
            s = routing.logits
            gates = module.c * GATES["softmax"](s, s.gather(1, chosen))
            return routing._replace(experts=chosen, weights=gates)

        router.register_forward_hook(by_hand)
    ids = torch.from_numpy(trace["tokens"]).long()
    model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).loss.backward()
    wanted = dict(model.named_parameters())
    for name, p in names["model"].named_parameters():
        assert_near(p.grad, wanted[name].grad, 10 * NEAR, name)
