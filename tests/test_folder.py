"""runtime/folder.py: which folder a run goes to, what may change when it resumes, who may write
there.
"""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_runs import with_other
from runs import ALONE, content, steps

import train
from configure import is_name_chosen, load
from configure.schema import KEYS
from runtime import RunError, Stopped
from runtime.distributed import Ranks
from runtime.folder import RunFolder, find_or_rename, path_of
from runtime.runs import Run


@pytest.fixture
def config_of(tmp_path):
    """A function: the config of mine.toml, which names no run, with overrides."""
    file = tmp_path / "mine.toml"
    file.write_text(f"run.dir = '{(tmp_path / 'runs').as_posix()}'\n")
    return lambda *overrides: load(file, overrides)


def leave_config(config):
    """Make the run's folder with this config; returns it."""
    run = RunFolder(path_of(config))
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_config(config)
    return RunFolder(run.path)


def begin(config):
    """Find the run's folder as train.py does, and leave its config there; returns its name."""
    config = find_or_rename(config)
    leave_config(config)
    return config.run.name


# ---- which folder
def test_each_config_has_a_folder_of_its_own_and_finds_it_again(config_of, capsys):
    assert begin(config_of()) == "mine-kern" and capsys.readouterr().out == ""
    assert begin(config_of("optim.lr=1e-3")) == "mine-kern-lr0.001"
    (line,) = capsys.readouterr().out.splitlines()
    assert "another config (optim.lr: 0.0006 -> 0.001)" in line
    assert line.endswith("runs/mine-kern-lr0.001")
    neighbour = path_of(config_of()).with_name("mine-kern-none")
    neighbour.mkdir()
    (neighbour / "config.toml").write_text("[model]\nno_such_key = 1\n")  # no obstacle
    assert begin(config_of("data.name=arxiv")) == "mine-kern-arxiv"
    more = ["log.interval=3", "train.max_steps=9000"]
    for overrides, name in (
        (more, "mine-kern"),
        ([*more, "optim.lr=1e-3"], "mine-kern-lr0.001"),
        # from before an axis was added; a name that only begins like it is another run
        (["run.name=mine-kern-lr0.0006"], "mine-kern"),
        (["run.name=mine-kern-x"], "mine-kern"),
        (["run.name=mine-kernel"], "mine-kernel"),
        (["run.name=mine-ker"], "mine-ker"),
    ):
        assert find_or_rename(config_of(*overrides)).run.name == name
    shutil.rmtree(path_of(config_of()))  # the folder that the others are named after
    assert find_or_rename(config_of("optim.lr=1e-3")).run.name == "mine-kern-lr0.001"
    (path_of(config_of()) / "checkpoints/step_00000002").mkdir(parents=True)
    with pytest.raises(RunError, match="has checkpoints but no config.toml.*--fresh"):
        find_or_rename(config_of())


def test_a_run_that_has_ended_is_not_trained_on_to_another_length(config_of, capsys):
    """Nor is one whose name has its length, as in a sweep of lengths."""
    assert begin(config_of("train.max_steps=10_000")) == "mine-kern"
    assert begin(config_of("train.max_steps=20_000")) == "mine-kern"  # it has not ended
    lines = '{"step": 20000, "tokens": 1, "val/loss": 2.0}\n'
    (path_of(config_of()) / "metrics.jsonl").write_text(lines)
    assert capsys.readouterr().out == ""
    for length in (30_000, 40_000, 30_000, 10_000):
        name = begin(config_of(f"train.max_steps={length}"))
        assert name == f"mine-kern-max_steps{length}"
    assert begin(config_of("train.max_steps=20_000")) == "mine-kern"
    of_50 = path_of(config_of()).with_name("mine-kern-other")
    shutil.copytree(path_of(config_of()), of_50)  # one that cannot be read is no obstacle
    (of_50 / "metrics.jsonl").write_text("{}\n{}\n")
    assert begin(config_of("train.max_steps=50_000")) == "mine-kern-max_steps50000"
    # an unfinished run of another length does not hide the one of this length
    (path_of(config_of()) / "metrics.jsonl").unlink()
    assert (
        find_or_rename(config_of("train.max_steps=40_000")).run.name == "mine-kern-max_steps40000"
    )
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and "config (train.max_steps: 20000 -> 30000); this one" in said[0]


def test_an_edited_file_trains_beside_the_first_run_unless_its_name_was_chosen(tiny_file, call):
    assert is_name_chosen(tiny_file) and is_name_chosen(tiny_file, ["--run.name=other"])
    text = tiny_file.read_text().replace('name = "tiny"\ndir', "dir", 1)
    for lr, name in (("3e-3", "tiny-kern"), ("1e-3", "tiny-kern-lr0.001")):
        tiny_file.write_text(text.replace("lr = 3e-3", f"lr = {lr}"))
        assert not is_name_chosen(tiny_file)
        printed = call(train.main, tiny_file)
        assert f"runs/{name}: kern" in printed
        assert ("this one goes to" in printed) == (name != "tiny-kern")
        assert f"runs/{name}: finished already, 4 steps" in call(train.main, tiny_file)
    said = "runs/tiny-kern holds a run with another config:\n  optim.lr: 0.003 -> 0.001"
    assert said in call(train.main, tiny_file, "--run.name=tiny-kern", code=2)


