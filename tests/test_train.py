"""The loop: equal runs, loss and gradients, resuming, what a run leaves behind, refusals, the mean
of weights.
"""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from numerics import SEED, assert_near, tolerance
from runs import ALONE, REPO_ROOT, column, metrics, run, steps, untimed
from safetensors.torch import load_file
from tqdm import tqdm

import train
from data.bins import open_tokens
from data.loader import choose_validation, fixed_windows, windows
from eval import val_loss
from eval.routing import record_routing
from eval.trained import load_model
from hf.export import export
from model import GPT
from runtime import RunError, cadence, checkpoint, distributed, reporter
from runtime.folder import RunFolder, path_of
from runtime.launch import Stop
from runtime.memory import flops_per_token
from runtime.metrics import Metrics, read_metrics
from runtime.preflight import plan_run
from runtime.validation import measure_loss
from scripts import sample


# ---- equal runs
def test_same_seed_same_numbers_bit_for_bit(tiny):
    own = ["model.dropout=0.1", "train.max_steps=2"]
    names = (("first", 7), ("again", 7), ("other", 8))
    first, again, other = (
        run(tiny(*own, f"run.name={name}", f"run.seed={seed}")) for name, seed in names
    )
    assert untimed(first) == untimed(again)
    assert not set(column(first, "train/loss")) & set(column(other, "train/loss"))


# ---- what is due


def test_what_is_due_at_each_step(tiny, tmp_path, monkeypatch):
    """Saves, evaluations and log lines of drawn settings, of a new run and of a resumed one."""
    saver = checkpoint.Saver(tmp_path, ALONE, sharded=False, train=tiny().train)
    now = 0.0
    monkeypatch.setattr(cadence, "time", SimpleNamespace(monotonic=lambda: now))
    rng = random.Random(0)
    for _ in range(20):
        max_steps = rng.choice([7, 12, 30])
        save = rng.choice([0, 1, 3, 5])
        keep = sorted(rng.sample(range(1, 8), rng.choice([0, 1, 3])))
        evaluate, log = rng.choice([1, 4, 50]), rng.choice([1, 5, 50])
        start, minutes = rng.choice([0, 4]), rng.choice([0, 2, 2.5])
        config = tiny(
            f"train.max_steps={max_steps}",
            f"train.checkpoint_interval={save}",
            f"train.checkpoint_minutes={minutes}",
            f"train.keep_steps={','.join(map(str, keep))}",
            f"eval.interval={evaluate}",
            f"log.interval={log}",
        )
        saved_at = now
        due = cadence.Cadence(config, start, True, ALONE, Stop(), saver)
        for step in range(start, max_steps + 1):
            now += 50
            is_late = 0 < 60 * minutes <= now - saved_at
            is_last = step == max_steps
            is_on_interval = save > 0 and step % save == 0
            has_save = step > start and (is_last or is_late or is_on_interval or step in keep)
            is_new = step > start or start == 0
            has_evaluation = is_new and (is_last or step % evaluate == 0)
            assert due.at(step) == (has_evaluation, has_save, False), (config, step)
            if step:
                assert due.is_log_due(step) == (is_last or step % log == 0)
            if has_save:
                due.note_save(step)
                saved_at = now


def test_a_tenth_waits_for_the_save_before(tiny, tmp_path, monkeypatch):
    saver = checkpoint.Saver(tmp_path, ALONE, sharded=False, train=tiny().train)
    config = tiny(
        "train.max_steps=2000", "train.checkpoint_interval=-1", "train.checkpoint_minutes=0"
    )
    due = cadence.Cadence(config, 0, False, ALONE, Stop(), saver)
    monkeypatch.setattr(saver, "hangs", lambda: False)
    saved = []
    for step in range(2001):
        is_writing = bool(saved) and step - saved[-1] < 450 and step < 1500
        monkeypatch.setattr(saver, "is_writing", lambda value=is_writing: value)
        if due.at(step).save:
            due.note_save(step)
            saved.append(step)
    assert saved == [200, 650, 1100, 1500, 1600, 1800, 2000]


