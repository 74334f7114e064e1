"""Branches (train.branch_from): equal to runs that were never branched, and refused where they
could not be.
"""

import shutil
from contextlib import nullcontext

import pytest
import torch
from runs import checkpoints, content, end, run, steps

import configure
import train
from report.frame import group_runs
from runtime import RunError, checkpoint
from runtime.distributed import Ranks
from runtime.folder import RunFolder, check_length, path_of
from runtime.preflight import plan_run
from runtime.runs import Run

# The most state to take over: dropout, a loss scale, a history of losses, sums of half a log
# interval.
WSD = [
    "optim.schedule=wsd",
    "optim.warmup_steps=2",
    "model.dropout=0.1",
    "log.interval=2",
    "train.dtype=float16",
    "optim.router_lr_ratio=0.5",
    "train.bias_update_rate=0.01",
    "train.ema_decay=0.9",
]
FRACTION = "optim.decay_fraction=0.25"
TRUNK = [
    *WSD,
    FRACTION,
    "run.name=trunk",
    "train.max_steps=16",
    "train.keep_steps=6,9,12",  # its decay begins at 12
    "train.checkpoint_interval=4",
]


@pytest.fixture(scope="module")
def unchanged_trunk(module_tiny):
    """For tests that leave it as it is."""
    config = module_tiny(*TRUNK, "train.keep_checkpoints=1")
    run(config)
    assert steps(config) == [6, 9, 12, 16]
    return config


@pytest.fixture
def trunk(tiny, unchanged_trunk):
    """A copy, which tests may change."""
    config = tiny(*TRUNK, "train.keep_checkpoints=1")
    shutil.copytree(path_of(unchanged_trunk), path_of(config))
    return config


def branch(tiny, trunk, *overrides):
    """The Config of a branch of `trunk`; its decay is a quarter unless a step is given."""
    fraction = [] if any("branch_step" in word for word in overrides) else [FRACTION]
    common = ["run.name=", "train.checkpoint_interval=5", *WSD, *fraction]
    return tiny(*common, f"train.branch_from={path_of(trunk)}", *overrides)


def test_branch_equals_a_run_that_was_never_branched(tiny, trunk, before_steps, capsys):
    """Three lengths; the last starts where the trunk's decay does.

    It is killed before its first checkpoint, and after it when the trunk is gone.
    """
    before = content(path_of(trunk))
    for start, stop, failures in ((6, 8, {}), (9, 10, {}), (12, 18, {13: [], 17: [15]})):
        own = f"train.max_steps={stop}" + (f" train.branch_step={start}" if start > 6 else "")
        config = branch(tiny, trunk, *own.split())
        assert config.run.name == f"trunk-{start}to{stop}"
        for step, saved in failures.items():
            before_steps(lambda now, step=step: 1 / (now - step))
            with pytest.raises(ZeroDivisionError):
                run(config)
            before_steps(None)
            assert steps(config) == saved
        assert content(path_of(trunk)) == before
        if failures:
            path_of(trunk).rename(path_of(trunk).with_name("gone"))
        run(config)
        fraction = f"optim.decay_fraction={config.optim.decay_fraction}"
        alone = tiny(*WSD, f"train.max_steps={stop}", fraction, f"run.name=alone-{stop}")
        run(alone)
        assert end(config) == end(alone)
    assert f"from step 12 of {path_of(trunk)}\n" in capsys.readouterr().out
    assert configure.load(path_of(config) / "config.toml") == config
    # of one setting
    assert len(group_runs([Run(path_of(one)) for one in (config, alone)])[0]) == 1


REFUSED = {
    "train.max_steps=12 train.batch_size=16": (
        "train.batch_size: 8 -> 16\n.*as the trunk has them"
    ),
    "train.max_steps=12 train.branch_from=runs/gone": (
        "runs/gone: no config.toml there, so not a run"
    ),
    "train.max_steps=4": "no checkpoint of step 3, .*6, 9.*--train.keep_steps=3$",
    "train.max_steps=20 train.branch_step=16": (
        "no checkpoint of step 16, .* up to step 12, .*6, 9, 12\\."
    ),
}


