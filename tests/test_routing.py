"""eval/routing.py: counts against loops, measures by hand, agreement, the command; eval/traces.py;
scripts/draw.py.
"""

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_tiny
from numerics import assert_near, seeded, tolerance
from runs import REPO_ROOT, read_tables
from scipy import stats
from test_router import GATES, SPARSE

import configure
import train
from data.bins import open_tokens
from data.loader import fixed_windows, windows
from eval import routing, traces
from eval.routing import (
    compare_choices,
    count_routing,
    describe_layer,
    record_routing,
    route_text,
    shuffled_baseline,
)
from eval.trained import load_model, load_run
from model import GPT
from router import Router, Routing
from runtime.metrics import read_metrics
from scripts import draw


@pytest.fixture(scope="module")
def made(module_tiny):
    """A folder of runs: kern with checkpoints of steps 2 and 4, dense, and softmax of another
    top_k.
    """
    more = {
        "kern": "train.checkpoint_interval=2",
        "dense": "train.max_steps=2",
        "softmax": "model.top_k=3",
    }
    for name, word in more.items():
        train.train(config := module_tiny(f"run.name={name}", f"model.router={name}", word))
    return Path(config.run.dir)


def tiny_model(tiny, seed=0, *overrides):
    """An fp64 model, so that the choice of experts does not depend on the batch size."""
    torch.manual_seed(seeded(seed).initial_seed())
    config = tiny("model.init_std=0.2", *overrides)
    tokens = open_tokens(config.data.folders[0], "val")
    return GPT(config.model).double().eval(), tokens


def near(found, wanted, length, name):
    """Measures of gates and scores, which a router computes in fp32 and the loop over tokens in
    fp64.
    """
    found, wanted = (torch.tensor(values, dtype=torch.float64) for values in (found, wanted))
    assert_near(found, wanted, tolerance(torch.float32, length), name)


