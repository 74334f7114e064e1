"""The loop: equal runs, loss and gradients, resuming, what a run leaves behind, refusals, the mean
of weights.
"""

import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from numerics import SEED, assert_near, tolerance
from runs import ALONE, REPO_ROOT, column, run, steps, untimed
from tqdm import tqdm

import train
from balance import summarize_routing
from data.bins import fingerprint, read_meta
from eval import val_loss
from runtime import RunError, cadence, checkpoint, distributed, reporter
from runtime.folder import RunFolder, path_of
from runtime.launch import Stop
from runtime.memory import flops_per_token
from runtime.metrics import Metrics, read_metrics
from scripts import sample


# ---- equal runs
def test_same_seed_same_numbers_bit_for_bit(tiny):
    own = ["model.dropout=0.1", "train.max_steps=2"]
    runs = [run(tiny(*own, f"run.name={seed}", f"run.seed={seed // 2}")) for seed in (14, 15, 16)]
    assert untimed(runs[0]) == untimed(runs[1])
    assert not set(column(runs[0], "train/loss")) & set(column(runs[2], "train/loss"))


# ---- what is due


DUE = {
    "train.max_steps": [7, 30, 45],
    "train.checkpoint_interval": [-1, 0, 1, 5],
    "train.checkpoint_minutes": [0, 2, 2.5],
    "train.keep_steps": ["", "3", "1,4,6"],
    "eval.interval": [1, 4, 50],
    "log.interval": [1, 5, 50],
}