# ---- what a run leaves behind
EVALUATED = """
step tokens val/loss val/window_losses val/window_documents
val/loads val/load_imbalance val/dead_experts val/balance_loss val/zero_gates val/gate_norm
val/load_imbalance_of_layers val/dead_experts_of_layers val/balance_loss_of_layers
val/zero_gates_of_layers val/gate_norm_of_layers val/gate_sum val/gate_sum_of_layers
"""
LOGGED = """
step tokens train/loss train/aux_loss train/balance_loss
optim/lr optim/grad_norm optim/loss_scale optim/skipped_steps
router/loads router/load_imbalance router/dead_experts router/zero_gates
router/load_imbalance_of_layers router/dead_experts_of_layers router/zero_gates_of_layers
router/entropy router/entropy_of_layers
router/gate_norm router/gate_norm_of_layers router/gate_sum router/gate_sum_of_layers
router/gamma router/gamma_of_layers
perf/tokens_per_sec perf/step_ms
"""


def test_measures_of_an_evaluation_are_means_over_its_tokens(tiny):
    """Of 6 windows in batches of 4 and 2, by a trained model's router on each."""
    config = tiny("train.micro_batch_size=4", "train.checkpoint_interval=4")
    lines = run(config)
    model = load_model(path_of(config)).model
    tokens = open_tokens(config.data.folders[0], "val")
    x, _ = windows(tokens, fixed_windows(tokens, 32, 6), 32)
    with torch.no_grad():
        layers = record_routing(model, torch.from_numpy(x))
    gates = [layer.weights.double() for layer in layers]
    norms = [layer.square().sum(1).mean().sqrt().item() for layer in gates]
    assert column(lines, "val/gate_norm_of_layers")[-1] == pytest.approx(norms, rel=1e-5)
    sums = [layer.sum(1).mean().item() for layer in gates]
    assert column(lines, "val/gate_sum_of_layers")[-1] == pytest.approx(sums, rel=1e-5)
    losses = []  # E times the sum of loads' shares times mean scores
    for layer in layers:
        share = torch.bincount(layer.experts.flatten(), minlength=8) / layer.experts.numel()
        scores = layer.scores.relu().double()
        losses.append(8 * (share * (scores / scores.sum(1, keepdim=True)).mean(0)).sum().item())
    assert column(lines, "val/balance_loss_of_layers")[-1] == pytest.approx(losses, rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    n_zero = sum((layer == 0).double().mean().item() for layer in gates) / len(gates)
    assert column(lines, "val/zero_gates")[-1] == pytest.approx(n_zero, rel=1e-5)


def test_a_rank_without_windows_counts_none(tiny, monkeypatch):
    """It reads one because under FSDP2 every rank joins every pass."""
    config = tiny("eval.windows=1")
    tokens = open_tokens(config.data.folders[0], "val")
    model = GPT(config.model)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda tensor: tensor)
    monkeypatch.setattr(distributed, "any_rank", lambda flags, ranks: flags)
    values = measure_loss(
        SimpleNamespace(runner=model, forward=model),
        choose_validation([tokens], 32, 1),
        config,
        distributed.Ranks(1, 2, torch.device("cpu")),
        Stop(),
    )
    assert values["val/loss"] == values["val/loads"].sum() == values["val/gate_norm"] == 0


def test_metrics_have_the_keys_of_the_vocabulary(tiny, capsys):
    lines = run(tiny("train.dtype=float16", "train.balance_loss_coef=0.01"))
    assert "warning: float16 on a CPU" in capsys.readouterr().out
    assert column(lines, "step") == [0, 1, 2, 2, 3, 4, 4]
    assert all(line["tokens"] == line["step"] * 8 * 32 for line in lines)
    evaluated, logged = lines[:2]
    assert evaluated.keys() == {*EVALUATED.split()} and logged.keys() == {*LOGGED.split()}
    assert (
        logged["optim/loss_scale"] == 65536
        and 0.9 < logged["router/gamma"] < 1.1
        and logged["router/gamma"] != 1
    )
    assert logged["perf/tokens_per_sec"] == pytest.approx(8 * 32 * 1000 / logged["perf/step_ms"])
    assert logged["train/balance_loss"] == pytest.approx(100 * logged["train/aux_loss"])
    for name in ("router/gamma", "router/entropy", "router/gate_norm", "router/gate_sum"):
        layers = logged[f"{name}_of_layers"]
        assert (
            len(layers) == 2
            and logged[name] == pytest.approx(sum(layers) / 2)
            and layers[0] != layers[1]
        )
    for loads, tokens in ((evaluated["val/loads"], 6 * 32), (logged["router/loads"], 8 * 32)):
        assert [sum(layer) for layer in loads] == [tokens * 2] * 2 and {
            len(layer) for layer in loads
        } == {8}