@pytest.mark.numerics
@pytest.mark.parametrize("router", SPARSE)
def test_counts_are_those_of_a_loop_over_tokens(router, tiny, monkeypatch):
    monkeypatch.setattr(routing, "BATCH_TOKENS", 32)  # two windows a batch, the fewest
    model, tokens = tiny_model(tiny, 0, f"model.router={router}")
    idx = windows(tokens, fixed_windows(tokens, 32, 12), 32)[0]
    often = Counter(idx.ravel().tolist())
    least = sorted(often.values())[len(often) // 2]
    monkeypatch.setattr(routing, "MIN_COUNT", least)
    counted, seen = count_routing(model, text=idx)
    layers = [asdict(describe_layer(0, layer, seen)) for layer in counted]
    with torch.no_grad():  # in the same batches: in others rounding could change a choice
        batches = [record_routing(model, batch) for batch in torch.from_numpy(idx).split(2)]
    by_layer = [
        Routing(*map(torch.cat, list(zip(*parts, strict=True))[:4]))
        for parts in zip(*batches, strict=True)
    ]
    text = idx.ravel().tolist()
    others = (
        torch.cat([shuffled_baseline(batch) for batch in torch.from_numpy(idx).split(2)])
        .flatten()
        .tolist()
    )
    assert [layer.tokens for layer in counted] == [len(text)] * len(counted) and len(text) == 384
    common = [x for x, n in often.items() if n >= least]
    assert seen.tolist() == sorted((often[x] for x in common), reverse=True)
    assert len(often) > len(common) > 5
    for layer, decided in zip(layers, by_layer, strict=True):
        loads = Counter()
        both = Counter()
        took = Counter()
        took_by_chance = Counter()
        entropies = []
        zeros = sum(gate == 0 for gates in decided.weights.tolist() for gate in gates)
        assert layer["zero_gates"] == zeros / 768
        rows = zip(text, others, decided.experts.tolist(), decided.scores.tolist(), strict=True)
        for x, other, chosen, scores in rows:
            loads.update(chosen)
            both.update(itertools.product(chosen, chosen))
            took.update((x, e) for e in chosen)
            took_by_chance.update((other, e) for e in chosen)
            positive = [s for s in scores if s > 0]
            entropies.append(
                -sum(s / sum(positive) * math.log(s / sum(positive)) for s in positive)
            )
        E = range(8)
        assert layer["loads"] == [loads[e] for e in E]
        assert layer["load_imbalance"] == pytest.approx(max(loads.values()) / (2 * 384 / 8))
        assert layer["dead_experts"] == sum(loads[e] == 0 for e in E)
        assert layer["load_entropy"] == pytest.approx(
            -sum(n / 768 * math.log(n / 768) for n in loads.values())
        )
        # means over a batch
        near([layer["entropy"]], [np.mean(entropies)], 64 * 8, f"entropy {router}")
        partner = np.mean([max(both[i, j] for j in E if j != i) / loads[i] for i in E if loads[i]])
        assert layer["strongest_partner"] == pytest.approx(partner)
        by_chance = np.mean([max(loads[j] / 384 for j in E if j != i) for i in E])
        assert layer["strongest_partner_by_chance"] == pytest.approx(by_chance)
        for key, counts in (("vocabulary", took), ("vocabulary_by_chance", took_by_chance)):
            assert layer[key] == pytest.approx(
                np.mean([max(counts[x, e] for e in E) / often[x] for x in common])
            )


def test_chance_is_another_window_and_position():
    x = torch.arange(4 * 32).view(4, 32)
    y = shuffled_baseline(x)
    assert y.flatten().sort().values.equal(x.flatten()) and not (y // 32 == x // 32).any()
    assert (y % 32 == x % 32).float().mean() < 0.2
    assert shuffled_baseline(x[..., None].expand(4, 32, 2))[..., 1].equal(y)


def test_expert_without_tokens_counts_nowhere():
    shares = np.array([[1, 0.75, 0.25, 0], [0.5, 1, 0.5, 0], [0.25, 0.75, 1, 0], [0, 0, 0, 0]])
    assert routing.mean_strongest(shares) == pytest.approx((0.75 + 0.5 + 0.75) / 3)


def test_a_model_agrees_with_itself_under_any_numbers(tiny, monkeypatch):
    def agreement_of(model, other, tokens):
        layers, _ = count_routing(
            model, other, text=windows(tokens, fixed_windows(tokens, 32, 12), 32)[0]
        )
        return [compare_choices(layer.agreement.numpy(), top_k=2) for layer in layers]

    monkeypatch.setattr(routing, "BATCH_TOKENS", 64)
    softmax = "model.router=softmax"  # no ties, which go to the lower number
    model, tokens = tiny_model(tiny, 0, softmax)
    for layer in agreement_of(model, model, tokens):
        assert layer["same_number"] == layer["matched"] == 1
        assert layer["matched_by_chance"] < 0.7 and layer["same_number_by_chance"] < 0.6
    idx = torch.from_numpy(windows(tokens, fixed_windows(tokens, 32, 12), 32)[0])
    for decided in record_routing(model, idx):  # rounding cannot change a choice
        second, third = decided.scores.topk(3).values[:, 1:].T
        assert (second - third).min() > 1e-6
    renumbered, _ = tiny_model(tiny, 0, softmax)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for block in renumbered.blocks:
            for parameter in (
                block.mlp.router.weight,
                block.mlp.experts.w_in,
                block.mlp.experts.w_out,
            ):
                parameter.copy_(parameter[order].clone())
    for layer in agreement_of(model, renumbered, tokens):
        assert layer["matched"] == 1 and layer["same_number"] < 0.7
    apart, _ = tiny_model(tiny, 1, softmax)
    assert all(layer["matched"] < 0.9 for layer in agreement_of(model, apart, tokens))


def share(measured, by_chance):
    return f"{100 * measured:.0f}% ({100 * by_chance:.0f}%)"


def assert_tables_are_those_of_the_report(printed, report):
    """Every cell that is printed, by the numbers in routing.json."""
    layers, agreement = read_tables(printed)
    for row, layer in zip(layers, report["layers"], strict=True):
        loads = np.array(layer["loads"])
        assert row == {
            "layer": str(layer["layer"]),
            "busiest": f"{loads.max() / loads.mean():.2f}",
            "idle": str(np.count_nonzero(loads == 0)),
            "in use": f"{math.exp(stats.entropy(loads)):.1f}",
            "per token": f"{math.exp(layer['entropy']):.1f}",
            "zero gates": f"{100 * layer['zero_gates']:.2f}%",
            "vocabulary": share(layer["vocabulary"], layer["vocabulary_by_chance"]),
            "partner": share(layer["strongest_partner"], layer["strongest_partner_by_chance"]),
        }
    for row, layer in zip(agreement, report["agreement"], strict=True):
        matched, chance = layer["matched"], layer["matched_by_chance"]
        assert row == {
            "layer": str(layer["layer"]),
            "same number": share(layer["same_number"], layer["same_number_by_chance"]),
            "matched": share(matched, chance),
            "beyond chance": f"{1 - (1 - matched) / (1 - chance):.2f}",
        }


def test_command_compares_two_checkpoints(made, call):
    run = made / "kern"
    words = [run, "--windows", 6, "--checkpoint", 2, "--other", run]
    printed = call(routing.main, *words)
    file = run / "eval/step_00000002/routing-kern-step_00000004/routing.json"
    report = json.loads(file.read_text())
    lines = read_metrics(run / "metrics.jsonl", ["val/loads"])
    logged = {line["step"]: line["val/loads"] for line in lines if "val/loads" in line}
    # what training saw in the same six windows
    assert [layer["loads"] for layer in report["layers"]] == logged[2]
    facts = {"run": "kern", "router": "kern", "step": 2, "mean": "", "top_k": 2, "windows": 6}
    facts |= {"tokens": 192, "min_count": 10, "other": "kern, step_00000004"}
    assert {key: report[key] for key in facts} == facts
    assert_tables_are_those_of_the_report(printed, report)
    assert f"agreement with {report['other']}\n" in printed
    assert printed.endswith(f"192 tokens; a picture of the loads: python -m scripts.draw {file}\n")
    models = [load_model(run, step).model for step in (2, 4)]
    tokens = open_tokens(Path(report["data"]), "val")
    layers, _ = count_routing(*models, text=windows(tokens, fixed_windows(tokens, 32, 6), 32)[0])
    for number, (agreement, layer) in enumerate(zip(report["agreement"], layers, strict=True)):
        assert agreement == {"layer": number} | compare_choices(layer.agreement.numpy(), top_k=2)
        assert agreement["same_number"] == layer.agreement[0].trace().item() / (192 * 2)


def test_a_text_goes_where_a_pass_over_its_document_sends_it(made):
    trained, tokenizer = load_run(made / "kern")
    tokens, experts, gates = route_text(trained.model, tokenizer, "a bé")
    assert tokens == ["a", " ", "b", "\ufffd", "\ufffd"]
    assert experts.shape == gates.shape == (2, 5, 2)
    # attention is causal
    whole = record_routing(trained.model, torch.tensor([[256, *"a bé and more".encode()]]))
    for layer, decided in enumerate(whole):
        assert torch.equal(experts[layer], decided.experts[1:6])
        near(gates[layer].flatten().tolist(), decided.weights[1:6].flatten().tolist(), 32, "gates")
    with pytest.raises(ValueError, match="at most 32"):
        route_text(trained.model, tokenizer, "x" * 32)
    with pytest.raises(ValueError, match="a dense model has no router"):
        route_text(load_model(made / "dense").model, tokenizer, "a")


BAD_INPUT = {
    "--other {}/dense": "dense is dense and has no router; name a run with another model.router",
    "--other {}/softmax": "kern and softmax cannot be compared: model.top_k is 2 and 3; name a run "
    "with 2",
    "--windows -1": "--windows -1: expected 1 or more",
    "--windows 1": "tiny: 1 window, chance needs two; raise --windows or name a larger set",
    "--windows 2": "no token occurs 65 times among 64 tokens; raise --windows",
}


@pytest.mark.parametrize(("words", "message"), BAD_INPUT.items())
def test_bad_input_is_named(made, words, message, call, monkeypatch):
    monkeypatch.setattr(routing, "MIN_COUNT", 65)
    (line,) = call(routing.main, made / "kern", *words.format(made).split(), code=2).splitlines()
    assert line.startswith("error: ") and message in line


def test_models_of_other_tokenizers_are_not_compared(made):
    trained = load_model(made / "kern")
    routing.check_comparable(trained, load_model(made / "kern", 2))
    other = trained._replace(metadata=trained.metadata | {"tokenizer": "another"})
    with pytest.raises(ValueError, match="kern and kern have different tokenizers"):
        routing.check_comparable(trained, other)


def test_agreement_that_cannot_exceed_chance():
    """Of a layer that always chooses all experts."""
    layer = {"layer": 3, "same_number": 0.5, "same_number_by_chance": 0.25}
    layer |= {"matched": 1.0, "matched_by_chance": 1.0}
    assert routing.tabulate_agreement([layer])[1] == [["3", "50% (25%)", "100% (100%)", "-"]]


# ---- scripts/draw.py: the picture of a routing.json
def test_loads_are_relative_to_the_layer(tmp_path, capsys, call):
    layers = [{"layer": 1, "loads": [30, 20, 6, 0]}, {"layer": 2, "loads": [28, 28, 28, 28]}]
    report = {"run": "kern", "step": 1000, "layers": layers}
    figure = draw.plot_loads(report)
    axes = figure.axes[0]
    assert axes.get_title() == "kern, step 1,000" and axes.images[0].get_clim() == (0, 4)
    deep = draw.plot_loads(report | {"layers": layers * 20})
    assert deep.get_figheight() - figure.get_figheight() == pytest.approx(0.14 * (40 - 6))
    shares = axes.images[0].get_array()
    assert shares[0].tolist() == pytest.approx([30 / 14, 20 / 14, 6 / 14, 0])
    assert shares[1].tolist() == [1] * 4
    assert axes.lines[0].get_xydata().tolist() == [[3, 0]]  # the expert without a token
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]
    (tmp_path / "file.json").write_text(json.dumps(report))
    for place in (tmp_path, tmp_path / "runs/b", tmp_path / "runs/a"):
        assert f"{tmp_path}: a folder; run eval.routing first" in call(draw.main, tmp_path, code=2)
        place.mkdir(parents=True, exist_ok=True)
    for name in ("b", "a"):
        (tmp_path / f"runs/{name}/routing.json").touch()
    first = f"{tmp_path}: a folder; name a file, such as {tmp_path}/runs/a/routing.json"
    assert first in call(draw.main, tmp_path, code=2)
    assert "not a file" in call(draw.main, "/dev/null", code=2)
    assert draw.main([str(tmp_path / "file.json")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "loads.png")
    assert (tmp_path / "loads.png").exists()


HUGE = '{"run": "a", "step": 1, "layers": [{"layer": 0, "loads": [%s]}]}' % 10**400


@pytest.mark.parametrize("content", ["[]", "{}", '{"layers": 1}', "\x00", "[" * 10**5, HUGE])
def test_another_file_is_refused(write, call, content):
    assert "not written by eval.routing" in call(draw.main, write(content, "file.json"), code=2)


# ---- eval/traces.py: what a trace holds, replays against a loop that takes its experts by hand,
# traces that do not fit
NEAR = tolerance(torch.float32, 257, roundings=8)  # as in test_train.py


@pytest.fixture(scope="module")
def sources(tmp_path_factory, corpus):
    """A folder of runs that differ in routers, K, E, layers and the length of windows, and
    softmax's trace.
    """
    file = write_tiny(folder := tmp_path_factory.mktemp("sources"), corpus)
    changes = {
        "softmax": "gate_scale=2.0",
        "kern": "init_std=0.05",
        "top_k": "top_k=3",
        "experts": "n_expert=4",
    }
    changes |= {"layers": "n_layer=3", "ids": "block_size=32"}
    for name, change in changes.items():
        router = f"model.router={name if name in ('softmax', 'kern') else 'tanh'}"
        train.train(
            configure.load(
                file, [f"run.name={name}", f"model.{change}", router, "train.max_steps=2"]
            )
        )
    assert (
        routing.main(
            [str(folder / "runs/softmax"), "--trace", str(folder / "soft.npz"), "--windows", "6"]
        )
        == 0
    )
    return folder


def read_windows(sources):
    trained = load_model(sources / "runs/softmax")
    tokens = open_tokens(trained.config.data.folders[0], "val")
    return map(torch.from_numpy, windows(tokens, fixed_windows(tokens, 32, 6), 32))


def hook_gates_by_hand(model, experts, name):
    """Route by `experts` (L, N, K), with gates of GATES[name]; returns what removes the hooks."""
    handles = []
    for chosen, router in zip(experts, traces.find_routers(model), strict=True):

        def by_hand(module, inputs, routing, chosen=chosen):
            s = routing.logits
            gamma = 1 if module.gamma is None else module.gamma
            gates = module.c * gamma * GATES[name](s, s.gather(1, chosen))
            return routing._replace(experts=chosen, weights=gates)

        handles.append(router.register_forward_hook(by_hand))
    return handles


def test_trace_has_experts_gates_and_tokens_by_layer(sources):
    x, y = read_windows(sources)
    model = load_model(sources / "runs/softmax").model
    trace = np.load(sources / "soft.npz")
    assert trace["tokens"].tolist() == torch.cat([x, y[:, -1:]], 1).tolist()
    assert trace["n_expert"] == 8
    assert trace["experts"].shape == trace["gates"].shape == (2, 6 * 32, 2)
    for layer, decided in enumerate(record_routing(model, x)):
        assert trace["experts"][layer].tolist() == decided.experts.tolist()
        assert_near(torch.from_numpy(trace["gates"][layer]), decided.weights, NEAR, "gates")
    assert_near(torch.from_numpy(trace["losses"]), model(x, y).losses.double(), NEAR, "losses")
    many = {"n_layer": 1, "n_expert": 300, "expert_hidden": 1}
    model = GPT(load_model(sources / "runs/softmax").config.model.model_copy(update=many)).eval()
    chosen = traces.trace_windows(model, trace["tokens"])["experts"]
    (decided,) = record_routing(model, x)
    assert chosen.max() > 255 and chosen[0].tolist() == decided.experts.tolist()


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["kern", "softmax"])
def test_replayed_loss_is_that_of_gates_by_hand(sources, name, call, monkeypatch):
    monkeypatch.setattr(traces, "BATCH_TOKENS", 64)  # several passes
    said = call(
        routing.main, sources / "runs" / name, "--replay", sources / "soft.npz"
    ).splitlines()
    (file,) = (sources / f"runs/{name}/eval").rglob("replay-soft.json")
    report, trace = json.loads(file.read_text()), np.load(sources / "soft.npz")
    x, y = read_windows(sources)
    model = load_model(sources / "runs" / name).model
    experts = torch.from_numpy(trace["experts"])
    own = (
        torch.stack([r.experts for r in record_routing(model, x)])[..., None]
        == experts[..., None, :]
    ).any(-1)
    wanted = {"source_loss": trace["losses"].mean(), "loss": model(x, y).loss.item()}
    hook_gates_by_hand(model, experts.long(), name)
    wanted["replayed_loss"] = model(x, y).loss.item()
    for key, value in wanted.items():
        assert_near(torch.tensor(report[key]), torch.tensor(value, dtype=torch.float64), NEAR, key)
    assert report["same_choice"] == pytest.approx(own.float().mean().item())
    assert (
        (report["same_choice"] == 1)
        == (report["replayed_loss"] == report["loss"])
        == (name == "softmax")
    )
    same = round(100 * report["same_choice"])
    texts = {
        "source_loss": "softmax, step_00000002",
        "replayed_loss": f"{name} with those experts",
        "loss": f"{name} with its own, {same}% of them the same",
    }
    assert said == [f"loss {report[key]:.4f}  {text}" for key, text in texts.items()]


@pytest.mark.numerics
def test_a_training_step_replays(sources):
    """Its gradients are those of gates by hand at another's choice; then it is over."""
    x, y = read_windows(sources)
    model = load_model(sources / "runs/softmax").model.requires_grad_(True)
    own = torch.stack([decided.experts for decided in record_routing(model, x)])
    other = (own + 1) % 8

    def gradients():
        model.zero_grad()
        model(x, y).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    handles = hook_gates_by_hand(model, other, "softmax")
    wanted = gradients()
    for handle in handles:
        handle.remove()
    with traces.replay_routing(model, other):
        assert model.blocks[1].mlp.router(torch.randn(192, 32)).experts.equal(other[1])
        for (name, _), found, gradient in zip(
            model.named_parameters(), gradients(), wanted, strict=True
        ):
            assert_near(found, gradient, 10 * NEAR, name)
        assert all(router.weight.grad.any() for router in traces.find_routers(model))
        says = r"are \(192, 2\), \(tokens, top_k\) are \(160, 2\); take the trace of these"
        with pytest.raises(ValueError, match=says):
            model(x[:5], y[:5])
    assert all(router.replay is None for router in model.modules() if isinstance(router, Router))
    assert [p.tolist() for p in gradients()] == [p.tolist() for p in before]
    with (
        pytest.raises(ValueError, match="of 1 layers, the model has 2"),
        traces.replay_routing(model, own[:1]),
    ):
        pass


def test_the_loop_in_the_documentation_runs(sources, monkeypatch):
    """Its gradients are those of the text, of a model that chose the same itself."""
    (code,) = re.findall(
        "```python\n(.*?)```", (REPO_ROOT / "docs/traces.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(sources)
    (sources / "a.npz").write_bytes((sources / "soft.npz").read_bytes())
    exec(code.replace("runs/B", "runs/softmax"), names := {})
    own = load_model(sources / "runs/softmax").model.requires_grad_(True)
    x, y = read_windows(sources)
    own(x, y).loss.backward()
    for mine, theirs in zip(names["model"].parameters(), own.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad, 10 * NEAR, "gradient")


SHAPE = "soft.npz has (2, 8, 2) layers with experts, n_expert and top_k"
FAULTS = {
    "top_k": f"{SHAPE}, top_k (2, 8, 3); trace a run with these",
    "experts": f"{SHAPE}, experts (2, 4, 2)",
    "layers": f"{SHAPE}, layers (3, 8, 2)",
    "softmax --windows 6": "--replay, whose text is the trace's, no --data or --windows",
    "softmax --data tiny": "--replay, whose text is the trace's, no --data or --windows",
    "softmax --other {}/runs/kern": "--trace takes no --other",
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_does_not_fit_is_refused(sources, words, call):
    name, *more = words.format(sources).split()
    said = call(
        routing.main, sources / "runs" / name, "--replay", sources / "soft.npz", *more, code=2
    )
    assert FAULTS[words] in said and said.count("\n") == 1


DAMAGED = {
    "its tokenizer is not that of ids; trace a run on data with the same tokenizer": {
        "tokenizer": "another"
    },
    "of 192 tokens, are not those of 6 windows of 30; write it again": {
        "tokens": np.zeros((6, 31), np.uint16)
    },
    "are not those of 6 windows of 32": {"experts": np.full((2, 192, 2), 8, np.int16)},
    "are not those of 6 windows of 32;": {"experts": np.full((2, 192, 2), -1, np.int16)},
    "are not those of 6 windows of 32; write": {"tokens": np.full((6, 33), 257, np.uint16)},
    "is not a routing trace (not enough values to unpack": {"experts": np.array(1)},
}


@pytest.mark.parametrize("says", DAMAGED)
def test_damaged_traces_are_refused(sources, says, call, tmp_path):
    file = tmp_path / "bad.npz"
    np.savez(file, **{**np.load(sources / "soft.npz"), **DAMAGED[says]})
    assert says in call(routing.main, sources / "runs/ids", "--replay", file, code=2)


def test_a_file_that_is_no_trace_is_refused(sources, call, write):
    file = write("no trace", "bad.npz")
    said = call(routing.main, sources / "runs/ids", "--replay", file, code=2)
    assert "is not a routing trace (no .npz); write one with --trace" in said