@pytest.mark.parametrize(("overrides", "says"), REFUSED.items())
def test_what_cannot_be_a_branch_is_refused(module_tiny, unchanged_trunk, overrides, says):
    before = content(path_of(unchanged_trunk).parent)
    with pytest.raises(RunError, match=f"(?s)^train.branch_from = .*{says}"):
        train.train(branch(module_tiny, unchanged_trunk, *overrides.split()))
    assert content(path_of(unchanged_trunk).parent) == before


def test_branch_takes_the_dtype_of_its_trunk_and_not_its_wandb_run(
    module_tiny, unchanged_trunk, monkeypatch
):
    plan = plan_run(
        branch(module_tiny, unchanged_trunk, "train.max_steps=8", "train.dtype=auto"), None, None
    )
    assert plan.dtype == torch.float16 and plan.config.train.dtype == "float16"
    monkeypatch.setattr(
        checkpoint, "verify", lambda *_: {"facts": {"data": "a hash", "wandb": "an id"}}
    )
    assert plan.branch.read_metadata(Ranks(0, 1, plan.device)) == {"data": "a hash"}


def test_damaged_or_cosine_trunk_is_refused(tiny, trunk):
    next(checkpoints(trunk).glob("step_00000009/__*")).write_bytes(b"")
    with pytest.raises(RunError, match="step_00000009/.*damaged.*another train.branch_step"):
        train.train(branch(tiny, trunk, "train.max_steps=12"))
    file = path_of(trunk) / "config.toml"
    file.write_text(file.read_text().replace('"wsd"', '"cosine"'))
    with pytest.raises(RunError, match="schedule is cosine.*--optim.schedule=wsd"):
        train.train(branch(tiny, trunk, "train.max_steps=8"))


@pytest.mark.parametrize(
    "last, old, new, allowed",
    # the decay of 16 steps begins at 12, of 20 at 15
    [(12, 16, 20, True), (13, 16, 20, False), (16, 16, 20, False)]
    # of 12 at 9
    + [(9, 16, 12, True), (10, 16, 12, False), (14, 20, 16, False), (15, 16, 16, True)],
)
def test_length_of_a_run_may_change_until_either_decay(tiny, last, old, new, allowed):
    wsd = ["optim.schedule=wsd", FRACTION]
    run_folder = RunFolder(path_of(tiny()))
    (run_folder.checkpoint_folder / f"step_{last:08d}").mkdir(parents=True)
    run_folder.write_config(tiny(*wsd, f"train.max_steps={old}"))
    longer = tiny(*wsd, f"train.max_steps={new}")
    said = f"{old} -> {new}, .* at step {last}, .* --train.max_steps={old}, or branch"
    with nullcontext() if allowed else pytest.raises(RunError, match=said):
        check_length(run_folder, longer)
    with pytest.raises(RunError, match="the run ends before step 9, .*--train.max_steps=9"):
        check_length(run_folder, tiny("train.max_steps=8", "train.keep_steps=2,9"))
    check_length(RunFolder("runs/none"), longer)
    check_length(run_folder, tiny(f"train.max_steps={new}"))  # a cosine follows


def test_longer_run_equals_one_that_had_its_length_from_the_start(tiny, trunk):
    for step in (12, 16):
        shutil.rmtree(checkpoints(trunk) / f"step_{step:08d}")
    # also the last
    longer = [*TRUNK, "train.max_steps=20", "train.keep_steps=11,20", "train.keep_checkpoints=1"]
    alone = tiny(*longer, "run.name=alone")
    for config in (tiny(*longer), alone):
        run(config)
    assert end(tiny(*longer)) == end(alone) and steps(trunk) == [6, 9, 11, 12, 20]
    assert RunFolder(path_of(trunk)).recorded.train.keep_steps == "6,9,11,12,20"
