"""runtime/folder.py: which folder a run goes to."""

import shutil

import pytest
import torch

import train
from configure import is_name_chosen, load
from runtime import RunError
from runtime.distributed import Ranks
from runtime.folder import MAX_SUFFIX, RunFolder, find_or_rename, path_of


def changes(config):
    return RunFolder(path_of(config)).find_changes(config)


@pytest.fixture
def config_of(tmp_path):
    """A function: the config of mine.toml, which names no run, with overrides."""
    file = tmp_path / "mine.toml"
    file.write_text(f"run.dir = '{(tmp_path / 'runs').as_posix()}'\n")
    return lambda *overrides: load(file, overrides)


def begin(config):
    """Find the run's folder as train.py does, and leave its config there; returns the folder's name."""
    config = find_or_rename(config)
    path_of(config).mkdir(parents=True, exist_ok=True)
    RunFolder(path_of(config)).write_config(config)
    return config.run.name


def test_another_config_goes_to_a_folder_named_by_what_differs(config_of, capsys):
    assert begin(config_of()) == "mine-kern"
    assert capsys.readouterr().out == ""
    assert begin(config_of("optim.lr=1e-3")) == "mine-kern-lr0.001"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("runs/mine-kern-lr0.001") and "mine-kern holds a run with another config" in line
    assert begin(config_of("optim.lr=1e-3", "model.tie_embeddings=false")) == "mine-kern-tie_embeddingsFalse-lr0.001"
    assert begin(config_of("data.name=arxiv")) == "mine-kern-arxiv"


def test_the_same_config_finds_its_own_folder_again(config_of):
    names = {begin(config_of(*words)): words for words in ([], ["optim.lr=1e-3"], ["optim.lr=1e-2"])}
    assert len(names) == 3
    for name, words in names.items():
        assert find_or_rename(config_of(*words)).run.name == name
        assert find_or_rename(config_of(*words, "log.interval=3", "train.max_steps=9000")).run.name == name
    shutil.rmtree(path_of(config_of()))  # the folder that the others are named after
    assert find_or_rename(config_of("optim.lr=1e-2")).run.name == "mine-kern-lr0.01"
    assert find_or_rename(config_of("optim.lr=2")).run.name == "mine-kern"


def test_a_run_of_before_an_axis_was_added_is_found(config_of):
    begin(config_of("run.name=mine-kern"))
    assert find_or_rename(config_of("run.name=mine-kern-lr0.0006")).run.name == "mine-kern"
    assert find_or_rename(config_of("run.name=mine-kern-lr1", "optim.lr=1")).run.name == "mine-kern-lr1"


def test_long_names_become_a_hash(config_of):
    begin(config_of())
    many = ["optim.lr=1", "optim.beta1=0.5", "optim.beta2=0.5", "optim.eps=1", "optim.weight_decay=0.5"]
    many.append("model.n_layer=3")
    name = begin(config_of(*many))
    assert len(name) == len("mine-kern-") + 8 and find_or_rename(config_of(*many)).run.name == name
    others = {find_or_rename(config_of(*many, f"optim.grad_clip={clip}")).run.name for clip in (2, 3)}
    assert len(others | {name}) == 3
    assert len("n_layer3-lr1.0") < MAX_SUFFIX


def test_a_taken_name_gets_a_hash(config_of):
    begin(config_of())
    first = find_or_rename(config_of("optim.lr=1e-3"))
    path_of(first).mkdir(parents=True)
    RunFolder(path_of(first)).write_config(config_of("optim.lr=0.5"))  # edited by hand
    second = find_or_rename(config_of("optim.lr=1e-3")).run.name
    assert second not in ("mine-kern", first.run.name) and begin(config_of("optim.lr=1e-3")) == second
    assert find_or_rename(config_of("optim.lr=1e-3")).run.name == second


def test_a_broken_neighbour_is_no_obstacle(config_of):
    begin(config_of())
    neighbour = path_of(config_of()).with_name("mine-kern-old")
    neighbour.mkdir()
    (neighbour / "config.toml").write_text("[model]\nno_such_key = 1\n")
    assert find_or_rename(config_of("optim.lr=1e-3")).run.name == "mine-kern-lr0.001"


def test_checkpoints_without_a_config_are_refused(config_of):
    (path_of(config_of()) / "checkpoints/step_00000002").mkdir(parents=True)
    with pytest.raises(RunError, match="has checkpoints but no config.toml"):
        find_or_rename(config_of())


def test_a_chosen_name_is_refused_as_before(tiny_file, capsys):
    assert is_name_chosen(tiny_file) and is_name_chosen(tiny_file, ["--run.name=other"])
    assert train.main([str(tiny_file)]) == 0
    assert train.main([str(tiny_file), "--optim.lr=1e-3"]) == 2
    assert "holds a run with another config:\n  optim.lr: 0.003 -> 0.001" in capsys.readouterr().err


def test_an_edited_file_trains_beside_the_first_run(tiny_file, capsys):
    text = tiny_file.read_text().replace('name = "tiny"\ndir', "dir", 1)
    tiny_file.write_text(text)
    assert not is_name_chosen(tiny_file)
    assert train.main([str(tiny_file)]) == 0
    tiny_file.write_text(text.replace("lr = 3e-3", "lr = 1e-3"))
    assert train.main([str(tiny_file)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("runs/tiny-kern-lr0.001") >= 2
    assert train.main([str(tiny_file)]) == 0
    assert "runs/tiny-kern-lr0.001: finished already, 4 steps" in capsys.readouterr().out


def test_a_type_that_was_chosen_for_the_run_is_no_difference(config_of):
    begun = find_or_rename(config_of("train.dtype=bfloat16"))  # as preflight records it
    path_of(begun).mkdir(parents=True)
    RunFolder(path_of(begun)).write_config(begun)
    assert changes(config_of("train.dtype=auto")) == [] and find_or_rename(config_of()).run.name == "mine-kern"
    assert begin(config_of("optim.lr=1e-3")) == "mine-kern-lr0.001"
    with pytest.raises(RunError, match="train.dtype: 'bfloat16' -> 'float32'"):
        changes(config_of("train.dtype=float32"))
    with pytest.raises(RunError, match=r"(?s)another config.*none: no such data set either"):
        changes(config_of("data.name=none"))


def test_the_name_of_a_new_folder_survives_a_power_failure(tmp_path, disk_calls):
    with RunFolder(tmp_path / "runs" / "new").claim(Ranks(0, 1, torch.device("cpu"))):
        assert disk_calls == ["sync runs"] and RunFolder(tmp_path / "runs" / "new").find_owner().startswith("process ")
