"""runtime/identity.py: a run whose folder is another one, and runs that are older than ids.

tests/test_damage.py has files of another run.
"""

import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from runs import ALONE, change_facts, checkpoints, content, end, metrics, run, steps

import train
from configure.schema import Train
from eval.trained import load_model
from runtime import RunError, checkpoint
from runtime.folder import RunFolder, path_of
from runtime.identity import read_id
from runtime.runs import Run


# ---- the folder is another one
def put_another_run(place, old):
    shutil.copytree(old, place)
    (place / "run_id").write_text("0123456789abcdef")


def put_nothing(place, old):
    pass


MOVES = [
    (put_another_run, "another one is there"),
    (lambda place, old: shutil.copytree(old, place), "another one"),
    (put_nothing, "removed"),
]


@pytest.mark.parametrize("move, said", MOVES)
def test_a_run_stops_once_its_folder_is_another_one(
    tiny, before_steps, saves_end_first, tmp_path, move, said
):
    """Nothing is written, removed or repaired there."""
    saves_end_first()
    config = tiny(
        "train.max_steps=9",
        "train.checkpoint_interval=2",
        "train.keep_checkpoints=1",
        "eval.interval=9",
    )
    place, old = path_of(config), tmp_path / "old"
    left = []

    def act(step):
        if step == 5:
            place.rename(old)
            move(place, old)
            if place.exists():  # a save of the other run
                (place / "checkpoints/step_00000006.tmp").mkdir()
            left.extend([*place.rglob("*"), content(place)])

    before_steps(act)
    with pytest.raises(RunError, match=f"^{place}: this run's folder was .*{said}"):
        train.train(config)
    assert [*place.rglob("*"), content(place)] == left
    assert checkpoint.steps(old / "checkpoints") == [4]
    before_steps(None)
    shutil.rmtree(place, ignore_errors=True)
    old.rename(place)
    assert metrics(config)[-1]["step"] >= 5
    run(config)  # the remedy
    assert steps(config) == [9]


@pytest.mark.parametrize("fails_at, left", [*enumerate([
    ["step_00000001"],  # before anything is written
    ["step_00000001", "step_00000002.tmp"],  # before it is published
    ["step_00000001", "step_00000002"],  # before an old one is removed
    ["step_00000002"],
])])  # fmt: skip
def test_a_save_compares_the_folder_at_each_change(tmp_path, fails_at, left):
    identity = mock.Mock()
    identity.check.side_effect = [None] * fails_at + [RunError("moved")] * 2
    (tmp_path / "step_00000001").mkdir()
    saver = checkpoint.Saver(tmp_path, ALONE, False, Train(keep_checkpoints=1), identity)
    saver._save(2, {"tensor": torch.ones(3)}, {})
    assert (saver.failure is None) == (fails_at == 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


# ---- runs that are older than ids
def make_old(place):
    """Leave a run as e125ff1 wrote it: without ids, and with the model's settings alone."""
    (place / "run_id").unlink()
    file = place / "metrics.jsonl"
    file.write_text(file.read_text().partition("\n")[2])
    for file in place.glob("arrays/*.npz"):
        arrays = dict(np.load(file))
        del arrays["run_id"]
        np.savez(file, **arrays)

    def change(facts):
        del facts["run_id"]
        settings = facts.pop("settings")
        facts["model_settings"] = {"model.norm_eps": settings["model.norm_eps"]}

    for path in place.glob("checkpoints/*"):
        change_facts(path, change)


def test_an_older_run_is_read_and_resumes_to_the_bit_with_an_id(tiny):
    own = ["train.max_steps=6", "train.keep_steps=3"]
    for name in ("tiny", "alone"):
        run(tiny(*own, f"run.name={name}"))
    place = path_of(tiny())
    make_old(place)
    assert load_model(place).step == 6 and read_id(place) == ""
    assert len(Run(place).evaluations) == 4
    file = place / "config.toml"
    text = file.read_text()
    file.write_text(text.replace("\nlr = ", "\nlr = 0.1 # "))  # it knows nothing of that
    load_model(place)
    file.write_text(text.replace("\nnorm_eps = ", "\nnorm_eps = 0.1 # "))
    with pytest.raises(RunError, match="model.norm_eps: 1e-05 -> 0.1"):
        load_model(place)
    file.write_text(text)
    shutil.rmtree(place / "checkpoints/step_00000006")
    run(tiny(*own))
    assert end(tiny(*own)) == end(tiny(*own, "run.name=alone"))
    run_id = read_id(place)
    facts = checkpoint.verify(checkpoints(tiny()) / "step_00000006")["facts"]
    assert len(run_id) == 16 and facts["run_id"] == run_id and "model_settings" not in facts
    (place / "run_id").unlink()  # lost: it is that of the checkpoints
    run(tiny(*own, "train.max_steps=7"))
    assert read_id(place) == run_id != read_id(place.with_name("alone"))


def test_a_damaged_id_is_named(tmp_path):
    file = tmp_path / "run_id"
    for damaged in ("", "0123", "no id of a run", "0123456789ABCDEF"):
        file.write_text(damaged)
        with pytest.raises(RunError, match="run_id: damaged, .*remove it"):
            RunFolder(tmp_path).claim(ALONE).__enter__()
    file.unlink()
    with RunFolder(tmp_path).claim(ALONE):
        assert len(read_id(tmp_path)) == 16
