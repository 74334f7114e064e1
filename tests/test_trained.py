"""eval/trained.py: a run's weights and tokenizer."""

import json

import pytest
import torch
from corpora import write_ids

import train
from data.tokenizer import ByteTokenizer
from eval.trained import load_model, load_run
from runtime import RunError, folder


@pytest.fixture
def run(tiny):
    """A run folder with checkpoints of steps 2, 4, 6 and 8, whose data set is named like the run."""
    config = tiny("train.max_steps=8", "train.checkpoint_interval=2", "train.keep_checkpoints=9")
    train.train(config)
    return folder.path_of(config)


def test_average_is_the_mean_of_the_last_checkpoints(run):
    states = [load_model(run, step).model.state_dict() for step in (4, 6)]
    mean = load_model(run, 6, average=2)
    assert (mean.step, mean.label) == (6, "step_00000006_mean2") and not mean.model.training
    for name, tensor in mean.model.state_dict().items():
        wanted = (states[0][name].double() + states[1][name].double()) / 2
        torch.testing.assert_close(tensor, wanted.float(), rtol=0, atol=0)
    assert not torch.equal(mean.model.wte.weight, states[1]["wte.weight"])
    last = load_model(run)
    assert (last.step, last.label) == (8, "step_00000008")
    for wrong, word in ((0, "name 1 to 4"), (5, "name 1 to 4")):
        with pytest.raises(ValueError, match=f"--average {wrong}: .* has 4 checkpoint.* {word}"):
            load_model(run, average=wrong)
    with pytest.raises(ValueError, match="name 1 to 1"):
        load_model(run, 2, average=2)


def test_tokenizer_is_the_runs_own(run, corpus, tmp_path, monkeypatch):
    """The data set's; without the set, the known one of the same hash; never another."""
    trained, tokenizer = load_run(run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert tokenizer.eot == 256 and [line["step"] for line in trained.metrics] == [line["step"] for line in lines]
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace(corpus.as_posix(), (tmp_path / "gone").as_posix()))
    assert load_run(run)[1].eot == 256
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(ByteTokenizer, "hash", "0" * 64)
    with pytest.raises(ValueError, match="no known tokenizer is that of tiny"):
        load_run(run)
    write_ids(tmp_path / "gone/tiny", range(99), range(99), tokenizer=ByteTokenizer())
    assert json.loads((tmp_path / "gone/tiny/meta.json").read_text())["tokenizer"]["hash"] == "0" * 64
    with pytest.raises(ValueError, match="gone/tiny: its tokenizer .'bytes'. is not that of tiny"):
        load_run(run)


def test_damaged_checkpoints_are_named(run, capsys):
    *older, newest = sorted((run / "checkpoints").glob("step_*"))
    newest.rename(f"{newest}.damaged")
    assert load_model(run).step == 6
    assert "step 8 is damaged; using that of step 6" in capsys.readouterr().out
    for path in older:
        path.rename(f"{path}.damaged")
    with pytest.raises(RunError, match="it has none; damaged: 2, 4, 6, 8"):
        load_model(run)