@pytest.mark.numerics
def test_metrics_are_means_over_the_log_interval(tiny):
    first, second, third, fourth = column(
        run(tiny("run.name=each", f"run.seed={SEED}")), "train/loss"
    )
    pairs = run(tiny("run.name=pairs", "log.interval=2", f"run.seed={SEED}"))
    wanted = torch.tensor([first + second, third + fourth], dtype=torch.float64) / 2
    losses = torch.tensor(column(pairs, "train/loss"), dtype=torch.float64)
    assert_near(losses, wanted, tolerance(torch.float64, 2), "train/loss")
    assert [line["step"] for line in pairs if "train/loss" in line] == [2, 4]


def test_measures_of_micro_batches_are_those_of_the_batch(tiny):
    lines = []
    for size in (8, 2):
        own = [f"run.name={size}", f"train.micro_batch_size={size}"]
        both = ["train.balance_loss_coef=0.1", "train.z_loss_coef=0.1"]
        lines.append(run(tiny(*own, *both))[1])
        assert "train/balance_loss" not in lines[-1]  # unknown: aux_loss is the sum of both
    for name in ("train/loss", "train/aux_loss", "router/zero_gates"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-4), name
    for name in ("entropy", "gate_norm", "gate_sum"):
        key = f"router/{name}_of_layers"
        assert lines[0][key] == pytest.approx(lines[1][key], rel=1e-4), name