def test_fresh_starts_over_in_a_new_folder(tiny, tiny_file, monkeypatch, call):
    command = [train.main, tiny_file, "--train.max_steps=2", "--fresh"]
    place = Path(tiny().run.dir)
    for name in ("tiny", "tiny-2", "tiny-3"):
        before = content(place)
        assert f"{name}: kern" in call(*command) and steps(tiny(f"run.name={name}")) == [2]
        assert before.items() <= content(place).items()
    # a second try is not a fourth run
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert "--run.name=NAME" in call(*command, code=2)
    assert {path.name for path in place.iterdir()} == {"tiny", "tiny-2", "tiny-3"}


# ---- what may change
def test_keys_that_change_what_is_trained_are_refused_by_name(tiny):
    config = tiny("train.keep_steps=2", "train.max_steps=6")
    run = leave_config(config)
    for key in KEYS.keys() - {"run.name"}:
        changed = with_other(config, key)
        section, name = key.split(".")
        old, new = (getattr(getattr(each, section), name) for each in (config, changed))
        if KEYS[key]["resume"]:  # docs/reliability.md lists them, see test_pages
            new = "2,4" if key == "train.keep_steps" else new  # what was kept stays
            assert run.find_changes(changed) == [f"{key}: {old!r} -> {new!r}"]
            assert run.holds(changed)
        else:
            with pytest.raises(RunError, match="another config(?s:.*)--run.name=NAME") as caught:
                run.find_changes(changed)
            assert f"\n  {key}: {old!r} -> {new!r}\n" in str(caught.value)
            assert not run.holds(changed)
    for scope, coef, refused in (
        ("micro_batch", 0.1, True),
        ("micro_batch", 0, False),
        ("global", 0.1, False),
    ):
        own = [f"train.balance_loss_scope={scope}", f"train.balance_loss_coef={coef}"]
        run = leave_config(tiny(*own))
        assert run.holds(tiny(*own, "train.micro_batch_size=4")) != refused


def test_what_a_resume_keeps(config_of):
    """The type that "auto" stood for, and checkpoints that the shorter run still reaches."""
    own = ["train.keep_steps=3,7,9", "train.max_steps=9"]
    leave_config(config_of("train.dtype=bfloat16", *own))  # as preflight records it
    run = RunFolder(path_of(config_of()))
    shorter = config_of("train.dtype=auto", "train.keep_steps=4", "train.max_steps=7")
    kept = run.keep_recorded(shorter).train
    assert (kept.dtype, kept.keep_steps) == ("bfloat16", "3,4,7")
    assert run.keep_recorded(config_of(*own, "train.keep_steps=9,3,7")).train.keep_steps == "9,3,7"
    assert run.find_changes(config_of(*own)) == []
    with pytest.raises(RunError, match="train.dtype: 'bfloat16' -> 'float32'"):
        run.find_changes(config_of(*own, "train.dtype=float32"))


# ---- who may write there
def test_claim_and_config_survive_a_power_failure(disk_calls, tiny):
    run = RunFolder(path_of(tiny()))
    assert run.recorded is None and run.last_step == 0
    with run.claim(ALONE):
        owner = rf"\(process {os.getpid()} on {os.uname().nodename}\)"
        with pytest.raises(RunError, match=f"trains this run {owner}.*--fresh"):
            train.train(tiny())
        assert {path.name for path in run.path.iterdir()} == {"lock", "run_id"}
        with run.claim(Ranks(1, 2, torch.device("cpu"))):  # another rank of the job
            run.write_config(tiny())
    assert disk_calls == [
        *("sync runs", "sync run_id.tmp", "rename run_id", "sync tiny"),
        "sync runs",  # of the start that is refused
        *("sync config.toml.tmp", "rename config.toml", "sync tiny"),
    ]
    assert Run(run.path).config == tiny()
    with run.claim(ALONE):  # whoever held it before is forgotten
        assert (run.path / "lock").read_text().count("process") == 1


@pytest.mark.parametrize("error, state, trouble", [
    (RunError("tiny: no space. Make room"), "failed", "tiny: no space"),
    (MemoryError(), "failed", "MemoryError"),
    (Stopped("saved"), "stopped", ""),
    (KeyboardInterrupt(), "stopped", ""),
])  # fmt: skip
def test_an_error_is_written_to_the_folder_until_the_next_start(
    tiny, monkeypatch, error, state, trouble
):
    run = leave_config(tiny())
    for trained in (True, False):  # a start that was refused leaves the run as it was
        with pytest.raises(type(error) if trained else RunError), run.claim(ALONE):
            if not trained:
                raise RunError("refused")
            run.write_config(tiny())
            raise error
        status = Run(run.path).status
        assert (status.state, status.trouble) == (state, trouble)
        run = RunFolder(run.path)
    with run.claim(ALONE):
        run.write_config(tiny())
    assert Run(run.path).status.state == "stopped"
    with monkeypatch.context() as patch, pytest.raises(type(error)), run.claim(ALONE):
        patch.setattr("runtime.folder.write_atomic", mock.Mock(side_effect=OSError("full disk")))
        raise error  # which a failure to write it must not hide