def test_what_is_due_at_each_step(tiny, tmp_path, monkeypatch):
    """Saves, evaluations and log lines of drawn settings, of a new run and of a resumed one."""
    saver = checkpoint.Saver(tmp_path, ALONE, sharded=False, train=tiny().train)
    now = 0.0
    is_writing = False
    monkeypatch.setattr(cadence, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(saver, "is_writing", lambda: is_writing)
    monkeypatch.setattr(saver, "hangs", lambda: False)
    rng = random.Random(0)
    for _ in range(40):
        config = tiny(*[f"{key}={rng.choice(values)}" for key, values in DUE.items()])
        settings = config.train
        interval = settings.checkpoint_interval
        tenth = max(1, settings.max_steps // 10)
        start = saved = rng.choice([0, 4])
        saved_at = now
        due = cadence.Cadence(config, start, True, ALONE, Stop(), saver)
        for step in range(start, settings.max_steps + 1):
            now += 50
            is_writing = rng.random() < 0.5
            is_last = step == settings.max_steps
            reasons = [
                is_last,
                0 < 60 * settings.checkpoint_minutes <= now - saved_at,
                step in settings.kept_steps,
                interval > 0 and step % interval == 0,
                # since the last save
                interval == -1 and not is_writing and step // tenth > saved // tenth,
            ]
            has_save = step > start and any(reasons)
            has_evaluation = step != start or start == 0
            has_evaluation &= is_last or step % config.eval.interval == 0
            assert due.at(step) == (has_evaluation, has_save, False), (config, step)
            if step:
                assert due.is_log_due(step) == (is_last or step % config.log.interval == 0)
            if has_save:
                due.note_save(step)
                saved, saved_at = step, now


# ---- what a run leaves behind
EVALUATED = """
step tokens val/loss val/window_losses val/window_documents
val/loads val/load_imbalance val/dead_experts val/balance_loss val/zero_gates val/gate_norm
val/load_imbalance_of_layers val/dead_experts_of_layers val/balance_loss_of_layers
val/zero_gates_of_layers val/gate_norm_of_layers val/gate_sum val/gate_sum_of_layers
"""
LOGGED = """
step tokens train/loss train/aux_loss
optim/lr optim/grad_norm optim/loss_scale optim/skipped_steps
router/loads router/load_imbalance router/dead_experts router/zero_gates
router/load_imbalance_of_layers router/dead_experts_of_layers router/zero_gates_of_layers
router/entropy router/entropy_of_layers
router/gate_norm router/gate_norm_of_layers router/gate_sum router/gate_sum_of_layers
router/gamma router/gamma_of_layers
perf/tokens_per_sec perf/step_ms
"""


def test_metrics_have_the_keys_of_the_vocabulary(tiny, capsys):
    lines = run(tiny("train.dtype=float16", "train.balance_loss_coef=0.01"))
    assert "warning: float16 on a CPU" in capsys.readouterr().out
    assert column(lines, "step") == [0, 1, 2, 2, 3, 4, 4]
    assert all(line["tokens"] == line["step"] * 8 * 32 for line in lines)
    evaluated, logged = lines[:2]
    assert evaluated.keys() == {*EVALUATED.split()} and logged.keys() == {*LOGGED.split()}
    assert logged["optim/loss_scale"] == 65536
    assert logged["perf/tokens_per_sec"] == pytest.approx(8 * 32 * 1000 / logged["perf/step_ms"])
    with pytest.raises(AssertionError, match=r"no row for \['temperature'\]"):
        summarize_routing("router", torch.ones(2, 8), {"temperature": torch.ones(2)})


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
    """Nodes may have other config files, other data under the same name, other packages."""

    def refuse(plan, ranks):
        plans.append(plan)
        raise RunError("ranks disagree")

    plans = []
    monkeypatch.setattr(distributed, "check_agreement", refuse)
    changes = {"optim.lr": 0.5, "train.max_steps": 9}
    for config in (tiny(), tiny(*(f"{key}={value}" for key, value in changes.items()))):
        with pytest.raises(RunError, match="ranks disagree"):
            train.train(config)
        assert not path_of(config).exists()
    before, after = plans
    assert {name: after[name] for name in after if after[name] != before[name]} == changes
    data = fingerprint(read_meta(config.data.folders[0]))
    assert after.items() >= (data | {"step": 0, "train.dtype": "float32"}).items()
    assert "run.dir" not in after  # a shared folder may have a name of its own on each node

    monkeypatch.undo()
    monkeypatch.setattr(RunFolder, "check_shared", refuse)
    with pytest.raises(RunError, match="ranks disagree"):
        train.train(config)
    assert not (path_of(config) / "config.toml").exists()


# ---- what a run does at its end, whatever the reason
def test_everything_is_closed_after_an_error(tiny, monkeypatch, before_steps):
    codes = []
    tracker = SimpleNamespace(id="x", resume=print, log=print, finish=codes.append)
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


@pytest.mark.parametrize("schedule, tells", [("cosine", True), ("wsd", False)])
def test_another_length_tells_the_rate_of_the_next_step(tiny, capsys, schedule, tells):
    """The rate that is printed is the one that the step has; nothing is said where it stays."""
    words = "optim.lr=1 optim.warmup_steps=2 log.interval=1 train.keep_steps=4"
    words += f" optim.schedule={schedule} optim.decay_fraction=0.3"
    lines = [run(tiny(*words.split(), "train.max_steps=6"))]
    shutil.rmtree(path_of(tiny()) / "checkpoints/step_00000006")
    capsys.readouterr()
    lines.append(run(tiny(*words.split(), "train.max_steps=12")))
    rates = [column(of_run, "optim/lr")[4] for of_run in lines]
    said = f"train.max_steps: 6 -> 12: the learning rate of step 5 is {rates[1]:.3g} instead of "
    assert (said + f"{rates[0]:.3g}" in capsys.readouterr().out) == tells == (rates[0] != rates[1])


# ---- the mean of the weights; its formula: test_combinations.py
def test_commands_take_the_mean(tiny, capsys, call):
    """The run prints its loss, too."""
    lines = run(config := tiny("train.ema_decay=0.99"))
    logged = column(lines, "val_ema/loss")[-1]
    assert f", EMA {logged:.4f}\n" in capsys.readouterr().out
    trained = path_of(config)
    prompt = (trained, "--prompt", "a", "--tokens", 20, "--seed", 1)
    assert call(sample.main, *prompt) != call(sample.main, *prompt, "--ema")
    out = call(val_loss.main, trained, "--ema")
    (line,) = map(json.loads, (trained / "eval/step_00000004_ema/val_loss.json").open())
    assert line["loss"] == pytest.approx(logged, rel=1e-6)
    assert "EMA of decay 0.99" in out