# ---- refusals, before anything is made
def test_typos_and_missing_data_are_reported_before_torch_is_imported(tiny_file, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    cases = {
        "--optim.lrr=1": (2, "did you mean 'optim.lr'?"),
        "--data.name=nowhere": (2, "--name nowhere"),
    }
    # it would be seen
    for word, (code, said) in (cases | {"--optim.lr=1": (1, "torch was imported")}).items():
        command = [sys.executable, "train.py", tiny_file, word]
        done = subprocess.run(
            command, cwd=REPO_ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert (done.returncode, done.stdout) == (code, "") and said in done.stderr, word


def test_ranks_compare_their_plans_before_anything_is_made(tiny, monkeypatch):
    def refuse(plan, ranks):
        raise RunError(plan)

    monkeypatch.setattr(distributed, "check_agreement", refuse)
    with pytest.raises(RunError, match="train.parallel = ddp, tiny at step 0"):
        train.train(config := tiny())
    assert not path_of(config).exists()


# ---- what a run does at its end, whatever the reason
def test_everything_is_closed_after_an_error(tiny, monkeypatch, before_steps):
    codes = []
    tracker = SimpleNamespace(id="x", recall=print, log=print, finish=codes.append)
    monkeypatch.setattr(reporter, "start_wandb", lambda *args: tracker)
    before_steps(lambda step: 1 / (step - 2))
    n_thread = threading.active_count()
    with pytest.raises(ZeroDivisionError) as caught:  # which keeps all that is not closed alive
        train.train(tiny())
    assert codes == [1]  # wandb shows a failed run
    assert all(bar.disable for bar in tqdm._instances)
    assert threading.active_count() == n_thread  # none reads batches ahead
    with RunFolder(path_of(tiny())).claim(ALONE):
        del caught
    before_steps(None)
    assert run(tiny())[-1]["step"] == 4 and codes == [1, 0]
    # which no checkpoint had
    assert read_metrics(path_of(tiny()) / "metrics.old.jsonl")[-1]["step"] == 2


def test_a_failed_save_ends_the_run_at_its_step(tiny, monkeypatch, saves_end_first):
    def fail(*args):
        raise OSError(28, "No space left on device")

    saves_end_first()
    monkeypatch.setattr(checkpoint.Saver, "_publish", fail)
    config = tiny("train.checkpoint_interval=2", "train.max_steps=50")
    with pytest.raises(RunError, match="step_00000002: .*could not be written .*No space left"):
        run(config)
    assert metrics(config)[-1]["step"] == 2


def test_metrics_reach_the_disk_before_the_checkpoint_that_makes_them_final(tiny, monkeypatch):
    events, sync, save = [], Metrics.sync, checkpoint.Saver.save
    monkeypatch.setattr(Metrics, "sync", lambda self: events.append("sync") or sync(self))
    saver = checkpoint.Saver
    monkeypatch.setattr(
        saver, "save", lambda self, step, *args: events.append(step) or save(self, step, *args)
    )
    run(tiny("train.checkpoint_interval=2"))
    assert events == ["sync", 2, "sync", 4, "sync"]  # the last: when the file is closed


def test_evaluation_is_no_part_of_the_step_time(tiny, monkeypatch, before_steps):
    """On a clock that an evaluation turns by 100 seconds and a step by 2."""
    passed, evaluate, flops = [], train.evaluate, flops_per_token(tiny().model)
    monkeypatch.setattr(reporter.time, "perf_counter", lambda: sum(passed))
    monkeypatch.setattr(train, "evaluate", lambda *args: passed.append(100.0) or evaluate(*args))
    before_steps(lambda step: passed.append(2.0))
    monkeypatch.setattr(distributed, "peak_flops", lambda device, dtype: 1e9)
    lines = run(tiny("eval.interval=1", "log.interval=2"))
    assert column(lines, "perf/step_ms") == [2000, 2000]
    assert column(lines, "perf/tokens_per_sec") == [8 * 32 / 2] * 2
    assert column(lines, "perf/mfu") == pytest.approx([flops * 8 * 32 / 2 / 1e9] * 2)


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_diverged_run_ends_as_a_failure_and_saves_nothing(tiny, monkeypatch, loss):
    evaluate = train.evaluate
    monkeypatch.setattr(
        train, "evaluate", lambda *args: evaluate(*args) | {"val/loss": torch.tensor(loss)}
    )
    config = tiny("run.name=run", "train.checkpoint_interval=2", "eval.interval=2")
    with pytest.raises(
        RunError, match=rf"val loss {loss} at step 0, the run has diverged. .*lower optim\.lr"
    ):
        run(config)
    assert not steps(config)


@pytest.mark.parametrize("settings, tells", [("cosine", True), ("wsd", False)])
def test_another_length_tells_the_rate_of_the_next_step(tiny, capsys, settings, tells):
    """The rate that is printed is the one that the step has; nothing is said where it stays."""
    words = "optim.lr=1 optim.warmup_steps=2 log.interval=1 train.keep_steps=4"
    words += f" optim.schedule={settings} optim.decay_fraction=0.3"
    lines = []
    for max_steps in (6, 12):
        config = tiny(*words.split(), f"train.max_steps={max_steps}")
        capsys.readouterr()
        lines.append(run(config))
        newest = path_of(config) / f"checkpoints/step_{max_steps:08d}"
        if max_steps == 6:
            shutil.rmtree(newest)
    rates = []
    for of_run in lines:
        rates += [line["optim/lr"] for line in of_run if line["step"] == 5 and "optim/lr" in line]
    said = f"train.max_steps: 6 -> 12: the learning rate of step 5 is {rates[1]:.3g} instead of "
    assert (said + f"{rates[0]:.3g}" in capsys.readouterr().out) == tells == (rates[0] != rates[1])


# ---- the running mean of the weights (train.ema_decay): the formula, and every command; on ranks:
# test_parallel.py
DECAY = 0.75
EMA = [f"train.ema_decay={DECAY}", "train.keep_checkpoints=9", "train.checkpoint_interval=1"]
# The most state beside it: selection biases that move, dropout, a loss scale.
MOST = [
    "model.router=sigmoid-renorm",
    "train.bias_update_rate=0.01",
    "model.dropout=0.1",
    "train.dtype=float16",
]
MOST += ["model.n_hash_layer=1"]


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
    plan = plan_run(config)
    forward = torch.autocast("cpu", plan.dtype)(model)
    state = SimpleNamespace(runner=model, forward=forward)
    found = measure_loss(state, plan.data.validation, plan.config, ALONE, Stop())["val/loss"]
    assert found.item() == losses[-1] != column(lines, "val/loss")[-1]


def test_commands_take_the_mean(tiny, tmp_path, call):
    run(config := tiny("train.ema_decay=0.99"))
    trained = path_of(config)
    prompt = (trained, "--prompt", "a", "--tokens", 20, "--seed", 1)
    assert call(sample.main, *prompt) != call(sample.main, *prompt, "--ema")
    out = call(val_loss.main, trained, "--ema")
    (line,) = map(json.loads, (trained / "eval/step_00000004_ema/val_loss.json").open())
    logged = column(
        [json.loads(line) for line in (trained / "metrics.jsonl").open()], "val_ema/loss"
    )[-1]
    assert line["loss"] == pytest.approx(logged, rel=1e-6)
    assert "EMA of decay 0.99" in out
    call(export.main, trained, tmp_path / "out", "--ema")
    exported = load_file(tmp_path / "out/model.safetensors").values()
    mean = load_model(trained, ema=True).model.wte.weight
    assert any(tensor.shape == mean.shape and tensor.equal(mean) for tensor in exported)
